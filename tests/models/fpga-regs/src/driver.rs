// SPDX-License-Identifier: MIT OR Apache-2.0

//! User-space driver of the FPGA, for programs in guests. Maps the registers through sysfs, and reads frames through a
//! mapping of the caller.
//!
//! One program at a time can use the stream: it holds a lock on the register file of the device. A stream that a killed
//! program has left running is stopped before another one starts.
//!
//! ```no_run
//! use std::time::Duration;
//! use p2pmem_fpga_regs::driver::{Fpga, FrameMemory, Stream, StreamOptions};
//!
//! # fn example(memory: impl FrameMemory) -> Result<(), p2pmem_fpga_regs::driver::Error> {
//! let fpga = Fpga::open("0000:03:00.0")?;
//! let options = StreamOptions { rate: 1 << 20, ..StreamOptions::new(0, 64 << 10, 8) };
//! let mut stream = Stream::start(fpga, memory, options)?;
//! for _ in 0..100 {
//!     let frame = stream.wait(Duration::from_secs(10))?;
//!     println!("frame {} at {:#x}", frame.header.sequence, frame.offset);
//!     stream.release(1)?;
//! }
//! # Ok(())
//! # }
//! ```

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use p2pmem_pci_function::{FunctionError, Mapping, OutOfBounds, PciFunction};
use rustix::fs::FlockOperation;

use crate::frame::{HEADER_SIZE, Header, POSITION};
use crate::{BAR0_SIZE, Counter, DEVICE_ID, ID, Status, VENDOR_ID, VERSION, control, reg};

/// Longest wait for the end of the present frame when a stream is stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Polls before the driver sleeps between polls.
const SPINS: u32 = 64;
/// Sleep between two polls.
const SLEEP: Duration = Duration::from_micros(200);
/// Polls of memory between two reads of the status register, which traps.
const POLLS_PER_STATUS: u32 = 64;

/// Error of the driver.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No PCI device has this address.
    #[error("no PCI device {0}")]
    NoDevice(String),
    /// The device is no FPGA, or has another register map version.
    #[error("{0} is no FPGA with register map version {VERSION}: {1}")]
    NotAnFpga(String, String),
    /// Access to a sysfs file failed.
    #[error("{}: {error}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        error: io::Error,
    },
    /// The FPGA refused the settings, or the stream has stopped.
    #[error("the FPGA's stream does not run: {0}")]
    Stopped(Status),
    /// Another program uses the stream.
    #[error("another program uses the FPGA's stream: end that program first")]
    Busy,
    /// The memory of the frames cannot be read.
    #[error("reading the FPGA's memory failed: was the FPGA unbound or removed? {0}")]
    Memory(String),
    /// No frame arrived in time, or the stream did not stop in time.
    #[error("{0} within {1:?}")]
    Timeout(&'static str, Duration),
    /// The device was removed: registers read as all ones.
    #[error("the FPGA was removed: its registers do not respond")]
    Gone,
    /// The memory at the place of a frame has no header of a frame.
    #[error("the memory at {0:#x} has no frame: another program has written to it, or it was revoked")]
    NoFrame(u64),
    /// A range exceeds the memory, or more frames were released than were read.
    #[error("range exceeds the FPGA's memory or the frames that were read")]
    OutOfBounds,
}

impl From<FunctionError> for Error {
    fn from(error: FunctionError) -> Self {
        match error {
            FunctionError::NoDevice(bdf) => Error::NoDevice(bdf),
            FunctionError::OtherDevice(bdf, what) => Error::NotAnFpga(bdf, what),
            FunctionError::File { path, error } => Error::File { path, error },
            FunctionError::TooLarge => Error::OutOfBounds,
        }
    }
}

impl From<OutOfBounds> for Error {
    fn from(_: OutOfBounds) -> Self {
        Error::OutOfBounds
    }
}

/// Access to the FPGA's memory, at offsets in BAR2.
pub trait FrameMemory {
    /// Loads the little-endian u64 at `offset`, a multiple of 8, with one access.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`], [`Error::Memory`].
    fn load64(&self, offset: u64) -> Result<u64, Error>;
}

impl<T: FrameMemory + ?Sized> FrameMemory for &T {
    fn load64(&self, offset: u64) -> Result<u64, Error> {
        (**self).load64(offset)
    }
}

/// An open FPGA.
#[derive(Debug)]
pub struct Fpga {
    function: PciFunction,
    /// File of the registers; its lock belongs to the program that uses the stream.
    file: File,
    registers: Mapping,
    memory_size: u64,
}

