// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ranks that are threads of one process, for tests: a group by TCP on this host, and memory and messages in the process.

use std::net::Ipv4Addr;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use p2pmem_collectives::group::{Group, GroupOptions};
use p2pmem_collectives::local::LocalDirectory;
use p2pmem_collectives::transport::local::{Local, Network};
use p2pmem_verbs::Span;

/// A limit that is never reached.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Runs `body` for each rank, with `bytes` bytes of memory. Returns the results in the order of the ranks.
pub fn each_rank<R: Send>(
    ranks: usize,
    bytes: u64,
    body: impl Fn(Group, Local, Span) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let memories: Vec<Span> = (0..ranks).map(|_| Span::host(bytes as usize).unwrap()).collect();
    let network = Network::in_order(memories.clone());
    let (body, network, joined) = (&body, &network, &Barrier::new(ranks));
    thread::scope(|scope| {
        let threads: Vec<_> = LocalDirectory::job(ranks)
            .into_iter()
            .zip(memories)
            .enumerate()
            .map(|(rank, (directory, span))| {
                scope.spawn(move || {
                    let options = GroupOptions {
                        limit: LIMIT,
                        address: Some(Ipv4Addr::LOCALHOST.into()),
                        host: Some(format!("node-{}", (b'a' + rank as u8) as char)),
                        silence: LIMIT,
                    };
                    let group = Group::join(Box::new(directory), &options);
                    // If a rank ended earlier, others could not join.
                    joined.wait();
                    body(group?, Local::new(network, rank), span)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
