// SPDX-License-Identifier: MIT OR Apache-2.0

//! The connections of a rank to the others, and the thread that watches them.
//!
//! The thread reads what arrives, answers queries, and sends what a connection did not accept at once. A caller waits on a condition
//! variable, which the thread signals after each change. Nobody blocks on a connection: what a connection does not accept waits in
//! memory, with a limit of bytes and of time.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags, Timespec};

use super::failure::{printable, Failure, MAX_FAILURE};
use super::frame::{Decoder, Message};
use super::mesh::{Mesh, BUFFER};

/// Most bytes that wait for a connection: two values, and answers.
const MAX_PENDING: usize = 1 << 20;
/// Longest time in which a connection accepts no byte.
const STALL: Duration = Duration::from_secs(10);
/// Longest sleep of the thread. Limits the time until a stall is noticed.
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// Most reads of a connection in its turn: more than its buffer has.
const MAX_READS: usize = 2 * BUFFER / READ + 1;
/// Bytes of a read.
const READ: usize = 16 << 10;

/// The other side closed the connection, or its process has ended.
const ENDED: &str = "ended";
/// Nothing arrives from the host of the other side.
const SILENT: &str = "does not respond: is its host up?";

/// The connections and their thread.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) names: Vec<String>,
    /// Whether the state has a failure.
    has_failed: AtomicBool,
    /// Number of collective calls that this rank has entered.
    pub(crate) calls: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
    /// Ends the sleep of the thread.
    wake: OwnedFd,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) failure: Option<Failure>,
    /// The other ranks. The place of this rank has no connection.
    pub(crate) peers: Vec<Peer>,
    /// Exchanges that this rank has begun.
    pub(crate) begun: u64,
    /// Queries that this rank has sent.
    pub(crate) queries: u64,
    /// Whether this rank has sent its last message.
    pub(crate) leaving: bool,
    /// Whether the thread ends.
    ending: bool,
}

/// What a rank knows about another one.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    stream: Option<Arc<TcpStream>>,
    decoder: Decoder,
    /// Bytes that the connection has not accepted.
    pending: Vec<u8>,
    /// When the connection last accepted bytes, or had nothing to accept.
    accepted: Option<Instant>,
    /// Whether writing failed because the host does not respond. The end of the connection is then no end of the rank.
    is_silent: bool,
    /// Exchanges whose values have arrived.
    received: u64,
    /// Values of exchanges that this rank has not finished: at most two.
    pub(crate) values: VecDeque<Vec<u8>>,
    /// Whether the rank has sent its last message.
    pub(crate) has_left: bool,
    /// The number of the last query that the rank has answered, and its answer.
    pub(crate) answer: (u64, u64),
}

impl Peer {
    /// Returns whether there is a connection.
    pub(crate) fn is_connected(&self) -> bool {
        self.stream.is_some()
    }

    /// Returns whether the connection has accepted all messages.
    pub(crate) fn is_flushed(&self) -> bool {
        self.stream.is_none() || self.pending.is_empty()
    }

    /// Returns whether the rank takes part in the group, or does not have all messages of this rank.
    pub(crate) fn is_staying(&self) -> bool {
        self.is_connected() && !(self.has_left && self.is_flushed())
    }

    /// Gives the connection what waits for it. A connection that fails gets nothing more; its end is noticed when reading, after the
    /// last messages of the other side.
    fn flush(&mut self) {
        while let Some(mut stream) = self.stream.as_deref().filter(|_| !self.pending.is_empty()) {
            match stream.write(&self.pending) {
                Ok(count) => {
                    self.pending.drain(..count);
                    self.accepted = Some(Instant::now());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    self.is_silent |= is_silence(&error);
                    self.pending.clear();
                }
            }
        }
    }
}

/// Returns whether the error means that the other host does not respond.
fn is_silence(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::NetworkDown
    )
}

impl State {
    /// Sends a message to the rank, as far as there is a connection. Never blocks.
    pub(crate) fn send(&mut self, rank: usize, message: &Message) {
        let peer = &mut self.peers[rank];
        if peer.stream.is_some() {
            if peer.pending.is_empty() {
                peer.accepted = Some(Instant::now());
            }
            message.encode(&mut peer.pending);
            peer.flush();
        }
    }

    /// Sends a message to all ranks.
    pub(crate) fn send_all(&mut self, message: &Message) {
        (0..self.peers.len()).for_each(|rank| self.send(rank, message));
    }
}

