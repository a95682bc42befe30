// SPDX-License-Identifier: MIT OR Apache-2.0

//! Guests whose commands must all succeed, for demos of several nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_guest::devices::{self, Device, Devices};
use serde_json::Value;

use crate::cluster::Cluster;
use crate::command::{Command, Outcome, Status};
use crate::topology::Layout;
use crate::vm::{Options, topologies};

/// The time limit of [`Script::run`].
const SHORT_LIMIT: Duration = Duration::from_secs(60);

/// Guests that run commands. The first command that fails ends the demo.
pub struct Script {
    /// The guests.
    pub cluster: Cluster,
    devices: BTreeMap<String, Devices>,
    findings: Vec<String>,
}

impl Script {
    /// Boots the guests of a topology by its name, and reads what devices they have. Prints the description and the time.
    ///
    /// # Errors
    ///
    /// Those of [`Cluster::boot`]; a guest has another kernel than `release`.
    pub fn boot(topology: &str, release: &str) -> Result<Self> {
        let layout = Self::layout(topology)?;
        println!("1. Boot: {}", layout.description);
        let script = Self::boot_layout(&layout, release)?;
        println!("   ready after {:.1} s", script.cluster.boot_time().as_secs_f64());
        Ok(script)
    }

    /// Reads a topology by its name.
    ///
    /// # Errors
    ///
    /// No valid topology has this name.
    pub fn layout(topology: &str) -> Result<Layout> {
        Layout::load(&topologies().join(format!("{topology}.toml")))
    }

    /// As [`Script::boot`], but prints nothing.
    ///
    /// # Errors
    ///
    /// Those of [`Script::boot`].
    pub fn boot_layout(layout: &Layout, release: &str) -> Result<Self> {
        let cluster = Cluster::boot(layout, &Options::default())?;
        let mut script = Self {
            cluster,
            devices: BTreeMap::new(),
            findings: Vec::new(),
        };
        for node in script.cluster.names() {
            let found = script.cluster.node(&node)?.release().to_owned();
            ensure!(
                found == release,
                "kernel {found} runs on {node}, not the installed {release}"
            );
            let text = script.run(&node, &["cat", devices::FILE])?;
            let devices = serde_json::from_str(&text).context(devices::FILE)?;
            script.devices.insert(node, devices);
        }
        Ok(script)
    }

    /// Returns a device of a node by its name in the topology.
    ///
    /// # Errors
    ///
    /// The node does not have it.
    pub fn device(&self, node: &str, name: &str) -> Result<&Device> {
        let devices = self.devices.get(node).with_context(|| format!("no node {node}"))?;
        devices
            .get(name)
            .with_context(|| format!("{node} has no device {name}"))
    }

    /// Returns the name of a NIC's RDMA device.
    ///
    /// # Errors
    ///
    /// The node does not have the NIC, or no driver has bound to it.
    pub fn nic(&self, node: &str, name: &str) -> Result<String> {
        let rdma = self.device(node, name)?.rdma.clone();
        rdma.with_context(|| format!("no driver has made an RDMA device of {name} of {node}"))
    }

    /// Runs a command on a node for at most a minute. Returns its standard output.
    ///
    /// # Errors
    ///
    /// The command fails: the message has its output.
    pub fn run(&mut self, node: &str, argv: &[&str]) -> Result<String> {
        self.run_command(node, &Command::new(argv.iter().copied()).limit(SHORT_LIMIT))
    }

    /// Runs a command on a node. Returns its standard output.
    ///
    /// # Errors
    ///
    /// The command fails: the message has its output.
    pub fn run_command(&mut self, node: &str, command: &Command) -> Result<String> {
        let outcome = self.cluster.exec(node, command)?;
        self.check_outcome(node, command, outcome)
    }

    /// Runs a command on every node at the same time. Returns the standard outputs by node.
    ///
    /// # Errors
    ///
    /// A command fails: the message has the output of each that does.
    pub fn run_all(&mut self, command: impl Fn(&str) -> Command + Sync) -> Result<BTreeMap<String, String>> {
        let (mut outputs, mut failures) = (BTreeMap::new(), Vec::new());
        for (node, outcome) in self.cluster.exec_all(&command)? {
            match self.check_outcome(&node, &command(&node), outcome) {
                Ok(output) => drop(outputs.insert(node, output)),
                Err(error) => failures.push(error.to_string()),
            }
        }
        ensure!(failures.is_empty(), "{}", failures.join("\n"));
        Ok(outputs)
    }

