// SPDX-License-Identifier: MIT OR Apache-2.0

//! Receives chunks in device memory near a NIC from `rdma_server`, and compares each byte.
//!
//! Usage: rdma_client NIC HOST [CHUNKS [PORT]]

mod rdma_peer;

use std::net::TcpStream;

use rdma_peer::{content, Peer, Result, CHUNK, PORT, SLOTS};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [nic, host, rest @ ..] = arguments.as_slice() else {
        return Err("usage: rdma_client NIC HOST [CHUNKS [PORT]]".into());
    };
    let chunks: u64 = rest.first().map_or(Ok(20_000), |text| text.parse())?;
    let port = rest.get(1).map_or(Ok(PORT), |text| text.parse())?;

    let stream = TcpStream::connect((host.as_str(), port))?;
    let mut peer = Peer::new(nic, &stream)?;
    let mut bytes = vec![0; CHUNK];
    for chunk in 0..chunks {
        peer.wait_for(chunk + 1)?;
        let slot = (chunk % SLOTS) as usize;
        peer.memory.copy_to_slice(slot * CHUNK, &mut bytes)?;
        if bytes != content(chunk) {
            return Err(format!("chunk {chunk} is not what the server wrote").into());
        }
        // The server may write the next chunk to the slot.
        peer.tell(chunk + 1)?;
    }
    println!("{chunks} chunks of {CHUNK} bytes arrived, and each byte is right");
    Ok(())
}
