// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the queues with a NIC in the test: it reads doorbells, doorbell records and queues as a NIC does, and writes
//! completions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::bytecode::{Capabilities, Operation, Peer, Program};
use crate::cqe::{Direction, Syndrome};
use crate::error::{Error, Result};
use crate::interpreter::Interpreter;
use crate::region::{Region, RegionKind};
use crate::sys::HostMemory;
use crate::wqe::{Payload, ReceiveRequest, Segment, SendOperation, SendRequest, Transport, BLOCK};

const QPN: u32 = 0x1234;
/// Peeks of a queue that have not ended.
const PEEKS: usize = 64;

fn region(kind: RegionKind, bytes: usize) -> Region {
    Region::part(kind, Arc::new(HostMemory::new(bytes).unwrap()), 0, bytes)
}

/// The NIC's side of a queue pair and its completion queue.
struct Nic {
    qp: Option<AsyncQp>,
    cq: AsyncCq,
    layout: QpLayout,
    queue: Region,
    record: Region,
    doorbell: Region,
    /// Blocks of the send queue that the NIC has executed, and completions that it has written.
    sends: u16,
    receives: u16,
    produced: u32,
    interpreter: Interpreter,
}

impl Nic {
    fn new(send_blocks: u32, receive_entries: u32, completions: u32, peer: Peer) -> Self {
        let layout = QpLayout {
            send_blocks,
            receive_entries,
        };
        let cq = AsyncCq::new(
            7,
            region(RegionKind::Completions, completions as usize * 64),
            region(RegionKind::CqRecord, cq_record_bytes(PEEKS)),
            peer.clone(),
        )
        .unwrap();
        let mut nic = Self {
            qp: None,
            layout,
            queue: region(RegionKind::WorkQueue, layout.bytes()),
            record: region(RegionKind::QpRecord, 8),
            doorbell: region(RegionKind::Doorbell, 4096),
            sends: 0,
            receives: 0,
            produced: 0,
            interpreter: Interpreter::new(Duration::ZERO).map_all(cq.regions()),
            cq,
        };
        nic.create(QPN, peer);
        nic
    }

    /// Creates the queue pair, again after it was dropped.
    fn create(&mut self, qpn: u32, peer: Peer) {
        self.record.store_qword(0, 0);
        (self.sends, self.receives) = (0, 0);
        let parts = QpParts {
            qpn,
            transport: Transport::Rc,
            layout: self.layout,
            queue: self.queue.clone(),
            record: self.record.clone(),
            doorbell: self.doorbell.clone(),
        };
        let qp = AsyncQp::new(parts, peer, self.cq.clone(), self.cq.clone()).unwrap();
        self.interpreter = self.interpreter.clone().map_all(qp.regions());
        self.qp = Some(qp);
    }

    fn qp(&self) -> &AsyncQp {
        self.qp.as_ref().unwrap()
    }

    fn run(&self, program: &Program) -> Result<()> {
        self.interpreter.run(program)
    }

    /// Commits, and executes the byte code at once.
    fn submit(&self) {
        self.run(&self.qp().commit_qp().unwrap()).unwrap();
    }

    fn record(&self, word: usize) -> u16 {
        self.record.load_dword(4 * word).swap_bytes() as u16
    }

    /// Writes a completion. Fails if the queue overruns.
    fn complete(&mut self, opcode: u8, counter: u16, syndrome: u8, qpn: u32) {
        let [entries, record] = self.cq.regions();
        let consumer = record.load_dword(0).swap_bytes();
        assert!(
            self.produced.wrapping_sub(consumer) & 0xff_ffff < self.cq.size(),
            "the completion queue overran"
        );
        let mut entry = [0; 64];
        entry[55] = syndrome;
        entry[56..60].copy_from_slice(&qpn.to_be_bytes());
        entry[60..62].copy_from_slice(&counter.to_be_bytes());
        entry[63] = (opcode << 4) | u8::from(self.produced & self.cq.size() != 0);
        entries.write((self.produced & (self.cq.size() - 1)) as usize * 64, &entry);
        self.produced = self.produced.wrapping_add(1);
    }

