// SPDX-License-Identifier: MIT OR Apache-2.0

//! The commands.

use std::io::Write;
use std::time::Instant;

use anyhow::{ensure, Context, Result};
use p2pmem_collectives::communicator::{Communicator, Sizes};
use p2pmem_collectives::engine::Engine;
use p2pmem_collectives::group::{Group, GroupOptions};
use p2pmem_collectives::placement::{Placement, Wanted};
use p2pmem_collectives::pmix::PmixDirectory;
use p2pmem_collectives::run::{print_error, Connected, OpenEngine, Queue, CONTROL};
use p2pmem_collectives::schedule::Ring;
use p2pmem_collectives::transport::verbs::Verbs;
use p2pmem_payload::memory::MemoryOptions;

use crate::asynchronous::{self, SERVER};
use crate::checkpoint::{await_iteration, show, Checkpoints};
use crate::cli::{
    AllreduceArgs, AsyncArgs, CheckpointArgs, PipelineArgs, RankArgs, ReferenceArgs, SyncArgs, TensorArgs,
};
use crate::digits::Digits;
use crate::outcome::Outcome;
use crate::pipeline::{self, Pipeline, Places};
use crate::ranks::agree;
use crate::reference;
use crate::report::{
    print, Mode, PipelineReport, RankReport, SliceReport, StageReport, Traffic, TrainingReport, SCHEMA,
};
use crate::schedule::{bubble, least_duration};
use crate::slice::{self, Direction};
use crate::state::Layout;
use crate::synchronous::{Saving, Training};
use crate::tensor;

/// The name of the program.
pub const PROGRAM: &str = "p2pmem-training";

fn write_report(report: &TrainingReport, json: bool, out: &mut dyn Write) -> Result<()> {
    if json {
        let mut value = serde_json::to_value(report)?;
        value["schema"] = SCHEMA.into();
        writeln!(out, "{value}")?;
    } else {
        print(out, report)?;
    }
    Ok(())
}

/// Runs a rank of a job. Prints the report, which rank 0 has. Returns whether no error was printed.
///
/// # Errors
///
/// The ranks did not join, or the report cannot be printed. Any later error is printed before another rank ends because of it.
fn run(
    args: &RankArgs,
    json: bool,
    out: &mut dyn Write,
    train: impl FnOnce(&Group) -> Result<Option<TrainingReport>>,
) -> Result<bool> {
    let options = GroupOptions {
        limit: args.timeout,
        ..GroupOptions::default()
    };
    let group = Group::join(Box::new(PmixDirectory::new()?), &options)?;
    let report = group.run(args.timeout, train, |error| print_error(PROGRAM, error));
    if let Some(Some(report)) = &report {
        write_report(report, json, out)?;
    }
    Ok(report.is_some())
}

/// Connects to all ranks of the group with memory of `bytes` bytes.
fn connect(args: &RankArgs, group: &Group, open_engine: OpenEngine<'_>, bytes: u64, depth: u32) -> Result<Connected> {
    let wanted = Wanted {
        nic: args.nic.as_deref(),
        memory: MemoryOptions {
            kind: args.memory,
            provider: args.device.as_deref(),
            device: &args.dev_path,
        },
        bytes,
        ring: &[],
    };
    let placement = Placement::agree(group, &wanted, args.timeout)?;
    let queue = Queue {
        gid_index: args.gid_index,
        depth,
        limit: args.timeout,
    };
    Connected::new(group, placement, &wanted, queue, open_engine)
}

fn provider(verbs: &Verbs) -> Option<String> {
    verbs.memory().provider().map(|provider| provider.addr.to_string())
}

/// Fails if a rank has another result than this one.
fn compare(all: &[RankReport], own: &RankReport) -> Result<()> {
    for other in all {
        ensure!(
            other.digest == own.digest,
            "{} has another result than {}: do all nodes run the same version of p2pmem-training?",
            other.name,
            own.name
        );
    }
    Ok(())
}

