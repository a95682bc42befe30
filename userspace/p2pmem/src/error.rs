// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors: which operation failed, why, and the remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::addr::PciAddr;
use crate::backend::{Backend, Capability};
use crate::full::FullProvider;
use crate::types::RegistrationMethod;

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// The operation that the module refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Operation {
    /// Getting version and features of the module.
    Info,
    /// Listing providers.
    List,
    /// Getting paths.
    Paths,
    /// Allocating a buffer.
    Alloc,
    /// Freeing a buffer.
    Free,
    /// Getting the state of a buffer.
    Buffer,
    /// Explaining a decision.
    Explain,
    /// Getting counters.
    Stats,
    /// Mapping a buffer.
    Map,
    /// Exporting a buffer as a dma-buf.
    Export,
    /// Reading events.
    Events,
    /// Setting rules.
    Rules,
    /// Importing a buffer that was shared.
    Import,
    /// Allocating a stripe.
    Stripe,
    /// Accessing the memory of a mapping.
    Access,
    /// Attaching a function to a dma-buf, or reading the state of the attachment.
    Attach,
    /// Ending an attachment.
    Detach,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Info => "reading the module's version",
            Self::List => "listing the providers",
            Self::Paths => "reading the paths",
            Self::Alloc => "the allocation",
            Self::Free => "freeing the buffer",
            Self::Buffer => "reading the buffer's state",
            Self::Explain => "the explanation",
            Self::Stats => "reading the counters",
            Self::Map => "mapping the buffer",
            Self::Export => "exporting the buffer",
            Self::Events => "reading events",
            Self::Rules => "setting rules",
            Self::Import => "importing the buffer",
            Self::Stripe => "allocating the stripe",
            Self::Access => "accessing the buffer",
            Self::Attach => "attaching the device to the dma-buf",
            Self::Detach => "detaching the device from the dma-buf",
        })
    }
}

