// SPDX-License-Identifier: MIT OR Apache-2.0

//! `doctor`: every precondition of peer-to-peer memory checked, each failure with its remedy.

use std::fmt;

use p2pmem::inventory::DmaBufSupport;
use p2pmem::{devices_in, PciDevice};
use serde::Serialize;

use crate::environment::Environment;
use crate::{Context, Outcome};

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing, neither good nor bad.
    Info,
    /// Works, but some things do not, or slower.
    Warning,
    /// Peer-to-peer memory does not work so.
    Failure,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Info => "info",
            Self::Warning => "WARN",
            Self::Failure => "FAIL",
        })
    }
}

#[derive(Debug, Serialize)]
struct Check {
    check: &'static str,
    level: Level,
    /// What was found.
    found: String,
    /// What to do.
    remedy: Option<String>,
}

impl Check {
    fn new(check: &'static str, level: Level, found: impl Into<String>) -> Self {
        Self {
            check,
            level,
            found: found.into(),
            remedy: None,
        }
    }

    fn remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..self
        }
    }
}

#[derive(Serialize)]
struct Report {
    ok: bool,
    checks: Vec<Check>,
}

pub(crate) fn doctor(context: &mut Context<'_>) -> anyhow::Result<Outcome> {
    let checks = examine(context.environment);
    let report = Report {
        ok: checks.iter().all(|c| c.level != Level::Failure),
        checks,
    };
    if context.json {
        context.print_json(&report)?;
    } else {
        write!(context.out, "{}", render_report(&report))?;
    }
    Ok(Outcome::of(report.ok))
}

fn render_report(report: &Report) -> String {
    let width = report.checks.iter().map(|c| c.check.len()).max().unwrap_or(0);
    let mut out = String::new();
    for Check {
        check,
        level,
        found,
        remedy,
    } in &report.checks
    {
        out += &format!("{level:<4}  {check:<width$}  {found}\n");
        if let Some(remedy) = remedy {
            out += &format!("{:6}{:width$}  -> {remedy}\n", "", "");
        }
    }
    let count = |level| report.checks.iter().filter(|c| c.level == level).count();
    out += &format!(
        "\n{} failures, {} warnings\n",
        count(Level::Failure),
        count(Level::Warning)
    );
    out
}

fn examine(machine: &Environment) -> Vec<Check> {
    let devices = devices_in(&machine.path("sys")).unwrap_or_default();
    let mut checks = vec![module(machine)];
    checks.extend(device(machine));
    checks.push(kernel_config(machine));
    checks.push(configfs(machine));
    checks.push(host_bridge(machine, &devices));
    checks.push(iommu(machine));
    checks.push(acs(machine, &devices));
    checks.extend(rdma(machine));
    checks
}

fn module(machine: &Environment) -> Check {
    if machine.path("sys/module/p2pmem").exists() {
        let version = machine
            .read("sys/module/p2pmem/version")
            .map(|v| format!(", version {v}"))
            .unwrap_or_default();
        Check::new("module", Level::Ok, format!("p2pmem is loaded{version}"))
    } else {
        Check::new("module", Level::Failure, "p2pmem is not loaded")
            .remedy("modprobe p2pmem; if there is no such module, build and install it: make modules install")
    }
}

