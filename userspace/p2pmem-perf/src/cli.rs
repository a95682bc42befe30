// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::sizes::{messages, size, Sizes};
use crate::wire::{Mode, Test};

/// The TCP port of the bootstrap.
pub const PORT: u16 = 18520;

/// Measure RDMA between two nodes, from and to host memory and accelerators' memory.
///
/// One node runs `p2pmem-perf serve`, the other `p2pmem-perf run HOST`. The client says what is tried; each side says
/// what its own memory is. Messages go over a reliable connection of each NIC; addresses are exchanged over TCP.
///
/// Sizes take the units K, M, G (powers of 1024). Exit codes: 0 done, 1 failed (the reason is printed) or wrong bytes,
/// 2 bad usage.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-perf", version, max_term_width = 100)]
pub struct Cli {
    /// Print JSON.
    #[arg(long, global = true)]
    pub json: bool,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Wait for a client, and do with it what it asks for.
    Serve(ServeArgs),
    /// Connect to a server, and measure.
    Run(RunArgs),
    /// Measure what it costs to register memory, without a server.
    Register(RegisterArgs),
    /// Have a buffer end while its registration is kept, for stale-run.
    StaleServe(StaleServeArgs),
    /// Try to write into a stale-serve's buffer after its end: every write has to be refused.
    StaleRun(StaleRunArgs),
}

/// What memory the payload is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Host memory.
    Cpu,
    /// A p2pmem buffer near the NIC, registered as a dma-buf where the kernel wants that.
    Accelerator,
    /// A p2pmem buffer of a provider without struct pages: only RDMA and dma-bufs reach it.
    Pageless,
}

impl Kind {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Accelerator => "accelerator",
            Self::Pageless => "pageless",
        }
    }
}

/// This side's part of a test.
#[derive(Debug, Clone, Args)]
pub struct OwnArgs {
    /// NICs, each with a connection of its own; default: the first with an active port.
    #[arg(long, value_delimiter = ',', value_name = "NIC")]
    pub nic: Vec<String>,

    /// Where the payload is on this side.
    #[arg(long, value_enum, default_value = "cpu")]
    pub memory: Kind,

    /// The provider whose memory it is, by id or PCI address; default: the one nearest to the NIC.
    #[arg(long, value_name = "PROVIDER")]
    pub provider: Option<String>,

    /// The module's device.
    #[arg(long, value_name = "PATH", default_value = p2pmem::DEFAULT_PATH)]
    pub device: PathBuf,

    /// Index of the GID to use, which matters on Ethernet only.
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    pub gid_index: u8,

    /// Sleep until a completion comes, instead of asking for it all the time.
    #[arg(long)]
    pub events: bool,

    /// Longest wait for anything: the other side, or a completion.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
}

/// What the server needs to know.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// This side's part.
    #[command(flatten)]
    pub own: OwnArgs,

    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    pub listen: String,

    /// TCP port to listen on.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,

    /// Memory that a client may ask for, for each NIC.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4G")]
    pub most: u64,

    /// Serve one client after the other, without an end.
    #[arg(long)]
    pub forever: bool,
}

/// What the client needs to know.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The server.
    pub host: String,

    /// This side's part.
    #[command(flatten)]
    pub own: OwnArgs,

    /// TCP port of the server.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,

    /// What messages do.
    #[arg(long, value_enum, default_value = "write")]
    pub mode: Mode,

    /// Sizes of messages, as 2M or 4K,64K or 4K-64M (each twice the one before).
    #[arg(long, value_name = "SIZES", default_value = "2M", value_parser = messages)]
    pub size: Sizes,

    /// Messages of each size, by each NIC.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 2000)]
    pub iters: u64,

    /// Move no more than so many bytes of each size by each NIC.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub volume: Option<u64>,

    /// Messages in flight at once.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub depth: u32,

    /// Memory for messages of a size on each side, unless two messages are larger.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "32M")]
    pub buffer: u64,

    /// Hand each write over: the server says when it has handled it, and the client asks for that by RDMA READ.
    #[arg(long)]
    pub handshake: bool,

    /// Move the payload through host memory on both sides, copied by the processor. Hands each write over, too.
    #[arg(long)]
    pub staged: bool,

    /// Compare every byte of the target afterwards.
    #[arg(long)]
    pub verify: bool,

    /// Seed of the payload.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl RunArgs {
    /// The test for that many NICs.
    pub fn test(&self, nics: usize) -> Test {
        Test {
            mode: self.mode,
            sizes: self.size.0.clone(),
            iterations: self.iters,
            volume: self.volume,
            depth: self.depth,
            budget: self.buffer,
            handshake: self.handshake,
            staged: self.staged,
            verify: self.verify,
            seed: self.seed,
            nics,
        }
    }
}

