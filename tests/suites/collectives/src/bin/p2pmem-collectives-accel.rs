// SPDX-License-Identifier: MIT OR Apache-2.0

//! In a guest: `p2pmem-collectives` with the emulated accelerator as the engine, if the payload is in its memory.

use std::process::ExitCode;

use p2pmem_collectives_suite::engine::open_engine;

fn main() -> ExitCode {
    p2pmem_collectives::main(&open_engine)
}
