// SPDX-License-Identifier: MIT OR Apache-2.0

//! The C interface, and the only module with `unsafe`. cbindgen generates p2pmem-async.h from this file, so its doc comments
//! are for readers of p2pmem-async.h.
#![allow(unsafe_code, non_camel_case_types)]

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::IntoRawFd;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use p2pmem_async::endpoint::{Address, Endpoint};
use p2pmem_async::interpreter::Interpreter;
use p2pmem_async::memory::DataMemory;
use p2pmem_async::wqe::ReceiveRequest;
use p2pmem_c_sys::{capacity as check_capacity, copy_text, elements, input, last, output, run, store, store_all, take};
use p2pmem_c_sys::{text as c_text, Failure};

use crate::call::{self, failed, Code, Port};

/// The first active port of a NIC, with a protection domain.
pub struct p2pmem_async_port(Port);

/// A queue pair and its completion queues, one for sends and one for receives.
pub struct p2pmem_async_endpoint(Endpoint);

/// Registered memory for payload, signals, and counters.
pub struct p2pmem_async_memory(DataMemory);

/// Byte code: a list of operations.
pub struct p2pmem_async_program(Code);

/// The executor on the CPU.
pub struct p2pmem_async_interpreter(RwLock<Interpreter>);

/// Reliable connection.
pub const P2PMEM_ASYNC_TRANSPORT_RC: u32 = 1;
/// Unreliable datagrams, on InfiniBand only.
pub const P2PMEM_ASYNC_TRANSPORT_UD: u32 = 2;

/// Memory of the host.
pub const P2PMEM_ASYNC_MEMORY_HOST: u32 = 0;
/// A buffer of p2pmem near the NIC, in an accelerator.
pub const P2PMEM_ASYNC_MEMORY_ACCELERATOR: u32 = 1;

/// The peer executes P2PMEM_ASYNC_FENCE.
pub const P2PMEM_ASYNC_CAN_FENCE: u32 = 1;
/// The peer executes P2PMEM_ASYNC_STORE_DWORD.
pub const P2PMEM_ASYNC_CAN_STORE_DWORD: u32 = 2;
/// The peer executes P2PMEM_ASYNC_STORE_QWORD, as one access of 8 bytes.
pub const P2PMEM_ASYNC_CAN_STORE_QWORD: u32 = 4;
/// The peer executes P2PMEM_ASYNC_COPY_BLOCK.
pub const P2PMEM_ASYNC_CAN_COPY_BLOCK: u32 = 8;
/// The peer executes P2PMEM_ASYNC_POLL_AND.
pub const P2PMEM_ASYNC_CAN_POLL_AND: u32 = 16;
/// The peer executes P2PMEM_ASYNC_POLL_NOR.
pub const P2PMEM_ASYNC_CAN_POLL_NOR: u32 = 32;
/// The peer executes P2PMEM_ASYNC_POLL_GEQ.
pub const P2PMEM_ASYNC_CAN_POLL_GEQ: u32 = 64;
/// The peer executes all operations, as p2pmem_async_interpreter_run() does.
pub const P2PMEM_ASYNC_CAN_ALL: u32 = 127;

/// Options of an endpoint. Set all fields to 0 first, then the needed ones.
#[repr(C)]
pub struct p2pmem_async_endpoint_options {
    /// Name of the peer, the executor of the byte code, for error messages. NULL for "peer".
    pub peer: *const c_char,
    /// P2PMEM_ASYNC_CAN_* bits of the peer. A commit or a peek that the peer cannot execute is refused.
    pub capabilities: u32,
    /// The largest number of operations in one program, 0 for no limit.
    pub max_operations: u32,
    /// P2PMEM_ASYNC_TRANSPORT_*.
    pub transport: u32,
    /// Where the queues are, P2PMEM_ASYNC_MEMORY_*.
    pub queues: u32,
    /// Size of the send queue in blocks of 64 bytes: a power of two up to 32768, or 0 for 64. A work request takes 1 to 16.
    pub send_blocks: u32,
    /// Entries of the receive queue: a power of two up to 32768, or 0 for 64.
    pub receive_entries: u32,
    /// Entries of each completion queue: a power of two, or 0 for 64.
    pub completions: u32,
    /// Peeks of each completion queue that have not ended, or 0 for 64.
    pub peeks: u32,
    /// Queue key of datagrams, or 0 for 0x11111111.
    pub qkey: u32,
}

/// What the other side needs to reach an endpoint. Integers are in the byte order of the host.
#[repr(C)]
pub struct p2pmem_async_address {
    /// GID of the port.
    pub gid: [u8; 16],
    /// Number of the queue pair.
    pub qpn: u32,
    /// Queue key of datagrams.
    pub qkey: u32,
    /// First packet sequence number of a connection, 24 bits.
    pub psn: u32,
    /// Local identifier (LID) of the port; 0 on Ethernet.
    pub lid: u16,
    /// Path MTU (IBV_MTU_*).
    pub mtu: u8,
    /// 0.
    pub reserved: u8,
}

/// The receiver of a datagram.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct p2pmem_async_address_vector {
    /// Number of the other side's queue pair, 24 bits.
    pub qpn: u32,
    /// Queue key.
    pub qkey: u32,
    /// Local identifier (LID) of the other side's port.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Low bits of this side's LID.
    pub path_bits: u8,
    /// 1 if the datagram has a global route, the fields below; else 0.
    pub has_route: u8,
    /// Index of this side's GID.
    pub sgid_index: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// GID of the other side.
    pub dgid: [u8; 16],
}