/// Trains as a rank of a synchronous training. Rank 0 prints. Returns whether no error was printed.
///
/// # Errors
///
/// The settings are not possible, or the ranks did not join. The message says what to do.
pub fn synchronous(args: &SyncArgs, open_engine: OpenEngine<'_>, json: bool, out: &mut dyn Write) -> Result<bool> {
    let settings = args.training.settings();
    let digits = Digits::load();
    settings.check(digits.training.len())?;
    let layout = Layout::new(settings.network().parameters());
    let sizes = Sizes {
        payload: layout.payload(),
        chunk: args.allreduce.chunk,
        window: args.allreduce.window,
    };
    sizes.check()?;
    run(&args.rank, json, out, |group| {
        let (rank, ranks) = (group.rank(), group.ranks());
        let depth = args.allreduce.window + CONTROL;
        let Connected {
            placement,
            engine,
            verbs,
            base,
        } = connect(&args.rank, group, open_engine, sizes.memory(ranks), depth)?;
        let span = verbs.memory().span().clone();
        let provider = provider(&verbs);
        let path = args.checkpoint.as_ref().filter(|_| rank == 0);
        let fingerprint = settings.fingerprint(ranks, args.allreduce.algorithm);
        let checkpoints = path.map(|path| Checkpoints::open(path, &span, layout, fingerprint));
        let checkpoints = checkpoints.transpose()?;
        // The order of the ring is part of the result, which does not depend on the machines.
        let ring = Ring::by_rank(ranks);
        let mut communicator = Communicator::new(group, verbs, engine, base, sizes, ring, args.rank.timeout)?;
        let mut training = Training {
            settings: &settings,
            digits: &digits,
            algorithm: args.allreduce.algorithm,
            span,
            saving: checkpoints.map(|checkpoints| Saving {
                checkpoints,
                every: args.checkpoint_every,
                resume: args.resume,
            }),
        };
        let start = Instant::now();
        let trained = training.run(&mut communicator, &mut |_| Ok(()))?;
        let seconds = start.elapsed().as_secs_f64();
        let own = RankReport {
            engine: Some(communicator.engine().name().to_owned()),
            sent: trained.sent,
            digest: Some(trained.outcome.digest.clone()),
            ..RankReport::new(group.name(rank), placement.nic.name(), provider)
        };
        let rank_reports = group.exchange_values(&own, args.rank.timeout)?;
        compare(&rank_reports, &own)?;
        Ok((rank == 0).then(|| TrainingReport {
            algorithm: Some(args.allreduce.algorithm.name().into()),
            updates: trained.iterations,
            resumed_at: trained.resumed_at,
            checkpoints: trained.checkpoints,
            seconds,
            rank_reports,
            ..TrainingReport::new(Mode::Synchronous, ranks, settings, trained.outcome)
        }))
    })
}

/// Trains as a rank of an asynchronous training. Rank 0 is the server, and prints. Returns whether no error was printed.
///
/// # Errors
///
/// The settings are not possible, or the ranks did not join. The message says what to do.
pub fn asynchronous(args: &AsyncArgs, open_engine: OpenEngine<'_>, json: bool, out: &mut dyn Write) -> Result<bool> {
    let settings = args.training.settings();
    let digits = Digits::load();
    settings.check(digits.training.len())?;
    let parameters = settings.network().parameters();
    run(&args.rank, json, out, |group| {
        let (rank, ranks) = (group.rank(), group.ranks());
        ensure!(
            ranks > 1,
            "a parameter server needs at least one worker: start 2 ranks or more"
        );
        let memory = asynchronous::Places::new(parameters, ranks, args.window).memory();
        let Connected {
            placement,
            mut engine,
            mut verbs,
            base,
        } = connect(&args.rank, group, open_engine, memory, args.window + CONTROL)?;
        let provider = provider(&verbs);
        let training = asynchronous::Training {
            settings: &settings,
            digits: &digits,
            span: verbs.memory().span().clone(),
            window: args.window,
            limit: args.rank.timeout,
        };
        let start = Instant::now();
        let (mut served, mut engine_name) = (None, None);
        let updates = if rank == SERVER {
            engine_name = Some(engine.name().to_owned());
            let result = training.serve(group, &mut verbs, &mut engine, base)?;
            let updates = result.updates;
            served = Some(result);
            updates
        } else {
            training.work(group, &mut verbs)?
        };
        let seconds = start.elapsed().as_secs_f64();
        let own = RankReport {
            engine: engine_name,
            sent: updates * 4 * parameters as u64,
            ..RankReport::new(group.name(rank), placement.nic.name(), provider)
        };
        // The connections stay until all ranks have ended.
        let rank_reports = group.exchange_values(&own, args.rank.timeout)?;
        Ok(served.map(|served| TrainingReport {
            updates: served.updates,
            staleness: Some(served.staleness),
            seconds,
            rank_reports,
            ..TrainingReport::new(Mode::Asynchronous, ranks, settings, served.outcome)
        }))
    })
}

