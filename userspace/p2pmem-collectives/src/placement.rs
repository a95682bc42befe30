// SPDX-License-Identifier: MIT OR Apache-2.0

//! What this rank can use, read from the machine, and what the ranks agree on.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, ensure, Context, Result};
use p2pmem::{Client, Device, PortKind, Provider, Walk};
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::memory::{providers, MemoryOptions};
use p2pmem_payload::nic::{active_nics, open_nics};
use p2pmem_verbs::Nic;

use crate::group::{Group, MAX_VALUE};
use crate::schedule::Ring;
use crate::topology::{agreed_ring, seats, Bridge, BridgeKind, Distance, Function, MemorySite, Seat, Site};

/// What the user of a rank wants.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The NIC; `None` if the topology decides.
    pub nic: Option<&'a str>,
    /// The memory of the payload. Without a provider, the topology decides.
    pub memory: MemoryOptions<'a>,
    /// Bytes of memory that the rank needs.
    pub bytes: u64,
    /// The ranks in the order of the ring; empty if the topology decides.
    pub ring: &'a [usize],
}

/// What this rank uses, and what all ranks use.
pub struct Placement {
    /// The NIC of this rank.
    pub nic: Arc<Nic>,
    /// The provider of this rank's memory; `None` for host memory.
    pub provider: Option<Provider>,
    /// What each rank uses.
    pub seats: Vec<Seat>,
    /// The ring.
    pub ring: Ring,
}

impl Placement {
    /// Agrees with the other ranks of a group on who uses which NIC and memory, and on the ring. All ranks call this.
    ///
    /// # Errors
    ///
    /// There is no NIC or no memory of the kind, a rank does not take part within the limit, or the ranks were started with
    /// different rings. The message says what to do.
    pub fn agree(group: &Group, wanted: &Wanted<'_>, limit: Duration) -> Result<Self> {
        let nics = match wanted.nic {
            Some(name) => open_nics(&[name.to_owned()])?,
            None => active_nics()?,
        };
        let (providers, device) = match wanted.memory.kind {
            MemoryKind::Cpu => (Vec::new(), None),
            _ => {
                let device = Device::open_path(wanted.memory.device)?;
                (providers(wanted.memory, &device)?, Some(device))
            }
        };
        let names: Vec<&str> = nics.iter().map(|nic| nic.name()).collect();
        let site = site("/sys".as_ref(), device.as_ref(), &providers, &names, wanted)?;
        let own = serde_json::to_vec(&site)?;
        ensure!(
            own.len() <= MAX_VALUE,
            "this rank can choose among {} NICs and {} memories, which are too many for one message: name a NIC (--nic) or a \
             provider (--device)",
            nics.len(),
            providers.len()
        );
        let values = group.exchange(&own, limit)?;
        let sites: Vec<Site> = values
            .iter()
            .enumerate()
            .map(|(rank, value)| {
                let site = serde_json::from_slice(value);
                site.with_context(|| format!("the place of {} is not valid", group.name(rank)))
            })
            .collect::<Result<_>>()?;
        let seats = seats(&sites).map_err(anyhow::Error::msg)?;
        let ring = agreed_ring(&sites, &seats).map_err(anyhow::Error::msg)?;
        let seat = &seats[group.rank()];
        let nic = nics.into_iter().find(|nic| nic.name() == seat.nic.name);
        let nic = nic.ok_or_else(|| anyhow!("there is no NIC {}", seat.nic.name))?;
        let provider = seat.memory.as_ref().map(|memory| {
            let provider = providers
                .iter()
                .find(|provider| provider.addr.to_string() == memory.name);
            provider
                .cloned()
                .ok_or_else(|| anyhow!("there is no provider {}", memory.name))
        });
        Ok(Self {
            nic,
            provider: provider.transpose()?,
            seats,
            ring,
        })
    }
}

/// Returns what this rank can use, with sysfs at `sys`.
fn site(
    sys: &Path,
    device: Option<&Device>,
    providers: &[Provider],
    nics: &[&str],
    wanted: &Wanted<'_>,
) -> Result<Site> {
    let boot = "/proc/sys/kernel/random/boot_id";
    let machine = fs::read_to_string(boot).with_context(|| format!("reading {boot}"))?;
    // A NIC in software is no PCI function. It can use host memory only.
    let clients: Vec<Option<Client>> = match device {
        Some(_) => nics
            .iter()
            .map(|nic| Ok(Some(Client::resolve_in(sys, nic)?)))
            .collect::<Result<_>>()?,
        None => nics.iter().map(|nic| Client::resolve_in(sys, nic).ok()).collect(),
    };
    let known: Vec<Client> = clients.iter().flatten().cloned().collect();
    let paths = match device {
        Some(device) => device.paths(&known)?,
        None => Vec::new(),
    };
    let distance = |provider: &Provider, client: usize| {
        let path = paths
            .iter()
            .find(|path| path.provider == provider.id && path.client == client);
        path.map_or(Distance::UNREACHABLE, |path| Distance::new(path.class, path.hops))
    };
    let memories = providers.iter().map(|provider| MemorySite {
        function: Function {
            name: provider.addr.to_string(),
            above: above(sys, &Client::new(provider.addr)),
        },
        free: provider.largest,
        distances: (0..known.len()).map(|client| distance(provider, client)).collect(),
    });
    let nics = nics.iter().zip(&clients).map(|(name, client)| Function {
        name: (*name).to_owned(),
        above: client.as_ref().map(|client| above(sys, client)).unwrap_or_default(),
    });
    Ok(Site {
        machine: machine.trim().to_owned(),
        node: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        nics: nics.collect(),
        memories: memories.collect(),
        bytes: wanted.bytes,
        ring: wanted.ring.to_vec(),
    })
}

