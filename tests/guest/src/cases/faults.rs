// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocations of the kernel's that fail: each one that a call makes in turn, by `/proc/self/fail-nth` of a kernel with
//! FAULT_INJECTION. What the failed calls leave behind, the debug kernel's leak checker and every case's own end see.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::dmabuf::{GOOD, Importer, export, exported_buffer};
use super::peer::{Held, Row, await_rows, counted, nic};
use super::{Bed, Case, alloc, errno, free, open, write};
use crate::sys::Mapping;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "allocation-failures",
        about: "whichever allocation of a call fails, the call succeeds or fails with ENOMEM, and nothing is lost",
        topology: "small",
        ruins: false,
        run: allocation_failures,
    },
    Case {
        name: "allocation-failures-peer",
        about: "whichever allocation of a registration fails, it succeeds or is refused, and nothing is lost",
        topology: "nic",
        ruins: false,
        run: registration,
    },
];

const MIB: u64 = 1 << 20;

/// More allocations than any call here makes.
const MANY: u32 = 300;

/// Does a thing again and again, each time with another of its allocations failing, until there are no more of them. It
/// tells the errno of its failure, which has to be ENOMEM or one of `others`; what it made is dropped when nothing fails any
/// more.
fn each<T>(what: &str, others: &[i32], mut thing: impl FnMut() -> Result<T, i32>) -> Result<()> {
    let path = "/proc/thread-self/fail-nth";
    let mut failures = 0;
    for n in 1..MANY {
        let mut nth = OpenOptions::new().read(true).write(true).open(path).context(path)?;
        nth.write_all(n.to_string().as_bytes()).context(path)?;
        let answer = thing();
        let mut left = String::new();
        nth.read_to_string(&mut left).context(path)?;
        nth.write_all(b"0").context(path)?;
        let reached = left.trim_end_matches(['\n', '\0']) == "0";
        match answer {
            // The allocation was one that the kernel can do without.
            Ok(made) => drop(made),
            Err(code) if reached && (code == libc::ENOMEM || others.contains(&code)) => failures += 1,
            Err(code) => bail!("{what}, its allocation {n} failing: {}", errno(code)),
        }
        if !reached {
            ensure!(failures > 0, "{what}: no allocation of {n} failed");
            println!(
                "{what}: {} allocations, {failures} of which it cannot do without",
                n - 1
            );
            return Ok(());
        }
    }
    bail!("{what}: more than {MANY} allocations")
}

/// The kernel's function whose allocations are spared. Where it cannot split a block for want of memory, it frees one that is
/// free already and so corrupts its trees; the module does not call it where such small allocations can fail.
const SPARED: &str = "gpu_buddy_alloc_blocks";

/// Where a function of the kernel begins, and where the next one does.
fn text_of(function: &str) -> Result<(u64, u64)> {
    let path = "/proc/kallsyms";
    let symbols = std::fs::read_to_string(path).context(path)?;
    let (mut start, mut all) = (None, Vec::new());
    for line in symbols.lines() {
        let mut words = line.split_whitespace();
        if let (Some(address), Some("t" | "T"), Some(name)) = (words.next(), words.next(), words.next()) {
            let address = u64::from_str_radix(address, 16).context(path)?;
            start = start.or((name == function).then_some(address));
            all.push(address);
        }
    }
    let start = start
        .filter(|&start| start != 0)
        .with_context(|| format!("{path} has no {function}"))?;
    let end = all.into_iter().filter(|&address| address > start).min();
    Ok((
        start,
        end.with_context(|| format!("nothing is behind {function} in {path}"))?,
    ))
}

/// Lets allocations of all kinds fail where `fail-nth` says so, without a trace of it in the log.
fn arm() -> Result<()> {
    let (start, end) = text_of(SPARED)?;
    let (start, end) = (format!("{start:#x}"), format!("{end:#x}"));
    let settings = [
        ("ignore-gfp-wait", "N"),
        ("verbose", "0"),
        ("stacktrace-depth", "32"),
        ("reject-start", &start),
        ("reject-end", &end),
    ];
    for (name, value) in settings {
        for kind in ["failslab", "fail_page_alloc"] {
            write(&Path::new("/sys/kernel/debug").join(kind).join(name), value)?;
        }
    }
    write(Path::new("/sys/kernel/debug/fail_page_alloc/min-order"), "0")
}

fn allocation_failures(bed: &mut Bed) -> Result<()> {
    arm()?;
    each("opening the node", &[], || {
        std::fs::File::open(super::NODE).map_err(|e| e.raw_os_error().unwrap_or(0))
    })?;
    let file = open()?;
    let fd = file.as_fd();
    // What gives memory back must not need any.
    let must = |answer: Result<(), i32>| answer.map_err(|_| libc::ENOTRECOVERABLE);
    each("ALLOC", &[], || must(free(fd, alloc(fd, MIB)?.handle)))?;
    let buffer = alloc(fd, MIB).map_err(errno)?;
    each("mapping", &[], || {
        let map = Mapping::shared(fd, buffer.mmap_offset, MIB as usize)?;
        map.get(4096);
        Ok(map)
    })?;
    each("EXPORT_DMABUF", &[], || export(fd, buffer.handle, 0, &[(0, MIB)]))?;
    free(fd, buffer.handle).map_err(errno)?;
    let importer = Importer::new()?;
    let (_, dma_buf) = exported_buffer(fd, MIB, 0)?;
    each("attaching and mapping a dma-buf", &[], || {
        importer.attach(bed, &dma_buf, "nvme0", GOOD)?;
        let mapped = importer.say("map");
        if mapped.is_ok() {
            must(importer.say("unmap"))?;
        }
        must(importer.say("detach"))?;
        mapped
    })
}

fn registration(bed: &mut Bed) -> Result<()> {
    arm()?;
    let nic = nic(bed)?;
    let held = Held::new(bed, "accel0", MIB as usize)?;
    // Where the client finds no memory to look, it is as if nobody knew the addresses.
    each("ibv_reg_mr()", &[libc::EREMOTEIO], || {
        nic.register(held.map.address(), MIB as usize)
    })?;
    await_rows("nothing is left", <[Row]>::is_empty)?;
    let counts = counted()?;
    ensure!(
        counts["acquire"] == counts["release"] && counts["out_of_order"] == 0,
        "{counts:?}"
    );
    Ok(())
}
