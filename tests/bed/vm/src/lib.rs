// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs commands in virtual machines whose PCI topology is data.
//!
//! A [`topology`] is read from TOML. [`qemu`] makes a QEMU command line of it for an [`accelerator`], and [`vm`] boots
//! an unmodified kernel ([`kernel`]) on the file system in which the runner itself runs, or a debug kernel, which looks
//! for errors by itself ([`checks`]). The runner returns output, exit code and kernel log of each command. It searches
//! the log for bad lines ([`dmesg`]) and can read the devices' byte counters at any time ([`counters`]). A file may
//! describe several machines: a [`cluster`] boots all of them, joined by a network and by their NICs. Tables of other
//! projects' programs ([`clients`]) are data too. Documentation/testbed/runner.md is the guide.

pub mod accelerator;
pub mod bridges;
pub mod checks;
pub mod clients;
pub mod cluster;
pub mod command;
pub mod counters;
pub mod demo;
pub mod dmesg;
pub mod kernel;
pub mod models;
pub mod page;
pub mod process;
pub mod pyverbs;
pub mod qemu;
pub mod qmp;
pub mod script;
pub mod selection;
pub mod stamp;
mod sys;
mod ticks;
pub mod topology;
pub mod trace;
pub mod vm;
pub mod withheld;
