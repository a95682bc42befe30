// SPDX-License-Identifier: MIT OR Apache-2.0

//! The drives of a node: the block devices below the folders, their counters, and their errors.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::status::{Drive, DriveError};
use crate::store::drive_of;

/// Bytes of a sector in `/sys/dev/block/*/stat`.
const SECTOR: u64 = 512;

/// What a drive shows at a moment.
#[derive(Debug, Clone, Default)]
pub struct DriveCounters {
    /// The block device, such as `nvme0n1`.
    pub device: Option<String>,
    /// Bytes of the file system.
    pub size: u64,
    /// Bytes of the file system that are free.
    pub free: u64,
    /// Bytes that the drive has written.
    pub written: u64,
    /// Bytes that the drive has read.
    pub read: u64,
    /// The number of reads and writes in progress.
    pub in_flight: u64,
}

/// Replaces the counters of drives, for tests and examples whose folders are on no drive of their own.
#[derive(Clone)]
pub struct SimulatedDrives(Arc<dyn Fn(&Path) -> DriveCounters + Send + Sync>);

impl SimulatedDrives {
    /// Returns simulated drives. `counters` gets the folder of a drive.
    pub fn new(counters: impl Fn(&Path) -> DriveCounters + Send + Sync + 'static) -> Self {
        Self(Arc::new(counters))
    }
}

impl std::fmt::Debug for SimulatedDrives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedDrives").finish_non_exhaustive()
    }
}

/// The drives of a node.
#[derive(Debug)]
pub(super) struct Drives {
    drives: Vec<(PathBuf, Option<BlockDevice>)>,
    simulated: Option<SimulatedDrives>,
    errors: Mutex<BTreeMap<PathBuf, Errors>>,
    /// Whether an error is shown, so that sessions take no lock while there is none.
    has_errors: AtomicBool,
}

/// The errors of a drive.
#[derive(Debug, Clone, Default)]
struct Errors {
    count: u64,
    /// The last error, until it goes away.
    last: Option<DriveError>,
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
    pub(super) fn new(folders: &[PathBuf], simulated: Option<SimulatedDrives>) -> Self {
        Self {
            drives: folders
                .iter()
                .map(|folder| (folder.clone(), BlockDevice::of(folder)))
                .collect(),
            simulated,
            errors: Mutex::default(),
            has_errors: AtomicBool::new(false),
        }
    }

