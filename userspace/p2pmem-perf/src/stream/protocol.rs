// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages of a stream that the control protocol carries, and the layout of the memory for frames.

use anyhow::{bail, Context, Result};
use p2pmem::{human_size, ErrorKind};
use serde::{Deserialize, Serialize};

use crate::sizes::LARGEST;
use crate::wire::PeerMemory;

/// Smallest chunk.
pub const SMALLEST_CHUNK: u64 = 4096;
/// Multiple that a chunk must be.
const CHUNK_STEP: u64 = 128;
/// Smallest and largest number of slots: with two, a frame is produced while another one is sent.
const SLOTS: std::ops::RangeInclusive<u64> = 2..=64;
/// Bytes after the slots, for the words of the stream itself.
pub const WORDS: u64 = 4096;

/// Checks the bytes of a frame.
///
/// # Errors
///
/// The size is impossible. The message says which are possible.
pub fn check_chunk(bytes: u64) -> Result<(), String> {
    if !(SMALLEST_CHUNK..=LARGEST).contains(&bytes) {
        return Err("specify a chunk of 4 KiB to 1 GiB".into());
    }
    if bytes % CHUNK_STEP != 0 {
        return Err(format!("specify a chunk that is a multiple of {CHUNK_STEP} bytes"));
    }
    Ok(())
}

/// Parameters of a stream. The client chooses them and sends them to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamRequest {
    /// Bytes of a frame.
    pub chunk: u64,
    /// Whether frames must have exactly this size. Otherwise each side may halve it until its memory is sufficient.
    pub fixed: bool,
    /// Memory for frames on each side.
    pub buffer: u64,
    /// The server verifies each frame.
    pub verify: bool,
    /// The server's memory. Without it, the server uses the memory of its own options.
    pub peer: Option<PeerMemory>,
}

impl StreamRequest {
    /// Checks parameters that come from the peer or from the command line.
    ///
    /// # Errors
    ///
    /// A parameter is out of range.
    pub fn check(&self) -> Result<(), String> {
        self.peer.as_ref().map(PeerMemory::kind).transpose()?;
        check_chunk(self.chunk)
    }
}

/// The slots for frames in the memory of one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Bytes of a slot.
    pub chunk: u64,
    /// Number of slots.
    pub slots: u32,
}

impl Layout {
    /// Returns the offset of the slot for frame `number`.
    pub fn slot(&self, number: u64) -> u64 {
        number % u64::from(self.slots.max(1)) * self.chunk
    }

    /// Returns the bytes of all slots. The words of the stream are behind them.
    pub fn frames_bytes(&self) -> u64 {
        self.chunk * u64::from(self.slots)
    }

    /// Returns the bytes of slots and words.
    pub fn bytes(&self) -> u64 {
        self.frames_bytes() + WORDS
    }

    /// Checks a layout that comes from the peer.
    ///
    /// # Errors
    ///
    /// A number is out of range.
    pub fn check(&self) -> Result<()> {
        check_chunk(self.chunk).map_err(anyhow::Error::msg)?;
        if !SLOTS.contains(&u64::from(self.slots)) {
            bail!("{} slots are not possible", self.slots);
        }
        Ok(())
    }

    /// Returns the layouts to try, the best one first: as many slots as fit in `buffer`, then half of them and so on
    /// down to two, then the same for half of the chunk and so on, unless the chunk is `fixed`.
    pub fn candidates(chunk: u64, fixed: bool, buffer: u64) -> impl Iterator<Item = Layout> {
        let halves = std::iter::successors(Some(chunk), move |chunk| {
            let half = chunk / 2;
            (!fixed && check_chunk(half).is_ok()).then_some(half)
        });
        halves.flat_map(move |chunk| {
            let most = (buffer / chunk).clamp(*SLOTS.start(), *SLOTS.end()) as u32;
            let fewer = |slots: &u32| (*slots > 2).then_some((slots / 2).max(2));
            std::iter::successors(Some(most), fewer).map(move |slots| Layout { chunk, slots })
        })
    }
}

/// There is not as much memory as a layout needs.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MissingMemory(pub String);

/// Returns whether an error says that there is not enough memory, so that a smaller layout may succeed.
fn is_missing_memory(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let kind = cause.downcast_ref::<p2pmem::Error>().map(p2pmem::Error::kind);
        let system = cause.downcast_ref::<std::io::Error>();
        cause.is::<MissingMemory>()
            || matches!(
                kind,
                Some(ErrorKind::NoSpace | ErrorKind::NoProvider | ErrorKind::OutOfResources)
            )
            || system.is_some_and(|error| error.raw_os_error() == Some(libc::ENOMEM))
    })
}

