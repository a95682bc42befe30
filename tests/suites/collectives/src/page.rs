// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report as an HTML page: the cost of each algorithm, the losses of the trainings, and the cache of keys and values.

use maud::{Markup, PreEscaped, html};
use p2pmem_perf::plot;
use p2pmem_vm::page::{self, Bar};

use crate::report::{Cost, Report};
use crate::{kv, pipeline, sgd, slurm};

/// Bars of the measured algorithms on a number of nodes.
fn chart(costs: &[&Cost], value: impl Fn(&Cost) -> f64, text: impl Fn(f64) -> String) -> Markup {
    let bar = |cost: &&Cost| Bar {
        name: cost.algorithm.clone(),
        value: value(cost),
        text: text(value(cost)),
        other: cost.algorithm == "ring",
    };
    page::chart(&costs.iter().map(bar).collect::<Vec<_>>())
}

/// A picture of a training's losses.
fn losses(training: &sgd::Sgd) -> Markup {
    let drawn = serde_json::to_string(training)
        .map_err(anyhow::Error::from)
        .and_then(|text| plot::draw(&text));
    match drawn {
        Ok(svg) => html! { div.picture { (PreEscaped(svg)) } },
        Err(error) => html! { p.failed { "no picture: " (format!("{error:#}")) } },
    }
}

/// Returns the page.
pub fn page(report: &Report) -> String {
    let measured = |nodes: usize| -> Vec<&Cost> {
        let costs = report.cost.iter();
        costs.filter(|cost| cost.nodes == nodes).collect()
    };
    let mut nodes: Vec<usize> = report.cost.iter().map(|cost| cost.nodes).collect();
    nodes.dedup();
    let body = html! {
        @if !report.cost.is_empty() {
            h2 { "Allreduce: cost beside the formula" }
            p {
                "Bytes are those of the busiest node in a call, counted by the NICs. The link carries " (format!("{:.1}", report.link_mib_per_s)) " MiB/s."
            }
            (page::table(&report.costs()))
        }
        @for nodes in nodes {
            h3 { "Bytes of the busiest of " (nodes) " nodes" }
            (chart(&measured(nodes), |cost| cost.bytes_measured, |bytes| format!("{:.2} MiB", bytes / f64::from(1 << 20))))
        }
        @if !report.baseline.is_empty() {
            h2 { "MPI_Allreduce of Open MPI over UCX, on the same memory, for comparison" }
            (page::table(&report.baselines()))
        }
        @if !report.sgd.is_empty() {
            h2 { "Training" }
            (page::table(&sgd::table(&report.sgd)))
            @for training in &report.sgd { (losses(training)) }
        }
        @if !report.pipeline.is_empty() {
            h2 { "Pipeline-parallel training" }
            (page::table(&pipeline::table(&report.pipeline)))
        }
        @if !report.kv.is_empty() {
            h2 { "Inference: the cache of keys and values between two nodes" }
            (page::table(&kv::table(&report.kv)))
        }
        @if !report.slurm.is_empty() {
            h2 { "Slurm: jobs that get bytes of the accelerators" }
            (page::table(&slurm::table(&report.slurm)))
        }
    };
    let introduction = format!(
        "Nodes under Linux {} reduce, train and infer with payload in their accelerators. NICs count each byte. Times are those of an \
         emulator.",
        report.verdict.kernel_release
    );
    page::page(
        "Collective operations on accelerators",
        &report.verdict,
        &introduction,
        &body,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_tables_and_loss_curves() {
        let mut report = Report::default();
        let empty = page(&report);
        assert!(!empty.contains("<table>") && !empty.contains("<svg"));
        report.cost = vec![crate::report::tests::ring()];
        report.sgd = vec![sgd::tests::good()];
        report.pipeline = vec![pipeline::tests::good()];
        report.kv = vec![kv::tests::direct()];
        report.slurm = vec![slurm::tests::good()];
        let full = page(&report);
        for part in [
            "bits of the reference",
            "Loss of synchronous training on 2 ranks",
            "<svg",
            "mooncake",
            "Pipeline-parallel training",
            "Pipeline-parallel training",
            "both are right",
            "Bytes of the busiest of 2 nodes",
        ] {
            assert!(full.contains(part), "{part} is not in {full}");
        }
    }
}