/// An error of this crate.
///
/// The text says what failed and why, and includes the kernel's error. So `source()` is `None`, and `{:#}` of anyhow
/// prints no text twice. [`Error::remedy`] returns what to do, if known. Programs match on [`Error::kind`].
///
/// ```
/// use p2pmem::{Device, ErrorKind};
///
/// let error = Device::open_path("/nonexistent").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::NotFound);
/// assert_eq!(error.to_string(), "cannot open /nonexistent: No such file or directory (ENOENT)");
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device or file could not be opened.
    #[error("cannot open {}: {}", path.display(), os_text(error))]
    Open {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },

    /// Module and library have no version of the ABI in common.
    #[error("the module has version {module} of the ABI, this program version {program}")]
    Abi {
        /// The module's version.
        module: u32,
        /// This library's version.
        program: u32,
    },

    /// The device's backend does not support an operation.
    #[error("the backend {backend} does not support {}", capability.description())]
    NotSupported {
        /// The backend of the device.
        backend: Backend,
        /// The capability that the operation needs.
        capability: Capability,
    },

    /// A backend has no memory that this program can use.
    #[error("the backend {backend} has no memory for this program: {why}")]
    Unavailable {
        /// The backend.
        backend: Backend,
        /// What is missing.
        why: String,
        /// What to do about the error.
        remedy: &'static str,
    },

    /// The module is not loaded, and no other backend has memory that this program can use.
    #[error("{module}; {}", list(others))]
    NoBackend {
        /// Why the module's device could not be opened.
        module: Box<Error>,
        /// Why the other backends cannot be used, in the order of [`Backend`].
        others: Vec<Error>,
    },

    /// The backend refused an operation.
    #[error("{operation} failed: {}{}", errno_text(*errno), reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    Refused {
        /// The operation.
        operation: Operation,
        /// The errno, positive.
        errno: i32,
        /// The module's message, if any.
        reason: Option<String>,
    },

    /// An allocation for which the suitable providers do not have enough free space.
    #[error("{} failed: {}{}{}", Operation::Alloc, errno_text(*errno), reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default(), full_text(full))]
    NoSpace {
        /// The errno, positive: ENOSPC if the request fits after other buffers are freed, ENODEV if it never fits.
        errno: i32,
        /// The module's message, if any.
        reason: Option<String>,
        /// These providers, with their sizes and holders.
        full: Vec<FullProvider>,
    },

    /// A string that does not name a client.
    #[error("{name:?} is not the name of a PCI device: {why}")]
    Client {
        /// The string.
        name: String,
        /// The reason.
        why: String,
    },

    /// A request that no module could serve.
    #[error("bad request: {0}")]
    Request(String),

    /// A descriptor that is not a dma-buf, or a dma-buf of which the library does not know enough.
    #[error("{why}")]
    DmaBuf {
        /// The reason.
        why: String,
        /// What to do about the error.
        remedy: &'static str,
    },

    /// An access outside a mapping.
    #[error("{len} bytes at offset {offset} exceed the mapping of {size} bytes")]
    OutOfBounds {
        /// Offset of the access in the mapping, in bytes.
        offset: usize,
        /// Length of the access in bytes.
        len: usize,
        /// Length of the mapping in bytes.
        size: usize,
    },

    /// A file for peer-to-peer I/O that is not open for direct I/O.
    #[error("the file is not open with O_DIRECT: its data would be copied through host memory")]
    NotDirect,

    /// Direct I/O failed.
    #[error("{what} at byte {offset} of the file failed: {}", os_text(error))]
    Io {
        /// "reading" or "writing".
        what: &'static str,
        /// Offset in the file, in bytes.
        offset: u64,
        /// The kernel's error.
        error: io::Error,
    },

    /// The file's device accepted only a part of the data, usually because it is full.
    #[error("only {written} of {len} bytes were written")]
    ShortWrite {
        /// Bytes that were written.
        written: usize,
        /// Bytes that were to be written.
        len: usize,
    },

    /// Memory could not be registered with a NIC.
    #[error("registering {what} with {nic} by {method} failed: {}{}", errno_text(*errno), reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    Register {
        /// The memory: bytes, buffer, and provider.
        what: String,
        /// The NIC's name.
        nic: String,
        /// The method.
        method: RegistrationMethod,
        /// The errno, positive.
        errno: i32,
        /// The module's message, if the module refused the registration.
        reason: Option<String>,
    },

    /// A registration could not be ended.
    #[error("ending a registration with {nic} failed: {why}")]
    Deregister {
        /// The NIC's name.
        nic: String,
        /// The error of libibverbs.
        why: String,
    },

    /// A step before a transfer failed, such as opening the NIC or connecting a queue pair.
    #[error("{what} failed: {why}")]
    Rdma {
        /// The step.
        what: String,
        /// The reason.
        why: String,
    },

    /// A work request completed with an error.
    #[error("{verb} through {nic} ended with {} (status {status})", status_text(*status))]
    Transfer {
        /// The operation, such as "RDMA WRITE".
        verb: String,
        /// The NIC's name.
        nic: String,
        /// The completion's status: `enum ibv_wc_status`.
        status: u32,
    },

    /// libibverbs cannot be loaded.
    #[error("libibverbs cannot be loaded: {0}")]
    Verbs(String),

    /// A file of sysfs or configfs could not be read or written.
    #[error("cannot {action} {}: {}{}", path.display(), os_text(error), status.as_deref().map(|s| format!(": {s}")).unwrap_or_default())]
    Admin {
        /// The action, such as `write "1" to`.
        action: String,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
        /// The message in the attribute `status` of the provider or rule, if any.
        status: Option<String>,
    },

    /// A device is bound to another driver.
    #[error("{addr} is bound to the driver {driver}")]
    Bound {
        /// The device.
        addr: PciAddr,
        /// Its driver.
        driver: String,
    },

    /// A device, a published device or a rule does not exist.
    #[error("{0}")]
    Missing(String),

    /// A published device or a rule exists already.
    #[error("{0}")]
    Exists(String),

    /// The state of the machine does not permit the operation.
    #[error("{0}")]
    State(String),
}

