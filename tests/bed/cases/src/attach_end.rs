// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ends of attachments: the exporter takes its memory back, the process is killed, the provider is removed, the NIC is
//! unbound, and several of these at once. No write of the accelerator reaches the NIC afterwards.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_accel_regs::driver::{Accel, Error};
use p2pmem_sys as abi;
use rustix::event::epoll;

use super::attach::{
    Doorbell, PAGE, Ringer, arrives, attach, detach, is_kept_out, listing, none_attached, query, rung,
};
use super::busy::{at_once, contended};
use super::dmabuf::Importer;
use super::inflight::until;
use super::life::{Part, ready};
use super::{Bed, Case, command, errno, expect, explain_last, open, write};
use crate::limits::rounds;
use crate::sys;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "attach-revoked",
        about: "after the NIC's driver took a doorbell page back, the accelerator does no DMA until the handle is closed",
        topology: "nic",
        ruins: false,
        run: revoked,
    },
    Case {
        name: "attach-in-flight",
        about: "of an accelerator that rings without a pause, no doorbell arrives after its page was destroyed",
        topology: "nic",
        ruins: false,
        run: in_flight,
    },
    Case {
        name: "attach-killed",
        about: "killing the process of an attachment stops the function until a user confirms its state, also over a reset and another binding",
        topology: "nic",
        ruins: false,
        run: killed,
    },
    Case {
        name: "attach-removed",
        about: "unbinding, disabling and resetting the provider end its attachments, and the file gets the event",
        topology: "nic",
        ruins: false,
        run: removed,
    },
    Case {
        name: "attach-nic-unbind",
        about: "unbinding the NIC's driver ends the attachments to its doorbell pages",
        topology: "nic",
        ruins: false,
        run: nic_unbound,
    },
    Case {
        name: "attach-forgotten",
        about: "unloading the module, or removing the function, ends what is known of a function that may still use addresses",
        topology: "small",
        ruins: false,
        run: forgotten,
    },
    Case {
        name: "attach-reclaim",
        about: "the exporter can take its memory back to reclaim memory: no lock for that is held while memory is allocated",
        topology: "nic",
        ruins: false,
        run: reclaim,
    },
    Case {
        name: "attach-race",
        about: "the exporter revokes while the provider is unbound and the file is closed, in any order",
        topology: "nic",
        ruins: false,
        run: race,
    },
    Case {
        name: "attach-and-unbind",
        about: "attaching while the provider is unbound succeeds or fails with ENODEV or ENOENT, and nothing stays attached",
        topology: "nic",
        ruins: false,
        run: attach_and_unbind,
    },
];

/// Waits for an event of an attachment.
fn event(fd: BorrowedFd<'_>, kind: u32, handle: u32) -> Result<()> {
    loop {
        let events = sys::read_events(fd, 8 * size_of::<abi::p2pmem_event>()).map_err(errno)?;
        if events.iter().any(|event| event.type_ == kind && event.handle == handle) {
            return Ok(());
        }
    }
}

