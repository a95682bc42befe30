// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two nodes with p2pmem and published devices, and `p2pmem-perf` between them.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_mlx5::Steps;
use p2pmem_vm::bridges;
use p2pmem_vm::command::Command;
use p2pmem_vm::counters::{HOST, difference};
use p2pmem_vm::script::Script;
use p2pmem_vm::topology::{Device, Layout, Topology};
use p2pmem_vm::vm::tool;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::report::NicBytes;

/// The client's node and the server's.
pub const NODES: [&str; 2] = ["a", "b"];
/// The NICs of a node.
pub const NICS: [&str; 2] = ["nic0", "nic1"];
/// The devices that the demo publishes, where a topology has them. Drives publish their memory themselves.
const PUBLISHED: [&str; 2] = ["accel0", "fpga0"];
/// The first TCP port of `p2pmem-perf`.
const PORT: u16 = 18520;
/// The time limit of a measurement.
const LIMIT: Duration = Duration::from_secs(300);
/// Steps of a trace: enough for a thousand messages.
const STEPS: usize = 1 << 14;

/// Two nodes.
pub struct Bed {
    script: Script,
    /// The machine of each node. Both nodes are alike.
    topology: Topology,
    perf: String,
    ctl: String,
    /// The devices that are published on each node.
    published: Vec<&'static str>,
    servers: Vec<Server>,
}

/// A server of `p2pmem-perf`.
struct Server {
    node: &'static str,
    /// Places of its NICs in [`NICS`].
    nics: Vec<usize>,
    /// Whether it serves UCX, with the shim.
    by_ucx: bool,
    port: u16,
    pid: u32,
}

/// What devices did during a measurement.
pub struct Counted {
    counters: Value,
    topology: Topology,
}

/// Returns the rate of the links of a layout's first NIC, in bytes per second. `None` if they have no rate.
///
/// # Errors
///
/// The layout has no node, or the node no such NIC.
pub fn link_rate(layout: &Layout) -> Result<Option<u64>> {
    let node = layout.nodes.first().context("a layout without nodes")?;
    match node.topology.device(NICS[0]) {
        Some(Device::Nic { bytes_per_second, .. }) => Ok(bytes_per_second.map(|rate| rate.0)),
        _ => bail!("{}: no NIC {}", layout.name, NICS[0]),
    }
}

impl Bed {
    /// Loads the module of booted nodes and publishes the devices.
    ///
    /// # Errors
    ///
    /// A command fails, or the layout has no node.
    pub fn new(mut script: Script, layout: &Layout, module: &str) -> Result<Self> {
        let topology = layout.nodes.first().context("a layout without nodes")?.topology.clone();
        let ctl = tool("p2pmemctl")?;
        let published: Vec<_> = PUBLISHED
            .into_iter()
            .filter(|device| script.device(NODES[0], device).is_ok())
            .collect();
        for node in NODES {
            script.load(node, module, &ctl, &published, &[])?;
        }
        Ok(Self {
            script,
            topology,
            perf: tool("p2pmem-perf")?,
            ctl,
            published,
            servers: Vec::new(),
        })
    }

    /// Runs a script on a node. Returns its standard output.
    ///
    /// # Errors
    ///
    /// The script fails.
    pub fn shell(&mut self, node: &str, script: &str) -> Result<String> {
        self.script.run(node, &["bash", "-c", script])
    }

    /// Ends the servers, checks that no buffer is left, withdraws the devices and unloads the module, and powers the nodes off. Returns what
    /// failed.
    pub fn shut_down(mut self) -> Vec<String> {
        let mut failures = Vec::new();
        for Server { node, port, pid, .. } in std::mem::take(&mut self.servers) {
            // The server has the lock until its descriptors are closed. It has no buffers without a client.
            let end = format!("kill {pid} && flock --timeout 30 /run/serve.{port}.lock true");
            failures.extend(self.shell(node, &end).err().map(|error| format!("{error:#}")));
        }
        failures.extend(self.script.unload_and_shut_down(&NODES, &self.ctl, &self.published));
        failures
    }

