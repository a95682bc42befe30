// SPDX-License-Identifier: MIT OR Apache-2.0

//! The commands of p2pmemctl. The device, sysfs, and the output are parameters, so that tests can replace them.

mod alloc;
mod cli;
mod completion;
mod computed;
mod doctor;
mod environment;
mod events;
mod file;
mod list;
mod publish;
mod rules;
mod run;
mod scan;
mod selftest;
mod slurm;
mod table;
#[cfg(feature = "top")]
mod top;
mod topo;

use std::fmt;
use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

pub use cli::{Cli, Command, Shell};
pub use completion::{complete, registration};
pub use environment::{Context, Environment, SCHEMA};

use table::{BAD, BOLD};

/// Result of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The command succeeded: exit code 0.
    Done,
    /// The result is negative and was printed: exit code 1.
    Refused,
    /// The command chose the exit code.
    Exit(u8),
}

impl Outcome {
    fn of(good: bool) -> Self {
        if good {
            Self::Done
        } else {
            Self::Refused
        }
    }
}

/// An invalid combination of arguments that the parser of the command line cannot find: exit code 2.
#[derive(Debug)]
struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// An error with a remedy that the library does not know.
#[derive(Debug)]
struct Advised {
    error: p2pmem::Error,
    remedy: &'static str,
}

impl fmt::Display for Advised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Advised {}

/// Runs the tool with the process's arguments, on this machine.
pub fn main() -> ExitCode {
    // Answers the shell and exits if the shell requests completions.
    complete();
    let cli = Cli::parse();
    cli.color.write_global();
    let environment = Environment::of_this_machine(cli.dev_path.clone());
    let mut out = anstream::stdout().lock();
    // Not locked: the thread that draws progress bars writes too.
    let mut err = anstream::stderr();
    let mut context = Context {
        environment: &environment,
        json: cli.json,
        progress: std::io::stderr().is_terminal() && !cli.json,
        out: &mut out,
        err: &mut err,
    };
    ExitCode::from(exit_code(&mut context, &cli.command))
}

/// Runs a command and reports its errors. Returns the exit code: 0 done, 1 refused, 2 invalid arguments; `run` has others.
pub fn exit_code(context: &mut Context<'_>, command: &Command) -> u8 {
    match run(context, command) {
        Ok(Outcome::Done) => 0,
        Ok(Outcome::Refused) => 1,
        Ok(Outcome::Exit(code)) => code,
        // The reader of the output closed the pipe.
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) => {
            report(context, &error);
            match error.downcast_ref::<p2pmem::Error>() {
                Some(p2pmem::Error::Request(_)) => 2,
                _ if error.is::<UsageError>() => 2,
                _ => 1,
            }
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

fn report(context: &mut Context<'_>, error: &anyhow::Error) {
    let advised = error.downcast_ref::<Advised>();
    let known = error.chain().find_map(|e| e.downcast_ref::<p2pmem::Error>());
    let known = known.or(advised.map(|advised| &advised.error));
    let remedy = advised.map(|advised| advised.remedy);
    let remedy = remedy.or_else(|| known.and_then(p2pmem::Error::remedy));
    let missing = known.is_some_and(|error| error.kind() == p2pmem::ErrorKind::ModuleMissing);
    // A kernel that is too old for the module cannot load it.
    let release = missing.then(|| doctor::needed_release(context.environment)).flatten();
    let remedy = remedy.map(|remedy| match release {
        // Other remedies do not load the module.
        Some((major, minor)) if remedy.starts_with("load the module") => {
            format!("boot Linux {major}.{minor} or later, then {remedy}")
        }
        _ => remedy.to_owned(),
    });
    let text = format!("{error:#}");
    if context.json {
        let value = serde_json::json!({
            "error": text,
            "errno": known.and_then(p2pmem::Error::errno),
            "reason": known.and_then(p2pmem::Error::reason),
            "remedy": remedy,
        });
        // If the output is not writable, the exit code reports the error.
        let _ = context.print_json(&value);
    }
    context.hint(&format!("{BAD}p2pmemctl:{BAD:#} {text}"));
    if let Some(remedy) = remedy {
        context.hint(&format!("  {BOLD}remedy:{BOLD:#} {remedy}"));
    }
}

fn run(context: &mut Context<'_>, command: &Command) -> anyhow::Result<Outcome> {
    match command {
        Command::List(args) => list::list(context, args),
        Command::Stats(args) => list::stats(context, args),
        #[cfg(feature = "top")]
        Command::Top(args) => top::top(context, args),
        Command::Topo(args) => topo::topo(context, args),
        Command::Publish(args) => publish::publish(context, args),
        Command::Unpublish(args) => publish::unpublish(context, args),
        Command::Rules { command } => rules::run(context, command),
        Command::Apply(args) => rules::apply(context, args),
        Command::Slurm { command } => slurm::run(context, command),
        Command::Alloc(args) => alloc::alloc(context, args),
        Command::Run(args) => run::run(context, args),
        Command::Explain(args) => alloc::explain(context, args),
        Command::Selftest(args) => selftest::selftest(context, args),
        Command::Events(args) => events::events(context, args),
        Command::Scan(args) => scan::scan(context, args),
        Command::Doctor(args) => doctor::doctor(context, args),
        Command::Completions { shell } => {
            registration(*shell, context.out)?;
            Ok(Outcome::Done)
        }
    }
}