/// The kind of an error, for programs that act on it: [`Error::kind`].
///
/// ```
/// use p2pmem::{ErrorKind, Request};
///
/// # let device = p2pmem::fake::Fake::example().device();
/// let error = device.alloc(&Request::new(1 << 50)).unwrap_err();
/// match error.kind() {
///     ErrorKind::NoSpace | ErrorKind::QuotaExceeded => println!("later, perhaps: {error}"),
///     ErrorKind::NoProvider => println!("never on this machine: {error}"),
///     _ => println!("{error}"),
/// }
/// # assert_eq!(error.kind(), ErrorKind::NoProvider);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The module is not loaded, or was unloaded.
    ModuleMissing,
    /// A backend has no memory that this program can use.
    BackendUnavailable,
    /// Module or libraries do not fit this program's version.
    Incompatible,
    /// The user does not have the permission: EACCES or EPERM.
    PermissionDenied,
    /// A rule denies the memory: EACCES of an allocation.
    DeniedByRule,
    /// The arguments are invalid: EINVAL or E2BIG.
    InvalidRequest,
    /// A device, a provider, a file or a rule does not exist.
    NotFound,
    /// A published device, a rule or a file exists already.
    AlreadyExists,
    /// Another driver or program uses the device: EBUSY.
    Busy,
    /// No provider can ever serve the request, even if all buffers are freed: ENODEV of an allocation.
    NoProvider,
    /// Not enough memory is free: ENOSPC.
    NoSpace,
    /// A quota is exceeded: EDQUOT.
    QuotaExceeded,
    /// The NIC or the kernel has no memory or no descriptors left: ENOMEM, EMFILE or ENFILE.
    OutOfResources,
    /// The provider was removed, and its buffers were revoked: ENODEV.
    Removed,
    /// A device cannot reach the provider's memory: EHOSTUNREACH or EREMOTEIO.
    Unreachable,
    /// Kernel, driver, drive or library does not support the operation: EOPNOTSUPP or ENOSYS.
    Unsupported,
    /// Reading or writing a file failed.
    Io,
    /// A step of an RDMA transfer failed.
    Transfer,
    /// Any other error; [`Error::errno`] has its errno, if any.
    Other,
}

/// Returns whether a path names the module's device: its last component is `p2pmem`. A missing file of another name, such
/// as a file of rules, does not show that the module is missing.
fn is_module_device(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "p2pmem")
}