    /// Returns the names of NICs' RDMA devices, as options have them.
    fn nics(&self, node: &str, nics: &[usize]) -> Result<String> {
        let names: Vec<String> = nics
            .iter()
            .map(|nic| self.script.nic(node, NICS[*nic]))
            .collect::<Result<_>>()?;
        Ok(names.join(","))
    }

    /// Returns the port of the server of a node with these NICs. The first call starts the server, which serves until the nodes are shut
    /// down.
    fn server(&mut self, node: &'static str, nics: &[usize], by_ucx: bool) -> Result<u16> {
        let is_it = |server: &&Server| server.node == node && server.nics == nics && server.by_ucx == by_ucx;
        if let Some(server) = self.servers.iter().find(is_it) {
            return Ok(server.port);
        }
        let port = PORT + self.servers.len() as u16;
        // In a session of its own, the server outlives the command that starts it. This command reads the process id
        // until the server closes the pipe, so the session exists then. It ends when the server listens.
        let start = format!(
            "pid=$(setsid bash -c 'echo $$; exec 9>/run/serve.{port}.lock; flock 9; exec {} serve {} --forever --events --nic {} \
                --port {port} </dev/null >/run/serve.{port} 2>&1' &)
            echo $pid
            for _ in {{1..600}}; do
                grep -q ':{port:04X} 00000000:0000 0A' /proc/net/tcp && exit
                sleep 0.05
            done
            tail /run/serve.{port} >&2
            exit 1",
            self.words(by_ucx)?,
            if by_ucx { "--ucx" } else { "" },
            self.nics(node, nics)?
        );
        let pid = self.shell(node, &start)?;
        self.servers.push(Server {
            node,
            nics: nics.to_vec(),
            by_ucx,
            port,
            pid: pid.trim().parse().with_context(|| format!("a process: {pid:?}"))?,
        });
        Ok(port)
    }

    /// Returns the words that start `p2pmem-perf`. UCX registers buffers by their addresses, which takes the shim.
    fn words(&self, by_ucx: bool) -> Result<String> {
        let perf = &self.perf;
        Ok(if by_ucx {
            format!("env LD_PRELOAD={} {perf}", tool("libp2pmem_preload.so")?)
        } else {
            perf.clone()
        })
    }

