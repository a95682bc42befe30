// SPDX-License-Identifier: MIT OR Apache-2.0

//! The parts of the demo: what its samples are ([`samples`]), when two spectra are equal ([`compare`]), what the devices
//! moved ([`traffic`]), what the guest's program tells the host's ([`job`]), whether the kernel is stock ([`stock`]),
//! what two servers moved between each other ([`rdma`]), and what is made of it all ([`report`]).
//!
//! Documentation/demo.md says what the demo shows and how each number is measured.

pub mod compare;
pub mod job;
pub mod rdma;
pub mod report;
pub mod samples;
pub mod stock;
pub mod traffic;
