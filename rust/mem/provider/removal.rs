// SPDX-License-Identifier: GPL-2.0

//! The provider's part of its removal; `teardown.rs` calls these in order.
//!
//! Context: process context, may sleep. `Provider::inner` is taken for each step.

use crate::{
    ext::{
        pci::Function,
        refusal::Text, //
    },
    mem::{
        memory::MemoryList,
        provider::{
            Counted,
            Provider,
            Source,
            STEP, //
        }, //
    }, //
};
use kernel::{
    fmt,
    prelude::*,
    sync::{atomic::Relaxed, Arc},
};

/// Why a provider is removed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RemovalKind {
    /// The device's driver is unbound, and the kernel's pool ends with the driver.
    Unbind,
    /// Only p2pmem gives up the memory. The kernel's pool stays, and memory that goes back to the pool is cleared first.
    Retire,
    /// As [`Self::Retire`], but the device does not answer. Its memory is cleared and goes back once the device answers
    /// again.
    Lost,
}

impl<B: Counted> Provider<B> {
    /// Starts the removal: from here on every allocation fails with `ENODEV`. Returns `None` if another task is removing the
    /// provider already.
    pub(crate) fn stop(&self) -> Option<Stopped> {
        let mut inner = self.inner.lock();
        let source = inner.source.take()?;
        self.being_removed.store(true, Relaxed);
        self.update_hint(&inner);
        drop(inner);
        // Wakes the scrubber, which sleeps while memory is pinned, and allocations that wait for memory.
        self.returned.notify_all();
        Some(Stopped(source))
    }

    /// Waits until no memory is outstanding. Buffers are revoked by now; an allocation or the scrubber gives up within one step
    /// of clearing.
    pub(crate) fn wait_outstanding(&self) {
        let mut inner = self.inner.lock();
        while inner.outstanding > 0 {
            self.returned.wait(&mut inner);
        }
    }

    /// Takes all dirty and pinned memory. All buffers are revoked, so no more comes back.
    pub(crate) fn take_returned(&self) -> MemoryList {
        let mut inner = self.inner.lock();
        let mut all = core::mem::replace(&mut inner.dirty, MemoryList::EMPTY);
        all.append(core::mem::replace(&mut inner.pinned, MemoryList::EMPTY));
        all
    }

    /// Clears the free memory of a stopped provider that went back to its allocator without being cleared.
    pub(crate) fn clear_released(&self, stopped: &Stopped) {
        if let Source::Own(own) = &stopped.0 {
            own.clear_released(STEP);
        }
    }

    /// Sets the text that says what the removal waits for.
    pub(crate) fn set_progress(&self, text: Text) {
        *self.progress.lock() = text;
    }

    /// Logs what the removal waits for, and sets the text.
    pub(crate) fn waits_for(&self, what: fmt::Arguments<'_>) {
        let text = Text::new(what);
        dev_warn!(self.function().device(), "p2pmem: {}\n", text.as_str());
        self.set_progress(text);
    }

    /// Returns what the removal waits for, for `status` in configfs; empty if the provider is not being removed.
    pub(crate) fn progress(&self) -> Text {
        *self.progress.lock()
    }

    /// Returns whether the provider is being removed or has been removed.
    pub(crate) fn is_being_removed(&self) -> bool {
        self.being_removed.load(Relaxed)
    }

    /// Notifies the driver that registered the memory, if one did, that nobody can reach the memory any more.
    pub(crate) fn notify_publisher(&self) {
        if let Some(publisher) = &self.publisher {
            publisher.revoked();
        }
    }

    /// Marks the removal as done and wakes those who wait for its end.
    pub(crate) fn ended(&self) {
        self.removed.complete();
    }

    /// Waits until another task has removed the provider. That task logs what it waits for.
    pub(crate) fn await_end(&self) {
        while !self.removed.wait(1_000) {}
    }

    /// Waits up to `ms` milliseconds for the end of the removal, and returns whether it ended. Errors: `EINTR` (the task was
    /// killed).
    pub(crate) fn await_end_killable(&self, ms: u32) -> Result<bool> {
        self.removed.wait_killable(ms)
    }

    /// Waits up to `ms` milliseconds for the end of the removal, and returns whether it ended.
    pub(crate) fn await_end_for(&self, ms: u32) -> bool {
        self.removed.wait(ms)
    }
}

/// The memory of a stopped provider. Dropping it gives a chunk back to the device's pool.
pub(crate) struct Stopped(Source);

/// Memory of a device that did not answer when its provider was removed. Nobody gets it until it is cleared.
pub(crate) struct Lost<B: Counted> {
    provider: Arc<Provider<B>>,
    stopped: Stopped,
}

impl<B: Counted> Lost<B> {
    pub(crate) fn new(provider: Arc<Provider<B>>, stopped: Stopped) -> Self {
        Self { provider, stopped }
    }

    /// Returns whether this is memory of `function`.
    pub(crate) fn is_of(&self, function: &Function) -> bool {
        self.provider.function().same(function)
    }

    /// Clears all memory of an own provider, since its state is unknown after the device did not answer.
    pub(crate) fn clear(&self) {
        if let Source::Own(own) = &self.stopped.0 {
            own.backing().clear(0, own.backing().size());
        }
    }
}
