// SPDX-License-Identifier: MIT OR Apache-2.0

//! The control connection between an accelerator node and a storage node: it sets up a session, and ends it.
//!
//! Messages are JSON objects over TCP, each behind its length in 4 bytes, big-endian. The other side is not trusted: a
//! message has at most [`MAX_MESSAGE`] bytes, unknown messages and fields are refused, numbers are checked before use, and
//! each wait has a limit.
//!
//! ```text
//! node:    challenge                 the version, and a random number
//! program: hello                     the version, a random number, and the proof that it has the token
//! node:    welcome                   the proof that the node has the token
//! program: list | record | play
//! node:    listing | record-ready | play-ready
//! program: ready                     playback only
//!   blocks and acknowledgements by RDMA (module `message`)
//! program: finish
//! node:    finished                  the number of blocks
//! ```
//!
//! Instead of any message, the node sends `failed` with the reason, and ends the session.
//!
//! A proof is HMAC-SHA256 over both random numbers with the token as the key, so the token is not sent. The rest of the connection
//! is neither encrypted nor signed, and neither is RDMA: use a network of its own, as for other storage.

pub mod message;
mod token;

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use p2pmem_verbs::Address;
use rustix::net::{recv, sockopt, RecvFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use p2pmem_web::token::TokenError;
use token::Side;
pub use token::Token;

use crate::status::{Lun, Recording};
use crate::store::ChannelName;

/// The version of the protocol. It changes with each incompatible change, also of [`message`].
pub const VERSION: u32 = 1;
/// The most bytes of a message.
pub const MAX_MESSAGE: usize = 256 << 10;
/// How long the first messages of a connection may take, before the other side has proved that it has the token.
pub const LOGIN_LIMIT: Duration = Duration::from_secs(5);
/// The time without an answer after which the kernel asks whether the other side still exists, the time between two such
/// questions, and their number. A machine that is gone is noticed after 25 s.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 3);
/// The default port.
pub const PORT: u16 = 18700;
/// The most characters of a reason that the other side sent.
pub(crate) const MAX_REASON: usize = 1000;
/// The most bytes of a name.
const MAX_NAME: usize = 64;

/// What fails on a control connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The network failed.
    #[error("the control connection failed: {0}")]
    Io(#[from] io::Error),
    /// The other side ended the connection.
    #[error("the other side ended the control connection; see its log")]
    Closed,
    /// No message arrived in time.
    #[error("no message arrived within {0:?}; is the other side running?")]
    Timeout(Duration),
    /// A message is too long.
    #[error("a message of {0} bytes exceeds the limit of {MAX_MESSAGE} bytes; is this a program of p2pmem-recorder?")]
    TooLong(u64),
    /// A message is not valid.
    #[error("the other side sent an invalid message: {0}; is it of the same version?")]
    Invalid(String),
    /// The versions differ.
    #[error("the other side has version {0} of the protocol, this program has {VERSION}; update the older one")]
    Version(u32),
    /// The token is wrong.
    #[error("the token is wrong; both sides need the same one")]
    Token,
    /// The other side failed.
    #[error("{0}")]
    Failed(String),
}

/// The result of an operation on a control connection.
pub type Result<T> = std::result::Result<T, Error>;

/// The channel that a session uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelRequest {
    /// The LUN.
    pub lun: String,
    /// The stream.
    pub stream: String,
    /// The number of the channel.
    pub channel: u32,
}

impl From<&ChannelRequest> for ChannelName {
    fn from(request: &ChannelRequest) -> Self {
        Self::new(&request.lun, &request.stream, request.channel)
    }
}

/// Starts a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The channel.
    pub channel: ChannelRequest,
    /// The number of the node's NIC, in the order of its configuration.
    pub port: u32,
    /// Bytes of a block, which must be those of the stream.
    pub block_size: u64,
    /// The time of the start in nanoseconds since 1970.
    pub started: u64,
    /// The program's queue pair.
    pub address: Address,
    /// The most blocks that the program can have in flight.
    pub buffers: u32,
}

