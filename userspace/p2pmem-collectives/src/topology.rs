// SPDX-License-Identifier: MIT OR Apache-2.0

//! Which NIC and which memory a rank uses, and the order of the ring, from the places of NICs and memories in the PCI trees of
//! the machines. All ranks decide this from the same [`Site`]s, so they agree without further messages.
//!
//! The ranks of one machine share its devices: each takes memory that fewer ranks use, and among these the memory that is
//! nearest to a NIC ([`seats`]). A step of a ring goes from the memory of one rank through its NIC to the NIC and the memory of
//! the next rank. So the ring visits machines one after another, on a machine the NICs below one bridge, and of a NIC the memories
//! below one bridge ([`ring`]): a closed tour of a tree that visits its branches one after another crosses each edge twice, which is
//! the least. A step between two ranks of one NIC does not use the link of the NIC at all.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use p2pmem::PathClass;
use serde::{Deserialize, Serialize};

use crate::schedule::Ring;

/// A bridge above a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bridge {
    /// The PCI address; for the root bus, its name.
    pub name: String,
    /// What it is.
    pub kind: BridgeKind,
}

/// The kind of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BridgeKind {
    /// The root bus of a host bridge.
    Root,
    /// A root port.
    RootPort,
    /// A switch: its upstream port.
    Switch,
    /// A downstream port of a switch.
    Port,
    /// Another bridge.
    Other,
}

impl fmt::Display for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            BridgeKind::Root => "root bus",
            BridgeKind::RootPort => "root port",
            BridgeKind::Switch => "switch",
            BridgeKind::Port => "port",
            BridgeKind::Other => "bridge",
        };
        write!(f, "{kind} {}", self.name)
    }
}

/// A NIC or the memory of a device, and its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// The name of the NIC, or the PCI address of the memory's provider. Unique on the machine.
    pub name: String,
    /// The root bus and the bridges above the function, from the root. Empty if it is not a PCI function.
    pub above: Vec<Bridge>,
}

/// The path between a NIC and a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Distance {
    /// The class, as an index of [`PathClass::ALL`]: a smaller one is nearer.
    pub class: u8,
    /// Links on the path.
    pub hops: u32,
}

impl Distance {
    /// The distance if the NIC cannot reach the memory.
    pub const UNREACHABLE: Self = Self {
        class: PathClass::ALL.len() as u8 - 1,
        hops: u32::MAX,
    };

    /// Makes a distance of a path.
    pub fn new(class: PathClass, hops: u32) -> Self {
        let index = PathClass::ALL.iter().position(|other| *other == class);
        index.map_or(Self::UNREACHABLE, |index| Self {
            class: index as u8,
            hops,
        })
    }

    /// Returns the class of the path.
    pub fn class(&self) -> PathClass {
        let class = PathClass::ALL.get(usize::from(self.class));
        class.copied().unwrap_or(PathClass::Unreachable)
    }
}

/// Memory that a rank can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySite {
    /// The memory.
    pub function: Function,
    /// Bytes of its largest free piece.
    pub free: u64,
    /// Its distance to each NIC of the site.
    pub distances: Vec<Distance>,
}

/// What a rank can use, and what it was started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// Identifies the machine until it boots again.
    pub machine: String,
    /// The name of the machine.
    pub node: String,
    /// The NICs.
    pub nics: Vec<Function>,
    /// The memories of devices; empty if the payload is in host memory.
    pub memories: Vec<MemorySite>,
    /// Bytes of memory that the rank needs.
    pub bytes: u64,
    /// The ring that the user wants; empty if the topology decides.
    pub ring: Vec<usize>,
}

/// What a rank uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seat {
    /// The machine, as in [`Site::machine`].
    pub machine: String,
    /// The name of the machine.
    pub node: String,
    /// The NIC.
    pub nic: Function,
    /// The memory; `None` for host memory.
    pub memory: Option<Function>,
    /// The distance of memory and NIC.
    pub distance: Option<Distance>,
}

