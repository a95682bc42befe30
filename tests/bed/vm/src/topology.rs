// SPDX-License-Identifier: MIT OR Apache-2.0

//! A machine and its PCI tree as data, read from TOML and checked before a guest starts.
//!
//! A parent is the name of a bridge; `pcie.0` is the machine's own root complex. A root port has one child, a device or
//! a switch. A switch has as many devices as ports, in the order of the file. A host bridge has root ports.
//!
//! A [`Topology`] is one machine. A file may describe several machines, its nodes: that is a [`Layout`].

mod check;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Deserializer, Serialize};

use self::check::check_name;

/// The name of the machine's own root complex, the default parent.
pub const ROOT: &str = "pcie.0";

/// The largest number of nodes of a layout, which the addresses of their network can represent.
pub const MAX_NODES: usize = 16;

/// A size in bytes, written as `"256M"` (binary units: K, M, G).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Size(pub u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let bytes = parse_size::Config::new()
            .with_binary()
            .parse_size(&text)
            .map_err(|e| serde::de::Error::custom(format!("size {text:?}: {e}; write it like \"256M\"")))?;
        if bytes == 0 {
            return Err(serde::de::Error::custom(format!("size {text:?} is zero")));
        }
        Ok(Size(bytes))
    }
}

/// A machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Topology {
    /// The purpose of the machine, in one line.
    pub description: String,
    /// Processor and memory.
    pub machine: Machine,
    /// Bridges, parents before their children.
    pub bridge: Vec<Bridge>,
    /// Devices.
    pub device: Vec<Device>,
    /// The name of the file, without `.toml`.
    pub name: String,
}

/// All machines of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// The purpose of the machines, in one line.
    pub description: String,
    /// The name of the file, without `.toml`.
    pub name: String,
    /// The machines, at least one. Their topologies have the layout's name and description.
    pub nodes: Vec<Node>,
}

/// One machine of several.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Its name, which is empty for the only machine of a file without nodes.
    pub name: String,
    /// The machine.
    pub topology: Topology,
}

/// A file: one machine, or nodes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    description: String,
    machine: Option<Machine>,
    #[serde(default)]
    bridge: Vec<Bridge>,
    #[serde(default)]
    device: Vec<Device>,
    #[serde(default)]
    node: Vec<NodeText>,
}

/// A node in a file: a machine, or a copy of another node.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeText {
    name: String,
    like: Option<String>,
    machine: Option<Machine>,
    #[serde(default)]
    bridge: Vec<Bridge>,
    #[serde(default)]
    device: Vec<Device>,
}

/// Processor and memory.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Machine {
    /// The CPU model, by QEMU's name. The kernel lists the host bridge of the default model as one that routes peer
    /// traffic.
    pub cpu: String,
    /// The number of processors.
    pub smp: u32,
    /// The sum of all memory.
    pub memory: Size,
    /// The NUMA nodes; empty for a machine without NUMA. The sum of their memory must be `memory`.
    pub numa: Vec<NumaNode>,
    /// Whether the guest loads the drivers of its NICs, waits for their ports, and gives them addresses. No effect on a
    /// machine without NICs.
    pub rdma: bool,
    /// Whether the guest's clocks count the instructions of its only processor, one nanosecond each (`-icount`).
    /// Measurements then do not depend on other load of the host. Slow.
    pub count_instructions: bool,
    /// The IOMMU, with kernel options that make it translate all DMA. `None` is the default.
    pub iommu: Option<Iommu>,
    /// Whether switches are permitted with an IOMMU, although transfers below them move wrong bytes: for tests of the
    /// checks that find this.
    pub wrong_bytes: bool,
}

/// A translating IOMMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Iommu {
    /// QEMU's `intel-iommu`.
    Intel,
    /// QEMU's `amd-iommu`, which aborts when a process registers unaligned host memory with a NIC.
    Amd,
}

