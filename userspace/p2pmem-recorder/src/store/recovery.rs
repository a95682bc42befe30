// SPDX-License-Identifier: MIT OR Apache-2.0

//! Opening a store: finishes what a crash interrupted, and reads the index of all recordings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use super::error::{Context, Error, Result};
use super::format::{Geometry, Invalid, LunHeader, Page, Record, SegmentHeader, StreamHeader, PAGE, RECORD};
use super::layout;
use super::removal::{mark, names, release_folder, release_marked, remove_tree};
use super::state::{channel_folder, Channel, ChannelName, Content, Lun, Member, Recording, State, Stored, Stream};
use super::system::System;

/// Something that opening the store found and could not repair. Everything else is available.
#[derive(Debug)]
pub struct Problem {
    /// The LUN, stream, recording, or segment.
    pub name: String,
    /// What is wrong.
    pub error: Error,
}

/// The pages of the index that one read transfers.
const PAGES_PER_READ: u32 = 16;

/// Reads the first page of a file.
fn read_page(system: &impl System, path: &Path) -> Result<Page> {
    let mut page = [0; PAGE];
    let file = system.open(path).context("opening", path)?;
    system.read(&file, 0, &mut page).context("reading", path)?;
    Ok(page)
}

/// The pages at the beginning of a segment.
pub(crate) fn segment_header<S: System>(system: &S, file: &S::File, path: &Path) -> Result<Option<SegmentHeader>> {
    let mut bytes = [0; 2 * PAGE];
    system.read(file, 0, &mut bytes).context("reading", path)?;
    let pages = [0, 1].map(|page| std::array::from_fn(|at| bytes[page * PAGE + at]));
    SegmentHeader::newest(&pages).map_err(|invalid| invalid.at(path))
}

/// Opens everything on the drives. A LUN that cannot be opened is a problem, not an error.
pub(crate) fn recover(system: &impl System, drives: &[PathBuf]) -> Result<(State, Vec<Problem>)> {
    let mut problems = Vec::new();
    let mut state = State::default();
    let parents: Vec<PathBuf> = drives.iter().map(|drive| layout::luns(drive)).collect();
    finish_removals(system, &parents, &read_lun, |parent, name| {
        remove_tree(system, &parent.join(name))?;
        system.sync_folder(parent).context("syncing", parent)
    })?;

    let mut found: BTreeMap<(String, u64), Vec<(usize, LunHeader)>> = BTreeMap::new();
    for (drive, parent) in parents.iter().enumerate() {
        for name in names(system, parent)? {
            match read_lun(system, &parent.join(&name)) {
                Ok(Ok(header)) => found.entry((name, header.id)).or_default().push((drive, header)),
                Ok(Err(invalid)) => problems.push(Problem {
                    error: invalid.at(&parent.join(&name).join(layout::LUN_FILE)),
                    name,
                }),
                Err(error) => problems.push(Problem { name, error }),
            }
        }
    }
    for ((name, id), mut members) in found {
        members.sort_by_key(|(_, header)| header.member);
        let header = members[0].1;
        let complete = members.len() as u64 == header.members
            && members
                .iter()
                .zip(0..)
                .all(|((_, other), member)| *other == LunHeader { member, ..header });
        let result = if !complete {
            Err(Error::Incomplete {
                lun: name.clone(),
                found: members.len(),
                members: usize::try_from(header.members).unwrap_or(usize::MAX),
            })
        } else if state.luns.contains_key(&name) {
            Err(Error::Exists { name: name.clone() })
        } else {
            let members = members.iter().map(|(drive, _)| Member {
                drive: drives[*drive].clone(),
                folder: parents[*drive].join(&name),
                free: BTreeSet::new(),
            });
            let mut lun = Lun {
                id,
                segment_size: header.segment_size,
                segments: header.segments,
                members: members.collect(),
                streams: BTreeMap::new(),
            };
            recover_lun(system, &name, &mut lun, &mut problems).map(|()| lun)
        };
        match result {
            Ok(lun) => drop(state.luns.insert(name, lun)),
            Err(error) => problems.push(Problem { name, error }),
        }
    }
    Ok((state, problems))
}

fn read_lun<S: System>(system: &S, folder: &Path) -> Result<std::result::Result<LunHeader, Invalid>> {
    Ok(LunHeader::decode(&read_page(system, &folder.join(layout::LUN_FILE))?))
}

fn read_stream<S: System>(system: &S, folder: &Path) -> Result<std::result::Result<StreamHeader, Invalid>> {
    Ok(StreamHeader::decode(&read_page(
        system,
        &folder.join(layout::STREAM_FILE),
    )?))
}

/// The identifier of a LUN or a stream.
trait Identified {
    fn id(&self) -> u64;
}

impl Identified for LunHeader {
    fn id(&self) -> u64 {
        self.id
    }
}

impl Identified for StreamHeader {
    fn id(&self) -> u64 {
        self.id
    }
}