/// The device, the version of its ABI, and its providers.
fn device(machine: &Environment) -> Vec<Check> {
    let device = match (machine.open)() {
        Ok(device) => device,
        Err(error) => {
            let check = if matches!(error, p2pmem::Error::Abi { .. }) {
                "ABI version"
            } else {
                "device"
            };
            let failed = Check::new(check, Level::Failure, error.to_string());
            return vec![Check {
                remedy: error.remedy().map(str::to_owned),
                ..failed
            }];
        }
    };
    let mut checks = vec![Check::new("device", Level::Ok, "it can be opened")];
    match device.info() {
        Ok(info) if info.missing().is_empty() => checks.push(Check::new(
            "ABI version",
            Level::Ok,
            format!("{}, which this program works with", info.abi_version),
        )),
        Ok(info) => {
            let text = format!("{}, without {}", info.abi_version, info.missing().join(", "));
            checks.push(Check::new("ABI version", Level::Warning, text).remedy("install a newer module"));
        }
        Err(error) => checks.push(Check::new("ABI version", Level::Failure, error.to_string())),
    }
    checks.push(match device.providers() {
        Ok(providers) if providers.is_empty() => Check::new("providers", Level::Warning, "there are none")
            .remedy("publish a device's memory: p2pmemctl publish DEVICE"),
        Ok(providers) => {
            let list: Vec<_> = providers
                .iter()
                .map(|p| format!("{} ({})", p.addr, p2pmem::human_size(p.size)))
                .collect();
            Check::new("providers", Level::Ok, list.join(", "))
        }
        Err(error) => Check::new("providers", Level::Failure, error.to_string()),
    });
    checks
}

fn kernel_config(machine: &Environment) -> Check {
    const NAME: &str = "kernel config";
    let release = machine.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let places = [
        format!("boot/config-{release}"),
        format!("lib/modules/{release}/config"),
        format!("usr/lib/modules/{release}/config"),
        format!("lib/modules/{release}/build/.config"),
    ];
    if let Some(config) = places.iter().find_map(|place| machine.read(place)) {
        return if config.lines().any(|l| l == "CONFIG_PCI_P2PDMA=y") {
            Check::new(NAME, Level::Ok, format!("{release} has CONFIG_PCI_P2PDMA=y"))
        } else {
            Check::new(
                NAME,
                Level::Failure,
                format!("{release} is built without CONFIG_PCI_P2PDMA=y"),
            )
            .remedy("boot a kernel with CONFIG_PCI_P2PDMA=y, such as Debian's")
        };
    }
    // If there is no config, the running kernel's symbols show the option.
    match has_symbol(machine, "pci_p2pdma_distance_many") {
        Some(true) => Check::new(NAME, Level::Ok, format!("{release} has PCI P2PDMA (by its symbols)")),
        Some(false) => Check::new(
            NAME,
            Level::Failure,
            format!("{release} has no PCI P2PDMA (by its symbols)"),
        )
        .remedy("boot a kernel with CONFIG_PCI_P2PDMA=y, such as Debian's"),
        None => Check::new(
            NAME,
            Level::Info,
            "neither the kernel's config nor its symbols can be read here",
        ),
    }
}

/// Whether the running kernel, or a module in it, has a symbol; none where the list cannot be read.
fn has_symbol(machine: &Environment, symbol: &str) -> Option<bool> {
    let all = machine.read("proc/kallsyms")?;
    if all.is_empty() {
        return None;
    }
    Some(all.lines().any(|line| line.split_whitespace().nth(2) == Some(symbol)))
}

fn configfs(machine: &Environment) -> Check {
    const NAME: &str = "configfs";
    let mounts = machine.read("proc/mounts").unwrap_or_default();
    let mounted = mounts.lines().any(|l| {
        let mut fields = l.split(' ').skip(1);
        fields.next() == Some("/sys/kernel/config") && fields.next() == Some("configfs")
    });
    if !mounted {
        return Check::new(NAME, Level::Failure, "it is not mounted, so nothing can be published")
            .remedy("mount -t configfs none /sys/kernel/config");
    }
    if machine.path("sys/kernel/config/p2pmem/providers").exists() {
        Check::new(NAME, Level::Ok, "it is mounted and has p2pmem/providers")
    } else {
        Check::new(NAME, Level::Failure, "it is mounted but has no p2pmem/providers").remedy("modprobe p2pmem")
    }
}

