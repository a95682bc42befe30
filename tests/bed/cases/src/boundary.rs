// SPDX-License-Identifier: MIT OR Apache-2.0

//! Claims of the threat model that no other case tests: only root can change configfs, no two buffers have the same mmap offsets, a
//! fork does not evade a quota, only administrators see bus addresses, and queries change nothing.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;

use super::dmabuf::stats;
use super::life::{Part, ready};
use super::rules::{ALICE, AdminRule, MIB, alloc_as, counted};
use super::{Bed, Case, PROVIDERS, alloc, buffer, errno, expect, explain, free, open, providers, request};
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "configfs-users",
        about: "only root can create, change and remove providers and rules",
        topology: "small",
        ruins: false,
        run: configfs_users,
    },
    Case {
        name: "mmap-offsets-unique",
        about: "buffers have different mmap offsets on all files, also a revoked one and those of the next provider",
        topology: "small",
        ruins: false,
        run: mmap_offsets_unique,
    },
    Case {
        name: "quota-fork",
        about: "a mapping that a child inherits stays charged when the parent exits or is killed",
        topology: "small",
        ruins: false,
        run: quota_fork,
    },
    Case {
        name: "bus-address",
        about: "only CAP_SYS_ADMIN sees the bus address of a buffer",
        topology: "small",
        ruins: false,
        run: bus_address,
    },
    Case {
        name: "rules-direct-io",
        about: "a rule that denies a drive does not prevent O_DIRECT I/O between the drive and a buffer",
        topology: "small",
        ruins: false,
        run: direct_io,
    },
    Case {
        name: "list-keeps-cleared",
        about: "LIST and EXPLAIN do not make cleared memory dirty",
        topology: "small",
        ruins: false,
        run: list_keeps_cleared,
    },
    Case {
        name: "clear-once",
        about: "new memory is cleared once for its first owner, and memory that nobody touched is not cleared",
        topology: "small",
        ruins: false,
        run: clear_once,
    },
];

/// The name of the part of `quota-fork` that runs in its own process. Argument: the path of a socket.
pub(super) const PART: &str = "fork-with-mapping";

const RULES: &str = "/sys/kernel/config/p2pmem/rules";

/// Fails unless a file operation failed with EACCES.
fn denied<T>(what: &str, answer: std::io::Result<T>) -> Result<()> {
    match answer {
        Ok(_) => bail!("{what} succeeded"),
        Err(e) => expect(what, Err::<(), _>(e.raw_os_error().unwrap_or(0)), libc::EACCES),
    }
}

/// Checks that a process without root's rights can change nothing in configfs.
pub(super) fn configfs_is_denied(provider: &Path, rule: &Path) -> Result<()> {
    denied(
        "mkdir of a provider",
        fs::create_dir(Path::new(PROVIDERS).join("0000:00:00.0")),
    )?;
    denied("mkdir of a rule", fs::create_dir(Path::new(RULES).join("99-mine")))?;
    denied("disabling a provider", fs::write(provider.join("enable"), "0"))?;
    denied("changing a provider", fs::write(provider.join("pinned_exports"), "1"))?;
    denied("disabling a rule", fs::write(rule.join("enable"), "0"))?;
    denied("changing a rule", fs::write(rule.join("action"), "allow"))?;
    denied("rmdir of a rule", fs::remove_dir(rule))?;
    denied("rmdir of a provider", fs::remove_dir(provider))
}

fn configfs_users(bed: &mut Bed) -> Result<()> {
    let _rule = AdminRule::new("10-deny", &[("action", "deny")])?;
    let (provider, rule) = (bed.provider_dir("accel0")?, Path::new(RULES).join("10-deny"));
    sys::as_user(1000, 1000, &[], || configfs_is_denied(&provider, &rule)).map_err(errno)??;
    let file = open()?;
    expect("ALLOC with a rule that denies", alloc(file.as_fd(), 4096), libc::EACCES)
}

