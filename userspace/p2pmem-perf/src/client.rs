// SPDX-License-Identifier: MIT OR Apache-2.0

//! `run`: connects to a server and measures.

use std::io::{ErrorKind, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use crate::cli::{OwnArgs, RunArgs};
use crate::lane::{open_nics, Lane, Role};
use crate::report::{LaneResult, Report, SizeResult};
use crate::server::{connect, lanes, side};
use crate::stats::{Speed, Times};
use crate::waiter::Stop;
use crate::wire::{reason, Found, FromClient, FromServer, Line, VERSION};

/// Longest time between two messages that report to the server that the test continues.
const ALIVE: Duration = Duration::from_millis(500);
/// Wait for a message of the server between two checks of the sessions.
const LISTEN: Duration = Duration::from_millis(1);
/// Wait before the next attempt to connect to a server that refused the connection.
const AGAIN: Duration = Duration::from_millis(100);

/// Runs the test and prints the results. Returns whether no wrong byte was found.
///
/// # Errors
///
/// Any error of the test. The message says what to do.
pub fn run(args: &RunArgs, json: bool, out: &mut dyn Write) -> Result<bool> {
    // Errors that need no server are reported before the first message to the server.
    let test = args.test(open_nics(&args.own.nic)?.len());
    test.check().map_err(anyhow::Error::msg)?;
    let mut line = Line::new(reach(&args.host, args.port, args.own.timeout)?, args.own.timeout)?;
    let measured = session(&mut line, args, &test, json, out);
    if let Err(error) = &measured {
        // The peer may have disconnected; then `error` says so.
        let _ = line.say(&FromClient::Failed(reason(error)));
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
            let left = deadline.saturating_duration_since(Instant::now()).max(AGAIN);
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
        thread::sleep(AGAIN);
    }
}

fn session(line: &mut Line, args: &RunArgs, test: &crate::wire::Test, json: bool, out: &mut dyn Write) -> Result<bool> {
    line.say(&FromClient::Hello {
        version: VERSION,
        test: test.clone(),
    })?;
    let FromServer::Welcome {
        version,
        side: server,
        endpoints,
    } = line.hear()?
    else {
        bail!("expected the message `welcome` of the server");
    };
    ensure!(
        version == VERSION,
        "the server has protocol version {version}, this client {VERSION}: use the same p2pmem-perf on both sides"
    );
    let mut lanes = lanes(test, Role::Client, &args.own)?;
    connect(&mut lanes, endpoints)?;
    line.say(&FromClient::Connect(
        lanes.iter().map(|lane| lane.endpoint().clone()).collect(),
    ))?;
    let FromServer::Ready = line.hear()? else {
        bail!("expected the message `ready` of the server");
    };
    let mut report = Report::new(test.clone(), side(&lanes, &args.own), server);
    if !json {
        writeln!(out, "{}", report.heading())?;
    }
    for size in &test.sizes {
        let result = one_size(line, &lanes, *size, &args.own)?;
        if !json {
            Report::lines(&result, out)?;
            out.flush()?;
        }
        report.results.push(result);
    }
    line.say(&FromClient::Bye)?;
    if json {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
    }
    Ok(report.is_right())
}

/// Runs the messages of one size on all NICs at the same time.
fn one_size(line: &mut Line, lanes: &[Lane], size: u64, own: &OwnArgs) -> Result<SizeResult> {
    lanes.iter().try_for_each(|lane| lane.prepare(size))?;
    line.say(&FromClient::Start(size))?;
    let FromServer::Started = line.hear()? else {
        bail!("expected the message `started` of the server");
    };
    let done = all_lanes(line, lanes, size, own)?;
    line.say(&FromClient::Finish)?;
    let FromServer::Finished(found) = line.hear()? else {
        bail!("expected the message `finished` of the server");
    };
    ensure!(
        found.len() == lanes.len(),
        "the server sent results of {} NICs, expected {}",
        found.len(),
        lanes.len()
    );
    let times: Vec<Times> = done.iter().map(|(times, _)| times.clone()).collect();
    let nics = lanes.iter().zip(done).zip(found);
    let nics = nics.map(|((lane, (times, copied)), found)| result(lane, size, &times, copied, found));
    Ok(SizeResult::new(Speed::of_all(size, &times), nics.collect()))
}

fn result(lane: &Lane, size: u64, times: &Times, copied: u64, found: Found) -> LaneResult {
    LaneResult {
        nic: lane.nic().name().to_owned(),
        speed: Speed::new(size, times),
        copied_client: copied,
        copied_server: found.copied,
        // Exactly one of the two sides is the target.
        checked: lane.check(size).or(found.checked),
    }
}

/// Runs all sessions, and reports to the server at intervals that the test continues.
fn all_lanes(line: &mut Line, lanes: &[Lane], size: u64, own: &OwnArgs) -> Result<Vec<(Times, u64)>> {
    let stop = Stop::default();
    let progress = AtomicU64::new(0);
    thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        let start = Instant::now();
        for (index, lane) in lanes.iter().enumerate() {
            let (send, stop, progress) = (send.clone(), &stop, &progress);
            scope.spawn(move || {
                let done = lane.run(size, own, stop, start, progress);
                // The receiver lives until the scope ends.
                let _ = send.send((index, done));
            });
        }
        drop(send);
        let mut all: Vec<Option<(Times, u64)>> = lanes.iter().map(|_| None).collect();
        let mut watch = || -> Result<()> {
            while all.iter().any(Option::is_none) {
                match results.recv_timeout(ALIVE) {
                    Ok((index, done)) => {
                        let name = || lanes[index].nic().name().to_owned();
                        all[index] = Some(done.with_context(name)?);
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        line.say(&FromClient::Alive)?;
                        if let Some(message) = line.hear_within::<FromServer>(LISTEN)? {
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
            let said = line.hear_within::<FromServer>(ALIVE).err();
            return Err(match said {
                Some(said) => error.context(format!("{said:#}")),
                None => error,
            });
        }
        Ok(all.into_iter().flatten().collect())
    })
}
