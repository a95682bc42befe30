// SPDX-License-Identifier: MIT OR Apache-2.0

//! Configuration of a fabric process, in TOML: NICs, accelerators and FPGAs of one or more guests, and the switches
//! between the NICs. The whole file is checked before any device is created.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use p2pmem_vfio_user::{HOST, LinkSpeed, MESSAGE, OTHER_MAPPED};
use serde::{Deserialize, Deserializer};

use crate::serving::DevicePaths;
use crate::size::parse_size;

/// Name of the switch that exists if the file has none.
const DEFAULT_SWITCH: &str = "sw";
/// Default GUIDs of NICs count up from here, by node and NIC. Locally administered.
const FIRST_GUID: u64 = 0x0200_00ff_fe00_0000;
/// Valid link widths, in lanes.
const WIDTHS: [u8; 7] = [1, 2, 4, 8, 12, 16, 32];

/// The configuration file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Seed of the random decision which packets are lost on links with loss.
    #[serde(default)]
    pub seed: u64,
    /// Switches. If empty, there is one with the name "sw".
    #[serde(default)]
    pub switch: Vec<Switch>,
    /// Pairs of linked switches.
    #[serde(default)]
    pub link: Vec<(String, String)>,
    /// Guests.
    #[serde(default)]
    pub node: Vec<Node>,
}

/// A switch.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// Name of the switch.
    pub name: String,
}

/// A guest.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Name of the guest.
    pub name: String,
    /// NICs of the guest.
    #[serde(default)]
    pub nic: Vec<Nic>,
    /// Accelerators of the guest.
    #[serde(default)]
    pub accel: Vec<Accel>,
    /// FPGAs of the guest.
    #[serde(default)]
    pub fpga: Vec<Fpga>,
}

/// The PCIe link of a device.
#[derive(Clone, Copy, Debug)]
pub struct PcieLink {
    /// Current and maximum speed.
    pub speed: LinkSpeed,
    /// Current and maximum width, in lanes.
    pub lanes: u8,
}

/// A NIC.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// Name of the NIC, unique in its node.
    pub name: String,
    socket: PathBuf,
    control: Option<PathBuf>,
    counters: Option<PathBuf>,
    /// The switch to which the port is connected.
    #[serde(default = "default_switch")]
    pub switch: String,
    /// Rate of the port's link in each direction. Without a rate, a packet takes no time.
    #[serde(default, deserialize_with = "deserialize_rate")]
    pub bytes_per_second: Option<NonZeroU64>,
    /// GUID of the port. The default depends on the position in the file.
    pub guid: Option<u64>,
    #[serde(default = "default_gen")]
    link_gen: u8,
    #[serde(default = "default_width")]
    link_width: u8,
}

/// An accelerator.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accel {
    /// Name of the accelerator, unique in its node. NICs count transfers with its memory under this name.
    pub name: String,
    socket: PathBuf,
    control: Option<PathBuf>,
    counters: Option<PathBuf>,
    /// Size of the memory behind BAR 2, in bytes.
    #[serde(default = "default_memory", deserialize_with = "deserialize_size")]
    pub memory: u64,
    /// Size of the memory behind BAR 5, in bytes. Without a size, there is no BAR 5.
    #[serde(default, deserialize_with = "deserialize_some_size")]
    pub second_memory: Option<u64>,
    /// Whether the processor's writes to BAR 2 arrive late, behind those of other devices.
    #[serde(default)]
    pub delayed_writes: bool,
    /// Device serial number.
    #[serde(default)]
    pub serial: u64,
    #[serde(default = "default_gen")]
    link_gen: u8,
    #[serde(default = "default_width")]
    link_width: u8,
}

/// An FPGA.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fpga {
    /// Name of the FPGA, unique in its node. NICs count transfers with its memory under this name.
    pub name: String,
    socket: PathBuf,
    control: Option<PathBuf>,
    counters: Option<PathBuf>,
    /// Size of the memory behind BAR 2, in bytes.
    #[serde(default = "default_fpga_memory", deserialize_with = "deserialize_size")]
    pub memory: u64,
    /// Device serial number.
    #[serde(default)]
    pub serial: u64,
    #[serde(default = "default_gen")]
    link_gen: u8,
    #[serde(default = "default_width")]
    link_width: u8,
}

