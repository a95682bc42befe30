// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use p2pmem::rules::{Action, Beneficiary};
use p2pmem::PathClass;

/// Manage PCI peer-to-peer memory.
///
/// Devices are named by PCI address (0000:03:00.0 or 03:00.0), by the name of an RDMA device (mlx5_0) or an NVMe drive
/// (nvme0, nvme0n1, /dev/nvme0n1), or by a folder in /sys. Sizes take the units K, M, G, T (powers of 1024).
///
/// Exit codes: 0 done, 1 refused (the reason is printed), 2 bad usage.
#[derive(Debug, Parser)]
#[command(name = "p2pmemctl", version, max_term_width = 100)]
pub struct Cli {
    /// Print JSON.
    #[arg(long, global = true)]
    pub json: bool,

    /// The module's device.
    #[arg(long, global = true, value_name = "PATH", default_value = p2pmem::DEFAULT_PATH)]
    pub device: PathBuf,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the providers.
    List,
    /// Show how far each provider is from each client, as a matrix.
    Topo(TopoArgs),
    /// Publish a device's memory: the device becomes a provider.
    Publish(PublishArgs),
    /// Take a published device's memory back; buffers in it are revoked.
    Unpublish(UnpublishArgs),
    /// Say who may have memory of which provider, how near, and how much.
    Rules {
        /// What to do with rules.
        #[command(subcommand)]
        command: RulesCommand,
    },
    /// Make rules and providers those that files say: what the system does when it starts.
    Apply(ApplyArgs),
    /// Allocate a buffer and say where it landed.
    Alloc(AllocArgs),
    /// Say where a buffer would land and why, without allocating it.
    Explain(RequestArgs),
    /// Show counters.
    Stats(StatsArgs),
    /// Watch providers, how fast their use changes, and who holds buffers.
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// Write patterns to a provider's memory and read them back.
    Selftest(SelftestArgs),
    /// Print events as they come.
    Events(EventsArgs),
    /// List devices with memory that programs can use, the sources of that memory, and devices that can use it.
    ///
    /// Works without the module and without privileges.
    Scan(ScanArgs),
    /// Check everything that peer-to-peer memory needs on this machine.
    Doctor,
}

/// What `scan` shows.
#[derive(Debug, Args)]
pub struct ScanArgs {
    /// Show all sources of each device's memory, also those that cannot be used, and the reason.
    #[arg(long)]
    pub all: bool,
}

/// What `topo` shows.
#[derive(Debug, Args)]
pub struct TopoArgs {
    /// The clients; default: all storage, network and InfiniBand devices and accelerators of this machine.
    #[arg(value_name = "CLIENT")]
    pub clients: Vec<String>,

    /// Have the module read all paths again, for example after setpci has changed ACS.
    #[arg(long)]
    pub rescan: bool,
}

/// What to publish.
#[derive(Debug, Args)]
pub struct PublishArgs {
    /// The device.
    pub device_name: String,

    /// The BAR; default: the largest 64-bit prefetchable one.
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..6))]
    pub bar: Option<u32>,

    /// First byte in the BAR.
    #[arg(long, value_parser = size)]
    pub offset: Option<u64>,

    /// Bytes; default: to the BAR's end.
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,

    /// How it can be reached.
    #[arg(long)]
    pub mode: Option<Mode>,

    /// Bytes left to the kernel's own users, such as nvmet.
    #[arg(long, value_parser = size)]
    pub kernel_reserve: Option<u64>,

    /// Allow exports to importers that cannot be revoked: they can keep the device from being unbound.
    #[arg(long)]
    pub pinned_exports: bool,

    /// Take the device from the driver that has it.
    #[arg(long)]
    pub force: bool,
}

/// How a provider's memory can be reached.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Mode {
    /// With struct pages: it can be mapped, and O_DIRECT works.
    Paged,
    /// Without, which costs no memory: for dma-bufs and the CPU, O_DIRECT does not work.
    Pageless,
}

