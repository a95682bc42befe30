// SPDX-License-Identifier: GPL-2.0

//! The orchestrator: knows all providers and open files, and chooses among the providers.

use crate::{
    alloc::{
        explanation::{
            traced,
            Decided,
            Decision,
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
            Cache,
            Walk, //
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

/// Notes why a candidate that was chosen gave no memory, so that the next decision looks elsewhere. Errors: where that
/// is nothing of the candidate's.
pub(crate) fn passed_over(candidate: &mut Candidate<'_>, size: u64, why: NotCharged) -> Result {
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

/// An open file of the device node, as those know it who have something to tell it.
pub(crate) trait OpenFile: Send + Sync {
    /// A provider came or left: `kind` is one of `P2PMEM_EVENT_*`.
    fn notify(&self, kind: u32, provider: u32);
    /// A buffer that it has handles of was revoked.
    fn notify_revoked(&self, buffer: &Buffer);
    /// Something was refused to it that is no call on the file: it can ask why, and the log has it.
    fn refused(&self, what: &str, refusal: &Refusal);
}

struct Registry {
    providers: KVec<Arc<Provider>>,
    next_id: u32,
    cache: Cache,
    /// Memory of devices that do not answer.
    lost: KVec<Lost>,
    /// Whether the machine is about to sleep, or sleeps: there are no providers then.
    asleep: bool,
}

/// What the module knows.
#[pin_data]
pub(crate) struct Orchestrator {
    space: AddressSpace<Buffer>,
    rules: Arc<Rules>,
    /// Changes whenever a path may have become another one.
    generation: Atomic<u64>,
    next_file: Atomic<u64>,
    /// Counters of providers that left.
    past: Counters,
    #[pin]
    registry: Mutex<Registry>,
    #[pin]
    snapshots: Mutex<SnapshotCache>,
    #[pin]
    files: Mutex<RBTree<u64, Arc<dyn OpenFile>>>,
}

impl Orchestrator {
    /// The module's orchestrator. Errors: `ENODEV` while the module is being set up or taken down.
    pub(crate) fn get() -> Result<Arc<Self>> {
        global::instance()
    }

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
                    cache: Cache::new(),
                    lost: KVec::new(),
                    asleep: false,
                }),
                snapshots <- new_mutex!(SnapshotCache::new()),
                files <- new_mutex!(RBTree::new()),
            }),
            GFP_KERNEL,
        )
    }

    pub(crate) fn space(&self) -> &AddressSpace<Buffer> {
        &self.space
    }

    pub(crate) fn rules(&self) -> &Arc<Rules> {
        &self.rules
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// A number for a file that is being opened.
    pub(crate) fn file_id(&self) -> u64 {
        self.next_file.fetch_add(1, Relaxed)
    }

    pub(crate) fn add_file(&self, id: u64, file: Arc<dyn OpenFile>) -> Result {
        let node = RBTreeNode::new(id, file, GFP_KERNEL_ACCOUNT)?;
        self.files.lock().insert(node);
        Ok(())
    }

    /// An open file.
    pub(crate) fn file(&self, id: u64) -> Option<Arc<dyn OpenFile>> {
        self.files.lock().get(&id).cloned()
    }

    pub(crate) fn remove_file(&self, id: u64) {
        let removed = self.files.lock().remove_node(&id);
        // Outside the lock: the last reference of a file ends its buffers.
        drop(removed);
    }

    /// Tells all files that a provider came or left.
    pub(crate) fn notify(&self, kind: u32, provider: u32) {
        let next = |from| walk::at_or_after(&self.files.lock(), from);
        walk::one_by_one(next, |file| file.notify(kind, provider));
    }

    /// Tells all files that hold a buffer that it was revoked.
    pub(crate) fn notify_revoked(&self, buffer: &Buffer) {
        buffer.for_each_file(|id| {
            if let Some(file) = self.file(id) {
                file.notify_revoked(buffer);
            }
        });
    }

    /// All providers there are now, in the order of their numbers.
    pub(crate) fn providers(&self) -> Result<KVec<Arc<Provider>>> {
        let registry = self.registry.lock();
        let mut providers = KVec::with_capacity(registry.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for provider in &registry.providers {
            providers.push(provider.clone(), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(providers)
    }

    /// Has memory that came back cleared, in all providers. It takes no memory, without which nothing would be cleared.
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

    /// What was counted of one provider, or with 0 of all there ever were.
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

    /// Forgets all paths: a function came or went, or the administrator changed ACS.
    pub(crate) fn forget_paths(&self) {
        self.generation.fetch_add(1, Relaxed);
        // They keep clients and providers, which may be gone.
        snapshot::forget(&self.snapshots);
    }

    /// The machine as these clients see it, which are a slice of `uapi::request::ClientNames`. Errors: `ENODEV` (no
    /// such function), `EINVAL` (what is no address).
    pub(crate) fn snapshot(&self, names: &[u64]) -> Answer<Arc<TopologySnapshot>> {
        let make = |generation| {
            let mut clients = KVec::with_capacity(names.len(), GFP_KERNEL_ACCOUNT)?;
            for &name in names {
                let name = PciAddr::from_raw(name).ok_or_else(|| refuse!(EINVAL, "a reserved field is not zero"))?;
                let function = Function::find(name);
                let function =
                    function.ok_or_else(|| refuse!(ENODEV, "{} is no PCI function of this machine", name))?;
                clients.push(function, GFP_KERNEL_ACCOUNT)?;
            }
            let providers = self.providers()?;
            let paths = self.paths(&providers, &clients)?;
            Ok(TopologySnapshot::new(generation, names, clients, providers, paths)?)
        };
        snapshot::snapshot(&self.snapshots, names, || self.generation(), make)
    }

    /// The paths from each provider to each client, all clients of the first provider first.
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
        // SnapshotCache keep them, on behalf of who asked.
        let mut all = KVec::with_capacity(paths.len(), GFP_KERNEL_ACCOUNT)?;
        for path in paths.iter().flatten() {
            all.push(*path, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(all)
    }

    /// The path from one provider to one client.
    pub(crate) fn path(&self, provider: &Arc<Provider>, client: &Function) -> Result<Path> {
        let (from, to) = (core::slice::from_ref(provider), core::slice::from_ref(client));
        self.paths(from, to)?.pop().ok_or(EINVAL)
    }

    /// Computes the paths that are missing, and remembers them.
    fn compute(
        &self,
        generation: u64,
        providers: &[Arc<Provider>],
        clients: &[Function],
        paths: &mut [Option<Path>],
    ) -> Result {
        let mut walks = KVec::with_capacity(clients.len(), GFP_KERNEL)?;
        for client in clients {
            walks.push(Walk::new(client)?, GFP_KERNEL)?;
        }
        let mut slots = paths.iter_mut();
        for provider in providers {
            let mut own = None;
            for (client, walk) in clients.iter().zip(&walks) {
                let Some(slot) = slots.next().filter(|slot| slot.is_none()) else {
                    continue;
                };
                if own.is_none() {
                    own = Some(Walk::new(provider.function())?);
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

    /// How often a decision is made anew because the rules changed meanwhile: a bound, should they change each time.
    pub(crate) const RULE_CHANGES: u32 = 16;

    /// Decides, and with `take` allocates as well.
    fn choose(
        &self,
        wanted: &AllocRequest,
        file: u64,
        take: bool,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<(Option<Holder>, Decision)> {
        let mut spare = spare;
        // Where there is no rule, and nothing to charge, nobody has to know who asks.
        if !take && self.rules.are_none() && wanted.own.as_ref().is_none_or(|own| own.is_empty()) {
            if let Some((quick, provider)) = wanted.quick(None, spare.take())? {
                if provider.charge_cgroup(wanted.size).is_ok() {
                    traced(wanted, file, (provider.id, 0), true);
                    return Ok((None, Decision::QuickDecision(quick)));
                }
            }
        }
        for _ in 0..Self::RULE_CHANGES {
            let rule_check = RuleCheck::new(&self.rules, wanted.own.clone(), file);
            if let Some((held, quick)) = self.choose_fast(&rule_check, wanted, take.then_some(file), spare.take())? {
                return Ok((held, Decision::QuickDecision(quick)));
            }
            if let Some(chosen) = self.choose_by(&rule_check, wanted, take.then_some(file))? {
                return Ok(chosen);
            }
        }
        Err(refuse!(EAGAIN, "the rules changed again and again"))
    }

    /// As [`Self::choose`], where rules count no bytes, the nearest is wanted, and one can serve; else none. What goes wrong
    /// is left to [`Self::choose_by`], which can say of what.
    fn choose_fast(
        &self,
        rule_check: &RuleCheck<'_>,
        wanted: &AllocRequest,
        take: Option<u64>,
        spare: Option<KBox<QuickDecision>>,
    ) -> Result<Option<(Option<Holder>, KBox<QuickDecision>)>> {
        if !wanted.is_quick() {
            return Ok(None);
        }
        let ruled = match rule_check.standing() {
            _ if rule_check.is_silent() => None,
            Some(standing) => Some(wanted.snapshot.ruled(standing)?),
            None => return Ok(None),
        };
        let Some((quick, provider)) = wanted.quick(ruled.as_ref(), spare)? else {
            return Ok(None);
        };
        let held = match take {
            Some(file) => match self.take(rule_check, (wanted.size, wanted.align, wanted.clearing), provider, file) {
                Ok(holder) => Some(holder),
                Err(_) => return Ok(None),
            },
            // Whether the cgroup may is known when it is charged.
            None if provider.charge_cgroup(wanted.size).is_err() => return Ok(None),
            None => None,
        };
        traced(wanted, rule_check.file(), (provider.id, 0), take.is_none());
        Ok(Some((held, quick)))
    }

    /// As [`Self::choose`]; none where the rules have become others.
    fn choose_by(
        &self,
        rule_check: &RuleCheck<'_>,
        wanted: &AllocRequest,
        take: Option<u64>,
    ) -> Answer<Option<(Option<Holder>, Decision)>> {
        let snapshot = &*wanted.snapshot;
        let providers = &snapshot.providers;
        let mut candidates = snapshot.candidates(rule_check, wanted.size, wanted.align)?;
        let strategy = match wanted.strategy {
            consts::STRATEGY_UPSTREAM => Strategy::Upstream(Self::upstream_choice(snapshot)?),
            consts::STRATEGY_SPREAD => Strategy::Spread,
            consts::STRATEGY_PACK => Strategy::Pack,
            _ => Strategy::Nearest,
        };
        let request = wanted.request(strategy);
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, providers.len(), GFP_KERNEL)?;
        // Each round that ends without memory takes one candidate out of the race.
        loop {
            let choice = placement::decide(&request, &candidates, &mut verdicts);
            let chosen = choice.chosen.and_then(|at| Some((at, providers.get(at)?)));
            if chosen.is_none() && take.is_some() {
                for provider in providers {
                    provider.counters.failed.fetch_add(1, Relaxed);
                }
            }
            if let (None, Some((at, provider))) = (take, chosen) {
                // Whether the cgroup may is known when it is charged.
                if provider.charge_cgroup(wanted.size).is_err_and(|e| e == EAGAIN) {
                    candidates[at].effect.over_cgroup = true;
                    continue;
                }
            }
            let mut held = None;
            if let (Some(file), Some((at, provider))) = (take, chosen) {
                match self.take(rule_check, (wanted.size, wanted.align, wanted.clearing), provider, file) {
                    Ok(holder) => held = Some(holder),
                    Err(NotCharged::Stale) => return Ok(None),
                    Err(why) => {
                        passed_over(&mut candidates[at], wanted.size, why)?;
                        continue;
                    }
                }
            }
            let decided = Decided {
                size: wanted.size,
                clients: snapshot.clients.len(),
                rules: rule_check.source(),
                providers: &snapshot.parts.known,
                candidates: &candidates,
                verdicts: &verdicts,
                outcome: choice.outcome,
            };
            let explanation = decided.explanation(chosen.and_then(|(at, _)| snapshot.parts.known.get(at)))?;
            traced(
                wanted,
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

    /// Allocates a buffer in a provider, and charges it.
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

    /// What the kernel itself would choose, if that is a provider of ours.
    fn upstream_choice(snapshot: &TopologySnapshot) -> Result<Option<u32>> {
        let found = p2pdma::find_many(&snapshot.clients)?;
        Ok(found.and_then(|f| snapshot.providers.iter().find(|p| p.function().same(&f)).map(|p| p.id)))
    }

    /// Allocates a buffer for a file. With a `spare` that nobody needs any more the decision takes no memory of its own.
    pub(crate) fn alloc(
        &self,
        wanted: &AllocRequest,
        file: u64,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<(Option<Holder>, Decision)> {
        self.choose(wanted, file, true, spare)
    }

    /// Says what [`Self::alloc`] would do.
    pub(crate) fn explain(
        &self,
        wanted: &AllocRequest,
        file: u64,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<Decision> {
        Ok(self.choose(wanted, file, false, spare)?.1)
    }

    // Providers that come.

    /// Changes whether a function's memory may be exported to importers that cannot be revoked, if it is a provider.
    pub(crate) fn set_pinned_exports(&self, addr: PciAddr, allow: bool) {
        let registry = self.registry.lock();
        if let Some(provider) = registry.providers.iter().find(|p| p.addr == addr) {
            provider.set_pinned_exports(allow);
        }
    }

    /// A number for a provider that is being made.
    pub(crate) fn new_id(&self) -> u32 {
        let mut registry = self.registry.lock();
        let id = registry.next_id;
        registry.next_id += 1;
        id
    }

    /// Takes a provider into the list.
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
        // There is room for one more.
        let _ = registry.providers.insert_within_capacity(at, provider.clone());
        drop(registry);
        self.forget_paths();
        self.notify(consts::EVENT_PROVIDER_ADDED, provider.id);
        Ok(())
    }

    /// States whether the machine is about to sleep. From then on no provider is added.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.registry.lock().asleep = asleep;
    }

    /// Whether a function is a provider.
    pub(crate) fn is_provided(&self, function: &Function) -> bool {
        self.find(function).is_some()
    }

    /// Whether there is a provider of that number.
    pub(crate) fn is_provider(&self, id: u32) -> bool {
        self.registry.lock().providers.iter().any(|p| p.id == id)
    }

    /// The provider of a number.
    pub(crate) fn provider(&self, id: u32) -> Option<Arc<Provider>> {
        self.registry.lock().providers.iter().find(|p| p.id == id).cloned()
    }

    /// The provider that a function is.
    pub(crate) fn find(&self, function: &Function) -> Option<Arc<Provider>> {
        self.registry
            .lock()
            .providers
            .iter()
            .find(|p| p.function().same(function))
            .cloned()
    }

    /// The first of the list.
    pub(crate) fn first(&self) -> Option<Arc<Provider>> {
        self.registry.lock().providers.first().cloned()
    }

    /// Keeps memory of a device that does not answer. Without memory to remember it in it goes back as it is, which the log says.
    pub(crate) fn keep_lost(&self, lost: Lost) {
        let mut registry = self.registry.lock();
        if registry.lost.reserve(1, GFP_KERNEL).is_ok() {
            let _ = registry.lost.push_within_capacity(lost);
            return;
        }
        drop(registry);
        pr_warn!("memory of a device that does not answer goes back to the kernel's pool as it is\n");
    }

    /// Memory of this function that was kept while it did not answer.
    pub(crate) fn take_lost(&self, function: &Function) -> Option<Lost> {
        let mut registry = self.registry.lock();
        let at = registry.lost.iter().position(|lost| lost.is_of(function))?;
        registry.lost.remove(at).ok()
    }

    /// Takes a provider out of the list.
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

/// Bus addresses tell where things are in the machine, which is not for everyone to know.
pub(crate) fn visible_bus_addr(buffer: &Buffer) -> u64 {
    if capable_admin() {
        buffer.bus_addr
    } else {
        0
    }
}
