// SPDX-License-Identifier: MIT OR Apache-2.0

//! MSI-X interrupts: one eventfd per vector, masks, and the pending bits.
//!
//! The client takes all vectors away and gives them back whenever the guest adds one, and a vector the guest masks loses
//! its eventfd until it is unmasked. An interrupt raised in between must not be lost, so it stays pending and is sent as
//! soon as its vector can be signalled again. While the function's MSI-X enable bit is off, interrupts go nowhere, as on
//! real hardware.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;
use tracing::warn;

/// What became of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    /// The guest was signalled.
    Delivered,
    /// The vector is masked or between eventfds; it is pending.
    Latched,
    /// MSI-X is off; nobody will see it.
    Dropped,
    /// There is no such vector.
    NoVector,
}

#[derive(Debug, Default)]
struct Vector {
    eventfd: Option<OwnedFd>,
    masked: bool,
    pending: bool,
}

impl Vector {
    /// Signals the vector if it is pending and can be signalled.
    fn flush(&mut self) -> bool {
        if !self.pending || self.masked {
            return false;
        }
        let Some(eventfd) = &self.eventfd else { return false };
        match rustix::io::write(eventfd, &1_u64.to_ne_bytes()) {
            // A counter that is full is a signal the guest has yet to take.
            Ok(_) | Err(Errno::AGAIN) => {
                self.pending = false;
                true
            }
            Err(error) => {
                warn!(%error, "an interrupt's eventfd cannot be written");
                false
            }
        }
    }
}

#[derive(Debug, Default)]
struct State {
    enabled: bool,
    vectors: Vec<Vector>,
}

/// The interrupts of a device; clones stand for the same ones.
#[derive(Clone, Debug)]
pub struct Irqs {
    state: Arc<Mutex<State>>,
}

