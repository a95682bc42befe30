// SPDX-License-Identifier: MIT OR Apache-2.0

//! Both roles of the other end of `ib_send_bw`, against each other: two models of the adapter, and a TCP connection. The table
//! `async-perftest` runs each role against perftest.

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Result;
use p2pmem_async::bytecode::{Peer, Program};
use p2pmem_async::endpoint::Address;
use p2pmem_async::interpreter::Interpreter;
use p2pmem_async::wqe::Transport;
use p2pmem_async_suite::node::{Doorbells, Node};
use p2pmem_async_suite::perftest::handshake::accept;
use p2pmem_async_suite::perftest::{Local, Outcome, Test, receive, send};
use p2pmem_ib::{Fabric, Topology};

/// Far beyond what a loaded machine needs.
const LONG: Duration = Duration::from_secs(120);

/// One side of a run.
#[derive(Clone, Copy)]
struct Plan {
    size: u32,
    iterations: u32,
    batch: u32,
    /// Limit of each program.
    limit: Duration,
    /// How many programs are executed; the next one fails.
    programs: u32,
}

const PLAN: Plan = Plan {
    size: 128,
    iterations: 60,
    batch: 7,
    limit: LONG,
    programs: u32::MAX,
};

type Role = fn(&mut Local<'_>, &Test, TcpStream, Instant, &mut dyn FnMut(&Program) -> Result<()>) -> Result<Outcome>;

fn side(node: &Node, plan: Plan, stream: TcpStream, role: Role) -> Result<Outcome> {
    let interpreter = Interpreter::new(plan.limit).map_all(node.regions());
    let mut left = plan.programs;
    let mut execute = |program: &Program| {
        anyhow::ensure!(left > 0, "the executor has ended");
        left -= 1;
        Ok(interpreter.run(program)?)
    };
    let mut connect = |far: &Address| {
        node.connect_to(far.lid, far.qpn);
        Ok(())
    };
    let mut local = Local {
        qp: &node.qp,
        address: Address {
            qpn: node.qp.qpn(),
            lid: node.lid(),
            gid: [0; 16],
            qkey: 0,
            mtu: 3,
            psn: 7,
        },
        payload: node.source(),
        connect: &mut connect,
    };
    let test = Test {
        transport: Transport::Rc,
        size: plan.size,
        iterations: plan.iterations,
        batch: plan.batch,
    };
    role(&mut local, &test, stream, Instant::now() + LONG, &mut execute)
}

/// Runs a sender and a receiver. Returns their results, and the last message that the receiver's memory has.
fn run(sender: Plan, receiver: Plan) -> (Result<Outcome>, Result<Outcome>, Vec<u8>) {
    let topology = Topology {
        switches: vec!["sw".to_owned()],
        links: Vec::new(),
    };
    let subnet = Fabric::new(&topology, 1).unwrap();
    let node = |name, guid, plan: Plan| Node::new(name, guid, &subnet, Transport::Rc, plan.size, &Peer::cpu()).unwrap();
    let (a, b) = (
        node("a", 0x0002_c903_0000_1000, sender),
        node("b", 0x0002_c903_0000_2000, receiver),
    );
    a.payload.write(0, &pattern(sender.size));
    let _doorbells = Doorbells::new([&a, &b]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = accept(&listener, Instant::now() + LONG).unwrap();
    let (sent, received) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| side(&b, receiver, far, receive));
        (side(&a, sender, near, send), receiver.join().unwrap())
    });
    let mut bytes = vec![0; receiver.size as usize];
    b.payload.read(0, &mut bytes);
    (sent, received, bytes)
}

fn pattern(size: u32) -> Vec<u8> {
    (0..size).map(|at| (at % 251) as u8).collect()
}

fn text<T>(result: Result<T>) -> String {
    format!("{:#}", result.err().expect("this side fails"))
}

#[test]
fn all_messages_and_bytes_arrive() {
    for (size, iterations, batch) in [(128, 60, 7), (1, 1, 1), (64 << 10, 10, 64), (4, 64, 64)] {
        let plan = Plan {
            size,
            iterations,
            batch,
            ..PLAN
        };
        let (sent, received, bytes) = run(plan, plan);
        let programs = iterations.div_ceil(batch);
        let outcome = |operations| Outcome {
            messages: iterations,
            bytes: u64::from(size) * u64::from(iterations),
            programs,
            operations: programs as usize * operations,
        };
        assert_eq!(sent.unwrap(), outcome(6));
        assert_eq!(received.unwrap(), outcome(2));
        assert_eq!(bytes, pattern(size));
    }
}

#[test]
fn messages_that_are_too_long_are_an_error_on_both_sides() {
    let long = Plan { size: 256, ..PLAN };
    let (sent, received, bytes) = run(long, PLAN);
    let (sent, received) = (text(sent), text(received));
    assert!(sent.contains("failed: remote invalid request"), "{sent}");
    assert!(received.contains("Receive 0 failed: local length error"), "{received}");
    assert_eq!(bytes, [0; 128], "a part of the message was written");
}

#[test]
fn messages_that_are_too_short_are_an_error_of_the_receiver() {
    let short = Plan { size: 64, ..PLAN };
    let (sent, received, _) = run(short, PLAN);
    let received = text(received);
    assert!(received.contains("message 0 is not one of 128 bytes"), "{received}");
    let sent = text(sent);
    assert!(sent.contains("at this point: all messages are sent"), "{sent}");
}

#[test]
fn messages_that_are_missing_end_with_the_operation_and_the_time_limit() {
    let few = Plan { iterations: 30, ..PLAN };
    let impatient = Plan {
        limit: Duration::from_millis(500),
        ..PLAN
    };
    let (sent, received, _) = run(few, impatient);
    let received = text(received);
    assert!(
        received.contains("do both sides have the same number") && received.contains("operation 0 (POLL_"),
        "{received}"
    );
    text(sent);
}

#[test]
fn an_executor_that_fails_ends_both_sides() {
    let broken = Plan { programs: 3, ..PLAN };
    let (sent, received, _) = run(PLAN, broken);
    let received = text(received);
    assert!(
        received.contains("message 21 did not complete") && received.contains("the executor has ended"),
        "{received}"
    );
    let sent = text(sent);
    assert!(sent.contains("all messages are sent"), "{sent}");
    let impatient = Plan {
        limit: Duration::from_millis(500),
        ..PLAN
    };
    let (sent, received, _) = run(broken, impatient);
    let sent = text(sent);
    assert!(sent.contains("message 21 did not complete"), "{sent}");
    text(received);
}
