// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue pairs whose doorbell a peer rings.
//!
//! A send passes through three states: posted (written to the send queue), committed (byte code submits it), completed. A
//! receive is valid at once: the NIC reads the doorbell record when a message arrives, and nothing has to ring.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::bytecode::{Operation, Peer, Program};
use crate::cqe::{Direction, Failure};
use crate::error::{Error, Result};
use crate::region::Region;
use crate::wqe::{ReceiveRequest, SendRequest, Transport, BLOCK, RECEIVE_STRIDE};

use super::cq::{AsyncCq, Completion, Retired, WorkQueues};

/// Bytes of the doorbell record.
pub const QP_RECORD_BYTES: usize = 8;
/// Offset of the send doorbell in the doorbell register page (`MLX5_BF_OFFSET` of `include/linux/mlx5/driver.h`).
pub const DOORBELL_OFFSET: u64 = 0x800;
/// Words of the doorbell record (`MLX5_RCV_DBR`, `MLX5_SND_DBR`).
const RECEIVE_WORD: usize = 0;
const SEND_WORD: usize = 4;
/// Indices of the NIC have 16 bits, so a longer queue would be ambiguous.
const MAX_ENTRIES: u32 = 1 << 15;

/// Sizes of the queues of a queue pair, and their places in one buffer: the receive queue first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpLayout {
    /// Basic blocks of the send queue: a power of two. A work request takes at least one.
    pub send_blocks: u32,
    /// Entries of the receive queue: a power of two.
    pub receive_entries: u32,
}

impl QpLayout {
    /// Checks the sizes.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if a size is not a power of two or too large.
    pub fn check(self) -> Result<()> {
        for (size, what) in [
            (self.send_blocks, "send blocks"),
            (self.receive_entries, "receive entries"),
        ] {
            if !size.is_power_of_two() || size > MAX_ENTRIES {
                return Err(Error::Argument(format!(
                    "{size} {what}: a power of two is needed, at most {MAX_ENTRIES}"
                )));
            }
        }
        Ok(())
    }

    /// Returns the offset of the send queue in the buffer.
    pub fn send_offset(self) -> usize {
        self.receive_entries as usize * RECEIVE_STRIDE
    }

    /// Returns the number of bytes of the buffer.
    pub fn bytes(self) -> usize {
        self.send_offset() + self.send_blocks as usize * BLOCK
    }
}

/// A work request in the send queue.
#[derive(Debug, Clone, Copy)]
struct Posted {
    id: u64,
    /// Index of its first basic block.
    index: u16,
    blocks: u16,
    /// What its doorbell writes.
    doorbell: u64,
}

/// Indices count basic blocks since the creation of the queue and wrap around.
#[derive(Debug, Default)]
struct SendQueue {
    /// Index of the next block.
    next: u16,
    /// Work requests that have not completed, in order.
    posted: VecDeque<Posted>,
    /// How many of them are committed.
    committed: usize,
}

impl SendQueue {
    fn used(&self) -> u16 {
        self.posted
            .front()
            .map_or(0, |first| self.next.wrapping_sub(first.index))
    }
}

#[derive(Debug, Default)]
struct ReceiveQueue {
    /// Index of the next entry.
    next: u16,
    /// IDs of the work requests that have not completed, in order.
    posted: VecDeque<u64>,
}

struct Shared {
    qpn: u32,
    transport: Transport,
    layout: QpLayout,
    queue: Region,
    record: Region,
    doorbell: Region,
    send: Mutex<SendQueue>,
    receive: Mutex<ReceiveQueue>,
    /// Why the queue pair is in the error state.
    failure: Mutex<Option<String>>,
}

/// Locks a mutex. A panic while the lock was held is one of the memory's, before any change of the state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A queue pair for a peer.
///
/// Dropping it removes its work requests from the completion queues. The NIC's queue pair must be destroyed before.
pub struct AsyncQp {
    shared: Arc<Shared>,
    peer: Peer,
    send_cq: AsyncCq,
    receive_cq: AsyncCq,
}

impl fmt::Debug for AsyncQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncQp")
            .field("qpn", &self.shared.qpn)
            .field("transport", &self.shared.transport)
            .field("peer", &self.peer.name())
            .finish_non_exhaustive()
    }
}

/// What [`AsyncQp::new`] takes over.
#[derive(Debug)]
pub struct QpParts {
    /// Number of the queue pair.
    pub qpn: u32,
    /// The transport.
    pub transport: Transport,
    /// Sizes of the queues.
    pub layout: QpLayout,
    /// The buffer: [`QpLayout::bytes`].
    pub queue: Region,
    /// The doorbell record: [`QP_RECORD_BYTES`].
    pub record: Region,
    /// The doorbell register page.
    pub doorbell: Region,
}

