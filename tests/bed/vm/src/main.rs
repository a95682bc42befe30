// SPDX-License-Identifier: MIT OR Apache-2.0

//! The command line of the VM runner: boots a topology, runs a command in a guest, and reports the outcome.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use p2pmem_guest::limits::Overrun;
use p2pmem_guest::wire::Listen;
use p2pmem_vm::accelerator::Accelerator;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::kernel::Kernel;
use p2pmem_vm::qemu::{self, Ends, Paths};
use p2pmem_vm::topology::Layout;
use p2pmem_vm::vm::{Command, Options, Outcome, Status, Stream};
use serde_json::json;

/// The command succeeded, but the kernel log has bad lines.
const EXIT_FINDINGS: u8 = 121;
/// The guest did not boot.
const EXIT_BOOT: u8 = 122;
/// The kernel panicked, or the guest ended otherwise.
const EXIT_DIED: u8 = 123;
/// The command exceeded its time limit, or the guest did when the runner waited for it.
const EXIT_TIME: u8 = 124;
/// The runner itself failed, or its arguments are wrong.
const EXIT_RUNNER: u8 = 125;
/// The command could not be started.
const EXIT_NOT_STARTED: u8 = 127;

/// Boots a machine described as data, under an unmodified kernel, and runs a command in it.
///
/// Exit codes: the command's own (128 + N for signal N); 121 bad lines in the kernel log; 122 no boot; 123 panic;
/// 124 time-out; 125 runner; 127 command not started.
///
/// Environment: P2PMEM_ACCEL is auto (default: KVM if it works, otherwise TCG), tcg, or kvm. Guests that count
/// instructions always run with TCG.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run one command in a fresh guest
    Run(Box<Run>),
    /// Check topology files and print the QEMU command line of each
    Check {
        /// Topology files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

#[derive(clap::Args)]
struct Run {
    /// Topology file
    #[arg(long, value_name = "FILE")]
    topology: PathBuf,
    /// Kernel module to load before the command; the path is one of the sandbox
    #[arg(long, value_name = "PATH")]
    module: Option<PathBuf>,
    /// Kernel: stock, debug, an image (ELF), or a folder of modules for the stock kernel
    #[arg(long, value_name = "KERNEL", default_value = "stock")]
    kernel: String,
    /// Environment variable for the command; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Node to run the command on, of a topology with several (default: the first)
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// Shell command for another node; the command runs once that one listens on the port (of rdma_cm with "rdma:")
    #[arg(long, value_name = "NODE:[rdma:]PORT=COMMAND", value_parser = parse_serve)]
    serve: Option<Serve>,
    /// Working directory in the guest
    #[arg(long, default_value = "/")]
    cwd: String,
    /// Time limit of the command, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Print a report as JSON on standard output, and the command's output on standard error
    #[arg(long)]
    json: bool,
    /// Write the report as JSON to a file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Print the whole kernel log on standard error at the end
    #[arg(long)]
    dmesg: bool,
    /// Command to run in the guest, after --
    #[arg(required = true, last = true)]
    argv: Vec<String>,
}

/// A server on another node.
#[derive(Clone)]
struct Serve {
    node: String,
    listen: Listen,
    script: String,
}

fn parse_serve(text: &str) -> Result<Serve, String> {
    let parts = || {
        let (place, script) = text.split_once('=')?;
        let (node, port) = place.split_once(':')?;
        let (rdma, port) = match port.strip_prefix("rdma:") {
            Some(port) => (true, port),
            None => (false, port),
        };
        let port = port.parse().ok()?;
        Some(Serve {
            node: node.to_owned(),
            listen: if rdma { Listen::Rdma(port) } else { Listen::Tcp(port) },
            script: script.to_owned(),
        })
    };
    parts().ok_or_else(|| "write it as NODE:PORT=COMMAND or NODE:rdma:PORT=COMMAND".into())
}

fn parse_env(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".into()),
    }
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() { EXIT_RUNNER } else { 0 });
        }
    };
    let result = match cli.command {
        Verb::Run(run) => run.run(),
        Verb::Check { files } => check(&files),
    };
    result.unwrap_or_else(|e| {
        eprintln!("p2pmem-vm: {e:#}");
        ExitCode::from(failed(&e, EXIT_RUNNER))
    })
}

