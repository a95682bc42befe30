// SPDX-License-Identifier: MIT OR Apache-2.0

//! The ranks of a job: a control plane beside the transfers.
//!
//! The ranks find each other through a [`Directory`] (PMIx, or [`local`](crate::local) for ranks of one process), and each rank connects to
//! each other one by TCP. A [`Group`] exchanges small values, such as keys of registered memory, and knows within seconds that a rank
//! has ended or that its host is down. The payload does not pass through these connections.
//!
//! The connections are not encrypted. Both sides prove that they know the secret of the job, which rank 0 makes and the directory gives
//! to the ranks, before they accept each other's messages.
//!
//! Files of this module: `record` (what a rank publishes), `handshake` (the first words of a connection), `mesh` (all connections),
//! `frame` (messages), `watch` (the thread that watches the connections).

mod directory;
mod failure;
mod frame;
mod handshake;
mod mesh;
mod options;
mod record;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde::de::DeserializeOwned;
use serde::Serialize;

pub use directory::Directory;
pub(crate) use failure::list;
pub use failure::Failure;
pub use frame::MAX_VALUE;
pub use options::GroupOptions;

use failure::{printable, ABORT, MAX_REASON};
use frame::Message;
use mesh::Mesh;
use watch::{Peer, State, Watch};

/// Longest wait of a rank that has failed for the others, which print the failure.
const PARTING: Duration = Duration::from_secs(5);

/// The ranks of a job, as one of them sees them.
///
/// If a group is dropped without [`Self::leave`], the other ranks see that this rank has ended.
#[derive(Debug)]
pub struct Group {
    watch: Watch,
    /// One exchange at a time.
    turn: Mutex<()>,
    has_left: bool,
}

impl Group {
    /// Joins the group of a job, and waits until all ranks have joined.
    ///
    /// # Errors
    ///
    /// A rank did not join within the limit of `options`, cannot be reached, has failed, or has another version.
    pub fn join(mut directory: Box<dyn Directory>, options: &GroupOptions) -> Result<Self> {
        Self::new(Mesh::connect(&mut *directory, options)?)
    }

    fn new(mesh: Mesh) -> Result<Self> {
        Ok(Self {
            watch: Watch::start(mesh)?,
            turn: Mutex::new(()),
            has_left: false,
        })
    }

    /// Returns the number of this rank.
    pub fn rank(&self) -> usize {
        self.watch.shared().rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.watch.shared().names.len()
    }

    /// Returns how messages name a rank, as in "rank 2 (node-c)".
    ///
    /// # Panics
    ///
    /// The rank does not exist.
    pub fn name(&self, rank: usize) -> &str {
        &self.watch.shared().names[rank]
    }

    /// Gives a value of at most [`MAX_VALUE`] bytes to all ranks, and returns the values of all ranks in their order. All ranks call
    /// this function and [`barrier`](Self::barrier) in the same order.
    ///
    /// # Errors
    ///
    /// A [`Failure`]: a rank has failed, has left, or did not send its value within the limit. Later calls fail with it, too. Another
    /// error: the value is too long.
    pub fn exchange(&self, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        ensure!(
            own.len() <= MAX_VALUE,
            "a value of {} bytes is too long for an exchange: at most {MAX_VALUE} are possible",
            own.len()
        );
        Ok(self.exchange_checked(own, limit)?)
    }

    /// As [`exchange`](Self::exchange), with values that become JSON.
    ///
    /// # Errors
    ///
    /// Those of [`exchange`](Self::exchange); or the value of a rank has another form.
    pub fn exchange_values<T: Serialize + DeserializeOwned>(&self, own: &T, limit: Duration) -> Result<Vec<T>> {
        let values = self.exchange(&serde_json::to_vec(own)?, limit)?;
        let parse = |(rank, value): (usize, &Vec<u8>)| {
            let value = serde_json::from_slice(value);
            value.with_context(|| {
                format!(
                    "the value of {} is not valid: run the same version on all nodes",
                    self.name(rank)
                )
            })
        };
        values.iter().enumerate().map(parse).collect()
    }

