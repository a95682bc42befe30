// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the FPGA over vfio-user: registers, refused settings, rates, late readers, stops, resets, counters.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use p2pmem_fpga::{Clock, Fpga, Settings, Shared};
use p2pmem_fpga_regs::frame::{HEADER_SIZE, Header, fill_samples};
use p2pmem_fpga_regs::{Counter, ID, MAX_RATE, Status, VERSION, control, reg};
use p2pmem_vfio_user::client::Client;
use p2pmem_vfio_user::proto::CONFIG_REGION;
use p2pmem_vfio_user::serve;

const SIZE: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(120);
const FRAME: u32 = 4096;
const SEED: u64 = 0x1234_5678_9abc_def0;

/// Settings of a stream.
#[derive(Clone, Copy)]
struct Setup {
    offset: u64,
    frame_size: u32,
    frames: u32,
    rate: u64,
    limit: u64,
}

const RING: Setup = Setup {
    offset: 4096,
    frame_size: FRAME,
    frames: 4,
    rate: 0,
    limit: 0,
};

struct Bench {
    client: Option<Client>,
    shared: Arc<Shared>,
    clock: Clock,
    server: Option<JoinHandle<bool>>,
}

impl Bench {
    fn new() -> Self {
        Self::with(Clock::manual())
    }

    fn with(clock: Clock) -> Self {
        let settings = Settings {
            memory: SIZE,
            clock: clock.clone(),
            ..Settings::default()
        };
        let mut fpga = Fpga::new(settings).unwrap();
        let shared = fpga.shared();
        let (theirs, ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || serve(ours, &mut fpga).is_ok());
        let mut client = Client::new(theirs).unwrap();
        client.version().unwrap();
        Self {
            client: Some(client),
            shared,
            clock,
            server: Some(server),
        }
    }

    fn client(&mut self) -> &mut Client {
        self.client.as_mut().unwrap()
    }

    fn write32(&mut self, register: u64, value: u32) {
        self.client().write(0, register, &value.to_le_bytes()).unwrap();
    }

    fn write64(&mut self, register: u64, value: u64) {
        self.client().write(0, register, &value.to_le_bytes()).unwrap();
    }

    fn read32(&mut self, register: u64) -> u32 {
        self.client().read32(0, register).unwrap()
    }

    fn status(&mut self) -> Status {
        Status::from_u32(self.read32(reg::STATUS)).unwrap()
    }

    fn start(&mut self, setup: Setup) -> Status {
        self.write64(reg::RING_OFFSET, setup.offset);
        self.write32(reg::FRAME_SIZE, setup.frame_size);
        self.write32(reg::FRAMES, setup.frames);
        // In two halves, as a 32-bit driver writes the register.
        self.write32(reg::RATE, setup.rate as u32);
        self.write32(reg::RATE + 4, (setup.rate >> 32) as u32);
        self.write64(reg::SEED, SEED);
        self.write64(reg::LIMIT, setup.limit);
        self.write32(reg::CONTROL, control::RUN);
        self.status()
    }

    /// Waits until the device has done all that is due.
    fn settle(&self) {
        assert!(self.shared.settle(TIMEOUT));
    }

    fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.settle();
    }

    fn stop(&mut self) {
        self.write32(reg::CONTROL, 0);
        self.settle();
        assert_eq!(self.status(), Status::Idle);
    }

    fn counter(&self, counter: Counter) -> u64 {
        self.shared.counters()[counter as usize]
    }

    /// Returns the header in a slot, after a check of the samples.
    fn frame(&self, setup: Setup, slot: u32) -> Header {
        let mut bytes = vec![0; setup.frame_size as usize];
        let at = setup.offset + u64::from(slot) * u64::from(setup.frame_size);
        self.shared.memory().read(at, &mut bytes).unwrap();
        let (header, samples) = bytes.split_at(HEADER_SIZE);
        let header = Header::from_bytes(header.try_into().unwrap()).unwrap();
        assert_eq!(header.payload as usize, samples.len());
        assert_eq!(header.crc32c, crc32c::crc32c(samples));
        assert_eq!(header.time, header.sequence * samples.len() as u64);
        assert_eq!(header.seed, SEED);
        let mut expected = vec![0; samples.len()];
        fill_samples(SEED, header.sequence, 0, &mut expected);
        assert!(samples == expected);
        header
    }

    /// Returns position and sequence number of the frames in all slots.
    fn frames(&self, setup: Setup) -> Vec<(u64, u64)> {
        let headers = (0..setup.frames).map(|slot| self.frame(setup, slot));
        headers.map(|header| (header.position, header.sequence)).collect()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.client = None;
        let good = self.server.take().unwrap().join();
        assert!(std::thread::panicking() || good.unwrap(), "`serve` failed");
    }
}

