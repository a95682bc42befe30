// SPDX-License-Identifier: MIT OR Apache-2.0

//! Asynchronous training: rank 0 is a parameter server, the other ranks are workers that do not wait for each other.
//!
//! A worker computes what a batch adds to the parameters, and writes this update into a slot of the server by RDMA. The server's engine
//! adds updates to the parameters in the order of their arrival, and copies the parameters for the worker; the server's NIC writes
//! the copy into a slot of the worker. The server's processor touches no payload, except to compute losses.
//!
//! # Flow control
//!
//! A worker has a window of slots. Its update `n` and the reply to it use slot `n` modulo the window, at the same places in the memory of
//! both. A worker sends update `n` only when the reply to update `n - window` has arrived. So the server's slot is free, and a reply does
//! not change while the worker reads it: what would overwrite it needs an update that the worker has not sent. The server writes a reply
//! only when its earlier write from that slot has completed.
//!
//! # Staleness
//!
//! The parameters' version is the number of updates that they have. An update has the version for which it was computed as immediate data;
//! its staleness is the number of updates that the server has added since.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use p2pmem_collectives::communicator::Members;
use p2pmem_collectives::element::{Element, Reduction};
use p2pmem_collectives::engine::{execute, Engine, Job, Operation};
use p2pmem_collectives::transport::{Event, Transport, Write};
use p2pmem_verbs::Span;
use serde::{Deserialize, Serialize};

use crate::digits::Digits;
use crate::memory;
use crate::outcome::{bytes, floats, Outcome};
use crate::ranks::{stop, Wait};
use crate::settings::{Batches, Settings};
use crate::state::PAGE;

/// The rank of the parameter server.
pub const SERVER: usize = 0;

/// Where a rank has what. All ranks have the same places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    bytes: u64,
    window: u64,
    workers: u64,
}

impl Places {
    /// Returns the places for a network of `parameters` parameters.
    pub fn new(parameters: usize, ranks: usize, window: u32) -> Self {
        Self {
            bytes: 4 * parameters as u64,
            window: window.into(),
            workers: ranks as u64 - 1,
        }
    }

    fn stride(&self) -> u64 {
        self.bytes.next_multiple_of(64)
    }

    fn slot(&self, worker: usize, number: u64) -> u64 {
        self.stride() * (1 + (worker as u64 - 1) * self.window + number % self.window)
    }

    /// Returns the place of an update of a worker.
    fn update(&self, worker: usize, number: u64) -> u64 {
        self.slot(worker, number)
    }

    /// Returns the place of the reply to an update.
    fn reply(&self, worker: usize, number: u64) -> u64 {
        self.slot(worker, number) + self.stride() * self.workers * self.window
    }

    /// Returns the bytes of memory of a rank.
    pub fn memory(&self) -> u64 {
        (self.stride() * (1 + 2 * self.workers * self.window)).next_multiple_of(PAGE)
    }
}

/// How far gradients lag behind the parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Staleness {
    /// Mean number of updates between the parameters of a gradient and its use.
    pub mean: f64,
    /// The largest number.
    pub most: u64,
}

impl Staleness {
    /// Checks the mean. When the server adds an update, at most `window` other updates of each worker are computed for older parameters and
    /// not added yet, and one less of the worker of this update: a worker computes update `n` with the reply to update `n - window` or
    /// a newer one. So each update adds at most 1 to the staleness of `workers * window - 1` others.
    ///
    /// # Errors
    ///
    /// The mean is larger: a worker sent more updates than its window allows, or did not use a reply.
    fn check(&self, workers: usize, window: u32) -> Result<()> {
        let most = (workers as u64 * u64::from(window) - 1) as f64;
        ensure!(
            self.mean <= most,
            "the mean staleness is {:.3}, and {workers} workers with a window of {window} have at most {most}: a worker exceeded its \
             window, or did not use the parameters that it got",
            self.mean
        );
        Ok(())
    }
}

