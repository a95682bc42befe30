// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the engine asks of the device that it is a part of.

use std::time::Duration;

use crate::packet::Packet;
use crate::work::{Completion, Queue, ReceiveWork, SendWork, Status};

/// What an access to memory does, and so what its key has to allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rights {
    /// The data of a send or write is gathered. Every local key allows it.
    LocalRead,
    /// What was received or read is scattered.
    LocalWrite,
    /// The other side reads.
    RemoteRead,
    /// The other side writes.
    RemoteWrite,
    /// The other side's atomic.
    RemoteAtomic,
}

/// A range of memory and in whose name it is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Local or remote key.
    pub key: u32,
    /// First address, in the key's address space.
    pub address: u64,
    /// Length in bytes; never 0.
    pub length: u64,
    /// What is done.
    pub rights: Rights,
    /// Protection domain of the queue pair (or shared receive queue), to be compared with the key's.
    pub pd: u32,
    /// The queue pair, for keys that are bound to one.
    pub qpn: u32,
}

/// Why an access did not take place, or only in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// There is no such key, it is free, or its variant byte differs.
    #[error("no such key")]
    Key,
    /// The key belongs to another protection domain or queue pair.
    #[error("the key belongs to another protection domain or queue pair")]
    Domain,
    /// The key does not allow this.
    #[error("the key does not allow the access")]
    Rights,
    /// The range is not inside the key's.
    #[error("the range exceeds the memory region of the key")]
    Bounds,
    /// Nothing answers at the bus address, or it refuses.
    #[error("the bus refused the access")]
    Bus,
    /// A page is not present and was asked for. The engine repeats the access after [`Engine::resume`] with this token;
    /// several accesses may wait for one token.
    ///
    /// [`Engine::resume`]: crate::Engine::resume
    #[error("page fault {0:#x}")]
    Page(u64),
}

/// An atomic operation on 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Becomes `swap` if it is `compare`.
    CompareSwap {
        /// Value expected.
        compare: u64,
        /// Value to put there.
        swap: u64,
    },
    /// Wraps around.
    FetchAdd {
        /// Number to add.
        add: u64,
    },
}

/// What a queue had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetched<W> {
    /// The next work request, which now belongs to the engine.
    Work(W),
    /// Nothing, for now.
    Empty,
    /// A work request that cannot be carried out: it is completed with this status (never `Success`), and the queue pair
    /// goes to the error state.
    Bad {
        /// What the host knows the request by.
        id: u64,
        /// Why.
        status: Status,
    },
    /// The queue itself cannot be read: the queue pair goes to the error state with [`Event::QpFatal`].
    Broken,
}

/// Asynchronous events, as the verbs have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The first packet arrived while the queue pair was in RTR.
    CommunicationEstablished {
        /// The queue pair.
        qpn: u32,
    },
    /// An error that no completion tells of.
    QpFatal {
        /// The queue pair.
        qpn: u32,
    },
    /// The responder refused a request as invalid.
    InvalidRequest {
        /// The queue pair.
        qpn: u32,
    },
    /// The responder refused a request for its access rights.
    AccessViolation {
        /// The queue pair.
        qpn: u32,
    },
    /// The send queue has come to rest in SQD.
    SendQueueDrained {
        /// The queue pair.
        qpn: u32,
    },
    /// A queue pair with a shared receive queue went to the error state and has ended its last receive.
    LastWorkReached {
        /// The queue pair.
        qpn: u32,
    },
    /// Fewer requests are left in the shared receive queue than its limit, which is now off.
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

/// The device around an engine. Methods are called on the thread that called the engine, and must not wait for it.
pub trait Host {
    /// Time since some fixed moment; never goes back.
    fn now(&mut self) -> Duration;

    /// Takes the next work request of a send queue.
    fn next_send(&mut self, qpn: u32) -> Fetched<SendWork>;

    /// Takes the next work request of a receive queue.
    fn next_receive(&mut self, queue: Queue) -> Fetched<ReceiveWork>;

    /// Fills `data` from memory. `data` is `access.length` bytes long.
    ///
    /// # Errors
    ///
    /// Why not. After a page fault the same access is asked for again, from its start.
    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault>;

    /// Writes `data` to memory, in ascending order. `data` is `access.length` bytes long.
    ///
    /// # Errors
    ///
    /// Why not; bytes before the failing place may have been written. After a page fault the same access is asked for
    /// again, from its start.
    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault>;

    /// Whether the key allows this access, without touching memory: for a message's whole range, before its first byte.
    ///
    /// # Errors
    ///
    /// Why not; never [`Fault::Page`].
    fn check(&mut self, access: &Access) -> Result<(), Fault>;

    /// Does an atomic operation on the 8 aligned bytes of `access` and returns what they were, as a number: which byte
    /// order the memory has is the host's to know.
    ///
    /// # Errors
    ///
    /// Why not; the memory is as it was.
    fn atomic(&mut self, access: &Access, operation: Atomic) -> Result<u64, Fault>;

    /// The bytes that the result of this side's atomic is written to memory as.
    fn atomic_result(&mut self, qpn: u32, original: u64) -> [u8; 8] {
        let _ = qpn;
        original.to_le_bytes()
    }

    /// Does the [local](crate::SendOp::Local) work request `id` of a send queue, whose turn it is.
    ///
    /// # Errors
    ///
    /// The status to complete it with; the queue pair goes to the error state.
    fn local(&mut self, qpn: u32, id: u64) -> Result<(), Status>;

    /// Invalidates a key because the other side asked for it with a message.
    ///
    /// # Errors
    ///
    /// Why not; never [`Fault::Page`].
    fn invalidate(&mut self, qpn: u32, pd: u32, key: u32) -> Result<(), Fault>;

    /// Work has ended.
    fn complete(&mut self, completion: Completion);

    /// Something happened.
    fn event(&mut self, event: Event);

    /// Sends packets, by [`Port::send`](crate::Port::send).
    fn transmit(&mut self, packets: Vec<Packet>);

    /// Whether the way to this LID takes more packets now, by [`Port::has_room`](crate::Port::has_room). After a `false`
    /// the engine waits for [`Engine::room`](crate::Engine::room).
    fn has_room(&mut self, dlid: u16) -> bool;

    /// Whether packets to or from this LID are still on their way or being worked on, by
    /// [`Port::in_flight`](crate::Port::in_flight): then a missing acknowledgement is not taken for a loss yet.
    fn in_flight(&mut self, dlid: u16) -> bool;
}
