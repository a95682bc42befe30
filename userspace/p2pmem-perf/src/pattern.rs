// SPDX-License-Identifier: MIT OR Apache-2.0

//! The payload: a pattern that differs in every word of every slot. The test writes the pattern before the messages and
//! compares the target byte by byte after them.

use anyhow::{Context, Result};
use p2pmem_verbs::Span;
use serde::{Deserialize, Serialize};

use crate::sizes::Slots;

/// Error if the processor accesses a buffer whose provider was removed.
pub const REVOKED: &str =
    "the buffer of the messages was revoked: was its provider unpublished, or its device removed?";
/// Words that are processed at once.
const STEP: usize = 8192;
/// Bytes of a word.
const WORD: usize = 8;

/// The finaliser of SplitMix64: each bit of the argument changes about half of the bits of the result.
pub fn mixed(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Content of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// The payload of a source slot, by the slot's number.
    Source(u64),
    /// The initial content of the target: differs from any payload, and from run to run.
    Initial,
}

impl Content {
    /// Returns the start of the word sequence.
    fn start(self, seed: u64) -> u64 {
        match self {
            Self::Source(slot) => mixed(seed ^ mixed(slot.wrapping_add(1))),
            Self::Initial => mixed(!seed),
        }
    }

    /// Writes words of the sequence, from word `first`, to `words`.
    fn words(self, seed: u64, first: u64, words: &mut [u64]) {
        let start = self.start(seed).wrapping_add(first);
        for (i, word) in (0..).zip(words) {
            *word = mixed(start.wrapping_add(i)).to_le();
        }
    }
}

/// The bytes of a target that are wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// Number of wrong bytes.
    pub bytes: u64,
    /// Offset of the first wrong byte in the target.
    pub first_at: u64,
    /// Value of the first wrong byte.
    pub got: u8,
    /// Expected value of the first wrong byte.
    pub want: u8,
}

/// Result of the comparison of a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// Number of bytes compared.
    pub bytes: u64,
    /// CRC-32C of the target.
    pub crc32c: u32,
    /// CRC-32C of the expected bytes.
    pub expected_crc32c: u32,
    /// The wrong bytes; `None` if all bytes are correct.
    pub wrong: Option<Mismatch>,
}

impl Comparison {
    /// Returns the comparison of chunks and then of the whole target. The checksums are those of the target.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let wrong = match (self.wrong, other.wrong) {
            (Some(first), Some(second)) => Some(Mismatch {
                bytes: first.bytes + second.bytes,
                ..first
            }),
            (first, second) => first.or(second),
        };
        Self {
            bytes: self.bytes + other.bytes,
            wrong,
            ..other
        }
    }

    /// Returns whether every byte is correct.
    pub fn is_correct(&self) -> bool {
        self.wrong.is_none() && self.crc32c == self.expected_crc32c
    }
}

/// Splits `len` bytes at `at` into steps: (offset in the span, index of the first word, number of words).
fn steps(at: usize, len: usize) -> impl Iterator<Item = (usize, u64, usize)> {
    let words = len / WORD;
    (0..words)
        .step_by(STEP)
        .map(move |first| (at + first * WORD, first as u64, (words - first).min(STEP)))
}

fn fill(span: &Span, at: u64, len: u64, content: Content, seed: u64) -> Result<()> {
    let mut words = vec![0; STEP];
    for (at, first, count) in steps(at as usize, len as usize) {
        content.words(seed, first, &mut words[..count]);
        span.try_write(at, bytemuck::cast_slice(&words[..count]))
            .context(REVOKED)?;
    }
    Ok(())
}

/// Fills the source slots with payload.
///
/// # Errors
///
/// The buffer was revoked.
pub fn fill_source(span: &Span, slots: &Slots, seed: u64) -> Result<()> {
    (0..slots.source)
        .try_for_each(|slot| fill(span, slots.source_at(slot), slots.stride(), Content::Source(slot), seed))
}

/// Fills the target slots and `guard` bytes after them with the initial content.
///
/// # Errors
///
/// The buffer was revoked.
pub fn fill_target(span: &Span, slots: &Slots, guard: u64, seed: u64) -> Result<()> {
    fill(span, 0, slots.target_bytes() + guard, Content::Initial, seed)
}

