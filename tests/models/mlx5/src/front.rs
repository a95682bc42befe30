// SPDX-License-Identifier: MIT OR Apache-2.0

//! The adapter as a PCI function of the emulator, and the [`Handle`] for control from outside of the guest.

use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use p2pmem_ib::{Counters as TransportCounters, Fabric, Faults, LinkCounters, PortConfig};
use p2pmem_vfio_user::{
    BarKind, Bus, ConfigBuilder, ConfigSpace, Device, DmaCounts, Health, LinkSpeed, Moved, Region, Worker,
};
use serde::Serialize;

use super::adapter::Adapter;
use super::command;
use super::counters::{AdapterCounters, Counters};
use super::hold::{Hold, HoldRequest, HoldStatus};
use super::inbox::{Inboxes, Message, Wait};
use super::model::{Hca, Identity, Model, TransportWorker};
use super::registers::{BAR0_SIZE, MSIX_PBA, MSIX_TABLE, Registers, VECTORS};
use super::trace::Steps;

/// PCI vendor ID: Mellanox.
pub const VENDOR_ID: u16 = 0x15b3;
/// PCI device ID: ConnectX-6.
pub const DEVICE_ID: u16 = 0x101b;
/// PCI class code: InfiniBand controller.
const CLASS: u32 = 0x02_07_00;
/// Maximum time a worker may take to answer a request of a [`Handle`].
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// Configuration of an adapter.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name, used in the subnet and in logs.
    pub name: String,
    /// GUID of the port and of the node. Must be unique in the subnet.
    pub guid: u64,
    /// Name of the switch that the port connects to.
    pub switch: String,
    /// Rate of the port's network link in each direction. `None` means that a packet takes no time.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Negotiated speed of the PCIe link.
    pub speed: LinkSpeed,
    /// Negotiated width of the PCIe link, in lanes.
    pub lanes: u8,
}

/// All counters of an adapter.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Payload bytes of connected queue pairs, by kind of memory.
    pub payload: DmaCounts,
    /// Payload bytes of connected queue pairs, by DMA target as in `bus`.
    pub payload_by_target: std::collections::BTreeMap<String, Moved>,
    /// Payload bytes of datagrams, by kind of memory. The kernel itself sends and receives datagrams too.
    pub datagrams: DmaCounts,
    /// Bytes of all DMA (payload, commands, queues) by DMA target: "host", the names of peers, and others.
    pub bus: std::collections::BTreeMap<String, Moved>,
    /// Counters of the link.
    pub wire: LinkCounters,
    /// Counters of the transport.
    pub transport: TransportCounters,
    /// Counters of commands, events, completions, doorbells and memory keys.
    pub adapter: AdapterCounters,
    /// Register accesses: reads, writes, and accesses of either kind to an unknown register.
    pub registers: [u64; 3],
}

/// State of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Whether the port's link is up.
    pub link: bool,
    /// LID of the port.
    pub lid: u16,
    /// Whether a driver has executed INIT_HCA.
    pub initialised: bool,
    /// Number of queue pairs.
    pub queue_pairs: usize,
    /// Number of completion queues.
    pub completion_queues: usize,
    /// Number of shared receive queues.
    pub shared_receive_queues: usize,
    /// Number of memory keys.
    pub memory_keys: usize,
    /// Number of page faults that the driver has not resumed yet.
    pub page_faults: usize,
}

/// The transport worker did not answer in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the adapter's transport worker did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
pub struct NoAnswer;

/// Handle for the control of an adapter from outside of the guest. Clones refer to the same adapter.
#[derive(Clone, Debug)]
pub struct Handle {
    inboxes: Arc<Inboxes>,
    registers: Arc<Registers>,
    hold: Arc<Hold>,
}

