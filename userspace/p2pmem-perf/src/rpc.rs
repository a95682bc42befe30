// SPDX-License-Identifier: MIT OR Apache-2.0

//! `rpc`: compares two-sided calls with one-sided requests that put bytes into another node's memory, with each kind of
//! waiting. Each message waits for the one before, except in batches.

use std::io::Write;

use anyhow::{ensure, Context, Result};
use clap::{Args, ValueEnum};
use p2pmem::short_size;
use p2pmem_payload::kind::MemoryKind;
use serde::{Deserialize, Serialize};

use crate::cli::{OwnArgs, RunArgs, PORT};
use crate::client::measure;
use crate::observer::{Observer, Unobserved};
use crate::print_json;
use crate::sizes::{messages, Sizes};
use crate::waiter::How;
use crate::wire::Mode;

/// A call or request that puts bytes into the memory of another node, or gets them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Call {
    /// SEND; the server's processor copies the payload to its place, and sends a reply.
    TwoSided,
    /// RDMA WRITE: the server's processor does nothing.
    Write,
    /// RDMA WRITEs, several with one doorbell.
    WriteBatch,
    /// RDMA READ: the server's processor does nothing.
    Read,
}

impl Call {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::TwoSided => "two-sided",
            Self::Write => "write",
            Self::WriteBatch => "write-batch",
            Self::Read => "read",
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self::TwoSided => Mode::Rpc,
            Self::Write | Self::WriteBatch => Mode::Write,
            Self::Read => Mode::Read,
        }
    }
}

/// Options of `rpc`.
#[derive(Debug, Args)]
pub struct RpcArgs {
    /// The server.
    pub host: String,

    /// Options of this side. The client waits as --waiting says.
    #[command(flatten)]
    pub own: OwnArgs,

    /// TCP port of the server.
    #[arg(long, default_value_t = PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,

    /// Kind of memory for the payload on the server [default: the server's own --memory]
    #[arg(long, value_enum, value_name = "MEMORY")]
    pub peer_memory: Option<MemoryKind>,

    /// Calls to compare.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "CALL",
        default_value = "two-sided,write,write-batch,read"
    )]
    pub call: Vec<Call>,

    /// How client and server wait for completions.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "HOW",
        default_value = "poll,events,adaptive"
    )]
    pub waiting: Vec<How>,

    /// Sizes of the payload.
    #[arg(long, value_name = "SIZES", default_value = "8,64,512,4K", value_parser = messages)]
    pub size: Sizes,

    /// Number of calls of each size.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 1000)]
    pub iters: u64,

    /// Number of requests with one doorbell in a batch.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..))]
    pub batch: u32,
}

impl RpcArgs {
    /// Returns the options of the run that measures a call.
    fn run(&self, call: Call, how: How) -> RunArgs {
        let batch = (call == Call::WriteBatch).then_some(self.batch);
        let mut own = self.own.clone();
        own.side.set_how(how);
        RunArgs {
            own,
            port: self.port,
            peer_memory: self.peer_memory,
            peer_waits: Some(how),
            mode: call.mode(),
            size: self.size.clone(),
            iters: self.iters,
            depth: batch.unwrap_or(1),
            batch,
            ..RunArgs::to(&self.host)
        }
    }
}

/// The cost of a call of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// The call.
    pub name: Call,
    /// Bytes of payload.
    pub bytes: u64,
    /// How client and server waited.
    pub waiting: How,
    /// Number of requests with one doorbell.
    pub batch: u32,
    /// Number of calls.
    pub calls: u64,
    /// Calls per second.
    pub calls_per_s: f64,
    /// Half of the calls took this long or less, in microseconds. In a batch, this includes the wait for those before.
    pub p50_us: f64,
    /// 99 % of the calls took this long or less.
    pub p99_us: f64,
    /// 99.9 % of the calls took this long or less.
    pub p999_us: f64,
    /// Processor time of the client for a call, in microseconds.
    pub cpu_us_client: f64,
    /// Processor time of the server's thread for a call; `None` for one-sided calls, which have no such thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us_server: Option<f64>,
    /// Processor time of the server's whole process for a call: also that of the connection to the client.
    #[serde(default)]
    pub process_us_server: f64,
    /// Bytes that the server's processor copied for a call.
    pub copied_server: f64,
}

/// All costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rpc {
    /// The client's kind of memory.
    pub client: String,
    /// The server's kind of memory.
    pub server: String,
    /// One entry for each call, kind of waiting, and size.
    pub rpc: Vec<Cost>,
}

impl Rpc {
    /// The header of the table.
    pub const HEADER: &'static str =
        "CALL         BYTES  WAITING     MEDIAN us     99 % us   99.9 % us   CLIENT CPU us  SERVER CPU us     CALLS/s";
}

