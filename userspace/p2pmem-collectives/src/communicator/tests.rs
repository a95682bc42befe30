// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of calls between ranks of one thread: messages are delivered, and jobs are executed, in random order.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use p2pmem_verbs::Span;
use proptest::prelude::*;

use super::*;
use crate::engine::ProcessorEngine;
use crate::transport::local::{Local, Network};

/// A group without connections.
#[derive(Clone)]
struct Ranks {
    names: Rc<Vec<String>>,
    rank: usize,
    shared: Rc<RefCell<Shared>>,
}

#[derive(Default)]
struct Shared {
    calls: Vec<u64>,
    failure: Option<Failure>,
    /// How often a rank waited for the failure of another one.
    waits: usize,
}

impl Members for Ranks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.names.len()
    }

    fn name(&self, rank: usize) -> &str {
        &self.names[rank]
    }

    fn check(&self) -> Result<(), Failure> {
        self.shared.borrow().failure.clone().map_or(Ok(()), Err)
    }

    fn wait_for_failure(&self, _limit: Duration) -> Result<(), Failure> {
        self.shared.borrow_mut().waits += 1;
        self.check()
    }

    fn abort(&self, reason: &str) {
        let what = format!("{} stopped: {reason}", self.names[self.rank]);
        let rank = self.rank;
        self.shared.borrow_mut().failure.get_or_insert(Failure { rank, what });
    }

    fn set_progress(&self, calls: u64) {
        self.shared.borrow_mut().calls[self.rank] = calls;
    }

    fn progress(&self, _limit: Duration) -> Vec<Option<u64>> {
        self.shared.borrow().calls.iter().copied().map(Some).collect()
    }
}

/// An engine that executes a job when the test says so.
struct SlowEngine {
    engine: ProcessorEngine,
    jobs: VecDeque<Job>,
    depth: usize,
    submitted: u64,
    completed: u64,
}

impl SlowEngine {
    fn execute(&mut self) -> bool {
        let Some(job) = self.jobs.pop_front() else {
            return false;
        };
        self.engine.submit(job).unwrap();
        self.completed += 1;
        true
    }
}

impl Engine for SlowEngine {
    fn submit(&mut self, job: Job) -> anyhow::Result<Option<u64>> {
        if self.jobs.len() == self.depth {
            return Ok(None);
        }
        self.jobs.push_back(job);
        self.submitted += 1;
        Ok(Some(self.submitted - 1))
    }

    fn start(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn completed(&mut self) -> anyhow::Result<u64> {
        Ok(self.completed)
    }

    fn name(&self) -> &str {
        "slow"
    }
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }
}

struct World {
    network: Arc<Network>,
    memories: Vec<Span>,
    communicators: Vec<Communicator<Ranks, Local, SlowEngine>>,
    sizes: Sizes,
}

impl World {
    fn new(ring: &Ring, sizes: Sizes, depth: usize) -> Self {
        let ranks = ring.ranks();
        let bytes = sizes.memory(ranks) as usize;
        let memories: Vec<Span> = (0..ranks).map(|_| Span::host(bytes).unwrap()).collect();
        let network = Network::chosen(memories.clone(), depth);
        let names = Rc::new((0..ranks).map(|rank| format!("rank {rank}")).collect::<Vec<_>>());
        let shared = Rc::new(RefCell::new(Shared {
            calls: vec![0; ranks],
            failure: None,
            waits: 0,
        }));
        let communicators = (0..ranks).map(|rank| {
            let members = Ranks {
                names: names.clone(),
                rank,
                shared: shared.clone(),
            };
            let engine = SlowEngine {
                engine: ProcessorEngine::new(memories[rank].clone()),
                jobs: VecDeque::new(),
                depth: 2,
                submitted: 0,
                completed: 0,
            };
            let transport = Local::new(&network, rank);
            let limit = Duration::from_secs(60);
            Communicator::new(members, transport, engine, 0, sizes, ring.clone(), limit).unwrap()
        });
        let communicators = communicators.collect();
        Self {
            network,
            memories,
            communicators,
            sizes,
        }
    }

