// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report on what the module withstood: what the cases said that provoke the ends of devices, failures of allocations and
//! translation of addresses, and what the kernels found wrong in all of the run.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::bed::DEBUG;
use crate::{ORIGIN, Origin, write_report};

/// The report of a run of the stock kernel's tests, or of both kernels'.
pub const REPORT: &str = "hardening.json";
/// That of a run of the debug kernel's tests alone, which does not have all.
pub const DEBUG_ALONE: &str = "hardening-debug.json";
/// What a case says before its part of the report, an object.
const MARK: &str = "hardening-report: ";
/// The rounds of the tests that unplug something: test, kernel, rounds. A case says the number alone.
pub const ROUNDS: &str = "unplug_rounds";
/// What unbinding took, with what is aimed at.
const REVOKE: &str = "revoke_ms";
/// What cases say, and what kernels found wrong. What is missing in a report is `skipped` there.
const PARTS: &[&str] = &["injection_points", ROUNDS, "iommu", REVOKE];
/// Lines that a kernel in order does not say, and memory that was leaked: known where a kernel ran that checks itself.
const CHECKED: [&str; 2] = ["splats", "leaks"];
/// How the lines of kmemleak's findings begin.
const LEAK: &str = "unreferenced object";

/// What there is to tell.
struct Known {
    said: Value,
    kernels: BTreeSet<&'static str>,
    splats: usize,
    leaks: usize,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

fn known() -> MutexGuard<'static, Option<Known>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn change(how: impl FnOnce(&mut Known)) {
    how(known().get_or_insert(Known {
        said: json!({}),
        kernels: BTreeSet::new(),
        splats: 0,
        leaks: 0,
    }));
}

/// Notes that guests have a kernel.
pub fn ran_on(kernel: &'static str) {
    change(|known| {
        known.kernels.insert(kernel);
    });
}

/// Takes what a case said for the report on a kernel.
///
/// # Errors
///
/// It is no JSON.
pub fn collect(kernel: &str, case: &str, stdout: &[u8]) -> Result<()> {
    for line in String::from_utf8_lossy(stdout).lines() {
        if let Some(text) = line.strip_prefix(MARK) {
            let said = serde_json::from_str(text).with_context(|| line.to_owned())?;
            add(completed(kernel, case, said));
        }
    }
    Ok(())
}

/// What a case said, with what it does not know: of which test on which kernel rounds are, and whether an aim was met.
fn completed(kernel: &str, case: &str, mut said: Value) -> Value {
    if let Some(rounds) = said[ROUNDS].as_u64() {
        said[ROUNDS] = json!({ case: { kernel: rounds } });
    }
    let revoke = &said[REVOKE];
    if let (Some(max), Some(aim)) = (revoke["max"].as_f64(), revoke["aim"].as_f64()) {
        said[REVOKE]["met"] = json!(max < aim);
    }
    said
}

/// Adds an object to the report.
pub fn add(value: Value) {
    change(|known| merge(&mut known.said, value));
}

/// Counts what a kernel found wrong.
pub fn count(findings: &[String]) {
    let leaks = findings.iter().filter(|line| line.contains(LEAK)).count();
    change(|known| {
        known.leaks += leaks;
        known.splats += findings.len() - leaks;
    });
}

/// Numbers of one name add up; of all else the last counts.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                match into.get_mut(&name) {
                    Some(known) => merge(known, value),
                    None => {
                        into.insert(name, value);
                    }
                }
            }
        }
        (Value::Number(into), Value::Number(from)) if into.is_u64() && from.is_u64() => {
            *into = (into.as_u64().unwrap_or(0) + from.as_u64().unwrap_or(0)).into();
        }
        (into, from) => *into = from,
    }
}

/// Writes the report, if a case had something to say.
///
/// # Errors
///
/// It cannot be written.
pub fn write() -> Result<()> {
    let Some(known) = known().take().filter(|known| known.said != json!({})) else {
        return Ok(());
    };
    let of = ORIGIN
        .get()
        .map_or(&[] as &[_], |Origin { kernels, .. }| kernels.as_slice());
    let name = if of == [DEBUG] { DEBUG_ALONE } else { REPORT };
    write_report(name, report(known))
}

/// The report, without its origin.
fn report(known: Known) -> Value {
    let Known {
        said: mut report,
        kernels,
        splats,
        leaks,
    } = known;
    let mut skipped: Vec<&str> = PARTS
        .iter()
        .copied()
        .filter(|part| report.get(part).is_none())
        .collect();
    for (part, count) in CHECKED.into_iter().zip([splats, leaks]) {
        // One that was found counts whoever found it; that there is none takes a kernel that looks.
        if count > 0 || kernels.contains(DEBUG) {
            report[part] = count.into();
        } else {
            report[part] = Value::Null;
            skipped.push(part);
        }
    }
    report["skipped"] = json!(skipped);
    report["kernels"] = json!(kernels);
    report
}
