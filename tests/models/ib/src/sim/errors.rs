// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors: their completion status on both nodes, and the flush that follows.

use super::*;

fn pair() -> Simulation {
    let mut sim = Simulation::new(2, 1 << 18);
    sim.pair(Service::Rc, Connection::default());
    sim
}

/// Posts `op` between two WRITEs. `op` must fail with `status`. The first WRITE must succeed, the second and a
/// posted receive must be flushed, and the queue pair of node 0 must enter the error state.
fn expect_failure(mut sim: Simulation, op: SendWork, status: Status) -> Simulation {
    let id = op.id;
    sim.post(0, 2, write(id - 1, 0, 5000, 0));
    sim.post(0, 2, op);
    sim.post(0, 2, write(id + 1, 0, 10, 0));
    sim.receive(0, Queue::Own(2), 90, 0, 100);
    sim.run();
    let expected = [(id - 1, Status::Success), (id, status), (id + 1, Status::Flushed)];
    assert_eq!(sim.sends(0), expected);
    assert_eq!(sim.received(0), [(90, Status::Flushed, 0, Received::Send)]);
    assert_eq!(sim.state_of(0, 2), State::Err);
    sim
}

#[test]
fn access_without_key_rights_is_remote_access_error() {
    let remote = |address, key| Remote { address, key };
    let none = Key {
        pd: PD,
        start: 0x8000,
        len: 0x1000,
        local_write: true,
        remote_read: false,
        remote_write: false,
        remote_atomic: false,
    };
    let full = Key {
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        ..none
    };
    let keys = [(1, none), (2, Key { pd: PD + 1, ..full }), (3, full)];
    // No rights, other protection domain, beyond the end, before the start, wrap-around of the address, unknown key.
    let places = [
        (0x8000, 1),
        (0x8000, 2),
        (0x8ff8, 3),
        (0x7ff8, 3),
        (u64::MAX - 7, 3),
        (0x8000, 4),
    ];
    for (address, key) in places {
        let remote = remote(address, key);
        let ops = [
            work(5, SendOp::Write { remote, imm: None }, 0, 16),
            work(5, SendOp::Write { remote, imm: Some(1) }, 0, 16),
            work(5, SendOp::Read { remote }, 0, 16),
        ];
        for op in ops {
            let mut sim = pair();
            sim.nodes[1].host.keys.extend(keys);
            sim.fill(0, 0, 6000, 1);
            sim.receive(1, Queue::Own(3), 1, 0, 100);
            let sim = expect_failure(sim, op, Status::RemoteAccess);
            assert_eq!(sim.state_of(1, 3), State::Err);
            assert!(sim.nodes[1].host.events.contains(&Event::AccessViolation { qpn: 3 }));
            assert_eq!(sim.received(1), [(1, Status::Flushed, 0, Received::Send)]);
            assert_eq!(sim.bytes(1, 0x7000, 0x3000), vec![0; 0x3000]);
            assert_eq!(sim.nodes[1].engine.counters().remote_access_errors, 1);
        }
    }
    for key in [1, 2, 4] {
        let mut sim = pair();
        sim.nodes[1].host.keys.extend(keys);
        let op = work(
            5,
            SendOp::FetchAdd {
                remote: remote(0x8000, key),
                add: 1,
            },
            0,
            8,
        );
        expect_failure(sim, op, Status::RemoteAccess);
    }
}

#[test]
fn long_write_beyond_region_writes_nothing() {
    let mut sim = pair();
    let key = Key {
        start: 0,
        len: 50_000,
        ..sim.nodes[1].host.keys[&ALL_KEY]
    };
    sim.nodes[1].host.keys.insert(2, key);
    let op = work(
        5,
        SendOp::Write {
            remote: Remote {
                address: 10_000,
                key: 2,
            },
            imm: None,
        },
        0,
        40_001,
    );
    sim.fill(0, 0, 50_000, 1);
    let sim = expect_failure(sim, op, Status::RemoteAccess);
    assert_eq!(sim.bytes(1, 10_000, 40_000), vec![0; 40_000]);
}

