// SPDX-License-Identifier: MIT OR Apache-2.0

//! The control protocol between the two sides: test parameters, endpoints, start, and results. One JSON object per
//! line, over TCP.
//!
//! The peer is not trusted: lines have a maximum length, unknown messages and fields are rejected, every number is
//! checked before use, and every wait has a limit.
//!
//! ```text
//! client: hello                                      the test parameters, and the server's kind of memory
//! server: welcome                                    the server's queue pairs and memory, and how much both have
//! client: connect                                    the client's queue pairs and memory
//! server: ready                                      both sides can send
//!   client: start           } for each size
//!   server: started         }
//!   client: alive ...       }   while messages are in flight
//!   client: finish          }
//!   server: finished        }   result of the check of the server's memory
//! client: bye
//! ```
//! A client that streams sends `stream` in place of `hello`, and gets `streamwelcome`. Then follow `streamconnect`,
//! `ready`, `alive` while frames are in flight, `finish`, and `streamed` with the server's result.
//!
//! Instead of any message, a side that cannot continue sends `failed` with a reason.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::memory::Window;
use p2pmem_verbs::Address;
use serde::de::{self, DeserializeOwned};
use serde::{Deserialize, Deserializer, Serialize};

use crate::pattern::Comparison;
use crate::sizes::{check_message, check_window, chunk, Sizes, Slots, GUARD, WORDS};
use crate::stream::protocol::{Layout, StreamRequest, StreamResult};
use crate::waiter::How;

/// Version of the protocol.
pub const VERSION: u32 = 6;
/// Maximum length of a line in bytes.
const MAX_LINE: usize = 1 << 20;
/// Error if the connection ends without the message `failed`.
const DISCONNECTED: &str = "the other side ended the connection: see its output";
/// Maximum number of NICs of one side.
pub const MAX_NICS: usize = 64;
/// Maximum number of messages in flight.
pub const MAX_DEPTH: u32 = 8192;
/// Maximum number of messages of one size. The client stores two times for each message.
const MAX_MESSAGES: u64 = 10_000_000;
/// Error for a batch of requests that have a handshake.
const NO_BATCH: &str = "only RDMA WRITEs and READs without handshake are posted in batches, and writes through a window have \
                        a handshake: use --mode write or read, with messages that fit the memory (--size), or no --batch";
/// Maximum length of the reason in `failed`, in bytes.
const MAX_REASON: usize = 2000;

/// RDMA operation of the messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The client writes to the server's memory (RDMA WRITE).
    Write,
    /// The client reads from the server's memory (RDMA READ).
    Read,
    /// The client sends, the server receives (SEND).
    Send,
    /// The client writes to the server's memory, and the server gets a completion for each message (RDMA WRITE with immediate
    /// data).
    #[value(name = "write-imm")]
    #[serde(rename = "write-imm")]
    WriteImmediate,
    /// The client calls the server (two-sided RPC): it sends the payload, the server's processor copies the payload to its
    /// memory and sends a reply.
    Rpc,
    /// The client sends over TCP, without RDMA: the processors copy each byte between the memory and the sockets.
    Tcp,
    /// The client writes to the server's memory by UCX (ucp_put_nbx), which uses the NIC as MPI and many engines do. Device
    /// memory takes the preload shim on both sides.
    Ucx,
}

