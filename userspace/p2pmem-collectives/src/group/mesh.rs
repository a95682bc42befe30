// SPDX-License-Identifier: MIT OR Apache-2.0

//! Connects each rank to each other rank by TCP. A rank connects to all ranks with a higher number, and accepts the connections of all
//! ranks with a lower number.
//!
//! Connections of strangers do not hinder the ranks: their number and the time for their first words are limited, and they are closed
//! without an answer to a wrong proof. A rank tries all addresses of another rank at the same time, and again until the limit: an
//! address may belong to a network that only the other host sees.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{self, sockopt, AddressFamily, RecvFlags, SocketFlags, SocketType};

use super::directory::Directory;
use super::failure::{list, name, printable, ABORT, MAX_FAILURE, MAX_REASON};
use super::frame::{Decoder, Message};
use super::handshake::{fill_random, is_proof, proof, Hello, Side, Token, HELLO, PROOF, WELCOME};
use super::options::GroupOptions;
use super::record::{host_addresses, Record};

/// Longest time for the first words of a connection, which a rank sends immediately, and for one try to connect.
const FIRST_WORDS: Duration = Duration::from_secs(5);
/// Pause between two tries to connect to an address.
const RETRY: Duration = Duration::from_millis(200);
/// Longest sleep while ranks connect.
const MAX_SLEEP: Duration = Duration::from_millis(100);
/// Most connections of unknown sides, in addition to one for each rank. The oldest one is closed first.
const MAX_UNKNOWN: usize = 64;
/// Bytes of the receive buffer of a connection: a rank sends at most two values ahead, which never block the sender.
pub(crate) const BUFFER: usize = 512 << 10;

/// The connected ranks of a job.
#[derive(Debug)]
pub(crate) struct Mesh {
    pub(crate) rank: usize,
    /// How messages name each rank.
    pub(crate) names: Vec<String>,
    /// The connection to each other rank. Does not block.
    pub(crate) streams: Vec<Option<TcpStream>>,
}

impl Mesh {
    /// Finds the other ranks through the directory, and connects to them.
    ///
    /// # Errors
    ///
    /// A rank did not join within the limit, cannot be reached, or has another version.
    pub(crate) fn connect(directory: &mut dyn Directory, options: &GroupOptions) -> Result<Self> {
        let deadline = Instant::now() + options.limit;
        let (rank, ranks) = (directory.rank(), directory.ranks());
        if rank >= ranks || u32::try_from(ranks).is_err() {
            bail!("the directory of the job says that this is rank {rank} of {ranks} ranks");
        }
        let (listener, addresses) = listen(options.address)?;
        let mut token = Token::default();
        fill_random(&mut token)?;
        let host = match &options.host {
            Some(host) => host.clone(),
            None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        };
        let port = listener.local_addr()?.port();
        let own = Record::new(&host, port, addresses, (rank == 0).then_some(&token));
        let records = directory.exchange(&own.encode()?, options.limit)?;
        if records.len() != ranks {
            bail!(
                "the directory of the job has values of {} ranks, not of {ranks}",
                records.len()
            );
        }
        let records = records
            .iter()
            .enumerate()
            .map(|(rank, bytes)| Record::decode(rank, bytes))
            .collect::<Result<Vec<_>>>()?;
        let mut joining = Joining {
            rank,
            names: records
                .iter()
                .enumerate()
                .map(|(rank, record)| name(rank, &record.host))
                .collect(),
            token: records[0].token()?,
            options,
            streams: (0..ranks).map(|_| None).collect(),
            leaving: vec![false; ranks],
            targets: records
                .iter()
                .enumerate()
                .skip(rank + 1)
                .map(|(rank, record)| Target::new(rank, record))
                .collect(),
            unknown: Vec::new(),
            listener,
        };
        match joining.run(deadline) {
            Ok(()) => Ok(Self {
                rank,
                names: joining.names,
                streams: joining.streams,
            }),
            Err(error) => {
                joining.notify(&error);
                Err(error)
            }
        }
    }
}

