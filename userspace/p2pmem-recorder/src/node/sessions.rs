// SPDX-License-Identifier: MIT OR Apache-2.0

//! The sessions of a node, and their live figures.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::changes::Changes;
use crate::status::{Counters, Direction, Limit, Session, SessionDevices, Totals};
use crate::store::ChannelName;

/// The number of ended sessions that stay in the status. Sessions that run at the same time can make it more, until the next
/// one begins.
pub(super) const KEPT: usize = 32;

/// What a session does.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// The direction.
    pub direction: Direction,
    /// The channel.
    pub channel: ChannelName,
    /// The number of the recording.
    pub recording: u64,
    /// The name that the other side gave.
    pub peer: String,
    /// The NIC of this node.
    pub nic: String,
    /// The memory that was chosen, for people.
    pub memory: String,
    /// The PCI functions between which the payload moves.
    pub devices: SessionDevices,
    /// Bytes of a block.
    pub block_size: u64,
    /// The number of buffers.
    pub buffers: u32,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    options: SessionOptions,
    started: u64,
    blocks: AtomicU64,
    acknowledged: AtomicU64,
    in_flight: AtomicU32,
    limit: AtomicU8,
    stop: AtomicBool,
    running: AtomicBool,
    warnings: Mutex<Vec<String>>,
    error: Mutex<Option<String>>,
}

impl Entry {
    fn status(&self) -> Session {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        // Read in this order, so that a block which arrives meanwhile does not make the difference negative.
        let acknowledged = load(&self.acknowledged);
        let blocks = load(&self.blocks);
        let running = self.running.load(Ordering::Acquire);
        Session {
            id: self.id,
            direction: self.options.direction,
            lun: self.options.channel.lun.clone(),
            stream: self.options.channel.stream.clone(),
            channel: self.options.channel.channel,
            recording: self.options.recording,
            peer: self.options.peer.clone(),
            nic: self.options.nic.clone(),
            memory: self.options.memory.clone(),
            devices: self.options.devices.clone(),
            started: self.started,
            blocks,
            acknowledged,
            block_size: self.options.block_size,
            dropped: if running {
                0
            } else {
                blocks.saturating_sub(acknowledged)
            },
            buffers: self.options.buffers,
            in_flight: self.in_flight.load(Ordering::Relaxed),
            limit: match self.limit.load(Ordering::Relaxed) {
                0 => Limit::Peer,
                1 => Limit::Drive,
                _ => Limit::Rate,
            },
            running,
            warnings: locked(&self.warnings).clone(),
            error: locked(&self.error).clone(),
        }
    }

    /// Adds the counters of the session to totals.
    fn add_to(&self, totals: &mut Totals, ended: bool) {
        let status = self.status();
        let bytes = |blocks: u64| blocks.saturating_mul(status.block_size);
        let was_stopped = self.stop.load(Ordering::Relaxed);
        // A session drops its blocks when it ends.
        let dropped = if ended {
            status.blocks.saturating_sub(status.acknowledged)
        } else {
            0
        };
        let counters = Counters {
            sessions: 1,
            failed: u64::from(ended && status.error.is_some() && !was_stopped),
            blocks: status.blocks,
            bytes: bytes(status.blocks),
            acknowledged: status.acknowledged,
            acknowledged_bytes: bytes(status.acknowledged),
            dropped,
            dropped_bytes: bytes(dropped),
        };
        let direction = self.options.direction;
        *totals.nics.entry((direction, self.options.nic.clone())).or_default() += counters;
        *totals
            .channels
            .entry((direction, self.options.channel.clone()))
            .or_default() += counters;
    }
}

/// Returns the time in seconds since 1970.
pub(super) fn now() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.map_or(0, |time| time.as_secs())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    entries: BTreeMap<u64, Arc<Entry>>,
    /// The counters of the sessions that have ended.
    ended: Totals,
    stopping: bool,
}

/// All sessions that run, and the latest that ended.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    table: Arc<Mutex<Table>>,
}