impl Default for Machine {
    fn default() -> Self {
        Machine {
            cpu: "EPYC".into(),
            smp: 2,
            memory: Size(1 << 30),
            numa: Vec::new(),
            rdma: true,
            count_instructions: false,
            iommu: None,
            wrong_bytes: false,
        }
    }
}

/// A NUMA node. Its number is its position in the list.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumaNode {
    /// Its memory.
    pub memory: Size,
    /// Its processors.
    pub cpus: Vec<u32>,
}

/// A bridge.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bridge {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: BridgeKind,
    /// Its parent.
    #[serde(default = "root")]
    pub parent: String,
    /// The number of downstream ports of a switch.
    pub ports: Option<u8>,
    /// The NUMA node of a host bridge.
    pub numa_node: Option<u16>,
}

fn root() -> String {
    ROOT.to_owned()
}

/// Kinds of bridges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BridgeKind {
    /// A root port: `pcie-root-port`.
    RootPort,
    /// A switch: `x3130-upstream` and `xio3130-downstream` ports.
    Switch,
    /// An additional host bridge: `pxb-pcie`.
    HostBridge,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Device {
    /// The accelerator model, a vfio-user process.
    Accel {
        /// Its name.
        name: String,
        /// The bridge it is below.
        parent: String,
        /// Size of its memory BAR.
        memory: Size,
        /// Size of its second memory BAR, if there is one: 32-bit, not prefetchable.
        second_memory: Option<Size>,
        /// Whether the processor's writes to its memory BAR arrive late, behind those of other devices.
        #[serde(default)]
        delayed_writes: bool,
    },
    /// The FPGA model, a vfio-user process.
    Fpga {
        /// Its name.
        name: String,
        /// The bridge it is below.
        parent: String,
        /// Size of its memory BAR.
        memory: Size,
    },
    /// QEMU's NVMe drive.
    Nvme {
        /// Its name.
        name: String,
        /// The bridge it is below.
        parent: String,
        /// The size of the drive: a sparse file that is all zeroes at the start.
        image: Size,
        /// The serial number; the drive's name by default.
        serial: Option<String>,
        /// Size of its controller memory buffer in MiB.
        cmb_size_mb: Option<u32>,
        /// The limit of bytes that the drive reads or writes in a second. With a limit, a test can act while I/O is in
        /// progress.
        bytes_per_second: Option<Size>,
    },
    /// QEMU's shared-memory device: its BAR is plain memory, and no driver of the kernel binds to it.
    Ivshmem {
        /// Its name.
        name: String,
        /// The bridge it is below.
        parent: String,
        /// Size of its memory BAR.
        size: Size,
    },
    /// The ConnectX model.
    Nic {
        /// Its name.
        name: String,
        /// The bridge it is below.
        parent: String,
        /// The InfiniBand switch of its port.
        #[serde(default = "switch")]
        switch: String,
        /// The bytes that the link of its port carries in a second in each direction, headers included. With a rate, the
        /// link limits transfers, and not the processors that emulate the NICs.
        bytes_per_second: Option<Size>,
    },
}

fn switch() -> String {
    "sw".to_owned()
}

impl Device {
    /// Returns its name.
    pub fn name(&self) -> &str {
        match self {
            Device::Accel { name, .. }
            | Device::Fpga { name, .. }
            | Device::Nvme { name, .. }
            | Device::Ivshmem { name, .. }
            | Device::Nic { name, .. } => name,
        }
    }

    /// Returns its parent.
    pub fn parent(&self) -> &str {
        match self {
            Device::Accel { parent, .. }
            | Device::Fpga { parent, .. }
            | Device::Nvme { parent, .. }
            | Device::Ivshmem { parent, .. }
            | Device::Nic { parent, .. } => parent,
        }
    }

