// SPDX-License-Identifier: MIT OR Apache-2.0

//! Datagrams, the general services interface, multicast, and subnet administration.

use super::*;
use crate::fabric::Fabric;
use crate::packet::Gid;
use crate::work::{Grh, UdSource};

const QKEY: u32 = 0x1111_1111;
const GSI_QKEY: u32 = 0x8001_0000;

/// Creates `n` nodes, with queue pair 2 on node 0, queue pair 3 on node 1, and so on.
fn sim(n: usize) -> Simulation {
    let mut sim = Simulation::new(n, 1 << 16);
    for node in 0..n {
        let qpn = 2 + node as u32;
        sim.qp(node, qpn, Service::Ud, ReceiveFrom::Own);
        sim.datagrams_up(node, qpn, QKEY);
    }
    sim
}

fn gid(node: usize) -> Gid {
    Gid::new(Gid::DEFAULT_PREFIX, 0x1234_0000 + node as u64)
}

fn sources(sim: &Simulation, node: usize) -> Vec<UdSource> {
    let completions = sim.nodes[node].host.completions.iter();
    completions
        .filter_map(|completion| match completion {
            Completion::Receive { source, .. } => *source,
            Completion::Send { .. } => None,
        })
        .collect()
}

#[test]
fn datagram_follows_40_bytes_and_reports_source() {
    let mut sim = sim(2);
    let data = sim.fill(0, 0, 4096, 1);
    for id in 0..3 {
        sim.receive(1, Queue::Own(3), id, id * 10_000, 5000);
    }
    let to = sim.datagram_to(1, 3, QKEY);
    let mut with_grh = to;
    let dgid = gid(1);
    let grh = Grh {
        sgid_index: 0,
        dgid,
        flow_label: 0x12345,
        traffic_class: 0x67,
        hop_limit: 9,
    };
    with_grh.path.grh = Some(grh);
    with_grh.path.sl = 3;
    sim.post(
        0,
        2,
        SendWork {
            to: Some(to),
            ..send(1, 0, 4096)
        },
    );
    sim.post(
        0,
        2,
        SendWork {
            to: Some(with_grh),
            ..work(2, SendOp::Send { imm: Some(77) }, 0, 5)
        },
    );
    sim.post(
        0,
        2,
        SendWork {
            to: Some(to),
            ..send(3, 0, 0)
        },
    );
    sim.run();
    assert_eq!(sim.sends(0), ok([1, 2, 3]));
    assert_eq!(
        sim.received(1),
        [
            (0, Status::Success, 4136, Received::Send),
            (1, Status::Success, 45, Received::SendImm(77)),
            (2, Status::Success, 40, Received::Send),
        ]
    );
    assert_eq!(sim.bytes(1, 40, 4096), data);
    assert_eq!(sim.bytes(1, 0, 40), [0; 40]);
    let header = sim.bytes(1, 10_000, 40);
    assert_eq!(header[..4], [0x66, 0x71, 0x23, 0x45]);
    // BTH, DETH and immediate data (12 + 8 + 4 bytes), payload (5 bytes) with 3 bytes of padding, and 4 bytes of CRC.
    assert_eq!(header[4..8], [0, 36, 0x1b, 9]);
    assert_eq!(header[8..24], gid(0).0);
    assert_eq!(header[24..], gid(1).0);
    assert_eq!(sim.bytes(1, 10_040, 5), &data[..5]);
    let plain = UdSource {
        qpn: 2,
        lid: sim.lid(0),
        sl: 0,
        path_bits: 0,
        grh: false,
        pkey_index: 0,
        multicast: false,
    };
    assert_eq!(
        sources(&sim, 1),
        [
            plain,
            UdSource {
                sl: 3,
                grh: true,
                ..plain
            },
            plain
        ]
    );
}

