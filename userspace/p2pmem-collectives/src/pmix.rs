// SPDX-License-Identifier: MIT OR Apache-2.0

//! The directory of a job that `mpirun` or `srun --mpi=pmix` started.

use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use p2pmem_pmix_sys::{Client, Error};

use crate::group::Directory;

/// Longest wait for the server of this node, which needs no other rank.
const SERVER: Duration = Duration::from_secs(30);
/// Time of a limit that is kept to find out which ranks are missing.
const SEARCH: Duration = Duration::from_secs(1);

/// The ranks of this process's job, by PMIx.
///
/// The connection to PMIx's server ends when the directory is dropped.
#[derive(Debug)]
pub struct PmixDirectory {
    client: Client,
    ranks: u32,
    /// Exchanges that this rank has begun.
    begun: u64,
}

impl PmixDirectory {
    /// Connects to the server of the launcher.
    ///
    /// # Errors
    ///
    /// The process was not started by a launcher with PMIx, PMIx is not installed, or the server does not answer.
    pub fn new() -> Result<Self> {
        let client = Client::init()?;
        let ranks = client
            .job_size(SERVER)
            .context("asking for the number of ranks of the job")?;
        Ok(Self {
            client,
            ranks,
            begun: 0,
        })
    }

    /// Returns the ranks that have not published the value.
    fn missing(&self, key: &str, limit: Duration) -> Vec<String> {
        let deadline = Instant::now() + limit;
        let requests: Vec<_> = (0..self.ranks).map(|rank| self.client.request(rank, key)).collect();
        let is_missing = |request: Result<p2pmem_pmix_sys::Pending, Error>| {
            request
                .and_then(|request| request.wait(deadline.saturating_duration_since(Instant::now())))
                .is_err()
        };
        let missing = requests
            .into_iter()
            .enumerate()
            .filter_map(|(rank, request)| is_missing(request).then_some(rank));
        missing.map(|rank| format!("rank {rank}")).collect()
    }
}

impl Directory for PmixDirectory {
    fn rank(&self) -> usize {
        self.client.rank() as usize
    }

    fn ranks(&self) -> usize {
        self.ranks as usize
    }

    fn exchange(&mut self, own: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + limit;
        let key = format!("p2pmem.{}", self.begun);
        self.begun += 1;
        self.client.put(&key, own)?;
        self.client.commit()?;
        let search = SEARCH.min(limit / 4);
        match self.client.fence(limit - search) {
            Ok(()) => {}
            Err(Error::Timeout { .. }) => {
                let missing = self.missing(&key, search);
                if missing.is_empty() {
                    bail!("the launcher did not exchange the values of the ranks within {limit:?}: is its daemon on each node up?");
                }
                bail!("{} did not join within {limit:?}", missing.join(", "));
            }
            Err(error) => return Err(error).context("waiting for the other ranks of the job"),
        }
        let get = |rank| {
            let rest = deadline.saturating_duration_since(Instant::now()).max(search);
            let value = self.client.get(rank, &key, rest);
            value.with_context(|| format!("the value of rank {rank}"))
        };
        (0..self.ranks).map(get).collect()
    }
}
