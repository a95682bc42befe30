// SPDX-License-Identifier: MIT OR Apache-2.0

//! Buffers of queues: pages of the driver's memory that stand in a list, and rings of entries in them.

use p2pmem_vfio_user::{Dma, DmaError};

/// Bits of a page address that are none.
const PAGE_FLAGS: u64 = 0xfff;
/// Logarithm of the smallest page; contexts count from it.
pub(super) const PAGE_SHIFT: u32 = 12;

/// Memory in pages of equal size.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    list: Vec<u64>,
    shift: u32,
    start: u64,
    len: u64,
}

impl Pages {
    /// Creates a ring of `len` bytes whose pages' addresses are the 64-bit big-endian numbers in `list`. `log_page_size` counts
    /// from 4096 bytes, and the memory starts `offset` units of 1/64 page into the first one.
    ///
    /// Returns `None` if the list is too short, or the page size is too large.
    pub(super) fn new(list: &[u8], log_page_size: u32, offset: u32, len: u64) -> Option<Self> {
        let shift = PAGE_SHIFT + log_page_size;
        if shift > 40 || len == 0 || offset >= 64 {
            return None;
        }
        let start = u64::from(offset) << (shift - 6);
        let pages = start.checked_add(len)?.div_ceil(1 << shift);
        let list: Vec<u64> = list
            .chunks_exact(8)
            .take(usize::try_from(pages).ok()?)
            .map(|page| {
                let page = page.iter().fold(0, |value, byte| (value << 8) | u64::from(*byte));
                page & !PAGE_FLAGS
            })
            .collect();
        (list.len() as u64 == pages).then_some(Self {
            list,
            shift,
            start,
            len,
        })
    }

    /// Size in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Calls `step` with bus address, position in the range and length of each piece of a range. False if the range is
    /// not inside.
    fn pieces(
        &self,
        offset: u64,
        len: usize,
        mut step: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), DmaError>,
    ) -> Result<(), BufferError> {
        let end = offset.checked_add(len as u64).ok_or(BufferError::Outside)?;
        if end > self.len {
            return Err(BufferError::Outside);
        }
        let mut done = 0;
        while done < len {
            let at = self.start + offset + done as u64;
            let page = usize::try_from(at >> self.shift)
                .ok()
                .and_then(|page| self.list.get(page));
            let page = page.ok_or(BufferError::Outside)?;
            let inside = at & ((1 << self.shift) - 1);
            let run = ((1_u64 << self.shift) - inside).min((len - done) as u64) as usize;
            let address = page.checked_add(inside).ok_or(BufferError::Outside)?;
            step(address, done..done + run)?;
            done += run;
        }
        Ok(())
    }

    /// Reads a range.
    pub(super) fn read(&self, dma: &Dma, offset: u64, data: &mut [u8]) -> Result<(), BufferError> {
        self.pieces(offset, data.len(), |address, range| dma.read(address, &mut data[range]))
    }

    /// Writes a range.
    pub(super) fn write(&self, dma: &Dma, offset: u64, data: &[u8]) -> Result<(), BufferError> {
        self.pieces(offset, data.len(), |address, range| dma.write(address, &data[range]))
    }
}

/// A queue's buffer cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BufferError {
    /// The range is not in the buffer.
    #[error("outside of the buffer")]
    Outside,
    /// The bus does not do it.
    #[error(transparent)]
    Bus(#[from] DmaError),
}

/// A power of two of entries in [`Pages`].
#[derive(Clone, Debug, Default)]
pub(super) struct Ring {
    pages: Pages,
    /// Where the first entry is.
    base: u64,
    log_entries: u32,
    log_stride: u32,
}

impl Ring {
    /// `2^log_entries` entries of `2^log_stride` bytes each, from `base` on. Nothing is returned if they are not in the
    /// memory.
    pub(super) fn new(pages: Pages, base: u64, log_entries: u32, log_stride: u32) -> Option<Self> {
        let bytes = 1_u64.checked_shl(log_entries.checked_add(log_stride).filter(|log| *log < 48)?)?;
        (base.checked_add(bytes)? <= pages.len()).then_some(Self {
            pages,
            base,
            log_entries,
            log_stride,
        })
    }

    /// Number of entries.
    pub(super) fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    /// Logarithm of the number of entries.
    pub(super) fn log_entries(&self) -> u32 {
        self.log_entries
    }

    /// Bytes of an entry.
    pub(super) fn stride(&self) -> usize {
        1 << self.log_stride
    }

    /// Where entry `index` is; indices wrap around.
    fn offset(&self, index: u32) -> u64 {
        self.base + (u64::from(index & (self.entries() - 1)) << self.log_stride)
    }

