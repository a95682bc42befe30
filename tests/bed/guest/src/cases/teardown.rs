// SPDX-License-Identifier: MIT OR Apache-2.0

//! Removal of a provider in use, and the cost of clearing memory.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use p2pmem::Access;
use p2pmem_sys as abi;

use super::dmabuf::export;
use super::inflight::{busy, dmesg, slow_drive, until};
use super::life::{Part, ready};
use super::rdma_user::Wire;
use super::share::import;
use super::{Bed, Case, alloc, errno, expect, free, is_clearing, may_open, open, read, request, write};
use crate::in_time;
use crate::patience::{amount, is_quick, patiently, rounds};
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "retire-pinned",
        about: "a provider is disabled while a drive writes from its memory: the memory is cleared only after the I/O, and other operations do not wait",
        topology: "removal",
        ruins: false,
        run: retire_pinned,
    },
    Case {
        name: "clear-killed",
        about: "a task that is killed during clearing for its allocation ends at once, and the provider can be removed during clearing",
        topology: "removal",
        ruins: false,
        run: clear_killed,
    },
    Case {
        name: "clear-in-mmap",
        about: "mmap() does not clear memory with the mmap lock held, and the mapping has no old data",
        topology: "removal",
        ruins: false,
        run: clear_in_mmap,
    },
    Case {
        name: "clear-in-fault",
        about: "clearing at the first access holds no lock of the process: mprotect and reads of /proc/PID/cmdline do not wait for it",
        topology: "removal",
        ruins: false,
        run: clear_in_fault,
    },
    Case {
        name: "clear-what-is-needed",
        about: "a small allocation does not wait until all freed memory of the provider is cleared",
        topology: "removal",
        ruins: false,
        run: clear_what_is_needed,
    },
    Case {
        name: "clear-beside-alloc",
        about: "a request for the whole provider succeeds while the scrubber clears a part of it",
        topology: "small",
        ruins: false,
        run: clear_beside_alloc,
    },
    Case {
        name: "adopt-takes-a-page",
        about: "adoption of a provider allocates at most one page of its driver's pool, temporarily",
        topology: "removal",
        ruins: false,
        run: adopt_takes_a_page,
    },
    Case {
        name: "unbind-scale",
        about: "unbinding a provider with 1,000 registrations, 50,000 buffers and 1,000 open files takes time proportional to their sum, not to their product",
        topology: "nic",
        ruins: false,
        run: unbind_scale,
    },
];

/// The part of these tests that runs in a process of its own.
pub(super) const PART: &str = "alloc-at";

const MIB: u64 = 1 << 20;
/// The longest time until a killed task ends, on a busy machine too. The operation that the task waits for takes far
/// longer.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// The largest number of measurements of a ratio of two times. The minimum counts, because the machine may be busy
/// during any of them.
const MAX_ATTEMPTS: u32 = 4;
/// The largest delay of a task that does not wait for clearing, as a fraction of the time of clearing.
const MAX_SHARE_OF_CLEARING: f64 = 0.4;

/// Allocates `size` bytes of one provider.
fn alloc_at(fd: BorrowedFd<'_>, provider: u32, size: u64) -> Result<abi::p2pmem_alloc, i32> {
    let mut arg = request(size);
    arg.req.provider = provider;
    sys::alloc(fd, &mut arg, Memory::Slice(&mut []))?;
    Ok(arg)
}

/// Allocates `size` bytes of a provider after the first line of input, and holds the buffer until the second line.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let number = |at: usize| -> Result<u64> {
        Ok(arguments
            .get(at)
            .context("an argument of the part is missing")?
            .parse()?)
    };
    let (provider, size) = (number(0)?, number(1)?);
    let file = open()?;
    ready()?;
    let got = alloc_at(file.as_fd(), provider as u32, size).map_err(errno)?;
    println!("allocated {}", got.handle);
    ready()
}

/// The `status` attribute of a provider's directory in configfs.
fn status(dir: &Path) -> Result<String> {
    read(&dir.join("status"))
}

