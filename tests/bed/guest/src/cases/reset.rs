// SPDX-License-Identifier: MIT OR Apache-2.0

//! Devices that lose their memory's content while bound: resets, errors, and system sleep.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::dmabuf::{GOOD, Importer, exported_buffer};
use super::dmabuf_end::Log;
use super::inflight::until;
use super::life::{Part, await_loss};
use super::pageless::without_pages;
use super::{Bed, Case, alloc, errno, expect, free, open, read, request, write};
use crate::host;
use crate::sys::{self, Mapping, Memory};
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "reset",
        about: "before a reset the function's provider is removed: its buffers are revoked, and its old data is not visible afterwards",
        topology: "small",
        ruins: false,
        run: reset,
    },
    Case {
        name: "reset-pageless",
        about: "before a reset the function's pageless provider is removed: its buffers are revoked, and its old data is not visible afterwards",
        topology: "small",
        ruins: false,
        run: reset_pageless,
    },
    Case {
        name: "port-error",
        about: "before error recovery resets the devices below a root port, their provider is removed",
        topology: "small",
        ruins: true,
        run: port_error,
    },
    Case {
        name: "sleep",
        about: "before the machine sleeps all providers are removed; afterwards adopted providers return, and own ones can be published",
        topology: "demo",
        ruins: false,
        run: sleep,
    },
    Case {
        name: "sleep-held",
        about: "a pinned export with an importer keeps the machine from sleeping, and the log names the importer",
        topology: "small",
        ruins: false,
        run: sleep_held,
    },
];

const MIB: u64 = 1 << 20;
/// The word that fills buffers.
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

/// A filled buffer of accel0 with its owner's file, and an importer.
struct Owned {
    file: File,
    provider: u32,
    got: abi::p2pmem_alloc,
    _importer: Importer,
}

impl Owned {
    fn new(bed: &Bed) -> Result<Self> {
        let file = open()?;
        let provider = bed.provider("accel0")?.id;
        let (got, dma_buf) = exported_buffer(file.as_fd(), MIB, 0)?;
        let map = Mapping::shared(file.as_fd(), got.mmap_offset, MIB as usize).map_err(errno)?;
        for at in (0..MIB as usize).step_by(8) {
            map.set(at, SECRET);
        }
        let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
        Ok(Self {
            file,
            provider,
            got,
            _importer: importer,
        })
    }

    /// Fails unless the buffer was revoked, its file got the events, and the provider is gone.
    fn check_revoked(self, bed: &Bed) -> Result<()> {
        let fd = self.file.as_fd();
        await_loss(&self.file, self.got.handle, self.provider)?;
        ensure!(bed.provider("accel0").is_err(), "accel0 is still a provider");
        let mut arg = request(4096);
        arg.req.provider = self.provider;
        let answer = sys::alloc(fd, &mut arg, Memory::Slice(&mut []));
        expect("ALLOC of a removed provider", answer, libc::ENODEV)?;
        let status = read(&bed.provider_dir("accel0")?.join("status"))?;
        ensure!(status.starts_with("not published any more"), "{status}");
        free(fd, self.got.handle).map_err(errno)
    }
}

/// Fails unless the kernel's pool of accel0, after the provider's removal, has no old data and is not offered to other
/// drivers.
fn check_pool(bed: &Bed) -> Result<()> {
    let pool = bed.device("accel0")?.sysfs().join("p2pmem");
    let published = read(&pool.join("published"))?;
    ensure!(
        published == "0",
        "the pool is offered to other drivers: `published` is {published}"
    );
    let available: usize = read(&pool.join("available"))?.parse()?;
    let file = File::options().read(true).write(true).open(pool.join("allocate"))?;
    let map = Mapping::shared(file.as_fd(), 0, available).map_err(errno)?;
    let left = (0..available).step_by(4096).find(|&at| map.get(at) == SECRET);
    ensure!(left.is_none(), "the kernel's pool has old data at offset {left:?}");
    ensure!(available as u64 > MIB, "the pool has only {available} bytes");
    Ok(())
}

/// Publishes accel0 publish_again. Fails if its memory has old data.
fn publish_again(bed: &Bed) -> Result<()> {
    bed.publish("accel0")?;
    let file = open()?;
    let all = bed.provider("accel0")?.largest;
    let got = alloc(file.as_fd(), all).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), got.mmap_offset, all as usize).map_err(errno)?;
    let left = (0..all as usize).step_by(4096).find(|&at| map.get(at) != 0);
    ensure!(left.is_none(), "old data is visible at offset {left:?}");
    Ok(())
}

