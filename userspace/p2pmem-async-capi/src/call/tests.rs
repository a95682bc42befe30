// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests without a NIC: conversions, wrong numbers, error codes. The queues are in host memory that no NIC reads.

use p2pmem_async::cqe::Source;
use p2pmem_async::queue::{cq_record_bytes, QpLayout, QpParts, QP_RECORD_BYTES};
use p2pmem_async::region::Memory;
use p2pmem_async::sys::HostMemory;

use super::*;

/// Host memory at a place in the BAR of an accelerator that does not exist.
#[derive(Debug)]
struct InBar(HostMemory);

impl Memory for InBar {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn address(&self) -> u64 {
        self.0.address()
    }
    fn bar_offset(&self) -> Option<u64> {
        Some(1 << 20)
    }
    fn load_dword(&self, at: usize) -> u32 {
        self.0.load_dword(at)
    }
    fn store_dword(&self, at: usize, value: u32) {
        self.0.store_dword(at, value);
    }
    fn store_qword(&self, at: usize, value: u64) {
        self.0.store_qword(at, value);
    }
    fn read(&self, at: usize, out: &mut [u8]) {
        self.0.read(at, out);
    }
    fn write(&self, at: usize, data: &[u8]) {
        self.0.write(at, data);
    }
    fn fence(&self) {
        self.0.fence();
    }
}

fn region(kind: RegionKind, bytes: usize) -> Region {
    Region::part(kind, Arc::new(HostMemory::new(bytes).unwrap()), 0, bytes)
}

fn queue(peer: &Peer, peeks: usize) -> AsyncCq {
    let entries = region(RegionKind::Completions, 8 * 64);
    let record = region(RegionKind::CqRecord, cq_record_bytes(peeks));
    AsyncCq::new(7, entries, record, peer.clone()).unwrap()
}

fn queue_pair(peer: &Peer) -> AsyncQp {
    let layout = QpLayout {
        send_blocks: 4,
        receive_entries: 2,
    };
    let parts = QpParts {
        qpn: 0x1234,
        transport: Transport::Rc,
        layout,
        queue: region(RegionKind::WorkQueue, layout.bytes()),
        record: region(RegionKind::QpRecord, QP_RECORD_BYTES),
        doorbell: region(RegionKind::Doorbell, 4096),
    };
    AsyncQp::new(parts, peer.clone(), queue(peer, 2), queue(peer, 2)).unwrap()
}

fn no_options() -> p2pmem_async_endpoint_options {
    p2pmem_async_endpoint_options {
        peer: std::ptr::null(),
        capabilities: P2PMEM_ASYNC_CAN_ALL,
        max_operations: 0,
        transport: P2PMEM_ASYNC_TRANSPORT_RC,
        queues: 0,
        send_blocks: 0,
        receive_entries: 0,
        completions: 0,
        peeks: 0,
        qkey: 0,
    }
}

fn no_vector() -> p2pmem_async_address_vector {
    p2pmem_async_address_vector {
        qpn: 0,
        qkey: 0,
        dlid: 0,
        sl: 0,
        path_bits: 0,
        has_route: 0,
        sgid_index: 0,
        traffic_class: 0,
        hop_limit: 0,
        flow_label: 0,
        dgid: [0; 16],
    }
}

fn no_send() -> p2pmem_async_send {
    p2pmem_async_send {
        id: 0,
        operation: P2PMEM_ASYNC_REQUEST_SEND,
        flags: 0,
        segments: std::ptr::null(),
        nr_segments: 0,
        data: std::ptr::null(),
        nr_bytes: 0,
        remote_address: 0,
        rkey: 0,
        immediate: 0,
        compare: 0,
        swap_or_add: 0,
        to: no_vector(),
    }
}

const SEGMENT: p2pmem_async_segment = p2pmem_async_segment {
    address: 0x1000,
    bytes: 8,
    lkey: 3,
};