#[test]
fn undeliverable_datagrams_are_dropped_silently() {
    let mut sim = sim(2);
    sim.receive(1, Queue::Own(3), 1, 0, 100);
    let wrong_key = sim.datagram_to(1, 3, QKEY + 1);
    let unknown_qp = sim.datagram_to(1, 9, QKEY);
    let own = sim.datagram_to(1, 3, 1 << 31);
    for (id, to) in [wrong_key, unknown_qp, own, own].into_iter().enumerate() {
        sim.post(
            0,
            2,
            SendWork {
                to: Some(to),
                ..send(id as u64, 0, 10)
            },
        );
    }
    sim.run();
    assert_eq!(sim.sends(0), ok(0..4));
    assert_eq!(
        sim.received(1),
        [(1, Status::Success, 50, Received::Send)],
        "the one with the own Q_Key"
    );
    let counters = sim.nodes[1].engine.counters();
    assert_eq!(
        (
            counters.qkey_violations,
            counters.packets_dropped,
            counters.datagrams_dropped
        ),
        (1, 1, 1)
    );
    assert_eq!(sim.state_of(1, 3), State::Rts);
}

#[test]
fn oversized_datagrams_are_errors() {
    let mut sim = sim(2);
    let to = Some(sim.datagram_to(1, 3, QKEY));
    sim.post(0, 2, SendWork { to, ..send(1, 0, 4097) });
    sim.post(0, 2, SendWork { to, ..send(2, 0, 10) });
    sim.run();
    assert_eq!(sim.sends(0), [(1, Status::LocalLength), (2, Status::Flushed)]);
    assert_eq!(sim.state_of(0, 2), State::Sqe);
    sim.state(0, 2, State::Rts);
    sim.receive(1, Queue::Own(3), 7, 0, 49);
    sim.post(0, 2, SendWork { to, ..send(3, 0, 10) });
    sim.run();
    assert_eq!(sim.sends(0).last(), Some(&(3, Status::Success)));
    assert_eq!(sim.received(1)[0].1, Status::LocalLength);
    // No address, or an operation that datagram services do not support.
    sim.post(0, 2, send(4, 0, 10));
    sim.run();
    assert_eq!(sim.sends(0).last(), Some(&(4, Status::LocalQpOperation)));
}

/// Creates `n` nodes. On each, queue pair 20 is the general services interface, and queue pair 21 sends as queue pair
/// 1.
fn with_gsi(n: usize) -> Simulation {
    let mut sim = sim(n);
    for node in 0..n {
        sim.qp(node, 20, Service::Gsi, ReceiveFrom::Own);
        sim.datagrams_up(node, 20, 0);
        let config = QpConfig {
            service: Service::Ud,
            pd: PD,
            send_cqn: 1,
            receive_cqn: 1,
            receive: ReceiveFrom::None,
            xrcd: 0,
            source_qpn: Some(1),
            deaf_to_itself: false,
        };
        sim.nodes[node].engine.create_qp(21, config).unwrap();
        sim.datagrams_up(node, 21, GSI_QKEY);
        for id in 0..8 {
            sim.receive(node, Queue::Own(20), id, 0x8000 + id * 0x200, 0x200);
        }
    }
    sim
}

#[test]
fn management_datagrams_go_to_qp1() {
    let mut sim = with_gsi(2);
    let to = Some(sim.datagram_to(1, 1, GSI_QKEY));
    sim.post(0, 20, SendWork { to, ..send(1, 0, 256) });
    sim.post(0, 21, SendWork { to, ..send(2, 0, 256) });
    sim.run();
    assert_eq!(
        sources(&sim, 1).iter().map(|source| source.qpn).collect::<Vec<_>>(),
        [1, 1]
    );
    let completions = &sim.nodes[1].host.completions;
    assert!(
        completions
            .iter()
            .all(|completion| matches!(completion, Completion::Receive { qpn: 20, .. }))
    );
    use crate::attributes::ModifyError;
    let second = sim.nodes[0].engine.create_qp(
        30,
        QpConfig {
            service: Service::Gsi,
            pd: PD,
            send_cqn: 1,
            receive_cqn: 1,
            receive: ReceiveFrom::Own,
            xrcd: 0,
            source_qpn: None,
            deaf_to_itself: false,
        },
    );
    assert_eq!(second, Err(ModifyError::InUse));
}

