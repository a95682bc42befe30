// SPDX-License-Identifier: MIT OR Apache-2.0

//! The demo's report: the measurements, and a message for each result that is wrong.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use p2pmem_vm::stamp::stamp;
use serde::Serialize;
use serde_json::Value;

use crate::compare;
use crate::job::{Job, Run};
use crate::page;
use crate::rdma;
use crate::stock::StockImage;
use crate::traffic::Bytes;

/// A provider, and the orchestrator's verdict about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// Name of the device in the topology.
    pub device: String,
    /// Its PCI address.
    pub addr: String,
    /// Whether it was chosen.
    pub chosen: bool,
    /// The verdict in one word.
    pub verdict: String,
    /// Class of the path to the farthest client.
    pub class: String,
    /// The message of the verdict.
    pub reason: String,
}

/// Reads the candidates from the output of `p2pmemctl explain --json`. `names` has the names of devices by PCI address.
///
/// # Errors
///
/// The JSON has an unknown form.
pub fn candidates(explanation: &Value, names: &BTreeMap<String, String>) -> Result<Vec<Candidate>> {
    let verdicts = explanation["verdicts"]
        .as_array()
        .context("the explanation has no verdicts")?;
    verdicts
        .iter()
        .map(|verdict| {
            let word = |key: &str| verdict[key].as_str().map(str::to_owned);
            let addr = word("addr").context("a verdict without an address")?;
            let code = word("code").context("a verdict without a code")?;
            Ok(Candidate {
                device: names.get(&addr).unwrap_or(&addr).clone(),
                addr,
                chosen: code == "chosen",
                verdict: code,
                class: word("class").unwrap_or_default(),
                reason: word("why").context("a verdict without a reason")?,
            })
        })
        .collect()
}

/// The results of the demo so far.
#[derive(Debug, Default)]
pub struct Results {
    /// Whether the first act runs.
    pub first: bool,
    /// The results of the second act, if it runs.
    pub rdma: Option<rdma::Results>,
    /// Release of the running kernel.
    pub kernel_release: Option<String>,
    /// Whether it is the distribution's.
    pub stock: Option<StockImage>,
    /// The number of providers in the topology.
    pub providers_expected: usize,
    /// The verdicts about the request that the demo shows.
    pub candidates: Vec<Candidate>,
    /// The job's measurements.
    pub job: Option<Job>,
    /// Name of the drive with the samples.
    pub from: String,
    /// Name of the drive with the result.
    pub to: String,
    /// The live buffers that the module counted after all programs had ended.
    pub leaked_buffers: Option<u64>,
    /// Whether the module was unloaded.
    pub unloaded: bool,
    /// Whether the guest powered off in order, so that its whole log was searched.
    pub ended_in_order: bool,
    /// Bad lines of the whole kernel log.
    pub findings: Vec<String>,
    /// Steps that failed.
    pub errors: Vec<String>,
    /// Seconds from the start until the guest was ready for commands.
    pub boot_seconds: Option<f64>,
    /// Seconds of the whole demo.
    pub total_seconds: f64,
    /// The picture of the machine by p2pmemctl, as SVG.
    pub picture: Option<String>,
}

