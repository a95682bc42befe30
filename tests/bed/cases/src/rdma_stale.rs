// SPDX-License-Identifier: MIT OR Apache-2.0

//! Writes of a NIC to a buffer after the buffer's end: none arrives.

use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use p2pmem::{Access, Error, Mapping, Registration, RemoteMemory};

use super::life::ended_within;
use super::rdma_user::{MIB, REMOTE_ACCESS, Wire, check, compare, ended, fill, pattern, publish_both, word};
use super::{Bed, Case, errno};
use crate::sys;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rdma-stale-unbind",
        about: "of 20 writes after the provider was removed, and as many after it came back, none reaches the memory",
        topology: "nic",
        ruins: false,
        run: stale_unbind,
    },
    Case {
        name: "rdma-stale-free",
        about: "of 20 writes to a buffer that was freed, none reaches the next owner",
        topology: "nic",
        ruins: false,
        run: stale_free,
    },
];

/// The number of writes that are tried after an end.
const ATTEMPTS: u64 = 20;

/// The results of writes after an end.
#[derive(Debug, serde::Serialize)]
struct Stale {
    end: &'static str,
    stale_attempts: u64,
    stale_writes: u64,
    refused: u64,
    revoke_ms: f64,
}

/// Tries writes to memory after its end, each through a new connection, of various lengths and to various places, and checks
/// all of the memory after each write. `memory` reads all of the memory.
fn attempts(
    wire: &Wire,
    end: &'static str,
    (source, sent): (&Mapping, &Registration),
    remote: &RemoteMemory,
    memory: &mut dyn FnMut() -> Result<Vec<u64>>,
) -> Result<Stale> {
    let mut stale = Stale {
        end,
        stale_attempts: 0,
        stale_writes: 0,
        refused: 0,
        revoke_ms: 0.0,
    };
    let before = memory()?;
    for n in 0..ATTEMPTS {
        fill(source, 100 + n)?;
        let len = [MIB, 4096, 8, 65536 + 24][n as usize % 4];
        let offset = (n * 52_427 % (MIB - len + 1) as u64) & !7;
        let (mut queue, _far) = wire.pair()?;
        let result = queue.write(sent, 0..len, remote, offset);
        stale.stale_attempts += 1;
        match result {
            Err(Error::Transfer {
                status: REMOTE_ACCESS, ..
            }) => stale.refused += 1,
            other => println!("attempt {n} after {end}: {other:?}"),
        }
        if memory()? != before {
            stale.stale_writes += 1;
        }
    }
    // A read must fail as well.
    fill(source, 99)?;
    let (mut queue, _far) = wire.pair()?;
    ended("reading", queue.read(sent, 0..4096, remote, 0), REMOTE_ACCESS)?;
    check(source, 99)?;
    Ok(stale)
}

fn verdict(stale: &Stale) -> Result<()> {
    println!("{}", serde_json::to_string(stale)?);
    ensure!(
        stale.stale_attempts == ATTEMPTS && stale.stale_writes == 0 && stale.refused == ATTEMPTS,
        "{stale:?}"
    );
    Ok(())
}

/// A new buffer of `accel0` with the same bytes of the BAR, and a pattern in them.
pub(super) struct NextOwner {
    map: Mapping,
    /// Offset of these bytes in the mapping, and their number.
    at: usize,
    len: usize,
}

impl NextOwner {
    /// Allocates all of the device's memory, of which the `len` bytes at `offset` in the BAR are checked.
    pub(super) fn of(wire: &Wire, bed: &Bed, offset: u64, len: usize) -> Result<NextOwner> {
        let buffer = wire.alloc(bed, "accel0", bed.provider("accel0")?.largest as usize)?;
        let begin = buffer.bar_offset().context("the place in the BAR is not known")?;
        ensure!(
            begin <= offset && offset + len as u64 <= begin + buffer.size(),
            "the next owner has other memory: {begin:#x}, {offset:#x}"
        );
        let map = buffer.map()?;
        let at = (offset - begin) as usize;
        map.copy_from_slice(at, &pattern(3, len))?;
        map.flush();
        Ok(NextOwner { map, at, len })
    }