    /// Executes the next send of the doorbell record. Returns false if there is none.
    fn send(&mut self, syndrome: u8) -> bool {
        if self.record(1) == self.sends {
            return false;
        }
        let mask = self.layout.send_blocks - 1;
        let mut head = [0; 16];
        let at = self.layout.send_offset() + (u32::from(self.sends) & mask) as usize * BLOCK;
        self.queue.read(at, &mut head);
        let index = u16::from_be_bytes([head[1], head[2]]);
        assert_eq!(index, self.sends, "the work request has the index of its place");
        if head[11] & 8 != 0 || syndrome != 0 {
            self.complete(if syndrome == 0 { 0 } else { 13 }, index, syndrome, QPN);
        }
        self.sends = self.sends.wrapping_add(u16::from(head[7]).div_ceil(4));
        true
    }

    /// Receives a message. Returns false if no receive is posted.
    fn receive(&mut self) -> bool {
        if self.record(0) == self.receives {
            return false;
        }
        self.complete(2, self.receives, 0, QPN);
        self.receives = self.receives.wrapping_add(1);
        true
    }
}

fn send(id: u64, inline: usize) -> SendRequest {
    SendRequest::new(id, SendOperation::Send, Payload::Inline(vec![0x5a; inline]))
}

fn receive(id: u64) -> ReceiveRequest {
    let segment = Segment {
        address: 0,
        bytes: 64,
        lkey: 1,
    };
    ReceiveRequest {
        id,
        segments: vec![segment],
    }
}

fn ids(completions: &[Completion]) -> Vec<u64> {
    completions.iter().map(|completion| completion.id).collect()
}

#[test]
fn a_posted_send_is_submitted_by_the_committed_byte_code_alone() {
    let mut nic = Nic::new(8, 4, 16, Peer::cpu());
    nic.qp().post_send(&send(1, 4)).unwrap();
    nic.qp().post_send(&send(2, 100)).unwrap();
    assert!(!nic.send(0), "posting does not submit");
    let program = nic.qp().commit_qp().unwrap();
    assert!(
        !nic.send(0),
        "a commit does not submit before its byte code is executed"
    );
    let [first, store, fence, ring] = program.operations() else {
        panic!("{}", program.explain())
    };
    assert!(matches!(store, Operation::StoreDword { .. }));
    assert_eq!([first, fence], [&Operation::Fence; 2]);
    let Operation::StoreQword { target, value } = ring else {
        panic!("{ring}")
    };
    assert_eq!((target.kind, target.offset), (RegionKind::Doorbell, 0x800));
    nic.run(&program).unwrap();
    assert_eq!(nic.record(1), 3, "a block, and two blocks");
    let mut head = [0; 8];
    nic.queue.read(nic.layout.send_offset() + BLOCK, &mut head);
    assert_eq!(
        value.to_le_bytes(),
        head,
        "the doorbell has the last work request's first bytes"
    );
    let mut rung = [0; 8];
    nic.doorbell.read(0x800, &mut rung);
    assert_eq!(rung, head);
    assert!(nic.send(0) && nic.send(0) && !nic.send(0));
    assert_eq!(ids(&nic.cq.poll_cq(9).unwrap()), [1, 2]);
    assert!(nic.qp().commit_qp().unwrap().is_empty(), "nothing to commit");
    assert_eq!(nic.cq.reserved(), 0);
}

#[test]
fn a_rollback_takes_back_what_was_not_committed() {
    let mut nic = Nic::new(4, 1, 4, Peer::cpu());
    nic.qp().post_send(&send(1, 4)).unwrap();
    let first = nic.qp().commit_qp().unwrap();
    for id in [2, 3] {
        nic.qp().post_send(&send(id, 4)).unwrap();
    }
    assert_eq!(nic.qp().rollback_qp(), [2, 3]);
    assert_eq!(nic.qp().rollback_qp(), [0; 0]);
    assert_eq!(nic.cq.reserved(), 1);
    for id in [4, 5, 6] {
        nic.qp().post_send(&send(id, 4)).unwrap();
    }
    let second = nic.qp().commit_qp().unwrap();
    nic.run(&first).unwrap();
    nic.run(&second).unwrap();
    while nic.send(0) {}
    assert_eq!(ids(&nic.cq.poll_cq(9).unwrap()), [1, 4, 5, 6]);
}