/// The 64-bit words of a drive at an offset.
fn words_of(drive: &File, offset: u64, len: usize) -> Result<Vec<u64>> {
    let file = open()?;
    let got = alloc(file.as_fd(), len as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), got.mmap_offset, len).map_err(errno)?;
    let n = map.fill_from(drive, offset, 0, len)?;
    ensure!(n == len, "the drive read {n} of {len} bytes");
    Ok((0..len).step_by(8).map(|at| map.get(at)).collect())
}

/// Starts a process that writes 0 to a provider's `enable` until the write succeeds.
fn disabling(dir: &Path) -> Result<Child> {
    Ok(Command::new("sh")
        .args(["-c", "while ! echo 0 >\"$0\"/enable; do :; done 2>/dev/null"])
        .arg(dir)
        .spawn()?)
}

fn pattern(at: usize) -> u64 {
    0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(at as u64 + 1) | 1
}

fn retire_pinned(bed: &mut Bed) -> Result<()> {
    /// The drive needs more time for this size than a removal may wait.
    const IO: usize = 8 << 20;
    let block = bed.block("nvme0")?;
    drop(slow_drive(bed)?);
    let drive = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&block)?;
    bed.settled()?;
    let accel = bed.provider("accel0")?.id;
    let dir = bed.provider_dir("accel0")?;
    let file = open()?;
    let got = alloc_at(file.as_fd(), accel, IO as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), got.mmap_offset, IO).map_err(errno)?;
    for at in (0..IO).step_by(8) {
        map.set(at, pattern(at));
    }
    thread::scope(|scope| -> Result<()> {
        let written = scope.spawn(|| map.drain_to(&drive, 0, 0, IO));
        until("the drive has I/O in flight", || busy(&block))?;
        // When a removal waits, the whole transfer is queued at the drive.
        let began = Instant::now();
        let mut off = disabling(&dir)?;
        until("the removal waits for the drive", || {
            Ok(status(&dir)?.starts_with("being removed: waiting for I/O"))
        })?;
        let text = status(&dir)?;
        ensure!(
            text.contains(&format!("pid {}", std::process::id())),
            "the status does not name the process of the I/O: {text:?}"
        );
        // All other operations return during the wait.
        ensure!(read(&dir.join("enable"))? == "0", "`enable` reads 1 during the removal");
        let refused = fs::write(dir.join("enable"), "1").err().and_then(|e| e.raw_os_error());
        ensure!(
            refused == Some(libc::EBUSY),
            "enabling during the removal: {refused:?}, expected EBUSY"
        );
        let start = Instant::now();
        let refused = fs::write(dir.join("enable"), "0").err().and_then(|e| e.raw_os_error());
        ensure!(
            refused == Some(libc::EBUSY),
            "disabling a second time: {refused:?}, expected EBUSY"
        );
        in_time!(
            start.elapsed() < patiently(KILL_LIMIT),
            "a refused write to `enable` took {:?}",
            start.elapsed()
        );
        let code = alloc_at(file.as_fd(), accel, 4096).err();
        ensure!(
            code == Some(libc::ENODEV),
            "an allocation during the removal: {code:?}, expected ENODEV"
        );
        // A task that waits for the removal can be killed.
        ensure!(off.try_wait()?.is_none(), "the removal ended before the I/O");
        let killed = Instant::now();
        off.kill()?;
        off.wait()?;
        in_time!(
            killed.elapsed() < patiently(KILL_LIMIT),
            "a killed task took {:?} to end",
            killed.elapsed()
        );
        // While a task waits in the directory, the directory can be removed, and other directories can be created:
        // neither waits for the drive.
        let mut off = disabling(&dir)?;
        let start = Instant::now();
        let other = bed.provider_dir("nvme0")?;
        let removed = scope.spawn(|| fs::remove_dir(&dir));
        fs::create_dir(&other)?;
        ensure!(status(&other)?.starts_with("not published"), "{}", status(&other)?);
        fs::remove_dir(&other)?;
        removed.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        in_time!(
            start.elapsed() < patiently(KILL_LIMIT),
            "removing the directory, and creating another one, took {:?}",
            start.elapsed()
        );
        off.kill()?;
        off.wait()?;
        // The directory can be created again. The provider can be published when the drive has completed.
        in_time!(busy(&block)?, "the I/O ended too early: the test checked nothing");
        fs::create_dir(&dir)?;
        let mut refused = 0;
        until("the provider is published again", || {
            match fs::write(dir.join("enable"), "1") {
                Ok(()) => Ok(true),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    refused += 1;
                    Ok(false)
                }
                Err(e) => Err(e.into()),
            }
        })?;
        ensure!(
            refused > 0 && !busy(&block)?,
            "the provider was published before the I/O ended"
        );
        println!("the removal waited {:?} for the drive", began.elapsed());
        in_time!(
            began.elapsed() > Duration::from_secs(11),
            "the I/O ended too early: the test checked nothing"
        );
        let n = written.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        ensure!(n == IO, "the drive wrote {n} of {IO} bytes");
        Ok(())
    })?;
    let pid = format!("of pid {}", std::process::id());
    let log = dmesg()?;
    let longest = log
        .lines()
        .filter(|line| line.contains("waiting for I/O on") && line.contains(&pid))
        .filter_map(|line| line.split_once(" since ")?.1.strip_suffix(" s")?.parse::<u64>().ok())
        .max();
    ensure!(
        longest.is_some_and(|seconds| seconds >= 10),
        "the kernel log has no line with this process and a wait of 10 s or more: {longest:?}"
    );
    // Memory that was cleared too early would show as zeros on the drive, in the part that the drive transferred last.
    for part in [0, IO - (64 << 10)] {
        let words = words_of(&drive, part as u64, 64 << 10)?;
        let wrong = words
            .iter()
            .enumerate()
            .find(|&(n, &word)| word != pattern(part + 8 * n));
        ensure!(
            wrong.is_none(),
            "the drive has a wrong word {wrong:?} in the part at {part:#x}"
        );
    }
    // The next owner of the memory does not see the data.
    let again = bed.provider("accel0")?;
    let got = alloc_at(file.as_fd(), again.id, again.largest).map_err(errno)?;
    let all = Mapping::shared(file.as_fd(), got.mmap_offset, again.largest as usize).map_err(errno)?;
    let left = (0..all.len()).step_by(8).find(|&at| all.get(at) != 0);
    ensure!(left.is_none(), "old data is visible at offset {left:?}");
    free(file.as_fd(), got.handle).map_err(errno)
}

