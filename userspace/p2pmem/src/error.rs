// SPDX-License-Identifier: MIT OR Apache-2.0

//! What can go wrong, why, and what to do about it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::addr::PciAddr;
use crate::full::FullProvider;
use crate::types::RegistrationMethod;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The operation that the module refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Operation {
    /// Asking what the module is.
    Info,
    /// Listing providers.
    List,
    /// Asking for paths.
    Paths,
    /// Allocating a buffer.
    Alloc,
    /// Freeing a buffer.
    Free,
    /// Asking about a buffer.
    Buffer,
    /// Asking for an explanation.
    Explain,
    /// Asking for counters.
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
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Info => "the question what the module is",
            Self::List => "the list of providers",
            Self::Paths => "the question for paths",
            Self::Alloc => "the allocation",
            Self::Free => "freeing the buffer",
            Self::Buffer => "the question about the buffer",
            Self::Explain => "the explanation",
            Self::Stats => "the question for counters",
            Self::Map => "mapping the buffer",
            Self::Export => "exporting the buffer",
            Self::Events => "reading events",
            Self::Rules => "setting rules",
            Self::Import => "importing the buffer",
            Self::Stripe => "allocating the stripe",
            Self::Access => "accessing the buffer",
        })
    }
}

/// An error of this crate.
///
/// Its text says what failed and why, the kernel's error included; so `source()` is `None`, and `{:#}` of anyhow prints no
/// text twice. [`Error::remedy`] says what to do, where that is known. Programs match on [`Error::kind`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device could not be opened.
    #[error("cannot open {}: {}", path.display(), os_text(error))]
    Open {
        /// The path tried.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },

    /// Module and library are of different versions of the ABI.
    #[error("the module speaks version {module} of the ABI, this program version {program}")]
    Abi {
        /// The module's version.
        module: u32,
        /// This library's version.
        program: u32,
    },

    /// The module refused an operation.
    #[error("{operation} was refused: {}{}", errno_text(*errno), reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    Refused {
        /// What was refused.
        operation: Operation,
        /// The errno, positive.
        errno: i32,
        /// The module's message, if there is one.
        reason: Option<String>,
    },

    /// An allocation for which the suitable providers have not enough free space.
    #[error("{} was refused: {}{}{}", Operation::Alloc, errno_text(*errno), reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default(), full_text(full))]
    NoSpace {
        /// The errno, positive: ENOSPC if there would be enough space after other buffers are freed, ENODEV if there never is.
        errno: i32,
        /// The module's message, if there is one.
        reason: Option<String>,
        /// These providers: their sizes, and who uses them.
        full: Vec<FullProvider>,
    },

    /// A string that names no client.
    #[error("{name:?} names no PCI device: {why}")]
    Client {
        /// The string.
        name: String,
        /// What was tried and found.
        why: String,
    },

    /// A request that no module could serve.
    #[error("bad request: {0}")]
    Request(String),

    /// An access outside a mapping.
    #[error("{len} bytes at offset {offset} are not inside the mapping of {size} bytes")]
    OutOfBounds {
        /// First byte of the access.
        offset: usize,
        /// Its length in bytes.
        len: usize,
        /// The mapping's length in bytes.
        size: usize,
    },

    /// A file for peer-to-peer I/O that is not open for direct I/O.
    #[error("the file is not open with O_DIRECT, so its data would go through host memory")]
    NotDirect,

    /// Direct I/O failed.
    #[error("{what} at byte {offset} of the file failed: {}", os_text(error))]
    Io {
        /// "reading" or "writing".
        what: &'static str,
        /// Offset in the file, in bytes.
        offset: u64,
        /// What the kernel said.
        error: io::Error,
    },

    /// Writing stopped before the end: the file's device takes no more.
    #[error("only {written} of {len} bytes were written")]
    ShortWrite {
        /// Bytes written.
        written: usize,
        /// Bytes there were.
        len: usize,
    },

    /// Memory could not be registered with a NIC.
    #[error("registering {what} with {nic} by {method} failed: {}{}", errno_text(*errno), reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    Register {
        /// The memory: how much of which buffer in which provider.
        what: String,
        /// The NIC's name.
        nic: String,
        /// The method tried.
        method: RegistrationMethod,
        /// The errno, positive.
        errno: i32,
        /// The module's message, if the module refused.
        reason: Option<String>,
    },

    /// A registration could not be ended.
    #[error("ending a registration with {nic} failed: {why}")]
    Deregister {
        /// The NIC's name.
        nic: String,
        /// What libibverbs said.
        why: String,
    },

    /// A step before a transfer failed.
    #[error("{what} failed: {why}")]
    Rdma {
        /// What was tried.
        what: String,
        /// Why it failed.
        why: String,
    },

    /// A work request ended with an error.
    #[error("{verb} through {nic} ended with {} (status {status})", status_text(*status))]
    Transfer {
        /// The operation.
        verb: String,
        /// The NIC's name.
        nic: String,
        /// `enum ibv_wc_status`.
        status: u32,
    },

    /// libibverbs cannot be used.
    #[error("libibverbs cannot be loaded: {0}")]
    Verbs(String),

    /// A file of sysfs or configfs could not be read or written.
    #[error("cannot {action} {}: {}{}", path.display(), os_text(error), status.as_deref().map(|s| format!(": {s}")).unwrap_or_default())]
    Admin {
        /// What was tried, such as `write "1" to`.
        action: String,
        /// The file or folder.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
        /// The message in the provider's attribute `status`, if there is one.
        status: Option<String>,
    },

    /// A device that another driver has.
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

    /// The machine is in no state for the operation.
    #[error("{0}")]
    State(String),
}

