// SPDX-License-Identifier: MIT OR Apache-2.0

//! Exports as dma-bufs: the ranges that can be exported, the importers that can attach, and the addresses that they
//! map.
//!
//! The importer is a kernel module of the test bed (tests/kernel/importer). The importer attaches to a dma-buf as any
//! PCI function, maps the dma-buf, and either ends the mapping or keeps it when the exporter invalidates the mapping.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context, Result, anyhow, bail, ensure};
use p2pmem_sys as abi;

use super::{Bed, Case, NODE, alloc, buffer, command, errno, expect, explain_last, free, open, write};
use crate::sys::{self, BAD_POINTERS, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "dmabuf",
        about: "an importer maps an exported buffer at its bus address, in one piece if the buffer is contiguous",
        topology: "small",
        ruins: false,
        run: exported,
    },
    Case {
        name: "dmabuf-ranges",
        about: "a dma-buf has the ranges in the order of the request, adjacent ranges as one piece",
        topology: "small",
        ruins: false,
        run: ranges,
    },
    Case {
        name: "dmabuf-leak",
        about: "mapping and unmapping a dma-buf thousands of times leaks no kernel memory",
        topology: "small",
        ruins: false,
        run: leak,
    },
    Case {
        name: "dmabuf-bad",
        about: "exports with bad ranges, flags, handles and pointers fail, and EXPLAIN has the reason",
        topology: "small",
        ruins: false,
        run: bad,
    },
    Case {
        name: "dmabuf-mapped",
        about: "EXPORT_MAPPED exports buffers by the addresses of their mappings, and rejects other addresses",
        topology: "small",
        ruins: false,
        run: mapped,
    },
    Case {
        name: "dmabuf-refused",
        about: "importers without peer-to-peer support or revocation cannot attach, and EXPLAIN has the reason",
        topology: "small",
        ruins: false,
        run: refused,
    },
    Case {
        name: "dmabuf-pinned-rule",
        about: "importers that cannot be revoked can attach if the exporter and the administrator allow them",
        topology: "small",
        ruins: false,
        run: pinned_rule,
    },
    Case {
        name: "dmabuf-unreachable",
        about: "an importer that cannot reach the provider, according to the kernel, cannot attach",
        topology: "unreachable",
        ruins: false,
        run: unreachable,
    },
    Case {
        name: "dmabuf-adopted",
        about: "memory of an adopted drive is exported, and revoked when the drive's driver is unbound",
        topology: "demo",
        ruins: false,
        run: adopted,
    },
];

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// An open file of the importer: the file takes commands, and returns the state of its attachment.
pub(super) struct Importer(File);

/// The state of an importer.
#[derive(Debug, Default)]
pub(super) struct State {
    numbers: HashMap<String, u64>,
    /// Bus address and length of each mapped piece.
    pub(super) entries: Vec<(u64, u64)>,
}

impl State {
    /// Returns the number with a name, or 0 if the state has no such name.
    pub(super) fn get(&self, name: &str) -> u64 {
        self.numbers.get(name).copied().unwrap_or(0)
    }
}

impl Importer {
    /// Opens an importer that is not attached. Loads the importer's module, if it is not loaded.
    pub(super) fn new() -> Result<Importer> {
        // The lock makes threads wait for the one that loads the module.
        static LOADING: Mutex<()> = Mutex::new(());
        let loading = LOADING.lock().map_err(|_| anyhow!("poisoned"))?;
        if !Path::new("/sys/module/p2pmem_importer").exists() {
            let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
            let importer = Path::new(&module).with_file_name("p2pmem_importer.ko");
            command("insmod", &[importer.to_str().context("path")?])?;
        }
        drop(loading);
        let node = "/dev/p2pmem-importer";
        Ok(Importer(
            OpenOptions::new().read(true).write(true).open(node).context(node)?,
        ))
    }

