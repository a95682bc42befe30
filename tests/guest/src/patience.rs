// SPDX-License-Identifier: MIT OR Apache-2.0

//! How long is too long, and how often is often enough: limits of time and numbers of rounds are for the stock kernel. On one
//! that checks itself all the time the limits are longer, and the rounds fewer where each takes that much longer.

use std::sync::LazyLock;
use std::time::Duration;

/// The environment variable that has the factor.
pub const PATIENCE: &str = "P2PMEM_PATIENCE";

static FACTOR: LazyLock<u32> = LazyLock::new(|| {
    std::env::var(PATIENCE)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1)
});

/// A limit of time as it is on this kernel.
pub fn patiently(limit: Duration) -> Duration {
    limit * *FACTOR
}

/// How many rounds a race goes through on this kernel, or how much of a kind a test has: about as many as take the same time,
/// and at least one.
pub fn rounds(count: u32) -> u32 {
    count.div_ceil(*FACTOR)
}
