// SPDX-License-Identifier: MIT OR Apache-2.0

//! The bootstrap between the two sides: what the test is, where memory and queues are, when to begin, what came of it.
//! One JSON object a line over TCP.
//!
//! The other side is not trusted: lines are bounded, unknown messages and fields are refused, every number is checked
//! before it is used, and every wait has a limit.
//!
//! ```text
//! client: hello                                      what is to be tried
//! server: welcome                                    its queues and memory
//! client: connect                                    the client's
//! server: ready                                      both can send
//!   client: start           } for each size
//!   server: started         }
//!   client: alive ...       }   while messages are under way
//!   client: finish          }
//!   server: finished        }   what it found in its memory
//! client: bye
//! ```
//! Either side says `failed` with a reason instead, whenever it cannot go on.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use clap::ValueEnum;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::pattern::Checked;
use crate::sizes::{check_message, Sizes};

/// Version of what both sides say to each other.
pub const VERSION: u32 = 1;
/// Longest line.
const LONGEST: usize = 1 << 20;
/// The error if the connection ends without a message.
const ENDED: &str = "the other side ended the connection: look at what it printed";
/// Most NICs of one side.
pub const MOST_NICS: usize = 64;
/// Maximum number of messages in flight.
pub const MOST_DEPTH: u32 = 8192;
/// Most messages of one size: their times are kept.
const MOST_MESSAGES: u64 = 10_000_000;
/// Longest reason that is passed on.
const LONGEST_REASON: usize = 2000;

/// What the messages do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The client writes to the server's memory (RDMA WRITE).
    Write,
    /// The client reads from the server's memory (RDMA READ).
    Read,
    /// The client sends, the server receives (SEND).
    Send,
}

/// The test. The client chooses it and sends it to the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Test {
    /// What the messages do.
    pub mode: Mode,
    /// Their sizes in bytes.
    pub sizes: Vec<u64>,
    /// Messages of each size, by each NIC.
    pub iterations: u64,
    /// Bytes of each size that each NIC moves at most: fewer messages of the large sizes.
    pub volume: Option<u64>,
    /// Messages in flight at once.
    pub depth: u32,
    /// Bytes of slots for one side's messages, unless two messages are larger.
    pub budget: u64,
    /// Writes are handed over: the server reports that it has handled a message, and the client reads that by RDMA READ.
    pub handshake: bool,
    /// Both sides move their payload through host memory.
    pub staged: bool,
    /// The target is compared byte by byte afterwards.
    pub verify: bool,
    /// Seed of the payload.
    pub seed: u64,
    /// NICs on each side.
    pub nics: usize,
}

impl Test {
    /// Messages of a size.
    pub fn messages(&self, size: u64) -> u64 {
        let most = self.volume.map_or(u64::MAX, |volume| (volume / size).max(1));
        self.iterations.min(most)
    }

    /// Whether the server handles each message: it gets a completion for each.
    pub fn is_handed_over(&self) -> bool {
        self.handshake || self.staged
    }

    /// Checks what the other side, or the command line, asks for.
    ///
    /// # Errors
    ///
    /// What cannot be done.
    pub fn check(&self) -> Result<(), String> {
        for size in &self.sizes {
            check_message(*size)?;
        }
        let no = |holds: bool, why: &str| if holds { Err(why.to_owned()) } else { Ok(()) };
        no(self.sizes.is_empty() || self.sizes.len() > 64, "give 1 to 64 sizes")?;
        no(
            !(1..=MOST_MESSAGES).contains(&self.iterations),
            "give 1 to 10000000 messages of each size",
        )?;
        no(self.volume == Some(0), "a volume of 0 bytes is no test")?;
        no(
            !(1..=MOST_DEPTH).contains(&self.depth),
            &format!("give a depth of 1 to {MOST_DEPTH} messages"),
        )?;
        no(
            self.handshake && self.mode != Mode::Write,
            "only writes have a handshake: reads need none, and sends have their receives",
        )?;
        no(
            self.staged && self.mode != Mode::Write,
            "only writes can be staged: use --mode write",
        )?;
        no(
            !(1..=MOST_NICS).contains(&self.nics),
            &format!("give 1 to {MOST_NICS} NICs"),
        )
    }
}

/// Memory that the other side may reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Its first byte's address, as verbs want it.
    pub address: u64,
    /// The key to it.
    pub rkey: u32,
    /// Its bytes.
    pub bytes: u64,
}

impl Window {
    /// The address of byte `at`, where `bytes` from there on are inside.
    ///
    /// # Errors
    ///
    /// They are not.
    pub fn at(&self, at: u64, bytes: u64) -> Result<u64> {
        match at.checked_add(bytes) {
            Some(end) if end <= self.bytes => self.address.checked_add(at).context("an address beyond 2^64"),
            _ => bail!(
                "{bytes} bytes at {at} are not inside the {} that the other side offers",
                self.bytes
            ),
        }
    }
}

/// A queue pair and its memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Name of the NIC.
    pub nic: String,
    /// `infiniband` or `ethernet`.
    pub link: Link,
    /// Local identifier of its port, 0 on Ethernet.
    pub lid: u16,
    /// The port's GID.
    pub gid: [u8; 16],
    /// Number of the queue pair, 24 bits.
    pub qpn: u32,
    /// First packet number, 24 bits.
    pub psn: u32,
    /// Largest packet, in bytes.
    pub mtu: u32,
    /// RDMA READs that it answers at once.
    pub reads: u8,
    /// Memory for the payload, in the kind of memory that is tried.
    pub payload: Window,
    /// The word that says how many messages were handled.
    pub handled: Window,
}

/// Kind of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// InfiniBand.
    Infiniband,
    /// Ethernet (RoCE).
    Ethernet,
}

