// SPDX-License-Identifier: MIT OR Apache-2.0

//! One end of a reliable connection, with places for messages.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use p2pmem_verbs::{
    Access, Address, BufferMemory, Completion, Completions, Domain, Failure, HostMemory, Nic, QueuePair, Request,
    Retries, Segment, Span, Work,
};

use crate::control::message::{Message, MessageError, SIZE};
use crate::memory::BlockMemory;

/// Retransmissions: half a second, seven times.
const RETRIES: Retries = Retries {
    timeout: 17,
    retries: 7,
};

/// What a completion is for. The id of a work request has the kind and a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A message was sent.
    MessageSent,
    /// A message was received.
    MessageReceived,
    /// The payload of a block was sent, received, or read.
    Payload,
}

/// The id of a work request.
pub(crate) fn id(kind: Kind, number: u32) -> u64 {
    let kind: u64 = match kind {
        Kind::MessageSent => 0,
        Kind::MessageReceived => 1,
        Kind::Payload => 2,
    };
    (kind << 32) | u64::from(number)
}

/// The kind and the number of a completion.
pub(crate) fn kind(completion: &Completion) -> (Kind, u32) {
    let kind = match completion.id >> 32 {
        0 => Kind::MessageSent,
        1 => Kind::MessageReceived,
        _ => Kind::Payload,
    };
    (kind, completion.id as u32)
}

/// Opens a NIC.
///
/// # Errors
///
/// There is no such NIC, or it cannot be opened.
pub(crate) fn open_nic(name: &str) -> Result<Arc<Nic>> {
    let nic = Nic::open(name).with_context(|| format!("opening the RDMA device {name}"))?;
    nic.with_context(|| {
        let names = p2pmem_verbs::nics().unwrap_or_default();
        format!("there is no RDMA device {name}; the machine has: {}", names.join(", "))
    })
}

/// The numbers of work requests and messages that an endpoint has space for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capacity {
    /// Work requests in the send queue.
    pub sends: u32,
    /// Work requests in the receive queue.
    pub receives: u32,
    /// Messages that are sent at once.
    pub messages_sent: u32,
    /// Messages that are received at once.
    pub messages_received: u32,
}

/// One end of a reliable connection.
pub(crate) struct Endpoint {
    qp: QueuePair,
    own: Address,
    gid_index: u8,
    messages: HostMemory,
    /// The number of the first place for received messages.
    first_received: u32,
    armed: bool,
    /// The first failure of a work request.
    failure: Option<(Kind, Failure)>,
}

impl Endpoint {
    /// Creates an endpoint in a protection domain of its own, so that the other side's keys reach nothing but the memory of
    /// this session.
    pub(crate) fn new(nic: &Arc<Nic>, gid_index: u8, capacity: Capacity) -> Result<Self> {
        let name = nic.name();
        let domain = Domain::new(nic.clone()).with_context(|| format!("creating a protection domain of {name}"))?;
        let entries = capacity.sends + capacity.receives;
        let completions = Completions::new(nic, entries)
            .with_context(|| format!("creating a completion queue of {entries} entries on {name}"))?;
        let qp = QueuePair::new(&domain, &completions, capacity.sends, capacity.receives)
            .with_context(|| format!("creating a queue pair on {name}; use fewer buffers"))?;
        let own = qp.address(gid_index)?;
        let places = capacity.messages_sent + capacity.messages_received;
        let span = Span::host((places as usize * SIZE).next_multiple_of(4096)).context("allocating messages")?;
        let messages = HostMemory::register(&domain, &span, Access::LOCAL_WRITE)
            .with_context(|| format!("registering messages with {name}"))?;
        Ok(Self {
            qp,
            own,
            gid_index,
            messages,
            first_received: capacity.messages_sent,
            armed: false,
            failure: None,
        })
    }

    /// Returns the address for the other side.
    pub(crate) fn address(&self) -> Address {
        self.own
    }

    /// Returns the protection domain.
    pub(crate) fn domain(&self) -> &Arc<Domain> {
        self.qp.domain()
    }

    /// Connects to the other side.
    pub(crate) fn connect(&self, other: &Address) -> Result<()> {
        let connected = self.qp.connect(&self.own, self.gid_index, other, RETRIES);
        connected.with_context(|| format!("connecting {} to the other side", self.domain().nic().name()))
    }

    fn message_segment(&self, place: u32) -> Segment {
        Segment {
            address: self.messages.span().address() + u64::from(place) * SIZE as u64,
            bytes: SIZE as u32,
            lkey: self.messages.keys().0,
        }
    }

    /// Returns the work request that sends a message from the place `number`. The place is free after the completion, or after
    /// that of a later signaled request.
    pub(crate) fn message(&self, number: u32, message: &Message, signaled: bool) -> Request {
        self.messages.span().write(number as usize * SIZE, &message.encode());
        self.messages.span().flush();
        Request {
            id: id(Kind::MessageSent, number),
            local: self.message_segment(number),
            work: Work::Send,
            signaled,
        }
    }

    /// Posts work requests.
    pub(crate) fn post(&self, requests: &[Request]) -> Result<()> {
        self.qp.post(requests).context("posting work requests")
    }

    /// Posts a receive for a message to the place `number`.
    pub(crate) fn post_message_receive(&self, number: u32) -> Result<()> {
        let segment = self.message_segment(self.first_received + number);
        let posted = self.qp.post_receive(id(Kind::MessageReceived, number), Some(segment));
        posted.context("posting a receive")
    }

