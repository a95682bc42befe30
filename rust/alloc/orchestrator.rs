// SPDX-License-Identifier: GPL-2.0

//! The orchestrator: the list of providers and of open files, cached paths, and the choice of a provider for a request.
//!
//! Deciding goes in three stages, from cheap to complete: [`AllocRequest::quick`] without rules, `choose_fast` with rules
//! that count no bytes, `choose_by` with everything. A stage that cannot decide passes the request to the next one; all
//! give the same answer.
//!
//! Context: process context, may sleep. `registry`, `snapshots` and `files` are mutexes that are never held together. While
//! `registry` is held only atomics of the providers are touched; see "Lock order" in Documentation/design/lifecycle.md.
//! References to providers, files and snapshots are dropped with no lock held, as each may be the last one.

use crate::{
    alloc::{
        explanation::{
            traced,
            Decision,
            DecisionInput,
            QuickDecision, //
        },
        request::AllocRequest,
        rules::{
            breaks,
            NotCharged,
            RuleCheck,
            Rules, //
        },
        snapshot::{
            self,
            SnapshotCache,
            TopologySnapshot, //
        },
        topology::{
            BridgeChain,
            PathCache, //
        }, //
    },
    ext::{
        abi::{
            self,
            consts, //
        },
        global,
        log::capable_admin,
        p2pdma,
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
            Holder,
            Lost,
            Provider, //
        },
        memory::Clearing,
        provider::counters::Counters,
        walk, //
    },
    policy::{
        path::{
            Path,
            PciAddr, //
        },
        placement::{
            self,
            Candidate,
            Strategy, //
        },
        verdict::Verdict, //
    }, //
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

pub(crate) const PAGE: u64 = PAGE_SIZE as u64;

