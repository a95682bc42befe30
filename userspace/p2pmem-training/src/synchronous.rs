// SPDX-License-Identifier: MIT OR Apache-2.0

//! Synchronous training: in each iteration, every rank computes the gradient of its part of a batch, an allreduce adds them, and each
//! rank's engine adds the sum to its parameters.
//!
//! Parameters and gradients are in the memory that the engine and the NIC access. The processor reads the parameters and writes the
//! gradient of its rank. Rank 0 sends the state to all others at the start, and writes checkpoints.

use anyhow::{ensure, Context, Result};
use p2pmem_collectives::communicator::{Communicator, Members};
use p2pmem_collectives::element::{Element, Reduction};
use p2pmem_collectives::engine::{Engine, Job, Operation};
use p2pmem_collectives::schedule::{Algorithm, Call, Collective};
use p2pmem_collectives::transport::Transport;
use p2pmem_verbs::Span;

use crate::checkpoint::Checkpoints;
use crate::digits::Digits;
use crate::memory;
use crate::outcome::{bytes, floats, Outcome};
use crate::reference::allreduce;
use crate::settings::{share, Batches, Settings};
use crate::state::{digest, Header, Layout};

/// Checkpoints of rank 0.
#[derive(Debug)]
pub struct Saving {
    /// Where they are.
    pub checkpoints: Checkpoints,
    /// Iterations between two checkpoints.
    pub every: u64,
    /// Whether to continue with the newest checkpoint, if there is one. Otherwise there must be none.
    pub resume: bool,
}

/// A synchronous training, as one rank sees it.
#[derive(Debug)]
pub struct Training<'a> {
    /// The settings.
    pub settings: &'a Settings,
    /// The data.
    pub digits: &'a Digits,
    /// How gradients are added.
    pub algorithm: Algorithm,
    /// The memory of this rank.
    pub span: Span,
    /// Checkpoints, on rank 0.
    pub saving: Option<Saving>,
}

/// What happened in a training.
#[derive(Debug, Clone, PartialEq)]
pub struct Trained {
    /// The result.
    pub outcome: Outcome,
    /// Iterations of this run.
    pub iterations: u64,
    /// The iteration of the checkpoint with which this run began, if it began with one.
    pub resumed_at: Option<u64>,
    /// Checkpoints that this rank wrote.
    pub checkpoints: u64,
    /// Bytes of gradients that this rank sent.
    pub sent: u64,
}

