// SPDX-License-Identifier: MIT OR Apache-2.0

//! A ring of work: entries in BAR2 that the accelerator executes by itself.
//!
//! ```no_run
//! use std::time::Duration;
//! use p2pmem_accel_regs::driver::{Accel, Ring, RingOptions};
//! use p2pmem_accel_regs::ring::{Entry, Place};
//!
//! # fn main() -> Result<(), p2pmem_accel_regs::driver::Error> {
//! let accel = Accel::open("0000:03:00.0")?;
//! let options = RingOptions::new(0, 256);
//! let mut ring = Ring::new(&accel, 0, accel.map_memory()?, options)?;
//! // When the word at 1 MiB is 7 or more: transform 16 MiB, then set the word at 1 MiB + 4.
//! ring.push(&Entry::poll_geq(Place::Memory(1 << 20), 7))?;
//! ring.push(&Entry::fft(16 << 20, 16 << 20, 1024))?;
//! let last = ring.push(&Entry::store32(Place::Memory((1 << 20) + 4), 1))?;
//! ring.doorbell()?;
//! ring.wait(last, Duration::from_secs(10))?;
//! # Ok(())
//! # }
//! ```

use std::borrow::Borrow;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::{Accel, DeviceMemory, Error, Lock, Poll};
use crate::ring::{self, Entry, Progress, State, control, reg};
use crate::{RESULT_SIZE, Status};

/// Maximum time that dropping a ring waits for its entry in progress.
const DROP_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time to wait for another program that reserves a ring, and for the start of a ring.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A mapping of the accelerator's memory, or of the part of it that a ring uses. Offsets are offsets in BAR2.
pub trait RingMemory {
    /// Copies `data` to the memory.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range is not mapped.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error>;

    /// Loads the little-endian u64 at `offset`, a multiple of 8, with one access.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`] if the range is not mapped.
    fn load64(&self, offset: u64) -> Result<u64, Error>;
}

impl RingMemory for DeviceMemory {
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        DeviceMemory::write(self, offset, data)
    }

    fn load64(&self, offset: u64) -> Result<u64, Error> {
        DeviceMemory::load64(self, offset)
    }
}

impl<M: RingMemory + ?Sized> RingMemory for &M {
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        (**self).write(offset, data)
    }

    fn load64(&self, offset: u64) -> Result<u64, Error> {
        (**self).load64(offset)
    }
}

impl<M: RingMemory + ?Sized> RingMemory for Arc<M> {
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        (**self).write(offset, data)
    }

    fn load64(&self, offset: u64) -> Result<u64, Error> {
        (**self).load64(offset)
    }
}

/// Where the device reports its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// At an offset in BAR2, which [`RingMemory`] must include.
    Memory(u64),
    /// At a bus address. The program reads the report itself, see [`Ring::wait_with`].
    Bus(u64),
    /// Nowhere: [`Ring::wait`] and [`Ring::push`] on a full ring read registers, and each read traps.
    Registers,
}

/// Configuration of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingOptions {
    /// Offset of the entries in BAR2, a multiple of [`ring::ENTRY_SIZE`].
    pub base: u64,
    /// Number of entries, a power of two up to [`ring::MAX_ENTRIES`].
    pub entries: u32,
    /// Where the device reports its progress.
    pub report: Report,
    /// Maximum time of a poll, in microseconds that fit in a u32.
    pub poll_limit: Duration,
    /// Vector of the interrupt on an error.
    pub error_vector: Option<u8>,
    /// Index of the first entry.
    pub first: u32,
}

impl RingOptions {
    /// A ring at `base` that reports right behind its entries, with a poll limit of one second. Occupies
    /// [`RingOptions::area`] bytes.
    pub fn new(base: u64, entries: u32) -> Self {
        Self {
            base,
            entries,
            report: Report::Memory(base.wrapping_add(u64::from(entries) * ring::ENTRY_SIZE)),
            poll_limit: Duration::from_micros(ring::DEFAULT_POLL_LIMIT.into()),
            error_vector: None,
            first: 0,
        }
    }

    /// Bytes of BAR2 that a ring of [`RingOptions::new`] occupies.
    pub const fn area(entries: u32) -> u64 {
        (entries as u64 + 1) * ring::ENTRY_SIZE
    }

    fn control(&self) -> u32 {
        let report = match self.report {
            Report::Memory(_) => control::REPORT_MEMORY,
            Report::Bus(_) => control::REPORT_BUS,
            Report::Registers => 0,
        };
        let vector = self.error_vector.map_or(0, |vector| {
            control::ERROR_INTERRUPT | (u32::from(vector) << control::VECTOR_SHIFT)
        });
        control::ENABLE | report | vector
    }
}

