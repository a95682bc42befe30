// SPDX-License-Identifier: MIT OR Apache-2.0

//! `doctor`: checks all preconditions of peer-to-peer memory; each failure comes with a remedy.

mod kernel;
mod memory;
mod pair;
mod paths;
mod rdma;

use std::fmt;

use p2pmem::inventory::{Inventory, Release};
use p2pmem::{devices_in, ErrorKind, PciDevice};
use serde::Serialize;

use crate::cli::DoctorArgs;
use crate::environment::Environment;
use crate::table::{cell, message, on_request, optional, text, Column, Row, Table, BAD, BOLD, FAINT, GOOD, WARNING};
use crate::{Context, Outcome};

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    /// The precondition holds.
    Ok,
    /// Information without a rating.
    Info,
    /// Some functions do not work, or work more slowly.
    Warning,
    /// Peer-to-peer memory does not work.
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

/// The result of one check.
#[derive(Debug, Serialize)]
pub(crate) struct Check {
    check: &'static str,
    level: Level,
    /// The result in words.
    found: String,
    /// What the user can do.
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
    /// What `--pair` measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pair: Option<pair::Pair>,
}

pub(crate) fn doctor(context: &mut Context<'_>, args: &DoctorArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<Check>(context)? else {
        return Ok(Outcome::Done);
    };
    let (checks, pair) = match args.pair.as_slice() {
        [nic, device] => {
            let (checks, pair) = pair::measure(context, nic, device)?;
            (checks, Some(pair))
        }
        _ => (examine(context.environment), None),
    };
    let report = Report {
        ok: checks.iter().all(|c| c.level != Level::Failure),
        checks,
        pair,
    };
    if context.json {
        context.print_json(&report)?;
    } else if args.table.is_plain() {
        write!(context.out, "{}", table.render(&report.checks))?;
    } else {
        write!(context.out, "{}", render_report(&report, &table))?;
    }
    Ok(Outcome::of(report.ok))
}

impl Row for Check {
    const COLUMNS: &'static [Column<Self>] = &[
        text("LEVEL", "ok, info, WARN, or FAIL", |check, _| {
            cell(check.level).style(match check.level {
                Level::Ok => GOOD,
                Level::Info => FAINT,
                Level::Warning => WARNING,
                Level::Failure => BAD,
            })
        }),
        text("CHECK", "name of the check", |check, _| cell(check.check)),
        message("FOUND", "the result in words", |check, _| cell(&check.found)),
        on_request(message("REMEDY", "what to do", |check, _| {
            optional(check.remedy.as_ref())
        })),
    ];
}

fn render_report(report: &Report, table: &Table<Check>) -> String {
    let mut out = table.render(&report.checks);
    let remedies: Vec<_> = report
        .checks
        .iter()
        .filter_map(|check| Some((check.check, check.remedy.as_deref()?)))
        .collect();
    if !remedies.is_empty() {
        out += "\nRemedies:\n";
    }
    for (check, remedy) in remedies {
        out += &format!("  {BOLD}{check}:{BOLD:#} {remedy}\n");
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
    let opened = (machine.open)();
    // Without the module, the checks say what the module would find. That it is missing is reported once.
    let without = !machine.has_module()
        && matches!(&opened, Err(error) if matches!(error.kind(), ErrorKind::ModuleMissing | ErrorKind::NotFound));
    let providers = opened.as_ref().ok().and_then(|device| device.providers().ok());
    let providers: Option<Vec<_>> = providers.map(|all| all.iter().map(|provider| provider.addr).collect());
    let memory_devices = Inventory::read_in(&machine.root, providers.as_deref())
        .map_or_else(|_| Vec::new(), |inventory| inventory.memory_devices);
    let mut checks = vec![module(machine)];
    if without {
        checks.push(memory::publishable(&memory_devices));
    } else {
        checks.extend(device(opened));
    }
    checks.push(kernel::release(machine));
    checks.push(kernel::config(machine));
    checks.push(kernel::signatures(machine));
    checks.push(configfs(machine, without));
    checks.push(paths::host_bridges(machine, &devices));
    checks.push(paths::iommu(machine));
    checks.push(paths::acs(machine, &devices));
    checks.push(paths::bars(&memory_devices));
    checks.extend(memory::of_drivers(&memory_devices));
    checks.extend(rdma::rdma(machine));
    checks
}

/// Returns what the check of the host bridges found, for other commands.
pub(crate) fn host_bridge_summary(machine: &Environment, devices: &[PciDevice]) -> String {
    paths::host_bridges(machine, devices).found
}

/// Returns the first kernel release that can load the module, if that of the machine is older.
pub(crate) fn needed_release(machine: &Environment) -> Option<Release> {
    kernel::needed_release(machine)
}

fn module(machine: &Environment) -> Check {
    if machine.has_module() {
        Check::new("module", Level::Ok, "p2pmem is loaded")
    } else {
        Check::new("module", Level::Failure, "p2pmem is not loaded")
            .remedy("modprobe p2pmem; if the module is not installed, build and install it: make modules install")
    }
}

/// Checks the device file, the ABI version, and the providers.
fn device(opened: p2pmem::Result<p2pmem::Device>) -> Vec<Check> {
    let device = match opened {
        Ok(device) => device,
        Err(error) => {
            let check = if matches!(error, p2pmem::Error::Abi { .. }) {
                "abi-version"
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
    let mut checks = vec![Check::new("device", Level::Ok, "opened")];
    match device.info() {
        Ok(info) if info.missing().is_empty() => checks.push(Check::new(
            "abi-version",
            Level::Ok,
            format!("{}, supported by this program", info.abi_version),
        )),
        Ok(info) => {
            let text = format!("{}, does not support {}", info.abi_version, info.missing().join(", "));
            checks.push(Check::new("abi-version", Level::Warning, text).remedy("install a newer module"));
        }
        Err(error) => checks.push(Check::new("abi-version", Level::Failure, error.to_string())),
    }
    checks.push(match device.providers() {
        Ok(providers) if providers.is_empty() => Check::new("providers", Level::Warning, "none")
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

/// Checks the file system by which devices are published. `without`: the module is missing, which another check reports.
fn configfs(machine: &Environment, without: bool) -> Check {
    const NAME: &str = "configfs";
    let mounts = machine.read("proc/mounts").unwrap_or_default();
    let mounted = mounts.lines().any(|l| {
        let mut fields = l.split(' ').skip(1);
        fields.next() == Some("/sys/kernel/config") && fields.next() == Some("configfs")
    });
    if without && mounted {
        return Check::new(NAME, Level::Ok, "mounted; the module adds p2pmem/providers");
    }
    if !mounted {
        let level = if without { Level::Warning } else { Level::Failure };
        return Check::new(NAME, level, "not mounted, so no device can be published")
            .remedy("mount -t configfs none /sys/kernel/config");
    }
    if machine.path("sys/kernel/config/p2pmem/providers").exists() {
        Check::new(NAME, Level::Ok, "mounted, with p2pmem/providers")
    } else {
        Check::new(NAME, Level::Failure, "mounted, but without p2pmem/providers").remedy("modprobe p2pmem")
    }
}

#[cfg(test)]
mod tests;
