// SPDX-License-Identifier: MIT OR Apache-2.0

//! `serve`: waits for a client, and runs the test that the client requests.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::memory::{self, MemoryOptions, Wanted};
use p2pmem_payload::nic::open_nics;
use p2pmem_verbs::Nic;

use crate::cli::{OwnArgs, ServeArgs};
use crate::session::{describe, process_time, NicSession, Role, Served};
use crate::stream;
use crate::tcp::PayloadListener;
use crate::waiter::Stop;
use crate::wire::{
    check_endpoints, reason_and_remedy, sizes_of, Control, FromClient, FromServer, Mode, PeerMemory, ServerResult,
    Side, Test, VERSION,
};

/// Wait for a message of the client between two checks of the sessions.
const POLL_WAIT: Duration = Duration::from_millis(50);
/// Longest wait of a test for memory that is cleared, for all NICs together. The other side waits meanwhile, by default 30 s.
const CLEARING_WAIT: Duration = Duration::from_secs(10);

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
    let mut control = Control::new(stream, args.own.side.timeout)?;
    let served = run_test(&mut control, args);
    if let Err(error) = &served {
        // The peer may have disconnected; then `error` says so.
        let _ = control.send(&FromServer::Failed(reason_and_remedy(error)));
    }
    served
}

fn run_test(control: &mut Control, args: &ServeArgs) -> Result<()> {
    let (version, mut test) = match control.receive()? {
        FromClient::Hello { version, test } => (version, test),
        FromClient::Stream { version, request } => return stream::server::serve(control, args, version, &request),
        _ => bail!("expected the message `hello` of the client"),
    };
    ensure!(
        version == VERSION,
        "the client has protocol version {version}, this server {VERSION}: use the same p2pmem-perf on both sides"
    );
    let own = &own_args(&args.own, &test)?;
    test.check().map_err(anyhow::Error::msg)?;
    ensure!(
        args.ucx || test.mode != Mode::Ucx,
        "the server does not allow --mode ucx, because UCX trusts the client's bytes: start the server with --ucx if the client can be trusted"
    );
    let nics = open_nics(&own.side.nic)?;
    // With staged messages and calls, as much host memory may be needed as memory.
    let halves = test.staged || test.mode == Mode::Rpc;
    let most = if halves { args.most / 2 } else { args.most };
    test.space = test.space.min(most).min(space(own, &nics, &test, &|| Ok(()))?);
    if control.is_local() {
        // Both sides may take their memory from one provider.
        test.space /= 2;
    }
    test.check_space().map_err(anyhow::Error::msg)?;
    eprintln!(
        "p2pmem-perf: {:?} of {}, {} messages each, {} NICs",
        test.mode,
        sizes_of(&test),
        test.iterations,
        test.nics
    );
    let payloads = (test.mode == Mode::Tcp)
        .then(|| PayloadListener::new(&args.listen))
        .transpose()?;
    let mut sessions = sessions(&test, Role::Server, own, nics)?;
    control.send(&FromServer::Welcome {
        version: VERSION,
        space: test.space,
        payload: payloads.as_ref().map(PayloadListener::port),
        side: side(&sessions, own),
        endpoints: sessions.iter().map(|session| session.endpoint().clone()).collect(),
    })?;
    let FromClient::Connect(endpoints) = control.receive()? else {
        bail!("expected the message `connect` of the client");
    };
    connect(&mut sessions, endpoints)?;
    if let Some(payloads) = payloads {
        for (session, payload) in sessions.iter_mut().zip(payloads.accept(test.nics, own.side.timeout)?) {
            session.set_payload(payload);
        }
    }
    control.send(&FromServer::Ready)?;
    for expected in &test.sizes {
        match control.receive()? {
            FromClient::Start(size) if size == *expected => {}
            other => bail!("the client sent {other:?}; expected the start of messages of {expected} bytes"),
        }
        one_size(control, &sessions, *expected, own)?;
    }
    match control.receive()? {
        FromClient::Bye => Ok(()),
        other => bail!("the client sent {other:?} after the last size; expected `bye`"),
    }
}