/// Builds a component mask from bit numbers.
const fn bits(bits: &[u32]) -> u64 {
    let mut mask = 0;
    let mut i = 0;
    while i < bits.len() {
        mask |= 1 << bits[i];
        i += 1;
    }
    mask
}

/// Builds a subnet administration MAD.
fn mad(method: u8, attribute: u16, mask: u64, record: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; 256];
    bytes[..4].copy_from_slice(&[1, 3, 2, method]);
    bytes[8..16].copy_from_slice(&0x1122_3344_5566_7788_u64.to_be_bytes());
    bytes[16..18].copy_from_slice(&attribute.to_be_bytes());
    bytes[48..56].copy_from_slice(&mask.to_be_bytes());
    for (at, field) in record {
        bytes[56 + at..56 + at + field.len()].copy_from_slice(field);
    }
    bytes
}

/// Sends a subnet administration request from a node. Returns status and record of the response.
fn query_sa(sim: &mut Simulation, node: usize, request: Vec<u8>) -> (u16, Vec<u8>) {
    let before = sim.received(node).len();
    let path = Path {
        dlid: Fabric::SM_LID,
        path_bits: 0,
        sl: 0,
        grh: None,
    };
    let mut work = send(1, 0, 0);
    work.payload = Payload::Inline(request.clone());
    work.to = Some(AddressVector {
        path,
        qpn: 1,
        qkey: GSI_QKEY,
    });
    sim.post(node, 20, work);
    sim.run();
    let responses = sim.received(node);
    assert_eq!(responses.len(), before + 1, "one response per request");
    let (id, status, length, _) = responses[before];
    assert_eq!((status, length), (Status::Success, 296));
    let address = 0x8000 + id as usize * 0x200;
    sim.receive(node, Queue::Own(20), id, address as u64, 0x200);
    let response = sim.bytes(node, address + 40, 256);
    assert_eq!(response[..3], request[..3]);
    let method = if request[3] == 0x15 { 0x95 } else { 0x81 };
    assert_eq!(response[3], method);
    assert_eq!(
        response[8..18],
        request[8..18],
        "the response repeats the transaction ID and the attribute ID"
    );
    (u16::from_be_bytes([response[4], response[5]]), response[56..].to_vec())
}

const JOIN: u64 = bits(&[0, 1, 16]);

fn join(sim: &mut Simulation, node: usize, mgid: &[u8], state: u8) -> (u16, Vec<u8>) {
    let port = gid(node).0;
    query_sa(sim, node, mad(2, 0x38, JOIN, &[(0, mgid), (16, &port), (48, &[state])]))
}

fn leave(sim: &mut Simulation, node: usize, mgid: &[u8], state: u8) -> u16 {
    let port = gid(node).0;
    query_sa(
        sim,
        node,
        mad(0x15, 0x38, JOIN, &[(0, mgid), (16, &port), (48, &[state])]),
    )
    .0
}

/// The broadcast group of IP over InfiniBand.
const BROADCAST: [u8; 16] = [
    0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
];

