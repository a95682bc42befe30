// SPDX-License-Identifier: MIT OR Apache-2.0

//! Attachments of a provider's function to dma-bufs: doorbell pages of the NIC, memory of another accelerator, host memory;
//! who may attach; and calls that fail.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_accel_regs::Op;
use p2pmem_accel_regs::driver::{Accel, Error};
use p2pmem_sys as abi;

use super::dmabuf::{export, exported_buffer};
use super::peer::{Held, nic};
use super::peer_iommu::translated;
use super::{Bed, Case, alloc, errno, expect, explain_last, free, open, write};
use crate::host;
use crate::sys::uverbs::{Uar, Uverbs};
use crate::sys::{self, BAD_POINTERS, Memory};
use crate::verbs::Adapter;
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "attach-doorbell",
        about: "an accelerator attached to a NIC's doorbell page rings the NIC by its own DMA",
        topology: "nic",
        ruins: false,
        run: doorbell,
    },
    Case {
        name: "attach-doorbell-iommu",
        about: "an accelerator rings a NIC behind an IOMMU, by an address that the IOMMU translates",
        topology: "iommu-nic",
        ruins: false,
        run: doorbell_translated,
    },
    Case {
        name: "attach-memory",
        about: "an accelerator attached to another one's memory and to host memory writes there, byte for byte",
        topology: "nic",
        ruins: false,
        run: memory,
    },
    Case {
        name: "attach-bad",
        about: "attachments with bad descriptors, providers, flags, arrays and handles fail, and EXPLAIN has the reason",
        topology: "nic",
        ruins: false,
        run: bad,
    },
    Case {
        name: "attach-users",
        about: "only root and members of attach_gid attach a function, from the time that the group is set",
        topology: "nic",
        ruins: false,
        run: users,
    },
    Case {
        name: "attach-adopted",
        about: "the function of an adopted provider cannot be attached, as its own driver drives it",
        topology: "demo",
        ruins: false,
        run: adopted,
    },
];

const MIB: u64 = 1 << 20;
/// Bytes of a doorbell page.
pub(super) const PAGE: u64 = 4096;
/// Offset of the doorbell of send queues.
const SEND: u64 = 0x800;
/// The time limit of a transfer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// An attachment: the answer of the call, and the ranges.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) answer: abi::p2pmem_attach,
    pub(super) ranges: Vec<abi::p2pmem_dma_range>,
}

impl Attached {
    /// Returns the address of the only range.
    pub(super) fn address(&self) -> Result<u64> {
        match self.ranges[..] {
            [range] if range.size == self.answer.size => Ok(range.address),
            _ => anyhow::bail!("not one range: {self:x?}"),
        }
    }
}

/// Attaches the function of a provider to a dma-buf.
pub(super) fn attach(fd: BorrowedFd<'_>, provider: u32, dma_buf: &OwnedFd, flags: u32) -> Result<Attached, i32> {
    let mut ranges = vec![abi::p2pmem_dma_range::default(); 16];
    let mut answer = abi::p2pmem_attach {
        fd: dma_buf.as_raw_fd(),
        provider,
        flags,
        nr_ranges: ranges.len() as u32,
        ..Default::default()
    };
    sys::attach(fd, &mut answer, Memory::Slice(&mut ranges))?;
    ranges.truncate(answer.nr_ranges as usize);
    Ok(Attached { answer, ranges })
}

/// Closes the handle of an attachment.
pub(super) fn detach(fd: BorrowedFd<'_>, handle: u32) -> Result<(), i32> {
    sys::plain(
        fd,
        abi::P2PMEM_IOC_DETACH_DMABUF,
        &mut abi::p2pmem_detach { handle, flags: 0 },
    )
}

/// Returns the state of an attachment.
pub(super) fn query(fd: BorrowedFd<'_>, handle: u32) -> Result<abi::p2pmem_attachment, i32> {
    let mut ask = abi::p2pmem_attachment {
        handle,
        ..Default::default()
    };
    sys::attachment(fd, &mut ask, Memory::Slice(&mut []))?;
    Ok(ask)
}

/// Returns the debugfs listing of all attachments.
pub(super) fn listing() -> Result<String> {
    let path = "/sys/kernel/debug/p2pmem/attachments";
    fs::read_to_string(path).context(path)
}

/// Fails if a function is attached.
pub(super) fn none_attached() -> Result<()> {
    let text = listing()?;
    ensure!(text.is_empty(), "still attached: {text}");
    Ok(())
}