/// Returns the exit code for an error: the one of an overrun, or `other`.
fn failed(error: &anyhow::Error, other: u8) -> u8 {
    if Overrun::is(error) { EXIT_TIME } else { other }
}

fn check(files: &[PathBuf]) -> Result<ExitCode> {
    let accelerator = Accelerator::chosen()?;
    for file in files {
        let layout = Layout::load(file)?;
        println!("# {}: {}", layout.name, layout.description);
        let all_ends = Ends::new(layout.nodes.len(), Path::new("/run/guests"));
        let several = layout.nodes.len() > 1;
        for (node, ends) in layout.nodes.iter().zip(&all_ends) {
            let paths = Paths {
                dir: Path::new("/run/guest").join(&node.name),
                init: "/run/guest-init".into(),
            };
            if several {
                println!("# node {}", node.name);
            }
            let kernel = Kernel::image("/run/vmlinux".into());
            let plan = qemu::plan(&node.topology, &paths, &kernel, accelerator, several.then_some(ends))?;
            println!("{}", plan.argv.join(" \\\n    ").replace(" \\\n    {", " '{"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Run {
    fn run(&self) -> Result<ExitCode> {
        let layout = Layout::load(&self.topology)?;
        let node = match &self.node {
            Some(node) => layout
                .node(node)
                .with_context(|| format!("there is no node {node:?}"))?,
            None => layout.nodes.first().context("no node")?,
        };
        let accelerator = Accelerator::chosen()?.of(&node.topology.machine);
        let node = node.name.clone();
        let options = Options {
            kernel: Some(Kernel::named(&self.kernel)?),
            ..Options::default()
        };
        let mut cluster = match Cluster::boot(&layout, &options) {
            Ok(cluster) => cluster,
            Err(e) => {
                eprintln!("p2pmem-vm: {e:#}");
                return Ok(ExitCode::from(failed(&e, EXIT_BOOT)));
            }
        };
        if let Some(module) = &self.module {
            if !load(&mut cluster, module)? {
                return Ok(ExitCode::from(EXIT_FINDINGS));
            }
        }
        let mut outcome = self.run_in(&mut cluster, &node)?;
        if self.dmesg {
            for record in &outcome.dmesg {
                eprintln!(
                    "[{:5}.{:06}] {}",
                    record.time_us / 1_000_000,
                    record.time_us % 1_000_000,
                    record.text
                );
            }
        }
        let release = cluster.node(&node)?.release().to_owned();
        let boot_seconds = cluster.boot_time().as_secs_f64();
        let mut counters = None;
        let mut console = None;
        if cluster.is_alive() {
            counters = Some(match layout.nodes.len() {
                1 => cluster.node(&node)?.snapshot()?,
                _ => cluster.snapshot()?,
            });
            outcome.findings.extend(cluster.check()?);
            outcome.findings.extend(cluster.shut_down()?);
        } else {
            console = Some(cluster.node(&node)?.console_tail());
        }
        self.tell(&outcome, console.as_deref());
        let code = exit_code(&outcome);
        let report = json!({
            "topology": layout.name, "kernel_release": release, "accelerator": accelerator,
            "boot_seconds": boot_seconds, "outcome": outcome, "counters": counters, "console": console,
            "exit_code": code,
        });
        if let Some(path) = &self.report {
            fs::write(path, serde_json::to_vec_pretty(&report)?).with_context(|| path.display().to_string())?;
        }
        if self.json {
            println!("{}", serde_json::to_string_pretty(&report)?);
        }
        Ok(ExitCode::from(code))
    }

    /// Runs the command, and its server if there is one.
    fn run_in(&self, cluster: &mut Cluster, node: &str) -> Result<Outcome> {
        let command = Command {
            argv: self.argv.clone(),
            env: self.env.iter().cloned().collect(),
            cwd: self.cwd.clone(),
            limit: Duration::from_secs(self.timeout),
            listen: None,
        };
        let Some(serve) = &self.serve else {
            return cluster
                .node(node)?
                .exec(&command, &mut |stream, bytes| self.show(stream, bytes));
        };
        let server = Command {
            argv: ["sh", "-c", serve.script.as_str()].map(String::from).into(),
            listen: Some(serve.listen),
            ..command.clone()
        };
        let served = cluster.serve((&serve.node, &server), (node, &command))?;
        eprintln!("p2pmem-vm: the server's end: {:?}", served.server.status);
        self.show(Stream::Stderr, &served.server.stdout);
        self.show(Stream::Stderr, &served.server.stderr);
        report_findings(&served.server.findings, "the server");
        let outcome = served.client.context("the server did not listen")?;
        self.show(Stream::Stdout, &outcome.stdout);
        self.show(Stream::Stderr, &outcome.stderr);
        Ok(outcome)
    }

    fn show(&self, stream: Stream, bytes: &[u8]) {
        // The guest is powered off even if the reader of the output has ended.
        let _ = match stream {
            Stream::Stdout if !self.json => {
                let mut out = std::io::stdout().lock();
                out.write_all(bytes).and_then(|()| out.flush())
            }
            _ => std::io::stderr().lock().write_all(bytes),
        };
    }

    fn tell(&self, outcome: &Outcome, console: Option<&str>) {
        match &outcome.status {
            Status::Exited { .. } | Status::Signalled { .. } | Status::Stopped => {}
            Status::NotStarted { error } => eprintln!("p2pmem-vm: {error}"),
            Status::TimedOut => {
                eprintln!(
                    "p2pmem-vm: the command ran out of time ({} s); the kernel log's end:",
                    self.timeout
                );
                let skip = outcome.dmesg.len().saturating_sub(60);
                for record in &outcome.dmesg[skip..] {
                    eprintln!("  {}", record.text);
                }
            }
            Status::Panicked { line } => eprintln!("p2pmem-vm: the kernel panicked: {line}"),
            Status::Died { why } => eprintln!("p2pmem-vm: {why}"),
        }
        if let Some(console) = console {
            eprintln!("{console}");
        }
        report_findings(&outcome.findings, "the command");
    }
}

/// Loads the module on all nodes. Returns whether the kernel logs have no bad lines.
fn load(cluster: &mut Cluster, module: &Path) -> Result<bool> {
    let path = fs::canonicalize(module).with_context(|| module.display().to_string())?;
    let path = path.to_str().context("the module's path is not UTF-8")?;
    let mut clean = true;
    for (node, outcome) in cluster.exec_all(|_| Command::new(["insmod", path]))? {
        if outcome.status != (Status::Exited { code: 0 }) {
            let skip = outcome.dmesg.len().saturating_sub(20);
            let log: Vec<_> = outcome.dmesg[skip..].iter().map(|r| r.text.as_str()).collect();
            bail!(
                "{node} insmod {path}: {:?}\n{}\n{}",
                outcome.status,
                String::from_utf8_lossy(&outcome.stderr),
                log.join("\n")
            );
        }
        report_findings(&outcome.findings, "loading the module");
        clean &= outcome.findings.is_empty();
    }
    Ok(clean)
}

fn report_findings(findings: &[String], during: &str) {
    if !findings.is_empty() {
        eprintln!("p2pmem-vm: bad lines in the kernel log during {during}:");
        for line in findings {
            eprintln!("  {line}");
        }
    }
}

fn exit_code(outcome: &Outcome) -> u8 {
    match &outcome.status {
        Status::Exited { code: 0 } if !outcome.findings.is_empty() => EXIT_FINDINGS,
        Status::Exited { code } => u8::try_from(*code).unwrap_or(u8::MAX),
        Status::Signalled { signal } => u8::try_from(128 + signal).unwrap_or(u8::MAX),
        Status::NotStarted { .. } => EXIT_NOT_STARTED,
        Status::TimedOut | Status::Stopped => EXIT_TIME,
        Status::Panicked { .. } | Status::Died { .. } => EXIT_DIED,
    }
}
