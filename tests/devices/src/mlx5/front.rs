// SPDX-License-Identifier: MIT OR Apache-2.0

//! The adapter as the emulator sees it: a PCI function whose registers are answered at once, and a worker for the rest.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use p2pmem_ib::{Counters as Transport, Fabric, Faults, LinkCounters, PortConfig};
use p2pmem_vfio_user::{BarKind, Bus, ConfigBuilder, ConfigSpace, Device, LinkSpeed, Moved, Region};
use serde::Serialize;

use super::counters::{Counters, Machinery, Payload};
use super::inbox::{Inbox, Message, Wait};
use super::model::{Identity, Model};
use super::registers::{BAR0_SIZE, MSIX_PBA, MSIX_TABLE, Registers, VECTORS};
use crate::worker::{Health, Worker};

/// Mellanox.
pub const VENDOR_ID: u16 = 0x15b3;
/// ConnectX-6.
pub const DEVICE_ID: u16 = 0x101b;
/// InfiniBand controller.
const CLASS: u32 = 0x02_07_00;
/// How long a question to the worker may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What an adapter is made of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name, in the subnet and in logs.
    pub name: String,
    /// GUID of the port and of the node; must differ from all others in the subnet.
    pub guid: u64,
    /// The switch it hangs on.
    pub switch: String,
    /// Speed the PCIe link is trained to.
    pub speed: LinkSpeed,
    /// Lanes the PCIe link is trained to.
    pub lanes: u8,
}

/// All that an adapter has counted.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Bytes of payload of connections by what they were read from and written to.
    pub payload: Payload,
    /// The same of datagrams, which the kernel sends and receives by itself as well.
    pub datagrams: Payload,
    /// Bytes of any kind (payload, commands, queues) by target: "host", peers by their names, and others.
    pub bus: std::collections::BTreeMap<String, Bytes>,
    /// What the link carried.
    pub wire: LinkCounters,
    /// What the transport did.
    pub transport: Transport,
    /// What the adapter's own machinery did.
    pub adapter: Machinery,
    /// Register accesses that were reads, writes, and of those the ones that mean nothing.
    pub registers: [u64; 3],
}

/// Bytes read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// Read from there.
    pub read: u64,
    /// Written to there.
    pub written: u64,
}

/// What there is of a device's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The port's link is up.
    pub link: bool,
    /// LID of the port.
    pub lid: u16,
    /// A driver has initialised the adapter.
    pub initialised: bool,
    /// Queue pairs there are.
    pub queue_pairs: usize,
    /// Completion queues there are.
    pub completion_queues: usize,
    /// Shared receive queues there are.
    pub shared_receive_queues: usize,
    /// Memory keys there are.
    pub memory_keys: usize,
    /// Page faults that the driver owes an answer for.
    pub page_faults: usize,
}

/// The worker did not answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the adapter's worker did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
pub struct NoAnswer;

/// A way to ask an adapter from outside of the guest; clones ask the same one.
#[derive(Clone, Debug)]
pub struct Handle {
    inbox: Arc<Inbox>,
    registers: Arc<Registers>,
}

impl Handle {
    /// Lets the worker answer a question.
    fn ask<T: Send + 'static>(&self, question: impl FnOnce(&mut Model) -> T + Send + 'static) -> Result<T, NoAnswer> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.inbox.put(Message::Ask(Box::new(move |model| {
            // Whoever asked may have given up.
            let _ = sender.send(question(model));
        })));
        receiver.recv_timeout(ANSWER_TIMEOUT).map_err(|_| NoAnswer)
    }

    /// What was counted.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn report(&self) -> Result<Report, NoAnswer> {
        let registers = self.registers.counts();
        self.ask(move |model| {
            let bus = model.hca.bus.dma.by_target();
            let bytes = |Moved { read, written }| Bytes { read, written };
            let (payload, datagrams) = model.hca.counters.payload_bytes();
            Report {
                payload,
                datagrams,
                bus: bus.into_iter().map(|(name, moved)| (name, bytes(moved))).collect(),
                wire: model.hca.link_counters(),
                transport: model.transport(),
                adapter: model.hca.counters.machinery(),
                registers,
            }
        })
    }

    /// Sets what was counted to 0.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn reset_counters(&self) -> Result<(), NoAnswer> {
        self.registers.reset_counts();
        self.ask(Model::reset_counters)
    }

    /// The adapter's state.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn status(&self) -> Result<Status, NoAnswer> {
        self.ask(|model| model.status())
    }

    /// Takes the port's link down, or up again.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn set_link(&self, up: bool) -> Result<(), NoAnswer> {
        self.ask(move |model| model.hca.port.set_up(up))
    }

    /// What goes wrong on the port's link from now on.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn set_faults(&self, faults: Faults) -> Result<(), NoAnswer> {
        self.ask(move |model| model.hca.port.set_faults(faults))
    }

    /// Breaks the adapter until the function is reset: its health counter stands still, its health buffer holds this
    /// syndrome (1, where it is 0) and asks for a reset, and no command or doorbell is taken.
    pub fn fail(&self, syndrome: u8) {
        self.registers.fail(syndrome.max(1));
    }
}

