// SPDX-License-Identifier: GPL-2.0

//! The orchestrator: the list of providers and of open files, the [`paths`], and the [`choice`] of a provider for a request.
//!
//! Context: process context, may sleep. `registry`, `topology`, `snapshots` and `files` are mutexes that are never held
//! together. While `registry` is held only atomics of the providers are touched; see "Lock order" in Documentation/design/lifecycle.md.
//! References to providers, files and snapshots are dropped with no lock held, as each may be the last one.

use crate::{
    alloc::{
        rules::Rules,
        snapshot::SnapshotCache,
        topology::Topology, //
    },
    ext::{
        abi::{
            self,
            consts, //
        },
        dmem::{
            Region,
            Regions, //
        },
        global,
        log::capable_admin,
        pci::Function,
        refusal::{
            refuse,
            Answer,
            Refusal, //
        },
        vma::AddressSpace, //
    },
    mem::{
        buffer::{
            Buffer,
            Lost,
            Provider, //
        },
        provider::{
            counters::Counters,
            PageBases, //
        },
        walk, //
    },
    policy::path::PciAddr, //
};
use kernel::{
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, Mutex,
    },
};

pub(crate) mod choice;
mod paths;

pub(crate) const PAGE: u64 = PAGE_SIZE as u64;

/// An open file of `/dev/p2pmem`, for code that reports refusals and events to the file.
///
/// Context: process context, may sleep, with none of the module's locks held.
pub(crate) trait OpenFile: Send + Sync {
    /// Queues an event for a provider that was added or removed. `kind` is one of `P2PMEM_EVENT_*`.
    fn notify(&self, kind: u32, provider: u32);
    /// Queues the event that a buffer, of which the file has handles, was revoked.
    fn notify_revoked(&self, buffer: &Buffer);
    /// Records a refusal outside of the file's own ioctls, for `P2PMEM_IOC_EXPLAIN_LAST`, and logs it. `what` names the
    /// refused call.
    fn refused(&self, what: &str, refusal: &Refusal);
}

/// Everything that `Orchestrator::registry` protects.
struct Registry {
    providers: KVec<Arc<Provider>>,
    next_id: u32,
    /// The next free page of the address space of all mappings.
    next_page: u64,
    /// Memory of providers that were removed while their device did not answer.
    lost: KVec<Lost>,
    /// Whether the system is about to sleep, or sleeps. No provider can be added then.
    asleep: bool,
}

/// The state of the module, shared by files, callbacks and configfs.
#[pin_data]
pub(crate) struct Orchestrator {
    space: AddressSpace<Buffer>,
    rules: Arc<Rules>,
    /// Incremented whenever a snapshot or the table of functions may have become outdated.
    generation: Atomic<u64>,
    next_file: Atomic<u64>,
    /// Sums of the counters of removed providers.
    past: Counters,
    #[pin]
    registry: Mutex<Registry>,
    /// The table of functions, once somebody has needed it.
    #[pin]
    topology: Mutex<Option<Arc<Topology>>>,
    #[pin]
    regions: Mutex<Regions>,
    #[pin]
    snapshots: Mutex<SnapshotCache>,
    #[pin]
    files: Mutex<RBTree<u64, Arc<dyn OpenFile>>>,
}

impl Orchestrator {
    /// Returns the orchestrator. Errors: `ENODEV` while the module is being loaded or unloaded.
    pub(crate) fn get() -> Result<Arc<Self>> {
        global::instance()
    }

