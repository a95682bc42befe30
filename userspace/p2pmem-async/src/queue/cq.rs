// SPDX-License-Identifier: MIT OR Apache-2.0

//! Completion queues that a peer peeks and the CPU consumes.
//!
//! A peek is byte code that waits for the n-th completion after those of earlier peeks. At its end it stores its number in
//! a word of the queue's record, so that the CPU knows that the peer has seen the entry. The NIC may write over an entry
//! once the consumer index in the doorbell record has passed it, so the CPU keeps this index at or before the entry of
//! each peek that has not ended.
//!
//! A queue cannot overrun: each posted work request reserves an entry, also an unsignaled one, because a failure causes a
//! completion in any case. Work requests without a free entry are refused.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{self, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use p2pmem_access_sys as access;

use crate::bytecode::{Operation, Peer, Program};
use crate::cqe::{self, Direction, Failure, Source};
use crate::error::{Error, Result};
use crate::region::Region;

/// Returns the number of bytes of the record: the doorbell record, and a word for each of `peeks` peeks that have not
/// ended.
pub const fn cq_record_bytes(peeks: usize) -> usize {
    PEEK_WORDS + 4 * peeks
}

/// Offset of the first word of the peeks.
const PEEK_WORDS: usize = 64;
/// Mask of the consumer index in the doorbell record (24 bits).
const INDEX: u32 = 0xff_ffff;

/// A completion of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// ID of the work request.
    pub id: u64,
    /// Number of the queue pair.
    pub qpn: u32,
    /// The queue.
    pub direction: Direction,
    /// The failure, if the work request failed.
    pub failure: Option<Failure>,
    /// Bytes that were received or read.
    pub bytes: u32,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// Sender of a received message; meaningful for datagrams.
    pub source: Source,
}

/// Work requests that a completion ends.
pub(super) struct Retired {
    /// ID of the work request that the completion is for.
    pub(super) id: u64,
    /// Number of work requests that have ended: this one, and earlier unsignaled ones.
    pub(super) count: u32,
}

/// The queues of a queue pair, as a completion queue sees them.
pub(super) trait WorkQueues: Send + Sync {
    /// Ends the work requests up to the one of a completion. Returns `None`, without a change, if there is no such one.
    fn complete(&self, direction: Direction, counter: u16, failure: Option<Failure>) -> Option<Retired>;
}

/// Identifies a peek.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeekId {
    sequence: u32,
}

/// Byte code that waits for completions.
#[derive(Debug)]
pub struct Peek {
    /// Identifies the peek, for [`AsyncCq::abort_peek_cq`].
    pub id: PeekId,
    /// The byte code. Execute it once.
    pub program: Program,
}

/// A peek that has not ended.
#[derive(Debug, Clone, Copy)]
struct Outstanding {
    /// Number of its word in the record.
    slot: usize,
    sequence: u32,
    /// Index of the first and of the last completion that the peek is for.
    first: u32,
    last: u32,
}

/// Completions of a queue pair that was dropped.
struct Dropped {
    qpn: u32,
    /// Completions before this index belong to the dropped queue pair.
    until: u32,
}

/// Indices count completions since the creation of the queue and wrap around.
struct State {
    /// Completions that poll_cq() has consumed.
    consumed: u32,
    /// Consumer index in the doorbell record.
    published: u32,
    /// Work requests that may still cause a completion.
    reserved: u32,
    /// Completions that a peek is for.
    peeked: u32,
    /// Number of the last peek.
    sequence: u32,
    /// Peeks in the order of their creation. Those that ended before the first one did stay until it has ended.
    peeks: VecDeque<Outstanding>,
    /// Words of the record that no peek uses.
    free: Vec<usize>,
    queues: HashMap<u32, Weak<dyn WorkQueues>>,
    dropped: Vec<Dropped>,
}

struct Shared {
    cqn: u32,
    size: u32,
    entries: Region,
    record: Region,
    peer: Peer,
    state: Mutex<State>,
}

/// A completion queue for a peer. Clones are the same queue.
#[derive(Clone)]
pub struct AsyncCq {
    shared: Arc<Shared>,
}

impl fmt::Debug for AsyncCq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncCq")
            .field("cqn", &self.shared.cqn)
            .field("size", &self.shared.size)
            .finish_non_exhaustive()
    }
}

