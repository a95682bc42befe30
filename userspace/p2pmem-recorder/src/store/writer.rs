// SPDX-License-Identifier: MIT OR Apache-2.0

//! Recording the blocks of a channel.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::{into_io, Context, Error, Result};
use super::format::{Geometry, Record, SegmentHeader, PAGE, RECORD, RECORDS_PER_PAGE};
use super::layout;
use super::recovery::segment_header;
use super::removal::{mark, release_marked};
use super::state::{channel_folder, locked, Block, ChannelName, Recording, Shared, Stored};
use super::system::System;

/// The place of a block whose payload is being written. Pass the slot to [`Writer::written`] after the payload was written
/// completely, or to [`Writer::failed`] or [`Writer::abandon`]. A slot that is dropped stays empty.
///
/// Keep the slot until no device writes to it any more: the recording cannot be deleted, nor its place be used again, as
/// long as the slot exists.
#[must_use]
pub struct Slot<F> {
    file: Arc<F>,
    offset: u64,
    length: u64,
    segment: u64,
    slot: u32,
    member: usize,
    block: Block,
    _recording: Arc<Recording>,
}

impl<F> Slot<F> {
    /// Returns the file to which the payload is written.
    pub fn file(&self) -> &Arc<F> {
        &self.file
    }

    /// Returns the byte of the file at which the payload begins. It is a multiple of 4 KiB.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the number of bytes of the payload: the stream's block size.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Returns the block.
    pub fn block(&self) -> Block {
        self.block
    }

    /// Returns the number of the drive in the LUN.
    pub(crate) fn member(&self) -> usize {
        self.member
    }
}

/// Blocks that a drive did not record.
#[derive(Debug)]
pub struct Failure {
    /// The folder of the drive.
    pub drive: PathBuf,
    /// Its error.
    pub error: io::Error,
    /// The sequence numbers of the blocks. They are not acknowledged, and can be written again.
    pub sequences: Vec<u64>,
}

/// The result of a commit.
#[derive(Debug, Default)]
#[must_use]
pub struct Commit {
    /// The sequence numbers of the blocks that are durable from now on.
    pub acknowledged: Vec<u64>,
    /// The drives that failed. The writer does not use them any more.
    pub failures: Vec<Failure>,
}

/// A segment to which a writer writes.
struct OpenSegment<F> {
    member: usize,
    path: PathBuf,
    file: Arc<F>,
    generation: u64,
    /// The index in the recording's list of segments.
    index: u32,
    next_slot: u32,
    next_page: u32,
    /// The slots that were reserved and have no result yet.
    in_flight: u32,
    /// Blocks whose payload was written, without a durable record.
    waiting: Vec<(u32, Block)>,
}

/// Records the blocks of a channel. A channel has one writer at a time. Each writer makes a recording.
///
/// A block goes through three steps: [`reserve`](Self::reserve) returns its place, the program lets the payload be written
/// there, and [`commit`](Self::commit) makes the records of all written blocks durable. Blocks go to the drives of the LUN in
/// turn.
///
/// The writer uses a drive that failed no more. [`Error::DrivesFailed`] follows when no drive is left.
pub struct Writer<S: System> {
    shared: Arc<Shared<S>>,
    name: ChannelName,
    lun: u64,
    stream: u64,
    segment_size: u64,
    number: u64,
    recording: Arc<Recording>,
    /// The folders of the LUN, and the drives, by member.
    members: Vec<(PathBuf, PathBuf)>,
    /// The open segments, by the number that slots have.
    segments: BTreeMap<u64, OpenSegment<S::File>>,
    current: Vec<Option<u64>>,
    /// The errors of members that failed.
    failed: Vec<Option<io::Error>>,
    last_failed: usize,
    /// The members whose drive has the folder of the recording.
    has_folder: BTreeSet<usize>,
    next_segment: u64,
    next_member: usize,
    order: u64,
}

impl<S: System> Writer<S> {
    pub(crate) fn new(shared: &Arc<Shared<S>>, name: &ChannelName, started: u64) -> Result<Self> {
        let mut state = shared.state();
        let stream = state.stream(&name.lun, &name.stream)?;
        let (stream_id, geometry) = (stream.id, stream.geometry);
        let lun = state.lun(&name.lun)?;
        let (lun_id, segment_size) = (lun.id, lun.segment_size);
        let members: Vec<_> = lun
            .members
            .iter()
            .map(|member| (member.folder.clone(), member.drive.clone()))
            .collect();
        let channel = state.channel_mut(name)?;
        if channel.writing.is_some() {
            return Err(Error::HasWriter {
                channel: name.to_string(),
            });
        }
        let number = channel.next;
        channel.next += 1;
        let recording = Arc::new(Recording {
            started,
            geometry,
            content: Default::default(),
        });
        channel.writing = Some(number);
        channel.recordings.insert(number, Arc::clone(&recording));
        drop(state);
        Ok(Self {
            shared: Arc::clone(shared),
            name: name.clone(),
            lun: lun_id,
            stream: stream_id,
            segment_size,
            number,
            recording,
            current: members.iter().map(|_| None).collect(),
            failed: members.iter().map(|_| None).collect(),
            members,
            segments: BTreeMap::new(),
            last_failed: 0,
            has_folder: BTreeSet::new(),
            next_segment: 0,
            next_member: 0,
            order: 0,
        })
    }

