// SPDX-License-Identifier: MIT OR Apache-2.0

//! Placement with several providers: the chosen provider, the verdicts of the others, and unreachable providers.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Result, ensure};
use p2pmem_sys as abi;

use super::{Bed, Case, alloc, buffer, errno, expect, explain_last, free, open, read, request, write};
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "nearest",
        about: "the nearest provider with enough free bytes is chosen, and the verdicts name the right reasons",
        topology: "demo",
        ruins: false,
        run: nearest,
    },
    Case {
        name: "hops",
        about: "for every pair of provider and client, PATHS reports as many hops as the kernel's distance",
        topology: "demo",
        ruins: false,
        run: hops,
    },
    Case {
        name: "adopted",
        about: "memory of an adopted drive (CMB) is allocated, returned to its pool, and revoked on unbind",
        topology: "demo",
        ruins: false,
        run: adopted,
    },
    Case {
        name: "unreachable",
        about: "a provider that the kernel reports as unreachable is never chosen, and the message says so",
        topology: "unreachable",
        ruins: false,
        run: unreachable,
    },
];

const MIB: u64 = 1 << 20;

/// Allocates `size` bytes with the named devices as clients. Returns the answer of `P2PMEM_IOC_ALLOC`.
fn near(bed: &Bed, fd: BorrowedFd<'_>, size: u64, names: &[&str]) -> Result<Result<abi::p2pmem_alloc, i32>> {
    near_with(bed, fd, size, names, |_| ())
}

/// Like [`near`], with further fields of the request set by `more`.
fn near_with(
    bed: &Bed,
    fd: BorrowedFd<'_>,
    size: u64,
    names: &[&str],
    more: impl FnOnce(&mut abi::p2pmem_request),
) -> Result<Result<abi::p2pmem_alloc, i32>> {
    let mut clients = names.iter().map(|name| bed.address(name)).collect::<Result<Vec<_>>>()?;
    let mut a = request(size);
    a.req.nr_clients = clients.len() as u32;
    more(&mut a.req);
    Ok(sys::alloc(fd, &mut a, Memory::Slice(&mut clients)).map(|()| a))
}

/// Returns the explanation of the file's last decision: provider and verdict code of each verdict, and the message.
fn last(fd: BorrowedFd<'_>) -> Result<(Vec<(u32, u32)>, String)> {
    let (_, verdicts, text) = explain_last(fd)?;
    Ok((verdicts.iter().map(|v| (v.provider, v.code)).collect(), text))
}

/// Fails unless `codes` has verdict `code` for a provider.
fn verdict(codes: &[(u32, u32)], provider: u32, code: u32) -> Result<()> {
    ensure!(
        codes.contains(&(provider, code)),
        "provider {provider} has not verdict {code}; verdicts: {codes:?}"
    );
    Ok(())
}

