// SPDX-License-Identifier: MIT OR Apache-2.0

//! Correct use of the ABI.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::{Bed, Case, alloc, buffer, command, errno, expect, explain_last, free, open, providers, request};
use crate::host;
use crate::sys::{self, Mapping, Memory};
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "info",
        about: "INFO reports version, features and sums of the providers",
        topology: "small",
        ruins: false,
        run: info,
    },
    Case {
        name: "list",
        about: "LIST reports the number of all providers and writes as many as fit",
        topology: "small",
        ruins: false,
        run: list,
    },
    Case {
        name: "alloc",
        about: "ALLOC rounds sizes, aligns memory, and never returns the same handle twice",
        topology: "small",
        ruins: false,
        run: allocate,
    },
    Case {
        name: "near",
        about: "a drive below the provider's switch has path class SAME_SWITCH in PATHS, ALLOC and EXPLAIN",
        topology: "small",
        ruins: false,
        run: near,
    },
    Case {
        name: "stats",
        about: "STATS counts allocations, frees, mappings and bytes",
        topology: "small",
        ruins: false,
        run: stats,
    },
    Case {
        name: "mmap",
        about: "mappings show the buffer: parts, mremap, mprotect, fork",
        topology: "small",
        ruins: false,
        run: mapping,
    },
    Case {
        name: "mmap-zero",
        about: "mmap at offset 0 allocates a buffer that lives as long as the mapping",
        topology: "small",
        ruins: false,
        run: mapping_at_zero,
    },
    Case {
        name: "o-direct",
        about: "O_DIRECT I/O between a drive and the BAR transfers no payload through host memory",
        topology: "small",
        ruins: false,
        run: o_direct,
    },
    Case {
        name: "fio",
        about: "fio reads, writes and verifies with buffers from /dev/p2pmem",
        topology: "small",
        ruins: false,
        run: fio,
    },
    Case {
        name: "stress",
        about: "live buffers of threads that allocate and free at random do not overlap",
        topology: "small",
        ruins: false,
        run: stress,
    },
];

fn info(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let mut info = abi::p2pmem_info::default();
    sys::plain(file.as_fd(), abi::P2PMEM_IOC_INFO, &mut info).map_err(errno)?;
    ensure!(
        info.abi_version == abi::P2PMEM_ABI_VERSION && info.page_size == 4096,
        "{info:?}"
    );
    let known = abi::P2PMEM_FEATURE_MMAP_PAGED | abi::P2PMEM_FEATURE_EVENTS;
    ensure!(
        info.features & u64::from(known) == u64::from(known),
        "features {:#x}",
        info.features
    );
    ensure!(
        info.version[0] != 0 && info.version[31] == 0,
        "the version is not a NUL-terminated text"
    );
    let rows = providers(file.as_fd())?;
    ensure!(info.providers as usize == rows.len());
    ensure!(info.size == rows.iter().map(|p| p.size).sum::<u64>() && info.size > 0);
    ensure!(info.free == rows.iter().map(|p| p.free).sum::<u64>());
    Ok(())
}

fn list(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let mut none = abi::p2pmem_list::default();
    sys::list(file.as_fd(), &mut none, Memory::Slice(&mut [])).map_err(errno)?;
    let rows = providers(file.as_fd())?;
    ensure!(none.count as usize == rows.len() && !rows.is_empty());
    ensure!(
        rows.windows(2).all(|w| w[0].id < w[1].id),
        "LIST is not in the order of ids"
    );
    let accel = bed.provider("accel0")?;
    let memory = bed.device("accel0")?.memory;
    ensure!(
        accel.kind == abi::P2PMEM_KIND_OWN && accel.state == abi::P2PMEM_PROVIDER_LIVE && accel.bar == 2,
        "{accel:?}"
    );
    ensure!(
        accel.size + accel.kernel_reserve == memory,
        "{accel:?}: the BAR has {memory} bytes"
    );
    ensure!(
        accel.free <= accel.size && accel.largest <= accel.free && accel.id != 0,
        "{accel:?}"
    );
    ensure!(
        accel.vendor == 0x1234 && accel.device == 0xa2c1 && accel.class == 0x12_0000,
        "{accel:?}"
    );
    Ok(())
}

