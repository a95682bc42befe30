// SPDX-License-Identifier: MIT OR Apache-2.0

//! Executes collective calls: moves the pieces of the payload between the ranks, and has the engine reduce them.
//!
//! # Flow control
//!
//! Each rank has slots for the pieces of a number of tasks, its window. A rank *opens* the tasks of a call when it enters the call,
//! and further tasks when the first open ones have ended. It announces this to the ranks that send to it, which send a piece only to a rank
//! that has opened its task. So slots are never overwritten too early, a rank that has not entered the call gets nothing, and calls do
//! not deadlock: the first task that has not ended is open on all ranks, and depends on no other task.
//!
//! # Order of accesses
//!
//! The engine starts after the completion of the write that brought the piece, by a store of the processor to the device. Both take the
//! same path to the device, the write first. The NIC reads a piece only after the engine has reported that its result is visible.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::element::{Element, Reduction};
use crate::engine::{self, Engine, Job, Operation};
use crate::group::{list, Failure, Group};
use crate::message::{low, whole, Announcement, Immediate};
use crate::schedule::{Algorithm, Call, Collective, Place, Plan, Ring, Step, Task};
use crate::transport::{Event, Transport, Write};

/// Longest sleep while nothing happens. Limits the time until the failure of another rank is noticed.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// Time that the group has to say which rank failed, when a connection of the NIC has failed.
const NAMING: Duration = Duration::from_secs(3);
/// Longest wait for the answers of other ranks about their progress.
const PROGRESS_LIMIT: Duration = Duration::from_secs(1);
/// Pieces are aligned to this number of bytes, except for the payload's own offset.
const CHUNK_ALIGN: u64 = 64;
/// Error of calls after a failure.
const FAILED: &str = "an earlier call failed: the group cannot be used any more";
/// The payload's part of the memory has whole pages.
const PAGE: u64 = 4096;

/// Why a call failed. After any of these, except for [`Error::Call`], the group has failed, and all ranks get an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The call is not possible. Nothing was sent.
    #[error("{0}")]
    Call(String),
    /// Another rank failed, or stopped the group.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// Another rank makes another call.
    #[error("{other} makes another call: {theirs}; this rank: {own}")]
    Mismatch {
        /// The name of the other rank.
        other: String,
        /// Its call.
        theirs: String,
        /// The call of this rank.
        own: String,
    },
    /// Nothing happened for too long.
    #[error("nothing happened for {limit:?}: {what}")]
    Stalled {
        /// The limit.
        limit: Duration,
        /// The ranks that this rank waits for.
        what: String,
    },
    /// A connection of the NIC failed. Another rank may be the cause.
    #[error("{0:#}")]
    Connection(anyhow::Error),
    /// The engine of this rank failed, or another rank sent something unexpected.
    #[error("{0:#}")]
    Device(anyhow::Error),
}

/// The ranks of a group, as a communicator uses them.
pub trait Members {
    /// Returns the number of this rank.
    fn rank(&self) -> usize;
    /// Returns the number of ranks.
    fn ranks(&self) -> usize;
    /// Returns how messages call a rank.
    fn name(&self, rank: usize) -> &str;
    /// Fails if a rank has failed.
    ///
    /// # Errors
    ///
    /// The first failure.
    fn check(&self) -> Result<(), Failure>;
    /// Waits until a rank fails, or until the limit.
    ///
    /// # Errors
    ///
    /// The first failure.
    fn wait_for_failure(&self, limit: Duration) -> Result<(), Failure>;
    /// Informs all ranks that this one stops, and why.
    fn abort(&self, reason: &str);
    /// Informs all ranks that this one stops, and why, unless a rank has failed before: a connection also fails if the other rank has
    /// ended, which the group knows soon.
    ///
    /// # Errors
    ///
    /// The failure of another rank.
    fn stop(&self, reason: &str) -> Result<(), Failure> {
        self.wait_for_failure(NAMING)?;
        self.abort(reason);
        Ok(())
    }
    /// Sets the number of calls that this rank has entered.
    fn set_progress(&self, calls: u64);
    /// Returns the numbers of calls that all ranks have entered; `None` for a rank that does not answer.
    fn progress(&self, limit: Duration) -> Vec<Option<u64>>;
}

