// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tensor-parallel training: each rank has a part of every layer, a [slice](crate::slice) of the network. All ranks compute the same batch. An
//! allreduce adds the parts of the outputs of each pair of layers, and the parts of the gradient at the inputs of each pair but the first.
//!
//! The processor of each rank computes: it reads sums from the rank's memory and writes parts to it. The engine adds the parts of other
//! ranks, and updates to the parameters of the slice.
//!
//! After each epoch, an all-gather sends the parameters of each rank to all others, and all compute the loss.

use anyhow::Result;
use p2pmem_collectives::communicator::{Communicator, Members};
use p2pmem_collectives::cost::formula;
use p2pmem_collectives::element::{Element, Reduction};
use p2pmem_collectives::engine::{Engine, Job, Operation};
use p2pmem_collectives::schedule::{Algorithm, Call, Collective};
use p2pmem_collectives::transport::Transport;
use p2pmem_verbs::Span;

use crate::digits::Digits;
use crate::memory;
use crate::outcome::{bytes, floats, Outcome};
use crate::reference::sum;
use crate::settings::{Batches, Settings};
use crate::slice::{check, gradients, sums, Direction, Slice};
use crate::state::PAGE;

/// Where a rank has what. All ranks have the same places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Bytes of the parameters of the largest slice.
    parameters: u64,
    /// Bytes of the largest sum.
    sum: u64,
    ranks: u64,
}

impl Places {
    /// Returns the places of `ranks` ranks.
    pub fn new(settings: &Settings, ranks: usize) -> Self {
        let network = settings.network();
        let of = |rank| 4 * Slice::new(network, rank, ranks).parameters() as u64;
        let sums = sums(&network, settings.batch).into_iter();
        Self {
            parameters: (0..ranks).map(of).max().unwrap_or(0),
            sum: sums.map(|(_, bytes)| bytes).max().unwrap_or(0),
            ranks: ranks as u64,
        }
    }

    fn update(&self) -> u64 {
        self.parameters.next_multiple_of(PAGE)
    }

    /// Returns the place of what the ranks add or send.
    fn area(&self) -> u64 {
        2 * self.update()
    }

    /// Returns the bytes of parameters, update, and what the ranks add or send.
    pub fn payload(&self) -> u64 {
        self.area() + self.sum.max(self.ranks * self.parameters)
    }
}

/// Returns the bytes that the busiest rank sends for sums in `batches` batches by the formula of the allreduce.
pub fn bytes_by_formula(
    settings: &Settings,
    algorithm: Algorithm,
    ranks: usize,
    batches: u64,
    direction: Direction,
) -> u64 {
    let sums = sums(&settings.network(), settings.batch).into_iter();
    let cost = |bytes| formula(Collective::Allreduce(algorithm), ranks, bytes).most_sent;
    let batch: f64 = sums
        .filter(|(of, _)| *of == direction)
        .map(|(_, bytes)| cost(bytes))
        .sum();
    (batch * batches as f64).round() as u64
}

/// A tensor-parallel training, as one rank sees it.
#[derive(Debug)]
pub struct Training<'a> {
    /// The settings.
    pub settings: &'a Settings,
    /// The data.
    pub digits: &'a Digits,
    /// How parts are added.
    pub algorithm: Algorithm,
    /// The memory of this rank.
    pub span: Span,
}

/// What a rank did.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// The result, which is the same one on all ranks.
    pub outcome: Outcome,
    /// Batches.
    pub batches: u64,
    /// Units of each pair of layers that the rank has.
    pub units: usize,
    /// Parameters of the slice.
    pub parameters: usize,
    /// Bytes that the rank sent for sums of outputs.
    pub forward: u64,
    /// Bytes that the rank sent for sums of gradients.
    pub backward: u64,
    /// Bytes of parameters that the rank sent after epochs.
    pub collected: u64,
}

