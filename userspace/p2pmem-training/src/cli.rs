// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use p2pmem_collectives::schedule::{Algorithm, MAX_RANKS};
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::value::{seconds, size};

use crate::pipeline::MAX_MICROBATCHES;
use crate::settings::{Settings, MAX_EPOCHS};

/// Train a small network on handwritten digits, with gradients and parameters in accelerator memory.
///
/// Start one process for each rank with `mpirun p2pmem-training sync` or `srun --mpi=pmix p2pmem-training sync`. Rank 0
/// prints the result.
///
/// Exit codes: 0 success, 1 error (printed), 2 invalid arguments.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-training", version, max_term_width = 100)]
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
    /// Train as a rank of a job: an allreduce adds the gradients of all ranks in each iteration.
    Sync(SyncArgs),
    /// Train as a rank of a job: rank 0 is the parameter server, the others work without waiting for each other.
    Async(AsyncArgs),
    /// Train as a rank of a job: each rank has consecutive layers of the network, and passes microbatches on.
    Pipeline(PipelineArgs),
    /// Train as a rank of a job: each rank has a part of every layer, and an allreduce adds outputs and gradients.
    Tensor(TensorArgs),
    /// Compute on one processor what `sync` or `tensor` compute on several ranks. The result has the same bits. `pipeline` has those of
    /// one rank.
    Reference(ReferenceArgs),
    /// Print the newest valid checkpoint of a file.
    Checkpoint(CheckpointArgs),
}

/// What is trained.
#[derive(Debug, Clone, Args)]
pub struct TrainingArgs {
    /// Times that each training sample is used.
    #[arg(long, value_name = "COUNT", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_EPOCHS)))]
    pub epochs: u32,

    /// Samples of a batch: one update of the parameters.
    #[arg(long, value_name = "COUNT", default_value_t = 96)]
    pub batch: usize,

    /// What the mean gradient of a batch is multiplied with.
    #[arg(long, default_value_t = 0.5)]
    pub rate: f32,

    /// Units of each hidden layer.
    #[arg(long, value_name = "COUNT", default_value_t = 32)]
    pub hidden: usize,

    /// Layers of the network: the hidden ones and the output layer.
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    pub layers: usize,

    /// Seed of the first parameters and of the order of the samples.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl TrainingArgs {
    /// Returns the settings.
    pub fn settings(&self) -> Settings {
        Settings {
            epochs: self.epochs,
            batch: self.batch,
            rate: self.rate,
            hidden: self.hidden,
            layers: self.layers,
            seed: self.seed,
        }
    }
}

/// NIC and memory of a rank.
#[derive(Debug, Clone, Args)]
pub struct RankArgs {
    /// The NIC [default: the first NIC with an active port]
    #[arg(long)]
    pub nic: Option<String>,

    /// Kind of memory for gradients and parameters.
    #[arg(long, value_enum, default_value = "cpu")]
    pub memory: MemoryKind,

    /// The provider of the memory, by id or PCI address [default: the provider nearest to the NIC]
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

/// Options of an allreduce.
#[derive(Debug, Clone, Copy, Args)]
pub struct AllreduceArgs {
    /// How an allreduce moves what the ranks add.
    #[arg(long, value_enum, default_value = "ring")]
    pub algorithm: Algorithm,

    /// Most bytes of a piece: a piece is reduced while others are in flight.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "64K")]
    pub chunk: u64,

    /// Most pieces at the same time.
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub window: u32,
}

/// Options of a synchronous training.
#[derive(Debug, Clone, Args)]
pub struct SyncArgs {
    /// What is trained.
    #[command(flatten)]
    pub training: TrainingArgs,

    /// NIC and memory.
    #[command(flatten)]
    pub rank: RankArgs,

    /// The allreduce of gradients.
    #[command(flatten)]
    pub allreduce: AllreduceArgs,

    /// File or block device on which rank 0 writes checkpoints; accelerator memory is written by the drive itself.
    #[arg(long, value_name = "FILE")]
    pub checkpoint: Option<PathBuf>,

    /// Iterations between two checkpoints. The last iteration always has one.
    #[arg(long, value_name = "COUNT", default_value_t = 10, requires = "checkpoint",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub checkpoint_every: u64,

    /// Continue after the newest valid checkpoint; without one, begin.
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,
}

/// Options of an asynchronous training.
#[derive(Debug, Clone, Args)]
pub struct AsyncArgs {
    /// What is trained.
    #[command(flatten)]
    pub training: TrainingArgs,

    /// NIC and memory.
    #[command(flatten)]
    pub rank: RankArgs,

    /// Updates that a worker sends before the first reply.
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub window: u32,
}

/// Options of a pipeline.
#[derive(Debug, Clone, Args)]
pub struct PipelineArgs {
    /// What is trained.
    #[command(flatten)]
    pub training: TrainingArgs,

    /// NIC and memory.
    #[command(flatten)]
    pub rank: RankArgs,

    /// Equal parts of a batch, which the stages compute at the same time.
    #[arg(long, value_name = "COUNT", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=MAX_MICROBATCHES as i64))]
    pub microbatches: u32,
}

/// Options of a tensor-parallel training.
#[derive(Debug, Clone, Args)]
pub struct TensorArgs {
    /// What is trained. The number of layers is even.
    #[command(flatten)]
    pub training: TrainingArgs,

    /// NIC and memory.
    #[command(flatten)]
    pub rank: RankArgs,

    /// The allreduce of outputs and gradients.
    #[command(flatten)]
    pub allreduce: AllreduceArgs,
}

/// Options of a reference.
#[derive(Debug, Clone, Args)]
pub struct ReferenceArgs {
    /// What is trained.
    #[command(flatten)]
    pub training: TrainingArgs,

    /// Number of ranks whose result is computed.
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = ranks)]
    pub ranks: usize,

    /// Compute what `tensor` computes.
    #[arg(long)]
    pub tensor: bool,

    /// The algorithm of the allreduce, which decides the order of additions.
    #[arg(long, value_enum, default_value = "ring")]
    pub algorithm: Algorithm,
}

/// Options of `checkpoint`.
#[derive(Debug, Clone, Args)]
pub struct CheckpointArgs {
    /// The file or block device.
    pub file: PathBuf,

    /// Wait until the first slot of the file has a checkpoint of this iteration or a later one.
    #[arg(long, value_name = "ITERATION")]
    pub wait: Option<u64>,

    /// Longest wait.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, requires = "wait")]
    pub timeout: Duration,
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(ranks) if (1..=MAX_RANKS).contains(&ranks) => Ok(ranks),
        _ => Err(format!("specify a number of ranks, from 1 to {MAX_RANKS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn options_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_pipeline_has_its_options() {
        let parse = |option: &str| Cli::try_parse_from(["p2pmem-training", "pipeline", "--layers", "4", option]);
        let Command::Pipeline(args) = parse("--microbatches=8").unwrap().command else {
            panic!("another command")
        };
        assert_eq!((args.microbatches, args.training.layers), (8, 4));
        assert!(parse("--microbatches=0").is_err());
    }
}
