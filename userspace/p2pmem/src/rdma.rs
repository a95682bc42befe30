// SPDX-License-Identifier: MIT OR Apache-2.0

//! NICs by name, and RDMA WRITE and READ between registered buffers (feature `verbs`).
//!
//! [`Nic`] opens a NIC and knows its PCI function, so that buffers can be allocated near it. Protection domains and all
//! other objects of the NIC are those of the crate [`sideway`]. [`Queue`] is for programs that need one reliable
//! connection and one transfer at a time. Other programs use sideway's queue pairs with the keys and addresses of a
//! [`Registration`].
//!
//! ```no_run
//! use p2pmem::rdma::Nic;
//! use p2pmem::{Access, Device, Request};
//!
//! let nic = Nic::open("mlx5_0")?;
//! let device = Device::open()?;
//! let request = Request::new(1 << 20).near([nic.client().clone()]);
//! let (source, target) = (device.alloc(&request)?, device.alloc(&request)?);
//!
//! let pd = nic.alloc_pd()?;
//! let sent = source.register(&pd, Access::LOCAL_READ)?;
//! let received = target.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//!
//! // Both ends are on one NIC. Two nodes exchange endpoint() and remote() by a socket.
//! let (mut near, mut far) = (nic.queue(&pd)?, nic.queue(&pd)?);
//! near.connect(&far.endpoint())?;
//! far.connect(&near.endpoint())?;
//! near.write(&sent, 0..sent.len(), &received.remote(), 0)?;
//! # Ok::<(), p2pmem::Error>(())
//! ```

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sideway::ibverbs::address::{AddressHandleAttribute, Gid, GidType};
use sideway::ibverbs::completion::{BasicCompletionQueue, PollCompletionQueueError, WorkCompletionStatus};
use sideway::ibverbs::device::{DeviceInfo, DeviceList};
use sideway::ibverbs::device_context::{DeviceContext, LinkLayer, Mtu, PortState};
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{BasicQueuePair, QueuePair, QueuePairAttribute, QueuePairState};
use sideway::ibverbs::AccessFlags;

use crate::error::{Error, Result};
use crate::pci::Client;
use crate::register::{Registration, RemoteMemory};
use crate::sys::post::{post, Verb};

/// The time limit of a transfer. A transfer without an answer ends long before, by the queue pair's own timeout.
const TRANSFER_LIMIT: Duration = Duration::from_secs(60);
/// Local acknowledgement timeout: 4.096 us << 17, half a second.
const TIMEOUT: u8 = 17;
/// Number of retries: the maximum, which means without a limit while the remote side is not ready.
const RETRIES: u8 = 7;
/// Largest message of InfiniBand in bytes.
const MAX_MESSAGE: usize = 1 << 31;

/// Converts the error of a step before a transfer.
fn failed<E: std::error::Error>(what: impl fmt::Display) -> impl FnOnce(E) -> Error {
    let what = what.to_string();
    move |error| {
        // sideway has the errno in the source of its error.
        let mut why = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            why += &format!(": {error}");
            source = error.source();
        }
        Error::Rdma { what, why }
    }
}

/// An open NIC.
pub struct Nic {
    client: Client,
    context: Arc<DeviceContext>,
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

impl Nic {
    /// Opens the RDMA device `name`, such as `mlx5_0`.
    ///
    /// # Errors
    ///
    /// [`Error::Client`] if there is no such device, or the device has no PCI function (a software NIC);
    /// [`Error::Rdma`] if the device cannot be opened.
    pub fn open(name: &str) -> Result<Self> {
        let list = DeviceList::new().map_err(failed("listing RDMA devices"))?;
        let device = list.iter().find(|device| device.name() == name).ok_or_else(|| {
            let names: Vec<_> = list.iter().map(|device| device.name()).collect();
            Error::Client {
                name: name.to_owned(),
                why: match names.as_slice() {
                    [] => "there is no RDMA device".into(),
                    names => format!("the RDMA devices are {}", names.join(", ")),
                },
            }
        })?;
        let client = Client::resolve(name)?;
        let context = device.open().map_err(failed(format!("opening {name}")))?;
        Ok(Self { client, context })
    }

    /// Returns the NIC's PCI function, for [`Request::near`](crate::Request::near).
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns sideway's device context, for all other verbs.
    pub fn context(&self) -> &Arc<DeviceContext> {
        &self.context
    }

    /// Creates a protection domain.
    ///
    /// # Errors
    ///
    /// [`Error::Rdma`] if libibverbs cannot create the domain.
    pub fn alloc_pd(&self) -> Result<Arc<ProtectionDomain>> {
        self.context
            .alloc_pd()
            .map_err(failed(format!("creating a protection domain of {}", self.client)))
    }

