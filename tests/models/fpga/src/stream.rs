// SPDX-License-Identifier: MIT OR Apache-2.0

//! The stream: its state, and the worker that writes frames.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use p2pmem_fpga_regs::frame::{HEADER_SIZE, Header, POSITION, fill_samples};
use p2pmem_fpga_regs::{Counter, FRAME_SIZE_STEP, MAX_RATE, Status};
use p2pmem_vfio_user::Memory;
use tracing::debug;

use super::{Clock, Shared};

/// Bytes of samples that the worker computes at once. Between two steps, it checks whether the stream was stopped.
const STEP: usize = 64 << 10;
/// Shortest sleep. Frames that are due in between are written or dropped at once.
const MIN_SLEEP: Duration = Duration::from_micros(50);
/// Multiple that the offset of the ring must be.
const ALIGNMENT: u64 = 64;

/// The registers with settings.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Registers {
    pub(super) offset: u64,
    pub(super) frame_size: u32,
    pub(super) frames: u32,
    pub(super) rate: u64,
    pub(super) seed: u64,
    pub(super) limit: u64,
}

impl Registers {
    /// Checks the settings for a BAR2 of `memory` bytes.
    fn check(&self, memory: u64) -> Result<(), Status> {
        if self.frame_size == 0 || self.frame_size % FRAME_SIZE_STEP != 0 {
            return Err(Status::BadFrameSize);
        }
        if self.frames < 2 {
            return Err(Status::BadFrames);
        }
        if self.rate > MAX_RATE {
            return Err(Status::BadRate);
        }
        // Less than 2^64: both factors have 32 bits.
        let bytes = u64::from(self.frame_size) * u64::from(self.frames);
        let end = self.offset.checked_add(bytes);
        if self.offset % ALIGNMENT != 0 || end.is_none_or(|end| end > memory) {
            return Err(Status::BadRing);
        }
        Ok(())
    }

    /// Returns the offset in BAR2 of the slot of the frame with this position, counted from 0.
    fn slot(&self, position: u64) -> u64 {
        self.offset + position % u64::from(self.frames) * u64::from(self.frame_size)
    }

    /// Returns the number of frames whose samples are complete after `elapsed`. The rate must not be 0.
    fn complete(&self, elapsed: Duration) -> u64 {
        let bytes = elapsed.as_nanos() * u128::from(self.rate) / 1_000_000_000;
        u64::try_from(bytes / u128::from(self.frame_size)).unwrap_or(u64::MAX)
    }

