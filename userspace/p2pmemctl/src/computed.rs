// SPDX-License-Identifier: MIT OR Apache-2.0

//! Answers that are computed from sysfs because the module cannot be used, and how they can differ from the module's.

use p2pmem::{devices_in, ErrorKind, PciAddr, Walk};
use serde::Serialize;

use crate::doctor;
use crate::environment::{Context, Environment};

/// Why a command does not use the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Obstacle {
    /// The module is not loaded.
    NotLoaded,
    /// The user may not open the module's device.
    NotPermitted,
}

/// An answer that is computed from sysfs.
#[derive(Debug, Serialize)]
pub(crate) struct Computed {
    /// Why the module was not used.
    module: Obstacle,
    /// Bridges above the devices of the answer whose configuration space only root can read: whether they redirect by ACS
    /// is unknown.
    unreadable_bridges: Vec<PciAddr>,
    /// How the answer can differ from that of the module.
    caveats: Vec<String>,
    /// What to do.
    remedy: String,
}

/// The module's device, or why a command cannot use it.
pub(crate) enum Access {
    Module(p2pmem::Device),
    Sysfs(Without),
}

/// A command without the module.
pub(crate) struct Without(Obstacle);

impl Context<'_> {
    /// Opens the module's device. Succeeds also if the module is not loaded or the user may not use it.
    ///
    /// # Errors
    ///
    /// The device cannot be opened for another reason.
    pub(crate) fn access(&self) -> anyhow::Result<Access> {
        let error = match (self.environment.open)() {
            Ok(device) => return Ok(Access::Module(device)),
            Err(error) => error,
        };
        match error.kind() {
            ErrorKind::ModuleMissing => Ok(Access::Sysfs(Without(Obstacle::NotLoaded))),
            ErrorKind::PermissionDenied => Ok(Access::Sysfs(Without(Obstacle::NotPermitted))),
            _ => Err(error.into()),
        }
    }
}

impl Without {
    /// Describes an answer about paths between these devices.
    pub(crate) fn computed(&self, machine: &Environment, addrs: &[PciAddr]) -> Computed {
        let sys = machine.path("sys");
        let walks = addrs.iter().filter_map(|addr| Walk::read(&sys, *addr));
        let mut unreadable: Vec<_> = walks
            .flat_map(|walk| walk.bridges().to_vec())
            .filter(|port| port.acs_redirect.is_none())
            .map(|port| port.addr)
            .collect();
        unreadable.sort();
        unreadable.dedup();
        let devices = devices_in(&sys).unwrap_or_default();
        let host_bridge = doctor::host_bridge_summary(machine, &devices);
        let mut caveats = vec![format!(
            "paths through the root complex (PHB, NODE, SYS) count as usable; {host_bridge}"
        )];
        let mut steps: Vec<String> = Vec::new();
        if !unreadable.is_empty() {
            let count = unreadable.len();
            caveats.push(format!(
                "whether ports redirect by ACS is unknown: only root can read the configuration space of {count} {}",
                if count == 1 { "bridge" } else { "bridges" }
            ));
            steps.push("run as root to see ports that redirect by ACS".into());
        }
        match self.0 {
            Obstacle::NotLoaded => {
                let boot = doctor::needed_release(machine).map_or_else(String::new, |(major, minor)| {
                    format!("boot Linux {major}.{minor} or later, and ")
                });
                steps.push(format!(
                    "{boot}load the module (modprobe p2pmem) for the kernel's decisions"
                ));
            }
            Obstacle::NotPermitted => {
                caveats.push("providers, used memory, and rules are not known".into());
                // Root can do both.
                steps.clear();
                steps.push(
                    "run as root, or join the group of the device (usermod -aG p2pmem USER) and log in again, to see \
                     providers and the kernel's decisions"
                        .into(),
                );
            }
        }
        Computed {
            module: self.0,
            unreadable_bridges: unreadable,
            caveats,
            remedy: steps.join(", and "),
        }
    }
}

impl Computed {
    /// Returns why the answer is computed, in one line.
    pub(crate) fn reason(&self) -> &'static str {
        match self.module {
            Obstacle::NotLoaded => "Computed from sysfs: the module is not loaded.",
            Obstacle::NotPermitted => "Computed from sysfs: this user may not open the module's device.",
        }
    }

    /// Returns how the answer can differ from the module's, as lines.
    pub(crate) fn caveats(&self) -> &[String] {
        &self.caveats
    }

    /// Returns the lines before the answer.
    pub(crate) fn heading(&self) -> String {
        let lines = self.caveats.iter().map(|caveat| format!("  - {caveat}\n"));
        format!(
            "{} The kernel can decide otherwise:\n{}\n",
            self.reason(),
            lines.collect::<String>()
        )
    }

    /// Returns the last message, which says what to do.
    pub(crate) fn advice(&self) -> String {
        let mut text = self.remedy.clone();
        if let Some(first) = text.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        text + "."
    }
}