    /// Creates one end of a reliable connection, on the NIC's first active port.
    ///
    /// # Errors
    ///
    /// [`Error::Rdma`] if no port is active, or libibverbs cannot create completion queue or queue pair.
    pub fn queue(&self, pd: &Arc<ProtectionDomain>) -> Result<Queue> {
        Queue::new(self, pd)
    }

    fn active_port(&self) -> Result<Port> {
        let nic = &self.client;
        let device = self.context.query_device().map_err(failed(format!("querying {nic}")))?;
        let mut seen = Vec::new();
        for number in 1..=device.phys_port_cnt() {
            let attr = self
                .context
                .query_port(number)
                .map_err(failed(format!("querying port {number} of {nic}")))?;
            let state = attr.port_state();
            if !matches!(state, PortState::Active) {
                seen.push(format!("port {number} is {state:?}"));
                continue;
            }
            let (gid_index, gid) = self.gid(number)?;
            return Ok(Port {
                number,
                ethernet: matches!(attr.link_layer(), LinkLayer::Ethernet),
                lid: attr.lid(),
                mtu: attr.active_mtu(),
                gid_index,
                gid,
            });
        }
        Err(Error::Rdma {
            what: format!("connecting through {nic}"),
            why: format!("no port is active: {}", seen.join(", ")),
        })
    }

    /// Returns the port's address (index and GID) for routed packets. On Ethernet, prefers RoCE version 2, and a
    /// routable address to a link-local one.
    fn gid(&self, port: u8) -> Result<(u8, Gid)> {
        let what = || format!("reading the addresses of {}", self.client);
        let table = self.context.query_gid_table().map_err(failed(what()))?;
        let best = table
            .iter()
            .filter(|entry| entry.port_num() == u32::from(port))
            .max_by_key(|entry| {
                let routed = matches!(entry.gid_type(), GidType::RoceV2);
                (
                    routed,
                    routed && !entry.gid().is_unicast_link_local(),
                    std::cmp::Reverse(entry.gid_index()),
                )
            });
        let best = best.ok_or_else(|| Error::Rdma {
            what: what(),
            why: format!("port {port} has none"),
        })?;
        Ok((u8::try_from(best.gid_index()).unwrap_or(0), best.gid()))
    }
}

/// An active port.
#[derive(Debug, Clone, Copy)]
struct Port {
    number: u8,
    ethernet: bool,
    lid: u16,
    mtu: Mtu,
    gid_index: u8,
    gid: Gid,
}

/// The address of one end of a connection, which the other end needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Endpoint {
    /// Number of the queue pair.
    pub qp_number: u32,
    /// Address (LID) in the InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// Address (GID) for routed packets.
    pub gid: [u8; 16],
}

/// One end of a reliable connection, for one transfer at a time.
///
/// A failed transfer breaks the connection, as InfiniBand specifies. Both ends must be created again.
pub struct Queue {
    nic: String,
    qp: BasicQueuePair,
    cq: Arc<BasicCompletionQueue>,
    port: Port,
    /// Number of the last work request.
    last: u64,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("nic", &self.nic)
            .field("qp_number", &self.qp.qp_number())
            .finish_non_exhaustive()
    }
}

impl Queue {
    fn new(nic: &Nic, pd: &Arc<ProtectionDomain>) -> Result<Self> {
        let name = nic.client.name();
        let port = nic.active_port()?;
        let cq = nic.context.create_cq_builder().setup_cqe(16).build();
        let cq = cq.map_err(failed(format!("creating a completion queue of {name}")))?;
        let mut builder = pd.create_qp_builder();
        builder.setup_max_send_wr(4).setup_max_recv_wr(1);
        builder.setup_send_cq(cq.clone()).setup_recv_cq(cq.clone());
        let mut qp = builder
            .build()
            .map_err(failed(format!("creating a queue pair of {name}")))?;
        let mut attr = QueuePairAttribute::new();
        attr.setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(port.number)
            .setup_access_flags(AccessFlags::LocalWrite | AccessFlags::RemoteWrite | AccessFlags::RemoteRead);
        qp.modify(&attr)
            .map_err(failed(format!("initializing a queue pair of {name}")))?;
        Ok(Self {
            nic: name.to_owned(),
            qp,
            cq,
            port,
            last: 0,
        })
    }

