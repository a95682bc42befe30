// SPDX-License-Identifier: MIT OR Apache-2.0

//! Crashes of a recorder on ext4 in a guest, and the requests that recording makes to a drive. Prints its results as a line
//! of JSON after `recorder-report: `, and exits with 1 if a block is lost or torn.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use p2pmem::{Client, Device};
use p2pmem_recorder::engine::{RecordEngine, Ring};
use p2pmem_recorder::memory::{BlockMemory, drives_of};
use p2pmem_recorder::store::{Block, Files, Store, System};
use p2pmem_recorder_suite::choices::Choices;
use p2pmem_recorder_suite::cut::{image, moment};
use p2pmem_recorder_suite::guest::{
    Create, Logged, Loop, Mounted, OtherFiles, Requests, make_ext4, make_xfs, run, traced, write_image,
};
use p2pmem_recorder_suite::log::Log;
use p2pmem_recorder_suite::marks::{Mark, PAGE};
use p2pmem_recorder_suite::recording::{
    BLOCK, Checked, Event, Finding, Promise, Promises, channel, check, create, record, record_by,
};
use serde_json::json;

/// The bytes of the file system on each drive.
const SPACE: u64 = 16 << 20;
/// The buffers for blocks, and so the blocks in flight.
const BUFFERS: usize = 5;
/// The file on each drive that has the last mark.
const MARKS: &str = "marks";

