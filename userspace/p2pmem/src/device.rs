// SPDX-License-Identifier: MIT OR Apache-2.0

//! An open device, and the information that the module reports about itself.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path as FsPath;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::backend::{Backend, Capability};
use crate::error::{Error, Operation, Result};
use crate::explain::Explanation;
use crate::full::{holders, Holder};
use crate::pci::Client;
use crate::request::{addresses, Request, Strategy};
use crate::sys::user;
use crate::sys::{page_size, CharDevice, Kernel};
use crate::types::{Info, Path, Provider, Stats};

/// Path of the module's device.
pub const DEFAULT_PATH: &str = "/dev/p2pmem";

/// Most attempts to read an answer that grew between the query for its size and the query for its content.
const MAX_ATTEMPTS: usize = 8;

/// Returns the error of a failed call for which the backend records no message.
pub(crate) fn failure_without_message(operation: Operation, error: io::Error) -> Error {
    // The backends without the module also return errors of this crate.
    error.downcast().unwrap_or_else(|error| Error::Refused {
        operation,
        errno: error.raw_os_error().unwrap_or(libc::EIO),
        reason: None,
    })
}

/// An open `/dev/p2pmem`, or another [`Backend`]. Clones share the open file; buffers allocated through the device keep
/// the file open.
///
/// ```
/// # let device = p2pmem::fake::Fake::example().device();
/// use p2pmem::{human_size, Request};
///
/// // A program calls Device::open().
/// let buffer = device.alloc(&Request::new(16 << 20))?;
/// println!("{} in provider {}", human_size(buffer.size()), buffer.provider());
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    kernel: Box<dyn Kernel>,
    /// Information about the module. Only the fields that never change are used.
    constant: OnceLock<Info>,
    /// Held during a call and the query for its message: the module keeps one message for each open file, and a
    /// concurrent call would replace it. The value is the last allocation's request. The module's verdicts refer to
    /// this request, but contain neither the clients' names nor the size.
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
    /// Opens the module's device at `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] with ENOENT (the module is not loaded) or EACCES (the caller may not open the device);
    /// [`Error::Abi`] if module and library have no version of the ABI in common; [`Error::Refused`] with ENOTTY if
    /// `path` is another kind of device.
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

    /// Returns the backend of the device.
    pub fn backend(&self) -> Backend {
        self.kernel().backend()
    }

    /// Fails if the device's backend does not have a capability.
    pub(crate) fn require(&self, capability: Capability) -> Result<()> {
        let backend = self.backend();
        if backend.supports(capability) {
            Ok(())
        } else {
            Err(Error::NotSupported { backend, capability })
        }
    }

    /// Fails if the backend does not support the strategy or the alignment of a request.
    pub(crate) fn require_for(&self, request: &Request) -> Result<()> {
        let backend = self.backend();
        // The sysfs backend does not know the memory's place in the BAR.
        let is_aligned = backend != Backend::Sysfs || request.align <= page_size();
        if request.strategy == Strategy::Nearest && is_aligned {
            return Ok(());
        }
        self.require(Capability::Placement)
    }

    /// Calls the backend. On an error, reads the backend's message about the error.
    pub(crate) fn call<T>(&self, operation: Operation, f: impl FnOnce(&dyn Kernel) -> io::Result<T>) -> Result<T> {
        let _guard = self.lock();
        self.call_locked(operation, f)
    }

    /// Locks the last request. The value is consistent at any time, so a thread that panicked with the lock held is
    /// harmless.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Request>> {
        self.inner.last_reason.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn call_locked<T>(
        &self,
        operation: Operation,
        f: impl FnOnce(&dyn Kernel) -> io::Result<T>,
    ) -> Result<T> {
        f(self.kernel()).map_err(|error| self.failure(operation, error))
    }

    /// Returns the error of a failed call, with the backend's message.
    fn failure(&self, operation: Operation, error: io::Error) -> Error {
        let mut failure = failure_without_message(operation, error);
        if let Error::Refused { errno, reason, .. } = &mut failure {
            // The module records no message for these two errnos; its last message is about an earlier call.
            if !matches!(*errno, libc::EFAULT | libc::ENOTTY) {
                *reason = self.last_text();
            }
        }
        failure
    }

    /// Runs `import`, by which a driver imports a dma-buf of this device. On an error, also returns the module's
    /// message, if the module caused the error.
    pub(crate) fn with_importer<T>(
        &self,
        import: impl FnOnce() -> io::Result<T>,
    ) -> std::result::Result<T, (io::Error, Option<String>)> {
        let _guard = self.lock();
        import().map_err(|error| {
            // The driver can fail on its own. The module's last message is about this import only if its errno is the
            // same, and if it has no verdicts, which only an allocation's message has.
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

    /// Returns version, page size and features of the module, which are read once. The counts in the result are out of
    /// date.
    pub(crate) fn constant(&self) -> Result<&Info> {
        if let Some(info) = self.inner.constant.get() {
            return Ok(info);
        }
        let info = self.info()?;
        Ok(self.inner.constant.get_or_init(|| info))
    }

    /// Returns version, features and totals of the module.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// let info = device.info()?;
    /// println!("version {}, {} of {} bytes free", info.version, info.free, info.size);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENOTTY if the open file is not a p2pmem device.
    pub fn info(&self) -> Result<Info> {
        self.call(Operation::Info, |k| k.info()).map(Info::from)
    }

    /// Returns all providers, in the order of their ids.
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
    /// [`Error::Refused`] with ENOMEM; [`Error::State`] if providers are added faster than they can be listed.
    pub fn providers(&self) -> Result<Vec<Provider>> {
        let all = self.grow(Operation::List, 16, |k, out: &mut [abi::p2pmem_provider]| k.list(out))?;
        Ok(all.iter().map(Provider::from).collect())
    }

    /// Returns the paths between all providers and `clients`: first all paths of the first provider, in the order of
    /// `clients`.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem::{Client, PciAddr};
    ///
    /// let drive: PciAddr = "0000:04:00.0".parse()?;
    /// for path in device.paths(&[Client::new(drive)])? {
    ///     println!("provider {}: {}, {} hops", path.provider, path.class, path.hops);
    /// }
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENODEV if a client is not a PCI function of this machine, or ENOMEM; [`Error::State`] as
    /// in [`Device::providers`].
    pub fn paths(&self, clients: &[Client]) -> Result<Vec<Path>> {
        self.read_paths(clients, false)
    }

    /// As [`Device::paths`], but the module computes all paths again. Use it after a change that the kernel does not
    /// report, such as a change of ACS by setpci.
    ///
    /// # Errors
    ///
    /// Those of [`Device::paths`]; [`Error::Refused`] with EPERM without CAP_SYS_ADMIN.
    pub fn rescan_paths(&self, clients: &[Client]) -> Result<Vec<Path>> {
        self.read_paths(clients, true)
    }

    fn read_paths(&self, clients: &[Client], rescan: bool) -> Result<Vec<Path>> {
        let mut all = Vec::new();
        // One call accepts a limited number of clients, so several calls fill the matrix.
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

    /// Explains which provider [`Device::alloc`] would choose for `request` now, and why. Allocates nothing.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem::Request;
    ///
    /// let explanation = device.explain(&Request::new(16 << 20))?;
    /// println!("{}", explanation.lines().join("\n"));
    /// # assert!(explanation.chosen.is_some());
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Device::alloc`], except for a request that no provider can serve: [`Explanation::errno`] is set then.
    pub fn explain(&self, request: &Request) -> Result<Explanation> {
        let raw = request.raw()?;
        self.require_for(request)?;
        let clients = addresses(request.clients());
        let (answer, verdicts, text) = {
            let _guard = self.lock();
            self.explain_raw(Some((&raw, &clients)))
                .map_err(|error| self.failure(Operation::Explain, error))?
        };
        // The dry run's answer repeats the request. Use the local request, because an older module may not repeat it.
        let answer = abi::p2pmem_explain {
            req: abi::p2pmem_request {
                size: request.size_of_one(),
                ..raw
            },
            ..answer
        };
        Ok(Explanation::new(&answer, &verdicts, text, request.clients()))
    }

    /// As [`Device::explain`], for another user, because rules can depend on the user. Needs CAP_SETUID and
    /// CAP_SETGID.
    ///
    /// # Errors
    ///
    /// Those of [`Device::explain`]; [`Error::State`] if the thread cannot change its ids (EPERM), or an id is
    /// `u32::MAX` (EINVAL).
    pub fn explain_as(&self, request: &Request, uid: u32, gid: u32, groups: &[u32]) -> Result<Explanation> {
        user::as_user(uid, gid, groups, || self.explain(request)).map_err(|error| {
            Error::State(format!(
                "cannot explain for uid {uid} and gid {gid}: {error}; run as root"
            ))
        })?
    }

    /// Explains the last allocation through this device, or the last refusal since.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENODATA if there is none yet.
    pub fn explain_last(&self) -> Result<Explanation> {
        let last = self.lock();
        let (answer, verdicts, text) = self.explain_raw(None).map_err(|error| Error::Refused {
            operation: Operation::Explain,
            errno: error.raw_os_error().unwrap_or(libc::EIO),
            reason: None,
        })?;
        // Only allocations have verdicts, so verdicts are always about the request that is stored here.
        let size = last.as_ref().map_or(0, Request::size_of_one);
        let answer = abi::p2pmem_explain {
            req: abi::p2pmem_request { size, ..answer.req },
            ..answer
        };
        let clients = last.as_ref().map_or(&[][..], Request::clients);
        Ok(Explanation::new(&answer, &verdicts, text, clients))
    }

    /// Returns the counters of the provider with this id, or, for `None`, of all providers since the module was loaded.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem::Request;
    ///
    /// let buffer = device.alloc(&Request::new(8192).provider(2))?;
    /// assert_eq!(device.stats(Some(2))?.alloc_bytes, 8192);
    /// assert_eq!(device.stats(None)?.allocs, 1);
    /// # drop(buffer);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENOENT if there is no such provider.
    pub fn stats(&self, provider: Option<u32>) -> Result<Stats> {
        self.call(Operation::Stats, |k| k.stats(provider.unwrap_or(0)))
            .map(Stats::from)
    }

    /// Returns all providers and their counters. Omits providers that are removed during the call.
    ///
    /// # Errors
    ///
    /// Those of [`Device::providers`], and of [`Device::stats`] except for ENOENT.
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

    /// Returns the processes that hold buffers, for each provider, those with the most bytes first; `None` if this
    /// program may not read the list, which only root can. A backend without the module lists this program only.
    pub fn holders(&self) -> Option<Vec<(PciAddr, Holder)>> {
        self.kernel().holders().ok().map(|table| holders(&table))
    }

    /// Calls `f` to fill an array of `capacity` elements, and again with a larger array while `f` reports more
    /// elements.
    fn grow<T: Default + Clone>(
        &self,
        operation: Operation,
        capacity: usize,
        f: impl Fn(&dyn Kernel, &mut [T]) -> io::Result<usize>,
    ) -> Result<Vec<T>> {
        let mut out = vec![T::default(); capacity];
        for _ in 0..MAX_ATTEMPTS {
            let there = self.call(operation, |k| f(k, &mut out))?;
            if there <= out.len() {
                out.truncate(there);
                return Ok(out);
            }
            out.resize(there + there / 4, T::default());
        }
        Err(Error::State(format!(
            "{operation} did not end: providers are added faster than they can be listed"
        )))
    }

    #[allow(clippy::type_complexity)]
    pub(crate) fn explain_raw(
        &self,
        request: Option<(&abi::p2pmem_request, &[abi::p2pmem_pci_addr])>,
    ) -> io::Result<(abi::p2pmem_explain, Vec<abi::p2pmem_verdict>, String)> {
        let mut verdicts = vec![abi::p2pmem_verdict::default(); 16];
        let mut text = vec![0u8; 512];
        for _ in 0..MAX_ATTEMPTS {
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
