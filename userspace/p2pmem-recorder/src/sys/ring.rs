// SPDX-License-Identifier: MIT OR Apache-2.0

//! io_uring: reads and writes of files whose memory is kept until the kernel has completed them.

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{opcode, squeue, IoUring};
use rustix::event::{eventfd, EventfdFlags};
use rustix::io::Errno;

use super::memory::Memory;

/// The most bytes of one read or write. The kernel cuts longer ones just below 2 GiB.
const MAX_TRANSFER: usize = 1 << 30;

/// How often an operation without progress is repeated after an error that does not come from the file.
const REPETITIONS: u32 = 100;

/// The time after which a ring that is being dropped names the operations for which it waits.
const LONG: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// A read or a write that the kernel may be executing.
struct Operation<T> {
    direction: Direction,
    memory: Arc<Memory>,
    /// The bytes of the memory.
    start: usize,
    length: usize,
    file: Arc<File>,
    offset: u64,
    /// The bytes that are transferred.
    done: usize,
    repetitions: u32,
    token: T,
}

impl<T> Operation<T> {
    /// Counts the bytes of a completion of the kernel. `Ok` means that the operation is complete or has to go on.
    fn advance(&mut self, result: i32) -> io::Result<()> {
        match u32::try_from(result) {
            Ok(0) if self.length > 0 => Err(match self.direction {
                Direction::Read => io::ErrorKind::UnexpectedEof.into(),
                Direction::Write => io::ErrorKind::WriteZero.into(),
            }),
            Ok(count) => {
                self.done += (count as usize).min(self.length - self.done);
                self.repetitions = 0;
                Ok(())
            }
            Err(_) => {
                let error = io::Error::from_raw_os_error(-result);
                // The kernel returns ECANCELED if the thread that started the operation ended.
                let again = [Errno::INTR, Errno::AGAIN, Errno::CANCELED].map(Some);
                self.repetitions += 1;
                if again.contains(&Errno::from_io_error(&error)) && self.repetitions <= REPETITIONS {
                    return Ok(());
                }
                Err(error)
            }
        }
    }
}

/// Reads and writes of files, executed by the kernel. Each operation has a token, which its completion returns.
///
/// The file descriptor of [`AsFd`] is readable when completions are waiting. [`clear_event`](Self::clear_event) before
/// [`completed`](Self::completed) loses none of them.
///
/// Dropping the ring waits until the kernel has completed all operations. Files on a drive that does not answer can make this
/// last as long as the timeouts of the drive's driver.
///
/// # Invariants
///
/// An operation that the kernel knows, or whose entry is in the submission queue, is in `operations`, at the index that its
/// entry has as user data, until the kernel has posted its completion. Each such operation has at most one entry.
pub struct Ring<T> {
    ring: IoUring,
    event: OwnedFd,
    operations: Vec<Option<Operation<T>>>,
    free: Vec<usize>,
    flags: squeue::Flags,
}