impl<M: Members> Members for &M {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn ranks(&self) -> usize {
        (**self).ranks()
    }

    fn name(&self, rank: usize) -> &str {
        (**self).name(rank)
    }

    fn check(&self) -> Result<(), Failure> {
        (**self).check()
    }

    fn wait_for_failure(&self, limit: Duration) -> Result<(), Failure> {
        (**self).wait_for_failure(limit)
    }

    fn abort(&self, reason: &str) {
        (**self).abort(reason);
    }

    fn set_progress(&self, calls: u64) {
        (**self).set_progress(calls);
    }

    fn progress(&self, limit: Duration) -> Vec<Option<u64>> {
        (**self).progress(limit)
    }
}

impl Members for Group {
    fn rank(&self) -> usize {
        Group::rank(self)
    }

    fn ranks(&self) -> usize {
        Group::ranks(self)
    }

    fn name(&self, rank: usize) -> &str {
        Group::name(self, rank)
    }

    fn check(&self) -> Result<(), Failure> {
        Group::check(self)
    }

    fn wait_for_failure(&self, limit: Duration) -> Result<(), Failure> {
        Group::wait_for_failure(self, limit)
    }

    fn abort(&self, reason: &str) {
        Group::abort(self, reason);
    }

    fn set_progress(&self, calls: u64) {
        Group::set_progress(self, calls);
    }

    fn progress(&self, limit: Duration) -> Vec<Option<u64>> {
        Group::progress(self, limit)
    }
}

/// Sizes of a communicator, which all ranks have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Bytes for the payload, at the start of the memory.
    pub payload: u64,
    /// Most bytes of a piece, a multiple of 64.
    pub chunk: u64,
    /// Most tasks at the same time.
    pub window: u32,
}

impl Sizes {
    /// Checks the sizes.
    ///
    /// # Errors
    ///
    /// A size is not possible.
    pub fn check(&self) -> Result<(), Error> {
        if self.payload == 0 || self.chunk == 0 || self.chunk % CHUNK_ALIGN != 0 || self.chunk > 1 << 30 {
            return Err(Error::Call(format!(
                "a payload of {} bytes in chunks of {} bytes: chunks are multiples of {CHUNK_ALIGN} bytes up to 1 GiB, and neither is 0",
                self.payload, self.chunk
            )));
        }
        if !(1..=4096).contains(&self.window) {
            return Err(Error::Call(format!(
                "a window of {} chunks: 1 to 4096 are possible",
                self.window
            )));
        }
        Ok(())
    }

    fn slots_at(&self) -> u64 {
        self.payload.next_multiple_of(PAGE)
    }

    /// Returns the number of slots: as many as the window has tasks, and at least two tasks of the algorithms that need a slot for
    /// each rank.
    fn slots(&self, ranks: usize) -> u64 {
        u64::from(self.window).max(2 * ranks as u64)
    }

    /// Returns the bytes of memory that each of `ranks` ranks needs.
    pub fn memory(&self, ranks: usize) -> u64 {
        self.slots_at() + self.slots(ranks) * self.chunk
    }

    /// Returns the number of tasks at the same time, each with `slots` slots.
    fn tasks(&self, ranks: usize, slots: usize) -> u64 {
        match slots {
            0 => self.window.into(),
            slots => (self.slots(ranks) / slots as u64).min(self.window.into()).max(1),
        }
    }
}

