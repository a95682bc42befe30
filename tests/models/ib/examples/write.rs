// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two adapters on one switch, and one RDMA WRITE from the memory of the first to the memory of the second.
//!
//! An adapter here is the least that there can be: memory that every key allows all of, one queue pair, and an inbox. One
//! thread drives both.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use p2pmem_ib::{
    Access, AccessFlags, Atomic, Completion, Delivery, Engine, Event, Fabric, Fault, Fetched, Host, Modify, Mtu,
    Packet, Path, Payload, Port, PortAttributes, PortConfig, QpConfig, Queue, ReceiveFrom, ReceiveWork, Remote,
    SendFlags, SendOp, SendWork, Service, Sge, State, Status, Topology,
};

type Error = Box<dyn std::error::Error>;

/// The number of each adapter's queue pair.
const QPN: u32 = 7;
/// Longest time for the write.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What an engine asks of the adapter around it.
struct Adapter {
    start: Instant,
    port: Port,
    memory: Vec<u8>,
    send_queue: Vec<SendWork>,
    completions: Vec<Completion>,
}

impl Adapter {
    fn range(&self, access: &Access) -> Result<std::ops::Range<usize>, Fault> {
        let end = access.address.checked_add(access.length).ok_or(Fault::Bounds)?;
        if end > self.memory.len() as u64 {
            return Err(Fault::Bounds);
        }
        Ok(access.address as usize..end as usize)
    }
}

impl Host for Adapter {
    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn next_send(&mut self, _qpn: u32) -> Fetched<SendWork> {
        self.send_queue.pop().map_or(Fetched::Empty, Fetched::Work)
    }

    fn next_receive(&mut self, _queue: Queue) -> Fetched<ReceiveWork> {
        Fetched::Empty
    }

    fn read(&mut self, access: &Access, data: &mut [u8]) -> Result<(), Fault> {
        data.copy_from_slice(&self.memory[self.range(access)?]);
        Ok(())
    }

    fn write(&mut self, access: &Access, data: &[u8]) -> Result<(), Fault> {
        let range = self.range(access)?;
        self.memory[range].copy_from_slice(data);
        Ok(())
    }

    fn check(&mut self, access: &Access) -> Result<(), Fault> {
        self.range(access).map(drop)
    }

    fn atomic(&mut self, _access: &Access, _operation: Atomic) -> Result<u64, Fault> {
        Err(Fault::Rights)
    }

    fn local(&mut self, _qpn: u32, _id: u64) -> Result<(), Status> {
        Ok(())
    }

    fn invalidate(&mut self, _qpn: u32, _pd: u32, _key: u32) -> Result<(), Fault> {
        Err(Fault::Key)
    }

    fn complete(&mut self, completion: Completion) {
        self.completions.push(completion);
    }

    fn event(&mut self, event: Event) {
        println!("event: {event:?}");
    }

    fn transmit(&mut self, packets: Vec<Packet>) {
        self.port.send(packets);
    }

    fn has_room(&mut self, dlid: u16) -> bool {
        self.port.has_room(dlid)
    }

    fn in_flight(&mut self, dlid: u16) -> bool {
        self.port.in_flight(dlid)
    }
}

/// An adapter with its engine, and the inbox that the fabric puts deliveries into.
struct Node {
    engine: Engine,
    adapter: Adapter,
    inbox: Receiver<Delivery>,
}

impl Node {
    fn new(fabric: &Fabric, name: &str, guid: u64, memory: Vec<u8>) -> Result<Self, Error> {
        let (sender, inbox) = mpsc::channel();
        let config = PortConfig {
            name: name.to_owned(),
            guid,
            switch: "sw".to_owned(),
        };
        // Fails only when the receiver is gone, and then nobody waits for the delivery.
        let port = fabric.join(&config, move |delivery| drop(sender.send(delivery)))?;
        let attributes = PortAttributes {
            lid: port.lid(),
            lmc: 0,
            gids: vec![port.gid()],
            pkeys: vec![0xffff],
        };
        Ok(Self {
            engine: Engine::new(attributes),
            adapter: Adapter {
                start: Instant::now(),
                port,
                memory,
                send_queue: Vec::new(),
                completions: Vec::new(),
            },
            inbox,
        })
    }

    /// Makes the queue pair and connects it to the other adapter's.
    fn connect(&mut self, dlid: u16) -> Result<(), Error> {
        self.engine.create_qp(
            QPN,
            QpConfig {
                service: Service::Rc,
                pd: 1,
                send_cqn: 1,
                receive_cqn: 1,
                receive: ReceiveFrom::None,
                xrcd: 0,
                source_qpn: None,
                deaf_to_itself: false,
            },
        )?;
        for state in [State::Init, State::Rtr, State::Rts] {
            let change = Modify {
                state: Some(state),
                access: Some(AccessFlags {
                    write: true,
                    read: false,
                    atomic: false,
                }),
                mtu: Some(Mtu::B4096),
                receive_psn: Some(0),
                send_psn: Some(0),
                remote_qpn: Some(QPN),
                path: Some(Path {
                    dlid,
                    path_bits: 0,
                    sl: 0,
                    grh: None,
                }),
                retry_count: Some(7),
                ack_timeout: Some(12),
                ..Modify::default()
            };
            self.engine.modify(&mut self.adapter, QPN, &change)?;
        }
        Ok(())
    }

    /// Takes in what has arrived, and does a part of the work that there is.
    fn step(&mut self) {
        for delivery in self.inbox.try_iter() {
            match delivery {
                Delivery::Packets(burst) => self.engine.packets(&mut self.adapter, burst),
                Delivery::Room => self.engine.room(),
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
    a.connect(lids.1)?;
    b.connect(lids.0)?;

    let all = Sge {
        key: 1,
        address: 0,
        length: bytes.len() as u32,
    };
    a.adapter.send_queue.push(SendWork {
        id: 1,
        op: SendOp::Write {
            remote: Remote { address: 0, key: 1 },
            imm: None,
        },
        flags: SendFlags {
            signaled: true,
            ..SendFlags::default()
        },
        payload: Payload::Memory([all].into_iter().collect()),
        to: None,
        remote_srqn: 0,
    });
    a.engine.doorbell(QPN);
    let start = Instant::now();
    while a.adapter.completions.is_empty() {
        if start.elapsed() > TIMEOUT {
            return Err("the write did not complete in time".into());
        }
        a.step();
        b.step();
    }
    println!("{:?}", a.adapter.completions[0]);
    assert!(
        b.adapter.memory == bytes,
        "the bytes of adapter a are in the memory of adapter b"
    );
    println!("wrote {} bytes: {:?}", bytes.len(), a.adapter.port.counters());
    Ok(())
}
