// SPDX-License-Identifier: MIT OR Apache-2.0

//! The format of a frame: a header of 64 bytes and the samples.
//!
//! | offset | width | content |
//! |---|---|---|
//! | 0 | 8 | [`MAGIC`] |
//! | 8 | 8 | position in the ring's order, counted from 1; written last, with one access |
//! | 16 | 8 | sequence number, counted from 0; dropped frames have a number too |
//! | 24 | 8 | time of the first sample, in samples since the start |
//! | 32 | 4 | bytes of samples |
//! | 36 | 4 | CRC-32C of the samples |
//! | 40 | 8 | seed of the samples |
//! | 48 | 16 | 0 |
//!
//! Samples are int8. A reader can compute them from the seed and the sequence number: see [`fill_samples`].

/// The first 8 bytes of a frame.
pub const MAGIC: u64 = u64::from_le_bytes(*b"P2PFRAME");
/// Bytes of the header.
pub const HEADER_SIZE: usize = 64;
/// Offset of the position in the header.
pub const POSITION: u64 = 8;

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Position in the ring's order, counted from 1. 0 while the device writes the frame.
    pub position: u64,
    /// Sequence number. A gap means that the device has dropped frames.
    pub sequence: u64,
    /// Time of the first sample, in samples since the start.
    pub time: u64,
    /// Bytes of samples.
    pub payload: u32,
    /// CRC-32C of the samples.
    pub crc32c: u32,
    /// Seed of the samples.
    pub seed: u64,
}

impl Header {
    /// Returns the bytes of the header.
    pub fn to_bytes(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        for (at, word) in [
            (0, MAGIC),
            (8, self.position),
            (16, self.sequence),
            (24, self.time),
            (32, u64::from(self.payload) | (u64::from(self.crc32c) << 32)),
            (40, self.seed),
        ] {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a header. Returns `None` if the bytes are no header.
    pub fn from_bytes(bytes: &[u8; HEADER_SIZE]) -> Option<Self> {
        let word = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .rev()
                .fold(0, |word, byte| (word << 8) | u64::from(*byte))
        };
        (word(0) == MAGIC && word(48) == 0 && word(56) == 0).then(|| Self {
            position: word(8),
            sequence: word(16),
            time: word(24),
            payload: word(32) as u32,
            crc32c: (word(32) >> 32) as u32,
            seed: word(40),
        })
    }
}

/// The finaliser of SplitMix64.
const fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Writes the samples of frame `sequence` to `data`, from sample `8 * first` on.
///
/// Samples `8 * i` to `8 * i + 7` are the bytes of `mixed(start + i)`, the lowest first. `start` is
/// `mixed(seed ^ mixed(sequence + 1))`, and `mixed` is the finaliser of SplitMix64.
pub fn fill_samples(seed: u64, sequence: u64, first: u64, data: &mut [u8]) {
    let start = mixed(seed ^ mixed(sequence.wrapping_add(1))).wrapping_add(first);
    for (i, chunk) in data.chunks_mut(8).enumerate() {
        let bytes = mixed(start.wrapping_add(i as u64)).to_le_bytes();
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_reads_back_and_rejects_others() {
        let header = Header {
            position: 7,
            sequence: 9,
            time: 9 * 4032,
            payload: 4032,
            crc32c: 0x8765_4321,
            seed: 0x1122_3344_5566_7788,
        };
        let bytes = header.to_bytes();
        assert_eq!(Header::from_bytes(&bytes), Some(header));
        for at in (0..8).chain(48..64) {
            let mut other = bytes;
            other[at] ^= 1;
            assert_eq!(Header::from_bytes(&other), None, "{at}");
        }
    }

    #[test]
    fn samples_do_not_depend_on_the_step() {
        let mut all = [0; 1001];
        fill_samples(3, 4, 0, &mut all);
        let mut parts = [0; 1001];
        for (i, part) in parts.chunks_mut(64).enumerate() {
            fill_samples(3, 4, 8 * i as u64, part);
        }
        assert_eq!(all, parts);
        let mut next = [0; 1001];
        fill_samples(3, 5, 0, &mut next);
        assert_ne!(all, next);
        // The finaliser of SplitMix64 of 0, as published.
        assert_eq!(mixed(0), 0xe220_a839_7b1d_cdaf);
    }
}
