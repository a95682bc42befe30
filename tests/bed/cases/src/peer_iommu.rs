// SPDX-License-Identifier: MIT OR Apache-2.0

//! `ibv_reg_mr()` of mapped buffers behind a translating IOMMU. The number of compared bytes goes to the hardening report.

use anyhow::{Result, ensure};

use super::dmabuf_end::Log;
use super::peer::{Held, MIB, Row, arrives, await_rows, check, fill, nic, rows};
use super::{Bed, Case, peer_end, read};
use crate::verbs::REMOTE_ACCESS;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "peer-iommu",
        about: "a NIC behind an IOMMU moves bytes between registered buffers, and faults at nothing",
        topology: "iommu-nic",
        ruins: false,
        run: moved,
    },
    Case {
        name: "peer-iommu-stale",
        about: "of 20 writes of either adapter to a buffer that was revoked, none reaches the memory, behind an IOMMU",
        topology: "iommu-nic",
        ruins: false,
        run: |bed| without_faults(bed, peer_end::stale_ex),
    },
];

/// Fails unless the IOMMU translates the DMA of a device.
pub(super) fn translated(bed: &Bed, device: &str) -> Result<()> {
    let group = bed.device(device)?.sysfs().join("iommu_group/type");
    let kind = read(&group)?;
    ensure!(kind == "DMA", "{}: {kind:?}, not DMA", group.display());
    Ok(())
}

/// Runs a test. Fails if a device sends the IOMMU an address that has no translation.
fn without_faults(bed: &mut Bed, test: fn(&mut Bed) -> Result<()>) -> Result<()> {
    for device in ["nic0", "accel0", "accel1"] {
        translated(bed, device)?;
    }
    let mut log = Log::new()?;
    test(bed)?;
    let faults = log.lines(&["fault addr"]);
    ensure!(faults.is_empty(), "{faults:#?}");
    Ok(())
}

fn moved(bed: &mut Bed) -> Result<()> {
    without_faults(bed, |bed| {
        bed.publish("accel1")?;
        let nic = nic(bed)?;
        let (source, target) = (Held::new(bed, "accel1", MIB)?, Held::new(bed, "accel0", MIB)?);
        let (sent, received) = (source.register(&nic)?, target.register(&nic)?);
        let all = rows()?;
        ensure!(
            all.len() == 2 && all.iter().all(|row| row.state == "mapped"),
            "{all:#?}"
        );
        let mut bytes = 0;
        for seed in 1..=2 {
            fill(&source.map, seed);
            arrives(&nic, &sent, MIB, &received, 0)?;
            check(&target.map, 0, MIB, seed, 0)?;
            bytes += MIB;
        }
        println!("hardening-report: {{\"iommu\": {{\"intel\": {bytes}}}}}");
        // After a revocation the NIC itself refuses, and sends nothing to the IOMMU.
        bed.unbind("accel0")?;
        let status = nic.connect()?.write(&sent, 4096, &received, 0)?;
        ensure!(
            status == REMOTE_ACCESS,
            "a write after the end ended with status {status}"
        );
        drop((sent, received));
        await_rows("all was deregistered", <[Row]>::is_empty)?;
        bed.publish("accel0")?;
        drop(source);
        bed.unpublish("accel1")
    })
}
