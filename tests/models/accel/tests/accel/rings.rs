// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of rings: order, errors, polls, ends of all kinds, interrupts, reports.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use p2pmem_accel_regs::ring::{self, Entry, Place, Progress, State, control, entry, reg as ring_reg};
use p2pmem_accel_regs::{BLOCK_MAX, Counter, MSIX_VECTORS, Op, Status, flags, pattern_word, reg};
use p2pmem_proptest::config;
use p2pmem_vfio_user::proto::{CONFIG_REGION, command};
use p2pmem_vfio_user::{Memory, Peers};
use proptest::prelude::*;

use super::{Accel, Bench, SIZE, Settings, TIMEOUT, access, interrupts};

/// Where the entries of a test's first ring are, and its report.
const BASE: u64 = 1 << 20;
const REPORT: u64 = (2 << 20) - 64;
/// A word that polls read.
const WORD: u64 = 2 << 20;
/// Bus addresses that the client serves by messages, and where guest memory is.
const MESSAGES: u64 = 1 << 30;
const HOST: u64 = 0;

/// Writes by messages: address and data.
type Writes = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

/// A started ring.
struct Ring {
    number: u32,
    base: u64,
    entries: u32,
    tail: u32,
}

/// Configuration of a ring.
#[derive(Clone, Copy)]
struct Setup {
    number: u32,
    base: u64,
    entries: u32,
    first: u32,
    poll_limit: u32,
    report: u64,
    control: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            number: 0,
            base: BASE,
            entries: 16,
            first: 0,
            poll_limit: u32::MAX,
            report: REPORT,
            control: control::REPORT_MEMORY,
        }
    }
}

impl Setup {
    fn number(number: u32) -> Self {
        Self {
            number,
            base: BASE + (u64::from(number) << 16),
            report: REPORT - 64 * u64::from(number),
            ..Self::default()
        }
    }

    /// Writes the registers, and returns the state that the ring has then.
    fn write(self, bench: &mut Bench) -> State {
        let number = self.number;
        for (register, value) in [
            (ring_reg::BASE, self.base),
            (
                ring_reg::ENTRIES,
                u64::from(self.entries) | (u64::from(self.poll_limit) << 32),
            ),
            (ring_reg::REPORT, self.report),
        ] {
            bench
                .client()
                .write(0, ring::register(number, register), &value.to_le_bytes())
                .unwrap();
        }
        bench.set(number, ring_reg::HEAD, self.first);
        bench.set(number, ring_reg::CONTROL, self.control | control::ENABLE);
        bench.ring_state(number)
    }

    fn start(self, bench: &mut Bench) -> Ring {
        assert_eq!(self.write(bench), State::Running);
        Ring {
            number: self.number,
            base: self.base,
            entries: self.entries,
            tail: self.first,
        }
    }
}

impl Ring {
    fn push_bytes(&mut self, bench: &Bench, bytes: &[u8; 64]) -> u32 {
        let index = self.tail;
        let slot = u64::from(index % self.entries);
        bench.shared.memory().write(self.base + 64 * slot, bytes).unwrap();
        self.tail = index.wrapping_add(1);
        index
    }

    fn push(&mut self, bench: &Bench, entry: Entry) -> u32 {
        self.push_bytes(bench, &entry.encode())
    }

    fn doorbell(&self, bench: &mut Bench) {
        bench.set(self.number, ring_reg::TAIL, self.tail);
    }

    /// Submits entries.
    fn submit(&mut self, bench: &mut Bench, entries: &[Entry]) {
        for entry in entries {
            self.push(bench, *entry);
        }
        self.doorbell(bench);
    }

    /// Submits entries, and waits until all have completed.
    fn run(&mut self, bench: &mut Bench, entries: &[Entry]) {
        self.submit(bench, entries);
        self.wait(bench);
    }

    fn wait(&self, bench: &mut Bench) {
        let head = ring::register(self.number, ring_reg::HEAD);
        let result = bench.client().poll32(0, head, TIMEOUT, |head| head == self.tail);
        assert!(result.is_ok(), "{result:?} {:?}", bench.shared.state().rings);
    }

    fn disable(&self, bench: &mut Bench) {
        bench.set(self.number, ring_reg::CONTROL, 0);
        bench.wait_state(self.number, State::Disabled);
    }
}

impl Bench {
    fn set(&mut self, ring: u32, register: u64, value: u32) {
        self.client()
            .write(0, ring::register(ring, register), &value.to_le_bytes())
            .unwrap();
    }

    fn get(&mut self, ring: u32, register: u64) -> u32 {
        self.client().read32(0, ring::register(ring, register)).unwrap()
    }

    fn ring_state(&mut self, ring: u32) -> State {
        State::from_u32(self.get(ring, ring_reg::STATE)).unwrap()
    }

    fn wait_state(&mut self, ring: u32, state: State) {
        let register = ring::register(ring, ring_reg::STATE);
        let result = self
            .client()
            .poll32(0, register, TIMEOUT, |value| value == state as u32);
        assert!(result.is_ok(), "{result:?} {:?}", self.shared.state().rings);
    }

    /// Waits until a ring has stopped with an error, and returns the index and the status.
    fn wait_error(&mut self, ring: u32) -> (u32, Status) {
        self.wait_state(ring, State::Error);
        let word = self.client().read64(0, ring::register(ring, ring_reg::HEAD)).unwrap();
        let progress = Progress::from_u64(word).unwrap();
        (progress.head, progress.stopped.unwrap())
    }

    fn memory64(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.memory(offset, 8).try_into().unwrap())
    }

    fn report(&self, offset: u64) -> Progress {
        Progress::from_u64(self.memory64(offset)).unwrap()
    }

    /// Waits until a counter is at least `least`, while the client serves DMA.
    fn wait_counter(&mut self, counter: Counter, least: u64) {
        let register = counter.register();
        let result = self
            .client()
            .poll32(0, register, TIMEOUT, |value| u64::from(value) >= least);
        assert!(result.is_ok(), "{counter:?}: {result:?}");
    }

    /// Maps 1 MiB of guest memory at [`HOST`], and enables DMA.
    fn guest_memory(&mut self) -> Memory {
        self.enable_dma();
        let ram = Memory::new("guest", 1 << 20).unwrap();
        self.client().dma_map(HOST, 1 << 20, Some((ram.fd(), 0))).unwrap();
        ram
    }

    /// Answers DMA messages from a memory at [`MESSAGES`]. Returns the memory and the writes.
    fn serve_messages(&mut self) -> (Arc<Mutex<Vec<u8>>>, Writes) {
        let (bytes, writes) = (Arc::new(Mutex::new(vec![0; 1 << 20])), Writes::default());
        let (memory, log) = (Arc::clone(&bytes), Arc::clone(&writes));
        self.client().set_bus(Box::new(move |address, data, write| {
            let mut memory = memory.lock().unwrap();
            let at = address.checked_sub(MESSAGES).ok_or(19_u32)? as usize;
            let there: &mut [u8] = memory.get_mut(at..at + data.len()).ok_or(19_u32)?;
            if write {
                log.lock().unwrap().push((address, data.to_vec()));
                there.copy_from_slice(data);
            } else {
                data.copy_from_slice(there);
            }
            Ok(())
        }));
        (bytes, writes)
    }
}

