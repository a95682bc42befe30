// SPDX-License-Identifier: MIT OR Apache-2.0

//! Providers without struct pages: everything that needs no pages works as with pages.

use std::fs::{self, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::{Bed, Case, alloc, dmabuf, dmabuf_end, errno, good, life, open, read, write};
use crate::sys::{self, Mapping};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "pageless",
        about: "a BAR is published without pages: what LIST says, what cannot be, and O_DIRECT is EFAULT",
        topology: "small",
        ruins: false,
        run: published,
    },
    Case {
        name: "pageless-map",
        about: "mappings, forks, clearing and many threads, without pages",
        topology: "small",
        ruins: false,
        run: |bed| without_pages(bed, &[good::mapping, good::mapping_at_zero, good::stress, life::scrub]),
    },
    Case {
        name: "pageless-unbind",
        about: "unbinding with mapped buffers, without pages",
        topology: "small",
        ruins: false,
        run: |bed| without_pages(bed, &[life::unbind, life::unbind_many, life::unbind_and_kill]),
    },
    Case {
        name: "pageless-dmabuf",
        about: "exports and importers, without pages",
        topology: "small",
        ruins: false,
        run: |bed| {
            without_pages(
                bed,
                &[dmabuf::exported, dmabuf::ranges, dmabuf::mapped, dmabuf_end::order],
            )
        },
    },
    Case {
        name: "pageless-dmabuf-end",
        about: "dma-bufs that are revoked, held on to, and raced for, without pages",
        topology: "small",
        ruins: false,
        run: |bed| {
            without_pages(
                bed,
                &[
                    dmabuf_end::revoke,
                    dmabuf_end::hold,
                    dmabuf_end::disable_and_unbind,
                    dmabuf_end::race,
                ],
            )
        },
    },
];

/// Runs tests with accel0 published without pages, and publishes it with pages again.
pub(super) fn without_pages(bed: &mut Bed, tests: &[fn(&mut Bed) -> Result<()>]) -> Result<()> {
    bed.unpublish("accel0")?;
    publish(bed)?;
    let answer = tests.iter().try_for_each(|test| test(bed));
    bed.unpublish("accel0")?;
    answer?;
    bed.publish("accel0")
}

pub(super) fn publish(bed: &Bed) -> Result<()> {
    let dir = bed.provider_dir("accel0")?;
    fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
    write(&dir.join("mode"), "pageless")?;
    bed.publish("accel0")?;
    let row = bed.provider("accel0")?;
    ensure!(row.flags & abi::P2PMEM_PROVIDER_PAGELESS != 0, "{row:?}");
    Ok(())
}

/// Returns the size of the calling process's page tables in KiB.
fn page_tables() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("VmPTE")?.parse()?)
}

fn published(bed: &mut Bed) -> Result<()> {
    let dir = bed.provider_dir("accel0")?;
    let mut info = abi::p2pmem_info::default();
    sys::plain(open()?.as_fd(), abi::P2PMEM_IOC_INFO, &mut info).map_err(errno)?;
    ensure!(info.features & u64::from(abi::P2PMEM_FEATURE_PAGELESS) != 0, "{info:?}");
    // Struct pages stay until the device is unbound.
    write(&dir.join("enable"), "0")?;
    ensure!(read(&dir.join("mode"))? == "paged");
    write(&dir.join("mode"), "pageless")?;
    ensure!(fs::write(dir.join("enable"), "1").is_err(), "pages were taken away");
    ensure!(
        read(&dir.join("status"))?.contains("was given pages"),
        "{}",
        read(&dir.join("status"))?
    );
    bed.unpublish("accel0")?;

    publish(bed)?;
    ensure!(read(&dir.join("mode"))? == "pageless");
    let row = bed.provider("accel0")?;
    let memory = bed.device("accel0")?.memory;
    ensure!(
        row.size == memory && row.free == memory && row.largest == memory && row.kernel_reserve == 0,
        "{row:?}"
    );
    ensure!(
        row.flags == abi::P2PMEM_PROVIDER_PAGELESS | abi::P2PMEM_PROVIDER_EXPORTABLE,
        "{row:?}"
    );
    // The kernel has no pool of this memory.
    let pool = bed.device("accel0")?.sysfs().join("p2pmem");
    ensure!(!pool.exists(), "{} is there", pool.display());
    let file = open()?;
    let a = alloc(file.as_fd(), 1 << 20).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, 1 << 20).map_err(errno)?;
    let drive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(bed.block("nvme0")?)?;
    let answer = map.fill_from(&drive, 0, 0, 4096).map_err(|e| e.raw_os_error());
    ensure!(answer == Err(Some(libc::EFAULT)), "O_DIRECT: {answer:?}");
    map.set(0, 1);
    drop(map);
    // A large buffer is mapped by large entries, which need no page tables.
    let before = page_tables()?;
    let a = alloc(file.as_fd(), 32 << 20).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, 32 << 20).map_err(errno)?;
    for at in (0..map.len()).step_by(4096) {
        map.set(at, at as u64);
    }
    let needed = page_tables()? - before;
    ensure!(needed < 32, "{needed} KiB of page tables for 16 large entries");
    // A part of the mapping with other access rights, and back.
    map.protect_part(3 << 20, 4096, libc::PROT_READ).map_err(errno)?;
    ensure!(map.get(3 << 20) == 3 << 20);
    map.protect(libc::PROT_READ | libc::PROT_WRITE).map_err(errno)?;
    for at in (0..map.len()).step_by(4096) {
        ensure!(map.get(at) == at as u64, "{:#x} at {at:#x}", map.get(at));
        map.set(at, 0);
    }
    drop(map);
    drop(file);

    // The same binding can get pages later. A kernel reserve needs pages.
    write(&dir.join("enable"), "0")?;
    write(&dir.join("kernel_reserve"), "1048576")?;
    ensure!(fs::write(dir.join("enable"), "1").is_err(), "a reserve without pages");
    ensure!(
        read(&dir.join("status"))?.contains("kernel_reserve"),
        "{}",
        read(&dir.join("status"))?
    );
    write(&dir.join("kernel_reserve"), "auto")?;
    write(&dir.join("offset"), "2097152")?;
    write(&dir.join("size"), "4194304")?;
    write(&dir.join("enable"), "1")?;
    let row = bed.provider("accel0")?;
    ensure!(row.bar_offset == 2 << 20 && row.size == 4 << 20, "{row:?}");
    let file = open()?;
    // All of the memory, in its two pieces of that alignment.
    let mut offsets = [0; 2];
    for offset in &mut offsets {
        *offset = alloc(file.as_fd(), 2 << 20).map_err(errno)?.bar_offset;
    }
    offsets.sort_unstable();
    ensure!(offsets == [2 << 20, 4 << 20], "{offsets:x?}");
    drop(file);
    bed.unpublish("accel0")?;
    bed.publish("accel0")
}