#[test]
fn key_removed_during_write_fails_the_write() {
    let mut sim = pair();
    sim.post(0, 2, write(1, 0, 200_000, 0));
    sim.nodes[1].host.remove_keys_after = Some(1);
    sim.run();
    assert_eq!(sim.sends(0), [(1, Status::RemoteAccess)]);
    assert!(sim.nodes[1].host.events.contains(&Event::AccessViolation { qpn: 3 }));
}

#[test]
fn key_removed_during_read_fails_the_read() {
    let mut sim = pair();
    sim.post(0, 2, read(1, 0, 200_000, 0));
    sim.nodes[1].host.remove_keys_after = Some(1);
    sim.run();
    assert_eq!(sim.sends(0), [(1, Status::RemoteAccess)]);
}

#[test]
fn operation_disabled_on_qp_is_invalid_request() {
    let remote = Remote {
        address: 0,
        key: ALL_KEY,
    };
    let ops = [
        SendOp::Write { remote, imm: None },
        SendOp::Read { remote },
        SendOp::FetchAdd { remote, add: 1 },
        SendOp::CompareSwap {
            remote,
            compare: 0,
            swap: 1,
        },
    ];
    for op in ops {
        let mut sim = pair();
        sim.modify(
            1,
            3,
            Modify {
                access: Some(AccessFlags::default()),
                ..Modify::default()
            },
        );
        sim.post(0, 2, work(1, op, 0, 8));
        sim.run();
        assert_eq!(sim.sends(0), [(1, Status::RemoteInvalidRequest)], "{op:?}");
        assert!(sim.nodes[1].host.events.contains(&Event::InvalidRequest { qpn: 3 }));
        assert_eq!(sim.state_of(1, 3), State::Err);
    }
}

#[test]
fn unaligned_atomic_and_invalidation_of_unknown_key_are_rejected() {
    let remote = Remote {
        address: 4,
        key: ALL_KEY,
    };
    expect_failure(
        pair(),
        work(5, SendOp::FetchAdd { remote, add: 1 }, 0, 8),
        Status::RemoteInvalidRequest,
    );
    let mut sim = pair();
    sim.receive(1, Queue::Own(3), 1, 0, 100);
    let sim = expect_failure(
        sim,
        work(5, SendOp::SendInvalidate { key: 0x99 }, 0, 8),
        Status::RemoteOperation,
    );
    assert_eq!(sim.received(1)[0].1, Status::RemoteInvalidRequest);
}

#[test]
fn invalid_local_work_is_local_error() {
    let bad_key = |mut work: SendWork| {
        work.payload = Payload::Memory(smallvec![Sge {
            key: 0x77,
            address: 0,
            length: 10
        }]);
        work
    };
    expect_failure(pair(), bad_key(write(5, 0, 10, 0)), Status::LocalProtection);
    expect_failure(pair(), bad_key(read(5, 0, 10, 0)), Status::LocalProtection);
    let mut inline = read(5, 0, 0, 0);
    inline.payload = Payload::Inline(vec![0; 4]);
    expect_failure(pair(), inline, Status::LocalQpOperation);
    let mut mixed = read(5, 0, 4, 0);
    mixed.payload = mixed.payload.with(Segment::Inline(vec![0; 4]));
    expect_failure(pair(), mixed, Status::LocalQpOperation);
    let mut mixed = write(5, 0, 10, 0);
    let sge = Sge {
        key: 0x77,
        address: 0,
        length: 10,
    };
    mixed.payload = Payload::Inline(vec![0; 4]).with(Segment::Memory(sge));
    expect_failure(pair(), mixed, Status::LocalProtection);
    let remote = Remote {
        address: 0,
        key: ALL_KEY,
    };
    expect_failure(
        pair(),
        work(5, SendOp::FetchAdd { remote, add: 1 }, 0, 4),
        Status::LocalLength,
    );
    let mut long = write(5, 0, 0, 0);
    let sge = Sge {
        key: ALL_KEY,
        address: 0,
        length: u32::MAX,
    };
    long.payload = Payload::Memory(smallvec![sge, sge]);
    expect_failure(pair(), long, Status::LocalLength);
    let mut sim = pair();
    sim.nodes[0].host.local_result = Err(Status::MwBind);
    expect_failure(sim, work(5, SendOp::Local, 0, 0), Status::MwBind);
}

