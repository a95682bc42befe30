// SPDX-License-Identifier: MIT OR Apache-2.0

//! Devices that lose their contents while they stay bound: resets, errors, and the machine's sleep.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use p2pmem_accel_regs::driver::Accel;
use p2pmem_sys as abi;

use super::dmabuf::{GOOD, Importer, exported_buffer};
use super::dmabuf_end::Log;
use super::inflight::until;
use super::life::{Part, await_loss};
use super::pageless::without_pages;
use super::publisher;
use super::{Bed, Case, alloc, buffer, errno, expect, free, open, read, request, write};
use crate::host;
use crate::sys::{self, Mapping, Memory};
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "reset",
        about: "a function that is reset is no provider any more before it is: nobody keeps its memory, and nobody sees what was in it",
        topology: "small",
        ruins: false,
        run: reset,
    },
    Case {
        name: "reset-pageless",
        about: "the same without pages",
        topology: "small",
        ruins: false,
        run: reset_pageless,
    },
    Case {
        name: "reset-and-publish",
        about: "nobody publishes a function while it is being reset",
        topology: "small",
        ruins: false,
        run: reset_and_publish,
    },
    Case {
        name: "enable-count",
        about: "unbinding takes back what binding enabled, so that the next driver's unbinding ends its bus mastering",
        topology: "small",
        ruins: false,
        run: enable_count,
    },
    Case {
        name: "port-error",
        about: "an error that resets what is below a root port takes the provider there back before, and its memory is cleared afterwards",
        topology: "small",
        ruins: true,
        run: port_error,
    },
    Case {
        name: "port-error-held",
        about: "recovery from an error does not wait for an importer that keeps its mapping; publishing does",
        topology: "small",
        ruins: true,
        run: port_error_held,
    },
    Case {
        name: "port-error-neighbor",
        about: "an error after which the driver of another device has all below the port reset takes the provider back, too",
        topology: "small",
        ruins: true,
        run: port_error_neighbor,
    },
    Case {
        name: "sleep",
        about: "before the machine sleeps all providers are taken back, and are there again as before when they are published",
        topology: "demo",
        ruins: false,
        run: sleep,
    },
    Case {
        name: "sleep-held",
        about: "an importer that does not let go keeps the machine from sleeping, by name",
        topology: "small",
        ruins: false,
        run: sleep_held,
    },
];

const MIB: u64 = 1 << 20;
/// The word that is written to buffers.
pub(super) const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

/// A buffer of accel0 with contents, and its owner's file.
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

    /// Checks that the owner has lost the buffer and was notified, and that the status says that nothing is published.
    fn lost(self, bed: &Bed) -> Result<()> {
        self.lost_contents(bed)?;
        let status = read(&bed.provider_dir("accel0")?.join("status"))?;
        ensure!(status.starts_with("not published any more"), "{status}");
        Ok(())
    }

    /// Checks that the owner has lost the buffer and was notified.
    fn lost_contents(self, bed: &Bed) -> Result<()> {
        let fd = self.file.as_fd();
        await_loss(&self.file, self.got.handle, self.provider)?;
        ensure!(bed.provider("accel0").is_err(), "it is a provider still");
        let mut ask = request(4096);
        ask.req.provider = self.provider;
        let answer = sys::alloc(fd, &mut ask, Memory::Slice(&mut []));
        expect("ALLOC without the provider", answer, libc::ENODEV)?;
        free(fd, self.got.handle).map_err(errno)
    }
}

/// Checks the memory that the kernel's own pool of accel0 hands out after the provider was removed: none of the old contents,
/// and no driver that looks for memory finds the pool.
fn pool_is_clear(bed: &Bed) -> Result<()> {
    let pool = bed.device("accel0")?.sysfs().join("p2pmem");
    let published = read(&pool.join("published"))?;
    ensure!(
        published == "0",
        "other drivers are offered what is in the pool: published is {published}"
    );
    no_secret_in_pool(bed)
}

/// Checks that memory of accel0 that the kernel hands out has no [`SECRET`].
pub(super) fn no_secret_in_pool(bed: &Bed) -> Result<()> {
    let pool = bed.device("accel0")?.sysfs().join("p2pmem");
    let available: usize = read(&pool.join("available"))?.parse()?;
    let file = File::options().read(true).write(true).open(pool.join("allocate"))?;
    let map = Mapping::shared(file.as_fd(), 0, available).map_err(errno)?;
    let left = (0..available).step_by(4096).find(|&at| map.get(at) == SECRET);
    ensure!(left.is_none(), "the kernel hands out at {left:?} what was in a buffer");
    ensure!(available as u64 > MIB, "only {available} bytes are in the pool");
    Ok(())
}

