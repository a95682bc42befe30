// SPDX-License-Identifier: MIT OR Apache-2.0

//! Connections between ranks of one thread, for tests. A message is delivered when the test says so, and its source is read
//! at that time, as a NIC does.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

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
    /// Messages by sender and receiver.
    messages: Vec<Vec<VecDeque<Message>>>,
    /// Number of completed writes whose event the sender has not got, by sender and receiver.
    acknowledgements: Vec<Vec<usize>>,
    announcements: Vec<Vec<[u8; ANNOUNCEMENT]>>,
    events: Vec<Vec<Event>>,
    depth: usize,
    /// The rank whose connections fail, if any.
    pub failed: Option<usize>,
}

impl Network {
    /// Creates the connections of ranks with this memory, for `depth` messages each.
    pub fn new(memories: Vec<Span>, depth: usize) -> Rc<RefCell<Self>> {
        let ranks = memories.len();
        Rc::new(RefCell::new(Self {
            memories,
            messages: (0..ranks)
                .map(|_| (0..ranks).map(|_| VecDeque::new()).collect())
                .collect(),
            acknowledgements: vec![vec![0; ranks]; ranks],
            announcements: vec![vec![[0; ANNOUNCEMENT]; ranks]; ranks],
            events: vec![Vec::new(); ranks],
            depth,
            failed: None,
        }))
    }

    /// Delivers one message, or one acknowledgement. `choose` selects one of this number. Returns false if there is none.
    pub fn deliver(&mut self, choose: &mut dyn FnMut(usize) -> usize) -> bool {
        let ranks = self.memories.len();
        let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let mut ready = Vec::new();
        for (from, to) in pairs {
            if !self.messages[from][to].is_empty() {
                ready.push((from, to, true));
            }
            if self.acknowledgements[from][to] > 0 {
                ready.push((from, to, false));
            }
        }
        if ready.is_empty() {
            return false;
        }
        let (from, to, is_message) = ready[choose(ready.len())];
        if !is_message {
            self.acknowledgements[from][to] -= 1;
            self.events[from].push(Event::Sent { to });
            return true;
        }
        if let Some(message) = self.messages[from][to].pop_front() {
            if let Some((source, bytes, target)) = message.piece {
                let (source, target, bytes) = (source as usize, target as usize, bytes as usize);
                self.memories[from].copy_to(source, &self.memories[to], target, bytes);
            }
            if let Some(announcement) = message.announcement {
                self.announcements[to][from] = announcement;
            }
            let immediate = message.immediate;
            self.events[to].push(Event::Arrived { from, immediate });
            self.acknowledgements[from][to] += 1;
        }
        true
    }

    /// Returns whether all messages were delivered.
    pub fn is_idle(&self) -> bool {
        self.messages.iter().flatten().all(VecDeque::is_empty)
    }
}

/// The connections of a rank.
pub struct Local {
    network: Rc<RefCell<Network>>,
    rank: usize,
}

impl Local {
    /// Returns the connections of a rank.
    pub fn new(network: &Rc<RefCell<Network>>, rank: usize) -> Self {
        Self {
            network: network.clone(),
            rank,
        }
    }

    fn push(&mut self, to: usize, message: Message) -> Result<bool> {
        let mut network = self.network.borrow_mut();
        if network.failed.is_some_and(|failed| failed == to || failed == self.rank) {
            bail!("the connection to rank {to} has failed");
        }
        let depth = network.depth;
        let queue = &mut network.messages[self.rank][to];
        if queue.len() == depth {
            return Ok(false);
        }
        queue.push_back(message);
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
        self.network.borrow().announcements[self.rank][from]
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<()> {
        events.append(&mut self.network.borrow_mut().events[self.rank]);
        Ok(())
    }

    fn wait(&mut self, _limit: Duration) -> Result<()> {
        Ok(())
    }
}