impl Training<'_> {
    /// Trains. `after` is called after each batch, with the number of complete ones; an error ends the training of all ranks.
    ///
    /// # Errors
    ///
    /// A setting is not possible, or a rank or its memory failed. All ranks get an error that names the rank.
    pub fn run<M: Members, T: Transport, E: Engine>(
        &self,
        communicator: &mut Communicator<M, T, E>,
        after: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Trained> {
        let result = self.train(communicator, after);
        if let Err(error) = &result {
            // Without effect if another rank has failed before.
            communicator.members().abort(&format!("{error:#}"));
        }
        result
    }

    fn read(&self, at: u64, numbers: usize) -> Result<Vec<f32>> {
        Ok(floats(&memory::read(&self.span, at, 4 * numbers)?))
    }

    fn train<M: Members, T: Transport, E: Engine>(
        &self,
        communicator: &mut Communicator<M, T, E>,
        after: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Trained> {
        let (rank, ranks) = (communicator.members().rank(), communicator.members().ranks());
        let network = self.settings.network();
        self.settings.check(self.digits.training.len())?;
        check(&network, ranks)?;
        let places = Places::new(self.settings, ranks);
        let slice = Slice::new(network, rank, ranks);
        let mut parameters = slice.cut(&network.initial(self.settings.seed));
        memory::write(&self.span, 0, &bytes(&parameters))?;

        let mut batches = Batches::new(self.settings, self.digits.training.len());
        let per_epoch = batches.per_epoch();
        let total = per_epoch * u64::from(self.settings.epochs);
        let (mut forward, mut backward, mut collected) = (0, 0, 0);
        let mut losses = Vec::new();
        let mut whole = vec![0.0; network.parameters()];
        let slices = [slice];
        for number in 0..total {
            let mut add = |direction, parts: Vec<Vec<f32>>| {
                let part = parts.concat();
                memory::write(&self.span, places.area(), &bytes(&part))?;
                let call = sum(self.algorithm, places.area(), 4 * part.len() as u64);
                let sent = communicator.call(call)?.sent;
                match direction {
                    Direction::Forward => forward += sent,
                    Direction::Backward => backward += sent,
                }
                self.read(places.area(), part.len())
            };
            let own = [std::mem::take(&mut parameters)];
            let batch = batches.batch(number);
            let gradient = gradients(&slices, &own, &self.digits.training, batch, &mut add)?.concat();
            memory::write(&self.span, places.update(), &self.settings.update(&gradient))?;
            communicator.compute(Job {
                operation: Operation::Reduce(Element::F32, Reduction::Sum),
                into: 0,
                from: places.update(),
                bytes: 4 * gradient.len() as u64,
            })?;
            parameters = self.read(0, gradient.len())?;
            if (number + 1) % per_epoch == 0 {
                collected += self.collect(communicator, &places, &parameters, &mut whole)?;
                losses.push(network.score(&whole, &self.digits.training).loss);
            }
            after(number + 1)?;
        }
        Ok(Trained {
            outcome: Outcome::new(self.settings, self.digits, losses, &bytes(&whole)),
            batches: total,
            units: slices[0].units(),
            parameters: parameters.len(),
            forward,
            backward,
            collected,
        })
    }

    /// Sends the parameters of each rank to all ranks. Returns the bytes that this rank sent.
    fn collect<M: Members, T: Transport, E: Engine>(
        &self,
        communicator: &mut Communicator<M, T, E>,
        places: &Places,
        own: &[f32],
        whole: &mut [f32],
    ) -> Result<u64> {
        let (rank, ranks) = (communicator.members().rank(), communicator.members().ranks());
        // All segments have the size of the largest slice.
        let segment = |rank: usize| places.area() + rank as u64 * places.parameters;
        memory::write(&self.span, segment(rank), &bytes(own))?;
        let done = communicator.call(Call {
            collective: Collective::AllGather,
            element: Element::F32,
            reduction: Reduction::Sum,
            at: places.area(),
            bytes: ranks as u64 * places.parameters,
            root: 0,
        })?;
        for rank in 0..ranks {
            let slice = Slice::new(self.settings.network(), rank, ranks);
            slice.paste(&self.read(segment(rank), slice.parameters())?, whole);
        }
        Ok(done.sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::{each_rank, LIMIT};
    use crate::reference;
    use anyhow::bail;
    use p2pmem_collectives::communicator::Sizes;
    use p2pmem_collectives::engine::ProcessorEngine;
    use p2pmem_collectives::schedule::Ring;

    const SETTINGS: Settings = Settings {
        epochs: 2,
        batch: 48,
        rate: 0.4,
        hidden: 12,
        layers: 4,
        seed: 3,
    };

    /// Trains. `fails` is a rank that fails after a batch.
    fn train(
        settings: &Settings,
        digits: &Digits,
        ranks: usize,
        algorithm: Algorithm,
        fails: Option<(usize, u64)>,
    ) -> Vec<Result<Trained>> {
        let sizes = Sizes {
            payload: Places::new(settings, ranks).payload(),
            chunk: 512,
            window: 4,
        };
        each_rank(ranks, sizes.memory(ranks), |group, transport, span| {
            let rank = group.rank();
            let engine = ProcessorEngine::new(span.clone());
            let ring = Ring::by_rank(ranks);
            let mut communicator = Communicator::new(group, transport, engine, 0, sizes, ring, LIMIT)?;
            let training = Training {
                settings,
                digits,
                algorithm,
                span,
            };
            let mut after = |batches| match fails {
                Some(fails) if fails == (rank, batches) => bail!("this rank fails after batch {batches}"),
                _ => Ok(()),
            };
            let trained = training.run(&mut communicator, &mut after)?;
            communicator.into_members().leave(LIMIT)?;
            Ok(trained)
        })
    }

    #[test]
    fn every_rank_has_the_bits_of_the_reference_and_the_bytes_of_the_formula() {
        let digits = Digits::load();
        for layers in [2, 4] {
            let settings = Settings { layers, ..SETTINGS };
            for ranks in 1..=4 {
                for algorithm in Algorithm::ALL {
                    let case = format!("{layers} layers, {ranks} ranks, {}", algorithm.name());
                    let expected = reference::train_tensor(&settings, &digits, ranks, algorithm).unwrap();
                    let trained: Vec<Trained> = train(&settings, &digits, ranks, algorithm, None)
                        .into_iter()
                        .map(Result::unwrap)
                        .collect();
                    assert!(trained.iter().all(|trained| trained.outcome == expected), "{case}");
                    let most = |of: fn(&Trained) -> u64| trained.iter().map(of).max().unwrap_or(0);
                    let formula = |direction| bytes_by_formula(&settings, algorithm, ranks, 58, direction);
                    assert_eq!(most(|trained| trained.batches), 58);
                    // All segments of a ring have the same size: the widths are 10 and 12, and the batch has 48 samples.
                    assert_eq!(most(|trained| trained.forward), formula(Direction::Forward), "{case}");
                    assert_eq!(most(|trained| trained.backward), formula(Direction::Backward), "{case}");
                    assert_eq!(trained.iter().map(|trained| trained.units).sum::<usize>(), 12);
                }
            }
        }
    }

    #[test]
    fn one_rank_has_the_bits_of_the_reference_without_a_split() {
        let digits = Digits::load();
        let whole = reference::train(&SETTINGS, &digits, 1, Algorithm::Ring).unwrap();
        let split = reference::train_tensor(&SETTINGS, &digits, 1, Algorithm::Ring).unwrap();
        assert_eq!(whole, split);
        assert!(split.last_loss() < split.initial_loss);
    }

    #[test]
    fn a_rank_that_fails_is_named() {
        let digits = Digits::load();
        let ended = train(&SETTINGS, &digits, 3, Algorithm::Ring, Some((1, 7)));
        for (rank, ended) in ended.into_iter().enumerate() {
            let text = format!("{:#}", ended.unwrap_err());
            let expected = if rank == 1 {
                "this rank fails"
            } else {
                "rank 1 (node-b) stopped: this rank fails"
            };
            assert!(text.contains(expected), "rank {rank}: {text}");
        }
    }

    #[test]
    fn an_impossible_split_ends_all_ranks() {
        let digits = Digits::load();
        let settings = Settings { layers: 3, ..SETTINGS };
        for ended in train(&settings, &digits, 2, Algorithm::Ring, None) {
            let text = format!("{:#}", ended.unwrap_err());
            assert!(text.contains("3 layers"), "{text}");
        }
    }
}
