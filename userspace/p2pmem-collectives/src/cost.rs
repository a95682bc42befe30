// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a collective call costs by the formulas of the literature: rounds, bytes at each node, and fan-in. Tests count the same from the
//! schedules of all ranks.

use serde::{Deserialize, Serialize};

use crate::schedule::{Algorithm, Collective};
#[cfg(test)]
use crate::schedule::{Plan, Step};

/// The cost of a call. Bytes are those of the payload, without headers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Rounds: the length of the longest chain of messages in which each needs the one before.
    pub rounds: u32,
    /// The most bytes that one rank sends in the whole call.
    pub most_sent: f64,
    /// The most bytes that one rank receives in the whole call.
    pub most_received: f64,
    /// The most bytes that one rank sends or receives in one round.
    pub most_in_round: f64,
    /// The most ranks from which one rank receives in one round.
    pub fan_in: u32,
}

impl Cost {
    /// Returns the bytes of the busiest rank, sent or received, whichever is more.
    pub fn busiest(&self) -> f64 {
        self.most_sent.max(self.most_received)
    }

    /// Returns the bytes of the busiest rank, relative to those of another cost. 1 if a call moves nothing, as that of one rank.
    pub fn ratio_to(&self, other: &Self) -> f64 {
        if other.busiest() > 0.0 {
            self.busiest() / other.busiest()
        } else {
            1.0
        }
    }
}

/// Counts the cost of a call from the schedules of its ranks.
#[cfg(test)]
pub(crate) fn count(plan: &Plan) -> Cost {
    let ranks = plan.ring().ranks();
    // By round and rank: bytes sent, bytes received, and whether a rank receives from another one.
    let mut rounds: Vec<Vec<Traffic>> = Vec::new();
    for rank in 0..ranks {
        for task in plan.schedule(rank).tasks {
            for step in &task.steps {
                let Step::Send { to, round, .. } = *step else { continue };
                let round = usize::from(round);
                while rounds.len() <= round {
                    rounds.push((0..ranks).map(|_| Traffic::default()).collect());
                }
                rounds[round][rank].sent += task.bytes;
                let receiver = &mut rounds[round][to];
                receiver.received += task.bytes;
                receiver.senders |= 1 << rank;
            }
        }
    }
    let total = |bytes: fn(&Traffic) -> u64| {
        let of = |rank: usize| rounds.iter().map(|round| bytes(&round[rank])).sum::<u64>();
        (0..ranks).map(of).max().unwrap_or(0) as f64
    };
    let all = || rounds.iter().flatten();
    Cost {
        rounds: rounds.len() as u32,
        most_sent: total(|traffic| traffic.sent),
        most_received: total(|traffic| traffic.received),
        most_in_round: all()
            .map(|traffic| traffic.sent.max(traffic.received))
            .max()
            .unwrap_or(0) as f64,
        fan_in: all().map(|traffic| traffic.senders.count_ones()).max().unwrap_or(0),
    }
}

#[cfg(test)]
#[derive(Default)]
struct Traffic {
    sent: u64,
    received: u64,
    /// A bit for each rank.
    senders: u32,
}

/// Returns the cost of a call of `ranks` ranks with `bytes` bytes of payload by the formulas.
pub fn formula(collective: Collective, ranks: usize, bytes: u64) -> Cost {
    let (others, ranks, bytes) = (ranks.saturating_sub(1) as u32, ranks as f64, bytes as f64);
    let (n, part) = (f64::from(others), bytes / ranks);
    let cost = |rounds: u32, sent: f64, received: f64, in_round: f64, fan_in: u32| Cost {
        rounds,
        most_sent: sent,
        most_received: received,
        most_in_round: if others == 0 { 0.0 } else { in_round },
        fan_in: fan_in.min(others),
    };
    match collective {
        // The server receives from all others in one round, and sends to all others in the next one.
        Collective::Allreduce(Algorithm::ParameterServer) => {
            cost(2.min(2 * others), n * bytes, n * bytes, n * bytes, others)
        }
        Collective::Allreduce(Algorithm::Decentralized) => cost(others, n * bytes, n * bytes, bytes, 1),
        Collective::Allreduce(Algorithm::Ring) => cost(2 * others, 2.0 * n * part, 2.0 * n * part, part, 1),
        Collective::ReduceScatter | Collective::AllGather => cost(others, n * part, n * part, part, 1),
        Collective::Broadcast => {
            let bytes = if others == 0 { 0.0 } else { bytes };
            cost(others, bytes, bytes, bytes, 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Element, Reduction};
    use crate::schedule::{Call, Ring};

    fn plan(collective: Collective, ranks: usize, bytes: u64) -> Plan {
        let call = Call {
            collective,
            element: Element::F32,
            reduction: Reduction::Sum,
            at: 0,
            bytes,
            root: ranks / 2,
        };
        Plan::new(call, Ring::by_rank(ranks), 64 << 10).unwrap()
    }

    #[test]
    fn schedules_have_the_cost_of_the_formulas() {
        let collectives = Algorithm::ALL.map(Collective::Allreduce).into_iter().chain([
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Broadcast,
        ]);
        for collective in collectives {
            for ranks in 1..=8 {
                // All ranks have segments of the same size.
                let bytes = 840 << 10;
                let counted = count(&plan(collective, ranks, bytes));
                assert_eq!(
                    counted,
                    formula(collective, ranks, bytes),
                    "{collective:?}, {ranks} ranks"
                );
            }
        }
    }

    #[test]
    fn a_ring_of_uneven_segments_is_near_the_formula() {
        let counted = count(&plan(Collective::Allreduce(Algorithm::Ring), 7, 1 << 20));
        let formula = formula(Collective::Allreduce(Algorithm::Ring), 7, 1 << 20);
        assert!(
            (counted.most_sent / formula.most_sent - 1.0).abs() < 1e-3,
            "{counted:?} {formula:?}"
        );
    }
}
