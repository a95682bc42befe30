// SPDX-License-Identifier: MIT OR Apache-2.0

//! Parsing of sizes (`2M`, `4K,64K`, `4K-64M`), and the slots of a buffer.

use std::fmt;

/// Smallest message. Memory is compared in words of 8 bytes, so sizes are multiples of 8.
pub const SMALLEST: u64 = 8;
/// Largest message. Lengths in verbs have 32 bits, of which the highest is reserved.
pub const LARGEST: u64 = 1 << 30;
/// Alignment of slots in a buffer.
pub const SLOT_ALIGN: u64 = 4096;

/// Parses a size such as `16M`, `1GiB`, or `4096`. Units are powers of 1024.
///
/// # Errors
///
/// The text is no size. The message says how to write one.
pub fn size(text: &str) -> Result<u64, String> {
    parse_size::Config::new()
        .with_binary()
        .parse_size(text)
        .map_err(|why| format!("{why}: specify a number of bytes, or a number with a unit, such as 64K, 2M, or 1GiB"))
}

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

    proptest! {
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
