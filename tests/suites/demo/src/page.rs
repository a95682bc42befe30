// SPDX-License-Identifier: MIT OR Apache-2.0

//! The demo's report as an HTML page with pictures. The page has no scripts and needs no other files.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use p2pmem::human_size;

use crate::job::Job;
use crate::rdma;
use crate::report::{Candidate, Report};

/// Colors adapt to the reader's choice of a light or dark page.
const STYLE: &str = "
:root { color-scheme: light dark; --good: #2a9d5c; --bad: #d1495b; --line: #8888; --box: #8882 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.result { font-weight: bold; color: #fff; padding: .1rem .6rem; border-radius: .3rem }
.good { background: var(--good) } .bad { background: var(--bad) }
.bar { display: grid; grid-template-columns: 16rem 1fr 8rem; gap: .75rem; align-items: center }
.bar div { height: 1rem; border-radius: .2rem; min-width: 1px }
.path { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem; margin: .5rem 0 }
.path span { border: 1px solid var(--line); background: var(--box); border-radius: .3rem; padding: .2rem .7rem }
.path span.bad { color: #fff }
svg { max-width: 100%; height: auto }
";

/// Returns the page.
pub fn page(report: &Report) -> String {
    let kernel = report.kernel_release.as_deref().unwrap_or("of unknown release");
    let (result, class) = if report.passed {
        ("passed", "good")
    } else {
        ("failed", "bad")
    };
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { "p2pmem demo: " (result) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "p2pmem demo " span class={ "result " (class) } { (result) } }
                p {
                    "Peer-to-peer transfers between emulated PCI devices under Linux " (kernel)
                    @if report.stock_kernel { ", the distribution's unmodified kernel" }
                    ". Device models counted each byte. Times are those of an emulator."
                }
                @if !report.failures.is_empty() {
                    ul { @for failure in &report.failures { li { (failure) } } }
                }
                @if let Some(picture) = &report.picture {
                    h2 { "The machine" }
                    // p2pmemctl has escaped the texts of its picture.
                    (PreEscaped(picture))
                }
                @if !report.candidates.is_empty() { (choice(&report.candidates)) }
                @if let Some(job) = &report.job { (transform(job, &report.from, &report.to)) }
                @if let Some(rdma) = &report.rdma { (servers(rdma)) }
            }
        }
    };
    page.into_string()
}

/// The verdict about each provider.
fn choice(candidates: &[Candidate]) -> Markup {
    html! {
        h2 { "Which memory a buffer near both drives gets, and why" }
        table {
            tr { th { "device" } th { "address" } th { "path" } th { "verdict" } }
            @for candidate in candidates {
                tr {
                    td { @if candidate.chosen { strong { (candidate.device) } } @else { (candidate.device) } }
                    td { (candidate.addr) }
                    td { (candidate.class) }
                    td { (candidate.reason) }
                }
            }
        }
    }
}

/// One bar of a chart.
struct Bar {
    label: String,
    value: f64,
    text: String,
}

/// Bars whose lengths are relative to the largest value. All values are bytes that peer-to-peer transfers avoid: 0 is good.
fn chart(bars: &[Bar]) -> Markup {
    let largest = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    html! {
        @for Bar { label, value, text } in bars {
            div.bar {
                span { (label) }
                div class=(if *value == 0.0 { "good" } else { "bad" }) style={ "width:" (format!("{:.2}", 100.0 * value / largest)) "%" } {}
                span { (text) }
            }
        }
    }
}

/// The devices and memories that data passes. Host memory is highlighted.
fn path(stations: &[&str]) -> Markup {
    html! {
        div.path {
            @for (at, station) in stations.iter().enumerate() {
                @if at > 0 { "\u{2192}" }
                span class=[(*station == HOST_MEMORY).then_some("bad")] { (station) }
            }
        }
    }
}

const HOST_MEMORY: &str = "host memory";

