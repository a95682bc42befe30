// SPDX-License-Identifier: MIT OR Apache-2.0

//! The emulated accelerator as an engine: jobs become entries of a ring of work in the accelerator's memory, which it executes by
//! itself. It reports its progress in memory too, so that only the start of jobs accesses a register.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use p2pmem::{Buffer, Client, Device, Provider, Request};
use p2pmem_accel_regs::driver::{Accel, Error, Ring, RingMemory, RingOptions};
use p2pmem_accel_regs::ring::{Entry, MAX_ENTRIES};
use p2pmem_collectives::element::{Element, Reduction};
use p2pmem_collectives::engine::{Engine, Job, Operation};
use p2pmem_collectives::run::{OpenedEngine, processor};
use p2pmem_verbs::{Nic, Span};

/// Time limit for the end of the entry in progress of a ring whose program was killed.
const RING_LIMIT: Duration = Duration::from_secs(10);

/// Entries of the ring of a rank.
const ENTRIES: u32 = 64;

/// Time without progress between two reads of the ring's registers, which trap. An abort, a reset and the end of the device are
/// found there only.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Memory of the accelerator for a ring, mapped.
#[derive(Debug)]
pub struct RingArea {
    // Fields are dropped in this order: the mapping ends before the buffer.
    span: Span,
    /// Offset in BAR2 of the mapping.
    offset: u64,
    /// Offset in BAR2 of the ring.
    base: u64,
    _buffer: Option<Buffer>,
}

impl RingArea {
    /// Wraps a mapping of the accelerator's memory from `offset` in BAR2, with the ring at `base` in BAR2.
    pub fn new(span: Span, offset: u64, base: u64) -> Self {
        Self {
            span,
            offset,
            base,
            _buffer: None,
        }
    }

    /// Allocates memory of the accelerator.
    fn allocate(device: &Device, near: &Client, provider: u32, bytes: u64) -> Result<Self> {
        let request = Request::new(bytes).near([near.clone()]).provider(provider);
        let buffer = device.alloc(&request)?;
        let offset = buffer.bar_offset();
        let offset = offset.context("the place of the buffer in the accelerator's memory is unknown")?;
        Ok(Self {
            span: Span::buffer(buffer.map()?),
            offset,
            base: offset,
            _buffer: Some(buffer),
        })
    }

    /// Returns the byte in the mapping of `len` bytes at an offset in BAR2.
    fn at(&self, offset: u64, len: usize) -> Result<usize, Error> {
        let at = offset.checked_sub(self.offset).and_then(|at| usize::try_from(at).ok());
        let inside = |at: &usize| at.checked_add(len).is_some_and(|end| end <= self.span.len());
        at.filter(inside).ok_or(Error::OutOfBounds)
    }
}

/// Describes why the memory of a ring cannot be accessed.
fn memory_error(error: &p2pmem::Error) -> Error {
    match error.errno() {
        Some(libc::ENODEV) => Error::Memory("it was revoked".into()),
        _ => Error::Memory(error.to_string()),
    }
}

impl RingMemory for RingArea {
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let written = self.span.try_write(self.at(offset, data.len())?, data);
        written.map_err(|error| memory_error(&error))
    }

    fn load64(&self, offset: u64) -> Result<u64, Error> {
        let mut word = [0; 8];
        let read = self.span.try_read(self.at(offset, word.len())?, &mut word);
        read.map_err(|error| memory_error(&error))?;
        Ok(u64::from_le_bytes(word))
    }
}

/// The accelerator as an engine. Several programs can share an accelerator: each has a ring of its own.
#[derive(Debug)]
pub struct AccelEngine {
    ring: Ring<Accel, RingArea>,
    name: String,
    /// Size of the accelerator's memory.
    memory: u64,
    /// Jobs that are not known to have completed. The first one has the number `completed`.
    pending: VecDeque<Job>,
    /// The index of a job's entry is the low half of the job's number.
    completed: u64,
    /// Number of jobs that were started.
    started: u64,
    /// When a job was started or completed, or the registers were read.
    looked: Instant,
}

/// Returns the entry that executes a job.
fn entry(job: &Job) -> Entry {
    let Job { into, from, bytes, .. } = *job;
    match job.operation {
        Operation::Copy => Entry::copy(into, from, bytes),
        Operation::Reduce(Element::F32, Reduction::Sum) => Entry::add_f32(into, from, bytes),
        Operation::Reduce(Element::F32, Reduction::Max) => Entry::max_f32(into, from, bytes),
        Operation::Reduce(Element::Bf16, Reduction::Sum) => Entry::add_bf16(into, from, bytes),
        Operation::Reduce(Element::Bf16, Reduction::Max) => Entry::max_bf16(into, from, bytes),
    }
}

impl AccelEngine {
    /// Opens the accelerator at PCI address `bdf`, and starts a ring that no program uses, with `entries` entries: a power of two up
    /// to [`MAX_ENTRIES`]. The ring is in memory of `provider`, the provider of the accelerator's memory, near the NIC `near`.
    ///
    /// Rings of killed programs are disabled first, so that none of their jobs writes to memory that is allocated afterwards.
    ///
    /// # Errors
    ///
    /// The accelerator cannot be opened, all its rings are in use, or its memory cannot be allocated.
    pub fn open(bdf: &str, device: &Device, near: &Client, provider: u32, entries: u32) -> Result<Self> {
        check_entries(entries)?;
        let accel = Accel::open(bdf).with_context(|| format!("opening the accelerator {bdf}"))?;
        let disabled = accel.disable_abandoned_rings(RING_LIMIT);
        disabled.with_context(|| format!("disabling rings of killed programs of the accelerator {bdf}"))?;
        let area = RingArea::allocate(device, near, provider, RingOptions::area(entries));
        let area = area.with_context(|| format!("allocating memory of the accelerator {bdf} for its ring"))?;
        Self::new(bdf, accel, area, entries)
    }