/// Publishes accel0 again, and checks that none of the old contents are visible, and that the memory keeps what is written to it: memory
/// that does not answer reads as zeroes here.
fn again(bed: &Bed) -> Result<()> {
    bed.publish("accel0")?;
    let file = open()?;
    let all = bed.provider("accel0")?.largest;
    let got = alloc(file.as_fd(), all).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), got.mmap_offset, all as usize).map_err(errno)?;
    let left = (0..all as usize).step_by(4096).find(|&at| map.get(at) != 0);
    ensure!(left.is_none(), "what was in the memory before is at {left:?}");
    map.set(0, !SECRET);
    ensure!(map.get(0) == !SECRET, "the memory does not answer");
    Ok(())
}

fn reset(bed: &mut Bed) -> Result<()> {
    let device = bed.device("accel0")?;
    // Records of a device in the kernel log have a field with the device's name.
    let field = format!("DEVICE=+pci:{}", device.bdf);
    let sysfs = device.sysfs();
    let methods = read(&sysfs.join("reset_method"))?;
    ensure!(methods == "flr bus", "the accelerator can be reset by {methods:?}");
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
        owned.lost(bed)?;
        survivor.finish()?;
        pool_is_clear(bed)?;
        again(bed)?;
    }
    write(&sysfs.join("reset_method"), &methods)
}

fn reset_pageless(bed: &mut Bed) -> Result<()> {
    without_pages(
        bed,
        &[|bed| {
            let owned = Owned::new(bed)?;
            write(&bed.device("accel0")?.sysfs().join("reset"), "1")?;
            owned.lost(bed)?;
            again(bed)
        }],
    )
}

fn reset_and_publish(bed: &mut Bed) -> Result<()> {
    let dir = bed.provider_dir("accel0")?;
    let sysfs = bed.device("accel0")?.sysfs();
    write(&sysfs.join("reset_method"), "flr")?;
    // The kernel waits 100 ms for a reset, and the publisher may not run meanwhile.
    until("publishing is refused during a reset", || {
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let publisher = scope.spawn(|| -> Result<bool> {
                let mut is_refused = false;
                while !is_over.load(Ordering::SeqCst) {
                    if std::fs::write(dir.join("enable"), "1").is_err() {
                        is_refused |= read(&dir.join("status"))?.contains("is being reset");
                    }
                }
                Ok(is_refused)
            });
            let done = write(&sysfs.join("reset"), "1");
            is_over.store(true, Ordering::SeqCst);
            let is_refused = publisher.join().map_err(|_| anyhow!("a thread panicked"))?;
            done.and(is_refused)
        })
    })?;
    write(&sysfs.join("reset_method"), "flr bus")?;
    again(bed)
}

fn enable_count(bed: &mut Bed) -> Result<()> {
    let device = bed.device("accel0")?;
    let enabled = device.sysfs().join("enable");
    for _ in 0..3 {
        let accel = Accel::open(&device.bdf)?;
        accel.enable_dma()?;
        bed.unpublish("accel0")?;
        ensure!(read(&enabled)? == "0", "it is enabled {} times", read(&enabled)?);
        ensure!(!accel.dma_enabled()?, "no driver is bound, and the function can do DMA");
        bed.publish("accel0")?;
        ensure!(read(&enabled)? == "1", "it is enabled {} times", read(&enabled)?);
    }
    Ok(())
}

/// Has the kernel find accel0 again with its memory disabled, as a device is that is plugged in. The kernel then saves this state.
fn plugged_in(bed: &Bed) -> Result<()> {
    const COMMAND: u64 = 4;
    let sysfs = bed.device("accel0")?.sysfs();
    bed.unpublish("accel0")?;
    let config = File::options().write(true).open(sysfs.join("config"))?;
    config.write_all_at(&[0, 0], COMMAND)?;
    write(&sysfs.join("remove"), "1")?;
    write(Path::new("/sys/bus/pci/rescan"), "1")?;
    bed.publish("accel0")
}

/// As [`again`], when the removal of the former provider and the recovery from the error have both ended.
fn again_after_error(bed: &Bed) -> Result<()> {
    until("the memory can be published", || Ok(bed.publish("accel0").is_ok()))?;
    again(bed)
}

