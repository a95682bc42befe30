// SPDX-License-Identifier: GPL-2.0

//! Receivers of events: the PCI bus, the p2pmem PCI driver, drivers that register memory, and system sleep.
//!
//! C headers: [`include/linux/device/bus.h`](srctree/include/linux/device/bus.h),
//! [`include/linux/suspend.h`](srctree/include/linux/suspend.h), `include/linux/p2pmem.h`
//!
//! Context: process context, may sleep. Events of the bus and of the PCI driver come with the device lock held, which is
//! outside of all locks of the module.

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::{
        bus,
        driver,
        pci::Function,
        power,
        publisher::{
            Publication,
            Registrar,
            RevokeCallback, //
        },
        refusal::Answer, //
    },
    mem::provider::{
        removal::RemovalKind,
        ProviderKind, //
    }, //
};
use kernel::{device::Bound, pci, prelude::*, sync::Arc};

/// Receives events of the PCI bus, with the device lock held.
pub(crate) struct BusEvents(pub(crate) Arc<Orchestrator>);

impl bus::Listener for BusEvents {
    fn bound(&self, device: &pci::Device<Bound>) {
        self.0.try_adopt(device);
    }

    fn unbinding(&self, function: &Function) {
        // An own provider is removed by [`DriverEvents`], whose callback follows: a removal may have to wait for an importer, and
        // anyone who registers with the bus's notifier chain waits for this callback.
        if self.0.find(function).is_some_and(|p| p.kind != ProviderKind::Own) {
            self.0.remove(function, RemovalKind::Unbind);
        }
    }

    fn changed(&self) {
        self.0.forget_topology();
    }
}

/// Receives events of system sleep, before tasks are frozen and after they are thawed.
pub(crate) struct PowerEvents(pub(crate) Arc<Orchestrator>);

impl power::Listener for PowerEvents {
    fn before_sleep(&self) -> Result {
        self.0.set_asleep(true);
        self.0.before_sleep()
    }

    fn after_sleep(&self) {
        self.0.set_asleep(false);
        // Adopts only. The administrator publishes own providers again, by hand or with `p2pmemctl apply`.
        self.0.scan();
    }
}

/// Receives calls of drivers that register memory ([`crate::ext::publisher`]).
pub(crate) struct DriverMemory(pub(crate) Arc<Orchestrator>);

impl Registrar for DriverMemory {
    fn is_provided(&self, function: &Function) -> bool {
        self.0.is_provided(function)
    }

    fn register(
        &self,
        wanted: &Publication,
        device: driver::Published<'_>,
        publisher: Arc<RevokeCallback>,
    ) -> Answer<u32> {
        self.0.publish_bound(wanted, device, Some(publisher))
    }

    fn unregister(&self, function: &Function, provider: u32) {
        if self.0.find(function).is_some_and(|found| found.id == provider) {
            self.0.remove(function, RemovalKind::Retire);
        }
    }
}

/// Receives events of devices that are bound to the p2pmem driver, with the device lock held.
pub(crate) struct DriverEvents;

impl driver::Hooks for DriverEvents {
    fn unbinding(function: &Function) {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.remove(function, RemovalKind::Unbind);
            orchestrator.release_lost(function, false);
        }
    }

    fn losing(function: &Function, why: &CStr) {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.remove_before_reset(function, why);
        }
    }

    fn lost(function: &Function, why: &CStr) {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.begin_lost(function, why);
        }
    }

    fn is_provided(function: &Function) -> bool {
        Orchestrator::get().is_ok_and(|orchestrator| orchestrator.is_provided(function))
    }

    fn recovered(function: &Function) {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.release_lost(function, true);
        }
    }
}