#[test]
fn registers_read_back_and_are_protected_while_the_ring_runs() {
    let mut bench = Bench::new();
    let last = ring::COUNT - 1;
    let setup = Setup {
        number: last,
        first: 7,
        poll_limit: 5,
        control: control::REPORT_MEMORY | control::ERROR_INTERRUPT | (2 << control::VECTOR_SHIFT),
        ..Setup::default()
    };
    assert_eq!(bench.get(last, ring_reg::POLL_LIMIT), ring::DEFAULT_POLL_LIMIT);
    // A doorbell of a disabled ring has no effect.
    bench.set(last, ring_reg::TAIL, 3);
    assert_eq!(bench.get(last, ring_reg::TAIL), 0);
    assert_eq!(bench.counter(Counter::RegisterBad), 0);
    let ring = setup.start(&mut bench);
    for _ in 0..2 {
        assert_eq!(bench.get(last, ring_reg::ENTRIES), 16);
        assert_eq!(bench.get(last, ring_reg::POLL_LIMIT), 5);
        assert_eq!(bench.get(last, ring_reg::CONTROL), setup.control | control::ENABLE);
        assert_eq!(
            (bench.get(last, ring_reg::HEAD), bench.get(last, ring_reg::TAIL)),
            (7, 7)
        );
        for (register, value) in [(ring_reg::BASE, BASE), (ring_reg::REPORT, REPORT)] {
            let read = bench.client().read64(0, ring::register(last, register)).unwrap();
            assert_eq!(read, value);
        }
        for register in [
            ring_reg::BASE,
            ring_reg::ENTRIES,
            ring_reg::POLL_LIMIT,
            ring_reg::REPORT,
            ring_reg::HEAD,
        ] {
            bench.set(last, register, 1);
        }
        // Enabling a ring that runs changes nothing.
        bench.set(last, ring_reg::CONTROL, control::ENABLE);
    }
    assert_eq!(bench.counter(Counter::RegisterBad), 10);
    for register in [ring_reg::STATE, ring_reg::STATUS, ring_reg::TAIL + 4, ring::STRIDE - 4] {
        bench.set(last, register, 1);
    }
    bench.get(ring::COUNT, ring_reg::BASE);
    assert_eq!(bench.counter(Counter::RegisterBad), 15);
    ring.disable(&mut bench);
    bench.set(last, ring_reg::ENTRIES, 1);
    assert_eq!(bench.get(last, ring_reg::ENTRIES), 1);
    assert_eq!(bench.counter(Counter::RegisterBad), 15);
}

#[test]
fn entries_run_in_order_around_the_ring_and_past_the_last_index() {
    let mut bench = Bench::new();
    let first = u32::MAX - 5;
    let mut ring = Setup {
        entries: 4,
        first,
        ..Setup::default()
    }
    .start(&mut bench);
    for lap in 0..4_u64 {
        let entries: Vec<Entry> = (0..4)
            .map(|i| {
                let value = lap * 4 + i;
                Entry::store64(Place::Memory(8 * value), 1000 + value).with_result(WORD + 16 * value)
            })
            .collect();
        ring.run(&mut bench, &entries);
    }
    for value in 0..16_u32 {
        let at = u64::from(value);
        assert_eq!(bench.memory64(8 * at), 1000 + at);
        let index = first.wrapping_add(value);
        let result = u64::from(index) | ((Status::Ok as u64) << 32);
        assert_eq!(
            (bench.memory64(WORD + 16 * at), bench.memory64(WORD + 16 * at + 8)),
            (result, 0)
        );
    }
    ring.disable(&mut bench);
    // After the ring is disabled, the last report is there.
    let head = first.wrapping_add(16);
    assert_eq!(bench.report(REPORT), Progress { head, stopped: None });
    assert_eq!(bench.counter(Counter::RingEntries), 16);
    assert_eq!(bench.counter(Counter::Stores), 16);
    assert_eq!(bench.counter(Counter::ControlRead), 16 * 64);
    // Stores, results, reports.
    assert_eq!(bench.counter(Counter::ControlWritten), 16 * (8 + 16 + 8));
    assert_eq!(bench.counter(Counter::CommandsOk), 0);
}

