// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ends of buffers, of processes, and of the module, with memory registered by `ibv_reg_mr()`.

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
use crate::limits::scaled;
use crate::sys::{self, Mapping};
use crate::verbs::{Adapter, REMOTE_ACCESS, SUCCESS};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "peer-stale",
        about: "of 20 writes of either adapter to a buffer that was revoked, none reaches the memory",
        topology: "nic",
        ruins: false,
        run: stale_ex,
    },
    Case {
        name: "peer-legacy",
        about: "the same, where the core unmaps inside the invalidation",
        topology: "nic",
        ruins: false,
        run: stale_legacy,
    },
    Case {
        name: "peer-persistent",
        about: "where registrations cannot be taken back, the provider waits for them, and its memory is nobody else's",
        topology: "nic",
        ruins: false,
        run: persistent,
    },
    Case {
        name: "peer-held",
        about: "freed and unmapped memory that is registered is nobody else's until it is deregistered",
        topology: "nic",
        ruins: false,
        run: held,
    },
    Case {
        name: "peer-processes",
        about: "fork, exec, exit and SIGKILL with live registrations",
        topology: "nic",
        ruins: false,
        run: processes,
    },
    Case {
        name: "peer-rmmod",
        about: "rmmod is refused while there is a registration, whose process is listed, and works afterwards",
        topology: "nic",
        ruins: false,
        run: rmmod,
    },
    Case {
        name: "peer-race",
        about: "registration, deregistration and the end of the provider at once, many times",
        topology: "nic",
        ruins: false,
        run: race,
    },
];

/// The number of writes that are tried after an end.
const ATTEMPTS: u64 = 20;

/// The results of writes after an end.
#[derive(Debug, serde::Serialize)]
struct Stale {
    registered_as: String,
    adapter: String,
    calls_in_order: Vec<String>,
    stale_attempts: u64,
    /// Writes that ended with a remote access error.
    stale_refused: u64,
    stale_writes: u64,
    revoke_ms: u64,
}

impl Stale {
    /// Prints the results for the report. Fails if a write arrived, if an attempt was not refused, or if the core's calls are not
    /// the expected ones.
    fn verdict(&self) -> Result<()> {
        println!("peer-report: {}", serde_json::to_string(self)?);
        ensure!(
            self.stale_attempts == ATTEMPTS && self.stale_refused == ATTEMPTS && self.stale_writes == 0,
            "{self:?}"
        );
        let mut expected = vec![
            "acquire",
            "get_pages",
            "dma_map",
            "get_page_size",
            "invalidate",
            "revoke",
        ];
        // A client of the extended form unmaps by itself.
        if self.registered_as == "legacy" {
            expected.extend(["dma_unmap", "put_pages"]);
        }
        expected.push("release");
        ensure!(self.calls_in_order == expected, "{self:?}: expected {expected:?}");
        Ok(())
    }
}

/// Returns the BAR of accel0, which has no driver now.
fn bar(bed: &Bed, offset: u64) -> Result<Mapping> {
    let path = bed.device("accel0")?.sysfs().join("resource2");
    let bar = OpenOptions::new().read(true).write(true).open(&path);
    let bar = bar.with_context(|| path.display().to_string())?;
    Mapping::shared(bar.as_fd(), offset, MIB)
        .map_err(errno)
        .context("the BAR")
}

/// Makes writes of an adapter, each through a new connection, of various lengths and to various places. Returns the number
/// of writes that were refused, and of those that changed the memory.
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

/// The RDMA core's log of its calls to clients.
const CORE_LOG: &str = "/sys/kernel/debug/ib_peer_mem/log";

/// Returns the calls, in order, that the RDMA core has made for the one registration of an adapter at an address since its log
/// was cleared.
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
        calls.push(word("call=").context("a line without a call")?.to_owned());
        ids.insert(word("id=").context("a line without a registration")?.to_owned());
    }
    ensure!(
        ids.len() == 1,
        "{} registrations of {of:?} are in the log:\n{log}",
        ids.len()
    );
    Ok(calls)
}

/// Registers with both adapters, removes the provider, and tries to write.
fn stale(bed: &mut Bed, wanted: &str) -> Result<()> {
    bed.publish("accel1")?;
    let form = registered_as()?;
    ensure!(form == wanted, "registered as {form}");
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
                    && row.whose.starts_with("virtual") == (adapter.name == software.name)
            });
            let row = row.context("the revoked registration is not listed")?;
            ensure!(row.state == "revoked", "{row:?}");
            drop(received);
            // The calls in the RDMA core's log.
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
    ensure!((counts["out_of_order"], counts["repeated"]) == (0, 0), "{counts:?}");
    Ok(())
}

pub(super) fn stale_ex(bed: &mut Bed) -> Result<()> {
    stale(bed, "ex")
}

