// SPDX-License-Identifier: MIT OR Apache-2.0

//! `ibv_reg_mr()` of memory that cannot be registered: errno, message of the refusal, and no registration left behind.

use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::busy::Busy;
use super::peer::{Held, MIB, Row, await_rows, counted, nic, rows};
use super::rules::AdminRule;
use super::{Bed, Case, NODE, alloc, errno, expect};
use crate::sys::Mapping;
use crate::verbs::Adapter;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "peer-bad",
        about: "ranges that are not within one buffer are refused with the right errno and message",
        topology: "nic",
        ruins: false,
        run: bad,
    },
    Case {
        name: "peer-locked-memory",
        about: "RLIMIT_MEMLOCK limits registered buffers like host memory, and deregistration uncharges them",
        topology: "nic",
        ruins: false,
        run: locked_memory,
    },
    Case {
        name: "peer-unmap",
        about: "ibv_reg_mr() races with another thread that unmaps half of the range: it succeeds or fails with EFAULT",
        topology: "nic",
        ruins: false,
        run: unmap,
    },
    Case {
        name: "peer-rules",
        about: "an adapter that a rule denies, or whose path exceeds max_class, is refused, and the message says why",
        topology: "nic",
        ruins: false,
        run: denied,
    },
    Case {
        name: "peer-unreachable",
        about: "an adapter that cannot reach the provider is refused, and the message says why",
        topology: "nic-unreachable",
        ruins: false,
        run: unreachable,
    },
];

