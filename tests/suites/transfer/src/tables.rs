// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report as tables for a terminal.

use p2pmem_perf::stats::Latency;
use p2pmem_vm::demo::Table;

use crate::report::{Cell, Ports, Report};

/// The client's memory, the server's, and the mode.
type Place<'a> = (&'a str, &'a str, &'a str);

/// Returns the different values of a list, in their order.
fn distinct<'a>(values: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found = Vec::new();
    for value in values {
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

/// Returns a table for each mode: rows are the client's memory, columns the server's.
fn grids(cells: &[(Place<'_>, String)]) -> Vec<String> {
    let mut lines = Vec::new();
    for mode in distinct(cells.iter().map(|((_, _, mode), _)| *mode)) {
        let of_mode = || cells.iter().filter(|((_, _, found), _)| *found == mode);
        let columns = distinct(of_mode().map(|((_, to, _), _)| *to));
        let mut names = vec![mode.to_owned()];
        names.extend(columns.iter().map(|to| (*to).to_owned()));
        let rows = distinct(of_mode().map(|((from, _, _), _)| *from))
            .into_iter()
            .map(|from| {
                let mut row = vec![from.to_owned()];
                row.extend(columns.iter().map(|to| {
                    let mut found = of_mode().filter(|(place, _)| *place == (from, *to, mode));
                    found.next().map_or_else(String::new, |(_, text)| text.clone())
                }));
                row
            });
        lines.extend(Table::new(1, &names, rows).lines());
    }
    lines
}

/// Returns the text of a cell: the ratio to the link (within a node, the rate in MiB/s), bytes at host memory, bytes across a root complex, and
/// bytes that processors copied. `x3` follows if the pair was tried three times.
fn text_of(cell: &Cell) -> String {
    let rate = match cell.ratio_to_link {
        Some(ratio) => format!("{ratio:.2}"),
        None => format!("{:.0}", cell.mib_per_s),
    };
    let copied = match cell.copied_bytes_per_byte {
        Some(copied) => format!("{copied:.1}"),
        None => "-".to_owned(),
    };
    let tries = match cell.tries {
        1 => String::new(),
        tries => format!(" x{tries}"),
    };
    format!(
        "{rate} / {:.1} / {:.1} / {copied}{tries}",
        cell.host_bytes_per_byte, cell.root_complex_bytes_per_byte
    )
}

/// Returns the matrices of all modes.
pub fn matrices(cells: &[Cell]) -> Vec<String> {
    let cells: Vec<_> = cells
        .iter()
        .map(|cell| {
            (
                (cell.from.as_str(), cell.to.as_str(), cell.mode.as_str()),
                text_of(cell),
            )
        })
        .collect();
    grids(&cells)
}

/// Returns the latencies of all modes.
pub fn latencies(report: &Report) -> Vec<String> {
    let text = |latency: &Latency| format!("{:.0} / {:.0} / {:.0}", latency.p50_us, latency.p99_us, latency.p999_us);
    let cells: Vec<_> = report
        .latencies
        .iter()
        .map(|one| {
            (
                (one.from.as_str(), one.to.as_str(), one.mode.as_str()),
                text(&one.latency),
            )
        })
        .collect();
    grids(&cells)
}

/// Returns the table of calls.
pub fn calls(report: &Report) -> Vec<String> {
    let names = [
        "CALL",
        "BYTES",
        "WAITING",
        "MEDIAN us",
        "99 % us",
        "99.9 % us",
        "CLIENT INSTRUCTIONS",
        "SERVER THREAD",
        "SERVER PROCESS",
    ];
    let rows = report.rpc.iter().map(|cost| {
        let call = if cost.batch > 1 {
            format!("{} of {}", cost.name.name(), cost.batch)
        } else {
            cost.name.name().to_owned()
        };
        vec![
            call,
            cost.bytes.to_string(),
            cost.waiting.name().to_owned(),
            format!("{:.1}", cost.p50_us),
            format!("{:.1}", cost.p99_us),
            format!("{:.1}", cost.p999_us),
            format!("{:.0}", cost.cpu_us_client * 1e3),
            cost.cpu_us_server
                .map_or_else(|| "-".to_owned(), |us| format!("{:.0}", us * 1e3)),
            format!("{:.0}", cost.process_us_server * 1e3),
        ]
    });
    Table::new(1, &names, rows).lines()
}

/// Returns the table of a WRITE's parts, with a bar for each.
pub fn decompositions(report: &Report) -> Vec<String> {
    let mut all = Vec::new();
    for one in &report.decomposition {
        let mut names = vec![one.name.clone(), format!("{:.1} us", one.total_us)];
        names.push(format!("{} messages, {:.1} us of the NICs", one.messages, one.nics_us));
        let rows = one.terms.iter().map(|term| {
            let part = term.us / one.total_us.max(f64::MIN_POSITIVE);
            vec![
                term.term.clone(),
                format!("{:.1}", term.us),
                format!(
                    "{:>3.0} % {:<25}",
                    100.0 * part,
                    "#".repeat((25.0 * part).round() as usize)
                ),
            ]
        });
        all.extend(Table::new(1, &names, rows).lines());
    }
    all
}

/// Returns the table of one port and two.
pub fn ports(ports: &Ports) -> Vec<String> {
    let names = ["ROUND", "ONE PORT", "ONE PROCESS", "RATIO", "TWO PROCESSES", "RATIO"];
    let rows = ports.rounds.iter().enumerate().map(|(index, round)| {
        let single = round.single_mib_per_s;
        vec![
            (index + 1).to_string(),
            format!("{single:.1}"),
            format!("{:.1}", round.one_process_mib_per_s),
            format!("{:.2}", round.one_process_mib_per_s / single),
            format!("{:.1}", round.two_processes_mib_per_s),
            format!("{:.2}", round.two_processes_mib_per_s / single),
        ]
    });
    let mut lines = Table::new(1, &names, rows).lines();
    lines.push(format!(
        "Medians of the ratios: {:.2} and {:.2}",
        ports.ratio_one_process, ports.ratio_two_processes
    ));
    lines
}

/// Returns the table of accelerators relative to hosts.
pub fn accelerators(report: &Report) -> Vec<String> {
    let names = [
        "MESSAGE",
        "HOSTS",
        "ACCELERATORS",
        "MEDIAN RATIO",
        "RATIOS",
        "HOST BYTES",
    ];
    let rows = report.accelerators.iter().map(|rate| {
        let ratios: Vec<String> = rate.ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        vec![
            format!("{} KiB", rate.size >> 10),
            format!("{:.0}", rate.host_mib_per_s),
            format!("{:.0}", rate.accelerator_mib_per_s),
            format!("{:.2}", rate.ratio),
            ratios.join(" "),
            format!("{:.1}", rate.host_bytes_per_byte),
        ]
    });
    Table::new(1, &names, rows).lines()
}

/// Bytes for a byte of payload that a character of a bar stands for.
const BYTES_OF_MARK: f64 = 0.25;

/// Returns the table of the paths' costs, with a bar of the bytes that each path moves for a byte of payload.
pub fn formula(report: &Report) -> Vec<String> {
    let names = [
        "PATH, FOR A BYTE",
        "COPIED BY PROGRAM",
        "BY KERNEL",
        "ROOT COMPLEX BY NICS",
        "BY PROCESSORS",
        "TRANSLATIONS/MIB",
        "INSTRUCTIONS",
    ];
    let rows = report.formula.iter().map(|path| {
        let program = path.copied_by_program;
        vec![
            path.name.clone(),
            program.map_or_else(|| "-".to_owned(), |copied| format!("{copied:.2}")),
            format!("{:.2}", path.copied_by_kernel),
            format!("{:.2}", path.root_complex_by_nics),
            format!("{:.2}", path.root_complex_by_processors),
            format!("{:.1}", path.translations_per_mib),
            format!("{:.3}", path.instructions()),
        ]
    });
    let mut all = Table::new(1, &names, rows).lines();
    all.push(format!(
        "Bytes moved for a byte, {BYTES_OF_MARK} each: p copied by the program, k by the kernel, R through a root complex"
    ));
    let width = report.formula.iter().map(|path| path.name.len()).max().unwrap_or(0);
    let part = |mark: &str, bytes: f64| mark.repeat((bytes / BYTES_OF_MARK).round() as usize);
    all.extend(report.formula.iter().map(|path| {
        let program = part("p", path.copied_by_program.unwrap_or(0.0));
        let kernel = part("k", path.copied_by_kernel);
        let root_complex = part("R", path.root_complex);
        format!("{:<width$}  {program}{kernel}{root_complex}", path.name)
    }));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::PathCost;

    #[test]
    fn a_mode_has_a_table_with_a_row_for_each_memory_of_the_client() {
        let cell = |from, to, mode, text: &str| ((from, to, mode), text.to_owned());
        let lines = grids(&[
            cell("cpu", "cmb", "write", "a"),
            cell("fpga", "cpu", "write", "b"),
            cell("cpu", "cpu", "write", "c"),
            cell("cpu", "cmb", "read", "d"),
        ]);
        let words: Vec<Vec<&str>> = lines.iter().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            words,
            [
                vec!["write", "cmb", "cpu"],
                vec!["cpu", "a", "c"],
                vec!["fpga", "b"],
                vec!["read", "cmb"],
                vec!["cpu", "d"]
            ]
        );
    }

    #[test]
    fn a_cell_says_what_was_not_counted_and_how_often_it_was_tried() {
        let mut cell = Cell {
            from: "cpu".into(),
            to: "cpu".into(),
            mode: "tcp".into(),
            size: 4096,
            tries: 3,
            mib_per_s: 800.4,
            ratio_to_link: Some(0.95),
            host_bytes_per_byte: 2.04,
            root_complex_bytes_per_byte: 2.26,
            unknown_bytes_per_byte: 0.0,
            copied_bytes_per_byte: None,
            verified: true,
        };
        assert_eq!(text_of(&cell), "0.95 / 2.0 / 2.3 / - x3");
        (cell.ratio_to_link, cell.copied_bytes_per_byte, cell.tries) = (None, Some(2.0), 1);
        assert_eq!(text_of(&cell), "800 / 2.0 / 2.3 / 2.0");
    }

    #[test]
    fn a_path_has_a_bar_of_its_bytes() {
        let report = Report {
            formula: vec![PathCost {
                name: "sockets".into(),
                mode: "staged".into(),
                copied_by_program: Some(0.5),
                copied_by_kernel: 1.01,
                root_complex: 0.74,
                root_complex_by_nics: 0.5,
                root_complex_by_processors: 0.24,
                unknown: 0.0,
                translations_per_mib: 1.0,
                client_instructions: 1.0,
                server_instructions: None,
            }],
            ..Report::default()
        };
        let lines = formula(&report);
        assert_eq!(
            lines.last().map(|line| line.trim_end()),
            Some("sockets  ppkkkkRRR"),
            "{lines:?}"
        );
    }
}
