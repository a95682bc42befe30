// SPDX-License-Identifier: MIT OR Apache-2.0

//! Shared receive queues: limits, last-work-reached events, and extended reliable connections.

use super::*;
use crate::attributes::{ModifyError, QpConfig, SrqConfig};

/// Connects queue pairs of node 0 to queue pairs of node 1 that share receive queue 5.
fn srq_pair(pairs: u32) -> Simulation {
    let mut sim = Simulation::new(2, 1 << 16);
    sim.nodes[1]
        .engine
        .create_srq(
            5,
            SrqConfig {
                pd: PD,
                xrc: None,
                limit: 0,
            },
        )
        .unwrap();
    for pair in 0..pairs {
        let (a, b) = (10 + pair, 30 + pair);
        sim.qp(0, a, Service::Rc, ReceiveFrom::Own);
        sim.qp(1, b, Service::Rc, ReceiveFrom::Shared(5));
        sim.bring_up(0, a, 1, b, Connection::default());
        sim.bring_up(1, b, 0, a, Connection::default());
    }
    sim
}

#[test]
fn receives_are_shared_and_limit_event_is_raised_once() {
    let mut sim = srq_pair(3);
    for id in 0..10 {
        sim.receive(1, Queue::Shared(5), id, id * 1000, 1000);
    }
    sim.nodes[1].engine.arm_srq(5, 5).unwrap();
    for pair in 0..3 {
        sim.post(0, 10 + pair, send(1, 0, 500));
    }
    sim.run();
    assert_eq!(sim.received(1).len(), 3);
    let limits = |sim: &Simulation| {
        sim.nodes[1]
            .host
            .events
            .iter()
            .filter(|event| **event == Event::SrqLimit { srqn: 5 })
            .count()
    };
    assert_eq!(limits(&sim), 0);
    for id in 0..5 {
        sim.post(0, 10, send(id, 0, 500));
    }
    sim.run();
    assert_eq!(limits(&sim), 1);
    assert_eq!(sim.nodes[1].engine.srq_limit(5), Some(0));
    let completions = &sim.nodes[1].host.completions;
    assert!(matches!(
        completions[7],
        Completion::Receive {
            qpn: 30,
            cqn: 230,
            queue: Queue::Shared(5),
            id: 7,
            ..
        }
    ));
}

#[test]
fn last_wqe_event_is_raised() {
    let mut sim = srq_pair(1);
    sim.receive(1, Queue::Shared(5), 1, 0, 60_000);
    sim.receive(1, Queue::Shared(5), 2, 0, 60_000);
    let mut cut = send(1, 0, 0);
    let sge = |key, length| Sge {
        key,
        address: 0,
        length,
    };
    cut.payload = Payload::Memory(smallvec![sge(ALL_KEY, 65536), sge(0x99, 10)]);
    sim.receive(1, Queue::Shared(5), 3, 0, 60_000);
    // The second entry of the send has an unknown key: the message stops after 64 KiB and stays incomplete.
    sim.nodes[1].host.receives.get_mut(&Queue::Shared(5)).unwrap()[0].sges[0].length = 65_546;
    sim.nodes[1].host.memory.resize(1 << 17, 0);
    sim.nodes[1].host.keys.get_mut(&ALL_KEY).unwrap().len = 1 << 17;
    sim.post(0, 10, cut);
    sim.run();
    sim.state(1, 30, State::Err);
    sim.run();
    assert_eq!(sim.received(1), [(1, Status::Flushed, 65536, Received::Send)]);
    assert!(
        sim.nodes[1]
            .host
            .events
            .ends_with(&[Event::LastWorkReached { qpn: 30 }])
    );
    // The other receives stay in the shared receive queue.
    assert_eq!(sim.nodes[1].host.receives[&Queue::Shared(5)].len(), 2);
}

#[test]
fn srq_in_use_cannot_be_destroyed() {
    let mut sim = srq_pair(1);
    let engine = &mut sim.nodes[1].engine;
    assert_eq!(
        engine.create_srq(
            5,
            SrqConfig {
                pd: PD,
                xrc: None,
                limit: 0
            }
        ),
        Err(ModifyError::InUse)
    );
    assert_eq!(engine.destroy_srq(5), Err(ModifyError::Busy));
    engine.destroy_qp(30).unwrap();
    engine.destroy_srq(5).unwrap();
    assert_eq!(engine.destroy_srq(5), Err(ModifyError::NoQueue));
    assert_eq!(engine.arm_srq(5, 1), Err(ModifyError::NoQueue));
}

