// SPDX-License-Identifier: MIT OR Apache-2.0

//! The server of a stream: a ring of slots for frames, the check of each frame, and the credit for the client.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem::human_size;
use p2pmem_payload::memory::{Memory, MemoryOptions};
use p2pmem_payload::nic::open_nics;
use p2pmem_verbs::{Completion, Completions, Domain, QueuePair, Remote, Request, Span, Work};

use crate::cli::{OwnArgs, ServeArgs};
use crate::server::with_peer_memory;
use crate::session::{connect_queue, cpu_time, own_endpoint};
use crate::waiter::How;
use crate::wire::{check_endpoints, Control, Endpoint, FromClient, FromServer, VERSION};

use super::client::side;
use super::frame;
use super::protocol::{check_chunk, first_that_fits, Layout, MissingMemory, StreamRequest, StreamResult, Verified};
use super::REVOKED;

/// Time between two looks for a message of the client.
const CONTROL_INTERVAL: Duration = Duration::from_millis(50);
/// Wait for a message of the client.
const POLL_WAIT: Duration = Duration::from_millis(1);
/// Maximum number of credits in flight. Each has its own word.
const CREDITS: u64 = 32;
/// Bytes of the word of a credit.
const WORD: u64 = 8;
/// Bit of the ids of credits. The others are the ids of receives.
const CREDIT_ID: u64 = 1 << 63;

/// Serves a stream, from the answer to `stream` to `streamed`.
///
/// # Errors
///
/// Any error of the stream. The message says what to do.
pub fn serve(control: &mut Control, args: &ServeArgs, version: u32, request: &StreamRequest) -> Result<()> {
    ensure!(
        version == VERSION,
        "the client has protocol version {version}, this server {VERSION}: use the same p2pmem-perf on both sides"
    );
    request.check().map_err(anyhow::Error::msg)?;
    let own = with_peer_memory(&args.own, request.peer.as_ref())?;
    let nics = open_nics(&own.side.nic)?;
    let nic = nics.first().context("no NIC")?;
    let domain = Domain::new(nic.clone()).context("creating a protection domain")?;
    let options = MemoryOptions {
        kind: own.memory,
        provider: own.device.as_deref(),
        device: &own.side.dev_path,
    };
    let (memory, layout) = first_that_fits(request.chunk, request.fixed, request.buffer, |layout| {
        if layout.bytes() > args.most {
            return Err(MissingMemory(format!(
                "the stream needs {} of memory, more than the {} that this server allows (--most)",
                human_size(layout.bytes()),
                human_size(args.most)
            ))
            .into());
        }
        Ok((Memory::new(options, &domain, layout.bytes())?, layout))
    })?;
    let (receives, credits) = (layout.slots, CREDITS as u32);
    let completions = Completions::new(nic, receives + credits).context("creating a completion queue")?;
    let queue = QueuePair::new(&domain, &completions, credits, receives)
        .with_context(|| format!("creating a queue pair on {} for {receives} frames", nic.name()))?;
    let payload = memory.window(0, layout.frames_bytes());
    let nothing = memory.window(layout.frames_bytes(), 0);
    let endpoint = own_endpoint(&queue, &own, payload, nothing)?;
    eprintln!(
        "p2pmem-perf: a stream to {} slots of {} in {} memory near {}",
        layout.slots,
        human_size(layout.chunk),
        own.memory.name(),
        nic.name()
    );
    control.send(&FromServer::StreamWelcome {
        version: VERSION,
        side: side(nic, &memory, own.memory),
        endpoint: endpoint.clone(),
        layout,
    })?;
    let FromClient::StreamConnect { endpoint: other, chunk } = control.receive()? else {
        bail!("expected the message `streamconnect` of the client");
    };
    check_chunk(chunk).map_err(anyhow::Error::msg)?;
    ensure!(
        chunk <= layout.chunk,
        "the client's frames have {chunk} bytes, but the slots {}",
        layout.chunk
    );
    check_endpoints(std::slice::from_ref(&other), 1)?;
    connect_queue(&queue, &endpoint, &other, own.side.gid_index)?;
    let mut sink = Sink {
        queue: &queue,
        completions: &completions,
        memory: &memory,
        layout,
        chunk,
        other: &other,
        frames: 0,
        credited: 0,
        credits: (0, 0),
        order: request.verify.then(Order::default),
        finished: Vec::new(),
    };
    for number in 0..u64::from(layout.slots) {
        sink.post_receive(number)?;
    }
    control.send(&FromServer::Ready)?;
    let cpu = cpu_time();
    sink.run(control, &own)?;
    let cpu = cpu_time().saturating_sub(cpu);
    eprintln!("p2pmem-perf: {} frames", sink.frames);
    control.send(&FromServer::Streamed(StreamResult {
        frames: sink.frames,
        verified: sink.order.map(|order| order.found),
        cpu_ns: u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX),
    }))
}

/// What the check of the frames has found, in the order of their arrival.
#[derive(Debug, Clone, Copy, Default)]
struct Order {
    last: Option<u64>,
    found: Verified,
}

impl Order {
    /// Takes the result of the check of the next frame.
    fn take(&mut self, checked: Option<frame::Checked>) {
        let found = &mut self.found;
        let Some(checked) = checked else {
            found.bad_headers += 1;
            return;
        };
        found.crc_errors += u64::from(!checked.crc);
        found.wrong_samples += u64::from(!checked.samples);
        match self.last {
            Some(last) if checked.sequence <= last => found.out_of_order += 1,
            last => {
                // Frames that the source has dropped before the first one are in the gap, as for the client.
                let expected = last.map_or(0, |last| last.saturating_add(1));
                found.missing = found.missing.saturating_add(checked.sequence - expected);
                self.last = Some(checked.sequence);
            }
        }
    }

