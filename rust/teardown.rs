// SPDX-License-Identifier: GPL-2.0

//! Removing a provider, step by step: Documentation/design/lifecycle.md, "Removal of a provider".
//!
//! Context: a task that can sleep; none of the module's locks is held. A removal that a driver's unbinding, a driver's call or
//! unloading the module asks for runs in the caller. One that the administrator asks for runs on the module's workqueue
//! ([`Orchestrator::begin_retire`]): whoever waits for it can be killed, and configfs holds no lock meanwhile.

use crate::{
    alloc::orchestrator::{
        Orchestrator,
        PAGE, //
    },
    ext::{
        abi::consts,
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
        memory::Stack,
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

/// How long the machine's sleep waits for a provider, ms.
const SLEEP: u32 = 20_000;

/// A removal that has begun.
struct Removal {
    orchestrator: Arc<Orchestrator>,
    provider: Arc<Provider>,
    stopped: Stopped,
    leave: RemovalKind,
}

/// A removal on the module's workqueue.
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
        this.finish();
    }
}

impl RemovalWork {
    /// Finishes the removal.
    fn finish(&self) {
        let removal = self.removal.lock().take();
        if let Some(removal) = removal {
            removal.run();
        }
    }
}

impl Orchestrator {
    /// Begins to remove the provider that a function is, if it is one, without waiting for anybody. Returns the provider, to
    /// wait for the end. When this returns it allocates nothing any more.
    ///
    /// Errors: `ENOMEM`: nothing has changed.
    pub(crate) fn begin_retire(self: &Arc<Self>, function: &Function) -> Result<Option<Arc<Provider>>> {
        let Some(provider) = self.find(function) else {
            return Ok(None);
        };
        // What may fail is done first.
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
                leave: RemovalKind::Retire,
            });
            if !workqueue::enqueue(work.clone()) {
                work.finish();
            }
        }
        Ok(Some(provider))
    }

    /// Removes the provider that a function is, if it is one. When this returns nobody can reach its memory through
    /// p2pmem any more, and the driver that published it was told.
    pub(crate) fn remove(self: &Arc<Self>, function: &Function, leave: RemovalKind) {
        let Some(provider) = self.find(function) else {
            return;
        };
        match provider.stop() {
            Some(stopped) => Removal {
                orchestrator: self.clone(),
                provider,
                stopped,
                leave,
            }
            .run(),
            // Another one is at it.
            None => provider.await_end(),
        }
    }

    /// Takes a provider back whose memory loses its contents, and says why. When this returns nobody can reach the memory through
    /// p2pmem any more.
    ///
    /// The kernel's pool stays, and with it what is stored in memory that goes back there: it is cleared before, by a device that
    /// `answers` at once, else when the device recovers ([`Self::end_lost`]).
    pub(crate) fn lose(self: &Arc<Self>, function: &Function, why: &CStr, answers: bool) {
        if let Some(provider) = self.find(function) {
            pr_notice!("{}: its memory is taken back: {}\n", provider.addr, why);
            self.remove(
                function,
                if answers {
                    RemovalKind::Retire
                } else {
                    RemovalKind::Lost
                },
            );
        }
    }

    /// Ends what is kept of a function that did not answer when it was taken back, where there is something: `clear` says whether
    /// it answers now. When this returns its memory is the pool's.
    pub(crate) fn end_lost(&self, function: &Function, clear: bool) {
        while let Some(lost) = self.take_lost(function) {
            if clear {
                lost.clear();
            }
        }
    }

    /// Takes all providers back before the machine sleeps, as their memory may lose its contents.
    ///
    /// Errors: `EBUSY` (who holds memory has not let go within [`SLEEP`], and stands in the log), `ENOMEM`.
    pub(crate) fn before_sleep(self: &Arc<Self>) -> Result {
        while let Some(provider) = self.first() {
            pr_notice!(
                "{}: its memory is taken back: the machine is about to sleep\n",
                provider.addr
            );
            self.begin_retire(provider.function())?;
            if !provider.await_end_for(SLEEP) {
                pr_warn!(
                    "{}: keeps the machine from sleeping: {}\n",
                    provider.addr,
                    provider.progress().as_str()
                );
                return Err(EBUSY);
            }
        }
        Ok(())
    }

    /// Removes all providers, as the module is going away.
    pub(crate) fn shutdown(self: &Arc<Self>) {
        while let Some(provider) = self.first() {
            self.remove(provider.function(), RemovalKind::Retire);
        }
    }

    /// Takes one buffer away from all who hold it: no new mappings, no old ones of user space, and importers and
    /// adapters are told to let go. Its memory goes back where no device can reach it. False when it had ended already.
    fn revoke(&self, buffer: &Arc<Buffer>) -> bool {
        let Some(held) = buffer.revoke() else {
            return false;
        };
        trace::revoke(|| (buffer.about(), held.mappings, buffer.exports().0));
        // Most buffers of a provider are not mapped, and none of them is from here on.
        if held.mappings > 0 {
            self.space().unmap(buffer.page_offset, buffer.size / PAGE);
        }
        if held.by_devices {
            buffer.for_each_revocable(|revocable| revocable.clone().revoke());
        }
        buffer.provider.counters.revoked.fetch_add(1, Relaxed);
        self.notify_revoked(buffer);
        if log::allowed() {
            pr_info!(
                "{}: revoked a buffer of {} bytes with {} mappings of {}\n",
                buffer.provider.addr,
                buffer.size,
                held.mappings,
                buffer.owner
            );
        }
        if !held.by_devices {
            // There is nobody to wait for.
            buffer.finish_revoke();
        }
        true
    }

    /// Ends a buffer that was revoked: waits for its importers and adapters, and gives its memory back.
    fn finish_revoke(&self, buffer: &Arc<Buffer>, deadline: &mut RevokeDeadline) {
        if buffer.status().0 == State::Revoking {
            buffer.for_each_revocable(|revocable| revocable.await_idle(deadline));
            buffer.finish_revoke();
        }
    }
}