type ReadHeader<'a, S, H> = &'a dyn Fn(&S, &Path) -> Result<std::result::Result<H, Invalid>>;

/// Finishes creations and deletions of LUNs or streams that a crash interrupted: what has a suffix in one of `parents`
/// is removed from all of them.
///
/// A folder without a readable header has no counterpart without a suffix: headers are durable before the first rename of
/// a creation, and a deletion removes nothing before all renames are durable.
fn finish_removals<S: System, H: Identified>(
    system: &S,
    parents: &[PathBuf],
    read_header: ReadHeader<'_, S, H>,
    mut remove: impl FnMut(&Path, &str) -> Result<()>,
) -> Result<()> {
    let mut marked = Vec::new();
    for parent in parents {
        for name in names(system, parent)? {
            if let (plain, true) = layout::split_suffix(&name) {
                let id = read_header(system, &parent.join(&name))
                    .ok()
                    .and_then(std::result::Result::ok);
                marked.push((plain.to_owned(), id.map(|header| header.id())));
            }
        }
    }
    if marked.is_empty() {
        return Ok(());
    }
    for (name, id) in &marked {
        let same = parents.iter().filter(|parent| {
            let header = read_header(system, &parent.join(name))
                .ok()
                .and_then(std::result::Result::ok);
            header.is_some_and(|header| Some(header.id()) == *id)
        });
        mark(system, &same.cloned().collect::<Vec<_>>(), name)?;
    }
    for parent in parents {
        system.sync_folder(parent).context("syncing", parent)?;
    }
    for parent in parents {
        for name in names(system, parent)? {
            if layout::split_suffix(&name).1 {
                remove(parent, &name)?;
            }
        }
    }
    Ok(())
}

fn recover_lun(system: &impl System, name: &str, lun: &mut Lun, problems: &mut Vec<Problem>) -> Result<()> {
    let folders: Vec<PathBuf> = lun.members.iter().map(|member| member.folder.clone()).collect();
    let parents: Vec<PathBuf> = folders.iter().map(|folder| layout::streams(folder)).collect();
    finish_removals(system, &parents, &read_stream, |parent, marked| {
        let member = parents.iter().position(|other| other == parent).unwrap_or_default();
        release_folder(system, &folders[member], parent, marked).map(drop)
    })?;

    let streams: BTreeSet<String> = parents
        .iter()
        .map(|parent| names(system, parent))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    for stream in streams {
        let result = recover_stream(system, name, lun, &folders, &stream, problems);
        match result {
            Ok(recovered) => drop(lun.streams.insert(stream, recovered)),
            Err(error) => problems.push(Problem {
                name: format!("{name}/{stream}"),
                error,
            }),
        }
    }
    for member in &mut lun.members {
        let free = names(system, &layout::free(&member.folder))?;
        member.free = free.iter().filter_map(|name| name.parse().ok()).collect();
    }
    Ok(())
}

fn recover_stream(
    system: &impl System,
    lun_name: &str,
    lun: &Lun,
    folders: &[PathBuf],
    stream: &str,
    problems: &mut Vec<Problem>,
) -> Result<Stream> {
    let mut header = None;
    for folder in folders {
        let folder = layout::streams(folder).join(stream);
        let path = folder.join(layout::STREAM_FILE);
        let found = read_stream(system, &folder)?.map_err(|invalid| invalid.at(&path))?;
        if found.lun != lun.id || header.is_some_and(|header| header != found) {
            let why = "it belongs to another LUN or stream";
            return Err(Error::Damaged { path, why });
        }
        header = Some(found);
    }
    let Some(header) = header else {
        return Err(super::state::not_found("stream", stream));
    };
    let geometry = Geometry::new(lun.segment_size, header.block_size)?;
    let mut channels = Vec::new();
    for number in 0..u32::try_from(header.channels).unwrap_or_default() {
        let name = ChannelName::new(lun_name, stream, number);
        channels.push(recover_channel(
            system, lun.id, folders, &name, header.id, geometry, problems,
        )?);
    }
    Ok(Stream {
        id: header.id,
        geometry,
        channels,
    })
}