    /// Opens an importer, attaches it as a device, and maps the dma-buf.
    pub(super) fn mapped(bed: &Bed, dma_buf: &OwnedFd, device: &str, how: &str) -> Result<Importer> {
        let importer = Importer::new()?;
        importer.attach(bed, dma_buf, device, how).map_err(errno)?;
        importer.say("map").map_err(errno).context("map")?;
        Ok(importer)
    }

    /// Attaches as a device of the topology. `how` has the properties of the attachment, such as [`GOOD`].
    pub(super) fn attach(&self, bed: &Bed, dma_buf: &OwnedFd, device: &str, how: &str) -> Result<(), i32> {
        let bdf = bed.device(device).map(|d| d.bdf.clone()).unwrap_or(device.to_owned());
        self.say(&format!("attach {} {bdf} {how}", dma_buf.as_raw_fd()))
    }

    /// Writes a command.
    pub(super) fn say(&self, line: &str) -> Result<(), i32> {
        match (&self.0).write_all(line.as_bytes()) {
            Ok(()) => Ok(()),
            Err(e) => Err(e.raw_os_error().unwrap_or(0)),
        }
    }

    pub(super) fn state(&self) -> Result<State> {
        let mut text = vec![0; 64 << 10];
        let n = (&self.0).read(&mut text)?;
        let mut state = State::default();
        for line in String::from_utf8_lossy(&text[..n]).lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16);
            match words.as_slice() {
                ["entry", at, len] => state.entries.push((hex(at)?, hex(len)?)),
                [name, number] => {
                    state.numbers.insert((*name).to_owned(), number.parse()?);
                }
                _ => bail!("unknown line in the importer's state: {line:?}"),
            }
        }
        Ok(state)
    }
}

/// Properties of an importer that supports peer-to-peer and ends its mappings when notified.
pub(super) const GOOD: &str = "p2p notify";

/// Exports ranges of the buffer of a handle.
pub(super) fn export(fd: BorrowedFd<'_>, handle: u32, flags: u32, ranges: &[(u64, u64)]) -> Result<OwnedFd, i32> {
    let mut list: Vec<_> = ranges
        .iter()
        .map(|&(offset, size)| abi::p2pmem_range { offset, size })
        .collect();
    let mut ask = abi::p2pmem_export {
        nr_ranges: list.len() as u32,
        handle,
        flags,
        ..Default::default()
    };
    sys::export(fd, &mut ask, Memory::Slice(&mut list))
}

/// Allocates a buffer and exports all of it.
pub(super) fn exported_buffer(fd: BorrowedFd<'_>, size: u64, flags: u32) -> Result<(abi::p2pmem_alloc, OwnedFd)> {
    let a = alloc(fd, size).map_err(errno)?;
    let dma_buf = export(fd, a.handle, flags, &[(0, a.size)])
        .map_err(errno)
        .context("EXPORT_DMABUF")?;
    Ok((a, dma_buf))
}

pub(super) fn stats(fd: BorrowedFd<'_>, provider: u32) -> Result<abi::p2pmem_stats> {
    let mut stats = abi::p2pmem_stats {
        provider,
        ..Default::default()
    };
    sys::plain(fd, abi::P2PMEM_IOC_STATS, &mut stats).map_err(errno)?;
    Ok(stats)
}

/// Returns the debugfs listing of all dma-bufs.
pub(super) fn listing() -> Result<String> {
    let path = "/sys/kernel/debug/p2pmem/dmabufs";
    fs::read_to_string(path).context(path)
}

