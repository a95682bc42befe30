// SPDX-License-Identifier: MIT OR Apache-2.0

//! Failures of the kernel's memory allocations: each allocation that a call makes fails once, by
//! `/proc/thread-self/fail-nth` of a kernel with FAULT_INJECTION. The debug kernel's leak checker and the check after
//! each case find what failed calls leak.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::MlockAllFlags;

use super::attach::{PAGE, attach, detach};
use super::dmabuf::{GOOD, Importer, export, exported_buffer};
use super::inflight::until;
use super::pageless::without_pages;
use super::peer::{Held, Row, await_rows, counted, nic};
use super::publisher::Publisher;
use super::rules::AdminRule;
use super::share::import;
use super::{Bed, Case, alloc, errno, expect, free, is_clearing, open, request, write};
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "allocation-failures",
        about: "if any one allocation of a call fails, the call succeeds or fails with ENOMEM, and leaks nothing",
        topology: "small",
        ruins: false,
        run: allocation_failures,
    },
    Case {
        name: "allocation-failures-ioctls",
        about: "if any one allocation of an ioctl fails, the ioctl succeeds or fails with ENOMEM, and leaks nothing",
        topology: "nic",
        ruins: false,
        run: ioctls,
    },
    Case {
        name: "allocation-failures-attach",
        about: "if any one allocation fails, attaching succeeds or fails with ENOMEM and leaks nothing; detaching succeeds",
        topology: "nic",
        ruins: false,
        run: attaching,
    },
    Case {
        name: "allocation-failures-admin",
        about: "if any one allocation fails, bind, publish and rules succeed or change nothing, and undoing them cannot fail",
        topology: "small",
        ruins: false,
        run: admin,
    },
    Case {
        name: "rule-ends-later",
        about: "a rule that ends without memory ends when another rule changes",
        topology: "small",
        ruins: false,
        run: rule_ends_later,
    },
    Case {
        name: "allocation-failures-unbind",
        about: "if any one allocation fails, a provider in use can be removed and published again",
        topology: "small",
        ruins: false,
        run: unbind,
    },
    Case {
        name: "allocation-failures-peer",
        about: "if any one allocation of ibv_reg_mr() fails, the call succeeds or fails with ENOMEM, and leaks nothing",
        topology: "nic",
        ruins: false,
        run: registration,
    },
    Case {
        name: "allocation-failures-events",
        about: "if any one allocation of poll() or read() fails, no event is lost",
        topology: "small",
        ruins: false,
        run: events,
    },
    Case {
        name: "allocation-failures-pageless",
        about: "if any one allocation of a page fault in pageless memory fails, the access still completes",
        topology: "small",
        ruins: false,
        run: |bed| without_pages(bed, &[touching]),
    },
    Case {
        name: "allocation-failures-stripes",
        about: "if any one allocation fails, a stripe has all of its parts or none",
        topology: "demo",
        ruins: false,
        run: stripes,
    },
    Case {
        name: "allocation-failures-cleared",
        about: "if any one allocation of ALLOC fails, the memory taken so far is cleared, in own and adopted providers",
        topology: "demo",
        ruins: false,
        run: cleared,
    },
    Case {
        name: "allocation-failures-publisher",
        about: "if any one allocation of p2pmem_register_provider() fails, the memory is published or unchanged",
        topology: "small",
        ruins: false,
        run: registering,
    },
];

const MIB: u64 = 1 << 20;

/// An upper limit of the number of allocations that a call makes.
const MAX_ALLOCATIONS: u32 = 300;

/// Runs `call` repeatedly, each time with another of its allocations failing, until no allocation failed. `call` may
/// fail with ENOMEM or one of `others`, and must fail at least once. The result of a successful call is dropped when no
/// allocation can fail.
fn sweep_fallible<T>(what: &str, others: &[i32], call: impl FnMut() -> Result<T, i32>) -> Result<()> {
    let swept = sweep(what, others, call)?;
    ensure!(swept.failures > 0, "{what}: no allocation failed");
    Ok(())
}

