// SPDX-License-Identifier: MIT OR Apache-2.0

//! RDMA devices, in hardware or software: registration by `ibv_reg_mr()`, and RDMA WRITE over a loopback connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::{AddressHandleAttribute, GidType};
use sideway::ibverbs::completion::BasicCompletionQueue;
use sideway::ibverbs::device::{DeviceInfo, DeviceList};
use sideway::ibverbs::device_context::{DeviceContext, LinkLayer};
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{BasicQueuePair, QueuePair, QueuePairAttribute, QueuePairState};

use crate::in_time;
use crate::sys;

/// `IBV_WC_SUCCESS`
pub const SUCCESS: u32 = 0;
/// `IBV_WC_REM_ACCESS_ERR`
pub const REMOTE_ACCESS: u32 = 10;

/// The time limit of a transfer.
const TRANSFER_LIMIT: Duration = Duration::from_secs(60);

/// An open RDMA device.
pub struct Adapter {
    /// The RDMA device's name, such as `mlx5_0`.
    pub name: String,
    context: Arc<DeviceContext>,
    /// The protection domain of all registrations and queue pairs.
    pub pd: Arc<ProtectionDomain>,
}

impl Adapter {
    /// Opens the RDMA device with the name.
    ///
    /// # Errors
    ///
    /// No RDMA device has the name, or it cannot be opened.
    pub fn open(name: &str) -> Result<Adapter> {
        let list = DeviceList::new()?;
        let device = list.iter().find(|device| device.name() == name);
        let context = device
            .with_context(|| format!("no RDMA device is named {name}"))?
            .open()?;
        let pd = context.alloc_pd()?;
        Ok(Adapter {
            name: name.to_owned(),
            context,
            pd,
        })
    }

    /// Registers `len` bytes at an address.
    ///
    /// # Errors
    ///
    /// The errno.
    pub fn register(&self, address: u64, len: usize) -> Result<Arc<MemoryRegion>, i32> {
        sys::register(&self.pd, address, len)
    }

    /// Connects two queue pairs of the RDMA device.
    ///
    /// # Errors
    ///
    /// A queue pair cannot be created or connected.
    pub fn connect(&self) -> Result<Connection> {
        let cq = self.context.create_cq_builder().setup_cqe(16).build()?;
        let (mut near, mut far) = (self.queue_pair(&cq)?, self.queue_pair(&cq)?);
        let (to_far, to_near) = (far.qp_number(), near.qp_number());
        self.connect_one(&mut near, to_far)?;
        self.connect_one(&mut far, to_near)?;
        Ok(Connection {
            near,
            _far: far,
            cq,
            last: 0,
        })
    }

    fn queue_pair(&self, cq: &Arc<BasicCompletionQueue>) -> Result<BasicQueuePair> {
        let mut builder = self.pd.create_qp_builder();
        builder.setup_max_send_wr(4).setup_max_recv_wr(1);
        builder.setup_send_cq(cq.clone()).setup_recv_cq(cq.clone());
        let mut qp = builder.build()?;
        let mut attr = QueuePairAttribute::new();
        attr.setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(1)
            .setup_access_flags(AccessFlags::LocalWrite | AccessFlags::RemoteWrite | AccessFlags::RemoteRead);
        qp.modify(&attr)?;
        Ok(qp)
    }

    fn connect_one(&self, qp: &mut BasicQueuePair, peer: u32) -> Result<()> {
        let port = self.context.query_port(1)?;
        let mut address = AddressHandleAttribute::new();
        address.setup_dest_lid(port.lid()).setup_port(1);
        if matches!(port.link_layer(), LinkLayer::Ethernet) {
            let table = self.context.query_gid_table()?;
            let best = table
                .iter()
                .filter(|entry| matches!(entry.gid_type(), GidType::RoceV2))
                .max_by_key(|entry| !entry.gid().is_unicast_link_local())
                .context("the port has no RoCE v2 GID")?;
            address.setup_grh(&best.gid(), 0, u8::try_from(best.gid_index())?, 64, 0);
        }
        let mut attr = QueuePairAttribute::new();
        attr.setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(port.active_mtu())
            .setup_dest_qp_num(peer)
            .setup_rq_psn(0)
            .setup_max_dest_read_atomic(1)
            .setup_min_rnr_timer(12)
            .setup_address_vector(&address);
        qp.modify(&attr)?;
        let mut attr = QueuePairAttribute::new();
        attr.setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(0)
            .setup_timeout(17)
            .setup_retry_cnt(7)
            .setup_rnr_retry(7)
            .setup_max_read_atomic(1);
        Ok(qp.modify(&attr)?)
    }
}

/// A loopback connection: two queue pairs of an RDMA device. It transfers one WRITE at a time, until one fails.
pub struct Connection {
    near: BasicQueuePair,
    _far: BasicQueuePair,
    cq: Arc<BasicCompletionQueue>,
    last: u64,
}

impl Connection {
    /// Writes the first `len` bytes of a registration to `offset` in another registration, by RDMA WRITE. Returns the
    /// status of the completion.
    ///
    /// # Errors
    ///
    /// The work request cannot be posted, or does not complete in time.
    pub fn write(&mut self, from: &MemoryRegion, len: usize, to: &MemoryRegion, offset: u64) -> Result<u32> {
        self.last += 1;
        let local = (from.lkey(), from.get_ptr() as u64, u32::try_from(len)?);
        let remote = (to.rkey(), to.get_ptr() as u64 + offset);
        sys::post_write(&mut self.near, self.last, local, remote)?;
        let deadline = Instant::now() + TRANSFER_LIMIT;
        loop {
            if let Ok(completions) = self.cq.start_poll() {
                for completion in completions {
                    if completion.wr_id() == self.last {
                        return Ok(completion.status());
                    }
                }
            }
            in_time!(
                Instant::now() < deadline,
                "an RDMA WRITE did not complete within {TRANSFER_LIMIT:?}"
            );
            std::thread::yield_now();
        }
    }
}
