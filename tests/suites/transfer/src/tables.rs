// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report as tables for a terminal.

use p2pmem_vm::demo::Table;

use crate::report::{Cell, Report};

/// Returns the different values of a text of cells, in their order.
fn distinct<'a>(cells: &'a [Cell], text: impl Fn(&'a Cell) -> &'a str) -> Vec<&'a str> {
    let mut found = Vec::new();
    for cell in cells {
        if !found.contains(&text(cell)) {
            found.push(text(cell));
        }
    }
    found
}

/// Returns the matrix of a mode: rows are the client's memory, columns the server's.
fn matrix(cells: &[Cell], mode: &str) -> Vec<String> {
    let all: Vec<Cell> = cells.iter().filter(|cell| cell.mode == mode).cloned().collect();
    let columns = distinct(&all, |cell| &cell.to);
    let mut names = vec![mode.to_owned()];
    names.extend(columns.iter().map(|to| (*to).to_owned()));
    let rows = distinct(&all, |cell| &cell.from).into_iter().map(|from| {
        let mut row = vec![from.to_owned()];
        row.extend(columns.iter().map(|to| {
            let cell = all.iter().find(|cell| cell.from == from && cell.to == *to);
            cell.map_or_else(String::new, |cell| {
                format!(
                    "{:.2} / {:.1} / {:.1}",
                    cell.ratio_to_link, cell.host_bytes_per_byte, cell.copied_bytes_per_byte
                )
            })
        }));
        row
    });
    Table::new(1, &names, rows).lines()
}

/// Returns the matrices of all modes.
pub fn matrices(report: &Report) -> Vec<String> {
    let modes = distinct(&report.matrix, |cell| &cell.mode);
    modes
        .into_iter()
        .flat_map(|mode| matrix(&report.matrix, mode))
        .collect()
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