/// Like [`sweep_fallible`], for a call that must not fail, whichever allocation fails.
fn sweep_infallible<T>(what: &str, call: impl FnMut() -> Result<T, i32>) -> Result<()> {
    let SweepResult { failures, .. } = sweep(what, &[], call)?;
    ensure!(
        failures == 0,
        "{what} failed with {failures} of its allocations failing"
    );
    Ok(())
}

/// Like [`sweep_fallible`], for a call that may succeed with any of its allocations failing.
fn sweep<T>(what: &str, others: &[i32], mut call: impl FnMut() -> Result<T, i32>) -> Result<SweepResult> {
    sweep_after(what, others, || Ok(()), |()| call())
}

/// Like [`sweep`]. `prepare` runs before each call; no allocation fails in `prepare`.
fn sweep_after<S, T>(
    what: &str,
    others: &[i32],
    prepare: impl FnMut() -> Result<S>,
    call: impl FnMut(S) -> Result<T, i32>,
) -> Result<SweepResult> {
    sweep_checked(1..MAX_ALLOCATIONS, what, others, prepare, call, |_, _| Ok(()))
}

/// The ioctls of all sweeps, one bit for each ioctl number.
static SWEPT: AtomicU32 = AtomicU32::new(0);

/// The result of a sweep.
pub(super) struct SweepResult {
    /// Number of allocations that failed, each once.
    pub(super) allocations: u32,
    /// Number of calls that failed because of an allocation.
    pub(super) failures: u32,
}

/// Like [`sweep_after`], for the allocations with the numbers `points`, which must extend past the last allocation.
/// After each call, `check` gets the result and whether an allocation failed; no allocation fails in `check`.
pub(super) fn sweep_checked<S, T>(
    points: impl IntoIterator<Item = u32>,
    what: &str,
    others: &[i32],
    mut prepare: impl FnMut() -> Result<S>,
    mut call: impl FnMut(S) -> Result<T, i32>,
    mut check: impl FnMut(&Result<T, i32>, bool) -> Result<()>,
) -> Result<SweepResult> {
    let path = "/proc/thread-self/fail-nth";
    let (mut allocations, mut failures) = (0, 0);
    for n in points {
        let prepared = prepare().with_context(|| format!("preparing {what}, allocation {n}"))?;
        let mut nth = OpenOptions::new().read(true).write(true).open(path).context(path)?;
        nth.write_all(n.to_string().as_bytes()).context(path)?;
        let (answer, calls) = sys::calls_in(|| call(prepared));
        SWEPT.fetch_or(calls, Relaxed);
        let mut left = String::new();
        nth.read_to_string(&mut left).context(path)?;
        nth.write_all(b"0").context(path)?;
        let injected = left.trim_end_matches(['\n', '\0']) == "0";
        check(&answer, injected).with_context(|| format!("after {what}, with allocation {n} failing"))?;
        match answer {
            // The kernel has a fallback for this allocation, or no allocation failed.
            Ok(made) => drop(made),
            Err(code) if injected && (code == libc::ENOMEM || others.contains(&code)) => failures += 1,
            Err(code) => bail!("{what}, with allocation {n} failing: {}", errno(code)),
        }
        if !injected {
            println!("{what}: {allocations} allocations, {failures} of which made it fail");
            println!("hardening-report: {{\"injection_points\": {allocations}}}");
            return Ok(SweepResult { allocations, failures });
        }
        allocations += 1;
    }
    bail!("{what}: an allocation failed at every point; raise MAX_ALLOCATIONS")
}

/// The kernel function whose allocations do not fail. If `gpu_buddy_alloc_blocks()` cannot split a block for want of
/// memory, the function frees a block that is free and corrupts its trees. The module does not call the function where
/// such small allocations can fail.
pub(super) const SPARED: &str = "gpu_buddy_alloc_blocks";

/// Returns the address of a kernel function, and that of the next function.
fn text_of(function: &str) -> Result<(u64, u64)> {
    let (path, all) = (KALLSYMS, functions()?);
    let start = all
        .iter()
        .find(|(_, name)| name == function)
        .map(|(address, _)| *address);
    let start = start
        .filter(|&start| start != 0)
        .with_context(|| format!("{path} has no function {function}"))?;
    let end = all
        .iter()
        .map(|(address, _)| *address)
        .filter(|&address| address > start)
        .min();
    Ok((
        start,
        end.with_context(|| format!("{path} has no function after {function}"))?,
    ))
}

