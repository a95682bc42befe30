// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::control::{ChannelRequest, PORT};
use crate::status::MemoryKind;

/// Record streams of blocks from accelerator memory on the drives of a storage node, and play them back
///
/// Run `p2pmem-recorder serve` on the storage node, and `p2pmem-recorder record` or `play` on the node with the accelerator.
/// Blocks go by RDMA from memory to memory, and from there to the drives. Both sides need the same token.
///
/// With `--engine nvmeof`, `record` and `play` use drives of other machines that the kernel of this machine attached by NVMe over
/// Fabrics with RDMA, and that are mounted here. No program runs on the other machines.
///
/// Sizes accept the units K, M, G (powers of 1024). Exit codes: 0 success, 1 error (printed), 2 invalid arguments.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-recorder", version, max_term_width = 100)]
pub struct Cli {
    /// Print JSON.
    #[arg(short = 'J', long, global = true)]
    pub json: bool,

    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Parses arguments, the first of which is the name of the program.
    ///
    /// # Errors
    ///
    /// The arguments are not valid, or help is requested.
    pub fn parse_checked(
        arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let cli = Self::try_parse_from(arguments)?;
        match &cli.command {
            Command::Record(args) => args.session.check()?,
            Command::Play(args) => args.session.check()?,
            _ => {}
        }
        Ok(cli)
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the drives of this machine, until a signal.
    Serve(ServeArgs),
    /// Record blocks that the processor computes and stores in device memory.
    Record(RecordArgs),
    /// Play a recording, and verify each block.
    Play(PlayArgs),
    /// List the channels of a storage node, or on drives that are mounted here, and their recordings.
    List(StorageArgs),
    /// Create and delete LUNs, while no other command uses their drives.
    #[command(subcommand)]
    Lun(LunCommand),
    /// Create and delete streams, while no other command uses their drives.
    #[command(subcommand)]
    Stream(StreamCommand),
}

/// The drives of a storage node.
#[derive(Debug, Clone, Args)]
pub struct DriveArgs {
    /// Folders where the drives are mounted, with ext4 or XFS.
    #[arg(long, required = true, value_delimiter = ',', value_name = "FOLDER")]
    pub drive: Vec<PathBuf>,
}

/// Options of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The drives.
    #[command(flatten)]
    pub drives: DriveArgs,

    /// NICs, which programs select by their number in this list.
    #[arg(long, required = true, value_delimiter = ',', value_name = "NIC")]
    pub nic: Vec<String>,

    /// Index of the GID to use; only relevant on Ethernet.
    #[arg(long, value_name = "INDEX", default_value_t = 0)]
    pub gid_index: u8,

    /// File with the token, which only its owner and its group can read.
    #[arg(long, value_name = "FILE")]
    pub token_file: PathBuf,

    /// Where to listen for control connections.
    #[arg(long, value_name = "ADDRESS:PORT", default_value_t = SocketAddr::from(([0, 0, 0, 0], PORT)))]
    pub listen: SocketAddr,

    /// Where to serve the management in the browser, such as 127.0.0.1:8080. Log in with the token. A reverse proxy adds TLS.
    #[cfg(feature = "web")]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub web: Option<SocketAddr>,

    /// Where to serve metrics to Prometheus, such as 127.0.0.1:9836. They need no login.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,

    /// The name of this node, for people [default: the host name]
    #[arg(long)]
    pub name: Option<String>,

    /// Memory for blocks between NIC and drive.
    #[arg(long, value_enum, default_value = "device")]
    pub memory: MemoryKind,

    /// Buffers of a session.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=256))]
    pub buffers: u32,

    /// End after this number of sessions [default: serve until a signal]
    #[arg(long, value_name = "N")]
    pub sessions: Option<u64>,

    /// Longest wait for a program or a drive.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
}

