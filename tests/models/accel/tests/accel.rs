// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the accelerator over vfio-user: registers, commands, errors, arithmetic, DMA, interrupts, counters, rings.

#[path = "accel/arithmetic.rs"]
mod arithmetic;
#[path = "accel/rings.rs"]
mod rings;

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use num_complex::Complex64;
use p2pmem_accel::{Accel, Settings, Shared};
use p2pmem_accel_regs::{
    BAR0_SIZE, Counter, ID, MSIX_VECTORS, Op, QUEUE_DEPTH, Status, VERSION, control, flags, pattern_word, reg,
    result_entry, ring,
};
use p2pmem_proptest::config;
use p2pmem_vfio_user::client::Client;
use p2pmem_vfio_user::proto::{CONFIG_REGION, command};
use p2pmem_vfio_user::{HOST, MESSAGE, Memory, serve};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

const SIZE: u64 = 4 << 20;
const TIMEOUT: Duration = Duration::from_secs(120);

struct Bench {
    client: Option<Client>,
    shared: Arc<Shared>,
    server: Option<JoinHandle<bool>>,
}

impl Bench {
    fn new() -> Self {
        let settings = Settings {
            memory: SIZE,
            ..Settings::default()
        };
        Self::serve(Accel::new(settings).unwrap())
    }

    fn serve(mut accel: Accel) -> Self {
        let shared = accel.shared();
        let (theirs, ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || serve(ours, &mut accel).is_ok());
        let mut client = Client::new(theirs).unwrap();
        client.version().unwrap();
        Self {
            client: Some(client),
            shared,
            server: Some(server),
        }
    }

    fn client(&mut self) -> &mut Client {
        self.client.as_mut().unwrap()
    }

    fn submit(&mut self, op: u32, flags: u32, offset: u64, length: u64, argument: u64) -> u32 {
        let client = self.client();
        client.write(0, reg::OP, &op.to_le_bytes()).unwrap();
        client.write(0, reg::FLAGS, &flags.to_le_bytes()).unwrap();
        client.write(0, reg::OFFSET, &offset.to_le_bytes()).unwrap();
        client.write(0, reg::LENGTH, &length.to_le_bytes()).unwrap();
        // In two halves, as a 32-bit driver writes the register.
        client
            .write(0, reg::ARGUMENT, &(argument as u32).to_le_bytes())
            .unwrap();
        client
            .write(0, reg::ARGUMENT + 4, &((argument >> 32) as u32).to_le_bytes())
            .unwrap();
        client.write(0, reg::DOORBELL, &[1, 0, 0, 0]).unwrap();
        client.read32(0, reg::SUBMITTED).unwrap()
    }

    fn wait(&mut self, seq: u32) -> (Status, u64) {
        let entry = result_entry(seq);
        self.client().poll32(0, entry, TIMEOUT, |value| value == seq).unwrap();
        let status = Status::from_u32(self.client().read32(0, entry + 4).unwrap()).unwrap();
        (status, self.client().read64(0, entry + 8).unwrap())
    }

    fn run(&mut self, op: Op, offset: u64, length: u64, argument: u64) -> (Status, u64) {
        self.run_flags(op, 0, offset, length, argument)
    }

    fn run_flags(&mut self, op: Op, flags: u32, offset: u64, length: u64, argument: u64) -> (Status, u64) {
        let seq = self.submit(op as u32, flags, offset, length, argument);
        self.wait(seq)
    }

    fn ok(&mut self, op: Op, offset: u64, length: u64, argument: u64) -> u64 {
        let (status, value) = self.run(op, offset, length, argument);
        assert_eq!(status, Status::Ok, "{op:?}");
        value
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.shared.counters()[counter as usize]
    }

    fn memory(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.shared.memory().read(offset, &mut data).unwrap();
        data
    }

    /// Gives the first two vectors eventfds, and enables MSI-X.
    fn vectors(&mut self) -> Vec<OwnedFd> {
        let fds: Vec<OwnedFd> = (0..2).map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
        self.client().arm(0, &fds).unwrap();
        // MSI-X is the third capability, at 0x84, after power management and PCIe.
        let at = 0x84;
        assert_eq!(self.client().read32(CONFIG_REGION, at).unwrap() & 0xff, 0x11);
        self.client().write(CONFIG_REGION, at + 2, &[0, 0x80]).unwrap();
        fds
    }

