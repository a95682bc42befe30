// SPDX-License-Identifier: MIT OR Apache-2.0

//! `--mode ucx`: the payload by UCX, the library that MPI and many engines use.
//!
//! The memory and its slots are those of the other modes. Each side registers its memory with UCX, for one NIC and its
//! RDMA transports alone, so that UCX cannot fall back to another NIC or to TCP. The client puts each chunk from its
//! slot into the server's slot, after the connection exists. A message is done when a flush that the client began after
//! the message is complete: then the bytes are in the server's memory. There are at most two flushes for the chunks in
//! flight; with a depth of 1, each message has its own. The server's program only makes progress, until the client is
//! finished: UCX connects by messages between the workers.
//!
//! The program still registers the memory with the NIC and connects a queue pair, as in the other modes, but no message uses
//! them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure, Context, Result};
use p2pmem::human_size;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_ucx_sys::{self as ucx, Endpoint, Memory, Options, RemoteKey, Request, Worker};
use p2pmem_verbs::Span;

use crate::session::Clock;
use crate::sizes::Slots;
use crate::stats::Times;
use crate::sys;
use crate::waiter::{How, Stop, SPIN};
use crate::wire::UcxPort;

/// Transports that UCX may use: reliable connections.
const TRANSPORTS: &str = "rc";
/// Port of the NIC.
const PORT: u32 = 1;
/// Longest sleep of the client. Limits the time until a stop request is noticed.
const MAX_SLEEP: Duration = Duration::from_millis(100);
/// Longest sleep of the server. Limits the time until it notices that the client is finished.
const SERVER_SLEEP: Duration = Duration::from_millis(10);
/// Calls for progress between two reads of the clock.
const ROUNDS: u32 = 64;

/// One side's part of UCX for one NIC.
pub struct Port {
    // Fields are dropped in this order: the connection before the worker.
    remote: Option<Remote>,
    memory: Memory,
    worker: Worker,
    nic: String,
}

/// The server's memory.
struct Remote {
    key: RemoteKey,
    endpoint: Endpoint,
    port: UcxPort,
}

impl Port {
    /// Opens UCX for a NIC, and registers the first `bytes` bytes of the memory.
    ///
    /// # Errors
    ///
    /// UCX is not installed, cannot use the NIC, or cannot register the memory. The message says what to do.
    pub fn open(nic: &str, kind: MemoryKind, span: &Span, bytes: u64) -> Result<Self> {
        let mut options = Options::new(&format!("{nic}:{PORT}"), TRANSPORTS);
        if kind != MemoryKind::Cpu {
            options = options.without_copies();
        }
        Self::with(&options, nic, kind, span, bytes)
    }

    /// Opens UCX with these options, see [`Port::open`].
    fn with(options: &Options, nic: &str, kind: MemoryKind, span: &Span, bytes: u64) -> Result<Self> {
        let context = || format!("opening {nic} by UCX: UCX_LOG_LEVEL=error prints UCX's reasons");
        let ucx = ucx::Context::new(options).with_context(context)?;
        let worker = Worker::new(&ucx).with_context(context)?;
        let memory = Memory::map(&ucx, span, 0, usize::try_from(bytes)?).map_err(|error| {
            let remedy = match kind {
                MemoryKind::Cpu => "does the limit of pinned memory (ulimit -l) permit this?",
                _ => {
                    "UCX registers memory by its address, so start p2pmem-perf with the preload shim on both sides, as in \
                     LD_PRELOAD=libp2pmem_preload.so p2pmem-perf ..."
                }
            };
            anyhow!(
                "UCX cannot register {} of {} memory with {nic}: {error}; {remedy}",
                human_size(bytes),
                kind.name()
            )
        })?;
        Ok(Self {
            remote: None,
            memory,
            worker,
            nic: nic.to_owned(),
        })
    }

    /// Returns what the client needs.
    ///
    /// # Errors
    ///
    /// UCX cannot pack its address or key.
    pub fn own(&self) -> Result<UcxPort> {
        Ok(UcxPort {
            worker: self.worker.address()?,
            key: self.memory.key()?,
            address: self.memory.address(),
            bytes: self.memory.len() as u64,
        })
    }

    /// Begins to connect to the server. The first messages wait for the connection.
    ///
    /// # Errors
    ///
    /// The address or the key is not valid here, or the NIC does not reach that of the server.
    pub fn connect(&mut self, port: &UcxPort) -> Result<()> {
        let what = || {
            format!(
                "connecting {} to the other side by UCX: are both NICs on one network? UCX_LOG_LEVEL=error prints UCX's \
                 reasons",
                self.nic
            )
        };
        let (endpoint, key) = sys::connect(&self.worker, port).with_context(what)?;
        self.remote = Some(Remote {
            key,
            endpoint,
            port: port.clone(),
        });
        Ok(())
    }