#[test]
fn paths_are_found_by_gid_and_by_lid() {
    let mut sim = with_gsi(2);
    let (from, to) = (gid(0).0, gid(1).0);
    let by_gid = mad(
        1,
        0x35,
        bits(&[2, 3, 13]),
        &[(8, &to), (24, &from), (50, &[0xff, 0xff])],
    );
    let (status, record) = query_sa(&mut sim, 0, by_gid);
    assert_eq!(status, 0);
    assert_eq!(record[8..24], to);
    assert_eq!(record[24..40], from);
    assert_eq!(record[40..44], [0, sim.lid(1) as u8, 0, sim.lid(0) as u8]);
    assert_eq!(
        record[49..52],
        [0x81, 0xff, 0xff],
        "the response must be reversible, have one path and the default partition"
    );
    assert_eq!(
        record[54..57],
        [0x85, 0x90, 0x8e],
        "4096 bytes, 100 Gbit/s, packet life"
    );

    let lid = sim.lid(1).to_be_bytes();
    let (status, record) = query_sa(&mut sim, 0, mad(1, 0x35, 1 << 4, &[(40, &lid)]));
    assert_eq!((status, &record[8..24], &record[24..40]), (0, &to[..], &from[..]));
    // Selector "less than 2048": the result is 1024 bytes.
    let (status, record) = query_sa(
        &mut sim,
        0,
        mad(1, 0x35, bits(&[4, 16, 17]), &[(40, &lid), (54, &[0x44])]),
    );
    assert_eq!((status, record[54]), (0, 0x83));
    // Selector "greater than 4096": no path matches.
    let (status, _) = query_sa(
        &mut sim,
        0,
        mad(1, 0x35, bits(&[4, 16, 17]), &[(40, &lid), (54, &[0x05])]),
    );
    assert_eq!(status, 0x300);
    // No destination, unknown destination, other partition, and a destination whose link is down.
    assert_eq!(query_sa(&mut sim, 0, mad(1, 0x35, 1 << 3, &[(24, &from)])).0, 0x600);
    assert_eq!(query_sa(&mut sim, 0, mad(1, 0x35, 1 << 4, &[(40, &[0, 99])])).0, 0x300);
    let partition = mad(1, 0x35, bits(&[4, 13]), &[(40, &lid), (50, &[0x80, 1])]);
    assert_eq!(query_sa(&mut sim, 0, partition).0, 0x300);
    let lid = sim.lid(1);
    sim.network.borrow_mut().set_up(lid, false);
    assert_eq!(
        query_sa(&mut sim, 0, mad(1, 0x35, 1 << 4, &[(40, &lid.to_be_bytes())])).0,
        0x300
    );
}

#[test]
fn multicast_group_exists_while_it_has_members() {
    let mut sim = with_gsi(2);
    assert_eq!(
        query_sa(&mut sim, 0, mad(1, 0x38, 1, &[(0, &BROADCAST)])).0,
        0x300,
        "the group does not exist before the first join"
    );
    assert_eq!(
        join(&mut sim, 0, &BROADCAST, 4).0,
        0x200,
        "a send-only non-member must not create a group"
    );
    let (status, record) = join(&mut sim, 0, &BROADCAST, 1);
    assert_eq!(status, 0);
    assert_eq!(record[..16], BROADCAST);
    assert_eq!(record[16..32], gid(0).0);
    assert_eq!(record[32..36], [0, 0, 0x0b, 0x1b]);
    assert_eq!(record[36..38], [0xc0, 0]);
    assert_eq!(record[38], 0x84, "MTU selector and 2048 bytes");
    assert_eq!(record[40..42], [0xff, 0xff]);
    assert_eq!(record[48], 0x21, "link-local scope, full member");
    assert_eq!(join(&mut sim, 1, &BROADCAST, 1).1[36..38], [0xc0, 0]);
    // A second group with its own attributes, and a request that does not match them.
    let mut other = BROADCAST;
    other[15] = 1;
    let port = gid(0).0;
    let create = |qkey: [u8; 4]| {
        let mask = JOIN | bits(&[2, 4, 5, 6, 7, 12, 13, 14]);
        let fields: &[(usize, &[u8])] = &[
            (0, &other),
            (16, &port),
            (32, &qkey),
            (38, &[0x83, 5]),
            (40, &[0xff, 0xff]),
            (44, &[0x31, 0x23, 0x45, 7]),
            (48, &[1]),
        ];
        mad(2, 0x38, mask, fields)
    };
    let (status, record) = query_sa(&mut sim, 0, create([1, 2, 3, 4]));
    assert_eq!(status, 0);
    assert_eq!(record[32..40], [1, 2, 3, 4, 0xc0, 1, 0x83, 5]);
    assert_eq!(record[44..48], [0x31, 0x23, 0x45, 7]);
    assert_eq!(query_sa(&mut sim, 0, create([9, 2, 3, 4])).0, 0x200);
    // A port can end only a membership that it has. When the last full member ends its membership, the group is
    // deleted.
    assert_eq!(leave(&mut sim, 1, &other, 1), 0x200);
    assert_eq!(leave(&mut sim, 0, &other, 2), 0x200);
    assert_eq!(leave(&mut sim, 0, &other, 1), 0);
    assert_eq!(query_sa(&mut sim, 0, mad(1, 0x38, 1, &[(0, &other)])).0, 0x300);
    // A group without an MGID gets one.
    let (status, record) = join(&mut sim, 0, &[0; 16], 1);
    assert_eq!((status, record[0]), (0, 0xff));
    // Not a multicast GID; an unknown port.
    assert_eq!(join(&mut sim, 0, &[0xfe; 16], 1).0, 0x200);
    let stranger = mad(2, 0x38, JOIN, &[(0, &BROADCAST), (16, &[9; 16]), (48, &[1])]);
    assert_eq!(query_sa(&mut sim, 0, stranger).0, 0x500);
    // Removing a port ends the port's memberships.
    let lid = sim.lid(1);
    sim.network.borrow_mut().remove_port(lid);
    assert_eq!(leave(&mut sim, 0, &BROADCAST, 1), 0);
    assert_eq!(query_sa(&mut sim, 0, mad(1, 0x38, 1, &[(0, &BROADCAST)])).0, 0x300);
}