#[test]
fn local_error_completes_after_previous_work() {
    let mut sim = pair();
    let sge = |key, address, length| Sge { key, address, length };
    let mut bad = send(2, 0, 0);
    bad.payload = Payload::Memory(smallvec![sge(ALL_KEY, 0, 100_000), sge(0x77, 0, 100_000)]);
    sim.receive(1, Queue::Own(3), 1, 0, 200_000);
    sim.post(0, 2, read(1, 0, 100_000, 0));
    sim.post(0, 2, bad);
    sim.post(0, 2, read(3, 0, 10, 0));
    sim.run();
    assert_eq!(
        sim.sends(0),
        [(1, Status::Success), (2, Status::LocalProtection), (3, Status::Flushed)]
    );
    // The responder waits for the rest of the message.
    assert_eq!(sim.state_of(1, 3), State::Rts);
    sim.state(1, 3, State::Err);
    sim.run();
    assert_eq!(sim.received(1), [(1, Status::Flushed, 65_536, Received::Send)]);
}

#[test]
fn undecodable_request_moves_qp_to_error() {
    let mut sim = pair();
    sim.nodes[0].host.injected.0 = Some(Fetched::Bad {
        id: 4,
        status: Status::LocalQpOperation,
    });
    sim.post(0, 2, write(5, 0, 10, 0));
    sim.run();
    assert_eq!(sim.sends(0), [(4, Status::LocalQpOperation), (5, Status::Flushed)]);

    let mut sim = pair();
    sim.nodes[0].host.injected.0 = Some(Fetched::Broken);
    sim.post(0, 2, write(5, 0, 10, 0));
    sim.run();
    assert_eq!(sim.nodes[0].host.events, [Event::QpFatal { qpn: 2 }]);
    assert_eq!(sim.state_of(0, 2), State::Err);

    let mut sim = pair();
    sim.nodes[1].host.injected.1 = Some(Fetched::Bad {
        id: 8,
        status: Status::LocalLength,
    });
    let sim = expect_failure(sim, send(5, 0, 10), Status::RemoteOperation);
    assert_eq!(sim.received(1), [(8, Status::LocalLength, 0, Received::Send)]);
}

#[test]
fn message_longer_than_receive_fails_both_sides() {
    for length in [101, 5000] {
        let mut sim = pair();
        sim.receive(1, Queue::Own(3), 1, 0x10000, 100);
        sim.receive(1, Queue::Own(3), 2, 0, 100);
        let sim = expect_failure(sim, send(5, 0, length), Status::RemoteInvalidRequest);
        let received: Vec<_> = sim.received(1).iter().map(|(id, status, ..)| (*id, *status)).collect();
        assert_eq!(received, [(1, Status::LocalLength), (2, Status::Flushed)]);
        assert_eq!(sim.bytes(1, 0x10000 + 100, 5000), vec![0; 5000]);
    }
}

#[test]
fn receive_with_bad_key_fails_both_sides() {
    let mut sim = pair();
    let sges = smallvec![Sge {
        key: 0x99,
        address: 0,
        length: 100
    }];
    let receive = ReceiveWork { id: 1, sges, left: 0 };
    sim.nodes[1]
        .host
        .receives
        .entry(Queue::Own(3))
        .or_default()
        .push_back(receive);
    let sim = expect_failure(sim, send(5, 0, 10), Status::RemoteOperation);
    assert_eq!(sim.received(1)[0].1, Status::LocalProtection);
}

#[test]
fn qp_without_receive_queue_rejects_messages() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.qp(0, 2, Service::Rc, ReceiveFrom::Own);
    sim.qp(1, 3, Service::Rc, ReceiveFrom::None);
    sim.bring_up(0, 2, 1, 3, Connection::default());
    sim.bring_up(1, 3, 0, 2, Connection::default());
    expect_failure(sim, send(5, 0, 10), Status::RemoteInvalidRequest);
}

