// SPDX-License-Identifier: MIT OR Apache-2.0

//! A side that the processor drives, by the calls of libibverbs that every program uses. Payload is in the accelerator,
//! queues are in host memory, and the accelerator computes by a ring of work.

use std::hint::spin_loop;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_async::endpoint::Address;
use p2pmem_async::pingpong::options::Deadline;
use p2pmem_async::wqe::Transport;
use p2pmem_verbs::{
    self as verbs, Access, AddressHandle, BufferMemory, Completion, Completions, Datagrams, Domain, Link, QueuePair,
    ROUTE_BYTES, Retries, Segment, Work,
};

use super::{Mode, Parameters, Role, Side};
use crate::accel::AccelExecutor;
use crate::hardware::{AccelMemory, Hardware};

/// Receives that are posted at the same time. The other node is at most one message ahead.
const RECEIVES: u32 = 8;
/// Sends whose completions were not consumed.
const SENDS: u32 = 8;
/// IDs of work requests.
const SEND: u64 = 1;
const RECEIVE: u64 = 2;
/// The queue key of datagrams.
const KEY: u32 = 0x1111_1111;
/// Entries of the ring by which the accelerator computes.
const ENTRIES: u32 = 64;
/// Offset of the payload. The route of a datagram is before it.
const PAYLOAD: u32 = 64;
/// Polls between two reads of the clock.
const POLLS: u32 = 256;
/// Longest sleep, after which the deadline is checked.
const SLEEP: Duration = Duration::from_millis(500);

enum Queue {
    Connected(QueuePair),
    Datagrams {
        queue: Datagrams,
        /// The route to the other side, and its number.
        other: Option<(AddressHandle, u32)>,
    },
}

/// A side that the processor drives.
pub struct CpuSide {
    // Fields are dropped in this order: the accelerator stops before its memory is freed, and the registration ends before the
    // memory.
    ring: AccelExecutor,
    queue: Queue,
    completions: Arc<Completions>,
    registered: BufferMemory,
    memory: AccelMemory,
    ones: AccelMemory,
    own: verbs::Address,
    role: Role,
    events: bool,
    size: u32,
    /// Completions of receives that no iteration has used yet.
    received: u32,
    sending: u32,
    consumed: Vec<Completion>,
}

impl CpuSide {
    /// Creates a side.
    ///
    /// # Errors
    ///
    /// A device refuses an object.
    pub fn new(hardware: &Hardware, parameters: &Parameters, role: Role) -> Result<Self> {
        let name = &hardware.name;
        let nic = verbs::Nic::open(name)?.with_context(|| format!("no NIC {name}"))?;
        let port = nic.port().context("querying the port")?;
        let domain = Domain::new(nic.clone())?;
        let completions = Completions::new(&nic, 2 * (SENDS + RECEIVES))?;
        let queue = match parameters.transport {
            Transport::Rc => Queue::Connected(QueuePair::new(&domain, &completions, SENDS, RECEIVES)?),
            Transport::Ud => Queue::Datagrams {
                queue: Datagrams::new(&domain, &completions, SENDS, RECEIVES, KEY)?,
                other: None,
            },
        };
        let qpn = match &queue {
            Queue::Connected(queue) => queue.number(),
            Queue::Datagrams { queue, .. } => queue.number(),
        };
        let memory = hardware.memory(u64::from(PAYLOAD + parameters.size))?;
        let ring = AccelExecutor::new(hardware, 0, ENTRIES, Duration::from_secs(1))?;
        Ok(Self {
            queue,
            completions,
            registered: BufferMemory::register(&domain, &memory.buffer, Access::LOCAL_WRITE)?,
            ones: hardware.ones(parameters.size)?,
            memory,
            ring,
            own: verbs::Address {
                link: port.link,
                lid: port.lid,
                gid: nic.gid(0)?,
                qpn,
                psn: 0,
                mtu: port.mtu,
                reads: 1,
            },
            role,
            events: parameters.mode == Mode::CpuEvents,
            size: parameters.size,
            received: 0,
            sending: 0,
            consumed: Vec::new(),
        })
    }

    fn segment(&self, before: u32) -> Segment {
        let registration = self.registered.registration();
        Segment {
            address: registration.addr() + u64::from(PAYLOAD - before),
            bytes: self.size + before,
            lkey: registration.lkey(),
        }
    }

    fn post_receive(&self) -> Result<()> {
        match &self.queue {
            Queue::Connected(queue) => queue.post_receive(RECEIVE, Some(self.segment(0)))?,
            Queue::Datagrams { queue, .. } => queue.post_receive(RECEIVE, self.segment(ROUTE_BYTES))?,
        }
        Ok(())
    }

