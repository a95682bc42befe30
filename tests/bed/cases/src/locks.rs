// SPDX-License-Identifier: MIT OR Apache-2.0

//! Locks: what allocations of unrelated files and providers wait for.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{Bed, Case, alloc, errno, free, open, write};

pub(super) const CASES: &[Case] = &[Case {
    name: "locks",
    about: "a buffer's ALLOC and FREE take at most two locks that a file and a provider of their own take, too",
    topology: "broadcast",
    ruins: false,
    run: global,
}];

const PAGE: u64 = 4096;
const TRACING: &str = "/sys/kernel/tracing";
/// Maximum number of times that ALLOC and FREE take locks which all files and providers share.
const MOST: usize = 2;

/// A lock that was taken: its address and its name.
type Taken = (String, String);

/// Parses a line of the trace: task, processor, time, event, address, and the name after the kind of access.
fn parse(line: &str) -> Option<Taken> {
    let (_, event) = line.split_once(" lock_acquire: ")?;
    let (address, name) = event.split_once(' ')?;
    // The names of locks in Rust are places in its files, those of static locks the names of the statics.
    let is_static = |word: &str| word.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    let name = name
        .split_whitespace()
        .find(|word| word.contains(".rs:") || is_static(word))?;
    Some((address.to_owned(), name.to_owned()))
}

/// Allocates a page and frees it, and returns the module's locks that this took.
fn pair() -> Result<Vec<Taken>> {
    let tracing = |name: &str| -> PathBuf { Path::new(TRACING).join(name) };
    let file = open()?;
    let fd = file.as_fd();
    // Finds the providers and their paths.
    free(fd, alloc(fd, PAGE).map_err(errno)?.handle).map_err(errno)?;
    write(
        &tracing("set_event_pid"),
        &rustix::thread::gettid().as_raw_nonzero().to_string(),
    )?;
    write(&tracing("trace"), "")?;
    write(&tracing("events/lock/lock_acquire/enable"), "1")?;
    let taken = alloc(fd, PAGE).and_then(|made| free(fd, made.handle));
    write(&tracing("events/lock/lock_acquire/enable"), "0")?;
    write(&tracing("set_event_pid"), "")?;
    taken.map_err(errno)?;
    let trace = fs::read_to_string(tracing("trace")).context("trace")?;
    let locks: Vec<Taken> = trace.lines().filter_map(parse).collect();
    ensure!(!locks.is_empty(), "no lock of the module was recorded:\n{trace}");
    Ok(locks)
}

fn global(bed: &mut Bed) -> Result<()> {
    // The buffer keeps its provider, so that the locks of the next one have other addresses.
    let file = open()?;
    let held = alloc(file.as_fd(), PAGE).map_err(errno)?;
    let first = pair()?;
    bed.unpublish("accel0")?;
    bed.publish("accel1")?;
    let second = pair()?;
    bed.unpublish("accel1")?;
    free(file.as_fd(), held.handle).map_err(errno)?;
    let shared: Vec<&Taken> = second.iter().filter(|lock| first.contains(lock)).collect();
    println!("{} of {} locks are global: {shared:?}", shared.len(), second.len());
    ensure!(
        shared.len() <= MOST,
        "ALLOC and FREE take global locks {} times instead of {MOST}: {shared:?}",
        shared.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_of_the_module_are_parsed() {
        let line = |name: &str| format!("  cases-88  [001] d..1.  2.25: lock_acquire: 00000000c0ffee00 {name}");
        let taken = |name: &str| Some(("00000000c0ffee00".to_owned(), name.to_owned()));
        assert_eq!(parse(&line("rust/rules.rs:280")), taken("rust/rules.rs:280"));
        assert_eq!(parse(&line("try rust/mem.rs:90")), taken("rust/mem.rs:90"));
        assert_eq!(parse(&line("POOLS")), taken("POOLS"));
        // Locks of the kernel, and another event.
        assert_eq!(parse(&line("read rcu_read_lock")), None);
        assert_eq!(parse(&line("&mm->mmap_lock")), None);
        assert_eq!(parse(&line("POOLS").replace("acquire", "release")), None);
    }
}
