// SPDX-License-Identifier: MIT OR Apache-2.0

//! Options of `matrix`.

use clap::Args;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::value::size;

use super::Pair;
use crate::cli::{OwnArgs, RunArgs, SideArgs, PORT};
use crate::sizes::{messages, window, Sizes};
use crate::wire::Mode;

/// Options of `matrix`.
#[derive(Debug, Clone, Args)]
pub struct MatrixArgs {
    /// The server. It must run with --forever.
    pub host: String,

    /// Options of this side.
    #[command(flatten)]
    pub side: SideArgs,

    /// Kinds of memory on this side: the rows.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cpu,accelerator,cmb,fpga")]
    pub memory: Vec<MemoryKind>,

    /// Kinds of memory on the server: the columns.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cpu,accelerator,cmb,fpga")]
    pub peer_memory: Vec<MemoryKind>,

    /// How the messages move: one table each.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "write,read,send")]
    pub mode: Vec<Mode>,

    /// Also measure writes that both sides copy through host memory.
    #[arg(long)]
    pub staged: bool,

    /// Message sizes, such as 2M, 4K,64K, or 4K-64M (each twice the size before).
    #[arg(long, value_name = "SIZES", default_value = "1M", value_parser = messages)]
    pub size: Sizes,

    /// Number of messages of each size, per NIC.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 200)]
    pub iters: u64,

    /// Maximum number of bytes of each size, per NIC.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub volume: Option<u64>,

    /// Maximum number of messages in flight.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub depth: u32,

    /// Memory for the messages of one size on each side. Two messages always fit, also if they are larger.
    #[arg(long, value_name = "SIZE", value_parser = size, default_value = "8M")]
    pub buffer: u64,

    /// Cut each message into chunks of this size [default: only messages that do not fit the memory, into chunks of the
    /// largest power of two that fits]
    #[arg(long, value_name = "SIZE", value_parser = window)]
    pub window: Option<u64>,

    /// The link's rate in MiB per second [default: that of writes from host memory to host memory, measured first]
    #[arg(long, value_name = "MIB_PER_S", value_parser = rate)]
    pub link_rate: Option<f64>,

    /// Compare every byte of the target after the messages.
    #[arg(long)]
    pub verify: bool,

    /// Seed of the pattern.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// TCP port of the server.
    #[arg(long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if f64::is_finite(rate) && rate > 0.0 => Ok(rate),
        _ => Err("specify MiB per second: a number above 0".to_owned()),
    }
}

impl MatrixArgs {
    /// Returns the names of the modes, in the order of their measurement.
    pub fn modes(&self) -> Vec<String> {
        let staged = self.staged.then(|| super::STAGED.to_owned());
        self.mode
            .iter()
            .map(|mode| mode.name().to_owned())
            .chain(staged)
            .collect()
    }

    /// Returns the pairs, in the order of their measurement: by mode, own memory, the server's memory.
    pub(super) fn pairs(&self) -> Vec<Pair> {
        let staged = self.staged.then_some((Mode::Write, true));
        let mut pairs = Vec::new();
        for (mode, staged) in self.mode.iter().map(|mode| (*mode, false)).chain(staged) {
            for from in &self.memory {
                for to in &self.peer_memory {
                    pairs.push(Pair {
                        from: *from,
                        to: *to,
                        mode,
                        staged,
                    });
                }
            }
        }
        pairs
    }

    /// Returns the options of `run` for a pair.
    pub(super) fn run_args(&self, pair: Pair) -> RunArgs {
        RunArgs {
            own: OwnArgs {
                side: self.side.clone(),
                memory: pair.from,
                device: None,
            },
            port: self.port,
            peer_memory: Some(pair.to),
            mode: pair.mode,
            size: self.size.clone(),
            iters: self.iters,
            volume: self.volume,
            depth: self.depth,
            buffer: self.buffer,
            window: self.window,
            staged: pair.staged,
            verify: self.verify,
            seed: self.seed,
            ..RunArgs::to(&self.host)
        }
    }
}
