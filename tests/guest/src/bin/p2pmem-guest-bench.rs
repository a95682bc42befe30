// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measures in a guest whose clocks count instructions: `p2pmem-guest-bench memory | decisions`. Prints JSON.
//!
//! Every number is of instructions of this program, in user space and in the kernel, without those that reading the clock
//! takes: the cheapest of several, except where it says otherwise.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use p2pmem_guest::cases::{Bed, alloc, command, errno, free, open, read, request, write};
use p2pmem_guest::devices;
use p2pmem_guest::sys::{self, Mapping, Memory};
use p2pmem_sys as abi;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// What one page table maps.
const TABLE: u64 = 2 * MIB;
/// Sizes of buffers.
const SIZES: [u64; 7] = [PAGE, 64 << 10, MIB, 2 * MIB, 16 * MIB, 48 * MIB, 256 * MIB];
/// Live buffers while one more is allocated.
const LIVE: [usize; 3] = [10, 1_000, 100_000];
/// How many more are allocated then.
const MORE: u64 = 64;
/// Numbers of providers and of clients.
const PROVIDERS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const CLIENTS: [usize; 4] = [1, 2, 4, 8];
/// How often small things are measured, and large ones.
const TIMES: usize = 9;
const TIMES_LARGE: usize = 3;
/// How long freed memory may take to be cleared.
const SETTLE: Duration = Duration::from_secs(600);

/// Time of the processor that this program took, which is the number of its instructions.
fn instructions() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// What reading the clock takes.
fn clock() -> u64 {
    (0..100)
        .map(|_| {
            let start = instructions();
            instructions() - start
        })
        .min()
        .unwrap_or(0)
}

/// A stopwatch that does not count itself.
struct Watch {
    clock: u64,
}

impl Watch {
    fn time<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        let start = instructions();
        let done = work();
        let took = instructions() - start;
        (done, took.saturating_sub(self.clock))
    }
}

/// The cheapest.
fn least(counts: &[u64]) -> u64 {
    counts.iter().copied().min().unwrap_or(0)
}

/// Publishes a device with settings.
fn publish(bed: &Bed, name: &str, settings: &[(&str, &str)]) -> Result<()> {
    let device = bed.device(name)?;
    write(&device.sysfs().join("driver_override"), "p2pmem")?;
    let driver = device.sysfs().join("driver");
    if driver.exists() {
        write(&driver.join("unbind"), &device.bdf)?;
    }
    write(std::path::Path::new("/sys/bus/pci/drivers_probe"), &device.bdf)?;
    let dir = bed.provider_dir(name)?;
    fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
    for (setting, value) in settings {
        write(&dir.join(setting), value)?;
    }
    write(&dir.join("enable"), "1").with_context(|| read(&dir.join("status")).unwrap_or_default())
}

