// SPDX-License-Identifier: MIT OR Apache-2.0

//! Implementation of the C functions in safe Rust: errors, ports, options, work requests, programs, regions, completions.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use p2pmem::rdma::Nic;
use p2pmem::{Client, Device};
use p2pmem_async::bytecode::{wait_for, Capabilities, Operation, Peer, Program};
use p2pmem_async::cqe::{Direction, Failure as RequestFailure, Syndrome};
use p2pmem_async::endpoint::{Address, Endpoint, EndpointOptions, Port as NicPort};
use p2pmem_async::memory::{DataMemory, MemorySource};
use p2pmem_async::queue::{AsyncCq, AsyncQp, Completion, PeekId};
use p2pmem_async::region::{Region, RegionKind};
use p2pmem_async::sys::uverbs::QpState;
use p2pmem_async::wqe::{AddressVector, Grh, Payload, Remote, Segment, SendOperation, SendRequest, Transport};
use p2pmem_async::Error;
use p2pmem_c_sys::Failure;

use crate::sys::{
    p2pmem_async_address, p2pmem_async_address_vector, p2pmem_async_completion, p2pmem_async_endpoint_options,
    p2pmem_async_memory_info, p2pmem_async_operation, p2pmem_async_region, p2pmem_async_segment, p2pmem_async_send,
    P2PMEM_ASYNC_CAN_ALL, P2PMEM_ASYNC_COMPLETION_HAS_IMMEDIATE, P2PMEM_ASYNC_COMPLETION_HAS_ROUTE,
    P2PMEM_ASYNC_COMPLETION_IS_FAILURE, P2PMEM_ASYNC_COPY_BLOCK, P2PMEM_ASYNC_FENCE, P2PMEM_ASYNC_MEMORY_ACCELERATOR,
    P2PMEM_ASYNC_MEMORY_HOST, P2PMEM_ASYNC_POLL_AND, P2PMEM_ASYNC_POLL_GEQ, P2PMEM_ASYNC_POLL_NOR,
    P2PMEM_ASYNC_QUEUE_RECEIVE, P2PMEM_ASYNC_QUEUE_SEND, P2PMEM_ASYNC_REGION_COMPLETIONS,
    P2PMEM_ASYNC_REGION_CQ_RECORD, P2PMEM_ASYNC_REGION_DATA, P2PMEM_ASYNC_REGION_DOORBELL,
    P2PMEM_ASYNC_REGION_QP_RECORD, P2PMEM_ASYNC_REGION_WORK_QUEUE, P2PMEM_ASYNC_REQUEST_COMPARE_SWAP,
    P2PMEM_ASYNC_REQUEST_FETCH_ADD, P2PMEM_ASYNC_REQUEST_READ, P2PMEM_ASYNC_REQUEST_SEND,
    P2PMEM_ASYNC_REQUEST_SEND_IMM, P2PMEM_ASYNC_REQUEST_WRITE, P2PMEM_ASYNC_REQUEST_WRITE_IMM,
    P2PMEM_ASYNC_SEND_HAS_ADDRESS, P2PMEM_ASYNC_SEND_IS_FENCED, P2PMEM_ASYNC_SEND_IS_INLINE,
    P2PMEM_ASYNC_SEND_IS_SIGNALED, P2PMEM_ASYNC_SEND_IS_SOLICITED, P2PMEM_ASYNC_STATE_UNKNOWN,
    P2PMEM_ASYNC_STORE_DWORD, P2PMEM_ASYNC_STORE_QWORD, P2PMEM_ASYNC_TRANSPORT_RC, P2PMEM_ASYNC_TRANSPORT_UD,
};

/// Converts an error of the crate p2pmem-async.
pub(crate) fn failed(error: Error) -> Failure {
    match error {
        Error::Memory(error) => error.into(),
        error => Failure::new(error.errno_or_nearest(), error.to_string()),
    }
}

