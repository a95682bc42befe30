// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-perf: the transfer benchmark. What it does is in the library beside it, where tests can reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_perf::main()
}
