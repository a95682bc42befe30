// SPDX-License-Identifier: GPL-2.0

//! Topology snapshots: the providers, a list of clients, and the path of each pair.
//!
//! Programs ask for the same clients again and again. Finding the functions, the providers and the paths takes far longer
//! than choosing a provider, and the result changes only with the bus. So [`SnapshotCache`] keeps the latest snapshots. A
//! snapshot also keeps the effect of rules that count no bytes, for as long as those rules are in force
//! ([`RuledRanking`]).
//!
//! Context: process context, may sleep. `Orchestrator::snapshots` and `TopologySnapshot::ruled` are mutexes with nothing
//! taken inside.

use crate::{
    alloc::rules::check::{
        ApplicableRules,
        RuleCheck, //
    },
    ext::{
        free_hint::FreeHint,
        pci::Function,
        refusal::Answer, //
    },
    mem::buffer::Provider,
    policy::{
        distance::Distance,
        path::{
            Path,
            PciAddr, //
        },
        placement::Candidate,
        ranking::{
            self,
            Capacity,
            RankedProvider, //
        },
        rule::FunctionId,
        rule_effect::{
            Preference,
            RuleEffect, //
        }, //
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
    /// The providers from the nearest to the farthest, with their free hints.
    pub(crate) ranking: KVec<RankedProvider<Arc<FreeHint>>>,
    /// Number of clients.
    pub(crate) clients: usize,
}

impl SnapshotParts {
    /// Copies the properties of `providers` and ranks them. `paths` are ordered by provider and then by client. Errors:
    /// `ENOMEM`.
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
        let ranking = KVec::with_capacity(providers.len(), GFP_KERNEL_ACCOUNT)?;
        let mut parts = Self {
            providers: infos,
            paths,
            ranking,
            clients,
        };
        for (index, provider) in providers.iter().enumerate() {
            let distance = Distance::of(clients, parts.paths_of(index));
            let ranked = RankedProvider {
                index,
                size: provider.size,
                preference: distance.is_reachable().then_some(Preference::Neutral),
                distance,
                equal: 0,
                hint: provider.hint(),
            };
            add_ranked(&mut parts.ranking, ranked)?;
        }
        ranking::group(&mut parts.ranking);
        Ok(Arc::new(parts, GFP_KERNEL_ACCOUNT)?)
    }

    /// Returns the paths from the provider with that index to all clients.
    pub(crate) fn paths_of(&self, provider: usize) -> &[Path] {
        let from = provider * self.clients;
        self.paths.get(from..from + self.clients).unwrap_or_default()
    }

    /// Returns the provider with that index as a candidate with an exact capacity.
    pub(crate) fn candidate(&self, provider: usize, capacity: Capacity, effect: RuleEffect) -> Candidate<'_> {
        let info = &self.providers[provider];
        let live = capacity.is_live();
        let Capacity { free, largest } = if live { capacity } else { Capacity::EMPTY };
        Candidate {
            id: info.id,
            live,
            start: info.start,
            size: info.size,
            free,
            largest,
            exact: true,
            paths: self.paths_of(provider),
            effect,
        }
    }
}

/// Inserts a provider into a ranking, behind those of equal order. Errors: `ENOMEM`.
fn add_ranked(ranking: &mut KVec<RankedProvider<Arc<FreeHint>>>, ranked: RankedProvider<Arc<FreeHint>>) -> Result {
    let order = ranked.order();
    ranking.push(ranked, GFP_KERNEL_ACCOUNT)?;
    // Insertion sort: objtool warns about a branch of core's sort.
    for at in (1..ranking.len()).rev() {
        if ranking[at - 1].order() <= order {
            break;
        }
        ranking.swap(at - 1, at);
    }
    Ok(())
}

