// SPDX-License-Identifier: MIT OR Apache-2.0

//! Placement on machines with several providers: the choice, the verdicts on the others, and unreachable providers.

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
        about: "the nearest provider with enough space is chosen, and every other one's verdict is true",
        topology: "demo",
        ruins: false,
        run: nearest,
    },
    Case {
        name: "adopted",
        about: "memory of a drive's own is handed out, given back to its driver, and revoked when the driver goes",
        topology: "demo",
        ruins: false,
        run: adopted,
    },
    Case {
        name: "unreachable",
        about: "a provider that the kernel calls unreachable is never chosen, and the refusal says so",
        topology: "unreachable",
        ruins: false,
        run: unreachable,
    },
];

const MIB: u64 = 1 << 20;

/// Allocates near some devices.
fn near(bed: &Bed, fd: BorrowedFd<'_>, size: u64, names: &[&str]) -> Result<Result<abi::p2pmem_alloc, i32>> {
    near_with(bed, fd, size, names, |_| ())
}

/// As [`near`], with a function that changes the request.
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

/// Returns the explanation of the last decision: the verdict codes by provider, and the message.
fn last(fd: BorrowedFd<'_>) -> Result<(Vec<(u32, u32)>, String)> {
    let (_, verdicts, text) = explain_last(fd)?;
    Ok((verdicts.iter().map(|v| (v.provider, v.code)).collect(), text))
}

