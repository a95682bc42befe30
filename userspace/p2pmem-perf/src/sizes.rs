// SPDX-License-Identifier: MIT OR Apache-2.0

//! Lists of sizes (`2M`, `4K,64K`, `4K-64M`), the slots of a buffer, and windows.
//!
//! A message that does not fit the memory moves through a window: it is cut into chunks of the window's size, and each
//! chunk uses the slots as a message of its own does. A slot is used again when the receiver has handled its last chunk.

use std::fmt;

use p2pmem_payload::value::size;

/// Smallest message. Memory is compared in words of 8 bytes, so sizes are multiples of 8.
pub const SMALLEST: u64 = 8;
/// Largest message. Lengths in verbs have 32 bits, of which the highest is reserved.
pub const LARGEST: u64 = 1 << 30;
/// Alignment of slots in a buffer.
pub const SLOT_ALIGN: u64 = 4096;
/// Bytes of the guard region after the slots. No message may change the guard region.
pub const GUARD: u64 = 4096;
/// Bytes of the region after the guard region that holds the two handshake words.
pub const WORDS: u64 = 4096;

/// Sizes in bytes, in the order of measurement. No size is 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

impl std::str::FromStr for Sizes {
    type Err = String;

    /// Parses a list of sizes and ranges. A range `A-B` stands for A, 2A, 4A, and so on up to B.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for part in text.split(',') {
            match part.split_once('-') {
                Some((first, last)) => {
                    let (first, last) = (one(first)?, one(last)?);
                    if first > last {
                        return Err(format!("the range {part} is empty: specify the smaller size first"));
                    }
                    let doubled = |size: &u64| size.checked_mul(2).filter(|size| *size <= last);
                    sizes.extend(std::iter::successors(Some(first), doubled));
                }
                None => sizes.push(one(part)?),
            }
        }
        Ok(Self(sizes))
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.0.iter().map(|size| p2pmem::human_size(*size)).collect();
        f.write_str(&words.join(", "))
    }
}

fn one(text: &str) -> Result<u64, String> {
    match size(text.trim())? {
        0 => Err("a size of 0 bytes is not valid: specify a larger size".into()),
        bytes => Ok(bytes),
    }
}

/// Parses a list of message sizes, see [`check_message`].
///
/// # Errors
///
/// The text is no list of sizes, or a size is not valid for messages. The message says how to write one.
pub fn messages(text: &str) -> Result<Sizes, String> {
    let sizes: Sizes = text.parse()?;
    sizes.0.iter().try_for_each(|size| check_message(*size))?;
    Ok(sizes)
}

/// Checks that a message can have this size.
///
/// # Errors
///
/// The size is out of range, or no multiple of 8.
pub fn check_message(bytes: u64) -> Result<(), String> {
    if (SMALLEST..=LARGEST).contains(&bytes) && bytes % SMALLEST == 0 {
        Ok(())
    } else {
        Err(format!(
            "a message cannot have {bytes} bytes: specify a multiple of {SMALLEST} from {SMALLEST} bytes to 1 GiB"
        ))
    }
}

/// Slots for messages of one size in the buffers of both sides.
///
/// Message `i` goes from source slot `i % source` to target slot `i % target`. The target has one slot more than the
/// source, so consecutive messages to a target slot differ. The final content of a slot shows that its last message
/// arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    /// Message size in bytes.
    pub size: u64,
    /// Number of source slots, at least 2.
    pub source: u64,
    /// Number of target slots: one more than source slots.
    pub target: u64,
}

impl Slots {
    /// Returns one source slot per message in flight, limited by `budget` bytes, but at least two source slots.
    pub fn new(size: u64, depth: u64, budget: u64) -> Self {
        let source = depth.min(budget / size).max(2);
        Self {
            size,
            source,
            target: source + 1,
        }
    }

    /// Reduces the slots to those that fit into `space` bytes on both sides, but not below the minimum.
    #[must_use]
    pub fn within(self, space: u64) -> Self {
        let target = space.saturating_sub(GUARD + WORDS) / self.stride();
        let source = self.source.min(target.saturating_sub(1)).max(2);
        Self {
            source,
            target: source + 1,
            ..self
        }
    }

    /// Returns whether the slots, the guard region, and the handshake words fit into `space` bytes on both sides.
    pub fn fits(&self, space: u64) -> bool {
        self.target_bytes() + GUARD + WORDS <= space
    }

