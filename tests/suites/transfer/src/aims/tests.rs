// SPDX-License-Identifier: MIT OR Apache-2.0

//! Each aim is missed by a report that has one wrong number.

use p2pmem_perf::stats::Latency;
use p2pmem_perf::waiter::How;

use super::*;
use crate::decomposition::{TERMS, Term};
use crate::report::{MessageLatency, PortsRound, ServerInstructions};

const MEMORIES: [&str; 4] = ["accelerator", "cpu", "cmb", "fpga"];

/// Returns something for all pairs by these modes.
fn all_pairs<T>(modes: &[&str], make: impl Fn(&str, &str, &str) -> T) -> Vec<T> {
    let mut all = Vec::new();
    for mode in modes {
        for from in MEMORIES {
            all.extend(MEMORIES.map(|to| make(from, to, mode)));
        }
    }
    all
}

fn good_cell(from: &str, to: &str, mode: &str) -> Cell {
    let copied = ["tcp", "staged"].contains(&mode);
    let host = if copied { 2.1 } else { ends(from, to, HOST) };
    Cell {
        from: from.into(),
        to: to.into(),
        mode: mode.into(),
        size: 4096,
        tries: 1,
        mib_per_s: 11.5,
        ratio_to_link: Some(1.0),
        host_bytes_per_byte: host,
        root_complex_bytes_per_byte: host,
        unknown_bytes_per_byte: if copied { 0.0 } else { ends(from, to, DRIVE) },
        copied_bytes_per_byte: match mode {
            "tcp" | "ucx" => None,
            "staged" => Some(2.0),
            _ => Some(0.0),
        },
        verified: true,
    }
}

fn good_latency(from: &str, to: &str, mode: &str) -> MessageLatency {
    MessageLatency {
        from: from.into(),
        to: to.into(),
        mode: mode.into(),
        size: 4096,
        latency: Latency {
            p50_us: 5.0,
            p99_us: 6.0,
            p999_us: 7.0,
            max_us: 8.0,
        },
    }
}

fn good_cost(from: &str, to: &str, mode: &str) -> MessageCost {
    MessageCost {
        from: from.into(),
        to: to.into(),
        mode: mode.into(),
        size: 4096,
        client_instructions_per_byte: 1.0,
        server_instructions_per_byte: (!ONE_SIDED.contains(&mode)).then_some(1.0),
    }
}

fn good_calls() -> Vec<CallCost> {
    let mut all = Vec::new();
    for name in [Call::TwoSided, Call::Write, Call::WriteBatch, Call::Read] {
        for waiting in [How::Poll, How::Events, How::Adaptive] {
            for bytes in [8, 4096] {
                all.push(CallCost {
                    name,
                    bytes,
                    waiting,
                    batch: 1,
                    p50_us: 1.0,
                    p99_us: 2.0,
                    p999_us: 3.0,
                    cpu_us_client: 4.0,
                    cpu_us_server: (name == Call::TwoSided).then_some(5.0),
                    process_us_server: 6.0,
                });
            }
        }
    }
    all
}

fn good_decomposition(memory: &str) -> Decomposition {
    let term = |term: &str, us| Term { term: term.into(), us };
    let mut terms: Vec<Term> = TERMS.iter().map(|name| term(name, 10.0)).collect();
    terms.push(term(RESIDUAL, 30.0));
    Decomposition {
        name: format!("{memory} to {memory}"),
        messages: 300,
        terms,
        nics_us: 70.0,
        total_us: 100.0,
    }
}

fn good_ports() -> Ports {
    let round = PortsRound {
        single_mib_per_s: 10.0,
        one_process_mib_per_s: 20.0,
        two_processes_mib_per_s: 19.0,
    };
    Ports::new(vec![round; ROUNDS])
}

fn good_path(mode: &str, copied: Option<f64>, kernel: f64, nics: f64, processors: f64, instructions: f64) -> PathCost {
    PathCost {
        name: mode.into(),
        mode: mode.into(),
        copied_by_program: copied,
        copied_by_kernel: kernel,
        root_complex: nics + processors,
        root_complex_by_nics: nics,
        root_complex_by_processors: processors,
        unknown: 0.0,
        translations_per_mib: 16.0,
        client_instructions: instructions,
        server_instructions: (mode != "write").then_some(1.0),
    }
}

