// SPDX-License-Identifier: MIT OR Apache-2.0

//! User-space driver of the accelerator, for programs in guests. Maps the registers through sysfs and polls for
//! completion.
//!
//! Several programs can use one accelerator: each submission holds a lock on the register file of the device. The
//! counters belong to the device, so they include the commands of other programs. A [`Ring`] belongs to one program, which holds a
//! lock on the registers of the ring. The lock ends with the program, so that others can take the ring.
//!
//! ```no_run
//! use std::time::Duration;
//! use p2pmem_accel_regs::driver::{Accel, Direction};
//!
//! # fn main() -> Result<(), p2pmem_accel_regs::driver::Error> {
//! let accel = Accel::open("0000:03:00.0")?;
//! let timeout = Duration::from_secs(10);
//! accel.fft(0, 16 << 20, 1024, Direction::Forward, timeout)?;
//! println!("CRC-32C of the result: {:08x}", accel.checksum(0, 16 << 20, timeout)?);
//! # Ok(())
//! # }
//! ```

mod ring;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use p2pmem_pci_function::{FunctionError, Mapping, OutOfBounds, PciFunction};
use rustix::fs::FlockOperation;

use crate::{BAR0_SIZE, Counter, DEVICE_ID, ID, Op, Status, VENDOR_ID, VERSION, flags, reg, result_entry};

pub use ring::{EntryResult, Report, Reservation, Ring, RingMemory, RingOptions};

/// Bus master enable bit of the PCI command register.
const BUS_MASTER: u8 = 1 << 2;

