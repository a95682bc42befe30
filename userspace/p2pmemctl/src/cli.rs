// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use p2pmem::rules::{Action, Beneficiary};
use p2pmem::PathClass;

use crate::table::{help, TableArgs};
use crate::{alloc, doctor, list, scan, topo};

/// Manage PCI peer-to-peer memory.
///
/// A device name is a PCI address (0000:03:00.0 or 03:00.0), an RDMA device (mlx5_0), an NVMe drive (nvme0, nvme0n1,
/// /dev/nvme0n1), or a folder in /sys. A provider also has an id, which `list` shows. Sizes accept the units K, M, G, T
/// (powers of 1024).
///
/// Exit codes: 0 success, 1 error or refusal (the reason is printed), 2 invalid arguments.
#[derive(Debug, Parser)]
#[command(name = "p2pmemctl", version, max_term_width = 100)]
pub struct Cli {
    /// Print JSON: an object whose member `schema` is the version of the others. Sizes are in bytes.
    #[arg(short = 'J', long, global = true)]
    pub json: bool,

    /// Device file of p2pmem.
    #[arg(long, global = true, value_name = "PATH", env = "P2PMEM_DEV_PATH", hide_env_values = true,
          default_value = p2pmem::DEFAULT_PATH, value_hint = ValueHint::FilePath)]
    pub dev_path: PathBuf,

    /// Colors of the output.
    #[command(flatten)]
    pub color: colorchoice_clap::Color,

    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the providers.
    #[command(after_help = help::<p2pmem::Provider>("Columns"))]
    List(ListArgs),
    /// Show the path class between each provider and each client, as a matrix.
    ///
    /// If the module is not loaded, or this user may not open its device, the matrix has all devices with memory. Its
    /// heading says how the kernel can decide otherwise.
    ///
    /// With --svg, draw the machine: host bridges, switches, devices with memory, and clients.
    #[command(after_help = help::<topo::PathRow>("Columns of --list"))]
    Topo(TopoArgs),
    /// Publish a device's memory: the device becomes a provider.
    Publish(PublishArgs),
    /// Remove a published device from the providers. Its buffers are revoked.
    Unpublish(UnpublishArgs),
    /// Manage the rules, which limit memory by user, client, distance, and size.
    Rules {
        /// The command for rules.
        #[command(subcommand)]
        command: RulesCommand,
    },
    /// Apply files with rules and devices to publish, as the system does when it starts.
    ///
    /// Rules that are not in the files are removed, except those of running jobs of Slurm.
    Apply(ApplyArgs),
    /// Let Slurm hand out the memory of providers, and hold jobs to what they got.
    ///
    /// The memory is a generic resource (GRES), whose unit is a byte: `sbatch --gres=p2pmem:64M`.
    Slurm {
        /// The command for Slurm.
        #[command(subcommand)]
        command: SlurmCommand,
    },
    /// Allocate a buffer and show its provider.
    Alloc(AllocArgs),
    /// Run a command with its p2pmem memory near devices.
    ///
    /// Each mapping of /dev/p2pmem that the command and its children create (at offset 0, as unmodified programs do)
    /// gets memory near the devices, and ibv_reg_mr() of this memory works. If there is no such memory, the mapping
    /// fails; no memory is taken elsewhere. When the command has ended, a summary on standard error shows what it took.
    ///
    /// The exit code is that of the command, 128 and the number of the signal that ended the command, 125 if p2pmemctl
    /// itself fails, 126 if the command cannot be executed, and 127 if it was not found. SIGHUP, SIGINT, SIGQUIT, SIGTERM,
    /// SIGUSR1, and SIGUSR2 are forwarded to the command.
    Run(crate::run::RunArgs),
    /// Show which provider a buffer would get and why, without an allocation.
    ///
    /// With --what-if, the decision is made over all devices with memory, as if they were published. SOURCE is the
    /// interface that would hand out the memory, and USABLE whether it can be used now. Providers keep the verdicts of the
    /// module. Rules do not apply to other devices. Without the module, all is computed from sysfs.
    #[command(after_help = alloc::columns_help())]
    Explain(ExplainArgs),
    /// Show counters.
    #[command(after_help = help::<list::OneStats>("Columns"))]
    Stats(StatsArgs),
    /// Show providers, their rates of use, and the owners of buffers, continuously.
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// Write patterns to the memory of a provider, and read them back.
    Selftest(SelftestArgs),
    /// Print events as they arrive.
    #[command(after_help = help::<p2pmem::Event>("Columns"))]
    Events(EventsArgs),
    /// List devices with usable memory, the sources of this memory, and devices that can use it.
    ///
    /// Works without the module and without privileges. The column MISSING lists the capabilities that a source does
    /// not have: mapping, direct-io, dma-buf (registration with NICs), rules, quotas, revoke, placement (strategies,
    /// stripes), sharing, clearing, attach.
    #[command(after_help = scan::columns_help())]
    Scan(ScanArgs),
    /// Check all preconditions of peer-to-peer memory on this machine.
    #[command(after_help = help::<doctor::Check>("Columns"))]
    Doctor(DoctorArgs),
    /// Print a completion script for a shell. Completions know the devices, providers, and rules of this machine.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// A shell with completions.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Shell {
    /// The GNU shell.
    Bash,
    /// Elvish.
    Elvish,
    /// The friendly interactive shell.
    Fish,
    /// The Z shell.
    Zsh,
}

