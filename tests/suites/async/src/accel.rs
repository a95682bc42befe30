// SPDX-License-Identifier: MIT OR Apache-2.0

//! The executor on the emulated accelerator: byte code becomes entries of a ring of work, which the accelerator executes by
//! itself. It polls completions in its own memory, and rings the doorbell of a NIC by its own DMA.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use p2pmem::{AttachOptions, Attachment, Device};
use p2pmem_accel_regs::driver::{self, Accel, Ring, RingMemory, RingOptions};
use p2pmem_accel_regs::ring::{Entry, Place};
use p2pmem_accel_regs::{Op, TIMESTAMP_SIZE};
use p2pmem_async::bytecode::{Capabilities, Operation, Peer, Program};
use p2pmem_async::endpoint::Endpoint;
use p2pmem_async::region::{Region, RegionKind, Target};

use crate::hardware::{AccelMemory, Hardware};

/// Entries of the ring that a program became.
struct Submitted {
    /// Index of the first entry, and number of entries.
    first: u32,
    count: u32,
    /// `None` for a computation.
    program: Option<Program>,
}

impl Submitted {
    /// Describes the entry with an index; `None` if it is not one of these.
    fn describe(&self, index: u32) -> Option<String> {
        let mut left = index.wrapping_sub(self.first);
        if left >= self.count {
            return None;
        }
        let Some(program) = &self.program else {
            return Some(format!("the computation at entry {index}"));
        };
        for (number, operation) in program.operations().iter().enumerate() {
            let entries = entries_of(operation);
            if left < entries {
                return Some(format!("operation {number} ({operation})"));
            }
            left -= entries;
        }
        None
    }
}

/// Executes byte code in the accelerator.
pub struct AccelExecutor {
    ring: Ring<Arc<Accel>, AccelMemory>,
    /// The memory of the ring.
    /// Where the device writes timestamps: an offset in its memory.
    clock: u64,
    /// Places and lengths of regions, by the regions' numbers.
    places: Vec<Option<(Place, usize)>>,
    /// Entries of the present program.
    entries: Vec<Entry>,
    /// What was added and is not known to have completed.
    submitted: VecDeque<Submitted>,
}

/// Returns the place `offset` bytes after another one.
fn offset_by(place: Place, offset: u64) -> Place {
    match place {
        Place::Memory(at) => Place::Memory(at + offset),
        Place::Bus(at) => Place::Bus(at + offset),
    }
}

/// Returns the number of entries that an operation becomes.
fn entries_of(operation: &Operation) -> u32 {
    match operation {
        // Not truncated: a block has at most 1 KiB.
        Operation::CopyBlock { data, .. } => (data.len() / 8) as u32,
        _ => 1,
    }
}

/// Returns where the accelerator finds `size` bytes at a target.
fn find(places: &[Option<(Place, usize)>], target: Target, size: usize) -> Result<Place> {
    let found = places.get(target.region.number() as usize).copied().flatten();
    let (place, len) = found.with_context(|| format!("the region of {target} is not mapped"))?;
    let end = target.offset.checked_add(size as u64);
    if end.is_none_or(|end| end > len as u64) {
        bail!("{size} bytes at {target} exceed the {len} bytes of the region");
    }
    Ok(offset_by(place, target.offset))
}

/// Translates an operation to entries.
fn translate(operation: &Operation, places: &[Option<(Place, usize)>], into: &mut Vec<Entry>) -> Result<()> {
    let Some(target) = operation.target() else {
        into.push(Entry::fence());
        return Ok(());
    };
    let at = find(places, target, operation.size())?;
    into.push(match operation {
        Operation::StoreDword { value, .. } => Entry::store32(at, *value),
        Operation::StoreQword { value, .. } => Entry::store64(at, *value),
        Operation::CopyBlock { data, .. } => {
            into.extend(data.chunks_exact(8).zip(0..).map(|(bytes, number)| {
                let mut word = [0; 8];
                word.copy_from_slice(bytes);
                Entry::store64(offset_by(at, 8 * number), u64::from_le_bytes(word))
            }));
            return Ok(());
        }
        Operation::PollAnd { value, .. } => Entry::poll_and(at, *value),
        Operation::PollNor { value, .. } => Entry::poll_nor(at, *value),
        Operation::PollGeq { value, .. } => Entry::poll_geq(at, *value),
        other => bail!("the accelerator does not know the operation {other}"),
    });
    Ok(())
}

