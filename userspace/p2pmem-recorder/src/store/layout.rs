// SPDX-License-Identifier: MIT OR Apache-2.0

//! The names of files and folders on a drive.

use std::path::{Path, PathBuf};

/// The suffix of a LUN or a stream whose creation did not finish.
pub(crate) const NEW: &str = ".new";
/// The suffix of a LUN, a stream, or a recording that is being deleted.
pub(crate) const DELETED: &str = ".deleted";
/// The header of a LUN.
pub(crate) const LUN_FILE: &str = "lun";
/// The header of a stream.
pub(crate) const STREAM_FILE: &str = "stream";

/// The folder of the store on a drive.
pub(crate) fn root(drive: &Path) -> PathBuf {
    drive.join("p2pmem-recorder")
}

/// The file that an open store locks.
pub(crate) fn lock(drive: &Path) -> PathBuf {
    root(drive).join("lock")
}

/// The folder of the LUNs on a drive.
pub(crate) fn luns(drive: &Path) -> PathBuf {
    root(drive).join("luns")
}

/// The folder of the segments that no recording uses.
pub(crate) fn free(lun: &Path) -> PathBuf {
    lun.join("free")
}

/// The folder of the streams of a LUN.
pub(crate) fn streams(lun: &Path) -> PathBuf {
    lun.join("streams")
}

/// The folder of a channel.
pub(crate) fn channel(stream: &Path, channel: u32) -> PathBuf {
    stream.join(channel.to_string())
}

/// The name of the folder of a recording.
pub(crate) fn recording(number: u64) -> String {
    format!("{number:06}")
}

/// The file name of a segment.
pub(crate) fn segment(number: u64) -> String {
    format!("{number:08}")
}

/// Returns the drive that has a file. If one drive is mounted below another one, this is the lower one.
pub(crate) fn drive_of<'a>(drives: impl Iterator<Item = &'a Path>, file: &Path) -> Option<&'a Path> {
    drives
        .filter(|drive| file.starts_with(drive))
        .max_by_key(|drive| drive.as_os_str().len())
}

/// Splits the suffix off the name of a folder. Returns whether there was one.
pub(crate) fn split_suffix(name: &str) -> (&str, bool) {
    let plain = name.strip_suffix(NEW).or_else(|| name.strip_suffix(DELETED));
    (plain.unwrap_or(name), plain.is_some())
}