    /// As [`AccelEngine::open`], with an open accelerator and memory of at least [`RingOptions::area`] bytes for the ring.
    ///
    /// # Errors
    ///
    /// All rings are in use, or the accelerator refuses the memory.
    pub fn new(bdf: &str, accel: Accel, area: RingArea, entries: u32) -> Result<Self> {
        check_entries(entries)?;
        let name = format!("accelerator {bdf}");
        let memory = accel.memory_size();
        let options = RingOptions::new(area.base, entries);
        let ring = accel
            .reserve_ring(RING_LIMIT)
            .and_then(|reservation| Ring::reserved(accel, reservation, area, options))
            .with_context(|| format!("starting a ring of the {name}"))?;
        Ok(Self {
            ring,
            name,
            memory,
            pending: VecDeque::new(),
            completed: 0,
            started: 0,
            looked: Instant::now(),
        })
    }

    /// Returns the number of the accelerator's ring.
    pub fn ring(&self) -> u32 {
        self.ring.number()
    }

    /// Number of submitted jobs.
    fn submitted(&self) -> u64 {
        self.completed + self.pending.len() as u64
    }

    /// Describes an error of the ring, with the job that failed.
    fn failure(&self, error: Error) -> anyhow::Error {
        let Error::RingStopped { index, status, .. } = error else {
            return anyhow::Error::new(error).context(self.name.clone());
        };
        let after = index.wrapping_sub(self.completed as u32);
        match self.pending.get(after as usize) {
            Some(job) => {
                let number = self.completed + u64::from(after);
                anyhow!("{}: job {number} ({job}) failed: {status}", self.name)
            }
            None => anyhow!(
                "{}: its ring stopped before job {}: {status}",
                self.name,
                self.submitted()
            ),
        }
    }
}

/// Opens the engine of the accelerator whose memory a rank uses, or the processor for other memory.
///
/// # Errors
///
/// Those of [`AccelEngine::open`].
pub fn open_engine(provider: Option<&Provider>, nic: &Nic) -> Result<OpenedEngine> {
    let Some(provider) = provider else {
        return processor(None, nic);
    };
    let device = Device::open()?;
    let near = Client::resolve(nic.name())?;
    let engine = AccelEngine::open(&provider.addr.to_string(), &device, &near, provider.id, ENTRIES)?;
    Ok(Box::new(move |memory| {
        let base = memory.bar_offset();
        let base = base.context("the place of the payload in the accelerator's memory is unknown")?;
        Ok((Box::new(engine), base))
    }))
}

fn check_entries(entries: u32) -> Result<()> {
    if !entries.is_power_of_two() || entries > MAX_ENTRIES {
        bail!("a ring cannot have {entries} entries: use a power of two up to {MAX_ENTRIES}");
    }
    Ok(())
}

impl Engine for AccelEngine {
    fn submit(&mut self, job: Job) -> Result<Option<u64>> {
        job.check(self.memory)?;
        match self.ring.push(&entry(&job)) {
            Ok(_) => {}
            Err(Error::RingFull(_)) => return Ok(None),
            Err(error) => return Err(self.failure(error)),
        }
        let number = self.submitted();
        self.pending.push_back(job);
        Ok(Some(number))
    }

    fn start(&mut self) -> Result<()> {
        let submitted = self.submitted();
        if self.started == submitted {
            return Ok(());
        }
        if !self.ring.accel().is_present() {
            return Err(self.failure(Error::Gone));
        }
        self.ring.doorbell().map_err(|error| self.failure(error))?;
        self.started = submitted;
        self.looked = Instant::now();
        Ok(())
    }

    fn completed(&mut self) -> Result<u64> {
        if self.pending.is_empty() {
            return Ok(self.completed);
        }
        let progress = self.ring.progress().map_err(|error| self.failure(error))?;
        // The device has written results before the report. Reads of results must follow that of the report.
        fence(Ordering::Acquire);
        let done = progress.head.wrapping_sub(self.completed as u32) as usize;
        if done > self.pending.len() {
            let expected = self.submitted();
            bail!(
                "{}: reports that entry {} completed, of {expected} jobs: does another program write to its memory?",
                self.name,
                progress.head
            );
        }
        self.pending.drain(..done);
        self.completed += done as u64;
        if let Some(status) = progress.stopped {
            return Err(self.failure(Error::RingStopped {
                ring: self.ring.number(),
                index: progress.head,
                status,
            }));
        }
        if done > 0 {
            self.looked = Instant::now();
        } else if self.looked.elapsed() >= CHECK_INTERVAL {
            self.ring.check().map_err(|error| self.failure(error))?;
            self.looked = Instant::now();
        }
        Ok(self.completed)
    }

    fn name(&self) -> &str {
        &self.name
    }
}
