// SPDX-License-Identifier: MIT OR Apache-2.0

//! The second act's measurements: what the NICs and accelerators of two servers moved, what is reported of it, and what of
//! it is not as it must be.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::stock::Stock;

/// Writes that are tried after a buffer's end.
pub const STALE_ATTEMPTS: u64 = 20;
/// Milliseconds that unbinding a provider in use may take.
pub const REVOKE_LIMIT_MS: f64 = 1000.0;
/// MiB that must be possible to register of an accelerator's 256 MiB.
pub const REGISTERED_MIB: u64 = 200;
/// Name of the row from accelerator to accelerator.
pub const ACC_ACC: &str = "ACC-ACC";
/// Name of the row from accelerator to accelerator through host memory on both sides.
pub const STAGED: &str = "ACC-host-host-ACC";

/// Bytes that devices moved, by what was on the other side of the bus. Payload only: no commands, queues or completions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Read from and written to host memory by NICs.
    pub nics_host: u64,
    /// Read from and written to other devices' memory by NICs.
    pub nics_peers: u64,
    /// Read from and written to other bus addresses by NICs; nothing should ever be there.
    pub nics_elsewhere: u64,
    /// Read from and written to host memory by accelerators.
    pub accels_host: u64,
    /// Payload of all packets that NICs sent.
    pub wire: u64,
    /// What of all devices' payload crossed a root complex, on the way to host memory or to another root port.
    pub root_complex: u64,
    /// Payload of all devices whose way is not known; nothing should ever be there.
    pub unknown_way: u64,
}

impl Moved {
    /// What the devices of all nodes moved from one snapshot to a later one; both are the VM runner's, by node.
    ///
    /// # Errors
    ///
    /// A snapshot is not of the form known, a device is missing in one, or a counter went backwards.
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
            unknown_way: less(after.unknown_way, before.unknown_way)?,
        })
    }

    /// Bytes of host memory that devices touched.
    pub fn host(&self) -> u64 {
        self.nics_host + self.accels_host
    }
}

/// All counters of a snapshot since the boot.
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
                    moved.unknown_way += number(device, "unknown")?;
                }
                _ => {}
            }
        }
    }
    ensure!(nics > 0, "no NIC in the snapshot");
    Ok(moved)
}

/// One way from server to server.
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
    /// Bytes of all.
    pub payload_bytes: u64,
    /// Seconds by the client's clock.
    pub seconds: f64,
    /// Payload per second.
    pub gib_per_s: f64,
    /// That, by that of the first row.
    pub ratio: f64,
    /// Host memory that devices touched, in bytes.
    pub host_bytes: u64,
    /// That, by the payload.
    pub host_bytes_per_payload_byte: f64,
    /// Bytes that processors copied, by the payload.
    pub copied_bytes_per_payload_byte: f64,
    /// All that devices moved.
    pub moved: Moved,
    /// Whether every byte arrived.
    pub verified: bool,
    /// CRC-32C of the target, in hexadecimal.
    pub checksum: String,
    /// How the two sides' memory was registered.
    pub registration: [String; 2],
}

impl Row {
    /// From the report of `p2pmem-perf`, and what devices moved meanwhile.
    ///
    /// # Errors
    ///
    /// The report is not of the form known.
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

/// What a revocation did, as the guest's program tells it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Revoked {
    /// Milliseconds that the write to the driver's `unbind` took.
    pub unbind_ms: f64,
    /// Bytes that NICs had moved from and to the provider's server before.
    pub moved_before: u64,
    /// Bytes that they moved from and to devices of that server from the end of `unbind` on.
    pub moved_after: u64,
}

/// What was found in all memory of an accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scanned {
    /// Its size.
    pub bytes: u64,
    /// CRC-32C of it, by the accelerator itself.
    pub checksum: u32,
    /// How many of the words that were looked for are there.
    pub found: u64,
}

/// Writes after a buffer's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stale {
    /// How many were tried.
    pub attempts: u64,
    /// How many reached the memory, all of which was searched for what they write.
    pub writes: u64,
    /// Whether all memory is byte for byte what it was before them.
    pub unchanged: bool,
    /// How many ended with a remote access error.
    pub refused: u64,
}