    /// Puts the chunks of all messages, with at most `depth` chunks in flight. Returns the times of the messages.
    ///
    /// # Errors
    ///
    /// The limit ended without progress, the test was stopped, or the connection ended.
    pub(crate) fn send(
        &self,
        slots: &Slots,
        depth: u64,
        mut clock: Clock<'_>,
        how: How,
        limit: Duration,
        stop: &Stop,
    ) -> Result<Times> {
        let remote = self.remote.as_ref().context("UCX is not connected")?;
        let len = usize::try_from(slots.size)?;
        // Messages do not move through a window, so each one is a chunk.
        let chunks = clock.chunks();
        // Chunks put, those that a flush covers, and those that are done.
        let (mut put, mut covered, mut done) = (0, 0, 0);
        let mut puts: VecDeque<Request> = VecDeque::new();
        let mut flushes: VecDeque<(u64, Request)> = VecDeque::new();
        let mut progress = Progress::new(&self.worker, how, limit, stop);
        // Is complete when the connection exists, which is no part of a message.
        let connected = remote.endpoint.flush();
        while connected.result().is_none() {
            progress.next(&|| "the connection".to_owned())?;
            if let Some(error) = remote.endpoint.failure() {
                return Err(failed(remote, done, chunks, &error));
            }
        }
        progress.moved();
        while done < chunks {
            while put < chunks && put - done < depth {
                let to = remote.port.at(slots.target_at(put), slots.size)?;
                clock.post();
                let request = remote
                    .key
                    .put(&self.memory, slots.source_at(put) as usize, len, to)
                    .map_err(|error| failed(remote, put, chunks, &error))?;
                puts.push_back(request);
                put += 1;
                if put - covered >= depth.div_ceil(2) || put == chunks {
                    flushes.push_back((put, remote.endpoint.flush()));
                    covered = put;
                }
            }
            progress.next(&|| format!("message {done} of {chunks}"))?;
            while let Some((upto, flush)) = flushes.front() {
                let Some(result) = flush.result() else { break };
                result.map_err(|error| failed(remote, done, chunks, &error))?;
                for request in puts.drain(..(upto - done) as usize) {
                    // UCX completes the puts before the flush that covers them.
                    let result = request.result().context("a put is not complete after its flush")?;
                    result.map_err(|error| failed(remote, done, chunks, &error))?;
                }
                clock.finish(upto - done);
                done = *upto;
                flushes.pop_front();
                progress.moved();
            }
            if let Some(error) = remote.endpoint.failure() {
                return Err(failed(remote, done, chunks, &error));
            }
        }
        Ok(clock.times())
    }

    /// Makes progress until the client is finished.
    ///
    /// # Errors
    ///
    /// The test was stopped, or UCX cannot wait.
    pub fn serve(&self, finished: &AtomicBool, stop: &Stop) -> Result<()> {
        while !finished.load(Ordering::Relaxed) {
            ensure!(!stop.load(Ordering::Relaxed), "stopped before the client was finished");
            if !self.worker.progress() {
                self.worker.wait(SERVER_SLEEP)?;
            }
        }
        Ok(())
    }
}

/// Returns the error of a transfer, with that of the connection if it has one: it is the cause.
fn failed(remote: &Remote, message: u64, messages: u64, error: &ucx::UcxError) -> anyhow::Error {
    let error = remote.endpoint.failure().unwrap_or_else(|| error.clone());
    anyhow!("message {message} of {messages} failed by UCX: {error}; is the other side running? See its output")
}

/// Makes progress, and waits, with a limit on the time in which nothing moves.
struct Progress<'a> {
    worker: &'a Worker,
    how: How,
    limit: Duration,
    stop: &'a Stop,
    since: Instant,
}

impl<'a> Progress<'a> {
    fn new(worker: &'a Worker, how: How, limit: Duration, stop: &'a Stop) -> Self {
        Self {
            worker,
            how,
            limit,
            stop,
            since: Instant::now(),
        }
    }

    /// Something has moved: the limit starts again.
    fn moved(&mut self) {
        self.since = Instant::now();
    }

