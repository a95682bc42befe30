// SPDX-License-Identifier: MIT OR Apache-2.0

//! Files that are open for direct I/O (O_DIRECT), as peer-to-peer transfers need them.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::{Error, Result};
use crate::sys::is_direct;

/// Options to open a file for direct I/O, as in [`std::fs::OpenOptions`]. All options are off initially.
///
/// ```no_run
/// use p2pmem::DirectOptions;
///
/// // Creates the file, or opens the existing file without truncating it.
/// let file = DirectOptions::new().read(true).write(true).create(true).open("/mnt/nvme0/results")?;
/// # let _ = file;
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct DirectOptions(OpenOptions);

impl Default for DirectOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl DirectOptions {
    /// Creates options without access: set [`read`](Self::read), [`write`](Self::write) or both.
    pub fn new() -> Self {
        Self(OpenOptions::new())
    }

    /// Opens the file for reading, as [`Mapping::read_from`](crate::Mapping::read_from) needs.
    pub fn read(mut self, read: bool) -> Self {
        self.0.read(read);
        self
    }

    /// Opens the file for writing, as [`Mapping::write_to`](crate::Mapping::write_to) needs. A file that does not exist
    /// is an error unless [`create`](Self::create) is set.
    pub fn write(mut self, write: bool) -> Self {
        self.0.write(write);
        self
    }

    /// Creates the file if it does not exist. Needs [`write`](Self::write).
    pub fn create(mut self, create: bool) -> Self {
        self.0.create(create);
        self
    }

    /// Creates the file, and fails if it exists. Needs [`write`](Self::write).
    pub fn create_new(mut self, create_new: bool) -> Self {
        self.0.create_new(create_new);
        self
    }

    /// Truncates the file to 0 bytes. Needs [`write`](Self::write).
    pub fn truncate(mut self, truncate: bool) -> Self {
        self.0.truncate(truncate);
        self
    }

    /// Opens a file or block device with these options and O_DIRECT.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] with ENOENT (the file does not exist), EEXIST ([`create_new`](Self::create_new) and the file
    /// exists), EACCES, or EINVAL (the file system does not support direct I/O, or the options contradict each other).
    pub fn open(&self, path: impl AsRef<Path>) -> Result<File> {
        let path = path.as_ref();
        let mut options = self.0.clone();
        options.custom_flags(libc::O_DIRECT);
        options.open(path).map_err(|error| Error::Open {
            path: path.to_owned(),
            error,
        })
    }
}

/// Opens an existing file or block device for reading by direct I/O. To write, use [`DirectOptions`].
///
/// # Errors
///
/// Those of [`DirectOptions::open`].
pub fn open_direct(path: impl AsRef<Path>) -> Result<File> {
    DirectOptions::new().read(true).open(path)
}

/// Fails with [`Error::NotDirect`] if the file is not open with O_DIRECT: its I/O would use the page cache.
pub(crate) fn require_direct(file: &File) -> Result<()> {
    match is_direct(file) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::NotDirect),
        Err(error) => Err(Error::Io {
            what: "reading the flags",
            offset: 0,
            error,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_created_only_if_requested() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("missing");
        for options in [
            DirectOptions::new().read(true),
            DirectOptions::new().write(true),
            DirectOptions::new().read(true).write(true).truncate(true),
        ] {
            let error = options.open(&path).unwrap_err();
            assert_eq!(error.errno(), Some(libc::ENOENT), "{options:?}");
        }
        assert_eq!(open_direct(&path).unwrap_err().errno(), Some(libc::ENOENT));
        assert!(!path.exists());
        // If the file system does not support direct I/O, the kernel creates the file but does not open it.
        match DirectOptions::new().write(true).create(true).open(&path) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.errno(), Some(libc::EINVAL)),
        }
        assert!(path.exists());
        let again = DirectOptions::new().write(true).create_new(true).open(&path);
        assert_eq!(again.unwrap_err().errno(), Some(libc::EEXIST));
    }
}
