// SPDX-License-Identifier: MIT OR Apache-2.0

//! Checks of RDMA devices: how their drivers register buffers.

use p2pmem::inventory::DmaBufSupport;

use super::kernel::has_symbol;
use super::{Check, Level};
use crate::environment::Environment;

pub(super) fn rdma(machine: &Environment) -> Vec<Check> {
    const NAME: &str = "rdma";
    let entries = machine.entries("sys/class/infiniband");
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

/// Checks whether the RDMA core has the peer-memory interface and the module uses it.
fn peer_memory(machine: &Environment, core: &str) -> Check {
    const NAME: &str = "rdma-peer-memory";
    const DMA_BUF_ONLY: &str = "buffers are registered as dma-bufs, by ibv_reg_dmabuf_mr(), not by ibv_reg_mr()";
    let state = machine.read("sys/kernel/debug/p2pmem/peer_memory").unwrap_or_default();
    let value = |name: &str| state.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let (interface, form) = (value("interface "), value("registered_as "));
    match (has_symbol(machine, "ib_register_peer_memory_client"), interface, form) {
        (_, Some(symvers), Some(form @ ("ex" | "legacy"))) if symvers != "none" => Check::new(
            NAME,
            Level::Ok,
            format!(
                "{core} has the interface (as {symvers} had when the module was built), and the module is its client \
                 ({form}): ibv_reg_mr() accepts mapped buffers, ibv_reg_dmabuf_mr() dma-bufs"
            ),
        ),
        (_, Some(symvers), Some("persistent")) if symvers != "none" => Check::new(
            NAME,
            Level::Warning,
            format!(
                "{core} has the interface, and the module is its client (persistent): regions of ibv_reg_mr() \
                 cannot be revoked, and the removal of a provider waits for them"
            ),
        )
        .remedy("load the module with peer_memory=ex"),
        (_, Some(symvers), _) if symvers != "none" => Check::new(
            NAME,
            Level::Warning,
            format!(
                "the module is no client of {core}, because of its parameter or because the core rejected it: \
                 {DMA_BUF_ONLY}"
            ),
        )
        .remedy("load the module with peer_memory=ex; the kernel log has the reason of a rejection"),
        (Some(true), Some(_), _) => Check::new(
            NAME,
            Level::Warning,
            format!("{core} has the interface, but the module was built without it: {DMA_BUF_ONLY}"),
        )
        .remedy("rebuild the module with PEER_SYMVERS=<Module.symvers of this core>"),
        (Some(true), None, _) => Check::new(
            NAME,
            Level::Info,
            format!("{core} has the interface; the file that shows whether the module is its client is not readable"),
        )
        .remedy("run doctor as root, with the module loaded and debugfs mounted"),
        (Some(false), ..) => Check::new(
            NAME,
            Level::Info,
            format!("{core} does not have the interface: {DMA_BUF_ONLY}"),
        ),
        (None, ..) => Check::new(NAME, Level::Info, "the kernel's symbols are not readable"),
    }
}

/// Checks whether buffers can be registered with a NIC on a stock kernel.
fn dma_bufs(machine: &Environment, nic: &str) -> Check {
    const NAME: &str = "rdma-dma-buf";
    let driver = machine.path("sys/class/infiniband").join(nic).join("device/driver");
    let driver = std::fs::read_link(driver).ok();
    let driver = driver.as_ref().and_then(|link| link.file_name()?.to_str());
    let Some(driver) = driver else {
        return Check::new(
            NAME,
            Level::Warning,
            format!("{nic} is not a PCI device: a software driver cannot access other devices' memory"),
        )
        .remedy("use a hardware NIC for buffers");
    };
    let found = |text: &str| format!("{nic} ({driver}) {text}");
    match (driver, DmaBufSupport::of_driver(driver)) {
        ("mlx5_core", _) => Check::new(
            NAME,
            Level::Ok,
            found(&format!(
                "registers dma-bufs and supports revocation if its firmware has on-demand paging: \
                 `p2pmemctl selftest --device PROVIDER --nic {nic}` tries it"
            )),
        ),
        (_, DmaBufSupport::Revocable) => {
            Check::new(NAME, Level::Ok, found("registers dma-bufs and supports revocation"))
        }
        (_, DmaBufSupport::Pinned) => Check::new(
            NAME,
            Level::Warning,
            found("only pins dma-bufs, which blocks the removal of their provider: p2pmem refuses this by default"),
        )
        .remedy("allow it by the provider's configfs attribute pinned_exports, and register pinned"),
        _ => Check::new(NAME, Level::Warning, found("is not known to register dma-bufs"))
            .remedy(format!("try it: p2pmemctl selftest --device PROVIDER --nic {nic}")),
    }
}