impl Error {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        use ErrorKind as Kind;
        let allocation = matches!(
            self,
            Self::NoSpace { .. }
                | Self::Refused {
                    operation: Operation::Alloc | Operation::Explain | Operation::Stripe,
                    ..
                }
        );
        match (self, self.errno()) {
            (Self::Abi { .. }, _) => Kind::Incompatible,
            (Self::NotSupported { .. }, _) => Kind::Unsupported,
            (Self::Unavailable { .. }, _) => Kind::BackendUnavailable,
            (Self::NoBackend { module, .. }, _) => module.kind(),
            (
                Self::Client { .. }
                | Self::Request(_)
                | Self::DmaBuf { .. }
                | Self::OutOfBounds { .. }
                | Self::NotDirect,
                _,
            ) => Kind::InvalidRequest,
            (Self::Missing(_), _) => Kind::NotFound,
            (Self::Exists(_), _) => Kind::AlreadyExists,
            (Self::Bound { .. }, _) => Kind::Busy,
            (Self::Verbs(_), _) => Kind::Unsupported,
            (Self::Transfer { .. } | Self::Rdma { .. } | Self::Deregister { .. }, _) => Kind::Transfer,
            (Self::ShortWrite { .. }, _) => Kind::Io,
            (Self::Open { path, .. }, Some(libc::ENOENT | libc::ENXIO | libc::ENODEV)) => {
                if is_module_device(path) {
                    Kind::ModuleMissing
                } else {
                    Kind::NotFound
                }
            }
            (_, Some(libc::ENODEV)) if allocation => Kind::NoProvider,
            (_, Some(libc::EACCES)) if allocation => Kind::DeniedByRule,
            (Self::Io { .. }, Some(libc::EREMOTEIO)) => Kind::Unsupported,
            (_, Some(libc::EACCES | libc::EPERM)) => Kind::PermissionDenied,
            (_, Some(libc::EINVAL | libc::E2BIG)) => Kind::InvalidRequest,
            (_, Some(libc::ENOENT)) => Kind::NotFound,
            (_, Some(libc::EEXIST)) => Kind::AlreadyExists,
            (_, Some(libc::EBUSY)) => Kind::Busy,
            (_, Some(libc::ENOSPC)) => Kind::NoSpace,
            (_, Some(libc::EDQUOT)) => Kind::QuotaExceeded,
            (_, Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE)) => Kind::OutOfResources,
            (_, Some(libc::ENODEV)) => Kind::Removed,
            (_, Some(libc::EHOSTUNREACH | libc::EREMOTEIO)) => Kind::Unreachable,
            (_, Some(libc::EOPNOTSUPP | libc::ENOSYS | ENOTSUPP)) => Kind::Unsupported,
            (_, Some(libc::ENOTTY)) => Kind::Incompatible,
            (Self::Io { .. }, _) => Kind::Io,
            _ => Kind::Other,
        }
    }

    /// Returns the errno, positive, if the error has one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Open { error, .. } | Self::Io { error, .. } | Self::Admin { error, .. } => error.raw_os_error(),
            Self::Refused { errno, .. } | Self::NoSpace { errno, .. } | Self::Register { errno, .. } => Some(*errno),
            Self::NoBackend { module, .. } => module.errno(),
            _ => None,
        }
    }

    /// Returns an errno, positive, for interfaces that need one: that of the error, or the one that says best what failed.
    ///
    /// ```
    /// let error = p2pmem::Client::resolve("no-such-device").unwrap_err();
    /// assert_eq!((error.errno(), error.errno_or_nearest()), (None, 19));
    /// ```
    pub fn errno_or_nearest(&self) -> i32 {
        self.errno().unwrap_or(match self {
            Self::Client { .. } | Self::Unavailable { .. } => libc::ENODEV,
            Self::Verbs(_) => libc::ENOSYS,
            Self::NotSupported { .. } => libc::EOPNOTSUPP,
            Self::Abi { .. } => libc::EPROTO,
            Self::Request(_) | Self::DmaBuf { .. } | Self::OutOfBounds { .. } | Self::NotDirect => libc::EINVAL,
            Self::Missing(_) => libc::ENOENT,
            Self::Exists(_) => libc::EEXIST,
            Self::Bound { .. } => libc::EBUSY,
            _ => libc::EIO,
        })
    }

    /// Returns the module's message, if any.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Refused { reason, .. } | Self::NoSpace { reason, .. } | Self::Register { reason, .. } => {
                reason.as_deref()
            }
            Self::Admin { status, .. } => status.as_deref(),
            _ => None,
        }
    }

    /// Returns what to do about the error, if known.
    pub fn remedy(&self) -> Option<&'static str> {
        let errno = self.errno();
        match self {
            Self::NotSupported { backend, capability } => not_supported_remedy(*backend, *capability),
            Self::Unavailable { remedy, .. } | Self::DmaBuf { remedy, .. } => Some(remedy),
            Self::NoBackend { .. } => Some(
                "load the module: modprobe p2pmem; `p2pmemctl scan` shows what each other source of memory needs",
            ),
            Self::Open { path, .. } if path.starts_with("/dev/vfio") || path == Path::new("/dev/iommu") => vfio_remedy(errno),
            Self::Open { path, .. } if path.ends_with("p2pmem/allocate") => sysfs_remedy(errno),
            Self::Open { path, .. } if !is_module_device(path) => None,
            Self::Open { .. } => match errno {
                Some(libc::ENOENT) => Some("load the module: modprobe p2pmem"),
                Some(libc::EACCES | libc::EPERM) => {
                    Some("run as root, or join the group of the device (usermod -aG p2pmem USER) and log in again")
                }
                Some(libc::ENXIO | libc::ENODEV) => Some("the module was unloaded: modprobe p2pmem"),
                _ => None,
            },
            Self::Abi { .. } => Some("install the module and the user space of one version of p2pmem"),
            Self::NoSpace { .. }
            | Self::Refused {
                operation: Operation::Alloc | Operation::Explain | Operation::Stripe,
                ..
            } => match errno {
                Some(libc::ENODEV) => {
                    Some("a provider must be large enough, and all clients must reach it: see `p2pmemctl list` and `p2pmemctl topo` \
                          or, without the module, `p2pmemctl scan`")
                }
                Some(libc::EDQUOT) => Some("free some of your buffers, or ask the administrator to raise the quota of the named rule"),
                Some(libc::EACCES) => Some("ask the administrator about the named rule: `p2pmemctl rules list` shows the rule"),
                Some(libc::ENOSPC) => Some("free buffers, or request less: see `p2pmemctl list` or, without the module, `p2pmemctl scan`"),
                Some(libc::E2BIG) => Some("name fewer clients in one request"),
                _ => None,
            },
            Self::Refused {
                operation: Operation::Import,
                ..
            } => match errno {
                Some(libc::ENODEV) => Some("the provider was removed: allocate and share again in the other process"),
                Some(libc::EINVAL | libc::EXDEV) => Some("pass the descriptor that Buffer::share() returned"),
                Some(libc::EACCES) => Some("share the whole buffer in the other process"),
                Some(libc::ENOTTY) => Some("the module is older than this program: load the module of the program's version"),
                _ => None,
            },
            Self::Refused {
                operation: Operation::Attach,
                ..
            } => match errno {
                Some(libc::EPERM) => Some(
                    "run as root, or ask the administrator to write your group to the provider's attribute attach_gid",
                ),
                Some(libc::EBUSY) => Some(
                    "stop the device's DMA, then drop the revoked attachments, or confirm with AttachOptions::quiesced",
                ),
                Some(libc::EOPNOTSUPP) => Some(
                    "attach a function that is bound to the p2pmem driver to a dma-buf whose exporter permits peer-to-peer DMA",
                ),
                Some(libc::ENODEV) => Some("the exporter took the memory back, or the provider was removed: begin again"),
                Some(libc::ENOTTY) => Some("the module is older than this program: load the module of the program's version"),
                _ => None,
            },
            Self::Refused {
                operation: Operation::Map | Operation::Access,
                ..
            } => match errno {
                Some(libc::ENODEV) => Some("the provider was removed: allocate again"),
                _ => None,
            },
            Self::Refused {
                operation: Operation::Export,
                ..
            } => match errno {
                Some(libc::ENODEV) => Some("the provider was removed: allocate again"),
                Some(libc::EPERM) => Some(
                    "ask the administrator to write 1 to the provider's attribute pinned_exports, or export without pinning",
                ),
                Some(libc::EOPNOTSUPP) => Some(
                    "with the module, publish memory of a device that is bound to p2pmem, and allocate from it (see `p2pmemctl \
                     list`); with the backend vfio, export one range, not pinned",
                ),
                Some(libc::EMFILE) => Some("close files, or raise the limit (ulimit -n)"),
                _ => None,
            },
            Self::Register { method, .. } => register_remedy(*method, errno),
            Self::Transfer { status, .. } => transfer_remedy(*status),
            Self::Verbs(_) => Some("install the RDMA libraries (Debian: apt-get install libibverbs1 ibverbs-providers)"),
            Self::Refused {
                errno: libc::ENOTTY, ..
            } => Some("the module is older or newer than this program"),
            Self::Client { .. } => Some(
                "name a PCI address (0000:03:00.0), an RDMA device (mlx5_0), an NVMe drive (nvme0) or a path in /sys",
            ),
            Self::NotDirect => Some("open the file with p2pmem::DirectOptions or open_direct()"),
            Self::Io { .. } => match errno {
                Some(libc::EINVAL) => {
                    Some("use whole blocks of the drive for offset and length, and a file system that supports O_DIRECT")
                }
                Some(libc::EREMOTEIO) => Some(
                    "the file's device does not accept peer-to-peer memory: use an NVMe drive with a file system",
                ),
                Some(libc::EFAULT) => Some("the buffer was revoked, or the file's driver does not accept device memory"),
                Some(libc::EIO) => Some("see dmesg: the drive could not reach the provider's memory"),
                _ => None,
            },
            Self::Admin { path, .. } => match errno {
                Some(libc::EACCES | libc::EPERM) => Some("run as root"),
                Some(libc::ENOENT) if path.components().any(|c| c.as_os_str() == "config") => Some(
                    "load the module and mount configfs: modprobe p2pmem; mount -t configfs none /sys/kernel/config",
                ),
                Some(libc::ENOENT) => Some("load the module: modprobe p2pmem"),
                _ => None,
            },
            Self::Bound { .. } => Some("publish with --force to take the device from its driver"),
            _ => None,
        }
    }
}

