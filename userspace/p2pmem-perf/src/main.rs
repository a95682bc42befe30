// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-perf: the transfer benchmark. The implementation is in the library, so that tests can call it.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_perf::main()
}
