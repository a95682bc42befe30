// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the engines: with io_uring on files, and with simulated drives that fail or lose power at every operation.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags};

use super::*;
use crate::memory::BlockMemory;
use crate::store::tests::simulated::{Bugs, Choices, Fault, Simulated, SimulatedFile, EIO};
use crate::store::tests::times;
use crate::store::{Block, ChannelName, Entry, Error, Files, LunOptions, Store, StreamOptions, System};

const BLOCK: u64 = 8192;

/// Files whose payload cannot be written on a drive that is broken: they are open for reading only.
#[derive(Clone)]
pub(crate) struct Breaking {
    files: Files,
    broken: PathBuf,
    /// Whether the drive is broken.
    pub(crate) is_broken: Arc<AtomicBool>,
}

impl Breaking {
    /// Returns files with a drive that can break.
    pub(crate) fn new(broken: &Path) -> Self {
        Self {
            files: Files::new().cached(true),
            broken: broken.to_owned(),
            is_broken: Arc::default(),
        }
    }
}

impl System for Breaking {
    type File = File;
    type Lock = File;

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.files.create_folder(path)
    }

    fn create_file(&self, path: &Path, size: u64) -> io::Result<()> {
        self.files.create_file(path, size)
    }

    fn open(&self, path: &Path) -> io::Result<File> {
        if self.is_broken.load(Ordering::SeqCst) && path.starts_with(&self.broken) {
            return File::open(path);
        }
        self.files.open(path)
    }

    fn size(&self, file: &File) -> io::Result<u64> {
        self.files.size(file)
    }

    fn write_durable(&self, file: &File, offset: u64, pages: &[u8]) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.files
            .write_durable(&self.files.open(Path::new(&path))?, offset, pages)
    }

    fn read(&self, file: &File, offset: u64, pages: &mut [u8]) -> io::Result<()> {
        self.files.read(file, offset, pages)
    }

    fn flush(&self, file: &File) -> io::Result<()> {
        self.files.flush(file)
    }

    fn payload_needs_flush(&self) -> bool {
        false
    }

    fn list(&self, folder: &Path) -> io::Result<Vec<Entry>> {
        self.files.list(folder)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.files.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.files.remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.files.remove_folder(path)
    }

    fn sync_folder(&self, folder: &Path) -> io::Result<()> {
        self.files.sync_folder(folder)
    }

    fn lock(&self, path: &Path) -> io::Result<File> {
        self.files.lock(path)
    }

    fn random(&self) -> io::Result<u64> {
        self.files.random()
    }
}

fn channel() -> ChannelName {
    ChannelName::new("lun", "stream", 0)
}

/// Creates a LUN whose segments have two slots, and a stream.
fn create<S: System + Clone>(system: &S, drives: &[PathBuf], segments: u64) -> Store<S> {
    for drive in drives {
        Store::prepare(system, drive).unwrap();
    }
    let store = Store::open(system.clone(), drives.to_vec()).unwrap();
    let options = LunOptions::new(drives.to_vec())
        .segment_size(8 * 4096)
        .segments(segments);
    store.create_lun("lun", &options).unwrap();
    store
        .create_stream("lun", "stream", &StreamOptions::new(BLOCK))
        .unwrap();
    store
}

fn drives(folder: &tempfile::TempDir, count: usize) -> Vec<PathBuf> {
    let drives: Vec<PathBuf> = (0..count)
        .map(|drive| folder.path().join(format!("drive{drive}")))
        .collect();
    drives.iter().for_each(|drive| std::fs::create_dir(drive).unwrap());
    drives
}

/// Fills a buffer with the payload of a block.
fn fill(memory: &BlockMemory, buffer: usize, sequence: u64) -> Block {
    let mut choices = Choices::new(sequence + 1);
    let bytes: Vec<u8> = (0..BLOCK / 8)
        .flat_map(|_| choices.next(u64::MAX).to_le_bytes())
        .collect();
    memory.write(buffer, 0, &bytes).unwrap();
    Block {
        sequence,
        time: 1000 + sequence,
        checksum: memory.checksum(buffer).unwrap(),
    }
}