/// Trains as a rank of a pipeline. Rank 0 prints. Returns whether no error was printed.
///
/// # Errors
///
/// The ranks did not join. The message says what to do.
pub fn pipeline(args: &PipelineArgs, open_engine: OpenEngine<'_>, json: bool, out: &mut dyn Write) -> Result<bool> {
    let limit = args.rank.timeout;
    let pipeline = Pipeline {
        settings: args.training.settings(),
        microbatches: args.microbatches as usize,
    };
    let digits = Digits::load();
    run(&args.rank, json, out, |group| {
        let (rank, ranks) = (group.rank(), group.ranks());
        agree(group, &serde_json::json!({ "pipeline": pipeline }), limit)?;
        pipeline.check(ranks, digits.training.len())?;
        let memory = Places::new(&pipeline, ranks).memory();
        let Connected {
            placement,
            mut engine,
            mut verbs,
            base,
        } = connect(&args.rank, group, open_engine, memory, args.microbatches + CONTROL)?;
        let provider = provider(&verbs);
        let training = pipeline::Training {
            pipeline: &pipeline,
            digits: &digits,
            span: verbs.memory().span().clone(),
            limit,
        };
        let start = Instant::now();
        let trained = training.run(group, &mut verbs, &mut engine, base, &mut |_, _| Ok(()))?;
        let seconds = start.elapsed().as_secs_f64();
        let own = RankReport {
            engine: Some(engine.name().to_owned()),
            sent: trained.forward + trained.backward + trained.collected,
            stage: Some(StageReport::new(&trained)),
            ..RankReport::new(group.name(rank), placement.nic.name(), provider)
        };
        // The connections stay until all ranks have ended.
        let rank_reports = group.exchange_values(&own, limit)?;
        let stages = group.exchange_values(&trained.busy, limit)?;
        let Some(outcome) = trained.outcome else {
            return Ok(None);
        };
        let busy: f64 = stages.iter().map(|stage| stage.all).sum();
        let batch_seconds = trained.duration.as_secs_f64();
        Ok(Some(TrainingReport {
            updates: trained.batches,
            pipeline: Some(PipelineReport {
                microbatches: pipeline.microbatches,
                batch_seconds,
                bubble: bubble(busy, ranks, batch_seconds),
                least_bubble: bubble(busy, ranks, least_duration(&stages)),
            }),
            seconds,
            rank_reports,
            ..TrainingReport::new(Mode::Pipeline, ranks, pipeline.settings, outcome)
        }))
    })
}

