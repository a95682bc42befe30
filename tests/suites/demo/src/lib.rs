// SPDX-License-Identifier: MIT OR Apache-2.0

//! The parts of the demo: its samples ([`samples`]), the comparison of spectra ([`compare`]), the bytes that devices
//! moved ([`traffic`]), the results of the guest's program ([`job`]), the check that the kernel is stock ([`stock`]),
//! the measurements between two servers ([`rdma`]), and the report ([`report`]) as JSON and as an HTML page.
//!
//! Documentation/demo.md describes the demo and the measurement of each number.

pub mod compare;
pub mod job;
mod page;
pub mod rdma;
pub mod report;
pub mod samples;
pub mod stock;
pub mod traffic;
