// SPDX-License-Identifier: MIT OR Apache-2.0

//! DMA of a device to addresses that are not mapped for it, behind a translating IOMMU.

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
    about: "a device reaches memory that is mapped for it, and the IOMMU blocks its DMA to other addresses",
    topology: "iommu-nic",
    ruins: false,
    run: stray,
}];

/// The bytes of each transfer.
const LEN: usize = 4096;
/// The time limit of a transfer.
const LIMIT: Duration = Duration::from_secs(60);

/// accel1, which does DMA to any address, and the part of its memory that is source and destination of the transfers.
struct StrayDevice {
    accel: Accel,
    own: Held,
    log: Log,
}

impl StrayDevice {
    fn new(bed: &Bed) -> Result<StrayDevice> {
        translated(bed, "accel1")?;
        let accel = Accel::open(&bed.device("accel1")?.bdf)?;
        accel.enable_dma()?;
        Ok(StrayDevice {
            accel,
            own: Held::new(bed, "accel1", LEN)?,
            log: Log::new()?,
        })
    }

    fn dma(&self, op: Op, address: u64) -> Result<u64, Error> {
        let offset = self.own.buffer.bar_offset;
        self.accel.run(op, 0, offset, LEN as u64, address, LIMIT)
    }

    /// Fails unless the IOMMU blocks a transfer and the kernel log has its address. The kernel limits the log to about
    /// three faults in five seconds, so the transfer is repeated until its fault is in the log.
    fn check_blocked(&mut self, what: &str, op: Op, address: u64) -> Result<()> {
        let direction = if op == Op::DmaOut { "DMA Write" } else { "DMA Read" };
        let place = format!("fault addr {address:#x} ");
        until(
            &format!("{what}: the kernel log has a fault of a {direction} at {address:#x}"),
            || match self.dma(op, address) {
                Err(Error::Command { .. }) => Ok(!self.log.lines(&["DMAR", direction, &place]).is_empty()),
                other => bail!("{what}: {op:?} at {address:#x}: {other:?}"),
            },
        )
    }

    /// Fails unless the IOMMU blocks both a write to an address and a read from it.
    fn check_unreachable(&mut self, what: &str, address: u64) -> Result<()> {
        fill(&self.own.map, 2);
        self.check_blocked(what, Op::DmaOut, address)?;
        self.check_blocked(what, Op::DmaIn, address)?;
        check(&self.own.map, 0, LEN, 2, 0).with_context(|| format!("{what}: the read got through"))
    }
}

fn stray(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let mut device = StrayDevice::new(bed)?;
    let target = Held::new(bed, "accel0", LEN)?;
    let bus_addr = buffer(target.file.as_fd(), target.buffer.handle)
        .map_err(errno)?
        .bus_addr;
    ensure!(bus_addr != 0, "BUFFER has no bus address");
    fill(&target.map, 1);
    let unchanged =
        |what: &str| check(&target.map, 0, LEN, 1, 0).with_context(|| format!("{what}: the buffer of accel0 changed"));
    let dma_buf = export(target.file.as_fd(), target.buffer.handle, 0, &[(0, LEN as u64)]);
    let dma_buf = dma_buf.map_err(errno)?;

    // The device's DMA works: it reaches the buffer at the mapped address.
    let importer = Importer::mapped(bed, &dma_buf, "accel1", GOOD)?;
    let mapped = address(&importer)?;
    ensure!(
        mapped != bus_addr,
        "the mapped address {mapped:#x} is the bus address: the IOMMU does not translate"
    );
    device.dma(Op::DmaIn, mapped).context("DMA from the mapped address")?;
    check(&device.own.map, 0, LEN, 1, 0).context("data at the mapped address")?;
    fill(&device.own.map, 3);
    device.dma(Op::DmaOut, mapped).context("DMA to the mapped address")?;
    check(&target.map, 0, LEN, 3, 0).context("data at the mapped address")?;
    fill(&target.map, 1);

    // The buffer's bus address is not mapped for the device, even while the buffer is.
    device.check_unreachable("the buffer's bus address", bus_addr)?;
    unchanged("the buffer's bus address")?;
    // After unmapping, the device reaches neither its former address nor that of another device.
    importer.say("unmap").map_err(errno)?;
    importer.say("detach").map_err(errno)?;
    device.check_unreachable("the address of the former mapping", mapped)?;
    unchanged("the address of the former mapping")?;
    let other = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
    device.check_unreachable("the address of another device's mapping", address(&other)?)?;
    unchanged("the address of another device's mapping")?;

    // Host memory is out of reach too.
    let host = HostBuffer::new(LEN)?;
    let before = [0x5a; LEN];
    host.write(0, &before)?;
    let (physical, _) = *host.segments().first().context("the host buffer has no page")?;
    device.check_unreachable("host memory", physical)?;
    let mut after = [0; LEN];
    host.read(0, &mut after)?;
    ensure!(after == before, "the device changed host memory");

    drop((other, dma_buf, target, device));
    bed.unpublish("accel1")
}

/// The DMA address of the whole buffer for an importer's device.
fn address(importer: &Importer) -> Result<u64> {
    let state = importer.state()?;
    match state.entries[..] {
        [(address, length)] if length == LEN as u64 => Ok(address),
        _ => bail!(
            "the buffer is not mapped as one segment of {LEN} bytes: {:x?}",
            state.entries
        ),
    }
}
