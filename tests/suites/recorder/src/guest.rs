// SPDX-License-Identifier: MIT OR Apache-2.0

//! File systems, devices, and traces in a guest, and files that break the rules of the store.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::AddAssign;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use p2pmem_recorder::store::{Entry, Files, System};
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Runs a program, and returns its standard output.
///
/// # Errors
///
/// The program cannot be started or fails: the error has its standard error.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("{program} {}: {}: {}", arguments.join(" "), output.status, why.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Makes an ext4 of `bytes` bytes at the beginning of a drive. The journal is as small as ext4 permits.
///
/// # Errors
///
/// Those of `mkfs.ext4`.
pub fn make_ext4(drive: &Path, bytes: u64) -> Result<()> {
    let blocks = (bytes / 4096).to_string();
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
    let arguments = [
        "-q",
        "-F",
        "-b",
        "4096",
        "-J",
        "size=4",
        "-N",
        "256",
        "-E",
        options,
        text(drive)?,
        &blocks,
    ];
    run("mkfs.ext4", &arguments).map(drop)
}

/// Makes an XFS on a drive. The sandbox does not have `mkfs.xfs`.
///
/// # Errors
///
/// Those of `mkfs.xfs`.
pub fn make_xfs(drive: &Path) -> Result<()> {
    run("mkfs.xfs", &["-q", "-f", "-K", text(drive)?]).map(drop)
}

/// A mounted file system, which is unmounted when the value is dropped.
#[derive(Debug)]
pub struct Mounted {
    folder: PathBuf,
    mounted: bool,
}

