// SPDX-License-Identifier: GPL-2.0

//! The topology: a table of all PCI functions of this machine, and the paths between them.
//!
//! [`crate::policy::path`] classifies a path and is pure. This file collects its input (the bridges above each function, their
//! ACS control, the speed and width of their links). A table never changes. The orchestrator drops it when a function comes or
//! goes, and replaces it on `P2PMEM_PATHS_RESCAN` by one of the same functions whose registers were read again.
//!
//! Context: process context, may sleep. `Functions::verdicts` is a mutex with nothing taken inside.

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
        Between,
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

/// All PCI functions of the machine, with a reference to each.
#[pin_data]
struct Functions {
    /// In the order in which the kernel found them: a bridge comes before what is below it.
    all: KVec<Function>,
    /// The addresses as numbers, in ascending order, each with the index of its function.
    order: KVec<(u64, usize)>,
    /// What the kernel said about pairs of host bridges. This depends on the machine alone.
    #[pin]
    verdicts: Mutex<KVec<HostVerdict>>,
}

/// The topology: all functions, and what paths between them need.
pub(crate) struct Topology {
    functions: Arc<Functions>,
    /// An entry for each function, in the same order.
    ports: KVec<Port>,
}

impl Topology {
    /// Collects all functions. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let (mut ports, mut all, mut order) = (KVec::new(), KVec::new(), KVec::new());
        let mut next = Function::next(None);
        while let Some(function) = next {
            if let Some(port) = port(&function, &all, &order) {
                let number = port.addr.number();
                let at = position(&order, number).unwrap_or_else(|at| at);
                order.reserve(1, GFP_KERNEL)?;
                // Cannot fail: the capacity was reserved above, and `at` is not behind the end.
                let _ = order.insert_within_capacity(at, (number, ports.len()));
                ports.push(port, GFP_KERNEL)?;
                all.push(function.clone(), GFP_KERNEL)?;
            }
            next = Function::next(Some(function));
        }
        let functions = Arc::pin_init(
            pin_init!(Functions {
                all,
                order,
                verdicts <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL,
        )?;
        Self::read(functions, ports)
    }

    /// Returns the topology of the same functions as their registers are now: ACS control, links, and nodes change without a
    /// notification. Errors: `ENOMEM`.
    pub(crate) fn read_again(&self) -> Result<Arc<Self>> {
        let mut ports = KVec::with_capacity(self.ports.len(), GFP_KERNEL)?;
        ports.extend_from_slice(&self.ports, GFP_KERNEL)?;
        Self::read(self.functions.clone(), ports)
    }

    /// Completes the entries of all functions with what may change. Errors: `ENOMEM`.
    fn read(functions: Arc<Functions>, mut ports: KVec<Port>) -> Result<Arc<Self>> {
        // On a machine with one NUMA node every function is on that node, even if the firmware names none.
        let only_node = pci::only_node();
        for (at, function) in functions.all.iter().enumerate() {
            let Some((above, [port, ..])) = ports.split_at_mut_checked(at) else {
                break;
            };
            let bridge = port.bridge.and_then(|bridge| Some((bridge, above.get(bridge)?)));
            port.acs_redirect = function.acs_redirects();
            port.link = match port.kind.has_link_above() {
                true => function.link_status().map_or(0, link_bandwidth_of_status),
                false => 0,
            };
            port.numa_node = match function.node() {
                -1 => only_node,
                node => node,
            };
            *port = port.placed(at, bridge);
        }
        Ok(Arc::new(Self { functions, ports }, GFP_KERNEL)?)
    }

    /// Returns the function at `addr` and its index, if there is one.
    pub(crate) fn find(&self, addr: PciAddr) -> Option<(usize, &Function)> {
        find(&self.functions.all, &self.functions.order, addr)
    }

    /// Returns the index of a function. That of a function which is gone is outside of the table.
    pub(crate) fn index_of(&self, function: &Function) -> usize {
        index_of(&self.functions.all, &self.functions.order, function).unwrap_or(usize::MAX)
    }

    /// Returns what the kernel said about a pair of host bridges, if it is known.
    fn verdict(&self, hosts: (u64, u64)) -> Option<bool> {
        let verdicts = self.functions.verdicts.lock();
        verdicts
            .iter()
            .find(|(known, _)| *known == hosts)
            .map(|(_, forwards)| *forwards)
    }

    /// Returns a source of paths. Nearby calls of one source are cheap.
    pub(crate) fn paths(&self) -> Paths<'_> {
        Paths {
            topology: self,
            last: None,
        }
    }
}

/// Host bridge and node of a provider, and of a client.
type Ends = ((u64, i32), (u64, i32));