#[test]
fn every_operation_runs_from_a_ring() {
    let mut bench = Bench::new();
    let ram = bench.guest_memory();
    let mut ring = Setup {
        entries: 64,
        ..Setup::default()
    }
    .start(&mut bench);
    let at = 64 << 10;
    // One vector of 64 points: the transform of an impulse is 1 everywhere.
    let (impulse, sum, largest, halves) = (32 << 10, 40 << 10, 48 << 10, 56 << 10);
    ring.run(
        &mut bench,
        &[
            Entry::new(Op::Nop, 0, 0, 0),
            Entry::new(Op::Pattern, at, 4096, 3),
            Entry::new(Op::Crc32c, at, 4096, 0).with_result(0),
            Entry::copy(at + 4096, at, 4096),
            Entry::dma_out(at, 8192, 4096).with_result(16),
            Entry::dma_in(8192, at + 8192, 4096),
            Entry::store32(Place::Memory(impulse), 1_f32.to_bits()),
            Entry::fft(impulse, 512, 64),
            Entry::new(Op::Fill, sum, 512, 0x4000_0000_4000_0000),
            Entry::add_f32(sum, impulse, 512),
            Entry::new(Op::Fill, largest, 512, 0x3fc0_0000_3fc0_0000),
            Entry::max_f32(largest, impulse, 512),
            // 1.5 and 0, 2 and 0.
            Entry::new(Op::Fill, halves, 512, 0x3fc0_0000_3fc0_0000),
            Entry::new(Op::Fill, halves + 512, 512, 0x4000_0000_4000_0000),
            Entry::add_bf16(halves, halves + 512, 512),
            Entry::max_bf16(halves + 512, halves, 512),
            Entry::inverse_fft(impulse, 512, 64),
            Entry::timestamp(32, 0xfeed),
            Entry::fence(),
            Entry::timestamp(48, 0xbeef).with_result(64),
        ],
    );
    let pattern: Vec<u8> = (0..512).flat_map(|i| pattern_word(3, i).to_le_bytes()).collect();
    let mut there = vec![0; 4096];
    ram.read(8192, &mut there).unwrap();
    for copy in [bench.memory(at + 4096, 4096), there, bench.memory(at + 8192, 4096)] {
        assert!(copy == pattern);
    }
    assert_eq!(bench.memory64(8), u64::from(crc32c::crc32c(&pattern)));
    assert_eq!(bench.memory64(24), 4096);
    let floats = |at: u64| -> Vec<f32> {
        let bytes = bench.memory(at, 512);
        let words = bytes.chunks_exact(4);
        words.map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let close = |a: f32, b: f32| (a - b).abs() < 1e-5;
    assert!(
        floats(sum)
            .chunks_exact(2)
            .all(|pair| close(pair[0], 3.0) && close(pair[1], 2.0))
    );
    assert!(
        floats(largest)
            .chunks_exact(2)
            .all(|pair| close(pair[0], 1.5) && close(pair[1], 1.5))
    );
    // 3.5 and 0.
    let expected: Vec<u8> = 0x4060_0000_u32.to_le_bytes().repeat(256);
    assert!(bench.memory(halves, 1024) == expected);
    let back = floats(impulse);
    assert!(close(back[0], 1.0) && back[1..].iter().all(|part| close(*part, 0.0)));
    assert_eq!((bench.memory64(40), bench.memory64(56)), (0xfeed, 0xbeef));
    assert!(bench.memory64(48) >= bench.memory64(32));
    assert_eq!(bench.memory64(72), bench.memory64(48));
    for (counter, value) in [
        (Counter::RingEntries, 20),
        (Counter::HostWritten, 4096),
        (Counter::HostRead, 4096),
        (Counter::EngineRead, 4096),
        (Counter::EngineWritten, 4096),
    ] {
        assert_eq!(bench.counter(counter), value, "{counter:?}");
    }
}

#[test]
fn stores_are_single_accesses_in_order() {
    let mut bench = Bench::new();
    let ram = bench.guest_memory();
    let (_, writes) = bench.serve_messages();
    let mut ring = Setup::default().start(&mut bench);
    ring.run(
        &mut bench,
        &[
            Entry::store32(Place::Bus(MESSAGES + 4), 0x0403_0201),
            Entry::fence(),
            Entry::store64(Place::Bus(MESSAGES + 0x800), 0x0807_0605_0403_0201),
            Entry::store32(Place::Bus(HOST + 12), 0x1122_3344),
            Entry::store64(Place::Bus(HOST + 16), u64::MAX),
            Entry::store32(Place::Memory(WORD + 4), 5),
        ],
    );
    let expected = [
        (MESSAGES + 4, vec![1, 2, 3, 4]),
        (MESSAGES + 0x800, vec![1, 2, 3, 4, 5, 6, 7, 8]),
    ];
    assert_eq!(*writes.lock().unwrap(), expected);
    let mut there = [0; 16];
    ram.read(8, &mut there).unwrap();
    assert_eq!(there[..8], [0, 0, 0, 0, 0x44, 0x33, 0x22, 0x11]);
    assert_eq!(there[8..], [0xff; 8]);
    assert_eq!(bench.memory64(WORD), 5 << 32);
    for (counter, value) in [
        (Counter::Stores, 5),
        (Counter::MessageWritten, 12),
        (Counter::HostWritten, 12),
        (Counter::EngineRead, 0),
    ] {
        assert_eq!(bench.counter(counter), value, "{counter:?}");
    }
}

#[test]
fn blocks_are_copied_between_all_kinds_of_places() {
    let mut bench = Bench::new();
    let ram = bench.guest_memory();
    let (there, _) = bench.serve_messages();
    let mut ring = Setup::default().start(&mut bench);
    let len = BLOCK_MAX;
    let half = len / 2;
    ring.run(
        &mut bench,
        &[
            Entry::new(Op::Pattern, 0, len, 1),
            Entry::copy_block(Place::Memory(0), Place::Bus(MESSAGES), len).with_result(WORD),
            Entry::copy_block(Place::Bus(MESSAGES), Place::Bus(HOST + 64), len),
            Entry::copy_block(Place::Bus(HOST + 64), Place::Memory(len), len),
            // The ranges overlap.
            Entry::copy_block(Place::Memory(len), Place::Memory(len + half), len),
        ],
    );
    let pattern: Vec<u8> = (0..len / 8).flat_map(|i| pattern_word(1, i).to_le_bytes()).collect();
    assert!(there.lock().unwrap()[..len as usize] == pattern);
    let mut host = vec![0; len as usize];
    ram.read(64, &mut host).unwrap();
    assert!(host == pattern);
    assert!(bench.memory(len + half, len as usize) == pattern);
    assert_eq!(bench.memory64(WORD + 8), len);
    for (counter, value) in [
        (Counter::EngineRead, 2 * len),
        (Counter::EngineWritten, 2 * len),
        (Counter::MessageWritten, len),
        (Counter::MessageRead, len),
        (Counter::HostWritten, len),
        (Counter::HostRead, len),
    ] {
        assert_eq!(bench.counter(counter), value, "{counter:?}");
    }
}

#[test]
fn rings_wait_for_each_other() {
    const ROUNDS: u32 = 200;
    let mut bench = Bench::new();
    let setup = |number| Setup {
        entries: 1024,
        ..Setup::number(number)
    };
    let (mut ping, mut pong) = (setup(0).start(&mut bench), setup(1).start(&mut bench));
    let (a, b) = (Place::Memory(WORD), Place::Memory(WORD + 4));
    for round in 1..=ROUNDS {
        ping.push(&bench, Entry::store32(a, round));
        ping.push(&bench, Entry::poll_geq(b, round));
        pong.push(&bench, Entry::poll_geq(a, round));
        pong.push(&bench, Entry::store32(b, round));
    }
    ping.doorbell(&mut bench);
    pong.doorbell(&mut bench);
    ping.wait(&mut bench);
    pong.wait(&mut bench);
    assert_eq!(bench.memory64(WORD), u64::from(ROUNDS) | (u64::from(ROUNDS) << 32));
    assert_eq!(bench.counter(Counter::Polls), 2 * u64::from(ROUNDS));
    // A command that registers submit can end a poll too.
    let retries = bench.counter(Counter::PollRetries);
    ping.submit(
        &mut bench,
        &[Entry::poll_nor(a, !ROUNDS), Entry::poll_and(b, 0x8000_0000)],
    );
    bench.wait_counter(Counter::PollRetries, retries + 1);
    bench.ok(Op::Fill, WORD, 8, u64::MAX << 32);
    ping.wait(&mut bench);
}

#[test]
fn all_rings_and_the_command_queue_run_concurrently() {
    let mut bench = Bench::new();
    let area = |number: u32| u64::from(number) << 14;
    // Each ring waits for the ring with the next number, and the last one for a command: they can only complete in
    // reverse order, all in progress at once.
    let rings: Vec<Ring> = (0..ring::COUNT)
        .map(|number| {
            let mut ring = Setup::number(number).start(&mut bench);
            let next = Place::Memory(WORD + 4 * u64::from(number + 1));
            ring.submit(
                &mut bench,
                &[
                    Entry::new(Op::Pattern, area(number), 1 << 14, number.into()),
                    Entry::poll_and(next, 1),
                    Entry::new(Op::Crc32c, area(number), 1 << 14, 0).with_result(WORD + 256 + 16 * u64::from(number)),
                    Entry::store32(Place::Memory(WORD + 4 * u64::from(number)), 1),
                ],
            );
            ring
        })
        .collect();
    bench.wait_counter(Counter::RingEntries, ring::COUNT.into());
    assert_eq!(bench.counter(Counter::Polls), 0);
    bench.ok(Op::Fill, WORD + 4 * u64::from(ring::COUNT), 4, 1);
    for ring in &rings {
        ring.wait(&mut bench);
        let at = area(ring.number);
        let crc = bench.memory64(WORD + 256 + 16 * u64::from(ring.number) + 8);
        assert_eq!(crc, u64::from(crc32c::crc32c(&bench.memory(at, 1 << 14))));
    }
}

#[test]
fn poll_ends_by_dma_of_a_peer() {
    let peers = Peers::new();
    let serve = |name: &str| {
        let settings = Settings {
            memory: SIZE,
            ..Settings::default()
        };
        Bench::serve(Accel::among(settings, name, &peers).unwrap())
    };
    let (mut first, mut second) = (serve("first"), serve("second"));
    for (bench, address) in [(&mut first, MESSAGES), (&mut second, MESSAGES + SIZE)] {
        let client = bench.client();
        client
            .write(CONFIG_REGION, 0x18, &(address as u32).to_le_bytes())
            .unwrap();
        client.write(CONFIG_REGION, 0x1c, &[0; 4]).unwrap();
        bench.enable_dma();
        bench.client().dma_map(MESSAGES, 1 << 30, None).unwrap();
    }
    // The first ring polls its own memory, the second the memory of its peer.
    let mut own = Setup::number(0).start(&mut first);
    own.submit(&mut first, &[Entry::poll_geq(Place::Memory(WORD), 5)]);
    let mut remote = Setup::number(0).start(&mut second);
    let word = Place::Bus(MESSAGES + WORD);
    remote.submit(&mut second, &[Entry::poll_geq(word, 5), Entry::poll_geq(word, 6)]);
    first.wait_counter(Counter::PollRetries, 1);
    second.wait_counter(Counter::PollRetries, 1);
    let mut writer = Setup::number(1).start(&mut second);
    writer.run(&mut second, &[Entry::store32(word, 5)]);
    own.wait(&mut first);
    first.ok(Op::Fill, WORD, 8, 6);
    remote.wait(&mut second);
    assert!(second.counter(Counter::PollPeerRead) >= 12);
    assert_eq!(second.counter(Counter::PeerRead), 0);
    assert_eq!(second.counter(Counter::PeerWritten), 4);
    let moved = second.shared.moved();
    assert_eq!((moved["first"].read, moved["first"].written), (0, 4));
    second.shared.reset_counters();
    assert_eq!(second.counter(Counter::PollPeerRead), 0);
}

#[test]
fn polls_of_bus_addresses_are_counted_apart() {
    let mut bench = Bench::new();
    let ram = bench.guest_memory();
    let (there, _) = bench.serve_messages();
    let mut ring = Setup::default().start(&mut bench);
    let host = Place::Bus(HOST + 4);
    ring.submit(
        &mut bench,
        &[
            Entry::poll_and(host, 2).with_result(WORD),
            Entry::poll_nor(Place::Bus(MESSAGES), !1),
        ],
    );
    bench.wait_counter(Counter::PollRetries, 2);
    there.lock().unwrap()[0] = 1;
    ram.write(4, &[3, 0, 0, 1]).unwrap();
    // The first poll is true now. The second poll waits until bit 0 is 0.
    bench.wait_counter(Counter::PollMessageRead, 8);
    assert_eq!(bench.memory64(WORD + 8), 0x0100_0003);
    there.lock().unwrap()[0] = 0;
    ring.wait(&mut bench);
    assert!(bench.counter(Counter::PollHostRead) >= 12);
    for counter in [Counter::HostRead, Counter::MessageRead, Counter::EngineWritten] {
        assert_eq!(bench.counter(counter), 0, "{counter:?}");
    }
    assert_eq!(bench.counter(Counter::Polls), 2);
    // Ends at an address without memory.
    ring.submit(&mut bench, &[Entry::poll_and(Place::Bus(MESSAGES - 4), 1)]);
    assert_eq!(bench.wait_error(0), (2, Status::Unreachable));
}

/// "Wait for the CQE, transform what arrived, and post the answer" as entries, with a NIC that is played by the test.
#[test]
fn device_drives_a_nic() {
    const CQE: u64 = WORD;
    const RECORD: u64 = WORD + 64;
    const UAR: u64 = MESSAGES + 0x800;
    const DATA: u64 = 64 << 10;
    // In the byte order of memory: opcode in the upper half of byte 63, owner bit in bit 0.
    const OPCODE: u32 = 0xf0 << 24;
    const OWNER: u32 = 1 << 24;
    let mut bench = Bench::new();
    bench.enable_dma();
    let (_, writes) = bench.serve_messages();
    let cqe = |bench: &Bench, op_own| bench.shared.memory().write(CQE + 63, &[op_own]).unwrap();
    bench.shared.memory().write(CQE, &[0xff; 64]).unwrap();
    let mut ring = Setup::default().start(&mut bench);
    for lap in 0..3_u32 {
        let retries = bench.counter(Counter::PollRetries);
        let samples = vec![0x3f; 4096];
        bench.shared.memory().write(DATA, &samples).unwrap();
        let word = Place::Memory(CQE + 60);
        let owner = if lap % 2 == 0 {
            Entry::poll_nor(word, !OWNER)
        } else {
            Entry::poll_and(word, OWNER)
        };
        ring.submit(
            &mut bench,
            &[
                owner,
                Entry::poll_nor(word, !OPCODE),
                Entry::fft(DATA, 4096, 512),
                Entry::store32(Place::Memory(RECORD + 4), (lap + 1).swap_bytes()),
                Entry::fence(),
                Entry::store64(Place::Bus(UAR), u64::from(lap)),
            ],
        );
        bench.wait_counter(Counter::PollRetries, retries + 1);
        assert_eq!(bench.memory(DATA, 4096), samples, "the transform waits for the CQE");
        assert_eq!(writes.lock().unwrap().len(), lap as usize);
        // Opcode 2: a message arrived.
        cqe(&bench, 0x20 | (lap % 2) as u8);
        ring.wait(&mut bench);
        assert_ne!(bench.memory(DATA, 4096), samples);
        assert_eq!(bench.memory(RECORD + 4, 4), (lap + 1).to_be_bytes());
        let last = writes.lock().unwrap().last().cloned();
        assert_eq!(last, Some((UAR, u64::from(lap).to_le_bytes().to_vec())));
    }
}

#[test]
fn poll_that_never_becomes_true_times_out() {
    let mut bench = Bench::new();
    let once = Setup {
        poll_limit: 0,
        ..Setup::number(2)
    };
    let mut ring = once.start(&mut bench);
    let mut other = Setup::number(3).start(&mut bench);
    let bad = Entry::poll_and(Place::Memory(WORD), 1).with_result(0);
    ring.submit(
        &mut bench,
        &[Entry::fence(), bad, Entry::store32(Place::Memory(WORD + 8), 1)],
    );
    assert_eq!(bench.wait_error(2), (1, Status::TimedOut));
    assert_eq!(bench.memory64(0), 1 | ((Status::TimedOut as u64) << 32));
    let failed = Progress {
        head: 1,
        stopped: Some(Status::TimedOut),
    };
    assert_eq!(bench.report(once.report), failed);
    assert_eq!(bench.memory64(WORD + 8), 0, "no entry after the failed one runs");
    assert_eq!(
        (bench.counter(Counter::RingErrors), bench.counter(Counter::PollRetries)),
        (1, 1)
    );
    // A doorbell is ignored now, and enabling the ring again is refused until it was disabled.
    ring.doorbell(&mut bench);
    bench.set(2, ring_reg::CONTROL, control::ENABLE);
    assert_eq!(bench.ring_state(2), State::Error);
    assert_eq!(bench.counter(Counter::RegisterBad), 1);
    other.run(&mut bench, &[Entry::store32(Place::Memory(WORD), 1)]);
    ring.disable(&mut bench);
    assert_eq!((bench.get(2, ring_reg::HEAD), bench.get(2, ring_reg::STATUS)), (1, 0));
    let mut ring = Setup { poll_limit: 1, ..once }.start(&mut bench);
    ring.run(&mut bench, &[bad]);
    ring.submit(&mut bench, &[Entry::poll_and(Place::Memory(WORD), 2)]);
    assert_eq!(bench.wait_error(2), (1, Status::TimedOut));
}

/// A ring whose first entry polls for a word that is never set.
fn polling(bench: &mut Bench, number: u32) -> Ring {
    let retries = bench.counter(Counter::PollRetries);
    let mut ring = Setup::number(number).start(bench);
    let after = Entry::store32(Place::Memory(WORD + 8), 1);
    ring.submit(bench, &[Entry::poll_and(Place::Memory(WORD), 1), after]);
    bench.wait_counter(Counter::PollRetries, retries + 1);
    ring
}

#[test]
fn poll_ends_when_the_ring_is_disabled() {
    let mut bench = Bench::new();
    let ring = polling(&mut bench, 0);
    let mut other = polling(&mut bench, 1);
    ring.disable(&mut bench);
    assert_eq!((bench.get(0, ring_reg::HEAD), bench.get(0, ring_reg::STATUS)), (0, 0));
    assert_eq!(bench.ring_state(1), State::Running);
    // The condition comes too late for the disabled ring.
    bench.shared.memory().write(WORD, &[1]).unwrap();
    other.wait(&mut bench);
    assert_eq!(bench.counter(Counter::RingEntries), 2);
    assert_eq!(bench.counter(Counter::RingErrors), 0);
    let mut ring = Setup::number(0).start(&mut bench);
    ring.run(&mut bench, &[Entry::fence()]);
    other.run(&mut bench, &[Entry::fence()]);
}

#[test]
fn abort_stops_all_rings() {
    let mut bench = Bench::new();
    polling(&mut bench, 0);
    let idle = Setup::number(5).start(&mut bench);
    let abort = p2pmem_accel_regs::control::ABORT.to_le_bytes();
    bench.client().write(0, reg::CONTROL, &abort).unwrap();
    assert_eq!(bench.wait_error(0), (0, Status::Aborted));
    assert_eq!(bench.wait_error(5), (0, Status::Aborted));
    assert_eq!(bench.ring_state(1), State::Disabled);
    idle.disable(&mut bench);
    let mut idle = Setup::number(5).start(&mut bench);
    idle.run(&mut bench, &[Entry::fence()]);
    assert_eq!(bench.run(Op::Nop, 0, 0, 0).0, Status::Ok);
}

#[test]
fn poll_of_the_command_queue_times_out() {
    let mut bench = Bench::new();
    assert_eq!(bench.run(Op::PollAnd, WORD, 0, 1).0, Status::TimedOut);
    assert_eq!(bench.run(Op::PollGeq, WORD, 0, 0), (Status::Ok, 0));
    assert_eq!(
        bench.run_flags(Op::Store32, flags::BUS, MESSAGES, 0, 1).0,
        Status::BusMasterOff
    );
}

#[test]
fn reset_ends_rings_and_clears_their_registers() {
    let mut bench = Bench::new();
    bench.guest_memory();
    polling(&mut bench, 0);
    let mut bus = Setup::number(1).start(&mut bench);
    bus.submit(&mut bench, &[Entry::poll_and(Place::Bus(HOST), 1)]);
    bench.wait_counter(Counter::PollHostRead, 4);
    bench.client().reset().unwrap();
    for number in 0..2 {
        assert_eq!(bench.ring_state(number), State::Disabled);
        for register in [
            ring_reg::BASE,
            ring_reg::ENTRIES,
            ring_reg::REPORT,
            ring_reg::CONTROL,
            ring_reg::TAIL,
        ] {
            assert_eq!(bench.get(number, register), 0);
        }
        assert_eq!(bench.get(number, ring_reg::POLL_LIMIT), ring::DEFAULT_POLL_LIMIT);
    }
    bench.shared.memory().write(WORD, &[1]).unwrap();
    let mut ring = Setup::number(0).start(&mut bench);
    ring.run(&mut bench, &[Entry::poll_and(Place::Memory(WORD), 1)]);
    assert_eq!(bench.memory64(WORD + 8), 0, "no entry runs after the reset");
}

#[test]
fn disconnect_ends_rings() {
    let mut bench = Bench::new();
    bench.guest_memory();
    polling(&mut bench, 0);
    let mut bus = Setup::number(1).start(&mut bench);
    bus.submit(&mut bench, &[Entry::poll_and(Place::Bus(HOST), 1)]);
    let shared = Arc::clone(&bench.shared);
    // Waits for the serving thread.
    drop(bench);
    assert!(shared.state().rings.iter().all(|ring| ring.state == "disabled"));
}

#[test]
fn bus_master_off_stops_rings_at_their_next_access() {
    let mut bench = Bench::new();
    bench.guest_memory();
    let mut bus = Setup::number(0).start(&mut bench);
    bus.submit(&mut bench, &[Entry::poll_and(Place::Bus(HOST), 1)]);
    polling(&mut bench, 1);
    bench.wait_counter(Counter::PollHostRead, 4);
    bench.client().write(CONFIG_REGION, 4, &[2, 0]).unwrap();
    assert_eq!(bench.wait_error(0), (0, Status::BusMasterOff));
    let stopped = Some(Status::BusMasterOff);
    assert_eq!(bench.report(REPORT), Progress { head: 0, stopped });
    // A ring that uses only the device's own memory goes on.
    assert_eq!(bench.ring_state(1), State::Running);
    for (number, entry) in [
        (2, Entry::store64(Place::Bus(HOST), 1)),
        (3, Entry::dma_in(HOST, 0, 64)),
        (4, Entry::copy_block(Place::Memory(0), Place::Bus(HOST), 8)),
        (5, Entry::copy_block(Place::Bus(HOST), Place::Memory(0), 8)),
    ] {
        let mut ring = Setup::number(number).start(&mut bench);
        ring.submit(&mut bench, &[Entry::fence(), entry]);
        assert_eq!(bench.wait_error(number), (1, Status::BusMasterOff), "{entry:?}");
    }
    assert_eq!(bench.counter(Counter::HostWritten), 0);
}

/// Reads a register and does not reply to DMA messages of the device. Returns the value and the number of messages.
fn read_without_dma_replies(bench: &mut Bench, offset: u64) -> (u32, u32) {
    use std::io::Read;
    bench
        .client()
        .send(command::REGION_READ, 0, &[&access(offset, 4)], &[])
        .unwrap();
    let mut stream = bench.client().stream();
    let mut messages = 0;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        let size = u32::from_le_bytes(header[4..8].try_into().unwrap()) as usize;
        let mut body = vec![0; size - header.len()];
        stream.read_exact(&mut body).unwrap();
        if header[2..4] == command::REGION_READ.to_le_bytes() {
            return (u32::from_le_bytes(body[16..20].try_into().unwrap()), messages);
        }
        assert_eq!(header[2..4], command::DMA_WRITE.to_le_bytes());
        messages += 1;
    }
}

