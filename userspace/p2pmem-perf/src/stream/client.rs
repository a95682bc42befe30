// SPDX-License-Identifier: MIT OR Apache-2.0

//! The client of a stream: sends the frames of a source.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem::human_size;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::memory::{Memory, MemoryOptions, Window};
use p2pmem_payload::nic::open_nics;
use p2pmem_verbs::{Completion, Completions, Domain, Nic, QueuePair, Remote, Request, Work};

use crate::client::reach;
use crate::print_json;
use crate::session::{connect_queue, cpu_time, own_endpoint};
use crate::waiter::How;
use crate::wire::{check_endpoints, reason, Control, Endpoint, FromClient, FromServer, Side, VERSION};

use super::protocol::{first_that_fits, Layout, StreamRequest, WORDS};
use super::rate::Rolling;
use super::report::{lost, StreamReport};
use super::source::{Next, OpenSource, Source, SourceOptions, Totals};
use super::synthetic::Synthetic;
use super::{StreamArgs, REVOKED};

/// Longest time between two messages that report to the server that the stream continues.
const ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// Time between two samples of the rate.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Wait for a message of the server between two checks of the stream.
const POLL_WAIT: Duration = Duration::from_millis(1);
/// Sleep of a client that does not poll, when there is nothing to do.
const IDLE: Duration = Duration::from_micros(100);
/// Maximum number of frames in flight. More keep the link no busier, and delay the end of the stream.
const MAX_IN_FLIGHT: u32 = 16;
/// Bytes of the credit word.
const CREDIT: u64 = 8;
const MIB: f64 = 1_048_576.0;

/// What [`send`] reports once a second.
#[derive(Debug, Clone, Copy)]
pub struct Second {
    /// Time since the start.
    pub elapsed: Duration,
    /// MiB per second since the last report.
    pub mib_per_s: f64,
    /// Rolling average in MiB per second.
    pub rolling_mib_per_s: f64,
    /// Frames sent since the start.
    pub frames: u64,
    /// Frames that the source has dropped before the last frame that was sent.
    pub dropped: u64,
}

/// Streams generated samples, and prints the report. Returns whether all frames arrived and no wrong one was found.
///
/// # Errors
///
/// Any error of the stream. The message says what to do.
pub fn run(args: &StreamArgs, json: bool, out: &mut dyn Write) -> Result<bool> {
    let memory = MemoryOptions {
        kind: args.own.memory,
        provider: args.own.device.as_deref(),
        device: &args.own.side.dev_path,
    };
    let open = |domain: &Arc<Domain>, options: &SourceOptions| -> Result<Box<dyn Source>> {
        Ok(Box::new(Synthetic::open(memory, domain, options)?))
    };
    run_with(args, args.own.memory, &open, json, out)
}

/// Streams the frames of a source as [`run`] does. `kind` is the kind of the source's memory.
///
/// # Errors
///
/// Any error of the stream. The message says what to do.
pub fn run_with(
    args: &StreamArgs,
    kind: MemoryKind,
    open: &OpenSource<'_>,
    json: bool,
    out: &mut dyn Write,
) -> Result<bool> {
    let terminal = !json && std::io::stderr().is_terminal();
    let report = send(args, kind, open, &mut |second| {
        if terminal {
            eprintln!(
                "{:5.0} s: {:.2} MiB/s, rolling average {:.2} MiB/s, {} frames, {} dropped by the source",
                second.elapsed.as_secs_f64(),
                second.mib_per_s,
                second.rolling_mib_per_s,
                second.frames,
                second.dropped
            );
        }
        Ok(())
    })?;
    if json {
        print_json(out, &report)?;
    } else {
        report.lines(out)?;
    }
    Ok(report.is_correct())
}