fn allocate(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let mut seen = HashSet::new();
    for round in 0..3 {
        let mut live = Vec::new();
        for size in [1, 4095, 4096, 4097, 1 << 20, (3 << 20) + 5] {
            let a = alloc(fd, size).map_err(errno)?;
            ensure!(
                a.size == size.next_multiple_of(4096),
                "a request for {size} bytes got {}",
                a.size
            );
            ensure!(
                a.handle != 0 && seen.insert(a.handle),
                "ALLOC returned handle {} twice, round {round}",
                a.handle
            );
            ensure!(
                a.bar_offset % 4096 == 0 && a.mmap_offset % 4096 == 0 && a.mmap_offset != 0,
                "{a:?}"
            );
            let b = buffer(fd, a.handle).map_err(errno)?;
            ensure!(
                b.size == a.size && b.bar_offset == a.bar_offset && b.mmap_offset == a.mmap_offset,
                "{a:?} {b:?}"
            );
            ensure!(
                b.state == abi::P2PMEM_BUFFER_LIVE && b.mappings == 0 && b.provider == a.provider,
                "{b:?}"
            );
            ensure!(b.bus_addr != 0, "root does not see the bus address");
            live.push(a);
        }
        no_overlap(&live.iter().map(|a| (a.bar_offset, a.size)).collect::<Vec<_>>())?;
        for a in live {
            free(fd, a.handle).map_err(errno)?;
        }
    }
    for shift in 12..=24 {
        let mut a = request(4096);
        a.req.align = 1 << shift;
        sys::alloc(fd, &mut a, Memory::Slice(&mut []))
            .map_err(errno)
            .with_context(|| format!("align {:#x}", a.req.align))?;
        ensure!(
            a.bar_offset % a.req.align == 0,
            "offset {:#x} is not aligned to {:#x}",
            a.bar_offset,
            a.req.align
        );
        free(fd, a.handle).map_err(errno)?;
    }
    // The file's close frees the handle that remains.
    alloc(fd, 1 << 20).map_err(errno)?;
    Ok(())
}

fn no_overlap(ranges: &[(u64, u64)]) -> Result<()> {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        ensure!(
            pair[0].0 + pair[0].1 <= pair[1].0,
            "buffers {:#x?} and {:#x?} overlap",
            pair[0],
            pair[1]
        );
    }
    Ok(())
}

fn near(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let mut clients = [bed.address("nvme0")?];
    let accel = bed.provider("accel0")?;
    let mut rows = [abi::p2pmem_path::default(); 4];
    let mut paths = abi::p2pmem_paths {
        nr_clients: 1,
        nr_paths: 4,
        flags: abi::P2PMEM_PATHS_RESCAN,
        ..Default::default()
    };
    sys::paths(fd, &mut paths, Memory::Slice(&mut clients), Memory::Slice(&mut rows)).map_err(errno)?;
    let path = rows[..paths.nr_paths as usize]
        .iter()
        .find(|p| p.provider == accel.id)
        .context("PATHS has no path of accel0")?;
    ensure!(
        path.class == abi::P2PMEM_PATH_SAME_SWITCH && path.distance == 4 && path.client == 0,
        "{path:?}"
    );
    ensure!(path.flags & abi::P2PMEM_PATH_BUS_ADDR != 0, "{path:?}");
    let mut a = request(1 << 20);
    a.req.nr_clients = 1;
    sys::alloc(fd, &mut a, Memory::Slice(&mut clients)).map_err(errno)?;
    ensure!(
        a.class == abi::P2PMEM_PATH_SAME_SWITCH && a.provider == accel.id,
        "{a:?}"
    );
    let (explain, verdicts, _) = explain_last(fd)?;
    ensure!(explain.error == 0 && explain.chosen == accel.id, "{explain:?}");
    let verdict = verdicts
        .iter()
        .find(|v| v.provider == accel.id)
        .context("EXPLAIN has no verdict of accel0")?;
    ensure!(
        verdict.code == abi::P2PMEM_VERDICT_CHOSEN && verdict.class == abi::P2PMEM_PATH_SAME_SWITCH,
        "{verdict:?}"
    );
    // Without arrays, EXPLAIN returns only the chosen provider, the number of verdicts, and space for the longest
    // message.
    let mut brief = abi::p2pmem_explain {
        req: a.req,
        ..Default::default()
    };
    sys::explain(
        fd,
        &mut brief,
        Memory::Slice(&mut clients),
        Memory::Slice(&mut []),
        Memory::Slice(&mut []),
    )
    .map_err(errno)?;
    ensure!(brief.error == 0 && brief.chosen == accel.id, "{brief:?}");
    ensure!(
        brief.nr_verdicts as usize == verdicts.len() && brief.text_len >= explain.text_len,
        "{brief:?} after {explain:?}"
    );
    // 8, 9, and 64 clients: one read of the module, one more than that, and the maximum.
    for count in [8, 9, 64] {
        let mut many = vec![clients[0]; count];
        let mut rows = vec![abi::p2pmem_path::default(); 4 * count];
        paths = abi::p2pmem_paths {
            nr_clients: count as u32,
            nr_paths: rows.len() as u32,
            ..Default::default()
        };
        sys::paths(fd, &mut paths, Memory::Slice(&mut many), Memory::Slice(&mut rows)).map_err(errno)?;
        rows.truncate(paths.nr_paths as usize);
        rows.retain(|row| row.provider == accel.id);
        let numbers: Vec<u32> = rows.iter().map(|row| row.client).collect();
        ensure!(numbers == (0..count as u32).collect::<Vec<_>>(), "{numbers:?}");
        ensure!(
            rows.iter()
                .all(|row| (row.class, row.distance) == (path.class, path.distance)),
            "{rows:?}"
        );
        let mut b = request(4096);
        b.req.nr_clients = count as u32;
        sys::alloc(fd, &mut b, Memory::Slice(&mut many)).map_err(errno)?;
        ensure!(b.provider == accel.id, "{b:?}");
        free(fd, b.handle).map_err(errno)?;
        // The module checks also the last client.
        many[count - 1].bus = 0xfe;
        expect(
            "a client that does not exist",
            sys::alloc(fd, &mut b, Memory::Slice(&mut many)),
            libc::ENODEV,
        )?;
    }
    // Strategy upstream chooses the only provider too.
    a.req.strategy = abi::P2PMEM_STRATEGY_UPSTREAM;
    let first = a.handle;
    sys::alloc(fd, &mut a, Memory::Slice(&mut clients))
        .map_err(errno)
        .context("strategy upstream")?;
    ensure!(a.provider == accel.id && a.handle != first);
    Ok(())
}

