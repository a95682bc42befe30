// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ends of processes, of bindings, of the module, and of the device itself, with buffers in use.

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
use crate::limits::{Overrun, amount, scaled};
use crate::sys::{self, Mapping};
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "scrub",
        about: "a process never sees what another one left in the memory",
        topology: "small",
        ruins: false,
        run: scrub,
    },
    Case {
        name: "events",
        about: "read and poll report events of providers and of revoked buffers",
        topology: "small",
        ruins: false,
        run: events,
    },
    Case {
        name: "sigkill",
        about: "the module frees everything of a killed process",
        topology: "small",
        ruins: false,
        run: sigkill,
    },
    Case {
        name: "unbind",
        about: "unbinding with mapped buffers ends within 20 s (aim: 1 s), and an access to a mapping raises SIGBUS",
        topology: "small",
        ruins: false,
        run: unbind,
    },
    Case {
        name: "unbind-many",
        about: "unbinding with two thousand buffers (a fourth of them on the debug kernel) ends within 20 s (aim: 1 s), and the event queue reports the number of events that did not fit",
        topology: "small",
        ruins: false,
        run: unbind_many,
    },
    Case {
        name: "unbind-and-kill",
        about: "unbinding and killing the holder at the same time, many times",
        topology: "small",
        ruins: false,
        run: unbind_and_kill,
    },
    Case {
        name: "unbind-under-io",
        about: "unbinding while a drive reads into the BAR",
        topology: "small",
        ruins: false,
        run: unbind_under_io,
    },
    Case {
        name: "claims",
        about: "the BAR that is published is claimed by name until the device is unbound, and no other BAR of it is",
        topology: "small",
        ruins: false,
        run: claims,
    },
    Case {
        name: "rmmod",
        about: "rmmod is refused while a file is open or mapped, and works afterwards",
        topology: "small",
        ruins: false,
        run: rmmod,
    },
    Case {
        name: "surprise",
        about: "the device's process is killed with buffers mapped",
        topology: "small",
        ruins: true,
        run: surprise,
    },
];

/// The aim for remove() without pinned memory, on an idle machine: reported, not enforced.
pub(super) const AIM: Duration = Duration::from_secs(1);
/// The limit for remove(), also on a busy machine.
pub(super) const BOUND: Duration = Duration::from_secs(20);

/// Another process of this program, which prints `ready` and then waits for a line.
pub(super) struct Part(Child, BufReader<ChildStdout>);

impl Part {
    pub(super) fn start(name: &str, arguments: &[&str]) -> Result<Part> {
        Part::start_with(name, arguments, &[])
    }

    /// As [`Part::start`], with environment variables.
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

    /// Waits until the process prints `ready` again.
    pub(super) fn await_ready(&mut self) -> Result<()> {
        let mut line = String::new();
        if self.1.read_line(&mut line)? == 0 {
            succeeded(self.0.wait()?)?;
        }
        ensure!(line.trim() == "ready", "it said {line:?}");
        Ok(())
    }

    /// The process id.
    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends the line that the process waits for, and does not wait for its end.
    pub(super) fn go_on(mut self) -> Result<Part> {
        self.0.stdin.as_mut().context("stdin")?.write_all(b"go\n")?;
        Ok(self)
    }

    /// Sends the line that the process waits for, and waits for its end.
    pub(super) fn finish(mut self) -> Result<()> {
        self.0.stdin.take().context("stdin")?.write_all(b"go\n")?;
        succeeded(self.0.wait()?)
    }

    /// Waits for the end of the process, and returns its status.
    pub(super) fn end(mut self) -> Result<ExitStatus> {
        Ok(self.0.wait()?)
    }

    pub(super) fn kill(mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }
}