/// What the second act found out, as far as it came.
#[derive(Debug, Default)]
pub struct Facts {
    /// Whether each node's kernel is the distribution's.
    pub stock: BTreeMap<String, Stock>,
    /// The driver of each node's NIC.
    pub nic_drivers: BTreeMap<String, String>,
    /// Most of an accelerator's memory that was registered at once, in bytes.
    pub max_registered: Option<u64>,
    /// What was said to one byte more.
    pub refusal: Option<String>,
    /// What that has to name: the BAR and its size.
    pub refusal_names: Vec<String>,
    /// The table.
    pub table: Vec<Row>,
    /// The revocation under load.
    pub revoked: Option<Revoked>,
    /// What the program said whose writes were cut off.
    pub cut_off: Option<String>,
    /// Writes after a buffer's end.
    pub stale: Option<Stale>,
    /// Release of the running kernels.
    pub kernel_release: Option<String>,
    /// Live buffers that the modules knew of when all programs had ended.
    pub leaked_buffers: Option<u64>,
    /// Whether the guests lived to their orderly end.
    pub ended_in_order: bool,
    /// Bad lines of the kernel logs.
    pub findings: Vec<String>,
    /// Steps that failed.
    pub errors: Vec<String>,
    /// Seconds from the start to guests ready for commands.
    pub boot_seconds: Option<f64>,
    /// Seconds of all.
    pub seconds: f64,
}

/// The report as it is written. What was not reached is null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Whether the kernels are the distribution's own, unmodified.
    pub stock_kernel: bool,
    /// The NICs' driver, where it is one.
    pub nic_driver: Option<String>,
    /// How accelerators' memory was registered, where it is one way.
    pub registration: Option<String>,
    /// Whether every byte of every row arrived.
    pub verified: bool,
    /// The rows.
    pub table: Vec<Row>,
    /// Bytes of host memory that devices touched from accelerator to accelerator.
    pub host_bytes_acc_acc: Option<u64>,
    /// Writes tried after a buffer's end.
    pub stale_attempts: Option<u64>,
    /// How many of them reached the memory.
    pub stale_writes: Option<u64>,
    /// Most of an accelerator's memory that was registered at once, in MiB.
    pub max_registered_mib: Option<u64>,
    /// What was said to one byte more.
    pub refusal: Option<String>,
    /// Milliseconds that unbinding the provider took while a NIC wrote to its memory.
    pub revoke_ms: Option<f64>,
    /// What else is known of it.
    pub revoked: Option<Revoked>,
    /// What the program said whose writes were cut off.
    pub cut_off: Option<String>,
    /// Live buffers that were left when all programs had ended.
    pub leaked_buffers: Option<u64>,
    /// Seconds from the start to guests ready for commands.
    pub boot_seconds: Option<f64>,
    /// Seconds of the act.
    pub seconds: f64,
}

/// The one value of all, where it is one.
fn common<'a>(mut values: impl Iterator<Item = &'a String>) -> Option<String> {
    let first = values.next()?;
    values.all(|value| value == first).then(|| first.clone())
}

/// Kinds of memory of a row's two sides that are accelerators', as indices.
fn accelerators(row: &Row) -> impl Iterator<Item = usize> + '_ {
    let words = row.name.split('-');
    let ends = [words.clone().next(), words.last()];
    (0..2).filter(move |side| ends[*side] == Some("ACC"))
}

impl Report {
    /// Of the facts.
    pub fn new(facts: &Facts) -> Report {
        let methods = facts
            .table
            .iter()
            .flat_map(|row| accelerators(row).map(|side| &row.registration[side]));
        let acc_acc = facts.table.iter().find(|row| row.name == ACC_ACC);
        Report {
            stock_kernel: is_stock(facts),
            nic_driver: common(facts.nic_drivers.values()),
            registration: common(methods),
            verified: !facts.table.is_empty() && facts.table.iter().all(|row| row.verified),
            table: facts.table.clone(),
            host_bytes_acc_acc: acc_acc.map(|row| row.host_bytes),
            stale_attempts: facts.stale.map(|stale| stale.attempts),
            stale_writes: facts.stale.map(|stale| stale.writes),
            max_registered_mib: facts.max_registered.map(|bytes| bytes >> 20),
            refusal: facts.refusal.clone(),
            revoke_ms: facts.revoked.as_ref().map(|revoked| revoked.unbind_ms),
            revoked: facts.revoked.clone(),
            cut_off: facts.cut_off.clone(),
            leaked_buffers: facts.leaked_buffers,
            boot_seconds: facts.boot_seconds,
            seconds: facts.seconds,
        }
    }
}