/// Returns what to do if a backend does not support an operation.
fn not_supported_remedy(backend: Backend, capability: Capability) -> Option<&'static str> {
    match (backend, capability) {
        (Backend::Module, _) => None,
        (Backend::Driver, Capability::DmaBuf) => None,
        (Backend::Driver, _) => Some("allocate with the driver's own interface, and pass its dma-buf to DmaBuf::from_fd()"),
        (Backend::Sysfs, Capability::DmaBuf) => Some(
            "load the module (modprobe p2pmem), which exports the memory of known BARs; or use a device that is bound to \
             vfio-pci: DeviceOptions::needs(Capability::DmaBuf)",
        ),
        (Backend::Vfio, Capability::DirectIo) => Some(
            "load the module (modprobe p2pmem) and publish the device; or use memory that a driver published: \
             DeviceOptions::needs(Capability::DirectIo)",
        ),
        (_, Capability::Sharing) => Some(
            "load the module: modprobe p2pmem; a process that only registers the memory with a NIC can use DmaBuf::from_fd()",
        ),
        _ => Some("load the module: modprobe p2pmem"),
    }
}

/// Returns what to do if a device node of VFIO cannot be opened.
fn vfio_remedy(errno: Option<i32>) -> Option<&'static str> {
    match errno? {
        libc::EACCES | libc::EPERM => Some("run as root, or give your user access to the device node: chown"),
        libc::EBUSY => Some("another program, such as a virtual machine, or another `Device` of this program has opened the device: end that \
             program, or drop that `Device`"),
        libc::ENOENT | libc::ENODEV | libc::ENXIO => Some("load VFIO, and bind the device to it: modprobe vfio-pci"),
        _ => None,
    }
}

