// SPDX-License-Identifier: MIT OR Apache-2.0

//! Collective operations on the memory of accelerators: the payload stays in the accelerators, RDMA moves it between them,
//! and their own engines reduce it.
//!
//! | module | contents |
//! |---|---|
//! | [`element`] | types of elements, and reductions |
//! | [`schedule`], [`cost`] | what each rank does in a call, and what this costs |
//! | [`topology`] | which NIC and which memory a rank uses, and the order of the ring |
//! | [`group`], [`pmix`], [`local`] | the ranks of a job, and how they find each other |
//! | [`placement`] | reads what this machine has, and agrees with the other ranks |
//! | [`transport`], [`message`] | writes between ranks, by verbs |
//! | [`engine`] | what reduces: an accelerator, or the processor |
//! | [`communicator`] | executes calls |
//! | [`cli`], [`run`], [`input`], [`report`] | the program |

pub mod cli;
pub mod communicator;
pub mod cost;
pub mod element;
pub mod engine;
pub mod group;
pub mod input;
pub mod local;
pub mod message;
pub mod placement;
pub mod pmix;
pub mod report;
pub mod run;
pub mod schedule;
pub mod topology;
pub mod transport;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

/// Runs the program with the process's arguments, and with this engine.
pub fn main(open_engine: run::OpenEngine<'_>) -> ExitCode {
    let cli = Cli::parse();
    let mut out = std::io::stdout().lock();
    let result = match &cli.command {
        Command::Run(args) => run::run(args, open_engine, cli.json, &mut out),
        Command::Cost(args) => run::print_cost(args, cli.json, &mut out).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            run::print_error(run::PROGRAM, &error);
            ExitCode::FAILURE
        }
    }
}
