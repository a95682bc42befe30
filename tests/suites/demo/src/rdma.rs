// SPDX-License-Identifier: MIT OR Apache-2.0

//! The measurements of the second act: the bytes that NICs and accelerators of two servers moved, the report, and the
//! check of the results.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::stock::StockImage;

/// The number of writes that are tried after a buffer's end.
pub const STALE_ATTEMPTS: u64 = 20;
/// The limit for unbinding a provider in use, in milliseconds.
pub const REVOKE_LIMIT_MS: f64 = 1000.0;
/// The MiB of an accelerator's 256 MiB that it must be possible to register.
pub const REGISTERED_MIB: u64 = 200;
/// Name of the row from accelerator to accelerator.
pub const ACC_ACC: &str = "ACC-ACC";
/// Name of the row from accelerator to accelerator through host memory on both sides.
pub const STAGED: &str = "ACC-host-host-ACC";

/// Bytes of payload that devices moved, by the memory on the other side of the bus. Commands, queues and completions do
/// not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Read from and written to host memory by NICs.
    pub nics_host: u64,
    /// Read from and written to other devices' memory by NICs.
    pub nics_peers: u64,
    /// Read from and written to other bus addresses by NICs; expected to be 0.
    pub nics_elsewhere: u64,
    /// Read from and written to host memory by accelerators.
    pub accels_host: u64,
    /// The payload of all packets that NICs sent.
    pub wire: u64,
    /// The payload of all devices that crossed a root complex, on the path to host memory or to another root port.
    pub root_complex: u64,
    /// The payload of all devices on an unknown path; expected to be 0.
    pub unknown_path: u64,
}

impl Moved {
    /// Returns the bytes that the devices of all nodes moved between two snapshots of the VM runner, by node.
    ///
    /// # Errors
    ///
    /// A snapshot has an unknown form, a device is missing in one, or a counter decreased.
    pub fn between(before: &Value, after: &Value) -> Result<Moved> {
        let (before, after) = (sum(before)?, sum(after)?);
        let less = |after: u64, before: u64| after.checked_sub(before).context("a counter went backwards");
        Ok(Moved {
            nics_host: less(after.nics_host, before.nics_host)?,
            nics_peers: less(after.nics_peers, before.nics_peers)?,
            nics_elsewhere: less(after.nics_elsewhere, before.nics_elsewhere)?,
            accels_host: less(after.accels_host, before.accels_host)?,
            wire: less(after.wire, before.wire)?,
            root_complex: less(after.root_complex, before.root_complex)?,
            unknown_path: less(after.unknown_path, before.unknown_path)?,
        })
    }

    /// Returns the bytes of host memory that devices accessed.
    pub fn host(&self) -> u64 {
        self.nics_host + self.accels_host
    }
}

/// Adds up all counters of a snapshot.
fn sum(snapshot: &Value) -> Result<Moved> {
    let mut moved = Moved::default();
    let mut nics = 0;
    for (node, devices) in snapshot.as_object().context("a snapshot is a map of nodes")? {
        for (name, device) in devices.as_object().context("a node is a map of devices")? {
            let number = |group: &Value, key: &str| {
                group[key]
                    .as_u64()
                    .with_context(|| format!("counters of {node}:{name} without {key:?}"))
            };
            let counters = &device["counters"];
            match device["kind"].as_str() {
                Some("nic") => {
                    let payload = &counters["payload"];
                    moved.nics_host += number(payload, "host_read")? + number(payload, "host_written")?;
                    moved.nics_peers += number(payload, "peer_read")? + number(payload, "peer_written")?;
                    moved.nics_elsewhere += number(payload, "message_read")? + number(payload, "message_written")?;
                    moved.wire += number(&counters["transport"], "bytes_sent")?;
                    nics += 1;
                }
                Some("accel") => {
                    moved.accels_host += number(counters, "host_read")? + number(counters, "host_written")?;
                }
                Some("bridges") => {
                    moved.root_complex += number(device, "root_complex")?;
                    moved.unknown_path += number(device, "unknown")?;
                }
                _ => {}
            }
        }
    }
    ensure!(nics > 0, "no NIC in the snapshot");
    Ok(moved)
}

