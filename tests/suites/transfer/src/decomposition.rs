// SPDX-License-Identifier: MIT OR Apache-2.0

//! What one RDMA WRITE costs, split into the steps that two NICs recorded: from the doorbell to the completion.

use anyhow::{Context, Result, ensure};
use p2pmem_mlx5::{Point, Step, Steps};
use serde::Serialize;

/// The parts of a WRITE that the NICs record, in their order.
pub const TERMS: [&str; 7] = [
    "doorbell until fetch",
    "fetch of the request",
    "read of the payload",
    "wire",
    "write of the payload",
    "acknowledgement",
    "completion",
];
/// The rest of the latency, which no clock measures by itself: posting, the register access, and polling.
pub const RESIDUAL: &str = "residual: post and poll";

/// A part of the latency.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Term {
    /// What takes the time.
    pub term: String,
    /// Median of the messages, in microseconds.
    pub us: f64,
}

/// The parts of a message's latency.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decomposition {
    /// The message.
    pub name: String,
    /// Number of messages whose steps are all recorded.
    pub messages: usize,
    /// The parts, in order, and [`RESIDUAL`]: `total_us` without `nics_us`.
    pub terms: Vec<Term>,
    /// Median of the sums of each message's parts, by the clock of the NICs, in microseconds.
    pub nics_us: f64,
    /// Median latency that the client measured by its own clock, in microseconds.
    pub total_us: f64,
}

/// Returns the queue pair with most steps of a kind.
fn busiest(steps: &[Step], point: Point) -> Option<u32> {
    let mut counts = std::collections::BTreeMap::new();
    for step in steps.iter().filter(|step| step.point == point) {
        *counts.entry(step.qpn).or_insert(0) += 1;
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(qpn, _)| qpn)
}

/// Returns the times of a message's parts, in nanoseconds. `None` if a step is missing: an acknowledgement may cover the next
/// message, too.
fn parts(own: &[&Step], peer: &[&Step], from: u64, to: u64) -> Option<[u64; TERMS.len()]> {
    let next = |steps: &[&Step], point, after: u64| -> Option<Step> {
        let mut steps = steps.iter().filter(|step| step.point == point);
        steps
            .find(|step| (after..to).contains(&step.begin_ns))
            .map(|step| **step)
    };
    let fetch = next(own, Point::Fetch, from)?;
    let read = next(own, Point::Read, fetch.end_ns)?;
    let write = next(peer, Point::Write, read.end_ns)?;
    // The packets may be received while the sender's step has not ended.
    let mut received = peer.iter().filter(|step| step.point == Point::Receive);
    let receive = received.rfind(|step| (read.end_ns..=write.begin_ns).contains(&step.begin_ns))?;
    let acknowledged = next(own, Point::Receive, write.end_ns)?;
    let complete = next(own, Point::Complete, acknowledged.begin_ns)?;
    let times = [
        from,
        fetch.begin_ns,
        fetch.end_ns,
        read.end_ns,
        receive.begin_ns,
        write.end_ns,
        acknowledged.begin_ns,
        complete.end_ns,
    ];
    let mut parts = [0; TERMS.len()];
    for (part, pair) in parts.iter_mut().zip(times.windows(2)) {
        *part = pair[1].checked_sub(pair[0])?;
    }
    Some(parts)
}

/// Returns the median of numbers: of an even number of them, the larger one in the middle.
pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Returns the median of times in nanoseconds, in microseconds.
fn median_us(times: impl Iterator<Item = u64>) -> f64 {
    median(times.map(|ns| ns as f64 / 1e3).collect())
}

