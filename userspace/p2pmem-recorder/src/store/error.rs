// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of the store.

use std::io;
use std::path::{Path, PathBuf};

/// The result of an operation of the store.
pub type Result<T> = std::result::Result<T, Error>;

/// An operation of the store failed. No error affects a block that was acknowledged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{what} {} failed: {source}; check the drive, and open the store again to repair unfinished changes", path.display())]
    Io {
        /// The operation, such as "reading".
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The folder of a drive has no store.
    #[error("{} has no store; mount the drive, or prepare the folder if the drive is new", path.display())]
    NotPrepared {
        /// The folder of the drive.
        path: PathBuf,
    },
    /// Another process has the store of this drive open.
    #[error("the store in {} is open in another process; stop that process", path.display())]
    Locked {
        /// The folder of the drive.
        path: PathBuf,
    },
    /// The name of a LUN or a stream is not valid.
    #[error("invalid name {name:?}; use 1 to 64 characters out of a-z, A-Z, 0-9, _ and -")]
    InvalidName {
        /// The name.
        name: String,
    },
    /// A size or a number is not valid.
    #[error("invalid {what}: {value}; {remedy}")]
    InvalidValue {
        /// The option.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The valid values.
        remedy: &'static str,
    },
    /// A LUN or a stream of this name exists.
    #[error("{name} exists; choose another name, or delete it")]
    Exists {
        /// The name.
        name: String,
    },
    /// An earlier creation or deletion under this name failed in the middle.
    #[error("an earlier creation or deletion of {name} did not finish; open the store again to finish it")]
    Unfinished {
        /// The name.
        name: String,
    },
    /// A LUN is being created, which excludes other changes of LUNs.
    #[error("LUN {name} is being created, and writes all of its bytes; try again when it is complete")]
    Busy {
        /// The LUN that is being created.
        name: String,
    },
    /// There is no such LUN, stream, channel, recording, or block.
    #[error("there is no {what} {name}")]
    NotFound {
        /// The kind of the thing.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The channel has a writer.
    #[error("channel {channel} has a writer; wait until the writer ends, or use another channel")]
    HasWriter {
        /// The channel.
        channel: String,
    },
    /// The thing that should be deleted has a writer or a reader.
    #[error("{name} is in use; stop its writers and readers first")]
    InUse {
        /// The LUN, stream, or recording.
        name: String,
    },
    /// All segments of the LUN are in use. Nothing was overwritten.
    #[error("LUN {lun} is full; delete recordings, or use another LUN")]
    Full {
        /// The LUN.
        lun: String,
    },
    /// All drives of the LUN failed while this writer used them.
    #[error("all drives of LUN {lun} failed, {} last: {source}; check the drives", drive.display())]
    DrivesFailed {
        /// The LUN.
        lun: String,
        /// The drive that failed last.
        drive: PathBuf,
        /// Its error.
        source: io::Error,
    },
    /// The drive failed while the writer used it. Nothing is known about the block.
    #[error("{} failed while a block was written; write the block again, to another drive", drive.display())]
    DriveFailed {
        /// The folder of the drive.
        drive: PathBuf,
    },
    /// The recording has a block of this sequence number.
    #[error("block {sequence} is recorded; a recording has each sequence number once")]
    Duplicate {
        /// The sequence number.
        sequence: u64,
    },
    /// The payload could not be written to, or read from, the drive.
    #[error("transferring block {sequence} failed: {source}")]
    Payload {
        /// The sequence number.
        sequence: u64,
        /// The error of the transfer.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A file does not have the content that the store wrote.
    #[error("{} is damaged: {why}; restore the file, or delete what it belongs to", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
    /// A file has a format that this program does not know.
    #[error("{} has version {version} of the format; use a newer program", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version of the format.
        version: u64,
    },
    /// Drives of a LUN are missing.
    #[error("LUN {lun} has {found} of its {members} drives; mount the missing drives, and open the store again")]
    Incomplete {
        /// The LUN.
        lun: String,
        /// The number of drives that were found.
        found: usize,
        /// The number of drives of the LUN.
        members: usize,
    },
}

/// Adds the operation and the path to the error of a system call.
pub(crate) trait Context<T> {
    fn context(self, what: &'static str, path: &Path) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn context(self, what: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Io {
            what,
            path: path.to_owned(),
            source,
        })
    }
}

/// Returns the error of the system call in `error`, or an error of the kind `Other`.
pub(crate) fn into_io(error: Error) -> io::Error {
    match error {
        Error::Io { source, .. } => source,
        other => io::Error::other(other),
    }
}
