// SPDX-License-Identifier: MIT OR Apache-2.0

//! The summary of `p2pmemctl run`: counters in memory that all programs of the command share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;

use p2pmem_near::{Counters, Refused, Registered, REPORT};

use crate::line::say;
use crate::sys::{mapping, Errno};

/// The counters: `None` without `p2pmemctl run`, and an error if they cannot be mapped.
static COUNTERS: OnceLock<Option<Result<Counters<'static>, Errno>>> = OnceLock::new();

/// Maps the counters. Called when the library is loaded: later, the program may have closed all files, changed its user,
/// or changed its root directory.
pub(crate) fn start() {
    if let Some(Ok(counters)) = COUNTERS.get_or_init(map) {
        counters.program();
    }
}

fn map() -> Option<Result<Counters<'static>, Errno>> {
    let path = std::env::var_os(REPORT).filter(|path| !path.is_empty())?;
    let counters =
        mapping::shared_words(path.as_ref()).and_then(|words| Counters::new(words).ok_or(Errno(libc::EINVAL)));
    Some(counters)
}

/// Counts by `count`. If the counters cannot be mapped, reports once that the summary is incomplete.
fn count(count: impl FnOnce(&Counters<'static>)) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    match COUNTERS.get() {
        Some(Some(Ok(counters))) => count(counters),
        Some(Some(Err(errno))) if !REPORTED.swap(true, Ordering::Relaxed) => {
            say!("the summary of p2pmemctl run does not include this program: cannot open its counters: {errno}");
        }
        _ => {}
    }
}

pub(crate) fn buffer(provider: u32, class: u32, bytes: u64) {
    count(|counters| counters.buffer(provider, class, bytes));
}

pub(crate) fn registration(how: Registered, bytes: usize) {
    count(|counters| counters.registration(how, bytes as u64));
}

pub(crate) fn refused(what: Refused) {
    count(|counters| counters.refused(what));
}
