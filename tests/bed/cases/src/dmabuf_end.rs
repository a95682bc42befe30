// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ends of dma-bufs: revocation with importers that end their mappings in time, late, or never; closing in any order;
//! killed processes.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;

use super::attach::{PAGE, attach, detach};
use super::busy::{Busy, at_once, contended};
use super::dmabuf::{GOOD, Importer, export, exported_buffer, listing};
use super::life::{BOUND, Part, ready, timed_unbind};
use super::{Bed, Case, alloc, buffer, command, errno, expect, free, may_open, open, read, write};
use crate::in_time;
use crate::limits::scaled;
use crate::sys::{self, Mapping};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "dmabuf-revoke",
        about: "unbinding revokes dma-bufs from importers within 20 s (aim: 1 s), permanently",
        topology: "small",
        ruins: false,
        run: revoke,
    },
    Case {
        name: "dmabuf-hold",
        about: "unbinding waits for an importer that keeps its mapping, and the log names the importer",
        topology: "small",
        ruins: false,
        run: hold,
    },
    Case {
        name: "dmabuf-hold-killed",
        about: "killing the process of an importer that keeps its mapping ends the wait",
        topology: "small",
        ruins: false,
        run: hold_killed,
    },
    Case {
        name: "unbind-locked",
        about: "unbinding waits while others have a dma-buf locked, and the log and the status say so",
        topology: "small",
        ruins: false,
        run: locked,
    },
    Case {
        name: "dmabuf-fence",
        about: "unbinding waits for DMA in progress, up to a limit",
        topology: "small",
        ruins: false,
        run: fences,
    },
    Case {
        name: "dmabuf-order",
        about: "handle, mapping, dma-buf and importer end in any order, and the last one frees the memory",
        topology: "small",
        ruins: false,
        run: order,
    },
    Case {
        name: "dmabuf-kill",
        about: "the dma-buf of a killed process is freed; a dma-buf that a child inherited keeps its buffer",
        topology: "small",
        ruins: false,
        run: kill,
    },
    Case {
        name: "dmabuf-rmmod",
        about: "rmmod is refused while a dma-buf is open",
        topology: "small",
        ruins: false,
        run: rmmod,
    },
    Case {
        name: "dmabuf-many",
        about: "unbinding revokes a thousand dma-bufs, a hundred of them imported, within 20 s (aim: 1 s)",
        topology: "small",
        ruins: false,
        run: many,
    },
    Case {
        name: "dmabuf-disable-and-unbind",
        about: "unbinding a provider while configfs disables it removes the provider and its buffers",
        topology: "small",
        ruins: false,
        run: disable_and_unbind,
    },
    Case {
        name: "dmabuf-race",
        about: "export, attach and map race with unbinding and publishing, and fail only with ENODEV",
        topology: "small",
        ruins: false,
        run: race,
    },
];

const MIB: u64 = 1 << 20;

/// Reads the kernel log from the time of creation on.
pub(super) struct Log(File);

impl Log {
    pub(super) fn new() -> Result<Log> {
        let mut log = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")?;
        log.seek(SeekFrom::End(0))?;
        Ok(Log(log))
    }

    /// Returns the new lines that contain all of `words`.
    pub(super) fn lines(&mut self, words: &[&str]) -> Vec<String> {
        let mut lines = Vec::new();
        let mut record = [0; 8192];
        while let Ok(n) = self.0.read(&mut record) {
            let text = String::from_utf8_lossy(&record[..n]).into_owned();
            if words.iter().all(|word| text.contains(word)) {
                lines.push(text);
            }
        }
        lines
    }

    /// Waits for a line that contains all of `words`, and returns the line.
    pub(super) fn wait(&mut self, words: &[&str]) -> Result<String> {
        let mut found = Vec::new();
        super::inflight::until(&format!("the kernel log has a line with {words:?}"), || {
            found.append(&mut self.lines(words));
            Ok(!found.is_empty())
        })?;
        found.pop().context("a line")
    }
}