impl Cost {
    /// Returns the line of the table.
    pub fn line(&self) -> String {
        format!(
            "{:<12} {:>5}  {:<9} {:>11.2} {:>11.2} {:>11.2} {:>15.2} {:>14} {:>11.0}",
            self.name.name(),
            short_size(self.bytes),
            self.waiting.name(),
            self.p50_us,
            self.p99_us,
            self.p999_us,
            self.cpu_us_client,
            self.cpu_us_server
                .map_or_else(|| "-".to_owned(), |us| format!("{us:.2}")),
            self.calls_per_s
        )
    }
}

/// Measures each call with each kind of waiting. `observer` is notified of each run; `found` gets each cost as soon as it is
/// known.
///
/// # Errors
///
/// Any error of a run. The message names the call.
pub fn compare(args: &RpcArgs, observer: &dyn Observer, found: &mut dyn FnMut(&Cost) -> Result<()>) -> Result<Rpc> {
    ensure!(
        args.own.side.nic.len() < 2,
        "calls are compared on one NIC: name one with --nic"
    );
    let mut all = Rpc {
        client: args.own.memory.name().to_owned(),
        server: String::new(),
        rpc: Vec::new(),
    };
    for how in &args.waiting {
        for call in &args.call {
            let run = args.run(*call, *how);
            let report =
                measure(&run, observer).with_context(|| format!("{}, waiting by {}", call.name(), how.name()))?;
            all.server.clone_from(&report.server.memory);
            for result in &report.results {
                let (Some(nic), Some(latency)) = (result.nics.first(), result.latency) else {
                    continue;
                };
                let cost = Cost {
                    name: *call,
                    bytes: result.speed.bytes,
                    waiting: *how,
                    batch: run.batch.unwrap_or(1),
                    calls: result.speed.iterations,
                    calls_per_s: result.speed.rate_mpps * 1e6,
                    p50_us: latency.p50_us,
                    p99_us: latency.p99_us,
                    p999_us: latency.p999_us,
                    cpu_us_client: nic.cpu_us_client,
                    cpu_us_server: nic.cpu_us_server,
                    process_us_server: nic.process_us_server,
                    copied_server: nic.copied_server as f64 / result.speed.iterations.max(1) as f64,
                };
                found(&cost)?;
                all.rpc.push(cost);
            }
        }
    }
    Ok(all)
}

/// Compares the calls and prints the costs.
///
/// # Errors
///
/// Those of [`compare`].
pub fn run(args: &RpcArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    if !json {
        writeln!(out, "{}", Rpc::HEADER)?;
    }
    let all = compare(args, &Unobserved, &mut |cost| {
        if !json {
            writeln!(out, "{}", cost.line())?;
            out.flush()?;
        }
        Ok(())
    })?;
    if json {
        print_json(out, &all)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parse(line: &str) -> RpcArgs {
        let Command::Rpc(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("not rpc")
        };
        args
    }

    #[test]
    fn every_call_is_a_valid_test() {
        let args = parse("p2pmem-perf rpc host --batch 8");
        assert_eq!((args.call.len(), args.waiting.len()), (4, 3));
        for call in &args.call {
            for how in &args.waiting {
                let run = args.run(*call, *how);
                let test = run.test(1);
                assert_eq!(test.check(), Ok(()), "{call:?}");
                assert_eq!((run.own.side.how(), test.peer_waits), (*how, Some(*how)));
                let batch = (*call == Call::WriteBatch).then_some(8);
                assert_eq!((test.batch, test.depth), (batch, batch.unwrap_or(1)));
            }
        }
    }

    #[test]
    fn port_0_is_refused() {
        let error = Cli::try_parse_from(["p2pmem-perf", "rpc", "host", "--port", "0"]).unwrap_err();
        assert!(error.to_string().contains("--port"), "{error}");
    }

    #[test]
    fn several_nics_are_refused() {
        let args = parse("p2pmem-perf rpc host --nic a,b");
        let error = compare(&args, &Unobserved, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("--nic"), "{error}");
    }

    #[test]
    fn lines_have_the_columns_of_the_header() {
        let cost = Cost {
            name: Call::WriteBatch,
            bytes: 4096,
            waiting: How::Adaptive,
            batch: 16,
            calls: 1000,
            calls_per_s: 123_456.0,
            p50_us: 1.5,
            p99_us: 2.5,
            p999_us: 1234.25,
            cpu_us_client: 0.75,
            cpu_us_server: None,
            process_us_server: 0.01,
            copied_server: 0.0,
        };
        let line = cost.line();
        assert_eq!(line.len(), Rpc::HEADER.len(), "\n{}\n{line}", Rpc::HEADER);
        assert_eq!(line.split_whitespace().count(), 9);
    }
}
