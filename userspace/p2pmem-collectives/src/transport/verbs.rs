// SPDX-License-Identifier: MIT OR Apache-2.0

//! Reliable connections of an RDMA NIC to all other ranks.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use p2pmem_payload::memory::{Memory, MemoryOptions, Window};
use p2pmem_verbs::{
    Access, Address, Completion, Completions, Domain, HostMemory, Nic, QueuePair, Remote, Request, Retries, Segment,
    Span, Work,
};
use serde::{Deserialize, Serialize};

use crate::group::Group;
use crate::message::ANNOUNCEMENT;

use super::{Event, Transport, Write};

/// The NIC waits about 0.27 s for an acknowledgement, and retransmits up to seven times.
const RETRIES: Retries = Retries {
    timeout: 16,
    retries: 7,
};
/// Most bytes of a write.
const LARGEST: u64 = 1 << 30;
/// Mark of the ids of receives.
const RECEIVE: u64 = 1 << 63;
/// Mark of the ids of writes with an announcement.
const ANNOUNCING: u64 = 1 << 62;

/// What a rank needs to connect to another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Endpoint {
    address: Address,
    memory: Window,
    /// Place for the announcement of the other rank.
    announcement: Window,
}

/// A connection to one rank.
struct Peer {
    queue: QueuePair,
    name: String,
    memory: Window,
    announcement: Window,
    /// Writes in the send queue.
    sends: u32,
    /// Whether a write of an announcement is in the send queue.
    announcing: bool,
}

/// The connections of an RDMA NIC.
pub struct Verbs {
    // Fields are dropped in this order: the queue pairs before the memory that they use.
    /// By rank; `None` for this rank.
    peers: Vec<Option<Peer>>,
    memory: Memory,
    /// Announcements of this rank for each rank, then of each rank for this one.
    announcements: HostMemory,
    completions: Arc<Completions>,
    /// Most writes in a send queue.
    depth: u32,
    polled: Vec<Completion>,
}

impl Verbs {
    /// Allocates `bytes` bytes of memory near a NIC, and connects to all other ranks. All ranks of the group call this. `depth`
    /// is the number of writes in a send queue.
    ///
    /// # Errors
    ///
    /// The memory is not available, a NIC rejects something, or a rank does not take part within the limit.
    pub fn connect(
        group: &Group,
        nic: &Arc<Nic>,
        gid_index: u8,
        memory: MemoryOptions<'_>,
        bytes: u64,
        depth: u32,
        limit: Duration,
    ) -> Result<Self> {
        let (own, ranks) = (group.rank(), group.ranks());
        let name = nic.name().to_owned();
        let limits = nic.limits().with_context(|| format!("querying the limits of {name}"))?;
        let receives = 2 * depth;
        ensure!(
            receives <= limits.queue,
            "{name} supports at most {} requests in a queue: set --window to {} or less",
            limits.queue,
            limits.queue / 2
        );
        let domain = Domain::new(nic.clone()).context("creating a protection domain")?;
        let entries = (depth + receives).saturating_mul(ranks as u32);
        let completions = Completions::new(nic, entries).with_context(|| {
            format!("creating a completion queue of {entries} entries on {name}: use a smaller --window")
        })?;
        let memory = Memory::new(memory, &domain, bytes)?;
        let places = Span::host(2 * ranks * ANNOUNCEMENT).context("host memory for announcements")?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let announcements =
            HostMemory::register(&domain, &places, access).context("registering host memory for announcements")?;

        let mut queues = Vec::new();
        let mut endpoints = Vec::new();
        for rank in 0..ranks {
            if rank == own {
                queues.push(None);
                endpoints.push(None);
                continue;
            }
            let queue = QueuePair::new(&domain, &completions, depth, receives).with_context(|| {
                format!("creating a queue pair on {name} for {depth} writes: use a smaller --window")
            })?;
            let address = queue
                .address(gid_index)
                .with_context(|| format!("reading the address of {name} at GID index {gid_index}: see --gid-index"))?;
            endpoints.push(Some(Endpoint {
                address,
                memory: memory.window(0, bytes),
                announcement: Window {
                    address: places.address() + ((ranks + rank) * ANNOUNCEMENT) as u64,
                    rkey: announcements.keys().1,
                    bytes: ANNOUNCEMENT as u64,
                },
            }));
            queues.push(Some((queue, address)));
        }

        let values = group.exchange(&serde_json::to_vec(&endpoints)?, limit)?;
        let mut peers = Vec::new();
        for (rank, (queue, value)) in queues.into_iter().zip(values).enumerate() {
            let Some((queue, address)) = queue else {
                peers.push(None);
                continue;
            };
            let name = group.name(rank).to_owned();
            let theirs: Vec<Option<Endpoint>> =
                serde_json::from_slice(&value).with_context(|| format!("the addresses of {name} are not valid"))?;
            let endpoint = theirs.into_iter().nth(own).flatten();
            let endpoint = endpoint.with_context(|| format!("{name} has no address for this rank"))?;
            ensure!(
                endpoint.memory.bytes == bytes && endpoint.announcement.bytes == ANNOUNCEMENT as u64,
                "{name} has {} bytes of memory, and this rank {bytes}: start all ranks with the same options",
                endpoint.memory.bytes
            );
            queue
                .connect(&address, gid_index, &endpoint.address, RETRIES)
                .with_context(|| format!("connecting to {name}"))?;
            for _ in 0..receives {
                queue.post_receive(RECEIVE | rank as u64, None)?;
            }
            peers.push(Some(Peer {
                queue,
                name,
                memory: endpoint.memory,
                announcement: endpoint.announcement,
                sends: 0,
                announcing: false,
            }));
        }
        // A rank writes only when all others have posted their receives.
        group.barrier(limit)?;
        Ok(Self {
            peers,
            memory,
            announcements,
            completions,
            depth,
            polled: Vec::new(),
        })
    }

