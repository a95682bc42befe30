// SPDX-License-Identifier: MIT OR Apache-2.0

//! Properties: every request, over every link, completes in order, exactly once, with the right bytes; and malformed packets
//! do no harm.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::fabric::{Burst, Faults};
use crate::packet::{Aeth, AtomicEth, Deth, Extended, Reth, Slice};
use crate::work::Fence;

/// Bytes that each operation has for itself on either side.
const ROOM: u64 = 1 << 16;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    FetchAdd,
    CompareSwap,
    Local,
}

#[derive(Clone, Debug)]
struct Op {
    kind: Kind,
    length: u32,
    fence: Fence,
    signaled: bool,
    /// Posted by the second node.
    backwards: bool,
}

fn op() -> impl Strategy<Value = Op> {
    let kind = prop_oneof![
        Just(Kind::Send),
        Just(Kind::SendImm),
        Just(Kind::Write),
        Just(Kind::WriteImm),
        Just(Kind::Read),
        Just(Kind::FetchAdd),
        Just(Kind::CompareSwap),
        Just(Kind::Local),
    ];
    let length = prop_oneof![0..300_u32, 0..10_000_u32, 0..ROOM as u32];
    let fence = prop_oneof![8 => Just(Fence::None), 1 => Just(Fence::Reads), 1 => Just(Fence::All)];
    (kind, length, fence, prop::bool::weighted(0.8), any::<bool>()).prop_map(
        |(kind, length, fence, signaled, backwards)| {
            let length = match kind {
                Kind::FetchAdd | Kind::CompareSwap => 8,
                Kind::Local => 0,
                _ => length,
            };
            Op {
                kind,
                length,
                fence,
                signaled,
                backwards,
            }
        },
    )
}

fn mtu() -> impl Strategy<Value = Mtu> {
    (1..=5_u8).prop_map(|code| Mtu::from_code(code).unwrap())
}

fn faults() -> impl Strategy<Value = Faults> {
    let part = |most: f64| prop_oneof![Just(0.0), 0.0..most];
    (part(0.05), part(0.1), part(0.1), prop_oneof![Just(0), 0..300_000_u64]).prop_map(
        |(loss, duplicate, reorder, delay)| Faults {
            delay: Duration::from_micros(delay),
            loss,
            lose_nth: 0,
            duplicate,
            reorder,
        },
    )
}

/// Where things are in a node's memory: data of its own operations, counters, and what the other writes.
struct Places {
    own: u64,
    counters: u64,
    theirs: u64,
}

fn places(ops: usize) -> Places {
    let size = ops as u64 * ROOM;
    Places {
        own: 0,
        counters: size,
        theirs: size + ROOM,
    }
}

