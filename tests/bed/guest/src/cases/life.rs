// SPDX-License-Identifier: MIT OR Apache-2.0

//! Exits and kills of processes, unbinding, unloading the module, and loss of the device, while buffers exist. Also:
//! clearing of freed memory, and events.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::busy::{at_once, contended};
use super::{Bed, Case, NODE, alloc, buffer, command, errno, expect, open, read};
use crate::host;
use crate::in_time;
use crate::patience::{Overrun, amount, patiently};
use crate::sys::{self, Mapping};
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "scrub",
        about: "memory that a process freed, by exit or by SIGKILL, is zero for the next owner",
        topology: "small",
        ruins: false,
        run: scrub,
    },
    Case {
        name: "events",
        about: "read and poll report added and removed providers, and the file's own revoked buffers",
        topology: "small",
        ruins: false,
        run: events,
    },
    Case {
        name: "sigkill",
        about: "SIGKILL frees the buffers of a process: free bytes and the number of buffers are as before",
        topology: "small",
        ruins: false,
        run: sigkill,
    },
    Case {
        name: "unbind",
        about: "unbinding with mapped buffers is in time (target: 1 s), and access to a revoked mapping raises SIGBUS",
        topology: "small",
        ruins: false,
        run: unbind,
    },
    Case {
        name: "unbind-many",
        about: "unbinding with 2000 buffers (debug kernel: 500) is in time (target: 1 s); LOST counts unqueued events",
        topology: "small",
        ruins: false,
        run: unbind_many,
    },
    Case {
        name: "unbind-and-kill",
        about: "unbinding and SIGKILL of the processes that hold buffers run concurrently, many times",
        topology: "small",
        ruins: false,
        run: unbind_and_kill,
    },
    Case {
        name: "unbind-under-io",
        about: "unbinding while fio reads a drive into the BAR ends, and fio fails",
        topology: "small",
        ruins: false,
        run: unbind_under_io,
    },
    Case {
        name: "claims",
        about: "/proc/iomem lists the published BAR, and no other BAR of the device, as claimed by p2pmem until unbind",
        topology: "small",
        ruins: false,
        run: claims,
    },
    Case {
        name: "rmmod",
        about: "rmmod fails while a file is open or a mapping exists, and succeeds afterwards",
        topology: "small",
        ruins: false,
        run: rmmod,
    },
    Case {
        name: "surprise",
        about: "the device's process is killed while buffers are mapped, and unbinding still ends and revokes them",
        topology: "small",
        ruins: true,
        run: surprise,
    },
];

/// Target time of remove() without pinned memory, on an idle machine. Printed, not enforced.
pub(super) const TARGET: Duration = Duration::from_secs(1);
/// Time limit of remove() on a busy machine. A case that misses the limit fails with an overrun.
pub(super) const BOUND: Duration = Duration::from_secs(20);

/// A child process that runs a part of a case (`p2pmem-guest-tests part NAME`). The part prints `ready`, and waits for
/// a line on standard input. Dropping kills the process.
pub(super) struct Part(Child, BufReader<ChildStdout>);

impl Part {
    pub(super) fn start(name: &str, arguments: &[&str]) -> Result<Part> {
        Part::start_with(name, arguments, &[])
    }

