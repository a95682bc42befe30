// SPDX-License-Identifier: MIT OR Apache-2.0

//! Rings of work in BAR2: the registers of a ring, and its entries.
//!
//! A ring is an array of [`ENTRY_SIZE`]-byte entries in BAR2. Producer and consumer index count entries, start where
//! [`reg::HEAD`] was set, and wrap around at 2^32; the entry of an index is at `index % entries`. The driver writes
//! entries, and then the producer index to [`reg::TAIL`]. The device executes the entries in order, reads each when its
//! turn comes, and increments the consumer index when an entry has completed. The ring stops at the first entry that
//! fails: [`reg::HEAD`] is the index of this entry, and [`reg::STATUS`] the reason.
//!
//! If [`control::REPORT_MEMORY`] or [`control::REPORT_BUS`] is set, the device writes a report after each entry, and when
//! the ring stops with an error: the values of [`reg::HEAD`] and [`reg::STATUS`], as one access of 8 bytes. So nobody has
//! to read registers while a ring runs. No report follows [`crate::control::ABORT`] or a reset.
//!
//! The rings and the commands that are submitted by registers run concurrently. Operations of one ring are executed one
//! after another; between rings, only polls and stores order them.

use crate::{Op, Status, flags};

/// Number of rings.
pub const COUNT: u32 = 8;
/// Maximum number of entries of a ring.
pub const MAX_ENTRIES: u32 = 1 << 16;
/// Distance between the registers of two rings in BAR0.
pub const STRIDE: u64 = 0x100;
/// Value of [`reg::POLL_LIMIT`] after a reset: one second.
pub const DEFAULT_POLL_LIMIT: u32 = 1_000_000;

/// Offset in BAR0 of a register of [`reg`] of ring `ring`.
pub const fn register(ring: u32, register: u64) -> u64 {
    crate::reg::RINGS + ring as u64 * STRIDE + register
}

/// Offsets of the registers of a ring. All but CONTROL and TAIL can be written only while the ring is
/// [`State::Disabled`](super::State::Disabled).
pub mod reg {
    /// u64, read-write: offset of the first entry in BAR2, a multiple of [`super::ENTRY_SIZE`].
    pub const BASE: u64 = 0x00;
    /// u32, read-write: number of entries, a power of two up to [`super::MAX_ENTRIES`].
    pub const ENTRIES: u64 = 0x08;
    /// u32, read-write: maximum time of a poll in microseconds. With 0, a poll reads once.
    pub const POLL_LIMIT: u64 = 0x0c;
    /// u64, read-write: where reports are written: an offset in BAR2 or a bus address, a multiple of 8.
    pub const REPORT: u64 = 0x10;
    /// u32, read-write: see [`super::control`].
    pub const CONTROL: u64 = 0x18;
    /// u32, read-only: [`super::State`].
    pub const STATE: u64 = 0x1c;
    /// u32, read-write: consumer index: the number of completed entries, or the index of the entry that failed. A write
    /// sets both indices.
    pub const HEAD: u64 = 0x20;
    /// u32, read-only: the [`crate::Status`] with which the ring stopped; 0 if it runs or was disabled.
    pub const STATUS: u64 = 0x24;
    /// u32, read-write: producer index, the doorbell. Ignored unless the ring runs.
    pub const TAIL: u64 = 0x28;
}

/// Bits of [`reg::CONTROL`].
pub mod control {
    /// Starts the ring. Writing 0 aborts the entry in progress and disables the ring: when [`super::reg::STATE`] is
    /// [`super::State::Disabled`], the ring does no more accesses. Also ends the error state.
    pub const ENABLE: u32 = 1 << 0;
    /// [`super::reg::REPORT`] is an offset in BAR2.
    pub const REPORT_MEMORY: u32 = 1 << 1;
    /// [`super::reg::REPORT`] is a bus address.
    pub const REPORT_BUS: u32 = 1 << 2;
    /// Raise an interrupt when the ring stops with an error, on the vector in bits 15..8.
    pub const ERROR_INTERRUPT: u32 = 1 << 3;
    /// Shift of the interrupt vector.
    pub const VECTOR_SHIFT: u32 = 8;
    /// Mask of all defined bits.
    pub const KNOWN: u32 = ENABLE | REPORT_MEMORY | REPORT_BUS | ERROR_INTERRUPT | (0xff << VECTOR_SHIFT);
}

