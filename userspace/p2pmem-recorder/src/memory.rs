// SPDX-License-Identifier: MIT OR Apache-2.0

//! Buffers of blocks, in device memory near a NIC and drives, or in host memory.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use p2pmem::{Buffer, Client, Device, Provider, Request};

use crate::sys::Memory;

/// The unit of block sizes, for direct I/O.
const PAGE: usize = 4096;

/// The bytes that are read at once to compute a checksum.
const PIECE: usize = 64 << 10;

/// Memory for blocks is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The size of a block or the number of buffers is not valid.
    #[error("{count} buffers of {block_size} bytes are not valid; use at least one, of a multiple of 4096 bytes, and less than the address space in all")]
    Invalid {
        /// The bytes of a block.
        block_size: u64,
        /// The number of buffers.
        count: usize,
    },
    /// Host memory is not available.
    #[error("mapping {len} bytes of host memory failed: {source}; use fewer or smaller buffers")]
    Host {
        /// The bytes of all buffers.
        len: usize,
        /// The error of `mmap()`.
        source: io::Error,
    },
    /// Device memory is not available.
    #[error(transparent)]
    Device(#[from] p2pmem::Error),
    /// The drive of a file or a folder is not known.
    #[error("cannot find the drive of {}: {why}; name the drive instead", path.display())]
    Drive {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        why: String,
    },
}

/// `count` buffers for one block each, at consecutive addresses. Devices and the kernel can access them at any time, so there
/// are no references to their content: the CPU copies it.
#[derive(Debug)]
pub struct BlockMemory {
    memory: Arc<Memory>,
    block_size: usize,
    count: usize,
    device: Option<(Buffer, Option<Provider>)>,
}

impl BlockMemory {
    /// Returns buffers in host memory, filled with zeros.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], [`Error::Host`].
    pub fn host(block_size: u64, count: usize) -> Result<Self, Error> {
        let (block_size, len) = check(block_size, count)?;
        let memory = Memory::host(len).map_err(|source| Error::Host { len, source })?;
        Ok(Self {
            memory: Arc::new(memory),
            block_size,
            count,
            device: None,
        })
    }

    /// Allocates buffers in device memory near `clients`: the NIC and the drives. `provider` is the identifier of the
    /// provider that must have the memory; without it, the nearest provider has the memory.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use p2pmem_recorder::memory::BlockMemory;
    ///
    /// let drive: p2pmem::PciAddr = "0000:04:00.0".parse()?;
    /// let memory = BlockMemory::near(&device, [drive], None, 64 << 10, 16)?;
    /// memory.write(3, 0, b"payload")?;
    /// assert_eq!(memory.count(), 16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`]; [`Error::Device`] with the reason if no provider can serve the request.
    pub fn near(
        device: &Device,
        clients: impl IntoIterator<Item = impl Into<Client>>,
        provider: Option<u32>,
        block_size: u64,
        count: usize,
    ) -> Result<Self, Error> {
        let (_, len) = check(block_size, count)?;
        let mut request = Request::new(len as u64).near(clients);
        if let Some(provider) = provider {
            request = request.provider(provider);
        }
        Self::from_buffer(device.alloc(&request)?, block_size, count)
    }

    /// Maps a buffer that the program allocated.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], also if the buffer is smaller than `count` blocks; [`Error::Device`].
    pub fn from_buffer(buffer: Buffer, block_size: u64, count: usize) -> Result<Self, Error> {
        let (size, len) = check(block_size, count)?;
        if buffer.size() < len as u64 {
            return Err(Error::Invalid { block_size, count });
        }
        let memory = Memory::device(buffer.map()?);
        let providers = buffer.device().providers()?;
        let provider = providers.into_iter().find(|provider| provider.id == buffer.provider());
        Ok(Self {
            memory: Arc::new(memory),
            block_size: size,
            count,
            device: Some((buffer, provider)),
        })
    }