    /// Creates the orchestrator, without any provider. Errors: `ENOMEM`, and those of making an anonymous inode.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let space = AddressSpace::new()?;
        let rules = Rules::new()?;
        Arc::pin_init(
            pin_init!(Self {
                space,
                rules,
                generation: Atomic::new(1),
                next_file: Atomic::new(1),
                past: Counters::new(),
                registry <- new_mutex!(Registry {
                    providers: KVec::new(),
                    next_id: 1,
                    next_page: PageBases::FIRST,
                    lost: KVec::new(),
                    asleep: false,
                }),
                topology <- new_mutex!(None),
                regions <- new_mutex!(Regions::NONE),
                snapshots <- new_mutex!(SnapshotCache::new()),
                files <- new_mutex!(RBTree::new()),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the address space of all user mappings of the module.
    pub(crate) fn space(&self) -> &AddressSpace<Buffer> {
        &self.space
    }

    /// Returns the region of a function's memory for the dmem cgroup. Errors: `ENOMEM`.
    pub(crate) fn region(&self, function: &Function, size: u64) -> Result<Arc<Region>> {
        self.regions.lock().of(function, size)
    }

    pub(crate) fn rules(&self) -> &Arc<Rules> {
        &self.rules
    }

    /// Returns the generation: a snapshot that was made under an older one may be outdated.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// Returns a number for a new file. Never used twice.
    pub(crate) fn file_id(&self) -> u64 {
        self.next_file.fetch_add(1, Relaxed)
    }

    /// Adds an open file to the list of those that events go to. Errors: `ENOMEM`.
    pub(crate) fn add_file(&self, id: u64, file: Arc<dyn OpenFile>) -> Result {
        let node = RBTreeNode::new(id, file, GFP_KERNEL_ACCOUNT)?;
        self.files.lock().insert(node);
        Ok(())
    }

    /// Returns the open file `id`, if it is still open.
    pub(crate) fn file(&self, id: u64) -> Option<Arc<dyn OpenFile>> {
        self.files.lock().get(&id).cloned()
    }

    /// Removes a file from the list.
    pub(crate) fn remove_file(&self, id: u64) {
        let removed = self.files.lock().remove_node(&id);
        // Dropped without `files` held: the last reference of a file frees its buffers.
        drop(removed);
    }

    /// Sends a provider event to all files.
    pub(crate) fn notify(&self, kind: u32, provider: u32) {
        let next = |from| walk::at_or_after(&self.files.lock(), from);
        walk::one_by_one(next, |file| file.notify(kind, provider));
    }

    /// Sends the revocation event to all files that have handles of `buffer`.
    pub(crate) fn notify_revoked(&self, buffer: &Buffer) {
        buffer.for_each_file(|id| {
            if let Some(file) = self.file(id) {
                file.notify_revoked(buffer);
            }
        });
    }

    /// Returns all providers in ascending order of their ids. Errors: `ENOMEM`.
    pub(crate) fn providers(&self) -> Result<KVec<Arc<Provider>>> {
        let registry = self.registry.lock();
        let mut providers = KVec::with_capacity(registry.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for provider in &registry.providers {
            providers.push(provider.clone(), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(providers)
    }

    /// Queues the scrubber of each provider that has dirty memory. Allocates nothing: dirty memory must be cleared under
    /// memory pressure too.
    pub(crate) fn send_scrubbers(&self) {
        let mut last = 0;
        loop {
            let next = self.registry.lock().providers.iter().find(|p| p.id > last).cloned();
            let Some(provider) = next else {
                return;
            };
            last = provider.id;
            provider.send_scrubber();
        }
    }

    /// Adds the counters of provider `id` to `stats`; 0 stands for all providers since the module was loaded. Errors:
    /// `ENOENT`.
    pub(crate) fn stats(&self, id: u32, stats: &mut abi::Stats) -> Answer {
        let registry = self.registry.lock();
        let mut found = id == 0;
        for provider in registry.providers.iter().filter(|p| id == 0 || p.id == id) {
            provider.counters.add_to(stats);
            found = true;
        }
        if id == 0 {
            self.past.add_to(stats);
        }
        drop(registry);
        if found {
            Ok(())
        } else {
            Err(refuse!(ENOENT, "there is no provider {}", id))
        }
    }

    // Adding and removing providers.

    /// Sets whether the memory of the function `addr` may be exported to importers that cannot be revoked. No effect if the
    /// function is no provider.
    pub(crate) fn set_pinned_exports(&self, addr: PciAddr, allow: bool) {
        let registry = self.registry.lock();
        if let Some(provider) = registry.providers.iter().find(|p| p.addr == addr) {
            provider.set_pinned_exports(allow);
        }
    }

    /// Sets the group whose members may attach the function `addr` to dma-bufs. No effect if the function is no provider.
    pub(crate) fn set_attach_gid(&self, addr: PciAddr, gid: Option<u32>) {
        let registry = self.registry.lock();
        if let Some(provider) = registry.providers.iter().find(|p| p.addr == addr) {
            provider.set_attach_gid(gid);
        }
    }

    /// Returns an id for a new provider, never 0, and the pages of its BARs in the address space of all mappings. Neither is ever
    /// used twice. Errors: `ENOSPC` if no pages are left.
    pub(crate) fn identity(&self, function: &Function) -> Result<(u32, PageBases)> {
        let mut registry = self.registry.lock();
        let pages = PageBases::new(function, &mut registry.next_page)?;
        let id = registry.next_id;
        registry.next_id += 1;
        Ok((id, pages))
    }

    /// Adds a provider to the list, drops the snapshots and sends the event.
    ///
    /// Errors: `EBUSY` if the system is about to sleep, `EEXIST` if the function is a provider already, `ENOMEM`.
    pub(crate) fn add(&self, provider: &Arc<Provider>) -> Answer {
        // A change of rules counts the buffers of all providers.
        let changes = self.rules.hold_changes();
        let mut registry = self.registry.lock();
        if registry.asleep {
            return Err(refuse!(EBUSY, "the machine is about to sleep"));
        }
        if registry
            .providers
            .iter()
            .any(|p| p.function().same(provider.function()))
        {
            return Err(refuse!(EEXIST, "{} is a provider already", provider.addr));
        }
        let at = registry.providers.iter().take_while(|p| p.id < provider.id).count();
        registry.providers.reserve(1, GFP_KERNEL)?;
        // Cannot fail: the capacity was reserved above.
        let _ = registry.providers.insert_within_capacity(at, provider.clone());
        drop(registry);
        drop(changes);
        self.forget_snapshots();
        self.notify(consts::EVENT_PROVIDER_ADDED, provider.id);
        Ok(())
    }

    /// Sets whether the system is about to sleep. While it is, [`Self::add`] fails.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.registry.lock().asleep = asleep;
    }

    /// Whether `function` is a provider.
    pub(crate) fn is_provided(&self, function: &Function) -> bool {
        self.find(function).is_some()
    }

    /// Whether there is a provider `id`.
    pub(crate) fn is_provider(&self, id: u32) -> bool {
        self.registry.lock().providers.iter().any(|p| p.id == id)
    }

    /// Returns the provider `id`.
    pub(crate) fn provider(&self, id: u32) -> Option<Arc<Provider>> {
        self.registry.lock().providers.iter().find(|p| p.id == id).cloned()
    }

    /// Returns the provider whose function is `function`.
    pub(crate) fn find(&self, function: &Function) -> Option<Arc<Provider>> {
        self.registry
            .lock()
            .providers
            .iter()
            .find(|p| p.function().same(function))
            .cloned()
    }

    /// Returns the provider with the lowest id.
    pub(crate) fn first(&self) -> Option<Arc<Provider>> {
        self.registry.lock().providers.first().cloned()
    }

    /// Keeps memory of a device that does not answer until [`Self::take_lost`]. Without memory for the list entry the
    /// memory goes back to the pool uncleared, with a warning.
    pub(crate) fn keep_lost(&self, lost: Lost) {
        let mut registry = self.registry.lock();
        if registry.lost.reserve(1, GFP_KERNEL).is_ok() {
            let _ = registry.lost.push_within_capacity(lost);
            return;
        }
        drop(registry);
        pr_warn!("memory of a device that does not answer goes back to the kernel's pool as it is\n");
    }

    /// Takes the memory that was kept for `function`, if there is any.
    pub(crate) fn take_lost(&self, function: &Function) -> Option<Lost> {
        let mut registry = self.registry.lock();
        let at = registry.lost.iter().position(|lost| lost.is_of(function))?;
        registry.lost.remove(at).ok()
    }

    /// Removes a provider from the list, and adds its counters to those of removed providers.
    pub(crate) fn forget(&self, provider: &Provider) {
        let mut registry = self.registry.lock();
        let at = registry.providers.iter().position(|p| p.id == provider.id);
        let removed = at.and_then(|at| registry.providers.remove(at).ok());
        let mut sum = abi::Stats::default();
        provider.counters.add_to(&mut sum);
        self.past.add(&sum);
        drop(registry);
        drop(removed);
    }
}

/// Returns the bus address of a buffer to a task with `CAP_SYS_ADMIN`, else 0: bus addresses reveal the layout of physical
/// memory.
pub(crate) fn visible_bus_addr(buffer: &Buffer) -> u64 {
    if capable_admin() {
        buffer.bus_addr
    } else {
        0
    }
}
