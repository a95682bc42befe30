// SPDX-License-Identifier: GPL-2.0

//! Paths between providers and clients in this machine's PCI tree.
//!
//! [`crate::policy::path`] classifies a path and is pure. This file collects its input (the bridges above a function, their
//! ACS control, the speed and width of their links) and caches the results.
//!
//! Context: process context, may sleep. [`BridgeChain`] takes no lock of p2pmem. [`PathCache`] is protected by
//! `Orchestrator::registry`.

use crate::{
    ext::{
        p2pdma,
        pci::{
            self,
            Function, //
        }, //
    },
    policy::path::{
        classify,
        host_bridge_id,
        link_bandwidth_of_status,
        Chain,
        Path,
        PciAddr,
        Port,
        PortKind, //
    }, //
};
use kernel::{
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
};

/// The functions from a function up to its root bus.
pub(crate) struct BridgeChain {
    ports: KVec<Port>,
    host_bridge: u64,
    node: i32,
}

impl BridgeChain {
    /// Walks up from `function`. Errors: `ENOMEM`.
    pub(crate) fn new(function: &Function) -> Result<Self> {
        let mut ports = KVec::new();
        let mut at = Some(function.clone());
        while let Some(port) = at {
            let kind = PortKind::from_pcie_type(port.pcie_type(), port.is_bridge());
            // A virtual function's Link Status is reserved: take the physical function's.
            let link = port.physical().link_status().map_or(0, link_bandwidth_of_status);
            ports.push(
                Port {
                    addr: port.address(),
                    kind,
                    acs_redirect: port.acs_redirects(),
                    link,
                },
                GFP_KERNEL,
            )?;
            at = port.upstream();
        }
        let (domain, bus) = function.host_bridge();
        Ok(Self {
            ports,
            host_bridge: host_bridge_id(domain, bus),
            // On a machine with one NUMA node every function is on that node, even if the firmware names none.
            node: match function.node() {
                -1 => pci::only_node(),
                node => node,
            },
        })
    }

    fn chain(&self) -> Chain<'_> {
        Chain {
            ports: &self.ports,
            host_bridge: self.host_bridge,
            numa_node: self.node,
        }
    }

    /// Returns the path from this walk's function, `provider`, to `client`.
    pub(crate) fn path_to(&self, provider: &Function, client: &Function, client_walk: &Self) -> Path {
        let distance = p2pdma::distance(provider, client).and_then(|d| i32::try_from(d).ok());
        classify(
            &self.chain(),
            &client_walk.chain(),
            distance.unwrap_or(-1),
            pci::node_distance(self.node, client_walk.node),
        )
    }
}

/// Cached paths by provider id and client address, of one generation.
pub(crate) struct PathCache {
    generation: u64,
    count: usize,
    paths: RBTree<(u32, PciAddr), Path>,
}

impl PathCache {
    /// Maximum number of paths, more than any machine needs. A program that names all functions one after the other makes
    /// the cache start again from empty.
    const MOST: usize = 65_536;

    pub(crate) fn new() -> Self {
        Self {
            generation: 0,
            count: 0,
            paths: RBTree::new(),
        }
    }

    /// Makes the cache that of `generation`, dropping all paths if it was of another one or is full. Returns the old cache,
    /// to be dropped without the lock.
    pub(crate) fn renew(&mut self, generation: u64) -> Option<Self> {
        if generation == self.generation && self.count < Self::MOST {
            return None;
        }
        let new = Self {
            generation,
            ..Self::new()
        };
        Some(core::mem::replace(self, new))
    }

    /// Returns the cached path, if there is one.
    pub(crate) fn get(&self, provider: u32, client: PciAddr) -> Option<Path> {
        self.paths.get(&(provider, client)).copied()
    }

    /// Adds a path that was computed at `generation`. Ignores the path if the cache is of another generation.
    pub(crate) fn put(&mut self, generation: u64, node: RBTreeNode<(u32, PciAddr), Path>) {
        if generation == self.generation && self.paths.insert(node).is_none() {
            self.count += 1;
        }
    }
}

#[kunit_tests(p2pmem_topology)]
mod tests {
    use super::*;

    const CLIENT: PciAddr = PciAddr {
        domain: 0,
        bus: 1,
        devfn: 0,
    };

    fn node(provider: u32, distance: i32) -> Result<RBTreeNode<(u32, PciAddr), Path>> {
        let nowhere = Chain {
            ports: &[],
            host_bridge: 0,
            numa_node: 0,
        };
        let path = classify(&nowhere, &nowhere, distance, 10);
        Ok(RBTreeNode::new((provider, CLIENT), path, GFP_KERNEL)?)
    }

    #[test]
    fn new_generation_drops_cached_paths() -> Result {
        let mut cache = PathCache::new();
        assert!(cache.renew(0).is_none());
        cache.put(0, node(1, 5)?);
        assert!(cache.get(1, CLIENT).is_some_and(|path| path.distance == 5));
        assert!(cache.get(2, CLIENT).is_none());
        // The same pair again replaces the path.
        cache.put(0, node(1, 6)?);
        assert!(cache.get(1, CLIENT).is_some_and(|path| path.distance == 6));
        assert_eq!(cache.count, 1);
        // A new generation drops all paths, and a path of an old generation is not added.
        assert!(cache.renew(3).is_some_and(|old| old.count == 1));
        assert!(cache.get(1, CLIENT).is_none());
        cache.put(2, node(1, 7)?);
        assert!(cache.get(1, CLIENT).is_none() && cache.count == 0);
        Ok(())
    }

    #[test]
    fn full_cache_is_emptied() {
        let mut cache = PathCache::new();
        cache.count = PathCache::MOST;
        assert!(cache.renew(0).is_some());
        assert!(cache.count == 0 && cache.renew(0).is_none());
    }
}
