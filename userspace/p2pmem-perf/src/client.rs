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

/// The longest time between two messages that report to the server that the test continues.
const ALIVE: Duration = Duration::from_millis(500);
/// How long it is listened to in between.
const LISTEN: Duration = Duration::from_millis(1);
/// How long after a server that does not listen yet is tried again.
const AGAIN: Duration = Duration::from_millis(100);

/// Measures, and prints as it goes. Returns whether nothing was found to be wrong.
///
/// # Errors
///
/// Whatever went wrong, with what to do.
pub fn run(args: &RunArgs, json: bool, out: &mut dyn Write) -> Result<bool> {
    // Errors that can be found without the server are reported before it gets a request.
    let test = args.test(open_nics(&args.own.nic)?.len());
    test.check().map_err(anyhow::Error::msg)?;
    let mut line = Line::new(reach(&args.host, args.port, args.own.timeout)?, args.own.timeout)?;
    let measured = session(&mut line, args, &test, json, out);
    if let Err(error) = &measured {
        // It may be gone, which then is what went wrong.
        let _ = line.say(&FromClient::Failed(reason(error)));
    }
    measured
}

/// Connects to the server, which may not listen yet.
///
/// # Errors
///
/// It is not reached within the limit.
pub fn reach(host: &str, port: u16, limit: Duration) -> Result<TcpStream> {
    let deadline = Instant::now() + limit;
    let addresses: Vec<_> = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("{host} is no host"))?
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
            let error = last.map_or_else(|| anyhow::anyhow!("it has no address"), anyhow::Error::new);
            return Err(error).with_context(|| {
                format!("{host} is not reached on port {port} within {limit:?}: does `p2pmem-perf serve` run there?")
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
        bail!("the server did not welcome us");
    };
    ensure!(
        version == VERSION,
        "the server speaks version {version}, this client {VERSION}: use the same p2pmem-perf on both sides"
    );
    let mut lanes = lanes(test, Role::Client, &args.own)?;
    connect(&mut lanes, endpoints)?;
    line.say(&FromClient::Connect(
        lanes.iter().map(|lane| lane.endpoint().clone()).collect(),
    ))?;
    let FromServer::Ready = line.hear()? else {
        bail!("the server was not ready");
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

/// Messages of one size by all lanes at once.
fn one_size(line: &mut Line, lanes: &[Lane], size: u64, own: &OwnArgs) -> Result<SizeResult> {
    lanes.iter().try_for_each(|lane| lane.prepare(size))?;
    line.say(&FromClient::Start(size))?;
    let FromServer::Started = line.hear()? else {
        bail!("the server did not start");
    };
    let done = all_lanes(line, lanes, size, own)?;
    line.say(&FromClient::Finish)?;
    let FromServer::Finished(found) = line.hear()? else {
        bail!("the server did not finish");
    };
    ensure!(
        found.len() == lanes.len(),
        "the server found something for {} NICs, not {}",
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
        // One of the two sides is the target.
        checked: lane.check(size).or(found.checked),
    }
}

/// Runs all lanes, and reports to the server at intervals that they run.
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
                // The receiver is there until the scope ends.
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
                            bail!("the server said {message:?} while messages were in flight");
                        }
                    }
                    // A lane that panicked; the scope passes it on.
                    Err(RecvTimeoutError::Disconnected) => bail!("a thread ended without a word"),
                }
            }
            Ok(())
        };
        let watched = watch();
        if let Err(error) = watched {
            stop.store(true, Ordering::Relaxed);
            // The server's message explains more than the error of the queue that it has torn down.
            let said = line.hear_within::<FromServer>(ALIVE).err();
            return Err(match said {
                Some(said) => error.context(format!("{said:#}")),
                None => error,
            });
        }
        Ok(all.into_iter().flatten().collect())
    })
}
