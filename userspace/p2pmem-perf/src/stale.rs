// SPDX-License-Identifier: MIT OR Apache-2.0

//! `stale-serve` and `stale-run`: attempts to write to a buffer after its end.
//!
//! A NIC must not write to revoked memory. The server registers a buffer, accepts one write of the client, ends the
//! buffer by a command, and keeps the registration. The client then tries further writes, each on a new connection,
//! because the first rejected write breaks a connection. Every write has a unique marker word, so a reader of the
//! memory finds any write that reached the memory.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;

use anyhow::{bail, ensure, Context, Result};
use p2pmem::human_size;
use p2pmem_payload::memory::{Memory, MemoryOptions};
use p2pmem_payload::nic::open_nics;
use p2pmem_verbs::{Completions, Domain, QueuePair, Remote, Request, Work};
use serde::{Deserialize, Serialize};

use crate::cli::{OwnArgs, StaleRunArgs, StaleServeArgs};
use crate::client::reach;
use crate::pattern::mixed;
use crate::print_json;
use crate::session::{own_endpoint, RETRIES};
use crate::waiter::{Stop, Waiter};
use crate::wire::{check_endpoints, reason, Control, Endpoint, Message};

/// Bytes of a write.
const BLOCK: u64 = 4096;
/// Maximum number of writes.
const MAX_WRITES: u64 = 1000;
/// `IBV_WC_REM_ACCESS_ERR`
const REMOTE_ACCESS_ERROR: u32 = 10;

/// Messages of both sides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
enum StaleMessage {
    /// Client: number of writes to try after the end.
    Hello(u64),
    /// Both: a queue pair for each write, and one for the write before the end.
    Queues(Vec<Endpoint>),
    /// Server: the queue pairs are connected.
    Ready,
    /// Client: the write before the end is complete.
    Wrote,
    /// Server: the buffer has ended.
    Ended,
    /// Client: all writes were tried.
    Tried,
    /// Either side: cannot continue, with the reason.
    Failed(String),
}

impl Message for StaleMessage {
    fn failure(&self) -> Option<&str> {
        if let Self::Failed(why) = self {
            Some(why)
        } else {
            None
        }
    }
}

/// Returns the marker word of write `i`; write 0 is the write before the end.
fn marker(seed: u64, i: u64) -> u64 {
    mixed(mixed(seed).wrapping_add(i))
}

fn block(word: u64) -> Vec<u8> {
    word.to_le_bytes().repeat((BLOCK / 8) as usize)
}

/// Queue pairs of one side, and the memory that they use.
struct Queues {
    // Fields are dropped in this order: the queue pairs before the memory that they use.
    list: Vec<(QueuePair, Endpoint)>,
    memory: Memory,
    completions: Arc<Completions>,
}

impl Queues {
    fn new(own: &OwnArgs, writes: u64) -> Result<Self> {
        let nics = open_nics(&own.side.nic)?;
        let [nic] = nics.as_slice() else {
            bail!("specify one NIC (--nic)")
        };
        let domain = Domain::new(nic.clone())?;
        let options = MemoryOptions {
            kind: own.memory,
            provider: own.device.as_deref(),
            device: &own.side.dev_path,
        };
        let memory = Memory::new(options, &domain, (writes + 1) * BLOCK)?;
        let completions = Completions::new(nic, 64)?;
        let list = (0..=writes).map(|_| {
            let queue = QueuePair::new(&domain, &completions, 1, 1).context("creating a queue pair")?;
            let window = memory.window(0, (writes + 1) * BLOCK);
            let endpoint = own_endpoint(&queue, own, window, window)?;
            Ok((queue, endpoint))
        });
        Ok(Self {
            list: list.collect::<Result<_>>()?,
            memory,
            completions,
        })
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        self.list.iter().map(|(_, endpoint)| endpoint.clone()).collect()
    }

    fn connect(&self, own: &OwnArgs, others: &[Endpoint]) -> Result<()> {
        check_endpoints(others, self.list.len())?;
        for ((queue, endpoint), other) in self.list.iter().zip(others) {
            queue
                .connect(&endpoint.address, own.side.gid_index, &other.address, RETRIES)
                .context("connecting")?;
        }
        Ok(())
    }
}

/// Serves one client.
///
/// # Errors
///
/// Any error of the test. The message says what to do.
pub fn serve(args: &StaleServeArgs) -> Result<()> {
    let listener = TcpListener::bind((args.listen.as_str(), args.port))
        .with_context(|| format!("listening on {}, port {}", args.listen, args.port))?;
    eprintln!("p2pmem-perf: listening on {}", listener.local_addr()?);
    let (stream, _) = listener.accept().context("waiting for a client")?;
    talk(stream, &args.own, |control| serve_one(control, args))
}

/// Runs one side, and reports an error of this side to the peer.
fn talk<T>(stream: TcpStream, own: &OwnArgs, side: impl FnOnce(&mut Control) -> Result<T>) -> Result<T> {
    let mut control = Control::new(stream, own.side.timeout)?;
    let result = side(&mut control);
    if let Err(error) = &result {
        // The peer may have disconnected; then `error` says so.
        let _ = control.send(&StaleMessage::Failed(reason(error)));
    }
    result
}