/// Returns what each rank uses.
///
/// # Errors
///
/// A rank has no NIC. The message names the rank.
pub fn seats(sites: &[Site]) -> Result<Vec<Seat>, String> {
    // Who has fewer choices chooses first.
    let choices = |rank: usize| sites[rank].nics.len() * sites[rank].memories.len().max(1);
    let mut ranks: Vec<usize> = (0..sites.len()).collect();
    ranks.sort_by_key(|rank| (choices(*rank), *rank));
    let mut users = BTreeMap::<(String, String), u64>::new();
    let mut seats: Vec<Option<Seat>> = vec![None; sites.len()];
    for rank in ranks {
        let site = &sites[rank];
        let of = |name: &str| (site.machine.clone(), name.to_owned());
        let seat = choose(site, |name| users.get(&of(name)).copied().unwrap_or(0));
        let seat = seat.ok_or_else(|| format!("rank {rank} ({}) has no NIC", site.node))?;
        for used in [Some(&seat.nic), seat.memory.as_ref()].into_iter().flatten() {
            *users.entry(of(&used.name)).or_default() += 1;
        }
        seats[rank] = Some(seat);
    }
    Ok(seats.into_iter().flatten().collect())
}

/// Returns what a rank uses if `users` ranks use a device already; `None` without a NIC.
fn choose(site: &Site, users: impl Fn(&str) -> u64) -> Option<Seat> {
    let seat = |nic: &Function, memory: Option<&Function>, distance| Seat {
        machine: site.machine.clone(),
        node: site.node.clone(),
        nic: nic.clone(),
        memory: memory.cloned(),
        distance,
    };
    // Of equal choices, the first one counts.
    if site.memories.is_empty() {
        let nic = site.nics.iter().min_by_key(|nic| users(&nic.name))?;
        return Some(seat(nic, None, None));
    }
    let pairs = site.memories.iter().flat_map(|memory| {
        let nics = site.nics.iter().zip(&memory.distances);
        nics.map(move |(nic, distance)| (memory, nic, *distance))
    });
    let (memory, nic, distance) = pairs.min_by_key(|(memory, nic, distance)| {
        let used = users(&memory.function.name);
        let needed = site.bytes.checked_mul(used + 1);
        let fits = needed.is_some_and(|bytes| bytes <= memory.free);
        (Reverse(fits), used, distance.class, users(&nic.name), distance.hops)
    })?;
    Some(seat(nic, Some(&memory.function), Some(distance)))
}

/// Returns what contains a seat, from the outside: the machine, the bridges above the NIC, the NIC, the bridges above the memory,
/// the memory. Seats are near to each other if their paths have a long common beginning.
fn path(seat: &Seat) -> Vec<&str> {
    let functions = std::iter::once(&seat.nic).chain(&seat.memory);
    let inside = functions.flat_map(|function| {
        let above = function.above.iter().map(|bridge| bridge.name.as_str());
        above.chain([function.name.as_str()])
    });
    std::iter::once(seat.machine.as_str()).chain(inside).collect()
}

/// Returns the ring in which neighbours are nearest. It begins with rank 0, and of equally near ranks, the one with the lower number
/// comes first.
pub fn ring(seats: &[Seat]) -> Ring {
    let paths: Vec<Vec<&str>> = seats.iter().map(path).collect();
    // For each device that contains a rank, from the outside, the first rank in the same device. Ranks that share a device have the
    // same numbers up to this device, so they follow each other in the order of these numbers.
    let key = |rank: &usize| -> Vec<usize> {
        let own = &paths[*rank];
        let first = |len: usize| {
            paths
                .iter()
                .position(|path| path.starts_with(&own[..len]))
                .unwrap_or(*rank)
        };
        (1..=own.len()).map(first).chain([*rank]).collect()
    };
    let mut order: Vec<usize> = (0..seats.len()).collect();
    order.sort_by_cached_key(key);
    Ring::new(order).unwrap_or_else(|| Ring::by_rank(seats.len()))
}

/// Returns the ring of a job: that of the user, or that of [`ring`].
///
/// # Errors
///
/// The ranks were started with different rings, or the user's one does not have each rank once. The message says what to do.
pub fn agreed_ring(sites: &[Site], seats: &[Seat]) -> Result<Ring, String> {
    let wanted = sites.first().map(|site| site.ring.as_slice()).unwrap_or_default();
    if let Some(other) = sites.iter().position(|site| site.ring != wanted) {
        return Err(format!(
            "rank 0 has --ring {wanted:?}, and rank {other} has {:?}: start all ranks with the same options",
            sites[other].ring
        ));
    }
    if wanted.is_empty() {
        return Ok(ring(seats));
    }
    let ring = Ring::new(wanted.to_vec()).filter(|ring| ring.ranks() == sites.len());
    ring.ok_or_else(|| format!("--ring does not have each of the {} ranks once", sites.len()))
}

/// What the NICs of two neighbours in a ring share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shared {
    /// Both ranks use one NIC: the payload does not use its link.
    Nic,
    /// A bridge, such as a switch.
    Bridge,
    /// The machine only.
    Machine,
    /// Nothing: the ranks are on different machines.
    Nothing,
}

