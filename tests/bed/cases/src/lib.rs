// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the module that run in a guest: the list of tests, the state before and after each test, and common
//! helpers.
//!
//! A case runs in its own process (`p2pmem-guest-tests run NAME`). Before the case, the module is loaded and `accel0`
//! is published. After the case, `accel0` must have as many free bytes and live buffers as before; otherwise the case
//! fails.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;
use rustix::process::{Resource, Rlimit, setrlimit};

use self::devices::{Device, Devices};
use self::limits::{is_long, scaled};
use self::sys::Memory;
// The modules of this crate name these modules as their own.
use p2pmem_guest::{devices, host, in_time, limits, sys, verbs, wire};

mod attach;
mod attach_end;
pub mod backends;
mod backends_vfio;
mod bad;
mod bars;
mod boundary;
mod bridges;
mod broadcast;
mod busy;
mod dmabuf;
mod dmabuf_end;
mod doctor;
mod faults;
mod faults_load;
mod folios;
mod fpga;
mod good;
mod growth;
mod hostile;
mod inflight;
mod late;
mod life;
mod locks;
mod namespaces;
mod near;
mod pageless;
mod paths;
mod peer;
mod peer_bad;
mod peer_end;
mod peer_iommu;
mod place;
mod pressure;
mod publisher;
mod rdma_hold;
mod rdma_programs;
mod rdma_stale;
mod rdma_user;
mod reset;
mod rings;
mod rules;
mod rules_bad;
mod rules_more;
mod share;
mod soft_dirty;
mod stray;
mod stripe;
mod teardown;
mod trace;
mod unplug;

/// The device node.
pub const NODE: &str = "/dev/p2pmem";
/// The configfs folder in which providers are created.
pub const PROVIDERS: &str = "/sys/kernel/config/p2pmem/providers";
/// Limit for freed memory to be cleared and counted as free.
const SETTLE: Duration = Duration::from_secs(20);

/// One test.
pub struct Case {
    /// The name, for `run NAME`.
    pub name: &'static str,
    /// What the test checks, in one line.
    pub about: &'static str,
    /// The topology that the test needs.
    pub topology: &'static str,
    /// Whether no other test can use the guest afterwards.
    pub ruins: bool,
    run: fn(&mut Bed) -> Result<()>,
}

/// Returns all tests.
pub fn all() -> impl Iterator<Item = &'static Case> {
    good::CASES
        .iter()
        .chain(bad::CASES)
        .chain(boundary::CASES)
        .chain(growth::CASES)
        .chain(life::CASES)
        .chain(folios::CASES)
        .chain(inflight::CASES)
        .chain(late::CASES)
        .chain(bars::CASES)
        .chain(teardown::CASES)
        .chain(hostile::CASES)
        .chain(pressure::CASES)
        .chain(reset::CASES)
        .chain(rings::CASES)
        .chain(fpga::CASES)
        .chain(unplug::CASES)
        .chain(place::CASES)
        .chain(paths::CASES)
        .chain(paths::RACES)
        .chain(bridges::CASES)
        .chain(dmabuf::CASES)
        .chain(dmabuf_end::CASES)
        .chain(attach::CASES)
        .chain(attach_end::CASES)
        .chain(pageless::CASES)
        .chain(soft_dirty::CASES)
        .chain(rdma_user::CASES)
        .chain(rdma_stale::CASES)
        .chain(rdma_hold::CASES)
        .chain(rdma_programs::CASES)
        .chain(doctor::CASES)
        .chain(near::CASES)
        .chain(rules::CASES)
        .chain(rules_bad::CASES)
        .chain(namespaces::CASES)
        .chain(rules_more::CASES)
        .chain(trace::CASES)
        .chain(locks::CASES)
        .chain(share::CASES)
        .chain(broadcast::CASES)
        .chain(stripe::CASES)
        .chain(publisher::CASES)
        .chain(peer::CASES)
        .chain(peer_bad::CASES)
        .chain(peer_end::CASES)
        .chain(peer_iommu::CASES)
        .chain(stray::CASES)
        .chain(faults::CASES)
        .chain(faults_load::CASES)
}

