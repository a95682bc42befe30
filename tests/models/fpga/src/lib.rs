// SPDX-License-Identifier: MIT OR Apache-2.0

//! Model of an FPGA: memory behind a BAR, and a stream of samples that the device writes to this memory at a set rate.
//!
//! Crate `p2pmem-fpga-regs` defines the registers and the frames. The thread that serves the emulator answers register
//! accesses. A worker thread writes the frames. Register accesses do not wait for the worker.

// Compile and run the README's example as a doctest.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod clock;
mod stream;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use p2pmem_fpga_regs as regs;
use p2pmem_fpga_regs::{Counter, Status, control, reg};
use p2pmem_vfio_user::{
    BarKind, Bus, ConfigBuilder, ConfigSpace, Device, Health, LinkSpeed, Memory, Peers, Region, Worker,
};
use serde::Serialize;
use tracing::error;

pub use clock::Clock;
use stream::{Registers, Stream};

/// Maximum time a reset waits for the end of the present frame.
const RESET_TIMEOUT: Duration = Duration::from_secs(60);

/// Configuration of an FPGA.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Size of BAR2 in bytes: a power of two, 4096 or more.
    pub memory: u64,
    /// Negotiated speed of the PCIe link.
    pub speed: LinkSpeed,
    /// Negotiated width of the PCIe link, in lanes.
    pub lanes: u8,
    /// PCIe device serial number.
    pub serial: u64,
    /// The clock of the samples.
    pub clock: Clock,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            memory: 64 << 20,
            speed: LinkSpeed::Gen4,
            lanes: 16,
            serial: 0,
            clock: Clock::default(),
        }
    }
}

/// State of an FPGA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct State {
    /// Size of BAR2 in bytes.
    pub memory: u64,
    /// Bus address of BAR2, if memory decoding is enabled.
    pub bar2_address: Option<u64>,
    /// Value of the status register.
    pub status: u32,
    /// Frames written since the start of the stream.
    pub produced: u64,
    /// Frames that the driver has read since the start of the stream.
    pub consumed: u64,
    /// Frames dropped since the start of the stream.
    pub dropped: u64,
}

/// State that the serving thread, the worker, and callers outside of the guest share.
#[derive(Debug)]
pub struct Shared {
    memory: Arc<Memory>,
    counters: [AtomicU64; Counter::COUNT],
    stream: Stream,
    /// Bus address of BAR2; 0 if memory decoding is disabled.
    bar2: AtomicU64,
}

impl Shared {
    fn count(&self, counter: Counter, amount: u64) {
        self.counters[counter as usize].fetch_add(amount, Ordering::Relaxed);
    }

    /// Returns all counters, in the order of [`Counter::ALL`].
    pub fn counters(&self) -> [u64; Counter::COUNT] {
        std::array::from_fn(|i| self.counters[i].load(Ordering::Relaxed))
    }

    /// Sets all counters to 0.
    pub fn reset_counters(&self) {
        self.counters.iter().for_each(|value| value.store(0, Ordering::Relaxed));
    }

    /// Returns the memory behind BAR2.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Waits until the worker has done all that is due by its clock, or `timeout` has passed. Returns whether it has.
    /// With a manual clock, nothing changes afterwards until the clock advances or a register is written.
    pub fn settle(&self, timeout: Duration) -> bool {
        self.stream.settle(timeout)
    }

    /// Returns the state of the FPGA.
    pub fn state(&self) -> State {
        let bar2 = self.bar2.load(Ordering::Relaxed);
        let progress = self.stream.progress();
        State {
            memory: self.memory.len(),
            bar2_address: (bar2 != 0).then_some(bar2),
            status: progress.status as u32,
            produced: progress.produced,
            consumed: progress.consumed,
            dropped: progress.dropped,
        }
    }
}

/// The FPGA as a device of the emulator. Dropping it ends its worker.
#[derive(Debug)]
pub struct Fpga {
    shared: Arc<Shared>,
    bus: Bus,
    config: ConfigSpace,
    registers: Region,
    bar2: Region,
    /// Current values of the settings.
    next: Registers,
    worker: Worker,
}

impl Fpga {
    /// Creates an FPGA and starts its worker.
    ///
    /// # Errors
    ///
    /// If the memory cannot be allocated, or the settings are invalid for a PCI device.
    pub fn new(settings: Settings) -> io::Result<Self> {
        Self::make(settings, Bus::new(0))
    }

    /// Creates an FPGA with the name `name` in a process that serves several devices of one guest. The other devices
    /// access its memory directly.
    ///
    /// # Errors
    ///
    /// As [`Fpga::new`], and if a peer has the same name.
    pub fn among(settings: Settings, name: &str, peers: &Peers) -> io::Result<Self> {
        let fpga = Self::make(settings, Bus::among(0, peers))?;
        let offered = fpga.bus.offer(2, name, &fpga.bar2);
        offered.map_err(|error| io::Error::new(io::ErrorKind::AlreadyExists, error))?;
        Ok(fpga)
    }

