// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocations of the kernel's that fail: each one that a call makes in turn, by `/proc/self/fail-nth` of a kernel with
//! FAULT_INJECTION. What the failed calls leave behind, the debug kernel's leak checker and every case's own end see.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::dmabuf::{GOOD, Importer, export, exported_buffer};
use super::inflight::until;
use super::pageless::without_pages;
use super::peer::{Held, Row, await_rows, counted, nic};
use super::publisher::Publisher;
use super::rules::AdminRule;
use super::share::import;
use super::{Bed, Case, alloc, errno, free, is_clearing, open, request, write};
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "allocation-failures",
        about: "whichever allocation of a call fails, the call succeeds or fails with ENOMEM, and nothing is lost",
        topology: "small",
        ruins: false,
        run: allocation_failures,
    },
    Case {
        name: "allocation-failures-ioctls",
        about: "the same for all other calls on an open file",
        topology: "nic",
        ruins: false,
        run: ioctls,
    },
    Case {
        name: "allocation-failures-admin",
        about: "the same for binding, publishing, rules and their ends: what fails has changed nothing, and what gives back cannot fail",
        topology: "small",
        ruins: false,
        run: admin,
    },
    Case {
        name: "allocation-failures-unbind",
        about: "whichever allocation fails, a provider that is in use is taken back, and can be published again",
        topology: "small",
        ruins: false,
        run: unbind,
    },
    Case {
        name: "allocation-failures-peer",
        about: "whichever allocation of a registration fails, it succeeds or is refused, and nothing is lost",
        topology: "nic",
        ruins: false,
        run: registration,
    },
    Case {
        name: "allocation-failures-events",
        about: "whichever allocation of poll() and read() fails, no event is lost",
        topology: "small",
        ruins: false,
        run: events,
    },
    Case {
        name: "allocation-failures-pageless",
        about: "whichever allocation of a fault in memory without pages fails, the access comes to its end",
        topology: "small",
        ruins: false,
        run: |bed| without_pages(bed, &[touching]),
    },
    Case {
        name: "allocation-failures-stripes",
        about: "whichever allocation fails, a stripe has all of its parts or none",
        topology: "demo",
        ruins: false,
        run: stripes,
    },
    Case {
        name: "allocation-failures-cleared",
        about: "whichever allocation of ALLOC fails, what it took is cleared soon, in own and in adopted providers",
        topology: "demo",
        ruins: false,
        run: cleared,
    },
    Case {
        name: "allocation-failures-publisher",
        about: "whichever allocation fails, a driver has its memory published or as before",
        topology: "small",
        ruins: false,
        run: registering,
    },
];

const MIB: u64 = 1 << 20;

/// More allocations than any call here makes.
const MANY: u32 = 300;

/// Does a thing again and again, each time with another of its allocations failing, until there are no more of them. It
/// tells the errno of its failure, which has to be ENOMEM or one of `others`; what it made is dropped when nothing fails any
/// more.
fn each<T>(what: &str, others: &[i32], thing: impl FnMut() -> Result<T, i32>) -> Result<()> {
    let swept = sweep(what, others, thing)?;
    ensure!(swept.failures > 0, "{what}: no allocation failed");
    Ok(())
}

/// As [`each`], for what must not fail, whatever allocation does.
fn never<T>(what: &str, thing: impl FnMut() -> Result<T, i32>) -> Result<()> {
    let Swept { failures, .. } = sweep(what, &[], thing)?;
    ensure!(failures == 0, "{what} failed {failures} times");
    Ok(())
}

/// As [`each`], for what may fail or do without any of them.
fn sweep<T>(what: &str, others: &[i32], mut thing: impl FnMut() -> Result<T, i32>) -> Result<Swept> {
    sweep_after(what, others, || Ok(()), |()| thing())
}

/// As [`sweep`]; before each time something is prepared, of which nothing fails.
fn sweep_after<S, T>(
    what: &str,
    others: &[i32],
    prepare: impl FnMut() -> Result<S>,
    thing: impl FnMut(S) -> Result<T, i32>,
) -> Result<Swept> {
    sweep_checked(1..MANY, what, others, prepare, thing, |_, _| Ok(()))
}