    fn enable_dma(&mut self) {
        self.client().write(CONFIG_REGION, 4, &[6, 0]).unwrap();
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.client = None;
        let good = self.server.take().unwrap().join();
        assert!(std::thread::panicking() || good.unwrap(), "`serve` failed");
    }
}

/// Waits for an interrupt, and returns how often it was raised since the last call.
fn interrupts(fd: &OwnedFd) -> u64 {
    let mut poll = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    let timeout = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut poll, Some(&timeout)).unwrap(), 1);
    let mut value = [0; 8];
    rustix::io::read(fd, &mut value).unwrap();
    u64::from_ne_bytes(value)
}

#[test]
fn identification_registers() {
    let mut bench = Bench::new();
    let client = bench.client();
    assert_eq!(client.read32(0, reg::ID).unwrap(), ID);
    assert_eq!(client.read32(0, reg::VERSION).unwrap(), VERSION);
    assert_eq!(
        client.read64(0, reg::ID).unwrap(),
        u64::from(ID) | (u64::from(VERSION) << 32)
    );
    assert_eq!(client.read64(0, reg::MEMORY_SIZE).unwrap(), SIZE);
    assert_eq!(client.read32(0, reg::FEATURES).unwrap(), Op::features());
    assert_eq!(client.read32(0, reg::RING_COUNT).unwrap(), ring::COUNT);
    assert_eq!(client.read32(CONFIG_REGION, 0).unwrap(), 0xa2c1_1234);
    assert_eq!(client.read32(CONFIG_REGION, 8).unwrap() >> 8, 0x12_0000);
    let (info, _, fds) = client.region_info(2).unwrap();
    assert_eq!((info.size, info.flags, fds.len()), (SIZE, 0xf, 1));
    assert!(
        Accel::new(Settings {
            memory: 3 << 20,
            ..Settings::default()
        })
        .is_err()
    );
    assert!(
        Accel::new(Settings {
            memory: 16,
            ..Settings::default()
        })
        .is_err()
    );
    assert!(
        Accel::new(Settings {
            lanes: 5,
            ..Settings::default()
        })
        .is_err()
    );
}

#[test]
fn second_memory_is_behind_bar5() {
    let settings = Settings {
        memory: SIZE,
        second_memory: Some(2 << 20),
        ..Settings::default()
    };
    let mut bench = Bench::serve(Accel::new(settings).unwrap());
    let client = bench.client();
    let (info, _, fds) = client.region_info(5).unwrap();
    assert_eq!((info.size, info.flags, fds.len()), (2 << 20, 0xf, 1));
    client.write(5, 4096, b"second").unwrap();
    let mut data = [0; 6];
    client.read(5, 4096, &mut data).unwrap();
    assert_eq!(&data, b"second");
    assert_eq!(bench.memory(4096, 6), [0; 6]);
    assert_eq!(bench.counter(Counter::TrappedWritten), 0);
    for bad in [1024, 3 << 20] {
        let settings = Settings {
            second_memory: Some(bad),
            ..settings
        };
        assert!(Accel::new(settings).is_err(), "{bad}");
    }
}

#[test]
fn registers_push_delayed_writes() {
    let settings = Settings {
        memory: SIZE,
        delayed_writes: true,
        ..Settings::default()
    };
    let mut bench = Bench::serve(Accel::new(settings).unwrap());
    bench.client().write(2, 0, &[1; 4096]).unwrap();
    assert_eq!(bench.memory(0, 4096), [0; 4096]);
    assert_eq!(bench.counter(Counter::TrappedWritten), 4096);
    // An operation that the processor submits sees what the processor wrote before.
    let sum = bench.ok(Op::Crc32c, 0, 4096, 0);
    assert_eq!(sum, u64::from(crc32c::crc32c(&[1; 4096])));
}

