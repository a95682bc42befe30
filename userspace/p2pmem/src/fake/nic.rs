// SPDX-License-Identifier: MIT OR Apache-2.0

//! A fake NIC without hardware, for registrations.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use crate::sys::verbs::{Part, Pd, RawMr, RawPd, Verbs};
use crate::sys::Region;

use super::machine::{errno, lock};

/// A fake NIC: it registers memory as a real one does, and transfers no data. Clones share the NIC.
///
/// ```
/// use p2pmem::{fake::{Fake, FakeNic}, Access, Request};
///
/// let device = Fake::example().device();
/// let nic = FakeNic::new("mlx5_0");
/// let registration = device.alloc(&Request::new(4096))?.register(&nic.pd(), Access::REMOTE_READ)?;
/// assert_eq!((registration.nic(), nic.regions()), ("mlx5_0".into(), 1));
/// drop(registration);
/// assert_eq!(nic.regions(), 0);
///
/// nic.fail_next(95);
/// let error = device.alloc(&Request::new(4096))?.register(&nic.pd(), Access::REMOTE_READ).unwrap_err();
/// assert_eq!(error.errno(), Some(95));
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Clone)]
pub struct FakeNic {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Registrations by key.
    regions: BTreeMap<u32, Part>,
    last_key: u32,
    fail_next: Option<i32>,
}

impl fmt::Debug for FakeNic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeNic")
            .field("name", &self.inner.name)
            .finish_non_exhaustive()
    }
}

impl FakeNic {
    /// A NIC of this name.
    pub fn new(name: &str) -> Self {
        Self {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                state: Mutex::default(),
            }),
        }
    }

    /// Returns a protection domain of the NIC.
    pub fn pd(&self) -> Pd {
        Pd::new(RawPd::fake(), self.inner.clone(), None)
    }

    /// Returns the number of memory regions.
    pub fn regions(&self) -> usize {
        lock(&self.inner.state).regions.len()
    }

    /// Lets the next registration or deregistration fail with this errno (positive).
    pub fn fail_next(&self, errno: i32) {
        lock(&self.inner.state).fail_next = Some(errno);
    }
}

impl Inner {
    fn register(&self, part: Part) -> io::Result<RawMr> {
        let mut state = lock(&self.state);
        if let Some(wanted) = state.fail_next.take() {
            return Err(errno(wanted));
        }
        state.last_key += 1;
        let key = state.last_key;
        state.regions.insert(key, part);
        Ok(RawMr::fake(key))
    }
}

impl Verbs for Inner {
    fn nic(&self, _pd: RawPd) -> String {
        self.name.clone()
    }

    fn reg_dmabuf(&self, _pd: RawPd, dmabuf: BorrowedFd<'_>, part: Part) -> io::Result<RawMr> {
        let size = std::fs::File::from(dmabuf.try_clone_to_owned()?).metadata()?.len();
        if part.offset + part.len as u64 > size || part.offset % 4096 != part.iova % 4096 {
            return Err(errno(libc::EINVAL));
        }
        self.register(part)
    }

    fn reg_mapped(&self, _pd: RawPd, region: &Region, part: Part) -> io::Result<RawMr> {
        if part.offset + part.len as u64 > region.len() as u64 {
            return Err(errno(libc::EINVAL));
        }
        self.register(part)
    }

    fn dereg(&self, mr: &RawMr) -> io::Result<()> {
        let mut state = lock(&self.state);
        if let Some(wanted) = state.fail_next.take() {
            return Err(errno(wanted));
        }
        match state.regions.remove(&mr.lkey) {
            Some(_) => Ok(()),
            None => Err(errno(libc::EINVAL)),
        }
    }
}
