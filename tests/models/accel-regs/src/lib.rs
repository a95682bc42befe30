// SPDX-License-Identifier: MIT OR Apache-2.0

//! Register map of the test bed's accelerator, shared by the device model and by programs in guests.
//!
//! The device is a PCI function with three BARs, or four:
//!
//! | BAR | content | size |
//! |---|---|---|
//! | 0 | registers (this map); accesses trap | [`BAR0_SIZE`] |
//! | 2 | memory, 64-bit prefetchable, mapped into the guest | [`reg::MEMORY_SIZE`] |
//! | 4 | MSI-X table and pending bits | [`BAR4_SIZE`] |
//! | 5 | optional: more memory, 32-bit, not prefetchable. Operations do not reach it | |
//!
//! Registers are little-endian and 4 or 8 bytes wide. Accesses must have the width of the register; 8-byte registers
//! can also be accessed in two halves. To submit a command, write its operation and arguments, then [`reg::DOORBELL`].
//! The device assigns the next sequence number, readable in [`reg::SUBMITTED`], and executes commands in order. On
//! completion, the command's entry in the result table ([`result_entry`]) holds the sequence number, a [`Status`] and a
//! result, and [`reg::COMPLETED`] holds the sequence number.
//!
//! Operations can also be queued in memory: a [`ring`] of entries in BAR2, which the device executes without a register
//! access per entry. There are [`ring::COUNT`] rings, and they run concurrently.
//!
//! With the feature `std`, module `driver` is a user-space driver that accesses the device through sysfs.

#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(feature = "std")]
pub mod driver;
pub mod ring;

/// PCI vendor ID, as used by emulators for experiments. No hardware vendor has this ID.
pub const VENDOR_ID: u16 = 0x1234;
/// PCI device ID.
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
/// Value of [`reg::VERSION`]: version of this map, incremented on each incompatible change.
pub const VERSION: u32 = 2;

/// Maximum number of pending commands, and number of entries of the result table. A power of two.
pub const QUEUE_DEPTH: u32 = 64;

/// Range of the number of points of a transform, which must also be a power of two.
pub const FFT_POINTS: core::ops::RangeInclusive<u64> = 2..=1 << 20;

/// Maximum length of a DMA transfer in bytes.
pub const DMA_MAX: u64 = 1 << 30;

/// Maximum length of [`Op::CopyBlock`] in bytes.
pub const BLOCK_MAX: u64 = 64 << 10;

/// Bits of each result of an addition or a maximum of f32 values that is NaN, so that results do not depend on the order of
/// operands.
pub const NAN_F32: u32 = 0x7fc0_0000;
/// As [`NAN_F32`], of bfloat16 values.
pub const NAN_BF16: u16 = 0x7fc0;

/// Bytes that [`Op::Timestamp`] writes: u64 nanoseconds since the device was created, u64 argument.
pub const TIMESTAMP_SIZE: u64 = 16;

/// Time limit of a poll in a command that was submitted by registers, in microseconds. Rings have their own
/// ([`ring::reg::POLL_LIMIT`]).
pub const COMMAND_POLL_LIMIT: u32 = 1_000_000;

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
    /// u32, read-only: number of accepted commands that are not completed.
    pub const PENDING: u64 = 0x01c;
    /// u32, read-only: sequence number of the last accepted command. Starts at 0; the first command is 1; wraps around.
    pub const SUBMITTED: u64 = 0x020;
    /// u32, read-only: sequence number of the last completed command.
    pub const COMPLETED: u64 = 0x024;
    /// u32, read-only: number of doorbells refused because [`super::QUEUE_DEPTH`] commands were pending.
    pub const REFUSED: u64 = 0x028;
    /// u32, read-only: number of rings, [`super::ring::COUNT`].
    pub const RING_COUNT: u64 = 0x02c;

    /// u32, read-write: operation of the next command ([`super::Op`]).
    pub const OP: u64 = 0x100;
    /// u32, read-write: see [`super::flags`].
    pub const FLAGS: u64 = 0x104;
    /// u64, read-write: offset of the range in BAR2, in bytes. With two ranges, the destination.
    pub const OFFSET: u64 = 0x108;
    /// u64, read-write: length of the range in bytes.
    pub const LENGTH: u64 = 0x110;
    /// u64, read-write: the operation's argument; see [`super::Op`].
    pub const ARGUMENT: u64 = 0x118;
    /// u32, write-only: any value submits the command in the registers above.
    pub const DOORBELL: u64 = 0x120;

    /// First counter: u64 each, read-only, in the order of [`super::Counter`].
    pub const COUNTERS: u64 = 0x200;
    /// u32, write-only: any value sets all counters to 0.
    pub const COUNTERS_RESET: u64 = 0x3f8;

    /// First entry of the result table: [`super::QUEUE_DEPTH`] entries of [`super::RESULT_SIZE`] bytes, read-only.
    pub const RESULTS: u64 = 0x1000;

    /// Registers of the first ring; see [`super::ring::register`].
    pub const RINGS: u64 = 0x2000;
}