fn default_switch() -> String {
    DEFAULT_SWITCH.to_owned()
}

fn default_gen() -> u8 {
    4
}

fn default_width() -> u8 {
    16
}

fn default_memory() -> u64 {
    256 << 20
}

fn default_fpga_memory() -> u64 {
    64 << 20
}

fn deserialize_size<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    parse_size(&String::deserialize(from)?).map_err(serde::de::Error::custom)
}

fn deserialize_some_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    deserialize_size(from).map(Some)
}

fn deserialize_rate<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NonZeroU64>, D::Error> {
    let rate = NonZeroU64::new(deserialize_size(from)?);
    rate.map(Some)
        .ok_or_else(|| serde::de::Error::custom("a rate of 0 bytes per second: omit the key for a link without a rate"))
}

/// Why a configuration is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, std::io::Error),
    /// The text is not TOML, a key is unknown or missing, or a value has the wrong type.
    #[error("{0}")]
    Parse(Box<toml::de::Error>),
    /// A value is invalid, or values contradict each other: the item, and the reason.
    #[error("{0}: {1}")]
    Check(String, String),
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    ///
    /// See [`ConfigError`].
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read(path.to_owned(), error))?;
        Self::parse(&text)
    }

    /// Parses and checks the text of a file.
    ///
    /// # Errors
    ///
    /// See [`ConfigError`].
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config: Self = toml::from_str(text).map_err(|error| ConfigError::Parse(Box::new(error)))?;
        if config.switch.is_empty() {
            config.switch.push(Switch { name: default_switch() });
        }
        for (number, node) in config.node.iter_mut().enumerate() {
            for (index, nic) in node.nic.iter_mut().enumerate() {
                let guid = FIRST_GUID + ((number as u64) << 12) + index as u64 + 1;
                nic.guid.get_or_insert(guid);
            }
        }
        config.check().map_err(|(what, why)| ConfigError::Check(what, why))?;
        Ok(config)
    }

    fn check(&self) -> Result<(), (String, String)> {
        let error = |what: &str, why: String| Err((what.to_owned(), why));
        let mut switches = BTreeSet::new();
        for Switch { name } in &self.switch {
            if name.is_empty() || !switches.insert(name) {
                return error(&format!("switch {name:?}"), "the name is empty or in use".into());
            }
        }
        for (one, other) in &self.link {
            if let Some(name) = [one, other].into_iter().find(|name| !switches.contains(name)) {
                return error(
                    &format!("link {one:?} - {other:?}"),
                    format!("there is no switch {name:?}"),
                );
            }
        }
        let mut nodes = BTreeSet::new();
        let mut paths = BTreeSet::new();
        let mut guids = BTreeSet::new();
        for node in &self.node {
            if node.name.is_empty() || !nodes.insert(&node.name) {
                return error(&format!("node {:?}", node.name), "the name is empty or in use".into());
            }
            let mut names = BTreeSet::from([HOST, MESSAGE, OTHER_MAPPED]);
            let nics = node.nic.iter().map(|nic| (&nic.name, nic.paths(), nic.pcie()));
            let accels = node
                .accel
                .iter()
                .map(|accel| (&accel.name, accel.paths(), accel.pcie()));
            let fpgas = node.fpga.iter().map(|fpga| (&fpga.name, fpga.paths(), fpga.pcie()));
            for (name, device_paths, pcie) in nics.chain(accels).chain(fpgas) {
                let what = format!("node {:?}: device {name:?}", node.name);
                if name.is_empty() || !names.insert(name) {
                    return error(&what, "the name is empty, reserved or in use".into());
                }
                for path in [Some(device_paths.socket), device_paths.control, device_paths.counters]
                    .into_iter()
                    .flatten()
                {
                    if !paths.insert(path.clone()) {
                        return error(&what, format!("{} is already in use", path.display()));
                    }
                }
                pcie.map_err(|why| (what, why))?;
            }
            for nic in &node.nic {
                let what = format!("node {:?}: device {:?}", node.name, nic.name);
                if !switches.contains(&nic.switch) {
                    return error(&what, format!("there is no switch {:?}", nic.switch));
                }
                if nic.guid() == 0 || !guids.insert(nic.guid()) {
                    return error(&what, format!("GUID {:#x} is zero or in use", nic.guid()));
                }
            }
            let accels = node.accel.iter().map(|accel| (&accel.name, accel.memory));
            let more = node.accel.iter();
            let more = more.filter_map(|accel| Some((&accel.name, accel.second_memory?)));
            let fpgas = node.fpga.iter().map(|fpga| (&fpga.name, fpga.memory));
            for (name, memory) in accels.chain(more).chain(fpgas) {
                if !memory.is_power_of_two() || memory < 4096 {
                    return error(
                        &format!("node {:?}: device {name:?}", node.name),
                        format!("memory of {memory} bytes: it must be a power of two, 4096 or more"),
                    );
                }
            }
        }
        Ok(())
    }

    /// Number of devices.
    pub fn devices(&self) -> usize {
        let devices = |node: &Node| node.nic.len() + node.accel.len() + node.fpga.len();
        self.node.iter().map(devices).sum()
    }
}