#[test]
fn a_receive_is_valid_at_once() {
    let mut nic = Nic::new(1, 2, 4, Peer::cpu());
    nic.qp().post_recv(&receive(9)).unwrap();
    assert!(nic.receive() && !nic.receive());
    let done = nic.cq.poll_cq(9).unwrap();
    assert_eq!((done[0].id, done[0].direction), (9, Direction::Receive));
}

#[test]
fn full_queues_are_refused_with_the_reason() {
    let nic = Nic::new(4, 1, 16, Peer::cpu());
    for id in 0..2 {
        nic.qp().post_send(&send(id, 100)).unwrap();
    }
    let error = nic.qp().post_send(&send(9, 1)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("send queue of queue pair 0x1234 is full: 4 of 4"),
        "{error}"
    );
    nic.qp().post_recv(&receive(1)).unwrap();
    let error = nic.qp().post_recv(&receive(2)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("receive queue of queue pair 0x1234 is full: 1 of 1"),
        "{error}"
    );
    assert_eq!(nic.cq.reserved(), 3, "refused work requests reserve nothing");
}

#[test]
fn an_overrun_of_the_completion_queue_is_refused() {
    let mut nic = Nic::new(8, 8, 4, Peer::cpu());
    nic.qp().post_recv(&receive(1)).unwrap();
    // Unsignaled requests count: a failure would complete them.
    for id in 2..=4 {
        nic.qp().post_send(&send(id, 1).signaled(id == 4)).unwrap();
    }
    for refused in [nic.qp().post_send(&send(5, 1)), nic.qp().post_recv(&receive(5))] {
        let error = refused.unwrap_err();
        assert!(
            matches!(
                error,
                Error::CompletionQueueFull {
                    outstanding: 4,
                    size: 4,
                    ..
                }
            ),
            "{error}"
        );
    }
    nic.submit();
    while nic.send(0) {}
    assert_eq!(ids(&nic.cq.poll_cq(9).unwrap()), [4]);
    assert_eq!(
        nic.cq.reserved(),
        1,
        "the completion ends the unsignaled requests before it"
    );
    nic.qp().post_send(&send(6, 1)).unwrap();
}

#[test]
fn a_peek_holds_its_entry_until_the_peer_has_seen_it() {
    let mut nic = Nic::new(8, 1, 2, Peer::cpu());
    for id in 0..2 {
        nic.qp().post_send(&send(id, 1)).unwrap();
    }
    nic.submit();
    let peek = nic.cq.peek_cq(1).unwrap();
    let error = nic.run(&peek.program).unwrap_err();
    assert!(
        matches!(error, Error::Execution { index: 0, .. }),
        "nothing has completed: {error}"
    );
    assert!(nic.send(0) && nic.send(0));
    // The CPU consumes first. The entry of the peek must stay.
    assert_eq!(ids(&nic.cq.poll_cq(9).unwrap()), [0, 1]);
    let error = nic.qp().post_send(&send(2, 1)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("2 of them by peeks that the peer has not executed"),
        "{error}"
    );
    nic.run(&peek.program).unwrap();
    for id in 2..4 {
        nic.qp().post_send(&send(id, 1)).unwrap();
    }
    nic.submit();
    assert!(nic.send(0) && nic.send(0));
    // The second lap has the other owner bit.
    let peek = nic.cq.peek_cq(2).unwrap();
    assert!(matches!(peek.program.operations()[0], Operation::PollAnd { .. }));
    nic.run(&peek.program).unwrap();
    assert_eq!(ids(&nic.cq.poll_cq(9).unwrap()), [2, 3]);
}

#[test]
fn peeks_follow_one_another_and_can_be_aborted() {
    let mut nic = Nic::new(8, 1, 8, Peer::cpu());
    let first = nic.cq.peek_cq(2).unwrap();
    let second = nic.cq.peek_cq(1).unwrap();
    for id in 0..2 {
        nic.qp().post_send(&send(id, 1)).unwrap();
    }
    nic.submit();
    assert!(nic.send(0) && nic.send(0));
    nic.run(&first.program).unwrap();
    assert!(nic.run(&second.program).is_err(), "the third completion is missing");
    assert!(!nic.cq.abort_peek_cq(first.id), "it has ended");
    assert!(nic.cq.abort_peek_cq(second.id));
    assert!(!nic.cq.abort_peek_cq(second.id), "it was aborted");
    let third = nic.cq.peek_cq(1).unwrap();
    assert_eq!(
        third.program.operations()[0],
        second.program.operations()[0],
        "an abort of the last peek gives its completions back"
    );
    // Without a peek that waits, the next one starts after what was consumed.
    assert!(nic.cq.abort_peek_cq(third.id));
    assert_eq!(nic.cq.poll_cq(9).unwrap().len(), 2);
}