/// What to take back.
#[derive(Debug, Args)]
pub struct UnpublishArgs {
    /// The device.
    pub device_name: String,

    /// Then let the kernel find the device its own driver again.
    #[arg(long)]
    pub reprobe: bool,
}

/// What to do with rules.
#[derive(Debug, Subcommand)]
pub enum RulesCommand {
    /// List the rules in the order in which they are looked at, with what counts under each.
    List,
    /// Make a rule.
    Add(RuleArgs),
    /// End rules; no buffer is lost.
    Remove {
        /// Their names.
        #[arg(required = true)]
        names: Vec<String>,

        /// Also those under which something counts: that counts under the rules that come next.
        #[arg(long)]
        force: bool,
    },
    /// Make rules from files, all or none.
    Load {
        /// The files; default: /etc/p2pmem/*.toml.
        files: Vec<PathBuf>,

        /// End all rules that are not in the files.
        #[arg(long)]
        only: bool,
    },
    /// Write the rules as a file that `load` takes.
    Save {
        /// The file; default: standard output.
        file: Option<PathBuf>,
    },
    /// Check files, or say what a user would get under the rules in force and which rule decides.
    Test(RulesTestArgs),
}

/// A rule.
#[derive(Debug, Args)]
pub struct RuleArgs {
    /// Its name: two digits for its place, a dash, and what it is about.
    pub name: String,

    /// It is about this provider alone: a device, or vendor:device (15b3:101b).
    #[arg(long, value_name = "DEVICE")]
    pub provider: Option<String>,

    /// It is about this client alone.
    #[arg(long, value_name = "DEVICE")]
    pub client: Option<String>,

    /// It is about these users alone: names, numbers, ranges as 100000-165535, and subordinate:USER (subuid(5)), with commas.
    #[arg(long, value_name = "USERS")]
    pub uid: Option<String>,

    /// It is about the members of this group alone: a name or a number.
    #[arg(long, value_name = "GROUP")]
    pub gid: Option<String>,

    /// allow, deny, prefer or avoid.
    #[arg(long)]
    pub action: Option<Action>,

    /// The farthest path allowed: DEV, SW, SWS, PHB, NODE or SYS.
    #[arg(long, value_name = "CLASS")]
    pub max_class: Option<PathClass>,

    /// What each user may hold.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub quota: Option<u64>,

    /// What the members of the group, or the users of --uid, may hold together.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub group_quota: Option<u64>,

    /// What is set aside in each provider.
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "reserve_for")]
    pub reserve: Option<u64>,

    /// The beneficiary: kernel or group.
    #[arg(long, value_name = "WHO")]
    pub reserve_for: Option<Beneficiary>,

    /// Do not put it into force yet.
    #[arg(long)]
    pub disabled: bool,
}

/// What to test.
#[derive(Debug, Args)]
pub struct RulesTestArgs {
    /// Check these files.
    #[arg(long, value_name = "FILE")]
    pub file: Vec<PathBuf>,

    /// Ask in the name of this user: a name or a number.
    #[arg(long, value_name = "USER")]
    pub uid: Option<String>,

    /// Ask in the name of this group: a name or a number.
    #[arg(long, value_name = "GROUP")]
    pub gid: Option<String>,

    /// Ask for a buffer of this size.
    #[arg(value_parser = size, required_unless_present = "file")]
    pub size: Option<u64>,

    /// Where it has to be.
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// What to apply.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// The files; default: /etc/p2pmem/*.toml.
    pub files: Vec<PathBuf>,
}

/// What a buffer has to be.
#[derive(Debug, Args)]
pub struct RequestArgs {
    /// Its size.
    #[arg(value_parser = size)]
    pub size: u64,

    /// Where it has to be.
    #[command(flatten)]
    pub place: PlaceArgs,
}

/// Where a buffer has to be.
#[derive(Debug, Args)]
pub struct PlaceArgs {
    /// A device that will do DMA with it; give it once for each, or separated by commas.
    #[arg(long, value_name = "CLIENT", value_delimiter = ',')]
    pub near: Vec<String>,

