// SPDX-License-Identifier: GPL-2.0

//! The uses of a bound device, for whose end its unbinding waits: windows of its memory, and its DMA.
//!
//! Context: process context, may sleep. The one lock is the mutex `Uses::count`, a leaf.
//!
//! No C header: the count is p2pmem's own.

use kernel::{
    new_condvar, new_mutex,
    prelude::*,
    sync::{Arc, CondVar, Mutex},
};

/// The number of uses of a bound device. Unbinding the device waits until it is 0.
#[pin_data]
pub(super) struct Uses {
    #[pin]
    count: Mutex<usize>,
    #[pin]
    none: CondVar,
}

impl Uses {
    /// Creates the count of a device without uses. Errors: `ENOMEM`.
    pub(super) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                count <- new_mutex!(0),
                none <- new_condvar!(),
            }),
            GFP_KERNEL,
        )
    }

    /// Waits without a time limit until no use exists. Sleeps.
    ///
    /// Removing the provider comes before. The removal ends DMA, and names the remaining holders of memory in the log.
    pub(super) fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.none.wait(&mut count);
        }
    }
}

/// A use, which is counted while it exists.
pub(super) struct Use(Arc<Uses>);

impl Use {
    /// Counts a new use.
    pub(super) fn new(uses: &Arc<Uses>) -> Self {
        *uses.count.lock() += 1;
        Self(uses.clone())
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        *self.0.count.lock() -= 1;
        self.0.none.notify_all();
    }
}

#[kunit_tests(p2pmem_uses)]
mod tests {
    use super::*;

    use crate::ext::{
        completion::Completion,
        workqueue::OwnQueue, //
    };

    #[test]
    fn unbinding_waits_for_the_last_use() -> Result {
        let uses = Uses::new()?;
        // Without uses the wait returns at once.
        uses.wait();
        let (one, other) = (Use::new(&uses), Use::new(&uses));
        let waited = Arc::pin_init(Completion::new(), GFP_KERNEL)?;
        let queue = OwnQueue::new(c"p2pmem-kunit", || {})?;
        let (waiting, told) = (uses.clone(), waited.clone());
        queue.try_spawn(move || {
            waiting.wait();
            told.complete();
        })?;
        drop(one);
        assert!(!waited.wait(20));
        drop(other);
        assert!(waited.wait(60_000));
        Ok(())
    }
}
