// SPDX-License-Identifier: MIT OR Apache-2.0

//! Sizes on the command line.

/// Parses a number of bytes with an optional suffix K, M, G or T for powers of 1024.
///
/// # Errors
///
/// A message that says why the text is invalid.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        Some((at, 't' | 'T')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("`{text}` is not a size such as 256M"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("{text} is too large"))
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn size_suffixes_are_parsed() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("256M"), Ok(256 << 20));
        assert_eq!(parse_size("1g"), Ok(1 << 30));
        for bad in ["", "M", "-1", "1.5G", "16777216T", "1µ", "12 K"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