const KALLSYMS: &str = "/proc/kallsyms";

/// Returns the addresses and names of all kernel functions.
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

/// The allocations that can fail.
pub(super) enum Within<'a> {
    /// All allocations.
    Anything,
    /// Allocations with this kernel function in their call stack.
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

/// Enables failures of all kinds of allocations by `fail-nth`, without a log of them.
fn arm() -> Result<()> {
    arm_within(&Within::Anything, SPARED)
}

/// Like [`arm`], for the allocations `within`. Allocations under the function `spared` do not fail.
pub(super) fn arm_within(within: &Within<'_>, spared: &str) -> Result<()> {
    // Reads all of the program into memory: a page fault in the middle of a call could read a page of the program from its file,
    // and the allocation for that would fail instead of one of the call.
    rustix::mm::mlockall(MlockAllFlags::CURRENT)?;
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
    sweep_fallible("opening the node", &[], || {
        std::fs::File::open(super::NODE).map_err(|e| e.raw_os_error().unwrap_or(0))
    })?;
    let file = open()?;
    let fd = file.as_fd();
    // Calls that free memory must succeed without allocations: ENOTRECOVERABLE is not allowed in a sweep.
    let cannot_fail = |answer: Result<(), i32>| answer.map_err(|_| libc::ENOTRECOVERABLE);
    sweep_fallible("ALLOC", &[], || cannot_fail(free(fd, alloc(fd, MIB)?.handle)))?;
    let buffer = alloc(fd, MIB).map_err(errno)?;
    sweep_fallible("mapping", &[], || {
        let map = Mapping::shared(fd, buffer.mmap_offset, MIB as usize)?;
        map.get(4096);
        Ok(map)
    })?;
    sweep_fallible("EXPORT_DMABUF", &[], || export(fd, buffer.handle, 0, &[(0, MIB)]))?;
    let map = Mapping::shared(fd, buffer.mmap_offset, MIB as usize).map_err(errno)?;
    sweep_fallible("EXPORT_DMABUF by addresses", &[], || {
        export(fd, 0, abi::P2PMEM_EXPORT_MAPPED, &[(map.address(), MIB)])
    })?;
    drop(map);
    sweep("BUFFER", &[], || super::buffer(fd, buffer.handle))?;
    free(fd, buffer.handle).map_err(errno)?;
    let importer = Importer::new()?;
    let (_, dma_buf) = exported_buffer(fd, MIB, 0)?;
    sweep_fallible("attaching and mapping a dma-buf", &[], || {
        importer.attach(bed, &dma_buf, "nvme0", GOOD)?;
        let mapped = importer.say("map");
        if mapped.is_ok() {
            cannot_fail(importer.say("unmap"))?;
        }
        cannot_fail(importer.say("detach"))?;
        mapped
    })
}

fn rule_ends_later(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let rule = AdminRule::new("10-ends", &[("action", "deny")])?;
    expect("under the rule", alloc(fd, MIB), libc::EACCES)?;
    // Each allocation of this thread in rmdir fails.
    arm_within(&Within::Function("configfs_rmdir [configfs]"), SPARED)?;
    let set = |name: &str, value: &str| write(&Path::new("/sys/kernel/debug/failslab").join(name), value);
    set("task-filter", "Y")?;
    set("times", "-1")?;
    set("probability", "100")?;
    write(Path::new("/proc/thread-self/make-it-fail"), "1")?;
    drop(rule);
    write(Path::new("/proc/thread-self/make-it-fail"), "0")?;
    set("probability", "0")?;
    expect("after rmdir without memory", alloc(fd, MIB), libc::EACCES)?;
    let _other = AdminRule::new("20-other", &[("quota", "1G")])?;
    free(fd, alloc(fd, MIB).map_err(errno)?.handle).map_err(errno)
}

