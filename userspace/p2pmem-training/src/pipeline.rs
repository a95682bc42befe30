// SPDX-License-Identifier: MIT OR Apache-2.0

//! Pipeline-parallel training: each rank has some consecutive layers of the network, a stage. A batch is cut into microbatches. The outputs of
//! a stage go to the next rank, and the gradients at its inputs go back to the rank before, by RDMA between the memories of both. The
//! order of the computation is that of [`schedule`](crate::schedule).
//!
//! The processor of each rank computes: it reads what has arrived in the rank's memory, and writes what the NIC sends. The engine
//! adds updates to the parameters of the stage.
//!
//! The gradients of a batch are added in the order of its samples. So the result has the bits of a training of one rank, for any number of
//! stages and microbatches.
//!
//! # Flow control
//!
//! Each rank has a slot for each microbatch in each direction, for what arrives and for what it sends. No message says that a slot is free,
//! because the schedule does: a rank sends the outputs of a microbatch of the next batch only after all gradients of this batch have
//! arrived, so the next rank does not need the outputs of this batch any more; and a rank sends gradients only after outputs of the same
//! batch have arrived, which the rank before sent when it had used all gradients of the batch before. The source of a write is
//! written again only after the write has completed.
//!
//! # Parameters
//!
//! After each epoch, the parameters of all stages go from rank to rank to rank 0, which computes the loss. They use the slots for
//! gradients, in pieces. A rank sends the first piece when the rank before has used all gradients, and a further piece when the one that
//! used its slot is acknowledged. Both are messages without payload.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use p2pmem_collectives::communicator::Members;
use p2pmem_collectives::element::{Element, Reduction};
use p2pmem_collectives::engine::{execute, Engine, Job, Operation};
use p2pmem_collectives::transport::{Event, Transport, Write};
use p2pmem_verbs::Span;
use serde::{Deserialize, Serialize};

use crate::digits::Digits;
use crate::memory;
use crate::network::{output_error, Stage};
use crate::outcome::{bytes, floats, Outcome};
use crate::ranks::{stop, Wait};
use crate::schedule::{actions, Action, Busy};
use crate::settings::{Batches, Settings};
use crate::state::PAGE;

/// Most microbatches of a batch.
pub const MAX_MICROBATCHES: usize = 256;

/// What all ranks of a pipeline have in common.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Pipeline {
    /// What is trained.
    pub settings: Settings,
    /// Parts of a batch.
    pub microbatches: usize,
}

impl Pipeline {
    /// Checks the settings for this number of ranks and of training samples.
    ///
    /// # Errors
    ///
    /// A setting is not possible.
    pub fn check(&self, ranks: usize, samples: usize) -> Result<()> {
        let Settings { batch, layers, .. } = self.settings;
        self.settings.check(samples)?;
        ensure!(
            ranks <= layers,
            "{ranks} ranks for {layers} layers: each rank needs a layer; start fewer ranks, or set --layers"
        );
        ensure!(
            (1..=MAX_MICROBATCHES).contains(&self.microbatches),
            "{} microbatches: 1 to {MAX_MICROBATCHES} are possible",
            self.microbatches
        );
        ensure!(
            batch % self.microbatches == 0,
            "{} microbatches do not divide a batch of {batch} samples",
            self.microbatches
        );
        Ok(())
    }

    /// Returns the layers of a rank.
    pub fn stage(&self, rank: usize, ranks: usize) -> Stage {
        let network = self.settings.network();
        let edge = |rank: usize| network.layers * rank / ranks;
        network.stage(edge(rank)..edge(rank + 1))
    }

    /// Returns the bytes that a rank sends to a neighbour for a microbatch.
    fn microbatch(&self) -> u64 {
        let samples = self.settings.batch / self.microbatches;
        4 * (samples * self.settings.hidden) as u64
    }
}

/// Where a rank has what. All ranks have the same places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Bytes of the parameters of the largest stage.
    parameters: u64,
    /// Bytes of what is sent for a microbatch.
    microbatch: u64,
    microbatches: u64,
}

/// The slots of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slots {
    /// Outputs of the rank before.
    Inputs,
    /// Outputs of this rank, for the next one.
    Outputs,
    /// Gradients of the next rank.
    Errors,
    /// Gradients of this rank, for the one before.
    Back,
}