/// Parameters of a test. The client chooses them and sends them to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Test {
    /// RDMA operation of the messages.
    pub mode: Mode,
    /// Sizes of the messages in bytes.
    pub sizes: Vec<u64>,
    /// Number of messages of each size and NIC.
    pub iterations: u64,
    /// Maximum number of bytes of each size and NIC. Limits the number of large messages.
    pub volume: Option<u64>,
    /// Maximum number of messages in flight.
    pub depth: u32,
    /// Number of requests that the client posts with one doorbell; `None`: as many as may be in flight.
    #[serde(default)]
    pub batch: Option<u32>,
    /// Bytes for the slots of one side. Two messages always fit, also if they are larger.
    pub budget: u64,
    /// Writes with handshake: the server counts handled messages, and the client reads the counter by RDMA READ.
    pub handshake: bool,
    /// Both sides copy the payload through host memory.
    pub staged: bool,
    /// The target is compared byte by byte after the messages.
    pub verify: bool,
    /// Bytes of the chunks into which messages are cut. Without it, only messages that do not fit the memory are cut.
    #[serde(default)]
    pub window: Option<u64>,
    /// Bytes of memory that a side has for each NIC. In the client's first message, those of the client; then those of
    /// the side with less.
    #[serde(default)]
    pub space: u64,
    /// Seed of the pattern.
    pub seed: u64,
    /// Number of NICs of each side.
    pub nics: usize,
    /// The server's memory. Without it, the server uses the memory of its own options.
    #[serde(default)]
    pub peer: Option<PeerMemory>,
    /// How the server waits for completions. Without it, as its own options say.
    #[serde(default)]
    pub peer_waits: Option<How>,
}

/// Memory of the server that the client chooses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerMemory {
    /// Name of the kind. A text, so that the server can report a kind that it does not know.
    pub kind: String,
    /// The provider, by id or PCI address; `None` selects the provider nearest to the NIC.
    #[serde(default, deserialize_with = "device")]
    pub device: Option<String>,
}

impl PeerMemory {
    /// Returns the kind.
    ///
    /// # Errors
    ///
    /// This version of the program does not know the kind.
    pub fn kind(&self) -> Result<MemoryKind, String> {
        MemoryKind::from_str(&self.kind, false).map_err(|_| {
            let all: Vec<_> = MemoryKind::value_variants().iter().map(|kind| kind.name()).collect();
            format!(
                "unknown kind of memory {:?}: use one of {} (--peer-memory)",
                self.kind,
                all.join(", ")
            )
        })
    }
}

impl Mode {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
            Self::Send => "send",
            Self::WriteImmediate => "write-imm",
            Self::Rpc => "rpc",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
        }
    }

    /// Returns whether the server's processor takes no part in a message without handshake.
    pub fn is_one_sided(self) -> bool {
        matches!(self, Self::Write | Self::Read)
    }

    /// Returns whether each message consumes a receive of the server, without a handshake.
    pub fn takes_receives(self) -> bool {
        matches!(self, Self::Send | Self::WriteImmediate | Self::Rpc)
    }
}

impl Test {
    /// Returns the number of messages of `size` bytes.
    pub fn messages(&self, size: u64) -> u64 {
        let most = self.volume.map_or(u64::MAX, |volume| (volume / size).max(1));
        self.iterations.min(most)
    }

    /// Returns whether the server handles each message of `size` bytes, and so gets a completion for each. The server of
    /// writes through a window does: the client may reuse a slot only after that.
    pub fn has_handshake(&self, size: u64) -> bool {
        let is_write = matches!(self.mode, Mode::Write | Mode::WriteImmediate);
        self.handshake || self.staged || is_write && self.has_window(size)
    }

    /// Returns the number of chunks of a message of `size` bytes.
    pub fn chunks(&self, size: u64) -> u64 {
        size / self.chunk(size)
    }

    /// Returns the name of a chunk of messages of `size` bytes, for errors.
    pub fn part(&self, size: u64, chunk: u64) -> String {
        let (each, messages) = (self.chunks(size), self.messages(size));
        match each {
            0 | 1 => format!("message {chunk} of {messages}"),
            _ => format!(
                "chunk {} of {each} of message {} of {messages}",
                chunk % each,
                chunk / each
            ),
        }
    }

    /// Returns whether messages of `size` bytes move through a window.
    pub fn has_window(&self, size: u64) -> bool {
        self.chunks(size) > 1
    }

    /// Returns the maximum number of chunks in flight. Through a window, no slot has two of them.
    pub fn in_flight(&self, size: u64) -> u64 {
        let depth = u64::from(self.depth);
        if self.has_window(size) {
            depth.min(self.slots(size).source)
        } else {
            depth
        }
    }

