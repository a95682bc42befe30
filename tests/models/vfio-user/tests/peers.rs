// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two devices of one guest in one process: a device accesses the other's memory at the address that the guest
//! assigned, and at no other address.

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

/// A device with memory behind BAR 2. A write to its registers panics.
struct MemoryDevice {
    bus: Bus,
    config: ConfigSpace,
    registers: Region,
    bar2: Region,
}

impl MemoryDevice {
    fn new(name: &str, peers: &Peers) -> (Self, Arc<Memory>) {
        Self::with(name, peers, Region::memory)
    }

    /// As [`MemoryDevice::new`], with BAR 2 of another kind.
    fn with(name: &str, peers: &Peers, bar2: fn(Arc<Memory>) -> Region) -> (Self, Arc<Memory>) {
        let memory = Arc::new(Memory::new(name, SIZE).unwrap());
        let bus = Bus::among(1, peers);
        let bar2 = bar2(Arc::clone(&memory));
        bus.offer(2, name, &bar2).unwrap();
        let config = ConfigBuilder::new(0x1234, 1)
            .bar(0, 4096, BarKind::Memory32)
            .bar(2, SIZE, BarKind::Memory64Prefetchable)
            .pcie(LinkSpeed::Gen3, 4)
            .build()
            .unwrap();
        let device = Self {
            bus,
            config,
            registers: Region::registers(4096),
            bar2,
        };
        (device, memory)
    }
}

impl Device for MemoryDevice {
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
        panic!("deliberate panic of the test device");
    }
    fn reset(&mut self) {}
}

fn serve_device(mut device: MemoryDevice) -> (Client, Bus, JoinHandle<MemoryDevice>) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let bus = device.bus.clone();
    let server = std::thread::spawn(move || {
        let _ = serve(ours, &mut device);
        device
    });
    let mut client = Client::new(theirs).unwrap();
    client.version().unwrap();
    (client, bus, server)
}

fn config_write(client: &mut Client, offset: u64, data: &[u8]) {
    client.write(proto::CONFIG_REGION, offset, data).unwrap();
}

fn set_bar2(client: &mut Client, address: u64) {
    config_write(client, BAR2, &(address as u32).to_le_bytes());
    config_write(client, BAR2 + 4, &((address >> 32) as u32).to_le_bytes());
}

/// Two devices. Device `a` is a bus master and has a mapping of 0x1_0000_0000 to 0x2_0000_0000 without a file
/// descriptor. The memory of device `b` is decoded at the start of that range.
struct DevicePair {
    a: (Client, Bus, JoinHandle<MemoryDevice>),
    b: (Client, Bus, JoinHandle<MemoryDevice>),
    memory: Arc<Memory>,
    peers: Peers,
}

const WINDOW: u64 = 0x1_0000_0000;

fn pair() -> DevicePair {
    let mut pair = pair_of(Region::memory);
    pair.a.0.dma_map(WINDOW, WINDOW, None).unwrap();
    pair
}

/// As [`pair`], with BAR 2 of device `b` of another kind, and without the mapping.
fn pair_of(bar2: fn(Arc<Memory>) -> Region) -> DevicePair {
    let peers = Peers::new();
    let (a, _) = MemoryDevice::new("a", &peers);
    let (b, memory) = MemoryDevice::with("b", &peers, bar2);
    let (mut a, mut b) = (serve_device(a), serve_device(b));
    config_write(&mut a.0, COMMAND, &[6, 0]);
    set_bar2(&mut b.0, WINDOW);
    config_write(&mut b.0, COMMAND, &[2, 0]);
    DevicePair { a, b, memory, peers }
}

/// The first bytes of a device's memory.
fn first_bytes(memory: &Memory) -> [u8; 6] {
    let mut data = [0; 6];
    memory.read(0, &mut data).unwrap();
    data
}