    /// Its alignment in the BAR, a power of two.
    #[arg(long, value_parser = size, default_value = "0", hide_default_value = true)]
    pub align: u64,

    /// Who chooses the provider.
    #[arg(long, default_value = "nearest")]
    pub strategy: Strategy,

    /// With `--strategy stripe`: how many providers to divide it among, 16 at most. Default: as many as can hold a part.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub parts: u32,

    /// The one provider to take: its id, or its device.
    #[arg(long, value_name = "PROVIDER", conflicts_with = "prefer")]
    pub provider: Option<String>,

    /// The provider to try first: its id, or its device.
    #[arg(long, value_name = "PROVIDER")]
    pub prefer: Option<String>,

    /// The farthest path allowed: DEV, SW, SWS, PHB, NODE or SYS (`topo` explains them).
    #[arg(long, value_name = "CLASS")]
    pub max_class: Option<PathClass>,
}

/// Who chooses the provider.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Strategy {
    /// The module: path class, hops, bandwidth, NUMA, load.
    Nearest,
    /// The kernel's own pci_p2pmem_find_many().
    Upstream,
    /// The least loaded provider that can serve, however far it is.
    Spread,
    /// The most loaded provider that can serve, so that others stay empty.
    Pack,
    /// Several providers, each with an equal part.
    Stripe,
}

/// What to allocate, and what then.
#[derive(Debug, Args)]
pub struct AllocArgs {
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,

    /// Fill it with this byte (0x for hexadecimal).
    #[arg(long, value_name = "BYTE", value_parser = byte)]
    pub fill: Option<u8>,

    /// Keep it until Enter or a signal, or until it is revoked.
    #[arg(long)]
    pub hold: bool,

    /// Keep it while a command runs, whose environment says where it is: P2PMEM_PROVIDER, P2PMEM_PROVIDER_ADDR,
    /// P2PMEM_SIZE, P2PMEM_BAR_OFFSET.
    #[arg(long, value_name = "COMMAND", num_args = 1.., allow_hyphen_values = true, conflicts_with = "hold")]
    pub exec: Vec<String>,
}

/// Whose counters.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// One provider only: its id, or its device.
    #[arg(long)]
    pub provider: Option<String>,
}

/// How to watch.
#[cfg(feature = "top")]
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Seconds between looks.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    pub interval: Duration,

    /// End after so many looks; default: with the key q.
    #[arg(long)]
    pub count: Option<u64>,
}

/// What to test.
#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// The provider: its id, or its device.
    #[arg(long)]
    pub provider: String,

    /// Bytes to test; default: its largest free piece, at most 64M.
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,

    /// Register them with this NIC too, as mlx5_0.
    #[arg(long)]
    pub nic: Option<String>,
}

/// How long to follow events.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// End after so many events.
    #[arg(long)]
    pub count: Option<u64>,

    /// End after so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

/// Parses a size such as `16M`, `1GiB` or `4096`: units are powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    parse_size::Config::new()
        .with_binary()
        .parse_size(text)
        .map_err(|why| format!("{why}: give a number of bytes, or one with a unit, such as 64K, 16M or 1GiB"))
}

fn byte(text: &str) -> Result<u8, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u8::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "give a byte, 0 to 255 or 0x00 to 0xff".into())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|why| why.to_string())
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
    fn sizes_are_binary() {
        for (text, bytes) in [
            ("4096", 4096),
            ("16M", 16 << 20),
            ("16MiB", 16 << 20),
            ("1g", 1 << 30),
            ("1.5K", 1536),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "12Q", "1e99", "99999999999999999999"] {
            assert!(size(text).unwrap_err().contains("such as 64K"), "{text}");
        }
    }

    #[test]
    fn bytes_and_seconds() {
        assert_eq!((byte("0xfe"), byte("7")), (Ok(0xfe), Ok(7)));
        assert!(byte("256").is_err());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").is_err() && seconds("x").is_err() && seconds("NaN").is_err());
    }
}
