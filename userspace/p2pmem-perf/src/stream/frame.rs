// SPDX-License-Identifier: MIT OR Apache-2.0

//! The format of a frame: a header of 64 bytes and int8 samples. It is the format of the test bed's FPGA
//! (`Documentation/testbed/fpga.md`).
//!
//! | offset | width | content |
//! |---|---|---|
//! | 0 | 8 | [`MAGIC`] |
//! | 8 | 8 | position in the source's ring, which readers of a stream ignore |
//! | 16 | 8 | sequence number, counted from 0; frames that the source dropped have a number too |
//! | 24 | 8 | time of the first sample, in samples since the start |
//! | 32 | 4 | bytes of samples |
//! | 36 | 4 | CRC-32C of the samples |
//! | 40 | 8 | seed of the samples |
//! | 48 | 16 | 0 |

use p2pmem_verbs::Span;

use crate::pattern::mixed;

/// The first 8 bytes of a frame.
pub const MAGIC: u64 = u64::from_le_bytes(*b"P2PFRAME");
/// Bytes of the header.
pub const HEADER_SIZE: usize = 64;
/// Words of samples that are processed at once.
const STEP: usize = 8192;
/// Bytes of a word.
const WORD: usize = 8;

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Position in the source's ring.
    pub position: u64,
    /// Sequence number.
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
        let words = [
            MAGIC,
            self.position,
            self.sequence,
            self.time,
            u64::from(self.payload) | (u64::from(self.crc32c) << 32),
            self.seed,
        ];
        for (to, word) in bytes.chunks_exact_mut(WORD).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a header. Returns `None` if the bytes are no header.
    pub fn from_bytes(bytes: &[u8; HEADER_SIZE]) -> Option<Self> {
        let word = |index: usize| {
            let bytes = &bytes[index * WORD..][..WORD];
            bytes.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte))
        };
        (word(0) == MAGIC && word(6) == 0 && word(7) == 0).then(|| Self {
            position: word(1),
            sequence: word(2),
            time: word(3),
            payload: word(4) as u32,
            crc32c: (word(4) >> 32) as u32,
            seed: word(5),
        })
    }
}

/// Computes the samples of a frame in steps: calls `each` with the offset in the frame and the bytes.
fn samples(
    seed: u64,
    sequence: u64,
    payload: usize,
    mut each: impl FnMut(usize, &[u8]) -> p2pmem::Result<()>,
) -> p2pmem::Result<()> {
    let start = mixed(seed ^ mixed(sequence.wrapping_add(1)));
    let mut words = vec![0_u64; STEP];
    let mut done = 0;
    while done < payload {
        let count = STEP.min((payload - done).div_ceil(WORD));
        let first = start.wrapping_add((done / WORD) as u64);
        for (i, word) in (0..).zip(&mut words[..count]) {
            *word = mixed(first.wrapping_add(i)).to_le();
        }
        let bytes: &[u8] = bytemuck::cast_slice(&words[..count]);
        let bytes = &bytes[..bytes.len().min(payload - done)];
        each(HEADER_SIZE + done, bytes)?;
        done += bytes.len();
    }
    Ok(())
}

/// Writes a frame of `chunk` bytes at byte `at` of the memory.
///
/// # Errors
///
/// The memory was revoked.
pub fn write(span: &Span, at: usize, chunk: usize, seed: u64, sequence: u64) -> p2pmem::Result<()> {
    let payload = chunk - HEADER_SIZE;
    let mut crc = 0;
    samples(seed, sequence, payload, |offset, bytes| {
        crc = crc32c::crc32c_append(crc, bytes);
        span.try_write(at + offset, bytes)
    })?;
    let header = Header {
        position: sequence.wrapping_add(1),
        sequence,
        time: sequence.wrapping_mul(payload as u64),
        // A chunk has at most 1 GiB.
        payload: payload as u32,
        crc32c: crc,
        seed,
    };
    span.try_write(at, &header.to_bytes())?;
    span.flush();
    Ok(())
}

/// Result of the check of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checked {
    /// The sequence number.
    pub sequence: u64,
    /// Whether the samples have the checksum of the header.
    pub crc: bool,
    /// Whether the samples are those of the sequence number.
    pub samples: bool,
}

/// Checks the frame of `chunk` bytes at byte `at` of the memory. Returns `None` if it has no valid header.
///
/// # Errors
///
/// The memory was revoked.
pub fn check(span: &Span, at: usize, chunk: usize) -> p2pmem::Result<Option<Checked>> {
    let mut bytes = [0; HEADER_SIZE];
    span.try_read(at, &mut bytes)?;
    let payload = chunk - HEADER_SIZE;
    let header = Header::from_bytes(&bytes);
    let Some(header) = header.filter(|header| header.payload as usize == payload) else {
        return Ok(None);
    };
    let (mut crc, mut same) = (0, true);
    let mut found = vec![0; STEP * WORD];
    samples(header.seed, header.sequence, payload, |offset, expected| {
        let found = &mut found[..expected.len()];
        span.try_read(at + offset, found)?;
        crc = crc32c::crc32c_append(crc, found);
        same &= found == expected;
        Ok(())
    })?;
    Ok(Some(Checked {
        sequence: header.sequence,
        crc: crc == header.crc32c,
        samples: same,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = 2 * STEP * WORD + 128;

    fn frame(sequence: u64) -> Span {
        let span = Span::host(4096 + CHUNK).unwrap();
        write(&span, 4096, CHUNK, 7, sequence).unwrap();
        span
    }

    #[test]
    fn written_frames_are_correct() {
        for sequence in [0, 1, 1 << 40, u64::MAX] {
            let span = frame(sequence);
            let good = Checked {
                sequence,
                crc: true,
                samples: true,
            };
            assert_eq!(check(&span, 4096, CHUNK).unwrap(), Some(good));
            // Another size is no frame.
            assert_eq!(check(&span, 4096, CHUNK - 128).unwrap(), None);
            assert_eq!(check(&span, 0, CHUNK).unwrap(), None);
        }
    }

    #[test]
    fn a_single_wrong_byte_is_found_anywhere() {
        for at in [HEADER_SIZE, HEADER_SIZE + STEP * WORD, CHUNK - 1] {
            let span = frame(3);
            let mut byte = [0];
            span.read(4096 + at, &mut byte);
            span.write(4096 + at, &[byte[0] ^ 1]);
            let checked = check(&span, 4096, CHUNK).unwrap().unwrap();
            assert_eq!((checked.crc, checked.samples), (false, false), "{at}");
        }
        // A frame with the checksum of its samples, but with samples of another sequence number.
        let span = frame(3);
        span.write(4096 + 16, &4_u64.to_le_bytes());
        let checked = check(&span, 4096, CHUNK).unwrap().unwrap();
        assert_eq!((checked.sequence, checked.crc, checked.samples), (4, true, false));
        for at in [0, 7, 32, 48, 63] {
            let span = frame(3);
            let mut byte = [0];
            span.read(4096 + at, &mut byte);
            span.write(4096 + at, &[byte[0] ^ 1]);
            assert_eq!(check(&span, 4096, CHUNK).unwrap(), None, "{at}");
        }
    }
}