/// The provider with slow clearing, and the largest size that one allocation of it can have.
fn slow_memory(bed: &Bed) -> Result<(u32, u64)> {
    let provider = bed.provider("nvme1")?;
    let file = open()?;
    let mut size = provider.free;
    loop {
        match alloc_at(file.as_fd(), provider.id, size) {
            Ok(_) => break,
            Err(libc::ENOSPC) => size -= MIB,
            Err(code) => return Err(errno(code)),
        }
    }
    drop(file);
    until("the slow provider's memory is free again", || {
        Ok(bed.provider("nvme1")?.free == provider.free)
    })?;
    Ok((provider.id, size))
}

/// Waits until the slow provider has `size` free bytes, and no memory of it is being cleared.
fn cleared(bed: &Bed, size: u64) -> Result<()> {
    until("the slow provider's memory is free again", || {
        let provider = bed.provider("nvme1")?;
        Ok(!is_clearing(&provider) && provider.free >= size)
    })
}

/// Waits until an allocation in the slow provider has its memory, which is then being cleared.
fn await_taken(bed: &Bed, size: u64) -> Result<()> {
    until("the allocation has its memory", || {
        let provider = bed.provider("nvme1")?;
        Ok(provider.free + size <= provider.size && provider.buffers == 0)
    })
}

/// Allocates the slow provider's memory once. Returns the provider, the size, and the time of clearing.
fn time_of_clearing(bed: &Bed) -> Result<(u32, u64, Duration)> {
    let (provider, size) = slow_memory(bed)?;
    let file = open()?;
    let began = Instant::now();
    let got = alloc_at(file.as_fd(), provider, size).map_err(errno)?;
    let whole = began.elapsed();
    free(file.as_fd(), got.handle).map_err(errno)?;
    drop(file);
    cleared(bed, size)?;
    Ok((provider, size, whole))
}

