// SPDX-License-Identifier: MIT OR Apache-2.0

//! Inboxes of the workers: messages from register accesses, the subnet, a [`super::Handle`], and the other worker.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use p2pmem_ib::Delivery;

use super::trace::{Point, Trace};

/// A function that the transport worker runs on behalf of a [`super::Handle`].
pub(super) type Request = Box<dyn FnOnce(&mut super::model::Model<'_>) + Send>;

/// A message to a worker.
pub(super) enum Message {
    /// Command doorbell: address of the command queue, and one bit per entry.
    Command { queue: u64, entries: u32 },
    /// EQ doorbell: consumer index, and whether the EQ is armed.
    EqDoorbell {
        uar: u32,
        eqn: u8,
        consumer: u32,
        arm: bool,
    },
    /// CQ doorbell: its two words arm a CQ.
    ArmCq { uar: u32, words: [u32; 2] },
    /// Send doorbell of a QP.
    SendDoorbell { uar: u32, qpn: u32 },
    /// A fetched command for the transport worker.
    Execute(super::command::Command),
    /// Packets or a link change from the subnet.
    Delivery(Delivery),
    /// The driver requested a software reset (`nic_interface` in the initialization segment).
    SoftwareReset,
    /// The function was reset.
    Reset,
    /// A request from outside of the guest.
    Request(Request),
    /// The command worker broke a CQ; the transport worker must move its QPs to the error state.
    BrokenCqs,
    /// The device is dropped.
    Stop,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Command { .. } => "Command",
            Self::EqDoorbell { .. } => "EqDoorbell",
            Self::ArmCq { .. } => "ArmCq",
            Self::SendDoorbell { .. } => "SendDoorbell",
            Self::Execute(_) => "Execute",
            Self::Delivery(_) => "Delivery",
            Self::SoftwareReset => "SoftwareReset",
            Self::Reset => "Reset",
            Self::Request(_) => "Request",
            Self::BrokenCqs => "BrokenCqs",
            Self::Stop => "Stop",
        };
        f.write_str(name)
    }
}

/// Limit of the time that [`Inbox::take`] blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Does not block.
    No,
    /// Blocks until a message arrives, at most until this time.
    Until(Instant),
    /// Blocks until a message arrives.
    Forever,
}

/// A queue with many writers and one reader. Writers do not block.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    messages: Mutex<Vec<Message>>,
    filled: Condvar,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Vec<Message>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message and wakes the reader.
    pub(super) fn put(&self, message: Message) {
        let mut messages = self.lock();
        messages.push(message);
        // The reader checks the queue before it sleeps, so only the first message must wake the reader.
        if messages.len() == 1 {
            self.filled.notify_one();
        }
    }

    /// Moves all messages into `into`, which must be empty.
    pub(super) fn take(&self, into: &mut Vec<Message>, wait: Wait) {
        let mut messages = self.lock();
        while messages.is_empty() {
            messages = match wait {
                Wait::No => break,
                Wait::Forever => self.filled.wait(messages).unwrap_or_else(PoisonError::into_inner),
                Wait::Until(time) => {
                    let Some(left) = time
                        .checked_duration_since(Instant::now())
                        .filter(|left| *left > Duration::ZERO)
                    else {
                        break;
                    };
                    let (messages, _) = self
                        .filled
                        .wait_timeout(messages, left)
                        .unwrap_or_else(PoisonError::into_inner);
                    messages
                }
            };
        }
        std::mem::swap(&mut *messages, into);
    }
}

/// The inboxes of both workers of an adapter.
#[derive(Debug, Default)]
pub(super) struct Inboxes {
    /// Inbox of the transport worker: queue pairs and all payload.
    pub(super) transport: Inbox,
    /// Inbox of the command worker: commands, EQ and CQ doorbells, REG_UMR QPs.
    pub(super) commands: Inbox,
    /// Numbers of the REG_UMR QPs.
    umr_qps: Mutex<BTreeSet<u32>>,
    /// The trace of both workers' steps. It begins here, with the doorbells.
    pub(super) trace: Trace,
}

impl Inboxes {
    fn umr_qps(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.umr_qps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a message into the inbox of the responsible worker. Does not block.
    pub(super) fn put(&self, message: Message) {
        if let Message::SendDoorbell { qpn, .. } = &message {
            self.trace.at(self.trace.begin(), Point::Doorbell, *qpn);
        }
        let transport = match &message {
            Message::SendDoorbell { qpn, .. } => !self.umr_qps().contains(qpn),
            Message::Delivery(_) | Message::Request(_) | Message::Execute(_) | Message::BrokenCqs => true,
            // The command worker forwards a reset to the transport worker, after all commands that precede it.
            _ => false,
        };
        let inbox = if transport { &self.transport } else { &self.commands };
        inbox.put(message);
    }

    /// Adds a QP to the REG_UMR QPs, or removes it.
    pub(super) fn set_umr_qp(&self, qpn: u32, is_umr: bool) {
        if is_umr {
            self.umr_qps().insert(qpn);
        } else {
            self.umr_qps().remove(&qpn);
        }
    }

    /// Removes all REG_UMR QPs.
    pub(super) fn clear(&self) {
        self.umr_qps().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn messages_keep_order_and_wake_reader() {
        let inbox = Arc::new(Inbox::default());
        let writer = std::thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                for qpn in 0..1000 {
                    inbox.put(Message::SendDoorbell { uar: 0, qpn });
                }
                inbox.put(Message::Stop);
            }
        });
        let mut expected = 0;
        let mut messages = Vec::new();
        'all: loop {
            inbox.take(&mut messages, Wait::Forever);
            for message in messages.drain(..) {
                match message {
                    Message::SendDoorbell { qpn, .. } => {
                        assert_eq!(qpn, expected);
                        expected += 1;
                    }
                    Message::Stop => break 'all,
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(expected, 1000);
        writer.join().unwrap();
    }

    #[test]
    fn take_times_out() {
        let inbox = Inbox::default();
        let mut messages = Vec::new();
        inbox.take(&mut messages, Wait::No);
        inbox.take(&mut messages, Wait::Until(Instant::now()));
        let before = Instant::now();
        inbox.take(&mut messages, Wait::Until(before + Duration::from_millis(5)));
        assert!(messages.is_empty() && before.elapsed() >= Duration::from_millis(5));
    }

    #[test]
    fn messages_are_routed_to_their_worker() {
        let inboxes = Inboxes::default();
        inboxes.set_umr_qp(7, true);
        for qpn in [6, 7] {
            inboxes.put(Message::SendDoorbell { uar: 0, qpn });
        }
        inboxes.put(Message::Command { queue: 0, entries: 1 });
        inboxes.put(Message::Reset);
        inboxes.set_umr_qp(7, false);
        inboxes.put(Message::SendDoorbell { uar: 0, qpn: 7 });
        let all = |inbox: &Inbox| {
            let mut messages = Vec::new();
            inbox.take(&mut messages, Wait::No);
            messages
        };
        assert!(matches!(
            all(&inboxes.transport)[..],
            [
                Message::SendDoorbell { qpn: 6, .. },
                Message::SendDoorbell { qpn: 7, .. }
            ]
        ));
        assert!(matches!(
            all(&inboxes.commands)[..],
            [
                Message::SendDoorbell { qpn: 7, .. },
                Message::Command { .. },
                Message::Reset
            ]
        ));
    }
}
