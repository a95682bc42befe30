// SPDX-License-Identifier: MIT OR Apache-2.0

//! Objects of the RDMA core by its ioctl: completion queues, queue pairs, and doorbell pages whose memory the program
//! chooses. libibverbs has no functions for this.
//!
//! Numbers and structures: `include/uapi/rdma/rdma_user_ioctl_cmds.h`, `ib_user_ioctl_cmds.h`, `ib_user_ioctl_verbs.h`,
//! `ib_user_verbs.h`, `mlx5_user_ioctl_cmds.h`, `mlx5-abi.h`. Attributes for dma-bufs exist since Linux 7.2.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::AccessFlags;

use super::{DoorbellPage, HostMemory};
use crate::error::{Error, Result};
use crate::region::Memory;

/// `RDMA_VERBS_IOCTL`: `_IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)` with 24 bytes.
const RDMA_VERBS_IOCTL: libc::c_ulong = 0xc018_1b01;
/// `RDMA_DRIVER_MLX5`.
const DRIVER_MLX5: u32 = 1;
/// `UVERBS_ATTR_F_MANDATORY`: a kernel that does not know the attribute refuses the call.
const MANDATORY: u16 = 1;
/// First number of a driver's own objects, methods, and attributes (`UVERBS_ID_DRIVER_NS`).
const DRIVER: u16 = 0x1000;

/// Objects (`UVERBS_OBJECT_*`, `MLX5_IB_OBJECT_UAR`).
const OBJECT_DEVICE: u16 = 0;
const OBJECT_CQ: u16 = 3;
const OBJECT_QP: u16 = 4;
const OBJECT_DMABUF: u16 = 18;
const OBJECT_UAR: u16 = DRIVER + 8;
/// Attributes of the driver's part of a request and response (`UVERBS_ATTR_UHW_IN`, `UVERBS_ATTR_UHW_OUT`).
const UHW_IN: u16 = DRIVER;
const UHW_OUT: u16 = DRIVER + 1;
/// `MLX5_IB_ATTR_CREATE_CQ_UAR_INDEX`, `MLX5_IB_ATTR_CREATE_CQ_DBR_BUF_UMEM`, `MLX5_IB_ATTR_CREATE_QP_DBR_BUF_UMEM`.
const CQ_UAR_INDEX: u16 = DRIVER + 2;
const CQ_RECORD_UMEM: u16 = DRIVER + 3;
const QP_RECORD_UMEM: u16 = DRIVER + 2;
/// `UVERBS_ATTR_CREATE_CQ_BUF_UMEM`, `UVERBS_ATTR_CREATE_QP_BUF_UMEM`.
const CQ_BUFFER_UMEM: u16 = 12;
const QP_BUFFER_UMEM: u16 = 15;
/// `MLX5_QP_FLAG_UAR_PAGE_INDEX`.
const QP_FLAG_UAR_PAGE_INDEX: u32 = 1 << 10;
/// The user index of a queue pair that has none (`MLX5_IB_DEFAULT_UIDX`).
const NO_USER_INDEX: u32 = 0xff_ffff;
/// `IB_USER_VERBS_CMD_QUERY_QP`, `IB_USER_VERBS_CMD_MODIFY_QP`.
const CMD_QUERY_QP: u64 = 25;
const CMD_MODIFY_QP: u64 = 26;

/// One attribute of a call: `struct ib_uverbs_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Attribute {
    id: u16,
    len: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// `struct ib_uverbs_ioctl_hdr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Header {
    length: u16,
    object: u16,
    method: u16,
    count: u16,
    reserved1: u64,
    driver: u32,
    reserved2: u32,
}

const MAX_ATTRIBUTES: usize = 16;

/// A call with space for its attributes.
#[repr(C)]
struct Frame {
    header: Header,
    attributes: [Attribute; MAX_ATTRIBUTES],
}

const _: () = assert!(size_of::<Attribute>() == 16 && size_of::<Header>() == 24);