/// Records blocks one after the other from all buffers, until each block has a result. Polls the file descriptor.
fn record<S: System<File = File>>(engine: &mut RecordEngine<S>, sequences: std::ops::Range<u64>) -> Progress {
    let memory = Arc::clone(engine.memory());
    let mut free: Vec<usize> = (0..memory.count()).collect();
    let mut next = sequences.start;
    let mut all = Progress::default();
    let total = (sequences.end - sequences.start) as usize;
    let mut refused = 0;
    while all.acknowledged.len() + all.not_recorded.len() + refused < total {
        while next < sequences.end && !free.is_empty() {
            let buffer = free.pop().unwrap();
            let block = fill(&memory, buffer, next);
            if let Err(error) = engine.submit(buffer, block) {
                assert!(
                    matches!(error, Error::Full { .. } | Error::DrivesFailed { .. }),
                    "{error}"
                );
                refused += 1;
                free.push(buffer);
            }
            next += 1;
        }
        if engine.in_flight() > 0 {
            poll(&mut [PollFd::new(engine, PollFlags::IN)], None).unwrap();
        }
        let mut progress = engine.progress();
        free.extend(progress.acknowledged.iter().map(|done| done.buffer));
        free.extend(progress.not_recorded.iter().map(|lost| lost.buffer));
        all.acknowledged.append(&mut progress.acknowledged);
        all.not_recorded.append(&mut progress.not_recorded);
        all.failures.append(&mut progress.failures);
        all.drives.append(&mut progress.drives);
    }
    assert_eq!(engine.in_flight(), 0);
    all
}

/// Plays the blocks, and compares their payload.
fn assert_plays<S: System<File = File>>(store: &Store<S>, recording: u64, sequences: &[u64]) {
    let memory = Arc::new(BlockMemory::host(BLOCK, 3).unwrap());
    let reader = store.reader(&channel(), recording).unwrap();
    assert_eq!(
        reader.blocks().iter().map(|block| block.sequence).collect::<Vec<_>>(),
        sequences
    );
    let mut player = PlayEngine::new(reader, Arc::clone(&memory)).unwrap();
    let mut waiting = sequences.iter().copied();
    let mut free = vec![0, 1, 2];
    let mut played = 0;
    while played < sequences.len() {
        while let Some(buffer) = free.pop() {
            match waiting.next() {
                Some(sequence) => player.fetch(buffer, sequence).unwrap(),
                None => break,
            }
        }
        poll(&mut [PollFd::new(&player, PollFlags::IN)], None).unwrap();
        for Played {
            buffer, block, result, ..
        } in player.progress()
        {
            result.unwrap();
            let checksum = memory.checksum(buffer).unwrap();
            assert_eq!(checksum, block.checksum, "block {}", block.sequence);
            let mut same = [0; BLOCK as usize];
            memory.read(buffer, 0, &mut same).unwrap();
            assert_eq!(fill(&memory, buffer, block.sequence), block);
            free.push(buffer);
            played += 1;
        }
    }
    assert_eq!(player.in_flight(), 0);
}

fn sequences(progress: &Progress) -> Vec<u64> {
    let mut sequences: Vec<u64> = progress.acknowledged.iter().map(|done| done.sequence).collect();
    sequences.sort_unstable();
    sequences
}

#[test]
fn recorded_blocks_are_played() {
    let folder = tempfile::tempdir().unwrap();
    let files = Files::new().cached(true);
    let drives = drives(&folder, 2);
    let store = create(&files, &drives, 12);
    let memory = Arc::new(BlockMemory::host(BLOCK, 5).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 7).unwrap(), memory).unwrap();
    let recording = engine.recording();
    assert_eq!(engine.name(), &channel());
    let progress = record(&mut engine, 0..40);
    assert!(progress.not_recorded.is_empty() && progress.failures.is_empty());
    assert_eq!(sequences(&progress), (0..40).collect::<Vec<_>>());
    let (rest, result) = engine.finish();
    result.unwrap();
    assert!(rest.acknowledged.is_empty());
    assert_plays(&store, recording, &(0..40).collect::<Vec<_>>());
    drop(store);
    let store = Store::open(files, drives).unwrap();
    assert!(store.problems().is_empty());
    assert_plays(&store, recording, &(0..40).collect::<Vec<_>>());
}