/// Records in `candidate` why it gave no memory of `size` bytes, so that the next decision passes it over.
///
/// Errors: `EAGAIN` if the rules changed, and any error that is not the candidate's own, such as `EINTR`.
pub(crate) fn exclude(candidate: &mut Candidate<'_>, size: u64, why: NotCharged) -> Result {
    match why {
        NotCharged::Broken(broken) => breaks(&mut candidate.effect, broken),
        NotCharged::Cgroup => candidate.effect.over_cgroup = true,
        NotCharged::Error(e) if e == ENOSPC => candidate.refused(size),
        NotCharged::Error(e) if e == ENODEV => candidate.live = false,
        NotCharged::Error(e) => return Err(e),
        NotCharged::Stale => return Err(EAGAIN),
    }
    Ok(())
}

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
    cache: PathCache,
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
    /// Incremented whenever a path may have changed. Cached paths and snapshots are of one generation.
    generation: Atomic<u64>,
    next_file: Atomic<u64>,
    /// Sums of the counters of removed providers.
    past: Counters,
    #[pin]
    registry: Mutex<Registry>,
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
                    cache: PathCache::new(),
                    lost: KVec::new(),
                    asleep: false,
                }),
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

    pub(crate) fn rules(&self) -> &Arc<Rules> {
        &self.rules
    }

    /// Returns the generation: a path that was computed under an older one may be outdated.
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

    // Paths.

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

    // Choosing.

    /// The number of decisions for one request before `EAGAIN`, if the rules change during each of them.
    pub(crate) const RULE_CHANGES: u32 = 16;

    /// Decides a request of `file`; with `take` set also allocates the buffer. `spare` is an unused decision whose memory
    /// is reused.
    ///
    /// Returns the handle of the buffer, if one was allocated, and the decision. A decision that chooses no provider is no
    /// error of this function.
    ///
    /// Errors: `EAGAIN` if the rules changed [`Self::RULE_CHANGES`] times, `ENOMEM`, `EINTR`.
    fn choose(
        &self,
        alloc_request: &AllocRequest,
        file: u64,
        take: bool,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<(Option<Holder>, Decision)> {
        let mut spare = spare;
        // Without rules and without anything to charge, the decision does not need the caller's credentials.
        if !take && self.rules.are_none() && alloc_request.own.as_ref().is_none_or(|own| own.is_empty()) {
            if let Some((quick, provider)) = alloc_request.quick(None, spare.take())? {
                if provider.charge_cgroup(alloc_request.size).is_ok() {
                    traced(alloc_request, file, (provider.id, 0), true);
                    return Ok((None, Decision::QuickDecision(quick)));
                }
            }
        }
        for _ in 0..Self::RULE_CHANGES {
            let rule_check = RuleCheck::new(&self.rules, alloc_request.own.clone(), file);
            if let Some((held, quick)) =
                self.choose_fast(&rule_check, alloc_request, take.then_some(file), spare.take())?
            {
                return Ok((held, Decision::QuickDecision(quick)));
            }
            if let Some(chosen) = self.choose_by(&rule_check, alloc_request, take.then_some(file))? {
                return Ok(chosen);
            }
        }
        Err(refuse!(EAGAIN, "the rules changed during every attempt: try again"))
    }

    /// Decides as [`Self::choose`] does, if strategy `nearest` is wanted, no rule counts bytes and a provider can serve.
    /// Otherwise, and if the allocation fails, returns `None`: [`Self::choose_by`] finds the reason.
    fn choose_fast(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        take: Option<u64>,
        spare: Option<KBox<QuickDecision>>,
    ) -> Result<Option<(Option<Holder>, KBox<QuickDecision>)>> {
        if !alloc_request.is_quick() {
            return Ok(None);
        }
        let ruled = match rule_check.applicable_rules() {
            _ if rule_check.is_empty() => None,
            Some(standing) => Some(alloc_request.snapshot.ruled(standing)?),
            None => return Ok(None),
        };
        let Some((quick, provider)) = alloc_request.quick(ruled.as_ref(), spare)? else {
            return Ok(None);
        };
        let held = match take {
            Some(file) => match self.take(
                rule_check,
                (alloc_request.size, alloc_request.align, alloc_request.clearing),
                provider,
                file,
            ) {
                Ok(holder) => Some(holder),
                Err(_) => return Ok(None),
            },
            // The dmem cgroup has no call that only checks: the charge is made and dropped.
            None if provider.charge_cgroup(alloc_request.size).is_err() => return Ok(None),
            None => None,
        };
        traced(alloc_request, rule_check.file(), (provider.id, 0), take.is_none());
        Ok(Some((held, quick)))
    }

    /// Decides as [`Self::choose`] does, with all rules and exact capacities. Returns `None` if the rules changed
    /// meanwhile.
    fn choose_by(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        take: Option<u64>,
    ) -> Answer<Option<(Option<Holder>, Decision)>> {
        let snapshot = &*alloc_request.snapshot;
        let providers = &snapshot.providers;
        let mut candidates = snapshot.candidates(rule_check, alloc_request.size, alloc_request.align)?;
        let strategy = match alloc_request.strategy {
            consts::STRATEGY_UPSTREAM => Strategy::Upstream(Self::upstream_choice(snapshot)?),
            consts::STRATEGY_SPREAD => Strategy::Spread,
            consts::STRATEGY_PACK => Strategy::Pack,
            _ => Strategy::Nearest,
        };
        let request = alloc_request.request(strategy);
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, providers.len(), GFP_KERNEL)?;
        // Each round that ends without memory excludes one candidate, so the loop ends.
        loop {
            let choice = placement::decide(&request, &candidates, &mut verdicts);
            let chosen = choice.chosen.and_then(|at| Some((at, providers.get(at)?)));
            if chosen.is_none() && take.is_some() {
                for provider in providers {
                    provider.counters.failed.fetch_add(1, Relaxed);
                }
            }
            if let (None, Some((at, provider))) = (take, chosen) {
                // The dmem cgroup has no call that only checks: the charge is made and dropped.
                if provider.charge_cgroup(alloc_request.size).is_err_and(|e| e == EAGAIN) {
                    candidates[at].effect.over_cgroup = true;
                    continue;
                }
            }
            let mut held = None;
            if let (Some(file), Some((at, provider))) = (take, chosen) {
                match self.take(
                    rule_check,
                    (alloc_request.size, alloc_request.align, alloc_request.clearing),
                    provider,
                    file,
                ) {
                    Ok(holder) => held = Some(holder),
                    Err(NotCharged::Stale) => return Ok(None),
                    Err(why) => {
                        exclude(&mut candidates[at], alloc_request.size, why)?;
                        continue;
                    }
                }
            }
            let input = DecisionInput {
                size: alloc_request.size,
                clients: snapshot.clients.len(),
                rules: rule_check.source(),
                providers: &snapshot.parts.providers,
                candidates: &candidates,
                verdicts: &verdicts,
                outcome: choice.outcome,
            };
            let explanation = input.explanation(chosen.and_then(|(at, _)| snapshot.parts.providers.get(at)))?;
            traced(
                alloc_request,
                rule_check.file(),
                (explanation.chosen, explanation.error),
                take.is_none(),
            );
            return Ok(Some((
                held,
                Decision::Explanation(KBox::new(explanation, GFP_KERNEL_ACCOUNT)?),
            )));
        }
    }

    /// Charges and allocates a buffer of `size` bytes in `provider` for `file`. `align` is in bytes.
    ///
    /// Errors: [`NotCharged`]. Nothing stays charged or allocated then.
    pub(crate) fn take(
        &self,
        rule_check: &RuleCheck<'_>,
        (size, align, clearing): (u64, u64, Clearing),
        provider: &Arc<Provider>,
        file: u64,
    ) -> core::result::Result<Holder, NotCharged> {
        let charge = rule_check.charge(provider, size)?;
        provider
            .alloc(size, align, clearing)
            .and_then(|mut memory| {
                memory.charge = Some(charge);
                Buffer::create(provider.clone(), memory, size, file)
            })
            .map_err(NotCharged::Error)
    }

    /// Returns the id of the provider that `pci_p2pmem_find_many()` chooses, or `None` if the kernel finds none or a device
    /// that is no provider.
    fn upstream_choice(snapshot: &TopologySnapshot) -> Result<Option<u32>> {
        let found = p2pdma::find_many(&snapshot.clients)?;
        Ok(found.and_then(|f| snapshot.providers.iter().find(|p| p.function().same(&f)).map(|p| p.id)))
    }

    /// Allocates a buffer for `file`. Without a buffer the decision says why. With `spare` the quick decision allocates no
    /// memory of its own.
    pub(crate) fn alloc(
        &self,
        alloc_request: &AllocRequest,
        file: u64,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<(Option<Holder>, Decision)> {
        self.choose(alloc_request, file, true, spare)
    }

    /// Decides as [`Self::alloc`] would, without allocating.
    pub(crate) fn explain(
        &self,
        alloc_request: &AllocRequest,
        file: u64,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<Decision> {
        Ok(self.choose(alloc_request, file, false, spare)?.1)
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

    /// Returns an id for a new provider, never 0, never used twice.
    pub(crate) fn new_id(&self) -> u32 {
        let mut registry = self.registry.lock();
        let id = registry.next_id;
        registry.next_id += 1;
        id
    }

    /// Adds a provider to the list, drops cached paths and sends the event.
    ///
    /// Errors: `EBUSY` if the system is about to sleep, `EEXIST` if the function is a provider already, `ENOMEM`.
    pub(crate) fn add(&self, provider: &Arc<Provider>) -> Answer {
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
        self.forget_paths();
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