/// The value of an attribute.
enum Value<'a> {
    /// Handle of an existing object.
    Handle(u32),
    /// A new object: the kernel returns its handle.
    NewHandle(&'a mut u32),
    /// A new descriptor.
    NewFd(&'a mut RawFd),
    /// Bytes for the kernel.
    In(&'a [u8]),
    /// Bytes that the kernel writes.
    Out(&'a mut [u8]),
}

/// Calls a method of the RDMA core.
fn call(file: BorrowedFd<'_>, object: u16, method: u16, values: &mut [(u16, Value<'_>)]) -> io::Result<()> {
    assert!(values.len() <= MAX_ATTRIBUTES, "too many attributes");
    let none = Attribute {
        id: 0,
        len: 0,
        flags: 0,
        reserved: 0,
        data: 0,
    };
    let mut attributes = [none; MAX_ATTRIBUTES];
    for (attribute, (id, value)) in attributes.iter_mut().zip(values.iter_mut()) {
        // Not truncated: no structure of these calls has 64 KiB.
        let (len, data) = match value {
            Value::Handle(handle) => (0, u64::from(*handle)),
            Value::NewHandle(_) | Value::NewFd(_) => (0, 0),
            Value::In(bytes) if bytes.len() <= 8 => {
                let mut inline = [0; 8];
                inline[..bytes.len()].copy_from_slice(bytes);
                (bytes.len() as u16, u64::from_ne_bytes(inline))
            }
            Value::In(bytes) => (bytes.len() as u16, bytes.as_ptr() as u64),
            Value::Out(bytes) => (bytes.len() as u16, bytes.as_mut_ptr() as u64),
        };
        *attribute = Attribute {
            id: *id,
            len,
            flags: MANDATORY,
            reserved: 0,
            data,
        };
    }
    let bytes = size_of::<Header>() + values.len() * size_of::<Attribute>();
    let mut frame = Frame {
        header: Header {
            length: bytes as u16,
            object,
            method,
            count: values.len() as u16,
            reserved1: 0,
            driver: DRIVER_MLX5,
            reserved2: 0,
        },
        attributes,
    };
    loop {
        // SAFETY: the header has the number of attributes that follow it in the frame. Attributes of more than 8 bytes have
        // pointers to the slices in `values`, which live until the call returns; those that the kernel writes are borrowed
        // mutably.
        let returned = unsafe { libc::ioctl(file.as_raw_fd(), RDMA_VERBS_IOCTL, &mut frame as *mut Frame) };
        if returned == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    for (attribute, (_, value)) in frame.attributes.iter().zip(values.iter_mut()) {
        // Truncated to what the kernel stores: 32-bit handles and descriptors.
        match value {
            Value::NewHandle(handle) => **handle = attribute.data as u32,
            Value::NewFd(fd) => **fd = attribute.data as RawFd,
            _ => {}
        }
    }
    Ok(())
}

/// Destroys an object. There is nothing to do about an error: the kernel destroys the object with the context.
fn destroy(context: &Context, object: u16, method: u16, handle_attribute: u16, handle: u32, response: usize) {
    let mut bytes = vec![0; response];
    let mut values = vec![(handle_attribute, Value::Handle(handle))];
    if response > 0 {
        values.push((handle_attribute + 1, Value::Out(&mut bytes)));
    }
    let _ = call(context.file(), object, method, &mut values);
}

fn failed(what: impl fmt::Display) -> impl FnOnce(io::Error) -> Error {
    let what = what.to_string();
    move |error| Error::Kernel { what, error }
}

/// What the memory of a [`Place`] is.
#[derive(Debug, Clone)]
enum Backing {
    Host(Arc<HostMemory>),
    DmaBuf(Arc<OwnedFd>),
}

/// A part of a memory for a queue or a record.
///
/// # Invariants
///
/// In host memory, `len` bytes from byte `start` are inside the memory. The kernel checks the range of a dma-buf.
#[derive(Debug, Clone)]
pub struct Place {
    backing: Backing,
    start: usize,
    len: usize,
}

impl Place {
    /// Returns a part of host memory.
    ///
    /// # Panics
    ///
    /// The part is not inside the memory.
    pub fn host(memory: &Arc<HostMemory>, start: usize, len: usize) -> Self {
        let inside = start.checked_add(len).is_some_and(|end| end <= memory.len());
        assert!(inside, "{len} bytes at {start} are not inside {memory:?}");
        // INVARIANT: checked above.
        Self {
            backing: Backing::Host(memory.clone()),
            start,
            len,
        }
    }

    /// Returns a part of a dma-buf, which must be exported pinned.
    pub fn dmabuf(fd: &Arc<OwnedFd>, start: usize, len: usize) -> Self {
        Self {
            backing: Backing::DmaBuf(fd.clone()),
            start,
            len,
        }
    }

    /// Returns the address for the driver's structures: 0 if the memory is a dma-buf.
    fn address(&self) -> u64 {
        match &self.backing {
            Backing::Host(memory) => memory.address() + self.start as u64,
            Backing::DmaBuf(_) => 0,
        }
    }

    /// Returns a `struct ib_uverbs_buffer_desc`, if the memory is a dma-buf.
    fn descriptor(&self) -> Option<[u8; 32]> {
        let Backing::DmaBuf(fd) = &self.backing else {
            return None;
        };
        let mut bytes = [0; 32];
        bytes[4..8].copy_from_slice(&fd.as_raw_fd().to_ne_bytes());
        bytes[16..24].copy_from_slice(&(self.start as u64).to_ne_bytes());
        bytes[24..32].copy_from_slice(&(self.len as u64).to_ne_bytes());
        Some(bytes)
    }

    /// Checks that the NIC does not access bytes outside of the place.
    fn require(&self, what: &str, bytes: usize) -> Result<()> {
        if self.len >= bytes {
            return Ok(());
        }
        Err(Error::Argument(format!(
            "the {what} has {} bytes and needs {bytes}",
            self.len
        )))
    }
}

/// An open mlx5 device and a protection domain. Objects of this module keep it.
#[derive(Debug)]
pub struct Context {
    domain: Arc<ProtectionDomain>,
}

impl Context {
    /// Uses the device and the domain of the crate sideway. If the device is not an mlx5 NIC, the kernel refuses the calls
    /// of this module with EINVAL.
    pub fn new(domain: Arc<ProtectionDomain>) -> Arc<Self> {
        Arc::new(Self { domain })
    }

    /// Returns the protection domain.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    fn file(&self) -> BorrowedFd<'_> {
        // SAFETY: the domain lives as long as this value, keeps its context open, and so its descriptor.
        unsafe {
            let context = self.domain.pd().as_ref().context;
            BorrowedFd::borrow_raw((*context).cmd_fd)
        }
    }

    fn domain_handle(&self) -> u32 {
        // SAFETY: the domain lives as long as this value.
        unsafe { self.domain.pd().as_ref().handle }
    }
}

/// A doorbell page of the NIC (UAR) for one queue pair and its completion queues.
#[derive(Debug)]
pub struct Uar {
    context: Arc<Context>,
    handle: u32,
    page_id: u32,
    mmap_offset: u64,
    page: Arc<DoorbellPage>,
}

impl Uar {
    /// Allocates a page and maps it.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EINVAL if the NIC is not an mlx5 NIC, ENOMEM.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        const NON_CACHED: u64 = 1;
        let (mut handle, mut id, mut length, mut offset) = (0, [0; 4], [0; 4], [0; 8]);
        let kind = NON_CACHED.to_ne_bytes();
        call(
            context.file(),
            OBJECT_UAR,
            DRIVER,
            &mut [
                (DRIVER, Value::NewHandle(&mut handle)),
                (DRIVER + 1, Value::In(&kind)),
                (DRIVER + 2, Value::Out(&mut offset)),
                (DRIVER + 3, Value::Out(&mut length)),
                (DRIVER + 4, Value::Out(&mut id)),
            ],
        )
        .map_err(failed("allocating a doorbell page"))?;
        let mmap_offset = u64::from_ne_bytes(offset);
        let page = DoorbellPage::new(context.file(), mmap_offset).map_err(|error| {
            destroy(context, OBJECT_UAR, DRIVER + 1, DRIVER, handle, 0);
            failed("mapping a doorbell page")(error)
        })?;
        Ok(Arc::new(Self {
            context: context.clone(),
            handle,
            page_id: u32::from_ne_bytes(id),
            mmap_offset,
            page: Arc::new(page),
        }))
    }

    /// Returns the page, to which doorbells are stored.
    pub fn page(&self) -> &Arc<DoorbellPage> {
        &self.page
    }

    /// Exports the page as a dma-buf of 4096 bytes, by which another device can ring. The importer must attach dynamically
    /// and allow peer-to-peer. When this value and the last descriptor are dropped, the kernel revokes the dma-buf.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EPROTONOSUPPORT or EOPNOTSUPP before Linux 7.2.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut fd = -1;
        let offset = self.mmap_offset.to_ne_bytes();
        call(
            self.context.file(),
            OBJECT_DMABUF,
            0,
            &mut [(0, Value::NewFd(&mut fd)), (1, Value::In(&offset))],
        )
        .map_err(failed("exporting a doorbell page as a dma-buf"))?;
        // SAFETY: the kernel created the descriptor in the call above, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Uar {
    fn drop(&mut self) {
        destroy(&self.context, OBJECT_UAR, DRIVER + 1, DRIVER, self.handle, 0);
    }
}