fn good() -> Report {
    let accelerators = ACCELERATOR_SIZES.map(|size| AcceleratorRate {
        size,
        host_mib_per_s: 1000.0,
        accelerator_mib_per_s: 900.0,
        ratios: vec![0.9; ROUNDS],
        ratio: 0.9,
        host_bytes_per_byte: 0.0,
    });
    let within = |from: &str, to: &str, mode: &str| Cell {
        ratio_to_link: None,
        ..good_cell(from, to, mode)
    };
    Report {
        link_mib_per_s: 11.6,
        link_topology_mib_per_s: 12.0,
        matrix: all_pairs(&MODES, good_cell),
        within_node: all_pairs(&ONE_SIDED, within),
        latencies: all_pairs(&ONE_SIDED, good_latency),
        costs: all_pairs(&BUT_UCX, good_cost),
        multi_port: Some(good_ports()),
        rpc: good_calls(),
        decomposition: SPLIT.map(good_decomposition).into(),
        accelerators: accelerators.into(),
        server_instructions: Some(ServerInstructions {
            one_sided: 20.0,
            two_sided: 20_000.0,
        }),
        formula: vec![
            good_path("tcp", None, 2.2, 2.1, 2.0, 3.0),
            good_path("staged", Some(2.0), 0.01, 2.0, 2.0, 2.0),
            good_path("write", Some(0.0), 0.01, 0.0, 0.0, 0.5),
        ],
        ..Report::default()
    }
}

/// Returns what a report misses after a change.
#[track_caller]
fn misses(part: &str, change: impl FnOnce(&mut Report)) {
    let mut report = good();
    change(&mut report);
    let found = missed(&report).join("; ");
    assert!(found.contains(part), "{part}: {found:?}");
}

/// Returns the cell of a pair.
fn cell_of<'a>(cells: &'a mut [Cell], from: &str, to: &str, mode: &str) -> &'a mut Cell {
    let mut cells = cells.iter_mut();
    cells
        .find(|cell| (cell.from.as_str(), cell.to.as_str(), cell.mode.as_str()) == (from, to, mode))
        .unwrap()
}

#[test]
fn a_good_report_misses_nothing() {
    assert_eq!(missed(&good()), Vec::<String>::new());
    assert!(!missed(&Report::default()).is_empty());
}

#[test]
fn the_links_rate_is_that_of_the_topology() {
    let what = "the link's rate, relative to the topology's";
    misses(what, |report| report.link_mib_per_s = 10.0);
    misses(what, |report| report.link_mib_per_s = 24.0);
    misses(what, |report| report.link_topology_mib_per_s = 0.0);
    misses(&format!("{what}: NaN"), |report| report.link_mib_per_s = f64::NAN);
}

#[test]
fn each_number_of_a_cell_can_miss() {
    let cell = |mode: &'static str, change: fn(&mut Cell), part: &str| {
        misses(&format!("accelerator to cmb by {mode}: {part}"), |report| {
            change(cell_of(&mut report.matrix, "accelerator", "cmb", mode));
        });
    };
    cell(
        "write",
        |cell| cell.ratio_to_link = Some(0.8),
        "rate relative to the link's: 0.8",
    );
    cell(
        "write",
        |cell| cell.ratio_to_link = Some(1.2),
        "rate relative to the link's: 1.2",
    );
    cell("write", |cell| cell.ratio_to_link = None, "no ratio");
    cell(
        "tcp",
        |cell| cell.ratio_to_link = Some(1.2),
        "rate relative to the link's: 1.2",
    );
    cell("tcp", |cell| cell.mib_per_s = 0.0, "MiB/s: 0.0");
    cell("send", |cell| cell.verified = false, "not every byte arrived");
    let host = "host bytes for a byte";
    cell("write", |cell| cell.host_bytes_per_byte = 1.0 / 262_144.0, host);
    cell("write", |cell| cell.host_bytes_per_byte = f64::NAN, host);
    cell("ucx", |cell| cell.host_bytes_per_byte = 0.06, host);
    // One more copy through host memory on one node, or one less.
    cell("staged", |cell| cell.host_bytes_per_byte = 3.0, host);
    cell("staged", |cell| cell.host_bytes_per_byte = 1.0, host);
    cell("tcp", |cell| cell.host_bytes_per_byte = 3.1, host);
    let root_complex = "bytes across a root complex for a byte";
    cell("read", |cell| cell.root_complex_bytes_per_byte = 1.0, root_complex);
    cell("tcp", |cell| cell.root_complex_bytes_per_byte = 0.0, root_complex);
    let drives = "bytes at drives for a byte";
    cell("write", |cell| cell.unknown_bytes_per_byte = 0.0, drives);
    cell("staged", |cell| cell.unknown_bytes_per_byte = 1.0, drives);
    cell("tcp", |cell| cell.unknown_bytes_per_byte = 0.1, drives);
    cell(
        "write",
        |cell| cell.copied_bytes_per_byte = Some(1.0),
        "copied bytes for a byte",
    );
    cell(
        "staged",
        |cell| cell.copied_bytes_per_byte = Some(4.0),
        "copied bytes for a byte",
    );
    misses("fpga to cpu by read within a node: host bytes", |report| {
        cell_of(&mut report.within_node, "fpga", "cpu", "read").host_bytes_per_byte = 2.0;
    });
}