    /// Returns the bytes of a chunk of messages of `size` bytes. [`Test::check_space`] has checked that there is one.
    pub fn chunk(&self, size: u64) -> u64 {
        chunk(size, self.window, self.space).unwrap_or(size)
    }

    /// Returns the slots for chunks of messages of `size` bytes.
    pub fn slots(&self, size: u64) -> Slots {
        Slots::new(self.chunk(size), self.depth.into(), self.budget).within(self.space)
    }

    /// Returns the bytes of memory with which all messages move as a whole, or through the window that the client chose.
    pub fn wanted_bytes(&self) -> u64 {
        let slots = |size: &u64| {
            let chunk = self.window.unwrap_or(*size).min(*size);
            Slots::new(chunk, self.depth.into(), self.budget).target_bytes() + GUARD + WORDS
        };
        self.sizes.iter().map(slots).max().unwrap_or(0)
    }

    /// Checks that the messages fit the memory of both sides, whole or through a window, and that the mode permits the
    /// windows. Both sides call this after they have agreed on the memory, on which the windows depend.
    ///
    /// # Errors
    ///
    /// Some do not fit, or move through a window and must not. The message says what to do.
    pub fn check_space(&self) -> Result<(), String> {
        self.sizes
            .iter()
            .try_for_each(|size| chunk(*size, self.window, self.space).map(|_| ()))?;
        let any = |forbidden: &dyn Fn(u64) -> bool| self.sizes.iter().any(|size| forbidden(*size));
        if self.batch.is_some() && any(&|size| self.has_handshake(size)) {
            return Err(NO_BATCH.to_owned());
        }
        if self.mode == Mode::Rpc && any(&|size| self.has_window(size)) {
            return Err(format!(
                "a call has one chunk, and the calls do not fit the {} of memory that both sides have: use smaller messages \
                 (--size) or no --window",
                p2pmem::human_size(self.space)
            ));
        }
        if self.mode == Mode::Ucx && any(&|size| self.has_window(size)) {
            return Err(format!(
                "a put of UCX has one chunk, as the server does not acknowledge chunks, and the messages do not fit the {} of \
                 memory that both sides have: use smaller messages (--size) or no --window",
                p2pmem::human_size(self.space)
            ));
        }
        Ok(())
    }

    /// Checks parameters that come from the peer or from the command line.
    ///
    /// # Errors
    ///
    /// A parameter is out of range, or two parameters exclude each other.
    pub fn check(&self) -> Result<(), String> {
        for size in &self.sizes {
            check_message(*size)?;
        }
        self.window.map(check_window).transpose()?;
        self.peer.as_ref().map(PeerMemory::kind).transpose()?;
        let no = |holds: bool, why: &str| if holds { Err(why.to_owned()) } else { Ok(()) };
        no(self.sizes.is_empty() || self.sizes.len() > 64, "specify 1 to 64 sizes")?;
        no(
            !(1..=MAX_MESSAGES).contains(&self.iterations),
            "specify 1 to 10000000 messages of each size",
        )?;
        no(self.volume == Some(0), "specify a volume of at least 1 byte")?;
        no(
            !(1..=MAX_DEPTH).contains(&self.depth),
            &format!("specify a depth of 1 to {MAX_DEPTH} messages"),
        )?;
        no(
            self.batch.is_some_and(|batch| !(1..=self.depth).contains(&batch)),
            "a doorbell posts 1 request to as many as are in flight: use a --batch of 1 to --depth",
        )?;
        no(
            self.batch.is_some() && (self.handshake || self.staged || !self.mode.is_one_sided()),
            NO_BATCH,
        )?;
        no(
            self.handshake && self.mode != Mode::Write,
            "only writes have a handshake: use --mode write",
        )?;
        no(
            self.staged && self.mode != Mode::Write,
            "only writes can be staged: use --mode write",
        )?;
        no(
            !(1..=MAX_NICS).contains(&self.nics),
            &format!("specify 1 to {MAX_NICS} NICs"),
        )
    }
}