/// What registering is measured with.
#[derive(Debug, Args)]
pub struct RegisterArgs {
    /// The NIC; default: the first with an active port.
    #[arg(long)]
    pub nic: Option<String>,

    /// Kinds of memory to register.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cpu,accelerator")]
    pub memory: Vec<Kind>,

    /// The provider of what is not host memory, by id or PCI address; default: the one nearest to the NIC.
    #[arg(long, value_name = "PROVIDER")]
    pub provider: Option<String>,

    /// The module's device.
    #[arg(long, value_name = "PATH", default_value = p2pmem::DEFAULT_PATH)]
    pub device: PathBuf,

    /// Instead of kinds of memory: a mapping of this file or device, registered by ibv_reg_mr().
    #[arg(long, value_name = "PATH", conflicts_with_all = ["memory", "provider"])]
    pub mmap: Option<PathBuf>,

    /// Sizes of the memory.
    #[arg(long, value_name = "SIZES", default_value = "2M-256M")]
    pub size: Sizes,

    /// Registrations of each size.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub iters: u32,
}

/// Whose buffer is to end, and how.
#[derive(Debug, Args)]
pub struct StaleServeArgs {
    /// This side's part.
    #[command(flatten)]
    pub own: OwnArgs,

    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    pub listen: String,

    /// TCP port to listen on.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,

    /// Shell command that ends the buffer, as: p2pmemctl unpublish 0000:03:00.0
    #[arg(long, value_name = "COMMAND")]
    pub end: String,
}

/// Who tries to write.
#[derive(Debug, Args)]
pub struct StaleRunArgs {
    /// The server.
    pub host: String,

    /// This side's part.
    #[command(flatten)]
    pub own: OwnArgs,

    /// TCP port of the server.
    #[arg(long, default_value_t = PORT)]
    pub port: u16,

    /// Writes to try.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub attempts: u32,

    /// Seed of the words that are written.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number of seconds".to_owned())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(limit) if limit >= Duration::from_millis(1) && limit <= Duration::from_secs(86400) => Ok(limit),
        _ => Err("give a number of seconds, from 0.001 to 86400".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_default_is_2000_writes_of_2_mib() {
        let cli = Cli::try_parse_from(["p2pmem-perf", "run", "host"]).unwrap();
        let Command::Run(args) = cli.command else {
            panic!("not run")
        };
        let test = args.test(1);
        assert_eq!(
            (test.mode, test.sizes.as_slice(), test.iterations),
            (Mode::Write, &[2 << 20][..], 2000)
        );
        assert_eq!(test.check(), Ok(()));
        assert_eq!(args.own.memory, Kind::Cpu);
    }

    #[test]
    fn lists_are_split_at_commas() {
        let argv = ["p2pmem-perf", "serve", "--nic", "mlx5_0,mlx5_1", "--memory", "pageless"];
        let Command::Serve(args) = Cli::try_parse_from(argv).unwrap().command else {
            panic!("not serve")
        };
        assert_eq!(args.own.nic, ["mlx5_0", "mlx5_1"]);
        assert_eq!(args.own.memory.name(), "pageless");
    }

    #[test]
    fn limits_are_finite_and_not_zero() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "x", "NaN", "inf", "1e9"] {
            assert!(seconds(text).unwrap_err().contains("seconds"), "{text}");
        }
    }
}