pub(super) fn revoke(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let mut all: Vec<(abi::p2pmem_alloc, OwnedFd, Importer)> = Vec::new();
    for n in 1..=20 {
        let (a, dma_buf) = exported_buffer(fd, (n * 64) << 10, 0)?;
        let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
        importer.say("pin").map_err(errno)?;
        all.push((a, dma_buf, importer));
    }
    // An importer that never mapped; the handle of its buffer is freed.
    let (a, dma_buf) = exported_buffer(fd, MIB, 0)?;
    let idle = Importer::new()?;
    idle.attach(bed, &dma_buf, "nvme0", GOOD).map_err(errno)?;
    free(fd, a.handle).map_err(errno)?;
    timed_unbind(bed)?;
    for (a, dma_buf, importer) in &all {
        let b = buffer(fd, a.handle).map_err(errno)?;
        ensure!(
            b.state == abi::P2PMEM_BUFFER_GONE && b.exports == 1 && b.attachments == 1,
            "{b:?}"
        );
        let state = importer.state()?;
        ensure!(state.get("invalidated") == 1 && state.get("mapped") == 0, "{state:?}");
        expect("mapping again", importer.say("map"), libc::ENODEV)?;
        expect(
            "attaching again",
            Importer::new()?.attach(bed, dma_buf, "nvme0", GOOD),
            libc::ENODEV,
        )?;
        expect("exporting again", export(fd, a.handle, 0, &[(0, 4096)]), libc::ENODEV)?;
    }
    ensure!(idle.state()?.get("invalidated") == 1);
    expect("mapping for the first time", idle.say("map"), libc::ENODEV)?;
    // Other buffers use the memory now, while the old dma-bufs are still open.
    bed.publish("accel0")?;
    let (b, fresh) = exported_buffer(fd, MIB, 0)?;
    let new = Importer::mapped(bed, &fresh, "nvme0", GOOD)?;
    let at = buffer(fd, b.handle).map_err(errno)?.bus_addr;
    let entries = new.state()?.entries;
    // Behind an IOMMU, the drive uses an IOVA, not the bus address.
    let group = bed.device("nvme0")?.sysfs().join("iommu_group/type");
    let as_wanted = match group.exists() && read(&group)?.starts_with("DMA") {
        false => entries == [(at, MIB)],
        true => entries.len() == 1 && entries[0].1 == MIB && entries[0].0 != at,
    };
    ensure!(as_wanted, "bus address {at:#x}: the drive maps {entries:x?}");
    for (_, _, importer) in &all {
        expect(
            "mapping memory that belongs to another buffer now",
            importer.say("map"),
            libc::ENODEV,
        )?;
    }
    drop(all);
    ensure!(new.state()?.get("mapped") == 1);
    Ok(())
}

/// Unbinds accel0 in another thread while `during` runs; `during` gets a flag that is set when unbinding has ended.
/// Returns the time that unbinding took.
fn unbind_during(bed: &Bed, during: impl FnOnce(&AtomicBool) -> Result<()>) -> Result<Duration> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let unbind = scope.spawn(|| {
            let start = Instant::now();
            let answer = bed.unbind("accel0");
            done.store(true, Ordering::SeqCst);
            answer.map(|()| start.elapsed())
        });
        let during = during(&done);
        let took = unbind.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        during.and(took)
    })
}

/// Returns the seconds of waiting that a line of the log states.
fn since(line: &str) -> Result<u64> {
    let (_, rest) = line.split_once(" since ").with_context(|| line.to_owned())?;
    let (seconds, _) = rest.split_once(" s").with_context(|| line.to_owned())?;
    Ok(seconds.parse()?)
}

/// Returns whether the module logged lines on schedule: after 1, 10 and 60 s and every 300 s, each once. On a busy
/// machine, lines may be late.
fn is_scheduled(seconds: &[u64]) -> bool {
    let mut before = 0;
    seconds.iter().all(|&now| {
        let passed = |moment: &u64| before < *moment && *moment <= now;
        let due = [1, 10, 60].iter().any(passed) || now / 300 > before / 300;
        before = now;
        due
    })
}

