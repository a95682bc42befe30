// SPDX-License-Identifier: GPL-2.0

//! An open file of `/dev/p2pmem`: its handles, its rules, its last decision and its events.
//!
//! Each field has mutexes of its own. None of them is held while another is taken, while user space is accessed, or while
//! a buffer ends.

use crate::{
    alloc::{
        explanation::{
            Decision,
            Explanation, //
        },
        orchestrator::{
            OpenFile,
            Orchestrator, //
        },
        request::AllocRequest,
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
            Refusal,
            Text, //
        }, //
    },
    mem::buffer::{
        Buffer,
        Holder, //
    },
    share::export_count::ExportCount,
    uapi::{
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
    types::ScopeGuard,
};

/// What `P2PMEM_EXPLAIN_LAST` explains.
enum Last {
    Decision(KBox<Decision>),
    /// A refusal without a decision: the errno, positive, and the message.
    Refusal(i32, KBox<Text>),
}

/// The last decision of a file.
struct LastDecision {
    /// `None` before the first one, and if there was no memory to remember it.
    last: Option<Last>,
    /// A decision whose memory the next one reuses.
    spare: Option<KBox<Decision>>,
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
                    last: None,
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

    /// Gives a buffer a new handle, and returns its number. Dropping the result closes the handle. Errors: `ENOMEM`, `EMFILE` (the
    /// file's limit).
    pub(super) fn insert(&self, holder: Holder) -> Answer<ScopeGuard<u32, impl FnOnce(u32) + '_>> {
        // Allocates before it takes the lock.
        let slot = Slot::new()?;
        let mut handles = self.handles.lock();
        match handles.number() {
            Ok(handle) => {
                handles.insert(handle, holder, slot);
                Ok(ScopeGuard::new_with_data(handle, |handle| {
                    // An error means that another thread has closed the handle.
                    let _ = self.free_handle(handle);
                }))
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

    /// Returns the place for a decision on a request: the spare one, or a new one. Errors: `ENOMEM`.
    fn decision(&self, request: &AllocRequest) -> Result<KBox<Decision>> {
        let spare = self.last.lock().spare.take();
        match spare {
            Some(spare) => Ok(spare),
            None => Ok(KBox::new(Decision::new(request), GFP_KERNEL_ACCOUNT)?),
        }
    }

    /// Decides on a request without allocating. Returns the id of the chosen provider, 0 for none, and the explanation, except if a
    /// provider was chosen for a `silent` caller.
    pub(super) fn decide(&self, request: &AllocRequest, silent: bool) -> Answer<(u32, Option<Explanation>)> {
        if let Some(chosen) = silent.then(|| self.orchestrator.probe(request, self.id)).flatten() {
            return Ok((chosen, None));
        }
        let mut decision = self.decision(request)?;
        self.orchestrator.explain(request, self.id, &mut decision)?;
        let chosen = decision.chosen();
        let explanation = match silent && chosen != 0 {
            true => None,
            false => Some(decision.explanation()?),
        };
        let old = self.last.lock().spare.replace(decision);
        drop(old);
        Ok((chosen, explanation))
    }

    /// Allocates the buffers of a request, at most `capacity` parts of a stripe, for the operation `what`. Calls `keep` with the
    /// decision, which has the buffers and is then remembered. A refusal of a decision is logged and remembered here and has no
    /// message, so that [`Self::refused`] does not replace it.
    pub(super) fn allocate<T>(
        &self,
        what: &str,
        request: &AllocRequest,
        capacity: usize,
        keep: impl FnOnce(&mut Decision) -> Answer<T>,
    ) -> Answer<T> {
        let mut decision = self.decision(request)?;
        self.orchestrator.alloc(request, capacity, self.id, &mut decision)?;
        let answer = if decision.is_complete() {
            let answer = keep(&mut decision);
            // Buffers that `keep` did not take end here, and not with the remembered decision.
            drop(decision.take());
            answer
        } else {
            let refusal = decision.explanation()?.refusal();
            refusal.log(what);
            Err(Refusal::from(refusal.error))
        };
        self.remember(Some(Last::Decision(decision)));
        answer
    }

    /// Allocates the one buffer of a request as [`Self::allocate`] does. Returns it and the class of its path.
    pub(super) fn allocate_one(&self, what: &str, request: &AllocRequest) -> Answer<(Holder, u32)> {
        self.allocate(what, request, 1, |decision| Ok(decision.take().next().ok_or(EINVAL)?))
    }

    /// Replaces the last decision.
    fn remember(&self, new: Option<Last>) {
        let mut last = self.last.lock();
        let old = match core::mem::replace(&mut last.last, new) {
            Some(Last::Decision(decision)) => last.spare.replace(decision).map(Last::Decision),
            other => other,
        };
        drop(last);
        drop(old);
    }

    /// Explains the last decision or refusal. Errors: `ENODATA` (none yet, or no memory to remember it), `ENOMEM`.
    pub(super) fn last_explanation(&self) -> Answer<Explanation> {
        match &self.last.lock().last {
            // This refusal has no text, so that it does not replace the last decision.
            None => Err(Refusal::from(abi::errno(abi::ENODATA))),
            Some(Last::Decision(decision)) => Ok(decision.explanation()?),
            Some(Last::Refusal(error, text)) => Ok(Explanation::of_refusal(*error, **text)),
        }
    }

    /// Remembers a refusal for `P2PMEM_EXPLAIN_LAST` and logs it. A refusal without text is neither.
    pub(super) fn refused(&self, what: &str, refusal: &Refusal) {
        refusal.log(what);
        if !refusal.text().as_str().is_empty() {
            let text = KBox::new(*refusal.text(), GFP_KERNEL_ACCOUNT);
            let error = -refusal.error.to_errno();
            self.remember(text.ok().map(|text| Last::Refusal(error, text)));
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

impl OpenFile for File {
    fn notify(&self, kind: u32, provider: u32) {
        self.events.push(kind, provider, 0);
    }

    /// Queues one event for each handle of a revoked buffer.
    fn notify_revoked(&self, buffer: &Buffer) {
        let provider = buffer.provider.id;
        let mut next = self.handles.lock().next_of(buffer, 0);
        // The file has freed its handles, and only mappings keep the buffer.
        if next.is_none() && buffer.file == self.id {
            next = Some((0, false));
        }
        while let Some((handle, more)) = next {
            self.events.push(consts::EVENT_BUFFER_REVOKED, provider, handle);
            next = match more {
                true => self.handles.lock().next_of(buffer, handle),
                false => None,
            };
        }
    }

    fn refused(&self, what: &str, refusal: &Refusal) {
        File::refused(self, what, refusal);
    }
}
