// SPDX-License-Identifier: MIT OR Apache-2.0

//! Events: providers that are added and removed, and buffers that are revoked.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use p2pmem_sys as abi;

use crate::backend::Capability;
use crate::device::Device;
use crate::error::{Error, Operation, Result};

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
#[non_exhaustive]
pub enum EventKind {
    /// A provider was added.
    ProviderAdded {
        /// Id of the provider.
        provider: u32,
    },
    /// A provider was removed.
    ProviderRemoved {
        /// Id of the provider.
        provider: u32,
    },
    /// A buffer of this open file was revoked. An access to its mappings raises SIGBUS.
    BufferRevoked {
        /// Id of the buffer's provider.
        provider: u32,
        /// Handle of the buffer.
        handle: u32,
    },
    /// An attachment of this open file ended: the exporter took the memory back, or the provider was removed.
    AttachmentRevoked {
        /// Id of the provider whose function was attached.
        provider: u32,
        /// Handle of the attachment.
        handle: u32,
    },
    /// The function of an attachment of this open file can do no DMA, because another attachment of the function ended.
    AttachmentStopped {
        /// Id of the provider whose function is attached.
        provider: u32,
        /// Handle of the attachment.
        handle: u32,
    },
    /// The program read events too slowly, and the module dropped some. List the providers again.
    Lost {
        /// Number of dropped events.
        count: u32,
    },
    /// An event that this version of the library does not know.
    Unknown {
        /// Number of the event in the ABI.
        code: u32,
    },
}

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Event {
    /// Kind of the event.
    #[serde(flatten)]
    pub kind: EventKind,
    /// Time of the event in nanoseconds of CLOCK_MONOTONIC.
    pub time_ns: u64,
}

impl From<&abi::p2pmem_event> for Event {
    fn from(raw: &abi::p2pmem_event) -> Self {
        let kind = match raw.type_ {
            abi::P2PMEM_EVENT_PROVIDER_ADDED => EventKind::ProviderAdded { provider: raw.provider },
            abi::P2PMEM_EVENT_PROVIDER_REMOVED => EventKind::ProviderRemoved { provider: raw.provider },
            abi::P2PMEM_EVENT_BUFFER_REVOKED => EventKind::BufferRevoked {
                provider: raw.provider,
                handle: raw.handle,
            },
            abi::P2PMEM_EVENT_LOST => EventKind::Lost { count: raw.count },
            abi::P2PMEM_EVENT_ATTACHMENT_REVOKED => EventKind::AttachmentRevoked {
                provider: raw.provider,
                handle: raw.handle,
            },
            abi::P2PMEM_EVENT_ATTACHMENT_STOPPED => EventKind::AttachmentStopped {
                provider: raw.provider,
                handle: raw.handle,
            },
            code => EventKind::Unknown { code },
        };
        Self {
            kind,
            time_ns: raw.time_ns,
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            EventKind::ProviderAdded { provider } => write!(f, "provider {provider} was added"),
            EventKind::ProviderRemoved { provider } => write!(f, "provider {provider} was removed"),
            EventKind::BufferRevoked { provider, handle } => {
                write!(f, "buffer {handle} was revoked: provider {provider} is being removed")
            }
            EventKind::AttachmentRevoked { provider, handle } => {
                write!(f, "attachment {handle} of provider {provider} ended")
            }
            EventKind::AttachmentStopped { provider, handle } => {
                write!(f, "attachment {handle} is stopped: provider {provider} can do no DMA")
            }
            EventKind::Lost { count } => write!(f, "{count} events were dropped: list the providers again"),
            EventKind::Unknown { code } => write!(f, "event {code}, which this program does not know"),
        }
    }
}

/// The events of a device's open file, in order. The iterator waits for each event without a timeout.
#[derive(Debug)]
pub struct Events {
    device: Device,
    ready: VecDeque<Event>,
}

impl Device {
    /// Returns the events of this open file from now on: added and removed providers, and revoked buffers of this open
    /// file.
    pub fn events(&self) -> Events {
        Events::new(self.clone())
    }
}