/// Has the root port report an error, of QEMU's name.
fn error_at_port(error: &str) -> Result<()> {
    host::request(&Request::PortError {
        name: "rp0".into(),
        error: error.into(),
    })?;
    Ok(())
}

fn port_error_held(bed: &mut Bed) -> Result<()> {
    let owned = Owned::new(bed)?;
    let (_, dma_buf) = exported_buffer(owned.file.as_fd(), MIB, 0)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", "p2p notify hold")?;
    let (mut waits, mut recovers) = (Log::new()?, Log::new()?);
    error_at_port("MALF_TLP")?;
    // The kernel holds the lock of the bus while it asks drivers.
    recovers.wait(&["AER", "device recovery successful"])?;
    waits.wait(&["waiting for", "to let go of dma-buf"])?;
    ensure!(importer.state()?.get("mapped") == 1);
    let state = bed.provider("accel0")?.state;
    ensure!(state != abi::P2PMEM_PROVIDER_LIVE, "the provider's state is {state}");
    importer.say("unmap").map_err(errno)?;
    until("the function is no provider", || Ok(bed.provider("accel0").is_err()))?;
    owned.lost_contents(bed)?;
    again_after_error(bed)
}

fn port_error_neighbor(bed: &mut Bed) -> Result<()> {
    let owned = Owned::new(bed)?;
    // This driver wants a reset after every error.
    publisher::bind(bed, "nvme0")?;
    let (mut log, mut recovers) = (Log::new()?, Log::new()?);
    // Not fatal: p2pmem's memory is intact until the reset.
    error_at_port("COMP_TIME")?;
    log.wait(&[
        "removing the provider",
        "the device was reset with others below its port",
    ])?;
    recovers.wait(&["AER", "device recovery successful"])?;
    until("the function is no provider", || Ok(bed.provider("accel0").is_err()))?;
    owned.lost(bed)?;
    pool_is_clear(bed)?;
    again_after_error(bed)
}

fn port_error(bed: &mut Bed) -> Result<()> {
    for was_plugged_in in [false, true] {
        if was_plugged_in {
            plugged_in(bed)?;
        }
        let owned = Owned::new(bed)?;
        let (mut log, mut recovers) = (Log::new()?, Log::new()?);
        error_at_port("MALF_TLP")?;
        log.wait(&[
            "removing the provider",
            "the device reported an error and is being reset",
        ])?;
        until("the function is no provider", || Ok(bed.provider("accel0").is_err()))?;
        owned.lost(bed)?;
        recovers.wait(&["AER", "device recovery successful"])?;
        pool_is_clear(bed)?;
        again_after_error(bed)?;
    }
    Ok(())
}

/// Puts the machine to sleep for as long as freezing all programs takes. Returns the kernel's error, if any.
pub(super) fn sleep_for_a_moment() -> std::io::Result<()> {
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
    ensure!(!before.is_empty(), "there is no adopted provider");
    let owned = Owned::new(bed)?;
    let mut log = Log::new()?;
    sleep_for_a_moment()?;
    log.wait(&["removing the provider: the machine is about to sleep"])?;
    // Drivers' own pools are adopted again automatically.
    ensure!(adopted()? == before, "{:?} were {before:?}", adopted()?);
    owned.lost(bed)?;
    again(bed)
}

fn sleep_held(bed: &mut Bed) -> Result<()> {
    write(&bed.provider_dir("accel0")?.join("pinned_exports"), "1")?;
    let file = open()?;
    let (got, dma_buf) = exported_buffer(file.as_fd(), MIB, abi::P2PMEM_EXPORT_PINNED)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", "p2p")?;
    let other = alloc(file.as_fd(), MIB).map_err(errno)?;
    let mut log = Log::new()?;
    let refused = sleep_for_a_moment();
    ensure!(
        refused.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)),
        "{refused:?}"
    );
    log.wait(&["keeps the machine from sleeping: a device does not release buffer"])?;
    // Nobody has lost a buffer for a sleep that did not come.
    for handle in [got.handle, other.handle] {
        ensure!(buffer(file.as_fd(), handle).map_err(errno)?.state == abi::P2PMEM_BUFFER_LIVE);
    }
    drop((importer, dma_buf));
    sleep_for_a_moment().context("when it has let go")?;
    drop(file);
    bed.publish("accel0")?;
    write(&bed.provider_dir("accel0")?.join("pinned_exports"), "0")
}
