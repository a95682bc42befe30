// SPDX-License-Identifier: MIT OR Apache-2.0

//! Where a storage node keeps blocks. A block that was acknowledged is there with its checksum after a crash of the program,
//! and after a power cut.
//!
//! A **LUN** is a container of fixed size on one or more drives. A **stream** belongs to a LUN, and has **channels** and
//! blocks of one size. A **recording** is what one writer recorded on a channel. Each drive has a file system, which the
//! administrator mounted; the store uses a folder on it.
//!
//! ```
//! use p2pmem_recorder::store::{Block, ChannelName, Files, LunOptions, Store, StreamOptions};
//! use std::os::unix::fs::FileExt;
//!
//! # let folder = tempfile::tempdir()?;
//! # let drive = folder.path();
//! // Files::new() for direct I/O; the page cache serves for an example.
//! let files = Files::new().cached(true);
//! Store::prepare(&files, drive)?;
//! let store = Store::open(files, [drive])?;
//! store.create_lun("fast", &LunOptions::new([drive]).segment_size(1 << 20).segments(4))?;
//! store.create_stream("fast", "radar", &StreamOptions::new(64 << 10).channels(2))?;
//!
//! let channel = ChannelName::new("fast", "radar", 0);
//! let payload = vec![7; 64 << 10];
//! let block = Block { sequence: 1, time: 1000, checksum: crc32c::crc32c(&payload) };
//! let mut writer = store.writer(&channel, 0)?;
//! writer.write(block, |file, offset| file.write_all_at(&payload, offset))?;
//! assert_eq!(writer.commit().acknowledged, [1]);
//!
//! let mut reader = store.reader(&channel, writer.recording())?;
//! let mut played = vec![0; 64 << 10];
//! let (block, ()) = reader.read(1, |file, offset| file.read_exact_at(&mut played, offset))?;
//! assert_eq!(crc32c::crc32c(&played), block.checksum);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `Documentation/design/recorder.md` has the format on the drives, the order of writes, and what remains after a crash.

mod error;
mod files;
mod format;
mod layout;
mod reader;
mod recovery;
mod removal;
mod state;
mod system;
mod writer;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub use error::{Error, Result};
pub use files::Files;
pub(crate) use layout::drive_of;
pub use reader::{Location, Reader};
pub use recovery::Problem;
pub use state::{Block, ChannelName};
pub use system::{Entry, System};
pub use writer::{Commit, Failure, Slot, Writer};

use error::Context;
use format::{check_name, Geometry, LunHeader, Page, StreamHeader, PAGE};
use removal::{mark, names, release_marked, remove_tree};
use state::{in_use, locked, not_found, Channel, Lun, Member, Shared, Stream};
pub(crate) use writer::copy_of;
use writer::remove_recording;

/// The drives and the size of a new LUN.
#[derive(Debug, Clone)]
#[must_use]
pub struct LunOptions {
    drives: Vec<PathBuf>,
    segment_size: u64,
    segments: u64,
}

impl LunOptions {
    /// Returns options for a LUN that is striped over `drives`: 4 segments of 256 MiB on each drive.
    pub fn new<P: Into<PathBuf>>(drives: impl IntoIterator<Item = P>) -> Self {
        Self {
            drives: drives.into_iter().map(Into::into).collect(),
            segment_size: 256 << 20,
            segments: 4,
        }
    }

    /// Sets the bytes of a segment, a multiple of 4 KiB. A recording uses whole segments, at least one on each drive.
    pub fn segment_size(mut self, bytes: u64) -> Self {
        self.segment_size = bytes;
        self
    }

    /// Sets the number of segments on each drive.
    pub fn segments(mut self, count: u64) -> Self {
        self.segments = count;
        self
    }

    /// Returns the bytes of all segments.
    pub fn total(&self) -> u64 {
        let segments = self.segments.saturating_mul(self.drives.len() as u64);
        self.segment_size.saturating_mul(segments)
    }

    fn check(&self, drives: &[PathBuf]) -> Result<()> {
        let invalid = |what, value, remedy| Err(Error::InvalidValue { what, value, remedy });
        if self.drives.is_empty() {
            return invalid("number of drives", 0, "use at least one drive");
        }
        for (at, drive) in self.drives.iter().enumerate() {
            if !drives.contains(drive) {
                return Err(not_found("drive", &drive.display().to_string()));
            }
            if self.drives[..at].contains(drive) {
                return invalid("number of drives", self.drives.len() as u64, "use each drive once");
            }
        }
        if self.segments == 0 {
            return invalid("number of segments", 0, "use at least one segment");
        }
        if self.segment_size % PAGE as u64 != 0 {
            return invalid("segment size", self.segment_size, "use a multiple of 4096");
        }
        Geometry::new(self.segment_size, PAGE as u64).map(drop)
    }
}

