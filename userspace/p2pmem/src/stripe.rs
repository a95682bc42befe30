// SPDX-License-Identifier: MIT OR Apache-2.0

//! Stripes: several providers serve one request, each with a buffer.

use std::ops::Range;

use crate::buffer::Buffer;
use crate::error::{Error, Result};

/// A stripe that [`Device::alloc_stripe`](crate::Device::alloc_stripe) allocated: consecutive parts in several
/// providers.
///
/// Each part is a normal buffer that is mapped, exported, registered and revoked separately. No I/O request, dma-buf or
/// registration can cross a boundary. [`Stripe::pieces`] divides a range at the boundaries.
///
/// ```
/// # let device = p2pmem::fake::Fake::example().device();
/// use p2pmem::{Request, Strategy};
///
/// let stripe = device.alloc_stripe(&Request::new(3 << 20).strategy(Strategy::Stripe).parts(2))?;
/// let half = 3 << 19;
/// assert_eq!(stripe.ranges().collect::<Vec<_>>(), [0..half, half..2 * half]);
/// // The last page of the first part, and the first page of the second part.
/// assert_eq!(stripe.pieces(half - 4096..half + 4096)?, [(0, half - 4096..half), (1, 0..4096)]);
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug)]
pub struct Stripe {
    parts: Vec<Buffer>,
}

impl Stripe {
    pub(crate) fn new(parts: Vec<Buffer>) -> Self {
        Self { parts }
    }

    /// Returns the size in bytes of all parts.
    pub fn size(&self) -> u64 {
        self.parts.iter().map(Buffer::size).sum()
    }

    /// Returns the parts, in the order of their bytes.
    pub fn parts(&self) -> &[Buffer] {
        &self.parts
    }

    /// Returns the parts as separate buffers. Dropping one frees it.
    pub fn into_parts(self) -> Vec<Buffer> {
        self.parts
    }

    /// Returns the range of each part in the stripe, in bytes.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = 0;
        self.parts.iter().map(move |part| {
            let start = at;
            at += part.size();
            start..at
        })
    }

    /// Divides a range of the stripe at its boundaries. Returns the index of each affected part, with the bytes of this
    /// part.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] if the range is not inside the stripe.
    pub fn pieces(&self, range: Range<u64>) -> Result<Vec<(usize, Range<u64>)>> {
        if range.start > range.end || range.end > self.size() {
            let size = self.size();
            return Err(Error::Request(format!(
                "the range {range:?} is not inside the {size} bytes of the stripe"
            )));
        }
        let pieces = self.ranges().enumerate().filter_map(|(n, part)| {
            let (start, end) = (range.start.max(part.start), range.end.min(part.end));
            (start < end).then(|| (n, start - part.start..end - part.start))
        });
        Ok(pieces.collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::fake::Fake;
    use crate::{Error, Request, Strategy};

    #[test]
    fn stripe_is_divided_at_part_boundaries() {
        let device = Fake::example().device();
        let request = Request::new(10 * 4096).strategy(Strategy::Stripe);
        let stripe = device.alloc_stripe(&request.clone().parts(3)).unwrap();
        assert_eq!(stripe.size(), 10 * 4096);
        let ranges: Vec<_> = stripe.ranges().collect();
        assert_eq!(ranges, [0..16384, 16384..32768, 32768..40960]);
        let mut providers: Vec<_> = stripe.parts().iter().map(|p| p.provider()).collect();
        providers.sort_unstable();
        assert_eq!(providers, [1, 2, 3], "each part is in another provider");
        let pieces = stripe.pieces(16383..32769).unwrap();
        assert_eq!(pieces, [(0, 16383..16384), (1, 0..16384), (2, 0..1)]);
        assert_eq!(stripe.pieces(7..7).unwrap(), []);
        assert!(stripe.pieces(0..40961).is_err());
        assert_eq!(device.info().unwrap().buffers, 3);
        drop(stripe.into_parts().pop());
        assert_eq!(device.info().unwrap().buffers, 0);
        // As many parts as providers.
        assert_eq!(device.alloc_stripe(&request).unwrap().parts().len(), 3);
    }

    #[test]
    fn invalid_stripe_requests_are_refused() {
        let device = Fake::example().device();
        let request = Request::new(1 << 20).strategy(Strategy::Stripe);
        assert!(matches!(device.alloc(&request), Err(Error::Request(_))));
        for bad in [
            Request::new(1 << 20),
            request.clone().parts(17),
            request.clone().provider(1),
            Request::new(4096).strategy(Strategy::Stripe).parts(2),
        ] {
            assert!(matches!(device.alloc_stripe(&bad), Err(Error::Request(_))), "{bad:?}");
        }
        assert!(matches!(
            device.alloc(&Request::new(4096).parts(2)),
            Err(Error::Request(_))
        ));
        let error = device.alloc_stripe(&request.clone().parts(4)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV), "{error}");
        assert_eq!(device.info().unwrap().buffers, 0);
        assert_eq!(device.explain(&request.parts(2)).unwrap().chosen_verdicts().count(), 2);
    }
}
