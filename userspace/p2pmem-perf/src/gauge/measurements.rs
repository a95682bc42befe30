// SPDX-License-Identifier: MIT OR Apache-2.0

//! What measures for the gauge.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::args::GaugeArgs;
use crate::cli::{RunArgs, SideArgs};
use crate::client;
use crate::matrix::{self, Matrix, MatrixArgs, MatrixObserver};
use crate::observer::Observer;
use crate::report::Report;
use p2pmem_payload::nic::nic_names;

/// Measures between two nodes.
pub trait Measurements: Send + Sync + 'static {
    /// Returns the names of this node's NICs.
    ///
    /// # Errors
    ///
    /// There is none. The message says what to do.
    fn nics(&self) -> Result<Vec<String>>;

    /// Measures transfers between two memories.
    ///
    /// # Errors
    ///
    /// Any error of the test, and those of the observer.
    fn run(&self, args: &RunArgs, observer: &dyn Observer) -> Result<Report>;

    /// Measures transfers between every pair of memories.
    ///
    /// # Errors
    ///
    /// The link cannot be measured, or the observer ends the measurement.
    fn matrix(&self, args: &MatrixArgs, observer: &dyn MatrixObserver) -> Result<Matrix>;
}

/// Measures between this node and a server.
#[derive(Debug)]
pub struct Nodes {
    dev_path: PathBuf,
    gid_index: u8,
    timeout: Duration,
}

impl Nodes {
    /// Uses the device and the limits of the options.
    pub fn new(args: &GaugeArgs) -> Self {
        Self {
            dev_path: args.dev_path.clone(),
            gid_index: args.gid_index,
            timeout: args.timeout,
        }
    }

    fn set(&self, side: &mut SideArgs) {
        side.dev_path.clone_from(&self.dev_path);
        side.gid_index = self.gid_index;
        side.timeout = self.timeout;
    }
}

impl Measurements for Nodes {
    fn nics(&self) -> Result<Vec<String>> {
        nic_names()
    }

    fn run(&self, args: &RunArgs, observer: &dyn Observer) -> Result<Report> {
        let mut args = args.clone();
        self.set(&mut args.own.side);
        client::measure(&args, observer)
    }

    fn matrix(&self, args: &MatrixArgs, observer: &dyn MatrixObserver) -> Result<Matrix> {
        let mut args = args.clone();
        self.set(&mut args.side);
        matrix::measure(&args, observer)
    }
}
