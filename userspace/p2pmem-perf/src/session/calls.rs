// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two-sided calls: the client sends the payload, the server's processor copies it to the server's memory and replies.

use anyhow::{ensure, Context, Result};
use p2pmem_verbs::{Request, Work};

use super::{cpu_time, word, NicSession, Run, Served, PEER_WORD, WORD};
use crate::pattern::REVOKED;
use crate::stats::Times;
use crate::waiter::Waiter;

/// Bit of the ids of receives. The completions of sends and receives are in one queue.
pub(super) const RECEIVE: u64 = 1 << 63;

impl NicSession {
    /// Serves the calls of `size` bytes: copies each call's payload from host memory to its target slot, and replies with
    /// the number of calls that were handled.
    ///
    /// # Errors
    ///
    /// A call does not arrive within the limit, or is not the expected one.
    pub(super) fn serve_calls(&self, size: u64, waiter: &Waiter) -> Result<Served> {
        let before = cpu_time();
        let (slots, messages) = (self.test.slots(size), self.chunks(size));
        let received = self.bounce.as_ref().context("no memory for calls")?;
        let span = self.memory.span();
        let (mut came, mut replied) = (0, 0);
        let mut posted = messages.min(self.receives(size, &slots));
        let (mut completions, mut replies) = (Vec::new(), Vec::new());
        while replied < messages {
            waiter.next(&mut completions, &|| format!("call {came} of {messages}"))?;
            for done in &completions {
                if done.id & RECEIVE == 0 {
                    ensure!(
                        done.id == replied && replied < came,
                        "expected the completion of reply {replied}, received that of {}",
                        done.id
                    );
                    replied += 1;
                    continue;
                }
                ensure!(
                    u64::from(done.bytes) == size && done.id == RECEIVE | came,
                    "call {came} has {} bytes and consumed receive {}",
                    done.bytes,
                    done.id & !RECEIVE
                );
                let at = slots.target_at(came) as usize;
                received
                    .span()
                    .try_copy_to(at, span, at, size as usize)
                    .context(REVOKED)?;
                replies.push(Request {
                    id: came,
                    local: self.memory.segment(self.handled_at(), WORD),
                    work: Work::Send,
                    signaled: true,
                });
                came += 1;
                // The client may send the next call as soon as it has the reply, so the receive is posted before.
                if posted < messages {
                    self.post_receive(&slots, posted)?;
                    posted += 1;
                }
            }
            if !replies.is_empty() {
                // The payload is visible before the client knows.
                self.set_handled(came)?;
                self.queue.post(&replies).context("posting replies")?;
                replies.clear();
            }
        }
        Ok(Served {
            checked: None,
            copied: messages * size,
            cpu: Some(cpu_time() - before),
        })
    }

    /// Posts the receive of a reply, which is the server's count of calls.
    fn receive_reply(&self, call: u64) -> Result<()> {
        let into = self.memory.segment(self.handled_at() + PEER_WORD, WORD);
        self.queue
            .post_receive(RECEIVE | call, Some(into))
            .with_context(|| format!("posting the receive for reply {call}"))
    }
}

impl Run<'_> {
    /// Runs calls: each is done when its reply arrives.
    pub(super) fn with_replies(mut self) -> Result<(Times, u64)> {
        let session = self.session;
        let depth = u64::from(session.test.depth).min(self.slots.target);
        let first = depth.min(self.chunks);
        (0..first).try_for_each(|call| session.receive_reply(call))?;
        let (mut receives, mut posted, mut sent, mut done) = (first, 0, 0, 0);
        let mut completions = Vec::new();
        while done < self.chunks || sent < self.chunks {
            while posted < self.chunks && posted - done.min(sent) < depth {
                let request = self.chunk(posted)?;
                self.requests.push(request);
                self.clock.post();
                posted += 1;
            }
            self.post()?;
            self.waiter.next(&mut completions, &|| {
                format!("the reply to call {done} of {}", self.chunks)
            })?;
            for completion in &completions {
                if completion.id & RECEIVE == 0 {
                    ensure!(
                        completion.id == sent && sent < posted,
                        "expected the completion of call {sent}, received that of {}",
                        completion.id
                    );
                    sent += 1;
                    continue;
                }
                ensure!(
                    completion.id == RECEIVE | done && u64::from(completion.bytes) == WORD,
                    "expected reply {done}, received {} bytes as reply {}",
                    completion.bytes,
                    completion.id & !RECEIVE
                );
                let handled = word(session.memory.span(), session.handled_at() + PEER_WORD)?;
                ensure!(
                    (done + 1..=posted).contains(&handled),
                    "the server reports {handled} calls: at least {} and at most {posted} are possible",
                    done + 1
                );
                self.clock.finish(1);
                done += 1;
                if receives < self.chunks {
                    session.receive_reply(receives)?;
                    receives += 1;
                }
            }
        }
        Ok((self.clock.times(), 0))
    }
}