    /// Returns the bytes of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the number of buffers.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the device memory, to register it with a NIC. `None` for host memory.
    pub fn buffer(&self) -> Option<&Buffer> {
        self.device.as_ref().map(|(buffer, _)| buffer)
    }

    /// Returns host memory, to register it with a NIC. `None` for device memory.
    pub fn host_span(&self) -> Option<&p2pmem_verbs::Span> {
        self.memory.host_span()
    }

    /// Returns the provider of the device memory, as it was at the allocation. `None` for host memory.
    pub fn provider(&self) -> Option<&Provider> {
        self.device.as_ref()?.1.as_ref()
    }

    /// Returns the address of the first buffer. The others follow, each [`block_size`](Self::block_size) bytes after the one
    /// before. The addresses are valid until the value is dropped.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Returns the bytes of all buffers.
    pub fn len(&self) -> usize {
        self.block_size * self.count
    }

    /// Whether there is no buffer, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Copies the content of a buffer from byte `at` on to `to`.
    ///
    /// # Errors
    ///
    /// `InvalidInput` if the bytes are not inside the buffer; ENODEV if the device's memory was revoked.
    pub fn read(&self, buffer: usize, at: usize, to: &mut [u8]) -> io::Result<()> {
        self.memory.read(self.inside(buffer, at, to.len())?, to)
    }

    /// Copies `from` to a buffer from byte `at` on.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn write(&self, buffer: usize, at: usize, from: &[u8]) -> io::Result<()> {
        self.memory.write(self.inside(buffer, at, from.len())?, from)
    }

    /// Returns the CRC-32C of a buffer. The CPU reads all of its bytes, which takes long for device memory.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn checksum(&self, buffer: usize) -> io::Result<u32> {
        let mut piece = vec![0; PIECE.min(self.block_size)];
        let mut checksum = 0;
        let mut at = 0;
        while at < self.block_size {
            let count = piece.len().min(self.block_size - at);
            self.read(buffer, at, &mut piece[..count])?;
            checksum = crc32c::crc32c_append(checksum, &piece[..count]);
            at += count;
        }
        Ok(checksum)
    }

    fn inside(&self, buffer: usize, at: usize, len: usize) -> io::Result<usize> {
        let fits = buffer < self.count && at.checked_add(len).is_some_and(|end| end <= self.block_size);
        if !fits {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{len} bytes at {at} of buffer {buffer} are outside of {} buffers of {} bytes",
                    self.count, self.block_size
                ),
            ));
        }
        Ok(buffer * self.block_size + at)
    }

    /// Describes the memory for people: the provider, and the path to the farthest device.
    pub fn describe(&self) -> String {
        match (self.provider(), self.buffer()) {
            (Some(provider), Some(buffer)) => {
                let path = buffer.class().map(|class| format!(", {}", class.meaning()));
                format!("{}{}", provider.addr, path.unwrap_or_default())
            }
            (None, Some(buffer)) => format!("provider {}", buffer.provider()),
            _ => "host memory".into(),
        }
    }

    /// Returns the memory of all buffers.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the bytes of a buffer in the memory.
    pub(crate) fn range(&self, buffer: usize) -> (usize, usize) {
        (buffer.saturating_mul(self.block_size), self.block_size)
    }
}

/// Returns the bytes of a block and of all blocks.
fn check(block_size: u64, count: usize) -> Result<(usize, usize), Error> {
    let invalid = || Error::Invalid { block_size, count };
    let size = usize::try_from(block_size).map_err(|_| invalid())?;
    let len = size
        .checked_mul(count)
        .filter(|&len| len > 0 && len <= isize::MAX as usize);
    match len {
        Some(len) if size % PAGE == 0 => Ok((size, len)),
        _ => Err(invalid()),
    }
}

