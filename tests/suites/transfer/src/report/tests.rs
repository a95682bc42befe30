// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the report's numbers.

use p2pmem_perf::pattern::Comparison;
use p2pmem_perf::report::NicResult;
use p2pmem_perf::stats::Speed;
use serde_json::json;

use super::*;

const MIB: u64 = 1 << 20;

/// Returns the result of four messages of 1 MiB, at 11 MiB/s.
fn result(copied: u64, verified: bool) -> SizeResult {
    let speed = Speed {
        bytes: MIB,
        iterations: 4,
        seconds: 4.0 / 11.0,
        peak_mib_per_s: None,
        average_mib_per_s: 11.0,
        rate_mpps: 1.0,
    };
    let checked = verified.then_some(Comparison {
        bytes: MIB,
        crc32c: 7,
        expected_crc32c: 7,
        wrong: None,
    });
    let nic = NicResult {
        nic: "mlx5_0".into(),
        speed,
        latency: None,
        cpu_us_client: 1000.0,
        cpu_us_server: None,
        process_us_server: 50.0,
        copied_client: copied,
        copied_server: copied,
        checked,
    };
    SizeResult::new(speed, None, vec![nic])
}

const NICS: NicBytes = NicBytes {
    connected: 4 * MIB,
    datagrams: 8 * MIB,
    connected_root_complex: 2 * MIB,
    datagrams_root_complex: 4 * MIB,
    unknown: MIB,
};

fn cell(mode: &str) -> Cell {
    Cell::new(["fpga", "cmb"], mode, &result(2 * MIB, true), &NICS, Some(10.0)).unwrap()
}

#[test]
fn bytes_of_a_pair_are_those_that_nics_counted_meanwhile() {
    let found = cell("write");
    assert_eq!(
        (found.from.as_str(), found.to.as_str(), found.tries),
        ("fpga", "cmb", 1)
    );
    assert_eq!((found.mib_per_s, found.ratio_to_link), (11.0, Some(1.1)));
    assert_eq!(
        (found.host_bytes_per_byte, found.root_complex_bytes_per_byte),
        (1.0, 0.5)
    );
    assert_eq!(found.unknown_bytes_per_byte, 0.25);
    // The kernel sends datagrams while RDMA is measured, too.
    for mode in ["tcp", "staged", "ucx"] {
        let found = cell(mode);
        let bytes = (found.host_bytes_per_byte, found.root_complex_bytes_per_byte);
        assert_eq!(bytes, (3.0, 1.5), "{mode}");
    }
}

#[test]
fn copies_that_nobody_counts_are_not_a_number() {
    let copied = |mode| cell(mode).copied_bytes_per_byte;
    assert_eq!((copied("staged"), copied("write")), (Some(1.0), Some(1.0)));
    assert_eq!((copied("tcp"), copied("ucx")), (None, None));
}

#[test]
fn a_pair_is_verified_if_its_bytes_were_compared() {
    assert!(cell("write").verified);
    let pair = ["cpu", "cpu"];
    let without = Cell::new(pair, "write", &result(0, false), &NICS, None).unwrap();
    assert_eq!((without.verified, without.ratio_to_link), (false, None));
    let mut nothing = result(0, true);
    nothing.nics.clear();
    let error = Cell::new(pair, "write", &nothing, &NICS, None).unwrap_err().to_string();
    assert!(error.contains("no byte moved"), "{error}");
}

#[test]
fn the_median_of_the_tries_counts_with_the_most_bytes() {
    let of = |rate: f64, host: f64, verified: bool| Cell {
        mib_per_s: rate,
        ratio_to_link: Some(rate / 10.0),
        host_bytes_per_byte: host,
        verified,
        ..cell("write")
    };
    // The nearest to the link's rate is neither the first nor the median.
    let found = Cell::of_tries(vec![of(7.0, 0.0, true), of(10.0, 0.0, true), of(8.0, 1.0, true)]).unwrap();
    assert_eq!((found.tries, found.mib_per_s, found.ratio_to_link), (3, 8.0, Some(0.8)));
    assert_eq!((found.host_bytes_per_byte, found.verified), (1.0, true));
    let found = Cell::of_tries(vec![of(8.0, 2.0, false), of(7.0, 0.0, true), of(9.0, 0.0, true)]).unwrap();
    assert_eq!((found.host_bytes_per_byte, found.verified), (2.0, false));
    assert!(Cell::of_tries(Vec::new()).is_err());
}

fn matrix(pairs: &[(&str, &str, &str)]) -> Matrix {
    let entries: Vec<_> = pairs
        .iter()
        .map(|(from, to, mode)| {
            let mut entry = json!({
                "from": from, "to": to, "mode": mode, "size": MIB, "mib_per_s": 11.0, "ratio_to_link": 1.0,
                "latency": {"p50_us": 5.0, "p99_us": 6.0, "p999_us": 7.0, "max_us": 8.0},
                "cpu_us_client": 1048.576, "copied_bytes": MIB, "moved_bytes": 4 * MIB, "verified": true
            });
            if *mode != "write" {
                entry["cpu_us_server"] = 2097.152.into();
            }
            entry
        })
        .collect();
    serde_json::from_value(json!({
        "memory": ["cpu"], "peer_memory": ["cpu"], "modes": ["write"], "nics": 1, "link": [], "entries": entries
    }))
    .unwrap()
}

