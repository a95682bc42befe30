// SPDX-License-Identifier: MIT OR Apache-2.0

//! PCI configuration space: a builder, and the space itself with its writable bits.
//!
//! The client emulates the BAR registers for the guest and forwards every write, also those that size BARs. The BAR
//! registers are implemented here too, so that the device knows its own bus addresses.

use crate::proto::CONFIG_SIZE;

const SIZE: usize = CONFIG_SIZE as usize;

/// Offsets and bits of the type 0 header.
mod header {
    pub const VENDOR: usize = 0x00;
    pub const DEVICE: usize = 0x02;
    pub const COMMAND: usize = 0x04;
    pub const COMMAND_MEMORY: u16 = 1 << 1;
    pub const COMMAND_MASTER: u16 = 1 << 2;
    /// Memory space, bus master, parity error response, SERR#, interrupt disable.
    pub const COMMAND_WRITABLE: u16 = 0x0546;
    pub const STATUS: usize = 0x06;
    pub const STATUS_CAPABILITIES: u16 = 1 << 4;
    pub const REVISION: usize = 0x08;
    pub const CACHE_LINE: usize = 0x0c;
    pub const BARS: usize = 0x10;
    pub const SUBSYSTEM_VENDOR: usize = 0x2c;
    pub const SUBSYSTEM: usize = 0x2e;
    pub const CAPABILITIES: usize = 0x34;
    pub const INTERRUPT_LINE: usize = 0x3c;
    pub const END: usize = 0x40;
    pub const EXTENDED: usize = 0x100;
}

const CAP_PM: u8 = 0x01;
const CAP_PCIE: u8 = 0x10;
const CAP_MSIX: u8 = 0x11;

/// Width and prefetchability of a memory BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// 32-bit, not prefetchable. For registers.
    Memory32,
    /// 64-bit, prefetchable, two BAR registers. For memory.
    Memory64Prefetchable,
}

/// Speed of a PCIe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LinkSpeed {
    /// 2.5 GT/s.
    Gen1 = 1,
    /// 5 GT/s.
    Gen2 = 2,
    /// 8 GT/s.
    Gen3 = 3,
    /// 16 GT/s.
    Gen4 = 4,
    /// 32 GT/s.
    Gen5 = 5,
}

impl LinkSpeed {
    /// The speed of a PCIe generation, 1 to 5.
    pub fn from_generation(generation: u8) -> Option<Self> {
        [Self::Gen1, Self::Gen2, Self::Gen3, Self::Gen4, Self::Gen5]
            .into_iter()
            .find(|speed| *speed as u8 == generation)
    }
}

/// Location of the MSI-X capability, table and pending bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Msix {
    /// Offset of the capability in the configuration space.
    pub capability: usize,
    /// Number of vectors.
    pub vectors: u16,
    /// BAR of the table and the Pending Bit Array.
    pub bar: u8,
    /// Offset of the table in that BAR.
    pub table: u32,
    /// Offset of the Pending Bit Array in that BAR.
    pub pba: u32,
}

/// Why a configuration space cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The index must be 0 to 5 and free; a 64-bit BAR takes two.
    #[error("BAR {0} does not exist or is taken")]
    BarTaken(usize),
    /// The size must be a power of two, at least 16 bytes, and less than 4 GiB for a 32-bit BAR.
    #[error("BAR {0} has an invalid size of {1} bytes")]
    BarSize(usize, u64),
    /// MSI-X has 1 to 2048 vectors; its table and Pending Bit Array are in a BAR, at multiples of 8, without overlap.
    #[error("MSI-X: the number of vectors, or the location of the table or the Pending Bit Array, is invalid")]
    Msix,
    /// The link width must be 1, 2, 4, 8, 12, 16 or 32 lanes.
    #[error("a PCIe link cannot have {0} lanes")]
    LinkWidth(u8),
    /// The capabilities exceed their part of the configuration space.
    #[error("no space for capability {0:#x}")]
    NoSpace(u16),
    /// Body and mask of a capability differ in length.
    #[error("capability {0:#x}: body and mask differ in length")]
    Mask(u16),
}

