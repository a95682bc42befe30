// SPDX-License-Identifier: MIT OR Apache-2.0

//! Sequences of operations on a store, and what must be there after them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::simulated::{Bugs, Choices, Fault, Simulated, SimulatedFile, EIO};
use crate::store::{layout, Block, ChannelName, Error, LunOptions, Store, StreamOptions, Writer};

/// Four blocks of a page fit in a segment, or two blocks of two pages.
pub(super) const SEGMENT: u64 = 10 * 4096;
pub(super) const SEGMENTS: u64 = 4;
/// The message when the power is off.
pub(super) const OFF: &str = "the power is off";

/// An operation on the LUN `a` on two drives, or `b` on one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    CreateLun(bool),
    DeleteLun(bool),
    CreateStream(bool, bool),
    DeleteStream(bool, bool),
    /// Reserves places for blocks and writes them, in reverse order or abandoning one if so set, and maybe commits.
    Write {
        lun: bool,
        stream: bool,
        channel: bool,
        blocks: u8,
        reverse: bool,
        abandon: bool,
        commit: bool,
    },
    Finish(bool, bool, bool),
    DeleteRecording(bool, bool, bool),
    /// The program is killed, and starts again.
    Kill,
}

#[derive(Debug, Default)]
struct Recording {
    /// Whether the recording must exist. If not, it may.
    certain: bool,
    acknowledged: BTreeMap<u64, Block>,
    /// All blocks that were written, by sequence number and checksum.
    written: BTreeMap<(u64, u32), Block>,
}

#[derive(Debug, Default)]
struct Stream {
    certain: bool,
    recordings: BTreeMap<(u32, u64), Recording>,
}

#[derive(Debug, Default)]
struct Lun {
    certain: bool,
    streams: BTreeMap<String, Stream>,
}

/// A machine, its store, and what the store promised.
pub(super) struct Run {
    pub(super) machine: Simulated,
    drives: Vec<PathBuf>,
    writers: BTreeMap<ChannelName, Writer<Simulated>>,
    store: Option<Store<Simulated>>,
    promised: BTreeMap<String, Lun>,
    sequence: u64,
    salt: u64,
}

fn lun_name(b: bool) -> &'static str {
    if b {
        "b"
    } else {
        "a"
    }
}

fn stream_name(y: bool) -> &'static str {
    if y {
        "y"
    } else {
        "x"
    }
}

pub(super) fn payload(length: u64, salt: u64) -> Vec<u8> {
    let mut choices = Choices::new(salt + 1);
    let words = (0..length / 8).flat_map(|_| choices.next(u64::MAX).to_le_bytes());
    words.collect()
}

/// Whether an operation failed by a fault, so that its effect is unknown.
fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error().is_some())
}

impl Run {
    pub(super) fn new(needs_flush: bool, bugs: Bugs) -> Self {
        let drives: Vec<PathBuf> = ["/drive0", "/drive1"].iter().map(PathBuf::from).collect();
        let machine = Simulated::new(&drives, needs_flush, bugs);
        for drive in &drives {
            // A failing drive is prepared completely.
            Store::prepare(&machine, drive).unwrap();
        }
        Self {
            machine,
            drives,
            writers: BTreeMap::new(),
            store: None,
            promised: BTreeMap::new(),
            sequence: 0,
            salt: 0,
        }
    }

    pub(super) fn open(&mut self) -> Result<(), Error> {
        self.close();
        self.store = Some(Store::open(self.machine.clone(), self.drives.clone())?);
        Ok(())
    }

    /// Ends the program without ending its recordings.
    pub(super) fn close(&mut self) {
        // A writer that is dropped would remove an empty recording. A killed program does not.
        for (_, writer) in std::mem::take(&mut self.writers) {
            std::mem::forget(writer);
        }
        self.store = None;
    }

    pub(super) fn store(&self) -> &Store<Simulated> {
        self.store.as_ref().expect("the store is open")
    }