/// The kernels on which a test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels<'a> {
    /// The stock kernel and the debug kernel.
    Both,
    /// Only the stock kernel; the text is the reason.
    Stock(&'a str),
    /// Only the debug kernel; the text is the reason.
    Debug(&'a str),
}

const UVERBS_LEAK: Kernels<'static> = Kernels::Stock(
    "the debug kernel, of series 7.2, leaks the RDMA core's objects if a doorbell's dma-buf outlives its uverbs file",
);

const NO_SOFT_DIRTY: Kernels<'static> = Kernels::Stock("the debug kernel has no soft-dirty bits (MEM_SOFT_DIRTY)");

/// Tests that run on one kernel only, apart from those that [`kernels`] selects by their list.
const NOT_BOTH: &[(&str, Kernels<'static>)] = &[
    ("dmem", Kernels::Debug("the stock kernel has no dmem controller")),
    ("locks", Kernels::Debug("the stock kernel records no locks")),
    (
        "doctor-removed",
        Kernels::Stock(
            "the test stops doctor while it has a dma-buf; the debug kernel's RDMA core takes mappings instead",
        ),
    ),
    (
        "rdma-software",
        Kernels::Stock(
            "an RDMA core with the peer-memory interface also registers buffers with software NICs (case peer-software)",
        ),
    ),
    ("attach-killed", UVERBS_LEAK),
    ("attach-nic-unbind", UVERBS_LEAK),
    ("soft-dirty", NO_SOFT_DIRTY),
    ("pageless-soft-dirty", NO_SOFT_DIRTY),
    (
        "dmabuf-leak",
        Kernels::Stock(
            "the test counts memory lost in thousands of iterations; the debug kernel detects a leak in one iteration",
        ),
    ),
];

/// Tests of decisions, formats, and user-space programs. The stock kernel runs them always, and the debug kernel in long
/// runs: what its checks find is in life cycles, races, and failures, which other tests have.
const DEBUG_IN_LONG_RUNS: &[&[Case]] = &[
    good::CASES,
    growth::CASES,
    place::CASES,
    bridges::CASES,
    rdma_programs::CASES,
    doctor::CASES,
    near::CASES,
    rules::CASES,
    rules_bad::CASES,
    rules_more::CASES,
    trace::CASES,
    broadcast::CASES,
    unplug::CASES,
];

/// Like [`DEBUG_IN_LONG_RUNS`], by name: tests that take minutes on the debug kernel, and whose calls other tests make there, too.
const LONG_ON_DEBUG: &[&str] = &[
    "hostile-handles",
    "open-close",
    "attach-doorbell-iommu",
    "dmabuf-unreachable",
    "port-error",
    "port-error-held",
    "port-error-neighbor",
    "unbind-scale",
];

/// Tests of [`DEBUG_IN_LONG_RUNS`] that the debug kernel always runs: many processes at once, and drives that read and write.
const ALWAYS_ON_DEBUG: &[&str] = &[
    "stress",
    "fio",
    "o-direct",
    "mmap",
    "near-removed",
    "quota-kills",
    "quota-uncharge",
    "rules-race",
];

/// Returns the kernels on which a test runs.
pub fn kernels(case: &Case) -> Kernels<'static> {
    let one_of = |cases: &[&[Case]]| cases.iter().copied().flatten().any(|other| other.name == case.name);
    if one_of(&[peer::CASES, peer_bad::CASES, peer_end::CASES, peer_iommu::CASES]) {
        return Kernels::Debug("the stock kernel's RDMA core has no peer-memory interface");
    }
    if one_of(&[faults::CASES, faults_load::CASES]) {
        return Kernels::Debug("the stock kernel has no fault injection for allocations");
    }
    if one_of(&[paths::CASES]) {
        return Kernels::Stock("the module that reads the kernel's distances is built for the stock kernel");
    }
    let found = NOT_BOTH.iter().find(|(name, _)| *name == case.name);
    if let Some((_, kernels)) = found {
        return *kernels;
    }
    let decides = one_of(DEBUG_IN_LONG_RUNS) && !ALWAYS_ON_DEBUG.contains(&case.name);
    if !is_long() && (decides || LONG_ON_DEBUG.contains(&case.name)) {
        return Kernels::Stock("the debug kernel runs the test in a long run");
    }
    Kernels::Both
}

