// SPDX-License-Identifier: MIT OR Apache-2.0

//! The bytes on the drives: pages with a header, records of the index, and where they are in a segment.

use std::path::Path;

use super::error::{Error, Result};

/// The unit of direct I/O.
pub(crate) const PAGE: usize = 4096;
/// The bytes of a record.
pub(crate) const RECORD: usize = 64;
/// The records of a page.
pub(crate) const RECORDS_PER_PAGE: usize = PAGE / RECORD;
/// The pages at the beginning of a segment: two copies of its header.
pub(crate) const HEADER_PAGES: u64 = 2;

const VERSION: u64 = 1;
const LUN: u64 = u64::from_le_bytes(*b"p2pmLUN\0");
const STREAM: u64 = u64::from_le_bytes(*b"p2pmSTRM");
const SEGMENT: u64 = u64::from_le_bytes(*b"p2pmSEGM");
const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"RECD");
/// The header has its checksum at the end of the first sector.
const CHECKSUM_AT: usize = 508;

pub(crate) type Page = [u8; PAGE];

/// Why a page is not a header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Invalid {
    Damaged,
    Version(u64),
}

impl Invalid {
    /// Returns the error for the file `path`.
    pub(crate) fn at(&self, path: &Path) -> Error {
        let path = path.to_owned();
        match self {
            Self::Damaged => Error::Damaged {
                path,
                why: "its header is not valid",
            },
            Self::Version(version) => Error::Version {
                path,
                version: *version,
            },
        }
    }
}

fn encode(magic: u64, fields: &[u64]) -> Page {
    let mut page = [0; PAGE];
    for (at, value) in [magic, VERSION].iter().chain(fields).enumerate() {
        page[at * 8..][..8].copy_from_slice(&value.to_le_bytes());
    }
    let checksum = crc32c::crc32c(&page[..CHECKSUM_AT]);
    page[CHECKSUM_AT..][..4].copy_from_slice(&checksum.to_le_bytes());
    page
}

fn decode<const N: usize>(magic: u64, page: &Page) -> std::result::Result<[u64; N], Invalid> {
    let field = |at: usize| u64_at(page, at * 8);
    if field(0) != magic || u32_at(page, CHECKSUM_AT) != crc32c::crc32c(&page[..CHECKSUM_AT]) {
        return Err(Invalid::Damaged);
    }
    if field(1) != VERSION {
        return Err(Invalid::Version(field(1)));
    }
    Ok(std::array::from_fn(|at| field(at + 2)))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// The content of the file `lun` in the folder of a LUN on one drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LunHeader {
    pub(crate) id: u64,
    pub(crate) member: u64,
    pub(crate) members: u64,
    pub(crate) segment_size: u64,
    pub(crate) segments: u64,
}

impl LunHeader {
    pub(crate) fn encode(&self) -> Page {
        let fields = [self.id, self.member, self.members, self.segment_size, self.segments];
        encode(LUN, &fields)
    }

    pub(crate) fn decode(page: &Page) -> std::result::Result<Self, Invalid> {
        let [id, member, members, segment_size, segments] = decode(LUN, page)?;
        Ok(Self {
            id,
            member,
            members,
            segment_size,
            segments,
        })
    }
}

/// The content of the file `stream` in the folder of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamHeader {
    pub(crate) lun: u64,
    pub(crate) id: u64,
    pub(crate) block_size: u64,
    pub(crate) channels: u64,
}

impl StreamHeader {
    pub(crate) fn encode(&self) -> Page {
        encode(STREAM, &[self.lun, self.id, self.block_size, self.channels])
    }

    pub(crate) fn decode(page: &Page) -> std::result::Result<Self, Invalid> {
        let [lun, id, block_size, channels] = decode(STREAM, page)?;
        Ok(Self {
            lun,
            id,
            block_size,
            channels,
        })
    }
}

/// The header of a segment: which recording uses the segment, and how often it was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    pub(crate) lun: u64,
    pub(crate) number: u64,
    pub(crate) generation: u64,
    pub(crate) stream: u64,
    pub(crate) channel: u64,
    pub(crate) recording: u64,
    pub(crate) block_size: u64,
    pub(crate) started: u64,
}