#[test]
fn identification_registers() {
    let mut bench = Bench::new();
    assert_eq!((bench.read32(reg::ID), bench.read32(reg::VERSION)), (ID, VERSION));
    let client = bench.client();
    assert_eq!(client.read64(0, reg::MEMORY_SIZE).unwrap(), SIZE);
    assert_eq!(client.read32(CONFIG_REGION, 0).unwrap(), 0xa2c2_1234);
    assert_eq!(client.read32(CONFIG_REGION, 8).unwrap() >> 8, 0x11_8000);
    let (info, _, fds) = client.region_info(2).unwrap();
    assert_eq!((info.size, info.flags & 7, fds.len()), (SIZE, 7, 1));
    for memory in [16, 3 << 20] {
        let settings = Settings {
            memory,
            ..Settings::default()
        };
        assert!(Fpga::new(settings).is_err(), "{memory}");
    }
}

#[test]
fn bad_settings_are_refused_with_a_status() {
    let mut bench = Bench::new();
    let cases = [
        (Setup { frame_size: 0, ..RING }, Status::BadFrameSize),
        (
            Setup {
                frame_size: 4097,
                ..RING
            },
            Status::BadFrameSize,
        ),
        (Setup { frame_size: 64, ..RING }, Status::BadFrameSize),
        (Setup { frames: 0, ..RING }, Status::BadFrames),
        (Setup { frames: 1, ..RING }, Status::BadFrames),
        (
            Setup {
                rate: MAX_RATE + 1,
                ..RING
            },
            Status::BadRate,
        ),
        (Setup { offset: 4104, ..RING }, Status::BadRing),
        (
            Setup {
                offset: SIZE - 3 * 4096,
                ..RING
            },
            Status::BadRing,
        ),
        (
            Setup {
                offset: u64::MAX - 63,
                ..RING
            },
            Status::BadRing,
        ),
        (
            Setup {
                frame_size: u32::MAX - 127,
                frames: u32::MAX,
                ..RING
            },
            Status::BadRing,
        ),
    ];
    for (i, (setup, status)) in cases.into_iter().enumerate() {
        assert_eq!(bench.start(setup), status, "case {i}");
        assert_eq!(bench.read32(reg::CONTROL), 0);
        assert_eq!(bench.counter(Counter::Refused), i as u64 + 1);
    }
    bench.settle();
    assert_eq!(bench.counter(Counter::StreamWritten), 0);
    // The device is as good as before.
    assert_eq!(bench.start(RING), Status::Running);
    bench.settle();
    assert_eq!(bench.read32(reg::PRODUCED), 4);
}

#[test]
fn without_a_rate_the_reader_sets_the_pace_and_no_frame_is_dropped() {
    let mut bench = Bench::new();
    assert_eq!(bench.start(RING), Status::Running);
    bench.settle();
    assert_eq!(bench.frames(RING), [(1, 0), (2, 1), (3, 2), (4, 3)]);
    // The clock has no effect.
    bench.advance(Duration::from_secs(3600));
    assert_eq!(bench.read32(reg::PRODUCED), 4);
    bench.write32(reg::CONSUMED, 3);
    bench.settle();
    assert_eq!(bench.frames(RING), [(5, 4), (6, 5), (7, 6), (4, 3)]);
    assert_eq!(bench.counter(Counter::Frames), 7);
    assert_eq!(bench.counter(Counter::StreamWritten), 7 * u64::from(FRAME));
    assert_eq!(bench.client().read64(0, reg::DROPPED).unwrap(), 0);
}

#[test]
fn frames_come_at_the_rate_and_late_readers_lose_counted_frames() {
    let mut bench = Bench::new();
    // One frame per millisecond.
    let setup = Setup {
        rate: 1000 * u64::from(FRAME),
        ..RING
    };
    let millisecond = Duration::from_millis(1);
    assert_eq!(bench.start(setup), Status::Running);
    bench.settle();
    assert_eq!(bench.read32(reg::PRODUCED), 0);
    bench.advance(millisecond - Duration::from_nanos(1));
    assert_eq!(bench.read32(reg::PRODUCED), 0);
    bench.advance(Duration::from_nanos(1));
    assert_eq!(bench.read32(reg::PRODUCED), 1);
    bench.advance(3 * millisecond);
    assert_eq!(bench.frames(setup), [(1, 0), (2, 1), (3, 2), (4, 3)]);
    assert_eq!(bench.client().read64(0, reg::DROPPED).unwrap(), 0);
    // Frames 4 to 8 find no slot.
    bench.advance(5 * millisecond);
    assert_eq!(bench.read32(reg::PRODUCED), 4);
    assert_eq!(bench.client().read64(0, reg::DROPPED).unwrap(), 5);
    assert_eq!(bench.client().read64(0, reg::SEQUENCE).unwrap(), 9);
    bench.write32(reg::CONSUMED, 2);
    bench.settle();
    assert_eq!(bench.read32(reg::PRODUCED), 4);
    bench.advance(2 * millisecond);
    assert_eq!(bench.frames(setup), [(5, 9), (6, 10), (3, 2), (4, 3)]);
    assert_eq!(bench.counter(Counter::Dropped), 5);
    let state = bench.shared.state();
    assert_eq!((state.produced, state.consumed, state.dropped), (6, 2, 5));
}