/// A completion queue of the kernel, without the program's part.
#[derive(Debug)]
pub struct KernelCq {
    context: Arc<Context>,
    handle: u32,
    cqn: u32,
    // Kept while the NIC writes to them.
    _entries: Place,
    _record: Place,
    _uar: Arc<Uar>,
}

impl KernelCq {
    /// Creates a queue for `size` entries of 64 bytes in `entries`.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EINVAL for a size that the NIC does not support, or memory that is too short or not aligned to
    /// pages; EOPNOTSUPP for a dma-buf that is not exported pinned; EPROTONOSUPPORT for a dma-buf before Linux 7.2.
    pub fn new(context: &Arc<Context>, size: u32, entries: Place, record: Place, uar: &Arc<Uar>) -> Result<Self> {
        if size < 2 || !size.is_power_of_two() {
            return Err(Error::Argument(format!(
                "a completion queue of {size} entries: a power of two is needed, at least 2"
            )));
        }
        entries.require("buffer of a completion queue", size as usize * 64)?;
        record.require("record of a completion queue", 8)?;
        // struct mlx5_ib_create_cq: buf_addr, db_addr, cqe_size, ...
        let mut request = [0; 32];
        request[..8].copy_from_slice(&entries.address().to_ne_bytes());
        request[8..16].copy_from_slice(&record.address().to_ne_bytes());
        request[16..20].copy_from_slice(&64_u32.to_ne_bytes());
        let (mut handle, mut granted, mut response) = (0, [0; 4], [0; 8]);
        // The driver adds an entry and rounds up to a power of two. The NIC would write past a buffer of `size` entries.
        let (size_bytes, uar_index) = ((size - 1).to_ne_bytes(), uar.page_id.to_ne_bytes());
        let (entries_umem, record_umem) = (entries.descriptor(), record.descriptor());
        let mut values = vec![
            (0, Value::NewHandle(&mut handle)),
            (1, Value::In(&size_bytes)),
            (2, Value::In(&[0; 8])),
            (4, Value::In(&[0; 4])),
            (6, Value::Out(&mut granted)),
            (UHW_IN, Value::In(&request)),
            (UHW_OUT, Value::Out(&mut response)),
            (CQ_UAR_INDEX, Value::In(&uar_index)),
        ];
        if let Some(umem) = &entries_umem {
            values.push((CQ_BUFFER_UMEM, Value::In(umem)));
        }
        if let Some(umem) = &record_umem {
            values.push((CQ_RECORD_UMEM, Value::In(umem)));
        }
        call(context.file(), OBJECT_CQ, 0, &mut values)
            .map_err(failed(format!("creating a completion queue of {size} entries")))?;
        Ok(Self {
            context: context.clone(),
            handle,
            cqn: u32::from_ne_bytes([response[0], response[1], response[2], response[3]]),
            _entries: entries,
            _record: record,
            _uar: uar.clone(),
        })
    }