    /// Waits until all ranks have called this function.
    ///
    /// # Errors
    ///
    /// A rank has failed, has left, or did not call the function within the limit.
    pub fn barrier(&self, limit: Duration) -> Result<()> {
        self.exchange_checked(&[], limit)?;
        Ok(())
    }

    fn exchange_checked(&self, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, Failure> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + limit;
        let shared = self.watch.shared();
        let own_rank = shared.rank;
        let mut state = shared.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let number = state.begun;
        state.begun += 1;
        let value = Message::Value {
            number,
            bytes: own.to_vec(),
        };
        state.send_all(&value);
        let (mut state, _) = shared.wait(state, deadline, |state| {
            let is_missing = |rank: usize| rank != own_rank && state.peers[rank].values.is_empty();
            // A rank that has left, or whose connection has ended, sends nothing more.
            let mut missing = (0..state.peers.len()).filter(|rank| is_missing(*rank)).peekable();
            state.failure.is_none()
                && missing.peek().is_some()
                && missing.all(|rank| state.peers[rank].is_connected() && !state.peers[rank].has_left)
        });
        let missing: Vec<usize> = (0..state.peers.len())
            .filter(|rank| *rank != own_rank && state.peers[*rank].values.is_empty())
            .collect();
        if let Some(first) = missing.first() {
            if state.failure.is_none() {
                let left = missing.iter().find(|rank| state.peers[**rank].has_left);
                let (rank, what) = match left {
                    Some(rank) => (*rank, format!("{} has left the group", shared.names[*rank])),
                    None => (*first, overdue(&shared.names, &missing, "no value arrived", limit)),
                };
                shared.fail(&mut state, rank, what);
            }
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
        }
        let values = state
            .peers
            .iter_mut()
            .enumerate()
            .map(|(rank, peer)| match rank == own_rank {
                true => own.to_vec(),
                false => peer.values.pop_front().unwrap_or_default(),
            });
        Ok(values.collect())
    }

    /// Returns the first failure that this rank has noticed. Reads one atomic variable if there is none.
    ///
    /// # Errors
    ///
    /// A rank has failed.
    pub fn check(&self) -> Result<(), Failure> {
        self.watch.shared().check()
    }

    /// Waits until this rank notices a failure, or until the limit.
    ///
    /// # Errors
    ///
    /// A rank has failed.
    pub fn wait_for_failure(&self, limit: Duration) -> Result<(), Failure> {
        let shared = self.watch.shared();
        let state = shared.lock();
        let (state, _) = shared.wait(state, Instant::now() + limit, |state| state.failure.is_none());
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Informs all ranks that this rank stops, and why: their [`check`](Self::check) fails with the name of this rank and the reason. If
    /// this rank has noticed a failure before, the others learn this failure instead. Returns when the other ranks have read the
    /// message, or after a short time. Only the first failure of a group counts, so further calls change nothing.
    ///
    /// A rank that has called this function can end: the others know the reason before they notice the end.
    pub fn abort(&self, reason: &str) {
        let shared = self.watch.shared();
        let mut state = shared.lock();
        let what = format!(
            "{} stopped: {}",
            shared.names[shared.rank],
            printable(reason, MAX_REASON)
        );
        shared.fail(&mut state, shared.rank, what);
        if let Some(failure) = state.failure.clone() {
            state.send_all(&Message::Failed {
                rank: failure.rank as u32,
                what: failure.what,
            });
        }
        // Messages are read in order, so an answer says that the reason was read.
        drop(self.query(state, ABORT));
    }

    /// Asks all ranks for their progress, and waits for the answers. Returns the number of the query.
    fn query<'a>(&'a self, mut state: MutexGuard<'a, State>, limit: Duration) -> (MutexGuard<'a, State>, u64) {
        let deadline = Instant::now() + limit;
        state.queries += 1;
        let number = state.queries;
        state.send_all(&Message::Query { number });
        let is_silent = |peer: &Peer| peer.is_connected() && !peer.has_left && peer.answer.0 < number;
        let is_missing = |state: &mut State| state.peers.iter().any(is_silent);
        let (state, _) = self.watch.shared().wait(state, deadline, is_missing);
        (state, number)
    }