#[test]
fn acknowledgements_of_a_commit_are_in_the_order_of_submission() {
    let folder = tempfile::tempdir().unwrap();
    let drives = drives(&folder, 2);
    let store = create(&Files::new().cached(true), &drives, 60);
    let memory = Arc::new(BlockMemory::host(BLOCK, 100).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), Arc::clone(&memory)).unwrap();
    // Descending sequence numbers, and more blocks than one page of the index has.
    for buffer in 0..100 {
        let block = fill(&memory, buffer, 1000 - buffer as u64);
        engine.submit(buffer, block).unwrap();
    }
    assert_eq!(engine.in_flight(), 100);
    let (progress, result) = engine.drain();
    result.unwrap();
    let mut buffers: Vec<usize> = progress.acknowledged.iter().map(|done| done.buffer).collect();
    let breaks = buffers.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!(breaks < 20, "a commit covers several blocks: {buffers:?}");
    buffers.sort_unstable();
    assert_eq!(buffers, (0..100).collect::<Vec<_>>());
}

#[test]
fn full_lun_returns_the_blocks_and_keeps_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let store = create(&Files::new().cached(true), &drives(&folder, 1), 3);
    let memory = Arc::new(BlockMemory::host(BLOCK, 4).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), memory).unwrap();
    let recording = engine.recording();
    let progress = record(&mut engine, 0..10);
    assert_eq!(sequences(&progress), [0, 1, 2, 3, 4, 5]);
    assert!(progress.failures.is_empty());
    engine.finish().1.unwrap();
    assert_plays(&store, recording, &[0, 1, 2, 3, 4, 5]);
}

#[test]
fn blocks_of_a_failed_drive_go_to_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let drives = drives(&folder, 3);
    let system = Breaking::new(&drives[1]);
    let store = create(&system, &drives, 20);
    let memory = Arc::new(BlockMemory::host(BLOCK, 6).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), memory).unwrap();
    let recording = engine.recording();
    assert!(record(&mut engine, 0..6).failures.is_empty());
    system.is_broken.store(true, Ordering::SeqCst);
    let progress = record(&mut engine, 6..30);
    assert_eq!(sequences(&progress), (6..30).collect::<Vec<_>>());
    assert!(progress.not_recorded.is_empty());
    let failures: Vec<_> = progress
        .failures
        .iter()
        .map(|failure| (failure.drive.clone(), failure.error.raw_os_error()))
        .collect();
    assert_eq!(failures, [(drives[1].clone(), Some(9))]);
    let others = [drives[0].clone(), drives[2].clone()];
    assert_eq!(progress.failures[0].remaining, others, "the blocks go there");
    assert!(
        others.iter().all(|drive| progress.drives.contains(drive)),
        "{:?}",
        progress.drives
    );
    // Once each.
    assert!(record(&mut engine, 30..33).failures.is_empty());
    engine.finish().1.unwrap();
    system.is_broken.store(false, Ordering::SeqCst);
    assert_plays(&store, recording, &(0..33).collect::<Vec<_>>());
}

#[test]
fn a_read_that_fails_names_its_drive() {
    let folder = tempfile::tempdir().unwrap();
    let drives = drives(&folder, 2);
    let store = create(&Files::new().cached(true), &drives, 4);
    let memory = Arc::new(BlockMemory::host(BLOCK, 4).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), Arc::clone(&memory)).unwrap();
    let recording = engine.recording();
    let progress = record(&mut engine, 0..4);
    assert_eq!(progress.drives.into_iter().collect::<Vec<_>>(), drives);
    engine.finish().1.unwrap();
    // The files of the second drive lose their content.
    let mut folders = vec![drives[1].clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                File::options().write(true).open(path).unwrap().set_len(0).unwrap();
            }
        }
    }
    let mut player = PlayEngine::new(store.reader(&channel(), recording).unwrap(), memory).unwrap();
    for sequence in 0..4 {
        player.fetch(sequence as usize, sequence).unwrap();
    }
    let played = player.finish();
    assert_eq!(played.len(), 4);
    for block in &played {
        let fails = *block.drive == drives[1];
        assert_eq!(block.result.is_err(), fails, "{block:?}");
        assert!(fails || *block.drive == drives[0], "{block:?}");
    }
    assert_eq!(played.iter().filter(|block| block.result.is_err()).count(), 2);
}

