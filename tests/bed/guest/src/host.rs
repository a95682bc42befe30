// SPDX-License-Identifier: MIT OR Apache-2.0

//! Requests of a program in the guest to the VM runner, for operations that only the host can do.
//!
//! The guest's init listens on [`SOCKET`] and forwards requests. A request is one line of JSON, and so is its answer:
//! `{"Ok": value}` or `{"Err": "reason"}`. A shell script can send requests too:
//! `echo '{"op":"snapshot"}' | socat - UNIX-CONNECT:/run/p2pmem/host.sock`.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::patience::{Overrun, patiently};
use crate::wire::Request;

/// The socket on which the guest's init listens.
pub const SOCKET: &str = "/run/p2pmem/host.sock";

/// The time limit of a request. An orderly unplug takes the longest.
const LIMIT: Duration = Duration::from_secs(120);

/// Sends a request to the runner and waits for the answer.
///
/// # Errors
///
/// The runner's message if the request fails on the host, or a failure of the connection. Outside a guest the socket
/// does not exist. The error is an [`Overrun`] if no answer comes in time, or if the runner's own wait exceeded a time
/// limit.
pub fn request(request: &Request) -> Result<serde_json::Value> {
    let mut stream = UnixStream::connect(SOCKET)
        .with_context(|| format!("{SOCKET}: this program must run in a guest of the VM runner"))?;
    stream.set_read_timeout(Some(patiently(LIMIT)))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    match BufReader::new(stream).read_line(&mut answer) {
        Ok(_) => {}
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            bail!(Overrun(format!("no answer from the VM runner: {e}")))
        }
        Err(e) => return Err(e).context("no answer from the VM runner"),
    }
    let answer: Result<serde_json::Value, String> = serde_json::from_str(&answer).context("answer of the VM runner")?;
    answer.map_err(Overrun::from_text)
}
