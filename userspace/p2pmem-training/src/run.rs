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
use p2pmem_collectives::run::{Connected, OpenEngine, Queue, CONTROL};
use p2pmem_collectives::schedule::Ring;
use p2pmem_collectives::transport::verbs::Verbs;
use p2pmem_payload::memory::MemoryOptions;

use crate::asynchronous::{self, Places, SERVER};
use crate::checkpoint::{show, Checkpoints};
use crate::cli::{AsyncArgs, CheckpointArgs, RankArgs, ReferenceArgs, SyncArgs};
use crate::digits::Digits;
use crate::outcome::Outcome;
use crate::reference;
use crate::report::{print, Mode, RankReport, TrainingReport, SCHEMA};
use crate::state::Layout;
use crate::synchronous::{Saving, Training};

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

/// Joins the group of the job, and connects to all ranks with memory of `bytes` bytes, which depends on the number of ranks.
fn join(
    args: &RankArgs,
    open_engine: OpenEngine<'_>,
    bytes: impl Fn(usize) -> Result<u64>,
    depth: u32,
) -> Result<(Group, Connected)> {
    let options = GroupOptions {
        limit: args.timeout,
        ..GroupOptions::default()
    };
    let group = Group::join(Box::new(PmixDirectory::new()?), &options)?;
    let connect = || -> Result<Connected> {
        let wanted = Wanted {
            nic: args.nic.as_deref(),
            memory: MemoryOptions {
                kind: args.memory,
                provider: args.device.as_deref(),
                device: &args.dev_path,
            },
            bytes: bytes(group.ranks())?,
            ring: &[],
        };
        let placement = Placement::agree(&group, &wanted, args.timeout)?;
        let queue = Queue {
            gid_index: args.gid_index,
            depth,
            limit: args.timeout,
        };
        Connected::new(&group, placement, &wanted, queue, open_engine)
    };
    match connect() {
        Ok(connected) => Ok((group, connected)),
        Err(error) => {
            group.abort(&format!("{error:#}"));
            Err(error)
        }
    }
}

fn provider(verbs: &Verbs) -> Option<String> {
    verbs.memory().provider().map(|provider| provider.addr.to_string())
}

/// Trains as a rank of a synchronous training. Rank 0 prints.
///
/// # Errors
///
/// A rank failed, or something is not available. The message says what to do.
pub fn synchronous(args: &SyncArgs, open_engine: OpenEngine<'_>, json: bool, out: &mut dyn Write) -> Result<()> {
    let settings = args.training.settings();
    let digits = Digits::load();
    settings.check(digits.training.len())?;
    let layout = Layout::new(settings.network().parameters());
    let sizes = Sizes {
        payload: layout.payload(),
        chunk: args.chunk,
        window: args.window,
    };
    sizes.check()?;
    let memory = |ranks| Ok(sizes.memory(ranks));
    let (group, connected) = join(&args.rank, open_engine, memory, args.window + CONTROL)?;
    let Connected {
        placement,
        engine,
        verbs,
        base,
    } = connected;
    let (rank, ranks) = (group.rank(), group.ranks());
    let span = verbs.memory().span().clone();
    let provider = provider(&verbs);
    let prepare = || -> Result<_> {
        let path = args.checkpoint.as_ref().filter(|_| rank == 0);
        let fingerprint = settings.fingerprint(ranks, args.algorithm);
        path.map(|path| Checkpoints::open(path, &span, layout, fingerprint))
            .transpose()
    };
    let checkpoints = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => {
            group.abort(&format!("{error:#}"));
            return Err(error);
        }
    };
    let mut communicator = Communicator::new(
        group,
        verbs,
        engine,
        base,
        sizes,
        // The order of the ring is part of the result, which does not depend on the machines.
        Ring::by_rank(ranks),
        args.rank.timeout,
    )?;
    let mut training = Training {
        settings: &settings,
        digits: &digits,
        algorithm: args.algorithm,
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
    let group = communicator.members();
    let own = RankReport {
        name: group.name(rank).to_owned(),
        nic: placement.nic.name().to_owned(),
        provider,
        engine: Some(communicator.engine().name().to_owned()),
        sent: trained.sent,
        digest: Some(trained.outcome.digest.clone()),
    };
    let rank_reports = group.exchange_values(&own, args.rank.timeout)?;
    for other in &rank_reports {
        ensure!(
            other.digest == own.digest,
            "{} has another result than {}: do all nodes run the same version of p2pmem-training?",
            other.name,
            own.name
        );
    }
    communicator.into_members().leave(args.rank.timeout)?;
    if rank != 0 {
        return Ok(());
    }
    let report = TrainingReport {
        mode: Mode::Synchronous,
        ranks,
        algorithm: Some(args.algorithm.name().into()),
        settings,
        parameters: settings.network().parameters(),
        updates: trained.iterations,
        outcome: trained.outcome,
        staleness: None,
        resumed_at: trained.resumed_at,
        checkpoints: trained.checkpoints,
        seconds,
        rank_reports,
    };
    write_report(&report, json, out)
}

