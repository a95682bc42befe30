// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ranges of scatter/gather lists.

use std::ops::Range;

use crate::work::{Payload, Segment, Sge};

/// Returns the length of a payload in bytes.
pub(super) fn total(payload: &Payload) -> u64 {
    match payload {
        Payload::Memory(sges) => sges.iter().map(|sge| u64::from(sge.length)).sum(),
        Payload::Inline(bytes) => bytes.len() as u64,
        Payload::Mixed(segments) => segments.iter().map(Segment::len).sum(),
    }
}

/// Returns the entries that overlap `len` bytes from `offset` on. Each item has the range within the entry, and the
/// position of the range within the `len` bytes.
pub(super) fn overlap<'a, T>(
    entries: &'a [T],
    length: impl Fn(&T) -> u64 + 'a,
    offset: u64,
    len: usize,
) -> impl Iterator<Item = (&'a T, Range<u64>, usize)> + 'a {
    let end = offset + len as u64;
    let mut at = 0_u64;
    entries.iter().filter_map(move |entry| {
        let (start, stop) = (at, at + length(entry));
        at = stop;
        let (from, to) = (start.max(offset), stop.min(end));
        (from < to).then(|| (entry, from - start..to - start, (from - offset) as usize))
    })
}

/// Returns the part `range` of a scatter/gather entry.
pub(super) fn part(sge: &Sge, range: &Range<u64>) -> Sge {
    Sge {
        key: sge.key,
        address: sge.address.wrapping_add(range.start),
        // Not truncated: at most the length of the entry.
        length: (range.end - range.start) as u32,
    }
}

/// Returns the parts of a scatter/gather list that cover `len` bytes from `offset` on, each with its position in these
/// bytes.
pub(super) fn parts(sges: &[Sge], offset: u64, len: usize) -> impl Iterator<Item = (Sge, usize)> + '_ {
    overlap(sges, |sge| sge.length.into(), offset, len).map(|(sge, range, at)| (part(sge, &range), at))
}