fn revoked(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let ringer = Ringer::new(bed, "accel0")?;
    let (file, other) = (open()?, open()?);
    let fd = file.as_fd();
    let bell = Doorbell::new(bed)?;
    let attached = attach(fd, row.id, &bell.dma_buf, 0).map_err(errno)?;
    let (page, handle) = (attached.address()?, attached.answer.handle);
    // An attachment of another program to memory that stays.
    let host = sys::host_dma_buf(PAGE)?;
    let bystander = attach(other.as_fd(), row.id, &host, 0).map_err(errno)?;
    arrives(&ringer, page)?;
    bell.verbs.destroy_uar(&bell.uar).map_err(errno)?;
    ensure!(!ringer.accel.dma_enabled()?, "the function can still do DMA");
    is_kept_out(&ringer, page)?;
    event(fd, abi::P2PMEM_EVENT_ATTACHMENT_REVOKED, handle)?;
    let state = query(fd, handle).map_err(errno)?;
    ensure!(
        state.state == abi::P2PMEM_ATTACHMENT_REVOKED && state.nr_ranges == 0 && state.size == PAGE,
        "{state:x?}"
    );
    let text = listing()?;
    ensure!(text.contains(", revoked, not translated, by pid "), "{text}");
    event(
        other.as_fd(),
        abi::P2PMEM_EVENT_ATTACHMENT_STOPPED,
        bystander.answer.handle,
    )?;
    let state = query(other.as_fd(), bystander.answer.handle).map_err(errno)?;
    ensure!(
        state.state == abi::P2PMEM_ATTACHMENT_STOPPED && state.nr_ranges == 1,
        "{state:x?}"
    );
    expect(
        "attaching meanwhile",
        attach(other.as_fd(), row.id, &host, 0),
        libc::EBUSY,
    )?;
    let said = explain_last(other.as_fd())?.2;
    ensure!(said.contains("P2PMEM_ATTACH_QUIESCED"), "{said}");
    // The write would arrive: with bus mastering, which only root enables, the NIC counts it.
    ringer.accel.enable_dma()?;
    arrives(&ringer, page)?;
    // The dma-buf itself is of no use any more.
    expect(
        "attaching to the revoked page",
        attach(other.as_fd(), row.id, &bell.dma_buf, abi::P2PMEM_ATTACH_QUIESCED),
        libc::ENODEV,
    )?;
    // That call confirmed that the function has stopped, as closing the handle does.
    let state = query(other.as_fd(), bystander.answer.handle).map_err(errno)?;
    ensure!(state.state == abi::P2PMEM_ATTACHMENT_LIVE, "{state:x?}");
    detach(fd, handle).map_err(errno)?;
    // Once more: this time, closing the handle confirms.
    let bell = Doorbell::new(bed)?;
    let attached = attach(fd, row.id, &bell.dma_buf, 0).map_err(errno)?;
    arrives(&ringer, attached.address()?)?;
    bell.verbs.destroy_uar(&bell.uar).map_err(errno)?;
    ensure!(!ringer.accel.dma_enabled()?);
    detach(fd, attached.answer.handle).map_err(errno)?;
    let state = query(other.as_fd(), bystander.answer.handle).map_err(errno)?;
    ensure!(state.state == abi::P2PMEM_ATTACHMENT_LIVE, "{state:x?}");
    ensure!(ringer.accel.dma_enabled()?, "the function stays without DMA");
    detach(other.as_fd(), bystander.answer.handle).map_err(errno)?;
    ensure!(!ringer.accel.dma_enabled()?);
    Ok(())
}

fn in_flight(bed: &mut Bed) -> Result<()> {
    const ROUNDS: u32 = 3;
    let row = bed.provider("accel0")?;
    for _ in 0..rounds(ROUNDS) {
        let ringer = Ringer::new(bed, "accel0")?;
        let file = open()?;
        let bell = Doorbell::new(bed)?;
        let attached = attach(file.as_fd(), row.id, &bell.dma_buf, 0).map_err(errno)?;
        let page = attached.address()?;
        let sent = AtomicU64::new(0);
        let begun = rung()?;
        thread::scope(|scope| -> Result<()> {
            let ringing = scope.spawn(|| {
                loop {
                    match ringer.ring(page) {
                        Ok(()) => sent.fetch_add(1, Ordering::SeqCst),
                        Err(error) => return error,
                    };
                }
            });
            let some = until("the NIC counts doorbells", || Ok(rung()? > begun + 10));
            // Also if that failed: it ends the thread.
            let destroyed = bell.verbs.destroy_uar(&bell.uar).map_err(errno);
            // The NIC has executed the destruction, and before it all doorbells that came before.
            let before = rung()?;
            let error = ringing.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
            some.and(destroyed)?;
            ensure!(matches!(error, Error::Command { .. }), "ringing ended with {error}");
            is_kept_out(&ringer, page)?;
            let after = rung()?;
            ensure!(
                after == before,
                "{} doorbells arrived after the page was destroyed",
                after - before
            );
            println!(
                "{} doorbells before the page was destroyed",
                sent.load(Ordering::SeqCst)
            );
            Ok(())
        })?;
        detach(file.as_fd(), attached.answer.handle).map_err(errno)?;
    }
    Ok(())
}

/// The name of the part of these tests that runs in its own process.
pub(super) const PART: &str = "attach-and-wait";

/// Attaches accel0 to a doorbell page.
pub(super) fn part() -> Result<()> {
    let bed = Bed {
        devices: crate::devices::load()?,
    };
    let row = bed.provider("accel0")?;
    let file = open()?;
    let bell = Doorbell::new(&bed)?;
    attach(file.as_fd(), row.id, &bell.dma_buf, 0).map_err(errno)?;
    ready()
}

/// Returns the address of the only attached range.
fn listed_address() -> Result<u64> {
    let text = listing()?;
    let line = text.lines().find_map(|line| line.strip_prefix("  0x"));
    let (address, _) = line
        .and_then(|line| line.split_once('+'))
        .with_context(|| text.clone())?;
    Ok(u64::from_str_radix(address, 16)?)
}