    /// Sets the number of collective calls that this rank has entered.
    pub fn set_progress(&self, calls: u64) {
        self.watch.shared().calls.store(calls, Ordering::Relaxed);
    }

    /// Returns the number of collective calls that each rank has entered, in the order of the ranks; `None` for a rank that has ended
    /// or did not answer within the limit. The threads of the other ranks answer, also if a rank has failed.
    pub fn progress(&self, limit: Duration) -> Vec<Option<u64>> {
        let shared = self.watch.shared();
        let (state, number) = self.query(shared.lock(), limit);
        let answers = state
            .peers
            .iter()
            .enumerate()
            .map(|(rank, peer)| match rank == shared.rank {
                true => Some(shared.calls.load(Ordering::Relaxed)),
                false => (peer.answer.0 >= number).then_some(peer.answer.1),
            });
        answers.collect()
    }

    /// Runs this rank's part of the job, and then calls [`Self::leave()`]. If either fails, all ranks learn why, `print` gets the error,
    /// and this rank waits for a short time until the others have printed it, too: a launcher kills all ranks when the first one ends
    /// with an error. Returns `None` after an error.
    pub fn run<T>(
        mut self,
        limit: Duration,
        part: impl FnOnce(&Self) -> Result<T>,
        print: impl FnOnce(&anyhow::Error),
    ) -> Option<T> {
        let result = part(&self).and_then(|value| self.say_bye(limit).map(|()| value));
        match result {
            Ok(value) => {
                self.has_left = true;
                Some(value)
            }
            Err(error) => {
                // Without effect if another rank has failed before.
                self.abort(&format!("{error:#}"));
                print(&error);
                self.part();
                None
            }
        }
    }

    /// Ends this rank's part in a group that has failed. Waits until all other ranks have called this function or have ended, or for a
    /// short time.
    fn part(&mut self) {
        let shared = self.watch.shared();
        let mut state = shared.lock();
        state.send_all(&Message::Bye);
        state.leaving = true;
        drop(shared.wait(state, Instant::now() + PARTING, |state| {
            state.peers.iter().any(Peer::is_staying)
        }));
        self.has_left = true;
    }

    /// Ends this rank's part in the group, and waits until all ranks have called this function. The end of a connection is then no failure.
    ///
    /// # Errors
    ///
    /// A rank has failed, or did not call the function within the limit.
    pub fn leave(mut self, limit: Duration) -> Result<()> {
        self.say_bye(limit)?;
        self.has_left = true;
        Ok(())
    }

    fn say_bye(&self, limit: Duration) -> Result<()> {
        let shared = self.watch.shared();
        let deadline = Instant::now() + limit;
        let mut state = shared.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone().into());
        }
        state.send_all(&Message::Bye);
        state.leaving = true;
        let (mut state, _) = shared.wait(state, deadline, |state| {
            state.failure.is_none() && state.peers.iter().any(Peer::is_staying)
        });
        let missing: Vec<usize> = (0..state.peers.len())
            .filter(|rank| state.peers[*rank].is_staying())
            .collect();
        if let Some(first) = missing.first() {
            shared.fail(
                &mut state,
                *first,
                overdue(
                    &shared.names,
                    &missing,
                    "the group does not end: no last message arrived",
                    limit,
                ),
            );
        }
        state.failure.clone().map_or(Ok(()), |failure| Err(failure.into()))
    }
}

/// Returns the failure of ranks that are connected, but do not take part.
fn overdue(names: &[String], missing: &[usize], what: &str, limit: Duration) -> String {
    let names: Vec<&str> = missing.iter().map(|rank| names[*rank].as_str()).collect();
    let verb = if names.len() == 1 { "does" } else { "do" };
    format!("{} {verb} not respond: {what} within {limit:?}", list(&names))
}

impl Drop for Group {
    fn drop(&mut self) {
        // The others learn why this rank ends, if it is because of another one.
        if !self.has_left && self.check().is_err() {
            self.abort("");
        }
    }
}
