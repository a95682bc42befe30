// SPDX-License-Identifier: MIT OR Apache-2.0

//! Register map of the test bed's FPGA, shared by the device model and by programs in guests.
//!
//! The device is a PCI function with two BARs:
//!
//! | BAR | content | size |
//! |---|---|---|
//! | 0 | registers (this map); accesses trap | [`BAR0_SIZE`] |
//! | 2 | memory, 64-bit prefetchable, mapped into the guest | [`reg::MEMORY_SIZE`] |
//!
//! The device samples a signal, and writes the samples in frames ([`frame`]) to a ring of slots in BAR2. Registers are
//! little-endian and 4 or 8 bytes wide. Accesses must have the width of the register; 8-byte registers can also be
//! accessed in two halves.
//!
//! To start the stream, write the settings ([`reg::RING_OFFSET`] to [`reg::LIMIT`]), then [`control::RUN`] to
//! [`reg::CONTROL`]. The device checks the settings; [`reg::STATUS`] has the result. Frame n is in slot n modulo the
//! number of slots. The driver writes the number of frames that it has read to [`reg::CONSUMED`], and the device uses
//! their slots again. A frame for which no slot is free is dropped and counted.
//!
//! With the feature `std`, module `driver` is a user-space driver that accesses the registers through sysfs.

#![cfg_attr(not(feature = "std"), no_std)]

#[cfg(feature = "std")]
pub mod driver;
pub mod frame;

/// PCI vendor ID, as used by emulators for experiments. No hardware vendor has this ID.
pub const VENDOR_ID: u16 = 0x1234;
/// PCI device ID.
pub const DEVICE_ID: u16 = 0xa2c2;
/// PCI class code (24 bits): signal processing controller, other.
pub const CLASS: u32 = 0x11_80_00;
/// PCI revision, the same as [`VERSION`].
pub const REVISION: u8 = VERSION as u8;

/// Size of BAR0 in bytes.
pub const BAR0_SIZE: u64 = 4 << 10;

/// Value of [`reg::ID`]: the bytes `P2PF`.
pub const ID: u32 = u32::from_le_bytes(*b"P2PF");
/// Value of [`reg::VERSION`]: version of this map, incremented on each incompatible change.
pub const VERSION: u32 = 1;

/// Smallest size of a frame in bytes, header included. The size is a multiple of it.
pub const FRAME_SIZE_STEP: u32 = 128;
/// Maximum rate in bytes per second.
pub const MAX_RATE: u64 = 1 << 40;

/// Offsets of the registers in BAR0.
pub mod reg {
    /// u32, read-only: [`super::ID`].
    pub const ID: u64 = 0x00;
    /// u32, read-only: [`super::VERSION`].
    pub const VERSION: u64 = 0x04;
    /// u64, read-only: size of BAR2 in bytes.
    pub const MEMORY_SIZE: u64 = 0x08;

    /// u64, read-write: offset of the first slot in BAR2, a multiple of 64.
    pub const RING_OFFSET: u64 = 0x10;
    /// u32, read-write: size of a frame in bytes, header included, a multiple of [`super::FRAME_SIZE_STEP`]. Also the
    /// size of a slot.
    pub const FRAME_SIZE: u64 = 0x18;
    /// u32, read-write: number of slots, at least 2.
    pub const FRAMES: u64 = 0x1c;
    /// u64, read-write: bytes per second, headers included, at most [`super::MAX_RATE`]. 0: as fast as the driver reads
    /// frames; then no frame is dropped.
    pub const RATE: u64 = 0x20;
    /// u64, read-write: start of the sequence of samples, see [`super::frame::fill_samples`].
    pub const SEED: u64 = 0x28;
    /// u64, read-write: number of frames, dropped ones included, after which the stream ends. 0: no end.
    pub const LIMIT: u64 = 0x30;

    /// u32, read-write: see [`super::control`].
    pub const CONTROL: u64 = 0x40;
    /// u32, read-only: see [`super::Status`].
    pub const STATUS: u64 = 0x44;
    /// u32, read-only: number of frames that the device has written since the start; wraps around.
    pub const PRODUCED: u64 = 0x48;
    /// u32, read-write: number of frames that the driver has read since the start; wraps around. A number above
    /// [`PRODUCED`], or below the last one, stops the stream with [`super::Status::BadConsumer`].
    pub const CONSUMED: u64 = 0x4c;
    /// u64, read-only: number of frames that the device has dropped since the start, because no slot was free.
    pub const DROPPED: u64 = 0x50;
    /// u64, read-only: number of frames since the start, dropped ones included. It is the sequence number of the next
    /// frame.
    pub const SEQUENCE: u64 = 0x58;

