// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report as tables for a terminal.

use p2pmem_perf::stats::Latency;
use p2pmem_vm::demo::Table;

use crate::report::{Cell, Report};

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

/// Returns the matrices of all modes.
pub fn matrices(cells: &[Cell]) -> Vec<String> {
    let text = |cell: &Cell| {
        format!(
            "{:.2} / {:.1} / {:.1}",
            cell.ratio_to_link, cell.host_bytes_per_byte, cell.copied_bytes_per_byte
        )
    };
    let cells: Vec<_> = cells
        .iter()
        .map(|cell| ((cell.from.as_str(), cell.to.as_str(), cell.mode.as_str()), text(cell)))
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
            format!("{:.0}", cost.cpu_us_server * 1e3),
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
        names.push(format!("{} messages", one.messages));
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

/// Bytes for a byte of payload that a character of a bar stands for.
const BYTES_OF_MARK: f64 = 0.25;

/// Returns the table of the paths' costs, with a bar of the bytes that each path moves for a byte of payload.
pub fn formula(report: &Report) -> Vec<String> {
    let names = [
        "PATH, FOR A BYTE",
        "COPIED BY PROGRAM",
        "BY KERNEL",
        "ROOT COMPLEX",
        "TRANSLATIONS/MIB",
        "INSTRUCTIONS",
    ];
    let rows = report.formula.iter().map(|path| {
        vec![
            path.name.clone(),
            format!("{:.2}", path.copied_by_program),
            format!("{:.2}", path.copied_by_kernel),
            format!("{:.2}", path.root_complex),
            format!("{:.1}", path.translations_per_mib),
            format!("{:.3}", path.instructions),
        ]
    });
    let mut all = Table::new(1, &names, rows).lines();
    all.push(format!(
        "Bytes moved for a byte, {BYTES_OF_MARK} each: p copied by the program, k by the kernel, R through a root complex"
    ));
    let width = report.formula.iter().map(|path| path.name.len()).max().unwrap_or(0);
    let part = |mark: &str, bytes: f64| mark.repeat((bytes / BYTES_OF_MARK).round() as usize);
    all.extend(report.formula.iter().map(|path| {
        let program = part("p", path.copied_by_program);
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
    fn a_path_has_a_bar_of_its_bytes() {
        let report = Report {
            formula: vec![PathCost {
                name: "sockets".into(),
                bytes: 1,
                copied_by_program: 0.5,
                copied_by_kernel: 1.01,
                root_complex: 0.74,
                translations_per_mib: 1.0,
                instructions: 1.0,
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