/// The adapter as the emulator sees it. Its worker ends when it is dropped.
#[derive(Debug)]
pub struct Nic {
    bus: Bus,
    config: ConfigSpace,
    bar0: Region,
    registers: Arc<Registers>,
    inbox: Arc<Inbox>,
    worker: Worker,
}

impl Nic {
    /// Makes an adapter, joins the subnet and starts the worker.
    ///
    /// # Errors
    ///
    /// If the settings are none a PCI device can have, or the subnet does not take the port.
    pub fn new(settings: Settings, fabric: &Fabric, bus: Bus) -> io::Result<Self> {
        let invalid = |error: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidInput, error.to_string());
        let config = ConfigBuilder::new(VENDOR_ID, DEVICE_ID)
            .class(CLASS, 0)
            .bar(0, BAR0_SIZE, BarKind::Memory64Prefetchable)
            .power_management()
            .pcie(settings.speed, settings.lanes)
            .msix(VECTORS, 0, MSIX_TABLE, MSIX_PBA)
            .serial(settings.guid)
            .build()
            .map_err(|error| invalid(&error))?;
        let registers = Arc::new(Registers::new());
        let inbox = Arc::new(Inbox::default());
        let port = PortConfig {
            name: settings.name.clone(),
            guid: settings.guid,
            switch: settings.switch,
        };
        let deliver = {
            let inbox = Arc::clone(&inbox);
            move |delivery| inbox.put(Message::Delivery(delivery))
        };
        let port = fabric.join(&port, deliver).map_err(|error| invalid(&error))?;
        let identity = Identity {
            name: settings.name.clone(),
            node_guid: settings.guid,
            port_guid: settings.guid,
        };
        let mut model = Model::new(
            identity,
            bus.clone(),
            Arc::clone(&registers),
            Arc::new(Counters::default()),
            port,
        );
        let worker = Worker::spawn(&settings.name, bus.clone(), {
            let inbox = Arc::clone(&inbox);
            move || work(&inbox, &mut model)
        })?;
        Ok(Self {
            bus,
            config,
            bar0: Region::registers(BAR0_SIZE),
            registers,
            inbox,
            worker,
        })
    }

    /// A way to ask whether the worker lives.
    pub fn health(&self) -> Health {
        self.worker.health()
    }

    /// A way to ask the adapter while it is served.
    pub fn handle(&self) -> Handle {
        Handle {
            inbox: Arc::clone(&self.inbox),
            registers: Arc::clone(&self.registers),
        }
    }
}

/// The worker: takes in what happens and goes on with what there is to do.
fn work(inbox: &Inbox, model: &mut Model) {
    let mut messages = Vec::new();
    let mut wait = Wait::No;
    loop {
        inbox.take(&mut messages, wait);
        for message in messages.drain(..) {
            if !model.handle(message) {
                return;
            }
        }
        wait = model.run();
    }
}

impl Device for Nic {
    fn bus(&self) -> &Bus {
        &self.bus
    }

    fn config(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn region(&self, index: u32) -> Option<&Region> {
        (index == 0).then_some(&self.bar0)
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if region == 0 {
            self.registers.read(offset, data);
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        if region == 0 {
            self.registers.write(offset, data, &self.inbox);
        }
    }

    fn reset(&mut self) {
        // What the worker is doing fails, because DMA was ended; what it has not begun comes before this message, and
        // fails as well. The driver waits until the registers say that it is over.
        self.bus.dma.abort();
        self.registers.reset();
        self.inbox.put(Message::Reset);
    }

    fn disconnected(&mut self) {
        self.reset();
        self.config.reset();
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.bus.dma.abort();
        self.inbox.put(Message::Stop);
        self.worker.join();
    }
}