/// Maximum length of a name that the peer sends, in bytes.
const MAX_NAME: usize = 64;

/// Checks a name that the peer sent and that may reach the terminal.
fn check_name<E: de::Error>(name: &str) -> std::result::Result<(), E> {
    if name.len() > MAX_NAME {
        return Err(E::custom(format!("a name has more than {MAX_NAME} bytes")));
    }
    if !name.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        return Err(E::custom(
            "a name has control characters, or characters that are not ASCII",
        ));
    }
    Ok(())
}

fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    check_name(&name)?;
    Ok(name)
}

fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let names = Vec::<String>::deserialize(from)?;
    if names.len() > MAX_NICS {
        return Err(de::Error::custom(format!("a list has more than {MAX_NICS} names")));
    }
    names.iter().try_for_each(|name| check_name(name))?;
    Ok(names)
}

fn device<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let device = Option::<String>::deserialize(from)?;
    device.as_deref().map(check_name).transpose()?;
    Ok(device)
}

/// A queue pair and the memory that the peer accesses through it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Name of the NIC.
    #[serde(deserialize_with = "name")]
    pub nic: String,
    /// The queue pair.
    pub address: Address,
    /// Memory for the payload.
    pub payload: Window,
    /// The handshake word, which counts handled messages.
    pub handled: Window,
    /// The server's part of UCX, if the payload moves by UCX.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ucx: Option<UcxPort>,
}

/// A worker of UCX and the memory that the peer accesses through it. UCX parses the address and the key without a length, so
/// both sides must trust each other; [`p2pmem_ucx_sys`] refuses bytes that are damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UcxPort {
    /// Address of the worker.
    #[serde(with = "packed")]
    pub worker: Vec<u8>,
    /// Key of the memory.
    #[serde(with = "packed")]
    pub key: Vec<u8>,
    /// Address of the first byte of the memory.
    pub address: u64,
    /// Length of the memory in bytes.
    pub bytes: u64,
}

impl UcxPort {
    /// Returns the address of byte `at`. `bytes` bytes from there must be inside the memory.
    ///
    /// # Errors
    ///
    /// The bytes are not inside the memory.
    pub fn at(&self, at: u64, bytes: u64) -> Result<u64> {
        let window = Window {
            address: self.address,
            rkey: 0,
            bytes: self.bytes,
        };
        window.at(at, bytes)
    }
}

/// Bytes that UCX packed, as hexadecimal digits.
mod packed {
    use p2pmem_ucx_sys::MAX_PACKED;
    use serde::{de, Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&hex::encode(bytes))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        if text.len() > 2 * MAX_PACKED {
            return Err(de::Error::custom(format!(
                "an address or key of UCX has more than {MAX_PACKED} bytes"
            )));
        }
        hex::decode(text).map_err(de::Error::custom)
    }
}

impl Endpoint {
    fn check(&self) -> Result<()> {
        self.address.check()?;
        if self.nic.len() > 64 {
            bail!("the name of a NIC has more than 64 bytes");
        }
        Ok(())
    }
}

/// Checks the endpoints that the peer sent.
///
/// # Errors
///
/// The number of endpoints is not `nics`, or a field is out of range.
pub fn check_endpoints(endpoints: &[Endpoint], nics: usize) -> Result<()> {
    if endpoints.len() != nics {
        bail!("the other side sent {} queue pairs, expected {nics}", endpoints.len());
    }
    endpoints.iter().try_for_each(|endpoint| {
        endpoint
            .check()
            .with_context(|| format!("endpoint of the other side's NIC {:?}", endpoint.nic))
    })
}