/// Trains as a rank of an asynchronous training. Rank 0 is the server, and prints.
///
/// # Errors
///
/// A rank failed, or something is not available. The message says what to do.
pub fn asynchronous(args: &AsyncArgs, open_engine: OpenEngine<'_>, json: bool, out: &mut dyn Write) -> Result<()> {
    let settings = args.training.settings();
    let digits = Digits::load();
    settings.check(digits.training.len())?;
    let parameters = settings.network().parameters();
    let memory = |ranks: usize| {
        ensure!(
            ranks > 1,
            "a parameter server needs at least one worker: start 2 ranks or more"
        );
        Ok(Places::new(parameters, ranks, args.window).memory())
    };
    let (group, connected) = join(&args.rank, open_engine, memory, args.window + CONTROL)?;
    let Connected {
        placement,
        mut engine,
        mut verbs,
        base,
    } = connected;
    let (rank, ranks) = (group.rank(), group.ranks());
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
        let result = training.serve(&group, &mut verbs, &mut engine, base)?;
        let updates = result.updates;
        served = Some(result);
        updates
    } else {
        training.work(&group, &mut verbs)?
    };
    let seconds = start.elapsed().as_secs_f64();
    let own = RankReport {
        name: group.name(rank).to_owned(),
        nic: placement.nic.name().to_owned(),
        provider,
        engine: engine_name,
        sent: updates * 4 * parameters as u64,
        digest: None,
    };
    // The connections stay until all ranks have ended.
    let rank_reports = group.exchange_values(&own, args.rank.timeout)?;
    group.leave(args.rank.timeout)?;
    let Some(served) = served else { return Ok(()) };
    let report = TrainingReport {
        mode: Mode::Asynchronous,
        ranks,
        algorithm: None,
        settings,
        parameters,
        updates: served.updates,
        outcome: served.outcome,
        staleness: Some(served.staleness),
        resumed_at: None,
        checkpoints: 0,
        seconds,
        rank_reports,
    };
    write_report(&report, json, out)
}

/// Computes and prints the result of a synchronous training.
///
/// # Errors
///
/// The settings are not possible.
pub fn reference(args: &ReferenceArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let settings = args.training.settings();
    let digits = Digits::load();
    let start = Instant::now();
    let outcome: Outcome = reference::train(&settings, &digits, args.ranks, args.algorithm)?;
    let report = TrainingReport {
        mode: Mode::Reference,
        ranks: args.ranks,
        algorithm: Some(args.algorithm.name().into()),
        settings,
        parameters: settings.network().parameters(),
        updates: (digits.training.len() / settings.batch) as u64 * u64::from(settings.epochs),
        outcome,
        staleness: None,
        resumed_at: None,
        checkpoints: 0,
        seconds: start.elapsed().as_secs_f64(),
        rank_reports: Vec::new(),
    };
    write_report(&report, json, out)
}

/// Prints a checkpoint.
///
/// # Errors
///
/// The file cannot be read, or has no valid checkpoint.
pub fn checkpoint(args: &CheckpointArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let header = show(&args.file)?;
    let header = header.with_context(|| format!("{} has no valid checkpoint", args.file.display()))?;
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
