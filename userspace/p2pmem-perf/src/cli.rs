// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::value::{seconds, size};

#[cfg(feature = "web")]
use crate::gauge::GaugeArgs;
use crate::matrix::MatrixArgs;
use crate::plot::PlotArgs;
use crate::rpc::RpcArgs;
use crate::sizes::{messages, window, Sizes};
use crate::stream::StreamArgs;
use crate::waiter::How;
use crate::wire::{Mode, PeerMemory, Test};

/// The TCP port of the bootstrap.
pub const PORT: u16 = 18520;

/// Measure RDMA between two nodes, from and to host memory and accelerators' memory.
///
/// Run `p2pmem-perf serve` on one node and `p2pmem-perf run HOST` on the other. The client chooses the test, and with
/// --peer-memory also the server's memory. Each NIC uses one reliable connection; both sides exchange addresses over
/// TCP.
///
/// Sizes accept the units K, M, G (powers of 1024). Exit codes: 0 success, 1 error (printed) or wrong bytes,
/// 2 invalid arguments.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-perf", version, max_term_width = 100)]
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
    /// Wait for a client, and run the test that the client requests.
    Serve(ServeArgs),
    /// Connect to a server, and measure.
    Run(RunArgs),
    /// Measure every pair of memories by every mode, relative to the link.
    Matrix(MatrixArgs),
    /// Compare two-sided calls with one-sided ones: latency, and processor time of client and server.
    Rpc(RpcArgs),
    /// Stream frames of samples to a server, and print the rolling average of the rate.
    Stream(StreamArgs),
    /// Serve a page in the browser that starts measurements and shows their rates.
    #[cfg(feature = "web")]
    Gauge(GaugeArgs),
    /// Draw a JSON report as SVG.
    Plot(PlotArgs),
    /// Measure the time of memory registrations, without a server.
    Register(RegisterArgs),
    /// End a buffer while its registration is kept, for stale-run.
    StaleServe(StaleServeArgs),
    /// Try to write to the buffer of stale-serve after its end: the NIC must reject every write.
    StaleRun(StaleRunArgs),
}

/// Options of either side of a test that do not concern the memory of the messages.
#[derive(Debug, Clone, Args)]
pub struct SideArgs {
    /// NICs, with one connection each [default: the first NIC with an active port]
    #[arg(long, value_delimiter = ',', value_name = "NIC")]
    pub nic: Vec<String>,

    /// Device file of p2pmem.
    #[arg(long, value_name = "PATH", env = "P2PMEM_DEV_PATH", hide_env_values = true,
          default_value = p2pmem::DEFAULT_PATH)]
    pub dev_path: PathBuf,

    /// Index of the GID to use; only relevant on Ethernet.
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    pub gid_index: u8,

    /// Sleep until a completion arrives, instead of polling.
    #[arg(long)]
    pub events: bool,

    /// Poll for 50 microseconds, then sleep until a completion arrives.
    #[arg(long, conflicts_with = "events")]
    pub adaptive: bool,

    /// Longest wait for the other side or for a completion.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
}

/// Options of either side of a test.
#[derive(Debug, Clone, Args)]
pub struct OwnArgs {
    /// Options that do not concern the memory.
    #[command(flatten)]
    pub side: SideArgs,

    /// Kind of memory for the payload on this side.
    #[arg(long, value_enum, default_value = "cpu")]
    pub memory: MemoryKind,

    /// The provider of the memory, by id or PCI address [default: the provider nearest to the NIC]
    #[arg(long)]
    pub device: Option<String>,
}

impl SideArgs {
    /// Returns how this side waits for completions.
    pub fn how(&self) -> How {
        match (self.events, self.adaptive) {
            (true, _) => How::Events,
            (false, true) => How::Adaptive,
            (false, false) => How::Poll,
        }
    }

    /// Sets how this side waits for completions.
    pub fn set_how(&mut self, how: How) {
        self.events = how == How::Events;
        self.adaptive = how == How::Adaptive;
    }
}

/// Options of the server.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Options of this side.
    #[command(flatten)]
    pub own: OwnArgs,

    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    pub listen: String,

    /// TCP port to listen on.
    #[arg(long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,

    /// Maximum memory per NIC for a client. Messages that do not fit move through a window.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "4G")]
    pub most: u64,

    /// Serve one client after another, until the program is interrupted.
    #[arg(long)]
    pub forever: bool,

    /// Allow clients to use --mode ucx. UCX trusts the bytes of the client: a malicious client can corrupt this process.
    #[arg(long)]
    pub ucx: bool,
}

