// SPDX-License-Identifier: MIT OR Apache-2.0

//! Disaggregated inference: the example `kv_cache.py` on two nodes, with each engine and path, and what its cache of keys and values cost.

use std::path::Path;
use std::process::Command as Process;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use p2pmem_guest::wire::Listen;
use p2pmem_vm::command::Command;
use p2pmem_vm::demo::Table;
use p2pmem_vm::qemu::utf8;
use serde::{Deserialize, Serialize};

use crate::bed::{Bed, NicBytes, programs};

/// The TCP port of the node that decodes.
const PORT: u16 = 18532;
/// The time limit of a run.
const LIMIT: Duration = Duration::from_secs(120);
/// The measured engines and paths.
const RUNS: [(&str, &str); 3] = [("mooncake", "direct"), ("mooncake", "staged"), ("nixl", "direct")];
/// From this number on, a direct path has host bytes for a byte of the cache: UCX connects by messages in host memory.
const NO_HOST_BYTES: f64 = 0.01;

/// What moving a cache from the node that computes a prompt to the one that continues it cost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kv {
    /// The engine.
    pub engine: String,
    /// `direct` between accelerators, or `staged` through host memory of both nodes.
    pub path: String,
    /// Bytes of the cache that moved.
    pub bytes: u64,
    /// Bytes of host memory that the NICs of both nodes accessed, for a byte of the cache.
    pub host_bytes_per_byte: f64,
    /// Bytes that the processors of both nodes copied, for a byte of the cache.
    pub copied_bytes_per_byte: f64,
    /// From the beginning of the prompt's computation until its first token, in milliseconds.
    pub time_to_first_token_ms: f64,
    /// Whether the tokens are those that one node computes.
    pub tokens_equal: bool,
}

/// The report of `kv_cache.py prefill --json`, as far as it is needed.
#[derive(Debug, Deserialize)]
struct Prefill {
    first_token: Vec<f64>,
    moved: u64,
    copied: u64,
    tokens_equal: Option<bool>,
}

impl Kv {
    fn new(engine: &str, path: &str, report: &Prefill, host: u64) -> Result<Self> {
        ensure!(report.moved > 0, "no byte of the cache moved");
        let first = report.first_token.first().context("no first token")?;
        let moved = report.moved as f64;
        Ok(Self {
            engine: engine.to_owned(),
            path: path.to_owned(),
            bytes: report.moved,
            host_bytes_per_byte: host as f64 / moved,
            copied_bytes_per_byte: report.copied as f64 / moved,
            time_to_first_token_ms: first * 1e3,
            tokens_equal: report.tokens_equal == Some(true),
        })
    }
}

/// Runs the example on the first two nodes. `clients` is the folder with the tables of clients.
///
/// # Errors
///
/// The wheels of the engines cannot be installed, the Python package is not built, or a node fails.
pub fn measure(bed: &mut Bed, clients: &Path) -> Result<Vec<Kv>> {
    let bin = programs()?;
    // The folder of the tests in guests, which install the same wheels.
    let wheels = bin.with_file_name("tmp").join("wheels/install");
    let installed = Process::new(clients.join("wheels/install")).arg(&wheels).status()?;
    ensure!(installed.success(), "the wheels of the engines cannot be installed");
    let top = clients.join("../../..");
    let (python, examples) = (
        top.join("build/python/site"),
        top.join("userspace/p2pmem-python/examples"),
    );
    ensure!(python.exists(), "{} does not exist: make user", python.display());
    let node = utf8(&clients.join("kv-node.sh"))?.to_owned();
    let mut rows = Vec::new();
    for (engine, path) in RUNS {
        let command = |role: &str, options: &str| -> Result<Command> {
            let words = format!("{node} {role} --engine {engine} --path {path} {options}");
            let mut command = Command::new(["bash", "-c", &words]).limit(LIMIT);
            for (name, value) in [
                ("P2PMEM_BIN", &bin),
                ("P2PMEM_WHEELS", &wheels),
                ("P2PMEM_PYTHON", &python),
                ("P2PMEM_EXAMPLES", &examples),
            ] {
                command.env.insert(name.to_owned(), utf8(value)?.to_owned());
            }
            Ok(command)
        };
        let server = command("decode", "")?.listen(Listen::Tcp(PORT));
        let client = command("prefill", "--prompt-tokens 129 --new-tokens 8 --verify --json")?;
        let (text, nics) = bed.run_pair(&server, &client)?;
        // Engines print lines of their own.
        let line = text.lines().find(|line| line.starts_with("{\"engine\""));
        let line = line.with_context(|| format!("no report in {text:?}"))?;
        let report = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let host = nics.iter().map(NicBytes::host).sum();
        rows.push(Kv::new(engine, path, &report, host).with_context(|| format!("{engine}, {path}"))?);
    }
    Ok(rows)
}

