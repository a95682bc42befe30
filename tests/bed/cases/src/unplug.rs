// SPDX-License-Identifier: MIT OR Apache-2.0

//! Devices that are unplugged while in use: a provider, and a drive that reads into another device's memory.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use anyhow::{Result, ensure};
use p2pmem::{Access, Buffer, Registration};
use p2pmem_sys as abi;

use super::dmabuf::{GOOD, Importer, exported_buffer};
use super::inflight::until;
use super::life::{Fio, Part, await_loss};
use super::rdma_user::{Wire, compare, pattern};
use super::share::import;
use super::{Bed, Case, alloc, errno, free, open, providers};
use crate::limits::rounds;
use crate::sys::{self, Mapping};
use crate::wire::Request;
use crate::{devices, host};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "unplug",
        about: "memory is unplugged while fio reads into it and others map, import, share and register it: it is taken back from all of them, nothing else changes, and it comes back whole",
        topology: "unplug",
        ruins: false,
        run: unplug,
    },
    Case {
        name: "unplug-drive",
        about: "a drive is unplugged while it reads into an accelerator's memory: what it read is right, it changes nothing else, and the memory comes back",
        topology: "unplug",
        ruins: false,
        run: unplug_drive,
    },
];

const MIB: usize = 1 << 20;
/// The number of times that each device is unplugged.
const ROUNDS: u32 = 2;
/// The word in memory and on drives.
const SURVIVOR: u64 = 1;
const DRIVE: u64 = 2;

/// All free memory of accel0, with contents that have to stay.
struct Survivor {
    _file: File,
    map: Mapping,
}

impl Survivor {
    /// Allocates all free memory except `but` bytes.
    fn new(bed: &Bed, but: usize) -> Result<Self> {
        let file = open()?;
        let size = bed.provider("accel0")?.largest as usize - but;
        let got = alloc(file.as_fd(), size as u64).map_err(errno)?;
        let map = Mapping::shared(file.as_fd(), got.mmap_offset, size).map_err(errno)?;
        for (at, word) in pattern(SURVIVOR, size).into_iter().enumerate() {
            map.set(8 * at, word);
        }
        Ok(Self { _file: file, map })
    }

    fn check(&self) -> Result<()> {
        compare(&words(&self.map), &pattern(SURVIVOR, self.map.len()))
    }
}

fn words(map: &Mapping) -> Vec<u64> {
    (0..map.len()).step_by(8).map(|at| map.get(at)).collect()
}

/// Holders of memory of shm0, one of each kind.
struct Users {
    file: File,
    handle: u32,
    _map: Mapping,
    _importer: Importer,
    other: File,
    shared: u32,
    registered: Vec<(Buffer, Registration)>,
}

impl Users {
    fn new(bed: &Bed, wire: &Wire) -> Result<Self> {
        let file = open()?;
        let (got, dma_buf) = exported_buffer(file.as_fd(), MIB as u64, 0)?;
        let map = Mapping::shared(file.as_fd(), got.mmap_offset, MIB).map_err(errno)?;
        map.set(0, 1);
        let other = open()?;
        let shared = import(other.as_fd(), dma_buf.as_raw_fd()).map_err(errno)?.handle;
        let registered = (0..4)
            .map(|_| {
                let buffer = wire.alloc(bed, "shm0", MIB)?;
                let registration = buffer.register(&wire.pd, Access::ALL)?;
                Ok((buffer, registration))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            file,
            handle: got.handle,
            _map: map,
            _importer: Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?,
            other,
            shared,
            registered,
        })
    }

    /// Checks that all holders were notified of the end, and releases what they hold.
    fn have_lost_it(self, provider: u32) -> Result<()> {
        for (file, handle) in [(&self.file, self.handle), (&self.other, self.shared)] {
            await_loss(file, handle, provider)?;
            free(file.as_fd(), handle).map_err(errno)?;
        }
        // Registrations of removed memory end like any other.
        for (_buffer, registration) in self.registered {
            drop(registration);
        }
        Ok(())
    }
}

fn unplug(bed: &mut Bed) -> Result<()> {
    let name = || "shm0".to_owned();
    let rounds = rounds(ROUNDS);
    // The other provider is full, so every further allocation gets memory of shm0.
    let survivor = Survivor::new(bed, 0)?;
    let wire = Wire::new(bed)?;
    let sysfs = bed.device("shm0")?.sysfs();
    let mut whole = None;
    for round in 0..rounds {
        bed.publish("shm0")?;
        let provider = bed.provider("shm0")?;
        let free = provider.free;
        ensure!(
            provider.buffers == 0 && *whole.get_or_insert(free) == free,
            "round {round}: {provider:?}"
        );
        let users = Users::new(bed, &wire)?;
        let survive = Part::start("survive", &["1048576"])?;
        let fio = Fio::reading_into(bed, "shm0")?;
        let before = bed.provider("shm0")?;
        ensure!(before.buffers >= 7 && before.exports >= 5, "{before:?}");
        host::request(&Request::DeviceDel { name: name() })?;
        ensure!(!sysfs.exists(), "it is there still");
        fio.has_failed()?;
        survive.finish()?;
        users.have_lost_it(provider.id)?;
        survivor.check()?;
        let left = providers(open()?.as_fd())?;
        ensure!(
            left.len() == 1 && left[0].buffers == 1 && left[0].exports == 0,
            "round {round}: {left:?}"
        );
        let mut info = abi::p2pmem_info::default();
        sys::plain(open()?.as_fd(), abi::P2PMEM_IOC_INFO, &mut info).map_err(errno)?;
        ensure!(info.buffers == 1, "round {round}: {info:?}");
        host::request(&Request::DeviceAdd { name: name() })?;
        // The kernel adds the device before drivers bind to it.
        until("it can be published again", || {
            Ok(sysfs.exists() && bed.publish("shm0").is_ok())
        })?;
    }
    let back = bed.provider("shm0")?;
    ensure!(Some(back.free) == whole && back.buffers == 0, "{back:?}");
    bed.unpublish("shm0")?;
    println!("hardening-report: {{\"unplug_rounds\": {rounds}}}");
    Ok(())
}

