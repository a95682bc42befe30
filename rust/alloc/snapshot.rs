// SPDX-License-Identifier: GPL-2.0

//! Topology snapshots: the providers, a list of clients, and the path of each pair.
//!
//! Programs ask for the same clients again and again. Finding the functions, the providers and the paths takes far longer
//! than choosing a provider, and the result changes only with the bus. So [`SnapshotCache`] keeps the latest snapshots. A
//! snapshot also keeps the ranking of the providers without rules, and with rules that count no bytes for as long as those rules
//! are in force ([`Ranking`]).
//!
//! Context: process context, may sleep. `Orchestrator::snapshots` and `TopologySnapshot::ruled` are mutexes with nothing
//! taken inside.

use crate::{
    alloc::rules::check::{
        ApplicableRules,
        RuleCheck, //
    },
    ext::{
        pci::Function,
        refusal::Answer, //
    },
    mem::buffer::Provider,
    policy::{
        path::{
            Path,
            PciAddr, //
        },
        placement::{
            self,
            Candidate,
            Named,
            Request,
            Strategy, //
        },
        ranking::{
            self,
            Capacity,
            RankedProvider, //
        },
        rule::FunctionId,
        rule_effect::RuleEffect, //
    }, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{Arc, Mutex},
};

/// The properties of a provider that never change.
#[derive(Clone, Copy)]
pub(crate) struct ProviderInfo {
    pub(crate) id: u32,
    pub(crate) addr: PciAddr,
    /// Offset of the first published byte in the BAR.
    pub(crate) start: u64,
    /// Bytes that can be allocated in all.
    pub(crate) size: u64,
}

/// The part of a snapshot that explanations need. It holds no reference to providers or clients, which may be gone when a
/// program asks for the explanation.
pub(crate) struct SnapshotParts {
    /// The providers in ascending order of their ids.
    pub(crate) providers: KVec<ProviderInfo>,
    /// The path from each provider to each client, ordered by provider and then by client.
    pub(crate) paths: KVec<Path>,
    /// Number of clients.
    pub(crate) clients: usize,
}

impl SnapshotParts {
    /// Copies the properties of `providers`. `paths` are ordered by provider and then by client. Errors: `ENOMEM`.
    fn new(providers: &[Arc<Provider>], paths: KVec<Path>, clients: usize) -> Result<Arc<Self>> {
        let mut infos = KVec::with_capacity(providers.len(), GFP_KERNEL_ACCOUNT)?;
        for provider in providers {
            infos.push(
                ProviderInfo {
                    id: provider.id,
                    addr: provider.addr,
                    start: provider.start,
                    size: provider.size,
                },
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        let parts = Self {
            providers: infos,
            paths,
            clients,
        };
        Ok(Arc::new(parts, GFP_KERNEL_ACCOUNT)?)
    }

    /// Returns the paths from the provider with that index to all clients.
    pub(crate) fn paths_of(&self, provider: usize) -> &[Path] {
        let from = provider * self.clients;
        self.paths.get(from..from + self.clients).unwrap_or_default()
    }

    /// Returns the provider with that index as a candidate with a capacity, and whether no piece is larger.
    pub(crate) fn candidate(
        &self,
        provider: usize,
        (capacity, exact): (Capacity, bool),
        effect: RuleEffect,
    ) -> Candidate<'_> {
        let info = &self.providers[provider];
        let live = capacity.is_live();
        let capacity = if live { capacity } else { Capacity::EMPTY };
        Candidate {
            id: info.id,
            live,
            start: info.start,
            size: info.size,
            free: capacity.free(),
            largest: capacity.largest,
            exact,
            paths: self.paths_of(provider),
            effect,
        }
    }
}

/// The providers of a snapshot, ranked by the rules, the request and the distance.
pub(crate) struct Ranking {
    /// The rules, if the ranking serves other requests too.
    applicable_rules: Option<ApplicableRules>,
    /// The effects of the rules by the index of the provider; empty without rules.
    effects: KVec<RuleEffect>,
    /// The providers, the best ones first, and those that cannot serve last.
    pub(crate) order: KVec<RankedProvider>,
}

impl Ranking {
    /// Ranks the providers of a snapshot. Errors: `ENOMEM`.
    fn new(
        parts: &SnapshotParts,
        request: &Request,
        effects: KVec<RuleEffect>,
        applicable_rules: Option<ApplicableRules>,
    ) -> Result<Arc<Self>> {
        let mut ranking = Self {
            applicable_rules,
            effects,
            order: KVec::with_capacity(parts.providers.len(), GFP_KERNEL_ACCOUNT)?,
        };
        // One candidate for all providers: without rules, nothing is copied.
        let mut candidate = Candidate {
            id: 0,
            live: true,
            start: 0,
            size: 0,
            free: 0,
            largest: 0,
            exact: true,
            paths: &[],
            effect: RuleEffect::NONE,
        };
        for (index, info) in parts.providers.iter().enumerate() {
            (candidate.id, candidate.start, candidate.size) = (info.id, info.start, info.size);
            candidate.paths = parts.paths_of(index);
            if let Some(effect) = ranking.effects.get(index) {
                candidate.effect = *effect;
            }
            let ranked = placement::rank(request, index, &candidate);
            // Not core's sort: objtool warns about a branch of it.
            let at = ranking.order.partition_point(|other| other.place <= ranked.place);
            // Cannot fail: there is capacity for all.
            let _ = ranking.order.insert_within_capacity(at, ranked);
        }
        ranking::group(&mut ranking.order, request.is_by_load());
        Ok(Arc::new(ranking, GFP_KERNEL_ACCOUNT)?)
    }

