// SPDX-License-Identifier: MIT OR Apache-2.0

//! A device with two BARs of memory: BARs 2 and 5 of accel0. accel1 reads what is in them.

use std::fs::{self, OpenOptions};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_accel_regs::driver::{Accel, DeviceMemory};
use p2pmem_sys as abi;

use super::peer::{Held, check, fill};
use super::publisher::Publisher;
use super::{Bed, Case, buffer, errno, read, write};
use crate::sys::Mapping;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "second-bar",
        about: "a part of the second BAR is published with and without pages, and what is written there arrives there",
        topology: "accels",
        ruins: false,
        run: second_bar,
    },
    Case {
        name: "two-bars",
        about: "a driver publishes both BARs in the kernel's pool, and buffers in both have their own places and contents",
        topology: "accels",
        ruins: false,
        run: two_bars,
    },
];

const MIB: u64 = 1 << 20;
/// The BARs with memory.
const BARS: [u32; 2] = [2, 5];
/// Bytes that are compared.
const SIZE: usize = 8192;
/// The time limit of an operation of an accelerator.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the addresses of a BAR of accel0, on its bus.
fn addresses(bed: &Bed, bar: u32) -> Result<std::ops::RangeInclusive<u64>> {
    let text = read(&bed.device("accel0")?.sysfs().join("resource"))?;
    let line = text.lines().nth(bar as usize).context("no such BAR")?;
    let mut numbers = line
        .split_whitespace()
        .map(|number| u64::from_str_radix(number.trim_start_matches("0x"), 16));
    let mut next = || Ok::<u64, anyhow::Error>(numbers.next().context(line.to_owned())??);
    Ok(next()?..=next()?)
}

/// Returns the BAR of a buffer of accel0, and the offset in it, by its bus address.
fn place(bed: &Bed, held: &Held) -> Result<(u32, u64)> {
    let address = buffer(held.file.as_fd(), held.buffer.handle).map_err(errno)?.bus_addr;
    for bar in BARS {
        let addresses = addresses(bed, bar)?;
        if addresses.contains(&address) {
            return Ok((bar, address - addresses.start()));
        }
    }
    anyhow::bail!("{address:#x} is in no BAR")
}

/// accel1, which no driver is bound to.
struct Reader {
    accel: Accel,
    memory: DeviceMemory,
}

impl Reader {
    fn new(bed: &Bed) -> Result<Reader> {
        let accel = Accel::open(&bed.device("accel1")?.bdf)?;
        accel.enable_dma()?;
        let memory = accel.map_memory()?;
        Ok(Reader { accel, memory })
    }

    /// Returns the first words at an offset of a BAR of accel0.
    fn words(&self, bed: &Bed, bar: u32, offset: u64) -> Result<Vec<u64>> {
        let address = addresses(bed, bar)?.start() + offset;
        self.accel.dma_in(address, 0, SIZE as u64, TIMEOUT)?;
        let words = (0..SIZE as u64).step_by(8).map(|at| Ok(self.memory.load64(at)?));
        words.collect()
    }

    /// Writes to a buffer, and fails unless that arrives at its place and not at the same offset of the other BAR.
    fn check(&self, bed: &Bed, held: &Held, seed: u64) -> Result<()> {
        let (bar, offset) = place(bed, held)?;
        fill(&held.map, seed);
        check(&held.map, 0, SIZE, seed, 0)?;
        let written: Vec<u64> = (0..SIZE).step_by(8).map(|at| held.map.get(at)).collect();
        for other in BARS {
            let found = self.words(bed, other, offset)? == written;
            ensure!(
                found == (other == bar),
                "a buffer at {offset:#x} of BAR {bar}: its contents are {} BAR {other}",
                if found { "in" } else { "not in" }
            );
        }
        Ok(())
    }
}

fn second_bar(bed: &mut Bed) -> Result<()> {
    let reader = Reader::new(bed)?;
    let row = bed.provider("accel0")?;
    ensure!(row.bar == 2, "{row:?}");
    for mode in ["paged", "pageless"] {
        bed.unpublish("accel0")?;
        let dir = bed.provider_dir("accel0")?;
        fs::create_dir(&dir)?;
        for (name, value) in [("bar", 5), ("offset", 2 * MIB), ("size", 2 * MIB)] {
            write(&dir.join(name), &value.to_string())?;
        }
        write(&dir.join("mode"), mode)?;
        bed.publish("accel0")?;
        let row = bed.provider("accel0")?;
        ensure!(
            (row.bar, row.bar_offset) == (5, 2 * MIB) && row.size + row.kernel_reserve == 2 * MIB,
            "{row:?}"
        );
        let buffers = [Held::new(bed, "accel0", SIZE)?, Held::new(bed, "accel0", SIZE)?];
        for (held, seed) in buffers.iter().zip(1..) {
            let at = held.buffer.bar_offset;
            ensure!(
                at >= 2 * MIB && place(bed, held)? == (5, at),
                "{:?}: BAR 5 at {at:#x}",
                place(bed, held)?
            );
            reader.check(bed, held, seed).context(mode)?;
        }
    }
    bed.unpublish("accel0")?;
    bed.publish("accel0")
}

fn two_bars(bed: &mut Bed) -> Result<()> {
    let reader = Reader::new(bed)?;
    let publisher = Publisher::with_pool(bed, &BARS)?;
    let row = bed.provider("accel0")?;
    ensure!(row.kind == abi::P2PMEM_KIND_ADOPTED, "{row:?}");
    let one = Held::new(bed, "accel0", MIB as usize)?;
    // Another user of the kernel's pool takes the rest of this BAR.
    let pool = OpenOptions::new()
        .read(true)
        .write(true)
        .open(bed.device("accel0")?.sysfs().join("p2pmem/allocate"))?;
    let rest = Mapping::shared(pool.as_fd(), 0, 3 * MIB as usize).map_err(errno)?;
    let two = Held::new(bed, "accel0", MIB as usize)?;
    let (first, second) = (place(bed, &one)?, place(bed, &two)?);
    ensure!(
        first.0 == row.bar as u32 && second.0 != first.0,
        "{first:?} and {second:?}: {row:?}"
    );
    ensure!(one.buffer.bar_offset == first.1, "{:#x}", one.buffer.bar_offset);
    // The offset would be one in the provider's BAR.
    ensure!(two.buffer.bar_offset == u64::MAX, "{:#x}", two.buffer.bar_offset);
    // Revoking one buffer unmaps its pages of the files' address space, which are those of no other buffer.
    let distance = one.buffer.mmap_offset.abs_diff(two.buffer.mmap_offset);
    ensure!(distance >= MIB, "mappings of {:?} and {:?}", one.buffer, two.buffer);
    for (held, seed) in [(&one, 1), (&two, 2)] {
        reader.check(bed, held, seed)?;
    }
    check(&one.map, 0, SIZE, 1, 0).context("after a write to the other BAR")?;
    drop((one, two, rest));
    publisher.end()
}
