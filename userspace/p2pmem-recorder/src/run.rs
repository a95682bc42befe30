// SPDX-License-Identifier: MIT OR Apache-2.0

//! The commands of the program.

use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;

use anyhow::{ensure, Context, Result};
use clap::error::ErrorKind;
use p2pmem::{human_size, Client, Device};
use sd_notify::NotifyState;
use serde::Serialize;

use crate::cli::{
    with_port, Cli, Command, Engine, LunCommand, PlayArgs, RecordArgs, ServeArgs, SessionArgs, StorageArgs,
    StreamCommand,
};
use crate::client::compute::Role;
use crate::client::cpu::Cpu;
use crate::client::play::{play, PlayOptions, Played};
use crate::client::record::{record, RecordOptions, Recorded};
use crate::client::{Remote, SessionRequest, Verification};
use crate::control::{ListedChannel, Start, Token};
use crate::local::{self, LocalStore};
use crate::memory::BlockMemory;
use crate::metrics::Metrics;
use crate::node::{Node, NodeOptions};
use crate::serve::{serve, Port};
use crate::status::{Lun, MemoryKind};
use crate::store::{LunOptions, Problem, StreamOptions};

/// Version of the JSON that the program prints: the member `schema`.
pub const SCHEMA: u32 = 1;

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = Cli::parse_checked(std::env::args_os()).unwrap_or_else(|error| {
        // The unit has no drives and NICs of its own, and the error is in a log.
        if error.kind() == ErrorKind::MissingRequiredArgument && std::env::var_os("NOTIFY_SOCKET").is_some() {
            eprintln!("p2pmem-recorder: the service is not configured: run systemctl edit p2pmem-recorder, see p2pmem-recorder(1)");
        }
        error.exit()
    });
    let mut out = std::io::stdout().lock();
    match run(&cli, &mut out) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if cli.json {
                // If the output is not writable, the exit code reports the error.
                let _ = print_json(&mut out, &serde_json::json!({ "error": format!("{error:#}") }));
            }
            eprintln!("p2pmem-recorder: {error:#}");
            let known = error.chain().find_map(|link| link.downcast_ref::<p2pmem::Error>());
            if let Some(remedy) = known.and_then(p2pmem::Error::remedy) {
                eprintln!("  remedy: {remedy}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Runs a command.
///
/// # Errors
///
/// Any error of the command. The message says what to do.
pub fn run(cli: &Cli, out: &mut dyn Write) -> Result<()> {
    match &cli.command {
        Command::Serve(args) => run_serve(args, out),
        Command::Record(args) => run_record(args, cli.json, out),
        Command::Play(args) => run_play(args, cli.json, out),
        Command::List(args) => run_list(args, cli.json, out),
        Command::Lun(command) => run_lun(command, cli.json, out),
        Command::Stream(command) => run_stream(command),
    }
}

/// Prints an object as JSON in one line, with the version of its members.
fn print_json(out: &mut dyn Write, value: &impl Serialize) -> Result<()> {
    #[derive(Serialize)]
    struct Document<'a, T> {
        schema: u32,
        #[serde(flatten)]
        value: &'a T,
    }
    serde_json::to_writer(&mut *out, &Document { schema: SCHEMA, value })?;
    writeln!(out)?;
    Ok(())
}

fn run_serve(args: &ServeArgs, out: &mut dyn Write) -> Result<()> {
    let token = Token::read(&args.token_file)?;
    let ports = args.nic.iter().map(|nic| Port::open(nic, args.gid_index));
    let ports: Vec<Port> = ports.collect::<Result<_>>()?;
    let name = args.name.clone().unwrap_or_else(host_name);
    let mut options = NodeOptions::new(name, args.drives.drive.clone());
    options.memory = args.memory;
    options.buffers = args.buffers;
    options.timeout = args.timeout;
    let node = Node::open(options)?;
    report(node.store().problems());
    let listener = TcpListener::bind(args.listen).with_context(|| format!("listening on {}", args.listen))?;
    #[cfg(feature = "web")]
    let _web = args
        .web
        .map(|address| serve_web(&node, address, &token, out))
        .transpose()?;
    let _metrics = args
        .metrics
        .map(|address| -> Result<Metrics> {
            let metrics = Metrics::serve(Arc::clone(&node), args.nic.clone(), &address.to_string())?;
            writeln!(out, "metrics at {}", metrics.url())?;
            Ok(metrics)
        })
        .transpose()?;
    let stopping = Arc::clone(&node);
    ctrlc::set_handler(move || stopping.shut_down()).context("cannot catch signals")?;
    writeln!(out, "serving on {}", listener.local_addr()?)?;
    out.flush()?;
    // Does nothing if the program is not a service of systemd.
    sd_notify::notify(&[NotifyState::Ready]).context("telling systemd that the node serves")?;
    serve(&node, &listener, &token, &ports, args.sessions)?;
    Ok(())
}

/// Serves the management in the browser until the result is dropped.
#[cfg(feature = "web")]
fn serve_web(
    node: &Arc<Node>,
    address: std::net::SocketAddr,
    token: &Token,
    out: &mut dyn Write,
) -> Result<crate::web::Server> {
    use crate::web::{self, WebOptions};

    let listener = TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
    let server = web::serve(Arc::clone(node), listener, &WebOptions::new(token.text()))?;
    writeln!(out, "management at http://{}/", server.address())?;
    Ok(server)
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "storage".into(),
        name => name.to_owned(),
    }
}

