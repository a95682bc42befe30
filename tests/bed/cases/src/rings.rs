// SPDX-License-Identifier: MIT OR Apache-2.0

//! Rings of work of the accelerator, in buffers that the module allocated.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_accel_regs::driver::{self, Accel, HostBuffer, Report, Ring, RingMemory, RingOptions};
use p2pmem_accel_regs::ring::{Entry, Place};
use p2pmem_accel_regs::{Counter, Op, Status, pattern_word};

use super::peer::Held;
use super::{Bed, Case, write};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "accel-rings",
        about: "rings in a buffer run operations, wait for each other, and report to the buffer and to host memory",
        topology: "small",
        ruins: false,
        run: rings,
    },
    Case {
        name: "accel-ring-of-a-removed-device",
        about: "the driver accesses no register after the kernel has removed the device, and reserves the ring again after a rescan",
        topology: "small",
        ruins: false,
        run: removed,
    },
];

/// Bytes of the buffer.
const SIZE: usize = 256 << 10;
/// Offsets in the buffer: of the second ring, of words, and of data.
const SECOND: u64 = 32 << 10;
const WORDS: u64 = 64 << 10;
const DATA: u64 = 128 << 10;
/// Bytes of data.
const LEN: u64 = 64 << 10;
/// Entries of each ring.
const ENTRIES: u32 = 128;
/// The time limit of each wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A buffer of the module as the memory of rings.
struct BufferMemory(Held);

impl BufferMemory {
    fn at(&self, offset: u64, len: usize) -> Result<usize, driver::Error> {
        let at = offset.checked_sub(self.0.buffer.bar_offset);
        let at = at.and_then(|at| usize::try_from(at).ok());
        at.filter(|at| at % 8 == 0 && at.checked_add(len).is_some_and(|end| end <= SIZE))
            .ok_or(driver::Error::OutOfBounds)
    }
}

impl RingMemory for BufferMemory {
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), driver::Error> {
        let at = self.at(offset, data.len())?;
        for (i, word) in data.chunks(8).enumerate() {
            let word = word.try_into().map_err(|_| driver::Error::OutOfBounds)?;
            self.0.map.set(at + 8 * i, u64::from_le_bytes(word));
        }
        Ok(())
    }

    fn load64(&self, offset: u64) -> Result<u64, driver::Error> {
        Ok(self.0.map.get(self.at(offset, 8)?))
    }
}