/// Compares all target slots with their expected content after `messages` messages. The bytes between slots and the
/// `guard` bytes after the last slot must have the initial content.
///
/// # Errors
///
/// The buffer was revoked.
pub fn check_target(span: &Span, slots: &Slots, guard: u64, seed: u64, messages: u64) -> Result<Comparison> {
    let mut check = Checker::new(seed);
    for slot in 0..slots.target {
        let at = slots.target_at(slot);
        let payload = match slots.last_to(slot, messages) {
            Some(message) => Content::Source(message % slots.source),
            None => Content::Initial,
        };
        // The words of the initial content are numbered from the target's first byte.
        let from = if payload == Content::Initial { at } else { 0 };
        check.compare(span, at, slots.size, payload, from)?;
        let rest = at + slots.size;
        check.compare(span, rest, slots.stride() - slots.size, Content::Initial, rest)?;
    }
    check.compare(
        span,
        slots.target_bytes(),
        guard,
        Content::Initial,
        slots.target_bytes(),
    )?;
    Ok(check.result)
}

/// Compares memory with its expected content.
pub struct Checker {
    seed: u64,
    /// Whether checksums are computed.
    has_sums: bool,
    got: Vec<u64>,
    want: Vec<u64>,
    result: Comparison,
}

impl Checker {
    /// Creates a checker of single chunks. It computes no checksums, which would take most of its time.
    pub fn of_chunks(seed: u64) -> Self {
        Self {
            has_sums: false,
            ..Self::new(seed)
        }
    }

    /// Creates a checker of the pattern with this seed.
    fn new(seed: u64) -> Self {
        Self {
            seed,
            has_sums: true,
            got: vec![0; STEP],
            want: vec![0; STEP],
            result: Comparison {
                bytes: 0,
                crc32c: 0,
                expected_crc32c: 0,
                wrong: None,
            },
        }
    }

    /// Compares the target slot of a chunk with the chunk.
    ///
    /// # Errors
    ///
    /// The buffer was revoked.
    pub fn chunk(&mut self, span: &Span, slots: &Slots, chunk: u64) -> Result<()> {
        let content = Content::Source(chunk % slots.source);
        self.compare(span, slots.target_at(chunk), slots.size, content, 0)
    }

    /// Returns the result of all comparisons.
    pub fn result(self) -> Comparison {
        self.result
    }

