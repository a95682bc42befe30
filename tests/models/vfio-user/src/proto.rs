// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages of the protocol, as they lie on the wire, in the host's byte order.
//!
//! Sizes and offsets are in bytes. Structures that the kernel's VFIO interface has too carry its names.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Longest transfer in one region or DMA message that this side takes.
pub const MAX_TRANSFER: usize = 1 << 20;
/// Longest message this side takes: a transfer and the structures around it.
pub const MAX_MESSAGE: usize = MAX_TRANSFER + 4096;
/// Most descriptors in one message.
pub const MAX_FDS: usize = 16;
/// Transfer size a client is taken to permit if it does not say.
pub const DEFAULT_TRANSFER: u64 = 1 << 20;

/// Index of the configuration space among the regions; the BARs are 0 to 5.
pub const CONFIG_REGION: u32 = 7;
/// Number of regions of a PCI device: six BARs, ROM, configuration space, VGA.
pub const NUM_REGIONS: u32 = 9;
/// Size of the configuration space.
pub const CONFIG_SIZE: u64 = 4096;
/// Index of MSI-X among the interrupt types.
pub const MSIX_IRQ: u32 = 2;
/// Number of interrupt types of a PCI device.
pub const NUM_IRQS: u32 = 5;

/// Commands: the values of [`Header::command`].
pub mod command {
    /// Negotiates version and capabilities; the first message.
    pub const VERSION: u16 = 1;
    /// Makes an address range known.
    pub const DMA_MAP: u16 = 2;
    /// Takes address ranges away.
    pub const DMA_UNMAP: u16 = 3;
    /// Asks what the device is.
    pub const DEVICE_GET_INFO: u16 = 4;
    /// Asks about a region.
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    /// Asks for descriptors that stand for register accesses; not supported here.
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    /// Asks about an interrupt type.
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    /// Sets up, masks or triggers interrupts.
    pub const DEVICE_SET_IRQS: u16 = 8;
    /// Reads from a region.
    pub const REGION_READ: u16 = 9;
    /// Writes to a region.
    pub const REGION_WRITE: u16 = 10;
    /// The server reads the client's memory.
    pub const DMA_READ: u16 = 11;
    /// The server writes the client's memory.
    pub const DMA_WRITE: u16 = 12;
    /// Resets the device.
    pub const DEVICE_RESET: u16 = 13;
    /// Several small writes in one message.
    pub const REGION_WRITE_MULTI: u16 = 15;
}

/// Bits of [`Header::flags`].
pub mod message {
    /// Bits that hold the type: 0 is a command.
    pub const TYPE: u32 = 0xf;
    /// Type of a reply.
    pub const REPLY: u32 = 0x1;
    /// The sender of the command wants no reply.
    pub const NO_REPLY: u32 = 0x10;
    /// In a reply: the command failed, `error` says why.
    pub const ERROR: u32 = 0x20;
}

/// What every message starts with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Chosen by the sender of a command, repeated in its reply.
    pub id: u16,
    /// See [`command`].
    pub command: u16,
    /// Size of the whole message.
    pub size: u32,
    /// See [`message`].
    pub flags: u32,
    /// In an error reply: an errno, positive.
    pub error: u32,
}

/// Size of [`Header`].
pub const HEADER: usize = size_of::<Header>();

/// Start of a VERSION message; JSON text ending in a NUL may follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// Incompatible changes; 0 is all there is.
    pub major: u16,
    /// Compatible changes.
    pub minor: u16,
}

/// Body of DMA_MAP. A descriptor that comes with it holds the memory.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure.
    pub argsz: u32,
    /// Bit 0: readable, bit 1: writable.
    pub flags: u32,
    /// Offset in the descriptor's file.
    pub offset: u64,
    /// First bus address.
    pub address: u64,
    /// Length.
    pub size: u64,
}

/// Body of DMA_UNMAP and of its reply.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Size of this structure.
    pub argsz: u32,
    /// Bit 1: everything, whatever address and size say.
    pub flags: u32,
    /// First bus address.
    pub address: u64,
    /// Length.
    pub size: u64,
}

/// Flag of [`DmaMap`]: the device may read.
pub const DMA_READABLE: u32 = 1 << 0;
/// Flag of [`DmaMap`]: the device may write.
pub const DMA_WRITABLE: u32 = 1 << 1;
/// Flag of [`DmaUnmap`]: all mappings.
pub const DMA_UNMAP_ALL: u32 = 1 << 1;

/// Body of DEVICE_GET_INFO and of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Request: space for the reply. Reply: size of the reply.
    pub argsz: u32,
    /// Bit 0: has reset; bit 1: is PCI.
    pub flags: u32,
    /// See [`NUM_REGIONS`].
    pub num_regions: u32,
    /// See [`NUM_IRQS`].
    pub num_irqs: u32,
}

/// Flag of [`DeviceInfo`]: DEVICE_RESET works.
pub const DEVICE_RESETS: u32 = 1 << 0;
/// Flag of [`DeviceInfo`]: a PCI device.
pub const DEVICE_PCI: u32 = 1 << 1;

/// Body of DEVICE_GET_REGION_INFO and start of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// Request: space for the reply. Reply: space for the full reply.
    pub argsz: u32,
    /// See the `REGION_` constants.
    pub flags: u32,
    /// Which region.
    pub index: u32,
    /// Offset of the first capability in this structure.
    pub cap_offset: u32,
    /// Size of the region.
    pub size: u64,
    /// Offset of the region in the descriptor's file.
    pub offset: u64,
}

