// SPDX-License-Identifier: MIT OR Apache-2.0

//! Programs of the transfer suite that use the test bed's devices.
//!
//! | module | contents |
//! |---|---|
//! | [`fpga`] | the stream of the emulated FPGA as a source of `p2pmem-perf stream` |

pub mod fpga;