impl Sessions {
    pub(super) fn begin(&self, options: SessionOptions, changes: &Arc<Changes>) -> SessionHandle {
        let mut table = locked(&self.table);
        let id = table.next;
        table.next += 1;
        let entry = Arc::new(Entry {
            id,
            options,
            started: now(),
            blocks: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            in_flight: AtomicU32::new(0),
            limit: AtomicU8::new(0),
            stop: AtomicBool::new(table.stopping),
            running: AtomicBool::new(true),
            warnings: Mutex::default(),
            error: Mutex::new(None),
        });
        table.entries.insert(id, Arc::clone(&entry));
        let ended = |entry: &&Arc<Entry>| !entry.running.load(Ordering::Acquire);
        let surplus = table.entries.values().filter(ended).count().saturating_sub(KEPT - 1);
        let oldest: Vec<u64> = table
            .entries
            .values()
            .filter(ended)
            .take(surplus)
            .map(|entry| entry.id)
            .collect();
        for id in oldest {
            table.entries.remove(&id);
        }
        drop(table);
        changes.notify();
        SessionHandle {
            entry,
            table: Arc::clone(&self.table),
            changes: Arc::clone(changes),
        }
    }

    /// Returns the number of sessions that have ended.
    pub(super) fn ended(&self) -> u64 {
        let table = locked(&self.table);
        let running = table
            .entries
            .values()
            .filter(|entry| entry.running.load(Ordering::Acquire));
        table.next - running.count() as u64
    }

    pub(super) fn stop(&self, id: u64) -> bool {
        let table = locked(&self.table);
        let entry = table
            .entries
            .get(&id)
            .filter(|entry| entry.running.load(Ordering::Acquire));
        entry
            .inspect(|entry| entry.stop.store(true, Ordering::Relaxed))
            .is_some()
    }

    pub(super) fn stop_all(&self) {
        let mut table = locked(&self.table);
        table.stopping = true;
        for entry in table.entries.values() {
            entry.stop.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the counters of all sessions.
    pub(super) fn totals(&self) -> Totals {
        let table = locked(&self.table);
        let mut totals = table.ended.clone();
        for entry in table.entries.values() {
            if entry.running.load(Ordering::Acquire) {
                entry.add_to(&mut totals, false);
            }
        }
        totals
    }

    pub(super) fn status(&self) -> Vec<Session> {
        locked(&self.table)
            .entries
            .values()
            .map(|entry| entry.status())
            .collect()
    }
}

/// A running session's access to its figures. The session has ended when the handle is dropped.
#[derive(Debug)]
pub struct SessionHandle {
    entry: Arc<Entry>,
    table: Arc<Mutex<Table>>,
    changes: Arc<Changes>,
}

impl SessionHandle {
    /// Returns the number of the session.
    pub fn id(&self) -> u64 {
        self.entry.id
    }

    /// Returns what the session does.
    pub fn options(&self) -> &SessionOptions {
        &self.entry.options
    }

    /// Adds something that a person should know, and that does not end the session.
    pub fn warn(&self, text: impl Into<String>) {
        locked(&self.entry.warnings).push(text.into());
    }

    /// Counts a block that arrived, or that the other side has read.
    pub fn arrived(&self) {
        self.entry.blocks.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts blocks that are durable.
    pub fn acknowledged(&self, blocks: u64) {
        self.entry.acknowledged.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Sets the number of buffers that wait for the drives, and what limits the session.
    pub fn progress(&self, in_flight: usize, limit: Limit) {
        let in_flight = u32::try_from(in_flight).unwrap_or(u32::MAX);
        self.entry.in_flight.store(in_flight, Ordering::Relaxed);
        let limit = match limit {
            Limit::Peer => 0,
            Limit::Drive => 1,
            Limit::Rate => 2,
        };
        self.entry.limit.store(limit, Ordering::Relaxed);
    }

    /// Whether the session should end.
    pub fn is_stopped(&self) -> bool {
        self.entry.stop.load(Ordering::Relaxed)
    }

    /// Records why the session ends early.
    pub fn failed(&self, error: impl Into<String>) {
        *locked(&self.entry.error) = Some(error.into());
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        self.entry.in_flight.store(0, Ordering::Relaxed);
        // Both under one lock: a session counts once, as one that runs or as one that has ended.
        let mut table = locked(&self.table);
        self.entry.add_to(&mut table.ended, true);
        self.entry.running.store(false, Ordering::Release);
        drop(table);
        self.changes.notify();
    }
}