fn ioctls(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let client = bed.address("nvme0")?;
    let file = open()?;
    let fd = file.as_fd();
    arm()?;
    SWEPT.store(0, Relaxed);
    let cannot_fail = |answer: Result<(), i32>| answer.map_err(|_| libc::ENOTRECOVERABLE);
    sweep_fallible("LIST", &[], || {
        let mut rows = vec![abi::p2pmem_provider::default(); 16];
        let mut list = abi::p2pmem_list {
            count: 16,
            ..Default::default()
        };
        sys::list(fd, &mut list, Memory::Slice(&mut rows))
    })?;
    sweep_fallible("INFO", &[], || {
        sys::plain(fd, abi::P2PMEM_IOC_INFO, &mut abi::p2pmem_info::default())
    })?;
    sweep("STATS", &[], || {
        sys::plain(fd, abi::P2PMEM_IOC_STATS, &mut abi::p2pmem_stats::default())
    })?;
    sweep_fallible("PATHS", &[], || {
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
    sweep_fallible("EXPLAIN", &[], || explain(0))?;
    sweep("EXPLAIN_LAST of a refusal", &[], || explain(abi::P2PMEM_EXPLAIN_LAST))?;
    free(fd, alloc(fd, MIB).map_err(errno)?.handle).map_err(errno)?;
    sweep_fallible("EXPLAIN_LAST of a decision", &[], || explain(abi::P2PMEM_EXPLAIN_LAST))?;
    // Under a new rule, each decision computes the rule's effect and caches it. The number of allocations that the call
    // survives varies between runs with the slab allocator's free pages; the number of allocations varies only by those
    // pages.
    let SweepResult {
        allocations: client_alone,
        ..
    } = sweep("EXPLAIN", &[], || explain(0))?;
    let mut rule = None;
    let mut another_rule = || {
        drop(rule.take());
        rule = Some(AdminRule::new("50-avoid", &[("action", "avoid")])?);
        Ok(())
    };
    let SweepResult { allocations: ruled, .. } =
        sweep_after("EXPLAIN under a new rule", &[], &mut another_rule, |()| explain(0))?;
    ensure!(
        ruled > client_alone,
        "{ruled} allocations under a new rule, {client_alone} without: the decision cached no effect of the rule"
    );
    let near_client = || {
        let mut ask = request(MIB);
        ask.req.nr_clients = 1;
        sys::alloc(fd, &mut ask, Memory::Slice(&mut [client]))?;
        cannot_fail(free(fd, ask.handle))
    };
    sweep_after("ALLOC under a new rule", &[], &mut another_rule, |()| near_client())?;
    drop(rule);
    sweep_fallible("ALLOC near a client", &[], near_client)?;
    sweep_fallible("STRIPE", &[], || {
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
        parts.iter().try_for_each(|part| cannot_fail(free(fd, part.handle)))
    })?;
    sweep_fallible("mmap of a new buffer", &[], || {
        let map = Mapping::shared(fd, 0, MIB as usize)?;
        map.get(0);
        Ok(map)
    })?;
    let (first, dma_buf) = exported_buffer(fd, MIB, 0)?;
    let other = open()?;
    sweep_fallible("IMPORT", &[], || {
        let got = import(other.as_fd(), dma_buf.as_raw_fd())?;
        cannot_fail(free(other.as_fd(), got.handle))
    })?;
    sweep_infallible("FREE", || {
        let got = import(other.as_fd(), dma_buf.as_raw_fd()).map_err(|_| 0);
        // Only failures of FREE count here.
        got.map_or(Ok(()), |got| cannot_fail(free(other.as_fd(), got.handle)))
    })?;
    drop(dma_buf);
    free(fd, first.handle).map_err(errno)?;
    // The cases `allocation-failures`, `allocation-failures-admin` and `allocation-failures-attach` sweep these calls.
    let elsewhere = [
        abi::P2PMEM_IOC_BUFFER,
        abi::P2PMEM_IOC_EXPORT_DMABUF,
        abi::P2PMEM_IOC_RULES,
        abi::P2PMEM_IOC_ATTACH_DMABUF,
        abi::P2PMEM_IOC_DETACH_DMABUF,
        abi::P2PMEM_IOC_ATTACHMENT,
    ];
    for call in abi::P2PMEM_IOCS {
        ensure!(
            SWEPT.load(Relaxed) & (1 << abi::ioc_nr(call)) != 0 || elsewhere.contains(&call),
            "ioctl {:#04x}: no case sweeps its allocations",
            abi::ioc_nr(call)
        );
    }
    bed.unpublish("accel1")
}

/// Sweeps the ioctls of attachments.
fn attaching(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let target = Held::new(bed, "accel1", MIB as usize)?;
    // Each page is a range of its own. Not host memory: the kernel's DMA debugging allocates memory for a mapping of it, and
    // ends if that fails.
    let pages: Vec<_> = (0..32).map(|page| (2 * page * PAGE, PAGE)).collect();
    let dma_buf = export(target.file.as_fd(), target.buffer.handle, 0, &pages).map_err(errno)?;
    let file = open()?;
    let fd = file.as_fd();
    arm()?;
    let cannot_fail = |answer: Result<(), i32>| answer.map_err(|_| libc::ENOTRECOVERABLE);
    let provider = bed.provider("accel0")?.id;
    sweep_fallible("ATTACH_DMABUF", &[], || {
        let attached = attach(fd, provider, &dma_buf, 0)?;
        cannot_fail(detach(fd, attached.answer.handle))
    })?;
    sweep_infallible("DETACH_DMABUF", || {
        let attached = attach(fd, provider, &dma_buf, 0).map_err(|_| 0);
        // Only failures of DETACH_DMABUF count here.
        attached.map_or(Ok(()), |attached| cannot_fail(detach(fd, attached.answer.handle)))
    })?;
    let attached = attach(fd, provider, &dma_buf, 0).map_err(errno)?;
    sweep("ATTACHMENT", &[], || {
        let mut ranges = vec![abi::p2pmem_dma_range::default(); 256];
        let mut ask = abi::p2pmem_attachment {
            handle: attached.answer.handle,
            nr_ranges: 256,
            ..Default::default()
        };
        sys::attachment(fd, &mut ask, Memory::Slice(&mut ranges))
    })?;
    ensure!(attached.answer.nr_ranges as usize == pages.len(), "{attached:x?}");
    detach(fd, attached.answer.handle).map_err(errno)?;
    drop((dma_buf, target));
    bed.unpublish("accel1")
}

/// Writes an attribute; the error is an errno.
fn set(path: &Path, text: &str) -> Result<(), i32> {
    code(std::fs::write(path, text))
}

fn code<T>(answer: std::io::Result<T>) -> Result<T, i32> {
    answer.map_err(|e| e.raw_os_error().unwrap_or(0))
}

fn exists(path: &Path) -> Result<bool, i32> {
    code(path.try_exists())
}

/// Checks a call that the module cannot fail. Only the kernel's own allocations before the module may fail: then the
/// result is ENOMEM, and `before` returns true because nothing changed. ENOTRECOVERABLE for any other result.
fn must_succeed(answer: Result<(), i32>, before: impl Fn() -> Result<bool, i32>) -> Result<(), i32> {
    match (answer, before()?) {
        (Ok(()), false) => Ok(()),
        (Err(libc::ENOMEM), true) => Err(libc::ENOMEM),
        _ => Err(libc::ENOTRECOVERABLE),
    }
}

/// A device with its sysfs and configfs folders.
struct AdminPaths {
    bdf: String,
    sysfs: PathBuf,
    dir: PathBuf,
}

impl AdminPaths {
    fn new(bed: &Bed) -> Result<Self> {
        let device = bed.device("accel0")?;
        Ok(Self {
            bdf: device.bdf.clone(),
            sysfs: device.sysfs(),
            dir: bed.provider_dir("accel0")?,
        })
    }

    fn is_bound(&self) -> Result<bool, i32> {
        exists(&self.sysfs.join("driver"))
    }

    fn bind(&self) -> Result<(), i32> {
        // drivers_probe does not report the result of a probe, and reports a failure of its own as EINVAL.
        let probed = set(Path::new("/sys/bus/pci/drivers_probe"), &self.bdf);
        if !self.is_bound()? {
            return Err(libc::ENOMEM);
        }
        probed.or_else(|e| if e == libc::EINVAL { Ok(()) } else { Err(e) })
    }

    fn unbind(&self) -> Result<(), i32> {
        must_succeed(set(&self.sysfs.join("driver/unbind"), &self.bdf), || self.is_bound())
    }

    fn is_enabled(&self) -> Result<bool, i32> {
        Ok(code(std::fs::read(self.dir.join("enable")))?.starts_with(b"1"))
    }

    fn enable(&self, on: bool) -> Result<(), i32> {
        set(&self.dir.join("enable"), if on { "1" } else { "0" })
    }
}

fn admin(bed: &mut Bed) -> Result<()> {
    let accel = AdminPaths::new(bed)?;
    arm()?;
    // If disabling fails, the provider stays enabled.
    sweep_fallible("enable 0 and 1", &[], || {
        if accel.is_enabled()? {
            accel.enable(false)?;
        }
        accel.enable(true)
    })?;
    sweep_fallible("pinned_exports", &[], || set(&accel.dir.join("pinned_exports"), "0"))?;
    // Unbinding cannot fail in the module. Binding can; then the device has no driver.
    bed.unpublish("accel0")?;
    sweep_fallible("binding and unbinding", &[libc::EINVAL], || {
        accel.bind()?;
        accel.unbind()
    })?;
    if !accel.is_bound().map_err(errno)? {
        accel.bind().map_err(errno)?;
    }
    sweep_fallible("a provider's directory", &[], || {
        if !exists(&accel.dir)? {
            code(std::fs::create_dir(&accel.dir))?;
        }
        must_succeed(code(std::fs::remove_dir(&accel.dir)), || exists(&accel.dir))
    })?;
    std::fs::create_dir(&accel.dir)?;
    for mode in ["pageless", "paged"] {
        write(&accel.dir.join("mode"), mode)?;
        sweep_fallible(&format!("publishing {mode}"), &[], || {
            if !accel.is_enabled()? {
                accel.enable(true)?;
            }
            accel.enable(false)
        })?;
        // Memory that has struct pages keeps them until the device is unbound.
        accel.unbind().map_err(errno)?;
        accel.bind().map_err(errno)?;
    }
    accel.enable(true).map_err(errno)?;
    // A rule whose quota is used up by a buffer.
    let file = open()?;
    let got = alloc(file.as_fd(), MIB).map_err(errno)?;
    let rule = Path::new("/sys/kernel/config/p2pmem/rules/50-each");
    sweep_fallible("a rule", &[], || {
        if !exists(rule)? {
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
    sweep_fallible("RULES of a file", &[], || {
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
    let accel = AdminPaths::new(bed)?;
    arm()?;
    let in_use = || -> Result<_> {
        bed.publish("accel0")?;
        let file = open()?;
        let (got, dma_buf) = exported_buffer(file.as_fd(), MIB, 0)?;
        let map = Mapping::shared(file.as_fd(), got.mmap_offset, MIB as usize).map_err(errno)?;
        map.set(0, 1);
        Ok((Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?, map, file))
    };
    // Only the write to `unbind` can fail, when the kernel cannot copy the written text.
    sweep_after("unbinding in use", &[], in_use, |held| accel.unbind().map(|()| held))?;
    sweep_after("disabling in use", &[], in_use, |held| {
        accel.enable(false).map(|()| held)
    })?;
    bed.publish("accel0")
}

/// The debugfs folder in which the debug kernel's RDMA core reports calls of its peer-memory clients.
const CORE: &str = "/sys/kernel/debug/ib_peer_mem";

/// Returns the lines about a call in the RDMA core's log, since the log was cleared.
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
    // The core calls `acquire` at most once. The module claims its memory whether or not the registration gets memory.
    // For memory that no client claims, the core would fail with EREMOTEIO.
    let swept = sweep_checked(
        1..MAX_ALLOCATIONS,
        "ibv_reg_mr()",
        &[],
        || write(&log, "clear"),
        |()| nic.register(held.map.address(), MIB as usize),
        |answer, _| {
            let acquired = core_calls("acquire")?;
            ensure!(acquired.len() <= 1, "{acquired:#?}");
            let owned = acquired.iter().all(|line| line.ends_with(" result=1"));
            ensure!(owned, "the module did not claim its own memory: {acquired:#?}");
            ensure!(
                answer.is_err() || acquired.len() == 1,
                "registered, but the core did not call acquire"
            );
            Ok(())
        },
    )?;
    ensure!(swept.failures > 0, "no allocation failed");
    await_rows("no registration is left", <[Row]>::is_empty)?;
    let counts = counted()?;
    ensure!(
        counts["acquire"] == counts["release"] && counts["out_of_order"] == 0,
        "{counts:?}"
    );
    Ok(())
}

/// Returns whether a file has events to read.
fn has_events(file: &std::fs::File) -> Result<bool, i32> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let answer = poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&now));
    answer.map(|ready| ready == 1).map_err(|e| e.raw_os_error())
}

fn events(bed: &mut Bed) -> Result<()> {
    let accel = AdminPaths::new(bed)?;
    let file = open()?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::NONBLOCK)?;
    arm()?;
    // If all events are read: remove and add the provider, for one event each.
    let pending = || {
        if !has_events(&file).map_err(errno)? {
            accel.enable(false).map_err(errno)?;
            accel.enable(true).map_err(errno)?;
        }
        Ok(())
    };
    sweep_after("poll()", &[], pending, |()| match has_events(&file)? {
        true => Ok(()),
        false => Err(libc::ENOTRECOVERABLE),
    })?;
    sweep_checked(
        1..MAX_ALLOCATIONS,
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
                Err(_) => ensure!(
                    has_events(&file).map_err(errno)?,
                    "read() failed, and the events are lost"
                ),
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
    // A page with other protection in each large entry makes the kernel map the memory by small entries.
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
            1..MAX_ALLOCATIONS,
            if small {
                "page faults"
            } else {
                "page faults of large entries"
            },
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
        ensure!(swept.failures == 0, "an access to the mapping failed");
        allocations += swept.allocations;
    }
    ensure!(allocations > 0, "no page fault allocated memory");
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
            1..MAX_ALLOCATIONS,
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
                until("no buffer is left", || Ok(buffers()? == 0))
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
            1..MAX_ALLOCATIONS,
            &format!("ALLOC in {name}"),
            &[],
            || Ok(()),
            |()| sys::alloc(fd, &mut ask, Memory::Slice(&mut [])).map(|()| ask.handle),
            |answer, _| {
                // No `free` before this check: the clearing after a free would also clear what the failed call left
                // dirty.
                until("no memory is dirty", || Ok(!is_clearing(&bed.provider(name)?)))?;
                answer.map_or(Ok(()), |handle| free(fd, handle).map_err(errno))
            },
        )?;
        ensure!(swept.failures > 0, "no allocation failed");
    }
    Ok(())
}