#[test]
fn rnr_retry_delivers_once_receive_is_posted() {
    for op in [
        SendOp::Send { imm: None },
        SendOp::Write {
            remote: Remote {
                address: 0,
                key: ALL_KEY,
            },
            imm: Some(1),
        },
    ] {
        let mut sim = pair();
        sim.post(0, 2, work(1, op, 0, 30_000));
        sim.post(0, 2, work(2, op, 0, 10));
        sim.run_for(Duration::from_micros(1500));
        assert_eq!(sim.sends(0), []);
        sim.receive(1, Queue::Own(3), 7, 0, 30_000);
        sim.receive(1, Queue::Own(3), 8, 0, 30_000);
        sim.run();
        assert_eq!(sim.sends(0), ok([1, 2]));
        assert_eq!(sim.received(1).len(), 2);
        assert!(sim.nodes[0].engine.counters().rnr_naks_received >= 2);
        assert_eq!(sim.nodes[0].engine.counters().timeouts, 0);
    }
}

#[test]
fn exceeded_rnr_retries_fail_the_work() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(
        Service::Rc,
        Connection {
            rnr_retry: 3,
            ..Connection::default()
        },
    );
    sim.post(0, 2, write(1, 0, 10, 0));
    sim.post(0, 2, send(2, 0, 10));
    sim.post(0, 2, send(3, 0, 10));
    let before = sim.now.get();
    sim.run_for(Duration::from_millis(100));
    assert_eq!(
        sim.sends(0),
        [
            (1, Status::Success),
            (2, Status::RnrRetryExceeded),
            (3, Status::Flushed)
        ]
    );
    assert_eq!(sim.nodes[1].engine.counters().rnr_naks_sent, 4);
    assert!(sim.now.get() - before >= Duration::from_micros(640) * 3);
    // The responder is not affected.
    assert_eq!(sim.state_of(1, 3), State::Rts);
}

#[test]
fn rnr_retry_7_is_unlimited() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(
        Service::Rc,
        Connection {
            rnr_retry: 7,
            ..Connection::default()
        },
    );
    sim.post(0, 2, send(1, 0, 10));
    sim.run_for(Duration::from_secs(2));
    assert_eq!(sim.sends(0), []);
    sim.receive(1, Queue::Own(3), 7, 0, 100);
    sim.run_for(Duration::from_secs(1));
    assert_eq!(sim.sends(0), ok([1]));
}

#[test]
fn unreachable_peer_exceeds_retries() {
    for retry_count in [0, 2, 7] {
        let mut sim = Simulation::new(2, 1 << 16);
        sim.pair(
            Service::Rc,
            Connection {
                retry_count,
                ..Connection::default()
            },
        );
        sim.nodes[1].engine.destroy_qp(3).unwrap();
        sim.post(0, 2, write(1, 0, 10, 0));
        sim.post(0, 2, read(2, 0, 10, 0));
        sim.run();
        assert_eq!(sim.sends(0), [(1, Status::RetryExceeded), (2, Status::Flushed)]);
        assert_eq!(sim.nodes[0].engine.counters().timeouts, u64::from(retry_count) + 1);
        assert_eq!(
            sim.nodes[0].engine.counters().retransmissions,
            2 * u64::from(retry_count)
        );
    }
}

#[test]
fn flush_keeps_order_and_includes_later_work() {
    let mut sim = pair();
    for id in 0..200 {
        sim.post(0, 2, write(id, 0, 3000, 0));
        sim.receive(0, Queue::Own(2), 1000 + id, 0, 10);
    }
    sim.work(0);
    sim.state(0, 2, State::Err);
    sim.run_for(Duration::from_millis(20));
    assert_eq!(
        sim.sends(0),
        (0..200).map(|id| (id, Status::Flushed)).collect::<Vec<_>>()
    );
    let ids: Vec<u64> = sim.received(0).iter().map(|received| received.0).collect();
    assert_eq!(ids, (1000..1200).collect::<Vec<_>>());
    // Posting a receive rings no doorbell.
    sim.receive(0, Queue::Own(2), 5000, 0, 10);
    sim.post(0, 2, write(5001, 0, 1, 0));
    sim.run_for(Duration::from_millis(20));
    assert_eq!(
        sim.received(0).last().unwrap(),
        &(5000, Status::Flushed, 0, Received::Send)
    );
    assert_eq!(sim.sends(0).last().unwrap(), &(5001, Status::Flushed));
    assert_eq!(sim.nodes[0].engine.counters().flushed, 402);
}