#[test]
fn fill_copy_and_checksum() {
    let mut bench = Bench::new();
    bench.ok(Op::Pattern, 0, 3 << 20, 5);
    let data = bench.memory(0, 3 << 20);
    assert!(
        data.chunks_exact(8)
            .enumerate()
            .all(|(i, word)| word == pattern_word(5, i as u64).to_le_bytes())
    );
    assert_eq!(bench.ok(Op::Crc32c, 0, 3 << 20, 0), u64::from(crc32c::crc32c(&data)));
    // Overlapping copies of several chunks, in both directions.
    bench.ok(Op::Copy, 12_345, 3 << 20, 0);
    assert!(bench.memory(12_345, 3 << 20) == data);
    bench.ok(Op::Copy, 77, 3 << 20, 12_345);
    assert!(bench.memory(77, 3 << 20) == data);
    bench.ok(Op::Fill, 1, 11, u64::from_le_bytes(*b"abcdefgh"));
    assert_eq!(bench.memory(1, 11), b"abcdefghabc");
    let values = |at: u64, bench: &Bench| -> Vec<f32> {
        bench
            .memory(at, 16)
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    };
    for (i, value) in [1.5_f32, -2.0, 1e20, 0.25].iter().enumerate() {
        bench
            .shared
            .memory()
            .write(64 + 4 * i as u64, &value.to_le_bytes())
            .unwrap();
        bench
            .shared
            .memory()
            .write(128 + 4 * i as u64, &(value * 2.0).to_le_bytes())
            .unwrap();
    }
    bench.ok(Op::AddF32, 64, 16, 128);
    assert_eq!(values(64, &bench), [4.5, -6.0, 3e20, 0.75]);
    assert_eq!(
        bench.counter(Counter::HostRead) + bench.counter(Counter::HostWritten),
        0
    );
    assert_eq!(bench.counter(Counter::ComputeWritten), 9 * (1 << 20) + 11 + 16);
    assert_eq!(bench.counter(Counter::ComputeRead), 9 * (1 << 20) + 32);
    assert_eq!(bench.counter(Counter::CommandsOk), 6);
}

#[test]
fn transforms_agree_with_definition() {
    let mut bench = Bench::new();
    const N: usize = 32;
    let input: Vec<Complex64> = (0..3 * N)
        .map(|i| Complex64::new((i as f64 * 0.7).sin(), (i as f64 * 1.3).cos()))
        .collect();
    for (i, sample) in input.iter().enumerate() {
        let bytes = [(sample.re as f32).to_le_bytes(), (sample.im as f32).to_le_bytes()].concat();
        bench.shared.memory().write(4096 + 8 * i as u64, &bytes).unwrap();
    }
    let samples = |bench: &Bench| -> Vec<Complex64> {
        let part = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
        bench
            .memory(4096, 24 * N)
            .chunks_exact(8)
            .map(|b| Complex64::new(part(&b[..4]), part(&b[4..])))
            .collect()
    };
    bench.ok(Op::Fft, 4096, 24 * N as u64, N as u64);
    for (v, vector) in samples(&bench).chunks_exact(N).enumerate() {
        for (k, got) in vector.iter().enumerate() {
            let expected: Complex64 = (0..N)
                .map(|i| {
                    let angle = -2.0 * std::f64::consts::PI * (i * k) as f64 / N as f64;
                    input[v * N + i] * Complex64::from_polar(1.0, angle)
                })
                .sum();
            assert!(
                (got - expected).norm() < 1e-4,
                "vector {v} bin {k}: {got} instead of {expected}"
            );
        }
    }
    let (status, _) = bench.run_flags(Op::Fft, flags::INVERSE, 4096, 24 * N as u64, N as u64);
    assert_eq!(status, Status::Ok);
    assert!(samples(&bench).iter().zip(&input).all(|(a, b)| (a - b).norm() < 1e-5));
    // Several chunks, and a vector that is longer than a chunk.
    bench.ok(Op::Fft, 0, SIZE, 1024);
    bench.ok(Op::Fft, 0, SIZE, SIZE / 8);
}

