// SPDX-License-Identifier: MIT OR Apache-2.0

//! The protocol as seen by a client: valid commands, and invalid ones that the server must survive.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use p2pmem_proptest::config;
use p2pmem_vfio_user::client::{Client, ClientError};
use p2pmem_vfio_user::proto::{self, command};
use p2pmem_vfio_user::{
    BarKind, Bus, ConfigBuilder, ConfigSpace, Device, Dma, DmaError, LinkSpeed, Memory, Raised, Region, serve,
};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use zerocopy::IntoBytes;

/// A device with registers that keep their values, a BAR of which half can be mapped, and a channel that requests DMA
/// of a worker.
struct TestDevice {
    bus: Bus,
    config: ConfigSpace,
    registers: Region,
    memory: Region,
    msix: Region,
    written: Vec<u8>,
    resets: u32,
    jobs: Sender<u64>,
}

impl TestDevice {
    fn new() -> (Self, Receiver<u64>) {
        let bus = Bus::new(4);
        let config = ConfigBuilder::new(0x1234, 0x0001)
            .bar(0, 4096, BarKind::Memory32)
            .bar(2, 16384, BarKind::Memory64Prefetchable)
            .bar(4, 8192, BarKind::Memory32)
            .pcie(LinkSpeed::Gen3, 4)
            .msix(4, 4, 0, 4096)
            .build()
            .unwrap();
        let memory = Arc::new(Memory::new("device", 16384).unwrap());
        let (jobs, receiver) = channel();
        let device = Self {
            bus,
            config,
            registers: Region::registers(4096),
            memory: Region::mixed(memory, vec![4096..8192, 12288..16384]),
            msix: Region::registers(8192),
            written: vec![0; 4096],
            resets: 0,
            jobs,
        };
        (device, receiver)
    }
}

impl Device for TestDevice {
    fn bus(&self) -> &Bus {
        &self.bus
    }
    fn config(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }
    fn region(&self, index: u32) -> Option<&Region> {
        match index {
            0 => Some(&self.registers),
            2 => Some(&self.memory),
            4 => Some(&self.msix),
            _ => None,
        }
    }
    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        if region == 0 {
            data.copy_from_slice(&self.written[offset as usize..][..data.len()]);
        }
    }
    fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        if region == 0 {
            self.written[offset as usize..][..data.len()].copy_from_slice(data);
            if let ([8, 0xff, ..], true) = (data, offset == 8) {
                // DMA by message on the serving thread must fail, not wait for itself.
                assert_eq!(self.bus.dma.write(0x100_0000, &[0]), Err(DmaError::WrongThread));
            }
            if offset == 0 {
                let _ = self.jobs.send(u64::from_le_bytes(data.try_into().unwrap_or([0; 8])));
            }
        }
    }
    fn reset(&mut self) {
        self.resets += 1;
        self.written.fill(0);
    }
}

/// Serves a device, and returns its client. Dropping the client ends the serving thread.
fn start() -> (Client, Bus, Receiver<u64>, JoinHandle<(TestDevice, bool)>) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let (mut device, jobs) = TestDevice::new();
    let bus = device.bus.clone();
    let server = std::thread::spawn(move || {
        let good = serve(ours, &mut device).is_ok();
        (device, good)
    });
    (Client::new(theirs).unwrap(), bus, jobs, server)
}

fn started() -> (Client, Bus, Receiver<u64>, JoinHandle<(TestDevice, bool)>) {
    let mut all = start();
    all.0.version().unwrap();
    all
}

fn refused(result: Result<impl std::fmt::Debug, ClientError>, errno: Errno) {
    match result {
        Err(ClientError::Refused(got)) if got == errno.raw_os_error() as u32 => {}
        other => panic!("{other:?} instead of {errno:?}"),
    }
}

fn config_write(client: &mut Client, offset: u64, data: &[u8]) {
    client.write(proto::CONFIG_REGION, offset, data).unwrap();
}

