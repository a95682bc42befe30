// SPDX-License-Identifier: MIT OR Apache-2.0

//! Buffers of several processes: passed on as a descriptor, kept by the remaining holders, charged once, revoked for all.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use p2pmem::{Device, EventKind};
use p2pmem_sys as abi;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use super::busy::Busy;
use super::dmabuf::{GOOD, Importer, export, exported_buffer, stats};
use super::life::{Part, ready, timed_unbind};
use super::rules::{AdminRule, counted};
use super::{Bed, Case, NODE, alloc, buffer, errno, expect, explain_last, free, open};
use crate::in_time;
use crate::limits::{rounds, scaled};
use crate::sys::{self, BAD_POINTERS, Mapping};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "share",
        about: "a buffer is one for all processes that import it, charged once, and free when the last one is done",
        topology: "small",
        ruins: false,
        run: shared,
    },
    Case {
        name: "share-ends",
        about: "a shared buffer outlives the process that allocated it, importers that are killed, and its transfer between processes",
        topology: "small",
        ruins: false,
        run: ends,
    },
    Case {
        name: "share-revoke",
        about: "the removal of a provider revokes a shared buffer for all holders, and notifies each of them",
        topology: "small",
        ruins: false,
        run: revoke,
    },
    Case {
        name: "share-bad",
        about: "descriptors that are no whole buffer's are refused, and say why; who may not open the device gets nothing",
        topology: "small",
        ruins: false,
        run: bad,
    },
    Case {
        name: "share-race",
        about: "imports, mappings and ends of them while the provider comes and goes",
        topology: "small",
        ruins: false,
        run: race,
    },
];

const MIB: u64 = 1 << 20;

/// The name of the processes of these tests. Arguments: a socket's path, and what to do.
pub(super) const PART: &str = "share";

/// Returns the word that the process that allocated wrote at an offset.
fn word(at: usize) -> u64 {
    (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5a
}

/// A buffer with a word at each of its offsets, its dma-buf, and a mapping of it.
fn filled(fd: BorrowedFd<'_>) -> Result<(abi::p2pmem_alloc, OwnedFd, Mapping)> {
    let (a, dma_buf) = exported_buffer(fd, 4 * MIB, 0)?;
    let map = Mapping::shared(fd, a.mmap_offset, a.size as usize).map_err(errno)?;
    for at in (0..map.len()).step_by(8) {
        map.set(at, word(at));
    }
    Ok((a, dma_buf, map))
}

/// Sends a descriptor.
pub(super) fn send(stream: &UnixStream, fd: BorrowedFd<'_>) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    ensure!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(stream, &[IoSlice::new(b"b")], &mut control, SendFlags::empty())?;
    Ok(())
}

/// Receives a descriptor.
pub(super) fn receive(stream: &UnixStream) -> Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            return fds.next().context("a message without a descriptor");
        }
    }
    bail!("no descriptor came")
}

/// Imports a dma-buf.
pub(super) fn import(file: BorrowedFd<'_>, fd: i32) -> Result<abi::p2pmem_import, i32> {
    let mut ask = abi::p2pmem_import {
        fd,
        ..Default::default()
    };
    sys::plain(file, abi::P2PMEM_IOC_IMPORT, &mut ask)?;
    Ok(ask)
}

/// A socket by which the processes of this test exchange descriptors.
struct DescriptorSocket {
    path: String,
    listener: UnixListener,
}

impl DescriptorSocket {
    fn new(name: &str) -> Result<DescriptorSocket> {
        let path = format!("/run/p2pmem/share-{name}-{}.sock", std::process::id());
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).with_context(|| path.clone())?;
        Ok(DescriptorSocket { path, listener })
    }

    /// Starts a part. If the part ends too early, no process waits for it.
    fn start(&self, what: &str) -> Result<Part> {
        Part::start(PART, &[&self.path, what]).inspect_err(|_| drop(UnixStream::connect(&self.path)))
    }

    /// Starts a part, and sends it a descriptor.
    fn give(&self, what: &str, fd: BorrowedFd<'_>) -> Result<Part> {
        // Connecting does not wait for accept(), so one thread waits for the part, then sends.
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&self.listener.accept()?.0, fd));
            let part = self.start(what);
            sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
            part
        })
    }

    /// Starts a part, and receives a descriptor from it.
    fn take(&self, what: &str) -> Result<(Part, OwnedFd)> {
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(&self.listener.accept()?.0));
            let part = self.start(what)?;
            let fd = receiver
                .join()
                .map_err(|_| anyhow::anyhow!("the receiver panicked"))??;
            Ok((part, fd))
        })
    }
}

