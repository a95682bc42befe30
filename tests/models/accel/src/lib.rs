// SPDX-License-Identifier: MIT OR Apache-2.0

//! Model of an accelerator: memory behind a BAR, compute operations on the memory, a DMA engine, and counters of every
//! byte moved.
//!
//! Crate `p2pmem-accel-regs` defines the registers. The thread that serves the emulator answers register accesses. One
//! worker thread executes the commands that registers submit, and one per ring the entries of the ring, each in order.
//! Register accesses do not wait for the workers.

// Compile and run the README's example as a doctest.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod arithmetic;
mod backoff;
mod counters;
mod engine;
mod port;
mod queue;
mod ring;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use p2pmem_accel_regs as regs;
use p2pmem_accel_regs::{Counter, Status, control, reg};
use p2pmem_vfio_user::{
    BarKind, Bus, ConfigBuilder, ConfigSpace, Device, DmaCounts, Health, LinkSpeed, Memory, Moved, Peers, Raised,
    Region, Worker,
};
use serde::Serialize;
use tracing::{debug, error};

pub use counters::Counters;
use port::Port;
use queue::{Command, Queue};
use ring::Ring;
pub use ring::RingState;

/// Maximum time a reset waits for the aborted operations.
const RESET_TIMEOUT: Duration = Duration::from_secs(60);

/// Configuration of an accelerator.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Size of BAR2 in bytes: a power of two, 4096 or more.
    pub memory: u64,
    /// Size of BAR5, if there is one: more memory, which operations do not reach. A power of two, 4096 or more.
    pub second_memory: Option<u64>,
    /// Whether the processor's writes to BAR2 arrive late: with its next access of the device that does not pass them.
    pub delayed_writes: bool,
    /// Negotiated speed of the PCIe link.
    pub speed: LinkSpeed,
    /// Negotiated width of the PCIe link, in lanes.
    pub lanes: u8,
    /// PCIe device serial number.
    pub serial: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            memory: 256 << 20,
            second_memory: None,
            delayed_writes: false,
            speed: LinkSpeed::Gen4,
            lanes: 16,
            serial: 0,
        }
    }
}

/// State of an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct State {
    /// Size of BAR2 in bytes.
    pub memory: u64,
    /// Bus address of BAR2, if memory decoding is enabled.
    pub bar2_address: Option<u64>,
    /// Sequence number of the last submitted command.
    pub submitted: u32,
    /// Sequence number of the last completed command.
    pub completed: u32,
    /// Number of submitted commands that are not completed.
    pub pending: u32,
    /// Whether the driver has enabled interrupts.
    pub interrupts_enabled: bool,
    /// The rings.
    pub rings: [RingState; regs::ring::COUNT as usize],
}

/// State that the serving thread, the workers, and callers outside of the guest share.
#[derive(Debug)]
pub struct Shared {
    bus: Bus,
    memory: Arc<Memory>,
    counters: Counters,
    queue: Queue,
    /// DMA of the commands of `queue`.
    port: Port,
    rings: [Ring; regs::ring::COUNT as usize],
    /// When the device was created; its clock starts at 0.
    start: Instant,
    /// Bus address of BAR2; 0 if memory decoding is disabled.
    bar2: AtomicU64,
}

impl Shared {
    /// Returns all counters, in the order of [`Counter::ALL`].
    pub fn counters(&self) -> [u64; Counter::COUNT] {
        // Polls first: every access of a poll is counted by the bus before it is counted as one of a poll.
        let polls = self.ports().map(|port| port.polls.counts());
        let polls = polls.fold(DmaCounts::default(), |sum, one| DmaCounts {
            host_read: sum.host_read + one.host_read,
            peer_read: sum.peer_read + one.peer_read,
            message_read: sum.message_read + one.message_read,
            ..sum
        });
        self.counters.snapshot(&polls, &self.bus.dma.counts())
    }

    /// DMA of all sources of operations.
    fn ports(&self) -> impl Iterator<Item = &Port> {
        std::iter::once(&self.port).chain(self.rings.iter().map(Ring::port))
    }

    /// Sets all counters to 0.
    pub fn reset_counters(&self) {
        self.counters.reset();
        self.bus.dma.reset_counts();
        self.ports().for_each(Port::reset_counts);
    }