    /// Runs the steps. Fails with [`OFF`] when the power is off.
    pub(super) fn steps(&mut self, steps: &[Step]) -> Result<(), String> {
        for step in steps {
            self.step(*step)?;
            if self.machine.is_off() {
                return Err(OFF.into());
            }
        }
        Ok(())
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::CreateLun(b) => {
                let drives = if b { &self.drives[1..] } else { &self.drives[..] };
                let options = LunOptions::new(drives).segment_size(SEGMENT).segments(SEGMENTS);
                let result = self.store().create_lun(lun_name(b), &options);
                let lun = |certain| Lun {
                    certain,
                    ..Lun::default()
                };
                record_creation(&mut self.promised, lun_name(b), &result, lun, |lun| {
                    if !lun.certain {
                        lun.streams.values_mut().for_each(|stream| stream.certain = false);
                    }
                });
            }
            Step::DeleteLun(b) => {
                let result = self.store().delete_lun(lun_name(b));
                match &result {
                    Ok(()) => drop(self.promised.remove(lun_name(b))),
                    Err(error) if is_unknown(error) => {
                        self.promised
                            .entry(lun_name(b).into())
                            .and_modify(|lun| lun.certain = false);
                    }
                    Err(_) => {}
                }
            }
            Step::CreateStream(b, y) => {
                let options = StreamOptions::new(if y { 8192 } else { 4096 }).channels(2);
                let result = self.store().create_stream(lun_name(b), stream_name(y), &options);
                if let Some(lun) = self.promised.get_mut(lun_name(b)) {
                    let stream = |certain| Stream {
                        certain,
                        ..Stream::default()
                    };
                    record_creation(&mut lun.streams, stream_name(y), &result, stream, |stream| {
                        if !stream.certain {
                            stream
                                .recordings
                                .values_mut()
                                .for_each(|recording| recording.certain = false);
                        }
                    });
                }
            }
            Step::DeleteStream(b, y) => {
                let result = self.store().delete_stream(lun_name(b), stream_name(y));
                if let Some(lun) = self.promised.get_mut(lun_name(b)) {
                    match &result {
                        Ok(()) => drop(lun.streams.remove(stream_name(y))),
                        Err(error) if is_unknown(error) => {
                            lun.streams
                                .entry(stream_name(y).into())
                                .and_modify(|stream| stream.certain = false);
                        }
                        Err(_) => {}
                    }
                }
            }
            Step::Write {
                lun,
                stream,
                channel,
                blocks,
                reverse,
                abandon,
                commit,
            } => {
                let name = ChannelName::new(lun_name(lun), stream_name(stream), channel.into());
                self.write(&name, blocks, reverse, abandon, commit)?;
            }
            Step::Finish(b, y, channel) => {
                let name = ChannelName::new(lun_name(b), stream_name(y), channel.into());
                if let Some(writer) = self.writers.remove(&name) {
                    drop(writer.finish());
                }
            }
            Step::DeleteRecording(b, y, channel) => {
                let name = ChannelName::new(lun_name(b), stream_name(y), channel.into());
                let Some(number) = self
                    .store()
                    .recordings(&name)
                    .ok()
                    .and_then(|all| Some(all.first()?.number))
                else {
                    return Ok(());
                };
                let result = self.store().delete_recording(&name, number);
                let lun = self.promised.get_mut(&name.lun);
                if let Some(stream) = lun.and_then(|lun| lun.streams.get_mut(&name.stream)) {
                    let key = (name.channel, number);
                    match &result {
                        Ok(()) => drop(stream.recordings.remove(&key)),
                        Err(error) if is_unknown(error) => {
                            stream
                                .recordings
                                .entry(key)
                                .and_modify(|recording| recording.certain = false);
                        }
                        Err(_) => {}
                    }
                }
            }
            Step::Kill => {
                self.close();
                let happened = self.machine.fault_happened();
                let opened = self.open();
                if !happened && self.machine.fault_happened() {
                    // What the fault hid is there at the next opening, unless the power is off.
                    self.close();
                    self.open().map_err(|_| OFF)?;
                } else {
                    opened.map_err(|error| format!("opening after the program was killed failed: {error}"))?;
                }
                self.check()?;
            }
        }
        Ok(())
    }

    fn write(
        &mut self,
        name: &ChannelName,
        blocks: u8,
        reverse: bool,
        abandon: bool,
        commit: bool,
    ) -> Result<(), String> {
        if !self.writers.contains_key(name) {
            let Ok(writer) = self.store().writer(name, 7) else {
                return Ok(());
            };
            self.writers.insert(name.clone(), writer);
        }
        let writer = self.writers.get_mut(name).unwrap();
        let key = (name.channel, writer.recording());
        let lun = self
            .promised
            .get_mut(&name.lun)
            .ok_or("a LUN exists that was not created")?;
        let stream = lun
            .streams
            .get_mut(&name.stream)
            .ok_or("a stream exists that was not created")?;
        let promised = stream.recordings.entry(key).or_insert_with(|| Recording {
            certain: true,
            ..Recording::default()
        });
        let mut slots = Vec::new();
        for _ in 0..blocks {
            self.sequence += 1;
            self.salt += 1;
            let bytes = payload(writer.block_size(), self.salt);
            let block = Block {
                sequence: self.sequence,
                time: self.sequence * 10,
                checksum: crc32c::crc32c(&bytes),
            };
            match writer.reserve(block) {
                Ok(slot) => slots.push((slot, bytes)),
                Err(Error::Full { .. } | Error::DrivesFailed { .. }) => break,
                Err(error) => return Err(format!("reserving failed: {error}")),
            }
        }
        if reverse {
            slots.reverse();
        }
        for (index, (slot, bytes)) in slots.into_iter().enumerate() {
            let block = slot.block();
            if abandon && index == 1 {
                // Half of the payload arrived.
                drop(slot.file().write_payload(slot.offset(), &bytes[..2048]));
                writer.abandon(slot);
                continue;
            }
            promised.written.insert((block.sequence, block.checksum), block);
            match slot.file().write_payload(slot.offset(), &bytes) {
                Ok(()) => drop(writer.written(slot)),
                Err(error) => writer.failed(slot, error),
            }
        }
        if !commit {
            return Ok(());
        }
        let result = writer.commit();
        acknowledge(promised, &result.acknowledged);
        // The sender gives up what failed, and sends other blocks under the same numbers.
        for sequence in result.failures.iter().flat_map(|failure| &failure.sequences) {
            self.salt += 1;
            let bytes = payload(writer.block_size(), self.salt);
            let block = Block {
                sequence: *sequence,
                time: 1,
                checksum: crc32c::crc32c(&bytes),
            };
            let write = |file: &SimulatedFile, offset| file.write_payload(offset, &bytes);
            if writer.write(block, write).is_ok() {
                promised.written.insert((block.sequence, block.checksum), block);
                let again = writer.commit();
                if again.acknowledged.contains(sequence) {
                    promised.acknowledged.insert(*sequence, block);
                }
                acknowledge(promised, &again.acknowledged);
            }
        }
        Ok(())
    }

    /// Compares the store with what it promised. What it presents, it promises from now on.
    pub(super) fn check(&mut self) -> Result<(), String> {
        self.machine.suspend_faults(true);
        let result = self.compare();
        self.machine.suspend_faults(false);
        result
    }

    fn compare(&mut self) -> Result<(), String> {
        let store = self.store.as_ref().expect("the store is open");
        if let Some(problem) = store.problems().first() {
            return Err(format!("problem with {}: {}", problem.name, problem.error));
        }
        let luns = store.luns();
        self.promised
            .retain(|name, lun| lun.certain || luns.iter().any(|found| found.name == *name));
        if let Some(name) = self
            .promised
            .keys()
            .find(|name| luns.iter().all(|lun| lun.name != **name))
        {
            return Err(format!("LUN {name} is lost"));
        }
        for lun in &luns {
            let promised = self
                .promised
                .get_mut(&lun.name)
                .ok_or(format!("LUN {} is back", lun.name))?;
            promised.certain = true;
            check_lun(store, &lun.name, promised)?;
            for (drive, free) in &lun.drives {
                let folder = layout::luns(drive).join(&lun.name);
                let count = |folder: &Path| {
                    let files = self.machine.files_below(folder);
                    files
                        .iter()
                        .filter(|path| path.to_string_lossy().ends_with(|c: char| c.is_ascii_digit()))
                        .count() as u64
                };
                let (all, listed) = (count(&folder), count(&layout::free(&folder)));
                let unused = promised.streams.values().all(|stream| stream.recordings.is_empty());
                if all != SEGMENTS || listed != *free || (unused && *free != SEGMENTS) {
                    return Err(format!(
                        "LUN {}: {all} segments, {free} free, {listed} in its folder",
                        lun.name
                    ));
                }
            }
        }
        Ok(())
    }

    /// Cuts the power at the operation `cut` of the steps, and checks what is there afterwards. Returns whether the steps
    /// got there.
    pub(super) fn cut(&mut self, steps: &[Step], cut: u64, choices: &mut Choices) -> Result<bool, String> {
        self.machine.set_fault(Some(Fault {
            at: cut,
            errno: EIO,
            effect: choices.next(2) == 0,
            power_off: true,
        }));
        let opened = self.open();
        if !self.machine.fault_happened() {
            opened.map_err(|error| format!("opening failed: {error}"))?;
            match self.steps(steps) {
                Err(message) if message != OFF => return Err(message),
                _ => {}
            }
        }
        let happened = self.machine.fault_happened();
        self.close();
        self.machine.power_cycle(choices);
        Ok(happened)
    }

    /// Opens the store after a power cut, and checks it.
    pub(super) fn recover(&mut self) -> Result<(), String> {
        self.open().map_err(|error| format!("opening failed: {error}"))?;
        self.check()?;
        self.close();
        Ok(())
    }
}

