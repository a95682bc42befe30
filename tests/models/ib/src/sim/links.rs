// SPDX-License-Identifier: MIT OR Apache-2.0

//! Links that lose, delay, duplicate and reorder packets, links that go down, and slow adapters.

use super::*;
use crate::fabric::{Faults, LinkCounters, TopologyError};

fn pair() -> Simulation {
    let mut sim = Simulation::new(2, 1 << 18);
    sim.pair(Service::Rc, Connection::default());
    sim
}

pub(super) fn faults(sim: &Simulation, node: usize, faults: Faults) {
    sim.network.borrow_mut().set_faults(sim.lid(node), faults);
}

pub(super) fn counters(sim: &Simulation, node: usize) -> LinkCounters {
    sim.network.borrow_mut().counters(sim.lid(node))
}

/// Posts every operation of a connection on node 0. [`verify_mixed_work`] checks the results.
pub(super) fn post_mixed_work(sim: &mut Simulation) {
    sim.fill(0, 0, 20_000, 1);
    sim.fill(1, 40_000, 20_000, 2);
    let remote = |address| Remote { address, key: ALL_KEY };
    for id in 0..4 {
        sim.receive(1, Queue::Own(3), id, 70_000 + id * 10_000, 10_000);
    }
    let ops = [
        (
            SendOp::Write {
                remote: remote(0),
                imm: None,
            },
            0,
            10_000,
        ),
        (SendOp::Send { imm: None }, 1000, 5000),
        (SendOp::Read { remote: remote(40_000) }, 40_000, 20_000),
        (
            SendOp::FetchAdd {
                remote: remote(120_000),
                add: 3,
            },
            120_008,
            8,
        ),
        (SendOp::Send { imm: Some(4) }, 2000, 1),
        (
            SendOp::FetchAdd {
                remote: remote(120_000),
                add: 3,
            },
            120_016,
            8,
        ),
        (SendOp::Read { remote: remote(40_000) }, 140_000, 3000),
        (
            SendOp::Write {
                remote: remote(10_000),
                imm: Some(5),
            },
            10_000,
            10_000,
        ),
        (SendOp::Send { imm: None }, 3000, 9000),
    ];
    for (id, (op, address, length)) in ops.into_iter().enumerate() {
        sim.post(0, 2, work(id as u64, op, address, length));
    }
}

pub(super) fn verify_mixed_work(sim: &Simulation) {
    assert_eq!(sim.sends(0), ok(0..9));
    let received: Vec<_> = sim
        .received(1)
        .into_iter()
        .map(|(id, status, length, _)| (id, status, length))
        .collect();
    let success = Status::Success;
    assert_eq!(
        received,
        [
            (0, success, 5000),
            (1, success, 1),
            (2, success, 10_000),
            (3, success, 9000)
        ]
    );
    assert_eq!(sim.bytes(1, 0, 20_000), sim.bytes(0, 0, 20_000));
    assert_eq!(sim.bytes(0, 40_000, 20_000), sim.bytes(1, 40_000, 20_000));
    assert_eq!(sim.bytes(0, 140_000, 3000), sim.bytes(1, 40_000, 3000));
    assert_eq!(sim.bytes(1, 70_000, 5000), sim.bytes(0, 1000, 5000));
    assert_eq!(sim.bytes(1, 100_000, 9000), sim.bytes(0, 3000, 9000));
    assert_eq!(sim.bytes(1, 120_000, 8), 6_u64.to_le_bytes());
    assert_eq!(
        sim.bytes(0, 120_008, 16),
        [[0, 0, 0, 0, 0, 0, 0, 0], 3_u64.to_le_bytes()].concat()
    );
}

#[test]
fn any_single_lost_packet_is_recovered() {
    let mut clean = pair();
    post_mixed_work(&mut clean);
    clean.run();
    verify_mixed_work(&clean);
    let packets = counters(&clean, 0);
    let packets = packets.tx_packets + packets.rx_packets;
    assert!(packets > 60, "{packets}");
    for nth in 1..=packets {
        let mut sim = pair();
        faults(
            &sim,
            0,
            Faults {
                lose_nth: nth,
                ..Faults::default()
            },
        );
        post_mixed_work(&mut sim);
        sim.run();
        verify_mixed_work(&sim);
        assert_eq!(counters(&sim, 0).lost, 1, "{nth}");
    }
}