impl Drop for DescriptorSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Runs one of the processes.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let [path, what] = arguments else {
        bail!("{arguments:?}")
    };
    let stream = UnixStream::connect(path).with_context(|| path.clone())?;
    if what == "allocate" {
        let file = open()?;
        let (_, dma_buf, _map) = filled(file.as_fd())?;
        send(&stream, dma_buf.as_fd())?;
        return ready();
    }
    let fd = receive(&stream)?;
    if what == "rightless" {
        return rightless(&fd);
    }
    let device = Device::open()?;
    let same = device.import(&fd)?;
    drop(fd);
    let map = same.map()?;
    for at in (0..map.len()).step_by(8) {
        let found = map.read::<u64>(at)?;
        ensure!(found == word(at), "byte {at:#x} is {found:#x} in another process");
    }
    match what.as_str() {
        "revoked" => {
            let mut events = device.events();
            ready()?;
            let event = events.next_within(Some(scaled(Duration::from_secs(60))))?;
            in_time!(event.is_some(), "no event");
            let kind = event.context("no event")?.kind;
            let expected = EventKind::BufferRevoked {
                provider: same.provider(),
                handle: same.handle(),
            };
            ensure!(kind == expected, "{kind:?}");
            sys::survive_bus_errors()?;
            map.read::<u64>(0)?;
            ensure!(sys::bus_errors() == 1, "the memory of a gone provider can be read");
            Ok(())
        }
        page => {
            let at = page.parse::<usize>()? * 4096;
            map.write(at, !word(at))?;
            map.flush();
            ready()?;
            // Every process sees what the others wrote, also later.
            ensure!(map.read::<u64>(at)? == !word(at));
            drop(same);
            ensure!(map.read::<u64>(at)? == !word(at));
            Ok(())
        }
    }
}

/// Runs in a process that may not open the device: with the descriptor alone it can read nothing.
fn rightless(fd: &OwnedFd) -> Result<()> {
    let opened = sys::as_user(1000, 1000, &[], || open().map(drop)).map_err(errno)?;
    let error = opened.err().context("anybody can open the device")?;
    let code = error.downcast_ref::<std::io::Error>().and_then(|e| e.raw_os_error());
    ensure!(code == Some(libc::EACCES), "{error:#}");
    let mapped = sys::as_user(1000, 1000, &[], || Mapping::shared(fd.as_fd(), 0, 4096).map(drop)).map_err(errno)?;
    expect("mmap of the descriptor", mapped, libc::EOPNOTSUPP)?;
    ready()
}