impl Training<'_> {
    fn layout(&self) -> Layout {
        Layout::new(self.settings.network().parameters())
    }

    fn parameters(&self) -> Result<Vec<u8>> {
        let layout = self.layout();
        Ok(memory::read(
            &self.span,
            layout.parameters_at(),
            layout.bytes() as usize,
        )?)
    }

    /// Writes the header of the state that the memory has.
    fn write_header(&self, iteration: u64, losses: &[f64], ranks: usize) -> Result<()> {
        let header = Header {
            iteration,
            parameters: self.settings.network().parameters() as u64,
            fingerprint: self.settings.fingerprint(ranks, self.algorithm),
            digest: digest(&self.parameters()?),
            losses: losses.to_vec(),
        };
        Ok(memory::write(&self.span, 0, &header.encode())?)
    }

    /// Writes the first state to the memory. Returns the iteration of the checkpoint that it is from.
    fn first_state(&mut self, ranks: usize) -> Result<Option<u64>> {
        if let Some(saving) = &mut self.saving {
            let found = saving.checkpoints.load()?;
            ensure!(
                saving.resume || found.is_none(),
                "the file has a checkpoint of this training already: continue with --resume, or remove the file"
            );
            if let Some(header) = found {
                return Ok(Some(header.iteration));
            }
        }
        let layout = self.layout();
        let initial = self.settings.network().initial(self.settings.seed);
        // The pages end after the parameters.
        self.span.try_write(0, &vec![0; layout.state() as usize])?;
        self.span.try_write(layout.parameters_at() as usize, &bytes(&initial))?;
        self.write_header(0, &[], ranks)?;
        Ok(None)
    }

    /// Sends the state of rank 0 to all ranks. Returns its header.
    fn spread<M: Members, T: Transport, E: Engine>(&self, communicator: &mut Communicator<M, T, E>) -> Result<Header> {
        let layout = self.layout();
        communicator.call(Call {
            collective: Collective::Broadcast,
            element: Element::F32,
            reduction: Reduction::Sum,
            at: 0,
            bytes: layout.state(),
            root: 0,
        })?;
        let mut state = vec![0; layout.state() as usize];
        self.span.try_read(0, &mut state)?;
        let header = Header::decode_state(&state).context("the state that rank 0 sent is not valid")?;
        let members = communicator.members();
        ensure!(
            header.fingerprint == self.settings.fingerprint(members.ranks(), self.algorithm),
            "{} has other settings: start all ranks with the same options",
            members.name(0)
        );
        Ok(header)
    }

    /// Trains. `after` is called after each iteration, with the number of complete ones; an error ends the training of all ranks.
    ///
    /// # Errors
    ///
    /// A rank, its memory, or the drive failed. All ranks get an error that names the rank.
    pub fn run<M: Members, T: Transport, E: Engine>(
        &mut self,
        communicator: &mut Communicator<M, T, E>,
        after: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Trained> {
        let result = self.iterate(communicator, after);
        if let Err(error) = &result {
            // Without effect if another rank has failed before.
            communicator.members().abort(&format!("{error:#}"));
        }
        result
    }

    fn iterate<M: Members, T: Transport, E: Engine>(
        &mut self,
        communicator: &mut Communicator<M, T, E>,
        after: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Trained> {
        self.settings.check(self.digits.training.len())?;
        let (rank, ranks) = (communicator.members().rank(), communicator.members().ranks());
        let resumed_at = match rank {
            0 => self.first_state(ranks)?,
            _ => None,
        };
        let header = self.spread(communicator)?;
        let layout = self.layout();
        let network = self.settings.network();
        let mut batches = Batches::new(self.settings, self.digits.training.len());
        let mut losses = header.losses;
        let call = allreduce(self.algorithm, &layout);
        let update = Job {
            operation: Operation::Reduce(Element::F32, Reduction::Sum),
            into: layout.parameters_at(),
            from: layout.gradient_at(),
            bytes: layout.bytes(),
        };
        let (mut checkpoints, mut sent) = (0, 0);
        let last = batches.per_epoch() * u64::from(self.settings.epochs);
        for iteration in header.iteration..last {
            let values = floats(&self.parameters()?);
            let part = share(batches.batch(iteration), rank, ranks);
            let gradient = network.gradient(&values, &self.digits.training, part);
            memory::write(&self.span, layout.gradient_at(), &self.settings.update(&gradient))?;
            sent += communicator.call(call)?.sent;
            communicator.compute(update)?;
            let complete = iteration + 1;
            if complete % batches.per_epoch() == 0 {
                let values = floats(&self.parameters()?);
                losses.push(network.score(&values, &self.digits.training).loss);
            }
            let is_due = |saving: &Saving| complete % saving.every == 0 || complete == last;
            if self.saving.as_ref().is_some_and(is_due) {
                self.write_header(complete, &losses, ranks)?;
                if let Some(saving) = &mut self.saving {
                    saving.checkpoints.save()?;
                    checkpoints += 1;
                }
            }
            after(complete)?;
        }
        Ok(Trained {
            outcome: Outcome::new(self.settings, self.digits, losses, &self.parameters()?),
            iterations: last - header.iteration.min(last),
            resumed_at,
            checkpoints,
            sent,
        })
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
    use std::path::Path;

    const SETTINGS: Settings = Settings {
        epochs: 3,
        batch: 97,
        rate: 0.4,
        hidden: 12,
        layers: 2,
        seed: 3,
    };

    fn sizes(settings: &Settings) -> Sizes {
        Sizes {
            payload: Layout::new(settings.network().parameters()).payload(),
            chunk: 1024,
            window: 4,
        }
    }

    /// How a rank of a test trains.
    #[derive(Clone, Copy)]
    struct Case<'a> {
        ranks: usize,
        algorithm: Algorithm,
        /// The checkpoint of rank 0, and whether to resume.
        file: Option<(&'a Path, bool)>,
        /// The rank that fails after this iteration.
        fails: Option<(usize, u64)>,
    }

    fn train(case: Case<'_>, digits: &Digits) -> Vec<Result<Trained>> {
        let sizes = sizes(&SETTINGS);
        each_rank(case.ranks, sizes.memory(case.ranks), |group, transport, span| {
            let rank = Members::rank(&group);
            let engine = ProcessorEngine::new(span.clone());
            let ring = Ring::by_rank(case.ranks);
            let mut communicator = Communicator::new(group, transport, engine, 0, sizes, ring, LIMIT)?;
            let saving = case.file.filter(|_| rank == 0).map(|(path, resume)| {
                let layout = Layout::new(SETTINGS.network().parameters());
                let fingerprint = SETTINGS.fingerprint(case.ranks, case.algorithm);
                Saving {
                    checkpoints: Checkpoints::open(path, &span, layout, fingerprint).unwrap(),
                    every: 7,
                    resume,
                }
            });
            let mut training = Training {
                settings: &SETTINGS,
                digits,
                algorithm: case.algorithm,
                span,
                saving,
            };
            let mut after = |iteration| match case.fails {
                Some(fails) if fails == (rank, iteration) => bail!("this rank fails after iteration {iteration}"),
                _ => Ok(()),
            };
            let trained = training.run(&mut communicator, &mut after)?;
            communicator.into_members().leave(LIMIT)?;
            Ok(trained)
        })
    }

    #[test]
    fn every_rank_has_the_bits_of_the_reference() {
        let digits = Digits::load();
        let mut digests = Vec::new();
        for ranks in 1..=4 {
            for algorithm in Algorithm::ALL {
                let reference = reference::train(&SETTINGS, &digits, ranks, algorithm).unwrap();
                assert!(reference.last_loss() < 0.5 * reference.initial_loss, "{reference:?}");
                let case = Case {
                    ranks,
                    algorithm,
                    file: None,
                    fails: None,
                };
                for trained in train(case, &digits) {
                    assert_eq!(
                        trained.unwrap().outcome,
                        reference,
                        "{ranks} ranks, {}",
                        algorithm.name()
                    );
                }
                digests.push(reference.digest);
            }
        }
        // The order of additions matters: with more than two ranks, algorithms differ.
        digests.sort();
        digests.dedup();
        assert!(digests.len() > 4, "{} different results", digests.len());
    }

    #[test]
    fn a_training_that_was_interrupted_has_the_same_result() {
        let digits = Digits::load();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        let case = |resume, fails| Case {
            ranks: 2,
            algorithm: Algorithm::Ring,
            file: Some((&path, resume)),
            fails,
        };
        // In the second epoch of 14 iterations, between two checkpoints.
        for error in train(case(false, Some((1, 19))), &digits) {
            let text = format!("{:#}", error.unwrap_err());
            assert!(text.contains("this rank fails after iteration 19"), "{text}");
        }
        let refused = train(case(false, None), &digits).remove(0).unwrap_err();
        assert!(refused.to_string().contains("continue with --resume"), "{refused}");
        let resumed = train(case(true, None), &digits).remove(0).unwrap();
        let uninterrupted = reference::train(&SETTINGS, &digits, 2, Algorithm::Ring).unwrap();
        assert_eq!(resumed.outcome, uninterrupted);
        assert_eq!((resumed.resumed_at, resumed.iterations), (Some(14), 3 * 14 - 14));
        // A training that has ended stays at its end.
        let again = train(case(true, None), &digits).remove(0).unwrap();
        assert_eq!((again.outcome, again.iterations), (uninterrupted, 0));
    }

    #[test]
    fn a_rank_that_fails_is_named() {
        let digits = Digits::load();
        let case = Case {
            ranks: 3,
            algorithm: Algorithm::ParameterServer,
            file: None,
            fails: Some((2, 5)),
        };
        for (rank, error) in train(case, &digits)
            .into_iter()
            .enumerate()
            .filter(|(rank, _)| *rank != 2)
        {
            let text = format!("{:#}", error.unwrap_err());
            assert!(
                text.contains("rank 2 (node-c) stopped: this rank fails"),
                "rank {rank}: {text}"
            );
        }
    }
}