#[test]
fn every_pair_by_every_mode_is_there() {
    misses("the matrix: 15 pairs by ucx, not 16", |report| {
        drop(report.matrix.pop())
    });
    misses("within a node: 0 pairs by write, not 16", |report| {
        report.within_node.clear()
    });
    misses("the latencies: 0 pairs by read, not 16", |report| {
        report.latencies.truncate(16)
    });
    misses("the instructions: 15 pairs by staged, not 16", |report| {
        drop(report.costs.pop())
    });
    misses("23 calls are compared, not 24", |report| report.rpc.truncate(23));
    misses(
        "the parts of a WRITE from accelerator to accelerator are missing",
        |report| {
            drop(report.decomposition.pop());
        },
    );
    misses("1048576 bytes: 0 rounds", |report| drop(report.accelerators.pop()));
    misses("no path by staged", |report| drop(report.formula.remove(1)));
    // The same pair twice is one pair.
    misses("the matrix: 15 pairs by ucx", |report| {
        let last = report.matrix.len() - 1;
        report.matrix[last] = report.matrix[last - 1].clone();
    });
}

#[test]
fn quantiles_are_times_in_order() {
    let latency = |change: fn(&mut Latency), part: &str| {
        misses(
            &format!("latency from accelerator to accelerator by write: {part}"),
            |report| {
                change(&mut report.latencies[0].latency);
            },
        );
    };
    latency(|latency| latency.p50_us = 0.0, "a quantile: 0.0");
    latency(|latency| latency.p99_us = f64::INFINITY, "a quantile: inf");
    latency(|latency| latency.p50_us = 6.5, "quantiles are not in order");
    latency(|latency| latency.p99_us = 7.5, "quantiles are not in order");
    latency(|latency| latency.max_us = 6.5, "quantiles are not in order");
    misses("quantiles are not in order", |report| report.rpc[0].p50_us = 2.5);
}

#[test]
fn instructions_for_a_byte_are_those_of_the_mode() {
    let name = "instructions from accelerator to cpu by write";
    let write = |value: f64| move |report: &mut Report| report.costs[1].client_instructions_per_byte = value;
    misses(&format!("{name}: 0.0"), write(0.0));
    misses(&format!("{name}: NaN"), write(f64::NAN));
    misses(&format!("{name}, both sides: 2.1"), write(2.1));
    misses(
        "instructions from fpga to fpga by staged, relative to the median pair: 2.05",
        |report| {
            report.costs.last_mut().unwrap().client_instructions_per_byte = 3.1;
        },
    );
    misses("by tcp: none of the server", |report| {
        let tcp = report.costs.iter_mut().find(|cost| cost.mode == "tcp").unwrap();
        tcp.server_instructions_per_byte = None;
    });
    misses("by staged, server: 0.0", |report| {
        report.costs.last_mut().unwrap().server_instructions_per_byte = Some(0.0);
    });
}

#[test]
fn each_number_of_a_call_can_miss() {
    misses("two-sided of 8 bytes, poll: client's time: 0.0", |report| {
        report.rpc[0].cpu_us_client = 0.0
    });
    misses("two-sided of 8 bytes, poll: no time", |report| {
        report.rpc[0].cpu_us_server = None
    });
    misses("two-sided of 8 bytes, poll: time of the server's thread: 0", |report| {
        report.rpc[0].cpu_us_server = Some(0.0)
    });
    // The process has less time than its thread.
    misses("time of the server's process: 4.0", |report| {
        report.rpc[0].process_us_server = 4.0
    });
    misses("time of the server's process: NaN", |report| {
        report.rpc[7].process_us_server = f64::NAN
    });
    let instructions = |one_sided, two_sided| {
        move |report: &mut Report| {
            report.server_instructions = Some(ServerInstructions { one_sided, two_sided });
        }
    };
    let relative = "relative to a two-sided one";
    misses(relative, instructions(201.0, 20_000.0));
    misses(relative, instructions(f64::NAN, 20_000.0));
    misses("for a two-sided call: 0.0", instructions(0.0, 0.0));
    misses("not measured", |report| report.server_instructions = None);
}

