// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs every operation of an accelerator from user space, by registers and by rings, and checks results and counters.
//!
//! Usage: `accel-selftest BDF [PEER-BUS-ADDRESS]`. With an address, the program also does DMA to and from this address.
//! The program overwrites the first 16 MiB of the accelerator's memory and 64 KiB at the address. Requires root and no
//! IOMMU; no driver may have claimed BAR2.

use std::error::Error;
use std::time::{Duration, Instant};

use p2pmem_accel_regs::driver::{Accel, DeviceMemory, Direction, HostBuffer, Report, Ring, RingOptions};
use p2pmem_accel_regs::ring::{Entry, Place};
use p2pmem_accel_regs::{Counter, Op, Status, driver, pattern_word};

const TIMEOUT: Duration = Duration::from_secs(20);

/// CRC-32C (Castagnoli, reflected), bit by bit, to compare with the result of the device.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg())
        })
    })
}

fn samples(data: &[u8]) -> Vec<(f64, f64)> {
    let part = |bytes: &[u8]| f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    data.chunks_exact(8)
        .map(|bytes| (part(&bytes[..4]), part(&bytes[4..])))
        .collect()
}

/// Discrete Fourier transform by its definition.
fn dft(input: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let n = input.len();
    (0..n)
        .map(|k| {
            input.iter().enumerate().fold((0.0, 0.0), |(re, im), (i, (a, b))| {
                let (sin, cos) = (-2.0 * std::f64::consts::PI * (i * k % n) as f64 / n as f64).sin_cos();
                (re + a * cos - b * sin, im + a * sin + b * cos)
            })
        })
        .collect()
}

fn close(a: &[(f64, f64)], b: &[(f64, f64)], tolerance: f64) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .all(|(a, b)| (a.0 - b.0).abs() < tolerance && (a.1 - b.1).abs() < tolerance)
}

fn check(what: &str, good: bool) -> Result<(), Box<dyn Error>> {
    if good {
        println!("ok   {what}");
        Ok(())
    } else {
        Err(format!("{what}: check failed").into())
    }
}

fn refused(what: &str, result: Result<u64, driver::Error>, expected: Status) -> Result<(), Box<dyn Error>> {
    let good = matches!(result, Err(driver::Error::Command { status, .. }) if status == expected);
    if !good {
        println!("     got {result:?}");
    }
    check(what, good)
}

