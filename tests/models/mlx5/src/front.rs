// SPDX-License-Identifier: MIT OR Apache-2.0

//! The adapter as the emulator sees it: a PCI function whose registers are answered at once, and a worker for the rest.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use p2pmem_ib::{Counters as TransportCounters, Fabric, Faults, LinkCounters, PortConfig};
use p2pmem_vfio_user::{
    BarKind, Bus, ConfigBuilder, ConfigSpace, Device, Dma, Health, LinkSpeed, Moved, Region, Worker,
};
use serde::Serialize;

use super::adapter::Adapter;
use super::command;
use super::counters::{Counters, Machinery, Payload};
use super::hold::{Hold, HoldRequest, HoldStatus};
use super::inbox::{Inboxes, Message, Wait};
use super::model::{Hca, Identity, Model, Transport};
use super::registers::{BAR0_SIZE, MSIX_PBA, MSIX_TABLE, Registers, VECTORS};

/// Mellanox.
pub const VENDOR_ID: u16 = 0x15b3;
/// ConnectX-6.
pub const DEVICE_ID: u16 = 0x101b;
/// InfiniBand controller.
const CLASS: u32 = 0x02_07_00;
/// How long a question to the worker may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

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
    /// The same by target, as `bus`.
    pub payload_by_target: std::collections::BTreeMap<String, Bytes>,
    /// The same of datagrams, which the kernel sends and receives by itself as well.
    pub datagrams: Payload,
    /// Bytes of any kind (payload, commands, queues) by target: "host", peers by their names, and others.
    pub bus: std::collections::BTreeMap<String, Bytes>,
    /// What the link carried.
    pub wire: LinkCounters,
    /// What the transport did.
    pub transport: TransportCounters,
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

/// A handle for queries of an adapter from outside of the guest. Clones query the same adapter.
#[derive(Clone, Debug)]
pub struct Handle {
    inboxes: Arc<Inboxes>,
    registers: Arc<Registers>,
    hold: Arc<Hold>,
}

impl Handle {
    /// Lets the worker answer a question.
    fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Model<'_>) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.inboxes.put(Message::Ask(Box::new(move |model| {
            // The caller may have given up.
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
            let by_target = |dma: &Dma| {
                let bytes = |Moved { read, written }| Bytes { read, written };
                let moved = dma.by_target().into_iter();
                moved.map(|(name, moved)| (name, bytes(moved))).collect()
            };
            let [payload, datagrams] = &model.hca.tallies;
            Report {
                payload: payload.counts().into(),
                payload_by_target: by_target(payload),
                datagrams: datagrams.counts().into(),
                bus: by_target(&model.hca.bus.dma),
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
        self.ask(|model| model.reset_counters())
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

    /// Holds the next transfer of payload that is meant, when its bus addresses are found and before its first byte is
    /// moved. A transfer that is held goes on. While one is held, the adapter moves nothing else, and does not answer
    /// [`Handle::report`] and the like.
    pub fn hold(&self, request: HoldRequest) {
        self.hold.arm(request);
    }

    /// Lets a held transfer go on, and holds no other.
    pub fn release(&self) {
        self.hold.release();
    }

    /// What is held, and what waits for it. Answers at any time.
    pub fn held(&self) -> HoldStatus {
        self.hold.status()
    }

    /// Whether a change of a memory key waits for transfers by the key that are in flight, as it does unless a test says
    /// otherwise.
    pub fn set_drain(&self, on: bool) {
        self.hold.set_drain(on);
    }
}

/// The adapter as the emulator sees it. Its workers end when it is dropped.
#[derive(Debug)]
pub struct Nic {
    bus: Bus,
    config: ConfigSpace,
    bar0: Region,
    registers: Arc<Registers>,
    inboxes: Arc<Inboxes>,
    hold: Arc<Hold>,
    /// For the transport, and for commands.
    workers: [Worker; 2],
}

impl Nic {
    /// Makes an adapter, joins the subnet and starts the workers.
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
        let inboxes = Arc::new(Inboxes::default());
        let hold = Arc::new(Hold::default());
        let port = PortConfig {
            name: settings.name.clone(),
            guid: settings.guid,
            switch: settings.switch,
        };
        let deliver = {
            let inboxes = Arc::clone(&inboxes);
            move |delivery| inboxes.put(Message::Delivery(delivery))
        };
        let port = fabric.join(&port, deliver).map_err(|error| invalid(&error))?;
        let identity = Identity {
            name: settings.name.clone(),
            node_guid: settings.guid,
            port_guid: settings.guid,
        };
        let hca = Hca::new(
            identity,
            bus.clone(),
            Arc::clone(&registers),
            Arc::new(Counters::default()),
            port,
        );
        let adapter = Arc::new(Adapter::new(hca, Arc::clone(&inboxes), Arc::clone(&hold)));
        let health = Health::default();
        let mut transport = Transport::new(Arc::clone(&adapter));
        let workers = [
            Worker::spawn_with(&settings.name, bus.clone(), health.clone(), move || {
                work(&mut transport)
            })?,
            Worker::spawn_with(&format!("{} cmd", settings.name), bus.clone(), health, {
                let inboxes = Arc::clone(&inboxes);
                move || {
                    work_commands(&adapter);
                    // Last, so that nothing that was handed on comes after it.
                    inboxes.transport.put(Message::Stop);
                }
            })?,
        ];
        Ok(Self {
            bus,
            config,
            bar0: Region::registers(BAR0_SIZE),
            registers,
            inboxes,
            hold,
            workers,
        })
    }