fn registering(bed: &mut Bed) -> Result<()> {
    let publisher = Publisher::new(bed)?;
    // pci_p2pdma_add_resource() does not survive failed allocations: on x86, init_memory_mapping() uses page tables
    // that were not allocated, and a failure after the devres action was added frees memory that the action uses.
    arm_within(&Within::Anything, "pci_p2pdma_add_resource")?;
    for how in ["paged", "pageless"] {
        // Memory that has struct pages keeps them until the driver is unbound.
        let bind_again = || {
            bed.unbind("accel0")?;
            publisher.bind()
        };
        let swept = sweep_checked(
            1..MAX_ALLOCATIONS,
            &format!("p2pmem_register_provider() {how}"),
            &[],
            bind_again,
            |()| publisher.publish(&format!("-1 0 0 0 {how}")),
            |answer, _| {
                let there = (publisher.id()? != 0, bed.provider("accel0").is_ok());
                ensure!(
                    there == (answer.is_ok(), answer.is_ok()),
                    "p2pmem_register_provider(): {answer:?}; id set, listed: {there:?}"
                );
                if answer.is_ok() {
                    publisher.withdraw()?;
                }
                // The driver is notified of the removal of a registered provider, and of nothing else.
                let notified = publisher.notified()?;
                ensure!(
                    notified == u32::from(answer.is_ok()),
                    "{answer:?}: the driver was notified {notified} times"
                );
                Ok(())
            },
        )?;
        ensure!(swept.failures > 0, "no allocation failed");
    }
    publisher.end()
}
