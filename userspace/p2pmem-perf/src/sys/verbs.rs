// SPDX-License-Identifier: MIT OR Apache-2.0

//! Safe wrappers of libibverbs: NICs, registered memory, queue pairs, and completions. Each object keeps its parents
//! alive.
//!
//! The NIC checks the addresses in a work request, local and remote, against its keys, and a key is valid only while
//! its registration exists. Posting arbitrary addresses is therefore safe: the worst result is a completion with an
//! error.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use p2pmem::{Access, Buffer, Pd, Registration};
use rdma_mummy_sys as ffi;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::Span;
use crate::wire::{Endpoint, Link};

/// The only port that this program uses; most NICs have one port.
const PORT: u8 = 1;

/// Converts the return value of a verb to a result.
fn errno(returned: libc::c_int) -> io::Result<()> {
    match returned {
        0 => Ok(()),
        // Most verbs return the errno, some the negative errno, and -1 means that the error is in `errno`.
        -1 => Err(io::Error::last_os_error()),
        other => Err(io::Error::from_raw_os_error(other.abs())),
    }
}

/// The list of NICs.
struct DeviceList {
    devices: NonNull<*mut ffi::ibv_device>,
    count: usize,
}

impl DeviceList {
    fn new() -> io::Result<Self> {
        let mut count = 0;
        // SAFETY: the call writes only the count, a local variable.
        let devices = unsafe { ffi::ibv_get_device_list(&mut count) };
        match NonNull::new(devices) {
            Some(devices) => Ok(Self {
                devices,
                count: usize::try_from(count).unwrap_or(0),
            }),
            None => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the NICs and their names.
    fn iter(&self) -> impl Iterator<Item = (*mut ffi::ibv_device, String)> + '_ {
        (0..self.count).map(|i| {
            // SAFETY: the list has `count` entries; a device's name is a C string that lives as long as the list.
            unsafe {
                let device = *self.devices.as_ptr().add(i);
                let name = ffi::ibv_get_device_name(device);
                (device, CStr::from_ptr(name).to_string_lossy().into_owned())
            }
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: it came from ibv_get_device_list and is freed once. Open devices hold their own reference.
        unsafe { ffi::ibv_free_device_list(self.devices.as_ptr()) };
    }
}

/// Returns the names of this machine's NICs.
///
/// # Errors
///
/// EOPNOTSUPP if libibverbs is not installed, ENOSYS if the kernel has no RDMA.
pub fn nics() -> io::Result<Vec<String>> {
    Ok(DeviceList::new()?.iter().map(|(_, name)| name).collect())
}

/// Limits of a NIC.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of work requests in a queue.
    pub queue: u32,
    /// Maximum number of outstanding RDMA READs and atomics of a queue pair as a responder.
    pub reads_answered: u8,
    /// Maximum number of outstanding RDMA READs and atomics of a queue pair as an initiator.
    pub reads_asked: u8,
}

/// Attributes of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Whether the port is active.
    pub is_active: bool,
    /// Link layer.
    pub link: Link,
    /// Local identifier.
    pub lid: u16,
    /// MTU in bytes.
    pub mtu: u32,
}

/// An open NIC.
///
/// # Invariants
///
/// `raw` is open until this is dropped.
pub struct Nic {
    raw: NonNull<ffi::ibv_context>,
    name: String,
}

// SAFETY: libibverbs permits concurrent calls with one context from any threads.
unsafe impl Send for Nic {}
// SAFETY: as above.
unsafe impl Sync for Nic {}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Nic {
    /// Opens the NIC of this name; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// EPERM or EACCES if the user has no access to the device file. Those of [`nics`].
    pub fn open(name: &str) -> io::Result<Option<Arc<Self>>> {
        let list = DeviceList::new()?;
        let found = list.iter().find(|(_, other)| other == name);
        let Some((device, name)) = found else {
            return Ok(None);
        };
        // SAFETY: the list lives, so the device is valid.
        let raw = unsafe { ffi::ibv_open_device(device) };
        // INVARIANT: opened above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Some(Arc::new(Self { raw, name })))
    }