#[test]
fn parts_of_a_write_are_times_within_its_latency() {
    let change = |change: fn(&mut Decomposition)| move |report: &mut Report| change(&mut report.decomposition[0]);
    misses(
        "a WRITE from cpu to cpu: wire: 0.0",
        change(|one| one.terms[3].us = 0.0),
    );
    misses("wire: inf", change(|one| one.terms[3].us = f64::INFINITY));
    misses("residual: post and poll: -1.0", change(|one| one.terms[7].us = -1.0));
    misses("the NICs' part of the latency: 1.01", change(|one| one.nics_us = 101.0));
    misses("the NICs' part of the latency: 0.11", change(|one| one.nics_us = 11.0));
    let mut report = good();
    report.decomposition[0].terms[7].us = 0.0;
    assert!(missed(&report).is_empty());
}

#[test]
fn the_worse_size_of_messages_counts_for_accelerators() {
    let name = |size: u64| format!("accelerator to accelerator, messages of {size} bytes");
    for (index, size) in ACCELERATOR_SIZES.into_iter().enumerate() {
        let rate = format!("{}: rate relative to host to host: 0.5", name(size));
        // One more copy of each byte.
        misses(&rate, |report| report.accelerators[index].ratio = 0.5);
        let bytes = format!("{}: host bytes for a byte: 2.0", name(size));
        misses(&bytes, |report| report.accelerators[index].host_bytes_per_byte = 2.0);
    }
    misses("NaN", |report| report.accelerators[1].ratio = f64::NAN);
    misses("65536 bytes: 2 rounds, not 3", |report| {
        report.accelerators[0].ratios.truncate(2)
    });
}

#[test]
fn both_ratios_of_two_ports_can_miss() {
    let ratio = |change: fn(&mut Ports)| move |report: &mut Report| change(report.multi_port.as_mut().unwrap());
    misses(
        "two ports of one process, relative to one: 1.7",
        ratio(|ports| ports.ratio_one_process = 1.7),
    );
    misses(
        "two ports of two processes, relative to one: 2.3",
        ratio(|ports| ports.ratio_two_processes = 2.3),
    );
    misses("two ports: 2 rounds, not 3", ratio(|ports| ports.rounds.truncate(2)));
    misses("two ports are not measured", |report| report.multi_port = None);
}

#[test]
fn each_number_of_a_path_can_miss() {
    let path = |index: usize, change: fn(&mut PathCost), part: &str| {
        let name = ["tcp", "staged", "write"][index];
        misses(&format!("{name}: {part}"), |report| change(&mut report.formula[index]));
    };
    path(0, |path| path.copied_by_kernel = 0.0, "copied by the kernel");
    path(
        0,
        |path| path.root_complex_by_processors = 1.0,
        "bytes of processors at accelerators",
    );
    path(
        0,
        |path| path.root_complex_by_nics = 0.0,
        "bytes of NICs across a root complex",
    );
    path(1, |path| path.copied_by_program = Some(1.0), "copied by the program");
    path(1, |path| path.copied_by_kernel = 1.0, "copied by the kernel");
    path(
        1,
        |path| path.root_complex_by_nics = 3.0,
        "bytes of NICs across a root complex",
    );
    path(1, |path| path.server_instructions = None, "server's instructions");
    path(2, |path| path.copied_by_program = None, "copied by the program");
    path(2, |path| path.copied_by_program = Some(1.0), "copied by the program");
    path(2, |path| path.copied_by_kernel = 1.0, "copied by the kernel");
    path(
        2,
        |path| path.root_complex_by_nics = 0.001,
        "bytes of NICs across a root complex",
    );
    path(2, |path| path.unknown = 1.0, "bytes at unknown places");
    path(2, |path| path.translations_per_mib = 0.0, "translations for a MiB");
    path(2, |path| path.client_instructions = f64::NAN, "client's instructions");
    // The direct path takes more instructions than the one through host memory.
    misses("staged: instructions of the direct path relative to these", |report| {
        report.formula[2].client_instructions = 3.5;
    });
}
