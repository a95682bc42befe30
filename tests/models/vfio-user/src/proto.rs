// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages of the vfio-user protocol in their wire format, in host byte order.
//!
//! Sizes and offsets are in bytes. For structures and constants that `linux/vfio.h` has too, the comment has their name
//! there.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum size of the data in one region or DMA message (`max_data_xfer_size` of the server).
pub const MAX_TRANSFER: usize = 1 << 20;
/// Maximum size of a message that the server accepts: the data and the structures before it.
pub const MAX_MESSAGE: usize = MAX_TRANSFER + 4096;
/// Maximum number of file descriptors in one message (`max_msg_fds`).
pub const MAX_FDS: usize = 16;
/// Default of the client's `max_data_xfer_size`.
pub const DEFAULT_TRANSFER: u64 = 1 << 20;

/// Region index of the configuration space (`VFIO_PCI_CONFIG_REGION_INDEX`); the BARs have 0 to 5.
pub const CONFIG_REGION: u32 = 7;
/// Number of regions of a PCI device (`VFIO_PCI_NUM_REGIONS`): six BARs, ROM, configuration space, VGA.
pub const NUM_REGIONS: u32 = 9;
/// Size of the configuration space.
pub const CONFIG_SIZE: u64 = 4096;
/// Interrupt index of MSI-X (`VFIO_PCI_MSIX_IRQ_INDEX`).
pub const MSIX_IRQ: u32 = 2;
/// Number of interrupt indices of a PCI device (`VFIO_PCI_NUM_IRQS`).
pub const NUM_IRQS: u32 = 5;

/// Commands: values of [`Header::command`], in the specification with the prefix `VFIO_USER_`.
pub mod command {
    /// Negotiates version and capabilities. The first command.
    pub const VERSION: u16 = 1;
    /// Maps a range of bus addresses.
    pub const DMA_MAP: u16 = 2;
    /// Unmaps ranges of bus addresses.
    pub const DMA_UNMAP: u16 = 3;
    /// Gets device information.
    pub const DEVICE_GET_INFO: u16 = 4;
    /// Gets information on a region.
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    /// Gets file descriptors for register accesses. Not supported by this server.
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    /// Gets information on an interrupt index.
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    /// Sets eventfds, masks, unmasks or triggers interrupts.
    pub const DEVICE_SET_IRQS: u16 = 8;
    /// Reads from a region.
    pub const REGION_READ: u16 = 9;
    /// Writes to a region.
    pub const REGION_WRITE: u16 = 10;
    /// Reads the client's memory. Sent by the server.
    pub const DMA_READ: u16 = 11;
    /// Writes the client's memory. Sent by the server.
    pub const DMA_WRITE: u16 = 12;
    /// Resets the device.
    pub const DEVICE_RESET: u16 = 13;
    /// Several writes of at most 8 bytes in one message.
    pub const REGION_WRITE_MULTI: u16 = 15;
}

/// Bits of [`Header::flags`].
pub mod message {
    /// Mask of the message type. Type 0 is a command.
    pub const TYPE: u32 = 0xf;
    /// Type of a reply.
    pub const REPLY: u32 = 0x1;
    /// In a command: no reply is needed.
    pub const NO_REPLY: u32 = 0x10;
    /// In a reply: the command failed with the errno in `error`.
    pub const ERROR: u32 = 0x20;
}

/// Header of every message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Message ID. The sender of a command chooses it; the reply has the same ID.
    pub id: u16,
    /// See [`command`].
    pub command: u16,
    /// Size of the whole message, with this header.
    pub size: u32,
    /// See [`message`].
    pub flags: u32,
    /// In an error reply: the errno, positive.
    pub error: u32,
}

/// Size of [`Header`].
pub const HEADER: usize = size_of::<Header>();

/// Start of the body of VERSION and its reply. The version data follows: a JSON string, NUL-terminated.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// Major version: incompatible changes. 0 is the only one.
    pub major: u16,
    /// Minor version: compatible changes.
    pub minor: u16,
}

/// Body of DMA_MAP. If the message has a file descriptor, the memory is in its file.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure.
    pub argsz: u32,
    /// [`DMA_READABLE`] and [`DMA_WRITABLE`].
    pub flags: u32,
    /// Offset in the file.
    pub offset: u64,
    /// First bus address.
    pub address: u64,
    /// Length.
    pub size: u64,
}

/// Body of DMA_UNMAP and its reply.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Size of this structure.
    pub argsz: u32,
    /// [`DMA_UNMAP_ALL`].
    pub flags: u32,
    /// First bus address.
    pub address: u64,
    /// Length.
    pub size: u64,
}

/// Flag of [`DmaMap`]: the device may read the memory.
pub const DMA_READABLE: u32 = 1 << 0;
/// Flag of [`DmaMap`]: the device may write the memory.
pub const DMA_WRITABLE: u32 = 1 << 1;
/// Flag of [`DmaUnmap`]: unmap everything, regardless of address and size (`VFIO_DMA_UNMAP_FLAG_ALL`).
pub const DMA_UNMAP_ALL: u32 = 1 << 1;

/// Body of DEVICE_GET_INFO and its reply (`struct vfio_device_info`).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Command: maximum size of the reply. Reply: size of the reply.
    pub argsz: u32,
    /// [`DEVICE_RESETS`] and [`DEVICE_PCI`].
    pub flags: u32,
    /// See [`NUM_REGIONS`].
    pub num_regions: u32,
    /// See [`NUM_IRQS`].
    pub num_irqs: u32,
}

/// Flag of [`DeviceInfo`]: DEVICE_RESET is supported (`VFIO_DEVICE_FLAGS_RESET`).
pub const DEVICE_RESETS: u32 = 1 << 0;
/// Flag of [`DeviceInfo`]: a PCI device (`VFIO_DEVICE_FLAGS_PCI`).
pub const DEVICE_PCI: u32 = 1 << 1;

