// SPDX-License-Identifier: MIT OR Apache-2.0

//! Writes of the processor that arrive behind what other devices write: PCIe orders them with the processor's later accesses
//! only. Those to the memory of accel1 arrive late.

use std::fs;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_accel_regs::driver::Accel;
use p2pmem_accel_regs::{Counter, pattern_word};

use super::inflight::until;
use super::peer::Held;
use super::{Bed, Case, buffer, errno, is_clearing, write};

pub(super) const CASES: &[Case] = &[Case {
    name: "late-zeroes",
    about: "the zeroes of cleared memory do not overwrite what a device writes for the next owner, with and without pages",
    topology: "accels",
    ruins: false,
    run: late_zeroes,
}];

/// Bytes of each buffer: few, as each access to memory of accel1 traps.
const SIZE: usize = 16 << 10;
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;
/// Seed of the pattern that the device writes.
const SEED: u64 = 11;
/// The time limit of an operation of an accelerator.
const TIMEOUT: Duration = Duration::from_secs(60);

fn late_zeroes(bed: &mut Bed) -> Result<()> {
    let writer = Accel::open(&bed.device("accel0")?.bdf)?;
    writer.enable_dma()?;
    let source = Held::new(bed, "accel0", SIZE)?;
    bed.publish("accel1")?;
    zeroes_come_first(bed, &writer, &source).context("with pages")?;
    bed.unpublish("accel1")?;
    let dir = bed.provider_dir("accel1")?;
    fs::create_dir(&dir)?;
    write(&dir.join("mode"), "pageless")?;
    bed.publish("accel1")?;
    zeroes_come_first(bed, &writer, &source).context("without pages")?;
    bed.unpublish("accel1")
}

fn bus_address(held: &Held) -> Result<u64> {
    Ok(buffer(held.file.as_fd(), held.buffer.handle).map_err(errno)?.bus_addr)
}

/// Uses and frees a buffer of accel1, and has `writer` write to the next owner's buffer. `source` is memory of `writer`.
fn zeroes_come_first(bed: &Bed, writer: &Accel, source: &Held) -> Result<()> {
    let (at, len) = (source.buffer.bar_offset, SIZE as u64);
    let first = Held::new(bed, "accel1", SIZE)?;
    let (place, address) = (first.buffer.bar_offset, bus_address(&first)?);
    ensure!(first.map.get(0) == 0, "the memory is not cleared");
    // The test bed delays writes: another device does not see the processor's write until the processor has read.
    first.map.set(0, SECRET);
    writer.dma_in(address, at, 8, TIMEOUT)?;
    ensure!(source.map.get(0) == 0, "a write of the processor did not arrive late");
    ensure!(first.map.get(0) == SECRET);
    writer.dma_in(address, at, 8, TIMEOUT)?;
    ensure!(source.map.get(0) == SECRET, "a read did not push the write before it");
    for at in (0..SIZE).step_by(8) {
        first.map.set(at, SECRET);
    }
    drop(first);
    until("the buffer is cleared", || Ok(!is_clearing(&bed.provider("accel1")?)))?;

    let next = Held::new(bed, "accel1", SIZE)?;
    ensure!(
        next.buffer.bar_offset == place,
        "the next buffer is at {:#x}, not at {place:#x}",
        next.buffer.bar_offset
    );
    writer.pattern(at, len, SEED, TIMEOUT)?;
    let before = writer.counters()?.get(Counter::PeerWritten);
    writer.dma_out(at, address, len, TIMEOUT)?;
    let written = writer.counters()?.get(Counter::PeerWritten) - before;
    ensure!(written == len, "the device wrote {written} bytes directly");
    for n in 0..SIZE / 8 {
        let (found, sent) = (next.map.get(8 * n), pattern_word(SEED, n as u64));
        ensure!(found == sent, "{found:#x} instead of {sent:#x} at {:#x}", 8 * n);
    }
    Ok(())
}