#[test]
fn wrong_options_are_refused_and_0_is_the_default() {
    for (options, why) in [
        (
            p2pmem_async_endpoint_options {
                transport: 0,
                ..no_options()
            },
            "0 is no transport",
        ),
        (
            p2pmem_async_endpoint_options {
                transport: 3,
                ..no_options()
            },
            "3 is no transport",
        ),
        (
            p2pmem_async_endpoint_options {
                capabilities: 0,
                ..no_options()
            },
            "capabilities is 0",
        ),
        (
            p2pmem_async_endpoint_options {
                capabilities: P2PMEM_ASYNC_CAN_ALL + 1,
                ..no_options()
            },
            "unknown capabilities 0x80",
        ),
    ] {
        let failure = endpoint_options(&options, None).unwrap_err();
        assert_eq!(failure.errno, libc::EINVAL);
        assert!(failure.text.contains(why), "{failure:?}");
    }
    let default = endpoint_options(&no_options(), None).unwrap();
    let expected = EndpointOptions::new(Transport::Rc, Peer::cpu());
    assert_eq!(
        (default.layout, default.completions, default.peeks, default.qkey),
        (expected.layout, expected.completions, expected.peeks, expected.qkey)
    );
    assert_eq!(
        (default.peer.name(), default.peer.capabilities()),
        ("peer", Capabilities::all())
    );
    let options = p2pmem_async_endpoint_options {
        transport: P2PMEM_ASYNC_TRANSPORT_UD,
        capabilities: 5,
        max_operations: 9,
        send_blocks: 128,
        receive_entries: 256,
        completions: 512,
        peeks: 7,
        qkey: 11,
        ..no_options()
    };
    let all = endpoint_options(&options, Some("fpga".into())).unwrap();
    let capabilities = Capabilities::FENCE | Capabilities::STORE_QWORD;
    assert_eq!(all.peer, Peer::new("fpga", capabilities, 9));
    assert_eq!((all.layout.send_blocks, all.layout.receive_entries), (128, 256));
    assert_eq!((all.completions, all.peeks, all.qkey), (512, 7, 11));
    assert_eq!(all.transport, Transport::Ud);
}

#[test]
fn capability_bits_are_those_of_the_crate() {
    assert_eq!(P2PMEM_ASYNC_CAN_ALL, Capabilities::all().bits());
    let bits = [
        crate::sys::P2PMEM_ASYNC_CAN_FENCE,
        crate::sys::P2PMEM_ASYNC_CAN_STORE_DWORD,
        crate::sys::P2PMEM_ASYNC_CAN_STORE_QWORD,
        crate::sys::P2PMEM_ASYNC_CAN_COPY_BLOCK,
        crate::sys::P2PMEM_ASYNC_CAN_POLL_AND,
        crate::sys::P2PMEM_ASYNC_CAN_POLL_NOR,
        crate::sys::P2PMEM_ASYNC_CAN_POLL_GEQ,
    ];
    let names = [
        "FENCE",
        "STORE_DWORD",
        "STORE_QWORD",
        "COPY_BLOCK",
        "POLL_AND",
        "POLL_NOR",
        "POLL_GEQ",
    ];
    for (bits, name) in bits.into_iter().zip(names) {
        assert_eq!(Capabilities::from_name(name).unwrap().bits(), bits, "{name}");
    }
}

#[test]
fn state_numbers_are_those_of_the_header() {
    use crate::sys::{P2PMEM_ASYNC_STATE_ERROR, P2PMEM_ASYNC_STATE_READY_TO_SEND, P2PMEM_ASYNC_STATE_RESET};
    assert_eq!(state_number(None), P2PMEM_ASYNC_STATE_UNKNOWN);
    assert_eq!(state_number(Some(QpState::Reset)), P2PMEM_ASYNC_STATE_RESET);
    assert_eq!(
        state_number(Some(QpState::ReadyToSend)),
        P2PMEM_ASYNC_STATE_READY_TO_SEND
    );
    assert_eq!(state_number(Some(QpState::Error)), P2PMEM_ASYNC_STATE_ERROR);
}