#[test]
fn no_dma_follows_the_end_of_a_ring_that_is_disabled_in_a_copy() {
    let mut bench = Bench::new();
    bench.enable_dma();
    let mut ring = Setup::default().start(&mut bench);
    // The transfer takes several messages, and the client replies to none.
    let copy = Entry::dma_out(0, MESSAGES, 1 << 20);
    ring.push(&bench, copy);
    ring.push(&bench, copy);
    let send = |bench: &mut Bench, register: u64, value: u32| {
        let head = access(ring::register(0, register), 4);
        let data = value.to_le_bytes();
        bench
            .client()
            .send(command::REGION_WRITE, 0x10, &[&head, &data], &[])
            .unwrap();
    };
    send(&mut bench, ring_reg::TAIL, ring.tail);
    let state = ring::register(0, ring_reg::STATE);
    let mut messages = 0;
    while messages == 0 {
        let (value, more) = read_without_dma_replies(&mut bench, state);
        assert_eq!(value, State::Running as u32);
        messages += more;
    }
    send(&mut bench, ring_reg::CONTROL, 0);
    loop {
        let (value, more) = read_without_dma_replies(&mut bench, state);
        messages += more;
        if value == State::Disabled as u32 {
            break;
        }
        assert_eq!(value, State::Stopping as u32);
    }
    assert_eq!(messages, 1, "the transfer ends in the message in progress");
    for _ in 0..20 {
        assert_eq!(read_without_dma_replies(&mut bench, state), (State::Disabled as u32, 0));
    }
    assert_eq!(bench.get(0, ring_reg::HEAD), 0);
    // DMA works again, also of a command, which the disabled ring did not abort.
    let (there, _) = bench.serve_messages();
    bench.ok(Op::Fill, 0, 8, 7);
    let mut ring = Setup::default().start(&mut bench);
    ring.run(&mut bench, &[Entry::dma_out(0, MESSAGES, 8)]);
    assert_eq!(there.lock().unwrap()[0], 7);
}

