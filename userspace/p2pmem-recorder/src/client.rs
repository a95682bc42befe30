// SPDX-License-Identifier: MIT OR Apache-2.0

//! The accelerator node: records what an accelerator computes, and plays recordings to it.
//!
//! An accelerator, or anything that stands for one, implements [`Compute`]. [`record`](record::record) computes each block in
//! a buffer of its memory and SENDs it from there; [`play`](play::play) READs each block into a buffer, and computes on it
//! there. Neither copies a block.

pub mod compute;
pub mod cpu;
mod link;
pub mod play;
pub mod record;
pub(crate) mod source;
pub mod spectrum;
pub(crate) mod target;

use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{ensure, Context, Result};

use crate::control::{self, ChannelRequest, Connection, ListedChannel, Reply, Request, Token};
use crate::wait::{wait, CHECK_INTERVAL};

/// The time between two looks at an accelerator without events.
const COMPUTE_INTERVAL: Duration = Duration::from_millis(1);
/// The most storage nodes of one recording or playback.
const MAX_SESSIONS: usize = 64;
/// The most channels of a listing.
const MAX_CHANNELS: usize = 1 << 20;
/// How long a program waits for the node's reason after a request has failed.
const REASON_LIMIT: Duration = Duration::from_secs(2);

use spectrum::Transform;

pub use compute::{Compute, Computed, Registered};

/// A storage node, and how to reach it.
#[derive(Debug, Clone)]
pub struct Remote {
    /// Host and port of the control connection.
    pub address: String,
    /// The token that the node has, too.
    pub token: Token,
    /// The name of this program, for people.
    pub name: String,
    /// How long to wait for the node.
    pub timeout: Duration,
}

impl Remote {
    /// Connects, and logs in.
    ///
    /// # Errors
    ///
    /// The node cannot be reached, or refuses the token or the version.
    pub fn connect(&self) -> Result<Connection> {
        let failed = || format!("connecting to the storage node {}", self.address);
        let addresses = self.address.to_socket_addrs().with_context(failed)?;
        let mut last = None;
        for address in addresses {
            match TcpStream::connect_timeout(&address, self.timeout) {
                Ok(stream) => {
                    let mut connection = Connection::new(stream, self.timeout)?;
                    connection.log_in(&self.token, &self.name).with_context(failed)?;
                    return Ok(connection);
                }
                Err(error) => last = Some(error),
            }
        }
        let error = last.unwrap_or_else(|| std::io::Error::other("the name has no address"));
        Err(error).with_context(failed)
    }

    /// Returns the channels of the node, and their latest recordings.
    ///
    /// # Errors
    ///
    /// Those of [`Remote::connect`], and of the control connection.
    pub fn list(&self) -> Result<Vec<ListedChannel>> {
        let mut connection = self.connect()?;
        connection.send(&Request::List)?;
        let mut all = Vec::new();
        loop {
            match connection.receive_reply()? {
                Reply::Listing { channels, last } => {
                    all.extend(channels);
                    ensure!(
                        all.len() <= MAX_CHANNELS,
                        "the node lists more than {MAX_CHANNELS} channels"
                    );
                    if last {
                        connection.send(&Request::Finish)?;
                        return Ok(all);
                    }
                }
                other => return Err(crate::control::unexpected(&other).into()),
            }
        }
    }
}

/// The session that a program asks for.
#[derive(Debug, Clone)]
pub struct SessionRequest {
    /// The storage node.
    pub remote: Remote,
    /// The channel.
    pub channel: ChannelRequest,
    /// The NIC of this machine.
    pub nic: String,
    /// The entry of the port's GID table.
    pub gid_index: u8,
    /// The number of the node's NIC.
    pub port: u32,
}

/// Which blocks are compared with what the processor computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verification {
    /// Each block whose number, counted from 0, is a multiple of this; 0 for none.
    pub every: u64,
}

/// Compares blocks with what the processor computes.
#[derive(Debug)]
struct Verifier {
    verification: Verification,
    transform: Transform,
    input: Vec<f32>,
    output: Vec<f32>,
    verified: u64,
}

impl Verifier {
    fn new(verification: Verification, block_size: u64) -> Self {
        let numbers = block_size as usize / 4;
        Self {
            verification,
            transform: Transform::default(),
            input: vec![0.0; numbers],
            output: vec![0.0; numbers],
            verified: 0,
        }
    }

    /// Compares the block in a buffer if its number, counted from 0, is one of those to verify.
    fn verify(&mut self, compute: &dyn Compute, buffer: u32, number: u64, sequence: u64) -> Result<()> {
        let every = self.verification.every;
        if every == 0 || number % every != 0 {
            return Ok(());
        }
        compute.copy(buffer, &mut self.input, &mut self.output)?;
        let verified = self.transform.verify(&self.input, &self.output);
        verified.with_context(|| format!("block {sequence} is wrong"))?;
        self.verified += 1;
        Ok(())
    }
}

/// Returns how long to wait at most. Work of an accelerator without events has to be looked for.
fn longest_wait(compute: &dyn Compute, computing: u32) -> Duration {
    if computing > 0 && compute.event().is_none() {
        COMPUTE_INTERVAL
    } else {
        CHECK_INTERVAL
    }
}

/// Returns the time in nanoseconds since 1970.
pub(crate) fn now() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the reason that the node gives for the end of a session. It explains more than the failure of the request that its
/// end caused, which is the answer if the node gives none.
fn reason_of(connection: &mut Connection, error: &anyhow::Error) -> String {
    if let Some(control::Error::Failed(reason)) = error.downcast_ref() {
        return reason.clone();
    }
    let deadline = Instant::now() + REASON_LIMIT;
    loop {
        match connection.try_receive_reply() {
            Err(control::Error::Failed(reason)) => return reason,
            Ok(None) if Instant::now() < deadline => {}
            _ => return format!("{error:#}"),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if wait(&[connection.as_fd()], left).is_err() {
            return format!("{error:#}");
        }
    }
}