    /// Executes the calls of all ranks in random order. Each rank makes all its calls, one after the other. Returns what each rank
    /// did in its last call.
    fn run(&mut self, calls: &[Vec<Call>], random: &mut Random) -> Result<Vec<Done>, (usize, Error)> {
        let ranks = self.communicators.len();
        let mut executions: Vec<Option<Execution>> = (0..ranks).map(|_| None).collect();
        let mut next = vec![0; ranks];
        let mut done = vec![Done::default(); ranks];
        let mut idle = 0;
        while next.iter().zip(calls).any(|(next, calls)| *next < calls.len()) {
            let rank = random.below(ranks);
            let communicator = &mut self.communicators[rank];
            let mut moved = match random.below(3) {
                0 => communicator.engine.execute(),
                1 => self.network.deliver(&mut |count| random.below(count)),
                _ if next[rank] == calls[rank].len() => false,
                _ => {
                    let execution = match &mut executions[rank] {
                        Some(execution) => execution,
                        none => none.insert(
                            communicator
                                .enter(calls[rank][next[rank]])
                                .map_err(|error| (rank, error))?,
                        ),
                    };
                    let state = communicator.advance(execution);
                    let state = state.map_err(|error| (rank, communicator.fail(error)))?;
                    if state == State::Done {
                        done[rank] = std::mem::take(&mut execution.done);
                        executions[rank] = None;
                        next[rank] += 1;
                    }
                    state != State::Waiting
                }
            };
            moved |= !self.network.is_idle();
            idle = if moved { 0 } else { idle + 1 };
            assert!(idle < 10_000, "the ranks wait for each other: {next:?}");
        }
        Ok(done)
    }

    fn payload(&self, rank: usize, call: &Call) -> Vec<u8> {
        let mut bytes = vec![0; call.bytes as usize];
        self.memories[rank].read(call.at as usize, &mut bytes);
        bytes
    }
}

/// Returns what a rank's payload must contain after a call, where it is defined: offsets and bytes.
fn expected(plan: &Plan, inputs: &[Vec<u8>], rank: usize) -> Vec<(u64, Vec<u8>)> {
    let segments = (0..plan.segments()).filter(|index| plan.has_result(rank, *index));
    segments
        .map(|index| {
            let range = plan.segment(index);
            let part = range.start as usize..range.end as usize;
            (range.start, plan.result(index, |of| inputs[of][part.clone()].to_vec()))
        })
        .collect()
}

fn fill(world: &World, call: &Call, random: &mut Random) -> Vec<Vec<u8>> {
    let inputs: Vec<Vec<u8>> = world
        .memories
        .iter()
        .map(|memory| {
            let mut bytes: Vec<u8> = Vec::with_capacity(call.bytes as usize);
            while bytes.len() < call.bytes as usize {
                // Numbers of different sizes, so that sums depend on their order.
                let number = (random.below(1 << 20) as f32 - 5e5) * 10_f32.powi(random.below(8) as i32 - 4);
                match call.element {
                    Element::F32 => bytes.extend(number.to_le_bytes()),
                    Element::Bf16 => bytes.extend(&number.to_le_bytes()[2..]),
                }
            }
            memory.write(call.at as usize, &bytes);
            bytes
        })
        .collect();
    inputs
}

fn collective() -> impl Strategy<Value = Collective> {
    prop_oneof![
        Just(Collective::Allreduce(Algorithm::ParameterServer)),
        Just(Collective::Allreduce(Algorithm::Decentralized)),
        Just(Collective::Allreduce(Algorithm::Ring)),
        Just(Collective::ReduceScatter),
        Just(Collective::AllGather),
        Just(Collective::Broadcast),
    ]
}

fn any_call(ranks: usize) -> impl Strategy<Value = Call> {
    let element = prop_oneof![Just(Element::F32), Just(Element::Bf16)];
    let reduction = prop_oneof![Just(Reduction::Sum), Just(Reduction::Max)];
    (collective(), element, reduction, 0..64_u64, 1..700_u64, 0..ranks).prop_map(
        |(collective, element, reduction, at, count, root)| Call {
            collective,
            element,
            reduction,
            at: at * element.bytes() as u64,
            bytes: count * element.bytes() as u64,
            root,
        },
    )
}

