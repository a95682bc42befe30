// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory to which a drive still writes when its owner frees it or its provider is removed.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Bed, Case, alloc, errno, free, open, read, write};
use crate::in_time;
use crate::limits::scaled;
use crate::sys::Mapping;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "pinned",
        about: "memory that is freed while a drive writes to it goes to nobody before the drive is done",
        topology: "slow",
        ruins: false,
        run: |bed| pinned(bed, IO),
    },
    Case {
        name: "pinned-folio",
        about: "the same in a part of a folio, whose other pages wait too",
        topology: "slow",
        ruins: false,
        run: |bed| pinned(bed, 4 << 20),
    },
    Case {
        name: "unbind-pinned",
        about: "unbinding waits for the I/O in flight, names its owner, and ends when the I/O ends",
        topology: "slow",
        ruins: false,
        run: unbind_pinned,
    },
];

/// Bytes of one read: some seconds of I/O, within the number of pages that the kernel pins at a time.
const IO: usize = 1 << 20;
/// The number of reads that unbinding waits for.
const READS: usize = 3;
/// The time limit for everything that waits for the drive.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until a condition holds. Checks it every few milliseconds.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + scaled(LIMIT);
    while !holds()? {
        in_time!(Instant::now() < deadline, "not within {LIMIT:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Returns whether the drive has I/O in flight.
pub(super) fn busy(block: &Path) -> Result<bool> {
    let name = block.file_name().context("a block device has a name")?;
    let inflight = read(&Path::new("/sys/block").join(name).join("inflight"))?;
    Ok(inflight.split_whitespace().any(|count| count != "0"))
}

/// The drive, with its I/O budget used up, so that the next read has to wait.
pub(super) fn slow_drive(bed: &Bed) -> Result<File> {
    let drive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(bed.block("nvme0")?)?;
    let file = open()?;
    let a = alloc(file.as_fd(), IO as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, IO).map_err(errno)?;
    map.fill_from(&drive, 0, 0, IO)?;
    Ok(drive)
}

/// Frees a buffer of `size` bytes while a drive writes to its first [`IO`] bytes.
fn pinned(bed: &mut Bed, size: usize) -> Result<()> {
    let block = bed.block("nvme0")?;
    let drive = slow_drive(bed)?;
    bed.settled()?;
    let whole = bed.provider("accel0")?;
    let file = open()?;
    let a = alloc(file.as_fd(), size as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, size).map_err(errno)?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let read = scope.spawn(|| {
            let got = map.fill_from(&drive, 0, 0, IO);
            done.store(true, Ordering::SeqCst);
            got
        });
        until("the drive has begun", || busy(&block))?;
        free(file.as_fd(), a.handle).map_err(errno)?;
        map.vacate().map_err(errno)?;
        until("the memory is pinned", || {
            Ok(bed.provider("accel0")?.pinned >= size as u64 || done.load(Ordering::SeqCst))
        })?;
        in_time!(
            !done.load(Ordering::SeqCst),
            "the drive was faster than the test: nothing was shown"
        );
        // While the drive writes, no allocation may get these bytes: the rest of the provider is too small.
        let rest = alloc(file.as_fd(), whole.free);
        let still = bed.provider("accel0")?.pinned;
        match rest {
            Err(code) => ensure!(code == libc::ENOSPC, "ALLOC: {}", errno(code)),
            Ok(got) => {
                free(file.as_fd(), got.handle).map_err(errno)?;
                ensure!(still == 0, "memory was handed out that a drive still writes to");
            }
        }
        let got = read.join().map_err(|_| anyhow::anyhow!("the reader panicked"))??;
        ensure!(got == IO, "the drive read {got} of {IO} bytes");
        Ok(())
    })?;
    until("nothing is pinned any more", || Ok(bed.provider("accel0")?.pinned == 0))?;
    bed.settled()?;
    let all = alloc(file.as_fd(), whole.free).map_err(errno)?;
    free(file.as_fd(), all.handle).map_err(errno)
}

fn unbind_pinned(bed: &mut Bed) -> Result<()> {
    let block = bed.block("nvme0")?;
    let drive = slow_drive(bed)?;
    bed.settled()?;
    let file = open()?;
    // The drive serves one read after the other, so reads are in flight however late the unbinding begins.
    let maps = (0..READS)
        .map(|_| {
            let a = alloc(file.as_fd(), IO as u64).map_err(errno)?;
            Mapping::shared(file.as_fd(), a.mmap_offset, IO).map_err(errno)
        })
        .collect::<Result<Vec<_>>>()?;
    let before = pinned_pages()?;
    let waited = thread::scope(|scope| -> Result<Duration> {
        let reads: Vec<_> = maps
            .iter()
            .map(|map| scope.spawn(|| map.fill_from(&drive, 0, 0, IO)))
            .collect();
        // A later read finds no memory.
        let pages = (maps.len() * IO / 4096) as u64;
        until("all reads have their pages", || Ok(pinned_pages()? >= before + pages))?;
        let began = Instant::now();
        bed.unbind("accel0")?;
        let waited = began.elapsed();
        ensure!(
            !busy(&block)?,
            "remove() returned while the drive still wrote to the BAR"
        );
        for read in reads {
            let got = read.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
            ensure!(got == IO, "the drive read {got} of {IO} bytes");
        }
        Ok(waited)
    })?;
    // After a second of waiting the module logs the owner. The module's wait is shorter than the one measured here.
    let pid = format!("of pid {}", std::process::id());
    let log = dmesg()?;
    let said = log
        .lines()
        .any(|line| line.contains("waiting for I/O on") && line.contains(&pid));
    in_time!(
        said,
        "after {waited:?} of waiting, the log does not name the owner of the I/O"
    );
    println!("unbinding took {waited:?}");
    Ok(())
}

/// Returns the number of pages that were pinned since the guest's start, for I/O and otherwise.
fn pinned_pages() -> Result<u64> {
    // Each processor has its own counter, and adds it to the sum at intervals.
    write(Path::new("/proc/sys/vm/stat_refresh"), "1")?;
    let counts = read(Path::new("/proc/vmstat"))?;
    let pinned = counts
        .lines()
        .find_map(|line| line.strip_prefix("nr_foll_pin_acquired "));
    Ok(pinned.context("nr_foll_pin_acquired")?.parse()?)
}

/// Returns the kernel's log.
pub(super) fn dmesg() -> Result<String> {
    let output = std::process::Command::new("dmesg").output()?;
    ensure!(output.status.success(), "dmesg: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
