// SPDX-License-Identifier: MIT OR Apache-2.0

//! Machines with few resources: memory in a program's cgroup, with and without swap, and processors that go offline.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use super::hostile::Group;
use super::inflight::until;
use super::life::{Part, ready};
use super::rdma_user::word;
use super::{Bed, Case, alloc, command, errno, free, open, read, write};
use crate::limits::rounds;
use crate::sys::Mapping;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "processors-hotplug",
        about: "processors go offline and come back during a storm of allocations: every byte is right, and nothing is lost",
        topology: "small",
        ruins: false,
        run: processors_leave,
    },
    Case {
        name: "memory-max",
        about: "a program whose cgroup is at its limit of memory all the time is served or refused: every byte is right, and nothing is lost",
        topology: "small",
        ruins: false,
        run: memory_max,
    },
    Case {
        name: "swapping",
        about: "the same where the program is swapped out and in all the time",
        topology: "small",
        ruins: false,
        run: swapping,
    },
];

/// The name of the process of these tests.
pub(super) const PART: &str = "allocate-under-pressure";

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// The memory limit of the cgroup.
const LIMIT: &str = "32M";

/// Allocates, maps, writes, checks and frees buffers of sizes up to 256 KiB, several at a time, while `goes_on` returns true.
/// The argument of `goes_on` is the number of buffers so far.
fn storm(seed: u64, mut goes_on: impl FnMut(u64) -> Result<bool>) -> Result<()> {
    let file = open()?;
    let mut held: VecDeque<(u32, Mapping, u64)> = VecDeque::new();
    let end = |(handle, map, number): (u32, Mapping, u64)| -> Result<()> {
        for at in (0..map.len()).step_by(PAGE) {
            let (found, wanted) = (map.get(at), word(number, at));
            ensure!(
                found == wanted,
                "buffer {number}: byte {at:#x} is {found:#x} instead of {wanted:#x}"
            );
        }
        drop(map);
        free(file.as_fd(), handle).map_err(errno)
    };
    let (mut number, mut state) = (0, seed | 1);
    while goes_on(number)? {
        number += 1;
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let size = PAGE * (1 + state as usize % 64);
        match alloc(file.as_fd(), size as u64) {
            Ok(got) => match Mapping::shared(file.as_fd(), got.mmap_offset, size) {
                Ok(map) => {
                    for at in (0..size).step_by(PAGE) {
                        map.set(at, word(number, at));
                    }
                    held.push_back((got.handle, map, number));
                }
                Err(libc::ENOMEM) => free(file.as_fd(), got.handle).map_err(errno)?,
                Err(code) => bail!("mmap: {}", errno(code)),
            },
            Err(libc::ENOMEM | libc::ENOSPC) => {}
            Err(code) => bail!("ALLOC: {}", errno(code)),
        }
        if held.len() > 8 {
            held.pop_front().map_or(Ok(()), end)?;
        }
    }
    held.into_iter().try_for_each(end)
}

/// Allocates in its own cgroup, and touches its own memory and pages of a file meanwhile. Arguments: MiB of its own memory, the
/// file (or nothing), and the number of buffers.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let argument = |at: usize| arguments.get(at).context("an argument is missing");
    let own: usize = argument(0)?.parse()?;
    let mut file = match argument(1)?.as_str() {
        "" => None,
        path => Some(File::open(path)?),
    };
    let buffers: u64 = argument(2)?.parse()?;
    ready()?;
    let mut memory = vec![0u8; own * MIB];
    let mut chunk = vec![0u8; MIB];
    storm(buffers, |number| {
        // An eighth of its own memory, and a MiB of the file, for each buffer.
        let part = memory.len() / 8;
        let first = part * (number as usize % 8);
        for at in (first..first + part).step_by(PAGE) {
            let turn = (number / 8) as u8;
            ensure!(memory[at] == turn, "its own memory is wrong at {at:#x}");
            memory[at] = turn.wrapping_add(1);
        }
        if let Some(file) = &mut file {
            if file.read(&mut chunk)? == 0 {
                file.seek(SeekFrom::Start(0))?;
            }
        }
        Ok(number < buffers)
    })?;
    println!("done");
    Ok(())
}

/// Runs the process in a cgroup with little memory. Returns how often the cgroup reached its limit.
fn pressed(own: usize, file: &str, buffers: u32) -> Result<u64> {
    let group = Group::new("p2pmem-pressure")?;
    group.set("memory.max", LIMIT)?;
    let part = Part::start(PART, &[&own.to_string(), file, &buffers.to_string()])?;
    group.set("cgroup.procs", &part.id().to_string())?;
    part.finish()?;
    let events = group.get("memory.events")?;
    let of = |name: &str| {
        events
            .lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    };
    ensure!(of("oom_kill ") == Some(0), "somebody was killed: {events}");
    of("max ").with_context(|| events.clone())
}

fn memory_max(bed: &mut Bed) -> Result<()> {
    let drive = bed.block("nvme0")?;
    let times = pressed(8, drive.to_str().context("path")?, rounds(200))?;
    ensure!(times > 0, "the program was never at its limit of memory");
    println!("{times} times at the limit");
    Ok(())
}

fn swapping(bed: &mut Bed) -> Result<()> {
    let drive = bed.block("nvme0")?;
    let drive = drive.to_str().context("path")?;
    let swapped = || -> Result<u64> {
        let numbers = read(Path::new("/proc/vmstat"))?;
        let line = numbers.lines().find_map(|line| line.strip_prefix("pswpin "));
        Ok(line.context("/proc/vmstat has no pswpin")?.parse()?)
    };
    command("mkswap", &[drive])?;
    command("swapon", &[drive])?;
    let before = swapped()?;
    let times = pressed(48, "", rounds(30));
    command("swapoff", &[drive])?;
    let (times, pages) = (times?, swapped()? - before);
    ensure!(pages > 0, "nothing was swapped in");
    println!("{times} times at the limit, {pages} pages swapped in");
    Ok(())
}

fn processors_leave(_: &mut Bed) -> Result<()> {
    const THREADS: u64 = 3;
    let online = Path::new("/sys/devices/system/cpu/cpu1/online");
    let (stop, made) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| -> Result<()> {
        let storms: Vec<_> = (1..=THREADS)
            .map(|seed| {
                let (stop, made) = (&stop, &made);
                scope.spawn(move || {
                    storm(seed, |_| {
                        made.fetch_add(1, Ordering::Relaxed);
                        Ok(!stop.load(Ordering::Relaxed))
                    })
                })
            })
            .collect();
        let toggled = (|| {
            for _ in 0..rounds(8) {
                for state in ["0", "1"] {
                    // Some buffers are allocated with the processor online, and some with it offline.
                    let seen = made.load(Ordering::Relaxed);
                    until("allocations go on", || {
                        Ok(made.load(Ordering::Relaxed) >= seen + 20 || storms.iter().any(|storm| storm.is_finished()))
                    })?;
                    write(online, state)?;
                }
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        for storm in storms {
            storm.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        write(online, "1")?;
        toggled
    })?;
    println!("{} buffers", made.load(Ordering::Relaxed));
    Ok(())
}