/// Result of an entry, as the device writes it to BAR2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryResult {
    /// Index of the entry.
    pub index: u32,
    /// Status.
    pub status: Status,
    /// Result of the operation.
    pub value: u64,
}

/// The right of this program to use a ring: no other reservation of this ring exists, in any program.
///
/// The reservation is a lock on the ring's registers in the file of BAR0. The kernel releases it when the program ends, however
/// it ends.
#[derive(Debug)]
pub struct Reservation {
    number: u32,
    /// An open file of its own, so that reservations of one program exclude each other too.
    _file: File,
}

impl Reservation {
    /// Returns the number of the ring.
    pub fn number(&self) -> u32 {
        self.number
    }
}

/// A ring that belongs to this program. Dropping it disables the ring.
#[derive(Debug)]
pub struct Ring<A: Borrow<Accel>, M: RingMemory> {
    accel: A,
    memory: M,
    number: u32,
    /// Released after the ring was disabled.
    _reservation: Reservation,
    options: RingOptions,
    /// Index of the next entry.
    tail: u32,
    /// Last known consumer index.
    head: u32,
}

impl Accel {
    fn ring_register(&self, number: u32, register: u64) -> Result<u32, Error> {
        match self.registers.load32(ring::register(number, register))? {
            u32::MAX if self.registers.load32(crate::reg::ID)? == u32::MAX => Err(Error::Gone),
            value => Ok(value),
        }
    }

    /// Returns the progress of a ring from its registers. The read traps.
    ///
    /// # Errors
    ///
    /// [`Error::NoRing`] and [`Error::Gone`].
    pub fn ring_progress(&self, number: u32) -> Result<Progress, Error> {
        check_number(number)?;
        let word = self.registers.load64(ring::register(number, reg::HEAD))?;
        Progress::from_u64(word).ok_or(Error::Gone)
    }

    /// Disables a ring, also one that another program uses, and waits until it does no more accesses.
    ///
    /// # Errors
    ///
    /// [`Error::NoRing`], [`Error::Gone`], and [`Error::Timeout`].
    pub fn disable_ring(&self, number: u32, timeout: Duration) -> Result<(), Error> {
        check_number(number)?;
        if !self.is_present() {
            return Err(Error::Gone);
        }
        self.registers.store32(ring::register(number, reg::CONTROL), 0)?;
        let mut poll = Poll::new(Instant::now() + timeout);
        while self.ring_register(number, reg::STATE)? != State::Disabled as u32 {
            if !poll.wait() {
                return Err(Error::Timeout("disabling a ring", timeout));
            }
        }
        Ok(())
    }
}

impl Accel {
    /// Reserves a ring unless a program uses it. The ring may be running, if its program was killed. The caller holds
    /// [`Accel::lock_rings`].
    fn lock_ring(&self, number: u32) -> Result<Option<Reservation>, Error> {
        check_number(number)?;
        let file = self.function.file("resource0", true)?;
        let range = |value: u64| libc::off_t::try_from(value).map_err(|_| Error::OutOfBounds);
        // The range has the registers of the ring. The lock belongs to the open file, not to the process.
        let lock = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: range(ring::register(number, 0))?,
            l_len: range(ring::STRIDE)?,
            l_pid: 0,
        };
        match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => Ok(Some(Reservation { number, _file: file })),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(None),
            Err(error) => Err(Error::File {
                path: self.function.path("resource0"),
                error: io::Error::from(error),
            }),
        }
    }

    /// Disables rings that run although no program uses them: their programs were killed. Reserves the first ring that no program
    /// uses if `wanted` is set.
    fn sweep(&self, wanted: bool, timeout: Duration) -> Result<Option<Reservation>, Error> {
        let _lock = self.lock_rings()?;
        let mut found = None;
        for number in 0..ring::COUNT {
            let disabled = || Ok::<_, Error>(self.ring_register(number, reg::STATE)? == State::Disabled as u32);
            if disabled()? && (!wanted || found.is_some()) {
                continue;
            }
            let Some(reservation) = self.lock_ring(number)? else {
                continue;
            };
            if !disabled()? {
                self.disable_ring(number, timeout)?;
            }
            if wanted {
                found.get_or_insert(reservation);
            }
        }
        Ok(found)
    }

    /// Disables all rings that run although no program uses them: their programs were killed. `timeout` is the time limit for the
    /// end of each ring's entry in progress.
    ///
    /// # Errors
    ///
    /// Those of [`Accel::disable_ring`], and [`Error::File`].
    pub fn disable_abandoned_rings(&self, timeout: Duration) -> Result<(), Error> {
        self.sweep(false, timeout).map(drop)
    }

    /// Reserves the first ring that no program uses, after [`Accel::disable_abandoned_rings`].
    ///
    /// # Errors
    ///
    /// [`Error::AllRingsBusy`], and those of [`Accel::disable_abandoned_rings`].
    pub fn reserve_ring(&self, timeout: Duration) -> Result<Reservation, Error> {
        self.sweep(true, timeout)?.ok_or(Error::AllRingsBusy)
    }

    /// Keeps other programs from reserving rings. A program that looks for a ring holds other rings for a moment, which another
    /// program would take for rings in use.
    fn lock_rings(&self) -> Result<Lock<'_>, Error> {
        let deadline = Instant::now() + START_TIMEOUT;
        self.lock("another program's access", deadline, START_TIMEOUT)
    }
}

