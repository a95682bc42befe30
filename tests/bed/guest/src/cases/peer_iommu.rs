// SPDX-License-Identifier: MIT OR Apache-2.0

//! `ibv_reg_mr()` of mapped buffers behind a translating IOMMU. The number of bytes that were transferred and compared
//! goes to the hardening report.

use anyhow::{Result, ensure};

use super::dmabuf_end::Log;
use super::peer::{Held, MIB, Row, arrives, await_rows, check, fill, nic, rows};
use super::{Bed, Case, peer_end, read};
use crate::verbs::REMOTE_ACCESS;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "peer-iommu",
        about: "a NIC behind an IOMMU transfers data between registered buffers without an IOMMU fault",
        topology: "iommu-nic",
        ruins: false,
        run: moved,
    },
    Case {
        name: "peer-iommu-stale",
        about: "as peer-stale, behind an IOMMU and without an IOMMU fault",
        topology: "iommu-nic",
        ruins: false,
        run: |bed| without_faults(bed, peer_end::stale_ex),
    },
];

/// Fails unless the IOMMU group of a device has type `DMA` (translation).
pub(super) fn translated(bed: &Bed, device: &str) -> Result<()> {
    let group = bed.device(device)?.sysfs().join("iommu_group/type");
    let kind = read(&group)?;
    ensure!(kind == "DMA", "{} is {kind:?} instead of \"DMA\"", group.display());
    Ok(())
}

/// Runs a test. Fails if a device of the test is not behind the IOMMU, or the kernel logs an IOMMU fault.
fn without_faults(bed: &mut Bed, test: fn(&mut Bed) -> Result<()>) -> Result<()> {
    for device in ["nic0", "accel0", "accel1"] {
        translated(bed, device)?;
    }
    let mut log = Log::new()?;
    test(bed)?;
    let faults = log.lines(&["fault addr"]);
    ensure!(faults.is_empty(), "the kernel logged IOMMU faults: {faults:#?}");
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
            "expected two mapped registrations: {all:#?}"
        );
        let mut bytes = 0;
        for seed in 1..=2 {
            fill(&source.map, seed);
            arrives(&nic, &sent, MIB, &received, 0)?;
            check(&target.map, 0, MIB, seed, 0)?;
            bytes += MIB;
        }
        println!("hardening-report: {{\"iommu\": {{\"intel\": {bytes}}}}}");
        // After revocation the NIC refuses the key, so it makes no access that the IOMMU would have to refuse.
        bed.unbind("accel0")?;
        let status = nic.connect()?.write(&sent, 4096, &received, 0)?;
        ensure!(
            status == REMOTE_ACCESS,
            "RDMA WRITE to a revoked registration ended with status {status}, not with a remote access error"
        );
        drop((sent, received));
        await_rows("no registration is listed", <[Row]>::is_empty)?;
        bed.publish("accel0")?;
        drop(source);
        bed.unpublish("accel1")
    })
}
