// SPDX-License-Identifier: MIT OR Apache-2.0

//! Page faults at every memory access: nothing is lost or done twice, whatever the page fault interrupts.

use super::*;

/// Runs until no page is requested any more, and provides the requested pages. Returns the number of page faults.
fn run_with_pages(sim: &mut Simulation) -> usize {
    let mut served = 0;
    loop {
        sim.run_for(Duration::from_millis(300));
        let now: usize = sim.nodes.iter_mut().map(|node| serve_pages(node, true)).sum();
        if now == 0 {
            return served;
        }
        served += now;
    }
}

fn pair_without_pages(service: Service) -> Simulation {
    let mut sim = Simulation::new(2, 1 << 20);
    sim.pair(
        service,
        Connection {
            mtu: Mtu::B1024,
            ..Connection::default()
        },
    );
    for node in &mut sim.nodes {
        node.host.absent = (0..256).collect();
    }
    sim
}

#[test]
fn writes_wait_for_pages_on_both_sides() {
    for service in [Service::Rc, Service::Uc] {
        let mut sim = pair_without_pages(service);
        let data = sim.fill(0, 5000, 300_000, 1);
        sim.post(0, 2, write(1, 5000, 300_000, 10_000));
        sim.post(0, 2, write(2, 5000, 100, 400_000));
        let served = run_with_pages(&mut sim);
        assert_eq!(sim.sends(0), ok([1, 2]));
        assert_eq!(sim.bytes(1, 10_000, data.len()), data);
        assert_eq!(sim.bytes(1, 400_000, 100), &data[..100]);
        assert!(served > 140, "{served}");
        let counters = [0, 1].map(|node| sim.nodes[node].engine.counters());
        assert_eq!(counters[0].page_faults + counters[1].page_faults, served as u64);
        assert_eq!(
            counters[0].timeouts, 0,
            "a page fault must not expire the acknowledgement timer"
        );
        assert_eq!(counters[0].retransmissions, 0);
    }
}

#[test]
fn messages_wait_for_pages() {
    for service in [Service::Rc, Service::Uc] {
        let mut sim = pair_without_pages(service);
        let data = sim.fill(0, 0, 50_000, 1);
        for id in 0..5 {
            sim.receive(1, Queue::Own(3), id, 100_000 + id * 60_000, 60_000);
            sim.post(0, 2, work(id, SendOp::Send { imm: Some(id as u32) }, 0, 50_000));
        }
        run_with_pages(&mut sim);
        assert_eq!(sim.sends(0), ok(0..5));
        let expected: Vec<_> = (0..5)
            .map(|id| (id, Status::Success, 50_000, Received::SendImm(id as u32)))
            .collect();
        assert_eq!(sim.received(1), expected);
        for id in 0..5 {
            assert_eq!(sim.bytes(1, 100_000 + id * 60_000, 50_000), data);
        }
        assert_eq!(sim.nodes[0].engine.counters().retransmissions, 0);
    }
}

#[test]
fn reads_and_atomics_wait_for_pages() {
    let mut sim = pair_without_pages(Service::Rc);
    let data = sim.fill(1, 4000, 200_000, 1);
    let remote = Remote {
        address: 800_000,
        key: ALL_KEY,
    };
    for id in 0..4 {
        sim.post(0, 2, read(10 * id, 300_000, 200_000, 4000));
        sim.post(
            0,
            2,
            work(10 * id + 1, SendOp::FetchAdd { remote, add: 5 }, 600_000 + id * 8, 8),
        );
    }
    run_with_pages(&mut sim);
    assert_eq!(sim.sends(0), ok([0, 1, 10, 11, 20, 21, 30, 31]));
    assert_eq!(sim.bytes(0, 300_000, data.len()), data);
    for id in 0..4 {
        assert_eq!(sim.bytes(0, 600_000 + id * 8, 8), (id as u64 * 5).to_le_bytes());
    }
    assert_eq!(sim.bytes(1, 800_000, 8), 20_u64.to_le_bytes());
}

#[test]
fn response_after_page_fault_belongs_to_next_request() {
    let add = |id, address, to| {
        let remote = Remote { address, key: ALL_KEY };
        work(id, SendOp::FetchAdd { remote, add: 5 }, to, 8)
    };
    // The page at address 0 is absent.
    let firsts = [read(1, 0, 8, 0x8000), add(1, 0x8000, 0)];
    let seconds = [
        read(2, 0x4000, 8, 0x9000),
        add(2, 0x9000, 0x4000),
        write(2, 0x5000, 8, 0x9000),
    ];
    for first in &firsts {
        for second in &seconds {
            let mut sim = Simulation::new(2, 1 << 16);
            sim.pair(Service::Rc, Connection::default());
            let data = [(0x8000, 1), (0x9000, 2)].map(|(at, seed)| sim.fill(1, at, 8, seed));
            sim.nodes[0].host.absent.insert(0);
            sim.post(0, 2, first.clone());
            sim.run_for(Duration::from_millis(1));
            sim.post(0, 2, second.clone());
            sim.work(0);
            // The response to the second request is in the inbox when the page of the first is provided.
            sim.nodes[0].paused = true;
            sim.run_for(Duration::from_millis(1));
            assert_eq!(serve_pages(&mut sim.nodes[0], true), 1);
            sim.nodes[0].paused = false;
            sim.run();
            assert_eq!(sim.sends(0), ok([1, 2]), "{first:?}, {second:?}");
            assert_eq!(sim.bytes(0, 0, 8), data[0], "{first:?}, {second:?}");
            if !matches!(second.op, SendOp::Write { .. }) {
                assert_eq!(sim.bytes(0, 0x4000, 8), data[1], "{first:?}, {second:?}");
            }
            let counters = sim.nodes[0].engine.counters();
            assert_eq!(
                (counters.retransmissions, counters.timeouts),
                (0, 0),
                "no packet was lost, so none may be retransmitted"
            );
        }
    }
}