impl SegmentHeader {
    pub(crate) fn encode(&self) -> Page {
        let fields = [
            self.lun,
            self.number,
            self.generation,
            self.stream,
            self.channel,
            self.recording,
            self.block_size,
            self.started,
        ];
        encode(SEGMENT, &fields)
    }

    fn decode(page: &Page) -> std::result::Result<Self, Invalid> {
        let [lun, number, generation, stream, channel, recording, block_size, started] = decode(SEGMENT, page)?;
        Ok(Self {
            lun,
            number,
            generation,
            stream,
            channel,
            recording,
            block_size,
            started,
        })
    }

    /// The byte of the segment at which the header of a generation is. The copy of the generation before stays.
    pub(crate) fn offset(generation: u64) -> u64 {
        generation % HEADER_PAGES * PAGE as u64
    }

    /// Returns the header of the newest generation in the header pages of a segment, or `None` if the segment was not
    /// used yet.
    ///
    /// The first header goes to page 1, so page 0 of a segment without a complete header is zero.
    pub(crate) fn newest(pages: &[Page; 2]) -> std::result::Result<Option<Self>, Invalid> {
        let mut found: Option<Self> = None;
        for page in pages {
            match Self::decode(page) {
                Ok(header) if found.is_none_or(|other| other.generation < header.generation) => found = Some(header),
                Ok(_) | Err(Invalid::Damaged) => {}
                Err(version) => return Err(version),
            }
        }
        if found.is_none() && pages[0].iter().any(|&byte| byte != 0) {
            return Err(Invalid::Damaged);
        }
        Ok(found)
    }
}

/// A record of the index: one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) lun: u64,
    pub(crate) generation: u64,
    pub(crate) page: u32,
    pub(crate) slot: u32,
    pub(crate) sequence: u64,
    pub(crate) time: u64,
    pub(crate) checksum: u32,
    /// Counts the records of a recording. Of two records with one sequence number, the later one is valid.
    pub(crate) order: u64,
}

impl Record {
    pub(crate) fn encode(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(4, &RECORD_MAGIC.to_le_bytes());
        put(8, &self.generation.to_le_bytes());
        put(16, &self.sequence.to_le_bytes());
        put(24, &self.time.to_le_bytes());
        put(32, &self.slot.to_le_bytes());
        put(36, &self.checksum.to_le_bytes());
        put(40, &self.order.to_le_bytes());
        put(48, &self.page.to_le_bytes());
        put(56, &self.lun.to_le_bytes());
        let checksum = crc32c::crc32c(&bytes[4..]);
        bytes[..4].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let valid = u32_at(bytes, 4) == RECORD_MAGIC && u32_at(bytes, 0) == crc32c::crc32c(&bytes[4..RECORD]);
        valid.then(|| Self {
            generation: u64_at(bytes, 8),
            sequence: u64_at(bytes, 16),
            time: u64_at(bytes, 24),
            slot: u32_at(bytes, 32),
            checksum: u32_at(bytes, 36),
            order: u64_at(bytes, 40),
            page: u32_at(bytes, 48),
            lun: u64_at(bytes, 56),
        })
    }
}

/// Where index and payload are in a segment: two header pages, one index page for each slot, the slots.
///
/// Each commit writes at least one record and begins a new page, so an index never needs more pages than slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) block_size: u64,
    pub(crate) slots: u32,
}

impl Geometry {
    /// Returns the geometry, or an error if the block size is not valid, or not one block fits.
    pub(crate) fn new(segment_size: u64, block_size: u64) -> Result<Self> {
        let page = PAGE as u64;
        let invalid = |remedy| Error::InvalidValue {
            what: "block size",
            value: block_size,
            remedy,
        };
        if block_size == 0 || block_size % page != 0 {
            return Err(invalid("use a multiple of 4096"));
        }
        let pages = (segment_size / page).saturating_sub(HEADER_PAGES);
        let slots = pages / (block_size / page + 1);
        match u32::try_from(slots) {
            Ok(0) => Err(invalid("use a smaller block, or a LUN with larger segments")),
            Ok(slots) => Ok(Self { block_size, slots }),
            Err(_) => Err(invalid("use a larger block, or a LUN with smaller segments")),
        }
    }

