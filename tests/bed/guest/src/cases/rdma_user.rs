// SPDX-License-Identifier: MIT OR Apache-2.0

//! Registration with a NIC by dma-buf, through p2pmem's library: RDMA WRITE and READ, bounds and access rights, large
//! registrations, and lifetime.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use p2pmem::rdma::{Nic, Queue};
use p2pmem::{Access, Buffer, Device, Error, Mapping, RegisterOptions, RegistrationMethod, RemoteMemory, Request};
use sideway::ibverbs::protection_domain::ProtectionDomain;

use super::{Bed, Case};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rdma-write",
        about: "RDMA between registered buffers transfers every byte, with virtual addresses and with an IOVA",
        topology: "nic",
        ruins: false,
        run: write_and_read,
    },
    Case {
        name: "rdma-bounds",
        about: "RDMA outside of a registration, with a wrong key, or against its access flags is refused",
        topology: "nic",
        ruins: false,
        run: bounds,
    },
    Case {
        name: "rdma-size",
        about: "200 MiB of a 256 MiB BAR can be registered; a too large request's error names BAR, size and users",
        topology: "nic",
        ruins: false,
        run: size,
    },
    Case {
        name: "rdma-held",
        about: "freed memory with a registration is not allocated again before the memory is deregistered",
        topology: "nic",
        ruins: false,
        run: held,
    },
];

pub(super) const MIB: usize = 1 << 20;
/// `IBV_WC_REM_ACCESS_ERR`
pub(super) const REMOTE_ACCESS: u32 = 10;

/// The open NIC with a protection domain, and an open file of p2pmem.
pub(super) struct Wire {
    pub(super) name: String,
    nic: Nic,
    pub(super) pd: Arc<ProtectionDomain>,
    device: Device,
}

impl Wire {
    /// Opens nic0 and p2pmem.
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

    /// Connects two queue pairs of the NIC with each other. Requests are posted to the first.
    pub(super) fn pair(&self) -> Result<(Queue, Queue)> {
        let (mut near, mut far) = (self.nic.queue(&self.pd)?, self.nic.queue(&self.pd)?);
        near.connect(&far.endpoint())?;
        far.connect(&near.endpoint())?;
        Ok((near, far))
    }

    /// Allocates `size` bytes from a provider, with the NIC as client.
    pub(super) fn alloc(&self, bed: &Bed, provider: &str, size: usize) -> Result<Buffer> {
        let id = bed.provider(provider)?.id;
        let request = Request::new(size as u64).near([self.nic.client().clone()]).provider(id);
        Ok(self.device.alloc(&request)?)
    }
}

