// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measures in a guest whose clocks count instructions: `p2pmem-guest-bench memory | memory-short | decisions | removal`. Prints
//! JSON. `memory-short` measures buffers of 48 MiB only.
//!
//! Every number counts instructions of this program, in user space and in the kernel, without those of reading the clock. It
//! is the lowest of several measurements, except where stated otherwise.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_cases::{Bed, alloc, command, errno, free, is_clearing, open, read, request, write};
use p2pmem_guest::devices;
use p2pmem_guest::sys::{self, Mapping, Memory};
use p2pmem_sys as abi;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde_json::{Value, json};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Bytes that one page table maps.
const TABLE: u64 = 2 * MIB;
/// Sizes of buffers.
const SIZES: [u64; 7] = [PAGE, 64 << 10, MIB, 2 * MIB, 16 * MIB, 48 * MIB, 256 * MIB];
/// The only size of the short form.
const SIZES_SHORT: [u64; 1] = [END_TO_END];
/// Size of the buffers that are measured from their allocation to their clearing.
const END_TO_END: u64 = 48 * MIB;
/// Numbers of live buffers during one more allocation.
const LIVE: [usize; 3] = [10, 1_000, 100_000];
/// The number of further allocations then.
const MORE: u64 = 64;
/// Open files that share the buffers of random sizes.
const FILES: usize = 1_000;
/// Buffers of random sizes that are allocated first and freed again, beyond those that stay: they make the holes.
const SURPLUS: usize = 20_000;
/// Buffers of a page that are revoked at once.
const REVOKED: usize = 50_000;
/// Maximum size of a buffer of random size, in pages.
const MOST_PAGES: u64 = 3;
/// Rules in force for the row with many rules.
const RULES: usize = 30;
/// Folder of the administrator's rules.
const RULE_FOLDER: &str = "/sys/kernel/config/p2pmem/rules";
/// Numbers of lists of clients that alternate: fewer than the module caches, and more.
const LISTS: [usize; 2] = [8, 40];
/// Number of lists in one call of the module that times the kernel's own choice.
const MOST_LISTS: usize = 32;
/// The number of further allocations among buffers of random sizes.
const MORE_RANDOM: usize = 256;
/// Numbers of providers and of clients.
const PROVIDERS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const CLIENTS: [usize; 4] = [1, 2, 4, 8];
/// Numbers of threads that allocate and free at once, each with its own file, and of the pairs of all threads together.
const THREADS: [u64; 2] = [1, 16];
const PAIRS: u64 = 4096;
/// The number of measurements of short operations, and of long ones.
const TIMES: usize = 9;
const TIMES_LARGE: usize = 3;
/// The time limit for clearing freed memory.
const SETTLE: Duration = Duration::from_secs(600);

/// Returns this program's processor time, which is its number of instructions.
fn instructions() -> u64 {
    nanoseconds(clock_gettime(ClockId::ProcessCPUTime))
}

fn nanoseconds(time: Timespec) -> u64 {
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// Returns the instructions of reading the clock.
fn clock() -> u64 {
    (0..100)
        .map(|_| {
            let start = instructions();
            instructions() - start
        })
        .min()
        .unwrap_or(0)
}

/// A stopwatch that does not count its own instructions.
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

/// Returns the lowest number.
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
    write(Path::new("/sys/bus/pci/drivers_probe"), &device.bdf)?;
    let dir = bed.provider_dir(name)?;
    fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
    for (setting, value) in settings {
        write(&dir.join(setting), value)?;
    }
    write(&dir.join("enable"), "1").with_context(|| read(&dir.join("status")).unwrap_or_default())
}

