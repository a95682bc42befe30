// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages to the workers: from register accesses, the subnet, the control socket, and other workers.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use p2pmem_ib::Delivery;

/// A question to the transport's worker, which answers through what the function has captured.
pub(super) type Ask = Box<dyn FnOnce(&mut super::model::Model<'_>) + Send>;

/// Something that happened, in the order in which it did.
pub(super) enum Message {
    /// The command doorbell was rung: address of the command queue, and a bit for each entry.
    Command { queue: u64, entries: u32 },
    /// An event queue's consumer index, and whether it is armed.
    EventQueue {
        uar: u32,
        eqn: u8,
        consumer: u32,
        arm: bool,
    },
    /// A completion queue is armed: the doorbell's two words.
    Arm { uar: u32, words: [u32; 2] },
    /// Work was posted to a send queue.
    Send { uar: u32, qpn: u32 },
    /// A command that was read, and is the transport's to carry out.
    Execute(super::command::Taken),
    /// From the subnet.
    Delivery(Delivery),
    /// The driver requested a reset of the adapter without one of the function.
    SoftwareReset,
    /// The function is reset: everything is to be forgotten.
    Reset,
    /// Somebody outside of the guest wants to know or to change something.
    Ask(Ask),
    /// Completion queues broke while another worker had them.
    Look,
    /// The device is taken away.
    Stop,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Command { .. } => "Command",
            Self::EventQueue { .. } => "EventQueue",
            Self::Arm { .. } => "Arm",
            Self::Send { .. } => "Send",
            Self::Execute(_) => "Execute",
            Self::Delivery(_) => "Delivery",
            Self::SoftwareReset => "SoftwareReset",
            Self::Reset => "Reset",
            Self::Ask(_) => "Ask",
            Self::Look => "Look",
            Self::Stop => "Stop",
        };
        f.write_str(name)
    }
}

/// How long the worker may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Not at all.
    No,
    /// Until then, if nothing comes.
    Until(Instant),
    /// Until something comes.
    Forever,
}

/// A queue with many writers and one reader. Writers never wait.
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
        // The reader looks before it sleeps, so only the first of a row has to wake it.
        if messages.len() == 1 {
            self.filled.notify_one();
        }
    }

    /// Takes all messages, into a vector that is empty.
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

/// The inboxes of an adapter's workers, and which message is whose.
#[derive(Debug, Default)]
pub(super) struct Inboxes {
    /// Of the worker for queue pairs: what they send and receive, and with it all transfers of payload.
    pub(super) transport: Inbox,
    /// Of the worker for commands, event and completion queue doorbells, and the driver's own queue pairs.
    pub(super) commands: Inbox,
    /// Numbers of the driver's own queue pairs.
    driver: Mutex<BTreeSet<u32>>,
}

impl Inboxes {
    fn driver(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts what a register access asks for into the inbox it belongs to. Never waits.
    pub(super) fn put(&self, message: Message) {
        let transport = match &message {
            Message::Send { qpn, .. } => !self.driver().contains(qpn),
            Message::Delivery(_) | Message::Ask(_) | Message::Execute(_) | Message::Look => true,
            // A reset goes to the worker for commands first, which hands it on: behind every command that it has taken.
            _ => false,
        };
        let inbox = if transport { &self.transport } else { &self.commands };
        inbox.put(message);
    }

    /// This queue pair is the driver's own from now on, or is not any more.
    pub(super) fn set_driver(&self, qpn: u32, own: bool) {
        if own {
            self.driver().insert(qpn);
        } else {
            self.driver().remove(&qpn);
        }
    }

    /// There are no queue pairs.
    pub(super) fn clear(&self) {
        self.driver().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn order_is_kept_and_the_reader_wakes() {
        let inbox = Arc::new(Inbox::default());
        let writer = std::thread::spawn({
            let inbox = Arc::clone(&inbox);
            move || {
                for qpn in 0..1000 {
                    inbox.put(Message::Send { uar: 0, qpn });
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
                    Message::Send { qpn, .. } => {
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
    fn waits_end() {
        let inbox = Inbox::default();
        let mut messages = Vec::new();
        inbox.take(&mut messages, Wait::No);
        inbox.take(&mut messages, Wait::Until(Instant::now()));
        let before = Instant::now();
        inbox.take(&mut messages, Wait::Until(before + Duration::from_millis(5)));
        assert!(messages.is_empty() && before.elapsed() >= Duration::from_millis(5));
    }

    #[test]
    fn messages_find_their_worker() {
        let inboxes = Inboxes::default();
        inboxes.set_driver(7, true);
        for qpn in [6, 7] {
            inboxes.put(Message::Send { uar: 0, qpn });
        }
        inboxes.put(Message::Command { queue: 0, entries: 1 });
        inboxes.put(Message::Reset);
        inboxes.set_driver(7, false);
        inboxes.put(Message::Send { uar: 0, qpn: 7 });
        let all = |inbox: &Inbox| {
            let mut messages = Vec::new();
            inbox.take(&mut messages, Wait::No);
            messages
        };
        assert!(matches!(
            all(&inboxes.transport)[..],
            [Message::Send { qpn: 6, .. }, Message::Send { qpn: 7, .. }]
        ));
        assert!(matches!(
            all(&inboxes.commands)[..],
            [Message::Send { qpn: 7, .. }, Message::Command { .. }, Message::Reset]
        ));
    }
}
