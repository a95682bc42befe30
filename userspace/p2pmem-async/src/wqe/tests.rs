// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the encoding, with a decoder of their own.

use proptest::prelude::*;

use super::*;

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

/// What a NIC reads from a WQE.
#[derive(Debug, PartialEq)]
struct Decoded {
    index: u16,
    qpn: u32,
    operation: SendOperation,
    payload: Payload,
    signaled: bool,
    solicited: bool,
    fence: bool,
    to: Option<AddressVector>,
}

fn decode_address(bytes: &[u8]) -> AddressVector {
    assert_ne!(be32(&bytes[8..]) & EXTENDED_AV, 0);
    let word = be32(&bytes[28..]);
    AddressVector {
        qkey: be32(bytes),
        qpn: be32(&bytes[8..]) & 0xff_ffff,
        sl: bytes[12],
        path_bits: bytes[13],
        dlid: u16::from_be_bytes([bytes[14], bytes[15]]),
        grh: (word & AV_GRH != 0).then(|| Grh {
            traffic_class: bytes[26],
            hop_limit: bytes[27],
            sgid_index: (word >> 20) as u8,
            flow_label: word & 0xf_ffff,
            dgid: bytes[32..48].try_into().unwrap(),
        }),
    }
}

fn decode(wqe: &[u8], transport: Transport) -> Decoded {
    let (first, second) = (be32(wqe), be32(&wqe[4..]));
    let len = (second & 0x3f) as usize * UNIT;
    assert_eq!(len.next_multiple_of(BLOCK), wqe.len());
    let immediate = be32(&wqe[12..]);
    let mut at = UNIT;
    let mut take = |bytes: usize| {
        at += bytes;
        &wqe[at - bytes..at]
    };
    let to = (transport == Transport::Ud).then(|| decode_address(take(48)));
    let mut remote = || {
        let segment = take(16);
        Remote {
            address: be64(segment),
            rkey: be32(&segment[8..]),
        }
    };
    let operation = match first & 0xff {
        8 => SendOperation::Write(remote()),
        9 => SendOperation::WriteImm(remote(), immediate),
        10 => SendOperation::Send,
        11 => SendOperation::SendImm(immediate),
        16 => SendOperation::Read(remote()),
        17 | 18 => {
            let remote = remote();
            let segment = take(16);
            let (swap, compare) = (be64(segment), be64(&segment[8..]));
            if first & 0xff == 17 {
                SendOperation::CompareSwap { remote, compare, swap }
            } else {
                SendOperation::FetchAdd { remote, add: swap }
            }
        }
        other => panic!("opcode {other:#x}"),
    };
    let mut rest = &wqe[at..len];
    let mut payload = Payload::Memory(Vec::new());
    while !rest.is_empty() {
        let count = be32(rest);
        if count & INLINE != 0 {
            let bytes = (count & !INLINE) as usize;
            payload = Payload::Inline(rest[4..4 + bytes].to_vec());
            rest = &rest[(4 + bytes).next_multiple_of(UNIT)..];
        } else {
            let Payload::Memory(segments) = &mut payload else {
                panic!("memory after inline data")
            };
            segments.push(Segment {
                bytes: count,
                lkey: be32(&rest[4..]),
                address: be64(&rest[8..]),
            });
            rest = &rest[16..];
        }
    }
    Decoded {
        index: (first >> 8) as u16,
        qpn: second >> 8,
        operation,
        payload,
        signaled: wqe[11] & 0xc == 8,
        solicited: wqe[11] & 2 != 0,
        fence: wqe[11] & 0xe0 == 0x40,
        to,
    }
}

fn remotes() -> impl Strategy<Value = Remote> {
    (any::<u64>(), any::<u32>()).prop_map(|(address, rkey)| Remote { address, rkey })
}

fn segments(most: usize) -> impl Strategy<Value = Payload> {
    let one = (any::<u64>(), 1..1u32 << 20, any::<u32>());
    prop::collection::vec(
        one.prop_map(|(address, bytes, lkey)| Segment { address, bytes, lkey }),
        0..most,
    )
    .prop_map(Payload::Memory)
}

fn payloads() -> impl Strategy<Value = Payload> {
    prop_oneof![
        segments(20),
        prop::collection::vec(any::<u8>(), 1..600).prop_map(Payload::Inline)
    ]
}

fn addresses() -> impl Strategy<Value = AddressVector> {
    let grh = (any::<[u8; 16]>(), any::<u8>(), 0..1u32 << 20, any::<u8>(), any::<u8>());
    let grh = grh.prop_map(|(dgid, sgid_index, flow_label, traffic_class, hop_limit)| Grh {
        dgid,
        sgid_index,
        flow_label,
        traffic_class,
        hop_limit,
    });
    let all = (
        any::<u16>(),
        0..16u8,
        0..128u8,
        0..1u32 << 24,
        any::<u32>(),
        prop::option::of(grh),
    );
    all.prop_map(|(dlid, sl, path_bits, qpn, qkey, grh)| AddressVector {
        dlid,
        sl,
        path_bits,
        qpn,
        qkey,
        grh,
    })
}

