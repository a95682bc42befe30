// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two devices of one guest in one process: the one reaches the other's memory wherever the guest puts it, and only there.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use p2pmem_vfio_user::client::Client;
use p2pmem_vfio_user::proto::{self};
use p2pmem_vfio_user::{
    BarKind, Bus, ConfigBuilder, ConfigSpace, Device, DmaError, LinkSpeed, Memory, Moved, Peers, Region, serve,
};

const SIZE: u64 = 1 << 20;
const COMMAND: u64 = 4;
const BAR2: u64 = 0x18;

/// A device that is memory behind BAR2, and panics when register 0 is written.
struct Card {
    bus: Bus,
    config: ConfigSpace,
    registers: Region,
    bar2: Region,
}

impl Card {
    fn new(name: &str, peers: &Peers) -> (Self, Arc<Memory>) {
        let memory = Arc::new(Memory::new(name, SIZE).unwrap());
        let bus = Bus::among(1, peers);
        bus.offer(2, name, &memory).unwrap();
        let config = ConfigBuilder::new(0x1234, 1)
            .bar(0, 4096, BarKind::Memory32)
            .bar(2, SIZE, BarKind::Memory64Prefetchable)
            .pcie(LinkSpeed::Gen3, 4)
            .build()
            .unwrap();
        let card = Self {
            bus,
            config,
            registers: Region::registers(4096),
            bar2: Region::memory(Arc::clone(&memory)),
        };
        (card, memory)
    }
}

impl Device for Card {
    fn bus(&self) -> &Bus {
        &self.bus
    }
    fn config(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }
    fn region(&self, index: u32) -> Option<&Region> {
        match index {
            0 => Some(&self.registers),
            2 => Some(&self.bar2),
            _ => None,
        }
    }
    fn read(&mut self, _region: u32, _offset: u64, _data: &mut [u8]) {}
    fn write(&mut self, _region: u32, _offset: u64, _data: &[u8]) {
        panic!("this device cannot go on");
    }
    fn reset(&mut self) {}
}

fn plug(mut card: Card) -> (Client, Bus, JoinHandle<Card>) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let bus = card.bus.clone();
    let server = std::thread::spawn(move || {
        let _ = serve(ours, &mut card);
        card
    });
    let mut client = Client::new(theirs).unwrap();
    client.version().unwrap();
    (client, bus, server)
}

fn config_write(client: &mut Client, offset: u64, data: &[u8]) {
    client.write(proto::CONFIG_REGION, offset, data).unwrap();
}

fn place(client: &mut Client, address: u64) {
    config_write(client, BAR2, &(address as u32).to_le_bytes());
    config_write(client, BAR2 + 4, &((address >> 32) as u32).to_le_bytes());
}

/// Two devices. The first does DMA: it is a bus master, and the client has mapped 0x1_0000_0000 to 0x2_0000_0000 for it. The
/// second decodes the beginning of that range.
struct Two {
    a: (Client, Bus, JoinHandle<Card>),
    b: (Client, Bus, JoinHandle<Card>),
    memory: Arc<Memory>,
    peers: Peers,
}

const WINDOW: u64 = 0x1_0000_0000;

fn two() -> Two {
    let peers = Peers::new();
    let (a, _) = Card::new("a", &peers);
    let (b, memory) = Card::new("b", &peers);
    let (mut a, mut b) = (plug(a), plug(b));
    config_write(&mut a.0, COMMAND, &[6, 0]);
    a.0.dma_map(WINDOW, WINDOW, None).unwrap();
    place(&mut b.0, WINDOW);
    config_write(&mut b.0, COMMAND, &[2, 0]);
    Two { a, b, memory, peers }
}

/// What the other device's memory begins with.
fn begins(memory: &Memory) -> [u8; 6] {
    let mut data = [0; 6];
    memory.read(0, &mut data).unwrap();
    data
}

