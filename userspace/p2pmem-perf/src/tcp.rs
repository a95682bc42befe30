// SPDX-License-Identifier: MIT OR Apache-2.0

//! `--mode tcp`: the payload over TCP sockets, as a program without RDMA moves it.
//!
//! The memory and its slots are those of the other modes. The client sends each chunk from its slot, and the server
//! receives each chunk into its slot: the kernels copy between the memory and the sockets, also if the memory is that of a
//! device. The server acknowledges chunks by their number, so a message is done when the server has received its last
//! chunk. Each NIC has a connection of its own for the payload. The program still registers the memory with the NIC and
//! connects a queue pair, as in the other modes, but no message uses them.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem_verbs::Span;
use rustix::event::{poll, PollFd, PollFlags, Timespec};

use crate::client::{reach_while, Unreachable};
use crate::pattern::REVOKED;
use crate::session::Clock;
use crate::sizes::Slots;
use crate::stats::Times;
use crate::waiter::Stop;
use crate::wire::{PayloadPort, MAX_NICS};

/// Bytes of a number on the connection.
const WORD: usize = 8;
/// Longest sleep. Limits the time until a stop request is noticed.
const MAX_SLEEP: Duration = Duration::from_millis(100);
/// Longest wait for the first words of a connection, which a client sends immediately.
const FIRST_WORDS: Duration = Duration::from_secs(5);
/// Error if the connection of the payload ends.
const ENDED: &str = "the other side ended the connection of the payload: see its output";

/// The server's socket for the connections of the payload.
pub struct PayloadListener {
    listener: TcpListener,
    port: PayloadPort,
}

impl PayloadListener {
    /// Listens on a free port of the address.
    ///
    /// # Errors
    ///
    /// The address is not available.
    pub fn new(address: &str) -> Result<Self> {
        let listener = TcpListener::bind((address, 0)).with_context(|| format!("listening on {address}"))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        // The hasher's keys are random.
        let token = RandomState::new().build_hasher().finish();
        Ok(Self {
            listener,
            port: PayloadPort { port, token },
        })
    }

    /// Returns what the client needs to connect.
    pub fn port(&self) -> PayloadPort {
        self.port
    }

    /// Accepts one connection for each NIC, in the order of the NICs. Connections without the token are closed.
    ///
    /// # Errors
    ///
    /// The client does not connect within the limit.
    pub fn accept(&self, nics: usize, limit: Duration) -> Result<Vec<Payload>> {
        let deadline = Instant::now() + limit;
        let mut all: Vec<Option<Payload>> = (0..nics).map(|_| None).collect();
        while all.iter().any(Option::is_none) {
            ensure!(
                Instant::now() < deadline,
                "the client did not connect for the payload within {limit:?}: can it reach port {}?",
                self.port.port
            );
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let first = deadline.min(Instant::now() + FIRST_WORDS);
                    if let Some(index) = self.index(&stream, first) {
                        let place = all.get_mut(index).context("the client has connected too often")?;
                        ensure!(place.is_none(), "the client has connected twice for a NIC");
                        *place = Some(Payload::new(stream)?);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => wait(&self.listener, PollFlags::IN)?,
                Err(error) => return Err(error).context("waiting for the connection of the payload"),
            }
        }
        Ok(all.into_iter().flatten().collect())
    }

    /// Returns the number of the NIC of a connection; `None` if the connection is not that of this client, or its first words
    /// did not arrive before `deadline`.
    fn index(&self, mut stream: &TcpStream, deadline: Instant) -> Option<usize> {
        let mut words = [0; 2 * WORD];
        stream.set_nonblocking(true).ok()?;
        let mut have = 0;
        while have < words.len() {
            if Instant::now() >= deadline {
                return None;
            }
            match ready(stream.read(&mut words[have..])).ok()? {
                Some(0) => return None,
                Some(count) => have += count,
                None => wait(stream, PollFlags::IN).ok()?,
            }
        }
        let (token, index) = words.split_at(WORD);
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
        (word(token)? == self.port.token).then_some(())?;
        usize::try_from(word(index)?).ok().filter(|index| *index < MAX_NICS)
    }
}

/// The connection of the payload of one NIC.
#[derive(Debug)]
pub struct Payload {
    stream: TcpStream,
}