/// Finds the drives that have the file system of `path`, as clients of requests for memory: the PCI functions of NVMe drives,
/// also below partitions, software RAID, and device mapper.
///
/// # Errors
///
/// [`Error::Drive`] if the file system is on no drive of its own (network file systems, tmpfs, overlayfs, btrfs), or a drive
/// is on no PCI function.
pub fn drives_of(path: impl AsRef<Path>) -> Result<Vec<Client>, Error> {
    let path = path.as_ref();
    let metadata = fs::metadata(path).map_err(|error| Error::Drive {
        path: path.to_owned(),
        why: error.to_string(),
    })?;
    drives_in(Path::new("/sys"), metadata.dev()).map_err(|why| Error::Drive {
        path: path.to_owned(),
        why,
    })
}

/// Finds the drives of a block device, with sysfs at `sys`.
fn drives_in(sys: &Path, device: u64) -> Result<Vec<Client>, String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let folder = sys.join(format!("dev/block/{major}:{minor}"));
    let folder = folder
        .canonicalize()
        .map_err(|_| format!("its file system is on no block device ({major}:{minor})"))?;
    let mut names = BTreeSet::new();
    lowest(&folder, 0, &mut names)?;
    let clients = names
        .iter()
        .map(|name| Client::resolve_in(sys, name).map_err(|error| error.to_string()));
    clients.collect()
}

/// Adds the names of the block devices on which the one with this folder in sysfs is built.
fn lowest(folder: &Path, depth: u32, names: &mut BTreeSet<String>) -> Result<(), String> {
    if depth > 8 {
        return Err("its block devices are nested more than 8 times".to_owned());
    }
    let mut found = below(folder);
    // The folder of a partition is in the folder of its device, which has the list.
    if found.is_empty() && folder.join("partition").exists() {
        found = folder.parent().map(below).unwrap_or_default();
    }
    if found.is_empty() {
        names.extend(folder.file_name().and_then(|name| name.to_str()).map(str::to_owned));
    }
    for folder in found {
        lowest(&folder, depth + 1, names)?;
    }
    Ok(())
}

