// SPDX-License-Identifier: GPL-2.0

//! What the bus, the module's own driver, drivers that publish memory, and the machine's power tell of devices.

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::{
        bus,
        driver,
        pci::Function,
        power,
        publisher::{
            Publication,
            Publisher,
            Registrar, //
        },
        refusal::Answer, //
    },
    mem::provider::{
        removal::RemovalKind,
        ProviderKind, //
    }, //
};
use kernel::{prelude::*, sync::Arc};

/// What is told of the bus.
pub(crate) struct BusEvents(pub(crate) Arc<Orchestrator>);

impl bus::Listener for BusEvents {
    fn bound(&self, function: &Function) {
        self.0.try_adopt(function);
    }

    fn unbinding(&self, function: &Function) {
        // An own provider leaves in the driver's own call, which comes next.
        if self.0.find(function).is_some_and(|p| p.kind != ProviderKind::Own) {
            self.0.remove(function, RemovalKind::Unbind);
        }
    }

    fn changed(&self) {
        self.0.forget_paths();
    }
}

/// What is told of the machine's power.
pub(crate) struct PowerEvents(pub(crate) Arc<Orchestrator>);

impl power::Listener for PowerEvents {
    fn before_sleep(&self) -> Result {
        self.0.set_asleep(true);
        self.0.before_sleep()
    }

    fn after_sleep(&self) {
        self.0.set_asleep(false);
        // Own providers are published again by the administrator, whose settings say how.
        self.0.scan();
    }
}

/// What drivers publish and take back ([`crate::ext::publisher`]).
pub(crate) struct DriverMemory(pub(crate) Arc<Orchestrator>);

impl Registrar for DriverMemory {
    fn is_provided(&self, function: &Function) -> bool {
        self.0.is_provided(function)
    }

    fn register(&self, wanted: &Publication, device: driver::Published<'_>, publisher: Arc<Publisher>) -> Answer<u32> {
        self.0.publish_registered(wanted, device, publisher)
    }

    fn unregister(&self, function: &Function, provider: u32) {
        if self.0.find(function).is_some_and(|found| found.id == provider) {
            self.0.remove(function, RemovalKind::Retire);
        }
    }
}

/// Own providers end when their device is unbound.
pub(crate) struct DriverEvents;

impl driver::Hooks for DriverEvents {
    fn unbinding(function: &Function) {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.remove(function, RemovalKind::Unbind);
            orchestrator.end_lost(function, false);
        }
    }

    fn losing(function: &Function, why: &CStr, answers: bool) {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.lose(function, why, answers);
        }
    }

    fn recovered(function: &Function) {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.end_lost(function, true);
        }
    }
}
