// SPDX-License-Identifier: MIT OR Apache-2.0

//! The origin of a report: commit, time, machine, and accelerator, from `tools/stamp`.

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
    serde_json::from_str(&run(&mut command())?).context("tools/stamp")
}

/// Returns the command `tools/stamp`, without arguments.
pub(crate) fn command() -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tools/stamp"))
}

/// Runs `tools/stamp`, and returns its output.
pub(crate) fn run(command: &mut Command) -> Result<String> {
    let output = command.output().context("tools/stamp")?;
    ensure!(
        output.status.success(),
        "tools/stamp: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    String::from_utf8(output.stdout).context("tools/stamp")
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