fn stats(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let id = bed.provider("accel0")?.id;
    let ask = |provider| -> Result<abi::p2pmem_stats> {
        let mut stats = abi::p2pmem_stats {
            provider,
            ..Default::default()
        };
        sys::plain(fd, abi::P2PMEM_IOC_STATS, &mut stats).map_err(errno)?;
        Ok(stats)
    };
    let (one, sum) = (ask(id)?, ask(0)?);
    let a = alloc(fd, 2 << 20).map_err(errno)?;
    drop(Mapping::shared(fd, a.mmap_offset, a.size as usize).map_err(errno)?);
    free(fd, a.handle).map_err(errno)?;
    bed.settled()?;
    for (before, after) in [(one, ask(id)?), (sum, ask(0)?)] {
        ensure!(
            after.allocs == before.allocs + 1 && after.frees == before.frees + 1,
            "{before:?} {after:?}"
        );
        ensure!(
            after.alloc_bytes == before.alloc_bytes + (2 << 20),
            "{before:?} {after:?}"
        );
        ensure!(
            after.free_bytes == before.free_bytes + (2 << 20),
            "{before:?} {after:?}"
        );
        ensure!(after.maps == before.maps + 1, "{before:?} {after:?}");
    }
    Ok(())
}

pub(super) fn mapping(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let a = alloc(fd, 64 << 10).map_err(errno)?;
    let len = a.size as usize;
    let whole = Mapping::shared(fd, a.mmap_offset, len).map_err(errno)?;
    for at in (0..len).step_by(8) {
        ensure!(
            whole.get(at) == 0,
            "a new buffer is not zero: {:#x} at {at}",
            whole.get(at)
        );
        whole.set(at, at as u64 ^ 0x5a5a);
    }
    // Mappings are aligned to the memory as far as their length allows, mappings of a part too, so that the kernel can
    // use the largest page table entries.
    for (len, offset, part) in [
        (16u64 << 20, 0u64, 16u64 << 20),
        (5 << 20, 0, 5 << 20),
        (16 << 20, 4 << 20, 2 << 20),
    ] {
        let large = alloc(fd, len).map_err(errno)?;
        let map = Mapping::shared(fd, large.mmap_offset + offset, part as usize).map_err(errno)?;
        let step = part.next_power_of_two();
        let memory = large.bar_offset + offset;
        ensure!(
            map.address() % step == memory % step,
            "{part:#x} bytes at {offset:#x} are at {memory:#x} in the BAR and at {:#x} in the program",
            map.address()
        );
        drop(map);
        free(fd, large.handle).map_err(errno)?;
    }
    // A second mapping, of the middle, shows the same memory.
    let middle = Mapping::shared(fd, a.mmap_offset + 8192, 8192).map_err(errno)?;
    ensure!(middle.get(8) == 8200 ^ 0x5a5a && buffer(fd, a.handle).map_err(errno)?.mappings == 2);
    middle.set(8, 77);
    ensure!(whole.get(8200) == 77);
    drop(middle);
    let mut part = Mapping::shared(fd, a.mmap_offset, len).map_err(errno)?;
    part.unmap_part(len - 4096, 4096).map_err(errno)?;
    part.unmap_part(0, 4096).map_err(errno)?;
    ensure!(part.get(0) == 4096 ^ 0x5a5a, "wrong content after unmapping both ends");
    part.protect(libc::PROT_READ).map_err(errno)?;
    ensure!(part.get(8) == 4104 ^ 0x5a5a, "wrong content after mprotect(PROT_READ)");
    let read_only = sys::in_child(|| {
        part.set(0, 1);
        0
    })?;
    ensure!(
        libc::WIFSIGNALED(read_only) && libc::WTERMSIG(read_only) == libc::SIGSEGV,
        "a write to a read-only mapping did not raise SIGSEGV, status {read_only:#x}"
    );
    let before = part.len();
    part.remap(before, libc::MREMAP_MAYMOVE).map_err(errno)?;
    ensure!(part.get(0) == 4096 ^ 0x5a5a, "wrong content after mremap");
    match part.remap(before + (1 << 20), libc::MREMAP_MAYMOVE) {
        // A mapping that grows past the buffer must not show other memory: mremap fails, or an access raises SIGBUS.
        Err(_) => {}
        Ok(()) => {
            let beyond = sys::in_child(|| i32::from(part.get(before + 8192) != 0))?;
            ensure!(
                libc::WIFSIGNALED(beyond) && libc::WTERMSIG(beyond) == libc::SIGBUS,
                "an access past the buffer did not raise SIGBUS, status {beyond:#x}"
            );
        }
    }
    // A child shares the mapping. The child's exit does not end the parent's mapping.
    let child = sys::in_child(|| {
        let fine = whole.get(0) == 0x5a5a;
        whole.set(0, 4711);
        i32::from(!fine)
    })?;
    ensure!(
        child == 0 && whole.get(0) == 4711,
        "a forked child does not share the mapping, status {child:#x}"
    );
    // The mapping outlives the handle and the file.
    free(fd, a.handle).map_err(errno)?;
    drop(file);
    ensure!(whole.get(0) == 4711 && whole.get(len - 8) == (len as u64 - 8) ^ 0x5a5a);
    Ok(())
}

