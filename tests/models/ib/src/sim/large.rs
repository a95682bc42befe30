// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages with many PSNs: up to 2 GiB with the smallest MTU, which is half of all PSNs.
//!
//! The memory of each node is smaller than the messages, and repeats in the address space.

use super::*;
use crate::packet::operation;

const MEMORY: usize = 1 << 20;
/// Length of the longest message.
const LONGEST: u32 = 1 << 31;

/// A connection with the smallest MTU, whose keys allow accesses of any length.
fn pair(service: Service) -> Simulation {
    let mut sim = Simulation::new(2, MEMORY);
    for node in &mut sim.nodes {
        node.host.keys.get_mut(&ALL_KEY).unwrap().len = 1 << 32;
    }
    sim.pair(
        service,
        Connection {
            mtu: Mtu::B256,
            ..Connection::default()
        },
    );
    sim
}

/// Returns the operations of the packets that a node sent.
fn operations(sim: &Simulation, node: usize) -> Vec<u8> {
    let sent = sim.nodes[node].host.sent.iter();
    sent.map(|packet| packet.opcode & operation::MASK).collect()
}

#[test]
fn longest_read_starts_alone() {
    let mut sim = pair(Service::Rc);
    sim.nodes[1].paused = true;
    sim.post(0, 2, write(1, 0, 256, 0));
    sim.post(0, 2, read(2, 0, LONGEST, 0));
    sim.post(0, 2, write(3, 0, 256, 0));
    sim.work(0);
    assert_eq!(
        operations(&sim, 0),
        [operation::WRITE_ONLY],
        "the PSN of the WRITE and those of the READ are more than half of all PSNs"
    );
    sim.nodes[1].paused = false;
    for _ in 0..8 {
        sim.work(0);
        sim.work(1);
    }
    assert_eq!(sim.sends(0), ok([1]));
    assert_eq!(
        operations(&sim, 0),
        [operation::WRITE_ONLY, operation::READ_REQUEST],
        "the second WRITE must wait for the responses of the READ"
    );
    assert!(operations(&sim, 1).contains(&operation::READ_RESPONSE_MIDDLE));
}

#[test]
fn longest_read_completes() {
    let mut sim = pair(Service::Rc);
    for node in &mut sim.nodes {
        node.host.keeps_sent = false;
    }
    let data = sim.fill(1, 0, MEMORY, 7);
    sim.post(0, 2, write(1, 0, 0, 0));
    sim.post(0, 2, read(2, 0, LONGEST, 0));
    sim.post(0, 2, read(3, 0, 256, 0));
    sim.run();
    assert_eq!(sim.sends(0), ok([1, 2, 3]));
    assert!(sim.bytes(0, 0, MEMORY) == data);
    let counters = sim.nodes[0].engine.counters();
    assert_eq!((counters.retransmissions, counters.timeouts), (0, 0));
    assert_eq!(counters.bytes_received, u64::from(LONGEST) + 256);
}

#[test]
fn long_writes_are_sent_as_far_as_the_window_allows() {
    // 2^22 packets or more, which is the window of several requests.
    for (service, length) in [
        (Service::Rc, 1 << 30),
        (Service::Rc, 3 << 29),
        (Service::Rc, LONGEST),
        (Service::Uc, LONGEST),
    ] {
        let mut sim = pair(service);
        sim.nodes[1].paused = true;
        sim.post(0, 2, write(1, 0, length, 0));
        for _ in 0..16 {
            sim.work(0);
        }
        let sent = operations(&sim, 0);
        assert!(sent.len() >= 1024, "{service:?} {length}: {} packets", sent.len());
        assert_eq!(sent[0], operation::WRITE_FIRST);
        assert!(sent[1..].iter().all(|operation| *operation == operation::WRITE_MIDDLE));
    }
}

#[test]
fn message_longer_than_2_gib_is_local_length_error() {
    let mut sim = pair(Service::Rc);
    sim.post(0, 2, read(1, 0, LONGEST + 1, 0));
    sim.run();
    assert_eq!(sim.sends(0), [(1, Status::LocalLength)]);
    assert_eq!(operations(&sim, 0), []);
}