/// An entry with one byte changed.
fn changed(entry: Entry, at: usize, value: u8) -> [u8; 64] {
    let mut bytes = entry.encode();
    bytes[at] = value;
    bytes
}

#[test]
fn invalid_entries_stop_the_ring_with_index_and_status() {
    let mut bench = Bench::new();
    bench.enable_dma();
    let memory = Place::Memory;
    let word = memory(WORD);
    let bus = Place::Bus(MESSAGES);
    let good = Entry::fence();
    let vector = good.with_interrupt(MSIX_VECTORS as u8);
    let high = |op: Op| Entry::new(op, WORD, 0, 1 << 32).encode();
    let cases = [
        ([0; 64], Status::BadOperation),
        ([0xff; 64], Status::BadOperation),
        (changed(good, entry::OP, 99), Status::BadOperation),
        (changed(good, entry::FLAGS, flags::BUS as u8), Status::BadOperation),
        (changed(good, entry::FLAGS + 2, 1), Status::BadOperation),
        (changed(good, entry::RESERVED, 1), Status::BadArgument),
        (changed(good, entry::RESULT, 8), Status::BadArgument),
        (vector.encode(), Status::BadArgument),
        (good.with_result(4).encode(), Status::BadAlignment),
        (good.with_result(SIZE - 8).encode(), Status::BadRange),
        (good.with_result(u64::MAX - 7).encode(), Status::BadRange),
        (Entry::store32(memory(WORD + 2), 1).encode(), Status::BadAlignment),
        (Entry::store64(memory(WORD + 4), 1).encode(), Status::BadAlignment),
        (
            Entry::store64(Place::Bus(MESSAGES + 4), 1).encode(),
            Status::BadAlignment,
        ),
        (Entry::store32(memory(SIZE), 1).encode(), Status::BadRange),
        (Entry::store64(memory(u64::MAX - 7), 1).encode(), Status::BadRange),
        (high(Op::Store32), Status::BadArgument),
        (high(Op::PollAnd), Status::BadArgument),
        (Entry::store32(bus, 1).encode(), Status::Unreachable),
        (Entry::poll_and(memory(WORD + 1), 1).encode(), Status::BadAlignment),
        (Entry::poll_nor(memory(SIZE), 1).encode(), Status::BadRange),
        (Entry::poll_geq(Place::Bus(2), 1).encode(), Status::BadAlignment),
        (Entry::poll_geq(bus, 1).encode(), Status::Unreachable),
        (Entry::copy_block(word, bus, 0).encode(), Status::BadLength),
        (Entry::copy_block(word, bus, BLOCK_MAX + 1).encode(), Status::BadLength),
        (Entry::copy_block(memory(SIZE - 4), bus, 8).encode(), Status::BadRange),
        (Entry::copy_block(bus, memory(SIZE), 8).encode(), Status::BadRange),
        (
            Entry::copy_block(Place::Bus(u64::MAX), word, 8).encode(),
            Status::BadArgument,
        ),
        (
            Entry::copy_block(word, Place::Bus(u64::MAX), 8).encode(),
            Status::BadArgument,
        ),
        (Entry::copy_block(bus, word, 8).encode(), Status::Unreachable),
        (Entry::copy_block(word, bus, 8).encode(), Status::Unreachable),
        (Entry::timestamp(4, 0).encode(), Status::BadAlignment),
        (Entry::timestamp(SIZE - 8, 0).encode(), Status::BadRange),
        (Entry::new(Op::Fill, 0, 0, 0).encode(), Status::BadLength),
        (Entry::add_f32(0, 32, 64).encode(), Status::BadArgument),
        (Entry::add_bf16(0, 127, 64).encode(), Status::BadAlignment),
        (Entry::max_f32(0, 128, 62).encode(), Status::BadLength),
        (Entry::max_bf16(0, SIZE - 32, 64).encode(), Status::BadRange),
        (Entry::fft(0, 64, 3).encode(), Status::BadArgument),
        (Entry::dma_in(MESSAGES, 0, 8).encode(), Status::Unreachable),
    ];
    for (bytes, status) in cases {
        let mut ring = Setup::default().start(&mut bench);
        ring.push(&bench, good);
        ring.push_bytes(&bench, &bytes);
        ring.push(&bench, Entry::store32(word, 1));
        ring.doorbell(&mut bench);
        assert_eq!(bench.wait_error(0), (1, status), "{bytes:x?}");
        let stopped = Some(status);
        assert_eq!(bench.report(REPORT), Progress { head: 1, stopped });
        ring.disable(&mut bench);
    }
    assert_eq!(bench.memory64(WORD), 0);
    assert_eq!(bench.counter(Counter::RingErrors), cases.len() as u64);
    assert_eq!(bench.counter(Counter::RingEntries), cases.len() as u64);
}

