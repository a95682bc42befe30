// SPDX-License-Identifier: MIT OR Apache-2.0

//! Register map of the test bed's accelerator: one definition for the device model and for the programs in guests.
//!
//! The device is a PCI function with three regions:
//!
//! | BAR | what | size |
//! |---|---|---|
//! | 0 | registers, trapped (this map) | [`BAR0_SIZE`] |
//! | 2 | memory, 64-bit prefetchable, mapped straight into the guest | [`reg::MEMORY_SIZE`] |
//! | 4 | MSI-X table and pending bits | [`BAR4_SIZE`] |
//!
//! Registers are little-endian, 4 or 8 bytes wide, and are accessed at their own width or, for those of 8 bytes, in two
//! halves. A command is submitted by writing its operation and arguments and then [`reg::DOORBELL`]; the device gives
//! it the next sequence number, readable in [`reg::SUBMITTED`], and runs commands in that order. When it has ended, its
//! entry in the result table ([`result_entry`]) holds that number, a [`Status`] and a result; [`reg::COMPLETED`] holds
//! the number of the last one ended.
//!
//! With the feature `std`, module `driver` drives the device from user space through sysfs.

#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(feature = "std")]
pub mod driver;
#[cfg(feature = "std")]
mod sys;

/// PCI vendor id: one that real hardware does not carry, used by emulators for experiments.
pub const VENDOR_ID: u16 = 0x1234;
/// PCI device id.
pub const DEVICE_ID: u16 = 0xa2c1;
/// PCI class code (24 bits): processing accelerator.
pub const CLASS: u32 = 0x12_00_00;
/// PCI revision, the same as [`VERSION`].
pub const REVISION: u8 = VERSION as u8;

/// Size of BAR0 in bytes.
pub const BAR0_SIZE: u64 = 64 << 10;
/// Size of BAR4 in bytes.
pub const BAR4_SIZE: u64 = 8 << 10;
/// Offset of the MSI-X table in BAR4.
pub const MSIX_TABLE: u32 = 0;
/// Offset of the MSI-X pending bits in BAR4.
pub const MSIX_PBA: u32 = 0x1000;
/// Number of MSI-X vectors.
pub const MSIX_VECTORS: u16 = 4;

/// Value of [`reg::ID`]: the bytes `P2PA`.
pub const ID: u32 = u32::from_le_bytes(*b"P2PA");
/// Value of [`reg::VERSION`]: version of this map, raised on every incompatible change.
pub const VERSION: u32 = 1;

/// Commands that can wait at once, and entries of the result table; a power of two.
pub const QUEUE_DEPTH: u32 = 64;

/// Smallest and largest number of points of one transform; both and all between must be powers of two.
pub const FFT_POINTS: core::ops::RangeInclusive<u64> = 2..=1 << 20;

/// Longest single DMA transfer, in bytes.
pub const DMA_MAX: u64 = 1 << 30;

/// Offsets of the registers in BAR0.
pub mod reg {
    /// u32, read-only: [`super::ID`].
    pub const ID: u64 = 0x000;
    /// u32, read-only: [`super::VERSION`].
    pub const VERSION: u64 = 0x004;
    /// u32, read-only: bit n is set where operation n ([`super::Op`]) exists.
    pub const FEATURES: u64 = 0x008;
    /// u32, read-write: see [`super::control`].
    pub const CONTROL: u64 = 0x00c;
    /// u64, read-only: size of BAR2 in bytes.
    pub const MEMORY_SIZE: u64 = 0x010;
    /// u32, read-only: [`super::QUEUE_DEPTH`].
    pub const QUEUE_DEPTH: u64 = 0x018;
    /// u32, read-only: commands accepted and not ended.
    pub const PENDING: u64 = 0x01c;
    /// u32, read-only: sequence number of the last command accepted; starts at 0, the first command is 1, wraps.
    pub const SUBMITTED: u64 = 0x020;
    /// u32, read-only: sequence number of the last command ended.
    pub const COMPLETED: u64 = 0x024;
    /// u32, read-only: doorbells refused because [`super::QUEUE_DEPTH`] commands were waiting.
    pub const REFUSED: u64 = 0x028;

