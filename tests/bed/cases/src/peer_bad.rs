// SPDX-License-Identifier: MIT OR Apache-2.0

//! `ibv_reg_mr()` of memory that cannot be registered: the right errno, a reason, and nothing is lost.

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
        about: "ranges that are no buffer's, or more than one's, are refused with the errno and the reason",
        topology: "nic",
        ruins: false,
        run: bad,
    },
    Case {
        name: "peer-locked-memory",
        about: "RLIMIT_MEMLOCK counts for buffers as for host memory",
        topology: "nic",
        ruins: false,
        run: locked_memory,
    },
    Case {
        name: "peer-unmap",
        about: "another thread maps and unmaps half of what is being registered",
        topology: "nic",
        ruins: false,
        run: unmap,
    },
    Case {
        name: "peer-rules",
        about: "an adapter that a rule denies, or whose path is too far, is refused, and the message names the rule",
        topology: "nic",
        ruins: false,
        run: denied,
    },
    Case {
        name: "peer-unreachable",
        about: "an adapter that cannot reach the provider is refused, and the message states the reason",
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
        ensure!(reason.contains(words), "{words:?} is not in {reason:?}");
        Ok(())
    };

    // Arguments that the core itself refuses.
    expect("no bytes", try_it(start, 0), libc::EINVAL)?;
    expect("an overflow", try_it(start, usize::MAX - 4096), libc::EINVAL)?;

    // The range begins or ends in other memory.
    let zero = OpenOptions::new().read(true).write(true).open("/dev/zero")?;
    let mixed = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    mixed.replace_part(MIB - 4096, 4096, zero.as_fd(), 0).map_err(errno)?;
    expect("ends elsewhere", try_it(mixed.address(), MIB), libc::EFAULT)?;
    because("begin in a buffer")?;
    let refused = counted()?["refused"];
    mixed.replace_part(0, 4096, zero.as_fd(), 0).map_err(errno)?;
    expect("begins elsewhere", try_it(mixed.address(), MIB - 4096), libc::EREMOTEIO)?;
    ensure!(counted()?["refused"] == refused, "what is not ours was refused");
    drop(
        nic.register(mixed.address(), 4096)
            .map_err(errno)
            .context("host memory in between")?,
    );

    // A hole in the range.
    let mut short = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    short.unmap_part(MIB - 4096, 4096).map_err(errno)?;
    expect("a hole", try_it(short.address() + 8192, MIB - 8192), libc::EFAULT)?;
    because("is not mapped to it")?;

    // Two buffers.
    let two = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    two.replace_part(MIB / 2, MIB / 2, other.file.as_fd(), other.buffer.mmap_offset)
        .map_err(errno)?;
    expect("two buffers", try_it(two.address(), MIB), libc::EXDEV)?;
    because("into another one")?;
    drop(
        nic.register(two.address(), MIB / 2)
            .map_err(errno)
            .context("the first one")?,
    );
    drop(
        nic.register(two.address() + MIB as u64 / 2, MIB / 2)
            .map_err(errno)
            .context("the second one")?,
    );

    // More ranges than allowed: no two pages are adjacent.
    let pieces = 65;
    let many = Mapping::shared(held.file.as_fd(), held.buffer.mmap_offset, MIB).map_err(errno)?;
    for n in 0..pieces {
        let offset = held.buffer.mmap_offset + 4096 * (pieces - 1 - n) as u64;
        many.replace_part(4096 * n, 4096, held.file.as_fd(), offset)
            .map_err(errno)?;
    }
    expect("65 pieces", try_it(many.address(), 4096 * pieces), libc::E2BIG)?;
    because("more than 64 pieces")?;
    let region = nic
        .register(many.address(), 4096 * (pieces - 1))
        .map_err(errno)
        .context("64 pieces")?;
    ensure!(rows()?.iter().any(|row| row.entries == 64), "{:#?}", rows()?);
    drop(region);

    // A mapping of a file that was opened for reading only.
    let reader = OpenOptions::new().read(true).open(NODE)?;
    let shown = alloc(reader.as_fd(), 4096).map_err(errno)?;
    let map = Mapping::new(
        reader.as_fd(),
        shown.mmap_offset,
        4096,
        libc::PROT_READ,
        libc::MAP_SHARED,
    )
    .map_err(errno)?;
    expect("read-only", try_it(map.address(), 4096), libc::EACCES)?;
    let reason = super::explain_last(reader.as_fd())?.2;
    ensure!(reason.contains("reading only"), "{reason}");
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
        "memory of a device that is no provider was taken for ours"
    );
    drop(map);

    // A buffer that was revoked.
    bed.unbind("accel0")?;
    expect("revoked", try_it(start, MIB), libc::ENODEV)?;
    because("is revoked: provider")?;
    ensure!(rows()?.is_empty(), "{:#?}", rows()?);

    let after = counted()?;
    let calls = |name: &str| after[name] - before[name];
    ensure!(
        calls("refused") == 6 && calls("acquire") == calls("release") && calls("out_of_order") == 0,
        "{before:?} {after:?}"
    );
    Ok(())
}