    /// Returns the distance of slots in bytes.
    pub fn stride(&self) -> u64 {
        self.size.next_multiple_of(SLOT_ALIGN)
    }

    /// Returns the bytes of all source slots.
    pub fn source_bytes(&self) -> u64 {
        self.source * self.stride()
    }

    /// Returns the bytes of all target slots.
    pub fn target_bytes(&self) -> u64 {
        self.target * self.stride()
    }

    /// Returns the offset of a message's source slot.
    pub fn source_at(&self, message: u64) -> u64 {
        message % self.source * self.stride()
    }

    /// Returns the offset of a message's target slot.
    pub fn target_at(&self, message: u64) -> u64 {
        message % self.target * self.stride()
    }

    /// Returns the last of `messages` messages to a target slot, or `None` if no message went there.
    pub fn last_to(&self, slot: u64, messages: u64) -> Option<u64> {
        let newest = messages.checked_sub(1)?;
        let back = (newest % self.target + self.target - slot) % self.target;
        newest.checked_sub(back)
    }
}

/// Returns the bytes of a chunk of messages of `size` bytes, in memory of `space` bytes on each side: the whole message if
/// `window` and the memory permit this, otherwise the window. Without a window, it is the largest power of two that fits
/// and divides the message.
///
/// # Errors
///
/// The window does not fit the memory, or does not divide the message. The message says what to do.
pub fn chunk(size: u64, window: Option<u64>, space: u64) -> Result<u64, String> {
    let fits = |bytes: u64| Slots::new(bytes, 1, 0).fits(space);
    let human = p2pmem::human_size;
    match window {
        Some(window) if window < size => {
            if size % window != 0 {
                return Err(format!(
                    "a message of {} does not consist of whole windows of {}: use a multiple of the window (--size, \
                     --window)",
                    human(size),
                    human(window)
                ));
            }
            if fits(window) {
                return Ok(window);
            }
        }
        _ if fits(size) => return Ok(size),
        Some(_) => {}
        None => {
            let powers = (SLOT_ALIGN.ilog2()..size.ilog2()).rev().map(|power| 1 << power);
            let divides = |bytes: &u64| size % bytes == 0;
            if let Some(bytes) = powers.filter(divides).find(|bytes| fits(*bytes)) {
                return Ok(bytes);
            }
            if space >= LEAST {
                return Err(format!(
                    "a message of {} does not fit the {} of memory, and windows of at least {} do not divide it: use a \
                     multiple of {} (--size)",
                    human(size),
                    human(space),
                    human(SLOT_ALIGN),
                    human(SLOT_ALIGN)
                ));
            }
        }
    }
    let bytes = window.unwrap_or(size).min(size);
    Err(format!(
        "three slots of {} do not fit the {} of memory that both sides have for a NIC: {}",
        human(bytes),
        human(space),
        if space >= LEAST {
            "use a smaller --window, or none"
        } else {
            "free memory of the provider (p2pmemctl list), or select another one"
        }
    ))
}

/// Bytes of memory for the smallest window.
const LEAST: u64 = 3 * SLOT_ALIGN + GUARD + WORDS;

/// Parses the size of a window.
///
/// # Errors
///
/// The text is no size, or no multiple of 4 KiB. The message says how to write one.
pub fn window(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    check_window(bytes).map(|()| bytes)
}

