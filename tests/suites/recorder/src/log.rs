// SPDX-License-Identifier: MIT OR Apache-2.0

//! The log of the kernel's device-mapper target `log-writes` (drivers/md/dm-log-writes.c).
//!
//! The log has a sector with its header, and for each entry a sector with the entry's header and the data that was written.
//! Entries with FUA are logged when they end. Other writes are logged when the next flush ends, before this flush, if they
//! ended before the flush began. So a write that has an entry was caused by nothing that comes later in the log.

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};

const MAGIC: u64 = 0x6a_7366_7773_6872;
const VERSION: u64 = 1;

const FLUSH: u64 = 1 << 0;
const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;

/// An entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The first byte of the drive that was written.
    pub offset: u64,
    /// Where the data is in the log.
    data: Range<usize>,
    /// Whether the drive's cache was flushed before.
    pub flush: bool,
    /// Whether the write was durable when it ended.
    pub fua: bool,
}

impl Entry {
    /// Returns the number of bytes that were written.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether nothing was written: the entry is a flush.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }
}

/// A log.
#[derive(Debug)]
pub struct Log {
    bytes: Vec<u8>,
    entries: Vec<Entry>,
}

fn word(bytes: &[u8], at: usize) -> Result<u64> {
    let word = bytes
        .get(at..at + 8)
        .context("the log ends in the middle of an entry")?;
    Ok(u64::from_le_bytes(word.try_into()?))
}

impl Log {
    /// Parses a log.
    ///
    /// # Errors
    ///
    /// The bytes are no log, an entry is incomplete, or the drive had to discard blocks.
    pub fn parse(bytes: Vec<u8>) -> Result<Self> {
        ensure!(
            word(&bytes, 0)? == MAGIC && word(&bytes, 8)? == VERSION,
            "this is no log of dm-log-writes"
        );
        let count = word(&bytes, 16)?;
        let size = word(&bytes, 24)? as u32 as usize;
        ensure!(size >= 512 && size.is_power_of_two(), "sectors of {size} bytes");
        let mut entries = Vec::new();
        let mut at = size;
        for number in 0..count {
            let [sector, sectors, flags] = [0, 8, 16].map(|field| word(&bytes, at + field));
            let (sector, sectors, flags) = (sector?, sectors?, flags?);
            at += size;
            if flags & DISCARD != 0 {
                bail!("entry {number} discards blocks, whose content is not known afterwards");
            }
            let length = usize::try_from(sectors)?
                .checked_mul(size)
                .context("length of an entry")?;
            let data = at..at.checked_add(length).context("length of an entry")?;
            ensure!(data.end <= bytes.len(), "entry {number} is not complete");
            at = data.end;
            if flags & MARK == 0 {
                entries.push(Entry {
                    offset: sector.checked_mul(size as u64).context("sector of an entry")?,
                    data,
                    flush: flags & FLUSH != 0,
                    fua: flags & FUA != 0,
                });
            }
        }
        Ok(Self { bytes, entries })
    }

    /// Returns the entries in the order of the log.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the data of an entry.
    pub fn data(&self, entry: &Entry) -> &[u8] {
        &self.bytes[entry.data.clone()]
    }
}

/// Makes logs for tests.
#[cfg(test)]
pub(crate) struct Builder {
    bytes: Vec<u8>,
    count: u64,
}

#[cfg(test)]
impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; 512],
            count: 0,
        }
    }

    pub(crate) fn entry(mut self, flags: u64, sector: u64, data: &[u8]) -> Self {
        let mut header = vec![0; 512];
        for (field, value) in [sector, data.len() as u64 / 512, flags, 0].iter().enumerate() {
            header[field * 8..][..8].copy_from_slice(&value.to_le_bytes());
        }
        self.bytes.extend(header);
        self.bytes.extend(data);
        self.count += 1;
        self
    }

    pub(crate) fn write(self, sector: u64, byte: u8, sectors: usize) -> Self {
        self.entry(0, sector, &vec![byte; sectors * 512])
    }

    pub(crate) fn fua(self, sector: u64, byte: u8, sectors: usize) -> Self {
        self.entry(FUA, sector, &vec![byte; sectors * 512])
    }

    pub(crate) fn flush(self) -> Self {
        self.entry(FLUSH, 0, &[])
    }

    pub(crate) fn bytes(mut self) -> Vec<u8> {
        for (field, value) in [MAGIC, VERSION, self.count, 512].iter().enumerate() {
            self.bytes[field * 8..][..8].copy_from_slice(&value.to_le_bytes());
        }
        self.bytes
    }

    pub(crate) fn log(self) -> Log {
        Log::parse(self.bytes()).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_their_place_flags_and_data() {
        let log = Builder::new()
            .write(3, 7, 2)
            .entry(MARK, 0, &[])
            .flush()
            .fua(8, 9, 1)
            .entry(FLUSH | FUA, 1, &[5; 512])
            .log();
        let found: Vec<_> = log
            .entries()
            .iter()
            .map(|entry| {
                (
                    entry.offset,
                    entry.len(),
                    entry.flush,
                    entry.fua,
                    log.data(entry).first().copied(),
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                (3 * 512, 1024, false, false, Some(7)),
                (0, 0, true, false, None),
                (8 * 512, 512, false, true, Some(9)),
                (512, 512, true, true, Some(5)),
            ]
        );
        assert!(log.entries()[1].is_empty());
    }

    #[test]
    fn damaged_logs_are_errors() {
        let good = Builder::new().write(0, 1, 4).bytes();
        assert!(Log::parse(good.clone()).is_ok());
        for length in [0, 20, 512, 600, 1024, good.len() - 1] {
            assert!(Log::parse(good[..length].to_vec()).is_err(), "{length} bytes");
        }
        for (at, byte) in [(0, 0), (8, 2), (24, 3), (512 + 8, 9), (512 + 16, 4)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert!(Log::parse(bad).is_err(), "byte {at}");
        }
        let mut huge = good;
        huge[512 + 8..512 + 16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Log::parse(huge).is_err());
    }
}
