// SPDX-License-Identifier: MIT OR Apache-2.0

//! Arithmetic of packet sequence numbers (PSN): 24 bits, modulo 2^24.

/// Mask of the bits of a PSN.
pub(crate) const MASK: u32 = 0xff_ffff;

/// Largest number of PSNs that may be outstanding: half of all.
pub(crate) const MAX_OUTSTANDING: u32 = 1 << 23;

/// Returns the PSN `n` after `psn`.
pub(crate) fn add(psn: u32, n: u32) -> u32 {
    psn.wrapping_add(n) & MASK
}

/// Returns the distance from `b` to `a`; negative if `a` is before `b`. Distances of 2^23 or more count as before.
pub(crate) fn diff(a: u32, b: u32) -> i32 {
    ((a.wrapping_sub(b) << 8) as i32) >> 8
}

/// Returns the number of PSNs from `first` on and before `end`.
pub(crate) fn count(first: u32, end: u32) -> u32 {
    end.wrapping_sub(first) & MASK
}

/// Returns whether a responder that expects `expected` next has already received a request with `count` PSNs from `first`
/// on. PSNs are reused, so only the last [`MAX_OUTSTANDING`] count.
pub(crate) fn is_repeated(first: u32, count: u32, expected: u32) -> bool {
    count <= MAX_OUTSTANDING && diff(first, expected) < 0 && diff(add(first, count), expected) <= 0
}

/// Returns the number of packets of a message of `length` bytes.
pub(crate) fn packets(length: u32, mtu: u32) -> u32 {
    length.div_ceil(mtu).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_arithmetic_is_circular() {
        assert_eq!(add(MASK, 1), 0);
        assert_eq!(diff(0, MASK), 1);
        assert_eq!(diff(MASK, 0), -1);
        assert_eq!(diff(5, 5), 0);
        assert_eq!(diff(0x7f_ffff, 0), 0x7f_ffff);
        assert_eq!(diff(0x80_0000, 0), -0x80_0000);
        assert_eq!(count(MASK, 2), 3);
        assert_eq!(count(7, 7), 0);
        assert_eq!(count(8, 7), MASK);
    }

    #[test]
    fn repeated_request_ends_at_or_before_expected_psn() {
        assert!(is_repeated(5, 3, 8));
        assert!(is_repeated(5, 1, 8));
        assert!(!is_repeated(5, 4, 8));
        assert!(!is_repeated(8, 1, 8));
        assert!(is_repeated(MASK, 2, 1));
        // The longest message with the smallest MTU, and the rest of it after its first responses.
        let expected = add(5, MAX_OUTSTANDING);
        assert!(is_repeated(5, MAX_OUTSTANDING, expected));
        assert!(is_repeated(6, MAX_OUTSTANDING - 1, expected));
        assert!(!is_repeated(6, MAX_OUTSTANDING, expected));
        assert!(!is_repeated(5, MAX_OUTSTANDING + 1, add(expected, 1)));
        assert!(!is_repeated(5, MASK, 4));
    }

    #[test]
    fn message_takes_at_least_one_packet() {
        assert_eq!(packets(0, 256), 1);
        assert_eq!(packets(256, 256), 1);
        assert_eq!(packets(257, 256), 2);
        assert_eq!(packets(u32::MAX, 4096), 1 << 20);
        assert_eq!(packets(1 << 31, 256), MAX_OUTSTANDING);
    }
}