    /// First counter: u64 each, read-only, in the order of [`super::Counter`].
    pub const COUNTERS: u64 = 0x100;
    /// u32, write-only: any value sets all counters to 0.
    pub const COUNTERS_RESET: u64 = 0x1f8;
}

/// Bits of [`reg::CONTROL`].
pub mod control {
    /// Writing 1 starts the stream, writing 0 stops it. Reads as 1 while the stream runs. A start while the stream runs
    /// or stops is ignored and counted ([`super::Counter::Refused`]).
    pub const RUN: u32 = 1 << 0;
}

/// Values of [`reg::STATUS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// The stream has not been started, or the driver has stopped it. The device does not access BAR2.
    Idle = 0,
    /// The stream runs.
    Running = 1,
    /// The driver has stopped the stream; the device still writes the present frame.
    Stopping = 2,
    /// The stream has ended after [`reg::LIMIT`] frames.
    Done = 3,
    /// The offset of the ring is no multiple of 64, or the ring exceeds BAR2.
    BadRing = 16,
    /// The size of a frame is no multiple of [`FRAME_SIZE_STEP`], or 0.
    BadFrameSize = 17,
    /// The ring has less than 2 slots.
    BadFrames = 18,
    /// The rate is above [`MAX_RATE`].
    BadRate = 19,
    /// The driver has claimed to have read frames that the device has not written.
    BadConsumer = 20,
}

impl Status {
    /// All statuses.
    pub const ALL: [Status; 9] = [
        Status::Idle,
        Status::Running,
        Status::Stopping,
        Status::Done,
        Status::BadRing,
        Status::BadFrameSize,
        Status::BadFrames,
        Status::BadRate,
        Status::BadConsumer,
    ];

    /// Converts the value of a register.
    pub fn from_u32(value: u32) -> Option<Status> {
        Status::ALL.into_iter().find(|status| *status as u32 == value)
    }

    /// Returns whether the device may access BAR2.
    pub fn is_active(self) -> bool {
        matches!(self, Status::Running | Status::Stopping)
    }
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Status::Idle => "idle",
            Status::Running => "running",
            Status::Stopping => "stopping",
            Status::Done => "the stream has ended after its last frame",
            Status::BadRing => "the ring is not aligned to 64 bytes, or exceeds the FPGA's memory",
            Status::BadFrameSize => "the size of a frame is not a multiple of 128 bytes",
            Status::BadFrames => "the ring has less than 2 slots",
            Status::BadRate => "the rate exceeds 1 TiB per second",
            Status::BadConsumer => "the consumer counter is ahead of the producer counter",
        })
    }
}

/// Counters of the device. They count from the device's creation, or from the last reset of the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Frames written to BAR2.
    Frames = 0,
    /// Frames dropped because no slot was free.
    Dropped,
    /// Bytes written to BAR2 by the stream, headers included.
    StreamWritten,
    /// Streams started.
    Starts,
    /// Starts refused: invalid settings, or the stream was running.
    Refused,
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
}

impl Counter {
    /// All counters in order, with their JSON keys.
    pub const ALL: [(Counter, &'static str); 10] = [
        (Counter::Frames, "frames"),
        (Counter::Dropped, "dropped"),
        (Counter::StreamWritten, "stream_written"),
        (Counter::Starts, "starts"),
        (Counter::Refused, "refused"),
        (Counter::TrappedRead, "trapped_read"),
        (Counter::TrappedWritten, "trapped_written"),
        (Counter::RegisterReads, "register_reads"),
        (Counter::RegisterWrites, "register_writes"),
        (Counter::RegisterBad, "register_bad"),
    ];
    /// Number of counters.
    pub const COUNT: usize = Self::ALL.len();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_in_order() {
        for (i, (counter, _)) in Counter::ALL.iter().enumerate() {
            assert_eq!(*counter as usize, i);
        }
        for status in Status::ALL {
            assert_eq!(Status::from_u32(status as u32), Some(status));
            assert!(!status.to_string().is_empty());
        }
        assert_eq!(Status::from_u32(4), None);
        assert!(reg::COUNTERS + 8 * Counter::COUNT as u64 <= reg::COUNTERS_RESET);
    }
}