    /// Returns the channel.
    pub fn name(&self) -> &ChannelName {
        &self.name
    }

    /// Returns the number of the recording in its channel.
    pub fn recording(&self) -> u64 {
        self.number
    }

    /// Returns the bytes of a block.
    pub fn block_size(&self) -> u64 {
        self.recording.geometry.block_size
    }

    /// Returns the folder of a drive of the LUN.
    pub(crate) fn drive(&self, member: usize) -> &Path {
        &self.members[member].1
    }

    /// Returns the folders of the drives that this writer still uses.
    pub(crate) fn working_drives(&self) -> impl Iterator<Item = &Path> {
        let members = self.members.iter().zip(&self.failed);
        members.filter_map(|((_, drive), error)| error.is_none().then_some(drive.as_path()))
    }

    /// Returns the folders of the drives that failed while this writer used them.
    pub fn failed_drives(&self) -> impl Iterator<Item = &Path> {
        self.drive_errors().map(|(drive, _)| drive)
    }

    /// Returns the folders of the drives that failed while this writer used them, each with its last error.
    pub fn drive_errors(&self) -> impl Iterator<Item = (&Path, &io::Error)> {
        let members = self.members.iter().zip(&self.failed);
        members.filter_map(|((_, drive), error)| Some((drive.as_path(), error.as_ref()?)))
    }

    /// Returns the place for the payload of a block, on the next drive that has free space. Takes a free segment if the one
    /// in use is full.
    ///
    /// # Errors
    ///
    /// [`Error::Duplicate`] if the recording has the sequence number; [`Error::Full`] if the LUN has no free segment;
    /// [`Error::DrivesFailed`].
    pub fn reserve(&mut self, block: Block) -> Result<Slot<S::File>> {
        self.check_new(block.sequence)?;
        let count = self.members.len();
        for member in (self.next_member..self.next_member + count).map(|member| member % count) {
            if self.failed[member].is_some() {
                continue;
            }
            match self.reserve_on(member, block) {
                Ok(Some(slot)) => {
                    self.next_member = (member + 1) % count;
                    return Ok(slot);
                }
                Ok(None) => {}
                Err(error) => self.fail_member(member, into_io(error)),
            }
        }
        Err(self.no_space())
    }

    fn check_new(&self, sequence: u64) -> Result<()> {
        let waiting = self.segments.values().flat_map(|segment| &segment.waiting);
        if self.recording.read().blocks.contains_key(&sequence)
            || waiting.into_iter().any(|(_, block)| block.sequence == sequence)
        {
            return Err(Error::Duplicate { sequence });
        }
        Ok(())
    }

    fn no_space(&self) -> Error {
        let lun = self.name.lun.clone();
        match &self.failed[self.last_failed] {
            Some(error) if self.failed.iter().all(Option::is_some) => Error::DrivesFailed {
                lun,
                drive: self.members[self.last_failed].1.clone(),
                source: copy_of(error),
            },
            _ => Error::Full { lun },
        }
    }

    fn fail_member(&mut self, member: usize, error: io::Error) {
        self.failed[member] = Some(error);
        self.current[member] = None;
        self.last_failed = member;
    }

    /// Reserves a slot on a member, or returns `None` if the member has no free segment.
    fn reserve_on(&mut self, member: usize, block: Block) -> Result<Option<Slot<S::File>>> {
        let geometry = self.recording.geometry;
        let full = |segment: &OpenSegment<S::File>| segment.next_slot == geometry.slots;
        if self.current[member].is_none_or(|id| self.segments.get(&id).is_none_or(full)) {
            self.current[member] = None;
            let Some(segment) = self.take_segment(member)? else {
                return Ok(None);
            };
            let id = self.next_segment;
            self.next_segment += 1;
            self.segments.insert(id, segment);
            self.current[member] = Some(id);
        }
        let Some((id, segment)) = self.current[member].and_then(|id| Some((id, self.segments.get_mut(&id)?))) else {
            return Ok(None);
        };
        let slot = segment.next_slot;
        segment.next_slot += 1;
        segment.in_flight += 1;
        Ok(Some(Slot {
            file: Arc::clone(&segment.file),
            offset: geometry.slot_offset(slot),
            length: geometry.block_size,
            segment: id,
            slot,
            member,
            block,
            _recording: Arc::clone(&self.recording),
        }))
    }