    /// The byte of the segment at which a page of the index begins.
    pub(crate) fn index_offset(page: u32) -> u64 {
        (HEADER_PAGES + u64::from(page)) * PAGE as u64
    }

    /// The byte of the segment at which the payload of a slot begins.
    pub(crate) fn slot_offset(&self, slot: u32) -> u64 {
        Self::index_offset(self.slots) + u64::from(slot) * self.block_size
    }
}

/// Checks the name of a LUN or a stream.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if (1..=64).contains(&name.len()) && name.bytes().all(valid) {
        return Ok(());
    }
    Err(Error::InvalidName { name: name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(generation: u64) -> SegmentHeader {
        SegmentHeader {
            lun: 1,
            number: 2,
            generation,
            stream: 3,
            channel: 4,
            recording: 5,
            block_size: 4096,
            started: 6,
        }
    }

    #[test]
    fn changed_bit_makes_header_and_record_invalid() {
        let page = header(1).encode();
        assert_eq!(SegmentHeader::decode(&page), Ok(header(1)));
        let record = Record {
            lun: 1,
            generation: 2,
            page: 3,
            slot: 4,
            sequence: 5,
            time: 6,
            checksum: 7,
            order: 8,
        };
        assert_eq!(Record::decode(&record.encode()), Some(record));
        for bit in 0..RECORD * 8 {
            let mut bytes = record.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&bytes), None, "bit {bit}");
            let mut changed = page;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&changed), Err(Invalid::Damaged), "bit {bit}");
        }
        assert_eq!(Record::decode(&[0; RECORD]), None);
    }

    #[test]
    fn newest_header_wins_and_damage_is_reported() {
        let zero = [0; PAGE];
        assert_eq!(SegmentHeader::newest(&[zero, zero]), Ok(None));
        let (first, second) = (header(1).encode(), header(2).encode());
        assert_eq!(SegmentHeader::newest(&[zero, first]), Ok(Some(header(1))));
        assert_eq!(SegmentHeader::newest(&[second, first]), Ok(Some(header(2))));
        let mut torn = first;
        torn[100] ^= 1;
        assert_eq!(
            SegmentHeader::newest(&[zero, torn]),
            Ok(None),
            "the first header was not complete"
        );
        assert_eq!(SegmentHeader::newest(&[second, torn]), Ok(Some(header(2))));
        assert_eq!(SegmentHeader::newest(&[torn, torn]), Err(Invalid::Damaged));
        let mut newer = second;
        newer[8] = 9;
        let checksum = crc32c::crc32c(&newer[..CHECKSUM_AT]);
        newer[CHECKSUM_AT..][..4].copy_from_slice(&checksum.to_le_bytes());
        assert_eq!(SegmentHeader::newest(&[newer, first]), Err(Invalid::Version(9)));
    }

    #[test]
    fn slots_end_inside_segment_and_do_not_overlap_index() {
        for (segment, block) in [(1 << 20, 4096), (1 << 28, 1 << 20), (5 * 4096, 4096), (4 << 20, 12288)] {
            let geometry = Geometry::new(segment, block).unwrap();
            assert!(geometry.slot_offset(geometry.slots) <= segment, "{segment} {block}");
            assert!(geometry.slot_offset(0) >= Geometry::index_offset(geometry.slots));
        }
        for (segment, block) in [
            (1 << 20, 0),
            (1 << 20, 4095),
            (1 << 20, 1 << 20),
            (3 * 4096, 4096),
            (u64::MAX, 4096),
        ] {
            assert!(Geometry::new(segment, block).is_err(), "{segment} {block}");
        }
    }

    #[test]
    fn name_cannot_be_a_path_or_have_a_suffix() {
        for name in ["", ".", "..", "a/b", "a.new", "a b", "\u{e4}", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        check_name("Radar_1-b").unwrap();
    }
}