#[test]
fn invalid_settings_stop_the_ring_when_it_is_enabled() {
    let mut bench = Bench::new();
    let good = Setup::default();
    let to_bus = control::REPORT_BUS;
    let cases = [
        Setup { entries: 0, ..good },
        Setup { entries: 3, ..good },
        Setup {
            base: 0,
            entries: 2 * ring::MAX_ENTRIES,
            ..good
        },
        Setup {
            entries: 1 << 31,
            ..good
        },
        Setup { base: 32, ..good },
        Setup { base: SIZE, ..good },
        Setup {
            base: SIZE - 64,
            ..good
        },
        Setup { base: !63, ..good },
        Setup {
            control: 1 << 30,
            ..good
        },
        Setup {
            control: good.control | to_bus,
            ..good
        },
        Setup { report: SIZE, ..good },
        Setup {
            report: u64::MAX - 7,
            ..good
        },
        Setup {
            report: REPORT + 4,
            ..good
        },
        Setup {
            control: to_bus,
            report: 4,
            ..good
        },
        // The report would overwrite an entry.
        Setup { report: BASE, ..good },
        Setup {
            report: BASE + 16 * 64 - 8,
            ..good
        },
        Setup {
            control: control::ERROR_INTERRUPT | (u32::from(MSIX_VECTORS) << control::VECTOR_SHIFT),
            ..good
        },
    ];
    for (case, setup) in cases.into_iter().enumerate() {
        assert_eq!(setup.write(&mut bench), State::Error, "case {case}");
        assert_eq!(bench.wait_error(0), (0, Status::BadRing));
        bench.set(0, ring_reg::TAIL, 1);
        bench.set(0, ring_reg::CONTROL, 0);
        assert_eq!(bench.ring_state(0), State::Disabled);
    }
    for setup in [
        good,
        Setup { entries: 1, ..good },
        Setup {
            base: 0,
            entries: ring::MAX_ENTRIES >> 1,
            control: 0,
            report: 3,
            ..good
        },
        Setup {
            report: BASE - 8,
            ..good
        },
        Setup {
            report: BASE + 16 * 64,
            ..good
        },
    ] {
        let mut ring = setup.start(&mut bench);
        ring.run(&mut bench, &[Entry::fence()]);
        ring.disable(&mut bench);
    }
}