    /// Runs a server and its client, each to its end. Returns the standard output of server and client.
    ///
    /// # Errors
    ///
    /// One of them fails. The error of the client has precedence: it names the cause, also if the server caused it.
    pub fn run_pair(&mut self, server: (&str, &Command), client: (&str, &Command)) -> Result<[String; 2]> {
        let served = self.cluster.serve_to_the_end(server, client)?;
        let first = self.check_outcome(server.0, server.1, served.server);
        let Some(second) = served.client else {
            bail!("{} did not come up: {:?}", server.0, first.err());
        };
        let second = self.check_outcome(client.0, client.1, second)?;
        Ok([first?, second])
    }

    /// Checks the outcome of a command. Returns its standard output.
    fn check_outcome(&mut self, node: &str, command: &Command, outcome: Outcome) -> Result<String> {
        self.findings
            .extend(outcome.findings.iter().map(|line| format!("{node}: {line}")));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        ensure!(
            outcome.status == (Status::Exited { code: 0 }),
            "{node}# {}: {:?}\n{}\n{}",
            command.argv.join(" "),
            outcome.status,
            text(&outcome.stdout),
            text(&outcome.stderr)
        );
        Ok(text(&outcome.stdout))
    }

    /// Returns the PCI addresses of devices of a node.
    fn addresses(&self, node: &str, devices: &[&str]) -> Result<Vec<String>> {
        let found = devices.iter().map(|name| self.device(node, name));
        found.map(|device| Ok(device?.bdf.clone())).collect()
    }

    /// Loads the module on a node, and publishes devices by their names in the topology, without memory for the kernel. `ctl` is the
    /// path of `p2pmemctl`, `options` are further ones of `publish`.
    ///
    /// # Errors
    ///
    /// The node does not have a device, or a command fails.
    pub fn load(&mut self, node: &str, module: &str, ctl: &str, devices: &[&str], options: &[&str]) -> Result<()> {
        self.run(node, &["insmod", module])?;
        for bdf in self.addresses(node, devices)? {
            let mut publish = vec![ctl, "publish", bdf.as_str(), "--kernel-reserve", "0"];
            publish.extend(options);
            self.run(node, &publish)?;
        }
        Ok(())
    }

    /// Checks that no buffer of p2pmem is left on a node, withdraws the devices that [`Script::load`] published, and unloads the module.
    ///
    /// # Errors
    ///
    /// A buffer is left, the node does not have a device, or a command fails.
    pub fn unload(&mut self, node: &str, ctl: &str, devices: &[&str]) -> Result<()> {
        let list: Value = serde_json::from_str(&self.run(node, &[ctl, "list", "--json"])?)?;
        ensure!(
            list["info"]["buffers"] == 0,
            "buffers are left on {node}: {}",
            list["info"]
        );
        for bdf in self.addresses(node, devices)? {
            self.run(node, &[ctl, "unpublish", &bdf])?;
        }
        self.run(node, &["rmmod", "p2pmem"]).map(drop)
    }

    /// As [`Script::unload`] on each of the nodes, and powers all guests off. Returns what failed.
    pub fn unload_and_shut_down(mut self, nodes: &[&str], ctl: &str, devices: &[&str]) -> Vec<String> {
        let unloaded = nodes.iter().map(|node| self.unload(node, ctl, devices));
        let mut failures: Vec<String> = unloaded
            .filter_map(|unloaded| unloaded.err().map(|error| format!("{error:#}")))
            .collect();
        failures.extend(self.shut_down());
        failures
    }

    /// Powers the guests off. Returns what failed: bad lines of the kernels' logs, or guests that do not end.
    pub fn shut_down(self) -> Vec<String> {
        let mut findings = self.findings;
        let mut failures = Vec::new();
        match self.cluster.shut_down() {
            Ok(late) => findings.extend(late),
            Err(error) => failures.push(format!("the guests' end: {error:#}")),
        }
        failures.extend(findings.iter().map(|line| format!("kernel log: {line}")));
        failures
    }
}