    /// Like [`Part::start`], with `variables` added to the environment.
    pub(super) fn start_with(name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Result<Part> {
        let me = std::env::current_exe()?;
        let mut child = Command::new(me)
            .arg("part")
            .arg(name)
            .args(arguments)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("stdout")?;
        let mut part = Part(child, BufReader::new(stdout));
        part.await_ready().with_context(|| format!("part {name}"))?;
        Ok(part)
    }

    /// Waits until the part prints `ready` again.
    pub(super) fn await_ready(&mut self) -> Result<()> {
        let mut line = String::new();
        if self.1.read_line(&mut line)? == 0 {
            succeeded(self.0.wait()?)?;
        }
        ensure!(
            line.trim() == "ready",
            "the other process printed {line:?} instead of \"ready\""
        );
        Ok(())
    }

    /// The process ID.
    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Lets the part continue, without waiting for its exit.
    pub(super) fn go_on(mut self) -> Result<Part> {
        self.0.stdin.as_mut().context("stdin")?.write_all(b"go\n")?;
        Ok(self)
    }

    /// Lets the part continue, and waits for its exit. Fails if the part failed.
    pub(super) fn finish(mut self) -> Result<()> {
        self.0.stdin.take().context("stdin")?.write_all(b"go\n")?;
        succeeded(self.0.wait()?)
    }

    pub(super) fn kill(mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

/// Fails unless a part exited with status 0. [`Overrun::CODE`] becomes an [`Overrun`] of this process.
fn succeeded(status: ExitStatus) -> Result<()> {
    in_time!(
        status.code() != Some(i32::from(Overrun::CODE)),
        "the other process missed a time limit"
    );
    ensure!(status.success(), "the other process failed: {status}");
    Ok(())
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Prints `ready` and waits for a line on standard input: the other side of [`Part`].
pub(super) fn ready() -> Result<()> {
    println!("ready");
    std::io::stdout().flush()?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

pub(super) fn part(name: &str, arguments: &[String]) -> Result<()> {
    let size: usize = arguments.first().map_or(Ok(1 << 20), |text| text.parse())?;
    let file = open()?;
    let a = alloc(file.as_fd(), size as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, size).map_err(errno)?;
    for at in (0..size).step_by(8) {
        map.set(at, SECRET);
    }
    match name {
        "hold" => ready(),
        "survive" => {
            sys::survive_bus_errors()?;
            ready()?;
            // The provider was removed before this process continues.
            ensure!(
                map.get(0) == 0 && map.get(size - 4096) == 0,
                "the memory of a removed provider can still be read"
            );
            ensure!(sys::bus_errors() == 2, "{} SIGBUS instead of 2", sys::bus_errors());
            let state = buffer(file.as_fd(), a.handle).map_err(errno)?;
            ensure!(
                state.state == abi::P2PMEM_BUFFER_GONE,
                "the buffer is not gone after unbinding: {state:?}"
            );
            expect(
                "mmap of a revoked buffer",
                Mapping::shared(file.as_fd(), a.mmap_offset, size),
                libc::ENODEV,
            )
        }
        "die" => {
            ready()?;
            map.set(0, 1);
            bail!("writing to the memory of a removed provider did not kill the process")
        }
        _ => bail!("unknown part {name:?}"),
    }
}

pub(super) fn scrub(bed: &mut Bed) -> Result<()> {
    let size = 8 << 20;
    Part::start("hold", &[&size.to_string()])?.finish()?;
    Part::start("hold", &[&size.to_string()])?.kill()?;
    // Allocate as much of the provider's memory as possible, largest buffers first, and keep all of it.
    let file = open()?;
    let mut maps = Vec::new();
    let mut piece = bed.provider("accel0")?.size.next_power_of_two();
    while piece >= 1 << 20 {
        match alloc(file.as_fd(), piece) {
            Ok(a) => maps.push(Mapping::shared(file.as_fd(), a.mmap_offset, a.size as usize).map_err(errno)?),
            Err(_) => piece /= 2,
        }
    }
    let seen: usize = maps.iter().map(Mapping::len).sum();
    ensure!(
        seen as u64 >= bed.provider("accel0")?.size / 2,
        "only {seen} bytes could be allocated: less than half of the provider"
    );
    for map in &maps {
        for at in (0..map.len()).step_by(4096) {
            ensure!(
                map.get(at) == 0 && map.get(at + 4088) == 0,
                "byte {at:#x} was not cleared: {:#x}",
                map.get(at)
            );
        }
    }
    Ok(())
}

/// Reads events of a file until `is_last` returns true for one. Fails with an overrun after 60 s.
fn await_events(file: &std::fs::File, mut is_last: impl FnMut(&abi::p2pmem_event) -> bool) -> Result<()> {
    let deadline = Instant::now() + patiently(Duration::from_secs(60));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let n = poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&timeout))?;
        in_time!(n == 1, "no event within 60 s");
        if sys::read_events(file.as_fd(), 32)
            .map_err(errno)?
            .iter()
            .any(&mut is_last)
        {
            return Ok(());
        }
    }
}

/// Waits for the events that a buffer of the file was revoked and that its provider was removed. Then fails unless
/// `P2PMEM_IOC_BUFFER` reports the buffer as gone.
pub(super) fn await_loss(file: &std::fs::File, handle: u32, provider: u32) -> Result<()> {
    let (mut revoked, mut removed) = (false, false);
    await_events(file, |event| {
        revoked |= event.type_ == abi::P2PMEM_EVENT_BUFFER_REVOKED && event.handle == handle;
        removed |= event.type_ == abi::P2PMEM_EVENT_PROVIDER_REMOVED && event.provider == provider;
        revoked && removed
    })?;
    let state = buffer(file.as_fd(), handle).map_err(errno)?;
    ensure!(
        state.state == abi::P2PMEM_BUFFER_GONE,
        "the buffer is not gone after its events: {state:?}"
    );
    Ok(())
}

/// Waits for an event of type `kind` and returns the event.
fn wait_event(file: &std::fs::File, kind: u32) -> Result<abi::p2pmem_event> {
    let mut found = abi::p2pmem_event::default();
    await_events(file, |event| {
        found = *event;
        event.type_ == kind
    })
    .with_context(|| format!("waiting for an event of type {kind}"))?;
    Ok(found)
}

fn events(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK)?;
    expect(
        "read without an event",
        sys::read_events(file.as_fd(), 320),
        libc::EAGAIN,
    )?;
    let nothing = poll(
        &mut [PollFd::new(&file, PollFlags::IN)],
        Some(&Timespec { tv_sec: 0, tv_nsec: 0 }),
    )?;
    ensure!(nothing == 0, "poll reports an event, but there is none");
    let provider = bed.provider("accel0")?.id;
    let a = alloc(file.as_fd(), 4096).map_err(errno)?;
    bed.unbind("accel0")?;
    let revoked = wait_event(&file, abi::P2PMEM_EVENT_BUFFER_REVOKED)?;
    ensure!(
        revoked.handle == a.handle && revoked.provider == provider && revoked.time_ns > 0,
        "wrong event BUFFER_REVOKED: {revoked:?}"
    );
    let removed = wait_event(&file, abi::P2PMEM_EVENT_PROVIDER_REMOVED)?;
    ensure!(
        removed.provider == provider && removed.handle == 0 && removed.time_ns >= revoked.time_ns,
        "wrong event PROVIDER_REMOVED: {removed:?}"
    );
    bed.publish("accel0")?;
    let added = wait_event(&file, abi::P2PMEM_EVENT_PROVIDER_ADDED)?;
    ensure!(
        added.provider == bed.provider("accel0")?.id && added.provider != provider,
        "wrong event PROVIDER_ADDED: {added:?}"
    );
    // A file gets no events about buffers of another file.
    let other = open()?;
    let b = alloc(other.as_fd(), 4096).map_err(errno)?;
    bed.unbind("accel0")?;
    let removed = wait_event(&file, abi::P2PMEM_EVENT_PROVIDER_REMOVED)?;
    ensure!(removed.provider == added.provider);
    let mine = wait_event(&other, abi::P2PMEM_EVENT_BUFFER_REVOKED)?;
    ensure!(mine.handle == b.handle);
    bed.publish("accel0")
}

fn sigkill(bed: &mut Bed) -> Result<()> {
    let before = bed.settled()?;
    for _ in 0..5 {
        let part = Part::start("hold", &["4194304"])?;
        ensure!(bed.provider("accel0")?.buffers == before.1 + 1);
        part.kill()?;
        ensure!(
            bed.settled()? == before,
            "free bytes or the number of buffers changed after SIGKILL"
        );
    }
    Ok(())
}

/// Prints how long `what`, an operation that revokes buffers, took. Fails with an overrun if that exceeds [`BOUND`].
pub(super) fn ended_within(what: &str, took: Duration) -> Result<()> {
    let met = if took < TARGET { "met" } else { "missed" };
    println!("{what} took {took:?}; the target of {TARGET:?} was {met}");
    in_time!(took < patiently(BOUND), "{what} took {took:?}, more than {BOUND:?}");
    Ok(())
}

/// Unbinds accel0 and checks the time, see [`ended_within`].
pub(super) fn timed_unbind(bed: &Bed) -> Result<()> {
    let start = Instant::now();
    bed.unbind("accel0")?;
    let took = start.elapsed();
    ended_within("remove", took)
}

pub(super) fn unbind(bed: &mut Bed) -> Result<()> {
    let survivor = Part::start("survive", &["4194304"])?;
    let mut victim = Part::start("die", &["1048576"])?;
    timed_unbind(bed)?;
    survivor.finish()?;
    victim.0.stdin.take().context("stdin")?.write_all(b"go\n")?;
    let status = victim.0.wait()?;
    use std::os::unix::process::ExitStatusExt;
    ensure!(
        status.signal() == Some(libc::SIGBUS),
        "the other process ended with {status} instead of SIGBUS"
    );
    // Again, with one buffer that is allocated but not mapped, and one that is mapped at offset 0 and has no handle.
    bed.publish("accel0")?;
    let file = open()?;
    let a = alloc(file.as_fd(), 4096).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), 0, 4096).map_err(errno)?;
    timed_unbind(bed)?;
    ensure!(buffer(file.as_fd(), a.handle).map_err(errno)?.state == abi::P2PMEM_BUFFER_GONE);
    drop(map);
    super::free(file.as_fd(), a.handle).map_err(errno)?;
    expect("ALLOC without a provider", alloc(file.as_fd(), 4096), libc::ENODEV)?;
    expect(
        "mmap at 0 without a provider",
        Mapping::shared(file.as_fd(), 0, 4096),
        libc::ENODEV,
    )?;
    bed.publish("accel0")
}