/// Crashes a recorder, and checks what remains
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Record until the end of the process, and print what is acknowledged
    Record {
        /// Seed of the payload
        #[arg(long)]
        seed: u64,
        /// Folders of the drives
        #[arg(required = true)]
        folders: Vec<PathBuf>,
    },
    /// Kill a recording process at random moments, and check after each
    Kill {
        #[command(flatten)]
        rounds: Rounds,
    },
    /// Check what an earlier run left, and record until the end of the machine
    Machine {
        /// Make the file systems before, in the first run
        #[arg(long)]
        first: bool,
        /// End after the check
        #[arg(long)]
        last: bool,
        /// Seed of the payload
        #[arg(long)]
        seed: u64,
        /// Drives, whose content is overwritten
        #[arg(required = true)]
        drives: Vec<PathBuf>,
    },
    /// Record once, and check what remains after power cuts at random moments
    Cut {
        #[command(flatten)]
        rounds: Rounds,
        /// Open files without O_DSYNC, and flush payload when it is committed
        #[arg(long)]
        flush_at_commit: bool,
        /// Break the recorder, and expect that a check finds it
        #[arg(long)]
        broken: Option<Broken>,
    },
    /// Count the requests to a drive for each block
    Count {
        /// File system of the drive
        #[arg(long, value_enum, default_value_t = FileSystem::Ext4)]
        file_system: FileSystem,
        /// The drive
        drive: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FileSystem {
    Ext4,
    Xfs,
}

#[derive(clap::Args)]
struct Rounds {
    /// Number of crashes
    #[arg(long)]
    rounds: u64,
    /// Seed of all choices
    #[arg(long)]
    seed: u64,
    /// Drives, whose content is overwritten
    #[arg(required = true)]
    drives: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Broken {
    /// Acknowledges blocks when they are submitted
    Early,
    /// Never flushes payload and index from the drive's cache
    Volatile,
}

fn main() -> Result<()> {
    match Cli::parse().verb {
        Verb::Record { seed, folders } => record_forever(seed, &folders),
        Verb::Kill { rounds } => kill(&rounds),
        Verb::Cut {
            rounds,
            flush_at_commit,
            broken,
        } => cut(&rounds, flush_at_commit, broken),
        Verb::Machine {
            first,
            last,
            seed,
            drives,
        } => machine(first, last, seed, &drives),
        Verb::Count { file_system, drive } => count(file_system, &drive),
    }
}

/// Prints a part of the report. Fails if a check found something.
fn report(kind: &str, rounds: &Rounds, count: u64, checked: &Checked) -> Result<()> {
    let report = json!({ kind: {
        "rounds": count,
        "seed": rounds.seed,
        "acknowledged": checked.acknowledged,
        "presented": checked.presented,
        "lost": checked.lost.len(),
        "torn": checked.torn.len(),
    }});
    println!("recorder-report: {report}");
    ensure!(checked.is_good(), "{kind}, seed {}: {checked:#?}", rounds.seed);
    Ok(())
}

/// Returns the folders in which the drives are mounted.
fn folders(drives: &[PathBuf]) -> Vec<PathBuf> {
    (0..drives.len())
        .map(|number| PathBuf::from(format!("/run/recorder/{number}")))
        .collect()
}

fn mount_all<'a>(drives: impl IntoIterator<Item = &'a Path>, folders: &[PathBuf]) -> Result<Vec<Mounted>> {
    let pairs = drives.into_iter().zip(folders);
    pairs
        .map(|(drive, folder)| Mounted::new("ext4", drive, folder, ""))
        .collect()
}

fn unmount_all(mounts: Vec<Mounted>) -> Result<()> {
    mounts.into_iter().try_for_each(Mounted::unmount)
}

/// Makes file systems with a LUN whose segments have content of an earlier, deleted recording.
fn make(drives: &[PathBuf], folders: &[PathBuf]) -> Result<()> {
    run("modprobe", &["-a", "ext4", "loop", "dm_log_writes"])?;
    for drive in drives {
        make_ext4(drive, SPACE)?;
    }
    let mounts = mount_all(drives.iter().map(PathBuf::as_path), folders)?;
    let files = Files::new();
    create(&files, folders)?;
    for folder in folders {
        files.create_file(&folder.join(MARKS), PAGE as u64)?;
    }
    let store = Store::open(files, folders.to_vec())?;
    let memory = Arc::new(BlockMemory::host(BLOCK, BUFFERS)?);
    let old = record(&store, &memory, 1, u64::MAX, &mut |_| Ok(()))?;
    store.delete_recording(&channel(), old)?;
    drop(store);
    unmount_all(mounts)
}

/// Allocates device memory for blocks near the drives of the folders.
fn near(folders: &[PathBuf], count: usize) -> Result<Arc<BlockMemory>> {
    let mut clients: Vec<Client> = Vec::new();
    for folder in folders {
        clients.extend(drives_of(folder)?);
    }
    let memory = BlockMemory::near(&Device::open()?, clients, None, BLOCK, count)?;
    ensure!(memory.buffer().is_some(), "the memory is not a device's");
    Ok(Arc::new(memory))
}

/// Records from device memory, until the process is killed. Each recording fills the LUN, and is deleted then.
fn record_forever(seed: u64, folders: &[PathBuf]) -> Result<()> {
    let store = Store::open(Files::new(), folders.to_vec())?;
    let delete = |number| {
        println!("deleting {number}");
        store.delete_recording(&channel(), number)?;
        println!("deleted {number}");
        Ok::<_, anyhow::Error>(())
    };
    for old in store.recordings(&channel())? {
        delete(old.number)?;
    }
    let memory = near(folders, BUFFERS)?;
    for count in 0.. {
        let salt = seed.wrapping_add(count);
        let mut number = 0;
        let recording = record(&store, &memory, salt, u64::MAX, &mut |event| {
            match event {
                Event::Begins(recording) => {
                    number = recording;
                    println!("recording {number} {salt}");
                }
                Event::Submitted(_) => {}
                Event::Acknowledged(sequences) => {
                    let list: Vec<String> = sequences.iter().map(u64::to_string).collect();
                    println!("ack {number} {}", list.join(" "));
                }
            }
            Ok(())
        })?;
        delete(recording)?;
    }
    Ok(())
}

/// Kills a process after a number of its lines and a time. Without the time, it would always be at the same place, where it has
/// just written a line.
fn killed_after(lines: u64, time: Duration, seed: u64, folders: &[PathBuf], promises: &mut Promises) -> Result<()> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["record", "--seed", &seed.to_string()])
        .args(folders)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut output = BufReader::new(child.stdout.take().context("the output of the process")?);
    let mut line = String::new();
    let mut count = 0;
    // After the kill the pipe still has lines, which count.
    while output.read_line(&mut line)? > 0 && line.ends_with('\n') {
        promises.line(line.trim_end())?;
        line.clear();
        count += 1;
        if count == lines {
            thread::sleep(time);
            child.kill()?;
        }
    }
    let status = child.wait()?;
    ensure!(
        count >= lines,
        "the process ended by itself after {count} lines: {status}"
    );
    Ok(())
}

