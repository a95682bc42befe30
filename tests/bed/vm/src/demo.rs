// SPDX-License-Identifier: MIT OR Apache-2.0

//! What every demo does around its work: a report that cannot be mistaken for that of another run, failures, and the last lines.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use comfy_table::CellAlignment;
use comfy_table::presets::NOTHING;
use serde::Serialize;
use serde_json::Value;

use crate::stamp::stamp;

/// The members that every report has.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Verdict {
    /// Whether nothing failed.
    pub passed: bool,
    /// What failed.
    pub failures: Vec<String>,
    /// The kernel of the guests.
    pub kernel_release: String,
    /// Seconds of the whole run.
    pub seconds: f64,
}

/// The report of a demo.
pub trait Report: Serialize {
    /// Returns the members that every report has.
    fn verdict(&mut self) -> &mut Verdict;
}

/// Makes a page of a report.
pub type MakePage<R> = fn(&R) -> String;

/// Where the report of a demo goes.
#[derive(Debug, Clone, Copy)]
pub struct Places<'a, R> {
    /// The report as JSON.
    pub report: &'a Path,
    /// The report as a page, and the function that makes it.
    pub page: Option<(&'a Path, MakePage<R>)>,
}

impl<R: Report> Places<'_, R> {
    fn remove(&self) -> Result<()> {
        let page = self.page.map(|(path, _)| path);
        for path in [self.report].into_iter().chain(page) {
            match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).with_context(|| path.display().to_string());
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn write(&self, report: &R, stamp: &Value) -> Result<()> {
        let text = serde_json::to_string_pretty(&Stamped { stamp, report })? + "\n";
        fs::write(self.report, text).with_context(|| self.report.display().to_string())?;
        if let Some((path, page)) = self.page {
            fs::write(path, page(report)).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

/// A report with its origin.
#[derive(Serialize)]
struct Stamped<'a, R> {
    stamp: &'a Value,
    #[serde(flatten)]
    report: &'a R,
}

/// Does the work of a demo, writes the report with its [stamp](crate::stamp), and prints the failures and the result. Returns
/// the exit code of the program: success if nothing failed.
pub fn run<R: Report>(places: Places<'_, R>, mut report: R, work: impl FnOnce(&mut R) -> Result<()>) -> ExitCode {
    let started = Instant::now();
    // If this run is killed, an earlier report must not pass for its report.
    let stamp = match places.remove().and_then(|()| stamp()) {
        Ok(stamp) => stamp,
        Err(error) => {
            println!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    if let Err(error) = work(&mut report) {
        report.verdict().failures.push(format!("{error:#}"));
    }
    let verdict = report.verdict();
    verdict.passed = verdict.failures.is_empty();
    verdict.seconds = started.elapsed().as_secs_f64();
    println!();
    for failure in &verdict.failures {
        println!("FAILED: {failure}");
    }
    let passed = verdict.passed;
    let mut result = format!(
        "{} in {:.1} s on a stock kernel {}. Report: {}",
        if passed { "PASSED" } else { "FAILED" },
        verdict.seconds,
        verdict.kernel_release,
        places.report.display()
    );
    if let Some((path, _)) = places.page {
        result += &format!(", with bar charts: {}", path.display());
    }
    if let Err(error) = places.write(&report, &stamp) {
        println!("The report could not be written: {error:#}");
        return ExitCode::FAILURE;
    }
    println!("{result}");
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A step of a demo. Its title is printed when it begins, and its duration when it ends.
#[must_use = "the step ends when this is dropped"]
pub struct Step(Instant);

impl Step {
    /// Begins a step.
    pub fn begin(title: &str) -> Self {
        println!("{title}");
        Self(Instant::now())
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        println!("   took {:.1} s", self.0.elapsed().as_secs_f64());
    }
}

/// A table of a report, for a terminal and for a [page](crate::page).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    texts: usize,
    /// The names of the columns.
    pub header: Vec<String>,
    /// The cells of each row.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table, of which the first `texts` columns are texts, and the others numbers.
    pub fn new<S: ToString>(texts: usize, header: &[S], rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        Self {
            texts,
            header: header.iter().map(ToString::to_string).collect(),
            rows: rows.into_iter().collect(),
        }
    }

    /// Returns the lines of the table. Texts are aligned to the left, numbers to the right.
    pub fn lines(&self) -> Vec<String> {
        let mut table = comfy_table::Table::new();
        table.load_preset(NOTHING).set_header(&self.header).add_rows(&self.rows);
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_padding((0, 2));
            if index >= self.texts {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table.trim_fmt().lines().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn tables_align_texts_to_the_left_and_numbers_to_the_right() {
        let rows = vec![vec!["a".into(), "7".into()], vec!["long".into(), "1234".into()]];
        let lines = Table::new(1, &["name", "n"], rows).lines();
        let words = ["name     n", "a        7", "long  1234"];
        assert_eq!(lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>(), words);
    }

    #[derive(Serialize)]
    struct Counted {
        #[serde(flatten)]
        verdict: Verdict,
        count: u32,
    }

    impl Report for Counted {
        fn verdict(&mut self) -> &mut Verdict {
            &mut self.verdict
        }
    }

    /// Runs a demo in a folder with an earlier report. Returns the exit code, and the report if there is one.
    fn run_with(work: impl FnOnce(&mut Counted) -> Result<()>) -> (ExitCode, Option<serde_json::Value>) {
        let folder = tempfile::tempdir().unwrap();
        let (path, page) = (folder.path().join("demo.json"), folder.path().join("demo.html"));
        fs::write(&path, "an earlier report").unwrap();
        let places = Places {
            report: &path,
            page: Some((&page, |report: &Counted| report.count.to_string())),
        };
        let report = Counted {
            verdict: Verdict::default(),
            count: 0,
        };
        let code = run(places, report, |report| {
            assert!(!path.exists(), "an earlier report is removed first");
            work(report)
        });
        let text = fs::read_to_string(&path).ok();
        let report = text.map(|text| serde_json::from_str::<serde_json::Value>(&text).unwrap());
        if let Some(report) = &report {
            assert_eq!(fs::read_to_string(&page).unwrap(), report["count"].to_string());
        }
        (code, report)
    }

    #[test]
    fn the_report_says_whether_something_failed() {
        let (code, report) = run_with(|report| {
            report.count = 7;
            Ok(())
        });
        let report = report.unwrap();
        assert_eq!(
            (code, &report["passed"], &report["count"]),
            (ExitCode::SUCCESS, &true.into(), &7.into())
        );
        let (code, report) = run_with(|report| {
            report.verdict.failures.push("an aim".into());
            bail!("a command")
        });
        let report = report.unwrap();
        assert_eq!((code, &report["passed"]), (ExitCode::FAILURE, &false.into()));
        assert_eq!(report["failures"], serde_json::json!(["an aim", "a command"]));
    }

    #[test]
    fn a_report_has_the_stamp_of_its_begin() {
        let before = stamp().unwrap();
        let (_, report) = run_with(|_| bail!("nothing was measured"));
        let report = report.unwrap();
        let (written, after) = (&report["stamp"], stamp().unwrap());
        let times = [&before, written, &after].map(|stamp| stamp["time"].as_str());
        assert!(times[0].is_some() && times.is_sorted(), "{times:?}");
        let names = |stamp: &Value| stamp.as_object().map(|stamp| stamp.keys().cloned().collect::<Vec<_>>());
        assert_eq!(
            (names(written), &written["machine"]),
            (names(&after), &after["machine"])
        );
        assert_eq!(report["failures"], serde_json::json!(["nothing was measured"]));
    }

    #[test]
    fn a_report_that_cannot_be_written_is_a_failure() {
        let missing = Places::<Counted> {
            report: Path::new("/nonexistent/demo.json"),
            page: None,
        };
        let report = Counted {
            verdict: Verdict::default(),
            count: 0,
        };
        assert_eq!(run(missing, report, |_| Ok(())), ExitCode::FAILURE);
    }
}