/// Calls `make` with one layout after another until it succeeds.
///
/// # Errors
///
/// The first error of `make`, if there is not enough memory for any layout; any other error at once.
pub fn first_that_fits<T>(
    chunk: u64,
    fixed: bool,
    buffer: u64,
    mut make: impl FnMut(Layout) -> Result<T>,
) -> Result<T> {
    let mut first = None;
    for layout in Layout::candidates(chunk, fixed, buffer) {
        match make(layout) {
            Ok(made) => return Ok(made),
            Err(error) if is_missing_memory(&error) => first.get_or_insert(error),
            Err(error) => return Err(error),
        };
    }
    let error = first.unwrap_or_else(|| anyhow::anyhow!("no layout"));
    Err(error).with_context(|| {
        let least = Layout { chunk, slots: 2 }.bytes();
        if fixed {
            format!(
                "no memory for two chunks of {}, which need {}: use a smaller --chunk",
                human_size(chunk),
                human_size(least)
            )
        } else {
            "no memory for frames, not even for small ones".to_owned()
        }
    })
}

/// The server's result.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamResult {
    /// Frames that arrived.
    pub frames: u64,
    /// Result of the verification, if the client requested it.
    pub verified: Option<Verified>,
    /// Nanoseconds of processor time that the server used.
    pub cpu_ns: u64,
}

/// What the verification of all frames found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verified {
    /// Frames whose header is invalid.
    pub bad_headers: u64,
    /// Frames whose samples do not have the checksum of the header.
    pub crc_errors: u64,
    /// Frames whose samples are not those of the sequence number.
    pub wrong_samples: u64,
    /// Frames that arrived after a frame with the same or a higher sequence number.
    pub out_of_order: u64,
    /// Sequence numbers between those of the first and the last frame that did not arrive.
    pub missing: u64,
}

impl Verified {
    /// Returns the number of frames that are wrong.
    pub fn wrong(&self) -> u64 {
        // The numbers of another program may be any.
        [self.crc_errors, self.wrong_samples, self.out_of_order]
            .into_iter()
            .fold(self.bad_headers, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_become_smaller_until_they_fit() {
        let fit = |chunk, fixed, memory: u64| {
            first_that_fits(chunk, fixed, 128 << 20, |layout| {
                if layout.bytes() <= memory {
                    Ok((layout.chunk >> 20, layout.slots))
                } else {
                    Err(MissingMemory(format!("{} bytes", layout.bytes())).into())
                }
            })
        };
        assert_eq!(fit(64 << 20, false, 1 << 30).unwrap(), (64, 2));
        assert_eq!(fit(8 << 20, true, 1 << 30).unwrap(), (8, 16));
        // A BAR of 64 MiB holds two slots of less than half of it.
        assert_eq!(fit(64 << 20, false, 64 << 20).unwrap(), (16, 2));
        assert_eq!(fit(16 << 20, true, 64 << 20).unwrap(), (16, 2));
        assert_eq!(fit(1 << 20, true, 64 << 20).unwrap(), (1, 32));
        let error = format!("{:#}", fit(64 << 20, true, 64 << 20).unwrap_err());
        assert!(
            error.contains("two chunks of 64 MiB") && error.ends_with(&format!("{} bytes", (128 << 20) + WORDS)),
            "{error}"
        );
        let error = format!("{:#}", fit(64 << 20, false, 0).unwrap_err());
        assert!(error.contains("not even for small ones"), "{error}");
    }

    #[test]
    fn other_errors_than_missing_memory_are_not_repeated() {
        let mut calls = 0;
        let mut fit = |error: fn() -> anyhow::Error| {
            calls = 0;
            let made = first_that_fits::<()>(64 << 10, true, 1 << 20, |_| {
                calls += 1;
                Err(error().context("opening"))
            });
            (format!("{:#}", made.unwrap_err()), calls)
        };
        let busy = fit(|| anyhow::anyhow!("another program uses the stream"));
        assert_eq!(busy, ("opening: another program uses the stream".into(), 1));
        let denied = fit(|| std::io::Error::from_raw_os_error(libc::EACCES).into());
        assert_eq!(denied.1, 1);
        let (error, calls) = fit(|| std::io::Error::from_raw_os_error(libc::ENOMEM).into());
        assert!(error.starts_with("no memory for two chunks of 64 KiB"), "{error}");
        assert_eq!(calls, 4, "16, 8, 4, and 2 slots");
    }

    #[test]
    fn all_layouts_are_possible() {
        for chunk in [1 << 30, 64 << 20, 4096, 12_800, 3 << 20] {
            for layout in Layout::candidates(chunk, false, 128 << 20) {
                layout.check().unwrap();
            }
        }
        for layout in [(4096, 1), (4096, 65), (4097, 2), (0, 2), (u64::MAX, 2)] {
            let (chunk, slots) = layout;
            assert!(Layout { chunk, slots }.check().is_err(), "{layout:?}");
        }
    }

    #[test]
    fn requests_of_the_peer_are_checked() {
        let good = StreamRequest {
            chunk: 4096,
            fixed: true,
            buffer: 0,
            verify: true,
            peer: None,
        };
        assert_eq!(good.check(), Ok(()));
        assert!(StreamRequest {
            chunk: 64,
            ..good.clone()
        }
        .check()
        .is_err());
        let kind = "tape".to_owned();
        let peer = Some(PeerMemory { kind, device: None });
        assert!(StreamRequest { peer, ..good }.check().is_err());
    }
}
