// SPDX-License-Identifier: GPL-2.0

//! Removes a provider.
//!
//! The steps are those of Documentation/design/lifecycle.md, "Removal of a provider", in the same order and with the same
//! numbers:
//!
//! 1. [`Provider::stop`] takes the provider's source of memory away. Allocations and registrations fail with `ENODEV`.
//! 2. The attachments of the function to dma-bufs end. Every buffer is revoked: state, user mappings, dma-bufs and
//!    registrations, event, log line.
//! 3. Only when all importers were notified does the removal wait for them: for each dma-buf until its last mapping
//!    is gone, without a limit; then for fences, 2 s for all dma-bufs of the provider together. The buffer then gives its
//!    memory back.
//! 4. Waits until no memory is in the hands of an allocation or of the scrubber.
//! 5. Waits until nobody refers to the pages any more (O_DIRECT in progress), without a limit.
//! 6. Where the pool stays, clears the memory that was in use.
//! 7. The chunk goes back to the pool, or the window is unmapped.
//! 8. Calls `revoked` of the driver that registered the memory.
//! 9. Takes the provider off the list and sends the event to all files.
//!
//! Context: process context, may sleep, with none of the module's locks held. Unbinding a driver,
//! `p2pmem_unregister_provider()`, a reset and unloading the module run the removal in the caller. `0` written to `enable`,
//! `rmdir` of the directory, sleep, and an error of the device run it on the module's workqueue ([`Orchestrator::begin`]), so that
//! a caller that waits can be killed or give up, and changes of the PCI bus do not wait for the removal.

use crate::{
    alloc::orchestrator::{
        Orchestrator,
        PAGE, //
    },
    ext::{
        abi::consts,
        driver,
        log,
        pci::Function,
        refusal::Text,
        trace,
        workqueue, //
    },
    mem::{
        buffer::{
            Buffer,
            Lost,
            Provider,
            State, //
        },
        memory::MemoryList,
        provider::removal::{
            RemovalKind,
            Stopped, //
        },
        traits::RevokeDeadline, //
    }, //
};
use kernel::{
    new_mutex,
    new_work,
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc,
        Mutex, //
    },
    time::{delay::fsleep, Delta},
    workqueue::{impl_has_work, Work, WorkItem}, //
};

/// The longest time that system sleep waits for the removal of one provider, in ms.
const SUSPEND_TIMEOUT_MS: u32 = 20_000;

/// A removal after step 1: the provider is stopped, and its memory is in `stopped`.
struct Removal {
    orchestrator: Arc<Orchestrator>,
    provider: Arc<Provider>,
    stopped: Stopped,
    kind: RemovalKind,
}

/// A work item that runs a removal on the module's workqueue.
#[pin_data]
struct RemovalWork {
    #[pin]
    removal: Mutex<Option<Removal>>,
    #[pin]
    work: Work<RemovalWork>,
}

impl_has_work! {
    impl HasWork<RemovalWork> for RemovalWork { self.work }
}

impl WorkItem for RemovalWork {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let Some(removal) = this.take() else {
            return;
        };
        let (orchestrator, provider) = (removal.orchestrator.clone(), removal.provider.clone());
        removal.run();
        let function = provider.function();
        driver::recover(function, || orchestrator.release_lost(function, true));
    }
}

impl RemovalWork {
    /// Returns the removal, unless it has been taken already.
    fn take(&self) -> Option<Removal> {
        self.removal.lock().take()
    }
}

impl Orchestrator {
    /// Begins to remove the provider of `function`, and queues the rest on the module's workqueue. If the queue takes no
    /// work, the removal runs in the caller.
    ///
    /// Returns the provider, for the caller to wait with [`Provider::await_end_for`] or [`Provider::await_end_killable`],
    /// or `None` if `function` is no provider. On return the provider allocates nothing any more.
    ///
    /// Context: process context, may sleep.
    ///
    /// Errors: `ENOMEM`; the provider then stays as it was.
    pub(crate) fn begin(self: &Arc<Self>, function: &Function, kind: RemovalKind) -> Result<Option<Arc<Provider>>> {
        let Some(provider) = self.find(function) else {
            return Ok(None);
        };
        // Allocates before step 1: nothing after `stop` may fail.
        let work = Arc::pin_init(
            pin_init!(RemovalWork {
                removal <- new_mutex!(None),
                work <- new_work!("p2pmem_removal"),
            }),
            GFP_KERNEL,
        )?;
        if let Some(stopped) = provider.stop() {
            *work.removal.lock() = Some(Removal {
                orchestrator: self.clone(),
                provider: provider.clone(),
                stopped,
                kind,
            });
            if !workqueue::enqueue(work.clone()) {
                if let Some(removal) = work.take() {
                    removal.run();
                }
            }
        }
        Ok(Some(provider))
    }