#[derive(Clone, Copy, Debug)]
struct Bar {
    size: u64,
    kind: BarKind,
}

/// Builds a configuration space. [`ConfigBuilder::build`] returns the first error of all calls.
#[derive(Debug)]
pub struct ConfigBuilder {
    space: ConfigSpace,
    /// Offset of the next capability, and of the pointer that will refer to it.
    next_capability: usize,
    next_pointer: usize,
    next_extended: usize,
    last_extended: Option<usize>,
    error: Option<ConfigError>,
}

impl ConfigBuilder {
    /// A type 0 header with these IDs, without BARs and capabilities.
    pub fn new(vendor: u16, device: u16) -> Self {
        let mut space = ConfigSpace {
            bytes: Box::new([0; SIZE]),
            initial: Box::new([0; SIZE]),
            mask: Box::new([0; SIZE]),
            bars: [None; 6],
            pcie: None,
            msix: None,
            reset_requested: false,
        };
        space.put16(header::VENDOR, vendor);
        space.put16(header::DEVICE, device);
        space.put16(header::SUBSYSTEM_VENDOR, vendor);
        space.put16(header::SUBSYSTEM, device);
        space.mask16(header::COMMAND, header::COMMAND_WRITABLE);
        space.mask[header::CACHE_LINE] = 0xff;
        space.mask[header::INTERRUPT_LINE] = 0xff;
        Self {
            space,
            next_capability: header::END,
            next_pointer: header::CAPABILITIES,
            next_extended: header::EXTENDED,
            last_extended: None,
            error: None,
        }
    }

    fn fail(&mut self, error: ConfigError) {
        self.error.get_or_insert(error);
    }

    /// Sets the class code (24 bits: base class, sub-class, programming interface) and the revision ID.
    pub fn class(mut self, class: u32, revision: u8) -> Self {
        self.space.put32(header::REVISION, (class << 8) | u32::from(revision));
        self
    }

    /// Sets the subsystem IDs. The default is the vendor ID and device ID.
    pub fn subsystem(mut self, vendor: u16, device: u16) -> Self {
        self.space.put16(header::SUBSYSTEM_VENDOR, vendor);
        self.space.put16(header::SUBSYSTEM, device);
        self
    }

    /// Adds memory BAR `index` of `size` bytes.
    pub fn bar(mut self, index: usize, size: u64, kind: BarKind) -> Self {
        let slots = if kind == BarKind::Memory64Prefetchable { 2 } else { 1 };
        let follows_64bit = index
            .checked_sub(1)
            .and_then(|before| self.space.bars.get(before))
            .is_some_and(|bar| matches!(bar, Some(bar) if bar.kind == BarKind::Memory64Prefetchable));
        if index > 6 - slots || follows_64bit || self.space.bars[index..index + slots].iter().any(Option::is_some) {
            self.fail(ConfigError::BarTaken(index));
            return self;
        }
        let fits = size < 1 << 32 || slots == 2;
        if !size.is_power_of_two() || size < 16 || !fits {
            self.fail(ConfigError::BarSize(index, size));
            return self;
        }
        self.space.bars[index] = Some(Bar { size, kind });
        let at = header::BARS + 4 * index;
        let mask = !(size - 1);
        self.space.mask32(at, mask as u32);
        if kind == BarKind::Memory64Prefetchable {
            self.space.put32(at, 0b1100);
            self.space.mask32(at + 4, (mask >> 32) as u32);
        }
        self
    }

    /// Adds a capability. `body` follows the two-byte header; `writable` is a bit mask of the same length.
    pub fn capability(mut self, id: u8, body: &[u8], writable: &[u8]) -> Self {
        self.add_capability(id, body, writable);
        self
    }

    fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Option<usize> {
        if body.len() != writable.len() {
            self.fail(ConfigError::Mask(id.into()));
            return None;
        }
        let at = self.next_capability;
        let end = at + 2 + body.len();
        if end > header::EXTENDED {
            self.fail(ConfigError::NoSpace(id.into()));
            return None;
        }
        self.space.bytes[at] = id;
        self.space.bytes[at + 2..end].copy_from_slice(body);
        self.space.mask[at + 2..end].copy_from_slice(writable);
        // No truncation: capabilities lie below 0x100.
        self.space.bytes[self.next_pointer] = at as u8;
        self.space.put16(header::STATUS, header::STATUS_CAPABILITIES);
        self.next_pointer = at + 1;
        self.next_capability = end.next_multiple_of(4);
        Some(at)
    }

    /// Adds an extended capability. `body` follows the four-byte header; `writable` is a bit mask of the same length.
    pub fn extended_capability(mut self, id: u16, version: u8, body: &[u8], writable: &[u8]) -> Self {
        let at = self.next_extended;
        let end = at + 4 + body.len();
        if body.len() != writable.len() {
            self.fail(ConfigError::Mask(id));
            return self;
        }
        if end > SIZE {
            self.fail(ConfigError::NoSpace(id));
            return self;
        }
        self.space.put32(at, u32::from(id) | (u32::from(version & 0xf) << 16));
        self.space.bytes[at + 4..end].copy_from_slice(body);
        self.space.mask[at + 4..end].copy_from_slice(writable);
        if let Some(last) = self.last_extended {
            let head = self.space.get32(last) & 0x000f_ffff;
            self.space.put32(last, head | ((at as u32) << 20));
        }
        self.last_extended = Some(at);
        self.next_extended = end.next_multiple_of(4);
        self
    }

    /// Adds a Device Serial Number capability, which distinguishes devices of one model.
    pub fn serial(self, serial: u64) -> Self {
        self.extended_capability(0x0003, 1, &serial.to_le_bytes(), &[0; 8])
    }

    /// Adds a Power Management capability: D0 and D3hot, without a soft reset on return to D0.
    pub fn power_management(self) -> Self {
        let mut body = [0; 6];
        body[..2].copy_from_slice(&0x0003_u16.to_le_bytes());
        body[2..4].copy_from_slice(&0x0008_u16.to_le_bytes());
        self.capability(CAP_PM, &body, &[0, 0, 0b11, 0, 0, 0])
    }

    /// Adds the PCI Express capability of an endpoint with function-level reset. `speed` and `lanes` are the maximum
    /// and the current state of the link.
    pub fn pcie(mut self, speed: LinkSpeed, lanes: u8) -> Self {
        if ![1, 2, 4, 8, 12, 16, 32].contains(&lanes) {
            self.fail(ConfigError::LinkWidth(lanes));
            return self;
        }
        let mut body = [0; 58];
        let mut mask = [0; 58];
        // `at` is the offset of a register in the capability. `body` starts after the two-byte header.
        let mut put16 = |at: usize, value: u16| body[at - 2..at].copy_from_slice(&value.to_le_bytes());
        let link = u16::from(speed as u8) | (u16::from(lanes) << 4);
        put16(2, 0x0002);
        put16(4, 0x8021);
        put16(6, 0x1000);
        put16(12, link);
        put16(18, link);
        put16(44, ((1_u16 << speed as u8) - 1) << 1);
        put16(48, u16::from(speed as u8));
        // Writable: Device Control (without Initiate Function Level Reset, which reads as 0), Link Control, Device
        // Control 2, Link Control 2.
        mask[6..8].copy_from_slice(&0x7fff_u16.to_le_bytes());
        mask[14..16].copy_from_slice(&0x01c3_u16.to_le_bytes());
        mask[38..40].copy_from_slice(&0x001f_u16.to_le_bytes());
        mask[46..48].copy_from_slice(&0x000f_u16.to_le_bytes());
        self.space.pcie = self.add_capability(CAP_PCIE, &body, &mask);
        self
    }