/// What a rank did in a call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// Bytes of the payload that this rank sent.
    pub sent: u64,
    /// Bytes of the payload that this rank received.
    pub received: u64,
    /// Messages with payload that this rank sent.
    pub messages: u64,
    /// The number of the last round of a message that arrived, and 1; 0 if none arrived.
    pub rounds: u32,
    /// The most ranks from which messages of one round arrived.
    pub fan_in: u32,
    /// The most bytes of the payload that this rank sent or received in one round.
    pub most_in_round: u64,
    /// Bytes that the engine reduced or copied.
    pub engine: u64,
}

/// What a rank did in a round.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    sent: u64,
    received: u64,
    /// The ranks whose messages arrived, by bits.
    senders: u32,
}

/// The state of a task.
#[derive(Debug, Clone, Default)]
struct Progress {
    step: usize,
    /// Writes that have not completed.
    sending: u32,
    /// The job of the engine that the task waits for.
    job: Option<u64>,
    /// The ranks whose messages have arrived and were not used yet.
    arrived: Vec<usize>,
}

/// A group of ranks with memory, connections, and an engine.
pub struct Communicator<M, T, E> {
    // Fields are dropped in this order: the engine ends before the transport frees the memory.
    engine: E,
    transport: T,
    members: M,
    /// Where the engine has the first byte of the memory.
    base: u64,
    sizes: Sizes,
    ring: Ring,
    limit: Duration,
    /// Calls that this rank has entered.
    calls: u64,
    /// The number of the first task of the next call.
    next: u64,
    /// Tasks that other ranks have opened.
    opened: Vec<u64>,
    /// Calls that other ranks have entered and this rank has not looked at.
    entered: VecDeque<(usize, Announcement)>,
    /// For each rank, the tasks whose writes have not completed; `None` for messages without payload.
    sending: Vec<VecDeque<Option<usize>>>,
    /// Set when the group has failed.
    failed: bool,
    events: Vec<Event>,
}

impl<M: Members, T: Transport, E: Engine> Communicator<M, T, E> {
    /// Creates a communicator. `base` is the place of the memory's first byte for the engine. A call fails if nothing happens for
    /// `limit`.
    ///
    /// # Errors
    ///
    /// The sizes are not possible, or the ring has other ranks than the group.
    pub fn new(
        members: M,
        transport: T,
        engine: E,
        base: u64,
        sizes: Sizes,
        ring: Ring,
        limit: Duration,
    ) -> Result<Self, Error> {
        sizes.check()?;
        let ranks = members.ranks();
        if ring.ranks() != ranks {
            return Err(Error::Call(format!(
                "a ring of {} ranks in a group of {ranks}",
                ring.ranks()
            )));
        }
        Ok(Self {
            members,
            transport,
            engine,
            base,
            sizes,
            ring,
            limit,
            calls: 0,
            next: 0,
            opened: vec![0; ranks],
            entered: VecDeque::new(),
            sending: vec![VecDeque::new(); ranks],
            failed: false,
            events: Vec::new(),
        })
    }

    /// Returns the group.
    pub fn members(&self) -> &M {
        &self.members
    }

    /// Returns the connections.
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// Returns the engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// Ends the communicator. Returns the group.
    pub fn into_members(self) -> M {
        self.members
    }