/// One row of the table: a transfer from server to server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Its name: memory on the client, memory on the server.
    pub name: String,
    /// Whether payload went through host memory on both sides.
    pub staged: bool,
    /// Bytes of a message.
    pub message_bytes: u64,
    /// Messages.
    pub iterations: u64,
    /// Bytes of all messages.
    pub payload_bytes: u64,
    /// Seconds by the client's clock.
    pub seconds: f64,
    /// Payload per second.
    pub gib_per_s: f64,
    /// `gib_per_s`, divided by that of the first row.
    pub ratio: f64,
    /// Bytes of host memory that devices accessed.
    pub host_bytes: u64,
    /// `host_bytes`, divided by the payload.
    pub host_bytes_per_payload_byte: f64,
    /// Bytes that processors copied, divided by the payload.
    pub copied_bytes_per_payload_byte: f64,
    /// All that devices moved.
    pub moved: Moved,
    /// Whether every byte arrived.
    pub verified: bool,
    /// CRC-32C of the target, in hexadecimal.
    pub checksum: String,
    /// The methods of registration of the two sides' memory.
    pub registration: [String; 2],
}

impl Row {
    /// Makes a row from the report of `p2pmem-perf` and the bytes that devices moved meanwhile.
    ///
    /// # Errors
    ///
    /// The report has an unknown form.
    pub fn new(name: &str, report: &Value, moved: Moved) -> Result<Row> {
        let result = &report["results"][0];
        let number = |key: &str| result[key].as_u64().with_context(|| format!("a result without {key}"));
        let (message_bytes, iterations) = (number("bytes")?, number("iterations")?);
        let payload_bytes = message_bytes * iterations;
        ensure!(payload_bytes > 0, "nothing was moved");
        let nic = &result["nics"][0];
        let copied = ["copied_client", "copied_server"].map(|key| nic[key].as_u64().unwrap_or(0));
        let float = |key: &str| result[key].as_f64().with_context(|| format!("a result without {key}"));
        let method = |side: &str| report[side]["registration"].as_str().unwrap_or_default().to_owned();
        Ok(Row {
            name: name.to_owned(),
            staged: report["test"]["staged"] == true,
            message_bytes,
            iterations,
            payload_bytes,
            seconds: float("seconds")?,
            gib_per_s: float("gib_per_s")?,
            ratio: 1.0,
            host_bytes: moved.host(),
            host_bytes_per_payload_byte: moved.host() as f64 / payload_bytes as f64,
            copied_bytes_per_payload_byte: copied.iter().sum::<u64>() as f64 / payload_bytes as f64,
            moved,
            verified: result["verified"] == true,
            checksum: nic["checked"]["crc32c"]
                .as_u64()
                .map_or_else(|| "?".into(), |crc| format!("{crc:08x}")),
            registration: [method("client"), method("server")],
        })
    }
}

/// The results of a revocation, from the guest's program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Revoked {
    /// The duration of the write to the driver's `unbind`, in milliseconds.
    pub unbind_ms: f64,
    /// Bytes that NICs had moved from and to the provider's server before.
    pub moved_before: u64,
    /// Bytes that they moved from and to devices of that server after `unbind` had returned.
    pub moved_after: u64,
}

/// The result of a search of all memory of an accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scanned {
    /// Its size.
    pub bytes: u64,
    /// CRC-32C of the memory, computed by the accelerator.
    pub checksum: u32,
    /// The number of words that were found.
    pub found: u64,
}

/// Writes after a buffer's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stale {
    /// The number of writes that were tried.
    pub attempts: u64,
    /// The number of writes that reached the memory, by a search of all of it.
    pub writes: u64,
    /// Whether every byte of the memory is the same as before.
    pub unchanged: bool,
    /// The number of writes that ended with a remote access error.
    pub refused: u64,
}

/// The results of the second act so far.
#[derive(Debug, Default)]
pub struct Results {
    /// Whether each node's kernel is the distribution's.
    pub stock: BTreeMap<String, StockImage>,
    /// The driver of each node's NIC.
    pub nic_drivers: BTreeMap<String, String>,
    /// The largest registration of an accelerator's memory, in bytes.
    pub max_registered: Option<u64>,
    /// The message for a registration of one more byte.
    pub refusal: Option<String>,
    /// The names that this message must have: the BAR and its size.
    pub refusal_names: Vec<String>,
    /// The table.
    pub table: Vec<Row>,
    /// The revocation under load.
    pub revoked: Option<Revoked>,
    /// The error message of the program whose writes were cut off.
    pub cut_off: Option<String>,
    /// Writes after a buffer's end.
    pub stale: Option<Stale>,
    /// Release of the running kernels.
    pub kernel_release: Option<String>,
    /// The live buffers that the modules counted after all programs had ended.
    pub leaked_buffers: Option<u64>,
    /// Whether the guests powered off in order.
    pub ended_in_order: bool,
    /// Bad lines of the kernel logs.
    pub findings: Vec<String>,
    /// Steps that failed.
    pub errors: Vec<String>,
    /// Seconds from the start until the guests were ready for commands.
    pub boot_seconds: Option<f64>,
    /// Seconds of the whole act.
    pub seconds: f64,
}

