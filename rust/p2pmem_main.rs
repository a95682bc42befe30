// SPDX-License-Identifier: GPL-2.0

//! p2pmem: the manager of PCI peer-to-peer memory.
//!
//! Devices' BARs are published as *providers*, the *orchestrator* chooses the provider nearest to the *clients* that
//! will do DMA, and *buffers* in it are handed to user space through `/dev/p2pmem`. See Documentation/design.

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

/// What `INFO` says of the module.
const VERSION: &str = "0.1.0";

module! {
    type: P2pmem,
    name: "p2pmem",
    authors: ["The p2pmem developers"],
    description: "Manager of PCI peer-to-peer memory",
    license: "GPL",
}

/// The module. Its fields are dropped in this order: first everything is unregistered that brings new work, then the providers
/// are removed, then what they are made of goes.
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
    /// Ends adopted providers, while the bus still tells of drivers that are unbound.
    retire: Retire,
    #[pin]
    power: power::Notifier<PowerEvents>,
    #[pin]
    notifier: Notifier<BusEvents>,
    /// Last: waits for the scrubbers of all providers.
    scrubber: Scrubber,
}

/// The orchestrator as callbacks and drivers find it. All providers are removed when this is dropped.
struct Retire {
    orchestrator: Arc<Orchestrator>,
    _drivers: publisher::Open,
    _instance: global::Registered<Orchestrator>,
}

impl Retire {
    fn new(orchestrator: Arc<Orchestrator>) -> Result<Self> {
        let memory = Arc::new(DriverMemory(orchestrator.clone()), GFP_KERNEL)?;
        Ok(Self {
            _instance: global::Registered::new(orchestrator.clone())?,
            _drivers: publisher::Open::new(memory),
            orchestrator,
        })
    }
}

impl Drop for Retire {
    fn drop(&mut self) {
        self.orchestrator.shutdown();
    }
}

struct Scrubber;

impl Scrubber {
    /// Has memory that came back cleared.
    fn send() {
        if let Ok(orchestrator) = Orchestrator::get() {
            orchestrator.send_scrubbers();
        }
    }
}

impl Drop for Scrubber {
    fn drop(&mut self) {
        workqueue::set_queue(None);
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
                    workqueue::set_queue(Some(OwnQueue::new(c"p2pmem", Scrubber::send)?));
                    Scrubber
                },
                notifier <- Notifier::new(for_bus),
                power <- power::Notifier::new(for_power),
                retire: Retire::new(last)?,
                driver <- kernel::driver::Registration::new(c"p2pmem", module),
                configfs <- Tree::new(c"p2pmem", module, rules::rules()?, providers::providers()?),
                chardev <- chrdev::CharDeviceRegistration::new(c"p2pmem", 0o660, module),
                debugfs <- debugfs::files(for_debugfs),
                peer_client: peer_client::register()?,
                // Nothing fails from here on.
                _: {
                    orchestrator.scan();
                    global::set_ready(true);
                },
            }? Error))
        })
    }
}
