// SPDX-License-Identifier: GPL-2.0

//! The module's single client at the core, and the gate through which it calls the core.
//!
//! Context: process context, may sleep. Locks: `PEER_CLIENT` and `Gate::passage` are mutexes for short sections. Neither is
//! taken under another lock of this interface, and neither is held when the core is called.
//!
//! C header: `rust/sys/peer_mem.h`

use crate::{
    ext::{
        global::initialised,
        log, //
    },
    sys, //
};
use core::ptr::NonNull;
use kernel::{
    ffi, new_condvar, new_mutex,
    prelude::*,
    sync::{
        Arc,
        CondVar,
        Mutex, //
    },
};

/// The core's identifier of a registration, which [`Gate::invalidate`] passes to the core.
#[derive(Clone, Copy)]
pub(super) struct CoreContext(pub(super) u64);

/// The form in which a client is registered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// The client can invalidate, and ends the mapping itself afterwards.
    Ex,
    /// The client can invalidate, and the core calls `dma_unmap` meanwhile.
    Legacy,
    /// The client cannot invalidate: a registration ends only when the program ends it.
    Persistent,
}

impl Form {
    /// Returns the form that the administrator chose with the module parameter `peer_memory`, or `None` for `off`.
    pub(crate) fn chosen() -> Option<Self> {
        // SAFETY: The function has no requirements. The parameter is read-only after the module is loaded.
        match unsafe { sys::p2pmem_peer_form() } {
            sys::P2PMEM_PEER_EX => Some(Self::Ex),
            sys::P2PMEM_PEER_LEGACY => Some(Self::Legacy),
            sys::P2PMEM_PEER_PERSISTENT => Some(Self::Persistent),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ex => "ex",
            Self::Legacy => "legacy",
            Self::Persistent => "persistent",
        }
    }
}

/// The arguments of an invalidation.
///
/// # Invariants
///
/// `handle` and `call` are those that the core returned for one client. They may be used while that client is registered.
#[derive(Clone, Copy)]
pub(super) struct Invalidator {
    pub(super) handle: NonNull<ffi::c_void>,
    pub(super) call: sys::invalidate_peer_memory,
}

// SAFETY: The handle is an opaque pointer to an object of the core, which accepts calls from any thread.
unsafe impl Send for Invalidator {}

struct Passage {
    /// Set while the client is registered.
    by: Option<Invalidator>,
    /// Number of calls of the core in progress.
    inside: usize,
}

kernel::sync::global_lock! {
    // SAFETY: The module's init function calls `init_lock()` first. All users of the lock call `initialised()` before.
    unsafe(uninit) static PEER_CLIENT: Mutex<Option<Arc<Gate>>> = None;
}

/// Initialises the lock of the client.
///
/// # Safety
///
/// Must be called once, before [`set_initialised`](crate::ext::global::set_initialised).
pub(in crate::ext) unsafe fn init_lock() {
    // SAFETY: The caller guarantees that this is the first call. No other code uses the lock before `set_initialised()`,
    // as `initialised()` panics.
    unsafe { PEER_CLIENT.init() };
}

/// Guards calls of the core by the client. Closed before the client is unregistered.
#[pin_data]
pub(super) struct Gate {
    pub(super) form: Form,
    #[pin]
    passage: Mutex<Passage>,
    #[pin]
    empty: CondVar,
}

