// SPDX-License-Identifier: MIT OR Apache-2.0

//! The origin of a report: commit, time and machine, from `tools/stamp`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Returns the stamp of a report that starts now.
///
/// # Errors
///
/// `tools/stamp` cannot be run, or its output is not JSON.
pub fn stamp() -> Result<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tools/stamp");
    let output = Command::new(&path)
        .output()
        .with_context(|| path.display().to_string())?;
    ensure!(output.status.success(), "{}: {output:?}", path.display());
    serde_json::from_slice(&output.stdout).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamp_has_commit_time_and_machine() -> Result<()> {
        let stamp = stamp()?;
        ensure!(stamp["commit"].is_null() || stamp["commit"].as_str().is_some_and(|commit| commit.len() == 40));
        ensure!(stamp["time"].as_str().is_some_and(|time| time.ends_with('Z')));
        ensure!(stamp["machine"]["processors"].as_u64().is_some_and(|count| count > 0));
        Ok(())
    }
}