    /// u32, read-write: operation of the next command ([`super::Op`]).
    pub const OP: u64 = 0x100;
    /// u32, read-write: see [`super::flags`].
    pub const FLAGS: u64 = 0x104;
    /// u64, read-write: offset in BAR2 of the range worked on (the destination, where there are two), in bytes.
    pub const OFFSET: u64 = 0x108;
    /// u64, read-write: length of that range in bytes.
    pub const LENGTH: u64 = 0x110;
    /// u64, read-write: the operation's argument; see [`super::Op`].
    pub const ARGUMENT: u64 = 0x118;
    /// u32, write-only: any value submits the command held in the registers above.
    pub const DOORBELL: u64 = 0x120;

    /// First of the byte and event counters: u64 each, read-only, in the order of [`super::Counter`].
    pub const COUNTERS: u64 = 0x200;
    /// u32, write-only: any value sets all counters to 0.
    pub const COUNTERS_RESET: u64 = 0x3f8;

    /// First entry of the result table: [`super::QUEUE_DEPTH`] entries of [`super::RESULT_SIZE`] bytes, read-only.
    pub const RESULTS: u64 = 0x1000;
}

/// Size of an entry in the result table: u32 sequence number, u32 [`Status`], u64 result.
pub const RESULT_SIZE: u64 = 16;

/// Offset in BAR0 of the result entry of the command with sequence number `seq`.
pub const fn result_entry(seq: u32) -> u64 {
    reg::RESULTS + (seq % QUEUE_DEPTH) as u64 * RESULT_SIZE
}

/// Bits of [`reg::CONTROL`].
pub mod control {
    /// Commands that ask for it raise their interrupt.
    pub const INTERRUPTS: u32 = 1 << 0;
    /// Writing 1 ends every waiting command as [`super::Status::Aborted`]; the bit reads as 0. Memory and counters stay.
    pub const ABORT: u32 = 1 << 1;
}

/// Bits of [`reg::FLAGS`].
pub mod flags {
    /// FFT: the inverse transform.
    pub const INVERSE: u32 = 1 << 0;
    /// Raise an interrupt when the command ends, on the vector in bits 15..8.
    pub const INTERRUPT: u32 = 1 << 1;
    /// Shift of the interrupt vector.
    pub const VECTOR_SHIFT: u32 = 8;
    /// Every bit that may be set.
    pub const KNOWN: u32 = INVERSE | INTERRUPT | (0xff << VECTOR_SHIFT);
}

/// Operations, as written to [`reg::OP`]. "Range" is the one of [`reg::OFFSET`] and [`reg::LENGTH`] in BAR2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Does nothing.
    Nop = 1,
    /// Fills the range with the argument, repeated as a little-endian u64; a last part of less than 8 bytes gets the
    /// first bytes of it.
    Fill = 2,
    /// Fills the range with a sequence that depends on the argument alone: word i is [`pattern_word`]`(argument, i)`.
    Pattern = 3,
    /// Copies LENGTH bytes within BAR2, from the offset in the argument to OFFSET; the ranges may overlap.
    Copy = 4,
    /// The result is the CRC-32C of the range.
    Crc32c = 5,
    /// Transforms the range in place, as consecutive vectors of complex f32 (re, im) with as many points as the argument
    /// says. The forward transform is not scaled, the inverse one by 1/points, so that one undoes the other.
    Fft = 6,
    /// Adds f32 values: the range += the range of the same length at the offset in the argument. They must not overlap.
    AddF32 = 7,
    /// DMA from the bus address in the argument into the range.
    DmaIn = 8,
    /// DMA from the range to the bus address in the argument.
    DmaOut = 9,
}