fn shared(bed: &mut Bed) -> Result<()> {
    const USERS: usize = 3;
    let before = bed.settled()?;
    let quota = AdminRule::new("50-once", &[("quota", &(4 * MIB).to_string())])?;
    let file = open()?;
    let fd = file.as_fd();
    let (a, dma_buf, map) = filled(fd)?;
    let taken = bed.provider("accel0")?;
    let socket = DescriptorSocket::new("users")?;
    let mut users = Vec::new();
    for n in 0..USERS {
        users.push(socket.give(&n.to_string(), dma_buf.as_fd())?);
        // The next process finds the words that it expects.
        ensure!(
            map.get(n * 4096) == !word(n * 4096),
            "what another process wrote is not seen"
        );
        map.set(n * 4096, word(n * 4096));
    }
    for n in 0..USERS {
        map.set(n * 4096, !word(n * 4096));
    }
    let b = buffer(fd, a.handle).map_err(errno)?;
    ensure!(
        b.handles == 1 + USERS as u32 && b.mappings == 1 + USERS as u32 && b.exports == 1,
        "{b:?}"
    );
    // One buffer, charged once: to the process that allocated it.
    let now = bed.provider("accel0")?;
    ensure!(now.free == taken.free && now.buffers == taken.buffers, "{now:?}");
    ensure!(counted(&quota)? == 4 * MIB, "{}", quota.get("usage")?);
    // The same file may have several handles; each counts as one.
    let twice = import(fd, dma_buf.as_raw_fd()).map_err(errno)?;
    ensure!(
        twice.handle != a.handle && twice.mmap_offset == a.mmap_offset && twice.size == a.size,
        "{a:?} {twice:?}"
    );
    ensure!(twice.provider == a.provider && twice.bar_offset == a.bar_offset);
    free(fd, a.handle).map_err(errno)?;
    expect("BUFFER of a freed handle", buffer(fd, a.handle), libc::ENOENT)?;
    ensure!(buffer(fd, twice.handle).map_err(errno)?.handles == 1 + USERS as u32);
    drop(Mapping::shared(fd, twice.mmap_offset, 4096).map_err(errno)?);
    // A drive reaches the memory through another file's handle of it.
    let other = open()?;
    let seen = import(other.as_fd(), dma_buf.as_raw_fd()).map_err(errno)?;
    let again = export(other.as_fd(), seen.handle, 0, &[(0, seen.size)]).map_err(errno)?;
    let importer = Importer::mapped(bed, &again, "nvme0", GOOD)?;
    ensure!(importer.state()?.entries.len() == 1);
    drop((importer, again, other));
    // The process that allocated releases everything: the buffer stays, and stays charged to it.
    free(fd, twice.handle).map_err(errno)?;
    drop((map, dma_buf, file));
    let file = open()?;
    let fd = file.as_fd();
    let frees = stats(fd, taken.id)?.frees;
    for user in users {
        ensure!(bed.provider("accel0")?.buffers == taken.buffers);
        ensure!(counted(&quota)? == 4 * MIB, "{}", quota.get("usage")?);
        expect("ALLOC over quota", alloc(fd, 4096), libc::EDQUOT)?;
        user.finish()?;
    }
    super::inflight::until("the last one out frees it", || Ok(counted(&quota)? == 0))?;
    ensure!(stats(fd, taken.id)?.frees == frees + 1, "it was freed more than once");
    ensure!(bed.settled()? == before);
    alloc(fd, 4 * MIB).map_err(errno)?;
    Ok(())
}

fn ends(bed: &mut Bed) -> Result<()> {
    let before = bed.settled()?;
    let socket = DescriptorSocket::new("ends")?;
    // The process that allocated the buffer is killed first, while the buffer is in the socket and no other process has it.
    let (part, dma_buf) = socket.take("allocate")?;
    part.kill()?;
    ensure!(bed.settled()? != before);
    let file = open()?;
    let fd = file.as_fd();
    let got = import(fd, dma_buf.as_raw_fd()).map_err(errno)?;
    let map = Mapping::shared(fd, got.mmap_offset, got.size as usize).map_err(errno)?;
    for at in (0..map.len()).step_by(8) {
        ensure!(map.get(at) == word(at), "byte {at:#x} is {:#x}", map.get(at));
    }
    let b = buffer(fd, got.handle).map_err(errno)?;
    ensure!(b.state == abi::P2PMEM_BUFFER_LIVE && b.handles == 1, "{b:?}");
    // Importers that are killed keep nothing, and other holders lose nothing.
    for n in 0..3 {
        socket.give(&n.to_string(), dma_buf.as_fd())?.kill()?;
        map.set(n * 4096, word(n * 4096));
    }
    super::inflight::until("killed importers are gone", || {
        let b = buffer(fd, got.handle).map_err(errno)?;
        Ok((b.handles, b.mappings, b.exports) == (1, 1, 1))
    })?;
    // A message that no process has received is the only holder.
    let (near, far) = UnixStream::pair()?;
    send(&near, dma_buf.as_fd())?;
    drop((map, dma_buf, file));
    ensure!(bed.provider("accel0")?.buffers == before.1 + 1);
    let fd = receive(&far)?;
    let file = open()?;
    let got = import(file.as_fd(), fd.as_raw_fd()).map_err(errno)?;
    drop(file);
    // The handle is gone with its file; the descriptor is left.
    let file = open()?;
    import(file.as_fd(), fd.as_raw_fd()).map_err(errno)?;
    send(&near, fd.as_fd())?;
    drop((fd, file));
    ensure!(bed.provider("accel0")?.buffers == before.1 + 1, "{got:?}");
    // No process receives the message.
    drop((near, far));
    super::inflight::until("what nobody can read any more is freed", || {
        Ok(bed.provider("accel0")?.buffers == before.1)
    })?;
    ensure!(bed.settled()? == before);
    Ok(())
}

