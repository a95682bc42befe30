// SPDX-License-Identifier: MIT OR Apache-2.0

//! The other end of perftest's `ib_send_bw`: a queue pair that byte code drives.
//!
//! Prints one line of JSON. `ib_send_bw` needs the same number of iterations, size, and transport.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, ValueEnum};
use p2pmem::Attachment;
use p2pmem::rdma::Nic;
use p2pmem_async::bytecode::{Peer, Program};
use p2pmem_async::endpoint::{Endpoint, EndpointOptions, Port};
use p2pmem_async::interpreter::Interpreter;
use p2pmem_async::memory::MemorySource;
use p2pmem_async::wqe::Transport;
use p2pmem_async_suite::accel::AccelExecutor;
use p2pmem_async_suite::hardware::Hardware;
use p2pmem_async_suite::perftest::handshake::{Role, accept, left};
use p2pmem_async_suite::perftest::{Local, MAX_ITERATIONS, Outcome, Test, receive, send};
use serde::Serialize;

/// Entries of the accelerator's ring: more than one program has.
const RING_ENTRIES: u32 = 64;

/// Send messages to ib_send_bw of perftest, or receive its messages, by byte code.
#[derive(Debug, Parser)]
#[command(name = "p2pmem-async-perftest", version)]
struct Options {
    /// The NIC.
    #[arg(long, default_value = "mlx5_0")]
    nic: String,
    #[command(flatten)]
    side: Side,
    /// The transport (-c of ib_send_bw).
    #[arg(long, default_value = "rc")]
    transport: Transport,
    /// Bytes of a message (-s of ib_send_bw).
    #[arg(long, default_value_t = 65536, value_parser = clap::value_parser!(u32).range(1..=8 << 20))]
    size: u32,
    /// Number of messages (-n of ib_send_bw).
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ITERATIONS)))]
    iterations: u32,
    /// Messages of one program.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    batch: u32,
    /// TCP port of the handshake (-p of ib_send_bw).
    #[arg(long, default_value_t = 18515)]
    port: u16,
    /// What executes the byte code.
    #[arg(long, default_value = "cpu")]
    executor: Executor,
    /// PCI address of the accelerator.
    #[arg(long, required_if_eq("executor", "accel"))]
    accel: Option<String>,
    /// Time limit of the whole run in seconds.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Side {
    /// Connect to ib_send_bw on this host, and send.
    #[arg(long, value_name = "HOST")]
    connect: Option<String>,
    /// Wait for ib_send_bw, and receive.
    #[arg(long)]
    listen: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Executor {
    /// The CPU. Queues and payload are in host memory.
    Cpu,
    /// The emulated accelerator. Queues and payload are in its memory, and it rings the NIC.
    Accel,
}

impl Executor {
    fn peer(self) -> Peer {
        match self {
            Self::Cpu => Peer::cpu(),
            Self::Accel => AccelExecutor::peer(RING_ENTRIES),
        }
    }
}

/// What executes programs of an endpoint. Drop it before the endpoint.
enum Engine {
    Cpu(Interpreter),
    Accel {
        // Dropped before the attachment: the accelerator stops before its access to the doorbell ends.
        executor: Box<AccelExecutor>,
        _attachment: Attachment,
    },
}

impl Engine {
    fn run(&mut self, program: &Program, deadline: Instant) -> Result<()> {
        match self {
            Self::Cpu(interpreter) => Ok(interpreter.run(program)?),
            Self::Accel { executor, .. } => {
                executor.submit(program.clone())?;
                executor.start()?;
                executor.finish(left(deadline)?)
            }
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    role: &'static str,
    transport: Transport,
    executor: Executor,
    size: u32,
    #[serde(flatten)]
    outcome: Outcome,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("p2pmem-async-perftest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(options.timeout);
    let test = Test {
        transport: options.transport,
        size: options.size,
        iterations: options.iterations,
        batch: options.batch,
    };
    let role = match options.side.connect {
        Some(_) => Role::Client,
        None => Role::Server,
    };
    let nic = Nic::open(&options.nic)?;
    let port = Port::open(&nic)?;
    // The accelerator, if there is one, and the memory for queues and payload.
    let hardware = match (options.executor, &options.accel) {
        (Executor::Accel, Some(accel)) => Some(Hardware::open(&options.nic, accel)?),
        _ => None,
    };
    let memory = match &hardware {
        Some(hardware) => hardware.source(),
        None => MemorySource::Host,
    };
    let endpoint = Endpoint::new(
        &port,
        &EndpointOptions {
            queues: memory.clone(),
            ..test.endpoint_options(role, options.executor.peer())
        },
    )?;
    let bytes = test.payload_bytes(role);
    let payload = memory.data_memory(port.domain(), bytes as usize)?;
    let pattern: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    payload.region().write(0, &pattern);
    payload.region().fence();
    let limit = left(deadline)?;
    let mut engine = match &hardware {
        Some(hardware) => {
            let mut executor = AccelExecutor::new(hardware, 0, RING_ENTRIES, limit)?;
            Engine::Accel {
                _attachment: executor.map_endpoint(&endpoint, &hardware.device)?,
                executor: Box::new(executor),
            }
        }
        None => Engine::Cpu(Interpreter::new(limit).map_all(endpoint.regions())),
    };
    let mut execute = |program: &Program| engine.run(program, deadline);
    let mut connect = |far: &_| Ok(endpoint.connect(far)?);
    let mut local = Local {
        qp: endpoint.qp(),
        address: endpoint.address(),
        payload: payload.segment(0, bytes),
        connect: &mut connect,
    };
    let (name, outcome) = match &options.side.connect {
        Some(host) => {
            let stream = connect_to(host, options.port, deadline)?;
            ("send", send(&mut local, &test, stream, deadline, &mut execute)?)
        }
        None => {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, options.port));
            let listener = listener.with_context(|| format!("listening on port {}", options.port))?;
            let stream = accept(&listener, deadline)?;
            ("receive", receive(&mut local, &test, stream, deadline, &mut execute)?)
        }
    };
    let report = Report {
        role: name,
        transport: options.transport,
        executor: options.executor,
        size: options.size,
        outcome,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Connects to a host.
fn connect_to(host: &str, port: u16, deadline: Instant) -> Result<TcpStream> {
    let addresses = (host, port).to_socket_addrs();
    let addresses: Vec<SocketAddr> = addresses.with_context(|| format!("the name {host}"))?.collect();
    ensure!(!addresses.is_empty(), "the name {host} has no address");
    let mut result = Err(std::io::ErrorKind::AddrNotAvailable.into());
    for address in &addresses {
        result = TcpStream::connect_timeout(address, left(deadline)?);
        if result.is_ok() {
            break;
        }
    }
    result.with_context(|| format!("connecting to {host}, port {port}: does ib_send_bw wait there?"))
}