    /// Takes a free segment. The header of the new use is durable before the segment moves to the recording, and both
    /// before its first slot is used. If an operation fails, the segment stays unused until the store is opened again.
    fn take_segment(&mut self, member: usize) -> Result<Option<OpenSegment<S::File>>> {
        let system = &self.shared.system;
        let lun_folder = &self.members[member].0;
        let Some(number) = self.shared.state().lun_mut(&self.name.lun)?.members[member]
            .free
            .pop_first()
        else {
            return Ok(None);
        };
        let free = layout::free(lun_folder);
        let from = free.join(layout::segment(number));
        let file = system.open(&from).context("opening", &from)?;
        if system.size(&file).context("reading the size of", &from)? < self.segment_size {
            return Err(Error::Damaged {
                path: from,
                why: "it is shorter than a segment of its LUN",
            });
        }
        let generation = segment_header(system, &file, &from)?.map_or(0, |header| header.generation) + 1;
        let header = SegmentHeader {
            lun: self.lun,
            number,
            generation,
            stream: self.stream,
            channel: self.name.channel.into(),
            recording: self.number,
            block_size: self.recording.geometry.block_size,
            started: self.recording.started,
        };
        let offset = SegmentHeader::offset(generation);
        system
            .write_durable(&file, offset, &header.encode())
            .context("writing", &from)?;

        let channel = channel_folder(lun_folder, &self.name);
        let folder = channel.join(layout::recording(self.number));
        if !self.has_folder.contains(&member) {
            system.create_folder(&folder).context("creating", &folder)?;
            system.sync_folder(&channel).context("syncing", &channel)?;
            self.has_folder.insert(member);
        }
        let path = folder.join(layout::segment(number));
        system.rename(&from, &path).context("renaming", &from)?;
        for folder in [&folder, &free] {
            system.sync_folder(folder).context("syncing", folder)?;
        }
        let mut content = self.recording.write();
        let index = content.segments.len() as u32;
        content.segments.push(path.clone());
        Ok(Some(OpenSegment {
            member,
            path,
            file: Arc::new(file),
            generation,
            index,
            next_slot: 0,
            next_page: 0,
            in_flight: 0,
            waiting: Vec::new(),
        }))
    }

    /// Reports that the payload of a block was written completely. The next [`commit`](Self::commit) acknowledges it.
    ///
    /// # Errors
    ///
    /// [`Error::Duplicate`] if another block with the sequence number was written meanwhile; [`Error::DriveFailed`] if the
    /// drive failed meanwhile: reserve the block again.
    pub fn written(&mut self, slot: Slot<S::File>) -> Result<()> {
        let unique = self.check_new(slot.block.sequence);
        let Some(segment) = self.segments.get_mut(&slot.segment) else {
            return Err(Error::DriveFailed {
                drive: self.members[slot.member].1.clone(),
            });
        };
        segment.in_flight -= 1;
        unique?;
        segment.waiting.push((slot.slot, slot.block));
        Ok(())
    }

    /// Reports that the drive failed to write the payload. The writer uses this drive no more. Blocks that were written to
    /// it before are still committed. The block can be reserved again, on another drive.
    pub fn failed(&mut self, slot: Slot<S::File>, error: io::Error) {
        self.fail_member(slot.member, error);
        self.abandon(slot);
    }

    /// Reports that the payload was not written, for a reason other than the drive: for example, its sender is gone. The
    /// block can be reserved again.
    pub fn abandon(&mut self, slot: Slot<S::File>) {
        if let Some(segment) = self.segments.get_mut(&slot.segment) {
            segment.in_flight -= 1;
        }
    }