/// Listens on a free port. Returns the addresses by which others reach it.
fn listen(address: Option<IpAddr>) -> Result<(TcpListener, Vec<IpAddr>)> {
    let (binds, addresses): (Vec<IpAddr>, _) = match address {
        Some(address) => (vec![address], vec![address]),
        None => {
            let addresses = host_addresses()?;
            let binds = match addresses.first() {
                Some(only) if addresses.iter().all(IpAddr::is_loopback) => vec![*only],
                // The first one accepts IPv4, too, and fails if IPv6 is turned off.
                _ => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
            };
            (binds, addresses)
        }
    };
    let mut result = Err(anyhow!("no address"));
    for bind in binds {
        result = listen_on(bind).with_context(|| format!("listening on {bind}: is it an address of this host?"));
        if result.is_ok() {
            break;
        }
    }
    Ok((result?, addresses))
}

/// Creates a socket that does not block.
fn socket(address: IpAddr) -> io::Result<std::os::fd::OwnedFd> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Before the connection, because the size determines the window. The kernel may give less.
    sockopt::set_socket_recv_buffer_size(&socket, BUFFER)?;
    Ok(socket)
}

fn listen_on(address: IpAddr) -> io::Result<TcpListener> {
    let socket = socket(address)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    net::bind(&socket, &SocketAddr::new(address, 0))?;
    net::listen(&socket, 1024)?;
    Ok(socket.into())
}

/// Starts a connection.
fn start(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = socket(address.ip())?;
    match net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Sets the options of a connection between two ranks.
fn tune(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    // The kernel asks a silent side each second, and ends the connection if nothing arrives for this time.
    let seconds = u32::try_from(silence.as_secs()).unwrap_or(u32::MAX).clamp(2, 3600);
    let second = Duration::from_secs(1);
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, second)?;
    sockopt::set_tcp_keepintvl(stream, second)?;
    sockopt::set_tcp_keepcnt(stream, (seconds - 1).min(127))?;
    sockopt::set_tcp_user_timeout(stream, seconds * 1000)?;
    Ok(())
}

/// The first words of one connection, in both directions.
#[derive(Debug)]
struct Words {
    stream: TcpStream,
    pending: Vec<u8>,
    got: Vec<u8>,
}