/// Description of one side's NICs and memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Side {
    /// Names of the NICs.
    #[serde(deserialize_with = "names")]
    pub nics: Vec<String>,
    /// Kind of memory: `cpu`, `accelerator`, `cmb`, `fpga` or `pageless`.
    #[serde(deserialize_with = "name")]
    pub memory: String,
    /// PCI address of the provider of each NIC's memory; empty for host memory.
    #[serde(deserialize_with = "names")]
    pub providers: Vec<String>,
    /// Registration method: `dma-buf` or `reg-mr`.
    #[serde(deserialize_with = "name")]
    pub registration: String,
}

/// The server's result for the messages of one size and one NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerResult {
    /// Result of the comparison, if the server's memory is the target and the test requests a comparison.
    pub checked: Option<Comparison>,
    /// Bytes that the server's processor copied.
    pub copied: u64,
    /// Nanoseconds of processor time of the server's thread for the messages; `None` if no thread of the server takes part.
    pub cpu_ns: Option<u64>,
    /// Nanoseconds of processor time of the server's whole process until the client has finished: the threads of all NICs,
    /// and the connection to the client. The same for each NIC.
    pub process_ns: u64,
}

/// Messages of the client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum FromClient {
    /// The first message.
    Hello {
        /// [`VERSION`] of the client.
        version: u32,
        /// Parameters of the test.
        test: Test,
    },
    /// The first message of a stream.
    Stream {
        /// [`VERSION`] of the client.
        version: u32,
        /// Parameters of the stream.
        request: StreamRequest,
    },
    /// The client's queue pairs and memory.
    Connect(Vec<Endpoint>),
    /// The client's queue pair and memory for a stream.
    StreamConnect {
        /// The queue pair. `handled` is the word for the server's credit.
        endpoint: Endpoint,
        /// Bytes of a frame: at most those of the server's slots.
        chunk: u64,
    },
    /// Messages of this size follow.
    Start(u64),
    /// Messages are still in flight.
    Alive,
    /// All messages of the size are done.
    Finish,
    /// The test is over.
    Bye,
    /// The client cannot continue.
    Failed(String),
}

/// Where the server waits for the connections of the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PayloadPort {
    /// The TCP port.
    pub port: u16,
    /// The first word of each connection, which others do not know.
    pub token: u64,
}

/// Messages of the server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum FromServer {
    /// The answer to `hello`.
    Welcome {
        /// [`VERSION`] of the server.
        version: u32,
        /// Bytes of memory that both sides have for each NIC: not more than the client's.
        space: u64,
        /// Where the server waits for the connections of the payload, if it moves over TCP.
        payload: Option<PayloadPort>,
        /// The server's NICs and memory.
        side: Side,
        /// The server's queue pairs and memory.
        endpoints: Vec<Endpoint>,
    },
    /// The answer to `stream`.
    StreamWelcome {
        /// [`VERSION`] of the server.
        version: u32,
        /// The server's NIC and memory.
        side: Side,
        /// The server's queue pair, and its memory for frames.
        endpoint: Endpoint,
        /// The slots of this memory.
        layout: Layout,
    },
    /// The server's queue pairs are connected.
    Ready,
    /// The server's memory is prepared for the size.
    Started,
    /// The server's result for each NIC.
    Finished(Vec<ServerResult>),
    /// The server's result for a stream.
    Streamed(StreamResult),
    /// The server cannot continue.
    Failed(String),
}

/// A message of the protocol.
pub trait Message: Serialize + DeserializeOwned {
    /// Returns the reason if the message is `failed`.
    fn failure(&self) -> Option<&str>;
}

impl Message for FromClient {
    fn failure(&self) -> Option<&str> {
        if let Self::Failed(why) = self {
            Some(why)
        } else {
            None
        }
    }
}

impl Message for FromServer {
    fn failure(&self) -> Option<&str> {
        if let Self::Failed(why) = self {
            Some(why)
        } else {
            None
        }
    }
}

/// Returns the text of an error, truncated to the maximum length that the peer accepts.
pub fn reason(error: &anyhow::Error) -> String {
    truncated(format!("{error:#}"))
}