#[test]
fn without_a_drive_the_blocks_are_returned() {
    let folder = tempfile::tempdir().unwrap();
    let drives = drives(&folder, 1);
    let system = Breaking::new(&drives[0]);
    let store = create(&system, &drives, 20);
    let memory = Arc::new(BlockMemory::host(BLOCK, 2).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), Arc::clone(&memory)).unwrap();
    let recording = engine.recording();
    assert_eq!(sequences(&record(&mut engine, 0..2)), [0, 1]);
    system.is_broken.store(true, Ordering::SeqCst);
    let block = fill(&memory, 0, 2);
    engine.submit(0, block).unwrap();
    let (progress, result) = engine.drain();
    result.unwrap();
    assert!(progress.acknowledged.is_empty());
    assert_eq!(progress.failures.len(), 1);
    assert_eq!((progress.failures[0].remaining.len(), progress.drives.len()), (0, 0));
    let [NotRecorded {
        buffer: 0,
        block: lost,
        error: Error::DrivesFailed { source, .. },
    }] = &progress.not_recorded[..]
    else {
        panic!("{progress:?}");
    };
    assert_eq!((lost, source.raw_os_error()), (&block, Some(9)));
    assert!(matches!(engine.submit(0, block), Err(Error::DrivesFailed { .. })));
    engine.finish().1.unwrap();
    system.is_broken.store(false, Ordering::SeqCst);
    assert_plays(&store, recording, &[0, 1]);
}

#[test]
fn invalid_submissions_are_errors_and_change_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = create(&Files::new().cached(true), &drives(&folder, 1), 4);
    let wrong = Arc::new(BlockMemory::host(4096, 2).unwrap());
    assert!(matches!(
        RecordEngine::new(store.writer(&channel(), 0).unwrap(), wrong).map(drop),
        Err(Error::InvalidValue { value: 4096, .. })
    ));
    let memory = Arc::new(BlockMemory::host(BLOCK, 2).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), Arc::clone(&memory)).unwrap();
    let recording = engine.recording();
    let (first, second) = (fill(&memory, 0, 5), fill(&memory, 1, 6));
    engine.submit(0, first).unwrap();
    for buffer in [0, 2, usize::MAX] {
        assert!(
            matches!(engine.submit(buffer, second), Err(Error::InvalidValue { .. })),
            "{buffer}"
        );
    }
    assert!(matches!(engine.submit(1, first), Err(Error::Duplicate { sequence: 5 })));
    assert_eq!(engine.in_flight(), 1);
    engine.submit(1, second).unwrap();
    assert_eq!(sequences(&engine.drain().0), [5, 6]);
    assert!(matches!(engine.submit(0, first), Err(Error::Duplicate { sequence: 5 })));
    engine.finish().1.unwrap();

    let mut player = PlayEngine::new(store.reader(&channel(), recording).unwrap(), memory).unwrap();
    assert!(matches!(player.fetch(0, 7), Err(Error::NotFound { .. })));
    player.fetch(0, 5).unwrap();
    assert!(matches!(player.fetch(0, 6), Err(Error::InvalidValue { .. })));
    assert!(matches!(player.fetch(2, 6), Err(Error::InvalidValue { .. })));
    let played = player.finish();
    assert_eq!((played.len(), played[0].buffer, played[0].block), (1, 0, first));
}

#[test]
fn dropped_engine_frees_memory_and_segments() {
    let folder = tempfile::tempdir().unwrap();
    let store = create(&Files::new().cached(true), &drives(&folder, 2), 4);
    let memory = Arc::new(BlockMemory::host(BLOCK, 8).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), Arc::clone(&memory)).unwrap();
    for buffer in 0..8 {
        let block = fill(&memory, buffer, buffer as u64);
        engine.submit(buffer, block).unwrap();
    }
    assert_eq!(engine.in_flight(), 8);
    drop(engine);
    assert_eq!(Arc::strong_count(&memory), 1);
    // Nothing was acknowledged, so the recording is gone, and all segments are free.
    assert!(store.recordings(&channel()).unwrap().is_empty());
    assert_eq!(store.lun("lun").unwrap().free(), store.lun("lun").unwrap().total());
    store.writer(&channel(), 0).unwrap();
}

#[test]
fn truncated_segment_is_an_error_of_the_block() {
    let folder = tempfile::tempdir().unwrap();
    let drives = drives(&folder, 1);
    let store = create(&Files::new().cached(true), &drives, 4);
    let memory = Arc::new(BlockMemory::host(BLOCK, 2).unwrap());
    let mut engine = RecordEngine::new(store.writer(&channel(), 0).unwrap(), Arc::clone(&memory)).unwrap();
    let recording = engine.recording();
    assert_eq!(sequences(&record(&mut engine, 0..2)), [0, 1]);
    engine.finish().1.unwrap();
    let mut reader = store.reader(&channel(), recording).unwrap();
    let offset = reader.locate(1).unwrap().offset;
    reader.locate(1).unwrap().file.set_len(offset + 100).unwrap();
    let mut player = PlayEngine::new(reader, memory).unwrap();
    player.fetch(0, 0).unwrap();
    player.fetch(1, 1).unwrap();
    let mut played = player.finish();
    played.sort_by_key(|played| played.buffer);
    played[0].result.as_ref().unwrap();
    assert_eq!(
        played[1].result.as_ref().unwrap_err().kind(),
        io::ErrorKind::UnexpectedEof
    );
}

