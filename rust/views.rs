// SPDX-License-Identifier: GPL-2.0

//! What a decision starts from: the machine as a list of clients sees it.
//!
//! A program asks for the same clients again and again. Finding their functions, the providers, and the path from each
//! provider to each client takes far longer than choosing, and nothing of it changes until something on the bus does.

use crate::{
    ext::{gauge::Gauge, pci::Function},
    path::{Path, PciAddr},
    placement::{self, Candidate, Distance, Turn},
    policy::{Party, Ruling},
    provider::{Provider, Room},
    refusal::Answer,
    rules::Judge,
};
use kernel::{
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
        let mut known = KVec::with_capacity(providers.len(), GFP_KERNEL)?;
        for provider in providers {
            known.push(
                Known {
                    id: provider.id,
                    addr: provider.addr,
                    start: provider.start,
                    size: provider.size,
                },
                GFP_KERNEL,
            )?;
        }
        let turns = KVec::with_capacity(providers.len(), GFP_KERNEL)?;
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
                distance,
                as_far: 0,
                gauge: provider.gauge(),
            };
            facts.turns.push(turn, GFP_KERNEL)?;
            // To its place among those before; core's own sort has a way out that objtool takes for a flaw.
            for at in (1..=index).rev() {
                if facts.turns[at - 1].distance <= distance {
                    break;
                }
                facts.turns.swap(at - 1, at);
            }
        }
        placement::group(&mut facts.turns);
        Ok(Arc::new(facts, GFP_KERNEL)?)
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

/// The providers there are, and how far each is from each of the clients.
pub(crate) struct View {
    generation: u64,
    /// The clients as they were named, see [`Names`](crate::request::Names).
    names: KVec<u64>,
    pub(crate) clients: KVec<Function>,
    /// What rules can tell the clients by.
    parties: KVec<Party>,
    /// In the order of their numbers. One that has begun to leave since is among them.
    pub(crate) providers: KVec<Arc<Provider>>,
    pub(crate) facts: Arc<Facts>,
}

impl View {
    /// As things are at `generation`.
    pub(crate) fn new(
        generation: u64,
        named: &[u64],
        clients: KVec<Function>,
        providers: KVec<Arc<Provider>>,
        paths: KVec<Path>,
    ) -> Result<Arc<Self>> {
        let mut names = KVec::with_capacity(named.len(), GFP_KERNEL)?;
        names.extend_from_slice(named, GFP_KERNEL)?;
        let mut parties = KVec::with_capacity(clients.len(), GFP_KERNEL)?;
        for client in &clients {
            parties.push(client.party(), GFP_KERNEL)?;
        }
        let facts = Facts::new(&providers, paths, clients.len())?;
        let view = Self {
            generation,
            names,
            clients,
            parties,
            providers,
            facts,
        };
        Ok(Arc::new(view, GFP_KERNEL)?)
    }

    /// The providers as candidates for a buffer of that size and alignment.
    pub(crate) fn candidates(&self, judge: &Judge<'_>, size: u64, align: u64) -> Result<KVec<Candidate<'_>>> {
        let mut candidates = KVec::with_capacity(self.providers.len(), GFP_KERNEL)?;
        for (i, provider) in self.providers.iter().enumerate() {
            let room = provider.room(size, align);
            let ruling = judge.ruling(provider, &self.parties, self.facts.paths_of(i), size);
            candidates.push(self.facts.candidate(i, room, ruling), GFP_KERNEL)?;
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
        let mut named = KVec::new();
        named.extend_from_slice(&names(bus), GFP_KERNEL)?;
        let view = View {
            generation,
            names: named,
            clients: KVec::new(),
            parties: KVec::new(),
            providers: KVec::new(),
            facts: Facts::new(&[], KVec::new(), 0)?,
        };
        Ok(Arc::new(view, GFP_KERNEL)?)
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
