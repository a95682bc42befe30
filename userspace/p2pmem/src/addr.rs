// SPDX-License-Identifier: MIT OR Apache-2.0

//! Addresses of PCI functions.

use std::fmt;

use p2pmem_sys as abi;

/// The address of a PCI function: `domain:bus:device.function`.
///
/// ```
/// use p2pmem::PciAddr;
///
/// let addr: PciAddr = "03:00.1".parse()?;
/// assert_eq!(addr.to_string(), "0000:03:00.1");
/// assert_eq!((addr.domain, addr.bus, addr.device(), addr.function()), (0, 3, 0, 1));
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct PciAddr {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number << 3 | function number.
    pub devfn: u8,
}

impl PciAddr {
    /// Returns the device number, 0 to 31.
    pub fn device(&self) -> u8 {
        self.devfn >> 3
    }

    /// Returns the function number, 0 to 7.
    pub fn function(&self) -> u8 {
        self.devfn & 7
    }

    /// Parses `dddd:bb:dd.f` or `bb:dd.f`, all hexadecimal. The domain has 4 to 8 digits. Returns `None` for any other
    /// text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        abi::p2pmem_pci_addr::parse(text).map(Self::from)
    }
}

impl fmt::Display for PciAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!(
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain,
            self.bus,
            self.device(),
            self.function()
        ))
    }
}

impl serde::Serialize for PciAddr {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl From<abi::p2pmem_pci_addr> for PciAddr {
    fn from(addr: abi::p2pmem_pci_addr) -> Self {
        Self {
            domain: addr.domain,
            bus: addr.bus,
            devfn: addr.devfn,
        }
    }
}

impl From<PciAddr> for abi::p2pmem_pci_addr {
    fn from(addr: PciAddr) -> Self {
        Self {
            domain: addr.domain,
            bus: addr.bus,
            devfn: addr.devfn,
            reserved: 0,
        }
    }
}
