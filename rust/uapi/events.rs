// SPDX-License-Identifier: GPL-2.0

//! The events of an open file: their queue, and who waits for them.
//!
//! Context: process context, may sleep. While the queue's mutex is held, no lock is taken and no memory is allocated: it may be taken
//! with a dma-buf's reservation locked, also during memory reclaim.
//!
//! C header: `include/uapi/linux/p2pmem.h` (`struct p2pmem_event`)

use crate::ext::{
    abi::{
        self,
        consts, //
    },
    log, //
};
use core::mem::size_of;
use kernel::{
    new_condvar, new_mutex,
    prelude::*,
    sync::{poll::PollCondVar, Arc, CondVar, Mutex, SetOnce},
};

/// Capacity of a queue, in events.
const EVENTS: usize = 64;

/// The events of one file. Attachments refer to it too, so it may outlive the file.
#[pin_data]
pub(super) struct Events {
    #[pin]
    pub(super) queue: Mutex<EventQueue>,
    /// Where readers wait for events.
    #[pin]
    pub(super) readable: CondVar,
    /// Where pollers wait, made by the first poll: freeing it takes an RCU grace period, which a file without pollers avoids.
    pub(super) polled: SetOnce<Pin<KBox<PollCondVar>>>,
}

impl Events {
    /// Creates an empty queue that nobody waits for. Errors: `ENOMEM`.
    pub(super) fn new() -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                queue <- new_mutex!(EventQueue::new()),
                readable <- new_condvar!("p2pmem_events"),
                polled: SetOnce::new(),
            }),
            GFP_KERNEL_ACCOUNT,
        )
    }

    /// Appends an event to the queue and wakes its readers.
    pub(super) fn push(&self, kind: u32, provider: u32, handle: u32) {
        let wake = self.queue.lock().push(|| abi::Event {
            size: size_of::<abi::Event>() as u32,
            type_: kind,
            provider,
            handle,
            time_ns: log::now_ns(),
            ..Default::default()
        });
        if wake {
            self.wake();
        }
    }

    /// Wakes readers and pollers.
    pub(super) fn wake(&self) {
        self.readable.notify_all();
        if let Some(polled) = self.polled.as_ref() {
            polled.notify_all();
        }
    }
}

/// Events of one file that are not read yet. A full queue drops new events and counts them.
///
/// The methods take no lock; the file's mutex protects the queue.
pub(super) struct EventQueue {
    ring: [abi::Event; EVENTS],
    first: usize,
    len: usize,
    lost: u32,
}

impl EventQueue {
    /// Returns an empty queue.
    pub(super) fn new() -> Self {
        Self {
            ring: [abi::Event::default(); EVENTS],
            first: 0,
            len: 0,
            lost: 0,
        }
    }

    /// Appends an event. Returns whether the caller has to wake readers: not if the queue was full and the event is lost.
    pub(super) fn push(&mut self, event: impl FnOnce() -> abi::Event) -> bool {
        if self.len == EVENTS {
            self.lost = self.lost.saturating_add(1);
            return false;
        }
        self.ring[(self.first + self.len) % EVENTS] = event();
        self.len += 1;
        true
    }

    /// Puts back the event that [`Self::pop`] returned last and that could not be copied to user space. If the queue has filled
    /// up meanwhile, its newest event is lost instead.
    pub(super) fn push_front(&mut self, event: abi::Event) {
        if event.type_ == consts::EVENT_LOST {
            self.lost = self.lost.saturating_add(event.count);
            return;
        }
        if self.len == EVENTS {
            self.len -= 1;
            self.lost = self.lost.saturating_add(1);
        }
        self.first = (self.first + EVENTS - 1) % EVENTS;
        self.ring[self.first] = event;
        self.len += 1;
    }

    /// Removes and returns the oldest event. After the last one it returns one `EVENT_LOST` with the number of lost events, if any
    /// were lost.
    pub(super) fn pop(&mut self) -> Option<abi::Event> {
        if self.len > 0 {
            let event = self.ring[self.first];
            self.first = (self.first + 1) % EVENTS;
            self.len -= 1;
            return Some(event);
        }
        let count = core::mem::take(&mut self.lost);
        (count > 0).then(|| abi::Event {
            size: size_of::<abi::Event>() as u32,
            type_: consts::EVENT_LOST,
            count,
            time_ns: log::now_ns(),
            ..Default::default()
        })
    }

    /// Returns whether [`Self::pop`] has nothing to return.
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0 && self.lost == 0
    }
}
