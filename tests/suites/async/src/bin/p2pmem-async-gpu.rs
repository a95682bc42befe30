// SPDX-License-Identifier: MIT OR Apache-2.0

//! Measures a GPU that drives NICs: a ping-pong of two NICs in this process, whose doorbells and completions are in host
//! memory that the GPU accesses.
//!
//! Prints one JSON object. Without a GPU, or with `--executor cpu`, the CPU interprets the same byte code.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Parser, ValueEnum};
use p2pmem_async::bytecode::Peer;
use p2pmem_async::gpu::{GpuExecutor, Method};
use p2pmem_async::wqe::Transport;
use p2pmem_async_suite::executor::{Cpu, Executor, OnGpu};
use p2pmem_async_suite::node::{Doorbells, Node};
use p2pmem_async_suite::pingpong::{Outcome, Side, run};
use p2pmem_cuda_sys::{Cuda, Gpu};
use serde::Serialize;

/// Measures a GPU that drives NICs of this process.
#[derive(Parser)]
struct Options {
    /// What executes the byte code; all that the machine has by default.
    #[arg(long)]
    executor: Option<Kind>,
    /// Round trips of each measurement.
    #[arg(long, default_value_t = 2000)]
    iterations: u32,
    /// Round trips that are submitted at once.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=20))]
    batch: u32,
    /// Bytes of a message: a multiple of 4.
    #[arg(long, default_value_t = 128)]
    size: u32,
    /// Seconds within which a batch has to end.
    #[arg(long, default_value_t = 60)]
    limit: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// The CPU.
    Cpu,
    /// Stream memory operations of a GPU.
    Stream,
    /// A kernel of a GPU with one thread.
    Kernel,
}

#[derive(Serialize)]
struct Row {
    executor: Kind,
    transport: Transport,
    size: u32,
    batch: u32,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Serialize)]
struct Report {
    /// Name of the GPU.
    device: Option<String>,
    /// Why there is none.
    why: Option<String>,
    table: Vec<Row>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    ensure!(
        options.size % 4 == 0 && options.size > 0,
        "--size must be a multiple of 4"
    );
    let gpu = gpu();
    let wants_gpu = matches!(options.executor, Some(Kind::Stream | Kind::Kernel));
    if let (true, Err(why)) = (wants_gpu, &gpu) {
        bail!("no GPU: {why}");
    }
    let mut table = Vec::new();
    for executor in [Kind::Cpu, Kind::Stream, Kind::Kernel] {
        let selected = options.executor.is_none_or(|selected| selected == executor);
        if !selected || (executor != Kind::Cpu && gpu.is_err()) {
            continue;
        }
        for transport in [Transport::Rc, Transport::Ud] {
            if transport == Transport::Ud && options.size > 4096 {
                continue;
            }
            table.push(Row {
                executor,
                transport,
                size: options.size,
                batch: options.batch,
                outcome: measure(&options, executor, transport, gpu.as_ref().ok())?,
            });
        }
    }
    let wrong = table.iter().any(|row| !row.outcome.verified);
    let report = Report {
        device: gpu.as_ref().ok().map(Gpu::name).transpose()?,
        why: gpu.err(),
        table,
    };
    println!("{}", serde_json::to_string_pretty(&report)?);
    ensure!(!wrong, "a payload is wrong");
    Ok(())
}

/// Opens the GPU, or says why there is none.
fn gpu() -> Result<Gpu, String> {
    let cuda = Cuda::load().map_err(|error| error.to_string())?;
    cuda.first_gpu().map_err(|error| error.to_string())
}

fn measure(options: &Options, kind: Kind, transport: Transport, gpu: Option<&Gpu>) -> Result<Outcome> {
    let limit = Duration::from_secs(options.limit);
    let on_gpu = match (kind, gpu) {
        (Kind::Stream, Some(gpu)) => Some((gpu, Method::StreamOperations)),
        (Kind::Kernel, Some(gpu)) => Some((gpu, Method::Kernel)),
        _ => None,
    };
    let peer = match on_gpu {
        Some((gpu, method)) => GpuExecutor::peer(gpu, method)?,
        None => Peer::cpu(),
    };
    let (a, b) = Node::pair(transport, options.size, &peer)?;
    let executor = |node: &Node| -> Result<Box<dyn Executor>> {
        Ok(match on_gpu {
            Some((gpu, method)) => Box::new(OnGpu::new(node, gpu, method, limit)?),
            None => Box::new(Cpu::new(node, limit)),
        })
    };
    let (mut for_a, mut for_b) = (executor(&a)?, executor(&b)?);
    let _doorbells = Doorbells::new([&a, &b]);
    let mut a = Side {
        node: &a,
        executor: &mut *for_a,
    };
    let mut b = Side {
        node: &b,
        executor: &mut *for_b,
    };
    run(&mut a, &mut b, options.iterations, options.batch, limit)
}
