// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves the management of a storage node with two drives in a temporary folder, and a session that records: for trying the
//! pages without drives, NICs, and accelerators.

use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use p2pmem_recorder::node::{Node, NodeOptions, SessionOptions};
use p2pmem_recorder::status::{Direction, Limit, MemoryKind};
use p2pmem_recorder::store::{ChannelName, LunOptions, StreamOptions};
use p2pmem_recorder::web::{serve, WebOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(token)) = (arguments.next(), arguments.next()) else {
        return Err("usage: web ADDRESS:PORT TOKEN; the token has at least 16 characters".into());
    };
    let folder = tempfile::tempdir()?;
    let drives = ["nvme0", "nvme1"].map(|name| folder.path().join(name));
    for drive in &drives {
        std::fs::create_dir(drive)?;
    }
    let mut options = NodeOptions::new("example", drives.clone());
    options.cached = true;
    options.memory = MemoryKind::Host;
    let node = Node::open(options)?;
    node.create_lun("fast", &LunOptions::new(drives).segment_size(8 << 20).segments(8))?;
    node.create_stream("fast", "radar", &StreamOptions::new(1 << 20).channels(2))?;
    let server = serve(Arc::clone(&node), TcpListener::bind(address)?, &WebOptions::new(token))?;
    println!("http://{}/ until the end of standard input", server.address());

    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| count_blocks(&node, &ends));
        // Returns at the end of standard input.
        let result = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ends.store(true, Ordering::Relaxed);
        result
    })?;
    server.stop();
    Ok(())
}

/// Counts blocks of a session as if it recorded, until `ends` or until it is stopped.
fn count_blocks(node: &Node, ends: &AtomicBool) {
    let session = node.begin_session(SessionOptions {
        direction: Direction::Record,
        channel: ChannelName::new("fast", "radar", 0),
        recording: 0,
        peer: "accelerator-node".into(),
        nic: "mlx5_0".into(),
        memory: "0000:04:00.0, one PCIe switch: traffic stays in it".into(),
        devices: Default::default(),
        block_size: 1 << 20,
        buffers: 16,
    });
    for round in 0_u64.. {
        if ends.load(Ordering::Relaxed) || session.is_stopped() {
            return;
        }
        let slow = round / 200 % 2 == 1;
        for _ in 0..if slow { 2 } else { 10 } {
            session.arrived();
            session.acknowledged(1);
        }
        session.progress(if slow { 14 } else { 3 }, if slow { Limit::Drive } else { Limit::Peer });
        std::thread::sleep(Duration::from_millis(20));
    }
}
