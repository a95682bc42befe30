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
    policy::{
        path::Path,
        rule::Subject as _, //
    }, //
};
use kernel::prelude::*;

/// Checks whether a device named `name` may access a buffer, which may have been allocated for other devices: whether the
/// device can reach the provider, and whether the rules allow the access. May sleep.
///
/// Errors: `EHOSTUNREACH` if there is no path, with the reason; `EACCES` if a rule forbids the access; those of the path
/// lookup.
pub(crate) fn check(buffer: &Buffer, device: DmaDevice<'_>, name: &DeviceName) -> Answer {
    let provider = &buffer.provider;
    let Some(function) = device.function() else {
        return Err(refuse!(
            abi::errno(abi::EHOSTUNREACH),
            "{} is not a PCI function, so it has no path to {}",
            name,
            provider.addr
        ));
    };
    let orchestrator = Orchestrator::get()?;
    let path = orchestrator.path(provider, &function)?;
    // The kernel decides again for each device that wants access: the path may be of a topology that has changed.
    if !provider.is_reached_by(&function)? {
        return Err(unreachable(provider, name, &path));
    }
    let rules = orchestrator.rules();
    match rules.denying_rule(&buffer.cred, provider, &function.function_id(), &path) {
        None => Ok(()),
        Some((rule, far)) => Err(refuse!(
            EACCES,
            "{} is denied memory of {} that uid {} allocated: rule {}{}",
            name,
            provider.addr,
            buffer.cred.uid(),
            rule.as_str(),
            if far { ", for the path is too far" } else { "" }
        )),
    }
}

/// Returns the refusal for a device that cannot reach a provider, with the reason.
fn unreachable(provider: &Provider, name: &DeviceName, path: &Path) -> Refusal {
    let unreachable = abi::errno(abi::EHOSTUNREACH);
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