#[test]
fn wrong_work_requests_are_refused() {
    let with = |operation, flags| p2pmem_async_send {
        operation,
        flags,
        ..no_send()
    };
    let inline = P2PMEM_ASYNC_SEND_IS_INLINE;
    let cases: [(_, &[p2pmem_async_segment], &[u8], _); 5] = [
        (with(0, 0), &[SEGMENT], &[], "0 is no operation"),
        (with(8, 0), &[SEGMENT], &[], "8 is no operation"),
        (with(1, 32), &[SEGMENT], &[], "unknown flags 0x20"),
        (with(1, inline), &[SEGMENT], &[], "segments, or inline data"),
        (with(1, 0), &[], &[1], "segments, or inline data"),
    ];
    for (send, memory, data, why) in cases {
        let failure = send_request(&send, memory, data).unwrap_err();
        assert_eq!(failure.errno, libc::EINVAL);
        assert!(failure.text.contains(why), "{failure:?}");
    }
    // What the crate checks: the errno and the message are those of the crate.
    let qp = queue_pair(&Peer::cpu());
    let read = with(P2PMEM_ASYNC_REQUEST_READ, inline);
    let failure = failed(qp.post_send(&send_request(&read, &[], &[1]).unwrap()).unwrap_err());
    assert_eq!(failure.errno, libc::EINVAL);
    assert!(failure.text.contains("not inline data"), "{failure:?}");
}

#[test]
fn work_requests_have_all_fields() {
    let remote = Remote {
        address: 0x2000,
        rkey: 5,
    };
    for (operation, expected) in [
        (P2PMEM_ASYNC_REQUEST_SEND, SendOperation::Send),
        (P2PMEM_ASYNC_REQUEST_SEND_IMM, SendOperation::SendImm(6)),
        (P2PMEM_ASYNC_REQUEST_WRITE, SendOperation::Write(remote)),
        (P2PMEM_ASYNC_REQUEST_WRITE_IMM, SendOperation::WriteImm(remote, 6)),
        (P2PMEM_ASYNC_REQUEST_READ, SendOperation::Read(remote)),
        (
            P2PMEM_ASYNC_REQUEST_COMPARE_SWAP,
            SendOperation::CompareSwap {
                remote,
                compare: 7,
                swap: 8,
            },
        ),
        (
            P2PMEM_ASYNC_REQUEST_FETCH_ADD,
            SendOperation::FetchAdd { remote, add: 8 },
        ),
    ] {
        let send = p2pmem_async_send {
            id: 4,
            operation,
            flags: P2PMEM_ASYNC_SEND_IS_FENCED,
            remote_address: 0x2000,
            rkey: 5,
            immediate: 6,
            compare: 7,
            swap_or_add: 8,
            ..no_send()
        };
        let request = send_request(&send, &[SEGMENT], &[]).unwrap();
        assert_eq!((request.id, request.operation), (4, expected));
        assert_eq!(
            (request.signaled, request.solicited, request.fence, request.to),
            (false, false, true, None)
        );
        let memory = Segment {
            address: 0x1000,
            bytes: 8,
            lkey: 3,
        };
        assert_eq!(request.payload, Payload::Memory(vec![memory]));
    }
    let to = p2pmem_async_address_vector {
        qpn: 9,
        dlid: 2,
        has_route: 1,
        hop_limit: 64,
        ..no_vector()
    };
    let send = p2pmem_async_send {
        flags: P2PMEM_ASYNC_SEND_IS_SIGNALED
            | P2PMEM_ASYNC_SEND_IS_SOLICITED
            | P2PMEM_ASYNC_SEND_IS_INLINE
            | P2PMEM_ASYNC_SEND_HAS_ADDRESS,
        to,
        ..no_send()
    };
    let request = send_request(&send, &[], &[1, 2]).unwrap();
    assert_eq!(request.payload, Payload::Inline(vec![1, 2]));
    assert_eq!(
        (request.signaled, request.solicited, request.fence),
        (true, true, false)
    );
    let vector = request.to.unwrap();
    assert_eq!((vector.qpn, vector.dlid, vector.grh.unwrap().hop_limit), (9, 2, 64));
    let back = p2pmem_async_address_vector::from(vector);
    assert_eq!((back.has_route, back.hop_limit, back.qpn), (1, 64, 9));
    assert_eq!(AddressVector::from(&no_vector()).grh, None);
}

#[test]
fn addresses_survive_the_conversion() {
    let address = Address {
        qpn: 1,
        lid: 2,
        gid: [3; 16],
        qkey: 4,
        mtu: 5,
        psn: 6,
    };
    assert_eq!(Address::from(&p2pmem_async_address::from(address)), address);
    // The structure is sent to other machines.
    assert_eq!(size_of::<p2pmem_async_address>(), 32);
}