/// Reports what a store could not repair.
fn report(problems: &[Problem]) {
    for problem in problems {
        eprintln!("p2pmem-recorder: {}: {}", problem.name, problem.error);
    }
}

impl StorageArgs {
    /// Returns the address of the storage node.
    fn address(&self) -> Result<String> {
        Ok(with_port(self.host.as_deref().context("specify a storage node")?))
    }

    /// Returns the storage node at an address.
    fn remote(&self, address: String) -> Result<Remote> {
        let token = self.token_file.as_deref();
        Ok(Remote {
            address,
            token: Token::read(token.context("specify the token of the storage node (--token-file)")?)?,
            name: host_name(),
            timeout: self.timeout,
        })
    }
}

impl SessionArgs {
    /// Returns the requests of the session number `number`: one for each storage node.
    fn requests(&self, number: usize) -> Result<Vec<SessionRequest>> {
        let first = self.storage.address()?;
        let others = self.also.iter().map(|host| with_port(host));
        let requests = [first].into_iter().chain(others);
        requests.map(|address| self.request(number, address)).collect()
    }

    /// Returns the request of the session number `number`, for one of the storage nodes.
    fn request(&self, number: usize, address: String) -> Result<SessionRequest> {
        let mut channel = self.channel.clone();
        channel.channel += number as u32;
        Ok(SessionRequest {
            remote: self.storage.remote(address)?,
            channel,
            nic: self.nic[number].clone(),
            gid_index: self.gid_index,
            port: self.node_nic + number as u32,
        })
    }

    /// Returns the processor with memory near NICs, which are not looked for if the memory is host memory.
    fn compute(&self, role: Role, nics: impl FnOnce() -> Result<Vec<Client>>) -> Result<Cpu> {
        let (size, count) = (self.block_size, self.buffers as usize);
        let blocks = match self.memory {
            MemoryKind::Host => BlockMemory::host(size, count)?,
            MemoryKind::Device => BlockMemory::near(&Device::open()?, nics()?, self.provider, size, count)?,
        };
        Cpu::new(role, blocks)
    }

    /// Returns the processor with memory near the NIC of the session number `number`.
    fn compute_near(&self, number: usize, role: Role) -> Result<Cpu> {
        self.compute(role, || Ok(vec![Client::resolve(&self.nic[number])?]))
    }

    /// Runs a session on the drives, after it has printed them. A signal sets the flag that the session gets.
    fn on_drives<T>(
        &self,
        role: Role,
        json: bool,
        out: &mut dyn Write,
        session: impl FnOnce(&mut Cpu, &LocalStore, &AtomicBool) -> Result<T>,
    ) -> Result<(T, LocalStore)> {
        let local = LocalStore::open(&self.storage.drive)?;
        report(local.problems());
        if !json {
            for drive in local.drives() {
                writeln!(out, "{NVMEOF}: {drive}")?;
            }
            out.flush()?;
        }
        let mut compute = self.compute(role, || match local.nics() {
            // With a provider, the path to the NIC is not needed to choose one.
            Err(_) if self.provider.is_some() => Ok(Vec::new()),
            nics => nics,
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let signalled = Arc::clone(&stop);
        ctrlc::set_handler(move || signalled.store(true, Ordering::Relaxed)).context("cannot catch signals")?;
        Ok((session(&mut compute, &local, &stop)?, local))
    }
}

/// The name of sessions that have no NIC.
const NVMEOF: &str = "nvmeof";

/// The results of sessions as JSON.
#[derive(Serialize)]
struct Sessions<'a, T> {
    sessions: &'a [T],
    #[serde(skip_serializing_if = "Option::is_none")]
    drives: Option<&'a [local::FabricsDrive]>,
}

/// Runs the sessions of all NICs at the same time.
fn on_all_nics<T: Send>(count: usize, session: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let session = &session;
        let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || session(number))).collect();
        let results = threads.into_iter().map(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("a thread of the program failed")))
        });
        results.collect()
    })
}