/// A device, as an argument or as an option.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct DeviceArgs {
    /// The device.
    #[arg(value_name = "DEVICE")]
    positional: Option<String>,

    /// The device, as an option.
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
}

impl DeviceArgs {
    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        // The group requires one of the two.
        self.device
            .as_deref()
            .or(self.positional.as_deref())
            .unwrap_or_default()
    }
}

/// Options of `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// List only this provider: an id or a device.
    #[arg(long)]
    pub device: Option<String>,

    /// Form of the table.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Measure whether a NIC reaches the memory of a device, instead of all checks. Allocates up to 1 MiB of the device's
    /// memory (from the module, or by vfio-pci), registers it with the NIC, and moves data by RDMA WRITE and READ.
    #[arg(long, num_args = 2, value_names = ["NIC", "DEVICE"])]
    pub pair: Vec<String>,

    /// Form of the table.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Options of `scan`.
#[derive(Debug, Args)]
pub struct ScanArgs {
    /// Show all sources of each device's memory, including unusable ones with the reason.
    #[arg(long)]
    pub all: bool,

    /// With --output or --noheadings: print the table of devices that can use memory, not that of devices with memory.
    #[arg(long)]
    pub clients: bool,

    /// Form of the tables.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Options of `topo`.
#[derive(Debug, Args)]
pub struct TopoArgs {
    /// The clients [default: all storage, network, and InfiniBand devices and accelerators of this machine]
    #[arg(value_name = "CLIENT")]
    pub clients: Vec<String>,

    /// Show only the paths of this provider: an id or a device. Without the module: a device with memory.
    #[arg(long)]
    pub device: Option<String>,

    /// Write a drawing of the machine to this file, or to standard output (-).
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["device", "list", "rescan",
          "output", "noheadings", "bytes"])]
    pub svg: Option<PathBuf>,

    /// Print one path a line instead of the matrix. --output implies this.
    #[arg(short, long)]
    pub list: bool,

    /// Make the module read all paths again, for example after setpci has changed ACS.
    #[arg(long)]
    pub rescan: bool,

    /// Form of the table.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Options of `publish`.
#[derive(Debug, Args)]
pub struct PublishArgs {
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,

    /// The BAR [default: the largest 64-bit prefetchable BAR]
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..6))]
    pub bar: Option<u32>,

    /// Offset of the memory in the BAR.
    #[arg(long, value_parser = size)]
    pub offset: Option<u64>,

    /// Size of the memory [default: up to the end of the BAR]
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,

    /// Whether the memory has struct pages.
    #[arg(long)]
    pub mode: Option<Mode>,

    /// Kernel reserve: bytes that stay in the kernel's pool for other drivers, such as nvmet.
    #[arg(long, value_parser = size)]
    pub kernel_reserve: Option<u64>,

    /// Allow exports to importers that do not support revocation. Such an importer can block the unbinding of the
    /// device.
    #[arg(long)]
    pub pinned_exports: bool,

    /// Allow the members of this group, by name or number, to attach the device to dma-bufs, such as the doorbell page of a
    /// NIC that the device drives.
    #[arg(long, value_name = "GROUP")]
    pub attach_gid: Option<String>,

    /// Unbind the device from its current driver.
    #[arg(long)]
    pub force: bool,
}

