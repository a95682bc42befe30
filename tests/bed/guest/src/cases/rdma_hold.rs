// SPDX-License-Identifier: MIT OR Apache-2.0

//! Deregistration and unbinding while a NIC's write to the buffer is in flight. Both have to wait for the write before
//! the memory is reused. The NIC model holds the write after address translation, so the cases are deterministic.
//!
//! Each case also runs with draining off, a NIC that does not wait for its writes. Then the case has to find a stale
//! write.

use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::thread::{self, ScopedJoinHandle};

use anyhow::{Context, Result, anyhow, ensure};
use p2pmem::{Access, Buffer, Mapping, Registration};
use serde_json::{Value, json};

use super::inflight::until;
use super::rdma_stale::NextOwner;
use super::rdma_user::{Wire, compare, fill, pattern, publish_both, word};
use super::{Bed, Case, errno};
use crate::host;
use crate::sys;
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rdma-hold-free",
        about: "deregistration waits for a NIC's write in flight, which does not change the next owner's buffer",
        topology: "nic",
        ruins: false,
        run: free,
    },
    Case {
        name: "rdma-hold-unbind",
        about: "unbinding waits for a NIC's write in flight, which does not change the memory afterwards",
        topology: "nic",
        ruins: false,
        run: unbind,
    },
];

/// Bytes of the write: one packet, which the NIC model writes in one step.
pub(super) const LEN: usize = 4096;

/// The hooks of the NIC model `nic0`. Dropping releases a held write and turns draining on.
pub(super) struct Hooks(());

impl Hooks {
    /// Turns draining on or off: whether changes of keys wait for transfers in flight.
    pub(super) fn new(drain: bool) -> Result<Hooks> {
        control(&json!({ "drain": drain }))?;
        Ok(Hooks(()))
    }

    /// Holds the next write of at least [`LEN`] bytes of payload.
    pub(super) fn arm(&self) -> Result<()> {
        control(&json!({ "hold": { "write": true, "min_bytes": LEN } })).map(drop)
    }

    /// Lets a held write continue.
    pub(super) fn release(&self) -> Result<()> {
        control(&json!({ "hold": "release" })).map(drop)
    }

    fn status(&self) -> Result<Value> {
        Ok(control(&json!({ "get": "hold" }))?["hold"].take())
    }

    /// Waits until a write is held.
    pub(super) fn await_held(&self) -> Result<()> {
        until("the NIC holds a write", || self.is_held())
    }

    /// Returns whether a write is held.
    pub(super) fn is_held(&self) -> Result<bool> {
        Ok(self.status()?["held"] == true)
    }

    /// Waits until a command or work request of the NIC waits for the held write.
    pub(super) fn await_waiting(&self) -> Result<()> {
        until("a command waits for the held write", || {
            Ok(self.status()?["draining"].as_u64() > Some(0))
        })?;
        let status = self.status()?;
        ensure!(
            status["held"] == true && status["expired"] == 0,
            "the NIC stopped holding the write: {status}"
        );
        Ok(())
    }
}

impl Drop for Hooks {
    fn drop(&mut self) {
        for request in [json!({ "hold": "release" }), json!({ "drain": true })] {
            // If this fails, the case has failed before: the host does not respond.
            let _ = control(&request);
        }
    }
}

fn control(request: &Value) -> Result<Value> {
    host::request(&Request::Control {
        name: "nic0".into(),
        request: request.clone(),
    })
}

fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("a thread panicked"))?
}

/// The NIC and the registered source buffer of a case.
struct Setup {
    wire: Wire,
    /// The mapping of the source buffer.
    from: Mapping,
    /// The registration of the source buffer.
    sent: Registration,
    _source: Buffer,
}

impl Setup {
    fn new(bed: &Bed) -> Result<Setup> {
        let wire = Wire::new(bed)?;
        let source = wire.alloc(bed, "accel1", LEN)?;
        let from = source.map()?;
        let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
        fill(&from, 1)?;
        Ok(Setup {
            wire,
            from,
            sent,
            _source: source,
        })
    }

    /// Allocates and registers a target buffer of accel0. Returns the buffer, its offset in the BAR, and the
    /// registration.
    fn target(&self, bed: &Bed) -> Result<(Buffer, u64, Registration)> {
        let target = self.wire.alloc(bed, "accel0", LEN)?;
        let offset = target
            .bar_offset()
            .context("the buffer's offset in the BAR is unknown")?;
        let received = target.register(&self.wire.pd, Access::ALL)?;
        Ok((target, offset, received))
    }