/// Records the result of a creation. If it is unknown and an uncertain thing had the name, the new one may have replaced it:
/// `weaken` makes the parts of the old one uncertain.
fn record_creation<T>(
    all: &mut BTreeMap<String, T>,
    name: &str,
    result: &Result<(), Error>,
    new: impl Fn(bool) -> T,
    weaken: impl Fn(&mut T),
) {
    match result {
        Ok(()) => drop(all.insert(name.to_owned(), new(true))),
        Err(error) if is_unknown(error) => {
            all.entry(name.to_owned())
                .and_modify(weaken)
                .or_insert_with(|| new(false));
        }
        Err(_) => {}
    }
}

/// Records acknowledged blocks. A number that was acknowledged before keeps its block.
fn acknowledge(promised: &mut Recording, sequences: &[u64]) {
    for sequence in sequences {
        let written = promised.written.range((*sequence, 0)..=(*sequence, u32::MAX));
        let last = written.map(|(_, block)| *block).last();
        promised
            .acknowledged
            .entry(*sequence)
            .or_insert_with(|| last.expect("the block was written"));
    }
}

fn check_lun(store: &Store<Simulated>, lun: &str, promised: &mut Lun) -> Result<(), String> {
    let streams = store.streams(lun).map_err(|error| error.to_string())?;
    promised
        .streams
        .retain(|name, stream| stream.certain || streams.iter().any(|found| found.name == *name));
    if let Some(name) = promised
        .streams
        .keys()
        .find(|name| streams.iter().all(|stream| stream.name != **name))
    {
        return Err(format!("stream {lun}/{name} is lost"));
    }
    for stream in &streams {
        let full = format!("{lun}/{}", stream.name);
        let promised = promised
            .streams
            .get_mut(&stream.name)
            .ok_or(format!("stream {full} is back"))?;
        promised.certain = true;
        let mut found = BTreeMap::new();
        for channel in 0..stream.channels {
            let name = ChannelName::new(lun, &stream.name, channel);
            for recording in store.recordings(&name).map_err(|error| error.to_string())? {
                found.insert((channel, recording.number), name.clone());
            }
        }
        promised.recordings.retain(|key, recording| {
            found.contains_key(key) || (recording.certain && !recording.acknowledged.is_empty())
        });
        if let Some(key) = promised.recordings.keys().find(|key| !found.contains_key(key)) {
            return Err(format!("recording {full}/{key:?} is lost"));
        }
        for (key, name) in found {
            let promised = promised
                .recordings
                .get_mut(&key)
                .ok_or(format!("recording {name}/{} is back", key.1))?;
            promised.certain = true;
            check_recording(store, &name, key.1, promised)?;
        }
    }
    Ok(())
}

fn check_recording(
    store: &Store<Simulated>,
    name: &ChannelName,
    number: u64,
    promised: &mut Recording,
) -> Result<(), String> {
    let mut reader = store.reader(name, number).map_err(|error| error.to_string())?;
    for block in promised.acknowledged.values() {
        if reader.block(block.sequence) != Some(*block) {
            return Err(format!(
                "{name}/{number}: block {} was acknowledged and is lost",
                block.sequence
            ));
        }
    }
    for block in reader.blocks() {
        if !promised.written.contains_key(&(block.sequence, block.checksum)) {
            return Err(format!("{name}/{number}: block {} was never written", block.sequence));
        }
        let mut bytes = vec![0; reader.block_size() as usize];
        let read = reader.read(block.sequence, |file: &SimulatedFile, offset| {
            file.read_payload(offset, &mut bytes)
        });
        read.map_err(|error| error.to_string())?;
        if crc32c::crc32c(&bytes) != block.checksum {
            return Err(format!("{name}/{number}: block {} is torn", block.sequence));
        }
        promised.acknowledged.insert(block.sequence, block);
    }
    Ok(())
}