pub(super) fn hold(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let rule = bed.provider_dir("accel0")?.join("pinned_exports");
    write(&rule, "1")?;
    // An importer that keeps its mapping when notified, and an importer that cannot be notified; both beside one that
    // works.
    for (how, flags, word) in [
        ("p2p notify hold", 0, "1 mappings, revocable"),
        ("p2p", abi::P2PMEM_EXPORT_PINNED, "1 mappings, not revocable"),
    ] {
        let (a, dma_buf) = exported_buffer(fd, MIB, flags)?;
        let (good, other) = exported_buffer(fd, MIB, 0)?;
        let importer = Importer::mapped(bed, &dma_buf, "nvme0", how)?;
        let working = Importer::mapped(bed, &other, "nvme0", GOOD)?;
        let map = Mapping::shared(fd, a.mmap_offset, 4096).map_err(errno)?;
        map.set(0, 1);
        let bdf = &bed.device("nvme0")?.bdf;
        let mut log = Log::new()?;
        let mut checks = |done: &AtomicBool| -> Result<()> {
            let line = log.wait(&["waiting for", bdf, "to let go of dma-buf"])?;
            let me = format!("pid {} (", std::process::id());
            ensure!(line.contains(&me) && line.contains(word), "{line}");
            // Unbinding still waits, and everything else of the provider has ended.
            ensure!(
                !done.load(Ordering::SeqCst),
                "unbinding ended while the importer still had a mapping"
            );
            ensure!(
                working.state()?.get("mapped") == 0,
                "revocation of one importer waits for the importer that keeps its mapping"
            );
            for handle in [a.handle, good.handle] {
                let b = buffer(fd, handle).map_err(errno)?;
                ensure!(b.state != abi::P2PMEM_BUFFER_LIVE, "{b:?}");
            }
            ensure!(listing()?.contains(", revoked, exported by"), "{}", listing()?);
            sys::survive_bus_errors()?;
            let errors = sys::bus_errors();
            map.get(0);
            ensure!(
                sys::bus_errors() == errors + 1,
                "a revoked mapping did not raise SIGBUS"
            );
            // Requests do not block while the provider is removed.
            expect(
                "ALLOC while the only provider is removed",
                alloc(fd, 4096),
                libc::ENODEV,
            )?;
            // Time for a flood of lines. Each line states its seconds of waiting; the schedule allows few lines.
            thread::sleep(Duration::from_millis(2500));
            let mut all = vec![since(&line)?];
            for line in log.lines(&["waiting for", "to let go of dma-buf"]) {
                all.push(since(&line)?);
            }
            ensure!(
                is_scheduled(&all),
                "lines in the log are off schedule, after {all:?} seconds"
            );
            ensure!(
                !done.load(Ordering::SeqCst),
                "unbinding ended while the importer still had a mapping"
            );
            Ok(())
        };
        unbind_during(bed, |done| {
            let checked = checks(done);
            // Unbinding ends only after this, also when a check failed.
            importer.say("unmap").map_err(errno)?;
            checked
        })?;
        ensure!(buffer(fd, a.handle).map_err(errno)?.state == abi::P2PMEM_BUFFER_GONE);
        expect("mapping again", importer.say("map"), libc::ENODEV)?;
        bed.publish("accel0")?;
    }
    write(&rule, "0")
}

/// The name of the part of these tests that runs in its own process.
pub(super) const PART: &str = "import-and-hold";

/// Imports a buffer and keeps the mapping when notified.
pub(super) fn part() -> Result<()> {
    let bed = Bed {
        devices: crate::devices::load()?,
    };
    let file = open()?;
    let (_, dma_buf) = exported_buffer(file.as_fd(), 4 * MIB, 0)?;
    let _importer = Importer::mapped(&bed, &dma_buf, "nvme0", "p2p notify hold")?;
    ready()
}

fn hold_killed(bed: &mut Bed) -> Result<()> {
    let part = Part::start(PART, &[])?;
    let mut log = Log::new()?;
    let took = unbind_during(bed, |done| {
        let waiting = log.wait(&["waiting for", "to let go of dma-buf"]);
        let ended = done.load(Ordering::SeqCst);
        part.kill()?;
        waiting?;
        ensure!(!ended, "unbinding ended while the importer still had a mapping");
        Ok(())
    })?;
    in_time!(took < scaled(BOUND), "unbinding took {took:?}");
    bed.publish("accel0")
}