/// Unbinds the slow provider, and waits until it is adopted again. Returns the time of unbinding.
fn unbind_slow(bed: &Bed) -> Result<Duration> {
    let began = Instant::now();
    bed.unbind("nvme1")?;
    let unbound = began.elapsed();
    write(Path::new("/sys/bus/pci/drivers_probe"), &bed.device("nvme1")?.bdf)?;
    until("the slow provider is adopted again", || {
        Ok(bed.provider("nvme1").is_ok())
    })?;
    Ok(unbound)
}

fn clear_killed(bed: &mut Bed) -> Result<()> {
    // The time of unbinding an idle provider: that of its driver, and, on a kernel with debug checks, much of p2pmem's
    // own.
    let idle = unbind_slow(bed)?;
    let (mut best_kill, mut best_unbind) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..MAX_ATTEMPTS {
        let (provider, size, whole) = time_of_clearing(bed)?;
        let arguments = [provider.to_string(), size.to_string()];
        let arguments = [arguments[0].as_str(), arguments[1].as_str()];
        let part = Part::start(PART, &arguments)?.go_on()?;
        await_taken(bed, size)?;
        let began = Instant::now();
        part.kill()?;
        let killed = began.elapsed();
        until("the slow provider's memory is free again", || {
            Ok(bed.provider("nvme1")?.free >= size)
        })?;
        // The provider can be removed while its memory is being cleared.
        let part = Part::start(PART, &arguments)?.go_on()?;
        await_taken(bed, size)?;
        let unbound = unbind_slow(bed)?;
        drop(part);
        println!("clearing took {whole:?}, killing a task {killed:?}, unbinding {unbound:?} (idle: {idle:?})");
        let share = |took: Duration| took.as_secs_f64() / whole.as_secs_f64();
        best_kill = best_kill.min(share(killed));
        best_unbind = best_unbind.min(share(unbound.saturating_sub(idle)));
        if best_kill < MAX_SHARE_OF_CLEARING && best_unbind < MAX_SHARE_OF_CLEARING {
            return Ok(());
        }
    }
    in_time!(
        best_kill < MAX_SHARE_OF_CLEARING,
        "a task that was killed during clearing took {best_kill:.2} of the time of clearing to end"
    );
    in_time!(
        best_unbind < MAX_SHARE_OF_CLEARING,
        "unbinding during clearing took longer than unbinding while idle, by {best_unbind:.2} of the time of clearing"
    );
    Ok(())
}

fn clear_in_mmap(bed: &mut Bed) -> Result<()> {
    let mut best = f64::INFINITY;
    for _ in 0..MAX_ATTEMPTS {
        best = best.min(share_of_mmap(bed)?);
        if best < MAX_SHARE_OF_CLEARING {
            return Ok(());
        }
    }
    in_time!(
        best < MAX_SHARE_OF_CLEARING,
        "mmap() held the mmap lock for {best:.2} of the time of clearing"
    );
    Ok(())
}

fn clear_in_fault(bed: &mut Bed) -> Result<()> {
    let mut best = f64::INFINITY;
    for _ in 0..MAX_ATTEMPTS {
        let share = dirty_mapping(bed, |map, whole| {
            let touched = AtomicBool::new(false);
            let mut longest = Duration::ZERO;
            let mut probes = 0u32;
            thread::scope(|scope| -> Result<()> {
                let touching = scope.spawn(|| {
                    let word = map.get(0);
                    touched.store(true, Ordering::Release);
                    word
                });
                // Two operations of other threads: mprotect, which takes the area's lock, and reading cmdline, as `ps`
                // does.
                while !touched.load(Ordering::Acquire) {
                    let began = Instant::now();
                    for prot in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
                        map.protect(prot).map_err(errno)?;
                    }
                    read(Path::new("/proc/self/cmdline"))?;
                    longest = longest.max(began.elapsed());
                    probes += 1;
                }
                let word = touching.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
                ensure!(word == 0, "old data is visible");
                Ok(())
            })?;
            println!("clearing took {whole:?}, the longest of {probes} other operations {longest:?}");
            Ok(longest)
        })?;
        best = best.min(share);
        if best < MAX_SHARE_OF_CLEARING {
            return Ok(());
        }
    }
    in_time!(
        best < MAX_SHARE_OF_CLEARING,
        "another operation on the process waited for {best:.2} of the time of clearing"
    );
    Ok(())
}