/// The rate of a session in MB/s (10^6 bytes in a second).
fn rate(blocks: u64, block_size: u64, nanoseconds: u64) -> f64 {
    blocks as f64 * block_size as f64 * 1e3 / nanoseconds.max(1) as f64
}

fn run_record(args: &RecordArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let session = &args.session;
    let verify = Verification { every: session.verify };
    if session.engine == Engine::Nvmeof {
        let options = local::record::RecordOptions {
            channel: session.channel.clone(),
            blocks: args.blocks,
            first: 0,
            rate: args.rate,
            verify,
            timeout: session.storage.timeout,
        };
        let (result, local) = session.on_drives(Role::Source, json, out, |compute, local, stop| {
            local::record::record(compute, local, &options, stop)
        })?;
        return print_recorded(&[NVMEOF.into()], &[result], Some(local.drives()), json, out);
    }
    let results = on_all_nics(session.nic.len(), |number| {
        let options = RecordOptions {
            sessions: session.requests(number)?,
            mirror: session.mirror,
            blocks: args.blocks,
            first: 0,
            rate: args.rate,
            verify,
        };
        record(&mut session.compute_near(number, Role::Source)?, &options)
    })?;
    print_recorded(&session.nic, &results, None, json, out)
}

/// Returns the number of the recording, of which there is at most one.
fn only(recordings: &[u64]) -> Result<Option<u64>> {
    ensure!(
        recordings.len() <= 1,
        "the engine {NVMEOF} plays one recording: specify one number"
    );
    Ok(recordings.first().copied())
}

/// Prints the results of recordings, whose sessions have names.
fn print_recorded(
    names: &[String],
    results: &[Recorded],
    drives: Option<&[local::FabricsDrive]>,
    json: bool,
    out: &mut dyn Write,
) -> Result<()> {
    if json {
        let sessions = results;
        return print_json(out, &Sessions { sessions, drives });
    }
    for (name, result) in names.iter().zip(results) {
        writeln!(
            out,
            "{name}: {} blocks of {} recorded in {:?}, {:.0} MB/s, {} verified; memory: {}",
            result.acknowledged,
            human_size(result.block_size),
            result.recordings,
            rate(result.acknowledged, result.block_size, result.nanoseconds),
            result.verified,
            result.memory.join("; ")
        )?;
        for reason in &result.failed {
            writeln!(out, "{name}: {reason}")?;
        }
    }
    Ok(())
}

fn run_play(args: &PlayArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let session = &args.session;
    let verify = Verification { every: session.verify };
    let start = match (args.from_block, args.from_time) {
        (Some(sequence), _) => Start::Block(sequence),
        (None, Some(time)) => Start::Time(time),
        (None, None) => Start::First,
    };
    if session.engine == Engine::Nvmeof {
        let options = local::play::PlayOptions {
            channel: session.channel.clone(),
            recording: only(&args.recording)?,
            start,
            blocks: args.blocks,
            repeat: args.repeat,
            rate: args.rate,
            verify,
            timeout: session.storage.timeout,
        };
        let (result, local) = session.on_drives(Role::Target, json, out, |compute, local, stop| {
            local::play::play(compute, local, &options, stop)
        })?;
        return print_played(&[NVMEOF.into()], &[result], Some(local.drives()), json, out);
    }
    let results = on_all_nics(session.nic.len(), |number| {
        let options = PlayOptions {
            sessions: session.requests(number)?,
            mirror: session.mirror,
            recordings: args.recording.clone(),
            start,
            blocks: args.blocks,
            repeat: args.repeat,
            rate: args.rate,
            verify,
        };
        play(&mut session.compute_near(number, Role::Target)?, &options)
    })?;
    print_played(&session.nic, &results, None, json, out)
}

