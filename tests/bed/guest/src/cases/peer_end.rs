// SPDX-License-Identifier: MIT OR Apache-2.0

//! Revocation, process exit and rmmod while memory is registered by `ibv_reg_mr()`.

use std::collections::{BTreeSet, VecDeque};
use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sideway::ibverbs::memory_region::MemoryRegion;

use super::life::{Part, ready};
use super::peer::{Held, MIB, Row, SOON, arrives, await_rows, check, counted, fill, nic, registered_as, rows};
use super::rdma_hold::{Hooks, LEN as WRITE};
use super::rdma_programs::with_rxe;
use super::rdma_user::word;
use super::{Bed, Case, command, errno, read, write};
use crate::in_time;
use crate::patience::patiently;
use crate::sys::{self, Mapping};
use crate::verbs::{Adapter, REMOTE_ACCESS, SUCCESS};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "peer-stale",
        about: "20 RDMA WRITEs by the NIC and by rxe to a revoked buffer all fail, and none changes the memory",
        topology: "nic",
        ruins: false,
        run: stale_ex,
    },
    Case {
        name: "peer-legacy",
        about: "as peer-stale, as a legacy client, for which the RDMA core unmaps during the invalidation",
        topology: "nic",
        ruins: false,
        run: stale_legacy,
    },
    Case {
        name: "peer-persistent",
        about: "as a persistent client (no invalidation), removing the provider waits until the memory is deregistered",
        topology: "nic",
        ruins: false,
        run: persistent,
    },
    Case {
        name: "peer-held",
        about: "freed and unmapped memory that is registered is not allocated again before it is deregistered",
        topology: "nic",
        ruins: false,
        run: held,
    },
    Case {
        name: "peer-processes",
        about: "exec, exit and SIGKILL end the registrations of a process, and fork keeps them",
        topology: "nic",
        ruins: false,
        run: processes,
    },
    Case {
        name: "peer-rmmod",
        about: "rmmod fails while a registration exists, whose process debugfs lists, and succeeds afterwards",
        topology: "nic",
        ruins: false,
        run: rmmod,
    },
    Case {
        name: "peer-race",
        about: "registration, deregistration and removal of the provider run concurrently, many times",
        topology: "nic",
        ruins: false,
        run: race,
    },
];

/// Number of writes to each revoked registration.
const ATTEMPTS: u64 = 20;

/// Result of the writes to a revoked registration, printed as `peer-report`, which the runner adds to `peer.json`.
#[derive(Debug, serde::Serialize)]
struct Stale {
    registered_as: String,
    adapter: String,
    calls_in_order: Vec<String>,
    stale_attempts: u64,
    /// Writes that failed with a remote access error.
    stale_refused: u64,
    /// Writes that changed the memory.
    stale_writes: u64,
    /// Duration of unbinding.
    revoke_ms: u64,
}

impl Stale {
    /// Prints the result for the report. Fails if a write changed the memory, an attempt was not refused, or the RDMA
    /// core's calls differ from the expected ones.
    fn verdict(&self) -> Result<()> {
        println!("peer-report: {}", serde_json::to_string(self)?);
        ensure!(
            self.stale_attempts == ATTEMPTS && self.stale_refused == ATTEMPTS && self.stale_writes == 0,
            "expected {ATTEMPTS} refused writes and none that changed the memory: {self:?}"
        );
        let mut expected = vec![
            "acquire",
            "get_pages",
            "dma_map",
            "get_page_size",
            "invalidate",
            "revoke",
        ];
        // For a client of form `ex`, the RDMA core does not call dma_unmap and put_pages.
        if self.registered_as == "legacy" {
            expected.extend(["dma_unmap", "put_pages"]);
        }
        expected.push("release");
        ensure!(self.calls_in_order == expected, "{self:?}: expected {expected:?}");
        Ok(())
    }
}

/// Maps 1 MiB of accel0's BAR through sysfs. The device must have no driver.
fn bar(bed: &Bed, offset: u64) -> Result<Mapping> {
    let path = bed.device("accel0")?.sysfs().join("resource2");
    let bar = OpenOptions::new().read(true).write(true).open(&path);
    let bar = bar.with_context(|| path.display().to_string())?;
    Mapping::shared(bar.as_fd(), offset, MIB)
        .map_err(errno)
        .context("mmap() of resource2")
}