pub(super) fn exported(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let mut info = abi::p2pmem_info::default();
    sys::plain(fd, abi::P2PMEM_IOC_INFO, &mut info).map_err(errno)?;
    ensure!(info.features & u64::from(abi::P2PMEM_FEATURE_DMABUF) != 0, "{info:?}");
    let row = bed.provider("accel0")?;
    ensure!(
        row.flags & abi::P2PMEM_PROVIDER_EXPORTABLE != 0 && row.exports == 0,
        "{row:?}"
    );
    let before = stats(fd, row.id)?;
    let (a, dma_buf) = exported_buffer(fd, 4 * MIB, 0)?;
    ensure!(bed.provider("accel0")?.exports == 1);
    let flags = rustix::io::fcntl_getfd(&dma_buf)?;
    ensure!(
        flags.contains(rustix::io::FdFlags::CLOEXEC),
        "the dma-buf's descriptor is not close-on-exec"
    );
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", dma_buf.as_raw_fd()))?;
    ensure!(
        about.contains("exp_name:\tp2pmem\n") && about.contains(&format!("size:\t{}\n", 4 * MIB)),
        "{about}"
    );
    let at = buffer(fd, a.handle).map_err(errno)?.bus_addr;
    // A drive below the same switch, and the provider itself.
    for device in ["nvme0", "accel0"] {
        let importer = Importer::mapped(bed, &dma_buf, device, GOOD)?;
        let state = importer.state()?;
        ensure!(
            state.entries == [(at, 4 * MIB)] && state.get("nents") == 1 && state.get("orig_nents") == 0,
            "the importer maps the buffer at {at:#x} as {state:x?}"
        );
        let b = buffer(fd, a.handle).map_err(errno)?;
        ensure!(b.exports == 1 && b.attachments == 1 && b.mappings == 0, "{b:?}");
        let text = listing()?;
        let bdf = &bed.device(device)?.bdf;
        let me = format!("of pid {} (p2pmem-guest-te)", std::process::id());
        ensure!(
            text.contains(&format!(
                "in {}: 0x0+0x400000, revocable, live, exported by",
                bed.device("accel0")?.bdf
            )) && text.contains(&format!("  importer {bdf} ("))
                && text.contains(&format!("{me}: 1 mappings, revocable, since 0 s")),
            "{text}"
        );
        importer.say("pin").map_err(errno).context("pin")?;
        ensure!(listing()?.contains("revocable, pinned"), "{}", listing()?);
        importer.say("unpin").map_err(errno)?;
        importer.say("unmap").map_err(errno)?;
        importer.say("map").map_err(errno).context("second map")?;
        ensure!(importer.state()?.entries == [(at, 4 * MIB)]);
        importer.say("detach").map_err(errno)?;
        ensure!(buffer(fd, a.handle).map_err(errno)?.attachments == 0);
    }
    // Three importers at the same time, of two dma-bufs of one buffer.
    let second = export(fd, a.handle, 0, &[(MIB, MIB)]).map_err(errno)?;
    let importers = [
        Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?,
        Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?,
        Importer::mapped(bed, &second, "nvme0", GOOD)?,
    ];
    ensure!(importers[2].state()?.entries == [(at + MIB, MIB)]);
    let b = buffer(fd, a.handle).map_err(errno)?;
    ensure!(b.exports == 2 && b.attachments == 3, "{b:?}");
    drop((importers, second, dma_buf));
    let b = buffer(fd, a.handle).map_err(errno)?;
    ensure!(b.exports == 0 && b.attachments == 0, "{b:?}");
    ensure!(bed.provider("accel0")?.exports == 0 && listing()?.is_empty());
    let after = stats(fd, row.id)?;
    ensure!(
        after.exports == before.exports + 2
            && after.attaches == before.attaches + 5
            && after.attach_failed == before.attach_failed,
        "{before:?} {after:?}"
    );
    free(fd, a.handle).map_err(errno)
}