    /// Adds MSI-X with `vectors` vectors, table and Pending Bit Array in BAR `bar`. Add the BAR before.
    pub fn msix(mut self, vectors: u16, bar: u8, table: u32, pba: u32) -> Self {
        let size = self
            .space
            .bars
            .get(usize::from(bar))
            .copied()
            .flatten()
            .map_or(0, |bar| bar.size);
        let table_end = u64::from(table) + u64::from(vectors) * 16;
        let pba_end = u64::from(pba) + u64::from(vectors).div_ceil(64) * 8;
        let apart = table_end <= u64::from(pba) || pba_end <= u64::from(table);
        if !(1..=2048).contains(&vectors) || table % 8 != 0 || pba % 8 != 0 || !apart || table_end.max(pba_end) > size {
            self.fail(ConfigError::Msix);
            return self;
        }
        let mut body = [0; 10];
        body[..2].copy_from_slice(&(vectors - 1).to_le_bytes());
        body[2..6].copy_from_slice(&(table | u32::from(bar)).to_le_bytes());
        body[6..10].copy_from_slice(&(pba | u32::from(bar)).to_le_bytes());
        let mut mask = [0; 10];
        mask[1] = 0xc0;
        self.space.msix = self.add_capability(CAP_MSIX, &body, &mask).map(|capability| Msix {
            capability,
            vectors,
            bar,
            table,
            pba,
        });
        self
    }

    /// Builds the configuration space.
    ///
    /// # Errors
    ///
    /// The first error of all calls of the builder.
    pub fn build(mut self) -> Result<ConfigSpace, ConfigError> {
        self.space.initial = self.space.bytes.clone();
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.space),
        }
    }
}

/// A PCI configuration space of 4096 bytes.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: Box<[u8; SIZE]>,
    /// The values after a reset.
    initial: Box<[u8; SIZE]>,
    /// The writable bits.
    mask: Box<[u8; SIZE]>,
    bars: [Option<Bar>; 6],
    pcie: Option<usize>,
    msix: Option<Msix>,
    reset_requested: bool,
}

impl ConfigSpace {
    fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn get32(&self, at: usize) -> u32 {
        u32::from(self.get16(at)) | (u32::from(self.get16(at + 2)) << 16)
    }

    fn put16(&mut self, at: usize, value: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }

    fn put32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn mask16(&mut self, at: usize, mask: u16) {
        self.mask[at..at + 2].copy_from_slice(&mask.to_le_bytes());
    }

    fn mask32(&mut self, at: usize, mask: u32) {
        self.mask[at..at + 4].copy_from_slice(&mask.to_le_bytes());
    }

