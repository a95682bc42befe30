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

/// Returns the bubble by the formula: (p - 1) / (m + p - 1).
pub fn bubble_formula(stages: usize, microbatches: usize) -> f64 {
    (stages as f64 - 1.0) / (microbatches + stages - 1) as f64
}

/// Returns the bubble: the part of `duration` in which `stages` stages compute nothing. `busy` is the time of all stages together, in
/// the unit of `duration`.
pub fn bubble(busy: f64, stages: usize, duration: f64) -> f64 {
    1.0 - busy / (stages as f64 * duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns when each stage computes each of its [`actions`], by the number of the slot, if every action takes one slot and transfers take
    /// none. An action starts when the stage has ended the one before, and the neighbour has ended the one whose result it needs.
    fn slots(stages: usize, microbatches: usize) -> Vec<Vec<usize>> {
        let actions = actions(microbatches);
        let mut ends: Vec<Vec<Option<usize>>> = vec![vec![None; actions.len()]; stages];
        let end = |ends: &[Vec<Option<usize>>], stage: usize, action: Action| {
            let index = actions.iter().position(|other| *other == action)?;
            ends[stage][index]
        };
        // Each turn completes at least one action.
        for _ in 0..stages * actions.len() {
            for stage in 0..stages {
                let Some(index) = ends[stage].iter().position(Option::is_none) else {
                    continue;
                };
                let needed = match actions[index] {
                    Action::Forward(_) if stage == 0 => Some(0),
                    action @ Action::Forward(_) => end(&ends, stage - 1, action),
                    Action::Backward(number) if stage + 1 == stages => end(&ends, stage, Action::Forward(number)),
                    action @ Action::Backward(_) => end(&ends, stage + 1, action),
                };
                let free = index.checked_sub(1).map_or(Some(0), |before| ends[stage][before]);
                ends[stage][index] = needed.zip(free).map(|(needed, free)| needed.max(free) + 1);
            }
        }
        let starts = |ends: Vec<Option<usize>>| ends.into_iter().flatten().map(|end| end - 1).collect();
        ends.into_iter().map(starts).collect()
    }

    /// Returns the part of the slots of a batch in which stages compute nothing, from 0 to 1, counted from the [`slots`].
    fn counted_bubble(stages: usize, microbatches: usize) -> f64 {
        let slots = slots(stages, microbatches);
        let busy: usize = slots.iter().map(Vec::len).sum();
        let length = slots.iter().flatten().max().map_or(0, |last| last + 1);
        bubble(busy as f64, stages, length as f64)
    }

    #[test]
    fn the_slots_are_those_of_the_table() {
        assert_eq!(
            slots(3, 4),
            [
                [0, 1, 2, 3, 8, 9, 10, 11],
                [1, 2, 3, 4, 7, 8, 9, 10],
                [2, 3, 4, 5, 6, 7, 8, 9]
            ]
        );
    }

    #[test]
    fn the_counted_bubble_is_that_of_the_formula() {
        for stages in 1..=6 {
            for microbatches in 1..=12 {
                let (counted, formula) = (
                    counted_bubble(stages, microbatches),
                    bubble_formula(stages, microbatches),
                );
                assert!(
                    (counted - formula).abs() < 1e-12,
                    "{stages} stages, {microbatches} microbatches: {counted} {formula}"
                );
            }
        }
        assert_eq!(bubble_formula(4, 4), 3.0 / 7.0);
    }

    #[test]
    fn a_stage_that_is_never_idle_has_no_bubble() {
        assert_eq!(counted_bubble(1, 3), 0.0);
        assert_eq!(bubble(6.0, 3, 4.0), 0.5);
    }
}
