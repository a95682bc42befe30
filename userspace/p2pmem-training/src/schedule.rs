// SPDX-License-Identifier: MIT OR Apache-2.0

//! The schedule of a pipeline, as of GPipe: a stage computes all microbatches of a batch forward, then all of them backward, and then updates
//! its parameters.
//!
//! | stage | slots of 3 stages and 4 microbatches |
//! |---|---|
//! | 0 | `F0 F1 F2 F3 -- -- -- -- B0 B1 B2 B3` |
//! | 1 | `-- F0 F1 F2 F3 -- -- B0 B1 B2 B3 --` |
//! | 2 | `-- -- F0 F1 F2 F3 B0 B1 B2 B3 -- --` |
//!
//! The slots in which a stage computes nothing are the bubble of the pipeline.

use serde::{Deserialize, Serialize};

/// What a stage computes in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The outputs of this microbatch.
    Forward(usize),
    /// The gradients of this microbatch.
    Backward(usize),
}

/// Returns what each stage computes for a batch of this number of microbatches, in this order.
pub fn actions(microbatches: usize) -> Vec<Action> {
    let forward = (0..microbatches).map(Action::Forward);
    forward.chain((0..microbatches).map(Action::Backward)).collect()
}

/// Times of a stage's computations, in all batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Busy {
    /// Time of all computations.
    pub all: f64,
    /// Time of those for which later stages wait, while they have nothing to compute: of each batch, the first one forward and the last one
    /// backward.
    pub before: f64,
    /// The same for earlier stages: of each batch, the last one forward and the first one backward.
    pub after: f64,
}

impl Busy {
    /// Adds the time of a computation.
    pub fn add(&mut self, action: Action, microbatches: usize, time: f64) {
        let last = microbatches - 1;
        self.all += time;
        if matches!(action, Action::Forward(0)) || action == Action::Backward(last) {
            self.before += time;
        }
        if matches!(action, Action::Backward(0)) || action == Action::Forward(last) {
            self.after += time;
        }
    }
}

/// Returns the shortest time in which stages can do these computations in the order of the schedule, if transfers take no time. Each stage
/// computes nothing until the first microbatch has passed all earlier stages, while the last one passes all later stages in both
/// directions, and after its last gradients, which pass all earlier stages. So no stage ends before its own computations and these.
///
/// If all computations take the same time, the bubble of this duration is (p - 1) / (m + p - 1) for p stages and m microbatches.
pub fn least_duration(stages: &[Busy]) -> f64 {
    let duration = |stage: usize| {
        let (earlier, later) = (&stages[..stage], &stages[stage + 1..]);
        let before: f64 = earlier.iter().map(|other| other.before).sum();
        let after: f64 = later.iter().map(|other| other.after).sum();
        stages[stage].all + before + after
    };
    (0..stages.len()).map(duration).fold(0.0, f64::max)
}

/// Returns the bubble: the part of `duration` in which `stages` stages compute nothing. `busy` is the time of all stages together, in
/// the unit of `duration`.
pub fn bubble(busy: f64, stages: usize, duration: f64) -> f64 {
    1.0 - busy / (stages as f64 * duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns when each stage starts and ends each of its [`actions`], which take these times. Transfers take none. An action starts when the
    /// stage has ended the one before, and the neighbour has ended the one whose result it needs.
    fn slots(times: &[Vec<u64>]) -> Vec<Vec<(u64, u64)>> {
        let stages = times.len();
        let actions = actions(times[0].len() / 2);
        let mut done: Vec<Vec<Option<(u64, u64)>>> = vec![vec![None; actions.len()]; stages];
        let end = |done: &[Vec<Option<(u64, u64)>>], stage: usize, action: Action| {
            let index = actions.iter().position(|other| *other == action)?;
            Some(done[stage][index]?.1)
        };
        // Each turn completes at least one action.
        for _ in 0..stages * actions.len() {
            for stage in 0..stages {
                let Some(index) = done[stage].iter().position(Option::is_none) else {
                    continue;
                };
                let needed = match actions[index] {
                    Action::Forward(_) if stage == 0 => Some(0),
                    action @ Action::Forward(_) => end(&done, stage - 1, action),
                    Action::Backward(number) if stage + 1 == stages => end(&done, stage, Action::Forward(number)),
                    action @ Action::Backward(_) => end(&done, stage + 1, action),
                };
                let free = index
                    .checked_sub(1)
                    .map_or(Some(0), |before| Some(done[stage][before]?.1));
                done[stage][index] = needed.zip(free).map(|(needed, free)| {
                    let start = needed.max(free);
                    (start, start + times[stage][index])
                });
            }
        }
        done.into_iter()
            .map(|stage| stage.into_iter().flatten().collect())
            .collect()
    }

    /// Returns the duration of a batch by its [`slots`], and the least one.
    fn durations(times: &[Vec<u64>]) -> (u64, f64) {
        let end = slots(times).iter().flatten().map(|slot| slot.1).max().unwrap_or(0);
        let busy = |times: &Vec<u64>| {
            let mut busy = Busy::default();
            let microbatches = times.len() / 2;
            for (action, time) in actions(microbatches).into_iter().zip(times) {
                busy.add(action, microbatches, *time as f64);
            }
            busy
        };
        (end, least_duration(&times.iter().map(busy).collect::<Vec<_>>()))
    }

    #[test]
    fn the_slots_are_those_of_the_table() {
        let starts: Vec<Vec<u64>> = slots(&vec![vec![1; 8]; 3])
            .iter()
            .map(|stage| stage.iter().map(|slot| slot.0).collect())
            .collect();
        assert_eq!(
            starts,
            [
                [0, 1, 2, 3, 8, 9, 10, 11],
                [1, 2, 3, 4, 7, 8, 9, 10],
                [2, 3, 4, 5, 6, 7, 8, 9]
            ]
        );
    }

    #[test]
    fn equal_times_have_the_bubble_of_the_formula() {
        for stages in 1..=6 {
            for microbatches in 1..=12 {
                let (counted, least) = durations(&vec![vec![3; 2 * microbatches]; stages]);
                assert_eq!(counted as f64, least);
                let counted = bubble((6 * microbatches * stages) as f64, stages, least);
                let formula = (stages as f64 - 1.0) / (microbatches + stages - 1) as f64;
                assert!(
                    (counted - formula).abs() < 1e-12,
                    "{stages} stages, {microbatches} microbatches"
                );
            }
        }
    }

    #[test]
    fn no_schedule_is_shorter_than_the_least_duration() {
        let mut random = crate::random::Random::new(7, 1);
        for case in 0..500 {
            let (stages, microbatches) = (1 + case % 5, 1 + case % 7);
            let mut order: Vec<usize> = (1..=2 * stages * microbatches).collect();
            random.shuffle(&mut order);
            let times: Vec<Vec<u64>> = order
                .chunks(2 * microbatches)
                .map(|stage| stage.iter().map(|time| *time as u64).collect())
                .collect();
            let (counted, least) = durations(&times);
            assert!(counted as f64 >= least, "{times:?}: {counted} {least}");
        }
        // One stage has almost all of the work.
        assert_eq!(durations(&[vec![1; 4], vec![10; 4], vec![2; 4]]), (46, 46.0));
    }

    #[test]
    fn a_stage_that_is_never_idle_has_no_bubble() {
        assert_eq!(durations(&[vec![1, 2, 3, 4, 5, 6]]), (21, 21.0));
        assert_eq!(bubble(6.0, 3, 4.0), 0.5);
    }
}
