// SPDX-License-Identifier: MIT OR Apache-2.0

//! Lines of JSON that the two nodes exchange by TCP.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use anyhow::{bail, Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::options::{Deadline, Mode};
use crate::endpoint::Address;
use crate::wqe::{Remote, Transport};

/// Longest line.
const MAX_LINE: u64 = 4096;

/// The parameters of a run, which the node that runs chooses.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Parameters {
    pub(super) transport: Transport,
    pub(super) mode: Mode,
    pub(super) size: u32,
    pub(super) messages: u64,
    pub(super) batch: u32,
}

/// One side's queue pair and memory.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Side {
    pub(super) address: Address,
    /// Where messages of WRITEs go.
    pub(super) inbox: Remote,
    /// The 8 bytes of the signal.
    pub(super) signal: Remote,
}

/// The connection to the other node.
pub struct Wire {
    reader: BufReader<TcpStream>,
}

impl Wire {
    /// Uses a connection.
    pub fn new(stream: TcpStream) -> Self {
        Self {
            reader: BufReader::new(stream),
        }
    }

    /// Sends a value.
    ///
    /// # Errors
    ///
    /// The other node ended the connection.
    pub fn send<T: Serialize>(&mut self, value: &T) -> Result<()> {
        let line = serde_json::to_string(value)? + "\n";
        let sent = self.reader.get_mut().write_all(line.as_bytes());
        sent.context("the other node ended the connection")
    }

    /// Receives a value.
    ///
    /// # Errors
    ///
    /// The other node ended the connection or sent something else, or the deadline passed.
    pub fn receive<T: DeserializeOwned>(&mut self, deadline: Deadline) -> Result<T> {
        self.reader.get_ref().set_read_timeout(Some(deadline.left()?))?;
        let mut line = String::new();
        let read = std::io::Read::take(&mut self.reader, MAX_LINE).read_line(&mut line);
        match read.context("waiting for the other node")? {
            0 => bail!("the other node ended the connection: see its output"),
            _ => serde_json::from_str(&line).with_context(|| format!("the other node sent {line:?}")),
        }
    }

    /// Waits until both nodes have called this.
    ///
    /// # Errors
    ///
    /// Those of [`Wire::receive`].
    pub fn meet(&mut self, deadline: Deadline) -> Result<()> {
        self.send(&"ready")?;
        self.receive::<String>(deadline).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;

    fn pair() -> (Wire, Wire) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Wire::new(near), Wire::new(listener.accept().unwrap().0))
    }

    fn soon() -> Deadline {
        Deadline(Instant::now() + Duration::from_secs(60))
    }

    #[test]
    fn values_arrive() {
        let (mut near, mut far) = pair();
        let remote = Remote { address: 7, rkey: 8 };
        near.send(&remote).unwrap();
        assert_eq!(far.receive::<Remote>(soon()).unwrap(), remote);
    }

    #[test]
    fn an_end_and_garbage_are_errors() {
        let (mut near, mut far) = pair();
        near.send(&"text").unwrap();
        let error = far.receive::<Remote>(soon()).unwrap_err();
        assert!(format!("{error:#}").contains("the other node sent"), "{error:#}");
        drop(near);
        let error = far.receive::<Remote>(soon()).unwrap_err();
        assert!(error.to_string().contains("ended the connection"), "{error}");
        let over = Deadline(Instant::now());
        let (_near, mut far) = pair();
        assert!(format!("{:#}", far.receive::<Remote>(over).unwrap_err()).contains("--timeout"));
    }
}