    /// Returns the queue's number.
    pub fn cqn(&self) -> u32 {
        self.cqn
    }
}

impl Drop for KernelCq {
    fn drop(&mut self) {
        destroy(&self.context, OBJECT_CQ, 1, 0, self.handle, 8);
    }
}

/// Sizes of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct QpSizes {
    /// Basic blocks of the send queue.
    pub send_blocks: u32,
    /// Entries of the receive queue, of 64 bytes.
    pub receive_entries: u32,
}

/// States of a queue pair (`enum ib_qp_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum QpState {
    /// Not usable.
    Reset = 0,
    /// Receives can be posted.
    Init = 1,
    /// Can receive.
    ReadyToReceive = 2,
    /// Can send and receive.
    ReadyToSend = 3,
    /// The send queue drains.
    SendDrain = 4,
    /// The send queue is in error.
    SendError = 5,
    /// Every work request is flushed.
    Error = 6,
}

/// Attributes of a state change. `None` means unchanged.
#[derive(Debug, Clone, Copy, Default)]
pub struct QpChange {
    /// Port, P_Key index 0.
    pub port: Option<u8>,
    /// Remote access that the queue pair allows (`IB_ACCESS_*`).
    pub access: Option<u32>,
    /// Queue key of datagrams.
    pub qkey: Option<u32>,
    /// The other side of a connection.
    pub route: Option<Route>,
    /// First packet number that this side sends.
    pub send_psn: Option<u32>,
    /// Timeout and retries of a connection, and outstanding READs.
    pub retries: Option<Retries>,
}

