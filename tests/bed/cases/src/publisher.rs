// SPDX-License-Identifier: MIT OR Apache-2.0

//! Kernel drivers that publish memory of their devices through p2pmem's exported functions. The driver is
//! tests/kernel/publisher, its device accel0.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::busy::{Busy, at_once, contended};
use super::dmabuf::{GOOD, Importer, exported_buffer};
use super::dmabuf_end::Log;
use super::inflight::until;
use super::life::{Part, ended_within};
use super::reset::sleep_for_a_moment;
use super::{Bed, Case, alloc, buffer, command, errno, expect, open, read, write};
use crate::sys::{self, Mapping};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "publisher",
        about: "a driver publishes its device's memory, takes it back while it is in use, and publishes it again",
        topology: "small",
        ruins: false,
        run: publisher,
    },
    Case {
        name: "publisher-pageless",
        about: "a driver publishes memory without struct pages, and its device is unbound while it is in use",
        topology: "small",
        ruins: false,
        run: pageless,
    },
    Case {
        name: "publisher-bad",
        about: "what a driver cannot publish is refused, and the log says why",
        topology: "small",
        ruins: false,
        run: bad,
    },
    Case {
        name: "publisher-rmmod",
        about: "the publishing driver and p2pmem are unloaded in either order, with buffers in use",
        topology: "small",
        ruins: false,
        run: rmmod,
    },
    Case {
        name: "publisher-notified-late",
        about: "unregistering while the device is unbound does not return before the driver was notified",
        topology: "small",
        ruins: false,
        run: told_late,
    },
    Case {
        name: "publisher-race",
        about: "a driver takes its memory back while programs allocate from it and its device is unbound",
        topology: "small",
        ruins: false,
        run: race,
    },
];

const MIB: u64 = 1 << 20;
const MODULE: &str = "p2pmem_publisher";

/// accel0, bound to the driver that publishes.
pub(super) struct Publisher<'a> {
    bed: &'a Bed,
    sysfs: PathBuf,
}

