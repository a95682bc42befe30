// SPDX-License-Identifier: GPL-2.0

//! Paths between providers and clients, and the topology snapshots that are made of them.
//!
//! Context: process context, may sleep. `topology` is held to read and to replace the table of functions, not while the
//! functions are collected.

use crate::{
    alloc::{
        orchestrator::Orchestrator,
        snapshot::{
            self,
            TopologySnapshot, //
        },
        topology::Topology, //
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
    sync::{
        atomic::Relaxed,
        Arc, //
    },
};

impl Orchestrator {
    /// Drops the table of functions and all snapshots. For a function that came or went.
    pub(crate) fn forget_topology(&self) {
        // A table that is being collected must not be kept, and no snapshot of the old one: `forget_snapshots` counts once more.
        self.generation.fetch_add(1, Relaxed);
        let old = self.topology.lock().take();
        // The last reference to a function frees it.
        drop(old);
        self.forget_snapshots();
    }

    /// Reads what changes without a notification again, such as ACS. Errors: `ENOMEM`.
    pub(crate) fn refresh_topology(&self) -> Result {
        let generation = self.generation();
        let known = self.topology.lock().clone();
        let new = known.map(|topology| topology.read_again()).transpose()?;
        let mut topology = self.topology.lock();
        // Counted with the lock held, so that a table with older registers is not kept.
        let is_current = self.generation.fetch_add(1, Relaxed) == generation;
        // If a function came or went meanwhile, the next user collects all functions.
        let old = core::mem::replace(&mut *topology, new.filter(|_| is_current));
        drop(topology);
        drop(old);
        self.forget_snapshots();
        Ok(())
    }

    /// Drops all snapshots. For a provider that came or went.
    pub(crate) fn forget_snapshots(&self) {
        self.generation.fetch_add(1, Relaxed);
        // Snapshots hold references to clients and providers that may be gone.
        snapshot::forget(&self.snapshots);
    }

    /// Returns the table of functions. Errors: `ENOMEM`.
    fn topology(&self) -> Result<Arc<Topology>> {
        let generation = self.generation();
        let known = self.topology.lock().clone();
        if let Some(topology) = known {
            return Ok(topology);
        }
        let new = Topology::new()?;
        let mut known = self.topology.lock();
        let old = if self.generation() == generation {
            known.replace(new.clone())
        } else {
            None
        };
        drop(known);
        drop(old);
        Ok(new)
    }

    /// Returns the topology snapshot of these clients, cached or new. `names` is a slice of
    /// `uapi::request::ClientNames`: clients' addresses as raw numbers.
    ///
    /// Errors: `ENODEV` if a client does not exist, `EINVAL` if reserved bytes of an address are set, `ENOMEM`.
    pub(crate) fn snapshot(&self, names: &[u64]) -> Answer<Arc<TopologySnapshot>> {
        let make = |generation| {
            let topology = self.topology()?;
            let mut clients = KVec::with_capacity(names.len(), GFP_KERNEL_ACCOUNT)?;
            let mut indexes = KVec::with_capacity(names.len(), GFP_KERNEL_ACCOUNT)?;
            for &name in names {
                let name = PciAddr::from_raw(name).ok_or_else(|| refuse!(EINVAL, "a reserved field is not zero"))?;
                let (index, function) = topology
                    .find(name)
                    .ok_or_else(|| refuse!(ENODEV, "{} is not a PCI function of this machine", name))?;
                clients.push(function.clone(), GFP_KERNEL_ACCOUNT)?;
                indexes.push(index, GFP_KERNEL_ACCOUNT)?;
            }
            let providers = self.providers()?;
            // Ordered by provider and then by client.
            let mut paths = KVec::with_capacity(providers.len() * clients.len(), GFP_KERNEL_ACCOUNT)?;
            let mut source = topology.paths();
            for provider in &providers {
                source.add_to(&mut paths, provider, &indexes)?;
            }
            Ok(TopologySnapshot::new(generation, names, clients, providers, paths)?)
        };
        snapshot::snapshot(&self.snapshots, names, || self.generation(), make)
    }

    /// Returns the path from a provider to a client. Errors: `ENOMEM`.
    pub(crate) fn path(&self, provider: &Provider, client: &Function) -> Result<Path> {
        let topology = self.topology()?;
        topology.paths().path(
            provider,
            topology.index_of(provider.function()),
            topology.index_of(client),
        )
    }
}