/// Flag of [`RegionInfo`]: readable.
pub const REGION_READABLE: u32 = 1 << 0;
/// Flag of [`RegionInfo`]: writable.
pub const REGION_WRITABLE: u32 = 1 << 1;
/// Flag of [`RegionInfo`]: a descriptor to map comes with the reply.
pub const REGION_MMAP: u32 = 1 << 2;
/// Flag of [`RegionInfo`]: capabilities follow.
pub const REGION_CAPS: u32 = 1 << 3;

/// The capability that says which parts of a region can be mapped; [`SparseArea`]s follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmap {
    /// [`SPARSE_MMAP`].
    pub id: u16,
    /// 1.
    pub version: u16,
    /// Offset of the next capability, 0 for none.
    pub next: u32,
    /// Number of areas.
    pub areas: u32,
    /// 0.
    pub reserved: u32,
}

/// Id of [`SparseMmap`].
pub const SPARSE_MMAP: u16 = 1;

/// One part of a region that can be mapped.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseArea {
    /// Offset in the region.
    pub offset: u64,
    /// Length.
    pub size: u64,
}

/// Body of DEVICE_GET_IRQ_INFO and of its reply.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Size of this structure.
    pub argsz: u32,
    /// Bit 0: by eventfd, bit 1: maskable, bit 3: not resizable.
    pub flags: u32,
    /// Which type.
    pub index: u32,
    /// How many vectors.
    pub count: u32,
}

/// Flag of [`IrqInfo`]: signalled by eventfd.
pub const IRQ_EVENTFD: u32 = 1 << 0;
/// Flag of [`IrqInfo`]: can be masked.
pub const IRQ_MASKABLE: u32 = 1 << 1;

/// Start of DEVICE_SET_IRQS; one byte per vector may follow, or descriptors come with it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// Size of this structure with what follows.
    pub argsz: u32,
    /// One `SET_DATA_` and one `SET_ACTION_` bit.
    pub flags: u32,
    /// Which type.
    pub index: u32,
    /// First vector.
    pub start: u32,
    /// How many vectors.
    pub count: u32,
}

/// Data of [`IrqSet`]: none, the action applies to every vector named.
pub const SET_DATA_NONE: u32 = 1 << 0;
/// Data of [`IrqSet`]: a byte per vector says whether the action applies.
pub const SET_DATA_BOOL: u32 = 1 << 1;
/// Data of [`IrqSet`]: an eventfd per vector, or no descriptor at all to take them away.
pub const SET_DATA_EVENTFD: u32 = 1 << 2;
/// Action of [`IrqSet`]: mask.
pub const SET_ACTION_MASK: u32 = 1 << 3;
/// Action of [`IrqSet`]: unmask.
pub const SET_ACTION_UNMASK: u32 = 1 << 4;
/// Action of [`IrqSet`]: trigger, or with eventfds: signal them from now on.
pub const SET_ACTION_TRIGGER: u32 = 1 << 5;

/// Start of REGION_READ, REGION_WRITE and their replies; data may follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region.
    pub offset: u64,
    /// Which region.
    pub region: u32,
    /// Length.
    pub count: u32,
}

/// Bytes each write of a REGION_WRITE_MULTI takes after its [`RegionAccess`], however short it is.
pub const MULTI_DATA: usize = 8;

/// Start of DMA_READ, DMA_WRITE and the reply to the first; data may follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaAccess {
    /// Bus address.
    pub address: u64,
    /// Length.
    pub count: u64,
}

/// A message as bytes: header and parts, with the size filled in.
///
/// # Panics
///
/// If the parts are longer than a message's size field can say, which no caller's limits permit.
pub fn encode(mut header: Header, parts: &[&[u8]]) -> Vec<u8> {
    let size = HEADER + parts.iter().map(|part| part.len()).sum::<usize>();
    header.size = u32::try_from(size).expect("a message fits its size field");
    let mut bytes = Vec::with_capacity(size);
    bytes.extend_from_slice(header.as_bytes());
    for part in parts {
        bytes.extend_from_slice(part);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_protocol() {
        assert_eq!(HEADER, 16);
        assert_eq!(size_of::<Version>(), 4);
        assert_eq!(size_of::<DmaMap>(), 32);
        assert_eq!(size_of::<DmaUnmap>(), 24);
        assert_eq!(size_of::<DeviceInfo>(), 16);
        assert_eq!(size_of::<RegionInfo>(), 32);
        assert_eq!(size_of::<SparseMmap>(), 16);
        assert_eq!(size_of::<SparseArea>(), 16);
        assert_eq!(size_of::<IrqInfo>(), 16);
        assert_eq!(size_of::<IrqSet>(), 20);
        assert_eq!(size_of::<RegionAccess>(), 16);
        assert_eq!(size_of::<DmaAccess>(), 16);
    }

    #[test]
    fn encoding_fills_in_the_size() {
        let bytes = encode(
            Header {
                id: 7,
                command: command::REGION_READ,
                ..Header::default()
            },
            &[&[1, 2], &[3]],
        );
        let (header, rest) = Header::read_from_prefix(&bytes).unwrap();
        assert_eq!((header.id, header.size), (7, 19));
        assert_eq!(rest, [1, 2, 3]);
    }
}
