// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two nodes with p2pmem and published devices, and `p2pmem-perf` between them.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_mlx5::Steps;
use p2pmem_vm::command::Command;
use p2pmem_vm::counters::difference;
use p2pmem_vm::script::Script;
use p2pmem_vm::vm::tool;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::report::HostBytes;

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
    perf: String,
    ctl: String,
    /// The devices that are published on each node. Both nodes are alike.
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
}

impl Bed {
    /// Loads the module of booted nodes and publishes the devices.
    ///
    /// # Errors
    ///
    /// A command fails.
    pub fn new(mut script: Script, module: &str) -> Result<Self> {
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
        Ok((done, Counted { counters }))
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

    /// Returns the bytes of host memory that NICs moved.
    ///
    /// # Errors
    ///
    /// A NIC has no such counter.
    pub fn host(&self) -> Result<HostBytes> {
        let both = |group| Ok::<_, anyhow::Error>(self.nics(group, "host_read")? + self.nics(group, "host_written")?);
        Ok(HostBytes {
            connected: both("payload")?,
            datagrams: both("datagrams")?,
        })
    }
}
