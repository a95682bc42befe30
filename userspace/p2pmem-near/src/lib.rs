// SPDX-License-Identifier: MIT OR Apache-2.0

//! The contract between `p2pmemctl run` and the preload shim.
//!
//! `p2pmemctl run` sets two variables in the environment of its command: [`NEAR`] has the clients of all mappings, and
//! [`REPORT`] the path of a file of [`SIZE`] bytes. The shim maps this file in each program of the command and counts
//! what the program takes. All programs share the counters. When the command has ended, `p2pmemctl` reads the file
//! ([`Snapshot`]).
//!
//! The file is an array of native 64-bit words: a magic number, counters for all programs, and a table with one entry for
//! each provider and path class. An entry is claimed by its first user and never released.
#![no_std]

use core::sync::atomic::{AtomicU64, Ordering};

/// Name of the environment variable with the clients of all mappings, separated by commas.
pub const NEAR: &str = "P2PMEM_NEAR";
/// Name of the environment variable with the path of the counters' file.
pub const REPORT: &str = "P2PMEM_REPORT";

/// Number of 64-bit words of the counters.
pub const WORDS: usize = 512;
/// Size of the counters' file in bytes: a page.
pub const SIZE: usize = WORDS * 8;

/// The first word. Its last byte is the version of the layout.
const MAGIC: u64 = u64::from_be_bytes(*b"p2pnear\x01");

/// Indices of the counters for all programs.
mod index {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const PROGRAMS: usize = 1;
    /// Two words: calls and bytes.
    pub(crate) const DMABUF: usize = 2;
    /// Two words: calls and bytes.
    pub(crate) const OTHER_MEMORY: usize = 4;
    pub(crate) const REFUSED_MAPPINGS: usize = 6;
    pub(crate) const REFUSED_REGISTRATIONS: usize = 7;
    /// Two words: buffers and bytes that are in no entry of the table.
    pub(crate) const OVERFLOW: usize = 8;
    pub(crate) const TABLE: usize = 16;
}

/// Words of an entry of the table: key, buffers, bytes, and one spare word.
const ENTRY: usize = 4;

/// The key of a table entry. Never 0, because ids of providers start at 1.
fn key(provider: u32, class: u32) -> u64 {
    (u64::from(provider) << 32) | u64::from(class)
}

/// How the memory of a registration was registered with a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registered {
    /// p2pmem memory, as a dma-buf.
    Dmabuf,
    /// Other memory, by the function of libibverbs that the program called.
    OtherMemory,
}

/// An operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// A mapping of new p2pmem memory.
    Mapping,
    /// A registration of p2pmem memory.
    Registration,
}

/// Shared counters. Any number of threads and programs may count at the same time.
#[derive(Debug, Clone, Copy)]
pub struct Counters<'a>(&'a [AtomicU64; WORDS]);

impl<'a> Counters<'a> {
    /// Uses these words as counters. Returns `None` if they are not the counters of this version.
    pub fn new(words: &'a [AtomicU64; WORDS]) -> Option<Self> {
        (words[index::MAGIC].load(Ordering::Relaxed) == MAGIC).then_some(Self(words))
    }

    fn add(&self, at: usize, n: u64) {
        self.0[at].fetch_add(n, Ordering::Relaxed);
    }

    fn add_pair(&self, at: usize, bytes: u64) {
        self.add(at, 1);
        self.add(at + 1, bytes);
    }

    /// Counts a program that has loaded the shim.
    pub fn program(&self) {
        self.add(index::PROGRAMS, 1);
    }

    /// Counts a buffer of `bytes` bytes in a provider. `class` is the ABI's number of the path class.
    pub fn buffer(&self, provider: u32, class: u32, bytes: u64) {
        let key = key(provider, class);
        let mut at = index::TABLE;
        while at + ENTRY <= WORDS {
            let found = match self.0[at].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => key,
                Err(found) => found,
            };
            if found == key {
                return self.add_pair(at + 1, bytes);
            }
            at += ENTRY;
        }
        self.add_pair(index::OVERFLOW, bytes);
    }

    /// Counts a successful registration.
    pub fn registration(&self, how: Registered, bytes: u64) {
        self.add_pair(
            match how {
                Registered::Dmabuf => index::DMABUF,
                Registered::OtherMemory => index::OTHER_MEMORY,
            },
            bytes,
        );
    }

    /// Counts a failed operation.
    pub fn refused(&self, what: Refused) {
        self.add(
            match what {
                Refused::Mapping => index::REFUSED_MAPPINGS,
                Refused::Registration => index::REFUSED_REGISTRATIONS,
            },
            1,
        );
    }
}

/// A number of operations, and their bytes in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Total {
    /// Number of operations.
    pub count: u64,
    /// Bytes of all operations.
    pub bytes: u64,
}

/// Buffers in one provider with one path class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffers {
    /// Id of the provider.
    pub provider: u32,
    /// The ABI's number of the path class of the farthest client; 0 for no clients.
    pub class: u32,
    /// The buffers.
    pub total: Total,
}

/// The content of the counters at one time.
#[derive(Debug, Clone)]
pub struct Snapshot([u64; WORDS]);

impl Snapshot {
    /// Counters that are all zero: the initial content of the file.
    pub fn zero() -> Self {
        let mut words = [0; WORDS];
        words[index::MAGIC] = MAGIC;
        Self(words)
    }

