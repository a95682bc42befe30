// SPDX-License-Identifier: MIT OR Apache-2.0

//! Two nodes with p2pmem and published devices, and `p2pmem-perf` between them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_guest::wire::{Listen, Request};
use p2pmem_mlx5::Steps;
use p2pmem_vm::command::{Command, Status};
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
}

/// What devices did during a measurement.
pub struct Counted {
    counters: Value,
}

impl Bed {
    /// Boots a topology, loads the module and publishes the devices.
    ///
    /// # Errors
    ///
    /// A guest does not boot, or a command fails.
    pub fn boot(topology: &str, release: &str, module: &str) -> Result<Self> {
        let mut script = Script::boot(topology, release)?;
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

    /// Checks that no buffer is left, withdraws the devices and unloads the module, and powers the nodes off. Returns what
    /// failed.
    pub fn shut_down(self) -> Vec<String> {
        self.script.unload_and_shut_down(&NODES, &self.ctl, &self.published)
    }

    /// Returns the names of NICs' RDMA devices, as options have them.
    fn nics(&self, node: &str, nics: &[usize]) -> Result<String> {
        let names: Vec<String> = nics
            .iter()
            .map(|nic| self.script.nic(node, NICS[*nic]))
            .collect::<Result<_>>()?;
        Ok(names.join(","))
    }

    /// Runs commands of `p2pmem-perf` at the same time, each against a server of its own: its NICs and its arguments. The word
    /// HOST stands for the server. Returns their results.
    ///
    /// # Errors
    ///
    /// A command fails.
    pub fn perf_together<T: DeserializeOwned>(&mut self, host: &str, runs: &[(&[usize], &str)]) -> Result<Vec<T>> {
        let (mut serve, mut run, perf) = (String::new(), "set -e\npids=()\n".to_owned(), self.perf.clone());
        // UCX registers buffers by their addresses, which takes the shim.
        let by_ucx = runs.iter().any(|(_, arguments)| arguments.contains("--mode ucx"));
        let (shim, allow) = if by_ucx {
            (format!("LD_PRELOAD={} ", tool("libp2pmem_preload.so")?), " --ucx")
        } else {
            (String::new(), "")
        };
        for (index, (nics, arguments)) in runs.iter().enumerate() {
            let port = PORT + index as u16;
            serve += &format!(
                "{shim}{perf} serve{allow} --forever --events --nic {} --port {port} 2>/dev/null &\n",
                self.nics(NODES[1], nics)?
            );
            run += &format!(
                "{shim}{perf} --json {} --nic {} --port {port} >/run/perf.{index} & pids+=($!)\n",
                arguments.replace("HOST", host),
                self.nics(NODES[0], nics)?
            );
        }
        serve += "wait\n";
        run += "for pid in \"${pids[@]}\"; do wait \"$pid\"; done\ncat /run/perf.*; rm /run/perf.*\n";
        let last = PORT + runs.len() as u16 - 1;
        let server = Command::new(["bash", "-c", &serve])
            .limit(LIMIT)
            .listen(Listen::Tcp(last));
        let client = Command::new(["bash", "-c", &run]).limit(LIMIT);
        let served = self
            .script
            .cluster
            .serve_one_client((NODES[1], &server), (NODES[0], &client))?;
        let client = served
            .client
            .with_context(|| format!("the server ended: {:?}", served.server))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(
            client.status == (Status::Exited { code: 0 }),
            "{runs:?}: {:?}\n{}{}\nserver: {}",
            client.status,
            text(&client.stdout),
            text(&client.stderr),
            text(&served.server.stderr)
        );
        let lines = text(&client.stdout);
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

    /// Runs a command of `p2pmem-perf` by the first NICs.
    ///
    /// # Errors
    ///
    /// The command fails.
    pub fn perf<T: DeserializeOwned>(&mut self, arguments: &str) -> Result<T> {
        self.perf_by("\"$P2PMEM_ADDR_B\"", arguments)
    }

    /// As [`Bed::perf`], with another name of the server: one of its addresses.
    ///
    /// # Errors
    ///
    /// The command fails.
    pub fn perf_by<T: DeserializeOwned>(&mut self, host: &str, arguments: &str) -> Result<T> {
        let mut results = self.perf_together(host, &[(&[0], arguments)])?;
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
            self.control(node, json!({ "trace": STEPS }))?;
        }
        let done = what(self)?;
        let mut steps = Vec::new();
        for node in NODES {
            let answer = self.control(node, json!({ "get": "trace" }))?;
            steps.push(serde_json::from_value(answer["trace"].clone()).context("a trace")?);
        }
        let steps = <[Steps; 2]>::try_from(steps).ok().context("two traces")?;
        Ok((done, steps))
    }

    fn control(&mut self, node: &str, request: Value) -> Result<Value> {
        let name = NICS[0].to_owned();
        self.script
            .cluster
            .node(node)?
            .serve(&Request::Control { name, request })
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
