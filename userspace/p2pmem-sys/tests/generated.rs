// SPDX-License-Identifier: MIT OR Apache-2.0

//! The committed bindings are what bindgen makes of the header today.

use std::path::Path;
use std::process::Command;

/// In the project's sandbox every tool is there, so nothing may be skipped in it.
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
    let version = version.unwrap_or_else(|| panic!("first line of src/bindings.rs names no version: {made_by:?}"));

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
            "src/bindings.rs is stale from line {:?} on: run p2pmem-sys/generate",
            first.map(|n| n + 1)
        );
    }
}
