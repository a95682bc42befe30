// SPDX-License-Identifier: MIT OR Apache-2.0

//! `run`: connects to a server and measures.

use std::cell::RefCell;
use std::fmt;
use std::io::{ErrorKind, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{bail, ensure, Context, Result};
use indicatif::ProgressBar;
use p2pmem::short_size;
use p2pmem_payload::nic::open_nics;
use p2pmem_verbs::Nic;

use crate::cli::{OwnArgs, RunArgs};
use crate::observer::Observer;
use crate::print_json;
use crate::progress;
use crate::report::{NicResult, Report, SizeResult};
use crate::server::{connect, sessions, side, space};
use crate::session::{is_target, NicSession, Ran, Role};
use crate::stats::{Latency, Speed, Times};
use crate::tcp::Payload;
use crate::waiter::Stop;
use crate::wire::{reason, Control, FromClient, FromServer, Message, Mode, ServerResult, Test, VERSION};

/// Longest time between two messages that report to the server that the test continues.
const ALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// Time between two reports to the observer.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Wait for a message of the server between two checks of the sessions.
const POLL_WAIT: Duration = Duration::from_millis(1);
/// Longest attempt to connect. Limits the time until a stop request is noticed.
const CONNECT_SLICE: Duration = Duration::from_secs(1);
/// Wait before the next attempt to connect to a server that refused the connection.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Runs the test and prints the results. Returns whether no wrong byte was found.
///
/// # Errors
///
/// Any error of the test. The message says what to do.
pub fn run(args: &RunArgs, json: bool, out: &mut dyn Write) -> Result<bool> {
    let terminal = Terminal {
        json,
        out: RefCell::new(out),
        bar: RefCell::new(ProgressBar::hidden()),
        nics: RefCell::new(1),
    };
    let report = measure(args, &terminal);
    terminal.bar.borrow().finish_and_clear();
    let report = report?;
    if json {
        print_json(*terminal.out.borrow_mut(), &report)?;
    }
    Ok(report.is_correct())
}

/// Shows a test on the terminal: a progress bar, and the lines of each size as soon as they are known.
struct Terminal<'a> {
    json: bool,
    out: RefCell<&'a mut dyn Write>,
    bar: RefCell<ProgressBar>,
    nics: RefCell<u64>,
}

impl Observer for Terminal<'_> {
    fn ready(&self, report: &Report) -> Result<()> {
        self.nics.replace(report.client.nics.len() as u64);
        if !self.json {
            writeln!(self.out.borrow_mut(), "{}", report.heading())?;
        }
        Ok(())
    }

    fn size_starts(&self, bytes: u64, messages: u64) -> Result<()> {
        let bar = progress::bar("messages", messages * *self.nics.borrow(), self.json);
        bar.set_message(short_size(bytes));
        self.bar.replace(bar);
        Ok(())
    }

    fn progress(&self, done: &[u64]) -> Result<()> {
        self.bar.borrow().set_position(done.iter().sum());
        Ok(())
    }

    fn size_ends(&self, result: &SizeResult) -> Result<()> {
        self.bar.borrow().finish_and_clear();
        if !self.json {
            let mut out = self.out.borrow_mut();
            Report::lines(result, *out)?;
            out.flush()?;
        }
        Ok(())
    }
}

/// Runs the test, and reports to `observer` meanwhile.
///
/// # Errors
///
/// Any error of the test, and those of the observer. The message says what to do.
pub fn measure(args: &RunArgs, observer: &dyn Observer) -> Result<Report> {
    measure_on(args, open_nics(&args.own.side.nic)?, observer)
}

/// As [`measure`], with these NICs.
///
/// # Errors
///
/// Those of [`measure`].
pub(crate) fn measure_on(args: &RunArgs, nics: Vec<Arc<Nic>>, observer: &dyn Observer) -> Result<Report> {
    // Errors that need no server are reported before the first message to the server.
    let mut test = args.test(nics.len());
    test.check().map_err(anyhow::Error::msg)?;
    test.space = space(&args.own, &nics, &test, &|| observer.proceed())?;
    let stream = reach_while(&args.host, args.port, args.own.side.timeout, &|| observer.proceed())?;
    let mut control = Control::new(stream, args.own.side.timeout)?;
    let measured = run_test(&mut control, args, test, nics, observer);
    if let Err(error) = &measured {
        // The peer may have disconnected; then `error` says so.
        let _ = control.send(&FromClient::Failed(reason(error)));
    }
    measured
}

/// The error of a server that does not accept connections.
#[derive(Debug)]
pub struct Unreachable(pub(crate) String);

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Connects to the server. Repeats attempts that are refused or not answered until the limit ends: the server may start later.
///
/// # Errors
///
/// The server is not reached within the limit.
pub fn reach(host: &str, port: u16, limit: Duration) -> Result<TcpStream> {
    reach_while(host, port, limit, &|| Ok(()))
}