/// Returns the root bus and the bridges above a function, from the root; nothing if sysfs does not have the function.
fn above(sys: &Path, function: &Client) -> Vec<Bridge> {
    let Some(walk) = Walk::read(sys, function.addr()) else {
        return Vec::new();
    };
    let kind = |kind| match kind {
        PortKind::RootPort => BridgeKind::RootPort,
        PortKind::Upstream => BridgeKind::Switch,
        PortKind::Downstream => BridgeKind::Port,
        _ => BridgeKind::Other,
    };
    let bridges = walk.bridges().iter().rev().map(|port| Bridge {
        name: port.addr.to_string(),
        kind: kind(port.kind),
    });
    let root = Bridge {
        name: walk.root.clone(),
        kind: BridgeKind::Root,
    };
    std::iter::once(root).chain(bridges).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem::fake::Fake;
    use p2pmem::{PathClass, PciAddr};

    const NICS: [&str; 2] = ["0000:03:00.0", "0000:07:00.0"];

    /// Two switches with a NIC and a memory each: the functions are devices, the others are bridges.
    fn sysfs() -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let devices = sys.path().join("bus/pci/devices");
        fs::create_dir_all(&devices).unwrap();
        for (root, up, first, second) in [("00:01.0", "01", "03", "04"), ("00:02.0", "05", "07", "08")] {
            for (port, bus) in [("00.0", first), ("01.0", second)] {
                let down = format!("{:02x}", u8::from_str_radix(up, 16).unwrap() + 1);
                let names = [
                    root.to_owned(),
                    format!("{up}:00.0"),
                    format!("{down}:{port}"),
                    format!("{bus}:00.0"),
                ];
                let mut folder = sys.path().join("devices/pci0000:00");
                for (depth, name) in names.iter().enumerate() {
                    let name = format!("0000:{name}");
                    folder.push(&name);
                    fs::create_dir_all(&folder).unwrap();
                    fs::write(folder.join("class"), if depth < 3 { "0x060400" } else { "0x120000" }).unwrap();
                    let link = devices.join(&name);
                    if !link.exists() {
                        std::os::unix::fs::symlink(&folder, link).unwrap();
                    }
                }
            }
        }
        sys
    }

    fn at(bus: u8) -> PciAddr {
        PciAddr {
            domain: 0,
            bus,
            devfn: 0,
        }
    }

    fn wanted(kind: MemoryKind) -> Wanted<'static> {
        Wanted {
            nic: None,
            memory: MemoryOptions {
                kind,
                provider: None,
                device: Path::new("/nonexistent"),
            },
            bytes: 4096,
            ring: &[],
        }
    }

    #[test]
    fn a_site_has_nics_and_memories_with_their_bridges() {
        let sys = sysfs();
        let (near, far) = (PathClass::SameSwitch, PathClass::HostBridge);
        let fake = Fake::new()
            .provider(at(4), 64 << 20)
            .provider(at(8), 32 << 20)
            .path(at(4), at(3), near, 4)
            .path(at(4), at(7), far, 8)
            .path(at(8), at(3), far, 8)
            .path(at(8), at(7), near, 4);
        let device = fake.device();
        let wanted = wanted(MemoryKind::Accelerator);
        let all = providers(wanted.memory, &device).unwrap();
        let site = site(sys.path(), Some(&device), &all, &NICS, &wanted).unwrap();
        let above: Vec<String> = site.nics[0].above.iter().map(Bridge::to_string).collect();
        assert_eq!(
            above,
            [
                "root bus pci0000:00",
                "root port 0000:00:01.0",
                "switch 0000:01:00.0",
                "port 0000:02:00.0"
            ]
        );
        assert_eq!(site.memories[1].function.name, "0000:08:00.0");
        assert_eq!(site.memories[1].function.above[..3], site.nics[1].above[..3]);
        assert_eq!(site.memories[0].free, 64 << 20);
        assert_eq!(
            site.memories[0].distances,
            [Distance::new(near, 4), Distance::new(far, 8)]
        );
        // The value of a machine with 64 such devices fits an exchange.
        assert!(serde_json::to_vec(&site).unwrap().len() * 16 < MAX_VALUE);

        let sites = vec![site; 2];
        let seats = seats(&sites).unwrap();
        let memory = |rank: usize| seats[rank].memory.as_ref().unwrap().name.as_str();
        assert_eq!((memory(0), seats[0].nic.name.as_str()), ("0000:04:00.0", NICS[0]));
        assert_eq!((memory(1), seats[1].nic.name.as_str()), ("0000:08:00.0", NICS[1]));
    }

    #[test]
    fn a_nic_in_software_can_use_host_memory() {
        let sys = sysfs();
        let site = site(sys.path(), None, &[], &["rxe0"], &wanted(MemoryKind::Cpu)).unwrap();
        assert_eq!((site.nics[0].name.as_str(), site.nics[0].above.len()), ("rxe0", 0));
        assert!(!site.machine.is_empty() && !site.node.is_empty());
        assert!(seats(&[site]).unwrap()[0].memory.is_none());
    }
}