/// The report. Values that were not measured are null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Whether all results are correct.
    pub passed: bool,
    /// A message for each result that is wrong.
    pub failures: Vec<String>,
    /// Release of the running kernel.
    pub kernel_release: Option<String>,
    /// Whether the kernel is the distribution's own, unmodified.
    pub stock_kernel: bool,
    /// The evidence for it.
    pub stock: Option<StockImage>,
    /// Name of the device chosen for the buffer near both drives.
    pub provider_chosen: Option<String>,
    /// All providers, with the reason for each verdict.
    pub candidates: Vec<Candidate>,
    /// Bytes of samples.
    pub payload_bytes: Option<u64>,
    /// Bytes of host memory that devices accessed in the peer-to-peer run.
    pub host_bytes_p2p: Option<u64>,
    /// The same in the staged run.
    pub host_bytes_staged: Option<u64>,
    /// Payload that crossed a root complex in the peer-to-peer run, by the devices' places in the topology.
    pub root_complex_bytes_p2p: Option<u64>,
    /// The same in the staged run.
    pub root_complex_bytes_staged: Option<u64>,
    /// Seconds of the guest's clock for the peer-to-peer run.
    pub seconds_p2p: Option<f64>,
    /// The same for the staged run.
    pub seconds_staged: Option<f64>,
    /// Whether both results are correct.
    pub verified: bool,
    /// CRC-32C of the result on the drive, in hexadecimal.
    pub checksum: Option<String>,
    /// Largest error of both results, relative to the RMS of the spectrum.
    pub max_error: Option<f64>,
    /// The largest permitted error.
    pub tolerance: f64,
    /// Whether the kernel log has no bad line.
    pub dmesg_clean: bool,
    /// The live buffers after all programs had ended.
    pub leaked_buffers: Option<u64>,
    /// Seconds from the start until the guest was ready for commands.
    pub boot_seconds: Option<f64>,
    /// Seconds from the start of the demo to its end.
    pub total_seconds: f64,
    /// The job's measurements in full.
    pub job: Option<Job>,
    /// The second act.
    pub rdma: Option<rdma::Report>,
    /// Name of the drive with the samples.
    #[serde(skip)]
    pub from: String,
    /// Name of the drive with the result.
    #[serde(skip)]
    pub to: String,
    /// The picture of the machine by p2pmemctl, as SVG, for the HTML page.
    #[serde(skip)]
    pub picture: Option<String>,
}

impl Report {
    /// Checks the results, and makes the report.
    pub fn new(results: Results) -> Report {
        let failures = check(&results);
        let job = results.job.as_ref();
        let runs = job.map(|job| [&job.p2p, &job.staged]);
        let worst = |runs: [&Run; 2]| runs.map(|r| r.comparison.max_error).into_iter().fold(0.0, f64::max);
        Report {
            passed: failures.is_empty(),
            failures,
            kernel_release: results
                .kernel_release
                .or_else(|| results.rdma.as_ref()?.kernel_release.clone()),
            rdma: results.rdma.as_ref().map(rdma::Report::new),
            stock_kernel: is_stock(results.stock.as_ref()),
            stock: results.stock,
            provider_chosen: results.candidates.iter().find(|c| c.chosen).map(|c| c.device.clone()),
            candidates: results.candidates,
            payload_bytes: job.map(|job| job.payload_bytes),
            host_bytes_p2p: job.map(|job| job.p2p.traffic.host_bytes()),
            host_bytes_staged: job.map(|job| job.staged.traffic.host_bytes()),
            root_complex_bytes_p2p: job.map(|job| job.p2p.traffic.bridges.root_complex),
            root_complex_bytes_staged: job.map(|job| job.staged.traffic.bridges.root_complex),
            seconds_p2p: job.map(|job| job.p2p.seconds.total()),
            seconds_staged: job.map(|job| job.staged.seconds.total()),
            verified: job.is_some_and(is_verified),
            checksum: job.map(|job| format!("{:08x}", job.p2p.checksum)),
            max_error: runs.map(worst),
            tolerance: compare::TOLERANCE,
            dmesg_clean: results.ended_in_order && results.findings.is_empty(),
            leaked_buffers: results.leaked_buffers,
            boot_seconds: results.boot_seconds,
            total_seconds: results.total_seconds,
            job: results.job,
            from: results.from,
            to: results.to,
            picture: results.picture,
        }
    }

    /// Writes the report as JSON.
    ///
    /// # Errors
    ///
    /// Those of writing files.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut report = serde_json::to_value(self)?;
        report["stamp"] = stamp()?;
        write_file(path, &serde_json::to_string_pretty(&report)?)
    }

    /// Writes the report as an HTML page.
    ///
    /// # Errors
    ///
    /// Those of writing files.
    pub fn write_page(&self, path: &Path) -> Result<()> {
        write_file(path, &page::page(self))
    }
}