    /// Reads the content of the file. Returns `None` if it is not counters of this version.
    pub fn from_bytes(bytes: &[u8; SIZE]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().ok()?);
        }
        (words[index::MAGIC] == MAGIC).then_some(Self(words))
    }

    /// Returns the content as bytes.
    pub fn to_bytes(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        for (bytes, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn pair(&self, at: usize) -> Total {
        Total {
            count: self.0[at],
            bytes: self.0[at + 1],
        }
    }

    /// Returns the number of programs that have loaded the shim.
    pub fn programs(&self) -> u64 {
        self.0[index::PROGRAMS]
    }

    /// Returns the buffers by provider and path class, in the order of the first buffer of each.
    pub fn buffers(&self) -> impl Iterator<Item = Buffers> + '_ {
        let entries = self.0[index::TABLE..].chunks_exact(ENTRY);
        entries.take_while(|entry| entry[0] != 0).map(|entry| Buffers {
            provider: (entry[0] >> 32) as u32,
            class: entry[0] as u32,
            total: Total {
                count: entry[1],
                bytes: entry[2],
            },
        })
    }

    /// Returns the buffers for which the table had no space.
    pub fn other_buffers(&self) -> Total {
        self.pair(index::OVERFLOW)
    }

    /// Returns the successful registrations.
    pub fn registrations(&self, how: Registered) -> Total {
        self.pair(match how {
            Registered::Dmabuf => index::DMABUF,
            Registered::OtherMemory => index::OTHER_MEMORY,
        })
    }

    /// Returns the number of failed operations.
    pub fn refused(&self, what: Refused) -> u64 {
        self.0[match what {
            Refused::Mapping => index::REFUSED_MAPPINGS,
            Refused::Registration => index::REFUSED_REGISTRATIONS,
        }]
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::vec::Vec;

    fn shared() -> [AtomicU64; WORDS] {
        Snapshot::zero().0.map(AtomicU64::new)
    }

    fn snapshot(words: &[AtomicU64; WORDS]) -> Snapshot {
        let words = core::array::from_fn(|at| words[at].load(Ordering::Relaxed));
        Snapshot::from_bytes(&Snapshot(words).to_bytes()).expect("a magic number")
    }

    #[test]
    fn counters_of_many_threads_add_up() {
        let words = shared();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let counters = Counters::new(&words).unwrap();
                scope.spawn(move || {
                    counters.program();
                    for n in 0..1000 {
                        counters.buffer(1 + (n + thread) % 3, 2, 4096);
                    }
                    counters.registration(Registered::Dmabuf, 10);
                    counters.registration(Registered::OtherMemory, 1);
                    counters.refused(Refused::Mapping);
                });
            }
        });
        let snapshot = snapshot(&words);
        assert_eq!(snapshot.programs(), 4);
        let buffers: Vec<_> = snapshot.buffers().collect();
        assert_eq!(buffers.len(), 3, "one entry for each provider: {buffers:?}");
        assert_eq!(buffers.iter().map(|b| b.total.count).sum::<u64>(), 4000);
        assert!(buffers
            .iter()
            .all(|b| b.class == 2 && b.total.bytes == b.total.count * 4096));
        let total = |count, bytes| Total { count, bytes };
        assert_eq!(snapshot.registrations(Registered::Dmabuf), total(4, 40));
        assert_eq!(snapshot.registrations(Registered::OtherMemory), total(4, 4));
        assert_eq!(
            (
                snapshot.refused(Refused::Mapping),
                snapshot.refused(Refused::Registration)
            ),
            (4, 0)
        );
        assert_eq!(snapshot.other_buffers(), Total::default());
    }

    #[test]
    fn one_provider_with_two_classes_has_two_entries() {
        let words = shared();
        let counters = Counters::new(&words).unwrap();
        counters.buffer(7, 2, 1);
        counters.buffer(7, 6, 2);
        counters.buffer(7, 2, 3);
        let buffers: Vec<_> = snapshot(&words)
            .buffers()
            .map(|b| (b.provider, b.class, b.total.bytes))
            .collect();
        assert_eq!(buffers, [(7, 2, 4), (7, 6, 2)]);
    }

    #[test]
    fn a_full_table_loses_no_byte() {
        let words = shared();
        let counters = Counters::new(&words).unwrap();
        for provider in 1..=1000 {
            counters.buffer(provider, 1, 8);
        }
        let snapshot = snapshot(&words);
        let entries = snapshot.buffers().count() as u64;
        assert!(entries >= 100);
        let rest = snapshot.other_buffers();
        assert_eq!((entries + rest.count, rest.bytes), (1000, rest.count * 8));
    }

    #[test]
    fn other_files_are_not_counters() {
        assert!(Snapshot::from_bytes(&[0; SIZE]).is_none());
        let mut bytes = Snapshot::zero().to_bytes();
        assert!(Snapshot::from_bytes(&bytes).is_some());
        let version = if cfg!(target_endian = "big") { 7 } else { 0 };
        bytes[version] += 1;
        assert!(Snapshot::from_bytes(&bytes).is_none(), "another version");
        let words = [0; WORDS].map(AtomicU64::new);
        assert!(Counters::new(&words).is_none());
    }
}