/// An asynchronous training, as one rank sees it.
#[derive(Debug)]
pub struct Training<'a> {
    /// The settings. A worker computes whole batches.
    pub settings: &'a Settings,
    /// The data.
    pub digits: &'a Digits,
    /// The memory of this rank.
    pub span: Span,
    /// Updates of a worker whose reply has not arrived.
    pub window: u32,
    /// Longest time in which nothing happens.
    pub limit: Duration,
}

/// What the server did.
#[derive(Debug, Clone, PartialEq)]
pub struct Served {
    /// The result. A loss is that after as many updates as an epoch has batches.
    pub outcome: Outcome,
    /// Updates.
    pub updates: u64,
    /// How old they were.
    pub staleness: Staleness,
}

/// The server's view of a worker.
#[derive(Debug, Clone, Copy, Default)]
struct Worker {
    /// Updates that were added.
    added: u64,
    /// Replies whose write has not completed.
    sending: u64,
}

impl Training<'_> {
    fn places(&self, ranks: usize) -> Places {
        Places::new(self.settings.network().parameters(), ranks, self.window)
    }

    fn updates(&self, batches: &Batches) -> u64 {
        batches.per_epoch() * u64::from(self.settings.epochs)
    }

    fn check<M: Members>(&self, members: &M) -> Result<()> {
        self.settings.check(self.digits.training.len())?;
        ensure!(
            members.ranks() > 1,
            "a parameter server needs at least one worker: start 2 ranks or more"
        );
        ensure!(self.window >= 1, "a window of 0 updates: at least 1 is possible");
        Ok(())
    }

    fn read(&self, at: u64) -> Result<Vec<u8>> {
        let bytes = 4 * self.settings.network().parameters();
        Ok(memory::read(&self.span, at, bytes)?)
    }

    /// Serves until all updates of all workers were added. `base` is the place of the memory's first byte for the engine.
    ///
    /// # Errors
    ///
    /// A rank failed, or sent nothing within the limit. All ranks get an error that names the rank.
    pub fn serve<M: Members, T: Transport, E: Engine>(
        &self,
        members: &M,
        transport: &mut T,
        engine: &mut E,
        base: u64,
    ) -> Result<Served> {
        self.check(members)
            .and_then(|()| self.serve_all(members, transport, engine, base))
            .map_err(|error| stop(members, error))
    }

    fn serve_all<M: Members, T: Transport, E: Engine>(
        &self,
        members: &M,
        transport: &mut T,
        engine: &mut E,
        base: u64,
    ) -> Result<Served> {
        let ranks = members.ranks();
        let places = self.places(ranks);
        let network = self.settings.network();
        let batches = Batches::new(self.settings, self.digits.training.len());
        let total = self.updates(&batches);
        memory::write(&self.span, 0, &bytes(&network.initial(self.settings.seed)))?;

        let mut workers = vec![Worker::default(); ranks];
        let expected = |worker: usize| batches_of(total, worker, ranks);
        // Updates in the order of their arrival, with the version for which they were computed.
        let mut arrived: VecDeque<(usize, u32)> = VecDeque::new();
        let (mut version, mut losses) = (0_u64, Vec::new());
        let (mut sum, mut most) = (0_u64, 0);
        let mut events = Vec::new();
        let mut wait = Wait::new(members, self.limit);
        while version < total || workers.iter().any(|worker| worker.sending > 0) {
            let next = arrived.front().copied();
            if let Some((from, computed)) = next.filter(|(from, _)| workers[*from].sending < u64::from(self.window)) {
                arrived.pop_front();
                let worker = &mut workers[from];
                let staleness = version.checked_sub(computed.into());
                let staleness = staleness
                    .filter(|_| worker.added < expected(from))
                    .with_context(|| format!("{} sent an update that it cannot have computed", members.name(from)))?;
                (sum, most) = (sum + staleness, most.max(staleness));
                let reply = places.reply(from, worker.added);
                let job = |operation, into: u64, from: u64| Job {
                    operation,
                    into: base + into,
                    from: base + from,
                    bytes: places.bytes,
                };
                let add = Operation::Reduce(Element::F32, Reduction::Sum);
                let jobs = [
                    job(add, 0, places.update(from, worker.added)),
                    job(Operation::Copy, reply, 0),
                ];
                execute(engine, &jobs, self.limit)?;
                version += 1;
                worker.added += 1;
                worker.sending += 1;
                let write = Write {
                    to: from,
                    from: reply,
                    bytes: places.bytes,
                    into: reply,
                    immediate: version as u32,
                };
                ensure!(
                    transport.write(&write)?,
                    "the send queue to {} is full",
                    members.name(from)
                );
                if version % batches.per_epoch() == 0 {
                    losses.push(network.score(&floats(&self.read(0)?), &self.digits.training).loss);
                    // Workers did not make this rank wait.
                    wait.moved();
                }
            }
            let missing = || {
                let missing = (1..ranks).filter(|rank| workers[*rank].added < expected(*rank));
                let names: Vec<&str> = missing.map(|rank| members.name(rank)).collect();
                match names.as_slice() {
                    [] => "the NIC did not send the last parameters".to_owned(),
                    names => format!("no update arrived from {}", names.join(", ")),
                }
            };
            if arrived.is_empty() || workers[arrived[0].0].sending >= u64::from(self.window) {
                wait.poll(transport, &mut events, missing)?;
            } else {
                transport.poll(&mut events)?;
            }
            for event in events.drain(..) {
                match event {
                    Event::Arrived { from, immediate } if from != SERVER => arrived.push_back((from, immediate)),
                    Event::Sent { to } if workers[to].sending > 0 => workers[to].sending -= 1,
                    other => bail!("an unexpected event: {other:?}"),
                }
            }
        }
        let staleness = Staleness {
            mean: sum as f64 / total as f64,
            most,
        };
        staleness.check(ranks - 1, self.window)?;
        Ok(Served {
            outcome: Outcome::new(self.settings, self.digits, losses, &self.read(0)?),
            updates: total,
            staleness,
        })
    }

    /// Works until the reply to the last update of this worker has arrived. Returns the number of updates.
    ///
    /// # Errors
    ///
    /// A rank failed, or the server did not reply within the limit. All ranks get an error that names the rank.
    pub fn work<M: Members, T: Transport>(&self, members: &M, transport: &mut T) -> Result<u64> {
        self.check(members)
            .and_then(|()| self.work_all(members, transport))
            .map_err(|error| stop(members, error))
    }

    fn work_all<M: Members, T: Transport>(&self, members: &M, transport: &mut T) -> Result<u64> {
        let (rank, ranks) = (members.rank(), members.ranks());
        let places = self.places(ranks);
        let network = self.settings.network();
        let mut batches = Batches::new(self.settings, self.digits.training.len());
        let count = batches_of(self.updates(&batches), rank, ranks);
        let mut parameters = network.initial(self.settings.seed);
        let window = u64::from(self.window);
        let (mut replies, mut completed, mut version) = (0_u64, 0_u64, 0_u32);
        let mut events = Vec::new();
        let mut wait = Wait::new(members, self.limit);
        // One turn more than updates waits for the last replies.
        for number in 0..=count {
            let needed = if number < count {
                (number + 1).saturating_sub(window)
            } else {
                count
            };
            let before = replies;
            loop {
                // What has arrived is taken also if nothing is needed.
                if replies < needed || completed < needed {
                    let missing = || format!("{} did not reply to update {replies}", members.name(SERVER));
                    wait.poll(transport, &mut events, missing)?;
                } else {
                    transport.poll(&mut events)?;
                }
                let is_enough = events.is_empty() && replies >= needed && completed >= needed;
                for event in events.drain(..) {
                    match event {
                        Event::Arrived {
                            from: SERVER,
                            immediate,
                        } if replies < number => {
                            (replies, version) = (replies + 1, immediate);
                        }
                        Event::Sent { to: SERVER } if completed < number => completed += 1,
                        other => bail!("an unexpected event: {other:?}"),
                    }
                }
                if is_enough {
                    break;
                }
            }
            if number == count {
                break;
            }
            if replies > before {
                parameters = floats(&self.read(places.reply(rank, replies - 1))?);
            }
            // Batches go to the workers in turn.
            let batch = batches.batch(number * (ranks as u64 - 1) + rank as u64 - 1);
            let gradient = network.gradient(&parameters, &self.digits.training, batch);
            let at = places.update(rank, number);
            memory::write(&self.span, at, &self.settings.update(&gradient))?;
            let write = Write {
                to: SERVER,
                from: at,
                bytes: places.bytes,
                into: at,
                immediate: version,
            };
            ensure!(
                transport.write(&write)?,
                "the send queue to {} is full",
                members.name(SERVER)
            );
            members.check()?;
            wait.moved();
        }
        Ok(count)
    }
}