/// A region: memory that byte code names by its id. The driver of a peer maps each region to the peer's own addresses.
#[repr(C)]
pub struct p2pmem_async_region {
    /// Id of the region in this process, never 0 and never used again.
    pub id: u32,
    /// P2PMEM_ASYNC_REGION_*, or 0 if this library does not know the kind.
    pub kind: u32,
    /// Address of the first byte in this process. Use volatile pointers: devices change the memory at any time. The
    /// doorbell page can only be written.
    pub cpu_address: *mut c_void,
    /// Length in bytes.
    pub size: usize,
    /// Offset in bytes of the first byte in the memory BAR of the accelerator that has the memory; UINT64_MAX if the region
    /// is not in an accelerator, or at several places of it.
    pub bar_offset: u64,
}

/// Send and receive queue of a queue pair. Byte code does not access it.
pub const P2PMEM_ASYNC_REGION_WORK_QUEUE: u32 = 1;
/// Doorbell record of a queue pair.
pub const P2PMEM_ASYNC_REGION_QP_RECORD: u32 = 2;
/// Entries of a completion queue.
pub const P2PMEM_ASYNC_REGION_COMPLETIONS: u32 = 3;
/// Doorbell record of a completion queue, and the words by which peeks report that they ended.
pub const P2PMEM_ASYNC_REGION_CQ_RECORD: u32 = 4;
/// The NIC's doorbell page (UAR). Another device reaches it by p2pmem_async_export_doorbell().
pub const P2PMEM_ASYNC_REGION_DOORBELL: u32 = 5;
/// Memory of the program: payload, signals, counters.
pub const P2PMEM_ASYNC_REGION_DATA: u32 = 6;

/// Payload memory.
#[repr(C)]
pub struct p2pmem_async_memory_info {
    /// The region: id for byte code, address of this process, length, and BAR offset.
    pub region: p2pmem_async_region,
    /// Address of the first byte in work requests, of this side and of the other side.
    pub address: u64,
    /// Local key, for segments of this side.
    pub lkey: u32,
    /// Remote key, for work requests of the other side.
    pub rkey: u32,
}

/// A range of registered memory of this side.
#[repr(C)]
pub struct p2pmem_async_segment {
    /// Address, as in p2pmem_async_memory_info.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Local key.
    pub lkey: u32,
}

/// SEND.
pub const P2PMEM_ASYNC_REQUEST_SEND: u32 = 1;
/// SEND with immediate data.
pub const P2PMEM_ASYNC_REQUEST_SEND_IMM: u32 = 2;
/// RDMA WRITE.
pub const P2PMEM_ASYNC_REQUEST_WRITE: u32 = 3;
/// RDMA WRITE with immediate data, which consumes a receive of the other side.
pub const P2PMEM_ASYNC_REQUEST_WRITE_IMM: u32 = 4;
/// RDMA READ.
pub const P2PMEM_ASYNC_REQUEST_READ: u32 = 5;
/// Atomic compare and swap of 8 bytes. The old value returns to one segment of 8 bytes.
pub const P2PMEM_ASYNC_REQUEST_COMPARE_SWAP: u32 = 6;
/// Atomic fetch and add of 8 bytes. The old value returns to one segment of 8 bytes.
pub const P2PMEM_ASYNC_REQUEST_FETCH_ADD: u32 = 7;

/// Success causes a completion. A failure always causes one.
pub const P2PMEM_ASYNC_SEND_IS_SIGNALED: u32 = 1;
/// The receiver's completion counts as solicited.
pub const P2PMEM_ASYNC_SEND_IS_SOLICITED: u32 = 2;
/// The request waits for earlier READs and atomics.
pub const P2PMEM_ASYNC_SEND_IS_FENCED: u32 = 4;
/// The payload is data, which is copied into the work request, at most 1023 bytes. Without, the payload is segments.
pub const P2PMEM_ASYNC_SEND_IS_INLINE: u32 = 8;
/// The receiver is to. Datagrams need this flag, and connections must not have it.
pub const P2PMEM_ASYNC_SEND_HAS_ADDRESS: u32 = 16;

/// A work request for the send queue. Set all fields to 0 first, then the needed ones.
#[repr(C)]
pub struct p2pmem_async_send {
    /// Id that the completion returns.
    pub id: u64,
    /// P2PMEM_ASYNC_REQUEST_*.
    pub operation: u32,
    /// P2PMEM_ASYNC_SEND_* bits.
    pub flags: u32,
    /// The payload: source of a SEND or WRITE, destination of a READ or atomic.
    pub segments: *const p2pmem_async_segment,
    /// Number of segments.
    pub nr_segments: usize,
    /// The payload with P2PMEM_ASYNC_SEND_IS_INLINE.
    pub data: *const c_void,
    /// Number of bytes at data.
    pub nr_bytes: usize,
    /// Address in memory of the other side, for WRITE, READ, and atomics. Atomics need a multiple of 8.
    pub remote_address: u64,
    /// Remote key of this memory.
    pub rkey: u32,
    /// Immediate data.
    pub immediate: u32,
    /// The expected value of a compare and swap.
    pub compare: u64,
    /// The new value of a compare and swap, or the number that a fetch and add adds.
    pub swap_or_add: u64,
    /// The receiver with P2PMEM_ASYNC_SEND_HAS_ADDRESS.
    pub to: p2pmem_async_address_vector,
}