    /// Returns the providers that rules do not avoid.
    pub(crate) fn without_avoided(&self) -> &[RankedProvider] {
        let end = self.order.partition_point(|ranked| !ranked.place.is_avoided());
        self.order.get(..end).unwrap_or_default()
    }

    /// Whether the ranking is for one request.
    pub(crate) fn is_of_request(&self) -> bool {
        self.applicable_rules.is_none() && !self.effects.is_empty()
    }

    /// Whether `size` of the free bytes of the provider with that index are not reserved for others.
    pub(crate) fn has_unreserved(&self, provider: usize, has: Capacity, size: u64) -> bool {
        let reserved = self
            .effects
            .get(provider)
            .map_or(0, |effect| effect.reserved_for_others);
        has.free().saturating_sub(reserved) >= size
    }

    /// Returns the effect of the rules on the provider with that index.
    pub(crate) fn effect(&self, provider: usize) -> RuleEffect {
        self.effects.get(provider).copied().unwrap_or(RuleEffect::NONE)
    }
}

/// A topology snapshot: clients, providers, and all paths between them at one generation.
#[pin_data]
pub(crate) struct TopologySnapshot {
    generation: u64,
    /// The clients' addresses as raw numbers, see `uapi::request::ClientNames`.
    names: KVec<u64>,
    pub(crate) clients: KVec<Function>,
    /// The properties of the clients that rules match.
    parties: KVec<FunctionId>,
    /// In ascending order of their ids. A provider may have been stopped since.
    pub(crate) providers: KVec<Arc<Provider>>,
    pub(crate) parts: Arc<SnapshotParts>,
    /// The ranking without rules.
    pub(crate) unruled: Arc<Ranking>,
    /// The rankings by the latest sets of rules, the newest first.
    #[pin]
    ruled: Mutex<KVec<Arc<Ranking>>>,
}

impl TopologySnapshot {
    /// Number of entries in [`Self::ruled`], one for each set of users with different rules.
    const MOST_RULED: usize = 4;

