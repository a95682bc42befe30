// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the store needs from the operating system.

use std::io;
use std::path::Path;

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The name, without the path.
    pub name: String,
    /// Whether the entry is a folder.
    pub is_folder: bool,
}

/// File operations of the store. [`Files`](super::Files) implements them with the file systems of the machine.
///
/// A write is *volatile* until an operation makes it durable: a power cut can drop a volatile write, or keep any of its
/// sectors. Creating, renaming, and removing entries is volatile until [`sync_folder`](Self::sync_folder) of the folder.
/// A rename is atomic, also between two folders of one drive.
pub trait System: Send + Sync {
    /// An open file.
    type File: Send + Sync;
    /// Keeps other processes away until it is dropped.
    type Lock: Send + Sync;

    /// Creates a folder in an existing folder.
    fn create_folder(&self, path: &Path) -> io::Result<()>;

    /// Creates a file of `size` zero bytes. The content is durable and has its place on the drive: overwriting it needs
    /// no change of the file system's metadata.
    fn create_file(&self, path: &Path, size: u64) -> io::Result<()>;

    /// Opens a file to read and write it.
    fn open(&self, path: &Path) -> io::Result<Self::File>;

    /// Returns the size of a file in bytes.
    fn size(&self, file: &Self::File) -> io::Result<u64>;

    /// Writes whole pages of 4 KiB. They are durable if the result is `Ok`.
    fn write_durable(&self, file: &Self::File, offset: u64, pages: &[u8]) -> io::Result<()>;

    /// Reads whole pages of 4 KiB.
    fn read(&self, file: &Self::File, offset: u64, pages: &mut [u8]) -> io::Result<()>;

    /// Makes all writes to the file durable that ended before.
    fn flush(&self, file: &Self::File) -> io::Result<()>;

    /// Whether payload that a program wrote to a file is volatile until [`flush`](Self::flush).
    fn payload_needs_flush(&self) -> bool;

    /// Returns the entries of a folder in ascending order.
    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>>;

    /// Renames a file or a folder, inside one drive. The new name does not exist.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;

    /// Makes durable which entries the folder has.
    fn sync_folder(&self, folder: &Path) -> io::Result<()>;

    /// Locks the file `path`, which exists. Fails with `WouldBlock` if another process has the lock.
    fn lock(&self, path: &Path) -> io::Result<Self::Lock>;

    /// Returns a random number.
    fn random(&self) -> io::Result<u64>;
}