    /// Returns the time since the start at which `frames` frames are complete.
    fn time_of(&self, frames: u64) -> Duration {
        let nanoseconds = u128::from(frames) * u128::from(self.frame_size) * 1_000_000_000;
        let nanoseconds = nanoseconds.div_ceil(u128::from(self.rate.max(1)));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// How far the stream is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    pub(super) status: Status,
    /// Frames written.
    pub(super) produced: u64,
    /// Frames that the driver has read.
    pub(super) consumed: u64,
    /// Frames written or dropped.
    pub(super) sequence: u64,
    pub(super) dropped: u64,
}

#[derive(Debug)]
struct Inner {
    settings: Registers,
    progress: Progress,
    /// The status after [`Status::Stopping`].
    then: Status,
    /// The time of the start.
    start: Duration,
    /// Whether the worker waits, with nothing to do at present.
    settled: bool,
    /// Whether the worker has to end.
    end: bool,
}

/// The state of the stream.
#[derive(Debug)]
pub(super) struct Stream {
    inner: Arc<(Mutex<Inner>, Condvar)>,
    /// Set when the present frame has to be abandoned.
    cancel: AtomicBool,
    clock: Clock,
}

const AT_START: Progress = Progress {
    status: Status::Idle,
    produced: 0,
    consumed: 0,
    sequence: 0,
    dropped: 0,
};

/// Locks the state. A panic of another holder does not make it inconsistent: each change is an assignment.
fn lock(inner: &(Mutex<Inner>, Condvar)) -> MutexGuard<'_, Inner> {
    inner.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the worker does next.
enum Next {
    /// Write the frame of this sequence number.
    Write,
    /// Wait until this time of the clock; without a time, until the state changes.
    Wait(Option<Duration>),
    /// Look again: the state has changed.
    Again,
}

impl Inner {
    /// Decides what to do at the time `now`. Returns also the number of frames that were dropped.
    fn next(&mut self, now: Duration) -> (Next, u64) {
        let settings = self.settings;
        let progress = &mut self.progress;
        match progress.status {
            Status::Running => {}
            Status::Stopping => {
                progress.status = self.then;
                return (Next::Again, 0);
            }
            _ => return (Next::Wait(None), 0),
        }
        let limit = if settings.limit == 0 { u64::MAX } else { settings.limit };
        if progress.sequence >= limit {
            progress.status = Status::Done;
            return (Next::Again, 0);
        }
        let full = progress.produced - progress.consumed >= u64::from(settings.frames);
        if settings.rate == 0 {
            return (if full { Next::Wait(None) } else { Next::Write }, 0);
        }
        let complete = settings.complete(now.saturating_sub(self.start)).min(limit);
        if complete <= progress.sequence {
            let due = self.start + settings.time_of(progress.sequence + 1);
            return (Next::Wait(Some(due)), 0);
        }
        if !full {
            return (Next::Write, 0);
        }
        let late = complete - progress.sequence;
        progress.sequence += late;
        progress.dropped += late;
        if progress.sequence >= limit {
            return (Next::Again, late);
        }
        // A wait also if frames are due more often than the worker looks: others need the lock.
        let due = self.start + settings.time_of(progress.sequence + 1);
        (Next::Wait(Some(due)), late)
    }
}

impl Stream {
    pub(super) fn new(clock: Clock) -> Self {
        let inner = Inner {
            settings: Registers::default(),
            progress: AT_START,
            then: Status::Idle,
            start: Duration::ZERO,
            settled: false,
            end: false,
        };
        let inner = Arc::new((Mutex::new(inner), Condvar::new()));
        clock.on_advance({
            let inner = Arc::clone(&inner);
            Arc::new(move || {
                lock(&inner).settled = false;
                inner.1.notify_all();
            })
        });
        Self {
            inner,
            cancel: AtomicBool::new(false),
            clock,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Changes the state, and wakes up the worker and those who wait for it.
    fn change<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.lock();
        let result = change(&mut inner);
        inner.settled = false;
        self.inner.1.notify_all();
        result
    }

    pub(super) fn progress(&self) -> Progress {
        self.lock().progress
    }

    /// Starts the stream. Returns false if the settings are invalid, or the stream is active.
    pub(super) fn start(&self, settings: Registers, memory: &Memory) -> bool {
        let now = self.clock.now();
        self.change(|inner| {
            if inner.progress.status.is_active() {
                return false;
            }
            let checked = settings.check(memory.len());
            inner.progress = Progress {
                status: checked.err().unwrap_or(Status::Running),
                ..AT_START
            };
            if let Err(status) = checked {
                debug!(?settings, %status, "start refused");
                return false;
            }
            inner.settings = settings;
            inner.then = Status::Idle;
            inner.start = now;
            self.cancel.store(false, Ordering::Relaxed);
            // The driver must not take frames of an earlier stream for those of this one. The check of the settings
            // ensures that the slots are in range.
            for slot in 0..u64::from(settings.frames) {
                let _ = memory.write(settings.slot(slot) + POSITION, &[0; 8]);
            }
            true
        })
    }

    /// Stops a running stream.
    pub(super) fn stop(&self) {
        self.change(|inner| {
            if inner.progress.status == Status::Running {
                inner.progress.status = Status::Stopping;
                self.cancel.store(true, Ordering::Relaxed);
            }
        });
    }

    /// Takes the number of frames that the driver has read, modulo 2^32.
    pub(super) fn consumed(&self, value: u32) {
        self.change(|inner| {
            let progress = &mut inner.progress;
            let more = u64::from(value.wrapping_sub(progress.consumed as u32));
            if more <= progress.produced - progress.consumed {
                progress.consumed += more;
            } else if progress.status == Status::Running {
                progress.status = Status::Stopping;
                inner.then = Status::BadConsumer;
                self.cancel.store(true, Ordering::Relaxed);
            }
        });
    }

    /// Waits until `holds`, or `timeout` has passed. Returns whether it holds.
    fn wait(&self, timeout: Duration, holds: impl Fn(&Inner) -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let mut inner = self.lock();
        while !holds(&inner) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.inner.1.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub(super) fn wait_inactive(&self, timeout: Duration) -> bool {
        self.wait(timeout, |inner| !inner.progress.status.is_active())
    }

    pub(super) fn settle(&self, timeout: Duration) -> bool {
        self.wait(timeout, |inner| inner.settled)
    }

    /// Forgets a stream that has stopped.
    pub(super) fn reset(&self) {
        self.change(|inner| {
            if !inner.progress.status.is_active() {
                inner.progress = AT_START;
            }
        });
    }

    /// Ends the worker.
    pub(super) fn end(&self) {
        self.cancel.store(true, Ordering::Relaxed);
        self.change(|inner| inner.end = true);
    }
}

/// The body of the worker.
pub(super) fn run(shared: &Shared) {
    let stream = &shared.stream;
    let mut samples = vec![0; STEP];
    let mut inner = stream.lock();
    while !inner.end {
        let (next, dropped) = inner.next(stream.clock.now());
        shared.count(Counter::Dropped, dropped);
        match next {
            Next::Again => stream.inner.1.notify_all(),
            Next::Write => {
                let (settings, progress) = (inner.settings, inner.progress);
                drop(inner);
                let written = write_frame(shared, &settings, &progress, &mut samples);
                inner = stream.lock();
                if written {
                    inner.progress.produced += 1;
                    inner.progress.sequence += 1;
                    shared.count(Counter::Frames, 1);
                    shared.count(Counter::StreamWritten, settings.frame_size.into());
                }
            }
            Next::Wait(due) => {
                if !inner.settled {
                    inner.settled = true;
                    stream.inner.1.notify_all();
                }
                inner = match due.and_then(|due| stream.clock.sleep_until(due)) {
                    Some(sleep) => {
                        let waited = stream.inner.1.wait_timeout(inner, sleep.max(MIN_SLEEP));
                        waited.unwrap_or_else(PoisonError::into_inner).0
                    }
                    None => stream.inner.1.wait(inner).unwrap_or_else(PoisonError::into_inner),
                };
            }
        }
    }
}

/// Writes the next frame to its slot. Returns false if the stream was stopped before the frame was complete.
fn write_frame(shared: &Shared, settings: &Registers, progress: &Progress, samples: &mut [u8]) -> bool {
    let slot = settings.slot(progress.produced);
    let payload = settings.frame_size as usize - HEADER_SIZE;
    // The check of the settings ensures that the slot is in range.
    let write = |at: u64, data: &[u8]| shared.memory.write(slot + at, data).is_ok();
    // The reader must not take the old frame in the slot for a new one while its samples change.
    let mut fine = write(POSITION, &[0; 8]);
    let mut crc = 0;
    let mut done = 0;
    while done < payload {
        if shared.stream.cancel.load(Ordering::Relaxed) {
            return false;
        }
        let part = &mut samples[..STEP.min(payload - done)];
        fill_samples(settings.seed, progress.sequence, done as u64 / 8, part);
        crc = crc32c::crc32c_append(crc, part);
        fine &= write((HEADER_SIZE + done) as u64, part);
        done += part.len();
    }
    let header = Header {
        position: 0,
        sequence: progress.sequence,
        time: progress.sequence.wrapping_mul(payload as u64),
        // Not truncated: less than the size of a frame, which has 32 bits.
        payload: payload as u32,
        crc32c: crc,
        seed: settings.seed,
    };
    fine &= write(0, &header.to_bytes());
    // After all other bytes of the frame, as one access.
    std::sync::atomic::fence(Ordering::SeqCst);
    fine && write(POSITION, &(progress.produced + 1).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_and_times_agree() {
        for (frame_size, rate) in [(128, 1), (4096, 12 << 20), (1 << 20, MAX_RATE), (1 << 31, 1 << 20)] {
            let settings = Registers {
                frame_size,
                rate,
                ..Registers::default()
            };
            for frames in [1, 2, 3, 1000, 1 << 20] {
                let time = settings.time_of(frames);
                assert!(settings.complete(time) >= frames, "{frame_size} {rate} {frames}");
                let before = time.saturating_sub(Duration::from_nanos(1));
                assert!(
                    settings.complete(before) < frames || rate == MAX_RATE,
                    "{frame_size} {rate} {frames}"
                );
            }
        }
    }
}
