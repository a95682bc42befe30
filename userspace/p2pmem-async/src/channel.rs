// SPDX-License-Identifier: MIT OR Apache-2.0

//! What libraries on devices agree on: put, put with a signal, get, counters, wait, flush.
//!
//! A [`Channel`] is one end of a reliable connection. Puts and gets are posted, and [`Channel::submit`] returns the byte code that
//! starts all of them. The other side waits for a signal: 8 bytes of its memory that [`Channel::put_with_signal`] changes
//! after the data has arrived. This side counts the puts that have completed.

use crate::bytecode::{wait_for, Program};
use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use crate::queue::{Completion, Peek};
use crate::region::Region;
use crate::wqe::{Payload, Remote, Segment, SendOperation, SendRequest};

/// How a signal changes the 8 bytes at the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Writes a value. One side writes a signal.
    Set(u64),
    /// Adds a number. Several sides may add to a signal. The old value returns to 8 bytes of this side's memory.
    Add(u64, Segment),
}

/// One end of a connection.
#[derive(Debug)]
pub struct Channel {
    endpoint: Endpoint,
    next: u64,
    /// Signaled work requests that were submitted, and those that a wait was created for or that poll() has returned.
    submitted: u64,
    posted: u64,
    waited: u64,
    completed: u64,
}

impl Channel {
    /// Uses a connected endpoint.
    pub fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            next: 0,
            submitted: 0,
            posted: 0,
            waited: 0,
            completed: 0,
        }
    }

    /// Returns the endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn post(&mut self, operation: SendOperation, payload: Payload, signaled: bool) -> Result<u64> {
        let id = self.next;
        let request = SendRequest::new(id, operation, payload).signaled(signaled);
        self.endpoint.qp().post_send(&request)?;
        self.next += 1;
        self.posted += u64::from(signaled);
        Ok(id)
    }

    /// Posts a WRITE. Returns its ID.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncQp::post_send`](crate::queue::AsyncQp::post_send).
    pub fn put(&mut self, from: Segment, to: Remote) -> Result<u64> {
        self.post(SendOperation::Write(to), Payload::Memory(vec![from]), true)
    }

    /// Posts a READ of the other side's memory. Returns its ID. The data has arrived when the counter has counted it.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncQp::post_send`](crate::queue::AsyncQp::post_send).
    pub fn get(&mut self, to: Segment, from: Remote) -> Result<u64> {
        self.post(SendOperation::Read(from), Payload::Memory(vec![to]), true)
    }

    /// Posts a WRITE, and a change of the signal at the other side after the data. Returns the ID of the change.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncQp::post_send`](crate::queue::AsyncQp::post_send). If the queue has no space for the signal, the
    /// data stays posted: submit it and retry the signal with [`Channel::signal`].
    pub fn put_with_signal(&mut self, from: Segment, to: Remote, signal: Remote, change: Signal) -> Result<u64> {
        self.post(SendOperation::Write(to), Payload::Memory(vec![from]), false)?;
        self.signal(signal, change)
    }

    /// Posts a change of a signal. The other side sees it after all earlier puts.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncQp::post_send`](crate::queue::AsyncQp::post_send).
    pub fn signal(&mut self, signal: Remote, change: Signal) -> Result<u64> {
        match change {
            Signal::Set(value) => {
                let data = Payload::Inline(value.to_le_bytes().to_vec());
                self.post(SendOperation::Write(signal), data, true)
            }
            Signal::Add(add, old) => {
                let operation = SendOperation::FetchAdd { remote: signal, add };
                self.post(operation, Payload::Memory(vec![old]), true)
            }
        }
    }

    /// Returns byte code that starts all posted puts and signals.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncQp::commit_qp`](crate::queue::AsyncQp::commit_qp).
    pub fn submit(&mut self) -> Result<Program> {
        let program = self.endpoint.qp().commit_qp()?;
        self.submitted = self.posted;
        Ok(program)
    }

    /// Returns the number of puts with a completion that were submitted, for [`Channel::wait_counter`].
    pub fn counter(&self) -> u64 {
        self.submitted
    }

    /// Returns the number of them that [`Channel::poll`] has returned.
    pub fn completed(&self) -> u64 {
        self.completed
    }

    /// Returns byte code that waits until the counter of completed puts has reached a value: their memory can be used again.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if a wait for this value exists already, or not as many puts were submitted. Those of
    /// [`AsyncCq::peek_cq`](crate::queue::AsyncCq::peek_cq).
    pub fn wait_counter(&mut self, value: u64) -> Result<Peek> {
        if value <= self.waited || value > self.submitted {
            return Err(Error::Argument(format!(
                "the counter cannot be awaited at {value}: a wait for {} exists, and {} puts were submitted",
                self.waited, self.submitted
            )));
        }
        let count = u32::try_from(value - self.waited);
        let count = count.map_err(|_| Error::Argument(format!("{value} is too far ahead")))?;
        let peek = self.endpoint.qp().send_cq().peek_cq(count)?;
        self.waited = value;
        Ok(peek)
    }

    /// Returns byte code that waits until all submitted puts have completed; `None` if a wait for all of them exists.
    ///
    /// # Errors
    ///
    /// Those of [`Channel::wait_counter`].
    pub fn flush(&mut self) -> Result<Option<Peek>> {
        if self.waited == self.submitted {
            return Ok(None);
        }
        self.wait_counter(self.submitted).map(Some)
    }

    /// Consumes completions on the CPU.
    ///
    /// # Errors
    ///
    /// Those of [`AsyncCq::poll_cq`](crate::queue::AsyncCq::poll_cq).
    pub fn poll(&mut self, most: usize) -> Result<Vec<Completion>> {
        let completions = self.endpoint.qp().send_cq().poll_cq(most)?;
        self.completed += completions.len() as u64;
        self.waited = self.waited.max(self.completed);
        Ok(completions)
    }
}

/// Returns byte code that waits until a signal in this side's memory has reached a value. It compares the low 4 bytes, so
/// the signal may be up to 2^31 ahead.
///
/// # Errors
///
/// [`Error::Operation`] if the place is not a multiple of 4.
pub fn wait_signal(memory: &Region, at: u64, value: u32) -> Result<Program> {
    wait_for(memory, at, value)
}