/// The first act.
fn transform(job: &Job, from: &str, to: &str) -> Markup {
    let provider = job.provider.as_str();
    let runs = [("peer to peer", &job.p2p), ("through host memory", &job.staged)];
    let bars = |what: &str, bytes: fn(&crate::job::Run) -> u64| {
        let bars = runs.map(|(name, run)| Bar {
            label: format!("{what}, {name}"),
            value: bytes(run) as f64,
            text: human_size(bytes(run)),
        });
        chart(&bars)
    };
    html! {
        h2 { "From drive to accelerator to drive: " (human_size(job.payload_bytes)) }
        p { "Peer to peer:" }
        (path(&[from, provider, to]))
        p { "Through host memory, with a copy by the CPU in each direction:" }
        (path(&[from, HOST_MEMORY, provider, HOST_MEMORY, to]))
        (bars("host memory", |run| run.traffic.host_bytes()))
        (bars("across the root complex", |run| run.traffic.bridges.root_complex))
        (bars("copied by the CPU", |run| run.cpu_copied_bytes))
        p {
            "Largest error relative to the RMS of the spectrum: "
            (format!("{:.1e}", job.p2p.comparison.max_error.max(job.staged.comparison.max_error))) "."
        }
    }
}

/// The second act.
fn servers(rdma: &rdma::Report) -> Markup {
    let bars = rdma.table.iter().map(|row| Bar {
        label: row.name.clone(),
        value: row.host_bytes_per_payload_byte,
        text: format!("{:.2}", row.host_bytes_per_payload_byte),
    });
    let bars: Vec<Bar> = bars.collect();
    html! {
        h2 { "From server to server by RDMA" }
        p {
            "Bytes of host memory that devices accessed for each byte of payload. ACC is memory of an accelerator, CPU is host memory."
        }
        (chart(&bars))
        table {
            tr { th { "transfer" } th { "messages" } th { "payload" } th { "registered by" } th { "every byte correct" } }
            @for row in &rdma.table {
                tr {
                    td { (row.name) }
                    td.number { (row.iterations) " × " (human_size(row.message_bytes)) }
                    td.number { (human_size(row.payload_bytes)) }
                    td { (row.registration.join(", ")) }
                    td { @if row.verified { "yes" } @else { "no" } }
                }
            }
        }
        @if let (Some(attempts), Some(writes)) = (rdma.stale_attempts, rdma.stale_writes) {
            p { (attempts) " writes were tried with a revoked registration; " (writes) " of them reached the memory." }
        }
        @if let Some(revoked) = &rdma.revoked {
            p {
                "An accelerator was unbound while a NIC wrote to it, after " (human_size(revoked.moved_before))
                "; " (human_size(revoked.moved_after)) " reached it afterwards."
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::results;

    #[test]
    fn the_page_shows_the_results() {
        let page = page(&Report::new(results()));
        assert!(page.starts_with("<!DOCTYPE html>"), "{page}");
        for part in [
            "<span class=\"result good\">passed</span>",
            "<strong>accel0</strong>",
            "<td>because</td>",
            "<span>nvme0</span>\u{2192}<span>accel0</span>\u{2192}<span>nvme1</span>",
            "<span class=\"bad\">host memory</span>",
            "<span>host memory, peer to peer</span><div class=\"good\" style=\"width:0.00%\"></div><span>0 bytes</span>",
            "<span>host memory, through host memory</span><div class=\"bad\" style=\"width:100.00%\"></div><span>2 MiB</span>",
        ] {
            assert!(page.contains(part), "no {part} in {page}");
        }
    }

    #[test]
    fn failures_are_shown_and_texts_are_escaped() {
        let mut results = results();
        results.errors.push("<b>1 & 2</b>".into());
        results.picture = Some("<svg id=\"machine\"></svg>".into());
        let page = page(&Report::new(results));
        assert!(page.contains("<span class=\"result bad\">failed</span>"), "{page}");
        assert!(page.contains("<li>&lt;b&gt;1 &amp; 2&lt;/b&gt;</li>"), "{page}");
        assert!(
            page.contains("<h2>The machine</h2><svg id=\"machine\"></svg>"),
            "{page}"
        );
    }
}
