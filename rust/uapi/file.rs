// SPDX-License-Identifier: GPL-2.0

//! An open file of `/dev/p2pmem`: its handles, its rules, its last decision and its events.
//!
//! Each field has mutexes of its own. None of them is held while another is taken, while user space is accessed, or while
//! a buffer ends.

use crate::{
    alloc::{
        explanation::{
            Decision,
            Explanation,
            QuickDecision, //
        },
        orchestrator::{
            OpenFile,
            Orchestrator, //
        },
        rules::RuleSet, //
    },
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
    mem::buffer::{
        Buffer,
        Holder, //
    },
    share::export_count::ExportCount,
    uapi::{
        argument::Undo,
        attachments::Attachments,
        events::Events,
        handles::{
            Handles,
            Slot, //
        }, //
    }, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// The last decision of a file.
struct LastDecision {
    /// The last decision or refusal, for `P2PMEM_EXPLAIN_LAST`.
    decision: Option<Decision>,
    /// An allocation that the next quick decision reuses.
    spare: Option<KBox<QuickDecision>>,
}

/// An open file.
#[pin_data]
pub(crate) struct File {
    /// The number of this file, unique until the module is unloaded.
    pub(crate) id: u64,
    pub(super) orchestrator: Arc<Orchestrator>,
    #[pin]
    pub(super) handles: Mutex<Handles>,
    #[pin]
    pub(super) attachments: Attachments,
    /// The dma-bufs that this file has exported, against its limit.
    pub(super) exports: ExportCount,
    /// The file's own rules.
    #[pin]
    rules: Mutex<Option<Arc<RuleSet>>>,
    #[pin]
    last: Mutex<LastDecision>,
    pub(super) events: Arc<Events>,
}

impl File {
    /// Opens a file and registers it with the orchestrator. Errors: `ENODEV` (the module is being unloaded), `ENOMEM`.
    pub(super) fn new() -> Result<Arc<Self>> {
        let orchestrator = Orchestrator::get()?;
        let for_file = orchestrator.clone();
        let exports = ExportCount::new()?;
        let events = Events::new()?;
        let file: Arc<Self> = Arc::pin_init(
            pin_init!(Self {
                id: for_file.file_id(),
                orchestrator: for_file,
                handles <- new_mutex!(Handles::new()),
                attachments <- Attachments::new(),
                exports,
                rules <- new_mutex!(None),
                last <- new_mutex!(LastDecision {
                    decision: None,
                    spare: None,
                }),
                events,
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        orchestrator.add_file(file.id, file.clone())?;
        Ok(file)
    }

    // Handles

    /// Gives a buffer a new handle. Errors: `ENOMEM`, `EMFILE` (the file's limit).
    pub(super) fn insert(&self, holder: Holder) -> Answer<NewHandle<'_>> {
        // Allocates before it takes the lock.
        let slot = Slot::new()?;
        let mut handles = self.handles.lock();
        match handles.number() {
            Ok(handle) => {
                handles.insert(handle, holder, slot);
                Ok(NewHandle {
                    file: self,
                    number: handle,
                    close: Self::free_handle,
                })
            }
            Err(refusal) => {
                // Dropping the holder may end the buffer, which takes other locks.
                drop(handles);
                drop(holder);
                Err(refusal)
            }
        }
    }

    /// Returns the buffer of a handle. Errors: `ENOENT`.
    pub(super) fn find_buffer(&self, handle: u32) -> Answer<Arc<Buffer>> {
        let found = self.handles.lock().buffer(handle);
        found.ok_or_else(|| refuse!(ENOENT, "there is no handle {} on this file", handle))
    }

    /// Frees a handle, and the buffer if this was its last holder. Errors: `ENOENT`.
    pub(super) fn free_handle(&self, handle: u32) -> Answer {
        let holder = self.handles.lock().remove(handle);
        // The lock is released: dropping the holder may end the buffer.
        match holder {
            Some(_) => Ok(()),
            None => Err(refuse!(ENOENT, "there is no handle {} on this file", handle)),
        }
    }

    // Decisions

    /// Remembers a decision and returns its buffer, or the refusal if the decision found none.
    pub(super) fn settle(&self, holder: Option<Holder>, decision: Decision) -> Answer<Holder> {
        let refusal = match &decision {
            Decision::Explanation(explanation) if holder.is_none() => explanation.refusal(),
            _ => Refusal::from(EINVAL),
        };
        self.remember(Some(decision));
        holder.ok_or(refusal)
    }

    /// Takes the spare allocation for a quick decision, if there is one.
    #[inline(always)]
    pub(super) fn take_spare(&self) -> Option<KBox<QuickDecision>> {
        self.last.lock().spare.take()
    }

    /// Keeps an allocation as the spare one.
    #[inline(always)]
    pub(super) fn put_spare(&self, quick: KBox<QuickDecision>) {
        let old = self.last.lock().spare.replace(quick);
        drop(old);
    }

    /// Replaces the last decision. `None` says that there was no memory to remember it.
    pub(super) fn remember(&self, decision: Option<Decision>) {
        let mut last = self.last.lock();
        let old = match core::mem::replace(&mut last.decision, decision) {
            Some(Decision::QuickDecision(quick)) => last.spare.replace(quick).map(Decision::QuickDecision),
            other => other,
        };
        drop(last);
        drop(old);
    }

    /// Explains the last decision or refusal. Errors: `ENODATA` (none yet, or no memory to remember it), `ENOMEM`.
    pub(super) fn last_explanation(&self) -> Answer<KBox<Explanation>> {
        let last = self.last.lock();
        // This refusal has no text, so that it does not replace the last decision.
        let explanation = match last.decision.as_ref().ok_or(Refusal::from(abi::errno(abi::ENODATA)))? {
            Decision::QuickDecision(quick) => quick.explanation()?,
            Decision::Explanation(explanation) => explanation.again()?,
        };
        Ok(KBox::new(explanation, GFP_KERNEL_ACCOUNT)?)
    }

    /// Remembers a refusal for `P2PMEM_EXPLAIN_LAST` and logs it. A refusal without text is neither.
    pub(super) fn refused(&self, what: &str, refusal: &Refusal) {
        refusal.log(what);
        if refusal.text().as_str().is_empty() {
            return;
        }
        let error = -refusal.error.to_errno();
        let remembered = match &self.last.lock().decision {
            // A decision that found no provider was remembered with its verdicts just before.
            Some(Decision::Explanation(last)) => last.error == error && last.text.as_str() == refusal.text().as_str(),
            _ => false,
        };
        if !remembered {
            let explanation = KBox::new(Explanation::of_refusal(error, *refusal.text()), GFP_KERNEL_ACCOUNT);
            self.remember(explanation.ok().map(Decision::Explanation));
        }
    }

    // Rules

    /// Returns the file's own rules.
    #[inline(always)]
    pub(super) fn rules(&self) -> Option<Arc<RuleSet>> {
        self.rules.lock().clone()
    }

    /// Replaces the file's own rules.
    pub(super) fn replace_rules(&self, new: Option<Arc<RuleSet>>) {
        let old = core::mem::replace(&mut *self.rules.lock(), new);
        drop(old);
    }
}

/// A new handle, whose number the caller of the ioctl does not have yet. Dropping it closes the handle.
pub(super) struct NewHandle<'a> {
    pub(super) file: &'a File,
    pub(super) number: u32,
    /// Closes the handle.
    pub(super) close: fn(&File, u32) -> Answer,
}

impl Undo for NewHandle<'_> {
    fn keep(self) {
        core::mem::forget(self);
    }
}

impl Drop for NewHandle<'_> {
    fn drop(&mut self) {
        // An error means that another thread has closed the handle.
        let _ = (self.close)(self.file, self.number);
    }
}

impl OpenFile for File {
    fn notify(&self, kind: u32, provider: u32) {
        self.events.push(kind, provider, 0);
    }

    /// Queues one event for each handle of a revoked buffer.
    fn notify_revoked(&self, buffer: &Buffer) {
        let provider = buffer.provider.id;
        let mut last = 0;
        loop {
            let next = self.handles.lock().next_of(buffer, last);
            match next {
                Some(handle) => self.events.push(consts::EVENT_BUFFER_REVOKED, provider, handle),
                // The file has freed its handles, and only mappings keep the buffer.
                None if last == 0 && buffer.file == self.id => {
                    self.events.push(consts::EVENT_BUFFER_REVOKED, provider, 0)
                }
                None => return,
            }
            last = next.unwrap_or(u32::MAX);
        }
    }

    fn refused(&self, what: &str, refusal: &Refusal) {
        File::refused(self, what, refusal);
    }
}
