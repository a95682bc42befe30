// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two adapters on one switch, and one RDMA WRITE from the memory of the first to the memory of the second. One thread
//! drives both adapters.

mod adapter;

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use p2pmem_ib::{Completion, Delivery, Engine, Fabric, PortConfig, Remote, SendOp, Topology};

use adapter::{Adapter, QPN, work};

type Error = Box<dyn std::error::Error>;

/// Longest duration of the WRITE.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An adapter with its engine, and the inbox for deliveries of the fabric.
struct Node {
    engine: Engine,
    adapter: Adapter,
    inbox: Receiver<Delivery>,
    completions: Receiver<Completion>,
}

impl Node {
    fn new(fabric: &Fabric, name: &str, guid: u64, memory: Vec<u8>) -> Result<Self, Error> {
        let (sender, inbox) = mpsc::channel();
        let config = PortConfig {
            name: name.to_owned(),
            guid,
            switch: "sw".to_owned(),
            bytes_per_second: None,
        };
        // Fails only if the receiver was dropped: no delivery is expected then.
        let port = fabric.join(&config, move |delivery| drop(sender.send(delivery)))?;
        let (adapter, engine, completions) = Adapter::new(port, memory);
        Ok(Self {
            engine,
            adapter,
            inbox,
            completions,
        })
    }

    /// Handles the inbox, and does a bounded amount of the pending work.
    fn step(&mut self) {
        for delivery in self.inbox.try_iter() {
            match delivery {
                Delivery::Packets(burst) => self.engine.packets(&mut self.adapter, burst),
                Delivery::PathReady => self.engine.path_ready(),
                Delivery::Link(up) => println!("the link is {}", if up { "up" } else { "down" }),
            }
        }
        self.engine.run(&mut self.adapter);
    }
}

fn main() -> Result<(), Error> {
    let topology = Topology {
        switches: vec!["sw".to_owned()],
        links: Vec::new(),
    };
    let fabric = Fabric::new(&topology, 1)?;
    let bytes: Vec<u8> = (0..100_000_u32).map(|i| i as u8).collect();
    let mut a = Node::new(&fabric, "a", 100, bytes.clone())?;
    let mut b = Node::new(&fabric, "b", 101, vec![0; bytes.len()])?;
    let lids = (a.adapter.port.lid(), b.adapter.port.lid());
    a.adapter.connect(&mut a.engine, lids.1)?;
    b.adapter.connect(&mut b.engine, lids.0)?;

    let op = SendOp::Write {
        remote: Remote { address: 0, key: 1 },
        imm: None,
    };
    a.adapter.send_queue.push_back(work(1, op, 0, bytes.len() as u32));
    a.engine.doorbell(QPN);
    let start = Instant::now();
    let completion = loop {
        if let Ok(completion) = a.completions.try_recv() {
            break completion;
        }
        if start.elapsed() > TIMEOUT {
            return Err("the RDMA WRITE did not complete within 60 s".into());
        }
        a.step();
        b.step();
    };
    println!("{completion:?}");
    assert!(
        b.adapter.memory == bytes,
        "the memory of adapter b differs from the bytes that adapter a wrote"
    );
    println!("wrote {} bytes: {:?}", bytes.len(), a.adapter.port.counters());
    Ok(())
}