/// Attributes of the other side of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// Number of the other side's queue pair.
    pub qpn: u32,
    /// Local identifier (LID) of its port.
    pub lid: u16,
    /// GID of its port, and the index of this side's GID; `None` without a global route.
    pub gid: Option<([u8; 16], u8)>,
    /// This side's port.
    pub port: u8,
    /// Path MTU (`enum ib_mtu`).
    pub mtu: u8,
    /// First packet number that the other side sends.
    pub psn: u32,
    /// READs and atomics that this side answers at the same time.
    pub reads: u8,
}

/// Attributes of a connection that sends.
#[derive(Debug, Clone, Copy)]
pub struct Retries {
    /// Timeout of an acknowledgement: 4.096 us << timeout.
    pub timeout: u8,
    /// Retransmissions.
    pub retries: u8,
    /// Retries while the receiver is not ready; 7 is unlimited.
    pub rnr_retries: u8,
    /// READs and atomics that this side requests at the same time.
    pub reads: u8,
}

/// A queue pair of the kernel, without the program's part.
#[derive(Debug)]
pub struct KernelQp {
    context: Arc<Context>,
    handle: u32,
    qpn: u32,
    // Kept while the NIC reads them, and dropped after the queue pair.
    _queue: Place,
    _record: Place,
    _uar: Arc<Uar>,
    _cqs: [Arc<KernelCq>; 2],
}

/// What a queue pair is created with.
#[derive(Debug)]
pub struct QpSource<'a> {
    /// `true` for datagrams, else a reliable connection.
    pub datagram: bool,
    /// Sizes.
    pub sizes: QpSizes,
    /// The buffer: the receive queue, then the send queue.
    pub queue: Place,
    /// The doorbell record.
    pub record: Place,
    /// The doorbell page.
    pub uar: &'a Arc<Uar>,
    /// Completion queue of sends.
    pub send_cq: &'a Arc<KernelCq>,
    /// Completion queue of receives.
    pub receive_cq: &'a Arc<KernelCq>,
}

