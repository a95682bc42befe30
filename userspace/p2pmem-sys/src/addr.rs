// SPDX-License-Identifier: MIT OR Apache-2.0

//! PCI addresses as text.

use core::ops::RangeInclusive;

use crate::p2pmem_pci_addr;

impl p2pmem_pci_addr {
    /// Parses `dddd:bb:dd.f` or `bb:dd.f`, all hexadecimal. The domain has 4 to 8 digits. Returns `None` for any other
    /// text.
    ///
    /// ```
    /// use p2pmem_sys::p2pmem_pci_addr;
    ///
    /// let addr = p2pmem_pci_addr::parse("0000:03:1f.7").unwrap();
    /// assert_eq!((addr.domain, addr.bus, addr.devfn), (0, 3, 0xff));
    /// assert!(p2pmem_pci_addr::parse("03:00").is_none());
    /// ```
    pub fn parse(text: &str) -> Option<Self> {
        fn hex(text: &str, digits: RangeInclusive<usize>) -> Option<u32> {
            let plain = digits.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
            plain.then(|| u32::from_str_radix(text, 16).ok())?
        }
        let (rest, function) = text.rsplit_once('.')?;
        let (rest, device) = rest.rsplit_once(':')?;
        let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
        let (device, function) = (hex(device, 2..=2)?, hex(function, 1..=1)?);
        if device > 31 || function > 7 {
            return None;
        }
        Some(Self {
            domain: hex(domain, 4..=8)?,
            bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
            devfn: u8::try_from((device << 3) | function).ok()?,
            reserved: 0,
        })
    }
}