/// Returns what to do if the file of memory that a driver published cannot be used.
fn sysfs_remedy(errno: Option<i32>) -> Option<&'static str> {
    match errno? {
        libc::EACCES | libc::EPERM => Some("run as root, or give your user access to the file: chown"),
        libc::ENOENT | libc::ENODEV | libc::ENXIO => Some("the device's driver was unbound: bind the driver again"),
        _ => None,
    }
}

/// Returns the errors as one text.
fn list(errors: &[Error]) -> String {
    let all: Vec<_> = errors.iter().map(Error::to_string).collect();
    all.join("; ")
}

/// Returns the text of each full provider, after a semicolon.
fn full_text(full: &[FullProvider]) -> String {
    full.iter()
        .fold(String::new(), |text, provider| text + "; " + &provider.to_string())
}

/// Returns what to do if memory could not be registered.
fn register_remedy(method: RegistrationMethod, errno: Option<i32>) -> Option<&'static str> {
    match (method, errno?) {
        (_, libc::ENODEV) => Some("the provider or the NIC was removed: allocate again, or open the NIC again"),
        (_, libc::ENOMEM) => Some("the NIC or the kernel is out of memory: deregister other memory, or register less"),
        (_, libc::EINVAL) => Some(
            "check the requested access: remote writes and atomics need local writes too, and on-demand paging is not \
             possible",
        ),
        (RegistrationMethod::DmaBuf, libc::ENOSYS) => Some("libibverbs does not support dma-bufs: install rdma-core 34 or later"),
        (RegistrationMethod::DmaBuf, libc::EOPNOTSUPP | ENOTSUPP) => Some(
            "the NIC's driver cannot register dma-bufs, or not revocable ones: use an mlx5 NIC with on-demand paging or \
             an irdma NIC, or register pinned if the administrator allows it (`p2pmemctl doctor` has the details)",
        ),
        (RegistrationMethod::DmaBuf, libc::EHOSTUNREACH | libc::EREMOTEIO) => {
            Some("the NIC cannot reach the provider: allocate near it, and see `p2pmemctl topo`")
        }
        (RegistrationMethod::PeerMemory, libc::EFAULT | libc::EREMOTEIO | libc::EOPNOTSUPP | ENOTSUPP) => Some(
            "this kernel's RDMA core does not accept device memory by its addresses: register by dma-buf, the default",
        ),
        _ => None,
    }
}