fn bad(bed: &mut Bed) -> Result<()> {
    let nic = nic(bed)?;
    let before = counted()?;
    let try_it = |address: u64, len: usize| nic.register(address, len).map(|_| ());
    let (held, other) = (Held::new(bed, "accel0", MIB)?, Held::new(bed, "accel0", MIB)?);
    let start = held.map.address();
    let because = |words: &str| -> Result<()> {
        let reason = held.reason()?;
        ensure!(reason.contains(words), "{words:?} is not in the reason {reason:?}");
        Ok(())
    };

    // Ranges that the RDMA core refuses before it calls a client.
    expect("ibv_reg_mr() of 0 bytes", try_it(start, 0), libc::EINVAL)?;
    expect(
        "ibv_reg_mr() of a range that overflows",
        try_it(start, usize::MAX - 4096),
        libc::EINVAL,
    )?;

    // Memory of /dev/zero behind the buffer, and before it.
    let zero = OpenOptions::new().read(true).write(true).open("/dev/zero")?;
    let mixed = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    mixed.replace_part(MIB - 4096, 4096, zero.as_fd(), 0).map_err(errno)?;
    expect(
        "ibv_reg_mr() of a range that ends outside of the buffer",
        try_it(mixed.address(), MIB),
        libc::EFAULT,
    )?;
    because("begin in a buffer")?;
    let refused = counted()?["refused"];
    mixed.replace_part(0, 4096, zero.as_fd(), 0).map_err(errno)?;
    expect(
        "ibv_reg_mr() of a range that begins outside of the buffer",
        try_it(mixed.address(), MIB - 4096),
        libc::EREMOTEIO,
    )?;
    ensure!(
        counted()?["refused"] == refused,
        "p2pmem refused a range that begins outside of its buffers, instead of not claiming it"
    );
    drop(
        nic.register(mixed.address(), 4096)
            .map_err(errno)
            .context("ibv_reg_mr() of a page of host memory")?,
    );

    // A range with an unmapped page.
    let mut short = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    short.unmap_part(MIB - 4096, 4096).map_err(errno)?;
    expect(
        "ibv_reg_mr() of a range with an unmapped page",
        try_it(short.address() + 8192, MIB - 8192),
        libc::EFAULT,
    )?;
    because("is not mapped to it")?;

    // A range over two buffers.
    let two = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    two.replace_part(MIB / 2, MIB / 2, other.file.as_fd(), other.buffer.mmap_offset)
        .map_err(errno)?;
    expect(
        "ibv_reg_mr() of a range over two buffers",
        try_it(two.address(), MIB),
        libc::EXDEV,
    )?;
    because("into another one")?;
    drop(
        nic.register(two.address(), MIB / 2)
            .map_err(errno)
            .context("ibv_reg_mr() of the first of two buffers")?,
    );
    drop(
        nic.register(two.address() + MIB as u64 / 2, MIB / 2)
            .map_err(errno)
            .context("ibv_reg_mr() of the second of two buffers")?,
    );

    // More pieces than the limit: the pages are mapped in reverse order, so each is a piece.
    let pieces = 65;
    let many = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    for n in 0..pieces {
        let offset = held.buffer.mmap_offset + 4096 * (pieces - 1 - n) as u64;
        many.replace_part(4096 * n, 4096, held.file.as_fd(), offset)
            .map_err(errno)?;
    }
    expect(
        "ibv_reg_mr() of 65 pieces",
        try_it(many.address(), 4096 * pieces),
        libc::E2BIG,
    )?;
    because("more than 64 pieces")?;
    let region = nic
        .register(many.address(), 4096 * (pieces - 1))
        .map_err(errno)
        .context("ibv_reg_mr() of 64 pieces")?;
    ensure!(
        rows()?.iter().any(|row| row.entries == 64),
        "no registration has 64 entries: {:#?}",
        rows()?
    );
    drop(region);

    // A mapping of a file that was opened read-only.
    let reader = OpenOptions::new().read(true).open(NODE)?;
    let buffer = alloc(reader.as_fd(), 4096).map_err(errno)?;
    let map = Mapping::new(
        reader.as_fd(),
        buffer.mmap_offset,
        4096,
        libc::PROT_READ,
        libc::MAP_SHARED,
    )
    .map_err(errno)?;
    expect(
        "ibv_reg_mr() of a read-only mapping",
        try_it(map.address(), 4096),
        libc::EACCES,
    )?;
    let reason = super::explain_last(reader.as_fd())?.2;
    ensure!(
        reason.contains("reading only"),
        "\"reading only\" is not in the reason {reason:?}"
    );
    drop((map, reader));

    // Memory of a device that is no provider, mapped through sysfs.
    bed.unpublish("accel1")?;
    let bar = bed.device("accel1")?.sysfs().join("resource2");
    let bar = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&bar)
        .with_context(|| bar.display().to_string())?;
    let map = Mapping::shared(bar.as_fd(), 0, 4096).map_err(errno)?;
    let acquired = counted()?["acquire"];
    match try_it(map.address(), 4096) {
        Ok(()) => bail!("memory of a device that is no provider was registered"),
        Err(error) => println!("memory of a device that is no provider: {}", errno(error)),
    }
    ensure!(
        counted()?["acquire"] == acquired,
        "p2pmem claimed memory of a device that is no provider"
    );
    drop(map);

    // A revoked buffer.
    bed.unbind("accel0")?;
    expect("ibv_reg_mr() of a revoked buffer", try_it(start, MIB), libc::ENODEV)?;
    because("is revoked: provider")?;
    ensure!(rows()?.is_empty(), "registrations are left: {:#?}", rows()?);

    let after = counted()?;
    let calls = |name: &str| after[name] - before[name];
    ensure!(
        calls("refused") == 6 && calls("acquire") == calls("release") && calls("out_of_order") == 0,
        "expected 6 refusals, a release for each acquire, and no call out of order: {before:?} before, {after:?} after"
    );
    Ok(())
}

/// The name of the part that registers with a low RLIMIT_MEMLOCK.
pub(super) const PART: &str = "peer-locked-memory";

/// Registers buffers. Runs without CAP_IPC_LOCK, and with an RLIMIT_MEMLOCK of 64 KiB.
pub(super) fn part() -> Result<()> {
    let file = super::open()?;
    let buffer = alloc(file.as_fd(), MIB as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, MIB).map_err(errno)?;
    let name = std::env::var("P2PMEM_RDMA_NIC0").context("P2PMEM_RDMA_NIC0 is not set: it names the NIC")?;
    let nic = Adapter::open(&name)?;
    expect(
        "ibv_reg_mr() of 1 MiB with RLIMIT_MEMLOCK of 64 KiB",
        nic.register(map.address(), MIB).map(|_| ()),
        libc::ENOMEM,
    )?;
    for _ in 0..100 {
        // Deregistration uncharges the memory.
        drop(
            nic.register(map.address(), 16384)
                .map_err(errno)
                .context("ibv_reg_mr() of 16 KiB with RLIMIT_MEMLOCK of 64 KiB")?,
        );
    }
    Ok(())
}