/// Values of [`reg::STATE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// The ring executes nothing, and its registers can be written.
    Disabled = 0,
    /// The ring executes entries or waits for them.
    Running = 1,
    /// The ring was disabled or aborted, and the entry in progress has not ended yet.
    Stopping = 2,
    /// An entry failed, or the settings are invalid. The driver has to disable the ring before it can start again.
    Error = 3,
}

impl State {
    /// All states.
    pub const ALL: [State; 4] = [State::Disabled, State::Running, State::Stopping, State::Error];

    /// Converts a value of [`reg::STATE`].
    pub fn from_u32(value: u32) -> Option<State> {
        State::ALL.into_iter().find(|state| *state as u32 == value)
    }
}

/// Size of a report in bytes: u32 consumer index, u32 status.
pub const REPORT_SIZE: u64 = 8;

/// Progress of a ring, as in a report and in the registers HEAD and STATUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Consumer index: all entries before it have completed.
    pub head: u32,
    /// Why the ring stopped at this index; `None` while it runs.
    pub stopped: Option<Status>,
}

impl Progress {
    /// Returns the u64 that the device writes, little-endian.
    pub const fn to_u64(self) -> u64 {
        let status = match self.stopped {
            Some(status) => status as u64,
            None => 0,
        };
        self.head as u64 | (status << 32)
    }

    /// Converts the u64 of a report. `None` if the status is unknown.
    pub fn from_u64(word: u64) -> Option<Self> {
        let stopped = match (word >> 32) as u32 {
            0 => None,
            status => Some(Status::from_u32(status)?),
        };
        Some(Self {
            head: word as u32,
            stopped,
        })
    }

    /// Returns whether the entry with this index has completed. The entry must be one of the last 2^31.
    pub const fn has_completed(self, index: u32) -> bool {
        (self.head.wrapping_sub(index) as i32) > 0
    }
}

/// Size of an entry in bytes.
pub const ENTRY_SIZE: u64 = 64;

/// Offsets in an entry. All fields are little-endian.
pub mod entry {
    /// u32: [`crate::Op`].
    pub const OP: usize = 0x00;
    /// u32: [`crate::flags`].
    pub const FLAGS: usize = 0x04;
    /// u64: offset of the range in BAR2, or the place.
    pub const OFFSET: usize = 0x08;
    /// u64: length of the range in bytes.
    pub const LENGTH: usize = 0x10;
    /// u64: the operation's argument.
    pub const ARGUMENT: usize = 0x18;
    /// u64: with [`crate::flags::RESULT`], the offset in BAR2 of the result, a multiple of 8; otherwise 0. A result is
    /// [`crate::RESULT_SIZE`] bytes: u32 index of the entry, u32 status, u64 result. The device writes the u64 first,
    /// and then index and status as one access of 8 bytes.
    pub const RESULT: usize = 0x20;
    /// First byte of the rest, which must be 0.
    pub const RESERVED: usize = 0x28;
}

/// An address of the accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// An offset in BAR2.
    Memory(u64),
    /// A bus address.
    Bus(u64),
}

impl Place {
    /// The address, and `flag` if it is a bus address.
    const fn split(self, flag: u32) -> (u64, u32) {
        match self {
            Place::Memory(offset) => (offset, 0),
            Place::Bus(address) => (address, flag),
        }
    }
}

/// An entry of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Operation.
    pub op: Op,
    /// Flags, without [`flags::RESULT`].
    pub flags: u32,
    /// Offset of the range in BAR2, or the place.
    pub offset: u64,
    /// Length of the range in bytes.
    pub length: u64,
    /// The operation's argument.
    pub argument: u64,
    /// Where to write the result in BAR2.
    pub result: Option<u64>,
}

impl Entry {
    /// An entry with these fields, without flags and without a result.
    pub const fn new(op: Op, offset: u64, length: u64, argument: u64) -> Self {
        Self {
            op,
            flags: 0,
            offset,
            length,
            argument,
            result: None,
        }
    }

    const fn at(op: Op, place: Place, length: u64, argument: u64) -> Self {
        let (offset, flags) = place.split(flags::BUS);
        Self {
            flags,
            ..Self::new(op, offset, length, argument)
        }
    }

    /// [`Op::Fft`]: transforms vectors of `points` samples.
    pub const fn fft(offset: u64, length: u64, points: u64) -> Self {
        Self::new(Op::Fft, offset, length, points)
    }