#[test]
fn producer_index_beyond_the_ring_stops_it() {
    let mut bench = Bench::new();
    let setup = Setup {
        first: u32::MAX - 1,
        entries: 4,
        ..Setup::default()
    };
    for bad in [3, u32::MAX - 2, 1 << 31] {
        setup.start(&mut bench);
        bench.set(0, ring_reg::TAIL, bad);
        assert_eq!(bench.wait_error(0), (u32::MAX - 1, Status::BadRing), "{bad:#x}");
        let stopped = Some(Status::BadRing);
        assert_eq!(
            bench.report(REPORT),
            Progress {
                head: u32::MAX - 1,
                stopped
            }
        );
        bench.set(0, ring_reg::CONTROL, 0);
        bench.wait_state(0, State::Disabled);
    }
    let mut ring = setup.start(&mut bench);
    ring.run(&mut bench, &[Entry::fence(); 4]);
    assert_eq!(ring.tail, 2);
}

#[test]
fn interrupts_follow_entries_that_ask_and_errors() {
    let mut bench = Bench::new();
    let fds: Vec<OwnedFd> = bench.vectors();
    let fired = |fd: &OwnedFd| rustix::io::read(fd, &mut [0; 8]).is_ok();
    let setup = Setup {
        control: control::REPORT_MEMORY | control::ERROR_INTERRUPT | (1 << control::VECTOR_SHIFT),
        poll_limit: 0,
        ..Setup::default()
    };
    let wanted = Entry::fence().with_interrupt(0);
    let mut ring = setup.start(&mut bench);
    // Interrupts are disabled.
    ring.run(&mut bench, &[wanted]);
    let enable = p2pmem_accel_regs::control::INTERRUPTS.to_le_bytes();
    ring.disable(&mut bench);
    bench.client().write(0, reg::CONTROL, &enable).unwrap();
    let mut ring = setup.start(&mut bench);
    ring.run(&mut bench, &[Entry::fence(), wanted, Entry::fence()]);
    assert_eq!(interrupts(&fds[0]), 1);
    // The report is written before the interrupt.
    ring.submit(&mut bench, &[wanted]);
    assert_eq!(interrupts(&fds[0]), 1);
    assert_eq!(bench.report(REPORT).head, 4);
    assert!(!fired(&fds[1]));
    // An entry that fails raises its own interrupt and that of the ring.
    ring.submit(&mut bench, &[Entry::poll_and(Place::Memory(WORD), 1).with_interrupt(0)]);
    assert_eq!((interrupts(&fds[0]), interrupts(&fds[1])), (1, 1));
    assert_eq!(bench.report(REPORT).stopped, Some(Status::TimedOut));
    assert_eq!(bench.wait_error(0), (4, Status::TimedOut));
    assert_eq!(bench.counter(Counter::Interrupts), 4);
}