fn case() -> impl Strategy<Value = (Ring, Vec<Call>, u32, usize, u64)> {
    (1..6_usize).prop_flat_map(|ranks| {
        (
            Just((0..ranks).collect::<Vec<_>>()).prop_shuffle(),
            prop::collection::vec(any_call(ranks), 1..4),
            1..9_u32,
            1..5_usize,
            any::<u64>(),
        )
            .prop_map(|(order, calls, window, depth, seed)| (Ring::new(order).unwrap(), calls, window, depth, seed))
    })
}

const SIZES: Sizes = Sizes {
    payload: 4096,
    chunk: 256,
    window: 4,
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Each call has the result of its definition, bit by bit, in any order of deliveries and of the engines' jobs.
    #[test]
    fn calls_have_the_result_of_their_definition((ring, calls, window, depth, seed) in case()) {
        let random = &mut Random(seed);
        let ranks = ring.ranks();
        let sizes = Sizes { window, ..SIZES };
        let mut world = World::new(&ring, sizes, depth);
        for call in &calls {
            let inputs = fill(&world, call, random);
            let done = world.run(&vec![vec![*call]; ranks], random).map_err(|(_, error)| error).unwrap();
            let plan = Plan::new(*call, ring.clone(), sizes.chunk).unwrap();
            for rank in 0..ranks {
                let payload = world.payload(rank, call);
                for (at, bytes) in expected(&plan, &inputs, rank) {
                    let at = at as usize;
                    prop_assert_eq!(&payload[at..at + bytes.len()], &bytes[..], "rank {} of {}, {:?}", rank, ranks, call);
                }
            }
            let cost = crate::cost::count(&plan);
            prop_assert_eq!(done.iter().map(|done| done.sent).max().unwrap() as f64, cost.most_sent);
            prop_assert_eq!(done.iter().map(|done| done.received).max().unwrap() as f64, cost.most_received);
            prop_assert_eq!(done.iter().map(|done| done.rounds).max().unwrap(), cost.rounds);
            prop_assert_eq!(done.iter().map(|done| done.fan_in).max().unwrap(), cost.fan_in);
            prop_assert_eq!(done.iter().map(|done| done.most_in_round).max().unwrap() as f64, cost.most_in_round);
        }
    }

    /// Ranks may be a call ahead of others: nothing is lost, and every call ends.
    #[test]
    fn calls_follow_each_other_without_a_barrier((ring, calls, window, depth, seed) in case()) {
        let sizes = Sizes { window, ..SIZES };
        let mut world = World::new(&ring, sizes, depth);
        let all = vec![calls; ring.ranks()];
        world.run(&all, &mut Random(seed)).map_err(|(_, error)| error).unwrap();
    }

    /// A rank that receives nothing from another one can be several calls ahead of it.
    #[test]
    fn broadcasts_with_changing_roots_follow_each_other(
        (ranks, roots) in (3..6_usize).prop_flat_map(|ranks| (Just(ranks), prop::collection::vec(0..ranks, 2..9))),
        depth in 1..5_usize,
        seed in any::<u64>(),
    ) {
        let ring = Ring::by_rank(ranks);
        let call = |root: &usize| Call { root: *root, collective: Collective::Broadcast, ..allreduce(Algorithm::Ring, 1024) };
        let all = vec![roots.iter().map(call).collect(); ranks];
        let mut world = World::new(&ring, SIZES, depth);
        world.run(&all, &mut Random(seed)).map_err(|(_, error)| error).unwrap();
    }
}

fn allreduce(algorithm: Algorithm, bytes: u64) -> Call {
    Call {
        collective: Collective::Allreduce(algorithm),
        element: Element::F32,
        reduction: Reduction::Sum,
        at: 0,
        bytes,
        root: 0,
    }
}