#[test]
fn sa_reports_capabilities_and_rejects_unknown_attributes() {
    let mut sim = with_gsi(1);
    let (status, record) = query_sa(&mut sim, 0, mad(1, 1, 0, &[]));
    assert_eq!((status, &record[..2]), (0, &[1, 2][..]));
    assert_eq!(
        u32::from_be_bytes(record[4..8].try_into().unwrap()) >> 5,
        1 << 12,
        "send-only full members"
    );
    assert_eq!(query_sa(&mut sim, 0, mad(1, 0x31, 0, &[])).0, 0x000c);
    let mut old = mad(1, 1, 0, &[]);
    old[2] = 1;
    assert_eq!(query_sa(&mut sim, 0, old).0, 0x0004);
}

#[test]
fn invalid_mads_get_no_response() {
    let mut sim = with_gsi(1);
    let path = Path {
        dlid: Fabric::SM_LID,
        path_bits: 0,
        sl: 0,
        grh: None,
    };
    let to = AddressVector {
        path,
        qpn: 1,
        qkey: GSI_QKEY,
    };
    let mut response = mad(0x81, 1, 0, &[]);
    let mut other_class = mad(1, 1, 0, &[]);
    other_class[1] = 7;
    response.truncate(256);
    let cases = [
        (to, response),
        (to, other_class),
        (to, mad(1, 1, 0, &[])[..255].to_vec()),
        (AddressVector { qkey: 1, ..to }, mad(1, 1, 0, &[])),
        (AddressVector { qpn: 2, ..to }, mad(1, 1, 0, &[])),
    ];
    for (to, bytes) in cases {
        let mut work = send(1, 0, 0);
        work.payload = Payload::Inline(bytes);
        work.to = Some(to);
        sim.post(0, 20, work);
    }
    sim.run();
    assert_eq!(sim.received(0), []);
    assert_eq!(sim.sends(0).len(), 5);
}