impl Endpoint {
    fn check(&self) -> Result<()> {
        if self.qpn >= 1 << 24 || self.psn >= 1 << 24 {
            bail!(
                "queue pair number {} or packet number {} has more than 24 bits",
                self.qpn,
                self.psn
            );
        }
        if ![256, 512, 1024, 2048, 4096].contains(&self.mtu) {
            bail!("an MTU of {} bytes does not exist", self.mtu);
        }
        if self.nic.len() > 64 {
            bail!("the name of a NIC is too long");
        }
        Ok(())
    }
}

/// Checks the endpoints of the other side.
///
/// # Errors
///
/// What is wrong with them.
pub fn check_endpoints(endpoints: &[Endpoint], nics: usize) -> Result<()> {
    if endpoints.len() != nics {
        bail!("the other side has {} queues, not {nics}", endpoints.len());
    }
    endpoints.iter().try_for_each(|endpoint| {
        endpoint
            .check()
            .with_context(|| format!("what the other side says of its NIC {:?}", endpoint.nic))
    })
}

/// What a side's memory is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Side {
    /// Its NICs.
    pub nics: Vec<String>,
    /// `cpu`, `accelerator` or `pageless`.
    pub memory: String,
    /// The provider of each NIC's memory, by PCI address; empty for host memory.
    pub providers: Vec<String>,
    /// How the memory was registered: `dma-buf`, or `reg-mr`.
    pub registration: String,
}

/// What the server found after the messages of one size, for each NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// The check of its memory, if it is the target and the test requests a check.
    pub checked: Option<Checked>,
    /// Bytes its processor copied.
    pub copied: u64,
}

/// What the client says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum FromClient {
    /// The first message.
    Hello {
        /// Its [`VERSION`].
        version: u32,
        /// What is to be tried.
        test: Test,
    },
    /// Its queues.
    Connect(Vec<Endpoint>),
    /// Messages of this size follow.
    Start(u64),
    /// Messages are still in flight.
    Alive,
    /// All messages of the size are done.
    Finish,
    /// The test is over.
    Bye,
    /// It cannot go on.
    Failed(String),
}

/// What the server says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum FromServer {
    /// The answer to `hello`.
    Welcome {
        /// Its [`VERSION`].
        version: u32,
        /// What its memory is.
        side: Side,
        /// Its queues.
        endpoints: Vec<Endpoint>,
    },
    /// Its queues are connected.
    Ready,
    /// Its memory is prepared for the size.
    Started,
    /// What it found, for each NIC.
    Finished(Vec<Found>),
    /// It cannot go on.
    Failed(String),
}

/// A message by which a side says that it cannot go on.
pub trait Message: Serialize + DeserializeOwned {
    /// The reason, if it is that.
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

/// A reason, as short as the other side accepts it.
pub fn reason(error: &anyhow::Error) -> String {
    let mut text = format!("{error:#}");
    if text.len() > LONGEST_REASON {
        let end = (0..=LONGEST_REASON).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

/// Sizes as the table of contents shows them.
pub fn sizes_of(test: &Test) -> Sizes {
    Sizes(test.sizes.clone())
}

/// A connection to the other side.
#[derive(Debug)]
pub struct Line {
    stream: TcpStream,
    received: Vec<u8>,
    limit: Duration,
}

impl Line {
    /// Over a connected socket; no wait is longer than `limit`.
    ///
    /// # Errors
    ///
    /// The socket takes no options.
    pub fn new(stream: TcpStream, limit: Duration) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(limit))?;
        Ok(Self {
            stream,
            received: Vec::new(),
            limit,
        })
    }

    /// Says something.
    ///
    /// # Errors
    ///
    /// The other side is gone, or does not listen.
    pub fn say(&mut self, message: &impl Message) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.stream
            .write_all(&line)
            .context("the other side does not listen any more: look at what it printed")
    }

    /// Waits for a message.
    ///
    /// # Errors
    ///
    /// The limit is over, the other side is gone or failed, or what it says is no message.
    pub fn hear<M: Message>(&mut self) -> Result<M> {
        let limit = self.limit;
        match self.hear_within(limit)? {
            Some(message) => Ok(message),
            None => bail!("the other side said nothing for {limit:?}: is it stuck? --timeout sets the limit"),
        }
    }

    /// Waits for a message up to a limit; returns none if none came.
    ///
    /// # Errors
    ///
    /// As [`Line::hear`], except for the limit.
    pub fn hear_within<M: Message>(&mut self, limit: Duration) -> Result<Option<M>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.received.drain(..=end).collect();
                return parse(&line).map(Some);
            }
            if self.received.len() > LONGEST {
                bail!("the other side sends a line without an end: is it p2pmem-perf?");
            }
            // A timeout of zero means none, to the kernel.
            let left = deadline
                .saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(left))?;
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => bail!(ENDED),
                Ok(count) => self.received.extend_from_slice(&piece[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if Instant::now() >= deadline {
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // It ended before it had read all it was sent.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => bail!(ENDED),
                Err(error) => return Err(error).context("the connection to the other side broke"),
            }
        }
    }
}

fn parse<M: Message>(line: &[u8]) -> Result<M> {
    let message: M = serde_json::from_slice(line).with_context(|| {
        let start = String::from_utf8_lossy(&line[..line.len().min(80)]);
        format!(
            "the other side does not speak this program's language (is it p2pmem-perf of the same version?): {start:?}"
        )
    })?;
    match message.failure() {
        Some(why) => {
            // It may say anything: no control characters on the terminal.
            let why: String = why.chars().filter(|c| !c.is_control()).take(LONGEST_REASON).collect();
            bail!("the other side failed: {why}")
        }
        None => Ok(message),
    }
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