#[test]
fn duplicated_and_reordered_packets_execute_once() {
    for seed in 0..50 {
        let mut sim = Simulation::with_seed(2, 1 << 18, seed);
        sim.pair(Service::Rc, Connection::default());
        faults(
            &sim,
            0,
            Faults {
                duplicate: 0.2,
                reorder: 0.1,
                ..Faults::default()
            },
        );
        post_mixed_work(&mut sim);
        sim.run();
        verify_mixed_work(&sim);
        assert!(
            sim.nodes
                .iter()
                .map(|node| node.engine.counters().duplicates)
                .sum::<u64>()
                > 0
        );
    }
}

#[test]
fn long_delay_causes_no_retransmission() {
    let mut sim = pair();
    // Much longer than the acknowledgement timeout of 67 ms.
    faults(
        &sim,
        0,
        Faults {
            delay: Duration::from_millis(400),
            ..Faults::default()
        },
    );
    post_mixed_work(&mut sim);
    let before = sim.now.get();
    sim.run();
    verify_mixed_work(&sim);
    assert!(sim.now.get() - before > Duration::from_millis(800));
    let counters = sim.nodes[0].engine.counters();
    assert_eq!((counters.timeouts, counters.retransmissions), (0, 0));
}

#[test]
fn delayed_packets_keep_their_order() {
    let mut sim = pair();
    faults(
        &sim,
        0,
        Faults {
            delay: Duration::from_millis(5),
            ..Faults::default()
        },
    );
    sim.post(0, 2, write(1, 0, 10_000, 0));
    sim.settle();
    faults(&sim, 0, Faults::default());
    sim.post(0, 2, write(2, 0, 10_000, 0));
    sim.run();
    assert_eq!(sim.sends(0), ok([1, 2]));
    assert_eq!(sim.nodes[1].engine.counters().sequence_naks_sent, 0);
}

#[test]
fn slow_adapter_causes_no_retransmission() {
    let mut sim = pair();
    sim.nodes[1].paused = true;
    post_mixed_work(&mut sim);
    sim.run_for(Duration::from_secs(10));
    assert_eq!(sim.sends(0), []);
    sim.nodes[1].paused = false;
    sim.run();
    verify_mixed_work(&sim);
    let counters = sim.nodes[0].engine.counters();
    assert_eq!((counters.timeouts, counters.retransmissions), (0, 0));
}

#[test]
fn sender_stops_while_receiver_is_paused() {
    let mut sim = Simulation::new(2, 1 << 18);
    sim.pair(
        Service::Uc,
        Connection {
            mtu: Mtu::B256,
            ..Connection::default()
        },
    );
    sim.nodes[1].paused = true;
    for id in 0..200 {
        sim.post(0, 2, write(id, 0, 100_000, 0));
    }
    sim.run();
    let sent = sim.nodes[0].host.sent.len();
    assert!((2048..4096).contains(&sent), "{sent}");
    sim.nodes[1].paused = false;
    sim.run();
    assert_eq!(sim.sends(0), ok(0..200));
    assert_eq!(sim.nodes[1].engine.counters().bytes_received, 200 * 100_000);
}

#[test]
fn link_down_fails_connections_and_is_reported() {
    let mut sim = pair();
    sim.post(0, 2, write(1, 0, 200_000, 0));
    sim.work(0);
    let lid = sim.lid(1);
    sim.network.borrow_mut().set_up(lid, false);
    sim.post(0, 2, write(2, 0, 200_000, 0));
    sim.run();
    assert_eq!(sim.nodes[1].links, [false]);
    assert_eq!(sim.nodes[0].links, []);
    assert_eq!(sim.sends(0).last().unwrap().1, Status::Flushed);
    assert!(sim.sends(0).iter().any(|(_, status)| *status == Status::RetryExceeded));
    assert!(counters(&sim, 1).dropped > 0);
    assert_eq!(counters(&sim, 1).downs, 1);
    sim.network.borrow_mut().set_up(lid, true);
    sim.settle();
    assert_eq!(sim.nodes[1].links, [false, true]);
}

#[test]
fn short_link_down_is_recovered() {
    let mut sim = pair();
    let lid = sim.lid(1);
    sim.network.borrow_mut().set_up(lid, false);
    post_mixed_work(&mut sim);
    sim.run_for(Duration::from_millis(200));
    assert_eq!(sim.sends(0), []);
    sim.network.borrow_mut().set_up(lid, true);
    sim.run();
    verify_mixed_work(&sim);
}

