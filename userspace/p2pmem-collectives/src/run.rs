// SPDX-License-Identifier: MIT OR Apache-2.0

//! The commands `run` and `cost`.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use p2pmem::{human_size, Provider};
use p2pmem_payload::memory::{Memory, MemoryOptions};
use p2pmem_verbs::Nic;

use crate::cli::{CostArgs, RunArgs};
use crate::communicator::{Communicator, Done, Sizes};
use crate::cost;
use crate::engine::{Engine, ProcessorEngine};
use crate::group::{Group, GroupOptions};
use crate::input::{fill, wrong_bytes};
use crate::placement::{Placement, Wanted};
use crate::pmix::PmixDirectory;
use crate::report::{measured, print_costs, print_run, times, RankReport, RingReport, RunReport, SCHEMA};
use crate::schedule::{Algorithm, Call, Collective, Plan};
use crate::topology::{ring, steps};
use crate::transport::verbs::Verbs;

/// The name of the program.
pub const PROGRAM: &str = "p2pmem-collectives";
/// Seed of the payload.
const SEED: u64 = 0x7032_706d_656d;

/// Opens the engine of a provider's device, or that of host memory, near the NIC. This happens before the memory of the payload is
/// allocated: what a killed program left running in the device ends before, so that it does not write to the payload.
pub type OpenEngine<'a> = &'a dyn Fn(Option<&Provider>, &Nic) -> Result<OpenedEngine>;

/// Makes an opened engine one of the memory of a rank. Returns the engine, and the place of the memory's first byte for it.
pub type OpenedEngine = Box<dyn FnOnce(&Memory) -> Result<(Box<dyn Engine>, u64)>>;

/// Writes to another rank beside those of payload: the messages of flow control.
pub const CONTROL: u32 = 8;

/// How a rank connects to another one.
#[derive(Debug, Clone, Copy)]
pub struct Queue {
    /// Index of the GID.
    pub gid_index: u8,
    /// Most writes in flight.
    pub depth: u32,
    /// Longest wait for the other ranks.
    pub limit: Duration,
}

/// A rank with its memory, engine, and connections.
pub struct Connected {
    /// Which NIC and provider the rank has.
    pub placement: Placement,
    // Fields are dropped in this order: the engine ends before the memory is freed.
    /// The engine.
    pub engine: Box<dyn Engine>,
    /// The memory, and the connections to all ranks.
    pub verbs: Verbs,
    /// The place of the memory's first byte for the engine.
    pub base: u64,
}

impl Connected {
    /// Opens the engine, allocates the memory that `placement` was made for, and connects to all ranks.
    ///
    /// # Errors
    ///
    /// The engine or the memory is not available, or a rank does not connect within the limit.
    pub fn new(
        group: &Group,
        placement: Placement,
        wanted: &Wanted<'_>,
        queue: Queue,
        open_engine: OpenEngine<'_>,
    ) -> Result<Self> {
        let nic = &placement.nic;
        let opened = open_engine(placement.provider.as_ref(), nic)?;
        let provider = placement.provider.as_ref().map(|provider| provider.addr.to_string());
        let memory = MemoryOptions {
            provider: provider.as_deref(),
            ..wanted.memory
        };
        let Queue {
            gid_index,
            depth,
            limit,
        } = queue;
        let verbs = Verbs::connect(group, nic, gid_index, memory, wanted.bytes, depth, limit)
            .with_context(|| format!("connecting with {} of memory", human_size(wanted.bytes)))?;
        let (engine, base) = opened(verbs.memory())?;
        Ok(Self {
            placement,
            engine,
            verbs,
            base,
        })
    }
}

/// Opens the processor as the engine, which can access any mapped memory.
///
/// # Errors
///
/// None.
pub fn processor(_provider: Option<&Provider>, _nic: &Nic) -> Result<OpenedEngine> {
    Ok(Box::new(|memory| {
        Ok((Box::new(ProcessorEngine::new(memory.span().clone())), 0))
    }))
}