/// Loads the module again, as a client of that form.
fn reload(bed: &Bed, form: &str) -> Result<()> {
    for name in ["accel0", "accel1"] {
        bed.unpublish(name)?;
    }
    command("rmmod", &["p2pmem"])?;
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE is not set: which module?")?;
    command("insmod", &[&module, &format!("peer_memory={form}")])?;
    ensure!(registered_as()? == form, "registered as {}", registered_as()?);
    bed.publish("accel0")?;
    bed.publish("accel1")
}

/// Runs a test with the module loaded as a client of another form.
fn as_form(bed: &mut Bed, form: &str, test: fn(&mut Bed) -> Result<()>) -> Result<()> {
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE is not set: which module?")?;
    for name in ["accel0", "accel1"] {
        bed.unpublish(name)?;
    }
    command("rmmod", &["p2pmem"])?;
    let wrong = command("insmod", &[&module, "peer_memory=sometimes"]);
    ensure!(wrong.is_err(), "peer_memory=sometimes was taken");
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
            let rows = await_rows("the provider is being removed", |rows| {
                rows.iter()
                    .any(|row| row.address == target.map.address() && row.state == "revoking")
            });
            // A write that arrives now arrives in memory that still belongs to this buffer: the provider is still being removed, no
            // other process can have the memory, and the buffer takes no new registrations.
            let result = rows.and_then(|_| {
                super::expect(
                    "no more",
                    nic.register(target.map.address(), MIB).map(|_| ()),
                    libc::ENODEV,
                )?;
                let status = nic.connect()?.write(&sent, 4096, &received, 0)?;
                ensure!(status == SUCCESS, "status {status}");
                let named = || -> Result<bool> {
                    let log = Command::new("dmesg").output()?.stdout;
                    let who = format!("waiting for pid {} (", std::process::id());
                    Ok(String::from_utf8_lossy(&log)
                        .lines()
                        .any(|line| line.contains(&who) && line.contains("to end its registration")))
                };
                let deadline = Instant::now() + scaled(SOON);
                while !named()? {
                    in_time!(Instant::now() < deadline, "the log does not name who holds on");
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
                .map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
            result?;
            Ok(start.elapsed())
        })?;
        println!("the provider was removed after {waited:?}, when the registration had ended");
        ensure!(
            rows()?.iter().all(|row| row.address != target.map.address()),
            "{:#?}",
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
    // Closes the file, with the handle, and the mapping.
    drop(target);
    ensure!(
        bed.settled()?.0 == free - MIB as u64,
        "what is registered was given away"
    );
    let rest = Held::new(bed, "accel0", bed.provider("accel0")?.largest as usize)?;
    // The registration is one range, so none of it could be elsewhere without being at two of these addresses.
    let marks = || (0..rest.map.len()).step_by(MIB / 2);
    for at in marks() {
        rest.map.set(at, 0xabab);
    }
    fill(&source.map, 3);
    arrives(&nic, &sent, MIB, &received, 0)?;
    for at in marks() {
        ensure!(rest.map.get(at) == 0xabab, "a write reached another's memory");
    }
    drop((rest, received));
    ensure!(
        bed.settled()?.0 == free,
        "{} bytes are free, {free} should be",
        bed.settled()?.0
    );
    Ok(())
}

/// The name of the process that registers and waits.
pub(super) const PART: &str = "peer-hold";

/// Registers memory, closes and unmaps everything but the registration, reports that, and waits. Its argument selects what
/// follows: it ends, executes another program, or forks first.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let name = std::env::var("P2PMEM_RDMA_NIC0").context("which NIC?")?;
    let nic = Adapter::open(&name)?;
    let file = super::open()?;
    let buffer = super::alloc(file.as_fd(), MIB as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, MIB).map_err(errno)?;
    let region = nic.register(map.address(), MIB).map_err(errno)?;
    match arguments.first().map_or("", String::as_str) {
        "exec" => {
            ready()?;
            // `cat` reads the pipe on which this process would wait, and ends with it.
            let error = Command::new("cat").exec();
            return Err(error).context("cat");
        }
        "fork" => {
            let status = sys::in_child(|| 0)?;
            ensure!(status == 0, "the child ended with {status}");
            ensure!(rows()?.iter().any(|row| row.state == "mapped"), "{:#?}", rows()?);
            arrives(&nic, &region, 4096, &region, 65536)?;
        }
        "exit" => {
            ready()?;
            // The process deregisters nothing.
            std::process::exit(0);
        }
        _ => {}
    }
    drop((map, file));
    ready()?;
    drop(region);
    Ok(())
}

fn start(bed: &Bed, arguments: &[&str]) -> Result<Part> {
    let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
    Part::start_with(PART, arguments, &[("P2PMEM_RDMA_NIC0", &nic)])
}

fn processes(bed: &mut Bed) -> Result<()> {
    let one = |rows: &[Row]| rows.len() == 1 && rows[0].state == "mapped" && rows[0].entries == 1;
    for way in ["kill", "fork", "exit", "exec"] {
        let part = start(bed, &[way])?;
        let rows = await_rows("one is registered", one)?;
        ensure!(rows[0].whose.contains(&format!(" pid {} (", part.id())), "{rows:#?}");
        match way {
            "kill" => part.kill()?,
            "exec" => {
                // The program that was executed goes on without the registration.
                let part = part.go_on()?;
                await_rows("exec ends registrations", <[Row]>::is_empty)?;
                ensure!(Path::new(&format!("/proc/{}", part.id())).exists(), "it is gone");
                part.kill()?;
            }
            _ => part.finish()?,
        }
        await_rows(way, <[Row]>::is_empty)?;
    }
    Ok(())
}

fn rmmod(bed: &mut Bed) -> Result<()> {
    let part = start(bed, &[])?;
    // No file, no mapping, no directory and no provider is left: only the registration.
    bed.unpublish("accel0")?;
    bed.unpublish("accel1")?;
    let refused = command("rmmod", &["p2pmem"]);
    let refused = refused
        .err()
        .context("rmmod succeeded with a live registration")?
        .to_string();
    ensure!(refused.contains("in use"), "{refused}");
    let all = rows()?;
    ensure!(
        all.len() == 1 && all[0].state == "revoked" && all[0].whose.contains(&format!(" pid {} (", part.id())),
        "{all:#?}"
    );
    ensure!(
        read(Path::new("/sys/module/p2pmem/refcnt"))? == "1",
        "{}",
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
    let (mut invalidated, mut made, mut refused) = (0, 0, 0);
    for round in 0..ROUNDS {
        bed.publish("accel0")?;
        let held = Held::new(bed, "accel0", MIB)?;
        let target = held.register(&nic)?;
        let regions: VecDeque<_> = (0..8).map(|_| held.register(&nic)).collect::<Result<_>>()?;
        let before = counted()?["invalidate"];
        // The NIC's write to one of the registrations is held in flight: the removal of the provider waits in the invalidation of
        // that registration until the other threads have met the removal.
        let hooks = Hooks::new(true)?;
        hooks.arm()?;
        let together = Barrier::new(2);
        let panicked = |_| anyhow::anyhow!("a thread panicked");
        thread::scope(|scope| -> Result<()> {
            let write = scope.spawn(|| nic.connect()?.write(&sent, WRITE, &target, 0));
            let result = (|| -> Result<()> {
                hooks.await_held()?;
                // Registers from before the removal until a registration is refused.
                let registering = scope.spawn(|| -> Result<u64> {
                    together.wait();
                    let (mut made, deadline) = (0, Instant::now() + scaled(SOON));
                    loop {
                        in_time!(Instant::now() < deadline, "the provider was not removed in time");
                        match nic.register(held.map.address(), MIB) {
                            Ok(_) => made += 1,
                            Err(libc::ENODEV) => return Ok(made),
                            Err(other) => bail!("while the provider is being removed: {}", errno(other)),
                        }
                    }
                });
                let unbinding = scope.spawn(|| {
                    together.wait();
                    bed.unbind("accel0")
                });
                let met = hooks.await_waiting().and_then(|()| {
                    let deregistering = scope.spawn(move || {
                        // From both ends, so that they meet at different places.
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
                    let under_way = !unbinding.is_finished() && hooks.is_held()?;
                    hooks.release()?;
                    deregistering.join().map_err(panicked)?;
                    super::expect("while the provider is being removed", refusal, libc::ENODEV)?;
                    ensure!(under_way, "round {round}: the removal was over before it was met");
                    Ok(())
                });
                hooks.release()?;
                let unbound = unbinding.join().map_err(panicked)?;
                let registered = registering.join().map_err(panicked)?;
                met.and(unbound)?;
                made += registered?;
                refused += 1;
                Ok(())
            })();
            hooks.release()?;
            let status = write.join().map_err(panicked)?;
            result?;
            ensure!(status? == SUCCESS, "round {round}: the write that was in flight failed");
            Ok(())
        })?;
        drop((target, hooks));
        ensure!(rows()?.len() == 1, "round {round}: {:#?}", rows()?);
        let more = counted()?["invalidate"] - before;
        ensure!(more > 0, "round {round}: nothing was invalidated");
        invalidated += more;
    }
    println!(
        "{invalidated} of {} registrations were invalidated before they were ended, {made} of all were made meanwhile, \
         {refused} refused while the provider was removed",
        u64::from(9 * ROUNDS) + made
    );
    let counts = counted()?;
    ensure!(counts["out_of_order"] == 0, "{counts:?}");
    Ok(())
}