pub(super) fn ranges(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let a = alloc(fd, MIB).map_err(errno)?;
    let at = buffer(fd, a.handle).map_err(errno)?.bus_addr;
    let page = 4 * KIB;
    type List = Vec<(u64, u64)>;
    let every_other: List = (0..64).map(|n| (2 * n * page, page)).collect();
    let neighbours: List = (0..64).map(|n| (n * page, page)).collect();
    let backwards: List = (0..64).rev().map(|n| (n * page, page)).collect();
    let cases: [(List, List); 6] = [
        (vec![(page, page)], vec![(page, page)]),
        (vec![(MIB - page, page)], vec![(MIB - page, page)]),
        (
            vec![(8 * page, 2 * page), (0, page)],
            vec![(8 * page, 2 * page), (0, page)],
        ),
        (every_other.clone(), every_other),
        (neighbours, vec![(0, 64 * page)]),
        (backwards.clone(), backwards),
    ];
    for (requested, seen) in cases {
        let dma_buf = export(fd, a.handle, 0, &requested)
            .map_err(errno)
            .with_context(|| format!("{requested:x?}"))?;
        let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
        let state = importer.state()?;
        let want: List = seen.iter().map(|&(offset, size)| (at + offset, size)).collect();
        ensure!(
            state.entries == want && state.get("nents") == want.len() as u64,
            "ranges {requested:x?} of the buffer at {at:#x}: the importer has {state:x?}"
        );
        let size: u64 = requested.iter().map(|r| r.1).sum();
        let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", dma_buf.as_raw_fd()))?;
        ensure!(about.contains(&format!("size:\t{size}\n")), "{about}");
    }
    free(fd, a.handle).map_err(errno)
}

/// Returns the kernel's unreclaimable slab memory, in KiB.
fn slabs() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("SUnreclaim:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("SUnreclaim")?.parse()?)
}

fn leak(bed: &mut Bed) -> Result<()> {
    const TIMES: u64 = 4000;
    let file = open()?;
    let fd = file.as_fd();
    let a = alloc(fd, MIB).map_err(errno)?;
    let list: Vec<_> = (0..64).map(|n| (n * 8 * KIB, 4 * KIB)).collect();
    let dma_buf = export(fd, a.handle, 0, &list).map_err(errno)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
    importer.say("unmap").map_err(errno)?;
    let before = slabs()?;
    for _ in 0..TIMES {
        importer.say("map").map_err(errno)?;
        importer.say("unmap").map_err(errno)?;
    }
    // A leaked table of 64 entries takes 2 KiB, and the allocations that the table was built from as much again.
    let grown = slabs()?.saturating_sub(before);
    ensure!(
        grown < TIMES * 2 / 4,
        "slabs grew by {grown} KiB while the dma-buf was mapped {TIMES} times"
    );
    Ok(())
}

/// Checks the errno of the last explanation, and that its message contains `word`.
fn explained(fd: BorrowedFd<'_>, code: i32, word: &str) -> Result<()> {
    let (explain, _, text) = explain_last(fd)?;
    ensure!(
        explain.error == code as u32 && text.contains(word),
        "errno {}, and the message {text:?} does not contain {word:?}",
        explain.error
    );
    Ok(())
}