impl Decomposition {
    /// Splits the latency of single WRITEs, one at a time, whose median the client measured as `total_us`. `own` are the steps of
    /// the client's NIC, `peer` those of the server's.
    ///
    /// # Errors
    ///
    /// Steps are missing, or most messages have not all of them.
    pub fn new(name: &str, own: &Steps, peer: &Steps, total_us: f64) -> Result<Self> {
        ensure!(own.missed == 0 && peer.missed == 0, "{name}: a trace was too short");
        let qpn = busiest(&own.steps, Point::Doorbell).with_context(|| format!("{name}: no doorbell in the trace"))?;
        let peer_qpn = busiest(&peer.steps, Point::Write).with_context(|| format!("{name}: no write in the trace"))?;
        let of = |steps: &'_ [Step], qpn: u32| -> Vec<Step> {
            let ours = |step: &&Step| step.qpn == qpn || step.point == Point::Receive;
            steps.iter().filter(ours).copied().collect()
        };
        let (own, peer) = (of(&own.steps, qpn), of(&peer.steps, peer_qpn));
        let (own, peer): (Vec<&Step>, Vec<&Step>) = (own.iter().collect(), peer.iter().collect());
        let doorbells: Vec<u64> = own
            .iter()
            .filter(|step| step.point == Point::Doorbell)
            .map(|step| step.begin_ns)
            .collect();
        let ends = doorbells.iter().skip(1).copied().chain([u64::MAX]);
        let found: Vec<_> = doorbells
            .iter()
            .zip(ends)
            .filter_map(|(from, to)| parts(&own, &peer, *from, to))
            .collect();
        ensure!(
            2 * found.len() > doorbells.len(),
            "{name}: only {} of {} messages have all steps",
            found.len(),
            doorbells.len()
        );
        let mut terms: Vec<Term> = TERMS
            .iter()
            .enumerate()
            .map(|(index, term)| Term {
                term: (*term).to_owned(),
                us: median_us(found.iter().map(|parts| parts[index])),
            })
            .collect();
        let nics_us = median_us(found.iter().map(|parts| parts.iter().sum()));
        terms.push(Term {
            term: RESIDUAL.to_owned(),
            us: total_us - nics_us,
        });
        Ok(Self {
            name: name.to_owned(),
            messages: found.len(),
            terms,
            nics_us,
            total_us,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(point: Point, qpn: u32, begin_ns: u64, end_ns: u64) -> Step {
        Step {
            point,
            qpn,
            bytes: 0,
            begin_ns,
            end_ns,
        }
    }

    /// Returns the steps of both NICs for messages that start at these times.
    fn traces(starts: &[u64]) -> [Steps; 2] {
        let (mut own, mut peer) = (Steps::default(), Steps::default());
        for t in starts {
            own.steps.extend([
                step(Point::Doorbell, 7, *t, *t),
                step(Point::Fetch, 7, t + 10, t + 30),
                step(Point::Read, 7, t + 40, t + 60),
                step(Point::Send, 0, t + 70, t + 90),
                step(Point::Receive, 0, t + 170, t + 170),
                step(Point::Complete, 7, t + 180, t + 200),
            ]);
            peer.steps.extend([
                step(Point::Receive, 0, t + 80, t + 80),
                step(Point::Write, 9, t + 100, t + 130),
                step(Point::Send, 0, t + 140, t + 160),
            ]);
        }
        [own, peer]
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![2.0, 1.0]), 2.0);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn the_residual_is_the_total_without_the_parts() {
        let [own, peer] = traces(&[1000, 2000, 3000]);
        let found = Decomposition::new("test", &own, &peer, 0.5).unwrap();
        let ns: Vec<u64> = found.terms.iter().map(|term| (term.us * 1e3).round() as u64).collect();
        assert_eq!(ns, [10, 20, 30, 20, 50, 40, 30, 300]);
        assert_eq!((found.nics_us, found.total_us), (0.2, 0.5));
        assert_eq!(found.messages, 3);
        assert_eq!(found.terms.len(), TERMS.len() + 1);
    }

    #[test]
    fn other_queue_pairs_and_packets_do_not_count() {
        let [mut own, mut peer] = traces(&[1000, 2000, 3000]);
        own.steps.push(step(Point::Doorbell, 3, 1500, 1500));
        own.steps.insert(0, step(Point::Receive, 0, 900, 900));
        peer.steps.insert(0, step(Point::Write, 5, 1020, 1030));
        peer.steps.insert(0, step(Point::Receive, 0, 1015, 1015));
        let found = Decomposition::new("test", &own, &peer, 0.5).unwrap();
        assert_eq!((found.messages, (found.terms[0].us * 1e3).round()), (3, 10.0));
    }

    #[test]
    fn missing_steps_are_an_error() {
        let [own, mut peer] = traces(&[1000, 2000, 3000]);
        let error = |own: &Steps, peer: &Steps| Decomposition::new("test", own, peer, 0.5).unwrap_err().to_string();
        peer.steps.truncate(3);
        assert!(error(&own, &peer).contains("only 1 of 3"), "{}", error(&own, &peer));
        assert!(error(&Steps::default(), &peer).contains("no doorbell"));
        assert!(error(&own, &Steps::default()).contains("no write"));
        peer.missed = 1;
        assert!(error(&own, &peer).contains("too short"));
    }
}
