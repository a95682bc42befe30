// SPDX-License-Identifier: MIT OR Apache-2.0

//! p2pmem-exporter: metrics of PCI peer-to-peer memory for Prometheus. The implementation is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    p2pmem_exporter::main()
}