/// Size of an entry in the result table: u32 sequence number, u32 [`Status`], u64 result.
pub const RESULT_SIZE: u64 = 16;

/// Offset in BAR0 of the result entry of the command with sequence number `seq`.
pub const fn result_entry(seq: u32) -> u64 {
    reg::RESULTS + (seq % QUEUE_DEPTH) as u64 * RESULT_SIZE
}

/// Bits of [`reg::CONTROL`].
pub mod control {
    /// Enables interrupts. A command raises one if it sets [`super::flags::INTERRUPT`].
    pub const INTERRUPTS: u32 = 1 << 0;
    /// Writing 1 aborts every pending command with [`super::Status::Aborted`], and stops every running ring with this
    /// status. Reads as 0. Memory and counters keep their contents.
    pub const ABORT: u32 = 1 << 1;
}

/// Bits of [`reg::FLAGS`], and of the flags of a ring's entry.
pub mod flags {
    /// [`super::Op::Fft`]: inverse transform.
    pub const INVERSE: u32 = 1 << 0;
    /// Raise an interrupt on completion, on the vector in bits 15..8.
    pub const INTERRUPT: u32 = 1 << 1;
    /// [`super::reg::OFFSET`] is a bus address.
    pub const BUS: u32 = 1 << 2;
    /// [`super::Op::CopyBlock`]: the argument is a bus address.
    pub const SOURCE_BUS: u32 = 1 << 3;
    /// Entries of a ring only: write the result to BAR2.
    pub const RESULT: u32 = 1 << 4;
    /// Shift of the interrupt vector.
    pub const VECTOR_SHIFT: u32 = 8;
    /// Mask of the interrupt vector.
    pub const VECTOR: u32 = 0xff << VECTOR_SHIFT;
}

/// Operations, as written to [`reg::OP`] or to an entry of a ring. The "range" is [`reg::LENGTH`] bytes at
/// [`reg::OFFSET`] in BAR2. The "place" is the address at [`reg::OFFSET`]: an offset in BAR2, or a bus address if
/// [`flags::BUS`] is set. Fields that an operation does not use are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// No operation.
    Nop = 1,
    /// Fills the range with the argument, repeated as a little-endian u64. A remainder of less than 8 bytes gets the
    /// first bytes of the argument.
    Fill = 2,
    /// Fills the range with a sequence: word i is [`pattern_word`]`(argument, i)`.
    Pattern = 3,
    /// Copies LENGTH bytes in BAR2 from the offset in the argument to OFFSET. The ranges may overlap.
    Copy = 4,
    /// Computes the CRC-32C of the range.
    Crc32c = 5,
    /// Transforms the range in place. The range holds consecutive vectors of complex f32 (re, im); the argument is the
    /// number of points of each. The forward transform is not scaled; the inverse is scaled by 1/points.
    Fft = 6,
    /// Adds f32 values: range += the range of the same length at the offset in the argument. The ranges must not
    /// overlap. A result that is NaN is [`NAN_F32`].
    AddF32 = 7,
    /// DMA from the bus address in the argument to the range.
    DmaIn = 8,
    /// DMA from the range to the bus address in the argument.
    DmaOut = 9,
    /// Makes all earlier stores of the same ring visible, to the host and to other devices, before any later one.
    Fence = 10,
    /// Stores the low 32 bits of the argument to the place, little-endian, as one access of 4 bytes. The place must be
    /// aligned to 4 bytes, and the high half of the argument must be 0.
    Store32 = 11,
    /// Stores the argument to the place, little-endian, as one access of 8 bytes. The place must be aligned to 8 bytes.
    Store64 = 12,
    /// Copies LENGTH bytes, at most [`BLOCK_MAX`], to the place, from the offset in BAR2 or (with
    /// [`flags::SOURCE_BUS`]) the bus address in the argument. The device reads all bytes before it writes the first.
    CopyBlock = 13,
    /// Waits until `word & value != 0`. `word` is the little-endian u32 at the place, which must be aligned to 4 bytes;
    /// `value` is the low half of the argument, and the high half must be 0. The result is the word. Fails with
    /// [`Status::TimedOut`] if the condition does not become true within the poll limit.
    PollAnd = 14,
    /// As [`Op::PollAnd`], until `word | value` has a bit that is 0.
    PollNor = 15,
    /// As [`Op::PollAnd`], until `word - value`, as a signed 32-bit number that wraps around, is 0 or positive.
    PollGeq = 16,
    /// Writes the device's clock and the argument to the range of [`TIMESTAMP_SIZE`] bytes at OFFSET, which must be
    /// aligned to 8 bytes. The result is the clock.
    Timestamp = 17,
    /// As [`Op::AddF32`], of bfloat16 values: adds them as f32 values, and rounds each sum to nearest, ties to even. A result
    /// that is NaN is [`NAN_BF16`].
    AddBf16 = 18,
    /// As [`Op::AddF32`], but each result is the larger value: [`NAN_F32`] if one of both is NaN, and +0 of +0 and -0.
    MaxF32 = 19,
    /// As [`Op::MaxF32`], of bfloat16 values. A result that is NaN is [`NAN_BF16`].
    MaxBf16 = 20,
}

