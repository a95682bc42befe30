// SPDX-License-Identifier: MIT OR Apache-2.0

//! The storage node: its store, its sessions, and its state.
//!
//! A [`Node`] is shared by the threads that serve sessions, and by the management in the browser. LUNs and streams are in
//! the [store](crate::store) on the drives, so a node needs no other file.

mod changes;
mod creation;
mod drives;
mod sessions;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use changes::Changes;
pub use changes::Observer;
use creation::Creations;
pub use drives::{DriveCounters, SimulatedDrives};
use sessions::Sessions;
pub use sessions::{SessionHandle, SessionOptions};

use crate::status::{Channel, Direction, DriveError, Lun, MemoryKind, Recording, Status, Stream, Totals};
use crate::store::{ChannelName, Files, LunOptions, Result, Store, StreamOptions};

/// How a node works.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// The name of the node, for people.
    pub name: String,
    /// The folders where the drives are mounted. The store is prepared on each.
    pub drives: Vec<PathBuf>,
    /// The memory for blocks in transit.
    pub memory: MemoryKind,
    /// The number of buffers of a session: 2 to 256.
    pub buffers: u32,
    /// How long a session waits for the other side before it ends.
    pub timeout: Duration,
    /// Whether files use the page cache of the host. For tests on file systems without direct I/O.
    pub cached: bool,
    /// Replaces the counters of the drives, and lets LUNs allocate nothing. For tests and examples.
    pub simulated: Option<SimulatedDrives>,
}

impl NodeOptions {
    /// Returns options for drives that are mounted at `drives`: device memory, 16 buffers, 30 seconds.
    pub fn new<P: Into<PathBuf>>(name: impl Into<String>, drives: impl IntoIterator<Item = P>) -> Self {
        Self {
            name: name.into(),
            drives: drives.into_iter().map(Into::into).collect(),
            memory: MemoryKind::Device,
            buffers: 16,
            timeout: Duration::from_secs(30),
            cached: false,
            simulated: None,
        }
    }
}