/// How blocks reach the drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// RDMA to the program of a storage node, which writes to its drives.
    Rdma,
    /// Reads and writes of this machine's kernel, which attached the drives by NVMe over Fabrics with RDMA.
    Nvmeof,
}

/// A storage node, or drives.
#[derive(Debug, Clone, Args)]
pub struct StorageArgs {
    /// Host name or address of the storage node, with the port if it is not 18700.
    #[arg(value_name = "HOST[:PORT]", required_unless_present = "drive")]
    pub host: Option<String>,

    /// File with the token, which only its owner and its group can read.
    #[arg(long, value_name = "FILE", required_unless_present = "drive")]
    pub token_file: Option<PathBuf>,

    /// Folders where drives are mounted on this machine, instead of a storage node and its token.
    #[arg(long, value_delimiter = ',', value_name = "FOLDER", conflicts_with_all = ["host", "token_file"])]
    pub drive: Vec<PathBuf>,

    /// Longest wait for the storage node or for a drive.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
}

/// Adds the default port to a host that has none.
pub fn with_port(host: &str) -> String {
    let has_port = match host.rsplit_once(':') {
        // An IPv6 address without brackets has no port.
        Some((rest, port)) => port.parse::<u16>().is_ok() && (!rest.contains(':') || rest.ends_with(']')),
        None => false,
    };
    match (has_port, host.contains(':') && !host.starts_with('[')) {
        (true, _) => host.to_owned(),
        (false, true) => format!("[{host}]:{PORT}"),
        (false, false) => format!("{host}:{PORT}"),
    }
}

/// Options of both directions.
#[derive(Debug, Clone, Args)]
pub struct SessionArgs {
    /// The storage node, or the drives.
    #[command(flatten)]
    pub storage: StorageArgs,

    /// How blocks reach the drives.
    #[arg(long, value_enum, default_value = "rdma", requires_if("nvmeof", "drive"))]
    pub engine: Engine,

    /// The channel, as LUN/STREAM/NUMBER. With several NICs, each uses the next number.
    #[arg(long, value_name = "CHANNEL", value_parser = channel)]
    pub channel: ChannelRequest,

    /// NICs of this machine, with a session each. Only for the engine rdma.
    #[arg(
        long,
        required_unless_present = "drive",
        conflicts_with = "drive",
        value_delimiter = ',',
        value_name = "NIC"
    )]
    pub nic: Vec<String>,

    /// Index of the GID to use; only relevant on Ethernet. Only for the engine rdma.
    #[arg(long, value_name = "INDEX", default_value_t = 0, conflicts_with = "drive")]
    pub gid_index: u8,

    /// Another storage node. The nodes take turns: each has a part of the blocks, or all of them with --mirror. Can be repeated. Only for
    /// the engine rdma.
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "drive")]
    pub also: Vec<String>,

    /// Each storage node has all blocks. If one fails, the others continue.
    #[arg(long, requires = "also", conflicts_with = "drive")]
    pub mirror: bool,

    /// Number of the storage node's NIC for the first session. The others use the next ones. Only for the engine rdma.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, conflicts_with = "drive")]
    pub node_nic: u32,

    /// Bytes of a block, as the stream has.
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = size)]
    pub block_size: u64,

    /// Buffers of a session.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=256))]
    pub buffers: u32,

    /// Memory of the blocks.
    #[arg(long, value_enum, default_value = "device")]
    pub memory: MemoryKind,

    /// The provider of the memory, by its number [default: the provider nearest to the NIC, which may be that of the drives]
    #[arg(long, value_name = "NUMBER")]
    pub provider: Option<u32>,

    /// The processor verifies each N-th block; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub verify: u64,
}

