// SPDX-License-Identifier: MIT OR Apache-2.0

//! Endpoints: a queue pair of a NIC and its completion queues, created for a peer, with queues in the memory that the
//! program chooses.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use p2pmem::rdma::Nic;
use sideway::ibverbs::device_context::{LinkLayer, Mtu, PortState};
use sideway::ibverbs::protection_domain::ProtectionDomain;

use crate::bytecode::Peer;
use crate::cqe;
use crate::error::{Error, Result};
use crate::memory::MemorySource;
use crate::queue::{cq_record_bytes, AsyncCq, AsyncQp, QpLayout, QpParts, QP_RECORD_BYTES};
use crate::region::{Region, RegionKind};
use crate::sys::uverbs::{Context, KernelCq, KernelQp, QpChange, QpSizes, QpSource, QpState, Retries, Route, Uar};
use crate::sys::PAGE;
use crate::wqe::{AddressVector, Transport};

/// Access of the other side that queue pairs allow: local write, remote write, remote read, atomics.
const ACCESS: u32 = 0xf;
/// First packet number that this side sends. The kernel's connection manager would choose a random one.
const PSN: u32 = 0;
/// READs and atomics at the same time.
const READS: u8 = 1;

/// An open port of a NIC with a protection domain.
#[derive(Debug)]
pub struct Port {
    context: Arc<Context>,
    number: u8,
    lid: u16,
    mtu: u8,
    ethernet: bool,
    gid: [u8; 16],
}

impl Port {
    /// Opens the first active port of a NIC, and creates a protection domain.
    ///
    /// # Errors
    ///
    /// [`Error::Verbs`] if no port is active.
    pub fn open(nic: &Nic) -> Result<Arc<Self>> {
        let domain = nic.alloc_pd()?;
        let verbs = |what: &str, why: String| Error::Verbs { what: what.into(), why };
        let device = nic.context().query_device();
        let device = device.map_err(|error| verbs("querying the NIC", error.to_string()))?;
        for number in 1..=device.phys_port_cnt() {
            let port = nic.context().query_port(number);
            let port = port.map_err(|error| verbs("querying a port", error.to_string()))?;
            if !matches!(port.port_state(), PortState::Active) {
                continue;
            }
            let gid = nic.context().query_gid(number, 0);
            let gid = gid.map_err(|error| verbs("querying a GID", error.to_string()))?;
            return Ok(Arc::new(Self {
                context: Context::new(domain),
                number,
                lid: port.lid(),
                mtu: match port.active_mtu() {
                    Mtu::Mtu256 => 1,
                    Mtu::Mtu512 => 2,
                    Mtu::Mtu1024 => 3,
                    Mtu::Mtu2048 => 4,
                    Mtu::Mtu4096 => 5,
                },
                ethernet: matches!(port.link_layer(), LinkLayer::Ethernet),
                gid: gid.raw,
            }));
        }
        Err(verbs("opening the NIC", "no port is active".into()))
    }

    /// Returns the protection domain, in which payload is registered.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        self.context.domain()
    }
}

/// What an endpoint is created with.
#[derive(Debug, Clone)]
pub struct EndpointOptions {
    /// The transport.
    pub transport: Transport,
    /// The executor.
    pub peer: Peer,
    /// Where the queues are.
    pub queues: MemorySource,
    /// Sizes of send and receive queue.
    pub layout: QpLayout,
    /// Entries of each completion queue: a power of two.
    pub completions: u32,
    /// Peeks of each completion queue that have not ended: at least 1.
    pub peeks: usize,
    /// Queue key of datagrams.
    pub qkey: u32,
}

impl EndpointOptions {
    /// Queues of 64 entries in host memory.
    pub fn new(transport: Transport, peer: Peer) -> Self {
        Self {
            transport,
            peer,
            queues: MemorySource::Host,
            layout: QpLayout {
                send_blocks: 64,
                receive_entries: 64,
            },
            completions: 64,
            peeks: 64,
            qkey: 0x1111_1111,
        }
    }
}

/// What the other side needs to reach an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Address {
    /// Number of the queue pair.
    pub qpn: u32,
    /// Local identifier (LID) of the port; 0 on Ethernet.
    pub lid: u16,
    /// GID of the port.
    pub gid: [u8; 16],
    /// Queue key of datagrams.
    pub qkey: u32,
    /// Path MTU (`enum ib_mtu`).
    pub mtu: u8,
    /// First packet number that this side sends, 24 bits. Connections only.
    pub psn: u32,
}

/// A queue pair and its completion queues, one for sends and one for receives.
#[derive(Debug)]
pub struct Endpoint {
    // Fields are dropped in this order: the NIC's queue pair before the program's part, which then removes its completions.
    kernel: KernelQp,
    qp: AsyncQp,
    uar: Arc<Uar>,
    port: Arc<Port>,
    transport: Transport,
    qkey: u32,
}