/// Where playback starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Start {
    /// At the first block.
    #[default]
    First,
    /// At the first block whose sequence number is at least this.
    Block(u64),
    /// At the first block whose time is at least this.
    Time(u64),
}

/// Starts playback.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Play {
    /// The channel.
    pub channel: ChannelRequest,
    /// The number of the node's NIC, in the order of its configuration.
    pub port: u32,
    /// The number of the recording; `None` for the latest one.
    pub recording: Option<u64>,
    /// Where playback starts.
    pub start: Start,
    /// The most blocks to play; `None` for all.
    pub blocks: Option<u64>,
    /// Whether playback starts again after the last block, until the program ends it.
    pub repeat: bool,
    /// The most bytes in a second.
    pub rate: Option<u64>,
    /// Bytes of a block, which must be those of the stream.
    pub block_size: u64,
    /// The program's queue pair.
    pub address: Address,
    /// The most blocks that the program can have in flight.
    pub buffers: u32,
}

/// A message of the program at the accelerator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The proof that the program has the token.
    Hello {
        /// The version of the protocol.
        version: u32,
        /// A random number, in hexadecimal.
        nonce: String,
        /// The program's proof, in hexadecimal.
        proof: String,
        /// A name for people.
        name: String,
    },
    /// Asks for the LUNs, streams, and recordings.
    List,
    /// Starts a recording.
    Record(Record),
    /// Starts playback.
    Play(Play),
    /// The program has posted its receives: the node may announce blocks of a playback.
    Ready,
    /// Ends the session. All blocks of a recording were acknowledged before.
    Finish,
}

/// A stream of the listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListedChannel {
    /// The channel.
    pub channel: ChannelRequest,
    /// Bytes of a block.
    pub block_size: u64,
    /// The recordings. The list has at most [`MAX_LISTED`] of them, the latest ones.
    pub recordings: Vec<Recording>,
}

impl ListedChannel {
    /// Returns the channels of LUNs.
    pub fn of(luns: Vec<Lun>) -> impl Iterator<Item = Self> {
        luns.into_iter().flat_map(|lun| {
            lun.streams.into_iter().flat_map(move |stream| {
                let (lun, name, block_size) = (lun.name.clone(), stream.name, stream.block_size);
                stream.channels.into_iter().map(move |channel| Self {
                    channel: ChannelRequest {
                        lun: lun.clone(),
                        stream: name.clone(),
                        channel: channel.number,
                    },
                    block_size,
                    recordings: {
                        let skipped = channel.recordings.len().saturating_sub(MAX_LISTED);
                        channel.recordings.into_iter().skip(skipped).collect()
                    },
                })
            })
        })
    }
}

/// The most recordings of a channel in a listing.
pub const MAX_LISTED: usize = 16;

/// Memory of the node that the program reads by RDMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Address of the first buffer.
    pub address: u64,
    /// The remote key.
    pub rkey: u32,
}

/// A message of the storage node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Reply {
    /// The first message of a connection.
    Challenge {
        /// The version of the protocol.
        version: u32,
        /// A random number, in hexadecimal.
        nonce: String,
    },
    /// Both sides have the token.
    Welcome {
        /// The node's proof, in hexadecimal.
        proof: String,
        /// The name of the node.
        name: String,
    },
    /// The channels of the node. Several such messages may follow each other.
    Listing {
        /// Channels.
        channels: Vec<ListedChannel>,
        /// Whether this is the last message of the listing.
        last: bool,
    },
    /// The recording has begun.
    RecordReady {
        /// The number of the session.
        session: u64,
        /// The number of the recording.
        recording: u64,
        /// The node's queue pair.
        address: Address,
        /// The number of blocks that the program may send before the first acknowledgement.
        credits: u32,
        /// The memory that the node chose, for people.
        memory: String,
    },
    /// Playback has begun.
    PlayReady {
        /// The number of the session.
        session: u64,
        /// The number of the recording.
        recording: u64,
        /// The node's queue pair.
        address: Address,
        /// The buffers: `credits` blocks, one after the other.
        window: Window,
        /// The number of buffers, which is the most blocks that the node announces at once.
        credits: u32,
        /// The memory that the node chose, for people.
        memory: String,
    },
    /// The session has ended as the program requested.
    Finished {
        /// The number of blocks that were recorded or played.
        blocks: u64,
    },
    /// The session has ended early.
    Failed {
        /// The reason, for people.
        reason: String,
    },
}