/// A source of paths, which remembers what the last path needed: most paths of a snapshot need the same.
pub(crate) struct Paths<'a> {
    topology: &'a Topology,
    last: Option<(Ends, Between)>,
}

impl Paths<'_> {
    /// Adds the paths from a provider to the functions with the indexes `to`. Errors: as for [`Self::path`].
    // A function of its own, as the compiler has too few registers for the loop in its caller.
    #[inline(never)]
    pub(crate) fn add_to(&mut self, paths: &mut KVec<Path>, provider: &Provider, to: &[usize]) -> Result {
        let from = self.topology.index_of(provider.function());
        paths.reserve(to.len(), GFP_KERNEL_ACCOUNT)?;
        for &to in to {
            // Cannot fail: the capacity was reserved above.
            let _ = paths.push_within_capacity(self.path(provider, from, to)?);
        }
        Ok(())
    }

    /// Returns the path from a provider, whose function has the index `from`, to the function with the index `to`.
    ///
    /// May sleep. Errors: `ENOMEM`, `ENODEV` (the path takes the kernel's verdict, and the provider is being removed).
    // As [`classify`].
    #[inline(always)]
    pub(crate) fn path(&mut self, provider: &Provider, from: usize, to: usize) -> Result<Path> {
        let ports = &self.topology.ports;
        let (Some(a), Some(b)) = (ports.get(from), ports.get(to)) else {
            return Ok(Path::NONE);
        };
        let ends = ((a.host_bridge, a.numa_node), (b.host_bridge, b.numa_node));
        let mut between = match self.last {
            Some((known, between)) if known == ends => between,
            _ => self.look_up(ends),
        };
        loop {
            if let Some(path) = classify(ports, from, to, between) {
                return Ok(path);
            }
            between = self.by_kernel(provider, to, (ends, between))?;
        }
    }

    /// Returns what a path between these ends needs, and remembers it.
    #[cold]
    fn look_up(&mut self, ends: Ends) -> Between {
        let ((host_a, node_a), (host_b, node_b)) = ends;
        let between = Between {
            numa_distance: pci::node_distance(node_a, node_b),
            forwards: self.topology.verdict(pair(host_a, host_b)),
        };
        self.last = Some((ends, between));
        between
    }

    /// Completes `between` with the kernel's verdict, and remembers both. Errors: as for [`Self::path`].
    #[cold]
    fn by_kernel(&mut self, provider: &Provider, to: usize, (ends, between): (Ends, Between)) -> Result<Between> {
        let functions = &self.topology.functions;
        // The table has as many functions as ports.
        let client = functions.all.get(to).ok_or(EINVAL)?;
        let forwards = provider.is_reached_by(client)?;
        // Another task may have added the same verdict meanwhile.
        let hosts = pair(ends.0 .0, ends.1 .0);
        functions.verdicts.lock().push((hosts, forwards), GFP_KERNEL)?;
        let between = Between {
            forwards: Some(forwards),
            ..between
        };
        self.last = Some((ends, between));
        Ok(between)
    }
}

/// Returns two host bridges as [`HostVerdict`] has them.
fn pair(one: u64, other: u64) -> (u64, u64) {
    (one.min(other), one.max(other))
}

/// Returns where the function whose address has this number is in `order`, or where it has to be inserted.
fn position(order: &[(u64, usize)], number: u64) -> core::result::Result<usize, usize> {
    order.binary_search_by_key(&number, |&(number, _)| number)
}

fn find<'a>(all: &'a [Function], order: &[(u64, usize)], addr: PciAddr) -> Option<(usize, &'a Function)> {
    let &(_, at) = order.get(position(order, addr.number()).ok()?)?;
    Some((at, all.get(at)?))
}

fn index_of(all: &[Function], order: &[(u64, usize)], function: &Function) -> Option<usize> {
    let (at, found) = find(all, order, function.address())?;
    found.same(function).then_some(at)
}

/// Returns what never changes of a function, for the table that has these functions so far. `None` if the function or a bridge
/// above it is being removed.
fn port(function: &Function, all: &[Function], order: &[(u64, usize)]) -> Option<Port> {
    if !function.has_hierarchy() {
        return None;
    }
    let bridge = match function.upstream() {
        None => None,
        Some(bridge) => Some(index_of(all, order, &bridge)?),
    };
    let (domain, bus) = function.host_bridge();
    Some(Port {
        addr: function.address(),
        kind: PortKind::from_pcie_type(function.pcie_type(), function.is_bridge()),
        bridge,
        host_bridge: host_bridge_id(domain, bus),
        ..Port::UNPLACED
    })
}
