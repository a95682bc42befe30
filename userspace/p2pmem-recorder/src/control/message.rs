// SPDX-License-Identifier: MIT OR Apache-2.0

//! The messages that both sides SEND by RDMA: descriptions of blocks, and acknowledgements.
//!
//! Recording: the program SENDs, for each block, [`Message::Block`] and then the payload. The node answers with
//! [`Message::Acknowledged`]. Each acknowledged block lets the program send one more, so the node has always a receive for
//! what arrives.
//!
//! Playback: the node SENDs [`Message::Announced`] for each block that is in a buffer. The program READs the payload, and
//! answers with [`Message::Released`]. [`Message::End`] follows the last block.
//!
//! A message has [`SIZE`] bytes. Numbers are little-endian.
//!
//! | byte | size | field |
//! |---|---|---|
//! | 0 | 4 | CRC-32C of bytes 4 to 255 |
//! | 4 | 4 | magic `p2pr` |
//! | 8 | 4 | kind |
//! | 12 | 4 | count or buffer |
//! | 16 | 240 | 30 numbers of 8 bytes |

use crate::store::Block;

/// Bytes of a message.
pub const SIZE: usize = 256;
/// The most sequence numbers in an acknowledgement.
pub const MAX_ACKNOWLEDGED: usize = 30;

const MAGIC: u32 = u32::from_le_bytes(*b"p2pr");

/// Why a message is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The checksum or the magic is wrong.
    #[error("a message is damaged")]
    Damaged,
    /// The kind, or a number, is not valid.
    #[error("a message has an unknown kind, or numbers that are out of range")]
    Invalid,
}

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Describes the payload that follows.
    Block {
        /// The block.
        block: Block,
        /// Bytes of the payload.
        bytes: u64,
    },
    /// Blocks are durable.
    Acknowledged(Vec<u64>),
    /// A block is in a buffer.
    Announced {
        /// The number of the buffer.
        buffer: u32,
        /// The block.
        block: Block,
        /// Bytes of the payload.
        bytes: u64,
    },
    /// The program has read a buffer.
    Released {
        /// The number of the buffer.
        buffer: u32,
    },
    /// No block follows.
    End {
        /// The number of blocks that were announced.
        blocks: u64,
    },
}

impl Message {
    /// Returns the bytes of the message.
    ///
    /// # Panics
    ///
    /// An acknowledgement has more than [`MAX_ACKNOWLEDGED`] numbers.
    pub fn encode(&self) -> [u8; SIZE] {
        let block = |block: &Block, bytes: u64| vec![block.sequence, block.time, block.checksum.into(), bytes];
        let (kind, number, values) = match self {
            Self::Block {
                block: described,
                bytes,
            } => (1, 0, block(described, *bytes)),
            Self::Acknowledged(sequences) => {
                assert!(
                    sequences.len() <= MAX_ACKNOWLEDGED,
                    "{} sequence numbers",
                    sequences.len()
                );
                (2, sequences.len() as u32, sequences.clone())
            }
            Self::Announced {
                buffer,
                block: described,
                bytes,
            } => (3, *buffer, block(described, *bytes)),
            Self::Released { buffer } => (4, *buffer, Vec::new()),
            Self::End { blocks } => (5, 0, vec![*blocks]),
        };
        let mut all = [0; SIZE];
        all[4..8].copy_from_slice(&MAGIC.to_le_bytes());
        all[8..12].copy_from_slice(&u32::to_le_bytes(kind));
        all[12..16].copy_from_slice(&number.to_le_bytes());
        for (place, value) in all[16..].chunks_mut(8).zip(values) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        let checksum = crc32c::crc32c(&all[4..]);
        all[..4].copy_from_slice(&checksum.to_le_bytes());
        all
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// [`MessageError`].
    pub fn decode(bytes: &[u8; SIZE]) -> Result<Self, MessageError> {
        let word = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        let value = |number: usize| {
            let at = 16 + 8 * number;
            bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes)
        };
        if word(0) != crc32c::crc32c(&bytes[4..]) || word(4) != MAGIC {
            return Err(MessageError::Damaged);
        }
        let block = || {
            Ok(Block {
                sequence: value(0),
                time: value(1),
                checksum: u32::try_from(value(2)).map_err(|_| MessageError::Invalid)?,
            })
        };
        let number = word(12);
        Ok(match word(8) {
            1 => Self::Block {
                block: block()?,
                bytes: value(3),
            },
            2 if (1..=MAX_ACKNOWLEDGED).contains(&(number as usize)) => {
                Self::Acknowledged((0..number as usize).map(value).collect())
            }
            3 => Self::Announced {
                buffer: number,
                block: block()?,
                bytes: value(3),
            },
            4 => Self::Released { buffer: number },
            5 => Self::End { blocks: value(0) },
            _ => return Err(MessageError::Invalid),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn messages() -> impl Strategy<Value = Message> {
        let block = (any::<u64>(), any::<u64>(), any::<u32>()).prop_map(|(sequence, time, checksum)| Block {
            sequence,
            time,
            checksum,
        });
        prop_oneof![
            (block.clone(), any::<u64>()).prop_map(|(block, bytes)| Message::Block { block, bytes }),
            proptest::collection::vec(any::<u64>(), 1..=MAX_ACKNOWLEDGED).prop_map(Message::Acknowledged),
            (any::<u32>(), block, any::<u64>()).prop_map(|(buffer, block, bytes)| Message::Announced {
                buffer,
                block,
                bytes
            }),
            any::<u32>().prop_map(|buffer| Message::Released { buffer }),
            any::<u64>().prop_map(|blocks| Message::End { blocks }),
        ]
    }

    proptest! {
        #[test]
        fn messages_are_decoded(message in messages()) {
            prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
        }

        #[test]
        fn damage_is_found(message in messages(), at in 0..SIZE, bit in 0..8_u8) {
            let mut bytes = message.encode();
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Message::decode(&bytes), Err(MessageError::Damaged));
        }
    }

    #[test]
    fn valid_checksums_do_not_make_nonsense_valid() {
        let make = |kind: u32, number: u32, third: u64| {
            let mut bytes = Message::End { blocks: 0 }.encode();
            bytes[8..12].copy_from_slice(&kind.to_le_bytes());
            bytes[12..16].copy_from_slice(&number.to_le_bytes());
            bytes[32..40].copy_from_slice(&third.to_le_bytes());
            let checksum = crc32c::crc32c(&bytes[4..]);
            bytes[..4].copy_from_slice(&checksum.to_le_bytes());
            Message::decode(&bytes)
        };
        for (kind, number, third) in [
            (0, 0, 0),
            (6, 0, 0),
            (2, 0, 0),
            (2, 31, 0),
            (2, u32::MAX, 0),
            (1, 0, 1 << 32),
        ] {
            assert_eq!(make(kind, number, third), Err(MessageError::Invalid), "{kind} {number}");
        }
    }
}