impl KernelQp {
    /// Creates a queue pair.
    ///
    /// # Errors
    ///
    /// Those of [`KernelCq::new`].
    pub fn new(context: &Arc<Context>, source: QpSource<'_>) -> Result<Self> {
        let QpSizes {
            send_blocks,
            receive_entries,
        } = source.sizes;
        let bytes = (send_blocks as usize + receive_entries as usize) * 64;
        source.queue.require("buffer of a queue pair", bytes)?;
        source.record.require("record of a queue pair", 8)?;
        // struct mlx5_ib_create_qp: buf_addr, db_addr, sq_wqe_count, rq_wqe_count, rq_wqe_shift, flags, uidx, bfreg_index,
        // sq_buf_addr, ece_options, dci_streams, reserved.
        let mut request = [0; 64];
        request[..8].copy_from_slice(&source.queue.address().to_ne_bytes());
        request[8..16].copy_from_slice(&source.record.address().to_ne_bytes());
        let words = [
            send_blocks,
            receive_entries,
            6,
            QP_FLAG_UAR_PAGE_INDEX,
            NO_USER_INDEX,
            source.uar.page_id,
        ];
        for (bytes, word) in request[16..40].chunks_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        // struct ib_uverbs_qp_cap: max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data.
        let mut capacity = [0; 20];
        for (bytes, word) in capacity.chunks_mut(4).zip([send_blocks, receive_entries, 4, 4, 0]) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        // IB_UVERBS_QPT_RC, IB_UVERBS_QPT_UD.
        let kind: u64 = if source.datagram { 4 } else { 2 };
        let kind = kind.to_ne_bytes();
        let (mut handle, mut number, mut granted, mut response) = (0, [0; 4], [0; 20], [0; 40]);
        let (queue_umem, record_umem) = (source.queue.descriptor(), source.record.descriptor());
        let mut values = vec![
            (0, Value::NewHandle(&mut handle)),
            (2, Value::Handle(context.domain_handle())),
            (4, Value::Handle(source.send_cq.handle)),
            (5, Value::Handle(source.receive_cq.handle)),
            (7, Value::In(&[0; 8])),
            (8, Value::In(&capacity)),
            (9, Value::In(&kind)),
            (13, Value::Out(&mut granted)),
            (14, Value::Out(&mut number)),
            (UHW_IN, Value::In(&request)),
            (UHW_OUT, Value::Out(&mut response)),
        ];
        if let Some(umem) = &queue_umem {
            values.push((QP_BUFFER_UMEM, Value::In(umem)));
        }
        if let Some(umem) = &record_umem {
            values.push((QP_RECORD_UMEM, Value::In(umem)));
        }
        call(context.file(), OBJECT_QP, 0, &mut values).map_err(failed("creating a queue pair"))?;
        Ok(Self {
            context: context.clone(),
            handle,
            qpn: u32::from_ne_bytes(number),
            _queue: source.queue,
            _record: source.record,
            _uar: source.uar.clone(),
            _cqs: [source.send_cq.clone(), source.receive_cq.clone()],
        })
    }

    /// Returns the queue pair's number.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Changes the state.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EINVAL if the state does not allow the change, or attributes are missing.
    pub fn modify(&self, state: QpState, change: &QpChange) -> Result<()> {
        let request = modify_request(self.handle, state, change);
        let command = CMD_MODIFY_QP.to_ne_bytes();
        call(
            self.context.file(),
            OBJECT_DEVICE,
            0,
            &mut [(0, Value::In(&request)), (2, Value::In(&command))],
        )
        .map_err(failed(format!("changing queue pair {:#x} to {state:?}", self.qpn)))
    }