#[test]
fn reports_reach_guest_memory() {
    let mut bench = Bench::new();
    let ram = bench.guest_memory();
    let setup = Setup {
        control: control::REPORT_BUS,
        report: HOST + 8,
        poll_limit: 0,
        ..Setup::default()
    };
    let report = |ram: &Memory| {
        let mut bytes = [0; 8];
        ram.read(8, &mut bytes).unwrap();
        Progress::from_u64(u64::from_le_bytes(bytes)).unwrap()
    };
    let mut ring = setup.start(&mut bench);
    ring.submit(
        &mut bench,
        &[Entry::fence(), Entry::fence(), Entry::poll_and(Place::Memory(WORD), 1)],
    );
    assert_eq!(bench.wait_error(0), (2, Status::TimedOut));
    let stopped = Some(Status::TimedOut);
    assert_eq!(report(&ram), Progress { head: 2, stopped });
    assert_eq!(bench.counter(Counter::HostWritten), 24);
    ring.disable(&mut bench);
    // A report that cannot be written stops the ring, after the entry has completed.
    bench.client().write(CONFIG_REGION, 4, &[2, 0]).unwrap();
    let mut ring = setup.start(&mut bench);
    ring.submit(&mut bench, &[Entry::store32(Place::Memory(WORD), 9), Entry::fence()]);
    assert_eq!(bench.wait_error(0), (1, Status::BusMasterOff));
    assert_eq!(bench.memory64(WORD), 9);
}

#[test]
fn guest_that_changes_entries_of_a_running_ring_breaks_nothing() {
    let mut bench = Bench::new();
    let end = Arc::new(AtomicBool::new(false));
    let guest = std::thread::spawn({
        let (end, shared) = (Arc::clone(&end), Arc::clone(&bench.shared));
        move || {
            let entries = [
                Entry::fence().encode(),
                Entry::store64(Place::Memory(BASE + 128), u64::MAX).encode(),
                changed(Entry::fence(), entry::OP, 200),
                [0xff; 64],
            ];
            let mut n = 0_usize;
            while !end.load(Ordering::SeqCst) {
                let at = BASE + 64 * (n as u64 % 4);
                shared.memory().write(at, &entries[n / 3 % 4]).unwrap();
                n += 1;
            }
        }
    });
    for _ in 0..100 {
        Setup {
            entries: 4,
            poll_limit: 0,
            ..Setup::default()
        }
        .start(&mut bench);
        bench.set(0, ring_reg::TAIL, 4);
        let state = ring::register(0, ring_reg::STATE);
        let head = ring::register(0, ring_reg::HEAD);
        while bench.client().read32(0, head).unwrap() != 4
            && bench.client().read32(0, state).unwrap() == State::Running as u32
        {}
        bench.set(0, ring_reg::CONTROL, 0);
        bench.wait_state(0, State::Disabled);
    }
    end.store(true, Ordering::SeqCst);
    guest.join().unwrap();
    let mut ring = Setup::default().start(&mut bench);
    ring.run(&mut bench, &[Entry::fence()]);
}

proptest! {
    #![proptest_config(config(30))]

    /// Entries of arbitrary fields end, each with success or by stopping the ring, and the device keeps working.
    #[test]
    fn arbitrary_entries_end(
        entries in proptest::collection::vec(
            (
                0_u32..23,
                prop_oneof![3 => Just(0_u32), 1 => 0_u32..64, 1 => any::<u32>()],
                prop_oneof![0..2 * SIZE, any::<u64>()],
                prop_oneof![0_u64..70_000, any::<u64>()],
                prop_oneof![0..2 * SIZE, 0_u64..70, any::<u64>()],
                prop_oneof![8 => Just(0_u64), 1 => any::<u64>()],
            ),
            1..9,
        ),
    ) {
        let mut bench = Bench::new();
        bench.enable_dma();
        let mut ring = Setup { poll_limit: 0, ..Setup::default() }.start(&mut bench);
        for (op, flags, offset, length, argument, result) in entries {
            let mut bytes = [0; 64];
            bytes[entry::OP..][..4].copy_from_slice(&op.to_le_bytes());
            bytes[entry::FLAGS..][..4].copy_from_slice(&flags.to_le_bytes());
            for (at, value) in [
                (entry::OFFSET, offset),
                (entry::LENGTH, length),
                (entry::ARGUMENT, argument),
                (entry::RESULT, result),
            ] {
                bytes[at..][..8].copy_from_slice(&value.to_le_bytes());
            }
            ring.push_bytes(&bench, &bytes);
        }
        ring.doorbell(&mut bench);
        let register = ring::register(0, ring_reg::HEAD);
        loop {
            let word = bench.client().read64(0, register).unwrap();
            let progress = Progress::from_u64(word).unwrap();
            if progress.head == ring.tail || progress.stopped.is_some() {
                break;
            }
        }
        ring.disable(&mut bench);
        prop_assert!(bench.counter(Counter::RingEntries) <= u64::from(ring.tail));
    }

    /// Whatever the size of the ring, the first index and the size of the batches: each entry runs once, in order.
    #[test]
    fn entries_run_once_and_in_order(
        shift in 0_u32..6,
        first in prop_oneof![Just(0_u32), u32::MAX - 40..=u32::MAX, any::<u32>()],
        batches in proptest::collection::vec(1_u32..32, 1..12),
    ) {
        let mut bench = Bench::new();
        let entries = 1_u32 << shift;
        let mut ring = Setup { entries, first, ..Setup::default() }.start(&mut bench);
        let mut count = 0_u64;
        // Each entry copies the word that the entry before it wrote.
        bench.shared.memory().write(WORD, &[0x5a; 8]).unwrap();
        for batch in batches {
            for _ in 0..batch.min(entries) {
                count += 1;
                let (from, to) = (WORD + 8 * (count - 1), WORD + 8 * count);
                let entry = Entry::copy_block(Place::Memory(from), Place::Memory(to), 8);
                ring.push(&bench, entry.with_result(WORD + (1 << 16) + 16 * count));
            }
            ring.doorbell(&mut bench);
            ring.wait(&mut bench);
        }
        for n in 1..=count {
            prop_assert_eq!(bench.memory64(WORD + 8 * n), 0x5a5a_5a5a_5a5a_5a5a);
            let index = first.wrapping_add(n as u32 - 1);
            let expected = u64::from(index) | ((Status::Ok as u64) << 32);
            prop_assert_eq!(bench.memory64(WORD + (1 << 16) + 16 * n), expected);
        }
        prop_assert_eq!(bench.counter(Counter::RingEntries), count);
        prop_assert_eq!(bench.get(0, ring_reg::HEAD), first.wrapping_add(count as u32));
    }
}