fn below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.path().canonicalize().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem::fake::Fake;
    use std::os::unix::fs::symlink;

    #[test]
    fn invalid_sizes_are_errors() {
        for (block_size, count) in [
            (0, 1),
            (4096, 0),
            (4095, 1),
            (6144, 2),
            (4096, usize::MAX),
            (u64::MAX - 4095, 1),
        ] {
            let error = BlockMemory::host(block_size, count).unwrap_err();
            assert!(matches!(error, Error::Invalid { .. }), "{block_size} {count}: {error}");
        }
        let device = Fake::example().device();
        let buffer = device.alloc(&Request::new(8192)).unwrap();
        assert!(matches!(
            BlockMemory::from_buffer(buffer, 4096, 3),
            Err(Error::Invalid { .. })
        ));
        assert!(matches!(BlockMemory::host(1 << 40, 1 << 20), Err(Error::Host { .. })));
    }

    #[test]
    fn buffers_have_their_own_bytes() {
        let device = Fake::example().device();
        let drive: p2pmem::PciAddr = "0000:04:00.0".parse().unwrap();
        let near = BlockMemory::near(&device, [drive], None, 8192, 3).unwrap();
        let host = BlockMemory::host(8192, 3).unwrap();
        assert_eq!(near.provider().unwrap().id, near.buffer().unwrap().provider());
        assert!(host.buffer().is_none() && host.provider().is_none());
        for memory in [near, host] {
            assert_eq!((memory.len(), memory.address() % 4096), (3 * 8192, 0));
            for buffer in 0..3 {
                memory.write(buffer, 0, &[buffer as u8 + 1; 8192]).unwrap();
            }
            for buffer in 0..3 {
                let mut bytes = [0; 8192];
                memory.read(buffer, 0, &mut bytes).unwrap();
                assert_eq!(bytes, [buffer as u8 + 1; 8192]);
                assert_eq!(memory.checksum(buffer).unwrap(), crc32c::crc32c(&bytes));
            }
            for (buffer, at, len) in [
                (3, 0, 1),
                (0, 8192, 1),
                (1, 0, 8193),
                (0, usize::MAX, 2),
                (usize::MAX, 0, 1),
            ] {
                let error = memory.write(buffer, at, &vec![0; len]).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
                assert!(memory.read(buffer, at, &mut vec![0; len]).is_err());
            }
        }
    }

    #[test]
    fn memory_of_a_given_provider_or_none() {
        let fake = Fake::example();
        let device = fake.device();
        for provider in device.providers().unwrap() {
            let memory = BlockMemory::near(&device, Vec::<Client>::new(), Some(provider.id), 4096, 2).unwrap();
            assert_eq!(memory.buffer().unwrap().provider(), provider.id);
        }
        let none = BlockMemory::near(&device, Vec::<Client>::new(), Some(99), 4096, 2);
        assert!(matches!(none, Err(Error::Device(_))));
    }

    /// Makes a block device in a fake sysfs. Returns its folder.
    fn block(sys: &Path, folder: &str, number: &str) -> PathBuf {
        let folder = sys.join(folder);
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        fs::create_dir_all(folder.join("slaves")).unwrap();
        for (class, name) in [("class/block", name.as_str()), ("dev/block", number)] {
            fs::create_dir_all(sys.join(class)).unwrap();
            symlink(&folder, sys.join(class).join(name)).unwrap();
        }
        folder
    }

    #[test]
    fn drives_are_found_below_partitions_and_raid() {
        let folder = tempfile::tempdir().unwrap();
        let sys = folder.path().canonicalize().unwrap();
        for addr in ["0000:04:00.0", "0000:05:00.0"] {
            fs::create_dir_all(sys.join("devices").join(addr)).unwrap();
            fs::write(sys.join("devices").join(addr).join("vendor"), "0x1b36\n").unwrap();
        }
        let first = block(&sys, "devices/0000:04:00.0/nvme/nvme0/nvme0n1", "259:0");
        let part = block(&sys, "devices/0000:04:00.0/nvme/nvme0/nvme0n1/nvme0n1p1", "259:1");
        fs::write(part.join("partition"), "1\n").unwrap();
        let second = block(&sys, "devices/0000:05:00.0/nvme/nvme1/nvme1n1", "259:2");
        let raid = block(&sys, "devices/virtual/block/md0", "9:0");
        symlink(&part, raid.join("slaves/nvme0n1p1")).unwrap();
        symlink(&second, raid.join("slaves/nvme1n1")).unwrap();
        let raid_part = block(&sys, "devices/virtual/block/md0/md0p1", "259:3");
        fs::write(raid_part.join("partition"), "1\n").unwrap();
        block(&sys, "devices/virtual/block/loop0", "7:0");
        drop(first);

        let found = |major, minor| {
            let clients = drives_in(&sys, rustix::fs::makedev(major, minor))?;
            Ok::<_, String>(
                clients
                    .iter()
                    .map(|client| client.addr().to_string())
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(found(259, 0).unwrap(), ["0000:04:00.0"]);
        assert_eq!(found(259, 1).unwrap(), ["0000:04:00.0"]);
        for (major, minor) in [(9, 0), (259, 3)] {
            assert_eq!(found(major, minor).unwrap(), ["0000:04:00.0", "0000:05:00.0"]);
        }
        assert!(found(7, 0).unwrap_err().contains("loop0"));
        assert!(found(0, 40).unwrap_err().contains("no block device"));
    }

    #[test]
    fn drive_of_a_file_that_does_not_exist_is_an_error() {
        let error = drives_of("/does/not/exist").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("cannot find the drive of /does/not/exist: "),
            "{error}"
        );
        assert!(matches!(drives_of("/proc").unwrap_err(), Error::Drive { .. }));
    }
}