/// The ioctls of all sweeps: a bit for each number.
static SWEPT: AtomicU32 = AtomicU32::new(0);

/// What came of a sweep.
pub(super) struct Swept {
    /// How many allocations failed, each of them once.
    pub(super) allocations: u32,
    /// How often the thing failed with that.
    pub(super) failures: u32,
}

/// As [`sweep_after`], of the allocations with the numbers `points`, which go beyond the last one. Each time `check` is told the
/// answer and whether an allocation failed; none fails in it.
pub(super) fn sweep_checked<S, T>(
    points: impl IntoIterator<Item = u32>,
    what: &str,
    others: &[i32],
    mut prepare: impl FnMut() -> Result<S>,
    mut thing: impl FnMut(S) -> Result<T, i32>,
    mut check: impl FnMut(&Result<T, i32>, bool) -> Result<()>,
) -> Result<Swept> {
    let path = "/proc/thread-self/fail-nth";
    let (mut allocations, mut failures) = (0, 0);
    for n in points {
        let prepared = prepare().with_context(|| format!("before {what}, {n}"))?;
        let mut nth = OpenOptions::new().read(true).write(true).open(path).context(path)?;
        nth.write_all(n.to_string().as_bytes()).context(path)?;
        let (answer, calls) = sys::calls_in(|| thing(prepared));
        SWEPT.fetch_or(calls, Relaxed);
        let mut left = String::new();
        nth.read_to_string(&mut left).context(path)?;
        nth.write_all(b"0").context(path)?;
        let reached = left.trim_end_matches(['\n', '\0']) == "0";
        check(&answer, reached).with_context(|| format!("after {what}, its allocation {n} failing"))?;
        match answer {
            // The allocation was one that the kernel can do without.
            Ok(made) => drop(made),
            Err(code) if reached && (code == libc::ENOMEM || others.contains(&code)) => failures += 1,
            Err(code) => bail!("{what}, its allocation {n} failing: {}", errno(code)),
        }
        if !reached {
            println!("{what}: {allocations} allocations, {failures} of which it cannot do without");
            println!("hardening-report: {{\"injection_points\": {allocations}}}");
            return Ok(Swept { allocations, failures });
        }
        allocations += 1;
    }
    bail!("{what}: more allocations than expected")
}

/// The kernel's function whose allocations are spared. Where it cannot split a block for want of memory, it frees one that is
/// free already and so corrupts its trees; the module does not call it where such small allocations can fail.
pub(super) const SPARED: &str = "gpu_buddy_alloc_blocks";

/// Where a function of the kernel begins, and where the next one does.
fn text_of(function: &str) -> Result<(u64, u64)> {
    let (path, all) = (KALLSYMS, functions()?);
    let start = all
        .iter()
        .find(|(_, name)| name == function)
        .map(|(address, _)| *address);
    let start = start
        .filter(|&start| start != 0)
        .with_context(|| format!("{path} has no {function}"))?;
    let end = all
        .iter()
        .map(|(address, _)| *address)
        .filter(|&address| address > start)
        .min();
    Ok((
        start,
        end.with_context(|| format!("nothing is behind {function} in {path}"))?,
    ))
}

const KALLSYMS: &str = "/proc/kallsyms";

/// Addresses and names of functions.
fn functions() -> Result<Vec<(u64, String)>> {
    let symbols = std::fs::read_to_string(KALLSYMS).context(KALLSYMS)?;
    let mut all = Vec::new();
    for line in symbols.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [address, "t" | "T", name @ ..] = words.as_slice() {
            all.push((u64::from_str_radix(address, 16).context(KALLSYMS)?, name.join(" ")));
        }
    }
    Ok(all)
}

/// Which allocations can fail.
pub(super) enum Within<'a> {
    /// All.
    Anything,
    /// Those under a function of the kernel.
    Function(&'a str),
}

impl Within<'_> {
    fn range(&self) -> Result<(u64, u64)> {
        match self {
            Within::Anything => Ok((0, u64::MAX)),
            Within::Function(name) => text_of(name),
        }
    }
}

/// Lets allocations of all kinds fail where `fail-nth` says so, without a trace of it in the log.
fn arm() -> Result<()> {
    arm_within(&Within::Anything, SPARED)
}