    /// Queries the state from the NIC. `None` for a state that this version does not know.
    ///
    /// # Errors
    ///
    /// [`Error::Kernel`]: EIO if the NIC was removed.
    pub fn state(&self) -> Result<Option<QpState>> {
        // struct ib_uverbs_query_qp: response, qp_handle, attr_mask (IB_QP_STATE).
        let mut request = [0; 16];
        request[8..12].copy_from_slice(&self.handle.to_ne_bytes());
        request[12..16].copy_from_slice(&1_u32.to_ne_bytes());
        let command = CMD_QUERY_QP.to_ne_bytes();
        let mut response = [0; 256];
        call(
            self.context.file(),
            OBJECT_DEVICE,
            0,
            &mut [
                (0, Value::In(&request)),
                (1, Value::Out(&mut response)),
                (2, Value::In(&command)),
            ],
        )
        .map_err(failed(format!("querying queue pair {:#x}", self.qpn)))?;
        // Offset of qp_state in struct ib_uverbs_query_qp_resp.
        const STATE: usize = 108;
        use QpState::{Error, Init, ReadyToReceive, ReadyToSend, Reset, SendDrain, SendError};
        let states = [Reset, Init, ReadyToReceive, ReadyToSend, SendDrain, SendError, Error];
        Ok(states.into_iter().find(|state| *state as u8 == response[STATE]))
    }
}

impl Drop for KernelQp {
    fn drop(&mut self) {
        destroy(&self.context, OBJECT_QP, 1, 0, self.handle, 4);
    }
}

/// Returns a `struct ib_uverbs_modify_qp`.
fn modify_request(handle: u32, state: QpState, change: &QpChange) -> [u8; 112] {
    // Bits of `enum ib_qp_attr_mask`.
    const STATE: u32 = 1;
    const ACCESS: u32 = 1 << 3;
    const PKEY_INDEX: u32 = 1 << 4;
    const PORT: u32 = 1 << 5;
    const QKEY: u32 = 1 << 6;
    /// Address vector, path MTU, number of the other queue pair, receive PSN, and READs that are answered, RNR timer.
    const ROUTE: u32 = (1 << 7) | (1 << 8) | (1 << 20) | (1 << 12) | (1 << 17) | (1 << 15);
    /// Timeout, retries, RNR retries, READs that are requested.
    const RETRIES: u32 = (1 << 9) | (1 << 10) | (1 << 11) | (1 << 13);
    const SEND_PSN: u32 = 1 << 16;

    let mut bytes = [0; 112];
    let mut mask = STATE;
    let mut word = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    word(64, handle);
    if let Some(qkey) = change.qkey {
        mask |= QKEY;
        word(72, qkey);
    }
    if let Some(psn) = change.send_psn {
        mask |= SEND_PSN;
        word(80, psn);
    }
    if let Some(access) = change.access {
        mask |= ACCESS;
        word(88, access);
    }
    if let Some(route) = &change.route {
        mask |= ROUTE;
        word(76, route.psn);
        word(84, route.qpn);
    }
    if change.port.is_some() {
        mask |= PORT | PKEY_INDEX;
    }
    if change.retries.is_some() {
        mask |= RETRIES;
    }
    word(68, mask);
    bytes[96] = state as u8;
    bytes[104] = change.port.unwrap_or(0);
    if let Some(route) = &change.route {
        // struct ib_uverbs_qp_dest.
        bytes[20..22].copy_from_slice(&route.lid.to_ne_bytes());
        bytes[31] = route.port;
        if let Some((gid, index)) = route.gid {
            const HOPS: u8 = 64;
            bytes[..16].copy_from_slice(&gid);
            bytes[24] = index;
            bytes[25] = HOPS;
            bytes[30] = 1;
        }
        bytes[98] = route.mtu;
        bytes[102] = route.reads;
        // 0.64 ms.
        bytes[103] = 12;
    }
    if let Some(retries) = &change.retries {
        bytes[101] = retries.reads;
        bytes[105] = retries.timeout;
        bytes[106] = retries.retries;
        bytes[107] = retries.rnr_retries;
    }
    bytes
}