impl Handle {
    /// Runs `request` on the transport worker and returns its result.
    fn request<T: Send + 'static>(
        &self,
        request: impl FnOnce(&mut Model<'_>) -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.inboxes.put(Message::Request(Box::new(move |model| {
            // The caller may have timed out.
            let _ = sender.send(request(model));
        })));
        receiver.recv_timeout(ANSWER_TIMEOUT).map_err(|_| NoAnswer)
    }

    /// Returns all counters.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn report(&self) -> Result<Report, NoAnswer> {
        let registers = self.registers.counts();
        self.request(move |model| {
            let [payload, datagrams] = &model.hca.counted_dma;
            Report {
                payload: payload.counts(),
                payload_by_target: payload.by_target(),
                datagrams: datagrams.counts(),
                bus: model.hca.bus.dma.by_target(),
                wire: model.hca.link_counters(),
                transport: model.transport_counters(),
                adapter: model.hca.counters.adapter_counters(),
                registers,
            }
        })
    }

    /// Sets all counters to 0.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn reset_counters(&self) -> Result<(), NoAnswer> {
        self.registers.reset_counts();
        self.request(|model| model.reset_counters())
    }

    /// Returns the state of the adapter.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn status(&self) -> Result<Status, NoAnswer> {
        self.request(|model| model.status())
    }

    /// Sets the port's link up or down.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn set_link(&self, up: bool) -> Result<(), NoAnswer> {
        self.request(move |model| model.hca.port.set_up(up))
    }

    /// Sets the faults that the port's link injects from now on.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn set_faults(&self, faults: Faults) -> Result<(), NoAnswer> {
        self.request(move |model| model.hca.port.set_faults(faults))
    }

    /// Sets the rate of the port's link, in bytes per second in each direction; `None` for a link without a rate.
    ///
    /// # Errors
    ///
    /// [`NoAnswer`].
    pub fn set_rate(&self, bytes_per_second: Option<NonZeroU64>) -> Result<(), NoAnswer> {
        self.request(move |model| model.hca.port.set_rate(bytes_per_second))
    }

    /// Makes the adapter fail until the function is reset: the health counter stops, the health buffer holds `syndrome`
    /// (1 if `syndrome` is 0) and requests a reset, and the adapter ignores commands and doorbells.
    pub fn fail(&self, syndrome: u8) {
        self.registers.fail(syndrome.max(1));
    }

    /// Holds the next payload transfer that matches `request`, after its address translation and before its first byte
    /// is moved. A transfer that is already held continues. While a transfer is held, the adapter moves no other
    /// payload and does not answer [`Handle::report`] and the other methods that return [`NoAnswer`].
    pub fn hold(&self, request: HoldRequest) {
        self.hold.arm(request);
    }

    /// Releases a held transfer and cancels a pending hold request.
    pub fn release(&self) {
        self.hold.release();
    }

    /// Returns the held transfer and the operations that wait for it. Never blocks on a worker.
    pub fn held(&self) -> HoldStatus {
        self.hold.status()
    }

    /// Sets whether a change of a memory key waits for the transfers in flight that use the key. On by default; tests
    /// switch it off.
    pub fn set_drain(&self, on: bool) {
        self.hold.set_drain(on);
    }

    /// Starts a trace of at most `most` steps, see [`super::Step`]. Drops the steps of the trace before.
    pub fn start_trace(&self, most: usize) {
        self.inboxes.trace.start(most);
    }

    /// Ends the trace and returns its steps: none if no trace was started.
    pub fn take_trace(&self) -> Steps {
        self.inboxes.trace.take()
    }
}

/// The adapter as a device of the emulator. Dropping it ends its workers.
#[derive(Debug)]
pub struct Nic {
    bus: Bus,
    config: ConfigSpace,
    bar0: Region,
    registers: Arc<Registers>,
    inboxes: Arc<Inboxes>,
    hold: Arc<Hold>,
    /// Transport worker and command worker.
    workers: [Worker; 2],
}

impl Nic {
    /// Creates an adapter, joins the subnet and starts the workers.
    ///
    /// # Errors
    ///
    /// If the settings are invalid for a PCI device, or the subnet refuses the port.
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
            bytes_per_second: settings.bytes_per_second,
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
        let mut transport = TransportWorker::new(Arc::clone(&adapter));
        let workers = [
            Worker::spawn_with(&settings.name, bus.clone(), health.clone(), move || {
                run_transport_worker(&mut transport)
            })?,
            Worker::spawn_with(&format!("{} cmd", settings.name), bus.clone(), health, {
                let inboxes = Arc::clone(&inboxes);
                move || {
                    run_command_worker(&adapter);
                    // Stop is the last message: all messages that were forwarded precede it.
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

    /// Returns a handle for control of the adapter while it is served.
    pub fn handle(&self) -> Handle {
        Handle {
            inboxes: Arc::clone(&self.inboxes),
            registers: Arc::clone(&self.registers),
            hold: Arc::clone(&self.hold),
        }
    }
}

/// Main loop of the transport worker.
fn run_transport_worker(transport: &mut TransportWorker) {
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

/// Main loop of the command worker: commands, EQ and CQ doorbells, and REG_UMR queue pairs.
fn run_command_worker(adapter: &Adapter) {
    let mut messages = Vec::new();
    let mut wait = Wait::No;
    loop {
        adapter.inboxes.commands.take(&mut messages, wait);
        for message in messages.drain(..) {
            match message {
                Message::Command { queue, entries } => command::handle_doorbell(adapter, queue, entries),
                Message::EqDoorbell { .. } | Message::ArmCq { .. } => adapter.hca().doorbell(&message),
                Message::SendDoorbell { uar, qpn } => {
                    if adapter.hca().check_send_doorbell(uar, qpn) {
                        adapter.umr_engine().doorbell(qpn);
                        adapter.run_umr_engine();
                    }
                }
                Message::Stop => return,
                // Forward the message to the transport worker, behind all commands that precede it.
                other => adapter.inboxes.transport.put(other),
            }
        }
        wait = adapter.run_umr_engine();
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
        // The abort makes DMA in progress fail. DMA of messages that precede this Reset message fails too. The driver
        // polls the initialization segment until the reset is complete.
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
