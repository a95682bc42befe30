// SPDX-License-Identifier: MIT OR Apache-2.0

//! Nodes with p2pmem and a published accelerator, and programs with a rank on each of some nodes, which Open MPI's `mpirun`
//! starts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use p2pmem_vm::command::Command;
use p2pmem_vm::counters::difference;
use p2pmem_vm::script::Script;
use p2pmem_vm::vm::tool;
use serde::Serialize;
use serde_json::Value;

/// The nodes.
pub const NODES: [&str; 4] = ["a", "b", "c", "d"];
/// The accelerator of a node.
const ACCELERATOR: &str = "accel0";
/// The time limit of a job.
const LIMIT: Duration = Duration::from_secs(180);

/// The nodes.
pub struct Bed {
    script: Script,
    ctl: String,
    /// The folder with the scripts that start ranks.
    clients: String,
}

/// What a NIC counted during a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NicBytes {
    /// Payload that it read from memory of devices, and sent.
    pub peer_read: u64,
    /// Payload that it received, and wrote to memory of devices.
    pub peer_written: u64,
    /// Payload that it read from host memory, and sent.
    pub host_read: u64,
    /// Payload that it received, and wrote to host memory.
    pub host_written: u64,
}

impl NicBytes {
    /// Returns the payload that it read from or wrote to host memory.
    pub fn host(&self) -> u64 {
        self.host_read + self.host_written
    }
}

/// The largest part of payload that NICs may count in addition to the formula. Their counters have no headers; a NIC counts payload
/// again that it sends again after a lost acknowledgement.
const SENT_AGAIN: f64 = 0.02;

/// Payload of a job, counted by the NICs of all its nodes, beside what the job has to move by a formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// Bytes that NICs read from memory of devices.
    pub sent: u64,
    /// Bytes that NICs wrote to memory of devices.
    pub received: u64,
    /// The bytes by the formula.
    pub formula: u64,
}

impl Moved {
    /// Adds what the NICs counted.
    pub fn new(nics: &[NicBytes], formula: u64) -> Self {
        Self {
            sent: nics.iter().map(|nic| nic.peer_read).sum(),
            received: nics.iter().map(|nic| nic.peer_written).sum(),
            formula,
        }
    }

    /// Returns what is wrong: a byte of the formula is missing in a direction, or there are more than [`SENT_AGAIN`] allows.
    pub fn failure(&self) -> Option<String> {
        let most = (self.formula as f64 * (1.0 + SENT_AGAIN)) as u64;
        let is_right = |bytes: u64| (self.formula..=most).contains(&bytes);
        (!is_right(self.sent) || !is_right(self.received)).then(|| {
            format!(
                "NICs sent {} and received {} bytes of payload, and {} by the formula",
                self.sent, self.received, self.formula
            )
        })
    }
}

impl Bed {
    /// Boots the nodes, loads the module and publishes the accelerators. `clients` is the folder with the scripts that start
    /// ranks.
    ///
    /// # Errors
    ///
    /// A guest does not boot, or a command fails.
    pub fn boot(release: &str, module: &str, clients: &Path) -> Result<Self> {
        let clients = clients
            .to_str()
            .context("the path of the scripts is not UTF-8")?
            .to_owned();
        let mut script = Script::boot("collectives", release)?;
        let ctl = tool("p2pmemctl")?;
        for node in NODES {
            script.load(node, module, &ctl, &[ACCELERATOR], &[])?;
        }
        Ok(Self { script, ctl, clients })
    }