impl Mounted {
    /// Mounts the file system of a drive, such as `ext4`. Creates the folder.
    ///
    /// # Errors
    ///
    /// Those of `mount()`.
    pub fn new(kind: &str, drive: &Path, folder: &Path, options: &str) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let options = std::ffi::CString::new(options)?;
        mount(drive, folder, kind, MountFlags::NOATIME, options.as_c_str())
            .with_context(|| format!("mounting {} on {}", drive.display(), folder.display()))?;
        Ok(Self {
            folder: folder.to_owned(),
            mounted: true,
        })
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Unmounts the file system.
    ///
    /// # Errors
    ///
    /// EBUSY if a file is open.
    pub fn unmount(mut self) -> Result<()> {
        self.mounted = false;
        unmount(&self.folder, UnmountFlags::empty()).with_context(|| format!("unmounting {}", self.folder.display()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.mounted {
            // After an error, whose message is more important than this one.
            let _ = unmount(&self.folder, UnmountFlags::empty());
        }
    }
}

/// A loop device of a file, which is detached when the value is dropped.
#[derive(Debug)]
pub struct Loop(PathBuf);

impl Loop {
    /// Attaches a file.
    ///
    /// # Errors
    ///
    /// Those of `losetup`.
    pub fn attach(file: &Path) -> Result<Self> {
        Ok(Self(run("losetup", &["--find", "--show", text(file)?])?.into()))
    }

    /// Returns the device.
    pub fn device(&self) -> &Path {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(error) = text(&self.0).and_then(|device| run("losetup", &["--detach", device])) {
            eprintln!("{error:#}");
        }
    }
}

/// Writes the content of a drive to a new file, in which zeros take no space.
///
/// # Errors
///
/// Those of writing a file.
pub fn write_image(path: &Path, bytes: &[u8]) -> io::Result<()> {
    const PIECE: usize = 64 << 10;
    let file = File::create(path)?;
    file.set_len(bytes.len() as u64)?;
    for (number, piece) in bytes.chunks(PIECE).enumerate() {
        if piece.iter().any(|&byte| byte != 0) {
            file.write_all_at(piece, (number * PIECE) as u64)?;
        }
    }
    Ok(())
}

/// A device that logs the writes to a drive (device mapper's target `log-writes`).
#[derive(Debug)]
pub struct Logged {
    name: String,
    node: PathBuf,
    log: PathBuf,
    device: Loop,
}

impl Logged {
    /// Makes the device `name` of the first `bytes` bytes of a drive, with its log in the file `log`.
    ///
    /// # Errors
    ///
    /// Those of `dmsetup`.
    pub fn create(name: &str, drive: &Path, bytes: u64, log: &Path) -> Result<Self> {
        File::create(log)?.set_len(256 << 20)?;
        let device = Loop::attach(log)?;
        let table = format!(
            "0 {} log-writes {} {}",
            bytes / 512,
            drive.display(),
            device.device().display()
        );
        // There is no udev. The kernel creates the device's node under its own name.
        let options = ["create", "--noudevrules", "--noudevsync", name, "--table", &table];
        run("dmsetup", &options)?;
        let columns = ["info", "--columns", "--noheadings", "-o", "blkdevname", name];
        Ok(Self {
            node: Path::new("/dev").join(run("dmsetup", &columns)?),
            name: name.to_owned(),
            log: log.to_owned(),
            device,
        })
    }

    /// Returns the device.
    pub fn device(&self) -> &Path {
        &self.node
    }

    /// Removes the device, and returns its log.
    ///
    /// # Errors
    ///
    /// Those of `dmsetup`: for example, the device is in use.
    pub fn remove(self) -> Result<Vec<u8>> {
        run(
            "dmsetup",
            &["remove", "--noudevrules", "--noudevsync", "--retry", &self.name],
        )?;
        let Self { log, device, .. } = self;
        run("blockdev", &["--flushbufs", text(device.device())?])?;
        drop(device);
        let bytes = fs::read(&log)?;
        fs::remove_file(&log)?;
        Ok(bytes)
    }
}

/// The requests that reached a drive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Requests {
    /// Writes, with and without FUA.
    pub writes: u64,
    /// Writes with FUA.
    pub fua: u64,
    /// Flushes of the drive's cache.
    pub flushes: u64,
    /// Written bytes.
    pub bytes: u64,
    /// Writes that a thread of io_uring's pool started.
    pub workers: u64,
}

impl AddAssign for Requests {
    fn add_assign(&mut self, other: Self) {
        self.writes += other.writes;
        self.fua += other.fua;
        self.flushes += other.flushes;
        self.bytes += other.bytes;
        self.workers += other.workers;
    }
}

/// Where the kernel's trace is.
const TRACING: &str = "/sys/kernel/tracing";

/// Returns the requests that `work` makes to a drive, by the kernel's trace event `block_rq_issue`.
///
/// # Errors
///
/// Those of `work` and of the trace.
pub fn traced<T>(drive: &Path, work: impl FnOnce() -> Result<T>) -> Result<(T, Requests)> {
    let set = |file: &str, value: &str| {
        let path = Path::new(TRACING).join(file);
        fs::write(&path, value).with_context(|| path.display().to_string())
    };
    let number = fs::metadata(drive).with_context(|| drive.display().to_string())?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    set("buffer_size_kb", "4096")?;
    set("trace", "")?;
    set("events/block/block_rq_issue/enable", "1")?;
    let result = work();
    set("events/block/block_rq_issue/enable", "0")?;
    let trace = fs::read_to_string(Path::new(TRACING).join("trace"))?;
    Ok((result?, requests(&trace, &format!("{major},{minor}"))))
}

/// Returns the requests to the drive with this number in a trace.
fn requests(trace: &str, drive: &str) -> Requests {
    let mut all = Requests::default();
    for line in trace.lines() {
        let Some((task, event)) = line.split_once("block_rq_issue: ") else {
            continue;
        };
        let mut words = event.split_ascii_whitespace();
        if words.next() != Some(drive) {
            continue;
        }
        // What the request does: `F` before the operation is a flush, after it FUA.
        let (Some(what), Some(bytes)) = (words.next(), words.next()) else {
            continue;
        };
        if let Some((before, after)) = what.split_once('W') {
            all += Requests {
                writes: 1,
                fua: after.contains('F').into(),
                flushes: before.contains('F').into(),
                bytes: bytes.parse().unwrap_or(0),
                workers: task.trim_start().starts_with("iou-").into(),
            };
        } else if what.starts_with('F') {
            all.flushes += 1;
        }
    }
    all
}

/// How a file of the store is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Create {
    /// As the store does: allocated and written.
    Zeroed,
    /// Allocated only.
    Allocated,
    /// Neither: the file has a size alone.
    Sparse,
}

/// Files that can break the rules of the store.
#[derive(Debug, Clone, Copy)]
pub struct OtherFiles {
    files: Files,
    create: Create,
    volatile: bool,
}

