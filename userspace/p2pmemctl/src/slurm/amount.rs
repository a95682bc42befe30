// SPDX-License-Identifier: MIT OR Apache-2.0

//! Slurm's text forms of amounts of a generic resource (GRES).

use anyhow::{bail, ensure};

/// Slurm's suffixes of counts. Each is 1024 times the one before.
const SUFFIXES: [(char, u32); 5] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50)];

/// Returns a number of bytes as a count of gres.conf and slurm.conf: exact, with the largest suffix that permits it.
pub(super) fn count(bytes: u64) -> String {
    let exact = |(_, shift): &&(char, u32)| bytes != 0 && bytes.trailing_zeros() >= *shift;
    match SUFFIXES.iter().rev().find(exact) {
        Some((suffix, shift)) => format!("{}{suffix}", bytes >> shift),
        None => bytes.to_string(),
    }
}

fn parse_count(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().next_back()? {
        (at, last) if !last.is_ascii_digit() => {
            let (_, shift) = SUFFIXES.iter().find(|(suffix, _)| suffix.eq_ignore_ascii_case(&last))?;
            (&text[..at], *shift)
        }
        _ => (text, 0),
    };
    // u64's own parser accepts a sign.
    if !digits.bytes().all(|c| c.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Returns the bytes of the resource `name` in a list of resources: those that a job requests (`gpu:2,p2pmem:64M`), or those that
/// Slurm allocated on a node (`gpu:2(IDX:0-1),p2pmem(CNT:67108864)`). Amounts of several types add up. 0 if the list does not name
/// the resource.
pub(super) fn bytes(list: &str, name: &str) -> anyhow::Result<u64> {
    let mut sum = 0_u64;
    for entry in entries(list) {
        let own = entry.strip_prefix("gres/").or_else(|| entry.strip_prefix("gres:"));
        let own = own.unwrap_or(entry);
        let Some(amount) = own.strip_prefix(name) else { continue };
        if !amount.is_empty() && !amount.starts_with([':', '(', '=']) {
            // Another resource, whose name has this one as its beginning.
            continue;
        }
        match amount_of(amount).and_then(|bytes| sum.checked_add(bytes)) {
            Some(all) => sum = all,
            None => bail!(
                "{entry:?} in the GRES {list:?} has no amount of bytes: the form is {name}:64M, {name}:TYPE:64M, or \
                 {name}(CNT:67108864)"
            ),
        }
    }
    Ok(sum)
}

/// Parses what follows the name of a resource: `:COUNT`, `:TYPE:COUNT`, `=COUNT`, `(CNT:COUNT)`, or `:COUNT(IDX:...)`.
fn amount_of(text: &str) -> Option<u64> {
    let (text, details) = match text.split_once('(') {
        Some((text, details)) => (text, Some(details.strip_suffix(')')?)),
        None => (text, None),
    };
    match details.and_then(|details| details.strip_prefix("CNT:")) {
        Some(count) => parse_count(count),
        None => parse_count(&text[text.rfind([':', '='])? + 1..]),
    }
}

/// Splits a list at its commas, except at commas in parentheses.
fn entries(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    let parts = list.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|entry| !entry.is_empty())
}

/// Checks the name of a resource.
pub(super) fn check_name(name: &str) -> anyhow::Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    ensure!(
        name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(plain),
        "{name:?} is not the name of a GRES: use letters, digits, dashes, and underscores"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_exact() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1023, "1023"),
            (1 << 10, "1K"),
            (256 << 20, "256M"),
            ((256 << 20) + 4096, "262148K"),
            (3 << 30, "3G"),
            (1 << 60, "1024P"),
            (u64::MAX, "18446744073709551615"),
        ] {
            assert_eq!(count(bytes), text);
            assert_eq!(parse_count(text), Some(bytes), "{text}");
        }
        for bad in ["", "M", "-1", "+1", "1.5M", "1MB", "1X", "16384P", "\u{e9}"] {
            assert_eq!(parse_count(bad), None, "{bad}");
        }
    }

    #[test]
    fn amounts_of_the_resource_add_up() {
        for (list, expected) in [
            ("", 0),
            ("gpu:2", 0),
            ("p2pmem2:64M,p2pmemory", 0),
            ("p2pmem:64M", 64 << 20),
            ("gres/p2pmem:64M,gres/gpu:tesla:1", 64 << 20),
            ("gres:p2pmem=1g", 1 << 30),
            ("gpu:2(IDX:0,2),p2pmem(CNT:67108864)", 64 << 20),
            ("p2pmem:near:32M(IDX:0), p2pmem:far(CNT:1024)", (32 << 20) + 1024),
            ("p2pmem:0", 0),
        ] {
            assert_eq!(bytes(list, "p2pmem").unwrap(), expected, "{list}");
        }
        for bad in [
            "p2pmem",
            "p2pmem:",
            "p2pmem:near",
            "p2pmem(CNT:)",
            "p2pmem(CNT:1",
            "gpu:1,p2pmem:64MB",
            "p2pmem:9P,p2pmem:16383P",
        ] {
            let error = bytes(bad, "p2pmem").unwrap_err().to_string();
            assert!(error.contains("the form is p2pmem:64M"), "{bad}: {error}");
            assert_eq!(error.lines().count(), 1);
        }
    }
}