fn kill(rounds: &Rounds) -> Result<()> {
    let folders = folders(&rounds.drives);
    make(&rounds.drives, &folders)?;
    let mounts = mount_all(rounds.drives.iter().map(PathBuf::as_path), &folders)?;
    let mut choices = Choices::new(rounds.seed);
    let mut promises = Promises::default();
    let mut all = Checked::default();
    let mut done = 0;
    while done < rounds.rounds && all.is_good() {
        let lines = 1 + choices.below(120);
        let time = Duration::from_micros(choices.below(50_000));
        killed_after(
            lines,
            time,
            rounds.seed.wrapping_add(done * 1000),
            &folders,
            &mut promises,
        )?;
        done += 1;
        let store = Store::open(Files::new(), folders.clone())?;
        all.add(check(&store, &promises)?);
    }
    unmount_all(mounts)?;
    report("process_killed", rounds, done, &all)
}

/// Writes marks of what is acknowledged to a file on each drive.
struct Marker {
    files: Vec<File>,
    mark: Mark,
}

impl Marker {
    fn open(folders: &[PathBuf], salt: u64) -> Result<Self> {
        let files = folders.iter().map(|folder| Files::new().open(&folder.join(MARKS)));
        Ok(Self {
            files: files.collect::<std::io::Result<_>>()?,
            mark: Mark {
                salt,
                ..Mark::default()
            },
        })
    }

    fn event(&mut self, event: Event<'_>) -> Result<()> {
        match event {
            Event::Begins(recording) => {
                self.mark.recording = recording;
                self.mark.acknowledged.clear();
            }
            Event::Submitted(_) => return Ok(()),
            Event::Acknowledged(sequences) => self.mark.acknowledged.extend(sequences),
        }
        self.write()
    }

    fn write(&mut self) -> Result<()> {
        for file in &self.files {
            Files::new().write_durable(file, 0, &self.mark.encode())?;
        }
        self.mark.number += 1;
        Ok(())
    }
}

/// Returns what a mark promises.
fn promised(mark: &Mark) -> Promises {
    let promise = Promise {
        salt: mark.salt,
        acknowledged: mark.acknowledged.clone(),
        deleting: false,
    };
    Promises {
        recordings: [(mark.recording, promise)].into(),
        others: false,
    }
}

/// A recording whose writes are logged.
struct Logs {
    bases: Vec<Vec<u8>>,
    logs: Vec<Log>,
}

/// Records on drives whose writes are logged, with marks of what is acknowledged.
fn record_logged(rounds: &Rounds, folders: &[PathBuf], files: OtherFiles, broken: Option<Broken>) -> Result<Logs> {
    make(&rounds.drives, folders)?;
    let mut bases = Vec::new();
    let mut devices = Vec::new();
    for (number, drive) in rounds.drives.iter().enumerate() {
        let mut base = vec![0; SPACE as usize];
        std::io::Read::read_exact(&mut File::open(drive)?, &mut base)?;
        bases.push(base);
        let log = PathBuf::from(format!("/run/recorder/log{number}"));
        devices.push(Logged::create(&format!("recorder{number}"), drive, SPACE, &log)?);
    }
    let mounts = mount_all(devices.iter().map(Logged::device), folders)?;
    let store = Store::open(files, folders.to_vec())?;
    // Device mapper does not accept device memory.
    let memory = Arc::new(BlockMemory::host(BLOCK, BUFFERS)?);
    let mut marker = Marker::open(folders, rounds.seed)?;
    record(&store, &memory, rounds.seed, u64::MAX, &mut |event| match event {
        Event::Submitted(sequence) if broken == Some(Broken::Early) => marker.event(Event::Acknowledged(&[sequence])),
        event => marker.event(event),
    })?;
    drop((store, marker));
    unmount_all(mounts)?;
    let logs = devices.into_iter().map(|device| Log::parse(device.remove()?));
    Ok(Logs {
        bases,
        logs: logs.collect::<Result<_>>()?,
    })
}