    pub(super) fn words(&self) -> Result<Vec<u64>> {
        let mut words = vec![0u64; self.len / 8];
        self.map.copy_to_slice(self.at, &mut words)?;
        Ok(words)
    }
}

fn stale_unbind(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let wire = Wire::new(bed)?;
    let (source, target) = (wire.alloc(bed, "accel1", MIB)?, wire.alloc(bed, "accel0", MIB)?);
    let (from, to) = (source.map()?, target.map()?);
    let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
    let received = target.register(&wire.pd, Access::ALL)?;
    let remote = received.remote();
    let (mut queue, _far) = wire.pair()?;
    fill(&from, 1)?;
    queue.write(&sent, 0..MIB, &remote, 0)?;
    check(&to, 1).context("before the end")?;
    let offset = target.bar_offset().context("the place in the BAR is not known")?;

    let start = Instant::now();
    bed.unbind("accel0")?;
    let took = start.elapsed();
    let revoke_ms = took.as_secs_f64() * 1e3;
    ended_within("unbind", took)?;

    // The device has no driver now, so the test can read the BAR itself.
    let bar = bed.device("accel0")?.sysfs().join("resource2");
    let bar = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&bar)
        .with_context(|| bar.display().to_string())?;
    let raw = sys::Mapping::shared(bar.as_fd(), offset, MIB)
        .map_err(errno)
        .context("the BAR")?;
    for at in (0..MIB).step_by(8) {
        raw.set(at, word(2, at));
    }
    let mut all = || Ok((0..MIB).step_by(8).map(|at| raw.get(at)).collect::<Vec<u64>>());
    compare(&all()?, &pattern(2, MIB))?;
    let mut stale = attempts(&wire, "the provider was removed", (&from, &sent), &remote, &mut all)?;
    stale.revoke_ms = revoke_ms;
    verdict(&stale)?;
    ensure!(
        from.len() == MIB && target.info()?.state == p2pmem::BufferState::Gone,
        "{:?}",
        target.info()?
    );
    let error = target.register(&wire.pd, Access::ALL).unwrap_err();
    ensure!(error.errno() == Some(libc::ENODEV), "registering what is gone: {error}");

    // Published again: the same bytes in a new buffer, which the old key must not reach.
    drop(raw);
    bed.publish("accel0")?;
    let next = NextOwner::of(&wire, bed, offset, MIB)?;
    let mut all = || next.words();
    verdict(&attempts(
        &wire,
        "the provider came back",
        (&from, &sent),
        &remote,
        &mut all,
    )?)?;
    received.deregister()?;
    Ok(())
}

fn stale_free(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let wire = Wire::new(bed)?;
    let (source, target) = (wire.alloc(bed, "accel1", MIB)?, wire.alloc(bed, "accel0", MIB)?);
    let from = source.map()?;
    let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
    let received = target.register(&wire.pd, Access::ALL)?;
    let remote = received.remote();
    let (mut queue, _far) = wire.pair()?;
    fill(&from, 1)?;
    queue.write(&sent, 0..MIB, &remote, 0)?;
    let offset = target.bar_offset().context("the place in the BAR is not known")?;
    let start = Instant::now();
    received.deregister()?;
    target.free()?;
    let revoke_ms = start.elapsed().as_secs_f64() * 1e3;

    bed.settled()?;
    let next = NextOwner::of(&wire, bed, offset, MIB)?;
    let mut all = || next.words();
    let mut stale = attempts(&wire, "the buffer was freed", (&from, &sent), &remote, &mut all)?;
    stale.revoke_ms = revoke_ms;
    verdict(&stale)
}
