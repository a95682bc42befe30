// SPDX-License-Identifier: MIT OR Apache-2.0

//! Connections without faults: every operation, lengths around the path MTU, order, fences, states.

use super::links::counters;
use super::*;
use crate::work::{Fence, Grh};

#[test]
fn writes_of_every_length_arrive_byte_for_byte() {
    for service in [Service::Rc, Service::Uc] {
        for mtu in [Mtu::B256, Mtu::B1024, Mtu::B4096] {
            let lengths = [0, 1, 255, 256, 257, 1024, 4095, 4096, 4097, 65536, 65537, 200_000];
            for length in lengths {
                let mut sim = Simulation::new(2, 1 << 18);
                sim.pair(
                    service,
                    Connection {
                        mtu,
                        ..Connection::default()
                    },
                );
                let data = sim.fill(0, 0, length as usize, 0x5a);
                sim.post(0, 2, write(9, 0, length, 100));
                sim.run();
                assert_eq!(sim.sends(0), ok([9]), "{service:?} {mtu:?} {length}");
                assert_eq!(sim.bytes(1, 100, data.len()), data);
                assert_eq!(sim.bytes(1, 100 + data.len(), 8), [0; 8]);
                assert!(sim.nodes[1].host.completions.is_empty());
            }
        }
    }
}

#[test]
fn packets_are_combined_into_few_writes() {
    let mut sim = Simulation::new(2, 1 << 20);
    sim.pair(Service::Rc, Connection::default());
    sim.post(0, 2, write(1, 0, 1 << 19, 1 << 19));
    sim.run();
    assert_eq!(sim.sends(0), ok([1]));
    // 512 packets.
    assert!(sim.nodes[1].host.writes <= 24, "{}", sim.nodes[1].host.writes);
}

#[test]
fn messages_are_scattered_and_gathered() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(
        Service::Rc,
        Connection {
            mtu: Mtu::B256,
            ..Connection::default()
        },
    );
    let data = sim.fill(0, 0, 3000, 1);
    let mut work = send(5, 0, 0);
    let sge = |address, length| Sge {
        key: ALL_KEY,
        address,
        length,
    };
    work.payload = Payload::Memory(smallvec![sge(0, 1), sge(1, 999), sge(1000, 0), sge(1000, 2000)]);
    sim.post(0, 2, work);
    let sges = smallvec![sge(10_000, 700), sge(20_000, 1), sge(30_000, 5000)];
    let receive = ReceiveWork { id: 77, sges, left: 0 };
    sim.nodes[1]
        .host
        .receives
        .entry(Queue::Own(3))
        .or_default()
        .push_back(receive);
    sim.run();
    assert_eq!(sim.sends(0), ok([5]));
    assert_eq!(sim.received(1), [(77, Status::Success, 3000, Received::Send)]);
    assert_eq!(sim.bytes(1, 10_000, 700), &data[..700]);
    assert_eq!(sim.bytes(1, 20_000, 1), &data[700..701]);
    assert_eq!(sim.bytes(1, 30_000, 2299), &data[701..]);
}

#[test]
fn inline_and_memory_segments_are_gathered() {
    for service in [Service::Rc, Service::Uc] {
        let mut sim = Simulation::new(2, 1 << 20);
        sim.pair(service, Connection::default());
        let data = sim.fill(0, 0, 400_000, 1);
        let memory = |address, length| {
            Segment::Memory(Sge {
                key: ALL_KEY,
                address,
                length,
            })
        };
        let inline = |bytes: &[u8]| Segment::Inline(bytes.to_vec());
        let all = [
            inline(b"head"),
            inline(b"er"),
            memory(0, 300_000),
            inline(b"between"),
            memory(300_000, 0),
            memory(300_000, 100_000),
            inline(b"end"),
        ];
        let empty = Payload::Memory(smallvec![]);
        let mut work = write(1, 0, 0, 500_000);
        work.payload = all.into_iter().fold(empty, Payload::with);
        sim.post(0, 2, work);
        sim.run();
        assert_eq!(sim.sends(0), ok([1]), "{service:?}");
        let expected = [b"header", &data[..300_000], b"between", &data[300_000..], b"end"].concat();
        assert!(sim.bytes(1, 500_000, expected.len()) == expected, "{service:?}");
        assert_eq!(sim.bytes(1, 500_000 + expected.len(), 8), [0; 8]);
    }
}

