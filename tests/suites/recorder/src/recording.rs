// SPDX-License-Identifier: MIT OR Apache-2.0

//! Records blocks until the LUN is full, says what is acknowledged, and checks what a store has.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_recorder::engine::{PlayEngine, Played, RecordEngine};
use p2pmem_recorder::memory::BlockMemory;
use p2pmem_recorder::store::{Block, ChannelName, Error, LunOptions, Store, StreamOptions, System};
use rustix::event::{PollFd, PollFlags, poll};

use crate::choices::payload;

/// The bytes of a block.
pub const BLOCK: u64 = 64 << 10;
/// The blocks of a segment.
pub const SLOTS: u64 = 8;
/// The bytes of a segment: two pages of headers, and for each block a page of the index and its payload.
pub const SEGMENT: u64 = 8192 + SLOTS * (4096 + BLOCK);
/// The segments on each drive.
pub const SEGMENTS: u64 = 4;

/// Returns the channel of the tests.
pub fn channel() -> ChannelName {
    ChannelName::new("lun", "stream", 0)
}

/// Creates the LUN and the stream of the tests.
///
/// # Errors
///
/// Those of the store.
pub fn create<S: System + Clone>(system: &S, drives: &[PathBuf]) -> Result<()> {
    for drive in drives {
        Store::prepare(system, drive)?;
    }
    let store = Store::open(system.clone(), drives.to_vec())?;
    let options = LunOptions::new(drives.to_vec())
        .segment_size(SEGMENT)
        .segments(SEGMENTS);
    store.create_lun("lun", &options)?;
    store.create_stream("lun", "stream", &StreamOptions::new(BLOCK))?;
    Ok(())
}

/// What happens while a recording is made.
#[derive(Debug)]
pub enum Event<'a> {
    /// The recording has a number. No block was submitted yet.
    Begins(u64),
    /// A block was submitted.
    Submitted(u64),
    /// Blocks are acknowledged.
    Acknowledged(&'a [u64]),
}

/// Records blocks from all buffers, until the LUN is full or `limit` blocks were submitted. Returns the number of the
/// recording.
///
/// # Errors
///
/// A block is not recorded for another reason than a full LUN, a drive failed, or `event` returns an error.
pub fn record<S: System<File = File>>(
    store: &Store<S>,
    memory: &Arc<BlockMemory>,
    salt: u64,
    limit: u64,
    event: &mut dyn FnMut(Event<'_>) -> Result<()>,
) -> Result<u64> {
    let engine = RecordEngine::new(store.writer(&channel(), salt)?, Arc::clone(memory))?;
    record_by(engine, salt, limit, event)
}

/// As [`record`], with an engine of the caller.
///
/// # Errors
///
/// Those of [`record`].
pub fn record_by<S: System<File = File>>(
    mut engine: RecordEngine<S>,
    salt: u64,
    limit: u64,
    event: &mut dyn FnMut(Event<'_>) -> Result<()>,
) -> Result<u64> {
    let memory = Arc::clone(engine.memory());
    let recording = engine.recording();
    event(Event::Begins(recording))?;
    let mut free: Vec<usize> = (0..memory.count()).rev().collect();
    let mut next = 0;
    let mut full = false;
    loop {
        while let Some(buffer) = (!full && next < limit).then(|| free.pop()).flatten() {
            let bytes = payload(salt, next, memory.block_size());
            memory.write(buffer, 0, &bytes)?;
            let block = Block {
                sequence: next,
                time: salt,
                checksum: crc32c::crc32c(&bytes),
            };
            match engine.submit(buffer, block) {
                Ok(()) => event(Event::Submitted(next))?,
                Err(Error::Full { .. }) => {
                    full = true;
                    free.push(buffer);
                }
                Err(error) => bail!(error),
            }
            next += 1;
        }
        if engine.in_flight() == 0 {
            break;
        }
        poll(&mut [PollFd::new(&engine, PollFlags::IN)], None)?;
        let progress = engine.progress();
        if let Some(failure) = progress.failures.first() {
            bail!("{} failed: {}", failure.drive.display(), failure.error);
        }
        if let Some(lost) = progress.not_recorded.first() {
            bail!("block {} is not recorded: {}", lost.block.sequence, lost.error);
        }
        free.extend(progress.acknowledged.iter().map(|done| done.buffer));
        let sequences: Vec<u64> = progress.acknowledged.iter().map(|done| done.sequence).collect();
        if !sequences.is_empty() {
            event(Event::Acknowledged(&sequences))?;
        }
    }
    engine.finish().1?;
    Ok(recording)
}

/// What was promised of a recording.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Promise {
    /// The salt of its payload.
    pub salt: u64,
    /// The blocks that were acknowledged.
    pub acknowledged: BTreeSet<u64>,
    /// Its deletion began: it may be there completely or not at all.
    pub deleting: bool,
}

/// What a process said, as lines: `recording NUMBER SALT`, `ack NUMBER SEQUENCE...`, `deleting NUMBER`, `deleted NUMBER`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Promises {
    /// The recordings that exist.
    pub recordings: BTreeMap<u64, Promise>,
    /// Whether other recordings may exist.
    pub others: bool,
}