/// Options of the client.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// The server.
    pub host: String,

    /// Options of this side.
    #[command(flatten)]
    pub own: OwnArgs,

    /// TCP port of the server.
    #[arg(long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,

    /// Kind of memory for the payload on the server [default: the server's own --memory]
    #[arg(long, value_enum, value_name = "MEMORY")]
    pub peer_memory: Option<MemoryKind>,

    /// The provider of the server's memory, by id or PCI address [default: the provider nearest to the server's NIC]
    #[arg(long, value_name = "DEVICE", requires = "peer_memory")]
    pub peer_device: Option<String>,

    /// How the server waits for completions [default: as its own options say]
    #[arg(long, value_enum, value_name = "HOW")]
    pub peer_waits: Option<How>,

    /// How the messages move.
    #[arg(long, value_enum, default_value = "write")]
    pub mode: Mode,

    /// Message sizes, such as 2M, 4K,64K, or 4K-64M (each twice the size before).
    #[arg(long, value_name = "SIZES", default_value = "2M", value_parser = messages)]
    pub size: Sizes,

    /// Number of messages of each size, per NIC.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 2000)]
    pub iters: u64,

    /// Maximum number of bytes of each size, per NIC.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub volume: Option<u64>,

    /// Maximum number of messages in flight.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub depth: u32,

    /// Number of requests to post with one doorbell [default: all that may be in flight]
    #[arg(long, value_name = "N")]
    pub batch: Option<u32>,

    /// Memory for the messages of one size on each side. Two messages always fit, also if they are larger.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "32M")]
    pub buffer: u64,

    /// Cut each message into chunks of this size [default: only messages that do not fit the memory, into chunks of the
    /// largest power of two that fits]
    #[arg(long, value_name = "SIZE", value_parser = window)]
    pub window: Option<u64>,

    /// Acknowledge each write: the server counts handled messages, and the client reads the counter by RDMA READ.
    #[arg(long)]
    pub handshake: bool,

    /// Copy the payload through host memory on both sides, by the processor. Implies --handshake.
    #[arg(long)]
    pub staged: bool,

    /// Compare every byte of the target after the messages.
    #[arg(long)]
    pub verify: bool,

    /// Seed of the pattern.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl RunArgs {
    /// Returns the options of a run against a server, with all defaults.
    pub fn to(host: &str) -> Self {
        #[derive(Parser)]
        struct Defaults {
            #[command(flatten)]
            run: RunArgs,
        }
        // Any host is valid, so this does not end the program.
        Defaults::parse_from(["p2pmem-perf", "--", host]).run
    }

    /// The test for that many NICs.
    pub fn test(&self, nics: usize) -> Test {
        Test {
            mode: self.mode,
            sizes: self.size.0.clone(),
            iterations: self.iters,
            volume: self.volume,
            depth: self.depth,
            batch: self.batch,
            budget: self.buffer,
            handshake: self.handshake,
            staged: self.staged,
            verify: self.verify,
            window: self.window,
            // The client sets it before it sends the test.
            space: 0,
            seed: self.seed,
            nics,
            peer: self.peer_memory.map(|kind| PeerMemory {
                kind: kind.name().to_owned(),
                device: self.peer_device.clone(),
            }),
            peer_waits: self.peer_waits,
        }
    }
}

/// Options of `register`.
#[derive(Debug, Args)]
pub struct RegisterArgs {
    /// The NIC [default: the first NIC with an active port]
    #[arg(long)]
    pub nic: Option<String>,

    /// Kinds of memory to register.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cpu,accelerator")]
    pub memory: Vec<MemoryKind>,

    /// The provider of device memory, by id or PCI address [default: the provider nearest to the NIC]
    #[arg(long)]
    pub device: Option<String>,

    /// Device file of p2pmem.
    #[arg(long, value_name = "PATH", env = "P2PMEM_DEV_PATH", hide_env_values = true,
          default_value = p2pmem::DEFAULT_PATH)]
    pub dev_path: PathBuf,

    /// Register a mapping of this file or device by ibv_reg_mr(), instead of the kinds of memory.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["memory", "device"])]
    pub mmap: Option<PathBuf>,

    /// Sizes of the memory.
    #[arg(long, value_name = "SIZES", default_value = "2M-256M")]
    pub size: Sizes,

    /// Number of registrations of each size.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub iters: u32,
}

/// Options of `stale-serve`.
#[derive(Debug, Args)]
pub struct StaleServeArgs {
    /// Options of this side.
    #[command(flatten)]
    pub own: OwnArgs,

    /// Address to listen on.
    #[arg(long, default_value = "0.0.0.0")]
    pub listen: String,

    /// TCP port to listen on.
    #[arg(long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,

    /// Shell command that ends the buffer, such as: p2pmemctl unpublish 0000:03:00.0
    #[arg(long, value_name = "COMMAND")]
    pub end: String,
}

/// Options of `stale-run`.
#[derive(Debug, Args)]
pub struct StaleRunArgs {
    /// The server.
    pub host: String,

    /// Options of this side.
    #[command(flatten)]
    pub own: OwnArgs,

    /// TCP port of the server.
    #[arg(long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,

    /// Number of writes to try.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub attempts: u32,

    /// Seed of the marker words.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_valid() {
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
        assert_eq!(args.own.memory, MemoryKind::Cpu);
    }

    #[test]
    fn lists_are_split_at_commas() {
        let argv = ["p2pmem-perf", "serve", "--nic", "mlx5_0,mlx5_1", "--memory", "pageless"];
        let Command::Serve(args) = Cli::try_parse_from(argv).unwrap().command else {
            panic!("not serve")
        };
        assert_eq!(args.own.side.nic, ["mlx5_0", "mlx5_1"]);
        assert_eq!(args.own.memory.name(), "pageless");
    }

    #[test]
    fn a_device_of_the_server_needs_its_kind() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        let Command::Run(args) = parse("p2pmem-perf run host --peer-memory cmb --peer-device 3")
            .unwrap()
            .command
        else {
            panic!("not run")
        };
        let peer = args.test(1).peer.unwrap();
        assert_eq!((peer.kind.as_str(), peer.device.as_deref()), ("cmb", Some("3")));
        let error = parse("p2pmem-perf run host --peer-device 3").unwrap_err().to_string();
        assert!(error.contains("--peer-memory"), "{error}");
        let error = parse("p2pmem-perf run host --peer-memory tape")
            .unwrap_err()
            .to_string();
        assert!(error.contains("fpga"), "{error}");
    }
}
