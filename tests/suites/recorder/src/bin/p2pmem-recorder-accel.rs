// SPDX-License-Identifier: MIT OR Apache-2.0

//! In a guest: records what the emulated accelerator computes, or plays recordings to it, by one or more NICs.

use std::path::PathBuf;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::{Parser, Subcommand};
use p2pmem_async_suite::hardware::Hardware;
use p2pmem_recorder::client::compute::Role;
use p2pmem_recorder::client::play::{PlayOptions, play};
use p2pmem_recorder::client::record::{RecordOptions, record};
use p2pmem_recorder::client::{Remote, SessionRequest, Verification};
use p2pmem_recorder::control::{ChannelRequest, Start, Token};
use p2pmem_recorder_suite::accel::{AccelCompute, Rings};
use p2pmem_recorder_suite::measured::Session;

/// Rings of the accelerator for each session.
const RINGS: u32 = 2;

/// Records what the emulated accelerator computes, or plays recordings to it.
#[derive(Parser)]
struct Cli {
    /// The storage node: host and port.
    node: String,
    #[arg(long)]
    token_file: PathBuf,
    #[arg(long)]
    lun: String,
    #[arg(long)]
    stream: String,
    /// The channel of the first NIC. The others use the next ones.
    #[arg(long, default_value_t = 0)]
    channel: u32,
    #[arg(long, value_delimiter = ',')]
    nic: Vec<String>,
    /// The number of the storage node's NIC for the first NIC.
    #[arg(long, default_value_t = 0)]
    node_nic: u32,
    /// The PCI address of the accelerator.
    #[arg(long)]
    accel: String,
    #[arg(long, default_value_t = 1 << 20)]
    block_size: u64,
    #[arg(long, default_value_t = 8)]
    buffers: u32,
    /// The processor copies each block through host memory.
    #[arg(long)]
    staged: bool,
    /// Compare the spectrum of each block whose number, counted from 0, is a multiple of this; 0 for none.
    #[arg(long)]
    verify: u64,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Record blocks.
    Record {
        /// The number of blocks of each session.
        blocks: u64,
    },
    /// Play the latest recording.
    Play,
}

fn session(cli: &Cli, hardware: &Hardware, number: u32, begin: &Barrier) -> Result<Session> {
    let role = match cli.command {
        Command::Record { .. } => Role::Source,
        Command::Play => Role::Target,
    };
    let rings = Rings {
        first: number * RINGS,
        count: RINGS,
    };
    let compute = AccelCompute::new(hardware, role, cli.block_size, cli.buffers, rings, cli.staged);
    // All sessions begin at the same time, also if one of them cannot.
    begin.wait();
    let mut compute = compute?;
    let request = SessionRequest {
        remote: Remote {
            address: cli.node.clone(),
            token: Token::read(&cli.token_file)?,
            name: "accelerator".into(),
            timeout: Duration::from_secs(60),
        },
        channel: ChannelRequest {
            lun: cli.lun.clone(),
            stream: cli.stream.clone(),
            channel: cli.channel + number,
        },
        nic: cli.nic[number as usize].clone(),
        gid_index: 0,
        port: cli.node_nic + number,
    };
    let verify = Verification { every: cli.verify };
    let (blocks, nanoseconds, verified) = match cli.command {
        Command::Record { blocks } => {
            let options = RecordOptions {
                sessions: vec![request],
                mirror: false,
                blocks,
                first: 0,
                rate: None,
                verify,
            };
            let recorded = record(&mut compute, &options)?;
            (recorded.acknowledged, recorded.nanoseconds, recorded.verified)
        }
        Command::Play => {
            let options = PlayOptions {
                sessions: vec![request],
                mirror: false,
                recordings: Vec::new(),
                start: Start::First,
                blocks: None,
                repeat: false,
                rate: None,
                verify,
            };
            let played = play(&mut compute, &options)?;
            (played.blocks, played.nanoseconds, played.verified)
        }
    };
    Ok(Session {
        blocks,
        bytes: blocks * cli.block_size,
        nanoseconds,
        verified,
        copied: compute.copied(),
    })
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let first = cli.nic.first().ok_or_else(|| anyhow!("specify a NIC"))?;
    let hardware = Hardware::open(first, &cli.accel)?;
    let begin = &Barrier::new(cli.nic.len());
    let sessions: Vec<Session> = thread::scope(|scope| {
        let (cli, hardware) = (&cli, &hardware);
        let threads: Vec<_> = (0..cli.nic.len() as u32)
            .map(|number| scope.spawn(move || session(cli, hardware, number, begin)))
            .collect();
        let results = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a session panicked"))));
        results.collect::<Result<_>>()
    })?;
    println!("{}", serde_json::to_string(&sessions)?);
    Ok(())
}