fn pcie(generation: u8, lanes: u8) -> Result<PcieLink, String> {
    let speed = LinkSpeed::from_generation(generation)
        .ok_or_else(|| format!("link_gen = {generation}: PCIe generations are 1 to 5"))?;
    if !WIDTHS.contains(&lanes) {
        return Err(format!(
            "link_width = {lanes}: a PCIe link has 1, 2, 4, 8, 12, 16 or 32 lanes"
        ));
    }
    Ok(PcieLink { speed, lanes })
}

impl Nic {
    /// Paths of the NIC's sockets and files.
    pub fn paths(&self) -> DevicePaths {
        DevicePaths {
            socket: self.socket.clone(),
            control: self.control.clone(),
            counters: self.counters.clone(),
        }
    }

    /// GUID of the port.
    pub fn guid(&self) -> u64 {
        self.guid.unwrap_or_default()
    }

    /// The PCIe link of the NIC.
    ///
    /// # Errors
    ///
    /// The speed or width is invalid. [`Config::parse`] excludes that.
    pub fn pcie(&self) -> Result<PcieLink, String> {
        pcie(self.link_gen, self.link_width)
    }
}

impl Accel {
    /// Paths of the accelerator's sockets and files.
    pub fn paths(&self) -> DevicePaths {
        DevicePaths {
            socket: self.socket.clone(),
            control: self.control.clone(),
            counters: self.counters.clone(),
        }
    }

    /// The PCIe link of the accelerator.
    ///
    /// # Errors
    ///
    /// The speed or width is invalid. [`Config::parse`] excludes that.
    pub fn pcie(&self) -> Result<PcieLink, String> {
        pcie(self.link_gen, self.link_width)
    }
}

impl Fpga {
    /// Paths of the FPGA's sockets and files.
    pub fn paths(&self) -> DevicePaths {
        DevicePaths {
            socket: self.socket.clone(),
            control: self.control.clone(),
            counters: self.counters.clone(),
        }
    }

