// SPDX-License-Identifier: MIT OR Apache-2.0

//! The interface between the engine and the device that owns the engine.

use std::time::Duration;

use crate::packet::Packet;
use crate::work::{Completion, Queue, ReceiveWork, SendWork, Status};

/// The kind of an access to memory. The key must allow the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rights {
    /// Gather the data of a SEND or WRITE. Every local key allows this.
    LocalRead,
    /// Scatter received data or the response of a READ or atomic operation.
    LocalWrite,
    /// READ by the remote node.
    RemoteRead,
    /// WRITE by the remote node.
    RemoteWrite,
    /// Atomic operation by the remote node.
    RemoteAtomic,
}

/// A range of memory, with the protection domain and the queue pair that access the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Local or remote key.
    pub key: u32,
    /// First address, in the key's address space.
    pub address: u64,
    /// Length in bytes, never 0.
    pub length: u64,
    /// Kind of the access.
    pub rights: Rights,
    /// Protection domain of the queue pair or shared receive queue, to be compared with the key's.
    pub pd: u32,
    /// The queue pair, for keys that are bound to a queue pair.
    pub qpn: u32,
}

/// The reason for which an access failed or is incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The key does not exist, is free, or has another variant byte.
    #[error("no such key")]
    Key,
    /// The key belongs to another protection domain or queue pair.
    #[error("the key belongs to another protection domain or queue pair")]
    Domain,
    /// The key does not allow this kind of access.
    #[error("the key does not allow the access")]
    Rights,
    /// The range is not inside the key's range.
    #[error("the range exceeds the memory region of the key")]
    Bounds,
    /// No device claims the bus address, or the device rejects the access.
    #[error("the bus refused the access")]
    Bus,
    /// A page is not present, and the host requested the page. The engine repeats the access after [`Engine::resume`]
    /// with this token. Several accesses may wait for one token.
    ///
    /// [`Engine::resume`]: crate::Engine::resume
    #[error("page fault {0:#x}")]
    Page(u64),
}

/// An atomic operation on 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Replaces the value with `swap` if the value equals `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds `add` to the value, modulo 2^64.
    FetchAdd {
        /// Number to add.
        add: u64,
    },
}

/// Result of fetching a work request from a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetched<W> {
    /// The next work request. The engine owns the request from now on.
    Work(W),
    /// The queue is empty now.
    Empty,
    /// An invalid work request. The engine completes the request with this status (never `Success`), and the queue pair
    /// enters the error state.
    Bad {
        /// The host's identifier of the request.
        id: u64,
        /// Status of the completion.
        status: Status,
    },
    /// The queue cannot be read. The queue pair enters the error state with [`Event::QpFatal`].
    Broken,
}

/// Asynchronous events, as in the verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The first packet arrived while the queue pair was in RTR.
    CommunicationEstablished {
        /// The queue pair.
        qpn: u32,
    },
    /// An error that no completion reports.
    QpFatal {
        /// The queue pair.
        qpn: u32,
    },
    /// The responder rejected a request as invalid.
    InvalidRequest {
        /// The queue pair.
        qpn: u32,
    },
    /// The responder rejected a request because its key does not allow the access.
    AccessViolation {
        /// The queue pair.
        qpn: u32,
    },
    /// The send queue is drained in SQD.
    SendQueueDrained {
        /// The queue pair.
        qpn: u32,
    },
    /// A queue pair with a shared receive queue entered the error state and consumes no more receives.
    LastWorkReached {
        /// The queue pair.
        qpn: u32,
    },
    /// The shared receive queue has fewer requests than its limit. The limit is now disarmed.
    SrqLimit {
        /// The shared receive queue.
        srqn: u32,
    },
    /// A shared receive queue cannot be read.
    SrqError {
        /// The shared receive queue.
        srqn: u32,
    },
}

/// The device that owns an engine. The engine calls the methods on the thread of its own caller. Methods must not wait
/// for that thread.
pub trait Host {
    /// Returns the time since a fixed moment. The time never goes back.
    fn now(&mut self) -> Duration;

    /// Fetches the next work request of a send queue.
    fn next_send(&mut self, qpn: u32) -> Fetched<SendWork>;

    /// Fetches the next work request of a receive queue.
    fn next_receive(&mut self, queue: Queue) -> Fetched<ReceiveWork>;

    /// Fills `data`, which is `access.length` bytes long, from memory.
    ///
    /// # Errors
    ///
    /// The reason of the failure. After a page fault the engine repeats the whole access.
    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault>;

    /// Writes `data`, which is `access.length` bytes long, to memory in ascending order.
    ///
    /// # Errors
    ///
    /// The reason of the failure. Bytes before the failing address may have been written. After a page fault the engine
    /// repeats the whole access.
    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault>;

    /// Checks whether the key allows the access, without touching memory. The engine checks the whole range of a
    /// message before its first byte.
    ///
    /// # Errors
    ///
    /// The reason of the failure, never [`Fault::Page`].
    fn check(&mut self, access: &Access) -> Result<(), Fault>;

    /// Does an atomic operation on the 8 aligned bytes of `access`. Returns the original value as a number: the host
    /// knows the byte order of the memory.
    ///
    /// # Errors
    ///
    /// The reason of the failure. The memory is unchanged.
    fn atomic(&mut self, access: &Access, operation: Atomic) -> Result<u64, Fault>;

    /// Converts the original value of an atomic operation of this node to the bytes that are written to memory.
    fn atomic_result(&mut self, qpn: u32, original: u64) -> [u8; 8] {
        let _ = qpn;
        original.to_le_bytes()
    }

    /// Executes the [local](crate::SendOp::Local) work request `id`, which is the next of its send queue.
    ///
    /// # Errors
    ///
    /// The status of the completion. The queue pair enters the error state.
    fn local(&mut self, qpn: u32, id: u64) -> Result<(), Status>;

    /// Invalidates a key on behalf of a SEND with invalidate of the remote node.
    ///
    /// # Errors
    ///
    /// The reason of the failure, never [`Fault::Page`].
    fn invalidate(&mut self, qpn: u32, pd: u32, key: u32) -> Result<(), Fault>;

    /// Adds a completion to its completion queue.
    fn complete(&mut self, completion: Completion);

    /// Reports an asynchronous event.
    fn event(&mut self, event: Event);

    /// Sends packets with [`Port::send`](crate::Port::send).
    fn transmit(&mut self, packets: Vec<Packet>);

    /// Returns whether the path to this LID accepts packets, from [`Port::has_space`](crate::Port::has_space). After
    /// `false`, the engine waits for [`Engine::path_ready`](crate::Engine::path_ready).
    fn has_space(&mut self, dlid: u16) -> bool;

    /// Returns whether packets to or from this LID are in flight or being processed, from
    /// [`Port::in_flight`](crate::Port::in_flight). If so, a missing acknowledgement does not count as a loss yet.
    fn in_flight(&mut self, dlid: u16) -> bool;
}