    /// Returns its kind, as in the file.
    pub fn kind(&self) -> &'static str {
        match self {
            Device::Accel { .. } => "accel",
            Device::Fpga { .. } => "fpga",
            Device::Nvme { .. } => "nvme",
            Device::Ivshmem { .. } => "ivshmem",
            Device::Nic { .. } => "nic",
        }
    }

    /// Returns whether a process of the test bed emulates the device, through vfio-user.
    pub fn is_model(&self) -> bool {
        matches!(self, Device::Accel { .. } | Device::Fpga { .. } | Device::Nic { .. })
    }

    /// Returns whether the processor's writes to the device's memory arrive late.
    pub fn delays_writes(&self) -> bool {
        matches!(
            self,
            Device::Accel {
                delayed_writes: true,
                ..
            }
        )
    }

    /// Returns the bytes of memory that the device can publish, or 0. A second BAR does not count.
    pub fn memory(&self) -> u64 {
        match self {
            Device::Accel { memory, .. } | Device::Fpga { memory, .. } => memory.0,
            Device::Nvme { cmb_size_mb, .. } => u64::from(cmb_size_mb.unwrap_or(0)) << 20,
            Device::Ivshmem { size, .. } => size.0,
            Device::Nic { .. } => 0,
        }
    }
}

impl Layout {
    /// Reads and checks a file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is not TOML of this form, or describes a machine that cannot be built: the error names
    /// the entry.
    pub fn load(path: &Path) -> Result<Layout> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let name = path
            .file_stem()
            .context("topology file without a name")?
            .to_string_lossy()
            .into_owned();
        Layout::parse(&name, &text).with_context(|| path.display().to_string())
    }

    /// Reads and checks a text.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::load`].
    pub fn parse(name: &str, text: &str) -> Result<Layout> {
        let mut text: Text = toml::from_str(text)?;
        let mut layout = Layout {
            description: text.description,
            name: name.to_owned(),
            nodes: Vec::new(),
        };
        let nodes = std::mem::take(&mut text.node);
        let alone = NodeText {
            name: String::new(),
            like: None,
            machine: text.machine,
            bridge: text.bridge,
            device: text.device,
        };
        if nodes.is_empty() {
            let node = layout.node_from(alone)?;
            layout.nodes.push(node);
            return Ok(layout);
        }
        let empty = alone.machine.is_none() && alone.bridge.is_empty() && alone.device.is_empty();
        ensure!(
            empty,
            "in a file with nodes, each machine, bridge and device belongs to one: [[node.device]]"
        );
        ensure!(
            nodes.len() <= MAX_NODES,
            "{} nodes are more than {MAX_NODES}",
            nodes.len()
        );
        for text in nodes {
            let name = text.name.clone();
            let seen = layout.nodes.iter().map(|node| (node.name.as_str(), "node")).collect();
            let node = check_name(&name, &seen).and_then(|()| layout.node_from(text));
            layout.nodes.push(node.with_context(|| format!("node {name:?}"))?);
        }
        Ok(layout)
    }

    fn node_from(&self, text: NodeText) -> Result<Node> {
        let topology = match text.like {
            Some(like) => {
                let empty = text.machine.is_none() && text.bridge.is_empty() && text.device.is_empty();
                ensure!(empty, "a node like another one has nothing of its own");
                let other = self.node(&like);
                other
                    .with_context(|| format!("there is no node {like:?} before it"))?
                    .topology
                    .clone()
            }
            None => Topology {
                description: self.description.clone(),
                name: self.name.clone(),
                machine: text.machine.unwrap_or_default(),
                bridge: text.bridge,
                device: text.device,
            },
        };
        topology.check()?;
        Ok(Node {
            name: text.name,
            topology,
        })
    }

    /// Makes a layout of one machine.
    pub fn alone(topology: Topology) -> Layout {
        Layout {
            description: topology.description.clone(),
            name: topology.name.clone(),
            nodes: vec![Node {
                name: String::new(),
                topology,
            }],
        }
    }

    /// Returns the node `name`.
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.name == name)
    }

    fn into_one(mut self) -> Result<Topology> {
        match self.nodes.pop() {
            Some(node) if node.name.is_empty() => Ok(node.topology),
            _ => bail!("the file describes nodes, but one machine is needed"),
        }
    }
}