impl Payload {
    fn new(stream: TcpStream) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream })
    }

    /// Connects to the server, for the NIC with the number `index`, as long as `proceed` succeeds.
    ///
    /// # Errors
    ///
    /// The server does not accept the connection within the limit, or those of `proceed`.
    pub fn connect(
        host: &str,
        at: PayloadPort,
        index: usize,
        limit: Duration,
        proceed: &dyn Fn() -> Result<()>,
    ) -> Result<Self> {
        // Without the error's type, which stands for a server that is gone.
        let mut stream = reach_while(host, at.port, limit, proceed).map_err(|error| {
            if error.downcast_ref::<Unreachable>().is_none() {
                return error;
            }
            anyhow::anyhow!("the server's port for the payload is not reachable; does a firewall block it? {error:#}")
        })?;
        stream.set_write_timeout(Some(limit))?;
        let words = [at.token.to_le_bytes(), (index as u64).to_le_bytes()].concat();
        stream
            .write_all(&words)
            .context("sending the first words for the payload")?;
        Self::new(stream)
    }

    /// Sends the chunks of all messages, with at most `depth` chunks that the server has not acknowledged. Returns the times
    /// of the messages and the number of bytes that the processor copied.
    ///
    /// # Errors
    ///
    /// The limit ended without progress, the test was stopped, or the connection ended.
    pub(crate) fn send(
        &self,
        span: &Span,
        slots: &Slots,
        depth: u64,
        mut clock: Clock<'_>,
        limit: Duration,
        stop: &Stop,
    ) -> Result<(Times, u64)> {
        let chunks = clock.chunks();
        // Chunks sent, bytes of the next chunk sent, and chunks acknowledged.
        let (mut sent, mut part, mut done) = (0, 0, 0);
        let mut acknowledged = Numbers::new();
        let mut idle = Idle::new(limit, stop);
        while done < chunks {
            let mut moved = false;
            let may_send = sent < chunks && sent - done < depth;
            if may_send {
                if clock.posted() == sent {
                    clock.post();
                }
                let at = (slots.source_at(sent) + part) as usize;
                if let Some(count) = ready(span.send(at, (slots.size - part) as usize, self.stream.as_fd()))? {
                    moved = true;
                    part += count as u64;
                    if part == slots.size {
                        (sent, part) = (sent + 1, 0);
                    }
                }
            }
            if let Some(number) = acknowledged.read(&self.stream)? {
                ensure!(
                    (done..=sent).contains(&number),
                    "the other side acknowledged {number} chunks: at least {done} and at most {sent} are possible"
                );
                clock.finish(number - done);
                done = number;
                moved = true;
            }
            let mut wants = PollFlags::IN;
            wants.set(PollFlags::OUT, may_send);
            idle.pause(moved, &self.stream, wants, &|| {
                format!("the acknowledgement of chunk {done} of {chunks}")
            })?;
        }
        Ok((clock.times(), chunks * slots.size))
    }

    /// Receives `chunks` chunks, calls `handled` with the number of each, and acknowledges them. Returns the number of bytes that the processor copied.
    ///
    /// # Errors
    ///
    /// The limit ended without progress, the test was stopped, or the connection ended.
    pub(crate) fn receive(
        &self,
        span: &Span,
        slots: &Slots,
        chunks: u64,
        mut handled: impl FnMut(u64) -> Result<()>,
        limit: Duration,
        stop: &Stop,
    ) -> Result<u64> {
        let (mut came, mut part) = (0, 0);
        // Bytes of acknowledgements that are not sent yet.
        let mut pending: Vec<u8> = Vec::new();
        let mut idle = Idle::new(limit, stop);
        while came < chunks || !pending.is_empty() {
            let mut moved = false;
            if came < chunks {
                let at = (slots.target_at(came) + part) as usize;
                if let Some(count) = ready(span.receive(at, (slots.size - part) as usize, self.stream.as_fd()))? {
                    ensure!(count > 0, ENDED);
                    moved = true;
                    part += count as u64;
                    if part == slots.size {
                        handled(came)?;
                        (came, part) = (came + 1, 0);
                        // The bytes are visible to devices before the client knows about them.
                        span.flush();
                        pending.extend(came.to_le_bytes());
                    }
                }
            }
            if !pending.is_empty() {
                if let Some(count) = ready((&self.stream).write(&pending))? {
                    moved = true;
                    pending.drain(..count);
                }
            }
            let mut wants = PollFlags::empty();
            wants.set(PollFlags::IN, came < chunks);
            wants.set(PollFlags::OUT, !pending.is_empty());
            idle.pause(moved, &self.stream, wants, &|| format!("chunk {came} of {chunks}"))?;
        }
        Ok(chunks * slots.size)
    }
}

/// Numbers that arrive in parts.
struct Numbers {
    bytes: [u8; 64 * WORD],
    have: usize,
}

impl Numbers {
    fn new() -> Self {
        Self {
            bytes: [0; 64 * WORD],
            have: 0,
        }
    }