#[test]
fn immediate_data_inline_data_and_solicited_events_arrive() {
    for service in [Service::Rc, Service::Uc] {
        let mut sim = Simulation::new(2, 1 << 16);
        sim.pair(service, Connection::default());
        for id in 0..3 {
            sim.receive(1, Queue::Own(3), id, 1000 * id, 1000);
        }
        let mut inline = work(1, SendOp::Send { imm: Some(0xdead_beef) }, 0, 0);
        inline.payload = Payload::Inline(b"hello".to_vec());
        inline.flags.solicited = true;
        let remote = Remote {
            address: 40_000,
            key: ALL_KEY,
        };
        let mut empty = work(
            2,
            SendOp::Write {
                remote: Remote { address: 0, key: 0 },
                imm: Some(6),
            },
            0,
            0,
        );
        empty.payload = Payload::Inline(Vec::new());
        let data = sim.fill(0, 0, 5000, 3);
        sim.post(0, 2, inline);
        sim.post(0, 2, empty);
        sim.post(0, 2, work(3, SendOp::Write { remote, imm: Some(7) }, 0, 5000));
        sim.run();
        assert_eq!(sim.sends(0), ok([1, 2, 3]));
        assert_eq!(
            sim.received(1),
            [
                (0, Status::Success, 5, Received::SendImm(0xdead_beef)),
                (1, Status::Success, 0, Received::WriteImm(6)),
                (2, Status::Success, 5000, Received::WriteImm(7)),
            ]
        );
        assert_eq!(sim.bytes(1, 0, 5), b"hello");
        assert_eq!(sim.bytes(1, 40_000, 5000), data);
        let solicited: Vec<bool> = sim.nodes[1]
            .host
            .completions
            .iter()
            .map(|completion| {
                matches!(
                    completion,
                    Completion::Receive {
                        solicited: true,
                        cqn: 203,
                        qpn: 3,
                        ..
                    }
                )
            })
            .collect();
        assert_eq!(solicited, [true, false, false]);
    }
}

#[test]
fn reads_return_data_and_atomics_return_old_value() {
    let mut sim = Simulation::new(2, 1 << 20);
    sim.pair(Service::Rc, Connection::default());
    let data = sim.fill(1, 0, 300_001, 9);
    sim.nodes[1].host.memory[400_000..400_008].copy_from_slice(&41_u64.to_le_bytes());
    let remote = Remote {
        address: 400_000,
        key: ALL_KEY,
    };
    sim.post(0, 2, read(1, 500_000, 300_001, 0));
    sim.post(0, 2, work(2, SendOp::FetchAdd { remote, add: 1 }, 8, 8));
    sim.post(
        0,
        2,
        work(
            3,
            SendOp::CompareSwap {
                remote,
                compare: 42,
                swap: 7,
            },
            16,
            8,
        ),
    );
    sim.post(
        0,
        2,
        work(
            4,
            SendOp::CompareSwap {
                remote,
                compare: 42,
                swap: 8,
            },
            24,
            8,
        ),
    );
    sim.post(0, 2, read(5, 0, 0, 0));
    sim.run();
    assert_eq!(sim.sends(0), ok(1..=5));
    assert_eq!(sim.bytes(0, 500_000, data.len()), data);
    let got: Vec<u64> = [8, 16, 24]
        .map(|at| u64::from_le_bytes(sim.bytes(0, at, 8).try_into().unwrap()))
        .into();
    assert_eq!(got, [41, 42, 7]);
    assert_eq!(sim.bytes(1, 400_000, 8), 7_u64.to_le_bytes());
    let lengths: Vec<u32> = sim.nodes[0]
        .host
        .completions
        .iter()
        .filter_map(|completion| match completion {
            Completion::Send { length, .. } => Some(*length),
            Completion::Receive { .. } => None,
        })
        .collect();
    assert_eq!(lengths, [300_001, 8, 8, 8, 0]);
}

#[test]
fn send_with_invalidate_removes_key() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(Service::Rc, Connection::default());
    let key = sim.nodes[1].host.keys[&ALL_KEY];
    sim.nodes[1].host.keys.insert(0x55, key);
    sim.receive(1, Queue::Own(3), 1, 0, 64);
    sim.post(0, 2, work(1, SendOp::SendInvalidate { key: 0x55 }, 0, 16));
    sim.run();
    assert_eq!(
        sim.received(1),
        [(1, Status::Success, 16, Received::SendInvalidate(0x55))]
    );
    assert!(!sim.nodes[1].host.keys.contains_key(&0x55));
}

#[test]
fn unsignaled_work_makes_no_completion() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(Service::Rc, Connection::default());
    for id in 0..10 {
        let mut work = write(id, 0, 100, 0);
        work.flags.signaled = id == 9;
        sim.post(0, 2, work);
    }
    sim.run();
    assert_eq!(sim.sends(0), ok([9]));
}