/// Sends the frames of a source to the server, and reports to `on_second` meanwhile. An error of `on_second` ends the
/// stream.
///
/// # Errors
///
/// Any error of the stream, and those of `on_second`. The message says what to do.
pub fn send(
    args: &StreamArgs,
    kind: MemoryKind,
    open: &OpenSource<'_>,
    on_second: &mut dyn FnMut(&Second) -> Result<()>,
) -> Result<StreamReport> {
    // Errors that need no server are reported before the first message to the server.
    let nics = open_nics(&args.own.side.nic)?;
    let [nic] = nics.as_slice() else {
        bail!("a stream uses one NIC: specify one (--nic)")
    };
    let request = args.request();
    request.check().map_err(anyhow::Error::msg)?;
    let mut control = Control::new(
        reach(&args.host, args.port, args.own.side.timeout)?,
        args.own.side.timeout,
    )?;
    let sent = run_stream(&mut control, nic, args, kind, &request, open, on_second);
    if let Err(error) = &sent {
        // The peer may have disconnected; then `error` says so.
        let _ = control.send(&FromClient::Failed(reason(error)));
    }
    sent
}

fn run_stream(
    control: &mut Control,
    nic: &Arc<Nic>,
    args: &StreamArgs,
    kind: MemoryKind,
    request: &StreamRequest,
    open: &OpenSource<'_>,
    on_second: &mut dyn FnMut(&Second) -> Result<()>,
) -> Result<StreamReport> {
    control.send(&FromClient::Stream {
        version: VERSION,
        request: request.clone(),
    })?;
    let FromServer::StreamWelcome {
        version,
        side: server,
        endpoint: other,
        layout: theirs,
    } = control.receive()?
    else {
        bail!("expected the message `streamwelcome` of the server");
    };
    ensure!(
        version == VERSION,
        "the server has protocol version {version}, this client {VERSION}: use the same p2pmem-perf on both sides"
    );
    theirs.check()?;
    check_endpoints(std::slice::from_ref(&other), 1)?;
    ensure!(
        theirs.chunk <= request.chunk && (!request.fixed || theirs.chunk == request.chunk),
        "the server offers slots of {} bytes, not of {}",
        theirs.chunk,
        request.chunk
    );
    let domain = Domain::new(nic.clone()).context("creating a protection domain")?;
    let mut source = first_that_fits(theirs.chunk, request.fixed, request.buffer, |layout| {
        let options = SourceOptions {
            layout,
            rate: args.rate,
            seed: args.seed,
        };
        open(&domain, &options)
    })?;
    let own = source.layout();
    ensure!(
        own.chunk <= theirs.chunk,
        "the source has larger frames than the server"
    );
    // The queue pair is dropped before the memory of the source.
    let depth = own.slots.min(theirs.slots).min(MAX_IN_FLIGHT);
    let completions = Completions::new(nic, depth + 1).context("creating a completion queue")?;
    let queue = QueuePair::new(&domain, &completions, depth + 1, 1)
        .with_context(|| format!("creating a queue pair on {} for {depth} frames", nic.name()))?;
    let nothing = Window {
        address: 0,
        rkey: 0,
        bytes: 0,
    };
    let words_at = own.frames_bytes();
    source
        .memory()
        .span()
        .try_write(usize::try_from(words_at)?, &[0; CREDIT as usize])?;
    source.memory().span().flush();
    let credit = source.memory().window(words_at, WORDS);
    let endpoint = own_endpoint(&queue, &args.own, nothing, credit)?;
    connect_queue(&queue, &endpoint, &other, args.own.side.gid_index)?;
    let client = side(nic, source.memory(), kind);
    eprintln!(
        "p2pmem-perf: {} frames of {} in {} memory for {}",
        own.slots,
        human_size(own.chunk),
        client.memory,
        nic.name()
    );
    control.send(&FromClient::StreamConnect {
        endpoint,
        chunk: own.chunk,
    })?;
    let FromServer::Ready = control.receive()? else {
        bail!("expected the message `ready` of the server");
    };

    let cpu = cpu_time();
    let mut flow = Flow {
        queue: &queue,
        completions: &completions,
        source: source.as_mut(),
        args,
        own,
        theirs,
        other: &other,
        depth: u64::from(depth),
        posted: 0,
        done: 0,
        credited: 0,
        sequence: None,
        gaps: 0,
        totals: None,
        rolling: Rolling::default(),
        finished: Vec::new(),
    };
    let elapsed = match flow.run(control, on_second) {
        Ok(elapsed) => elapsed,
        Err(error) => {
            // The server's message explains more than the error of the queue pair that the server destroyed.
            let said = control.receive_within::<FromServer>(ALIVE_INTERVAL).err();
            return Err(match said {
                Some(said) => error.context(format!("{said:#}")),
                None => error,
            });
        }
    };
    let cpu = cpu_time().saturating_sub(cpu);
    control.send(&FromClient::Finish)?;
    let FromServer::Streamed(result) = control.receive()? else {
        bail!("expected the message `streamed` of the server");
    };
    ensure!(
        result.verified.is_some() == request.verify && result.frames <= flow.posted,
        "the server reports {} of {} frames, {}verified: is it p2pmem-perf of the same version?",
        result.frames,
        flow.posted,
        if result.verified.is_some() { "" } else { "not " }
    );
    let (frames, totals, gaps) = (flow.posted, flow.totals.unwrap_or_default(), flow.gaps);
    let bytes = frames * own.chunk;
    let range = flow.rolling.range().unwrap_or_default();
    let each = |nanoseconds: f64| nanoseconds / 1e3 / frames.max(1) as f64;
    Ok(StreamReport {
        request: request.clone(),
        source: source.name(),
        source_rate: args.rate,
        client,
        server,
        chunk: own.chunk,
        client_slots: own.slots,
        server_slots: theirs.slots,
        seconds: elapsed.as_secs_f64(),
        frames,
        bytes,
        average_mib_per_s: bytes as f64 / MIB / elapsed.as_secs_f64().max(1e-9),
        rolling_min_mib_per_s: range.0 / MIB,
        rolling_max_mib_per_s: range.1 / MIB,
        produced: totals.produced,
        dropped: totals.dropped,
        lost: lost(frames, gaps, result.frames, result.verified.as_ref()),
        crc_errors: result.verified.map(|verified| verified.crc_errors),
        verified: result.verified,
        cpu_us_client: each(cpu.as_nanos() as f64),
        cpu_us_server: each(result.cpu_ns as f64),
    })
}