/// An open port, and the device of p2pmem once memory of an accelerator was needed.
pub(crate) struct Port {
    pub(crate) port: Arc<NicPort>,
    nic: Client,
    device: Mutex<Option<Device>>,
}

impl Port {
    pub(crate) fn open(name: &str) -> Result<Self, Failure> {
        let nic = Nic::open(name)?;
        Ok(Self {
            port: NicPort::open(&nic).map_err(failed)?,
            nic: nic.client().clone(),
            device: Mutex::default(),
        })
    }

    /// Returns where memory is allocated: P2PMEM_ASYNC_MEMORY_*.
    pub(crate) fn source(&self, place: u32) -> Result<MemorySource, Failure> {
        match place {
            P2PMEM_ASYNC_MEMORY_HOST => Ok(MemorySource::Host),
            P2PMEM_ASYNC_MEMORY_ACCELERATOR => {
                let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
                let device = match &mut *device {
                    Some(device) => device,
                    none => none.insert(Device::open()?),
                };
                Ok(MemorySource::Accelerator {
                    device: device.clone(),
                    near: self.nic.clone(),
                    provider: None,
                })
            }
            other => Err(Failure::argument(format!("{other} is no place of memory"))),
        }
    }
}

/// Converts options of an endpoint, except for the place of the queues. `peer` is the name of the executor.
pub(crate) fn endpoint_options(
    options: &p2pmem_async_endpoint_options,
    peer: Option<String>,
) -> Result<EndpointOptions, Failure> {
    let transport = match options.transport {
        P2PMEM_ASYNC_TRANSPORT_RC => Transport::Rc,
        P2PMEM_ASYNC_TRANSPORT_UD => Transport::Ud,
        other => return Err(Failure::argument(format!("{other} is no transport"))),
    };
    let unknown = options.capabilities & !P2PMEM_ASYNC_CAN_ALL;
    if unknown != 0 {
        return Err(Failure::argument(format!("unknown capabilities {unknown:#x}")));
    }
    if options.capabilities == 0 {
        return Err(Failure::argument(
            "capabilities is 0: a peer without capabilities cannot submit work requests",
        ));
    }
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    let most = match options.max_operations {
        0 => usize::MAX,
        most => most as usize,
    };
    let peer = Peer::new(
        peer.unwrap_or_else(|| "peer".into()),
        Capabilities::from_bits_retain(options.capabilities),
        most,
    );
    let mut converted = EndpointOptions::new(transport, peer);
    let layout = &mut converted.layout;
    layout.send_blocks = or(options.send_blocks, layout.send_blocks);
    layout.receive_entries = or(options.receive_entries, layout.receive_entries);
    converted.completions = or(options.completions, converted.completions);
    if options.peeks != 0 {
        converted.peeks = options.peeks as usize;
    }
    converted.qkey = or(options.qkey, converted.qkey);
    Ok(converted)
}

impl From<Address> for p2pmem_async_address {
    fn from(address: Address) -> Self {
        Self {
            gid: address.gid,
            qpn: address.qpn,
            qkey: address.qkey,
            psn: address.psn,
            lid: address.lid,
            mtu: address.mtu,
            reserved: 0,
        }
    }
}

impl From<&p2pmem_async_address> for Address {
    fn from(address: &p2pmem_async_address) -> Self {
        Self {
            qpn: address.qpn,
            lid: address.lid,
            gid: address.gid,
            qkey: address.qkey,
            mtu: address.mtu,
            psn: address.psn,
        }
    }
}

impl From<AddressVector> for p2pmem_async_address_vector {
    fn from(to: AddressVector) -> Self {
        let grh = to.grh.unwrap_or(Grh {
            dgid: [0; 16],
            sgid_index: 0,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 0,
        });
        Self {
            qpn: to.qpn,
            qkey: to.qkey,
            dlid: to.dlid,
            sl: to.sl,
            path_bits: to.path_bits,
            has_route: to.grh.is_some().into(),
            sgid_index: grh.sgid_index,
            traffic_class: grh.traffic_class,
            hop_limit: grh.hop_limit,
            flow_label: grh.flow_label,
            dgid: grh.dgid,
        }
    }
}

