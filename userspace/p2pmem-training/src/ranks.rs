// SPDX-License-Identifier: MIT OR Apache-2.0

//! What trainings do with the other ranks: compare options, wait for what other ranks write to the memory, and stop because of an error.

use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use p2pmem_collectives::communicator::Members;
use p2pmem_collectives::group::Group;
use p2pmem_collectives::transport::{Event, Transport};
use serde_json::Value;

/// Longest sleep while nothing happens. Limits the time until the failure of another rank is noticed.
const MAX_SLEEP: Duration = Duration::from_millis(50);

/// The ranks that a rank waits for, and the time since which nothing has happened.
pub struct Wait<'a, M> {
    members: &'a M,
    limit: Duration,
    moved: Instant,
}

impl<'a, M: Members> Wait<'a, M> {
    /// Begins to wait. `limit` is the longest time in which nothing happens.
    pub fn new(members: &'a M, limit: Duration) -> Self {
        let moved = Instant::now();
        Self { members, limit, moved }
    }

    /// Returns the ranks.
    pub fn members(&self) -> &'a M {
        self.members
    }

    /// Restarts the time in which nothing happens: this rank itself was busy.
    pub fn moved(&mut self) {
        self.moved = Instant::now();
    }

    /// Adds events, or waits for a short time if there are none. `what` says what is missing.
    ///
    /// # Errors
    ///
    /// A rank has failed, or nothing happened within the limit.
    pub fn poll<T: Transport>(
        &mut self,
        transport: &mut T,
        events: &mut Vec<Event>,
        what: impl Fn() -> String,
    ) -> Result<()> {
        transport.poll(events)?;
        if !events.is_empty() {
            self.moved = Instant::now();
            return Ok(());
        }
        self.members.check()?;
        if self.moved.elapsed() > self.limit {
            bail!("nothing happened for {:?}: {}", self.limit, what());
        }
        transport.wait(MAX_SLEEP)
    }
}

/// Fails if a rank has other options than rank 0. All ranks call this function. Then the group has failed with the difference: another rank
/// may not have compared yet when this one ends.
///
/// # Errors
///
/// Two ranks have different options, or a rank did not call the function within the limit.
pub fn agree(group: &Group, options: &Value, limit: Duration) -> Result<()> {
    let all = group.exchange_values(options, limit)?;
    let other = all.iter().position(|other| *other != all[0]);
    if let Some(other) = other {
        let difference = format!(
            "{} has the options {}, and {} has {}: start all ranks with the same options",
            group.name(other),
            all[other],
            group.name(0),
            all[0]
        );
        group.abort(&difference);
        bail!(difference);
    }
    Ok(())
}

/// Informs all ranks why this rank stops. Returns the failure of another rank instead, if there is one.
pub fn stop<M: Members>(members: &M, error: anyhow::Error) -> anyhow::Error {
    match members.stop(&format!("{error:#}")) {
        Err(failure) => failure.into(),
        Ok(()) => error,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::local::{each_rank, LIMIT};

    #[test]
    fn a_rank_with_other_options_is_named_by_all() {
        for (different, is_equal) in [(2, false), (3, true)] {
            let results = each_rank(3, 64, |group, _, _| {
                let batch = if group.rank() == different { 48 } else { 96 };
                agree(&group, &serde_json::json!({ "batch": batch, "rate": 0.1_f32 }), LIMIT)?;
                group.leave(LIMIT)
            });
            for result in results {
                assert_eq!(result.is_ok(), is_equal);
                if let Err(error) = result {
                    let text = format!("{error:#}");
                    assert!(text.contains("rank 2 (node-c) has the options"), "{text}");
                    assert!(text.contains("48") && text.contains("96"), "{text}");
                }
            }
        }
    }

    /// Rank 0 finds the difference and ends. The others look after its end.
    #[test]
    fn a_difference_is_known_after_the_end_of_the_rank_that_found_it() {
        let ended = Barrier::new(3);
        let results = each_rank(3, 64, |group, _, _| {
            let options = serde_json::json!({ "batch": if group.rank() == 2 { 48 } else { 96 } });
            if group.rank() == 0 {
                let result = agree(&group, &options, LIMIT);
                drop(group);
                ended.wait();
                return result;
            }
            // A value of another rank may come after the reason of rank 0.
            let _ = group.exchange_values(&options, LIMIT);
            ended.wait();
            Ok(group.wait_for_failure(LIMIT)?)
        });
        for result in results {
            let text = format!("{:#}", result.unwrap_err());
            assert!(text.contains("rank 2 (node-c) has the options"), "{text}");
        }
    }
}