    /// Reads what has arrived. Returns the last complete number, or `None`.
    fn read(&mut self, mut stream: &TcpStream) -> Result<Option<u64>> {
        let Some(count) = ready(stream.read(&mut self.bytes[self.have..]))? else {
            return Ok(None);
        };
        ensure!(count > 0, ENDED);
        self.have += count;
        let whole = self.have - self.have % WORD;
        let last = self.bytes[..whole].last_chunk().map(|word| u64::from_le_bytes(*word));
        self.bytes.copy_within(whole..self.have, 0);
        self.have -= whole;
        Ok(last)
    }
}

/// Waits for the socket, with a limit on the time without progress.
struct Idle<'a> {
    limit: Duration,
    stop: &'a Stop,
    since: Instant,
}

impl<'a> Idle<'a> {
    fn new(limit: Duration, stop: &'a Stop) -> Self {
        Self {
            limit,
            stop,
            since: Instant::now(),
        }
    }

    /// Returns immediately if bytes have moved, otherwise sleeps until the socket is ready.
    fn pause(&mut self, moved: bool, stream: &TcpStream, wants: PollFlags, what: &dyn Fn() -> String) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            bail!("stopped while waiting for {}", what());
        }
        if moved {
            self.since = Instant::now();
            return Ok(());
        }
        ensure!(
            self.since.elapsed() < self.limit,
            "{} did not arrive within {:?}: is the other side running? --timeout sets the limit",
            what(),
            self.limit
        );
        wait(stream, wants)
    }
}

/// Sleeps until the socket is ready, no longer than [`MAX_SLEEP`].
fn wait(socket: &impl AsFd, wants: PollFlags) -> Result<()> {
    let sleep = Timespec {
        tv_sec: 0,
        tv_nsec: i64::from(MAX_SLEEP.subsec_nanos()),
    };
    match poll(&mut [PollFd::new(socket, wants)], Some(&sleep)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("waiting for a socket"),
    }
}

