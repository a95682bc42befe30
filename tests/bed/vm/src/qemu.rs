// SPDX-License-Identifier: MIT OR Apache-2.0

//! Makes QEMU's command line from a topology.
//!
//! QEMU chooses nothing that a program could see. Every device has an identifier, every port its own number, and every
//! drive its own namespace number, by which trace events are assigned to drives.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::accelerator::Accelerator;
use crate::kernel::Kernel;
use crate::topology::{BridgeKind, Device, Iommu, Machine, ROOT, Topology};
use crate::{ticks, trace};
use p2pmem_guest::wire::PORT_NAME;

/// Kernel options for every boot: no mitigations and no self-tests, which cost emulated instructions; the log and the
/// console as the runner needs them; an end at a panic; and two minutes until the kernel reports a locked-up processor,
/// because a busy host may not run a processor for a while. Under KVM, the guest's clock is kvm-clock, which
/// `tsc=reliable` does not affect.
const CMDLINE: &str = "console=ttyS0 loglevel=4 root=rootfs rootfstype=virtiofs ro mitigations=off nokaslr \
    cryptomgr.notests no_timer_check tsc=reliable printk.devkmsg=on log_buf_len=4M sysrq_always_enabled=1 panic=-1 \
    watchdog_thresh=60 init_on_alloc=1";
/// Kernel options for a kernel that looks for leaks. The sheaves of a slab cache keep pointers to objects that they no
/// longer hold, and kmemleak takes these pointers for references. A cache that checks its objects has no sheaves.
const CHECKS: &str = "slab_debug=F";

/// Kernel options that make an IOMMU translate every device's DMA, and flush each unmapped range immediately.
const TRANSLATE: &str = "iommu.passthrough=0 iommu.strict=1";

/// The bus number of the first additional host bridge. Each of these bridges has as many buses.
const HOST_BRIDGE_BUSES: usize = 32;

/// Files and sockets of one guest, all in one folder.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The folder.
    pub dir: PathBuf,
    /// The path of the guest's init, the same in guest and sandbox.
    pub init: PathBuf,
}

impl Paths {
    /// Returns the socket of virtiofsd.
    pub fn root_socket(&self) -> PathBuf {
        self.dir.join("root.sock")
    }

    /// Returns the socket on which the runner listens for the guest's init.
    pub fn agent_socket(&self) -> PathBuf {
        self.dir.join("agent.sock")
    }

    /// Returns the socket on which the runner listens for QEMU's monitor.
    pub fn monitor_socket(&self) -> PathBuf {
        self.dir.join("monitor.sock")
    }

    /// Returns the file of QEMU's trace.
    pub fn trace(&self) -> PathBuf {
        self.dir.join("trace")
    }

    /// Returns the image of a drive.
    pub fn image(&self, drive: &str) -> PathBuf {
        self.dir.join(format!("{drive}.img"))
    }

    /// Returns the vfio-user socket of a device.
    pub fn device_socket(&self, device: &str) -> PathBuf {
        self.dir.join(format!("{device}.sock"))
    }

    /// Returns the control socket of a device process.
    pub fn control_socket(&self, device: &str) -> PathBuf {
        self.dir.join(format!("{device}.control"))
    }
}

/// A guest's sockets on the network of several guests. The QEMU of the first guest is the hub.
#[derive(Debug, Clone)]
pub struct Ends {
    /// The guest's number, which is the end of its hardware address.
    pub index: usize,
    /// The local and the remote socket of each link. The first guest has a link to every other guest, the others have
    /// one to the first guest.
    pub links: Vec<(PathBuf, PathBuf)>,
}

impl Ends {
    /// Returns the sockets of `count` guests, in the folder `dir`.
    pub fn new(count: usize, dir: &Path) -> Vec<Ends> {
        let socket = |from: usize, to: usize| dir.join(format!("net-{from}-{to}"));
        let ends = (0..count).map(|index| Ends {
            index,
            links: match index {
                0 => (1..count).map(|other| (socket(0, other), socket(other, 0))).collect(),
                _ => vec![(socket(index, 0), socket(0, index))],
            },
        });
        ends.collect()
    }
}