    /// Runs commands of `p2pmem-perf` on the first node at the same time, each with its NICs and its arguments, against a server on
    /// `node` with the same NICs. The word HOST stands for the server's address `host`. Returns their results.
    ///
    /// # Errors
    ///
    /// A command fails.
    fn perf_against<T: DeserializeOwned>(
        &mut self,
        node: &'static str,
        host: &str,
        runs: &[(&[usize], &str)],
    ) -> Result<Vec<T>> {
        let mut seen = BTreeSet::new();
        ensure!(
            runs.iter().all(|(nics, _)| seen.insert(nics)),
            "{runs:?}: a server serves one client after another, so runs at the same time need different NICs"
        );
        let mut script = "set -e\npids=()\n".to_owned();
        let mut ports = Vec::new();
        for (index, (nics, arguments)) in runs.iter().enumerate() {
            let by_ucx = arguments.contains("--mode ucx");
            let port = self.server(node, nics, by_ucx)?;
            ports.push(port);
            script += &format!(
                "{} --json {} --nic {} --port {port} >/run/perf.{index} & pids+=($!)\n",
                self.words(by_ucx)?,
                arguments.replace("HOST", host),
                self.nics(NODES[0], nics)?
            );
        }
        script += "for pid in \"${pids[@]}\"; do wait \"$pid\"; done\ncat /run/perf.*; rm /run/perf.*\n";
        let command = Command::new(["bash", "-c", &script]).limit(LIMIT);
        let lines = match self.script.run_command(NODES[0], &command) {
            Ok(lines) => lines,
            Err(error) => {
                // The servers' output has the reason if one of them has ended.
                let logs: Vec<String> = ports.iter().map(|port| format!("/run/serve.{port}")).collect();
                let said = self
                    .shell(node, &format!("tail -n 5 {}", logs.join(" ")))
                    .unwrap_or_default();
                return Err(error.context(format!("the servers of {node}: {said}")));
            }
        };
        let results = lines
            .lines()
            .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()));
        let results: Vec<T> = results.collect::<Result<_>>()?;
        ensure!(
            results.len() == runs.len(),
            "{} results of {}: {lines}",
            results.len(),
            runs.len()
        );
        Ok(results)
    }

    /// Runs commands of `p2pmem-perf` at the same time, each against a server of its own on the other node, see [`Bed::perf_by`].
    ///
    /// # Errors
    ///
    /// A command fails.
    pub fn perf_together<T: DeserializeOwned>(&mut self, host: &str, runs: &[(&[usize], &str)]) -> Result<Vec<T>> {
        self.perf_against(NODES[1], host, runs)
    }

    /// Runs a command of `p2pmem-perf` by the first NICs.
    ///
    /// # Errors
    ///
    /// The command fails.
    pub fn perf<T: DeserializeOwned>(&mut self, arguments: &str) -> Result<T> {
        self.perf_by("\"$P2PMEM_ADDR_B\"", arguments)
    }

    /// Runs a command of `p2pmem-perf` by the first NICs. The word HOST in the arguments stands for `host`: one of the addresses of the
    /// server.
    ///
    /// # Errors
    ///
    /// The command fails.
    pub fn perf_by<T: DeserializeOwned>(&mut self, host: &str, arguments: &str) -> Result<T> {
        let mut results = self.perf_together(host, &[(&[0], arguments)])?;
        results.pop().context("no result")
    }

    /// Runs a command of `p2pmem-perf` by the first NIC of a node, against a server on the same node and NIC.
    ///
    /// # Errors
    ///
    /// The command fails.
    pub fn perf_within<T: DeserializeOwned>(&mut self, arguments: &str) -> Result<T> {
        let mut results = self.perf_against(NODES[0], "127.0.0.1", &[(&[0], arguments)])?;
        results.pop().context("no result")
    }

    /// Does something, and returns what devices counted meanwhile.
    ///
    /// # Errors
    ///
    /// Those of `what`.
    pub fn counted<T>(&mut self, what: impl FnOnce(&mut Self) -> Result<T>) -> Result<(T, Counted)> {
        let before = self.script.cluster.snapshot()?;
        let done = what(self)?;
        let counters = difference(&before, &self.script.cluster.snapshot()?);
        let topology = self.topology.clone();
        Ok((done, Counted { counters, topology }))
    }

    /// Does something, and returns the steps of the first NICs meanwhile: those of the client's and of the server's.
    ///
    /// # Errors
    ///
    /// Those of `what`.
    pub fn traced<T>(&mut self, what: impl FnOnce(&mut Self) -> Result<T>) -> Result<(T, [Steps; 2])> {
        for node in NODES {
            self.script.cluster.control(node, NICS[0], json!({ "trace": STEPS }))?;
        }
        let done = what(self)?;
        let mut steps = Vec::new();
        for node in NODES {
            let answer = self.script.cluster.control(node, NICS[0], json!({ "get": "trace" }))?;
            steps.push(serde_json::from_value(answer["trace"].clone()).context("a trace")?);
        }
        let steps = <[Steps; 2]>::try_from(steps).ok().context("two traces")?;
        Ok((done, steps))
    }

    /// Makes the links of all NICs links without a rate.
    ///
    /// # Errors
    ///
    /// A NIC does not respond.
    pub fn remove_rates(&mut self) -> Result<()> {
        for node in NODES {
            for nic in NICS {
                self.script.cluster.control(node, nic, json!({ "rate": null }))?;
            }
        }
        Ok(())
    }
}

impl Counted {
    /// Adds up a counter of the NICs of all nodes: `payload` and `host_read`, say.
    ///
    /// # Errors
    ///
    /// A NIC has no such counter.
    pub fn nics(&self, group: &str, counter: &str) -> Result<u64> {
        let mut sum = 0;
        for node in NODES {
            for nic in NICS {
                let Some(found) = self.counters[node].get(nic) else {
                    continue;
                };
                let value = found["counters"][group][counter].as_u64();
                sum += value.with_context(|| format!("{node}, {nic}: no counter {group}.{counter}"))?;
            }
        }
        Ok(sum)
    }