impl<T> Ring<T> {
    /// Creates a ring for `count` operations at a time.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if `count` is 0 or more than 32768; ENOSYS or EPERM if the kernel does not permit io_uring; ENOMEM,
    /// EMFILE.
    pub fn new(count: usize) -> io::Result<Self> {
        let entries = u32::try_from(count).ok().filter(|&count| (1..=32768).contains(&count));
        let entries = entries.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{count} operations at a time; use 1 to 32768"),
            )
        })?;
        // The completion queue is twice as long as the submission queue, so it never overflows.
        let ring = IoUring::builder().dontfork().build(entries)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(Self {
            ring,
            event,
            operations: (0..count).map(|_| None).collect(),
            free: (0..count).rev().collect(),
            flags: squeue::Flags::empty(),
        })
    }

    /// Lets a kernel thread start each operation, as the kernel does with an operation that would have to wait. For tests.
    #[must_use]
    pub fn in_worker(mut self, worker: bool) -> Self {
        self.flags.set(squeue::Flags::ASYNC, worker);
        self
    }

    /// Returns the number of operations whose result was not returned yet.
    pub fn in_flight(&self) -> usize {
        self.operations.len() - self.free.len()
    }

    /// Writes `length` bytes of the memory, from byte `start` on, to the file at `offset`.
    ///
    /// # Errors
    ///
    /// Returns the token, and `InvalidInput` if the bytes are not inside the memory, or `WouldBlock` if the ring is full.
    pub fn write(
        &mut self,
        memory: &Arc<Memory>,
        (start, length): (usize, usize),
        file: &Arc<File>,
        offset: u64,
        token: T,
    ) -> Result<(), (T, io::Error)> {
        self.start(Direction::Write, memory, (start, length), file, offset, token)
    }

    /// Reads `length` bytes of the file at `offset` to the memory, from byte `start` on.
    ///
    /// # Errors
    ///
    /// Those of [`write`](Self::write).
    pub fn read(
        &mut self,
        memory: &Arc<Memory>,
        (start, length): (usize, usize),
        file: &Arc<File>,
        offset: u64,
        token: T,
    ) -> Result<(), (T, io::Error)> {
        self.start(Direction::Read, memory, (start, length), file, offset, token)
    }

    fn start(
        &mut self,
        direction: Direction,
        memory: &Arc<Memory>,
        (start, length): (usize, usize),
        file: &Arc<File>,
        offset: u64,
        token: T,
    ) -> Result<(), (T, io::Error)> {
        if let Err(error) = memory.at(start, length) {
            return Err((token, error));
        }
        let Some(index) = self.free.pop() else {
            return Err((token, io::ErrorKind::WouldBlock.into()));
        };
        let operation = Operation {
            direction,
            memory: Arc::clone(memory),
            start,
            length,
            file: Arc::clone(file),
            offset,
            done: 0,
            repetitions: 0,
            token,
        };
        if let Err((operation, error)) = self.push(index, operation) {
            self.free.push(index);
            return Err((operation.token, error));
        }
        Ok(())
    }

    /// Gives the rest of an operation to the kernel.
    fn push(&mut self, index: usize, operation: Operation<T>) -> Result<(), (Operation<T>, io::Error)> {
        let length = operation.length - operation.done;
        let address = match operation.memory.at(operation.start + operation.done, length) {
            Ok(address) => address,
            Err(error) => return Err((operation, error)),
        };
        let file = Fd(operation.file.as_raw_fd());
        let offset = operation.offset.saturating_add(operation.done as u64);
        let count = length.min(MAX_TRANSFER) as u32;
        let entry: squeue::Entry = match operation.direction {
            Direction::Write => opcode::Write::new(file, address, count).offset(offset).build(),
            Direction::Read => opcode::Read::new(file, address, count).offset(offset).build(),
        };
        let entry = entry.user_data(index as u64).flags(self.flags);
        // SAFETY: the entry's address and length are inside the operation's memory, as `at()` checked, and its file is open:
        // the operation owns both. By the type's invariant the operation is in `operations` until the kernel has completed
        // it: it is put there below, `completed()` takes it out after its completion, `drop()` waits for its completion, and
        // forgetting the ring forgets the operation. The kernel accesses the memory without a Rust reference to it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        if pushed.is_err() {
            return Err((operation, io::ErrorKind::WouldBlock.into()));
        }
        // INVARIANT: the operation's only entry is in the submission queue, and the operation is at the entry's index.
        self.operations[index] = Some(operation);
        self.submit();
        Ok(())
    }

    /// Lets the kernel start what is in the submission queue. If the kernel has no memory for it, `completed()` repeats this.
    fn submit(&self) {
        if self.ring.submit().is_err() {
            self.wake();
        }
    }

    /// Makes the file descriptor readable.
    fn wake(&self) {
        // The counter of the eventfd can only be full if the descriptor is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Makes the file descriptor unreadable, until the next completion.
    pub fn clear_event(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    /// Returns the token and the result of an operation that is complete, if there is one. An operation is complete if all of
    /// its bytes are transferred, or after an error. The end of a file is the error `UnexpectedEof`, and a write that writes
    /// nothing the error `WriteZero`.
    pub fn completed(&mut self) -> Option<(T, io::Result<()>)> {
        if !self.ring.submission().is_empty() {
            self.submit();
        }
        loop {
            let entry = self.ring.completion().next()?;
            let index = entry.user_data() as usize;
            // By the invariant, the kernel returns the index of an operation.
            let Some(mut operation) = self.operations.get_mut(index).and_then(Option::take) else {
                continue;
            };
            // Here the kernel has no entry of the operation, so it may be dropped.
            let result = operation.advance(entry.result());
            if result.is_ok() && operation.done < operation.length {
                match self.push(index, operation) {
                    Ok(()) => continue,
                    Err((operation, error)) => {
                        self.free.push(index);
                        return Some((operation.token, Err(error)));
                    }
                }
            }
            self.free.push(index);
            return Some((operation.token, result));
        }
    }

    /// Waits until a completion is waiting, which can be one that `completed()` does not return because the operation goes
    /// on. Returns at once if no operation is in flight.
    ///
    /// # Errors
    ///
    /// ETIME after `limit`; ENOMEM, EBUSY. The operations continue.
    pub fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        let time = limit.map(Timespec::from);
        let mut args = SubmitArgs::new();
        if let Some(time) = &time {
            args = args.timespec(time);
        }
        loop {
            match self.ring.submitter().submit_with_args(1, &args) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl<T> AsFd for Ring<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        let start = Instant::now();
        let mut named = false;
        while self.in_flight() > 0 {
            let waited = self.wait(Some(LONG));
            while self.completed().is_some() {}
            if self.in_flight() > 0 && !named && start.elapsed() >= LONG {
                named = true;
                eprintln!(
                    "p2pmem-recorder: waiting for {} transfers that the kernel has not completed since {} s; \
                     check the kernel log for errors of the drives",
                    self.in_flight(),
                    start.elapsed().as_secs()
                );
            }
            let passing = [Errno::TIME, Errno::BUSY, Errno::AGAIN, Errno::NOMEM].map(Some);
            match waited {
                Ok(()) => {}
                Err(error) if passing.contains(&Errno::from_io_error(&error)) => {}
                Err(_) => {
                    // The ring cannot wait, and the kernel may access the memory at any time, so nothing may be freed.
                    eprintln!(
                        "p2pmem-recorder: cannot wait for {} transfers; their memory is not freed",
                        self.in_flight()
                    );
                    mem::forget(mem::take(&mut self.operations));
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    fn memory(len: usize) -> Arc<Memory> {
        Arc::new(Memory::host(len).unwrap())
    }

    fn pipe() -> (Arc<File>, File) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        (Arc::new(File::from(reader)), File::from(writer))
    }

    /// Waits for the next result.
    fn result<T>(ring: &mut Ring<T>) -> (T, io::Result<()>) {
        loop {
            if let Some(result) = ring.completed() {
                return result;
            }
            ring.wait(None).unwrap();
        }
    }

    #[test]
    fn written_blocks_are_read_back() {
        for worker in [false, true] {
            write_and_read_back(Ring::new(8).unwrap().in_worker(worker));
        }
    }

    fn write_and_read_back(mut ring: Ring<usize>) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let memory = memory(16 * 4096);
        for block in 0..8 {
            memory.write(block * 4096, &[block as u8 + 1; 4096]).unwrap();
            let bytes = (block * 4096, 4096);
            ring.write(&memory, bytes, &file, (7 - block as u64) * 4096, block)
                .unwrap();
        }
        assert_eq!(ring.in_flight(), 8);
        let mut tokens: Vec<usize> = (0..8)
            .map(|_| result(&mut ring))
            .map(|(token, r)| r.map(|()| token).unwrap())
            .collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(ring.in_flight(), 0);
        let mut back = [0; 4096];
        file.read_exact_at(&mut back, 7 * 4096).unwrap();
        assert_eq!(back, [1; 4096]);

        ring.read(&memory, (8 * 4096, 4096), &file, 0, 9).unwrap();
        let (token, read) = result(&mut ring);
        read.unwrap();
        memory.read(8 * 4096, &mut back).unwrap();
        assert_eq!((token, back), (9, [8; 4096]));
    }

    #[test]
    fn short_reads_continue_and_end_of_file_is_an_error() {
        let (reader, mut writer) = pipe();
        let memory = memory(4096);
        let mut ring = Ring::new(1).unwrap();
        ring.read(&memory, (0, 4096), &reader, 0, ()).unwrap();
        writer.write_all(&[1; 1000]).unwrap();
        // The first part is complete, the operation is not.
        ring.wait(None).unwrap();
        assert!(ring.completed().is_none());
        assert_eq!(ring.in_flight(), 1);
        writer.write_all(&[2; 3096]).unwrap();
        result(&mut ring).1.unwrap();
        let mut bytes = [0; 4096];
        memory.read(0, &mut bytes).unwrap();
        assert!(bytes[..1000].iter().all(|&byte| byte == 1) && bytes[1000..].iter().all(|&byte| byte == 2));

        ring.read(&memory, (0, 4096), &reader, 0, ()).unwrap();
        writer.write_all(&[3; 10]).unwrap();
        drop(writer);
        let error = result(&mut ring).1.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn errors_of_files_are_returned_with_their_token() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, [0; 8192]).unwrap();
        let read_only = Arc::new(File::open(&path).unwrap());
        let full = Arc::new(File::options().write(true).open("/dev/full").unwrap());
        let memory = memory(4096);
        let mut ring = Ring::new(2).unwrap();
        ring.write(&memory, (0, 4096), &read_only, 0, "read-only").unwrap();
        ring.write(&memory, (0, 4096), &full, 0, "full").unwrap();
        let mut errors: Vec<(&str, Option<i32>)> = (0..2)
            .map(|_| result(&mut ring))
            .map(|(token, result)| (token, result.unwrap_err().raw_os_error()))
            .collect();
        errors.sort_unstable();
        assert_eq!(errors, [("full", Some(28)), ("read-only", Some(9))]);
    }

    #[test]
    fn invalid_operations_return_their_token() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        let memory = memory(4096);
        let mut ring = Ring::new(1).unwrap();
        for bytes in [(0, 4097), (4096, 1), (usize::MAX, 2)] {
            let (token, error) = ring.write(&memory, bytes, &file, 0, 7).unwrap_err();
            assert_eq!((token, error.kind()), (7, io::ErrorKind::InvalidInput));
        }
        let (reader, writer) = pipe();
        ring.read(&memory, (0, 1), &reader, 0, 8).unwrap();
        let (token, error) = ring.write(&memory, (0, 1), &file, 0, 9).unwrap_err();
        assert_eq!((token, error.kind()), (9, io::ErrorKind::WouldBlock));
        drop(writer);
        assert!(result(&mut ring).1.is_err());
        for count in [0, 32769, usize::MAX] {
            assert!(Ring::<()>::new(count).is_err(), "{count}");
        }
    }

    #[test]
    fn event_is_readable_after_a_completion() {
        use rustix::event::{poll, PollFd, PollFlags, Timespec};
        let readable = |ring: &Ring<()>, limit: Option<&Timespec>| {
            poll(&mut [PollFd::new(ring, PollFlags::IN)], limit).unwrap() == 1
        };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (reader, mut writer) = pipe();
        let memory = memory(4096);
        let mut ring = Ring::new(1).unwrap();
        ring.read(&memory, (0, 4), &reader, 0, ()).unwrap();
        assert!(!readable(&ring, Some(&now)));
        writer.write_all(&[1; 4]).unwrap();
        assert!(readable(&ring, None));
        ring.clear_event();
        assert!(!readable(&ring, Some(&now)));
        assert!(ring.completed().is_some());
    }

    #[test]
    fn dropped_ring_keeps_memory_until_the_kernel_is_done() {
        let (reader, mut writer) = pipe();
        let memory = memory(4096);
        let token = Arc::new(());
        let (weak, token_weak) = (Arc::downgrade(&memory), Arc::downgrade(&token));
        let mut ring = Ring::new(1).unwrap();
        ring.read(&memory, (0, 4096), &reader, 0, token).unwrap();
        drop((memory, reader));
        let dropping = std::thread::spawn(move || drop(ring));
        for _ in 0..100 {
            std::thread::yield_now();
            assert!(weak.upgrade().is_some() && token_weak.upgrade().is_some() && !dropping.is_finished());
        }
        writer.write_all(&[1; 4096]).unwrap();
        dropping.join().unwrap();
        assert!(weak.upgrade().is_none() && token_weak.upgrade().is_none());
    }

    #[test]
    fn operation_survives_the_end_of_the_thread_that_started_it() {
        let (reader, mut writer) = pipe();
        let memory = memory(4096);
        let mut ring = Ring::new(1).unwrap();
        let started = Arc::clone(&memory);
        let mut ring = std::thread::spawn(move || {
            ring.read(&started, (0, 4096), &reader, 0, ()).unwrap();
            ring
        })
        .join()
        .unwrap();
        writer.write_all(&[5; 4096]).unwrap();
        result(&mut ring).1.unwrap();
        let mut bytes = [0; 4096];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [5; 4096]);
    }
}