/// The processes to start for a guest, and the names of its devices.
#[derive(Debug)]
pub struct Plan {
    /// QEMU and its arguments.
    pub argv: Vec<String>,
    /// The arguments of `device_add` for each device.
    pub devices: BTreeMap<String, Value>,
    /// Names of drives by namespace number.
    pub drives: BTreeMap<u32, String>,
    /// The images of drives, by the drives' names.
    pub images: BTreeMap<String, Image>,
}

/// The image of a drive, as QEMU's block nodes.
#[derive(Debug)]
pub struct Image {
    /// The node of the file.
    pub file: String,
    /// The arguments of the node above it, whose member `file` names it.
    pub format: Value,
}

impl Image {
    /// Returns the name for a node that takes the place of the file, and fails operations.
    pub fn faulty(&self) -> String {
        format!("{}-faulty", self.file)
    }
}

/// Makes the command line for a kernel, and the accelerator of guests that count no instructions.
///
/// # Errors
///
/// A path is not UTF-8.
pub fn plan(
    topology: &Topology,
    paths: &Paths,
    kernel: &Kernel,
    accelerator: Accelerator,
    ends: Option<&Ends>,
) -> Result<Plan> {
    let mut argv = Args(vec!["qemu-system-x86_64".into()]);
    processors(&mut argv, &topology.machine, accelerator);
    machine(&mut argv, topology, paths, kernel)?;
    if let Some(ends) = ends {
        network(&mut argv, ends)?;
    }
    let slots = bridges(&mut argv, topology);
    let mut devices = BTreeMap::new();
    let mut drives = BTreeMap::new();
    let mut images = BTreeMap::new();
    for device in &topology.device {
        let name = device.name();
        let Some(bus) = slots.get(name) else {
            bail!("device {name:?} has no port")
        };
        let mut options = match device {
            Device::Accel { .. } | Device::Fpga { .. } | Device::Nic { .. } => {
                let socket = paths.device_socket(name);
                let socket = utf8(&socket)?;
                json!({ "driver": "vfio-user-pci", "id": name, "bus": bus, "socket": { "type": "unix", "path": socket } })
            }
            Device::Ivshmem { size, .. } => {
                let id = backend_id(name);
                argv.json("-object", &backend(&id, size.0));
                json!({ "driver": "ivshmem-plain", "id": name, "bus": bus, "memdev": id })
            }
            Device::Nvme {
                serial,
                cmb_size_mb,
                bytes_per_second,
                ..
            } => {
                let image = image_id(name);
                let file = format!("{name}-file");
                let throttled = bytes_per_second.is_some();
                let format = json!({
                    "driver": "raw", "node-name": if throttled { format!("{name}-raw") } else { image.clone() },
                    "discard": "unmap", "cache": { "no-flush": true }, "file": file,
                });
                argv.json(
                    "-blockdev",
                    &json!({
                        "driver": "file", "node-name": file, "filename": utf8(&paths.image(name))?,
                        "discard": "unmap", "cache": { "no-flush": true },
                    }),
                );
                argv.json("-blockdev", &format);
                if let Some(rate) = bytes_per_second {
                    let group = format!("{name}-throttle");
                    let limits = json!({ "bps-total": rate.0 });
                    argv.json(
                        "-object",
                        &json!({ "qom-type": "throttle-group", "id": group, "limits": limits }),
                    );
                    argv.json(
                        "-blockdev",
                        &json!({
                            "driver": "throttle", "node-name": image, "throttle-group": group, "file": format["node-name"],
                        }),
                    );
                }
                images.insert(name.to_owned(), Image { file, format });
                json!({
                    "driver": "nvme", "id": name, "bus": bus, "serial": serial.as_deref().unwrap_or(name),
                    "cmb_size_mb": cmb_size_mb.unwrap_or(0),
                    // The size of the bounce buffers for payload in another device's trapped memory (a CMB).
                    "x-max-bounce-buffer-size": 1 << 20,
                })
            }
        };
        if matches!(device, Device::Nvme { .. }) {
            let nsid = drives.len() as u32 + 1;
            drives.insert(nsid, name.to_owned());
            // A namespace that is created with the drive is also removed with it. Such a namespace always has number 1.
            if nsid == 1 {
                options["drive"] = json!(image_id(name));
            }
            argv.json("-device", &options);
            if nsid > 1 {
                let ns = json!({
                    "driver": "nvme-ns", "id": format!("{name}-ns"), "bus": name, "drive": image_id(name), "nsid": nsid,
                    "shared": false,
                });
                argv.json("-device", &ns);
            }
        } else {
            argv.json("-device", &options);
        }
        devices.insert(name.to_owned(), options);
    }
    Ok(Plan {
        argv: argv.0,
        devices,
        drives,
        images,
    })
}