    /// Reduces the payloads of all ranks, and gives every rank the result. `root` of the parameter server is rank 0.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub fn allreduce(
        &mut self,
        at: u64,
        bytes: u64,
        element: Element,
        reduction: Reduction,
        algorithm: Algorithm,
    ) -> Result<Done, Error> {
        self.call(Call {
            collective: Collective::Allreduce(algorithm),
            element,
            reduction,
            at,
            bytes,
            root: 0,
        })
    }

    /// Makes a call, which all ranks make at the same time and in the same order.
    ///
    /// # Errors
    ///
    /// See [`Error`]. The payload has no defined content after an error.
    pub fn call(&mut self, call: Call) -> Result<Done, Error> {
        let mut execution = self.enter(call)?;
        let result = self.execute(&mut execution);
        result.map_err(|error| self.fail(error))
    }

    /// Has the engine execute a job in the memory of this rank, between two calls, and waits for its end. Other ranks do not take
    /// part. Offsets are relative to the memory, and the ranges are in the part for payload.
    ///
    /// # Errors
    ///
    /// [`Error::Call`] if the job is not possible, or after a failure. [`Error::Device`] if the engine fails or does not end the job
    /// within the limit.
    pub fn compute(&mut self, job: Job) -> Result<(), Error> {
        self.members.check()?;
        if self.failed {
            return Err(Error::Call(FAILED.into()));
        }
        job.check(self.sizes.payload)
            .map_err(|error| Error::Call(error.to_string()))?;
        let job = Job {
            into: self.base + job.into,
            from: self.base + job.from,
            ..job
        };
        let result = engine::execute(&mut self.engine, &[job], self.limit);
        result.map_err(|error| self.fail(Error::Device(error)))
    }

    fn execute(&mut self, execution: &mut Execution) -> Result<Done, Error> {
        let mut moved = Instant::now();
        loop {
            match self.advance(execution)? {
                State::Done => return Ok(std::mem::take(&mut execution.done)),
                State::Moved => {
                    moved = Instant::now();
                    continue;
                }
                State::Waiting => {}
            }
            self.members.check()?;
            if moved.elapsed() > self.limit {
                return Err(self.stalled(execution));
            }
            if execution.jobs > 0 {
                std::thread::yield_now();
            } else {
                self.transport.wait(MAX_SLEEP).map_err(Error::Connection)?;
            }
        }
    }

    /// Marks the group as failed, and informs all ranks why. Returns the error with the name of the rank that has failed, if
    /// another one has.
    fn fail(&mut self, error: Error) -> Error {
        self.failed = true;
        if matches!(error, Error::Failed(_)) {
            return error;
        }
        // Not for a failure of this rank's own device: the others would report what follows from it before.
        if matches!(error, Error::Connection(_)) {
            return match self.members.stop(&error.to_string()) {
                Err(failure) => Error::Failed(failure),
                Ok(()) => error,
            };
        }
        self.members.abort(&error.to_string());
        error
    }

    fn stalled(&self, execution: &Execution) -> Error {
        let name = |rank: usize| self.members.name(rank).to_owned();
        let progress = self.members.progress(PROGRESS_LIMIT);
        let those = |matches: &dyn Fn(Option<u64>) -> bool| -> Vec<String> {
            let ranks = progress.iter().enumerate();
            ranks
                .filter(|(_, calls)| matches(**calls))
                .map(|(rank, _)| name(rank))
                .collect()
        };
        let missing = those(&|calls| calls.is_some_and(|calls| calls < self.calls));
        let silent = those(&|calls| calls.is_none());
        let own = execution.announcement.describe();
        let what = if !missing.is_empty() {
            format!("{} did not enter {own}", list(&missing))
        } else if !silent.is_empty() {
            format!("{} does not respond in {own}", list(&silent))
        } else {
            let wait: Vec<String> = execution.waits_for().into_iter().map(name).collect();
            format!("{own} waits for {}", list(&wait))
        };
        Error::Stalled {
            limit: self.limit,
            what,
        }
    }

    /// Enters a call.
    fn enter(&mut self, call: Call) -> Result<Execution, Error> {
        self.members.check()?;
        if self.failed {
            return Err(Error::Call(FAILED.into()));
        }
        if call
            .at
            .checked_add(call.bytes)
            .is_none_or(|end| end > self.sizes.payload)
        {
            return Err(Error::Call(format!(
                "{} bytes at offset {}: the payload has {} bytes",
                call.bytes, call.at, self.sizes.payload
            )));
        }
        let plan = Plan::new(call, self.ring.clone(), self.sizes.chunk).map_err(Error::Call)?;
        let schedule = plan.schedule(self.members.rank());
        self.calls += 1;
        self.members.set_progress(self.calls);
        let window = self.sizes.tasks(self.members.ranks(), schedule.slots);
        let first = self.next;
        self.next += schedule.tasks.len() as u64;
        let open = window.min(schedule.tasks.len() as u64);
        Ok(Execution {
            announcement: Announcement {
                number: self.calls,
                call,
                chunk: self.sizes.chunk,
            },
            first,
            window,
            slots: schedule.slots,
            ended: 0,
            open,
            announced: schedule.senders.iter().map(|rank| (*rank, None)).collect(),
            entered: schedule.receivers.iter().map(|rank| (*rank, false)).collect(),
            states: vec![Progress::default(); schedule.tasks.len()],
            tasks: schedule.tasks,
            jobs: 0,
            rounds: Vec::new(),
            done: Done::default(),
        })
    }

    /// Does what can be done without waiting.
    fn advance(&mut self, execution: &mut Execution) -> Result<State, Error> {
        let mut moved = self.take_events(execution)?;
        moved |= self.take_announcements(execution)?;
        let completed = self.engine.completed().map_err(Error::Device)?;
        let mut submitted = false;
        for index in execution.ended..execution.open as usize {
            while self.step(execution, index, completed, &mut submitted)? {
                moved = true;
            }
        }
        if submitted {
            self.engine.start().map_err(Error::Device)?;
        }
        while execution.has_ended(execution.ended) {
            execution.ended += 1;
        }
        execution.open = (execution.ended as u64 + execution.window).min(execution.tasks.len() as u64);
        moved |= self.announce(execution)?;
        let all_announced = execution
            .announced
            .iter()
            .all(|(_, announced)| *announced == Some(execution.open));
        if execution.ended == execution.tasks.len()
            && all_announced
            && execution.entered.iter().all(|(_, entered)| *entered)
        {
            return Ok(State::Done);
        }
        Ok(if moved { State::Moved } else { State::Waiting })
    }

    fn take_events(&mut self, execution: &mut Execution) -> Result<bool, Error> {
        let mut events = std::mem::take(&mut self.events);
        self.transport.poll(&mut events).map_err(Error::Connection)?;
        let moved = !events.is_empty();
        let mut result = Ok(());
        for event in events.drain(..) {
            if result.is_ok() {
                result = self.take_event(execution, event);
            }
        }
        self.events = events;
        result.map(|()| moved)
    }

    fn take_event(&mut self, execution: &mut Execution, event: Event) -> Result<(), Error> {
        match event {
            Event::Sent { to } => {
                let task = self.sending.get_mut(to).and_then(VecDeque::pop_front);
                let task = task.ok_or_else(|| self.unexpected(to, "a completion without a write"))?;
                // Tasks end only when their writes have completed, so the task belongs to this call.
                if let Some(state) = task.and_then(|task| execution.states.get_mut(task)) {
                    state.sending -= 1;
                }
                Ok(())
            }
            Event::Arrived { from, immediate } => match Immediate::decode(immediate) {
                Some(Immediate::Piece { task, round }) => self.take_piece(execution, from, task, round),
                Some(Immediate::Open { tasks }) => {
                    self.set_opened(from, tasks);
                    Ok(())
                }
                Some(Immediate::Enter { tasks }) => {
                    let announcement = Announcement::decode(&self.transport.announcement(from));
                    let announcement = announcement.ok_or_else(|| self.unexpected(from, "an invalid announcement"))?;
                    if self.entered.iter().any(|(rank, _)| *rank == from) {
                        return Err(self.unexpected(from, "two announcements"));
                    }
                    self.entered.push_back((from, announcement));
                    self.set_opened(from, tasks);
                    Ok(())
                }
                None => Err(self.unexpected(from, &format!("the immediate data {immediate:#x}"))),
            },
        }
    }

    fn take_piece(&mut self, execution: &mut Execution, from: usize, task: u32, round: u8) -> Result<(), Error> {
        let number = whole(task, execution.first + execution.ended as u64);
        let index = number
            .checked_sub(execution.first)
            .filter(|index| *index < execution.open);
        let place = index.and_then(|index| {
            Some((
                execution.states.get_mut(index as usize)?,
                &execution.tasks[index as usize],
            ))
        });
        let Some((state, task)) = place else {
            return Err(self.unexpected(from, &format!("a piece of task {number}, which is not open")));
        };
        state.arrived.push(from);
        let bytes = task.bytes;
        let traffic = execution.round(round);
        traffic.received += bytes;
        traffic.senders |= 1_u32 << from;
        let (in_round, fan_in) = (traffic.received, traffic.senders.count_ones());
        let done = &mut execution.done;
        done.received += bytes;
        done.rounds = done.rounds.max(u32::from(round) + 1);
        done.most_in_round = done.most_in_round.max(in_round);
        done.fan_in = done.fan_in.max(fan_in);
        Ok(())
    }

    fn set_opened(&mut self, rank: usize, tasks: u32) {
        let opened = &mut self.opened[rank];
        *opened = whole(tasks, *opened).max(*opened);
    }

    fn unexpected(&self, from: usize, what: &str) -> Error {
        Error::Device(anyhow::anyhow!("{} sent {what}", self.members.name(from)))
    }

    /// Compares the calls that other ranks have entered with that of this rank.
    fn take_announcements(&mut self, execution: &mut Execution) -> Result<bool, Error> {
        let mut moved = false;
        for _ in 0..self.entered.len() {
            let Some((rank, theirs)) = self.entered.pop_front() else {
                break;
            };
            if theirs.number > execution.announcement.number {
                // The other rank is ahead: it has ended this call, and maybe others in which it received nothing from this rank.
                self.entered.push_back((rank, theirs));
                continue;
            }
            if theirs != execution.announcement {
                return Err(Error::Mismatch {
                    other: self.members.name(rank).to_owned(),
                    theirs: theirs.describe(),
                    own: execution.announcement.describe(),
                });
            }
            let entered = execution.entered.iter_mut().find(|(other, _)| *other == rank);
            let entered = entered
                .ok_or_else(|| self.unexpected(rank, "an announcement for a call in which it receives nothing"))?;
            entered.1 = true;
            moved = true;
        }
        Ok(moved)
    }

    /// Informs the ranks that send to this one which tasks are open.
    fn announce(&mut self, execution: &mut Execution) -> Result<bool, Error> {
        let tasks = low(execution.first + execution.open);
        let part = (execution.window / 4).max(1);
        let all = execution.open == execution.tasks.len() as u64;
        let mut moved = false;
        for (rank, announced) in &mut execution.announced {
            let (announcement, message) = match *announced {
                None => (Some(execution.announcement.encode()), Immediate::Enter { tasks }),
                Some(announced) if announced + part <= execution.open || (all && announced < execution.open) => {
                    (None, Immediate::Open { tasks })
                }
                Some(_) => continue,
            };
            let sent = self.transport.notify(*rank, announcement.as_ref(), message.encode());
            if sent.map_err(Error::Connection)? {
                *announced = Some(execution.open);
                self.sending[*rank].push_back(None);
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Executes the next step of a task, if this is possible without waiting.
    fn step(
        &mut self,
        execution: &mut Execution,
        index: usize,
        completed: u64,
        submitted: &mut bool,
    ) -> Result<bool, Error> {
        let number = execution.first + index as u64;
        let task = &execution.tasks[index];
        let state = &mut execution.states[index];
        let Some(step) = task.steps.get(state.step) else {
            return Ok(false);
        };
        let place = |place: Place| match place {
            Place::Payload => execution.announcement.call.at + task.at,
            Place::Slot(slot) => {
                let slot = (number % execution.window) * execution.slots as u64 + slot as u64;
                self.sizes.slots_at() + slot * self.sizes.chunk
            }
        };
        match *step {
            Step::Send { to, into, round } => {
                if self.opened[to] <= number {
                    return Ok(false);
                }
                let write = Write {
                    to,
                    from: place(Place::Payload),
                    bytes: task.bytes,
                    into: place(into),
                    immediate: Immediate::piece(number, round).encode(),
                };
                if !self.transport.write(&write).map_err(Error::Connection)? {
                    return Ok(false);
                }
                self.sending[to].push_back(Some(index));
                state.sending += 1;
                state.step += 1;
                let bytes = task.bytes;
                let traffic = execution.round(round);
                traffic.sent += bytes;
                let in_round = traffic.sent;
                let done = &mut execution.done;
                done.sent += bytes;
                done.messages += 1;
                done.most_in_round = done.most_in_round.max(in_round);
                return Ok(true);
            }
            Step::Receive { from } => {
                let Some(at) = state.arrived.iter().position(|rank| *rank == from) else {
                    return Ok(false);
                };
                state.arrived.remove(at);
            }
            Step::Sent => {
                if state.sending > 0 {
                    return Ok(false);
                }
            }
            Step::Reduce { into, from } | Step::Copy { into, from } => match state.job {
                Some(job) if job < completed => {
                    state.job = None;
                    execution.jobs -= 1;
                }
                Some(_) => return Ok(false),
                None => {
                    let call = &execution.announcement.call;
                    let operation = match step {
                        Step::Reduce { .. } => Operation::Reduce(call.element, call.reduction),
                        _ => Operation::Copy,
                    };
                    let job = Job {
                        operation,
                        into: self.base + place(into),
                        from: self.base + place(from),
                        bytes: task.bytes,
                    };
                    let Some(job) = self.engine.submit(job).map_err(Error::Device)? else {
                        return Ok(false);
                    };
                    *submitted = true;
                    state.job = Some(job);
                    execution.jobs += 1;
                    execution.done.engine += task.bytes;
                    // The step ends when the job has completed.
                    return Ok(false);
                }
            },
        }
        state.step += 1;
        Ok(true)
    }
}

/// What a call has to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing; the call has ended.
    Done,
    /// Something happened: look again.
    Moved,
    /// Wait for other ranks or for the engine.
    Waiting,
}

/// A call in progress.
struct Execution {
    announcement: Announcement,
    /// The number of the first task.
    first: u64,
    /// Tasks at the same time.
    window: u64,
    slots: usize,
    /// The first tasks that have ended.
    ended: usize,
    /// Tasks that this rank has opened.
    open: u64,
    /// The ranks that send to this one, with the tasks that they know to be open; `None` if they do not know of the call.
    announced: Vec<(usize, Option<u64>)>,
    /// The ranks that this one sends to, and whether they have entered the call.
    entered: Vec<(usize, bool)>,
    tasks: Vec<Task>,
    states: Vec<Progress>,
    /// Jobs of the engine that have not completed.
    jobs: usize,
    /// What this rank did in each round.
    rounds: Vec<Round>,
    done: Done,
}

impl Execution {
    fn round(&mut self, round: u8) -> &mut Round {
        let round = usize::from(round);
        if self.rounds.len() <= round {
            self.rounds.resize(round + 1, Round::default());
        }
        &mut self.rounds[round]
    }

    fn has_ended(&self, index: usize) -> bool {
        let Some(state) = self.states.get(index) else {
            return false;
        };
        state.step == self.tasks[index].steps.len()
    }

    /// Returns the ranks that the first tasks wait for.
    fn waits_for(&self) -> Vec<usize> {
        let open = self.ended..self.open as usize;
        let mut ranks: Vec<usize> = open
            .filter_map(|index| match self.tasks[index].steps.get(self.states[index].step)? {
                Step::Send { to, .. } => Some(*to),
                Step::Receive { from } => Some(*from),
                _ => None,
            })
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