#[test]
fn invalid_parameters_end_with_error_status() {
    let mut bench = Bench::new();
    for (op, offset, length, argument, status) in [
        (Op::Fill, SIZE, 1, 0, Status::BadRange),
        (Op::Fill, SIZE - 8, 16, 0, Status::BadRange),
        (Op::Fill, u64::MAX, 2, 0, Status::BadRange),
        (Op::Fill, 2, u64::MAX, 0, Status::BadRange),
        (Op::Fill, 0, 0, 0, Status::BadLength),
        (Op::Copy, 0, 16, SIZE - 8, Status::BadRange),
        (Op::Copy, 0, 16, u64::MAX - 8, Status::BadRange),
        (Op::Fft, 0, 64, 3, Status::BadArgument),
        (Op::Fft, 0, 64, 1, Status::BadArgument),
        (Op::Fft, 0, 64, 0, Status::BadArgument),
        (Op::Fft, 0, 64, 1 << 40, Status::BadArgument),
        (Op::Fft, 4, 64, 8, Status::BadAlignment),
        (Op::Fft, 0, 72, 8, Status::BadLength),
        (Op::AddF32, 0, 64, 32, Status::BadArgument),
        (Op::AddF32, 2, 64, 128, Status::BadAlignment),
        (Op::AddF32, 0, 62, 128, Status::BadLength),
        (Op::AddF32, 0, 64, 126, Status::BadAlignment),
        (Op::AddF32, 0, 64, SIZE - 32, Status::BadRange),
        (Op::MaxF32, 4, 4, 4, Status::BadArgument),
        (Op::MaxF32, 2, 64, 128, Status::BadAlignment),
        (Op::MaxF32, 0, 62, 128, Status::BadLength),
        (Op::AddBf16, 0, 64, 62, Status::BadArgument),
        (Op::AddBf16, 62, 64, 0, Status::BadArgument),
        (Op::AddBf16, 1, 64, 128, Status::BadAlignment),
        (Op::AddBf16, 0, 64, 127, Status::BadAlignment),
        (Op::AddBf16, 0, 63, 128, Status::BadLength),
        (Op::AddBf16, 0, 0, 128, Status::BadLength),
        (Op::MaxBf16, 0, 2, 0, Status::BadArgument),
        (Op::MaxBf16, 0, 1, 128, Status::BadLength),
        (Op::MaxBf16, SIZE - 2, 4, 0, Status::BadRange),
        (Op::DmaIn, 0, 64, u64::MAX - 8, Status::BadArgument),
        (Op::DmaIn, 0, 64, 0, Status::BusMasterOff),
        (Op::DmaOut, SIZE, 64, 0, Status::BadRange),
    ] {
        assert_eq!(
            bench.run(op, offset, length, argument).0,
            status,
            "{op:?} {offset:#x} {length:#x} {argument:#x}"
        );
    }
    for (op, flags, status) in [
        (0, 0, Status::BadOperation),
        (99, 0, Status::BadOperation),
        (u32::MAX, 0, Status::BadOperation),
        (Op::Nop as u32, 1 << 31, Status::BadOperation),
        (Op::Nop as u32, flags::RESULT, Status::BadOperation),
        (Op::Fill as u32, flags::BUS, Status::BadOperation),
        (Op::Fill as u32, flags::INVERSE, Status::BadOperation),
        (
            Op::Nop as u32,
            flags::INTERRUPT | (u32::from(MSIX_VECTORS) << flags::VECTOR_SHIFT),
            Status::BadArgument,
        ),
    ] {
        let seq = bench.submit(op, flags, 0, 8, 0);
        assert_eq!(bench.wait(seq).0, status, "{op} {flags:#x}");
    }
    assert_eq!(bench.counter(Counter::CommandsFailed), 41);
    assert_eq!(bench.counter(Counter::ComputeWritten), 0);
    assert_eq!(bench.run(Op::Nop, 0, 0, 0).0, Status::Ok);
}

#[test]
fn dma_bytes_are_counted_by_target() {
    let mut bench = Bench::new();
    bench.enable_dma();
    let ram = Memory::new("guest", 1 << 20).unwrap();
    bench.client().dma_map(0, 1 << 20, Some((ram.fd(), 0))).unwrap();
    let peer = std::sync::Mutex::new(vec![0_u8; 1 << 20]);
    bench.client().set_bus(Box::new(move |address, data, write| {
        let mut peer = peer.lock().unwrap();
        let at = address.checked_sub(1 << 30).ok_or(19_u32)? as usize;
        let there = peer.get_mut(at..at + data.len()).ok_or(19_u32)?;
        if write {
            there.copy_from_slice(data)
        } else {
            data.copy_from_slice(there)
        }
        Ok(())
    }));
    bench.ok(Op::Pattern, 0, 1 << 18, 1);
    let data = bench.memory(0, 1 << 18);
    assert_eq!(bench.ok(Op::DmaOut, 0, 1 << 18, 4096), 1 << 18);
    let mut there = vec![0; 1 << 18];
    ram.read(4096, &mut there).unwrap();
    assert!(there == data);
    bench.ok(Op::DmaOut, 0, 1 << 18, 1 << 30);
    bench.ok(Op::DmaIn, 1 << 20, 1 << 17, 1 << 30);
    assert!(bench.memory(1 << 20, 1 << 17) == data[..1 << 17]);
    let expected = [
        (Counter::HostWritten, 1 << 18),
        (Counter::HostRead, 0),
        (Counter::MessageWritten, 1 << 18),
        (Counter::MessageRead, 1 << 17),
        (Counter::EngineRead, 1 << 19),
        (Counter::EngineWritten, 1 << 17),
        (Counter::PeerRead, 0),
    ];
    for (counter, bytes) in expected {
        assert_eq!(bench.counter(counter), bytes, "{counter:?}");
        assert_eq!(bench.client().read64(0, counter.register()).unwrap(), bytes);
    }
    // The second half of this transfer has no target: the command fails, and the first half is counted.
    assert_eq!(
        bench.run(Op::DmaIn, 0, 1 << 17, (1 << 30) + (1 << 20) - (1 << 16)).0,
        Status::Unreachable
    );
    assert_eq!(bench.counter(Counter::EngineWritten), (1 << 17) + (1 << 16));
    let moved = bench.shared.moved();
    assert_eq!(moved[HOST].written, 1 << 18);
    assert_eq!(moved[MESSAGE].read, (1 << 17) + (1 << 16));
    bench.shared.reset_counters();
    assert_eq!(bench.counter(Counter::HostWritten), 0);
}