impl Topology {
    /// Reads and checks a file that describes one machine.
    ///
    /// # Errors
    ///
    /// Those of [`Layout::load`]; the file has nodes.
    pub fn load(path: &Path) -> Result<Topology> {
        Layout::load(path)?
            .into_one()
            .with_context(|| path.display().to_string())
    }

    /// Reads and checks a text that describes one machine.
    ///
    /// # Errors
    ///
    /// Those of [`Topology::load`].
    pub fn parse(name: &str, text: &str) -> Result<Topology> {
        Layout::parse(name, text)?.into_one()
    }

    /// Returns the device `name`.
    pub fn device(&self, name: &str) -> Option<&Device> {
        self.device.iter().find(|device| device.name() == name)
    }

    /// Returns whether the machine has a NIC.
    pub fn has_nic(&self) -> bool {
        self.device.iter().any(|device| matches!(device, Device::Nic { .. }))
    }

    /// Returns whether the process `p2pmem-fabric` serves the emulated devices: it serves NICs, FPGAs, and accelerators that
    /// delay writes, and all devices beside them.
    pub fn needs_fabric(&self) -> bool {
        let fpga = self.device.iter().any(|device| matches!(device, Device::Fpga { .. }));
        fpga || self.has_nic() || self.device.iter().any(Device::delays_writes)
    }

    /// Returns the bridge `name`.
    pub fn bridge(&self, name: &str) -> Option<&Bridge> {
        self.bridge.iter().find(|bridge| bridge.name == name)
    }