impl Shared {
    /// Takes the connections. Nobody watches them yet.
    ///
    /// # Errors
    ///
    /// The kernel has no eventfd.
    pub(crate) fn new(mesh: Mesh) -> Result<Self> {
        let peers = mesh.streams.into_iter().map(|stream| Peer {
            stream: stream.map(Arc::new),
            ..Peer::default()
        });
        Ok(Self {
            rank: mesh.rank,
            names: mesh.names,
            has_failed: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            state: Mutex::new(State {
                failure: None,
                peers: peers.collect(),
                begun: 0,
                queries: 0,
                leaving: false,
                ending: false,
            }),
            changed: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("creating an eventfd")?,
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the first failure.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if !self.has_failed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// Records a failure if it is the first one.
    pub(crate) fn fail(&self, state: &mut State, rank: usize, what: String) {
        if state.failure.is_none() {
            let what = printable(&what, MAX_FAILURE);
            state.failure = Some(Failure { rank, what });
            self.has_failed.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }

    /// Waits while the condition holds, until the deadline. Lets the thread send what waits. Returns whether the condition no
    /// longer holds.
    pub(crate) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        deadline: Instant,
        mut condition: impl FnMut(&mut State) -> bool,
    ) -> (MutexGuard<'a, State>, bool) {
        self.wake_up(&state);
        loop {
            if !condition(&mut state) {
                return (state, true);
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return (state, false);
            }
            state = self
                .changed
                .wait_timeout(state, rest)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Wakes the thread if it has something to do.
    pub(crate) fn wake_up(&self, state: &State) {
        if state.ending || !state.peers.iter().all(Peer::is_flushed) {
            // Fails only if the counter is full, and then the thread is awake.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Handles the messages of a rank that have arrived.
    fn handle(&self, state: &mut State, rank: usize) {
        let name = &self.names[rank];
        loop {
            let invalid = match state.peers[rank].decoder.next() {
                Ok(None) => return,
                Ok(Some(message)) => match self.handle_one(state, rank, message) {
                    Ok(()) => continue,
                    Err(what) => what.to_owned(),
                },
                Err(invalid) => invalid.to_string(),
            };
            let what = format!("{name} sent {invalid}: do all ranks run the same version of p2pmem?");
            state.peers[rank].stream = None;
            return self.fail(state, rank, what);
        }
    }

    fn handle_one(&self, state: &mut State, rank: usize, message: Message) -> Result<(), &'static str> {
        let begun = state.begun;
        let peer = &mut state.peers[rank];
        match message {
            // The other rank finishes an exchange with the value of this one. So it is at most one exchange ahead.
            Message::Value { number, bytes } => {
                if number != peer.received || number > begun || peer.has_left {
                    return Err("a value of another exchange");
                }
                peer.received += 1;
                peer.values.push_back(bytes);
            }
            Message::Failed { rank: failed, what } => {
                let failed = failed as usize;
                if failed >= self.names.len() {
                    return Err("a failure of a rank that does not exist");
                }
                let what = if failed == rank {
                    what
                } else {
                    format!("{}, as {} reports", printable(&what, MAX_FAILURE / 2), self.names[rank])
                };
                self.fail(state, failed, what);
            }
            Message::Query { number } => {
                let calls = self.calls.load(Ordering::Relaxed);
                if !state.leaving {
                    state.send(rank, &Message::Answer { number, calls });
                }
            }
            Message::Answer { number, calls } => peer.answer = (number, calls),
            Message::Bye => peer.has_left = true,
        }
        Ok(())
    }

    /// Reads what has arrived from a rank. Returns what happened to the connection if it has ended.
    fn read(&self, rank: usize, mut stream: &TcpStream) -> Option<&'static str> {
        let mut bytes = [0; READ];
        // Not without an end, so that the other connections have their turn.
        for _ in 0..MAX_READS {
            match stream.read(&mut bytes) {
                Ok(0) => return Some(ENDED),
                Ok(count) => {
                    let mut state = self.lock();
                    state.peers[rank].decoder.feed(&bytes[..count]);
                    self.handle(&mut state, rank);
                    self.changed.notify_all();
                    if !state.peers[rank].is_connected() {
                        return None;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if is_silence(&error) => return Some(SILENT),
                Err(_) => return Some(ENDED),
            }
        }
        None
    }

    /// Reads what has arrived from the ranks, and then handles the connections that have ended.
    ///
    /// The end of a rank can be the consequence of another rank's failure: a launcher kills all ranks after the first one that fails.
    /// The reason of the failure has arrived before the end that it caused, on another connection. So all connections are read
    /// before the end of one becomes a failure.
    pub(crate) fn read_all(&self, ready: &[(usize, &TcpStream)], all: &[(usize, &TcpStream)]) {
        let read = |(rank, stream): &(usize, &TcpStream)| self.read(*rank, stream).map(|what| (*rank, what));
        let mut ended: Vec<_> = ready.iter().filter_map(read).collect();
        if ended.is_empty() {
            return;
        }
        let has_ended = |rank: usize| ended.iter().any(|(other, _)| *other == rank);
        let others: Vec<_> = all.iter().filter(|(rank, _)| !has_ended(*rank)).copied().collect();
        ended.extend(others.iter().filter_map(read));
        let mut state = self.lock();
        for (rank, what) in ended {
            let peer = &mut state.peers[rank];
            peer.stream = None;
            let what = if peer.is_silent { SILENT } else { what };
            if !peer.has_left {
                self.fail(&mut state, rank, format!("{} {what}", self.names[rank]));
            }
        }
        self.changed.notify_all();
    }

    /// Sends what waits, and ends connections that accept nothing. Returns the connections that are left; `None` at the end.
    pub(crate) fn flush(&self) -> Option<Vec<(usize, Arc<TcpStream>, PollFlags)>> {
        let mut state = self.lock();
        if state.ending {
            return None;
        }
        let mut all = Vec::new();
        for rank in 0..state.peers.len() {
            let peer = &mut state.peers[rank];
            let waited = !peer.is_flushed();
            peer.flush();
            if waited && peer.is_flushed() {
                self.changed.notify_all();
            }
            let is_stalled = peer.accepted.is_some_and(|accepted| accepted.elapsed() > STALL);
            if !peer.is_flushed() && (is_stalled || peer.pending.len() > MAX_PENDING) {
                peer.stream = None;
                self.fail(
                    &mut state,
                    rank,
                    format!("{} does not respond: its process does not read", self.names[rank]),
                );
                continue;
            }
            let mut wants = PollFlags::IN;
            wants.set(PollFlags::OUT, !peer.is_flushed());
            all.extend(peer.stream.clone().map(|stream| (rank, stream, wants)));
        }
        Some(all)
    }

    /// The thread.
    fn run(&self) {
        while let Some(all) = self.flush() {
            let mut set: Vec<PollFd<'_>> = all
                .iter()
                .map(|(_, stream, wants)| PollFd::new(stream, *wants))
                .collect();
            set.push(PollFd::new(&self.wake, PollFlags::IN));
            let sleep = Timespec {
                tv_sec: MAX_SLEEP.as_secs() as i64,
                tv_nsec: 0,
            };
            match poll(&mut set, Some(&sleep)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let what = format!("{} cannot watch its connections: {error}", self.names[self.rank]);
                    let mut state = self.lock();
                    state.peers.iter_mut().for_each(|peer| peer.stream = None);
                    return self.fail(&mut state, self.rank, what);
                }
            }
            let ready: Vec<bool> = set
                .iter()
                .map(|fd| !(fd.revents() - PollFlags::OUT).is_empty())
                .collect();
            if ready.last() == Some(&true) {
                // Resets the counter. Does not block.
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            let all: Vec<(usize, &TcpStream)> = all.iter().map(|(rank, stream, _)| (*rank, &**stream)).collect();
            let ready = all.iter().zip(ready).filter(|(_, ready)| *ready);
            let ready: Vec<_> = ready.map(|(connection, _)| *connection).collect();
            self.read_all(&ready, &all);
        }
    }
}

impl Watch {
    /// Starts to watch the connections.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub(crate) fn start(mesh: Mesh) -> Result<Self> {
        let shared = Arc::new(Shared::new(mesh)?);
        let mut thread = None;
        if shared.names.len() > 1 {
            let watching = shared.clone();
            let builder = thread::Builder::new().name("p2pmem-group".into());
            thread = Some(
                builder
                    .spawn(move || watching.run())
                    .context("starting the thread that watches the ranks")?,
            );
        }
        Ok(Self { shared, thread })
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl Drop for Watch {
    /// Ends the thread, which never blocks for longer than a system call, and the connections.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ending = true;
        self.shared.wake_up(&state);
        drop(state);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed.
            let _ = thread.join();
        }
    }
}
