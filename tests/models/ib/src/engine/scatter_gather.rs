// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ranges of scatter/gather lists.

use std::ops::Range;

use crate::work::{Payload, Segment, Sge};

/// Returns the length of a payload in bytes.
pub(super) fn total(payload: &Payload) -> u64 {
    match payload {
        Payload::Memory(pieces) => pieces.iter().map(|piece| u64::from(piece.length)).sum(),
        Payload::Inline(bytes) => bytes.len() as u64,
        Payload::Mixed(pieces) => pieces.iter().map(Segment::len).sum(),
    }
}

/// Returns the pieces that overlap `len` bytes from `offset` on. Each item has the range within the piece, and the
/// position of the range within the `len` bytes.
pub(super) fn overlap<'a, T>(
    pieces: &'a [T],
    length: impl Fn(&T) -> u64 + 'a,
    offset: u64,
    len: usize,
) -> impl Iterator<Item = (&'a T, Range<u64>, usize)> + 'a {
    let end = offset + len as u64;
    let mut at = 0_u64;
    pieces.iter().filter_map(move |piece| {
        let (start, stop) = (at, at + length(piece));
        at = stop;
        let (from, to) = (start.max(offset), stop.min(end));
        (from < to).then(|| (piece, from - start..to - start, (from - offset) as usize))
    })
}

/// Returns the part `range` of a scatter/gather entry.
pub(super) fn part(piece: &Sge, range: &Range<u64>) -> Sge {
    Sge {
        key: piece.key,
        address: piece.address.wrapping_add(range.start),
        // Not truncated: at most the length of the entry.
        length: (range.end - range.start) as u32,
    }
}

/// Returns the parts of a scatter/gather list that cover `len` bytes from `offset` on, each with its position in these
/// bytes.
pub(super) fn parts(pieces: &[Sge], offset: u64, len: usize) -> impl Iterator<Item = (Sge, usize)> + '_ {
    overlap(pieces, |piece| piece.length.into(), offset, len).map(|(piece, range, at)| (part(piece, &range), at))
}