pub(super) fn unbind_many(bed: &mut Bed) -> Result<()> {
    let many = amount(2000);
    let file = open()?;
    let fd = file.as_fd();
    let mut maps = Vec::new();
    for n in 0..many {
        let a = alloc(fd, 4096).map_err(errno)?;
        if n % 100 == 0 {
            let map = Mapping::shared(fd, a.mmap_offset, 4096).map_err(errno)?;
            map.set(0, u64::from(n));
            maps.push(map);
        }
    }
    timed_unbind(bed)?;
    let mut counted = 0;
    // An event LOST counts for the events that did not fit into the queue.
    while counted < many + 1 {
        let events = sys::read_events(fd, 64 * size_of::<abi::p2pmem_event>()).map_err(errno)?;
        ensure!(!events.is_empty(), "read returned no event");
        for event in events {
            counted += match event.type_ {
                abi::P2PMEM_EVENT_LOST => event.count,
                abi::P2PMEM_EVENT_BUFFER_REVOKED | abi::P2PMEM_EVENT_PROVIDER_REMOVED => 1,
                other => bail!("unexpected event of type {other}"),
            };
        }
    }
    ensure!(
        counted == many + 1,
        "{counted} events, lost ones included, for {many} buffers and their provider"
    );
    bed.publish("accel0")
}