    /// Returns the NIC's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queries the NIC's limits.
    ///
    /// # Errors
    ///
    /// The NIC was removed.
    pub fn limits(&self) -> io::Result<Limits> {
        let mut attr = mem::MaybeUninit::<ffi::ibv_device_attr>::zeroed();
        // SAFETY: by the invariant the context is open. The attributes consist of integers and arrays of integers, so
        // all zeros is a valid value, and the call writes them.
        let attr = unsafe {
            errno(ffi::ibv_query_device(self.raw.as_ptr(), attr.as_mut_ptr()))?;
            attr.assume_init()
        };
        let few = |n: i32| u8::try_from(n.clamp(0, 255)).unwrap_or(0);
        Ok(Limits {
            queue: u32::try_from(attr.max_qp_wr).unwrap_or(1),
            reads_answered: few(attr.max_qp_rd_atom),
            reads_asked: few(attr.max_qp_init_rd_atom),
        })
    }

    /// Queries the port.
    ///
    /// # Errors
    ///
    /// The NIC was removed.
    pub fn port(&self) -> io::Result<Port> {
        let mut attr = mem::MaybeUninit::<ffi::ibv_port_attr>::zeroed();
        // SAFETY: as in `limits`.
        let attr = unsafe {
            errno(ffi::ibv_query_port(self.raw.as_ptr(), PORT, attr.as_mut_ptr()))?;
            attr.assume_init()
        };
        Ok(Port {
            is_active: attr.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
            // 2 is IBV_LINK_LAYER_ETHERNET; 1 and 0 (unspecified) are InfiniBand.
            link: if attr.link_layer == 2 {
                Link::Ethernet
            } else {
                Link::Infiniband
            },
            lid: attr.lid,
            // Codes 1 to 5 mean 256 to 4096 bytes.
            mtu: 128 << attr.active_mtu.clamp(1, 5),
        })
    }

    /// Queries an entry of the port's GID table.
    ///
    /// # Errors
    ///
    /// The entry does not exist.
    pub fn gid(&self, index: u8) -> io::Result<[u8; 16]> {
        let mut gid = ffi::ibv_gid { raw: [0; 16] };
        // SAFETY: by the invariant the context is open; the GID is a local variable, and all its bytes are initialized.
        unsafe {
            errno(ffi::ibv_query_gid(self.raw.as_ptr(), PORT, index.into(), &mut gid))?;
            Ok(gid.raw)
        }
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        // SAFETY: open by the invariant; every object of this context holds an `Arc` of this and is already dropped.
        unsafe { ffi::ibv_close_device(self.raw.as_ptr()) };
    }
}

/// A protection domain.
///
/// # Invariants
///
/// `raw` is allocated until this is dropped.
pub struct Domain {
    raw: NonNull<ffi::ibv_pd>,
    nic: Arc<Nic>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for Domain {}
// SAFETY: as for `Nic`.
unsafe impl Sync for Domain {}

impl Domain {
    /// Allocates a protection domain of a NIC.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new(nic: Arc<Nic>) -> io::Result<Arc<Self>> {
        // SAFETY: by its invariant the context is open.
        let raw = unsafe { ffi::ibv_alloc_pd(nic.raw.as_ptr()) };
        // INVARIANT: allocated above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Arc::new(Self { raw, nic }))
    }

    /// Returns the NIC.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: allocated by the invariant; every object of this domain holds an `Arc` of this and is already
        // dropped.
        unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// Access flags of all registrations: everything except atomics.
pub const ACCESS: u32 = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
    | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
    | ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;

/// Host memory that is registered with a NIC.
///
/// # Invariants
///
/// `raw` is registered until this is dropped, and `span` is mapped for at least that time.
pub struct HostMemory {
    raw: NonNull<ffi::ibv_mr>,
    span: Span,
    _domain: Arc<Domain>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for HostMemory {}
// SAFETY: as for `Nic`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Registers memory by `ibv_reg_mr()`.
    ///
    /// # Errors
    ///
    /// ENOMEM (more than `ulimit -l` permits), EFAULT (not memory that can be pinned).
    pub fn register(domain: &Arc<Domain>, span: &Span) -> io::Result<Self> {
        let access = ACCESS as libc::c_int;
        let start = span.address() as *mut libc::c_void;
        // SAFETY: the span is mapped, and this object keeps a clone, so it stays mapped while it is registered. No
        // references to the memory exist, so the NIC may change it.
        let raw = unsafe { ffi::ibv_reg_mr(domain.raw.as_ptr(), start, span.len(), access) };
        // INVARIANT: registered above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Self {
            raw,
            span: span.clone(),
            _domain: domain.clone(),
        })
    }