fn serve_one(control: &mut Control, args: &StaleServeArgs) -> Result<()> {
    let StaleMessage::Hello(writes) = control.receive()? else {
        bail!("expected the message `hello` of the client")
    };
    ensure!(
        (1..=MAX_WRITES).contains(&writes),
        "the client requests {writes} writes: 1 to {MAX_WRITES} are possible"
    );
    let queues = Queues::new(&args.own, writes)?;
    let span = queues.memory.span();
    span.write(0, &vec![0; span.len()]);
    span.flush();
    control.send(&StaleMessage::Queues(queues.endpoints()))?;
    let StaleMessage::Queues(others) = control.receive()? else {
        bail!("expected the message `queues` of the client")
    };
    queues.connect(&args.own, &others)?;
    control.send(&StaleMessage::Ready)?;
    let StaleMessage::Wrote = control.receive()? else {
        bail!("expected the message `wrote` of the client")
    };
    let mut first = vec![0; BLOCK as usize];
    span.read(0, &mut first);
    ensure!(
        first.iter().any(|byte| *byte != 0),
        "no write arrived before the buffer's end, so the test cannot show anything about writes after the end"
    );
    eprintln!(
        "p2pmem-perf: {} arrived; ending the buffer: {}",
        human_size(BLOCK),
        args.end
    );
    let status = Command::new("sh")
        .args(["-c", &args.end])
        .status()
        .context("running sh")?;
    ensure!(status.success(), "the command that ends the buffer failed: {status}");
    control.send(&StaleMessage::Ended)?;
    // The registration is kept until then, as by a program that ignores events.
    let StaleMessage::Tried = control.receive()? else {
        bail!("expected the message `tried` of the client")
    };
    Ok(())
}

/// Result of the writes.
#[derive(Debug, Serialize)]
struct WriteResults {
    /// Writes tried after the buffer's end.
    attempts: u64,
    /// Writes that completed without an error.
    completed: u64,
    /// Writes that ended with a remote access error.
    refused: u64,
    /// Marker words of the writes, in hexadecimal.
    markers: Vec<String>,
    /// Marker word of the write before the end.
    before: String,
}

/// Tries the writes. Returns whether the NIC rejected all of them.
///
/// # Errors
///
/// Any error of the test. The message says what to do.
pub fn run(args: &StaleRunArgs, json: bool, out: &mut dyn Write) -> Result<bool> {
    let stream = reach(&args.host, args.port, args.own.side.timeout)?;
    let tried = talk(stream, &args.own, |control| run_one(control, args))?;
    let good = tried.refused == tried.attempts;
    if json {
        print_json(out, &tried)?;
    } else {
        writeln!(
            out,
            "{} writes after the buffer's end: {} refused with a remote access error, {} completed",
            tried.attempts, tried.refused, tried.completed
        )?;
    }
    Ok(good)
}

fn run_one(control: &mut Control, args: &StaleRunArgs) -> Result<WriteResults> {
    let writes = u64::from(args.attempts);
    control.send(&StaleMessage::Hello(writes))?;
    let StaleMessage::Queues(others) = control.receive()? else {
        bail!("expected the message `queues` of the server")
    };
    let queues = Queues::new(&args.own, writes)?;
    queues.connect(&args.own, &others)?;
    control.send(&StaleMessage::Queues(queues.endpoints()))?;
    let StaleMessage::Ready = control.receive()? else {
        bail!("expected the message `ready` of the server")
    };
    let marker = |i| marker(args.seed, i);
    for i in 0..=writes {
        queues.memory.span().write((i * BLOCK) as usize, &block(marker(i)));
    }
    queues.memory.span().flush();
    let waiter = Waiter::new(
        queues.completions.clone(),
        args.own.side.how(),
        args.own.side.timeout,
        Stop::default(),
    );
    let write = |i: u64| -> Result<Option<u32>> {
        let (queue, _) = &queues.list[usize::try_from(i)?];
        let payload = &others[usize::try_from(i)?].payload;
        let to = Remote {
            address: payload.at(i * BLOCK, BLOCK)?,
            rkey: payload.rkey,
        };
        queue.post(&[Request {
            id: i,
            local: queues.memory.segment(i * BLOCK, BLOCK),
            work: Work::Write(to, None),
            signaled: true,
        }])?;
        let done = waiter.next_completion(&|| format!("write {i}"))?;
        ensure!(
            done.id == i,
            "expected the completion of request {i}, received that of {}",
            done.id
        );
        Ok(done.failure.map(|failure| failure.status))
    };
    if let Some(status) = write(0)? {
        bail!("the write before the end failed with status {status}");
    }
    control.send(&StaleMessage::Wrote)?;
    let StaleMessage::Ended = control.receive()? else {
        bail!("expected the message `ended` of the server")
    };
    let (mut completed, mut refused) = (0, 0);
    for i in 1..=writes {
        match write(i)? {
            None => completed += 1,
            Some(REMOTE_ACCESS_ERROR) => refused += 1,
            Some(status) => eprintln!("p2pmem-perf: write {i} failed with status {status}"),
        }
    }
    control.send(&StaleMessage::Tried)?;
    let hex = |i| format!("{:016x}", marker(i));
    Ok(WriteResults {
        attempts: writes,
        completed,
        refused,
        markers: (1..=writes).map(hex).collect(),
        before: hex(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn markers_are_unique() {
        let all: BTreeSet<u64> = (0..=MAX_WRITES).flat_map(|i| [marker(1, i), marker(2, i)]).collect();
        assert_eq!(all.len() as u64, 2 * (MAX_WRITES + 1));
        assert!(!all.contains(&0));
        assert_eq!(block(0x0102).len() as u64, BLOCK);
    }

    #[test]
    fn invalid_messages_are_rejected() {
        let parse = |text: &str| serde_json::from_str::<StaleMessage>(text);
        assert_eq!(parse(r#"{"hello":20}"#).unwrap(), StaleMessage::Hello(20));
        for text in [r#"{"hello":-1}"#, r#""hello""#, "{}", r#"{"queues":[{}]}"#] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
