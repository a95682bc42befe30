// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the report on the second act.

use serde_json::json;

use super::*;

const MIB: u64 = 1 << 20;

fn nic(host: u64, peer: u64, sent: u64) -> Value {
    json!({
        "kind": "nic",
        "counters": {
            "payload": {
                "host_read": host, "host_written": 1, "peer_read": peer, "peer_written": 2, "message_read": 0,
                "message_written": 0,
            },
            "transport": { "bytes_sent": sent },
            "bus": { "host": { "read": 1000 * host, "written": 0 } },
        },
    })
}

fn snapshot(host: u64, peer: u64, sent: u64, accel: u64) -> Value {
    json!({
        "a": {
            "nic0": nic(host, peer, sent),
            "accel0": { "kind": "accel", "counters": { "host_read": accel, "host_written": 0 } },
            "nvme0": { "kind": "nvme" },
            "bridges": { "kind": "bridges", "crossed": {}, "root_complex": 2 * host, "unknown": peer },
        },
        "b": { "nic0": nic(0, 10 * peer, 0) },
    })
}

#[test]
fn only_payload_between_snapshots_counts() {
    let moved = Moved::between(&snapshot(5, 7, 100, 1), &snapshot(25, 8, 350, 4)).unwrap();
    let expected = Moved {
        nics_host: 20,
        nics_peers: 11,
        nics_elsewhere: 0,
        accels_host: 3,
        wire: 250,
        root_complex: 40,
        unknown_path: 1,
    };
    assert_eq!(moved, expected);
    assert_eq!(moved.host(), 23);
}

#[test]
fn impossible_snapshots_are_refused() {
    let good = snapshot(5, 5, 5, 5);
    for bad in [
        json!(null),
        json!({}),
        json!({ "a": 1 }),
        json!({ "a": { "nic0": { "kind": "nic", "gone": true } } }),
        json!({ "a": { "nvme0": { "kind": "nvme" } } }),
        // A counter decreased.
        snapshot(4, 5, 5, 5),
        snapshot(5, 5, 4, 5),
    ] {
        assert!(Moved::between(&good, &bad).is_err(), "{bad}");
    }
}

fn report(staged: bool) -> Value {
    let copied = if staged { 100 * 2 * MIB } else { 0 };
    json!({
        "test": { "staged": staged },
        "client": { "registration": "reg-mr" },
        "server": { "registration": "dma-buf" },
        "results": [{
            "bytes": 2 * MIB, "iterations": 100, "seconds": 0.5, "gib_per_s": 0.39, "verified": true,
            "nics": [{ "copied_client": copied, "copied_server": copied, "checked": { "crc32c": 0xabc } }],
        }],
    })
}

fn row(name: &str, host: f64) -> Row {
    let staged = name.contains("host");
    let payload = 200 * MIB;
    let moved = Moved {
        nics_host: (host * payload as f64) as u64,
        nics_peers: 1,
        wire: payload + 1000,
        root_complex: (host * payload as f64) as u64,
        ..Moved::default()
    };
    let mut row = Row::new(name, &report(staged), moved).unwrap();
    for (side, word) in [name.split('-').next(), name.split('-').next_back()].iter().enumerate() {
        row.registration[side] = if *word == Some("ACC") { "dma-buf" } else { "reg-mr" }.into();
    }
    row
}

fn results() -> Results {
    let stock = StockImage {
        packages: vec![],
        build_id: "00".into(),
        objections: vec![],
    };
    Results {
        stock: ["a", "b"].map(|node| (node.to_owned(), stock.clone())).into(),
        nic_drivers: ["a", "b"].map(|node| (node.to_owned(), "mlx5_core".to_owned())).into(),
        max_registered: Some(200 * MIB),
        refusal: Some("BAR 2 has 256 MiB".into()),
        refusal_names: vec!["BAR 2".into(), "256 MiB".into()],
        table: ROWS.map(|(name, host)| row(name, host)).into(),
        revoked: Some(Revoked {
            unbind_ms: 12.0,
            moved_before: 1,
            moved_after: 0,
        }),
        cut_off: Some("Failed status 10: wr_id 0 syndrom 0x88".into()),
        stale: Some(Stale {
            attempts: STALE_ATTEMPTS,
            writes: 0,
            unchanged: true,
            refused: STALE_ATTEMPTS,
        }),
        leaked_buffers: Some(0),
        ended_in_order: true,
        ..Results::default()
    }
}