fn check_number(number: u32) -> Result<(), Error> {
    if number < ring::COUNT {
        Ok(())
    } else {
        Err(Error::NoRing(number))
    }
}

impl<A: Borrow<Accel>, M: RingMemory> Ring<A, M> {
    /// Reserves, configures and starts ring `number`. `memory` must include the entries, and the report if it is in BAR2.
    ///
    /// # Errors
    ///
    /// [`Error::RingBusy`] if another program uses the ring, or the ring is not disabled; [`Accel::disable_ring`] disables a
    /// ring that a program left. Those of [`Ring::reserved`].
    pub fn new(accel: A, number: u32, memory: M, options: RingOptions) -> Result<Self, Error> {
        let device: &Accel = accel.borrow();
        let reservation = {
            let _lock = device.lock_rings()?;
            device.lock_ring(number)?.ok_or(Error::RingBusy(number))?
        };
        Self::reserved(accel, reservation, memory, options)
    }

    /// Configures and starts a reserved ring. `memory` must include the entries, and the report if it is in BAR2.
    ///
    /// # Errors
    ///
    /// [`Error::RingBusy`] if the ring is not disabled; [`Error::RingStopped`] if the device refuses the options. Others: see
    /// [`Error`].
    pub fn reserved(accel: A, reservation: Reservation, memory: M, options: RingOptions) -> Result<Self, Error> {
        let number = reservation.number;
        let device: &Accel = accel.borrow();
        if device.ring_register(number, reg::STATE)? != State::Disabled as u32 {
            return Err(Error::RingBusy(number));
        }
        start(device, number, &memory, &options)?;
        Ok(Self {
            accel,
            memory,
            number,
            _reservation: reservation,
            options,
            tail: options.first,
            head: options.first,
        })
    }

    /// Writes the next entry, and returns its index. The device executes the entry after [`Ring::doorbell`].
    ///
    /// # Errors
    ///
    /// [`Error::RingFull`] if all entries wait for the device; [`Error::RingStopped`] if the ring is full and has stopped.
    pub fn push(&mut self, entry: &Entry) -> Result<u32, Error> {
        if self.free() == 0 {
            let progress = self.progress()?;
            self.head = progress.head;
            if self.free() == 0 {
                return Err(self.stopped(progress).unwrap_or(Error::RingFull(self.number)));
            }
        }
        let index = self.tail;
        let slot = u64::from(index & (self.options.entries - 1));
        self.memory
            .write(self.options.base + slot * ring::ENTRY_SIZE, &entry.encode())?;
        self.tail = index.wrapping_add(1);
        Ok(index)
    }

    /// Looks for progress, so that [`Ring::free`] is up to date.
    ///
    /// # Errors
    ///
    /// [`Error::RingStopped`] if an entry failed, and those of [`Ring::progress`].
    pub fn refresh(&mut self) -> Result<(), Error> {
        let progress = self.progress()?;
        self.head = progress.head;
        self.stopped(progress).map_or(Ok(()), Err)
    }

    /// Looks at the registers whether the ring runs. Reports in memory do not say so after an abort, a reset, or the end of the
    /// device. The reads trap.
    ///
    /// # Errors
    ///
    /// [`Error::RingStopped`], [`Error::RingDisabled`], and [`Error::Gone`].
    pub fn check(&self) -> Result<(), Error> {
        let accel: &Accel = self.accel.borrow();
        if !accel.is_present() {
            return Err(Error::Gone);
        }
        let state = accel.ring_register(self.number, reg::STATE)?;
        if state == State::Running as u32 {
            return Ok(());
        }
        let stopped = self.stopped(accel.ring_progress(self.number)?);
        Err(stopped.unwrap_or(Error::RingDisabled(self.number)))
    }

