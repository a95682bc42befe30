// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory that a driver published, from the kernel's file `p2pmem/allocate`: each `mmap()` of the file allocates
//! memory.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::source::{Found, Piece, Place, Refusal, Source};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::inventory::{memory_device_at, Availability};
use crate::pci::{addresses_in, folder_of};
use crate::sys::{may_use, Exported, Region};

/// The published memory of a machine.
pub(super) struct SysfsSource {
    root: PathBuf,
}

impl SysfsSource {
    /// Creates the source of the machine whose file system is at `root`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if no driver has published memory; [`Error::Open`] if the program may not open any of it.
    pub(super) fn new(root: &Path) -> Result<Self> {
        let source = Self { root: root.to_owned() };
        let mut denied = None;
        for found in source.survey()? {
            let file = source.file(found.place);
            match may_use(&file) {
                Ok(()) => return Ok(source),
                Err(error) => denied = Some(Error::Open { path: file, error }),
            }
        }
        Err(denied.unwrap_or_else(|| Error::Unavailable {
            backend: Backend::Sysfs,
            why: "no driver has published memory, or the kernel is older than 6.2".into(),
            remedy: "use a drive with a controller memory buffer (CMB); `p2pmemctl scan --all` shows what each device needs",
        }))
    }

    fn file(&self, place: Place) -> PathBuf {
        folder_of(&self.root.join("sys"), place.addr).join("p2pmem/allocate")
    }
}

impl Source for SysfsSource {
    fn backend(&self) -> Backend {
        Backend::Sysfs
    }

    fn root(&self) -> &Path {
        &self.root
    }

    fn survey(&self) -> Result<Vec<Found>> {
        let sys = self.root.join("sys");
        let published = addresses_in(&sys)?
            .into_iter()
            .filter(|addr| folder_of(&sys, *addr).join("p2pmem/allocate").exists());
        let found = published.filter_map(|addr| {
            let memory_device = memory_device_at(&self.root, addr)?;
            let is_ready = |source: &crate::inventory::Source| {
                source.backend == Backend::Sysfs && source.availability == Availability::Ready
            };
            let pool = memory_device
                .pool
                .filter(|_| memory_device.sources.iter().any(is_ready))?;
            Some(Found {
                place: Place {
                    addr: memory_device.device.addr,
                    bar: None,
                },
                size: pool.size,
                free: pool.available,
                largest: pool.available,
                pinned: 0,
                device: memory_device.device,
            })
        });
        Ok(found.collect())
    }

    fn take(&self, place: Place, len: u64, _align: u64) -> std::result::Result<Arc<dyn Piece>, Refusal> {
        let path = self.file(place);
        let failed = |error| {
            Refusal::Unusable(Error::Open {
                path: path.clone(),
                error,
            })
        };
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let inode = inode(&file).map_err(failed)?;
        let len = usize::try_from(len).map_err(|_| Refusal::Full)?;
        match Region::map(&file, 0, len) {
            Ok(region) => Ok(Arc::new(Mapped {
                region: Arc::new(region),
                inode,
                path,
            })),
            // Another program took the memory first, or the free memory is not in one piece.
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => Err(Refusal::Full),
            Err(error) => Err(failed(error)),
        }
    }
}

/// Returns device and inode of a file.
fn inode(file: &File) -> io::Result<(u64, u64)> {
    file.metadata().map(|metadata| (metadata.dev(), metadata.ino()))
}

/// An allocation, which is a mapping. The kernel frees the memory after the mapping and all I/O with the memory end.
struct Mapped {
    region: Arc<Region>,
    /// Device and inode of the mapped file. A driver that publishes its memory again creates a new file.
    inode: (u64, u64),
    path: PathBuf,
}

impl Piece for Mapped {
    fn bar_offset(&self) -> Option<u64> {
        None
    }

    fn is_live(&self) -> bool {
        let now = self.path.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        now.is_ok_and(|now| now == self.inode)
    }

    fn mappings(&self) -> u32 {
        // One of the references is `self.region`.
        u32::try_from(Arc::strong_count(&self.region) - 1).unwrap_or(u32::MAX)
    }

    fn exports(&self) -> u32 {
        0
    }

    fn map(self: Arc<Self>) -> io::Result<Arc<Region>> {
        Ok(self.region.clone())
    }

    fn export(self: Arc<Self>, _offset: u64, _len: u64) -> io::Result<Exported> {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
}