/// What kind an error is, for programs that act on it: [`Error::kind`].
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
    /// Module or libraries are older or newer than this program.
    Incompatible,
    /// The user may not do this: EACCES or EPERM.
    PermissionDenied,
    /// A rule denies the memory: EACCES of an allocation.
    DeniedByRule,
    /// The arguments are wrong.
    InvalidRequest,
    /// A device, a provider, a file or a rule does not exist.
    NotFound,
    /// A published device, a rule or a file exists already.
    AlreadyExists,
    /// Another driver or program has the device.
    Busy,
    /// No provider can serve the request, however much is freed: ENODEV of an allocation.
    NoProvider,
    /// Too little is free: ENOSPC.
    NoSpace,
    /// A quota is used up: EDQUOT.
    QuotaExceeded,
    /// The NIC or the kernel has no memory or descriptors left: ENOMEM, EMFILE or ENFILE.
    OutOfResources,
    /// The provider was removed, and its buffers with it: ENODEV.
    Removed,
    /// A device cannot reach the provider's memory.
    Unreachable,
    /// Kernel, driver, drive or library cannot do this.
    Unsupported,
    /// Reading or writing a file failed.
    Io,
    /// A step of an RDMA transfer failed.
    Transfer,
    /// Anything else; [`Error::errno`] may say more.
    Other,
}

impl Error {
    /// What kind of error this is.
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
            (Self::Client { .. } | Self::Request(_) | Self::OutOfBounds { .. } | Self::NotDirect, _) => {
                Kind::InvalidRequest
            }
            (Self::Missing(_), _) => Kind::NotFound,
            (Self::Exists(_), _) => Kind::AlreadyExists,
            (Self::Bound { .. }, _) => Kind::Busy,
            (Self::Verbs(_), _) => Kind::Unsupported,
            (Self::Transfer { .. } | Self::Rdma { .. } | Self::Deregister { .. }, _) => Kind::Transfer,
            (Self::ShortWrite { .. }, _) => Kind::Io,
            (Self::Open { path, .. }, Some(libc::ENOENT | libc::ENXIO | libc::ENODEV)) => {
                if path.starts_with("/dev/p2pmem") {
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

    /// The errno behind the error, positive, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Open { error, .. } | Self::Io { error, .. } | Self::Admin { error, .. } => error.raw_os_error(),
            Self::Refused { errno, .. } | Self::NoSpace { errno, .. } | Self::Register { errno, .. } => Some(*errno),
            _ => None,
        }
    }

