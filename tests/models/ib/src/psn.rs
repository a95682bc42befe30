// SPDX-License-Identifier: MIT OR Apache-2.0

//! Arithmetic of packet sequence numbers (PSN): 24 bits, modulo 2^24.

/// Mask of the bits of a PSN.
pub(crate) const MASK: u32 = 0xff_ffff;

/// Returns the PSN `n` after `psn`.
pub(crate) fn add(psn: u32, n: u32) -> u32 {
    psn.wrapping_add(n) & MASK
}

/// Returns the distance from `b` to `a`; negative if `a` is before `b`. Distances of 2^23 or more count as before.
pub(crate) fn diff(a: u32, b: u32) -> i32 {
    ((a.wrapping_sub(b) << 8) as i32) >> 8
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
    }

    #[test]
    fn message_takes_at_least_one_packet() {
        assert_eq!(packets(0, 256), 1);
        assert_eq!(packets(256, 256), 1);
        assert_eq!(packets(257, 256), 2);
        assert_eq!(packets(u32::MAX, 4096), 1 << 20);
    }
}