fn killed(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let ringer = Ringer::new(bed, "accel0")?;
    let part = Part::start(PART, &[])?;
    let page = listed_address()?;
    arrives(&ringer, page)?;
    part.kill()?;
    none_attached()?;
    is_kept_out(&ringer, page)?;
    let file = open()?;
    let host = sys::host_dma_buf(PAGE)?;
    expect(
        "attaching afterwards",
        attach(file.as_fd(), row.id, &host, 0),
        libc::EBUSY,
    )?;
    let next = attach(file.as_fd(), row.id, &host, abi::P2PMEM_ATTACH_QUIESCED).map_err(errno)?;
    ensure!(ringer.accel.dma_enabled()?);
    detach(file.as_fd(), next.answer.handle).map_err(errno)?;
    // The kernel also says that a reset is done if it failed. Another binding stops nothing.
    drop(ringer);
    for how in ["reset", "unbind"] {
        Part::start(PART, &[])?.kill()?;
        match how {
            "reset" => write(&bed.device("accel0")?.sysfs().join("reset"), "1")?,
            _ => bed.unpublish("accel0")?,
        }
        bed.publish("accel0")?;
        let row = bed.provider("accel0")?;
        expect(
            "attaching afterwards",
            attach(file.as_fd(), row.id, &host, 0),
            libc::EBUSY,
        )
        .context(how)?;
        confirm_stopped(bed)?;
    }
    // A process that ends without detaching is like one that is killed.
    Part::start(PART, &[])?.finish()?;
    let row = bed.provider("accel0")?;
    expect(
        "attaching afterwards",
        attach(file.as_fd(), row.id, &host, 0),
        libc::EBUSY,
    )?;
    confirm_stopped(bed)
}

fn removed(bed: &mut Bed) -> Result<()> {
    let accel = Accel::open(&bed.device("accel0")?.bdf)?;
    let host = sys::host_dma_buf(PAGE)?;
    for how in ["unbind", "disable", "reset"] {
        let file = open()?;
        let fd = file.as_fd();
        let row = bed.provider("accel0")?;
        let attached = attach(fd, row.id, &host, 0).map_err(errno).context(how)?;
        let handle = attached.answer.handle;
        ensure!(accel.dma_enabled()?);
        match how {
            "unbind" => bed.unbind("accel0")?,
            "disable" => write(&bed.provider_dir("accel0")?.join("enable"), "0")?,
            _ => write(&bed.device("accel0")?.sysfs().join("reset"), "1")?,
        }
        ensure!(!accel.dma_enabled()?, "{how}: the function can still do DMA");
        event(fd, abi::P2PMEM_EVENT_ATTACHMENT_REVOKED, handle).context(how)?;
        let state = query(fd, handle).map_err(errno)?;
        ensure!(
            state.state == abi::P2PMEM_ATTACHMENT_GONE && state.nr_ranges == 0 && state.provider == row.id,
            "{how}: {state:x?}"
        );
        expect(
            "attaching without the provider",
            attach(fd, row.id, &host, 0),
            libc::ENOENT,
        )?;
        bed.publish("accel0")?;
        let row = bed.provider("accel0")?;
        // The device may still use the address.
        expect("attaching before", attach(fd, row.id, &host, 0), libc::EBUSY).context(how)?;
        detach(fd, handle).map_err(errno)?;
        let again = attach(fd, row.id, &host, 0).map_err(errno).context(how)?;
        detach(fd, again.answer.handle).map_err(errno)?;
    }
    ensure!(!accel.dma_enabled()?);
    Ok(())
}

fn forgotten(bed: &mut Bed) -> Result<()> {
    let host = sys::host_dma_buf(PAGE)?;
    let attach_once = || {
        let file = open()?;
        let row = bed.provider("accel0")?;
        attach(file.as_fd(), row.id, &host, 0).map_err(errno)
    };
    for how in ["unload", "remove"] {
        // Closing the file confirms nothing.
        attach_once().context(how)?;
        bed.unpublish("accel0")?;
        if how == "unload" {
            command("rmmod", &["p2pmem"])?;
            bed.load_module()?;
        } else {
            write(&bed.device("accel0")?.sysfs().join("remove"), "1")?;
            write(Path::new("/sys/bus/pci/rescan"), "1")?;
        }
        bed.publish("accel0")?;
    }
    attach_once()?;
    confirm_stopped(bed)
}