#[test]
fn impossible_peeks_are_refused() {
    let nic = Nic::new(8, 1, 64, Peer::cpu());
    for (count, words) in [
        (0, "at least one"),
        (65, "exceed its 64 entries"),
        (u32::MAX, "exceed its 64"),
    ] {
        let error = nic.cq.peek_cq(count).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    for _ in 0..PEEKS {
        nic.cq.peek_cq(1).unwrap();
    }
    assert!(nic
        .cq
        .peek_cq(1)
        .unwrap_err()
        .to_string()
        .contains("exceed its 64 entries"));
    let nic = Nic::new(8, 1, 128, Peer::cpu());
    let peeks: Vec<_> = (0..PEEKS).map(|_| nic.cq.peek_cq(1).unwrap()).collect();
    assert!(nic
        .cq
        .peek_cq(1)
        .unwrap_err()
        .to_string()
        .contains("64 peeks have not ended"));
    assert!(nic.cq.abort_peek_cq(peeks[3].id));
    let last = nic.cq.peek_cq(1).unwrap();
    assert!(!nic.cq.abort_peek_cq(peeks[3].id));
    assert!(nic.cq.abort_peek_cq(last.id));
    nic.cq.peek_cq(1).unwrap();
}

#[test]
fn words_of_peeks_that_ended_out_of_order_are_reused() {
    let mut nic = Nic::new(64, 64, 128, Peer::cpu());
    let peeks: Vec<_> = (0..PEEKS).map(|_| nic.cq.peek_cq(1).unwrap()).collect();
    for id in 0..2 {
        nic.qp().post_recv(&receive(id)).unwrap();
        assert!(nic.receive());
    }
    let consumer = nic.cq.regions()[1].clone();
    let consumer_index = || consumer.load_dword(0).swap_bytes();
    nic.run(&peeks[1].program).unwrap();
    assert!(!nic.cq.abort_peek_cq(peeks[1].id));
    // The first peek has not ended, so its completion is kept.
    assert_eq!(nic.cq.poll_cq(2).unwrap().len(), 2);
    assert_eq!(consumer_index(), 0);
    nic.cq.peek_cq(1).unwrap();
    let error = nic.cq.peek_cq(1).unwrap_err();
    assert!(error.to_string().contains("64 peeks have not ended"), "{error}");
    nic.run(&peeks[0].program).unwrap();
    nic.cq.peek_cq(1).unwrap();
    assert_eq!(consumer_index(), 2);
}

#[test]
fn a_peer_that_cannot_execute_the_byte_code_is_refused_without_a_change() {
    let weak = |without: Capabilities, limit| Peer::new("gpu", Capabilities::all() - without, limit);
    for (peer, words) in [
        (weak(Capabilities::STORE_QWORD, 99), "STORE_QWORD"),
        (weak(Capabilities::FENCE, 99), "FENCE"),
        (weak(Capabilities::empty(), 3), "a program of 4 operations"),
    ] {
        let nic = Nic::new(8, 1, 8, peer);
        nic.qp().post_send(&send(1, 1)).unwrap();
        let error = nic.qp().commit_qp().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(nic.qp().rollback_qp(), [1]);
    }
    let nic = Nic::new(8, 1, 8, weak(Capabilities::POLL_NOR, 99));
    let error = nic.cq.peek_cq(1).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("cannot execute POLL_NOR: a peek polls the owner bit"),
        "{error}"
    );
}