impl Places {
    /// Returns the places of `ranks` ranks.
    pub fn new(pipeline: &Pipeline, ranks: usize) -> Self {
        let of = |rank| pipeline.stage(rank, ranks).parameters().len() as u64;
        Self {
            parameters: 4 * (0..ranks).map(of).max().unwrap_or(0),
            microbatch: pipeline.microbatch(),
            microbatches: pipeline.microbatches as u64,
        }
    }

    fn update(&self) -> u64 {
        self.parameters.next_multiple_of(64)
    }

    fn slot(&self, slots: Slots, number: u64) -> u64 {
        let index = slots as u64 * self.microbatches + number % self.microbatches;
        2 * self.update() + index * self.microbatch.next_multiple_of(64)
    }

    /// Returns the bytes of memory of a rank.
    pub fn memory(&self) -> u64 {
        (self.slot(Slots::Back, self.microbatches - 1) + self.microbatch).next_multiple_of(PAGE)
    }
}

/// A pipeline-parallel training, as one rank sees it.
#[derive(Debug)]
pub struct Training<'a> {
    /// What all ranks have in common.
    pub pipeline: &'a Pipeline,
    /// The data.
    pub digits: &'a Digits,
    /// The memory of this rank.
    pub span: Span,
    /// Longest time in which nothing happens.
    pub limit: Duration,
}

/// What a rank did.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// The result, on rank 0.
    pub outcome: Option<Outcome>,
    /// Batches.
    pub batches: u64,
    /// The layers of the rank.
    pub layers: Range<usize>,
    /// Parameters of these layers.
    pub parameters: usize,
    /// Bytes of outputs that the rank sent to the next one.
    pub forward: u64,
    /// Bytes of gradients that the rank sent to the one before.
    pub backward: u64,
    /// Bytes of parameters that the rank sent to the one before, after epochs.
    pub collected: u64,
    /// Seconds in which the rank computed microbatches.
    pub busy: Busy,
    /// Time from the start of the first action of each batch to the end of its last one, by the clock of this rank. On rank 0, this is
    /// the duration of all batches.
    pub duration: Duration,
}

/// The connection to a neighbour. Numbers count messages from the start of the training.
#[derive(Debug, Clone, Copy)]
struct Link {
    rank: usize,
    sent: u64,
    completed: u64,
    arrived: u64,
    /// Messages that have arrived and were used.
    used: u64,
}

/// The connections of a rank to both neighbours.
struct Links<'a, M, T> {
    transport: &'a mut T,
    wait: Wait<'a, M>,
    /// The rank before and the next rank.
    links: [Option<Link>; 2],
    events: Vec<Event>,
}

/// Bytes that a rank sends.
#[derive(Debug, Clone, Copy)]
struct Payload {
    /// Place in the memory of this rank.
    from: u64,
    bytes: u64,
    /// Place in the memory of the neighbour.
    into: u64,
}

/// What is missing if a write does not complete.
const NO_COMPLETION: &str = "did not acknowledge a write";
/// What is missing if parameters are not used.
const NO_REQUEST: &str = "did not ask for parameters";
/// The index of the connection to the rank before.
const BEFORE: usize = 0;
/// The index of the connection to the next rank.
const NEXT: usize = 1;

impl<'a, M: Members, T: Transport> Links<'a, M, T> {
    fn new(members: &'a M, transport: &'a mut T, limit: Duration) -> Self {
        let (rank, ranks) = (members.rank(), members.ranks());
        let link = |rank| Link {
            rank,
            sent: 0,
            completed: 0,
            arrived: 0,
            used: 0,
        };
        Self {
            transport,
            wait: Wait::new(members, limit),
            links: [
                rank.checked_sub(1).map(link),
                Some(rank + 1).filter(|next| *next < ranks).map(link),
            ],
            events: Vec::new(),
        }
    }

    fn link(&mut self, index: usize) -> Result<&mut Link> {
        self.links[index].as_mut().context("this rank has no neighbour there")
    }

    fn take(&mut self, event: Event) -> Result<()> {
        let (Event::Sent { to: rank } | Event::Arrived { from: rank, .. }) = event;
        let link = self.links.iter_mut().flatten().find(|link| link.rank == rank);
        match (event, link) {
            (Event::Sent { .. }, Some(link)) if link.completed < link.sent => link.completed += 1,
            // Messages are numbered by their immediate data, to find another order than that of the schedule.
            (Event::Arrived { immediate, .. }, Some(link)) if immediate == link.arrived as u32 => link.arrived += 1,
            _ => bail!("an unexpected event: {event:?}"),
        }
        Ok(())
    }

