// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-async-pingpong: messages between two nodes by byte code. The implementation is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_async::pingpong::main()
}