/// The blocks and channels of a new stream.
#[derive(Debug, Clone)]
#[must_use]
pub struct StreamOptions {
    block_size: u64,
    channels: u32,
}

impl StreamOptions {
    /// Returns options for a stream of one channel, with blocks of `block_size` bytes, a multiple of 4 KiB.
    pub fn new(block_size: u64) -> Self {
        Self {
            block_size,
            channels: 1,
        }
    }

    /// Sets the number of channels, 1 to 1024.
    pub fn channels(mut self, count: u32) -> Self {
        self.channels = count;
        self
    }
}

/// A LUN and its free space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LunInfo {
    /// The name.
    pub name: String,
    /// The bytes of a segment.
    pub segment_size: u64,
    /// The segments on each drive.
    pub segments: u64,
    /// The folders of the drives, each with the number of its free segments.
    pub drives: Vec<(PathBuf, u64)>,
}

impl LunInfo {
    /// Returns the bytes of all segments.
    pub fn total(&self) -> u64 {
        self.segment_size * self.segments * self.drives.len() as u64
    }

    /// Returns the bytes of the free segments.
    pub fn free(&self) -> u64 {
        self.drives.iter().map(|(_, free)| free * self.segment_size).sum()
    }
}

/// A stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamInfo {
    /// The name.
    pub name: String,
    /// The bytes of a block.
    pub block_size: u64,
    /// The number of channels.
    pub channels: u32,
    /// The number of blocks that fit in a segment.
    pub blocks_per_segment: u32,
}

/// A recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordingInfo {
    /// The number of the recording in its channel. The number of a deleted recording can be used again after the store was
    /// opened again.
    pub number: u64,
    /// The time that the program gave for the start.
    pub started: u64,
    /// The number of acknowledged blocks.
    pub blocks: u64,
    /// The first and the last block, by sequence number.
    pub range: Option<(Block, Block)>,
    /// Whether the recording has a writer.
    pub writing: bool,
}

/// The LUNs on the drives of a storage node. One process opens a drive at a time.
pub struct Store<S: System> {
    shared: Arc<Shared<S>>,
    problems: Vec<Problem>,
    _locks: Vec<S::Lock>,
}