/// Error of the driver.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No PCI device has this address.
    #[error("no PCI device {0}")]
    NoDevice(String),
    /// The device is no accelerator, or has another register map version.
    #[error("{0} is no accelerator with register map version {VERSION}: {1}")]
    NotAnAccelerator(String, String),
    /// Access to a sysfs or procfs file failed.
    #[error("{}: {error}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        error: io::Error,
    },
    /// The device completed a command with an error.
    #[error("{op:?} failed: {status}")]
    Command {
        /// The command.
        op: Op,
        /// Status in the result table.
        status: Status,
    },
    /// The command queue of the device is full.
    #[error("the command queue of the accelerator is full")]
    QueueFull,
    /// The device has no ring with this number.
    #[error("the accelerator has no ring {0}")]
    NoRing(u32),
    /// Another program uses the ring, or a program left it running.
    #[error("ring {0} is in use: take another one, or disable it if its program has ended")]
    RingBusy(u32),
    /// Programs use all rings of the device.
    #[error(
        "all {} rings of the accelerator are in use: end a program that uses one",
        crate::ring::COUNT
    )]
    AllRingsBusy,
    /// The ring does not run any more: the device was reset, or another program disabled the ring.
    #[error("ring {0} was disabled by a reset or by another program: start again")]
    RingDisabled(u32),
    /// All entries of the ring wait for the device.
    #[error("ring {0} is full: wait for an entry")]
    RingFull(u32),
    /// The ring stopped at an entry.
    #[error("ring {ring} stopped at entry {index}: {status}")]
    RingStopped {
        /// Number of the ring.
        ring: u32,
        /// Index of the entry that failed.
        index: u32,
        /// Status of the entry.
        status: Status,
    },
    /// A command did not complete in time, or another program held the lock too long.
    #[error("{0} did not complete within {1:?}")]
    Timeout(&'static str, Duration),
    /// The device was removed: registers read as all ones, or the kernel has removed its files.
    #[error("the accelerator was removed: its registers do not respond")]
    Gone,
    /// The memory of a ring cannot be accessed, for instance because its provider was removed.
    #[error("the memory of the ring cannot be accessed: {0}")]
    Memory(String),
    /// A range exceeds the buffer or the memory of the device.
    #[error("range exceeds the buffer or the accelerator's memory")]
    OutOfBounds,
    /// The process cannot read physical addresses.
    #[error("physical addresses cannot be read: {0}")]
    Pagemap(&'static str),
}

impl From<FunctionError> for Error {
    fn from(error: FunctionError) -> Self {
        match error {
            FunctionError::NoDevice(bdf) => Error::NoDevice(bdf),
            FunctionError::OtherDevice(bdf, what) => Error::NotAnAccelerator(bdf, what),
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

/// Direction of a Fourier transform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Forward, not scaled.
    Forward,
    /// Inverse, scaled by 1/points.
    Inverse,
}

/// Values of all counters of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters([u64; Counter::COUNT]);

impl Counters {
    /// Returns the value of one counter.
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }

    /// Iterates over the names and values of all counters.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Counter::ALL.iter().map(|(counter, name)| (*name, self.get(*counter)))
    }

    /// Returns the bytes of host memory that the DMA engine read and wrote.
    pub fn host_bytes(&self) -> u64 {
        self.get(Counter::HostRead) + self.get(Counter::HostWritten)
    }
}

/// An open accelerator.
#[derive(Debug)]
pub struct Accel {
    function: PciFunction,
    /// File of the registers; its lock serializes submissions.
    registers_file: File,
    /// Number of the file's inode, which the kernel does not use again.
    inode: u64,
    registers: Mapping,
    memory_size: u64,
}

impl Accel {
    /// Opens the accelerator at PCI address `bdf`, such as `0000:03:00.0`. Enables the device through sysfs if no
    /// driver has enabled it. Requires root.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn open(bdf: &str) -> Result<Self, Error> {
        Self::open_in(Path::new("/sys/bus/pci/devices"), bdf)
    }

    /// As [`Accel::open`], with the folder that has the devices, for tests without such a device.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn open_in(devices: &Path, bdf: &str) -> Result<Self, Error> {
        let function = PciFunction::open(devices, bdf, VENDOR_ID, DEVICE_ID)?;
        let (registers_file, registers) = function.map(0, BAR0_SIZE)?;
        let (id, version) = (registers.load32(reg::ID)?, registers.load32(reg::VERSION)?);
        if id == u32::MAX {
            return Err(Error::Gone);
        }
        if (id, version) != (ID, VERSION) {
            let what = format!("register ID {id:#010x}, version {version}");
            return Err(Error::NotAnAccelerator(bdf.to_owned(), what));
        }
        let memory_size = registers.load64(reg::MEMORY_SIZE)?;
        let inode = registers_file.metadata().map_err(|error| Error::File {
            path: function.path("resource0"),
            error,
        })?;
        Ok(Self {
            function,
            registers_file,
            inode: inode.ino(),
            registers,
            memory_size,
        })
    }

    /// Returns whether the device still has its files in sysfs. After the kernel has removed them, accesses to registers raise
    /// SIGBUS. Does not access the device.
    pub fn is_present(&self) -> bool {
        let found = std::fs::metadata(self.function.path("resource0"));
        found.is_ok_and(|found| found.ino() == self.inode)
    }

    /// Returns the size of BAR2 in bytes.
    pub fn memory_size(&self) -> u64 {
        self.memory_size
    }

    /// Sets the bits of `set` in the low byte of the PCI command register, and returns the byte. Writes nothing if
    /// `set` is 0.
    fn command_register(&self, set: u8) -> Result<u8, Error> {
        const COMMAND: u64 = 4;
        let mut file = self.function.file("config", set != 0)?;
        let mut change = || {
            let mut command = [0; 2];
            file.seek(SeekFrom::Start(COMMAND))?;
            file.read_exact(&mut command)?;
            if set != 0 {
                command[0] |= set;
                file.seek(SeekFrom::Start(COMMAND))?;
                file.write_all(&command)?;
            }
            io::Result::Ok(command[0])
        };
        change().map_err(|error| Error::File {
            path: self.function.path("config"),
            error,
        })
    }

    /// Returns whether bus mastering, and so DMA, is enabled.
    ///
    /// # Errors
    ///
    /// If the configuration space cannot be read.
    pub fn dma_enabled(&self) -> Result<bool, Error> {
        Ok(self.command_register(0)? & BUS_MASTER != 0)
    }

    /// Enables bus mastering. A kernel driver may have enabled it; otherwise it is disabled.
    ///
    /// # Errors
    ///
    /// If the configuration space cannot be written.
    pub fn enable_dma(&self) -> Result<(), Error> {
        self.command_register(BUS_MASTER).map(drop)
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

    /// Submits a command, waits for its completion for at most `timeout`, and returns its result.
    ///
    /// # Errors
    ///
    /// See [`Error`]. After [`Error::Timeout`], the command may still be running.
    pub fn run(
        &self,
        op: Op,
        flags: u32,
        offset: u64,
        length: u64,
        argument: u64,
        timeout: Duration,
    ) -> Result<u64, Error> {
        let deadline = Instant::now() + timeout;
        let seq = self.submit(op, flags, offset, length, argument, deadline, timeout)?;
        let entry = result_entry(seq);
        let mut poll = Poll::new(deadline);
        loop {
            let word = self.registers.load64(entry)?;
            if word == u64::MAX {
                return Err(Error::Gone);
            }
            if word as u32 == seq {
                let value = self.registers.load64(entry + 8)?;
                return match Status::from_u32((word >> 32) as u32) {
                    Some(Status::Ok) => Ok(value),
                    Some(status) => Err(Error::Command { op, status }),
                    None => Err(Error::Gone),
                };
            }
            if !poll.wait() {
                return Err(Error::Timeout("a command", timeout));
            }
        }
    }

    /// Keeps other programs from the registers. After `timeout`, the error says that the program waited for `what`.
    fn lock(&self, what: &'static str, deadline: Instant, timeout: Duration) -> Result<Lock<'_>, Error> {
        let lock = Lock::take(&self.registers_file, deadline).map_err(|error| Error::File {
            path: self.function.path("resource0"),
            error,
        })?;
        lock.ok_or(Error::Timeout(what, timeout))
    }

    #[allow(clippy::too_many_arguments)]
    fn submit(
        &self,
        op: Op,
        flags: u32,
        offset: u64,
        length: u64,
        argument: u64,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<u32, Error> {
        let _lock = self.lock("another program's submission", deadline, timeout)?;
        let registers = &self.registers;
        let refused = registers.load32(reg::REFUSED)?;
        registers.store32(reg::OP, op as u32)?;
        registers.store32(reg::FLAGS, flags)?;
        registers.store64(reg::OFFSET, offset)?;
        registers.store64(reg::LENGTH, length)?;
        registers.store64(reg::ARGUMENT, argument)?;
        registers.store32(reg::DOORBELL, 1)?;
        let seq = registers.load32(reg::SUBMITTED)?;
        if registers.load32(reg::ID)? != ID {
            return Err(Error::Gone);
        }
        if registers.load32(reg::REFUSED)? != refused {
            return Err(Error::QueueFull);
        }
        Ok(seq)
    }

    /// Transforms `length` bytes at `offset` in place: consecutive vectors of `points` complex f32 each.
    ///
    /// # Errors
    ///
    /// See [`Accel::run`].
    pub fn fft(
        &self,
        offset: u64,
        length: u64,
        points: u64,
        direction: Direction,
        timeout: Duration,
    ) -> Result<(), Error> {
        let flags = if direction == Direction::Inverse {
            flags::INVERSE
        } else {
            0
        };
        self.run(Op::Fft, flags, offset, length, points, timeout).map(drop)
    }

    /// Returns the CRC-32C of a range.
    ///
    /// # Errors
    ///
    /// See [`Accel::run`].
    pub fn checksum(&self, offset: u64, length: u64, timeout: Duration) -> Result<u32, Error> {
        // Not truncated: the result is a 32-bit checksum.
        self.run(Op::Crc32c, 0, offset, length, 0, timeout)
            .map(|crc| crc as u32)
    }

    /// Fills a range with a repeated word.
    ///
    /// # Errors
    ///
    /// See [`Accel::run`].
    pub fn fill(&self, offset: u64, length: u64, word: u64, timeout: Duration) -> Result<(), Error> {
        self.run(Op::Fill, 0, offset, length, word, timeout).map(drop)
    }

    /// Fills a range with the words [`crate::pattern_word`]`(seed, 0..)`.
    ///
    /// # Errors
    ///
    /// See [`Accel::run`].
    pub fn pattern(&self, offset: u64, length: u64, seed: u64, timeout: Duration) -> Result<(), Error> {
        self.run(Op::Pattern, 0, offset, length, seed, timeout).map(drop)
    }

    /// Copies within the memory of the device.
    ///
    /// # Errors
    ///
    /// See [`Accel::run`].
    pub fn copy(&self, from: u64, to: u64, length: u64, timeout: Duration) -> Result<(), Error> {
        self.run(Op::Copy, 0, to, length, from, timeout).map(drop)
    }

    /// Combines elements: each element of the range at `into` becomes the result of `op` of itself and of the element of the
    /// range at `from`. `op` is an addition or a maximum, such as [`Op::AddBf16`].
    ///
    /// # Errors
    ///
    /// See [`Accel::run`]. [`Status::BadOperation`] for other operations.
    pub fn combine(&self, op: Op, into: u64, from: u64, length: u64, timeout: Duration) -> Result<(), Error> {
        if op.element().is_none() {
            let status = Status::BadOperation;
            return Err(Error::Command { op, status });
        }
        self.run(op, 0, into, length, from, timeout).map(drop)
    }

    /// Transfers data from a bus address to the memory of the device, by DMA.
    ///
    /// # Errors
    ///
    /// See [`Accel::run`].
    pub fn dma_in(&self, address: u64, offset: u64, length: u64, timeout: Duration) -> Result<(), Error> {
        self.run(Op::DmaIn, 0, offset, length, address, timeout).map(drop)
    }

    /// Transfers data from the memory of the device to a bus address, by DMA.
    ///
    /// # Errors
    ///
    /// See [`Accel::run`].
    pub fn dma_out(&self, offset: u64, address: u64, length: u64, timeout: Duration) -> Result<(), Error> {
        self.run(Op::DmaOut, 0, offset, length, address, timeout).map(drop)
    }

    /// Reads all counters of the device. The reads themselves count as register reads.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`].
    pub fn counters(&self) -> Result<Counters, Error> {
        let mut values = [0; Counter::COUNT];
        for (counter, _) in Counter::ALL {
            values[counter as usize] = self.registers.load64(counter.register())?;
        }
        if self.registers.load32(reg::ID)? != ID {
            return Err(Error::Gone);
        }
        Ok(Counters(values))
    }

    /// Sets all counters to 0.
    ///
    /// # Errors
    ///
    /// The device reports no errors.
    pub fn reset_counters(&self) -> Result<(), Error> {
        Ok(self.registers.store32(reg::COUNTERS_RESET, 1)?)
    }
}

/// Poll loop with a deadline: the first polls spin, the later ones sleep.
struct Poll {
    deadline: Instant,
    polls: u32,
}

impl Poll {
    fn new(deadline: Instant) -> Self {
        Self { deadline, polls: 0 }
    }

    /// Waits before the next poll. Returns false after the deadline.
    fn wait(&mut self) -> bool {
        self.polls += 1;
        if self.polls > 16 {
            std::thread::sleep(Duration::from_micros(200));
        }
        Instant::now() < self.deadline
    }
}

/// Advisory lock (`flock`) that serializes submissions.
struct Lock<'a>(&'a File);

impl<'a> Lock<'a> {
    fn take(file: &'a File, deadline: Instant) -> io::Result<Option<Self>> {
        let mut poll = Poll::new(deadline);
        loop {
            match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(Self(file))),
                Err(rustix::io::Errno::WOULDBLOCK) if poll.wait() => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Ignore an error: closing the file releases the lock too.
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}

/// Mapping of BAR2.
#[derive(Debug)]
pub struct DeviceMemory {
    map: Mapping,
}

impl DeviceMemory {
    /// Copies from the mapping to `data`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        Ok(self.map.read(offset, data)?)
    }

    /// Copies `data` to the mapping.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        Ok(self.map.write(offset, data)?)
    }

    /// Loads the little-endian u64 at `offset`, a multiple of 8, with one access.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn load64(&self, offset: u64) -> Result<u64, Error> {
        Ok(self.map.load64(offset)?)
    }
}

