// SPDX-License-Identifier: MIT OR Apache-2.0

//! Reliable connections and their work requests.

use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_mummy_sys as ffi;

use super::completion::Completions;
use super::{errno, Domain, ACCESS, PORT};
use crate::wire::{Endpoint, Link};

/// A range of registered memory of this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address, as registered.
    pub address: u64,
    /// Bytes.
    pub bytes: u32,
    /// Local key.
    pub lkey: u32,
}

/// An address in the remote side's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// The address that the remote side sent.
    pub address: u64,
    /// Its key.
    pub rkey: u32,
}

/// What a work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// RDMA WRITE; with a number the other side gets a completion with it.
    Write(Remote, Option<u32>),
    /// RDMA READ.
    Read(Remote),
    /// SEND.
    Send,
}

/// A work request for the send queue. Each gets a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Comes back with the completion.
    pub id: u64,
    /// This side's memory.
    pub local: Segment,
    /// What is done with it.
    pub work: Work,
}

/// A reliable connection.
///
/// # Invariants
///
/// `raw` lives until this is dropped.
pub struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    domain: Arc<Domain>,
    completions: Arc<Completions>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for QueuePair {}
// SAFETY: as for `Nic`.
unsafe impl Sync for QueuePair {}

/// How often and how long a queue pair waits for acknowledgements.
#[derive(Debug, Clone, Copy)]
pub struct Retries {
    /// The timeout for an acknowledgement is 4.096 us * 2^this.
    pub timeout: u8,
    /// How often a request is sent again.
    pub retries: u8,
}