/// The time of mmap() of memory that was in use, divided by the time of clearing that memory.
fn share_of_mmap(bed: &Bed) -> Result<f64> {
    dirty_mapping(bed, |_, _| Ok(Duration::ZERO))
}

/// Maps memory that was in use, which is cleared at the first access, and calls `f` with the mapping and the time of
/// clearing. Returns the time that `f` returns or the time of mmap(), whichever is longer, divided by the time of
/// clearing.
fn dirty_mapping(bed: &Bed, f: impl FnOnce(&Mapping, Duration) -> Result<Duration>) -> Result<f64> {
    let (provider, size) = slow_memory(bed)?;
    // Fill accel0, so that only the slow provider has space.
    let accel = bed.provider("accel0")?;
    let file = open()?;
    let full = alloc_at(file.as_fd(), accel.id, accel.largest).map_err(errno)?;
    let began = Instant::now();
    let got = alloc_at(file.as_fd(), provider, size).map_err(errno)?;
    let whole = began.elapsed();
    let dirty = Mapping::shared(file.as_fd(), got.mmap_offset, size as usize).map_err(errno)?;
    dirty.set(0, 1);
    dirty.set(size as usize - 8, 1);
    drop(dirty);
    free(file.as_fd(), got.handle).map_err(errno)?;
    cleared(bed, size)?;
    let began = Instant::now();
    let map = Mapping::shared(file.as_fd(), 0, size as usize).map_err(errno)?;
    let mapped = began.elapsed();
    println!("clearing took {whole:?}, mmap() {mapped:?}");
    let took = f(&map, whole)?;
    for at in [0, size as usize / 2, size as usize - 8] {
        ensure!(map.get(at) == 0, "old data is visible at offset {at:#x}");
    }
    drop(map);
    free(file.as_fd(), full.handle).map_err(errno)?;
    drop(file);
    cleared(bed, size)?;
    Ok(took.max(mapped).as_secs_f64() / whole.as_secs_f64())
}