impl Op {
    /// All operations.
    pub const ALL: [Op; 20] = [
        Op::Nop,
        Op::Fill,
        Op::Pattern,
        Op::Copy,
        Op::Crc32c,
        Op::Fft,
        Op::AddF32,
        Op::DmaIn,
        Op::DmaOut,
        Op::Fence,
        Op::Store32,
        Op::Store64,
        Op::CopyBlock,
        Op::PollAnd,
        Op::PollNor,
        Op::PollGeq,
        Op::Timestamp,
        Op::AddBf16,
        Op::MaxF32,
        Op::MaxBf16,
    ];

    /// Converts a value of [`reg::OP`].
    pub fn from_u32(value: u32) -> Option<Op> {
        Op::ALL.into_iter().find(|op| *op as u32 == value)
    }

    /// Returns the value of [`reg::FEATURES`].
    pub fn features() -> u32 {
        Op::ALL.into_iter().fold(0, |bits, op| bits | (1 << op as u32))
    }

    /// Returns the size in bytes of the elements of an addition or a maximum. `None` if the operation is neither.
    pub const fn element(self) -> Option<u64> {
        match self {
            Op::AddF32 | Op::MaxF32 => Some(4),
            Op::AddBf16 | Op::MaxBf16 => Some(2),
            _ => None,
        }
    }

    /// Returns the flags that the operation accepts, wherever it is submitted.
    pub const fn flags(self) -> u32 {
        let own = match self {
            Op::Fft => flags::INVERSE,
            Op::Store32 | Op::Store64 | Op::PollAnd | Op::PollNor | Op::PollGeq => flags::BUS,
            Op::CopyBlock => flags::BUS | flags::SOURCE_BUS,
            _ => 0,
        };
        own | flags::INTERRUPT | flags::VECTOR
    }

    /// Returns whether the condition of a poll is true for the word in memory. `None` if the operation is no poll.
    pub const fn is_true(self, word: u32, value: u32) -> Option<bool> {
        match self {
            Op::PollAnd => Some(word & value != 0),
            Op::PollNor => Some(word | value != u32::MAX),
            Op::PollGeq => Some(word.wrapping_sub(value) as i32 >= 0),
            _ => None,
        }
    }
}

/// Completion status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Success.
    Ok = 1,
    /// Unknown operation or flags.
    BadOperation = 2,
    /// A range is not in BAR2.
    BadRange = 3,
    /// The length is 0, too long, or no multiple of the operation's element size.
    BadLength = 4,
    /// An offset is not aligned to the operation's element size.
    BadAlignment = 5,
    /// The argument is out of range, or two ranges overlap that must not.
    BadArgument = 6,
    /// DMA: no target has the bus address.
    Unreachable = 7,
    /// DMA: bus mastering is disabled.
    BusMasterOff = 8,
    /// DMA: the target denies the access.
    Denied = 9,
    /// DMA: the target did not respond in time.
    Timeout = 10,
    /// Aborted by [`control::ABORT`] or by a reset.
    Aborted = 11,
    /// The condition of a poll did not become true within the poll limit.
    TimedOut = 12,
    /// The settings of a ring are invalid, or its producer index is more than the number of entries ahead of the
    /// consumer index.
    BadRing = 13,
}

impl Status {
    /// All statuses.
    pub const ALL: [Status; 13] = [
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
        Status::TimedOut,
        Status::BadRing,
    ];