/// Posts `ops`, with receives that come late if `late`, and checks all that can be seen afterwards.
fn check(ops: &[Op], mtu: Mtu, link: Faults, seed: u64, late: bool, pages: bool) {
    let places = places(ops.len());
    let memory = (places.theirs + places.counters) as usize;
    let mut world = World::with_seed(2, memory, seed);
    world.pair(
        Service::Rc,
        Connection {
            mtu,
            rnr_retry: 7,
            psn: seed as u32 & 0xff_ffff,
            ..Connection::default()
        },
    );
    let lid = world.lid(0);
    world.network.borrow_mut().set_faults(lid, link);
    let qpn = |node: usize| 2 + node as u32;
    for node in 0..2 {
        world.fill(node, 0, places.counters as usize, node as u8 * 77 + 1);
        if pages {
            world.nodes[node].toy.absent = (0..memory as u64 / PAGE).step_by(7).collect();
        }
    }
    let before: Vec<Vec<u8>> = world.nodes.iter().map(|node| node.toy.memory.clone()).collect();
    let mut receives = Vec::new();
    for (i, op) in ops.iter().enumerate() {
        let (node, id) = (usize::from(op.backwards), i as u64);
        let own = places.own + id * ROOM;
        let remote = Remote {
            address: places.theirs + id * ROOM,
            key: ALL,
        };
        let counter = Remote {
            address: places.counters,
            key: ALL,
        };
        let operation = match op.kind {
            Kind::Send => SendOp::Send { imm: None },
            Kind::SendImm => SendOp::Send { imm: Some(i as u32) },
            Kind::Write => SendOp::Write { remote, imm: None },
            Kind::WriteImm => SendOp::Write {
                remote,
                imm: Some(i as u32),
            },
            Kind::Read => SendOp::Read {
                remote: Remote { address: own, key: ALL },
            },
            Kind::FetchAdd => SendOp::FetchAdd {
                remote: counter,
                add: 1,
            },
            Kind::CompareSwap => SendOp::CompareSwap {
                remote: counter,
                compare: u64::MAX,
                swap: 5,
            },
            Kind::Local => SendOp::Local,
        };
        // Reads bring the other side's bytes of the same place to where nothing else is.
        let address = match op.kind {
            Kind::Read | Kind::FetchAdd | Kind::CompareSwap => remote.address,
            _ => own,
        };
        let mut work = work(id, operation, address, op.length);
        work.flags = SendFlags {
            signaled: op.signaled,
            solicited: false,
            fence: op.fence,
        };
        world.post(node, qpn(node), work);
        if matches!(op.kind, Kind::Send | Kind::SendImm | Kind::WriteImm) {
            receives.push((1 - node, id, remote.address));
        }
    }
    let mut waiting = receives.iter();
    if !late {
        for (node, id, address) in waiting.by_ref() {
            world.receive(*node, Queue::Own(qpn(*node)), *id, *address, ROOM as u32);
        }
    }
    let expected = ops.iter().filter(|op| op.signaled).count() + receives.len();
    let ended = |world: &World| world.nodes.iter().map(|node| node.toy.completions.len()).sum::<usize>();
    for _ in 0..5000 {
        world.run_for(Duration::from_millis(50));
        for node in &mut world.nodes {
            serve_pages(node, true);
        }
        if let Some((node, id, address)) = waiting.next() {
            world.receive(*node, Queue::Own(qpn(*node)), *id, *address, ROOM as u32);
        } else if ended(&world) >= expected {
            break;
        }
    }
    // What is not signaled ends too.
    for _ in 0..20 {
        world.run_for(Duration::from_secs(5));
        for node in &mut world.nodes {
            serve_pages(node, true);
        }
    }
    for node in 0..2 {
        let mine = |op: &&(usize, &Op)| usize::from(op.1.backwards) == node;
        let all: Vec<(usize, &Op)> = ops.iter().enumerate().collect();
        let signaled = all
            .iter()
            .filter(mine)
            .filter(|(_, op)| op.signaled)
            .map(|(i, _)| *i as u64);
        let signaled = ok(signaled);
        assert_eq!(world.sends(node), signaled);
        let locals: Vec<(u32, u64)> = all
            .iter()
            .filter(mine)
            .filter(|(_, op)| matches!(op.kind, Kind::Local))
            .map(|(i, _)| (qpn(node), *i as u64))
            .collect();
        assert_eq!(world.nodes[node].toy.locals, locals);
        let expected: Vec<_> = all
            .iter()
            .filter(|op| !mine(op))
            .filter_map(|(i, op)| {
                let what = match op.kind {
                    Kind::Send => Received::Send,
                    Kind::SendImm => Received::SendImm(*i as u32),
                    Kind::WriteImm => Received::WriteImm(*i as u32),
                    _ => return None,
                };
                Some((Status::Success, op.length, what))
            })
            .collect();
        let received: Vec<_> = world
            .received(node)
            .into_iter()
            .map(|(_, status, length, what)| (status, length, what))
            .collect();
        assert_eq!(received, expected);
        let mut adds = 0_u64;
        for (i, op) in all.iter().filter(mine) {
            let (id, len) = (*i as u64 * ROOM, op.length as usize);
            let source = &before[node][(places.own + id) as usize..][..len];
            let there = (places.theirs + id) as usize;
            match op.kind {
                // Receives are used in order, so that a message may be in the place of another: checked below.
                Kind::Send | Kind::SendImm | Kind::Local => {}
                Kind::Write | Kind::WriteImm => assert_eq!(world.bytes(1 - node, there, len), source),
                Kind::Read => {
                    assert_eq!(world.bytes(node, there, len), &before[1 - node][id as usize..][..len]);
                }
                Kind::FetchAdd | Kind::CompareSwap => {
                    assert_eq!(world.bytes(node, there, 8), adds.to_le_bytes(), "operation {i}");
                    adds += u64::from(matches!(op.kind, Kind::FetchAdd));
                }
            }
        }
        assert_eq!(world.bytes(1 - node, places.counters as usize, 8), adds.to_le_bytes());
        // Messages lie where the receives that were used for them are.
        let used = world.received(1 - node);
        let messages = all
            .iter()
            .filter(mine)
            .filter(|(_, op)| matches!(op.kind, Kind::Send | Kind::SendImm | Kind::WriteImm));
        for ((i, op), (receive, ..)) in messages.zip(&used) {
            if !matches!(op.kind, Kind::WriteImm) {
                let source = &before[node][i * ROOM as usize..][..op.length as usize];
                let there = (places.theirs + receive * ROOM) as usize;
                assert_eq!(world.bytes(1 - node, there, source.len()), source);
            }
        }
    }
    assert!(
        !world.network.borrow().in_flight(world.lid(0), world.lid(1)),
        "no packet is in flight"
    );
}

