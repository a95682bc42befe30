// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks of the kernel: release, configuration, and signature policy for modules.

use p2pmem::inventory::{kernel_release, Release};

use super::{Check, Level};
use crate::environment::Environment;

/// The oldest kernel release that the module supports.
const FIRST: Release = (7, 2);
/// The options that the module needs, with the reason.
const OPTIONS: [(&str, &str); 5] = [
    ("CONFIG_PCI_P2PDMA", "PCI peer-to-peer memory"),
    ("CONFIG_RUST", "modules in Rust"),
    ("CONFIG_GPU_BUDDY", "the allocator of device memory"),
    ("CONFIG_CONFIGFS_FS", "the administrator's interface"),
    ("CONFIG_DMA_SHARED_BUFFER", "dma-bufs"),
];
/// The EFI variable whose last byte is 1 if Secure Boot is on.
pub(super) const SECURE_BOOT: &str = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// Returns the oldest release that the module supports, if that of the machine is known and older.
pub(super) fn needed_release(machine: &Environment) -> Option<Release> {
    let release = kernel_release(&machine.read("proc/sys/kernel/osrelease").unwrap_or_default());
    (release != (0, 0) && release < FIRST).then_some(FIRST)
}

/// Checks the release. A kernel that has loaded the module passes.
pub(super) fn release(machine: &Environment) -> Check {
    const NAME: &str = "kernel";
    let release = machine.read("proc/sys/kernel/osrelease").unwrap_or_default();
    if kernel_release(&release) >= FIRST || machine.has_module() {
        return Check::new(NAME, Level::Ok, release);
    }
    let (major, minor) = FIRST;
    Check::new(
        NAME,
        Level::Failure,
        format!("{release} is older than {major}.{minor}, which the module needs"),
    )
    .remedy(format!(
        "boot Linux {major}.{minor} or later; without the module, `p2pmemctl scan` shows what this kernel offers"
    ))
}

/// Checks that the kernel has the options that the module needs.
pub(super) fn config(machine: &Environment) -> Check {
    const NAME: &str = "kernel-config";
    const REMEDY: &str = "boot a kernel with these options, such as Debian's from 7.2 on";
    let release = machine.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let places = [
        format!("boot/config-{release}"),
        format!("lib/modules/{release}/config"),
        format!("usr/lib/modules/{release}/config"),
        format!("lib/modules/{release}/build/.config"),
    ];
    if let Some(config) = places.iter().find_map(|place| machine.read(place)) {
        let is_set = |option: &str| {
            let value = config
                .lines()
                .find_map(|line| line.strip_prefix(option)?.strip_prefix('='));
            matches!(value, Some("y" | "m"))
        };
        let missing: Vec<_> = OPTIONS
            .iter()
            .filter(|(option, _)| !is_set(option))
            .map(|(option, why)| format!("{option} ({why})"))
            .collect();
        return if missing.is_empty() {
            let names: Vec<_> = OPTIONS.iter().map(|(option, _)| *option).collect();
            Check::new(NAME, Level::Ok, format!("{release} has {}", names.join(", ")))
        } else {
            Check::new(
                NAME,
                Level::Failure,
                format!("{release} is built without {}", missing.join(", ")),
            )
            .remedy(REMEDY)
        };
    }
    // Without a config, the running kernel's symbols show the most important option.
    match has_symbol(machine, "pci_p2pdma_distance_many") {
        Some(true) => Check::new(NAME, Level::Ok, format!("{release} has PCI P2PDMA (by its symbols)")),
        Some(false) => Check::new(
            NAME,
            Level::Failure,
            format!("{release} has no PCI P2PDMA (by its symbols)"),
        )
        .remedy(REMEDY),
        None => Check::new(
            NAME,
            Level::Info,
            "neither the kernel's config nor its symbols are readable",
        ),
    }
}

/// Checks whether the kernel loads unsigned modules.
pub(super) fn signatures(machine: &Environment) -> Check {
    const NAME: &str = "module-signatures";
    let secure_boot = std::fs::read(machine.path(SECURE_BOOT)).is_ok_and(|value| value.last() == Some(&1));
    let enforced = machine.read("sys/module/module/parameters/sig_enforce").as_deref() == Some("Y");
    let lockdown = machine.read("sys/kernel/security/lockdown").unwrap_or_default();
    let locked = lockdown.contains("[integrity]") || lockdown.contains("[confidentiality]");
    if !enforced && !locked {
        let note = if secure_boot {
            ", although Secure Boot is on"
        } else {
            ""
        };
        return Check::new(
            NAME,
            Level::Ok,
            format!("the kernel loads modules without a signature{note}"),
        );
    }
    let why = if secure_boot { " (Secure Boot is on)" } else { "" };
    if machine.has_module() {
        return Check::new(
            NAME,
            Level::Ok,
            format!("the kernel loads signed modules only{why}, and has loaded p2pmem"),
        );
    }
    Check::new(
        NAME,
        Level::Warning,
        format!("the kernel loads signed modules only{why}"),
    )
    .remedy(
        "sign p2pmem.ko with a key that the machine trusts: DKMS signs with its own key, which `mokutil --import \
         /var/lib/dkms/mok.pub` enrolls at the next boot",
    )
}

/// Returns whether the kernel or a loaded module has a symbol; `None` if the list of symbols is not readable.
pub(super) fn has_symbol(machine: &Environment, symbol: &str) -> Option<bool> {
    let all = machine.read("proc/kallsyms")?;
    if all.is_empty() {
        return None;
    }
    Some(all.lines().any(|line| line.split_whitespace().nth(2) == Some(symbol)))
}