    /// Converts a status of the result table.
    pub fn from_u32(value: u32) -> Option<Status> {
        Status::ALL.into_iter().find(|status| *status as u32 == value)
    }
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Status::Ok => "success",
            Status::BadOperation => "unknown operation or flags",
            Status::BadRange => "range exceeds the accelerator's memory",
            Status::BadLength => "bad length for this operation",
            Status::BadAlignment => "bad alignment for this operation",
            Status::BadArgument => "bad argument for this operation",
            Status::Unreachable => "no memory at the bus address",
            Status::BusMasterOff => "bus mastering is disabled",
            Status::Denied => "the DMA mapping does not permit the access",
            Status::Timeout => "timeout: no reply to the DMA access",
            Status::Aborted => "the command was aborted",
            Status::TimedOut => "the condition of the poll did not become true within the time limit",
            Status::BadRing => "the ring's settings or its producer index are invalid",
        })
    }
}

/// Counters, in the order of their registers. Byte counters count payload, separately for each side of a transfer: a
/// DMA from guest memory counts in [`Counter::HostRead`] and in [`Counter::EngineWritten`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Bytes of BAR2 read by compute operations (copy, checksum, FFT, addition, maximum).
    ComputeRead = 0,
    /// Bytes of BAR2 written by compute operations (fill, pattern, copy, FFT, addition, maximum).
    ComputeWritten,
    /// Bytes of BAR2 read by the DMA engine.
    EngineRead,
    /// Bytes of BAR2 written by the DMA engine.
    EngineWritten,
    /// Bytes of guest memory read by the DMA engine.
    HostRead,
    /// Bytes of guest memory written by the DMA engine.
    HostWritten,
    /// Bytes read by the DMA engine from a peer whose memory is mapped into the model.
    PeerRead,
    /// Bytes written by the DMA engine to a peer whose memory is mapped into the model.
    PeerWritten,
    /// Bytes read by the DMA engine by vfio-user messages, from targets that are not mapped, such as other BARs of
    /// peers.
    MessageRead,
    /// Bytes written by the DMA engine by vfio-user messages.
    MessageWritten,
    /// Bytes of BAR2 read by trapped accesses. Reads through a mapping of BAR2 are not visible to the model.
    TrappedRead,
    /// Bytes of BAR2 written by trapped accesses.
    TrappedWritten,
    /// Register reads.
    RegisterReads,
    /// Register writes.
    RegisterWrites,
    /// Ignored register accesses: unknown offset, wrong width or alignment.
    RegisterBad,
    /// Commands, submitted by registers, completed with [`Status::Ok`].
    CommandsOk,
    /// Commands, submitted by registers, completed with another status.
    CommandsFailed,
    /// Interrupts raised.
    Interrupts,
    /// Entries of rings completed with [`Status::Ok`].
    RingEntries,
    /// Rings that stopped with an error.
    RingErrors,
    /// Stores executed ([`Op::Store32`], [`Op::Store64`]).
    Stores,
    /// Polls whose condition became true.
    Polls,
    /// Reads of polls that found the condition false.
    PollRetries,
    /// Bytes of guest memory read by polls. Not in [`Counter::HostRead`].
    PollHostRead,
    /// Bytes of peers' mapped memory read by polls. Not in [`Counter::PeerRead`].
    PollPeerRead,
    /// Bytes read by polls by messages. Not in [`Counter::MessageRead`].
    PollMessageRead,
    /// Bytes of BAR2 read as entries of rings, and by polls. Reads of polls that found the condition false are not
    /// included.
    ControlRead,
    /// Bytes of BAR2 written by stores, timestamps, and as results and reports of rings.
    ControlWritten,
}

