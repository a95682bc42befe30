// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report as an HTML page with bar charts. The page has no scripts and needs no other files.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::report::{Report, Row};
use crate::two_nodes::Mode;

/// Colors adapt to the reader's choice of a light or dark page.
const STYLE: &str = "
:root { color-scheme: light dark; --bar: #3b7dd8; --good: #2a9d5c; --bad: #d1495b; --line: #8888 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } .wide { overflow-x: auto }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left }
.bar { display: grid; grid-template-columns: minmax(8rem, 16rem) 1fr 8rem; gap: .75rem; align-items: center }
.bar div { height: 1rem; border-radius: .2rem; min-width: 1px; background: var(--bar) } .bar .device { background: var(--good) }
.passed { color: var(--good) } .failed { color: var(--bad) }
";

/// Bars whose lengths are relative to the largest value.
fn chart(rows: &[&Row], value: impl Fn(&Row) -> f64, text: impl Fn(f64) -> String) -> Markup {
    let largest = rows.iter().map(|row| value(row)).fold(f64::MIN_POSITIVE, f64::max);
    html! {
        @for row in rows {
            div.bar {
                span { (row.mode_name()) }
                div class=[(row.mode == Mode::Device).then_some("device")]
                    style={ "width:" (format!("{:.2}", 100.0 * value(row) / largest)) "%" } {}
                span { (text(value(row))) }
            }
        }
    }
}

/// Returns the page.
pub fn page(report: &Report) -> String {
    let result = if report.verdict.passed { "passed" } else { "failed" };
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in &report.table {
        let name = |row: &Row| (row.transport, row.size);
        match groups.iter_mut().find(|group| name(group[0]) == name(row)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { "An accelerator that drives the NIC: " (result) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "An accelerator that drives the NIC: " span class=(result) { (result) } }
                p {
                    "Two nodes under Linux " (report.verdict.kernel_release) " send messages to each other. Each receives a message, computes in its \
                     accelerator, and sends. Processors count instructions, device models count accesses and bytes. Times are those of an \
                     emulator."
                }
                @if !report.verdict.failures.is_empty() { ul { @for failure in &report.verdict.failures { li.failed { (failure) } } } }
                @for group in &groups {
                    h2 { (group[0].message_name()) }
                    h3 { "Instructions of the processors for a message" }
                    (chart(group, |row| row.cpu_instructions_per_message, |value| format!("{value:.0}")))
                    @if let Some(between) = group.iter().find_map(|row| row.between_batches) {
                        p {
                            "While the processors sleep and the accelerators send " (between.messages) " messages: "
                            (format!("{:.1}", between.cpu_instructions_per_message)) " instructions for a message."
                        }
                    }
                    h3 { "Accesses of the processors to registers for a message" }
                    (chart(group, |row| row.trapped_per_message, |value| format!("{value:.2}")))
                    h3 { "Bytes of host memory for a message" }
                    (chart(group, |row| row.host_bytes as f64 / f64::from(2 * row.iterations), |value| format!("{value:.0}")))
                }
                h2 { "All numbers" }
                div.wide { table {
                    tr {
                        th { "row" } th { "iterations" } th { "µs per iteration" } th { "instructions per message" }
                        th { "register accesses per message" } th { "interrupts per message" } th { "host bytes" } th { "verified" }
                    }
                    @for row in &report.table {
                        tr {
                            td { (row.name()) } td { (row.iterations) } td { (format!("{:.1}", row.us_per_iteration)) }
                            td { (format!("{:.0}", row.cpu_instructions_per_message)) } td { (format!("{:.2}", row.trapped_per_message)) }
                            td { (format!("{:.2}", row.interrupts_per_message)) } td { (row.host_bytes) }
                            td { @if row.verified { "yes" } @else { "no" } }
                        }
                    }
                } }
                h2 { "A GPU" }
                @match (&report.real_gpu.device, &report.real_gpu.why) {
                    (Some(device), _) => p { (device) " drove two NICs of one process; its numbers are in the JSON report." }
                    (None, why) => p { "No GPU: " (why.as_deref().unwrap_or("not measured")) }
                }
                @if !report.aborted.is_empty() {
                    h2 { "Byte code that ends in the middle" }
                    table {
                        tr { th { "what was done" } th { "what the processor saw" } }
                        @for aborted in &report.aborted { tr { td { (aborted.case) } td { (aborted.error) } } }
                    }
                }
            }
        }
    };
    page.into_string()
}
