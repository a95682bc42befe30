// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the documents that reports become.

use super::*;
use serde_json::{json, Value};

fn latency(us: f64) -> Value {
    json!({"p50_us": us, "p99_us": 1.2 * us, "p999_us": 1.6 * us, "max_us": 3.0 * us})
}

fn run_report() -> Value {
    let result = |power: u32| {
        let bytes = 4096_u64 << power;
        let us = 1.9 + bytes as f64 / 12_000.0;
        json!({
            "bytes": bytes, "iterations": 2000, "seconds": 1.0, "peak_mib_per_s": null,
            "average_mib_per_s": bytes as f64 / us, "rate_mpps": 0.1, "latency": latency(us),
            "gib_per_s": 1.0, "verified": true, "nics": [],
        })
    };
    json!({
        "schema": 1,
        "test": {"mode": "write", "staged": false, "depth": 16},
        "client": {"nics": ["mlx5_0"], "memory": "accelerator", "providers": [], "registration": "dma-buf"},
        "server": {"nics": ["mlx5_0"], "memory": "cpu", "providers": [], "registration": "reg-mr"},
        "results": (0..12).map(result).collect::<Vec<_>>(),
    })
}

fn matrix_report() -> Value {
    let kinds = ["cpu", "accelerator", "cmb", "fpga"];
    let mut entries = Vec::new();
    for mode in ["write", "read", "staged"] {
        for (row, from) in kinds.iter().enumerate() {
            for (column, to) in kinds.iter().enumerate() {
                let ratio = 1.0 - 0.1 * row.max(column) as f64;
                entries.push(json!({
                    "from": from, "to": to, "mode": mode, "size": 1 << 20,
                    "mib_per_s": 11_878.0 * ratio, "ratio_to_link": ratio,
                }));
            }
        }
    }
    entries[3] = json!({"from": "cpu", "to": "fpga", "mode": "write", "size": 1 << 20, "error": "no <such> provider"});
    json!({"schema": 1, "memory": kinds, "peer_memory": kinds, "modes": ["write"], "nics": 1, "link": [], "entries": entries})
}

fn rpc_report() -> Value {
    let mut rpc = Vec::new();
    for (name, server) in [("two-sided", 1.4), ("write", 0.0), ("read", 0.0)] {
        for bytes in [8, 4096] {
            for (waiting, cpu, latency) in [("poll", 3.0, 2.9), ("adaptive", 2.2, 4.1), ("events", 1.3, 12.5)] {
                let factor = 1.0 + f64::from(bytes) / 8192.0 + server / 3.0;
                rpc.push(json!({
                    "name": name, "bytes": bytes, "waiting": waiting, "p50_us": latency * factor, "batch": 1,
                    "cpu_us_client": cpu * factor, "cpu_us_server": server,
                }));
            }
        }
    }
    let path = |name: &str, times: &[(&str, f64)]| {
        let terms: Vec<_> = times.iter().map(|(term, us)| json!({"term": term, "us": us})).collect();
        json!({"name": name, "terms": terms})
    };
    json!({
        "schema": 1, "client": "cpu", "server": "cpu", "rpc": rpc, "ratios": {"any": 1.0}, "matrix": matrix_report(),
        "decomposition": [
            path("kernel buffers", &[("root complex", 88.0), ("translation", 21.0), ("copies", 240.0)]),
            path("host registration", &[("root complex", 88.0), ("translation", 21.0)]),
            path("p2pmem", &[("switch", 61.0)]),
        ],
        "formula": [
            {"name": "sockets", "copied_by_program": null, "copied_by_kernel": 2.25, "root_complex": 4.5, "instructions": 1.0},
            {"name": "direct", "copied_by_program": 0.0, "copied_by_kernel": 0.0, "root_complex": 0.0, "instructions": 0.1},
        ],
        "multi_port": {"single_mib_per_s": 12.0, "one_process_mib_per_s": 23.0, "two_processes_mib_per_s": 24.0},
    })
}

/// Draws a report, and checks that the document is valid and that its places are numbers. Returns its texts.
fn texts(report: &Value) -> Vec<String> {
    let svg = draw(&report.to_string()).unwrap();
    let document = roxmltree::Document::parse(&svg).unwrap();
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    let (_, height) = svg.split_once("height=\"").unwrap();
    let height: f64 = height.split('"').next().unwrap().parse().unwrap();
    for node in document.descendants().filter(|node| node.has_tag_name("text")) {
        let y: f64 = node.attribute("y").unwrap().parse().unwrap();
        assert!((0.0..height).contains(&y), "{node:?} is outside of the page");
    }
    let texts = document.descendants().filter(|node| node.is_text());
    texts
        .filter_map(|node| node.text())
        .map(|text| text.trim().to_owned())
        .collect()
}

#[test]
fn a_run_has_rates_and_latencies() {
    let texts = texts(&run_report());
    for expected in ["write, accelerator to cpu", "MiB/s", "latency, µs", "99.9 %", "4K"] {
        assert!(texts.iter().any(|text| text == expected), "{expected}: {texts:?}");
    }
}

#[test]
fn a_matrix_has_a_heat_map_for_each_mode() {
    let texts = texts(&matrix_report());
    for expected in ["write, 1M", "read, 1M", "staged, 1M", "0.90", "1.00", "–"] {
        assert!(texts.iter().any(|text| text == expected), "{expected}: {texts:?}");
    }
}