    /// Returns the number of the ring.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the accelerator.
    pub fn accel(&self) -> &Accel {
        self.accel.borrow()
    }

    /// Returns the index of the next entry.
    pub fn next(&self) -> u32 {
        self.tail
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u32 {
        self.options.entries
    }

    /// Returns the memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Number of entries that can be pushed without looking for progress.
    pub fn free(&self) -> u32 {
        // The device decides what the head is, so the difference can be anything.
        self.options.entries.saturating_sub(self.tail.wrapping_sub(self.head))
    }

    /// Has the device execute all entries that were pushed. Writes one register.
    ///
    /// # Errors
    ///
    /// The device reports no errors.
    pub fn doorbell(&mut self) -> Result<(), Error> {
        // The entries must be visible before the doorbell, also if the memory is mapped with write combining.
        fence(Ordering::SeqCst);
        let register = ring::register(self.number, reg::TAIL);
        Ok(self.accel.borrow().registers.store32(register, self.tail)?)
    }

    /// Returns the progress: from the report in BAR2, or from registers if there is none. The program reads reports in host
    /// memory itself.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`] if the report is invalid.
    pub fn progress(&self) -> Result<Progress, Error> {
        match self.options.report {
            Report::Memory(offset) => Progress::from_u64(self.memory.load64(offset)?).ok_or(Error::Gone),
            Report::Bus(_) | Report::Registers => self.accel.borrow().ring_progress(self.number),
        }
    }

    /// Waits until the entry with this index has completed.
    ///
    /// # Errors
    ///
    /// [`Error::RingStopped`] with the index and the status of the entry that failed, and [`Error::Timeout`].
    pub fn wait(&mut self, index: u32, timeout: Duration) -> Result<(), Error> {
        self.wait_for(index, timeout, Self::progress)
    }

    /// As [`Ring::wait`], with a function that loads the report, for reports in host memory.
    ///
    /// # Errors
    ///
    /// As [`Ring::wait`], and those of the function.
    pub fn wait_with(
        &mut self,
        index: u32,
        timeout: Duration,
        mut load: impl FnMut() -> Result<u64, Error>,
    ) -> Result<(), Error> {
        self.wait_for(index, timeout, |_| Progress::from_u64(load()?).ok_or(Error::Gone))
    }

    fn wait_for(
        &mut self,
        index: u32,
        timeout: Duration,
        mut load: impl FnMut(&Self) -> Result<Progress, Error>,
    ) -> Result<(), Error> {
        let mut poll = Poll::new(Instant::now() + timeout);
        loop {
            let progress = load(self)?;
            if self.is_done(progress, index)? {
                return Ok(());
            }
            if !poll.wait() {
                // No report follows an abort or a reset, so look at the registers once.
                let progress = self.accel.borrow().ring_progress(self.number)?;
                if self.is_done(progress, index)? {
                    return Ok(());
                }
                return Err(Error::Timeout("an entry of a ring", timeout));
            }
        }
    }

    /// Returns whether an entry has completed. Fails if the ring stopped before.
    fn is_done(&mut self, progress: Progress, index: u32) -> Result<bool, Error> {
        self.head = progress.head;
        if progress.has_completed(index) {
            return Ok(true);
        }
        self.stopped(progress).map_or(Ok(false), Err)
    }

    fn stopped(&self, progress: Progress) -> Option<Error> {
        progress.stopped.map(|status| Error::RingStopped {
            ring: self.number,
            index: progress.head,
            status,
        })
    }

    /// Reads the result of an entry from BAR2. `None` if the device has not written a result there. The memory must
    /// include the result.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfBounds`].
    pub fn result(&self, offset: u64) -> Result<Option<EntryResult>, Error> {
        const _: () = assert!(RESULT_SIZE == 16);
        let word = self.memory.load64(offset)?;
        let Some(status) = Status::from_u32((word >> 32) as u32) else {
            return Ok(None);
        };
        Ok(Some(EntryResult {
            index: word as u32,
            status,
            value: self.memory.load64(offset + 8)?,
        }))
    }

    /// Stops the ring, waits until it does no more accesses, and starts it again without entries. The next index is that
    /// of the options.
    ///
    /// # Errors
    ///
    /// See [`Accel::disable_ring`] and [`Ring::new`].
    pub fn reset(&mut self, timeout: Duration) -> Result<(), Error> {
        let device: &Accel = self.accel.borrow();
        device.disable_ring(self.number, timeout)?;
        start(device, self.number, &self.memory, &self.options)?;
        (self.head, self.tail) = (self.options.first, self.options.first);
        Ok(())
    }
}

impl<A: Borrow<Accel>, M: RingMemory> Drop for Ring<A, M> {
    fn drop(&mut self) {
        // Fails if the device is gone, or does not end an access in time. The caller can do nothing about either.
        let _ = self.accel.borrow().disable_ring(self.number, DROP_TIMEOUT);
    }
}

/// Writes the configuration of a disabled ring, and enables it.
fn start(accel: &Accel, number: u32, memory: &impl RingMemory, options: &RingOptions) -> Result<(), Error> {
    let progress = Progress {
        head: options.first,
        stopped: None,
    };
    let report = match options.report {
        Report::Memory(offset) => {
            memory.write(offset, &progress.to_u64().to_le_bytes())?;
            offset
        }
        Report::Bus(address) => address,
        Report::Registers => 0,
    };
    let poll_limit = u32::try_from(options.poll_limit.as_micros()).map_err(|_| Error::OutOfBounds)?;
    let register = |offset| ring::register(number, offset);
    let registers = &accel.registers;
    registers.store64(register(reg::BASE), options.base)?;
    registers.store32(register(reg::ENTRIES), options.entries)?;
    registers.store32(register(reg::POLL_LIMIT), poll_limit)?;
    registers.store64(register(reg::REPORT), report)?;
    registers.store32(register(reg::HEAD), options.first)?;
    registers.store32(register(reg::CONTROL), options.control())?;
    let mut poll = Poll::new(Instant::now() + START_TIMEOUT);
    loop {
        match State::from_u32(accel.ring_register(number, reg::STATE)?) {
            Some(State::Running) => return Ok(()),
            Some(State::Error) => break,
            _ if poll.wait() => {}
            _ => return Err(Error::Timeout("the start of a ring", START_TIMEOUT)),
        }
    }
    let progress = accel.ring_progress(number)?;
    registers.store32(register(reg::CONTROL), 0)?;
    Err(Error::RingStopped {
        ring: number,
        index: progress.head,
        status: progress.stopped.unwrap_or(Status::BadRing),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::tests::devices;
    use crate::{ID, VERSION};
    use std::fs::OpenOptions;
    use std::os::unix::fs::FileExt;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use std::thread::JoinHandle;

    const TIMEOUT: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    /// Memory of an accelerator that answers like BAR2 of `len` bytes.
    struct Bytes(Mutex<Vec<u8>>);

    impl Bytes {
        fn new(len: usize) -> Arc<Self> {
            Arc::new(Self(Mutex::new(vec![0; len])))
        }

        fn entry(&self, offset: u64) -> Entry {
            let bytes = self.0.lock().unwrap();
            Entry::decode(bytes[offset as usize..][..64].try_into().unwrap()).unwrap()
        }

        fn report(&self, offset: u64, head: u32, stopped: Option<Status>) {
            let word = Progress { head, stopped }.to_u64();
            self.write(offset, &word.to_le_bytes()).unwrap();
        }
    }

    impl RingMemory for Bytes {
        fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
            let mut bytes = self.0.lock().unwrap();
            let range = offset as usize..offset as usize + data.len();
            bytes.get_mut(range).ok_or(Error::OutOfBounds)?.copy_from_slice(data);
            Ok(())
        }

        fn load64(&self, offset: u64) -> Result<u64, Error> {
            let bytes = self.0.lock().unwrap();
            let word = bytes
                .get(offset as usize..offset as usize + 8)
                .ok_or(Error::OutOfBounds)?;
            Ok(u64::from_le_bytes(word.try_into().unwrap()))
        }
    }

    /// A device whose STATE follows CONTROL, and that executes nothing. `enabled` is the state of an enabled ring.
    struct Fake {
        folder: tempfile::TempDir,
        end: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    }

    impl Fake {
        fn new(enabled: State, registers: &[(u64, u32)]) -> Self {
            let ids = [(crate::reg::ID, ID), (crate::reg::VERSION, VERSION)];
            let folder = devices("0x1234", &[&ids, registers].concat());
            let path = folder.path().join("0000:01:00.0/resource0");
            let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
            let end = Arc::new(AtomicBool::new(false));
            let thread = std::thread::spawn({
                let end = Arc::clone(&end);
                move || {
                    while !end.load(Ordering::SeqCst) {
                        for number in 0..ring::COUNT {
                            let mut control = [0; 1];
                            file.read_exact_at(&mut control, ring::register(number, reg::CONTROL))
                                .unwrap();
                            let state = if control[0] & 1 == 0 { State::Disabled } else { enabled };
                            file.write_all_at(&[state as u8], ring::register(number, reg::STATE))
                                .unwrap();
                        }
                        std::thread::yield_now();
                    }
                }
            });
            Self {
                folder,
                end,
                thread: Some(thread),
            }
        }

        fn open(&self) -> Accel {
            Accel::open_in(self.folder.path(), "0000:01:00.0").unwrap()
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            self.end.store(true, Ordering::SeqCst);
            let _ = self.thread.take().unwrap().join();
        }
    }

    fn ring(fake: &Fake, memory: &Arc<Bytes>, options: RingOptions) -> Ring<Accel, Arc<Bytes>> {
        Ring::new(fake.open(), 3, Arc::clone(memory), options).unwrap()
    }

    #[test]
    fn entries_wrap_around_and_full_ring_is_refused() {
        let fake = Fake::new(State::Running, &[]);
        let (accel, memory) = (fake.open(), Bytes::new(4096));
        let options = RingOptions {
            first: u32::MAX - 1,
            ..RingOptions::new(64, 4)
        };
        assert_eq!(options.report, Report::Memory(64 + 4 * 64));
        let mut ring = ring(&fake, &memory, options);
        for (tag, index) in [u32::MAX - 1, u32::MAX, 0, 1].into_iter().enumerate() {
            assert_eq!(ring.push(&Entry::timestamp(0, tag as u64)).unwrap(), index);
        }
        // Index u32::MAX - 1 is in slot 2.
        assert_eq!([192, 256, 64, 128].map(|at| memory.entry(at).argument), [0, 1, 2, 3]);
        assert!(matches!(ring.push(&Entry::fence()), Err(Error::RingFull(3))));
        ring.doorbell().unwrap();
        assert_eq!(accel.registers.load32(ring::register(3, reg::TAIL)).unwrap(), 2);
        memory.report(320, 0, None);
        assert_eq!(ring.push(&Entry::fence()).unwrap(), 2);
        assert_eq!(ring.free(), 1);
        assert!(ring.wait(u32::MAX, TIMEOUT).is_ok());
        assert!(matches!(ring.wait(0, SHORT), Err(Error::Timeout(..))));
        ring.reset(TIMEOUT).unwrap();
        assert_eq!((ring.free(), ring.push(&Entry::fence()).unwrap()), (4, u32::MAX - 1));
        drop(ring);
        assert_eq!(accel.registers.load32(ring::register(3, reg::CONTROL)).unwrap(), 0);
    }

    #[test]
    fn failed_entry_is_reported_with_index_and_status() {
        let fake = Fake::new(State::Running, &[]);
        let memory = Bytes::new(4096);
        let mut ring = ring(&fake, &memory, RingOptions::new(64, 4));
        for _ in 0..4 {
            ring.push(&Entry::fence()).unwrap();
        }
        memory.report(320, 2, Some(Status::TimedOut));
        assert!(ring.wait(1, TIMEOUT).is_ok());
        for result in [ring.wait(2, TIMEOUT), ring.wait(3, TIMEOUT)] {
            match result {
                Err(Error::RingStopped {
                    ring: 3,
                    index: 2,
                    status,
                }) => assert_eq!(status, Status::TimedOut),
                other => panic!("{other:?}"),
            }
        }
        // A report in host memory is read by the caller's function.
        let word = Progress { head: 4, stopped: None };
        assert!(ring.wait_with(3, TIMEOUT, || Ok(word.to_u64())).is_ok());
        assert!(matches!(ring.wait_with(3, TIMEOUT, || Ok(u64::MAX)), Err(Error::Gone)));
        assert_eq!(ring.result(512).unwrap(), None);
        memory.write(512, &[7, 0, 0, 0, 3, 0, 0, 0, 9]).unwrap();
        let result = EntryResult {
            index: 7,
            status: Status::BadRange,
            value: 9,
        };
        assert_eq!(ring.result(512).unwrap(), Some(result));
        assert!(matches!(ring.result(4096), Err(Error::OutOfBounds)));
    }

    #[test]
    fn abort_without_report_is_found_in_the_registers() {
        let stopped = [
            (ring::register(3, reg::HEAD), 5),
            (ring::register(3, reg::STATUS), Status::Aborted as u32),
        ];
        let fake = Fake::new(State::Running, &stopped);
        let memory = Bytes::new(4096);
        let options = RingOptions {
            first: 5,
            ..RingOptions::new(64, 4)
        };
        let mut ring = ring(&fake, &memory, options);
        let index = ring.push(&Entry::fence()).unwrap();
        match ring.wait(index, SHORT) {
            Err(Error::RingStopped { index: 5, status, .. }) => assert_eq!(status, Status::Aborted),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn busy_and_refused_rings_are_errors() {
        let busy = [
            (ring::register(3, reg::CONTROL), 1),
            (ring::register(3, reg::STATE), State::Running as u32),
        ];
        let fake = Fake::new(State::Running, &busy);
        let (accel, memory) = (fake.open(), Bytes::new(4096));
        let new = |number, options| Ring::new(&accel, number, Arc::clone(&memory), options).map(drop);
        assert!(matches!(new(3, RingOptions::new(64, 4)), Err(Error::RingBusy(3))));
        assert!(matches!(new(8, RingOptions::new(64, 4)), Err(Error::NoRing(8))));
        assert!(matches!(accel.disable_ring(8, TIMEOUT), Err(Error::NoRing(8))));
        // The report is not in the memory, and the poll limit does not fit.
        assert!(matches!(new(1, RingOptions::new(4096, 4)), Err(Error::OutOfBounds)));
        let long = RingOptions {
            poll_limit: Duration::from_secs(5000),
            ..RingOptions::new(64, 4)
        };
        assert!(matches!(new(1, long), Err(Error::OutOfBounds)));
        drop(fake);

        let refused = [(ring::register(1, reg::STATUS), Status::BadRing as u32)];
        let fake = Fake::new(State::Error, &refused);
        let accel = fake.open();
        match Ring::new(&accel, 1, memory, RingOptions::new(64, 3)).map(drop) {
            Err(Error::RingStopped {
                ring: 1,
                index: 0,
                status,
            }) => assert_eq!(status, Status::BadRing),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn removed_device_is_gone() {
        let gone = devices("0x1234", &[(crate::reg::ID, ID), (crate::reg::VERSION, VERSION)]);
        let accel = Accel::open_in(gone.path(), "0000:01:00.0").unwrap();
        std::fs::write(gone.path().join("0000:01:00.0/resource0"), vec![0xff; 65536]).unwrap();
        assert!(matches!(accel.ring_progress(0), Err(Error::Gone)));
        assert!(matches!(accel.disable_ring(0, TIMEOUT), Err(Error::Gone)));
        let memory = Bytes::new(4096);
        assert!(matches!(
            Ring::new(&accel, 0, memory, RingOptions::new(64, 4)).map(drop),
            Err(Error::Gone)
        ));
    }

    #[test]
    fn registers_of_a_removed_device_are_not_accessed() {
        let fake = Fake::new(State::Running, &[]);
        let accel = fake.open();
        let ring = Ring::new(&accel, 1, Bytes::new(4096), RingOptions::new(64, 4)).unwrap();
        let folder = fake.folder.path().join("0000:01:00.0");
        // Another device at the same address is not this one.
        std::fs::copy(folder.join("resource0"), folder.join("other")).unwrap();
        assert!(accel.is_present());
        std::fs::rename(folder.join("other"), folder.join("resource0")).unwrap();
        assert!(!accel.is_present());
        assert!(matches!(ring.check(), Err(Error::Gone)));
        std::fs::remove_file(folder.join("resource0")).unwrap();
        assert!(matches!(ring.check(), Err(Error::Gone)));
        drop(ring);
        assert_ne!(accel.registers.load32(ring::register(1, reg::CONTROL)).unwrap(), 0);
    }

    /// Starts a ring as a program does that is killed later: without an end.
    fn abandoned(accel: &Accel, number: u32) {
        let register = ring::register(number, reg::CONTROL);
        accel.registers.store32(register, control::ENABLE).unwrap();
        while accel.ring_register(number, reg::STATE).unwrap() != State::Running as u32 {}
    }

    #[test]
    fn a_ring_is_reserved_once() {
        let fake = Fake::new(State::Running, &[]);
        // Two accelerators as in two programs, and one in the first program.
        let (one, other, memory) = (fake.open(), fake.open(), Bytes::new(4096));
        let zero = one.reserve_ring(TIMEOUT).unwrap();
        let rings: Vec<Reservation> = (1..ring::COUNT)
            .map(|number| [&one, &other][number as usize % 2].reserve_ring(TIMEOUT).unwrap())
            .collect();
        let numbers: Vec<u32> = rings.iter().map(Reservation::number).collect();
        assert_eq!((zero.number(), numbers), (0, (1..ring::COUNT).collect()));
        for accel in [&one, &other] {
            assert!(matches!(accel.reserve_ring(TIMEOUT), Err(Error::AllRingsBusy)));
            let new = Ring::new(accel, 3, Arc::clone(&memory), RingOptions::new(64, 4)).map(drop);
            assert!(matches!(new, Err(Error::RingBusy(3))));
        }
        // A ring has its reservation until it is dropped.
        let options = RingOptions::new(64, 4);
        let running = Ring::reserved(&one, zero, Arc::clone(&memory), options).unwrap();
        assert_eq!(running.number(), 0);
        running.check().unwrap();
        other.disable_abandoned_rings(TIMEOUT).unwrap();
        running.check().unwrap();
        assert!(matches!(other.reserve_ring(TIMEOUT), Err(Error::AllRingsBusy)));
        drop(running);
        assert_eq!(other.reserve_ring(TIMEOUT).unwrap().number(), 0);
        drop(rings);
        let third = Ring::new(&other, 3, Arc::clone(&memory), options).unwrap();
        let busy = Ring::new(&one, 3, memory, options).map(drop);
        assert!(matches!(busy, Err(Error::RingBusy(3))));
        drop(third);
    }

    #[test]
    fn rings_of_killed_programs_are_disabled() {
        let fake = Fake::new(State::Running, &[]);
        let (accel, memory) = (fake.open(), Bytes::new(4096));
        let state = |number| accel.ring_register(number, reg::STATE).unwrap();
        let mine = Ring::new(&accel, 2, Arc::clone(&memory), RingOptions::new(64, 4)).unwrap();
        for number in [0, 1, 5] {
            abandoned(&accel, number);
        }
        let reservation = accel.reserve_ring(TIMEOUT).unwrap();
        assert_eq!(reservation.number(), 0);
        assert_eq!(
            (0..6).map(state).collect::<Vec<u32>>(),
            [0, 0, State::Running as u32, 0, 0, 0]
        );
        drop(Ring::reserved(&accel, reservation, memory, RingOptions::new(1024, 4)).unwrap());
        abandoned(&accel, 7);
        accel.disable_abandoned_rings(TIMEOUT).unwrap();
        assert_eq!((state(2), state(7)), (State::Running as u32, 0));
        mine.check().unwrap();
    }

    /// The test starts its own program with this variable: the folder of devices.
    const DEVICES: &str = "P2PMEM_TEST_DEVICES";

    #[test]
    fn the_reservation_of_a_killed_program_ends() {
        use std::io::{BufRead, BufReader, Read};
        use std::process::{Command, Stdio};
        if let Some(devices) = std::env::var_os(DEVICES) {
            let accel = Accel::open_in(devices.as_ref(), "0000:01:00.0").unwrap();
            let reservation = accel.reserve_ring(TIMEOUT).unwrap();
            println!("reserved {}", reservation.number());
            // Until this process is killed, or the parent has ended.
            let _ = std::io::stdin().read(&mut [0]);
            return;
        }
        let fake = Fake::new(State::Running, &[]);
        let accel = fake.open();
        let test = "driver::ring::tests::the_reservation_of_a_killed_program_ends";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(DEVICES, fake.folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.map(Result::unwrap).find(|line| line.contains("reserved"));
        assert!(line.unwrap().ends_with("reserved 0"));
        abandoned(&accel, 0);
        let next = accel.reserve_ring(TIMEOUT).unwrap();
        assert_eq!(next.number(), 1);
        assert_eq!(accel.ring_register(0, reg::STATE).unwrap(), State::Running as u32);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(accel.reserve_ring(TIMEOUT).unwrap().number(), 0);
        assert_eq!(accel.ring_register(0, reg::STATE).unwrap(), 0);
    }

    #[test]
    fn a_ring_that_does_not_run_is_an_error() {
        let stopped = [
            (ring::register(3, reg::HEAD), 5),
            (ring::register(3, reg::STATUS), Status::Aborted as u32),
        ];
        let fake = Fake::new(State::Running, &stopped);
        let (accel, memory) = (fake.open(), Bytes::new(4096));
        let options = |base| RingOptions::new(base, 4);
        let one = Ring::new(&accel, 1, Arc::clone(&memory), options(64)).unwrap();
        let three = Ring::new(&accel, 3, memory, options(1024)).unwrap();
        one.check().unwrap();
        three.check().unwrap();
        accel.disable_ring(1, TIMEOUT).unwrap();
        accel.registers.store32(ring::register(3, reg::HEAD), 5).unwrap();
        accel.disable_ring(3, TIMEOUT).unwrap();
        assert!(matches!(one.check(), Err(Error::RingDisabled(1))));
        match three.check() {
            Err(Error::RingStopped {
                ring: 3,
                index: 5,
                status,
            }) => assert_eq!(status, Status::Aborted),
            other => panic!("{other:?}"),
        }
    }
}