/// Connects to the server as [`reach`], as long as `proceed` succeeds.
///
/// # Errors
///
/// Those of [`reach`] and of `proceed`.
pub fn reach_while(host: &str, port: u16, limit: Duration, proceed: &dyn Fn() -> Result<()>) -> Result<TcpStream> {
    let deadline = Instant::now() + limit;
    let addresses: Vec<_> = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("cannot resolve the host name {host}"))?
        .collect();
    loop {
        let mut last = None;
        for address in &addresses {
            proceed()?;
            let left = deadline.saturating_duration_since(Instant::now()).max(RETRY_DELAY);
            match TcpStream::connect_timeout(address, left.min(CONNECT_SLICE)) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some(error),
            }
        }
        let kind = last.as_ref().map(std::io::Error::kind);
        let again = matches!(kind, Some(ErrorKind::ConnectionRefused | ErrorKind::TimedOut));
        if !again || Instant::now() >= deadline {
            let error = last.map_or_else(|| anyhow::anyhow!("the host has no address"), anyhow::Error::new);
            return Err(error).context(Unreachable(format!(
                "cannot connect to {host}, port {port}, within {limit:?}: does `p2pmem-perf serve` run there?"
            )));
        }
        // An attempt without an answer has waited already.
        if kind == Some(ErrorKind::ConnectionRefused) {
            thread::sleep(RETRY_DELAY);
        }
    }
}

/// Waits for a message of the server. A stop request ends the wait.
fn receive<M: Message>(control: &mut Control, limit: Duration, observer: &dyn Observer) -> Result<M> {
    let deadline = Instant::now() + limit;
    loop {
        observer.proceed()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(message) = control.receive_within(left.min(PROGRESS_INTERVAL))? {
            return Ok(message);
        }
        ensure!(
            Instant::now() < deadline,
            "no message of the other side for {limit:?}: does it hang? --timeout sets the limit"
        );
    }
}

fn run_test(
    control: &mut Control,
    args: &RunArgs,
    mut test: Test,
    nics: Vec<Arc<Nic>>,
    observer: &dyn Observer,
) -> Result<Report> {
    let limit = args.own.side.timeout;
    control.send(&FromClient::Hello {
        version: VERSION,
        test: test.clone(),
    })?;
    let FromServer::Welcome {
        version,
        space,
        payload,
        side: server,
        endpoints,
    } = receive(control, limit, observer)?
    else {
        bail!("expected the message `welcome` of the server");
    };
    ensure!(
        version == VERSION,
        "the server has protocol version {version}, this client {VERSION}: use the same p2pmem-perf on both sides"
    );
    ensure!(
        space <= test.space,
        "the server wants to use {space} bytes of memory, more than this side has"
    );
    test.space = space;
    test.check_space().map_err(anyhow::Error::msg)?;
    let test = &test;
    let mut sessions = sessions(test, Role::Client, &args.own, nics)?;
    connect(&mut sessions, endpoints)?;
    if test.mode == Mode::Tcp {
        let at = payload.context("the server has no port for the payload")?;
        for (index, session) in sessions.iter_mut().enumerate() {
            let proceed = &|| observer.proceed();
            session.set_payload(Payload::connect(&args.host, at, index, limit, proceed)?);
        }
    }
    control.send(&FromClient::Connect(
        sessions.iter().map(|session| session.endpoint().clone()).collect(),
    ))?;
    let FromServer::Ready = receive(control, limit, observer)? else {
        bail!("expected the message `ready` of the server");
    };
    let mut report = Report::new(test.clone(), side(&sessions, &args.own), server);
    observer.ready(&report)?;
    for size in &test.sizes {
        let result = one_size(control, &sessions, *size, &args.own, observer)?;
        observer.size_ends(&result)?;
        report.results.push(result);
    }
    control.send(&FromClient::Bye)?;
    Ok(report)
}

