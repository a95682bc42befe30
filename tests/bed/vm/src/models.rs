// SPDX-License-Identifier: MIT OR Apache-2.0

//! The processes of emulated devices: starts them, and sends requests to the devices' control sockets.
//!
//! In a machine without a NIC or an FPGA, each accelerator has its own process. NICs access the memory of other devices
//! inside one process. If there is a NIC or an FPGA, one process therefore serves all devices of all guests. So it does if an
//! accelerator delays writes: between processes, devices write as the processor does.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use p2pmem_guest::limits::Overrun;
use serde::Serialize;
use serde_json::{Value, json};

use crate::process::{Process, Stdin};
use crate::qemu::Paths;
use crate::qmp::is_late;
use crate::topology::{Device, Layout, Size, Topology};

/// The time limit for a device process to listen.
const START: Duration = Duration::from_secs(60);
/// The time limit for an answer of a device process.
const ANSWER: Duration = Duration::from_secs(60);

/// An emulated device and its process.
#[derive(Debug)]
pub struct Model {
    process: Arc<Process>,
    control: PathBuf,
}

/// The emulated devices of one guest by name.
pub type Models = BTreeMap<String, Model>;

impl Model {
    /// Requests the device's counters.
    ///
    /// # Errors
    ///
    /// Those of [`Model::ask`].
    pub fn counters(&self) -> Result<Value> {
        Ok(self.ask(&json!({ "get": "counters" }))?["counters"].take())
    }

    /// Sends a request to the device and returns the answer.
    ///
    /// # Errors
    ///
    /// The device does not answer in time, its answer is not JSON, or it refuses: the error has its message.
    pub fn ask(&self, request: &Value) -> Result<Value> {
        let mut stream = UnixStream::connect(&self.control).with_context(|| self.control.display().to_string())?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.write_all(format!("{request}\n").as_bytes())?;
        let mut line = String::new();
        match BufReader::new(stream).read_line(&mut line) {
            Ok(_) => {}
            Err(e) if is_late(&e) => bail!(Overrun(format!("the device process did not answer within {ANSWER:?}"))),
            Err(e) => return Err(e).context("no answer from the device process"),
        }
        let answer: Value = serde_json::from_str(&line).with_context(|| format!("the device process said {line:?}"))?;
        if answer["ok"] != true {
            return Err(anyhow!("the device process refused {request}: {}", answer["error"]));
        }
        Ok(answer)
    }

    /// Returns the id of the device's process.
    pub fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Returns the last log lines of the device's process.
    pub fn describe(&self) -> String {
        self.process.describe()
    }

    /// Returns whether the process serves no other device.
    pub fn is_alone(&self) -> bool {
        Arc::strong_count(&self.process) == 1
    }
}

/// Starts a process for each accelerator of a machine.
///
/// # Errors
///
/// A process cannot be started or does not listen in time (the error has its last log lines), or the machine needs
/// [`fabric`].
pub fn one_each(program: &Path, topology: &Topology, paths: &Paths) -> Result<Models> {
    let mut models = Models::new();
    for device in &topology.device {
        match device {
            Device::Accel { name, .. } if device.delays_writes() => {
                bail!("device {name}: an accelerator that delays writes is served together with all others")
            }
            Device::Accel {
                name,
                memory,
                second_memory,
                ..
            } => {
                let (socket, control) = (paths.device_socket(name), paths.control_socket(name));
                let mut argv = vec![
                    "--socket".into(),
                    word(&socket),
                    "--memory".into(),
                    megabytes(*memory),
                    "--control".into(),
                    word(&control),
                ];
                if let Some(size) = second_memory {
                    argv.extend(["--second-memory".into(), megabytes(*size)]);
                }
                let log = paths.dir.join(format!("{name}.log"));
                let process = start(name, program, &argv, &log).with_context(|| format!("device {name}"))?;
                let process = Arc::new(process);
                models.insert(name.clone(), Model { process, control });
            }
            Device::Nic { name, .. } | Device::Fpga { name, .. } => {
                bail!("device {name}: a NIC or an FPGA is served together with all others")
            }
            Device::Nvme { .. } | Device::Ivshmem { .. } => {}
        }
    }
    Ok(models)
}

