// SPDX-License-Identifier: MIT OR Apache-2.0

//! The hardening report: results of the cases that provoke the ends of devices, allocation failures, and address
//! translation, and the findings of the kernels in the whole run.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::bed::DEBUG;
use crate::write_report;

/// The prefix of the line in which a case prints its part of the report, an object.
const MARK: &str = "hardening-report: ";
/// The rounds of the tests that unplug a device: test, kernel, rounds. A case prints only the number.
pub const ROUNDS: &str = "unplug_rounds";
/// The parts that cases report. A part that is missing is `skipped` in the report.
const PARTS: &[&str] = &["injection_points", ROUNDS, "iommu", "revoke_ms"];
/// The numbers of bad log lines and of leaks: known if a debug kernel ran.
const CHECKED: [&str; 2] = ["splats", "leaks"];
/// The first words of kmemleak's findings.
const LEAK: &str = "unreferenced object";

/// The results so far.
struct ReportState {
    values: Value,
    kernels: BTreeSet<&'static str>,
    splats: usize,
    leaks: usize,
}

static STATE: Mutex<Option<ReportState>> = Mutex::new(None);

fn state() -> MutexGuard<'static, Option<ReportState>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn change(how: impl FnOnce(&mut ReportState)) {
    how(state().get_or_insert(ReportState {
        values: json!({}),
        kernels: BTreeSet::new(),
        splats: 0,
        leaks: 0,
    }));
}

/// Records that tests ran on a kernel.
pub fn ran_on(kernel: &'static str) {
    change(|state| {
        state.kernels.insert(kernel);
    });
}

/// Adds the part that a case printed for the report.
///
/// # Errors
///
/// The part is not JSON.
pub fn collect(kernel: &str, case: &str, stdout: &[u8]) -> Result<()> {
    for line in String::from_utf8_lossy(stdout).lines() {
        if let Some(text) = line.strip_prefix(MARK) {
            let values = serde_json::from_str(text).with_context(|| line.to_owned())?;
            add(completed(kernel, case, values));
        }
    }
    Ok(())
}

/// Completes a case's part with the test and kernel of its rounds.
fn completed(kernel: &str, case: &str, mut values: Value) -> Value {
    if let Some(rounds) = values[ROUNDS].as_u64() {
        values[ROUNDS] = json!({ case: { kernel: rounds } });
    }
    values
}

/// Adds an object to the report.
pub fn add(value: Value) {
    change(|state| merge(&mut state.values, value));
}

/// Counts the findings of a kernel.
pub fn count(findings: &[String]) {
    let leaks = findings.iter().filter(|line| line.contains(LEAK)).count();
    change(|state| {
        state.leaks += leaks;
        state.splats += findings.len() - leaks;
    });
}

/// Adds numbers of the same name; of all other values the last one counts.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                match into.get_mut(&name) {
                    Some(state) => merge(state, value),
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

/// Writes the report, if a case printed a part.
///
/// # Errors
///
/// The report cannot be written.
pub fn write(name: &str) -> Result<()> {
    match state().take().filter(|state| state.values != json!({})) {
        Some(state) => write_report(name, report(state)),
        None => Ok(()),
    }
}

/// Returns the report, without its origin.
fn report(state: ReportState) -> Value {
    let ReportState {
        values: mut report,
        kernels,
        splats,
        leaks,
    } = state;
    let mut skipped: Vec<&str> = PARTS
        .iter()
        .copied()
        .filter(|part| report.get(part).is_none())
        .collect();
    for (part, count) in CHECKED.into_iter().zip([splats, leaks]) {
        // A finding counts on any kernel. Only a debug kernel can show that there is none.
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