/// As [`arm`], some allocations. Those under the function `spared` do not fail.
pub(super) fn arm_within(within: &Within<'_>, spared: &str) -> Result<()> {
    let ((start, end), (first, last)) = (text_of(spared)?, within.range()?);
    let [start, end, first, last] = [start, end, first, last].map(|address| format!("{address:#x}"));
    let settings = [
        ("ignore-gfp-wait", "N"),
        ("verbose", "0"),
        ("stacktrace-depth", "32"),
        ("reject-start", &start),
        ("reject-end", &end),
        ("require-start", &first),
        ("require-end", &last),
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
    let map = Mapping::shared(fd, buffer.mmap_offset, MIB as usize).map_err(errno)?;
    each("EXPORT_DMABUF by addresses", &[], || {
        export(fd, 0, abi::P2PMEM_EXPORT_MAPPED, &[(map.address(), MIB)])
    })?;
    drop(map);
    sweep("BUFFER", &[], || super::buffer(fd, buffer.handle))?;
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

fn ioctls(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let client = bed.address("nvme0")?;
    let file = open()?;
    let fd = file.as_fd();
    arm()?;
    SWEPT.store(0, Relaxed);
    let must = |answer: Result<(), i32>| answer.map_err(|_| libc::ENOTRECOVERABLE);
    each("LIST", &[], || {
        let mut rows = vec![abi::p2pmem_provider::default(); 16];
        let mut list = abi::p2pmem_list {
            count: 16,
            ..Default::default()
        };
        sys::list(fd, &mut list, Memory::Slice(&mut rows))
    })?;
    each("INFO", &[], || {
        sys::plain(fd, abi::P2PMEM_IOC_INFO, &mut abi::p2pmem_info::default())
    })?;
    sweep("STATS", &[], || {
        sys::plain(fd, abi::P2PMEM_IOC_STATS, &mut abi::p2pmem_stats::default())
    })?;
    each("PATHS", &[], || {
        let mut rows = vec![abi::p2pmem_path::default(); 16];
        let mut paths = abi::p2pmem_paths {
            nr_clients: 1,
            nr_paths: 16,
            flags: abi::P2PMEM_PATHS_RESCAN,
            ..Default::default()
        };
        sys::paths(fd, &mut paths, Memory::Slice(&mut [client]), Memory::Slice(&mut rows))
    })?;
    let explain = |flags| {
        let mut verdicts = vec![abi::p2pmem_verdict::default(); 16];
        let mut text = [0u8; 512];
        let mut ask = abi::p2pmem_explain {
            nr_verdicts: 16,
            text_len: 512,
            flags,
            ..Default::default()
        };
        ask.req.size = MIB;
        ask.req.nr_clients = 1;
        sys::explain(
            fd,
            &mut ask,
            Memory::Slice(&mut [client]),
            Memory::Slice(&mut verdicts),
            Memory::Slice(&mut text),
        )
    };
    each("EXPLAIN", &[], || explain(0))?;
    // What was not remembered for want of memory is no answer either.
    each("EXPLAIN of the last", &[libc::ENODATA], || {
        explain(abi::P2PMEM_EXPLAIN_LAST)
    })?;
    // Under a rule a decision works out what it says, and remembers that: anew under each new rule.
    // How many of them it does without differs from time to time, with the pages that the slab allocator has at hand; how many
    // there are differs by those pages alone.
    let Swept {
        allocations: client_alone,
        ..
    } = sweep("EXPLAIN", &[], || explain(0))?;
    let mut rule = None;
    let mut another_rule = || {
        drop(rule.take());
        rule = Some(AdminRule::new("50-avoid", &[("action", "avoid")])?);
        Ok(())
    };
    let Swept { allocations: ruled, .. } =
        sweep_after("EXPLAIN under a new rule", &[], &mut another_rule, |()| explain(0))?;
    ensure!(
        ruled > client_alone,
        "{ruled} allocations under a rule, {client_alone} without: nothing is remembered of it"
    );
    let near_client = || {
        let mut ask = request(MIB);
        ask.req.nr_clients = 1;
        sys::alloc(fd, &mut ask, Memory::Slice(&mut [client]))?;
        must(free(fd, ask.handle))
    };
    sweep_after("ALLOC under a new rule", &[], &mut another_rule, |()| near_client())?;
    drop(rule);
    each("ALLOC near a client", &[], near_client)?;
    each("STRIPE", &[], || {
        let mut parts = [abi::p2pmem_part::default(); 2];
        let mut ask = abi::p2pmem_stripe {
            nr_parts: 2,
            ..Default::default()
        };
        ask.req = abi::p2pmem_request {
            size: 2 * MIB,
            strategy: abi::P2PMEM_STRATEGY_STRIPE,
            parts: 2,
            ..Default::default()
        };
        sys::stripe(fd, &mut ask, Memory::Slice(&mut []), Memory::Slice(&mut parts))?;
        parts.iter().try_for_each(|part| must(free(fd, part.handle)))
    })?;
    each("mmap of a new buffer", &[], || {
        let map = Mapping::shared(fd, 0, MIB as usize)?;
        map.get(0);
        Ok(map)
    })?;
    let (first, dma_buf) = exported_buffer(fd, MIB, 0)?;
    let other = open()?;
    each("IMPORT", &[], || {
        let got = import(other.as_fd(), dma_buf.as_raw_fd())?;
        must(free(other.as_fd(), got.handle))
    })?;
    never("FREE", || {
        let got = import(other.as_fd(), dma_buf.as_raw_fd()).map_err(|_| 0);
        // Only what gives back counts here.
        got.map_or(Ok(()), |got| must(free(other.as_fd(), got.handle)))
    })?;
    drop(dma_buf);
    free(fd, first.handle).map_err(errno)?;
    // The cases `allocation-failures` and `allocation-failures-admin` make these calls fail.
    let elsewhere = [
        abi::P2PMEM_IOC_BUFFER,
        abi::P2PMEM_IOC_EXPORT_DMABUF,
        abi::P2PMEM_IOC_RULES,
    ];
    for call in abi::P2PMEM_IOCS {
        ensure!(
            SWEPT.load(Relaxed) & (1 << abi::ioc_nr(call)) != 0 || elsewhere.contains(&call),
            "ioctl {:#04x}: no case lets its allocations fail",
            abi::ioc_nr(call)
        );
    }
    bed.unpublish("accel1")
}

/// What a path's owner says of it, as an errno.
fn set(path: &Path, text: &str) -> Result<(), i32> {
    code(std::fs::write(path, text))
}

fn code<T>(answer: std::io::Result<T>) -> Result<T, i32> {
    answer.map_err(|e| e.raw_os_error().unwrap_or(0))
}

fn there(path: &Path) -> Result<bool, i32> {
    code(path.try_exists())
}

/// What a call that cannot fail said. The kernel itself needs memory on the way there; without it nothing happened, and `before` is true.
fn gives_back(answer: Result<(), i32>, before: impl Fn() -> Result<bool, i32>) -> Result<(), i32> {
    match (answer, before()?) {
        (Ok(()), false) => Ok(()),
        (Err(libc::ENOMEM), true) => Err(libc::ENOMEM),
        _ => Err(libc::ENOTRECOVERABLE),
    }
}

/// A device, its provider's directory, and what is written to them.
struct Administered {
    bdf: String,
    sysfs: PathBuf,
    dir: PathBuf,
}

impl Administered {
    fn new(bed: &Bed) -> Result<Self> {
        let device = bed.device("accel0")?;
        Ok(Self {
            bdf: device.bdf.clone(),
            sysfs: device.sysfs(),
            dir: bed.provider_dir("accel0")?,
        })
    }

    fn is_bound(&self) -> Result<bool, i32> {
        there(&self.sysfs.join("driver"))
    }

    fn bind(&self) -> Result<(), i32> {
        // The core tells nobody what a probe came to, and what fails of its own is EINVAL.
        let asked = set(Path::new("/sys/bus/pci/drivers_probe"), &self.bdf);
        if !self.is_bound()? {
            return Err(libc::ENOMEM);
        }
        asked.or_else(|e| if e == libc::EINVAL { Ok(()) } else { Err(e) })
    }

    fn unbind(&self) -> Result<(), i32> {
        gives_back(set(&self.sysfs.join("driver/unbind"), &self.bdf), || self.is_bound())
    }

    fn is_enabled(&self) -> Result<bool, i32> {
        Ok(code(std::fs::read(self.dir.join("enable")))?.starts_with(b"1"))
    }

    fn enable(&self, on: bool) -> Result<(), i32> {
        set(&self.dir.join("enable"), if on { "1" } else { "0" })
    }
}

fn admin(bed: &mut Bed) -> Result<()> {
    let it = Administered::new(bed)?;
    arm()?;
    // Where taking it back fails, it is there as before.
    each("enable 0 and 1", &[], || {
        if it.is_enabled()? {
            it.enable(false)?;
        }
        it.enable(true)
    })?;
    each("pinned_exports", &[], || set(&it.dir.join("pinned_exports"), "0"))?;
    // Unbinding gives back, and cannot fail; binding can, and then the device is bound to nobody.
    bed.unpublish("accel0")?;
    each("binding and unbinding", &[libc::EINVAL], || {
        it.bind()?;
        it.unbind()
    })?;
    if !it.is_bound().map_err(errno)? {
        it.bind().map_err(errno)?;
    }
    each("a provider's directory", &[], || {
        if !there(&it.dir)? {
            code(std::fs::create_dir(&it.dir))?;
        }
        gives_back(code(std::fs::remove_dir(&it.dir)), || there(&it.dir))
    })?;
    std::fs::create_dir(&it.dir)?;
    for mode in ["pageless", "paged"] {
        write(&it.dir.join("mode"), mode)?;
        each(&format!("publishing {mode}"), &[], || {
            if !it.is_enabled()? {
                it.enable(true)?;
            }
            it.enable(false)
        })?;
        // What has struct pages keeps them until it is unbound.
        it.unbind().map_err(errno)?;
        it.bind().map_err(errno)?;
    }
    it.enable(true).map_err(errno)?;
    // Rules, with a buffer that uses up their quota.
    let file = open()?;
    let got = alloc(file.as_fd(), MIB).map_err(errno)?;
    let rule = Path::new("/sys/kernel/config/p2pmem/rules/50-each");
    each("a rule", &[], || {
        if !there(rule)? {
            code(std::fs::create_dir(rule))?;
        }
        set(&rule.join("quota"), "1M")?;
        set(&rule.join("enable"), "1")?;
        match alloc(file.as_fd(), 4096) {
            Err(libc::EDQUOT | libc::ENOMEM) => {}
            Err(other) => return Err(other),
            Ok(_) => return Err(libc::ENOTRECOVERABLE),
        }
        set(&rule.join("enable"), "0")?;
        code(std::fs::remove_dir(rule))
    })?;
    each("RULES of a file", &[], || {
        let mut rules = [abi::p2pmem_rule::default()];
        rules[0].name[..2].copy_from_slice(&b"50".map(|c| c as _));
        rules[0].flags = abi::P2PMEM_RULE_QUOTA;
        rules[0].quota = MIB;
        let mut ask = abi::p2pmem_rules {
            count: 1,
            ..Default::default()
        };
        sys::rules(file.as_fd(), &mut ask, Memory::Slice(&mut rules))
    })?;
    sys::rules(file.as_fd(), &mut abi::p2pmem_rules::default(), Memory::Slice(&mut [])).map_err(errno)?;
    free(file.as_fd(), got.handle).map_err(errno)?;
    drop(file);
    bed.publish("accel0")
}

fn unbind(bed: &mut Bed) -> Result<()> {
    let it = Administered::new(bed)?;
    arm()?;
    let use_it = || -> Result<_> {
        bed.publish("accel0")?;
        let file = open()?;
        let (got, dma_buf) = exported_buffer(file.as_fd(), MIB, 0)?;
        let map = Mapping::shared(file.as_fd(), got.mmap_offset, MIB as usize).map_err(errno)?;
        map.set(0, 1);
        Ok((Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?, map, file))
    };
    // Only the write to `unbind` can fail, for want of the kernel's own copy of it.
    sweep_after("unbinding in use", &[], use_it, |held| it.unbind().map(|()| held))?;
    sweep_after("disabling in use", &[], use_it, |held| it.enable(false).map(|()| held))?;
    bed.publish("accel0")
}

/// What the debug kernel's RDMA core tells of its clients, in debugfs.
const CORE: &str = "/sys/kernel/debug/ib_peer_mem";

/// What the log of the RDMA core has of a call, since it was cleared.
fn core_calls(call: &str) -> Result<Vec<String>> {
    let text = super::read(&Path::new(CORE).join("log"))?;
    let word = format!(" call={call} ");
    let lines = text.lines().filter(|line| line.contains(&word));
    Ok(lines.map(str::to_owned).collect())
}

fn registration(bed: &mut Bed) -> Result<()> {
    arm()?;
    let nic = nic(bed)?;
    let held = Held::new(bed, "accel0", MIB as usize)?;
    let log = Path::new(CORE).join("log");
    // The core asks once, and the memory is the module's whether or not there is memory to register it. EREMOTEIO would be the
    // core's answer for memory that is no client's.
    let swept = sweep_checked(
        1..MANY,
        "ibv_reg_mr()",
        &[],
        || write(&log, "clear"),
        |()| nic.register(held.map.address(), MIB as usize),
        |answer, _| {
            let asked = core_calls("acquire")?;
            ensure!(asked.len() <= 1, "{asked:#?}");
            let owned = asked.iter().all(|line| line.ends_with(" result=1"));
            ensure!(owned, "the module said of its own memory that it is not: {asked:#?}");
            ensure!(answer.is_err() || asked.len() == 1, "registered, and nobody was asked");
            Ok(())
        },
    )?;
    ensure!(swept.failures > 0, "no allocation failed");
    await_rows("nothing is left", <[Row]>::is_empty)?;
    let counts = counted()?;
    ensure!(
        counts["acquire"] == counts["release"] && counts["out_of_order"] == 0,
        "{counts:?}"
    );
    Ok(())
}

/// Whether a file has events.
fn has_events(file: &std::fs::File) -> Result<bool, i32> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let answer = poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&now));
    answer.map(|ready| ready == 1).map_err(|e| e.raw_os_error())
}