    /// Waits until `is_there` is true for the connection. `what` says what is missing.
    fn until(&mut self, index: usize, what: &str, is_there: impl Fn(&Link) -> bool) -> Result<()> {
        let members = self.wait.members();
        loop {
            let link = *self.link(index)?;
            if is_there(&link) {
                return Ok(());
            }
            let missing = || format!("{} {what}", members.name(link.rank));
            self.wait.poll(self.transport, &mut self.events, missing)?;
            for event in std::mem::take(&mut self.events) {
                self.take(event)?;
            }
        }
    }

    /// Waits for the next message of a neighbour.
    fn receive(&mut self, index: usize, what: &str) -> Result<()> {
        self.until(index, what, |link| link.used < link.arrived)?;
        self.link(index)?.used += 1;
        Ok(())
    }

    /// Waits until the sources of all writes can be written again.
    fn settle(&mut self) -> Result<()> {
        for index in [BEFORE, NEXT] {
            if self.links[index].is_some() {
                self.until(index, NO_COMPLETION, |link| link.completed == link.sent)?;
            }
        }
        Ok(())
    }

    /// Sends bytes of this rank's memory to a neighbour; or a message without payload.
    fn send(&mut self, index: usize, payload: Option<Payload>) -> Result<()> {
        loop {
            let Link {
                rank: to,
                sent,
                completed,
                ..
            } = *self.link(index)?;
            let immediate = sent as u32;
            let is_sent = match payload {
                Some(Payload { from, bytes, into }) => self.transport.write(&Write {
                    to,
                    from,
                    bytes,
                    into,
                    immediate,
                })?,
                None => self.transport.notify(to, None, immediate)?,
            };
            if is_sent {
                self.link(index)?.sent += 1;
                return Ok(());
            }
            // The queue is full.
            self.until(index, NO_COMPLETION, |link| link.completed > completed)?;
        }
    }
}

/// What a rank has computed for a sample, and needs for its gradient.
struct Sample {
    inputs: Vec<f32>,
    /// The outputs of each layer.
    outputs: Vec<Vec<f32>>,
}

/// The stage of a rank, and what the rank knows about a batch.
struct Work {
    stage: Stage,
    /// The parameters of the stage.
    parameters: Vec<f32>,
    /// The sum of the gradients of the batch.
    gradient: Vec<f32>,
    /// By microbatch: what was computed forward and not yet backward.
    computed: Vec<Vec<Sample>>,
}

impl Sample {
    /// The outputs of the last layer.
    fn last(&self) -> &[f32] {
        self.outputs.last().map_or(&[], Vec::as_slice)
    }
}

impl Work {
    /// Computes a microbatch forward. Returns the outputs for the next rank, those of one sample after another.
    fn forward(&mut self, inputs: Vec<Vec<f32>>) -> Vec<f32> {
        let sample = |inputs: Vec<f32>| Sample {
            outputs: self.stage.forward(&self.parameters, &inputs),
            inputs,
        };
        let samples: Vec<Sample> = inputs.into_iter().map(sample).collect();
        let outputs = match self.stage.is_last() {
            true => Vec::new(),
            false => samples.iter().flat_map(Sample::last).copied().collect(),
        };
        self.computed.push(samples);
        outputs
    }

    /// Computes a microbatch backward. Returns the gradients for the rank before, those of one sample after another.
    fn backward(&mut self, microbatch: usize, errors: Vec<Vec<f32>>) -> Vec<f32> {
        let mut back = Vec::new();
        for (sample, error) in std::mem::take(&mut self.computed[microbatch]).iter().zip(errors) {
            let Sample { inputs, outputs } = sample;
            let sums = &mut self.gradient;
            back.extend(self.stage.backward(&self.parameters, inputs, outputs, error, sums));
        }
        back
    }
}

