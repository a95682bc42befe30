// SPDX-License-Identifier: MIT OR Apache-2.0

//! A NIC's write in flight to a buffer that ends: the end waits for the write, and the memory gets a new owner only
//! afterwards. The NIC's model holds the write after its translation, so that nothing depends on chance. Each case also runs
//! with a NIC that does not wait, which has to show as a stale write.

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
        about: "deregistering waits for a NIC's write in flight, and the next owner sees none of it",
        topology: "nic",
        ruins: false,
        run: free,
    },
    Case {
        name: "rdma-hold-unbind",
        about: "revoking waits for a NIC's write in flight, and nothing is written after the provider was removed",
        topology: "nic",
        ruins: false,
        run: unbind,
    },
];

/// Length of one packet, which the NIC writes in one piece.
pub(super) const LEN: usize = 4096;

/// The hooks of `nic0`. After the drop nothing is held, and the NIC waits for its writes again.
pub(super) struct Hooks(());

impl Hooks {
    /// Selects a NIC that waits for its writes, or one that does not.
    pub(super) fn new(drain: bool) -> Result<Hooks> {
        control(&json!({ "drain": drain }))?;
        Ok(Hooks(()))
    }

    /// Holds the next write of a payload of at least [`LEN`] bytes.
    pub(super) fn arm(&self) -> Result<()> {
        control(&json!({ "hold": { "write": true, "min_bytes": LEN } })).map(drop)
    }

    pub(super) fn release(&self) -> Result<()> {
        control(&json!({ "hold": "release" })).map(drop)
    }

    fn status(&self) -> Result<Value> {
        Ok(control(&json!({ "get": "hold" }))?["hold"].take())
    }

    pub(super) fn await_held(&self) -> Result<()> {
        until("a write is held", || self.is_held())
    }

    /// Returns whether a write is held now.
    pub(super) fn is_held(&self) -> Result<bool> {
        Ok(self.status()?["held"] == true)
    }

    /// Waits until a command of the driver waits for the write that is held.
    pub(super) fn await_waiting(&self) -> Result<()> {
        until("somebody waits for the write", || {
            Ok(self.status()?["draining"].as_u64() > Some(0))
        })?;
        let status = self.status()?;
        ensure!(status["held"] == true && status["expired"] == 0, "{status}");
        Ok(())
    }
}

impl Drop for Hooks {
    fn drop(&mut self) {
        for request in [json!({ "hold": "release" }), json!({ "drain": true })] {
            // An error before this one matters more.
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

/// Returns the result of a thread.
pub(super) fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("a thread panicked"))?
}

/// The memory of a case.
struct Scene {
    wire: Wire,
    /// The source of the NIC's write.
    from: Mapping,
    sent: Registration,
    _source: Buffer,
}

impl Scene {
    fn new(bed: &Bed) -> Result<Scene> {
        let wire = Wire::new(bed)?;
        let source = wire.alloc(bed, "accel1", LEN)?;
        let from = source.map()?;
        let sent = source.register(&wire.pd, Access::LOCAL_WRITE)?;
        fill(&from, 1)?;
        Ok(Scene {
            wire,
            from,
            sent,
            _source: source,
        })
    }

    /// A registered buffer of accel0, the target of the write, and its offset in the BAR.
    fn target(&self, bed: &Bed) -> Result<(Buffer, u64, Registration)> {
        let target = self.wire.alloc(bed, "accel0", LEN)?;
        let offset = target.bar_offset().context("the place in the BAR is not known")?;
        let received = target.register(&self.wire.pd, Access::ALL)?;
        Ok((target, offset, received))
    }

    /// Holds a write to `received` in flight and calls `end`, which ends that memory. A NIC that waits for its writes delays
    /// `end` until the write continues; another NIC does not. Then `reuse` gives the memory other contents and returns a
    /// function that checks them. Returns whether the write changed them.
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
            // After an error, no thread may wait for the held write.
            let result = (|| {
                hooks.await_held()?;
                let ending = scope.spawn(end);
                if drain {
                    let waiting = hooks.await_waiting();
                    let early = ending.is_finished();
                    hooks.release()?;
                    waiting?;
                    ensure!(!early, "the memory ended under a write in flight");
                }
                let ended = joined(ending)?;
                ensure!(hooks.is_held()? != drain, "{}", hooks.status()?);
                reuse(ended)
            })();
            hooks.release()?;
            let written = joined(write).context("the write that was in flight");
            let look = result?;
            written?;
            look()
        })
    }
}

fn free(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let scene = Scene::new(bed)?;
    for drain in [true, false] {
        let (target, offset, received) = scene.target(bed)?;
        let remote = received.remote();
        let end = move || -> Result<()> {
            received.deregister()?;
            Ok(target.free()?)
        };
        let stale = scene.run(drain, &remote, end, |()| {
            bed.settled()?;
            let next = NextOwner::of(&scene.wire, bed, offset, LEN)?;
            Ok(move || Ok(next.words()? != pattern(3, LEN)))
        })?;
        println!("draining {drain}: the next owner saw a stale write: {stale}");
        ensure!(stale != drain, "draining {drain}, and a stale write {stale}");
        super::rdma_user::check(&scene.from, 1)?;
        bed.settled()?;
    }
    Ok(())
}

fn unbind(bed: &mut Bed) -> Result<()> {
    publish_both(bed)?;
    let scene = Scene::new(bed)?;
    for drain in [true, false] {
        let (target, offset, received) = scene.target(bed)?;
        let remote = received.remote();
        let path = bed.device("accel0")?.sysfs().join("resource2");
        let bed_of_end = &*bed;
        let stale = scene.run(
            drain,
            &remote,
            move || bed_of_end.unbind("accel0"),
            |()| {
                // The device has no driver now, so the test can read the BAR itself.
                let bar = OpenOptions::new().read(true).write(true).open(&path);
                let bar = bar.with_context(|| path.display().to_string())?;
                let raw = sys::Mapping::shared(bar.as_fd(), offset, LEN).map_err(errno)?;
                if drain {
                    let found: Vec<u64> = (0..LEN).step_by(8).map(|at| raw.get(at)).collect();
                    ensure!(
                        compare(&found, &pattern(1, LEN)).is_ok() || found.iter().all(|word| *word == 0),
                        "the write arrived before the end in part only"
                    );
                }
                for at in (0..LEN).step_by(8) {
                    raw.set(at, word(2, at));
                }
                Ok(move || Ok((0..LEN).step_by(8).any(|at| raw.get(at) != word(2, at))))
            },
        )?;
        println!("draining {drain}: a stale write after the provider was removed: {stale}");
        ensure!(stale != drain, "draining {drain}, and a stale write {stale}");
        drop((received, target));
        bed.publish("accel0")?;
    }
    Ok(())
}