fn locked_memory(bed: &mut Bed) -> Result<()> {
    let me = std::env::current_exe()?;
    let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
    let output = Command::new("prlimit")
        .args([
            "--memlock=65536:65536",
            "setpriv",
            "--inh-caps=-ipc_lock",
            "--bounding-set=-ipc_lock",
        ])
        .arg(me)
        .args(["part", PART])
        .env("P2PMEM_RDMA_NIC0", nic)
        .output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "part {PART}: {}: {stderr}", output.status);
    await_rows("no registration is listed", <[Row]>::is_empty)?;
    Ok(())
}

fn unmap(bed: &mut Bed) -> Result<()> {
    let nic = nic(bed)?;
    let held = Held::new(bed, "accel0", MIB)?;
    let (fd, offset) = (held.file.as_fd(), held.buffer.mmap_offset);
    let map = Mapping::shared(fd, offset, MIB).map_err(errno)?;
    let zero = OpenOptions::new().read(true).write(true).open("/dev/zero")?;
    let (mut made, mut refused) = (0, 0);
    let remap = |busy: &Busy| -> Result<()> {
        while busy.goes_on() {
            map.replace_part(MIB / 2, MIB / 2, zero.as_fd(), 0).map_err(errno)?;
            map.replace_part(MIB / 2, MIB / 2, fd, offset + MIB as u64 / 2)
                .map_err(errno)?;
            busy.serve();
        }
        Ok(())
    };
    let busy = Busy::during(&[&remap], |_| {
        for _ in 0..200 {
            match nic.register(map.address(), MIB) {
                Ok(_) => made += 1,
                Err(libc::EFAULT) => refused += 1,
                Err(other) => bail!("ibv_reg_mr() during unmapping: {}", errno(other)),
            }
        }
        Ok(())
    })?;
    let remaps = busy.served();
    println!("{made} registrations, {refused} refusals, {remaps} remaps by the other thread");
    ensure!(remaps > 0, "the other thread did not remap the range once");
    ensure!(rows()?.is_empty(), "registrations are left: {:#?}", rows()?);
    // A registration outlives the mapping.
    let (source, region) = (Held::new(bed, "accel0", 4096)?, held.register(&nic)?);
    let sent = source.register(&nic)?;
    super::peer::fill(&source.map, 9);
    held.map.vacate().map_err(errno)?;
    super::peer::arrives(&nic, &sent, 4096, &region, 65536)?;
    super::peer::check(&map, 65536, 4096, 9, 0)
}

fn denied(bed: &mut Bed) -> Result<()> {
    let nic = nic(bed)?;
    let held = Held::new(bed, "accel0", MIB)?;
    let try_it = || nic.register(held.map.address(), MIB).map(drop);
    // Registered before the rule exists. A new rule does not revoke registrations.
    let before = held.register(&nic)?;
    let rule = AdminRule::new(
        "10-not-this",
        &[("client", &bed.device("nic0")?.bdf), ("action", "deny")],
    )?;
    expect("ibv_reg_mr() with a denied adapter", try_it(), libc::EACCES)?;
    let reason = held.reason()?;
    ensure!(
        reason.contains("rule 10-not-this"),
        "\"rule 10-not-this\" is not in the reason {reason:?}"
    );
    ensure!(rows()?.len() == 1, "expected one registration: {:#?}", rows()?);
    rule.set("enable", "0")?;
    rule.set("action", "none")?;
    rule.set("max_class", "DEV")?;
    rule.set("enable", "1")?;
    expect("ibv_reg_mr() beyond max_class", try_it(), libc::EACCES)?;
    let reason = held.reason()?;
    ensure!(
        reason.contains("too far"),
        "\"too far\" is not in the reason {reason:?}"
    );
    drop(before);
    drop(rule);
    drop(held.register(&nic)?);
    ensure!(rows()?.is_empty(), "registrations are left: {:#?}", rows()?);
    Ok(())
}

fn unreachable(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let nic = nic(bed)?;
    let (near, far) = (Held::new(bed, "accel0", MIB)?, Held::new(bed, "accel1", MIB)?);
    drop(near.register(&nic)?);
    expect(
        "ibv_reg_mr() of unreachable memory",
        nic.register(far.map.address(), MIB).map(|_| ()),
        libc::EHOSTUNREACH,
    )?;
    let reason = far.reason()?;
    for wanted in [&bed.device("nic0")?.bdf, &bed.device("accel1")?.bdf, "host bridge"] {
        ensure!(reason.contains(wanted), "{wanted:?} is not in the reason {reason:?}");
    }
    println!("{reason}");
    ensure!(rows()?.is_empty(), "registrations are left: {:#?}", rows()?);
    drop(far);
    bed.unpublish("accel1")
}