/// A storage node.
pub struct Node {
    options: NodeOptions,
    store: Store<Files>,
    drives: drives::Drives,
    creations: Creations,
    sessions: Sessions,
    changes: Arc<Changes>,
    started: Instant,
    stopping: AtomicBool,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Node {
    /// Prepares the drives if they are new, and opens the store on them.
    ///
    /// # Errors
    ///
    /// Those of [`Store::prepare`] and [`Store::open`].
    pub fn open(options: NodeOptions) -> Result<Arc<Self>> {
        let files = Files::new().cached(options.cached).sparse(options.simulated.is_some());
        for drive in &options.drives {
            Store::prepare(&files, drive)?;
        }
        let store = Store::open(files, options.drives.clone())?;
        Ok(Arc::new(Self {
            drives: drives::Drives::new(&options.drives, options.simulated.clone()),
            options,
            store,
            creations: Creations::default(),
            sessions: Sessions::default(),
            changes: Arc::default(),
            started: Instant::now(),
            stopping: AtomicBool::new(false),
        }))
    }

    /// Returns the options.
    pub fn options(&self) -> &NodeOptions {
        &self.options
    }

    /// Returns the store.
    pub fn store(&self) -> &Store<Files> {
        &self.store
    }

    /// Returns the state of everything.
    pub fn status(&self) -> Status {
        Status {
            name: self.options.name.clone(),
            version: env!("CARGO_PKG_VERSION"),
            uptime: self.started.elapsed().as_secs(),
            memory: self.options.memory,
            drives: self.drives.status(),
            luns: self.luns(),
            creation: self.creations.status(),
            sessions: self.sessions.status(),
            problems: self
                .store
                .problems()
                .iter()
                .map(|problem| format!("{}: {}", problem.name, problem.error))
                .collect(),
        }
    }

    /// Returns the LUNs with their streams, channels, and recordings. What is deleted meanwhile is left out.
    pub fn luns(&self) -> Vec<Lun> {
        let recordings = |name: &ChannelName| -> Vec<Recording> {
            let infos = self.store.recordings(name).unwrap_or_default();
            infos.iter().map(Recording::from).collect()
        };
        let streams = |lun: &str| -> Vec<Stream> {
            let infos = self.store.streams(lun).unwrap_or_default();
            let stream = infos.iter().map(|info| {
                let channels = (0..info.channels).map(|number| Channel {
                    number,
                    recordings: recordings(&ChannelName::new(lun, &info.name, number)),
                });
                Stream::new(info, channels.collect())
            });
            stream.collect()
        };
        let infos = self.store.luns();
        infos.iter().map(|info| Lun::new(info, streams(&info.name))).collect()
    }

    /// Calls `observer` after each change that a person should see at once: what is created or deleted, sessions that begin
    /// and end, and errors of drives. The counters of sessions and drives change without a call. The observer is called as
    /// long as it exists.
    pub fn observe(&self, observer: &Arc<Observer>) {
        self.changes.observe(observer);
    }

    /// Calls the observers, also after a failure, after which a part of the change can remain.
    fn changed(&self, result: Result<()>) -> Result<()> {
        self.changes.notify();
        result
    }

    /// Creates a LUN. Writes zeros to all of its bytes, which takes as long as writing them takes; the status shows the
    /// progress.
    ///
    /// # Errors
    ///
    /// Those of [`Store::create_lun`], and [`Busy`](crate::store::Error::Busy) while a LUN is being created.
    pub fn create_lun(&self, name: &str, options: &LunOptions) -> Result<()> {
        self.create_lun_with(name, options, || {})
    }

    /// Creates a LUN as [`create_lun`](Self::create_lun) does. Calls `begun` when the name and the options are valid and
    /// writing begins.
    ///
    /// # Errors
    ///
    /// Those of [`create_lun`](Self::create_lun). An error after the call of `begun` is also in the status, until the next LUN
    /// is created.
    pub fn create_lun_with(&self, name: &str, options: &LunOptions, begun: impl FnOnce()) -> Result<()> {
        let begun = std::cell::Cell::new(Some(begun));
        let result = self.creations.run(name, options.total(), |progress| {
            self.store.create_lun_with_progress(name, options, |written| {
                progress(written);
                if let Some(begun) = begun.take() {
                    begun();
                    self.changes.notify();
                }
            })
        });
        self.changes.notify();
        result
    }

    /// Deletes a LUN with everything in it.
    ///
    /// # Errors
    ///
    /// Those of [`Store::delete_lun`], and [`Busy`](crate::store::Error::Busy) while a LUN is being created.
    pub fn delete_lun(&self, name: &str) -> Result<()> {
        self.creations.check_idle()?;
        self.changed(self.store.delete_lun(name))
    }

    /// Creates a stream.
    ///
    /// # Errors
    ///
    /// Those of [`Store::create_stream`].
    pub fn create_stream(&self, lun: &str, name: &str, options: &StreamOptions) -> Result<()> {
        self.changed(self.store.create_stream(lun, name, options))
    }

    /// Deletes a stream with its recordings.
    ///
    /// # Errors
    ///
    /// Those of [`Store::delete_stream`].
    pub fn delete_stream(&self, lun: &str, name: &str) -> Result<()> {
        self.changed(self.store.delete_stream(lun, name))
    }

    /// Deletes a recording.
    ///
    /// # Errors
    ///
    /// Those of [`Store::delete_recording`].
    pub fn delete_recording(&self, channel: &ChannelName, number: u64) -> Result<()> {
        self.changed(self.store.delete_recording(channel, number))
    }

    /// Registers a session that begins.
    pub fn begin_session(&self, options: SessionOptions) -> SessionHandle {
        self.sessions.begin(options, &self.changes)
    }

    /// Returns the number of sessions that have ended.
    pub fn ended_sessions(&self) -> u64 {
        self.sessions.ended()
    }

    /// Returns the counters of all sessions since the program started.
    pub fn totals(&self) -> Totals {
        self.sessions.totals()
    }

    /// Asks a session to end. Blocks that it acknowledged stay. Returns whether a session of this number runs.
    pub fn stop_session(&self, id: u64) -> bool {
        self.sessions.stop(id)
    }

    /// Returns the block device and the folder of a drive, for people: `nvme0n1 at /mnt/nvme0`.
    pub fn describe_drive(&self, folder: &Path) -> String {
        self.drives.describe(folder)
    }

    /// Returns the folder of the drive that has a file.
    pub fn drive_of(&self, path: &Path) -> Option<&Path> {
        self.drives.of_file(path)
    }

    /// Records that a drive failed while a session used it, for [`Node::status`], and writes it to the log. `consequence` is
    /// what becomes of the session.
    pub fn drive_failed(&self, session: &SessionHandle, folder: &Path, error: &io::Error, consequence: &str) {
        let (options, id) = (session.options(), session.id());
        let text = format!(
            "the drive {} failed: {error}; {consequence}",
            self.describe_drive(folder)
        );
        let verb = match options.direction {
            Direction::Record => "recording",
            Direction::Play => "playing",
        };
        eprintln!("p2pmem-recorder: session {id}, {verb} {}: {text}", options.channel);
        session.warn(text);
        self.drives.failed(
            folder,
            DriveError {
                session: id,
                direction: options.direction,
                channel: options.channel.to_string(),
                time: sessions::now(),
                message: error.to_string(),
                consequence: consequence.to_owned(),
            },
        );
        self.changes.notify();
    }

    /// Notes that a session used a drive without an error, which removes the error of an earlier session from the status.
    pub fn drive_worked(&self, session: &SessionHandle, folder: &Path) {
        if self.drives.worked(folder, session.id()) {
            self.changes.notify();
        }
    }

    /// Removes the error of a session with a drive from the status, because a person knows it. `number` counts the drives in the
    /// order of the options, from 0. Returns whether this was the last error of the drive.
    pub fn acknowledge_drive_error(&self, number: usize, session: u64) -> bool {
        let removed = self.drives.acknowledge(number, session);
        if removed {
            self.changes.notify();
        }
        removed
    }

    /// Asks all sessions to end, and new ones not to begin.
    pub fn shut_down(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.sessions.stop_all();
    }

    /// Whether the node shuts down.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(folder: &tempfile::TempDir) -> Arc<Node> {
        let mut options = NodeOptions::new("test", [folder.path()]);
        options.cached = true;
        Node::open(options).unwrap()
    }

