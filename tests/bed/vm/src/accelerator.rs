// SPDX-License-Identifier: MIT OR Apache-2.0

//! What executes the instructions of guests: KVM if it works, otherwise QEMU's emulator, TCG.

use std::sync::OnceLock;

use anyhow::{Result, anyhow, bail};
use serde::Serialize;

use crate::stamp;
use crate::topology::Machine;

/// The environment variable with the choice: `auto` (default), `tcg`, or `kvm`.
pub const ACCEL: &str = "P2PMEM_ACCEL";

/// What executes the instructions of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// QEMU's emulator.
    Tcg,
    /// The host's processor.
    Kvm,
}

impl Accelerator {
    /// Returns the accelerator of guests that count no instructions. Only the first call looks for KVM, so all guests
    /// of a process have the same one.
    ///
    /// # Errors
    ///
    /// [`ACCEL`] is `kvm`, and KVM does not work; [`ACCEL`] has an unknown value; `tools/stamp` cannot be run.
    pub fn chosen() -> Result<Accelerator> {
        static CHOSEN: OnceLock<Result<Accelerator, String>> = OnceLock::new();
        let chosen = CHOSEN.get_or_init(|| {
            let answer = stamp::run(stamp::command().arg("accelerator"));
            answer
                .and_then(|answer| Accelerator::parse(&answer))
                .map_err(|e| format!("{e:#}"))
        });
        chosen.clone().map_err(|e| anyhow!(e))
    }

    fn parse(name: &str) -> Result<Accelerator> {
        match name.trim_end() {
            "tcg" => Ok(Accelerator::Tcg),
            "kvm" => Ok(Accelerator::Kvm),
            other => bail!("tools/stamp: unknown accelerator {other:?}"),
        }
    }

    /// Returns the accelerator of a machine, where `self` is the one of guests that count no instructions.
    pub fn of(self, machine: &Machine) -> Accelerator {
        // Only TCG can count (`-icount`).
        if machine.count_instructions {
            Accelerator::Tcg
        } else {
            self
        }
    }

    /// Returns the value of QEMU's option `-accel`.
    pub fn argument(self) -> &'static str {
        match self {
            Accelerator::Tcg => "tcg,thread=multi",
            // QEMU's IOMMUs remap interrupts only if the I/O APIC is QEMU's instead of KVM's.
            Accelerator::Kvm => "kvm,kernel-irqchip=split",
        }
    }

    /// Returns the value of QEMU's option `-cpu` for a CPU model.
    ///
    /// The kernel routes peer traffic through every host bridge if the processor is AMD's, of family 0x17 or later.
    /// Under KVM, QEMU gives a model the vendor of the host's processor, and gives `max` the host's family, too. With
    /// the properties here, `EPYC` is on the kernel's list and `max` is not, as under TCG. Other models keep the
    /// host's vendor.
    pub fn cpu(self, model: &str) -> String {
        match (self, model) {
            (Accelerator::Kvm, "EPYC") => format!("{model},vendor=AuthenticAMD"),
            // The numbers are those of TCG's `max`.
            (Accelerator::Kvm, "max") => format!("{model},vendor=AuthenticAMD,family=6,model=6,stepping=3"),
            _ => model.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use anyhow::{Context, ensure};

    use super::*;
    use crate::vm::topologies;

    /// A processor with VT-x, and one with flags whose names only contain those of VT-x and AMD-V.
    const PROCESSORS: [&str; 2] = [
        "flags\t\t: fpu vmx smx\n",
        "flags\t\t: fpu vmxx xsvm\nvmx flags\t: vnmi\n",
    ];

    /// Decides for a device and the content of /proc/cpuinfo.
    fn decide(setting: Option<&str>, device: &Path, processor: &str) -> Result<Accelerator> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("cpuinfo");
        fs::write(&file, processor)?;
        let mut command = stamp::command();
        command.arg("accelerator").args([device, &file]);
        match setting {
            Some(setting) => command.env(ACCEL, setting),
            None => command.env_remove(ACCEL),
        };
        Accelerator::parse(&stamp::run(&mut command)?)
    }

    #[test]
    fn devices_that_are_not_kvm_are_not_used() -> Result<()> {
        // A missing device, a device of another driver, and a processor without VT-x and AMD-V.
        for (device, processor, reason) in [
            ("/nowhere/kvm", PROCESSORS[0], "No such file or directory"),
            ("/dev/null", PROCESSORS[0], "KVM_GET_API_VERSION"),
            ("/dev/kvm", PROCESSORS[1], "neither VT-x nor AMD-V"),
        ] {
            let device = PathBuf::from(device);
            for setting in [None, Some(""), Some("auto"), Some("tcg")] {
                ensure!(decide(setting, &device, processor)? == Accelerator::Tcg);
            }
            let error = decide(Some("kvm"), &device, processor).err();
            let error = error.with_context(|| format!("KVM is used with {}", device.display()))?;
            ensure!(format!("{error:#}").contains(reason), "{error:#}");
        }
        Ok(())
    }

    #[test]
    fn working_device_is_used_unless_tcg_is_wanted() -> Result<()> {
        let device = Path::new("/dev/kvm");
        ensure!(decide(Some("tcg"), device, PROCESSORS[0])? == Accelerator::Tcg);
        // Whether a machine has the device cannot be faked, but both settings have to agree.
        let (auto, kvm) = (
            decide(None, device, PROCESSORS[0])?,
            decide(Some("kvm"), device, PROCESSORS[0]),
        );
        ensure!((auto == Accelerator::Kvm) == kvm.is_ok(), "{auto:?}, {kvm:?}");
        Ok(())
    }

    #[test]
    fn unknown_settings_are_refused() -> Result<()> {
        let error = decide(Some("KVM"), Path::new("/dev/null"), PROCESSORS[0]).err();
        let error = format!("{:#}", error.context("accepted")?);
        ensure!(error.contains("P2PMEM_ACCEL=KVM"), "{error}");
        Ok(())
    }

    #[test]
    fn stamp_names_the_chosen_accelerator() -> Result<()> {
        let stamp = stamp::stamp()?;
        ensure!(stamp["accelerator"] == serde_json::to_value(Accelerator::chosen()?)?);
        Ok(())
    }

    #[test]
    fn only_guests_that_count_nothing_use_kvm() -> Result<()> {
        let counting = Machine {
            smp: 1,
            count_instructions: true,
            ..Machine::default()
        };
        ensure!(Accelerator::Kvm.of(&counting) == Accelerator::Tcg);
        ensure!(Accelerator::Kvm.of(&Machine::default()) == Accelerator::Kvm);
        ensure!(Accelerator::Tcg.of(&Machine::default()) == Accelerator::Tcg);
        Ok(())
    }

    /// Under KVM, a model without a rule here would have the host's vendor.
    #[test]
    fn cpu_models_of_all_topologies_keep_their_vendor() -> Result<()> {
        for entry in fs::read_dir(topologies())? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            for node in crate::topology::Layout::load(&path)?.nodes {
                let model = &node.topology.machine.cpu;
                let cpu = Accelerator::Kvm.cpu(model);
                ensure!(
                    cpu.starts_with(&format!("{model},vendor=AuthenticAMD")),
                    "{}: {cpu}",
                    path.display()
                );
                ensure!(Accelerator::Tcg.cpu(model) == *model);
            }
        }
        Ok(())
    }
}