#[test]
fn row_has_measured_values() {
    let row = row("CPU-ACC", 1.0);
    assert_eq!((row.payload_bytes, row.host_bytes), (200 * MIB, 200 * MIB));
    assert_eq!(
        (row.checksum.as_str(), row.verified, row.staged),
        ("00000abc", true, false)
    );
    assert!(Row::new("x", &json!({}), Moved::default()).is_err());
}

#[test]
fn correct_results_pass() {
    let results = results();
    assert_eq!(check(&results), Vec::<String>::new());
    let report = Report::new(&results);
    assert!(report.stock_kernel && report.verified);
    assert_eq!(report.nic_driver.as_deref(), Some("mlx5_core"));
    assert_eq!(report.registration.as_deref(), Some("dma-buf"));
    assert_eq!(report.host_bytes_acc_acc, Some(0));
    assert_eq!((report.stale_attempts, report.stale_writes), (Some(20), Some(0)));
    assert_eq!((report.max_registered_mib, report.revoke_ms), (Some(200), Some(12.0)));
}

#[test]
fn missing_results_fail() {
    let failures = check(&Results::default());
    assert!(failures.len() >= 9, "{failures:?}");
}

#[test]
fn each_wrong_result_is_reported() {
    type Change = fn(&mut Results);
    let change: [(&str, Change); 23] = [
        ("not stock", |f| {
            f.stock.get_mut("b").unwrap().objections.push("patched".into());
        }),
        ("drivers", |f| {
            f.nic_drivers.insert("b".into(), "other".into());
        }),
        ("by dma-buf", |f| f.table[3].registration[0] = "peer memory".into()),
        ("rows", |f| {
            f.table.pop();
        }),
        ("not every byte", |f| f.table[2].verified = false),
        ("ACC-ACC: devices touched", |f| {
            f.table[3].host_bytes_per_payload_byte = 1e-9
        }),
        ("CPU-CPU: devices touched", |f| {
            f.table[0].host_bytes_per_payload_byte = 1.99
        }),
        ("unknown addresses", |f| f.table[1].moved.nics_elsewhere = 1),
        ("ACC-ACC: 7 bytes crossed", |f| f.table[3].moved.root_complex = 7),
        ("8 took an unknown path", |f| f.table[3].moved.unknown_path = 8),
        ("wire", |f| f.table[1].moved.wire = 5),
        ("copied", |f| f.table[4].copied_bytes_per_payload_byte = 0.0),
        ("MiB of an accelerator", |f| f.max_registered = Some(115 * MIB)),
        ("does not name BAR 2", |f| f.refusal = Some("no memory, 256 MiB".into())),
        ("was not refused", |f| f.refusal = None),
        ("took 1200 ms", |f| f.revoked.as_mut().unwrap().unbind_ms = 1200.0),
        ("in flight", |f| f.revoked.as_mut().unwrap().moved_before = 0),
        ("after the unbinding", |f| f.revoked.as_mut().unwrap().moved_after = 1),
        ("remote access error", |f| f.cut_off = Some("done".into())),
        ("1 of 20 writes", |f| f.stale.as_mut().unwrap().writes = 1),
        ("is changed", |f| f.stale.as_mut().unwrap().unchanged = false),
        ("leaked", |f| f.leaked_buffers = Some(1)),
        ("bad lines", |f| f.findings.push("WARNING".into())),
    ];
    for (word, change) in change {
        let mut results = results();
        change(&mut results);
        let failures = check(&results);
        assert!(
            failures.iter().any(|failure| failure.contains(word)),
            "{word}: {failures:?}"
        );
    }
}

#[test]
fn remote_access_errors_are_recognised() {
    assert!(is_remote_access_error(
        "message 3 failed: remote access error (status 10"
    ));
    assert!(is_remote_access_error(" Failed status 10: wr_id 0 syndrom 0x88"));
    assert!(!is_remote_access_error(" Failed status 12: wr_id 0 syndrom 0x81"));
}