    /// Compares `len` bytes at `at` with `content`, from byte `from` of the content.
    fn compare(&mut self, span: &Span, at: u64, len: u64, content: Content, from: u64) -> Result<()> {
        for (at, first, count) in steps(at as usize, len as usize) {
            content.words(self.seed, from / WORD as u64 + first, &mut self.want[..count]);
            let got: &mut [u8] = bytemuck::cast_slice_mut(&mut self.got[..count]);
            span.try_read(at, got).context(REVOKED)?;
            let want: &[u8] = bytemuck::cast_slice(&self.want[..count]);
            let result = &mut self.result;
            result.bytes += got.len() as u64;
            let is_same = got == want;
            if self.has_sums {
                let same_before = result.crc32c == result.expected_crc32c;
                result.crc32c = crc32c::crc32c_append(result.crc32c, got);
                // Equal bytes have one checksum, which is computed once.
                result.expected_crc32c = if same_before && is_same {
                    result.crc32c
                } else {
                    crc32c::crc32c_append(result.expected_crc32c, want)
                };
            }
            if is_same {
                continue;
            }
            for (i, (got, want)) in got.iter().zip(want).enumerate().filter(|(_, (got, want))| got != want) {
                let wrong = result.wrong.get_or_insert(Mismatch {
                    bytes: 0,
                    first_at: (at + i) as u64,
                    got: *got,
                    want: *want,
                });
                wrong.bytes += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 7;
    const GUARD: u64 = 4096;

    /// Returns source and target as they are after `messages` messages without an error.
    fn moved(slots: &Slots, messages: u64) -> (Span, Span) {
        let source = Span::host(slots.source_bytes() as usize).unwrap();
        let target = Span::host((slots.target_bytes() + GUARD) as usize).unwrap();
        fill_source(&source, slots, SEED).unwrap();
        fill_target(&target, slots, GUARD, SEED).unwrap();
        let mut message = vec![0; slots.size as usize];
        for i in 0..messages {
            source.read(slots.source_at(i) as usize, &mut message);
            target.write(slots.target_at(i) as usize, &message);
        }
        (source, target)
    }

    #[test]
    fn correct_data_passes() {
        for (size, depth, messages) in [(4096, 4, 23), (8, 3, 100), (131_080, 2, 5), (4096, 4, 0), (4096, 4, 2)] {
            let slots = Slots::new(size, depth, 1 << 30);
            let (_, target) = moved(&slots, messages);
            let checked = check_target(&target, &slots, GUARD, SEED, messages).unwrap();
            assert!(checked.is_correct(), "{size} {depth} {messages}: {checked:?}");
            assert_eq!(checked.bytes, slots.target_bytes() + GUARD);
        }
    }

    #[test]
    fn a_lost_last_message_is_found() {
        let slots = Slots::new(4096, 4, 1 << 30);
        for lost in 1..=slots.target {
            let (_, target) = moved(&slots, 50 - lost);
            let checked = check_target(&target, &slots, GUARD, SEED, 50).unwrap();
            let wrong = checked.wrong.clone().unwrap();
            assert!(!checked.is_correct());
            // Nearly every byte of the missing messages differs.
            assert!(wrong.bytes > lost * 4000, "{lost}: {wrong:?}");
        }
    }

    #[test]
    fn a_single_wrong_byte_is_found_anywhere() {
        let slots = Slots::new(4104, 2, 1 << 30);
        // In a payload, between two slots, after the last slot.
        for at in [
            0,
            4103,
            4104,
            8191,
            8192 + 77,
            slots.target_bytes(),
            slots.target_bytes() + GUARD - 1,
        ] {
            let (_, target) = moved(&slots, 9);
            let mut byte = [0];
            target.read(at as usize, &mut byte);
            target.write(at as usize, &[byte[0] ^ 0x10]);
            let checked = check_target(&target, &slots, GUARD, SEED, 9).unwrap();
            let wrong = checked.wrong.clone().unwrap();
            assert_eq!((wrong.bytes, wrong.first_at), (1, at), "{checked:?}");
            assert_eq!((wrong.got, wrong.want), (byte[0] ^ 0x10, byte[0]));
            assert_ne!(checked.crc32c, checked.expected_crc32c);
        }
    }

    #[test]
    fn each_chunk_is_compared_and_results_are_combined() {
        let slots = Slots::new(4096, 2, 1 << 30);
        let (_, target) = moved(&slots, 9);
        let mut good = Checker::of_chunks(SEED);
        good.chunk(&target, &slots, 8).unwrap();
        good.chunk(&target, &slots, 7).unwrap();
        let good = good.result();
        assert!(good.is_correct() && good.bytes == 2 * 4096, "{good:?}");
        // Chunk 5 was in the slot of chunk 8.
        let mut bad = Checker::of_chunks(SEED);
        bad.chunk(&target, &slots, 5).unwrap();
        let bad = bad.result();
        assert!(!bad.is_correct());
        let both = good.clone().and(bad.clone());
        assert_eq!(both.bytes, 3 * 4096);
        assert_eq!(both.wrong, bad.wrong);
        assert!(!both.is_correct());
        assert_eq!(
            bad.clone().and(bad.clone()).wrong.unwrap().bytes,
            2 * bad.wrong.clone().unwrap().bytes
        );
        let whole = check_target(&target, &slots, GUARD, SEED, 9).unwrap();
        assert!(good.and(whole.clone()).is_correct());
        let summed = bad.and(whole.clone());
        assert_eq!(summed.crc32c, whole.crc32c);
        assert!(!summed.is_correct());
    }

    #[test]
    fn content_of_another_seed_is_wrong() {
        let slots = Slots::new(4096, 2, 1 << 30);
        let (_, target) = moved(&slots, 9);
        assert!(!check_target(&target, &slots, GUARD, SEED + 1, 9).unwrap().is_correct());
    }
}