fn nearest(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let id = |name| -> Result<u32> { Ok(bed.provider(name)?.id) };
    let (cmb, accel0, accel1, shm0) = (id("nvme1")?, id("accel0")?, id("accel1")?, id("shm0")?);
    let drives = ["nvme0", "nvme1"];
    let file = open()?;
    let fd = file.as_fd();

    // nvme1's CMB and accel0 are below the same switch as both drives. The CMB has the smaller sum of hops.
    let small = near(bed, fd, MIB, &drives)?.map_err(errno)?;
    ensure!(small.provider == cmb, "1 MiB near both drives: {small:?}");
    let (codes, _) = last(fd)?;
    verdict(&codes, cmb, abi::P2PMEM_VERDICT_CHOSEN)?;
    verdict(&codes, accel0, abi::P2PMEM_VERDICT_HOPS)?;
    verdict(&codes, accel1, abi::P2PMEM_VERDICT_CLASS)?;
    verdict(&codes, shm0, abi::P2PMEM_VERDICT_CLASS)?;

    // The CMB is smaller than 16 MiB.
    let large = near(bed, fd, 16 * MIB, &drives)?.map_err(errno)?;
    ensure!(
        large.provider == accel0 && large.class == abi::P2PMEM_PATH_SAME_SWITCH,
        "16 MiB near both drives: {large:?}"
    );
    verdict(&last(fd)?.0, cmb, abi::P2PMEM_VERDICT_TOO_SMALL)?;

    // With accel0 full, shm0 below the same host bridge is next, before accel1 on the other socket.
    let rest = bed.provider("accel0")?.largest;
    let all = near_with(bed, fd, rest, &[], |req| req.provider = accel0)?.map_err(errno)?;
    let mut filler = Vec::new();
    while let Ok(piece) = near_with(bed, fd, 4 * MIB, &[], |req| req.provider = accel0)? {
        filler.push(piece.handle);
    }
    let next = near(bed, fd, 16 * MIB, &drives)?.map_err(errno)?;
    ensure!(
        next.provider == shm0 && next.class == abi::P2PMEM_PATH_HOST_BRIDGE,
        "16 MiB near both drives with accel0 full: {next:?}"
    );
    verdict(&last(fd)?.0, accel0, abi::P2PMEM_VERDICT_FULL)?;

    // max_class excludes shm0, so no provider has enough free bytes, and the message says so.
    let near_only = near_with(bed, fd, 16 * MIB, &drives, |req| {
        req.max_class = abi::P2PMEM_PATH_SAME_SWITCH;
    })?;
    expect("16 MiB in the switch with accel0 full", near_only, libc::ENOSPC)?;
    let (codes, text) = last(fd)?;
    verdict(&codes, shm0, abi::P2PMEM_VERDICT_TOO_FAR)?;
    ensure!(
        text.contains("free"),
        "the message does not name the free bytes: {text:?}"
    );

    // A required provider is chosen at any distance. A preferred one is not chosen if it is full.
    let far = near_with(bed, fd, MIB, &drives, |req| req.provider = accel1)?.map_err(errno)?;
    ensure!(
        far.provider == accel1 && far.class == abi::P2PMEM_PATH_SYSTEM,
        "1 MiB with accel1 required: {far:?}"
    );
    let preferred = near_with(bed, fd, 16 * MIB, &drives, |req| {
        (req.provider, req.flags) = (accel0, abi::P2PMEM_ALLOC_PREFER);
    })?
    .map_err(errno)?;
    ensure!(
        preferred.provider == shm0,
        "16 MiB with accel0 preferred, but full: {preferred:?}"
    );

    for handle in [small, large, all, next, far, preferred]
        .map(|a| a.handle)
        .into_iter()
        .chain(filler)
    {
        free(fd, handle).map_err(errno)?;
    }
    bed.unpublish("accel1")?;
    bed.unpublish("shm0")
}

fn hops(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let file = open()?;
    let names = ["accel0", "accel1", "nvme0", "nvme1", "shm0"];
    let mut clients = names
        .map(|name| bed.address(name))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let mut rows = [abi::p2pmem_path::default(); 32];
    let mut paths = abi::p2pmem_paths {
        nr_clients: clients.len() as u32,
        nr_paths: 32,
        flags: abi::P2PMEM_PATHS_RESCAN,
        ..Default::default()
    };
    sys::paths(
        file.as_fd(),
        &mut paths,
        Memory::Slice(&mut clients),
        Memory::Slice(&mut rows),
    )
    .map_err(errno)?;
    ensure!(
        paths.nr_paths == 20,
        "{} paths instead of 20 for 4 providers and 5 clients",
        paths.nr_paths
    );
    for path in &rows[..20] {
        ensure!(
            path.distance >= 0 && path.hops == path.distance as u32,
            "hops differ from the distance: {path:?}"
        );
        let own = path.distance == 0;
        ensure!(
            own == (path.class == abi::P2PMEM_PATH_SAME_DEVICE),
            "path class SAME_DEVICE without distance 0, or the reverse: {path:?}"
        );
        // The emulated links report width and speed, so the bandwidth is known.
        ensure!(own || path.bandwidth > 0, "unknown bandwidth: {path:?}");
    }
    bed.unpublish("accel1")?;
    bed.unpublish("shm0")
}

/// Returns the free bytes of a device's pool in the kernel.
fn available(bed: &Bed, name: &str) -> Result<u64> {
    Ok(read(&bed.device(name)?.sysfs().join("p2pmem/available"))?.parse()?)
}

