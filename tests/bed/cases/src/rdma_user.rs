// SPDX-License-Identifier: MIT OR Apache-2.0

//! Registration from user space with a NIC: the bytes that the NIC reaches, those that it does not reach, and the limits.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use p2pmem::rdma::{Nic, Queue};
use p2pmem::{Access, Buffer, Device, Error, Mapping, RegisterOptions, RegistrationMethod, RemoteMemory, Request};
use sideway::ibverbs::protection_domain::ProtectionDomain;

use super::{Bed, Case};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rdma-write",
        about: "a NIC writes and reads registered buffers of accelerators, byte for byte, by either kind of address",
        topology: "nic",
        ruins: false,
        run: write_and_read,
    },
    Case {
        name: "rdma-bounds",
        about: "a NIC reaches not one byte beside a registration, and nothing that its access does not allow",
        topology: "nic",
        ruins: false,
        run: bounds,
    },
    Case {
        name: "rdma-size",
        about: "200 MiB of a 256 MiB BAR are registered; one byte too many names the BAR, its size and who uses it",
        topology: "nic",
        ruins: false,
        run: size,
    },
    Case {
        name: "rdma-held",
        about: "freed memory that a NIC can still reach is nobody else's until the registration ends",
        topology: "nic",
        ruins: false,
        run: held,
    },
];

pub(super) const MIB: usize = 1 << 20;
/// `IBV_WC_REM_ACCESS_ERR`
pub(super) const REMOTE_ACCESS: u32 = 10;

/// The NIC, open, and an open p2pmem device for allocations near the NIC.
pub(super) struct Wire {
    pub(super) name: String,
    nic: Nic,
    pub(super) pd: Arc<ProtectionDomain>,
    device: Device,
}

impl Wire {
    pub(super) fn new(bed: &Bed) -> Result<Wire> {
        let name = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
        let nic = Nic::open(&name)?;
        let pd = nic.alloc_pd()?;
        Ok(Wire {
            name,
            nic,
            pd,
            device: Device::open()?,
        })
    }

    /// Two ends of a connection, both of the one NIC. The test uses the first one.
    pub(super) fn pair(&self) -> Result<(Queue, Queue)> {
        let (mut near, mut far) = (self.nic.queue(&self.pd)?, self.nic.queue(&self.pd)?);
        near.connect(&far.endpoint())?;
        far.connect(&near.endpoint())?;
        Ok((near, far))
    }

    pub(super) fn alloc(&self, bed: &Bed, provider: &str, size: usize) -> Result<Buffer> {
        let id = bed.provider(provider)?.id;
        let request = Request::new(size as u64).near([self.nic.client().clone()]).provider(id);
        Ok(self.device.alloc(&request)?)
    }
}