impl Counter {
    /// All counters in order, with their JSON keys.
    pub const ALL: [(Counter, &'static str); 28] = [
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
        (Counter::RingEntries, "ring_entries"),
        (Counter::RingErrors, "ring_errors"),
        (Counter::Stores, "stores"),
        (Counter::Polls, "polls"),
        (Counter::PollRetries, "poll_retries"),
        (Counter::PollHostRead, "poll_host_read"),
        (Counter::PollPeerRead, "poll_peer_read"),
        (Counter::PollMessageRead, "poll_message_read"),
        (Counter::ControlRead, "control_read"),
        (Counter::ControlWritten, "control_written"),
    ];

    /// Number of counters.
    pub const COUNT: usize = Counter::ALL.len();

    /// Returns the offset of the counter's register in BAR0.
    pub const fn register(self) -> u64 {
        reg::COUNTERS + self as u64 * 8
    }
}

/// Returns word `index` of the sequence that [`Op::Pattern`] writes for `seed`: SplitMix64 after `seed` + `index` + 1
/// steps.
pub const fn pattern_word(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

// The registers must not overlap and must fit in BAR0, the MSI-X table and its pending bits in BAR4. The order of
// `Counter::ALL` must match the discriminants.
const _: () = {
    assert!(Counter::COUNT as u64 * 8 + reg::COUNTERS <= reg::COUNTERS_RESET);
    assert!(reg::COUNTERS_RESET + 4 <= reg::RESULTS);
    assert!(reg::RESULTS + QUEUE_DEPTH as u64 * RESULT_SIZE <= reg::RINGS);
    assert!(ring::register(ring::COUNT, 0) <= BAR0_SIZE);
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
    fn opcodes_and_statuses_round_trip() {
        for op in Op::ALL {
            assert_eq!(Op::from_u32(op as u32), Some(op));
            assert_ne!(Op::features() & (1 << op as u32), 0);
        }
        for status in Status::ALL {
            assert_eq!(Status::from_u32(status as u32), Some(status));
        }
        assert_eq!(Op::from_u32(0), None);
        assert_eq!(Op::from_u32(21), None);
        assert_eq!(Status::from_u32(0), None);
        assert_eq!(Status::from_u32(14), None);
    }

    #[test]
    fn only_operations_with_a_place_accept_bus_addresses() {
        let accepting = |flag| Op::ALL.into_iter().filter(move |op| op.flags() & flag != 0);
        let with_place = [
            Op::Store32,
            Op::Store64,
            Op::CopyBlock,
            Op::PollAnd,
            Op::PollNor,
            Op::PollGeq,
        ];
        assert!(accepting(flags::BUS).eq(with_place));
        assert!(accepting(flags::SOURCE_BUS).eq([Op::CopyBlock]));
        assert!(accepting(flags::INVERSE).eq([Op::Fft]));
        assert_eq!(accepting(flags::INTERRUPT).count(), Op::ALL.len());
        assert_eq!(accepting(flags::RESULT).count(), 0);
    }

    #[test]
    fn polls_compare_bits_and_wrapping_order() {
        for (op, word, value, expected) in [
            (Op::PollAnd, 0x10, 0x30, true),
            (Op::PollAnd, 0xcf, 0x30, false),
            (Op::PollAnd, u32::MAX, 0, false),
            (Op::PollNor, u32::MAX, 0, false),
            (Op::PollNor, 0x7fff_ffff, 0, true),
            (Op::PollNor, 0x7fff_ffff, 0x8000_0000, false),
            (Op::PollNor, 0, u32::MAX, false),
            (Op::PollGeq, 5, 5, true),
            (Op::PollGeq, 4, 5, false),
            (Op::PollGeq, 3, u32::MAX, true),
            (Op::PollGeq, u32::MAX, 3, false),
            (Op::PollGeq, 0x8000_0004, 5, true),
            (Op::PollGeq, 0x8000_0005, 5, false),
        ] {
            assert_eq!(op.is_true(word, value), Some(expected), "{op:?} {word:#x} {value:#x}");
        }
        assert_eq!(Op::Fill.is_true(1, 1), None);
    }

    /// The last dword of an mlx5 CQE has the opcode in bits 31..28 and the owner bit in bit 24, in the byte order of
    /// memory. Two polls in a row find out whether the CQE is valid, whatever the buffer held before.
    #[test]
    fn polls_find_completions_of_mlx5() {
        const OWNER: u32 = u32::from_le_bytes([0, 0, 0, 1]);
        const OPCODE: u32 = u32::from_le_bytes([0, 0, 0, 0xf0]);
        for byte in 0..=u8::MAX {
            for rest in [0, 0x00ab_cdef, 0x00ff_ffff] {
                let word = u32::from_le_bytes([0, 0, 0, byte]) | rest;
                for lap in 0..4 {
                    let owner = if lap % 2 == 1 {
                        Op::PollAnd.is_true(word, OWNER)
                    } else {
                        Op::PollNor.is_true(word, !OWNER)
                    };
                    let opcode = Op::PollNor.is_true(word, !OPCODE);
                    let valid = byte & 1 == lap % 2 && byte >> 4 != 0xf;
                    assert_eq!(
                        owner.zip(opcode).map(|(a, b)| a && b),
                        Some(valid),
                        "{byte:#x} in lap {lap}"
                    );
                }
            }
        }
    }

    #[test]
    fn pattern_is_splitmix64() {
        // First published outputs of SplitMix64 for seed 1234567.
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