fn locked(bed: &mut Bed) -> Result<()> {
    let me = format!("pid {} (", std::process::id());
    let status = bed.provider_dir("accel0")?.join("status");
    let other = Importer::new()?;
    // Memory of the provider, and memory that its function is attached to.
    for (is_exported, logged, shown) in [
        (true, "waiting for the lock of dma-buf", "to let go of dma-buf"),
        (false, "the dma-buf is locked", "to end attachment"),
    ] {
        let file = open()?;
        let fd = file.as_fd();
        let (_, exported) = exported_buffer(fd, MIB, 0)?;
        let importer = Importer::mapped(bed, &exported, "nvme0", GOOD)?;
        let host = sys::host_dma_buf(PAGE)?;
        let accel = bed.provider("accel0")?.id;
        let attached = attach(fd, accel, &host, 0).map_err(errno)?;
        let dma_buf = if is_exported { &exported } else { &host };
        let locker = Importer::new()?;
        let mut log = Log::new()?;
        thread::scope(|scope| -> Result<()> {
            let locking = scope.spawn(|| locker.say(&format!("lock {}", dma_buf.as_raw_fd())));
            let is_locked = super::inflight::until("the dma-buf is locked", || Ok(other.state()?.get("locked") == 1));
            let unbound = is_locked.and_then(|()| {
                unbind_during(bed, |done| {
                    let checked = log.wait(&[logged]).and_then(|_| {
                        let said = read(&status)?;
                        ensure!(
                            said.starts_with("being removed: waiting for")
                                && said.contains(shown)
                                && said.contains(&me),
                            "{said}"
                        );
                        // Reading the listings waits for nobody.
                        ensure!(listing()?.contains(", exported by") && super::attach::listing().is_ok());
                        ensure!(!done.load(Ordering::SeqCst), "unbinding ended with the dma-buf locked");
                        Ok(())
                    });
                    other.say("unlock").map_err(errno)?;
                    checked
                })
            });
            // Again, for a test that failed before it unbound: the thread ends only after this.
            other.say("unlock").map_err(errno)?;
            let answer = locking.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
            unbound?;
            answer.map_err(errno)
        })?;
        ensure!(importer.state()?.get("mapped") == 0);
        super::attach::none_attached()?;
        bed.publish("accel0")?;
        detach(fd, attached.answer.handle).map_err(errno)?;
    }
    Ok(())
}

fn fences(bed: &mut Bed) -> Result<()> {
    // A fence that the importer signals after a while.
    let file = open()?;
    let fd = file.as_fd();
    let (_, dma_buf) = exported_buffer(fd, MIB, 0)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
    importer.say("fence").map_err(errno).context("fence")?;
    unbind_during(bed, |done| {
        super::inflight::until("the importer is notified", || {
            Ok(importer.state()?.get("invalidated") == 1)
        })?;
        thread::sleep(Duration::from_millis(300));
        // Unbinding waits for a fence for a limited time only, so a late machine may miss this check.
        in_time!(!done.load(Ordering::SeqCst), "unbinding ended with DMA in progress");
        importer.say("signal").map_err(errno)
    })?;
    drop((importer, dma_buf));
    bed.publish("accel0")?;
    // Ten fences that are never signalled: one limit applies to all of them.
    let mut all = Vec::new();
    for _ in 0..10 {
        let (_, dma_buf) = exported_buffer(fd, MIB, 0)?;
        let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
        importer.say("fence").map_err(errno).context("fence")?;
        all.push((dma_buf, importer));
    }
    let mut log = Log::new()?;
    let start = Instant::now();
    bed.unbind("accel0")?;
    let took = start.elapsed();
    ensure!(
        took > Duration::from_secs(1),
        "unbinding waited only {took:?} for fences that are not signalled"
    );
    in_time!(took < scaled(BOUND), "unbinding took {took:?}");
    log.wait(&["going on with fences of dma-buf"])?;
    drop(all);
    bed.publish("accel0")
}

