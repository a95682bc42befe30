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
            array,
            no_flags,
            no_reserved,
            Undo, //
        },
        events::Events,
        handles::Handles, //
    }, //
};
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{Arc, Mutex},
    types::ScopeGuard,
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

    /// Ends all attachments, because the file is closed.
    pub(super) fn end(&self) {
        let all = core::mem::replace(&mut *self.by_handle.lock(), RBTree::new());
        for attachment in all.values() {
            attachment.end(End::Closed);
        }
    }

    /// Attaches the function of a provider to a dma-buf, and gives the attachment a handle. Dropping the result closes the handle.
    pub(super) fn attach<'a>(
        &'a self,
        handles: &'a Mutex<Handles>,
        events: &Arc<Events>,
        arg: &mut abi::Attach,
    ) -> Answer<impl Undo + 'a> {
        no_flags(arg.flags, consts::ATTACH_QUIESCED)?;
        no_reserved(arg.reserved)?;
        // Checks the array before anything is done.
        array(arg.ranges, arg.nr_ranges, arg.range_size)?;
        let provider = Orchestrator::get()?
            .provider(arg.provider)
            .ok_or_else(|| refuse!(ENOENT, "there is no provider {}", arg.provider))?;
        let quiesced = arg.flags & consts::ATTACH_QUIESCED != 0;
        let node = RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?;
        let handle = handles.lock().reserve()?;
        let attached = Attachment::new(&provider, arg.fd, handle, quiesced, events.clone());
        let attachment = attached.inspect_err(|_| handles.lock().cancel())?;
        self.by_handle.lock().insert(node.into_node(handle, attachment.clone()));
        let new = ScopeGuard::new(move || {
            // An error means that another thread has closed the handle.
            let _ = self.detach(handles, handle);
        });
        // The function does not use the addresses if this fails, as the caller does not learn the handle.
        write_ranges(&attachment, (arg.ranges, &mut arg.nr_ranges, arg.range_size))?;
        arg.handle = handle;
        arg.size = attachment.size;
        arg.info = attachment.status().1;
        Ok(new)
    }

    /// Closes the handle of an attachment, whose function does not use the addresses any more. Errors: `ENOENT`.
    pub(super) fn detach(&self, handles: &Mutex<Handles>, handle: u32) -> Answer {
        let removed = self.by_handle.lock().remove(&handle);
        let attachment = removed.ok_or_else(|| unknown(handle))?;
        handles.lock().cancel();
        attachment.end(End::Detached);
        Ok(())
    }

    /// Describes an attachment.
    pub(super) fn describe(&self, arg: &mut abi::Attachment) -> Answer {
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
    let (_, mut out) = array(at, *count, size)?;
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
