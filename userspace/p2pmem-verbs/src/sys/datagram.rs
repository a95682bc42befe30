// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue pairs for unreliable datagrams on an InfiniBand link.

use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_mummy_sys as ffi;

use super::completion::Completions;
use super::nic::Domain;
use super::queue_pair::{sge, QueuePair, Segment};
use super::{errno, PORT};

/// Bytes before the payload of a received datagram, for its route. The NIC may not change them.
pub const ROUTE_BYTES: u32 = 40;

/// The route to a port.
///
/// # Invariants
///
/// `raw` exists until this is dropped.
pub struct AddressHandle {
    raw: NonNull<ffi::ibv_ah>,
    domain: Arc<Domain>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for AddressHandle {}
// SAFETY: as for `Nic`.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Creates a handle for the port with a local identifier.
    ///
    /// # Errors
    ///
    /// EINVAL on an Ethernet link, which needs a GID.
    pub fn new(domain: &Arc<Domain>, lid: u16) -> io::Result<Self> {
        // SAFETY: all zeros is valid for the structure: integers and unions of integers.
        let mut attr: ffi::ibv_ah_attr = unsafe { mem::zeroed() };
        attr.dlid = lid;
        attr.port_num = PORT;
        // SAFETY: the domain exists by its invariant; the call only reads the attributes.
        let raw = unsafe { ffi::ibv_create_ah(domain.raw.as_ptr(), &mut attr) };
        // INVARIANT: created above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self {
            raw,
            domain: domain.clone(),
        })
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: exists by the invariant. mlx5 copies its contents to work requests, and the kernel's drivers look a handle up
        // by its number, so a request that is still posted then fails.
        unsafe { ffi::ibv_destroy_ah(self.raw.as_ptr()) };
    }
}

/// A queue pair that can send and receive datagrams.
pub struct Datagrams {
    queue: QueuePair,
}

impl Datagrams {
    /// Creates a queue pair for these numbers of outstanding sends and receives. `key` is its queue key, which senders need.
    ///
    /// # Errors
    ///
    /// EINVAL or ENOMEM if the NIC does not support queues of this size.
    pub fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        sends: u32,
        receives: u32,
        key: u32,
    ) -> io::Result<Self> {
        use ffi::ibv_qp_attr_mask as mask;
        let kind = ffi::ibv_qp_type::IBV_QPT_UD;
        let queue = QueuePair::with_type(domain, completions, kind, sends, receives)?;
        // SAFETY: all zeros is valid for the structure: integers and unions of integers.
        let mut attr: ffi::ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = PORT;
        attr.qkey = key;
        queue.modify(
            &mut attr,
            &[
                mask::IBV_QP_STATE,
                mask::IBV_QP_PKEY_INDEX,
                mask::IBV_QP_PORT,
                mask::IBV_QP_QKEY,
            ],
        )?;
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTR;
        queue.modify(&mut attr, &[mask::IBV_QP_STATE])?;
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTS;
        queue.modify(&mut attr, &[mask::IBV_QP_STATE, mask::IBV_QP_SQ_PSN])?;
        Ok(Self { queue })
    }

    /// Returns the queue pair number.
    pub fn number(&self) -> u32 {
        self.queue.number()
    }

    /// Returns the protection domain.
    pub fn domain(&self) -> &Arc<Domain> {
        self.queue.domain()
    }

    /// Posts a datagram to the queue pair `number` with the queue key `key` at the port of a route. It is signaled. A datagram
    /// that is longer than the MTU completes with an error. Keep the handle until the completion.
    ///
    /// # Errors
    ///
    /// EINVAL if the route belongs to another protection domain, ENOMEM if the queue is full.
    pub fn post(&self, id: u64, local: Segment, to: &AddressHandle, number: u32, key: u32) -> io::Result<()> {
        if !Arc::ptr_eq(&to.domain, self.domain()) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut segment = sge(local);
        // SAFETY: all zeros is valid for the structure: null pointers, integers, and unions of integers.
        let mut wr: ffi::ibv_send_wr = unsafe { mem::zeroed() };
        wr.wr_id = id;
        wr.opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
        wr.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        wr.sg_list = &mut segment;
        wr.num_sge = 1;
        wr.wr.ud = ffi::ud_t {
            ah: to.raw.as_ptr(),
            remote_qpn: number,
            remote_qkey: key,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair and the address handle exist by their invariants, and both belong to the same device, as they have
        // the same domain. The request and its segment live until the call returns. The NIC checks the address, see the
        // documentation of the crate.
        errno(unsafe { ffi::ibv_post_send(self.queue.raw(), &mut wr, &mut bad) })
    }

    /// Posts a receive: [`ROUTE_BYTES`], and then the payload.
    ///
    /// # Errors
    ///
    /// ENOMEM if the queue is full.
    pub fn post_receive(&self, id: u64, into: Segment) -> io::Result<()> {
        self.queue.post_receive(id, Some(into))
    }
}
