// SPDX-License-Identifier: MIT OR Apache-2.0

//! Queue buffers: a list of pages in the driver's memory (PAS), and rings of entries in them.

use p2pmem_vfio_user::{Dma, DmaError};

/// Bits of a PAS entry that are not part of the address.
const PAGE_FLAGS: u64 = 0xfff;
/// Logarithm of the smallest page size. `log_page_size` fields count from this size.
pub(super) const PAGE_SHIFT: u32 = 12;

/// A buffer in pages of equal size.
#[derive(Clone, Debug, Default)]
pub(super) struct Pages {
    list: Vec<u64>,
    shift: u32,
    start: u64,
    len: u64,
}

impl Pages {
    /// Creates a buffer of `len` bytes. `list` holds the page addresses as big-endian 64-bit numbers. The page size is
    /// 4096 << `log_page_size`. The buffer starts at `offset` / 64 of the first page.
    ///
    /// Returns `None` if the list is too short, or the page size, the offset or the length is out of range.
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

    /// Returns the size in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Calls `step` with the bus address and the position of each page segment of a range. Fails with
    /// [`BufferError::Outside`] if the range is not in the buffer.
    fn for_each_segment(
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
        self.for_each_segment(offset, data.len(), |address, range| dma.read(address, &mut data[range]))
    }

    /// Writes a range.
    pub(super) fn write(&self, dma: &Dma, offset: u64, data: &[u8]) -> Result<(), BufferError> {
        self.for_each_segment(offset, data.len(), |address, range| dma.write(address, &data[range]))
    }
}

/// Error of an access to a queue buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BufferError {
    /// The range is not in the buffer.
    #[error("range exceeds the queue buffer")]
    Outside,
    /// The DMA access failed.
    #[error(transparent)]
    Bus(#[from] DmaError),
}

/// A ring of entries in [`Pages`]. The number of entries is a power of two.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring {
    pages: Pages,
    /// Offset of the first entry in the buffer.
    base: u64,
    log_entries: u32,
    log_stride: u32,
}

impl Ring {
    /// Creates a ring of `2^log_entries` entries of `2^log_stride` bytes each at offset `base`. Returns `None` if the
    /// ring does not fit in the buffer.
    pub(super) fn new(pages: Pages, base: u64, log_entries: u32, log_stride: u32) -> Option<Self> {
        let bytes = 1_u64.checked_shl(log_entries.checked_add(log_stride).filter(|log| *log < 48)?)?;
        (base.checked_add(bytes)? <= pages.len()).then_some(Self {
            pages,
            base,
            log_entries,
            log_stride,
        })
    }

    /// Returns the number of entries.
    pub(super) fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    /// Returns the logarithm of the number of entries.
    pub(super) fn log_entries(&self) -> u32 {
        self.log_entries
    }

    /// Returns the size of an entry in bytes.
    pub(super) fn stride(&self) -> usize {
        1 << self.log_stride
    }

    /// Returns the offset of entry `index` in the buffer. Indexes wrap around.
    fn offset(&self, index: u32) -> u64 {
        self.base + (u64::from(index & (self.entries() - 1)) << self.log_stride)
    }

    /// Reads bytes from entry `index` on, and continues at the start of the ring after its end. Fails if `data` is
    /// longer than the ring.
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

    /// Writes an entry. The last 8 bytes contain the owner bit, so they are written after the rest.
    pub(super) fn write_entry(&self, dma: &Dma, index: u32, entry: &[u8]) -> Result<(), BufferError> {
        let split = entry.len().saturating_sub(8);
        let (body, last) = entry.split_at(split);
        let end = self.offset(index) + self.stride() as u64;
        let start = end.checked_sub(entry.len() as u64).ok_or(BufferError::Outside)?;
        self.pages.write(dma, start, body)?;
        self.pages.write(dma, start + split as u64, last)
    }
}

/// Bus address of a doorbell record: counters that the driver writes to its own memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DoorbellRecord(pub(super) u64);

impl DoorbellRecord {
    /// Reads word 0 or 1 of the record.
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

    /// Returns addresses and lengths of the page segments of a range.
    fn segments(pages: &Pages, offset: u64, len: usize) -> Option<Vec<(u64, usize)>> {
        let mut all = Vec::new();
        let result = pages.for_each_segment(offset, len, |address, range| {
            all.push((address, range.len()));
            Ok(())
        });
        result.ok().map(|()| all)
    }

    #[test]
    fn segments_follow_page_list() {
        let pages = Pages::new(&list(&[0x1_0003, 0x5_0000, 0x9_0000]), 0, 32, 0x2000).unwrap();
        assert_eq!(segments(&pages, 0, 0x800), Some(vec![(0x1_0800, 0x800)]));
        assert_eq!(
            segments(&pages, 0x7f0, 0x1020),
            Some(vec![(0x1_0ff0, 0x10), (0x5_0000, 0x1000), (0x9_0000, 0x10)])
        );
        assert_eq!(segments(&pages, 0x1fff, 1), Some(vec![(0x9_07ff, 1)]));
        assert_eq!(segments(&pages, 0x1fff, 2), None);
        assert_eq!(segments(&pages, u64::MAX, 2), None);
    }

    #[test]
    fn short_page_list_is_rejected() {
        assert!(Pages::new(&list(&[0x1000, 0x2000]), 0, 0, 0x2000).is_some());
        assert!(Pages::new(&list(&[0x1000, 0x2000]), 0, 1, 0x2000).is_none());
        assert!(Pages::new(&list(&[0x1000]), 1, 0, 0x2000).is_some());
        assert!(Pages::new(&list(&[0x1000]), 31, 0, 0x2000).is_none());
        assert!(Pages::new(&[0; 7], 0, 0, 1).is_none());
        assert!(Pages::new(&list(&[0x1000]), 0, 0, 0).is_none());
        assert!(Pages::new(&list(&[0x1000]), 0, 64, 1).is_none());
        assert!(Pages::new(&list(&[0x1000]), 0, 0, u64::MAX).is_none());
        // A page at the end of the address space.
        let pages = Pages::new(&list(&[u64::MAX]), 1, 0, 0x2000).unwrap();
        assert_eq!(segments(&pages, 0x1800, 8), None);
    }

    #[test]
    fn ring_must_fit_its_pages() {
        let pages = || Pages::new(&list(&[0x1000, 0x2000]), 0, 0, 0x2000).unwrap();
        assert!(Ring::new(pages(), 0, 7, 6).is_some());
        assert!(Ring::new(pages(), 64, 7, 6).is_none());
        assert!(Ring::new(pages(), u64::MAX, 7, 6).is_none());
        assert!(Ring::new(pages(), 0, u32::MAX, 6).is_none());
        let ring = Ring::new(pages(), 0x1000, 6, 6).unwrap();
        assert_eq!((ring.entries(), ring.stride(), ring.offset(65)), (64, 64, 0x1040));
    }
}