    /// Reserves a place, and lets `payload` write the block at the offset of the file. `payload` can be
    /// `|file, offset| mapping.write_to(file, offset, range)` of the crate `p2pmem`.
    ///
    /// # Errors
    ///
    /// Those of [`reserve`](Self::reserve); [`Error::Payload`] if `payload` fails.
    pub fn write<E>(
        &mut self,
        block: Block,
        payload: impl FnOnce(&S::File, u64) -> std::result::Result<(), E>,
    ) -> Result<()>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let slot = self.reserve(block)?;
        if let Err(error) = payload(slot.file(), slot.offset()) {
            self.abandon(slot);
            return Err(Error::Payload {
                sequence: block.sequence,
                source: error.into(),
            });
        }
        self.written(slot)
    }

    /// Makes the records of all written blocks durable, and returns the blocks that are acknowledged from now on. One
    /// write of the index covers up to 64 blocks of a drive. If the payload is volatile, it is flushed first.
    pub fn commit(&mut self) -> Commit {
        let mut commit = Commit::default();
        let ids: Vec<u64> = self.segments.keys().copied().collect();
        for id in ids {
            let Some(segment) = self.segments.get_mut(&id) else {
                continue;
            };
            let member = segment.member;
            let mut sequences: Vec<u64> = segment.waiting.iter().map(|(_, block)| block.sequence).collect();
            let result = commit_segment(
                &self.shared.system,
                self.lun,
                &self.recording,
                segment,
                &mut self.order,
                &mut commit.acknowledged,
            );
            if let Err(error) = result {
                sequences.retain(|sequence| !commit.acknowledged.contains(sequence));
                segment.waiting.clear();
                let error = into_io(error);
                let drive = self.members[member].1.clone();
                self.fail_member(member, copy_of(&error));
                // The content of the page is unknown, so no page may follow. Slots in flight have no result.
                self.segments.remove(&id);
                commit.failures.push(Failure {
                    drive,
                    error,
                    sequences,
                });
            }
        }
        let slots = self.recording.geometry.slots;
        self.segments
            .retain(|_, segment| segment.next_slot < slots || segment.in_flight > 0);
        commit
    }

    /// Ends the recording. Blocks that were not committed are not recorded. A recording without a block is removed.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the segments of a recording without a block could not be released. The next
    /// [`Store::open`](super::Store::open) releases them.
    pub fn finish(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        self.segments.clear();
        let changes = locked(&self.shared.changes);
        let empty = self.recording.read().blocks.is_empty();
        let mut state = self.shared.state();
        let channel = state.channel_mut(&self.name)?;
        if channel.writing != Some(self.number) {
            return Ok(());
        }
        channel.writing = None;
        if !empty {
            return Ok(());
        }
        // The state and the writer have the recording, and each slot that still exists.
        if Arc::strong_count(&self.recording) > 2 {
            return Ok(());
        }
        channel.recordings.remove(&self.number);
        drop(state);
        if !self.has_folder.is_empty() {
            remove_recording(&self.shared, &self.name, self.number)?;
        }
        drop(changes);
        Ok(())
    }
}

impl<S: System> Drop for Writer<S> {
    fn drop(&mut self) {
        // The next opening of the store repeats what failed.
        drop(self.end());
    }
}

/// Returns an error with the same code, or the same text.
pub(crate) fn copy_of(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

fn commit_segment<S: System>(
    system: &S,
    lun: u64,
    recording: &Recording,
    segment: &mut OpenSegment<S::File>,
    order: &mut u64,
    acknowledged: &mut Vec<u64>,
) -> Result<()> {
    if segment.waiting.is_empty() {
        return Ok(());
    }
    if system.payload_needs_flush() {
        system.flush(&segment.file).context("flushing", &segment.path)?;
    }
    while !segment.waiting.is_empty() {
        let count = segment.waiting.len().min(RECORDS_PER_PAGE);
        let mut page = [0; PAGE];
        let mut stored = Vec::with_capacity(count);
        for (bytes, (slot, block)) in page.chunks_mut(RECORD).zip(&segment.waiting[..count]) {
            *order += 1;
            let record = Record {
                lun,
                generation: segment.generation,
                page: segment.next_page,
                slot: *slot,
                sequence: block.sequence,
                time: block.time,
                checksum: block.checksum,
                order: *order,
            };
            bytes.copy_from_slice(&record.encode());
            let place = Stored {
                segment: segment.index,
                slot: *slot,
                time: block.time,
                checksum: block.checksum,
                order: *order,
            };
            stored.push((block.sequence, place));
        }
        let offset = Geometry::index_offset(segment.next_page);
        system
            .write_durable(&segment.file, offset, &page)
            .context("writing", &segment.path)?;
        segment.next_page += 1;
        segment.waiting.drain(..count);
        acknowledged.extend(stored.iter().map(|(sequence, _)| sequence));
        recording.write().blocks.extend(stored);
    }
    Ok(())
}

/// Removes a recording from all drives. The caller holds the lock of changes, and removed the recording from the state.
pub(crate) fn remove_recording<S: System>(shared: &Shared<S>, name: &ChannelName, number: u64) -> Result<()> {
    let folders: Vec<PathBuf> = shared
        .state()
        .lun(&name.lun)?
        .members
        .iter()
        .map(|member| member.folder.clone())
        .collect();
    let parents: Vec<(PathBuf, PathBuf)> = folders
        .into_iter()
        .map(|folder| (folder.clone(), channel_folder(&folder, name)))
        .collect();
    let channel_folders: Vec<PathBuf> = parents.iter().map(|(_, parent)| parent.clone()).collect();
    let folder = layout::recording(number);
    mark(&shared.system, &channel_folders, &folder)?;
    for (member, parent) in parents.iter().enumerate() {
        let released = release_marked(&shared.system, std::slice::from_ref(parent), &folder)?;
        shared
            .state()
            .add_free(&name.lun, member, released.into_iter().flatten());
    }
    Ok(())
}
