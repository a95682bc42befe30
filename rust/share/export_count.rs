// SPDX-License-Identifier: GPL-2.0

//! The number of unreleased dma-bufs of a file, and its limit.
//!
//! The counter is atomic and takes no lock. A slot may outlive its file: the last importer may release the dma-buf later.

use crate::ext::refusal::{
    refuse,
    Answer, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};

/// The maximum number of unreleased dma-bufs of one file. RLIMIT_NOFILE does not count dma-bufs that only importers hold.
const MOST_EXPORTS: i32 = 1 << 16;

/// The counter of one file.
pub(crate) struct ExportCount(Arc<Atomic<i32>>);

/// One counted dma-buf. Dropping it decrements the counter.
pub(crate) struct ExportSlot(Arc<Atomic<i32>>);

impl ExportCount {
    /// Creates a counter that is 0. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(Arc::new(Atomic::<i32>::new(0), GFP_KERNEL_ACCOUNT)?))
    }

    /// Counts one more dma-buf. Errors: `EMFILE` at the limit.
    pub(crate) fn take(&self) -> Answer<ExportSlot> {
        self.take_of(MOST_EXPORTS)
    }

    /// As [`Self::take`], with a limit for tests.
    fn take_of(&self, most: i32) -> Answer<ExportSlot> {
        let before = self.0.fetch_add(1, Relaxed);
        let slot = ExportSlot(self.0.clone());
        if before >= most {
            return Err(refuse!(
                EMFILE,
                "this file has {} unreleased dma-bufs, which is the maximum: close some",
                most
            ));
        }
        Ok(slot)
    }
}

impl Drop for ExportSlot {
    fn drop(&mut self) {
        self.0.fetch_add(-1, Relaxed);
    }
}

#[kernel::prelude::kunit_tests(p2pmem_export_count)]
mod tests {
    use super::*;

    #[test]
    fn export_limit_per_file_is_enforced() -> Result {
        let count = ExportCount::new()?;
        let take = || count.take_of(2).map_err(|refusal| refusal.error);
        let (first, second) = (take()?, take()?);
        assert_eq!(take().err(), Some(EMFILE));
        drop(first);
        let third = take()?;
        assert_eq!(take().err(), Some(EMFILE));
        // A slot may outlive its file's counter.
        drop(count);
        drop((second, third));
        Ok(())
    }
}
