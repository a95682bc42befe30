// SPDX-License-Identifier: GPL-2.0

//! p2pmem: a manager of PCI peer-to-peer memory.
//!
//! A *provider* is a PCI function with a published BAR. The *orchestrator* chooses the provider nearest to the *clients*,
//! the PCI functions that will do DMA. *Buffers* in a provider reach user space through `/dev/p2pmem`. Documentation/design
//! describes the design, Documentation/glossary.md the terms.
//!
//! This file loads and unloads the module. The order of the fields of [`P2pmem`] is the order of unloading; see "Loading"
//! and "Unloading" in Documentation/design/lifecycle.md.
//!
//! Context: process context, may sleep, no locks held.

// What only a part needs stays in builds without this part. A build with all parts reports dead code.
#![cfg_attr(not(all(p2pmem_peer, p2pmem_attach)), allow(dead_code))]

use crate::{
    admin::{
        debugfs,
        providers,
        rules, //
    },
    alloc::orchestrator::Orchestrator,
    ext::{
        bus::Notifier,
        chrdev,
        configfs::Tree,
        driver,
        global,
        power,
        publisher,
        workqueue::{
            self,
            OwnQueue, //
        }, //
    },
    publish::events::{
        BusEvents,
        DriverEvents,
        DriverMemory,
        PowerEvents, //
    },
    share::peer_client,
    uapi::file::File, //
};
use kernel::{pci, prelude::*, sync::Arc};

mod admin;
mod alloc;
mod ext;
mod mem;
mod policy;
mod publish;
mod share;
mod sys;
mod teardown;
mod uapi;

/// The version that `P2PMEM_IOC_INFO` reports.
const VERSION: &str = "0.1.0";

module! {
    type: P2pmem,
    name: "p2pmem",
    authors: ["The p2pmem developers"],
    description: "Manager of PCI peer-to-peer memory",
    license: "GPL",
}

/// The module. Rust drops fields in the order of their declaration, and initialisation runs in the opposite order.
///
/// Dropping first unregisters everything that brings new work (debugfs, the character device, configfs, the PCI driver),
/// then removes the remaining providers, and then frees what the providers used.
#[pin_data]
struct P2pmem {
    peer_client: peer_client::ClientRegistration,
    #[pin]
    debugfs: debugfs::Files,
    #[pin]
    chardev: chrdev::CharDeviceRegistration<File>,
    #[pin]
    configfs: Tree<rules::Rules, providers::Providers>,
    #[pin]
    driver: kernel::driver::Registration<pci::Adapter<driver::Driver<DriverEvents>>>,
    /// Removes adopted and registered providers, while `notifier` still reports drivers that are unbound.
    instance: GlobalOrchestrator,
    #[pin]
    power: power::Notifier<PowerEvents>,
    #[pin]
    notifier: Notifier<BusEvents>,
    /// Last: dropping the workqueue waits for the queued scrubbers and removals.
    scrubber: Scrubber,
}

/// Publishes the orchestrator to kernel callbacks and to drivers that register memory. Dropping it removes all providers.
struct GlobalOrchestrator {
    orchestrator: Arc<Orchestrator>,
    _drivers: publisher::Open,
    _instance: global::Registered<Orchestrator>,
}

impl GlobalOrchestrator {
    /// Makes `orchestrator` available to kernel callbacks, and lets drivers register memory. Errors: `ENOMEM`.
    fn new(orchestrator: Arc<Orchestrator>) -> Result<Self> {
        let memory = Arc::new(DriverMemory(orchestrator.clone()), GFP_KERNEL)?;
        Ok(Self {
            _instance: global::Registered::new(orchestrator.clone())?,
            _drivers: publisher::Open::new(memory),
            orchestrator,
        })
    }
}

impl Drop for GlobalOrchestrator {
    fn drop(&mut self) {
        self.orchestrator.shutdown();
    }
}

/// Owns the module's workqueue, whose timer sends the scrubbers. Dropping it waits for all queued work.
struct Scrubber;

impl Scrubber {
    /// Queues the scrubber of each provider that has dirty memory. The workqueue's timer calls this.
    fn send() {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.send_scrubbers();
        }
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        // Cannot fail: nothing is allocated.
        let _ = workqueue::set_queue(None);
    }
}

impl kernel::InPlaceModule for P2pmem {
    fn init(module: &'static ThisModule) -> impl PinInit<Self, Error> {
        pin_init::pin_init_scope(move || {
            ext::init();
            let orchestrator = Orchestrator::new()?;
            let (for_debugfs, last) = (orchestrator.clone(), orchestrator.clone());
            let for_bus = Arc::new(BusEvents(orchestrator.clone()), GFP_KERNEL)?;
            let for_power = Arc::new(PowerEvents(orchestrator.clone()), GFP_KERNEL)?;
            Ok(try_pin_init!(Self {
                scrubber: {
                    workqueue::set_queue(Some(OwnQueue::new(c"p2pmem", Scrubber::send)?))?;
                    Scrubber
                },
                notifier <- Notifier::new(for_bus),
                power <- power::Notifier::new(for_power),
                instance: GlobalOrchestrator::new(last)?,
                driver <- kernel::driver::Registration::new(c"p2pmem", module),
                configfs <- Tree::new(c"p2pmem", module, rules::rules()?, providers::providers()?),
                chardev <- chrdev::CharDeviceRegistration::new(c"p2pmem", 0o660, module),
                debugfs <- debugfs::files(for_debugfs),
                peer_client: peer_client::register()?,
                // Nothing from here on fails. Only now may files be opened and directories be made: an open file does not
                // keep the module if loading fails.
                _: {
                    orchestrator.scan();
                    global::set_ready(true);
                },
            }? Error))
        })
    }
}