/// Returns how many of `total` batches a worker computes.
fn batches_of(total: u64, worker: usize, ranks: usize) -> u64 {
    let (workers, index) = (ranks as u64 - 1, worker as u64 - 1);
    (total + workers - 1 - index) / workers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::{each_rank, LIMIT};
    use p2pmem_collectives::engine::ProcessorEngine;

    const SETTINGS: Settings = Settings {
        epochs: 4,
        batch: 48,
        rate: 0.2,
        hidden: 12,
        layers: 2,
        seed: 3,
    };

    /// The result of a rank: the server's report, or the updates of a worker.
    #[derive(Debug)]
    enum Ended {
        Server(Served),
        Worker(u64),
    }

    /// Trains. `silent` is a worker that sends nothing until the others have failed. `limit` is that of the server.
    fn train(digits: &Digits, ranks: usize, window: u32, silent: Option<usize>, limit: Duration) -> Vec<Result<Ended>> {
        let bytes = Places::new(SETTINGS.network().parameters(), ranks, window).memory();
        each_rank(ranks, bytes, |group, mut transport, span| {
            let rank = Members::rank(&group);
            let training = Training {
                settings: &SETTINGS,
                digits,
                span: span.clone(),
                window,
                limit: if rank == SERVER { limit } else { LIMIT },
            };
            if silent == Some(rank) {
                group.wait_for_failure(LIMIT)?;
            }
            let ended = if rank == SERVER {
                let mut engine = ProcessorEngine::new(span);
                Ended::Server(training.serve(&group, &mut transport, &mut engine, 0)?)
            } else {
                Ended::Worker(training.work(&group, &mut transport)?)
            };
            group.leave(LIMIT)?;
            Ok(ended)
        })
    }

    #[test]
    fn the_loss_falls_with_any_number_of_workers() {
        let digits = Digits::load();
        for (ranks, window) in [(2, 1), (2, 3), (3, 2), (4, 1)] {
            let mut ended = train(&digits, ranks, window, None, LIMIT)
                .into_iter()
                .map(Result::unwrap);
            let Some(Ended::Server(served)) = ended.next() else {
                panic!("rank 0 is the server")
            };
            let updates: Vec<u64> = ended
                .map(|ended| match ended {
                    Ended::Worker(updates) => updates,
                    Ended::Server(_) => panic!("two servers"),
                })
                .collect();
            // 29 batches of an epoch.
            assert_eq!((served.updates, updates.iter().sum::<u64>()), (4 * 29, 4 * 29));
            assert!(
                updates
                    .iter()
                    .all(|count| count.abs_diff(4 * 29 / updates.len() as u64) <= 1),
                "{updates:?}"
            );
            let outcome = &served.outcome;
            assert_eq!(outcome.losses.len(), 4);
            // The order of updates depends on the threads, so the losses of two runs differ.
            let least = outcome.losses.iter().copied().fold(f64::INFINITY, f64::min);
            assert!(
                least < 0.75 * outcome.initial_loss,
                "{ranks} ranks, window {window}: {served:?}"
            );
            // The server has checked the mean. Without other workers, no update is staler than the window.
            if ranks == 2 {
                assert!(served.staleness.most < window.into(), "{served:?}");
            }
        }
    }

    #[test]
    fn a_staleness_beyond_the_windows_is_refused() {
        let check = |mean, workers, window| Staleness { mean, most: 100 }.check(workers, window);
        check(0.0, 1, 1).unwrap();
        check(5.0, 3, 2).unwrap();
        for (mean, workers, window) in [(0.001, 1, 1), (5.001, 3, 2), (f64::NAN, 1, 1)] {
            let text = check(mean, workers, window).unwrap_err().to_string();
            assert!(text.contains("a worker exceeded its window"), "{text}");
        }
    }

    /// A worker that computes all updates with the first parameters, as one that does not use replies.
    #[test]
    fn a_worker_that_does_not_use_replies_is_noticed() {
        let digits = Digits::load();
        let network = SETTINGS.network();
        let bytes_of_rank = Places::new(network.parameters(), 2, 1).memory();
        let results = each_rank(2, bytes_of_rank, |group, mut transport, span| {
            let training = Training {
                settings: &SETTINGS,
                digits: &digits,
                span: span.clone(),
                window: 1,
                limit: LIMIT,
            };
            if group.rank() == SERVER {
                let mut engine = ProcessorEngine::new(span);
                return training.serve(&group, &mut transport, &mut engine, 0).map(drop);
            }
            let places = training.places(2);
            let (mut replies, mut events) = (0, Vec::new());
            let count = training.updates(&Batches::new(&SETTINGS, digits.training.len()));
            for number in 0..count {
                let at = places.update(1, number);
                let write = Write {
                    to: SERVER,
                    from: at,
                    bytes: places.bytes,
                    into: at,
                    immediate: 0,
                };
                assert!(transport.write(&write)?);
                while replies <= number {
                    transport.wait(Duration::from_millis(50))?;
                    transport.poll(&mut events)?;
                    let arrived = events.drain(..).filter(|event| matches!(event, Event::Arrived { .. }));
                    replies += arrived.count() as u64;
                    group.check()?;
                }
            }
            Ok(group.wait_for_failure(LIMIT)?)
        });
        for result in results {
            let text = format!("{:#}", result.unwrap_err());
            assert!(text.contains("a worker exceeded its window"), "{text}");
        }
    }

    /// With one worker and a window of 1, nothing is stale: the result is that of one rank that trains alone.
    #[test]
    fn one_worker_has_the_result_of_the_reference() {
        let digits = Digits::load();
        let alone =
            crate::reference::train(&SETTINGS, &digits, 1, p2pmem_collectives::schedule::Algorithm::Ring).unwrap();
        let Ok(Ended::Server(served)) = train(&digits, 2, 1, None, LIMIT).remove(0) else {
            panic!("no result")
        };
        assert_eq!(served.outcome, alone);
        assert_eq!(served.staleness, Staleness::default());
    }

    #[test]
    fn a_worker_that_sends_nothing_is_named() {
        let digits = Digits::load();
        let ended = train(&digits, 3, 1, Some(2), Duration::from_millis(500));
        for (rank, ended) in ended.into_iter().enumerate() {
            let text = format!("{:#}", ended.unwrap_err());
            // On a slow machine, the other worker can be silent, too.
            assert!(text.contains("no update arrived from"), "rank {rank}: {text}");
            assert!(text.contains("rank 2 (node-c)"), "rank {rank}: {text}");
        }
    }

    #[test]
    fn places_do_not_overlap() {
        let places = Places::new(100, 4, 3);
        let slots = (1..4).flat_map(|worker| (0..3).map(move |number| (worker, number)));
        let mut all: Vec<u64> = slots
            .flat_map(|(worker, number)| [places.update(worker, number), places.reply(worker, number)])
            .chain([0])
            .collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[1] - pair[0] >= 400), "{all:?}");
        assert!(all.last().unwrap() + 400 <= places.memory());
        assert_eq!(places.update(2, 5), places.update(2, 2));
        let counts = [1, 2, 3].map(|worker| batches_of(11, worker, 4));
        assert_eq!(counts, [4, 4, 3]);
    }
}