/// Returns the server's options for a test. If the client chooses the memory, it also chooses the provider: the server's
/// own may be of another kind.
fn own_args(own: &OwnArgs, test: &Test) -> Result<OwnArgs> {
    let mut own = with_peer_memory(own, test.peer.as_ref())?;
    if let Some(how) = test.peer_waits {
        own.side.set_how(how);
    }
    Ok(own)
}

/// Returns the server's options with the memory that the client has chosen.
///
/// # Errors
///
/// This version of the program does not know the kind of memory.
pub fn with_peer_memory(own: &OwnArgs, peer: Option<&PeerMemory>) -> Result<OwnArgs> {
    let mut own = own.clone();
    if let Some(peer) = peer {
        own.memory = peer.kind().map_err(anyhow::Error::msg)?;
        own.device.clone_from(&peer.device);
    }
    Ok(own)
}

/// Runs the messages of one size, from `start` to `finished`.
fn one_size(control: &mut Control, sessions: &[NicSession], size: u64, own: &OwnArgs) -> Result<()> {
    sessions.iter().try_for_each(|session| session.prepare(size))?;
    let before = process_time();
    control.send(&FromServer::Started)?;
    let (stop, finished) = (Stop::default(), AtomicBool::new(false));
    let served = thread::scope(|scope| {
        let (send, results) = mpsc::channel();
        for (index, session) in sessions.iter().enumerate() {
            let (send, stop, finished) = (send.clone(), &stop, &finished);
            scope.spawn(move || {
                let served = session.serve(size, own, stop, finished);
                // The receiver lives until the scope ends.
                let _ = send.send((index, served));
            });
        }
        let all = until_finished(control, &results, sessions, own, &finished);
        if all.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        all
    })?;
    let process = process_time() - before;
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let found = sessions.iter().zip(served).map(|(session, served)| {
        Ok(ServerResult {
            checked: session.check(size, served.checked.as_ref())?,
            copied: served.copied,
            cpu_ns: served.cpu.map(ns),
            process_ns: ns(process),
        })
    });
    control.send(&FromServer::Finished(found.collect::<Result<_>>()?))
}

/// Waits until the client has sent `finish`, which sets `over`, and all sessions are done. Returns what each session did.
fn until_finished(
    control: &mut Control,
    results: &mpsc::Receiver<(usize, Result<Served>)>,
    sessions: &[NicSession],
    own: &OwnArgs,
    over: &AtomicBool,
) -> Result<Vec<Served>> {
    let mut all_served: Vec<Option<Served>> = vec![None; sessions.len()];
    let (mut finished, mut heard) = (false, Instant::now());
    loop {
        while let Ok((index, served)) = results.try_recv() {
            all_served[index] = Some(served.with_context(|| sessions[index].nic().name().to_owned())?);
        }
        if finished {
            if let Some(all) = all_served.iter().cloned().collect() {
                return Ok(all);
            }
        }
        match control.receive_within(POLL_WAIT)? {
            Some(FromClient::Alive) if !finished => heard = Instant::now(),
            Some(FromClient::Finish) if !finished => {
                (finished, heard) = (true, Instant::now());
                over.store(true, Ordering::Relaxed);
            }
            Some(other) => bail!("the client sent {other:?} while messages were in flight"),
            None => ensure!(
                heard.elapsed() < own.side.timeout,
                "no message of the client for {:?}: does the client hang? --timeout sets the limit",
                own.side.timeout
            ),
        }
    }
}