/// Writes; the client answers messages for memory that is not mapped here. Returns whether there was a message.
fn write(two: &mut Two, address: u64, data: &'static [u8]) -> (Result<(), DmaError>, bool) {
    let asked = Arc::new(Mutex::new(false));
    two.a.0.set_bus(Box::new({
        let asked = Arc::clone(&asked);
        move |_, _, _| {
            *asked.lock().unwrap() = true;
            Err(14)
        }
    }));
    let dma = two.a.1.dma.clone();
    let worker = std::thread::spawn(move || dma.write(address, data));
    while !worker.is_finished() {
        let mut id = [0; 4];
        two.a.0.read(proto::CONFIG_REGION, 0, &mut id).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let result = worker.join().unwrap();
    let asked = *asked.lock().unwrap();
    (result, asked)
}

#[test]
fn memory_is_where_the_guest_put_it() {
    let mut two = two();
    assert_eq!(two.peers.list()[1].address, Some(WINDOW));
    assert_eq!(write(&mut two, WINDOW, b"first "), (Ok(()), false));
    assert_eq!(&begins(&two.memory), b"first ");
    // Sizing: neither the old place nor the mask is an address of it.
    place(&mut two.b.0, u64::MAX);
    assert_eq!(two.peers.list()[1].address, None);
    assert_eq!(
        write(&mut two, WINDOW, b"stale "),
        (Err(DmaError::Unreachable(WINDOW)), true)
    );
    place(&mut two.b.0, WINDOW + 16 * SIZE);
    assert_eq!(write(&mut two, WINDOW + 16 * SIZE, b"moved "), (Ok(()), false));
    assert!(write(&mut two, WINDOW, b"stale ").1);
    // Not decoded.
    config_write(&mut two.b.0, COMMAND, &[0, 0]);
    assert!(write(&mut two, WINDOW + 16 * SIZE, b"stale ").1);
    config_write(&mut two.b.0, COMMAND, &[2, 0]);
    assert_eq!(&begins(&two.memory), b"moved ");
    assert_eq!(write(&mut two, WINDOW + 16 * SIZE, b"again "), (Ok(()), false));
    assert_eq!(two.a.1.dma.by_target()["b"], Moved { read: 0, written: 18 });
    assert_eq!(two.a.1.dma.counts().message_written, 0);
}

#[test]
fn a_reset_takes_the_address_away() {
    let mut two = two();
    assert_eq!(write(&mut two, WINDOW, b"first "), (Ok(()), false));
    two.b.0.reset().unwrap();
    assert!(write(&mut two, WINDOW, b"stale ").1);
    assert_eq!(&begins(&two.memory), b"first ");
    // A function-level reset as well: device control of the PCIe capability, the first one here.
    place(&mut two.b.0, WINDOW);
    config_write(&mut two.b.0, COMMAND, &[2, 0]);
    assert_eq!(write(&mut two, WINDOW, b"second"), (Ok(()), false));
    config_write(&mut two.b.0, 0x40 + 8, &[0, 0x80]);
    assert_eq!(two.peers.list()[1].address, None);
    assert!(write(&mut two, WINDOW, b"stale ").1);
    assert_eq!(&begins(&two.memory), b"second");
}

#[test]
fn a_device_that_is_gone_has_no_address() {
    let mut two = two();
    assert_eq!(write(&mut two, WINDOW, b"first "), (Ok(()), false));
    let (client, bus, server) = std::mem::replace(&mut two.b, {
        let (spare, _) = Card::new("spare", &Peers::new());
        plug(spare)
    });
    drop(client);
    let card = server.join().unwrap();
    assert_eq!(two.peers.list()[1].address, None);
    assert!(write(&mut two, WINDOW, b"stale ").1);
    assert_eq!(&begins(&two.memory), b"first ");
    drop((card, bus));
    assert_eq!(two.peers.list().len(), 1, "the entry goes with the last of the bus");
}

#[test]
fn a_device_that_panics_leaves_its_place() {
    let mut two = two();
    assert!(two.b.0.write(0, 0, &[0; 4]).is_err(), "the connection ends");
    let (spare, _) = Card::new("spare", &Peers::new());
    let (_, _, server) = std::mem::replace(&mut two.b, plug(spare));
    assert!(server.join().is_err());
    assert!(write(&mut two, WINDOW, b"stale ").1);
    assert_eq!(begins(&two.memory), [0; 6]);
}

#[test]
fn a_device_can_cut_itself_off() {
    let mut two = two();
    two.b.1.sever();
    assert_eq!(two.peers.list()[1].address, None);
    let mut data = [0; 4];
    assert!(two.b.0.read(0, 0, &mut data).is_err());
    assert!(write(&mut two, WINDOW, b"stale ").1);
}