fn mmap_offsets_unique(bed: &mut Bed) -> Result<()> {
    let before = bed.settled()?;
    let files = [open()?, open()?];
    let mut used: BTreeMap<u64, u64> = BTreeMap::new();
    let mut handles = Vec::new();
    let mut add = |file: &File, size: u64| -> Result<abi::p2pmem_alloc> {
        let got = alloc(file.as_fd(), size).map_err(errno)?;
        let (from, to) = (got.mmap_offset, got.mmap_offset + size);
        ensure!(from != 0, "offset 0 is reserved for mmap that allocates");
        let taken = used.range(..to).next_back().is_some_and(|(_, &end)| end > from);
        ensure!(!taken, "offsets {from:#x} to {to:#x} are those of another buffer");
        used.insert(from, to);
        Ok(got)
    };
    for n in 0..600u64 {
        let which = n as usize % 2;
        handles.push((which, add(&files[which], 4096 * (1 + n % 5))?));
    }
    // Only the file that has the buffer can map it, and nobody after it was freed.
    for (which, got) in handles.iter().step_by(97) {
        for (file, has) in files.iter().enumerate().map(|(n, file)| (file, n == *which)) {
            match Mapping::shared(file.as_fd(), got.mmap_offset, 4096) {
                Ok(_) => ensure!(has, "another file maps the buffer at {:#x}", got.mmap_offset),
                answer => expect("mmap of another file", answer, libc::EINVAL)?,
            }
        }
    }
    // A mapping keeps the pages of its buffer.
    let (which, kept) = handles[handles.len() / 2];
    let map = Mapping::shared(files[which].as_fd(), kept.mmap_offset, 4096).map_err(errno)?;
    for (which, got) in handles.drain(..) {
        free(files[which].as_fd(), got.handle).map_err(errno)?;
        expect(
            "mmap of a freed buffer",
            Mapping::shared(files[which].as_fd(), got.mmap_offset, 4096),
            libc::EINVAL,
        )?;
    }
    // The offsets of a revoked buffer are not those of a buffer of the provider's successor.
    let all = before.0 / 4 / 4096 * 4096;
    let revoked = alloc(files[0].as_fd(), all).map_err(errno)?;
    let overlaps = |got: &abi::p2pmem_alloc, from: u64, size: u64| {
        got.mmap_offset < from + size && from < got.mmap_offset + got.size
    };
    ensure!(
        !overlaps(&revoked, kept.mmap_offset, kept.size),
        "a mapped buffer's offsets were used again"
    );
    bed.unpublish("accel0")?;
    bed.publish("accel0")?;
    let mut rest = alloc(files[0].as_fd(), 4096).map_err(errno)?;
    loop {
        ensure!(
            !overlaps(&rest, revoked.mmap_offset, revoked.size) && !overlaps(&rest, kept.mmap_offset, kept.size),
            "a revoked buffer's offsets were used again"
        );
        let Ok(next) = alloc(files[0].as_fd(), bed.provider("accel0")?.largest) else {
            break;
        };
        rest = next;
    }
    expect(
        "mmap of a revoked buffer",
        Mapping::shared(files[0].as_fd(), revoked.mmap_offset, 4096),
        libc::ENODEV,
    )?;
    drop(map);
    drop(files);
    bed.settled()?;
    Ok(())
}

/// Allocates as ALICE, keeps only a mapping, and forks. The child connects to the socket and exits when the socket
/// closes.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let path = arguments.first().context("a socket")?;
    let file = open()?;
    let got = alloc_as(file.as_fd(), ALICE, &[], MIB)?.map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), got.mmap_offset, MIB as usize).map_err(errno)?;
    map.set(0, 7);
    free(file.as_fd(), got.handle).map_err(errno)?;
    drop(file);
    let _child = sys::spawn_child(|| {
        let ended = UnixStream::connect(path).and_then(|mut stream| stream.read(&mut [0]));
        i32::from(ended.is_err() || map.get(0) != 7)
    })?;
    ready()
}

fn quota_fork(bed: &mut Bed) -> Result<()> {
    let before = bed.settled()?;
    let quota = AdminRule::new("50-each", &[("quota", "1M"), ("uid", &ALICE.to_string())])?;
    let file = open()?;
    let path = format!("/run/p2pmem/fork-{}.sock", std::process::id());
    for killed in [false, true] {
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).with_context(|| path.clone())?;
        let part = Part::start(PART, &[&path])?;
        let child = listener.accept()?.0;
        if killed {
            part.kill()?;
        } else {
            part.finish()?;
        }
        ensure!(counted(&quota)? == MIB, "{}", quota.get("usage")?);
        expect(
            "ALLOC over the quota",
            alloc_as(file.as_fd(), ALICE, &[], 4096)?,
            libc::EDQUOT,
        )?;
        drop(child);
        super::inflight::until("the mapping of the child is no longer charged", || {
            Ok(counted(&quota)? == 0)
        })?;
    }
    let _ = fs::remove_file(&path);
    alloc_as(file.as_fd(), ALICE, &[], MIB)?.map_err(errno)?;
    drop(file);
    ensure!(bed.settled()? == before);
    Ok(())
}

fn bus_address(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let got = alloc(fd, 4096).map_err(errno)?;
    let seen = buffer(fd, got.handle).map_err(errno)?;
    ensure!(seen.bus_addr != 0, "{seen:?}");
    let user = sys::as_user(1000, 1000, &[], || buffer(fd, got.handle)).map_err(errno)?;
    let user = user.map_err(errno)?;
    let hidden = abi::p2pmem_buffer { bus_addr: 0, ..seen };
    ensure!(
        format!("{user:?}") == format!("{hidden:?}"),
        "{user:?} instead of {hidden:?}"
    );
    Ok(())
}