/// The NIC, open, with a doorbell page and the page's dma-buf.
pub(super) struct Doorbell {
    pub(super) verbs: Uverbs,
    pub(super) uar: Uar,
    pub(super) dma_buf: OwnedFd,
    /// Keeps the NIC open.
    pub(super) _adapter: Adapter,
}

impl Doorbell {
    pub(super) fn new(bed: &Bed) -> Result<Doorbell> {
        let adapter = nic(bed)?;
        let verbs = Uverbs::of(&adapter.pd).map_err(errno)?;
        let uar = verbs.alloc_uar().map_err(errno).context("allocating a doorbell page")?;
        let dma_buf = verbs.dma_buf(&uar).map_err(errno).context("a doorbell's dma-buf")?;
        Ok(Doorbell {
            verbs,
            uar,
            dma_buf,
            _adapter: adapter,
        })
    }
}

/// An accelerator that rings doorbells, with the memory from which its DMA engine takes the eight bytes.
pub(super) struct Ringer {
    pub(super) accel: Accel,
    memory: Held,
}

impl Ringer {
    pub(super) fn new(bed: &Bed, name: &str) -> Result<Ringer> {
        let memory = Held::new(bed, name, PAGE as usize)?;
        // The number of a queue pair that does not exist: the NIC counts the doorbell, and does nothing.
        memory.map.set(0, u64::from_ne_bytes([0, 0, 0, 1, 0xff, 0xff, 0xfe, 0]));
        Ok(Ringer {
            accel: Accel::open(&bed.device(name)?.bdf)?,
            memory,
        })
    }

    /// Rings a doorbell page at an address.
    pub(super) fn ring(&self, page: u64) -> Result<(), Error> {
        let offset = self.memory.buffer.bar_offset;
        self.accel.run(Op::DmaOut, 0, offset, 8, page + SEND, TIMEOUT).map(drop)
    }
}

/// Returns how many doorbells for queue pairs that do not exist the NIC has counted.
pub(super) fn rung() -> Result<u64> {
    let snapshot = host::request(&Request::Snapshot)?;
    let count = &snapshot["nic0"]["counters"]["adapter"]["bad_doorbells"];
    count.as_u64().with_context(|| format!("no number: {count}"))
}

/// Fails unless a doorbell arrives at the NIC.
pub(super) fn arrives(ringer: &Ringer, page: u64) -> Result<()> {
    let before = rung()?;
    ringer.ring(page).context("ringing")?;
    super::inflight::until("the NIC counts the doorbell", || Ok(rung()? == before + 1))
}

/// Fails unless the accelerator cannot ring, and the NIC counts nothing.
pub(super) fn is_kept_out(ringer: &Ringer, page: u64) -> Result<()> {
    let before = rung()?;
    match ringer.ring(page) {
        Err(Error::Command { .. }) => {}
        other => anyhow::bail!("ringing ended with {other:?}"),
    }
    let after = rung()?;
    ensure!(after == before, "the NIC counted {} doorbells", after - before);
    Ok(())
}

fn doorbell(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    let mut info = abi::p2pmem_info::default();
    sys::plain(fd, abi::P2PMEM_IOC_INFO, &mut info).map_err(errno)?;
    ensure!(info.features & u64::from(abi::P2PMEM_FEATURE_ATTACH) != 0, "{info:?}");
    let ringer = Ringer::new(bed, "accel0")?;
    ensure!(!ringer.accel.dma_enabled()?, "DMA was enabled before");
    let bell = Doorbell::new(bed)?;
    let attached = attach(fd, row.id, &bell.dma_buf, 0).map_err(errno)?;
    ensure!(
        attached.answer.size == PAGE && attached.answer.info == 0 && attached.answer.handle != 0,
        "{attached:x?}"
    );
    ensure!(ringer.accel.dma_enabled()?, "the attachment did not enable DMA");
    let page = attached.address()?;
    for _ in 0..3 {
        arrives(&ringer, page)?;
    }
    let state = query(fd, attached.answer.handle).map_err(errno)?;
    ensure!(
        state.state == abi::P2PMEM_ATTACHMENT_LIVE && state.nr_ranges == 1 && state.provider == row.id,
        "{state:x?}"
    );
    let text = listing()?;
    let bdf = &bed.device("accel0")?.bdf;
    ensure!(
        text.contains(&format!("of {bdf} to a dma-buf of ")) && text.contains(&format!("  {page:#x}+0x1000\n")),
        "{text}"
    );
    // A second attachment of the same page, on another file.
    let other = open()?;
    let second = attach(other.as_fd(), row.id, &bell.dma_buf, 0).map_err(errno)?;
    ensure!(second.address()? == page, "{second:x?}");
    detach(fd, attached.answer.handle).map_err(errno)?;
    arrives(&ringer, page)?;
    expect("detaching twice", detach(fd, attached.answer.handle), libc::ENOENT)?;
    detach(other.as_fd(), second.answer.handle).map_err(errno)?;
    ensure!(!ringer.accel.dma_enabled()?, "the last attachment left DMA enabled");
    is_kept_out(&ringer, page)?;
    none_attached()?;
    // A program that had enabled bus mastering itself finds it enabled afterwards.
    ringer.accel.enable_dma()?;
    let third = attach(fd, row.id, &bell.dma_buf, 0).map_err(errno)?;
    arrives(&ringer, third.address()?)?;
    detach(fd, third.answer.handle).map_err(errno)?;
    ensure!(ringer.accel.dma_enabled()?, "the attachment disabled DMA of its user");
    // Both open at the end: the adapter's doorbell page is revoked when the process closes the adapter.
    disable_dma(bed)
}