/// Returns the identifier of a drive's image.
pub fn image_id(drive: &str) -> String {
    format!("{drive}-image")
}

/// Returns the identifier of the memory of an ivshmem device.
pub fn backend_id(device: &str) -> String {
    format!("{device}-memory")
}

/// Makes memory that other processes can map: virtiofsd and device processes do.
pub fn backend(id: &str, size: u64) -> Value {
    json!({ "qom-type": "memory-backend-memfd", "id": id, "size": size, "share": true })
}

struct Args(Vec<String>);

impl Args {
    fn add(&mut self, option: &str, value: impl Into<String>) {
        self.0.push(option.to_owned());
        self.0.push(value.into());
    }

    fn json(&mut self, option: &str, value: &Value) {
        self.add(option, value.to_string());
    }
}

/// Returns a path as text, for the arguments of a command.
///
/// # Errors
///
/// The path is not UTF-8.
pub fn utf8(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Escapes a path for QEMU's comma-separated options.
fn option_text(path: &Path) -> Result<String> {
    Ok(utf8(path)?.replace(',', ",,"))
}

/// Adds the accelerator and the processors.
fn processors(argv: &mut Args, machine: &Machine, accelerator: Accelerator) {
    let accelerator = accelerator.of(machine);
    if machine.count_instructions {
        argv.add("-accel", "tcg,thread=single");
        argv.add("-icount", "shift=0");
    } else {
        argv.add("-accel", accelerator.argument());
    }
    argv.add("-cpu", accelerator.cpu(&machine.cpu));
    // One socket for each processor: Linux rejects a machine in which cores of one socket are on two NUMA nodes.
    argv.add("-smp", format!("{0},sockets={0}", machine.smp));
}

fn machine(argv: &mut Args, topology: &Topology, paths: &Paths, kernel: &Kernel) -> Result<()> {
    let machine = &topology.machine;
    argv.add("-name", topology.name.as_str());
    argv.0
        .extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(String::from));
    argv.add("-display", "none");
    argv.add("-vga", "none");
    argv.add("-m", format!("{}k", machine.memory.0 >> 10));
    if machine.numa.is_empty() {
        argv.json("-object", &backend("ram0", machine.memory.0));
        argv.add("-machine", "q35,memory-backend=ram0");
    } else {
        argv.add("-machine", "q35");
        for (number, node) in machine.numa.iter().enumerate() {
            argv.json("-object", &backend(&format!("ram{number}"), node.memory.0));
            let cpus = node
                .cpus
                .iter()
                .fold(String::new(), |cpus, cpu| cpus + ",cpus=" + &cpu.to_string());
            argv.add("-numa", format!("node,nodeid={number},memdev=ram{number}{cpus}"));
        }
    }
    argv.add("-kernel", utf8(&kernel.image)?);
    let checks = if kernel.checks { CHECKS } else { "" };
    let iommu = match machine.iommu {
        None => String::new(),
        Some(Iommu::Intel) => format!("intel_iommu=on {TRANSLATE}"),
        Some(Iommu::Amd) => format!("amd_iommu=on {TRANSLATE}"),
    };
    // A counter of instructions has its own rate, which the kernel measures exactly.
    let rate = ticks::per_ms().filter(|_| !machine.count_instructions);
    let clock = rate.map_or(String::new(), |rate| format!("tsc_early_khz={rate}"));
    argv.add(
        "-append",
        format!("{CMDLINE} {clock} {checks} {iommu} init={}", utf8(&paths.init)?),
    );
    // The IOMMU comes before all devices whose DMA it translates. Virtio devices bypass it.
    match machine.iommu {
        None => {}
        Some(Iommu::Intel) => argv.add("-device", "intel-iommu,intremap=on,caching-mode=on,aw-bits=48"),
        Some(Iommu::Amd) => argv.add("-device", "amd-iommu,intremap=on,dma-remap=on"),
    }
    argv.add("-serial", "stdio");
    argv.add(
        "-chardev",
        format!("socket,id=monitor,path={}", option_text(&paths.monitor_socket())?),
    );
    argv.json(
        "-object",
        &json!({ "qom-type": "monitor-qmp", "id": "qmp", "chardev": "monitor" }),
    );
    argv.add(
        "-chardev",
        format!("socket,id=root,path={}", option_text(&paths.root_socket())?),
    );
    argv.json(
        "-device",
        &json!({ "driver": "vhost-user-fs-pci", "bus": ROOT, "chardev": "root", "tag": "rootfs" }),
    );
    argv.add(
        "-chardev",
        format!("socket,id=agent,path={}", option_text(&paths.agent_socket())?),
    );
    argv.json(
        "-device",
        &json!({ "driver": "virtio-serial-pci", "id": "ports", "bus": ROOT }),
    );
    argv.json(
        "-device",
        &json!({ "driver": "virtserialport", "bus": "ports.0", "chardev": "agent", "name": PORT_NAME }),
    );
    argv.add("-D", utf8(&paths.trace())?);
    // QEMU traces no page size for amd-iommu, so the runner cannot use its translations: payload behind it stays
    // unknown.
    let translations: &[&str] = match machine.iommu {
        Some(Iommu::Intel) => &[trace::TRANSLATE],
        None | Some(Iommu::Amd) => &[],
    };
    for event in trace::EVENTS.iter().chain(translations) {
        argv.add("-trace", format!("enable={event}"));
    }
    Ok(())
}

