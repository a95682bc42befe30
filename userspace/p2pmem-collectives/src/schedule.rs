// SPDX-License-Identifier: MIT OR Apache-2.0

//! The work of each rank in a collective call, as data: which piece of the payload goes to which rank, and what a rank does
//! with a piece that arrives.
//!
//! The payload is cut into pieces. A *task* is the work of one rank for one piece: a list of [`Step`]s that are executed
//! in order. Tasks do not depend on each other, so a rank executes many of them at the same time, and the transfer of one piece
//! overlaps with the reduction of another. All ranks have the same tasks with the same numbers.
//!
//! # The order of a reduction
//!
//! Additions of floating-point numbers are not associative. Each algorithm has a fixed order, which [`Plan::contributors`]
//! returns, so a call gives the same bits in each run and on all ranks.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::element::{combine, Element, Reduction};

/// Maximum number of ranks: a round's number has 6 bits in a message.
pub const MAX_RANKS: usize = 32;
/// Most tasks of a call: the number of a task has 24 bits in a message, and the tasks of two calls must differ.
pub const MAX_TASKS: u64 = 1 << 22;

/// How an allreduce moves the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// All ranks send their payload to one rank, which reduces and sends the result to all: 2 rounds, but all bytes pass
    /// one node.
    ParameterServer,
    /// Each rank sends its payload to every other rank, one after another, and reduces what it receives.
    Decentralized,
    /// Each rank sends one part of the payload to the next rank of a ring, in every round.
    Ring,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 3] = [Self::ParameterServer, Self::Decentralized, Self::Ring];

    /// Returns the name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::ParameterServer => "parameter-server",
            Self::Decentralized => "decentralized",
            Self::Ring => "ring",
        }
    }
}

/// A collective operation on the payload of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collective {
    /// The reduction of all payloads, on every rank.
    Allreduce(Algorithm),
    /// Rank r has segment r of the reduction of all payloads. The other segments of its payload have no defined content.
    ReduceScatter,
    /// Rank r contributes segment r; every rank has all segments.
    AllGather,
    /// Every rank has the payload of the root.
    Broadcast,
}

impl Collective {
    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allreduce(_) => "allreduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
        }
    }

    /// Returns whether payloads are reduced.
    pub fn reduces(self) -> bool {
        matches!(self, Self::Allreduce(_) | Self::ReduceScatter)
    }
}

/// What all ranks of a call agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The operation.
    pub collective: Collective,
    /// The type of the elements.
    pub element: Element,
    /// How elements are reduced.
    pub reduction: Reduction,
    /// Offset of the payload in the memory of each rank.
    pub at: u64,
    /// Bytes of the payload of a rank.
    pub bytes: u64,
    /// The rank that broadcasts, or that is the parameter server.
    pub root: usize,
}

/// Where a rank has a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// In the payload.
    Payload,
    /// In the slot with this number, of the slots of the task.
    Slot(usize),
}

/// A step of a task. The piece is that of the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Starts to send the piece from the payload to a place of another rank.
    Send {
        /// The other rank.
        to: usize,
        /// The place there.
        into: Place,
        /// The round of the algorithm, from 0.
        round: u8,
    },
    /// Waits until the next message of another rank for this task has arrived. The sender knows its place.
    Receive {
        /// The other rank.
        from: usize,
    },
    /// Waits until what was sent is not needed any more, so that the payload may change.
    Sent,
    /// Reduces two places to the first one.
    Reduce {
        /// The place of the result.
        into: Place,
        /// The other place.
        from: Place,
    },
    /// Copies a place to another one.
    Copy {
        /// The place of the result.
        into: Place,
        /// The other place.
        from: Place,
    },
}

/// The work of a rank for one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// The segment that has the piece. A payload that is not cut into segments is segment 0.
    pub segment: usize,
    /// Offset of the piece in the payload.
    pub at: u64,
    /// Bytes of the piece.
    pub bytes: u64,
    /// The steps.
    pub steps: Vec<Step>,
}

/// The ranks in the order of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    order: Vec<usize>,
    position: Vec<usize>,
}

impl Ring {
    /// Creates a ring in which the ranks follow each other by their numbers.
    pub fn by_rank(ranks: usize) -> Self {
        Self {
            order: (0..ranks).collect(),
            position: (0..ranks).collect(),
        }
    }

    /// Creates a ring of this order; `None` if it does not have each rank once.
    pub fn new(order: Vec<usize>) -> Option<Self> {
        let mut position = vec![usize::MAX; order.len()];
        for (at, rank) in order.iter().enumerate() {
            let place = position.get_mut(*rank).filter(|place| **place == usize::MAX)?;
            *place = at;
        }
        Some(Self { order, position })
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.order.len()
    }