fn bad(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let a = alloc(fd, MIB).map_err(errno)?;
    let page = 4 * KIB;
    let top = !0xfff_u64;
    let mut too_many: Vec<_> = (0..64).map(|n| (n * page, page)).collect();
    too_many.push((65 * page, page));
    /// Ranges, the errno that the export fails with, and words of the message.
    type Case<'a> = (&'a [(u64, u64)], i32, &'a str);
    let cases: &[Case<'_>] = &[
        (&[], libc::EINVAL, "needs a range"),
        (&[(0, 0)], libc::EINVAL, "0 bytes"),
        (&[(0, page), (page, 0)], libc::EINVAL, "range 1 has 0 bytes"),
        (&[(1, page)], libc::EINVAL, "whole pages"),
        (&[(0, page + 8)], libc::EINVAL, "whole pages"),
        (&[(0, 2 * MIB)], libc::EINVAL, "past the end"),
        (&[(MIB, page)], libc::EINVAL, "past the end"),
        (&[(MIB - page, 2 * page)], libc::EINVAL, "past the end"),
        (&[(top, page)], libc::EINVAL, "past the end"),
        (&[(top, 2 * page)], libc::EINVAL, "past the end"),
        (&[(page, top)], libc::EINVAL, "past the end"),
        (&[(page, page), (page, page)], libc::EINVAL, "overlap"),
        (&[(page, 2 * page), (0, 2 * page)], libc::EINVAL, "overlap"),
        (&[(0, MIB), (8 * page, page)], libc::EINVAL, "overlap"),
        (&too_many, libc::E2BIG, "at most 64"),
    ];
    for (list, code, word) in cases {
        expect(&format!("{list:x?}"), export(fd, a.handle, 0, list), *code)?;
        explained(fd, *code, word)?;
    }
    let whole = [(0, MIB)];
    for flags in [4, 1 << 31] {
        expect("unknown flags", export(fd, a.handle, flags, &whole), libc::EINVAL)?;
        explained(fd, libc::EINVAL, "unknown flags")?;
    }
    for handle in [0, a.handle + 1, u32::MAX] {
        expect(
            "handle that does not exist",
            export(fd, handle, 0, &whole),
            libc::ENOENT,
        )?;
        explained(fd, libc::ENOENT, "no handle")?;
    }
    let other = open()?;
    expect(
        "handle of another file",
        export(other.as_fd(), a.handle, 0, &whole),
        libc::ENOENT,
    )?;
    expect(
        "pinned export without permission",
        export(fd, a.handle, abi::P2PMEM_EXPORT_PINNED, &whole),
        libc::EPERM,
    )?;
    explained(fd, libc::EPERM, "pinned_exports")?;
    for at in 0..BAD_POINTERS.len() {
        let mut ask = abi::p2pmem_export {
            nr_ranges: 1,
            handle: a.handle,
            ..Default::default()
        };
        expect(
            "ranges at a bad pointer",
            sys::export(fd, &mut ask, Memory::Bad(at)),
            libc::EFAULT,
        )?;
    }
    // A failed export for want of a file descriptor leaks no export.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let few = rustix::process::Rlimit {
        current: Some(3),
        ..limit
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few)?;
    let answer = export(fd, a.handle, 0, &whole);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?;
    expect("export without a free file descriptor", answer, libc::EMFILE)?;
    explained(fd, libc::EMFILE, "descriptor")?;
    ensure!(
        bed.provider("accel0")?.exports == 0,
        "the provider still counts exports that failed"
    );
    // Programs cannot map the dma-buf; mappings come from /dev/p2pmem.
    let dma_buf = export(fd, a.handle, 0, &whole).map_err(errno)?;
    expect(
        "mmap of the dma-buf",
        Mapping::shared(dma_buf.as_fd(), 0, 4096),
        libc::EOPNOTSUPP,
    )?;
    explained(fd, libc::EOPNOTSUPP, "/dev/p2pmem")?;
    drop(dma_buf);
    free(fd, a.handle).map_err(errno)?;
    expect("freed handle", export(fd, a.handle, 0, &whole), libc::ENOENT)
}