    /// Reads from entry `index` on; what is longer than the ring's rest goes on at its start. `data` must not be longer
    /// than the ring.
    pub(super) fn read(&self, dma: &Dma, index: u32, data: &mut [u8]) -> Result<(), BufferError> {
        let offset = self.offset(index);
        let whole = u64::from(self.entries()) << self.log_stride;
        if data.len() as u64 > whole {
            return Err(BufferError::Outside);
        }
        let first = (self.base + whole - offset).min(data.len() as u64) as usize;
        let (head, tail) = data.split_at_mut(first);
        self.pages.read(dma, offset, head)?;
        if !tail.is_empty() {
            self.pages.read(dma, self.base, tail)?;
        }
        Ok(())
    }

    /// Writes an entry that its last 8 bytes make valid: they are written when the rest is in place.
    pub(super) fn publish(&self, dma: &Dma, index: u32, entry: &[u8]) -> Result<(), BufferError> {
        let split = entry.len().saturating_sub(8);
        let (body, last) = entry.split_at(split);
        let end = self.offset(index) + self.stride() as u64;
        let start = end.checked_sub(entry.len() as u64).ok_or(BufferError::Outside)?;
        self.pages.write(dma, start, body)?;
        self.pages.write(dma, start + split as u64, last)
    }
}

/// A doorbell record: words of the driver's memory by which it says how far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Record(pub(super) u64);

impl Record {
    /// Word 0 or 1 of the record.
    pub(super) fn word(self, dma: &Dma, index: u64) -> Result<u32, BufferError> {
        let mut data = [0; 4];
        let address = self.0.checked_add(4 * index).ok_or(BufferError::Outside)?;
        dma.read(address, &mut data)?;
        Ok(u32::from_be_bytes(data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(pages: &[u64]) -> Vec<u8> {
        pages.iter().flat_map(|page| page.to_be_bytes()).collect()
    }

    /// Addresses and lengths that a range is made of.
    fn pieces(pages: &Pages, offset: u64, len: usize) -> Option<Vec<(u64, usize)>> {
        let mut all = Vec::new();
        let result = pages.pieces(offset, len, |address, range| {
            all.push((address, range.len()));
            Ok(())
        });
        result.ok().map(|()| all)
    }

    #[test]
    fn pages_are_walked() {
        let pages = Pages::new(&list(&[0x1_0003, 0x5_0000, 0x9_0000]), 0, 32, 0x2000).unwrap();
        assert_eq!(pieces(&pages, 0, 0x800), Some(vec![(0x1_0800, 0x800)]));
        assert_eq!(
            pieces(&pages, 0x7f0, 0x1020),
            Some(vec![(0x1_0ff0, 0x10), (0x5_0000, 0x1000), (0x9_0000, 0x10)])
        );
        assert_eq!(pieces(&pages, 0x1fff, 1), Some(vec![(0x9_07ff, 1)]));
        assert_eq!(pieces(&pages, 0x1fff, 2), None);
        assert_eq!(pieces(&pages, u64::MAX, 2), None);
    }

    #[test]
    fn lists_that_do_not_reach() {
        assert!(Pages::new(&list(&[0x1000, 0x2000]), 0, 0, 0x2000).is_some());
        assert!(Pages::new(&list(&[0x1000, 0x2000]), 0, 1, 0x2000).is_none());
        assert!(Pages::new(&list(&[0x1000]), 1, 0, 0x2000).is_some());
        assert!(Pages::new(&list(&[0x1000]), 31, 0, 0x2000).is_none());
        assert!(Pages::new(&[0; 7], 0, 0, 1).is_none());
        assert!(Pages::new(&list(&[0x1000]), 0, 0, 0).is_none());
        assert!(Pages::new(&list(&[0x1000]), 0, 64, 1).is_none());
        assert!(Pages::new(&list(&[0x1000]), 0, 0, u64::MAX).is_none());
        // An address at the end of the address space.
        let pages = Pages::new(&list(&[u64::MAX]), 1, 0, 0x2000).unwrap();
        assert_eq!(pieces(&pages, 0x1800, 8), None);
    }

    #[test]
    fn rings_are_inside() {
        let pages = || Pages::new(&list(&[0x1000, 0x2000]), 0, 0, 0x2000).unwrap();
        assert!(Ring::new(pages(), 0, 7, 6).is_some());
        assert!(Ring::new(pages(), 64, 7, 6).is_none());
        assert!(Ring::new(pages(), u64::MAX, 7, 6).is_none());
        assert!(Ring::new(pages(), 0, u32::MAX, 6).is_none());
        let ring = Ring::new(pages(), 0x1000, 6, 6).unwrap();
        assert_eq!((ring.entries(), ring.stride(), ring.offset(65)), (64, 64, 0x1040));
    }
}