impl Promises {
    /// Adds a line.
    ///
    /// # Errors
    ///
    /// The line is none of these.
    pub fn line(&mut self, line: &str) -> Result<()> {
        let mut words = line.split(' ');
        let verb = words.next().unwrap_or_default();
        let numbers: Vec<u64> = words
            .map(|word| word.parse().with_context(|| format!("the line {line:?}")))
            .collect::<Result<_>>()?;
        let (&number, rest) = numbers.split_first().with_context(|| format!("the line {line:?}"))?;
        match (verb, rest) {
            ("recording", &[salt]) => {
                let promise = Promise {
                    salt,
                    ..Promise::default()
                };
                self.recordings.insert(number, promise);
            }
            ("ack", sequences) => {
                let promise = self.recordings.get_mut(&number);
                let promise = promise.with_context(|| format!("{line:?} of a recording that did not begin"))?;
                promise.acknowledged.extend(sequences);
            }
            ("deleting", []) => self.recordings.entry(number).or_default().deleting = true,
            ("deleted", []) => drop(self.recordings.remove(&number)),
            _ => bail!("the line {line:?}"),
        }
        Ok(())
    }

    /// Returns what a text promises. Its last line counts only if it is complete.
    ///
    /// # Errors
    ///
    /// Those of [`line`](Self::line).
    pub fn of(text: &str) -> Result<Self> {
        let mut promises = Self::default();
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        for line in complete.lines() {
            promises.line(line)?;
        }
        Ok(promises)
    }
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Checked {
    /// The number of blocks that were acknowledged.
    pub acknowledged: u64,
    /// The number of blocks that the store presents.
    pub presented: u64,
    /// The blocks that were acknowledged and are not there.
    pub lost: Vec<String>,
    /// The blocks that the store presents and whose payload is not what was recorded.
    pub torn: Vec<String>,
    /// Anything else.
    pub problems: Vec<String>,
}

impl Checked {
    /// Whether nothing is wrong.
    pub fn is_good(&self) -> bool {
        self.lost.is_empty() && self.torn.is_empty() && self.problems.is_empty()
    }

    /// Adds what another check found.
    pub fn add(&mut self, other: Checked) {
        self.acknowledged += other.acknowledged;
        self.presented += other.presented;
        self.lost.extend(other.lost);
        self.torn.extend(other.torn);
        self.problems.extend(other.problems);
    }
}

/// What the checks found of a recorder that is broken on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// The number of power cuts until a check found it.
    pub cuts: u64,
    /// The number of lost blocks.
    pub lost: usize,
    /// The number of torn blocks.
    pub torn: usize,
}

impl Finding {
    /// Evaluates the checks after a number of power cuts.
    ///
    /// # Errors
    ///
    /// No block was lost or torn, so the checks did not find the broken recorder.
    pub fn new(cuts: u64, checked: &Checked) -> Result<Self> {
        let (lost, torn) = (checked.lost.len(), checked.torn.len());
        ensure!(lost + torn > 0, "no block was lost or torn in {cuts} cuts: {checked:?}");
        Ok(Self { cuts, lost, torn })
    }
}