/// A step of a ring: two neighbours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The rank that sends.
    pub from: usize,
    /// The rank that receives.
    pub to: usize,
    /// What their NICs share.
    pub shared: Shared,
    /// The NIC, the lowest bridge above both NICs, or the machine that they share; both machines if they share nothing.
    pub name: String,
}

impl Step {
    fn new(seats: &[Seat], from: usize, to: usize) -> Self {
        let (a, b) = (&seats[from], &seats[to]);
        let above = |seat: &Seat| seat.nic.above.clone();
        let both = above(a).into_iter().zip(above(b)).take_while(|(a, b)| a == b).last();
        let lowest = both
            .map(|(bridge, _)| bridge)
            .filter(|bridge| bridge.kind != BridgeKind::Root);
        let (shared, name) = if a.machine != b.machine {
            (Shared::Nothing, format!("{} and {}", a.node, b.node))
        } else if a.nic.name == b.nic.name {
            (Shared::Nic, a.nic.name.clone())
        } else if let Some(bridge) = lowest {
            (Shared::Bridge, bridge.to_string())
        } else {
            (Shared::Machine, a.node.clone())
        };
        Self { from, to, shared, name }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, name, .. } = self;
        match self.shared {
            Shared::Nic => write!(f, "{from} and {to} share the NIC {name}"),
            Shared::Bridge => write!(f, "the NICs of {from} and {to} share the {name}"),
            Shared::Machine => write!(f, "the NICs of {from} and {to} share no bridge of {name}"),
            Shared::Nothing => write!(f, "{from} and {to} are on {name}"),
        }
    }
}