    /// Creates a snapshot. `paths` are ordered by provider and then by client. Errors: `ENOMEM`.
    pub(crate) fn new(
        generation: u64,
        named: &[u64],
        clients: KVec<Function>,
        providers: KVec<Arc<Provider>>,
        paths: KVec<Path>,
    ) -> Result<Arc<Self>> {
        let mut names = KVec::with_capacity(named.len(), GFP_KERNEL_ACCOUNT)?;
        names.extend_from_slice(named, GFP_KERNEL_ACCOUNT)?;
        let mut parties = KVec::with_capacity(clients.len(), GFP_KERNEL_ACCOUNT)?;
        for client in &clients {
            parties.push(client.function_id(), GFP_KERNEL_ACCOUNT)?;
        }
        let parts = SnapshotParts::new(&providers, paths, clients.len())?;
        let unruled = Ranking::new(&parts, &Request::any(clients.len()), KVec::new(), None)?;
        Arc::pin_init(
            pin_init!(Self {
                generation,
                names,
                clients,
                parties,
                providers,
                parts,
                unruled,
                ruled <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Returns the ranking for a request under the rules of `rule_check`, remembered or new. Errors: `ENOMEM`.
    pub(crate) fn ranking(&self, rule_check: &RuleCheck<'_>, request: &Request) -> Result<Arc<Ranking>> {
        let usual = request.named == Named::Any && request.strategy == Strategy::Nearest;
        let shared = rule_check.applicable_rules().filter(|_| usual);
        let known = match shared {
            Some(_) if rule_check.is_empty() => Some(self.unruled.clone()),
            Some(rules) => {
                let is = |known: &&Arc<Ranking>| known.applicable_rules.as_ref().is_some_and(|of| of.is_same(rules));
                self.ruled.lock().iter().find(is).cloned()
            }
            None => None,
        };
        if let Some(ranking) = known {
            return Ok(ranking);
        }
        let mut effects = KVec::with_capacity(self.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for (index, provider) in self.providers.iter().enumerate() {
            let effect = rule_check.effect(provider, &self.parties, self.parts.paths_of(index), request.size);
            effects.push(effect, GFP_KERNEL_ACCOUNT)?;
        }
        let Some(rules) = shared else {
            return Ranking::new(&self.parts, request, effects, None);
        };
        let any = Request::any(self.parts.clients);
        let new = Ranking::new(&self.parts, &any, effects, Some(rules.clone()))?;
        let mut remembered = KVec::with_capacity(Self::MOST_RULED, GFP_KERNEL_ACCOUNT)?;
        remembered.push(new.clone(), GFP_KERNEL_ACCOUNT)?;
        let mut ruled = self.ruled.lock();
        // Drops an equal entry that another task added meanwhile, and entries of rules that are not in force any more.
        let useful = |old: &&Arc<Ranking>| {
            let of = old.applicable_rules.as_ref();
            of.is_some_and(|of| of.has_rules_of(rules) && !of.is_same(rules))
        };
        for other in ruled.iter().filter(useful).take(Self::MOST_RULED - 1) {
            remembered.push(other.clone(), GFP_KERNEL_ACCOUNT)?;
        }
        let old = core::mem::replace(&mut *ruled, remembered);
        drop(ruled);
        drop(old);
        Ok(new)
    }
}

/// The latest snapshots, with round-robin replacement.
pub(crate) struct SnapshotCache {
    snapshots: KVec<Arc<TopologySnapshot>>,
    /// Index of the snapshot to replace next.
    oldest: usize,
}

impl SnapshotCache {
    /// Number of snapshots.
    const MOST: usize = 32;

    pub(crate) const fn new() -> Self {
        Self {
            snapshots: KVec::new(),
            oldest: 0,
        }
    }

    /// Returns the snapshot of these clients, if it is of `generation`.
    fn get(&self, generation: u64, names: &[u64]) -> Option<Arc<TopologySnapshot>> {
        // Compares words: memcmp() would compare bytes.
        let same = |snapshot: &TopologySnapshot| snapshot.names.len() == names.len() && snapshot.names.iter().eq(names);
        let fits = |snapshot: &&Arc<TopologySnapshot>| snapshot.generation == generation && same(snapshot);
        self.snapshots.iter().find(fits).cloned()
    }

    /// Adds a snapshot. Replaces the snapshot of the same clients, else the oldest if the cache is full. Returns the
    /// replaced one, to be dropped without the lock. Errors: `ENOMEM`.
    fn put(&mut self, snapshot: Arc<TopologySnapshot>) -> Result<Option<Arc<TopologySnapshot>>> {
        let same = self.snapshots.iter().position(|old| *old.names == *snapshot.names);
        if same.is_none() && self.snapshots.len() < Self::MOST {
            self.snapshots.push(snapshot, GFP_KERNEL)?;
            return Ok(None);
        }
        let at = same.unwrap_or(self.oldest);
        if same.is_none() {
            self.oldest = (self.oldest + 1) % Self::MOST;
        }
        Ok(self.snapshots.get_mut(at).map(|old| core::mem::replace(old, snapshot)))
    }
}

/// Returns the snapshot of these clients, cached or made by `make`. `generation` returns the present generation. `make`
/// runs without a lock.
///
/// Errors: those of `make`, `ENOMEM`.
pub(crate) fn snapshot(
    snapshots: &Mutex<SnapshotCache>,
    names: &[u64],
    generation: impl Fn() -> u64,
    make: impl FnOnce(u64) -> Answer<Arc<TopologySnapshot>>,
) -> Answer<Arc<TopologySnapshot>> {
    let now = generation();
    let known = snapshots.lock().get(now, names);
    if let Some(snapshot) = known {
        return Ok(snapshot);
    }
    let made = make(now)?;
    let mut locked = snapshots.lock();
    // [`forget`] runs after the generation changed. Checking the generation with the lock held keeps an outdated snapshot
    // from being added after that.
    let old = if generation() == now {
        locked.put(made.clone())?
    } else {
        None
    };
    drop(locked);
    drop(old);
    Ok(made)
}

/// Drops all snapshots, without holding the lock.
pub(crate) fn forget(snapshots: &Mutex<SnapshotCache>) {
    let old = core::mem::replace(&mut *snapshots.lock(), SnapshotCache::new());
    drop(old);
}

#[kunit_tests(p2pmem_snapshot)]
mod tests {
    use super::*;

    fn names(bus: u8) -> [u64; 1] {
        [bus.into()]
    }

    fn empty(generation: u64, bus: u8) -> Result<Arc<TopologySnapshot>> {
        TopologySnapshot::new(generation, &names(bus), KVec::new(), KVec::new(), KVec::new())
    }

    #[test]
    fn lookup_matches_generation_and_clients() -> Result {
        let mut snapshots = SnapshotCache::new();
        assert!(snapshots.put(empty(1, 5)?)?.is_none());
        assert!(snapshots.put(empty(1, 6)?)?.is_none());
        assert!(snapshots
            .get(1, &names(5))
            .is_some_and(|snapshot| *snapshot.names == names(5)));
        assert!(snapshots.get(2, &names(5)).is_none());
        assert!(snapshots.get(1, &names(7)).is_none() && snapshots.get(1, &[]).is_none());
        // A newer snapshot of the same clients replaces the older one.
        assert!(snapshots.put(empty(2, 5)?)?.is_some_and(|old| old.generation == 1));
        assert!(snapshots.get(1, &names(5)).is_none() && snapshots.get(2, &names(5)).is_some());
        assert_eq!(snapshots.snapshots.len(), 2);
        Ok(())
    }

    #[test]
    fn full_cache_evicts_oldest_snapshot() -> Result {
        let mut snapshots = SnapshotCache::new();
        for bus in 0..SnapshotCache::MOST as u8 {
            assert!(snapshots.put(empty(1, bus)?)?.is_none());
        }
        for bus in 0..4 {
            let gone = snapshots.put(empty(1, 100 + bus)?)?;
            assert!(gone.is_some_and(|old| *old.names == names(bus)));
        }
        assert_eq!(snapshots.snapshots.len(), SnapshotCache::MOST);
        assert!(snapshots.get(1, &names(3)).is_none() && snapshots.get(1, &names(4)).is_some());
        Ok(())
    }
}