/// Runs a test by name.
///
/// # Errors
///
/// The test does not exist or fails, or `accel0` has other free bytes or buffers afterwards.
pub fn run(name: &str) -> Result<()> {
    let case = all()
        .find(|case| case.name == name)
        .with_context(|| format!("no test has the name {name:?}"))?;
    let mut bed = Bed::new()?;
    let before = bed.settled()?;
    (case.run)(&mut bed)?;
    if !case.ruins {
        bed.publish("accel0")?;
        let after = bed.settled()?;
        ensure!(
            after == before,
            "free bytes and buffers were {before:?} before, and are {after:?} now"
        );
    }
    Ok(())
}

/// Runs the part of a test that needs its own process.
///
/// # Errors
///
/// The part fails.
pub fn run_part(name: &str, arguments: &[String]) -> Result<()> {
    if name == backends::PART {
        return backends::part(arguments);
    }
    if name == dmabuf_end::PART {
        return dmabuf_end::part();
    }
    if name == attach_end::PART {
        return attach_end::part();
    }
    if name == boundary::PART {
        return boundary::part(arguments);
    }
    if name == share::PART {
        return share::part(arguments);
    }
    if name == rules::PART {
        return rules::part(arguments);
    }
    if name == trace::PART {
        return trace::part(arguments);
    }
    if name == peer_bad::PART {
        return peer_bad::part();
    }
    if name == pressure::PART {
        return pressure::part(arguments);
    }
    if name == namespaces::PART {
        return namespaces::part(arguments);
    }
    if name == hostile::PART {
        return hostile::part(arguments);
    }
    if name == teardown::PART {
        return teardown::part(arguments);
    }
    if name == peer_end::PART {
        return peer_end::part(arguments);
    }
    life::part(name, arguments)
}

/// A guest with the module loaded and `accel0` published.
pub struct Bed {
    /// The topology's devices.
    pub devices: Devices,
}

impl Bed {
    fn new() -> Result<Bed> {
        let bed = Bed {
            devices: devices::load()?,
        };
        bed.load_module()?;
        bed.publish("accel0")?;
        Ok(bed)
    }

    /// Loads the module, if it is not loaded.
    pub fn load_module(&self) -> Result<()> {
        if Path::new("/sys/module/p2pmem").exists() {
            return Ok(());
        }
        let module =
            std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE is not set: set it to the path of p2pmem.ko")?;
        // The modules that p2pmem depends on (the RDMA core) are loaded first; modprobe takes their names from modinfo.
        let script = "modprobe -a $(modinfo -F depends \"$0\" | tr , ' ') && insmod \"$0\"";
        command("sh", &["-c", script, &module])
    }

    /// Returns a device of the topology.
    pub fn device(&self, name: &str) -> Result<&Device> {
        self.devices
            .get(name)
            .with_context(|| format!("the topology has no {name}"))
    }

    /// Returns the block device of a drive.
    pub fn block(&self, name: &str) -> Result<PathBuf> {
        self.device(name)?
            .block
            .clone()
            .with_context(|| format!("{name} has no block device"))
    }

    /// Returns a device's PCI address in the form of the ABI.
    pub fn address(&self, name: &str) -> Result<abi::p2pmem_pci_addr> {
        parse_address(&self.device(name)?.bdf)
    }

    /// Returns a provider's folder in configfs.
    pub fn provider_dir(&self, name: &str) -> Result<PathBuf> {
        Ok(Path::new(PROVIDERS).join(&self.device(name)?.bdf))
    }

