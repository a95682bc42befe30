// SPDX-License-Identifier: MIT OR Apache-2.0

//! Memory with struct pages that is mapped by entries of 2 MiB: buffers that have whole blocks of that size.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::{Result, ensure};

use super::{Bed, Case, alloc, errno, free, open};
use crate::sys::{self, Mapping};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "folio-faults",
        about: "touching 16 MiB takes 8 page faults, and each rest of less than 2 MiB takes one",
        topology: "small",
        ruins: false,
        run: faults,
    },
    Case {
        name: "folio-parts",
        about: "parts of an entry of 2 MiB are unmapped, protected, dropped, mapped elsewhere, and shared with a child",
        topology: "small",
        ruins: false,
        run: parts,
    },
    Case {
        name: "folio-direct",
        about: "O_DIRECT reads and writes memory of two folios at once",
        topology: "small",
        ruins: false,
        run: direct,
    },
    Case {
        name: "folio-pieces",
        about: "2 MiB are used as a whole, then in pieces of a page, and then as a whole again",
        topology: "small",
        ruins: false,
        run: pieces,
    },
];

/// Bytes of an entry.
const TABLE: usize = 2 << 20;
const PAGE: usize = 4096;
/// Page faults of the process itself that may come between two counts.
const OWN_FAULTS: u64 = 4;

/// A new buffer, mapped as a whole. The buffer begins at a multiple of 2 MiB.
fn mapped(file: &File, size: usize) -> Result<(p2pmem_sys::p2pmem_alloc, Mapping)> {
    let a = alloc(file.as_fd(), size as u64).map_err(errno)?;
    ensure!(a.bar_offset % TABLE as u64 == 0, "the buffer is at {:#x}", a.bar_offset);
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, size).map_err(errno)?;
    Ok((a, map))
}

/// Writes its place to each page of a mapping, and fails unless that takes `faults` page faults.
fn touch(what: &str, map: &Mapping, faults: u64) -> Result<()> {
    let before = sys::minor_faults()?;
    for at in (0..map.len()).step_by(PAGE) {
        map.set(at, at as u64);
    }
    let taken = sys::minor_faults()? - before;
    ensure!(
        (faults..=faults + OWN_FAULTS).contains(&taken),
        "{what}: {taken} page faults instead of {faults}"
    );
    Ok(())
}

fn faults(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let (a, map) = mapped(&file, 8 * TABLE)?;
    touch("16 MiB", &map, 8)?;
    let again = Mapping::shared(file.as_fd(), a.mmap_offset, 8 * TABLE).map_err(errno)?;
    touch("the same in a second mapping", &again, 8)?;
    // The first MiB of the mapping is the end of a folio.
    let inside = Mapping::shared(file.as_fd(), a.mmap_offset + (1 << 20), TABLE + (1 << 20)).map_err(errno)?;
    touch("3 MiB from the middle of a folio on", &inside, 2)?;
    let (_, rest) = mapped(&file, 2 * TABLE + (1 << 20))?;
    touch("5 MiB", &rest, 3)
}

/// Fails unless each page of a mapping has the word that [`touch`] wrote. Skips the page at `hole`.
fn intact(what: &str, map: &Mapping, hole: Option<usize>) -> Result<()> {
    for at in (0..map.len()).step_by(PAGE).filter(|&at| Some(at) != hole) {
        ensure!(map.get(at) == at as u64, "{what}: {:#x} at {at:#x}", map.get(at));
    }
    Ok(())
}

fn parts(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let (a, map) = mapped(&file, 2 * TABLE)?;
    let middle = TABLE / 2;
    touch("4 MiB", &map, 2)?;
    map.vacate_part(middle, PAGE).map_err(errno)?;
    intact("without a page", &map, Some(middle))?;
    map.replace_part(middle, PAGE, file.as_fd(), a.mmap_offset + middle as u64)
        .map_err(errno)?;
    intact("with the page again", &map, None)?;

    let (_, map) = mapped(&file, 2 * TABLE)?;
    touch("4 MiB", &map, 2)?;
    map.protect_part(middle, PAGE, libc::PROT_READ).map_err(errno)?;
    intact("with a read-only page", &map, None)?;
    let written = sys::in_child(|| {
        map.set(middle, 1);
        0
    })?;
    ensure!(
        libc::WIFSIGNALED(written) && libc::WTERMSIG(written) == libc::SIGSEGV,
        "a write to a read-only page: status {written:#x}"
    );
    map.protect(libc::PROT_READ | libc::PROT_WRITE).map_err(errno)?;
    map.set(middle, middle as u64);
    intact("writable again", &map, None)?;

    let (a, map) = mapped(&file, 2 * TABLE)?;
    touch("4 MiB", &map, 2)?;
    for advice in [libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_DONTNEED] {
        for (at, len) in [(middle, PAGE), (0, TABLE), (middle, TABLE)] {
            map.advise_part(at, len, advice).map_err(errno)?;
            intact(&format!("advice {advice} for {len:#x} bytes"), &map, None)?;
        }
    }
    // An address that is not aligned as the memory is.
    let (_, other) = mapped(&file, 2 * TABLE)?;
    other
        .replace_part(PAGE, TABLE, file.as_fd(), a.mmap_offset)
        .map_err(errno)?;
    for at in (0..TABLE).step_by(PAGE) {
        let got = other.get(PAGE + at);
        ensure!(got == at as u64, "at an odd address: {got:#x} at {at:#x}");
    }
    let child = sys::in_child(|| {
        let same = intact("in a child", &map, None).is_ok();
        map.set(TABLE, 1);
        i32::from(!same)
    })?;
    ensure!(child == 0 && map.get(TABLE) == 1, "the child's status is {child:#x}");
    // The memory outlives the handle, in what is left of the mapping.
    free(file.as_fd(), a.handle).map_err(errno)?;
    map.vacate_part(0, TABLE + middle).map_err(errno)?;
    ensure!(map.get(TABLE + middle) == (TABLE + middle) as u64);
    Ok(())
}