fn extended() -> impl Strategy<Value = Extended> {
    let aeth = (any::<u8>(), any::<u32>()).prop_map(|(syndrome, msn)| Aeth { syndrome, msn });
    prop_oneof![
        Just(Extended::None),
        (any::<u64>(), prop_oneof![Just(ALL), any::<u32>()], any::<u32>()).prop_map(|(address, key, length)| {
            Extended::Reth(Reth {
                address: address >> 40,
                key,
                length,
            })
        }),
        (any::<u64>(), 0..100_000_u32).prop_map(|(address, length)| Extended::Reth(Reth {
            address: address >> 50,
            key: ALL,
            length
        })),
        (any::<u32>(), any::<u32>()).prop_map(|(qkey, source_qpn)| Extended::Deth(Deth { qkey, source_qpn })),
        any::<[u64; 3]>().prop_map(|[address, swap_add, compare]| {
            Extended::Atomic(AtomicEth {
                address: address >> 48,
                key: ALL,
                swap_add,
                compare,
            })
        }),
        aeth.clone().prop_map(Extended::Aeth),
        (aeth, any::<u64>()).prop_map(|(aeth, value)| Extended::AtomicAck(aeth, value)),
    ]
}

fn packet() -> impl Strategy<Value = Packet> {
    let opcode = prop_oneof![
        8 => (0..0x18_u8).boxed(),
        1 => any::<u8>().boxed(),
    ];
    let service = prop_oneof![Just(0), Just(0x20), Just(0x60), Just(0xa0)];
    let length = prop_oneof![Just(0_usize), Just(1024), 0..5000_usize];
    let psn = prop_oneof![8 => (0..12_u32).boxed(), 1 => any::<u32>().boxed()];
    let qpn = prop_oneof![8 => (2..6_u32).boxed(), 1 => any::<u32>().boxed(), 1 => Just(0xff_ffff).boxed()];
    (
        opcode,
        service,
        length,
        psn,
        qpn,
        extended(),
        any::<[u32; 3]>(),
        any::<bool>(),
    )
        .prop_map(
            |(opcode, service, length, psn, dest_qpn, extended, [srqn, imm, lids], ack_request)| Packet {
                dlid: 3,
                slid: lids as u16,
                sl: (lids >> 16) as u8,
                opcode: opcode | service,
                solicited: false,
                ack_request,
                pkey: 0xffff,
                dest_qpn,
                psn,
                grh: None,
                extended,
                srqn: srqn % 8,
                imm,
                payload: Slice::new(&Arc::new(vec![7; 5000]), 0, length),
            },
        )
}

proptest! {
    #[test]
    fn everything_ends_in_order_once_and_right(
        ops in vec(op(), 1..24),
        mtu in mtu(),
        link in faults(),
        seed in any::<u64>(),
        late in prop::bool::weighted(0.2),
        pages in prop::bool::weighted(0.3),
    ) {
        check(&ops, mtu, link, seed, late, pages);
    }

    #[test]
    fn packets_that_make_no_sense_do_no_harm(
        packets in vec((0..2_usize, packet()), 1..60),
        outstanding in vec(op(), 0..5),
    ) {
        let mut world = World::new(2, 1 << 20);
        world.nodes[0].engine.create_srq(5, crate::SrqConfig { pd: PD, xrc: Some((3, 1)), limit: 0 }).unwrap();
        for node in 0..2 {
            for (qpn, service) in [(2, Service::Rc), (3, Service::Uc), (4, Service::Ud), (5, Service::Xrc)] {
                world.qp(node, qpn, service, ReceiveFrom::Own);
                world.receive(node, Queue::Own(qpn), 1, 0, 3000);
                world.bring_up(node, qpn, 1 - node, qpn, Connection { psn: 0, ..Connection::default() });
            }
            world.nodes[node].engine.attach(4, crate::Gid::default()).unwrap();
        }
        for (i, op) in outstanding.iter().enumerate() {
            let remote = Remote { address: 0, key: ALL };
            let operation = match op.kind {
                Kind::Read => SendOp::Read { remote },
                Kind::FetchAdd => SendOp::FetchAdd { remote, add: 1 },
                _ => SendOp::Write { remote, imm: None },
            };
            world.post(0, 2, work(i as u64, operation, 0, op.length));
        }
        world.work(0);
        for (node, packet) in packets {
            let burst = Burst { packets: vec![packet.clone(), packet], flight: None };
            let node = &mut world.nodes[node];
            node.engine.packets(&mut node.toy, burst);
            node.next = node.engine.run(&mut node.toy);
        }
        world.run_for(Duration::from_secs(5));
        // Every request has completed, with success or an error.
        prop_assert_eq!(world.sends(0).len(), outstanding.len());
    }
}
