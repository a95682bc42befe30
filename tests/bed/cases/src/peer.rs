// SPDX-License-Identifier: MIT OR Apache-2.0

//! `ibv_reg_mr()` of mapped buffers, without a library in between, and the transfers of an adapter to them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;
use sideway::ibverbs::memory_region::MemoryRegion;

use super::rdma_programs::with_rxe;
use super::rdma_user::word;
use super::{Bed, Case, errno, open, read, request};
use crate::in_time;
use crate::limits::scaled;
use crate::sys::{self, Mapping, Memory};
use crate::verbs::{Adapter, SUCCESS};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "peer-register",
        about: "mapped buffers are registered by their addresses, in as few entries as there are pieces, and reached",
        topology: "nic",
        ruins: false,
        run: register,
    },
    Case {
        name: "peer-software",
        about: "an RDMA adapter in software reaches buffers with pages, and is refused those without",
        topology: "nic",
        ruins: false,
        run: software,
    },
    Case {
        name: "peer-two-adapters",
        about: "two adapters of different kinds have one buffer registered, and both lose it when its provider is removed",
        topology: "nic",
        ruins: false,
        run: two_adapters,
    },
];

pub(super) const MIB: usize = 1 << 20;
const FOLDER: &str = "/sys/kernel/debug/p2pmem";

/// The time limit for effects of other processes to become visible.
pub(super) const SOON: Duration = Duration::from_secs(20);

/// A registration as debugfs lists it.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) provider: String,
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) entries: u32,
    pub(super) state: String,
    pub(super) calls: String,
    /// Adapter and process id.
    pub(super) whose: String,
}

/// Returns all registrations.
pub(super) fn rows() -> Result<Vec<Row>> {
    let text = read(&Path::new(FOLDER).join("registrations"))?;
    text.lines()
        .skip(1)
        .map(|line| {
            let words: Vec<&str> = line.splitn(9, ' ').collect();
            let [_id, _buffer, provider, address, size, entries, state, calls, whose] = words[..] else {
                bail!("registrations: {line:?}")
            };
            Ok(Row {
                provider: provider.into(),
                address: u64::from_str_radix(address.trim_start_matches("0x"), 16)?,
                size: size.parse()?,
                entries: entries.parse()?,
                state: state.into(),
                calls: calls.into(),
                whose: whose.into(),
            })
        })
        .collect()
}

