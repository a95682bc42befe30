// SPDX-License-Identifier: MIT OR Apache-2.0

//! An open device.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path as FsPath;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::error::{Error, Operation, Result};
use crate::explain::Explanation;
use crate::full::{holders, Holder};
use crate::pci::Client;
use crate::request::{addresses, Request};
use crate::sys::user;
use crate::sys::{CharDevice, Kernel};
use crate::types::{Info, Path, Provider, Stats};

/// Where the module's device is.
pub const DEFAULT_PATH: &str = "/dev/p2pmem";

/// How often a request is repeated whose answer has grown since its size was read.
const TRIES: usize = 8;

/// An open `/dev/p2pmem`. Clones share the open file, and so do the buffers allocated through it.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    kernel: Box<dyn Kernel>,
    /// What the module said of itself, of which only what never changes is looked at.
    constant: OnceLock<Info>,
    /// Held across a call and the question why it was refused: the module keeps one last reason for each open file,
    /// and another thread's must not be taken for ours. It holds the last allocation's request, which the module's
    /// verdicts speak of: it keeps the verdicts, not the names and sizes that they were made of.
    last_reason: Mutex<Option<Request>>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("fd", &self.as_fd()).finish()
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.kernel.fd()
    }
}

impl Device {
    /// Opens [`DEFAULT_PATH`].
    ///
    /// # Errors
    ///
    /// [`Error::Open`] where the module is not loaded or the device not accessible, [`Error::Abi`] where the module
    /// and this library have no version of the ABI in common.
    pub fn open() -> Result<Self> {
        Self::open_path(DEFAULT_PATH)
    }

    /// Opens the device at `path`.
    ///
    /// # Errors
    ///
    /// Those of [`Device::open`]; [`Error::Refused`] where `path` is another kind of device.
    pub fn open_path(path: impl AsRef<FsPath>) -> Result<Self> {
        let path = path.as_ref();
        let device = CharDevice::open(path).map_err(|error| Error::Open {
            path: path.to_owned(),
            error,
        })?;
        let device = Self::with(Box::new(device));
        let info = device.constant()?;
        if !info.compatible() {
            return Err(Error::Abi {
                module: info.abi_version,
                program: abi::P2PMEM_ABI_VERSION,
            });
        }
        Ok(device)
    }

    pub(crate) fn with(kernel: Box<dyn Kernel>) -> Self {
        Self {
            inner: Arc::new(Inner {
                kernel,
                constant: OnceLock::new(),
                last_reason: Mutex::new(None),
            }),
        }
    }

    pub(crate) fn kernel(&self) -> &dyn Kernel {
        &*self.inner.kernel
    }

    /// Calls the module. If the module refuses, reads its message.
    pub(crate) fn call<T>(&self, operation: Operation, f: impl FnOnce(&dyn Kernel) -> io::Result<T>) -> Result<T> {
        let _guard = self.lock();
        self.call_locked(operation, f)
    }