impl AsyncCq {
    /// Takes over queue `cqn` of a NIC. `entries` is its buffer, `record` its doorbell record and a word for each peek that
    /// has not ended ([`cq_record_bytes`]). Both are initialized, so the NIC must not have a queue pair that uses the queue
    /// yet.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the number of entries is not a power of two, or the record is too short.
    pub fn new(cqn: u32, entries: Region, record: Region, peer: Peer) -> Result<Self> {
        let size = u32::try_from(entries.len() / cqe::BYTES).unwrap_or(0);
        if !size.is_power_of_two() || size > 1 << 22 || entries.len() % cqe::BYTES != 0 {
            return Err(Error::Argument(format!(
                "a completion queue of {} bytes: the number of entries must be a power of two, at most {}",
                entries.len(),
                1 << 22
            )));
        }
        if record.len() < cq_record_bytes(1) {
            return Err(Error::Argument(format!(
                "the record of a completion queue needs at least {} bytes, not {}",
                cq_record_bytes(1),
                record.len()
            )));
        }
        // Opcode and owner bit of an entry that is not written.
        entries.write(0, &vec![0xff; entries.len()]);
        record.write(0, &vec![0; record.len()]);
        entries.fence();
        let state = State {
            consumed: 0,
            published: 0,
            reserved: 0,
            peeked: 0,
            sequence: 0,
            peeks: VecDeque::new(),
            // The first word is taken first.
            free: (0..(record.len() - PEEK_WORDS) / 4).rev().collect(),
            queues: HashMap::new(),
            dropped: Vec::new(),
        };
        let state = Mutex::new(state);
        let shared = Shared {
            cqn,
            size,
            entries,
            record,
            peer,
            state,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns the queue's number.
    pub fn cqn(&self) -> u32 {
        self.shared.cqn
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u32 {
        self.shared.size
    }

    /// Returns the regions that byte code of this queue names.
    pub fn regions(&self) -> [&Region; 2] {
        [&self.shared.entries, &self.shared.record]
    }

    /// Returns whether both are the same queue.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held is one of the memory's, before any change of the state.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns byte code that waits for the next `count` completions: those after all earlier peeks, and after all
    /// completions that poll_cq() has returned. The byte code also ends if these completions are failures.
    ///
    /// Peeks wait for completions in the order in which they were created. They may be executed in any order.
    ///
    /// # Errors
    ///
    /// [`Error::Peek`] if `count` is 0, if the queue does not have enough entries for the completions, or if
    /// as many peeks have not ended as the record has words. [`Error::Unsupported`] or [`Error::TooLong`] if the peer cannot
    /// execute the byte code.
    pub fn peek_cq(&self, count: u32) -> Result<Peek> {
        let shared = &*self.shared;
        let refuse = |why: String| Error::Peek { cqn: shared.cqn, why };
        let mut state = self.lock();
        state.publish(shared);
        if count == 0 {
            return Err(refuse("a peek is for at least one completion".into()));
        }
        let first = if is_after(state.peeked, state.consumed) {
            state.peeked
        } else {
            state.consumed
        };
        let ahead = first.wrapping_sub(state.published);
        if ahead.checked_add(count).is_none_or(|end| end > shared.size) {
            return Err(refuse(format!(
                "{count} more completions after {ahead} that were not consumed exceed its {} entries; execute earlier peeks, and consume completions with poll_cq()",
                shared.size
            )));
        }
        if state.free.is_empty() {
            state.sweep(shared);
        }
        let Some(&slot) = state.free.last() else {
            return Err(refuse(format!(
                "{} peeks have not ended; execute or abort them first",
                state.peeks.len()
            )));
        };
        let last = first.wrapping_add(count - 1);
        let sequence = match state.sequence.wrapping_add(1) {
            // The initial value of a peek's word.
            0 => 1,
            sequence => sequence,
        };
        let target = shared.entries.target((shared.offset(last) + cqe::STATE_DWORD) as u64);
        let mut program = Program::new();
        program.push(if shared.owner(last) {
            Operation::PollAnd {
                target,
                value: cqe::OWNER,
            }
        } else {
            Operation::PollNor {
                target,
                value: !cqe::OWNER,
            }
        })?;
        program.push(Operation::StoreDword {
            target: shared.record.target((PEEK_WORDS + 4 * slot) as u64),
            value: sequence,
        })?;
        let why = "a peek polls the owner bit, which is 1 in every other lap, and reports its end";
        shared.peer.check(&program, why)?;
        state.sequence = sequence;
        state.peeked = last.wrapping_add(1);
        state.free.pop();
        state.peeks.push_back(Outstanding {
            slot,
            sequence,
            first,
            last,
        });
        Ok(Peek {
            id: PeekId { sequence },
            program,
        })
    }

    /// Takes back a peek whose byte code will not be executed any more, for example because the peer died. Returns
    /// false if the peek has ended.
    ///
    /// If the peek is the last one, the next peek is for the same completions.
    pub fn abort_peek_cq(&self, id: PeekId) -> bool {
        let shared = &*self.shared;
        let mut state = self.lock();
        state.publish(shared);
        let found = state.peeks.iter().position(|peek| peek.sequence == id.sequence);
        let Some((at, peek)) = found.and_then(|at| Some((at, *state.peeks.get(at)?))) else {
            return false;
        };
        if shared.has_ended(&peek) {
            return false;
        }
        state.peeks.remove(at);
        state.free.push(peek.slot);
        if state.peeked == peek.last.wrapping_add(1) {
            state.peeked = peek.first;
        }
        state.publish(shared);
        true
    }

    /// Consumes up to `most` completions.
    ///
    /// Completions may be consumed before or after the peer has seen them. The NIC can reuse an entry after both.
    ///
    /// # Errors
    ///
    /// [`Error::Unexpected`] for a completion that belongs to no work request; it is consumed.
    pub fn poll_cq(&self, most: usize) -> Result<Vec<Completion>> {
        let shared = &*self.shared;
        let mut state = self.lock();
        let mut completions = Vec::new();
        let mut error = None;
        while completions.len() < most {
            let Some(entry) = shared.entry(state.consumed) else {
                break;
            };
            match state.take(shared, &entry) {
                Ok(completion) => completions.extend(completion),
                // Reported by the next call.
                Err(_) if !completions.is_empty() => break,
                Err(what) => {
                    error = Some(what);
                    state.consumed = state.consumed.wrapping_add(1);
                    break;
                }
            }
            state.consumed = state.consumed.wrapping_add(1);
        }
        state.advance();
        state.publish(shared);
        match error {
            Some(what) => Err(Error::Unexpected { cqn: shared.cqn, what }),
            None => Ok(completions),
        }
    }

    /// Reserves an entry for the completion of a work request.
    pub(super) fn reserve(&self) -> Result<()> {
        let shared = &*self.shared;
        let mut state = self.lock();
        let held = |state: &State| state.consumed.wrapping_sub(state.published);
        if state.reserved + held(&state) >= shared.size {
            // Peeks may have ended since the last publication. Not for each request: reading their words from an accelerator
            // is slow.
            state.publish(shared);
        }
        let held = held(&state);
        let outstanding = state.reserved + held;
        if outstanding >= shared.size {
            return Err(Error::CompletionQueueFull {
                cqn: shared.cqn,
                outstanding,
                size: shared.size,
                held: match held {
                    0 => String::new(),
                    held => format!(", {held} of them by peeks that the peer has not executed"),
                },
            });
        }
        state.reserved += 1;
        Ok(())
    }

    /// Releases entries of work requests that will not complete.
    pub(super) fn release(&self, count: u32) {
        let mut state = self.lock();
        state.reserved = state.reserved.saturating_sub(count);
    }

    /// Adds the queues of a queue pair.
    pub(super) fn attach(&self, qpn: u32, queues: Weak<dyn WorkQueues>) {
        self.lock().queues.insert(qpn, queues);
    }

    /// Removes the queues of a queue pair that the NIC does not have any more. `reserved` counts its work requests that have
    /// not completed, with the completion queue locked. Its completions that are in the queue already will be skipped.
    pub(super) fn detach(&self, qpn: u32, reserved: impl FnOnce() -> u32) {
        let shared = &*self.shared;
        let mut state = self.lock();
        let reserved = reserved();
        state.queues.remove(&qpn);
        let (mut until, mut written) = (state.consumed, 0);
        for _ in 0..shared.size {
            let Some(entry) = shared.entry(until) else { break };
            let known = state.dropped.iter().any(|dropped| dropped.covers(qpn, until));
            if !known && cqe::decode(&entry).is_ok_and(|cqe| cqe.qpn == qpn) {
                written += 1;
            }
            until = until.wrapping_add(1);
        }
        if written > 0 {
            state.dropped.push(Dropped { qpn, until });
        }
        state.reserved = state.reserved.saturating_sub(reserved.saturating_sub(written));
    }

    /// Returns how many entries are reserved, for tests.
    #[cfg(test)]
    pub(super) fn reserved(&self) -> u32 {
        self.lock().reserved
    }
}

/// Returns whether `a` comes after `b`.
fn is_after(a: u32, b: u32) -> bool {
    let distance = a.wrapping_sub(b);
    distance != 0 && distance < 1 << 31
}

impl Dropped {
    fn covers(&self, qpn: u32, index: u32) -> bool {
        self.qpn == qpn && is_after(self.until, index)
    }
}

impl Shared {
    /// Returns the offset of an entry in the buffer.
    fn offset(&self, index: u32) -> usize {
        (index & (self.size - 1)) as usize * cqe::BYTES
    }

    /// Returns the owner bit of an entry that the NIC writes.
    fn owner(&self, index: u32) -> bool {
        index & self.size != 0
    }

    /// Returns whether the peer has executed a peek.
    fn has_ended(&self, peek: &Outstanding) -> bool {
        self.record.load_dword(PEEK_WORDS + 4 * peek.slot) == peek.sequence
    }

    /// Reads an entry; `None` if the NIC has not written it.
    fn entry(&self, index: u32) -> Option<[u8; cqe::BYTES]> {
        let at = self.offset(index);
        if !cqe::is_written(self.entries.load_dword(at + cqe::STATE_DWORD), self.owner(index)) {
            return None;
        }
        // The word above is read before the rest, also from memory that is mapped write-combining.
        access::load_fence();
        let mut entry = [0; cqe::BYTES];
        self.entries.read(at, &mut entry);
        Some(entry)
    }
}

impl State {
    /// Decodes an entry and ends its work requests. `Ok(None)` for an entry of a dropped queue pair. Fails without a
    /// change.
    fn take(&mut self, shared: &Shared, entry: &[u8; cqe::BYTES]) -> std::result::Result<Option<Completion>, String> {
        let cqe = cqe::decode(entry).map_err(|opcode| format!("opcode {opcode:#x} at index {}", self.consumed))?;
        let index = self.consumed;
        if self.dropped.iter().any(|dropped| dropped.covers(cqe.qpn, index)) {
            self.reserved = self.reserved.saturating_sub(1);
            return Ok(None);
        }
        let queues = self.queues.get(&cqe.qpn).and_then(Weak::upgrade);
        let retired = queues.and_then(|queues| queues.complete(cqe.direction, cqe.counter, cqe.failure));
        let retired = retired.ok_or_else(|| {
            format!(
                "queue pair {:#x}, {:?} queue, index {} (completion {index} of queue {:#x})",
                cqe.qpn, cqe.direction, cqe.counter, shared.cqn
            )
        })?;
        self.reserved = self.reserved.saturating_sub(retired.count);
        Ok(Some(Completion {
            id: retired.id,
            qpn: cqe.qpn,
            direction: cqe.direction,
            failure: cqe.failure,
            bytes: cqe.bytes,
            immediate: cqe.immediate,
            source: cqe.source,
        }))
    }

    /// Forgets what lies before the consumed completions. Comparisons of indices hold for 2^31 completions only.
    fn advance(&mut self) {
        let consumed = self.consumed;
        if !is_after(self.peeked, consumed) {
            self.peeked = consumed;
        }
        self.dropped.retain(|dropped| is_after(dropped.until, consumed));
    }

    /// Frees all peeks that have ended, also those after one that has not.
    fn sweep(&mut self, shared: &Shared) {
        let free = &mut self.free;
        self.peeks.retain(|peek| {
            let ended = shared.has_ended(peek);
            if ended {
                free.push(peek.slot);
            }
            !ended
        });
    }

    /// Frees the first peeks that have ended, and writes the consumer index to the doorbell record: up to the first entry
    /// that a peek still has to see. Reads one word more than peeks have ended, because the record may be in an accelerator.
    fn publish(&mut self, shared: &Shared) {
        while let Some(peek) = self.peeks.front().filter(|peek| shared.has_ended(peek)) {
            self.free.push(peek.slot);
            self.peeks.pop_front();
        }
        let mut index = self.consumed;
        // Peeks are for later completions than those before them.
        if let Some(peek) = self.peeks.front().filter(|peek| is_after(index, peek.last)) {
            index = peek.last;
        }
        if index != self.published {
            // The entries have been read before the NIC may write over them.
            atomic::fence(Ordering::SeqCst);
            self.published = index;
            // Big-endian in memory.
            shared.record.store_dword(0, (index & INDEX).swap_bytes());
            shared.record.fence();
        }
    }
}