impl From<&p2pmem_async_address_vector> for AddressVector {
    fn from(to: &p2pmem_async_address_vector) -> Self {
        Self {
            dlid: to.dlid,
            sl: to.sl,
            path_bits: to.path_bits,
            qpn: to.qpn,
            qkey: to.qkey,
            grh: (to.has_route != 0).then_some(Grh {
                dgid: to.dgid,
                sgid_index: to.sgid_index,
                flow_label: to.flow_label,
                traffic_class: to.traffic_class,
                hop_limit: to.hop_limit,
            }),
        }
    }
}

/// Converts segments of this side's memory.
pub(crate) fn segments(segments: &[p2pmem_async_segment]) -> Vec<Segment> {
    let convert = |segment: &p2pmem_async_segment| Segment {
        address: segment.address,
        bytes: segment.bytes,
        lkey: segment.lkey,
    };
    segments.iter().map(convert).collect()
}

/// Converts a work request. `memory` and `data` are what its pointers point to.
pub(crate) fn send_request(
    send: &p2pmem_async_send,
    memory: &[p2pmem_async_segment],
    data: &[u8],
) -> Result<SendRequest, Failure> {
    let known = P2PMEM_ASYNC_SEND_IS_SIGNALED
        | P2PMEM_ASYNC_SEND_IS_SOLICITED
        | P2PMEM_ASYNC_SEND_IS_FENCED
        | P2PMEM_ASYNC_SEND_IS_INLINE
        | P2PMEM_ASYNC_SEND_HAS_ADDRESS;
    let is = |flag: u32| send.flags & flag != 0;
    if is(!known) {
        return Err(Failure::argument(format!("unknown flags {:#x}", send.flags & !known)));
    }
    let payload = match (is(P2PMEM_ASYNC_SEND_IS_INLINE), memory, data) {
        (true, [], data) => Payload::Inline(data.to_vec()),
        (false, memory, []) => Payload::Memory(segments(memory)),
        _ => {
            return Err(Failure::argument(
                "a work request has segments, or inline data and P2PMEM_ASYNC_SEND_IS_INLINE",
            ))
        }
    };
    let remote = Remote {
        address: send.remote_address,
        rkey: send.rkey,
    };
    let operation = match send.operation {
        P2PMEM_ASYNC_REQUEST_SEND => SendOperation::Send,
        P2PMEM_ASYNC_REQUEST_SEND_IMM => SendOperation::SendImm(send.immediate),
        P2PMEM_ASYNC_REQUEST_WRITE => SendOperation::Write(remote),
        P2PMEM_ASYNC_REQUEST_WRITE_IMM => SendOperation::WriteImm(remote, send.immediate),
        P2PMEM_ASYNC_REQUEST_READ => SendOperation::Read(remote),
        P2PMEM_ASYNC_REQUEST_COMPARE_SWAP => SendOperation::CompareSwap {
            remote,
            compare: send.compare,
            swap: send.swap_or_add,
        },
        P2PMEM_ASYNC_REQUEST_FETCH_ADD => SendOperation::FetchAdd {
            remote,
            add: send.swap_or_add,
        },
        other => return Err(Failure::argument(format!("{other} is no operation of a work request"))),
    };
    let mut request = SendRequest::new(send.id, operation, payload).signaled(is(P2PMEM_ASYNC_SEND_IS_SIGNALED));
    request.solicited = is(P2PMEM_ASYNC_SEND_IS_SOLICITED);
    request.fence = is(P2PMEM_ASYNC_SEND_IS_FENCED);
    if is(P2PMEM_ASYNC_SEND_HAS_ADDRESS) {
        request.to = Some((&send.to).into());
    }
    Ok(request)
}