/// The name of the process that registers with a low limit of locked memory.
pub(super) const PART: &str = "peer-locked-memory";

/// Runs without CAP_IPC_LOCK, and with a limit of 64 KiB.
pub(super) fn part() -> Result<()> {
    let file = super::open()?;
    let buffer = alloc(file.as_fd(), MIB as u64).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, MIB).map_err(errno)?;
    let name = std::env::var("P2PMEM_RDMA_NIC0").context("which NIC?")?;
    let nic = Adapter::open(&name)?;
    expect("1 MiB", nic.register(map.address(), MIB).map(|_| ()), libc::ENOMEM)?;
    for _ in 0..100 {
        // Registrations that have ended do not count.
        drop(nic.register(map.address(), 16384).map_err(errno).context("16 KiB")?);
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
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    await_rows("nothing is left", <[Row]>::is_empty)?;
    Ok(())
}

fn unmap(bed: &mut Bed) -> Result<()> {
    let nic = nic(bed)?;
    let held = Held::new(bed, "accel0", MIB)?;
    let (fd, offset) = (held.file.as_fd(), held.buffer.mmap_offset);
    let map = Mapping::shared(fd, offset, MIB).map_err(errno)?;
    let zero = OpenOptions::new().read(true).write(true).open("/dev/zero")?;
    let (mut made, mut refused) = (0, 0);
    let turn = |busy: &Busy| -> Result<()> {
        while busy.goes_on() {
            map.replace_part(MIB / 2, MIB / 2, zero.as_fd(), 0).map_err(errno)?;
            map.replace_part(MIB / 2, MIB / 2, fd, offset + MIB as u64 / 2)
                .map_err(errno)?;
            busy.serve();
        }
        Ok(())
    };
    let busy = Busy::during(&[&turn], |_| {
        for _ in 0..200 {
            match nic.register(map.address(), MIB) {
                Ok(_) => made += 1,
                Err(libc::EFAULT) => refused += 1,
                Err(other) => bail!("{}", errno(other)),
            }
        }
        Ok(())
    })?;
    let turns = busy.served();
    println!("{made} registrations, {refused} refusals, {turns} turns of the other thread");
    ensure!(turns > 0, "the other thread did nothing");
    ensure!(rows()?.is_empty(), "{:#?}", rows()?);
    // Unmapping registered memory does not end the registration.
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
    // A registration from before the rule stays: rules apply to later registrations only.
    let before = held.register(&nic)?;
    let rule = AdminRule::new(
        "10-not-this",
        &[("client", &bed.device("nic0")?.bdf), ("action", "deny")],
    )?;
    expect("a denied adapter", try_it(), libc::EACCES)?;
    let reason = held.reason()?;
    ensure!(reason.contains("rule 10-not-this"), "{reason:?}");
    ensure!(rows()?.len() == 1, "{:#?}", rows()?);
    rule.set("enable", "0")?;
    rule.set("action", "none")?;
    rule.set("max_class", "DEV")?;
    rule.set("enable", "1")?;
    expect("too far", try_it(), libc::EACCES)?;
    let reason = held.reason()?;
    ensure!(reason.contains("too far"), "{reason:?}");
    drop(before);
    drop(rule);
    drop(held.register(&nic)?);
    ensure!(rows()?.is_empty(), "{:#?}", rows()?);
    Ok(())
}

fn unreachable(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let nic = nic(bed)?;
    let (near, far) = (Held::new(bed, "accel0", MIB)?, Held::new(bed, "accel1", MIB)?);
    drop(near.register(&nic)?);
    expect(
        "out of reach",
        nic.register(far.map.address(), MIB).map(|_| ()),
        libc::EHOSTUNREACH,
    )?;
    let reason = far.reason()?;
    for wanted in [&bed.device("nic0")?.bdf, &bed.device("accel1")?.bdf, "host bridge"] {
        ensure!(reason.contains(wanted), "{wanted:?} is not in {reason:?}");
    }
    println!("{reason}");
    ensure!(rows()?.is_empty(), "{:#?}", rows()?);
    drop(far);
    bed.unpublish("accel1")
}