impl Training<'_> {
    /// Trains. `after` is called after each action, with the number of the batch; an error ends the training of all ranks. `base` is the
    /// place of the memory's first byte for the engine.
    ///
    /// # Errors
    ///
    /// A setting is not possible, or a rank failed or sent nothing within the limit. All ranks get an error that names the rank.
    pub fn run<M: Members, T: Transport, E: Engine>(
        &self,
        members: &M,
        transport: &mut T,
        engine: &mut E,
        base: u64,
        after: &mut dyn FnMut(u64, Action) -> Result<()>,
    ) -> Result<Trained> {
        self.pipeline
            .check(members.ranks(), self.digits.training.len())
            .and_then(|()| self.train(members, transport, engine, base, after))
            .map_err(|error| stop(members, error))
    }

    fn read(&self, at: u64, numbers: usize) -> Result<Vec<f32>> {
        Ok(floats(&memory::read(&self.span, at, 4 * numbers)?))
    }

    fn train<M: Members, T: Transport, E: Engine>(
        &self,
        members: &M,
        transport: &mut T,
        engine: &mut E,
        base: u64,
        after: &mut dyn FnMut(u64, Action) -> Result<()>,
    ) -> Result<Trained> {
        let settings = &self.pipeline.settings;
        let microbatches = self.pipeline.microbatches;
        let (rank, ranks) = (members.rank(), members.ranks());
        let places = Places::new(self.pipeline, ranks);
        let stage = self.pipeline.stage(rank, ranks);
        let parameters = settings.network().initial(settings.seed)[stage.parameters()].to_vec();
        memory::write(&self.span, 0, &bytes(&parameters))?;
        let mut work = Work {
            gradient: vec![0.0; parameters.len()],
            computed: Vec::new(),
            stage,
            parameters,
        };

        let mut batches = Batches::new(settings, self.digits.training.len());
        let per_epoch = batches.per_epoch();
        let mut trained = Trained {
            outcome: None,
            batches: per_epoch * u64::from(settings.epochs),
            layers: work.stage.layers(),
            parameters: work.parameters.len(),
            forward: 0,
            backward: 0,
            collected: 0,
            busy: Busy::default(),
            duration: Duration::ZERO,
        };
        let mut links = Links::new(members, transport, self.limit);
        let mut losses = Vec::new();
        let mut whole = Vec::new();
        for number in 0..trained.batches {
            let batch = batches.batch(number);
            links.settle()?;
            let mut first = None;
            for action in actions(microbatches) {
                members.check()?;
                let (neighbour, what) = match action {
                    Action::Forward(_) => (BEFORE, "sent no outputs"),
                    Action::Backward(_) => (NEXT, "sent no gradients"),
                };
                if links.links[neighbour].is_some() {
                    links.receive(neighbour, what)?;
                }
                let start = Instant::now();
                first.get_or_insert(start);
                let payload = self.compute(&mut work, &places, action, batch, rank)?;
                trained.busy.add(action, microbatches, start.elapsed().as_secs_f64());
                if let Some(payload) = payload {
                    let (to, sent) = match action {
                        Action::Forward(_) => (NEXT, &mut trained.forward),
                        Action::Backward(_) => (BEFORE, &mut trained.backward),
                    };
                    links.send(to, Some(payload))?;
                    *sent += payload.bytes;
                }
                links.wait.moved();
                after(number, action)?;
            }
            trained.duration += first.map_or(Duration::ZERO, |first| first.elapsed());

            memory::write(&self.span, places.update(), &settings.update(&work.gradient))?;
            let update = Job {
                operation: Operation::Reduce(Element::F32, Reduction::Sum),
                into: base,
                from: base + places.update(),
                bytes: 4 * work.parameters.len() as u64,
            };
            execute(engine, &[update], self.limit)?;
            work.parameters = self.read(0, work.parameters.len())?;
            work.gradient.fill(0.0);
            work.computed.clear();
            if (number + 1) % per_epoch == 0 {
                whole = self.collect(&mut links, &places, bytes(&work.parameters))?;
                if rank == 0 {
                    let score = settings.network().score(&floats(&whole), &self.digits.training);
                    losses.push(score.loss);
                } else {
                    trained.collected += whole.len() as u64;
                }
            }
        }
        trained.outcome = (rank == 0).then(|| Outcome::new(settings, self.digits, losses, &whole));
        Ok(trained)
    }

    /// Computes an action. Returns what a neighbour gets.
    fn compute(
        &self,
        work: &mut Work,
        places: &Places,
        action: Action,
        batch: &[usize],
        rank: usize,
    ) -> Result<Option<Payload>> {
        let samples = batch.len() / self.pipeline.microbatches;
        let (Action::Forward(index) | Action::Backward(index)) = action;
        let part = &batch[index * samples..][..samples];
        let (values, from, into) = match action {
            Action::Forward(_) => {
                let inputs = self.inputs(part, rank, places.slot(Slots::Inputs, index as u64))?;
                let outputs = work.forward(inputs);
                (outputs, Slots::Outputs, Slots::Inputs)
            }
            Action::Backward(_) => {
                let errors = self.errors(work, index, part, places.slot(Slots::Errors, index as u64))?;
                (work.backward(index, errors), Slots::Back, Slots::Errors)
            }
        };
        if values.is_empty() {
            return Ok(None);
        }
        let from = places.slot(from, index as u64);
        let values = bytes(&values);
        memory::write(&self.span, from, &values)?;
        Ok(Some(Payload {
            from,
            bytes: values.len() as u64,
            into: places.slot(into, index as u64),
        }))
    }

    /// Returns the inputs of the samples of a microbatch: their pixels on rank 0, and what is in the slot on the others.
    fn inputs(&self, samples: &[usize], rank: usize, slot: u64) -> Result<Vec<Vec<f32>>> {
        if rank == 0 {
            let pixels = |index: &usize| self.digits.training.sample(*index).0.to_vec();
            return Ok(samples.iter().map(pixels).collect());
        }
        self.vectors(slot, samples.len())
    }

    /// Returns the gradient at the outputs of the stage for each sample of a microbatch: that of the loss on the last rank, and what is in
    /// the slot on the others.
    fn errors(&self, work: &Work, index: usize, samples: &[usize], slot: u64) -> Result<Vec<Vec<f32>>> {
        if work.stage.is_last() {
            let labels = samples.iter().map(|index| self.digits.training.sample(*index).1);
            let outputs = work.computed[index].iter().map(Sample::last);
            return Ok(outputs
                .zip(labels)
                .map(|(outputs, label)| output_error(outputs, label))
                .collect());
        }
        self.vectors(slot, samples.len())
    }

    /// Reads the vector of each sample from a slot.
    fn vectors(&self, slot: u64, samples: usize) -> Result<Vec<Vec<f32>>> {
        let width = self.pipeline.settings.hidden;
        let all = self.read(slot, samples * width)?;
        Ok(all.chunks_exact(width).map(<[f32]>::to_vec).collect())
    }

    /// Sends the bytes of the parameters of this stage and of all later ones to the rank before. Returns these bytes.
    fn collect<M: Members, T: Transport>(
        &self,
        links: &mut Links<'_, M, T>,
        places: &Places,
        own: Vec<u8>,
    ) -> Result<Vec<u8>> {
        links.settle()?;
        let (rank, ranks) = (links.wait.members().rank(), links.wait.members().ranks());
        if rank + 1 < ranks {
            links.send(NEXT, None)?;
        }
        if rank > 0 {
            links.receive(BEFORE, NO_REQUEST)?;
        }
        let mut all = own;
        let mut sent = 0;
        self.send_pieces(links, places, &all, &mut sent)?;
        // Counts the pieces that the next rank sends.
        let mut number = 0;
        for stage in rank + 1..ranks {
            let mut left = 4 * self.pipeline.stage(stage, ranks).parameters().len() as u64;
            while left > 0 {
                links.receive(NEXT, "sent no parameters")?;
                let bytes = places.microbatch.min(left);
                let piece = memory::read(&self.span, places.slot(Slots::Errors, number), bytes as usize)?;
                links.send(NEXT, None)?;
                self.send_pieces(links, places, &piece, &mut sent)?;
                all.extend(piece);
                number += 1;
                left -= bytes;
            }
        }
        // Each piece was acknowledged, so the slots are free for gradients.
        let rest = sent.min(places.microbatches);
        for _ in 0..if rank > 0 { rest } else { 0 } {
            links.receive(BEFORE, NO_REQUEST)?;
        }
        links.settle()?;
        Ok(all)
    }

    /// Sends bytes to the rank before, in pieces that fit a slot. `sent` counts the pieces of an epoch.
    fn send_pieces<M: Members, T: Transport>(
        &self,
        links: &mut Links<'_, M, T>,
        places: &Places,
        bytes: &[u8],
        sent: &mut u64,
    ) -> Result<()> {
        if links.links[BEFORE].is_none() {
            return Ok(());
        }
        for piece in bytes.chunks(places.microbatch as usize) {
            if *sent >= places.microbatches {
                links.receive(BEFORE, NO_REQUEST)?;
                // The piece has arrived, so its write has completed, or does so now.
                links.settle()?;
            }
            let payload = Payload {
                from: places.slot(Slots::Back, *sent),
                bytes: piece.len() as u64,
                into: places.slot(Slots::Errors, *sent),
            };
            memory::write(&self.span, payload.from, piece)?;
            links.send(BEFORE, Some(payload))?;
            *sent += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::{each_rank, LIMIT};
    use crate::reference;
    use crate::schedule::least_duration;
    use p2pmem_collectives::engine::ProcessorEngine;
    use p2pmem_collectives::group::{Failure, Group};
    use p2pmem_collectives::schedule::Algorithm;

    const PIPELINE: Pipeline = Pipeline {
        settings: Settings {
            epochs: 2,
            batch: 48,
            rate: 0.4,
            hidden: 12,
            layers: 4,
            seed: 3,
        },
        microbatches: 4,
    };

    /// Batches of two epochs.
    const BATCHES: u64 = 2 * (1438 / 48);

    /// A rank that ends without a message when it fails, as a process that is killed.
    struct Killed(Group);

    impl Members for Killed {
        fn rank(&self) -> usize {
            self.0.rank()
        }

        fn ranks(&self) -> usize {
            self.0.ranks()
        }

        fn name(&self, rank: usize) -> &str {
            self.0.name(rank)
        }

        fn check(&self) -> Result<(), Failure> {
            self.0.check()
        }

        fn wait_for_failure(&self, _limit: Duration) -> Result<(), Failure> {
            Ok(())
        }

        fn abort(&self, _reason: &str) {}

        fn set_progress(&self, _calls: u64) {}

        fn progress(&self, _limit: Duration) -> Vec<Option<u64>> {
            Vec::new()
        }
    }

    /// Trains. `kills` is a rank that ends after an action.
    fn train(
        pipeline: &Pipeline,
        digits: &Digits,
        ranks: usize,
        kills: Option<(usize, u64, Action)>,
    ) -> Vec<Result<Trained>> {
        let bytes = Places::new(pipeline, ranks).memory();
        each_rank(ranks, bytes, |group, mut transport, span| {
            let rank = group.rank();
            let mut engine = ProcessorEngine::new(span.clone());
            let training = Training {
                pipeline,
                digits,
                span,
                limit: LIMIT,
            };
            if let Some((_, number, action)) = kills.filter(|(killed, ..)| *killed == rank) {
                let mut after = |done, last| match (done, last) == (number, action) {
                    true => bail!("this rank is killed"),
                    false => Ok(()),
                };
                return training.run(&Killed(group), &mut transport, &mut engine, 0, &mut after);
            }
            let trained = training.run(&group, &mut transport, &mut engine, 0, &mut |_, _| Ok(()))?;
            group.leave(LIMIT)?;
            Ok(trained)
        })
    }

    #[test]
    fn the_result_has_the_bits_of_one_rank_and_the_bytes_of_the_formula() {
        let digits = Digits::load();
        let alone = reference::train(&PIPELINE.settings, &digits, 1, Algorithm::Ring).unwrap();
        assert!(alone.last_loss() < 0.8 * alone.initial_loss, "{alone:?}");
        for ranks in 1..=4 {
            for microbatches in [1, 3, 8] {
                let pipeline = Pipeline {
                    microbatches,
                    ..PIPELINE
                };
                let trained: Vec<Trained> = train(&pipeline, &digits, ranks, None)
                    .into_iter()
                    .map(Result::unwrap)
                    .collect();
                let case = format!("{ranks} ranks, {microbatches} microbatches");
                assert_eq!(trained[0].outcome.as_ref(), Some(&alone), "{case}");
                let bytes = BATCHES * 48 * 12 * 4;
                let last = ranks - 1;
                for (rank, trained) in trained.iter().enumerate() {
                    assert_eq!(trained.batches, BATCHES);
                    assert_eq!(trained.forward, if rank < last { bytes } else { 0 }, "{case}");
                    assert_eq!(trained.backward, if rank > 0 { bytes } else { 0 }, "{case}");
                }
                let busy: Vec<Busy> = trained.iter().map(|trained| trained.busy).collect();
                // Rank 0 begins and ends each batch, so its time contains what the others wait for.
                let duration = trained[0].duration.as_secs_f64();
                assert!(least_duration(&busy) <= duration, "{case}: {busy:?} {duration}");
                assert!(
                    busy.iter().all(|busy| 0.0 < busy.before && busy.before <= busy.all),
                    "{case}"
                );
                let parameters: usize = trained.iter().map(|trained| trained.parameters).sum();
                assert_eq!(parameters, PIPELINE.settings.network().parameters());
                let later: usize = trained[last..].iter().map(|trained| trained.parameters).sum();
                let collected = if last > 0 { 2 * 4 * later as u64 } else { 0 };
                assert_eq!(trained[last].collected, collected, "{case}");
            }
        }
    }

    /// A network with fewer layers than four, of which the ranks have different numbers.
    #[test]
    fn stages_of_different_size_have_the_bits_of_one_rank() {
        let digits = Digits::load();
        for (layers, ranks) in [(2, 2), (3, 2), (5, 3), (7, 4)] {
            let settings = Settings {
                epochs: 1,
                layers,
                ..PIPELINE.settings
            };
            let pipeline = Pipeline { settings, ..PIPELINE };
            let alone = reference::train(&settings, &digits, 1, Algorithm::Ring).unwrap();
            let trained = train(&pipeline, &digits, ranks, None).remove(0).unwrap();
            assert_eq!(trained.outcome, Some(alone), "{layers} layers, {ranks} ranks");
        }
    }

    #[test]
    fn a_rank_that_is_killed_is_named_by_all_others() {
        let digits = Digits::load();
        for (ranks, killed, action) in [
            (4, 2, Action::Forward(1)),
            (4, 3, Action::Backward(0)),
            (3, 0, Action::Forward(3)),
            (2, 1, Action::Backward(2)),
        ] {
            let ended = train(&PIPELINE, &digits, ranks, Some((killed, 5, action)));
            let name = format!("rank {killed} (node-{})", (b'a' + killed as u8) as char);
            for (rank, ended) in ended.into_iter().enumerate() {
                let text = format!("{:#}", ended.unwrap_err());
                let expected = if rank == killed { "this rank is killed" } else { &name };
                assert!(text.contains(expected), "rank {rank}, {action:?}: {text}");
            }
        }
    }

    #[test]
    fn impossible_pipelines_are_named() {
        let check = |ranks, change: fn(&mut Pipeline)| {
            let mut pipeline = PIPELINE;
            change(&mut pipeline);
            pipeline.check(ranks, 1438)
        };
        check(4, |_| ()).unwrap();
        let error = |ranks, change| check(ranks, change).unwrap_err().to_string();
        assert!(error(5, |_| ()).contains("5 ranks for 4 layers"));
        assert!(error(2, |pipeline| pipeline.microbatches = 5).contains("5 microbatches do not divide"));
        assert!(error(2, |pipeline| pipeline.microbatches = 0).contains("0 microbatches"));
        assert!(error(2, |pipeline| pipeline.settings.epochs = 0).contains("0 epochs"));
    }

    /// All ranks end with the error, and none waits for the limit.
    #[test]
    fn an_impossible_pipeline_ends_all_ranks() {
        let digits = Digits::load();
        let pipeline = Pipeline {
            microbatches: 5,
            ..PIPELINE
        };
        for ended in train(&pipeline, &digits, 2, None) {
            let text = format!("{:#}", ended.unwrap_err());
            assert!(text.contains("do not divide a batch of 48"), "{text}");
        }
    }

    #[test]
    fn places_do_not_overlap() {
        let places = Places::new(&PIPELINE, 3);
        let kinds = [Slots::Inputs, Slots::Outputs, Slots::Errors, Slots::Back];
        let slots = kinds
            .iter()
            .flat_map(|kind| (0..4).map(|number| places.slot(*kind, number)));
        let mut all: Vec<u64> = slots.collect();
        assert!(places.update() >= places.parameters && all[0] >= places.update() + places.parameters);
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[1] - pair[0] >= 12 * 12 * 4), "{all:?}");
        assert!(all[15] + 12 * 12 * 4 <= places.memory());
        assert_eq!(places.slot(Slots::Back, 6), places.slot(Slots::Back, 2));
    }
}