#[test]
fn unequal_sizes_are_named_with_both_ranks() {
    for algorithm in Algorithm::ALL {
        let mut world = World::new(&Ring::by_rank(3), SIZES, 4);
        let calls = [4096, 4096, 2048].map(|bytes| vec![allreduce(algorithm, bytes)]);
        let (rank, error) = world.run(&calls, &mut Random(1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("4096 bytes") && text.contains("2048 bytes"), "{text}");
        assert!(text.contains("makes another call: call 1: allreduce"), "{text}");
        let others: Vec<usize> = (0..3).filter(|other| *other != rank).collect();
        for other in others {
            let failure = world.communicators[other]
                .enter(allreduce(algorithm, 4096))
                .err()
                .unwrap();
            assert!(
                failure.to_string().starts_with(&format!("rank {rank} stopped: rank ")),
                "{failure}"
            );
        }
        let again = world.communicators[rank]
            .enter(allreduce(algorithm, 4096))
            .err()
            .unwrap();
        assert!(!again.to_string().is_empty());
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let mut world = World::new(&Ring::by_rank(3), SIZES, 4);
    world.communicators[0].limit = Duration::ZERO;
    let error = world.communicators[0].allreduce(0, 4096, Element::F32, Reduction::Sum, Algorithm::Ring);
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("rank 1 and rank 2 did not enter call 1: allreduce (ring) of 4096 bytes"),
        "{text}"
    );
}

#[test]
fn a_failed_connection_ends_the_call_of_all_ranks() {
    let mut world = World::new(&Ring::by_rank(3), SIZES, 4);
    world.network.fail(2);
    let calls = vec![vec![allreduce(Algorithm::Ring, 4096)]; 3];
    let (rank, error) = world.run(&calls, &mut Random(1)).unwrap_err();
    assert!(error.to_string().contains("the connection to rank"), "{error}");
    let other = (rank + 1) % 3;
    let failure = world.communicators[other].enter(calls[0][0]).err().unwrap();
    assert!(
        failure
            .to_string()
            .contains(&format!("rank {rank} stopped: the connection")),
        "{failure}"
    );
}

/// If a rank waited with the failure of its own device, the others would report the connections that fail because of it.
#[test]
fn only_a_failed_connection_waits_for_the_failure_of_another_rank() {
    for (error, waits) in [(Error::Device as fn(anyhow::Error) -> Error, 0), (Error::Connection, 1)] {
        let mut world = World::new(&Ring::by_rank(2), SIZES, 4);
        let communicator = &mut world.communicators[1];
        let error = communicator.fail(error(anyhow::anyhow!("the memory was revoked")));
        assert_eq!(error.to_string(), "the memory was revoked");
        let shared = communicator.members().shared.borrow();
        assert_eq!(shared.waits, waits);
        let failure = shared.failure.as_ref().unwrap();
        assert_eq!(failure.what, "rank 1 stopped: the memory was revoked");
    }
}

#[test]
fn impossible_calls_fail_before_anything_is_sent() {
    let mut world = World::new(&Ring::by_rank(2), SIZES, 4);
    let mut error = |change: fn(&mut Call)| {
        let mut call = allreduce(Algorithm::Ring, 4096);
        change(&mut call);
        let error = world.communicators[0].call(call).unwrap_err();
        assert!(matches!(error, Error::Call(_)), "{error}");
        error.to_string()
    };
    assert!(error(|call| call.bytes = 0).contains("at least one"));
    assert!(error(|call| call.bytes = 6).contains("whole elements of 4 bytes"));
    assert!(error(|call| call.at = 4).contains("the payload has 4096 bytes"));
    assert!(error(|call| call.at = u64::MAX - 3).contains("the payload has 4096 bytes"));
    assert!(error(|call| call.root = 2).contains("the last rank is 1"));
    assert!(world.network.is_idle());
    assert_eq!(world.sizes, SIZES);
}

#[test]
fn a_message_that_is_not_expected_ends_the_call() {
    let cases = [
        (Immediate::piece(0, 0).encode(), "a piece of task 0, which is not open"),
        (3 << 30, "the immediate data 0xc0000000"),
        (Immediate::Enter { tasks: 1 }.encode(), "an invalid announcement"),
    ];
    for (immediate, what) in cases {
        let mut world = World::new(&Ring::by_rank(2), SIZES, 4);
        // Before the call, so no task is open.
        world.communicators[1].transport.notify(0, None, immediate).unwrap();
        world.network.deliver(&mut |_| 0);
        let communicator = &mut world.communicators[0];
        let mut execution = communicator.enter(allreduce(Algorithm::Ring, 4096)).unwrap();
        execution.open = 0;
        let error = communicator.advance(&mut execution).err().unwrap().to_string();
        assert!(error.contains(&format!("rank 1 sent {what}")), "{error}");
    }
}