#[test]
fn local_work_is_done_in_order() {
    let mut sim = Simulation::new(2, 1 << 18);
    sim.pair(Service::Rc, Connection::default());
    sim.post(0, 2, read(1, 0, 100_000, 0));
    let mut local = work(2, SendOp::Local, 0, 0);
    local.flags.fence = Fence::All;
    sim.post(0, 2, local.clone());
    sim.nodes[0].paused = false;
    sim.work(0);
    assert!(
        sim.nodes[0].host.local_requests.is_empty(),
        "local work must wait for the earlier READ"
    );
    local.id = 3;
    local.flags.fence = Fence::None;
    sim.post(0, 2, local);
    sim.run();
    assert_eq!(sim.nodes[0].host.local_requests, [(2, 2), (2, 3)]);
    assert_eq!(sim.sends(0), ok([1, 2, 3]));
}

#[test]
fn fence_waits_for_reads_and_outstanding_reads_are_limited() {
    let mut sim = Simulation::new(2, 1 << 18);
    sim.pair(
        Service::Rc,
        Connection {
            max_initiated: 2,
            ..Connection::default()
        },
    );
    for id in 0..5 {
        sim.post(0, 2, read(id, 0, 100, 0));
    }
    let mut fenced = write(5, 0, 100, 0);
    fenced.flags.fence = Fence::Reads;
    sim.post(0, 2, fenced);
    sim.work(0);
    assert_eq!(
        sim.nodes[0].host.sent.len(),
        2,
        "only two READ requests are sent before the first response"
    );
    sim.run();
    assert_eq!(sim.sends(0), ok(0..=5));
}

#[test]
fn loopback_connection_works() {
    let mut sim = Simulation::new(1, 1 << 18);
    sim.qp(0, 2, Service::Rc, ReceiveFrom::Own);
    sim.bring_up(0, 2, 0, 2, Connection::default());
    let data = sim.fill(0, 0, 100_000, 1);
    sim.receive(0, Queue::Own(2), 1, 120_000, 100_000);
    sim.post(0, 2, send(1, 0, 100_000));
    sim.run();
    assert_eq!(sim.sends(0), ok([1]));
    assert_eq!(sim.bytes(0, 120_000, 100_000), data);
    // Nothing used the link.
    let counters = counters(&sim, 0);
    assert_eq!((counters.tx_bytes, counters.rx_bytes), (0, 0));
    assert!(counters.loopback_bytes > 100_000, "{counters:?}");
}

#[test]
fn send_queue_drains_and_resumes() {
    let mut sim = Simulation::new(2, 1 << 20);
    sim.pair(Service::Rc, Connection::default());
    sim.post(0, 2, write(1, 0, 500_000, 0));
    sim.work(0);
    sim.modify(
        0,
        2,
        Modify {
            state: Some(State::Sqd),
            drained_event: true,
            ..Modify::default()
        },
    );
    sim.post(0, 2, write(2, 0, 10, 0));
    assert!(sim.nodes[0].engine.query(2).unwrap().draining);
    sim.run();
    assert_eq!(sim.sends(0), ok([1]));
    assert_eq!(sim.nodes[0].host.events, [Event::SendQueueDrained { qpn: 2 }]);
    assert!(!sim.nodes[0].engine.query(2).unwrap().draining);
    sim.state(0, 2, State::Rts);
    sim.run();
    assert_eq!(sim.sends(0), ok([1, 2]));
}

#[test]
fn sending_starts_at_rts_and_receiving_at_rtr() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(Service::Rc, Connection::default());
    sim.state(1, 3, State::Reset);
    sim.qp(1, 4, Service::Rc, ReceiveFrom::Own);
    sim.modify(
        0,
        2,
        Modify {
            remote_qpn: Some(4),
            ..Modify::default()
        },
    );
    sim.post(1, 4, write(1, 0, 10, 0));
    sim.bring_up(1, 4, 0, 2, Connection::default());
    sim.state(1, 4, State::Reset);
    // Only RTR, not RTS.
    sim.state(1, 4, State::Init);
    let change = Modify {
        state: Some(State::Rtr),
        mtu: Some(Mtu::B1024),
        receive_psn: Some(0xff_fff0),
        send_psn: Some(0xff_fff0),
        access: Some(AccessFlags {
            write: true,
            ..AccessFlags::default()
        }),
        remote_qpn: Some(2),
        path: Some(sim.path_to(0)),
        ..Modify::default()
    };
    sim.modify(1, 4, change);
    sim.nodes[1].host.events.clear();
    sim.post(1, 4, write(2, 0, 10, 0));
    sim.post(0, 2, write(3, 0, 2000, 0));
    sim.run_for(Duration::from_millis(50));
    assert_eq!(sim.sends(0), ok([3]));
    assert_eq!(sim.nodes[1].host.events, [Event::CommunicationEstablished { qpn: 4 }]);
    assert_eq!(sim.sends(1), []);
    sim.state(1, 4, State::Rts);
    sim.run();
    assert_eq!(sim.sends(1).last(), Some(&(2, Status::Success)));
}

