// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocates a buffer near the drive nvme0, and reads a file of this drive into the buffer, peer to peer.
//!
//! Usage: near_nvme FILE

use p2pmem::{human_size, open_direct, Client, Device, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: near_nvme FILE")?;
    let file = open_direct(&path)?;
    let size = file.metadata()?.len().max(1);

    let device = Device::open()?;
    let buffer = device.alloc(&Request::new(size).near([Client::resolve("nvme0")?]))?;
    let memory = buffer.map()?;
    let bytes = memory.read_from(&file, 0, 0..memory.len())?;
    println!(
        "{} went from nvme0 to provider {}",
        human_size(bytes as u64),
        buffer.provider()
    );
    Ok(())
}