/// The send queue.
pub const P2PMEM_ASYNC_QUEUE_SEND: u32 = 1;
/// The receive queue.
pub const P2PMEM_ASYNC_QUEUE_RECEIVE: u32 = 2;

/// A completion of a work request.
#[repr(C)]
pub struct p2pmem_async_completion {
    /// Id of the work request.
    pub id: u64,
    /// Number of the queue pair.
    pub qpn: u32,
    /// P2PMEM_ASYNC_QUEUE_*.
    pub queue: u32,
    /// P2PMEM_ASYNC_COMPLETION_* bits.
    pub flags: u32,
    /// Bytes that were received or read.
    pub bytes: u32,
    /// Immediate data, with P2PMEM_ASYNC_COMPLETION_HAS_IMMEDIATE.
    pub immediate: u32,
    /// Number of the sender's queue pair, for a datagram.
    pub source_qpn: u32,
    /// LID of the sender, for a datagram.
    pub source_lid: u16,
    /// Cause of a failure: the NIC's number (MLX5_CQE_SYNDROME_* of Linux), else 0.
    pub syndrome: u8,
    /// The vendor's code of a failure, else 0.
    pub vendor: u8,
    /// 0.
    pub reserved: u32,
}

/// The work request failed. p2pmem_async_completion_text() returns the cause.
pub const P2PMEM_ASYNC_COMPLETION_IS_FAILURE: u32 = 1;
/// The message has immediate data.
pub const P2PMEM_ASYNC_COMPLETION_HAS_IMMEDIATE: u32 = 2;
/// The 40 bytes before the payload of a datagram are a global route.
pub const P2PMEM_ASYNC_COMPLETION_HAS_ROUTE: u32 = 4;

/// Earlier stores become visible to the NIC before later ones.
pub const P2PMEM_ASYNC_FENCE: u32 = 1;
/// Writes the low 4 bytes of value in one access.
pub const P2PMEM_ASYNC_STORE_DWORD: u32 = 2;
/// Writes the 8 bytes of value in one access.
pub const P2PMEM_ASYNC_STORE_QWORD: u32 = 3;
/// Writes the bytes at data in accesses of any size and order: 8 to 1024 bytes.
pub const P2PMEM_ASYNC_COPY_BLOCK: u32 = 4;
/// Waits until 4 bytes of memory are such that (memory & value) != 0.
pub const P2PMEM_ASYNC_POLL_AND: u32 = 5;
/// Waits until 4 bytes of memory are such that ~(memory | value) != 0.
pub const P2PMEM_ASYNC_POLL_NOR: u32 = 6;
/// Waits until 4 bytes of memory are such that (int32_t)(memory - value) >= 0.
pub const P2PMEM_ASYNC_POLL_GEQ: u32 = 7;

/// An operation of a program. Values are little-endian in memory. Operations execute in order, and a poll ends before any
/// later operation starts. Stores may become visible to the NIC in any order unless a fence is between them.
#[repr(C)]
#[derive(Debug)]
pub struct p2pmem_async_operation {
    /// P2PMEM_ASYNC_FENCE, P2PMEM_ASYNC_STORE_*, P2PMEM_ASYNC_COPY_BLOCK, or P2PMEM_ASYNC_POLL_*.
    pub kind: u32,
    /// Id of the region that the operation accesses; 0 for a fence.
    pub region: u32,
    /// Offset in the region in bytes, a multiple of 4; of 8 for P2PMEM_ASYNC_STORE_QWORD and P2PMEM_ASYNC_COPY_BLOCK.
    pub offset: u64,
    /// The value to store or to compare with. Operations of 4 bytes use the low half.
    pub value: u64,
    /// The bytes of P2PMEM_ASYNC_COPY_BLOCK, which the program owns; else NULL.
    pub data: *const c_void,
    /// Number of bytes that the operation accesses; 0 for a fence.
    pub size: usize,
}

/// The NIC reports a state that this library does not know.
pub const P2PMEM_ASYNC_STATE_UNKNOWN: c_int = 255;
/// The queue pair is new.
pub const P2PMEM_ASYNC_STATE_RESET: c_int = 0;
/// Receives can be posted.
pub const P2PMEM_ASYNC_STATE_INIT: c_int = 1;
/// The queue pair can receive.
pub const P2PMEM_ASYNC_STATE_READY_TO_RECEIVE: c_int = 2;
/// The queue pair can send and receive.
pub const P2PMEM_ASYNC_STATE_READY_TO_SEND: c_int = 3;
/// The send queue drains.
pub const P2PMEM_ASYNC_STATE_SEND_DRAIN: c_int = 4;
/// The send queue is in error.
pub const P2PMEM_ASYNC_STATE_SEND_ERROR: c_int = 5;
/// All work requests are flushed.
pub const P2PMEM_ASYNC_STATE_ERROR: c_int = 6;