impl<S: System> Store<S> {
    /// Prepares the folder of a new drive, usually the mount point of its file system. A folder that is prepared stays as
    /// it is.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn prepare(system: &S, drive: impl AsRef<Path>) -> Result<()> {
        let drive = drive.as_ref();
        let root = layout::root(drive);
        let existing =
            |folder: &Path, name: &str| Ok::<_, Error>(names(system, folder)?.iter().any(|other| other == name));
        if !existing(drive, "p2pmem-recorder")? {
            system.create_folder(&root).context("creating", &root)?;
        }
        system.sync_folder(drive).context("syncing", drive)?;
        if !existing(&root, "lock")? {
            let lock = layout::lock(drive);
            system.create_file(&lock, PAGE as u64).context("creating", &lock)?;
        }
        if !existing(&root, "luns")? {
            let luns = layout::luns(drive);
            system.create_folder(&luns).context("creating", &luns)?;
        }
        system.sync_folder(&root).context("syncing", &root)
    }

    /// Opens the LUNs on all drives. Finishes creations and deletions that a crash interrupted, and reads the index of all
    /// recordings. What cannot be repaired is in [`problems`](Self::problems).
    ///
    /// # Errors
    ///
    /// [`Error::NotPrepared`] if a drive is not mounted or not prepared; [`Error::Locked`]; [`Error::Io`].
    pub fn open<P: Into<PathBuf>>(system: S, drives: impl IntoIterator<Item = P>) -> Result<Self> {
        let drives: Vec<PathBuf> = drives.into_iter().map(Into::into).collect();
        let mut locks = Vec::new();
        for drive in &drives {
            let prepared = names(&system, drive)?.iter().any(|name| name == "p2pmem-recorder")
                && names(&system, &layout::root(drive))?.iter().any(|name| name == "luns");
            if !prepared {
                return Err(Error::NotPrepared { path: drive.clone() });
            }
            let path = layout::lock(drive);
            locks.push(system.lock(&path).map_err(|source| match source.kind() {
                std::io::ErrorKind::WouldBlock => Error::Locked { path: drive.clone() },
                _ => Error::Io {
                    what: "locking",
                    path,
                    source,
                },
            })?);
        }
        let (state, problems) = recovery::recover(&system, &drives)?;
        let shared = Shared {
            system,
            drives,
            state: Mutex::new(state),
            lun_changes: Mutex::new(()),
            changes: Mutex::new(()),
        };
        Ok(Self {
            shared: Arc::new(shared),
            problems,
            _locks: locks,
        })
    }

    /// Returns what [`open`](Self::open) could not repair.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Creates a LUN. Writes zeros to all of its segments, so that recording needs no allocation in the file system. If the
    /// creation fails, nothing remains, or the next [`open`](Self::open) removes the rest. If only the last step failed, the
    /// next `open()` may find the complete LUN.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`], [`Error::Unfinished`], [`Error::InvalidName`], [`Error::InvalidValue`]; [`Error::NotFound`] if the
    /// store does not have a drive; [`Error::Io`], with ENOSPC if a drive is full.
    pub fn create_lun(&self, name: &str, options: &LunOptions) -> Result<()> {
        self.create_lun_with_progress(name, options, |_| {})
    }

    /// Creates a LUN as [`create_lun`](Self::create_lun) does, and reports the number of bytes that are written: 0 when name
    /// and options are valid and writing begins, and more after each segment.
    ///
    /// # Errors
    ///
    /// Those of [`create_lun`](Self::create_lun).
    pub fn create_lun_with_progress(&self, name: &str, options: &LunOptions, progress: impl Fn(u64)) -> Result<()> {
        check_name(name)?;
        options.check(&self.shared.drives)?;
        let _changes = locked(&self.shared.lun_changes);
        let system = &self.shared.system;
        for drive in &self.shared.drives {
            check_unused(system, &layout::luns(drive), name)?;
        }
        progress(0);
        let parents: Vec<PathBuf> = options.drives.iter().map(|drive| layout::luns(drive)).collect();
        let id = system.random().context("getting a random number for", &parents[0])?;
        let create = |member: usize, folder: &Path| {
            let header = LunHeader {
                id,
                member: member as u64,
                members: parents.len() as u64,
                segment_size: options.segment_size,
                segments: options.segments,
            };
            create_header(system, &folder.join(layout::LUN_FILE), &header.encode())?;
            let free = layout::free(folder);
            for folder in [&free, &layout::streams(folder)] {
                system.create_folder(folder).context("creating", folder)?;
            }
            for number in 0..options.segments {
                let path = free.join(layout::segment(number));
                system
                    .create_file(&path, options.segment_size)
                    .context("creating", &path)?;
                progress((member as u64 * options.segments + number + 1) * options.segment_size);
            }
            system.sync_folder(&free).context("syncing", &free)
        };
        create_everywhere(system, &parents, name, create).inspect_err(|_| {
            // The next opening of the store repeats what fails here.
            drop(mark(system, &parents, name).and_then(|()| remove_marked_trees(system, &parents, name)));
        })?;
        let members = options.drives.iter().zip(&parents).map(|(drive, parent)| Member {
            drive: drive.clone(),
            folder: parent.join(name),
            free: (0..options.segments).collect(),
        });
        let lun = Lun {
            id,
            segment_size: options.segment_size,
            segments: options.segments,
            members: members.collect(),
            streams: BTreeMap::new(),
        };
        self.shared.state().luns.insert(name.to_owned(), lun);
        Ok(())
    }

    /// Deletes a LUN and everything in it.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::InUse`]; [`Error::Io`]: the LUN is gone, and the next [`open`](Self::open) removes
    /// what remains of it, or finds it unchanged.
    pub fn delete_lun(&self, name: &str) -> Result<()> {
        let _lun_changes = locked(&self.shared.lun_changes);
        let _changes = locked(&self.shared.changes);
        let mut state = self.shared.state();
        if state.lun(name)?.streams.values().any(Stream::in_use) {
            return Err(Error::InUse { name: name.to_owned() });
        }
        let parents: Vec<PathBuf> = state
            .lun(name)?
            .members
            .iter()
            .map(|member| layout::luns(&member.drive))
            .collect();
        state.luns.remove(name);
        drop(state);
        mark(&self.shared.system, &parents, name)?;
        remove_marked_trees(&self.shared.system, &parents, name)
    }

    /// Creates a stream in a LUN.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::Exists`], [`Error::Unfinished`], [`Error::InvalidName`]; [`Error::InvalidValue`] if the
    /// block size is not a multiple of 4 KiB, or a block does not fit in a segment; [`Error::Io`].
    pub fn create_stream(&self, lun: &str, name: &str, options: &StreamOptions) -> Result<()> {
        check_name(name)?;
        if !(1..=1024).contains(&options.channels) {
            return Err(Error::InvalidValue {
                what: "number of channels",
                value: options.channels.into(),
                remedy: "use 1 to 1024",
            });
        }
        let _changes = locked(&self.shared.changes);
        let state = self.shared.state();
        let found = state.lun(lun)?;
        let geometry = Geometry::new(found.segment_size, options.block_size)?;
        let lun_id = found.id;
        let folders = member_folders(found);
        drop(state);
        let system = &self.shared.system;
        let parents: Vec<PathBuf> = folders.iter().map(|folder| layout::streams(folder)).collect();
        for parent in &parents {
            check_unused(system, parent, name)?;
        }
        let id = system.random().context("getting a random number for", &parents[0])?;
        let header = StreamHeader {
            lun: lun_id,
            id,
            block_size: options.block_size,
            channels: options.channels.into(),
        };
        let create = |_: usize, folder: &Path| {
            create_header(system, &folder.join(layout::STREAM_FILE), &header.encode())?;
            for channel in 0..options.channels {
                let folder = layout::channel(folder, channel);
                system.create_folder(&folder).context("creating", &folder)?;
            }
            Ok(())
        };
        create_everywhere(system, &parents, name, create).inspect_err(|_| {
            drop(mark(system, &parents, name).and_then(|()| remove_marked_trees(system, &parents, name)));
        })?;
        let stream = Stream {
            id,
            geometry,
            channels: (0..options.channels).map(|_| Channel::default()).collect(),
        };
        self.shared
            .state()
            .lun_mut(lun)?
            .streams
            .insert(name.to_owned(), stream);
        Ok(())
    }

    /// Deletes a stream and its recordings, and frees their segments.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::InUse`]; [`Error::Io`]: the stream is gone, and the next [`open`](Self::open) removes
    /// what remains of it, or finds it unchanged.
    pub fn delete_stream(&self, lun: &str, name: &str) -> Result<()> {
        let _changes = locked(&self.shared.changes);
        let mut state = self.shared.state();
        if state.stream(lun, name)?.in_use() {
            let name = format!("{lun}/{name}");
            return Err(Error::InUse { name });
        }
        let found = state.lun_mut(lun)?;
        found.streams.remove(name);
        let folders = member_folders(found);
        drop(state);
        let parents: Vec<(PathBuf, PathBuf)> = folders
            .into_iter()
            .map(|folder| (folder.clone(), layout::streams(&folder)))
            .collect();
        let system = &self.shared.system;
        mark(
            system,
            &parents.iter().map(|(_, parent)| parent.clone()).collect::<Vec<_>>(),
            name,
        )?;
        for (member, parent) in parents.iter().enumerate() {
            let released = release_marked(system, std::slice::from_ref(parent), name)?;
            self.shared
                .state()
                .add_free(lun, member, released.into_iter().flatten());
        }
        Ok(())
    }

    /// Deletes a recording, and frees its segments.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::InUse`]; [`Error::Io`]: the recording is gone, and the next [`open`](Self::open)
    /// removes what remains of it, or finds it unchanged.
    pub fn delete_recording(&self, name: &ChannelName, number: u64) -> Result<()> {
        let _changes = locked(&self.shared.changes);
        let mut state = self.shared.state();
        let full_name = format!("{name}/{number}");
        let channel = state.channel_mut(name)?;
        let recording = channel
            .recordings
            .get(&number)
            .ok_or_else(|| not_found("recording", &full_name))?;
        if in_use(recording) {
            return Err(Error::InUse { name: full_name });
        }
        channel.recordings.remove(&number);
        drop(state);
        remove_recording(&self.shared, name, number)
    }

    /// Begins a recording on a channel. `started` is the program's time of the start.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::HasWriter`] if the channel has a writer.
    pub fn writer(&self, name: &ChannelName, started: u64) -> Result<Writer<S>> {
        Writer::new(&self.shared, name, started)
    }

    /// Opens a recording for playback.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`].
    pub fn reader(&self, name: &ChannelName, number: u64) -> Result<Reader<S>> {
        Reader::new(&self.shared, name, number)
    }

    /// Returns all LUNs with their free space.
    pub fn luns(&self) -> Vec<LunInfo> {
        let state = self.shared.state();
        let info = |(name, lun): (&String, &Lun)| LunInfo {
            name: name.clone(),
            segment_size: lun.segment_size,
            segments: lun.segments,
            drives: lun
                .members
                .iter()
                .map(|member| (member.drive.clone(), member.free.len() as u64))
                .collect(),
        };
        state.luns.iter().map(info).collect()
    }

    /// Returns a LUN with its free space.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`].
    pub fn lun(&self, name: &str) -> Result<LunInfo> {
        let found = self.luns().into_iter().find(|lun| lun.name == name);
        found.ok_or_else(|| not_found("LUN", name))
    }

    /// Returns the streams of a LUN.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`].
    pub fn streams(&self, lun: &str) -> Result<Vec<StreamInfo>> {
        let state = self.shared.state();
        let info = |(name, stream): (&String, &Stream)| StreamInfo {
            name: name.clone(),
            block_size: stream.geometry.block_size,
            channels: stream.channels.len() as u32,
            blocks_per_segment: stream.geometry.slots,
        };
        Ok(state.lun(lun)?.streams.iter().map(info).collect())
    }

    /// Returns the recordings of a channel in the order of their numbers.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`].
    pub fn recordings(&self, name: &ChannelName) -> Result<Vec<RecordingInfo>> {
        let state = self.shared.state();
        let channel = state.channel(name)?;
        let infos = channel.recordings.iter().map(|(&number, recording)| {
            let content = recording.read();
            let block = |(&sequence, stored): (&u64, &state::Stored)| Block {
                sequence,
                time: stored.time,
                checksum: stored.checksum,
            };
            let ends = (content.blocks.first_key_value(), content.blocks.last_key_value());
            RecordingInfo {
                number,
                started: recording.started,
                blocks: content.blocks.len() as u64,
                range: ends.0.zip(ends.1).map(|(first, last)| (block(first), block(last))),
                writing: channel.writing == Some(number),
            }
        });
        Ok(infos.collect())
    }
}