#[test]
fn interrupt_is_raised_only_if_requested() {
    let mut bench = Bench::new();
    let fds = bench.vectors();
    let fired = |fd: &OwnedFd| rustix::io::read(fd, &mut [0; 8]).is_ok();
    let wanted = flags::INTERRUPT | (1 << flags::VECTOR_SHIFT);
    assert_eq!(bench.run_flags(Op::Nop, wanted, 0, 0, 0).0, Status::Ok);
    bench
        .client()
        .write(0, reg::CONTROL, &control::INTERRUPTS.to_le_bytes())
        .unwrap();
    assert_eq!(bench.run(Op::Nop, 0, 0, 0).0, Status::Ok);
    assert_eq!(bench.run_flags(Op::Nop, wanted, 0, 0, 0).0, Status::Ok);
    // The interrupt follows the result, so wait for it.
    assert_eq!(
        interrupts(&fds[1]),
        1,
        "only the command with flag INTERRUPT while interrupts are enabled"
    );
    assert!(!fired(&fds[0]));
}

#[test]
fn full_queue_rejects_submission() {
    let mut bench = Bench::new();
    bench.enable_dma();
    // A DMA message without a reply blocks the worker, so this test reads messages and does not reply to them.
    let send = |bench: &mut Bench, offset: u64, data: &[u8]| {
        let head = access(offset, data.len() as u32);
        bench
            .client()
            .send(command::REGION_WRITE, 0x10, &[&head, data], &[])
            .unwrap();
    };
    send(&mut bench, reg::OP, &(Op::DmaIn as u32).to_le_bytes());
    send(&mut bench, reg::LENGTH, &8_u64.to_le_bytes());
    send(&mut bench, reg::ARGUMENT, &0x1000_u64.to_le_bytes());
    for _ in 0..QUEUE_DEPTH + 10 {
        send(&mut bench, reg::DOORBELL, &[1, 0, 0, 0]);
    }
    assert_eq!(read32_without_dma_replies(&mut bench, reg::REFUSED), 10);
    assert_eq!(read32_without_dma_replies(&mut bench, reg::SUBMITTED), QUEUE_DEPTH);
    assert_eq!(read32_without_dma_replies(&mut bench, reg::PENDING), QUEUE_DEPTH);
    // An abort ends all commands.
    send(&mut bench, reg::CONTROL, &control::ABORT.to_le_bytes());
    bench
        .client()
        .poll32(0, reg::PENDING, TIMEOUT, |pending| pending == 0)
        .unwrap();
    assert_eq!(bench.wait(QUEUE_DEPTH).0, Status::Aborted);
    assert_eq!(bench.run(Op::Nop, 0, 0, 0).0, Status::Ok);
}

/// Reads a register without replying to DMA messages of the device.
fn read32_without_dma_replies(bench: &mut Bench, offset: u64) -> u32 {
    let id = bench
        .client()
        .send(command::REGION_READ, 0, &[&access(offset, 4)], &[])
        .unwrap();
    let mut stream = bench.client().stream();
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        let size = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
        let mut body = vec![0; size - header.len()];
        stream.read_exact(&mut body).unwrap();
        if header[2..4] == command::REGION_READ.to_le_bytes() {
            assert_eq!(header[..2], id.to_le_bytes());
            return u32::from_le_bytes(body[16..20].try_into().unwrap());
        }
        assert_eq!(header[2..4], command::DMA_READ.to_le_bytes());
    }
}