/// Returns a completion queue of a queue pair: P2PMEM_ASYNC_QUEUE_*.
pub(crate) fn completion_queue(qp: &AsyncQp, queue: u32) -> Result<&AsyncCq, Failure> {
    match queue {
        P2PMEM_ASYNC_QUEUE_SEND => Ok(qp.send_cq()),
        P2PMEM_ASYNC_QUEUE_RECEIVE => Ok(qp.receive_cq()),
        other => Err(Failure::argument(format!("{other} is no queue"))),
    }
}

/// A program, and the peek that it is for, if it is for one.
#[derive(Debug, Default)]
pub(crate) struct Code {
    pub(crate) program: Program,
    peek: Option<(AsyncCq, PeekId)>,
}

impl From<Program> for Code {
    fn from(program: Program) -> Self {
        Self { program, peek: None }
    }
}

impl Code {
    /// Creates a peek.
    pub(crate) fn peek(queue: &AsyncCq, count: u32) -> Result<Self, Failure> {
        if count == 0 {
            return Err(Failure::argument("a peek is for at least one completion"));
        }
        let peek = queue.peek_cq(count).map_err(failed)?;
        Ok(Self {
            program: peek.program,
            peek: Some((queue.clone(), peek.id)),
        })
    }

    /// Creates a wait for a counter in payload memory.
    pub(crate) fn wait(region: &Region, offset: u64, value: u32) -> Result<Self, Failure> {
        if offset.checked_add(4).is_none_or(|end| end > region.len() as u64) {
            return Err(Failure::argument(format!(
                "4 bytes at {offset} are not inside the memory, which has {} bytes",
                region.len()
            )));
        }
        Ok(wait_for(region, offset, value).map_err(failed)?.into())
    }

    /// Aborts the peek. Returns false if it has ended.
    pub(crate) fn abort(&self) -> Result<bool, Failure> {
        let (queue, id) = self
            .peek
            .as_ref()
            .ok_or_else(|| Failure::argument("the program is not of p2pmem_async_peek_cq()"))?;
        Ok(queue.abort_peek_cq(*id))
    }

    /// Returns an operation.
    pub(crate) fn operation(&self, index: usize) -> Result<p2pmem_async_operation, Failure> {
        let operations = self.program.operations();
        let operation = operations.get(index).ok_or_else(|| {
            Failure::argument(format!("operation {index} of a program that has {}", operations.len()))
        })?;
        let (kind, value) = match *operation {
            Operation::Fence => (P2PMEM_ASYNC_FENCE, 0),
            Operation::StoreDword { value, .. } => (P2PMEM_ASYNC_STORE_DWORD, value.into()),
            Operation::StoreQword { value, .. } => (P2PMEM_ASYNC_STORE_QWORD, value),
            Operation::CopyBlock { .. } => (P2PMEM_ASYNC_COPY_BLOCK, 0),
            Operation::PollAnd { value, .. } => (P2PMEM_ASYNC_POLL_AND, value.into()),
            Operation::PollNor { value, .. } => (P2PMEM_ASYNC_POLL_NOR, value.into()),
            Operation::PollGeq { value, .. } => (P2PMEM_ASYNC_POLL_GEQ, value.into()),
            _ => {
                return Err(Failure::new(
                    libc::EOPNOTSUPP,
                    format!("this library has no number for operation {index}: {operation}"),
                ))
            }
        };
        let target = operation.target();
        Ok(p2pmem_async_operation {
            kind,
            region: target.map_or(0, |target| target.region.number()),
            offset: target.map_or(0, |target| target.offset),
            value,
            data: match operation {
                Operation::CopyBlock { data, .. } => data.as_ptr().cast(),
                _ => std::ptr::null(),
            },
            size: operation.size(),
        })
    }
}

/// Returns the offset of a region in its provider's BAR; UINT64_MAX if the region is not in an accelerator.
fn bar_offset(region: &Region) -> u64 {
    region.bar_offset().unwrap_or(u64::MAX)
}