#[test]
fn full_queues_and_weak_peers_have_their_errno() {
    let qp = queue_pair(&Peer::new("weak", Capabilities::FENCE, 8));
    let send = send_request(&no_send(), &[SEGMENT], &[]).unwrap();
    for _ in 0..4 {
        qp.post_send(&send).unwrap();
    }
    let errno = |error: Error| failed(error).errno;
    assert_eq!(errno(qp.post_send(&send).unwrap_err()), libc::ENOBUFS);
    assert_eq!(errno(qp.commit_qp().unwrap_err()), libc::EOPNOTSUPP);
    assert_eq!(qp.rollback_qp().len(), 4);
    assert!(qp.commit_qp().unwrap().is_empty());
    qp.fail("the peer died");
    assert_eq!(errno(qp.post_send(&send).unwrap_err()), libc::ESHUTDOWN);
    let short = queue_pair(&Peer::new("short", Capabilities::all(), 1));
    short.post_send(&send).unwrap();
    assert_eq!(errno(short.commit_qp().unwrap_err()), libc::E2BIG);
}

#[test]
fn peeks_are_aborted_once() {
    let qp = queue_pair(&Peer::cpu());
    assert_eq!(completion_queue(&qp, 0).unwrap_err().errno, libc::EINVAL);
    assert_eq!(completion_queue(&qp, 3).unwrap_err().text, "3 is no queue");
    assert_eq!(
        completion_queue(&qp, P2PMEM_ASYNC_QUEUE_SEND).unwrap().regions()[0].id(),
        qp.send_cq().regions()[0].id()
    );
    let queue = completion_queue(&qp, P2PMEM_ASYNC_QUEUE_RECEIVE).unwrap();
    assert_eq!(queue.regions()[0].id(), qp.receive_cq().regions()[0].id());
    assert_eq!(Code::peek(queue, 0).unwrap_err().errno, libc::EINVAL);
    assert_eq!(Code::peek(queue, 9).unwrap_err().errno, libc::EAGAIN);
    let (first, second) = (Code::peek(queue, 1).unwrap(), Code::peek(queue, 1).unwrap());
    assert_eq!(Code::peek(queue, 1).unwrap_err().errno, libc::EAGAIN);
    assert!(second.abort().unwrap() && !second.abort().unwrap());
    // The queue pair may be dropped before its peeks.
    drop(qp);
    assert!(first.abort().unwrap());
    let no_peek = Code::from(first.program).abort().unwrap_err();
    assert_eq!(no_peek.errno, libc::EINVAL);
    assert!(no_peek.text.contains("p2pmem_async_peek_cq()"), "{no_peek:?}");
}

#[test]
fn waits_are_inside_of_their_memory() {
    let region = region(RegionKind::Data, 64);
    for offset in [61, 64, u64::MAX - 2] {
        let failure = Code::wait(&region, offset, 1).unwrap_err();
        assert!(failure.text.contains("64 bytes"), "{failure:?}");
    }
    let failure = Code::wait(&region, 2, 1).unwrap_err();
    assert!(failure.text.contains("not aligned"), "{failure:?}");
    assert_eq!(Code::wait(&region, 60, 1).unwrap().program.operations().len(), 1);
}

#[test]
fn every_operation_converts_to_its_structure() {
    let region = region(RegionKind::Data, 4096);
    let id = region.id().number();
    let target = region.target(16);
    let data = vec![0xaa; 24];
    let cases = [
        (Operation::Fence, (P2PMEM_ASYNC_FENCE, 0, 0, 0, 0)),
        (
            Operation::StoreDword {
                target,
                value: u32::MAX,
            },
            (P2PMEM_ASYNC_STORE_DWORD, id, 16, 0xffff_ffff, 4),
        ),
        (
            Operation::StoreQword {
                target,
                value: u64::MAX,
            },
            (P2PMEM_ASYNC_STORE_QWORD, id, 16, u64::MAX, 8),
        ),
        (
            Operation::CopyBlock {
                target,
                data: data.clone(),
            },
            (P2PMEM_ASYNC_COPY_BLOCK, id, 16, 0, 24),
        ),
        (
            Operation::PollAnd { target, value: 1 },
            (P2PMEM_ASYNC_POLL_AND, id, 16, 1, 4),
        ),
        (
            Operation::PollNor { target, value: 2 },
            (P2PMEM_ASYNC_POLL_NOR, id, 16, 2, 4),
        ),
        (
            Operation::PollGeq { target, value: 3 },
            (P2PMEM_ASYNC_POLL_GEQ, id, 16, 3, 4),
        ),
    ];
    let mut code = Code::default();
    assert_eq!(code.operation(0).unwrap_err().errno, libc::EINVAL);
    for (operation, _) in &cases {
        code.program.push(operation.clone()).unwrap();
    }
    for (index, (operation, expected)) in cases.into_iter().enumerate() {
        let got = code.operation(index).unwrap();
        assert_eq!(
            (got.kind, got.region, got.offset, got.value, got.size),
            expected,
            "{operation}"
        );
        assert_eq!(got.data.is_null(), got.kind != P2PMEM_ASYNC_COPY_BLOCK, "{operation}");
    }
    let failure = code.operation(7).unwrap_err();
    assert_eq!(failure.text, "operation 7 of a program that has 7");
}