    fn errors(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Errors>> {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the drive's block device and folder, for people.
    pub(super) fn describe(&self, folder: &Path) -> String {
        let found = self.drives.iter().find(|(other, _)| other == folder);
        match found.and_then(|(folder, device)| self.counters(folder, device.as_ref()).device) {
            Some(device) => format!("{device} at {}", folder.display()),
            None => folder.display().to_string(),
        }
    }

    /// Returns the folder of the drive that has a file.
    pub(super) fn of_file(&self, path: &Path) -> Option<&Path> {
        drive_of(self.drives.iter().map(|(folder, _)| folder.as_path()), path)
    }

    pub(super) fn failed(&self, folder: &Path, error: DriveError) {
        let mut errors = self.errors();
        let of = errors.entry(folder.to_owned()).or_default();
        of.count += 1;
        of.last = Some(error);
        self.has_errors.store(true, Ordering::Release);
    }

    /// Removes the last error of a drive, if there is one and `goes` says so. Returns whether it did.
    fn remove(&self, folder: &Path, goes: impl FnOnce(&mut DriveError) -> bool) -> bool {
        let mut errors = self.errors();
        let removed = errors.get_mut(folder).and_then(|of| of.last.take_if(goes)).is_some();
        let has_errors = errors.values().any(|of| of.last.is_some());
        self.has_errors.store(has_errors, Ordering::Release);
        removed
    }

    /// Removes the error of a drive that `session` used without an error, if it is the error of an earlier session. What a session
    /// that ran at the time of the error does with the drive proves nothing. Returns whether there was one.
    pub(super) fn worked(&self, folder: &Path, session: u64) -> bool {
        self.has_errors.load(Ordering::Acquire) && self.remove(folder, |error| session > error.session)
    }

    /// Removes the error of a session with the drive with this number, in the order of the configuration. Returns whether it was
    /// the drive's last error.
    pub(super) fn acknowledge(&self, number: usize, session: u64) -> bool {
        let drive = self.drives.get(number);
        drive.is_some_and(|(folder, _)| self.remove(folder, |error| error.session == session))
    }

    fn counters(&self, folder: &Path, device: Option<&BlockDevice>) -> DriveCounters {
        if let Some(simulated) = &self.simulated {
            return (simulated.0)(folder);
        }
        let (read, written, in_flight) = device.map_or((0, 0, 0), BlockDevice::counters);
        // Without an answer of the file system, no space is known.
        let (size, free) = rustix::fs::statvfs(folder).map_or((0, 0), |space| {
            (space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
        });
        DriveCounters {
            device: device.map(|device| device.name.clone()),
            size,
            free,
            written,
            read,
            in_flight,
        }
    }

    pub(super) fn status(&self) -> Vec<Drive> {
        let errors = self.errors().clone();
        let drive = |(folder, device): &(PathBuf, Option<BlockDevice>)| {
            let counters = self.counters(folder, device.as_ref());
            let Errors { count, last } = errors.get(folder).cloned().unwrap_or_default();
            Drive {
                folder: folder.clone(),
                size: counters.size,
                free: counters.free,
                device: counters.device,
                written: counters.written,
                read: counters.read,
                in_flight: counters.in_flight,
                errors: count,
                error: last,
            }
        };
        self.drives.iter().map(drive).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::Direction;

    #[test]
    fn counters_are_parsed() {
        let text = "  101 0 2048 15 7 3 4096 22 5 40 37 0 0 0 0 0 0\n";
        assert_eq!(parse(text), (2048 * 512, 4096 * 512, 5));
        assert_eq!(parse(""), (0, 0, 0));
    }

    fn error(session: u64) -> DriveError {
        DriveError {
            session,
            direction: Direction::Record,
            channel: "fast/radar/0".into(),
            time: 1_700_000_000,
            message: "Input/output error".into(),
            consequence: "the recording ends".into(),
        }
    }

    #[test]
    fn an_error_stays_until_a_later_session_succeeds_on_the_drive_or_a_person_acknowledges_it() {
        let folders = ["/mnt/a", "/mnt/b"].map(PathBuf::from);
        let drives = Drives::new(&folders, None);
        let sessions = || -> Vec<Option<u64>> {
            let drives = drives.status();
            drives
                .iter()
                .map(|drive| drive.error.as_ref().map(|error| error.session))
                .collect()
        };
        assert!(!drives.worked(&folders[0], 1) && !drives.acknowledge(0, 1));
        drives.failed(&folders[0], error(7));
        drives.failed(&folders[1], error(8));
        assert!(!drives.worked(&folders[0], 7), "the same session");
        assert!(!drives.worked(&folders[0], 6), "a session that began before");
        assert_eq!(sessions(), [Some(7), Some(8)]);
        assert!(drives.worked(&folders[0], 9));
        assert_eq!(sessions(), [None, Some(8)], "the error of the other drive stays");
        assert!(!drives.acknowledge(0, 7) && !drives.acknowledge(2, 8) && !drives.acknowledge(1, 7));
        assert!(drives.acknowledge(1, 8));
        assert_eq!(sessions(), [None, None]);
        assert!(!drives.worked(&folders[1], 9));
        drives.failed(&folders[1], error(9));
        assert_eq!(sessions(), [None, Some(9)]);
    }

    #[test]
    fn drives_are_named_by_device_and_folder_and_found_by_their_files() {
        let folders = ["/mnt/a", "/mnt/a/b"].map(PathBuf::from);
        let counters = |folder: &Path| DriveCounters {
            device: folder.ends_with("b").then(|| "nvme1n1".into()),
            ..DriveCounters::default()
        };
        let drives = Drives::new(&folders, Some(SimulatedDrives::new(counters)));
        assert_eq!(drives.describe(&folders[0]), "/mnt/a");
        assert_eq!(drives.describe(&folders[1]), "nvme1n1 at /mnt/a/b");
        assert_eq!(drives.describe(Path::new("/mnt/c")), "/mnt/c");
        assert_eq!(drives.of_file(Path::new("/mnt/a/b/c")), Some(folders[1].as_path()));
        assert_eq!(drives.of_file(Path::new("/mnt/a/c")), Some(folders[0].as_path()));
        assert_eq!(drives.of_file(Path::new("/mnt/ab")), None);
    }
}
