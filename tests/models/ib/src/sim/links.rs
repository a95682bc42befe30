// SPDX-License-Identifier: MIT OR Apache-2.0

//! Links that lose, delay and double packets, break, or lead to an adapter that is slow.

use super::*;
use crate::fabric::{Faults, LinkCounters, TopologyError};

fn pair() -> World {
    let mut world = World::new(2, 1 << 18);
    world.pair(Service::Rc, Connection::default());
    world
}

fn faults(world: &World, node: usize, faults: Faults) {
    world.network.borrow_mut().set_faults(world.lid(node), faults);
}

fn counters(world: &World, node: usize) -> LinkCounters {
    world.network.borrow_mut().counters(world.lid(node))
}

/// Everything that a connection can do, in `at`..`at + 90_000` of both memories. Returns what to expect where.
fn post_some_of_all(world: &mut World) {
    world.fill(0, 0, 20_000, 1);
    world.fill(1, 40_000, 20_000, 2);
    let remote = |address| Remote { address, key: ALL };
    for id in 0..4 {
        world.receive(1, Queue::Own(3), id, 70_000 + id * 10_000, 10_000);
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
        world.post(0, 2, work(id as u64, op, address, length));
    }
}

fn verify_some_of_all(world: &World) {
    assert_eq!(world.sends(0), ok(0..9));
    let received: Vec<_> = world
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
    assert_eq!(world.bytes(1, 0, 20_000), world.bytes(0, 0, 20_000));
    assert_eq!(world.bytes(0, 40_000, 20_000), world.bytes(1, 40_000, 20_000));
    assert_eq!(world.bytes(0, 140_000, 3000), world.bytes(1, 40_000, 3000));
    assert_eq!(world.bytes(1, 70_000, 5000), world.bytes(0, 1000, 5000));
    assert_eq!(world.bytes(1, 100_000, 9000), world.bytes(0, 3000, 9000));
    assert_eq!(world.bytes(1, 120_000, 8), 6_u64.to_le_bytes());
    assert_eq!(
        world.bytes(0, 120_008, 16),
        [[0, 0, 0, 0, 0, 0, 0, 0], 3_u64.to_le_bytes()].concat()
    );
}

#[test]
fn nothing_is_missing_whichever_packet_is_lost() {
    let mut clean = pair();
    post_some_of_all(&mut clean);
    clean.run();
    verify_some_of_all(&clean);
    let packets = counters(&clean, 0);
    let packets = packets.tx_packets + packets.rx_packets;
    assert!(packets > 60, "{packets}");
    for nth in 1..=packets {
        let mut world = pair();
        faults(
            &world,
            0,
            Faults {
                lose_nth: nth,
                ..Faults::default()
            },
        );
        post_some_of_all(&mut world);
        world.run();
        verify_some_of_all(&world);
        assert_eq!(counters(&world, 0).lost, 1, "{nth}");
    }
}

#[test]
fn nothing_is_done_twice_when_packets_are_doubled_and_change_places() {
    for seed in 0..50 {
        let mut world = World::with_seed(2, 1 << 18, seed);
        world.pair(Service::Rc, Connection::default());
        faults(
            &world,
            0,
            Faults {
                duplicate: 0.2,
                reorder: 0.1,
                ..Faults::default()
            },
        );
        post_some_of_all(&mut world);
        world.run();
        verify_some_of_all(&world);
        assert!(
            world
                .nodes
                .iter()
                .map(|node| node.engine.counters().duplicates)
                .sum::<u64>()
                > 0
        );
    }
}

#[test]
fn delay_is_no_loss() {
    let mut world = pair();
    // Much longer than the acknowledgement timeout of 67 ms.
    faults(
        &world,
        0,
        Faults {
            delay: Duration::from_millis(400),
            ..Faults::default()
        },
    );
    post_some_of_all(&mut world);
    let before = world.now.get();
    world.run();
    verify_some_of_all(&world);
    assert!(world.now.get() - before > Duration::from_millis(800));
    let counters = world.nodes[0].engine.counters();
    assert_eq!((counters.timeouts, counters.retransmissions), (0, 0));
}

#[test]
fn what_was_delayed_is_not_overtaken() {
    let mut world = pair();
    faults(
        &world,
        0,
        Faults {
            delay: Duration::from_millis(5),
            ..Faults::default()
        },
    );
    world.post(0, 2, write(1, 0, 10_000, 0));
    world.settle();
    faults(&world, 0, Faults::default());
    world.post(0, 2, write(2, 0, 10_000, 0));
    world.run();
    assert_eq!(world.sends(0), ok([1, 2]));
    assert_eq!(world.nodes[1].engine.counters().sequence_naks_sent, 0);
}

#[test]
fn a_slow_adapter_is_no_loss() {
    let mut world = pair();
    world.nodes[1].asleep = true;
    post_some_of_all(&mut world);
    world.run_for(Duration::from_secs(10));
    assert_eq!(world.sends(0), []);
    world.nodes[1].asleep = false;
    world.run();
    verify_some_of_all(&world);
    let counters = world.nodes[0].engine.counters();
    assert_eq!((counters.timeouts, counters.retransmissions), (0, 0));
}

#[test]
fn what_nobody_takes_is_not_sent_without_end() {
    let mut world = World::new(2, 1 << 18);
    world.pair(
        Service::Uc,
        Connection {
            mtu: Mtu::B256,
            ..Connection::default()
        },
    );
    world.nodes[1].asleep = true;
    for id in 0..200 {
        world.post(0, 2, write(id, 0, 100_000, 0));
    }
    world.run();
    let sent = world.nodes[0].toy.sent.len();
    assert!((2048..4096).contains(&sent), "{sent}");
    world.nodes[1].asleep = false;
    world.run();
    assert_eq!(world.sends(0), ok(0..200));
    assert_eq!(world.nodes[1].engine.counters().bytes_received, 200 * 100_000);
}

