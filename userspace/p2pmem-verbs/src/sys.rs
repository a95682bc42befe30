// SPDX-License-Identifier: MIT OR Apache-2.0

//! All unsafe code of the crate: memory that devices access concurrently, and libibverbs.

#![allow(unsafe_code)]

mod completion;
mod datagram;
mod memory;
mod nic;
mod queue_pair;
mod span;

use std::io;

pub use completion::{Completion, Completions, Failure};
pub use datagram::{AddressHandle, Datagrams, ROUTE_BYTES};
pub use memory::{BufferMemory, HostMemory};
pub use nic::{nics, Domain, Limits, Nic, Port};
pub use queue_pair::{QueuePair, Remote, Request, Retries, Segment, Work};
pub use span::Span;

/// The only port that the crate uses; most NICs have one port.
const PORT: u8 = 1;

/// Converts the return value of a verb to a result.
fn errno(returned: libc::c_int) -> io::Result<()> {
    match returned {
        0 => Ok(()),
        // Most verbs return the errno, some the negative errno, and -1 means that the error is in `errno`.
        -1 => Err(io::Error::last_os_error()),
        other => Err(io::Error::from_raw_os_error(other.abs())),
    }
}