/// Builds the header of a region access message.
fn access(offset: u64, count: u32) -> Vec<u8> {
    [&offset.to_le_bytes()[..], &0_u32.to_le_bytes(), &count.to_le_bytes()].concat()
}

#[test]
fn reset_drops_commands_and_keeps_memory() {
    let mut bench = Bench::new();
    bench.ok(Op::Fill, 0, 4096, 0x0101_0101_0101_0101);
    for _ in 0..8 {
        bench.submit(Op::Fft as u32, 0, 4096, SIZE - 4096 * 512, 2);
    }
    bench.client().reset().unwrap();
    let client = bench.client();
    assert_eq!(client.read64(0, reg::SUBMITTED).unwrap(), 0);
    assert_eq!(client.read32(0, reg::PENDING).unwrap(), 0);
    assert_eq!(client.read64(0, result_entry(1)).unwrap(), 0);
    assert_eq!(client.read32(0, reg::OP).unwrap(), 0);
    assert_eq!(bench.memory(0, 16), [1; 16]);
    assert_eq!(bench.submit(Op::Nop as u32, 0, 0, 0, 0), 1);
    assert_eq!(bench.wait(1).0, Status::Ok);
}

#[test]
fn invalid_accesses_are_ignored_and_counted() {
    let mut bench = Bench::new();
    bench.client().write(0, reg::OP, &[7]).unwrap();
    bench.client().write(0, reg::OP + 2, &[7; 4]).unwrap();
    bench.client().write(0, reg::ID, &[7; 4]).unwrap();
    let mut data = [0xee; 3];
    bench.client().read(0, reg::ID, &mut data).unwrap();
    assert_eq!(data, [0; 3]);
    assert_eq!(bench.client().read32(0, BAR0_SIZE - 4).unwrap(), 0);
    assert_eq!(bench.client().read32(0, reg::OP).unwrap(), 0);
    assert_eq!(bench.counter(Counter::RegisterBad), 5);
    assert_eq!(bench.counter(Counter::RegisterWrites), 3);
    assert_eq!(bench.counter(Counter::RegisterReads), 3);
    bench.client().write(2, 100, &[1, 2, 3]).unwrap();
    let mut data = [0; 3];
    bench.client().read(2, 100, &mut data).unwrap();
    assert_eq!(data, [1, 2, 3]);
    assert_eq!(
        (
            bench.counter(Counter::TrappedRead),
            bench.counter(Counter::TrappedWritten)
        ),
        (3, 3)
    );
}

proptest! {
    #![proptest_config(config(40))]

    /// Each command with arbitrary values gets a result, and the device keeps working.
    #[test]
    fn arbitrary_command_completes(
        op in 0_u32..23,
        flags in prop_oneof![Just(0_u32), Just(1), any::<u32>()],
        offset in prop_oneof![0..2 * SIZE, any::<u64>()],
        length in prop_oneof![0_u64..70_000, any::<u64>()],
        argument in prop_oneof![0..2 * SIZE, 0_u64..70, any::<u64>()],
    ) {
        let mut bench = Bench::new();
        let seq = bench.submit(op, flags, offset, length, argument);
        let _ = bench.wait(seq);
        prop_assert_eq!(bench.client().read32(0, reg::ID).unwrap(), ID);
    }

    /// Register accesses at arbitrary offsets and widths get a reply, and the device keeps working.
    #[test]
    fn arbitrary_register_access_gets_reply(
        accesses in proptest::collection::vec((0..BAR0_SIZE, 1_usize..17, any::<bool>(), any::<u8>()), 1..50),
    ) {
        let mut bench = Bench::new();
        for (offset, len, write, value) in accesses {
            let len = len.min((BAR0_SIZE - offset) as usize);
            let mut data = vec![value; len];
            if write {
                bench.client().write(0, offset, &data).unwrap();
            } else {
                bench.client().read(0, offset, &mut data).unwrap();
            }
        }
        prop_assert_eq!(bench.client().read32(0, reg::ID).unwrap(), ID);
    }
}
