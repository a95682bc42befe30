// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of sessions on folders in place of drives, with host memory in place of an accelerator's.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use p2pmem_verbs::{Access, Domain};

use super::play::{play, PlayOptions};
use super::record::{record, RecordOptions};
use super::*;
use crate::client::compute::{Compute, Computed, Registered, Role, VECTOR};
use crate::client::cpu::Cpu;
use crate::client::record::Recorded;
use crate::client::target::Played;
use crate::client::Verification;
use crate::control::{ChannelRequest, Start};
use crate::engine::tests::Breaking;
use crate::memory::BlockMemory;
use crate::store::{ChannelName, Error, Files, LunOptions, Store, StreamOptions, System};

const BLOCK: u64 = VECTOR as u64;
/// The blocks of a segment.
const SLOTS: u64 = 8;
/// The segments on each drive.
const SEGMENTS: u64 = 3;

/// An accelerator with something that happens when the work on a block begins.
struct Watched<'a> {
    cpu: Cpu,
    begins: &'a mut dyn FnMut(u64),
    has_blocks: bool,
}

impl Compute for Watched<'_> {
    fn buffers(&self) -> u32 {
        self.cpu.buffers()
    }

    fn block_size(&self) -> u64 {
        self.cpu.block_size()
    }

    fn register(&self, domain: &Arc<Domain>, access: Access) -> Result<Registered> {
        self.cpu.register(domain, access)
    }

    fn blocks(&self) -> Option<Arc<BlockMemory>> {
        self.cpu.blocks().filter(|_| self.has_blocks)
    }

    fn start(&mut self, buffer: u32, sequence: u64) -> Result<()> {
        (self.begins)(sequence);
        self.cpu.start(buffer, sequence)
    }

    fn poll(&mut self, done: &mut Vec<Computed>) -> Result<()> {
        self.cpu.poll(done)
    }

    fn copy(&self, buffer: u32, input: &mut [f32], output: &mut [f32]) -> Result<()> {
        self.cpu.copy(buffer, input, output)
    }
}

/// Two folders, and the store on them.
struct Bed<S: System> {
    _folder: tempfile::TempDir,
    drives: Vec<PathBuf>,
    local: LocalStore<S>,
}

impl<S: System<File = File> + Clone> Bed<S> {
    fn new(system: impl FnOnce(&Path) -> S) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let drives: Vec<PathBuf> = ["first", "second"]
            .iter()
            .map(|name| folder.path().join(name))
            .collect();
        let system = system(&drives[1]);
        for drive in &drives {
            std::fs::create_dir(drive).unwrap();
            Store::prepare(&system, drive).unwrap();
        }
        let store = Store::open(system, drives.clone()).unwrap();
        let lun = LunOptions::new(drives.clone())
            .segment_size(8192 + SLOTS * (4096 + BLOCK))
            .segments(SEGMENTS);
        store.create_lun("fast", &lun).unwrap();
        store
            .create_stream("fast", "radar", &StreamOptions::new(BLOCK).channels(2))
            .unwrap();
        let attached = |folder: &PathBuf| FabricsDrive {
            folder: folder.clone(),
            device: "nvme2n1".into(),
            subsystem: "nqn.2026-01.example:drive".into(),
            controllers: vec![Controller {
                name: "nvme2".into(),
                address: "10.78.0.2".into(),
                port: "4420".into(),
                from: None,
            }],
        };
        let local = LocalStore::new(store, drives.iter().map(attached).collect());
        Self {
            _folder: folder,
            drives,
            local,
        }
    }

    fn record(&self, blocks: u64, stop: &AtomicBool, begins: &mut dyn FnMut(u64)) -> Result<Recorded> {
        let options = RecordOptions {
            channel: channel(),
            blocks,
            first: 0,
            rate: None,
            verify: Verification { every: 4 },
            timeout: Duration::from_secs(60),
        };
        record(&mut compute(Role::Source, begins), &self.local, &options, stop)
    }

    fn play(&self, change: impl FnOnce(&mut PlayOptions)) -> Result<Played> {
        let mut options = PlayOptions {
            channel: channel(),
            recording: None,
            start: Start::First,
            blocks: None,
            repeat: false,
            rate: None,
            verify: Verification { every: 4 },
            timeout: Duration::from_secs(60),
        };
        change(&mut options);
        play(
            &mut compute(Role::Target, &mut |_| {}),
            &self.local,
            &options,
            &AtomicBool::new(false),
        )
    }
}

