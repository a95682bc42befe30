// SPDX-License-Identifier: GPL-2.0

//! The counters of a provider.
//!
//! C header: `include/uapi/linux/p2pmem.h` (`struct p2pmem_stats`)

use crate::ext::abi;
use kernel::sync::atomic::{Atomic, Relaxed};

/// Declares the counters of a provider, one for each counter of `struct p2pmem_stats`.
macro_rules! counters {
    ($($name:ident),* $(,)?) => {
        /// The counters of a provider. Relaxed atomics: each is right by itself, and two of them may be read at different times.
        pub(crate) struct Counters {
            $(pub(crate) $name: Atomic<u64>,)*
        }

        impl Counters {
            /// Returns counters that are all zero.
            pub(crate) fn new() -> Self {
                Self { $($name: Atomic::new(0),)* }
            }

            /// Adds the counters of `stats`, those of a provider that is removed.
            pub(crate) fn add(&self, stats: &abi::Stats) {
                $(self.$name.fetch_add(stats.$name, Relaxed);)*
            }

            /// Adds these counters to those of `stats`.
            pub(crate) fn add_to(&self, stats: &mut abi::Stats) {
                $(stats.$name += self.$name.load(Relaxed);)*
            }
        }
    };
}

counters!(
    allocs,
    frees,
    failed,
    alloc_bytes,
    free_bytes,
    maps,
    scrubbed_bytes,
    pinned,
    revoked,
    exports,
    attaches,
    attach_failed,
);