impl SessionArgs {
    /// Fails if the engine does not have what its options name.
    fn check(&self) -> Result<(), clap::Error> {
        // clap requires no option that conflicts with one that is present.
        let message = match (self.engine, self.storage.drive.is_empty()) {
            (Engine::Rdma, false) => {
                "--drive is for drives that are mounted on this machine: add --engine nvmeof, or name a storage node"
            }
            (Engine::Nvmeof, true) => "--engine nvmeof needs drives (--drive FOLDER) and no storage node",
            _ => return Ok(()),
        };
        Err(Cli::command().error(ErrorKind::ArgumentConflict, message))
    }
}

/// Options of `record`.
#[derive(Debug, Args)]
pub struct RecordArgs {
    /// Options of both directions.
    #[command(flatten)]
    pub session: SessionArgs,

    /// Number of blocks of each session.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1024)]
    pub blocks: u64,

    /// Most bytes in a second of each session, as a sensor has.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub rate: Option<u64>,
}

/// Options of `play`.
#[derive(Debug, Args)]
pub struct PlayArgs {
    /// Options of both directions.
    #[command(flatten)]
    pub session: SessionArgs,

    /// Number of the recording, on each storage node if there are several [default: the latest one]
    #[arg(long, value_delimiter = ',', value_name = "NUMBER")]
    pub recording: Vec<u64>,

    /// Most blocks to play [default: all]
    #[arg(short = 'n', long, value_name = "N")]
    pub blocks: Option<u64>,

    /// Start at the block with this sequence number, or the next one.
    #[arg(long, value_name = "SEQUENCE", conflicts_with = "from_time")]
    pub from_block: Option<u64>,

    /// Start at the first block of this time or later, in nanoseconds since 1970.
    #[arg(long, value_name = "TIME")]
    pub from_time: Option<u64>,

    /// Start again after the last block, until -n blocks were played.
    #[arg(long, requires = "blocks")]
    pub repeat: bool,

    /// Most bytes in a second.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub rate: Option<u64>,
}

/// Commands for LUNs.
#[derive(Debug, Subcommand)]
pub enum LunCommand {
    /// Create a LUN that is striped over the drives. Writes all of its bytes once.
    Create {
        /// The name.
        name: String,
        /// The drives.
        #[command(flatten)]
        drives: DriveArgs,
        /// Bytes of a segment. A recording uses whole segments.
        #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size)]
        segment_size: u64,
        /// Segments on each drive.
        #[arg(long, value_name = "N", default_value_t = 4)]
        segments: u64,
    },
    /// Delete a LUN with everything in it.
    Delete {
        /// The name.
        name: String,
        /// The drives.
        #[command(flatten)]
        drives: DriveArgs,
    },
    /// List LUNs, streams, and recordings.
    List {
        /// The drives.
        #[command(flatten)]
        drives: DriveArgs,
    },
}

/// Commands for streams.
#[derive(Debug, Subcommand)]
pub enum StreamCommand {
    /// Create a stream.
    Create {
        /// The name, as LUN/STREAM.
        #[arg(value_parser = stream)]
        name: (String, String),
        /// The drives.
        #[command(flatten)]
        drives: DriveArgs,
        /// Bytes of a block.
        #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = size)]
        block_size: u64,
        /// Number of channels.
        #[arg(long, value_name = "N", default_value_t = 1)]
        channels: u32,
    },
    /// Delete a stream with its recordings.
    Delete {
        /// The name, as LUN/STREAM.
        #[arg(value_parser = stream)]
        name: (String, String),
        /// The drives.
        #[command(flatten)]
        drives: DriveArgs,
    },
}

fn size(text: &str) -> Result<u64, String> {
    let bytes = parse_size::Config::new().with_binary().parse_size(text);
    bytes.map_err(|why| format!("{why}: specify a number of bytes, or a number with a unit, such as 64K, 2M, or 1GiB"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 1..=86400) => Ok(Duration::from_secs(seconds)),
        _ => Err("specify 1 to 86400 seconds".into()),
    }
}

fn stream(text: &str) -> Result<(String, String), String> {
    let (lun, stream) = text.split_once('/').ok_or("specify LUN/STREAM")?;
    Ok((lun.to_owned(), stream.to_owned()))
}