    fn post_send(&mut self) -> Result<()> {
        match &self.queue {
            Queue::Connected(queue) => queue.post(&[verbs::Request {
                id: SEND,
                local: self.segment(0),
                work: Work::Send,
                signaled: true,
            }])?,
            Queue::Datagrams { queue, other } => {
                let (route, number) = other.as_ref().context("not connected")?;
                queue.post(SEND, self.segment(0), route, *number, KEY)?;
            }
        }
        self.sending += 1;
        Ok(())
    }

    /// Consumes completions. Returns how many there were.
    fn consume(&mut self) -> Result<usize> {
        self.consumed.clear();
        let count = self.completions.poll(&mut self.consumed)?;
        for completion in &self.consumed {
            if let Some(failure) = completion.failure {
                anyhow::bail!("work request {} failed: {failure}", completion.id);
            }
            match completion.id {
                SEND => self.sending -= 1,
                _ => {
                    let header = match self.queue {
                        Queue::Connected(_) => 0,
                        Queue::Datagrams { .. } => ROUTE_BYTES,
                    };
                    ensure!(completion.bytes == self.size + header, "{completion:?}");
                    self.received += 1;
                }
            }
        }
        Ok(count)
    }

    /// Consumes completions until `done`.
    fn wait(&mut self, done: impl Fn(&Self) -> bool, deadline: Deadline) -> Result<()> {
        loop {
            for _ in 0..if self.events { 1 } else { POLLS } {
                self.consume()?;
                if done(self) {
                    return Ok(());
                }
                spin_loop();
            }
            let left = deadline.left().context("waiting for a completion")?;
            if self.events {
                self.completions.arm()?;
                // A completion before the request causes no event.
                if self.consume()? == 0 {
                    self.completions.wait(left.min(SLEEP))?;
                }
                if done(self) {
                    return Ok(());
                }
            }
        }
    }

    /// Waits for a message, and computes.
    fn receive(&mut self, deadline: Deadline) -> Result<()> {
        self.wait(|side| side.received > 0, deadline)?;
        self.received -= 1;
        self.post_receive()?;
        let to = self.memory.offset + u64::from(PAYLOAD);
        self.ring.add(to, self.size.into(), self.ones.offset)?;
        self.ring.start()?;
        if self.events {
            return self.ring.finish(deadline.left()?);
        }
        loop {
            for _ in 0..POLLS {
                if self.ring.is_done()? {
                    return Ok(());
                }
                spin_loop();
            }
            deadline.left().context("waiting for the accelerator")?;
        }
    }

    fn send(&mut self, deadline: Deadline) -> Result<()> {
        if self.sending == SENDS {
            self.wait(|side| side.sending < SENDS, deadline)?;
        }
        self.post_send()
    }
}

impl Side for CpuSide {
    fn address(&self) -> Address {
        Address {
            qpn: self.own.qpn,
            lid: self.own.lid,
            gid: self.own.gid,
            qkey: KEY,
            // Not truncated: 1 to 5.
            mtu: (self.own.mtu / 128).ilog2() as u8,
            psn: self.own.psn,
        }
    }

    fn connect(&mut self, other: &Address) -> Result<()> {
        let own = &self.own;
        ensure!(
            own.link == Link::Infiniband || matches!(self.queue, Queue::Connected(_)),
            "datagrams need InfiniBand"
        );
        match &mut self.queue {
            Queue::Connected(queue) => {
                let there = verbs::Address {
                    lid: other.lid,
                    gid: other.gid,
                    qpn: other.qpn,
                    psn: other.psn,
                    mtu: 128 << other.mtu,
                    ..*own
                };
                let retries = Retries {
                    timeout: 17,
                    retries: 7,
                };
                queue.connect(own, 0, &there, retries)?;
            }
            Queue::Datagrams { queue, other: route } => {
                *route = Some((AddressHandle::new(queue.domain(), other.lid)?, other.qpn));
            }
        }
        for _ in 0..RECEIVES {
            self.post_receive()?;
        }
        Ok(())
    }

    fn iterate(&mut self, iterations: u32, _batch: u32, deadline: Deadline) -> Result<()> {
        for _ in 0..iterations {
            if self.role == Role::First {
                self.send(deadline)?;
                self.receive(deadline)?;
            } else {
                self.receive(deadline)?;
                self.send(deadline)?;
            }
        }
        self.wait(|side| side.sending == 0, deadline)
    }

    fn clock(&mut self, deadline: Deadline) -> Result<u64> {
        self.ring.clock(deadline.left()?)
    }

    fn payload(&self) -> Result<Vec<f32>> {
        let mut words = vec![0_f32; self.size as usize / 4];
        self.memory.mapping.copy_to_slice(PAYLOAD as usize, &mut words)?;
        Ok(words)
    }
}
