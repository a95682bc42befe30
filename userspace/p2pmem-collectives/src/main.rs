// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-collectives: collective operations with the processor as the engine. The implementation is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_collectives::main(&p2pmem_collectives::run::processor)
}
