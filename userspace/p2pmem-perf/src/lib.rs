// SPDX-License-Identifier: MIT OR Apache-2.0

//! The transfer benchmark: RDMA between two nodes, from and to host memory and PCI peer-to-peer memory.
//!
//! [`client`] and [`server`] agree on a test over TCP ([`wire`]); [`client::measure`] runs one and reports to an
//! [`observer`]; [`matrix`] runs one for each pair of memories; `gauge` (feature `web`) shows both in the browser, and
//! [`plot`] draws their reports. Each NIC's part of the test is a [`session`], with
//! its memory ([`p2pmem_payload`]) and a reliable connection ([`p2pmem_verbs`]). [`pattern`] checks that every byte arrived,
//! [`stats`] measures bandwidth and message rate. [`tcp`] moves the same messages without RDMA, [`ucx`] by the library UCX; [`stream`] sends a continuous flow
//! of frames. [`registration`] measures the time of a registration; [`stale`] tries to write
//! to a buffer after its end.

pub mod cli;
pub mod client;
#[cfg(feature = "web")]
pub mod gauge;
pub mod matrix;
pub mod observer;
pub mod pattern;
pub mod plot;
pub mod progress;
pub mod registration;
pub mod report;
pub mod rpc;
pub mod server;
pub mod session;
pub mod sizes;
pub mod stale;
pub mod stats;
pub mod stream;
mod sys;
pub mod tcp;
pub mod ucx;
pub mod waiter;
pub mod wire;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use serde::Serialize;

use cli::{Cli, Command};

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = std::io::stdout().lock();
    let result = run(&cli, &mut out);
    exit_code("p2pmem-perf", result, cli.json, &mut out)
}

/// Prints the error of a command of a program, if it has one: as a line on standard error with its remedy, and as JSON if the output is
/// JSON. Returns the exit code: failure for an error, or if a wrong byte was found (`Ok(false)`).
pub fn exit_code(program: &str, result: Result<bool>, json: bool, out: &mut dyn Write) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if json {
                let value = serde_json::json!({ "error": wire::reason(&error), "remedy": remedy(&error) });
                // If the output is not writable, the exit code reports the error.
                let _ = print_json(out, &value);
            }
            eprintln!("{program}: {error:#}");
            if let Some(remedy) = remedy(&error) {
                eprintln!("  remedy: {remedy}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Runs the command. Returns whether no wrong byte was found.
///
/// # Errors
///
/// Any error of the command. The message says what to do.
pub fn run(cli: &Cli, out: &mut dyn Write) -> Result<bool> {
    match &cli.command {
        Command::Serve(args) => server::serve(args).map(|()| true),
        Command::Run(args) => client::run(args, cli.json, out),
        #[cfg(feature = "web")]
        Command::Gauge(args) => gauge::run(args, out).map(|()| true),
        Command::Matrix(args) => matrix::run(args, cli.json, out),
        Command::Rpc(args) => rpc::run(args, cli.json, out).map(|()| true),
        Command::Plot(args) => plot::run(args, out).map(|()| true),
        Command::StaleServe(args) => stale::serve(args).map(|()| true),
        Command::StaleRun(args) => stale::run(args, cli.json, out),
        Command::Stream(args) => stream::client::run(args, cli.json, out),
        Command::Register(args) => registration::register(args, cli.json, out).map(|()| true),
    }
}

/// Version of the JSON that the program prints: the member `schema`. It changes when a member is removed, or changes its
/// name or meaning. New members do not change it.
pub const SCHEMA: u32 = 1;

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

fn known(error: &anyhow::Error) -> Option<&p2pmem::Error> {
    error.chain().find_map(|link| link.downcast_ref())
}

fn remedy(error: &anyhow::Error) -> Option<&'static str> {
    known(error).and_then(p2pmem::Error::remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn an_error_names_its_cause_once_and_its_remedy() {
        let error = p2pmem::Error::Request("nothing".into());
        let result: Result<()> = Err(error).context("allocating");
        let error = result.unwrap_err();
        assert_eq!(format!("{error:#}"), "allocating: bad request: nothing");
        let missing = p2pmem::Device::open_path("/nonexistent/p2pmem").unwrap_err();
        let error = anyhow::Error::new(missing).context("opening");
        assert_eq!(
            format!("{error:#}"),
            "opening: cannot open /nonexistent/p2pmem: No such file or directory (ENOENT)"
        );
        assert!(remedy(&error).is_some());
    }
}