    fn session(peer: &str) -> SessionOptions {
        SessionOptions {
            direction: Direction::Record,
            channel: ChannelName::new("fast", "radar", 0),
            recording: 0,
            peer: peer.into(),
            nic: "mlx5_0".into(),
            memory: "host memory".into(),
            devices: Default::default(),
            block_size: 65536,
            buffers: 8,
        }
    }

    #[test]
    fn status_has_luns_streams_and_sessions() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        let lun = LunOptions::new([folder.path()]).segment_size(1 << 20).segments(2);
        let begun = std::cell::Cell::new(false);
        node.create_lun_with("fast", &lun, || begun.set(true)).unwrap();
        assert!(begun.get());
        node.create_stream("fast", "radar", &StreamOptions::new(64 << 10).channels(2))
            .unwrap();
        let running = node.begin_session(session("a"));
        running.arrived();
        running.acknowledged(1);
        running.arrived();
        let status = node.status();
        assert_eq!((status.luns.len(), status.luns[0].free), (1, 2 << 20));
        assert_eq!(status.luns[0].streams[0].channels.len(), 2);
        let shown = &status.sessions[0];
        assert_eq!(
            (shown.blocks, shown.acknowledged, shown.dropped, shown.running),
            (2, 1, 0, true)
        );
        drop(running);
        let ended = &node.status().sessions[0];
        assert_eq!((ended.dropped, ended.running), (1, false));
        assert_eq!(status.drives[0].folder, folder.path());
    }

    #[test]
    fn sessions_are_stopped_and_the_latest_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        let first = node.begin_session(session("first"));
        assert!(!first.is_stopped());
        assert!(node.stop_session(first.id()));
        assert!(first.is_stopped());
        assert!(!node.stop_session(99));
        for _ in 0..100 {
            drop(node.begin_session(session("short")));
        }
        let sessions = node.status().sessions;
        assert!(
            sessions.iter().any(|session| session.peer == "first"),
            "a running session is kept"
        );
        assert_eq!(sessions.len(), 1 + sessions::KEPT);
        node.shut_down();
        assert!(node.is_stopping() && node.begin_session(session("late")).is_stopped());
    }

    #[test]
    fn the_error_of_a_drive_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        let first = node.begin_session(session("first"));
        node.drive_failed(
            &first,
            folder.path(),
            &io::Error::from_raw_os_error(5),
            "the recording ends",
        );
        let status = node.status();
        let error = status.drives[0].error.clone().unwrap();
        assert!(error.message.contains("Input/output"), "{error:?}");
        assert_eq!((error.session, error.channel.as_str()), (first.id(), "fast/radar/0"));
        let warning = &status.sessions[0].warnings[0];
        assert!(warning.contains(folder.path().to_str().unwrap()), "{warning}");
        assert!(warning.ends_with("(os error 5); the recording ends"), "{warning}");
        node.drive_worked(&first, folder.path());
        assert!(node.status().drives[0].error.is_some(), "the same session");
        let second = node.begin_session(session("second"));
        node.drive_worked(&second, folder.path());
        let status = node.status();
        assert_eq!(status.drives[0].error, None);
        assert_eq!(status.sessions[0].warnings.len(), 1, "the session keeps its warning");
        node.drive_failed(
            &second,
            folder.path(),
            &io::Error::from_raw_os_error(5),
            "the recording ends",
        );
        assert_eq!(
            node.status().drives[0].errors,
            2,
            "errors are counted, also those that are gone"
        );
        node.drive_worked(&first, folder.path());
        assert!(node.status().drives[0].error.is_some(), "an earlier session");
        let id = second.id();
        assert!(!node.acknowledge_drive_error(1, id) && !node.acknowledge_drive_error(0, first.id()));
        assert!(node.acknowledge_drive_error(0, id) && !node.acknowledge_drive_error(0, id));
        assert_eq!(node.status().drives[0].error, None);
    }

    #[test]
    fn totals_count_each_session_once_and_never_decrease() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        let total = || {
            let totals = node.totals();
            let of_nic = totals.nics.get(&(Direction::Record, "mlx5_0".to_owned())).copied();
            let channel = (Direction::Record, ChannelName::new("fast", "radar", 0));
            assert_eq!(of_nic, totals.channels.get(&channel).copied());
            of_nic.unwrap_or_default()
        };
        assert_eq!(total(), Default::default());
        let first = node.begin_session(session("first"));
        first.arrived();
        first.arrived();
        first.acknowledged(1);
        let running = total();
        assert_eq!(
            (running.sessions, running.blocks, running.acknowledged, running.dropped),
            (1, 2, 1, 0)
        );
        first.failed("the NIC failed");
        assert_eq!(total().failed, 0, "the session has not ended");
        drop(first);
        let ended = total();
        assert_eq!((ended.sessions, ended.failed, ended.dropped), (1, 1, 1));
        assert_eq!(
            (ended.bytes, ended.acknowledged_bytes, ended.dropped_bytes),
            (2 * 65536, 65536, 65536)
        );
        // A session that an administrator stopped did not fail, and sessions that are forgotten count.
        let stopped = node.begin_session(session("stopped"));
        node.stop_session(stopped.id());
        stopped.failed("the administrator stopped the session");
        drop(stopped);
        for _ in 0..2 * sessions::KEPT {
            drop(node.begin_session(session("short")));
        }
        let all = total();
        assert_eq!(
            (all.sessions, all.failed, all.blocks),
            (2 + 2 * sessions::KEPT as u64, 1, 2)
        );
    }

    #[test]
    fn the_creation_of_a_lun_begins_after_its_checks() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        let lun = LunOptions::new([folder.path()]).segment_size(1 << 20).segments(2);
        node.create_lun_with("no good", &lun, || panic!("began")).unwrap_err();
        node.create_lun_with("none", &lun.clone().segments(0), || panic!("began"))
            .unwrap_err();
        let begun = || {
            let creation = node.status().creation.unwrap();
            assert_eq!((creation.written, creation.total), (0, 2 << 20));
            assert!(matches!(node.delete_lun("fast"), Err(crate::store::Error::Busy { .. })));
        };
        node.create_lun_with("fast", &lun, begun).unwrap();
        assert_eq!(node.status().creation, None);
        node.delete_lun("fast").unwrap();
    }

    #[test]
    fn observers_are_called_after_changes() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        let calls = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counter = Arc::clone(&calls);
        let observer: Arc<Observer> = Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        node.observe(&observer);
        let more = |before: &mut u32| {
            let now = calls.load(Ordering::Relaxed);
            assert!(now > *before, "no call");
            *before = now;
        };
        let mut seen = 0;
        let lun = LunOptions::new([folder.path()]).segment_size(1 << 20).segments(1);
        node.create_lun("fast", &lun).unwrap();
        more(&mut seen);
        node.create_stream("fast", "radar", &StreamOptions::new(4096)).unwrap();
        more(&mut seen);
        let running = node.begin_session(session("a"));
        more(&mut seen);
        drop(running);
        more(&mut seen);
        let failing = node.begin_session(session("b"));
        more(&mut seen);
        let fails = || node.drive_failed(&failing, folder.path(), &io::Error::from_raw_os_error(5), "it ends");
        fails();
        more(&mut seen);
        assert!(node.acknowledge_drive_error(0, failing.id()));
        more(&mut seen);
        node.delete_lun("fast").unwrap();
        more(&mut seen);
        drop(observer);
        fails();
        assert_eq!(calls.load(Ordering::Relaxed), seen);
    }
}