    /// Removes the provider of `function`, if there is one. On return nobody can reach the memory through p2pmem, and the
    /// driver that registered it was notified.
    ///
    /// If another thread removes the provider, waits for that thread.
    ///
    /// Context: process context, may sleep, for as long as an importer or I/O holds the memory.
    pub(crate) fn remove(self: &Arc<Self>, function: &Function, kind: RemovalKind) {
        let Some(provider) = self.find(function) else {
            return;
        };
        match provider.stop() {
            Some(stopped) => Removal {
                orchestrator: self.clone(),
                provider,
                stopped,
                kind,
            }
            .run(),
            // Another thread got the source and runs the removal.
            None => provider.await_end(),
        }
    }

    /// Removes the provider of `function`, if there is one, because its memory will lose its contents, and logs `why`. On
    /// return nobody can reach the memory through p2pmem.
    ///
    /// An own provider's device stays bound and its pool stays with it, so the memory is cleared before it goes back to the pool.
    ///
    /// Context: as for [`Self::remove`].
    pub(crate) fn remove_before_reset(self: &Arc<Self>, function: &Function, why: &CStr) {
        if let Some(provider) = self.find(function) {
            dev_notice!(provider.function().device(), "p2pmem: removing the provider: {}\n", why);
            self.remove(function, RemovalKind::Retire);
        }
    }

    /// Begins to remove the provider of `function`, if there is one, because its memory is lost, and logs `why`. The memory is
    /// cleared and goes back to the pool when the removal has ended and the device works again ([`Self::release_lost`]).
    ///
    /// Context: process context, may sleep. Without memory for the removal's work item, as for [`Self::remove`].
    pub(crate) fn begin_lost(self: &Arc<Self>, function: &Function, why: &CStr) {
        let Some(provider) = self.find(function) else {
            return;
        };
        if provider.is_being_removed() {
            return;
        }
        dev_notice!(provider.function().device(), "p2pmem: removing the provider: {}\n", why);
        if self.begin(function, RemovalKind::Lost).is_err() {
            self.remove(function, RemovalKind::Lost);
        }
    }

    /// Returns the memory of `function` that a [`RemovalKind::Lost`] removal kept, if there is any, to its pool. Clears it
    /// before if `clear` is set, which requires a device that answers.
    ///
    /// Context: process context, may sleep.
    pub(crate) fn release_lost(&self, function: &Function, clear: bool) {
        while let Some(lost) = self.take_lost(function) {
            if clear {
                lost.clear();
            }
        }
    }

    /// Removes all providers before the system sleeps, as their memory may lose its contents. Each provider has [`SUSPEND_TIMEOUT_MS`]
    /// ms to end. Removes none if a device uses memory that it would not release.
    ///
    /// Context: process context, may sleep.
    ///
    /// Errors: `EBUSY` if a provider cannot end, or did not end in time (the log names the holder of its memory), `ENOMEM`.
    pub(crate) fn before_sleep(self: &Arc<Self>) -> Result {
        for provider in self.providers()? {
            let mut held = false;
            provider.for_each_buffer(|buffer| {
                let mut lasts = false;
                buffer.for_each_revocable(|revocable| lasts |= revocable.outlasts_revocation());
                if lasts {
                    held = true;
                    dev_warn!(
                        provider.function().device(),
                        "p2pmem: keeps the machine from sleeping: a device does not release buffer {} of {}\n",
                        buffer.id,
                        buffer.owner
                    );
                }
            });
            if held {
                return Err(EBUSY);
            }
        }
        while let Some(provider) = self.first() {
            dev_notice!(
                provider.function().device(),
                "p2pmem: removing the provider: the machine is about to sleep\n"
            );
            self.begin(provider.function(), RemovalKind::Retire)?;
            if !provider.await_end_for(SUSPEND_TIMEOUT_MS) {
                dev_warn!(
                    provider.function().device(),
                    "p2pmem: keeps the machine from sleeping: {}\n",
                    provider.progress().as_str()
                );
                return Err(EBUSY);
            }
        }
        Ok(())
    }

    /// Removes all providers. For unloading the module.
    ///
    /// Context: as for [`Self::remove`].
    pub(crate) fn shutdown(self: &Arc<Self>) {
        while let Some(provider) = self.first() {
            self.remove(provider.function(), RemovalKind::Retire);
        }
    }

    /// Step 2 for one buffer: sets the state to Revoking, takes down the user mappings, starts the invalidation at
    /// importers and RDMA NICs, sends the event and logs. A buffer that no device holds gives its memory back here.
    /// Returns false if the buffer was Gone or being revoked already.
    ///
    /// Context: process context, may sleep, with no lock held: `unmap_mapping_range()` and importers take their own.
    fn revoke(&self, buffer: &Arc<Buffer>) -> bool {
        let Some(held) = buffer.revoke() else {
            return false;
        };
        trace::revoke(|| (buffer.about(), held.mappings, buffer.exports().0));
        // No mapping can be added after the state changed, so a count of 0 stays 0.
        if held.mappings > 0 {
            self.space().unmap(buffer.page_offset, buffer.size / PAGE);
        }
        if held.by_devices {
            buffer.for_each_revocable(|revocable| revocable.clone().revoke());
        }
        buffer.provider.counters.revoked.fetch_add(1, Relaxed);
        self.notify_revoked(buffer);
        if log::allowed() {
            dev_info!(
                buffer.provider.function().device(),
                "p2pmem: revoked a buffer of {} bytes with {} mappings of {}\n",
                buffer.size,
                held.mappings,
                buffer.owner
            );
        }
        if !held.by_devices {
            // No importer and no RDMA NIC holds the buffer: step 3 has nothing to wait for.
            buffer.finish_revoke();
        }
        true
    }