impl AccelExecutor {
    /// Describes an accelerator with a ring of `entries` as the peer of queues. A block of a program takes an entry for each
    /// 8 bytes, so a program with blocks can be too long for the ring, although the peer takes it.
    pub fn peer(entries: u32) -> Peer {
        Peer::new("accelerator", Capabilities::all(), entries as usize)
    }

    /// Starts ring `number` of an accelerator, with `entries` entries in its memory. `limit` is the time limit of each poll.
    ///
    /// # Errors
    ///
    /// Those of the allocation and of the ring.
    pub fn new(hardware: &Hardware, number: u32, entries: u32, limit: Duration) -> Result<Self> {
        let area = RingOptions::area(entries);
        let memory = hardware.memory(area + TIMESTAMP_SIZE).context("memory for the ring")?;
        let base = memory.offset;
        let options = RingOptions {
            poll_limit: limit,
            ..RingOptions::new(base, entries)
        };
        Ok(Self {
            ring: Ring::new(hardware.accel.clone(), number, memory, options)?,
            clock: base + area,
            places: Vec::new(),
            entries: Vec::new(),
            submitted: VecDeque::new(),
        })
    }

    /// Maps a region that is in the accelerator's memory.
    ///
    /// # Errors
    ///
    /// The region is somewhere else.
    pub fn map(&mut self, region: &Region) -> Result<()> {
        let offset = region.bar_offset();
        let offset = offset.with_context(|| format!("the region {} is not in the accelerator", region.kind()))?;
        self.map_at(region, Place::Memory(offset));
        Ok(())
    }

    /// Maps a region to the place of its first byte.
    pub fn map_at(&mut self, region: &Region, place: Place) {
        let number = region.id().number() as usize;
        if self.places.len() <= number {
            self.places.resize(number + 1, None);
        }
        self.places[number] = Some((place, region.len()));
    }

    /// Maps the regions of an endpoint whose queues are in the accelerator's memory, and attaches the accelerator to the NIC's
    /// doorbell page. The accelerator can ring until the attachment is dropped.
    ///
    /// # Errors
    ///
    /// The queues are somewhere else; EPERM if the administrator does not permit this process to attach the accelerator.
    pub fn map_endpoint(&mut self, endpoint: &Endpoint, device: &Device) -> Result<Attachment> {
        let doorbell = endpoint.export_doorbell().context("exporting the doorbell page")?;
        // The provider is the accelerator's own function. Rings that killed programs left were disabled when the accelerator was opened,
        // and those of this program stop before their attachments end.
        let options = AttachOptions::new().quiesced(true);
        let attachment = device
            .attach(self.ring.memory().buffer.provider(), &doorbell, options)
            .context("attaching the accelerator to the doorbell page")?;
        let address = attachment.address(0, 4096).context("the doorbell page is in pieces")?;
        for region in endpoint.regions() {
            if region.kind() == RegionKind::Doorbell {
                self.map_at(region, Place::Bus(address));
            } else {
                self.map(region)?;
            }
        }
        Ok(attachment)
    }

    fn push(&mut self, entries: &[Entry], program: Option<Program>) -> Result<()> {
        if entries.len() > self.ring.size() as usize {
            bail!(
                "a program of {} entries does not fit a ring of {}",
                entries.len(),
                self.ring.size()
            );
        }
        if (self.ring.free() as usize) < entries.len() {
            // Reads how far the accelerator is.
            match self.ring.refresh() {
                Ok(()) => {}
                Err(driver::Error::RingStopped { index, status, .. }) => return Err(self.failure(index, status)),
                Err(error) => return Err(error.into()),
            }
            if (self.ring.free() as usize) < entries.len() {
                bail!(
                    "the ring has no space for {} entries: wait for earlier programs",
                    entries.len()
                );
            }
        }
        let first = self.next();
        for entry in entries {
            self.ring.push(entry)?;
        }
        self.submitted.push_back(Submitted {
            first,
            count: entries.len() as u32,
            program,
        });
        Ok(())
    }