impl AsyncQp {
    /// Takes over a queue pair of a NIC. The doorbell record must be zero.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if the memory is too short for the layout.
    pub fn new(parts: QpParts, peer: Peer, send_cq: AsyncCq, receive_cq: AsyncCq) -> Result<Self> {
        parts.layout.check()?;
        let doorbell = usize::try_from(DOORBELL_OFFSET).unwrap_or(usize::MAX) + 8;
        for (region, needed) in [
            (&parts.queue, parts.layout.bytes()),
            (&parts.record, QP_RECORD_BYTES),
            (&parts.doorbell, doorbell),
        ] {
            if region.len() < needed {
                return Err(Error::Argument(format!(
                    "the region {} of a queue pair has {} bytes and needs {needed}",
                    region.kind(),
                    region.len()
                )));
            }
        }
        let shared = Arc::new(Shared {
            qpn: parts.qpn,
            transport: parts.transport,
            layout: parts.layout,
            queue: parts.queue,
            record: parts.record,
            doorbell: parts.doorbell,
            send: Mutex::default(),
            receive: Mutex::default(),
            failure: Mutex::default(),
        });
        let queues: Weak<Shared> = Arc::downgrade(&shared);
        send_cq.attach(shared.qpn, queues.clone());
        receive_cq.attach(shared.qpn, queues);
        Ok(Self {
            shared,
            peer,
            send_cq,
            receive_cq,
        })
    }

    /// Returns the queue pair's number.
    pub fn qpn(&self) -> u32 {
        self.shared.qpn
    }

    /// Returns the completion queue of sends.
    pub fn send_cq(&self) -> &AsyncCq {
        &self.send_cq
    }

    /// Returns the completion queue of receives.
    pub fn receive_cq(&self) -> &AsyncCq {
        &self.receive_cq
    }

    /// Returns the regions that byte code of this queue pair names: doorbell record and doorbell.
    pub fn regions(&self) -> [&Region; 2] {
        [&self.shared.record, &self.shared.doorbell]
    }

    /// Returns the failure that put the queue pair into the error state, if it is known.
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failure).clone()
    }

    /// Consumes all completions of both queues, and returns the first failure: the cause, if byte code did not end. Later ones
    /// are usually its consequences. Completions of other queue pairs of these queues are consumed, too.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncCq::poll_cq`].
    pub fn first_failure(&self) -> Result<Option<(Completion, Failure)>> {
        for queue in [&self.send_cq, &self.receive_cq] {
            let completions = queue.poll_cq(usize::MAX)?;
            let mut failures = completions.iter().filter_map(|done| Some((*done, done.failure?)));
            if let Some(failure) = failures.next() {
                return Ok(Some(failure));
            }
        }
        Ok(None)
    }

    /// Records that the queue pair is in the error state. Posts and commits are refused from now on.
    pub fn fail(&self, why: impl Into<String>) {
        lock(&self.shared.failure).get_or_insert(why.into());
    }

    fn usable(&self) -> Result<()> {
        match self.failure() {
            Some(why) => Err(Error::QueuePairError {
                qpn: self.shared.qpn,
                why,
            }),
            None => Ok(()),
        }
    }

    /// Writes a work request to the send queue. The NIC executes it after the byte code of the next [`commit_qp`] has
    /// been executed.
    ///
    /// [`commit_qp`]: AsyncQp::commit_qp
    ///
    /// # Errors
    ///
    /// [`Error::Request`], [`Error::QueueFull`], [`Error::CompletionQueueFull`], [`Error::QueuePairError`]. Nothing was
    /// posted then.
    pub fn post_send(&self, request: &SendRequest) -> Result<()> {
        self.usable()?;
        let shared = &*self.shared;
        self.send_cq.reserve()?;
        let posted = shared.write_send(request);
        if posted.is_err() {
            self.send_cq.release(1);
        }
        posted
    }

    /// Writes a work request to the receive queue. It is valid at once.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncQp::post_send`].
    pub fn post_recv(&self, request: &ReceiveRequest) -> Result<()> {
        self.usable()?;
        self.receive_cq.reserve()?;
        let posted = self.shared.write_receive(request);
        if posted.is_err() {
            self.receive_cq.release(1);
        }
        posted
    }

    /// Returns byte code that submits all posted work requests: it stores the producer index to the doorbell record and
    /// rings the doorbell. If nothing was posted since the last commit, the program is empty.
    ///
    /// The programs of a queue pair must be executed in the order of their commits, each once.
    ///
    /// # Errors
    ///
    /// [`Error::QueuePairError`]; [`Error::Unsupported`] or [`Error::TooLong`] if the peer cannot execute the byte code.
    /// The work requests stay posted then, and [`AsyncQp::rollback_qp`] takes them back.
    pub fn commit_qp(&self) -> Result<Program> {
        self.usable()?;
        let shared = &*self.shared;
        let mut send = lock(&shared.send);
        let mut program = Program::new();
        let uncommitted = send.posted.len() > send.committed;
        let Some(last) = send.posted.back().filter(|_| uncommitted) else {
            return Ok(program);
        };
        // A NIC that works on an earlier doorbell may read the record at any time, so what the peer stored before, such as the
        // payload, becomes visible first.
        program.push(Operation::Fence)?;
        program.push(Operation::StoreDword {
            target: shared.record.target(SEND_WORD as u64),
            // Big-endian in memory.
            value: u32::from(send.next).swap_bytes(),
        })?;
        program.push(Operation::Fence)?;
        program.push(Operation::StoreQword {
            target: shared.doorbell.target(DOORBELL_OFFSET),
            value: last.doorbell,
        })?;
        let why = "fences, the doorbell record, and one store of 8 bytes to the doorbell submit work requests; the NIC ignores two stores of 4 bytes";
        self.peer.check(&program, why)?;
        // The work requests are in memory before a peer can submit them.
        shared.queue.fence();
        send.committed = send.posted.len();
        Ok(program)
    }

    /// Takes back all work requests that were posted after the last commit. Returns their IDs.
    pub fn rollback_qp(&self) -> Vec<u64> {
        let mut send = lock(&self.shared.send);
        let committed = send.committed;
        let removed: Vec<Posted> = send.posted.drain(committed..).collect();
        if let Some(first) = removed.first() {
            send.next = first.index;
        }
        drop(send);
        self.send_cq.release(removed.len() as u32);
        removed.iter().map(|posted| posted.id).collect()
    }

    /// Returns the IDs of the sends and of the receives that have not completed.
    pub fn outstanding(&self) -> (Vec<u64>, Vec<u64>) {
        let sends = lock(&self.shared.send).posted.iter().map(|posted| posted.id).collect();
        let receives = lock(&self.shared.receive).posted.iter().copied().collect();
        (sends, receives)
    }
}