    /// [`Op::Fft`] with [`flags::INVERSE`].
    pub const fn inverse_fft(offset: u64, length: u64, points: u64) -> Self {
        Self {
            flags: flags::INVERSE,
            ..Self::fft(offset, length, points)
        }
    }

    /// [`Op::AddF32`]: adds the values at `from` to those at `offset`.
    pub const fn add_f32(offset: u64, from: u64, length: u64) -> Self {
        Self::new(Op::AddF32, offset, length, from)
    }

    /// [`Op::AddBf16`].
    pub const fn add_bf16(offset: u64, from: u64, length: u64) -> Self {
        Self::new(Op::AddBf16, offset, length, from)
    }

    /// [`Op::MaxF32`].
    pub const fn max_f32(offset: u64, from: u64, length: u64) -> Self {
        Self::new(Op::MaxF32, offset, length, from)
    }

    /// [`Op::MaxBf16`].
    pub const fn max_bf16(offset: u64, from: u64, length: u64) -> Self {
        Self::new(Op::MaxBf16, offset, length, from)
    }

    /// [`Op::Copy`]: copies from the offset `from` to `offset`, both in BAR2.
    pub const fn copy(offset: u64, from: u64, length: u64) -> Self {
        Self::new(Op::Copy, offset, length, from)
    }

    /// [`Op::DmaIn`]: from a bus address to BAR2.
    pub const fn dma_in(address: u64, offset: u64, length: u64) -> Self {
        Self::new(Op::DmaIn, offset, length, address)
    }

    /// [`Op::DmaOut`]: from BAR2 to a bus address.
    pub const fn dma_out(offset: u64, address: u64, length: u64) -> Self {
        Self::new(Op::DmaOut, offset, length, address)
    }

    /// [`Op::Fence`].
    pub const fn fence() -> Self {
        Self::new(Op::Fence, 0, 0, 0)
    }

    /// [`Op::Store32`].
    pub const fn store32(place: Place, value: u32) -> Self {
        Self::at(Op::Store32, place, 0, value as u64)
    }

    /// [`Op::Store64`].
    pub const fn store64(place: Place, value: u64) -> Self {
        Self::at(Op::Store64, place, 0, value)
    }

    /// [`Op::CopyBlock`].
    pub const fn copy_block(from: Place, to: Place, length: u64) -> Self {
        let (argument, source) = from.split(flags::SOURCE_BUS);
        let entry = Self::at(Op::CopyBlock, to, length, argument);
        Self {
            flags: entry.flags | source,
            ..entry
        }
    }

    /// [`Op::PollAnd`].
    pub const fn poll_and(place: Place, value: u32) -> Self {
        Self::at(Op::PollAnd, place, 0, value as u64)
    }

    /// [`Op::PollNor`].
    pub const fn poll_nor(place: Place, value: u32) -> Self {
        Self::at(Op::PollNor, place, 0, value as u64)
    }

    /// [`Op::PollGeq`].
    pub const fn poll_geq(place: Place, value: u32) -> Self {
        Self::at(Op::PollGeq, place, 0, value as u64)
    }

    /// [`Op::Timestamp`].
    pub const fn timestamp(offset: u64, tag: u64) -> Self {
        Self::new(Op::Timestamp, offset, 0, tag)
    }

    /// The entry with an interrupt on completion.
    pub const fn with_interrupt(self, vector: u8) -> Self {
        Self {
            flags: self.flags & !flags::VECTOR | flags::INTERRUPT | ((vector as u32) << flags::VECTOR_SHIFT),
            ..self
        }
    }

    /// The entry with its result written to this offset in BAR2.
    pub const fn with_result(self, offset: u64) -> Self {
        Self {
            result: Some(offset),
            ..self
        }
    }