/// The effect of rules that count no bytes on all providers of a snapshot.
pub(crate) struct RuledRanking {
    pub(crate) applicable_rules: ApplicableRules,
    /// By the index of the provider.
    pub(crate) effects: KVec<RuleEffect>,
    /// As [`SnapshotParts::ranking`], with preferred providers first and avoided ones last.
    pub(crate) ranking: KVec<RankedProvider<Arc<FreeHint>>>,
}

impl RuledRanking {
    /// Evaluates the rules for all providers of a snapshot, and ranks the providers by the result. Errors: `ENOMEM`.
    fn new(snapshot: &TopologySnapshot, applicable_rules: ApplicableRules) -> Result<Arc<Self>> {
        let mut effects = KVec::with_capacity(snapshot.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for (index, provider) in snapshot.providers.iter().enumerate() {
            let paths = snapshot.parts.paths_of(index);
            effects.push(
                applicable_rules.effect(&provider.function_id(), &snapshot.parties, paths),
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        let mut ranking = KVec::with_capacity(effects.len(), GFP_KERNEL_ACCOUNT)?;
        for ranked in &snapshot.parts.ranking {
            let effect = &effects[ranked.index];
            let allowed = effect.denied.is_none() && effect.too_far.is_none();
            let preference = ranked.preference.filter(|_| allowed).map(|_| effect.preference);
            add_ranked(
                &mut ranking,
                RankedProvider {
                    preference,
                    ..ranked.clone()
                },
            )?;
        }
        ranking::group(&mut ranking);
        let ruled = Self {
            applicable_rules,
            effects,
            ranking,
        };
        Ok(Arc::new(ruled, GFP_KERNEL_ACCOUNT)?)
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
    /// The effects of the latest sets of rules, the newest first.
    #[pin]
    ruled: Mutex<KVec<Arc<RuledRanking>>>,
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
        Arc::pin_init(
            pin_init!(Self {
                generation,
                names,
                clients,
                parties,
                providers,
                parts,
                ruled <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Returns the effect of these rules on the providers, cached or new. Errors: `ENOMEM`.
    pub(crate) fn ruled(&self, applicable_rules: &ApplicableRules) -> Result<Arc<RuledRanking>> {
        let known = |ruled: &&Arc<RuledRanking>| ruled.applicable_rules.is_same(applicable_rules);
        let found = self.ruled.lock().iter().find(known).cloned();
        if let Some(ruled) = found {
            return Ok(ruled);
        }
        let new = RuledRanking::new(self, applicable_rules.clone())?;
        let mut remembered = KVec::with_capacity(Self::MOST_RULED, GFP_KERNEL_ACCOUNT)?;
        remembered.push(new.clone(), GFP_KERNEL_ACCOUNT)?;
        let mut ruled = self.ruled.lock();
        // Drops an equal entry that another task added meanwhile, and entries of rules that are not in force any more.
        let useful = |old: &&Arc<RuledRanking>| {
            old.applicable_rules.has_rules_of(applicable_rules) && !old.applicable_rules.is_same(applicable_rules)
        };
        for other in ruled.iter().filter(useful).take(Self::MOST_RULED - 1) {
            remembered.push(other.clone(), GFP_KERNEL_ACCOUNT)?;
        }
        let old = core::mem::replace(&mut *ruled, remembered);
        drop(ruled);
        drop(old);
        Ok(new)
    }

    /// Returns the providers as candidates for a buffer of `size` bytes at `align`, with exact capacities and byte counts.
    /// Errors: `ENOMEM`.
    pub(crate) fn candidates(&self, rule_check: &RuleCheck<'_>, size: u64, align: u64) -> Result<KVec<Candidate<'_>>> {
        let mut candidates = KVec::with_capacity(self.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for (i, provider) in self.providers.iter().enumerate() {
            let capacity = provider.capacity(size, align);
            let effect = rule_check.effect(provider, &self.parties, self.parts.paths_of(i), size);
            candidates.push(self.parts.candidate(i, capacity, effect), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(candidates)
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