/// Checks what remains after one power cut.
fn check_cut(logs: &Logs, folders: &[PathBuf], choices: &mut Choices) -> Result<Checked> {
    let all: Vec<&Log> = logs.logs.iter().collect();
    let moment = moment(&all, choices)?;
    let mut loops = Vec::new();
    for (number, ((base, log), at)) in logs.bases.iter().zip(&all).zip(&moment.at).enumerate() {
        let path = PathBuf::from(format!("/run/recorder/image{number}"));
        write_image(&path, &image(base, log, *at, choices)?)?;
        loops.push(Loop::attach(&path)?);
    }
    let mounts = mount_all(loops.iter().map(Loop::device), folders)?;
    let promises = promised(&moment.mark);
    let checked = match Store::open(Files::new(), folders.to_vec()) {
        Ok(store) => check(&store, &promises)?,
        Err(error) => Checked {
            problems: vec![error.to_string()],
            ..Checked::default()
        },
    };
    unmount_all(mounts)?;
    Ok(checked)
}

fn cut(rounds: &Rounds, flush_at_commit: bool, broken: Option<Broken>) -> Result<()> {
    let folders = folders(&rounds.drives);
    let files = OtherFiles::new()
        .flush_at_commit(flush_at_commit)
        .volatile(broken == Some(Broken::Volatile));
    let logs = record_logged(rounds, &folders, files, broken)?;
    let mut choices = Choices::new(rounds.seed);
    let mut all = Checked::default();
    let mut done = 0;
    while done < rounds.rounds && all.is_good() {
        done += 1;
        all.add(check_cut(&logs, &folders, &mut choices)?);
    }
    let Some(broken) = broken else {
        let kind = if flush_at_commit {
            "power_cut_flush_at_commit"
        } else {
            "power_cut"
        };
        return report(kind, rounds, done, &all);
    };
    let kind = match broken {
        Broken::Early => "broken_recorder_early",
        Broken::Volatile => "broken_recorder_volatile",
    };
    let found = Finding::new(done, &all).with_context(|| format!("{kind}, seed {}", rounds.seed))?;
    println!("recorder-report: {}", json!({ kind: found }));
    Ok(())
}

/// Returns the last mark that a drive has.
fn last_mark(folders: &[PathBuf]) -> Result<Option<Mark>> {
    let mut marks = Vec::new();
    for folder in folders {
        marks.extend(Mark::decode(&fs::read(folder.join(MARKS))?));
    }
    Ok(marks.into_iter().max_by_key(|mark| mark.number))
}

/// Checks what the drives have, and records from device memory until the machine is killed. The output can lag behind, so
/// the drives have marks of what is acknowledged.
fn machine(first: bool, last: bool, seed: u64, drives: &[PathBuf]) -> Result<()> {
    let folders = folders(drives);
    if first {
        make(drives, &folders)?;
    } else {
        run("modprobe", &["ext4"])?;
    }
    let mounts = mount_all(drives.iter().map(PathBuf::as_path), &folders)?;
    let store = Store::open(Files::new(), folders.clone())?;
    let mut marker = Marker::open(&folders, seed)?;
    if let Some(mark) = last_mark(&folders)? {
        let mut promises = promised(&mark);
        promises.others = true;
        let checked = check(&store, &promises)?;
        println!("checked: {}", serde_json::to_string(&checked)?);
        marker.mark.number = mark.number + 1;
    }
    if last {
        drop((store, marker));
        return unmount_all(mounts);
    }
    let memory = near(&folders, BUFFERS)?;
    for count in 0.. {
        // From here on nothing is promised, so that recordings can be deleted.
        marker.mark.acknowledged.clear();
        marker.mark.recording = u64::MAX;
        marker.mark.salt = seed.wrapping_add(count);
        marker.write()?;
        for old in store.recordings(&channel())? {
            store.delete_recording(&channel(), old.number)?;
        }
        record(&store, &memory, marker.mark.salt, u64::MAX, &mut |event| {
            marker.event(event)?;
            println!("{}", marker.mark.acknowledged.len());
            Ok(())
        })?;
    }
    Ok(())
}