#[test]
fn reset_drops_work_without_completions() {
    let mut sim = pair();
    for id in 0..20 {
        sim.post(0, 2, write(id, 0, 100_000, 0));
    }
    sim.receive(0, Queue::Own(2), 1, 0, 10);
    sim.work(0);
    sim.state(0, 2, State::Reset);
    sim.nodes[0].host.sends.clear();
    sim.run();
    assert_eq!(sim.nodes[0].host.completions, []);
    // The queue pair can be used again.
    sim.state(1, 3, State::Reset);
    sim.bring_up(
        0,
        2,
        1,
        3,
        Connection {
            psn: 5,
            ..Connection::default()
        },
    );
    sim.bring_up(
        1,
        3,
        0,
        2,
        Connection {
            psn: 5,
            ..Connection::default()
        },
    );
    sim.post(0, 2, write(77, 0, 100_000, 0));
    sim.run();
    assert_eq!(sim.sends(0), ok([77]));
}

#[test]
fn unreliable_connection_drops_disallowed_requests() {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(Service::Uc, Connection::default());
    let bad = work(
        1,
        SendOp::Write {
            remote: Remote { address: 0, key: 0x99 },
            imm: None,
        },
        0,
        5000,
    );
    sim.post(0, 2, bad);
    sim.post(0, 2, write(2, 0, 5000, 0));
    let data = sim.fill(0, 0, 5000, 7);
    sim.run();
    assert_eq!(sim.sends(0), ok([1, 2]));
    assert_eq!(sim.bytes(1, 0, 5000), data);
    assert_eq!(sim.state_of(1, 3), State::Rts);
    // An unsupported operation fails the send queue, but not the responder.
    sim.post(0, 2, read(3, 0, 10, 0));
    sim.post(0, 2, write(4, 0, 10, 0));
    sim.run();
    assert_eq!(sim.sends(0)[2..], [(3, Status::LocalQpOperation), (4, Status::Flushed)]);
    assert_eq!(sim.state_of(0, 2), State::Sqe);
    sim.receive(0, Queue::Own(2), 1, 0, 100);
    sim.post(1, 3, send(1, 0, 10));
    sim.run();
    assert_eq!(sim.received(0).len(), 1);
    sim.state(0, 2, State::Rts);
    sim.post(0, 2, write(5, 0, 10, 0));
    sim.run();
    assert_eq!(sim.sends(0).last(), Some(&(5, Status::Success)));
}

#[test]
fn packets_of_other_partitions_are_dropped() {
    let mut sim = pair();
    let mut port = PortAttributes {
        lid: sim.lid(1),
        lmc: 0,
        gids: vec![crate::Gid::default()],
        pkeys: vec![0x8001],
    };
    sim.nodes[1].engine.set_port(port.clone());
    sim.post(0, 2, write(1, 0, 10, 0));
    sim.run();
    assert_eq!(sim.sends(0), [(1, Status::RetryExceeded)]);
    assert!(sim.nodes[1].engine.counters().pkey_violations > 0);
    port.pkeys = vec![0x8001, 0x7fff];
    sim.nodes[1].engine.set_port(port);
    sim.state(0, 2, State::Reset);
    sim.state(1, 3, State::Reset);
    sim.bring_up(0, 2, 1, 3, Connection::default());
    sim.bring_up(1, 3, 0, 2, Connection::default());
    sim.modify(
        1,
        3,
        Modify {
            pkey_index: Some(1),
            ..Modify::default()
        },
    );
    sim.post(0, 2, write(2, 0, 10, 0));
    sim.run();
    assert_eq!(sim.sends(0).last(), Some(&(2, Status::Success)));
}