/// Returns a failure for each aim that is not met.
pub fn judge(rows: &[Kv]) -> Vec<String> {
    let mut failures = Vec::new();
    for row in rows {
        let what = format!("the cache by {}, {}", row.engine, row.path);
        if !row.tokens_equal {
            failures.push(format!("{what}: the tokens are not those of one node"));
        }
        if row.path == "direct" && row.host_bytes_per_byte + row.copied_bytes_per_byte >= NO_HOST_BYTES {
            failures.push(format!(
                "{what}: {:.4} host bytes and {:.4} copied bytes for a byte",
                row.host_bytes_per_byte, row.copied_bytes_per_byte
            ));
        }
    }
    if !rows.iter().any(|row| row.path == "direct") {
        failures.push("no direct path of a cache was measured".to_owned());
    }
    failures
}

/// Returns the rows as a table.
pub fn table(rows: &[Kv]) -> Table {
    let header = [
        "engine",
        "path",
        "bytes",
        "host bytes/byte",
        "copied/byte",
        "first token, ms",
        "tokens",
    ];
    let row = |row: &Kv| {
        vec![
            row.engine.clone(),
            row.path.clone(),
            row.bytes.to_string(),
            format!("{:.4}", row.host_bytes_per_byte),
            format!("{:.4}", row.copied_bytes_per_byte),
            format!("{:.0}", row.time_to_first_token_ms),
            if row.tokens_equal { "equal" } else { "different" }.to_owned(),
        ]
    };
    Table::new(2, &header, rows.iter().map(row))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A row that meets all aims.
    pub(crate) fn direct() -> Kv {
        let report = Prefill {
            first_token: vec![0.25],
            moved: 1000,
            copied: 0,
            tokens_equal: Some(true),
        };
        Kv::new("mooncake", "direct", &report, 2).unwrap()
    }

    #[test]
    fn a_row_has_ratios() {
        assert_eq!(
            (direct().host_bytes_per_byte, direct().time_to_first_token_ms),
            (0.002, 250.0)
        );
        let nothing = Prefill {
            first_token: vec![0.25],
            moved: 0,
            copied: 0,
            tokens_equal: None,
        };
        assert!(Kv::new("mooncake", "direct", &nothing, 0).is_err());
    }

    #[test]
    fn each_aim_can_fail() {
        let failures = |change: fn(&mut Kv)| {
            let mut row = direct();
            change(&mut row);
            judge(&[row])
        };
        assert!(failures(|_| {}).is_empty());
        assert!(failures(|row| row.tokens_equal = false)[0].contains("not those of one node"));
        assert!(failures(|row| row.host_bytes_per_byte = 0.01)[0].contains("0.0100 host bytes"));
        assert!(failures(|row| row.copied_bytes_per_byte = 2.0)[0].contains("2.0000 copied bytes"));
        assert_eq!(
            failures(|row| row.path = "staged".into()),
            ["no direct path of a cache was measured"]
        );
    }
}