/// Transfers to simulated drives, which complete in any order.
struct SimulatedQueue<T> {
    transfers: Vec<Transfer<T>>,
    choices: Choices,
    event: OwnedFd,
}

struct Transfer<T> {
    file: Arc<SimulatedFile>,
    offset: u64,
    /// The payload of a write.
    bytes: Vec<u8>,
    token: T,
}

impl<T> SimulatedQueue<T> {
    fn new(seed: u64) -> Self {
        Self {
            transfers: Vec::new(),
            choices: Choices::new(seed),
            event: eventfd(0, EventfdFlags::empty()).unwrap(),
        }
    }
}

impl<T> Queue<SimulatedFile, T> for SimulatedQueue<T> {
    fn write(
        &mut self,
        memory: &BlockMemory,
        buffer: usize,
        to: Target<'_, SimulatedFile>,
        token: T,
    ) -> Result<(), (T, io::Error)> {
        let mut bytes = vec![0; memory.block_size()];
        memory.read(buffer, 0, &mut bytes).unwrap();
        self.transfers.push(Transfer {
            file: Arc::clone(to.file),
            offset: to.offset,
            bytes,
            token,
        });
        Ok(())
    }

    fn read(
        &mut self,
        _: &BlockMemory,
        _: usize,
        _: Target<'_, SimulatedFile>,
        token: T,
    ) -> Result<(), (T, io::Error)> {
        Err((token, io::ErrorKind::Unsupported.into()))
    }

    fn completed(&mut self) -> Option<(T, io::Result<()>)> {
        // Sometimes nothing is complete yet.
        if self.transfers.is_empty() || self.choices.next(4) == 0 {
            return None;
        }
        let index = self.choices.next(self.transfers.len() as u64) as usize;
        let transfer = self.transfers.swap_remove(index);
        let result = transfer.file.write_payload(transfer.offset, &transfer.bytes);
        Some((transfer.token, result))
    }

