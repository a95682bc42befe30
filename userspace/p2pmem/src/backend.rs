// SPDX-License-Identifier: MIT OR Apache-2.0

//! Backends: the interfaces that provide a device's memory, and the capabilities of each.

use std::fmt;

/// An interface that provides a device's memory. The order of the variants is the order in which the library prefers
/// them.
///
/// ```
/// use p2pmem::{Backend, Capability};
///
/// assert!(Backend::Vfio.supports(Capability::DmaBuf));
/// assert!(!Backend::Vfio.supports(Capability::DirectIo));
/// assert_eq!(Backend::Module.missing().count(), 0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Backend {
    /// The p2pmem module, by `/dev/p2pmem`.
    Module,
    /// The kernel's sysfs file `p2pmem/allocate`: `mmap()` of memory that the device's driver published. Needs Linux
    /// 6.2.
    Sysfs,
    /// The dma-buf export of vfio-pci. Needs Linux 6.19 and an IOMMU.
    Vfio,
    /// The interfaces of the driver that owns the memory, such as a GPU driver. A program calls the driver and passes
    /// the dma-buf to [`DmaBuf::from_fd`](crate::DmaBuf::from_fd).
    Driver,
}

/// An operation or a guarantee that not every backend has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Capability {
    /// Buffers can be mapped into the program.
    Mapping,
    /// Direct I/O (O_DIRECT) between files and a mapping.
    DirectIo,
    /// Buffers can be exported as dma-bufs, and so be registered with NICs.
    DmaBuf,
    /// Rules of the administrator and of the program limit which memory a program uses.
    Rules,
    /// Quotas limit how many bytes a user holds.
    Quotas,
    /// The removal of a provider does not wait for programs. It revokes mappings, dma-bufs and registrations, and each
    /// program gets an event.
    Revoke,
    /// Strategies other than nearest, and stripes. For memory whose offset in the BAR is unknown, also alignments of
    /// more than a page.
    Placement,
    /// A buffer can be passed to another process, which can map it.
    Sharing,
    /// Memory is cleared before it gets a new owner.
    Clearing,
    /// Attaching a provider's function to a dma-buf: [`Device::attach`](crate::Device::attach).
    Attach,
}

impl Capability {
    /// All capabilities.
    pub const ALL: [Self; 10] = [
        Self::Mapping,
        Self::DirectIo,
        Self::DmaBuf,
        Self::Rules,
        Self::Quotas,
        Self::Revoke,
        Self::Placement,
        Self::Sharing,
        Self::Clearing,
        Self::Attach,
    ];

    /// Returns the capability as part of a message.
    pub fn description(self) -> &'static str {
        match self {
            Self::Mapping => "mappings",
            Self::DirectIo => "direct I/O (O_DIRECT)",
            Self::DmaBuf => "dma-bufs, and so registration with a NIC",
            Self::Rules => "rules",
            Self::Quotas => "quotas",
            Self::Revoke => "revocation and its events",
            Self::Placement => "this strategy or alignment",
            Self::Sharing => "buffers of other processes",
            Self::Clearing => "memory that is cleared for its new owner",
            Self::Attach => "attaching a device to a dma-buf",
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Mapping => "mapping",
            Self::DirectIo => "direct-io",
            Self::DmaBuf => "dma-buf",
            Self::Rules => "rules",
            Self::Quotas => "quotas",
            Self::Revoke => "revoke",
            Self::Placement => "placement",
            Self::Sharing => "sharing",
            Self::Clearing => "clearing",
            Self::Attach => "attach",
        })
    }
}

impl Backend {
    /// The backends of [`Device`](crate::Device), in the order in which [`Device::open`](crate::Device::open) tries
    /// them.
    pub const OF_DEVICES: [Self; 3] = [Self::Module, Self::Sysfs, Self::Vfio];

    /// Returns the capabilities of the backend.
    pub fn capabilities(self) -> &'static [Capability] {
        match self {
            Self::Module => &Capability::ALL,
            Self::Sysfs => &[Capability::Mapping, Capability::DirectIo],
            Self::Vfio => &[Capability::Mapping, Capability::DmaBuf],
            Self::Driver => &[Capability::DmaBuf],
        }
    }

    /// Returns whether the backend has a capability.
    pub fn supports(self, capability: Capability) -> bool {
        self.capabilities().contains(&capability)
    }

    /// Returns the capabilities that the backend does not have.
    pub fn missing(self) -> impl Iterator<Item = Capability> {
        Capability::ALL
            .into_iter()
            .filter(move |capability| !self.supports(*capability))
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Module => "module",
            Self::Sysfs => "sysfs",
            Self::Vfio => "vfio",
            Self::Driver => "driver",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_equal_json_names() {
        for backend in [Backend::Module, Backend::Sysfs, Backend::Vfio, Backend::Driver] {
            let json = serde_json::to_string(&backend).unwrap();
            assert_eq!(json, format!("\"{backend}\""));
            let all = backend.capabilities().len() + backend.missing().count();
            assert_eq!(all, Capability::ALL.len(), "{backend}");
        }
        for capability in Capability::ALL {
            assert_eq!(serde_json::to_string(&capability).unwrap(), format!("\"{capability}\""));
            assert!(!capability.description().is_empty());
        }
    }
}