fn requests() -> impl Strategy<Value = (SendRequest, Transport)> {
    let aligned = || {
        remotes().prop_map(|remote| Remote {
            address: remote.address & !7,
            ..remote
        })
    };
    let eight = || {
        (any::<u64>(), any::<u32>()).prop_map(|(address, lkey)| {
            Payload::Memory(vec![Segment {
                address,
                bytes: 8,
                lkey,
            }])
        })
    };
    let rc =
        prop_oneof![
            (Just(SendOperation::Send), payloads()),
            (any::<u32>().prop_map(SendOperation::SendImm), payloads()),
            (remotes().prop_map(SendOperation::Write), payloads()),
            (
                (remotes(), any::<u32>()).prop_map(|(to, imm)| SendOperation::WriteImm(to, imm)),
                payloads()
            ),
            (remotes().prop_map(SendOperation::Read), segments(20)),
            (
                (aligned(), any::<u64>(), any::<u64>())
                    .prop_map(|(remote, compare, swap)| SendOperation::CompareSwap { remote, compare, swap }),
                eight()
            ),
            (
                (aligned(), any::<u64>()).prop_map(|(remote, add)| SendOperation::FetchAdd { remote, add }),
                eight()
            ),
        ];
    let ud = prop_oneof![
        (Just(SendOperation::Send), payloads()),
        (any::<u32>().prop_map(SendOperation::SendImm), payloads()),
    ];
    let connected = rc.prop_map(|(operation, payload)| (SendRequest::new(1, operation, payload), Transport::Rc));
    let datagram = (ud, addresses())
        .prop_map(|((operation, payload), to)| (SendRequest::new(1, operation, payload).to(to), Transport::Ud));
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (prop_oneof![connected, datagram], flags).prop_map(|((mut request, transport), flags)| {
        (request.signaled, request.solicited, request.fence) = flags;
        (request, transport)
    })
}

proptest! {
    #[test]
    fn a_nic_reads_what_was_requested((request, transport) in requests(), qpn in 0..1u32 << 24, index in any::<u16>()) {
        let wqe = request.encode(transport, qpn, index).unwrap();
        prop_assert_eq!(usize::from(wqe.blocks()) * BLOCK, wqe.bytes().len());
        prop_assert_eq!(wqe.doorbell().to_le_bytes(), &wqe.bytes()[..8]);
        let expected = Decoded {
            index,
            qpn,
            operation: request.operation,
            payload: request.payload,
            signaled: request.signaled,
            solicited: request.solicited,
            fence: request.fence,
            to: request.to,
        };
        prop_assert_eq!(decode(wqe.bytes(), transport), expected);
    }
}

#[test]
fn a_send_has_the_documented_bytes() {
    let payload = Payload::Memory(vec![Segment {
        address: 0x1122,
        bytes: 0x33,
        lkey: 0x44,
    }]);
    let wqe = SendRequest::new(0, SendOperation::SendImm(0xa0b0_c0d0), payload);
    let wqe = wqe.encode(Transport::Rc, 0x5_6789, 0x1234).unwrap();
    let mut expected = vec![
        0, 0x12, 0x34, 0x0b, 0x05, 0x67, 0x89, 2, 0, 0, 0, 8, 0xa0, 0xb0, 0xc0, 0xd0, 0, 0, 0, 0x33, 0, 0, 0, 0x44, 0,
        0, 0, 0, 0, 0, 0x11, 0x22,
    ];
    expected.resize(64, 0);
    assert_eq!(wqe.bytes(), expected);
    assert_eq!(wqe.doorbell(), 0x0289_6705_0b34_1200);
}

#[test]
fn empty_segments_are_omitted() {
    let empty = Segment {
        address: 1,
        bytes: 0,
        lkey: 2,
    };
    for payload in [
        Payload::Memory(vec![empty]),
        Payload::Memory(Vec::new()),
        Payload::Inline(Vec::new()),
    ] {
        let wqe = SendRequest::new(0, SendOperation::Send, payload);
        let wqe = wqe.encode(Transport::Rc, 1, 0).unwrap();
        assert_eq!((wqe.bytes()[7], wqe.blocks()), (1, 1), "only a control segment");
    }
    let receive = ReceiveRequest {
        id: 0,
        segments: vec![empty; 9],
    }
    .encode()
    .unwrap();
    assert_eq!(be32(&receive[4..]), TERMINATE_KEY);
}

#[test]
fn a_short_scatter_list_is_terminated() {
    let segment = Segment {
        address: 7,
        bytes: 5,
        lkey: 6,
    };
    for count in 0..=RECEIVE_SEGMENTS {
        let request = ReceiveRequest {
            id: 0,
            segments: vec![segment; count],
        };
        let entry = request.encode().unwrap();
        let keys: Vec<u32> = entry.chunks(16).map(|segment| be32(&segment[4..])).collect();
        assert_eq!(keys.iter().take_while(|key| **key == 6).count(), count);
        assert!(count == RECEIVE_SEGMENTS || keys[count] == TERMINATE_KEY);
    }
    let error = ReceiveRequest {
        id: 3,
        segments: vec![segment; 5],
    }
    .encode()
    .unwrap_err();
    assert!(
        error.to_string().contains("work request 0x3 is invalid: 5 segments"),
        "{error}"
    );
}