/// The report. Values that were not measured are null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Whether the kernels are the distribution's own, unmodified.
    pub stock_kernel: bool,
    /// The driver of the NICs, if all have the same.
    pub nic_driver: Option<String>,
    /// The method of registration of accelerators' memory, if there is only one.
    pub registration: Option<String>,
    /// Whether every byte of every row arrived.
    pub verified: bool,
    /// The rows.
    pub table: Vec<Row>,
    /// Bytes of host memory that devices accessed from accelerator to accelerator.
    pub host_bytes_acc_acc: Option<u64>,
    /// The writes that were tried after a buffer's end.
    pub stale_attempts: Option<u64>,
    /// The writes of them that reached the memory.
    pub stale_writes: Option<u64>,
    /// The largest registration of an accelerator's memory, in MiB.
    pub max_registered_mib: Option<u64>,
    /// The message for a registration of one more byte.
    pub refusal: Option<String>,
    /// The duration of unbinding the provider while a NIC wrote to its memory, in milliseconds.
    pub revoke_ms: Option<f64>,
    /// The other results of the revocation.
    pub revoked: Option<Revoked>,
    /// The error message of the program whose writes were cut off.
    pub cut_off: Option<String>,
    /// The live buffers after all programs had ended.
    pub leaked_buffers: Option<u64>,
    /// Seconds from the start until the guests were ready for commands.
    pub boot_seconds: Option<f64>,
    /// Seconds of the act.
    pub seconds: f64,
}

/// Returns the value of all, if all are equal.
fn common<'a>(mut values: impl Iterator<Item = &'a String>) -> Option<String> {
    let first = values.next()?;
    values.all(|value| value == first).then(|| first.clone())
}

/// Returns the indexes of the sides of a row whose memory is an accelerator's.
fn accelerators(row: &Row) -> impl Iterator<Item = usize> + '_ {
    let mut words = row.name.split('-');
    let ends = [words.clone().next(), words.next_back()];
    (0..2).filter(move |side| ends[*side] == Some("ACC"))
}

impl Report {
    /// Makes the report of the results.
    pub fn new(results: &Results) -> Report {
        let methods = results
            .table
            .iter()
            .flat_map(|row| accelerators(row).map(|side| &row.registration[side]));
        let acc_acc = results.table.iter().find(|row| row.name == ACC_ACC);
        Report {
            stock_kernel: is_stock(results),
            nic_driver: common(results.nic_drivers.values()),
            registration: common(methods),
            verified: !results.table.is_empty() && results.table.iter().all(|row| row.verified),
            table: results.table.clone(),
            host_bytes_acc_acc: acc_acc.map(|row| row.host_bytes),
            stale_attempts: results.stale.map(|stale| stale.attempts),
            stale_writes: results.stale.map(|stale| stale.writes),
            max_registered_mib: results.max_registered.map(|bytes| bytes >> 20),
            refusal: results.refusal.clone(),
            revoke_ms: results.revoked.as_ref().map(|revoked| revoked.unbind_ms),
            revoked: results.revoked.clone(),
            cut_off: results.cut_off.clone(),
            leaked_buffers: results.leaked_buffers,
            boot_seconds: results.boot_seconds,
            seconds: results.seconds,
        }
    }
}

fn is_stock(results: &Results) -> bool {
    !results.stock.is_empty() && results.stock.values().all(|stock| stock.objections.is_empty())
}

/// The rows that the table must have, in their order, with the permitted range of host memory that devices access per
/// byte of payload. Staged payload goes through host memory once on each side.
pub const ROWS: [(&str, f64); 5] = [
    ("CPU-CPU", 2.0),
    ("CPU-ACC", 1.0),
    ("ACC-CPU", 1.0),
    (ACC_ACC, 0.0),
    (STAGED, 2.0),
];