/// Whether the memory of a provider has struct pages.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Mode {
    /// With struct pages: mappings and O_DIRECT work.
    Paged,
    /// Without struct pages: uses no host memory; dma-bufs and mappings work, O_DIRECT does not.
    Pageless,
}

/// Options of `unpublish`.
#[derive(Debug, Args)]
pub struct UnpublishArgs {
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,

    /// Let the kernel bind the device's own driver again.
    #[arg(long)]
    pub reprobe: bool,
}

/// The commands for rules.
#[derive(Debug, Subcommand)]
pub enum RulesCommand {
    /// List the rules in the order of evaluation, with their state and the bytes charged to each rule.
    #[command(after_help = help::<p2pmem::rules::RuleState>("Columns"))]
    List {
        /// Form of the table.
        #[command(flatten)]
        table: TableArgs,
    },
    /// Add a rule.
    Add(RuleArgs),
    /// Remove rules. No buffer is revoked.
    Remove {
        /// Names of the rules.
        #[arg(required = true)]
        names: Vec<String>,

        /// Also remove rules that have charges. The charges move to the next matching rules.
        #[arg(long)]
        force: bool,
    },
    /// Load rules from files, all or none.
    Load {
        /// The files [default: /etc/p2pmem/*.toml]
        #[arg(value_hint = ValueHint::FilePath)]
        files: Vec<PathBuf>,

        /// Remove all rules that are not in the files, except those of running jobs of Slurm.
        #[arg(long)]
        only: bool,
    },
    /// Write the rules, except those of running jobs of Slurm, to a file in the format of `load`.
    Save {
        /// The file [default: standard output]
        #[arg(value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
    /// Check files, or show the decision for a user's request under the rules in force.
    Test(RulesTestArgs),
}

/// A rule.
#[derive(Debug, Args)]
pub struct RuleArgs {
    /// Name: two digits that define the order, a dash, and a description.
    pub name: String,

    /// Match only this provider: a device, or vendor:device (15b3:101b).
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,

    /// Match only this client.
    #[arg(long, value_name = "DEVICE")]
    pub client: Option<String>,

    /// Match only these users: names, numbers, ranges such as 100000-165535, and subordinate:USER (subuid(5)),
    /// separated by commas.
    #[arg(long, value_name = "USERS")]
    pub uid: Option<String>,

    /// Match only members of this group: a name or a number.
    #[arg(long, value_name = "GROUP")]
    pub gid: Option<String>,

    /// allow, deny, prefer or avoid.
    #[arg(long)]
    pub action: Option<Action>,

    /// Maximum path class: DEV, SW, SWS, PHB, NODE, or SYS.
    #[arg(long, value_name = "CLASS")]
    pub max_class: Option<PathClass>,

    /// Maximum bytes that each user may hold.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub quota: Option<u64>,

    /// Maximum bytes that the members of the group, or the users of --uid, may hold together.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub group_quota: Option<u64>,

    /// Bytes to reserve in each provider.
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "reserve_for")]
    pub reserve: Option<u64>,

    /// The beneficiary of the reserve: kernel or group.
    #[arg(long, value_name = "WHO")]
    pub reserve_for: Option<Beneficiary>,

    /// Add the rule disabled.
    #[arg(long)]
    pub disabled: bool,
}

/// Options of `rules test`.
#[derive(Debug, Args)]
pub struct RulesTestArgs {
    /// Check these files.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: Vec<PathBuf>,

    /// Decide for this user: a name or a number.
    #[arg(long, value_name = "USER")]
    pub uid: Option<String>,

    /// Decide for this group: a name or a number.
    #[arg(long, value_name = "GROUP")]
    pub gid: Option<String>,

    /// Size of the buffer.
    #[arg(value_parser = size, required_unless_present = "file")]
    pub size: Option<u64>,

