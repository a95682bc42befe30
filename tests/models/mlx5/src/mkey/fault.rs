// SPDX-License-Identifier: MIT OR Apache-2.0

//! Page faults: pages that the driver has to make present, until it reports that it has.
//!
//! Accesses to the same missing pages share one fault, so that a burst of packets does not become a burst of events.

use std::collections::BTreeMap;

use p2pmem_ib::Fault;

use super::Mkeys;

/// The driver's granularity.
const PAGE: u64 = 4096;
/// Most faults the driver may owe an answer for.
const MAX_PENDING: usize = 1 << 12;
/// Most pages one fault can ask for: the event has 20 bits for them. Who needs more misses the rest later.
const MAX_PAGES: u64 = (1 << 20) - 1;
/// Tokens have 48 bits.
const TOKENS: u64 = 1 << 48;

/// A page fault for the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// What the driver names it by in its answer.
    pub token: u64,
    /// The key that has no translation.
    pub key: u32,
    /// First address that is missing, in the key's address space; the first of a page of 4096 bytes.
    pub address: u64,
    /// How many pages of 4096 bytes.
    pub pages: u64,
}

/// What the driver said about a page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumed {
    /// The pages are there: the accesses that wait for the token can be tried again.
    Repaired,
    /// They will not come: the accesses that wait for the token fail.
    Failed,
}

#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Whether anybody listens; without, a missing page is an error.
    enabled: bool,
    next: u64,
    pending: BTreeMap<u64, PageFault>,
    /// Faults that are not yet reported to the driver.
    fresh: Vec<PageFault>,
    raised: u64,
}

impl Faults {
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
        if let Some(known) = self.pending.values().find(|fault| covers(fault)) {
            return Fault::Page(known.token);
        }
        if self.pending.len() >= MAX_PENDING {
            return Fault::Key;
        }
        // Never 0, and never one that is pending: there are far fewer than tokens.
        self.next = (self.next + 1) % TOKENS;
        while self.next == 0 || self.pending.contains_key(&self.next) {
            self.next = (self.next + 1) % TOKENS;
        }
        let fault = PageFault {
            token: self.next,
            key,
            address: first,
            pages,
        };
        self.pending.insert(fault.token, fault);
        self.fresh.push(fault);
        self.raised += 1;
        Fault::Page(fault.token)
    }
}

impl Mkeys {
    /// Says whether the driver hears of page faults, that is, has an event queue for them. Without one, which is how a
    /// device starts, an access to a page that is not present fails.
    pub fn listen_to_faults(&mut self, listen: bool) {
        self.faults.enabled = listen;
    }

    /// Returns the page faults that are not yet reported to the driver, and marks them as reported.
    pub fn take_faults(&mut self) -> Vec<PageFault> {
        std::mem::take(&mut self.faults.fresh)
    }

    /// The driver answers a page fault; `None` if there is none of this token.
    pub fn resume_fault(&mut self, token: u64, failed: bool) -> Option<Resumed> {
        self.faults.pending.remove(&token)?;
        self.faults.fresh.retain(|fault| fault.token != token);
        Some(if failed { Resumed::Failed } else { Resumed::Repaired })
    }

    /// Page faults that the driver owes an answer for, and all there ever were.
    pub fn fault_counts(&self) -> (u64, u64) {
        (self.faults.pending.len() as u64, self.faults.raised)
    }
}