/// Body of DEVICE_GET_REGION_INFO and start of its reply (`struct vfio_region_info`).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// Command: maximum size of the reply. Reply: size with all capabilities.
    pub argsz: u32,
    /// The `REGION_` constants.
    pub flags: u32,
    /// Region index.
    pub index: u32,
    /// Offset of the first capability from the start of this structure.
    pub cap_offset: u32,
    /// Size of the region.
    pub size: u64,
    /// Offset of the region in the file of the descriptor.
    pub offset: u64,
}

/// Flag of [`RegionInfo`]: readable (`VFIO_REGION_INFO_FLAG_READ`).
pub const REGION_READABLE: u32 = 1 << 0;
/// Flag of [`RegionInfo`]: writable (`VFIO_REGION_INFO_FLAG_WRITE`).
pub const REGION_WRITABLE: u32 = 1 << 1;
/// Flag of [`RegionInfo`]: the reply has a file descriptor to map (`VFIO_REGION_INFO_FLAG_MMAP`).
pub const REGION_MMAP: u32 = 1 << 2;
/// Flag of [`RegionInfo`]: capabilities follow (`VFIO_REGION_INFO_FLAG_CAPS`).
pub const REGION_CAPS: u32 = 1 << 3;

/// Capability with the areas of a region that can be mapped (`struct vfio_region_info_cap_sparse_mmap`). [`SparseArea`]
/// structures follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmap {
    /// [`SPARSE_MMAP`].
    pub id: u16,
    /// Version of the capability: 1.
    pub version: u16,
    /// Offset of the next capability; 0 for the last.
    pub next: u32,
    /// Number of areas.
    pub areas: u32,
    /// 0.
    pub reserved: u32,
}

/// ID of [`SparseMmap`] (`VFIO_REGION_INFO_CAP_SPARSE_MMAP`).
pub const SPARSE_MMAP: u16 = 1;

/// An area of a region that can be mapped (`struct vfio_region_sparse_mmap_area`).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseArea {
    /// Offset in the region.
    pub offset: u64,
    /// Length.
    pub size: u64,
}

/// Body of DEVICE_GET_IRQ_INFO and its reply (`struct vfio_irq_info`).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Size of this structure.
    pub argsz: u32,
    /// [`IRQ_EVENTFD`] and [`IRQ_MASKABLE`].
    pub flags: u32,
    /// Interrupt index.
    pub index: u32,
    /// Number of vectors.
    pub count: u32,
}

/// Flag of [`IrqInfo`]: signalled by eventfd (`VFIO_IRQ_INFO_EVENTFD`).
pub const IRQ_EVENTFD: u32 = 1 << 0;
/// Flag of [`IrqInfo`]: can be masked (`VFIO_IRQ_INFO_MASKABLE`).
pub const IRQ_MASKABLE: u32 = 1 << 1;

/// Start of the body of DEVICE_SET_IRQS (`struct vfio_irq_set`). One byte per vector may follow, or the message has
/// file descriptors.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqSet {
    /// Size of this structure and its data.
    pub argsz: u32,
    /// One `SET_DATA_` and one `SET_ACTION_` flag.
    pub flags: u32,
    /// Interrupt index.
    pub index: u32,
    /// First vector.
    pub start: u32,
    /// Number of vectors.
    pub count: u32,
}

/// Data type of [`IrqSet`]: no data, the action applies to every vector (`VFIO_IRQ_SET_DATA_NONE`).
pub const SET_DATA_NONE: u32 = 1 << 0;
/// Data type of [`IrqSet`]: one byte per vector, the action applies if it is not 0 (`VFIO_IRQ_SET_DATA_BOOL`).
pub const SET_DATA_BOOL: u32 = 1 << 1;
/// Data type of [`IrqSet`]: one eventfd per vector, or none to remove the eventfds (`VFIO_IRQ_SET_DATA_EVENTFD`).
pub const SET_DATA_EVENTFD: u32 = 1 << 2;
/// Action of [`IrqSet`]: mask (`VFIO_IRQ_SET_ACTION_MASK`).
pub const SET_ACTION_MASK: u32 = 1 << 3;
/// Action of [`IrqSet`]: unmask (`VFIO_IRQ_SET_ACTION_UNMASK`).
pub const SET_ACTION_UNMASK: u32 = 1 << 4;
/// Action of [`IrqSet`]: trigger, or with eventfds, signal them from now on (`VFIO_IRQ_SET_ACTION_TRIGGER`).
pub const SET_ACTION_TRIGGER: u32 = 1 << 5;

/// Start of the body of REGION_READ, REGION_WRITE and their replies. Data may follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region.
    pub offset: u64,
    /// Region index.
    pub region: u32,
    /// Length.
    pub count: u32,
}

/// Size of the data of each write in REGION_WRITE_MULTI, regardless of its length. The data follows [`RegionAccess`].
pub const MULTI_DATA: usize = 8;

/// Start of the body of DMA_READ, of DMA_WRITE and of the reply to DMA_READ. Data may follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaAccess {
    /// Bus address.
    pub address: u64,
    /// Length.
    pub count: u64,
}

/// Returns a message: the header with its size field set, and the parts.
///
/// # Panics
///
/// If the message has 4 GiB or more. The callers' limits exclude that.
pub fn encode(mut header: Header, parts: &[&[u8]]) -> Vec<u8> {
    let size = HEADER + parts.iter().map(|part| part.len()).sum::<usize>();
    header.size = u32::try_from(size).expect("a message of less than 4 GiB");
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
    fn structure_sizes_match_protocol() {
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
    fn encode_sets_message_size() {
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
