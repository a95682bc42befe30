// SPDX-License-Identifier: MIT OR Apache-2.0

//! Connections between ranks of one process, which have their memory in this process.
//!
//! [`Network::in_order`] delivers a message when it is sent, for ranks that are threads. [`Network::chosen`] is for tests of one
//! thread: a message is delivered when the test says so, and its source is read at that time, as a NIC does.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use p2pmem_verbs::Span;

use crate::message::ANNOUNCEMENT;

use super::{Event, Transport, Write};

/// A message that was not delivered yet.
struct Message {
    /// Source, bytes, and target.
    piece: Option<(u64, u64, u64)>,
    announcement: Option<[u8; ANNOUNCEMENT]>,
    immediate: u32,
}

/// All connections.
pub struct Network {
    memories: Vec<Span>,
    /// Most messages between two ranks that were not delivered yet.
    depth: usize,
    /// Whether messages are delivered when they are sent.
    is_prompt: bool,
    state: Mutex<State>,
    /// Notified when a rank has a new event.
    changed: Condvar,
}

struct State {
    /// Messages by sender and receiver.
    messages: Vec<Vec<VecDeque<Message>>>,
    /// Number of completed writes whose event the sender has not got, by sender and receiver.
    acknowledgements: Vec<Vec<usize>>,
    announcements: Vec<Vec<[u8; ANNOUNCEMENT]>>,
    events: Vec<Vec<Event>>,
    /// The rank whose connections fail, if any.
    failed: Option<usize>,
}

impl Network {
    fn new(memories: Vec<Span>, depth: usize, is_prompt: bool) -> Arc<Self> {
        let ranks = memories.len();
        let state = State {
            messages: (0..ranks)
                .map(|_| (0..ranks).map(|_| VecDeque::new()).collect())
                .collect(),
            acknowledgements: vec![vec![0; ranks]; ranks],
            announcements: vec![vec![[0; ANNOUNCEMENT]; ranks]; ranks],
            events: vec![Vec::new(); ranks],
            failed: None,
        };
        Arc::new(Self {
            memories,
            depth,
            is_prompt,
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    /// Creates the connections of ranks with this memory. A message is delivered when it is sent.
    pub fn in_order(memories: Vec<Span>) -> Arc<Self> {
        Self::new(memories, usize::MAX, true)
    }

    /// Creates the connections of ranks with this memory, for `depth` messages each. The caller delivers them.
    pub fn chosen(memories: Vec<Span>, depth: usize) -> Arc<Self> {
        Self::new(memories, depth, false)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets all connections of a rank fail.
    pub fn fail(&self, rank: usize) {
        self.lock().failed = Some(rank);
    }

    /// Delivers one message, or one acknowledgement. `choose` selects one of this number. Returns false if there is none.
    pub fn deliver(&self, choose: &mut dyn FnMut(usize) -> usize) -> bool {
        let is_delivered = self.deliver_one(&mut self.lock(), choose);
        self.changed.notify_all();
        is_delivered
    }

    fn deliver_one(&self, state: &mut State, choose: &mut dyn FnMut(usize) -> usize) -> bool {
        let ranks = self.memories.len();
        let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let mut ready = Vec::new();
        for (from, to) in pairs {
            if !state.messages[from][to].is_empty() {
                ready.push((from, to, true));
            }
            if state.acknowledgements[from][to] > 0 {
                ready.push((from, to, false));
            }
        }
        if ready.is_empty() {
            return false;
        }
        let (from, to, is_message) = ready[choose(ready.len())];
        if !is_message {
            state.acknowledgements[from][to] -= 1;
            state.events[from].push(Event::Sent { to });
            return true;
        }
        if let Some(message) = state.messages[from][to].pop_front() {
            if let Some((source, bytes, target)) = message.piece {
                let (source, target, bytes) = (source as usize, target as usize, bytes as usize);
                self.memories[from].copy_to(source, &self.memories[to], target, bytes);
            }
            if let Some(announcement) = message.announcement {
                state.announcements[to][from] = announcement;
            }
            let immediate = message.immediate;
            state.events[to].push(Event::Arrived { from, immediate });
            state.acknowledgements[from][to] += 1;
        }
        true
    }

    /// Returns whether all messages were delivered.
    pub fn is_idle(&self) -> bool {
        self.lock().messages.iter().flatten().all(VecDeque::is_empty)
    }
}

/// The connections of a rank.
pub struct Local {
    network: Arc<Network>,
    rank: usize,
}

impl Local {
    /// Returns the connections of a rank.
    pub fn new(network: &Arc<Network>, rank: usize) -> Self {
        Self {
            network: network.clone(),
            rank,
        }
    }

    fn push(&mut self, to: usize, message: Message) -> Result<bool> {
        let network = &self.network;
        let mut state = network.lock();
        if state.failed.is_some_and(|failed| failed == to || failed == self.rank) {
            bail!("the connection to rank {to} has failed");
        }
        let queue = &mut state.messages[self.rank][to];
        if queue.len() == network.depth {
            return Ok(false);
        }
        queue.push_back(message);
        if network.is_prompt {
            while network.deliver_one(&mut state, &mut |_| 0) {}
            network.changed.notify_all();
        }
        Ok(true)
    }
}

impl Transport for Local {
    fn write(&mut self, write: &Write) -> Result<bool> {
        let message = Message {
            piece: Some((write.from, write.bytes, write.into)),
            announcement: None,
            immediate: write.immediate,
        };
        self.push(write.to, message)
    }

    fn notify(&mut self, to: usize, announcement: Option<&[u8; ANNOUNCEMENT]>, immediate: u32) -> Result<bool> {
        let message = Message {
            piece: None,
            announcement: announcement.copied(),
            immediate,
        };
        self.push(to, message)
    }

    fn announcement(&self, from: usize) -> [u8; ANNOUNCEMENT] {
        self.network.lock().announcements[self.rank][from]
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<()> {
        events.append(&mut self.network.lock().events[self.rank]);
        Ok(())
    }

    fn wait(&mut self, limit: Duration) -> Result<()> {
        if !self.network.is_prompt {
            // No other thread delivers.
            return Ok(());
        }
        let deadline = Instant::now() + limit;
        let mut state = self.network.lock();
        while state.events[self.rank].is_empty() {
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                break;
            }
            let waited = self.network.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}