/// Prints an error of a program.
pub fn print_error(program: &str, error: &anyhow::Error) {
    eprintln!("{program}: {error:#}");
}

/// Runs a rank of a job. Rank 0 prints the report. Returns whether no wrong byte was found and no error was printed.
///
/// # Errors
///
/// The ranks did not join, or the report cannot be printed. Any later error is printed before another rank ends because of it.
pub fn run(args: &RunArgs, open_engine: OpenEngine<'_>, json: bool, out: &mut dyn Write) -> Result<bool> {
    let directory = PmixDirectory::new()?;
    let options = GroupOptions {
        limit: args.timeout,
        ..GroupOptions::default()
    };
    let group = Group::join(Box::new(directory), &options)?;
    let is_first = group.rank() == 0;
    let measured = group.run(
        args.timeout,
        |group| measure(args, open_engine, group),
        |error| print_error(PROGRAM, error),
    );
    let Some(report) = measured else { return Ok(false) };
    if is_first && json {
        let mut value = serde_json::to_value(&report)?;
        value["schema"] = SCHEMA.into();
        writeln!(out, "{value}")?;
    } else if is_first {
        print_run(out, &report)?;
    }
    Ok(report.verified != Some(false))
}

fn sizes(args: &RunArgs) -> Sizes {
    Sizes {
        payload: args.size,
        chunk: args.chunk,
        window: args.window,
    }
}

fn call(args: &RunArgs) -> Call {
    Call {
        collective: args.collective.collective(args.algorithm),
        element: args.element,
        reduction: args.reduction,
        at: 0,
        bytes: args.size,
        root: args.root,
    }
}

/// Connects the ranks of a group, and measures calls. Every rank gets the report.
fn measure(args: &RunArgs, open_engine: OpenEngine<'_>, group: &Group) -> Result<RunReport> {
    let (plan, connected) = prepare(args, open_engine, group)?;
    let Connected {
        placement,
        engine,
        verbs,
        base,
    } = connected;
    let mut communicator = Communicator::new(
        group,
        verbs,
        engine,
        base,
        sizes(args),
        plan.ring().clone(),
        args.timeout,
    )?;
    let (times_us, done, wrong) = repeat(args, &mut communicator, &plan)?;
    let engine = communicator.engine().name().to_owned();
    // The connections stay until all ranks have ended their calls.
    let seat = &placement.seats[group.rank()];
    let own = RankReport {
        name: group.name(group.rank()).to_owned(),
        node: seat.node.clone(),
        nic: seat.nic.name.clone(),
        provider: seat.memory.as_ref().map(|memory| memory.name.clone()),
        path: seat.distance.map(|distance| distance.class().short().to_owned()),
        engine,
        done,
        times_us,
        wrong_bytes: wrong,
    };
    let ranks = group.exchange_values(&own, args.timeout)?;
    report(args, ranks, &plan, &placement)
}

fn prepare(args: &RunArgs, open_engine: OpenEngine<'_>, group: &Group) -> Result<(Plan, Connected)> {
    let sizes = sizes(args);
    sizes.check()?;
    let wanted = Wanted {
        nic: args.nic.as_deref(),
        memory: MemoryOptions {
            kind: args.memory,
            provider: args.device.as_deref(),
            device: &args.dev_path,
        },
        bytes: sizes.memory(group.ranks()),
        ring: &args.ring,
    };
    let placement = Placement::agree(group, &wanted, args.timeout)?;
    let plan = Plan::new(call(args), placement.ring.clone(), sizes.chunk).map_err(anyhow::Error::msg)?;
    let queue = Queue {
        gid_index: args.gid_index,
        // A piece, and the messages of flow control.
        depth: args.window + CONTROL,
        limit: args.timeout,
    };
    let connected = Connected::new(group, placement, &wanted, queue, open_engine)?;
    Ok((plan, connected))
}