fn adopted(bed: &mut Bed) -> Result<()> {
    let before = available(bed, "nvme1")?;
    let row = bed.provider("nvme1")?;
    ensure!(
        row.kind == abi::P2PMEM_KIND_ADOPTED && row.kernel_reserve > 0 && row.size + row.kernel_reserve == 16 * MIB,
        "wrong row of the adopted provider: {row:?}"
    );
    let file = open()?;
    let fd = file.as_fd();
    // Alignment by p2pmem: the kernel's pool cannot align to 1 MiB.
    let mut a = request(MIB);
    (a.req.provider, a.req.align) = (row.id, MIB);
    sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map_err(errno)?;
    ensure!(a.bar_offset % MIB == 0, "the buffer is not aligned to 1 MiB: {a:?}");
    ensure!(
        available(bed, "nvme1")? + MIB <= before,
        "the free bytes of the driver's pool did not shrink by the buffer's size"
    );
    // Another drive does DMA to the buffer.
    let map = Mapping::shared(fd, a.mmap_offset, MIB as usize).map_err(errno)?;
    let drive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(bed.block("nvme0")?)?;
    map.set(0, u64::MAX);
    ensure!(map.fill_from(&drive, 64 * MIB, 0, 64 << 10)? == 64 << 10);
    ensure!(map.get(0) == 0, "the drive's zeros did not arrive in the buffer");
    drop(map);
    free(fd, a.handle).map_err(errno)?;
    super::inflight::until("the driver's pool has its memory back", || {
        Ok(available(bed, "nvme1")? == before)
    })?;

    // The driver is unbound while a buffer is mapped.
    let mut a = request(MIB);
    a.req.provider = row.id;
    sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map_err(errno)?;
    let map = Mapping::shared(fd, a.mmap_offset, MIB as usize).map_err(errno)?;
    map.set(0, 1);
    sys::survive_bus_errors()?;
    bed.unbind("nvme1")?;
    ensure!(buffer(fd, a.handle).map_err(errno)?.state == abi::P2PMEM_BUFFER_GONE);
    let errors = sys::bus_errors();
    map.get(0);
    ensure!(
        sys::bus_errors() == errors + 1,
        "no SIGBUS: the mapping can still be read after the driver was unbound"
    );
    ensure!(
        bed.provider("nvme1").is_err(),
        "nvme1 is still listed as a provider after its driver was unbound"
    );

    // The driver is bound again: a new provider with a new ID.
    write(Path::new("/sys/bus/pci/drivers/nvme/bind"), &bed.device("nvme1")?.bdf)?;
    let again = bed.provider("nvme1")?;
    ensure!(
        again.id != row.id && again.size == row.size,
        "after the driver was bound again, {row:?} is {again:?}"
    );
    expect(
        "ALLOC that requires the ID of the removed provider",
        alloc_from(fd, row.id),
        libc::ENODEV,
    )
}

/// Allocates 4 KiB from the provider with this ID.
fn alloc_from(fd: BorrowedFd<'_>, provider: u32) -> Result<abi::p2pmem_alloc, i32> {
    let mut a = request(4096);
    a.req.provider = provider;
    sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map(|()| a)
}

fn unreachable(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let (accel0, accel1, shm0) = (bed.provider("accel0")?, bed.provider("accel1")?, bed.provider("shm0")?);
    let file = open()?;
    let fd = file.as_fd();
    // accel0 and nvme0 are below one switch, so the path does not cross the root complex.
    let size = accel0.largest;
    let a = near(bed, fd, size, &["nvme0"])?.map_err(errno)?;
    ensure!(a.provider == accel0.id, "ALLOC near nvme0 did not choose accel0: {a:?}");
    let (codes, _) = last(fd)?;
    verdict(&codes, accel1.id, abi::P2PMEM_VERDICT_UNREACHABLE)?;
    verdict(&codes, shm0.id, abi::P2PMEM_VERDICT_UNREACHABLE)?;
    // The only reachable provider is full. The empty, unreachable ones are not chosen.
    let full = near(bed, fd, size, &["nvme0"])?;
    expect("ALLOC near nvme0 with accel0 full", full, libc::ENOSPC)?;
    let named = near_with(bed, fd, 4096, &["nvme0"], |req| req.provider = accel1.id)?;
    expect("ALLOC near nvme0 with accel1 required", named, libc::ENODEV)?;
    let (_, text) = last(fd)?;
    ensure!(text.contains("reached"), "\"reached\" is not in the message: {text:?}");
    // A request without clients can use them.
    let any = alloc(fd, 4096).map_err(errno)?;
    ensure!(
        any.provider != accel0.id,
        "ALLOC without clients chose the full provider accel0: {any:?}"
    );
    free(fd, any.handle).map_err(errno)?;
    free(fd, a.handle).map_err(errno)?;
    bed.unpublish("accel1")?;
    bed.unpublish("shm0")
}
