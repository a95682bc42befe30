// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a drive with a volatile cache can have after a power cut.
//!
//! Entries before the cut whose data is durable are there: those with FUA, and those that a later flush before the cut
//! covers. Each other write before the cut is lost, there, or torn: any of its sectors of 512 bytes can be there. A write
//! with FUA that ends next was in flight, and can be torn too.

use anyhow::{Result, ensure};

use crate::choices::Choices;
use crate::log::{Entry, Log};
use crate::marks::{Mark, marks};

/// The unit that a drive writes completely or not at all.
const SECTOR: usize = 512;

/// How much of what is not durable remains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    Nothing,
    All,
    Any,
}

/// Returns the content of a drive after a power cut before entry number `at` of its log. `base` is the content before the
/// log.
///
/// # Errors
///
/// An entry is not inside the drive.
pub fn image(base: &[u8], log: &Log, at: usize, choices: &mut Choices) -> Result<Vec<u8>> {
    let mut image = base.to_vec();
    let entries = log.entries();
    let flushed = entries[..at].iter().rposition(|entry| entry.flush).unwrap_or(0);
    let rest = [Rest::Nothing, Rest::All, Rest::Any, Rest::Any][choices.below(4) as usize];
    for (number, entry) in entries[..at].iter().enumerate() {
        let keep = if entry.fua || number < flushed { Rest::All } else { rest };
        apply(&mut image, log, entry, keep, choices)?;
    }
    if let Some(entry) = entries.get(at).filter(|entry| entry.fua) {
        apply(&mut image, log, entry, rest, choices)?;
    }
    Ok(image)
}

fn apply(image: &mut [u8], log: &Log, entry: &Entry, keep: Rest, choices: &mut Choices) -> Result<()> {
    let data = log.data(entry);
    let start = entry.offset as usize;
    ensure!(
        start.checked_add(data.len()).is_some_and(|end| end <= image.len()),
        "{} bytes at {start} are outside of a drive of {} bytes",
        data.len(),
        image.len()
    );
    for (number, sector) in data.chunks(SECTOR).enumerate() {
        let there = match keep {
            Rest::Nothing => false,
            Rest::All => true,
            Rest::Any => choices.coin(),
        };
        if there {
            image[start + number * SECTOR..][..sector.len()].copy_from_slice(sector);
        }
    }
    Ok(())
}

/// A moment of a power cut of several drives, and what was acknowledged before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// The number of the first entry that is after the cut, for each drive.
    pub at: Vec<usize>,
    /// The last mark before the cut.
    pub mark: Mark,
}