pub(super) fn mapped(bed: &mut Bed) -> Result<()> {
    let (owner, other) = (open()?, open()?);
    let fd = other.as_fd();
    let page = 4 * KIB;
    let by_address = |list: &[(u64, u64)]| export(fd, 0, abi::P2PMEM_EXPORT_MAPPED, list);
    let a = alloc(owner.as_fd(), MIB).map_err(errno)?;
    let b = alloc(owner.as_fd(), MIB).map_err(errno)?;
    let at = buffer(owner.as_fd(), a.handle).map_err(errno)?.bus_addr;
    let map = Mapping::shared(owner.as_fd(), a.mmap_offset, MIB as usize).map_err(errno)?;
    let start = map.address();
    let seen = |list: &[(u64, u64)], want: &[(u64, u64)]| -> Result<()> {
        let dma_buf = by_address(list).map_err(errno).with_context(|| format!("{list:x?}"))?;
        let state = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?.state()?;
        let want: Vec<_> = want.iter().map(|&(offset, size)| (at + offset, size)).collect();
        ensure!(
            state.entries == want,
            "addresses {list:x?}: the importer has {state:x?}, expected {want:x?}"
        );
        Ok(())
    };
    seen(&[(start, MIB)], &[(0, MIB)])?;
    seen(&[(start + page, page)], &[(page, page)])?;
    seen(
        &[(start + 4 * page, page), (start, page)],
        &[(4 * page, page), (0, page)],
    )?;
    // Several areas that map one piece of the buffer in sequence, then an area in the middle that maps another piece.
    map.protect_part(64 << 10, 64 << 10, libc::PROT_READ).map_err(errno)?;
    seen(&[(start, MIB)], &[(0, MIB)])?;
    let end = MIB - 128 * KIB;
    map.replace_part(64 << 10, 64 << 10, owner.as_fd(), a.mmap_offset + MIB - 64 * KIB)
        .map_err(errno)?;
    seen(&[(start, 128 * KIB)], &[(0, 64 * KIB), (MIB - 64 * KIB, 64 * KIB)])?;
    // A range of addresses that maps the same memory twice.
    expect(
        "a range of addresses that maps memory twice",
        by_address(&[(start, MIB)]),
        libc::EINVAL,
    )?;
    explained(fd, libc::EINVAL, "overlap")?;
    // A mapping of another buffer in the middle.
    map.replace_part(64 << 10, 64 << 10, owner.as_fd(), b.mmap_offset)
        .map_err(errno)?;
    expect(
        "a range of addresses with two buffers",
        by_address(&[(start, MIB)]),
        libc::EXDEV,
    )?;
    explained(fd, libc::EXDEV, "another buffer")?;
    seen(&[(start + 128 * KIB, end)], &[(128 * KIB, end)])?;

    // Addresses of other mappings, and addresses without a mapping.
    let memory = vec![0u8; 64 << 10];
    let inside = (memory.as_ptr() as u64).next_multiple_of(page);
    let zero = File::open("/dev/zero")?;
    let foreign = Mapping::new(zero.as_fd(), 0, 4096, libc::PROT_READ, libc::MAP_PRIVATE).map_err(errno)?;
    for address in [inside, foreign.address(), 0, 0x7fff_ffff_f000, 0xffff_8000_0000_0000] {
        expect(
            &format!("export of address {address:#x}"),
            by_address(&[(address, page)]),
            libc::ENOENT,
        )?;
    }
    explained(fd, libc::ENOENT, "no p2pmem buffer is mapped at")?;
    expect(
        "past the end of the mapping",
        by_address(&[(start + MIB - page, 2 * page)]),
        libc::ENOENT,
    )
    .or_else(|_| {
        // Another mapping of a p2pmem buffer may follow.
        expect(
            "past the end of the mapping",
            by_address(&[(start + MIB - page, 2 * page)]),
            libc::EXDEV,
        )
    })?;
    for list in [
        &[][..],
        &[(start + 1, page)],
        &[(start, page - 1)],
        &[(start, 0)],
        &[(!0xfff, 2 * page)],
    ] {
        expect(&format!("{list:x?}"), by_address(list), libc::EINVAL)?;
    }
    expect(
        "a handle with EXPORT_MAPPED",
        export(fd, a.handle, abi::P2PMEM_EXPORT_MAPPED, &[(start, page)]),
        libc::EINVAL,
    )?;
    // A mapping of a read-only file cannot be exported, because importers could write.
    let reader = OpenOptions::new().read(true).open(NODE)?;
    let c = alloc(reader.as_fd(), 64 * KIB).map_err(errno)?;
    let shown = Mapping::new(
        reader.as_fd(),
        c.mmap_offset,
        64 << 10,
        libc::PROT_READ,
        libc::MAP_SHARED,
    )
    .map_err(errno)?;
    expect(
        "mapping of a read-only file",
        by_address(&[(shown.address(), page)]),
        libc::EACCES,
    )?;
    drop((shown, reader));

    // A buffer without a handle, exported by a child that inherited the mapping.
    let anonymous = Mapping::shared(owner.as_fd(), 0, 64 << 10).map_err(errno)?;
    let child = sys::in_child(|| {
        let Ok(file) = open() else { return 1 };
        let list = [(anonymous.address(), 64 * KIB)];
        match export(file.as_fd(), 0, abi::P2PMEM_EXPORT_MAPPED, &list) {
            Ok(_) => 0,
            Err(code) => code,
        }
    })?;
    ensure!(child == 0, "the export in a child failed: {child:#x}");
    // The dma-buf alone holds the buffer.
    let buffers = bed.provider("accel0")?.buffers;
    let dma_buf = by_address(&[(anonymous.address(), 64 * KIB)]).map_err(errno)?;
    drop(anonymous);
    ensure!(bed.provider("accel0")?.buffers == buffers);
    Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
    drop(dma_buf);
    ensure!(bed.provider("accel0")?.buffers == buffers - 1);
    drop(map);
    expect("after munmap", by_address(&[(start, page)]), libc::ENOENT)
}