#[test]
fn multicast_reaches_attached_members() {
    let mut sim = with_gsi(4);
    let mgid = Gid(BROADCAST);
    let mut mlid = 0;
    // Nodes 0 to 2 join. Two queue pairs of node 1 are attached, none of node 2.
    for node in 0..3 {
        let record = join(&mut sim, node, &BROADCAST, 1).1;
        mlid = u16::from_be_bytes([record[36], record[37]]);
    }
    sim.qp(1, 40, Service::Ud, ReceiveFrom::Own);
    sim.datagrams_up(1, 40, QKEY);
    for (node, qpn) in [(0, 2), (1, 3), (1, 40), (3, 5)] {
        sim.nodes[node].engine.attach(qpn, mgid).unwrap();
        sim.receive(node, Queue::Own(qpn), 70, 0x1000, 200);
        sim.receive(node, Queue::Own(qpn), 71, 0x2000, 200);
    }
    for node in &mut sim.nodes {
        node.host.completions.clear();
    }
    let grh = Grh {
        sgid_index: 0,
        dgid: mgid,
        flow_label: 0,
        traffic_class: 0,
        hop_limit: 0,
    };
    let path = Path {
        dlid: mlid,
        path_bits: 0,
        sl: 0,
        grh: Some(grh),
    };
    let to = Some(AddressVector {
        path,
        qpn: 0xff_ffff,
        qkey: QKEY,
    });
    let data = sim.fill(3, 0, 100, 9);
    // The sender need not be a member.
    sim.post(3, 5, SendWork { to, ..send(1, 0, 100) });
    sim.run();
    let counts = |sim: &Simulation| [0, 1, 2, 3].map(|node| sim.received(node).len());
    assert_eq!(counts(&sim), [1, 2, 0, 0]);
    assert_eq!(sim.bytes(1, 0x1000 + 40, 100), data);
    assert!(sources(&sim, 0)[0].multicast);
    // A member receives its own packets.
    sim.post(0, 2, SendWork { to, ..send(2, 0, 100) });
    sim.run();
    assert_eq!(counts(&sim), [2, 4, 0, 0]);
    // With multicast loopback blocked, queue pair 50 does not receive its own packets. Other queue pairs of the port
    // do, and queue pair 50 receives packets of others.
    let config = QpConfig {
        service: Service::Ud,
        pd: PD,
        send_cqn: 150,
        receive_cqn: 250,
        receive: ReceiveFrom::Own,
        xrcd: 0,
        source_qpn: None,
        deaf_to_itself: true,
    };
    sim.nodes[1].engine.create_qp(50, config).unwrap();
    sim.datagrams_up(1, 50, QKEY);
    sim.nodes[1].engine.attach(50, mgid).unwrap();
    for qpn in [3, 40, 50] {
        sim.receive(1, Queue::Own(qpn), 73, 0x4000, 200);
        sim.receive(1, Queue::Own(qpn), 74, 0x4000, 200);
    }
    sim.receive(0, Queue::Own(2), 73, 0x4000, 200);
    sim.receive(0, Queue::Own(2), 74, 0x4000, 200);
    sim.post(1, 50, SendWork { to, ..send(4, 0, 100) });
    sim.run();
    assert_eq!(counts(&sim), [3, 6, 0, 0]);
    sim.post(3, 5, SendWork { to, ..send(4, 0, 100) });
    sim.run();
    assert_eq!(counts(&sim), [4, 9, 0, 0]);
    sim.nodes[1].engine.detach(50, mgid).unwrap();
    sim.nodes[1].engine.detach(40, mgid).unwrap();
    assert!(sim.nodes[1].engine.detach(40, mgid).is_err());
    assert!(
        sim.nodes[1].engine.attach(3, mgid).is_err(),
        "the queue pair is already attached"
    );
    assert_eq!(leave(&mut sim, 0, &BROADCAST, 1), 0);
    sim.nodes[0].host.completions.clear();
    sim.nodes[1].host.completions.clear();
    sim.receive(1, Queue::Own(3), 72, 0x3000, 200);
    sim.post(3, 5, SendWork { to, ..send(3, 0, 100) });
    sim.run();
    assert_eq!(counts(&sim), [0, 1, 0, 0]);
}
