// SPDX-License-Identifier: GPL-2.0

//! What a decision starts from: the machine as a list of clients sees it.
//!
//! A program asks for the same clients again and again. Finding their functions, the providers, and the path from each
//! provider to each client takes far longer than choosing, and nothing of it changes until something on the bus does. What
//! rules that count no bytes say of the providers is kept with it, for as long as those rules are in force.

use crate::{
    alloc::rules::{
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

/// What does not change of a provider.
#[derive(Clone, Copy)]
pub(crate) struct ProviderInfo {
    pub(crate) id: u32,
    pub(crate) addr: PciAddr,
    /// First published byte in the BAR.
    pub(crate) start: u64,
    /// Bytes that can be handed out in all.
    pub(crate) size: u64,
}

/// What is known of a snapshot for as long as anyone asks, when its providers and clients may be gone.
pub(crate) struct SnapshotParts {
    /// The providers, in the order of their numbers.
    pub(crate) known: KVec<ProviderInfo>,
    /// From each provider to each client, all clients of the first provider first.
    pub(crate) paths: KVec<Path>,
    /// The providers, the nearest first, and what each of them has.
    pub(crate) ranking: KVec<RankedProvider<Arc<FreeHint>>>,
    /// How many clients there are.
    pub(crate) clients: usize,
}

impl SnapshotParts {
    fn new(providers: &[Arc<Provider>], paths: KVec<Path>, clients: usize) -> Result<Arc<Self>> {
        let mut known = KVec::with_capacity(providers.len(), GFP_KERNEL_ACCOUNT)?;
        for provider in providers {
            known.push(
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
            known,
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

    /// The paths from one provider, by its place in the list.
    pub(crate) fn paths_of(&self, provider: usize) -> &[Path] {
        let from = provider * self.clients;
        self.paths.get(from..from + self.clients).unwrap_or_default()
    }

    /// A provider, by its place in the list, as a candidate with this capacity, on which rules have this effect. None: the provider
    /// is being removed.
    pub(crate) fn candidate(&self, provider: usize, capacity: Option<Capacity>, effect: RuleEffect) -> Candidate<'_> {
        let known = &self.known[provider];
        let Capacity { free, largest } = capacity.unwrap_or(Capacity::EMPTY);
        Candidate {
            id: known.id,
            live: capacity.is_some(),
            start: known.start,
            size: known.size,
            free,
            largest,
            paths: self.paths_of(provider),
            effect,
        }
    }
}

/// Adds a provider to a ranking, after those of the same order.
fn add_ranked(ranking: &mut KVec<RankedProvider<Arc<FreeHint>>>, ranked: RankedProvider<Arc<FreeHint>>) -> Result {
    let order = ranked.order();
    ranking.push(ranked, GFP_KERNEL_ACCOUNT)?;
    // Core's own sort has a way out that objtool takes for a flaw.
    for at in (1..ranking.len()).rev() {
        if ranking[at - 1].order() <= order {
            break;
        }
        ranking.swap(at - 1, at);
    }
    Ok(())
}

/// What the administrator's rules say of the providers of a snapshot, where none of them counts bytes.
pub(crate) struct RankedByRules {
    pub(crate) standing: ApplicableRules,
    /// Of each provider, in the order of their numbers.
    pub(crate) effects: KVec<RuleEffect>,
    /// As [`SnapshotParts::ranking`], those first that rules want.
    pub(crate) ranking: KVec<RankedProvider<Arc<FreeHint>>>,
}

impl RankedByRules {
    fn new(snapshot: &TopologySnapshot, standing: ApplicableRules) -> Result<Arc<Self>> {
        let mut effects = KVec::with_capacity(snapshot.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for (index, provider) in snapshot.providers.iter().enumerate() {
            let paths = snapshot.parts.paths_of(index);
            effects.push(
                standing.effect(&provider.function_id(), &snapshot.parties, paths),
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
            standing,
            effects,
            ranking,
        };
        Ok(Arc::new(ruled, GFP_KERNEL_ACCOUNT)?)
    }
}

/// The providers there are, and how far each is from each of the clients.
#[pin_data]
pub(crate) struct TopologySnapshot {
    generation: u64,
    /// The clients as they were named, see `uapi::request::ClientNames`.
    names: KVec<u64>,
    pub(crate) clients: KVec<Function>,
    /// What rules can tell the clients by.
    parties: KVec<FunctionId>,
    /// In the order of their numbers. One that has begun to leave since is among them.
    pub(crate) providers: KVec<Arc<Provider>>,
    pub(crate) parts: Arc<SnapshotParts>,
    /// What rules said of it lately, the latest first.
    #[pin]
    ruled: Mutex<KVec<Arc<RankedByRules>>>,
}

impl TopologySnapshot {
    /// How many of [`Self::ruled`] are remembered: users to whom different rules apply.
    const MOST_RULED: usize = 4;

    /// As things are at `generation`.
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

    /// What these rules say of the providers, from memory or else by asking them.
    pub(crate) fn ruled(&self, standing: &ApplicableRules) -> Result<Arc<RankedByRules>> {
        let known = |ruled: &&Arc<RankedByRules>| ruled.standing.is_same(standing);
        let found = self.ruled.lock().iter().find(known).cloned();
        if let Some(ruled) = found {
            return Ok(ruled);
        }
        let new = RankedByRules::new(self, standing.clone())?;
        let mut remembered = KVec::with_capacity(Self::MOST_RULED, GFP_KERNEL_ACCOUNT)?;
        remembered.push(new.clone(), GFP_KERNEL_ACCOUNT)?;
        let mut ruled = self.ruled.lock();
        // Somebody else may have been as fast, and rules that are in force no more are of no use.
        let useful = |old: &&Arc<RankedByRules>| old.standing.has_rules_of(standing) && !old.standing.is_same(standing);
        for other in ruled.iter().filter(useful).take(Self::MOST_RULED - 1) {
            remembered.push(other.clone(), GFP_KERNEL_ACCOUNT)?;
        }
        let old = core::mem::replace(&mut *ruled, remembered);
        drop(ruled);
        drop(old);
        Ok(new)
    }

    /// The providers as candidates for a buffer of that size and alignment.
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

/// The snapshots that were asked for last.
pub(crate) struct SnapshotCache {
    snapshots: KVec<Arc<TopologySnapshot>>,
    /// The one that goes next.
    oldest: usize,
}

impl SnapshotCache {
    /// Lists of clients that are remembered.
    const MOST: usize = 32;

    pub(crate) const fn new() -> Self {
        Self {
            snapshots: KVec::new(),
            oldest: 0,
        }
    }

    /// The snapshot of these clients, if it was made at `generation`.
    fn get(&self, generation: u64, names: &[u64]) -> Option<Arc<TopologySnapshot>> {
        // Word by word: a call of memcmp() would compare bytes.
        let same = |snapshot: &TopologySnapshot| snapshot.names.len() == names.len() && snapshot.names.iter().eq(names);
        let fits = |snapshot: &&Arc<TopologySnapshot>| snapshot.generation == generation && same(snapshot);
        self.snapshots.iter().find(fits).cloned()
    }

    /// Remembers a snapshot in the place of the oldest, or of one of the same clients, which is returned.
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

/// The snapshot of these clients, from memory or else made by `make`. `generation` says what it is now.
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
    // SnapshotCache are forgotten after the generation changed: one from before must not come after that.
    let old = if generation() == now {
        locked.put(made.clone())?
    } else {
        None
    };
    drop(locked);
    drop(old);
    Ok(made)
}

/// Forgets all snapshots.
pub(crate) fn forget(snapshots: &Mutex<SnapshotCache>) {
    let old = core::mem::replace(&mut *snapshots.lock(), SnapshotCache::new());
    drop(old);
}

#[kunit_tests(p2pmem_views)]
mod tests {
    use super::*;

    fn names(bus: u8) -> [u64; 1] {
        [bus.into()]
    }

    fn empty(generation: u64, bus: u8) -> Result<Arc<TopologySnapshot>> {
        TopologySnapshot::new(generation, &names(bus), KVec::new(), KVec::new(), KVec::new())
    }

    #[test]
    fn views_are_those_of_their_clients_and_their_time() -> Result {
        let mut snapshots = SnapshotCache::new();
        assert!(snapshots.put(empty(1, 5)?)?.is_none());
        assert!(snapshots.put(empty(1, 6)?)?.is_none());
        assert!(snapshots
            .get(1, &names(5))
            .is_some_and(|snapshot| *snapshot.names == names(5)));
        assert!(snapshots.get(2, &names(5)).is_none());
        assert!(snapshots.get(1, &names(7)).is_none() && snapshots.get(1, &[]).is_none());
        // A newer one of the same clients takes the place of the older.
        assert!(snapshots.put(empty(2, 5)?)?.is_some_and(|old| old.generation == 1));
        assert!(snapshots.get(1, &names(5)).is_none() && snapshots.get(2, &names(5)).is_some());
        assert_eq!(snapshots.snapshots.len(), 2);
        Ok(())
    }

    #[test]
    fn the_oldest_goes_first() -> Result {
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