    /// Returns the ranks in their order.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the rank `distance` places after another one.
    pub fn after(&self, rank: usize, distance: usize) -> usize {
        self.order[(self.position[rank] + distance) % self.order.len()]
    }

    /// Returns the rank before another one.
    pub fn before(&self, rank: usize) -> usize {
        self.after(rank, self.order.len() - 1)
    }

    /// Returns how many places after `from` the rank `to` is.
    pub fn distance(&self, from: usize, to: usize) -> usize {
        (self.position[to] + self.order.len() - self.position[from]) % self.order.len()
    }
}

/// Returns the bytes of segment `index` of a payload that is cut into `count` segments of whole elements, as even as
/// possible.
fn segment(bytes: u64, element: Element, count: usize, index: usize) -> Range<u64> {
    let size = element.bytes() as u64;
    let elements = u128::from(bytes / size);
    // Not truncated: at most the number of elements.
    let edge = |index: usize| (elements * index as u128 / count as u128) as u64 * size;
    edge(index)..edge(index + 1)
}

/// The tasks of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The tasks, by their numbers.
    pub tasks: Vec<Task>,
    /// Slots of each task.
    pub slots: usize,
    /// The ranks that send to this rank, in ascending order.
    pub senders: Vec<usize>,
    /// The ranks that this rank sends to, in ascending order.
    pub receivers: Vec<usize>,
}

/// A call and the ranks that make it, for which [`Schedule`]s are made.
#[derive(Debug, Clone)]
pub struct Plan {
    call: Call,
    ring: Ring,
    chunk: u64,
}

