// SPDX-License-Identifier: MIT OR Apache-2.0

//! The client's DMA mappings, by bus address. A mapping with a file descriptor is mapped in this process; of one
//! without, only address, length and permissions are known.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;

use crate::memory::FileId;
use crate::proto;
use crate::sys::SharedMapping;

/// Maximum number of mappings; the server reports it to the client as `max_dma_maps`.
pub(crate) const MAX_MAPS: usize = 65535;

#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) last: u64,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The memory, if the mapping has a file descriptor.
    pub(super) memory: Option<(SharedMapping, FileId)>,
}

#[derive(Debug, Default)]
pub(super) struct DmaTable {
    /// By first address. Mappings do not overlap.
    mappings: BTreeMap<u64, Mapping>,
    /// Files that hold guest memory.
    host: HashSet<FileId>,
    /// The client has sent its initial mappings. A memfd that it maps from now on may be the memory of a peer.
    initial_maps_done: bool,
}

impl DmaTable {
    /// Looks up `address`. Returns the mapping and its first address, if any, and for how many of `len` bytes the
    /// result holds.
    pub(super) fn find(&self, address: u64, len: u64) -> (Option<(u64, &Mapping)>, u64) {
        if let Some((start, mapping)) = self.mappings.range(..=address).next_back() {
            if address <= mapping.last {
                return (
                    Some((*start, mapping)),
                    len.min((mapping.last - address).saturating_add(1)),
                );
            }
        }
        let free = self
            .mappings
            .range(address..)
            .next()
            .map_or(len, |(start, _)| start - address);
        (None, len.min(free))
    }

    /// Whether a file holds guest memory.
    pub(super) fn is_host(&self, file: &FileId) -> bool {
        self.host.contains(file)
    }

    /// Adds a mapping. Fails with `EEXIST` if it overlaps another one, and with `ENOSPC` if there are [`MAX_MAPS`].
    pub(super) fn map(&mut self, request: &proto::DmaMap, file: Option<MappedFile>) -> Result<(), Errno> {
        let last = last_address(request.address, request.size)?;
        if self.mappings.len() >= MAX_MAPS {
            return Err(Errno::NOSPC);
        }
        if self
            .mappings
            .range(..=last)
            .next_back()
            .is_some_and(|(_, mapping)| mapping.last >= request.address)
        {
            return Err(Errno::EXIST);
        }
        let memory = file.map(|file| {
            // Guest memory is the file at address 0, and all memfds of the initial mappings: these are sent before any
            // BAR of a peer can have an address.
            if request.address == 0 || file.memfd && !self.initial_maps_done {
                self.host.insert(file.id);
            }
            (file.mapping, file.id)
        });
        self.mappings.insert(
            request.address,
            Mapping {
                last,
                readable: request.flags & proto::DMA_READABLE != 0,
                writable: request.flags & proto::DMA_WRITABLE != 0,
                memory,
            },
        );
        Ok(())
    }

    /// Removes all mappings in the range. Fails with `EINVAL` if a mapping is only partly in the range.
    pub(super) fn unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        let last = last_address(address, size)?;
        let cut_before = self
            .mappings
            .range(..address)
            .next_back()
            .is_some_and(|(_, mapping)| mapping.last >= address);
        let cut_after = self
            .mappings
            .range(address..=last)
            .next_back()
            .is_some_and(|(_, mapping)| mapping.last > last);
        if cut_before || cut_after {
            return Err(Errno::INVAL);
        }
        self.mappings.retain(|start, _| !(address..=last).contains(start));
        Ok(())
    }

    /// Removes all mappings.
    pub(super) fn clear(&mut self) {
        self.mappings.clear();
    }

    /// Removes all state of the client.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Records that the client has sent its initial mappings.
    pub(super) fn end_initial_maps(&mut self) {
        self.initial_maps_done = true;
    }
}

/// A mapped part of a file.
pub(super) struct MappedFile {
    mapping: SharedMapping,
    id: FileId,
    memfd: bool,
}

impl MappedFile {
    /// Maps a part of a file. Fails with `EINVAL` if a regular file is shorter than `offset + size`.
    pub(super) fn new(fd: &OwnedFd, offset: u64, size: u64, writable: bool) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(fd)?;
        let end = offset.checked_add(size).ok_or(Errno::INVAL)?;
        // Accesses beyond the end of a regular file raise SIGBUS in this process. Character devices have no size and
        // check the range in mmap.
        let regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        if regular && u64::try_from(stat.st_size).map_or(true, |have| have < end) {
            return Err(Errno::INVAL);
        }
        let mapping = SharedMapping::map(fd.as_fd(), offset, size, writable)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
        Ok(Self {
            mapping,
            id: FileId::from_stat(&stat),
            memfd: link.as_bytes().starts_with(b"/memfd:"),
        })
    }
}

/// Returns the last address of a range of the client. Fails with `EINVAL` if the range is empty or exceeds the address
/// space.
pub(super) fn last_address(address: u64, size: u64) -> Result<u64, Errno> {
    size.checked_sub(1)
        .and_then(|rest| address.checked_add(rest))
        .ok_or(Errno::INVAL)
}