pub(super) fn order(bed: &mut Bed) -> Result<()> {
    let (free_before, buffers) = bed.settled()?;
    for n in 0..24 {
        // The n-th permutation of four.
        let mut left = vec![0, 1, 2, 3];
        let order = [n / 6, n / 2 % 3, n % 2, 0].map(|at| left.remove(at));
        let mut file = Some(open()?);
        let fd = file.as_ref().context("file")?.as_fd();
        let (a, dma_buf) = exported_buffer(fd, MIB, 0)?;
        let mut map = Some(Mapping::shared(fd, a.mmap_offset, MIB as usize).map_err(errno)?);
        if let Some(map) = &map {
            map.set(0, 0x5ec2e7);
        }
        let mut importer = Some(Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?);
        let mut dma_buf = Some(dma_buf);
        for (step, what) in order.into_iter().enumerate() {
            let row = bed.provider("accel0")?;
            ensure!(
                row.buffers == buffers + 1 && row.free + MIB <= free_before && row.scrubbing == 0,
                "{order:?}: before step {step}: {row:?}"
            );
            match what {
                0 => drop(file.take()),
                1 => drop(map.take()),
                2 => drop(dma_buf.take()),
                _ => drop(importer.take()),
            }
        }
        ensure!(
            bed.settled()? == (free_before, buffers),
            "free bytes or buffers changed after the order {order:?}"
        );
    }
    // The memory was cleared.
    let file = open()?;
    let a = alloc(file.as_fd(), 16 * MIB).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, 16 << 20).map_err(errno)?;
    for at in (0..map.len()).step_by(4096) {
        ensure!(
            map.get(at) == 0,
            "memory was not cleared: {:#x} at {at:#x}",
            map.get(at)
        );
    }
    Ok(())
}

fn kill(bed: &mut Bed) -> Result<()> {
    let before = bed.settled()?;
    for _ in 0..5 {
        let part = Part::start(PART, &[])?;
        ensure!(bed.provider("accel0")?.exports == 1);
        part.kill()?;
        ensure!(
            bed.settled()? == before,
            "free bytes or buffers changed after a process was killed"
        );
        ensure!(bed.provider("accel0")?.exports == 0 && listing()?.is_empty());
    }
    // A child that inherited the descriptor can import after the parent closed all of its own descriptors.
    let file = open()?;
    let (_, dma_buf) = exported_buffer(file.as_fd(), MIB, 0)?;
    let (read, pipe) = rustix::pipe::pipe()?;
    let bed_ref = &*bed;
    // The parent drops what the closure owns. The child closes all but the dma-buf.
    let child = sys::spawn_child(move || {
        drop(file);
        let waited = rustix::io::read(&read, &mut [0]);
        match Importer::mapped(bed_ref, &dma_buf, "nvme0", GOOD) {
            Ok(_) if waited.is_ok() => 0,
            _ => 1,
        }
    })?;
    let row = bed.provider("accel0")?;
    ensure!(row.exports == 1 && row.buffers == before.1 + 1, "{row:?}");
    rustix::io::write(&pipe, b"x")?;
    let status = child.wait()?;
    ensure!(status == 0, "importing in the child failed, status {status:#x}");
    ensure!(
        bed.settled()? == before,
        "free bytes or buffers changed after the child ended"
    );
    Ok(())
}

fn rmmod(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let (_, dma_buf) = exported_buffer(file.as_fd(), MIB, 0)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
    drop(file);
    bed.unpublish("accel0")?;
    ensure!(
        command("rmmod", &["p2pmem"]).is_err(),
        "rmmod succeeded while a dma-buf is open"
    );
    drop(dma_buf);
    ensure!(
        command("rmmod", &["p2pmem"]).is_err(),
        "rmmod succeeded while an importer is attached"
    );
    expect("mapping after the removal", importer.say("map"), libc::ENODEV)?;
    drop(importer);
    command("rmmod", &["p2pmem"])?;
    bed.load_module()?;
    bed.publish("accel0")
}