/// Checks the size of a window.
///
/// # Errors
///
/// The size is out of range, or no multiple of 4 KiB.
pub fn check_window(bytes: u64) -> Result<(), String> {
    if (SLOT_ALIGN..=LARGEST).contains(&bytes) && bytes % SLOT_ALIGN == 0 {
        Ok(())
    } else {
        Err(format!(
            "a window cannot have {bytes} bytes: specify a multiple of {SLOT_ALIGN} from 4 KiB to 1 GiB"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn size_lists_and_ranges_are_parsed() {
        let sizes = |text: &str| messages(text).map(|sizes| sizes.0);
        assert_eq!(sizes("2M"), Ok(vec![2 << 20]));
        assert_eq!(sizes("4K,2M, 64"), Ok(vec![4096, 2 << 20, 64]));
        assert_eq!(sizes("4K-64M").unwrap().len(), 15);
        assert_eq!(sizes("4K-20K"), Ok(vec![4096, 8192, 16384]));
        for text in ["", "0", "7", "12", "2M-4K", "4K-", "-", "2G", "x", "4K,,8K"] {
            let why = sizes(text).unwrap_err();
            assert!(why.contains("specify"), "{text}: {why}");
        }
    }

    #[test]
    fn memory_sizes_need_no_alignment() {
        assert_eq!("7,1T".parse(), Ok(Sizes(vec![7, 1 << 40])));
        assert_eq!("8E-15E".parse(), Ok(Sizes(vec![8 << 60])));
        assert!("0".parse::<Sizes>().is_err());
    }

    #[test]
    fn slots_fit_the_budget() {
        let slots = Slots::new(2 << 20, 16, 32 << 20);
        assert_eq!((slots.source, slots.target), (16, 17));
        assert_eq!((slots.source_at(17), slots.target_at(17)), (2 << 20, 0));
        let large = Slots::new(64 << 20, 16, 32 << 20);
        assert_eq!((large.source, large.target), (2, 3));
        assert_eq!(Slots::new(8, 1, 1 << 20).stride(), 4096);
    }

    #[test]
    fn a_message_above_the_memory_moves_through_the_largest_window() {
        const MIB: u64 = 1 << 20;
        // Three slots, the guard region, and the handshake words.
        assert_eq!(chunk(64 * MIB, None, 256 * MIB), Ok(64 * MIB));
        assert_eq!(chunk(85 * MIB, None, 256 * MIB), Ok(85 * MIB));
        assert_eq!(chunk(1 << 30, None, 256 * MIB), Ok(64 * MIB));
        assert_eq!(chunk(1 << 30, None, 16 * MIB), Ok(4 * MIB));
        assert_eq!(chunk(100 * MIB, None, 256 * MIB), Ok(4 * MIB));
        assert_eq!(chunk(1 << 30, None, LEAST), Ok(4096));
        assert_eq!(chunk(1 << 30, Some(MIB), 256 * MIB), Ok(MIB));
        assert_eq!(chunk(MIB, Some(64 * MIB), 256 * MIB), Ok(MIB));
        // With a window, a message that fits the memory is also cut.
        assert_eq!(chunk(8 * MIB, Some(MIB), 256 * MIB), Ok(MIB));
        for (size, window, space, words) in [
            (1 << 30, None, LEAST - 1, "p2pmemctl list"),
            (4096, None, 0, "p2pmemctl list"),
            ((1 << 30) - 8, None, 256 * MIB, "use a multiple of 4 KiB"),
            (10 * MIB, Some(4 * MIB), 256 * MIB, "use a multiple of the window"),
            (1 << 30, Some(128 * MIB), 256 * MIB, "use a smaller --window"),
            (128 * MIB, Some(256 * MIB), 256 * MIB, "use a smaller --window"),
        ] {
            let why = chunk(size, window, space).unwrap_err();
            assert!(why.contains(words), "{size} {window:?} {space}: {why}");
        }
    }

    #[test]
    fn windows_are_pages() {
        assert_eq!(window("64M"), Ok(64 << 20));
        for text in ["0", "4095", "6K", "2G", "x"] {
            assert!(window(text).unwrap_err().contains("specify"), "{text}");
        }
    }

    proptest! {
        #[test]
        fn slots_fit_the_space(bytes in 1u64..100_000, depth in 1u64..64, space in 0u64..4_000_000) {
            let size = bytes * 8;
            let slots = Slots::new(size, depth, 1 << 30);
            let fewer = slots.within(space);
            prop_assert!(fewer.source <= slots.source && fewer.target == fewer.source + 1);
            // What fits as a chunk also fits with its slots.
            if chunk(size, None, space) == Ok(size) {
                prop_assert!(fewer.fits(space), "{fewer:?}");
            }
            if slots.fits(space) {
                prop_assert_eq!(fewer, slots);
            }
        }

        #[test]
        fn last_to_returns_the_last_message(depth in 1u64..20, messages in 0u64..200) {
            let slots = Slots::new(4096, depth, 1 << 30);
            for slot in 0..slots.target {
                let last = (0..messages).rev().find(|message| message % slots.target == slot);
                prop_assert_eq!(slots.last_to(slot, messages), last);
            }
        }

        #[test]
        fn a_target_slot_never_gets_the_same_content_twice_in_a_row(depth in 1u64..64, message in 0u64..1_000_000) {
            let slots = Slots::new(4096, depth, 1 << 30);
            prop_assert_ne!(slots.source_at(message), slots.source_at(message + slots.target));
        }
    }
}