impl QueuePair {
    /// Creates a queue pair for as many outstanding sends and receives.
    ///
    /// # Errors
    ///
    /// EINVAL or ENOMEM if the NIC does not support queues of this size.
    pub fn new(domain: &Arc<Domain>, completions: &Arc<Completions>, sends: u32, receives: u32) -> io::Result<Self> {
        // SAFETY: all zeros is a value of the structure: null pointers and integers.
        let mut init: ffi::ibv_qp_init_attr = unsafe { mem::zeroed() };
        init.send_cq = completions.raw.as_ptr();
        init.recv_cq = completions.raw.as_ptr();
        init.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        init.cap.max_send_wr = sends;
        init.cap.max_recv_wr = receives;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        // SAFETY: domain and completion queue live by their invariants, and we keep them.
        let raw = unsafe { ffi::ibv_create_qp(domain.raw.as_ptr(), &mut init) };
        // INVARIANT: just made.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self {
            raw,
            domain: domain.clone(),
            completions: completions.clone(),
        })
    }

    /// Returns the queue pair's number.
    pub fn number(&self) -> u32 {
        // SAFETY: lives by the invariant.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Returns the queue of its completions.
    pub fn completions(&self) -> &Arc<Completions> {
        &self.completions
    }

    /// Returns its protection domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    fn modify(&self, attr: &mut ffi::ibv_qp_attr, mask: &[ffi::ibv_qp_attr_mask]) -> io::Result<()> {
        let mask = mask.iter().fold(0, |all, one| all | one.0);
        // SAFETY: lives by the invariant; the mask names the fields that were set.
        errno(unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), attr, mask as libc::c_int) })
    }

    /// Connects the queue pair to another, and makes it ready to send and receive.
    ///
    /// # Errors
    ///
    /// EINVAL where the other side's address does not fit this NIC; ETIMEDOUT on Ethernet where it cannot be resolved.
    pub fn connect(&self, own: &Endpoint, gid_index: u8, other: &Endpoint, retries: Retries) -> io::Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        // SAFETY: all zeros is a value of the structure: integers and unions of them.
        let mut attr: ffi::ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = PORT;
        attr.qp_access_flags = ACCESS;
        self.modify(
            &mut attr,
            &[
                mask::IBV_QP_STATE,
                mask::IBV_QP_PKEY_INDEX,
                mask::IBV_QP_PORT,
                mask::IBV_QP_ACCESS_FLAGS,
            ],
        )?;

        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = (own.mtu.min(other.mtu) / 128).ilog2();
        attr.dest_qp_num = other.qpn;
        attr.rq_psn = other.psn;
        attr.max_dest_rd_atomic = own.reads;
        attr.min_rnr_timer = 12;
        attr.ah_attr.port_num = PORT;
        attr.ah_attr.dlid = other.lid;
        if own.link == Link::Ethernet {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid = ffi::ibv_gid { raw: other.gid };
            attr.ah_attr.grh.sgid_index = gid_index;
            attr.ah_attr.grh.hop_limit = 64;
        }
        self.modify(
            &mut attr,
            &[
                mask::IBV_QP_STATE,
                mask::IBV_QP_AV,
                mask::IBV_QP_PATH_MTU,
                mask::IBV_QP_DEST_QPN,
                mask::IBV_QP_RQ_PSN,
                mask::IBV_QP_MAX_DEST_RD_ATOMIC,
                mask::IBV_QP_MIN_RNR_TIMER,
            ],
        )?;

        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTS;
        attr.timeout = retries.timeout;
        attr.retry_cnt = retries.retries;
        // Without a limit: a receiver that is never ready shows as silence, which has its own limit.
        attr.rnr_retry = 7;
        attr.sq_psn = own.psn;
        attr.max_rd_atomic = own.reads.min(other.reads);
        self.modify(
            &mut attr,
            &[
                mask::IBV_QP_STATE,
                mask::IBV_QP_TIMEOUT,
                mask::IBV_QP_RETRY_CNT,
                mask::IBV_QP_RNR_RETRY,
                mask::IBV_QP_SQ_PSN,
                mask::IBV_QP_MAX_QP_RD_ATOMIC,
            ],
        )
    }

    /// Posts requests to the send queue, with one doorbell.
    ///
    /// # Errors
    ///
    /// ENOMEM where the queue is full, EINVAL where a request is bad. The requests before the bad one are posted.
    pub fn post(&self, requests: &[Request]) -> io::Result<()> {
        let mut pieces: Vec<ffi::ibv_sge> = requests.iter().map(|request| sge(request.local)).collect();
        let mut list: Vec<ffi::ibv_send_wr> = Vec::with_capacity(requests.len());
        for request in requests {
            // SAFETY: all zeros is a value of the structure: null pointers, integers and unions of them.
            let mut wr: ffi::ibv_send_wr = unsafe { mem::zeroed() };
            wr.wr_id = request.id;
            wr.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
            let remote = match request.work {
                Work::Write(remote, None) => {
                    wr.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                    Some(remote)
                }
                Work::Write(remote, Some(immediate)) => {
                    wr.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
                    wr.imm_data_invalidated_rkey_union = ffi::imm_data_invalidated_rkey_union_t {
                        imm_data: immediate.to_be(),
                    };
                    Some(remote)
                }
                Work::Read(remote) => {
                    wr.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_READ;
                    Some(remote)
                }
                Work::Send => {
                    wr.opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
                    None
                }
            };
            if let Some(remote) = remote {
                wr.wr.rdma = ffi::rdma_t {
                    remote_addr: remote.address,
                    rkey: remote.rkey,
                };
            }
            list.push(wr);
        }
        if list.is_empty() {
            return Ok(());
        }
        let (first, piece) = (list.as_mut_ptr(), pieces.as_mut_ptr());
        for i in 0..list.len() {
            // SAFETY: both have `list.len()` elements, and nobody else uses them until the call below returns.
            unsafe {
                let wr = &mut *first.add(i);
                wr.sg_list = piece.add(i);
                wr.num_sge = 1;
                if i + 1 < list.len() {
                    wr.next = first.add(i + 1);
                }
            }
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives by the invariant; the list and its pieces live until the call returns, which is as
        // long as libibverbs needs them. What they name the NIC checks, see the module's text.
        errno(unsafe { ffi::ibv_post_send(self.raw.as_ptr(), first, &mut bad) })
    }

    /// Posts a receive; without a piece it takes messages without bytes.
    ///
    /// # Errors
    ///
    /// ENOMEM where the queue is full.
    pub fn post_receive(&self, id: u64, into: Option<Segment>) -> io::Result<()> {
        let mut piece = into.map(sge);
        // SAFETY: all zeros is a value of the structure: null pointers and integers.
        let mut wr: ffi::ibv_recv_wr = unsafe { mem::zeroed() };
        wr.wr_id = id;
        if let Some(piece) = &mut piece {
            wr.sg_list = piece;
            wr.num_sge = 1;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post`.
        errno(unsafe { ffi::ibv_post_recv(self.raw.as_ptr(), &mut wr, &mut bad) })
    }
}

fn sge(segment: Segment) -> ffi::ibv_sge {
    ffi::ibv_sge {
        addr: segment.address,
        length: segment.bytes,
        lkey: segment.lkey,
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: lives by the invariant; nothing refers to it but completions, which are plain numbers.
        unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) };
    }
}
