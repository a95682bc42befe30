// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocates two buffers near a NIC, registers them, and lets the NIC write one into the other: accelerator memory to
//! accelerator memory, without host memory in between.
//!
//! Usage: near_nic [NIC]

use p2pmem::rdma::Nic;
use p2pmem::{human_size, Access, Device, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let nic = Nic::open(&std::env::args().nth(1).unwrap_or_else(|| "mlx5_0".into()))?;
    let device = Device::open()?;
    let request = Request::new(1 << 20).near([nic.client().clone()]);
    let (source, target) = (device.alloc(&request)?, device.alloc(&request)?);
    let (from, to) = (source.map()?, target.map()?);
    from.fill(0..from.len(), 0x5a)?;
    from.flush();

    let pd = nic.alloc_pd()?;
    let sent = source.register(&pd, Access::LOCAL_READ)?;
    let received = target.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    // Both ends are on one NIC. Two nodes exchange endpoint() and remote() by a socket.
    let (mut near, mut far) = (nic.queue(&pd)?, nic.queue(&pd)?);
    near.connect(&far.endpoint())?;
    far.connect(&near.endpoint())?;
    near.write(&sent, 0..sent.len(), &received.remote(), 0)?;

    let mut bytes = vec![0u8; to.len()];
    to.copy_to_slice(0, &mut bytes)?;
    assert!(
        bytes.iter().all(|byte| *byte == 0x5a),
        "the data differs from the data that was sent"
    );
    println!(
        "{} went from provider {} to provider {} by {}, registered by {}",
        human_size(bytes.len() as u64),
        source.provider(),
        target.provider(),
        nic.client(),
        received.method()
    );
    Ok(())
}