    /// Adds a program to the ring. The accelerator executes it after [`AccelExecutor::start`].
    ///
    /// # Errors
    ///
    /// A region is not mapped, a target is outside of it, or the ring has no space. Nothing of the program was added then.
    pub fn submit(&mut self, program: Program) -> Result<()> {
        let mut entries = std::mem::take(&mut self.entries);
        entries.clear();
        let mut translated = Ok(());
        for (index, operation) in program.operations().iter().enumerate() {
            translated = translate(operation, &self.places, &mut entries)
                .with_context(|| format!("operation {index} ({operation})"));
            if translated.is_err() {
                break;
            }
        }
        if translated.is_ok() && !entries.is_empty() {
            translated = self.push(&entries, Some(program));
        }
        self.entries = entries;
        translated
    }

    /// Adds a computation: adds the f32 values at the offset `other` of the accelerator's memory to the `len` bytes of values
    /// at `offset`.
    ///
    /// # Errors
    ///
    /// The ring has no space.
    pub fn add(&mut self, offset: u64, len: u64, other: u64) -> Result<()> {
        self.push(&[Entry::new(Op::AddF32, offset, len, other)], None)
    }

    /// Returns the index of the next entry.
    pub fn next(&self) -> u32 {
        self.ring.next()
    }

    /// Has the accelerator execute all that was added. Writes one register.
    ///
    /// # Errors
    ///
    /// The accelerator is gone.
    pub fn start(&mut self) -> Result<()> {
        Ok(self.ring.doorbell()?)
    }

    /// Returns the number of entries before the one with the index `end` that have not completed. Does not wait.
    ///
    /// # Errors
    ///
    /// An entry failed: the error names the operation.
    pub fn left(&mut self, end: u32) -> Result<u32> {
        let progress = self.ring.progress()?;
        // Earlier entries of the last 2^31 have completed.
        let left = end.wrapping_sub(progress.head);
        if left == 0 || left > 1 << 31 {
            let done = |submitted: &Submitted| {
                let after = submitted.first.wrapping_add(submitted.count);
                end.wrapping_sub(after) < 1 << 31
            };
            while self.submitted.front().is_some_and(done) {
                self.submitted.pop_front();
            }
            return Ok(0);
        }
        match progress.stopped {
            None => Ok(left),
            Some(status) => Err(self.failure(progress.head, status)),
        }
    }

    /// Returns whether all entries have completed. Does not wait.
    ///
    /// # Errors
    ///
    /// Those of [`AccelExecutor::left`].
    pub fn is_done(&mut self) -> Result<bool> {
        Ok(self.left(self.next())? == 0)
    }

    /// Waits until all entries have completed.
    ///
    /// # Errors
    ///
    /// An entry failed, or the limit passed: the error names the operation.
    pub fn finish(&mut self, limit: Duration) -> Result<()> {
        if self.submitted.is_empty() {
            return Ok(());
        }
        match self.ring.wait(self.next().wrapping_sub(1), limit) {
            Ok(()) => {
                self.submitted.clear();
                Ok(())
            }
            Err(driver::Error::RingStopped { index, status, .. }) => Err(self.failure(index, status)),
            Err(error) => {
                let index = self.ring.progress()?.head;
                Err(self.failure(index, error))
            }
        }
    }

    /// Describes the failure of an entry.
    fn failure(&self, index: u32, why: impl std::fmt::Display) -> anyhow::Error {
        let found = self.submitted.iter().find_map(|submitted| submitted.describe(index));
        anyhow!("{} failed: {why}", found.unwrap_or_else(|| format!("entry {index}")))
    }

    /// Stops the ring, and drops all that was added. The accelerator does no more accesses afterwards.
    ///
    /// # Errors
    ///
    /// The accelerator does not stop within the limit.
    pub fn abort(&mut self, limit: Duration) -> Result<()> {
        self.ring.reset(limit)?;
        self.submitted.clear();
        Ok(())
    }

    /// Returns the accelerator's clock in nanoseconds, after all that was added before has completed.
    ///
    /// # Errors
    ///
    /// Those of [`AccelExecutor::finish`].
    pub fn clock(&mut self, limit: Duration) -> Result<u64> {
        self.push(&[Entry::timestamp(self.clock, 0)], None)?;
        self.start()?;
        self.finish(limit)?;
        Ok(self.ring.memory().load64(self.clock)?)
    }
}