#[test]
fn state_transitions_match_verbs() {
    let mut sim = Simulation::new(1, 4096);
    sim.qp(0, 2, Service::Rc, ReceiveFrom::Own);
    let node = &mut sim.nodes[0];
    let mut to = |state| {
        node.engine.modify(
            &mut node.host,
            2,
            &Modify {
                state: Some(state),
                ..Modify::default()
            },
        )
    };
    use crate::attributes::ModifyError;
    let refused = |from, to| Err(ModifyError::Transition { from, to });
    assert_eq!(to(State::Rtr), refused(State::Reset, State::Rtr));
    assert_eq!(to(State::Rts), refused(State::Reset, State::Rts));
    assert_eq!(to(State::Init), Ok(()));
    assert_eq!(to(State::Init), Ok(()));
    assert_eq!(to(State::Rts), refused(State::Init, State::Rts));
    assert_eq!(to(State::Sqd), refused(State::Init, State::Sqd));
    assert_eq!(to(State::Rtr), Ok(()));
    assert_eq!(to(State::Rts), Ok(()));
    assert_eq!(to(State::Err), Ok(()));
    assert_eq!(to(State::Rts), refused(State::Err, State::Rts));
    assert_eq!(to(State::Reset), Ok(()));
    let change = Modify {
        rnr_retry: Some(8),
        ..Modify::default()
    };
    assert_eq!(
        node.engine.modify(&mut node.host, 2, &change),
        Err(ModifyError::Range("RNR retries"))
    );
    // The tables of the port have one entry.
    let pkey = |index| Modify {
        pkey_index: Some(index),
        ..Modify::default()
    };
    let grh = |sgid_index| Modify {
        path: Some(Path {
            dlid: 1,
            path_bits: 0,
            sl: 0,
            grh: Some(Grh {
                sgid_index,
                dgid: crate::Gid::default(),
                flow_label: 0,
                traffic_class: 0,
                hop_limit: 1,
            }),
        }),
        ..Modify::default()
    };
    for (valid, invalid, name) in [(pkey(0), pkey(1), "P_Key index"), (grh(0), grh(1), "source GID index")] {
        assert_eq!(node.engine.modify(&mut node.host, 2, &valid), Ok(()));
        assert_eq!(
            node.engine.modify(&mut node.host, 2, &invalid),
            Err(ModifyError::Range(name))
        );
    }
    assert_eq!(
        node.engine.modify(&mut node.host, 9, &change),
        Err(ModifyError::NoQueue)
    );
}

#[test]
fn busy_queue_pair_does_not_delay_others() {
    let mut sim = Simulation::new(2, 1 << 20);
    for pair in 0..8 {
        let (a, b) = (10 + pair, 30 + pair);
        sim.qp(0, a, Service::Rc, ReceiveFrom::Own);
        sim.qp(1, b, Service::Rc, ReceiveFrom::Own);
        sim.bring_up(
            0,
            a,
            1,
            b,
            Connection {
                mtu: Mtu::B4096,
                ..Connection::default()
            },
        );
        sim.bring_up(
            1,
            b,
            0,
            a,
            Connection {
                mtu: Mtu::B4096,
                ..Connection::default()
            },
        );
    }
    // One queue pair has much work, seven have little.
    for id in 0..200 {
        sim.post(0, 10, write(id, 0, 1 << 20, 0));
    }
    for pair in 1..8 {
        sim.post(0, 10 + pair, write(1000 + u64::from(pair), 0, 64, 0));
    }
    for _ in 0..3 {
        sim.work(0);
        sim.work(1);
    }
    sim.work(0);
    let done = sim.sends(0);
    assert!(done.iter().filter(|(id, _)| *id >= 1000).count() == 7, "{done:?}");
    assert!(done.len() < 20, "{done:?}");
    sim.run();
    assert_eq!(sim.sends(0).len(), 207);
}