/// Creates a handle.
fn handle<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Returns the version of the library, such as "0.1.0".
#[no_mangle]
pub extern "C" fn p2pmem_async_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the message of the calling thread's last failed call: the operation and the reason. Returns "" before the first
/// failure. The string is valid until the thread's next failed call.
#[no_mangle]
pub extern "C" fn p2pmem_async_last_error() -> *const c_char {
    last(false)
}

/// Returns the remedy for the calling thread's last failure, or "" if none is known. The string is valid until the
/// thread's next failed call.
#[no_mangle]
pub extern "C" fn p2pmem_async_last_remedy() -> *const c_char {
    last(true)
}

/// Opens the first active port of a NIC by the NIC's name, such as "mlx5_0", and creates a protection domain.
///
/// Errors: -EINVAL, -ENODEV (no such NIC), -EIO (libibverbs is not installed or failed, the kernel is without RDMA, or no
/// port is active).
///
/// # Safety
///
/// nic must be a string, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_port_open(nic: *const c_char, out: *mut *mut p2pmem_async_port) -> c_int {
    run("p2pmem_async_port_open", || {
        // SAFETY: this function's contract.
        let (nic, out) = unsafe { (c_text(nic), output(out, "out")?) };
        let nic = nic.ok_or_else(|| Failure::argument("nic is NULL"))?;
        *out = handle(p2pmem_async_port(Port::open(&nic)?));
        Ok(0)
    })
}

/// Closes the port. Endpoints and memory that are not freed yet keep the NIC open. NULL is allowed.
///
/// # Safety
///
/// port must be NULL, or open and not in use.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_port_close(port: *mut p2pmem_async_port) {
    run("p2pmem_async_port_close", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(port) });
        Ok(0)
    });
}

/// Allocates at least size bytes for payload, in whole pages, and registers them for all kinds of access. place:
/// P2PMEM_ASYNC_MEMORY_*.
///
/// Errors: -EINVAL, -ENOMEM, -EIO (libibverbs refused the registration: the message has the reason). For an accelerator
/// also those of p2pmem_open(), p2pmem_alloc(), and p2pmem_register() of p2pmem.h.
///
/// # Safety
///
/// port must be open, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_memory_alloc(
    port: *const p2pmem_async_port,
    place: u32,
    size: usize,
    out: *mut *mut p2pmem_async_memory,
) -> c_int {
    run("p2pmem_async_memory_alloc", || {
        // SAFETY: this function's contract.
        let (port, out) = unsafe { (input(port, "port")?, output(out, "out")?) };
        let memory = port.0.source(place)?.data_memory(port.0.port.domain(), size);
        *out = handle(p2pmem_async_memory(memory.map_err(failed)?));
        Ok(0)
    })
}

/// Ends the registration and frees the memory. Interpreters that map the memory keep it mapped. NULL is allowed.
///
/// # Safety
///
/// memory must be NULL, or memory that neither the program, nor a peer, nor an outstanding work request uses.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_memory_free(memory: *mut p2pmem_async_memory) {
    run("p2pmem_async_memory_free", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(memory) });
        Ok(0)
    });
}

/// Writes address, length, keys, and BAR offset of the memory to out. If the memory's provider is removed, accesses of the
/// CPU raise SIGBUS.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// memory must be allocated, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_memory_query(
    memory: *const p2pmem_async_memory,
    out: *mut p2pmem_async_memory_info,
) -> c_int {
    run("p2pmem_async_memory_query", || {
        // SAFETY: this function's contract.
        unsafe { store((&input(memory, "memory")?.0).into(), out, "out") }?;
        Ok(0)
    })
}

/// Makes earlier writes of the CPU to the memory visible to devices before any later write. Call it after the payload was
/// written, and before the byte code is executed.
///
/// Errors: -EINVAL (memory is NULL).
///
/// # Safety
///
/// memory must be allocated.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_memory_flush(memory: *const p2pmem_async_memory) -> c_int {
    run("p2pmem_async_memory_flush", || {
        // SAFETY: this function's contract.
        unsafe { input(memory, "memory") }?.0.region().fence();
        Ok(0)
    })
}

/// Creates an endpoint for a peer. Receives can be posted before p2pmem_async_connect().
///
/// Errors: -EINVAL (an invalid option, datagrams on Ethernet, or a NIC that is not an mlx5 NIC), -ENOMEM,
/// -EPROTONOSUPPORT (queues in an accelerator need Linux 7.2), -EPERM (the administrator does not allow pinned exports for
/// the provider), and others of the kernel and of p2pmem_alloc() of p2pmem.h.
///
/// # Safety
///
/// port must be open, options valid, its name of the peer NULL or a string, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_endpoint_create(
    port: *const p2pmem_async_port,
    options: *const p2pmem_async_endpoint_options,
    out: *mut *mut p2pmem_async_endpoint,
) -> c_int {
    run("p2pmem_async_endpoint_create", || {
        // SAFETY: this function's contract.
        let (port, options, out) = unsafe { (input(port, "port")?, input(options, "options")?, output(out, "out")?) };
        // SAFETY: the name is NULL or a string (this function's contract).
        let peer = unsafe { c_text(options.peer) };
        let mut converted = call::endpoint_options(options, peer)?;
        converted.queues = port.0.source(options.queues)?;
        let endpoint = Endpoint::new(&port.0.port, &converted).map_err(failed)?;
        *out = handle(p2pmem_async_endpoint(endpoint));
        Ok(0)
    })
}