fn events(bed: &mut Bed) -> Result<()> {
    let it = Administered::new(bed)?;
    let file = open()?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK)?;
    arm()?;
    // The events of an end and a beginning, where they were read.
    let pending = || {
        if !has_events(&file).map_err(errno)? {
            it.enable(false).map_err(errno)?;
            it.enable(true).map_err(errno)?;
        }
        Ok(())
    };
    sweep_after("poll()", &[], pending, |()| match has_events(&file)? {
        true => Ok(()),
        false => Err(libc::ENOTRECOVERABLE),
    })?;
    sweep_checked(
        1..MANY,
        "read()",
        &[],
        pending,
        |()| sys::read_events(file.as_fd(), 320),
        |answer, _| {
            match answer {
                Ok(events) => ensure!(
                    events
                        .iter()
                        .map(|event| event.type_)
                        .eq([abi::P2PMEM_EVENT_PROVIDER_REMOVED, abi::P2PMEM_EVENT_PROVIDER_ADDED]),
                    "{events:?}"
                ),
                Err(_) => ensure!(has_events(&file).map_err(errno)?, "the events are lost"),
            }
            Ok(())
        },
    )?;
    Ok(())
}

fn touching(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let size = 8 * MIB;
    let got = alloc(file.as_fd(), size).map_err(errno)?;
    arm()?;
    // With a page of other rights in each of its large entries, it is mapped by small ones.
    let new_mapping = |small: bool| {
        let map = Mapping::shared(file.as_fd(), got.mmap_offset, size as usize).map_err(errno)?;
        for at in (MIB..size).step_by(2 << 20).filter(|_| small) {
            map.protect_part(at as usize, 4096, libc::PROT_READ).map_err(errno)?;
        }
        Ok(map)
    };
    let mut allocations = 0;
    for small in [true, false] {
        let swept = sweep_checked(
            1..MANY,
            if small { "a fault" } else { "a fault of a large entry" },
            &[],
            || new_mapping(small),
            |map| {
                for at in (0..size).step_by(2 << 20) {
                    map.set(at as usize, at ^ 0x5a);
                    if map.get(at as usize) != at ^ 0x5a {
                        return Err(libc::ENOTRECOVERABLE);
                    }
                }
                Ok(map)
            },
            |_, _| Ok(()),
        )?;
        ensure!(swept.failures == 0, "an access failed");
        allocations += swept.allocations;
    }
    ensure!(allocations > 0, "no fault takes memory");
    Ok(())
}