#[test]
fn registers_answer_while_frames_are_dropped_at_the_highest_rate() {
    let mut bench = Bench::with(Clock::default());
    let setup = Setup {
        frame_size: 128,
        rate: MAX_RATE,
        ..RING
    };
    assert_eq!(bench.start(setup), Status::Running);
    while bench.client().read64(0, reg::DROPPED).unwrap() == 0 {}
    bench.write32(reg::CONTROL, 0);
    let stopped = |status| status == Status::Idle as u32;
    bench.client().poll32(0, reg::STATUS, TIMEOUT, stopped).unwrap();
}

#[test]
fn a_stream_with_a_limit_ends() {
    let mut bench = Bench::new();
    let setup = Setup {
        limit: 7,
        rate: 1000 * u64::from(FRAME),
        ..RING
    };
    assert_eq!(bench.start(setup), Status::Running);
    bench.advance(Duration::from_secs(10));
    assert_eq!(bench.status(), Status::Done);
    assert_eq!(bench.read32(reg::PRODUCED), 4);
    assert_eq!(bench.client().read64(0, reg::DROPPED).unwrap(), 3);
    assert_eq!(bench.client().read64(0, reg::SEQUENCE).unwrap(), 7);
    // A later stream starts with frame 0.
    bench.start(Setup { limit: 1, ..RING });
    bench.settle();
    assert_eq!(bench.status(), Status::Done);
    assert_eq!(bench.frame(RING, 0).sequence, 0);
    // Frames of the earlier stream are no frames of this one.
    let mut position = [1; 8];
    bench
        .shared
        .memory()
        .read(RING.offset + u64::from(FRAME) + 8, &mut position)
        .unwrap();
    assert_eq!(position, [0; 8]);
}

#[test]
fn a_consumer_that_is_ahead_stops_the_stream() {
    let mut bench = Bench::new();
    for wrong in [5, u32::MAX] {
        assert_eq!(bench.start(RING), Status::Running);
        bench.settle();
        bench.write32(reg::CONSUMED, wrong);
        bench.settle();
        assert_eq!(bench.status(), Status::BadConsumer);
        assert_eq!(bench.read32(reg::CONSUMED), 0);
    }
}

#[test]
fn a_second_start_is_refused_and_a_stop_ends_the_stream() {
    let mut bench = Bench::new();
    assert_eq!(bench.start(RING), Status::Running);
    assert_eq!(bench.start(Setup { frames: 0, ..RING }), Status::Running);
    assert_eq!(bench.counter(Counter::Refused), 1);
    bench.settle();
    bench.stop();
    bench.write32(reg::CONSUMED, 4);
    bench.settle();
    assert_eq!(bench.counter(Counter::Frames), 4);
    // A stop without a stream has no effect.
    bench.stop();
}

#[test]
fn a_stop_abandons_a_large_frame() {
    let mut bench = Bench::new();
    let setup = Setup {
        offset: 0,
        frame_size: (SIZE / 2) as u32,
        frames: 2,
        ..RING
    };
    for _ in 0..50 {
        assert_eq!(bench.start(setup), Status::Running);
        bench.stop();
        // A slot has a whole frame or none.
        let produced = bench.read32(reg::PRODUCED);
        for slot in 0..2 {
            let mut position = [0; 8];
            let at = u64::from(slot) * u64::from(setup.frame_size) + 8;
            bench.shared.memory().read(at, &mut position).unwrap();
            let written = slot < produced;
            assert_eq!(
                u64::from_le_bytes(position),
                if written { u64::from(slot) + 1 } else { 0 }
            );
            if written {
                bench.frame(setup, slot);
            }
        }
    }
}

#[test]
fn the_end_of_the_client_stops_the_stream() {
    let mut bench = Bench::new();
    assert_eq!(bench.start(RING), Status::Running);
    bench.settle();
    bench.client = None;
    assert!(bench.server.take().unwrap().join().unwrap());
    let state = bench.shared.state();
    assert_eq!((state.status, state.produced), (Status::Idle as u32, 0));
    // `Drop` joins a server.
    bench.server = Some(std::thread::spawn(|| true));
}

#[test]
fn unknown_registers_are_counted() {
    let mut bench = Bench::new();
    bench.write32(reg::STATUS, 1);
    bench.write32(0x800, 1);
    assert_eq!(bench.read32(0x800), 0);
    bench.client().write(0, reg::FRAMES, &[1]).unwrap();
    assert_eq!(bench.counter(Counter::RegisterBad), 4);
    bench.write32(reg::COUNTERS_RESET, 1);
    assert_eq!(bench.counter(Counter::RegisterBad), 0);
    let reads = reg::COUNTERS + 8 * Counter::RegisterReads as u64;
    assert_eq!(bench.client().read64(0, reads).unwrap(), 1);
}
