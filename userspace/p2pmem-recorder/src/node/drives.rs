// SPDX-License-Identifier: MIT OR Apache-2.0

//! The drives of a node: the block devices below the folders, their counters, and their errors.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::status::Drive;

/// Bytes of a sector in `/sys/dev/block/*/stat`.
const SECTOR: u64 = 512;

/// The drives of a node.
#[derive(Debug)]
pub(super) struct Drives {
    drives: Vec<(PathBuf, Option<BlockDevice>)>,
    /// The number of errors of a drive, and the last one.
    errors: Mutex<BTreeMap<PathBuf, (u64, String)>>,
}

/// A block device, by its folder in sysfs.
#[derive(Debug)]
struct BlockDevice {
    name: String,
    folder: PathBuf,
}

impl BlockDevice {
    /// Returns the block device of the file system that has `path`.
    fn of(path: &Path) -> Option<Self> {
        let device = fs::metadata(path).ok()?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let folder = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
        let name = folder.file_name()?.to_string_lossy().into_owned();
        Some(Self { name, folder })
    }

    /// Returns bytes read, bytes written, and the number of operations in progress.
    fn counters(&self) -> (u64, u64, u64) {
        let text = fs::read_to_string(self.folder.join("stat")).unwrap_or_default();
        parse(&text)
    }
}

/// Parses `stat` of a block device: its third, seventh, and ninth number.
fn parse(text: &str) -> (u64, u64, u64) {
    let numbers: Vec<u64> = text.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let number = |at: usize| numbers.get(at).copied().unwrap_or(0);
    (number(2) * SECTOR, number(6) * SECTOR, number(8))
}

impl Drives {
    pub(super) fn new(folders: &[PathBuf]) -> Self {
        Self {
            drives: folders
                .iter()
                .map(|folder| (folder.clone(), BlockDevice::of(folder)))
                .collect(),
            errors: Mutex::default(),
        }
    }

    pub(super) fn failed(&self, folder: &Path, error: &io::Error) {
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, last) = errors.entry(folder.to_owned()).or_default();
        *count += 1;
        *last = error.to_string();
    }

    pub(super) fn status(&self) -> Vec<Drive> {
        let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let drive = |(folder, device): &(PathBuf, Option<BlockDevice>)| {
            let (read, written, in_flight) = device.as_ref().map_or((0, 0, 0), BlockDevice::counters);
            // Without an answer of the file system, no space is known.
            let (size, free) = rustix::fs::statvfs(folder).map_or((0, 0), |space| {
                (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
            });
            Drive {
                folder: folder.clone(),
                size,
                free,
                device: device.as_ref().map(|device| device.name.clone()),
                written,
                read,
                in_flight,
                errors: errors.get(folder).map_or(0, |(count, _)| *count),
                error: errors.get(folder).map(|(_, last)| last.clone()),
            }
        };
        self.drives.iter().map(drive).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_parsed() {
        let text = "  101 0 2048 15 7 3 4096 22 5 40 37 0 0 0 0 0 0\n";
        assert_eq!(parse(text), (2048 * 512, 4096 * 512, 5));
        assert_eq!(parse(""), (0, 0, 0));
    }
}
