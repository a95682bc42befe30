// SPDX-License-Identifier: MIT OR Apache-2.0

//! Freeing memory, and removing a provider, while a drive does DMA to the memory.

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
use crate::patience::patiently;
use crate::sys::Mapping;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "pinned",
        about: "memory that is freed during a drive's DMA is pinned, and is not allocated again before the DMA ends",
        topology: "slow",
        ruins: false,
        run: pinned,
    },
    Case {
        name: "unbind-pinned",
        about: "unbinding waits for I/O in flight, logs the pid of the I/O's owner, and returns when the I/O has ended",
        topology: "slow",
        ruins: false,
        run: unbind_pinned,
    },
];

/// Bytes of one read. The read takes some seconds, and the kernel pins all of its pages at once.
const IO: usize = 1 << 20;
/// Number of reads that unbinding waits for.
const READS: usize = 3;
/// Time limit of [`until`], before the factor of [`patiently`].
const LIMIT: Duration = Duration::from_secs(60);

/// Polls `holds` every 5 ms until it returns true. Fails with an overrun after [`LIMIT`]; `what` names the condition.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + patiently(LIMIT);
    while !holds()? {
        in_time!(Instant::now() < deadline, "condition not met within {LIMIT:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Whether the drive has I/O in flight.
pub(super) fn busy(block: &Path) -> Result<bool> {
    let name = block.file_name().context("a block device has a name")?;
    let inflight = read(&Path::new("/sys/block").join(name).join("inflight"))?;
    Ok(inflight.split_whitespace().any(|count| count != "0"))
}

/// Opens the drive for O_DIRECT. One read uses up the budget of its bandwidth limit, so the next read has to wait.
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

fn pinned(bed: &mut Bed) -> Result<()> {
    let block = bed.block("nvme0")?;
    let drive = slow_drive(bed)?;
    bed.settled()?;
    let whole = bed.provider("accel0")?;
    let file = open()?;
    let a = alloc(file.as_fd(), IO as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, IO).map_err(errno)?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let read = scope.spawn(|| {
            let got = map.fill_from(&drive, 0, 0, IO);
            done.store(true, Ordering::SeqCst);
            got
        });
        until("the drive has I/O in flight", || busy(&block))?;
        free(file.as_fd(), a.handle).map_err(errno)?;
        map.vacate().map_err(errno)?;
        until("the memory is pinned", || {
            Ok(bed.provider("accel0")?.pinned >= IO as u64 || done.load(Ordering::SeqCst))
        })?;
        in_time!(
            !done.load(Ordering::SeqCst),
            "the read ended before the test could allocate: the test checked nothing"
        );
        // The pinned bytes must not be allocated. Without them, too few bytes are free for this request.
        let rest = alloc(file.as_fd(), whole.free);
        let still = bed.provider("accel0")?.pinned;
        match rest {
            Err(code) => ensure!(code == libc::ENOSPC, "ALLOC: {}", errno(code)),
            Ok(got) => {
                free(file.as_fd(), got.handle).map_err(errno)?;
                ensure!(still == 0, "memory was allocated while a drive still writes to it");
            }
        }
        let got = read
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that reads panicked"))??;
        ensure!(got == IO, "the drive read {got} of {IO} bytes");
        Ok(())
    })?;
    until("no memory is pinned", || Ok(bed.provider("accel0")?.pinned == 0))?;
    bed.settled()?;
    let all = alloc(file.as_fd(), whole.free).map_err(errno)?;
    free(file.as_fd(), all.handle).map_err(errno)
}

fn unbind_pinned(bed: &mut Bed) -> Result<()> {
    let block = bed.block("nvme0")?;
    let drive = slow_drive(bed)?;
    bed.settled()?;
    let file = open()?;
    // The drive serves one read at a time, so reads are still in flight however late the unbinding starts.
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
        // A read that pins its pages after the unbinding started fails: the memory is revoked.
        let pages = (maps.len() * IO / 4096) as u64;
        until("all reads have pinned their pages", || {
            Ok(pinned_pages()? >= before + pages)
        })?;
        let began = Instant::now();
        bed.unbind("accel0")?;
        let waited = began.elapsed();
        ensure!(
            !busy(&block)?,
            "remove() returned while the drive still wrote to the BAR"
        );
        for read in reads {
            let got = read
                .join()
                .map_err(|_| anyhow::anyhow!("a thread that reads panicked"))??;
            ensure!(got == IO, "the drive read {got} of {IO} bytes");
        }
        Ok(waited)
    })?;
    // The module logs the owner of the I/O after waiting for a second. Its wait is shorter than the time measured here.
    let pid = format!("of pid {}", std::process::id());
    let log = dmesg()?;
    let logged = log
        .lines()
        .any(|line| line.contains("waiting for I/O on") && line.contains(&pid));
    in_time!(
        logged,
        "unbinding waited {waited:?}, and no line \"waiting for I/O on\" of the log has {pid:?}"
    );
    println!("unbinding took {waited:?}");
    Ok(())
}

/// Number of pages that were pinned (FOLL_PIN) since the guest booted.
fn pinned_pages() -> Result<u64> {
    // The counters are per CPU; stat_refresh adds them to the total.
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