/// Waits until the registrations are the expected ones.
pub(super) fn await_rows(what: &str, wanted: impl Fn(&[Row]) -> bool) -> Result<Vec<Row>> {
    let deadline = Instant::now() + scaled(SOON);
    loop {
        let rows = rows()?;
        if wanted(&rows) {
            return Ok(rows);
        }
        in_time!(Instant::now() < deadline, "{what}: {rows:#?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the counters of calls and refusals.
pub(super) fn counted() -> Result<BTreeMap<String, u64>> {
    let text = read(&Path::new(FOLDER).join("peer_memory"))?;
    let pairs = text.lines().filter_map(|line| line.split_once(' '));
    Ok(pairs
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect())
}

/// Returns the form in which the module is registered as a client.
pub(super) fn registered_as() -> Result<String> {
    let text = read(&Path::new(FOLDER).join("peer_memory"))?;
    let form = text.lines().find_map(|line| line.strip_prefix("registered_as "));
    Ok(form.with_context(|| format!("peer_memory: {text:?}"))?.to_owned())
}

/// Opens the adapter of the NIC model.
pub(super) fn nic(bed: &Bed) -> Result<Adapter> {
    Adapter::open(&bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?)
}

/// Returns a buffer of a provider, mapped.
pub(super) struct Held {
    pub(super) file: File,
    pub(super) buffer: abi::p2pmem_alloc,
    pub(super) map: Mapping,
}

impl Held {
    pub(super) fn new(bed: &Bed, provider: &str, size: usize) -> Result<Held> {
        let file = open()?;
        let mut buffer = request(size as u64);
        buffer.req.provider = bed.provider(provider)?.id;
        sys::alloc(file.as_fd(), &mut buffer, Memory::Slice(&mut [])).map_err(errno)?;
        let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, size).map_err(errno)?;
        Ok(Held { file, buffer, map })
    }

    pub(super) fn register(&self, adapter: &Adapter) -> Result<Arc<MemoryRegion>> {
        let (address, len) = (self.map.address(), self.map.len());
        let region = adapter.register(address, len).map_err(errno);
        region.with_context(|| format!("ibv_reg_mr() of {len} bytes with {}", adapter.name))
    }

    /// Returns the reason of the last refusal.
    pub(super) fn reason(&self) -> Result<String> {
        Ok(super::explain_last(self.file.as_fd())?.2)
    }
}

pub(super) fn fill(map: &Mapping, seed: u64) {
    for at in (0..map.len()).step_by(8) {
        map.set(at, word(seed, at));
    }
}

/// Fails unless the `len` bytes at `at` are those that [`fill`] wrote at `from`.
pub(super) fn check(map: &Mapping, at: usize, len: usize, seed: u64, from: usize) -> Result<()> {
    for n in (0..len).step_by(8) {
        let (found, wanted) = (map.get(at + n), word(seed, from + n));
        ensure!(
            found == wanted,
            "byte {:#x} is {found:#x} instead of {wanted:#x}",
            at + n
        );
    }
    Ok(())
}

/// Fails unless a write arrives.
pub(super) fn arrives(
    adapter: &Adapter,
    from: &MemoryRegion,
    len: usize,
    to: &MemoryRegion,
    offset: u64,
) -> Result<()> {
    let status = adapter.connect()?.write(from, len, to, offset)?;
    ensure!(status == SUCCESS, "a write of {len} bytes ended with status {status}");
    Ok(())
}

fn register(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    ensure!(
        registered_as()? == "ex",
        "the module is a client as {}",
        registered_as()?
    );
    let before = counted()?;
    let nic = nic(bed)?;
    let (source, target) = (Held::new(bed, "accel1", MIB)?, Held::new(bed, "accel0", MIB)?);
    fill(&source.map, 1);
    fill(&target.map, 2);
    let sent = source.register(&nic)?;
    let whole = target.register(&nic)?;
    let row = rows()?.into_iter().find(|row| row.address == target.map.address());
    let row = row.context("the registration is not listed")?;
    let me = format!("pid {} (", std::process::id());
    let address = &bed.device("nic0")?.bdf;
    ensure!(
        row.provider == bed.device("accel0")?.bdf
            && (row.size, row.entries, row.state.as_str()) == (MIB as u64, 1, "mapped")
            && row.calls == "acquire,get_pages,dma_map"
            && row.whose.starts_with(&format!("{address} (mlx5_core) {me}")),
        "{row:?}"
    );
    arrives(&nic, &sent, MIB, &whole, 0)?;
    check(&target.map, 0, MIB, 1, 0)?;
    drop(whole);

    // From the middle of one page to the middle of another.
    fill(&target.map, 3);
    let part = nic
        .register(target.map.address() + 4096 + 104, 9000)
        .map_err(errno)
        .context("from the middle of a page")?;
    arrives(&nic, &sent, 9000, &part, 0)?;
    check(&target.map, 0, 4200, 3, 0)?;
    check(&target.map, 4200, 9000, 1, 0)?;
    check(&target.map, 13_200, MIB - 13_200, 3, 13_200)?;
    drop(part);

    // Several VMAs, one range of the buffer.
    let page = 4096;
    target
        .map
        .protect_part(64 * page, page, libc::PROT_READ)
        .map_err(errno)?;
    let whole = target.register(&nic)?;
    ensure!(
        rows()?
            .iter()
            .any(|row| row.address == target.map.address() && row.entries == 1),
        "{:#?}",
        rows()?
    );
    arrives(&nic, &sent, MIB, &whole, 0)?;
    check(&target.map, 0, MIB, 1, 0)?;
    drop(whole);
    target.map.protect(libc::PROT_READ | libc::PROT_WRITE).map_err(errno)?;

    // Two ranges of the buffer, the second one first.
    let (half, fd) = (MIB / 2, target.file.as_fd());
    let turned = Mapping::shared(fd, target.buffer.mmap_offset, MIB).map_err(errno)?;
    turned
        .replace_part(0, half, fd, target.buffer.mmap_offset + half as u64)
        .map_err(errno)?;
    turned
        .replace_part(half, half, fd, target.buffer.mmap_offset)
        .map_err(errno)?;
    let both = nic.register(turned.address(), MIB).map_err(errno)?;
    ensure!(
        rows()?
            .iter()
            .any(|row| row.address == turned.address() && row.entries == 2),
        "{:#?}",
        rows()?
    );
    fill(&target.map, 4);
    arrives(&nic, &sent, MIB, &both, 0)?;
    check(&target.map, 0, half, 1, half)?;
    check(&target.map, half, half, 1, 0)?;
    drop((both, sent));
    await_rows("all was deregistered", <[Row]>::is_empty)?;

    let after = counted()?;
    let calls = |name: &str| after.get(name).copied().unwrap_or(0) - before.get(name).copied().unwrap_or(0);
    for (name, wanted) in [
        ("acquire", 5),
        ("get_pages", 5),
        ("dma_map", 5),
        ("dma_unmap", 5),
        ("put_pages", 5),
        ("release", 5),
    ] {
        ensure!(calls(name) == wanted, "{name} was called {} times", calls(name));
    }
    for name in ["invalidate", "repeated", "out_of_order", "refused"] {
        ensure!(calls(name) == 0, "{name}: {}", calls(name));
    }
    Ok(())
}

fn software(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let target = Held::new(bed, "accel0", MIB)?;
    let source = Held::new(bed, "accel1", MIB)?;
    fill(&source.map, 1);
    with_rxe(|name, _| {
        let adapter = Adapter::open(name)?;
        let sent = source.register(&adapter)?;
        let received = target.register(&adapter)?;
        let row = rows()?.into_iter().find(|row| row.address == target.map.address());
        let row = row.context("the registration is not listed")?;
        ensure!(
            row.entries == 1 && row.state == "mapped" && row.whose.starts_with("virtual pid "),
            "{row:?}"
        );
        arrives(&adapter, &sent, MIB, &received, 0)?;
        check(&target.map, 0, MIB, 1, 0)
    })?;
    drop(source);

    // Software RDMA needs struct pages.
    bed.unpublish("accel1")?;
    let dir = bed.provider_dir("accel1")?;
    let device = bed.device("accel1")?;
    super::write(&device.sysfs().join("driver_override"), "p2pmem")?;
    super::write(Path::new("/sys/bus/pci/drivers_probe"), &device.bdf)?;
    std::fs::create_dir(&dir)?;
    super::write(&dir.join("mode"), "pageless")?;
    super::write(&dir.join("enable"), "1")?;
    let source = Held::new(bed, "accel1", MIB)?;
    with_rxe(|name, _| {
        let adapter = Adapter::open(name)?;
        super::expect(
            "without pages",
            adapter.register(source.map.address(), MIB).map(|_| ()),
            libc::EOPNOTSUPP,
        )?;
        let reason = source.reason()?;
        ensure!(reason.contains("is pageless"), "{reason}");
        Ok(())
    })?;
    // The NIC needs no struct pages.
    let nic = nic(bed)?;
    let (sent, received) = (source.register(&nic)?, target.register(&nic)?);
    fill(&source.map, 5);
    arrives(&nic, &sent, MIB, &received, 0)?;
    check(&target.map, 0, MIB, 5, 0)?;
    drop((sent, received, source));
    bed.unpublish("accel1")
}

fn two_adapters(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let nic = nic(bed)?;
    let (source, target) = (Held::new(bed, "accel1", MIB)?, Held::new(bed, "accel0", MIB)?);
    with_rxe(|name, _| {
        let adapter = Adapter::open(name)?;
        let (sent, sent_too) = (source.register(&nic)?, source.register(&adapter)?);
        let (received, received_too) = (target.register(&nic)?, target.register(&adapter)?);
        ensure!(rows()?.len() == 4, "{:#?}", rows()?);
        fill(&source.map, 1);
        arrives(&nic, &sent, MIB, &received, 0)?;
        check(&target.map, 0, MIB, 1, 0)?;
        fill(&source.map, 2);
        arrives(&adapter, &sent_too, MIB, &received_too, 0)?;
        check(&target.map, 0, MIB, 2, 0)?;
        bed.unbind("accel0")?;
        for (adapter, sent, received) in [(&nic, &sent, &received), (&adapter, &sent_too, &received_too)] {
            let status = adapter.connect()?.write(sent, 4096, received, 0)?;
            ensure!(
                status == crate::verbs::REMOTE_ACCESS,
                "{}: a write after the end ended with status {status}",
                adapter.name
            );
        }
        let all = rows()?;
        ensure!(all.iter().filter(|row| row.state == "revoked").count() == 2, "{all:#?}");
        drop((received, received_too));
        await_rows("two are left", |rows| rows.len() == 2)?;
        Ok(())
    })
}