/// Trains as a rank of a tensor-parallel training. Rank 0 prints. Returns whether no error was printed.
///
/// # Errors
///
/// The ranks did not join. The message says what to do.
pub fn tensor(args: &TensorArgs, open_engine: OpenEngine<'_>, json: bool, out: &mut dyn Write) -> Result<bool> {
    let limit = args.rank.timeout;
    let settings = args.training.settings();
    let AllreduceArgs {
        algorithm,
        chunk,
        window,
    } = args.allreduce;
    let digits = Digits::load();
    run(&args.rank, json, out, |group| {
        let (rank, ranks) = (group.rank(), group.ranks());
        let options = serde_json::json!({
            "tensor": settings, "algorithm": algorithm.name(), "chunk": chunk, "window": window,
        });
        agree(group, &options, limit)?;
        settings.check(digits.training.len())?;
        slice::check(&settings.network(), ranks)?;
        let sizes = Sizes {
            payload: tensor::Places::new(&settings, ranks).payload(),
            chunk,
            window,
        };
        sizes.check()?;
        let Connected {
            placement,
            engine,
            verbs,
            base,
        } = connect(&args.rank, group, open_engine, sizes.memory(ranks), window + CONTROL)?;
        let provider = provider(&verbs);
        let training = tensor::Training {
            settings: &settings,
            digits: &digits,
            algorithm,
            span: verbs.memory().span().clone(),
        };
        // The order of the ring is part of the result, which does not depend on the machines.
        let ring = Ring::by_rank(ranks);
        let mut communicator = Communicator::new(group, verbs, engine, base, sizes, ring, limit)?;
        let start = Instant::now();
        let trained = training.run(&mut communicator, &mut |_| Ok(()))?;
        let seconds = start.elapsed().as_secs_f64();
        let traffic = |bytes, direction| Traffic {
            bytes,
            formula: tensor::bytes_by_formula(&settings, algorithm, ranks, trained.batches, direction),
        };
        let own = RankReport {
            engine: Some(communicator.engine().name().to_owned()),
            sent: trained.forward + trained.backward + trained.collected,
            digest: Some(trained.outcome.digest.clone()),
            slice: Some(SliceReport {
                units: trained.units,
                parameters: trained.parameters,
                forward: traffic(trained.forward, Direction::Forward),
                backward: traffic(trained.backward, Direction::Backward),
                collected: trained.collected,
            }),
            ..RankReport::new(group.name(rank), placement.nic.name(), provider)
        };
        let rank_reports = group.exchange_values(&own, limit)?;
        compare(&rank_reports, &own)?;
        Ok((rank == 0).then(|| TrainingReport {
            algorithm: Some(algorithm.name().into()),
            updates: trained.batches,
            seconds,
            rank_reports,
            ..TrainingReport::new(Mode::Tensor, ranks, settings, trained.outcome)
        }))
    })
}

/// Computes and prints the result of a synchronous or tensor-parallel training.
///
/// # Errors
///
/// The settings are not possible.
pub fn reference(args: &ReferenceArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let settings = args.training.settings();
    let digits = Digits::load();
    let start = Instant::now();
    let train = if args.tensor {
        reference::train_tensor
    } else {
        reference::train
    };
    let outcome: Outcome = train(&settings, &digits, args.ranks, args.algorithm)?;
    let report = TrainingReport {
        algorithm: Some(args.algorithm.name().into()),
        updates: (digits.training.len() / settings.batch) as u64 * u64::from(settings.epochs),
        seconds: start.elapsed().as_secs_f64(),
        ..TrainingReport::new(Mode::Reference, args.ranks, settings, outcome)
    };
    write_report(&report, json, out)
}

/// Prints a checkpoint.
///
/// # Errors
///
/// The file cannot be read, or has no valid checkpoint; the iteration to wait for did not come.
pub fn checkpoint(args: &CheckpointArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let header = match args.wait {
        Some(iteration) => await_iteration(&args.file, iteration, args.timeout)?,
        None => show(&args.file)?.with_context(|| format!("{} has no valid checkpoint", args.file.display()))?,
    };
    if json {
        let value = serde_json::json!({
            "schema": SCHEMA,
            "iteration": header.iteration,
            "parameters": header.parameters,
            "losses": header.losses,
            "digest": hex::encode(header.digest),
        });
        writeln!(out, "{value}")?;
    } else {
        writeln!(
            out,
            "iteration {}, {} parameters, {} complete epochs",
            header.iteration,
            header.parameters,
            header.losses.len()
        )?;
    }
    Ok(())
}