fn clear_beside_alloc(bed: &mut Bed) -> Result<()> {
    bed.settled()?;
    let accel = bed.provider("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    let small = |size: u64| alloc_at(fd, accel.id, size).map_err(errno);
    let (all, mut contended) = (rounds(100), 0);
    for round in 0..all {
        // A request that needs memory being cleared takes only what it needs; the scrubber clears the rest as free
        // memory.
        let whole = small(accel.largest).with_context(|| format!("round {round}"))?;
        let map = Mapping::shared(fd, whole.mmap_offset, accel.largest as usize).map_err(errno)?;
        map.set(accel.largest as usize - 8, 1);
        drop(map);
        free(fd, whole.handle).map_err(errno)?;
        let some = small(accel.largest / 4).with_context(|| format!("a part of it, round {round}"))?;
        free(fd, some.handle).map_err(errno)?;
        contended += u32::from(is_clearing(&bed.provider("accel0")?));
    }
    println!("the scrubber was active in {contended} of {all} rounds");
    ensure!(
        2 * contended > all,
        "the scrubber was active in only {contended} of {all} rounds"
    );
    bed.settled()?;
    let after = bed.provider("accel0")?;
    ensure!(
        (after.free, after.largest) == (accel.free, accel.largest),
        "{after:?}, before the test {accel:?}"
    );
    Ok(())
}

fn clear_what_is_needed(bed: &mut Bed) -> Result<()> {
    let accel = bed.provider("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    // Use and free all memory of the provider.
    let whole = |bed: &Bed| -> Result<u64> {
        let mut size = bed.provider("accel0")?.largest;
        size -= size % MIB;
        let got = alloc_at(fd, accel.id, size).map_err(errno)?;
        let map = Mapping::shared(fd, got.mmap_offset, size as usize).map_err(errno)?;
        map.set(size as usize - 8, 1);
        drop(map);
        free(fd, got.handle).map_err(errno)?;
        Ok(size)
    };
    // The minimum of several rounds counts, because the machine may be busy during any of them.
    let (mut size, mut best) = (0, f64::INFINITY);
    for _ in 0..5 {
        size = whole(bed)?;
        let began = Instant::now();
        bed.settled()?;
        let all = began.elapsed();
        // Allocate the remainder, so that no clear memory of 1 MiB is left.
        let rest = alloc_at(fd, accel.id, accel.free - size);
        whole(bed)?;
        let began = Instant::now();
        let got = alloc_at(fd, accel.id, MIB).map_err(errno)?;
        let took = began.elapsed();
        println!("clearing all memory took {all:?}, the small allocation {took:?}");
        best = best.min(took.as_secs_f64() / all.as_secs_f64());
        let map = Mapping::shared(fd, got.mmap_offset, MIB as usize).map_err(errno)?;
        let left = (0..MIB as usize).step_by(8).find(|&at| map.get(at) != 0);
        ensure!(left.is_none(), "old data is visible at offset {left:?}");
        drop(map);
        free(fd, got.handle).map_err(errno)?;
        if let Ok(rest) = rest {
            free(fd, rest.handle).map_err(errno)?;
        }
        bed.settled()?;
    }
    in_time!(
        best < 0.4,
        "an allocation of 1 MiB took {best:.2} of the time of clearing all {size} bytes"
    );
    // The scrubber also cleared the memory that the allocation took.
    let stats = |id: u32| -> Result<u64> {
        let mut stats = abi::p2pmem_stats {
            provider: id,
            ..Default::default()
        };
        sys::plain(fd, abi::P2PMEM_IOC_STATS, &mut stats).map_err(errno)?;
        Ok(stats.scrubbed_bytes)
    };
    let before = stats(accel.id)?;
    let got = alloc_at(fd, accel.id, size).map_err(errno)?;
    ensure!(
        stats(accel.id)? == before,
        "an allocation had to clear {} bytes that the scrubber left",
        stats(accel.id)? - before
    );
    let map = Mapping::shared(fd, got.mmap_offset, size as usize).map_err(errno)?;
    ensure!(map.get(size as usize - 8) == 0, "old data is visible");
    drop(map);
    free(fd, got.handle).map_err(errno)?;
    expect("FREE of a freed handle", free(fd, got.handle), libc::ENOENT)
}

fn adopt_takes_a_page(bed: &mut Bed) -> Result<()> {
    let tracing = Path::new("/sys/kernel/tracing");
    write(
        &tracing.join("kprobe_events"),
        "p:p2pmem_test/taken pci_alloc_p2pmem size=%si:u64",
    )?;
    let event = tracing.join("events/p2pmem_test/taken/enable");
    let sizes = (|| -> Result<Vec<u64>> {
        bed.unbind("nvme1")?;
        write(&tracing.join("trace"), "")?;
        write(&event, "1")?;
        write(Path::new("/sys/bus/pci/drivers_probe"), &bed.device("nvme1")?.bdf)?;
        until("the slow provider is adopted again", || {
            Ok(bed.provider("nvme1").is_ok())
        })?;
        // The trace also has the queues of the drive, which its own driver allocates in the threads that probe it.
        let trace = read(&tracing.join("trace"))?;
        let taken = trace.lines().filter_map(|line| line.split("size=").nth(1));
        taken.map(|size| Ok(size.trim().parse()?)).collect()
    })();
    write(&event, "0")?;
    // Opening kprobe_events for writing only removes all probes.
    write(&tracing.join("kprobe_events"), "")?;
    let taken = sizes?;
    ensure!(!taken.is_empty(), "the trace has no allocation of the adoption");
    let most = taken.iter().max().copied().unwrap_or(0);
    println!("{} allocations, the largest of {most} bytes", taken.len());
    // The drive's own driver allocates at most a submission queue of 1024 entries of 64 bytes at once.
    ensure!(
        most <= 64 << 10,
        "one allocation took {most} bytes of the drive's memory"
    );
    Ok(())
}

/// The numbers of registrations, buffers and open files of the provider.
const REGISTRATIONS: u32 = 1_000;
const BUFFERS: u32 = 50_000;
const FILES: u32 = 1_000;
/// The target for the time of unbinding on an idle machine with nothing pinned, which the report states.
const AIM: Duration = Duration::from_secs(1);
/// The limit for the time of unbinding, on a busy machine too. A search for each buffer in each file would be 50
/// million look-ups.
const BOUND: Duration = Duration::from_secs(20);

/// The times of unbinding in milliseconds, for the report.
#[derive(Debug, serde::Serialize)]
struct RevokeMs {
    p50: f64,
    p99: f64,
    max: f64,
    rounds: usize,
    registrations: u32,
    buffers: u32,
    files: u32,
    aim: f64,
}

fn unbind_scale(bed: &mut Bed) -> Result<()> {
    let (registrations, buffers, files) = (amount(REGISTRATIONS), amount(BUFFERS), amount(FILES));
    may_open(8 * FILES)?;
    let mut took = Vec::new();
    for _ in 0..rounds(2) {
        bed.publish("accel0")?;
        let accel = bed.provider("accel0")?.id;
        // Each of these buffers is registered with the NIC.
        let wire = Wire::new(bed)?;
        let registered = (0..registrations)
            .map(|_| {
                let buffer = wire.alloc(bed, "accel0", 4096)?;
                let registration = buffer.register(&wire.pd, Access::LOCAL_WRITE)?;
                Ok((buffer, registration))
            })
            .collect::<Result<Vec<_>>>()?;
        // One file holds all other buffers. Every file holds a handle of the first one.
        let owner = open()?;
        let first = alloc_at(owner.as_fd(), accel, 4096).map_err(errno)?;
        for _ in 1..buffers {
            alloc_at(owner.as_fd(), accel, 4096).map_err(errno)?;
        }
        let shared = export(owner.as_fd(), first.handle, 0, &[(0, 4096)]).map_err(errno)?;
        let open_files = (0..files)
            .map(|_| {
                let file = open()?;
                import(file.as_fd(), shared.as_raw_fd()).map_err(errno)?;
                Ok(file)
            })
            .collect::<Result<Vec<_>>>()?;
        let provider = bed.provider("accel0")?;
        ensure!(
            provider.buffers == registrations + buffers && provider.exports >= registrations,
            "the provider has {} buffers and {} dma-bufs",
            provider.buffers,
            provider.exports
        );
        let began = Instant::now();
        bed.unbind("accel0")?;
        took.push(began.elapsed());
        // Each file got an event for its handle, and one for the provider.
        for file in &open_files {
            let events = sys::read_events(file.as_fd(), 8 * size_of::<abi::p2pmem_event>()).map_err(errno)?;
            let kinds = events.iter().map(|event| event.type_).collect::<Vec<_>>();
            ensure!(
                kinds == [abi::P2PMEM_EVENT_BUFFER_REVOKED, abi::P2PMEM_EVENT_PROVIDER_REMOVED],
                "a file got events of types {kinds:?}"
            );
        }
        drop(registered);
    }
    took.sort();
    let at = |part: usize| took[(took.len() * part).div_ceil(100).clamp(1, took.len()) - 1].as_secs_f64() * 1e3;
    let report = RevokeMs {
        p50: at(50),
        p99: at(99),
        max: at(100),
        rounds: took.len(),
        registrations,
        buffers,
        files,
        aim: AIM.as_secs_f64() * 1e3,
    };
    let report = serde_json::json!({ "revoke_ms": report });
    println!("{}{report}", if is_quick() { "hardening-report: " } else { "" });
    in_time!(
        took.iter().all(|&one| one < patiently(BOUND)),
        "an unbind took more than {:?}: {report}",
        patiently(BOUND)
    );
    bed.publish("accel0")
}