/// Returns the word at byte `at` of pattern `seed`. Words differ between seeds and between offsets.
pub(super) fn word(seed: u64, at: usize) -> u64 {
    ((seed << 48) | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed
}

/// Returns the first `len` bytes of pattern `seed`.
pub(super) fn pattern(seed: u64, len: usize) -> Vec<u64> {
    (0..len).step_by(8).map(|at| word(seed, at)).collect()
}

/// Fills a mapping with pattern `seed`.
pub(super) fn fill(map: &Mapping, seed: u64) -> Result<()> {
    map.copy_from_slice(0, &pattern(seed, map.len()))?;
    map.flush();
    Ok(())
}

/// Fails unless a mapping has pattern `seed`.
pub(super) fn check(map: &Mapping, seed: u64) -> Result<()> {
    let mut words = vec![0u64; map.len() / 8];
    map.copy_to_slice(0, &mut words)?;
    compare(&words, &pattern(seed, map.len()))
}

/// Fails unless both slices are equal. The error names the first byte that differs.
pub(super) fn compare(found: &[u64], wanted: &[u64]) -> Result<()> {
    ensure!(
        found.len() == wanted.len(),
        "{} words instead of {}",
        found.len(),
        wanted.len()
    );
    if let Some(at) = found.iter().zip(wanted).position(|(a, b)| a != b) {
        bail!("byte {:#x} is {:#x} instead of {:#x}", 8 * at, found[at], wanted[at]);
    }
    Ok(())
}

/// Publishes accel1 in addition to accel0.
pub(super) fn publish_both(bed: &Bed) -> Result<()> {
    bed.publish("accel1")
}

fn write_and_read(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let wire = Wire::new(bed)?;
    let (source, target) = (wire.alloc(bed, "accel1", MIB)?, wire.alloc(bed, "accel0", MIB)?);
    let (from, to) = (source.map()?, target.map()?);
    let (mut queue, _far) = wire.pair()?;

    // Register the whole mapped buffers. Their keys use the program's virtual addresses.
    let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
    let received = target.register(&wire.pd, Access::ALL)?;
    ensure!(
        received.method() == RegistrationMethod::DmaBuf && received.addr() == to.as_ptr() as u64,
        "not registered by dma-buf at the mapping's address: {received:?}"
    );
    ensure!(received.nic() == wire.name, "registered with another NIC: {received:?}");
    fill(&from, 1)?;
    fill(&to, 2)?;
    queue.write(&sent, 0..MIB, &received.remote(), 0)?;
    check(&to, 1)?;
    fill(&to, 3)?;
    queue.read(&sent, 0..MIB, &received.remote(), 0)?;
    check(&from, 3)?;

    // Unaligned bytes in the middle of the buffer. The bytes next to them must not change.
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
        "RDMA WRITE of 4902 bytes to 70003: the bytes are wrong, or others changed"
    );
    drop((sent, received));

    // Without a mapping, the source's addresses start at 0. The target is a part of a buffer with an explicit IOVA.
    drop((from, to));
    let sent = source.register(&wire.pd, Access::LOCAL_READ)?;
    let part = RegisterOptions::new(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .range(65536..65536 + 8192)
        .iova(0x7000_0000);
    let received = target.register_with(&wire.pd, &part)?;
    ensure!(
        (sent.addr(), received.addr(), received.len()) == (0, 0x7000_0000, 8192),
        "wrong addresses or length of the registrations: {sent:?} {received:?}"
    );
    queue.write(&sent, 0..8192, &received.remote(), 0)?;
    let to = target.map()?;
    let mut words = vec![0u64; 1024];
    to.copy_to_slice(65536, &mut words)?;
    compare(&words, &pattern(4, 8192))?;

    // Deregistration ends the export and the attachment.
    let info = target.info()?;
    ensure!(
        (info.exports, info.attachments) == (1, 1),
        "expected 1 export and 1 attachment while registered: {info:?}"
    );
    received.deregister()?;
    let info = target.info()?;
    ensure!(
        (info.exports, info.attachments) == (0, 0),
        "expected no export and no attachment after deregistration: {info:?}"
    );
    Ok(())
}

/// Fails unless a transfer failed with `status`.
pub(super) fn ended(what: &str, result: Result<(), Error>, status: u32) -> Result<()> {
    match result {
        Err(Error::Transfer { status: got, .. }) if got == status => Ok(()),
        Err(error) => bail!("{what} failed with {error} instead of status {status}"),
        Ok(()) => bail!("{what} succeeded instead of failing with status {status}"),
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
    // Register the middle half, so that the buffer has memory on both sides that the NIC must not access.
    let middle = RegisterOptions::new(Access::ALL).range((MIB / 4) as u64..(3 * MIB / 4) as u64);
    let received = target.register_with(&wire.pd, &middle)?;
    let remote = received.remote();
    let last = remote.len;
    let outside: [(&str, u64, usize); 4] = [
        ("access one byte before the registration", 0u64.wrapping_sub(1), 8),
        ("access one byte past the registration", last - 7, 8),
        ("access right behind the registration", last, 4096),
        ("access 1 TiB behind the registration", 1 << 40, 4096),
    ];
    for (what, offset, len) in outside {
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
    ended(
        "RDMA WRITE with another key",
        queue.write(&sent, 0..8, &wrong_key, 0),
        REMOTE_ACCESS,
    )?;
    drop(received);

    let read_only = target.register(&wire.pd, Access::REMOTE_READ)?;
    let (mut queue, _far) = wire.pair()?;
    ended(
        "RDMA WRITE to a registration with REMOTE_READ only",
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
        "REMOTE_WRITE without LOCAL_WRITE: expected EINVAL with a remedy, got {error}"
    );
    Ok(())
}

fn size(bed: &mut Bed) -> Result<()> {
    let wire = Wire::new(bed)?;
    let buffer = wire.alloc(bed, "accel0", 200 * MIB)?;
    let registration = buffer.register(&wire.pd, Access::ALL)?;
    ensure!(
        registration.len() == 200 * MIB,
        "wrong length of the registration: {registration:?}"
    );
    // The NIC can write to the last page of the registration.
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
        Ok(_) => bail!("{} bytes were allocated although {free} are free", free + 1),
        Err(error) => error.to_string(),
    };
    let address = &bed.device("accel0")?.bdf;
    let me = format!("pid {} (", std::process::id());
    for wanted in [&format!("{address} BAR 2 has "), " MiB (without ", &me, ") 200.0 MiB"] {
        ensure!(error.contains(wanted), "{wanted:?} is not in the error {error:?}");
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
    // Allocate all other memory and fill it. Transfers of the registration must not change it.
    let rest = wire.alloc(bed, "accel0", bed.provider("accel0")?.largest as usize)?;
    let map = rest.map()?;
    map.fill(0..map.len(), 0xab)?;
    fill(&from, 1)?;
    let (mut queue, _far) = wire.pair()?;
    queue.write(&sent, 0..MIB, &remote, 0)?;
    fill(&from, 2)?;
    queue.read(&sent, 0..MIB, &remote, 0)?;
    check(&from, 1).context("RDMA READ did not return the data of the RDMA WRITE")?;
    let mut words = vec![0u64; map.len() / 8];
    map.copy_to_slice(0, &mut words)?;
    ensure!(
        words.iter().all(|w| *w == 0xabab_abab_abab_abab),
        "an RDMA WRITE changed another buffer"
    );
    drop((map, rest));
    received.deregister()?;
    let after = bed.settled()?.0;
    ensure!(
        after == free + MIB as u64,
        "{after} bytes are free after deregistration instead of {}",
        free + MIB as u64
    );
    Ok(())
}
