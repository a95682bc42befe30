// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the client said is behind which bus address: with a descriptor, mapped here; without one, only known to be there.

use std::collections::{BTreeMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;

use crate::memory::FileId;
use crate::proto;
use crate::sys::Window;

/// Most mappings at once, as announced to the client.
pub(crate) const MAX_MAPS: usize = 65535;

#[derive(Debug)]
pub(super) struct Map {
    pub(super) last: u64,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The memory, if it came with a descriptor.
    pub(super) window: Option<(Window, FileId)>,
}

#[derive(Debug, Default)]
pub(super) struct Table {
    /// By first address; no two overlap.
    maps: BTreeMap<u64, Map>,
    /// Files known to hold guest memory.
    host: HashSet<FileId>,
    /// The client has mapped its memory and begun to use the device: later mappings may be of any kind.
    settled: bool,
}

impl Table {
    /// What is at `address`: the mapping, if any, and how many of `len` bytes have that answer.
    pub(super) fn find(&self, address: u64, len: u64) -> (Option<(u64, &Map)>, u64) {
        if let Some((start, map)) = self.maps.range(..=address).next_back() {
            if address <= map.last {
                return (Some((*start, map)), len.min((map.last - address).saturating_add(1)));
            }
        }
        let free = self
            .maps
            .range(address..)
            .next()
            .map_or(len, |(start, _)| start - address);
        (None, len.min(free))
    }

    /// Whether a file holds guest memory.
    pub(super) fn is_host(&self, file: &FileId) -> bool {
        self.host.contains(file)
    }

    /// Makes an address range known.
    pub(super) fn map(&mut self, request: &proto::DmaMap, file: Option<MappedFile>) -> Result<(), Errno> {
        let last = last_address(request.address, request.size)?;
        if self.maps.len() >= MAX_MAPS {
            return Err(Errno::NOSPC);
        }
        if self
            .maps
            .range(..=last)
            .next_back()
            .is_some_and(|(_, map)| map.last >= request.address)
        {
            return Err(Errno::EXIST);
        }
        let window = file.map(|file| {
            // The guest's memory is what is at address 0, and the memfds known from the start, before any BAR of a peer
            // can have an address.
            if request.address == 0 || file.memfd && !self.settled {
                self.host.insert(file.id);
            }
            (file.window, file.id)
        });
        self.maps.insert(
            request.address,
            Map {
                last,
                readable: request.flags & proto::DMA_READABLE != 0,
                writable: request.flags & proto::DMA_WRITABLE != 0,
                window,
            },
        );
        Ok(())
    }

    /// Takes away all mappings inside of the range. One that reaches over its border is an error.
    pub(super) fn unmap(&mut self, address: u64, size: u64) -> Result<(), Errno> {
        let last = last_address(address, size)?;
        let cut_before = self
            .maps
            .range(..address)
            .next_back()
            .is_some_and(|(_, map)| map.last >= address);
        let cut_after = self
            .maps
            .range(address..=last)
            .next_back()
            .is_some_and(|(_, map)| map.last > last);
        if cut_before || cut_after {
            return Err(Errno::INVAL);
        }
        self.maps.retain(|start, _| !(address..=last).contains(start));
        Ok(())
    }

    /// Takes away all mappings.
    pub(super) fn clear(&mut self) {
        self.maps.clear();
    }

    /// Forgets the client altogether.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// Records that the client has mapped all memory that exists at the start.
    pub(super) fn settle(&mut self) {
        self.settled = true;
    }
}

/// A part of a file, mapped.
pub(super) struct MappedFile {
    window: Window,
    id: FileId,
    memfd: bool,
}

impl MappedFile {
    /// Maps a part of a file, which must hold that part.
    pub(super) fn new(fd: &OwnedFd, offset: u64, size: u64, writable: bool) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(fd)?;
        let end = offset.checked_add(size).ok_or(Errno::INVAL)?;
        // Accesses past a file's end would kill this process; devices have no size and take care of themselves.
        let regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        if regular && u64::try_from(stat.st_size).map_or(true, |have| have < end) {
            return Err(Errno::INVAL);
        }
        let window = Window::map(fd.as_fd(), offset, size, writable)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
        Ok(Self {
            window,
            id: FileId::from_stat(&stat),
            memfd: link.as_bytes().starts_with(b"/memfd:"),
        })
    }
}

/// Checks a range from the client and returns its last address.
pub(super) fn last_address(address: u64, size: u64) -> Result<u64, Errno> {
    size.checked_sub(1)
        .and_then(|rest| address.checked_add(rest))
        .ok_or(Errno::INVAL)
}
