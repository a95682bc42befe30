// SPDX-License-Identifier: MIT OR Apache-2.0

//! Reliable connections and their work requests.

use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use p2pmem::Access;
use rdma_mummy_sys as ffi;

use super::completion::Completions;
use super::nic::Domain;
use super::{errno, PORT};
use crate::address::{invalid, Address, Link};

/// A range of this side's registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address, as registered.
    pub address: u64,
    /// Bytes.
    pub bytes: u32,
    /// Local key.
    pub lkey: u32,
}

/// A range of the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Address that the peer sent.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

/// Operation of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// RDMA WRITE; with immediate data, the peer gets a completion.
    Write(Remote, Option<u32>),
    /// RDMA READ.
    Read(Remote),
    /// SEND.
    Send,
}

/// A work request for the send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Id in the completion.
    pub id: u64,
    /// Range of this side's memory.
    pub local: Segment,
    /// The operation.
    pub work: Work,
    /// Whether the request has a completion if it succeeds. A failed or flushed request always has one.
    ///
    /// A request that is not signaled keeps its entry of the send queue until the completion of a later signaled request was
    /// polled. If a queue of n entries is filled with n requests that are not signaled, no completion ever frees an entry,
    /// and posting fails with ENOMEM: signal at least every n-th request. Requests are executed in order, so the successful
    /// completion of a signaled request also means that all earlier requests succeeded. Until then, the program must not
    /// reuse the memory of an earlier request.
    pub signaled: bool,
}

/// A queue pair of a reliable connection.
///
/// # Invariants
///
/// `raw` exists until this is dropped.
pub struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    domain: Arc<Domain>,
    completions: Arc<Completions>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for QueuePair {}
// SAFETY: as for `Nic`.
unsafe impl Sync for QueuePair {}

/// Access that a connection permits to the other side, except atomics. The access of each registration is a subset.
const ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ);

/// Retransmission parameters of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retries {
    /// Timeout for an acknowledgement: 4.096 us * 2^timeout. At most 31; 0 means no timeout.
    pub timeout: u8,
    /// Maximum number of retransmissions of a request. At most 7.
    pub retries: u8,
}

impl QueuePair {
    /// Creates a queue pair for these numbers of outstanding sends and receives.
    ///
    /// # Errors
    ///
    /// EINVAL or ENOMEM if the NIC does not support queues of this size.
    pub fn new(domain: &Arc<Domain>, completions: &Arc<Completions>, sends: u32, receives: u32) -> io::Result<Self> {
        let kind = ffi::ibv_qp_type::IBV_QPT_RC;
        Self::with_type(domain, completions, kind, sends, receives)
    }