    /// Returns the bytes that NICs moved. Their paths are those of the bridges, see [`bridges`].
    ///
    /// # Errors
    ///
    /// A NIC or a count of the bridges is missing.
    pub fn moved(&self) -> Result<NicBytes> {
        let mut moved = NicBytes::default();
        for node in NODES {
            let (mut connected, mut datagrams) = (Map::new(), Map::new());
            for (name, device) in self.counters[node].as_object().context("a node's counters")? {
                if device["kind"] != "nic" {
                    continue;
                }
                let counters = &device["counters"];
                let host = |group: &str| -> Result<[u64; 2]> {
                    let of = |counter: &str| counters[group][counter].as_u64();
                    let both = of("host_read").zip(of("host_written"));
                    let (read, written) = both.with_context(|| format!("{node}, {name}: no counters {group}"))?;
                    Ok([read, written])
                };
                moved.connected += host("payload")?.iter().sum::<u64>();
                let [read, written] = host("datagrams")?;
                moved.datagrams += read + written;
                let by_target = json!({ HOST: { "read": read, "written": written } });
                let device_of_datagrams = json!({ "kind": "nic", "counters": { "payload_by_target": by_target } });
                datagrams.insert(name.clone(), device_of_datagrams);
                connected.insert(name.clone(), device.clone());
            }
            ensure!(!connected.is_empty(), "{node}: no NIC has counters");
            let crossed = |devices: &Map<String, Value>, count: &str| {
                let counts = bridges::count(&self.topology, devices);
                counts[count]
                    .as_u64()
                    .with_context(|| format!("{node}: no count {count}"))
            };
            moved.connected_root_complex += crossed(&connected, "root_complex")?;
            moved.datagrams_root_complex += crossed(&datagrams, "root_complex")?;
            moved.unknown += crossed(&connected, "unknown")?;
        }
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        Script::layout("transfer").unwrap()
    }

    #[test]
    fn bytes_of_nics_are_summed_by_their_paths() {
        let nic = |host: u64, peer: u64, message: u64, datagrams: u64| {
            json!({ "kind": "nic", "counters": {
                "payload": { "host_read": host, "host_written": 1 },
                "payload_by_target": {
                    "host": { "read": host, "written": 1 },
                    "accel0": { "read": peer, "written": 0 },
                    "fpga0": { "read": 0, "written": peer },
                    "message": { "read": 0, "written": message },
                },
                "datagrams": { "host_read": datagrams, "host_written": 0 },
            } })
        };
        // The payload of a drive is not that of a NIC.
        let drive = json!({ "kind": "nvme", "payload": { "host": 5000 } });
        let counted = |counters: Value| Counted {
            counters,
            topology: layout().nodes.remove(0).topology,
        };
        let found = counted(json!({
            "a": { "nic0": nic(100, 7000, 30, 8), "nic1": nic(0, 0, 0, 0), "nvme0": drive },
            "b": { "nic0": nic(0, 7000, 0, 2) },
        }));
        let expected = NicBytes {
            connected: 103,
            datagrams: 10,
            connected_root_complex: 103,
            datagrams_root_complex: 10,
            unknown: 30,
        };
        assert_eq!(found.moved().unwrap(), expected);
        let mut far = json!({ "a": { "nic0": nic(0, 0, 0, 0) }, "b": { "nic0": nic(0, 0, 0, 0) } });
        far["a"]["nic0"]["counters"]["payload_by_target"] = json!({ "shm0": { "read": 9, "written": 0 } });
        assert_eq!(counted(far).moved().unwrap().unknown, 9);
        let without = json!({ "a": { "nic0": { "kind": "nic", "gone": true } }, "b": {} });
        let error = counted(without).moved().unwrap_err().to_string();
        assert!(error.contains("a, nic0: no counters payload"), "{error}");
        let error = counted(json!({ "a": {}, "b": {} })).moved().unwrap_err().to_string();
        assert!(error.contains("a: no NIC"), "{error}");
    }

    #[test]
    fn the_rate_of_the_links_is_that_of_the_topology() {
        assert_eq!(link_rate(&layout()).unwrap(), Some(12 << 20));
        assert_eq!(link_rate(&Script::layout("transfer-count").unwrap()).unwrap(), None);
        let mut without = layout();
        without.nodes[0].topology.device.clear();
        assert!(link_rate(&without).is_err());
    }
}