/// Disables bus mastering of accel0, for the next case.
fn disable_dma(bed: &Bed) -> Result<()> {
    bed.unpublish("accel0")?;
    let bdf = &bed.device("accel0")?.bdf;
    super::command("setpci", &["-s", bdf, "COMMAND.B=0:4"])
}

fn doorbell_translated(bed: &mut Bed) -> Result<()> {
    translated(bed, "accel0")?;
    let row = bed.provider("accel0")?;
    let file = open()?;
    let ringer = Ringer::new(bed, "accel0")?;
    let bell = Doorbell::new(bed)?;
    let attached = attach(file.as_fd(), row.id, &bell.dma_buf, 0).map_err(errno)?;
    ensure!(
        attached.answer.info == abi::P2PMEM_ATTACHMENT_TRANSLATED,
        "{attached:x?}"
    );
    let page = attached.address()?;
    arrives(&ringer, page)?;
    // The IOMMU ends the access, so another attachment of the function goes on.
    let second = Doorbell::new(bed)?;
    let other = attach(file.as_fd(), row.id, &second.dma_buf, 0).map_err(errno)?;
    ensure!(other.address()? != page, "{other:x?}");
    bell.verbs.destroy_uar(&bell.uar).map_err(errno)?;
    let state = query(file.as_fd(), attached.answer.handle).map_err(errno)?;
    ensure!(state.state == abi::P2PMEM_ATTACHMENT_REVOKED, "{state:x?}");
    ensure!(ringer.accel.dma_enabled()?, "a translated mapping stopped the function");
    is_kept_out(&ringer, page)?;
    arrives(&ringer, other.address()?)?;
    let state = query(file.as_fd(), other.answer.handle).map_err(errno)?;
    ensure!(state.state == abi::P2PMEM_ATTACHMENT_LIVE, "{state:x?}");
    // A new mapping could get the address of the one that ended, until the program says that the function does not use it.
    let third = Doorbell::new(bed)?;
    expect(
        "attaching before the end is confirmed",
        attach(file.as_fd(), row.id, &third.dma_buf, 0),
        libc::EBUSY,
    )?;
    detach(file.as_fd(), attached.answer.handle).map_err(errno)?;
    let next = attach(file.as_fd(), row.id, &third.dma_buf, 0).map_err(errno)?;
    arrives(&ringer, next.address()?)?;
    detach(file.as_fd(), next.answer.handle).map_err(errno)?;
    detach(file.as_fd(), other.answer.handle).map_err(errno)?;
    ensure!(!ringer.accel.dma_enabled()?);
    Ok(())
}

