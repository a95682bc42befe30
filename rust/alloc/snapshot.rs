// SPDX-License-Identifier: GPL-2.0

//! What a decision starts from: the machine as a list of clients sees it.
//!
//! A program asks for the same clients again and again. Finding their functions, the providers, and the path from each
//! provider to each client takes far longer than choosing, and nothing of it changes until something on the bus does. What
//! rules that count no bytes say of the providers is kept with it, for as long as those rules are in force.

use crate::{
    alloc::rules::{
        Judge,
        Standing, //
    },
    ext::{
        free_hint::Gauge,
        pci::Function,
        refusal::Answer, //
    },
    mem::{
        buffer::Provider,
        provider::Room, //
    },
    policy::{
        path::{
            Path,
            PciAddr, //
        },
        placement::{
            self,
            Candidate,
            Distance,
            Turn, //
        },
        rule::{
            Party,
            Ruling,
            Stance, //
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
pub(crate) struct Known {
    pub(crate) id: u32,
    pub(crate) addr: PciAddr,
    /// First published byte in the BAR.
    pub(crate) start: u64,
    /// Bytes that can be handed out in all.
    pub(crate) size: u64,
}

/// What is known of a view for as long as anyone asks, when its providers and clients may be gone.
pub(crate) struct Facts {
    /// The providers, in the order of their numbers.
    pub(crate) known: KVec<Known>,
    /// From each provider to each client, all clients of the first provider first.
    pub(crate) paths: KVec<Path>,
    /// The providers, the nearest first, and what each of them has.
    pub(crate) turns: KVec<Turn<Arc<Gauge>>>,
    /// How many clients there are.
    pub(crate) clients: usize,
}

impl Facts {
    fn new(providers: &[Arc<Provider>], paths: KVec<Path>, clients: usize) -> Result<Arc<Self>> {
        let mut known = KVec::with_capacity(providers.len(), GFP_KERNEL_ACCOUNT)?;
        for provider in providers {
            known.push(
                Known {
                    id: provider.id,
                    addr: provider.addr,
                    start: provider.start,
                    size: provider.size,
                },
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        let turns = KVec::with_capacity(providers.len(), GFP_KERNEL_ACCOUNT)?;
        let mut facts = Self {
            known,
            paths,
            turns,
            clients,
        };
        for (index, provider) in providers.iter().enumerate() {
            let distance = Distance::of(clients, facts.paths_of(index));
            let turn = Turn {
                index,
                size: provider.size,
                stance: distance.is_reachable().then_some(Stance::Neutral),
                distance,
                as_far: 0,
                gauge: provider.gauge(),
            };
            add_turn(&mut facts.turns, turn)?;
        }
        placement::group(&mut facts.turns);
        Ok(Arc::new(facts, GFP_KERNEL_ACCOUNT)?)
    }

    /// The paths from one provider, by its place in the list.
    pub(crate) fn paths_of(&self, provider: usize) -> &[Path] {
        let from = provider * self.clients;
        self.paths.get(from..from + self.clients).unwrap_or_default()
    }

    /// A provider, by its place in the list, as a candidate that has this room and of which rules say that.
    pub(crate) fn candidate(&self, provider: usize, room: Room, ruling: Ruling) -> Candidate<'_> {
        let known = &self.known[provider];
        Candidate {
            id: known.id,
            live: room.live,
            start: known.start,
            size: known.size,
            free: room.free,
            largest: room.largest,
            paths: self.paths_of(provider),
            ruling,
        }
    }
}

/// Adds a turn in its place, after those of the same order.
fn add_turn(turns: &mut KVec<Turn<Arc<Gauge>>>, turn: Turn<Arc<Gauge>>) -> Result {
    let order = turn.order();
    turns.push(turn, GFP_KERNEL_ACCOUNT)?;
    // Core's own sort has a way out that objtool takes for a flaw.
    for at in (1..turns.len()).rev() {
        if turns[at - 1].order() <= order {
            break;
        }
        turns.swap(at - 1, at);
    }
    Ok(())
}

/// What the administrator's rules say of the providers of a view, where none of them counts bytes.
pub(crate) struct Ruled {
    pub(crate) standing: Standing,
    /// Of each provider, in the order of their numbers.
    pub(crate) rulings: KVec<Ruling>,
    /// As [`Facts::turns`], those first that rules want.
    pub(crate) turns: KVec<Turn<Arc<Gauge>>>,
}

impl Ruled {
    fn new(view: &View, standing: Standing) -> Result<Arc<Self>> {
        let mut rulings = KVec::with_capacity(view.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for (index, provider) in view.providers.iter().enumerate() {
            let paths = view.facts.paths_of(index);
            rulings.push(
                standing.ruling(&provider.party(), &view.parties, paths),
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        let mut turns = KVec::with_capacity(rulings.len(), GFP_KERNEL_ACCOUNT)?;
        for turn in &view.facts.turns {
            let ruling = &rulings[turn.index];
            let allowed = ruling.denied.is_none() && ruling.too_far.is_none();
            let stance = turn.stance.filter(|_| allowed).map(|_| ruling.stance);
            add_turn(&mut turns, Turn { stance, ..turn.clone() })?;
        }
        placement::group(&mut turns);
        let ruled = Self {
            standing,
            rulings,
            turns,
        };
        Ok(Arc::new(ruled, GFP_KERNEL_ACCOUNT)?)
    }
}

/// The providers there are, and how far each is from each of the clients.
#[pin_data]
pub(crate) struct View {
    generation: u64,
    /// The clients as they were named, see [`Names`](crate::uapi::request::Names).
    names: KVec<u64>,
    pub(crate) clients: KVec<Function>,
    /// What rules can tell the clients by.
    parties: KVec<Party>,
    /// In the order of their numbers. One that has begun to leave since is among them.
    pub(crate) providers: KVec<Arc<Provider>>,
    pub(crate) facts: Arc<Facts>,
    /// What rules said of it lately, the latest first.
    #[pin]
    ruled: Mutex<KVec<Arc<Ruled>>>,
}

impl View {
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
            parties.push(client.party(), GFP_KERNEL_ACCOUNT)?;
        }
        let facts = Facts::new(&providers, paths, clients.len())?;
        Arc::pin_init(
            pin_init!(Self {
                generation,
                names,
                clients,
                parties,
                providers,
                facts,
                ruled <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// What these rules say of the providers, from memory or else by asking them.
    pub(crate) fn ruled(&self, standing: &Standing) -> Result<Arc<Ruled>> {
        let known = |ruled: &&Arc<Ruled>| ruled.standing.is_same(standing);
        let found = self.ruled.lock().iter().find(known).cloned();
        if let Some(ruled) = found {
            return Ok(ruled);
        }
        let new = Ruled::new(self, standing.clone())?;
        let mut remembered = KVec::with_capacity(Self::MOST_RULED, GFP_KERNEL_ACCOUNT)?;
        remembered.push(new.clone(), GFP_KERNEL_ACCOUNT)?;
        let mut ruled = self.ruled.lock();
        // Somebody else may have been as fast, and rules that are in force no more are of no use.
        let useful = |old: &&Arc<Ruled>| old.standing.has_book_of(standing) && !old.standing.is_same(standing);
        for other in ruled.iter().filter(useful).take(Self::MOST_RULED - 1) {
            remembered.push(other.clone(), GFP_KERNEL_ACCOUNT)?;
        }
        let old = core::mem::replace(&mut *ruled, remembered);
        drop(ruled);
        drop(old);
        Ok(new)
    }

    /// The providers as candidates for a buffer of that size and alignment.
    pub(crate) fn candidates(&self, judge: &Judge<'_>, size: u64, align: u64) -> Result<KVec<Candidate<'_>>> {
        let mut candidates = KVec::with_capacity(self.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for (i, provider) in self.providers.iter().enumerate() {
            let room = provider.room(size, align);
            let ruling = judge.ruling(provider, &self.parties, self.facts.paths_of(i), size);
            candidates.push(self.facts.candidate(i, room, ruling), GFP_KERNEL_ACCOUNT)?;
        }
        Ok(candidates)
    }
}

/// The views that were asked for last.
pub(crate) struct Views {
    views: KVec<Arc<View>>,
    /// The one that goes next.
    oldest: usize,
}

impl Views {
    /// Lists of clients that are remembered.
    const MOST: usize = 32;

    pub(crate) const fn new() -> Self {
        Self {
            views: KVec::new(),
            oldest: 0,
        }
    }

    /// The view of these clients, if it was made at `generation`.
    fn get(&self, generation: u64, names: &[u64]) -> Option<Arc<View>> {
        // Word by word: a call of memcmp() would compare bytes.
        let same = |view: &View| view.names.len() == names.len() && view.names.iter().eq(names);
        let fits = |view: &&Arc<View>| view.generation == generation && same(view);
        self.views.iter().find(fits).cloned()
    }

    /// Remembers a view in the place of the oldest, or of one of the same clients, which is returned.
    fn put(&mut self, view: Arc<View>) -> Result<Option<Arc<View>>> {
        let same = self.views.iter().position(|old| *old.names == *view.names);
        if same.is_none() && self.views.len() < Self::MOST {
            self.views.push(view, GFP_KERNEL)?;
            return Ok(None);
        }
        let at = same.unwrap_or(self.oldest);
        if same.is_none() {
            self.oldest = (self.oldest + 1) % Self::MOST;
        }
        Ok(self.views.get_mut(at).map(|old| core::mem::replace(old, view)))
    }
}

/// The view of these clients, from memory or else made by `make`. `generation` says what it is now.
pub(crate) fn view(
    views: &Mutex<Views>,
    names: &[u64],
    generation: impl Fn() -> u64,
    make: impl FnOnce(u64) -> Answer<Arc<View>>,
) -> Answer<Arc<View>> {
    let now = generation();
    let known = views.lock().get(now, names);
    if let Some(view) = known {
        return Ok(view);
    }
    let made = make(now)?;
    let mut locked = views.lock();
    // Views are forgotten after the generation changed: one from before must not come after that.
    let old = if generation() == now {
        locked.put(made.clone())?
    } else {
        None
    };
    drop(locked);
    drop(old);
    Ok(made)
}

/// Forgets all views.
pub(crate) fn forget(views: &Mutex<Views>) {
    let old = core::mem::replace(&mut *views.lock(), Views::new());
    drop(old);
}

#[kunit_tests(p2pmem_views)]
mod tests {
    use super::*;

    fn names(bus: u8) -> [u64; 1] {
        [bus.into()]
    }

    fn empty(generation: u64, bus: u8) -> Result<Arc<View>> {
        View::new(generation, &names(bus), KVec::new(), KVec::new(), KVec::new())
    }

    #[test]
    fn views_are_those_of_their_clients_and_their_time() -> Result {
        let mut views = Views::new();
        assert!(views.put(empty(1, 5)?)?.is_none());
        assert!(views.put(empty(1, 6)?)?.is_none());
        assert!(views.get(1, &names(5)).is_some_and(|view| *view.names == names(5)));
        assert!(views.get(2, &names(5)).is_none());
        assert!(views.get(1, &names(7)).is_none() && views.get(1, &[]).is_none());
        // A newer one of the same clients takes the place of the older.
        assert!(views.put(empty(2, 5)?)?.is_some_and(|old| old.generation == 1));
        assert!(views.get(1, &names(5)).is_none() && views.get(2, &names(5)).is_some());
        assert_eq!(views.views.len(), 2);
        Ok(())
    }

    #[test]
    fn the_oldest_goes_first() -> Result {
        let mut views = Views::new();
        for bus in 0..Views::MOST as u8 {
            assert!(views.put(empty(1, bus)?)?.is_none());
        }
        for bus in 0..4 {
            let gone = views.put(empty(1, 100 + bus)?)?;
            assert!(gone.is_some_and(|old| *old.names == names(bus)));
        }
        assert_eq!(views.views.len(), Views::MOST);
        assert!(views.get(1, &names(3)).is_none() && views.get(1, &names(4)).is_some());
        Ok(())
    }
}