impl Drop for AsyncQp {
    fn drop(&mut self) {
        let shared = &*self.shared;
        // Lock order: the completion queue, then the work queues, as in poll_cq().
        let sends = || lock(&shared.send).posted.len() as u32;
        let receives = || lock(&shared.receive).posted.len() as u32;
        if self.send_cq.is(&self.receive_cq) {
            self.send_cq.detach(shared.qpn, || sends() + receives());
        } else {
            self.send_cq.detach(shared.qpn, sends);
            self.receive_cq.detach(shared.qpn, receives);
        }
    }
}

impl Shared {
    fn write_send(&self, request: &SendRequest) -> Result<()> {
        let mut send = lock(&self.send);
        let wqe = request.encode(self.transport, self.qpn, send.next)?;
        let used = u32::from(send.used());
        if used + u32::from(wqe.blocks()) > self.layout.send_blocks {
            return Err(Error::QueueFull {
                queue: "send queue",
                qpn: self.qpn,
                used,
                size: self.layout.send_blocks,
                unit: "blocks of 64 bytes",
            });
        }
        for (number, block) in wqe.bytes().chunks(BLOCK).enumerate() {
            // Not truncated: a work request has at most 16 blocks. It may wrap around.
            let index = u32::from(send.next.wrapping_add(number as u16)) & (self.layout.send_blocks - 1);
            self.queue
                .write(self.layout.send_offset() + index as usize * BLOCK, block);
        }
        let posted = Posted {
            id: request.id,
            index: send.next,
            blocks: wqe.blocks(),
            doorbell: wqe.doorbell(),
        };
        send.next = send.next.wrapping_add(posted.blocks);
        send.posted.push_back(posted);
        Ok(())
    }

    fn write_receive(&self, request: &ReceiveRequest) -> Result<()> {
        let entry = request.encode()?;
        let mut receive = lock(&self.receive);
        let (used, size) = (receive.posted.len() as u32, self.layout.receive_entries);
        if used >= size {
            return Err(Error::QueueFull {
                queue: "receive queue",
                qpn: self.qpn,
                used,
                size,
                unit: "entries",
            });
        }
        let index = u32::from(receive.next) & (size - 1);
        self.queue.write(index as usize * RECEIVE_STRIDE, &entry);
        receive.next = receive.next.wrapping_add(1);
        receive.posted.push_back(request.id);
        // The entry is in memory before the NIC can read the index.
        self.queue.fence();
        self.record
            .store_dword(RECEIVE_WORD, u32::from(receive.next).swap_bytes());
        self.record.fence();
        Ok(())
    }
}

impl WorkQueues for Shared {
    fn complete(&self, direction: Direction, counter: u16, failure: Option<Failure>) -> Option<Retired> {
        let retired = match direction {
            Direction::Send => {
                let mut send = lock(&self.send);
                let mask = (self.layout.send_blocks - 1) as u16;
                let mut committed = send.posted.iter().take(send.committed);
                let at = committed.position(|posted| (posted.index ^ counter) & mask == 0)?;
                let id = send.posted[at].id;
                send.posted.drain(..=at);
                send.committed -= at + 1;
                Retired {
                    id,
                    count: at as u32 + 1,
                }
            }
            // The NIC completes receives in order.
            Direction::Receive => Retired {
                id: lock(&self.receive).posted.pop_front()?,
                count: 1,
            },
        };
        if let Some(failure) = failure {
            let what = match direction {
                Direction::Send => "send",
                Direction::Receive => "receive",
            };
            let why = format!("{what} {:#x} failed: {failure}", retired.id);
            lock(&self.failure).get_or_insert(why);
        }
        Some(retired)
    }
}