impl Fpga {
    /// Opens the FPGA at PCI address `bdf`, such as `0000:03:00.0`. Enables the device through sysfs if no driver has
    /// enabled it. Requires root.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn open(bdf: &str) -> Result<Self, Error> {
        Self::open_in(Path::new("/sys/bus/pci/devices"), bdf)
    }

    fn open_in(devices: &Path, bdf: &str) -> Result<Self, Error> {
        let function = PciFunction::open(devices, bdf, VENDOR_ID, DEVICE_ID)?;
        let (file, registers) = function.map(0, BAR0_SIZE)?;
        let (id, version) = (registers.load32(reg::ID)?, registers.load32(reg::VERSION)?);
        if id == u32::MAX {
            return Err(Error::Gone);
        }
        if (id, version) != (ID, VERSION) {
            let what = format!("register ID {id:#010x}, version {version}");
            return Err(Error::NotAnFpga(bdf.to_owned(), what));
        }
        let memory_size = registers.load64(reg::MEMORY_SIZE)?;
        Ok(Self {
            function,
            file,
            registers,
            memory_size,
        })
    }

    /// Returns the size of BAR2 in bytes.
    pub fn memory_size(&self) -> u64 {
        self.memory_size
    }

    /// Maps BAR2 through sysfs. Fails if a driver has claimed BAR2.
    ///
    /// # Errors
    ///
    /// See [`Error::File`].
    pub fn map_memory(&self) -> Result<DeviceMemory, Error> {
        let (_, map) = self.function.map(2, self.memory_size)?;
        Ok(DeviceMemory { map })
    }

    /// Returns the status of the stream.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`].
    pub fn status(&self) -> Result<Status, Error> {
        Status::from_u32(self.registers.load32(reg::STATUS)?).ok_or(Error::Gone)
    }

    /// Returns the frames since the start: (written or dropped, dropped).
    ///
    /// # Errors
    ///
    /// [`Error::Gone`].
    pub fn frames(&self) -> Result<(u64, u64), Error> {
        let dropped = self.registers.load64(reg::DROPPED)?;
        let sequence = self.registers.load64(reg::SEQUENCE)?;
        self.status()?;
        Ok((sequence, dropped))
    }

    /// Returns the value of a counter.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`].
    pub fn counter(&self, counter: Counter) -> Result<u64, Error> {
        let value = self.registers.load64(reg::COUNTERS + 8 * counter as u64)?;
        self.status()?;
        Ok(value)
    }

    /// Stops the stream, and waits until the device does not access its memory.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], [`Error::Gone`].
    pub fn stop(&self) -> Result<(), Error> {
        self.registers.store32(reg::CONTROL, 0)?;
        let deadline = Instant::now() + STOP_TIMEOUT;
        while self.status()?.is_active() {
            if Instant::now() >= deadline {
                return Err(Error::Timeout("the FPGA's stream did not stop", STOP_TIMEOUT));
            }
            std::thread::sleep(SLEEP);
        }
        Ok(())
    }
}

/// Mapping of BAR2.
#[derive(Debug)]
pub struct DeviceMemory {
    map: Mapping,
}

impl FrameMemory for DeviceMemory {
    fn load64(&self, offset: u64) -> Result<u64, Error> {
        Ok(self.map.load64(offset)?)
    }
}

/// Settings of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Offset of the first slot in BAR2, a multiple of 64.
    pub offset: u64,
    /// Size of a frame and of a slot in bytes.
    pub frame_size: u32,
    /// Number of slots.
    pub frames: u32,
    /// Bytes per second; 0 for as many as the program reads.
    pub rate: u64,
    /// Seed of the samples.
    pub seed: u64,
    /// Number of frames after which the stream ends; 0 for no end.
    pub limit: u64,
}

impl StreamOptions {
    /// Returns settings without a rate and without an end.
    pub fn new(offset: u64, frame_size: u32, frames: u32) -> Self {
        Self {
            offset,
            frame_size,
            frames,
            rate: 0,
            seed: 1,
            limit: 0,
        }
    }
}

/// A frame in BAR2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Offset of the slot in BAR2.
    pub offset: u64,
    /// The header.
    pub header: Header,
}

/// A running stream. Dropping it stops the stream.
#[derive(Debug)]
pub struct Stream<M> {
    fpga: Fpga,
    memory: M,
    options: StreamOptions,
    /// Number of frames that were returned.
    taken: u64,
    /// Number of frames that were released.
    released: u64,
}

