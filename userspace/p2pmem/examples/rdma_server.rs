// SPDX-License-Identifier: MIT OR Apache-2.0

//! Writes chunks from device memory near a NIC to the device memory of another node, by RDMA WRITE. The other node runs
//! `rdma_client`. No byte of a chunk is in host memory of either node but the copy that the processor makes here to fill the
//! device memory, where a program would have an accelerator.
//!
//! Usage: rdma_server NIC [CHUNKS [PORT]]

mod rdma_peer;

use std::io::Read;
use std::net::TcpListener;
use std::time::Instant;

use p2pmem::human_size;
use rdma_peer::{content, Peer, Result, CHUNK, PORT, SLOTS};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let nic = arguments.first().ok_or("usage: rdma_server NIC [CHUNKS [PORT]]")?;
    let chunks: u64 = arguments.get(1).map_or(Ok(20_000), |text| text.parse())?;
    let port = arguments.get(2).map_or(Ok(PORT), |text| text.parse())?;

    let (mut stream, client) = TcpListener::bind(("0.0.0.0", port))?.accept()?;
    let mut peer = Peer::new(nic, &stream)?;
    let start = Instant::now();
    for chunk in 0..chunks {
        // The slot is free when the client has handled the chunk that was in it.
        peer.wait_for((chunk + 1).saturating_sub(SLOTS))?;
        let at = (chunk % SLOTS) as usize * CHUNK;
        peer.memory.copy_from_slice(at, &content(chunk))?;
        peer.memory.flush();
        peer.queue
            .write(&peer.registration, at..at + CHUNK, &peer.remote, at as u64)?;
        peer.tell(chunk + 1)?;
    }
    peer.wait_for(chunks)?;
    let bytes = chunks * CHUNK as u64;
    let rate = bytes as f64 / start.elapsed().as_secs_f64() / 1e6;
    println!(
        "{} written to {client} in {chunks} chunks, {rate:.0} MB/s",
        human_size(bytes)
    );
    // The client's last message is complete when the client has ended. After its end, there is nothing to read.
    let _ = stream.read(&mut [0]);
    Ok(())
}