fn revoke(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let (a, dma_buf, map) = filled(fd)?;
    let twice = import(fd, dma_buf.as_raw_fd()).map_err(errno)?;
    let other = open()?;
    let theirs = import(other.as_fd(), dma_buf.as_raw_fd()).map_err(errno)?;
    let stranger = open()?;
    let importer = Importer::mapped(bed, &dma_buf, "nvme0", GOOD)?;
    let socket = DescriptorSocket::new("revoke")?;
    let users: Vec<Part> = (0..3)
        .map(|_| socket.give("revoked", dma_buf.as_fd()))
        .collect::<Result<_>>()?;
    timed_unbind(bed)?;
    ensure!(importer.state()?.get("mapped") == 0);
    for user in users {
        user.finish()?;
    }
    // Each handle has its event, in the order of handles. A file without a handle gets the event of the provider only.
    let revoked = |file: BorrowedFd<'_>| -> Result<Vec<u32>> {
        let mut handles = Vec::new();
        loop {
            let event = sys::read_events(file, 32).map_err(errno)?.pop().context("an event")?;
            ensure!(event.provider == a.provider, "{event:?}");
            match event.type_ {
                abi::P2PMEM_EVENT_BUFFER_REVOKED => handles.push(event.handle),
                abi::P2PMEM_EVENT_PROVIDER_REMOVED => return Ok(handles),
                _ => bail!("{event:?}"),
            }
        }
    };
    ensure!(revoked(fd)? == [a.handle, twice.handle]);
    ensure!(revoked(other.as_fd())? == [theirs.handle]);
    ensure!(revoked(stranger.as_fd())?.is_empty());
    sys::survive_bus_errors()?;
    let errors = sys::bus_errors();
    map.get(0);
    ensure!(sys::bus_errors() == errors + 1);
    let b = buffer(other.as_fd(), theirs.handle).map_err(errno)?;
    ensure!(b.state == abi::P2PMEM_BUFFER_GONE && b.handles == 3, "{b:?}");
    // No process can import the buffer again, and the refusal states the reason.
    expect(
        "IMPORT of a revoked buffer",
        import(fd, dma_buf.as_raw_fd()),
        libc::ENODEV,
    )?;
    let said = explain_last(fd)?.2;
    ensure!(said.contains("is revoked") && said.contains("was removed"), "{said:?}");
    drop((map, dma_buf));
    free(fd, a.handle).map_err(errno)?;
    free(fd, twice.handle).map_err(errno)?;
    bed.publish("accel0")
}

