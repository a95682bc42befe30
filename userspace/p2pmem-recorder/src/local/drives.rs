// SPDX-License-Identifier: MIT OR Apache-2.0

//! The drives of a session that has no storage node, and the store on them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{ensure, Context, Result};
use p2pmem::Client;

use super::fabrics::FabricsDrive;
use crate::client::compute::Compute;
use crate::memory::BlockMemory;
use crate::session::check_block_size;
use crate::store::{ChannelName, Files, Store, System};

/// The drives of a session, and the store on them.
pub struct LocalStore<S: System = Files> {
    store: Store<S>,
    drives: Vec<FabricsDrive>,
}

impl LocalStore {
    /// Opens the store on drives that are mounted at `folders`.
    ///
    /// # Errors
    ///
    /// A drive is not attached by NVMe over Fabrics with RDMA. Those of [`Store::open`].
    pub fn open(folders: &[PathBuf]) -> Result<Self> {
        let drives = folders.iter().map(|folder| FabricsDrive::find(folder));
        let drives = drives.collect::<Result<_>>()?;
        Ok(Self::new(Store::open(Files::new(), folders)?, drives))
    }
}

impl<S: System> LocalStore<S> {
    /// Uses a store that is open.
    pub(super) fn new(store: Store<S>, drives: Vec<FabricsDrive>) -> Self {
        Self { store, drives }
    }

    /// Returns the drives.
    pub fn drives(&self) -> &[FabricsDrive] {
        &self.drives
    }

    /// Returns what the store could not repair.
    pub fn problems(&self) -> &[crate::store::Problem] {
        self.store.problems()
    }

    /// Returns the NICs by which the drives are attached, each once.
    ///
    /// # Errors
    ///
    /// The NIC of a drive is not known.
    pub fn nics(&self) -> Result<Vec<Client>> {
        let mut nics: Vec<Client> = Vec::new();
        for controller in self.drives.iter().flat_map(|drive| &drive.controllers) {
            let nic = controller.nic()?;
            if !nics.contains(&nic) {
                nics.push(nic);
            }
        }
        Ok(nics)
    }

    /// Returns the store.
    pub(super) fn store(&self) -> &Store<S> {
        &self.store
    }

    /// Describes the drive at `folder`, with its machine.
    pub(super) fn describe(&self, folder: &Path) -> String {
        let known = self.drives.iter().find(|drive| drive.folder == folder);
        known.map_or_else(|| format!("drive {}", folder.display()), FabricsDrive::to_string)
    }

    /// Returns the buffers of the accelerator, for blocks of the stream.
    pub(super) fn blocks(&self, name: &ChannelName, compute: &dyn Compute) -> Result<Arc<BlockMemory>> {
        check_block_size(&self.store, name, compute.block_size())?;
        let blocks = compute.blocks().context(
            "drives cannot access the buffers of this accelerator; record by a storage node instead (--engine rdma)",
        )?;
        ensure!(
            (blocks.count(), blocks.block_size() as u64) == (compute.buffers() as usize, compute.block_size()),
            "the accelerator has {} buffers of {} bytes, and memory for {} of {} bytes",
            compute.buffers(),
            compute.block_size(),
            blocks.count(),
            blocks.block_size()
        );
        Ok(blocks)
    }
}

/// If a session failed with transfers in flight, reports its error at once: ending them can take as long as the kernel tries to reach
/// the drives.
pub(super) fn report_waiting(ended: &anyhow::Result<()>, in_flight: usize) {
    if let (Err(error), 1..) = (ended, in_flight) {
        eprintln!(
            "p2pmem-recorder: {error:#}; waiting for {in_flight} transfers that the kernel has not ended, see the kernel log"
        );
    }
}