impl Irqs {
    /// Interrupts with `vectors` MSI-X vectors.
    pub fn new(vectors: u16) -> Self {
        let vectors = (0..vectors).map(|_| Vector::default()).collect();
        Self {
            state: Arc::new(Mutex::new(State {
                enabled: false,
                vectors,
            })),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Raises `vector`.
    pub fn raise(&self, vector: u16) -> Raised {
        let mut state = self.lock();
        let enabled = state.enabled;
        let Some(vector) = state.vectors.get_mut(usize::from(vector)) else {
            return Raised::NoVector;
        };
        if !enabled {
            return Raised::Dropped;
        }
        vector.pending = true;
        if vector.flush() {
            Raised::Delivered
        } else {
            Raised::Latched
        }
    }

    /// Number of vectors.
    pub fn vectors(&self) -> u32 {
        // Not truncated: `new` takes a u16.
        self.lock().vectors.len() as u32
    }

    /// The pending bits of vectors `64 * word` to `64 * word + 63`, as they stand in the pending-bit array.
    pub fn pending(&self, word: usize) -> u64 {
        let state = self.lock();
        let vectors = state.vectors.iter().skip(word.saturating_mul(64)).take(64);
        vectors
            .enumerate()
            .fold(0, |bits, (i, vector)| bits | (u64::from(vector.pending) << i))
    }

    /// Follows the MSI-X enable bit of the configuration space.
    pub(crate) fn set_enabled(&self, enabled: bool) {
        let mut state = self.lock();
        if state.enabled && !enabled {
            state.vectors.iter_mut().for_each(|vector| vector.pending = false);
        }
        state.enabled = enabled;
    }

    /// Checks a range of vectors.
    fn range(state: &State, start: u32, count: u32) -> Result<std::ops::Range<usize>, Errno> {
        let end = start.checked_add(count).ok_or(Errno::INVAL)? as usize;
        if end > state.vectors.len() {
            return Err(Errno::INVAL);
        }
        Ok(start as usize..end)
    }

    /// Gives vectors from `start` on their eventfds and sends what is pending on them.
    pub(crate) fn connect(&self, start: u32, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let mut state = self.lock();
        let count = u32::try_from(fds.len()).map_err(|_| Errno::INVAL)?;
        let range = Self::range(&state, start, count)?;
        for fd in &fds {
            check_eventfd(fd)?;
        }
        for (vector, fd) in state.vectors[range].iter_mut().zip(fds) {
            vector.eventfd = Some(fd);
            vector.flush();
        }
        Ok(())
    }

    /// Takes the eventfds of a range away; what is pending stays pending.
    pub(crate) fn disconnect(&self, start: u32, count: u32) -> Result<(), Errno> {
        let mut state = self.lock();
        let range = Self::range(&state, start, count)?;
        state.vectors[range].iter_mut().for_each(|vector| vector.eventfd = None);
        Ok(())
    }

    /// Takes all eventfds away.
    pub(crate) fn disconnect_all(&self) {
        self.lock().vectors.iter_mut().for_each(|vector| vector.eventfd = None);
    }

    /// Masks or unmasks those of a range that `select` names by their distance from `start`.
    pub(crate) fn mask(&self, start: u32, count: u32, mask: bool, select: impl Fn(usize) -> bool) -> Result<(), Errno> {
        let mut state = self.lock();
        let range = Self::range(&state, start, count)?;
        for (i, vector) in state.vectors[range].iter_mut().enumerate() {
            if select(i) {
                vector.masked = mask;
                vector.flush();
            }
        }
        Ok(())
    }

    /// Triggers those of a range that `select` names, for the client's own use.
    pub(crate) fn trigger(&self, start: u32, count: u32, select: impl Fn(usize) -> bool) -> Result<(), Errno> {
        let mut state = self.lock();
        let range = Self::range(&state, start, count)?;
        for (i, vector) in state.vectors[range].iter_mut().enumerate() {
            if select(i) {
                vector.pending = true;
                vector.flush();
            }
        }
        Ok(())
    }

    /// Forgets what is pending and masked, as a reset does; the eventfds are the client's and stay.
    pub(crate) fn reset(&self) {
        let mut state = self.lock();
        state.enabled = false;
        for vector in &mut state.vectors {
            vector.pending = false;
            vector.masked = false;
        }
    }
}

/// Refuses what is not an eventfd, and makes it one that never blocks: the write must not hang on a client's choice.
fn check_eventfd(fd: &OwnedFd) -> Result<(), Errno> {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
    if link.as_bytes() != b"anon_inode:[eventfd]" {
        return Err(Errno::INVAL);
    }
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn event() -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        (fd.try_clone().unwrap(), fd)
    }

    fn count(fd: &OwnedFd) -> u64 {
        let mut value = [0; 8];
        match rustix::io::read(fd, &mut value) {
            Ok(_) => u64::from_ne_bytes(value),
            Err(Errno::AGAIN) => 0,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn off_means_dropped() {
        let irqs = Irqs::new(2);
        assert_eq!(irqs.raise(0), Raised::Dropped);
        assert_eq!(irqs.raise(2), Raised::NoVector);
        assert_eq!(irqs.pending(0), 0);
    }

    #[test]
    fn raised_between_eventfds_is_sent_later_and_once() {
        let irqs = Irqs::new(3);
        irqs.set_enabled(true);
        let (theirs, ours) = event();
        irqs.connect(1, vec![theirs]).unwrap();
        assert_eq!(irqs.raise(1), Raised::Delivered);
        assert_eq!(count(&ours), 1);
        irqs.disconnect_all();
        assert_eq!(irqs.raise(1), Raised::Latched);
        assert_eq!(irqs.raise(1), Raised::Latched);
        assert_eq!(irqs.raise(2), Raised::Latched);
        assert_eq!(irqs.pending(0), 0b110);
        assert_eq!(count(&ours), 0);
        let (theirs, ours) = event();
        irqs.connect(1, vec![theirs]).unwrap();
        assert_eq!(count(&ours), 1);
        assert_eq!(irqs.pending(0), 0b100);
    }

    #[test]
    fn masked_is_latched_and_disabling_forgets() {
        let irqs = Irqs::new(1);
        irqs.set_enabled(true);
        let (theirs, ours) = event();
        irqs.connect(0, vec![theirs]).unwrap();
        irqs.mask(0, 1, true, |_| true).unwrap();
        assert_eq!(irqs.raise(0), Raised::Latched);
        irqs.mask(0, 1, false, |_| false).unwrap();
        assert_eq!(count(&ours), 0);
        irqs.mask(0, 1, false, |_| true).unwrap();
        assert_eq!(count(&ours), 1);
        irqs.mask(0, 1, true, |_| true).unwrap();
        irqs.raise(0);
        irqs.set_enabled(false);
        irqs.set_enabled(true);
        irqs.mask(0, 1, false, |_| true).unwrap();
        assert_eq!(count(&ours), 0);
    }

    #[test]
    fn only_eventfds_and_only_existing_vectors() {
        let irqs = Irqs::new(2);
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert_eq!(irqs.connect(0, vec![file]), Err(Errno::INVAL));
        assert_eq!(irqs.connect(2, vec![event().0]), Err(Errno::INVAL));
        assert_eq!(irqs.disconnect(1, 2), Err(Errno::INVAL));
        assert_eq!(irqs.disconnect(u32::MAX, 2), Err(Errno::INVAL));
        assert_eq!(irqs.mask(0, 3, true, |_| true), Err(Errno::INVAL));
        assert_eq!(irqs.trigger(3, 0, |_| true), Err(Errno::INVAL));
    }

    #[test]
    fn a_full_eventfd_blocks_nobody() {
        let irqs = Irqs::new(1);
        irqs.set_enabled(true);
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        irqs.connect(0, vec![fd]).unwrap();
        assert_eq!(irqs.raise(0), Raised::Delivered);
    }

    #[test]
    fn pending_bits_have_their_place() {
        let irqs = Irqs::new(70);
        irqs.set_enabled(true);
        irqs.raise(0);
        irqs.raise(69);
        assert_eq!((irqs.pending(0), irqs.pending(1), irqs.pending(2)), (1, 1 << 5, 0));
        assert_eq!(irqs.pending(usize::MAX), 0);
        irqs.reset();
        assert_eq!((irqs.pending(0), irqs.pending(1)), (0, 0));
    }
}