fn refused(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let (_, dma_buf) = exported_buffer(fd, MIB, 0)?;
    let provider = bed.provider("accel0")?.id;
    let before = stats(fd, provider)?;
    let importer = Importer::new()?;
    let cases = [
        ("nvme0", "", libc::EOPNOTSUPP, "does not allow peer-to-peer"),
        ("nvme0", "notify", libc::EOPNOTSUPP, "does not allow peer-to-peer"),
        ("nvme0", "static", libc::EOPNOTSUPP, "does not allow peer-to-peer"),
        ("nvme0", "p2p", libc::EOPNOTSUPP, "P2PMEM_EXPORT_PINNED"),
        ("none", GOOD, libc::EHOSTUNREACH, "is not a PCI function"),
    ];
    for (device, how, code, word) in cases {
        expect(
            &format!("{device} {how}"),
            importer.attach(bed, &dma_buf, device, how),
            code,
        )?;
        explained(fd, code, word)?;
        let (_, _, text) = explain_last(fd)?;
        let name = bed
            .device(device)
            .map_or("p2pmem-importer".to_owned(), |d| d.bdf.clone());
        ensure!(text.contains(&name), "{text:?} does not name {name}");
    }
    let after = stats(fd, provider)?;
    ensure!(
        after.attach_failed == before.attach_failed + cases.len() as u64 && after.attaches == before.attaches,
        "{before:?} {after:?}"
    );
    // The importer is rejected also after the exporter's file is closed.
    drop(file);
    expect(
        "attach after the exporter's file was closed",
        importer.attach(bed, &dma_buf, "nvme0", "p2p"),
        libc::EOPNOTSUPP,
    )?;
    importer.attach(bed, &dma_buf, "nvme0", GOOD).map_err(errno)
}