#[test]
fn a_failure_names_its_request_and_ends_posts_and_commits() {
    let mut nic = Nic::new(8, 1, 8, Peer::cpu());
    for id in 0x10..0x13 {
        nic.qp().post_send(&send(id, 1).signaled(false)).unwrap();
    }
    nic.submit();
    nic.qp().post_send(&send(0x20, 1)).unwrap();
    assert!(nic.send(0) && nic.send(0x13));
    let done = nic.cq.poll_cq(9).unwrap();
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].id, 0x11);
    assert_eq!(done[0].failure.unwrap().syndrome, Syndrome::RemoteAccess);
    let error = nic.qp().commit_qp().unwrap_err().to_string();
    assert!(
        error.contains("queue pair 0x1234 is in the error state: send 0x11 failed: remote access error"),
        "{error}"
    );
    assert!(matches!(
        nic.qp().post_send(&send(1, 1)),
        Err(Error::QueuePairError { .. })
    ));
    assert!(matches!(
        nic.qp().post_recv(&receive(1)),
        Err(Error::QueuePairError { .. })
    ));
    assert_eq!(nic.qp().rollback_qp(), [0x20], "rollback works in the error state");
    assert!(nic.send(5));
    assert_eq!(
        nic.cq.poll_cq(9).unwrap()[0].failure.unwrap().syndrome,
        Syndrome::Flushed
    );
    assert_eq!(nic.cq.reserved(), 0);
}

#[test]
fn completions_of_a_dropped_queue_pair_are_skipped() {
    let mut nic = Nic::new(8, 2, 4, Peer::cpu());
    for id in 0..3 {
        nic.qp().post_send(&send(id, 1)).unwrap();
    }
    nic.qp().post_recv(&receive(3)).unwrap();
    nic.submit();
    assert!(nic.send(0) && nic.send(0));
    nic.qp = None;
    assert_eq!(nic.cq.reserved(), 2, "two completions are in the queue");
    // The NIC gives a new queue pair the same number.
    nic.create(QPN, Peer::cpu());
    for id in 10..12 {
        nic.qp().post_send(&send(id, 1)).unwrap();
    }
    assert!(matches!(
        nic.qp().post_send(&send(12, 1)),
        Err(Error::CompletionQueueFull { .. })
    ));
    nic.submit();
    assert!(nic.send(0) && nic.send(0));
    assert_eq!(ids(&nic.cq.poll_cq(9).unwrap()), [10, 11]);
    assert_eq!(nic.cq.reserved(), 0);
    nic.qp().post_send(&send(12, 1)).unwrap();
}

#[test]
fn a_completion_without_a_request_is_an_error_after_the_others() {
    let mut nic = Nic::new(8, 1, 8, Peer::cpu());
    nic.qp().post_send(&send(1, 1)).unwrap();
    nic.submit();
    assert!(nic.send(0));
    nic.complete(0, 5, 0, QPN);
    nic.complete(0, 0, 0, 0x999);
    nic.complete(12, 0, 0, QPN);
    assert_eq!(ids(&nic.cq.poll_cq(9).unwrap()), [1]);
    for words in [
        "queue pair 0x1234, Send queue, index 5",
        "queue pair 0x999",
        "opcode 0xc",
    ] {
        let error = nic.cq.poll_cq(9).unwrap_err().to_string();
        assert!(
            error.contains("no posted work request") && error.contains(words),
            "{error}"
        );
    }
    assert!(nic.cq.poll_cq(9).unwrap().is_empty());
}

#[test]
fn wrong_sizes_are_refused() {
    let record = || region(RegionKind::CqRecord, cq_record_bytes(PEEKS));
    for bytes in [64 * 3, 64 * 4 + 8] {
        let entries = region(RegionKind::Completions, bytes);
        assert!(matches!(
            AsyncCq::new(1, entries, record(), Peer::cpu()),
            Err(Error::Argument(_))
        ));
    }
    let entries = region(RegionKind::Completions, 64);
    let short = region(RegionKind::CqRecord, 64);
    assert!(AsyncCq::new(1, entries, short, Peer::cpu()).is_err());
    for (send_blocks, receive_entries) in [(0, 1), (3, 1), (1, 0), (1 << 16, 1)] {
        assert!(QpLayout {
            send_blocks,
            receive_entries
        }
        .check()
        .is_err());
    }
}

