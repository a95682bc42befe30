// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report as an HTML page with bar charts. The page has no scripts and needs no other files.

use maud::{Markup, html};
use p2pmem_vm::page::{self, Bar};

use crate::report::{Report, Row};
use crate::two_nodes::Mode;

/// Bars of the rows whose lengths are relative to the largest value.
fn chart(rows: &[&Row], value: impl Fn(&Row) -> f64, text: impl Fn(f64) -> String) -> Markup {
    let bar = |row: &&Row| Bar {
        name: row.mode_name().to_string(),
        value: value(row),
        text: text(value(row)),
        other: row.mode == Mode::Device,
    };
    page::chart(&rows.iter().map(bar).collect::<Vec<_>>())
}

/// Returns the page.
pub fn page(report: &Report) -> String {
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in &report.table {
        let name = |row: &Row| (row.transport, row.size);
        match groups.iter_mut().find(|group| name(group[0]) == name(row)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    let body = html! {
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
        @if !report.aborted.is_empty() {
            h2 { "Byte code that ends in the middle" }
            table {
                tr { th { "what was done" } th { "what the processor saw" } }
                @for aborted in &report.aborted { tr { td { (aborted.case.about()) } td { (aborted.error) } } }
            }
        }
    };
    let introduction = format!(
        "Two nodes under Linux {} send messages to each other. Each receives a message, computes in its accelerator, and sends. Processors \
         count instructions, device models count accesses and bytes. Times are those of an emulator.",
        report.verdict.kernel_release
    );
    page::page(
        "An accelerator that drives the NIC",
        &report.verdict,
        &introduction,
        &body,
    )
}
