// SPDX-License-Identifier: MIT OR Apache-2.0

//! What the worker is told: by register accesses, by the subnet, by the control socket.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use p2pmem_ib::Delivery;

/// A question to the worker, which answers through what the function has captured.
pub(super) type Ask = Box<dyn FnOnce(&mut super::model::Model) + Send>;

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
    /// From the subnet.
    Delivery(Delivery),
    /// The driver asked for a reset of the adapter without one of the function.
    SoftwareReset,
    /// The function is reset: everything is to be forgotten.
    Reset,
    /// Somebody outside of the guest wants to know or to change something.
    Ask(Ask),
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
            Self::Delivery(_) => "Delivery",
            Self::SoftwareReset => "SoftwareReset",
            Self::Reset => "Reset",
            Self::Ask(_) => "Ask",
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
}