impl Words {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            pending: Vec::new(),
            got: Vec::new(),
        }
    }

    /// Sends what is pending, and reads until `count` bytes are there. Returns whether they are.
    fn step(&mut self, count: usize) -> io::Result<bool> {
        while !self.pending.is_empty() {
            match unblocked(self.stream.write(&self.pending))? {
                Some(sent) => drop(self.pending.drain(..sent)),
                None => return Ok(false),
            }
        }
        // Not more than that: messages may follow.
        while self.got.len() < count {
            let mut bytes = [0; HELLO + PROOF];
            let most = (count - self.got.len()).min(bytes.len());
            match unblocked(self.stream.read(&mut bytes[..most]))? {
                Some(0) => {
                    return Err(io::Error::new(
                        ErrorKind::UnexpectedEof,
                        "the other side closed the connection",
                    ))
                }
                Some(read) => self.got.extend(&bytes[..read]),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    fn wants(&self) -> PollFlags {
        if self.pending.is_empty() {
            PollFlags::IN
        } else {
            PollFlags::IN | PollFlags::OUT
        }
    }
}

/// Returns the number of bytes moved; `None` if the socket is not ready.
fn unblocked(moved: io::Result<usize>) -> io::Result<Option<usize>> {
    match moved {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A connection that arrived, of a side that has not proved that it is a rank.
#[derive(Debug)]
struct Unknown {
    words: Words,
    deadline: Instant,
    /// The rank of its hello, and the hello of this rank.
    claim: Option<(usize, [u8; HELLO])>,
}

/// A rank with a higher number.
#[derive(Debug)]
struct Target {
    rank: usize,
    tries: Vec<Try>,
    /// Whether one of the tries has sent its proof. No other one does, so that the other side sees one connection.
    has_proved: bool,
    is_connected: bool,
    /// Why the last try failed.
    problem: Option<String>,
}

/// An address of a rank.
#[derive(Debug)]
struct Try {
    address: SocketAddr,
    next: Instant,
    attempt: Option<Attempt>,
}

/// A connection to an address.
#[derive(Debug)]
struct Attempt {
    words: Words,
    deadline: Instant,
    stage: Stage,
    hello: [u8; HELLO],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Waits for the connection.
    Connect,
    /// Waits for the answer to the hello.
    Answer,
    /// Waits for the welcome.
    Welcome,
}

impl Target {
    fn new(rank: usize, record: &Record) -> Self {
        let now = Instant::now();
        let tries = record.addresses().map(|address| Try {
            address,
            next: now,
            attempt: None,
        });
        Self {
            rank,
            tries: tries.collect(),
            has_proved: false,
            is_connected: false,
            problem: None,
        }
    }

    /// Goes on with all tries. Returns the connection if one of them is complete.
    fn step(&mut self, own: usize, token: &Token) -> Result<Option<TcpStream>> {
        let now = Instant::now();
        for at in 0..self.tries.len() {
            let this = &mut self.tries[at];
            if self.has_proved
                && !this
                    .attempt
                    .as_ref()
                    .is_some_and(|attempt| attempt.stage == Stage::Welcome)
            {
                this.attempt = None;
                continue;
            }
            if this.attempt.is_none() {
                if now < this.next {
                    continue;
                }
                this.next = now + RETRY;
                let hello = Hello {
                    from: own as u32,
                    to: self.rank as u32,
                };
                let hello = hello.encode()?;
                match start(this.address) {
                    Ok(stream) => {
                        this.attempt = Some(Attempt {
                            words: Words::new(stream),
                            deadline: now + FIRST_WORDS,
                            stage: Stage::Connect,
                            hello,
                        });
                    }
                    Err(error) => self.problem = Some(format!("{}: {error}", this.address)),
                }
            }
            let Some(attempt) = &mut this.attempt else { continue };
            let was_proved = attempt.stage == Stage::Welcome;
            match attempt.step(self.rank, own, token) {
                Ok(true) => {
                    self.is_connected = true;
                    let attempt = this.attempt.take();
                    self.tries.clear();
                    return Ok(attempt.map(|attempt| attempt.words.stream));
                }
                // The proof is sent at most once at a time, and then there is no limit but that of the caller: the other side may
                // already regard the connection as complete.
                Ok(false) if attempt.stage == Stage::Welcome => self.has_proved = true,
                Ok(false) if now < attempt.deadline => {}
                failed => {
                    let why = match failed {
                        Err(error) => error.to_string(),
                        Ok(_) => format!("no answer within {FIRST_WORDS:?}"),
                    };
                    self.problem = Some(format!("{}: {why}", this.address));
                    this.next = now + RETRY;
                    this.attempt = None;
                    if was_proved {
                        self.has_proved = false;
                    }
                }
            }
        }
        Ok(None)
    }
}

impl Attempt {
    /// Returns whether the connection is complete.
    fn step(&mut self, rank: usize, own: usize, token: &Token) -> io::Result<bool> {
        if self.stage == Stage::Connect {
            if let Some(error) = self.words.stream.take_error()? {
                return Err(error);
            }
            if self.words.stream.peer_addr().is_err() {
                return Ok(false);
            }
            self.words.pending.extend(self.hello);
            self.stage = Stage::Answer;
        }
        if self.stage == Stage::Answer {
            if !self.words.step(HELLO + PROOF)? {
                return Ok(false);
            }
            let (hello, answer) = self.words.got.split_at(HELLO);
            let expected = Hello {
                from: rank as u32,
                to: own as u32,
            };
            let hellos = [&self.hello[..], hello];
            if Hello::decode(hello) != Some(expected) || !is_proof(answer, token, Side::Listens, hellos) {
                return Err(stranger());
            }
            let own_proof = proof(token, Side::Connects, hellos);
            self.words.pending.extend(own_proof);
            self.words.got.clear();
            self.stage = Stage::Welcome;
        }
        if !self.words.step(1)? {
            return Ok(false);
        }
        match self.words.got[..] {
            [WELCOME] => Ok(true),
            _ => Err(stranger()),
        }
    }
}

fn stranger() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "another program answers")
}

impl Unknown {
    /// Returns the rank, if it has proved that it is one. An error means that the connection is that of a stranger.
    fn step(&mut self, own: usize, token: &Token) -> Result<Option<usize>> {
        if self.claim.is_none() {
            if !self.words.step(HELLO)? {
                return Ok(None);
            }
            let hello = Hello::decode(&self.words.got).context("no hello of this version")?;
            let from = hello.from as usize;
            if hello.to as usize != own || from >= own {
                bail!("a hello to another rank");
            }
            let answer = Hello {
                from: own as u32,
                to: hello.from,
            };
            let answer = answer.encode()?;
            self.words.pending.extend(answer);
            self.words
                .pending
                .extend(proof(token, Side::Listens, [&self.words.got, &answer]));
            self.claim = Some((from, answer));
        }
        let Some((from, answer)) = self.claim else {
            return Ok(None);
        };
        if !self.words.step(HELLO + PROOF)? {
            return Ok(None);
        }
        let (hello, answered) = self.words.got.split_at(HELLO);
        if !is_proof(answered, token, Side::Connects, [hello, &answer]) {
            bail!("a wrong proof");
        }
        // One byte fits into the buffer of a new connection.
        match self.words.stream.write(&[WELCOME])? {
            1 => Ok(Some(from)),
            _ => bail!("the buffer of a new connection is full"),
        }
    }
}

/// The state while ranks connect.
struct Joining<'a> {
    rank: usize,
    names: Vec<String>,
    token: Token,
    options: &'a GroupOptions,
    listener: TcpListener,
    streams: Vec<Option<TcpStream>>,
    /// Ranks that are connected and have already left, orderly.
    leaving: Vec<bool>,
    targets: Vec<Target>,
    unknown: Vec<Unknown>,
}

impl Joining<'_> {
    fn run(&mut self, deadline: Instant) -> Result<()> {
        while !self.missing().is_empty() {
            self.accept()?;
            for at in 0..self.targets.len() {
                let target = &mut self.targets[at];
                if !target.is_connected {
                    if let Some(stream) = target.step(self.rank, &self.token)? {
                        let rank = target.rank;
                        self.establish(rank, stream)?;
                    }
                }
            }
            let missing = self.missing();
            if missing.is_empty() {
                // The group handles what has arrived.
                break;
            }
            self.check()?;
            if Instant::now() >= deadline {
                return Err(self.overdue(&missing));
            }
            self.sleep(deadline)?;
        }
        Ok(())
    }

    /// Returns the ranks that are not connected.
    fn missing(&self) -> Vec<usize> {
        let is_missing = |rank: &usize| *rank != self.rank && self.streams[*rank].is_none();
        (0..self.names.len()).filter(is_missing).collect()
    }

    /// Returns the error for ranks that are not connected in time.
    fn overdue(&self, missing: &[usize]) -> anyhow::Error {
        let names: Vec<&str> = missing.iter().map(|rank| self.names[*rank].as_str()).collect();
        let problem = self
            .targets
            .iter()
            .find_map(|target| target.problem.as_ref().filter(|_| !target.is_connected));
        let why = match problem {
            Some(problem) => problem.clone(),
            None => {
                let port = self.listener.local_addr().map_or(0, |address| address.port());
                format!("nothing arrived at port {port} of this host")
            }
        };
        anyhow!(
            "{} did not join within {:?} ({why}): does a firewall block the connections between the ranks?",
            list(&names),
            self.options.limit
        )
    }

    /// Accepts connections, and goes on with those that have not proved anything.
    fn accept(&mut self) -> Result<()> {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if self.unknown.len() >= MAX_UNKNOWN + self.names.len() {
                        self.unknown.remove(0);
                    }
                    if stream.set_nonblocking(true).is_ok() {
                        self.unknown.push(Unknown {
                            words: Words::new(stream),
                            deadline: Instant::now() + FIRST_WORDS,
                            claim: None,
                        });
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => return Err(error).context("accepting the connections of other ranks"),
            }
        }
        for mut unknown in std::mem::take(&mut self.unknown) {
            match unknown.step(self.rank, &self.token) {
                Ok(Some(rank)) if self.streams[rank].is_none() => self.establish(rank, unknown.words.stream)?,
                Ok(None) if Instant::now() < unknown.deadline => self.unknown.push(unknown),
                // A stranger, a side that is too slow, or a second connection. A rank that is not welcome tries again.
                _ => {}
            }
        }
        Ok(())
    }

    fn establish(&mut self, rank: usize, stream: TcpStream) -> Result<()> {
        tune(&stream, self.options.silence).with_context(|| format!("the connection to {}", self.names[rank]))?;
        self.streams[rank] = Some(stream);
        Ok(())
    }

    /// Returns an error if a rank that is connected has ended or has failed. Its messages stay in the buffer. The reason of one rank
    /// comes before the end of another one, which may be its consequence.
    fn check(&mut self) -> Result<()> {
        let mut bytes = vec![0; BUFFER];
        let mut ended = None;
        for (rank, stream) in self.streams.iter().enumerate() {
            let Some(stream) = stream.as_ref().filter(|_| !self.leaving[rank]) else {
                continue;
            };
            // Before the messages are read: all that was sent before the end has arrived then.
            let mut set = [PollFd::new(stream, PollFlags::RDHUP)];
            let has_ended = poll(&mut set, Some(&Timespec::default())).unwrap_or(0) > 0;
            let count = match net::recv(stream, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((count, _)) => count.min(bytes.len()),
                Err(_) => 0,
            };
            let mut decoder = Decoder::default();
            decoder.feed(&bytes[..count]);
            while let Ok(Some(message)) = decoder.next() {
                match message {
                    Message::Bye => self.leaving[rank] = true,
                    Message::Failed { what, .. } => bail!("{}", printable(&what, MAX_FAILURE)),
                    _ => {}
                }
            }
            if has_ended && !self.leaving[rank] {
                ended.get_or_insert(rank);
            }
        }
        match ended {
            Some(rank) => bail!("{} ended before all ranks had joined", self.names[rank]),
            None => Ok(()),
        }
    }

    /// Sleeps until a connection is ready, at most [`MAX_SLEEP`].
    fn sleep(&self, deadline: Instant) -> Result<()> {
        let mut set = vec![PollFd::new(&self.listener, PollFlags::IN)];
        set.extend(
            self.unknown
                .iter()
                .map(|unknown| PollFd::new(&unknown.words.stream, unknown.words.wants())),
        );
        for attempt in self
            .targets
            .iter()
            .flat_map(|target| &target.tries)
            .filter_map(|this| this.attempt.as_ref())
        {
            let wants = match attempt.stage {
                Stage::Connect => PollFlags::OUT,
                _ => attempt.words.wants(),
            };
            set.push(PollFd::new(&attempt.words.stream, wants));
        }
        for (rank, stream) in self.streams.iter().enumerate() {
            if let Some(stream) = stream.as_ref().filter(|_| !self.leaving[rank]) {
                set.push(PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::RDHUP));
            }
        }
        let sleep = deadline.saturating_duration_since(Instant::now()).min(MAX_SLEEP);
        let sleep = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(sleep.subsec_nanos()),
        };
        match poll(&mut set, Some(&sleep)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("waiting for the connections of other ranks"),
        }
    }

    /// Sends the reason to the ranks that are connected, so that they do not wait for their limit. Waits for a short time until they
    /// have read it: a connection that is closed before may end without what was sent last.
    fn notify(&self, error: &anyhow::Error) {
        let mut bytes = Vec::new();
        let message = Message::Failed {
            rank: self.rank as u32,
            what: format!(
                "{} stopped: {}",
                self.names[self.rank],
                printable(&format!("{error:#}"), MAX_REASON)
            ),
        };
        message.encode(&mut bytes);
        let mut waiting: Vec<&TcpStream> = self.streams.iter().flatten().collect();
        // The buffer of a new connection has space. If the connection fails, the other side sees its end.
        waiting.retain(|stream| {
            let mut stream = *stream;
            stream.write_all(&bytes).is_ok() && stream.shutdown(Shutdown::Write).is_ok()
        });
        let deadline = Instant::now() + ABORT;
        let mut bytes = [0; 4096];
        while !waiting.is_empty() {
            let rest = deadline.saturating_duration_since(Instant::now());
            let mut set: Vec<PollFd<'_>> = waiting
                .iter()
                .map(|stream| PollFd::new(*stream, PollFlags::IN))
                .collect();
            let rest = Timespec {
                tv_sec: rest.as_secs() as i64,
                tv_nsec: rest.subsec_nanos().into(),
            };
            if matches!(poll(&mut set, Some(&rest)), Ok(0)) {
                return;
            }
            // The other side closes the connection when it has read the reason.
            waiting.retain(|stream| {
                let mut stream = *stream;
                !matches!(unblocked(stream.read(&mut bytes)), Ok(Some(0)) | Err(_))
            });
        }
    }
}