impl Events {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            device,
            ready: VecDeque::new(),
        }
    }

    /// Waits for the next event, at most for `timeout`; `None` waits without a limit. Returns `None` after the timeout.
    ///
    /// ```
    /// # let device = p2pmem::fake::Fake::example().device();
    /// use std::time::Duration;
    ///
    /// let mut events = device.events();
    /// assert_eq!(events.next_within(Some(Duration::from_millis(1)))?, None);
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with ENODEV if the module is being unloaded; [`Error::NotSupported`] if the backend is not
    /// the module.
    pub fn next_within(&mut self, timeout: Option<Duration>) -> Result<Option<Event>> {
        let deadline = timeout.map(|t| Instant::now() + t);
        loop {
            // `None` after a successful wait: another reader of the same file was faster.
            if let Some(event) = self.try_next()? {
                return Ok(Some(event));
            }
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if !self.device.kernel().wait(left).map_err(refused)? {
                return Ok(None);
            }
        }
    }

    /// Returns the next event, or `None` if there is none. Never waits.
    ///
    /// The descriptor ([`AsFd`]) is readable while the kernel has events, for `poll()` or the event loop of a runtime.
    /// `try_next` takes several events from the kernel at once: call it until it returns `None` before waiting again.
    ///
    /// ```
    /// # let fake = p2pmem::fake::Fake::example();
    /// # let device = fake.device();
    /// use std::os::fd::AsFd;
    ///
    /// let mut events = device.events();
    /// # fake.remove_provider(2);
    /// // ... when events.as_fd() is readable:
    /// while let Some(event) = events.try_next()? {
    ///     println!("{event}");
    /// }
    /// # let _ = events.as_fd();
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Events::next_within`].
    pub fn try_next(&mut self) -> Result<Option<Event>> {
        self.device.require(Capability::Revoke)?;
        while self.ready.is_empty() {
            let mut raw = [abi::p2pmem_event::default(); 32];
            // Device::call() is not used: it would hold a lock that other threads' calls need.
            match self.device.kernel().read_events(&mut raw) {
                Ok(n) => self.ready.extend(raw.iter().take(n).map(Event::from)),
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(refused(error)),
            }
        }
        Ok(self.ready.pop_front())
    }
}

fn refused(error: std::io::Error) -> Error {
    Error::Refused {
        operation: Operation::Events,
        errno: error.raw_os_error().unwrap_or(libc::EIO),
        reason: None,
    }
}

/// Returns the descriptor that is readable while the kernel has events for [`Events::try_next`].
impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.kernel().event_fd()
    }
}

impl Iterator for Events {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_within(None).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use crate::Request;
    use rustix::event::{poll, PollFd, PollFlags, Timespec};

    #[test]
    fn events_are_ordered_and_wait_times_out() {
        let fake = Fake::example();
        let device = fake.device();
        let buffer = device.alloc(&Request::new(4096).provider(1)).unwrap();
        let mut events = device.events();
        assert!(events.next_within(Some(Duration::from_millis(1))).unwrap().is_none());
        fake.remove_provider(1);
        let kinds: Vec<_> = events.by_ref().take(2).map(|e| e.unwrap().kind).collect();
        let revoked = EventKind::BufferRevoked {
            provider: 1,
            handle: buffer.handle(),
        };
        assert_eq!(kinds, [revoked, EventKind::ProviderRemoved { provider: 1 }]);
        assert!(events.next_within(Some(Duration::ZERO)).unwrap().is_none());
    }

    #[test]
    fn the_descriptor_is_readable_while_there_are_events() {
        let fake = Fake::example();
        let mut events = fake.device().events();
        let readable = |events: &Events| {
            let mut fds = [PollFd::new(events, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        assert!(!readable(&events) && events.try_next().unwrap().is_none());
        fake.remove_provider(2);
        fake.remove_provider(3);
        assert!(readable(&events));
        let mut next = || events.try_next().unwrap().map(|event| event.kind);
        assert_eq!(next(), Some(EventKind::ProviderRemoved { provider: 2 }));
        assert_eq!(next(), Some(EventKind::ProviderRemoved { provider: 3 }));
        assert_eq!(next(), None);
        assert!(!readable(&events));
    }

    #[test]
    fn an_event_wakes_a_waiting_thread() {
        let fake = Fake::example();
        let mut events = fake.device().events();
        let waiter = std::thread::spawn(move || events.next_within(Some(Duration::from_secs(60))));
        fake.remove_provider(2);
        let event = waiter.join().unwrap().unwrap().expect("an event within a minute");
        assert_eq!(event.to_string(), "provider 2 was removed");
    }

    #[test]
    fn lost_and_unknown_events_are_reported() {
        let lost = abi::p2pmem_event {
            type_: abi::P2PMEM_EVENT_LOST,
            count: 9,
            ..Default::default()
        };
        assert_eq!(
            Event::from(&lost).to_string(),
            "9 events were dropped: list the providers again"
        );
        let odd = abi::p2pmem_event {
            type_: 77,
            ..Default::default()
        };
        assert_eq!(Event::from(&odd).kind, EventKind::Unknown { code: 77 });
        let json = serde_json::to_value(Event::from(&lost)).unwrap();
        assert_eq!((&json["event"], &json["count"]), (&"lost".into(), &9.into()));
    }
}