    /// Requirements on the provider.
    #[command(flatten)]
    pub placement: PlacementArgs,
}

/// Options of `apply`.
#[derive(Debug, Args)]
pub struct ApplyArgs {
    /// The files [default: /etc/p2pmem/*.toml]
    #[arg(value_hint = ValueHint::FilePath)]
    pub files: Vec<PathBuf>,
}

/// The commands for Slurm.
#[derive(Debug, Subcommand)]
pub enum SlurmCommand {
    /// Describe the providers of this node for gres.conf and slurm.conf.
    ///
    /// The bytes of all providers are one resource. On a machine with several NUMA nodes, the providers of each node are a type of
    /// the resource (numa0, numa1, ...), with the cores near them.
    Gres(SlurmGresArgs),
    /// Limit a job to the memory that Slurm gave it on this node. Call it in Slurm's Prolog.
    ///
    /// The job's user gets a rule, 50-slurm-UID, whose quota is the sum of the user's jobs on this node. A job without the resource
    /// gets no rule. Running the command again for a job changes nothing. Slurm drains the node if the Prolog fails.
    Prolog(SlurmPrologArgs),
    /// Take the limit of a job away. Call it in Slurm's Epilog.
    ///
    /// The quota of the user is lowered at once. After the user's last job on this node, the command waits until the user holds no
    /// memory, and removes the rule. If the user still holds memory after that, the command fails, and Slurm drains the node,
    /// because other jobs would find less memory than Slurm counts. A job without a limit is no error.
    Epilog(SlurmEpilogArgs),
}

/// Options of `slurm gres`.
#[derive(Debug, Args)]
pub struct SlurmGresArgs {
    /// Name of the resource.
    #[arg(long, default_value = "p2pmem")]
    pub name: String,

    /// NodeName of this machine in slurm.conf [default: the name of the machine, up to the first dot]
    #[arg(long)]
    pub node: Option<String>,

    /// Write the lines to this gres.conf, instead of those that it has for this node and this resource. Other lines stay.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub write: Option<PathBuf>,
}

/// The job of a prolog or an epilog.
#[derive(Debug, Clone, Copy, Args)]
pub struct SlurmJobArgs {
    /// The job.
    #[arg(long, value_name = "ID", env = "SLURM_JOB_ID", hide_env_values = true)]
    pub job: u32,

    /// The job's user: a number.
    #[arg(long, env = "SLURM_JOB_UID", hide_env_values = true)]
    pub uid: u32,
}

/// Options of `slurm prolog`.
#[derive(Debug, Args)]
pub struct SlurmPrologArgs {
    /// The job.
    #[command(flatten)]
    pub job: SlurmJobArgs,

    /// NodeName of this machine in slurm.conf [default: the name of the machine, up to the first dot]
    #[arg(long, env = "SLURMD_NODENAME", hide_env_values = true)]
    pub node: Option<String>,

    /// The job's resources on this node, such as gpu:2,p2pmem:64M [default: what the controller answers]
    #[arg(long, value_name = "LIST")]
    pub gres: Option<String>,

    /// Name of the resource.
    #[arg(long, default_value = "p2pmem")]
    pub name: String,

    /// Program that asks the controller.
    #[arg(long, value_name = "PROGRAM", default_value = "scontrol", value_hint = ValueHint::ExecutablePath)]
    pub scontrol: String,
}

/// Options of `slurm epilog`.
#[derive(Debug, Args)]
pub struct SlurmEpilogArgs {
    /// The job.
    #[command(flatten)]
    pub job: SlurmJobArgs,

    /// How long to wait for the memory of a user without other jobs.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "30")]
    pub wait: Duration,
}

/// A request for a buffer.
#[derive(Debug, Args)]
pub struct RequestArgs {
    /// Size of the buffer.
    #[arg(value_parser = size)]
    pub size: u64,

    /// Requirements on the provider.
    #[command(flatten)]
    pub placement: PlacementArgs,
}

/// Options of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,

    /// Decide over all devices with memory, whether they are providers or not. Works without the module.
    #[arg(long, conflicts_with_all = ["device", "prefer", "strategy", "parts"])]
    pub what_if: bool,

    /// Form of the table.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Requirements on the provider of a buffer.
