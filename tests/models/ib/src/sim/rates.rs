// SPDX-License-Identifier: MIT OR Apache-2.0

//! Links with a rate: they take exactly as long as their rate says, lose nothing, and keep the order of packets, except when the rate is
//! removed.

use proptest::prelude::*;

use super::links::{counters, faults, post_mixed_work, verify_mixed_work};
use super::*;
use crate::fabric::Faults;

/// Bytes per second of most tests.
const RATE: u64 = 64 << 20;
/// Bytes of a message.
const MESSAGE: u32 = 1 << 16;
/// Longest time for which the adapters are late, because they send in steps and a link accepts packets in advance.
const SLACK: Duration = Duration::from_millis(40);

/// Creates one adapter for each rate, on one switch.
fn with_rates(rates: &[Option<u64>]) -> Simulation {
    let topology = Topology {
        switches: vec!["sw".into()],
        links: Vec::new(),
    };
    let ports: Vec<_> = rates.iter().map(|rate| ("sw", *rate)).collect();
    Simulation::with_ports(&topology, &ports, 1 << 20, 1)
}

fn pair(service: Service, rate: u64) -> Simulation {
    let mut sim = with_rates(&[Some(rate); 2]);
    sim.pair(service, Connection::default());
    sim
}

/// Connects queue pair `qpn` on node `from` and queue pair `qpn + 1` on node `to`.
fn connect(sim: &mut Simulation, service: Service, from: usize, to: usize, qpn: u32) {
    sim.qp(from, qpn, service, ReceiveFrom::Own);
    sim.qp(to, qpn + 1, service, ReceiveFrom::Own);
    sim.bring_up(from, qpn, to, qpn + 1, Connection::default());
    sim.bring_up(to, qpn + 1, from, qpn, Connection::default());
}

fn post_writes(sim: &mut Simulation, node: usize, qpn: u32, count: u64) {
    for id in 0..count {
        sim.post(node, qpn, write(id, 0, MESSAGE, 1 << 18));
    }
}

/// Runs until `node` has `count` completions of sends. Returns how long that took.
fn time_of_sends(sim: &mut Simulation, node: usize, count: usize) -> Duration {
    let start = sim.now.get();
    sim.settle();
    while sim.sends(node).len() < count {
        assert!(sim.advance(start + Duration::from_secs(3600)), "{:?}", sim.sends(node));
        sim.settle();
    }
    sim.now.get() - start
}

/// Returns the time that a link with the rate takes for these bytes.
fn time_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_nanos(u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(rate)).unwrap())
}

#[track_caller]
fn assert_nothing_lost(sim: &Simulation) {
    for node in 0..sim.nodes.len() {
        let link = counters(sim, node);
        assert_eq!((link.lost, link.dropped), (0, 0));
        let transport = sim.nodes[node].engine.counters();
        assert_eq!(
            (
                transport.retransmissions,
                transport.timeouts,
                transport.sequence_naks_sent
            ),
            (0, 0, 0)
        );
    }
}

#[test]
fn bytes_take_their_number_divided_by_the_rate() {
    // Rates below and above those by which the adapters' windows and steps limit.
    for rate in [100_000, RATE, 3_000_000_007] {
        let mut sim = pair(Service::Rc, rate);
        post_writes(&mut sim, 0, 2, 100);
        let time = time_of_sends(&mut sim, 0, 100);
        assert_eq!(sim.sends(0), ok(0..100));
        let bytes = counters(&sim, 0).tx_bytes;
        assert!(bytes > 100 * u64::from(MESSAGE));
        // The other link is behind by its largest packet, the first one of a message. The last acknowledgement crosses both
        // links.
        let largest = 1024 + 26 + 16;
        let expected = time_of(bytes + largest + 2 * (26 + 4), rate);
        let difference = time.abs_diff(expected);
        assert!(difference < Duration::from_nanos(10), "{time:?}, expected {expected:?}");
        assert_nothing_lost(&sim);
    }
}

fn set_rate(sim: &Simulation, node: usize, rate: Option<u64>) {
    let rate = rate.map(|rate| NonZeroU64::new(rate).unwrap());
    sim.network.borrow_mut().set_rate(sim.lid(node), rate);
}

#[test]
fn another_rate_counts_for_the_packets_that_follow() {
    let mut sim = pair(Service::Rc, RATE);
    post_writes(&mut sim, 0, 2, 100);
    let first = time_of_sends(&mut sim, 0, 50);
    for node in 0..2 {
        set_rate(&sim, node, Some(10 * RATE));
    }
    let rest = time_of_sends(&mut sim, 0, 100);
    assert_eq!(sim.sends(0), ok(0..100));
    // The packets on the links keep their times.
    assert_nothing_lost(&sim);
    let half = time_of(counters(&sim, 0).tx_bytes / 2, RATE);
    assert!(first.abs_diff(half) < half / 10, "{first:?}, half {half:?}");
    assert!(
        (half / 10..half / 10 + SLACK).contains(&rest),
        "{rest:?}, half {half:?}"
    );
}