#[test]
fn datagrams_wait_for_pages() {
    let mut sim = Simulation::new(2, 1 << 16);
    for (node, qpn) in [(0, 2), (1, 3)] {
        sim.qp(node, qpn, Service::Ud, ReceiveFrom::Own);
        sim.datagrams_up(node, qpn, 0x11);
    }
    sim.nodes[1].host.absent = (0..16).collect();
    sim.nodes[0].host.absent = (0..16).collect();
    let data = sim.fill(0, 0, 64, 5);
    for id in 0..3 {
        sim.receive(1, Queue::Own(3), id, id * 8192, 200);
        let to = sim.datagram_to(1, 3, 0x11);
        sim.post(
            0,
            2,
            SendWork {
                to: Some(to),
                ..send(id, 0, 64)
            },
        );
    }
    assert!(run_with_pages(&mut sim) >= 4);
    assert_eq!(sim.received(1).len(), 3);
    for id in 0..3 {
        assert_eq!(sim.bytes(1, id * 8192 + 40, 64), data);
    }
}

/// Runs, and fails all page faults.
fn refuse_page(sim: &mut Simulation) {
    sim.run_for(Duration::from_secs(5));
    assert!(sim.nodes.iter_mut().map(|node| serve_pages(node, false)).sum::<usize>() > 0);
    sim.run();
}

#[test]
fn failed_page_fault_fails_the_work() {
    let remote = Remote {
        address: 0x9000,
        key: ALL_KEY,
    };
    let ops = [
        SendOp::Write { remote, imm: None },
        SendOp::Read { remote },
        SendOp::FetchAdd { remote, add: 1 },
    ];
    for op in ops {
        // Page fault at the responder.
        let mut sim = Simulation::new(2, 1 << 16);
        sim.pair(Service::Rc, Connection::default());
        sim.nodes[1].host.absent.insert(9);
        sim.post(0, 2, work(1, op, 0, 8));
        sim.post(0, 2, write(2, 0, 8, 0));
        refuse_page(&mut sim);
        assert_eq!(
            sim.sends(0),
            [(1, Status::RemoteAccess), (2, Status::Flushed)],
            "{op:?}"
        );
        assert!(sim.nodes[1].host.events.contains(&Event::AccessViolation { qpn: 3 }));
        // Page fault at the requester.
        let mut sim = Simulation::new(2, 1 << 16);
        sim.pair(Service::Rc, Connection::default());
        sim.nodes[0].host.absent.insert(0);
        sim.post(0, 2, work(1, op, 0, 8));
        sim.post(0, 2, write(2, 0x8000, 8, 0));
        refuse_page(&mut sim);
        assert_eq!(
            sim.sends(0),
            [(1, Status::LocalProtection), (2, Status::Flushed)],
            "{op:?}"
        );
    }
    let mut sim = Simulation::new(2, 1 << 16);
    sim.pair(Service::Rc, Connection::default());
    sim.nodes[1].host.absent.insert(9);
    sim.receive(1, Queue::Own(3), 5, 0x9000, 100);
    sim.post(0, 2, send(1, 0, 8));
    refuse_page(&mut sim);
    assert_eq!(sim.sends(0), [(1, Status::RemoteOperation)]);
    assert_eq!(sim.received(1)[0].1, Status::LocalProtection);
}

#[test]
fn waiting_queue_pair_does_not_block_others() {
    let mut sim = Simulation::new(2, 1 << 20);
    sim.pair(Service::Rc, Connection::default());
    sim.qp(0, 12, Service::Rc, ReceiveFrom::Own);
    sim.qp(1, 13, Service::Rc, ReceiveFrom::Own);
    sim.bring_up(0, 12, 1, 13, Connection::default());
    sim.bring_up(1, 13, 0, 12, Connection::default());
    sim.nodes[1].host.absent.insert(0);
    for id in 0..10 {
        sim.post(0, 2, write(id, 0, 500_000, 0));
    }
    for id in 0..20 {
        sim.post(0, 12, write(100 + id, 0, 500_000, 8192));
    }
    sim.run();
    assert_eq!(sim.sends(0), ok(100..120));
    run_with_pages(&mut sim);
    assert_eq!(sim.sends(0).len(), 30);
}

#[test]
fn error_or_reset_during_page_fault_drops_the_work() {
    for state in [State::Err, State::Reset] {
        let mut sim = pair_without_pages(Service::Rc);
        sim.post(0, 2, write(1, 0, 20_000, 0));
        sim.post(1, 3, write(2, 0, 20_000, 0));
        sim.run_for(Duration::from_millis(10));
        for node in &mut sim.nodes {
            serve_pages(node, true);
        }
        sim.run_for(Duration::from_millis(10));
        sim.state(0, 2, state);
        sim.state(1, 3, state);
        run_with_pages(&mut sim);
        let completions = if state == State::Err { 1 } else { 0 };
        assert_eq!(sim.sends(0).len(), completions);
        assert_eq!(sim.sends(1).len(), completions);
        assert!(!sim.network.borrow().in_flight(sim.lid(0), sim.lid(1)));
    }
}
