// SPDX-License-Identifier: MIT OR Apache-2.0

//! Options of the program, and its time limit.

use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use clap::{Args, ValueEnum};
use p2pmem::rdma::Nic;
use p2pmem::Device;

use crate::memory::MemorySource;
use crate::wqe::Transport;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Mode {
    /// SEND with immediate data.
    Send,
    /// RDMA WRITE with immediate data.
    WriteImm,
    /// RDMA WRITE, and a signal in memory that the receiver polls.
    Put,
    /// As put, but the signal is an addition to memory (FETCH_AND_ADD), and each message is read back (RDMA READ) and compared.
    PutAdd,
}

impl Mode {
    /// Returns whether the receiver polls memory instead of completions.
    pub(super) fn is_put(self) -> bool {
        matches!(self, Self::Put | Self::PutAdd)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum MemoryKind {
    /// Memory of the host.
    Host,
    /// Memory of an accelerator, by p2pmem.
    Accelerator,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Options {
    /// The NIC.
    #[arg(long, default_value = "mlx5_0")]
    pub(super) nic: String,
    /// Transport, on the node that runs.
    #[arg(long, default_value = "rc")]
    pub(super) transport: Transport,
    /// Operation, on the node that runs.
    #[arg(long, default_value = "send")]
    pub(super) mode: Mode,
    /// Where the queues are.
    #[arg(long, default_value = "host")]
    pub(super) queues: MemoryKind,
    /// Where the payload is.
    #[arg(long, default_value = "host")]
    pub(super) memory: MemoryKind,
    /// Bytes of a message, on the node that runs.
    #[arg(long, default_value = "1K", value_parser = size)]
    pub(super) size: u32,
    /// Number of messages, on the node that runs.
    #[arg(short = 'n', long, default_value_t = 200)]
    pub(super) messages: u64,
    /// Messages of one program, on the node that runs.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(super) batch: u32,
    /// TCP port for the exchange of addresses.
    #[arg(long, default_value_t = 18530)]
    pub(super) port: u16,
    /// Time limit of the whole run in seconds.
    #[arg(long, default_value_t = 60)]
    pub(super) timeout: u64,
}

fn size(text: &str) -> Result<u32, String> {
    let bytes = parse_size::Config::new().with_binary().parse_size(text);
    let bytes = bytes.map_err(|error| error.to_string())?;
    match u32::try_from(bytes) {
        Ok(bytes @ 1..=1_048_576) => Ok(bytes),
        _ => Err("a message has 1 byte to 1 MiB".into()),
    }
}

/// The time limit of a run.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(pub(super) Instant);

impl Deadline {
    /// Returns the deadline after a time.
    pub fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// Returns the time that is left.
    ///
    /// # Errors
    ///
    /// The deadline passed.
    pub fn left(self) -> Result<Duration> {
        let left = self.0.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("the run exceeded its time limit (--timeout)");
        }
        Ok(left)
    }
}

impl Options {
    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(Duration::from_secs(self.timeout))
    }

    pub(super) fn source(&self, kind: MemoryKind, nic: &Nic) -> Result<MemorySource> {
        Ok(match kind {
            MemoryKind::Host => MemorySource::Host,
            MemoryKind::Accelerator => MemorySource::Accelerator {
                device: Device::open()?,
                near: nic.client().clone(),
                provider: None,
            },
        })
    }
}