fn bad(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let (a, dma_buf) = exported_buffer(fd, MIB, 0)?;
    let says = |what: &str, answer: Result<abi::p2pmem_import, i32>, code: i32, words: &str| -> Result<()> {
        expect(what, answer, code)?;
        let (explain, _, said) = explain_last(fd)?;
        ensure!(
            explain.error == code as u32 && said.contains(words),
            "{what}: {said:?} instead of {words:?}"
        );
        Ok(())
    };
    for no in [-1, 12345, i32::MAX, i32::MIN] {
        says(
            "a number that is no descriptor",
            import(fd, no),
            libc::EBADF,
            "is not an open file descriptor",
        )?;
    }
    let (near, _far) = UnixStream::pair()?;
    let null = std::fs::File::open("/dev/null")?;
    for other in [near.as_raw_fd(), null.as_raw_fd(), fd.as_raw_fd()] {
        says(
            "another kind of file",
            import(fd, other),
            libc::EINVAL,
            "is not a dma-buf",
        )?;
    }
    let foreign = sys::host_dma_buf(MIB).context("/dev/udmabuf")?;
    says(
        "another exporter's dma-buf",
        import(fd, foreign.as_raw_fd()),
        libc::EXDEV,
        "is a dma-buf of udmabuf, not of p2pmem",
    )?;
    for part in [&[(0, MIB / 2)][..], &[(MIB / 2, MIB / 2), (0, MIB / 2)]] {
        let part = export(fd, a.handle, 0, part).map_err(errno)?;
        says(
            "parts of a buffer",
            import(fd, part.as_raw_fd()),
            libc::EACCES,
            "has parts of a buffer",
        )?;
    }
    // Two halves in order are the whole buffer.
    let whole = export(fd, a.handle, 0, &[(0, MIB / 2), (MIB / 2, MIB / 2)]).map_err(errno)?;
    let got = import(fd, whole.as_raw_fd()).map_err(errno)?;
    free(fd, got.handle).map_err(errno)?;
    let mut flags = abi::p2pmem_import {
        fd: whole.as_raw_fd(),
        flags: 1,
        ..Default::default()
    };
    expect(
        "unknown flags",
        sys::plain(fd, abi::P2PMEM_IOC_IMPORT, &mut flags),
        libc::EINVAL,
    )?;
    for at in 0..BAD_POINTERS.len() {
        expect(
            "a bad pointer",
            sys::bad_argument(fd, abi::P2PMEM_IOC_IMPORT, at),
            libc::EFAULT,
        )?;
    }
    // A user who may not open the device has a descriptor, and nothing else.
    DescriptorSocket::new("rightless")?
        .give("rightless", dma_buf.as_fd())?
        .finish()?;
    let b = buffer(fd, a.handle).map_err(errno)?;
    ensure!((b.handles, b.mappings, b.exports) == (1, 0, 2), "{b:?}");
    drop((whole, dma_buf));
    free(fd, a.handle).map_err(errno)?;
    bed.settled().map(drop)
}

fn race(bed: &mut Bed) -> Result<()> {
    sys::survive_bus_errors()?;
    // Each process keeps a dma-buf beyond the end of its provider, so every removal makes it fail an import: none can miss a
    // removal. The processes are in the middle of imports, mappings and frees when it comes.
    let user = |busy: &Busy| -> Result<()> {
        let (mine, other) = (open()?, open()?);
        while busy.goes_on() {
            let Ok(a) = alloc(mine.as_fd(), 64 << 10) else { continue };
            let Ok(dma_buf) = export(mine.as_fd(), a.handle, 0, &[(0, a.size)]) else {
                free(mine.as_fd(), a.handle).map_err(errno)?;
                continue;
            };
            while busy.goes_on() {
                match import(other.as_fd(), dma_buf.as_raw_fd()) {
                    Ok(got) => {
                        busy.serve();
                        let map = Mapping::shared(other.as_fd(), got.mmap_offset, 4096);
                        if let Ok(map) = &map {
                            map.set(0, 1);
                        }
                        free(other.as_fd(), got.handle).map_err(errno)?;
                        if let Ok(map) = &map {
                            map.set(0, 2);
                        }
                    }
                    Err(code) => {
                        ensure!(code == libc::ENODEV, "IMPORT: {}", errno(code));
                        busy.refuse();
                        break;
                    }
                }
            }
            free(mine.as_fd(), a.handle).map_err(errno)?;
        }
        Ok(())
    };
    let ends = rounds(20);
    let busy = Busy::during(&[&user, &user, &user], |busy| {
        for _ in 0..ends {
            busy.await_served(20)?;
            let refused = busy.refused();
            bed.unbind("accel0")?;
            // Waits until at least one of them has met this removal.
            busy.await_refused_beyond(refused)?;
            bed.publish("accel0")?;
        }
        Ok(())
    })?;
    println!(
        "{NODE}: {} imports, {} refused because the provider was removed",
        busy.served(),
        busy.refused()
    );
    ensure!(
        busy.refused() >= u64::from(ends) && busy.served() >= 20 * u64::from(ends),
        "{ends} ends: {} imports, {} refused",
        busy.served(),
        busy.refused()
    );
    Ok(())
}
