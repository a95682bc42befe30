// SPDX-License-Identifier: MIT OR Apache-2.0

//! The client's report.

use std::io::{self, Write};

use p2pmem::human_size;
use serde::{Deserialize, Serialize};

use crate::pattern::Comparison;
use crate::stats::{Latency, Speed};
use crate::wire::{Mode, Side, Test};

/// Result of the messages of one size on one NIC.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NicResult {
    /// The client's NIC.
    pub nic: String,
    /// Bandwidth and rate.
    #[serde(flatten)]
    pub speed: Speed,
    /// Latency of the messages; `None` without messages.
    pub latency: Option<Latency>,
    /// Microseconds of processor time of the client for a message: posting, waiting, copying.
    pub cpu_us_client: f64,
    /// Microseconds of processor time of the server's thread for a message; `None` if no thread of the server takes part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us_server: Option<f64>,
    /// Microseconds of processor time of the server's whole process for a message: also that of the connection to the client,
    /// which takes part a few times a second.
    #[serde(default)]
    pub process_us_server: f64,
    /// Bytes that the client's processor copied.
    pub copied_client: u64,
    /// Bytes that the server's processor copied.
    pub copied_server: u64,
    /// Comparison of the target; `None` if the test did not request one.
    pub checked: Option<Comparison>,
}

/// Result of the messages of one size on all NICs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SizeResult {
    /// Bandwidth and rate of all NICs together.
    #[serde(flatten)]
    pub speed: Speed,
    /// Latency of the messages of all NICs; `None` without messages.
    pub latency: Option<Latency>,
    /// Payload bandwidth in GiB per second.
    pub gib_per_s: f64,
    /// Whether every byte is correct; `None` if the test did not compare.
    pub verified: Option<bool>,
    /// Bytes of the window through which each message moved; `None` if messages moved as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// When the first message was posted, in nanoseconds since 1970 by the client's clock.
    #[serde(default)]
    pub started_unix_ns: u64,
    /// Result of each NIC.
    pub nics: Vec<NicResult>,
}

impl SizeResult {
    /// Combines the results of the NICs; `all` and `latency` are those of all NICs together.
    pub fn new(all: Speed, latency: Option<Latency>, nics: Vec<NicResult>) -> Self {
        let verified = nics
            .iter()
            .map(|nic| nic.checked.as_ref().map(Comparison::is_correct))
            .reduce(|all, one| Some(all? && one?))
            .flatten();
        // With one NIC, the peak of this NIC is the peak of all.
        let speed = match nics.as_slice() {
            [only] => only.speed,
            _ => all,
        };
        Self {
            speed,
            latency,
            gib_per_s: speed.average_mib_per_s / 1024.0,
            verified,
            window: None,
            started_unix_ns: 0,
            nics,
        }
    }
}

/// The whole report.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Parameters of the test.
    pub test: Test,
    /// Unit that copied staged payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_by: Option<String>,
    /// The client's NICs and memory.
    pub client: Side,
    /// The server's NICs and memory.
    pub server: Side,
    /// One result for each size.
    pub results: Vec<SizeResult>,
}

impl Report {
    /// Creates a report without results.
    pub fn new(test: Test, client: Side, server: Side) -> Self {
        Self {
            copied_by: test.staged.then(|| "processor".to_owned()),
            test,
            client,
            server,
            results: Vec::new(),
        }
    }

    /// Returns whether no wrong byte was found.
    pub fn is_correct(&self) -> bool {
        self.results.iter().all(|result| result.verified != Some(false))
    }

    /// Returns the lines before the first result.
    pub fn heading(&self) -> String {
        let side = |side: &Side| {
            let memory = match side.providers.as_slice() {
                [] => "host memory".to_owned(),
                list => format!("{} memory ({})", side.memory, list.join(", ")),
            };
            format!(
                "{memory} by {}, registered by {}",
                side.nics.join("+"),
                side.registration
            )
        };
        let test = &self.test;
        let mut how = match test.mode {
            Mode::Write => "RDMA WRITE, client to server",
            Mode::Read => "RDMA READ, server to client",
            Mode::Send => "SEND, client to server",
            Mode::WriteImmediate => "RDMA WRITE with immediate data, client to server",
            Mode::Rpc => "call: SEND, copy by the server's processor, reply",
            Mode::Tcp => "TCP, client to server, copied by the processors",
            Mode::Ucx => "put of UCX, client to server",
        }
        .to_owned();
        if test.staged {
            how += ", staged through host memory on both sides, copied by the processor";
        }
        let has_handshake = |size: &u64| test.has_handshake(*size);
        if test.sizes.iter().all(has_handshake) {
            how += ", with handshake";
        } else if test.sizes.iter().any(has_handshake) {
            how += ", with handshake where messages move through a window";
        }
        format!(
            " {how}\n client: {}\n server: {}\n {} in flight at once\n{}",
            side(&self.client),
            side(&self.server),
            test.depth,
            Speed::HEADER
        )
    }