/// Checks rings without DMA: order, results, polls between rings, and a poll that fails.
fn rings(accel: &Accel, memory: &DeviceMemory) -> Result<(), Box<dyn Error>> {
    const ROUNDS: u32 = 1000;
    const WORDS: u64 = 6 << 20;
    const DATA: u64 = 7 << 20;
    const LEN: u64 = 64 << 10;
    let short = RingOptions {
        poll_limit: Duration::from_millis(1),
        ..RingOptions::new(4 << 20, 4096)
    };
    memory.write(WORDS, &[0; 4096])?;
    let mut ping = Ring::new(accel, 0, memory, RingOptions::new(4 << 20, 4096))?;
    let mut pong = Ring::new(accel, 1, memory, RingOptions::new(5 << 20, 4096))?;
    let taken = Ring::new(accel, 1, memory, RingOptions::new(5 << 20, 4096)).map(drop);
    check("a ring has one user", matches!(taken, Err(driver::Error::RingBusy(1))))?;

    ping.push(&Entry::new(Op::Pattern, DATA, LEN, 11))?;
    let last = ping.push(&Entry::new(Op::Crc32c, DATA, LEN, 0).with_result(WORDS + 64))?;
    ping.doorbell()?;
    ping.wait(last, TIMEOUT)?;
    let mut data = vec![0; LEN as usize];
    memory.read(DATA, &mut data)?;
    let result = ping.result(WORDS + 64)?.ok_or("the ring wrote no result")?;
    let good = result.index == last && result.status == Status::Ok && result.value == u64::from(crc32c(&data));
    check("a ring runs operations and writes results", good)?;

    let before = accel.counters()?;
    ping.push(&Entry::timestamp(WORDS + 128, 1))?;
    for round in 1..=ROUNDS {
        ping.push(&Entry::store32(Place::Memory(WORDS), round))?;
        ping.push(&Entry::poll_geq(Place::Memory(WORDS + 4), round))?;
        pong.push(&Entry::poll_geq(Place::Memory(WORDS), round))?;
        pong.push(&Entry::store32(Place::Memory(WORDS + 4), round))?;
    }
    let last = ping.push(&Entry::timestamp(WORDS + 144, 2))?;
    ping.doorbell()?;
    pong.doorbell()?;
    ping.wait(last, TIMEOUT)?;
    let after = accel.counters()?;
    let moved = |counter| after.get(counter) - before.get(counter);
    check(
        "two rings answer each other with one register access each",
        moved(Counter::RegisterWrites) == 2 && moved(Counter::Polls) == 2 * u64::from(ROUNDS),
    )?;
    let mut times = [0; 32];
    memory.read(WORDS + 128, &mut times)?;
    let time = |at: usize| u64::from_le_bytes(times[at..at + 8].try_into().expect("8 bytes"));
    println!(
        "     {} ns per exchange between two rings",
        (time(16) - time(0)) / u64::from(ROUNDS)
    );
    drop(ping);

    let mut ring = Ring::new(accel, 0, memory, short)?;
    ring.push(&Entry::fence())?;
    let last = ring.push(&Entry::poll_and(Place::Memory(WORDS + 32), 1))?;
    ring.doorbell()?;
    let failed = ring.wait(last, TIMEOUT);
    let good = matches!(
        &failed,
        Err(driver::Error::RingStopped {
            index: 1,
            status: Status::TimedOut,
            ..
        })
    );
    check("a poll that never becomes true stops its ring", good)?;
    ring.reset(TIMEOUT)?;
    let first = ring.push(&Entry::fence())?;
    ring.doorbell()?;
    ring.wait(first, TIMEOUT)?;
    let last = pong.push(&Entry::fence())?;
    pong.doorbell()?;
    pong.wait(last, TIMEOUT)?;
    let heads = (accel.ring_progress(0)?.head, accel.ring_progress(1)?.head);
    check(
        "a ring runs after its reset, and the other one runs on",
        heads == (1, 2 * ROUNDS + 1),
    )?;
    let refused = Ring::new(accel, 2, memory, RingOptions::new(32, 16)).map(drop);
    let good = matches!(
        refused,
        Err(driver::Error::RingStopped {
            status: Status::BadRing,
            ..
        })
    );
    check("a ring that is not aligned is refused", good)
}

