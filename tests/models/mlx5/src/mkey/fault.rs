// SPDX-License-Identifier: MIT OR Apache-2.0

//! Page faults: reported to the driver, and pending until the driver resumes them.
//!
//! Accesses that miss the same pages share one fault, so that a burst of packets causes one event.

use std::collections::BTreeMap;

use p2pmem_ib::Fault;

use super::Mkeys;

/// Page size of faults in bytes, as the driver expects.
const PAGE: u64 = 4096;
/// Maximum number of pending faults.
const MAX_PENDING: usize = 1 << 12;
/// Maximum number of pages of one fault: the event has 20 bits. A longer access faults again later.
const MAX_PAGES: u64 = (1 << 20) - 1;
/// Upper bound of tokens: the event has 48 bits.
const TOKEN_LIMIT: u64 = 1 << 48;

/// A page fault to report to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// Token that the driver passes to PAGE_FAULT_RESUME.
    pub token: u64,
    /// The mkey of the missing translation.
    pub key: u32,
    /// First missing address in the mkey's address space, rounded down to a page of 4096 bytes.
    pub address: u64,
    /// Number of pages of 4096 bytes.
    pub pages: u64,
}

/// Result of a page fault, as reported by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// The pages are present: the waiting accesses can be retried.
    Repaired,
    /// The driver could not resolve the fault: the waiting accesses fail.
    Failed,
}

#[derive(Debug, Default)]
pub(super) struct PageFaults {
    /// Whether an EQ receives page fault events. Otherwise a missing page is an error.
    enabled: bool,
    next: u64,
    pending: BTreeMap<u64, PageFault>,
    /// Faults that are not reported to the driver yet.
    unreported: Vec<PageFault>,
    raised: u64,
}

impl PageFaults {
    pub(super) fn raise(&mut self, key: u32, address: u64, len: u64) -> Fault {
        if !self.enabled {
            return Fault::Key;
        }
        let first = address - address % PAGE;
        let pages = (address - first).saturating_add(len).div_ceil(PAGE).min(MAX_PAGES);
        let covers = |fault: &PageFault| {
            let start = fault.address / PAGE;
            fault.key == key && start <= first / PAGE && first / PAGE < start + fault.pages
        };
        if let Some(pending) = self.pending.values().find(|fault| covers(fault)) {
            return Fault::Page(pending.token);
        }
        if self.pending.len() >= MAX_PENDING {
            return Fault::Key;
        }
        // Skip 0 and pending tokens. The loop ends because at most MAX_PENDING tokens are in use.
        self.next = (self.next + 1) % TOKEN_LIMIT;
        while self.next == 0 || self.pending.contains_key(&self.next) {
            self.next = (self.next + 1) % TOKEN_LIMIT;
        }
        let fault = PageFault {
            token: self.next,
            key,
            address: first,
            pages,
        };
        self.pending.insert(fault.token, fault);
        self.unreported.push(fault);
        self.raised += 1;
        Fault::Page(fault.token)
    }
}

impl Mkeys {
    /// Enables page faults, when an EQ for them exists, or disables them. While they are disabled, which is the initial
    /// state, an access to a page that is not present fails.
    pub fn enable_page_faults(&mut self, enable: bool) {
        self.faults.enabled = enable;
    }

    /// Returns the page faults that are not reported to the driver yet, and marks them as reported.
    pub fn take_faults(&mut self) -> Vec<PageFault> {
        std::mem::take(&mut self.faults.unreported)
    }

    /// Ends a page fault with the result of the driver. Returns `None` if the token is unknown.
    pub fn resume_fault(&mut self, token: u64, failed: bool) -> Option<Resumed> {
        self.faults.pending.remove(&token)?;
        self.faults.unreported.retain(|fault| fault.token != token);
        Some(if failed { Resumed::Failed } else { Resumed::Repaired })
    }

    /// Returns the number of pending page faults, and of all page faults since the start.
    pub fn fault_counts(&self) -> (u64, u64) {
        (self.faults.pending.len() as u64, self.faults.raised)
    }
}