    /// Reads. Bytes beyond the end read as 0xff.
    pub fn read(&self, offset: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = offset
                .checked_add(i)
                .and_then(|at| self.bytes.get(at))
                .copied()
                .unwrap_or(0xff);
        }
    }

    /// Writes the writable bits. Bytes beyond the end are ignored.
    pub fn write(&mut self, offset: usize, data: &[u8]) {
        for (i, byte) in data.iter().enumerate() {
            let Some(at) = offset.checked_add(i).filter(|at| *at < SIZE) else {
                return;
            };
            let mask = self.mask[at];
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
            // Bit 15 of Device Control is Initiate Function Level Reset.
            if self.pcie.is_some_and(|pcie| at == pcie + 9) && byte & 0x80 != 0 {
                self.reset_requested = true;
            }
        }
    }

    /// Returns whether a function-level reset was requested since the last call.
    pub(crate) fn take_reset_request(&mut self) -> bool {
        std::mem::take(&mut self.reset_requested)
    }

    /// Sets all writable bits to their initial values, as a reset does.
    pub fn reset(&mut self) {
        for ((byte, initial), mask) in self.bytes.iter_mut().zip(self.initial.iter()).zip(self.mask.iter()) {
            *byte = *byte & !mask | initial & mask;
        }
        self.reset_requested = false;
    }

    /// Sets bytes regardless of the writable bits, for capabilities that the device changes itself.
    ///
    /// # Panics
    ///
    /// If the range exceeds the configuration space.
    pub fn set(&mut self, offset: usize, data: &[u8]) {
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    /// Whether the Bus Master Enable bit is set.
    pub fn bus_master(&self) -> bool {
        self.get16(header::COMMAND) & header::COMMAND_MASTER != 0
    }

    /// Whether the Memory Space Enable bit is set.
    pub fn memory_enabled(&self) -> bool {
        self.get16(header::COMMAND) & header::COMMAND_MEMORY != 0
    }

    /// Location of MSI-X, if the device has it.
    pub fn msix(&self) -> Option<Msix> {
        self.msix
    }

    /// Whether the MSI-X Enable bit is set.
    pub fn msix_enabled(&self) -> bool {
        self.msix
            .is_some_and(|msix| self.bytes[msix.capability + 3] & 0x80 != 0)
    }

    /// Size of BAR `index` in bytes; 0 if there is no such BAR.
    pub fn bar_size(&self, index: usize) -> u64 {
        self.bars.get(index).copied().flatten().map_or(0, |bar| bar.size)
    }

    /// Bus address of BAR `index`, if the BAR exists, is decoded, has an address, and is not being sized.
    pub fn bar_address(&self, index: usize) -> Option<u64> {
        let bar = self.bars.get(index).copied().flatten()?;
        let at = header::BARS + 4 * index;
        let mut address = u64::from(self.get32(at) & !0xf);
        let mut sizing = u64::from(!0xf_u32) & !(bar.size - 1);
        if bar.kind == BarKind::Memory64Prefetchable {
            address |= u64::from(self.get32(at + 4)) << 32;
            sizing = !(bar.size - 1);
        }
        (self.memory_enabled() && address != 0 && address != sizing).then_some(address)
    }

    /// Returns the bus addresses of all BARs, see [`ConfigSpace::bar_address`].
    pub(crate) fn bar_addresses(&self) -> [Option<u64>; 6] {
        std::array::from_fn(|index| self.bar_address(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        ConfigBuilder::new(0x1234, 0xabcd)
            .class(0x12_00_00, 7)
            .bar(0, 64 << 10, BarKind::Memory32)
            .bar(2, 8 << 30, BarKind::Memory64Prefetchable)
            .bar(4, 8 << 10, BarKind::Memory32)
            .power_management()
            .pcie(LinkSpeed::Gen4, 16)
            .msix(4, 4, 0, 0x1000)
            .serial(0x0102_0304_0506_0708)
            .build()
            .unwrap()
    }

    fn find(space: &ConfigSpace, id: u8) -> Option<usize> {
        let mut at = usize::from(space.bytes[0x34]);
        for _ in 0..48 {
            if at == 0 {
                return None;
            }
            if space.bytes[at] == id {
                return Some(at);
            }
            at = usize::from(space.bytes[at + 1]);
        }
        panic!("the capability list has a loop");
    }

    #[test]
    fn header_has_configured_values() {
        let space = space();
        assert_eq!(space.get32(0), 0xabcd_1234);
        assert_eq!(space.get32(8), 0x1200_0007);
        assert_eq!(space.get16(6) & 0x10, 0x10);
        assert_eq!(space.get32(0x10), 0);
        assert_eq!(space.get32(0x18), 0xc);
    }

    #[test]
    fn link_is_in_the_pcie_capability() {
        let space = space();
        let at = find(&space, CAP_PCIE).unwrap();
        assert_eq!(space.get16(at + 2), 2, "version 2, endpoint");
        assert_eq!(
            space.get32(at + 4),
            0x1000_8021,
            "reset, role-based errors, extended tags, 256-byte payload"
        );
        assert_eq!(space.get32(at + 0xc) & 0x3ff, 4 | (16 << 4));
        assert_eq!(space.get16(at + 0x12) & 0x3ff, 4 | (16 << 4));
        assert_eq!(space.get32(at + 0x2c), 0b11110);
        assert_eq!(space.get16(at + 0x30), 4);
        assert!(find(&space, CAP_PM).is_some());
        assert_eq!(find(&space, CAP_MSIX), space.msix().map(|msix| msix.capability));
    }

    #[test]
    fn serial_is_the_first_extended_capability() {
        let space = space();
        assert_eq!(space.get32(0x100), 0x0001_0003);
        assert_eq!(space.get32(0x104), 0x0506_0708);
    }

    #[test]
    fn extended_capabilities_are_chained() {
        let space = ConfigBuilder::new(1, 2)
            .serial(1)
            .extended_capability(0x000b, 1, &[0; 12], &[0; 12])
            .build()
            .unwrap();
        assert_eq!(space.get32(0x100) >> 20, 0x10c);
        assert_eq!(space.get32(0x10c), 0x0001_000b);
    }

    #[test]
    fn bar_sizing_and_addresses() {
        let mut space = space();
        assert_eq!(space.bar_address(0), None);
        space.write(0x10, &[0xff; 4]);
        space.write(0x18, &[0xff; 8]);
        space.write(4, &2_u16.to_le_bytes());
        assert_eq!(space.get32(0x10), 0xffff_0000);
        assert_eq!(space.get32(0x18), 0x0000_000c);
        assert_eq!(space.get32(0x1c), 0xffff_fffe);
        assert_eq!(space.bar_address(0), None, "a BAR that is being sized has no address");
        assert_eq!(space.bar_address(2), None);
        space.write(0x10, &0xfe00_0000_u32.to_le_bytes());
        space.write(0x18, &0x38_0000_0000_u64.to_le_bytes());
        assert_eq!(space.bar_address(0), Some(0xfe00_0000));
        assert_eq!(space.bar_address(2), Some(0x38_0000_0000));
        assert_eq!(space.bar_address(3), None);
        assert_eq!(space.bar_address(6), None);
        space.write(4, &[0, 0]);
        assert_eq!(space.bar_address(2), None, "a BAR that is not decoded has no address");
    }

    #[test]
    fn read_only_bits_are_kept_and_reset_restores_defaults() {
        let mut space = space();
        let before = space.bytes.clone();
        let ones = vec![0xff; SIZE + 8];
        space.write(0, &ones);
        assert_eq!(space.get32(0), 0xabcd_1234);
        assert!(space.bus_master() && space.msix_enabled());
        assert!(space.take_reset_request());
        assert!(!space.take_reset_request());
        let at = find(&space, CAP_PCIE).unwrap();
        assert_eq!(space.get16(at + 8) & 0x8000, 0, "the reset bit reads as 0");
        space.reset();
        assert!(space.bytes == before, "a reset restores all writable bits");
        let mut past = [0; 4];
        space.read(SIZE - 2, &mut past);
        assert_eq!(past[2..], [0xff, 0xff]);
        space.read(usize::MAX, &mut past);
    }

    #[test]
    fn invalid_layouts_are_rejected() {
        let new = || ConfigBuilder::new(1, 2);
        let wide = BarKind::Memory64Prefetchable;
        assert_eq!(
            new().bar(6, 16, BarKind::Memory32).build().unwrap_err(),
            ConfigError::BarTaken(6)
        );
        assert_eq!(new().bar(5, 16, wide).build().unwrap_err(), ConfigError::BarTaken(5));
        assert_eq!(
            new()
                .bar(0, 16, wide)
                .bar(1, 16, BarKind::Memory32)
                .build()
                .unwrap_err(),
            ConfigError::BarTaken(1)
        );
        assert_eq!(new().bar(0, 48, wide).build().unwrap_err(), ConfigError::BarSize(0, 48));
        assert_eq!(
            new().bar(0, 1 << 32, BarKind::Memory32).build().unwrap_err(),
            ConfigError::BarSize(0, 1 << 32)
        );
        assert_eq!(new().msix(1, 0, 0, 16).build().unwrap_err(), ConfigError::Msix);
        assert_eq!(
            new().bar(0, 4096, wide).msix(4, 0, 0, 32).build().unwrap_err(),
            ConfigError::Msix
        );
        assert_eq!(
            new().pcie(LinkSpeed::Gen1, 3).build().unwrap_err(),
            ConfigError::LinkWidth(3)
        );
        assert_eq!(
            new().capability(9, &[0; 3], &[0; 2]).build().unwrap_err(),
            ConfigError::Mask(9)
        );
        assert_eq!(
            new().capability(9, &[0; 200], &[0; 200]).build().unwrap_err(),
            ConfigError::NoSpace(9)
        );
    }
}