impl<'a> Publisher<'a> {
    pub(super) fn new(bed: &'a Bed) -> Result<Publisher<'a>> {
        Publisher::with_pool(bed, &[])
    }

    /// As [`Publisher::new`], with `bars` of the device in the kernel's pool.
    pub(super) fn with_pool(bed: &'a Bed, bars: &[u32]) -> Result<Publisher<'a>> {
        bed.unpublish("accel0")?;
        load()?;
        if !bars.is_empty() {
            let parameter = Path::new("/sys/module").join(MODULE).join("parameters/pool");
            let bars: Vec<String> = bars.iter().map(u32::to_string).collect();
            write(&parameter, &bars.join(","))?;
        }
        bind(bed, "accel0")?;
        let device = bed.device("accel0")?;
        Ok(Publisher {
            bed,
            sysfs: device.sysfs(),
        })
    }

    pub(super) fn bind(&self) -> Result<()> {
        bind(self.bed, "accel0")
    }

    /// Publishes `BAR OFFSET SIZE RESERVE HOW`.
    pub(super) fn publish(&self, what: &str) -> Result<(), i32> {
        fs::write(self.sysfs.join("publish"), what).map_err(|e| e.raw_os_error().unwrap_or(0))
    }

    /// Unregisters the provider. Returns how long that took.
    pub(super) fn withdraw(&self) -> Result<Duration> {
        let start = Instant::now();
        self.publish("off").map_err(errno)?;
        Ok(start.elapsed())
    }

    /// Returns the provider's id, 0 for none.
    pub(super) fn id(&self) -> Result<u32> {
        Ok(read(&self.sysfs.join("publish"))?.parse()?)
    }

    /// Returns how often the module notified the driver that the memory is the driver's again.
    pub(super) fn notified(&self) -> Result<u32> {
        Ok(read(&self.sysfs.join("revoked"))?.parse()?)
    }

    /// Binds the device to p2pmem again, and unloads the driver, which keeps p2pmem loaded.
    pub(super) fn end(self) -> Result<()> {
        self.bed.unbind("accel0")?;
        write(&self.sysfs.join("driver_override"), "p2pmem")?;
        command("rmmod", &[MODULE])?;
        self.bed.publish("accel0")
    }
}

/// Binds a device to the driver, which wants a reset after every error.
pub(super) fn bind(bed: &Bed, name: &str) -> Result<()> {
    load()?;
    bed.unbind(name)?;
    let sysfs = bed.device(name)?.sysfs();
    write(&sysfs.join("driver_override"), "p2pmem-publisher")?;
    write(Path::new("/sys/bus/pci/drivers_probe"), &bed.device(name)?.bdf)?;
    ensure!(sysfs.join("publish").exists(), "{name} was not bound");
    Ok(())
}

fn loaded() -> bool {
    Path::new("/sys/module").join(MODULE).exists()
}

fn load() -> Result<()> {
    if loaded() {
        return Ok(());
    }
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
    let module = Path::new(&module).with_file_name(format!("{MODULE}.ko"));
    command("insmod", &[module.to_str().context("path")?])
}

/// A buffer that is mapped and imported, and the checks after its provider was removed.
struct Used {
    file: fs::File,
    alloc: abi::p2pmem_alloc,
    map: Mapping,
    importer: Importer,
}

impl Used {
    fn new(bed: &Bed) -> Result<Used> {
        let file = open()?;
        let (alloc, dma_buf) = exported_buffer(file.as_fd(), 4 * MIB, 0)?;
        let map = Mapping::shared(file.as_fd(), alloc.mmap_offset, alloc.size as usize).map_err(errno)?;
        for at in (0..map.len()).step_by(4096) {
            ensure!(map.get(at) == 0, "byte {at:#x} is another's");
            map.set(at, at as u64 ^ 0x5a);
        }
        let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
        Ok(Used {
            file,
            alloc,
            map,
            importer,
        })
    }

    fn works(&self) -> Result<()> {
        for at in (0..self.map.len()).step_by(4096) {
            ensure!(self.map.get(at) == at as u64 ^ 0x5a);
        }
        ensure!(self.importer.state()?.get("mapped") == 1);
        Ok(())
    }

    fn is_gone(&self) -> Result<()> {
        let b = buffer(self.file.as_fd(), self.alloc.handle).map_err(errno)?;
        ensure!(b.state == abi::P2PMEM_BUFFER_GONE, "{b:?}");
        ensure!(self.importer.state()?.get("mapped") == 0);
        sys::survive_bus_errors()?;
        let errors = sys::bus_errors();
        self.map.get(0);
        ensure!(sys::bus_errors() == errors + 1, "a mapping outlives the registration");
        Ok(())
    }
}

fn publisher(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    ensure!(publisher.id()? == 0 && publisher.notified()? == 0);
    for round in 1..=3 {
        publisher.publish(&format!("-1 0 0 {} paged", 2 * MIB)).map_err(errno)?;
        let row = bed.provider("accel0")?;
        ensure!(
            row.id == publisher.id()?
                && row.kind == abi::P2PMEM_KIND_REGISTERED
                && row.size == 62 * MIB
                && row.kernel_reserve == 2 * MIB
                && row.flags & abi::P2PMEM_PROVIDER_EXPORTABLE != 0,
            "{row:?}"
        );
        // Devices and O_DIRECT reach the memory as that of any other provider.
        let used = Used::new(bed)?;
        ensure!(used.alloc.provider == row.id);
        let drive = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(bed.block("nvme0")?)?;
        let direct = alloc(used.file.as_fd(), 64 << 10).map_err(errno)?;
        let map = Mapping::shared(used.file.as_fd(), direct.mmap_offset, 64 << 10).map_err(errno)?;
        ensure!(map.fill_from(&drive, 0, 0, 64 << 10)? == 64 << 10);
        used.works()?;
        expect("a second time", publisher.publish("-1 0 0 0 paged"), libc::EEXIST)?;
        // Another process has a part of the memory too.
        let other = Part::start("survive", &["1048576"])?;
        let took = publisher.withdraw()?;
        ended_within("unregistering", took)?;
        ensure!(publisher.notified()? == round, "{} times", publisher.notified()?);
        ensure!(publisher.id()? == 0 && bed.provider("accel0").is_err());
        other.finish()?;
        used.is_gone()?;
        expect("ALLOC without a provider", alloc(used.file.as_fd(), 4096), libc::ENODEV)?;
        // Unregistering without a provider does nothing.
        publisher.withdraw()?;
        // Memory with struct pages keeps them until the driver is unbound.
        expect("another range", publisher.publish("-1 0 2097152 0 paged"), libc::EBUSY)?;
        expect("without pages", publisher.publish("-1 0 0 0 pageless"), libc::EBUSY)?;
    }
    // The driver's pool is still published, with its reserve. p2pmem looks for memory to adopt after the machine's sleep.
    sleep_for_a_moment()?;
    ensure!(
        bed.provider("accel0").is_err(),
        "memory was adopted that its driver had registered and taken back"
    );
    // The driver is unbound with its memory in use: it is notified before its own remove() is called.
    publisher.publish("-1 0 0 0 paged").map_err(errno)?;
    let used = Used::new(bed)?;
    let mut log = Log::new()?;
    let start = Instant::now();
    bed.unbind("accel0")?;
    ended_within("unbinding", start.elapsed())?;
    log.wait(&["p2pmem-publisher", "removed, revoked 4 times"])?;
    used.is_gone()?;
    // Another binding, another range.
    publisher.bind()?;
    let (start, size) = (2 * MIB, 8 * MIB);
    publisher
        .publish(&format!("-1 {start} {size} 0 paged"))
        .map_err(errno)?;
    let row = bed.provider("accel0")?;
    ensure!(row.size == size && row.bar_offset == start, "{row:?}");
    let used = Used::new(bed)?;
    used.works()?;
    ensure!((start..start + size).contains(&used.alloc.bar_offset));
    drop(used);
    publisher.end()
}

fn pageless(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    for how in ["off", "unbind"] {
        publisher.publish("-1 0 0 0 pageless").map_err(errno)?;
        let row = bed.provider("accel0")?;
        ensure!(
            row.kind == abi::P2PMEM_KIND_REGISTERED
                && row.flags & abi::P2PMEM_PROVIDER_PAGELESS != 0
                && row.size == 64 * MIB,
            "{row:?}"
        );
        let used = Used::new(bed)?;
        used.works()?;
        let start = Instant::now();
        match how {
            "off" => publisher.withdraw().map(drop)?,
            _ => bed.unbind("accel0")?,
        }
        ended_within(how, start.elapsed())?;
        used.is_gone()?;
    }
    // An importer that does not unmap holds up the driver, and the log names the importer.
    publisher.bind()?;
    publisher.publish("-1 0 0 0 pageless").map_err(errno)?;
    let file = open()?;
    let (_, dma_buf) = exported_buffer(file.as_fd(), MIB, 0)?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", "p2p notify hold")?;
    let mut log = Log::new()?;
    thread::scope(|scope| {
        let off = scope.spawn(|| publisher.withdraw());
        let line = log.wait(&["waiting for", "to let go of dma-buf"]);
        let notified = publisher.notified();
        let waits = !off.is_finished();
        importer.say("unmap").map_err(errno)?;
        off.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        ensure!(
            waits && notified? == 0,
            "the driver has its memory back while a device has it mapped"
        );
        line.map(drop)
    })?;
    ensure!(publisher.notified()? == 1);
    drop((file, dma_buf, importer));
    publisher.end()
}

fn bad(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    let mut log = Log::new()?;
    for (what, code, words) in [
        ("-1 0 0 0 nonsense", libc::EINVAL, "unknown flags"),
        ("-2 0 0 0 paged", libc::EINVAL, "is no BAR"),
        ("5 0 0 0 paged", libc::EINVAL, "has no memory BAR 5"),
        ("9 0 0 0 paged", libc::EINVAL, "has no memory BAR 9"),
        ("-1 0 100 0 paged", libc::EINVAL, "are not whole pages"),
        ("-1 4096 67108864 0 paged", libc::EINVAL, "do not fit into BAR"),
        ("-1 67108864 0 0 paged", libc::EINVAL, "do not fit into BAR"),
        ("-1 4096 2097152 0 paged", libc::EINVAL, "for pieces of 2097152 bytes"),
        ("-1 0 1048576 0 paged", libc::EINVAL, "for pieces of 2097152 bytes"),
        ("-1 0 0 67108864 paged", libc::EINVAL, "a kernel_reserve of"),
        ("-1 0 0 4096 pageless", libc::EINVAL, "without pages"),
    ] {
        // The log takes ten such lines in five seconds: a line that was dropped is tried again.
        until(&format!("the log says why {what:?} is refused"), || {
            expect(what, publisher.publish(what), code)?;
            Ok(!log.lines(&["registration of a provider refused", words]).is_empty())
        })?;
        ensure!(publisher.id()? == 0 && bed.provider("accel0").is_err(), "{what}");
    }
    ensure!(
        publisher.notified()? == 0,
        "the driver was notified of the end of memory that it never published"
    );
    // After all that the memory can still be published.
    publisher.publish("-1 0 0 0 pinned").map_err(errno)?;
    let row = bed.provider("accel0")?;
    ensure!(row.flags & abi::P2PMEM_PROVIDER_PINNED_EXPORTS != 0, "{row:?}");
    drop(Used::new(bed)?);
    publisher.end()
}

fn rmmod(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    publisher.publish("-1 0 0 0 paged").map_err(errno)?;
    let used = Used::new(bed)?;
    // p2pmem first: the driver uses it, whether or not programs have files open. Nothing is lost.
    ensure!(
        command("rmmod", &["p2pmem"]).is_err(),
        "rmmod succeeded with a driver that uses it"
    );
    used.works()?;
    // The driver first: its memory is revoked for all holders.
    let start = Instant::now();
    command("rmmod", &[MODULE])?;
    ended_within("rmmod", start.elapsed())?;
    ensure!(!loaded());
    used.is_gone()?;
    drop(used);
    let sysfs = bed.device("accel0")?.sysfs();
    ensure!(!sysfs.join("driver").exists());
    // Now p2pmem, and both again.
    command("rmmod", &["p2pmem_importer"])?;
    command("rmmod", &["p2pmem"])?;
    ensure!(load().is_err(), "the driver was loaded without p2pmem");
    bed.load_module()?;
    load()?;
    if !sysfs.join("publish").exists() {
        publisher.bind()?;
    }
    publisher.publish("-1 0 0 0 pageless").map_err(errno)?;
    // With no file open, only the driver keeps p2pmem loaded.
    ensure!(
        command("rmmod", &["p2pmem"]).is_err(),
        "rmmod succeeded with a driver that uses it"
    );
    Used::new(bed)?.works()?;
    publisher.end()
}

/// The driver's callback takes time, during an unbinding. A caller that unregisters meanwhile has to wait for the callback,
/// because the driver frees what the callback uses.
fn told_late(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    publisher.publish("-1 0 0 0 paged").map_err(errno)?;
    let hold = publisher.sysfs.join("hold");
    write(&hold, "1")?;
    thread::scope(|scope| -> Result<()> {
        let unbound = scope.spawn(|| bed.unbind("accel0"));
        until("the driver is being notified", || Ok(read(&hold)? == "1 0"))?;
        let off = scope.spawn(|| publisher.publish("off"));
        // Time for a wrong result to show; a right one comes after the callback only.
        let deadline = Instant::now() + Duration::from_millis(300);
        while !off.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let seen = read(&hold)?;
        let early = off.is_finished();
        write(&hold, "0")?;
        let off = off.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        unbound.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        ensure!(
            seen == "1 0" && !early,
            "unregistering returned while the driver was being notified: {seen}"
        );
        off.map_err(errno)
    })?;
    publisher.bind()?;
    publisher.end()
}

fn race(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    sys::survive_bus_errors()?;
    let user = |busy: &Busy| -> Result<()> {
        let file = open()?;
        while busy.goes_on() {
            match alloc(file.as_fd(), MIB) {
                Ok(a) => {
                    if let Ok(map) = Mapping::shared(file.as_fd(), a.mmap_offset, MIB as usize) {
                        map.set(0, 1);
                    }
                    super::free(file.as_fd(), a.handle).map_err(errno)?;
                    busy.serve();
                }
                Err(code) => ensure!(code == libc::ENODEV, "ALLOC: {}", errno(code)),
            }
        }
        Ok(())
    };
    Busy::during(&[&user, &user], |busy| {
        let mut ways = ["paged", "pageless"].into_iter().cycle();
        contended(10, || {
            // Two rounds for each binding: memory with struct pages keeps them until it is unbound.
            let how = ways.next().context("no method is left")?;
            let publish = || -> Result<()> {
                publisher.publish(&format!("-1 0 0 0 {how}")).map_err(errno)?;
                busy.await_served(10)
            };
            publish()?;
            publisher.withdraw()?;
            ensure!(publisher.notified()? == 1, "{} times", publisher.notified()?);
            publish()?;
            // Unregistered and unbound at the same time: the provider ends once. The attribute may already be gone, which is no race.
            let (off, unbound, met) = at_once(|| publisher.publish("off"), || bed.unbind("accel0"))?;
            unbound?;
            publisher.bind()?;
            Ok(met && off.is_ok())
        })
    })?;
    publisher.end()
}
