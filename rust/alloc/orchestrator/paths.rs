// SPDX-License-Identifier: GPL-2.0

//! Paths between providers and clients, and the topology snapshots that are made of them.
//!
//! Context: process context, may sleep. `registry` is held to read and to fill the cache of paths, not while the PCI tree
//! is walked. Cached paths and snapshots are of one generation: see [`Orchestrator::forget_paths`].

use crate::{
    alloc::{
        orchestrator::Orchestrator,
        snapshot::{
            self,
            TopologySnapshot, //
        },
        topology::BridgeChain, //
    },
    ext::{
        pci::Function,
        refusal::{
            refuse,
            Answer, //
        }, //
    },
    mem::buffer::Provider,
    policy::path::{
        Path,
        PciAddr, //
    }, //
};
use kernel::{
    prelude::*,
    rbtree::RBTreeNode,
    sync::{
        atomic::Relaxed,
        Arc, //
    },
};

impl Orchestrator {
    /// Drops all cached paths and snapshots. For a function that came or went, and for a change of ACS.
    pub(crate) fn forget_paths(&self) {
        self.generation.fetch_add(1, Relaxed);
        // Snapshots hold references to clients and providers that may be gone.
        snapshot::forget(&self.snapshots);
    }

    /// Returns the topology snapshot of these clients, cached or new. `names` is a slice of
    /// `uapi::request::ClientNames`: clients' addresses as raw numbers.
    ///
    /// Errors: `ENODEV` if a client does not exist, `EINVAL` if reserved bytes of an address are set, `ENOMEM`.
    pub(crate) fn snapshot(&self, names: &[u64]) -> Answer<Arc<TopologySnapshot>> {
        let make = |generation| {
            let mut clients = KVec::with_capacity(names.len(), GFP_KERNEL_ACCOUNT)?;
            for &name in names {
                let name = PciAddr::from_raw(name).ok_or_else(|| refuse!(EINVAL, "a reserved field is not zero"))?;
                let function = Function::find(name);
                let function =
                    function.ok_or_else(|| refuse!(ENODEV, "{} is not a PCI function of this machine", name))?;
                clients.push(function, GFP_KERNEL_ACCOUNT)?;
            }
            let providers = self.providers()?;
            let paths = self.paths(&providers, &clients)?;
            Ok(TopologySnapshot::new(generation, names, clients, providers, paths)?)
        };
        snapshot::snapshot(&self.snapshots, names, || self.generation(), make)
    }

    /// Returns the path from each provider to each client, ordered by provider and then by client. Errors: `ENOMEM`.
    pub(crate) fn paths(&self, providers: &[Arc<Provider>], clients: &[Function]) -> Result<KVec<Path>> {
        let generation = self.generation();
        let mut paths = KVec::with_capacity(providers.len() * clients.len(), GFP_KERNEL)?;
        let mut missing = 0;
        let mut registry = self.registry.lock();
        let old = registry.cache.renew(generation);
        for provider in providers {
            for client in clients {
                let path = registry.cache.get(provider.id, client.address());
                missing += usize::from(path.is_none());
                paths.push(path, GFP_KERNEL)?;
            }
        }
        drop(registry);
        drop(old);
        if missing > 0 {
            self.compute(generation, providers, clients, &mut paths)?;
        }
        // Snapshots keep this vector, so the requester's cgroup is charged for it.
        let mut all = KVec::with_capacity(paths.len(), GFP_KERNEL_ACCOUNT)?;
        for path in paths.iter().flatten() {
            all.push(*path, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(all)
    }

    /// Returns the path from one provider to one client. Errors: `ENOMEM`, `EINVAL` if there is none.
    pub(crate) fn path(&self, provider: &Arc<Provider>, client: &Function) -> Result<Path> {
        let (from, to) = (core::slice::from_ref(provider), core::slice::from_ref(client));
        self.paths(from, to)?.pop().ok_or(EINVAL)
    }

    /// Computes each path that is `None` in `paths`, and adds it to the cache. Takes `registry` to add a path, not while
    /// walking the PCI tree. Errors: `ENOMEM`.
    fn compute(
        &self,
        generation: u64,
        providers: &[Arc<Provider>],
        clients: &[Function],
        paths: &mut [Option<Path>],
    ) -> Result {
        let mut walks = KVec::with_capacity(clients.len(), GFP_KERNEL)?;
        for client in clients {
            walks.push(BridgeChain::new(client)?, GFP_KERNEL)?;
        }
        let mut slots = paths.iter_mut();
        for provider in providers {
            let mut own = None;
            for (client, walk) in clients.iter().zip(&walks) {
                let Some(slot) = slots.next().filter(|slot| slot.is_none()) else {
                    continue;
                };
                if own.is_none() {
                    own = Some(BridgeChain::new(provider.function())?);
                }
                let Some(own) = &own else { continue };
                let path = own.path_to(provider.function(), client, walk);
                *slot = Some(path);
                let node = RBTreeNode::new((provider.id, client.address()), path, GFP_KERNEL_ACCOUNT)?;
                self.registry.lock().cache.put(generation, node);
            }
        }
        Ok(())
    }
}