/// Destroys the NIC's queues. Stop the peer before. Interpreters that map the endpoint, and programs of
/// p2pmem_async_peek_cq(), keep the queues' memory mapped. NULL is allowed.
///
/// # Safety
///
/// endpoint must be NULL, or an endpoint that neither the program nor a peer uses.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_endpoint_free(endpoint: *mut p2pmem_async_endpoint) {
    run("p2pmem_async_endpoint_free", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(endpoint) });
        Ok(0)
    });
}

/// Writes the address of the endpoint to out. The program sends it to the other side.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// endpoint must be an endpoint, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_endpoint_address(
    endpoint: *const p2pmem_async_endpoint,
    out: *mut p2pmem_async_address,
) -> c_int {
    run("p2pmem_async_endpoint_address", || {
        // SAFETY: this function's contract.
        unsafe { store(input(endpoint, "endpoint")?.0.address().into(), out, "out") }?;
        Ok(0)
    })
}

/// Makes the endpoint ready to send and receive. other is the address of the other side; datagrams do not use it, and it can
/// be NULL for them.
///
/// Errors: -EINVAL (the endpoint is connected already, or a reliable connection without other), -EIO (the NIC was removed),
/// and others of the kernel.
///
/// # Safety
///
/// endpoint must be an endpoint, other NULL or valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_connect(
    endpoint: *const p2pmem_async_endpoint,
    other: *const p2pmem_async_address,
) -> c_int {
    run("p2pmem_async_connect", || {
        // SAFETY: this function's contract.
        let (endpoint, other) = unsafe { (input(endpoint, "endpoint")?, other.as_ref()) };
        let address = call::other_side(&endpoint.0, other)?;
        endpoint.0.connect(&address).map_err(failed)?;
        Ok(0)
    })
}

/// Writes the address vector of the other side to out, for datagrams to it: to of p2pmem_async_send.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// endpoint must be an endpoint, other and out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_endpoint_address_vector(
    endpoint: *const p2pmem_async_endpoint,
    other: *const p2pmem_async_address,
    out: *mut p2pmem_async_address_vector,
) -> c_int {
    run("p2pmem_async_endpoint_address_vector", || {
        // SAFETY: this function's contract.
        let (endpoint, other) = unsafe { (input(endpoint, "endpoint")?, input(other, "other")?) };
        let to = endpoint.0.address_vector(&Address::from(other));
        // SAFETY: this function's contract.
        unsafe { store(to.into(), out, "out") }?;
        Ok(0)
    })
}

/// Writes at most capacity regions to out: those that the endpoint's byte code names. Returns the number of all regions,
/// which can be larger.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// endpoint must be an endpoint, out valid for capacity elements (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_endpoint_regions(
    endpoint: *const p2pmem_async_endpoint,
    out: *mut p2pmem_async_region,
    capacity: usize,
) -> c_int {
    run("p2pmem_async_endpoint_regions", || {
        // SAFETY: this function's contract.
        let regions = unsafe { input(endpoint, "endpoint") }?.0.regions().map(Into::into);
        // SAFETY: this function's contract.
        unsafe { store_all(regions, out, capacity, "out") }
    })
}

/// Exports the doorbell page as a dma-buf, by which another device rings. Returns the descriptor, which is close-on-exec and
/// which the caller closes. The importer must accept revocable dma-bufs. An importer can make the NIC read the send queue at
/// any time.
///
/// Errors: -EINVAL, -EPROTONOSUPPORT or -EOPNOTSUPP (before Linux 7.2), -EMFILE.
///
/// # Safety
///
/// endpoint must be an endpoint.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_export_doorbell(endpoint: *const p2pmem_async_endpoint) -> c_int {
    run("p2pmem_async_export_doorbell", || {
        // SAFETY: this function's contract.
        let exported = unsafe { input(endpoint, "endpoint") }?.0.export_doorbell();
        Ok(exported.map_err(failed)?.into_raw_fd())
    })
}

/// Puts the queue pair into the error state: the NIC flushes its work requests, and posts and commits are refused. Use it if
/// the peer died in the middle of a program. why is a text for later error messages.
///
/// Errors: -EINVAL, -EIO (the NIC was removed).
///
/// # Safety
///
/// endpoint must be an endpoint, why a string.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_fail(endpoint: *const p2pmem_async_endpoint, why: *const c_char) -> c_int {
    run("p2pmem_async_fail", || {
        // SAFETY: this function's contract.
        let (endpoint, why) = unsafe { (input(endpoint, "endpoint")?, c_text(why)) };
        let why = why.ok_or_else(|| Failure::argument("why is NULL"))?;
        endpoint.0.fail(&why).map_err(failed)?;
        Ok(0)
    })
}

/// Queries the state of the queue pair from the NIC, P2PMEM_ASYNC_STATE_*. In an error state, posts and commits are refused
/// from now on, also if no completion has reported a failure.
///
/// Errors: -EINVAL, -EIO (the NIC was removed).
///
/// # Safety
///
/// endpoint must be an endpoint.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_refresh(endpoint: *const p2pmem_async_endpoint) -> c_int {
    run("p2pmem_async_refresh", || {
        // SAFETY: this function's contract.
        call::refresh(&unsafe { input(endpoint, "endpoint") }?.0)
    })
}