    /// Returns a handle that reports whether the workers run.
    pub fn health(&self) -> Health {
        self.workers[0].health()
    }

    /// Returns a handle for queries of the adapter while it is served.
    pub fn handle(&self) -> Handle {
        Handle {
            inboxes: Arc::clone(&self.inboxes),
            registers: Arc::clone(&self.registers),
            hold: Arc::clone(&self.hold),
        }
    }
}

/// The worker for the transport: takes in what happens and goes on with what there is to do.
fn work(transport: &mut Transport) {
    let adapter = Arc::clone(&transport.adapter);
    let mut messages = Vec::new();
    let mut wait = Wait::No;
    loop {
        adapter.inboxes.transport.take(&mut messages, wait);
        for message in messages.drain(..) {
            if !transport.handle(message) {
                return;
            }
        }
        wait = transport.run();
    }
}

/// The worker for commands, doorbells of event and completion queues, and the driver's own queue pairs.
fn work_commands(adapter: &Adapter) {
    let mut messages = Vec::new();
    let mut wait = Wait::No;
    loop {
        adapter.inboxes.commands.take(&mut messages, wait);
        for message in messages.drain(..) {
            match message {
                Message::Command { queue, entries } => command::execute(adapter, queue, entries),
                Message::EventQueue { .. } | Message::Arm { .. } => adapter.hca().doorbell(&message),
                Message::Send { uar, qpn } => {
                    if adapter.hca().may_send(uar, qpn) {
                        adapter.driver().doorbell(qpn);
                        adapter.run_driver();
                    }
                }
                Message::Stop => return,
                // Behind every command that was taken before it.
                other => adapter.inboxes.transport.put(other),
            }
        }
        wait = adapter.run_driver();
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
            self.registers.write(offset, data, &self.inboxes);
        }
    }

    fn reset(&mut self) {
        // What the workers are doing fails, because DMA was ended; what it has not begun comes before this message, and
        // fails as well. The driver waits until the registers say that it is over.
        self.bus.dma.abort();
        self.hold.release();
        self.registers.reset();
        self.inboxes.put(Message::Reset);
    }

    fn disconnected(&mut self) {
        self.reset();
        self.config.reset();
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        self.bus.dma.abort();
        self.hold.release();
        self.inboxes.put(Message::Stop);
        for worker in self.workers.iter_mut().rev() {
            worker.join();
        }
    }
}
