// SPDX-License-Identifier: MIT OR Apache-2.0

//! Completion queues: entries of 64 bytes, with events if the driver has armed the queue.

use std::time::{Duration, Instant};

use p2pmem_vfio_user::Dma;

use super::eq::INDEX;
use super::layout::{constants, wire};
use super::ring::{BufferError, Record, Ring};

/// The doorbell's bit for solicited completions only.
const SOLICITED_ONLY: u32 = constants::MLX5_CQ_DB_REQ_NOT_SOL;
/// Where the doorbell has its sequence number.
const SEQUENCE_SHIFT: u32 = 28;

/// When an event is made of completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moderation {
    /// At the latest after this time; zero: time makes none.
    pub(super) period: Duration,
    /// After this many completions; 0 and 1: each.
    pub(super) count: u32,
}

/// The driver's request for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Armed {
    solicited_only: bool,
    sequence: u32,
}

/// What a new completion means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// It is in the queue.
    Quiet,
    /// It is in the queue, and an event is due.
    Event,
    /// It is in the queue, and an event is due at this time unless one comes before.
    EventAt(Instant),
    /// The queue was full, or cannot be written: it is broken from now on, and a completion is lost.
    Failed,
    /// The queue has been broken before; a completion is lost.
    Broken,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq {
    pub(super) ring: Ring,
    pub(super) record: Record,
    pub(super) eqn: u32,
    pub(super) uar: u32,
    pub(super) ignore_overrun: bool,
    pub(super) moderation: Moderation,
    /// The context as it was created and modified.
    pub(super) context: Vec<u8>,
    producer: u32,
    /// As last read from the doorbell record.
    consumer: u32,
    /// Indices of resize entries that the driver may not have read yet. They take no entry of the new ring.
    turns: Vec<u32>,
    broken: bool,
    armed: Option<Armed>,
    /// Sequence number that the last event answered: arming with it again means nothing.
    answered: Option<u32>,
    /// Index behind the last completion that there was an event for: it makes no second one.
    notified: u32,
    /// Index behind the last solicited completion.
    solicited: Option<u32>,
    /// Completions since the index that the driver armed at.
    waiting: u32,
    /// When an event is due at the latest.
    deadline: Option<Instant>,
}

impl Cq {
    pub(super) fn new(ring: Ring, record: Record, eqn: u32, uar: u32, context: Vec<u8>) -> Self {
        Self {
            ring,
            record,
            eqn,
            uar,
            ignore_overrun: false,
            moderation: Moderation::default(),
            context,
            producer: 0,
            consumer: 0,
            turns: Vec::new(),
            broken: false,
            armed: None,
            answered: None,
            notified: 0,
            solicited: None,
            waiting: 0,
            deadline: None,
        }
    }

    /// Producer and last known consumer index.
    pub(super) fn indices(&self) -> (u32, u32) {
        (self.producer & INDEX, self.consumer)
    }

    /// Whether it lost a completion.
    pub(super) fn broken(&self) -> bool {
        self.broken
    }

    /// State of arming, as the context has it.
    pub(super) fn arm_state(&self) -> u32 {
        match (self.armed, self.answered) {
            (Some(_), _) => constants::MLX5_CQ_STATE_ARMED,
            (None, Some(_)) => constants::MLX5_CQ_STATE_FIRED,
            (None, None) => 0,
        }
    }

    /// Puts the owner bit in its place, and writes.
    fn write(&mut self, dma: &Dma, mut entry: [u8; wire::cqe64::BYTES]) -> Result<(), BufferError> {
        let owner = (self.producer >> self.ring.log_entries()) & 1;
        let op = wire::cqe64::OP_OWN.get32(&entry) & !constants::MLX5_CQE_OWNER_MASK;
        wire::cqe64::OP_OWN.set(&mut entry, op | owner);
        self.ring.publish(dma, self.producer, &entry)?;
        self.producer = self.producer.wrapping_add(1);
        Ok(())
    }

    /// Completions that the driver is not known to have read.
    fn unread(&self) -> u32 {
        let all = self.producer.wrapping_sub(self.consumer) & INDEX;
        // There are no more turns than indices.
        all - self.turns.len() as u32
    }

    /// Looks how far the driver has read.
    fn refresh(&mut self, dma: &Dma) -> Result<(), BufferError> {
        self.consumer = self.record.word(dma, 0)? & INDEX;
        let (producer, consumer) = (self.producer, self.consumer);
        let all = producer.wrapping_sub(consumer) & INDEX;
        self.turns.retain(|turn| (turn.wrapping_sub(consumer) & INDEX) < all);
        Ok(())
    }

