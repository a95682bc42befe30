// SPDX-License-Identifier: MIT OR Apache-2.0

//! The ping-pong with the CPU as the executor: p2pmem-async against the model of the adapter, without a kernel.

use std::time::Duration;

use p2pmem_async::bytecode::Peer;
use p2pmem_async::wqe::{Payload, SendOperation, SendRequest, Transport};
use p2pmem_async_suite::executor::{Cpu, Executor};
use p2pmem_async_suite::node::{Doorbells, Node};
use p2pmem_async_suite::pingpong::{Side, run};

/// Far beyond what a loaded machine needs.
const LIMIT: Duration = Duration::from_secs(120);

fn ping_pong(transport: Transport, bytes: u32, iterations: u32, batch: u32) {
    let (a, b) = Node::pair(transport, bytes, &Peer::cpu()).unwrap();
    let (mut for_a, mut for_b) = (Cpu::new(&a, LIMIT), Cpu::new(&b, LIMIT));
    let _doorbells = Doorbells::new([&a, &b]);
    let mut a = Side {
        node: &a,
        executor: &mut for_a,
    };
    let mut b = Side {
        node: &b,
        executor: &mut for_b,
    };
    let outcome = run(&mut a, &mut b, iterations, batch, LIMIT).unwrap();
    assert!(outcome.verified, "{outcome:?}");
}

#[test]
fn connections_in_batches_beyond_several_laps_of_all_queues() {
    ping_pong(Transport::Rc, 128, 300, 20);
}

#[test]
fn datagrams() {
    ping_pong(Transport::Ud, 128, 150, 7);
}

#[test]
fn large_messages() {
    ping_pong(Transport::Rc, 64 << 10, 20, 1);
}

#[test]
fn a_poll_without_a_message_ends_with_its_operation_and_nothing_after_it_is_executed() {
    let (a, b) = Node::pair(Transport::Rc, 128, &Peer::cpu()).unwrap();
    let _doorbells = Doorbells::new([&a, &b]);
    let mut executor = Cpu::new(&a, Duration::from_millis(20));
    let peek = a.qp.receive_cq().peek_cq(1).unwrap();
    executor.submit(&peek.program).unwrap();
    executor.add(&a.payload).unwrap();
    let request = SendRequest::new(1, SendOperation::Send, Payload::Memory(vec![a.source()]));
    a.qp.post_send(&request).unwrap();
    executor.submit(&a.qp.commit_qp().unwrap()).unwrap();
    let error = executor.finish(LIMIT).unwrap_err().to_string();
    assert!(error.starts_with("operation 0 (POLL_"), "{error}");
    assert_eq!(
        a.payload.load_dword(0),
        0,
        "the computation after the poll was executed"
    );
    let [record, doorbell] = a.qp.regions();
    assert_eq!(
        (record.load_dword(4), doorbell.load_dword(0x800)),
        (0, 0),
        "the commit after the poll was executed"
    );
    // The peek can be taken back, and everything can be released.
    assert!(a.qp.receive_cq().abort_peek_cq(peek.id));
}
