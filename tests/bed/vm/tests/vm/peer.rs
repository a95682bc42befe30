// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report on peer memory: results of the cases that end buffers, and of the programs that ran without a shim.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, anyhow};
use p2pmem_vm::clients::Report;
use serde_json::{Value, json};

use crate::write_report;

/// The prefix of the line in which a case prints its part of the report.
const MARK: &str = "peer-report: ";
/// The table of programs whose registrations go through the module's peer-memory client.
const TABLE: &str = "peer";

/// The parts that cases have printed.
pub type Said = Arc<Mutex<Vec<Value>>>;

/// Adds the part that a case printed.
///
/// # Errors
///
/// The part is not JSON.
pub fn collect(said: &Said, stdout: &[u8]) -> Result<()> {
    for line in String::from_utf8_lossy(stdout).lines() {
        let Some(text) = line.strip_prefix(MARK) else {
            continue;
        };
        let value = serde_json::from_str(text).with_context(|| line.to_owned())?;
        said.lock().map_err(|_| anyhow!("poisoned"))?.push(value);
    }
    Ok(())
}

/// Writes the report, if a case printed a part. The form and the calls are those of the first case; attempts and writes
/// are the sums of all cases.
///
/// # Errors
///
/// The report cannot be written.
pub fn write(said: &Said, clients: &[Report]) -> Result<()> {
    let said = said.lock().map_err(|_| anyhow!("poisoned"))?;
    let clients: Vec<&Report> = clients.iter().filter(|report| report.table == TABLE).collect();
    if said.is_empty() && clients.is_empty() {
        return Ok(());
    }
    let sum = |name: &str| said.iter().filter_map(|one| one[name].as_u64()).sum::<u64>();
    let first = |name: &str| said.first().map_or(Value::Null, |one| one[name].clone());
    let report = json!({
        "registered_as": first("registered_as"),
        "calls_in_order": first("calls_in_order"),
        "stale_attempts": sum("stale_attempts"),
        "stale_writes": sum("stale_writes"),
        "ends": *said,
        "clients": clients,
    });
    write_report("peer.json", report)
}