/// Waits until all freed memory of a provider is cleared.
fn settle(bed: &Bed, name: &str) -> Result<()> {
    let deadline = Instant::now() + SETTLE;
    loop {
        let provider = bed.provider(name)?;
        if !is_clearing(&provider) && provider.pinned == 0 {
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

/// Returns the number of this program's page faults so far.
fn faults() -> Result<u64> {
    let text = fs::read_to_string("/proc/self/stat")?;
    let after = text.rsplit_once(')').context("no name in /proc/self/stat")?.1;
    Ok(after
        .split_whitespace()
        .nth(7)
        .context("no faults in /proc/self/stat")?
        .parse()?)
}

/// Touches one word in the range of each page table.
fn touch(mapping: &Mapping) {
    let (address, len) = (mapping.address(), mapping.len() as u64);
    let mut at = 0;
    while at < len {
        mapping.get(at as usize);
        at = (address + at) / TABLE * TABLE + TABLE - address;
    }
}

/// Fails unless all of a mapping is already mapped.
fn all_mapped(mapping: &Mapping) -> Result<()> {
    let before = faults()?;
    for page in (0..mapping.len()).step_by(PAGE as usize) {
        mapping.get(page);
    }
    let came = faults()? - before;
    // The program itself may have some page faults.
    ensure!(came <= 4, "{} bytes were not all mapped: {came} faults", mapping.len());
    Ok(())
}

fn times(size: u64) -> usize {
    if size > 16 * MIB { TIMES_LARGE } else { TIMES }
}

/// Measures a buffer of a provider from its allocation to its end.
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

/// Measures the same with the kernel's own file, which allocates in mmap() and frees in munmap().
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

/// Returns the processor time of the kernel's worker threads so far, by process id.
fn workers() -> Result<HashMap<u32, u64>> {
    let mut times = HashMap::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if !comm.starts_with("kworker") {
            continue;
        }
        // A worker may end between the two reads.
        let Ok(text) = fs::read_to_string(entry.path().join("schedstat")) else {
            continue;
        };
        let ran = text.split_whitespace().next().context("an empty schedstat")?;
        times.insert(pid, ran.parse()?);
    }
    ensure!(!times.is_empty(), "no worker has a schedstat");
    Ok(times)
}

/// Returns the processor time of worker threads since `before`.
fn worked(before: &HashMap<u32, u64>) -> Result<u64> {
    let now = workers()?;
    let ran = now
        .iter()
        .map(|(pid, time)| time - before.get(pid).copied().unwrap_or(0).min(*time));
    Ok(ran.sum())
}

/// Reads one word of each page.
fn touch_pages(mapping: &Mapping) {
    for page in (0..mapping.len()).step_by(PAGE as usize) {
        mapping.get(page);
    }
}

/// Measures the whole life of a buffer of a provider: allocate, map, touch each page, unmap, free, and the clearing afterwards.
fn end_to_end(watch: &Watch, bed: &Bed, fd: BorrowedFd<'_>, name: &str, size: u64) -> Result<Value> {
    let provider = bed.provider(name)?.id;
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..times(size) {
        let before = workers()?;
        let mut asked = request(size);
        asked.req.provider = provider;
        let (done, took) = watch.time(|| {
            sys::alloc(fd, &mut asked, Memory::Slice(&mut []))?;
            let mapping = Mapping::shared(fd, asked.mmap_offset, size as usize)?;
            touch_pages(&mapping);
            drop(mapping);
            free(fd, asked.handle)
        });
        done.map_err(errno)?;
        settle(bed, name)?;
        let clearing = worked(&before)?;
        best = best.min((took + clearing, took, clearing));
    }
    // The module never hands memory on uncleared, so a count of zero means that the measurement failed.
    ensure!(
        best.2 > size / 4096,
        "clearing {size} bytes took {} instructions",
        best.2
    );
    Ok(json!({ "whole": best.0, "program": best.1, "clearing": best.2 }))
}

/// Measures the same with the kernel's own file, which clears nothing.
fn end_to_end_upstream(watch: &Watch, pool: &File, size: u64) -> Result<Value> {
    let mut counts = Vec::new();
    for _ in 0..times(size) {
        let (done, took) = watch.time(|| {
            let mapping = Mapping::shared(pool.as_fd(), 0, size as usize)?;
            touch_pages(&mapping);
            drop(mapping);
            Ok::<_, i32>(())
        });
        done.map_err(errno).context("p2pmem/allocate")?;
        counts.push(took);
    }
    let whole = least(&counts);
    Ok(json!({ "whole": whole, "program": whole, "clearing": 0 }))
}

/// Makes the module clear all memory of a provider: published memory is not yet cleared.
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

/// Measures one more allocation while many buffers live: the mean of several in sequence. The cost of one page depends on the
/// number of blocks that the allocator has to split, and so on the number of free pages: half of a sequence needs no split, a
/// quarter one split, and so on, wherever the sequence begins.
fn crowd(watch: &Watch, bed: &Bed, fd: BorrowedFd<'_>) -> Result<Value> {
    // One file may not have as many handles as buffers live at the end.
    let other = open()?;
    let owners = [fd, other.as_fd()];
    let mut live = Vec::new();
    let mut rows = Vec::new();
    for count in LIVE {
        while live.len() < count {
            let owner = owners[live.len() % owners.len()];
            live.push((owner, alloc(owner, PAGE).map_err(errno)?.handle));
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
    for (owner, handle) in live {
        free(owner, handle).map_err(errno)?;
    }
    settle(bed, "paged")?;
    Ok(rows.into())
}

/// Pseudo-random numbers, the same in each run.
struct Random(u64);

impl Random {
    /// Returns a number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        // Marsaglia's xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Measures allocations of random sizes, by each of [`FILES`] files in order: with `count` live buffers, and with the holes of
/// `surplus` buffers that were freed.
fn crowd_row(watch: &Watch, bed: &Bed, files: &[File], count: usize, surplus: usize) -> Result<Value> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut live = Vec::new();
    for at in 0..count + surplus {
        let file = &files[at % files.len()];
        let size = (1 + random.below(MOST_PAGES)) * PAGE;
        live.push((file, alloc(file.as_fd(), size).map_err(errno)?.handle));
    }
    for _ in 0..surplus {
        let (file, handle) = live.swap_remove(random.below(live.len() as u64) as usize);
        free(file.as_fd(), handle).map_err(errno)?;
    }
    settle(bed, "paged")?;
    // The same sizes for every number of live buffers.
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let mut sum = 0;
    for at in 0..MORE_RANDOM {
        let file = &files[(at * 37) % files.len()];
        let size = (1 + random.below(MOST_PAGES)) * PAGE;
        let (done, took) = watch.time(|| alloc(file.as_fd(), size));
        live.push((file, done.map_err(errno)?.handle));
        sum += took;
    }
    for (file, handle) in live {
        free(file.as_fd(), handle).map_err(errno)?;
    }
    settle(bed, "paged")?;
    Ok(json!({ "buffers": count, "holes": surplus, "files": files.len(), "alloc": sum / MORE_RANDOM as u64 }))
}

/// Opens [`FILES`] files.
fn many_files() -> Result<Vec<File>> {
    let hard = getrlimit(Resource::Nofile).maximum;
    let wanted = Rlimit {
        current: hard,
        maximum: hard,
    };
    setrlimit(Resource::Nofile, wanted).context("the limit of open files")?;
    (0..FILES).map(|_| open()).collect()
}

/// Measures the removal of a provider whose device is unbound, without buffers and with [`REVOKED`] of [`FILES`] files.
fn removal(watch: &Watch, bed: &Bed) -> Result<Value> {
    let files = many_files()?;
    let mut counts = Vec::new();
    for buffers in [0, REVOKED] {
        publish(bed, "paged", &[("kernel_reserve", "0")])?;
        let mut last = None;
        for file in files.iter().cycle().take(buffers) {
            last = Some((file, alloc(file.as_fd(), PAGE).map_err(errno)?.handle));
        }
        let (done, took) = watch.time(|| bed.unbind("paged"));
        done?;
        if let Some((file, handle)) = last {
            let left = p2pmem_cases::buffer(file.as_fd(), handle).map_err(errno)?;
            ensure!(left.state == abi::P2PMEM_BUFFER_GONE, "{left:?}");
        }
        counts.push(took);
        fs::remove_dir(bed.provider_dir("paged")?)?;
    }
    Ok(json!({ "buffers": REVOKED, "files": FILES, "without": counts[0], "with": counts[1] }))
}

/// Measures one more allocation with few and with many live buffers of random sizes.
fn crowd_with_holes(watch: &Watch, bed: &Bed) -> Result<Value> {
    let files = many_files()?;
    let few = crowd_row(watch, bed, &files, LIVE[0], 0)?;
    let many = crowd_row(watch, bed, &files, LIVE[2], SURPLUS)?;
    Ok(json!([few, many]))
}

fn memory(watch: &Watch, bed: &Bed, short: bool) -> Result<Value> {
    let reserve = (512 * MIB - PAGE).to_string();
    publish(bed, "paged", &[("kernel_reserve", "0")])?;
    publish(bed, "pageless", &[("kernel_reserve", "0"), ("mode", "pageless")])?;
    let file = open()?;
    let fd = file.as_fd();
    clear(bed, fd, "paged")?;
    clear(bed, fd, "pageless")?;
    // Measured while there is only one provider that a buffer without clients could be in.
    publish(bed, "kernel", &[("kernel_reserve", &reserve)])?;
    let path = bed.device("kernel")?.sysfs().join("p2pmem/allocate");
    let pool = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| path.display().to_string())?;
    let mut rows = Vec::new();
    let sizes: &[u64] = if short { &SIZES_SHORT } else { &SIZES };
    for &size in sizes {
        rows.push(json!({
            "bytes": size,
            "paged": buffer(watch, bed, fd, "paged", size)?,
            "pageless": buffer(watch, bed, fd, "pageless", size)?,
            "upstream": upstream(watch, &pool, size)?,
        }));
        eprintln!("{size} bytes: done");
    }
    let whole = json!({
        "bytes": END_TO_END,
        "paged": end_to_end(watch, bed, fd, "paged", END_TO_END)?,
        "pageless": end_to_end(watch, bed, fd, "pageless", END_TO_END)?,
        "upstream": end_to_end_upstream(watch, &pool, END_TO_END)?,
    });
    eprintln!("end to end: done");
    if short {
        return Ok(json!({ "sizes": rows, "end_to_end": whole }));
    }
    bed.unpublish("kernel")?;
    bed.unpublish("pageless")?;
    let crowd = crowd(watch, bed, fd)?;
    eprintln!("live buffers: done");
    let holes = crowd_with_holes(watch, bed)?;
    Ok(json!({ "sizes": rows, "end_to_end": whole, "live": crowd, "live_with_holes": holes }))
}

/// Measures the kernel's own choice for each of some lists of clients: alone, and with taking and freeing a page.
fn find_many(door: &mut File, lists: &[Vec<Client>]) -> Result<(u64, u64)> {
    let lines: Vec<String> = lists
        .iter()
        .take(MOST_LISTS)
        .map(|list| list.iter().map(|c| c.function.as_str()).collect::<Vec<_>>().join(" "))
        .collect();
    door.write_all(lines.join(";").as_bytes())
        .context("pci_p2pmem_find_many")?;
    let mut node = OpenOptions::new().read(true).open("/dev/p2pmem-find-many")?;
    let mut text = String::new();
    node.read_to_string(&mut text)?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let [decide, whole, found] = words.as_slice() else {
        bail!("no answer of find_many: {text:?}");
    };
    ensure!(*found != "none", "the kernel found no provider for {lines:?}");
    Ok((decide.parse()?, whole.parse()?))
}

/// A client with its address for p2pmem and for the kernel's tools.
#[derive(Clone)]
struct Client {
    address: abi::p2pmem_pci_addr,
    function: String,
}

/// A request of `size` bytes near all clients.
fn near(clients: &[Client], size: u64) -> (abi::p2pmem_request, Vec<abi::p2pmem_pci_addr>) {
    let asked = abi::p2pmem_request {
        size,
        nr_clients: clients.len() as u32,
        ..Default::default()
    };
    (asked, clients.iter().map(|c| c.address).collect())
}

/// Waits until no freed memory waits to be cleared: freeing costs less while the scrubber runs.
fn all_clear(fd: BorrowedFd<'_>) -> Result<()> {
    let deadline = Instant::now() + SETTLE;
    loop {
        let mut rows = vec![abi::p2pmem_provider::default(); PROVIDERS[PROVIDERS.len() - 1]];
        let mut list = abi::p2pmem_list {
            count: rows.len() as u32,
            ..Default::default()
        };
        sys::list(fd, &mut list, Memory::Slice(&mut rows))
            .map_err(errno)
            .context("LIST")?;
        if !rows.iter().any(is_clearing) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "memory is still not clear");
        thread::sleep(Duration::from_millis(1));
    }
}

/// An operation of the module for one list of clients. Each measurement returns instructions.
enum Ask {
    /// `EXPLAIN` without verdicts: the decision only.
    Decide,
    /// `EXPLAIN` with all verdicts and the message.
    Verdicts,
    /// `ALLOC` and `FREE` of a page.
    Take,
    /// `ALLOC` and `FREE` of two pages.
    TakeTwo,
}

impl Ask {
    fn once(&self, watch: &Watch, fd: BorrowedFd<'_>, clients: &[Client]) -> Result<u64> {
        let (req, mut addresses) = near(clients, if let Ask::TakeTwo = self { 2 * PAGE } else { PAGE });
        if let Ask::Take | Ask::TakeTwo = self {
            let mut asked = abi::p2pmem_alloc {
                req,
                ..Default::default()
            };
            let (done, took) = watch.time(|| {
                sys::alloc(fd, &mut asked, Memory::Slice(&mut addresses))?;
                free(fd, asked.handle)
            });
            done.map_err(errno)?;
            all_clear(fd)?;
            return Ok(took);
        }
        let room = if let Ask::Verdicts = self {
            PROVIDERS[PROVIDERS.len() - 1]
        } else {
            0
        };
        let mut verdicts = vec![abi::p2pmem_verdict::default(); room];
        let mut text = vec![0u8; if room > 0 { 512 } else { 0 }];
        let mut explain = abi::p2pmem_explain {
            req,
            nr_verdicts: verdicts.len() as u32,
            text_len: text.len() as u32,
            ..Default::default()
        };
        let (done, took) = watch.time(|| {
            sys::explain(
                fd,
                &mut explain,
                Memory::Slice(&mut addresses),
                Memory::Slice(&mut verdicts),
                Memory::Slice(&mut text),
            )
        });
        done.map_err(errno)?;
        ensure!(explain.error == 0 && explain.chosen != 0, "no provider was chosen");
        ensure!(
            verdicts.iter().all(|verdict| verdict.provider != 0),
            "a provider has no verdict"
        );
        Ok(took)
    }

    /// Returns the lowest count of several rounds over lists of clients, by list. The first round fills the module's caches.
    fn rounds(&self, watch: &Watch, fd: BorrowedFd<'_>, lists: &[Vec<Client>]) -> Result<u64> {
        let mut counts = Vec::new();
        for _ in 0..=TIMES {
            let mut sum = 0;
            for list in lists {
                sum += self.once(watch, fd, list)?;
            }
            counts.push(sum / lists.len() as u64);
        }
        Ok(least(&counts[1..]))
    }

    /// The lowest count of several operations, together with the call before each that collects all functions of the machine
    /// again.
    fn cold(&self, watch: &Watch, fd: BorrowedFd<'_>, clients: &[Client]) -> Result<u64> {
        let mut counts = Vec::new();
        for _ in 0..TIMES {
            let mut paths = abi::p2pmem_paths {
                flags: abi::P2PMEM_PATHS_RESCAN,
                nr_clients: clients.len() as u32,
                ..Default::default()
            };
            let (_, mut addresses) = near(clients, PAGE);
            let (done, took) =
                watch.time(|| sys::paths(fd, &mut paths, Memory::Slice(&mut addresses), Memory::Slice(&mut [])));
            done.map_err(errno).context("PATHS")?;
            counts.push(took + self.once(watch, fd, clients)?);
        }
        Ok(least(&counts))
    }
}

/// Returns the instructions of ALLOC and FREE of a page by several threads at once, each with a file of its own. The number of
/// operations is the same for any number of threads.
fn at_once(threads: u64, clients: &[Client]) -> Result<u64> {
    let one = |barrier: &Barrier| -> Result<u64> {
        let file = open()?;
        let fd = file.as_fd();
        let (req, mut addresses) = near(clients, PAGE);
        barrier.wait();
        let start = clock_gettime(ClockId::ThreadCPUTime);
        for _ in 0..PAIRS / threads {
            let mut asked = abi::p2pmem_alloc {
                req,
                ..Default::default()
            };
            sys::alloc(fd, &mut asked, Memory::Slice(&mut addresses)).map_err(errno)?;
            free(fd, asked.handle).map_err(errno)?;
        }
        Ok(nanoseconds(clock_gettime(ClockId::ThreadCPUTime)) - nanoseconds(start))
    };
    let mut counts = Vec::new();
    for _ in 0..TIMES_LARGE {
        let barrier = Barrier::new(threads as usize);
        let took = thread::scope(|scope| {
            let running: Vec<_> = (0..threads).map(|_| scope.spawn(|| one(&barrier))).collect();
            running
                .into_iter()
                .map(|thread| thread.join().expect("a thread does not panic"))
                .sum::<Result<u64>>()
        })?;
        counts.push(took / PAIRS);
        all_clear(open()?.as_fd())?;
    }
    Ok(least(&counts))
}

/// Takes every second page of a provider, so that no two free pages are neighbors. The pages are free again when the file
/// is closed.
fn fragment(bed: &Bed, name: &str) -> Result<File> {
    let file = open()?;
    let fd = file.as_fd();
    let provider = bed.provider(name)?;
    let mut taken = Vec::new();
    for _ in 0..provider.free / PAGE {
        let mut asked = request(PAGE);
        asked.req.provider = provider.id;
        sys::alloc(fd, &mut asked, Memory::Slice(&mut [])).map_err(errno)?;
        taken.push(asked);
    }
    for page in taken.iter().filter(|page| page.bar_offset / PAGE % 2 == 0) {
        free(fd, page.handle).map_err(errno)?;
    }
    all_clear(fd)?;
    let left = bed.provider(name)?;
    ensure!(
        left.free == provider.free / 2 && left.largest == PAGE,
        "{} bytes are free, at most {} in one piece",
        left.free,
        left.largest
    );
    Ok(file)
}

/// Rules of the administrator that apply to this program and deny nothing, each for another provider.
fn rules(functions: &[String], count: usize) -> Result<()> {
    for (number, function) in functions.iter().enumerate().take(count) {
        let folder = Path::new(RULE_FOLDER).join(format!("{number:02}-bench"));
        if folder.exists() {
            continue;
        }
        fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        for (attribute, value) in [
            ("uid", "0"),
            ("provider", function),
            ("action", "avoid"),
            ("enable", "1"),
        ] {
            write(&folder.join(attribute), value)?;
        }
    }
    let made = fs::read_dir(RULE_FOLDER)?.count();
    ensure!(made == count, "{made} rules instead of {count}");
    Ok(())
}

/// Returns `count` different lists of the same clients.
fn rotations(clients: &[Client], count: usize) -> Vec<Vec<Client>> {
    (0..count)
        .map(|turn| {
            let mut list = clients.to_vec();
            list.rotate_left(turn % clients.len());
            // More lists than there are clients are made by swapping two clients.
            let (a, b) = (turn / clients.len(), clients.len() - 1);
            list.swap(a.min(b), b);
            list
        })
        .collect()
}

fn decisions(watch: &Watch, bed: &Bed) -> Result<Value> {
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
    let timer = Path::new(&module).with_file_name("p2pmem_find_many.ko");
    command("insmod", &[timer.to_str().context("path")?])?;
    let mut door = OpenOptions::new().write(true).open("/dev/p2pmem-find-many")?;
    let file = open()?;
    let fd = file.as_fd();
    let mut all = Vec::new();
    for number in 0..CLIENTS[CLIENTS.len() - 1] {
        let name = format!("client{number}");
        all.push(Client {
            address: bed.address(&name)?,
            function: bed.device(&name)?.bdf.clone(),
        });
    }
    let mut rows = Vec::new();
    let mut providers = Vec::new();
    for count in PROVIDERS {
        while providers.len() < count {
            // Half of each provider is in the kernel's own pool, for the kernel's own choice.
            let name = format!("mem{}", providers.len());
            publish(bed, &name, &[("kernel_reserve", &(2 * MIB).to_string())])?;
            providers.push(bed.device(&name)?.bdf.clone());
        }
        for clients in CLIENTS {
            let lists = [all[..clients].to_vec()];
            let (find_many, upstream) = find_many(&mut door, &lists)?;
            rows.push(json!({
                "providers": count,
                "clients": clients,
                "ours": Ask::Decide.rounds(watch, fd, &lists)?,
                "find_many": find_many,
                "alloc_free": Ask::Take.rounds(watch, fd, &lists)?,
                "alloc_free_upstream": upstream,
            }));
        }
    }
    let one = [all.clone()];
    let mut alternating = Vec::new();
    for count in LISTS {
        let lists = rotations(&all, count);
        let (find_many, upstream) = find_many(&mut door, &lists)?;
        alternating.push(json!({
            "lists": count,
            "ours": Ask::Decide.rounds(watch, fd, &lists)?,
            "find_many": find_many,
            "alloc_free": Ask::Take.rounds(watch, fd, &lists)?,
            "alloc_free_upstream": upstream,
        }));
    }
    let verdicts = Ask::Verdicts.rounds(watch, fd, &one)?;
    let cold = Ask::Take.cold(watch, fd, &all)?;
    let mut threads = Vec::new();
    for count in THREADS {
        threads.push(json!({
            "threads": count,
            "alloc_free": at_once(count, &all)?,
        }));
    }
    // The last provider is below another root port than the client.
    let nearest = [all[..1].to_vec()];
    let before = Ask::TakeTwo.rounds(watch, fd, &nearest)?;
    let pages = fragment(bed, &format!("mem{}", providers.len() - 1))?;
    let fragmented = Ask::TakeTwo.rounds(watch, fd, &nearest)?;
    drop(pages);
    all_clear(fd)?;
    let mut ruled = Vec::new();
    for count in [1, RULES] {
        rules(&providers, count)?;
        ruled.push(json!({
            "rules": count,
            "ours": Ask::Decide.rounds(watch, fd, &one)?,
            "alloc_free": Ask::Take.rounds(watch, fd, &one)?,
        }));
    }
    Ok(json!({
        "decisions": rows,
        "alternating": alternating,
        "explain_verdicts": verdicts,
        "alloc_free_cold": cold,
        "threads": threads,
        "fragmented": {
            "none": before,
            "farthest": fragmented,
        },
        "rules": ruled,
    }))
}

fn run(what: &str) -> Result<Value> {
    let bed = Bed {
        devices: devices::load()?,
    };
    bed.load_module()?;
    let watch = Watch { clock: clock() };
    match what {
        "memory" => memory(&watch, &bed, false),
        "memory-short" => memory(&watch, &bed, true),
        "removal" => removal(&watch, &bed),
        _ => decisions(&watch, &bed),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let what = match arguments.as_slice() {
        [what] if ["memory", "memory-short", "decisions", "removal"].contains(&what.as_str()) => what,
        _ => {
            eprintln!("usage: p2pmem-guest-bench memory | memory-short | decisions | removal");
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