#[test]
fn a_microsecond_of_the_processor_is_a_thousand_instructions() {
    let found = costs(&matrix(&[("cpu", "cpu", "write"), ("cpu", "cpu", "send")])).unwrap();
    let both = |cost: &MessageCost| (cost.client_instructions_per_byte, cost.server_instructions_per_byte);
    // No thread of the server takes part in a WRITE.
    assert_eq!((both(&found[0]), both(&found[1])), ((1.0, None), (1.0, Some(2.0))));
    assert_eq!(
        (found[0].instructions_per_byte(), found[1].instructions_per_byte()),
        (1.0, 3.0)
    );
}

#[test]
fn latencies_are_those_of_every_entry() {
    let found = message_latencies(&matrix(&[("cpu", "cmb", "read"), ("cpu", "cmb", "send")])).unwrap();
    let names = (found.len(), found[0].to.as_str(), found[1].mode.as_str());
    assert_eq!(names, (2, "cmb", "send"));
    assert_eq!((found[0].latency.p50_us, found[0].latency.p999_us), (5.0, 7.0));
    let mut without = matrix(&[("cpu", "cpu", "write")]);
    without.entries[0].measured.as_mut().unwrap().latency = None;
    let error = message_latencies(&without).unwrap_err().to_string();
    assert!(error.contains("no latency"), "{error}");
}

#[test]
fn a_pair_without_numbers_is_an_error() {
    let mut measured = matrix(&[("cpu", "cpu", "write")]);
    measured.entries[0].measured = None;
    measured.entries[0].error = Some("no provider".into());
    for error in [message_latencies(&measured).unwrap_err(), costs(&measured).unwrap_err()] {
        assert!(error.to_string().contains("no provider"), "{error}");
    }
}

#[test]
fn a_one_sided_call_has_no_time_of_the_servers_thread() {
    let call = |name, server| {
        CallCost::from(&Cost {
            name,
            bytes: 8,
            waiting: How::Poll,
            batch: 1,
            calls: 100,
            calls_per_s: 1.0,
            p50_us: 1.0,
            p99_us: 2.0,
            p999_us: 3.0,
            cpu_us_client: 4.0,
            cpu_us_server: server,
            process_us_server: 6.0,
            copied_server: 0.0,
        })
    };
    let json = |cost: CallCost| serde_json::to_value(cost).unwrap();
    assert_eq!(json(call(Call::TwoSided, Some(5.0)))["cpu_us_server"], 5.0);
    assert_eq!(json(call(Call::Write, None)).get("cpu_us_server"), None);
}

#[test]
fn the_ratios_of_ports_are_those_of_their_rounds() {
    let round = |single, one_process, two_processes| PortsRound {
        single_mib_per_s: single,
        one_process_mib_per_s: one_process,
        two_processes_mib_per_s: two_processes,
    };
    // The medians of the rates are from different rounds: their ratio would be 2.
    let found = Ports::new(vec![
        round(10.0, 18.0, 20.0),
        round(8.0, 20.0, 20.0),
        round(12.0, 24.0, 18.0),
    ]);
    assert_eq!((found.single_mib_per_s, found.one_process_mib_per_s), (10.0, 20.0));
    assert_eq!((found.ratio_one_process, found.ratio_two_processes), (2.0, 2.0));
    let found = Ports::new(vec![
        round(10.0, 17.0, 20.0),
        round(8.0, 13.6, 16.0),
        round(12.0, 24.0, 18.0),
    ]);
    assert_eq!((found.one_process_mib_per_s, found.ratio_one_process), (17.0, 1.7));
}

#[test]
fn accelerators_have_a_ratio_for_each_round() {
    let round = |host, accelerator, host_bytes| AcceleratorRound {
        host_mib_per_s: host,
        accelerator_mib_per_s: accelerator,
        bytes: 100,
        host_bytes,
    };
    let found = AcceleratorRate::new(
        4096,
        &[round(100.0, 150.0, 0), round(200.0, 100.0, 75), round(400.0, 400.0, 0)],
    );
    assert_eq!((found.ratios, found.ratio), (vec![1.5, 0.5, 1.0], 1.0));
    assert_eq!((found.host_mib_per_s, found.accelerator_mib_per_s), (200.0, 150.0));
    assert_eq!(found.host_bytes_per_byte, 0.25);
    assert!(AcceleratorRate::new(4096, &[]).ratio.is_nan());
}

#[test]
fn the_cost_of_a_path_is_what_was_counted() {
    let counts = PathCounts {
        nics: NICS,
        translations: 20,
        by_kernel: 9 * MIB,
    };
    let found = PathCost::new("sockets", "tcp", &result(4 * MIB, true), &counts).unwrap();
    assert_eq!((found.copied_by_program, found.copied_by_kernel), (None, 2.25));
    assert_eq!(
        (found.root_complex_by_nics, found.root_complex_by_processors),
        (1.5, 2.0)
    );
    assert_eq!(
        (found.root_complex, found.unknown, found.translations_per_mib),
        (3.5, 0.25, 5.0)
    );
    assert_eq!(
        (found.client_instructions, found.server_instructions),
        (1e6 / MIB as f64, None)
    );
    let found = PathCost::new("direct", "write", &result(0, true), &counts).unwrap();
    assert_eq!((found.copied_by_program, found.root_complex), (Some(0.0), 0.5));
    let error = PathCost::new("direct", "write", &result(0, false), &counts).unwrap_err();
    assert!(error.to_string().contains("not every byte arrived"), "{error}");
}