/// Checks a ring that reports to host memory, and polls and writes there.
fn ring_with_host_memory(accel: &Accel, memory: &DeviceMemory, host: &HostBuffer) -> Result<(), Box<dyn Error>> {
    let (address, _) = host.segments()[0];
    host.write(0, &[0; 64])?;
    let before = accel.counters()?;
    let options = RingOptions {
        report: Report::Bus(address),
        ..RingOptions::new(4 << 20, 64)
    };
    let mut ring = Ring::new(accel, 0, memory, options)?;
    ring.push(&Entry::store64(Place::Bus(address + 8), 0x1122_3344_5566_7788))?;
    ring.push(&Entry::fence())?;
    let last = ring.push(&Entry::poll_geq(Place::Bus(address + 16), 1))?;
    ring.doorbell()?;
    ring.wait_with(last - 1, TIMEOUT, || host.load64(0))?;
    check("a ring stores to host memory", host.load64(8)? == 0x1122_3344_5566_7788)?;
    host.write(16, &[1, 0, 0, 0])?;
    ring.wait_with(last, TIMEOUT, || host.load64(0))?;
    let after = accel.counters()?;
    let moved = |counter| after.get(counter) - before.get(counter);
    check(
        "polls of host memory are counted apart",
        moved(Counter::HostRead) == 0 && moved(Counter::PollHostRead) >= 4 && moved(Counter::HostWritten) == 8 + 3 * 8,
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let bdf = args.next().ok_or("usage: accel-selftest BDF [PEER-BUS-ADDRESS]")?;
    let peer = args
        .next()
        .map(|text| u64::from_str_radix(text.trim_start_matches("0x"), 16))
        .transpose()?;
    let accel = Accel::open(&bdf)?;
    let memory = accel.map_memory()?;
    println!("     {} MiB of memory", accel.memory_size() >> 20);

    accel.reset_counters()?;
    const LEN: u64 = 1 << 20;
    accel.pattern(0, LEN, 42, TIMEOUT)?;
    let mut data = vec![0; LEN as usize];
    memory.read(0, &mut data)?;
    let words = data.chunks_exact(8).enumerate();
    let good = words
        .clone()
        .all(|(i, word)| word == pattern_word(42, i as u64).to_le_bytes());
    check("pattern", good)?;
    check("checksum", accel.checksum(0, LEN, TIMEOUT)? == crc32c(&data))?;

    accel.copy(0, LEN / 2, LEN, TIMEOUT)?;
    let mut copied = vec![0; LEN as usize];
    memory.read(LEN / 2, &mut copied)?;
    check("copy with overlap", copied == data)?;
    accel.fill(3, 13, 0x1122_3344_5566_7788, TIMEOUT)?;
    memory.read(0, &mut copied[..20])?;
    check(
        "fill",
        copied[3..11] == 0x1122_3344_5566_7788_u64.to_le_bytes() && copied[16..20] == data[16..20],
    )?;

    let (one, two, nan) = (0x3f80_0000_u32, 0x4000_0000_u32, 0xffc0_0001_u32);
    // Operands, sum and maximum. As bfloat16, each is two elements, of which the lower one is 0 or, in the NaN, 1 subnormal.
    let cases = [
        (Op::AddF32, [(one, one, two), (nan, one, 0x7fc0_0000)]),
        (Op::MaxF32, [(one, two, two), (0x8000_0000, 0, 0)]),
        (Op::AddBf16, [(one, one, two), (nan, 1, 0x7fc0_0002)]),
        (Op::MaxBf16, [(one, two, two), (nan, 0, 0x7fc0_0001)]),
    ];
    for (op, cases) in cases {
        for (at, (into, from, result)) in (0_u64..).step_by(4).zip(cases) {
            memory.write(at, &into.to_le_bytes())?;
            memory.write(64 + at, &from.to_le_bytes())?;
            let mut found = [0; 4];
            accel.combine(op, at, 64 + at, 4, TIMEOUT)?;
            memory.read(at, &mut found)?;
            check(
                &format!("{op:?} of {into:#x} and {from:#x}"),
                found == result.to_le_bytes(),
            )?;
        }
    }

    const POINTS: usize = 64;
    let signal: Vec<u8> = (0..POINTS * 4)
        .flat_map(|i| {
            let re = ((i * 37 % 101) as f32) / 101.0 - 0.5;
            let im = ((i * 53 % 97) as f32) / 97.0 - 0.5;
            [re.to_le_bytes(), im.to_le_bytes()].concat()
        })
        .collect();
    memory.write(8 << 20, &signal)?;
    accel.fft(8 << 20, signal.len() as u64, POINTS as u64, Direction::Forward, TIMEOUT)?;
    let mut spectrum = vec![0; signal.len()];
    memory.read(8 << 20, &mut spectrum)?;
    let expected: Vec<(f64, f64)> = samples(&signal).chunks_exact(POINTS).flat_map(dft).collect();
    check(
        "FFT agrees with its definition",
        close(&samples(&spectrum), &expected, 1e-4),
    )?;
    accel.fft(8 << 20, signal.len() as u64, POINTS as u64, Direction::Inverse, TIMEOUT)?;
    memory.read(8 << 20, &mut spectrum)?;
    check(
        "inverse FFT restores the input",
        close(&samples(&spectrum), &samples(&signal), 1e-5),
    )?;
    let start = Instant::now();
    accel.fft(8 << 20, 8 << 20, 1024, Direction::Forward, TIMEOUT)?;
    println!("     8 MiB of 1024-point FFTs in {:?}", start.elapsed());

    rings(&accel, &memory)?;
    let counters = accel.counters()?;
    check("no host memory traffic so far", counters.host_bytes() == 0)?;

    let buffer = HostBuffer::new(256 << 10)?;
    let len = buffer.len() as u64;
    if !accel.dma_enabled()? {
        let result = accel.run(Op::DmaOut, 0, 0, 16, buffer.segments()[0].0, TIMEOUT);
        refused("DMA requires bus mastering", result, Status::BusMasterOff)?;
    }
    accel.enable_dma()?;
    accel.pattern(0, len, 7, TIMEOUT)?;
    let segments = buffer.segments();
    println!("     host buffer of {} KiB in {} segments", len >> 10, segments.len());
    let mut at = 0;
    for (address, len) in &segments {
        accel.dma_out(at, *address, *len, TIMEOUT)?;
        at += len;
    }
    let mut data = vec![0; buffer.len()];
    buffer.read(0, &mut data)?;
    let good = data
        .chunks_exact(8)
        .enumerate()
        .all(|(i, word)| word == pattern_word(7, i as u64).to_le_bytes());
    check("DMA to host memory", good)?;
    data.reverse();
    buffer.write(0, &data)?;
    let mut at = 0;
    for (address, len) in &segments {
        accel.dma_in(*address, at, *len, TIMEOUT)?;
        at += len;
    }
    check(
        "DMA from host memory",
        accel.checksum(0, len, TIMEOUT)? == crc32c(&data),
    )?;
    let counters = accel.counters()?;
    check(
        "host memory traffic is counted exactly",
        counters.get(Counter::HostRead) == len && counters.get(Counter::HostWritten) == len,
    )?;
    ring_with_host_memory(&accel, &memory, &buffer)?;
    let counters = accel.counters()?;

    if let Some(peer) = peer {
        const LEN: u64 = 64 << 10;
        accel.pattern(0, LEN, 99, TIMEOUT)?;
        let crc = accel.checksum(0, LEN, TIMEOUT)?;
        accel.dma_out(0, peer, LEN, TIMEOUT)?;
        accel.fill(0, LEN, 0, TIMEOUT)?;
        accel.dma_in(peer, 0, LEN, TIMEOUT)?;
        check("DMA to and from the peer", accel.checksum(0, LEN, TIMEOUT)? == crc)?;
        let after = accel.counters()?;
        let moved = |counter| after.get(counter) - counters.get(counter);
        println!(
            "     peer bytes: {} by mapping, {} by messages",
            moved(Counter::PeerRead) + moved(Counter::PeerWritten),
            moved(Counter::MessageRead) + moved(Counter::MessageWritten)
        );
        check(
            "no host memory traffic for the peer",
            after.host_bytes() == counters.host_bytes(),
        )?;
    }

    let size = accel.memory_size();
    refused(
        "range past the end",
        accel.run(Op::Fill, 0, size - 8, 16, 0, TIMEOUT),
        Status::BadRange,
    )?;
    refused(
        "range that wraps",
        accel.run(Op::Crc32c, 0, u64::MAX, 2, 0, TIMEOUT),
        Status::BadRange,
    )?;
    refused("length 0", accel.run(Op::Fill, 0, 0, 0, 0, TIMEOUT), Status::BadLength)?;
    refused(
        "bad number of points",
        accel.run(Op::Fft, 0, 0, 24, 3, TIMEOUT),
        Status::BadArgument,
    )?;
    refused(
        "unknown flags",
        accel.run(Op::Nop, 1 << 30, 0, 0, 0, TIMEOUT),
        Status::BadOperation,
    )?;
    refused(
        "no memory at the bus address",
        accel.run(Op::DmaIn, 0, 0, 64, 0x7f_0000_0000_0000, TIMEOUT),
        Status::Unreachable,
    )?;
    for (name, value) in accel.counters()?.iter() {
        println!("     {name:<16} {value}");
    }
    println!("all checks passed");
    Ok(())
}