fn channel(text: &str) -> Result<ChannelRequest, String> {
    let parts: Vec<&str> = text.split('/').collect();
    let usage = "specify LUN/STREAM/NUMBER, such as fast/radar/0";
    let [lun, stream, number] = parts[..] else {
        return Err(usage.into());
    };
    Ok(ChannelRequest {
        lun: lun.to_owned(),
        stream: stream.to_owned(),
        channel: number.parse().map_err(|_| usage)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn hosts_get_the_default_port() {
        for (host, address) in [
            ("storage", "storage:18700"),
            ("storage:7", "storage:7"),
            ("10.0.0.1", "10.0.0.1:18700"),
            ("fd00::1", "[fd00::1]:18700"),
            ("[fd00::1]", "[fd00::1]:18700"),
            ("[fd00::1]:7", "[fd00::1]:7"),
        ] {
            assert_eq!(with_port(host), address, "{host}");
        }
    }

    fn parsed(arguments: &str) -> Result<Cli, clap::Error> {
        Cli::parse_checked(format!("p2pmem-recorder {arguments}").split_whitespace())
    }

    #[test]
    fn engines_have_their_own_options() {
        for valid in [
            "record storage --token-file t --channel a/b/0 --nic n",
            "record storage --engine rdma --token-file t --channel a/b/0 --nic n --also other --mirror",
            "record --engine nvmeof --drive /a,/b --channel a/b/0 -n 5 --rate 1M --buffers 4 --timeout 5 --provider 1",
            "play --engine nvmeof --drive /a --channel a/b/0 --from-block 7 --repeat -n 9 --verify 0 --memory host",
            "list storage --token-file t",
            "list --drive /a,/b",
        ] {
            parsed(valid).unwrap_or_else(|error| panic!("{valid}: {error}"));
        }
        let nvmeof = "--engine nvmeof --drive /a --channel a/b/0";
        for (invalid, reason) in [
            ("record --channel a/b/0".to_owned(), "required"),
            ("record storage --token-file t --channel a/b/0".to_owned(), "--nic"),
            ("record --engine nvmeof --channel a/b/0".to_owned(), "--drive"),
            (
                "record storage --engine nvmeof --token-file t --nic n --channel a/b/0".to_owned(),
                "--drive",
            ),
            ("record --drive /a --channel a/b/0".to_owned(), "add --engine nvmeof"),
            (
                "play --engine rdma --drive /a --channel a/b/0".to_owned(),
                "add --engine nvmeof",
            ),
            (format!("record storage {nvmeof}"), "HOST[:PORT]"),
            (format!("record {nvmeof} --token-file t"), "--token-file"),
            (format!("record {nvmeof} --nic n"), "--nic"),
            (format!("record {nvmeof} --gid-index 1"), "--gid-index"),
            (format!("record {nvmeof} --node-nic 1"), "--node-nic"),
            (format!("record {nvmeof} --also other"), "--also"),
            (format!("record {nvmeof} --also other --mirror"), "--also"),
            (format!("record {nvmeof} --mirror"), "--mirror"),
            (format!("play {nvmeof} --nic n"), "--nic"),
            ("list storage --token-file t --drive /a".to_owned(), "--drive"),
            ("list".to_owned(), "required"),
        ] {
            let error = parsed(&invalid).expect_err(&invalid);
            assert_eq!(error.exit_code(), 2, "{invalid}");
            assert!(error.to_string().contains(reason), "{invalid}: {error}");
        }
    }

    #[test]
    fn channels_have_three_parts() {
        assert_eq!(channel("fast/radar/3").unwrap().channel, 3);
        for bad in ["fast", "fast/radar", "fast/radar/x", "fast/radar/-1", "a/b/0/c"] {
            assert!(channel(bad).is_err(), "{bad}");
        }
    }
}