impl<M: FrameMemory> Stream<M> {
    /// Starts the stream.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`], [`Error::Timeout`] if an earlier stream does not stop, [`Error::Stopped`] with the reason if the device refuses the settings, [`Error::Gone`].
    pub fn start(fpga: Fpga, memory: M, options: StreamOptions) -> Result<Self, Error> {
        match rustix::fs::flock(&fpga.file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(Error::Busy),
            Err(error) => {
                return Err(Error::File {
                    path: fpga.function.path("resource0"),
                    error: error.into(),
                });
            }
        }
        // A program that was killed may have left it running.
        fpga.stop()?;
        let registers = &fpga.registers;
        registers.store64(reg::RING_OFFSET, options.offset)?;
        registers.store32(reg::FRAME_SIZE, options.frame_size)?;
        registers.store32(reg::FRAMES, options.frames)?;
        registers.store64(reg::RATE, options.rate)?;
        registers.store64(reg::SEED, options.seed)?;
        registers.store64(reg::LIMIT, options.limit)?;
        registers.store32(reg::CONTROL, control::RUN)?;
        match fpga.status()? {
            Status::Running | Status::Done => Ok(Self {
                fpga,
                memory,
                options,
                taken: 0,
                released: 0,
            }),
            status => Err(Error::Stopped(status)),
        }
    }

    /// Returns the FPGA.
    pub fn fpga(&self) -> &Fpga {
        &self.fpga
    }

    /// Returns the memory of the frames.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the settings.
    pub fn options(&self) -> &StreamOptions {
        &self.options
    }

    /// Returns the next frame, or `None` if the device has not written it yet. Accesses no register.
    ///
    /// # Errors
    ///
    /// [`Error::NoFrame`].
    pub fn poll(&mut self) -> Result<Option<Frame>, Error> {
        let frames = u64::from(self.options.frames);
        if self.taken - self.released == frames {
            return Ok(None);
        }
        let offset = self.options.offset + self.taken % frames * u64::from(self.options.frame_size);
        let position = self.taken + 1;
        if self.memory.load64(offset + POSITION)? != position {
            return Ok(None);
        }
        let mut bytes = [0; HEADER_SIZE];
        for (word, at) in bytes.chunks_exact_mut(8).zip((offset..).step_by(8)) {
            word.copy_from_slice(&self.memory.load64(at)?.to_le_bytes());
        }
        match Header::from_bytes(&bytes) {
            Some(header) if header.position == position => {
                self.taken = position;
                Ok(Some(Frame { offset, header }))
            }
            _ => Err(Error::NoFrame(offset)),
        }
    }

    /// Waits for the next frame.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::Stopped`] if the stream has stopped and all its frames were returned;
    /// [`Error::Gone`]; [`Error::NoFrame`].
    pub fn wait(&mut self, timeout: Duration) -> Result<Frame, Error> {
        let deadline = Instant::now() + timeout;
        for polls in 1_u32.. {
            if let Some(frame) = self.poll()? {
                return Ok(frame);
            }
            if polls % POLLS_PER_STATUS == 0 {
                let status = self.fpga.status()?;
                if !status.is_active() {
                    // The device may have written its last frame after the poll above.
                    return self.poll()?.ok_or(Error::Stopped(status));
                }
                if Instant::now() >= deadline {
                    return Err(Error::Timeout("the FPGA produced no frame", timeout));
                }
            }
            if polls > SPINS {
                std::thread::sleep(SLEEP);
            }
        }
        Err(Error::Timeout("the FPGA produced no frame", timeout))
    }

    /// Gives the slots of the `count` oldest frames back to the device.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if fewer frames were returned.
    pub fn release(&mut self, count: u64) -> Result<(), Error> {
        let released = self.released.checked_add(count).filter(|all| *all <= self.taken);
        self.released = released.ok_or(Error::OutOfBounds)?;
        // The register has the low 32 bits.
        Ok(self.fpga.registers.store32(reg::CONSUMED, self.released as u32)?)
    }

    /// Stops the stream, and waits until the device does not access its memory. Frames that the device has written can
    /// still be read.
    ///
    /// # Errors
    ///
    /// Those of [`Fpga::stop`].
    pub fn stop(&self) -> Result<(), Error> {
        self.fpga.stop()
    }
}

impl<M> Drop for Stream<M> {
    fn drop(&mut self) {
        // A device that is gone has stopped.
        let _ = self.fpga.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a copy of the sysfs layout with one device and these register values.
    fn devices(device: u16, registers: &[(u64, u32)]) -> tempfile::TempDir {
        let devices = tempfile::tempdir().unwrap();
        let folder = devices.path().join("0000:01:00.0");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("vendor"), format!("{VENDOR_ID:#06x}\n")).unwrap();
        std::fs::write(folder.join("device"), format!("{device:#06x}\n")).unwrap();
        std::fs::write(folder.join("enable"), "0\n").unwrap();
        let mut bytes = vec![0; BAR0_SIZE as usize];
        for (offset, value) in registers {
            bytes[*offset as usize..][..4].copy_from_slice(&value.to_le_bytes());
        }
        std::fs::write(folder.join("resource0"), bytes).unwrap();
        std::fs::write(folder.join("resource2"), vec![0; 8192]).unwrap();
        devices
    }

    const GOOD: [(u64, u32); 3] = [(reg::ID, ID), (reg::VERSION, VERSION), (reg::MEMORY_SIZE, 8192)];

