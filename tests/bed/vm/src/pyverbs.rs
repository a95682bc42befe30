// SPDX-License-Identifier: MIT OR Apache-2.0

//! Results of pyverbs' own tests: the expected ones, from a file in the tree, and those of a run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::clients::{self, Attempt, NotRun, Report};

/// The name of the table and of the client of all rows.
pub const NAME: &str = "pyverbs";

/// The result of a test that is missing in a list.
const NONE: &str = "none";

/// Results of tests, by class (`test_addr.AHTest`) and name: `pass`, `skip: REASON`, `fail: REASON` or `crash: REASON`.
#[derive(Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Results {
    classes: BTreeMap<String, BTreeMap<String, String>>,
    #[serde(skip)]
    seconds: BTreeMap<String, f64>,
}

/// A line of output of `tests/suites/clients/pyverbs/run.py`.
#[derive(Debug, Deserialize)]
struct Line {
    test: String,
    result: String,
    reason: String,
    seconds: f64,
}

impl Results {
    /// Reads a list.
    ///
    /// # Errors
    ///
    /// The file cannot be read or is not a list, or an expected result is none of those of [`Results`].
    pub fn load(path: &Path) -> Result<Results> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Results::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Results> {
        let results: Results = toml::from_str(text)?;
        for (test, result) in results.all() {
            let has_reason = |kind: &str| {
                result
                    .strip_prefix(kind)
                    .is_some_and(|reason| !reason.trim().is_empty())
            };
            ensure!(
                result == "pass" || ["skip: ", "fail: ", "crash: "].into_iter().any(has_reason),
                "{test}: {result:?} is not \"pass\", \"skip: why\", \"fail: why\" or \"crash: how\""
            );
        }
        Ok(results)
    }

