// SPDX-License-Identifier: MIT OR Apache-2.0

//! The rate of one direction of a link: when each packet has left the link, and whether the link accepts more packets.
//!
//! A packet starts when the link is free and takes its bytes, headers included, divided by the rate. Times follow from
//! when the link is free, not from when a thread looks at the clock: a thread that wakes late delivers more packets at
//! once, and the rate stays exact. A link that was idle starts at the time of the next packet, so it saves nothing up.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::time::Duration;

/// Time of the packets that wait for a link at which the link accepts no more. Acknowledgements wait for them, too.
const MAX_BACKLOG: Duration = Duration::from_millis(32);
/// Time of the waiting packets at or below which a link accepts packets again. A link does not become idle if the threads
/// of a loaded machine react within this time.
const RESUME_BACKLOG: Duration = Duration::from_millis(28);
const NANOSECONDS: u128 = 1_000_000_000;

/// One direction of a link with a rate.
#[derive(Debug)]
pub(super) struct Transmitter {
    bytes_per_second: NonZeroU64,
    /// When the link has sent all packets that it accepted.
    free: Duration,
    /// The fraction of a nanosecond in `free`, in units of 1 / `bytes_per_second` ns.
    fraction: u128,
    /// LIDs of the ports that wait for [`Delivery::PathReady`](super::Delivery::PathReady).
    waiting: BTreeSet<u16>,
}

impl Transmitter {
    pub(super) fn new(bytes_per_second: NonZeroU64) -> Self {
        Self {
            bytes_per_second,
            free: Duration::ZERO,
            fraction: 0,
            waiting: BTreeSet::new(),
        }
    }

    /// Returns both directions of a link, if it has a rate.
    pub(super) fn pair(bytes_per_second: Option<NonZeroU64>) -> Option<[Self; 2]> {
        bytes_per_second.map(|rate| [Self::new(rate), Self::new(rate)])
    }

    /// Sends a packet that arrived at the link at the time `at`. Returns when the packet has left the link.
    pub(super) fn send(&mut self, at: Duration, bytes: u64) -> Duration {
        if self.free < at {
            self.free = at;
            self.fraction = 0;
        }
        let rate = u128::from(self.bytes_per_second.get());
        let time = u128::from(bytes) * NANOSECONDS + self.fraction;
        self.fraction = time % rate;
        self.free += Duration::from_nanos(u64::try_from(time / rate).unwrap_or(u64::MAX));
        self.free
    }

    /// Changes the rate. Packets that were accepted keep their times, and the next one follows them.
    pub(super) fn set_rate(&mut self, bytes_per_second: NonZeroU64) {
        self.bytes_per_second = bytes_per_second;
        self.fraction = 0;
    }

    fn backlog(&self, now: Duration) -> Duration {
        self.free.saturating_sub(now)
    }

    /// Returns whether the link accepts packets. If not, [`Transmitter::take_ready`] returns `port` when it does.
    pub(super) fn has_space(&mut self, port: u16, now: Duration) -> bool {
        let has_space = self.backlog(now) < MAX_BACKLOG;
        if !has_space {
            self.waiting.insert(port);
        }
        has_space
    }

    /// Returns the ports that waited, if the link accepts packets again.
    pub(super) fn take_ready(&mut self, now: Duration) -> BTreeSet<u16> {
        if self.backlog(now) <= RESUME_BACKLOG {
            self.take_waiting()
        } else {
            BTreeSet::new()
        }
    }

    /// Returns the ports that waited.
    pub(super) fn take_waiting(&mut self) -> BTreeSet<u16> {
        std::mem::take(&mut self.waiting)
    }

    /// Forgets the packets that were accepted, because the link went down. Returns the ports that waited.
    pub(super) fn clear(&mut self) -> BTreeSet<u16> {
        self.free = Duration::ZERO;
        self.fraction = 0;
        self.take_waiting()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transmitter(bytes_per_second: u64) -> Transmitter {
        Transmitter::new(NonZeroU64::new(bytes_per_second).unwrap())
    }

    #[test]
    fn fractions_of_nanoseconds_add_up() {
        // A byte takes 333,333,333.3 ns.
        let mut link = transmitter(3);
        let times = [(); 6].map(|()| link.send(Duration::ZERO, 1).as_nanos());
        assert_eq!(
            times,
            [
                333_333_333,
                666_666_666,
                1_000_000_000,
                1_333_333_333,
                1_666_666_666,
                2_000_000_000
            ]
        );
        // The fastest rate and the slowest one.
        assert_eq!(
            transmitter(u64::MAX).send(Duration::ZERO, u64::MAX),
            Duration::from_secs(1)
        );
        assert_eq!(
            transmitter(1).send(Duration::ZERO, 1 << 20),
            Duration::from_secs(1 << 20)
        );
    }

    #[test]
    fn an_idle_link_starts_when_the_packet_arrives() {
        let mut link = transmitter(1000);
        assert_eq!(link.send(Duration::from_secs(1), 10), Duration::from_millis(1010));
        assert_eq!(link.send(Duration::from_secs(1), 10), Duration::from_millis(1020));
        assert_eq!(link.send(Duration::from_secs(9), 10), Duration::from_millis(9010));
        link.send(Duration::from_secs(9), 100);
        assert!(!link.has_space(2, Duration::from_secs(9)));
        assert_eq!(link.clear(), BTreeSet::from([2]));
        assert_eq!(link.send(Duration::from_secs(2), 10), Duration::from_millis(2010));
    }

    #[test]
    fn waiting_ports_are_ready_when_enough_packets_left() {
        let mut link = transmitter(1_000_000);
        let start = Duration::from_secs(1);
        link.send(start, 31_999);
        assert!(link.has_space(2, start));
        link.send(start, 1);
        assert!(!link.has_space(2, start) && !link.has_space(3, start));
        assert!(link.take_ready(start + Duration::from_micros(3_999)).is_empty());
        let ready = start + MAX_BACKLOG - RESUME_BACKLOG;
        assert_eq!(link.take_ready(ready), BTreeSet::from([2, 3]));
        assert!(link.take_ready(ready).is_empty(), "a port is notified once");
        assert!(link.has_space(2, ready));
    }
}
