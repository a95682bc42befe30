// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs commands in the process of a test.

use std::ffi::OsString;

use clap::Parser;
use p2pmemctl::{exit_code, Cli, Context, Environment};

/// Runs the tool with these arguments, the first of which is its name. Returns the exit code, the output, and the
/// messages.
pub fn run(
    environment: &Environment,
    args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> (u8, String, String) {
    let cli = Cli::try_parse_from(args).expect("good usage");
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut context = Context {
        environment,
        json: cli.json,
        progress: false,
        out: &mut out,
        err: &mut err,
    };
    let code = exit_code(&mut context, &cli.command);
    (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}