/// Returns the number of bytes moved; `None` if the socket is not ready.
fn ready(moved: std::io::Result<usize>) -> Result<Option<usize>> {
    match moved {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => bail!(ENDED),
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => bail!(REVOKED),
        Err(error) => Err(error).context("moving the payload over TCP"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::{check_target, fill_source, fill_target};
    use crate::sizes::GUARD;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Returns both ends of the connection of a NIC.
    fn pair() -> (Payload, Payload) {
        let listener = PayloadListener::new("127.0.0.1").unwrap();
        let client = Payload::connect("127.0.0.1", listener.port(), 0, LIMIT, &|| Ok(())).unwrap();
        let server = listener.accept(1, LIMIT).unwrap().pop().unwrap();
        (client, server)
    }

    /// Accepts a connection that was made before.
    fn accept_blocking(listener: &TcpListener) -> (TcpStream, std::net::SocketAddr) {
        listener.set_nonblocking(false).unwrap();
        let accepted = listener.accept().unwrap();
        listener.set_nonblocking(true).unwrap();
        accepted
    }

    #[test]
    fn every_byte_arrives_in_its_slot() {
        // (bytes of a chunk, depth, messages, chunks of a message)
        for (size, depth, messages, each) in [(8, 1, 20, 1), (4104, 3, 7, 1), (1 << 20, 4, 3, 5)] {
            let (client, server) = pair();
            let slots = Slots::new(size, depth, 1 << 30);
            let source = Span::host(slots.source_bytes() as usize).unwrap();
            let target = Span::host((slots.target_bytes() + GUARD) as usize).unwrap();
            fill_source(&source, &slots, 5).unwrap();
            fill_target(&target, &slots, GUARD, 5).unwrap();
            let (chunks, stop, progress) = (messages * each, Stop::default(), AtomicU64::new(0));
            let clock = Clock::new(messages, each, Instant::now(), &progress).unwrap();
            let (times, copied) = thread::scope(|scope| {
                let served = scope.spawn(|| server.receive(&target, &slots, chunks, |_| Ok(()), LIMIT, &stop));
                let sent = client.send(&source, &slots, depth, clock, LIMIT, &stop).unwrap();
                assert_eq!(served.join().unwrap().unwrap(), chunks * size);
                sent
            });
            assert_eq!(copied, chunks * size);
            let messages = messages as usize;
            assert_eq!((times.posted.len(), times.done.len()), (messages, messages));
            assert!(times.done.is_sorted());
            let checked = check_target(&target, &slots, GUARD, 5, chunks).unwrap();
            assert!(checked.is_correct(), "{size}: {checked:?}");
        }
    }

    #[test]
    fn a_peer_that_ends_or_stops_is_reported() {
        let slots = Slots::new(4096, 2, 1 << 20);
        let span = Span::host(slots.target_bytes() as usize).unwrap();
        let progress = AtomicU64::new(0);
        let clock = || Clock::new(5, 1, Instant::now(), &progress).unwrap();
        let (stop, short) = (Stop::default(), Duration::from_millis(1));
        // A peer that does not answer.
        let (client, server) = pair();
        let error = client.send(&span, &slots, 2, clock(), short, &stop).err().unwrap();
        assert!(error.to_string().contains("--timeout"), "{error}");
        let (_client, idle) = pair();
        let error = idle.receive(&span, &slots, 5, |_| Ok(()), short, &stop).unwrap_err();
        assert!(error.to_string().contains("chunk 0 of 5"), "{error}");
        // A peer that ends the connection after whole chunks, and in the middle of a chunk.
        drop(client);
        let error = server.receive(&span, &slots, 5, |_| Ok(()), LIMIT, &stop).unwrap_err();
        assert_eq!(error.to_string(), ENDED);
        let (client, server) = pair();
        (&client.stream).write_all(&[7; 2048]).unwrap();
        drop(client);
        let error = server.receive(&span, &slots, 5, |_| Ok(()), LIMIT, &stop).unwrap_err();
        assert_eq!(error.to_string(), ENDED);
        let (client, server) = pair();
        drop(server);
        let error = client.send(&span, &slots, 2, clock(), LIMIT, &stop).err().unwrap();
        assert_eq!(error.to_string(), ENDED);
        // A peer that acknowledges what it cannot have.
        let (client, server) = pair();
        (&server.stream).write_all(&9u64.to_le_bytes()).unwrap();
        let error = client.send(&span, &slots, 2, clock(), LIMIT, &stop).err().unwrap();
        assert!(error.to_string().contains("acknowledged 9 chunks"), "{error}");
        // A stop request.
        stop.store(true, Ordering::Relaxed);
        let (client, _server) = pair();
        let error = client.send(&span, &slots, 2, clock(), LIMIT, &stop).err().unwrap();
        assert!(error.to_string().contains("stopped"), "{error}");
    }

    #[test]
    fn connections_of_others_are_closed() {
        let listener = PayloadListener::new("127.0.0.1").unwrap();
        let at = listener.port();
        // No first words, a wrong token, and a NIC that does not exist.
        drop(TcpStream::connect(("127.0.0.1", at.port)).unwrap());
        let wrong = PayloadPort { token: !at.token, ..at };
        let mut other = Payload::connect("127.0.0.1", wrong, 0, LIMIT, &|| Ok(()))
            .unwrap()
            .stream;
        let second = Payload::connect("127.0.0.1", at, 1, LIMIT, &|| Ok(())).unwrap();
        let first = Payload::connect("127.0.0.1", at, 0, LIMIT, &|| Ok(())).unwrap();
        let all = listener.accept(2, LIMIT).unwrap();
        let local = |payload: &Payload| payload.stream.local_addr().unwrap();
        let peers: Vec<_> = all.iter().map(|payload| payload.stream.peer_addr().unwrap()).collect();
        assert_eq!(peers, [local(&first), local(&second)]);
        other.set_nonblocking(false).unwrap();
        other.set_read_timeout(Some(LIMIT)).unwrap();
        // The server closed the connection. A read that waits until its limit fails with another error.
        match other.read(&mut [0; 1]) {
            Ok(count) => assert_eq!(count, 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        // A connection with a part of the first words, and a limit that has ended.
        let mut slow = TcpStream::connect(("127.0.0.1", at.port)).unwrap();
        slow.write_all(&[0; WORD]).unwrap();
        let (accepted, _) = accept_blocking(&listener.listener);
        assert_eq!(listener.index(&accepted, Instant::now()), None);
        let stopped = Payload::connect("127.0.0.1", at, 1, LIMIT, &|| bail!("stopped by the viewer"));
        assert_eq!(stopped.unwrap_err().to_string(), "stopped by the viewer");
        let _third = Payload::connect("127.0.0.1", at, 1, LIMIT, &|| Ok(())).unwrap();
        let error = listener.accept(1, LIMIT).unwrap_err();
        assert!(error.to_string().contains("too often"), "{error}");
        // Connections that keep arriving do not extend the limit.
        let _waiting = TcpStream::connect(("127.0.0.1", at.port)).unwrap();
        let error = listener.accept(1, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains(&at.port.to_string()), "{error}");
    }
}