#[test]
fn senders_continue_on_a_link_without_a_rate_any_more() {
    // The link of the sender or that of the receiver has a rate at first. It is so low that the link accepts less than the adapter's window.
    let slow = Some(RATE / 64);
    for (node, rates) in [(0, [slow, None]), (1, [None, slow])] {
        let mut sim = with_rates(&rates);
        sim.pair(Service::Rc, Connection::default());
        post_writes(&mut sim, 0, 2, 100);
        sim.settle();
        assert!(sim.sends(0).is_empty());
        let now = sim.now.get();
        assert!(!sim.network.borrow_mut().has_space(sim.lid(0), sim.lid(1), now));
        set_rate(&sim, node, None);
        let woken = sim.nodes[0].inbox.try_recv();
        assert!(matches!(woken, Ok(Delivery::PathReady)), "{rates:?}");
        assert!(sim.nodes[0].inbox.try_recv().is_err());
        sim.nodes[0].engine.path_ready();
        // Packets that overtake those on the link are sent again.
        time_of_sends(&mut sim, 0, 100);
        assert_eq!(sim.sends(0), ok(0..100));
    }
}

#[test]
fn reads_take_their_bytes_divided_by_the_rate() {
    let mut sim = pair(Service::Rc, RATE);
    for id in 0..100 {
        sim.post(0, 2, read(id, 0, MESSAGE, 1 << 18));
    }
    let time = time_of_sends(&mut sim, 0, 100);
    let expected = time_of(counters(&sim, 0).rx_bytes, RATE);
    assert!(
        (expected..expected + Duration::from_millis(1)).contains(&time),
        "{time:?}, expected {expected:?}"
    );
    assert_nothing_lost(&sim);
}

#[test]
fn directions_do_not_slow_each_other() {
    let mut sim = pair(Service::Rc, RATE);
    post_writes(&mut sim, 0, 2, 500);
    let alone = time_of_sends(&mut sim, 0, 500);
    let mut sim = pair(Service::Rc, RATE);
    post_writes(&mut sim, 0, 2, 500);
    post_writes(&mut sim, 1, 3, 500);
    let first = time_of_sends(&mut sim, 0, 500);
    assert!(first < alone + SLACK, "{first:?}, alone {alone:?}");
    let second = first + time_of_sends(&mut sim, 1, 500);
    assert!(second < alone + SLACK, "{second:?}, alone {alone:?}");
    assert_nothing_lost(&sim);
}

#[test]
fn acknowledgements_wait_only_for_a_short_backlog() {
    // Node 1 sends as much as it can, and node 0 one small message at a time.
    let mut sim = pair(Service::Rc, RATE);
    connect(&mut sim, Service::Rc, 1, 0, 12);
    connect(&mut sim, Service::Rc, 1, 0, 22);
    post_writes(&mut sim, 1, 12, 500);
    post_writes(&mut sim, 1, 22, 500);
    for done in 1..=10 {
        sim.post(0, 2, write(done, 0, 8, 1 << 18));
        let time = time_of_sends(&mut sim, 0, done as usize);
        assert!(time < SLACK, "{time:?}");
    }
    assert!(sim.sends(1).len() < 1000, "node 1 has to be sending all the time");
}

#[test]
fn ports_are_independent() {
    let make = || {
        let mut sim = with_rates(&[Some(RATE), Some(RATE), Some(RATE / 4), Some(RATE / 4), None]);
        connect(&mut sim, Service::Rc, 0, 1, 2);
        connect(&mut sim, Service::Rc, 2, 3, 12);
        post_writes(&mut sim, 0, 2, 100);
        sim
    };
    let alone = time_of_sends(&mut make(), 0, 100);
    let mut sim = make();
    post_writes(&mut sim, 2, 12, 100);
    assert_eq!(time_of_sends(&mut sim, 0, 100), alone);
    let slow = alone + time_of_sends(&mut sim, 2, 100);
    assert!(
        slow.abs_diff(4 * alone) < Duration::from_micros(10),
        "{slow:?}, {alone:?}"
    );
}