impl Removal {
    /// All steps after [`Provider::stop`], in their order.
    fn run(self) {
        let Self {
            orchestrator,
            provider,
            stopped,
            leave,
        } = self;
        provider.set_progress(Text::new(fmt!("its buffers are being revoked")));
        let mut revoked = 0u32;
        provider.for_each_buffer(|buffer| revoked += u32::from(orchestrator.revoke(buffer)));
        // All were told to let go before anyone is waited for.
        let mut deadline = RevokeDeadline::new();
        provider.for_each_buffer(|buffer| orchestrator.finish_revoke(buffer, &mut deadline));
        provider.await_hands();
        let mut returned = await_pins(&provider);
        if leave == RemovalKind::Retire {
            provider.set_progress(Text::new(fmt!("its memory is being cleared")));
            while let Some(mut memory) = returned.pop() {
                provider.clear_stopped(&mut memory);
                memory.returned_clear();
            }
            provider.scrub_stopped(&stopped);
        }
        drop(returned);
        // The backing goes with this: a chunk goes back to the pool.
        match leave {
            RemovalKind::Lost => orchestrator.keep_lost(Lost::new(provider.clone(), stopped)),
            RemovalKind::Unbind | RemovalKind::Retire => drop(stopped),
        }
        // The driver is told while the provider is in the list: one that unregisters now waits for this.
        provider.notify_publisher();
        orchestrator.forget(&provider);
        provider.ended();
        orchestrator.forget_paths();
        orchestrator.notify(consts::EVENT_PROVIDER_REMOVED, provider.id);
        pr_info!(
            "{}: no provider any more, {} buffers were revoked\n",
            provider.addr,
            revoked
        );
    }
}

/// Takes what came back to a provider that was stopped, and waits until nobody refers to its pages any more: without a limit,
/// as the memory cannot be anybody else's before, but with a line in the log that names whose it was.
fn await_pins(provider: &Provider) -> Stack {
    const LONGEST: u64 = 50;
    let mut busy = provider.take_returned();
    let mut idle = Stack::EMPTY;
    let mut wait = log::LoggedWait::new();
    let (mut step, mut said) = (1, None);
    loop {
        let mut still = Stack::EMPTY;
        let mut pages = 0;
        while let Some(memory) = busy.pop() {
            match memory.busy() {
                0 => idle.push(memory),
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
            provider.set_progress(Text::new(fmt!(
                "waiting for I/O on {} pages of {} since {} s",
                pages,
                first.owner,
                seconds
            )));
            if wait.is_due(seconds) {
                pr_warn!(
                    "{}: waiting for I/O on {} pages of {} since {} s\n",
                    provider.addr,
                    pages,
                    first.owner,
                    seconds
                );
            }
        }
        fsleep(Delta::from_millis(step as i64));
        step = (step * 2).min(LONGEST);
        busy = still;
    }
}