fn direct(bed: &mut Bed) -> Result<()> {
    /// Where the buffer's part begins: the part is in two folios, and ends in the middle of the second.
    const FIRST: usize = TABLE / 2 + PAGE;
    let block = bed.block("nvme0")?;
    let data: Vec<u8> = (0..TABLE as u64 / 8)
        .flat_map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    let plain = OpenOptions::new().read(true).write(true).open(&block)?;
    plain.write_all_at(&data, 0)?;
    plain.sync_all()?;
    let drive = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&block)?;
    let file = open()?;
    let (_, map) = mapped(&file, 2 * TABLE)?;
    // The read makes the folios, and the write finds them mapped.
    ensure!(map.fill_from(&drive, 0, FIRST, TABLE)? == TABLE, "short read");
    for (i, word) in data.chunks_exact(8).enumerate() {
        let (at, want) = (FIRST + i * 8, u64::from_le_bytes(word.try_into()?));
        ensure!(
            map.get(at) == want,
            "{:#x} instead of {want:#x} at {at:#x}",
            map.get(at)
        );
    }
    ensure!(
        map.get(FIRST - 8) == 0 && map.get(FIRST + TABLE) == 0,
        "more was written"
    );
    ensure!(
        map.drain_to(&drive, TABLE as u64, FIRST, TABLE)? == TABLE,
        "short write"
    );
    let mut back = vec![0u8; TABLE];
    rustix::fs::fadvise(&plain, TABLE as u64, None, rustix::fs::Advice::DontNeed)?;
    plain.read_exact_at(&mut back, TABLE as u64)?;
    ensure!(back == data, "the drive and the buffer differ");
    Ok(())
}

fn pieces(bed: &mut Bed) -> Result<()> {
    bed.settled()?;
    let file = open()?;
    let fd = file.as_fd();
    let (whole, map) = mapped(&file, TABLE)?;
    touch("2 MiB", &map, 1)?;
    drop(map);
    // Nothing else is free, so pieces are in the same 2 MiB.
    let mut largest = bed.provider("accel0")?.largest;
    while largest > 0 {
        alloc(fd, largest).map_err(errno)?;
        largest = bed.provider("accel0")?.largest;
    }
    free(fd, whole.handle).map_err(errno)?;
    bed.settled()?;

    let drive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(bed.block("nvme0")?)?;
    let mut handles = Vec::new();
    let mut maps = Vec::new();
    for n in 0..TABLE / PAGE {
        let piece = alloc(fd, PAGE as u64).map_err(errno)?;
        let into = piece.bar_offset.wrapping_sub(whole.bar_offset);
        ensure!(into < TABLE as u64, "piece {n} is at {:#x}", piece.bar_offset);
        handles.push(piece.handle);
        // The pages between these stay without references.
        if n % 3 == 0 {
            let map = Mapping::shared(fd, piece.mmap_offset, PAGE).map_err(errno)?;
            ensure!(map.get(8) == 0, "piece {n} has {:#x}", map.get(8));
            map.set(8, n as u64);
            maps.push((n, map));
        }
    }
    for (n, map) in &maps {
        ensure!(map.get(8) == *n as u64, "piece {n} has {:#x}", map.get(8));
        ensure!(map.fill_from(&drive, 0, 0, PAGE)? == PAGE, "piece {n}: short read");
        map.set(8, *n as u64);
    }
    for (n, map) in &maps {
        ensure!(map.get(8) == *n as u64, "piece {n} has {:#x} after I/O", map.get(8));
    }
    drop(maps);
    for handle in handles {
        free(fd, handle).map_err(errno)?;
    }
    bed.settled()?;

    let (again, map) = mapped(&file, TABLE)?;
    ensure!(again.bar_offset == whole.bar_offset);
    for at in (0..TABLE).step_by(8) {
        ensure!(map.get(at) == 0, "{:#x} at {at:#x}", map.get(at));
    }
    drop(map);
    let map = Mapping::shared(fd, again.mmap_offset, TABLE).map_err(errno)?;
    touch("2 MiB again", &map, 1)
}