    /// Returns the data of this end that the other end needs to connect.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            qp_number: self.qp.qp_number(),
            lid: self.port.lid,
            gid: self.port.gid.raw,
        }
    }

    /// Connects this end to the other end, which must connect too.
    ///
    /// # Errors
    ///
    /// [`Error::Rdma`] if the queue pair cannot change its state, for example if it is connected already.
    pub fn connect(&mut self, peer: &Endpoint) -> Result<()> {
        let what = format!("connecting {} to queue pair {:#x}", self.nic, peer.qp_number);
        let mut address = AddressHandleAttribute::new();
        address.setup_dest_lid(peer.lid).setup_port(self.port.number);
        if self.port.ethernet {
            address.setup_grh(&Gid { raw: peer.gid }, 0, self.port.gid_index, 64, 0);
        }
        let mut attr = QueuePairAttribute::new();
        attr.setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(self.port.mtu)
            .setup_dest_qp_num(peer.qp_number)
            .setup_rq_psn(0)
            .setup_max_dest_read_atomic(1)
            .setup_min_rnr_timer(12)
            .setup_address_vector(&address);
        self.qp.modify(&attr).map_err(failed(&what))?;
        let mut attr = QueuePairAttribute::new();
        attr.setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(0)
            .setup_timeout(TIMEOUT)
            .setup_retry_cnt(RETRIES)
            .setup_rnr_retry(RETRIES)
            .setup_max_read_atomic(1);
        self.qp.modify(&attr).map_err(failed(&what))
    }

    /// RDMA WRITE: writes `range` of `from` to the remote memory from byte `offset` on. Returns after the data has
    /// arrived.
    ///
    /// # Errors
    ///
    /// [`Error::Transfer`] with the status of the work request's completion; [`Error::Rdma`] if the request cannot be
    /// posted or does not complete; [`Error::OutOfBounds`] for a range that is empty or not inside the registration;
    /// [`Error::Request`] for more than 2 GiB. The remote NIC checks the remote bounds.
    pub fn write(&mut self, from: &Registration, range: Range<usize>, to: &RemoteMemory, offset: u64) -> Result<()> {
        self.transfer(Verb::Write, from, range, to, offset)
    }

    /// RDMA READ: reads the remote memory from byte `offset` on into `range` of `into`.
    ///
    /// # Errors
    ///
    /// Those of [`Queue::write`].
    pub fn read(&mut self, into: &Registration, range: Range<usize>, from: &RemoteMemory, offset: u64) -> Result<()> {
        self.transfer(Verb::Read, into, range, from, offset)
    }

    fn transfer(
        &mut self,
        verb: Verb,
        local: &Registration,
        range: Range<usize>,
        remote: &RemoteMemory,
        offset: u64,
    ) -> Result<()> {
        let len = range.end.saturating_sub(range.start);
        if range.end > local.len() || len == 0 {
            return Err(Error::OutOfBounds {
                offset: range.start,
                len,
                size: local.len(),
            });
        }
        let bytes = u32::try_from(len)
            .ok()
            .filter(|_| len <= MAX_MESSAGE)
            .ok_or_else(|| Error::Request(format!("a message of {len} bytes: at most {MAX_MESSAGE} are possible")))?;
        self.last += 1;
        let at = remote.addr.wrapping_add(offset);
        post(
            &mut self.qp,
            self.last,
            verb,
            local.region(),
            local.addr().wrapping_add(range.start as u64),
            bytes,
            remote.rkey,
            at,
        )
        .map_err(failed(format!("{verb} through {}", self.nic)))?;
        self.wait(verb)
    }

    /// Waits for the last work request.
    fn wait(&mut self, verb: Verb) -> Result<()> {
        let deadline = Instant::now() + TRANSFER_LIMIT;
        loop {
            match self.cq.start_poll() {
                Ok(completions) => {
                    for completion in completions {
                        // A flushed completion belongs to an earlier request, whose error was reported already.
                        if completion.wr_id() == self.last {
                            return self.done(verb, completion.status());
                        }
                    }
                }
                Err(PollCompletionQueueError::CompletionQueueEmpty) => std::thread::yield_now(),
                Err(error) => return Err(failed(format!("polling {}", self.nic))(error)),
            }
            if Instant::now() > deadline {
                return Err(Error::Rdma {
                    what: format!("{verb} through {}", self.nic),
                    why: format!("no completion within {TRANSFER_LIMIT:?}"),
                });
            }
        }
    }

    fn done(&self, verb: Verb, status: u32) -> Result<()> {
        if status == WorkCompletionStatus::Success as u32 {
            return Ok(());
        }
        Err(Error::Transfer {
            verb: verb.to_string(),
            nic: self.nic.clone(),
            status,
        })
    }
}