/// Adds the network device. Frames travel in datagrams, so the guests can start in any order.
fn network(argv: &mut Args, ends: &Ends) -> Result<()> {
    for (number, (local, remote)) in ends.links.iter().enumerate() {
        let (link, port) = (format!("link{number}"), format!("port{number}"));
        let local = json!({ "type": "unix", "path": utf8(local)? });
        let remote = json!({ "type": "unix", "path": utf8(remote)? });
        argv.json(
            "-netdev",
            &json!({ "type": "dgram", "id": link, "local": local, "remote": remote }),
        );
        argv.json(
            "-netdev",
            &json!({ "type": "hubport", "id": port, "hubid": 0, "netdev": link }),
        );
    }
    argv.json("-netdev", &json!({ "type": "hubport", "id": "net0", "hubid": 0 }));
    let mac = format!("52:54:00:70:32:{:02x}", ends.index);
    // No option ROM: the guest does not boot from the network.
    argv.json(
        "-device",
        &json!({ "driver": "virtio-net-pci", "bus": ROOT, "netdev": "net0", "mac": mac, "romfile": "" }),
    );
    Ok(())
}

/// Adds the bridges. Returns the bus for each bridge or device below a root port or a switch.
fn bridges(argv: &mut Args, topology: &Topology) -> BTreeMap<String, String> {
    let mut slots: BTreeMap<String, String> = BTreeMap::new();
    let mut number = 0;
    let mut host_bridges = 0;
    let mut next_number = || {
        number += 1;
        number
    };
    for bridge in &topology.bridge {
        let name = &bridge.name;
        let bus = slots.get(name).cloned().unwrap_or_else(|| bridge.parent.clone());
        let below: Vec<String> = topology.below(name).into_iter().map(str::to_owned).collect();
        match bridge.kind {
            BridgeKind::RootPort => {
                let n = next_number();
                argv.json(
                    "-device",
                    &json!({ "driver": "pcie-root-port", "id": name, "bus": bus, "chassis": n, "slot": n }),
                );
                slots.extend(below.into_iter().map(|child| (child, name.clone())));
            }
            BridgeKind::Switch => {
                argv.json(
                    "-device",
                    &json!({ "driver": "x3130-upstream", "id": name, "bus": bus }),
                );
                for port in 0..bridge.ports.unwrap_or(0) {
                    let (n, id) = (next_number(), format!("{name}-port{port}"));
                    argv.json(
                        "-device",
                        &json!({ "driver": "xio3130-downstream", "id": id, "bus": name, "chassis": n, "slot": n, "port": port }),
                    );
                    if let Some(child) = below.get(usize::from(port)) {
                        slots.insert(child.clone(), id);
                    }
                }
            }
            BridgeKind::HostBridge => {
                host_bridges += 1;
                let mut options = json!({ "driver": "pxb-pcie", "id": name, "bus": ROOT, "bus_nr": 255 - host_bridges * HOST_BRIDGE_BUSES });
                if let Some(node) = bridge.numa_node {
                    options["numa_node"] = json!(node);
                }
                argv.json("-device", &options);
            }
        }
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan_of(topology: &Topology, accelerator: Accelerator) -> Plan {
        let paths = Paths {
            dir: "/tmp/x,y".into(),
            init: "/build/init".into(),
        };
        let kernel = Kernel::image("/build/vmlinux".into());
        plan(topology, &paths, &kernel, accelerator, None).unwrap()
    }

    fn demo() -> Plan {
        let text = include_str!("../../topologies/demo.toml");
        plan_of(&Topology::parse("demo", text).unwrap(), Accelerator::Tcg)
    }

    fn value<'a>(argv: &'a [String], option: &str) -> Option<&'a str> {
        let at = argv.iter().position(|word| word == option)?;
        argv.get(at + 1).map(String::as_str)
    }

    #[test]
    fn accelerator_determines_two_options() {
        let topology = Topology::parse("demo", include_str!("../../topologies/demo.toml")).unwrap();
        let tcg = plan_of(&topology, Accelerator::Tcg).argv;
        let kvm = plan_of(&topology, Accelerator::Kvm).argv;
        assert_eq!(value(&tcg, "-accel"), Some("tcg,thread=multi"));
        assert_eq!(value(&tcg, "-cpu"), Some("EPYC"));
        assert_eq!(value(&kvm, "-accel"), Some("kvm,kernel-irqchip=split"));
        assert_eq!(value(&kvm, "-cpu"), Some("EPYC,vendor=AuthenticAMD"));
        let different: Vec<_> = tcg.iter().zip(&kvm).filter(|(tcg, kvm)| tcg != kvm).collect();
        assert_eq!((tcg.len(), different.len()), (kvm.len(), 2), "{different:?}");
    }

    #[test]
    fn unlisted_processor_has_the_same_family_with_both() {
        let topology = Topology::parse("unreachable", include_str!("../../topologies/unreachable.toml")).unwrap();
        let cpu = |accelerator| plan_of(&topology, accelerator).argv;
        assert_eq!(value(&cpu(Accelerator::Tcg), "-cpu"), Some("max"));
        let kvm = cpu(Accelerator::Kvm);
        let kvm = value(&kvm, "-cpu").unwrap();
        assert_eq!(kvm, "max,vendor=AuthenticAMD,family=6,model=6,stepping=3");
    }

    #[test]
    fn instructions_are_counted_with_tcg() {
        let topology = Topology::parse("memory", include_str!("../../topologies/memory.toml")).unwrap();
        for accelerator in [Accelerator::Tcg, Accelerator::Kvm] {
            let argv = plan_of(&topology, accelerator).argv;
            assert_eq!(value(&argv, "-accel"), Some("tcg,thread=single"));
            assert_eq!(value(&argv, "-icount"), Some("shift=0"));
            assert_eq!(value(&argv, "-cpu"), Some("EPYC"));
        }
        assert_eq!(value(&demo().argv, "-icount"), None);
    }

    #[test]
    fn guests_are_linked_to_the_first() {
        let ends = Ends::new(3, Path::new("/x"));
        assert_eq!(ends[0].links.len(), 2);
        for (index, other) in [(0, 1), (1, 2)] {
            let (local, remote) = &ends[0].links[index];
            assert_eq!(ends[other].links, [(remote.clone(), local.clone())]);
        }
    }

    fn devices(plan: &Plan) -> BTreeMap<String, Value> {
        let pairs = plan.argv.windows(2).filter(|pair| pair[0] == "-device");
        let devices = pairs.map(|pair| serde_json::from_str::<Value>(&pair[1]).unwrap());
        devices
            .filter_map(|d| Some((d["id"].as_str()?.to_owned(), d)))
            .collect()
    }

    #[test]
    fn devices_are_on_buses_of_the_topology() {
        let plan = demo();
        let devices = devices(&plan);
        let bus = |id: &str| devices[id]["bus"].as_str().unwrap().to_owned();
        assert_eq!(bus("rp0"), "pcie.0");
        assert_eq!(bus("sw0"), "rp0");
        assert_eq!(bus("sw0-port3"), "sw0");
        assert_eq!(bus("accel0"), "sw0-port0");
        assert_eq!(bus("nvme0"), "sw0-port1");
        assert_eq!(bus("nvme1"), "sw0-port2");
        assert_eq!(bus("shm0"), "rp1");
        assert_eq!(bus("rp2"), "hb1");
        assert_eq!(bus("accel1"), "rp2");
        assert_eq!(devices["hb1"]["numa_node"], 1);
        assert_eq!(devices["nvme1"]["cmb_size_mb"], 16);
        assert_eq!(devices["nvme1-ns"]["nsid"], 2);
        assert_eq!(plan.drives, BTreeMap::from([(1, "nvme0".into()), (2, "nvme1".into())]));
        assert_eq!(plan.devices["accel0"]["socket"]["path"], "/tmp/x,y/accel0.sock");
    }

    #[test]
    fn iommu_precedes_all_devices() {
        let text = include_str!("../../topologies/iommu.toml");
        let topology = Topology::parse("iommu", text).unwrap();
        let lines = |iommu| {
            let mut topology = topology.clone();
            topology.machine.iommu = iommu;
            plan_of(&topology, Accelerator::Tcg).argv
        };
        for (iommu, driver, option) in [
            (Iommu::Intel, "intel-iommu,", "intel_iommu=on "),
            (Iommu::Amd, "amd-iommu,", "amd_iommu=on "),
        ] {
            let argv = lines(Some(iommu));
            let device = argv.iter().position(|a| a == "-device").unwrap();
            assert!(argv[device + 1].starts_with(driver), "{:?}", argv[device + 1]);
            let append = argv.iter().position(|a| a == "-append").unwrap();
            assert!(argv[append + 1].contains(option), "{:?}", argv[append + 1]);
            assert_eq!(
                argv.contains(&format!("enable={}", trace::TRANSLATE)),
                iommu == Iommu::Intel
            );
        }
        assert!(!lines(None).join(" ").contains("iommu="));
    }

    #[test]
    fn chassis_numbers_are_unique() {
        let devices = devices(&demo());
        let mut numbers: Vec<i64> = devices.values().filter_map(|d| d["chassis"].as_i64()).collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(count, 3 + 4);
        assert_eq!(numbers.len(), count);
    }

    #[test]
    fn memory_is_shared_and_split() {
        let plan = demo();
        let line = plan.argv.join(" ");
        assert!(line.contains("-m 2097152k"));
        assert!(line.contains("node,nodeid=1,memdev=ram1,cpus=1"));
        assert!(line.contains("path=/tmp/x,,y/monitor.sock"));
        let objects = plan.argv.windows(2).filter(|pair| pair[0] == "-object");
        let objects: Vec<Value> = objects.map(|pair| serde_json::from_str(&pair[1]).unwrap()).collect();
        let memories: Vec<&Value> = objects
            .iter()
            .filter(|o| o["qom-type"] == "memory-backend-memfd")
            .collect();
        assert_eq!(memories.len(), 3);
        assert!(memories.iter().all(|o| o["share"] == true));
    }
}