fn recover_channel(
    system: &impl System,
    lun: u64,
    folders: &[PathBuf],
    name: &ChannelName,
    stream: u64,
    geometry: Geometry,
    problems: &mut Vec<Problem>,
) -> Result<Channel> {
    let parents: Vec<(PathBuf, PathBuf)> = folders
        .iter()
        .map(|folder| (folder.clone(), channel_folder(folder, name)))
        .collect();
    let channel_folders: Vec<PathBuf> = parents.iter().map(|(_, parent)| parent.clone()).collect();
    // {name of a recording: whether it is marked}
    let mut found: BTreeMap<String, bool> = BTreeMap::new();
    for parent in &channel_folders {
        for name in names(system, parent)? {
            let (plain, marked) = layout::split_suffix(&name);
            *found.entry(plain.to_owned()).or_default() |= marked;
        }
    }
    let mut channel = Channel::default();
    for (folder, marked) in found {
        let Ok(number) = folder.parse::<u64>() else { continue };
        channel.next = channel.next.max(number + 1);
        let mut removed = marked;
        if !marked {
            let expected = SegmentHeader {
                lun,
                number: 0,
                generation: 0,
                stream,
                channel: name.channel.into(),
                recording: number,
                block_size: geometry.block_size,
                started: 0,
            };
            let before = problems.len();
            let recording = recover_recording(system, &channel_folders, &folder, &expected, geometry, problems, name)?;
            // A recording without a block was never acknowledged.
            removed = recording.read().blocks.is_empty() && problems.len() == before;
            if !removed {
                channel.recordings.insert(number, Arc::new(recording));
            }
        }
        if removed {
            mark(system, &channel_folders, &folder)?;
            release_marked(system, &parents, &folder)?;
        }
    }
    Ok(channel)
}

fn recover_recording(
    system: &impl System,
    channel_folders: &[PathBuf],
    folder: &str,
    expected: &SegmentHeader,
    geometry: Geometry,
    problems: &mut Vec<Problem>,
    name: &ChannelName,
) -> Result<Recording> {
    let mut content = Content::default();
    let mut started = 0;
    for parent in channel_folders {
        if !names(system, parent)?.iter().any(|other| other == folder) {
            continue;
        }
        let parent = parent.join(folder);
        for file in names(system, &parent)? {
            let Ok(number) = file.parse() else { continue };
            let path = parent.join(file);
            let expected = SegmentHeader { number, ..*expected };
            let mut report = |error| {
                problems.push(Problem {
                    name: format!("{name}/{folder}"),
                    error,
                });
            };
            match recover_segment(system, &path, &expected, geometry, &mut report) {
                Ok((header, records)) => {
                    started = header.started;
                    let segment = content.segments.len() as u32;
                    content.segments.push(path);
                    for record in records {
                        let stored = Stored {
                            segment,
                            slot: record.slot,
                            time: record.time,
                            checksum: record.checksum,
                            order: record.order,
                        };
                        let place = content.blocks.entry(record.sequence).or_insert(stored);
                        if place.order < stored.order {
                            *place = stored;
                        }
                    }
                }
                Err(error) => report(error),
            }
        }
    }
    Ok(Recording {
        started,
        geometry,
        content: RwLock::new(content),
    })
}

/// Reads the index of a segment up to its end. Pages were written in order, each after the one before was durable, so the
/// index ends at the first page without a valid record. At least one page behind the end is read. If it has a valid record, a
/// page was damaged; then the whole index is read. The valid records of a damaged index are returned too.
fn recover_segment(
    system: &impl System,
    path: &Path,
    expected: &SegmentHeader,
    geometry: Geometry,
    report: &mut impl FnMut(Error),
) -> Result<(SegmentHeader, Vec<Record>)> {
    let damaged = |why| Error::Damaged {
        path: path.to_owned(),
        why,
    };
    let file = system.open(path).context("opening", path)?;
    // After a crash of the program only, a record may be in the drive's volatile cache. What is presented is durable.
    system.flush(&file).context("flushing", path)?;
    let header = segment_header(system, &file, path)?.ok_or_else(|| damaged("it has no header"))?;
    let same = SegmentHeader {
        generation: header.generation,
        started: header.started,
        ..*expected
    };
    if header != same {
        return Err(damaged("it belongs to another recording"));
    }
    let mut records = Vec::new();
    let mut slots = BTreeSet::new();
    let mut end = None;
    let mut is_damaged = false;
    for first in (0..geometry.slots).step_by(PAGES_PER_READ as usize) {
        let count = PAGES_PER_READ.min(geometry.slots - first);
        let mut bytes = vec![0; count as usize * PAGE];
        let read = system.read(&file, Geometry::index_offset(first), &mut bytes);
        if let Err(error) = read.context("reading", path) {
            report(error);
            break;
        }
        for (page, bytes) in (first..).zip(bytes.chunks(PAGE)) {
            let valid = |record: &Record| {
                (record.lun, record.generation, record.page) == (header.lun, header.generation, page)
                    && record.slot < geometry.slots
            };
            let found = bytes.chunks(RECORD).filter_map(Record::decode).filter(valid);
            let before = records.len();
            // Two records of one slot cannot be written.
            records.extend(found.filter(|record| slots.insert(record.slot)));
            if records.len() == before {
                end = end.or(Some(page));
            } else if end.is_some() {
                is_damaged = true;
            }
        }
        if !is_damaged && end.is_some_and(|end| end + 1 < first + count) {
            break;
        }
    }
    if is_damaged {
        report(damaged("a page in the middle of its index is not valid"));
    }
    Ok((header, records))
}