fn memory(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let row = bed.provider("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    let ringer = Ringer::new(bed, "accel0")?;
    let word = ringer.memory.map.get(0);
    // Memory of another provider, two ranges of it.
    let target = Held::new(bed, "accel1", MIB as usize)?;
    let parts = [(64 << 10, PAGE), (0, PAGE)];
    let dma_buf = export(target.file.as_fd(), target.buffer.handle, 0, &parts).map_err(errno)?;
    let attached = attach(fd, row.id, &dma_buf, 0).map_err(errno)?;
    ensure!(attached.ranges.len() == 2, "{attached:x?}");
    ringer.ring(attached.ranges[0].address)?;
    ensure!(target.map.get((64 << 10) + SEND as usize) == word && target.map.get(SEND as usize) == 0);
    ringer.ring(attached.ranges[1].address)?;
    ensure!(target.map.get(SEND as usize) == word);
    // An array that is too short: the rest is counted, and a query returns all.
    let mut one = [abi::p2pmem_dma_range::default()];
    let mut ask = abi::p2pmem_attach {
        fd: dma_buf.as_raw_fd(),
        provider: row.id,
        nr_ranges: 1,
        ..Default::default()
    };
    sys::attach(fd, &mut ask, Memory::Slice(&mut one)).map_err(errno)?;
    ensure!(ask.nr_ranges == 2 && one[0] == attached.ranges[0], "{ask:x?} {one:x?}");
    let mut both = [abi::p2pmem_dma_range::default(); 2];
    let mut state = abi::p2pmem_attachment {
        handle: ask.handle,
        nr_ranges: 2,
        ..Default::default()
    };
    sys::attachment(fd, &mut state, Memory::Slice(&mut both)).map_err(errno)?;
    ensure!(
        state.nr_ranges == 2 && both[..] == attached.ranges,
        "{state:x?} {both:x?}"
    );
    ensure!(state.size == 2 * PAGE && state.state == abi::P2PMEM_ATTACHMENT_LIVE);
    detach(fd, ask.handle).map_err(errno)?;
    detach(fd, attached.answer.handle).map_err(errno)?;
    // Host memory.
    let host = sys::host_dma_buf(4 * PAGE)?;
    let attached = attach(fd, row.id, &host, 0).map_err(errno)?;
    let size: u64 = attached.ranges.iter().map(|range| range.size).sum();
    ensure!(size == 4 * PAGE && attached.answer.size == size, "{attached:x?}");
    ringer.ring(attached.ranges[0].address)?;
    detach(fd, attached.answer.handle).map_err(errno)?;
    // The function's own memory.
    let (own, dma_buf) = exported_buffer(fd, PAGE, 0)?;
    expect("own memory", attach(fd, own.provider, &dma_buf, 0), libc::EINVAL)?;
    ensure!(explain_last(fd)?.2.contains("itself"), "{}", explain_last(fd)?.2);
    drop((dma_buf, target));
    free(fd, own.handle).map_err(errno)?;
    bed.unpublish("accel1")
}

fn bad(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    let host = sys::host_dma_buf(PAGE)?;
    let good = abi::p2pmem_attach {
        fd: host.as_raw_fd(),
        provider: row.id,
        ..Default::default()
    };
    let null = OwnedFd::from(fs::File::open("/dev/null")?);
    let cases: [(&str, abi::p2pmem_attach, i32, &str); 7] = [
        (
            "no descriptor",
            abi::p2pmem_attach { fd: -1, ..good },
            libc::EBADF,
            "-1 is not an open",
        ),
        (
            "not a dma-buf",
            abi::p2pmem_attach {
                fd: null.as_raw_fd(),
                ..good
            },
            libc::EINVAL,
            "not a dma-buf",
        ),
        (
            "no provider",
            abi::p2pmem_attach { provider: 0, ..good },
            libc::ENOENT,
            "no provider 0",
        ),
        (
            "another provider",
            abi::p2pmem_attach { provider: 999, ..good },
            libc::ENOENT,
            "no provider 999",
        ),
        (
            "flags",
            abi::p2pmem_attach { flags: 2, ..good },
            libc::EINVAL,
            "unknown flags 0x2",
        ),
        (
            "reserved",
            abi::p2pmem_attach { reserved: 1, ..good },
            libc::EINVAL,
            "reserved",
        ),
        (
            "elements",
            abi::p2pmem_attach {
                nr_ranges: 1,
                range_size: 2,
                ..good
            },
            libc::EINVAL,
            "2 bytes",
        ),
    ];
    for (what, ask, code, text) in cases {
        let mut raw = ask;
        let (size, count) = (ask.range_size, ask.nr_ranges);
        let answer = sys::with_elements(fd, &mut raw, &mut [], (size, count), &mut [0; 8]);
        expect(what, answer, code)?;
        let said = explain_last(fd)?.2;
        ensure!(said.contains(text), "{what}: {said}");
    }
    // A bad pointer for the ranges: nothing stays attached.
    for at in 0..BAD_POINTERS.len() {
        let mut ask = abi::p2pmem_attach { nr_ranges: 4, ..good };
        expect("bad ranges", sys::attach(fd, &mut ask, Memory::Bad(at)), libc::EFAULT)?;
        expect(
            "bad argument",
            sys::bad_argument(fd, abi::P2PMEM_IOC_ATTACH_DMABUF, at),
            libc::EFAULT,
        )?;
    }
    none_attached()?;
    ensure!(!Accel::open(&bed.device("accel0")?.bdf)?.dma_enabled()?);
    // Handles: of other files, of the other kind, closed, invented.
    let attached = attach(fd, row.id, &host, 0).map_err(errno)?;
    let a = alloc(fd, PAGE).map_err(errno)?;
    ensure!(a.handle != attached.answer.handle, "one number for two handles");
    for handle in [0, a.handle, attached.answer.handle + 1000, u32::MAX] {
        expect("detach", detach(fd, handle), libc::ENOENT)?;
        expect("query", query(fd, handle), libc::ENOENT)?;
    }
    expect("free", free(fd, attached.answer.handle), libc::ENOENT)?;
    let other = open()?;
    expect(
        "another file",
        detach(other.as_fd(), attached.answer.handle),
        libc::ENOENT,
    )?;
    let mut flags = abi::p2pmem_detach {
        handle: attached.answer.handle,
        flags: 1,
    };
    expect(
        "flags",
        sys::plain(fd, abi::P2PMEM_IOC_DETACH_DMABUF, &mut flags),
        libc::EINVAL,
    )?;
    free(fd, a.handle).map_err(errno)?;
    detach(fd, attached.answer.handle).map_err(errno)?;
    expect("query", query(fd, attached.answer.handle), libc::ENOENT)
}

fn users(bed: &mut Bed) -> Result<()> {
    /// The number of the user and group, which the guest does not have otherwise.
    const USER: u32 = 4242;
    let row = bed.provider("accel0")?;
    let rule = bed.provider_dir("accel0")?.join("attach_gid");
    ensure!(super::read(&rule)? == "none", "{}", super::read(&rule)?);
    let file = open()?;
    let host = sys::host_dma_buf(PAGE)?;
    let as_member = |groups: &[u32]| -> Result<Result<Attached, i32>> {
        sys::as_user(USER, USER, groups, || attach(file.as_fd(), row.id, &host, 0)).map_err(errno)
    };
    expect("without permission", as_member(&[])?, libc::EPERM)?;
    let said = explain_last(file.as_fd())?.2;
    ensure!(
        said.contains("CAP_SYS_ADMIN") && said.contains("names no group"),
        "{said}"
    );
    for text in ["users", "-1", "4294967295", "1 2"] {
        ensure!(write(&rule, text).is_err(), "attach_gid takes {text:?}");
    }
    write(&rule, "4243")?;
    expect("of another group", as_member(&[])?, libc::EPERM)?;
    let said = explain_last(file.as_fd())?.2;
    ensure!(said.contains("group 4243"), "{said}");
    let attached = as_member(&[4243])?.map_err(errno)?;
    // The permission is for attaching: who has the file can detach.
    write(&rule, "none")?;
    expect("after the permission ended", as_member(&[4243])?, libc::EPERM)?;
    let state = query(file.as_fd(), attached.answer.handle).map_err(errno)?;
    ensure!(state.state == abi::P2PMEM_ATTACHMENT_LIVE, "{state:?}");
    detach(file.as_fd(), attached.answer.handle).map_err(errno)?;
    // The setting belongs to the directory, so a new provider has it.
    write(&rule, "4242")?;
    let dir = bed.provider_dir("accel0")?;
    write(&dir.join("enable"), "0")?;
    write(&dir.join("enable"), "1")?;
    let row = bed.provider("accel0")?;
    let again = sys::as_user(USER, USER, &[], || attach(file.as_fd(), row.id, &host, 0));
    let again = again.map_err(errno)?.map_err(errno)?;
    detach(file.as_fd(), again.answer.handle).map_err(errno)?;
    write(&rule, "none")
}

fn adopted(_: &mut Bed) -> Result<()> {
    let file = open()?;
    let host = sys::host_dma_buf(PAGE)?;
    let all = super::providers(file.as_fd())?;
    let drive = all.iter().find(|row| row.kind == abi::P2PMEM_KIND_ADOPTED);
    let drive = drive.context("the topology has no adopted provider")?;
    expect("adopted", attach(file.as_fd(), drive.id, &host, 0), libc::EOPNOTSUPP)?;
    let said = explain_last(file.as_fd())?.2;
    ensure!(said.contains("bound to its own driver"), "{said}");
    Ok(())
}