/// Waits until all freed memory of a provider is clear.
fn settle(bed: &Bed, name: &str) -> Result<()> {
    let deadline = Instant::now() + SETTLE;
    loop {
        let provider = bed.provider(name)?;
        if provider.scrubbing == 0 && provider.parked == 0 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{name}: {} bytes are still not clear",
            provider.scrubbing
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// Page faults of this program so far.
fn faults() -> Result<u64> {
    let text = fs::read_to_string("/proc/self/stat")?;
    let after = text.rsplit_once(')').context("no name in /proc/self/stat")?.1;
    Ok(after
        .split_whitespace()
        .nth(7)
        .context("no faults in /proc/self/stat")?
        .parse()?)
}

/// Touches what a page table maps once each.
fn touch(mapping: &Mapping) {
    let (address, len) = (mapping.address(), mapping.len() as u64);
    let mut at = 0;
    while at < len {
        mapping.get(at as usize);
        at = (address + at) / TABLE * TABLE + TABLE - address;
    }
}

/// Fails unless all of a mapping is there already.
fn all_mapped(mapping: &Mapping) -> Result<()> {
    let before = faults()?;
    for page in (0..mapping.len()).step_by(PAGE as usize) {
        mapping.get(page);
    }
    let came = faults()? - before;
    // Some of the program's own may come.
    ensure!(came <= 4, "{} bytes were not all mapped: {came} faults", mapping.len());
    Ok(())
}

fn times(size: u64) -> usize {
    if size > 16 * MIB { TIMES_LARGE } else { TIMES }
}

/// What a buffer of a provider costs from its allocation to its end.
fn buffer(watch: &Watch, bed: &Bed, fd: BorrowedFd<'_>, name: &str, size: u64) -> Result<Value> {
    let provider = bed.provider(name)?.id;
    let (mut allocs, mut maps, mut unmaps, mut frees) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..times(size) {
        let mut asked = request(size);
        asked.req.provider = provider;
        let (done, took) = watch.time(|| sys::alloc(fd, &mut asked, Memory::Slice(&mut [])));
        done.map_err(errno)?;
        allocs.push(took);
        let (mapping, took) = watch.time(|| {
            let mapping = Mapping::shared(fd, asked.mmap_offset, size as usize)?;
            touch(&mapping);
            Ok::<_, i32>(mapping)
        });
        let mapping = mapping.map_err(errno)?;
        maps.push(took);
        if round == 0 {
            all_mapped(&mapping)?;
        }
        unmaps.push(watch.time(|| drop(mapping)).1);
        let (done, took) = watch.time(|| free(fd, asked.handle));
        done.map_err(errno)?;
        frees.push(took);
        settle(bed, name)?;
    }
    Ok(json!({ "alloc": least(&allocs), "map": least(&maps), "unmap": least(&unmaps), "free": least(&frees) }))
}

/// What the same costs by the kernel's own file, where allocating is part of mapping and freeing of unmapping.
fn upstream(watch: &Watch, pool: &File, size: u64) -> Result<Value> {
    let (mut maps, mut unmaps) = (Vec::new(), Vec::new());
    for round in 0..times(size) {
        let (mapping, took) = watch.time(|| Mapping::shared(pool.as_fd(), 0, size as usize));
        let mapping = mapping.map_err(errno).context("p2pmem/allocate")?;
        maps.push(took);
        if round == 0 {
            all_mapped(&mapping)?;
        }
        unmaps.push(watch.time(|| drop(mapping)).1);
    }
    Ok(json!({ "map": least(&maps), "unmap": least(&unmaps) }))
}

/// Has all memory of a provider cleared, as it is not when it is published.
fn clear(bed: &Bed, fd: BorrowedFd<'_>, name: &str) -> Result<()> {
    let provider = bed.provider(name)?;
    let mut all = request(provider.size);
    all.req.provider = provider.id;
    sys::alloc(fd, &mut all, Memory::Slice(&mut []))
        .map_err(errno)
        .context("all of it")?;
    free(fd, all.handle).map_err(errno)?;
    settle(bed, name)
}

/// One more allocation while many buffers live: the mean of some that follow each other. What one page takes depends on how
/// many blocks the allocator has to halve for it, and so on the number of free pages: half of a row take no halving, a
/// quarter one, and so on, wherever the row begins.
fn crowd(watch: &Watch, bed: &Bed, fd: BorrowedFd<'_>) -> Result<Value> {
    let mut live = Vec::new();
    let mut rows = Vec::new();
    for count in LIVE {
        while live.len() < count {
            live.push(alloc(fd, PAGE).map_err(errno)?.handle);
        }
        let mut more = Vec::new();
        let mut sum = 0;
        for _ in 0..MORE {
            let (done, took) = watch.time(|| alloc(fd, PAGE));
            more.push(done.map_err(errno)?.handle);
            sum += took;
        }
        for handle in more {
            free(fd, handle).map_err(errno)?;
        }
        rows.push(json!({ "buffers": count, "alloc": sum / MORE }));
    }
    for handle in live {
        free(fd, handle).map_err(errno)?;
    }
    settle(bed, "paged")?;
    Ok(rows.into())
}

fn memory(watch: &Watch, bed: &Bed) -> Result<Value> {
    let reserve = (512 * MIB - PAGE).to_string();
    publish(bed, "paged", &[("kernel_reserve", "0")])?;
    publish(bed, "pageless", &[("kernel_reserve", "0"), ("mode", "pageless")])?;
    let file = open()?;
    let fd = file.as_fd();
    clear(bed, fd, "paged")?;
    clear(bed, fd, "pageless")?;
    // Before there are two providers that buffers near nothing in particular could be in.
    publish(bed, "kernel", &[("kernel_reserve", &reserve)])?;
    let path = bed.device("kernel")?.sysfs().join("p2pmem/allocate");
    let pool = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| path.display().to_string())?;
    let mut rows = Vec::new();
    for size in SIZES {
        rows.push(json!({
            "bytes": size,
            "paged": buffer(watch, bed, fd, "paged", size)?,
            "pageless": buffer(watch, bed, fd, "pageless", size)?,
            "upstream": upstream(watch, &pool, size)?,
        }));
        eprintln!("{size} bytes: done");
    }
    bed.unpublish("kernel")?;
    bed.unpublish("pageless")?;
    let crowd = crowd(watch, bed, fd)?;
    Ok(json!({ "sizes": rows, "live": crowd }))
}

/// What the kernel's own choice costs, and whether it found one.
fn find_many(door: &mut File, clients: &[String]) -> Result<u64> {
    door.write_all(clients.join(" ").as_bytes())
        .context("pci_p2pmem_find_many")?;
    let mut node = OpenOptions::new().read(true).open("/dev/p2pmem-find-many")?;
    let mut text = String::new();
    node.read_to_string(&mut text)?;
    let (took, found) = text.trim().split_once(' ').context("no answer of find_many")?;
    ensure!(found != "none", "the kernel found no provider for {clients:?}");
    Ok(took.parse()?)
}

/// What a decision of ours costs, with all paths in the cache.
fn decision(watch: &Watch, fd: BorrowedFd<'_>, clients: &[abi::p2pmem_pci_addr]) -> Result<u64> {
    let mut counts = Vec::new();
    for round in 0..=TIMES {
        let mut addresses = clients.to_vec();
        let mut explain = abi::p2pmem_explain {
            req: abi::p2pmem_request {
                size: PAGE,
                nr_clients: clients.len() as u32,
                ..Default::default()
            },
            ..Default::default()
        };
        let (done, took) = watch.time(|| {
            sys::explain(
                fd,
                &mut explain,
                Memory::Slice(&mut addresses),
                Memory::Slice(&mut []),
                Memory::Slice(&mut []),
            )
        });
        done.map_err(errno)?;
        ensure!(explain.error == 0 && explain.chosen != 0, "no provider was chosen");
        // The first one fills the cache.
        if round > 0 {
            counts.push(took);
        }
    }
    Ok(least(&counts))
}

fn decisions(watch: &Watch, bed: &Bed) -> Result<Value> {
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
    let timer = std::path::Path::new(&module).with_file_name("p2pmem_find_many.ko");
    command("insmod", &[timer.to_str().context("path")?])?;
    let mut door = OpenOptions::new().write(true).open("/dev/p2pmem-find-many")?;
    let file = open()?;
    let mut rows = Vec::new();
    let mut published = 0;
    for providers in PROVIDERS {
        while published < providers {
            // Half of each for the kernel's own choice to find.
            publish(
                bed,
                &format!("mem{published}"),
                &[("kernel_reserve", &(2 * MIB).to_string())],
            )?;
            published += 1;
        }
        for count in CLIENTS {
            let names: Vec<String> = (0..count).map(|n| format!("client{n}")).collect();
            let mut addresses = Vec::new();
            let mut functions = Vec::new();
            for name in &names {
                addresses.push(bed.address(name)?);
                functions.push(bed.device(name)?.bdf.clone());
            }
            rows.push(json!({
                "providers": providers,
                "clients": count,
                "ours": decision(watch, file.as_fd(), &addresses)?,
                "find_many": find_many(&mut door, &functions)?,
            }));
        }
    }
    Ok(json!({ "decisions": rows }))
}

fn run(what: &str) -> Result<Value> {
    let bed = Bed {
        devices: devices::load()?,
    };
    bed.load_module()?;
    let watch = Watch { clock: clock() };
    match what {
        "memory" => memory(&watch, &bed),
        _ => decisions(&watch, &bed),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let what = match arguments.as_slice() {
        [what] if what == "memory" || what == "decisions" => what,
        _ => {
            eprintln!("usage: p2pmem-guest-bench memory | decisions");
            return ExitCode::from(2);
        }
    };
    match run(what) {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e:#}");
            ExitCode::FAILURE
        }
    }
}