/// Does [`ATTEMPTS`] RDMA WRITEs of various lengths and offsets, each on a new connection. Returns the number of writes
/// that were refused, and of writes that changed the memory.
fn attempts(adapter: &Adapter, sent: &MemoryRegion, received: &MemoryRegion, memory: &Mapping) -> Result<(u64, u64)> {
    for at in (0..MIB).step_by(8) {
        memory.set(at, word(7, at));
    }
    let (mut refused, mut arrived) = (0, 0);
    for n in 0..ATTEMPTS {
        let len = [MIB, 4096, 8, 65536 + 24][n as usize % 4];
        let offset = (n * 52_427 % (MIB - len + 1) as u64) & !7;
        let status = adapter.connect()?.write(sent, len, received, offset)?;
        println!("attempt {n} with {} ended with status {status}", adapter.name);
        refused += u64::from(status == REMOTE_ACCESS);
        arrived += u64::from((0..MIB).step_by(8).any(|at| memory.get(at) != word(7, at)));
    }
    Ok((refused, arrived))
}

/// The log of the debug kernel's RDMA core: calls to clients.
const CORE_LOG: &str = "/sys/kernel/debug/ib_peer_mem/log";

/// Returns the calls, in order, that the RDMA core has made since its log was cleared, for the registration of an
/// adapter at an address. Fails unless the log has exactly one such registration.
fn called(adapter: &str, address: u64) -> Result<Vec<String>> {
    let log = read(Path::new(CORE_LOG))?;
    let of = [format!("device={adapter}"), format!("addr={address:#x}")];
    let mut calls = Vec::new();
    let mut ids = BTreeSet::new();
    for line in log.lines() {
        let words: Vec<_> = line.split(' ').collect();
        if !of.iter().all(|wanted| words.contains(&wanted.as_str())) {
            continue;
        }
        let word = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
        calls.push(word("call=").context("a line of the log has no call=")?.to_owned());
        ids.insert(word("id=").context("a line of the log has no id=")?.to_owned());
    }
    ensure!(
        ids.len() == 1,
        "the log has {} registrations with {of:?} instead of one:\n{log}",
        ids.len()
    );
    Ok(calls)
}

/// Registers a buffer with the NIC and with rxe, unbinds the provider, and tries to write.
fn stale(bed: &mut Bed, wanted: &str) -> Result<()> {
    bed.publish("accel1")?;
    let form = registered_as()?;
    ensure!(
        form == wanted,
        "the module is a client of form {form:?} instead of {wanted:?}"
    );
    let nic = nic(bed)?;
    let (source, target) = (Held::new(bed, "accel1", MIB)?, Held::new(bed, "accel0", MIB)?);
    fill(&source.map, 1);
    write(Path::new(CORE_LOG), "clear")?;
    with_rxe(|name, _| {
        let software = Adapter::open(name)?;
        let mut all = Vec::new();
        for adapter in [&nic, &software] {
            let (sent, received) = (source.register(adapter)?, target.register(adapter)?);
            arrives(adapter, &sent, MIB, &received, 0)?;
            check(&target.map, 0, MIB, 1, 0)?;
            all.push((adapter, sent, received));
        }
        let start = Instant::now();
        bed.unbind("accel0")?;
        let revoke_ms = u64::try_from(start.elapsed().as_millis())?;
        let memory = bar(bed, target.buffer.bar_offset)?;
        for (adapter, sent, received) in all {
            let (stale_refused, stale_writes) = attempts(adapter, &sent, &received, &memory)?;
            let row = rows()?.into_iter().find(|row| {
                row.address == target.map.address()
                    && row.owner.starts_with("virtual") == (adapter.name == software.name)
            });
            let row = row.context("the revoked registration is not listed")?;
            ensure!(row.state == "revoked", "the registration is not revoked: {row:?}");
            drop(received);
            // Compare with the RDMA core's own log, not with the module's counters.
            let calls_in_order = called(&adapter.name, target.map.address())?;
            Stale {
                registered_as: form.clone(),
                adapter: adapter.name.clone(),
                calls_in_order,
                stale_attempts: ATTEMPTS,
                stale_refused,
                stale_writes,
                revoke_ms,
            }
            .verdict()?;
        }
        Ok(())
    })?;
    let counts = counted()?;
    ensure!(
        (counts["out_of_order"], counts["repeated"]) == (0, 0),
        "calls were out of order or repeated: {counts:?}"
    );
    Ok(())
}