    /// Makes progress. If there is none, sleeps or polls again, as `how` says, for a limited time.
    fn next(&self, what: &dyn Fn() -> String) -> Result<()> {
        let rounds = if self.how == How::Events { 1 } else { ROUNDS };
        let mut moves = false;
        for _ in 0..rounds {
            moves = self.worker.progress();
            if moves {
                break;
            }
            std::hint::spin_loop();
        }
        if self.stop.load(Ordering::Relaxed) {
            bail!("stopped while waiting for {}", what());
        }
        let waited = self.since.elapsed();
        ensure!(
            waited < self.limit,
            "{} did not complete within {:?} by UCX: is the link up, and is the other side running? --timeout sets the limit",
            what(),
            self.limit
        );
        if moves || self.how == How::Poll || self.how == How::Adaptive && waited < SPIN {
            return Ok(());
        }
        self.worker
            .wait(MAX_SLEEP.min(self.limit.saturating_sub(waited)))
            .context("waiting for UCX")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use crate::pattern::{check_target, fill_source, fill_target};
    use crate::sizes::GUARD;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Opens UCX over TCP within this machine. `None` if UCX is not installed, which it is in the project's sandbox.
    fn port(span: &Span) -> Option<Port> {
        let opened = Port::with(
            &Options::new("lo", "tcp"),
            "lo",
            MemoryKind::Cpu,
            span,
            span.len() as u64,
        );
        match opened {
            Err(error) if error.root_cause().to_string().contains("UCX is not installed") => {
                assert!(!p2pmem_header_test::in_sandbox(), "{error:#}");
                eprintln!("skipped: {error:#}");
                None
            }
            opened => Some(opened.unwrap()),
        }
    }

    #[test]
    fn messages_of_all_depths_arrive() {
        for (size, depth, messages, how) in [
            (8, 1, 20, How::Poll),
            (4104, 3, 7, How::Events),
            (1 << 20, 4, 3, How::Adaptive),
            (65536, 16, 50, How::Events),
        ] {
            let slots = Slots::new(size, depth, 1 << 30);
            let source = Span::host(slots.source_bytes() as usize).unwrap();
            let target = Span::host((slots.target_bytes() + GUARD) as usize).unwrap();
            fill_source(&source, &slots, 5).unwrap();
            fill_target(&target, &slots, GUARD, 5).unwrap();
            let (Some(mut client), Some(server)) = (port(&source), port(&target)) else {
                return;
            };
            client.connect(&server.own().unwrap()).unwrap();
            let (finished, stop, progress) = (AtomicBool::new(false), Stop::default(), AtomicU64::new(0));
            let clock = Clock::new(messages, 1, Instant::now(), &progress).unwrap();
            let times = thread::scope(|scope| {
                let served = scope.spawn(|| server.serve(&finished, &stop));
                let times = client.send(&slots, depth, clock, how, LIMIT, &stop);
                finished.store(true, Ordering::Relaxed);
                served.join().unwrap().unwrap();
                times.unwrap()
            });
            assert_eq!(
                (times.posted.len(), times.done.len()),
                (messages as usize, messages as usize)
            );
            assert!(times.done.is_sorted());
            assert!(times
                .posted
                .iter()
                .zip(&times.done)
                .all(|(posted, done)| posted <= done));
            let checked = check_target(&target, &slots, GUARD, 5, messages).unwrap();
            assert!(checked.is_correct(), "{size}: {checked:?}");
        }
    }

    #[test]
    fn a_server_without_progress_and_a_stop_request_end_the_messages() {
        let slots = Slots::new(4096, 2, 1 << 20);
        let span = Span::host((slots.target_bytes() + GUARD) as usize).unwrap();
        let (Some(mut client), Some(server)) = (port(&span), port(&span)) else {
            return;
        };
        let own = server.own().unwrap();
        client.connect(&own).unwrap();
        let progress = AtomicU64::new(0);
        let send = |client: &Port, limit, stop: &Stop| {
            let clock = Clock::new(5, 1, Instant::now(), &progress).unwrap();
            client
                .send(&slots, 2, clock, How::Events, limit, stop)
                .unwrap_err()
                .to_string()
        };
        let error = send(&client, Duration::from_millis(1), &Stop::default());
        assert!(
            error.starts_with("the connection") && error.contains("--timeout"),
            "{error}"
        );
        let stop = Stop::default();
        stop.store(true, Ordering::Relaxed);
        let error = send(&client, LIMIT, &stop);
        assert!(error.contains("stopped"), "{error}");
        assert!(server.serve(&AtomicBool::new(false), &stop).is_err());
        // Memory of the server that is smaller than the slots.
        let (finished, stop) = (AtomicBool::new(false), Stop::default());
        client.connect(&UcxPort { bytes: 4096, ..own }).unwrap();
        let error = thread::scope(|scope| {
            let served = scope.spawn(|| server.serve(&finished, &stop));
            let error = send(&client, LIMIT, &stop);
            finished.store(true, Ordering::Relaxed);
            served.join().unwrap().unwrap();
            error
        });
        assert!(error.contains("exceed the 4096 bytes"), "{error}");
    }

    #[test]
    fn a_server_that_ends_is_the_error_of_the_messages() {
        let slots = Slots::new(65536, 2, 1 << 20);
        let span = Span::host((slots.target_bytes() + GUARD) as usize).unwrap();
        let (Some(mut client), Some(server)) = (port(&span), port(&span)) else {
            return;
        };
        client.connect(&server.own().unwrap()).unwrap();
        let (finished, stop, progress) = (AtomicBool::new(false), Stop::default(), AtomicU64::new(0));
        let clock = Clock::new(10_000_000, 1, Instant::now(), &progress).unwrap();
        let error = thread::scope(|scope| {
            let (finished, stop) = (&finished, &stop);
            scope.spawn(move || {
                server.serve(finished, stop).unwrap();
                drop(server);
            });
            let client = &client;
            let sent = scope.spawn(move || client.send(&slots, 2, clock, How::Poll, LIMIT, stop));
            let deadline = Instant::now() + LIMIT;
            while progress.load(Ordering::Relaxed) == 0 {
                assert!(Instant::now() < deadline, "no message arrives");
                thread::yield_now();
            }
            finished.store(true, Ordering::Relaxed);
            sent.join().unwrap().err().unwrap().to_string()
        });
        assert!(error.contains("failed by UCX: the connection failed: "), "{error}");
    }
}
