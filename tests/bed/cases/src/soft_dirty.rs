// SPDX-License-Identifier: MIT OR Apache-2.0

//! Writes to mappings of a process whose soft-dirty bits were cleared, as checkpointing does: page table entries are then
//! read-only until they are written.

use std::fs;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use super::{Bed, Case, alloc, errno, open, pageless};
use crate::limits::scaled;
use crate::sys::{self, Mapping};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "soft-dirty",
        about: "writes after soft-dirty bits were cleared, with pages",
        topology: "small",
        ruins: false,
        run: writes,
    },
    Case {
        name: "pageless-soft-dirty",
        about: "writes after soft-dirty bits were cleared end, without pages, where entries are large",
        topology: "small",
        ruins: false,
        run: |bed| pageless::without_pages(bed, &[writes]),
    },
    Case {
        name: "pageless-vfio",
        about: "VFIO type1 cannot map mappings without pages for DMA: their areas show it no page frames",
        topology: "small",
        ruins: false,
        run: |bed| pageless::without_pages(bed, &[no_raw_frames]),
    },
];

/// Returns the flags of the VMA at an address, from smaps.
fn area_flags(address: u64) -> Result<Vec<String>> {
    let smaps = fs::read_to_string("/proc/self/smaps")?;
    let mut here = false;
    for line in smaps.lines() {
        let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
        let parsed =
            range.and_then(|(from, to)| Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?)));
        if let Some((from, to)) = parsed {
            here = (from..to).contains(&address);
        } else if let (true, Some(flags)) = (here, line.strip_prefix("VmFlags:")) {
            return Ok(flags.split_whitespace().map(str::to_owned).collect());
        }
    }
    bail!("no area at {address:#x}")
}

/// VFIO type1 maps page frames of VM_PFNMAP areas ("pf") for DMA, which could not be revoked. It has to pin pages of other
/// areas, and cannot pin those of an area of I/O memory ("io").
fn no_raw_frames(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let buffer = alloc(file.as_fd(), TABLE as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, TABLE).map_err(errno)?;
    map.set(0, 1);
    let flags = area_flags(map.address())?;
    let has = |flag: &str| flags.iter().any(|f| f == flag);
    ensure!(has("io") && has("mm") && !has("pf"), "{flags:?}");
    Ok(())
}

/// Processor time after which the child's fault counts as endless. The fault needs some milliseconds.
const LIMIT: Duration = Duration::from_secs(10);

const TABLE: usize = 2 << 20;

fn writes(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let buffer = alloc(file.as_fd(), 4 * TABLE as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, 4 * TABLE).map_err(errno)?;
    let limit = scaled(LIMIT).as_secs();
    let ended = sys::in_child(|| {
        if sys::limit_processor_time(limit).is_err() {
            return 1;
        }
        map.set(0, 1);
        if fs::write("/proc/self/clear_refs", "4").is_err() {
            return 2;
        }
        // One page that is mapped, one that is not, and one that is read first.
        map.set(8, 2);
        map.set(TABLE, 3);
        let read = map.get(2 * TABLE);
        map.set(2 * TABLE, read + 4);
        0
    })?;
    ensure!(
        !libc::WIFSIGNALED(ended),
        "signal {}: the write faulted without end",
        libc::WTERMSIG(ended)
    );
    ensure!(ended == 0, "the child ended with {ended:#x}");
    for (at, value) in [(0, 1), (8, 2), (TABLE, 3), (2 * TABLE, 4), (3 * TABLE, 0)] {
        ensure!(map.get(at) == value, "{:#x} at {at:#x}", map.get(at));
    }
    Ok(())
}