/// Returns a message for each result that is wrong.
pub fn check(results: &Results) -> Vec<String> {
    let mut failures = results.errors.clone();
    let mut must = |holds: bool, else_what: String| {
        if !holds {
            failures.push(else_what);
        }
    };
    let report = Report::new(results);
    for (node, stock) in &results.stock {
        must(
            stock.objections.is_empty(),
            format!("the kernel of {node} is not stock: {}", stock.objections.join("; ")),
        );
    }
    must(report.stock_kernel, "whether the kernels are stock is not known".into());
    must(
        report.nic_driver.as_deref() == Some("mlx5_core"),
        format!("the NICs' drivers are {:?}", results.nic_drivers),
    );
    must(
        report.registration.as_deref() == Some("dma-buf"),
        "accelerators' memory was not registered by dma-buf".into(),
    );
    judge_table(&results.table, &mut must);
    must(
        report.max_registered_mib.is_some_and(|mib| mib >= REGISTERED_MIB),
        format!("{:?} MiB of an accelerator were registered", report.max_registered_mib),
    );
    let refusal = results.refusal.as_deref().unwrap_or_default();
    for name in &results.refusal_names {
        must(
            refusal.contains(name),
            format!("what was said to one byte too many does not name {name}: {refusal:?}"),
        );
    }
    must(!refusal.is_empty(), "one byte too many was not refused".into());
    match &results.revoked {
        Some(revoked) => {
            must(
                revoked.unbind_ms < REVOKE_LIMIT_MS,
                format!("unbinding took {:.0} ms", revoked.unbind_ms),
            );
            must(
                revoked.moved_before > 0,
                "nothing was in flight at the unbinding".into(),
            );
            must(
                revoked.moved_after == 0,
                format!("{} bytes were moved after the unbinding", revoked.moved_after),
            );
        }
        None => must(false, "nothing was revoked under load".into()),
    }
    let cut_off = results.cut_off.as_deref().unwrap_or_default();
    must(
        is_remote_access_error(cut_off),
        format!("the writer did not end with a remote access error: {cut_off:?}"),
    );
    match results.stale {
        Some(stale) => {
            must(
                stale.attempts == STALE_ATTEMPTS && stale.writes == 0,
                format!(
                    "{} of {} writes after a buffer's end reached the memory",
                    stale.writes, stale.attempts
                ),
            );
            must(
                stale.unchanged,
                "the memory is changed after the writes to a buffer that had ended".into(),
            );
        }
        None => must(false, "no writes were tried after a buffer's end".into()),
    }
    must(
        results.leaked_buffers == Some(0),
        format!("leaked buffers: {:?}", results.leaked_buffers),
    );
    must(results.ended_in_order, "the guests did not end in order".into());
    must(
        results.findings.is_empty(),
        format!("the kernel logs have bad lines: {}", results.findings.join(" | ")),
    );
    failures
}

/// Returns whether a program's output reports a completion with `IBV_WC_REM_ACCESS_ERR` (10): perftest prints the
/// number, other programs print the name.
pub fn is_remote_access_error(text: &str) -> bool {
    text.contains("remote access error") || text.contains("Failed status 10:")
}

fn judge_table(table: &[Row], must: &mut impl FnMut(bool, String)) {
    let names: Vec<&str> = table.iter().map(|row| row.name.as_str()).collect();
    let wanted = ROWS.map(|(name, _)| name);
    must(
        names == wanted,
        format!("the table has the rows {names:?}, not {wanted:?}"),
    );
    for row in table {
        let Some((name, host)) = ROWS.iter().find(|(name, _)| *name == row.name) else {
            continue;
        };
        must(row.verified, format!("{name}: not every byte is right"));
        // Beside the payload, words of the handshake may be in host memory: 8 bytes each.
        let extra = row.host_bytes_per_payload_byte - host;
        let most = if *host == 0.0 { 0.0 } else { 0.01 };
        must(
            (0.0..=most).contains(&extra),
            format!(
                "{name}: devices touched {:.6} bytes of host memory for each byte, not {host}",
                row.host_bytes_per_payload_byte
            ),
        );
        must(
            row.moved.nics_elsewhere == 0,
            format!(
                "{name}: NICs moved {} bytes from and to unknown addresses",
                row.moved.nics_elsewhere
            ),
        );
        must(
            row.moved.root_complex == row.moved.host() && row.moved.unknown_path == 0,
            format!(
                "{name}: {} bytes crossed a root complex and {} took an unknown path, but only {} were host memory's",
                row.moved.root_complex,
                row.moved.unknown_path,
                row.moved.host()
            ),
        );
        must(
            row.moved.wire >= row.payload_bytes,
            format!(
                "{name}: the wire carried {} bytes, less than the payload",
                row.moved.wire
            ),
        );
        let copied = if row.staged { 2.0 } else { 0.0 };
        must(
            row.copied_bytes_per_payload_byte == copied,
            format!(
                "{name}: processors copied {} bytes for each byte, not {copied}",
                row.copied_bytes_per_payload_byte
            ),
        );
    }
}

#[cfg(test)]
#[path = "rdma_tests.rs"]
mod tests;