pub(super) fn stale_ex(bed: &mut Bed) -> Result<()> {
    stale(bed, "ex")
}

/// Reloads the module with parameter `peer_memory=form`, and publishes both accelerators again.
fn reload(bed: &Bed, form: &str) -> Result<()> {
    for name in ["accel0", "accel1"] {
        bed.unpublish(name)?;
    }
    command("rmmod", &["p2pmem"])?;
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE is not set: it is the path of the module")?;
    command("insmod", &[&module, &format!("peer_memory={form}")])?;
    ensure!(
        registered_as()? == form,
        "the module is a client of form {:?} instead of {form:?}",
        registered_as()?
    );
    bed.publish("accel0")?;
    bed.publish("accel1")
}

/// Runs a test with the module loaded as a client of `form`, then loads the module as `ex` again. Also checks that an
/// unknown form is refused.
fn as_form(bed: &mut Bed, form: &str, test: fn(&mut Bed) -> Result<()>) -> Result<()> {
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE is not set: it is the path of the module")?;
    for name in ["accel0", "accel1"] {
        bed.unpublish(name)?;
    }
    command("rmmod", &["p2pmem"])?;
    let wrong = command("insmod", &[&module, "peer_memory=sometimes"]);
    ensure!(wrong.is_err(), "insmod accepted peer_memory=sometimes");
    bed.load_module()?;
    reload(bed, form)?;
    let result = test(bed);
    bed.publish("accel0")?;
    reload(bed, "ex")?;
    result
}

fn stale_legacy(bed: &mut Bed) -> Result<()> {
    as_form(bed, "legacy", |bed| stale(bed, "legacy"))
}

fn persistent(bed: &mut Bed) -> Result<()> {
    as_form(bed, "persistent", |bed| {
        let nic = nic(bed)?;
        let (source, target) = (Held::new(bed, "accel1", MIB)?, Held::new(bed, "accel0", MIB)?);
        let (sent, received) = (source.register(&nic)?, target.register(&nic)?);
        fill(&source.map, 1);
        let bed = &*bed;
        let start = Instant::now();
        let waited = thread::scope(|scope| -> Result<Duration> {
            let unbinding = scope.spawn(|| bed.unbind("accel0"));
            let rows = await_rows("the registration's state is revoking", |rows| {
                rows.iter()
                    .any(|row| row.address == target.map.address() && row.state == "revoking")
            });
            // The removal waits for the registration. Until then writes reach the buffer, its memory is not allocated
            // again, and new registrations fail.
            let result = rows.and_then(|_| {
                super::expect(
                    "ibv_reg_mr() during the removal",
                    nic.register(target.map.address(), MIB).map(|_| ()),
                    libc::ENODEV,
                )?;
                let status = nic.connect()?.write(&sent, 4096, &received, 0)?;
                ensure!(
                    status == SUCCESS,
                    "RDMA WRITE during the removal failed with status {status}"
                );
                let logged = || -> Result<bool> {
                    let log = Command::new("dmesg").output()?.stdout;
                    let waiting = format!("waiting for pid {} (", std::process::id());
                    Ok(String::from_utf8_lossy(&log)
                        .lines()
                        .any(|line| line.contains(&waiting) && line.contains("to end its registration")))
                };
                let deadline = Instant::now() + patiently(SOON);
                while !logged()? {
                    in_time!(
                        Instant::now() < deadline,
                        "the log does not name the process of the registration within {SOON:?}"
                    );
                    thread::sleep(Duration::from_millis(50));
                }
                ensure!(
                    !unbinding.is_finished(),
                    "the provider was removed before the registration ended"
                );
                Ok(())
            });
            drop(received);
            unbinding
                .join()
                .map_err(|_| anyhow::anyhow!("the thread that unbinds panicked"))??;
            result?;
            Ok(start.elapsed())
        })?;
        println!("the removal took {waited:?}, until the registration ended");
        ensure!(
            rows()?.iter().all(|row| row.address != target.map.address()),
            "the ended registration is still listed: {:#?}",
            rows()?
        );
        Ok(())
    })
}

