// SPDX-License-Identifier: MIT OR Apache-2.0

//! Event queues: entries of 64 bytes that an interrupt signals to the driver.

use std::collections::VecDeque;

use p2pmem_vfio_user::{Bus, Dma};
use tracing::{debug, warn};

use super::layout::wire::{eqe, eqe_cmd, eqe_comp};
use super::layout::{Field, constants};
use super::ring::Ring;

/// Consumer indices have 24 bits.
pub(super) const INDEX: u32 = 0x00ff_ffff;
/// Maximum number of events that wait for a free entry of their queue; further events are lost.
const MAX_BACKLOG: usize = 1 << 16;

/// What happened, as the driver numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EventType(pub(super) u32);

impl EventType {
    pub(super) const COMPLETION: Self = Self(constants::MLX5_EVENT_TYPE_COMP);
    pub(super) const COMMAND: Self = Self(constants::MLX5_EVENT_TYPE_CMD);
    pub(super) const COMMUNICATION_ESTABLISHED: Self = Self(constants::MLX5_EVENT_TYPE_COMM_EST);
    pub(super) const SEND_QUEUE_DRAINED: Self = Self(constants::MLX5_EVENT_TYPE_SQ_DRAINED);
    pub(super) const LAST_WORK: Self = Self(constants::MLX5_EVENT_TYPE_SRQ_LAST_WQE);
    pub(super) const SRQ_LIMIT: Self = Self(constants::MLX5_EVENT_TYPE_SRQ_RQ_LIMIT);
    pub(super) const SRQ_ERROR: Self = Self(constants::MLX5_EVENT_TYPE_SRQ_CATAS_ERROR);
    pub(super) const CQ_ERROR: Self = Self(constants::MLX5_EVENT_TYPE_CQ_ERROR);
    pub(super) const QP_FATAL: Self = Self(constants::MLX5_EVENT_TYPE_WQ_CATAS_ERROR);
    pub(super) const INVALID_REQUEST: Self = Self(constants::MLX5_EVENT_TYPE_WQ_INVAL_REQ_ERROR);
    pub(super) const ACCESS_VIOLATION: Self = Self(constants::MLX5_EVENT_TYPE_WQ_ACCESS_ERROR);
    pub(super) const PORT: Self = Self(constants::MLX5_EVENT_TYPE_PORT_CHANGE);
    pub(super) const PAGE_FAULT: Self = Self(constants::MLX5_EVENT_TYPE_PAGE_FAULT);
}

/// An entry under construction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry([u8; eqe::BYTES]);

impl Entry {
    /// An entry of this type.
    pub(super) fn new(event: EventType, sub_type: u32) -> Self {
        let mut bytes = [0; eqe::BYTES];
        eqe::TYPE.set(&mut bytes, event.0);
        eqe::SUB_TYPE.set(&mut bytes, sub_type);
        Self(bytes)
    }

    /// Sets a field of the type's own data.
    pub(super) fn with(mut self, field: Field, value: impl Into<u64>) -> Self {
        eqe::DATA.field(field).set(&mut self.0, value);
        self
    }

    /// There is something in a completion queue.
    pub(super) fn completion(cqn: u32) -> Self {
        Self::new(EventType::COMPLETION, 0).with(eqe_comp::CQN, cqn)
    }

    /// Commands have ended.
    pub(super) fn commands(entries: u32) -> Self {
        Self::new(EventType::COMMAND, 0).with(eqe_cmd::VECTOR, entries)
    }
}

/// An event queue.
#[derive(Debug)]
pub(super) struct Eq {
    pub(super) ring: Ring,
    pub(super) vector: u16,
    pub(super) uar: u32,
    /// A bit for each type of event that goes here.
    pub(super) mask: [u64; 4],
    /// The context as it was created.
    pub(super) context: Vec<u8>,
    producer: u32,
    consumer: u32,
    armed: bool,
    backlog: VecDeque<Entry>,
    /// Events lost because the driver took none for too long.
    pub(super) lost: u64,
}

impl Eq {
    pub(super) fn new(ring: Ring, vector: u16, uar: u32, mask: [u64; 4], context: Vec<u8>) -> Self {
        Self {
            ring,
            vector,
            uar,
            mask,
            context,
            producer: 0,
            consumer: 0,
            armed: false,
            backlog: VecDeque::new(),
            lost: 0,
        }
    }

    /// Whether events of this type go here.
    pub(super) fn takes(&self, event: EventType) -> bool {
        let word = self.mask.get((event.0 / 64) as usize).copied().unwrap_or(0);
        (word >> (event.0 % 64)) & 1 != 0
    }

    /// Producer and consumer index, as a query shows them.
    pub(super) fn indices(&self) -> (u32, u32) {
        (self.producer & INDEX, self.consumer)
    }

    /// Whether an interrupt is due at the next event.
    pub(super) fn armed(&self) -> bool {
        self.armed
    }

    /// Adds an event.
    pub(super) fn post(&mut self, entry: Entry, bus: &Bus, dma: &Dma) {
        if self.backlog.len() >= MAX_BACKLOG {
            self.lost += 1;
            if self.lost == 1 {
                warn!(vector = self.vector, "an event queue that nobody empties loses events");
            }
            return;
        }
        self.backlog.push_back(entry);
        self.flush(bus, dma);
    }

    /// Handles the driver's consumer index. Ignores an index that the driver cannot have reached, and returns false.
    pub(super) fn doorbell(&mut self, consumer: u32, arm: bool, bus: &Bus, dma: &Dma) -> bool {
        let unread = self.producer.wrapping_sub(consumer) & INDEX;
        if unread > self.ring.entries() {
            return false;
        }
        self.consumer = consumer;
        self.armed |= arm;
        self.flush(bus, dma);
        if self.armed && self.producer & INDEX != self.consumer {
            self.interrupt(bus);
        }
        true
    }

    fn flush(&mut self, bus: &Bus, dma: &Dma) {
        let mut written = false;
        while !self.backlog.is_empty() {
            if self.producer.wrapping_sub(self.consumer) & INDEX >= self.ring.entries() {
                break;
            }
            let Some(Entry(mut bytes)) = self.backlog.pop_front() else {
                break;
            };
            eqe::OWNER.set(&mut bytes, (self.producer >> self.ring.log_entries()) & 1);
            if let Err(error) = self.ring.publish(dma, self.producer, &bytes) {
                debug!(%error, "an event queue cannot be written");
                self.lost += 1;
                return;
            }
            self.producer = self.producer.wrapping_add(1);
            written = true;
        }
        if written && self.armed {
            self.interrupt(bus);
        }
    }

    fn interrupt(&mut self, bus: &Bus) {
        self.armed = false;
        bus.irqs.raise(self.vector);
    }
}