#[derive(Debug, Args)]
pub struct PlacementArgs {
    /// A device that will do DMA to the buffer. Repeat the option, or separate devices by commas.
    #[arg(long, value_name = "CLIENT", value_delimiter = ',')]
    pub near: Vec<String>,

    /// Alignment in the BAR, a power of two.
    #[arg(long, value_parser = size, default_value = "0", hide_default_value = true)]
    pub align: u64,

    /// Strategy for the choice of the provider.
    #[arg(long, default_value = "nearest")]
    pub strategy: Strategy,

    /// With `--strategy stripe`: number of providers, at most 16 [default: all providers with space for a part]
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub parts: u32,

    /// Use only this provider: an id or a device.
    #[arg(long, conflicts_with = "prefer")]
    pub device: Option<String>,

    /// Try this provider first: an id or a device.
    #[arg(long, value_name = "DEVICE")]
    pub prefer: Option<String>,

    /// Maximum path class: DEV, SW, SWS, PHB, NODE, or SYS (`topo` explains them).
    #[arg(long, value_name = "CLASS")]
    pub max_class: Option<PathClass>,
}

/// Strategy for the choice of the provider.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Strategy {
    /// The nearest provider by path class, hops, bandwidth, NUMA distance, and load.
    Nearest,
    /// The choice of the kernel's pci_p2pmem_find_many().
    Upstream,
    /// The least loaded provider that can serve, at any distance.
    Spread,
    /// The most loaded provider that can serve, so that other providers stay empty.
    Pack,
    /// Equal parts in several providers.
    Stripe,
}

/// Options of `alloc`.
#[derive(Debug, Args)]
pub struct AllocArgs {
    /// The request.
    #[command(flatten)]
    pub request: RequestArgs,

    /// Fill the buffer with this byte (0x for hexadecimal).
    #[arg(long, value_name = "BYTE", value_parser = byte)]
    pub fill: Option<u8>,

    /// Hold the buffer until Enter, a signal, or its revocation.
    #[arg(long)]
    pub hold: bool,

    /// Hold the buffer while a command runs. Its environment describes the buffer: P2PMEM_PROVIDER,
    /// P2PMEM_PROVIDER_ADDR, P2PMEM_SIZE, P2PMEM_BAR_OFFSET.
    #[arg(long, value_name = "COMMAND", num_args = 1.., allow_hyphen_values = true, conflicts_with = "hold")]
    pub exec: Vec<String>,
}

/// Options of `stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Show only this provider: an id or a device.
    #[arg(long)]
    pub device: Option<String>,

    /// Form of the table.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Options of `top`.
#[cfg(feature = "top")]
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Seconds between updates.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    pub interval: Duration,

    /// Number of updates [default: until the key q]
    #[arg(long)]
    pub count: Option<u64>,
}

/// Options of `selftest`.
#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// The provider.
    #[command(flatten)]
    pub device: DeviceArgs,

    /// Bytes to test [default: the largest free block, at most 64M]
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,

    /// Also register the memory with this NIC, such as mlx5_0, and move data by RDMA.
    #[arg(long)]
    pub nic: Option<String>,
}

/// Options of `events`.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Exit after this number of events.
    #[arg(long)]
    pub count: Option<u64>,

    /// Exit after this number of seconds.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,

    /// Form of the table.
    #[command(flatten)]
    pub table: TableArgs,
}

/// Parses a size such as `16M`, `1GiB`, or `4096`. Units are powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    parse_size::Config::new()
        .with_binary()
        .parse_size(text)
        .map_err(|why| format!("{why}: specify a number of bytes, or a number with a unit, such as 64K, 16M, or 1GiB"))
}

fn byte(text: &str) -> Result<u8, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u8::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "specify a byte: 0 to 255, or 0x00 to 0xff".into())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "specify a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|why| why.to_string())
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
    fn bytes_and_seconds_are_parsed() {
        assert_eq!((byte("0xfe"), byte("7")), (Ok(0xfe), Ok(7)));
        assert!(byte("256").is_err());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").is_err() && seconds("x").is_err() && seconds("NaN").is_err());
    }
}
