// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-recorder: the program. The implementation is in the library, so that tests can call it.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_recorder::main()
}
