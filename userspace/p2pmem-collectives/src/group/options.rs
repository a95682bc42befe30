// SPDX-License-Identifier: MIT OR Apache-2.0

//! Options of a group.

use std::net::IpAddr;
use std::time::Duration;

/// How a rank joins its group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// Most time until all ranks have joined.
    pub limit: Duration,
    /// The address of this host at which this rank listens. `None`: the rank listens at all addresses, and the others try those
    /// that are not loopback, or the loopback address if there is no other.
    pub address: Option<IpAddr>,
    /// The name of this host in messages. `None`: the name that the kernel has.
    pub host: Option<String>,
    /// A rank from whose host nothing arrives for this time, rounded to seconds, has failed.
    pub silence: Duration,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            limit: Duration::from_secs(60),
            address: None,
            host: None,
            silence: Duration::from_secs(4),
        }
    }
}