/// A step of the property test.
#[derive(Debug, Clone)]
enum Step {
    PostSend {
        inline: usize,
        signaled: bool,
    },
    PostReceive,
    Commit,
    Rollback,
    Peek(u32),
    Abort(usize),
    /// The peer executes the next program, if the program's polls are true.
    Execute,
    NicSend,
    NicReceive,
    Poll(usize),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..300usize, any::<bool>()).prop_map(|(inline, signaled)| Step::PostSend { inline, signaled }),
        3 => Just(Step::PostReceive),
        3 => Just(Step::Commit),
        1 => Just(Step::Rollback),
        2 => (1..4u32).prop_map(Step::Peek),
        1 => (0..4usize).prop_map(Step::Abort),
        5 => Just(Step::Execute),
        5 => Just(Step::NicSend),
        4 => Just(Step::NicReceive),
        4 => (1..5usize).prop_map(Step::Poll),
    ]
}

/// What the peer has to execute: the byte code, and the peek that it belongs to.
struct Queued {
    program: Program,
    peek: Option<PeekId>,
}

proptest! {
    /// The NIC of the test fails on an overrun, on a work request out of place, and on a wrong index.
    #[test]
    fn every_interleaving_completes_what_was_submitted_in_order(list in prop::collection::vec(steps(), 1..200)) {
        let mut nic = Nic::new(16, 4, 8, Peer::cpu());
        let mut queued: VecDeque<Queued> = VecDeque::new();
        // IDs with whether the request is signaled: posted, committed, executed by the NIC and expected from poll_cq().
        let (mut posted, mut committed, mut received) = (Vec::new(), VecDeque::new(), VecDeque::new());
        let mut expected: VecDeque<u64> = VecDeque::new();
        let mut next = 0;
        for step in list {
            next += 1;
            match step {
                Step::PostSend { inline, signaled } => {
                    if nic.qp().post_send(&send(next, inline).signaled(signaled)).is_ok() {
                        posted.push((next, signaled));
                    }
                }
                Step::PostReceive => {
                    if nic.qp().post_recv(&receive(next)).is_ok() {
                        received.push_back(next);
                    }
                }
                Step::Commit => {
                    let program = nic.qp().commit_qp().unwrap();
                    prop_assert_eq!(program.is_empty(), posted.is_empty());
                    committed.extend(posted.drain(..));
                    queued.push_back(Queued { program, peek: None });
                }
                Step::Rollback => {
                    let back: Vec<u64> = posted.drain(..).map(|(id, _)| id).collect();
                    prop_assert_eq!(nic.qp().rollback_qp(), back);
                }
                Step::Peek(count) => {
                    if let Ok(Peek { id, program }) = nic.cq.peek_cq(count) {
                        queued.push_back(Queued { program, peek: Some(id) });
                    }
                }
                Step::Abort(at) => {
                    // Only a program that the peer has not started may be aborted.
                    if let Some(id) = queued.get(at).and_then(|queued| queued.peek) {
                        prop_assert!(nic.cq.abort_peek_cq(id));
                        queued.remove(at);
                    }
                }
                Step::Execute => {
                    if let Some(first) = queued.front() {
                        if nic.run(&first.program).is_ok() {
                            queued.pop_front();
                        }
                    }
                }
                Step::NicSend => {
                    if nic.send(0) {
                        let (id, signaled) = committed.pop_front().unwrap();
                        expected.extend(signaled.then_some(id));
                    }
                }
                Step::NicReceive => {
                    if nic.receive() {
                        expected.push_back(received.pop_front().unwrap());
                    }
                }
                Step::Poll(most) => {
                    for completion in nic.cq.poll_cq(most).unwrap() {
                        prop_assert_eq!(Some(completion.id), expected.pop_front());
                    }
                }
            }
        }
        // The peer executes the rest. Peeks of completions that do not come are aborted.
        while let Some(first) = queued.pop_front() {
            while nic.send(0) {
                let (id, signaled) = committed.pop_front().unwrap();
                expected.extend(signaled.then_some(id));
            }
            if nic.run(&first.program).is_err() {
                prop_assert!(nic.cq.abort_peek_cq(first.peek.unwrap()));
            }
        }
        while nic.send(0) {
            let (id, signaled) = committed.pop_front().unwrap();
            expected.extend(signaled.then_some(id));
        }
        loop {
            let completions = nic.cq.poll_cq(3).unwrap();
            if completions.is_empty() {
                break;
            }
            for completion in completions {
                prop_assert_eq!(Some(completion.id), expected.pop_front());
            }
        }
        prop_assert!(expected.is_empty() && committed.is_empty());
        nic.qp = None;
        prop_assert_eq!(nic.cq.reserved(), 0);
    }
}