    /// Writes the lines of one size.
    ///
    /// # Errors
    ///
    /// The errors of `out`.
    pub fn lines(result: &SizeResult, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{}", result.speed.line())?;
        if result.nics.len() > 1 {
            for nic in &result.nics {
                writeln!(out, "{} {}", nic.speed.line(), nic.nic)?;
            }
        }
        if let Some(window) = result.window {
            writeln!(
                out,
                "   each message through a window, in {} chunks of {}",
                result.speed.bytes / window,
                human_size(window)
            )?;
        }
        for nic in &result.nics {
            if let Some(latency) = &nic.latency {
                write!(
                    out,
                    "   {}: {}; processor time for a message: client {:.2} us",
                    nic.nic,
                    latency.line(),
                    nic.cpu_us_client
                )?;
                match nic.cpu_us_server {
                    Some(server) => writeln!(out, ", server {server:.2} us")?,
                    None => writeln!(out, ", the server takes no part")?,
                }
            }
        }
        for nic in &result.nics {
            let Some(checked) = &nic.checked else { continue };
            match &checked.wrong {
                None => writeln!(
                    out,
                    "   {}: {} compared, CRC-32C {:08x}, all correct",
                    nic.nic,
                    human_size(checked.bytes),
                    checked.crc32c
                )?,
                Some(wrong) => writeln!(
                    out,
                    "   {}: WRONG: {} of {} bytes, the first at {:#x}: {:#04x}, not {:#04x}; CRC-32C {:08x}, not {:08x}",
                    nic.nic,
                    wrong.bytes,
                    checked.bytes,
                    wrong.first_at,
                    wrong.got,
                    wrong.want,
                    checked.crc32c,
                    checked.expected_crc32c
                )?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::Mismatch;
    use crate::stats::Times;
    use std::time::Duration;

    fn nic(checked: Option<Comparison>) -> NicResult {
        let times = Times {
            posted: vec![Duration::ZERO],
            done: vec![Duration::from_millis(1)],
        };
        NicResult {
            nic: "mlx5_0".into(),
            speed: Speed::new(1 << 20, &times),
            latency: Latency::new([&times]),
            cpu_us_client: 2.5,
            cpu_us_server: None,
            process_us_server: 0.0,
            copied_client: 0,
            copied_server: 0,
            checked,
        }
    }

    fn checked(wrong: bool) -> Comparison {
        Comparison {
            bytes: 4096,
            crc32c: 1,
            expected_crc32c: if wrong { 2 } else { 1 },
            wrong: wrong.then_some(Mismatch {
                bytes: 1,
                first_at: 16,
                got: 1,
                want: 2,
            }),
        }
    }

    fn text(result: &SizeResult) -> String {
        let mut out = Vec::new();
        Report::lines(result, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn all_nics_must_be_correct() {
        let all = Speed::of_all(1 << 20, &[]);
        let verified = |nics| SizeResult::new(all, None, nics).verified;
        assert_eq!(verified(vec![nic(None)]), None);
        assert_eq!(verified(vec![nic(Some(checked(false)))]), Some(true));
        assert_eq!(
            verified(vec![nic(Some(checked(false))), nic(Some(checked(true)))]),
            Some(false)
        );
        assert_eq!(verified(vec![nic(Some(checked(false))), nic(None)]), None);
    }

    #[test]
    fn wrong_bytes_are_shown() {
        let all = Speed::of_all(1 << 20, &[]);
        let good = text(&SizeResult::new(all, None, vec![nic(Some(checked(false)))]));
        assert!(good.starts_with(" 1048576 ") && good.contains("all correct"), "{good}");
        let bad = text(&SizeResult::new(all, None, vec![nic(Some(checked(true))), nic(None)]));
        assert!(
            bad.contains("WRONG: 1 of 4096 bytes, the first at 0x10: 0x01, not 0x02"),
            "{bad}"
        );
        // One line for all NICs, and one for each NIC.
        assert_eq!(bad.matches(" 1048576 ").count(), 3, "{bad}");
    }

    #[test]
    fn the_heading_names_the_handshake_of_writes_through_a_window() {
        let heading = |options: &str| {
            let line = format!("p2pmem-perf run host {options}");
            let cli = <crate::cli::Cli as clap::Parser>::parse_from(line.split_whitespace());
            let crate::cli::Command::Run(args) = cli.command else {
                panic!("not run")
            };
            let side = Side {
                nics: vec!["mlx5_0".into()],
                memory: "cpu".into(),
                providers: Vec::new(),
                registration: "reg-mr".into(),
            };
            let test = Test {
                space: 1 << 30,
                ..args.test(1)
            };
            Report::new(test, side.clone(), side).heading()
        };
        assert!(!heading("--size 4K,64K").contains("handshake"));
        assert!(!heading("--size 64K --window 4K --mode read").contains("handshake"));
        for options in ["--size 4K --handshake", "--size 64K --staged", "--size 64K --window 4K"] {
            assert!(heading(options).contains(", with handshake\n"), "{options}");
        }
        let mixed = heading("--size 4K,64K --window 4K");
        assert!(mixed.contains("with handshake where"), "{mixed}");
    }

    #[test]
    fn a_server_that_takes_no_part_has_no_processor_time() {
        let all = Speed::of_all(1 << 20, &[]);
        let result = |cpu_us_server| {
            let one = NicResult {
                cpu_us_server,
                ..nic(None)
            };
            SizeResult::new(all, None, vec![one])
        };
        let json = |cpu_us_server| serde_json::to_value(result(cpu_us_server)).unwrap()["nics"][0].clone();
        assert_eq!(json(Some(1.5))["cpu_us_server"], 1.5);
        assert_eq!(json(None).get("cpu_us_server"), None);
        assert!(text(&result(Some(1.5))).contains("client 2.50 us, server 1.50 us\n"));
        assert!(text(&result(None)).contains("client 2.50 us, the server takes no part\n"));
    }

    #[test]
    fn json_has_no_nested_speeds() {
        let json = serde_json::to_value(SizeResult::new(Speed::of_all(4096, &[]), None, vec![nic(None)])).unwrap();
        assert_eq!(json["bytes"], 1 << 20);
        assert!((json["gib_per_s"].as_f64().unwrap() - 1000.0 / 1024.0).abs() < 1e-6);
        assert_eq!(json["nics"][0]["nic"], "mlx5_0");
        assert!(json["verified"].is_null());
    }
}