/// Fails unless a provider had this verdict.
fn verdict(codes: &[(u32, u32)], provider: u32, code: u32) -> Result<()> {
    ensure!(
        codes.contains(&(provider, code)),
        "provider {provider} should have verdict {code}: {codes:?}"
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

    // The drive's own memory is below the same switch too, and fewer hops away in total.
    let small = near(bed, fd, MIB, &drives)?.map_err(errno)?;
    ensure!(small.provider == cmb, "1 MiB near both drives: {small:?}");
    let (codes, _) = last(fd)?;
    verdict(&codes, cmb, abi::P2PMEM_VERDICT_CHOSEN)?;
    verdict(&codes, accel0, abi::P2PMEM_VERDICT_HOPS)?;
    verdict(&codes, accel1, abi::P2PMEM_VERDICT_CLASS)?;
    verdict(&codes, shm0, abi::P2PMEM_VERDICT_CLASS)?;

    // The drive's memory is too small for more.
    let large = near(bed, fd, 16 * MIB, &drives)?.map_err(errno)?;
    ensure!(
        large.provider == accel0 && large.class == abi::P2PMEM_PATH_SAME_SWITCH,
        "16 MiB near both drives: {large:?}"
    );
    verdict(&last(fd)?.0, cmb, abi::P2PMEM_VERDICT_TOO_SMALL)?;

    // With the near accelerator full, the next best is below the same host bridge, not on the other socket.
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

    // With no provider allowed beyond the switch there is no space, and the message states that.
    let near_only = near_with(bed, fd, 16 * MIB, &drives, |req| {
        req.max_class = abi::P2PMEM_PATH_SAME_SWITCH;
    })?;
    expect("16 MiB in the switch with accel0 full", near_only, libc::ENOSPC)?;
    let (codes, text) = last(fd)?;
    verdict(&codes, shm0, abi::P2PMEM_VERDICT_TOO_FAR)?;
    ensure!(
        text.contains("free"),
        "the message does not name the missing space: {text:?}"
    );

    // A provider that the request names is taken, however far; a provider that is only preferred is passed over if it is full.
    let far = near_with(bed, fd, MIB, &drives, |req| req.provider = accel1)?.map_err(errno)?;
    ensure!(
        far.provider == accel1 && far.class == abi::P2PMEM_PATH_SYSTEM,
        "accel1 by name: {far:?}"
    );
    let wish = near_with(bed, fd, 16 * MIB, &drives, |req| {
        (req.provider, req.flags) = (accel0, abi::P2PMEM_ALLOC_PREFER);
    })?
    .map_err(errno)?;
    ensure!(wish.provider == shm0, "accel0 preferred, but full: {wish:?}");

    for handle in [small, large, all, next, far, wish]
        .map(|a| a.handle)
        .into_iter()
        .chain(filler)
    {
        free(fd, handle).map_err(errno)?;
    }
    bed.unpublish("accel1")?;
    bed.unpublish("shm0")
}

/// Returns the bytes in the kernel's own pool of a device.
fn available(bed: &Bed, name: &str) -> Result<u64> {
    Ok(read(&bed.device(name)?.sysfs().join("p2pmem/available"))?.parse()?)
}

fn adopted(bed: &mut Bed) -> Result<()> {
    let before = available(bed, "nvme1")?;
    let row = bed.provider("nvme1")?;
    ensure!(
        row.kind == abi::P2PMEM_KIND_ADOPTED && row.kernel_reserve > 0 && row.size + row.kernel_reserve == 16 * MIB,
        "{row:?}"
    );
    let file = open()?;
    let fd = file.as_fd();
    // An alignment that the kernel's pool does not support.
    let mut a = request(MIB);
    (a.req.provider, a.req.align) = (row.id, MIB);
    sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map_err(errno)?;
    ensure!(a.bar_offset % MIB == 0, "{a:?}");
    ensure!(
        available(bed, "nvme1")? + MIB <= before,
        "nothing was taken from the driver's pool"
    );
    // Another drive writes to the buffer.
    let map = Mapping::shared(fd, a.mmap_offset, MIB as usize).map_err(errno)?;
    let drive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(bed.block("nvme0")?)?;
    map.set(0, u64::MAX);
    ensure!(map.fill_from(&drive, 64 * MIB, 0, 64 << 10)? == 64 << 10);
    ensure!(map.get(0) == 0, "the drive's zeroes did not arrive");
    drop(map);
    free(fd, a.handle).map_err(errno)?;
    super::inflight::until("the memory is back in the driver's pool", || {
        Ok(available(bed, "nvme1")? == before)
    })?;

    // The driver is unbound with a buffer in use.
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
    ensure!(sys::bus_errors() == errors + 1, "no SIGBUS");
    ensure!(
        bed.provider("nvme1").is_err(),
        "a device without a driver is still a provider"
    );

    // The driver is bound again.
    write(Path::new("/sys/bus/pci/drivers/nvme/bind"), &bed.device("nvme1")?.bdf)?;
    let again = bed.provider("nvme1")?;
    ensure!(
        again.id != row.id && again.size == row.size,
        "{row:?} came back as {again:?}"
    );
    expect(
        "the old provider by its number",
        sys_alloc_named(fd, row.id),
        libc::ENODEV,
    )
}

fn sys_alloc_named(fd: BorrowedFd<'_>, provider: u32) -> Result<abi::p2pmem_alloc, i32> {
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
    // Below the switch the root complex does not matter.
    let size = accel0.largest;
    let a = near(bed, fd, size, &["nvme0"])?.map_err(errno)?;
    ensure!(a.provider == accel0.id, "{a:?}");
    let (codes, _) = last(fd)?;
    verdict(&codes, accel1.id, abi::P2PMEM_VERDICT_UNREACHABLE)?;
    verdict(&codes, shm0.id, abi::P2PMEM_VERDICT_UNREACHABLE)?;
    // The only reachable provider is full. The others are empty, and still not chosen.
    let full = near(bed, fd, size, &["nvme0"])?;
    expect("with accel0 full", full, libc::ENOSPC)?;
    let named = near_with(bed, fd, 4096, &["nvme0"], |req| req.provider = accel1.id)?;
    expect("accel1 by name", named, libc::ENODEV)?;
    let (_, text) = last(fd)?;
    ensure!(
        text.contains("reached"),
        "the message does not state the reason: {text:?}"
    );
    // Without a client, the unreachable providers are as good as the others.
    let any = alloc(fd, 4096).map_err(errno)?;
    ensure!(any.provider != accel0.id, "{any:?}");
    free(fd, any.handle).map_err(errno)?;
    free(fd, a.handle).map_err(errno)?;
    bed.unpublish("accel1")?;
    bed.unpublish("shm0")
}