    fn check(&mut self, span: &Span, at: u64, chunk: u64) -> Result<()> {
        // Not truncated: the memory is mapped.
        let checked = frame::check(span, at as usize, chunk as usize).context(REVOKED)?;
        self.take(checked);
        Ok(())
    }
}

/// State of the server while frames arrive.
struct Sink<'a> {
    queue: &'a QueuePair,
    completions: &'a Completions,
    memory: &'a Memory,
    layout: Layout,
    /// Bytes of a frame.
    chunk: u64,
    other: &'a Endpoint,
    /// Frames that were handled.
    frames: u64,
    /// Frames of which the client knows, or will know.
    credited: u64,
    /// Credits sent, and those that arrived.
    credits: (u64, u64),
    order: Option<Order>,
    finished: Vec<Completion>,
}

impl Sink<'_> {
    fn post_receive(&self, number: u64) -> Result<()> {
        self.queue
            .post_receive(number, None)
            .with_context(|| format!("posting the receive for frame {number}"))
    }

    /// Handles frames until the client has sent `finish`.
    fn run(&mut self, control: &mut Control, own: &OwnArgs) -> Result<()> {
        let (mut heard, mut looked) = (Instant::now(), Instant::now());
        loop {
            self.next(own.side.how())?;
            self.handle()?;
            self.send_credit()?;
            if looked.elapsed() < CONTROL_INTERVAL {
                continue;
            }
            match control.receive_within(POLL_WAIT)? {
                Some(FromClient::Alive) => heard = Instant::now(),
                // The client waits for the credits of all frames before.
                Some(FromClient::Finish) => return Ok(()),
                Some(other) => bail!("the client sent {other:?} while frames were in flight"),
                None => ensure!(
                    heard.elapsed() < own.side.timeout,
                    "no message of the client for {:?}: does the client hang? --timeout sets the limit",
                    own.side.timeout
                ),
            }
            looked = Instant::now();
        }
    }

    /// Polls completions. If there are none, waits for a short time, unless the options request polling.
    fn next(&mut self, how: How) -> Result<()> {
        self.finished.clear();
        let poll = |into: &mut Vec<Completion>| self.completions.poll(into).context("polling completions");
        if poll(&mut self.finished)? > 0 || how == How::Poll {
            return Ok(());
        }
        self.completions.arm().context("requesting a completion event")?;
        // A completion before ibv_req_notify_cq() causes no event.
        if poll(&mut self.finished)? == 0 {
            self.completions
                .wait(CONTROL_INTERVAL)
                .context("waiting for a completion event")?;
        }
        Ok(())
    }

    /// Handles the completions that were polled.
    fn handle(&mut self) -> Result<()> {
        for completion in std::mem::take(&mut self.finished) {
            let credit = completion.id & CREDIT_ID != 0;
            if let Some(failure) = completion.failure {
                let what = if credit { "sending the credit for" } else { "receiving" };
                bail!("{what} frame {} failed: {failure}", self.frames);
            }
            if credit {
                self.credits.1 += 1;
                continue;
            }
            ensure!(
                completion.immediate == Some(self.frames as u32),
                "expected frame {}, received a frame with immediate data {:?}",
                self.frames,
                completion.immediate
            );
            if let Some(order) = &mut self.order {
                order.check(self.memory.span(), self.layout.slot(self.frames), self.chunk)?;
            }
            self.post_receive(self.frames + u64::from(self.layout.slots))?;
            self.frames += 1;
        }
        Ok(())
    }

    /// Sends the number of handled frames to the client. Without a free word, a later credit has the number.
    fn send_credit(&mut self) -> Result<()> {
        let (sent, arrived) = self.credits;
        if self.credited == self.frames || sent - arrived >= CREDITS {
            return Ok(());
        }
        let at = self.layout.frames_bytes() + sent % CREDITS * WORD;
        let span = self.memory.span();
        span.try_write(at as usize, &self.frames.to_le_bytes())
            .context(REVOKED)?;
        span.flush();
        let to = Remote {
            address: self.other.handled.at(0, WORD)?,
            rkey: self.other.handled.rkey,
        };
        let request = Request {
            id: CREDIT_ID | sent,
            local: self.memory.segment(at, WORD),
            work: Work::Write(to, None),
            signaled: true,
        };
        self.queue.post(&[request]).context("sending a credit")?;
        self.credits.0 += 1;
        self.credited = self.frames;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_gaps_are_found() {
        let mut order = Order::default();
        let good = |sequence| {
            Some(frame::Checked {
                sequence,
                crc: true,
                samples: true,
            })
        };
        // Frames 0, 3 and 4 are missing; 1 and 2 come twice.
        for sequence in [1, 2, 5, 1, 2, 6] {
            order.take(good(sequence));
        }
        let expected = Verified {
            missing: 3,
            out_of_order: 2,
            ..Verified::default()
        };
        assert_eq!(order.found, expected);
        order.take(None);
        order.take(good(7).map(|checked| frame::Checked { crc: false, ..checked }));
        order.take(good(8).map(|checked| frame::Checked {
            samples: false,
            ..checked
        }));
        let found = order.found;
        assert_eq!((found.bad_headers, found.crc_errors, found.wrong_samples), (1, 1, 1));
        assert_eq!((found.missing, found.wrong()), (3, 5));
    }
}