/// Returns the bytes of memory that this side has for each NIC in a test.
///
/// # Errors
///
/// No memory of the kind exists; the message says what to do. Those of `proceed`, which is called during the wait for
/// memory that is cleared.
pub fn space(own: &OwnArgs, nics: &[Arc<Nic>], test: &Test, proceed: memory::Proceed<'_>) -> Result<u64> {
    let options = MemoryOptions {
        kind: own.memory,
        provider: own.device.as_deref(),
        device: &own.side.dev_path,
    };
    let names: Vec<_> = nics.iter().map(|nic| nic.name()).collect();
    let wanted = Wanted {
        bytes: test.wanted_bytes(),
        deadline: Instant::now() + CLEARING_WAIT.min(own.side.timeout / 2),
    };
    let space = memory::space(options, &names, wanted, proceed)?;
    if !test.staged && test.mode != Mode::Rpc {
        return Ok(space);
    }
    // Staged messages and calls move through as much host memory.
    let kind = MemoryKind::Cpu;
    let host = memory::space(MemoryOptions { kind, ..options }, &names, wanted, proceed)?;
    Ok(space.min(host / 2))
}

/// Creates a session for each NIC.
///
/// # Errors
///
/// The two sides have different numbers of NICs, or a NIC is not usable.
pub fn sessions(test: &Test, role: Role, own: &OwnArgs, nics: Vec<Arc<Nic>>) -> Result<Vec<NicSession>> {
    ensure!(
        nics.len() == test.nics,
        "the client uses {} NICs and this server {}: select the same number on both (--nic)",
        test.nics,
        nics.len()
    );
    let sessions: Vec<NicSession> = nics
        .into_iter()
        .enumerate()
        .map(|(index, nic)| NicSession::new(nic, index, test, role, own))
        .collect::<Result<_>>()?;
    for session in &sessions {
        eprintln!("p2pmem-perf: {}", describe(session));
    }
    Ok(sessions)
}

/// Connects each session to its counterpart.
///
/// # Errors
///
/// Those of [`check_endpoints`] and [`NicSession::connect`].
pub fn connect(sessions: &mut [NicSession], endpoints: Vec<crate::wire::Endpoint>) -> Result<()> {
    check_endpoints(&endpoints, sessions.len())?;
    sessions
        .iter_mut()
        .zip(endpoints)
        .try_for_each(|(session, endpoint)| session.connect(endpoint))
}

/// Returns the description of this side's memory.
pub fn side(sessions: &[NicSession], own: &OwnArgs) -> Side {
    let providers = sessions.iter().filter_map(|session| session.memory().provider());
    Side {
        nics: sessions.iter().map(|session| session.nic().name().to_owned()).collect(),
        memory: own.memory.name().to_owned(),
        providers: providers.map(|provider| provider.addr.to_string()).collect(),
        registration: sessions
            .first()
            .map(|session| session.memory().method())
            .unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::waiter::How;
    use clap::Parser;

    fn own(line: &str) -> OwnArgs {
        let Command::Serve(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("not serve")
        };
        args.own
    }

    fn test(line: &str) -> Test {
        let Command::Run(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("not run")
        };
        args.test(1)
    }

    #[test]
    fn the_client_may_choose_the_servers_memory() {
        let own = own("p2pmem-perf serve --memory accelerator --device 2 --events");
        let kept = own_args(&own, &test("p2pmem-perf run host")).unwrap();
        assert_eq!(
            (kept.memory, kept.device.as_deref()),
            (MemoryKind::Accelerator, Some("2"))
        );
        let chosen = own_args(&own, &test("p2pmem-perf run host --peer-memory fpga")).unwrap();
        assert_eq!((chosen.memory, chosen.device), (MemoryKind::Fpga, None));
        assert!(chosen.side.events);
        let waits = own_args(&own, &test("p2pmem-perf run host --peer-waits adaptive")).unwrap();
        assert_eq!(
            (waits.side.how(), waits.memory),
            (How::Adaptive, MemoryKind::Accelerator)
        );
        let chosen = own_args(&own, &test("p2pmem-perf run host --peer-memory cmb --peer-device 5")).unwrap();
        assert_eq!((chosen.memory, chosen.device.as_deref()), (MemoryKind::Cmb, Some("5")));
    }
}
