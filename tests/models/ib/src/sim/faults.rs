// SPDX-License-Identifier: MIT OR Apache-2.0

//! Page faults, at every place where memory is accessed: nothing is lost or done twice, whatever they interrupt.

use super::*;

/// Runs the world, and provides requested pages whenever nothing else happens. Returns the number of pages.
fn run_with_pages(world: &mut World) -> usize {
    let mut served = 0;
    loop {
        world.run_for(Duration::from_millis(300));
        let now: usize = world.nodes.iter_mut().map(|node| serve_pages(node, true)).sum();
        if now == 0 {
            return served;
        }
        served += now;
    }
}

fn pair_without_pages(service: Service) -> World {
    let mut world = World::new(2, 1 << 20);
    world.pair(
        service,
        Connection {
            mtu: Mtu::B1024,
            ..Connection::default()
        },
    );
    for node in &mut world.nodes {
        node.toy.absent = (0..256).collect();
    }
    world
}

#[test]
fn writes_wait_for_pages_on_both_sides() {
    for service in [Service::Rc, Service::Uc] {
        let mut world = pair_without_pages(service);
        let data = world.fill(0, 5000, 300_000, 1);
        world.post(0, 2, write(1, 5000, 300_000, 10_000));
        world.post(0, 2, write(2, 5000, 100, 400_000));
        let served = run_with_pages(&mut world);
        assert_eq!(world.sends(0), ok([1, 2]));
        assert_eq!(world.bytes(1, 10_000, data.len()), data);
        assert_eq!(world.bytes(1, 400_000, 100), &data[..100]);
        assert!(served > 140, "{served}");
        let counters = [0, 1].map(|node| world.nodes[node].engine.counters());
        assert_eq!(counters[0].page_faults + counters[1].page_faults, served as u64);
        assert_eq!(counters[0].timeouts, 0, "waiting for a page is no loss");
        assert_eq!(counters[0].retransmissions, 0);
    }
}

#[test]
fn messages_wait_for_pages() {
    for service in [Service::Rc, Service::Uc] {
        let mut world = pair_without_pages(service);
        let data = world.fill(0, 0, 50_000, 1);
        for id in 0..5 {
            world.receive(1, Queue::Own(3), id, 100_000 + id * 60_000, 60_000);
            world.post(0, 2, work(id, SendOp::Send { imm: Some(id as u32) }, 0, 50_000));
        }
        run_with_pages(&mut world);
        assert_eq!(world.sends(0), ok(0..5));
        let expected: Vec<_> = (0..5)
            .map(|id| (id, Status::Success, 50_000, Received::SendImm(id as u32)))
            .collect();
        assert_eq!(world.received(1), expected);
        for id in 0..5 {
            assert_eq!(world.bytes(1, 100_000 + id * 60_000, 50_000), data);
        }
        assert_eq!(world.nodes[0].engine.counters().retransmissions, 0);
    }
}

#[test]
fn reads_and_atomics_wait_for_pages() {
    let mut world = pair_without_pages(Service::Rc);
    let data = world.fill(1, 4000, 200_000, 1);
    let remote = Remote {
        address: 800_000,
        key: ALL,
    };
    for id in 0..4 {
        world.post(0, 2, read(10 * id, 300_000, 200_000, 4000));
        world.post(
            0,
            2,
            work(10 * id + 1, SendOp::FetchAdd { remote, add: 5 }, 600_000 + id * 8, 8),
        );
    }
    run_with_pages(&mut world);
    assert_eq!(world.sends(0), ok([0, 1, 10, 11, 20, 21, 30, 31]));
    assert_eq!(world.bytes(0, 300_000, data.len()), data);
    for id in 0..4 {
        assert_eq!(world.bytes(0, 600_000 + id * 8, 8), (id as u64 * 5).to_le_bytes());
    }
    assert_eq!(world.bytes(1, 800_000, 8), 20_u64.to_le_bytes());
}

#[test]
fn an_answer_that_comes_right_behind_a_page_is_the_next_works() {
    let add = |id, address, to| {
        let remote = Remote { address, key: ALL };
        work(id, SendOp::FetchAdd { remote, add: 5 }, to, 8)
    };
    // The page at 0 is not there.
    let firsts = [read(1, 0, 8, 0x8000), add(1, 0x8000, 0)];
    let seconds = [
        read(2, 0x4000, 8, 0x9000),
        add(2, 0x9000, 0x4000),
        write(2, 0x5000, 8, 0x9000),
    ];
    for first in &firsts {
        for second in &seconds {
            let mut world = World::new(2, 1 << 16);
            world.pair(Service::Rc, Connection::default());
            let data = [(0x8000, 1), (0x9000, 2)].map(|(at, seed)| world.fill(1, at, 8, seed));
            world.nodes[0].toy.absent.insert(0);
            world.post(0, 2, first.clone());
            world.run_for(Duration::from_millis(1));
            world.post(0, 2, second.clone());
            world.work(0);
            // The answer to the second is there, and the page of the first comes before anybody looks.
            world.nodes[0].asleep = true;
            world.run_for(Duration::from_millis(1));
            assert_eq!(serve_pages(&mut world.nodes[0], true), 1);
            world.nodes[0].asleep = false;
            world.run();
            assert_eq!(world.sends(0), ok([1, 2]), "{first:?}, {second:?}");
            assert_eq!(world.bytes(0, 0, 8), data[0], "{first:?}, {second:?}");
            if !matches!(second.op, SendOp::Write { .. }) {
                assert_eq!(world.bytes(0, 0x4000, 8), data[1], "{first:?}, {second:?}");
            }
            let counters = world.nodes[0].engine.counters();
            assert_eq!(
                (counters.retransmissions, counters.timeouts),
                (0, 0),
                "nothing was lost"
            );
        }
    }
}