pub(super) fn unbind_and_kill(bed: &mut Bed) -> Result<()> {
    contended(10, || {
        let parts = [Part::start("hold", &["4194304"])?, Part::start("hold", &["65536"])?];
        let (killed, unbound, met) = at_once(|| parts.into_iter().try_for_each(Part::kill), || timed_unbind(bed))?;
        killed.and(unbound)?;
        bed.publish("accel0")?;
        Ok(met)
    })
}

/// A process of fio that reads a drive into memory of p2pmem for up to 300 s. Dropping kills the process.
pub(super) struct Fio(Child);

impl Fio {
    /// Starts fio on drive nvme0, and waits until the drive has written 4 MiB into `provider`.
    pub(super) fn reading_into(bed: &Bed, provider: &str) -> Result<Fio> {
        let read = || -> Result<u64> {
            let bytes = host::request(&Request::Snapshot)?["nvme0"]["read"][provider].as_u64();
            Ok(bytes.unwrap_or(0))
        };
        let before = read()?;
        let child = Command::new("fio")
            .args([
                "--name=p2pmem",
                "--ioengine=psync",
                "--direct=1",
                "--mem=mmapshared:/dev/p2pmem",
            ])
            .args(["--bs=1m", "--size=64m", "--rw=read", "--time_based", "--runtime=300"])
            .arg(format!("--filename={}", bed.block("nvme0")?.display()))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let mut fio = Fio(child);
        let deadline = Instant::now() + patiently(Duration::from_secs(60));
        while read()? < before + (4 << 20) {
            ensure!(fio.0.try_wait()?.is_none(), "fio exited before it read 4 MiB");
            in_time!(Instant::now() < deadline, "fio did not read 4 MiB within 60 s");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(fio)
    }

    /// Waits until fio exits. Fails if fio succeeded: without its memory, fio has to get an I/O error or SIGBUS.
    pub(super) fn has_failed(mut self) -> Result<()> {
        let ended = self.0.wait()?;
        ensure!(!ended.success(), "fio succeeded although its memory was revoked");
        Ok(())
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn unbind_under_io(bed: &mut Bed) -> Result<()> {
    let fio = Fio::reading_into(bed, "accel0")?;
    // remove() waits for the page pins of I/O in flight, so it can take as long as one I/O.
    let start = Instant::now();
    bed.unbind("accel0")?;
    let took = start.elapsed();
    fio.has_failed()?;
    in_time!(took < patiently(BOUND), "remove took {took:?}, more than {BOUND:?}");
    bed.publish("accel0")
}

/// For each BAR of accel0 in /proc/iomem, in the order of addresses: whether the next line is a claim by p2pmem.
fn claimed_bars(bed: &Bed) -> Result<Vec<bool>> {
    let iomem = read(Path::new("/proc/iomem"))?;
    // The kernel names a BAR's resource after the device's PCI address.
    let bar = format!(" : {}", bed.device("accel0")?.bdf);
    let lines: Vec<&str> = iomem.lines().collect();
    let claims = lines
        .windows(2)
        .filter(|pair| pair[0].ends_with(&bar))
        .map(|pair| pair[1].ends_with(" : p2pmem"))
        .collect();
    Ok(claims)
}

fn claims(bed: &mut Bed) -> Result<()> {
    let count = |claims: &[bool]| claims.iter().filter(|claimed| **claimed).count();
    for _ in 0..2 {
        let claims = claimed_bars(bed)?;
        ensure!(
            claims.len() > 1 && count(&claims) == 1,
            "only the published BAR should be claimed: {claims:?}"
        );
        bed.unpublish("accel0")?;
        let claims = claimed_bars(bed)?;
        ensure!(count(&claims) == 0, "a BAR is still claimed after unbind: {claims:?}");
        bed.publish("accel0")?;
    }
    Ok(())
}

fn rmmod(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    ensure!(
        command("rmmod", &["p2pmem"]).is_err(),
        "rmmod succeeded with {NODE} open"
    );
    let map = Mapping::shared(file.as_fd(), 0, 4096).map_err(errno)?;
    map.set(0, 1);
    drop(file);
    ensure!(command("rmmod", &["p2pmem"]).is_err(), "rmmod succeeded with a mapping");
    ensure!(map.get(0) == 1);
    drop(map);
    for _ in 0..2 {
        bed.unpublish("accel0")?;
        command("rmmod", &["p2pmem"])?;
        bed.load_module()?;
        bed.publish("accel0")?;
    }
    Ok(())
}

fn surprise(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let a = alloc(file.as_fd(), 1 << 20).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, 1 << 20).map_err(errno)?;
    map.set(0, SECRET);
    host::request(&Request::Kill { name: "accel0".into() })?;
    // The kernel gets no notification, and BARs that QEMU maps directly into the guest still respond. Nothing may hang
    // or oops.
    map.set(8, 1);
    let freed = alloc(file.as_fd(), 4096).map_err(errno)?;
    super::free(file.as_fd(), freed.handle).map_err(errno)?;
    let provider = bed.provider("accel0")?.id;
    let start = Instant::now();
    bed.unpublish("accel0")?;
    in_time!(
        start.elapsed() < patiently(BOUND),
        "unbinding a dead device took {:?}, more than {BOUND:?}",
        start.elapsed()
    );
    // The device's buffers are revoked, and their owner gets events, as with a device that responds.
    await_loss(&file, a.handle, provider)?;
    sys::survive_bus_errors()?;
    let errors = sys::bus_errors();
    map.get(0);
    ensure!(
        sys::bus_errors() == errors + 1,
        "no SIGBUS: the mapping can still be read after its device was unbound"
    );
    super::free(file.as_fd(), a.handle).map_err(errno)?;
    drop((map, file));
    command("rmmod", &["p2pmem"])
}