    fn wait(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn clear_event(&self) {}

    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

const BLOCKS: u64 = 18;

/// Records on a simulated machine with a fault, and returns what was acknowledged.
fn record_with_fault(
    machine: &Simulated,
    store: &Store<Simulated>,
    seed: u64,
    fault: Fault,
) -> Result<(u64, Progress, u64), String> {
    let memory = Arc::new(BlockMemory::host(BLOCK, 5).unwrap());
    let writer = store.writer(&channel(), 0).unwrap();
    let mut engine = RecordEngine::with_queue(writer, Arc::clone(&memory), SimulatedQueue::new(seed)).unwrap();
    machine.set_fault(Some(fault));
    let mut free: Vec<usize> = (0..5).collect();
    let mut all = Progress::default();
    let mut refused = 0;
    let mut next = 0;
    while next < BLOCKS || engine.in_flight() > 0 {
        if let Some(buffer) = if next < BLOCKS { free.pop() } else { None } {
            let block = fill(&memory, buffer, next);
            next += 1;
            if engine.submit(buffer, block).is_err() {
                refused += 1;
                free.push(buffer);
            }
        }
        let progress = engine.progress();
        free.extend(progress.acknowledged.iter().map(|done| done.buffer));
        free.extend(progress.not_recorded.iter().map(|lost| lost.buffer));
        all.acknowledged.extend(progress.acknowledged);
        all.not_recorded.extend(progress.not_recorded);
        all.failures.extend(progress.failures);
    }
    if free.len() != 5 {
        return Err(format!("{} of 5 buffers were returned", free.len()));
    }
    let recording = engine.recording();
    drop(engine.finish());
    Ok((recording, all, refused))
}

/// Checks that the store has all acknowledged blocks, and only complete ones.
fn check_recording(store: &Store<Simulated>, recording: u64, acknowledged: &[u64]) -> Result<(), String> {
    if !store.problems().is_empty() {
        return Err(format!("{:?}", store.problems()));
    }
    if acknowledged.is_empty() && store.recordings(&channel()).unwrap().is_empty() {
        return Ok(());
    }
    let mut reader = store.reader(&channel(), recording).map_err(|error| error.to_string())?;
    for sequence in acknowledged {
        if reader.block(*sequence).is_none() {
            return Err(format!("block {sequence} is lost"));
        }
    }
    for block in reader.blocks() {
        let mut bytes = vec![0; BLOCK as usize];
        let read = |file: &SimulatedFile, offset| file.read_payload(offset, &mut bytes);
        reader.read(block.sequence, read).map_err(|error| error.to_string())?;
        if crc32c::crc32c(&bytes) != block.checksum {
            return Err(format!("block {} is torn", block.sequence));
        }
    }
    Ok(())
}

fn simulated(needs_flush: bool, bugs: Bugs) -> (Simulated, Vec<PathBuf>) {
    let drives = vec![PathBuf::from("/drive0"), PathBuf::from("/drive1")];
    (Simulated::new(&drives, needs_flush, bugs), drives)
}

/// Cuts the power at each operation of a recording.
fn cut_everywhere(seed: u64, needs_flush: bool, bugs: Bugs) -> Result<u64, String> {
    let mut choices = Choices::new(seed + 1);
    for at in 1.. {
        let (machine, drives) = simulated(needs_flush, bugs);
        let store = create(&machine, &drives, 8);
        let fault = Fault {
            at,
            errno: EIO,
            effect: choices.next(2) == 0,
            power_off: true,
        };
        let (recording, progress, _) = record_with_fault(&machine, &store, seed, fault)?;
        let happened = machine.fault_happened();
        drop(store);
        machine.power_cycle(&mut choices);
        let store = Store::open(machine.clone(), drives).map_err(|error| error.to_string())?;
        check_recording(&store, recording, &sequences(&progress)).map_err(|error| format!("cut {at}: {error}"))?;
        if !happened {
            assert_eq!(sequences(&progress), (0..BLOCKS).collect::<Vec<_>>());
            return Ok(at - 1);
        }
    }
    unreachable!("the number of operations is finite")
}

#[test]
fn power_cut_at_every_operation_loses_no_acknowledged_block() {
    for seed in 0..4 * u64::from(times()) {
        for needs_flush in [false, true] {
            let operations = cut_everywhere(seed, needs_flush, Bugs::default()).unwrap();
            assert!(operations > 40, "{operations}");
        }
    }
}

#[test]
fn drives_that_forget_payload_are_found() {
    let flush = Bugs {
        ignores_flush: true,
        ..Bugs::default()
    };
    // Behind the headers of a segment.
    let durable = Bugs {
        ignores_durable_from: Some(2 * 4096),
        ..Bugs::default()
    };
    for (needs_flush, bug) in [(true, flush), (false, durable)] {
        let lost = |error: String| error.ends_with("is lost") || error.ends_with("is torn");
        let found = (0..20).any(|seed| cut_everywhere(seed, needs_flush, bug).is_err_and(lost));
        assert!(found, "{bug:?} was not found");
    }
}

#[test]
fn error_at_every_operation_moves_the_blocks_to_the_other_drive() {
    for seed in 0..4 * u64::from(times()) {
        for at in 1.. {
            let (machine, drives) = simulated(seed % 2 == 1, Bugs::default());
            let store = create(&machine, &drives, 16);
            let fault = Fault {
                at,
                errno: EIO,
                effect: seed % 4 < 2,
                power_off: false,
            };
            let (recording, progress, refused) = record_with_fault(&machine, &store, seed, fault).unwrap();
            let happened = machine.fault_happened();
            assert_eq!(sequences(&progress), (0..BLOCKS).collect::<Vec<_>>(), "error {at}");
            assert_eq!((progress.not_recorded.len(), refused), (0, 0), "error {at}");
            assert!(progress.failures.len() <= 1, "error {at}: {:?}", progress.failures);
            assert!(happened || progress.failures.is_empty());
            machine.set_fault(None);
            check_recording(&store, recording, &sequences(&progress)).unwrap();
            drop(store);
            let store = Store::open(machine.clone(), drives).unwrap();
            check_recording(&store, recording, &sequences(&progress)).unwrap();
            if !happened {
                break;
            }
        }
    }
}
