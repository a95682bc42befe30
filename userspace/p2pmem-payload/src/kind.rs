// SPDX-License-Identifier: MIT OR Apache-2.0

//! The kinds of memory.

use clap::ValueEnum;

/// Kind of memory for the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MemoryKind {
    /// Host memory.
    Cpu,
    /// A p2pmem buffer of an accelerator near the NIC, registered as a dma-buf if the kernel supports this. All
    /// providers are accelerators that are neither drives nor FPGAs.
    Accelerator,
    /// A p2pmem buffer in the controller memory buffer (CMB) of a drive near the NIC.
    Cmb,
    /// A p2pmem buffer of an FPGA near the NIC: a provider whose PCI class is that of signal processing controllers.
    Fpga,
    /// A p2pmem buffer of a provider without struct pages: only RDMA and dma-bufs can use it.
    Pageless,
}

impl MemoryKind {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Accelerator => "accelerator",
            Self::Cmb => "cmb",
            Self::Fpga => "fpga",
            Self::Pageless => "pageless",
        }
    }
}
