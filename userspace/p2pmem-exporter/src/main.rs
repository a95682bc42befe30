// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-exporter: metrics of PCI peer-to-peer memory for Prometheus. What it does is in the library beside it.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_exporter::main()
}