    pub(super) fn with_type(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        kind: ffi::ibv_qp_type::Type,
        sends: u32,
        receives: u32,
    ) -> io::Result<Self> {
        // SAFETY: all zeros is valid for the structure: null pointers and integers.
        let mut init: ffi::ibv_qp_init_attr = unsafe { mem::zeroed() };
        init.send_cq = completions.raw.as_ptr();
        init.recv_cq = completions.raw.as_ptr();
        init.qp_type = kind;
        init.cap.max_send_wr = sends;
        init.cap.max_recv_wr = receives;
        init.cap.max_send_sge = 1;
        init.cap.max_recv_sge = 1;
        // SAFETY: domain and completion queue exist by their invariants, and this object keeps both.
        let raw = unsafe { ffi::ibv_create_qp(domain.raw.as_ptr(), &mut init) };
        // INVARIANT: created above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self {
            raw,
            domain: domain.clone(),
            completions: completions.clone(),
        })
    }

    /// Returns the queue pair number.
    pub fn number(&self) -> u32 {
        // SAFETY: exists by the invariant.
        unsafe { self.raw.as_ref() }.qp_num
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_qp {
        self.raw.as_ptr()
    }

    /// Returns the completion queue.
    pub fn completions(&self) -> &Arc<Completions> {
        &self.completions
    }

    /// Returns the protection domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    pub(super) fn modify(&self, attr: &mut ffi::ibv_qp_attr, mask: &[ffi::ibv_qp_attr_mask]) -> io::Result<()> {
        let mask = mask.iter().fold(0, |all, one| all | one.0);
        // SAFETY: exists by the invariant; the mask names the fields that are set.
        errno(unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), attr, mask as libc::c_int) })
    }

    /// Returns the address of this queue pair, for the peer. `gid_index` selects an entry of the port's GID table.
    ///
    /// The initial packet sequence number is not random, but differs between processes and queue pairs: packets of an
    /// earlier connection do not belong to the new one.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::NetworkDown`] if the port is not active; those of [`Nic::gid`](super::Nic::gid); the NIC was removed. The
    /// message names the NIC.
    pub fn address(&self, gid_index: u8) -> io::Result<Address> {
        let nic = self.domain.nic();
        let name = nic.name();
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"))
        };
        let port = nic.port().map_err(failed(&format!("querying the port of {name}")))?;
        if !port.is_active {
            return Err(io::Error::new(
                io::ErrorKind::NetworkDown,
                format!("the port of {name} is not active: check the link; see `ibv_devinfo -d {name}`"),
            ));
        }
        let gid = nic.gid(gid_index).map_err(failed(&format!(
            "{name} has no GID at index {gid_index} (see `ibv_devinfo -v -d {name}`)"
        )))?;
        let limits = nic
            .limits()
            .map_err(failed(&format!("querying the limits of {name}")))?;
        let number = self.number();
        Ok(Address {
            link: port.link,
            lid: port.lid,
            gid,
            qpn: number,
            psn: (std::process::id() ^ (number << 8)) & 0xff_ffff,
            mtu: port.mtu,
            reads: limits.reads_answered.min(limits.reads_asked).max(1),
        })
    }

    /// Connects to the peer's queue pair. After this the queue pair can send and receive. `own` is the address that the peer
    /// has of this queue pair ([`QueuePair::address`] with the same `gid_index`).
    ///
    /// The connection permits RDMA READ and WRITE by the peer. What the peer can access is limited by the access of the
    /// registrations.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidInput`] if a field of an address is out of range, or the two link layers differ; EINVAL if
    /// the peer's address does not fit this NIC; on Ethernet ETIMEDOUT if it cannot be resolved.
    pub fn connect(&self, own: &Address, gid_index: u8, other: &Address, retries: Retries) -> io::Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        own.check()?;
        other.check()?;
        if own.link != other.link {
            return Err(invalid(format!(
                "{} is on {:?}, but the peer's NIC is on {:?}",
                self.domain.nic().name(),
                own.link,
                other.link
            )));
        }
        // SAFETY: all zeros is valid for the structure: integers and unions of integers.
        let mut attr: ffi::ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = PORT;
        attr.qp_access_flags = ACCESS.bits();
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
        // 7: no limit. If a receiver is never ready, the timeout of the waiter reports the missing completion.
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

    /// Moves a connected queue pair to the error state: no request is executed any more, and each posted request, signaled
    /// or not, gets a completion, flushed unless it was already done. After the last of these completions, the NIC uses no
    /// memory for this queue pair. The peer's requests fail.
    ///
    /// # Errors
    ///
    /// EINVAL if the queue pair was never connected.
    pub fn fail(&self) -> io::Result<()> {
        // SAFETY: all zeros is valid for the structure: integers and unions of integers.
        let mut attr: ffi::ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_ERR;
        self.modify(&mut attr, &[ffi::ibv_qp_attr_mask::IBV_QP_STATE])
    }

    /// Posts requests to the send queue with one doorbell.
    ///
    /// # Errors
    ///
    /// ENOMEM if the queue is full, EINVAL if a request is invalid. Requests before the failed one are posted.
    pub fn post(&self, requests: &[Request]) -> io::Result<()> {
        let mut segments: Vec<ffi::ibv_sge> = requests.iter().map(|request| sge(request.local)).collect();
        let mut list: Vec<ffi::ibv_send_wr> = Vec::with_capacity(requests.len());
        for request in requests {
            // SAFETY: all zeros is valid for the structure: null pointers, integers, and unions of integers.
            let mut wr: ffi::ibv_send_wr = unsafe { mem::zeroed() };
            wr.wr_id = request.id;
            if request.signaled {
                wr.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
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
        let (first, segment) = (list.as_mut_ptr(), segments.as_mut_ptr());
        for i in 0..list.len() {
            // SAFETY: both arrays have `list.len()` elements, and nothing else accesses them until the call below
            // returns.
            unsafe {
                let wr = &mut *first.add(i);
                wr.sg_list = segment.add(i);
                wr.num_sge = 1;
                if i + 1 < list.len() {
                    wr.next = first.add(i + 1);
                }
            }
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists by the invariant. The list and its segments live until the call returns, as
        // libibverbs requires. The NIC checks the addresses, see the documentation of the crate.
        errno(unsafe { ffi::ibv_post_send(self.raw.as_ptr(), first, &mut bad) })
    }

    /// Posts a receive. Without a segment it accepts only messages without payload.
    ///
    /// # Errors
    ///
    /// ENOMEM if the queue is full.
    pub fn post_receive(&self, id: u64, into: Option<Segment>) -> io::Result<()> {
        let mut segment = into.map(sge);
        // SAFETY: all zeros is valid for the structure: null pointers and integers.
        let mut wr: ffi::ibv_recv_wr = unsafe { mem::zeroed() };
        wr.wr_id = id;
        if let Some(segment) = &mut segment {
            wr.sg_list = segment;
            wr.num_sge = 1;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post`.
        errno(unsafe { ffi::ibv_post_recv(self.raw.as_ptr(), &mut wr, &mut bad) })
    }
}

pub(super) fn sge(segment: Segment) -> ffi::ibv_sge {
    ffi::ibv_sge {
        addr: segment.address,
        length: segment.bytes,
        lkey: segment.lkey,
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: exists by the invariant; no object refers to it except completions, which are plain data.
        unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) };
    }
}