fn bed() -> Bed<Files> {
    Bed::new(|_| Files::new().cached(true))
}

fn channel() -> ChannelRequest {
    ChannelRequest {
        lun: "fast".into(),
        stream: "radar".into(),
        channel: 0,
    }
}

fn compute(role: Role, begins: &mut dyn FnMut(u64)) -> Watched<'_> {
    Watched {
        cpu: Cpu::new(role, BlockMemory::host(BLOCK, 4).unwrap()).unwrap(),
        begins,
        has_blocks: true,
    }
}

fn run(bed: &Bed<Files>, blocks: u64) -> Result<Recorded> {
    bed.record(blocks, &AtomicBool::new(false), &mut |_| {})
}

#[test]
fn recorded_blocks_are_played_and_verified() {
    let bed = bed();
    let recorded = run(&bed, 20).unwrap();
    assert_eq!((recorded.acknowledged, recorded.verified), (20, 5));
    assert_eq!(
        (recorded.recordings, recorded.memory),
        (vec![0], vec!["host memory".to_owned()])
    );
    assert!(recorded.failed.is_empty());
    let played = bed.play(|_| {}).unwrap();
    assert_eq!((played.blocks, played.missing, played.verified), (20, 0, 5));
    assert_eq!((played.first, played.last), (Some(0), Some(19)));

    let mut reader = bed.local.store().reader(&ChannelName::from(&channel()), 0).unwrap();
    let drives = (0..20).map(|at| reader.locate(at).unwrap().drive.to_path_buf());
    let drives: std::collections::BTreeSet<PathBuf> = drives.collect();
    assert!(drives.iter().eq(&bed.drives), "{drives:?}");
    let time = reader.block(15).unwrap().time;
    let first = reader.at_time(time..).unwrap().sequence;
    let played = bed.play(|options| options.start = Start::Time(time)).unwrap();
    assert_eq!((played.first, played.blocks), (Some(first), 20 - first));
    let played = bed
        .play(|options| (options.start, options.blocks) = (Start::Block(17), Some(2)))
        .unwrap();
    assert_eq!((played.first, played.last, played.blocks), (Some(17), Some(18), 2));
    let played = bed
        .play(|options| (options.start, options.blocks, options.repeat) = (Start::Block(17), Some(7), true))
        .unwrap();
    assert_eq!(
        (played.first, played.last, played.blocks, played.missing),
        (Some(17), Some(17), 7, 0)
    );
}

#[test]
fn a_drive_that_fails_is_named_and_its_blocks_go_to_the_other_one() {
    let mut is_broken = Arc::default();
    let bed = Bed::new(|drive| {
        let system = Breaking::new(drive);
        is_broken = Arc::clone(&system.is_broken);
        system
    });
    // The drive breaks while both have open segments: it fails when it needs the next one.
    let mut begins = |sequence| AtomicBool::store(&is_broken, sequence >= 4, Ordering::SeqCst);
    let recorded = bed.record(SLOTS * 3, &AtomicBool::new(false), &mut begins).unwrap();
    assert_eq!(recorded.acknowledged, SLOTS * 3);
    let [failure] = &recorded.failed[..] else {
        panic!("{:?}", recorded.failed)
    };
    let expected = format!(
        "drive {} (nvme2n1 of nqn.2026-01.example:drive at 10.78.0.2 port 4420, controller nvme2) failed: ",
        bed.drives[1].display()
    );
    assert!(failure.starts_with(&expected), "{failure}");
    let played = bed.play(|_| {}).unwrap();
    assert_eq!((played.blocks, played.missing), (SLOTS * 3, 0));
}

#[test]
fn a_full_lun_ends_the_recording_and_keeps_what_was_acknowledged() {
    let bed = bed();
    let error = format!("{:#}", run(&bed, 1000).unwrap_err());
    let all = 2 * SLOTS * SEGMENTS;
    assert!(error.contains(&format!("{all} blocks are acknowledged")), "{error}");
    assert!(error.contains("LUN fast is full"), "{error}");
    let played = bed.play(|_| {}).unwrap();
    assert_eq!((played.blocks, played.missing), (all, 0));
}