impl Op {
    /// Every operation.
    pub const ALL: [Op; 9] = [
        Op::Nop,
        Op::Fill,
        Op::Pattern,
        Op::Copy,
        Op::Crc32c,
        Op::Fft,
        Op::AddF32,
        Op::DmaIn,
        Op::DmaOut,
    ];

    /// The operation a value of [`reg::OP`] stands for.
    pub fn from_u32(value: u32) -> Option<Op> {
        Op::ALL.into_iter().find(|op| *op as u32 == value)
    }

    /// Value of [`reg::FEATURES`].
    pub fn features() -> u32 {
        Op::ALL.into_iter().fold(0, |bits, op| bits | (1 << op as u32))
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// It did what it should.
    Ok = 1,
    /// No such operation, or unknown flags.
    BadOperation = 2,
    /// A range does not lie in BAR2.
    BadRange = 3,
    /// The length is 0, too long, or not a multiple of what the operation works on.
    BadLength = 4,
    /// An offset is not aligned to what the operation works on.
    BadAlignment = 5,
    /// The argument is out of bounds, or two ranges overlap that must not.
    BadArgument = 6,
    /// DMA: nothing answers at the bus address.
    Unreachable = 7,
    /// DMA: the function's bus-master bit is off.
    BusMasterOff = 8,
    /// DMA: the target does not permit the access.
    Denied = 9,
    /// DMA: no answer in time.
    Timeout = 10,
    /// Ended by [`control::ABORT`] or by a reset.
    Aborted = 11,
}

impl Status {
    /// Every status.
    pub const ALL: [Status; 11] = [
        Status::Ok,
        Status::BadOperation,
        Status::BadRange,
        Status::BadLength,
        Status::BadAlignment,
        Status::BadArgument,
        Status::Unreachable,
        Status::BusMasterOff,
        Status::Denied,
        Status::Timeout,
        Status::Aborted,
    ];

    /// The status a value in the result table stands for.
    pub fn from_u32(value: u32) -> Option<Status> {
        Status::ALL.into_iter().find(|status| *status as u32 == value)
    }
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Status::Ok => "success",
            Status::BadOperation => "no such operation, or unknown flags",
            Status::BadRange => "range outside of the accelerator's memory",
            Status::BadLength => "bad length for this operation",
            Status::BadAlignment => "bad alignment for this operation",
            Status::BadArgument => "bad argument for this operation",
            Status::Unreachable => "nothing answers at the bus address",
            Status::BusMasterOff => "bus mastering is off",
            Status::Denied => "access denied by the DMA target",
            Status::Timeout => "no answer from the DMA target in time",
            Status::Aborted => "aborted",
        })
    }
}

/// The counters, in the order of their registers. Byte counters count payload, each side of a move on its own: a DMA from
/// guest memory counts in [`Counter::HostRead`] and in [`Counter::EngineWritten`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Bytes of BAR2 read by compute operations (copy, checksum, FFT, addition).
    ComputeRead = 0,
    /// Bytes of BAR2 written by compute operations (fill, pattern, copy, FFT, addition).
    ComputeWritten,
    /// Bytes of BAR2 read by the DMA engine.
    EngineRead,
    /// Bytes of BAR2 written by the DMA engine.
    EngineWritten,
    /// Bytes of guest memory read by the DMA engine.
    HostRead,
    /// Bytes of guest memory written by the DMA engine.
    HostWritten,
    /// Bytes read by the DMA engine from a peer whose memory is shared with the model as a file.
    PeerRead,
    /// Bytes written by the DMA engine to such a peer.
    PeerWritten,
    /// Bytes read by the DMA engine by messages, from whatever answers there: peers' BARs that no file stands for.
    MessageRead,
    /// Bytes written by the DMA engine by messages.
    MessageWritten,
    /// Bytes of BAR2 read by trapped accesses; reads through a mapping of BAR2 cannot be seen.
    TrappedRead,
    /// Bytes of BAR2 written by trapped accesses.
    TrappedWritten,
    /// Reads of registers.
    RegisterReads,
    /// Writes of registers.
    RegisterWrites,
    /// Register accesses that were ignored: unknown offset, width or alignment.
    RegisterBad,
    /// Commands ended with [`Status::Ok`].
    CommandsOk,
    /// Commands ended otherwise.
    CommandsFailed,
    /// Interrupts raised.
    Interrupts,
}