/// Checks a store after a crash. Reads all blocks that it presents.
///
/// # Errors
///
/// The store cannot list its recordings, or the host has no memory.
pub fn check<S: System<File = File>>(store: &Store<S>, promises: &Promises) -> Result<Checked> {
    let mut checked = Checked::default();
    let problems = store.problems().iter().map(|problem| format!("{problem:?}"));
    checked.problems.extend(problems);
    let found: BTreeMap<u64, u64> = store
        .recordings(&channel())?
        .into_iter()
        .map(|recording| (recording.number, recording.started))
        .collect();
    for (number, promise) in &promises.recordings {
        // A recording without an acknowledged block may be gone, and so may one whose deletion began.
        if !found.contains_key(number) {
            if !promise.deleting {
                let lost = promise
                    .acknowledged
                    .iter()
                    .map(|sequence| format!("{number}/{sequence}"));
                checked.acknowledged += promise.acknowledged.len() as u64;
                checked.lost.extend(lost);
            }
            continue;
        }
        checked.acknowledged += promise.acknowledged.len() as u64;
        let reader = store.reader(&channel(), *number)?;
        let missing = promise
            .acknowledged
            .iter()
            .filter(|sequence| reader.block(**sequence).is_none());
        checked
            .lost
            .extend(missing.map(|sequence| format!("{number}/{sequence}")));
    }
    for (number, started) in found {
        // A recording has its salt as the time of its start.
        let salt = match promises.recordings.get(&number) {
            Some(promise) => promise.salt,
            None if promises.others => started,
            None => {
                let problem = format!("recording {number} was deleted or never began");
                checked.problems.push(problem);
                continue;
            }
        };
        let torn = torn(store, number, salt, &mut checked.presented)?;
        checked.torn.extend(torn);
    }
    Ok(checked)
}

