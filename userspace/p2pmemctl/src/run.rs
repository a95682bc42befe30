// SPDX-License-Identifier: MIT OR Apache-2.0

//! `run`: a command whose p2pmem memory is near devices.
//!
//! The preload shim places the memory. This command gives the shim its environment, runs the command as a child, and
//! prints what the command took.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{bail, Context as _};
use clap::Args;
use nix::errno::Errno;
use p2pmem::{Client, Device, Request};
use p2pmem_near::{NEAR, REPORT};

use crate::environment::json_text;
use crate::{Context, Outcome};

mod child;
mod elf;
mod program;
mod shim;
mod summary;

use program::CannotExecute;
use shim::Shim;
use summary::{Counters, Providers, Summary};

/// Exit code if this command fails, and not the command that it runs.
const FAILED: u8 = 125;

/// Options of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A device that will do DMA to the command's memory. Repeat the option, or separate devices by commas.
    #[arg(long, value_name = "CLIENT", value_delimiter = ',', required = true)]
    pub near: Vec<String>,

    /// Write the summary as JSON to this file when the command has ended (/dev/fd/N for a descriptor).
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,

    /// The preload shim [default: P2PMEM_PRELOAD in the environment, or libp2pmem_preload.so beside p2pmemctl or in
    /// ../lib]
    #[arg(long, value_name = "FILE")]
    pub preload: Option<PathBuf>,

    /// The command and its arguments.
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub command: Vec<OsString>,
}

/// Runs the command. Errors are reported here, because they have exit codes of their own.
pub(crate) fn run(context: &mut Context<'_>, args: &RunArgs) -> anyhow::Result<Outcome> {
    match run_command(context, args) {
        Ok(code) => Ok(Outcome::Exit(code)),
        Err(error) => {
            crate::report(context, &error);
            let code = error.downcast_ref().map_or(FAILED, CannotExecute::exit_code);
            Ok(Outcome::Exit(code))
        }
    }
}

fn run_command(context: &mut Context<'_>, args: &RunArgs) -> anyhow::Result<u8> {
    let Some((name, arguments)) = args.command.split_first() else {
        bail!("no command");
    };
    let clients = context.clients(&args.near)?;
    let device = context.open()?;
    check_reachable(&device, &clients)?;
    let shim = Shim::find(args.preload.as_deref())?;
    let program = program::find(name)?;
    program::check(&program, &shim, context.err)?;
    let report = args.report.as_ref().map(|path| {
        let file = File::create(path);
        file.with_context(|| format!("cannot create {}", path.display()))
    });
    let report = report.transpose()?;
    let counters = Counters::new().context("cannot create the counters of the summary")?;
    let providers = device.providers()?;
    // The command may unload the module.
    drop(device);

    let mut command = Command::new(&program);
    command.arg0(name).args(arguments);
    command.env("LD_PRELOAD", shim.preload(std::env::var_os("LD_PRELOAD").as_deref()));
    command.env(NEAR, addresses(&clients)).env(REPORT, counters.path());
    context.out.flush()?;
    let status = child::run(&mut command).map_err(|error| CannotExecute::from_io(&program, error))?;

    let summary = counters.read().map(|snapshot| {
        let now = context.open().and_then(|device| Ok(device.providers()?)).ok();
        let providers = Providers { before: providers, now };
        Summary::new(&snapshot, name, clients, &providers, status)
    });
    let code = child::exit_code(status);
    match summary
        .context("cannot read the counters of the summary")
        .and_then(|s| print(context, &s, report))
    {
        Ok(()) => Ok(code),
        // The command's own failure is more important.
        Err(error) if code != 0 => {
            crate::report(context, &error);
            Ok(code)
        }
        Err(error) => Err(error),
    }
}

/// Prints the summary on standard error, and writes it to the report.
fn print(context: &mut Context<'_>, summary: &Summary, report: Option<File>) -> anyhow::Result<()> {
    let json = json_text(summary)?;
    context.hint(&if context.json { json.clone() } else { summary.text() });
    match report {
        Some(mut file) => writeln!(file, "{json}").context("cannot write the report"),
        None => Ok(()),
    }
}

/// Fails if no provider can ever serve a request near the clients, or if rules deny it. Too little free memory is no error
/// yet, because other programs may free some.
fn check_reachable(device: &Device, clients: &[Client]) -> anyhow::Result<()> {
    let explanation = device.explain(&Request::new(1).near(clients.iter().cloned()))?;
    match explanation.errno {
        Some(errno) if [Errno::ENODEV, Errno::EACCES].contains(&Errno::from_raw(errno)) => {
            bail!("no memory near {}: {}", names(clients), explanation.lines().join("; "))
        }
        _ => Ok(()),
    }
}

fn names(clients: &[Client]) -> String {
    let names: Vec<_> = clients.iter().map(Client::name).collect();
    names.join(", ")
}

fn addresses(clients: &[Client]) -> String {
    let addresses: Vec<_> = clients.iter().map(|client| client.addr().to_string()).collect();
    addresses.join(",")
}

/// Returns a name as text for messages.
fn text(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}