    /// Binds a device to the p2pmem driver and publishes it. Skips each step that is already done.
    pub fn publish(&self, name: &str) -> Result<()> {
        let device = self.device(name)?;
        let driver = device.sysfs().join("driver");
        if !driver.exists() {
            write(&device.sysfs().join("driver_override"), "p2pmem")?;
            write(Path::new("/sys/bus/pci/drivers_probe"), &device.bdf)?;
            ensure!(driver.exists(), "the p2pmem driver did not bind {name}");
        }
        let dir = self.provider_dir(name)?;
        if !dir.exists() {
            fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        }
        if read(&dir.join("enable"))? != "1" {
            write(&dir.join("enable"), "1").with_context(|| read(&dir.join("status")).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Removes a provider and unbinds the device.
    pub fn unpublish(&self, name: &str) -> Result<()> {
        let dir = self.provider_dir(name)?;
        if dir.exists() {
            fs::remove_dir(&dir).with_context(|| dir.display().to_string())?;
        }
        self.unbind(name)
    }

    /// Unbinds a device from its driver.
    pub fn unbind(&self, name: &str) -> Result<()> {
        let device = self.device(name)?;
        let driver = device.sysfs().join("driver");
        if driver.exists() {
            write(&driver.join("unbind"), &device.bdf)?;
        }
        Ok(())
    }

    /// Returns a device's provider as LIST reports it.
    pub fn provider(&self, name: &str) -> Result<abi::p2pmem_provider> {
        let address = self.address(name)?;
        let found = providers(open()?.as_fd())?
            .into_iter()
            .find(|p| p.addr.bus == address.bus && p.addr.devfn == address.devfn);
        found.with_context(|| format!("{name} is not a provider"))
    }

    /// Returns the free bytes and buffers of accel0, once no memory of it is dirty or pinned.
    pub fn settled(&self) -> Result<(u64, u32)> {
        let deadline = Instant::now() + scaled(SETTLE);
        loop {
            let p = self.provider("accel0")?;
            if !is_clearing(&p) && p.pinned == 0 {
                return Ok((p.free, p.buffers));
            }
            in_time!(
                Instant::now() < deadline,
                "after {SETTLE:?}, {} bytes are still dirty and {} pinned",
                p.scrubbing,
                p.pinned
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Returns whether a provider is clearing memory that was in use. Until then its free bytes still change.
pub fn is_clearing(provider: &abi::p2pmem_provider) -> bool {
    provider.flags & abi::P2PMEM_PROVIDER_CLEARING != 0
}

/// Sets the limit of open files of this process and its future children.
fn may_open(files: u32) -> Result<()> {
    let files = Some(u64::from(files));
    let limit = Rlimit {
        current: files,
        maximum: files,
    };
    setrlimit(Resource::Nofile, limit).context("setting the limit of open files")
}

/// Opens the device node.
pub fn open() -> Result<File> {
    OpenOptions::new().read(true).write(true).open(NODE).context(NODE)
}

/// Lists the providers.
pub fn providers(fd: BorrowedFd<'_>) -> Result<Vec<abi::p2pmem_provider>> {
    let mut rows = vec![abi::p2pmem_provider::default(); 64];
    let mut list = abi::p2pmem_list {
        count: rows.len() as u32,
        ..Default::default()
    };
    sys::list(fd, &mut list, Memory::Slice(&mut rows))
        .map_err(errno)
        .context("LIST")?;
    rows.truncate(list.count as usize);
    Ok(rows)
}

/// Returns a request for `size` bytes without clients.
pub fn request(size: u64) -> abi::p2pmem_alloc {
    abi::p2pmem_alloc {
        req: abi::p2pmem_request {
            size,
            ..Default::default()
        },
        ..Default::default()
    }
}

/// Allocates `size` bytes without clients.
pub fn alloc(fd: BorrowedFd<'_>, size: u64) -> Result<abi::p2pmem_alloc, i32> {
    let mut answer = request(size);
    sys::alloc(fd, &mut answer, Memory::Slice(&mut []))?;
    Ok(answer)
}

/// Frees a handle.
pub fn free(fd: BorrowedFd<'_>, handle: u32) -> Result<(), i32> {
    sys::plain(fd, abi::P2PMEM_IOC_FREE, &mut abi::p2pmem_free { handle, flags: 0 })
}

/// Returns the state of a buffer.
pub fn buffer(fd: BorrowedFd<'_>, handle: u32) -> Result<abi::p2pmem_buffer, i32> {
    let mut ask = abi::p2pmem_buffer {
        handle,
        ..Default::default()
    };
    sys::plain(fd, abi::P2PMEM_IOC_BUFFER, &mut ask)?;
    Ok(ask)
}

/// Explains the last decision or error of the file. Returns the answer, the verdicts, and the message.
pub fn explain_last(fd: BorrowedFd<'_>) -> Result<(abi::p2pmem_explain, Vec<abi::p2pmem_verdict>, String)> {
    let last = abi::p2pmem_explain {
        flags: abi::P2PMEM_EXPLAIN_LAST,
        ..Default::default()
    };
    explain(fd, last, &mut [])
}

/// Explains a request for clients. Returns the answer, at most eight verdicts, and the message.
pub fn explain(
    fd: BorrowedFd<'_>,
    mut explain: abi::p2pmem_explain,
    clients: &mut [abi::p2pmem_pci_addr],
) -> Result<(abi::p2pmem_explain, Vec<abi::p2pmem_verdict>, String)> {
    let mut verdicts = vec![abi::p2pmem_verdict::default(); 8];
    let mut text = [0u8; 512];
    (explain.nr_verdicts, explain.text_len) = (verdicts.len() as u32, text.len() as u32);
    explain.req.nr_clients = clients.len() as u32;
    sys::explain(
        fd,
        &mut explain,
        Memory::Slice(clients),
        Memory::Slice(&mut verdicts),
        Memory::Slice(&mut text),
    )
    .map_err(errno)
    .context("EXPLAIN")?;
    verdicts.truncate(explain.nr_verdicts as usize);
    let end = (explain.text_len as usize)
        .checked_sub(1)
        .filter(|&end| end > 0 && text.get(end) == Some(&0))
        .context("EXPLAIN returned no message")?;
    Ok((explain, verdicts, String::from_utf8_lossy(&text[..end]).into_owned()))
}

/// Converts an errno to an error.
pub fn errno(code: i32) -> anyhow::Error {
    std::io::Error::from_raw_os_error(code).into()
}

/// Fails unless a call ended with the errno `code`.
pub fn expect<T: std::fmt::Debug>(what: &str, answer: Result<T, i32>, code: i32) -> Result<()> {
    match answer {
        Err(got) if got == code => Ok(()),
        Err(got) => bail!("{what}: {} instead of {}", errno(got), errno(code)),
        Ok(got) => bail!("{what}: success ({got:?}) instead of {}", errno(code)),
    }
}

fn parse_address(bdf: &str) -> Result<abi::p2pmem_pci_addr> {
    let part = |range: std::ops::Range<usize>| -> Result<u32> {
        let text = bdf
            .get(range)
            .with_context(|| format!("{bdf:?} is not a PCI address"))?;
        Ok(u32::from_str_radix(text, 16)?)
    };
    let (domain, bus, device, function) = (part(0..4)?, part(5..7)?, part(8..10)?, part(11..12)?);
    Ok(abi::p2pmem_pci_addr {
        domain,
        bus: bus as u8,
        devfn: ((device << 3) | function) as u8,
        reserved: 0,
    })
}

/// Runs a program. If the program fails, its output is in the error.
pub fn command(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program} {}: {}: {}{}",
        arguments.join(" "),
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Writes an attribute.
pub fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {text:?} to {}", path.display()))
}

/// Reads an attribute without leading and trailing white space.
pub fn read(path: &Path) -> Result<String> {
    Ok(fs::read_to_string(path)
        .with_context(|| path.display().to_string())?
        .trim()
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_of_kernels_name_tests() {
        let named = NOT_BOTH.iter().map(|(name, _)| name);
        for name in named.chain(LONG_ON_DEBUG).chain(ALWAYS_ON_DEBUG) {
            assert!(all().any(|case| case.name == *name), "no test has the name {name:?}");
        }
        for name in ALWAYS_ON_DEBUG {
            let mut cases = DEBUG_IN_LONG_RUNS.iter().copied().flatten();
            assert!(
                cases.any(|case| case.name == *name),
                "the debug kernel runs {name:?} anyway"
            );
        }
    }
}