impl Gate {
    pub(super) fn new(form: Form) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                form,
                passage <- new_mutex!(Passage { by: None, inside: 0 }),
                empty <- new_condvar!(),
            }),
            GFP_KERNEL,
        )
    }

    pub(super) fn open(&self, by: Invalidator) {
        self.passage.lock().by = Some(by);
    }

    fn is_open(&self) -> bool {
        self.passage.lock().by.is_some()
    }

    /// Forbids further calls of the core, and waits for those in progress.
    pub(super) fn close(&self) {
        let mut passage = self.passage.lock();
        passage.by = None;
        while passage.inside > 0 {
            self.empty.wait(&mut passage);
        }
    }

    /// Runs `call` if the gate is open, and keeps the gate from closing until `call` returns. Returns `None` if it is
    /// closed.
    fn pass<R>(&self, call: impl FnOnce(Invalidator) -> R) -> Option<R> {
        let mut passage = self.passage.lock();
        let by = passage.by?;
        passage.inside += 1;
        drop(passage);
        let answer = call(by);
        self.passage.lock().inside -= 1;
        self.empty.notify_all();
        Some(answer)
    }

    /// Makes the core invalidate a registration, which ends the adapter's use of the memory.
    ///
    /// Returns false if the adapter may still use the memory: the client cannot invalidate, the gate is closed, or the core
    /// reports an error, which is logged. The core then releases the registration when the program deregisters it.
    pub(super) fn invalidate(&self, core: CoreContext) -> bool {
        let answer = self.pass(|by| {
            // SAFETY: By the type invariant both are from the core, for one client. The client stays registered during the
            // call: its registration's drop closes the gate first, which waits for `pass()`. The core ignores a number
            // that it no longer knows.
            by.call.map(|call| unsafe { call(by.handle.as_ptr(), core.0) })
        });
        match answer.flatten() {
            Some(0) => true,
            Some(error) => {
                if log::allowed() {
                    pr_err!(
                        "the RDMA core cannot invalidate its registration {} (errno {}): the memory stays until the program deregisters it\n",
                        core.0,
                        -error
                    );
                }
                false
            }
            None => false,
        }
    }
}

/// Returns the form of the registered client, or `None` if no client is registered.
pub(crate) fn registered() -> Option<Form> {
    current().filter(|gate| gate.is_open()).map(|gate| gate.form)
}

/// Returns the gate of the module's client, or `None` if the module has no client.
pub(super) fn current() -> Option<Arc<Gate>> {
    initialised();
    PEER_CLIENT.lock().clone()
}

/// The claim to be the module's only client: taken before the client is registered, dropped after it is unregistered.
pub(super) struct Place(pub(super) Arc<Gate>);

impl Place {
    /// Takes the claim. Errors: `EBUSY` if there is another client; `ENOMEM`.
    pub(super) fn take(form: Form) -> Result<Self> {
        initialised();
        let gate = Gate::new(form)?;
        let mut place = PEER_CLIENT.lock();
        if place.is_some() {
            return Err(EBUSY);
        }
        *place = Some(gate.clone());
        Ok(Self(gate))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let gate = PEER_CLIENT.lock().take();
        drop(gate);
    }
}

#[kunit_tests(p2pmem_peer_gate)]
mod tests {
    use super::*;

    use crate::ext::{
        completion::Completion,
        workqueue::OwnQueue, //
    };

    #[test]
    fn close_waits_for_calls_in_progress() -> Result {
        let gate = Gate::new(Form::Ex)?;
        assert!(!gate.is_open() && gate.pass(|_| ()).is_none());
        gate.open(Invalidator {
            handle: NonNull::dangling(),
            call: None,
        });
        // A client without the core's function cannot invalidate.
        assert!(gate.is_open() && !gate.invalidate(CoreContext(1)));
        let (begun, end, closed) = (
            Arc::pin_init(Completion::new(), GFP_KERNEL)?,
            Arc::pin_init(Completion::new(), GFP_KERNEL)?,
            Arc::pin_init(Completion::new(), GFP_KERNEL)?,
        );
        let queue = OwnQueue::new(c"p2pmem-kunit", || {})?;
        let (within, at, until) = (gate.clone(), begun.clone(), end.clone());
        queue.try_spawn(move || {
            within.pass(|_| {
                at.complete();
                until.wait(60_000)
            });
        })?;
        assert!(begun.wait(60_000));
        let (other, done) = (gate.clone(), closed.clone());
        queue.try_spawn(move || {
            other.close();
            done.complete();
        })?;
        assert!(!closed.wait(20));
        end.complete();
        assert!(closed.wait(60_000));
        assert!(!gate.is_open() && gate.pass(|_| ()).is_none());
        Ok(())
    }

    #[test]
    fn failed_invalidation_keeps_memory_in_use() -> Result {
        extern "C" fn core(_handle: *mut ffi::c_void, number: u64) -> ffi::c_int {
            if number == 7 {
                0
            } else {
                EIO.to_errno()
            }
        }
        let gate = Gate::new(Form::Ex)?;
        gate.open(Invalidator {
            handle: NonNull::dangling(),
            call: Some(core),
        });
        assert!(gate.invalidate(CoreContext(7)) && !gate.invalidate(CoreContext(8)));
        gate.close();
        assert!(!gate.invalidate(CoreContext(7)));
        Ok(())
    }
}