#[test]
fn a_stop_acknowledges_the_blocks_that_were_begun() {
    let bed = bed();
    let stop = AtomicBool::new(false);
    let mut begun = 0;
    let recorded = bed.record(1000, &stop, &mut |sequence| {
        begun = sequence + 1;
        stop.store(sequence >= 9, Ordering::Relaxed);
    });
    let acknowledged = recorded.unwrap().acknowledged;
    assert!(
        acknowledged == begun && (10..14).contains(&begun),
        "{acknowledged} of {begun}"
    );
    assert_eq!(bed.play(|_| {}).unwrap().blocks, acknowledged);

    let options = PlayOptions {
        channel: channel(),
        recording: Some(0),
        start: Start::First,
        blocks: Some(1_000_000),
        repeat: true,
        rate: None,
        verify: Verification { every: 0 },
        timeout: Duration::from_secs(60),
    };
    let stop = AtomicBool::new(false);
    let mut count = 0;
    let mut begins = |_| {
        count += 1;
        stop.store(count >= 30, Ordering::Relaxed);
    };
    let played = play(&mut compute(Role::Target, &mut begins), &bed.local, &options, &stop).unwrap();
    assert!(
        (30..40).contains(&played.blocks) && played.blocks == count,
        "{}",
        played.blocks
    );
}

#[test]
fn a_wrong_block_is_found() {
    let bed = bed();
    run(&bed, 6).unwrap();
    let mut reader = bed.local.store().reader(&ChannelName::from(&channel()), 0).unwrap();
    let location = reader.locate(4).unwrap();
    location.file.write_all_at(b"wrong", location.offset).unwrap();
    let error = format!("{:#}", bed.play(|_| {}).unwrap_err());
    assert!(error.contains("playback failed: block 4 has the checksum"), "{error}");
}

#[test]
fn invalid_sessions_are_refused_with_the_reason() {
    let bed = bed();
    let refused = |result: Result<Played>, reason: &str| {
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.contains(reason), "{error}");
    };
    refused(bed.play(|_| {}), "channel fast/radar/0 has no recording");
    refused(
        bed.play(|options| options.channel.channel = 2),
        "there is no channel fast/radar/2",
    );
    refused(
        bed.play(|options| options.channel.stream = "sonar".into()),
        "there is no stream fast/sonar",
    );
    refused(
        bed.play(|options| options.channel.lun = "slow".into()),
        "there is no LUN slow",
    );
    refused(bed.play(|options| options.rate = Some(0)), "a rate of 0 bytes");
    refused(bed.play(|options| options.repeat = true), "needs a number of blocks");
    run(&bed, 3).unwrap();
    refused(
        bed.play(|options| options.start = Start::Block(3)),
        "has no block at or after",
    );
    refused(
        bed.play(|options| options.recording = Some(7)),
        "there is no recording fast/radar/0/7",
    );

    let options = RecordOptions {
        channel: channel(),
        blocks: 1,
        first: 0,
        rate: None,
        verify: Verification { every: 0 },
        timeout: Duration::from_secs(60),
    };
    let refused = |compute: &mut dyn Compute, reason: &str| {
        let error = record(compute, &bed.local, &options, &AtomicBool::new(false)).unwrap_err();
        assert!(format!("{error:#}").contains(reason), "{error:#}");
    };
    let mut large = Cpu::new(Role::Source, BlockMemory::host(2 * BLOCK, 4).unwrap()).unwrap();
    refused(&mut large, "stream fast/radar has blocks of 8192 bytes, not 16384");
    let mut nothing = |_| {};
    let mut without = compute(Role::Source, &mut nothing);
    without.has_blocks = false;
    refused(&mut without, "drives cannot access the buffers of this accelerator");
    let mut nothing = |_| {};
    let mut valid = compute(Role::Source, &mut nothing);
    let writer = bed.local.store().writer(&ChannelName::from(&channel()), 0).unwrap();
    refused(&mut valid, "channel fast/radar/0 has a writer");
    drop(writer);
    let second = Store::open(Files::new().cached(true), bed.drives.clone());
    assert!(matches!(second, Err(Error::Locked { .. })));
}

#[test]
fn folders_that_are_no_fabrics_drives_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Err(error) = LocalStore::open(&[folder.path().to_owned()]) else {
        panic!("a folder of this machine was accepted")
    };
    let error = format!("{error:#}");
    assert!(error.contains("cannot be used by --engine nvmeof"), "{error}");
}