/// Starts the process that serves all emulated devices of all nodes. Returns the devices of each node, in order.
///
/// # Errors
///
/// Those of [`one_each`].
pub fn fabric(program: &Path, layout: &Layout, paths: &[Paths], dir: &Path) -> Result<Vec<Models>> {
    let config = dir.join("fabric.toml");
    let text = toml::to_string(&Config::new(layout, paths)).context("the fabric's configuration")?;
    fs::write(&config, text).with_context(|| config.display().to_string())?;
    let argv = ["--config".into(), word(&config)];
    let process = Arc::new(start("fabric", program, &argv, &dir.join("fabric.log"))?);
    let nodes = layout.nodes.iter().zip(paths);
    let models = nodes.map(|(node, paths)| {
        let devices = node.topology.device.iter().filter(|device| device.is_model());
        let models = devices.map(|device| {
            let (process, control) = (Arc::clone(&process), paths.control_socket(device.name()));
            (device.name().to_owned(), Model { process, control })
        });
        models.collect::<Models>()
    });
    Ok(models.collect())
}

fn word(path: &Path) -> String {
    path.display().to_string()
}

fn megabytes(size: Size) -> String {
    format!("{}M", size.0 >> 20)
}

/// Starts a device process and waits until it listens.
fn start(name: &str, program: &Path, arguments: &[String], log: &Path) -> Result<Process> {
    let argv: Vec<String> = std::iter::once(word(program))
        .chain(arguments.iter().cloned())
        .collect();
    let mut process = Process::start(name, &argv, Stdin::default(), log, false)?;
    let deadline = Instant::now() + START;
    // The process prints a line when all its sockets listen. The file of a socket may exist shortly before.
    while !process
        .log()
        .lines()
        .any(|line| line.split(' ').next() == Some("ready"))
    {
        if process.ended()?.is_some() {
            bail!("the device process ended at once: {}", process.describe());
        }
        if Instant::now() > deadline {
            let process = process.describe();
            bail!(Overrun(format!(
                "starting the device process took more than {START:?}: {process}"
            )));
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(process)
}

/// The configuration file of the fabric process.
#[derive(Debug, Serialize)]
struct Config {
    switch: Vec<ConfigSwitch>,
    node: Vec<ConfigNode>,
}

#[derive(Debug, Serialize)]
struct ConfigSwitch {
    name: String,
}

#[derive(Debug, Serialize)]
struct ConfigNode {
    name: String,
    nic: Vec<ConfigNic>,
    accel: Vec<ConfigMemory>,
    fpga: Vec<ConfigMemory>,
}

#[derive(Debug, Serialize)]
struct ConfigNic {
    name: String,
    socket: PathBuf,
    control: PathBuf,
    switch: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_second: Option<String>,
}

/// A device with memory: an accelerator or an FPGA.
#[derive(Debug, Serialize)]
struct ConfigMemory {
    name: String,
    socket: PathBuf,
    control: PathBuf,
    memory: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    second_memory: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delayed_writes: Option<bool>,
}

impl Config {
    fn new(layout: &Layout, paths: &[Paths]) -> Config {
        let mut switches = BTreeSet::new();
        let mut config = Config {
            switch: Vec::new(),
            node: Vec::new(),
        };
        for (node, paths) in layout.nodes.iter().zip(paths) {
            let mut entry = ConfigNode {
                // The only machine of a file without nodes has no name.
                name: if node.name.is_empty() {
                    "guest".into()
                } else {
                    node.name.clone()
                },
                nic: Vec::new(),
                accel: Vec::new(),
                fpga: Vec::new(),
            };
            for device in &node.topology.device {
                let name = device.name().to_owned();
                let (socket, control) = (paths.device_socket(&name), paths.control_socket(&name));
                match device {
                    Device::Nic {
                        switch,
                        bytes_per_second,
                        ..
                    } => {
                        switches.insert(switch.clone());
                        let switch = switch.clone();
                        entry.nic.push(ConfigNic {
                            name,
                            socket,
                            control,
                            switch,
                            bytes_per_second: bytes_per_second.map(|rate| rate.0.to_string()),
                        });
                    }
                    Device::Accel {
                        memory,
                        second_memory,
                        delayed_writes,
                        ..
                    } => entry.accel.push(ConfigMemory {
                        name,
                        socket,
                        control,
                        memory: megabytes(*memory),
                        second_memory: second_memory.map(megabytes),
                        delayed_writes: delayed_writes.then_some(true),
                    }),
                    Device::Fpga { memory, .. } => entry.fpga.push(ConfigMemory {
                        name,
                        socket,
                        control,
                        memory: megabytes(*memory),
                        second_memory: None,
                        delayed_writes: None,
                    }),
                    Device::Nvme { .. } | Device::Ivshmem { .. } => {}
                }
            }
            config.node.push(entry);
        }
        config.switch = switches.into_iter().map(|name| ConfigSwitch { name }).collect();
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fabric_config_has_all_devices_of_all_nodes() {
        let text = include_str!("../../topologies/rdma.toml");
        let layout = Layout::parse("rdma", text).unwrap();
        let paths = ["a", "b"].map(|node| Paths {
            dir: Path::new("/run/x").join(node),
            init: "/i".into(),
        });
        let text = toml::to_string(&Config::new(&layout, &paths)).unwrap();
        let config: toml::Table = toml::from_str(&text).unwrap();
        assert_eq!(config["switch"][0]["name"].as_str(), Some("sw"));
        for (index, node) in ["a", "b"].into_iter().enumerate() {
            let entry = &config["node"][index];
            assert_eq!(entry["name"].as_str(), Some(node));
            let nic = &entry["nic"][0];
            assert_eq!(nic["socket"].as_str(), Some(&*format!("/run/x/{node}/nic0.sock")));
            assert_eq!(nic["control"].as_str(), Some(&*format!("/run/x/{node}/nic0.control")));
            assert_eq!(nic["switch"].as_str(), Some("sw"));
            assert_eq!(entry["accel"][0]["memory"].as_str(), Some("256M"));
            assert_eq!(nic.get("bytes_per_second"), None);
        }
        let text = include_str!("../../topologies/transfer.toml");
        let layout = Layout::parse("transfer", text).unwrap();
        let config = toml::to_string(&Config::new(&layout, &paths)).unwrap();
        let config: toml::Table = toml::from_str(&config).unwrap();
        assert_eq!(config["node"][1]["fpga"][0]["memory"].as_str(), Some("64M"));
        assert_eq!(config["node"][1]["accel"].as_array().unwrap().len(), 1);
        assert_eq!(config["node"][1]["accel"][0].get("delayed_writes"), None);
        let text = include_str!("../../topologies/accels.toml");
        let layout = Layout::parse("accels", text).unwrap();
        let config = toml::to_string(&Config::new(&layout, &paths)).unwrap();
        let config: toml::Table = toml::from_str(&config).unwrap();
        let accels = &config["node"][0]["accel"];
        assert_eq!(accels[0]["second_memory"].as_str(), Some("4M"));
        assert_eq!(accels[1]["delayed_writes"].as_bool(), Some(true));
        let slow = include_str!("../../topologies/rdma.toml");
        let slow = slow.replace("name = \"nic0\"", "name = \"nic0\"\nbytes_per_second = \"64M\"");
        let config = Config::new(&Layout::parse("slow", &slow).unwrap(), &paths);
        let config: toml::Table = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
        for node in 0..2 {
            assert_eq!(
                config["node"][node]["nic"][0]["bytes_per_second"].as_str(),
                Some("67108864")
            );
        }
    }
}