/// Writes a file by renaming a complete one.
fn write_file(path: &Path, text: &str) -> Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let mut file = tempfile::Builder::new()
        .prefix(".demo-")
        // Temporary files are readable for their owner only; the report is readable for all users.
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(folder)
        .with_context(|| folder.display().to_string())?;
    writeln!(file, "{text}")?;
    file.persist(path).with_context(|| path.display().to_string())?;
    Ok(())
}

fn is_stock(stock: Option<&StockImage>) -> bool {
    stock.is_some_and(|stock| stock.objections.is_empty())
}

fn is_verified(job: &Job) -> bool {
    job.p2p.is_verified() && job.staged.is_verified() && job.p2p.checksum == job.staged.checksum
}

/// Returns a message for each result that is wrong.
fn check(results: &Results) -> Vec<String> {
    let mut failures = results.errors.clone();
    if !results.first && results.rdma.is_none() {
        failures.push("no act was done".into());
    }
    if results.first {
        check_first(results, &mut failures);
    }
    if let Some(rdma) = &results.rdma {
        let second = rdma::check(rdma);
        failures.extend(second.into_iter().map(|failure| format!("second act: {failure}")));
    }
    failures
}

/// Adds the messages of the first act.
fn check_first(results: &Results, failures: &mut Vec<String>) {
    let mut must = |holds: bool, else_what: String| {
        if !holds {
            failures.push(else_what);
        }
    };
    match &results.stock {
        Some(stock) => must(
            stock.objections.is_empty(),
            format!("the kernel is not stock: {}", stock.objections.join("; ")),
        ),
        None => must(false, "whether the kernel is stock is not known".into()),
    }
    let chosen: Vec<_> = results.candidates.iter().filter(|c| c.chosen).collect();
    must(
        chosen.len() == 1 && chosen[0].class == "same-switch",
        "no provider below the drives' own switch was chosen".into(),
    );
    must(
        results.candidates.len() == results.providers_expected
            && results.candidates.iter().all(|c| !c.reason.is_empty()),
        format!(
            "{} providers have a verdict with a reason, not {}",
            results.candidates.iter().filter(|c| !c.reason.is_empty()).count(),
            results.providers_expected
        ),
    );
    if let Some(job) = &results.job {
        judge_job(job, &results.from, &results.to, &mut must);
    } else {
        must(false, "the job was not done".into());
    }
    match results.leaked_buffers {
        Some(leaked) => must(leaked == 0, format!("{leaked} buffers were leaked")),
        None => must(false, "whether buffers were leaked is not known".into()),
    }
    must(results.unloaded, "the module was not unloaded".into());
    must(results.ended_in_order, "the guest did not end in order".into());
    must(
        results.findings.is_empty(),
        format!("the kernel log has bad lines: {}", results.findings.join(" | ")),
    );
}

