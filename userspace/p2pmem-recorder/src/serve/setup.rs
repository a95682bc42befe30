// SPDX-License-Identifier: MIT OR Apache-2.0

//! What sessions of both directions need: a NIC, buffers, and limits.

use std::sync::Arc;

use anyhow::{bail, ensure, Context, Result};
use p2pmem::{Client, Device};
use p2pmem_verbs::Nic;

use crate::control::{printable, Connection, Error as ControlError, Request, MAX_REASON};
use crate::memory::{drives_of, BlockMemory};
use crate::node::Node;
use crate::rdma::{open_nic, MAX_BLOCK};
use crate::session;
use crate::status::{MemoryKind, SessionDevices};
use crate::store::ChannelName;

/// A NIC of the node.
#[derive(Debug, Clone)]
pub struct Port {
    pub(super) nic: Arc<Nic>,
    pub(super) client: Client,
    pub(super) gid_index: u8,
}

impl Port {
    /// Opens a NIC by its name. `gid_index` selects the entry of the port's GID table.
    ///
    /// # Errors
    ///
    /// There is no such RDMA device, or it has no PCI function.
    pub fn open(name: &str, gid_index: u8) -> Result<Self> {
        Ok(Self {
            nic: open_nic(name)?,
            client: Client::resolve(name)?,
            gid_index,
        })
    }
}

/// What a session achieved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) blocks: u64,
}

/// Returns the bytes of a block of the stream, which must be those that the other side has.
pub(super) fn check_block_size(node: &Node, name: &ChannelName, block_size: u64) -> Result<u64> {
    session::check_block_size(node.store(), name, block_size)?;
    ensure!(
        block_size <= MAX_BLOCK,
        "blocks of {block_size} bytes cannot be sent; a block has at most {MAX_BLOCK} bytes"
    );
    Ok(block_size)
}

impl Node {
    /// Allocates the buffers of a session: device memory near the NIC and the drives of the LUN, or host memory if the
    /// administrator requested it.
    pub(super) fn memory_for(
        &self,
        name: &ChannelName,
        port: &Port,
        block_size: u64,
        buffers: u32,
    ) -> Result<BlockMemory> {
        let count = buffers as usize;
        if self.options().memory == MemoryKind::Host {
            return Ok(BlockMemory::host(block_size, count)?);
        }
        let mut clients = vec![port.client.clone()];
        clients.extend(self.drives_of_lun(name)?);
        let names: Vec<String> = clients.iter().map(|client| client.name().to_owned()).collect();
        let device = Device::open()?;
        let memory = BlockMemory::near(&device, clients, None, block_size, count);
        memory.with_context(|| {
            format!(
                "allocating {count} buffers of {block_size} bytes near {}; --memory host uses host memory instead",
                names.join(", ")
            )
        })
    }

    /// Returns the drives of a LUN, each once.
    fn drives_of_lun(&self, name: &ChannelName) -> Result<Vec<Client>> {
        let mut clients = Vec::new();
        for (folder, _) in self.store().lun(&name.lun)?.drives {
            for client in drives_of(&folder)? {
                if !clients.contains(&client) {
                    clients.push(client);
                }
            }
        }
        Ok(clients)
    }

    /// Returns the PCI functions between which the payload of a session moves. Drives that are on no PCI function are left
    /// out.
    pub(super) fn devices_of(&self, name: &ChannelName, port: &Port, blocks: &BlockMemory) -> SessionDevices {
        let drives = self.drives_of_lun(name).unwrap_or_default();
        SessionDevices {
            nic: Some(port.client.addr()),
            memory: blocks.provider().map(|provider| provider.addr),
            drives: drives.iter().map(Client::addr).collect(),
        }
    }
}

/// Returns the next request of a session, if one has arrived. `what` is what the other side ends when it vanishes.
pub(super) fn next_request(connection: &mut Connection, what: &str) -> Result<Option<Request>> {
    match connection.try_receive() {
        Err(ControlError::Closed) => bail!("the other side vanished in the middle of the {what}"),
        result => Ok(result?),
    }
}

/// Returns the text of an error without control characters, which words of the other side may have.
pub(super) fn reason(error: &anyhow::Error) -> String {
    printable(&format!("{error:#}"), MAX_REASON)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::node::{DriveCounters, NodeOptions, SessionOptions, SimulatedDrives};
    use crate::status::Direction;

    /// Returns a node with the drives `nvme0n1` at `nvme0` and `nvme1n1` at `nvme1` of a folder.
    pub(crate) fn node() -> (tempfile::TempDir, Arc<Node>) {
        let folder = tempfile::tempdir().unwrap();
        let drives = ["nvme0", "nvme1"].map(|name| folder.path().join(name));
        for drive in &drives {
            std::fs::create_dir(drive).unwrap();
        }
        let mut options = NodeOptions::new("test", drives);
        options.cached = true;
        options.simulated = Some(SimulatedDrives::new(|folder| DriveCounters {
            device: folder.file_name().map(|name| format!("{}n1", name.to_string_lossy())),
            ..DriveCounters::default()
        }));
        (folder, Node::open(options).unwrap())
    }

    pub(crate) fn session(direction: Direction) -> SessionOptions {
        SessionOptions {
            direction,
            channel: ChannelName::new("fast", "radar", 0),
            recording: 0,
            peer: "accelerators".into(),
            nic: "mlx5_0".into(),
            memory: "host memory".into(),
            devices: SessionDevices::default(),
            block_size: 4096,
            buffers: 8,
        }
    }
}