#[test]
fn links_count_packets_and_bytes() {
    let mut sim = pair();
    sim.post(0, 2, write(1, 0, 2500, 0));
    sim.run();
    let (a, b) = (counters(&sim, 0), counters(&sim, 1));
    assert_eq!((a.tx_packets, a.rx_packets, b.tx_packets, b.rx_packets), (3, 1, 1, 3));
    // Headers and CRCs of every packet are 26 bytes, the RETH of the first packet 16, and the AETH of the
    // acknowledgement 4.
    assert_eq!((a.tx_bytes, a.rx_bytes), (2500 + 3 * 26 + 16, 26 + 4));
    assert_eq!((b.tx_bytes, b.rx_bytes), (a.rx_bytes, a.tx_bytes));
}

fn topology(switches: &[&str], links: &[(&str, &str)]) -> Topology {
    Topology {
        switches: switches.iter().map(|name| name.to_string()).collect(),
        links: links.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect(),
    }
}

#[test]
fn invalid_topologies_are_rejected() {
    let check = |switches: &[&str], links: &[(&str, &str)]| Network::new(&topology(switches, links), 0).err();
    assert_eq!(check(&["a", "b"], &[("a", "b")]), None);
    assert_eq!(check(&[], &[]), Some(TopologyError::NoSwitch(String::new())));
    assert_eq!(check(&["a", "a"], &[]), Some(TopologyError::Duplicate("a".into())));
    assert_eq!(check(&["a"], &[("a", "c")]), Some(TopologyError::NoSwitch("c".into())));
    assert_eq!(
        check(&["a", "b"], &[("a", "b"), ("b", "a")]),
        Some(TopologyError::Duplicate("b-a".into()))
    );
    assert_eq!(
        check(&["a", "b", "c"], &[("a", "b")]),
        Some(TopologyError::Unconnected("a".into(), "c".into()))
    );
}

#[test]
fn ports_get_lids_and_names_are_unique() {
    let mut network = Network::new(&topology(&["a"], &[]), 0).unwrap();
    let deliver = || Arc::new(|_| {}) as Arc<dyn Fn(Delivery) + Send + Sync>;
    let config = |name: &str, guid, switch: &str| PortConfig {
        name: name.into(),
        guid,
        switch: switch.into(),
        bytes_per_second: None,
    };
    let (first, gid) = network.join(&config("p", 0x0102, "a"), deliver()).unwrap();
    assert_eq!(first, 2);
    assert_eq!(gid.to_string(), "fe80::102");
    assert_eq!(
        network.join(&config("p", 3, "a"), deliver()).unwrap_err(),
        TopologyError::Duplicate("p".into())
    );
    assert_eq!(
        network.join(&config("q", 0x0102, "a"), deliver()).unwrap_err(),
        TopologyError::Duplicate("q".into())
    );
    assert_eq!(
        network.join(&config("q", 3, "z"), deliver()).unwrap_err(),
        TopologyError::NoSwitch("z".into())
    );
    assert_eq!(network.join(&config("q", 3, "a"), deliver()).unwrap().0, 3);
    network.remove_port(first);
    assert_eq!(
        network.join(&config("r", 4, "a"), deliver()).unwrap().0,
        2,
        "the LID of a removed port must be free again"
    );
}

#[test]
fn packets_are_rerouted_around_down_link() {
    let topology = topology(&["a", "b", "c"], &[("a", "b"), ("b", "c"), ("a", "c")]);
    let mut sim = Simulation::on(&topology, &["a", "b"], 1 << 16, 1);
    sim.pair(Service::Rc, Connection::default());
    let lose_all = Faults {
        loss: 1.0,
        ..Faults::default()
    };
    let change = |sim: &Simulation, a, b, up: bool, faults| {
        let mut network = sim.network.borrow_mut();
        network.change_switch_link(a, b, |link| {
            link.set_up(up);
            link.set_faults(faults);
        })
    };
    sim.post(0, 2, write(1, 0, 10, 0));
    sim.run();
    change(&sim, "a", "b", false, Faults::default()).unwrap();
    sim.post(0, 2, write(2, 0, 10, 0));
    sim.run();
    assert_eq!(sim.sends(0), ok([1, 2]));
    change(&sim, "b", "c", true, lose_all).unwrap();
    sim.post(0, 2, write(3, 0, 10, 0));
    sim.run();
    assert_eq!(sim.sends(0).last(), Some(&(3, Status::RetryExceeded)));
    assert_eq!(change(&sim, "c", "b", true, lose_all).unwrap().lost, 8);
    let error = change(&sim, "a", "a", true, lose_all).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no link between switch \"a\" and switch \"a\""
    );
}
