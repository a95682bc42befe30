// SPDX-License-Identifier: MIT OR Apache-2.0

//! In a guest: `p2pmem-training` with the emulated accelerator as the engine, if the parameters are in its memory.

use std::process::ExitCode;

use p2pmem_collectives_suite::engine::open_engine;

fn main() -> ExitCode {
    p2pmem_training::main(&open_engine)
}