/// Writes a work request to the send queue, without ringing the doorbell. The NIC executes it after the byte code of the
/// next p2pmem_async_commit_qp() has been executed. After an error, nothing was posted.
///
/// Errors: -EINVAL (an invalid work request), -ENOBUFS (the send queue or its completion queue is full: consume completions
/// with p2pmem_async_poll_cq()), -ESHUTDOWN (the queue pair is in the error state).
///
/// # Safety
///
/// endpoint must be an endpoint, send valid, its segments and data valid for their numbers of elements.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_post_send(
    endpoint: *const p2pmem_async_endpoint,
    send: *const p2pmem_async_send,
) -> c_int {
    run("p2pmem_async_post_send", || {
        // SAFETY: this function's contract.
        let (endpoint, send) = unsafe { (input(endpoint, "endpoint")?, input(send, "send")?) };
        // SAFETY: this function's contract.
        let memory = unsafe { elements(send.segments, send.nr_segments, MOST_SEGMENTS, "segments") }?;
        // SAFETY: this function's contract.
        let data = unsafe { elements(send.data.cast::<u8>(), send.nr_bytes, MOST_INLINE, "data") }?;
        let request = call::send_request(send, memory, data)?;
        endpoint.0.qp().post_send(&request).map_err(failed)?;
        Ok(0)
    })
}

/// Segments of a work request, and bytes of inline data: no work request has space for more.
const MOST_SEGMENTS: usize = 63;
const MOST_INLINE: usize = 1023;

/// Writes a work request to the receive queue, for one message. It is valid at once. Datagrams place 40 bytes of route
/// before the payload. At most 4 segments are possible.
///
/// Errors: those of p2pmem_async_post_send().
///
/// # Safety
///
/// endpoint must be an endpoint, segments valid for nr_segments elements.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_post_recv(
    endpoint: *const p2pmem_async_endpoint,
    id: u64,
    segments: *const p2pmem_async_segment,
    nr_segments: usize,
) -> c_int {
    run("p2pmem_async_post_recv", || {
        // SAFETY: this function's contract.
        let endpoint = unsafe { input(endpoint, "endpoint") }?;
        // SAFETY: this function's contract.
        let segments = unsafe { elements(segments, nr_segments, MOST_SEGMENTS, "segments") }?;
        let request = ReceiveRequest {
            id,
            segments: call::segments(segments),
        };
        endpoint.0.qp().post_recv(&request).map_err(failed)?;
        Ok(0)
    })
}

/// Returns in out the byte code that submits all work requests which p2pmem_async_post_send() has posted. If nothing was
/// posted since the last commit, the program has no operation. Programs of an endpoint must be executed in the order of
/// their commits, each once.
///
/// Errors: -EINVAL, -EOPNOTSUPP (the peer has not the capabilities), -E2BIG (the program exceeds max_operations of the
/// peer), -ESHUTDOWN (the queue pair is in the error state). After an error, the work requests stay posted.
///
/// # Safety
///
/// endpoint must be an endpoint, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_commit_qp(
    endpoint: *const p2pmem_async_endpoint,
    out: *mut *mut p2pmem_async_program,
) -> c_int {
    run("p2pmem_async_commit_qp", || {
        // SAFETY: this function's contract.
        let (endpoint, out) = unsafe { (input(endpoint, "endpoint")?, output(out, "out")?) };
        let program = endpoint.0.qp().commit_qp().map_err(failed)?;
        *out = handle(p2pmem_async_program(program.into()));
        Ok(0)
    })
}

/// Takes back all work requests that were posted to the send queue after the last commit. Writes at most capacity of their
/// ids to ids. Returns the number of all that were taken back, which can be larger.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// endpoint must be an endpoint, ids valid for capacity elements (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_rollback_qp(
    endpoint: *const p2pmem_async_endpoint,
    ids: *mut u64,
    capacity: usize,
) -> c_int {
    run("p2pmem_async_rollback_qp", || {
        // SAFETY: this function's contract.
        let endpoint = unsafe { input(endpoint, "endpoint") }?;
        check_capacity(ids, capacity, "ids")?;
        // SAFETY: this function's contract.
        unsafe { store_all(endpoint.0.qp().rollback_qp(), ids, capacity, "ids") }
    })
}

/// Returns in out the byte code that waits for the next nr completions of a queue, P2PMEM_ASYNC_QUEUE_*: those after all
/// earlier peeks, and after all completions that p2pmem_async_poll_cq() has returned. The byte code also ends if these
/// completions are failures. It is executed once. A peek that will not be executed must be aborted: until then, the NIC
/// cannot reuse the entries of the queue.
///
/// Errors: -EINVAL, -EAGAIN (the queue has not enough entries, or too many peeks have not ended), -EOPNOTSUPP or -E2BIG (the
/// peer cannot execute the byte code).
///
/// # Safety
///
/// endpoint must be an endpoint, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_peek_cq(
    endpoint: *const p2pmem_async_endpoint,
    queue: u32,
    nr: u32,
    out: *mut *mut p2pmem_async_program,
) -> c_int {
    run("p2pmem_async_peek_cq", || {
        // SAFETY: this function's contract.
        let (endpoint, out) = unsafe { (input(endpoint, "endpoint")?, output(out, "out")?) };
        let queue = call::completion_queue(endpoint.0.qp(), queue)?;
        *out = handle(p2pmem_async_program(Code::peek(queue, nr)?));
        Ok(0)
    })
}