/// Checks the runs of the job. `from` and `to` are the names of the drives.
fn judge_job(job: &Job, from: &str, to: &str, must: &mut impl FnMut(bool, String)) {
    let payload = job.payload_bytes;
    must(payload > 0, "there was no payload".into());
    let all_in = |memory: &str| Bytes::from([(memory.to_owned(), payload)]);
    for (name, run, memory) in [
        ("peer-to-peer", &job.p2p, job.provider.as_str()),
        ("staged", &job.staged, crate::traffic::HOST),
    ] {
        for (drive, moved) in &run.traffic.drives {
            let nothing = Bytes::new();
            let read = if drive == from { all_in(memory) } else { nothing.clone() };
            let written = if drive == to { all_in(memory) } else { nothing };
            must(
                moved.read == read && moved.written == written,
                format!(
                    "{name} run: drive {drive} read into {:?} and wrote from {:?}, expected {read:?} and {written:?}",
                    moved.read, moved.written
                ),
            );
        }
        for drive in [from, to] {
            must(
                run.traffic.drives.contains_key(drive),
                format!("{name} run: drive {drive} was not counted"),
            );
        }
        for (accel, did) in &run.traffic.accelerators {
            // The transform reads its input at least once and writes its output at least once.
            let worked = did.computed >= 2 * payload;
            must(
                did.host == 0 && did.peers == 0 && worked == (*accel == job.provider),
                format!("{name} run: accelerator {accel} did what it should not, or not its work: {did:?}"),
            );
        }
        must(
            run.traffic.accelerators.contains_key(&job.provider),
            format!("{name} run: accelerator {} was not counted", job.provider),
        );
        must(
            run.traffic.failed() == 0,
            format!("{name} run: {} commands failed", run.traffic.failed()),
        );
        must(
            run.comparison.is_equal(),
            format!("{name} run: the result is wrong: {:?}", run.comparison),
        );
        must(
            run.checksum == run.checksum_device,
            format!(
                "{name} run: the drive has {:08x}, the accelerator {:08x}",
                run.checksum, run.checksum_device
            ),
        );
        must(
            run.checksum != job.checksum_samples,
            format!("{name} run: the result is the samples"),
        );
    }
    must(
        job.p2p.traffic.host_bytes() == 0,
        format!(
            "peer-to-peer run: {} bytes of host memory were touched",
            job.p2p.traffic.host_bytes()
        ),
    );
    // The chosen provider is below the drives' own switch (checked above), so no payload may cross a port above the switch.
    must(
        job.p2p.traffic.bridges.root_complex == 0,
        format!(
            "peer-to-peer run: {} bytes crossed the root complex",
            job.p2p.traffic.bridges.root_complex
        ),
    );
    must(
        job.p2p.traffic.bridges.crossed.values().sum::<u64>() > 0,
        "peer-to-peer run: no bridge carried anything".into(),
    );
    must(
        job.staged.traffic.bridges.root_complex == 2 * payload,
        format!(
            "staged run: {} bytes crossed the root complex, expected {}",
            job.staged.traffic.bridges.root_complex,
            2 * payload
        ),
    );
    for (name, run) in [("peer-to-peer", &job.p2p), ("staged", &job.staged)] {
        let unknown = run.traffic.bridges.unknown;
        must(
            unknown == 0,
            format!("{name} run: the path of {unknown} bytes is unknown"),
        );
    }
    must(
        job.p2p.cpu_copied_bytes == 0,
        format!("peer-to-peer run: {} bytes were copied", job.p2p.cpu_copied_bytes),
    );
    must(
        job.staged.cpu_copied_bytes == 2 * payload,
        format!("staged run: {} bytes were copied", job.staged.cpu_copied_bytes),
    );
    must(
        job.p2p.checksum == job.staged.checksum,
        format!(
            "the runs' results differ: {:08x} and {:08x}",
            job.p2p.checksum, job.staged.checksum
        ),
    );
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::compare::Comparison;
    use crate::job::Seconds;
    use crate::traffic::{Accelerator, Bridges, Drive, Traffic};
    use serde_json::json;

    const PAYLOAD: u64 = 1 << 20;

    fn run(memory: &str, copied: u64) -> Run {
        let bytes = Bytes::from([(memory.to_owned(), PAYLOAD)]);
        let drive = |read: &Bytes, written: &Bytes| Drive {
            read: read.clone(),
            written: written.clone(),
            commands: 2,
            failed: 0,
        };
        let none = Bytes::new();
        Run {
            seconds: Seconds {
                read: 1.0,
                compute: 0.5,
                write: 0.25,
            },
            cpu_copied_bytes: copied,
            traffic: Traffic {
                drives: BTreeMap::from([
                    ("nvme0".into(), drive(&bytes, &none)),
                    ("nvme1".into(), drive(&none, &bytes)),
                ]),
                accelerators: BTreeMap::from([
                    (
                        "accel0".into(),
                        Accelerator {
                            computed: 2 * PAYLOAD,
                            commands: 1,
                            ..Accelerator::default()
                        },
                    ),
                    ("accel1".into(), Accelerator::default()),
                ]),
                bridges: Bridges {
                    crossed: Bytes::from([("sw0-port0".into(), 2 * PAYLOAD)]),
                    root_complex: if memory == crate::traffic::HOST { 2 * PAYLOAD } else { 0 },
                    unknown: 0,
                },
            },
            checksum: 0xabc,
            checksum_device: 0xabc,
            comparison: Comparison {
                values: PAYLOAD / 8,
                rms: 10.0,
                max_error: 1e-6,
            },
        }
    }

    fn candidate(device: &str, chosen: bool, class: &str) -> Candidate {
        Candidate {
            device: device.into(),
            addr: "0000:01:00.0".into(),
            chosen,
            verdict: "x".into(),
            class: class.into(),
            reason: "because".into(),
        }
    }

    pub(crate) fn results() -> Results {
        Results {
            kernel_release: Some("7.2".into()),
            stock: Some(StockImage {
                packages: vec![],
                build_id: "00".into(),
                objections: vec![],
            }),
            first: true,
            rdma: None,
            providers_expected: 2,
            candidates: vec![
                candidate("accel0", true, "same-switch"),
                candidate("accel1", false, "system"),
            ],
            job: Some(Job {
                payload_bytes: PAYLOAD,
                provider: "accel0".into(),
                verdicts: vec![],
                checksum_samples: 1,
                seconds_cpu: 1.0,
                p2p: run("accel0", 0),
                staged: run("host", 2 * PAYLOAD),
            }),
            from: "nvme0".into(),
            to: "nvme1".into(),
            leaked_buffers: Some(0),
            unloaded: true,
            ended_in_order: true,
            findings: vec![],
            errors: vec![],
            boot_seconds: Some(3.0),
            total_seconds: 12.0,
            picture: None,
        }
    }

    #[test]
    fn correct_results_pass() {
        let report = Report::new(results());
        assert_eq!(report.failures, Vec::<String>::new());
        assert!(report.passed && report.stock_kernel && report.verified && report.dmesg_clean);
        assert_eq!(report.provider_chosen.as_deref(), Some("accel0"));
        assert_eq!(report.host_bytes_p2p, Some(0));
        assert_eq!(report.host_bytes_staged, Some(2 * PAYLOAD));
        assert_eq!(report.seconds_p2p, Some(1.75));
        assert_eq!(report.checksum.as_deref(), Some("00000abc"));
    }

    /// For each wrong result the report must have a message.
    #[test]
    fn each_wrong_result_is_reported() {
        type Break = fn(&mut Results);
        fn job(results: &mut Results) -> &mut Job {
            results.job.as_mut().expect("the test's results have a job")
        }
        let breaks: [(&str, Break); 29] = [
            ("not stock", |f| f.stock.as_mut().unwrap().objections.push("x".into())),
            ("is not known", |f| f.stock = None),
            ("1 bytes crossed the root complex", |f| {
                job(f).p2p.traffic.bridges.root_complex = 1
            }),
            ("no bridge carried", |f| job(f).p2p.traffic.bridges.crossed.clear()),
            ("staged run: 0 bytes crossed", |f| {
                job(f).staged.traffic.bridges.root_complex = 0
            }),
            ("path of 3 bytes is unknown", |f| job(f).p2p.traffic.bridges.unknown = 3),
            ("own switch", |f| f.candidates[0].class = "host-bridge".into()),
            ("own switch", |f| f.candidates[0].chosen = false),
            ("a verdict", |f| drop(f.candidates.pop())),
            ("a verdict", |f| f.candidates[1].reason.clear()),
            ("not done", |f| f.job = None),
            ("1 buffers", |f| f.leaked_buffers = Some(1)),
            ("is not known", |f| f.leaked_buffers = None),
            ("unloaded", |f| f.unloaded = false),
            ("end in order", |f| f.ended_in_order = false),
            ("bad lines", |f| f.findings.push("BUG: x".into())),
            ("broken", |f| f.errors.push("broken".into())),
            ("nvme0 read into", |f| {
                job(f)
                    .p2p
                    .traffic
                    .drives
                    .get_mut("nvme0")
                    .unwrap()
                    .read
                    .insert("host".into(), 512)
                    .map_or((), drop)
            }),
            ("nvme1 read into", |f| {
                job(f).p2p.traffic.drives.get_mut("nvme1").unwrap().written.clear()
            }),
            ("nvme0 was not counted", |f| {
                drop(job(f).staged.traffic.drives.remove("nvme0"))
            }),
            ("accelerator accel0 did", |f| {
                job(f).p2p.traffic.accelerators.get_mut("accel0").unwrap().host = 8
            }),
            ("accelerator accel0 did", |f| {
                job(f).p2p.traffic.accelerators.get_mut("accel0").unwrap().computed = 0
            }),
            ("accelerator accel1 did", |f| {
                job(f).p2p.traffic.accelerators.get_mut("accel1").unwrap().computed = 2 * PAYLOAD
            }),
            ("1 commands failed", |f| {
                job(f).staged.traffic.drives.get_mut("nvme1").unwrap().failed = 1
            }),
            ("result is wrong", |f| {
                job(f).staged.comparison.max_error = f64::INFINITY
            }),
            ("the accelerator 00000001", |f| job(f).p2p.checksum_device = 1),
            ("is the samples", |f| job(f).checksum_samples = 0xabc),
            ("bytes were copied", |f| job(f).p2p.cpu_copied_bytes = 1),
            ("results differ", |f| {
                job(f).staged.checksum = 2;
                job(f).staged.checksum_device = 2;
            }),
        ];
        for (what, break_it) in breaks {
            let mut results = results();
            break_it(&mut results);
            let report = Report::new(results);
            assert!(!report.passed, "{what}");
            assert!(report.failures.iter().any(|f| f.contains(what)), "{what}: {report:?}");
        }
    }

    #[test]
    fn missing_results_give_a_failed_report() {
        let report = Report::new(Results::default());
        assert!(!report.passed && !report.verified && !report.dmesg_clean && !report.stock_kernel);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["leaked_buffers"], Value::Null);
        assert_eq!(json["host_bytes_p2p"], Value::Null);
    }

    #[test]
    fn explanations_are_parsed() {
        let names = BTreeMap::from([("0000:03:00.0".to_owned(), "accel0".to_owned())]);
        let verdict =
            |addr: &str, code: &str| json!({ "addr": addr, "code": code, "class": "same-switch", "why": "w" });
        let explanation =
            json!({ "verdicts": [verdict("0000:03:00.0", "chosen"), verdict("0000:09:00.0", "too-small")] });
        let read = candidates(&explanation, &names).unwrap();
        assert_eq!(read[0].device, "accel0");
        assert!(read[0].chosen && !read[1].chosen);
        assert_eq!(
            (read[1].device.as_str(), read[1].verdict.as_str()),
            ("0000:09:00.0", "too-small")
        );
        assert!(candidates(&json!({}), &names).is_err());
        assert!(candidates(&json!({ "verdicts": [{}] }), &names).is_err());
    }

    #[test]
    fn report_is_written_atomically() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("reports/demo.json");
        let report = Report::new(results());
        report.write(&path).unwrap();
        report.write(&path).unwrap();
        let mut read: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let stamp = read.as_object_mut().and_then(|read| read.remove("stamp"));
        assert!(stamp.is_some_and(|stamp| stamp["time"].is_string()));
        assert_eq!(read, serde_json::to_value(&report).unwrap());
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert!(report.write(Path::new("/proc/no/demo.json")).is_err());
    }

    #[test]
    fn each_act_is_checked_only_if_requested() {
        let with = |first, rdma: Option<rdma::Results>| {
            Report::new(Results {
                first,
                rdma,
                ..results()
            })
        };
        let empty = || Some(rdma::Results::default());
        assert!(with(true, None).passed && with(true, None).rdma.is_none());
        let second = with(true, empty());
        assert!(!second.passed && second.failures.iter().all(|f| f.starts_with("second act: ")));
        assert_eq!(second.rdma.map(|rdma| rdma.stock_kernel), Some(false));
        let only = Report::new(Results {
            rdma: empty(),
            ..Results::default()
        });
        assert_eq!(only.failures, second.failures, "the first act has no failures");
    }
}