/// Runs the messages of one size on all NICs at the same time.
fn one_size(
    control: &mut Control,
    sessions: &[NicSession],
    size: u64,
    own: &OwnArgs,
    observer: &dyn Observer,
) -> Result<SizeResult> {
    sessions.iter().try_for_each(|session| session.prepare(size))?;
    control.send(&FromClient::Start(size))?;
    let FromServer::Started = receive(control, own.side.timeout, observer)? else {
        bail!("expected the message `started` of the server");
    };
    // All NICs have the same number of messages.
    observer.size_starts(
        size,
        sessions.first().map_or(0, |session| session.test().messages(size)),
    )?;
    let started = SystemTime::now();
    let done = run_sessions(control, sessions, size, own, observer)?;
    control.send(&FromClient::Finish)?;
    let FromServer::Finished(found) = receive(control, own.side.timeout, observer)? else {
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
    let nics = nics.map(|((session, ran), found)| {
        check_result(session.test(), size, &found)?;
        result(session, size, ran, found)
    });
    let nics = nics.collect::<Result<_>>()?;
    let mut result = SizeResult::new(Speed::of_all(size, &times), Latency::new(&times), nics);
    let test = sessions.first().map(NicSession::test);
    // A clock before 1970 is wrong anyway.
    let since = started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    result.started_unix_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    result.window = test.map(|test| test.chunk(size)).filter(|chunk| *chunk < size);
    Ok(result)
}

/// Checks what the server reports for the messages of `size` bytes on one NIC.
///
/// # Errors
///
/// The server did not compare its memory although the test requests this, or reports more copied bytes than all messages
/// have.
fn check_result(test: &Test, size: u64, found: &ServerResult) -> Result<()> {
    ensure!(
        !test.verify || !is_target(test.mode, Role::Server) || found.checked.is_some(),
        "the server did not compare its memory, as --verify requests: use the same p2pmem-perf on both sides"
    );
    let most = test.messages(size).saturating_mul(size);
    ensure!(
        found.copied <= most,
        "the server reports {} copied bytes, and all messages have {most}: use the same p2pmem-perf on both sides",
        found.copied
    );
    Ok(())
}

fn result(session: &NicSession, size: u64, ran: &Ran, found: ServerResult) -> Result<NicResult> {
    // There is at least one message.
    let each = |nanoseconds: f64| nanoseconds / 1e3 / ran.times.done.len().max(1) as f64;
    Ok(NicResult {
        nic: session.nic().name().to_owned(),
        speed: Speed::new(size, &ran.times),
        latency: Latency::new([&ran.times]),
        cpu_us_client: each(ran.cpu.as_nanos() as f64),
        cpu_us_server: found.cpu_ns.map(|ns| each(ns as f64)),
        process_us_server: each(found.process_ns as f64),
        copied_client: ran.copied,
        copied_server: found.copied,
        // Exactly one of the two sides is the target.
        checked: session.check(size, ran.checked.as_ref())?.or(found.checked),
    })
}

/// Runs all sessions, and reports to the observer and, less often, to the server that the test continues.
fn run_sessions(
    control: &mut Control,
    sessions: &[NicSession],
    size: u64,
    own: &OwnArgs,
    observer: &dyn Observer,
) -> Result<Vec<Ran>> {
    let stop = Stop::default();
    let progress: Vec<AtomicU64> = sessions.iter().map(|_| AtomicU64::new(0)).collect();
    let done = || -> Vec<u64> { progress.iter().map(|done| done.load(Ordering::Relaxed)).collect() };
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
        let (mut notified, mut stopped) = (start, false);
        let mut watch = || -> Result<()> {
            while all.iter().any(Option::is_none) {
                match results.recv_timeout(PROGRESS_INTERVAL) {
                    Ok((index, done)) => {
                        let name = || sessions[index].nic().name().to_owned();
                        all[index] = Some(done.with_context(name)?);
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        let observed = observer.progress(&done()).and_then(|()| observer.proceed());
                        stopped = observed.is_err();
                        observed?;
                        if notified.elapsed() < ALIVE_INTERVAL {
                            continue;
                        }
                        notified = Instant::now();
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
            if stopped {
                return Err(error);
            }
            // The server's message explains more than the error of the queue pair that the server destroyed.
            let said = control.receive_within::<FromServer>(ALIVE_INTERVAL).err();
            return Err(match said {
                Some(said) => error.context(format!("{said:#}")),
                None => error,
            });
        }
        // The last report has all messages.
        observer.progress(&done())?;
        Ok(all.into_iter().flatten().collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Times;
    use crate::wire::Side;
    use rustix::net::{bind, getsockname, socket, AddressFamily, SocketType};
    use std::cell::Cell;
    use std::net::TcpListener;

    /// Stops the test at the call with this number.
    struct Stopper(Cell<u32>);

    impl Observer for Stopper {
        fn proceed(&self) -> Result<()> {
            let left = self.0.get();
            ensure!(left > 0, "stopped by the viewer at 10.0.0.9");
            self.0.set(left - 1);
            Ok(())
        }
    }

    #[test]
    fn a_stop_request_ends_the_wait_for_a_silent_server() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut control = Control::new(stream, Duration::from_secs(600)).unwrap();
        let stopper = Stopper(Cell::new(2));
        let error = receive::<FromServer>(&mut control, Duration::from_secs(600), &stopper).unwrap_err();
        assert_eq!(error.to_string(), "stopped by the viewer at 10.0.0.9");
        let silent = Stopper(Cell::new(u32::MAX));
        let error = receive::<FromServer>(&mut control, Duration::from_millis(1), &silent).unwrap_err();
        assert!(error.to_string().contains("--timeout"), "{error}");
    }

    #[test]
    fn a_stop_request_ends_the_attempts_to_connect() {
        // A port that is bound but does not listen refuses connections. The socket keeps the port from other programs.
        let local = "127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap();
        let bound = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&bound, &local).unwrap();
        let port = std::net::SocketAddr::try_from(getsockname(&bound).unwrap())
            .unwrap()
            .port();
        let stopper = Stopper(Cell::new(1));
        let stopped = reach_while("127.0.0.1", port, Duration::from_secs(600), &|| stopper.proceed());
        assert_eq!(stopped.unwrap_err().to_string(), "stopped by the viewer at 10.0.0.9");
    }

    #[test]
    fn the_servers_results_are_checked() {
        let test = |options: &str| {
            let line = format!("p2pmem-perf run host --size 4K -n 10 {options}");
            let cli = <crate::cli::Cli as clap::Parser>::parse_from(line.split_whitespace());
            let crate::cli::Command::Run(args) = cli.command else {
                panic!("not run")
            };
            args.test(1)
        };
        let none = ServerResult::default();
        let error = check_result(&test("--verify"), 4096, &none).unwrap_err().to_string();
        assert!(error.contains("did not compare"), "{error}");
        // The client compares what it reads.
        check_result(&test("--verify --mode read"), 4096, &none).unwrap();
        check_result(&test(""), 4096, &none).unwrap();
        let copied = |copied| ServerResult {
            copied,
            ..ServerResult::default()
        };
        check_result(&test("--staged"), 4096, &copied(40_960)).unwrap();
        for bytes in [40_961, u64::MAX] {
            let error = check_result(&test("--staged"), 4096, &copied(bytes))
                .unwrap_err()
                .to_string();
            assert!(error.contains("copied bytes"), "{error}");
        }
    }

    #[test]
    fn the_terminal_shows_the_heading_and_each_size() {
        let side = Side {
            nics: vec!["mlx5_0".into()],
            memory: "cpu".into(),
            providers: Vec::new(),
            registration: "reg-mr".into(),
        };
        let cli = <crate::cli::Cli as clap::Parser>::parse_from(["p2pmem-perf", "run", "host"]);
        let crate::cli::Command::Run(args) = cli.command else {
            panic!("not run")
        };
        let report = Report::new(args.test(1), side.clone(), side);
        assert_eq!(report.test.mode, Mode::Write);
        let times = Times {
            posted: vec![Duration::ZERO],
            done: vec![Duration::from_millis(1)],
        };
        let nic = NicResult {
            nic: "mlx5_0".into(),
            speed: Speed::new(2 << 20, &times),
            latency: Latency::new([&times]),
            cpu_us_client: 0.0,
            cpu_us_server: None,
            process_us_server: 0.0,
            copied_client: 0,
            copied_server: 0,
            checked: None,
        };
        let result = SizeResult::new(Speed::of_all(2 << 20, &[]), None, vec![nic]);
        let shown = |json| {
            let mut out = Vec::new();
            let terminal = Terminal {
                json,
                out: RefCell::new(&mut out),
                bar: RefCell::new(ProgressBar::hidden()),
                nics: RefCell::new(1),
            };
            terminal.ready(&report).unwrap();
            terminal.size_starts(2 << 20, 1).unwrap();
            terminal.progress(&[1]).unwrap();
            terminal.size_ends(&result).unwrap();
            String::from_utf8(out).unwrap()
        };
        let text = shown(false);
        assert!(text.contains("RDMA WRITE") && text.contains("\n 2097152 "), "{text}");
        assert_eq!(shown(true), "");
    }

    #[test]
    fn a_report_can_be_read_again() {
        let side = Side {
            nics: vec!["mlx5_0".into()],
            memory: "accelerator".into(),
            providers: vec!["0000:03:00.0".into()],
            registration: "dma-buf".into(),
        };
        let cli = <crate::cli::Cli as clap::Parser>::parse_from(["p2pmem-perf", "run", "host", "--staged"]);
        let crate::cli::Command::Run(args) = cli.command else {
            panic!("not run")
        };
        let mut report = Report::new(args.test(1), side.clone(), side);
        let times = Times {
            posted: vec![Duration::ZERO],
            done: vec![Duration::from_millis(1)],
        };
        let speed = Speed::new(2 << 20, &times);
        report
            .results
            .push(SizeResult::new(speed, Latency::new([&times]), Vec::new()));
        let mut text = Vec::new();
        print_json(&mut text, &report).unwrap();
        let read: Report = serde_json::from_slice(&text).unwrap();
        let json = |report: &Report| serde_json::to_value(report).unwrap();
        assert_eq!(json(&read), json(&report));
    }
}