/// Takes back a peek whose byte code will not be executed, for example because the peer died. program is the program of
/// p2pmem_async_peek_cq(), which the caller still frees. Returns 1, or 0 if the peek has ended or was aborted already.
///
/// Errors: -EINVAL (also if the program is not of p2pmem_async_peek_cq()).
///
/// # Safety
///
/// program must be a program.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_abort_peek_cq(program: *const p2pmem_async_program) -> c_int {
    run("p2pmem_async_abort_peek_cq", || {
        // SAFETY: this function's contract.
        Ok(unsafe { input(program, "program") }?.0.abort()?.into())
    })
}

/// Consumes completions of a queue, P2PMEM_ASYNC_QUEUE_*, and writes at most capacity of them to out. Returns their number,
/// 0 if there are none. Completions may be consumed before or after the peer has seen them.
///
/// Errors: -EINVAL, -EBADMSG (a completion belongs to no work request; it was consumed).
///
/// # Safety
///
/// endpoint must be an endpoint, out valid for capacity elements (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_poll_cq(
    endpoint: *const p2pmem_async_endpoint,
    queue: u32,
    out: *mut p2pmem_async_completion,
    capacity: usize,
) -> c_int {
    run("p2pmem_async_poll_cq", || {
        // SAFETY: this function's contract.
        let endpoint = unsafe { input(endpoint, "endpoint") }?;
        check_capacity(out, capacity, "out")?;
        let completions = call::completion_queue(endpoint.0.qp(), queue)?.poll_cq(capacity);
        let completions = completions.map_err(failed)?;
        // SAFETY: this function's contract.
        unsafe { store_all(completions.iter().map(Into::into), out, capacity, "out") }
    })
}

/// Writes the result of a completion as text: "success", or the cause of the failure. Writes at most capacity bytes to text,
/// including the NUL, and returns the length of the whole text in bytes without the NUL, as snprintf() does.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// completion must be valid, text valid for capacity bytes (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_completion_text(
    completion: *const p2pmem_async_completion,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    run("p2pmem_async_completion_text", || {
        // SAFETY: this function's contract.
        let result = call::completion_text(unsafe { input(completion, "completion") }?);
        // SAFETY: this function's contract.
        unsafe { copy_text(&result, text, capacity) }
    })
}

/// Returns in out byte code that waits until the counter in 4 bytes of payload memory has reached value: until
/// (int32_t)(memory - value) >= 0. offset is in bytes from the start of the memory, a multiple of 4.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// memory must be allocated, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_wait_for(
    memory: *const p2pmem_async_memory,
    offset: u64,
    value: u32,
    out: *mut *mut p2pmem_async_program,
) -> c_int {
    run("p2pmem_async_wait_for", || {
        // SAFETY: this function's contract.
        let (memory, out) = unsafe { (input(memory, "memory")?, output(out, "out")?) };
        *out = handle(p2pmem_async_program(Code::wait(memory.0.region(), offset, value)?));
        Ok(0)
    })
}

/// Frees a program. A peek that has not ended is not aborted. NULL is allowed.
///
/// # Safety
///
/// program must be NULL, or a program that is not in use, also not by pointers of p2pmem_async_operation.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_program_free(program: *mut p2pmem_async_program) {
    run("p2pmem_async_program_free", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(program) });
        Ok(0)
    });
}

/// Adds the operations of other to the end of program, so that an executor needs one program. other stays as it is: the
/// caller still frees it, and aborts its peek with it. The capabilities and max_operations of the peer are not checked
/// again.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// program and other must be programs. program must not be in use, also not by pointers of p2pmem_async_operation.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_program_append(
    program: *mut p2pmem_async_program,
    other: *const p2pmem_async_program,
) -> c_int {
    run("p2pmem_async_program_append", || {
        // A copy, because both may be the same program.
        // SAFETY: this function's contract.
        let more = unsafe { input(other, "other") }?.0.program.clone();
        // SAFETY: this function's contract, and the reference to `other` has ended.
        unsafe { output(program, "program") }?.0.program.append(more);
        Ok(0)
    })
}

/// Returns the number of operations of a program; 0 for NULL.
///
/// # Safety
///
/// program must be NULL or a program.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_program_length(program: *const p2pmem_async_program) -> usize {
    // SAFETY: this function's contract.
    unsafe { program.as_ref() }.map_or(0, |program| program.0.program.operations().len())
}

/// Returns the P2PMEM_ASYNC_CAN_* bits that an executor needs for a program; 0 for NULL.
///
/// # Safety
///
/// program must be NULL or a program.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_program_required(program: *const p2pmem_async_program) -> u32 {
    // SAFETY: this function's contract.
    unsafe { program.as_ref() }.map_or(0, |program| program.0.program.required().bits())
}

/// Writes the operation with this index, from 0 on, to out. Its data is valid until the program is freed or changed.
///
/// Errors: -EINVAL (also if the program has no such operation), -EOPNOTSUPP (this library does not know the operation).
///
/// # Safety
///
/// program must be a program, out valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_program_operation(
    program: *const p2pmem_async_program,
    index: usize,
    out: *mut p2pmem_async_operation,
) -> c_int {
    run("p2pmem_async_program_operation", || {
        // SAFETY: this function's contract.
        let operation = unsafe { input(program, "program") }?.0.operation(index)?;
        // SAFETY: this function's contract.
        unsafe { store(operation, out, "out") }?;
        Ok(0)
    })
}