    /// The PCIe link of the FPGA.
    ///
    /// # Errors
    ///
    /// The speed or width is invalid. [`Config::parse`] excludes that.
    pub fn pcie(&self) -> Result<PcieLink, String> {
        pcie(self.link_gen, self.link_width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_NODES: &str = r#"
        [[node]]
        name = "a"
        [[node.nic]]
        name = "nic0"
        socket = "/run/a/nic0.sock"
        control = "/run/a/nic0.ctl"
        [[node.nic]]
        name = "nic1"
        socket = "/run/a/nic1.sock"
        link_gen = 5
        link_width = 8
        bytes_per_second = "64M"
        [[node.accel]]
        name = "accel0"
        socket = "/run/a/accel0.sock"
        counters = "/run/a/accel0.json"
        memory = "1G"
        second_memory = "4M"
        delayed_writes = true
        [[node.accel]]
        name = "accel1"
        socket = "/run/a/accel1.sock"
        [[node.fpga]]
        name = "fpga0"
        socket = "/run/a/fpga0.sock"
        memory = "32M"
        [[node]]
        name = "b"
        [[node.nic]]
        name = "nic0"
        socket = "/run/b/nic0.sock"
    "#;

    #[test]
    fn omitted_keys_have_defaults() {
        let config = Config::parse(TWO_NODES).unwrap();
        assert_eq!(config.switch[0].name, "sw");
        assert_eq!(config.devices(), 6);
        let [a, b] = &*config.node else { panic!() };
        assert_eq!((a.nic[0].switch.as_str(), a.accel[0].memory), ("sw", 1 << 30));
        let more = |accel: &Accel| (accel.second_memory, accel.delayed_writes);
        assert_eq!(more(&a.accel[0]), (Some(4 << 20), true));
        assert_eq!(more(&a.accel[1]), (None, false));
        assert_eq!(a.fpga[0].memory, 32 << 20);
        assert_eq!(a.nic[0].pcie().unwrap().speed, LinkSpeed::Gen4);
        let second = a.nic[1].pcie().unwrap();
        assert_eq!((second.speed, second.lanes), (LinkSpeed::Gen5, 8));
        let rates = [&a.nic[0], &a.nic[1]].map(|nic| nic.bytes_per_second.map(NonZeroU64::get));
        assert_eq!(rates, [None, Some(64 << 20)]);
        let guids = BTreeSet::from([a.nic[0].guid(), a.nic[1].guid(), b.nic[0].guid(), 0]);
        assert_eq!(guids.len(), 4);
        assert_eq!(
            a.accel[0].paths().counters.as_deref(),
            Some(Path::new("/run/a/accel0.json"))
        );
        assert_eq!(Config::parse("").unwrap().devices(), 0);
    }

    #[test]
    fn errors_name_the_invalid_entry() {
        for (from, to, error) in [
            (
                "name = \"b\"",
                "name = \"a\"",
                "node \"a\": the name is empty or in use",
            ),
            ("nic1\"\n", "nic0\"\n", "device \"nic0\": the name"),
            (
                "\"accel0\"\n",
                "\"host\"\n",
                "device \"host\": the name is empty, reserved or in use",
            ),
            (
                "/run/b/nic0.sock",
                "/run/a/nic0.ctl",
                "/run/a/nic0.ctl is already in use",
            ),
            ("link_gen = 5", "link_gen = 6", "device \"nic1\": link_gen = 6"),
            ("link_width = 8", "link_width = 7", "link_width = 7"),
            ("link_width = 8", "switch = \"no\"", "there is no switch \"no\""),
            ("link_width = 8", "guid = 0", "GUID 0x0"),
            ("link_width = 8", "lanes = 8", "unknown field `lanes`"),
            ("\"64M\"", "\"0\"", "a rate of 0 bytes per second"),
            ("\"64M\"", "\"fast\"", "not a size"),
            ("\"1G\"", "\"3G\"", "power of two"),
            ("\"32M\"", "\"2K\"", "device \"fpga0\": memory of 2048 bytes"),
            ("\"fpga0\"\n", "\"accel0\"\n", "device \"accel0\": the name"),
            ("\"1G\"", "\"much\"", "not a size"),
            ("\"4M\"", "\"5M\"", "device \"accel0\": memory of 5242880 bytes"),
            ("\"1G\"", "7", "expected a string"),
            (
                "[[node]]\n        name = \"a\"",
                "link = [[\"x\", \"y\"]]\n[[node]]\nname = \"a\"",
                "no switch \"x\"",
            ),
            (
                "[[node]]\n        name = \"a\"",
                "[[switch]]\nname = \"sw\"\n[[switch]]\nname = \"sw\"\n[[node]]\nname = \"a\"",
                "switch \"sw\": the name is empty or in use",
            ),
            ("socket = \"/run/a/accel0.sock\"", "", "missing field `socket`"),
        ] {
            let text = TWO_NODES.replacen(from, to, 1);
            assert_ne!(text, TWO_NODES);
            let found = Config::parse(&text).unwrap_err().to_string();
            assert!(found.contains(error), "{error:?} in {found:?}");
        }
        let missing = Config::load(Path::new("/nonexistent/fabric.toml")).unwrap_err();
        assert!(missing.to_string().contains("/nonexistent/fabric.toml"));
    }
}
