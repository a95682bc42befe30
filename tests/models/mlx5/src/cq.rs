// SPDX-License-Identifier: MIT OR Apache-2.0

//! Completion queues (CQs): entries of 64 bytes (CQEs). A completion in an armed CQ causes an event.

use std::time::{Duration, Instant};

use p2pmem_vfio_user::Dma;

use super::eq::INDEX;
use super::layout::{constants, wire};
use super::ring::{BufferError, DoorbellRecord, Ring};

/// Bit of the CQ doorbell: only solicited completions cause an event.
const SOLICITED_ONLY: u32 = constants::MLX5_CQ_DB_REQ_NOT_SOL;
/// Shift of the arm sequence number in the CQ doorbell.
const ARM_SN_SHIFT: u32 = 28;

/// Event moderation of a CQ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moderation {
    /// Maximum delay of an event. Zero: no time limit.
    pub(super) period: Duration,
    /// Number of completions that cause an event. 0 and 1: each completion does.
    pub(super) count: u32,
}

/// Pending request of the driver for an event, from the arm doorbells since the last event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Armed {
    solicited_only: bool,
    arm_sn: u32,
}

/// Result of [`Cq::post`] and [`Cq::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PostResult {
    /// The CQE is written; no event is due.
    NoEvent,
    /// The CQE is written; an event is due now.
    Event,
    /// The CQE is written; an event is due at this time unless an earlier one is posted.
    EventAt(Instant),
    /// The CQ is full or its buffer cannot be written. The completion is lost and the CQ is broken from now on.
    Failed,
    /// The CQ was already broken; the completion is lost.
    Broken,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Cq {
    pub(super) ring: Ring,
    pub(super) record: DoorbellRecord,
    pub(super) eqn: u32,
    pub(super) uar: u32,
    pub(super) ignore_overrun: bool,
    pub(super) moderation: Moderation,
    /// CQ context, as created and modified.
    pub(super) context: Vec<u8>,
    producer: u32,
    /// Consumer index as last read from the doorbell record.
    consumer: u32,
    /// Indexes of RESIZE_CQ entries that the driver may not have read yet. These indexes have no entry in the new
    /// buffer.
    resize_cqes: Vec<u32>,
    broken: bool,
    armed: Option<Armed>,
    /// Arm sequence number of the last event. A second doorbell with this number is ignored.
    fired_arm_sn: Option<u32>,
    /// Producer index at the last event. Completions before this index cause no second event.
    notified_index: u32,
    /// Producer index after the last solicited completion.
    solicited: Option<u32>,
    /// Number of completions since the consumer index of the last arm doorbell.
    pending: u32,
    /// Time at which a moderated event is due.
    deadline: Option<Instant>,
}