/// Opens the drive with O_DIRECT.
fn drive(bed: &Bed) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    Ok(options.open(bed.block("nvme0")?)?)
}

/// Copies the checked part of the drive to or from a mapping.
fn whole(map: &Mapping, mut step: impl FnMut(usize) -> std::io::Result<usize>) -> Result<()> {
    for at in (0..map.len()).step_by(MIB) {
        let n = step(at)?;
        ensure!(n == MIB, "{n} of {MIB} bytes at {at}");
    }
    Ok(())
}

fn unplug_drive(bed: &mut Bed) -> Result<()> {
    const LEN: usize = 8 * MIB;
    const READERS: usize = 4;
    let name = || "nvme0".to_owned();
    let rounds = rounds(ROUNDS);
    let sysfs = bed.device("nvme0")?.sysfs();
    let survivor = Survivor::new(bed, 4 * LEN)?;
    let file = open()?;
    let map = |size: usize| -> Result<(u32, Mapping)> {
        let got = alloc(file.as_fd(), size as u64).map_err(errno)?;
        let map = Mapping::shared(file.as_fd(), got.mmap_offset, size).map_err(errno)?;
        Ok((got.handle, map))
    };
    let (handle, all) = map(LEN)?;
    let wanted = pattern(DRIVE, LEN);
    for (at, word) in wanted.iter().enumerate() {
        all.set(8 * at, *word);
    }
    let to = drive(bed)?;
    whole(&all, |at| all.drain_to(&to, at as u64, at, MIB))?;
    drop(to);
    for round in 0..rounds {
        let from = drive(bed)?;
        let reads: Vec<AtomicU32> = (0..READERS).map(|_| AtomicU32::new(0)).collect();
        thread::scope(|scope| -> Result<()> {
            let readers: Vec<_> = reads
                .iter()
                .enumerate()
                .map(|(number, reads)| {
                    let (from, wanted, map, file) = (&from, &wanted, &map, &file);
                    scope.spawn(move || -> Result<i32> {
                        let (handle, map) = map(MIB)?;
                        let mut at = number * MIB;
                        let ended = loop {
                            match map.fill_from(from, at as u64, 0, MIB) {
                                Ok(MIB) => compare(&words(&map), &wanted[at / 8..][..MIB / 8])?,
                                Ok(_) => break 0,
                                Err(e) => break e.raw_os_error().unwrap_or(0),
                            }
                            reads.fetch_add(1, Ordering::SeqCst);
                            at = (at + READERS * MIB) % LEN;
                        };
                        drop(map);
                        free(file.as_fd(), handle).map_err(errno)?;
                        Ok(ended)
                    })
                })
                .collect();
            until("all read", || {
                Ok(reads.iter().all(|reads| reads.load(Ordering::SeqCst) > 0))
            })?;
            host::request(&Request::DeviceDel { name: name() })?;
            for reader in readers {
                let ended = reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
                ensure!(
                    [0, libc::EIO, libc::ENXIO, libc::ENODEV].contains(&ended),
                    "round {round}: a read from an unplugged drive ended with {}",
                    errno(ended)
                );
            }
            Ok(())
        })?;
        // While the drive's old device node is open, the next drive gets another name.
        drop(from);
        ensure!(!sysfs.exists(), "it is there still");
        survivor.check()?;
        compare(&words(&all), &wanted)?;
        host::request(&Request::DeviceAdd { name: name() })?;
        until("it is back", || {
            Ok(sysfs.exists() && {
                bed.devices = devices::refresh()?;
                drive(bed).is_ok()
            })
        })?;
        // The drive's contents are unchanged.
        let from = drive(bed)?;
        let (handle, found) = map(LEN)?;
        whole(&found, |at| found.fill_from(&from, at as u64, at, MIB))?;
        compare(&words(&found), &wanted)?;
        drop(found);
        free(file.as_fd(), handle).map_err(errno)?;
    }
    drop(all);
    free(file.as_fd(), handle).map_err(errno)?;
    println!("hardening-report: {{\"unplug_rounds\": {rounds}}}");
    Ok(())
}