    /// Returns the bytes that the DMA engine moved, by name of the DMA target. Reads by polls are not included.
    pub fn moved(&self) -> BTreeMap<String, Moved> {
        let polls: Vec<_> = self.ports().map(|port| port.polls.by_target()).collect();
        let mut moved = self.bus.dma.by_target();
        for (name, read) in polls.into_iter().flatten() {
            if let Some(target) = moved.get_mut(&name) {
                target.read = target.read.saturating_sub(read.read);
            }
        }
        moved
    }

    /// Returns the device's clock in nanoseconds.
    fn clock(&self) -> u64 {
        // Not truncated for 500 years.
        self.start.elapsed().as_nanos() as u64
    }

    /// Writes to BAR2, for an operation that is no computation and moves no payload.
    fn store_control(&self, offset: u64, data: &[u8]) -> Result<(), Status> {
        self.memory.write(offset, data).map_err(|_| Status::BadRange)?;
        self.counters.add(Counter::ControlWritten, data.len() as u64);
        Ok(())
    }

    /// Raises an interrupt on the vector in the low 8 bits of `vector`.
    fn interrupt(&self, vector: u32) {
        match self.bus.irqs.raise((vector & 0xff) as u16) {
            Raised::Delivered | Raised::Latched => self.counters.add(Counter::Interrupts, 1),
            Raised::Dropped | Raised::NoVector => debug!(vector, "interrupt not delivered"),
        }
    }

    /// Raises an interrupt if the driver has enabled interrupts.
    fn interrupt_if_enabled(&self, vector: u32) {
        if self.queue.control() & control::INTERRUPTS != 0 {
            self.interrupt(vector);
        }
    }

    /// Aborts all commands, and stops all rings.
    fn abort(&self) {
        self.queue.abort();
        self.rings.iter().for_each(Ring::abort);
        self.bus.dma.abort();
    }

    /// Returns the memory behind BAR2.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the state of the accelerator.
    pub fn state(&self) -> State {
        let (submitted, completed) = self.queue.sequence();
        let bar2 = self.bar2.load(Ordering::Relaxed);
        State {
            memory: self.memory.len(),
            bar2_address: (bar2 != 0).then_some(bar2),
            submitted,
            completed,
            pending: self.queue.pending(),
            interrupts_enabled: self.queue.control() != 0,
            rings: std::array::from_fn(|i| self.rings[i].state()),
        }
    }
}

/// The accelerator as a device of the emulator. Dropping it ends its workers.
#[derive(Debug)]
pub struct Accel {
    shared: Arc<Shared>,
    config: ConfigSpace,
    registers: Region,
    bar2: Region,
    msix: Region,
    bar5: Option<Region>,
    /// Current values of the command registers.
    next: Command,
    /// The worker of the commands, and those of the rings.
    workers: Vec<Worker>,
    health: Health,
}

impl Accel {
    /// Creates an accelerator and starts its worker.
    ///
    /// # Errors
    ///
    /// If the memory cannot be allocated, or the settings are invalid for a PCI device.
    pub fn new(settings: Settings) -> io::Result<Self> {
        Self::make(settings, Bus::new(regs::MSIX_VECTORS))
    }

    /// Creates an accelerator with the name `name` in a process that serves several devices of one guest. The devices
    /// access each other's memory directly.
    ///
    /// # Errors
    ///
    /// As [`Accel::new`], and if a peer has the same name.
    pub fn among(settings: Settings, name: &str, peers: &Peers) -> io::Result<Self> {
        let accel = Self::make(settings, Bus::among(regs::MSIX_VECTORS, peers))?;
        let offered = accel.shared.bus.offer(2, name, &accel.bar2);
        offered.map_err(|error| io::Error::new(io::ErrorKind::AlreadyExists, error))?;
        Ok(accel)
    }