fn rings(bed: &mut Bed) -> Result<()> {
    const ROUNDS: u32 = 50;
    let accel = Accel::open(&bed.device("accel0")?.bdf)?;
    let memory = BufferMemory(Held::new(bed, "accel0", SIZE)?);
    let base = memory.0.buffer.bar_offset;
    let word = |n: u64| Place::Memory(base + WORDS + 8 * n);
    for n in 0..16 {
        memory.write(base + WORDS + 8 * n, &[0; 8])?;
    }
    let before = accel.counters()?;
    let outside = Ring::new(&accel, 0, &memory, RingOptions::new(base + SIZE as u64, ENTRIES)).map(drop);
    ensure!(
        matches!(outside, Err(driver::Error::OutOfBounds)),
        "a ring behind the buffer: {outside:?}"
    );

    let mut ping = Ring::new(&accel, 0, &memory, RingOptions::new(base, ENTRIES))?;
    let mut pong = Ring::new(&accel, 1, &memory, RingOptions::new(base + SECOND, ENTRIES))?;
    let other = Accel::open(&bed.device("accel0")?.bdf)?;
    let taken = Ring::new(&other, 1, &memory, RingOptions::new(base, ENTRIES)).map(drop);
    ensure!(
        matches!(taken, Err(driver::Error::RingBusy(1))),
        "a ring with two programs: {taken:?}"
    );
    let third = other.reserve_ring(TIMEOUT)?;
    ensure!(third.number() == 2, "{third:?} instead of the first free ring");
    other.disable_abandoned_rings(TIMEOUT)?;
    ping.check()
        .and_then(|()| pong.check())
        .context("after a reservation")?;
    ping.push(&Entry::new(Op::Pattern, base + DATA, LEN, 5))?;
    let last = ping.push(&Entry::new(Op::Crc32c, base + DATA, LEN, 0).with_result(base + WORDS + 64))?;
    ping.doorbell()?;
    ping.wait(last, TIMEOUT).context("pattern and checksum")?;
    for i in 0..LEN / 8 {
        let found = memory.load64(base + DATA + 8 * i)?;
        ensure!(found == pattern_word(5, i), "word {i} of the pattern is {found:#x}");
    }
    let result = ping.result(base + WORDS + 64)?.context("no result")?;
    let sum = accel.checksum(base + DATA, LEN, TIMEOUT)?;
    ensure!(
        (result.index, result.status, result.value) == (last, Status::Ok, sum.into()),
        "{result:?}, and the checksum by registers is {sum:#x}"
    );

    for round in 1..=ROUNDS {
        ping.push(&Entry::store32(word(0), round))?;
        ping.push(&Entry::poll_geq(word(1), round))?;
        pong.push(&Entry::poll_geq(word(0), round))?;
        pong.push(&Entry::store32(word(1), round))?;
    }
    ping.doorbell()?;
    pong.doorbell()?;
    let last = last + 2 * ROUNDS;
    ping.wait(last, TIMEOUT).context("two rings that wait for each other")?;
    pong.wait(2 * ROUNDS - 1, TIMEOUT)?;
    let counters = accel.counters()?;
    let polls = counters.get(Counter::Polls) - before.get(Counter::Polls);
    ensure!(polls == 2 * u64::from(ROUNDS), "{polls} polls");
    ensure!(
        counters.host_bytes() == before.host_bytes(),
        "rings in the device's memory accessed host memory"
    );
    drop((ping, pong));

    let short = RingOptions {
        poll_limit: Duration::from_millis(1),
        ..RingOptions::new(base, ENTRIES)
    };
    let mut ring = Ring::new(&accel, 0, &memory, short)?;
    ring.push(&Entry::fence())?;
    let last = ring.push(&Entry::poll_and(word(2), 1))?;
    ring.doorbell()?;
    let failed = ring.wait(last, TIMEOUT);
    ensure!(
        matches!(
            failed,
            Err(driver::Error::RingStopped {
                index: 1,
                status: Status::TimedOut,
                ..
            })
        ),
        "a poll that never becomes true: {failed:?}"
    );
    ring.reset(TIMEOUT)?;
    let last = ring.push(&Entry::store32(word(2), 1))?;
    ring.doorbell()?;
    ring.wait(last, TIMEOUT).context("after a reset")?;
    drop(ring);

    accel.enable_dma()?;
    let host = HostBuffer::new(4096)?;
    let (address, _) = *host.segments().first().context("no page")?;
    let options = RingOptions {
        report: Report::Bus(address),
        ..RingOptions::new(base, ENTRIES)
    };
    host.write(0, &[0; 16])?;
    let mut ring = Ring::new(&accel, 0, &memory, options)?;
    let last = ring.push(&Entry::store64(Place::Bus(address + 8), 0x1122_3344_5566_7788))?;
    ring.doorbell()?;
    ring.wait_with(last, TIMEOUT, || host.load64(0))
        .context("a report to host memory")?;
    let stored = host.load64(8)?;
    ensure!(stored == 0x1122_3344_5566_7788, "the store wrote {stored:#x}");
    Ok(())
}

fn removed(bed: &mut Bed) -> Result<()> {
    let device = bed.device("accel0")?;
    let (bdf, sysfs) = (device.bdf.clone(), device.sysfs());
    let accel = Accel::open(&bdf)?;
    let memory = BufferMemory(Held::new(bed, "accel0", SIZE)?);
    let ring = Ring::new(
        &accel,
        0,
        &memory,
        RingOptions::new(memory.0.buffer.bar_offset, ENTRIES),
    )?;
    ring.check()?;
    ensure!(accel.is_present());
    write(&sysfs.join("remove"), "1")?;
    // An access to a register would end this program by SIGBUS.
    for what in [ring.check(), accel.disable_ring(0, TIMEOUT)] {
        ensure!(matches!(what, Err(driver::Error::Gone)), "after the removal: {what:?}");
    }
    write(Path::new("/sys/bus/pci/rescan"), "1")?;
    bed.publish("accel0")?;
    ensure!(
        !accel.is_present(),
        "the device after the rescan is not the one that was opened"
    );
    drop(ring);
    let next = Accel::open(&bdf)?;
    ensure!(next.is_present());
    let reservation = next.reserve_ring(TIMEOUT)?;
    ensure!(reservation.number() == 0, "{reservation:?} instead of the first ring");
    Ok(())
}