    /// Returns the bytes of the entry.
    pub fn encode(&self) -> [u8; ENTRY_SIZE as usize] {
        let mut bytes = [0; ENTRY_SIZE as usize];
        let result = if self.result.is_some() { flags::RESULT } else { 0 };
        bytes[entry::OP..][..4].copy_from_slice(&(self.op as u32).to_le_bytes());
        bytes[entry::FLAGS..][..4].copy_from_slice(&(self.flags | result).to_le_bytes());
        for (at, value) in [
            (entry::OFFSET, self.offset),
            (entry::LENGTH, self.length),
            (entry::ARGUMENT, self.argument),
            (entry::RESULT, self.result.unwrap_or(0)),
        ] {
            bytes[at..][..8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Reads an entry.
    ///
    /// # Errors
    ///
    /// [`Status::BadOperation`] if the operation is unknown or does not accept the flags; [`Status::BadArgument`] if a
    /// field that must be 0 is not.
    pub fn decode(bytes: &[u8; ENTRY_SIZE as usize]) -> Result<Self, Status> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..][..8]);
            u64::from_le_bytes(word)
        };
        let head = word(entry::OP);
        let op = Op::from_u32(head as u32).ok_or(Status::BadOperation)?;
        let all = (head >> 32) as u32;
        let flags = all & !flags::RESULT;
        if flags & !op.flags() != 0 {
            return Err(Status::BadOperation);
        }
        let place = word(entry::RESULT);
        let result = (all != flags).then_some(place);
        if result.is_none() && place != 0 || bytes[entry::RESERVED..].iter().any(|byte| *byte != 0) {
            return Err(Status::BadArgument);
        }
        Ok(Self {
            op,
            flags,
            offset: word(entry::OFFSET),
            length: word(entry::LENGTH),
            argument: word(entry::ARGUMENT),
            result,
        })
    }
}

// Registers HEAD and STATUS are read as one u64, which has the layout of a report.
const _: () = {
    assert!(reg::STATUS == reg::HEAD + 4 && reg::HEAD % 8 == 0);
    assert!(reg::TAIL + 4 <= STRIDE);
    assert!(entry::RESERVED < ENTRY_SIZE as usize);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_round_trip() {
        for op in Op::ALL {
            let all = Entry {
                flags: op.flags(),
                ..Entry::new(op, u64::MAX, 1 << 40, 0x0123_4567_89ab_cdef)
            };
            for entry in [Entry::new(op, 1, 2, 3), all, all.with_result(0), all.with_result(64)] {
                assert_eq!(Entry::decode(&entry.encode()), Ok(entry));
            }
        }
    }

    #[test]
    fn layout_is_fixed() {
        let entry = Entry::copy_block(Place::Bus(0x1122), Place::Bus(0x3344), 0x55)
            .with_interrupt(3)
            .with_result(0x6600);
        let mut expected = [0; 64];
        expected[..6].copy_from_slice(&[13, 0, 0, 0, 0x1e, 3]);
        expected[8..10].copy_from_slice(&[0x44, 0x33]);
        expected[16] = 0x55;
        expected[24..26].copy_from_slice(&[0x22, 0x11]);
        expected[33] = 0x66;
        assert_eq!(entry.encode(), expected);
    }

    #[test]
    fn invalid_entries_are_refused() {
        let good = Entry::store32(Place::Memory(8), 1).encode();
        assert!(Entry::decode(&good).is_ok());
        for (at, value, status) in [
            (entry::OP, 0, Status::BadOperation),
            (entry::OP, 21, Status::BadOperation),
            (entry::OP + 3, 1, Status::BadOperation),
            (entry::FLAGS, flags::INVERSE as u8, Status::BadOperation),
            (entry::FLAGS, flags::SOURCE_BUS as u8, Status::BadOperation),
            (entry::FLAGS + 3, 0x80, Status::BadOperation),
            (entry::RESULT, 8, Status::BadArgument),
            (entry::RESERVED, 1, Status::BadArgument),
            (ENTRY_SIZE as usize - 1, 1, Status::BadArgument),
        ] {
            let mut bytes = good;
            bytes[at] = value;
            assert_eq!(Entry::decode(&bytes), Err(status), "byte {at} is {value}");
        }
        assert_eq!(Entry::decode(&[0xff; 64]), Err(Status::BadOperation));
    }

    #[test]
    fn progress_wraps_around() {
        let at = |head| Progress { head, stopped: None };
        assert!(at(1).has_completed(0));
        assert!(!at(0).has_completed(0));
        assert!(at(0).has_completed(u32::MAX));
        assert!(at(3).has_completed(u32::MAX - 3));
        assert!(!at(u32::MAX).has_completed(0));
        assert!(!at(u32::MAX).has_completed(u32::MAX));
        for stopped in [None, Some(Status::TimedOut), Some(Status::BadRing)] {
            let progress = Progress {
                head: 0xfedc_ba98,
                stopped,
            };
            assert_eq!(Progress::from_u64(progress.to_u64()), Some(progress));
        }
        assert_eq!(Progress::from_u64(u64::MAX), None);
    }

    #[test]
    fn states_round_trip() {
        for state in State::ALL {
            assert_eq!(State::from_u32(state as u32), Some(state));
        }
        assert_eq!(State::from_u32(4), None);
    }
}