    fn make(settings: Settings, bus: Bus) -> io::Result<Self> {
        for (bar, size) in [(2, Some(settings.memory)), (5, settings.second_memory)] {
            if size.is_some_and(|size| !size.is_power_of_two() || size < 4096) {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("BAR{bar} size {size:?}: must be a power of two, 4096 or more"),
                ));
            }
        }
        let mut config = ConfigBuilder::new(regs::VENDOR_ID, regs::DEVICE_ID)
            .class(regs::CLASS, regs::REVISION)
            .bar(0, regs::BAR0_SIZE, BarKind::Memory32)
            .bar(2, settings.memory, BarKind::Memory64Prefetchable)
            .bar(4, regs::BAR4_SIZE, BarKind::Memory32)
            .power_management()
            .pcie(settings.speed, settings.lanes)
            .msix(regs::MSIX_VECTORS, 4, regs::MSIX_TABLE, regs::MSIX_PBA)
            .serial(settings.serial);
        let mut bar5 = None;
        if let Some(size) = settings.second_memory {
            config = config.bar(5, size, BarKind::Memory32);
            bar5 = Some(Region::memory(Arc::new(Memory::new("p2pmem-accel-bar5", size)?)));
        }
        let config = config
            .build()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let memory = Arc::new(Memory::new("p2pmem-accel-bar2", settings.memory)?);
        let bar2 = if settings.delayed_writes {
            Region::delayed
        } else {
            Region::memory
        };
        let shared = Arc::new(Shared {
            bus: bus.clone(),
            memory: Arc::clone(&memory),
            counters: Counters::default(),
            queue: Queue::default(),
            port: Port::new(&bus.dma),
            rings: std::array::from_fn(|_| Ring::new(&bus.dma)),
            start: Instant::now(),
            bar2: AtomicU64::new(0),
        });
        let health = Health::default();
        let mut accel = Self {
            shared: Arc::clone(&shared),
            config,
            registers: Region::registers(regs::BAR0_SIZE),
            bar2: bar2(memory),
            msix: Region::registers(regs::BAR4_SIZE),
            bar5,
            next: Command::default(),
            workers: Vec::new(),
            health: health.clone(),
        };
        // If a thread cannot be created, dropping the accelerator ends those that were.
        for ring in 0..=regs::ring::COUNT as usize {
            let shared = Arc::clone(&shared);
            let worker = match ring.checked_sub(1) {
                None => Worker::spawn_with("worker", bus.clone(), health.clone(), move || queue::run(&shared)),
                Some(ring) => Worker::spawn_with(&format!("ring{ring}"), bus.clone(), health.clone(), move || {
                    ring::run(&shared, &shared.rings[ring]);
                }),
            };
            accel.workers.push(worker?);
        }
        Ok(accel)
    }

    /// Returns the state that callers may access while the device is served.
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Returns a handle that reports whether the workers run.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Returns the ring of a register in BAR0, and the register's offset among those of the ring.
    fn ring(&self, offset: u64) -> Option<(&Ring, u64)> {
        let offset = offset.checked_sub(reg::RINGS)?;
        let ring = self
            .shared
            .rings
            .get(usize::try_from(offset / regs::ring::STRIDE).ok()?)?;
        Some((ring, offset % regs::ring::STRIDE))
    }

    /// Returns the 8 bytes of registers at `offset`, a multiple of 8. `None` if the offset is unknown.
    fn read64(&self, offset: u64) -> Option<u64> {
        let pair = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
        let queue = &self.shared.queue;
        Some(match offset {
            reg::ID => pair(regs::ID, regs::VERSION),
            reg::FEATURES => pair(regs::Op::features(), queue.control()),
            reg::MEMORY_SIZE => self.shared.memory.len(),
            reg::QUEUE_DEPTH => pair(regs::QUEUE_DEPTH, queue.pending()),
            reg::SUBMITTED => {
                let (submitted, completed) = queue.sequence();
                pair(submitted, completed)
            }
            reg::REFUSED => pair(queue.refused(), regs::ring::COUNT),
            reg::OP => pair(self.next.op, self.next.flags),
            reg::OFFSET => self.next.offset,
            reg::LENGTH => self.next.length,
            reg::ARGUMENT => self.next.argument,
            reg::DOORBELL | reg::COUNTERS_RESET => 0,
            _ if (reg::COUNTERS..reg::COUNTERS + 8 * Counter::COUNT as u64).contains(&offset) => {
                self.shared.counters()[((offset - reg::COUNTERS) / 8) as usize]
            }
            _ if (reg::RESULTS..reg::RESULTS + u64::from(regs::QUEUE_DEPTH) * regs::RESULT_SIZE).contains(&offset) => {
                let result = queue.result(((offset - reg::RESULTS) / regs::RESULT_SIZE) as usize);
                if offset % regs::RESULT_SIZE == 0 {
                    pair(result.seq, result.status)
                } else {
                    result.value
                }
            }
            _ => {
                let (ring, register) = self.ring(offset)?;
                ring.read64(register)?
            }
        })
    }

    /// Writes 4 bytes of registers. Returns false if the register is unknown or read-only.
    fn write32(&mut self, offset: u64, value: u32) -> bool {
        fn half(word: &mut u64, high: bool, value: u32) {
            let shift = if high { 32 } else { 0 };
            *word = *word & !(0xffff_ffff << shift) | (u64::from(value) << shift);
        }
        const HIGH: u64 = 4;
        match offset {
            reg::CONTROL => {
                self.shared.queue.set_control(value);
                if value & control::ABORT != 0 {
                    self.shared.abort();
                }
            }
            reg::OP => self.next.op = value,
            reg::FLAGS => self.next.flags = value,
            reg::OFFSET => half(&mut self.next.offset, false, value),
            _ if offset == reg::OFFSET + HIGH => half(&mut self.next.offset, true, value),
            reg::LENGTH => half(&mut self.next.length, false, value),
            _ if offset == reg::LENGTH + HIGH => half(&mut self.next.length, true, value),
            reg::ARGUMENT => half(&mut self.next.argument, false, value),
            _ if offset == reg::ARGUMENT + HIGH => half(&mut self.next.argument, true, value),
            reg::DOORBELL => self.shared.queue.submit(self.next),
            reg::COUNTERS_RESET => self.shared.reset_counters(),
            _ => {
                return match self.ring(offset) {
                    Some((ring, register)) => ring.write32(register, value, self.shared.memory.len()),
                    None => false,
                };
            }
        }
        true
    }
}

