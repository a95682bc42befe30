// SPDX-License-Identifier: MIT OR Apache-2.0

//! Event queues (EQs): entries of 64 bytes (EQEs). An event in an armed EQ raises an interrupt.

use std::collections::VecDeque;

use p2pmem_vfio_user::{Bus, Dma};
use tracing::{debug, warn};

use super::layout::wire::{eqe, eqe_cmd, eqe_comp};
use super::layout::{Field, constants};
use super::ring::Ring;

/// Mask of a consumer index (24 bits).
pub(super) const INDEX: u32 = 0x00ff_ffff;
/// Maximum number of events that wait for a free EQE. Further events are lost.
const MAX_BACKLOG: usize = 1 << 16;

/// Event type, as numbered in `device.h`.
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

/// An EQE under construction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Eqe([u8; eqe::BYTES]);

impl Eqe {
    /// Creates an EQE of this type and subtype.
    pub(super) fn new(event: EventType, sub_type: u32) -> Self {
        let mut bytes = [0; eqe::BYTES];
        eqe::TYPE.set(&mut bytes, event.0);
        eqe::SUB_TYPE.set(&mut bytes, sub_type);
        Self(bytes)
    }

    /// Sets a field of the type-specific event data.
    pub(super) fn with(mut self, field: Field, value: impl Into<u64>) -> Self {
        eqe::DATA.field(field).set(&mut self.0, value);
        self
    }

    /// Creates a completion event of a CQ.
    pub(super) fn completion(cqn: u32) -> Self {
        Self::new(EventType::COMPLETION, 0).with(eqe_comp::CQN, cqn)
    }

    /// Creates a command completion event. `entries` has one bit per entry of the command queue.
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
    /// Event bitmask: one bit per event type that the EQ subscribes to.
    pub(super) mask: [u64; 4],
    /// EQ context, as created.
    pub(super) context: Vec<u8>,
    producer: u32,
    consumer: u32,
    armed: bool,
    backlog: VecDeque<Eqe>,
    /// Number of events lost because the driver did not consume EQEs for too long.
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

    /// Returns whether the EQ subscribes to an event type.
    pub(super) fn subscribes_to(&self, event: EventType) -> bool {
        let word = self.mask.get((event.0 / 64) as usize).copied().unwrap_or(0);
        (word >> (event.0 % 64)) & 1 != 0
    }

    /// Returns the producer and the consumer index.
    pub(super) fn indices(&self) -> (u32, u32) {
        (self.producer & INDEX, self.consumer)
    }

    /// Returns whether the next event raises an interrupt.
    pub(super) fn armed(&self) -> bool {
        self.armed
    }

    /// Posts an event. The event waits in the backlog while the EQ is full.
    pub(super) fn post(&mut self, entry: Eqe, bus: &Bus, dma: &Dma) {
        if self.backlog.len() >= MAX_BACKLOG {
            self.lost += 1;
            if self.lost == 1 {
                warn!(
                    vector = self.vector,
                    "event queue full, and its backlog too: events are lost"
                );
            }
            return;
        }
        self.backlog.push_back(entry);
        self.flush(bus, dma);
    }

    /// Sets the consumer index and, if `arm`, arms the EQ. Ignores the doorbell and returns false if the producer index
    /// is ahead of `consumer` by more than the number of entries.
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
            let Some(Eqe(mut bytes)) = self.backlog.pop_front() else {
                break;
            };
            eqe::OWNER.set(&mut bytes, (self.producer >> self.ring.log_entries()) & 1);
            if let Err(error) = self.ring.write_entry(dma, self.producer, &bytes) {
                debug!(%error, "event queue cannot be written: event lost");
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