/// Returns the blocks of a recording whose payload is not that of its salt.
fn torn<S: System<File = File>>(store: &Store<S>, number: u64, salt: u64, presented: &mut u64) -> Result<Vec<String>> {
    let memory = Arc::new(BlockMemory::host(BLOCK, 4)?);
    let mut player = PlayEngine::new(store.reader(&channel(), number)?, Arc::clone(&memory))?;
    let blocks = player.reader().blocks();
    *presented += blocks.len() as u64;
    let mut torn = Vec::new();
    for group in blocks.chunks(memory.count()) {
        for (buffer, block) in group.iter().enumerate() {
            player.fetch(buffer, block.sequence)?;
        }
        let mut played = 0;
        while played < group.len() {
            poll(&mut [PollFd::new(&player, PollFlags::IN)], None)?;
            for Played {
                buffer, block, result, ..
            } in player.progress()
            {
                played += 1;
                let name = format!("{number}/{}", block.sequence);
                if let Err(error) = result {
                    torn.push(format!("{name} ({error})"));
                    continue;
                }
                let expected = crc32c::crc32c(&payload(salt, block.sequence, memory.block_size()));
                if block.time != salt || block.checksum != expected || memory.checksum(buffer)? != expected {
                    torn.push(name);
                }
            }
        }
    }
    ensure!(player.in_flight() == 0, "the player has blocks that nobody fetched");
    Ok(torn)
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem_recorder::store::Files;
    use std::os::unix::fs::FileExt;

    const SAID: &str = "recording 0 7\nack 0 1 2\nrecording 1 8\nack 1 0\ndeleting 0\n";

    #[test]
    fn promises_are_what_complete_lines_say() {
        let promises = Promises::of(&format!("{SAID}deleted 0\nack 1 5\nack 1 6")).unwrap();
        let promise = Promise {
            salt: 8,
            acknowledged: BTreeSet::from([0, 5]),
            deleting: false,
        };
        assert_eq!(promises.recordings, BTreeMap::from([(1, promise)]));
        let promises = Promises::of(SAID).unwrap();
        assert!(promises.recordings[&0].deleting && !promises.recordings[&1].deleting);
        assert_eq!(Promises::of("ack").unwrap(), Promises::default());
        for bad in ["ack 3 1\n", "recording 1\n", "nonsense 1\n", "ack x\n", "\n\n", "ack\n"] {
            assert!(Promises::of(bad).is_err(), "{bad:?}");
        }
    }

    /// Records on two folders, and returns them with what was promised.
    fn recorded() -> (tempfile::TempDir, Vec<PathBuf>, Promises) {
        let folder = tempfile::tempdir().unwrap();
        let drives: Vec<PathBuf> = ["a", "b"].iter().map(|name| folder.path().join(name)).collect();
        drives.iter().for_each(|drive| std::fs::create_dir(drive).unwrap());
        let files = Files::new().cached(true);
        create(&files, &drives).unwrap();
        let store = Store::open(files, drives.clone()).unwrap();
        let memory = Arc::new(BlockMemory::host(BLOCK, 5).unwrap());
        let mut promises = Promises::default();
        let mut number = 0;
        let mut event = |event: Event<'_>| match event {
            Event::Begins(recording) => {
                number = recording;
                promises.line(&format!("recording {recording} 9"))
            }
            Event::Submitted(_) => Ok(()),
            Event::Acknowledged(sequences) => sequences
                .iter()
                .try_for_each(|sequence| promises.line(&format!("ack {number} {sequence}"))),
        };
        record(&store, &memory, 9, u64::MAX, &mut event).unwrap();
        assert_eq!(
            promises.recordings[&number].acknowledged.len() as u64,
            2 * SEGMENTS * SLOTS
        );
        (folder, drives, promises)
    }

    fn checked(drives: &[PathBuf], promises: &Promises) -> Checked {
        let store = Store::open(Files::new().cached(true), drives.to_vec()).unwrap();
        check(&store, promises).unwrap()
    }

    #[test]
    fn recording_that_is_complete_is_good() {
        let (_folder, drives, promises) = recorded();
        let checked = checked(&drives, &promises);
        assert!(checked.is_good(), "{checked:?}");
        assert_eq!((checked.acknowledged, checked.presented), (64, 64));
    }

    #[test]
    fn broken_recorder_is_found_by_lost_and_torn_blocks() {
        let checked = |lost: &[&str], torn: &[&str]| Checked {
            lost: lost.iter().map(ToString::to_string).collect(),
            torn: torn.iter().map(ToString::to_string).collect(),
            problems: vec!["a file is missing".into()],
            ..Checked::default()
        };
        let finding = |cuts, lost, torn| Finding { cuts, lost, torn };
        let found = |lost: &[&str], torn: &[&str]| Finding::new(3, &checked(lost, torn));
        assert_eq!(found(&["0/1", "0/2"], &[]).unwrap(), finding(3, 2, 0));
        assert_eq!(found(&[], &["0/1"]).unwrap(), finding(3, 0, 1));
        let error = found(&[], &[]).unwrap_err().to_string();
        assert!(error.contains("no block was lost or torn in 3 cuts"), "{error}");
    }

    #[test]
    fn lost_torn_and_unexpected_blocks_are_found() {
        let (_folder, drives, promises) = recorded();
        let mut more = promises.clone();
        more.line("ack 0 1000").unwrap();
        more.line("recording 5 1").unwrap();
        more.line("ack 5 3").unwrap();
        assert_eq!(checked(&drives, &more).lost, ["0/1000", "5/3"]);
        assert_eq!(checked(&drives, &Promises::default()).problems.len(), 1);
        let others = Promises {
            others: true,
            ..Promises::default()
        };
        assert!(checked(&drives, &others).is_good());
        let mut other = promises.clone();
        other.recordings.get_mut(&0).unwrap().salt = 10;
        assert_eq!(checked(&drives, &other).torn.len(), 64);

        let store = Store::open(Files::new().cached(true), drives.clone()).unwrap();
        let mut reader = store.reader(&channel(), 0).unwrap();
        let place = reader.locate(17).unwrap();
        place.file.write_all_at(&[0; 512], place.offset + 512).unwrap();
        drop((place, reader, store));
        let damaged = checked(&drives, &promises);
        assert_eq!((damaged.torn, damaged.lost.len()), (vec!["0/17".to_owned()], 0));
    }
}
