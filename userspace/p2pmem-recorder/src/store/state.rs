// SPDX-License-Identifier: MIT OR Apache-2.0

//! What an open store keeps in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::error::{Error, Result};
use super::format::Geometry;
use super::layout;

/// The name of a channel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChannelName {
    /// The LUN.
    pub lun: String,
    /// The stream.
    pub stream: String,
    /// The number of the channel in the stream.
    pub channel: u32,
}

impl ChannelName {
    /// Returns the name of a channel.
    pub fn new(lun: impl Into<String>, stream: impl Into<String>, channel: u32) -> Self {
        Self {
            lun: lun.into(),
            stream: stream.into(),
            channel,
        }
    }
}

impl std::fmt::Display for ChannelName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}", self.lun, self.stream, self.channel)
    }
}

/// A block, as its sender describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The number by which the sender orders blocks. A recording has each number once.
    pub sequence: u64,
    /// The sender's time in nanoseconds, of any epoch.
    pub time: u64,
    /// The CRC-32C of the payload. The store keeps it, and never reads the payload itself.
    pub checksum: u32,
}

/// State that writers and readers share with the store.
pub(crate) struct Shared<S> {
    pub(crate) system: S,
    pub(crate) drives: Vec<PathBuf>,
    pub(crate) state: Mutex<State>,
    /// Held while a LUN is created or deleted. Taken before `changes`.
    pub(crate) lun_changes: Mutex<()>,
    /// Held while a stream is created, or anything is deleted. Taken before `state`.
    pub(crate) changes: Mutex<()>,
}

impl<S> Shared<S> {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }
}

/// Locks a mutex. After a panic of another thread, the state has no half-done change, because changes do not panic.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) luns: BTreeMap<String, Lun>,
}

impl State {
    pub(crate) fn lun(&self, name: &str) -> Result<&Lun> {
        self.luns.get(name).ok_or_else(|| not_found("LUN", name))
    }

    pub(crate) fn lun_mut(&mut self, name: &str) -> Result<&mut Lun> {
        self.luns.get_mut(name).ok_or_else(|| not_found("LUN", name))
    }

    pub(crate) fn stream(&self, lun: &str, name: &str) -> Result<&Stream> {
        let streams = &self.lun(lun)?.streams;
        streams
            .get(name)
            .ok_or_else(|| not_found("stream", &format!("{lun}/{name}")))
    }

    pub(crate) fn channel_mut(&mut self, name: &ChannelName) -> Result<&mut Channel> {
        let missing = || not_found("channel", &name.to_string());
        let stream = self
            .lun_mut(&name.lun)?
            .streams
            .get_mut(&name.stream)
            .ok_or_else(missing)?;
        stream.channels.get_mut(name.channel as usize).ok_or_else(missing)
    }

    pub(crate) fn channel(&self, name: &ChannelName) -> Result<&Channel> {
        let stream = self.stream(&name.lun, &name.stream)?;
        let channel = stream.channels.get(name.channel as usize);
        channel.ok_or_else(|| not_found("channel", &name.to_string()))
    }

    /// Adds segments to the free segments of a member.
    pub(crate) fn add_free(&mut self, lun: &str, member: usize, numbers: impl IntoIterator<Item = u64>) {
        if let Some(lun) = self.luns.get_mut(lun) {
            lun.members[member].free.extend(numbers);
        }
    }
}

pub(crate) fn not_found(what: &'static str, name: &str) -> Error {
    Error::NotFound {
        what,
        name: name.to_owned(),
    }
}

pub(crate) struct Lun {
    pub(crate) id: u64,
    pub(crate) segment_size: u64,
    pub(crate) segments: u64,
    pub(crate) members: Vec<Member>,
    pub(crate) streams: BTreeMap<String, Stream>,
}

/// A drive of a LUN.
pub(crate) struct Member {
    /// The folder of the drive.
    pub(crate) drive: PathBuf,
    /// The folder of the LUN on the drive.
    pub(crate) folder: PathBuf,
    pub(crate) free: BTreeSet<u64>,
}

pub(crate) struct Stream {
    pub(crate) id: u64,
    pub(crate) geometry: Geometry,
    pub(crate) channels: Vec<Channel>,
}

impl Stream {
    /// Whether a channel has a writer or a reader.
    pub(crate) fn in_use(&self) -> bool {
        self.channels.iter().any(Channel::in_use)
    }
}

#[derive(Default)]
pub(crate) struct Channel {
    /// The recording that has a writer.
    pub(crate) writing: Option<u64>,
    /// The number of the next recording.
    pub(crate) next: u64,
    pub(crate) recordings: BTreeMap<u64, Arc<Recording>>,
}

impl Channel {
    fn in_use(&self) -> bool {
        self.writing.is_some() || self.recordings.values().any(in_use)
    }
}

/// Whether a writer or a reader has the recording. The caller holds the lock of the state, so no other can begin.
pub(crate) fn in_use(recording: &Arc<Recording>) -> bool {
    Arc::strong_count(recording) > 1
}

pub(crate) struct Recording {
    pub(crate) started: u64,
    pub(crate) geometry: Geometry,
    pub(crate) content: RwLock<Content>,
}

#[derive(Default)]
pub(crate) struct Content {
    pub(crate) segments: Vec<PathBuf>,
    /// The acknowledged blocks, by sequence number.
    pub(crate) blocks: BTreeMap<u64, Stored>,
}

/// Where a block is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    /// The index in [`Content::segments`].
    pub(crate) segment: u32,
    pub(crate) slot: u32,
    pub(crate) time: u64,
    pub(crate) checksum: u32,
    pub(crate) order: u64,
}

impl Recording {
    pub(crate) fn read(&self) -> std::sync::RwLockReadGuard<'_, Content> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> std::sync::RwLockWriteGuard<'_, Content> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The folder of a channel on a member.
pub(crate) fn channel_folder(lun_folder: &Path, name: &ChannelName) -> PathBuf {
    layout::channel(&layout::streams(lun_folder).join(&name.stream), name.channel)
}