#[test]
fn a_report_of_several_measurements_has_all_charts() {
    let texts = texts(&rpc_report());
    for expected in [
        "write, 1M",
        "median latency, µs",
        "two-sided 8B",
        "adaptive",
        "Where the time of a transfer goes",
        "349 µs",
        "Bytes that are moved for a byte of payload",
        "6.75 bytes",
        "0 bytes",
        "through a root complex",
        "two ports, one process",
        "23 MiB/s",
        "copies",
    ] {
        assert!(texts.iter().any(|text| text == expected), "{expected}: {texts:?}");
    }
}

#[test]
fn a_stream_has_its_rates() {
    let stream = json!({"average_mib_per_s": 900.0, "rolling_min_mib_per_s": 870.5, "rolling_max_mib_per_s": 910.0});
    let texts = texts(&stream);
    assert!(
        texts.iter().any(|text| text == "870") || texts.iter().any(|text| text == "871"),
        "{texts:?}"
    );
}

#[test]
fn unusual_numbers_stay_on_the_page() {
    let mut report = run_report();
    report["results"] = json!([report["results"][0]]);
    texts(&report);
    report["results"][0]["average_mib_per_s"] = json!(0.0);
    report["results"][0]["latency"] = Value::Null;
    texts(&report);
    let mut report = rpc_report();
    report["rpc"][0]["p50_us"] = json!(0.0);
    report["rpc"][0]["cpu_us_client"] = json!(-1.0);
    report["decomposition"][0]["terms"][0]["us"] = json!(-5.0);
    report["decomposition"][1]["terms"] = json!([]);
    report["rpc"][1]["name"] = json!("<b>&\"");
    let texts = texts(&report);
    assert!(texts.iter().any(|text| text.starts_with("<b>&")), "{texts:?}");
}

#[test]
fn a_report_with_nothing_to_draw_is_refused() {
    for (text, expected) in [
        ("", "this is no report"),
        ("[]", "this is no report"),
        ("{\"results\": 7}", "this is no report"),
        ("{}", "nothing to draw"),
        ("{\"matrix\": 7}", "nothing to draw"),
        ("{\"error\": \"no server\"}", "nothing to draw"),
    ] {
        let error = format!("{:#}", draw(text).unwrap_err());
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn reports_are_files_and_documents_too() {
    let folder = tempfile::tempdir().unwrap();
    let args = |report: &str, output: Option<&str>| PlotArgs {
        report: folder.path().join(report),
        output: output.map(|name| folder.path().join(name)),
    };
    std::fs::write(folder.path().join("run.json"), run_report().to_string()).unwrap();
    let mut out = Vec::new();
    run(&args("run.json", None), &mut out).unwrap();
    run(&args("run.json", Some("run.svg")), &mut Vec::new()).unwrap();
    assert_eq!(std::fs::read(folder.path().join("run.svg")).unwrap(), out);
    let missing = format!("{:#}", run(&args("none.json", None), &mut out).unwrap_err());
    assert!(
        missing.contains("cannot read the report") && missing.contains("none.json"),
        "{missing}"
    );
    let written = format!(
        "{:#}",
        run(&args("run.json", Some("none/run.svg")), &mut out).unwrap_err()
    );
    assert!(written.starts_with("writing "), "{written}");
}

/// Writes the documents of the reports above to the folder in `P2PMEM_PLOTS`, to look at them.
#[test]
fn all_documents_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let folder = std::env::var_os("P2PMEM_PLOTS").map_or_else(|| folder.path().to_owned(), PathBuf::from);
    for (name, report) in [
        ("run", run_report()),
        ("matrix", matrix_report()),
        ("transfer", rpc_report()),
    ] {
        let path = folder.join(format!("{name}.svg"));
        std::fs::write(&path, draw(&report.to_string()).unwrap()).unwrap();
        assert!(path.metadata().unwrap().len() > 1000);
    }
}

#[test]
fn cells_without_the_rest_of_a_matrix_are_drawn() {
    // The form of the test bed's transfer.json.
    let entries = matrix_report()["entries"].clone();
    let report = json!({"passed": true, "matrix": entries, "costs": [], "multi_port": null});
    assert_eq!(texts(&report), texts(&matrix_report()));
}

#[test]
fn the_parts_of_a_write_have_different_colors() {
    let terms: Vec<_> = (1..=8)
        .map(|term| json!({"term": format!("part {term}"), "us": 1.0}))
        .collect();
    let path = json!({"name": "cpu to cpu", "terms": terms, "total_us": 9.5});
    let report = json!({"schema": 1, "decomposition": [path]});
    let svg = draw(&report.to_string()).unwrap();
    let colors: std::collections::BTreeSet<_> = super::canvas::COLORS
        .iter()
        .filter(|color| svg.contains(**color))
        .collect();
    assert_eq!(colors.len(), 8, "{svg}");
    // The whole is that of the report, and not the sum of its parts.
    assert!(texts(&report).contains(&"9.5 µs".to_owned()), "{:?}", texts(&report));
}

#[test]
fn a_training_has_a_curve_from_its_first_loss_on() {
    // The form of p2pmem-training's report.
    let report = |losses: &[f64]| json!({"schema": 1, "mode": "synchronous", "ranks": 2, "initial_loss": 2.75, "losses": losses, "rank_reports": []});
    let texts = texts(&report(&[1.5, 0.25]));
    for text in [
        "Loss of synchronous training on 2 ranks",
        "epochs",
        "2.75",
        "1.5",
        "0.25",
    ] {
        assert!(texts.iter().any(|found| found == text), "{text}: {texts:?}");
    }
    assert!(draw(&report(&[]).to_string()).is_err());
}
