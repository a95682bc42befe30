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

    /// Returns the index of a function. That of a function which is gone is outside of the table.
    pub(crate) fn index_of(&self, function: &Function) -> usize {
        index_of(&self.ports, &self.functions, &self.order, function).unwrap_or(usize::MAX)
    }

    /// Returns the path from a provider, whose function has the index `from`, to the function with the index `to`.
    ///
    /// May sleep. Errors: `ENOMEM`, `ENODEV` (the path takes the kernel's verdict, and the provider is being removed).
    pub(crate) fn path(&self, provider: &Provider, from: usize, to: usize) -> Result<Path> {
        let (Some(a), Some(b)) = (self.ports.get(from), self.ports.get(to)) else {
            return Ok(classify(&self.ports, from, to, 0, || false));
        };
        let pair = (a.host_bridge.min(b.host_bridge), a.host_bridge.max(b.host_bridge));
        let numa_distance = pci::node_distance(a.numa_node, b.numa_node);
        let known = || {
            self.verdicts
                .lock()
                .iter()
                .find(|(hosts, _)| *hosts == pair)
                .map(|(_, forwards)| *forwards)
        };
        let mut unknown = false;
        let path = classify(&self.ports, from, to, numa_distance, || {
            let forwards = known();
            unknown = forwards.is_none();
            forwards.unwrap_or(false)
        });
        if !unknown {
            return Ok(path);
        }
        // The table has as many functions as ports.
        let client = self.functions.get(to).ok_or(EINVAL)?;
        let forwards = provider.is_reached_by(client)?;
        // Another task may have added the same verdict meanwhile.
        self.verdicts.lock().push((pair, forwards), GFP_KERNEL)?;
        Ok(classify(&self.ports, from, to, numa_distance, || forwards))
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
    Some(Port {
        addr: function.address(),
        kind: PortKind::from_pcie_type(function.pcie_type(), function.is_bridge()),
        acs_redirect: function.acs_redirects(),
        // A virtual function's Link Status is reserved: take the physical function's.
        link: function.physical().link_status().map_or(0, link_bandwidth_of_status),
        bridge,
        depth: bridge.and_then(|at| ports.get(at)).map_or(0, |above| above.depth + 1),
        host_bridge: host_bridge_id(domain, bus),
        // On a machine with one NUMA node every function is on that node, even if the firmware names none.
        numa_node: match function.node() {
            -1 => pci::only_node(),
            node => node,
        },
    })
}