/// Writes the program as text for people, one operation a line. Writes at most capacity bytes to text, including the NUL,
/// and returns the length of the whole text in bytes without the NUL, as snprintf() does.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// program must be a program, text valid for capacity bytes (NULL if capacity is 0).
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_program_explain(
    program: *const p2pmem_async_program,
    text: *mut c_char,
    capacity: usize,
) -> c_int {
    run("p2pmem_async_program_explain", || {
        // SAFETY: this function's contract.
        let lines = unsafe { input(program, "program") }?.0.program.explain();
        // SAFETY: this function's contract.
        unsafe { copy_text(&lines, text, capacity) }
    })
}

/// Creates an executor on the CPU without regions. A program that runs longer than limit_us microseconds ends with an
/// error. Each poll reads memory at least once.
///
/// Errors: -EINVAL (out is NULL).
///
/// # Safety
///
/// out must be valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_interpreter_create(
    limit_us: u64,
    out: *mut *mut p2pmem_async_interpreter,
) -> c_int {
    run("p2pmem_async_interpreter_create", || {
        // SAFETY: this function's contract.
        let out = unsafe { output(out, "out") }?;
        let interpreter = Interpreter::new(Duration::from_micros(limit_us));
        *out = handle(p2pmem_async_interpreter(RwLock::new(interpreter)));
        Ok(0)
    })
}

/// Frees an interpreter. NULL is allowed.
///
/// # Safety
///
/// interpreter must be NULL, or an interpreter that is not in use.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_interpreter_free(interpreter: *mut p2pmem_async_interpreter) {
    run("p2pmem_async_interpreter_free", || {
        // SAFETY: this function's contract.
        drop(unsafe { take(interpreter) });
        Ok(0)
    });
}

impl p2pmem_async_interpreter {
    /// Replaces the interpreter.
    fn change(&self, change: impl FnOnce(Interpreter) -> Interpreter) {
        let mut interpreter = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *interpreter = change(interpreter.clone());
    }
}

/// Maps the regions of an endpoint, so that programs of this endpoint can be executed. Waits until running programs have
/// ended.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// interpreter must be an interpreter, endpoint an endpoint.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_interpreter_map_endpoint(
    interpreter: *const p2pmem_async_interpreter,
    endpoint: *const p2pmem_async_endpoint,
) -> c_int {
    run("p2pmem_async_interpreter_map_endpoint", || {
        // SAFETY: this function's contract.
        let (interpreter, endpoint) = unsafe { (input(interpreter, "interpreter")?, input(endpoint, "endpoint")?) };
        interpreter.change(|interpreter| interpreter.map_all(endpoint.0.regions()));
        Ok(0)
    })
}

/// Maps payload memory, so that programs of p2pmem_async_wait_for() can be executed. Waits until running programs have
/// ended.
///
/// Errors: -EINVAL.
///
/// # Safety
///
/// interpreter must be an interpreter, memory allocated.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_interpreter_map_memory(
    interpreter: *const p2pmem_async_interpreter,
    memory: *const p2pmem_async_memory,
) -> c_int {
    run("p2pmem_async_interpreter_map_memory", || {
        // SAFETY: this function's contract.
        let (interpreter, memory) = unsafe { (input(interpreter, "interpreter")?, input(memory, "memory")?) };
        interpreter.change(|interpreter| interpreter.map(memory.0.region()));
        Ok(0)
    })
}

/// Executes a program on the CPU. If it fails, failed_index receives the index of the operation that failed, and the message
/// names it; the operations before it have been executed. failed_index can be NULL.
///
/// Errors: -EINVAL, -ETIMEDOUT (the poll at failed_index did not come true in time), -EFAULT (the operation at failed_index
/// is in a region that is not mapped, or outside of its region).
///
/// # Safety
///
/// interpreter must be an interpreter, program a program, failed_index NULL or valid.
#[no_mangle]
pub unsafe extern "C" fn p2pmem_async_interpreter_run(
    interpreter: *const p2pmem_async_interpreter,
    program: *const p2pmem_async_program,
    failed_index: *mut usize,
) -> c_int {
    run("p2pmem_async_interpreter_run", || {
        // SAFETY: this function's contract.
        let (interpreter, program) = unsafe { (input(interpreter, "interpreter")?, input(program, "program")?) };
        let interpreter = interpreter.0.read().unwrap_or_else(PoisonError::into_inner);
        let result = interpreter.run(&program.0.program);
        if let Err(error) = &result {
            if let Some(index) = call::failed_index(error).filter(|_| !failed_index.is_null()) {
                // SAFETY: the pointer is not NULL, so it is valid (this function's contract).
                unsafe { failed_index.write(index) };
            }
        }
        result.map_err(failed)?;
        Ok(0)
    })
}

/// Handles may be used from any thread.
const _: fn() = || {
    fn any_thread<T: Send + Sync>() {}
    any_thread::<p2pmem_async_port>();
    any_thread::<p2pmem_async_endpoint>();
    any_thread::<p2pmem_async_memory>();
    any_thread::<p2pmem_async_program>();
    any_thread::<p2pmem_async_interpreter>();
};

#[cfg(test)]
mod tests;