impl From<&Region> for p2pmem_async_region {
    fn from(region: &Region) -> Self {
        Self {
            id: region.id().number(),
            kind: match region.kind() {
                RegionKind::WorkQueue => P2PMEM_ASYNC_REGION_WORK_QUEUE,
                RegionKind::QpRecord => P2PMEM_ASYNC_REGION_QP_RECORD,
                RegionKind::Completions => P2PMEM_ASYNC_REGION_COMPLETIONS,
                RegionKind::CqRecord => P2PMEM_ASYNC_REGION_CQ_RECORD,
                RegionKind::Doorbell => P2PMEM_ASYNC_REGION_DOORBELL,
                RegionKind::Data => P2PMEM_ASYNC_REGION_DATA,
                // A kind that this library does not know.
                _ => 0,
            },
            cpu_address: region.address() as *mut _,
            size: region.len(),
            bar_offset: bar_offset(region),
        }
    }
}

impl From<&DataMemory> for p2pmem_async_memory_info {
    fn from(memory: &DataMemory) -> Self {
        let (segment, remote) = (memory.segment(0, 0), memory.remote(0));
        Self {
            region: memory.region().into(),
            address: segment.address,
            lkey: segment.lkey,
            rkey: remote.rkey,
        }
    }
}

impl From<&Completion> for p2pmem_async_completion {
    fn from(completion: &Completion) -> Self {
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let failure = completion.failure;
        Self {
            id: completion.id,
            qpn: completion.qpn,
            queue: match completion.direction {
                Direction::Send => P2PMEM_ASYNC_QUEUE_SEND,
                Direction::Receive => P2PMEM_ASYNC_QUEUE_RECEIVE,
            },
            flags: flag(failure.is_some(), P2PMEM_ASYNC_COMPLETION_IS_FAILURE)
                | flag(completion.immediate.is_some(), P2PMEM_ASYNC_COMPLETION_HAS_IMMEDIATE)
                | flag(completion.source.grh, P2PMEM_ASYNC_COMPLETION_HAS_ROUTE),
            bytes: completion.bytes,
            immediate: completion.immediate.unwrap_or(0),
            source_qpn: completion.source.qpn,
            source_lid: completion.source.lid,
            syndrome: failure.map_or(0, |failure| failure.syndrome.value()),
            vendor: failure.map_or(0, |failure| failure.vendor),
            reserved: 0,
        }
    }
}

/// Returns the result of a completion as text.
pub(crate) fn completion_text(completion: &p2pmem_async_completion) -> String {
    if completion.flags & P2PMEM_ASYNC_COMPLETION_IS_FAILURE == 0 {
        return "success".into();
    }
    let failure = RequestFailure {
        syndrome: Syndrome::new(completion.syndrome),
        vendor: completion.vendor,
    };
    failure.to_string()
}

/// Returns the address of the other side. Datagrams have none: the endpoint's own address takes its place.
pub(crate) fn other_side(endpoint: &Endpoint, other: Option<&p2pmem_async_address>) -> Result<Address, Failure> {
    match (other, endpoint.transport()) {
        (Some(other), _) => Ok(other.into()),
        (None, Transport::Ud) => Ok(endpoint.address()),
        (None, Transport::Rc) => Err(Failure::argument("other is NULL, and a reliable connection needs it")),
    }
}

/// Queries the state of the queue pair from the NIC: P2PMEM_ASYNC_STATE_*.
pub(crate) fn refresh(endpoint: &Endpoint) -> Result<c_int, Failure> {
    Ok(state_number(endpoint.refresh().map_err(failed)?))
}

fn state_number(state: Option<QpState>) -> c_int {
    state.map_or(P2PMEM_ASYNC_STATE_UNKNOWN, |state| state as c_int)
}

/// Returns the index of the operation at which an execution ended.
pub(crate) fn failed_index(error: &Error) -> Option<usize> {
    match error {
        Error::Execution { index, .. } => Some(*index),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
