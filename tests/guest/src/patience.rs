// SPDX-License-Identifier: MIT OR Apache-2.0

//! How long is too long: limits of time are for the stock kernel, and longer on one that checks itself all the time.

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