fn reset(bed: &mut Bed) -> Result<()> {
    let device = bed.device("accel0")?;
    // Kernel log records of a device have a field with the device's name.
    let field = format!("DEVICE=+pci:{}", device.bdf);
    let sysfs = device.sysfs();
    let methods = read(&sysfs.join("reset_method"))?;
    ensure!(
        methods == "flr bus",
        "the accelerator has reset methods {methods:?}, expected flr and bus"
    );
    for method in methods.split(' ') {
        write(&sysfs.join("reset_method"), method)?;
        let survivor = Part::start("survive", &["4194304"])?;
        let owned = Owned::new(bed)?;
        let mut log = Log::new()?;
        write(&sysfs.join("reset"), "1")?;
        log.wait(&[
            "p2pmem: removing the provider",
            "the device is about to be reset",
            &field,
        ])?;
        owned.check_revoked(bed)?;
        survivor.finish()?;
        check_pool(bed)?;
        publish_again(bed)?;
    }
    write(&sysfs.join("reset_method"), &methods)
}

fn reset_pageless(bed: &mut Bed) -> Result<()> {
    without_pages(
        bed,
        &[|bed| {
            let owned = Owned::new(bed)?;
            write(&bed.device("accel0")?.sysfs().join("reset"), "1")?;
            owned.check_revoked(bed)?;
            publish_again(bed)
        }],
    )
}

fn port_error(bed: &mut Bed) -> Result<()> {
    let owned = Owned::new(bed)?;
    let mut log = Log::new()?;
    host::request(&Request::PortError {
        name: "rp0".into(),
        error: "MALF_TLP".into(),
    })?;
    log.wait(&[
        "removing the provider",
        "the device reported an error and is being reset",
    ])?;
    until("accel0 is no longer a provider", || Ok(bed.provider("accel0").is_err()))?;
    owned.check_revoked(bed)?;
    log.wait(&["AER", "device recovery successful"])?;
    check_pool(bed)?;
    publish_again(bed)
}

/// Suspends the machine with the `freezer` test level, which only freezes all tasks. Returns the kernel's error.
fn suspend_briefly() -> std::io::Result<()> {
    let power = Path::new("/sys/power");
    std::fs::write("/sys/module/suspend/parameters/pm_test_delay", "0")?;
    std::fs::write(power.join("pm_test"), "freezer")?;
    std::fs::write(power.join("state"), "freeze")
}

fn sleep(bed: &mut Bed) -> Result<()> {
    let adopted = || -> Result<Vec<String>> {
        let rows = super::providers(open()?.as_fd())?;
        let mut rows: Vec<_> = rows
            .into_iter()
            .filter(|row| row.kind == abi::P2PMEM_KIND_ADOPTED)
            .collect();
        rows.sort_by_key(|row| (row.addr.bus, row.addr.devfn));
        Ok(rows
            .iter()
            .map(|row| format!("{:x}:{:x} {}", row.addr.bus, row.addr.devfn, row.size))
            .collect())
    };
    let before = adopted()?;
    ensure!(!before.is_empty(), "the topology has no adopted provider");
    let owned = Owned::new(bed)?;
    let mut log = Log::new()?;
    suspend_briefly()?;
    log.wait(&["removing the provider: the machine is about to sleep"])?;
    // Adopted providers are adopted publish_again automatically.
    ensure!(
        adopted()? == before,
        "adopted providers: {:?}, before {before:?}",
        adopted()?
    );
    owned.check_revoked(bed)?;
    publish_again(bed)
}

fn sleep_held(bed: &mut Bed) -> Result<()> {
    write(&bed.provider_dir("accel0")?.join("pinned_exports"), "1")?;
    let file = open()?;
    let (got, dma_buf) = exported_buffer(file.as_fd(), MIB, abi::P2PMEM_EXPORT_PINNED)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", "p2p")?;
    let mut log = Log::new()?;
    let refused = suspend_briefly();
    ensure!(
        refused.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)),
        "{refused:?}"
    );
    log.wait(&["keeps the machine from sleeping"])?;
    drop((importer, dma_buf));
    until("accel0 is no longer a provider", || Ok(bed.provider("accel0").is_err()))?;
    free(file.as_fd(), got.handle).map_err(errno)?;
    bed.publish("accel0").context("publishing after a refused suspend")?;
    suspend_briefly().context("suspending without the importer")?;
    bed.publish("accel0")?;
    write(&bed.provider_dir("accel0")?.join("pinned_exports"), "0")
}