fn is_stock(facts: &Facts) -> bool {
    !facts.stock.is_empty() && facts.stock.values().all(|stock| stock.objections.is_empty())
}

/// The rows that the table must have, in their order, with the host memory that devices may touch by payload byte: from
/// and to. What is staged goes through it once on each side.
pub const ROWS: [(&str, f64); 5] = [
    ("CPU-CPU", 2.0),
    ("CPU-ACC", 1.0),
    ("ACC-CPU", 1.0),
    (ACC_ACC, 0.0),
    (STAGED, 2.0),
];

/// Everything that is not as it must be, in words.
pub fn judge(facts: &Facts) -> Vec<String> {
    let mut failures = facts.errors.clone();
    let mut must = |holds: bool, else_what: String| {
        if !holds {
            failures.push(else_what);
        }
    };
    let report = Report::new(facts);
    for (node, stock) in &facts.stock {
        must(
            stock.objections.is_empty(),
            format!("the kernel of {node} is not stock: {}", stock.objections.join("; ")),
        );
    }
    must(report.stock_kernel, "whether the kernels are stock is not known".into());
    must(
        report.nic_driver.as_deref() == Some("mlx5_core"),
        format!("the NICs' drivers are {:?}", facts.nic_drivers),
    );
    must(
        report.registration.as_deref() == Some("dma-buf"),
        "accelerators' memory was not registered by dma-buf".into(),
    );
    judge_table(&facts.table, &mut must);
    must(
        report.max_registered_mib.is_some_and(|mib| mib >= REGISTERED_MIB),
        format!("{:?} MiB of an accelerator were registered", report.max_registered_mib),
    );
    let refusal = facts.refusal.as_deref().unwrap_or_default();
    for name in &facts.refusal_names {
        must(
            refusal.contains(name),
            format!("what was said to one byte too many does not name {name}: {refusal:?}"),
        );
    }
    must(!refusal.is_empty(), "one byte too many was not refused".into());
    match &facts.revoked {
        Some(revoked) => {
            must(
                revoked.unbind_ms < REVOKE_LIMIT_MS,
                format!("unbinding took {:.0} ms", revoked.unbind_ms),
            );
            must(
                revoked.moved_before > 0,
                "nothing was under way at the unbinding".into(),
            );
            must(
                revoked.moved_after == 0,
                format!("{} bytes were moved after the unbinding", revoked.moved_after),
            );
        }
        None => must(false, "nothing was revoked under load".into()),
    }
    let cut_off = facts.cut_off.as_deref().unwrap_or_default();
    must(
        is_remote_access_error(cut_off),
        format!("the writer did not end with a remote access error: {cut_off:?}"),
    );
    match facts.stale {
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
        facts.leaked_buffers == Some(0),
        format!("leaked buffers: {:?}", facts.leaked_buffers),
    );
    must(facts.ended_in_order, "the guests did not end in order".into());
    must(
        facts.findings.is_empty(),
        format!("the kernel logs have bad lines: {}", facts.findings.join(" | ")),
    );
    failures
}

/// Whether a program's words mean a completion with `IBV_WC_REM_ACCESS_ERR` (10): perftest gives the number, others its
/// name.
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
        // Besides the payload there are the words of the handshake, 8 bytes now and then, where they are in host memory.
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
            row.moved.root_complex == row.moved.host() && row.moved.unknown_way == 0,
            format!(
                "{name}: {} bytes crossed a root complex and {} took an unknown way, but only {} were host memory's",
                row.moved.root_complex,
                row.moved.unknown_way,
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