/// Describes an `enum ibv_wc_status`, of those that requests of a reliable connection complete with.
fn status_text(status: u32) -> &'static str {
    match status {
        1 => "a local length error",
        2 => "a local error of the queue pair",
        4 => "a local protection error",
        5 => "a flush, because the queue pair had failed before",
        8 => "a local access error",
        9 => "an invalid request, reported by the other side",
        10 => "a remote access error",
        11 => "a remote operation error",
        12 => "no answer after all retries",
        13 => "the other side not being ready after all retries",
        _ => "an error",
    }
}

/// Returns what to do if a work request completed with an error.
fn transfer_remedy(status: u32) -> Option<&'static str> {
    match status {
        4 => Some("the local registration does not permit the access, or its provider was removed"),
        10 => Some(
            "the remote registration does not cover or permit the access, or its provider was removed: register there \
             again",
        ),
        12 => Some("the other side stopped, or the link between the NICs is down"),
        _ => None,
    }
}

/// Returns the kernel's text for an error, without Rust's "(os error N)".
fn os_text(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(errno) => errno_text(errno),
        None => error.to_string(),
    }
}

/// An errno that is internal to the kernel (`include/linux/errno.h`). Some RDMA drivers return it to programs.
pub(crate) const ENOTSUPP: i32 = 524;

/// Returns the text of `strerror()` and the errno's name, if the ABI uses the errno.
pub(crate) fn errno_text(errno: i32) -> String {
    if errno == ENOTSUPP {
        return "Operation not supported by the driver (ENOTSUPP, 524)".into();
    }
    let text = io::Error::from_raw_os_error(errno).to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    let name = match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::E2BIG => "E2BIG",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::EEXIST => "EEXIST",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::ENOTTY => "ENOTTY",
        libc::ENOSPC => "ENOSPC",
        libc::EDQUOT => "EDQUOT",
        libc::ERANGE => "ERANGE",
        libc::ENODATA => "ENODATA",
        libc::EOVERFLOW => "EOVERFLOW",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EREMOTEIO => "EREMOTEIO",
        libc::EHOSTUNREACH => "EHOSTUNREACH",
        libc::ENOSYS => "ENOSYS",
        libc::EMFILE => "EMFILE",
        libc::EXDEV => "EXDEV",
        _ => return format!("{text} (errno {errno})"),
    };
    format!("{text} ({name})")
}

#[cfg(test)]
mod tests;