#[test]
fn the_slower_link_limits() {
    for rates in [
        [Some(RATE), None],
        [None, Some(RATE)],
        [Some(RATE), Some(8 * RATE)],
        [Some(8 * RATE), Some(RATE)],
    ] {
        let mut sim = with_rates(&rates);
        sim.pair(Service::Rc, Connection::default());
        post_writes(&mut sim, 0, 2, 100);
        let time = time_of_sends(&mut sim, 0, 100);
        let expected = time_of(counters(&sim, 0).tx_bytes, RATE);
        assert!(
            (expected..expected + Duration::from_millis(1)).contains(&time),
            "{rates:?}: {time:?}, expected {expected:?}"
        );
        assert_nothing_lost(&sim);
    }
}

#[test]
fn senders_share_the_receivers_link() {
    let mut sim = with_rates(&[Some(RATE), Some(RATE), Some(RATE)]);
    connect(&mut sim, Service::Rc, 0, 2, 2);
    connect(&mut sim, Service::Rc, 1, 2, 12);
    post_writes(&mut sim, 0, 2, 200);
    post_writes(&mut sim, 1, 12, 200);
    let first = time_of_sends(&mut sim, 0, 200);
    let last = first + time_of_sends(&mut sim, 1, 200);
    let expected = time_of(counters(&sim, 2).rx_bytes, RATE);
    assert!(
        (expected..expected + SLACK).contains(&last),
        "{last:?}, expected {expected:?}"
    );
    assert!(
        first > expected - 2 * SLACK,
        "{first:?} of {expected:?}: one sender gets more than the other"
    );
    assert_nothing_lost(&sim);
}

#[test]
fn an_idle_link_saves_nothing_up() {
    let mut sim = pair(Service::Rc, RATE);
    post_writes(&mut sim, 0, 2, 50);
    let first = time_of_sends(&mut sim, 0, 50);
    sim.run_for(Duration::from_secs(30));
    post_writes(&mut sim, 0, 2, 50);
    let second = time_of_sends(&mut sim, 0, 100);
    assert!(
        first.abs_diff(second) < Duration::from_nanos(10),
        "{first:?}, {second:?}"
    );
}

#[test]
fn a_late_thread_keeps_the_rate() {
    const LATE: Duration = Duration::from_millis(5);
    // With this rate, the window of a connection is longer than a few late deliveries.
    let rate = 16 << 20;
    let mut sim = pair(Service::Rc, rate);
    post_writes(&mut sim, 0, 2, 200);
    sim.settle();
    let start = sim.now.get();
    while sim.sends(0).len() < 200 {
        sim.now.set(sim.now.get() + LATE);
        sim.network.borrow_mut().deliver_due(sim.now.get());
        sim.settle();
    }
    let time = sim.now.get() - start;
    let expected = time_of(counters(&sim, 0).tx_bytes, rate);
    assert!(
        (expected..expected + 3 * LATE).contains(&time),
        "{time:?}, expected {expected:?}"
    );
    assert_nothing_lost(&sim);
}

#[test]
fn a_delay_does_not_lower_the_rate() {
    let rate = 4 << 20;
    let delay = Duration::from_millis(40);
    let mut sim = pair(Service::Rc, rate);
    let slow = Faults {
        delay,
        ..Faults::default()
    };
    faults(&sim, 0, slow);
    post_writes(&mut sim, 0, 2, 100);
    let time = time_of_sends(&mut sim, 0, 100);
    let expected = time_of(counters(&sim, 0).tx_bytes, rate) + 2 * delay;
    assert!(
        (expected..expected + Duration::from_millis(1)).contains(&time),
        "{time:?}, expected {expected:?}"
    );
    assert_nothing_lost(&sim);
}

#[test]
fn all_operations_work_on_slow_links() {
    for faults_of_link in [
        Faults::default(),
        Faults {
            delay: Duration::from_millis(3),
            loss: 0.05,
            duplicate: 0.05,
            reorder: 0.05,
            ..Faults::default()
        },
    ] {
        let mut sim = pair(Service::Rc, 200_000);
        faults(&sim, 0, faults_of_link);
        post_mixed_work(&mut sim);
        sim.run();
        verify_mixed_work(&sim);
        if faults_of_link == Faults::default() {
            assert_nothing_lost(&sim);
        }
    }
}

#[test]
fn a_packet_to_the_own_port_takes_no_time() {
    let mut sim = with_rates(&[Some(1)]);
    sim.qp(0, 2, Service::Rc, ReceiveFrom::Own);
    sim.qp(0, 3, Service::Rc, ReceiveFrom::Own);
    sim.bring_up(0, 2, 0, 3, Connection::default());
    sim.bring_up(0, 3, 0, 2, Connection::default());
    post_writes(&mut sim, 0, 2, 3);
    assert_eq!(time_of_sends(&mut sim, 0, 3), Duration::ZERO);
}

