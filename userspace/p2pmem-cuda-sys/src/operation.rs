// SPDX-License-Identifier: MIT OR Apache-2.0

//! Operations of a GPU on memory, in the two forms in which CUDA executes them.

use crate::functions::Address;
use crate::memory::{OutOfRange, Place};

/// The condition that ends a wait for a 32-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// `word & value` is not 0.
    And,
    /// `!(word | value)` is not 0.
    Nor,
    /// `word - value`, as a signed number, is 0 or more.
    GreaterOrEqual,
}

impl Condition {
    /// Returns whether the condition holds.
    pub fn holds(self, word: u32, value: u32) -> bool {
        match self {
            Self::And => word & value != 0,
            Self::Nor => !(word | value) != 0,
            Self::GreaterOrEqual => word.wrapping_sub(value) as i32 >= 0,
        }
    }
}

/// An operation. Numbers are little-endian.
#[derive(Clone)]
pub enum Operation {
    /// Earlier accesses are visible to all devices before later ones.
    Fence,
    /// One store of 4 bytes.
    Store32(Place, u32),
    /// One store of 8 bytes.
    Store64(Place, u64),
    /// Copies bytes: from, to, and a length that is a multiple of 4.
    Copy(Place, Place, u32),
    /// Waits for a word.
    Wait(Place, Condition, u32),
}

/// `CUstreamBatchMemOpParams`: a union of 48 bytes, whose members begin with the kind of the operation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamOperation {
    /// `CUstreamBatchMemOpType`.
    kind: u32,
    _pad: u32,
    address: Address,
    value: u64,
    flags: u32,
    _pad2: u32,
    alias: Address,
    _pad3: u64,
}

const _: () = assert!(size_of::<StreamOperation>() == 48);

/// Values of `CUstreamBatchMemOpType`.
mod kind {
    pub(super) const WAIT_VALUE_32: u32 = 1;
    pub(super) const WRITE_VALUE_32: u32 = 2;
    pub(super) const WRITE_VALUE_64: u32 = 5;
}

impl Operation {
    /// Converts the operation to a member of a batch. `None`: the operation is not a member. A fence is none because each
    /// store of a batch waits for all earlier accesses (`CU_STREAM_WRITE_VALUE_DEFAULT`).
    pub(crate) fn for_stream(&self) -> Result<Option<StreamOperation>, OutOfRange> {
        let operation = |kind, address, value, flags| StreamOperation {
            kind,
            address,
            value,
            flags,
            ..StreamOperation::default()
        };
        Ok(match self {
            Self::Fence => None,
            // The other form checks the ranges.
            Self::Copy(..) => self.for_kernel().map(|_| None)?,
            Self::Store32(to, value) => Some(operation(kind::WRITE_VALUE_32, to.address(4, 4)?, u64::from(*value), 0)),
            Self::Store64(to, value) => Some(operation(kind::WRITE_VALUE_64, to.address(8, 8)?, *value, 0)),
            Self::Wait(at, condition, value) => {
                // CUstreamWaitValue_flags.
                let flags = match condition {
                    Condition::GreaterOrEqual => 0,
                    Condition::And => 2,
                    Condition::Nor => 3,
                };
                Some(operation(
                    kind::WAIT_VALUE_32,
                    at.address(4, 4)?,
                    u64::from(*value),
                    flags,
                ))
            }
        })
    }

    /// Converts the operation to an entry for the kernel `execute` of interpreter.ptx.
    pub(crate) fn for_kernel(&self) -> Result<[u8; ENTRY], OutOfRange> {
        let (kind, len, address, value, source) = match self {
            Self::Fence => (0, 0, 0, 0, 0),
            Self::Store32(to, value) => (1, 4, to.address(4, 4)?, u64::from(*value), 0),
            Self::Store64(to, value) => (2, 8, to.address(8, 8)?, *value, 0),
            Self::Copy(from, to, len) => {
                let bytes = *len as usize;
                if bytes % 4 != 0 {
                    return Err(OutOfRange {
                        offset: from.offset,
                        len: bytes,
                    });
                }
                (3, *len, to.address(bytes, 4)?, 0, from.address(bytes, 4)?)
            }
            Self::Wait(at, condition, value) => {
                let kind = match condition {
                    Condition::And => 4,
                    Condition::Nor => 5,
                    Condition::GreaterOrEqual => 6,
                };
                (kind, 4, at.address(4, 4)?, u64::from(*value), 0)
            }
        };
        let mut entry = [0; ENTRY];
        entry[..4].copy_from_slice(&u32::to_le_bytes(kind));
        entry[4..8].copy_from_slice(&len.to_le_bytes());
        for (at, number) in [(8, address), (16, value), (24, source)] {
            entry[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        Ok(entry)
    }

    /// Calls `keep` with each memory that the operation accesses.
    pub(crate) fn places(&self) -> impl Iterator<Item = &Place> {
        let (first, second) = match self {
            Self::Fence => (None, None),
            Self::Store32(at, _) | Self::Store64(at, _) | Self::Wait(at, ..) => (Some(at), None),
            Self::Copy(from, to, _) => (Some(from), Some(to)),
        };
        first.into_iter().chain(second)
    }
}

/// Size of an entry for the kernel, in bytes.
pub(crate) const ENTRY: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_those_of_the_kernel() {
        for (condition, word, value, holds) in [
            (Condition::And, 0b100, 0b110, true),
            (Condition::And, 0b001, 0b110, false),
            (Condition::Nor, 0xffff_ff0f, 0xffff_fff0, false),
            (Condition::Nor, 0xffff_ff0e, 0xffff_fff0, true),
            (Condition::GreaterOrEqual, 5, 5, true),
            (Condition::GreaterOrEqual, 4, 5, false),
            (Condition::GreaterOrEqual, 1, u32::MAX, true),
            (Condition::GreaterOrEqual, u32::MAX, 1, false),
        ] {
            assert_eq!(
                condition.holds(word, value),
                holds,
                "{condition:?} {word:#x} {value:#x}"
            );
        }
    }
}
