// SPDX-License-Identifier: MIT OR Apache-2.0

//! The frame of a demo's report as an HTML page: title, result, failures, and colors. A page has no scripts and needs no other
//! files.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::demo::{Table, Verdict};

/// Colors adapt to the reader's choice of a light or dark page.
const STYLE: &str = "
:root { color-scheme: light dark; --bar: #3b7dd8; --good: #2a9d5c; --bad: #d1495b; --line: #8888 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } .wide { overflow-x: auto }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left }
.bar { display: grid; grid-template-columns: minmax(8rem, 16rem) 1fr 8rem; gap: .75rem; align-items: center }
.bar div { height: 1rem; border-radius: .2rem; min-width: 1px; background: var(--bar) } .bar .other { background: var(--good) }
.passed { color: var(--good) } .failed { color: var(--bad) }
.picture { background: #fff } .picture svg { max-width: 100%; height: auto }
";

/// A bar of a chart.
pub struct Bar {
    /// What the bar stands for.
    pub name: String,
    /// Its length, relative to the other bars.
    pub value: f64,
    /// The value as text.
    pub text: String,
    /// Whether it has the second color.
    pub other: bool,
}

/// Returns bars whose lengths are relative to the largest value.
pub fn chart(bars: &[Bar]) -> Markup {
    let largest = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    html! {
        @for bar in bars {
            div.bar {
                span { (bar.name) }
                div class=[bar.other.then_some("other")] style={ "width:" (format!("{:.2}", 100.0 * bar.value / largest)) "%" } {}
                span { (bar.text) }
            }
        }
    }
}

/// Returns a table of a report.
pub fn table(table: &Table) -> Markup {
    html! {
        div.wide { table {
            tr { @for name in &table.header { th { (name) } } }
            @for row in &table.rows { tr { @for cell in row { td { (cell) } } } }
        } }
    }
}

/// Returns the page of a report: its title and result, an introduction, the failures, and the body.
pub fn page(title: &str, verdict: &Verdict, introduction: &str, body: &Markup) -> String {
    let result = if verdict.passed { "passed" } else { "failed" };
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { (title) ": " (result) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) ": " span class=(result) { (result) } }
                p { (introduction) }
                @if !verdict.failures.is_empty() { ul { @for failure in &verdict.failures { li.failed { (failure) } } } }
                (body)
            }
        }
    };
    page.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_the_result_and_escapes_texts() {
        let mut verdict = Verdict {
            failures: vec!["1 < 2".into()],
            ..Verdict::default()
        };
        let bar = |value| Bar {
            name: "a & b".into(),
            value,
            text: format!("{value}"),
            other: value > 1.0,
        };
        let body = html! { (chart(&[bar(1.0), bar(4.0)])) (table(&Table::new(1, &["name"], [vec!["<x>".into()]]))) };
        let text = page("Rates", &verdict, "Of links.", &body);
        for part in [
            "<title>Rates: failed</title>",
            "<li class=\"failed\">1 &lt; 2</li>",
            "<p>Of links.</p>",
            "<div style=\"width:25.00%\"></div>",
            "<div class=\"other\" style=\"width:100.00%\"></div>",
            "a &amp; b",
            "<td>&lt;x&gt;</td>",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        verdict.passed = true;
        verdict.failures.clear();
        let text = page("Rates", &verdict, "", &html! {});
        assert!(
            text.contains("<span class=\"passed\">") && !text.contains("<ul>"),
            "{text}"
        );
    }
}
