// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-training: training with the processor as the engine. The implementation is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_training::main(&p2pmem_collectives::run::processor)
}