impl OtherFiles {
    /// Files for direct I/O that keep the rules.
    pub fn new() -> Self {
        Self {
            files: Files::new(),
            create: Create::Zeroed,
            volatile: false,
        }
    }

    /// Opens files without O_DSYNC, and flushes payload when it is committed.
    pub fn flush_at_commit(mut self, flush: bool) -> Self {
        self.files = self.files.flush_at_commit(flush);
        self
    }

    /// Creates files differently from the store's own.
    pub fn create(mut self, create: Create) -> Self {
        self.create = create;
        self
    }

    /// Never flushes payload and index from the drive's volatile cache: a bug that tests must find.
    pub fn volatile(mut self, volatile: bool) -> Self {
        self.volatile = volatile;
        self
    }
}

impl Default for OtherFiles {
    fn default() -> Self {
        Self::new()
    }
}

impl System for OtherFiles {
    type File = File;
    type Lock = File;

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.files.create_folder(path)
    }

    fn create_file(&self, path: &Path, size: u64) -> io::Result<()> {
        if self.create == Create::Zeroed || size == 4096 {
            return self.files.create_file(path, size);
        }
        let file = File::create_new(path)?;
        match self.create {
            Create::Allocated => fallocate(&file, FallocateFlags::empty(), 0, size)?,
            _ => file.set_len(size)?,
        }
        file.sync_all()
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        if self.volatile {
            let flags = OFlags::DIRECT.bits() as i32;
            return OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        }
        self.files.open(path)
    }

    fn size(&self, file: &File) -> io::Result<u64> {
        self.files.size(file)
    }

    fn write_durable(&self, file: &File, offset: u64, pages: &[u8]) -> io::Result<()> {
        if self.volatile {
            return write_direct(file, offset, pages);
        }
        self.files.write_durable(file, offset, pages)
    }

    fn read(&self, file: &File, offset: u64, pages: &mut [u8]) -> io::Result<()> {
        self.files.read(file, offset, pages)
    }

    fn flush(&self, file: &File) -> io::Result<()> {
        self.files.flush(file)
    }

    fn payload_needs_flush(&self) -> bool {
        self.files.payload_needs_flush()
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        self.files.list(folder)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.files.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.files.remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.files.remove_folder(path)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.files.sync_folder(folder)
    }

    fn lock(&self, path: &Path) -> io::Result<File> {
        self.files.lock(path)
    }

    fn random(&self) -> io::Result<u64> {
        self.files.random()
    }
}

/// Copies pages to an address that direct I/O accepts. Returns the copy, and where the pages begin in it.
fn aligned(pages: &[u8]) -> (Vec<u8>, usize) {
    let mut bytes = vec![0; pages.len() + 4096];
    let start = bytes.as_ptr().align_offset(4096).min(4096);
    bytes[start..start + pages.len()].copy_from_slice(pages);
    (bytes, start)
}

/// Writes to a file for direct I/O, without making the bytes durable unless the file is open with O_DSYNC.
///
/// # Errors
///
/// Those of `pwrite()`.
pub fn write_direct(file: &File, offset: u64, pages: &[u8]) -> io::Result<()> {
    let (bytes, start) = aligned(pages);
    file.write_all_at(&bytes[start..start + pages.len()], offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_drive_are_counted_by_kind() {
        let trace = "# tracer: nop
   a-1 [000] ..... 1.0: block_rq_issue: 259,0 WFS 65536 () 100 + 128 none,0,0 [a]
iou-a-9-10 [000] ..... 1.1: block_rq_issue: 259,0 WS 4096 () 100 + 8 none,0,0 [a]
   a-1 [000] ..... 1.2: block_rq_issue: 259,0 FF 0 () 0 + 0 none,0,0 [kworker]
   a-1 [000] ..... 1.3: block_rq_issue: 259,1 WFS 4096 () 100 + 8 none,0,0 [a]
   a-1 [000] ..... 1.4: block_rq_issue: 259,0 RS 4096 () 100 + 8 none,0,0 [a]
   a-1 [000] ..... 1.5: block_rq_complete: 259,0 WFS () 100 + 8 none,0,0 [0]
";
        let expected = Requests {
            writes: 2,
            fua: 1,
            flushes: 1,
            bytes: 65536 + 4096,
            workers: 1,
        };
        assert_eq!(requests(trace, "259,0"), expected);
        assert_eq!(requests("", "259,0"), Requests::default());
    }
}
