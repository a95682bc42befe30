// SPDX-License-Identifier: MIT OR Apache-2.0

//! `run`: connects to a server and measures.

use std::io::{ErrorKind, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem::short_size;

use crate::cli::{OwnArgs, RunArgs};
use crate::print_json;
use crate::progress;
use crate::report::{NicResult, Report, SizeResult};
use crate::server::{connect, sessions, side};
use crate::session::{open_nics, NicSession, Ran, Role};
use crate::stats::{Latency, Speed, Times};
use crate::waiter::Stop;
use crate::wire::{reason, Control, FromClient, FromServer, ServerResult, VERSION};

/// Longest time between two messages that report to the server that the test continues.
const ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// Wait for a message of the server between two checks of the sessions.
const POLL_WAIT: Duration = Duration::from_millis(1);
/// Wait before the next attempt to connect to a server that refused the connection.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Runs the test and prints the results. Returns whether no wrong byte was found.
///
/// # Errors
///
/// Any error of the test. The message says what to do.
pub fn run(args: &RunArgs, json: bool, out: &mut dyn Write) -> Result<bool> {
    // Errors that need no server are reported before the first message to the server.
    let test = args.test(open_nics(&args.own.nic)?.len());
    test.check().map_err(anyhow::Error::msg)?;
    let mut control = Control::new(reach(&args.host, args.port, args.own.timeout)?, args.own.timeout)?;
    let measured = run_test(&mut control, args, &test, json, out);
    if let Err(error) = &measured {
        // The peer may have disconnected; then `error` says so.
        let _ = control.send(&FromClient::Failed(reason(error)));
    }
    measured
}

/// Connects to the server. Repeats refused attempts until the limit ends: the server may start later.
///
/// # Errors
///
/// The server is not reached within the limit.
pub fn reach(host: &str, port: u16, limit: Duration) -> Result<TcpStream> {
    let deadline = Instant::now() + limit;
    let addresses: Vec<_> = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("cannot resolve the host name {host}"))?
        .collect();
    loop {
        let mut last = None;
        for address in &addresses {
            let left = deadline.saturating_duration_since(Instant::now()).max(RETRY_DELAY);
            match TcpStream::connect_timeout(address, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        let refused = last
            .as_ref()
            .is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused);
        if !refused || Instant::now() >= deadline {
            let error = last.map_or_else(|| anyhow::anyhow!("the host has no address"), anyhow::Error::new);
            return Err(error).with_context(|| {
                format!("cannot connect to {host}, port {port}, within {limit:?}: does `p2pmem-perf serve` run there?")
            });
        }
        thread::sleep(RETRY_DELAY);
    }
}

fn run_test(
    control: &mut Control,
    args: &RunArgs,
    test: &crate::wire::Test,
    json: bool,
    out: &mut dyn Write,
) -> Result<bool> {
    control.send(&FromClient::Hello {
        version: VERSION,
        test: test.clone(),
    })?;
    let FromServer::Welcome {
        version,
        side: server,
        endpoints,
    } = control.receive()?
    else {
        bail!("expected the message `welcome` of the server");
    };
    ensure!(
        version == VERSION,
        "the server has protocol version {version}, this client {VERSION}: use the same p2pmem-perf on both sides"
    );
    let mut sessions = sessions(test, Role::Client, &args.own)?;
    connect(&mut sessions, endpoints)?;
    control.send(&FromClient::Connect(
        sessions.iter().map(|session| session.endpoint().clone()).collect(),
    ))?;
    let FromServer::Ready = control.receive()? else {
        bail!("expected the message `ready` of the server");
    };
    let mut report = Report::new(test.clone(), side(&sessions, &args.own), server);
    if !json {
        writeln!(out, "{}", report.heading())?;
    }
    for size in &test.sizes {
        let result = one_size(control, &sessions, *size, &args.own, json)?;
        if !json {
            Report::lines(&result, out)?;
            out.flush()?;
        }
        report.results.push(result);
    }
    control.send(&FromClient::Bye)?;
    if json {
        print_json(out, &report)?;
    }
    Ok(report.is_correct())
}

/// Runs the messages of one size on all NICs at the same time.
fn one_size(
    control: &mut Control,
    sessions: &[NicSession],
    size: u64,
    own: &OwnArgs,
    json: bool,
) -> Result<SizeResult> {
    sessions.iter().try_for_each(|session| session.prepare(size))?;
    control.send(&FromClient::Start(size))?;
    let FromServer::Started = control.receive()? else {
        bail!("expected the message `started` of the server");
    };
    let messages = sessions.iter().map(|session| session.test().messages(size)).sum();
    let bar = progress::bar("messages", messages, json);
    bar.set_message(short_size(size));
    let done = run_sessions(control, sessions, size, own, &bar);
    bar.finish_and_clear();
    let done = done?;
    control.send(&FromClient::Finish)?;
    let FromServer::Finished(found) = control.receive()? else {
        bail!("expected the message `finished` of the server");
    };
    ensure!(
        found.len() == sessions.len(),
        "the server sent results of {} NICs, expected {}",
        found.len(),
        sessions.len()
    );
    let times: Vec<Times> = done.iter().map(|ran| ran.times.clone()).collect();
    let nics = sessions.iter().zip(&done).zip(found);
    let nics = nics.map(|((session, ran), found)| result(session, size, ran, found));
    Ok(SizeResult::new(
        Speed::of_all(size, &times),
        Latency::new(&times),
        nics.collect(),
    ))
}

fn result(session: &NicSession, size: u64, ran: &Ran, found: ServerResult) -> NicResult {
    // There is at least one message.
    let each = |nanoseconds: f64| nanoseconds / 1e3 / ran.times.done.len().max(1) as f64;
    NicResult {
        nic: session.nic().name().to_owned(),
        speed: Speed::new(size, &ran.times),
        latency: Latency::new([&ran.times]),
        cpu_us_client: each(ran.cpu.as_nanos() as f64),
        cpu_us_server: each(found.cpu_ns as f64),
        copied_client: ran.copied,
        copied_server: found.copied,
        // Exactly one of the two sides is the target.
        checked: session.check(size).or(found.checked),
    }
}

/// Runs all sessions, and reports to the server at intervals that the test continues.
fn run_sessions(
    control: &mut Control,
    sessions: &[NicSession],
    size: u64,
    own: &OwnArgs,
    bar: &indicatif::ProgressBar,
) -> Result<Vec<Ran>> {
    let stop = Stop::default();
    let progress: Vec<AtomicU64> = sessions.iter().map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        let start = Instant::now();
        for (index, session) in sessions.iter().enumerate() {
            let (send, stop, progress) = (send.clone(), &stop, &progress[index]);
            scope.spawn(move || {
                let done = session.run(size, own, stop, start, progress);
                // The receiver lives until the scope ends.
                let _ = send.send((index, done));
            });
        }
        drop(send);
        let mut all: Vec<Option<Ran>> = sessions.iter().map(|_| None).collect();
        let mut watch = || -> Result<()> {
            while all.iter().any(Option::is_none) {
                match results.recv_timeout(ALIVE_INTERVAL) {
                    Ok((index, done)) => {
                        let name = || sessions[index].nic().name().to_owned();
                        all[index] = Some(done.with_context(name)?);
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        bar.set_position(progress.iter().map(|done| done.load(Ordering::Relaxed)).sum());
                        control.send(&FromClient::Alive)?;
                        if let Some(message) = control.receive_within::<FromServer>(POLL_WAIT)? {
                            bail!("the server sent {message:?} while messages were in flight");
                        }
                    }
                    // A thread panicked; the scope propagates the panic.
                    Err(RecvTimeoutError::Disconnected) => bail!("a thread ended without a result"),
                }
            }
            Ok(())
        };
        let watched = watch();
        if let Err(error) = watched {
            stop.store(true, Ordering::Relaxed);
            // The server's message explains more than the error of the queue pair that the server destroyed.
            let said = control.receive_within::<FromServer>(ALIVE_INTERVAL).err();
            return Err(match said {
                Some(said) => error.context(format!("{said:#}")),
                None => error,
            });
        }
        Ok(all.into_iter().flatten().collect())
    })
}