/// The blocks that are counted, and those before, which set up the inode.
const COUNTED: u64 = 6;
const BEFORE: u64 = 2;

fn count(file_system: FileSystem, drive: &Path) -> Result<()> {
    // The journal's own commits, which come by time, are not counted.
    let (kind, options) = match file_system {
        FileSystem::Ext4 => ("ext4", "commit=3600"),
        FileSystem::Xfs => ("xfs", ""),
    };
    run("modprobe", &[kind])?;
    let folder = PathBuf::from("/run/recorder/0");
    let mut report = serde_json::Map::new();
    for (name, how) in [
        ("zeroed", Create::Zeroed),
        ("allocated", Create::Allocated),
        ("sparse", Create::Sparse),
    ] {
        match file_system {
            FileSystem::Ext4 => make_ext4(drive, SPACE)?,
            FileSystem::Xfs => make_xfs(drive)?,
        }
        let mounted = Mounted::new(kind, drive, &folder, options)?;
        let files = OtherFiles::new().create(how);
        let folders = vec![folder.clone()];
        create(&files, &folders)?;
        let store = Store::open(files, folders.clone())?;
        // One buffer, so that each block is committed alone.
        let memory = near(&folders, 1)?;
        let requests = count_blocks(&store, &memory, drive)?;
        if how == Create::Zeroed {
            started_by_workers(&store, &near(&folders, BUFFERS)?, drive)?;
        }
        drop(store);
        mounted.unmount()?;
        report.insert(name.to_owned(), json!({ "blocks": COUNTED, "requests": requests }));
    }
    println!("recorder-report: {}", json!({ format!("requests_of_{kind}"): report }));
    Ok(())
}

/// Records from device memory by the threads of io_uring's pool, and checks each block.
fn started_by_workers(store: &Store<OtherFiles>, memory: &Arc<BlockMemory>, drive: &Path) -> Result<()> {
    for old in store.recordings(&channel())? {
        store.delete_recording(&channel(), old.number)?;
    }
    let (salt, blocks) = (77, 10);
    let ring = Ring::new(BUFFERS)?.in_worker(true);
    let engine = RecordEngine::with_queue(store.writer(&channel(), salt)?, Arc::clone(memory), ring)?;
    let mut mark = Mark {
        salt,
        ..Mark::default()
    };
    let (recording, requests) = traced(drive, || {
        record_by(engine, salt, blocks, &mut |event| {
            if let Event::Acknowledged(sequences) = event {
                mark.acknowledged.extend(sequences);
            }
            Ok(())
        })
    })?;
    mark.recording = recording;
    let checked = check(store, &promised(&mark))?;
    ensure!(
        checked.is_good() && checked.acknowledged == blocks && requests.workers >= blocks,
        "blocks that the threads of io_uring's pool wrote: {checked:#?}, {requests:?}"
    );
    Ok(())
}

/// Counts the requests of blocks in the middle of a segment.
fn count_blocks<S: System<File = File>>(store: &Store<S>, memory: &Arc<BlockMemory>, drive: &Path) -> Result<Requests> {
    let mut engine = RecordEngine::new(store.writer(&channel(), 0)?, Arc::clone(memory))?;
    let mut blocks = |range: std::ops::Range<u64>| {
        for sequence in range {
            engine.submit(
                0,
                Block {
                    sequence,
                    time: 0,
                    checksum: 0,
                },
            )?;
            let (progress, result) = engine.drain();
            result?;
            ensure!(progress.acknowledged.len() == 1, "{progress:?}");
        }
        Ok(())
    };
    blocks(0..BEFORE)?;
    let ((), requests) = traced(drive, || blocks(BEFORE..BEFORE + COUNTED))?;
    engine.finish().1?;
    Ok(requests)
}
