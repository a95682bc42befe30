// SPDX-License-Identifier: GPL-2.0

//! The attachments of an open file: their handles, their ioctls, and their events.
//!
//! In a build with `P2PMEM_ATTACH=n`, `uapi/absent.rs` stands in for this file.
//!
//! Context: process context, may sleep. `Attachments::by_handle` and `File::handles` are not held while the other one is
//! taken, nor while an attachment begins or ends, which calls the exporter.

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::{
        abi::{
            self,
            consts, //
        },
        refusal::{
            refuse,
            Answer,
            Refusal, //
        }, //
    },
    share::attachment::{
        Attachment,
        End,
        Watcher, //
    },
    uapi::{
        argument::{
            no_flags,
            no_reserved,
            Argument,
            ArrayWriter, //
        },
        events::Events,
        handles::Handles, //
    }, //
};
use core::mem::offset_of;
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{Arc, Mutex},
};

impl Watcher for Events {
    fn attachment_event(&self, kind: u32, provider: u32, handle: u32) {
        self.push(kind, provider, handle);
    }
}

/// The attachments of a file.
#[pin_data]
pub(super) struct Attachments {
    #[pin]
    by_handle: Mutex<RBTree<u32, Arc<Attachment>>>,
}

impl Attachments {
    /// The bit of `P2PMEM_IOC_INFO`.
    pub(super) const FEATURE: u64 = consts::FEATURE_ATTACH;

    /// Returns an initialiser of a file without attachments.
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            by_handle <- new_mutex!(RBTree::new()),
        })
    }

    /// `P2PMEM_IOC_ATTACH_DMABUF`: attaches the function of a provider to a dma-buf, and gives the attachment a handle.
    pub(super) fn attach_ioctl(&self, handles: &Mutex<Handles>, events: &Arc<Events>, arg: Argument) -> Answer {
        let mut made = None;
        let answer = arg.exchange(
            offset_of!(abi::Attach, size),
            |a: &mut abi::Attach| {
                let attachment = self.attach(handles, events, a)?;
                made = Some(a.handle);
                write_ranges(&attachment, (a.ranges, &mut a.nr_ranges, a.range_size))
            },
            true,
        );
        if let (Err(_), Some(handle)) = (&answer, made) {
            // The caller does not learn the handle, so the function does not use the addresses.
            let _ = self.detach(handles, handle);
        }
        answer
    }

    /// `P2PMEM_IOC_DETACH_DMABUF`: closes the handle of an attachment.
    pub(super) fn detach_ioctl(&self, handles: &Mutex<Handles>, arg: Argument) -> Answer {
        arg.exchange(
            offset_of!(abi::Detach, flags),
            |a: &mut abi::Detach| {
                no_flags(a.flags, 0)?;
                self.detach(handles, a.handle)
            },
            false,
        )
    }

    /// `P2PMEM_IOC_ATTACHMENT`: describes an attachment.
    pub(super) fn describe_ioctl(&self, arg: Argument) -> Answer {
        arg.exchange(offset_of!(abi::Attachment, size), |a| self.describe(a), true)
    }

    /// Ends all attachments, because the file is closed.
    pub(super) fn end(&self) {
        let all = core::mem::replace(&mut *self.by_handle.lock(), RBTree::new());
        for attachment in all.values() {
            attachment.end(End::Closed);
        }
    }

    fn attach(&self, handles: &Mutex<Handles>, events: &Arc<Events>, arg: &mut abi::Attach) -> Answer<Arc<Attachment>> {
        no_flags(arg.flags, consts::ATTACH_QUIESCED)?;
        no_reserved(arg.reserved)?;
        // Checks the array before anything is done.
        ArrayWriter::new(arg.ranges, arg.nr_ranges, arg.range_size)?;
        let provider = Orchestrator::get()?
            .provider(arg.provider)
            .ok_or_else(|| refuse!(ENOENT, "there is no provider {}", arg.provider))?;
        let quiesced = arg.flags & consts::ATTACH_QUIESCED != 0;
        let node = RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?;
        let handle = handles.lock().reserve()?;
        let attached = Attachment::new(&provider, arg.fd, handle, quiesced, events.clone());
        let attachment = attached.inspect_err(|_| handles.lock().cancel())?;
        self.by_handle.lock().insert(node.into_node(handle, attachment.clone()));
        arg.handle = handle;
        arg.size = attachment.size;
        arg.info = attachment.status().1;
        Ok(attachment)
    }

    /// The function does not use the addresses any more. Errors: `ENOENT`.
    fn detach(&self, handles: &Mutex<Handles>, handle: u32) -> Answer {
        let removed = self.by_handle.lock().remove(&handle);
        let attachment = removed.ok_or_else(|| unknown(handle))?;
        handles.lock().cancel();
        attachment.end(End::Detached);
        Ok(())
    }

    fn describe(&self, arg: &mut abi::Attachment) -> Answer {
        no_flags(arg.flags, 0)?;
        no_reserved(arg.reserved)?;
        let found = self.by_handle.lock().get(&arg.handle).cloned();
        let attachment = found.ok_or_else(|| unknown(arg.handle))?;
        write_ranges(&attachment, (arg.ranges, &mut arg.nr_ranges, arg.range_size))?;
        arg.provider = attachment.provider();
        arg.size = attachment.size;
        (arg.state, arg.info) = attachment.status();
        Ok(())
    }
}

/// Returns the refusal for a handle of no attachment.
fn unknown(handle: u32) -> Refusal {
    refuse!(ENOENT, "there is no attachment {} on this file", handle)
}

/// Writes the ranges of an attachment to an array: address, number of elements, and their size. The number becomes that of
/// all ranges.
fn write_ranges(attachment: &Attachment, (at, count, size): (u64, &mut u32, u32)) -> Answer {
    let mut out = ArrayWriter::new(at, *count, size)?;
    let (ranges, all) = attachment.ranges(*count as usize)?;
    for range in &ranges {
        out.write(&abi::DmaRange {
            address: range.offset,
            size: range.size,
        })?;
    }
    *count = all as u32;
    Ok(())
}