    /// Writes a list.
    ///
    /// # Errors
    ///
    /// Those of writing a file.
    pub fn store(&self, path: &Path) -> Result<()> {
        let text = toml::to_string(&self.classes)?;
        fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// Adds the results in the output of a run.
    ///
    /// # Errors
    ///
    /// A line has another form.
    pub fn add(&mut self, output: &[u8]) -> Result<()> {
        for line in String::from_utf8_lossy(output).lines() {
            let line: Line = serde_json::from_str(line).with_context(|| format!("pyverbs' tests said {line:?}"))?;
            let (class, name) = line.test.rsplit_once('.').unwrap_or(("", line.test.as_str()));
            let result = match line.reason.as_str() {
                "" => line.result,
                reason => format!("{}: {reason}", line.result),
            };
            self.classes
                .entry(class.to_owned())
                .or_default()
                .insert(name.to_owned(), result);
            self.seconds.insert(line.test, line.seconds);
        }
        Ok(())
    }

    fn all(&self) -> impl Iterator<Item = (String, &str)> {
        let tests = self.classes.iter().flat_map(|(class, tests)| {
            let named = tests.iter();
            named.map(move |(name, result)| (format!("{class}.{name}"), result.as_str()))
        });
        tests.map(|(test, result)| (test.trim_start_matches('.').to_owned(), result))
    }

    /// Returns a row for each test of a list of expected results, if none of them was selected.
    pub fn not_selected(&self) -> Vec<Report> {
        let not_selected = clients::Results::NotRun(NotRun::NotSelected);
        let tests = self.all();
        tests
            .map(|(test, expected)| row(test, expected.to_owned(), not_selected.clone()))
            .collect()
    }

    /// Compares a run with the expected results. Returns a line for each test of either.
    pub fn compare(&self, run: &Results) -> Vec<Report> {
        let expected: BTreeMap<String, &str> = self.all().collect();
        let got: BTreeMap<String, &str> = run.all().collect();
        let mut tests: Vec<&String> = expected.keys().chain(got.keys()).collect();
        tests.sort_unstable();
        tests.dedup();
        let reports = tests.into_iter().map(|test| {
            let of = |results: &BTreeMap<String, &str>| results.get(test).copied().unwrap_or(NONE).to_owned();
            let (expected, got) = (of(&expected), of(&got));
            let results = match got.strip_prefix("skip: ").filter(|_| expected == got) {
                Some(reason) => clients::Results::NotRun(NotRun::Skipped(reason.to_owned())),
                None => clients::Results::Attempts(vec![Attempt {
                    // The reason of a failure may contain addresses, so only its beginning is compared.
                    ok: expected == got || (expected.starts_with("fail: ") && got.starts_with(&expected)),
                    got,
                    seconds: run.seconds.get(test).copied().unwrap_or(0.0),
                    evidence: Vec::new(),
                }]),
            };
            row(test.clone(), expected, results)
        });
        reports.collect()
    }
}

fn row(test: String, expected: String, results: clients::Results) -> Report {
    Report {
        kernel: String::new(),
        table: NAME.into(),
        client: NAME.into(),
        command: test,
        expected,
        results,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: &str = r#"
        ["test_addr.AHTest"]
        test_create = "pass"
        test_roce = "skip: no RoCE"
        test_bad = "fail: PyverbsError: no"
        test_gone = "pass"
    "#;

    const RUN: &str = r#"{"test": "test_addr.AHTest.test_create", "result": "pass", "reason": "", "seconds": 0.5}
{"test": "test_addr.AHTest.test_roce", "result": "skip", "reason": "no RoCE", "seconds": 0}
{"test": "test_addr.AHTest.test_bad", "result": "fail", "reason": "PyverbsError: no 0x1234", "seconds": 0}
{"test": "test_new.Test.test", "result": "crash", "reason": "SIGSEGV", "seconds": 0}
"#;

    #[test]
    fn results_are_compared_with_expectations() {
        let expected = Results::parse(EXPECTED).unwrap();
        let mut run = Results::default();
        run.add(RUN.as_bytes()).unwrap();
        let reports = expected.compare(&run);
        let ok = |test: &str| {
            let report = reports.iter().find(|report| report.command.ends_with(test)).unwrap();
            (report.expected.as_str(), &report.results)
        };
        let attempt = |ok, got: &str, seconds| {
            clients::Results::Attempts(vec![Attempt {
                ok,
                got: got.into(),
                seconds,
                evidence: Vec::new(),
            }])
        };
        let skipped = clients::Results::NotRun(NotRun::Skipped("no RoCE".into()));
        assert_eq!(reports.len(), 5);
        assert_eq!(ok("create"), ("pass", &attempt(true, "pass", 0.5)));
        assert_eq!(ok("roce"), ("skip: no RoCE", &skipped));
        assert_eq!(ok("bad").1, &attempt(true, "fail: PyverbsError: no 0x1234", 0.0));
        assert_eq!(ok("gone"), ("pass", &attempt(false, "none", 0.0)));
        assert_eq!(ok("Test.test"), ("none", &attempt(false, "crash: SIGSEGV", 0.0)));
        let rows = expected.not_selected();
        assert_eq!(rows.len(), 4);
        let not_selected = clients::Results::NotRun(NotRun::NotSelected);
        assert!(rows.iter().all(|row| row.results == not_selected));
    }

    #[test]
    fn stored_results_are_valid_expectations() {
        let mut run = Results::default();
        run.add(RUN.lines().take(3).collect::<Vec<_>>().join("\n").as_bytes())
            .unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        run.store(file.path()).unwrap();
        let expected = Results::load(file.path()).unwrap();
        for report in expected.compare(&run) {
            match report.results {
                clients::Results::Attempts(attempts) => assert!(attempts.iter().all(|attempt| attempt.ok)),
                clients::Results::NotRun(_) => assert!(report.command.ends_with("test_roce")),
            }
        }
    }

    #[test]
    fn unknown_outcomes_are_rejected() {
        for bad in ["skip: ", "skip", "crash: ", "ok"] {
            let text = EXPECTED.replacen("\"pass\"", &format!("{bad:?}"), 1);
            assert!(Results::parse(&text).is_err(), "{bad}");
        }
        assert!(Results::default().add(b"no json").is_err());
    }
}