    /// Returns the memory.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Returns (local key, remote key).
    pub fn keys(&self) -> (u32, u32) {
        // SAFETY: registered by the invariant.
        let raw = unsafe { self.raw.as_ref() };
        (raw.lkey, raw.rkey)
    }

    /// Deregisters the memory, like a drop, and returns errors.
    ///
    /// # Errors
    ///
    /// EBUSY if memory windows are bound to the region.
    pub fn deregister(self) -> io::Result<()> {
        let this = mem::ManuallyDrop::new(self);
        // SAFETY: registered by the invariant, and not used after this; each field of `this` is read once.
        unsafe {
            let ended = errno(ffi::ibv_dereg_mr(this.raw.as_ptr()));
            drop(ptr::read(&this.span));
            drop(ptr::read(&this._domain));
            ended
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: registered by the invariant. The fields, and so the memory, are dropped after this.
        unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// A buffer that is registered with a NIC.
pub struct BufferMemory {
    // Fields are dropped in this order: the registration before its domain.
    registration: Registration,
    _domain: Arc<Domain>,
}

impl BufferMemory {
    /// Registers a whole buffer, by the method that the kernel offers.
    ///
    /// # Errors
    ///
    /// Those of [`Buffer::register`].
    pub fn register(domain: &Arc<Domain>, buffer: &Buffer) -> p2pmem::Result<Self> {
        // SAFETY: the domain came from ibv_alloc_pd(). It lives at least as long as the clone in the returned object,
        // which is dropped after the registration.
        let pd = unsafe { Pd::from_raw(domain.raw.cast()) }?;
        Ok(Self {
            registration: buffer.register(&pd, Access::from_bits_retain(ACCESS))?,
            _domain: domain.clone(),
        })
    }

    /// Returns the registration.
    pub fn registration(&self) -> &Registration {
        &self.registration
    }

    /// Deregisters the buffer, like a drop, and returns errors.
    ///
    /// # Errors
    ///
    /// Those of [`Registration::deregister`].
    pub fn deregister(self) -> p2pmem::Result<()> {
        self.registration.deregister()
    }
}

/// Completion of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Id of the work request.
    pub id: u64,
    /// The failure, if the work request failed.
    pub failure: Option<Failure>,
    /// Number of bytes received.
    pub bytes: u32,
    /// The immediate data, if the message has any.
    pub immediate: Option<u32>,
}

/// Failure of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// `enum ibv_wc_status`.
    pub status: u32,
    /// Code of the vendor.
    pub vendor: u32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ffi::ibv_wc_status::*;
        let (what, remedy) = match self.status {
            IBV_WC_LOC_LEN_ERR => ("local length error", "a message was longer than its receive"),
            IBV_WC_LOC_PROT_ERR => (
                "local protection error",
                "this side's memory is not registered any more: was its provider unpublished?",
            ),
            IBV_WC_WR_FLUSH_ERR => ("flushed", "an earlier request failed, or the queue pair was destroyed"),
            IBV_WC_REM_INV_REQ_ERR => ("remote invalid request", "the other side's NIC does not support the request"),
            IBV_WC_REM_ACCESS_ERR => (
                "remote access error",
                "the other side's memory is not registered any more: was its provider unpublished, or has the program ended?",
            ),
            IBV_WC_REM_OP_ERR => ("remote operation error", "the other side's NIC could not access its memory"),
            IBV_WC_RETRY_EXC_ERR => (
                "transport retry counter exceeded",
                "the other side's NIC does not respond: is the link up, are LID and GID correct, is its program running?",
            ),
            IBV_WC_RNR_RETRY_EXC_ERR => ("receiver not ready", "the other side posts no receives"),
            _ => ("failed", "see ibv_poll_cq(3)"),
        };
        write!(
            f,
            "{what} (status {}, vendor code {:#x}): {remedy}",
            self.status, self.vendor
        )
    }
}

