// SPDX-License-Identifier: MIT OR Apache-2.0

//! The store's operations on the file systems of the machine.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::ReadWriteFlags;

use super::format::PAGE;
use super::system::{Entry, System};

/// The bytes that one write of zeros transfers.
const ZEROS: usize = 4 << 20;

/// Files on the file systems of the machine, open for direct I/O (O_DIRECT) unless [`cached`](Self::cached) is set.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Files {
    direct: bool,
    flush: bool,
    sparse: bool,
}

impl Default for Files {
    fn default() -> Self {
        Self::new()
    }
}

impl Files {
    /// Files for direct I/O. Each write is durable when it ends (O_DSYNC): on ext4 and XFS a write with FUA to a drive that
    /// supports it, because the store only overwrites bytes that were written before.
    pub fn new() -> Self {
        Self {
            direct: true,
            flush: false,
            sparse: false,
        }
    }

    /// Opens files without O_DSYNC. [`Writer::commit`](super::Writer::commit) flushes the payload of its blocks before their
    /// records. This suits drives without FUA, and small blocks.
    pub fn flush_at_commit(mut self, flush: bool) -> Self {
        self.flush = flush;
        self
    }

    /// Uses the page cache in host memory. Device memory cannot be the source of such writes. For tests, and file systems
    /// without direct I/O.
    pub fn cached(mut self, cached: bool) -> Self {
        self.direct = !cached;
        self
    }

    /// Creates files without allocating their bytes. Only for simulations: writes to such files allocate, and can fail.
    pub fn sparse(mut self, sparse: bool) -> Self {
        self.sparse = sparse;
        self
    }

    fn options(self) -> OpenOptions {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        options
    }

    fn direct_flag(self) -> OFlags {
        if self.direct {
            OFlags::DIRECT
        } else {
            OFlags::empty()
        }
    }
}

/// Zero bytes at an address that direct I/O accepts.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + PAGE];
        // The vector does not grow, so the address stays.
        let start = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        Self { bytes, start, length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }
}

impl System for Files {
    type File = File;
    type Lock = File;

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path, size: u64) -> io::Result<()> {
        let mut options = self.options();
        let file = options
            .create_new(true)
            .custom_flags(self.direct_flag().bits() as i32)
            .open(path)?;
        if self.sparse {
            return file.set_len(size);
        }
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size) {
            // The zeros below allocate.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
        let mut zeros = Aligned::new(ZEROS.min(usize::try_from(size).unwrap_or(ZEROS)));
        let mut done = 0;
        while done < size {
            let bytes = zeros.bytes();
            let count = bytes.len().min(usize::try_from(size - done).unwrap_or(usize::MAX));
            file.write_all_at(&bytes[..count], done)?;
            done += count as u64;
        }
        file.sync_all()
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        // On Linux, OFlags::DSYNC of rustix 1.1 is O_SYNC: each write would also commit the modification time to the journal.
        let sync = if self.flush { 0 } else { libc::O_DSYNC };
        let flags = self.direct_flag().bits() as i32 | sync;
        self.options().custom_flags(flags).open(path)
    }

    fn size(&self, file: &File) -> io::Result<u64> {
        Ok(file.metadata()?.len())
    }

    fn write_durable(&self, file: &File, offset: u64, pages: &[u8]) -> io::Result<()> {
        let mut buffer = Aligned::new(pages.len());
        let bytes = buffer.bytes();
        bytes.copy_from_slice(pages);
        let mut done = 0;
        while done < bytes.len() {
            let slices = [IoSlice::new(&bytes[done..])];
            match rustix::io::pwritev2(file, &slices, offset + done as u64, ReadWriteFlags::DSYNC) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn read(&self, file: &File, offset: u64, pages: &mut [u8]) -> io::Result<()> {
        let mut buffer = Aligned::new(pages.len());
        file.read_exact_at(buffer.bytes(), offset)?;
        pages.copy_from_slice(buffer.bytes());
        Ok(())
    }

    fn flush(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    fn payload_needs_flush(&self) -> bool {
        self.flush
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            entries.push(Entry {
                name: entry.file_name().to_string_lossy().into_owned(),
                is_folder: entry.file_type()?.is_dir(),
            });
        }
        entries.sort();
        Ok(entries)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }

    fn lock(&self, path: &Path) -> io::Result<File> {
        let file = File::open(path)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    }

    fn random(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        if count != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(u64::from_ne_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn created_file_is_zero_and_writes_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        for files in [
            Files::new().cached(true),
            Files::new().cached(true).flush_at_commit(true),
        ] {
            let path = folder.path().join(format!("file{}", files.flush));
            files.create_file(&path, 3 * PAGE as u64).unwrap();
            assert_eq!(
                files.create_file(&path, 4096).unwrap_err().kind(),
                io::ErrorKind::AlreadyExists
            );
            let file = files.open(&path).unwrap();
            assert_eq!(files.size(&file).unwrap(), 3 * PAGE as u64);
            files.write_durable(&file, PAGE as u64, &[7; PAGE]).unwrap();
            files.flush(&file).unwrap();
            let mut bytes = [1; 3 * PAGE];
            files.read(&file, 0, &mut bytes).unwrap();
            assert!(bytes
                .iter()
                .enumerate()
                .all(|(at, &byte)| byte == if at / PAGE == 1 { 7 } else { 0 }));
        }
        let listed = Files::new().list(folder.path()).unwrap();
        assert_eq!(listed.len(), 2);
        assert!(listed.iter().all(|entry| !entry.is_folder));
    }

    #[test]
    fn opened_file_syncs_data_without_its_times() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [0; PAGE]).unwrap();
        for (flush, expected) in [(false, libc::O_DSYNC), (true, 0)] {
            let files = Files::new().cached(true).flush_at_commit(flush);
            let flags = rustix::fs::fcntl_getfl(files.open(&path).unwrap()).unwrap();
            // O_SYNC is O_DSYNC and one more bit.
            assert_eq!(flags.bits() as i32 & libc::O_SYNC, expected);
        }
    }

    #[test]
    fn second_lock_of_a_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        fs::write(&path, "").unwrap();
        let files = Files::new();
        let lock = files.lock(&path).unwrap();
        assert_eq!(files.lock(&path).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(lock);
        files.lock(&path).unwrap();
    }

    #[test]
    fn buffers_are_aligned() {
        for length in [PAGE, 3 * PAGE] {
            let mut buffer = Aligned::new(length);
            assert_eq!(buffer.bytes().as_ptr() as usize % PAGE, 0);
            assert_eq!(buffer.bytes().len(), length);
        }
    }
}