#[test]
fn regions_have_kind_and_place() {
    let in_bar = Region::part(
        RegionKind::Completions,
        Arc::new(InBar(HostMemory::new(8192).unwrap())),
        4096,
        64,
    );
    let got = p2pmem_async_region::from(&in_bar);
    assert_eq!(got.bar_offset, (1 << 20) + 4096);
    assert_eq!((got.id, got.size), (in_bar.id().number(), 64));
    assert_eq!(got.cpu_address as u64, in_bar.address());
    for (kind, number) in [
        (RegionKind::WorkQueue, P2PMEM_ASYNC_REGION_WORK_QUEUE),
        (RegionKind::QpRecord, P2PMEM_ASYNC_REGION_QP_RECORD),
        (RegionKind::Completions, P2PMEM_ASYNC_REGION_COMPLETIONS),
        (RegionKind::CqRecord, P2PMEM_ASYNC_REGION_CQ_RECORD),
        (RegionKind::Doorbell, P2PMEM_ASYNC_REGION_DOORBELL),
        (RegionKind::Data, P2PMEM_ASYNC_REGION_DATA),
    ] {
        let got = p2pmem_async_region::from(&region(kind, 64));
        assert_eq!((got.kind, got.bar_offset), (number, u64::MAX), "{kind}");
    }
}

#[test]
fn completions_have_their_cause() {
    let mut completion = Completion {
        id: 1,
        qpn: 2,
        direction: Direction::Receive,
        failure: None,
        bytes: 3,
        immediate: Some(4),
        source: Source {
            qpn: 5,
            lid: 6,
            grh: true,
        },
    };
    let got = p2pmem_async_completion::from(&completion);
    assert_eq!(
        (got.id, got.qpn, got.queue, got.bytes),
        (1, 2, P2PMEM_ASYNC_QUEUE_RECEIVE, 3)
    );
    assert_eq!((got.immediate, got.source_qpn, got.source_lid), (4, 5, 6));
    assert_eq!(
        got.flags,
        P2PMEM_ASYNC_COMPLETION_HAS_IMMEDIATE | P2PMEM_ASYNC_COMPLETION_HAS_ROUTE
    );
    assert_eq!(completion_text(&got), "success");
    completion.direction = Direction::Send;
    completion.immediate = None;
    completion.source.grh = false;
    completion.failure = Some(RequestFailure {
        syndrome: Syndrome::RemoteAccess,
        vendor: 0x88,
    });
    let got = p2pmem_async_completion::from(&completion);
    assert_eq!(
        (got.queue, got.flags),
        (P2PMEM_ASYNC_QUEUE_SEND, P2PMEM_ASYNC_COMPLETION_IS_FAILURE)
    );
    assert_eq!((got.syndrome, got.vendor), (0x13, 0x88));
    assert_eq!(completion_text(&got), "remote access error (vendor code 0x88)");
}

#[test]
fn errors_of_p2pmem_keep_their_remedy() {
    let error = Client::resolve("mlx5_99").unwrap_err();
    let (errno, remedy) = (error.errno_or_nearest(), error.remedy());
    let failure = failed(Error::Memory(error));
    assert_eq!((failure.errno, failure.remedy), (errno, remedy));
}