fn stripes(bed: &mut Bed) -> Result<()> {
    for name in ["accel1", "shm0"] {
        bed.publish(name)?;
    }
    let file = open()?;
    arm()?;
    let buffers = || -> Result<u32> { Ok(super::providers(file.as_fd())?.iter().map(|row| row.buffers).sum()) };
    for count in [3, 4] {
        let swept = sweep_checked(
            1..MANY,
            &format!("STRIPE of {count} parts"),
            &[],
            || Ok(()),
            |()| {
                let mut parts = [abi::p2pmem_part::default(); 4];
                let mut ask = abi::p2pmem_stripe {
                    nr_parts: count,
                    ..Default::default()
                };
                ask.req = abi::p2pmem_request {
                    size: u64::from(count) * MIB,
                    strategy: abi::P2PMEM_STRATEGY_STRIPE,
                    parts: count,
                    ..Default::default()
                };
                sys::stripe(
                    file.as_fd(),
                    &mut ask,
                    Memory::Slice(&mut []),
                    Memory::Slice(&mut parts),
                )?;
                Ok(parts)
            },
            |answer, _| {
                let wanted = if answer.is_ok() { count } else { 0 };
                ensure!(buffers()? == wanted, "{} buffers, {wanted} expected", buffers()?);
                for part in answer.iter().flatten().take(count as usize) {
                    free(file.as_fd(), part.handle).map_err(errno)?;
                }
                until("nothing is left", || Ok(buffers()? == 0))
            },
        )?;
        ensure!(swept.failures > 0, "no allocation failed");
    }
    for name in ["accel1", "shm0"] {
        bed.unpublish(name)?;
    }
    Ok(())
}