pub(super) fn mapping_at_zero(bed: &mut Bed) -> Result<()> {
    let (free_before, buffers) = bed.settled()?;
    let file = open()?;
    let map = Mapping::shared(file.as_fd(), 0, 1 << 20).map_err(errno)?;
    map.set(0, 1);
    map.set((1 << 20) - 8, 2);
    let other = Mapping::shared(file.as_fd(), 0, 1 << 20).map_err(errno)?;
    ensure!(other.get(0) == 0, "two mappings at offset 0 share memory");
    drop(file);
    let now = bed.provider("accel0")?;
    ensure!(
        now.buffers == buffers + 2 && now.free + (2 << 20) <= free_before,
        "{now:?}"
    );
    ensure!(map.get(0) == 1);
    Ok(())
}

/// Returns the payload of nvme0 by target and direction, in bytes, from the runner's snapshot.
fn payload(target: &str, direction: &str) -> Result<u64> {
    let snapshot = host::request(&Request::Snapshot)?;
    Ok(snapshot["nvme0"][direction][target].as_u64().unwrap_or(0))
}

fn direct(path: &std::path::Path, write: bool) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .with_context(|| path.display().to_string())
}

fn o_direct(bed: &mut Bed) -> Result<()> {
    const LEN: usize = 4 << 20;
    let block = bed.block("nvme0")?;
    // Write data to the drive through the page cache.
    let data: Vec<u8> = (0..LEN as u64 / 8)
        .flat_map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    let plain = OpenOptions::new().read(true).write(true).open(&block)?;
    plain.write_all_at(&data, 0)?;
    plain.sync_all()?;
    let file = open()?;
    let a = alloc(file.as_fd(), LEN as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, LEN).map_err(errno)?;
    let drive = direct(&block, true)?;
    let (host_read, host_write) = (payload("host", "read")?, payload("host", "write")?);
    let unknown = payload("unknown", "payload")?;
    let (bar_read, bar_write) = (payload("accel0", "read")?, payload("accel0", "write")?);
    ensure!(map.fill_from(&drive, 0, 0, LEN)? == LEN, "short read");
    for (i, word) in data.chunks_exact(8).enumerate() {
        let want = u64::from_le_bytes(word.try_into()?);
        ensure!(
            map.get(i * 8) == want,
            "byte {}: {:#x} instead of {want:#x}",
            i * 8,
            map.get(i * 8)
        );
    }
    // An offset into the buffer, and a length that is not a power of two.
    ensure!(map.fill_from(&drive, 8192, 4096, 12 << 10)? == 12 << 10);
    ensure!(map.get(4096) == u64::from_le_bytes(data[8192..8200].try_into()?));
    ensure!(map.drain_to(&drive, LEN as u64, 0, LEN)? == LEN, "short write");
    let (read, written) = ((LEN + (12 << 10)) as u64, LEN as u64);
    ensure!(
        payload("unknown", "payload")? == unknown,
        "the drive accessed unknown addresses, so the count of host memory proves nothing"
    );
    ensure!(
        payload("accel0", "read")? - bar_read == read,
        "the drive's count of payload read into the BAR is wrong"
    );
    ensure!(
        payload("accel0", "write")? - bar_write == written,
        "the drive's count of payload written from the BAR is wrong"
    );
    ensure!(
        payload("host", "read")? == host_read && payload("host", "write")? == host_write,
        "payload went through host memory"
    );
    let mut back = vec![0u8; LEN];
    let cold = OpenOptions::new().read(true).open(&block)?;
    rustix::fs::fadvise(&cold, LEN as u64, None, rustix::fs::Advice::DontNeed)?;
    cold.read_exact_at(&mut back, LEN as u64)?;
    for (i, word) in back.chunks_exact(8).enumerate() {
        ensure!(
            map.get(i * 8) == u64::from_le_bytes(word.try_into()?),
            "the drive and the buffer differ at byte {}",
            i * 8
        );
    }
    Ok(())
}

