// SPDX-License-Identifier: MIT OR Apache-2.0

//! A ping-pong of two nodes whose executors drive the NICs: receive, compute, send.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use p2pmem_async::queue::{AsyncCq, Completion};
use p2pmem_async::wqe::{Payload, ReceiveRequest, SendOperation, SendRequest};
use serde::Serialize;

use crate::executor::Executor;
use crate::node::Node;

/// What a ping-pong measured.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Number of round trips.
    pub iterations: u32,
    /// Microseconds for each of the two messages of a round trip.
    pub us_per_message: f64,
    /// Whether the payload has the sum of all additions.
    pub verified: bool,
}

/// One side of the ping-pong.
pub struct Side<'a> {
    /// The node.
    pub node: &'a Node,
    /// What drives its NIC.
    pub executor: &'a mut dyn Executor,
}

impl Side<'_> {
    fn receives(&self, count: u32) -> Result<()> {
        for i in 0..count {
            let request = ReceiveRequest {
                id: u64::from(i),
                segments: vec![self.node.target()],
            };
            self.node.qp.post_recv(&request)?;
        }
        Ok(())
    }

    /// Submits the byte code that waits for a message, and the computation.
    fn receive(&mut self) -> Result<()> {
        let peek = self.node.qp.receive_cq().peek_cq(1)?;
        self.executor.submit(&peek.program)?;
        self.executor.add(&self.node.payload)
    }

    /// Posts a message, and submits the byte code that sends it. Only the last message of a batch is signaled.
    fn send(&mut self, to: &Node, last: bool) -> Result<()> {
        let payload = Payload::Memory(vec![self.node.source()]);
        let mut request = SendRequest::new(0, SendOperation::Send, payload).signaled(last);
        request.to = to.address();
        self.node.qp.post_send(&request)?;
        self.executor.submit(&self.node.qp.commit_qp()?)
    }

    /// Consumes the completions of a batch.
    fn consume(&self, count: u32, limit: Duration) -> Result<()> {
        consume(self.node.qp.receive_cq(), count, limit)?;
        consume(self.node.qp.send_cq(), 1, limit)
    }
}

fn consume(cq: &AsyncCq, count: u32, limit: Duration) -> Result<()> {
    let begin = Instant::now();
    let mut left = count as usize;
    while left > 0 {
        let completions: Vec<Completion> = cq.poll_cq(left)?;
        for completion in &completions {
            ensure!(completion.failure.is_none(), "a work request failed: {completion:?}");
        }
        left -= completions.len();
        ensure!(begin.elapsed() < limit, "{left} of {count} completions are missing");
        if completions.is_empty() {
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// Runs `iterations` round trips in batches.
///
/// # Errors
///
/// A work request, an executor, or the verification failed.
pub fn run(a: &mut Side<'_>, b: &mut Side<'_>, iterations: u32, batch: u32, limit: Duration) -> Result<Outcome> {
    let begin = Instant::now();
    let mut done = 0;
    while done < iterations {
        let count = batch.min(iterations - done);
        a.receives(count)?;
        b.receives(count)?;
        for i in 1..=count {
            a.send(b.node, i == count)?;
            b.receive()?;
            b.send(a.node, i == count)?;
            a.receive()?;
        }
        a.executor.finish(limit)?;
        b.executor.finish(limit)?;
        a.consume(count, limit)?;
        b.consume(count, limit)?;
        done += count;
    }
    let took = begin.elapsed();
    let words = |node: &Node| {
        let payload = &node.payload;
        (0..payload.len())
            .step_by(4)
            .map(|at| payload.load_dword(at))
            .collect::<Vec<_>>()
    };
    let wanted = |value: u32| move |word: &u32| *word == value;
    let verified =
        words(a.node).iter().all(wanted(2 * iterations)) && words(b.node).iter().all(wanted(2 * iterations - 1));
    Ok(Outcome {
        iterations,
        us_per_message: took.as_secs_f64() * 1e6 / f64::from(2 * iterations),
        verified,
    })
}