fn member_folders(lun: &Lun) -> Vec<PathBuf> {
    lun.members.iter().map(|member| member.folder.clone()).collect()
}

/// Fails if `parent` has a folder `name`, with or without a suffix.
fn check_unused(system: &impl System, parent: &Path, name: &str) -> Result<()> {
    for found in names(system, parent)? {
        let name = name.to_owned();
        match layout::split_suffix(&found) {
            (plain, false) if plain == name => return Err(Error::Exists { name }),
            (plain, true) if plain == name => return Err(Error::Unfinished { name }),
            _ => {}
        }
    }
    Ok(())
}

/// Creates a file of one page.
fn create_header(system: &impl System, path: &Path, page: &Page) -> Result<()> {
    system.create_file(path, PAGE as u64).context("creating", path)?;
    let file = system.open(path).context("opening", path)?;
    system.write_durable(&file, 0, page).context("writing", path)
}

/// Creates the folder `name` in all parents. Until it is complete and durable on all drives, it has a suffix on one of them
/// at least.
fn create_everywhere(
    system: &impl System,
    parents: &[PathBuf],
    name: &str,
    create: impl Fn(usize, &Path) -> Result<()>,
) -> Result<()> {
    let new = format!("{name}{}", layout::NEW);
    for (member, parent) in parents.iter().enumerate() {
        let folder = parent.join(&new);
        system.create_folder(&folder).context("creating", &folder)?;
        create(member, &folder)?;
        for folder in [&folder, parent] {
            system.sync_folder(folder).context("syncing", folder)?;
        }
    }
    for parent in parents {
        let from = parent.join(&new);
        system.rename(&from, &parent.join(name)).context("renaming", &from)?;
    }
    for parent in parents {
        system.sync_folder(parent).context("syncing", parent)?;
    }
    Ok(())
}

/// Removes all folders `name` with a suffix, whose marks are durable.
fn remove_marked_trees(system: &impl System, parents: &[PathBuf], name: &str) -> Result<()> {
    for parent in parents {
        for found in names(system, parent)? {
            if layout::split_suffix(&found) == (name, true) {
                remove_tree(system, &parent.join(found))?;
            }
        }
        system.sync_folder(parent).context("syncing", parent)?;
    }
    Ok(())
}
