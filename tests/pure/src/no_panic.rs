// SPDX-License-Identifier: MIT OR Apache-2.0

//! The files under test cannot panic: their object code, built as the kernel builds its own (no `std`, overflow checks
//! on), calls nothing that does.

use std::path::Path;
use std::process::Command;

/// Calls every entry point with arguments that the compiler knows nothing about.
const ENTRY_POINTS: &str = r#"
#[inline(never)]
pub fn entry_points(
    request: &placement::Request,
    candidates: &mut [placement::Candidate<'_>],
    verdicts: &mut [placement::Verdict],
    a: &path::Chain<'_>,
    b: &path::Chain<'_>,
    numbers: &[u32; 4],
    ranges: &[ranges::Range],
) -> (placement::Decision, path::Path, u64, Option<path::PathClass>, path::PortKind) {
    let [n, m, o, p] = *numbers;
    for candidate in candidates.iter_mut() {
        candidate.refused(u64::from(n) << (m & 63));
    }
    let link = path::link_bandwidth_of_status(n as u16).wrapping_add(path::link_bandwidth(m as u8, o as u8));
    let sum = ranges::check(ranges, u64::from(n) << (o & 63), u64::from(p)).unwrap_or(1);
    let joined = ranges.iter().copied().reduce(|a, b| a.join(b).unwrap_or(b)).map_or(0, |r| r.size);
    (
        placement::decide(request, candidates, verdicts),
        path::classify(a, b, n as i32, m),
        path::host_bridge_id(p, o as u8) ^ u64::from(link) ^ sum ^ joined,
        path::PathClass::from_raw(p),
        path::PortKind::from_pcie_type((n > 4).then_some(m as u8), o > 9),
    )
}
"#;

/// Compiles the files under test with `body` and says whether the object refers to the panic machinery.
fn panics(body: &str) -> bool {
    let rust = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../rust");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = folder.path().join("entry.rs");
    let object = folder.path().join("entry.o");
    let text = format!(
        "#![no_std]\n#![allow(dead_code, private_interfaces)]\n#[path = {:?}]\nmod path;\n#[path = {:?}]\nmod placement;\n#[path = {:?}]\nmod ranges;\n{body}",
        rust.join("path.rs"),
        rust.join("placement.rs"),
        rust.join("ranges.rs"),
    );
    std::fs::write(&source, text).expect("the source is written");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args([
            "--edition=2021",
            "--crate-type=lib",
            "--crate-name=entry",
            "--emit=obj",
            "-Copt-level=2",
        ])
        .args([
            "-Cpanic=abort",
            "-Ccodegen-units=1",
            "-Cdebuginfo=0",
            "-Coverflow-checks=on",
            "-o",
        ])
        .args([&object, &source])
        .output()
        .expect("rustc runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let code = std::fs::read(&object).expect("rustc wrote an object");
    assert!(
        code.windows(12).any(|name| name == b"entry_points"),
        "the entry points were compiled away"
    );
    code.windows(9).any(|name| name == b"panicking")
}

#[test]
fn nothing_panics() {
    assert!(!panics(ENTRY_POINTS));
}

#[test]
fn what_panics_is_found() {
    assert!(panics(
        "#[inline(never)] pub fn entry_points(a: &[u32], n: usize) -> u32 { a[n] }"
    ));
    assert!(panics(
        "#[inline(never)] pub fn entry_points(a: u32, b: u32) -> u32 { a + b }"
    ));
    assert!(!panics(
        "#[inline(never)] pub fn entry_points(a: u32, b: u32) -> u32 { a ^ b }"
    ));
}