/// Fails unless a process has succeeded; with an [`Overrun`] if the process failed with one.
fn succeeded(status: ExitStatus) -> Result<()> {
    in_time!(
        status.code() != Some(i32::from(Overrun::CODE)),
        "the other process took too long"
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
            // The provider has been removed.
            ensure!(
                map.get(0) == 0 && map.get(size - 4096) == 0,
                "the memory of a gone provider can still be read"
            );
            ensure!(sys::bus_errors() == 2, "{} bus errors instead of 2", sys::bus_errors());
            let state = buffer(file.as_fd(), a.handle).map_err(errno)?;
            ensure!(state.state == abi::P2PMEM_BUFFER_GONE, "{state:?}");
            expect(
                "mmap of a revoked buffer",
                Mapping::shared(file.as_fd(), a.mmap_offset, size),
                libc::ENODEV,
            )
        }
        "die" => {
            ready()?;
            map.set(0, 1);
            bail!("touching the memory of a gone provider did not end the process")
        }
        _ => bail!("there is no part {name:?}"),
    }
}

pub(super) fn scrub(bed: &mut Bed) -> Result<()> {
    let size = 8 << 20;
    Part::start("hold", &[&size.to_string()])?.finish()?;
    Part::start("hold", &[&size.to_string()])?.kill()?;
    // All of the provider's memory, in many buffers at the same time.
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
        "only {seen} bytes could be looked at"
    );
    for map in &maps {
        for at in (0..map.len()).step_by(4096) {
            ensure!(
                map.get(at) == 0 && map.get(at + 4088) == 0,
                "{:#x} is left at {at}",
                map.get(at)
            );
        }
    }
    Ok(())
}

/// Reads a file's events up to the last one that `is_last` accepts.
fn await_events(file: &std::fs::File, mut is_last: impl FnMut(&abi::p2pmem_event) -> bool) -> Result<()> {
    let deadline = Instant::now() + scaled(Duration::from_secs(60));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let n = poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&timeout))?;
        in_time!(n == 1, "an event did not come");
        if sys::read_events(file.as_fd(), 32)
            .map_err(errno)?
            .iter()
            .any(&mut is_last)
        {
            return Ok(());
        }
    }
}

/// Waits for the events that a buffer of a file was revoked and its provider removed, then requests the buffer's state.
pub(super) fn await_loss(file: &std::fs::File, handle: u32, provider: u32) -> Result<()> {
    let (mut revoked, mut removed) = (false, false);
    await_events(file, |event| {
        revoked |= event.type_ == abi::P2PMEM_EVENT_BUFFER_REVOKED && event.handle == handle;
        removed |= event.type_ == abi::P2PMEM_EVENT_PROVIDER_REMOVED && event.provider == provider;
        revoked && removed
    })?;
    let state = buffer(file.as_fd(), handle).map_err(errno)?;
    ensure!(state.state == abi::P2PMEM_BUFFER_GONE, "{state:?}");
    Ok(())
}

fn wait_event(file: &std::fs::File, kind: u32) -> Result<abi::p2pmem_event> {
    let mut found = abi::p2pmem_event::default();
    await_events(file, |event| {
        found = *event;
        event.type_ == kind
    })
    .with_context(|| format!("of type {kind}"))?;
    Ok(found)
}

fn events(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK)?;
    expect(
        "read with nothing there",
        sys::read_events(file.as_fd(), 320),
        libc::EAGAIN,
    )?;
    let nothing = poll(
        &mut [PollFd::new(&file, PollFlags::IN)],
        Some(&Timespec { tv_sec: 0, tv_nsec: 0 }),
    )?;
    ensure!(nothing == 0, "poll says there is an event, but there is none");
    let provider = bed.provider("accel0")?.id;
    let a = alloc(file.as_fd(), 4096).map_err(errno)?;
    bed.unbind("accel0")?;
    let revoked = wait_event(&file, abi::P2PMEM_EVENT_BUFFER_REVOKED)?;
    ensure!(
        revoked.handle == a.handle && revoked.provider == provider && revoked.time_ns > 0,
        "{revoked:?}"
    );
    let removed = wait_event(&file, abi::P2PMEM_EVENT_PROVIDER_REMOVED)?;
    ensure!(
        removed.provider == provider && removed.handle == 0 && removed.time_ns >= revoked.time_ns,
        "{removed:?}"
    );
    bed.publish("accel0")?;
    let added = wait_event(&file, abi::P2PMEM_EVENT_PROVIDER_ADDED)?;
    ensure!(
        added.provider == bed.provider("accel0")?.id && added.provider != provider,
        "{added:?}"
    );
    // A file gets no events of another file's buffers.
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
        ensure!(bed.settled()? == before, "a killed process left something behind");
    }
    Ok(())
}