    /// Posts a receive for the payload of a block.
    pub(crate) fn post_payload_receive(&self, number: u32, segment: Segment) -> Result<()> {
        let posted = self.qp.post_receive(id(Kind::Payload, number), Some(segment));
        posted.context("posting a receive")
    }

    /// Reads the message that arrived in the place `number`.
    pub(crate) fn received(&self, number: u32) -> Result<Message, MessageError> {
        let mut bytes = [0; SIZE];
        let at = (self.first_received + number) as usize * SIZE;
        self.messages.span().read(at, &mut bytes);
        Message::decode(&bytes)
    }

    /// Polls completions. Fails at the first failure, after the successful completions before it were returned: those that follow
    /// it are usually flush errors that it caused.
    pub(crate) fn poll(&mut self, into: &mut Vec<Completion>) -> Result<()> {
        into.clear();
        match self.failure {
            Some((kind, failure)) => return Err(failed(kind, failure)),
            None => self.qp.completions().poll(into).context("polling completions")?,
        };
        if let Some(first) = into.iter().position(|done| done.failure.is_some()) {
            let (kind, _) = kind(&into[first]);
            self.failure = into[first].failure.map(|failure| (kind, failure));
            into.truncate(first);
            if let (true, Some((kind, failure))) = (into.is_empty(), self.failure) {
                return Err(failed(kind, failure));
            }
        }
        // Without this check, the former content of a place would pass for a message.
        for done in into.iter() {
            if kind(done).0 == Kind::MessageReceived && done.bytes as usize != SIZE {
                bail!(
                    "the other side sent a message of {} bytes instead of {SIZE}",
                    done.bytes
                );
            }
        }
        Ok(())
    }

    /// Requests an event for the next completion, unless one is requested. Returns whether completions have to be polled once
    /// more, because they may have arrived before.
    pub(crate) fn arm(&mut self) -> Result<bool> {
        if self.armed {
            return Ok(false);
        }
        self.qp.completions().arm().context("requesting a completion event")?;
        self.armed = true;
        Ok(true)
    }

    /// Consumes an event if there is one.
    pub(crate) fn clear_event(&mut self) -> Result<()> {
        let event = self.qp.completions().wait(Duration::ZERO);
        if event.context("the NIC's events ended; was the NIC removed?")? {
            self.armed = false;
        }
        Ok(())
    }
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.qp.completions().as_fd()
    }
}

/// Buffers of blocks that are registered with a NIC.
pub(crate) struct RegisteredBlocks {
    // Fields are dropped in this order: the registration before the memory.
    keys: Keys,
    blocks: Arc<BlockMemory>,
}

enum Keys {
    Host(HostMemory),
    Device(BufferMemory),
}

impl RegisteredBlocks {
    /// Registers buffers.
    pub(crate) fn new(domain: &Arc<Domain>, blocks: &Arc<BlockMemory>, access: Access) -> Result<Self> {
        let name = domain.nic().name();
        let keys = match (blocks.buffer(), blocks.host_span()) {
            (Some(buffer), _) => Keys::Device(
                BufferMemory::register(domain, buffer, access)
                    .with_context(|| format!("registering device memory with {name}"))?,
            ),
            (None, Some(span)) => Keys::Host(HostMemory::register(domain, span, access).with_context(|| {
                format!("registering host memory with {name}: does the limit of pinned memory (ulimit -l) permit this?")
            })?),
            (None, None) => bail!("the memory has neither a buffer nor a mapping"),
        };
        Ok(Self {
            keys,
            blocks: Arc::clone(blocks),
        })
    }

    /// Returns the address of the first buffer and the remote key.
    pub(crate) fn window(&self) -> (u64, u32) {
        match &self.keys {
            Keys::Host(memory) => (memory.span().address(), memory.keys().1),
            Keys::Device(memory) => (memory.registration().addr(), memory.registration().rkey()),
        }
    }

    /// Returns a buffer for work requests of this side.
    pub(crate) fn segment(&self, buffer: u32) -> Segment {
        let (start, lkey) = match &self.keys {
            Keys::Host(memory) => (memory.span().address(), memory.keys().0),
            Keys::Device(memory) => (memory.registration().addr(), memory.registration().lkey()),
        };
        let bytes = self.blocks.block_size();
        Segment {
            address: start + u64::from(buffer) * bytes as u64,
            // A block has at most MAX_BLOCK bytes.
            bytes: bytes as u32,
            lkey,
        }
    }
}

/// Returns the error for the failure of a work request.
fn failed(kind: Kind, failure: Failure) -> anyhow::Error {
    let what = match kind {
        Kind::MessageSent => "sending a message",
        Kind::MessageReceived => "receiving a message",
        Kind::Payload => "transferring a block",
    };
    anyhow::anyhow!("{what} failed: {failure}")
}

/// The largest block: a SEND has at most 2^31 bytes.
pub(crate) const MAX_BLOCK: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_taken_apart() {
        for wanted in [Kind::MessageSent, Kind::MessageReceived, Kind::Payload] {
            let completion = Completion {
                id: id(wanted, u32::MAX),
                failure: None,
                bytes: 0,
                immediate: None,
            };
            assert_eq!(kind(&completion), (wanted, u32::MAX));
        }
    }
}
