// SPDX-License-Identifier: MIT OR Apache-2.0

//! Fails if bindgen creates other bindings from the header than the committed ones.

use std::path::Path;
use std::process::Command;

/// Returns whether the test runs in the project's sandbox, which has all tools, so that the test may not be skipped.
fn in_sandbox() -> bool {
    Path::new("/etc/p2pmem-kernel").exists()
}

#[test]
fn bindings_match_the_header() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let committed = std::fs::read_to_string(here.join("src/bindings.rs")).expect("src/bindings.rs");
    let made_by = committed.lines().next().unwrap_or_default();
    let version = made_by
        .split_whitespace()
        .find(|w| w.starts_with(|c: char| c.is_ascii_digit()));
    let version =
        version.unwrap_or_else(|| panic!("first line of src/bindings.rs has no version of bindgen: {made_by:?}"));

    let skip = |why: String| {
        assert!(!in_sandbox(), "in the sandbox this test must run, but {why}");
        eprintln!("skipped: {why}");
    };
    match Command::new("bindgen").arg("--version").output() {
        Err(err) => return skip(format!("bindgen cannot be run: {err}")),
        Ok(out) => {
            let found = String::from_utf8_lossy(&out.stdout).trim().to_owned();
            if found != format!("bindgen {version}") {
                return skip(format!("{found} is here, the bindings are made by bindgen {version}"));
            }
        }
    }
    let out = Command::new(here.join("generate"))
        .arg("--stdout")
        .output()
        .expect("run the script `generate`");
    assert!(
        out.status.success(),
        "generate failed: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    let fresh = String::from_utf8(out.stdout).expect("bindgen writes UTF-8");
    if fresh != committed {
        let first = fresh.lines().zip(committed.lines()).position(|(a, b)| a != b);
        panic!(
            "src/bindings.rs is out of date from line {:?} on: run p2pmem-sys/generate",
            first.map(|n| n + 1)
        );
    }
}