impl Device for Accel {
    fn bus(&self) -> &Bus {
        &self.shared.bus
    }

    fn config(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn region(&self, index: u32) -> Option<&Region> {
        match index {
            0 => Some(&self.registers),
            2 => Some(&self.bar2),
            4 => Some(&self.msix),
            5 => self.bar5.as_ref(),
            _ => None,
        }
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if region != 0 {
            return;
        }
        self.shared.counters.add(Counter::RegisterReads, 1);
        let len = data.len();
        let word = if (len == 4 || len == 8) && offset % len as u64 == 0 {
            self.read64(offset & !7)
        } else {
            None
        };
        match word {
            Some(word) => data.copy_from_slice(&word.to_le_bytes()[(offset % 8) as usize..][..len]),
            None => self.shared.counters.add(Counter::RegisterBad, 1),
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        if region != 0 {
            return;
        }
        self.shared.counters.add(Counter::RegisterWrites, 1);
        let done = match *data {
            [a, b, c, d] if offset % 4 == 0 => self.write32(offset, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] if offset % 8 == 0 => {
                let low = self.write32(offset, u32::from_le_bytes([a, b, c, d]));
                self.write32(offset + 4, u32::from_le_bytes([e, f, g, h])) && low
            }
            _ => false,
        };
        if !done {
            self.shared.counters.add(Counter::RegisterBad, 1);
        }
    }

    fn reset(&mut self) {
        self.shared.abort();
        let end = Instant::now() + RESET_TIMEOUT;
        let left = || end.saturating_duration_since(Instant::now());
        let idle = self.shared.queue.wait_idle(left());
        if !self
            .shared
            .rings
            .iter()
            .fold(idle, |idle, ring| ring.wait_idle(left()) && idle)
        {
            error!(
                "the workers did not complete the aborted operations within {} s of a reset",
                RESET_TIMEOUT.as_secs()
            );
        }
        self.shared.queue.reset();
        self.shared.rings.iter().for_each(Ring::reset);
        self.next = Command::default();
        self.shared.bar2.store(0, Ordering::Relaxed);
    }

    fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        self.shared
            .bar2
            .store(self.config.bar_address(2).unwrap_or(0), Ordering::Relaxed);
    }

    fn direct_access(&mut self, region: u32, len: u64, write: bool) {
        if region != 2 {
            return;
        }
        let counter = if write {
            Counter::TrappedWritten
        } else {
            Counter::TrappedRead
        };
        self.shared.counters.add(counter, len);
    }

    fn disconnected(&mut self) {
        // The next client gets a device in power-on state, except for memory and counters.
        self.reset();
        self.config.reset();
    }
}

impl Drop for Accel {
    fn drop(&mut self) {
        self.shared.abort();
        self.shared.queue.stop();
        self.shared.rings.iter().for_each(Ring::stop);
        self.workers.iter_mut().for_each(Worker::join);
    }
}