    /// Step 3 for one buffer: waits for its dma-bufs and registrations, and gives the memory back. `deadline` is the time
    /// that is left for fences, which all buffers of the provider share.
    fn finish_revoke(&self, buffer: &Arc<Buffer>, deadline: &mut RevokeDeadline) {
        if buffer.status().0 == State::Revoking {
            buffer.for_each_revocable(|revocable| revocable.await_idle(deadline));
            buffer.finish_revoke();
        }
    }
}

impl Removal {
    /// Steps 2 to 9. [`Provider::stop`] was step 1.
    fn run(self) {
        let Self {
            orchestrator,
            provider,
            stopped,
            kind,
        } = self;
        provider.set_progress(Text::new(fmt!("its attachments are being ended")));
        // Step 2. Attachments end first: they let the function do DMA, while buffers let others do DMA to the function.
        provider.for_each_attachment(|attachment| attachment.clone().revoke());
        provider.for_each_attachment(|attachment| attachment.await_end());
        provider.set_progress(Text::new(fmt!("its buffers are being revoked")));
        let mut revoked = 0u32;
        provider.for_each_buffer(|buffer| revoked += u32::from(orchestrator.revoke(buffer)));
        // Step 3: the removal waits for importers only now, when all of them were notified.
        let mut deadline = RevokeDeadline::new();
        provider.for_each_buffer(|buffer| orchestrator.finish_revoke(buffer, &mut deadline));
        // Step 4.
        provider.wait_outstanding();
        // Step 5.
        let mut returned = wait_pinned(&provider);
        // Step 6: for an `Unbind` the pool ends, and `Lost` memory is cleared when the device answers again.
        if kind == RemovalKind::Retire {
            provider.set_progress(Text::new(fmt!("its memory is being cleared")));
            while let Some(memory) = returned.pop() {
                memory.clear_all();
            }
            provider.clear_released(&stopped);
        }
        drop(returned);
        // Step 7: dropping `stopped` gives the chunk back to the pool or unmaps the window.
        match kind {
            RemovalKind::Lost => orchestrator.keep_lost(Lost::new(provider.clone(), stopped)),
            RemovalKind::Unbind | RemovalKind::Retire => drop(stopped),
        }
        // Step 8, while the provider is still on the list: a driver that unregisters at the same time finds the provider
        // and waits for the end.
        provider.notify_publisher();
        // Step 9.
        orchestrator.forget(&provider);
        provider.ended();
        orchestrator.forget_snapshots();
        orchestrator.notify(consts::EVENT_PROVIDER_REMOVED, provider.id);
        dev_info!(
            provider.function().device(),
            "p2pmem: provider removed, {} buffers revoked\n",
            revoked
        );
    }
}

/// Step 5: takes all memory that came back to a stopped provider and waits until nobody else refers to its pages. Returns
/// that memory.
///
/// The kernel does not notify of a dropped page reference, so the pages are polled, with pauses that grow from 1 ms to
/// `LONGEST` ms. There is no limit: until then the memory cannot get a new owner. The log names the owner and the number of
/// pages after 1 s, 10 s, 1 min and every 5 min.
///
/// Context: process context, may sleep, with no lock held.
fn wait_pinned(provider: &Provider) -> MemoryList {
    const LONGEST: u64 = 50;
    let mut busy = provider.take_returned();
    let mut idle = MemoryList::EMPTY;
    let mut wait = log::LoggedWait::new();
    let (mut step, mut said) = (1, None);
    loop {
        let mut still = MemoryList::EMPTY;
        let mut pages = 0;
        while let Some(mut memory) = busy.pop() {
            match memory.busy() {
                0 => {
                    provider.forget_owner(&mut memory);
                    idle.push(memory);
                }
                n => {
                    pages += n;
                    still.push(memory);
                }
            }
        }
        let Some(first) = still.first() else {
            return idle;
        };
        let seconds = wait.seconds();
        if said != Some(seconds) {
            said = Some(seconds);
            let text = Text::new(fmt!(
                "waiting for I/O on {} pages of {} since {} s",
                pages,
                first.owner,
                seconds
            ));
            provider.set_progress(text);
            if wait.should_log(seconds) {
                dev_warn!(provider.function().device(), "p2pmem: {}\n", text.as_str());
            }
        }
        fsleep(Delta::from_millis(step as i64));
        step = (step * 2).min(LONGEST);
        busy = still;
    }
}