fn held(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let nic = nic(bed)?;
    let source = Held::new(bed, "accel1", MIB)?;
    let sent = source.register(&nic)?;
    let free = bed.settled()?.0;
    let target = Held::new(bed, "accel0", MIB)?;
    let received = target.register(&nic)?;
    // Drops file, handle and mapping.
    drop(target);
    ensure!(
        bed.settled()?.0 == free - MIB as u64,
        "free bytes grew although the buffer is registered"
    );
    let rest = Held::new(bed, "accel0", bed.provider("accel0")?.largest as usize)?;
    // The registered memory is one piece of 1 MiB. Within `rest`, this piece would cover two of the marks.
    let marks = || (0..rest.map.len()).step_by(MIB / 2);
    for at in marks() {
        rest.map.set(at, 0xabab);
    }
    fill(&source.map, 3);
    arrives(&nic, &sent, MIB, &received, 0)?;
    for at in marks() {
        ensure!(rest.map.get(at) == 0xabab, "an RDMA WRITE changed another buffer");
    }
    drop((rest, received));
    ensure!(
        bed.settled()?.0 == free,
        "{} bytes are free instead of {free}",
        bed.settled()?.0
    );
    Ok(())
}

/// The name of the part that registers and waits.
pub(super) const PART: &str = "peer-hold";

/// Registers a buffer, then does as the argument says: `exit` exits and `exec` executes `cat`, both without
/// deregistering; `fork` forks, and uses the registration; otherwise, and after `fork`, closes file and mapping, waits,
/// and deregisters. Waits for a line before exit, exec or deregistration.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let name = std::env::var("P2PMEM_RDMA_NIC0").context("P2PMEM_RDMA_NIC0 is not set: it names the NIC")?;
    let nic = Adapter::open(&name)?;
    let file = super::open()?;
    let buffer = super::alloc(file.as_fd(), MIB as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, MIB).map_err(errno)?;
    let region = nic.register(map.address(), MIB).map_err(errno)?;
    match arguments.first().map_or("", String::as_str) {
        "exec" => {
            ready()?;
            // cat reads standard input until the parent process closes the pipe.
            let error = Command::new("cat").exec();
            return Err(error).context("exec of cat");
        }
        "fork" => {
            let status = sys::in_child(|| 0)?;
            ensure!(status == 0, "the child ended with {status}");
            ensure!(
                rows()?.iter().any(|row| row.state == "mapped"),
                "the registration is not mapped after fork: {:#?}",
                rows()?
            );
            arrives(&nic, &region, 4096, &region, 65536)?;
        }
        "exit" => {
            ready()?;
            // Skips destructors, so nothing is deregistered.
            std::process::exit(0);
        }
        _ => {}
    }
    drop((map, file));
    ready()?;
    drop(region);
    Ok(())
}

/// Starts [`part`] with the name of the NIC.
fn start(bed: &Bed, arguments: &[&str]) -> Result<Part> {
    let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
    Part::start_with(PART, arguments, &[("P2PMEM_RDMA_NIC0", &nic)])
}

fn processes(bed: &mut Bed) -> Result<()> {
    let one = |rows: &[Row]| rows.len() == 1 && rows[0].state == "mapped" && rows[0].entries == 1;
    for action in ["kill", "fork", "exit", "exec"] {
        let part = start(bed, &[action])?;
        let rows = await_rows("one registration is mapped", one)?;
        ensure!(
            rows[0].owner.contains(&format!(" pid {} (", part.id())),
            "the registration's owner is not pid {}: {rows:#?}",
            part.id()
        );
        match action {
            "kill" => part.kill()?,
            "exec" => {
                // cat runs in the same process, without the registration.
                let part = part.go_on()?;
                await_rows("exec ended the registration", <[Row]>::is_empty)?;
                ensure!(
                    Path::new(&format!("/proc/{}", part.id())).exists(),
                    "the process exited after exec"
                );
                part.kill()?;
            }
            _ => part.finish()?,
        }
        await_rows(&format!("no registration after {action}"), <[Row]>::is_empty)?;
    }
    Ok(())
}

fn rmmod(bed: &mut Bed) -> Result<()> {
    let part = start(bed, &[])?;
    // Only the registration is left: no file, mapping, configfs directory or provider.
    bed.unpublish("accel0")?;
    bed.unpublish("accel1")?;
    let refused = command("rmmod", &["p2pmem"]);
    let refused = refused
        .err()
        .context("rmmod succeeded with a live registration")?
        .to_string();
    ensure!(
        refused.contains("in use"),
        "rmmod failed without \"in use\" in its message: {refused}"
    );
    let all = rows()?;
    ensure!(
        all.len() == 1 && all[0].state == "revoked" && all[0].owner.contains(&format!(" pid {} (", part.id())),
        "expected one revoked registration of pid {}: {all:#?}",
        part.id()
    );
    ensure!(
        read(Path::new("/sys/module/p2pmem/refcnt"))? == "1",
        "the module's refcnt is {} instead of 1",
        read(Path::new("/sys/module/p2pmem/refcnt"))?
    );
    part.finish()?;
    command("rmmod", &["p2pmem"])?;
    bed.load_module()
}