#[test]
fn invalid_requests_are_refused_with_reason() {
    use SendOperation as op;
    let remote = Remote { address: 12, rkey: 0 };
    let inline = |bytes| Payload::Inline(vec![0; bytes]);
    let memory = |bytes: &[u32]| {
        Payload::Memory(
            bytes
                .iter()
                .map(|bytes| Segment {
                    address: 0,
                    bytes: *bytes,
                    lkey: 0,
                })
                .collect(),
        )
    };
    let to = AddressVector {
        dlid: 1,
        sl: 0,
        path_bits: 0,
        qpn: 1,
        qkey: 0,
        grh: None,
    };
    let far = AddressVector { qpn: 1 << 24, ..to };
    let aligned = Remote { address: 8, rkey: 0 };
    let cases = [
        (
            Transport::Ud,
            SendRequest::new(9, op::Send, inline(1)),
            "needs the address",
        ),
        (
            Transport::Rc,
            SendRequest::new(9, op::Send, inline(1)).to(to),
            "one receiver",
        ),
        (
            Transport::Ud,
            SendRequest::new(9, op::Write(remote), inline(1)).to(to),
            "SEND only",
        ),
        (
            Transport::Ud,
            SendRequest::new(9, op::Send, inline(1)).to(far),
            "24 bits",
        ),
        (
            Transport::Rc,
            SendRequest::new(9, op::Read(remote), inline(8)),
            "not inline",
        ),
        (
            Transport::Rc,
            SendRequest::new(
                9,
                op::FetchAdd {
                    remote: aligned,
                    add: 1,
                },
                inline(8),
            ),
            "not inline",
        ),
        (
            Transport::Rc,
            SendRequest::new(9, op::Send, inline(1024)),
            "1024 bytes of inline",
        ),
        (
            Transport::Rc,
            SendRequest::new(9, op::Send, inline(1010)),
            "in the send queue",
        ),
        (
            Transport::Rc,
            SendRequest::new(9, op::Send, memory(&[1; 64])),
            "in the send queue",
        ),
        (
            Transport::Rc,
            SendRequest::new(9, op::Send, memory(&[1 << 31, 1])),
            "2147483649 bytes",
        ),
        (
            Transport::Rc,
            SendRequest::new(
                9,
                op::FetchAdd {
                    remote: aligned,
                    add: 1,
                },
                memory(&[4]),
            ),
            "8 bytes",
        ),
        (
            Transport::Rc,
            SendRequest::new(
                9,
                op::FetchAdd {
                    remote: aligned,
                    add: 1,
                },
                memory(&[4, 4]),
            ),
            "8 bytes",
        ),
        (
            Transport::Rc,
            SendRequest::new(9, op::FetchAdd { remote, add: 1 }, memory(&[8])),
            "multiple of 8",
        ),
    ];
    for (transport, request, why) in cases {
        let error = request.encode(transport, 1, 0).unwrap_err().to_string();
        assert!(
            error.starts_with("work request 0x9 is invalid") && error.contains(why),
            "{error}"
        );
    }
}

#[test]
fn a_work_request_has_at_most_63_units() {
    // The length has 6 bits. Control segment of 16 bytes, inline header of 4 bytes.
    let inline = |bytes| SendRequest::new(1, SendOperation::Send, Payload::Inline(vec![7; bytes]));
    let wqe = inline(988).encode(Transport::Rc, 5, 0).unwrap();
    assert_eq!(be32(&wqe.bytes()[4..]) & 0x3f, 63);
    let error = inline(989).encode(Transport::Rc, 5, 0).unwrap_err().to_string();
    assert!(error.contains("at most 1008"), "{error}");
}

#[test]
fn a_segment_of_2_gib_is_no_inline_data() {
    let segment = |bytes| Segment {
        address: 0x1000,
        bytes,
        lkey: 3,
    };
    let send = |bytes| SendRequest::new(1, SendOperation::Send, Payload::Memory(vec![segment(bytes)]));
    let receive = |bytes| ReceiveRequest {
        id: 1,
        segments: vec![segment(bytes)],
    };
    let wqe = send(1 << 31).encode(Transport::Rc, 5, 0).unwrap();
    assert_eq!(be32(&wqe.bytes()[16..]), 0, "0 means 2 GiB");
    assert_eq!(be32(&receive(1 << 31).encode().unwrap()), 0);
    for bytes in [(1 << 31) + 1, u32::MAX] {
        assert!(send(bytes).encode(Transport::Rc, 5, 0).is_err());
        assert!(receive(bytes).encode().is_err());
    }
}
