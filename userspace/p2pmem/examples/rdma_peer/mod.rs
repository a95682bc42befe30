// SPDX-License-Identifier: MIT OR Apache-2.0

//! What `rdma_server` and `rdma_client` share: memory near a NIC, the connection to the other node, and the words by which the
//! nodes report how far they are.
//!
//! The memory of each node has slots for chunks, an inbox, which the other node writes, and an outbox, from which this node
//! writes to the other one's inbox. Writes of one connection arrive in order: a node that sees a word in the inbox has all chunks that
//! were written before it.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use p2pmem::rdma::{Endpoint, Nic, Queue};
use p2pmem::{Access, Device, Mapping, Registration, RemoteMemory, Request};

/// A result with any error.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The TCP port of the server.
pub const PORT: u16 = 20886;
/// Bytes of a chunk.
pub const CHUNK: usize = 2 << 20;
/// Chunks that fit into the memory.
pub const SLOTS: u64 = 2;

const INBOX: usize = SLOTS as usize * CHUNK;
const OUTBOX: usize = INBOX + 64;
const SIZE: u64 = INBOX as u64 + 4096;
/// How long to wait for the other node.
const LIMIT: Duration = Duration::from_secs(30);

/// The connection to the other node.
pub struct Peer {
    /// The memory of this node.
    pub memory: Mapping,
    /// The same memory, as the NIC knows it.
    pub registration: Registration,
    /// The memory of the other node.
    pub remote: RemoteMemory,
    /// The queue pair.
    pub queue: Queue,
}

impl Peer {
    /// Allocates and registers memory, and connects a queue pair to the one of the other node, which does the same. Both send
    /// what the other one needs as a line of JSON.
    pub fn new(nic: &str, mut stream: &TcpStream) -> Result<Self> {
        stream.set_read_timeout(Some(LIMIT))?;
        let nic = Nic::open(nic)?;
        let buffer = Device::open()?.alloc(&Request::new(SIZE).near([nic.client().clone()]))?;
        let memory = buffer.map()?;
        // Before the other node has the address: the inbox says that nothing is there.
        memory.fill(0..memory.len(), 0)?;
        memory.flush();
        let domain = nic.alloc_pd()?;
        let registration = buffer.register(&domain, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let mut queue = nic.queue(&domain)?;

        let own = serde_json::to_string(&(queue.endpoint(), registration.remote()))?;
        writeln!(stream, "{own}")?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        let (endpoint, remote): (Endpoint, RemoteMemory) =
            serde_json::from_str(&line).map_err(|why| format!("the other node sent {line:?}: {why}"))?;
        queue.connect(&endpoint)?;
        Ok(Self {
            memory,
            registration,
            remote,
            queue,
        })
    }

    /// Writes a number to the inbox of the other node.
    pub fn tell(&mut self, number: u64) -> Result<()> {
        self.memory.copy_from_slice(OUTBOX, &number.to_le_bytes())?;
        self.memory.flush();
        let range = OUTBOX..OUTBOX + 8;
        Ok(self
            .queue
            .write(&self.registration, range, &self.remote, INBOX as u64)?)
    }

    /// Waits until the number in the inbox is at least `number`.
    pub fn wait_for(&self, number: u64) -> Result<()> {
        let end = Instant::now() + LIMIT;
        let mut word = [0; 8];
        loop {
            self.memory.copy_to_slice(INBOX, &mut word)?;
            let seen = u64::from_le_bytes(word);
            if seen >= number {
                // The chunk is read after the word.
                self.memory.order_loads();
                return Ok(());
            }
            if Instant::now() > end {
                return Err(
                    format!("the other node is at {seen}, not at {number}, after {LIMIT:?}; has it ended?").into(),
                );
            }
            std::thread::yield_now();
        }
    }
}

/// Returns the bytes of a chunk.
pub fn content(chunk: u64) -> Vec<u8> {
    let word = |index: u64| ((chunk << 32) | index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..CHUNK as u64 / 8)
        .flat_map(|index| word(index).to_le_bytes())
        .collect()
}