impl Endpoint {
    /// Creates an endpoint in state INIT: receives can be posted.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for invalid sizes, [`Error::Kernel`] if the kernel or the NIC refuses the objects,
    /// [`Error::Memory`] if there is no memory for the queues.
    pub fn new(port: &Arc<Port>, options: &EndpointOptions) -> Result<Self> {
        let EndpointOptions {
            transport,
            peer,
            queues,
            layout,
            completions,
            peeks,
            qkey,
        } = options;
        layout.check()?;
        if !completions.is_power_of_two() {
            return Err(Error::Argument(format!(
                "{completions} entries of a completion queue: a power of two is needed"
            )));
        }
        if *transport == Transport::Ud && port.ethernet {
            return Err(Error::Argument(
                "datagrams on Ethernet need the MAC address of the next hop, which this crate does not resolve; use a reliable connection".into(),
            ));
        }
        let (cq_bytes, record_bytes) = (*completions as usize * cqe::BYTES, cq_record_bytes(*peeks));
        let parts = [
            cq_bytes,
            record_bytes,
            cq_bytes,
            record_bytes,
            layout.bytes(),
            QP_RECORD_BYTES,
        ];
        let mut memory = queues.queue_memory(parts.iter().map(|bytes| bytes.next_multiple_of(PAGE)).sum())?;
        let uar = Uar::new(&port.context)?;
        let mut create_cq = || {
            let (entries, entries_place) = memory.take(RegionKind::Completions, cq_bytes);
            let (record, record_place) = memory.take(RegionKind::CqRecord, record_bytes);
            let kernel = KernelCq::new(&port.context, *completions, entries_place, record_place, &uar)?;
            let queue = AsyncCq::new(kernel.cqn(), entries, record, peer.clone())?;
            Result::Ok((Arc::new(kernel), queue))
        };
        let (send_kernel, send_cq) = create_cq()?;
        let (receive_kernel, receive_cq) = create_cq()?;
        let (queue, queue_place) = memory.take(RegionKind::WorkQueue, layout.bytes());
        let (record, record_place) = memory.take(RegionKind::QpRecord, QP_RECORD_BYTES);
        // Memory of p2pmem is cleared, and that of other backends may not be.
        record.store_qword(0, 0);
        record.fence();
        let source = QpSource {
            datagram: *transport == Transport::Ud,
            sizes: QpSizes {
                send_blocks: layout.send_blocks,
                receive_entries: layout.receive_entries,
            },
            queue: queue_place,
            record: record_place,
            uar: &uar,
            send_cq: &send_kernel,
            receive_cq: &receive_kernel,
        };
        let kernel = KernelQp::new(&port.context, source)?;
        let parts = QpParts {
            qpn: kernel.qpn(),
            transport: *transport,
            layout: *layout,
            queue,
            record,
            doorbell: Region::new(RegionKind::Doorbell, uar.page().clone()),
        };
        let qp = AsyncQp::new(parts, peer.clone(), send_cq, receive_cq)?;
        let datagram = *transport == Transport::Ud;
        let change = QpChange {
            port: Some(port.number),
            access: (!datagram).then_some(ACCESS),
            qkey: datagram.then_some(*qkey),
            ..QpChange::default()
        };
        kernel.modify(QpState::Init, &change)?;
        Ok(Self {
            kernel,
            qp,
            uar,
            port: port.clone(),
            transport: *transport,
            qkey: *qkey,
        })
    }

    /// Returns the transport.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Returns the queue pair: post, commit, roll back.
    pub fn qp(&self) -> &AsyncQp {
        &self.qp
    }

    /// Returns the regions that byte code of this endpoint names: records, completions, doorbell.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        let queues = self.qp.send_cq().regions().into_iter();
        queues.chain(self.qp.receive_cq().regions()).chain(self.qp.regions())
    }

    /// Exports the doorbell page as a dma-buf, by which another device can ring. An importer can make the NIC read
    /// the send queue at any time, and arm completion queues of this page.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EPROTONOSUPPORT or EOPNOTSUPP before Linux 7.2.
    pub fn export_doorbell(&self) -> Result<OwnedFd> {
        self.uar.export()
    }

    /// Returns what the other side needs.
    pub fn address(&self) -> Address {
        Address {
            qpn: self.qp.qpn(),
            lid: self.port.lid,
            gid: self.port.gid,
            qkey: self.qkey,
            mtu: self.port.mtu,
            psn: PSN,
        }
    }

    /// Makes the endpoint ready to send and receive. `other` is the other side of a connection; datagrams do not use it.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EINVAL if the endpoint is connected already.
    pub fn connect(&self, other: &Address) -> Result<()> {
        let connected = self.transport == Transport::Rc;
        let route = Route {
            qpn: other.qpn,
            lid: other.lid,
            gid: self.port.ethernet.then_some((other.gid, 0)),
            port: self.port.number,
            mtu: self.port.mtu.min(other.mtu),
            psn: other.psn,
            reads: READS,
        };
        let receive = QpChange {
            route: connected.then_some(route),
            ..QpChange::default()
        };
        self.kernel.modify(QpState::ReadyToReceive, &receive)?;
        let send = QpChange {
            send_psn: Some(PSN),
            // 0.5 s for an acknowledgement, 7 retries; without a limit while the receiver is not ready.
            retries: connected.then_some(Retries {
                timeout: 17,
                retries: 7,
                rnr_retries: 7,
                reads: READS,
            }),
            ..QpChange::default()
        };
        self.kernel.modify(QpState::ReadyToSend, &send)
    }

    /// Returns the address of `other` for datagrams.
    pub fn address_vector(&self, other: &Address) -> AddressVector {
        AddressVector {
            dlid: other.lid,
            sl: 0,
            path_bits: 0,
            qpn: other.qpn,
            qkey: other.qkey,
            grh: None,
        }
    }

    /// Puts the queue pair into the error state: the NIC flushes its work requests, and posts and commits are refused. Use
    /// it when the peer died in the middle of a program.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EIO if the NIC was removed.
    pub fn fail(&self, why: &str) -> Result<()> {
        self.qp.fail(why);
        self.kernel.modify(QpState::Error, &QpChange::default())
    }

    /// Asks the NIC for the state of the queue pair. In the error state, posts and commits are refused from now on, also if
    /// no completion has reported a failure.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EIO if the NIC was removed.
    pub fn refresh(&self) -> Result<Option<QpState>> {
        let state = self.kernel.state()?;
        if matches!(state, Some(QpState::Error | QpState::SendError)) {
            self.qp.fail("the NIC reports the error state");
        }
        Ok(state)
    }
}