    fn make(settings: Settings, bus: Bus) -> io::Result<Self> {
        if !settings.memory.is_power_of_two() || settings.memory < 4096 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("BAR2 size {}: must be a power of two, 4096 or more", settings.memory),
            ));
        }
        let config = ConfigBuilder::new(regs::VENDOR_ID, regs::DEVICE_ID)
            .class(regs::CLASS, regs::REVISION)
            .bar(0, regs::BAR0_SIZE, BarKind::Memory32)
            .bar(2, settings.memory, BarKind::Memory64Prefetchable)
            .power_management()
            .pcie(settings.speed, settings.lanes)
            .serial(settings.serial)
            .build()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let memory = Arc::new(Memory::new("p2pmem-fpga-bar2", settings.memory)?);
        let shared = Arc::new(Shared {
            memory: Arc::clone(&memory),
            counters: std::array::from_fn(|_| AtomicU64::new(0)),
            stream: Stream::new(settings.clock),
            bar2: AtomicU64::new(0),
        });
        let worker = Worker::spawn("stream", bus.clone(), {
            let shared = Arc::clone(&shared);
            move || stream::run(&shared)
        })?;
        Ok(Self {
            shared,
            bus,
            config,
            registers: Region::registers(regs::BAR0_SIZE),
            bar2: Region::memory(memory),
            next: Registers::default(),
            worker,
        })
    }

    /// Returns the state that callers may access while the device is served.
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Returns a handle that reports whether the worker runs.
    pub fn health(&self) -> Health {
        self.worker.health()
    }

    /// Returns the 8 bytes of registers at `offset`, a multiple of 8. `None` if the offset is unknown.
    fn read64(&self, offset: u64) -> Option<u64> {
        let pair = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
        let progress = self.shared.stream.progress();
        // The counters of frames wrap around.
        let (produced, consumed) = (progress.produced as u32, progress.consumed as u32);
        Some(match offset {
            reg::ID => pair(regs::ID, regs::VERSION),
            reg::MEMORY_SIZE => self.shared.memory.len(),
            reg::RING_OFFSET => self.next.offset,
            reg::FRAME_SIZE => pair(self.next.frame_size, self.next.frames),
            reg::RATE => self.next.rate,
            reg::SEED => self.next.seed,
            reg::LIMIT => self.next.limit,
            reg::CONTROL => pair(
                if progress.status == Status::Running {
                    control::RUN
                } else {
                    0
                },
                progress.status as u32,
            ),
            reg::PRODUCED => pair(produced, consumed),
            reg::DROPPED => progress.dropped,
            reg::SEQUENCE => progress.sequence,
            reg::COUNTERS_RESET => 0,
            _ if (reg::COUNTERS..reg::COUNTERS + 8 * Counter::COUNT as u64).contains(&offset) => {
                self.shared.counters()[((offset - reg::COUNTERS) / 8) as usize]
            }
            _ => return None,
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
            reg::RING_OFFSET => half(&mut self.next.offset, false, value),
            _ if offset == reg::RING_OFFSET + HIGH => half(&mut self.next.offset, true, value),
            reg::FRAME_SIZE => self.next.frame_size = value,
            reg::FRAMES => self.next.frames = value,
            reg::RATE => half(&mut self.next.rate, false, value),
            _ if offset == reg::RATE + HIGH => half(&mut self.next.rate, true, value),
            reg::SEED => half(&mut self.next.seed, false, value),
            _ if offset == reg::SEED + HIGH => half(&mut self.next.seed, true, value),
            reg::LIMIT => half(&mut self.next.limit, false, value),
            _ if offset == reg::LIMIT + HIGH => half(&mut self.next.limit, true, value),
            reg::CONTROL if value & control::RUN != 0 => {
                let started = self.shared.stream.start(self.next, &self.shared.memory);
                self.shared
                    .count(if started { Counter::Starts } else { Counter::Refused }, 1);
            }
            reg::CONTROL => self.shared.stream.stop(),
            reg::CONSUMED => self.shared.stream.consumed(value),
            reg::COUNTERS_RESET => self.shared.reset_counters(),
            _ => return false,
        }
        true
    }
}

impl Device for Fpga {
    fn bus(&self) -> &Bus {
        &self.bus
    }

    fn config(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }

    fn region(&self, index: u32) -> Option<&Region> {
        match index {
            0 => Some(&self.registers),
            2 => Some(&self.bar2),
            _ => None,
        }
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if region != 0 {
            return;
        }
        self.shared.count(Counter::RegisterReads, 1);
        let len = data.len();
        let word = if (len == 4 || len == 8) && offset % len as u64 == 0 {
            self.read64(offset & !7)
        } else {
            None
        };
        match word {
            Some(word) => data.copy_from_slice(&word.to_le_bytes()[(offset % 8) as usize..][..len]),
            None => self.shared.count(Counter::RegisterBad, 1),
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        if region != 0 {
            return;
        }
        self.shared.count(Counter::RegisterWrites, 1);
        let done = match *data {
            [a, b, c, d] if offset % 4 == 0 => self.write32(offset, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] if offset % 8 == 0 => {
                let low = self.write32(offset, u32::from_le_bytes([a, b, c, d]));
                self.write32(offset + 4, u32::from_le_bytes([e, f, g, h])) && low
            }
            _ => false,
        };
        if !done {
            self.shared.count(Counter::RegisterBad, 1);
        }
    }

    fn reset(&mut self) {
        self.shared.stream.stop();
        if !self.shared.stream.wait_inactive(RESET_TIMEOUT) {
            error!(
                "the worker did not end the present frame within {} s of a reset",
                RESET_TIMEOUT.as_secs()
            );
        }
        self.shared.stream.reset();
        self.next = Registers::default();
        self.shared.bar2.store(0, Ordering::Relaxed);
    }

    fn config_write(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        self.shared
            .bar2
            .store(self.config.bar_address(2).unwrap_or(0), Ordering::Relaxed);
    }

    fn direct_access(&mut self, _region: u32, len: u64, write: bool) {
        let counter = if write {
            Counter::TrappedWritten
        } else {
            Counter::TrappedRead
        };
        self.shared.count(counter, len);
    }

    fn disconnected(&mut self) {
        // The next client gets a device in power-on state, except for memory and counters.
        self.reset();
        self.config.reset();
    }
}

impl Drop for Fpga {
    fn drop(&mut self) {
        self.shared.stream.end();
        self.worker.join();
    }
}