#[test]
fn unreadable_srq_raises_srq_error() {
    let mut sim = srq_pair(1);
    sim.nodes[1].host.injected.1 = Some(Fetched::Broken);
    sim.post(0, 10, send(1, 0, 10));
    sim.run();
    assert_eq!(sim.sends(0), [(1, Status::RemoteOperation)]);
    let events = &sim.nodes[1].host.events;
    assert!(events.contains(&Event::SrqError { srqn: 5 }) && events.contains(&Event::QpFatal { qpn: 30 }));
}

fn xrc(domain: u32) -> Simulation {
    let mut sim = Simulation::new(2, 1 << 16);
    let shared = |xrc| SrqConfig { pd: PD, xrc, limit: 0 };
    sim.nodes[1].engine.create_srq(5, shared(Some((domain, 500)))).unwrap();
    sim.nodes[1].engine.create_srq(6, shared(Some((domain, 600)))).unwrap();
    sim.nodes[1].engine.create_srq(7, shared(None)).unwrap();
    sim.qp(0, 2, Service::Xrc, ReceiveFrom::None);
    // The target has another protection domain: keys belong to the domain of the shared receive queue that a message
    // names.
    let target = QpConfig {
        service: Service::Xrc,
        pd: PD + 1,
        send_cqn: 103,
        receive_cqn: 203,
        receive: ReceiveFrom::None,
        xrcd: 3,
        source_qpn: None,
        deaf_to_itself: false,
    };
    sim.nodes[1].engine.create_qp(3, target).unwrap();
    sim.bring_up(0, 2, 1, 3, Connection::default());
    sim.bring_up(1, 3, 0, 2, Connection::default());
    sim
}

#[test]
fn xrc_message_selects_its_srq() {
    let mut sim = xrc(3);
    let data = sim.fill(0, 0, 5000, 1);
    sim.receive(1, Queue::Shared(5), 50, 0, 5000);
    sim.receive(1, Queue::Shared(6), 60, 10_000, 5000);
    sim.receive(1, Queue::Shared(6), 61, 20_000, 5000);
    let remote = Remote {
        address: 30_000,
        key: ALL_KEY,
    };
    sim.post(
        0,
        2,
        SendWork {
            remote_srqn: 6,
            ..send(1, 0, 5000)
        },
    );
    sim.post(
        0,
        2,
        SendWork {
            remote_srqn: 5,
            ..send(2, 0, 5000)
        },
    );
    sim.post(
        0,
        2,
        SendWork {
            remote_srqn: 6,
            ..work(3, SendOp::Write { remote, imm: Some(9) }, 0, 5000)
        },
    );
    sim.post(
        0,
        2,
        SendWork {
            remote_srqn: 5,
            ..read(4, 40_000, 5000, 30_000)
        },
    );
    sim.run();
    assert_eq!(sim.sends(0), ok(1..=4));
    let places: Vec<_> = sim.nodes[1]
        .host
        .completions
        .iter()
        .map(|completion| match completion {
            Completion::Receive {
                qpn, cqn, queue, id, ..
            } => (*qpn, *cqn, *queue, *id),
            Completion::Send { .. } => panic!("node 1 posted no send work request"),
        })
        .collect();
    let expected = [
        (3, 600, Queue::Shared(6), 60),
        (3, 500, Queue::Shared(5), 50),
        (3, 600, Queue::Shared(6), 61),
    ];
    assert_eq!(places, expected);
    assert_eq!(sim.bytes(1, 10_000, 5000), data);
    assert_eq!(sim.bytes(0, 40_000, 5000), data);
}

#[test]
fn xrc_message_to_srq_of_other_domain_is_rejected() {
    for (domain, srqn) in [(4, 5), (3, 7), (3, 8)] {
        let mut sim = xrc(domain);
        for queue in 5..9 {
            sim.receive(1, Queue::Shared(queue), 1, 0, 100);
        }
        sim.post(
            0,
            2,
            SendWork {
                remote_srqn: srqn,
                ..send(1, 0, 10)
            },
        );
        sim.run();
        assert_eq!(sim.sends(0), [(1, Status::RemoteInvalidRequest)]);
        assert_eq!(sim.received(1), []);
        assert!(sim.nodes[1].host.events.contains(&Event::LastWorkReached { qpn: 3 }));
    }
}