/// Returns the description of a NIC and its memory.
pub(super) fn side(nic: &Nic, memory: &Memory, kind: MemoryKind) -> Side {
    let providers = memory.provider().into_iter();
    Side {
        nics: vec![nic.name().to_owned()],
        memory: kind.name().to_owned(),
        providers: providers.map(|provider| provider.addr.to_string()).collect(),
        registration: memory.method(),
    }
}

/// State of the client while frames are in flight.
struct Flow<'a> {
    queue: &'a QueuePair,
    completions: &'a Completions,
    source: &'a mut dyn Source,
    args: &'a StreamArgs,
    own: Layout,
    theirs: Layout,
    other: &'a Endpoint,
    /// Maximum number of frames whose writes are not complete.
    depth: u64,
    /// Frames sent.
    posted: u64,
    /// Frames whose writes are complete.
    done: u64,
    /// Frames that the server has handled.
    credited: u64,
    /// Sequence number of the last frame sent.
    sequence: Option<u64>,
    /// Sequence numbers that the source has left out between frames.
    gaps: u64,
    /// What the source has done, once it is stopped.
    totals: Option<Totals>,
    rolling: Rolling,
    finished: Vec<Completion>,
}

impl Flow<'_> {
    /// Sends frames until the stream ends, and waits until the server has handled them. Returns the time.
    fn run(&mut self, control: &mut Control, on_second: &mut dyn FnMut(&Second) -> Result<()>) -> Result<Duration> {
        self.source.start()?;
        let start = Instant::now();
        let (mut alive, mut progress, mut sampled) = (start, start, start);
        let end_after = self.args.end_after();
        loop {
            let before = (self.posted, self.done, self.credited);
            self.complete()?;
            self.read_credit()?;
            let ends = end_after.is_some_and(|limit| start.elapsed() >= limit)
                || self.args.frames.is_some_and(|frames| self.posted >= frames);
            if ends {
                self.stop_source()?;
            }
            if self.totals.is_none() {
                self.send_next()?;
            } else if self.credited == self.posted && self.done == self.posted {
                break;
            }
            let now = Instant::now();
            if now - sampled >= SAMPLE_INTERVAL {
                self.sample(now - start, on_second)?;
                sampled = now;
            }
            if now - alive >= ALIVE_INTERVAL {
                control.send(&FromClient::Alive)?;
                if let Some(message) = control.receive_within::<FromServer>(POLL_WAIT)? {
                    bail!("the server sent {message:?} while frames were in flight");
                }
                alive = now;
            }
            if before != (self.posted, self.done, self.credited) {
                progress = now;
                continue;
            }
            ensure!(
                now - progress < self.args.own.side.timeout,
                "{} within {:?}: --timeout sets the limit",
                if self.posted > self.credited {
                    format!(
                        "the server did not handle frame {} of {}",
                        self.credited + 1,
                        self.posted
                    )
                } else {
                    format!("the source {} produced no frame", self.source.name())
                },
                self.args.own.side.timeout
            );
            match self.args.own.side.how() {
                // The source's thread may need this processor.
                How::Poll => thread::yield_now(),
                How::Events | How::Adaptive => thread::sleep(IDLE),
            }
        }
        let elapsed = start.elapsed();
        if self.rolling.range().is_none() || elapsed - (sampled - start) >= SAMPLE_INTERVAL / 2 {
            self.sample(elapsed, on_second)?;
        }
        Ok(elapsed)
    }

    fn sample(&mut self, elapsed: Duration, on_second: &mut dyn FnMut(&Second) -> Result<()>) -> Result<()> {
        let (rate, rolling) = self.rolling.sample(elapsed, self.done * self.own.chunk);
        on_second(&Second {
            elapsed,
            mib_per_s: rate / MIB,
            rolling_mib_per_s: rolling / MIB,
            frames: self.done,
            dropped: self.gaps,
        })
    }

    /// Handles completions: the memory of the frames is the source's again.
    fn complete(&mut self) -> Result<()> {
        self.finished.clear();
        let count = self
            .completions
            .poll(&mut self.finished)
            .context("polling completions")?;
        for completion in &self.finished {
            if let Some(failure) = completion.failure {
                bail!("sending frame {} failed: {failure}", completion.id);
            }
            ensure!(
                completion.id == self.done && self.done < self.posted,
                "expected the completion of frame {}, received that of {}",
                self.done,
                completion.id
            );
            self.done += 1;
        }
        if count > 0 {
            self.source.release(count as u64)?;
        }
        Ok(())
    }

    /// Reads how many frames the server has handled.
    fn read_credit(&mut self) -> Result<()> {
        if self.credited == self.posted {
            return Ok(());
        }
        let mut word = [0; CREDIT as usize];
        // Not truncated: the memory is mapped.
        let at = self.own.frames_bytes() as usize;
        self.source.memory().span().try_read(at, &mut word).context(REVOKED)?;
        let credited = u64::from_le_bytes(word);
        ensure!(
            (self.credited..=self.posted).contains(&credited),
            "the server reports {credited} handled frames: at least {} and at most {} are possible",
            self.credited,
            self.posted
        );
        self.credited = credited;
        Ok(())
    }

    /// Sends the next frame, if there is one and a free slot for it.
    fn send_next(&mut self) -> Result<()> {
        if self.posted - self.credited >= u64::from(self.theirs.slots) || self.posted - self.done >= self.depth {
            return Ok(());
        }
        let frame = match self.source.next()? {
            Next::Frame(frame) => frame,
            Next::NotYet => return Ok(()),
            Next::End => return self.stop_source(),
        };
        let expected = self.sequence.map_or(0, |last| last.wrapping_add(1));
        ensure!(
            frame.sequence >= expected,
            "the source {} returned frame {} after frame {}",
            self.source.name(),
            frame.sequence,
            expected.wrapping_sub(1)
        );
        self.gaps += frame.sequence - expected;
        self.sequence = Some(frame.sequence);
        let to = Remote {
            address: self.other.payload.at(self.theirs.slot(self.posted), self.own.chunk)?,
            rkey: self.other.payload.rkey,
        };
        let request = Request {
            id: self.posted,
            local: self.source.memory().segment(frame.at, self.own.chunk),
            // The low 32 bits are enough to distinguish a frame from its neighbours.
            work: Work::Write(to, Some(self.posted as u32)),
            signaled: true,
        };
        self.queue
            .post(&[request])
            .with_context(|| format!("sending frame {}", self.posted))?;
        self.posted += 1;
        Ok(())
    }

    fn stop_source(&mut self) -> Result<()> {
        if self.totals.is_none() {
            self.totals = Some(self.source.stop()?);
        }
        Ok(())
    }
}