fn direct_io(bed: &mut Bed) -> Result<()> {
    let drive = bed.device("nvme0")?.bdf.clone();
    let block = bed.block("nvme0")?;
    let plain = OpenOptions::new().read(true).write(true).open(&block)?;
    let data: Vec<u8> = (1..=512u64).flat_map(u64::to_ne_bytes).collect();
    plain.write_all_at(&data, 0)?;
    plain.sync_all()?;
    let _rule = AdminRule::new("10-not-this", &[("client", &drive), ("action", "deny")])?;
    let file = open()?;
    let fd = file.as_fd();
    let mut near = request(4096);
    near.req.nr_clients = 1;
    let answer = sys::alloc(fd, &mut near, Memory::Slice(&mut [bed.address("nvme0")?]));
    expect("ALLOC for a denied client", answer, libc::EACCES)?;
    let got = alloc(fd, 4096).map_err(errno)?;
    let map = Mapping::shared(fd, got.mmap_offset, 4096).map_err(errno)?;
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&block)?;
    ensure!(map.fill_from(&direct, 0, 0, 4096)? == 4096);
    for at in 0..512 {
        ensure!(map.get(8 * at) == at as u64 + 1, "{:#x} at {at}", map.get(8 * at));
    }
    Ok(())
}

fn list_keeps_cleared(bed: &mut Bed) -> Result<()> {
    const SIZE: u64 = 2 << 20;
    let file = open()?;
    let fd = file.as_fd();
    let id = bed.provider("accel0")?.id;
    let take = || -> Result<()> {
        let got = alloc(fd, SIZE).map_err(errno)?;
        free(fd, got.handle).map_err(errno)?;
        bed.settled().map(drop)
    };
    // Use and free the whole provider, so that no memory is dirty at the start.
    let size = bed.provider("accel0")?.largest;
    let whole = alloc(fd, size).map_err(errno)?;
    free(fd, whole.handle).map_err(errno)?;
    bed.settled()?;
    let start = stats(fd, id)?.scrubbed_bytes;
    take()?;
    let freed = stats(fd, id)?.scrubbed_bytes;
    ensure!(freed == start + SIZE, "{} bytes were cleared", freed - start);
    for _ in 0..16 {
        providers(fd)?;
        for size in [4096, SIZE, size] {
            let ask = abi::p2pmem_explain {
                req: request(size).req,
                ..Default::default()
            };
            explain(fd, ask, &mut [])?;
        }
    }
    let got = alloc(fd, SIZE).map_err(errno)?;
    let now = stats(fd, id)?.scrubbed_bytes;
    ensure!(now == freed, "{} bytes were cleared again", now - freed);
    free(fd, got.handle).map_err(errno)
}

fn clear_once(bed: &mut Bed) -> Result<()> {
    const MAPPINGS: u64 = 4;
    // The contents of newly published memory are unknown.
    bed.unpublish("accel0")?;
    bed.publish("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    let provider = bed.provider("accel0")?;
    // No power of two, and too large for two of them to be side by side in a block of the allocator.
    let size = provider.size / 16 * 7;
    let cleared = || -> Result<u64> {
        bed.settled()?;
        Ok(stats(fd, provider.id)?.scrubbed_bytes)
    };
    let start = cleared()?;
    for _ in 0..MAPPINGS {
        drop(Mapping::shared(fd, 0, size as usize).map_err(errno)?);
    }
    ensure!(
        stats(fd, provider.id)?.allocs == MAPPINGS && cleared()? == start,
        "{} bytes were cleared that nobody touched",
        cleared()? - start
    );
    // A mapping is cleared at its first access, and again after its end. Only the first owner's memory is cleared before it is
    // used: later owners get what is zero already.
    let mut before = start;
    for first in [true, false, false] {
        let map = Mapping::shared(fd, 0, size as usize).map_err(errno)?;
        ensure!(map.get(size as usize - 8) == 0, "the memory is not cleared");
        let now = cleared()?;
        let wanted = if first { size } else { 0 };
        ensure!(
            now - before == wanted,
            "{} bytes were cleared for {wanted}",
            now - before
        );
        map.set(0, 1);
        map.set(size as usize - 8, 1);
        drop(map);
        before = cleared()?;
        ensure!(
            before - now == size,
            "{} bytes of {size} were cleared afterwards",
            before - now
        );
        // Queries for more than one half, for which the allocator has to try.
        let ask = abi::p2pmem_explain {
            req: request(provider.size / 32 * 27).req,
            ..Default::default()
        };
        explain(fd, ask, &mut [])?;
    }
    Ok(())
}