    /// Holds a write to `received` in flight and calls `end`, which deregisters or revokes the memory. With draining,
    /// `end` waits until the write is released; without, `end` returns while the write is held. Then `reuse` writes
    /// other data to the memory and returns a function that checks the data. Returns the result of that function,
    /// called after the write ended: whether the write changed the memory.
    fn run<T: Send, L: FnOnce() -> Result<bool>>(
        &self,
        drain: bool,
        received: &p2pmem::RemoteMemory,
        end: impl FnOnce() -> Result<T> + Send,
        reuse: impl FnOnce(T) -> Result<L>,
    ) -> Result<bool> {
        let (mut queue, _far) = self.wire.pair()?;
        let hooks = Hooks::new(drain)?;
        hooks.arm()?;
        thread::scope(|scope| {
            let sent = &self.sent;
            let write = scope.spawn(move || Ok(queue.write(sent, 0..LEN, received, 0)?));
            // On an error, release the write before the scope joins the threads.
            let result = (|| {
                hooks.await_held()?;
                let ending = scope.spawn(end);
                if drain {
                    let waiting = hooks.await_waiting();
                    let early = ending.is_finished();
                    hooks.release()?;
                    waiting?;
                    ensure!(
                        !early,
                        "the memory was deregistered or revoked while a write was in flight"
                    );
                }
                let ended = joined(ending)?;
                ensure!(
                    hooks.is_held()? != drain,
                    "draining {drain}, but the NIC's hold is {}",
                    hooks.status()?
                );
                reuse(ended)
            })();
            hooks.release()?;
            let written = joined(write).context("the RDMA WRITE in flight");
            let changed = result?;
            written?;
            changed()
        })
    }
}

fn free(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let setup = Setup::new(bed)?;
    for drain in [true, false] {
        let (target, offset, received) = setup.target(bed)?;
        let remote = received.remote();
        let end = move || -> Result<()> {
            received.deregister()?;
            Ok(target.free()?)
        };
        let stale = setup.run(drain, &remote, end, |()| {
            bed.settled()?;
            let next = NextOwner::of(&setup.wire, bed, offset, LEN)?;
            Ok(move || Ok(next.words()? != pattern(3, LEN)))
        })?;
        println!("draining {drain}: a stale write changed the next owner's buffer: {stale}");
        ensure!(
            stale != drain,
            "draining {drain}: a stale write changed the memory: {stale}"
        );
        super::rdma_user::check(&setup.from, 1)?;
        bed.settled()?;
    }
    Ok(())
}

fn unbind(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let setup = Setup::new(bed)?;
    for drain in [true, false] {
        let (target, offset, received) = setup.target(bed)?;
        let remote = received.remote();
        let path = bed.device("accel0")?.sysfs().join("resource2");
        let shared_bed = &*bed;
        let stale = setup.run(
            drain,
            &remote,
            move || shared_bed.unbind("accel0"),
            |()| {
                // The device has no driver now, so the test can map the BAR through sysfs.
                let bar = OpenOptions::new().read(true).write(true).open(&path);
                let bar = bar.with_context(|| path.display().to_string())?;
                let raw = sys::Mapping::shared(bar.as_fd(), offset, LEN).map_err(errno)?;
                if drain {
                    let found: Vec<u64> = (0..LEN).step_by(8).map(|at| raw.get(at)).collect();
                    ensure!(
                        compare(&found, &pattern(1, LEN)).is_ok() || found.iter().all(|word| *word == 0),
                        "the memory has neither the written data nor zeros: the write was partial"
                    );
                }
                for at in (0..LEN).step_by(8) {
                    raw.set(at, word(2, at));
                }
                Ok(move || Ok((0..LEN).step_by(8).any(|at| raw.get(at) != word(2, at))))
            },
        )?;
        println!("draining {drain}: a stale write changed the memory after unbinding: {stale}");
        ensure!(
            stale != drain,
            "draining {drain}: a stale write changed the memory: {stale}"
        );
        drop((received, target));
        bed.publish("accel0")?;
    }
    Ok(())
}