fn many(bed: &mut Bed) -> Result<()> {
    may_open(4096)?;
    let file = open()?;
    let fd = file.as_fd();
    let mut all = Vec::new();
    let mut importers = Vec::new();
    for n in 0..1000u64 {
        // Ten exports of each buffer.
        if n % 10 == 0 {
            all.push((alloc(fd, 64 << 10).map_err(errno)?, Vec::new()));
        }
        let (a, dma_bufs) = all.last_mut().context("a buffer")?;
        let dma_buf = export(fd, a.handle, 0, &[(n % 10 * 4096, 4096)]).map_err(errno)?;
        if n % 10 == 0 {
            importers.push(Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?);
        }
        dma_bufs.push(dma_buf);
    }
    let row = bed.provider("accel0")?;
    ensure!(row.exports == 1000, "{row:?}");
    ensure!(buffer(fd, all[0].0.handle).map_err(errno)?.exports == 10);
    ensure!(listing()?.lines().filter(|l| l.starts_with("dma-buf ")).count() == 1000);
    timed_unbind(bed)?;
    for importer in &importers {
        ensure!(importer.state()?.get("mapped") == 0);
    }
    bed.publish("accel0")?;
    drop(all);
    drop(importers);
    Ok(())
}

pub(super) fn disable_and_unbind(bed: &mut Bed) -> Result<()> {
    contended(10, || {
        let file = open()?;
        let fd = file.as_fd();
        let (a, dma_buf) = exported_buffer(fd, MIB, 0)?;
        let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
        let enable = bed.provider_dir("accel0")?.join("enable");
        let unbind = || -> Result<()> {
            timed_unbind(bed)?;
            // After the unbind, the provider is removed, whichever thread removed it.
            let b = buffer(fd, a.handle).map_err(errno)?;
            ensure!(b.state == abi::P2PMEM_BUFFER_GONE, "{b:?}");
            ensure!(importer.state()?.get("mapped") == 0 && bed.provider("accel0").is_err());
            Ok(())
        };
        // The write to `enable` may come too late and fail, because the device is unbound; such a round is no race.
        let (disabled, unbound, met) = at_once(|| std::fs::write(&enable, "0"), unbind)?;
        unbound?;
        bed.publish("accel0")?;
        Ok(met && disabled.is_ok())
    })
}

pub(super) fn race(bed: &mut Bed) -> Result<()> {
    const ROUNDS: u32 = 15;
    let bed = &*bed;
    // The only errno that the calls may fail with while the provider comes and goes.
    let allowed = |busy: &Busy, what: &str, code: i32| -> Result<()> {
        busy.refuse();
        match code {
            libc::ENODEV => Ok(()),
            code => bail!("{what}: {}", errno(code)),
        }
    };
    let worker = |busy: &Busy, seed: u64| -> Result<()> {
        let file = open()?;
        let fd = file.as_fd();
        let mut n = seed;
        while busy.goes_on() {
            n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let a = match alloc(fd, 256 << 10) {
                Ok(a) => a,
                Err(code) => {
                    allowed(busy, "ALLOC", code)?;
                    continue;
                }
            };
            let made = export(fd, a.handle, 0, &[(0, 64 << 10), (128 << 10, 64 << 10)]);
            if (n >> 40) & 1 == 0 {
                free(fd, a.handle).map_err(errno)?;
            }
            let dma_buf = match made {
                Ok(dma_buf) => dma_buf,
                Err(code) => {
                    allowed(busy, "EXPORT_DMABUF", code)?;
                    continue;
                }
            };
            let importer = Importer::new()?;
            if let Err(code) = importer.attach(bed, &dma_buf, "nvme0", GOOD) {
                allowed(busy, "attach", code)?;
                continue;
            }
            for _ in 0..(n >> 41) & 3 {
                match importer.say("map") {
                    Ok(()) => {
                        busy.serve();
                        // The revocation may have ended the mapping already.
                        let _ = importer.say("unmap");
                    }
                    Err(code) => allowed(busy, "map", code)?,
                }
            }
            let _ = importer.say("map");
            match (n >> 43) & 3 {
                0 => drop(dma_buf),
                1 => drop(importer),
                _ => {}
            }
        }
        Ok(())
    };
    let workers = [1, 2, 3].map(|seed| move |busy: &Busy| worker(busy, seed));
    let busy = Busy::during(&[&workers[0], &workers[1], &workers[2]], |busy| {
        for _ in 0..ROUNDS {
            busy.await_served(3)?;
            timed_unbind(bed)?;
            bed.publish("accel0")?;
        }
        Ok(())
    })?;
    ensure!(
        busy.served() > 0 && busy.refused() > 0,
        "no operation succeeded, or none failed: {busy:?}"
    );
    Ok(())
}