    /// Starts a rank of a program on each of the first `ranks` nodes. Returns the standard output of rank 0, and what the NICs of
    /// these nodes counted.
    ///
    /// # Errors
    ///
    /// A rank fails.
    pub fn run(&mut self, ranks: usize, program: &str) -> Result<(String, Vec<NicBytes>)> {
        let nodes = &NODES[..ranks];
        let clients = &self.clients;
        let names = nodes.join(",");
        let start = format!(
            "export P2PMEM_CLIENTS={clients}; {clients}/with-names.sh {clients}/mpirun-nodes.sh {names} {program}"
        );
        let serve = format!("{clients}/with-names.sh {clients}/remote-shell.py serve");
        let before = self.script.cluster.snapshot()?;
        let mut outputs = self.script.run_all(|node| {
            let script = match nodes.iter().position(|other| *other == node) {
                Some(0) => &start,
                Some(_) => &serve,
                None => "true",
            };
            Command::new(["bash", "-c", script]).limit(LIMIT)
        })?;
        let counters = difference(&before, &self.script.cluster.snapshot()?);
        let counted = nodes
            .iter()
            .map(|node| {
                nic_bytes(&counters[node]["nic0"]["counters"]["payload"]).with_context(|| format!("counters of {node}"))
            })
            .collect::<Result<_>>()?;
        Ok((outputs.remove(NODES[0]).unwrap_or_default(), counted))
    }

    /// Runs a server on node b and its client on node a, each to its end. Returns the standard output of the client, and what the NICs of
    /// both nodes counted.
    ///
    /// # Errors
    ///
    /// One of them fails.
    pub fn run_pair(&mut self, server: &Command, client: &Command) -> Result<(String, Vec<NicBytes>)> {
        let before = self.script.cluster.snapshot()?;
        let [_, text] = self.script.run_pair((NODES[1], server), (NODES[0], client))?;
        let counters = difference(&before, &self.script.cluster.snapshot()?);
        let counted = NODES[..2].iter().map(|node| {
            nic_bytes(&counters[node]["nic0"]["counters"]["payload"]).with_context(|| format!("counters of {node}"))
        });
        Ok((text, counted.collect::<Result<_>>()?))
    }

    /// Runs a script on one of the nodes. Returns its standard output.
    ///
    /// # Errors
    ///
    /// The script fails.
    pub fn run_script(&mut self, node: &str, script: &str) -> Result<String> {
        self.script
            .run_command(node, &Command::new(["bash", "-c", script]).limit(LIMIT))
    }

    /// Checks that no buffer is left, withdraws the accelerators and unloads the module, and powers the nodes off. Returns what
    /// failed.
    pub fn shut_down(self) -> Vec<String> {
        self.script.unload_and_shut_down(&NODES, &self.ctl, &[ACCELERATOR])
    }
}

/// Returns the folder of the programs that nodes run.
///
/// # Errors
///
/// They are not built.
pub fn programs() -> Result<PathBuf> {
    let ctl = tool("p2pmemctl")?;
    let folder = Path::new(&ctl).parent().context("p2pmemctl has no folder")?;
    Ok(folder.to_owned())
}

fn nic_bytes(payload: &Value) -> Result<NicBytes> {
    let counter = |name: &str| {
        payload[name]
            .as_u64()
            .with_context(|| format!("no counter {name} in {payload}"))
    };
    Ok(NicBytes {
        peer_read: counter("peer_read")?,
        peer_written: counter("peer_written")?,
        host_read: counter("host_read")?,
        host_written: counter("host_written")?,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What NICs count if they move these bytes once.
    pub(crate) fn moved(bytes: u64) -> Moved {
        Moved {
            sent: bytes,
            received: bytes,
            formula: bytes,
        }
    }

    #[test]
    fn payload_is_neither_less_nor_much_more_than_by_the_formula() {
        let nic = |peer_read, peer_written| NicBytes {
            peer_read,
            peer_written,
            ..NicBytes::default()
        };
        let failure = |nics: [NicBytes; 2]| Moved::new(&nics, 1000).failure();
        assert_eq!(failure([nic(600, 400), nic(400, 600)]), None);
        assert_eq!(failure([nic(620, 400), nic(400, 620)]), None);
        for (sent, received) in [(999, 1000), (1000, 999), (1021, 1000), (1000, 1021), (0, 0)] {
            let text = failure([nic(sent, 0), nic(0, received)]).unwrap();
            assert_eq!(
                text,
                format!("NICs sent {sent} and received {received} bytes of payload, and 1000 by the formula")
            );
        }
    }
}