/// Devices at the start of a root bus behind which the kernel (drivers/pci/p2pdma.c of 7.2) trusts the root complex
/// with peer traffic: vendor, device, and whether only among devices of one host bridge.
const TRUSTED_HOST_BRIDGES: [(u16, u16, bool); 20] = [
    (0x8086, 0x3c00, true),
    (0x8086, 0x3c01, true),
    (0x8086, 0x2f00, true),
    (0x8086, 0x2f01, true),
    (0x8086, 0x2030, false),
    (0x8086, 0x2031, false),
    (0x8086, 0x2032, false),
    (0x8086, 0x2033, false),
    (0x8086, 0x2020, false),
    (0x8086, 0x09a2, false),
    (0x8086, 0x0b25, false),
    (0x8086, 0x0cfe, false),
    (0x8086, 0x11fb, false),
    (0x8086, 0x1212, false),
    (0x8086, 0x1216, false),
    (0x8086, 0x4940, false),
    (0x8086, 0x4942, false),
    (0x8086, 0x4944, false),
    (0x8086, 0x4946, false),
    (0x8086, 0x4948, false),
];
const GOOGLE: u16 = 0x1ae0;

fn host_bridge(machine: &Environment, devices: &[PciDevice]) -> Check {
    const NAME: &str = "host bridge";
    let cpuinfo = machine.read("proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo
            .lines()
            .find(|l| l.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let family: u32 = field("cpu family").and_then(|f| f.parse().ok()).unwrap_or(0);
    if field("vendor_id").as_deref() == Some("AuthenticAMD") && family >= 0x17 {
        return Check::new(
            NAME,
            Level::Ok,
            format!("AMD family {family:#x}: peer traffic may cross the root complex"),
        );
    }
    // The first device of each root bus stands for its host bridge; root buses hold what no bridge of ours leads to.
    let root = devices.iter().find(|d| d.addr.devfn == 0 && machine_root(machine, d));
    let Some(root) = root else {
        return Check::new(
            NAME,
            Level::Info,
            "no host bridge can be seen; `p2pmemctl topo` shows the kernel's verdicts",
        );
    };
    let id = format!("{:04x}:{:04x}", root.vendor, root.device);
    match TRUSTED_HOST_BRIDGES
        .iter()
        .find(|t| (t.0, t.1) == (root.vendor, root.device))
    {
        Some((_, _, true)) => Check::new(
            NAME,
            Level::Ok,
            format!("{id} is trusted with peer traffic below one host bridge"),
        ),
        Some(_) => Check::new(NAME, Level::Ok, format!("{id} is trusted with peer traffic")),
        None if root.vendor == GOOGLE => Check::new(NAME, Level::Ok, format!("{id} is trusted with peer traffic")),
        None => Check::new(
            NAME,
            Level::Warning,
            format!("{id} is not on the kernel's list, so only devices below one switch reach each other"),
        )
        .remedy(
            "put provider and clients below one PCIe switch; `p2pmemctl topo` shows the kernel's verdict for each pair",
        ),
    }
}

/// True for a device right on a root bus.
fn machine_root(machine: &Environment, device: &PciDevice) -> bool {
    let link = machine.path("sys/bus/pci/devices").join(device.addr.to_string());
    let parent = link
        .canonicalize()
        .ok()
        .and_then(|p| Some(p.parent()?.file_name()?.to_str()?.to_owned()));
    parent.is_some_and(|name| name.starts_with("pci"))
}

fn iommu(machine: &Environment) -> Check {
    const NAME: &str = "IOMMU";
    let groups = machine
        .path("sys/kernel/iommu_groups")
        .read_dir()
        .into_iter()
        .flatten()
        .flatten();
    let mut modes: Vec<String> = groups
        .filter_map(|g| std::fs::read_to_string(g.path().join("type")).ok())
        .map(|t| t.trim().to_owned())
        .collect();
    modes.sort();
    modes.dedup();
    match modes.as_slice() {
        [] => Check::new(NAME, Level::Ok, "none is active: devices use bus addresses"),
        [one] if one == "identity" => Check::new(NAME, Level::Ok, "passed through: devices use bus addresses"),
        modes => Check::new(
            NAME,
            Level::Warning,
            format!(
                "it translates ({}): it sends peer traffic of devices it isolates through the root complex",
                modes.join(", ")
            ),
        )
        .remedy("for the shortest paths boot with iommu=pt, if devices need not be isolated from each other"),
    }
}

/// ACS control bits that send peer traffic up to the root complex: request redirect, completion redirect, egress
/// control.
const ACS_REDIRECT: u16 = 0x04 | 0x08 | 0x20;

/// ACS control word of the PCI function whose config space this is. None: it has no ACS capability. An error: not all
/// of the config space can be read.
fn acs_control(config: &[u8]) -> Result<Option<u16>, ()> {
    if config.len() < 4096 {
        // Without privileges only 64 bytes are shown; conventional PCI has 256 in all, and no ACS.
        return if config.len() == 256 { Ok(None) } else { Err(()) };
    }
    let word = |at: usize| u16::from_le_bytes([config[at], config[at + 1]]);
    let mut at = 0x100;
    // As many capabilities as fit: a loop in a broken device's list must not be one here.
    for _ in 0..(4096 - 0x100) / 8 {
        let (id, next) = (word(at), word(at + 2) >> 4);
        if id == 0x000d {
            return Ok(Some(word(at + 6)));
        }
        at = usize::from(next) & !3;
        if !(0x100..=4096 - 8).contains(&at) {
            break;
        }
    }
    Ok(None)
}

fn acs(machine: &Environment, devices: &[PciDevice]) -> Check {
    const NAME: &str = "ACS";
    let (mut redirecting, mut unknown) = (Vec::new(), 0);
    for bridge in devices.iter().filter(|d| d.class >> 8 == 0x0604) {
        let path = machine
            .path("sys/bus/pci/devices")
            .join(bridge.addr.to_string())
            .join("config");
        match acs_control(&std::fs::read(path).unwrap_or_default()) {
            Ok(Some(control)) if control & ACS_REDIRECT != 0 => redirecting.push(bridge.addr.to_string()),
            Ok(_) => {}
            Err(()) => unknown += 1,
        }
    }
    if !redirecting.is_empty() {
        let list = redirecting.join(", ");
        let bridges = redirecting.join(";");
        Check::new(
            NAME,
            Level::Warning,
            format!("these ports send peer traffic up to the root complex: {list}"),
        )
        .remedy(format!(
            "where isolation is not needed boot with pci=disable_acs_redir={bridges}"
        ))
    } else if unknown > 0 {
        Check::new(
            NAME,
            Level::Info,
            format!("of {unknown} bridges the config space cannot be read"),
        )
        .remedy("run doctor as root")
    } else {
        Check::new(NAME, Level::Ok, "no port redirects peer traffic")
    }
}

fn rdma(machine: &Environment) -> Vec<Check> {
    const NAME: &str = "RDMA";
    let entries = machine
        .path("sys/class/infiniband")
        .read_dir()
        .into_iter()
        .flatten()
        .flatten();
    let mut nics: Vec<_> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    nics.sort();
    if nics.is_empty() {
        return vec![Check::new(NAME, Level::Info, "there are no RDMA devices")];
    }
    let mut checks = vec![Check::new(NAME, Level::Ok, nics.join(", "))];
    checks.extend(nics.iter().map(|nic| dma_bufs(machine, nic)));
    let core = match machine.read("sys/module/ib_core/version") {
        Some(version) => format!("ib_core {version}"),
        None => "the kernel's own ib_core".into(),
    };
    checks.push(peer_memory(machine, &core));
    checks
}

/// Whether the RDMA core has the peer-memory interface, and what follows from it.
fn peer_memory(machine: &Environment, core: &str) -> Check {
    const NAME: &str = "RDMA peer memory";
    const DMA_BUF_ONLY: &str = "buffers are registered as dma-bufs, by ibv_reg_dmabuf_mr(), not by ibv_reg_mr()";
    let state = machine.read("sys/kernel/debug/p2pmem/peer_memory").unwrap_or_default();
    let says = |name: &str| state.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let (interface, form) = (says("interface "), says("registered_as "));
    match (has_symbol(machine, "ib_register_peer_memory_client"), interface, form) {
        (_, Some(symvers), Some(form @ ("ex" | "legacy"))) if symvers != "none" => Check::new(
            NAME,
            Level::Ok,
            format!(
                "{core} has the interface (as {symvers} had when the module was built), and the module is its client \
                 ({form}): ibv_reg_mr() takes mapped buffers, ibv_reg_dmabuf_mr() dma-bufs"
            ),
        ),
        (_, Some(symvers), Some("persistent")) if symvers != "none" => Check::new(
            NAME,
            Level::Warning,
            format!(
                "{core} has the interface, and the module is its client (persistent): what ibv_reg_mr() registers \
                 cannot be revoked, and the removal of a provider waits for it"
            ),
        )
        .remedy("load the module with peer_memory=ex"),
        (_, Some(symvers), _) if symvers != "none" => Check::new(
            NAME,
            Level::Warning,
            format!("the module is no client of {core}, by its parameter or as the core refused it: {DMA_BUF_ONLY}"),
        )
        .remedy("load the module with peer_memory=ex; the kernel's log says why it is refused"),
        (Some(true), Some(_), _) => Check::new(
            NAME,
            Level::Warning,
            format!("{core} has the interface, which the module was built without: {DMA_BUF_ONLY}"),
        )
        .remedy("build the module again where that core's Module.symvers is, or with PEER_SYMVERS=<that file>"),
        (Some(true), None, _) => Check::new(
            NAME,
            Level::Info,
            format!("{core} has the interface; whether the module is its client cannot be read here"),
        )
        .remedy("run doctor as root, with the module loaded and debugfs mounted"),
        (Some(false), ..) => Check::new(
            NAME,
            Level::Info,
            format!("{core} does not have the interface: {DMA_BUF_ONLY}"),
        ),
        (None, ..) => Check::new(NAME, Level::Info, "the kernel's symbols cannot be read here"),
    }
}

/// Whether buffers can be registered with a NIC on a stock kernel.
fn dma_bufs(machine: &Environment, nic: &str) -> Check {
    const NAME: &str = "RDMA dma-buf";
    let driver = machine.path("sys/class/infiniband").join(nic).join("device/driver");
    let driver = std::fs::read_link(driver).ok();
    let driver = driver.as_ref().and_then(|link| link.file_name()?.to_str());
    let Some(driver) = driver else {
        return Check::new(
            NAME,
            Level::Warning,
            format!("{nic} is on no PCI device: the kernel's own software cannot reach other devices' memory"),
        )
        .remedy("use a hardware NIC for buffers");
    };
    let found = |text: &str| format!("{nic} ({driver}) {text}");
    match (driver, DmaBufSupport::of_driver(driver)) {
        ("mlx5_core", _) => Check::new(
            NAME,
            Level::Ok,
            found(&format!(
                "registers dma-bufs and lets go of them on request, where its firmware has on-demand paging: \
                 `p2pmemctl selftest --provider P --nic {nic}` tries it"
            )),
        ),
        (_, DmaBufSupport::Revocable) => Check::new(
            NAME,
            Level::Ok,
            found("registers dma-bufs and lets go of them on request"),
        ),
        (_, DmaBufSupport::Pinned) => Check::new(
            NAME,
            Level::Warning,
            found("only pins dma-bufs permanently, so that their provider could not be removed: this is refused by default"),
        )
        .remedy("allow it by the provider's configfs attribute pinned_exports, and register pinned"),
        _ => Check::new(NAME, Level::Warning, found("is not known to register dma-bufs"))
            .remedy(format!("try it: p2pmemctl selftest --provider P --nic {nic}")),
    }
}

#[cfg(test)]
mod tests;
