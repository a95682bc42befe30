// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocation under pressure: a cgroup at its memory limit, with and without swapping, and CPU hotplug.

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
use crate::patience::rounds;
use crate::sys::Mapping;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "processors-leave",
        about: "a CPU goes offline and online while threads allocate: buffers keep their contents, and no memory leaks",
        topology: "small",
        ruins: false,
        run: processors_leave,
    },
    Case {
        name: "memory-max",
        about: "in a cgroup at memory.max, ALLOC succeeds or fails, buffers keep their contents, and none leaks",
        topology: "small",
        ruins: false,
        run: memory_max,
    },
    Case {
        name: "swapping",
        about: "as memory-max, with the program's memory being swapped out and in",
        topology: "small",
        ruins: false,
        run: swapping,
    },
];

/// The name of the part that allocates in a cgroup.
pub(super) const PART: &str = "allocate-under-pressure";

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// The cgroup's `memory.max`.
const LIMIT: &str = "32M";

/// Allocates, maps, writes, checks and frees buffers of 4 to 256 KiB while `goes_on` returns true; at most 8 exist
/// after each round. The argument of `goes_on` is the number of rounds so far. Allocations that fail with ENOMEM or
/// ENOSPC are skipped.
fn churn(seed: u64, mut goes_on: impl FnMut(u64) -> Result<bool>) -> Result<()> {
    let file = open()?;
    let mut held: VecDeque<(u32, Mapping, u64)> = VecDeque::new();
    let check_and_free = |(handle, map, number): (u32, Mapping, u64)| -> Result<()> {
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
            held.pop_front().map_or(Ok(()), check_and_free)?;
        }
    }
    held.into_iter().try_for_each(check_and_free)
}

/// Runs [`churn`] in a cgroup, and uses anonymous memory and reads a file in each round. Arguments: MiB of anonymous
/// memory, path of the file (empty for none), number of rounds.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let argument = |at: usize| {
        arguments
            .get(at)
            .with_context(|| format!("part {PART} needs three arguments, got {}", arguments.len()))
    };
    let own: usize = argument(0)?.parse()?;
    let mut file = match argument(1)?.as_str() {
        "" => None,
        path => Some(File::open(path)?),
    };
    let buffers: u64 = argument(2)?.parse()?;
    ready()?;
    let mut memory = vec![0u8; own * MIB];
    let mut chunk = vec![0u8; MIB];
    churn(buffers, |number| {
        // An eighth of the anonymous memory, and 1 MiB of the file, in each round.
        let part = memory.len() / 8;
        let first = part * (number as usize % 8);
        for at in (first..first + part).step_by(PAGE) {
            let turn = (number / 8) as u8;
            ensure!(
                memory[at] == turn,
                "byte {at:#x} of the anonymous memory is {:#x} instead of {turn:#x}",
                memory[at]
            );
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

/// Runs the part in a cgroup with [`LIMIT`]. Returns how often the cgroup reached the limit. Fails if the OOM killer
/// ran.
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
    ensure!(of("oom_kill ") == Some(0), "the OOM killer ran in the cgroup: {events}");
    of("max ").with_context(|| format!("memory.events has no line max: {events}"))
}

fn memory_max(bed: &mut Bed) -> Result<()> {
    let drive = bed.block("nvme0")?;
    let times = pressed(8, drive.to_str().context("path")?, rounds(200))?;
    ensure!(
        times > 0,
        "the cgroup never reached memory.max: the test checked nothing"
    );
    println!("memory.max was reached {times} times");
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
    ensure!(pages > 0, "no page was swapped in: the test checked nothing");
    println!("memory.max was reached {times} times, {pages} pages were swapped in");
    Ok(())
}

fn processors_leave(_: &mut Bed) -> Result<()> {
    const THREADS: u64 = 3;
    let online = Path::new("/sys/devices/system/cpu/cpu1/online");
    let (stop, made) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| -> Result<()> {
        let churns: Vec<_> = (1..=THREADS)
            .map(|seed| {
                let (stop, made) = (&stop, &made);
                scope.spawn(move || {
                    churn(seed, |_| {
                        made.fetch_add(1, Ordering::Relaxed);
                        Ok(!stop.load(Ordering::Relaxed))
                    })
                })
            })
            .collect();
        let toggled = (|| {
            for _ in 0..rounds(8) {
                for state in ["0", "1"] {
                    // Wait for allocations in each state of the CPU.
                    let seen = made.load(Ordering::Relaxed);
                    until("20 more buffers were requested", || {
                        Ok(made.load(Ordering::Relaxed) >= seen + 20 || churns.iter().any(|churn| churn.is_finished()))
                    })?;
                    write(online, state)?;
                }
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        for churn in churns {
            churn.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        }
        write(online, "1")?;
        toggled
    })?;
    println!("{} buffers were requested", made.load(Ordering::Relaxed));
    Ok(())
}
