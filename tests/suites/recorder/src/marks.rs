// SPDX-License-Identifier: MIT OR Apache-2.0

//! What was acknowledged, written to a file on each drive after the acknowledgement. A prefix of the drive's log shows by its
//! last mark what was acknowledged before.

use std::collections::BTreeSet;

use crate::log::{Entry, Log};

/// The bytes of a mark.
pub const PAGE: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"ackmark\0");
/// The first byte of the bits, one for each sequence number.
const BITS: usize = 64;
/// The largest number of sequence numbers.
pub const SEQUENCES: u64 = ((PAGE - BITS) * 8) as u64;

/// What was acknowledged up to a moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mark {
    /// Counts the marks, from 0.
    pub number: u64,
    /// The recording of the blocks.
    pub recording: u64,
    /// The salt of its payload.
    pub salt: u64,
    /// The sequence numbers of the blocks that were acknowledged.
    pub acknowledged: BTreeSet<u64>,
}

impl Mark {
    /// Returns the bytes of the mark.
    ///
    /// # Panics
    ///
    /// A sequence number is not less than [`SEQUENCES`].
    pub fn encode(&self) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        for (at, word) in [MAGIC, self.number, self.recording, self.salt].iter().enumerate() {
            page[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        for sequence in &self.acknowledged {
            assert!(*sequence < SEQUENCES, "sequence number {sequence}");
            page[BITS + *sequence as usize / 8] |= 1 << (sequence % 8);
        }
        page
    }

    /// Returns the mark in a page, if it has one.
    pub fn decode(page: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(page.get(at..at + 8)?.try_into().ok()?));
        if page.len() != PAGE || word(0)? != MAGIC {
            return None;
        }
        let bit = |sequence: &u64| page[BITS + *sequence as usize / 8] & (1 << (sequence % 8)) != 0;
        Some(Self {
            number: word(8)?,
            recording: word(16)?,
            salt: word(24)?,
            acknowledged: (0..SEQUENCES).filter(bit).collect(),
        })
    }
}

/// Returns the marks of a log, each with the number of its entry.
pub fn marks(log: &Log) -> Vec<(usize, Mark)> {
    let found = |(at, entry): (usize, &Entry)| Some((at, Mark::decode(log.data(entry))?));
    log.entries().iter().enumerate().filter_map(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Builder;

    #[test]
    fn marks_are_found_in_a_log() {
        let mark = |number, acknowledged: &[u64]| Mark {
            number,
            recording: 5,
            salt: u64::MAX,
            acknowledged: acknowledged.iter().copied().collect(),
        };
        let all = [mark(0, &[]), mark(1, &[3, 0]), mark(2, &[0, 3, 8, SEQUENCES - 1])];
        let log = Builder::new()
            .write(0, 1, 8)
            .entry(2, 16, &all[0].encode())
            .entry(2, 16, &all[1].encode())
            .write(8, 1, 8)
            .entry(2, 16, &all[2].encode())
            .log();
        let found = marks(&log);
        assert_eq!(found.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(found.into_iter().map(|(_, mark)| mark).collect::<Vec<_>>(), all);
    }

    #[test]
    fn other_pages_are_no_marks() {
        assert_eq!(Mark::decode(&[0; PAGE]), None);
        assert_eq!(Mark::decode(&Mark::default().encode()[..512]), None);
    }
}