/// Returns the text of an error for the peer: as [`reason`], with what to do if this is known.
pub fn reason_and_remedy(error: &anyhow::Error) -> String {
    match crate::remedy(error) {
        Some(remedy) => truncated(format!("{error:#} (remedy: {remedy})")),
        None => reason(error),
    }
}

fn truncated(mut text: String) -> String {
    if text.len() > MAX_REASON {
        let end = (0..=MAX_REASON).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// Returns the sizes of a test, for display.
pub fn sizes_of(test: &Test) -> Sizes {
    Sizes(test.sizes.clone())
}

/// A control connection to the peer.
#[derive(Debug)]
pub struct Control {
    stream: TcpStream,
    received: Vec<u8>,
    limit: Duration,
}

impl Control {
    /// Wraps a connected socket. `limit` is the longest wait of all functions.
    ///
    /// # Errors
    ///
    /// Setting the socket options failed.
    pub fn new(stream: TcpStream, limit: Duration) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(limit))?;
        Ok(Self {
            stream,
            received: Vec::new(),
            limit,
        })
    }

    /// Returns whether the peer is on this machine, and so may use the same memory.
    pub fn is_local(&self) -> bool {
        match (self.stream.peer_addr(), self.stream.local_addr()) {
            (Ok(peer), Ok(own)) => peer.ip() == own.ip(),
            _ => false,
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    ///
    /// The peer closed the connection, or does not read within the limit.
    pub fn send(&mut self, message: &impl Message) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.stream
            .write_all(&line)
            .context("the other side does not read messages: see its output")
    }

    /// Waits for a message.
    ///
    /// # Errors
    ///
    /// The limit ended, the peer closed the connection or sent `failed`, or the line is not a valid message.
    pub fn receive<M: Message>(&mut self) -> Result<M> {
        let limit = self.limit;
        match self.receive_within(limit)? {
            Some(message) => Ok(message),
            None => bail!("no message of the other side for {limit:?}: does it hang? --timeout sets the limit"),
        }
    }

    /// Waits for a message, no longer than `limit`. Returns `None` if no message arrived.
    ///
    /// # Errors
    ///
    /// As [`Control::receive`], except for the limit.
    pub fn receive_within<M: Message>(&mut self, limit: Duration) -> Result<Option<M>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return parse(&line).map(Some);
            }
            if self.received.len() > MAX_LINE {
                bail!("the other side sent a line of more than {MAX_LINE} bytes: is it p2pmem-perf?");
            }
            // The kernel treats a timeout of zero as no timeout.
            let left = deadline
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!(DISCONNECTED),
                Ok(count) => self.received.extend_from_slice(&chunk[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The peer closed the connection with unread data.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => bail!(DISCONNECTED),
                Err(error) => return Err(error).context("receiving from the other side"),
            }
        }
    }
}

/// Returns the version of a first message that this version of the program cannot parse.
fn version_of(line: &[u8]) -> Option<u64> {
    let message: serde_json::Value = serde_json::from_slice(line).ok()?;
    let first = ["hello", "welcome", "stream", "streamwelcome"]
        .iter()
        .find_map(|name| message.get(name))?;
    first.get("version")?.as_u64()
}

fn parse<M: Message>(line: &[u8]) -> Result<M> {
    let message = serde_json::from_slice::<M>(line);
    // Other versions have other fields, so their first message may not be valid here.
    if let Some(version) = version_of(line).filter(|version| message.is_err() && *version != u64::from(VERSION)) {
        bail!(
            "the other side has protocol version {version}, this side {VERSION}: use the same p2pmem-perf on both sides"
        );
    }
    let message: M = message.with_context(|| {
        let start = String::from_utf8_lossy(&line[..line.len().min(80)]);
        format!("the other side sent an invalid message (is it p2pmem-perf of the same version?): {start:?}")
    })?;
    match message.failure() {
        Some(why) => {
            // The reason is untrusted text: no control characters on the terminal.
            let why: String = why.chars().filter(|c| !c.is_control()).take(MAX_REASON).collect();
            bail!("the other side failed: {why}")
        }
        None => Ok(message),
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