    /// Whether another entry would overwrite one that the driver has not read.
    fn is_full(&mut self, dma: &Dma) -> Result<bool, BufferError> {
        if self.ignore_overrun || self.unread() < self.ring.entries() {
            return Ok(false);
        }
        self.refresh(dma)?;
        Ok(self.unread() >= self.ring.entries())
    }

    /// Adds a completion. Only the owner bit is not set in `entry` yet.
    pub(super) fn post(&mut self, dma: &Dma, entry: [u8; wire::cqe64::BYTES], solicited: bool, now: Instant) -> Posted {
        if self.broken {
            return Posted::Broken;
        }
        if !matches!(self.is_full(dma), Ok(false)) || self.write(dma, entry).is_err() {
            self.broken = true;
            return Posted::Failed;
        }
        if solicited {
            self.solicited = Some(self.producer & INDEX);
        }
        self.waiting = self.waiting.saturating_add(1);
        self.check(solicited, now)
    }

    /// Whether an event is due, after something was added or armed.
    fn check(&mut self, solicited: bool, now: Instant) -> Posted {
        let Some(armed) = self.armed else {
            return Posted::Quiet;
        };
        if armed.solicited_only && !solicited {
            return Posted::Quiet;
        }
        let Moderation { period, count } = self.moderation;
        let moderated = period > Duration::ZERO || count > 1;
        if !moderated || solicited && armed.solicited_only {
            return self.fire();
        }
        if count > 1 && self.waiting >= count {
            return self.fire();
        }
        if self.deadline.is_some() || period == Duration::ZERO {
            return Posted::Quiet;
        }
        let deadline = now + period;
        self.deadline = Some(deadline);
        Posted::EventAt(deadline)
    }

    fn fire(&mut self) -> Posted {
        self.answered = self.armed.take().map(|armed| armed.sequence);
        self.notified = self.producer & INDEX;
        self.deadline = None;
        Posted::Event
    }

    /// The driver asks for an event: the doorbell's first word. What came behind its consumer index counts at once, if
    /// there was no event for it yet.
    pub(super) fn arm(&mut self, word: u32, now: Instant) -> Posted {
        let sequence = (word >> SEQUENCE_SHIFT) & 3;
        let solicited_only = word & SOLICITED_ONLY != 0;
        if self.broken || self.answered == Some(sequence) {
            return Posted::Quiet;
        }
        let behind = |index: u32| self.producer.wrapping_sub(index) & INDEX;
        let new = behind(word & INDEX).min(behind(self.notified));
        // Which of them are solicited is known of the last one only, and that is enough.
        let solicited = self.solicited.is_some_and(|index| behind(index) < new);
        // Arming for all completions and then for solicited ones only does not cancel the first request.
        let both = self.armed.is_some_and(|armed| !armed.solicited_only);
        self.armed = Some(Armed {
            solicited_only: solicited_only && !both,
            sequence,
        });
        self.waiting = new;
        self.deadline = None;
        if new == 0 {
            return Posted::Quiet;
        }
        self.check(solicited, now)
    }

    /// The time set by [`Posted::EventAt`] may have come. True if an event is due.
    pub(super) fn timer(&mut self, now: Instant) -> bool {
        let due = self.deadline.is_some_and(|deadline| deadline <= now) && self.armed.is_some();
        if due {
            self.fire();
        }
        due
    }

    /// Switches to another ring. The last entry of the old ring reports that to the driver, and takes an index in both rings.
    /// Errors: the old ring has no free entry, or the new ring has too few entries for those that the driver has not read.
    pub(super) fn resize(&mut self, dma: &Dma, ring: Ring) -> Result<(), BufferError> {
        let mut entry = [0; wire::cqe64::BYTES];
        wire::cqe64::OP_OWN.set(&mut entry, constants::MLX5_CQE_RESIZE_CQ << 4);
        if self.is_full(dma)? {
            return Err(BufferError::Outside);
        }
        if !self.ignore_overrun && self.unread() > ring.entries() {
            self.refresh(dma)?;
            if self.unread() > ring.entries() {
                return Err(BufferError::Outside);
            }
        }
        self.turns.push(self.producer & INDEX);
        if let Err(error) = self.write(dma, entry) {
            self.turns.pop();
            return Err(error);
        }
        self.ring = ring;
        Ok(())
    }
}
