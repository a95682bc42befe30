// SPDX-License-Identifier: MIT OR Apache-2.0

//! `serve`: waits for a client, and runs the test that the client requests.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem::human_size;

use crate::cli::{OwnArgs, ServeArgs};
use crate::lane::{describe, needs, open_nics, Lane, Role};
use crate::waiter::Stop;
use crate::wire::{check_endpoints, reason, sizes_of, Found, FromClient, FromServer, Line, Side, Test, VERSION};

/// Wait for a message of the client between two checks of the sessions.
const LISTEN: Duration = Duration::from_millis(50);

/// Serves one client, or with `--forever` one client after another.
///
/// # Errors
///
/// The address is not available. Without `--forever`, any error of the test.
pub fn serve(args: &ServeArgs) -> Result<()> {
    let address = (args.listen.as_str(), args.port);
    let listener = TcpListener::bind(address).with_context(|| {
        format!(
            "listening on {}, port {}: is another server running?",
            args.listen, args.port
        )
    })?;
    eprintln!("p2pmem-perf: listening on {}", listener.local_addr()?);
    loop {
        let (stream, peer) = listener.accept().context("waiting for a client")?;
        let served = client(stream, args).with_context(|| format!("client {peer}"));
        match served {
            Err(error) if args.forever => eprintln!("p2pmem-perf: {error:#}"),
            served if !args.forever => return served,
            _ => {}
        }
    }
}

/// Serves one client, from `hello` to `bye`. Reports an error of this side to the client.
fn client(stream: TcpStream, args: &ServeArgs) -> Result<()> {
    let mut line = Line::new(stream, args.own.timeout)?;
    let served = session(&mut line, args);
    if let Err(error) = &served {
        // The peer may have disconnected; then `error` says so.
        let _ = line.say(&FromServer::Failed(reason(error)));
    }
    served
}

fn session(line: &mut Line, args: &ServeArgs) -> Result<()> {
    let FromClient::Hello { version, test } = line.hear()? else {
        bail!("expected the message `hello` of the client");
    };
    ensure!(
        version == VERSION,
        "the client has protocol version {version}, this server {VERSION}: use the same p2pmem-perf on both sides"
    );
    test.check().map_err(anyhow::Error::msg)?;
    let bytes = needs(&test, Role::Server);
    ensure!(
        bytes <= args.most,
        "the test needs {} of memory for each NIC, more than the {} that this server allows (--most)",
        human_size(bytes),
        human_size(args.most)
    );
    eprintln!(
        "p2pmem-perf: {:?} of {}, {} messages each, {} NICs",
        test.mode,
        sizes_of(&test),
        test.iterations,
        test.nics
    );
    let mut lanes = lanes(&test, Role::Server, &args.own)?;
    line.say(&FromServer::Welcome {
        version: VERSION,
        side: side(&lanes, &args.own),
        endpoints: lanes.iter().map(|lane| lane.endpoint().clone()).collect(),
    })?;
    let FromClient::Connect(endpoints) = line.hear()? else {
        bail!("expected the message `connect` of the client");
    };
    connect(&mut lanes, endpoints)?;
    line.say(&FromServer::Ready)?;
    for expected in &test.sizes {
        match line.hear()? {
            FromClient::Start(size) if size == *expected => {}
            other => bail!("the client sent {other:?}; expected the start of messages of {expected} bytes"),
        }
        one_size(line, &lanes, *expected, &args.own)?;
    }
    match line.hear()? {
        FromClient::Bye => Ok(()),
        other => bail!("the client sent {other:?} after the last size; expected `bye`"),
    }
}

/// Runs the messages of one size, from `start` to `finished`.
fn one_size(line: &mut Line, lanes: &[Lane], size: u64, own: &OwnArgs) -> Result<()> {
    lanes.iter().try_for_each(|lane| lane.prepare(size))?;
    line.say(&FromServer::Started)?;
    let stop = Stop::default();
    let copied = thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        for (index, lane) in lanes.iter().enumerate() {
            let (send, stop) = (send.clone(), &stop);
            scope.spawn(move || {
                let served = lane.serve(size, own, stop);
                // The receiver lives until the scope ends.
                let _ = send.send((index, served));
            });
        }
        let all = until_finished(line, &results, lanes, own);
        if all.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        all
    })?;
    let found = lanes.iter().zip(copied).map(|(lane, copied)| Found {
        checked: lane.check(size),
        copied,
    });
    line.say(&FromServer::Finished(found.collect()))
}

/// Waits until the client has sent `finish` and all sessions are done. Returns the bytes that each session copied.
fn until_finished(
    line: &mut Line,
    results: &mpsc::Receiver<(usize, Result<u64>)>,
    lanes: &[Lane],
    own: &OwnArgs,
) -> Result<Vec<u64>> {
    let mut copied: Vec<Option<u64>> = vec![None; lanes.len()];
    let (mut finished, mut heard) = (false, Instant::now());
    loop {
        while let Ok((index, served)) = results.try_recv() {
            copied[index] = Some(served.with_context(|| lanes[index].nic().name().to_owned())?);
        }
        if finished {
            if let Some(all) = copied.iter().copied().collect() {
                return Ok(all);
            }
        }
        match line.hear_within(LISTEN)? {
            Some(FromClient::Alive) if !finished => heard = Instant::now(),
            Some(FromClient::Finish) if !finished => (finished, heard) = (true, Instant::now()),
            Some(other) => bail!("the client sent {other:?} while messages were in flight"),
            None => ensure!(
                heard.elapsed() < own.timeout,
                "no message of the client for {:?}: does the client hang? --timeout sets the limit",
                own.timeout
            ),
        }
    }
}

/// Creates a session for each NIC.
///
/// # Errors
///
/// The two sides have different numbers of NICs, or a NIC is not usable.
pub fn lanes(test: &Test, role: Role, own: &OwnArgs) -> Result<Vec<Lane>> {
    let nics = open_nics(&own.nic)?;
    ensure!(
        nics.len() == test.nics,
        "the client uses {} NICs and this server {}: select the same number on both (--nic)",
        test.nics,
        nics.len()
    );
    let lanes: Vec<Lane> = nics
        .into_iter()
        .enumerate()
        .map(|(index, nic)| Lane::new(nic, index, test, role, own))
        .collect::<Result<_>>()?;
    for lane in &lanes {
        eprintln!("p2pmem-perf: {}", describe(lane));
    }
    Ok(lanes)
}

/// Connects each session to its counterpart.
///
/// # Errors
///
/// Those of [`check_endpoints`] and [`Lane::connect`].
pub fn connect(lanes: &mut [Lane], endpoints: Vec<crate::wire::Endpoint>) -> Result<()> {
    check_endpoints(&endpoints, lanes.len())?;
    lanes
        .iter_mut()
        .zip(endpoints)
        .try_for_each(|(lane, endpoint)| lane.connect(endpoint))
}

/// Returns the description of this side's memory.
pub fn side(lanes: &[Lane], own: &OwnArgs) -> Side {
    let providers = lanes.iter().filter_map(|lane| lane.memory().provider());
    Side {
        nics: lanes.iter().map(|lane| lane.nic().name().to_owned()).collect(),
        memory: own.memory.name().to_owned(),
        providers: providers.map(|provider| provider.addr.to_string()).collect(),
        registration: lanes.first().map(|lane| lane.memory().method()).unwrap_or_default(),
    }
}