fn repeat<E: Engine>(
    args: &RunArgs,
    communicator: &mut Communicator<&Group, Verbs, E>,
    plan: &Plan,
) -> Result<(Vec<f64>, Done, Option<u64>)> {
    let call = plan.call();
    let rank = communicator.members().rank();
    let span = communicator.transport().memory().span().clone();
    let (mut times, mut done, mut wrong) = (Vec::new(), Done::default(), 0);
    for iteration in 0..=args.iterations {
        if iteration == 0 || args.verify {
            fill(&span, call, SEED, rank)?;
        }
        // Ranks that fill their memory at different speed do not count as waiting.
        communicator.members().barrier(args.timeout)?;
        let start = Instant::now();
        done = communicator.call(*call)?;
        let time: Duration = start.elapsed();
        if iteration > 0 {
            times.push(time.as_secs_f64() * 1e6);
        }
        if args.verify {
            wrong += wrong_bytes(&span, plan, SEED, rank)?;
        }
    }
    Ok((times, done, args.verify.then_some(wrong)))
}

fn report(args: &RunArgs, ranks: Vec<RankReport>, plan: &Plan, placement: &Placement) -> Result<RunReport> {
    ensure!(!ranks.is_empty(), "no rank has reported");
    let call = plan.call();
    let formula = cost::formula(call.collective, ranks.len(), call.bytes);
    let measured = measured(&ranks);
    let (time_us, shortest_us) = times(&ranks);
    let compared: Option<Vec<u64>> = ranks.iter().map(|rank| rank.wrong_bytes).collect();
    Ok(RunReport {
        collective: call.collective.name().into(),
        algorithm: match call.collective {
            Collective::Allreduce(algorithm) => Some(algorithm.name().into()),
            _ => None,
        },
        element: call.element.name().into(),
        reduction: call.collective.reduces().then(|| call.reduction.name().into()),
        bytes: call.bytes,
        chunk: args.chunk,
        window: args.window,
        time_us,
        shortest_us,
        ratio: measured.ratio_to(&formula),
        measured,
        formula,
        ring: RingReport {
            order: placement.ring.order().to_vec(),
            by_topology: ring(&placement.seats).order().to_vec(),
            chosen: if args.ring.is_empty() { "topology" } else { "option" }.into(),
            steps: steps(&placement.ring, &placement.seats),
        },
        verified: compared.map(|wrong| wrong.iter().all(|wrong| *wrong == 0)),
        ranks,
    })
}

/// Prints the cost of every algorithm.
///
/// # Errors
///
/// Those of the output.
pub fn print_cost(args: &CostArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let all = Algorithm::ALL.map(|algorithm| (algorithm.name(), Collective::Allreduce(algorithm)));
    let others = [Collective::ReduceScatter, Collective::AllGather, Collective::Broadcast];
    let all: Vec<(&str, Collective)> = all
        .into_iter()
        .chain(others.map(|collective| (collective.name(), collective)))
        .collect();
    let mut costs = Vec::new();
    for (name, collective) in all {
        for ranks in &args.ranks {
            costs.push((name, *ranks, cost::formula(collective, *ranks, args.size)));
        }
    }
    if json {
        let entries: Vec<_> = costs
            .iter()
            .map(|(name, ranks, cost)| serde_json::json!({ "name": name, "ranks": ranks, "cost": cost }))
            .collect();
        writeln!(
            out,
            "{}",
            serde_json::json!({ "schema": SCHEMA, "bytes": args.size, "costs": entries })
        )?;
        return Ok(());
    }
    writeln!(out, "payload of {} on each rank", human_size(args.size))?;
    let costs: Vec<_> = costs.iter().map(|(name, ranks, cost)| (*name, *ranks, cost)).collect();
    print_costs(out, &costs)?;
    Ok(())
}