fn race(bed: &mut Bed) -> Result<()> {
    const ROUNDS: u32 = 20;
    let nic = nic(bed)?;
    bed.publish("accel1")?;
    let source = Held::new(bed, "accel1", WRITE)?;
    let sent = source.register(&nic)?;
    let (mut invalidated, mut registered, mut refused) = (0, 0, 0);
    for round in 0..ROUNDS {
        bed.publish("accel0")?;
        let held = Held::new(bed, "accel0", MIB)?;
        let target = held.register(&nic)?;
        let regions: VecDeque<_> = (0..8).map(|_| held.register(&nic)).collect::<Result<_>>()?;
        let before = counted()?["invalidate"];
        // The NIC's write to `target` is held in flight. The removal waits in the invalidation of `target` until the
        // other threads have run into the removal.
        let hooks = Hooks::new(true)?;
        hooks.arm()?;
        let together = Barrier::new(2);
        let panicked = |_| anyhow::anyhow!("a thread panicked");
        thread::scope(|scope| -> Result<()> {
            let write = scope.spawn(|| nic.connect()?.write(&sent, WRITE, &target, 0));
            let result = (|| -> Result<()> {
                hooks.await_held()?;
                // Registers until a registration fails with ENODEV. Starts together with the removal.
                let registering = scope.spawn(|| -> Result<u64> {
                    together.wait();
                    let (mut made, deadline) = (0, Instant::now() + patiently(SOON));
                    loop {
                        in_time!(
                            Instant::now() < deadline,
                            "no registration failed within {SOON:?}: the provider is not being removed"
                        );
                        match nic.register(held.map.address(), MIB) {
                            Ok(_) => made += 1,
                            Err(libc::ENODEV) => return Ok(made),
                            Err(other) => bail!("ibv_reg_mr() during the removal: {}", errno(other)),
                        }
                    }
                });
                let unbinding = scope.spawn(|| {
                    together.wait();
                    bed.unbind("accel0")
                });
                let overlapped = hooks.await_waiting().and_then(|()| {
                    let deregistering = scope.spawn(move || {
                        // Start from the back in even rounds and from the front in odd ones, so that the removal and
                        // this thread meet at different registrations.
                        let mut regions = regions;
                        while let Some(region) = if round % 2 == 0 {
                            regions.pop_back()
                        } else {
                            regions.pop_front()
                        } {
                            drop(region);
                        }
                    });
                    let refusal = nic.register(held.map.address(), MIB).map(drop);
                    let in_progress = !unbinding.is_finished() && hooks.is_held()?;
                    hooks.release()?;
                    deregistering.join().map_err(panicked)?;
                    super::expect("ibv_reg_mr() during the removal", refusal, libc::ENODEV)?;
                    ensure!(
                        in_progress,
                        "round {round}: the removal ended before the other threads ran into it"
                    );
                    Ok(())
                });
                hooks.release()?;
                let unbound = unbinding.join().map_err(panicked)?;
                let succeeded = registering.join().map_err(panicked)?;
                overlapped.and(unbound)?;
                registered += succeeded?;
                refused += 1;
                Ok(())
            })();
            hooks.release()?;
            let status = write.join().map_err(panicked)?;
            result?;
            ensure!(status? == SUCCESS, "round {round}: the RDMA WRITE in flight failed");
            Ok(())
        })?;
        drop((target, hooks));
        ensure!(
            rows()?.len() == 1,
            "round {round}: expected one registration: {:#?}",
            rows()?
        );
        let more = counted()?["invalidate"] - before;
        ensure!(more > 0, "round {round}: nothing was invalidated");
        invalidated += more;
    }
    println!(
        "{invalidated} of {} registrations were invalidated before deregistration, {registered} succeeded during the \
         removals, {refused} were refused",
        u64::from(9 * ROUNDS) + registered
    );
    let counts = counted()?;
    ensure!(counts["out_of_order"] == 0, "calls were out of order: {counts:?}");
    Ok(())
}