/// A completion queue with its completion channel.
///
/// # Invariants
///
/// `raw` and `channel` exist until this is dropped; `raw` uses `channel`.
pub struct Completions {
    raw: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
    _nic: Arc<Nic>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for Completions {}
// SAFETY: as for `Nic`.
unsafe impl Sync for Completions {}

impl Completions {
    /// Creates a queue for `entries` completions.
    ///
    /// # Errors
    ///
    /// EINVAL if the NIC does not support queues of this size, ENOMEM.
    pub fn new(nic: &Arc<Nic>, entries: u32) -> io::Result<Arc<Self>> {
        let entries = libc::c_int::try_from(entries).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // SAFETY: by its invariant the context is open; the channel is destroyed if the queue cannot be created.
        unsafe {
            let channel = ffi::ibv_create_comp_channel(nic.raw.as_ptr());
            let channel = NonNull::new(channel).ok_or_else(io::Error::last_os_error)?;
            let raw = ffi::ibv_create_cq(nic.raw.as_ptr(), entries, ptr::null_mut(), channel.as_ptr(), 0);
            let Some(raw) = NonNull::new(raw) else {
                let error = io::Error::last_os_error();
                ffi::ibv_destroy_comp_channel(channel.as_ptr());
                return Err(error);
            };
            // INVARIANT: both were created above.
            Ok(Arc::new(Self {
                raw,
                channel,
                _nic: nic.clone(),
            }))
        }
    }

    /// Polls completions, at most 64.
    ///
    /// # Errors
    ///
    /// EIO if the queue is in error.
    pub fn poll(&self, into: &mut Vec<Completion>) -> io::Result<usize> {
        const MAX: usize = 64;
        let mut list = [const { mem::MaybeUninit::<ffi::ibv_wc>::zeroed() }; MAX];
        // SAFETY: the queue exists by the invariant; the list has as many entries as the call may write.
        let count = unsafe { ffi::ibv_poll_cq(self.raw.as_ptr(), MAX as i32, list.as_mut_ptr().cast()) };
        let count = usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(libc::EIO))?;
        for done in &list[..count] {
            // SAFETY: all zeros, the initial value, is valid for the structure, and ibv_poll_cq() wrote the first
            // `count` entries.
            let done = unsafe { &*done.as_ptr() };
            let failed = done.status != ffi::ibv_wc_status::IBV_WC_SUCCESS;
            let with_immediate = done.wc_flags & ffi::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
            // SAFETY: both fields of the union are integers of the same size.
            let immediate = u32::from_be(unsafe { done.imm_data_invalidated_rkey_union.imm_data });
            into.push(Completion {
                id: done.wr_id,
                failure: failed.then_some(Failure {
                    status: done.status,
                    vendor: done.vendor_err,
                }),
                bytes: done.byte_len,
                immediate: (!failed && with_immediate).then_some(immediate),
            });
        }
        Ok(count)
    }