    /// Returns the children of a bridge in the order of the file: bridges first, then devices. The ports of a switch
    /// have this order.
    pub fn below(&self, bridge: &str) -> Vec<&str> {
        let bridges = self.bridge.iter().filter(|below| below.parent == bridge);
        let devices = self.device.iter().filter(|below| below.parent() == bridge);
        bridges
            .map(|below| below.name.as_str())
            .chain(devices.map(Device::name))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        description = "test"
        [[bridge]]
        name = "rp0"
        kind = "root-port"
        [[bridge]]
        name = "sw0"
        kind = "switch"
        parent = "rp0"
        ports = 2
        [[device]]
        kind = "accel"
        name = "accel0"
        parent = "sw0"
        memory = "64M"
        [[device]]
        kind = "nvme"
        name = "nvme0"
        parent = "sw0"
        image = "256M"
    "#;

    fn error(text: &str) -> String {
        format!("{:#}", Topology::parse("t", text).expect_err("accepted"))
    }

    #[test]
    fn valid_topology_is_parsed() {
        let topology = Topology::parse("t", GOOD).unwrap();
        assert_eq!(topology.machine, Machine::default());
        assert_eq!(topology.device("accel0").unwrap().memory(), 64 << 20);
        assert_eq!(topology.device("nvme0").unwrap().memory(), 0);
        assert_eq!(topology.bridge("rp0").unwrap().parent, ROOT);
    }

    /// The valid machine as a node, and a second node like it.
    fn two() -> String {
        let node = GOOD.replace("description = \"test\"", "").replace("[[", "[[node.");
        format!("description = \"test\"\n[[node]]\nname = \"a\"\n{node}\n[[node]]\nname = \"b\"\nlike = \"a\"\n")
    }

    #[test]
    fn nodes_are_parsed() {
        let layout = Layout::parse("t", &two()).unwrap();
        let names: Vec<&str> = layout.nodes.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(layout.nodes[0].topology, layout.nodes[1].topology);
        assert_eq!(layout.nodes[0].topology, Topology::parse("t", GOOD).unwrap());
        let alone = Layout::parse("t", GOOD).unwrap();
        assert_eq!((alone.nodes.len(), alone.nodes[0].name.as_str()), (1, ""));
        assert!(error(&two()).contains("but one machine is needed"));
    }

    #[test]
    fn invalid_nodes_are_named() {
        let error = |text: &str| format!("{:#}", Layout::parse("t", text).expect_err("accepted"));
        let cases = [
            (
                "like = \"a\"",
                "like = \"c\"",
                "node \"b\": there is no node \"c\" before it",
            ),
            (
                "like = \"a\"",
                "like = \"a\"\n[node.machine]\nsmp = 1",
                "nothing of its own",
            ),
            (
                "name = \"b\"",
                "name = \"a\"",
                "node \"a\": there is a node of that name",
            ),
            ("name = \"b\"", "name = \"\"", "a name is"),
            ("name = \"b\"", "name = \"host\"", "host memory"),
            ("ports = 2", "ports = 1", "node \"a\": bridge \"sw0\""),
            (
                "description = \"test\"",
                "description = \"test\"\nmachine = {}",
                "belongs to one",
            ),
        ];
        for (from, to, expected) in cases {
            let text = two().replacen(from, to, 1);
            assert_ne!(text, two());
            assert!(
                error(&text).contains(expected),
                "{expected:?} not in {:?}",
                error(&text)
            );
        }
    }

    #[test]
    fn nic_has_a_fabric_switch() {
        let nic = GOOD
            .replace("kind = \"nvme\"", "kind = \"nic\"")
            .replace("image = \"256M\"", "");
        let topology = Topology::parse("t", &nic).unwrap();
        let nic0 = topology.device("nvme0").unwrap();
        assert!(matches!(nic0, Device::Nic { switch, .. } if switch == "sw"));
        assert!(nic0.is_model() && nic0.memory() == 0);
        let rate = |text: &str| {
            nic.replace(
                "kind = \"nic\"",
                &format!("kind = \"nic\"\nbytes_per_second = {text:?}"),
            )
        };
        let topology = Topology::parse("t", &rate("64M")).unwrap();
        assert!(matches!(
            topology.device("nvme0").unwrap(),
            Device::Nic { bytes_per_second: Some(Size(rate)), .. } if *rate == 64 << 20
        ));
        assert!(error(&rate("0")).contains("is zero"), "{}", error(&rate("0")));
        let bad = nic.replace("kind = \"nic\"", "kind = \"nic\"\nswitch = \"a/b\"");
        assert!(error(&bad).contains("switch \"a/b\""), "{}", error(&bad));
    }

    #[test]
    fn fabric_serves_accelerators_that_delay_writes() {
        let drive = GOOD.find("[[device]]\n        kind = \"nvme\"").unwrap();
        let alone = &GOOD[..drive];
        assert!(!Topology::parse("t", alone).unwrap().needs_fabric());
        let delayed = alone.replace("memory = \"64M\"", "memory = \"64M\"\ndelayed_writes = true");
        assert!(Topology::parse("t", &delayed).unwrap().needs_fabric());
        let iommu = delayed.replace(
            "description = \"test\"",
            "description = \"test\"\nmachine = { iommu = \"intel\", wrong_bytes = true }",
        );
        assert!(
            error(&iommu).contains("delayed_writes with an IOMMU"),
            "{}",
            error(&iommu)
        );
    }

    #[test]
    fn all_topologies_of_the_test_bed_load() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../topologies");
        let mut count = 0;
        for entry in fs::read_dir(folder).unwrap() {
            Layout::load(&entry.unwrap().path()).unwrap();
            count += 1;
        }
        assert!(count >= 3);
    }