    /// Returns the memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    fn post(&mut self, to: usize, mark: u64, local: Segment, at: Remote, immediate: u32) -> Result<bool> {
        let peer = self.peers.get_mut(to).and_then(Option::as_mut);
        let peer = peer.with_context(|| format!("rank {to} has no connection"))?;
        if peer.sends == self.depth {
            return Ok(false);
        }
        let request = Request {
            id: to as u64 | mark,
            local,
            work: Work::Write(at, Some(immediate)),
            signaled: true,
        };
        peer.queue
            .post(&[request])
            .with_context(|| format!("posting a write to {}", peer.name))?;
        peer.sends += 1;
        peer.announcing |= mark == ANNOUNCING;
        Ok(true)
    }

    fn take(&mut self, completion: &Completion) -> Result<Option<Event>> {
        let rank = (completion.id & !(RECEIVE | ANNOUNCING)) as usize;
        let peer = self.peers.get_mut(rank).and_then(Option::as_mut);
        let peer = peer.context("a completion of an unknown queue pair")?;
        if let Some(failure) = completion.failure {
            // Mappings end before registrations do. The completion may say only that the queue pair was flushed.
            let read = self.memory.span().try_read(0, &mut [0]);
            read.context("this rank's memory was revoked: was its provider unpublished, or its device removed?")?;
            let what = if completion.id & RECEIVE == 0 { "to" } else { "from" };
            bail!("the connection {what} {} has failed: {failure}", peer.name);
        }
        if completion.id & RECEIVE == 0 {
            peer.sends -= 1;
            if completion.id & ANNOUNCING != 0 {
                peer.announcing = false;
            }
            return Ok(Some(Event::Sent { to: rank }));
        }
        peer.queue
            .post_receive(completion.id, None)
            .with_context(|| format!("posting a receive for {}", peer.name))?;
        let immediate = completion
            .immediate
            .with_context(|| format!("{} sent a message without immediate data", peer.name))?;
        Ok(Some(Event::Arrived { from: rank, immediate }))
    }
}

impl Transport for Verbs {
    fn write(&mut self, write: &Write) -> Result<bool> {
        let window = |peer: &Peer| peer.memory;
        let peer = self.peers.get(write.to).and_then(Option::as_ref).map(window);
        let window = peer.with_context(|| format!("rank {} has no connection", write.to))?;
        let fits = |at: u64| at.checked_add(write.bytes).is_some_and(|end| end <= window.bytes);
        ensure!(
            write.bytes <= LARGEST && fits(write.from) && fits(write.into),
            "a write of {} bytes from {} to {} exceeds the memory of {} bytes",
            write.bytes,
            write.from,
            write.into,
            window.bytes
        );
        let local = self.memory.segment(write.from, write.bytes);
        let remote = Remote {
            address: window.address + write.into,
            rkey: window.rkey,
        };
        self.post(write.to, 0, local, remote, write.immediate)
    }

    fn notify(&mut self, to: usize, announcement: Option<&[u8; ANNOUNCEMENT]>, immediate: u32) -> Result<bool> {
        let peer = self.peers.get(to).and_then(Option::as_ref);
        let peer = peer.with_context(|| format!("rank {to} has no connection"))?;
        let at = to * ANNOUNCEMENT;
        let (mark, bytes) = match announcement {
            Some(_) if peer.announcing => return Ok(false),
            Some(announcement) => {
                self.announcements.span().write(at, announcement);
                self.announcements.span().flush();
                (ANNOUNCING, ANNOUNCEMENT as u32)
            }
            None => (0, 0),
        };
        let local = Segment {
            address: self.announcements.span().address() + at as u64,
            bytes,
            lkey: self.announcements.keys().0,
        };
        let remote = Remote {
            address: peer.announcement.address,
            rkey: peer.announcement.rkey,
        };
        self.post(to, mark, local, remote, immediate)
    }

    fn announcement(&self, from: usize) -> [u8; ANNOUNCEMENT] {
        let mut bytes = [0; ANNOUNCEMENT];
        let at = (self.peers.len() + from) * ANNOUNCEMENT;
        self.announcements.span().read(at, &mut bytes);
        bytes
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<()> {
        let mut polled = std::mem::take(&mut self.polled);
        let result = self.completions.poll(&mut polled).context("polling completions");
        let mut taken = result.map(drop);
        for completion in polled.drain(..) {
            match self.take(&completion) {
                Ok(event) => events.extend(event),
                Err(error) => taken = taken.and(Err(error)),
            }
        }
        self.polled = polled;
        taken
    }

    fn wait(&mut self, limit: Duration) -> Result<()> {
        self.completions.arm().context("arming the completion queue")?;
        // An event that came before the queue was armed raises no interrupt.
        let mut polled = std::mem::take(&mut self.polled);
        let result = self.completions.poll(&mut polled).context("polling completions");
        self.polled = polled;
        if result? == 0 {
            self.completions.wait(limit).context("waiting for completions")?;
        }
        Ok(())
    }
}