/// Writes by DMA of device `a`. Also returns whether the library sent a DMA message to the client, which fails it with
/// EFAULT.
fn write(pair: &mut DevicePair, address: u64, data: &'static [u8]) -> (Result<(), DmaError>, bool) {
    let requested = Arc::new(Mutex::new(false));
    pair.a.0.set_bus(Box::new({
        let requested = Arc::clone(&requested);
        move |_, _, _| {
            *requested.lock().unwrap() = true;
            Err(14)
        }
    }));
    let dma = pair.a.1.dma.clone();
    let worker = std::thread::spawn(move || dma.write(address, data));
    while !worker.is_finished() {
        let mut id = [0; 4];
        pair.a.0.read(proto::CONFIG_REGION, 0, &mut id).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let result = worker.join().unwrap();
    let requested = *requested.lock().unwrap();
    (result, requested)
}

#[test]
fn peer_memory_is_at_bar_address() {
    let mut pair = pair();
    assert_eq!(pair.peers.list()[1].address, Some(WINDOW));
    assert_eq!(write(&mut pair, WINDOW, b"first "), (Ok(()), false));
    assert_eq!(&first_bytes(&pair.memory), b"first ");
    // While BAR 2 is being sized, neither the old address nor the mask is an address of the memory.
    set_bar2(&mut pair.b.0, u64::MAX);
    assert_eq!(pair.peers.list()[1].address, None);
    assert_eq!(
        write(&mut pair, WINDOW, b"stale "),
        (Err(DmaError::Unreachable(WINDOW)), true)
    );
    set_bar2(&mut pair.b.0, WINDOW + 16 * SIZE);
    assert_eq!(write(&mut pair, WINDOW + 16 * SIZE, b"moved "), (Ok(()), false));
    assert!(write(&mut pair, WINDOW, b"stale ").1);
    // Memory Space Enable is 0: the BAR is not decoded.
    config_write(&mut pair.b.0, COMMAND, &[0, 0]);
    assert!(write(&mut pair, WINDOW + 16 * SIZE, b"stale ").1);
    config_write(&mut pair.b.0, COMMAND, &[2, 0]);
    assert_eq!(&first_bytes(&pair.memory), b"moved ");
    assert_eq!(write(&mut pair, WINDOW + 16 * SIZE, b"again "), (Ok(()), false));
    assert_eq!(pair.a.1.dma.by_target()["b"], Moved { read: 0, written: 18 });
    assert_eq!(pair.a.1.dma.counts().message_written, 0);
}

#[test]
fn reset_removes_bar_address() {
    let mut pair = pair();
    assert_eq!(write(&mut pair, WINDOW, b"first "), (Ok(()), false));
    pair.b.0.reset().unwrap();
    assert!(write(&mut pair, WINDOW, b"stale ").1);
    assert_eq!(&first_bytes(&pair.memory), b"first ");
    // The same by function-level reset: Device Control of the PCIe capability, which is the first one of this device.
    set_bar2(&mut pair.b.0, WINDOW);
    config_write(&mut pair.b.0, COMMAND, &[2, 0]);
    assert_eq!(write(&mut pair, WINDOW, b"second"), (Ok(()), false));
    config_write(&mut pair.b.0, 0x40 + 8, &[0, 0x80]);
    assert_eq!(pair.peers.list()[1].address, None);
    assert!(write(&mut pair, WINDOW, b"stale ").1);
    assert_eq!(&first_bytes(&pair.memory), b"second");
}

#[test]
fn disconnected_device_has_no_address() {
    let mut pair = pair();
    assert_eq!(write(&mut pair, WINDOW, b"first "), (Ok(()), false));
    let (client, bus, server) = std::mem::replace(&mut pair.b, {
        let (spare, _) = MemoryDevice::new("spare", &Peers::new());
        serve_device(spare)
    });
    drop(client);
    let device = server.join().unwrap();
    assert_eq!(pair.peers.list()[1].address, None);
    assert!(write(&mut pair, WINDOW, b"stale ").1);
    assert_eq!(&first_bytes(&pair.memory), b"first ");
    drop((device, bus));
    assert_eq!(
        pair.peers.list().len(),
        1,
        "the entry remains after the last clone of the bus was dropped"
    );
}

#[test]
fn panicked_device_has_no_address() {
    let mut pair = pair();
    assert!(pair.b.0.write(0, 0, &[0; 4]).is_err(), "the connection did not end");
    let (spare, _) = MemoryDevice::new("spare", &Peers::new());
    let (_, _, server) = std::mem::replace(&mut pair.b, serve_device(spare));
    assert!(server.join().is_err());
    assert!(write(&mut pair, WINDOW, b"stale ").1);
    assert_eq!(first_bytes(&pair.memory), [0; 6]);
}

#[test]
fn device_can_disconnect_its_client() {
    let mut pair = pair();
    pair.b.1.disconnect_client();
    assert_eq!(pair.peers.list()[1].address, None);
    let mut data = [0; 4];
    assert!(pair.b.0.read(0, 0, &mut data).is_err());
    assert!(write(&mut pair, WINDOW, b"stale ").1);
}

#[test]
fn delayed_writes_arrive_behind_those_of_peers() {
    let mut pair = pair_of(Region::delayed);
    let (info, capability, fds) = pair.b.0.region_info(2).unwrap();
    assert_eq!((info.size, capability.len(), fds.len()), (SIZE, 0, 0));
    pair.b.0.write(2, 0, b"late  ").unwrap();
    assert_eq!(first_bytes(&pair.memory), [0; 6]);
    // A client maps no memory for other devices that it cannot map itself.
    assert_eq!(write(&mut pair, WINDOW, b"peer  "), (Ok(()), false));
    assert_eq!(&first_bytes(&pair.memory), b"peer  ");
    let mut data = [0; 6];
    pair.b.0.read(2, 8, &mut data).unwrap();
    assert_eq!(&first_bytes(&pair.memory), b"late  ");
    // What the processor has pushed does not come again.
    assert_eq!(write(&mut pair, WINDOW, b"peer  "), (Ok(()), false));
    pair.b.0.read(2, 0, &mut data).unwrap();
    assert_eq!(&data, b"peer  ");
    // Other accesses push, too: of registers, of the configuration space, and a reset.
    let accesses: [fn(&mut Client); 3] = [
        |client| assert_eq!(client.read32(0, 0).unwrap(), 0),
        |client| config_write(client, 0x3c, &[1]),
        |client| client.reset().unwrap(),
    ];
    for (n, access) in accesses.into_iter().enumerate() {
        let (sent, mut data) = ([n as u8 + 1; 6], [0; 6]);
        pair.b.0.write(2, 4096, &sent).unwrap();
        pair.memory.read(4096, &mut data).unwrap();
        assert_ne!(data, sent);
        access(&mut pair.b.0);
        pair.memory.read(4096, &mut data).unwrap();
        assert_eq!(data, sent);
    }
}