    #[test]
    fn errors_name_the_invalid_entry() {
        let double =
            format!("{GOOD}\n[[device]]\nkind = \"ivshmem\"\nname = \"accel0\"\nparent = \"sw0\"\nsize = \"1M\"");
        assert!(
            error(&double).contains("device \"accel0\": there is a device of that name already"),
            "{}",
            error(&double)
        );
        let full = double.replace("name = \"accel0\"\nparent", "name = \"shm0\"\nparent");
        assert!(
            error(&full).contains("bridge \"sw0\": 3 children, at most 2"),
            "{}",
            error(&full)
        );
        let orphan = GOOD.replacen("parent = \"sw0\"", "parent = \"sw9\"", 1);
        assert!(
            error(&orphan).contains("device \"accel0\": unknown parent \"sw9\""),
            "{}",
            error(&orphan)
        );
        let cases = [
            ("ports = 2", "ports = 0", "ports 0 is not in"),
            (
                "description = \"test\"",
                "description = \"test\"\nmachine = { iommu = \"intel\" }",
                "bridge \"sw0\": a switch below a translating IOMMU moves wrong bytes",
            ),
            (
                "description = \"test\"",
                "description = \"test\"\nmachine = { iommu = \"amd\" }",
                "bridge \"sw0\": a switch below a translating IOMMU moves wrong bytes",
            ),
            ("ports = 2", "", "a switch needs ports"),
            (
                "kind = \"root-port\"",
                "kind = \"root-port\"\nports = 3",
                "only a switch has ports",
            ),
            (
                "kind = \"root-port\"",
                "kind = \"host-bridge\"",
                "a switch is below a root port",
            ),
            (
                "kind = \"root-port\"",
                "kind = \"host-bridge\"\nnuma_node = 1",
                "the machine has 0 NUMA nodes",
            ),
            (
                "parent = \"rp0\"",
                "parent = \"rp1\"",
                "bridge \"sw0\": unknown parent \"rp1\"",
            ),
            ("memory = \"64M\"", "memory = \"65M\"", "power of two"),
            ("memory = \"64M\"", "memory = \"lots\"", "size \"lots\""),
            ("memory = \"64M\"", "memory = \"0\"", "is zero"),
            (
                "memory = \"64M\"",
                "memory = \"64M\"\nsecond_memory = \"3M\"",
                "device \"accel0\": a BAR's size is a power of two",
            ),
            (
                "memory = \"64M\"",
                "memory = \"64M\"\nsecond_memory = \"4G\"",
                "at most 1G",
            ),
            (
                "memory = \"64M\"",
                "memory = \"64M\"\ndelayed_writes = true",
                "device \"accel0\": delayed_writes beside drive \"nvme0\"",
            ),
            ("memory = \"64M\"", "size = \"64M\"", "size"),
            ("name = \"accel0\"", "name = \"Accel 0\"", "a name is"),
            ("name = \"accel0\"", "name = \"host\"", "host memory"),
            ("image = \"256M\"", "image = \"256M\"\ncmb_size_mb = 3", "cmb_size_mb 3"),
            ("image = \"256M\"", "image = \"256M\"\nserial = \"a,b\"", "serial"),
            ("description = \"test\"", "", "description"),
            (
                "description = \"test\"",
                "description = \"test\"\n[machine]\ncount_instructions = true",
                "count_instructions with smp 2",
            ),
            (
                "description = \"test\"",
                "description = \"test\"\n[machine]\nsmp = 0",
                "smp 0",
            ),
            (
                "description = \"test\"",
                "description = \"test\"\n[machine]\nnuma = [{ memory = \"1G\", cpus = [0] }]",
                "have to be [0, 1]",
            ),
            (
                "description = \"test\"",
                "description = \"test\"\n[machine]\nnuma = [{ memory = \"2G\", cpus = [0, 1] }]",
                "its NUMA nodes have",
            ),
        ];
        for (from, to, expected) in cases {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD);
            assert!(
                error(&text).contains(expected),
                "{expected:?} not in {:?}",
                error(&text)
            );
        }
    }
}
