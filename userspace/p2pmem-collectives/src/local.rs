// SPDX-License-Identifier: MIT OR Apache-2.0

//! A directory for ranks that are threads of one process, for tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, Result};

use crate::group::Directory;

/// The directory of one of the ranks of this process.
#[derive(Debug)]
pub struct LocalDirectory {
    rank: usize,
    /// Exchanges that this rank has begun.
    begun: u64,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    ranks: usize,
    /// The values of each exchange by its number.
    exchanges: Mutex<BTreeMap<u64, Exchange>>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Exchange {
    values: Vec<Option<Vec<u8>>>,
    /// Ranks that have all values.
    finished: usize,
}

impl LocalDirectory {
    /// Returns the directories of a job, one for each rank.
    pub fn job(ranks: usize) -> Vec<Self> {
        let shared = Arc::new(Shared {
            ranks,
            exchanges: Mutex::default(),
            changed: Condvar::new(),
        });
        let directory = |rank| Self {
            rank,
            begun: 0,
            shared: shared.clone(),
        };
        (0..ranks).map(directory).collect()
    }
}

impl Directory for LocalDirectory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.ranks
    }

    fn exchange(&mut self, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + limit;
        let number = self.begun;
        self.begun += 1;
        let mut exchanges = self.shared.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        let exchange = exchanges.entry(number).or_default();
        exchange.values.resize(self.shared.ranks, None);
        exchange.values[self.rank] = Some(own.to_vec());
        self.shared.changed.notify_all();
        loop {
            let exchange = exchanges.entry(number).or_default();
            if exchange.values.iter().all(Option::is_some) {
                let values = exchange.values.iter().flatten().cloned().collect();
                exchange.finished += 1;
                if exchange.finished == self.shared.ranks {
                    exchanges.remove(&number);
                }
                return Ok(values);
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                let missing = exchange.values.iter().enumerate().filter(|(_, value)| value.is_none());
                let missing: Vec<String> = missing.map(|(rank, _)| format!("rank {rank}")).collect();
                bail!("{} did not join within {limit:?}", missing.join(", "));
            }
            exchanges = self
                .shared
                .changed
                .wait_timeout(exchanges, rest)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
