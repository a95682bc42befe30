// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the store on simulated drives: power cuts and errors at every operation, and the limits of the store.

mod plan;
pub(crate) mod simulated;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::test_runner::Config;

use plan::{payload, Run, Step, SEGMENT, SEGMENTS};
use simulated::{Bugs, Choices, Fault, Simulated, SimulatedFile, EIO, ENOSPC};

use super::format::{Geometry, PAGE};
use super::{Block, ChannelName, Error, Files, LunOptions, Store, StreamOptions, Writer};

/// Returns the factor for the number of cases, which long runs set.
pub(crate) fn times() -> u32 {
    std::env::var("P2PMEM_TIMES")
        .map_or(1, |text| text.parse::<u32>().expect("P2PMEM_TIMES is a number"))
        .max(1)
}

fn cases(count: u32) -> Config {
    Config {
        cases: count * times(),
        max_shrink_iters: 300,
        failure_persistence: None,
        ..Config::default()
    }
}

fn write(blocks: u8) -> Step {
    Step::Write {
        lun: false,
        stream: false,
        channel: false,
        blocks,
        reverse: false,
        abandon: false,
        commit: true,
    }
}

/// Every operation of the store once, with segments that fill up and are used again.
fn tour() -> Vec<Step> {
    let other = Step::Write {
        lun: false,
        stream: true,
        channel: true,
        blocks: 3,
        reverse: true,
        abandon: true,
        commit: true,
    };
    vec![
        Step::CreateLun(false),
        Step::CreateStream(false, false),
        write(3),
        Step::CreateStream(false, true),
        write(9),
        other,
        Step::Finish(false, false, false),
        write(2),
        Step::Kill,
        Step::DeleteRecording(false, false, false),
        write(11),
        other,
        Step::Finish(false, false, false),
        Step::DeleteStream(false, true),
        Step::CreateLun(true),
        write(2),
        Step::Kill,
        Step::DeleteStream(false, false),
        Step::DeleteLun(false),
        Step::CreateLun(false),
        Step::DeleteLun(true),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let write = (any::<[bool; 6]>(), 1..7u8).prop_map(|([lun, stream, channel, reverse, abandon, commit], blocks)| {
        Step::Write {
            lun,
            stream,
            channel,
            blocks,
            reverse,
            abandon,
            commit,
        }
    });
    let step = prop_oneof![
        2 => any::<bool>().prop_map(Step::CreateLun),
        1 => any::<bool>().prop_map(Step::DeleteLun),
        3 => any::<[bool; 2]>().prop_map(|[lun, stream]| Step::CreateStream(lun, stream)),
        1 => any::<[bool; 2]>().prop_map(|[lun, stream]| Step::DeleteStream(lun, stream)),
        12 => write,
        2 => any::<[bool; 3]>().prop_map(|[lun, stream, channel]| Step::Finish(lun, stream, channel)),
        2 => any::<[bool; 3]>().prop_map(|[lun, stream, channel]| Step::DeleteRecording(lun, stream, channel)),
        1 => Just(Step::Kill),
    ];
    // A LUN and a stream first, so that most blocks have a place.
    prop::collection::vec(step, 4..16).prop_map(|mut steps| {
        steps.splice(0..0, [Step::CreateLun(false), Step::CreateStream(false, false)]);
        steps
    })
}

/// Cuts the power at each operation of `steps`, and again while the store repairs itself, and again later.
fn cut_everywhere(steps: &[Step], needs_flush: bool, bugs: Bugs, seed: u64) -> Result<u64, String> {
    let mut choices = Choices::new(seed);
    for cut in 1.. {
        let mut run = Run::new(needs_flush, bugs);
        let context = |message| format!("power cut at operation {cut}: {message}");
        if !run.cut(steps, cut, &mut choices).map_err(context)? {
            return Ok(cut - 1);
        }
        // The second cut is in the recovery, or in the steps after it.
        let second = if choices.next(2) == 0 {
            1 + choices.next(6)
        } else {
            1 + choices.next(100)
        };
        let context = |message| format!("power cuts at operation {cut}, then {second}: {message}");
        if choices.next(2) == 0 {
            run.recover().map_err(context)?;
        }
        run.cut(steps, second, &mut choices).map_err(context)?;
        run.recover().map_err(context)?;
        // What was presented is durable.
        run.machine.power_cycle(&mut choices);
        run.recover().map_err(context)?;
    }
    unreachable!("the number of operations is finite")
}

/// Lets each operation of `steps` fail once.
fn fail_everywhere(steps: &[Step], needs_flush: bool, effect: bool, errno: i32, seed: u64) -> Result<u64, String> {
    let mut choices = Choices::new(seed);
    for at in 1.. {
        let mut run = Run::new(needs_flush, Bugs::default());
        run.machine.count_reads();
        run.machine.set_fault(Some(Fault {
            at,
            errno,
            effect,
            power_off: false,
        }));
        let context = |message| format!("error {errno} at operation {at}: {message}");
        // The store is empty, so a fault here has no effect on the rest.
        if run.open().is_err() || run.machine.fault_happened() {
            run.open().map_err(|error| context(error.to_string()))?;
        }
        run.steps(steps).map_err(context)?;
        let happened = run.machine.fault_happened();
        run.machine.set_fault(None);
        run.recover().map_err(context)?;
        run.machine.power_cycle(&mut choices);
        run.recover().map_err(context)?;
        if !happened {
            return Ok(at - 1);
        }
    }
    unreachable!("the number of operations is finite")
}

#[test]
fn power_cut_at_every_operation_of_tour_loses_nothing() {
    for seed in 0..times().into() {
        let operations = cut_everywhere(&tour(), false, Bugs::default(), seed).unwrap();
        assert!(operations > 150, "the tour has {operations} operations");
    }
}

#[test]
fn power_cut_at_every_operation_of_tour_with_volatile_payload_loses_nothing() {
    for seed in 0..times().into() {
        cut_everywhere(&tour(), true, Bugs::default(), seed).unwrap();
    }
}

#[test]
fn error_at_every_operation_of_tour_loses_nothing() {
    for (seed, errno) in (0..times().into()).zip([ENOSPC, EIO].iter().cycle()) {
        let operations = fail_everywhere(&tour(), false, false, *errno, seed).unwrap();
        assert!(operations > 300, "the tour has {operations} operations, with reads");
    }
}

#[test]
fn error_with_an_effect_at_every_operation_of_tour_loses_nothing() {
    for seed in 0..times().into() {
        fail_everywhere(&tour(), true, true, EIO, seed).unwrap();
    }
}

/// The checks above can fail: they find each of these drives and file systems that break their promise.
#[test]
fn drive_that_breaks_its_promise_is_found() {
    let ignores_flush = Bugs {
        ignores_flush: true,
        ..Bugs::default()
    };
    let ignores_durable = |from| Bugs {
        ignores_durable_from: Some(from),
        ..Bugs::default()
    };
    let ignores_sync_folder = Bugs {
        ignores_sync_folder: true,
        ..Bugs::default()
    };
    // The index and the payload of a segment are behind its header.
    let index = Geometry::index_offset(0) as usize;
    for (bugs, needs_flush, finding) in [
        (ignores_flush, true, "is torn"),
        (ignores_durable(index), true, "acknowledged and is lost"),
        (ignores_durable(index), false, "acknowledged and is lost"),
        (ignores_durable(index), false, "is torn"),
        (ignores_durable(0), false, "is damaged"),
        (ignores_sync_folder, false, "is lost"),
    ] {
        let mut found = (0..40).filter_map(|seed| cut_everywhere(&tour(), needs_flush, bugs, seed).err());
        assert!(found.any(|message| message.contains(finding)), "{bugs:?} {finding}");
    }
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn power_cut_at_every_operation_loses_nothing(steps in steps(), needs_flush: bool, seed: u64) {
        let result = cut_everywhere(&steps, needs_flush, Bugs::default(), seed);
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }

    #[test]
    fn error_at_every_operation_loses_nothing(steps in steps(), needs_flush: bool, effect: bool, seed: u64) {
        let result = fail_everywhere(&steps, needs_flush, effect, EIO, seed);
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

fn simulated(drives: usize) -> (Simulated, Vec<PathBuf>) {
    let drives: Vec<PathBuf> = (0..drives).map(|drive| format!("/drive{drive}").into()).collect();
    let machine = Simulated::new(&drives, false, Bugs::default());
    for drive in &drives {
        Store::prepare(&machine, drive).unwrap();
    }
    (machine, drives)
}

/// A store with the LUN `a` on `drives` drives and its stream `x`.
fn store(drives: usize) -> (Simulated, Vec<PathBuf>, Store<Simulated>) {
    let (machine, drives) = simulated(drives);
    let store = Store::open(machine.clone(), &drives).unwrap();
    store
        .create_lun("a", &LunOptions::new(&drives).segment_size(SEGMENT).segments(SEGMENTS))
        .unwrap();
    store
        .create_stream("a", "x", &StreamOptions::new(4096).channels(2))
        .unwrap();
    (machine, drives, store)
}

fn channel(number: u32) -> ChannelName {
    ChannelName::new("a", "x", number)
}

fn block(sequence: u64) -> Block {
    Block {
        sequence,
        time: sequence * 100,
        checksum: crc32c::crc32c(&payload(4096, sequence)),
    }
}

fn put(writer: &mut Writer<Simulated>, sequence: u64) -> super::Result<()> {
    writer.write(block(sequence), |file, offset| {
        file.write_payload(offset, &payload(4096, sequence))
    })
}

#[test]
fn full_lun_refuses_blocks_and_keeps_the_recorded_ones() {
    let (_, _, store) = store(2);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    let fitting = 2 * SEGMENTS * u64::from(store.streams("a").unwrap()[0].blocks_per_segment);
    for sequence in 0..fitting {
        put(&mut writer, sequence).unwrap();
    }
    assert!(matches!(put(&mut writer, fitting), Err(Error::Full { lun }) if lun == "a"));
    assert_eq!(writer.commit().acknowledged.len() as u64, fitting);
    assert!(matches!(put(&mut writer, fitting), Err(Error::Full { .. })));
    assert_eq!(store.lun("a").unwrap().free(), 0);
    // Another channel finds no space either, and takes none from the first one.
    let mut other = store.writer(&channel(1), 0).unwrap();
    assert!(matches!(put(&mut other, 0), Err(Error::Full { .. })));
    other.finish().unwrap();
    let mut reader = store.reader(&channel(0), 0).unwrap();
    for sequence in 0..fitting {
        let mut bytes = vec![0; 4096];
        let read = |file: &SimulatedFile, offset| file.read_payload(offset, &mut bytes);
        assert_eq!(reader.read(sequence, read).unwrap().0, block(sequence));
        assert_eq!(crc32c::crc32c(&bytes), block(sequence).checksum);
    }
    drop((reader, writer));
    store.delete_recording(&channel(0), 0).unwrap();
    let info = store.lun("a").unwrap();
    assert_eq!(
        (info.free(), info.total()),
        (2 * SEGMENTS * SEGMENT, 2 * SEGMENTS * SEGMENT)
    );
    put(&mut store.writer(&channel(1), 0).unwrap(), 0).unwrap();
}

#[test]
fn blocks_go_to_the_drives_in_turn() {
    let (machine, drives, store) = store(2);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    for sequence in 0..4 {
        put(&mut writer, sequence).unwrap();
    }
    // One page of the index for each drive.
    let before = machine.operations();
    assert_eq!(writer.commit().acknowledged, [0, 2, 1, 3]);
    assert_eq!(machine.operations() - before, 2);
    let info = store.lun("a").unwrap();
    assert_eq!(
        info.drives,
        drives
            .iter()
            .map(|drive| (drive.clone(), SEGMENTS - 1))
            .collect::<Vec<_>>()
    );
    assert!(writer.commit().acknowledged.is_empty());
    assert_eq!(
        machine.operations() - before,
        2,
        "a commit without blocks writes nothing"
    );
}

#[test]
fn second_writer_of_a_channel_and_second_process_are_refused() {
    let (machine, drives, store) = store(1);
    let writer = store.writer(&channel(0), 0).unwrap();
    assert!(matches!(store.writer(&channel(0), 0), Err(Error::HasWriter { channel }) if channel == "a/x/0"));
    let other = store.writer(&channel(1), 0).unwrap();
    assert!(matches!(Store::open(machine.clone(), &drives), Err(Error::Locked { path }) if path == drives[0]));
    drop((writer, other));
    store.writer(&channel(0), 0).unwrap();
    drop(store);
    Store::open(machine, &drives).unwrap();
}

#[test]
fn recording_that_is_used_is_not_deleted() {
    let (_, _, store) = store(1);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    put(&mut writer, 1).unwrap();
    assert_eq!(writer.commit().acknowledged, [1]);
    let in_use = |result| assert!(matches!(result, Err(Error::InUse { .. })), "{result:?}");
    in_use(store.delete_recording(&channel(0), 0));
    in_use(store.delete_stream("a", "x"));
    in_use(store.delete_lun("a"));
    let slot = writer.reserve(block(2)).unwrap();
    writer.finish().unwrap();
    // A device may still write to the place of the slot.
    in_use(store.delete_recording(&channel(0), 0));
    drop(slot);
    let mut reader = store.reader(&channel(0), 0).unwrap();
    let location = reader.locate(1).unwrap();
    drop(reader);
    in_use(store.delete_lun("a"));
    drop(location);
    store.delete_recording(&channel(0), 0).unwrap();
    assert!(store.reader(&channel(0), 0).is_err());
    store.delete_lun("a").unwrap();
    assert!(store.luns().is_empty());
}

#[test]
fn failed_drive_is_named_and_the_other_goes_on() {
    let (machine, drives, store) = store(2);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    for sequence in 0..4 {
        put(&mut writer, sequence).unwrap();
    }
    let in_flight = writer.reserve(block(4)).unwrap();
    // The first page of the index.
    let fault = Fault {
        at: 1,
        errno: EIO,
        effect: true,
        power_off: false,
    };
    machine.set_fault(Some(fault));
    let commit = writer.commit();
    assert_eq!(commit.acknowledged, [1, 3]);
    assert_eq!(commit.failures.len(), 1);
    assert_eq!(commit.failures[0].drive, drives[0]);
    assert_eq!(commit.failures[0].error.raw_os_error(), Some(EIO));
    assert_eq!(commit.failures[0].sequences, [0, 2]);
    assert_eq!(writer.failed_drives().collect::<Vec<_>>(), [drives[0].as_path()]);
    assert!(matches!(writer.written(in_flight), Err(Error::DriveFailed { drive }) if drive == drives[0]));
    for sequence in [0, 2, 4] {
        put(&mut writer, sequence).unwrap();
    }
    assert_eq!(writer.commit().acknowledged, [0, 2, 4]);
    let slot = writer.reserve(block(5)).unwrap();
    writer.failed(slot, std::io::Error::from_raw_os_error(EIO));
    let error = writer.reserve(block(5)).map(drop).unwrap_err();
    assert!(
        matches!(&error, Error::DrivesFailed { drive, .. } if *drive == drives[1]),
        "{error}"
    );
    drop((writer, store));
    let store = Store::open(machine, &drives).unwrap();
    assert_eq!(store.reader(&channel(0), 0).unwrap().blocks().len(), 5);
}

#[test]
fn sequence_number_is_recorded_once() {
    let (_, _, store) = store(1);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    let early = writer.reserve(block(1)).unwrap();
    put(&mut writer, 1).unwrap();
    assert!(
        matches!(put(&mut writer, 1), Err(Error::Duplicate { sequence: 1 })),
        "written"
    );
    assert!(
        matches!(writer.written(early), Err(Error::Duplicate { sequence: 1 })),
        "written meanwhile"
    );
    assert_eq!(writer.commit().acknowledged, [1]);
    assert!(
        matches!(put(&mut writer, 1), Err(Error::Duplicate { sequence: 1 })),
        "acknowledged"
    );
}

#[test]
fn payload_that_fails_is_not_recorded() {
    let (_, _, store) = store(1);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    let error = writer.write(block(1), |_, _| Err("the sender is gone")).unwrap_err();
    assert!(matches!(&error, Error::Payload { sequence: 1, .. }), "{error}");
    assert!(error.to_string().ends_with("the sender is gone"));
    assert!(writer.commit().acknowledged.is_empty());
    put(&mut writer, 1).unwrap();
    assert_eq!(writer.commit().acknowledged, [1]);
}

#[test]
fn blocks_are_found_by_sequence_and_time_and_gaps_are_reported() {
    let (machine, drives, store) = store(2);
    let mut writer = store.writer(&channel(1), 77).unwrap();
    for sequence in [9, 2, 3, 5, 20] {
        put(&mut writer, sequence).unwrap();
    }
    assert_eq!(
        store.recordings(&channel(1)).unwrap()[0].blocks,
        0,
        "nothing is acknowledged"
    );
    assert_eq!(writer.commit().acknowledged.len(), 5);
    drop((writer, store));
    let store = Store::open(machine, &drives).unwrap();
    let info = &store.recordings(&channel(1)).unwrap()[0];
    assert_eq!(
        (info.number, info.started, info.blocks, info.writing),
        (0, 77, 5, false)
    );
    assert_eq!(info.range, Some((block(2), block(20))));
    let reader = store.reader(&channel(1), 0).unwrap();
    assert_eq!(reader.missing(), [4..=4, 6..=8, 10..=19]);
    assert_eq!(reader.blocks(), [2, 3, 5, 9, 20].map(block));
    assert_eq!(reader.next(..), Some(block(2)));
    assert_eq!(reader.next(6..), Some(block(9)));
    assert_eq!(reader.next(6..9), None);
    assert_eq!(reader.next(21..), None);
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = 9..2;
    assert_eq!(reader.next(reversed), None);
    assert_eq!(reader.at_time(201..), Some(block(3)));
    assert_eq!(reader.at_time(2001..), None);
    assert_eq!(reader.block(4), None);
    assert!(matches!(store.reader(&channel(1), 9), Err(Error::NotFound { .. })));
}

#[test]
fn recording_without_a_block_is_removed() {
    let (machine, drives, store) = store(2);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    drop(writer.reserve(block(0)).unwrap());
    assert!(store.lun("a").unwrap().free() < store.lun("a").unwrap().total());
    writer.finish().unwrap();
    assert!(store.recordings(&channel(0)).unwrap().is_empty());
    assert_eq!(store.lun("a").unwrap().free(), store.lun("a").unwrap().total());

    // A killed program does not end its recording.
    let mut writer = store.writer(&channel(0), 0).unwrap();
    put(&mut writer, 1).unwrap();
    std::mem::forget(writer);
    drop(store);
    let store = Store::open(machine, &drives).unwrap();
    assert!(store.problems().is_empty());
    assert!(store.recordings(&channel(0)).unwrap().is_empty());
    assert_eq!(store.lun("a").unwrap().free(), store.lun("a").unwrap().total());
}

#[test]
fn bad_arguments_are_refused() {
    let (_, drives, store) = store(2);
    let lun = |name: &str, options: &LunOptions| store.create_lun(name, options).unwrap_err();
    let options = || LunOptions::new(&drives).segment_size(SEGMENT).segments(1);
    assert!(matches!(lun("a", &options()), Error::Exists { .. }));
    assert!(matches!(lun("../a", &options()), Error::InvalidName { .. }));
    assert!(matches!(
        lun("c", &LunOptions::new(["/elsewhere"])),
        Error::NotFound { what: "drive", .. }
    ));
    let none: [&Path; 0] = [];
    for options in [
        options().segments(0),
        options().segment_size(SEGMENT + 1),
        options().segment_size(3 * 4096),
        LunOptions::new(none),
        LunOptions::new([&drives[0], &drives[0]]),
    ] {
        assert!(matches!(lun("c", &options), Error::InvalidValue { .. }), "{options:?}");
    }
    let stream = |lun: &str, options: &StreamOptions| store.create_stream(lun, "z", options).unwrap_err();
    for options in [
        StreamOptions::new(0),
        StreamOptions::new(4097),
        StreamOptions::new(SEGMENT),
        StreamOptions::new(4096).channels(0),
        StreamOptions::new(4096).channels(1025),
    ] {
        assert!(
            matches!(stream("a", &options), Error::InvalidValue { .. }),
            "{options:?}"
        );
    }
    assert!(matches!(
        stream("b", &StreamOptions::new(4096)),
        Error::NotFound { what: "LUN", .. }
    ));
    assert!(matches!(
        store.writer(&channel(2), 0),
        Err(Error::NotFound { what: "channel", .. })
    ));
    assert!(matches!(store.delete_lun("b"), Err(Error::NotFound { .. })));
    assert!(matches!(store.delete_stream("a", "z"), Err(Error::NotFound { .. })));
    assert!(matches!(
        store.delete_recording(&channel(0), 0),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn drive_without_space_fails_the_creation_and_nothing_remains() {
    let (machine, drives, store) = store(2);
    let before = machine.files_below(Path::new("/"));
    machine.set_space(Some(SEGMENT * 5));
    let error = store
        .create_lun("b", &LunOptions::new(&drives).segment_size(SEGMENT).segments(4))
        .unwrap_err();
    assert!(
        matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(ENOSPC)),
        "{error}"
    );
    assert_eq!(machine.files_below(Path::new("/")), before);
    machine.set_space(None);
    store
        .create_lun("b", &LunOptions::new(&drives).segment_size(SEGMENT).segments(4))
        .unwrap();
}

#[test]
fn missing_drives_are_reported_and_nothing_changes() {
    let (machine, drives, store) = store(2);
    let mut writer = store.writer(&channel(0), 0).unwrap();
    put(&mut writer, 1).unwrap();
    assert_eq!(writer.commit().acknowledged, [1]);
    drop((writer, store));
    let store = Store::open(machine.clone(), &drives[1..]).unwrap();
    assert!(store.luns().is_empty());
    let error = &store.problems()[0].error;
    assert!(
        matches!(
            error,
            Error::Incomplete {
                found: 1,
                members: 2,
                ..
            }
        ),
        "{error}"
    );
    let options = LunOptions::new(&drives[1..]).segment_size(SEGMENT).segments(1);
    assert!(matches!(store.create_lun("a", &options), Err(Error::Exists { .. })));
    drop(store);
    // The order of the drives does not matter.
    let store = Store::open(machine, [&drives[1], &drives[0]]).unwrap();
    assert!(store.problems().is_empty());
    assert_eq!(store.reader(&channel(0), 0).unwrap().blocks(), [block(1)]);

    let empty = PathBuf::from("/unmounted");
    let machine = Simulated::new(std::slice::from_ref(&empty), false, Bugs::default());
    assert!(matches!(Store::open(machine, [&empty]), Err(Error::NotPrepared { path }) if path == empty));
}

#[test]
fn damage_is_reported_and_the_rest_is_available() {
    let (machine, drives, store) = store(1);
    for number in [0, 1] {
        let mut writer = store.writer(&channel(number), 0).unwrap();
        for sequence in 0..3 {
            put(&mut writer, sequence).unwrap();
            assert_eq!(writer.commit().acknowledged, [sequence]);
        }
    }
    drop(store);
    let files = machine.files_below(&drives[0]);
    let segment = files.iter().find(|path| path.ends_with("x/0/000000/00000000")).unwrap();
    // The second of three pages of the index.
    machine.damage(segment, Geometry::index_offset(1) as usize, &[0; PAGE]);
    let store = Store::open(machine.clone(), &drives).unwrap();
    assert_eq!(store.problems().len(), 1);
    assert!(matches!(&store.problems()[0].error, Error::Damaged { path, .. } if path == segment));
    assert_eq!(store.reader(&channel(1), 0).unwrap().blocks().len(), 3);
    assert_eq!(
        store.reader(&channel(0), 0).unwrap().missing(),
        [1..=1],
        "only the damaged page is missing"
    );
    let free = store.lun("a").unwrap().drives[0].1;
    assert_eq!(free, SEGMENTS - 2, "the damaged segment is not used again");
    drop(store);

    machine.damage(segment, 0, &[1; 2 * PAGE]);
    let lun = files.iter().find(|path| path.ends_with("a/lun")).unwrap();
    let store = Store::open(machine.clone(), &drives).unwrap();
    assert_eq!(store.problems().len(), 1);
    assert!(store.reader(&channel(0), 0).unwrap().is_empty());
    drop(store);
    machine.damage(lun, 8, &[9]);
    let store = Store::open(machine, &drives).unwrap();
    assert!(matches!(&store.problems()[0].error, Error::Damaged { path, .. } if path == lun));
    assert!(store.luns().is_empty());
}

/// A record that a killed program did not wait for can be in the drive's cache only.
#[test]
fn block_that_was_presented_survives_a_power_cut() {
    for seed in 0..8 {
        let (machine, drives, store) = store(1);
        let mut writer = store.writer(&channel(0), 0).unwrap();
        put(&mut writer, 1).unwrap();
        machine.set_fault(Some(Fault {
            at: 1,
            errno: EIO,
            effect: true,
            power_off: false,
        }));
        assert!(writer.commit().acknowledged.is_empty());
        std::mem::forget(writer);
        drop(store);
        let presented = || {
            let store = Store::open(machine.clone(), &drives).unwrap();
            let reader = store.reader(&channel(0), 0).unwrap();
            reader.blocks()
        };
        assert_eq!(presented(), [block(1)]);
        machine.power_cycle(&mut Choices::new(seed));
        assert_eq!(presented(), [block(1)]);
    }
}

/// The end of an index, and damage, at the borders of the reads of an index.
#[test]
fn index_is_read_to_its_end() {
    let (machine, drives) = simulated(1);
    let store = Store::open(machine.clone(), &drives).unwrap();
    let pages = 48;
    let size = Geometry::index_offset(0) + pages * 2 * PAGE as u64;
    store
        .create_lun("a", &LunOptions::new(&drives).segment_size(size).segments(1))
        .unwrap();
    store.create_stream("a", "x", &StreamOptions::new(4096)).unwrap();
    let mut writer = store.writer(&channel(0), 0).unwrap();
    for sequence in 0..pages {
        put(&mut writer, sequence).unwrap();
        assert_eq!(writer.commit().acknowledged, [sequence]);
    }
    drop((writer, store));
    let files = machine.files_below(&drives[0]);
    let segment = files.iter().find(|path| path.ends_with("x/0/000000/00000000")).unwrap();
    for damaged in (0..pages).rev() {
        machine.damage(segment, Geometry::index_offset(damaged as u32) as usize, &[0; PAGE]);
        let store = Store::open(machine.clone(), &drives).unwrap();
        assert!(store.problems().is_empty(), "pages from {damaged} on are zero");
        let recordings = store.recordings(&channel(0)).unwrap();
        assert_eq!(
            recordings.iter().map(|recording| recording.blocks).sum::<u64>(),
            damaged
        );
    }

    let store = Store::open(machine.clone(), &drives).unwrap();
    let mut writer = store.writer(&channel(0), 0).unwrap();
    for sequence in 0..pages {
        put(&mut writer, sequence).unwrap();
        assert_eq!(writer.commit().acknowledged, [sequence]);
    }
    let recording = writer.recording();
    drop((writer, store));
    let files = machine.files_below(&drives[0]);
    let segment = files.iter().find(|path| path.ends_with("00000000")).unwrap();
    for (damaged, remaining) in [(15, pages - 1), (31, pages - 2), (0, pages - 3)] {
        machine.damage(segment, Geometry::index_offset(damaged) as usize, &[0; PAGE]);
        let store = Store::open(machine.clone(), &drives).unwrap();
        assert_eq!(store.problems().len(), 1, "page {damaged} is damaged");
        let reader = store.reader(&channel(0), recording).unwrap();
        assert_eq!(reader.block(damaged.into()), None);
        assert_eq!(reader.len() as u64, remaining);
    }
}

#[test]
fn segment_that_is_used_again_shows_no_block_of_its_former_use() {
    let (machine, drives, store) = store(1);
    for round in 0..6 {
        let mut writer = store.writer(&channel(0), round).unwrap();
        // Fewer blocks in each round, so that records of the former use remain behind the new ones.
        for sequence in 0..10 - round {
            put(&mut writer, 100 * round + sequence).unwrap();
        }
        assert_eq!(writer.commit().acknowledged.len() as u64, 10 - round);
        let number = writer.recording();
        drop(writer);
        if round < 5 {
            store.delete_recording(&channel(0), number).unwrap();
        }
    }
    drop(store);
    let store = Store::open(machine, &drives).unwrap();
    assert!(store.problems().is_empty());
    let recordings = store.recordings(&channel(0)).unwrap();
    assert_eq!(recordings.len(), 1);
    let reader = store.reader(&channel(0), recordings[0].number).unwrap();
    assert_eq!(reader.blocks(), [500, 501, 502, 503, 504].map(block));
}

#[test]
fn real_files_keep_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let drives: Vec<PathBuf> = ["one", "two"].map(|name| folder.path().join(name)).into();
    for (flush, name) in [(false, "a"), (true, "b")] {
        let files = Files::new().cached(true).flush_at_commit(flush);
        for drive in &drives {
            std::fs::create_dir_all(drive).unwrap();
            Store::prepare(&files, drive).unwrap();
            Store::prepare(&files, drive).unwrap();
        }
        let store = Store::open(files, &drives).unwrap();
        assert!(matches!(Store::open(files, &drives), Err(Error::Locked { .. })));
        store
            .create_lun(name, &LunOptions::new(&drives).segment_size(1 << 20).segments(2))
            .unwrap();
        store.create_stream(name, "x", &StreamOptions::new(64 << 10)).unwrap();
        let channel = ChannelName::new(name, "x", 0);
        let mut writer = store.writer(&channel, 5).unwrap();
        for sequence in 0..20 {
            let bytes = payload(64 << 10, sequence);
            let block = Block {
                sequence,
                time: 0,
                checksum: crc32c::crc32c(&bytes),
            };
            writer
                .write(block, |file, offset| file.write_all_at(&bytes, offset))
                .unwrap();
        }
        assert_eq!(writer.commit().acknowledged.len(), 20);
        drop((writer, store));
        let store = Store::open(files, &drives).unwrap();
        assert!(store.problems().is_empty());
        let mut reader = store.reader(&channel, 0).unwrap();
        for sequence in 0..20 {
            let mut bytes = vec![0; 64 << 10];
            let (block, ()) = reader
                .read(sequence, |file, offset| file.read_exact_at(&mut bytes, offset))
                .unwrap();
            assert_eq!(crc32c::crc32c(&bytes), block.checksum);
            assert_eq!(bytes, payload(64 << 10, sequence));
        }
        drop(reader);
        store.delete_recording(&channel, 0).unwrap();
        assert_eq!(store.lun(name).unwrap().free(), 4 << 20);
        store.delete_stream(name, "x").unwrap();
        store.delete_lun(name).unwrap();
    }
}