fn cleared(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    arm()?;
    for name in ["accel0", "nvme1"] {
        let mut ask = request(MIB);
        ask.req.provider = bed.provider(name)?.id;
        let swept = sweep_checked(
            1..MANY,
            &format!("ALLOC in {name}"),
            &[],
            || Ok(()),
            |()| sys::alloc(fd, &mut ask, Memory::Slice(&mut [])).map(|()| ask.handle),
            |answer, _| {
                // A buffer that is freed would have all that is left cleared too.
                until("nothing waits to be cleared", || Ok(!is_clearing(&bed.provider(name)?)))?;
                answer.map_or(Ok(()), |handle| free(fd, handle).map_err(errno))
            },
        )?;
        ensure!(swept.failures > 0, "no allocation failed");
    }
    Ok(())
}

fn registering(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    // pci_p2pdma_add_resource() does not survive it: init_memory_mapping() on x86 uses page tables that it did not get, and what
    // fails after the action for the device's end was added frees what that uses.
    arm_within(&Within::Anything, "pci_p2pdma_add_resource")?;
    for how in ["paged", "pageless"] {
        // What was given pages keeps them until the driver is unbound.
        let bind_again = || {
            bed.unbind("accel0")?;
            publisher.bind()
        };
        let swept = sweep_checked(
            1..MANY,
            &format!("p2pmem_register_provider() {how}"),
            &[],
            bind_again,
            |()| publisher.publish(&format!("-1 0 0 0 {how}")),
            |answer, _| {
                let there = (publisher.id()? != 0, bed.provider("accel0").is_ok());
                ensure!(there == (answer.is_ok(), answer.is_ok()), "{answer:?}: {there:?}");
                if answer.is_ok() {
                    publisher.withdraw()?;
                }
                // The driver hears of the end of what began, and of nothing else.
                let told = publisher.told()?;
                ensure!(told == u32::from(answer.is_ok()), "{answer:?}: told {told} times");
                Ok(())
            },
        )?;
        ensure!(swept.failures > 0, "no allocation failed");
    }
    publisher.end()
}
