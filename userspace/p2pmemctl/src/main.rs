// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmemctl: the command-line tool of p2pmem. The implementation is in the library, so that tests can call it.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmemctl::main()
}