    fn open(device: u16, registers: &[(u64, u32)]) -> Result<Fpga, Error> {
        Fpga::open_in(devices(device, registers).path(), "0000:01:00.0")
    }

    #[test]
    fn other_devices_are_rejected() {
        let devices = devices(DEVICE_ID, &GOOD);
        for bdf in ["", "..", "0000:01:00.1", "../x"] {
            assert!(Fpga::open_in(devices.path(), bdf).is_err(), "{bdf}");
        }
        assert_eq!(
            Fpga::open_in(devices.path(), "0000:01:00.0").unwrap().memory_size(),
            8192
        );
        let memory = Fpga::open_in(devices.path(), "0000:01:00.0")
            .unwrap()
            .map_memory()
            .unwrap();
        assert_eq!(memory.load64(8184).unwrap(), 0);
        assert!(matches!(memory.load64(8192), Err(Error::OutOfBounds)));
        let enable = std::fs::read_to_string(devices.path().join("0000:01:00.0/enable")).unwrap();
        assert_eq!(enable, "1");
        assert!(matches!(open(0xa2c1, &GOOD), Err(Error::NotAnFpga(..))));
        let newer = [(reg::ID, ID), (reg::VERSION, VERSION + 1)];
        assert!(matches!(open(DEVICE_ID, &newer), Err(Error::NotAnFpga(..))));
        assert!(matches!(open(DEVICE_ID, &[(reg::ID, u32::MAX)]), Err(Error::Gone)));
    }

    #[test]
    fn start_and_wait_report_the_status() {
        let started = |status: u32| {
            let fpga = open(DEVICE_ID, &[&GOOD[..], &[(reg::STATUS, status)]].concat()).unwrap();
            Stream::start(fpga, Words(vec![0; 256]), StreamOptions::new(0, 128, 2))
        };
        assert!(matches!(started(u32::MAX), Err(Error::Gone)));
        for status in [Status::Idle, Status::BadRing, Status::BadFrameSize, Status::BadRate] {
            match started(status as u32) {
                Err(Error::Stopped(found)) => assert_eq!(found, status),
                other => panic!("{other:?}"),
            }
        }
        let mut ended = started(Status::Done as u32).unwrap();
        match ended.wait(Duration::from_secs(60)) {
            Err(Error::Stopped(Status::Done)) => {}
            other => panic!("{other:?}"),
        }
        assert!(matches!(ended.release(1), Err(Error::OutOfBounds)));
    }

    #[test]
    fn a_stream_has_one_user() {
        let devices = devices(DEVICE_ID, &[&GOOD[..], &[(reg::STATUS, Status::Done as u32)]].concat());
        let start = || {
            let fpga = Fpga::open_in(devices.path(), "0000:01:00.0").unwrap();
            Stream::start(fpga, Words(vec![0; 256]), StreamOptions::new(0, 128, 2))
        };
        let first = start().unwrap();
        assert!(matches!(start(), Err(Error::Busy)));
        drop(first);
        start().unwrap();
    }

    /// Memory of two slots of 128 bytes.
    #[derive(Debug)]
    struct Words(Vec<u8>);

    impl FrameMemory for Words {
        fn load64(&self, offset: u64) -> Result<u64, Error> {
            let at = offset as usize;
            let bytes = self.0.get(at..at + 8).ok_or(Error::OutOfBounds)?;
            Ok(u64::from_le_bytes(bytes.try_into().unwrap()))
        }
    }

    #[test]
    fn frames_are_found_in_order_and_garbage_is_not() {
        let header = |position| Header {
            position,
            sequence: 10 * position,
            time: 0,
            payload: 64,
            crc32c: 0,
            seed: 1,
        };
        let mut memory = vec![0; 256];
        memory[..64].copy_from_slice(&header(1).to_bytes());
        memory[128..192].copy_from_slice(&header(2).to_bytes());
        let fpga = open(DEVICE_ID, &[&GOOD[..], &[(reg::STATUS, Status::Done as u32)]].concat()).unwrap();
        let mut stream = Stream::start(fpga, Words(memory), StreamOptions::new(0, 128, 2)).unwrap();
        for position in 1..=2 {
            let frame = stream.poll().unwrap().unwrap();
            assert_eq!((frame.offset, frame.header), ((position - 1) * 128, header(position)));
        }
        // Both slots are taken. After the release, the first slot still has frame 1.
        assert_eq!(stream.poll().unwrap(), None);
        stream.release(2).unwrap();
        assert_eq!(stream.poll().unwrap(), None);
        stream.memory.0[..64].copy_from_slice(&header(3).to_bytes());
        stream.memory.0[0] ^= 1;
        assert!(matches!(stream.poll(), Err(Error::NoFrame(0))));
    }
}
