// SPDX-License-Identifier: GPL-2.0

//! Access of a device to a buffer that may have been allocated for other devices: rules, and reachability.
//!
//! Context: process context, may sleep. Locks: those of [`Orchestrator::path`] and of the rules, for the call.

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::{
        abi,
        device_name::DeviceName,
        dma_device::DmaDevice,
        pci::Function,
        refusal::{
            refuse,
            Answer,
            Refusal, //
        }, //
    },
    mem::buffer::{
        Buffer,
        Provider, //
    },
    policy::rule::Subject as _, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Checks whether a device named `name` may access a buffer, which may have been allocated for other devices: whether the
/// device can reach the provider, and whether the rules allow the access. May sleep.
///
/// Errors: `EHOSTUNREACH` if there is no path, with the reason; `EACCES` if a rule forbids the access; those of the path
/// lookup.
pub(crate) fn check(buffer: &Buffer, device: DmaDevice<'_>, name: &DeviceName) -> Answer {
    let function = device.function();
    if device.reaches(buffer.provider.function()) {
        return allowed(buffer, function, name);
    }
    Err(unreachable(&buffer.provider, name, function))
}

/// Checks whether rules allow a device to access a buffer, which may have been allocated for other devices.
///
/// `None` for `function` means that the device is no PCI function: no rule has such a client, and access is allowed. May
/// sleep. Errors: `EACCES` if a rule forbids the access; those of the path lookup.
fn allowed(buffer: &Buffer, function: Option<Function>, name: &DeviceName) -> Answer {
    let Some(function) = function else {
        return Ok(());
    };
    let orchestrator = Orchestrator::get()?;
    let path = orchestrator.path(&buffer.provider, &function)?;
    let rules = orchestrator.rules();
    match rules.denying_rule(&buffer.cred, &buffer.provider, &function.function_id(), &path) {
        None => Ok(()),
        Some((rule, far)) => Err(refuse!(
            EACCES,
            "{} is denied memory of {} that uid {} allocated: rule {}{}",
            name,
            buffer.provider.addr,
            buffer.cred.uid(),
            rule.as_str(),
            if far { ", for the path is too far" } else { "" }
        )),
    }
}

/// Returns the refusal for a device that cannot reach a provider, with the reason: `EHOSTUNREACH`, or the error of the
/// path lookup. `None` for `function` means that the device is no PCI function.
fn unreachable(provider: &Arc<Provider>, name: &DeviceName, function: Option<Function>) -> Refusal {
    let unreachable = abi::errno(abi::EHOSTUNREACH);
    let Some(function) = function else {
        return refuse!(
            unreachable,
            "{} is not a PCI function, so it has no path to {}",
            name,
            provider.addr
        );
    };
    let path = match Orchestrator::get().and_then(|o| o.path(provider, &function)) {
        Ok(path) => path,
        Err(e) => return e.into(),
    };
    if path.acs_redirect {
        refuse!(
            unreachable,
            "{} cannot reach {}: a port on the path redirects peer traffic (ACS), and the host bridge is not on the kernel's list",
            name,
            provider.addr
        )
    } else {
        refuse!(
            unreachable,
            "{} cannot reach {}: the path is through a host bridge that is not on the kernel's list",
            name,
            provider.addr
        )
    }
}
