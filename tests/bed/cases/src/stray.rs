// SPDX-License-Identifier: MIT OR Apache-2.0

//! A device that does DMA to addresses that were not mapped for it, behind a translating IOMMU.

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_accel_regs::Op;
use p2pmem_accel_regs::driver::{Accel, Error, HostBuffer};

use super::dmabuf::{GOOD, Importer, export};
use super::dmabuf_end::Log;
use super::inflight::until;
use super::peer::{Held, check, fill};
use super::peer_iommu::translated;
use super::{Bed, Case, buffer, errno};

pub(super) const CASES: &[Case] = &[Case {
    name: "stray-dma",
    about: "a device reaches what was mapped for it, and of its DMA to other addresses the IOMMU lets nothing through",
    topology: "iommu-nic",
    ruins: false,
    run: stray,
}];

/// Bytes of each transfer.
const LEN: usize = 4096;
/// The time limit of a transfer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// accel1, which does DMA to any address, and the part of its memory that it sends from and receives in.
struct Rogue {
    accel: Accel,
    own: Held,
    log: Log,
}

impl Rogue {
    fn new(bed: &Bed) -> Result<Rogue> {
        translated(bed, "accel1")?;
        let accel = Accel::open(&bed.device("accel1")?.bdf)?;
        accel.enable_dma()?;
        Ok(Rogue {
            accel,
            own: Held::new(bed, "accel1", LEN)?,
            log: Log::new()?,
        })
    }

    fn dma(&self, op: Op, address: u64) -> Result<u64, Error> {
        let offset = self.own.buffer.bar_offset;
        self.accel.run(op, 0, offset, LEN as u64, address, TIMEOUT)
    }

    /// Fails unless the IOMMU refuses a transfer, and the kernel's log has the address. The log takes about three faults in five
    /// seconds: a fault that was not logged is tried again.
    fn is_refused(&mut self, what: &str, op: Op, address: u64) -> Result<()> {
        let way = if op == Op::DmaOut { "DMA Write" } else { "DMA Read" };
        let place = format!("fault addr {address:#x} ");
        until(&format!("{what}: the log names {way} of {address:#x}"), || {
            match self.dma(op, address) {
                Err(Error::Command { .. }) => Ok(!self.log.lines(&["DMAR", way, &place]).is_empty()),
                other => bail!("{what}: {op:?} at {address:#x}: {other:?}"),
            }
        })
    }

    /// Fails unless both a write to an address and a read from there are refused.
    fn is_kept_out(&mut self, what: &str, address: u64) -> Result<()> {
        fill(&self.own.map, 2);
        self.is_refused(what, Op::DmaOut, address)?;
        self.is_refused(what, Op::DmaIn, address)?;
        check(&self.own.map, 0, LEN, 2, 0).with_context(|| format!("{what}: bytes of it arrived"))
    }
}

fn stray(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let mut rogue = Rogue::new(bed)?;
    let victim = Held::new(bed, "accel0", LEN)?;
    let bus_addr = buffer(victim.file.as_fd(), victim.buffer.handle)
        .map_err(errno)?
        .bus_addr;
    ensure!(bus_addr != 0, "the module does not report the buffer's bus address");
    fill(&victim.map, 1);
    let unchanged = |what: &str| check(&victim.map, 0, LEN, 1, 0).with_context(|| format!("{what}: the victim"));
    let dma_buf = export(victim.file.as_fd(), victim.buffer.handle, 0, &[(0, LEN as u64)]);
    let dma_buf = dma_buf.map_err(errno)?;

    // The engine works: it reaches the buffer at the address that was mapped for it.
    let mine = Importer::mapped(bed, &dma_buf, "accel1", GOOD)?;
    let given = address(&mine)?;
    ensure!(
        given != bus_addr,
        "{given:#x} is the bus address: nothing is translated"
    );
    rogue.dma(Op::DmaIn, given).context("from what was mapped")?;
    check(&rogue.own.map, 0, LEN, 1, 0).context("what was mapped")?;
    fill(&rogue.own.map, 3);
    rogue.dma(Op::DmaOut, given).context("to what was mapped")?;
    check(&victim.map, 0, LEN, 3, 0).context("what was mapped")?;
    fill(&victim.map, 1);

    // The bus address of the same buffer is not mapped for the engine.
    rogue.is_kept_out("the buffer's bus address", bus_addr)?;
    unchanged("the buffer's bus address")?;
    // After the end of the mapping no address works, least of all that of another device.
    mine.say("unmap").map_err(errno)?;
    mine.say("detach").map_err(errno)?;
    rogue.is_kept_out("what was taken back", given)?;
    unchanged("what was taken back")?;
    let other = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
    rogue.is_kept_out("what another device has", address(&other)?)?;
    unchanged("what another device has")?;

    // The machine's own memory.
    let host = HostBuffer::new(LEN)?;
    let before = [0x5a; LEN];
    host.write(0, &before)?;
    let (physical, _) = *host.segments().first().context("no page")?;
    rogue.is_kept_out("host memory", physical)?;
    let mut after = [0; LEN];
    host.read(0, &mut after)?;
    ensure!(after == before, "host memory was changed");

    drop((other, dma_buf, victim, rogue));
    bed.unpublish("accel1")
}

/// The address by which an importer's device reaches the whole buffer.
fn address(importer: &Importer) -> Result<u64> {
    let state = importer.state()?;
    match state.entries[..] {
        [(address, length)] if length == LEN as u64 => Ok(address),
        _ => bail!("one page is mapped in other pieces: {:x?}", state.entries),
    }
}