/// Returns the steps of a ring. The two ranks of the shortest ring have one.
pub fn steps(ring: &Ring, seats: &[Seat]) -> Vec<Step> {
    let count = match ring.ranks() {
        0 | 1 => 0,
        2 => 1,
        ranks => ranks,
    };
    let from = ring.order().iter().take(count);
    from.map(|from| Step::new(seats, *from, ring.after(*from, 1))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bridge(kind: BridgeKind, name: &str) -> Bridge {
        Bridge {
            name: name.into(),
            kind,
        }
    }

    fn below(switch: &str, name: &str) -> Function {
        Function {
            name: name.into(),
            above: vec![
                bridge(BridgeKind::Root, "pci0000:00"),
                bridge(BridgeKind::RootPort, &format!("root port of {switch}")),
                bridge(BridgeKind::Switch, switch),
                bridge(BridgeKind::Port, &format!("port of {name}")),
            ],
        }
    }

    /// Below each of two switches a NIC and two accelerators.
    fn site(machine: &str) -> Site {
        let near = Distance::new(PathClass::SameSwitch, 4);
        let far = Distance::new(PathClass::HostBridge, 8);
        let memory = |switch, name, distances: [Distance; 2]| MemorySite {
            function: below(switch, name),
            free: 100,
            distances: distances.to_vec(),
        };
        Site {
            machine: machine.into(),
            node: machine.into(),
            nics: vec![below("sw0", "nic0"), below("sw1", "nic1")],
            memories: vec![
                memory("sw0", "accel0", [near, far]),
                memory("sw0", "accel1", [near, far]),
                memory("sw1", "accel2", [far, near]),
                memory("sw1", "accel3", [far, near]),
            ],
            bytes: 10,
            ring: Vec::new(),
        }
    }

    /// Returns NIC and memory of each rank.
    fn used(sites: &[Site]) -> Vec<(String, String)> {
        let memory = |seat: &Seat| seat.memory.as_ref().map_or("host".into(), |memory| memory.name.clone());
        let names = |seat: Seat| (seat.nic.name.clone(), memory(&seat));
        seats(sites).unwrap().into_iter().map(names).collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(nic, memory): &(&str, &str)| (nic.to_string(), memory.to_string());
        expected.iter().map(owned).collect()
    }

    #[test]
    fn ranks_spread_over_nics_and_the_ring_visits_them_one_after_another() {
        let sites = vec![site("a"); 4];
        let expected = [
            ("nic0", "accel0"),
            ("nic1", "accel2"),
            ("nic0", "accel1"),
            ("nic1", "accel3"),
        ];
        assert_eq!(used(&sites), pairs(&expected));
        let seats = seats(&sites).unwrap();
        let ring = agreed_ring(&sites, &seats).unwrap();
        assert_eq!(ring.order(), [0, 2, 1, 3]);
        let said: Vec<String> = steps(&ring, &seats).iter().map(Step::to_string).collect();
        let expected = [
            "0 and 2 share the NIC nic0",
            "the NICs of 2 and 1 share no bridge of a",
            "1 and 3 share the NIC nic1",
            "the NICs of 3 and 0 share no bridge of a",
        ];
        assert_eq!(said, expected);
        assert!(seats
            .iter()
            .all(|seat| seat.distance.unwrap().class() == PathClass::SameSwitch));
    }

    #[test]
    fn machines_are_visited_one_after_another() {
        // As `mpirun --map-by node` numbers ranks.
        let sites: Vec<Site> = ["a", "b", "a", "b"].map(site).to_vec();
        let seats = seats(&sites).unwrap();
        let ring = ring(&seats);
        assert_eq!(ring.order(), [0, 2, 1, 3]);
        let shared: Vec<Shared> = steps(&ring, &seats).iter().map(|step| step.shared).collect();
        assert_eq!(
            shared,
            [Shared::Machine, Shared::Nothing, Shared::Machine, Shared::Nothing]
        );
        assert_eq!(steps(&ring, &seats)[1].to_string(), "2 and 1 are on a and b");
    }

    #[test]
    fn nics_below_one_switch_are_neighbours() {
        let mut site = site("a");
        site.memories.clear();
        site.nics = vec![
            below("sw0", "nic0"),
            below("sw1", "nic1"),
            below("sw0", "nic2"),
            below("sw1", "nic3"),
        ];
        let sites = vec![site; 4];
        assert_eq!(used(&sites)[3], ("nic3".into(), "host".into()));
        let seats = seats(&sites).unwrap();
        let ring = ring(&seats);
        assert_eq!(ring.order(), [0, 2, 1, 3]);
        let step = steps(&ring, &seats).remove(0);
        assert_eq!(
            (step.shared, step.to_string()),
            (Shared::Bridge, "the NICs of 0 and 2 share the switch sw0".into())
        );
    }

    #[test]
    fn who_has_fewer_choices_chooses_first() {
        let mut sites = vec![site("a"); 2];
        sites[1].memories.retain(|memory| memory.function.name == "accel0");
        assert_eq!(used(&sites), pairs(&[("nic1", "accel2"), ("nic0", "accel0")]));
        // A named NIC is used even if another one is nearer.
        sites[1].nics.remove(0);
        sites[1].memories[0].distances.remove(0);
        assert_eq!(used(&sites)[1], ("nic1".into(), "accel0".into()));
    }

    #[test]
    fn full_and_unreachable_memory_comes_last() {
        let mut sites = vec![site("a")];
        sites[0].memories[0].free = 9;
        sites[0].memories[1].distances = vec![Distance::UNREACHABLE; 2];
        assert_eq!(used(&sites), pairs(&[("nic1", "accel2")]));
        // Without a choice it is used, and the allocation reports the reason.
        sites[0].memories.truncate(1);
        assert_eq!(used(&sites), pairs(&[("nic0", "accel0")]));
        // Two payloads do not fit, so one rank takes memory that is far from the only NIC.
        let mut sites = vec![site("a"); 2];
        for site in &mut sites {
            site.nics.truncate(1);
            site.memories.remove(1);
            site.memories.iter_mut().for_each(|memory| memory.free = 19);
        }
        assert_eq!(used(&sites), pairs(&[("nic0", "accel0"), ("nic0", "accel2")]));
    }

    #[test]
    fn wrong_rings_say_what_to_do() {
        let mut sites = vec![site("a"); 3];
        let seats = seats(&sites).unwrap();
        let set = |sites: &mut [Site], ring: &[usize]| sites.iter_mut().for_each(|site| site.ring = ring.to_vec());
        set(&mut sites, &[2, 1, 0]);
        assert_eq!(agreed_ring(&sites, &seats).unwrap().order(), [2, 1, 0]);
        for wrong in [&[0, 1][..], &[0, 1, 1], &[0, 1, 3], &[0, 1, 2, 3]] {
            set(&mut sites, wrong);
            let error = agreed_ring(&sites, &seats).unwrap_err();
            assert!(error.contains("each of the 3 ranks once"), "{error}");
        }
        sites[2].ring.clear();
        let error = agreed_ring(&sites, &seats).unwrap_err();
        assert!(
            error.contains("rank 2 has []: start all ranks with the same options"),
            "{error}"
        );
        sites[1].nics.clear();
        assert_eq!(super::seats(&sites).unwrap_err(), "rank 1 (a) has no NIC");
    }

    #[test]
    fn short_rings_have_no_double_steps() {
        for (ranks, expected) in [(1, 0), (2, 1), (3, 3)] {
            let seats = seats(&vec![site("a"); ranks]).unwrap();
            assert_eq!(steps(&ring(&seats), &seats).len(), expected);
        }
    }

    /// Places in a tree of at most two bridges on each of three machines.
    fn any_seat() -> impl Strategy<Value = Seat> {
        let above = || proptest::collection::vec(prop_oneof![Just("x"), Just("y")], 0..3);
        let function = move |names: &'static [&'static str]| {
            (above(), proptest::sample::select(names)).prop_map(|(above, name)| Function {
                name: name.into(),
                above: above.into_iter().map(|name| bridge(BridgeKind::Switch, name)).collect(),
            })
        };
        let machine = proptest::sample::select(&["a", "b", "c"][..]);
        (
            machine,
            function(&["nic0", "nic1"]),
            proptest::option::of(function(&["accel0", "accel1"])),
        )
            .prop_map(|(machine, nic, memory)| Seat {
                machine: machine.into(),
                node: machine.into(),
                nic,
                memory,
                distance: None,
            })
    }

    /// Edges of the tree between two places.
    fn edges(a: &Seat, b: &Seat) -> usize {
        let (a, b) = (path(a), path(b));
        let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        a.len() + b.len() - 2 * common
    }

    /// Edges that a closed tour crosses.
    fn tour(seats: &[Seat], order: &[usize]) -> usize {
        let next = order.iter().cycle().skip(1);
        order
            .iter()
            .zip(next)
            .map(|(from, to)| edges(&seats[*from], &seats[*to]))
            .sum()
    }

    fn permutations(of: &[usize]) -> Vec<Vec<usize>> {
        if of.is_empty() {
            return vec![Vec::new()];
        }
        let with_first = |at: usize| {
            let mut rest = of.to_vec();
            let first = rest.remove(at);
            permutations(&rest)
                .into_iter()
                .map(move |rest| [vec![first], rest].concat())
        };
        (0..of.len()).flat_map(with_first).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn a_ring_has_each_rank_once_and_each_branch_together(seats in proptest::collection::vec(any_seat(), 1..20)) {
            let order = ring(&seats).order().to_vec();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..seats.len()).collect::<Vec<_>>());
            prop_assert_eq!(order[0], 0);
            prop_assert_eq!(&order, &ring(&seats.clone()).order().to_vec());
            // Every machine, bridge, NIC and memory: once left, the ring does not come back.
            for seat in &seats {
                let own = path(seat);
                for len in 1..=own.len() {
                    let inside: Vec<bool> = order.iter().map(|rank| path(&seats[*rank]).starts_with(&own[..len])).collect();
                    let entries = (0..inside.len()).filter(|at| inside[*at] && (*at == 0 || !inside[*at - 1])).count();
                    prop_assert_eq!(entries, 1, "{:?} in {:?}", &own[..len], order);
                }
            }
        }

        #[test]
        fn no_other_ring_crosses_fewer_edges(seats in proptest::collection::vec(any_seat(), 1..7)) {
            let own = tour(&seats, ring(&seats).order());
            let all: Vec<usize> = (0..seats.len()).collect();
            let least = permutations(&all).iter().map(|order| tour(&seats, order)).min().unwrap();
            prop_assert_eq!(own, least);
        }

        #[test]
        fn ranks_share_devices_evenly_and_use_the_nearest_nic(
            ranks in 1_usize..10,
            nics in 1_usize..5,
            classes in proptest::collection::vec(proptest::collection::vec(0_u8..6, 4), 1..6),
        ) {
            let memories: Vec<MemorySite> = classes.iter().enumerate().map(|(index, classes)| MemorySite {
                function: below("sw0", &format!("accel{index}")),
                free: 1000,
                distances: classes[..nics].iter().map(|class| Distance { class: *class, hops: 2 }).collect(),
            }).collect();
            let nics: Vec<Function> = (0..nics).map(|index| below("sw0", &format!("nic{index}"))).collect();
            let sites = vec![Site { nics: nics.clone(), memories: memories.clone(), ..site("a") }; ranks];
            let seats = seats(&sites).unwrap();
            for memory in &memories {
                let users = seats.iter().filter(|seat| seat.memory.as_ref() == Some(&memory.function));
                let most = ranks.div_ceil(memories.len());
                prop_assert!(users.clone().count() <= most && users.clone().count() + 1 >= most);
                let nearest = memory.distances.iter().map(|distance| distance.class).min();
                prop_assert!(users.into_iter().all(|seat| seat.distance.map(|distance| distance.class) == nearest));
            }
        }
    }
}