impl Plan {
    /// Creates the plan of a call. Pieces have at most `chunk` bytes.
    ///
    /// # Errors
    ///
    /// The call is not possible. The message says why.
    pub fn new(call: Call, ring: Ring, chunk: u64) -> Result<Self, String> {
        let ranks = ring.ranks();
        let size = call.element.bytes() as u64;
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(format!(
                "{ranks} ranks: at least 1 and at most {MAX_RANKS} are possible"
            ));
        }
        if call.root >= ranks {
            return Err(format!(
                "the root is rank {}, but the last rank is {}",
                call.root,
                ranks - 1
            ));
        }
        if call.bytes == 0 || call.bytes % size != 0 || call.at % size != 0 {
            return Err(format!(
                "{} bytes at offset {}: a payload has whole elements of {size} bytes, and at least one",
                call.bytes, call.at
            ));
        }
        if chunk < size || chunk % size != 0 {
            return Err(format!(
                "a chunk of {chunk} bytes: a chunk has whole elements of {size} bytes"
            ));
        }
        let plan = Self { call, ring, chunk };
        let tasks: u64 = (0..plan.segments()).map(|index| plan.pieces(index)).sum();
        if tasks > MAX_TASKS {
            return Err(format!(
                "{} bytes in chunks of {chunk} bytes: at most {MAX_TASKS} chunks are possible; use larger chunks",
                call.bytes
            ));
        }
        Ok(plan)
    }

    /// Returns the call.
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// Returns the ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    fn ranks(&self) -> usize {
        self.ring.ranks()
    }

    /// Returns the number of segments of the payload: one for each rank, or one for all.
    pub fn segments(&self) -> usize {
        match self.call.collective {
            Collective::Allreduce(Algorithm::Ring) | Collective::ReduceScatter | Collective::AllGather => self.ranks(),
            _ => 1,
        }
    }

    /// Returns the bytes of a segment.
    pub fn segment(&self, index: usize) -> Range<u64> {
        segment(self.call.bytes, self.call.element, self.segments(), index)
    }

    /// Returns whether a rank has a defined result in a segment.
    pub fn has_result(&self, rank: usize, index: usize) -> bool {
        self.call.collective != Collective::ReduceScatter || index == rank
    }

    /// Returns the ranks that contribute to a segment, in the order in which their contributions are reduced: the first one with the
    /// second one, the result with the third one. One rank if nothing is reduced.
    pub fn contributors(&self, index: usize) -> Vec<usize> {
        let ranks = self.ranks();
        match self.call.collective {
            Collective::Allreduce(Algorithm::ParameterServer) => {
                let others = (0..ranks).filter(|rank| *rank != self.call.root);
                std::iter::once(self.call.root).chain(others).collect()
            }
            Collective::Allreduce(Algorithm::Decentralized) => (0..ranks).collect(),
            // The last rank is the one that has the result of the segment.
            Collective::Allreduce(Algorithm::Ring) | Collective::ReduceScatter => {
                (1..=ranks).map(|distance| self.ring.after(index, distance)).collect()
            }
            Collective::AllGather => vec![index],
            Collective::Broadcast => vec![self.call.root],
        }
    }

    /// Computes a part of a segment's result by the definition of the call, from the contributions of the ranks to this part.
    pub fn result(&self, index: usize, contribution: impl FnMut(usize) -> Vec<u8>) -> Vec<u8> {
        let mut contributions = self.contributors(index).into_iter().map(contribution);
        let mut result = contributions.next().unwrap_or_default();
        for other in contributions {
            combine(self.call.element, self.call.reduction, &mut result, &other);
        }
        result
    }

    fn pieces(&self, index: usize) -> u64 {
        let range = self.segment(index);
        (range.end - range.start).div_ceil(self.chunk)
    }

    /// Returns the segments, offsets and lengths of all pieces, by the numbers of their tasks. The first pieces of all segments
    /// come first, so that all ranks send at the same time.
    fn cut(&self) -> Vec<(usize, u64, u64)> {
        let segments: Vec<_> = (0..self.segments()).map(|index| self.segment(index)).collect();
        let most = (0..self.segments()).map(|index| self.pieces(index)).max().unwrap_or(0);
        let mut all = Vec::new();
        for piece in 0..most {
            for (index, range) in segments.iter().enumerate() {
                let at = range.start + piece * self.chunk;
                if at < range.end {
                    all.push((index, at, self.chunk.min(range.end - at)));
                }
            }
        }
        all
    }

    /// Returns the work of a rank.
    pub fn schedule(&self, rank: usize) -> Schedule {
        let cut = self.cut();
        let tasks: Vec<Task> = cut
            .into_iter()
            .map(|(segment, at, bytes)| Task {
                segment,
                at,
                bytes,
                steps: self.steps(rank, segment),
            })
            .collect();
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for step in tasks.iter().flat_map(|task| &task.steps) {
            match *step {
                Step::Send { to, .. } => receivers.push(to),
                Step::Receive { from } => senders.push(from),
                _ => {}
            }
        }
        for peers in [&mut senders, &mut receivers] {
            peers.sort_unstable();
            peers.dedup();
        }
        Schedule {
            tasks,
            slots: self.slots(),
            senders,
            receivers,
        }
    }

    /// Returns the number of slots of a task, which is the same on all ranks.
    pub fn slots(&self) -> usize {
        match self.call.collective {
            Collective::Allreduce(Algorithm::Ring) | Collective::ReduceScatter => 1,
            Collective::Allreduce(_) => self.ranks(),
            Collective::AllGather | Collective::Broadcast => 0,
        }
    }

    fn steps(&self, rank: usize, segment: usize) -> Vec<Step> {
        let mut steps = match self.call.collective {
            Collective::Allreduce(Algorithm::ParameterServer) => self.parameter_server(rank),
            Collective::Allreduce(Algorithm::Decentralized) => self.decentralized(rank),
            Collective::Allreduce(Algorithm::Ring) => {
                let mut steps = self.reduce_along(rank, segment);
                let first = self.ranks() as u8 - 1;
                steps.extend(self.pass_along(rank, segment, first));
                steps
            }
            Collective::ReduceScatter => self.reduce_along(rank, segment),
            Collective::AllGather => self.pass_along(rank, segment, 0),
            Collective::Broadcast => self.pass_along(rank, self.call.root, 0),
        };
        if steps.iter().any(|step| matches!(step, Step::Send { .. })) && steps.last() != Some(&Step::Sent) {
            steps.push(Step::Sent);
        }
        steps
    }

    fn parameter_server(&self, rank: usize) -> Vec<Step> {
        let root = self.call.root;
        if rank != root {
            let into = Place::Slot(rank);
            return vec![
                Step::Send {
                    to: root,
                    into,
                    round: 0,
                },
                Step::Receive { from: root },
            ];
        }
        let others = || (0..self.ranks()).filter(move |rank| *rank != root);
        let reduce = |from| {
            [
                Step::Receive { from },
                Step::Reduce {
                    into: Place::Payload,
                    from: Place::Slot(from),
                },
            ]
        };
        let send = |to| Step::Send {
            to,
            into: Place::Payload,
            round: 1,
        };
        others().flat_map(reduce).chain(others().map(send)).collect()
    }

    /// Each rank sends to the rank after it in the first round, to the second one after it in the second round.
    fn decentralized(&self, rank: usize) -> Vec<Step> {
        let ranks = self.ranks();
        if ranks == 1 {
            return Vec::new();
        }
        let mut steps: Vec<Step> = (1..ranks)
            .flat_map(|distance| {
                [
                    Step::Send {
                        to: self.ring.after(rank, distance),
                        into: Place::Slot(rank),
                        round: distance as u8 - 1,
                    },
                    Step::Receive {
                        from: self.ring.after(rank, ranks - distance),
                    },
                ]
            })
            .collect();
        // All ranks reduce in the same order. The payload must not change before all others have it.
        steps.push(Step::Sent);
        let place = |of: usize| if of == rank { Place::Payload } else { Place::Slot(of) };
        let into = place(0);
        steps.extend((1..ranks).map(|of| Step::Reduce { into, from: place(of) }));
        if into != Place::Payload {
            let (into, from) = (Place::Payload, into);
            steps.push(Step::Copy { into, from });
        }
        steps
    }

    /// A segment goes along the ring, from the rank after its owner to its owner, and each rank adds its contribution.
    fn reduce_along(&self, rank: usize, owner: usize) -> Vec<Step> {
        let ranks = self.ranks();
        if ranks == 1 {
            return Vec::new();
        }
        // 0 at the rank after the owner, ranks - 1 at the owner.
        let position = self.ring.distance(owner, rank).checked_sub(1).unwrap_or(ranks - 1);
        let mut steps = Vec::new();
        if position > 0 {
            let from = self.ring.before(rank);
            steps.push(Step::Receive { from });
            steps.push(Step::Reduce {
                into: Place::Payload,
                from: Place::Slot(0),
            });
        }
        if position < ranks - 1 {
            steps.push(Step::Send {
                to: self.ring.after(rank, 1),
                into: Place::Slot(0),
                round: position as u8,
            });
        }
        steps
    }

    /// A segment goes along the ring from its owner to all ranks. `first` is the number of the first round.
    fn pass_along(&self, rank: usize, owner: usize, first: u8) -> Vec<Step> {
        let ranks = self.ranks();
        let position = self.ring.distance(owner, rank);
        let mut steps = Vec::new();
        if position > 0 {
            let from = self.ring.before(rank);
            steps.push(Step::Receive { from });
        }
        if position + 1 < ranks {
            steps.push(Step::Send {
                to: self.ring.after(rank, 1),
                into: Place::Payload,
                round: first + position as u8,
            });
        }
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(collective: Collective, elements: u64) -> Plan {
        let call = Call {
            collective,
            element: Element::F32,
            reduction: Reduction::Sum,
            at: 0,
            bytes: 4 * elements,
            root: 2,
        };
        Plan::new(call, Ring::new(vec![0, 3, 1, 2]).unwrap(), 64).unwrap()
    }

    #[test]
    fn contributions_have_a_fixed_order() {
        let contributors = |collective, index| plan(collective, 8).contributors(index);
        // The ring is 0, 3, 1, 2. The rank after the owner is the first one.
        assert_eq!(contributors(Collective::Allreduce(Algorithm::Ring), 3), [1, 2, 0, 3]);
        assert_eq!(contributors(Collective::ReduceScatter, 0), [3, 1, 2, 0]);
        assert_eq!(
            contributors(Collective::Allreduce(Algorithm::ParameterServer), 0),
            [2, 0, 1, 3]
        );
        assert_eq!(
            contributors(Collective::Allreduce(Algorithm::Decentralized), 0),
            [0, 1, 2, 3]
        );
        assert_eq!(contributors(Collective::AllGather, 1), [1]);
        assert_eq!(contributors(Collective::Broadcast, 0), [2]);
    }

    #[test]
    fn segments_have_whole_elements_and_nearly_the_same_size() {
        let segments = |collective, elements| -> Vec<(u64, u64)> {
            let plan = plan(collective, elements);
            let ranges = (0..plan.segments()).map(|index| plan.segment(index));
            ranges.map(|range| (range.start, range.end)).collect()
        };
        assert_eq!(
            segments(Collective::AllGather, 10),
            [(0, 8), (8, 20), (20, 28), (28, 40)]
        );
        assert_eq!(segments(Collective::ReduceScatter, 2), [(0, 0), (0, 4), (4, 4), (4, 8)]);
        assert_eq!(segments(Collective::Broadcast, 10), [(0, 40)]);
        assert_eq!(segments(Collective::Allreduce(Algorithm::Decentralized), 10), [(0, 40)]);
    }

    #[test]
    fn rings_have_each_rank_once() {
        for bad in [vec![0, 0], vec![1, 2], vec![0, 2, 1, 4]] {
            assert_eq!(Ring::new(bad), None);
        }
    }
}