fn reclaim(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let host = sys::host_dma_buf(PAGE)?;
    let file = open()?;
    // The kernel allocates memory while it adds the file.
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &file, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    let attached = attach(file.as_fd(), row.id, &host, 0).map_err(errno)?;
    let importer = Importer::new()?;
    importer
        .say(&format!("invalidate {}", host.as_raw_fd()))
        .map_err(errno)?;
    event(
        file.as_fd(),
        abi::P2PMEM_EVENT_ATTACHMENT_REVOKED,
        attached.answer.handle,
    )?;
    detach(file.as_fd(), attached.answer.handle).map_err(errno)
}

fn nic_unbound(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let ringer = Ringer::new(bed, "accel0")?;
    let file = open()?;
    let bell = Doorbell::new(bed)?;
    let attached = attach(file.as_fd(), row.id, &bell.dma_buf, 0).map_err(errno)?;
    let handle = attached.answer.handle;
    arrives(&ringer, attached.address()?)?;
    bed.unbind("nic0")?;
    ensure!(!ringer.accel.dma_enabled()?, "the function can still do DMA");
    event(file.as_fd(), abi::P2PMEM_EVENT_ATTACHMENT_REVOKED, handle)?;
    let state = query(file.as_fd(), handle).map_err(errno)?;
    ensure!(state.state == abi::P2PMEM_ATTACHMENT_REVOKED, "{state:x?}");
    detach(file.as_fd(), handle).map_err(errno)?;
    drop(bell);
    let nic = bed.device("nic0")?;
    write(Path::new("/sys/bus/pci/drivers_probe"), &nic.bdf)?;
    until("the NIC is back", || Ok(nic.sysfs().join("infiniband").exists()))
}

fn race(bed: &mut Bed) -> Result<()> {
    const ROUNDS: u32 = 12;
    let bed = &*bed;
    let outcome = contended(rounds(ROUNDS), || {
        bed.publish("accel0")?;
        let row = bed.provider("accel0")?;
        let file = open()?;
        let bell = Doorbell::new(bed)?;
        // Nobody has confirmed the attachment of the round before.
        attach(file.as_fd(), row.id, &bell.dma_buf, abi::P2PMEM_ATTACH_QUIESCED).map_err(errno)?;
        let (verbs, uar) = (&bell.verbs, &bell.uar);
        let (unbound, both, met) = at_once(
            || bed.unbind("accel0"),
            || at_once(|| verbs.destroy_uar(uar), || drop(file)),
        )?;
        let (destroyed, (), also) = both?;
        unbound?;
        destroyed.map_err(errno)?;
        none_attached()?;
        let accel = Accel::open(&bed.device("accel0")?.bdf)?;
        ensure!(!accel.dma_enabled()?, "the function can still do DMA");
        Ok(met && also)
    });
    confirm_stopped(bed)?;
    outcome
}

/// Confirms that accel0 uses no address of an attachment that has ended.
fn confirm_stopped(bed: &Bed) -> Result<()> {
    bed.publish("accel0")?;
    let row = bed.provider("accel0")?;
    let file = open()?;
    let host = sys::host_dma_buf(PAGE)?;
    let attached = attach(file.as_fd(), row.id, &host, abi::P2PMEM_ATTACH_QUIESCED).map_err(errno)?;
    detach(file.as_fd(), attached.answer.handle).map_err(errno)
}

fn attach_and_unbind(bed: &mut Bed) -> Result<()> {
    const ROUNDS: u32 = 12;
    // DMA debugging warns of more than seven mappings of one page at the same time.
    const LIVE: usize = 4;
    let bed = &*bed;
    let host = sys::host_dma_buf(PAGE)?;
    let mut done = 0;
    let outcome = contended(rounds(ROUNDS), || {
        bed.publish("accel0")?;
        let row = bed.provider("accel0")?;
        let file = open()?;
        let (unbound, refused, met) = at_once(
            || bed.unbind("accel0"),
            || {
                let mut live = VecDeque::new();
                // Until the provider is gone.
                loop {
                    match attach(file.as_fd(), row.id, &host, abi::P2PMEM_ATTACH_QUIESCED) {
                        Ok(attached) => live.push_back(attached.answer.handle),
                        Err(code) => return Ok(code),
                    }
                    done += 1;
                    if live.len() == LIVE {
                        live.pop_front().map_or(Ok(()), |oldest| detach(file.as_fd(), oldest))?;
                    }
                }
            },
        )?;
        unbound?;
        let refused = refused.map_err(errno)?;
        if ![libc::ENODEV, libc::ENOENT].contains(&refused) {
            bail!("attaching while unbinding: {}", errno(refused));
        }
        none_attached()?;
        Ok(met)
    });
    println!("{done} attachments were made");
    confirm_stopped(bed)?;
    outcome
}