    /// What is under the lock is whole at any time, so a thread that panicked with it left nothing broken.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Request>> {
        self.inner.last_reason.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn call_locked<T>(
        &self,
        operation: Operation,
        f: impl FnOnce(&dyn Kernel) -> io::Result<T>,
    ) -> Result<T> {
        f(self.kernel()).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            // The module stores no message for these two, and an older one would mislead.
            let silent = matches!(errno, libc::EFAULT | libc::ENOTTY);
            let reason = if silent { None } else { self.last_text() };
            Error::Refused {
                operation,
                errno,
                reason,
            }
        })
    }

    /// Makes a driver import a dma-buf of this device. If that fails and the module was the one that refused, the error has
    /// the module's message.
    pub(crate) fn with_importer<T>(
        &self,
        import: impl FnOnce() -> io::Result<T>,
    ) -> std::result::Result<T, (io::Error, Option<String>)> {
        let _guard = self.lock();
        import().map_err(|error| {
            // A driver has reasons of its own. What the module said last is about this import only if it is the same
            // error, and no allocation's, which has verdicts.
            let last = self.explain_raw(None).ok();
            let last = last.filter(|(answer, verdicts, _)| {
                verdicts.is_empty() && i32::try_from(answer.error).ok() == error.raw_os_error()
            });
            let reason = last.map(|(_, _, text)| text).filter(|text| !text.is_empty());
            (error, reason)
        })
    }

    fn last_text(&self) -> Option<String> {
        let (_, _, text) = self.explain_raw(None).ok()?;
        Some(text).filter(|t| !t.is_empty())
    }

    /// Version, page size and features of the module, which are read once: the counts in it are out of date.
    pub(crate) fn constant(&self) -> Result<&Info> {
        if let Some(info) = self.inner.constant.get() {
            return Ok(info);
        }
        let info = self.info()?;
        Ok(self.inner.constant.get_or_init(|| info))
    }

    /// What the module is, and what it holds in all.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENOTTY where the open file is no p2pmem device.
    pub fn info(&self) -> Result<Info> {
        self.call(Operation::Info, |k| k.info()).map(Info::from)
    }

    /// All providers, in the order of their ids.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem::human_size;
    ///
    /// for provider in device.providers()? {
    ///     println!("{} {}: {} free", provider.id, provider.addr, human_size(provider.free));
    /// }
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`]; [`Error::State`] where providers come faster than they can be listed.
    pub fn providers(&self) -> Result<Vec<Provider>> {
        let all = self.grow(Operation::List, 16, |k, out: &mut [abi::p2pmem_provider]| k.list(out))?;
        Ok(all.iter().map(Provider::from).collect())
    }

    /// The paths between all providers and `clients`: all clients of the first provider first.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENODEV where a client is no PCI function of this machine.
    pub fn paths(&self, clients: &[Client]) -> Result<Vec<Path>> {
        self.ask_paths(clients, false)
    }

    /// As [`Device::paths`], after the module has dropped the paths it keeps: for a change that the kernel does not report,
    /// such as one of ACS by setpci.
    ///
    /// # Errors
    ///
    /// Those of [`Device::paths`]; [`Error::Refused`] with EPERM without CAP_SYS_ADMIN.
    pub fn rescan_paths(&self, clients: &[Client]) -> Result<Vec<Path>> {
        self.ask_paths(clients, true)
    }

    fn ask_paths(&self, clients: &[Client], rescan: bool) -> Result<Vec<Path>> {
        let mut all = Vec::new();
        // A request takes so many clients; the matrix is put together from as many requests as it needs.
        for (n, some) in clients.chunks(abi::P2PMEM_MAX_CLIENTS as usize).enumerate() {
            let raw = addresses(some);
            let first = n * abi::P2PMEM_MAX_CLIENTS as usize;
            let capacity = 16 * some.len();
            let rescan = rescan && n == 0;
            let paths = self.grow(Operation::Paths, capacity, |k, out: &mut [abi::p2pmem_path]| {
                k.paths(&raw, out, rescan)
            })?;
            all.extend(paths.iter().map(|p| {
                let path = Path::from(p);
                Path {
                    client: path.client.saturating_add(first),
                    ..path
                }
            }));
        }
        all.sort_by_key(|p| (p.provider, p.client));
        Ok(all)
    }

    /// Says what [`Device::alloc`] would do with `request` now, and why. Nothing is allocated.
    ///
    /// # Errors
    ///
    /// As for [`Device::alloc`], except that a request that no provider can serve is an answer, not an error:
    /// [`Explanation::errno`].
    pub fn explain(&self, request: &Request) -> Result<Explanation> {
        let raw = request.raw()?;
        let clients = addresses(request.clients());
        let (answer, verdicts, text) = {
            let _guard = self.lock();
            self.explain_raw(Some((&raw, &clients)))
                .map_err(|error| Error::Refused {
                    operation: Operation::Explain,
                    errno: error.raw_os_error().unwrap_or(libc::EIO),
                    reason: self.last_text(),
                })?
        };
        // The dry run's answer repeats the request; take ours, which an older module may not have echoed.
        let answer = abi::p2pmem_explain {
            req: abi::p2pmem_request {
                size: request.size_of_one(),
                ..raw
            },
            ..answer
        };
        Ok(Explanation::new(&answer, &verdicts, text, request.clients()))
    }

    /// As [`Device::explain`], for another user, who may have other rules. Only root can call this.
    ///
    /// # Errors
    ///
    /// As for [`Device::explain`]; [`Error::State`] if the process cannot change to the ids.
    pub fn explain_as(&self, request: &Request, uid: u32, gid: u32, groups: &[u32]) -> Result<Explanation> {
        user::as_user(uid, gid, groups, || self.explain(request)).map_err(|error| {
            Error::State(format!(
                "cannot ask in the name of uid {uid} and gid {gid}: {error}; run as root"
            ))
        })?
    }

    /// Explains the last allocation through this device, or what was refused since.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENODATA where there was none yet.
    pub fn explain_last(&self) -> Result<Explanation> {
        let last = self.lock();
        let (answer, verdicts, text) = self.explain_raw(None).map_err(|error| Error::Refused {
            operation: Operation::Explain,
            errno: error.raw_os_error().unwrap_or(libc::EIO),
            reason: None,
        })?;
        // Only allocations set verdicts, so if there are any they belong to the request that is stored here.
        let size = last.as_ref().map_or(0, Request::size_of_one);
        let answer = abi::p2pmem_explain {
            req: abi::p2pmem_request { size, ..answer.req },
            ..answer
        };
        let clients = last.as_ref().map_or(&[][..], Request::clients);
        Ok(Explanation::new(&answer, &verdicts, text, clients))
    }

    /// Counters of the provider with this id, or of all there ever were.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENOENT where there is no such provider.
    pub fn stats(&self, provider: Option<u32>) -> Result<Stats> {
        self.call(Operation::Stats, |k| k.stats(provider.unwrap_or(0)))
            .map(Stats::from)
    }

    /// Returns all providers with their counters. A provider that is removed meanwhile is not included.
    ///
    /// # Errors
    ///
    /// Those of [`Device::providers`], and of [`Device::stats`] except ENOENT.
    pub fn provider_stats(&self) -> Result<Vec<(Provider, Stats)>> {
        let mut all = Vec::new();
        for provider in self.providers()? {
            match self.stats(Some(provider.id)) {
                Ok(stats) => all.push((provider, stats)),
                Err(error) if error.errno() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    /// Returns the holders of buffers, by provider, those with the most bytes first; none if the program may not read them:
    /// only root can.
    pub fn holders(&self) -> Option<Vec<(PciAddr, Holder)>> {
        self.kernel().holders().ok().map(|table| holders(&table))
    }

    /// Calls `f` to fill an array, and enlarges the array while `f` returns that there is more.
    fn grow<T: Default + Clone>(
        &self,
        operation: Operation,
        capacity: usize,
        f: impl Fn(&dyn Kernel, &mut [T]) -> io::Result<usize>,
    ) -> Result<Vec<T>> {
        let mut out = vec![T::default(); capacity];
        for _ in 0..TRIES {
            let there = self.call(operation, |k| f(k, &mut out))?;
            if there <= out.len() {
                out.truncate(there);
                return Ok(out);
            }
            out.resize(there + there / 4, T::default());
        }
        Err(Error::State(format!(
            "{operation} did not settle: providers come faster than they can be listed"
        )))
    }

    #[allow(clippy::type_complexity)]
    pub(crate) fn explain_raw(
        &self,
        request: Option<(&abi::p2pmem_request, &[abi::p2pmem_pci_addr])>,
    ) -> io::Result<(abi::p2pmem_explain, Vec<abi::p2pmem_verdict>, String)> {
        let mut verdicts = vec![abi::p2pmem_verdict::default(); 16];
        let mut text = vec![0u8; 512];
        for _ in 0..TRIES {
            let answer = self.kernel().explain(request, &mut verdicts, &mut text)?;
            let (nr, len) = (answer.nr_verdicts as usize, answer.text_len as usize);
            if nr <= verdicts.len() && len <= text.len() {
                verdicts.truncate(nr);
                text.truncate(text.iter().position(|b| *b == 0).unwrap_or(len));
                return Ok((answer, verdicts, String::from_utf8_lossy(&text).into_owned()));
            }
            verdicts.resize(nr.max(verdicts.len()), abi::p2pmem_verdict::default());
            text.resize(len.max(text.len()), 0);
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }
}

#[cfg(test)]
mod tests;