/// A control connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
    limit: Duration,
    has_failed: bool,
}

impl Connection {
    /// Uses a TCP connection. Each wait for the other side takes at most `limit`.
    ///
    /// # Errors
    ///
    /// The connection's options cannot be set.
    pub fn new(stream: TcpStream, limit: Duration) -> Result<Self> {
        let (idle, interval, count) = KEEPALIVE;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(limit))?;
        sockopt::set_socket_keepalive(&stream, true).map_err(io::Error::from)?;
        sockopt::set_tcp_keepidle(&stream, idle).map_err(io::Error::from)?;
        sockopt::set_tcp_keepintvl(&stream, interval).map_err(io::Error::from)?;
        sockopt::set_tcp_keepcnt(&stream, count).map_err(io::Error::from)?;
        // A machine that is gone while data is in flight.
        let all = idle + interval * count;
        sockopt::set_tcp_user_timeout(&stream, all.as_millis() as u32).map_err(io::Error::from)?;
        Ok(Self {
            stream,
            received: Vec::new(),
            limit,
            has_failed: false,
        })
    }

    /// Sets the most time of each wait for the other side.
    ///
    /// # Errors
    ///
    /// The connection's options cannot be set.
    pub fn set_limit(&mut self, limit: Duration) -> Result<()> {
        self.stream.set_write_timeout(Some(limit))?;
        self.limit = limit;
        Ok(())
    }

    /// Sends the reason for which the session ends, once. The other side sees the end of the connection if it does not get the
    /// reason.
    pub fn fail(&mut self, reason: &str) {
        if !self.has_failed {
            self.has_failed = true;
            let reason = printable(reason, MAX_REASON);
            let _ = self.send(&Reply::Failed { reason });
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    ///
    /// The network failed, the other side does not read, or the message is too long.
    pub fn send<M: Serialize>(&mut self, message: &M) -> Result<()> {
        let body = serde_json::to_vec(message).map_err(|error| Error::Invalid(error.to_string()))?;
        if body.len() > MAX_MESSAGE {
            return Err(Error::TooLong(body.len() as u64));
        }
        let mut bytes = Vec::with_capacity(4 + body.len());
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend(body);
        self.stream.write_all(&bytes).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(self.limit),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Error::Closed,
            _ => Error::Io(error),
        })
    }

    /// Returns a message that has arrived completely.
    fn take<M: DeserializeOwned>(&mut self) -> Result<Option<M>> {
        let Some((length, _)) = self.received.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_MESSAGE {
            return Err(Error::TooLong(length as u64));
        }
        let Some(body) = self.received.get(4..4 + length) else {
            return Ok(None);
        };
        // The text of the error has words of the message.
        let message =
            serde_json::from_slice(body).map_err(|error| Error::Invalid(printable(&error.to_string(), 200)))?;
        self.received.drain(..4 + length);
        Ok(Some(message))
    }

    /// Reads what has arrived. Returns whether there was anything.
    fn read(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let mut bytes = [0; 4096];
        let result = match timeout {
            Some(_) => {
                self.stream.set_read_timeout(timeout)?;
                self.stream.read(&mut bytes)
            }
            // Sessions look each time that something else happened.
            None => recv(&self.stream, &mut bytes, RecvFlags::DONTWAIT)
                .map(|(count, _)| count)
                .map_err(io::Error::from),
        };
        match result {
            Ok(0) => Err(Error::Closed),
            Ok(count) => {
                self.received.extend_from_slice(&bytes[..count]);
                Ok(true)
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(false),
                ErrorKind::ConnectionReset => Err(Error::Closed),
                _ => Err(error.into()),
            },
        }
    }

    /// Receives a message, and waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], [`Error::Closed`], [`Error::TooLong`], [`Error::Invalid`], [`Error::Io`].
    pub fn receive<M: DeserializeOwned>(&mut self) -> Result<M> {
        let deadline = Instant::now() + self.limit;
        loop {
            if let Some(message) = self.take()? {
                return Ok(message);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout(self.limit));
            }
            self.read(Some(left))?;
        }
    }

    /// Receives a message if it has arrived.
    ///
    /// # Errors
    ///
    /// As [`Connection::receive`], without the timeout.
    pub fn try_receive<M: DeserializeOwned>(&mut self) -> Result<Option<M>> {
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            if !self.read(None)? {
                return Ok(None);
            }
        }
    }

    /// Receives a message of the node, or its reason for the end.
    ///
    /// # Errors
    ///
    /// [`Error::Failed`] with the node's reason, and those of [`Connection::receive`].
    pub fn receive_reply(&mut self) -> Result<Reply> {
        check_reply(self.receive()?)
    }

    /// Receives a message of the node if it has arrived.
    ///
    /// # Errors
    ///
    /// As [`Connection::receive_reply`], without the timeout.
    pub fn try_receive_reply(&mut self) -> Result<Option<Reply>> {
        self.try_receive()?.map(check_reply).transpose()
    }

    /// The program's part of the start of a connection. Returns the name of the node.
    ///
    /// # Errors
    ///
    /// [`Error::Version`], [`Error::Failed`] if the token is wrong, and those of [`Connection::receive`].
    pub fn log_in(&mut self, token: &Token, name: &str) -> Result<String> {
        let nonce = match self.receive_reply()? {
            Reply::Challenge {
                version: VERSION,
                nonce,
            } => nonce,
            Reply::Challenge { version, .. } => return Err(Error::Version(version)),
            other => return Err(unexpected(&other)),
        };
        let own = Token::nonce()?;
        self.send(&Request::Hello {
            version: VERSION,
            nonce: own.clone(),
            proof: token.proof(Side::Program, &nonce, &own),
            name: name.chars().take(MAX_NAME).collect(),
        })?;
        match self.receive_reply()? {
            Reply::Welcome { name, proof } => {
                if !token.verify(Side::Node, &nonce, &own, &proof) {
                    return Err(Error::Token);
                }
                Ok(printable(&name, MAX_NAME))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// The node's part of the start of a connection. Returns the name of the program.
    ///
    /// # Errors
    ///
    /// [`Error::Version`], [`Error::Token`], and those of [`Connection::receive`].
    pub fn welcome(&mut self, token: &Token, name: &str) -> Result<String> {
        let nonce = Token::nonce()?;
        self.send(&Reply::Challenge {
            version: VERSION,
            nonce: nonce.clone(),
        })?;
        let (peer, other) = match self.receive()? {
            Request::Hello {
                version: VERSION,
                nonce: other,
                proof,
                name,
            } => {
                if !token.verify(Side::Program, &nonce, &other, &proof) {
                    return Err(Error::Token);
                }
                (name, other)
            }
            Request::Hello { version, .. } => return Err(Error::Version(version)),
            other => return Err(unexpected(&other)),
        };
        self.send(&Reply::Welcome {
            name: name.to_owned(),
            proof: token.proof(Side::Node, &nonce, &other),
        })?;
        Ok(printable(&peer, MAX_NAME))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn check_reply(reply: Reply) -> Result<Reply> {
    match reply {
        Reply::Failed { reason } => Err(Error::Failed(printable(&reason, MAX_REASON))),
        other => Ok(other),
    }
}

/// Returns text of the other side without control characters, which a terminal would execute.
pub(crate) fn printable(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(most).collect()
}

/// Returns the error for a message that is not expected at this point.
pub(crate) fn unexpected(message: &impl std::fmt::Debug) -> Error {
    // The text of a message has no control characters: Debug escapes them.
    let text: String = format!("{message:?}").chars().take(100).collect();
    Error::Invalid(format!("{text} is not expected now"))
}

#[cfg(test)]
mod tests;