    /// Requests an event for the next completion. Completions before the call cause no event: poll again after it.
    ///
    /// # Errors
    ///
    /// The queue is in error.
    pub fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue exists by the invariant.
        errno(unsafe { ffi::ibv_req_notify_cq(self.raw.as_ptr(), 0) })
    }

    fn fd(&self) -> RawFd {
        // SAFETY: the channel exists by the invariant.
        unsafe { self.channel.as_ref() }.fd
    }

    /// Waits for a requested event, at most for `limit`. Returns whether an event arrived.
    ///
    /// # Errors
    ///
    /// The completion channel failed.
    pub fn wait(&self, limit: Duration) -> io::Result<bool> {
        // SAFETY: the channel, and so its descriptor, exists for the lifetime of the borrow.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd()) };
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        // A duration that the kernel's type cannot represent means no limit.
        let limit = Timespec::try_from(limit).ok();
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) | Err(Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists by the invariant. poll() reported an event, and only this queue uses the channel.
        // The event is acknowledged to its queue.
        unsafe {
            errno(ffi::ibv_get_cq_event(self.channel.as_ptr(), &mut queue, &mut context))?;
            ffi::ibv_ack_cq_events(queue, 1);
        }
        Ok(true)
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: both exist by the invariant. Queue pairs hold an `Arc` of this and are already dropped. All events
        // were acknowledged in `wait()`. The queue is destroyed before its channel.
        unsafe {
            ffi::ibv_destroy_cq(self.raw.as_ptr());
            ffi::ibv_destroy_comp_channel(self.channel.as_ptr());
        }
    }
}

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

/// A work request for the send queue. Each is signaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Id in the completion.
    pub id: u64,
    /// Range of this side's memory.
    pub local: Segment,
    /// The operation.
    pub work: Work,
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

/// Retransmission parameters of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Retries {
    /// Timeout for an acknowledgement: 4.096 us * 2^timeout.
    pub timeout: u8,
    /// Maximum number of retransmissions of a request.
    pub retries: u8,
}

impl QueuePair {
    /// Creates a queue pair for these numbers of outstanding sends and receives.
    ///
    /// # Errors
    ///
    /// EINVAL or ENOMEM if the NIC does not support queues of this size.
    pub fn new(domain: &Arc<Domain>, completions: &Arc<Completions>, sends: u32, receives: u32) -> io::Result<Self> {
        // SAFETY: all zeros is valid for the structure: null pointers and integers.
        let mut init: ffi::ibv_qp_init_attr = unsafe { mem::zeroed() };
        init.send_cq = completions.raw.as_ptr();
        init.recv_cq = completions.raw.as_ptr();
        init.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
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

    /// Returns the completion queue.
    pub fn completions(&self) -> &Arc<Completions> {
        &self.completions
    }

    /// Returns the protection domain.
    pub fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    fn modify(&self, attr: &mut ffi::ibv_qp_attr, mask: &[ffi::ibv_qp_attr_mask]) -> io::Result<()> {
        let mask = mask.iter().fold(0, |all, one| all | one.0);
        // SAFETY: exists by the invariant; the mask names the fields that are set.
        errno(unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), attr, mask as libc::c_int) })
    }

    /// Connects to the peer's queue pair. After this the queue pair can send and receive.
    ///
    /// # Errors
    ///
    /// EINVAL if the peer's address does not fit this NIC; on Ethernet ETIMEDOUT if it cannot be resolved.
    pub fn connect(&self, own: &Endpoint, gid_index: u8, other: &Endpoint, retries: Retries) -> io::Result<()> {
        use ffi::ibv_qp_attr_mask as mask;
        // SAFETY: all zeros is valid for the structure: integers and unions of integers.
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
        // libibverbs requires. The NIC checks the addresses, see the module documentation.
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

fn sge(segment: Segment) -> ffi::ibv_sge {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nics_have_names_or_the_list_is_an_error() {
        // A build machine has no NIC; existing NICs have names.
        match nics() {
            Ok(names) => assert!(names.iter().all(|name| !name.is_empty())),
            Err(error) => assert!(error.raw_os_error().is_some(), "{error}"),
        }
        if let Ok(nic) = Nic::open("no such NIC") {
            assert!(nic.is_none());
        }
    }

    #[test]
    fn failures_have_a_hint() {
        for status in 1..24 {
            let text = Failure { status, vendor: 0x51 }.to_string();
            assert!(text.contains("0x51") && text.contains(": "), "{text}");
        }
        let gone = Failure {
            status: ffi::ibv_wc_status::IBV_WC_REM_ACCESS_ERR,
            vendor: 0,
        };
        assert!(gone.to_string().starts_with("remote access error (status 10"), "{gone}");
    }
}
