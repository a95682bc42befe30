// SPDX-License-Identifier: MIT OR Apache-2.0

//! Counters of an adapter, for a [`super::Handle`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use p2pmem_ib::Counters as TransportCounters;
use serde::Serialize;

use super::layout::op;

/// Maximum number of different unknown opcodes and registers to record.
const MAX_UNKNOWN: usize = 256;

/// Counters, written by the workers.
#[derive(Debug, Default)]
pub(super) struct Counters {
    commands: AtomicU64,
    refused_commands: AtomicU64,
    unknown: Mutex<BTreeMap<String, u64>>,
    events: AtomicU64,
    completions: AtomicU64,
    lost_completions: AtomicU64,
    bad_doorbells: AtomicU64,
    page_faults: AtomicU64,
    registrations: AtomicU64,
    failed_registrations: AtomicU64,
    undrained: AtomicU64,
    translations: AtomicU64,
}

/// Counters of commands, events, completions, doorbells and memory keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AdapterCounters {
    /// Commands executed or refused.
    pub commands: u64,
    /// Commands refused, including unknown opcodes.
    pub refused_commands: u64,
    /// Unknown opcodes and access registers, with the number of their uses.
    pub unknown: BTreeMap<String, u64>,
    /// Events posted.
    pub events: u64,
    /// Completions posted.
    pub completions: u64,
    /// Completions lost because their CQ was full or broken.
    pub lost_completions: u64,
    /// Doorbells for objects that do not exist.
    pub bad_doorbells: u64,
    /// Page faults reported to the driver.
    pub page_faults: u64,
    /// UMR work requests executed or refused.
    pub registrations: u64,
    /// UMR work requests refused.
    pub failed_registrations: u64,
    /// Changes of memory keys that failed because transfers in flight did not end in time.
    pub undrained: u64,
    /// Ranges of bus addresses to which the memory keys of payload were translated.
    pub translations: u64,
}

/// Applies a function to each field of two sets of transport counters.
macro_rules! each {
    ($a:expr, $b:expr, $f:expr; $($field:ident)*) => {
        TransportCounters { $($field: $f($a.$field, $b.$field)),* }
    };
}

fn combine(a: &TransportCounters, b: &TransportCounters, f: impl Fn(u64, u64) -> u64) -> TransportCounters {
    each!(a, b, f;
        packets_sent packets_received bytes_sent bytes_received retransmissions timeouts sequence_naks_sent
        sequence_naks_received rnr_naks_sent rnr_naks_received duplicates invalid_requests remote_access_errors
        remote_operation_errors page_faults datagrams_dropped pkey_violations qkey_violations packets_dropped
        error_completions flushed)
}

/// Returns `a` + `b`.
pub(super) fn sum(a: &TransportCounters, b: &TransportCounters) -> TransportCounters {
    combine(a, b, u64::wrapping_add)
}

/// Returns `a` - `b`.
pub(super) fn difference(a: &TransportCounters, b: &TransportCounters) -> TransportCounters {
    combine(a, b, u64::wrapping_sub)
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn command(&self) {
        add(&self.commands, 1);
    }

    pub(super) fn refused_command(&self) {
        add(&self.refused_commands, 1);
    }

    fn unknown(&self, name: String) {
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        if unknown.len() < MAX_UNKNOWN || unknown.contains_key(&name) {
            *unknown.entry(name).or_default() += 1;
        }
    }

    pub(super) fn unknown_command(&self, opcode: u16) {
        let name = op::name(opcode).unwrap_or("?");
        self.unknown(format!("command {opcode:#x} {name}"));
    }

    pub(super) fn unknown_register(&self, register: u32) {
        self.unknown(format!("register {register:#x}"));
    }

    pub(super) fn event(&self) {
        add(&self.events, 1);
    }

    pub(super) fn completion(&self) {
        add(&self.completions, 1);
    }

    pub(super) fn lost_completion(&self) {
        add(&self.lost_completions, 1);
    }

    pub(super) fn bad_doorbell(&self) {
        add(&self.bad_doorbells, 1);
    }

    pub(super) fn page_fault(&self) {
        add(&self.page_faults, 1);
    }

    pub(super) fn registration(&self, done: bool) {
        add(&self.registrations, 1);
        if !done {
            add(&self.failed_registrations, 1);
        }
    }

    /// Counts a change of a memory key that failed because transfers in flight did not end in time.
    pub(super) fn undrained(&self) {
        add(&self.undrained, 1);
    }

    /// Counts the ranges of bus addresses of a translated access.
    pub(super) fn translated(&self, ranges: usize) {
        add(&self.translations, ranges as u64);
    }

    /// Returns the current values.
    pub(super) fn adapter_counters(&self) -> AdapterCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        AdapterCounters {
            commands: get(&self.commands),
            refused_commands: get(&self.refused_commands),
            unknown: self.unknown.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            events: get(&self.events),
            completions: get(&self.completions),
            lost_completions: get(&self.lost_completions),
            bad_doorbells: get(&self.bad_doorbells),
            page_faults: get(&self.page_faults),
            registrations: get(&self.registrations),
            failed_registrations: get(&self.failed_registrations),
            undrained: get(&self.undrained),
            translations: get(&self.translations),
        }
    }

    /// Sets all counters to 0.
    pub(super) fn reset(&self) {
        for counter in [
            &self.commands,
            &self.refused_commands,
            &self.events,
            &self.completions,
            &self.lost_completions,
            &self.bad_doorbells,
            &self.page_faults,
            &self.registrations,
            &self.failed_registrations,
            &self.undrained,
            &self.translations,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
