// SPDX-License-Identifier: MIT OR Apache-2.0

//! MSI-X interrupts: one eventfd per vector, masks, and the pending bits.
//!
//! Whenever the guest adds a vector, the client removes all eventfds and sets them again, and it removes the eventfd of
//! a vector while the guest masks that vector. An interrupt that is raised meanwhile must not be lost: the vector stays
//! pending and is signalled once it has an eventfd and is unmasked. While the function's MSI-X Enable bit is 0,
//! interrupts are dropped, as on hardware.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use rustix::io::Errno;
use tracing::warn;

/// Result of raising an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raised {
    /// The guest was signalled.
    Delivered,
    /// The vector is masked or has no eventfd; it is pending.
    Latched,
    /// MSI-X is disabled; the interrupt is dropped.
    Dropped,
    /// The device has no such vector.
    NoVector,
}

#[derive(Debug, Default)]
struct Vector {
    eventfd: Option<OwnedFd>,
    masked: bool,
    pending: bool,
}

impl Vector {
    /// Signals the eventfd if the vector is pending, unmasked and has one. Returns whether it was signalled.
    fn signal_pending(&mut self) -> bool {
        if !self.pending || self.masked {
            return false;
        }
        let Some(eventfd) = &self.eventfd else { return false };
        match rustix::io::write(eventfd, &1_u64.to_ne_bytes()) {
            // `EAGAIN`: the counter is at its maximum, so the guest has a signal that it has not consumed.
            Ok(_) | Err(Errno::AGAIN) => {
                self.pending = false;
                true
            }
            Err(error) => {
                warn!(%error, "cannot write the eventfd of an interrupt");
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

/// The interrupts of a device. Clones refer to the same device.
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
        if vector.signal_pending() {
            Raised::Delivered
        } else {
            Raised::Latched
        }
    }

    /// Number of vectors.
    pub fn vectors(&self) -> u32 {
        // No truncation: `new` takes a u16.
        self.lock().vectors.len() as u32
    }

    /// The pending bits of vectors `64 * word` to `64 * word + 63`, as in the Pending Bit Array.
    pub fn pending(&self, word: usize) -> u64 {
        let state = self.lock();
        let vectors = state.vectors.iter().skip(word.saturating_mul(64)).take(64);
        vectors
            .enumerate()
            .fold(0, |bits, (i, vector)| bits | (u64::from(vector.pending) << i))
    }

    /// Sets the state of the MSI-X Enable bit. Disabling clears the pending bits.
    pub(crate) fn set_enabled(&self, enabled: bool) {
        let mut state = self.lock();
        if state.enabled && !enabled {
            state.vectors.iter_mut().for_each(|vector| vector.pending = false);
        }
        state.enabled = enabled;
    }

    /// Returns a range of vectors as indices. Fails with `EINVAL` if a vector does not exist.
    fn range(state: &State, start: u32, count: u32) -> Result<std::ops::Range<usize>, Errno> {
        let end = start.checked_add(count).ok_or(Errno::INVAL)? as usize;
        if end > state.vectors.len() {
            return Err(Errno::INVAL);
        }
        Ok(start as usize..end)
    }

    /// Sets the eventfds of the vectors from `start` on, and signals those that are pending.
    pub(crate) fn set_eventfds(&self, start: u32, fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let mut state = self.lock();
        let count = u32::try_from(fds.len()).map_err(|_| Errno::INVAL)?;
        let range = Self::range(&state, start, count)?;
        for fd in &fds {
            check_eventfd(fd)?;
        }
        for (vector, fd) in state.vectors[range].iter_mut().zip(fds) {
            vector.eventfd = Some(fd);
            vector.signal_pending();
        }
        Ok(())
    }

    /// Removes the eventfds of a range of vectors. Pending bits are kept.
    pub(crate) fn remove_eventfds(&self, start: u32, count: u32) -> Result<(), Errno> {
        let mut state = self.lock();
        let range = Self::range(&state, start, count)?;
        state.vectors[range].iter_mut().for_each(|vector| vector.eventfd = None);
        Ok(())
    }

    /// Removes all eventfds. Pending bits are kept.
    pub(crate) fn remove_all_eventfds(&self) {
        self.lock().vectors.iter_mut().for_each(|vector| vector.eventfd = None);
    }

    /// Masks or unmasks the vectors `start + i` of a range for which `select(i)` is true.
    pub(crate) fn mask(&self, start: u32, count: u32, mask: bool, select: impl Fn(usize) -> bool) -> Result<(), Errno> {
        let mut state = self.lock();
        let range = Self::range(&state, start, count)?;
        for (i, vector) in state.vectors[range].iter_mut().enumerate() {
            if select(i) {
                vector.masked = mask;
                vector.signal_pending();
            }
        }
        Ok(())
    }

    /// Triggers the vectors `start + i` of a range for which `select(i)` is true, as the client requests.
    pub(crate) fn trigger(&self, start: u32, count: u32, select: impl Fn(usize) -> bool) -> Result<(), Errno> {
        let mut state = self.lock();
        let range = Self::range(&state, start, count)?;
        for (i, vector) in state.vectors[range].iter_mut().enumerate() {
            if select(i) {
                vector.pending = true;
                vector.signal_pending();
            }
        }
        Ok(())
    }

    /// Clears pending bits and masks and disables MSI-X, as a reset does. The eventfds belong to the client and are
    /// kept.
    pub(crate) fn reset(&self) {
        let mut state = self.lock();
        state.enabled = false;
        for vector in &mut state.vectors {
            vector.pending = false;
            vector.masked = false;
        }
    }
}

/// Fails with `EINVAL` for a file descriptor that is not an eventfd. Sets `O_NONBLOCK`, so that a full counter does not
/// block the device.
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
    fn disabled_interrupt_is_dropped() {
        let irqs = Irqs::new(2);
        assert_eq!(irqs.raise(0), Raised::Dropped);
        assert_eq!(irqs.raise(2), Raised::NoVector);
        assert_eq!(irqs.pending(0), 0);
    }

    #[test]
    fn interrupt_without_eventfd_is_delivered_once_later() {
        let irqs = Irqs::new(3);
        irqs.set_enabled(true);
        let (theirs, ours) = event();
        irqs.set_eventfds(1, vec![theirs]).unwrap();
        assert_eq!(irqs.raise(1), Raised::Delivered);
        assert_eq!(count(&ours), 1);
        irqs.remove_all_eventfds();
        assert_eq!(irqs.raise(1), Raised::Latched);
        assert_eq!(irqs.raise(1), Raised::Latched);
        assert_eq!(irqs.raise(2), Raised::Latched);
        assert_eq!(irqs.pending(0), 0b110);
        assert_eq!(count(&ours), 0);
        let (theirs, ours) = event();
        irqs.set_eventfds(1, vec![theirs]).unwrap();
        assert_eq!(count(&ours), 1);
        assert_eq!(irqs.pending(0), 0b100);
    }

    #[test]
    fn masked_interrupt_is_latched_and_disable_clears_it() {
        let irqs = Irqs::new(1);
        irqs.set_enabled(true);
        let (theirs, ours) = event();
        irqs.set_eventfds(0, vec![theirs]).unwrap();
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
    fn invalid_eventfds_and_vectors_are_rejected() {
        let irqs = Irqs::new(2);
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert_eq!(irqs.set_eventfds(0, vec![file]), Err(Errno::INVAL));
        assert_eq!(irqs.set_eventfds(2, vec![event().0]), Err(Errno::INVAL));
        assert_eq!(irqs.remove_eventfds(1, 2), Err(Errno::INVAL));
        assert_eq!(irqs.remove_eventfds(u32::MAX, 2), Err(Errno::INVAL));
        assert_eq!(irqs.mask(0, 3, true, |_| true), Err(Errno::INVAL));
        assert_eq!(irqs.trigger(3, 0, |_| true), Err(Errno::INVAL));
    }

    #[test]
    fn full_eventfd_does_not_block() {
        let irqs = Irqs::new(1);
        irqs.set_enabled(true);
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        irqs.set_eventfds(0, vec![fd]).unwrap();
        assert_eq!(irqs.raise(0), Raised::Delivered);
    }

    #[test]
    fn pending_bits_are_indexed_by_vector() {
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