/// Prints the results of playbacks, whose sessions have names.
fn print_played(
    names: &[String],
    results: &[Played],
    drives: Option<&[local::FabricsDrive]>,
    json: bool,
    out: &mut dyn Write,
) -> Result<()> {
    if json {
        let sessions = results;
        return print_json(out, &Sessions { sessions, drives });
    }
    for (name, result) in names.iter().zip(results) {
        let recordings: Vec<String> = result.recordings.iter().map(u64::to_string).collect();
        writeln!(
            out,
            "{name}: {} blocks of {} played from recording {}, {} to {}, {:.0} MB/s, all checksums right, {} spectra verified, {} \
             missing",
            result.blocks,
            human_size(result.block_size),
            recordings.join(", "),
            result.first.map_or_else(|| "-".into(), |first| first.to_string()),
            result.last.map_or_else(|| "-".into(), |last| last.to_string()),
            rate(result.blocks, result.block_size, result.nanoseconds),
            result.verified,
            result.missing
        )?;
        for reason in &result.failed {
            writeln!(out, "{name}: {reason}")?;
        }
    }
    Ok(())
}

fn run_list(args: &StorageArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let channels = match args.drive.is_empty() {
        true => args.remote(args.address()?)?.list()?,
        false => ListedChannel::of(open(&args.drive)?.luns()).collect(),
    };
    if json {
        return print_json(out, &serde_json::json!({ "channels": channels }));
    }
    writeln!(
        out,
        "{:<32} {:>10} {:>9} {:>10} {:>8}",
        "CHANNEL", "BLOCK", "RECORDING", "BLOCKS", "WRITING"
    )?;
    for listed in channels {
        let name = format!(
            "{}/{}/{}",
            listed.channel.lun, listed.channel.stream, listed.channel.channel
        );
        let size = human_size(listed.block_size);
        if listed.recordings.is_empty() {
            writeln!(out, "{name:<32} {size:>10} {:>9} {:>10} {:>8}", "-", "-", "-")?;
        }
        for recording in listed.recordings {
            let (number, blocks) = (recording.number, recording.blocks);
            let writing = if recording.writing { "yes" } else { "no" };
            writeln!(out, "{name:<32} {size:>10} {number:>9} {blocks:>10} {writing:>8}")?;
        }
    }
    Ok(())
}

fn open(drives: &[PathBuf]) -> Result<Arc<Node>> {
    Ok(Node::open(NodeOptions::new(host_name(), drives))?)
}

fn run_lun(command: &LunCommand, json: bool, out: &mut dyn Write) -> Result<()> {
    match command {
        LunCommand::Create {
            name,
            drives,
            segment_size,
            segments,
        } => {
            let options = LunOptions::new(&drives.drive)
                .segment_size(*segment_size)
                .segments(*segments);
            open(&drives.drive)?.create_lun(name, &options)?;
        }
        LunCommand::Delete { name, drives } => open(&drives.drive)?.delete_lun(name)?,
        LunCommand::List { drives } => {
            let luns = open(&drives.drive)?.luns();
            if json {
                return print_json(out, &serde_json::json!({ "luns": luns }));
            }
            print_luns(&luns, out)?;
        }
    }
    Ok(())
}

fn print_luns(luns: &[Lun], out: &mut dyn Write) -> Result<()> {
    for lun in luns {
        let drives: Vec<String> = lun.drives.iter().map(|drive| drive.display().to_string()).collect();
        let (free, total) = (human_size(lun.free), human_size(lun.total));
        writeln!(
            out,
            "LUN {}: {free} of {total} free, on {}",
            lun.name,
            drives.join(", ")
        )?;
        for stream in &lun.streams {
            let recordings: usize = stream.channels.iter().map(|channel| channel.recordings.len()).sum();
            writeln!(
                out,
                "  stream {}: blocks of {}, {} channels, {recordings} recordings",
                stream.name,
                human_size(stream.block_size),
                stream.channels.len()
            )?;
        }
    }
    Ok(())
}

fn run_stream(command: &StreamCommand) -> Result<()> {
    match command {
        StreamCommand::Create {
            name: (lun, name),
            drives,
            block_size,
            channels,
        } => {
            let options = StreamOptions::new(*block_size).channels(*channels);
            open(&drives.drive)?.create_stream(lun, name, &options)?;
        }
        StreamCommand::Delete {
            name: (lun, name),
            drives,
        } => open(&drives.drive)?.delete_stream(lun, name)?,
    }
    Ok(())
}