#[test]
fn a_cut_link_ends_connections_and_is_told() {
    let mut world = pair();
    world.post(0, 2, write(1, 0, 200_000, 0));
    world.work(0);
    let lid = world.lid(1);
    world.network.borrow_mut().set_up(lid, false);
    world.post(0, 2, write(2, 0, 200_000, 0));
    world.run();
    assert_eq!(world.nodes[1].links, [false]);
    assert_eq!(world.nodes[0].links, []);
    assert_eq!(world.sends(0).last().unwrap().1, Status::Flushed);
    assert!(
        world
            .sends(0)
            .iter()
            .any(|(_, status)| *status == Status::RetryExceeded)
    );
    assert!(counters(&world, 1).dropped > 0);
    assert_eq!(counters(&world, 1).downs, 1);
    world.network.borrow_mut().set_up(lid, true);
    world.settle();
    assert_eq!(world.nodes[1].links, [false, true]);
}

#[test]
fn a_short_cut_is_recovered_from() {
    let mut world = pair();
    let lid = world.lid(1);
    world.network.borrow_mut().set_up(lid, false);
    post_some_of_all(&mut world);
    world.run_for(Duration::from_millis(200));
    assert_eq!(world.sends(0), []);
    world.network.borrow_mut().set_up(lid, true);
    world.run();
    verify_some_of_all(&world);
}

#[test]
fn links_count_what_they_carry() {
    let mut world = pair();
    world.post(0, 2, write(1, 0, 2500, 0));
    world.run();
    let (a, b) = (counters(&world, 0), counters(&world, 1));
    assert_eq!((a.tx_packets, a.rx_packets, b.tx_packets, b.rx_packets), (3, 1, 1, 3));
    // 26 bytes around every packet, 16 in the first, 4 in an acknowledgement.
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
fn topologies_are_checked() {
    let check = |switches: &[&str], links: &[(&str, &str)]| Network::new(&topology(switches, links), 0).err();
    assert_eq!(check(&["a", "b"], &[("a", "b")]), None);
    assert_eq!(check(&[], &[]), Some(TopologyError::NoSwitch(String::new())));
    assert_eq!(check(&["a", "a"], &[]), Some(TopologyError::Twice("a".into())));
    assert_eq!(check(&["a"], &[("a", "c")]), Some(TopologyError::NoSwitch("c".into())));
    assert_eq!(
        check(&["a", "b"], &[("a", "b"), ("b", "a")]),
        Some(TopologyError::Twice("b-a".into()))
    );
    assert_eq!(
        check(&["a", "b", "c"], &[("a", "b")]),
        Some(TopologyError::Apart("a".into(), "c".into()))
    );
}

#[test]
fn ports_are_given_lids_and_names_are_unique() {
    let mut network = Network::new(&topology(&["a"], &[]), 0).unwrap();
    let deliver = || Arc::new(|_| {}) as Arc<dyn Fn(Delivery) + Send + Sync>;
    let config = |name: &str, guid, switch: &str| PortConfig {
        name: name.into(),
        guid,
        switch: switch.into(),
    };
    let (first, gid) = network.join(&config("p", 0x0102, "a"), deliver()).unwrap();
    assert_eq!(first, 2);
    assert_eq!(gid.to_string(), "fe80::102");
    assert_eq!(
        network.join(&config("p", 3, "a"), deliver()).unwrap_err(),
        TopologyError::Twice("p".into())
    );
    assert_eq!(
        network.join(&config("q", 0x0102, "a"), deliver()).unwrap_err(),
        TopologyError::Twice("q".into())
    );
    assert_eq!(
        network.join(&config("q", 3, "z"), deliver()).unwrap_err(),
        TopologyError::NoSwitch("z".into())
    );
    assert_eq!(network.join(&config("q", 3, "a"), deliver()).unwrap().0, 3);
    network.leave(first);
    assert_eq!(
        network.join(&config("r", 4, "a"), deliver()).unwrap().0,
        2,
        "it is free again"
    );
}

#[test]
fn packets_go_around_a_cut_between_switches() {
    let topology = topology(&["a", "b", "c"], &[("a", "b"), ("b", "c"), ("a", "c")]);
    let mut world = World::on(&topology, &["a", "b"], 1 << 16, 1);
    world.pair(Service::Rc, Connection::default());
    let lose_all = Faults {
        loss: 1.0,
        ..Faults::default()
    };
    let change = |world: &World, a, b, up: bool, faults| {
        let mut network = world.network.borrow_mut();
        network.change_switch_link(a, b, |link| {
            link.set_up(up);
            link.set_faults(faults);
        })
    };
    world.post(0, 2, write(1, 0, 10, 0));
    world.run();
    change(&world, "a", "b", false, Faults::default()).unwrap();
    world.post(0, 2, write(2, 0, 10, 0));
    world.run();
    assert_eq!(world.sends(0), ok([1, 2]));
    change(&world, "b", "c", true, lose_all).unwrap();
    world.post(0, 2, write(3, 0, 10, 0));
    world.run();
    assert_eq!(world.sends(0).last(), Some(&(3, Status::RetryExceeded)));
    assert_eq!(change(&world, "c", "b", true, lose_all).unwrap().lost, 8);
    assert!(matches!(
        change(&world, "a", "a", true, lose_all),
        Err(TopologyError::Apart(..))
    ));
}