impl Cq {
    pub(super) fn new(ring: Ring, record: DoorbellRecord, eqn: u32, uar: u32, context: Vec<u8>) -> Self {
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
            resize_cqes: Vec::new(),
            broken: false,
            armed: None,
            fired_arm_sn: None,
            notified_index: 0,
            solicited: None,
            pending: 0,
            deadline: None,
        }
    }

    /// Returns the producer index and the last known consumer index.
    pub(super) fn indices(&self) -> (u32, u32) {
        (self.producer & INDEX, self.consumer)
    }

    /// Returns whether the CQ lost a completion.
    pub(super) fn broken(&self) -> bool {
        self.broken
    }

    /// Returns the arm state (`st`) of the CQ context.
    pub(super) fn arm_state(&self) -> u32 {
        match (self.armed, self.fired_arm_sn) {
            (Some(_), _) => constants::MLX5_CQ_STATE_ARMED,
            (None, Some(_)) => constants::MLX5_CQ_STATE_FIRED,
            (None, None) => 0,
        }
    }

    /// Sets the owner bit of a CQE and writes the CQE at the producer index.
    fn write(&mut self, dma: &Dma, mut entry: [u8; wire::cqe64::BYTES]) -> Result<(), BufferError> {
        let owner = (self.producer >> self.ring.log_entries()) & 1;
        let op = wire::cqe64::OP_OWN.get32(&entry) & !constants::MLX5_CQE_OWNER_MASK;
        wire::cqe64::OP_OWN.set(&mut entry, op | owner);
        self.ring.write_entry(dma, self.producer, &entry)?;
        self.producer = self.producer.wrapping_add(1);
        Ok(())
    }

    /// Returns the number of completions that the driver may not have read.
    fn unread(&self) -> u32 {
        let all = self.producer.wrapping_sub(self.consumer) & INDEX;
        // Each RESIZE_CQ entry has one of these indexes, so the subtraction cannot underflow.
        all - self.resize_cqes.len() as u32
    }

    /// Reads the consumer index from the doorbell record.
    fn refresh(&mut self, dma: &Dma) -> Result<(), BufferError> {
        self.consumer = self.record.word(dma, 0)? & INDEX;
        let (producer, consumer) = (self.producer, self.consumer);
        let all = producer.wrapping_sub(consumer) & INDEX;
        self.resize_cqes
            .retain(|index| (index.wrapping_sub(consumer) & INDEX) < all);
        Ok(())
    }

    /// Returns whether the next CQE would overwrite one that the driver has not read.
    fn is_full(&mut self, dma: &Dma) -> Result<bool, BufferError> {
        if self.ignore_overrun || self.unread() < self.ring.entries() {
            return Ok(false);
        }
        self.refresh(dma)?;
        Ok(self.unread() >= self.ring.entries())
    }

    /// Posts a completion. `entry` is complete except for the owner bit.
    pub(super) fn post(
        &mut self,
        dma: &Dma,
        entry: [u8; wire::cqe64::BYTES],
        solicited: bool,
        now: Instant,
    ) -> PostResult {
        if self.broken {
            return PostResult::Broken;
        }
        if !matches!(self.is_full(dma), Ok(false)) || self.write(dma, entry).is_err() {
            self.broken = true;
            return PostResult::Failed;
        }
        if solicited {
            self.solicited = Some(self.producer & INDEX);
        }
        self.pending = self.pending.saturating_add(1);
        self.check(solicited, now)
    }

    /// Returns whether an event is due after a post or an arm doorbell.
    fn check(&mut self, solicited: bool, now: Instant) -> PostResult {
        let Some(armed) = self.armed else {
            return PostResult::NoEvent;
        };
        if armed.solicited_only && !solicited {
            return PostResult::NoEvent;
        }
        let Moderation { period, count } = self.moderation;
        let moderated = period > Duration::ZERO || count > 1;
        if !moderated || solicited && armed.solicited_only {
            return self.fire();
        }
        if count > 1 && self.pending >= count {
            return self.fire();
        }
        if self.deadline.is_some() || period == Duration::ZERO {
            return PostResult::NoEvent;
        }
        let deadline = now + period;
        self.deadline = Some(deadline);
        PostResult::EventAt(deadline)
    }

    fn fire(&mut self) -> PostResult {
        self.fired_arm_sn = self.armed.take().map(|armed| armed.arm_sn);
        self.notified_index = self.producer & INDEX;
        self.deadline = None;
        PostResult::Event
    }

    /// Arms the CQ. `word` is the first word of the doorbell. Completions after its consumer index count at once,
    /// unless an event was already posted for them.
    pub(super) fn arm(&mut self, word: u32, now: Instant) -> PostResult {
        let arm_sn = (word >> ARM_SN_SHIFT) & 3;
        let solicited_only = word & SOLICITED_ONLY != 0;
        if self.broken || self.fired_arm_sn == Some(arm_sn) {
            return PostResult::NoEvent;
        }
        let behind = |index: u32| self.producer.wrapping_sub(index) & INDEX;
        let new = behind(word & INDEX).min(behind(self.notified_index));
        // Only the last solicited completion is known. That is sufficient: the newest index decides.
        let solicited = self.solicited.is_some_and(|index| behind(index) < new);
        // Arming for all completions and then for solicited ones only does not cancel the first request.
        let both = self.armed.is_some_and(|armed| !armed.solicited_only);
        self.armed = Some(Armed {
            solicited_only: solicited_only && !both,
            arm_sn,
        });
        self.pending = new;
        self.deadline = None;
        if new == 0 {
            return PostResult::NoEvent;
        }
        self.check(solicited, now)
    }

    /// Returns true if the event of [`PostResult::EventAt`] is due at `now`.
    pub(super) fn timer(&mut self, now: Instant) -> bool {
        let due = self.deadline.is_some_and(|deadline| deadline <= now) && self.armed.is_some();
        if due {
            self.fire();
        }
        due
    }

    /// Switches to another buffer. A RESIZE_CQ entry, the last entry in the old buffer, reports the switch to the
    /// driver and uses one index of both buffers. Fails if the old buffer is full, or if the unread completions do not
    /// fit in the new one.
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
        self.resize_cqes.push(self.producer & INDEX);
        if let Err(error) = self.write(dma, entry) {
            self.resize_cqes.pop();
            return Err(error);
        }
        self.ring = ring;
        Ok(())
    }
}
