// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs commands in virtual machines whose PCI topology is data.
//!
//! A [`topology`] is read from TOML, turned into a QEMU command line by [`qemu`], and booted by [`vm`] with an unmodified
//! kernel ([`kernel`]) on the file system the runner itself runs in; or with a kernel that looks for errors ([`checks`]). Commands' output, exit codes and kernel log come
//! back, the log is searched for anything a kernel should not say ([`dmesg`]), and the devices' byte counters can be read
//! at any time ([`counters`]). A file may describe several machines: a [`cluster`] boots them all, joined by a network and
//! by the NICs it has. What others' programs are expected to do there is data too ([`clients`]). Documentation/testbed/runner.md tells how to use it.

pub mod bridges;
pub mod checks;
pub mod clients;
pub mod cluster;
pub mod command;
pub mod counters;
pub mod dmesg;
pub mod kernel;
pub mod models;
pub mod process;
pub mod pyverbs;
pub mod qemu;
pub mod qmp;
pub mod stamp;
pub mod topology;
pub mod trace;
pub mod vm;
pub mod withheld;