/// Locked memory of this process with known physical addresses. For DMA without an IOMMU, where bus addresses are
/// physical addresses. For tests only: the kernel may migrate the pages during memory compaction.
#[derive(Debug)]
pub struct HostBuffer {
    map: Mapping,
    page: usize,
    /// Physical address of each page.
    pages: Vec<u64>,
}

impl HostBuffer {
    /// Allocates `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    ///
    /// [`Error::Pagemap`] if the process is not root.
    pub fn new(len: usize) -> Result<Self, Error> {
        const PRESENT: u64 = 1 << 63;
        const FRAME: u64 = (1 << 55) - 1;
        let page = rustix::param::page_size();
        let path = PathBuf::from("/proc/self/pagemap");
        let len = len.max(1).checked_next_multiple_of(page).ok_or(Error::OutOfBounds)?;
        let fail = |error| Error::File {
            path: path.clone(),
            error,
        };
        let map = Mapping::anonymous(len).map_err(fail)?;
        let mut file = File::open(&path).map_err(fail)?;
        file.seek(SeekFrom::Start((map.address() / page * 8) as u64))
            .map_err(fail)?;
        let mut entries = vec![0; len / page * 8];
        file.read_exact(&mut entries).map_err(fail)?;
        let mut pages = Vec::with_capacity(len / page);
        for entry in entries.chunks_exact(8) {
            let entry = entry.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(*byte));
            if entry & PRESENT == 0 {
                return Err(Error::Pagemap("a page is not present"));
            }
            if entry & FRAME == 0 {
                return Err(Error::Pagemap("the kernel hides them; run as root"));
            }
            pages.push((entry & FRAME) * page as u64);
        }
        Ok(Self { map, page, pages })
    }

    /// Returns the length in bytes; at least one page.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns the ranges of contiguous physical memory in order: bus address and length.
    pub fn segments(&self) -> Vec<(u64, u64)> {
        let mut segments: Vec<(u64, u64)> = Vec::new();
        for address in &self.pages {
            match segments.last_mut() {
                Some((start, len)) if *start + *len == *address => *len += self.page as u64,
                _ => segments.push((*address, self.page as u64)),
            }
        }
        segments
    }

    /// Copies from the buffer to `data`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Error> {
        Ok(self.map.read(offset, data)?)
    }

    /// Loads the little-endian u64 at `offset`, a multiple of 8, with one access.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn load64(&self, offset: u64) -> Result<u64, Error> {
        Ok(self.map.load64(offset)?)
    }

    /// Copies `data` to the buffer.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        Ok(self.map.write(offset, data)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a copy of the sysfs layout with one device and these register values.
    pub(super) fn devices(vendor: &str, registers: &[(u64, u32)]) -> tempfile::TempDir {
        let devices = tempfile::tempdir().unwrap();
        let folder = devices.path().join("0000:01:00.0");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("vendor"), format!("{vendor}\n")).unwrap();
        std::fs::write(folder.join("device"), format!("{DEVICE_ID:#06x}\n")).unwrap();
        std::fs::write(folder.join("enable"), "1\n").unwrap();
        std::fs::write(folder.join("config"), [0; 64]).unwrap();
        let mut bytes = vec![0; BAR0_SIZE as usize];
        for (offset, value) in registers {
            bytes[*offset as usize..][..4].copy_from_slice(&value.to_le_bytes());
        }
        std::fs::write(folder.join("resource0"), bytes).unwrap();
        devices
    }

    const TIMEOUT: Duration = Duration::from_millis(20);

    #[test]
    fn other_devices_are_rejected() {
        let good = devices(
            "0x1234",
            &[(reg::ID, ID), (reg::VERSION, VERSION), (reg::MEMORY_SIZE, 4096)],
        );
        for bdf in ["", "..", "0000:01:00.1", "../x"] {
            assert!(Accel::open_in(good.path(), bdf).is_err(), "{bdf}");
        }
        assert_eq!(Accel::open_in(good.path(), "0000:01:00.0").unwrap().memory_size(), 4096);
        let other = devices("0x8086", &[(reg::ID, ID), (reg::VERSION, VERSION)]);
        assert!(matches!(
            Accel::open_in(other.path(), "0000:01:00.0"),
            Err(Error::NotAnAccelerator(..))
        ));
        let newer = devices("0x1234", &[(reg::ID, ID), (reg::VERSION, VERSION + 1)]);
        assert!(matches!(
            Accel::open_in(newer.path(), "0000:01:00.0"),
            Err(Error::NotAnAccelerator(..))
        ));
        let gone = devices("0x1234", &[(reg::ID, u32::MAX)]);
        assert!(matches!(Accel::open_in(gone.path(), "0000:01:00.0"), Err(Error::Gone)));
    }

    #[test]
    fn wait_returns_result_error_status_or_timeout() {
        // The registers never change, so each submission gets the sequence number in SUBMITTED.
        let open = |registers: &[(u64, u32)]| {
            let devices = devices(
                "0x1234",
                &[&[(reg::ID, ID), (reg::VERSION, VERSION)], registers].concat(),
            );
            Accel::open_in(devices.path(), "0000:01:00.0").unwrap()
        };
        let stuck = open(&[(reg::SUBMITTED, 5)]);
        assert!(matches!(stuck.fill(0, 8, 1, TIMEOUT), Err(Error::Timeout(..))));
        let entry = result_entry(5);
        let done = open(&[
            (reg::SUBMITTED, 5),
            (entry, 5),
            (entry + 4, Status::Ok as u32),
            (entry + 8, 0xabcd),
        ]);
        assert_eq!(done.checksum(0, 8, TIMEOUT).unwrap(), 0xabcd);
        let bad = open(&[(reg::SUBMITTED, 5), (entry, 5), (entry + 4, Status::BadRange as u32)]);
        match bad.fft(0, 8, 1, Direction::Forward, TIMEOUT) {
            Err(Error::Command {
                op: Op::Fft,
                status: Status::BadRange,
            }) => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn wait_for_held_lock_times_out() {
        let devices = devices("0x1234", &[(reg::ID, ID), (reg::VERSION, VERSION)]);
        let accel = Accel::open_in(devices.path(), "0000:01:00.0").unwrap();
        let other = File::open(devices.path().join("0000:01:00.0/resource0")).unwrap();
        rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
        match accel.fill(0, 8, 0, TIMEOUT) {
            Err(Error::Timeout(what, _)) => assert_eq!(what, "another program's submission"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn dma_is_enabled_in_the_command_register() {
        let devices = devices("0x1234", &[(reg::ID, ID), (reg::VERSION, VERSION)]);
        let accel = Accel::open_in(devices.path(), "0000:01:00.0").unwrap();
        assert!(!accel.dma_enabled().unwrap());
        accel.enable_dma().unwrap();
        assert!(accel.dma_enabled().unwrap());
        assert_eq!(
            std::fs::read(devices.path().join("0000:01:00.0/config")).unwrap()[4],
            1 << 2
        );
    }

    #[test]
    fn host_buffer_has_bus_addresses_or_error() {
        match HostBuffer::new(10_000) {
            Ok(buffer) => {
                assert_eq!(
                    buffer.segments().iter().map(|(_, len)| len).sum::<u64>(),
                    buffer.len() as u64
                );
                buffer.write(9_990, b"0123456789").unwrap();
                let mut back = [0; 10];
                buffer.read(9_990, &mut back).unwrap();
                assert_eq!(&back, b"0123456789");
                assert!(buffer.write(buffer.len() as u64 - 1, &back).is_err());
            }
            Err(Error::Pagemap(_) | Error::File { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