/// Chooses a moment after a mark that is on all drives, and before the next mark is on any. What happens on the drives in
/// between is not ordered.
///
/// # Errors
///
/// The drives have no marks, or not the same.
pub fn moment(logs: &[&Log], choices: &mut Choices) -> Result<Moment> {
    let all: Vec<Vec<(usize, Mark)>> = logs.iter().map(|log| marks(log)).collect();
    let marks = |number: usize| all[number].iter().map(|(_, mark)| mark);
    ensure!(
        !all.is_empty() && !all[0].is_empty() && (1..all.len()).all(|number| marks(number).eq(marks(0))),
        "the drives have different marks, or none: {:?}",
        all.iter().map(Vec::len).collect::<Vec<_>>()
    );
    let chosen = choices.below(all[0].len() as u64) as usize;
    let at = all.iter().zip(logs).map(|(marks, log)| {
        let first = marks[chosen].0 + 1;
        let last = marks.get(chosen + 1).map_or(log.entries().len(), |(at, _)| *at);
        first + choices.below((last - first + 1) as u64) as usize
    });
    Ok(Moment {
        at: at.collect(),
        mark: all[0][chosen].1.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::Builder;
    use std::collections::BTreeSet;

    /// Returns the first byte of each sector of the images after cuts before entry `at`, for many seeds.
    fn images(log: &Log, at: usize) -> BTreeSet<Vec<u8>> {
        let all = (0..300).map(|seed| image(&[0; 4 * 512], log, at, &mut Choices::new(seed)).unwrap());
        all.map(|image| image.chunks(512).map(|sector| sector[0]).collect())
            .collect()
    }

    #[test]
    fn durable_writes_stay_and_others_are_lost_torn_or_there() {
        let log = Builder::new()
            .write(0, 1, 2)
            .flush()
            .fua(2, 2, 1)
            .write(0, 3, 2)
            .flush()
            .log();
        assert_eq!(images(&log, 0), BTreeSet::from([vec![0, 0, 0, 0]]));
        // Before the flush has ended.
        let torn = |a: [u8; 4], b: [u8; 4], c: [u8; 4], d: [u8; 4]| BTreeSet::from([a, b, c, d].map(Vec::from));
        assert_eq!(
            images(&log, 1),
            torn([0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0])
        );
        // The write with FUA is in flight, and then durable.
        assert_eq!(images(&log, 2), BTreeSet::from([vec![1, 1, 0, 0], vec![1, 1, 2, 0]]));
        assert_eq!(images(&log, 3), BTreeSet::from([vec![1, 1, 2, 0]]));
        assert_eq!(
            images(&log, 4),
            torn([1, 1, 2, 0], [3, 1, 2, 0], [1, 3, 2, 0], [3, 3, 2, 0])
        );
        assert_eq!(images(&log, 5), BTreeSet::from([vec![3, 3, 2, 0]]));
    }

    #[test]
    fn writes_outside_of_the_drive_are_errors() {
        let log = Builder::new().write(3, 1, 2).log();
        assert!(image(&[0; 4 * 512], &log, 1, &mut Choices::new(0)).is_err());
        assert!(image(&[0; 5 * 512], &log, 1, &mut Choices::new(0)).is_ok());
    }

    #[test]
    fn moment_is_between_the_same_marks_on_all_drives() {
        let mark = |number| {
            let acknowledged = (0..number).collect();
            Mark {
                number,
                acknowledged,
                ..Mark::default()
            }
            .encode()
        };
        let log = |between: &[usize]| {
            let mut log = Builder::new().write(0, 1, 1);
            for (number, &count) in between.iter().enumerate() {
                log = log.entry(2, 16, &mark(number as u64));
                for _ in 0..count {
                    log = log.write(0, 1, 1);
                }
            }
            log.log()
        };
        let logs = [log(&[0, 2, 1]), log(&[3, 0, 0])];
        let mut seen = BTreeSet::new();
        for seed in 0..500 {
            let moment = moment(&[&logs[0], &logs[1]], &mut Choices::new(seed)).unwrap();
            assert_eq!(moment.mark.acknowledged.len() as u64, moment.mark.number);
            seen.insert((moment.mark.number, moment.at[0], moment.at[1]));
        }
        let expected: BTreeSet<_> = [(0, 2..=2, 2..=5), (1, 3..=5, 6..=6), (2, 6..=7, 7..=7)]
            .into_iter()
            .flat_map(|(number, a, b)| a.flat_map(move |a| b.clone().map(move |b| (number, a, b))))
            .collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn drives_with_different_marks_are_errors() {
        let log = |numbers: &[u64]| {
            let mark = |&number| {
                Mark {
                    number,
                    ..Mark::default()
                }
                .encode()
            };
            let add = |log: Builder, number| log.entry(2, 16, &mark(number));
            numbers.iter().fold(Builder::new(), add).log()
        };
        let mut choices = Choices::new(1);
        for (a, b) in [(&[0, 1][..], &[0][..]), (&[], &[]), (&[0], &[1])] {
            assert!(moment(&[&log(a), &log(b)], &mut choices).is_err());
        }
        assert!(moment(&[], &mut choices).is_err());
    }
}