/// Prints how long ending memory in use took, and fails if that is more than [`BOUND`].
pub(super) fn ended_within(what: &str, took: Duration) -> Result<()> {
    let met = if took < AIM { "met" } else { "missed" };
    println!("{what} took {took:?}; the aim of {AIM:?} was {met}");
    in_time!(took < scaled(BOUND), "{what} took {took:?}");
    Ok(())
}

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
    ensure!(status.signal() == Some(libc::SIGBUS), "instead of SIGBUS: {status}");
    // Also with a buffer that is not mapped, and with one whose handle was freed before.
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
    let mut told = 0;
    // At most as many reads as events that fit, and one for the count of those that did not.
    while told < many + 1 {
        let events = sys::read_events(fd, 64 * size_of::<abi::p2pmem_event>()).map_err(errno)?;
        ensure!(!events.is_empty(), "a read without an event");
        for event in events {
            told += match event.type_ {
                abi::P2PMEM_EVENT_LOST => event.count,
                abi::P2PMEM_EVENT_BUFFER_REVOKED | abi::P2PMEM_EVENT_PROVIDER_REMOVED => 1,
                other => bail!("event {other}"),
            };
        }
    }
    ensure!(told == many + 1, "{told} events for {many} buffers and their provider");
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

/// fio, which repeatedly reads a drive into memory of p2pmem. Dropping it ends fio.
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
        let deadline = Instant::now() + scaled(Duration::from_secs(60));
        while read()? < before + (4 << 20) {
            ensure!(fio.0.try_wait()?.is_none(), "fio has ended");
            in_time!(Instant::now() < deadline, "fio does not read");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(fio)
    }

    /// Checks that fio fails after the end of its memory, by an I/O error or SIGBUS.
    pub(super) fn has_failed(mut self) -> Result<()> {
        let ended = self.0.wait()?;
        ensure!(!ended.success(), "fio went on without the memory");
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
    // The module waits for transient pins of I/O in flight, so this may take as long as one I/O.
    let start = Instant::now();
    bed.unbind("accel0")?;
    let took = start.elapsed();
    fio.has_failed()?;
    in_time!(took < scaled(BOUND), "remove took {took:?}");
    bed.publish("accel0")
}

/// Returns the lines of /proc/iomem below accel0's BARs, in the order of their addresses.
fn claimed_bars(bed: &Bed) -> Result<Vec<bool>> {
    let iomem = read(Path::new("/proc/iomem"))?;
    // The kernel names a BAR by its device's address.
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
            "the BAR published alone is to be claimed: {claims:?}"
        );
        bed.unpublish("accel0")?;
        let claims = claimed_bars(bed)?;
        ensure!(count(&claims) == 0, "not given back: {claims:?}");
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
    // The kernel gets no notification, and memory that is mapped straight into the guest still answers. Nothing hangs or oopses.
    map.set(8, 1);
    let freed = alloc(file.as_fd(), 4096).map_err(errno)?;
    super::free(file.as_fd(), freed.handle).map_err(errno)?;
    let provider = bed.provider("accel0")?.id;
    let start = Instant::now();
    bed.unpublish("accel0")?;
    in_time!(
        start.elapsed() < scaled(BOUND),
        "unbinding a dead device took {:?}",
        start.elapsed()
    );
    // A program with a buffer of the device loses the buffer and is notified, as with a device that answers.
    await_loss(&file, a.handle, provider)?;
    sys::survive_bus_errors()?;
    let errors = sys::bus_errors();
    map.get(0);
    ensure!(sys::bus_errors() == errors + 1, "a mapping outlives the device");
    super::free(file.as_fd(), a.handle).map_err(errno)?;
    drop((map, file));
    command("rmmod", &["p2pmem"])
}