#[test]
fn version_must_be_first_and_only_once() {
    let (mut client, _bus, _jobs, server) = start();
    let mut data = [0; 4];
    refused(client.read(0, 0, &mut data), Errno::INVAL);
    let version = |major: u16, json: &[u8]| [&major.to_le_bytes()[..], &[0, 0], json].concat();
    for bad in [version(1, b""), version(0, b"{"), version(0, b"[1]\0"), vec![0, 0, 0]] {
        refused(client.request(command::VERSION, &[&bad], &[]), Errno::INVAL);
    }
    refused(
        client.request(
            command::VERSION,
            &[&version(0, b"{\"capabilities\":{\"max_data_xfer_size\":0}}\0")],
            &[],
        ),
        Errno::INVAL,
    );
    let capabilities = client.version().unwrap();
    assert_eq!(capabilities["capabilities"]["max_msg_fds"], 16);
    refused(client.version(), Errno::INVAL);
    client.read(0, 0, &mut data).unwrap();
    drop(client);
    assert!(server.join().unwrap().1);
}

#[test]
fn version_without_capabilities_is_accepted() {
    let (mut client, ..) = start();
    client.request(command::VERSION, &[&[0, 0, 0, 0]], &[]).unwrap();
}

#[test]
fn regions_are_described_and_mappable() {
    let (mut client, ..) = started();
    let (info, capabilities, fds) = client.region_info(2).unwrap();
    assert_eq!(info.size, 16384);
    assert_eq!(info.flags, 0xf);
    assert_eq!((info.cap_offset, info.argsz), (32, 32 + 16 + 2 * 16));
    assert_eq!(fds.len(), 1);
    assert_eq!(capabilities[..12], [1, 0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
    let area = |i: usize| u64::from_le_bytes(capabilities[16 + 8 * i..][..8].try_into().unwrap());
    assert_eq!([area(0), area(1), area(2), area(3)], [4096, 4096, 12288, 4096]);
    // The file descriptor refers to the memory that REGION_WRITE writes.
    client.write(2, 4096, b"by message").unwrap();
    let mut data = [0; 10];
    rustix::io::pread(&fds[0], &mut data, 4096).unwrap();
    assert_eq!(&data, b"by message");
    let (info, capabilities, fds) = client.region_info(0).unwrap();
    assert_eq!((info.size, info.flags, capabilities.len(), fds.len()), (4096, 3, 0, 0));
    let (info, ..) = client.region_info(proto::CONFIG_REGION).unwrap();
    assert_eq!((info.size, info.flags), (4096, 3));
    let (info, ..) = client.region_info(1).unwrap();
    assert_eq!((info.size, info.flags), (0, 0));
    refused(client.region_info(9), Errno::INVAL);
    // If `argsz` is too small, the reply has the required size and no capabilities.
    let request = proto::RegionInfo {
        argsz: 32,
        index: 2,
        ..Default::default()
    };
    let answer = client
        .request(command::DEVICE_GET_REGION_INFO, &[request.as_bytes()], &[])
        .unwrap();
    assert_eq!((answer.body.len(), answer.body[0]), (32, 80));
}

#[test]
fn device_and_interrupts_are_described() {
    let (mut client, ..) = started();
    let request = proto::DeviceInfo {
        argsz: 16,
        ..Default::default()
    };
    let answer = client
        .request(command::DEVICE_GET_INFO, &[request.as_bytes()], &[])
        .unwrap();
    assert_eq!(answer.body, [16, 0, 0, 0, 3, 0, 0, 0, 9, 0, 0, 0, 5, 0, 0, 0]);
    for (index, count) in [(0, 0), (1, 0), (2, 4), (3, 0), (4, 0)] {
        let request = proto::IrqInfo {
            argsz: 16,
            index,
            ..Default::default()
        };
        let answer = client
            .request(command::DEVICE_GET_IRQ_INFO, &[request.as_bytes()], &[])
            .unwrap();
        assert_eq!(answer.body[12], count);
    }
    let request = proto::IrqInfo {
        argsz: 16,
        index: 5,
        ..Default::default()
    };
    refused(
        client.request(command::DEVICE_GET_IRQ_INFO, &[request.as_bytes()], &[]),
        Errno::INVAL,
    );
    refused(client.request(command::DEVICE_GET_INFO, &[&[0; 4]], &[]), Errno::INVAL);
}

#[test]
fn invalid_region_accesses_are_rejected() {
    let (mut client, ..) = started();
    client.write(0, 16, &[1, 2, 3, 4]).unwrap();
    assert_eq!(client.read32(0, 16).unwrap(), 0x0403_0201);
    let mut data = [0; 8];
    refused(client.read(0, 4089, &mut data), Errno::INVAL);
    refused(client.read(0, u64::MAX, &mut data), Errno::INVAL);
    refused(client.read(0, u64::MAX - 7, &mut data), Errno::INVAL);
    refused(client.read(0, 0, &mut []), Errno::INVAL);
    for region in [1, 6, 8, 9, u32::MAX] {
        refused(client.read(region, 0, &mut data), Errno::INVAL);
        refused(client.write(region, 0, &data), Errno::INVAL);
    }
    let lie = proto::RegionAccess {
        offset: 0,
        region: 0,
        count: 64,
    };
    refused(
        client.request(command::REGION_WRITE, &[lie.as_bytes(), &[0; 8]], &[]),
        Errno::INVAL,
    );
    let huge = proto::RegionAccess {
        offset: 0,
        region: 2,
        count: u32::MAX,
    };
    refused(
        client.request(command::REGION_READ, &[huge.as_bytes()], &[]),
        Errno::INVAL,
    );
    for unknown in [0, 6, 11, 12, 14, 16, 17, 18, 999] {
        refused(client.request(unknown, &[&[0; 64]], &[]), Errno::NOSYS);
    }
    assert_eq!(client.read32(0, 16).unwrap(), 0x0403_0201);
}

#[test]
fn multi_write_performs_all_writes() {
    let (mut client, ..) = started();
    let one = |offset: u64, region: u32, data: &[u8]| {
        let access = proto::RegionAccess {
            offset,
            region,
            count: data.len() as u32,
        };
        let mut bytes = [0; 8];
        bytes[..data.len().min(8)].copy_from_slice(&data[..data.len().min(8)]);
        [access.as_bytes(), &bytes].concat()
    };
    let count = |n: u64| n.to_le_bytes();
    let writes = [one(32, 0, &[1, 1, 1, 1]), one(36, 0, &[2, 2])].concat();
    client
        .request(command::REGION_WRITE_MULTI, &[&count(2), &writes], &[])
        .unwrap();
    assert_eq!(client.read64(0, 32).unwrap(), 0x0202_0101_0101);
    // An invalid write is reported, and the others are executed.
    let writes = [
        one(40, 0, &[3]),
        one(9999, 0, &[3]),
        one(41, 0, &[0; 9]),
        one(42, 0, &[4]),
    ]
    .concat();
    refused(
        client.request(command::REGION_WRITE_MULTI, &[&count(4), &writes], &[]),
        Errno::INVAL,
    );
    assert_eq!(client.read32(0, 40).unwrap(), 0x0004_0003);
    refused(
        client.request(command::REGION_WRITE_MULTI, &[&count(u64::MAX), &writes], &[]),
        Errno::INVAL,
    );
    refused(
        client.request(command::REGION_WRITE_MULTI, &[&[0; 4]], &[]),
        Errno::INVAL,
    );
}

#[test]
fn no_reply_is_honoured() {
    let (mut client, ..) = started();
    for i in 0..10_u64 {
        let access = proto::RegionAccess {
            offset: 8 * i + 64,
            region: 0,
            count: 8,
        };
        client
            .send(command::REGION_WRITE, 0x10, &[access.as_bytes(), &i.to_le_bytes()], &[])
            .unwrap();
        client.send(command::REGION_WRITE, 0x10, &[&[0xff; 40]], &[]).unwrap();
    }
    // The first reply that arrives is that of the read.
    assert_eq!(client.read64(0, 64 + 72).unwrap(), 9);
}

#[test]
fn config_space_is_accessible() {
    let (mut client, ..) = started();
    assert_eq!(client.read32(proto::CONFIG_REGION, 0).unwrap(), 0x0001_1234);
    config_write(&mut client, 0x10, &[0xff; 4]);
    assert_eq!(client.read32(proto::CONFIG_REGION, 0x10).unwrap(), 0xffff_f000);
    refused(client.write(proto::CONFIG_REGION, 4095, &[0, 0]), Errno::INVAL);
}

#[test]
fn device_reset_and_function_level_reset() {
    let (mut client, _bus, _jobs, server) = started();
    client.write(0, 64, &[1; 4]).unwrap();
    config_write(&mut client, 4, &[6, 0]);
    client.reset().unwrap();
    assert_eq!(client.read32(0, 64).unwrap(), 0);
    assert_eq!(client.read32(proto::CONFIG_REGION, 4).unwrap() & 0xffff, 0);
    // Function-level reset, through the PCIe capability at the start of the list.
    let pcie = u64::from(client.read32(proto::CONFIG_REGION, 0x34).unwrap() & 0xff);
    config_write(&mut client, pcie + 8, &[0x10, 0xa8]);
    drop(client);
    assert_eq!(server.join().unwrap().0.resets, 2);
}

fn events(n: usize) -> Vec<OwnedFd> {
    (0..n).map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect()
}

fn fired(fd: &OwnedFd) -> u64 {
    let mut value = [0; 8];
    rustix::io::read(fd, &mut value).map_or(0, |_| u64::from_ne_bytes(value))
}

/// Sets the MSI-X Enable bit, as the guest does.
fn enable_msix(client: &mut Client) {
    let mut at = u64::from(client.read32(proto::CONFIG_REGION, 0x34).unwrap() & 0xff);
    while client.read32(proto::CONFIG_REGION, at).unwrap() & 0xff != 0x11 {
        at = u64::from(client.read32(proto::CONFIG_REGION, at).unwrap() >> 8) & 0xff;
        assert_ne!(at, 0);
    }
    config_write(client, at + 2, &[3, 0x80]);
}

#[test]
fn interrupts_survive_rearming() {
    const EVENTFD: u32 = proto::SET_DATA_EVENTFD | proto::SET_ACTION_TRIGGER;
    const NONE: u32 = proto::SET_DATA_NONE | proto::SET_ACTION_TRIGGER;
    let (mut client, bus, ..) = started();
    let fds = events(4);
    client.arm(0, &fds).unwrap();
    assert_eq!(bus.irqs.raise(0), Raised::Dropped);
    enable_msix(&mut client);
    assert_eq!(bus.irqs.raise(2), Raised::Delivered);
    assert_eq!(fired(&fds[2]), 1);
    client.set_irqs(NONE, 0, 0, &[], &[]).unwrap();
    assert_eq!(bus.irqs.raise(3), Raised::Latched);
    let mut pending = [0; 1];
    client.read(4, 4096, &mut pending).unwrap();
    assert_eq!(pending, [0b1000], "the Pending Bit Array has another value");
    client.arm(0, &fds).unwrap();
    assert_eq!(fired(&fds[3]), 1);
    // One eventfd is removed, as when the guest masks a vector.
    client.set_irqs(EVENTFD, 1, 1, &[], &[]).unwrap();
    assert_eq!(bus.irqs.raise(1), Raised::Latched);
    client
        .set_irqs(proto::SET_DATA_NONE | proto::SET_ACTION_MASK, 1, 1, &[], &[])
        .unwrap();
    client.arm(1, &fds[1..2]).unwrap();
    assert_eq!(fired(&fds[1]), 0);
    client
        .set_irqs(proto::SET_DATA_BOOL | proto::SET_ACTION_UNMASK, 0, 2, &[0, 1], &[])
        .unwrap();
    assert_eq!(fired(&fds[1]), 1);
    // The client may trigger vectors itself.
    client
        .set_irqs(
            proto::SET_DATA_BOOL | proto::SET_ACTION_TRIGGER,
            0,
            4,
            &[1, 0, 0, 1],
            &[],
        )
        .unwrap();
    assert_eq!(fds.iter().map(fired).collect::<Vec<_>>(), [1, 0, 0, 1]);
    // The client emulates the table; the server ignores writes to it.
    client.write(4, 0, &[0xff; 16]).unwrap();
    assert_eq!(client.read32(4, 0).unwrap(), 0);
}

#[test]
fn invalid_set_irqs_are_rejected() {
    let (mut client, ..) = started();
    let fds = events(2);
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let eventfd = proto::SET_DATA_EVENTFD | proto::SET_ACTION_TRIGGER;
    refused(client.set_irqs(eventfd, 0, 3, &[], &borrowed), Errno::INVAL);
    refused(client.set_irqs(eventfd, 3, 2, &[], &borrowed), Errno::INVAL);
    refused(client.set_irqs(eventfd, u32::MAX, 2, &[], &borrowed), Errno::INVAL);
    refused(client.set_irqs(eventfd, 4, 1, &[], &[]), Errno::INVAL);
    refused(
        client.set_irqs(proto::SET_DATA_BOOL | proto::SET_ACTION_MASK, 0, 4, &[1], &[]),
        Errno::INVAL,
    );
    refused(client.set_irqs(proto::SET_DATA_NONE, 0, 1, &[], &[]), Errno::INVAL);
    refused(client.set_irqs(0x3f, 0, 1, &[], &[]), Errno::INVAL);
    refused(client.set_irqs((1 << 30) | eventfd, 0, 1, &[], &[]), Errno::INVAL);
    refused(
        client.set_irqs(
            proto::SET_DATA_EVENTFD | proto::SET_ACTION_MASK,
            0,
            1,
            &[],
            &borrowed[..1],
        ),
        Errno::OPNOTSUPP,
    );
    let pipe = rustix::pipe::pipe().unwrap();
    refused(client.arm(0, &[pipe.1]), Errno::INVAL);
    // More file descriptors than the server accepts in a message.
    let many = events(17);
    let many: Vec<BorrowedFd<'_>> = many.iter().map(AsFd::as_fd).collect();
    assert!(client.set_irqs(eventfd, 0, 17, &[], &many).is_err());
}

#[test]
fn dma_by_descriptor_works_until_unmap() {
    let (mut client, bus, ..) = started();
    config_write(&mut client, 4, &[6, 0]);
    let ram = Memory::new("guest", 1 << 20).unwrap();
    client.dma_map(0, 1 << 19, Some((ram.fd(), 0))).unwrap();
    client.dma_map(1 << 32, 1 << 19, Some((ram.fd(), 1 << 19))).unwrap();
    refused(client.dma_map(4096, 4096, None), Errno::EXIST);
    refused(client.dma_map(1 << 40, 1 << 21, Some((ram.fd(), 0))), Errno::INVAL);
    refused(client.dma_map(u64::MAX, 4096, None), Errno::INVAL);
    refused(client.dma_map(1 << 40, 0, None), Errno::INVAL);
    bus.dma.write((1 << 32) + 100, b"over the wall").unwrap();
    let mut data = [0; 13];
    ram.read((1 << 19) + 100, &mut data).unwrap();
    assert_eq!(&data, b"over the wall");
    assert_eq!(bus.dma.counts().host_written, 13);
    refused(client.dma_unmap(0, 4096), Errno::INVAL);
    client.dma_unmap(1 << 32, 1 << 19).unwrap();
    // The range is accessed by messages now, and the client has no memory there. The client replies to messages only
    // while this thread waits for a reply.
    let dma = bus.dma.clone();
    let worker = std::thread::spawn(move || dma.read(1 << 32, &mut [0; 4]));
    pump_until(&mut client, &worker);
    assert_eq!(worker.join().unwrap(), Err(DmaError::Unreachable(1 << 32)));
    config_write(&mut client, 4, &[2, 0]);
    assert_eq!(bus.dma.read(0, &mut data), Err(DmaError::BusMasterOff));
}

/// Reads a register until the worker ends, at most for two minutes. Meanwhile, the client replies to DMA messages.
fn pump_until<T>(client: &mut Client, worker: &JoinHandle<T>) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !worker.is_finished() {
        assert!(Instant::now() < deadline, "the worker does not end");
        client.read32(0, 128).unwrap();
    }
}

#[test]
fn dma_by_message_is_split_and_counted() {
    let (mut client, bus, ..) = started();
    config_write(&mut client, 4, &[6, 0]);
    let ram = Memory::new("guest", 1 << 16).unwrap();
    client.dma_map(0, 1 << 16, Some((ram.fd(), 0))).unwrap();
    // A peer whose mapping has no file descriptor, followed by unmapped addresses at which memory answers too.
    client.dma_map(0x10000, 0x10000, None).unwrap();
    let peer = Arc::new(Mutex::new(vec![0_u8; 0x40000]));
    let sizes = Arc::new(Mutex::new(Vec::new()));
    client.set_bus(Box::new({
        let (peer, sizes) = (Arc::clone(&peer), Arc::clone(&sizes));
        move |address, data, write| {
            let Some(at) = address.checked_sub(0x10000) else {
                return Err(14);
            };
            sizes.lock().unwrap().push(data.len());
            let mut peer = peer.lock().unwrap();
            let Some(there) = peer.get_mut(at as usize..at as usize + data.len()) else {
                return Err(19);
            };
            if write {
                there.copy_from_slice(data)
            } else {
                data.copy_from_slice(there)
            }
            Ok(())
        }
    }));
    let data: Vec<u8> = (0..0x30000_u32).map(|i| (i * 7 % 253) as u8).collect();
    let worker = std::thread::spawn({
        let (dma, data) = (bus.dma.clone(), data.clone());
        move || -> Result<Vec<u8>, DmaError> {
            dma.write(0x8000, &data)?;
            let mut back = vec![0; data.len()];
            dma.read(0x8000, &mut back)?;
            Ok(back)
        }
    });
    pump_until(&mut client, &worker);
    assert!(
        worker.join().unwrap().unwrap() == data,
        "the data read differs from the data written"
    );
    assert!(
        peer.lock().unwrap()[..0x28000] == data[0x8000..],
        "the peer's memory does not have the data"
    );
    assert!(sizes.lock().unwrap().iter().all(|size| *size <= 64 << 10));
    let counts = bus.dma.counts();
    assert_eq!((counts.host_written, counts.message_written), (0x8000, 0x28000));
    assert_eq!((counts.host_read, counts.message_read), (0x8000, 0x28000));
}

#[test]
fn dma_never_overtakes_the_reply_that_triggered_it() {
    let (mut client, bus, jobs, _server) = started();
    config_write(&mut client, 4, &[6, 0]);
    client.set_bus(Box::new(|_, _, _| Ok(())));
    let dma = bus.dma.clone();
    let worker = std::thread::spawn(move || -> Result<u32, DmaError> {
        let mut done = 0;
        while let Ok(address) = jobs.recv() {
            if address == u64::MAX {
                break;
            }
            dma.write(address, &[1; 64])?;
            done += 1;
        }
        Ok(done)
    });
    for i in 0..200_u64 {
        // Sent without waiting, to check the order of messages: the reply must precede the DMA_WRITE.
        let access = proto::RegionAccess {
            offset: 0,
            region: 0,
            count: 8,
        };
        let id = client
            .send(
                command::REGION_WRITE,
                0,
                &[access.as_bytes(), &(i << 12).to_le_bytes()],
                &[],
            )
            .unwrap();
        let mut header = [0; 16];
        read_exact(&client, &mut header);
        assert_eq!(
            header[..4],
            [id.to_le_bytes(), command::REGION_WRITE.to_le_bytes()].concat()
        );
        read_exact(&client, &mut [0; 16]);
        let mut header = [0; 16];
        read_exact(&client, &mut header);
        assert_eq!(header[2..4], command::DMA_WRITE.to_le_bytes());
        read_exact(&client, &mut [0; 16 + 64]);
        header[4..8].copy_from_slice(&16_u32.to_le_bytes());
        header[8] = 1;
        client.stream().write_all(&header).unwrap();
    }
    client.write(0, 8, &[8, 0xff, 0, 0]).unwrap();
    client.write(0, 0, &u64::MAX.to_le_bytes()).unwrap();
    assert_eq!(worker.join().unwrap(), Ok(200));
}

fn read_exact(client: &Client, data: &mut [u8]) {
    std::io::Read::read_exact(&mut client.stream(), data).unwrap();
}

#[test]
fn client_disconnect_ends_dma() {
    let (mut client, bus, _jobs, server) = started();
    config_write(&mut client, 4, &[6, 0]);
    let worker = std::thread::spawn({
        let dma = bus.dma.clone();
        move || dma.read(0x1000, &mut [0; 8])
    });
    // The client receives the message, does not reply, and disconnects.
    let mut header = [0; 16];
    read_exact(&client, &mut header);
    assert_eq!(header[2..4], command::DMA_READ.to_le_bytes());
    drop(client);
    assert_eq!(worker.join().unwrap(), Err(DmaError::Disconnected));
    server.join().unwrap();
    assert_eq!(bus.dma.read(0x1000, &mut [0; 8]), Err(DmaError::Disconnected));
}

#[test]
fn abort_ends_dma_and_late_reply_is_ignored() {
    let (mut client, bus, ..) = started();
    config_write(&mut client, 4, &[6, 0]);
    let read = |dma: Dma| std::thread::spawn(move || dma.read(0x1000, &mut [0; 8]));
    let worker = read(bus.dma.pinned());
    let mut header = [0; 16];
    read_exact(&client, &mut header);
    read_exact(&client, &mut [0; 16]);
    bus.dma.abort();
    assert_eq!(worker.join().unwrap(), Err(DmaError::Aborted));
    header[8] = 1;
    header[4..8].copy_from_slice(&40_u32.to_le_bytes());
    client.stream().write_all(&[&header[..], &[0; 24]].concat()).unwrap();
    client.set_bus(Box::new(|_, data, _| {
        data.fill(7);
        Ok(())
    }));
    let worker = read(bus.dma.clone());
    pump_until(&mut client, &worker);
    assert_eq!(worker.join().unwrap(), Ok(()));
}

#[test]
fn separate_abort_ends_only_its_own_message() {
    let (mut client, bus, ..) = started();
    config_write(&mut client, 4, &[6, 0]);
    let (first, second) = (bus.dma.separate(), bus.dma.separate());
    let read = |dma: Dma| std::thread::spawn(move || dma.read(0x1000, &mut [0; 8]));
    let worker = read(first.pinned());
    let mut header = [0; 16];
    read_exact(&client, &mut header);
    read_exact(&client, &mut [0; 16]);
    // An abort of another handle does not end the wait for the reply, this one's does.
    second.abort_separate();
    header[8] = 1;
    header[4..8].copy_from_slice(&40_u32.to_le_bytes());
    client.stream().write_all(&[&header[..], &[0; 24]].concat()).unwrap();
    // The reply has the wrong length, which the transfer reports.
    assert!(matches!(worker.join().unwrap(), Err(DmaError::Failed(0x1000, _))));
    let worker = read(first.pinned());
    read_exact(&client, &mut header);
    read_exact(&client, &mut [0; 16]);
    first.abort_separate();
    assert_eq!(worker.join().unwrap(), Err(DmaError::Aborted));
}

#[test]
fn invalid_message_size_ends_connection_with_error() {
    for size in [0_u32, 15, u32::MAX, proto::MAX_MESSAGE as u32 + 1] {
        let (mut client, _bus, _jobs, server) = started();
        let mut header = [0_u8; 16];
        header[2] = 13;
        header[4..8].copy_from_slice(&size.to_le_bytes());
        client.stream().write_all(&header).unwrap();
        refused(client.answer(0, command::DEVICE_RESET).map(drop), Errno::INVAL);
        assert!(matches!(
            client.answer(0, 0),
            Err(ClientError::Closed | ClientError::Io(_))
        ));
        assert!(!server.join().unwrap().1);
    }
}

#[test]
fn close_with_unread_data_causes_no_reset() {
    // An invalid size, followed by data that the server never reads: the client sees the end of the stream, not an
    // error.
    let (mut client, _bus, _jobs, server) = started();
    let mut bytes = [0_u8; 16 + 4096];
    bytes[4] = 1;
    client.stream().write_all(&bytes).unwrap();
    refused(client.answer(0, 0).map(drop), Errno::INVAL);
    assert!(!server.join().unwrap().1);
    assert!(matches!(client.answer(0, 0), Err(ClientError::Closed)));
    assert_eq!(rustix::net::sockopt::socket_error(client.stream()).unwrap(), Ok(()));
}

#[test]
fn truncated_message_ends_connection() {
    let (client, _bus, _jobs, server) = started();
    client.stream().write_all(&[0; 7]).unwrap();
    drop(client);
    assert!(!server.join().unwrap().1);
}

proptest! {
    #![proptest_config(config(150))]

    /// The server replies to messages with a valid header and any body, and still works afterwards.
    #[test]
    fn arbitrary_body_gets_reply(
        messages in proptest::collection::vec(
            (0_u16..20, any::<u16>(), proptest::collection::vec(any::<u8>(), 0..80), 0_usize..3), 1..20),
    ) {
        let (mut client, ..) = started();
        for (command, id, body, fds) in messages {
            if command == command::DEVICE_RESET && id % 2 == 0 {
                continue;
            }
            let fds = events(fds);
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            match client.request(command, &[&body], &fds) {
                Ok(_) | Err(ClientError::Refused(_)) => {}
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
        prop_assert_eq!(client.read32(proto::CONFIG_REGION, 0).unwrap(), 0x0001_1234);
    }

    /// As above, with bodies of words that are mostly small, so that more of the checks are passed.
    #[test]
    fn nearly_valid_structures_get_reply(
        words in proptest::collection::vec(prop_oneof![0_u32..40, Just(u32::MAX), Just(4096), Just(1 << 20), any::<u32>()], 0..12),
        command in 1_u16..16,
    ) {
        let (mut client, ..) = started();
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        match client.request(command, &[&body], &[]) {
            Ok(_) | Err(ClientError::Refused(_)) => {}
            Err(error) => prop_assert!(false, "{error}"),
        }
        prop_assert_eq!(client.read32(proto::CONFIG_REGION, 0).unwrap(), 0x0001_1234);
    }

    /// The server ends without a panic on any sequence of bytes.
    #[test]
    fn arbitrary_stream_causes_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let (client, _bus, _jobs, server) = start();
        // Fails if the server closes the connection before all bytes are written.
        let _ = client.stream().write_all(&bytes);
        drop(client);
        prop_assert!(server.join().is_ok());
    }
}
