// SPDX-License-Identifier: GPL-2.0

//! p2pmem: the manager of PCI peer-to-peer memory.
//!
//! Devices' BARs are published as *providers*, the *orchestrator* chooses the provider nearest to the *clients* that
//! will do DMA, and *buffers* in it are handed to user space through `/dev/p2pmem`. See Documentation/design.

use crate::{
    chardev::File,
    ext::{bus::Notifier, chrdev, configfs::Tree, driver, global, pci::Function, power, workqueue::OwnQueue},
    orchestrator::{BusEvents, Orchestrator, PowerEvents},
    provider::Leave,
};
use kernel::{pci, prelude::*, sync::Arc};

mod buffer;
mod chardev;
mod config;
mod config_rules;
mod decision;
mod dmabuf;
mod ext;
mod handles;
mod life;
mod memory;
mod orchestrator;
mod own_rules;
mod path;
#[cfg_attr(not(p2pmem_peer), path = "peer_client/absent.rs")]
mod peer_client;
mod placement;
mod policy;
mod provider;
mod publish;
mod quota;
mod ranges;
mod refusal;
mod request;
mod rule_text;
mod rules;
mod split;
mod stats;
mod stripe;
mod sys;
mod teardown;
mod topology;
mod views;
mod walk;

/// What `INFO` says of the module.
const VERSION: &str = "0.1.0";

module! {
    type: P2pmem,
    name: "p2pmem",
    authors: ["The p2pmem developers"],
    description: "Manager of PCI peer-to-peer memory",
    license: "GPL",
}

/// The module. Its fields are dropped in this order: first the doors are closed through which new work comes, then
/// providers leave, then what they were made of goes.
#[pin_data]
struct P2pmem {
    peer_client: peer_client::Door,
    #[pin]
    stats: stats::Files,
    #[pin]
    chardev: chrdev::Registration<File>,
    #[pin]
    configfs: Tree<config::Root, config_rules::RuleSet, config::Providers>,
    #[pin]
    driver: kernel::driver::Registration<pci::Adapter<driver::Driver<Unbinding>>>,
    /// Ends adopted providers, while the bus still tells of drivers that are unbound.
    retire: Retire,
    #[pin]
    power: power::Notifier<PowerEvents>,
    #[pin]
    notifier: Notifier<BusEvents>,
    /// Last: waits for the janitors of all providers.
    janitors: Janitors,
}

/// Own providers end when their device is unbound.
struct Unbinding;

impl driver::Hooks for Unbinding {
    fn unbinding(function: &Function) {
        if let Ok(orchestrator) = global::orchestrator() {
            orchestrator.remove(function, Leave::Unbind);
            orchestrator.end_lost(function, false);
        }
    }

    fn losing(function: &Function, why: &CStr, answers: bool) {
        if let Ok(orchestrator) = global::orchestrator() {
            orchestrator.lose(function, why, answers);
        }
    }

    fn recovered(function: &Function) {
        if let Ok(orchestrator) = global::orchestrator() {
            orchestrator.end_lost(function, true);
        }
    }
}

struct Retire(Arc<Orchestrator>);

impl Drop for Retire {
    fn drop(&mut self) {
        self.0.shutdown();
        global::set_orchestrator(None);
    }
}

struct Janitors;

impl Janitors {
    /// Sends the janitors to what came back.
    fn send() {
        if let Ok(orchestrator) = global::orchestrator() {
            orchestrator.send_janitors();
        }
    }
}

impl Drop for Janitors {
    fn drop(&mut self) {
        global::set_queue(None);
    }
}

impl kernel::InPlaceModule for P2pmem {
    fn init(module: &'static ThisModule) -> impl PinInit<Self, Error> {
        pin_init::pin_init_scope(move || {
            global::init();
            let orchestrator = Orchestrator::new()?;
            let (for_stats, last) = (orchestrator.clone(), orchestrator.clone());
            let for_bus = Arc::new(BusEvents(orchestrator.clone()), GFP_KERNEL)?;
            let for_power = Arc::new(PowerEvents(orchestrator.clone()), GFP_KERNEL)?;
            Ok(try_pin_init!(Self {
                janitors: {
                    global::set_queue(Some(OwnQueue::new(c"p2pmem", Janitors::send)?));
                    global::set_orchestrator(Some(orchestrator.clone()));
                    Janitors
                },
                notifier <- Notifier::new(for_bus),
                power <- power::Notifier::new(for_power),
                retire: Retire(last),
                driver <- kernel::driver::Registration::new(c"p2pmem", module),
                configfs <- Tree::new(config::subsystem(), config_rules::rules()?, config::providers()?),
                chardev <- chrdev::Registration::new(c"p2pmem", 0o660, module),
                stats <- stats::files(for_stats),
                peer_client: peer_client::open()?,
                // Nothing fails from here on.
                _: {
                    orchestrator.scan();
                    global::set_ready(true);
                },
            }? Error))
        })
    }
}