/// Host memory that is registered with a NIC.
pub struct HostRegistration {
    // Fields are dropped in this order: the registration before the memory.
    region: Arc<sideway::ibverbs::memory_region::MemoryRegion>,
    _memory: Arc<HostMemory>,
}

impl fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRegistration")
            .field("lkey", &self.lkey())
            .finish_non_exhaustive()
    }
}

impl HostRegistration {
    /// Registers a whole memory, for all kinds of access.
    ///
    /// # Errors
    ///
    /// [`Error::Verbs`]: more memory than `ulimit -l` permits.
    pub fn new(domain: &Arc<ProtectionDomain>, memory: &Arc<HostMemory>) -> Result<Self> {
        let access =
            AccessFlags::LocalWrite | AccessFlags::RemoteWrite | AccessFlags::RemoteRead | AccessFlags::RemoteAtomic;
        let (start, len) = (memory.address() as usize, memory.len());
        // SAFETY: this value keeps the memory mapped until the region is deregistered. No reference to the memory exists,
        // so the NIC may change it.
        let region = unsafe { domain.reg_mr(start, len, access) };
        let region = region.map_err(|error| Error::Verbs {
            what: format!("registering {len} bytes of host memory"),
            why: error.to_string(),
        })?;
        Ok(Self {
            region,
            _memory: memory.clone(),
        })
    }

    /// Returns the local key.
    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// Returns the remote key.
    pub fn rkey(&self) -> u32 {
        self.region.rkey()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn calls_on_other_files_fail_with_the_errno() {
        let file = File::open("/dev/null").unwrap();
        let error = call(file.as_fd(), OBJECT_CQ, 0, &mut [(0, Value::Handle(1))]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }

    #[test]
    fn a_state_change_has_the_kernels_layout() {
        let change = QpChange {
            port: Some(1),
            access: Some(7),
            route: Some(Route {
                qpn: 0x123,
                lid: 9,
                gid: Some(([5; 16], 3)),
                port: 1,
                mtu: 5,
                psn: 0x77,
                reads: 16,
            }),
            ..QpChange::default()
        };
        let bytes = modify_request(0x42, QpState::ReadyToReceive, &change);
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((word(64), word(76), word(84), word(88)), (0x42, 0x77, 0x123, 7));
        assert_eq!(
            word(68),
            1 | 8 | 16 | 32 | 0x80 | 0x100 | 0x1000 | 0x8000 | 0x2_0000 | 0x10_0000
        );
        assert_eq!((bytes[0], bytes[20], bytes[24], bytes[30], bytes[31]), (5, 9, 3, 1, 1));
        assert_eq!((bytes[96], bytes[98], bytes[102], bytes[104]), (2, 5, 16, 1));
        let plain = modify_request(1, QpState::Error, &QpChange::default());
        assert_eq!((plain[68], plain[96]), (1, 6));
    }

    #[test]
    fn only_a_dma_buf_has_a_descriptor() {
        let memory = Arc::new(HostMemory::new(1).unwrap());
        let fd = Arc::new(OwnedFd::from(File::open("/dev/null").unwrap()));
        let host = Place::host(&memory, 64, 128);
        assert_eq!((host.descriptor(), host.address()), (None, memory.address() + 64));
        let device = Place::dmabuf(&fd, 64, 128);
        let bytes = device.descriptor().unwrap();
        assert_eq!((device.address(), bytes[16], bytes[24]), (0, 64, 128));
        assert_eq!(bytes[4..8], fd.as_raw_fd().to_ne_bytes());
        let error = device.require("record", 129).unwrap_err();
        assert_eq!(error.to_string(), "the record has 128 bytes and needs 129");
    }

    #[test]
    #[should_panic(expected = "not inside")]
    fn a_place_outside_of_its_memory_panics() {
        let _ = Place::host(&Arc::new(HostMemory::new(1).unwrap()), 4000, 128);
    }
}
