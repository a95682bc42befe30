// SPDX-License-Identifier: MIT OR Apache-2.0

//! Data-, pipeline-, and tensor-parallel training between the ranks of a job: gradients and parameters are in accelerator memory, RDMA moves
//! them, and the accelerators' engines add them. The processor of each rank computes gradients.
//!
//! | module | contents |
//! |---|---|
//! | [`digits`], [`network`] | the data, and the network: the same bits on every machine |
//! | [`settings`], [`outcome`] | what is trained and how, and the result |
//! | [`state`], [`checkpoint`] | parameters with a header: in memory, and on a drive |
//! | [`mod@reference`] | what several ranks compute, computed by one processor |
//! | [`synchronous`], [`asynchronous`] | training with an allreduce in each iteration, or with a parameter server |
//! | [`schedule`], [`pipeline`] | training with consecutive layers on each rank, and in which order the ranks compute |
//! | [`slice`](mod@slice), [`tensor`] | training with a part of every layer on each rank |
//! | [`cli`], [`run`], [`report`] | the program |

pub mod asynchronous;
pub mod checkpoint;
pub mod cli;
pub mod digits;
#[cfg(test)]
mod local;
mod memory;
pub mod network;
pub mod outcome;
pub mod pipeline;
mod random;
mod ranks;
pub mod reference;
pub mod report;
pub mod run;
pub mod schedule;
pub mod settings;
pub mod slice;
pub mod state;
pub mod synchronous;
pub mod tensor;

use std::process::ExitCode;

use clap::Parser;
use p2pmem_collectives::run::{print_error, OpenEngine};

use cli::{Cli, Command};

/// Runs the program with the process's arguments, and with this engine.
pub fn main(open_engine: OpenEngine<'_>) -> ExitCode {
    let cli = Cli::parse();
    let mut out = std::io::stdout().lock();
    let result = match &cli.command {
        Command::Sync(args) => run::synchronous(args, open_engine, cli.json, &mut out),
        Command::Async(args) => run::asynchronous(args, open_engine, cli.json, &mut out),
        Command::Pipeline(args) => run::pipeline(args, open_engine, cli.json, &mut out),
        Command::Tensor(args) => run::tensor(args, open_engine, cli.json, &mut out),
        Command::Reference(args) => run::reference(args, cli.json, &mut out).map(|()| true),
        Command::Checkpoint(args) => run::checkpoint(args, cli.json, &mut out).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            print_error(run::PROGRAM, &error);
            ExitCode::FAILURE
        }
    }
}
