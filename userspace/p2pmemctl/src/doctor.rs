// SPDX-License-Identifier: MIT OR Apache-2.0

//! `doctor`: checks all preconditions of peer-to-peer memory; each failure comes with a remedy.

mod kernel;
mod paths;
mod rdma;

use std::fmt;

use p2pmem::devices_in;
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
}

pub(crate) fn doctor(context: &mut Context<'_>, args: &DoctorArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<Check>(context)? else {
        return Ok(Outcome::Done);
    };
    let checks = examine(context.environment);
    let report = Report {
        ok: checks.iter().all(|c| c.level != Level::Failure),
        checks,
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
    let mut checks = vec![module(machine)];
    checks.extend(device(machine));
    checks.push(kernel::release(machine));
    checks.push(kernel::config(machine));
    checks.push(kernel::signatures(machine));
    checks.push(configfs(machine));
    checks.push(paths::host_bridge(machine, &devices));
    checks.push(paths::iommu(machine));
    checks.push(paths::acs(machine, &devices));
    checks.push(paths::bars(machine));
    checks.extend(rdma::rdma(machine));
    checks
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
fn device(machine: &Environment) -> Vec<Check> {
    let device = match (machine.open)() {
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

fn configfs(machine: &Environment) -> Check {
    const NAME: &str = "configfs";
    let mounts = machine.read("proc/mounts").unwrap_or_default();
    let mounted = mounts.lines().any(|l| {
        let mut fields = l.split(' ').skip(1);
        fields.next() == Some("/sys/kernel/config") && fields.next() == Some("configfs")
    });
    if !mounted {
        return Check::new(NAME, Level::Failure, "not mounted, so no device can be published")
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