#[test]
fn a_link_that_went_down_starts_empty() {
    let mut sim = pair(Service::Rc, 1_000_000);
    post_mixed_work(&mut sim);
    sim.run_for(Duration::from_millis(5));
    let lid = sim.lid(1);
    sim.network.borrow_mut().set_up(lid, false);
    sim.run_for(Duration::from_millis(200));
    assert_ne!(sim.sends(0).len(), 9);
    sim.network.borrow_mut().set_up(lid, true);
    sim.run();
    verify_mixed_work(&sim);
}

#[test]
fn senders_are_woken_when_their_packets_are_gone() {
    // An unreliable connection has no timer that would wake it.
    type Remove = fn(&mut Network, u16);
    let removals: [Remove; 2] = [|network, lid| network.set_up(lid, false), Network::remove_port];
    for rates in [[Some(1000), None], [None, Some(1000)]] {
        for remove in removals {
            let mut sim = with_rates(&rates);
            sim.pair(Service::Uc, Connection::default());
            post_writes(&mut sim, 0, 2, 100);
            sim.run_for(Duration::from_secs(1));
            assert!(sim.sends(0).len() < 100, "the sender must be waiting");
            let lid = sim.lid(1);
            remove(&mut sim.network.borrow_mut(), lid);
            // As long as the sender's link takes for the packets that it had accepted.
            sim.run_for(Duration::from_secs(1000));
            assert_eq!(sim.sends(0), ok(0..100), "{rates:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_rate_loses_or_reorders_or_is_exceeded(
        rates in prop::array::uniform3(prop::option::weighted(0.8, 20_000_u64..50_000_000)),
        // The sender, the length, and the time before the message in microseconds.
        messages in prop::collection::vec((any::<bool>(), 1..40_000_u32, prop_oneof![Just(0), 0..50_000_u64]), 1..20),
    ) {
        let mut sim = with_rates(&rates);
        // Unreliable connections repeat nothing.
        connect(&mut sim, Service::Uc, 0, 2, 2);
        connect(&mut sim, Service::Uc, 1, 2, 12);
        let data = [sim.fill(0, 0, 40_000, 1), sim.fill(1, 0, 40_000, 2)];
        let mut arrivals = vec![(sim.now.get(), counters(&sim, 2).rx_bytes)];
        let mut expected = [Vec::new(), Vec::new()];
        let mut note = |sim: &Simulation| {
            let bytes = counters(sim, 2).rx_bytes;
            if arrivals.last().is_some_and(|(_, before)| *before < bytes) {
                arrivals.push((sim.now.get(), bytes));
            }
        };
        for (id, (second, length, wait)) in messages.iter().enumerate() {
            let end = sim.now.get() + Duration::from_micros(*wait);
            sim.settle();
            while sim.advance(end) {
                note(&sim);
                sim.settle();
            }
            let node = usize::from(*second);
            let qpn = if *second { 12 } else { 2 };
            sim.receive(2, Queue::Own(qpn + 1), id as u64, 40_000 * (1 + id as u64), 40_000);
            sim.post(node, qpn, send(id as u64, 0, *length));
            expected[node].push((id as u64, *length));
        }
        sim.settle();
        let end = sim.now.get() + Duration::from_secs(3600);
        while sim.advance(end) {
            note(&sim);
            sim.settle();
        }
        assert_nothing_lost(&sim);
        for (node, expected) in expected.iter().enumerate() {
            prop_assert_eq!(sim.sends(node), ok(expected.iter().map(|(id, _)| *id)));
            let received = sim.received(2).into_iter().filter(|(id, ..)| expected.iter().any(|(other, _)| other == id));
            let received: Vec<_> = received.map(|(id, status, length, _)| (id, status, length)).collect();
            let all: Vec<_> = expected.iter().map(|(id, length)| (*id, Status::Success, *length)).collect();
            prop_assert_eq!(received, all);
            for (id, length) in expected {
                let length = *length as usize;
                prop_assert_eq!(sim.bytes(2, 40_000 * (1 + *id as usize), length), &data[node][..length]);
            }
        }
        // Between any two arrivals, the receiver's link carried no more than its rate permits.
        if let Some(rate) = rates[2] {
            for (i, (from, before)) in arrivals.iter().enumerate() {
                for (to, after) in &arrivals[i + 1..] {
                    // One nanosecond and one byte for rounding.
                    let most = u128::from(rate) * ((*to - *from).as_nanos() + 1) / 1_000_000_000 + 1;
                    prop_assert!(u128::from(after - before) <= most, "{} bytes in {:?}", after - before, *to - *from);
                }
            }
        }
    }
}
