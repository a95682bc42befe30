// SPDX-License-Identifier: MIT OR Apache-2.0

//! Property tests: any work over any link completes in order, exactly once and with the right bytes, and invalid
//! packets do no harm.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::fabric::{Burst, Faults};
use crate::packet::{Aeth, AtomicEth, Deth, Extended, Reth, Slice};
use crate::work::Fence;

/// Memory of each operation on each node, in bytes.
const SLOT: u64 = 1 << 16;

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
    /// Posted by node 1.
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
    let length = prop_oneof![0..300_u32, 0..10_000_u32, 0..SLOT as u32];
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

/// Layout of a node's memory: data of its own operations, counters, and data of the other node's operations.
struct Layout {
    own: u64,
    counters: u64,
    remote: u64,
}

fn layout(ops: usize) -> Layout {
    let size = ops as u64 * SLOT;
    Layout {
        own: 0,
        counters: size,
        remote: size + SLOT,
    }
}

/// Posts `ops`, with receives posted late if `late_receives` and absent pages if `page_faults`, and checks all results.
fn check(ops: &[Op], mtu: Mtu, link: Faults, seed: u64, late_receives: bool, page_faults: bool) {
    let layout = layout(ops.len());
    let memory = (layout.remote + layout.counters) as usize;
    let mut sim = Simulation::with_seed(2, memory, seed);
    sim.pair(
        Service::Rc,
        Connection {
            mtu,
            rnr_retry: 7,
            psn: seed as u32 & 0xff_ffff,
            ..Connection::default()
        },
    );
    let lid = sim.lid(0);
    sim.network.borrow_mut().set_faults(lid, link);
    let qpn = |node: usize| 2 + node as u32;
    for node in 0..2 {
        sim.fill(node, 0, layout.counters as usize, node as u8 * 77 + 1);
        if page_faults {
            sim.nodes[node].host.absent = (0..memory as u64 / PAGE).step_by(7).collect();
        }
    }
    let before: Vec<Vec<u8>> = sim.nodes.iter().map(|node| node.host.memory.clone()).collect();
    let mut receives = Vec::new();
    for (i, op) in ops.iter().enumerate() {
        let (node, id) = (usize::from(op.backwards), i as u64);
        let own = layout.own + id * SLOT;
        let remote = Remote {
            address: layout.remote + id * SLOT,
            key: ALL_KEY,
        };
        let counter = Remote {
            address: layout.counters,
            key: ALL_KEY,
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
                remote: Remote {
                    address: own,
                    key: ALL_KEY,
                },
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
        // READs and atomic operations write to memory that no other operation of the node uses.
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
        sim.post(node, qpn(node), work);
        if matches!(op.kind, Kind::Send | Kind::SendImm | Kind::WriteImm) {
            receives.push((1 - node, id, remote.address));
        }
    }
    let mut waiting = receives.iter();
    if !late_receives {
        for (node, id, address) in waiting.by_ref() {
            sim.receive(*node, Queue::Own(qpn(*node)), *id, *address, SLOT as u32);
        }
    }
    let expected = ops.iter().filter(|op| op.signaled).count() + receives.len();
    let ended = |sim: &Simulation| sim.nodes.iter().map(|node| node.host.completions.len()).sum::<usize>();
    for _ in 0..5000 {
        sim.run_for(Duration::from_millis(50));
        for node in &mut sim.nodes {
            serve_pages(node, true);
        }
        if let Some((node, id, address)) = waiting.next() {
            sim.receive(*node, Queue::Own(qpn(*node)), *id, *address, SLOT as u32);
        } else if ended(&sim) >= expected {
            break;
        }
    }
    // Wait for unsignaled work too.
    for _ in 0..20 {
        sim.run_for(Duration::from_secs(5));
        for node in &mut sim.nodes {
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
        assert_eq!(sim.sends(node), signaled);
        let local_requests: Vec<(u32, u64)> = all
            .iter()
            .filter(mine)
            .filter(|(_, op)| matches!(op.kind, Kind::Local))
            .map(|(i, _)| (qpn(node), *i as u64))
            .collect();
        assert_eq!(sim.nodes[node].host.local_requests, local_requests);
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
        let received: Vec<_> = sim
            .received(node)
            .into_iter()
            .map(|(_, status, length, what)| (status, length, what))
            .collect();
        assert_eq!(received, expected);
        let mut adds = 0_u64;
        for (i, op) in all.iter().filter(mine) {
            let (id, len) = (*i as u64 * SLOT, op.length as usize);
            let source = &before[node][(layout.own + id) as usize..][..len];
            let there = (layout.remote + id) as usize;
            match op.kind {
                // Receives are consumed in order, so the receive of another operation may hold the message: checked
                // below.
                Kind::Send | Kind::SendImm | Kind::Local => {}
                Kind::Write | Kind::WriteImm => assert_eq!(sim.bytes(1 - node, there, len), source),
                Kind::Read => {
                    assert_eq!(sim.bytes(node, there, len), &before[1 - node][id as usize..][..len]);
                }
                Kind::FetchAdd | Kind::CompareSwap => {
                    assert_eq!(sim.bytes(node, there, 8), adds.to_le_bytes(), "operation {i}");
                    adds += u64::from(matches!(op.kind, Kind::FetchAdd));
                }
            }
        }
        assert_eq!(sim.bytes(1 - node, layout.counters as usize, 8), adds.to_le_bytes());
        // Each message is in the receive that it consumed.
        let used = sim.received(1 - node);
        let messages = all
            .iter()
            .filter(mine)
            .filter(|(_, op)| matches!(op.kind, Kind::Send | Kind::SendImm | Kind::WriteImm));
        for ((i, op), (receive, ..)) in messages.zip(&used) {
            if !matches!(op.kind, Kind::WriteImm) {
                let source = &before[node][i * SLOT as usize..][..op.length as usize];
                let there = (layout.remote + receive * SLOT) as usize;
                assert_eq!(sim.bytes(1 - node, there, source.len()), source);
            }
        }
    }
    assert!(
        !sim.network.borrow().in_flight(sim.lid(0), sim.lid(1)),
        "no packet may remain in flight"
    );
}

fn extended() -> impl Strategy<Value = Extended> {
    let aeth = (any::<u8>(), any::<u32>()).prop_map(|(syndrome, msn)| Aeth { syndrome, msn });
    prop_oneof![
        Just(Extended::None),
        (any::<u64>(), prop_oneof![Just(ALL_KEY), any::<u32>()], any::<u32>()).prop_map(|(address, key, length)| {
            Extended::Reth(Reth {
                address: address >> 40,
                key,
                length,
            })
        }),
        (any::<u64>(), 0..100_000_u32).prop_map(|(address, length)| Extended::Reth(Reth {
            address: address >> 50,
            key: ALL_KEY,
            length
        })),
        (any::<u32>(), any::<u32>()).prop_map(|(qkey, source_qpn)| Extended::Deth(Deth { qkey, source_qpn })),
        any::<[u64; 3]>().prop_map(|[address, swap_add, compare]| {
            Extended::Atomic(AtomicEth {
                address: address >> 48,
                key: ALL_KEY,
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
    fn work_completes_in_order_exactly_once(
        ops in vec(op(), 1..24),
        mtu in mtu(),
        link in faults(),
        seed in any::<u64>(),
        late_receives in prop::bool::weighted(0.2),
        page_faults in prop::bool::weighted(0.3),
    ) {
        check(&ops, mtu, link, seed, late_receives, page_faults);
    }

    #[test]
    fn work_completes_despite_arbitrary_packets(
        packets in vec((0..2_usize, packet()), 1..60),
        outstanding in vec(op(), 0..5),
    ) {
        let mut sim = Simulation::new(2, 1 << 20);
        sim.nodes[0].engine.create_srq(5, crate::SrqConfig { pd: PD, xrc: Some((3, 1)), limit: 0 }).unwrap();
        for node in 0..2 {
            for (qpn, service) in [(2, Service::Rc), (3, Service::Uc), (4, Service::Ud), (5, Service::Xrc)] {
                sim.qp(node, qpn, service, ReceiveFrom::Own);
                sim.receive(node, Queue::Own(qpn), 1, 0, 3000);
                sim.bring_up(node, qpn, 1 - node, qpn, Connection { psn: 0, ..Connection::default() });
            }
            sim.nodes[node].engine.attach(4, crate::Gid::default()).unwrap();
        }
        for (i, op) in outstanding.iter().enumerate() {
            let remote = Remote { address: 0, key: ALL_KEY };
            let operation = match op.kind {
                Kind::Read => SendOp::Read { remote },
                Kind::FetchAdd => SendOp::FetchAdd { remote, add: 1 },
                _ => SendOp::Write { remote, imm: None },
            };
            sim.post(0, 2, work(i as u64, operation, 0, op.length));
        }
        sim.work(0);
        for (node, packet) in packets {
            let burst = Burst { packets: vec![packet.clone(), packet], in_flight: None };
            let node = &mut sim.nodes[node];
            node.engine.packets(&mut node.host, burst);
            node.next = node.engine.run(&mut node.host);
        }
        sim.run_for(Duration::from_secs(5));
        // All work requests completed, with any status.
        prop_assert_eq!(sim.sends(0).len(), outstanding.len());
    }
}
