// SPDX-License-Identifier: GPL-2.0

//! The topology: a table of all PCI functions of this machine, and the paths between them.
//!
//! [`crate::policy::path`] classifies a path and is pure. This file collects its input (the bridges above each function, their
//! ACS control, the speed and width of their links). A table never changes. The orchestrator drops it when a function comes or
//! goes, and on `P2PMEM_PATHS_RESCAN`.
//!
//! Context: process context, may sleep. `Topology::verdicts` is a mutex with nothing taken inside.

use crate::{
    ext::pci::{
        self,
        Function, //
    },
    mem::buffer::Provider,
    policy::path::{
        classify,
        host_bridge_id,
        link_bandwidth_of_status,
        Path,
        PciAddr,
        Port,
        PortKind, //
    }, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// The kernel's verdict on traffic between two host bridges: their identities, the smaller one first, and whether the root
/// complex forwards it.
type HostVerdict = ((u64, u64), bool);

/// All PCI functions of the machine.
///
/// `ports`, `functions` and `order` have the same length. The table keeps references to the functions.
#[pin_data]
pub(crate) struct Topology {
    /// In the order in which the kernel found the functions: a bridge comes before what is below it.
    ports: KVec<Port>,
    functions: KVec<Function>,
    /// Indexes in the order of the addresses.
    order: KVec<u32>,
    /// What the kernel said about pairs of host bridges. This depends on the machine alone.
    #[pin]
    verdicts: Mutex<KVec<HostVerdict>>,
}

impl Topology {
    /// Collects all functions. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let (mut ports, mut functions, mut order) = (KVec::new(), KVec::new(), KVec::new());
        let mut next = Function::next(None);
        while let Some(function) = next {
            if let Some(port) = port(&function, &ports, &functions, &order) {
                let at = position(&ports, &order, port.addr).unwrap_or_else(|at| at);
                order.reserve(1, GFP_KERNEL)?;
                // Cannot fail: the capacity was reserved above, and `at` is not behind the end.
                let _ = order.insert_within_capacity(at, ports.len() as u32);
                ports.push(port, GFP_KERNEL)?;
                functions.push(function.clone(), GFP_KERNEL)?;
            }
            next = Function::next(Some(function));
        }
        Arc::pin_init(
            pin_init!(Self {
                ports,
                functions,
                order,
                verdicts <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the function at `addr` and its index, if there is one.
    pub(crate) fn find(&self, addr: PciAddr) -> Option<(usize, &Function)> {
        let at = *self.order.get(position(&self.ports, &self.order, addr).ok()?)? as usize;
        Some((at, self.functions.get(at)?))
    }

    /// Returns the verdict on a pair of host bridges, if it is known.
    fn verdict(&self, hosts: (u64, u64)) -> Option<HostVerdict> {
        self.verdicts.lock().iter().find(|(known, _)| *known == hosts).copied()
    }

    /// Returns the index of a function. That of a function which is gone is outside of the table.
    pub(crate) fn index_of(&self, function: &Function) -> usize {
        index_of(&self.ports, &self.functions, &self.order, function).unwrap_or(usize::MAX)
    }

    /// Returns a source of paths. Nearby calls of one source are cheap.
    pub(crate) fn paths(&self) -> Paths<'_> {
        Paths {
            topology: self,
            verdict: None,
            distance: None,
        }
    }
}

/// A source of paths, which remembers what the last path needed: most paths of a snapshot need the same.
pub(crate) struct Paths<'a> {
    topology: &'a Topology,
    verdict: Option<HostVerdict>,
    /// Two NUMA nodes and the distance between them.
    distance: Option<((i32, i32), u32)>,
}

impl Paths<'_> {
    /// Returns the path from a provider, whose function has the index `from`, to the function with the index `to`.
    ///
    /// May sleep. Errors: `ENOMEM`, `ENODEV` (the path takes the kernel's verdict, and the provider is being removed).
    pub(crate) fn path(&mut self, provider: &Provider, from: usize, to: usize) -> Result<Path> {
        let ports = &self.topology.ports;
        let (Some(a), Some(b)) = (ports.get(from), ports.get(to)) else {
            return Ok(classify(ports, from, to, 0, || false));
        };
        let hosts = (a.host_bridge.min(b.host_bridge), a.host_bridge.max(b.host_bridge));
        let nodes = (a.numa_node, b.numa_node);
        let numa_distance = match self.distance {
            Some((known, distance)) if known == nodes => distance,
            _ => pci::node_distance(nodes.0, nodes.1),
        };
        self.distance = Some((nodes, numa_distance));
        let mut verdict = self.verdict.filter(|(known, _)| *known == hosts);
        let mut missing = false;
        let path = classify(ports, from, to, numa_distance, || {
            verdict = verdict.or_else(|| self.topology.verdict(hosts));
            missing = verdict.is_none();
            verdict.is_some_and(|(_, forwards)| forwards)
        });
        if !missing {
            self.verdict = verdict.or(self.verdict);
            return Ok(path);
        }
        // The table has as many functions as ports.
        let client = self.topology.functions.get(to).ok_or(EINVAL)?;
        let forwards = provider.is_reached_by(client)?;
        // Another task may have added the same verdict meanwhile.
        self.topology.verdicts.lock().push((hosts, forwards), GFP_KERNEL)?;
        Ok(classify(ports, from, to, numa_distance, || forwards))
    }
}

/// Returns where the function at `addr` is in `order`, or where it has to be inserted.
fn position(ports: &[Port], order: &[u32], addr: PciAddr) -> core::result::Result<usize, usize> {
    order.binary_search_by_key(&Some(addr), |&at| ports.get(at as usize).map(|port| port.addr))
}

fn index_of(ports: &[Port], functions: &[Function], order: &[u32], function: &Function) -> Option<usize> {
    let at = *order.get(position(ports, order, function.address()).ok()?)? as usize;
    functions.get(at).filter(|found| found.same(function)).map(|_| at)
}

/// Returns the entry of a function for the table that has these functions so far, or `None` if the function or a bridge above
/// it is being removed.
fn port(function: &Function, ports: &[Port], functions: &[Function], order: &[u32]) -> Option<Port> {
    if !function.has_hierarchy() {
        return None;
    }
    let bridge = match function.upstream() {
        None => None,
        Some(bridge) => Some(index_of(ports, functions, order, &bridge)?),
    };
    let (domain, bus) = function.host_bridge();
    let port = Port {
        addr: function.address(),
        kind: PortKind::from_pcie_type(function.pcie_type(), function.is_bridge()),
        acs_redirect: function.acs_redirects(),
        // A virtual function's Link Status is reserved: take the physical function's.
        link: function.physical().link_status().map_or(0, link_bandwidth_of_status),
        host_bridge: host_bridge_id(domain, bus),
        // On a machine with one NUMA node every function is on that node, even if the firmware names none.
        numa_node: match function.node() {
            -1 => pci::only_node(),
            node => node,
        },
        ..Port::UNPLACED
    };
    Some(port.placed(ports.len(), bridge.and_then(|at| Some((at, ports.get(at)?)))))
}