fn fio(bed: &mut Bed) -> Result<()> {
    let block = bed.block("nvme0")?;
    let name = format!("--filename={}", block.display());
    let common = [
        "--name=t",
        "--ioengine=psync",
        "--direct=1",
        "--mem=mmapshared:/dev/p2pmem",
        "--bs=64k",
        "--size=8m",
        &name,
    ];
    let bar = payload("accel0", "payload")?;
    for extra in [
        &["--rw=write"][..],
        &["--rw=randread"],
        &["--rw=write", "--verify=crc32c", "--do_verify=1"],
    ] {
        let arguments: Vec<&str> = common.iter().chain(extra).copied().collect();
        command("fio", &arguments)?;
    }
    let moved = payload("accel0", "payload")? - bar;
    ensure!(moved == 4 * (8 << 20), "fio moved {moved} bytes through the BAR");
    Ok(())
}

pub(super) fn stress(bed: &mut Bed) -> Result<()> {
    bed.settled()?;
    let largest = bed.provider("accel0")?.largest;
    let file = open()?;
    let live: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
    let worker = |seed: u64| -> Result<()> {
        let fd = file.as_fd();
        let mut state = seed;
        let mut mine = Vec::new();
        for _ in 0..400 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let random = state >> 33;
            if random % 3 != 0 || mine.is_empty() {
                let size = 1 + (random >> 2) % (1 << (12 + random % 9));
                match alloc(fd, size) {
                    Ok(a) => {
                        let range = (a.bar_offset, a.size);
                        let mut live = live.lock().map_err(|_| anyhow::anyhow!("poisoned"))?;
                        live.push(range);
                        no_overlap(&live)?;
                        mine.push((a.handle, range));
                    }
                    Err(libc::ENOSPC) => {}
                    Err(code) => return Err(errno(code)),
                }
            } else {
                let (handle, range) = mine.swap_remove(random as usize % mine.len());
                // Remove the range before the free, because another thread may get the memory at once.
                let mut live = live.lock().map_err(|_| anyhow::anyhow!("poisoned"))?;
                let at = live
                    .iter()
                    .position(|r| *r == range)
                    .context("a live buffer is not in the list")?;
                live.swap_remove(at);
                drop(live);
                free(fd, handle).map_err(errno)?;
            }
        }
        for (handle, range) in mine {
            live.lock()
                .map_err(|_| anyhow::anyhow!("poisoned"))?
                .retain(|r| *r != range);
            free(fd, handle).map_err(errno)?;
        }
        Ok(())
    };
    let worker = &worker;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=4).map(|seed| scope.spawn(move || worker(seed * 7919))).collect();
        threads
            .into_iter()
            .try_for_each(|t| t.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })?;
    // After all frees, the memory is contiguous again, whether or not it is cleared.
    bed.settled()?;
    let row = bed.provider("accel0")?;
    ensure!(
        row.largest >= largest,
        "{row:?}: the largest free piece was {largest} bytes before"
    );
    Ok(())
}