fn pinned_rule(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let rule = bed.provider_dir("accel0")?.join("pinned_exports");
    ensure!(super::read(&rule)? == "0", "pinned exports are allowed by default");
    for bad in ["2", "yes", "\n", "-1"] {
        ensure!(
            fs::write(&rule, bad).is_err(),
            "writing {bad:?} to pinned_exports succeeded"
        );
    }
    write(&rule, "1")?;
    let row = bed.provider("accel0")?;
    ensure!(row.flags & abi::P2PMEM_PROVIDER_PINNED_EXPORTS != 0, "{row:?}");
    let (a, dma_buf) = exported_buffer(fd, MIB, abi::P2PMEM_EXPORT_PINNED)?;
    let revocable = export(fd, a.handle, 0, &[(0, MIB)]).map_err(errno)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", "p2p")?;
    importer.say("pin").map_err(errno).context("pin")?;
    let at = buffer(fd, a.handle).map_err(errno)?.bus_addr;
    ensure!(importer.state()?.entries == [(at, MIB)]);
    ensure!(
        listing()?.contains(", pinned, live,") && listing()?.contains("1 mappings, not revocable"),
        "{}",
        listing()?
    );
    // A revocable export rejects an importer that cannot be revoked. Every export rejects one without peer-to-peer
    // support.
    let second = Importer::new()?;
    expect(
        "attach to a revocable export without revocation",
        second.attach(bed, &revocable, "nvme0", "p2p"),
        libc::EOPNOTSUPP,
    )?;
    expect(
        "attach without peer-to-peer support",
        second.attach(bed, &dma_buf, "nvme0", "static"),
        libc::EOPNOTSUPP,
    )?;
    second.attach(bed, &dma_buf, "nvme0", GOOD).map_err(errno)?;
    second.say("detach").map_err(errno)?;
    // When the administrator revokes the permission, attached importers stay, and no other such importer can attach.
    write(&rule, "0")?;
    let row = bed.provider("accel0")?;
    ensure!(row.flags & abi::P2PMEM_PROVIDER_PINNED_EXPORTS == 0, "{row:?}");
    expect(
        "attach after pinned_exports was disabled",
        second.attach(bed, &dma_buf, "nvme0", "p2p"),
        libc::EPERM,
    )?;
    explained(fd, libc::EPERM, "no longer allows pinned exports")?;
    expect(
        "pinned export after pinned_exports was disabled",
        export(fd, a.handle, abi::P2PMEM_EXPORT_PINNED, &[(0, MIB)]),
        libc::EPERM,
    )?;
    ensure!(importer.state()?.get("mapped") == 1);
    Ok(())
}

fn unreachable(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let (a, near) = exported_buffer(fd, MIB, 0)?;
    ensure!(a.provider == bed.provider("accel0")?.id, "{a:?}");
    let importer = Importer::new()?;
    // accel1 is below another root port.
    expect(
        "attach across root ports",
        importer.attach(bed, &near, "accel1", GOOD),
        libc::EHOSTUNREACH,
    )?;
    explained(fd, libc::EHOSTUNREACH, "host bridge")?;
    let (_, _, text) = explain_last(fd)?;
    for name in ["accel0", "accel1"] {
        ensure!(text.contains(&bed.device(name)?.bdf), "{text:?} does not name {name}");
    }
    let state = Importer::mapped(bed, &near, "nvme0", GOOD)?.state()?;
    ensure!(state.entries.len() == 1, "{state:?}");
    Ok(())
}

fn adopted(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("nvme1")?;
    ensure!(row.flags & abi::P2PMEM_PROVIDER_EXPORTABLE != 0, "{row:?}");
    let file = open()?;
    let fd = file.as_fd();
    let mut a = super::request(MIB);
    (a.req.provider, a.req.align) = (row.id, MIB);
    sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map_err(errno)?;
    let at = buffer(fd, a.handle).map_err(errno)?.bus_addr;
    let dma_buf = export(fd, a.handle, 0, &[(64 * KIB, 64 * KIB)]).map_err(errno)?;
    // From the same switch, and across host bridges from the other socket.
    let importers = ["nvme0", "accel0", "accel1"].map(|name| Importer::mapped(bed, &dma_buf, name, GOOD));
    for importer in &importers {
        let state = match importer {
            Ok(importer) => importer.state()?,
            Err(e) => bail!("{e:#}"),
        };
        ensure!(state.entries == [(at + 64 * KIB, 64 * KIB)], "{at:#x}: {state:x?}");
    }
    bed.unbind("nvme1")?;
    ensure!(buffer(fd, a.handle).map_err(errno)?.state == abi::P2PMEM_BUFFER_GONE);
    for importer in importers.iter().flatten() {
        let state = importer.state()?;
        ensure!(state.get("invalidated") == 1 && state.get("mapped") == 0, "{state:?}");
        expect("mapping again", importer.say("map"), libc::ENODEV)?;
    }
    write(Path::new("/sys/bus/pci/drivers/nvme/bind"), &bed.device("nvme1")?.bdf)?;
    let again = bed.provider("nvme1")?;
    ensure!(
        again.id != row.id && again.free == row.free && again.exports == 0,
        "{again:?}"
    );
    Ok(())
}