#[cfg(test)]
mod tests {
    use p2pmem_async::region::RegionKind;
    use p2pmem_async::sys::HostMemory;

    use super::*;

    fn region() -> Region {
        Region::new(RegionKind::Data, Arc::new(HostMemory::new(4096).unwrap()))
    }

    /// Returns the entries of an operation. The region is at the bus address 0x10000.
    fn translated(operation: &Operation, region: &Region) -> Result<Vec<Entry>> {
        let number = region.id().number() as usize;
        let mut places = vec![None; number + 1];
        places[number] = Some((Place::Bus(0x1_0000), region.len()));
        let mut into = Vec::new();
        translate(operation, &places, &mut into).map(|()| into)
    }

    #[test]
    fn each_operation_becomes_an_entry_at_its_place() {
        let region = region();
        let at = |offset: u64| Place::Bus(0x1_0000 + offset);
        let target = |offset| region.target(offset);
        for (operation, entry) in [
            (Operation::Fence, Entry::fence()),
            (
                Operation::StoreDword {
                    target: target(4),
                    value: 7,
                },
                Entry::store32(at(4), 7),
            ),
            (
                Operation::StoreQword {
                    target: target(0x800),
                    value: u64::MAX,
                },
                Entry::store64(at(0x800), u64::MAX),
            ),
            (
                Operation::PollAnd {
                    target: target(60),
                    value: 1 << 24,
                },
                Entry::poll_and(at(60), 1 << 24),
            ),
            (
                Operation::PollNor {
                    target: target(60),
                    value: !(1 << 24),
                },
                Entry::poll_nor(at(60), !(1 << 24)),
            ),
            (
                Operation::PollGeq {
                    target: target(8),
                    value: 3,
                },
                Entry::poll_geq(at(8), 3),
            ),
        ] {
            assert_eq!(translated(&operation, &region).unwrap(), [entry], "{operation}");
        }
    }

    #[test]
    fn a_block_becomes_stores_of_8_bytes() {
        let region = region();
        let data: Vec<u8> = (0..24).collect();
        let block = Operation::CopyBlock {
            target: region.target(16),
            data,
        };
        let stores = translated(&block, &region).unwrap();
        let word = |first: u8| u64::from_le_bytes(std::array::from_fn(|i| first + i as u8));
        let expected =
            [(16, 0), (24, 8), (32, 16)].map(|(at, first)| Entry::store64(Place::Bus(0x1_0000 + at), word(first)));
        assert_eq!(stores, expected);
    }

    #[test]
    fn a_failed_entry_is_described_by_its_operation() {
        let region = region();
        let mut program = Program::new();
        for operation in [
            Operation::Fence,
            Operation::CopyBlock {
                target: region.target(0),
                data: vec![0; 24],
            },
            Operation::PollGeq {
                target: region.target(64),
                value: 9,
            },
        ] {
            program.push(operation).unwrap();
        }
        let submitted = Submitted {
            first: u32::MAX,
            count: 5,
            program: Some(program),
        };
        let described = |index| submitted.describe(index);
        assert_eq!(described(u32::MAX).unwrap(), "operation 0 (FENCE)");
        assert!(described(2).unwrap().starts_with("operation 1 (COPY_BLOCK"));
        assert!(described(3).unwrap().starts_with("operation 2 (POLL_GEQ"));
        assert_eq!((described(4), described(u32::MAX - 1)), (None, None));
        let computation = Submitted {
            first: 7,
            count: 1,
            program: None,
        };
        assert_eq!(computation.describe(7).unwrap(), "the computation at entry 7");
    }

    #[test]
    fn targets_outside_of_mapped_regions_are_errors() {
        let (region, other) = (region(), region());
        let store = |target| Operation::StoreDword { target, value: 1 };
        let error = translated(&store(other.target(0)), &region).unwrap_err();
        assert!(error.to_string().contains("is not mapped"), "{error}");
        let error = translated(&store(region.target(4096)), &region).unwrap_err();
        assert!(error.to_string().contains("exceed the 4096 bytes"), "{error}");
    }
}