/// Returns the word at byte `at` of pattern `seed`: different for each seed, and at each place.
pub(super) fn word(seed: u64, at: usize) -> u64 {
    ((seed << 48) | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed
}

pub(super) fn pattern(seed: u64, len: usize) -> Vec<u64> {
    (0..len).step_by(8).map(|at| word(seed, at)).collect()
}

pub(super) fn fill(map: &Mapping, seed: u64) -> Result<()> {
    map.copy_from_slice(0, &pattern(seed, map.len()))?;
    map.flush();
    Ok(())
}

/// Fails unless all of a mapping has this pattern.
pub(super) fn check(map: &Mapping, seed: u64) -> Result<()> {
    let mut words = vec![0u64; map.len() / 8];
    map.copy_to_slice(0, &mut words)?;
    compare(&words, &pattern(seed, map.len()))
}

pub(super) fn compare(found: &[u64], wanted: &[u64]) -> Result<()> {
    ensure!(
        found.len() == wanted.len(),
        "{} words, not {}",
        found.len(),
        wanted.len()
    );
    if let Some(at) = found.iter().zip(wanted).position(|(a, b)| a != b) {
        bail!("byte {:#x} is {:#x} instead of {:#x}", 8 * at, found[at], wanted[at]);
    }
    Ok(())
}

pub(super) fn publish_both(bed: &Bed) -> Result<()> {
    bed.publish("accel1")
}

fn write_and_read(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let wire = Wire::new(bed)?;
    let (source, target) = (wire.alloc(bed, "accel1", MIB)?, wire.alloc(bed, "accel0", MIB)?);
    let (from, to) = (source.map()?, target.map()?);
    let (mut queue, _far) = wire.pair()?;

    // A whole buffer, by the program's addresses.
    let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
    let received = target.register(&wire.pd, Access::ALL)?;
    ensure!(
        received.method() == RegistrationMethod::DmaBuf && received.addr() == to.as_ptr() as u64,
        "{received:?}"
    );
    ensure!(received.nic() == wire.name, "{received:?}");
    fill(&from, 1)?;
    fill(&to, 2)?;
    queue.write(&sent, 0..MIB, &received.remote(), 0)?;
    check(&to, 1)?;
    fill(&to, 3)?;
    queue.read(&sent, 0..MIB, &received.remote(), 0)?;
    check(&from, 3)?;

    // An odd number of bytes in the middle, and nothing beside them.
    fill(&from, 4)?;
    fill(&to, 5)?;
    queue.write(&sent, 4099..9001, &received.remote(), 70_003)?;
    let (mut bytes, mut wanted) = (vec![0u8; MIB], vec![0u8; MIB]);
    to.copy_to_slice(0, &mut bytes)?;
    for (at, word) in pattern(5, MIB).iter().enumerate() {
        wanted[8 * at..8 * at + 8].copy_from_slice(&word.to_ne_bytes());
    }
    let mut source_bytes = vec![0u8; MIB];
    from.copy_to_slice(0, &mut source_bytes)?;
    wanted[70_003..70_003 + 9001 - 4099].copy_from_slice(&source_bytes[4099..9001]);
    ensure!(
        bytes == wanted,
        "4902 bytes at 70003 did not arrive as they were, or others changed"
    );
    drop((sent, received));

    // A buffer without a mapping, by addresses from 0; a part of a mapping, by a chosen address.
    drop((from, to));
    let sent = source.register(&wire.pd, Access::LOCAL_READ)?;
    let part = RegisterOptions::new(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .range(65536..65536 + 8192)
        .iova(0x7000_0000);
    let received = target.register_with(&wire.pd, &part)?;
    ensure!(
        (sent.addr(), received.addr(), received.len()) == (0, 0x7000_0000, 8192),
        "{sent:?} {received:?}"
    );
    queue.write(&sent, 0..8192, &received.remote(), 0)?;
    let to = target.map()?;
    let mut words = vec![0u64; 1024];
    to.copy_to_slice(65536, &mut words)?;
    compare(&words, &pattern(4, 8192))?;

    // The module's counters go back to zero.
    let info = target.info()?;
    ensure!((info.exports, info.attachments) == (1, 1), "{info:?}");
    received.deregister()?;
    let info = target.info()?;
    ensure!((info.exports, info.attachments) == (0, 0), "{info:?}");
    Ok(())
}

/// Fails unless a transfer ended with this status.
pub(super) fn ended(what: &str, result: Result<(), Error>, status: u32) -> Result<()> {
    match result {
        Err(Error::Transfer { status: got, .. }) if got == status => Ok(()),
        Err(error) => bail!("{what}: {error}, instead of status {status}"),
        Ok(()) => bail!("{what} succeeded"),
    }
}

fn bounds(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let wire = Wire::new(bed)?;
    let (source, target) = (wire.alloc(bed, "accel1", MIB)?, wire.alloc(bed, "accel0", MIB)?);
    let (from, to) = (source.map()?, target.map()?);
    fill(&from, 1)?;
    fill(&to, 2)?;
    let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
    // The middle half, so that there is memory on both sides that must not change.
    let middle = RegisterOptions::new(Access::ALL).range((MIB / 4) as u64..(3 * MIB / 4) as u64);
    let received = target.register_with(&wire.pd, &middle)?;
    let remote = received.remote();
    let last = remote.len;
    let beside: [(&str, u64, usize); 4] = [
        ("one byte before", 0u64.wrapping_sub(1), 8),
        ("one byte past the end", last - 7, 8),
        ("right behind", last, 4096),
        ("far away", 1 << 40, 4096),
    ];
    for (what, offset, len) in beside {
        let (mut queue, _far) = wire.pair()?;
        ended(what, queue.write(&sent, 0..len, &remote, offset), REMOTE_ACCESS)?;
        let (mut queue, _far) = wire.pair()?;
        ended(what, queue.read(&sent, 0..len, &remote, offset), REMOTE_ACCESS)?;
    }
    let wrong_key = RemoteMemory {
        rkey: remote.rkey ^ 1,
        ..remote
    };
    let (mut queue, _far) = wire.pair()?;
    ended("another key", queue.write(&sent, 0..8, &wrong_key, 0), REMOTE_ACCESS)?;
    drop(received);

    let read_only = target.register(&wire.pd, Access::REMOTE_READ)?;
    let (mut queue, _far) = wire.pair()?;
    ended(
        "a write",
        queue.write(&sent, 0..8, &read_only.remote(), 0),
        REMOTE_ACCESS,
    )?;
    let (mut queue, _far) = wire.pair()?;
    fill(&from, 3)?;
    queue.read(&sent, 0..MIB, &read_only.remote(), 0)?;
    check(&from, 2)?;
    check(&to, 2)?;

    let error = target.register(&wire.pd, Access::REMOTE_WRITE).unwrap_err();
    ensure!(
        error.errno() == Some(libc::EINVAL) && error.remedy().is_some_and(|r| r.contains("local writes")),
        "remote writes without local ones: {error}"
    );
    Ok(())
}

fn size(bed: &mut Bed) -> Result<()> {
    let wire = Wire::new(bed)?;
    let buffer = wire.alloc(bed, "accel0", 200 * MIB)?;
    let registration = buffer.register(&wire.pd, Access::ALL)?;
    ensure!(registration.len() == 200 * MIB, "{registration:?}");
    // The last bytes can be reached.
    let map = buffer.map()?;
    let small = wire.alloc(bed, "accel0", 4096)?;
    let small_map = small.map()?;
    fill(&small_map, 7)?;
    let sent = small.register(&wire.pd, Access::LOCAL_READ)?;
    let (mut queue, _far) = wire.pair()?;
    queue.write(&sent, 0..4096, &registration.remote(), (200 * MIB - 4096) as u64)?;
    let mut words = vec![0u64; 512];
    map.copy_to_slice(200 * MIB - 4096, &mut words)?;
    compare(&words, &pattern(7, 4096))?;

    let free = bed.provider("accel0")?.free as usize;
    let error = match wire.alloc(bed, "accel0", free + 1) {
        Ok(_) => bail!("{} bytes were allocated of {free}", free + 1),
        Err(error) => error.to_string(),
    };
    let address = &bed.device("accel0")?.bdf;
    let me = format!("pid {} (", std::process::id());
    for wanted in [&format!("{address} BAR 2 has "), " MiB (without ", &me, ") 200.0 MiB"] {
        ensure!(error.contains(wanted), "{wanted:?} is not in {error:?}");
    }
    println!("{error}");
    Ok(())
}

fn held(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let wire = Wire::new(bed)?;
    let (source, target) = (wire.alloc(bed, "accel1", MIB)?, wire.alloc(bed, "accel0", MIB)?);
    let (from, to) = (source.map()?, target.map()?);
    let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
    let free = bed.settled()?.0;
    let received = target.register(&wire.pd, Access::ALL)?;
    let remote = received.remote();
    drop((target, to));
    // Other users cannot get the buffer's memory, whatever they allocate.
    let rest = wire.alloc(bed, "accel0", bed.provider("accel0")?.largest as usize)?;
    let map = rest.map()?;
    map.fill(0..map.len(), 0xab)?;
    fill(&from, 1)?;
    let (mut queue, _far) = wire.pair()?;
    queue.write(&sent, 0..MIB, &remote, 0)?;
    fill(&from, 2)?;
    queue.read(&sent, 0..MIB, &remote, 0)?;
    check(&from, 1).context("what the NIC wrote is not what it read")?;
    let mut words = vec![0u64; map.len() / 8];
    map.copy_to_slice(0, &mut words)?;
    ensure!(
        words.iter().all(|w| *w == 0xabab_abab_abab_abab),
        "a write reached another's memory"
    );
    drop((map, rest));
    received.deregister()?;
    let after = bed.settled()?.0;
    ensure!(
        after == free + MIB as u64,
        "{after} bytes are free, {free} and 1 MiB should be"
    );
    Ok(())
}
