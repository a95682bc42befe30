// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmemctl: the command-line tool of p2pmem. What it does is in the library beside it, where tests can reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmemctl::main()
}
