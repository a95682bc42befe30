// SPDX-License-Identifier: MIT OR Apache-2.0

//! The tests that run: those that `tools/affected` selected, and of these, those that have not passed on this tree.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use serde::Deserialize;

/// The environment variable with the file of `tools/affected`. Without it, all tests run.
const SELECTION: &str = "P2PMEM_SELECTION";
/// The environment variable with the folder in which tests that pass are recorded. Without it, all selected tests run.
const PASSED: &str = "P2PMEM_PASSED";

/// The file of `tools/affected`.
#[derive(Deserialize)]
struct File {
    everything: Option<String>,
    guests: Guests,
}

/// What the file says about tests in guests on the stock kernel.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
struct Guests {
    /// Whether all tests run.
    all: bool,
    /// The names of tests and of groups of tests.
    tests: BTreeSet<String>,
    /// The part of the other tests that runs: its number, and how many parts there are.
    share: (u32, u32),
}

/// Whether a test runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It runs.
    Runs,
    /// No change since the last full run can affect it.
    NotAffected,
    /// It has passed on this tree, in an earlier run.
    Passed,
}

/// The selection of this run.
#[derive(Clone, Default)]
pub struct Selection {
    /// `None` if all tests run.
    guests: Option<Arc<Guests>>,
    /// The names of tests that have passed on this tree.
    passed: Arc<BTreeSet<String>>,
    /// The file to which such names are added.
    record: Option<PathBuf>,
}

impl Selection {
    /// Reads the selection for the tests on a kernel. On the debug kernel, all tests run.
    ///
    /// # Errors
    ///
    /// A file that the environment names cannot be read.
    pub fn load(kernel: &str, is_debug: bool) -> Result<Self> {
        let mut selected = None;
        if let Some(path) = std::env::var_os(SELECTION).filter(|_| !is_debug) {
            let path = Path::new(&path);
            let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
            selected = guests(&text).with_context(|| path.display().to_string())?;
        }
        let record = std::env::var_os(PASSED).map(|folder| Path::new(&folder).join(format!("guests-{kernel}")));
        let text = match record.as_ref().map(fs::read_to_string) {
            Some(Err(e)) if e.kind() != ErrorKind::NotFound => return Err(e).context(PASSED),
            Some(Ok(text)) => text,
            _ => String::new(),
        };
        Ok(Self {
            guests: selected,
            passed: Arc::new(text.lines().map(str::to_owned).collect()),
            record,
        })
    }

    /// Returns whether a test runs. `name` has no kernel. A test of the core always runs.
    pub fn verdict(&self, name: &str, is_core: bool) -> Verdict {
        if self.passed.contains(name) {
            return Verdict::Passed;
        }
        match &self.guests {
            Some(guests) if !is_core && !guests.has(name) => Verdict::NotAffected,
            _ => Verdict::Runs,
        }
    }

    /// Records that a test has passed.
    ///
    /// # Errors
    ///
    /// Those of writing the file.
    pub fn record(&self, name: &str) -> Result<()> {
        let Some(path) = &self.record else { return Ok(()) };
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(format!("{name}\n").as_bytes()))
            .with_context(|| path.display().to_string())
    }
}

/// Reads the file of `tools/affected`. Returns `None` if all tests run.
fn guests(text: &str) -> serde_json::Result<Option<Arc<Guests>>> {
    let file: File = serde_json::from_str(text)?;
    Ok((file.everything.is_none() && !file.guests.all).then(|| Arc::new(file.guests)))
}

impl Guests {
    /// Returns whether the test or one of its groups is named, or it is its turn.
    fn has(&self, name: &str) -> bool {
        let groups = name.match_indices("::").map(|(end, _)| &name[..end]);
        let named = groups.chain([name]).any(|group| self.tests.contains(group));
        let (number, parts) = self.share;
        named || name.bytes().map(u32::from).sum::<u32>() % parts.max(1) == number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(text: &str) -> Selection {
        Selection {
            guests: guests(text).unwrap(),
            passed: Arc::new(BTreeSet::from(["admin::b".to_owned()])),
            record: None,
        }
    }

    #[test]
    fn groups_and_names_are_selected_and_the_core_always() {
        let of =
            r#"{"everything": null, "guests": {"all": false, "tests": ["admin", "clients::ucx::a"], "share": [5, 5]}}"#;
        let selection = selection(of);
        let verdict = |name, is_core| selection.verdict(name, is_core);
        assert_eq!(verdict("admin::guide", false), Verdict::Runs);
        assert_eq!(verdict("admin::b", true), Verdict::Passed);
        assert_eq!(verdict("administer::x", false), Verdict::NotAffected);
        assert_eq!(verdict("clients::ucx::a", false), Verdict::Runs);
        assert_eq!(verdict("clients::ucx::b", false), Verdict::NotAffected);
        assert_eq!(verdict("clients::ucx::b", true), Verdict::Runs);
    }

    #[test]
    fn everything_runs_with_a_reason_or_if_all_is_affected() {
        for of in [
            r#"{"everything": "no base", "guests": {"all": false, "tests": [], "share": [5, 5]}}"#,
            r#"{"everything": null, "guests": {"all": true, "tests": [], "share": [5, 5]}}"#,
        ] {
            assert_eq!(selection(of).verdict("clients::ucx::b", false), Verdict::Runs);
        }
    }

    #[test]
    fn each_test_is_in_one_share() {
        let has = |number| {
            Guests {
                share: (number, 5),
                ..Guests::default()
            }
            .has("clients::ucx::b")
        };
        assert_eq!((0..5).filter(|&number| has(number)).count(), 1);
    }
}