    /// The module's message, if there is one.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Refused { reason, .. } | Self::NoSpace { reason, .. } | Self::Register { reason, .. } => {
                reason.as_deref()
            }
            Self::Admin { status, .. } => status.as_deref(),
            _ => None,
        }
    }

    /// What to do about it, where that is known.
    pub fn remedy(&self) -> Option<&'static str> {
        let errno = self.errno();
        match self {
            Self::Open { path, .. } if !path.starts_with("/dev/p2pmem") => None,
            Self::Open { .. } => match errno {
                Some(libc::ENOENT) => Some("load the module: modprobe p2pmem"),
                Some(libc::EACCES | libc::EPERM) => {
                    Some("run as root, or give your group access to the device by a udev rule")
                }
                Some(libc::ENXIO | libc::ENODEV) => Some("the module was unloaded: modprobe p2pmem"),
                _ => None,
            },
            Self::Abi { .. } => Some("install module and user space of one version of p2pmem"),
            Self::NoSpace { .. }
            | Self::Refused {
                operation: Operation::Alloc | Operation::Explain | Operation::Stripe,
                ..
            } => match errno {
                Some(libc::ENODEV) => {
                    Some("see `p2pmemctl list` and `p2pmemctl topo`: a provider must be large enough, and in reach of all clients")
                }
                Some(libc::EDQUOT) => Some("free buffers of yours, or have the administrator raise the quota of the rule that is named"),
                Some(libc::EACCES) => Some("ask the administrator about the rule that is named: `p2pmemctl rules list` shows it"),
                Some(libc::ENOSPC) => Some("see `p2pmemctl list`: free buffers, or ask for less"),
                Some(libc::E2BIG) => Some("name fewer clients in one request"),
                _ => None,
            },
            Self::Refused {
                operation: Operation::Import,
                ..
            } => match errno {
                Some(libc::ENODEV) => Some("the provider was removed: have the other side allocate and share again"),
                Some(libc::EINVAL | libc::EXDEV) => Some("pass on the descriptor that Buffer::share() made"),
                Some(libc::EACCES) => Some("have the other side share the whole buffer"),
                Some(libc::ENOTTY) => Some("the module is older than this program: load the one of its version"),
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
                    "have the administrator write 1 to the provider's attribute pinned_exports, or export without pinning",
                ),
                Some(libc::EOPNOTSUPP) => Some(
                    "publish memory of a device that is bound to p2pmem, and allocate from it (see `p2pmemctl list`)",
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
                    Some("O_DIRECT wants offset and length in whole blocks of the drive, and the file system's consent")
                }
                Some(libc::EREMOTEIO) => Some(
                    "the file's device does not take peer-to-peer memory: use an NVMe drive with a file system on it",
                ),
                Some(libc::EFAULT) => Some("the buffer was revoked, or the file's driver cannot take device memory"),
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

/// Each full provider, after a semicolon.
fn full_text(full: &[FullProvider]) -> String {
    full.iter()
        .fold(String::new(), |text, capacity| text + "; " + &capacity.to_string())
}

/// What to do where memory could not be registered.
fn register_remedy(method: RegistrationMethod, errno: Option<i32>) -> Option<&'static str> {
    match (method, errno?) {
        (_, libc::ENODEV) => Some("the provider or the NIC was removed: allocate again, or open the NIC again"),
        (_, libc::ENOMEM) => Some("the NIC or the kernel has no space for it: end other registrations, or register less"),
        (_, libc::EINVAL) => Some(
            "check the requested access: remote writes and atomics need local writes too, and on-demand paging is not \
             possible",
        ),
        (RegistrationMethod::DmaBuf, libc::ENOSYS) => Some("libibverbs is too old for dma-bufs: install rdma-core 34 or later"),
        (RegistrationMethod::DmaBuf, libc::EOPNOTSUPP | ENOTSUPP) => Some(
            "the NIC's driver cannot register dma-bufs, or none that can be taken back: use an mlx5 NIC with on-demand \
             paging or an irdma one, or register pinned where the administrator allows it (`p2pmemctl doctor` says more)",
        ),
        (RegistrationMethod::DmaBuf, libc::EHOSTUNREACH | libc::EREMOTEIO) => {
            Some("the NIC cannot reach the provider: allocate near it, and see `p2pmemctl topo`")
        }
        (RegistrationMethod::PeerMemory, libc::EFAULT | libc::EREMOTEIO | libc::EOPNOTSUPP | ENOTSUPP) => Some(
            "this kernel's RDMA core takes no device memory by its addresses: register by dma-buf, the default",
        ),
        _ => None,
    }
}

/// `enum ibv_wc_status` in words, of those that a reliable connection's requests end with.
fn status_text(status: u32) -> &'static str {
    match status {
        1 => "a local length error",
        2 => "a local error of the queue pair",
        4 => "a local protection error",
        5 => "a flush, as the queue pair had failed before",
        8 => "a local access error",
        9 => "an invalid request, as the other side says",
        10 => "a remote access error",
        11 => "a remote operation error",
        12 => "no answer after all retries",
        13 => "the other side not being ready after all retries",
        _ => "an error",
    }
}

/// What to do where a work request ended with an error.
fn transfer_remedy(status: u32) -> Option<&'static str> {
    match status {
        4 => Some("this side's registration does not allow it, or its provider left"),
        10 => Some(
            "the other side's registration does not cover it or allow it, or its provider left: register there again",
        ),
        12 => Some("the other side is gone, or the link between the NICs is down"),
        _ => None,
    }
}

/// The kernel's text for an error, without Rust's "(os error N)".
fn os_text(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(errno) => errno_text(errno),
        None => error.to_string(),
    }
}

/// An errno that is internal to the kernel (`include/linux/errno.h`). Some RDMA drivers return it to programs.
pub(crate) const ENOTSUPP: i32 = 524;

/// `strerror()` and the errno's name, for the errnos that the ABI names.
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