impl Counter {
    /// Every counter, in order, with the name it has in JSON.
    pub const ALL: [(Counter, &'static str); 18] = [
        (Counter::ComputeRead, "compute_read"),
        (Counter::ComputeWritten, "compute_written"),
        (Counter::EngineRead, "engine_read"),
        (Counter::EngineWritten, "engine_written"),
        (Counter::HostRead, "host_read"),
        (Counter::HostWritten, "host_written"),
        (Counter::PeerRead, "peer_read"),
        (Counter::PeerWritten, "peer_written"),
        (Counter::MessageRead, "message_read"),
        (Counter::MessageWritten, "message_written"),
        (Counter::TrappedRead, "trapped_read"),
        (Counter::TrappedWritten, "trapped_written"),
        (Counter::RegisterReads, "register_reads"),
        (Counter::RegisterWrites, "register_writes"),
        (Counter::RegisterBad, "register_bad"),
        (Counter::CommandsOk, "commands_ok"),
        (Counter::CommandsFailed, "commands_failed"),
        (Counter::Interrupts, "interrupts"),
    ];

    /// How many there are.
    pub const COUNT: usize = Counter::ALL.len();

    /// Offset of the counter's register in BAR0.
    pub const fn register(self) -> u64 {
        reg::COUNTERS + self as u64 * 8
    }
}

/// Word `index` of the sequence that [`Op::Pattern`] writes for `seed`: the SplitMix64 mixing of seed + index + 1 steps.
pub const fn pattern_word(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

// The registers do not overlap and are inside BAR0, and the tables have the order of their indices.
const _: () = {
    assert!(Counter::COUNT as u64 * 8 + reg::COUNTERS <= reg::COUNTERS_RESET);
    assert!(reg::COUNTERS_RESET + 4 <= reg::RESULTS);
    assert!(reg::RESULTS + QUEUE_DEPTH as u64 * RESULT_SIZE <= BAR0_SIZE);
    assert!(QUEUE_DEPTH.is_power_of_two());
    assert!(MSIX_TABLE + MSIX_VECTORS as u32 * 16 <= MSIX_PBA);
    assert!((MSIX_PBA as u64) < BAR4_SIZE);
    let mut i = 0;
    while i < Counter::COUNT {
        assert!(Counter::ALL[i].0 as usize == i);
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_both_ways() {
        for op in Op::ALL {
            assert_eq!(Op::from_u32(op as u32), Some(op));
            assert_ne!(Op::features() & (1 << op as u32), 0);
        }
        for status in Status::ALL {
            assert_eq!(Status::from_u32(status as u32), Some(status));
        }
        assert_eq!(Op::from_u32(0), None);
        assert_eq!(Op::from_u32(10), None);
        assert_eq!(Status::from_u32(0), None);
        assert_eq!(Status::from_u32(12), None);
    }

    #[test]
    fn pattern_is_splitmix64() {
        // The published first outputs of SplitMix64 for seed 1234567.
        assert_eq!(pattern_word(1_234_567, 0), 6_457_827_717_110_365_317);
        assert_eq!(pattern_word(1_234_567, 1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn result_entries_wrap() {
        assert_eq!(result_entry(0), result_entry(QUEUE_DEPTH));
        assert_eq!(result_entry(1), reg::RESULTS + RESULT_SIZE);
        assert_eq!(
            result_entry(u32::MAX),
            reg::RESULTS + (QUEUE_DEPTH as u64 - 1) * RESULT_SIZE
        );
    }
}
