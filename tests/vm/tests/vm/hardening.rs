// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report on what the module withstood: what the cases said that provoke the ends of devices, failures of allocations and
//! translation of addresses, and what the kernels found wrong in all of the run.

use std::sync::Mutex;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};

use crate::write_report;

/// What a case says before its part of the report, an object.
const MARK: &str = "hardening-report: ";
/// How the lines of kmemleak's findings begin.
const LEAK: &str = "unreferenced object";

/// What there is to tell.
struct Known {
    said: Value,
    splats: usize,
    leaks: usize,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

fn change(how: impl FnOnce(&mut Known)) -> Result<()> {
    let mut known = KNOWN.lock().map_err(|_| anyhow!("poisoned"))?;
    how(known.get_or_insert(Known {
        said: json!({}),
        splats: 0,
        leaks: 0,
    }));
    Ok(())
}

/// Takes what a case said for the report.
///
/// # Errors
///
/// It is no JSON.
pub fn collect(stdout: &[u8]) -> Result<()> {
    for line in String::from_utf8_lossy(stdout).lines() {
        if let Some(text) = line.strip_prefix(MARK) {
            add(serde_json::from_str(text).with_context(|| line.to_owned())?)?;
        }
    }
    Ok(())
}

/// Adds an object to the report.
///
/// # Errors
///
/// Another thread panicked.
pub fn add(value: Value) -> Result<()> {
    change(|known| merge(&mut known.said, value))
}

/// Counts what a kernel found wrong.
///
/// # Errors
///
/// Another thread panicked.
pub fn count(findings: &[String]) -> Result<()> {
    let leaks = findings.iter().filter(|line| line.contains(LEAK)).count();
    change(|known| {
        known.leaks += leaks;
        known.splats += findings.len() - leaks;
    })
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
    let known = KNOWN.lock().map_err(|_| anyhow!("poisoned"))?.take();
    let Some(Known {
        mut said,
        splats,
        leaks,
    }) = known.filter(|known| known.said != json!({}))
    else {
        return Ok(());
    };
    said["splats"] = splats.into();
    said["leaks"] = leaks.into();
    write_report("hardening.json", said)
}
