// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::value::{seconds, size};

use crate::element::{Element, Reduction};
use crate::schedule::{Algorithm, Collective};

/// Run collective operations on the memory of accelerators, by RDMA between the ranks of a job.
///
/// Start one process for each rank with `mpirun p2pmem-collectives run` or `srun --mpi=pmix p2pmem-collectives run`. Rank
/// 0 prints the result.
///
/// Sizes accept the units K, M, G (powers of 1024). Exit codes: 0 success, 1 error (printed) or wrong bytes, 2 invalid
/// arguments.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-collectives", version, max_term_width = 100)]
pub struct Cli {
    /// Print JSON: an object whose member `schema` is the version of the others.
    #[arg(short = 'J', long, global = true)]
    pub json: bool,

    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run and measure a collective operation, as a rank of a job.
    Run(RunArgs),
    /// Print what collective operations cost: rounds, bytes and fan-in, for numbers of ranks.
    Cost(CostArgs),
}

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Operation {
    /// Reduce the payloads of all ranks; every rank has the result.
    Allreduce,
    /// Reduce the payloads of all ranks; each rank has a segment of the result.
    ReduceScatter,
    /// Collect a segment from each rank; every rank has all segments.
    AllGather,
    /// Copy the payload of one rank to all ranks.
    Broadcast,
}

impl Operation {
    /// Returns the collective operation.
    pub fn collective(self, algorithm: Algorithm) -> Collective {
        match self {
            Self::Allreduce => Collective::Allreduce(algorithm),
            Self::ReduceScatter => Collective::ReduceScatter,
            Self::AllGather => Collective::AllGather,
            Self::Broadcast => Collective::Broadcast,
        }
    }
}

/// Options of a rank.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// The operation.
    #[arg(long, value_enum, default_value = "allreduce")]
    pub collective: Operation,

    /// How an allreduce moves the payload.
    #[arg(long, value_enum, default_value = "ring")]
    pub algorithm: Algorithm,

    /// Type of the elements.
    #[arg(long, value_enum, default_value = "f32")]
    pub element: Element,

    /// How elements are reduced.
    #[arg(long, value_enum, default_value = "sum")]
    pub reduction: Reduction,

    /// The rank that broadcasts, or that is the parameter server.
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    pub root: usize,

    /// Bytes of the payload of each rank.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "16M")]
    pub size: u64,

    /// Calls that are measured, after one that is not.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub iterations: u32,

    /// Compare every byte of every result with the definition.
    #[arg(long)]
    pub verify: bool,

    /// Most bytes of a piece: a piece is reduced while others are in flight.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "256K")]
    pub chunk: u64,

    /// Most pieces at the same time.
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub window: u32,

    /// Ranks in the order of the ring [default: neighbours are nearest in the topology]
    #[arg(long, value_name = "RANKS", value_delimiter = ',')]
    pub ring: Vec<usize>,

    /// The NIC [default: the NIC nearest to the memory, of those with an active port]
    #[arg(long)]
    pub nic: Option<String>,

    /// Kind of memory for the payload.
    #[arg(long, value_enum, default_value = "cpu")]
    pub memory: MemoryKind,

    /// The provider of the memory, by id or PCI address [default: one that fewest ranks of this machine use, nearest to a
    /// NIC]
    #[arg(long)]
    pub device: Option<String>,

    /// Device file of p2pmem.
    #[arg(long, value_name = "PATH", env = "P2PMEM_DEV_PATH", hide_env_values = true,
          default_value = p2pmem::DEFAULT_PATH)]
    pub dev_path: PathBuf,

    /// Index of the GID to use; only relevant on Ethernet.
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    pub gid_index: u8,

    /// Longest wait for other ranks, and longest time in which nothing happens.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
}

/// Options of the cost table.
#[derive(Debug, Clone, Args)]
pub struct CostArgs {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2,3,4,8", value_parser = ranks)]
    pub ranks: Vec<usize>,

    /// Bytes of the payload of each rank.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "16M")]
    pub size: u64,
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks) if (1..=crate::schedule::MAX_RANKS).contains(&ranks) => Ok(ranks),
        _ => Err(format!(
            "specify a number of ranks, from 1 to {}",
            crate::schedule::MAX_RANKS
        )),
    }
}