#[test]
fn datagrams_wait_for_pages() {
    let mut world = World::new(2, 1 << 16);
    for (node, qpn) in [(0, 2), (1, 3)] {
        world.qp(node, qpn, Service::Ud, ReceiveFrom::Own);
        world.datagrams_up(node, qpn, 0x11);
    }
    world.nodes[1].toy.absent = (0..16).collect();
    world.nodes[0].toy.absent = (0..16).collect();
    let data = world.fill(0, 0, 64, 5);
    for id in 0..3 {
        world.receive(1, Queue::Own(3), id, id * 8192, 200);
        let to = world.datagram_to(1, 3, 0x11);
        world.post(
            0,
            2,
            SendWork {
                to: Some(to),
                ..send(id, 0, 64)
            },
        );
    }
    assert!(run_with_pages(&mut world) >= 4);
    assert_eq!(world.received(1).len(), 3);
    for id in 0..3 {
        assert_eq!(world.bytes(1, id * 8192 + 40, 64), data);
    }
}

/// A page that never comes.
fn refuse_page(world: &mut World) {
    world.run_for(Duration::from_secs(5));
    assert!(
        world
            .nodes
            .iter_mut()
            .map(|node| serve_pages(node, false))
            .sum::<usize>()
            > 0
    );
    world.run();
}

#[test]
fn pages_that_never_come_end_the_work() {
    let remote = Remote {
        address: 0x9000,
        key: ALL,
    };
    let ops = [
        SendOp::Write { remote, imm: None },
        SendOp::Read { remote },
        SendOp::FetchAdd { remote, add: 1 },
    ];
    for op in ops {
        // There.
        let mut world = World::new(2, 1 << 16);
        world.pair(Service::Rc, Connection::default());
        world.nodes[1].toy.absent.insert(9);
        world.post(0, 2, work(1, op, 0, 8));
        world.post(0, 2, write(2, 0, 8, 0));
        refuse_page(&mut world);
        assert_eq!(
            world.sends(0),
            [(1, Status::RemoteAccess), (2, Status::Flushed)],
            "{op:?}"
        );
        assert!(world.nodes[1].toy.events.contains(&Event::AccessViolation { qpn: 3 }));
        // Here.
        let mut world = World::new(2, 1 << 16);
        world.pair(Service::Rc, Connection::default());
        world.nodes[0].toy.absent.insert(0);
        world.post(0, 2, work(1, op, 0, 8));
        world.post(0, 2, write(2, 0x8000, 8, 0));
        refuse_page(&mut world);
        assert_eq!(
            world.sends(0),
            [(1, Status::LocalProtection), (2, Status::Flushed)],
            "{op:?}"
        );
    }
    let mut world = World::new(2, 1 << 16);
    world.pair(Service::Rc, Connection::default());
    world.nodes[1].toy.absent.insert(9);
    world.receive(1, Queue::Own(3), 5, 0x9000, 100);
    world.post(0, 2, send(1, 0, 8));
    refuse_page(&mut world);
    assert_eq!(world.sends(0), [(1, Status::RemoteOperation)]);
    assert_eq!(world.received(1)[0].1, Status::LocalProtection);
}

#[test]
fn a_queue_pair_that_waits_does_not_stop_others() {
    let mut world = World::new(2, 1 << 20);
    world.pair(Service::Rc, Connection::default());
    world.qp(0, 12, Service::Rc, ReceiveFrom::Own);
    world.qp(1, 13, Service::Rc, ReceiveFrom::Own);
    world.bring_up(0, 12, 1, 13, Connection::default());
    world.bring_up(1, 13, 0, 12, Connection::default());
    world.nodes[1].toy.absent.insert(0);
    for id in 0..10 {
        world.post(0, 2, write(id, 0, 500_000, 0));
    }
    for id in 0..20 {
        world.post(0, 12, write(100 + id, 0, 500_000, 8192));
    }
    world.run();
    assert_eq!(world.sends(0), ok(100..120));
    run_with_pages(&mut world);
    assert_eq!(world.sends(0).len(), 30);
}

#[test]
fn errors_and_resets_while_waiting_leave_nothing_behind() {
    for state in [State::Err, State::Reset] {
        let mut world = pair_without_pages(Service::Rc);
        world.post(0, 2, write(1, 0, 20_000, 0));
        world.post(1, 3, write(2, 0, 20_000, 0));
        world.run_for(Duration::from_millis(10));
        for node in &mut world.nodes {
            serve_pages(node, true);
        }
        world.run_for(Duration::from_millis(10));
        world.state(0, 2, state);
        world.state(1, 3, state);
        run_with_pages(&mut world);
        let completions = if state == State::Err { 1 } else { 0 };
        assert_eq!(world.sends(0).len(), completions);
        assert_eq!(world.sends(1).len(), completions);
        assert!(!world.network.borrow().in_flight(world.lid(0), world.lid(1)));
    }
}
