// SPDX-License-Identifier: MIT OR Apache-2.0

//! The files under test cannot panic: their object code, built as the kernel builds it (no `std`, overflow checks
//! enabled), calls no panic function.

use std::path::Path;
use std::process::Command;

/// Calls every entry point with arguments that are unknown to the compiler.
const ENTRY_POINTS: &str = r#"
pub struct Who(u32, [u32; 3]);

impl rule::Subject for Who {
    fn uid(&self) -> u32 {
        self.0
    }
    fn is_member(&self, gid: u32) -> bool {
        self.1.contains(&gid)
    }
}

pub struct Numbers(u64);

impl quota::Store for Numbers {
    type Error = ();
    fn used(&self, _: quota::ChargeKey) -> u64 {
        self.0
    }
    fn set(&mut self, _: quota::ChargeKey, bytes: u64) -> Result<(), ()> {
        self.0 = bytes;
        if bytes & 1 == 1 { Err(()) } else { Ok(()) }
    }
}

#[inline(never)]
pub fn entry_points(
    request: &placement::Request,
    candidates: &mut [placement::Candidate<'_>],
    verdicts: &mut [verdict::Verdict],
    ports: &[path::Port],
    numbers: &[u32; 4],
    ranges: &[ranges::Range],
    rules: (&[rule::Rule], &[rule::Rule], &Who),
    functions: &[rule::FunctionId],
    paths: &[path::Path],
    ranked: &mut [ranking::RankedProvider],
    text: &str,
) -> (verdict::Outcome, Option<path::Path>, u64, Option<path::PathClass>, path::PortKind) {
    let [n, m, o, p] = *numbers;
    let (admin, own, subject) = rules;
    let who = rule_effect::Applicable::to(admin, subject);
    let mut shadowed = 0;
    for (function, candidate) in functions.iter().zip(candidates.iter_mut()) {
        candidate.effect.add(rule_effect::RuleOrigin::Admin, admin, &who, function, functions, paths);
        candidate.effect.add(rule_effect::RuleOrigin::File, own, &rule_effect::Applicable::ALL, function, functions, paths);
        let requester = quota::Requester { rules: admin, applicable: who, uid: n, file: u64::from(m), file_rules: own };
        let target = quota::ChargeTarget { id: o, function, size: candidate.size, kernel_reserve: u64::from(p) };
        let mut store = Numbers(candidate.free);
        let charges = quota::ChargeSet::of(&store, &requester, &target);
        if let Ok(charged) = quota::charge(&mut store, &charges, u64::from(n)) {
            quota::uncharge(&mut store, charged);
        }
        candidate.free = store.0 ^ quota::reserved_for_others(&store, &requester, &target).0;
        shadowed ^= rule_effect::kernel_reserve(admin, function).unwrap_or(5);
    }
    for (at, rule) in admin.iter().enumerate() {
        shadowed ^= rule::shadowed(admin, at).map_or(0, |(_, before)| before as u64);
        shadowed ^= (rule.check().is_ok() ^ rule.check_file_rule().is_err()) as u64;
    }
    shadowed ^= rule::RuleName::new(text.as_bytes()).map_or(1, |name| name.as_str().len() as u64);
    shadowed ^= rule::RuleName::ordered(text.as_bytes()).is_some() as u64;
    shadowed ^= rule_text::device(text).is_some() as u64 ^ rule_text::bytes(text).unwrap_or(3);
    shadowed ^= rule_text::id(text).flatten().map_or(0, u64::from);
    shadowed ^= rule::Action::parse(text).is_some() as u64 ^ rule::Beneficiary::parse(text).is_some() as u64;
    shadowed ^= path::PathClass::parse(text).map_or(0, |class| u64::from(class.as_raw()));
    for ((at, candidate), ranked) in path::indexed(candidates).zip(ranked.iter_mut()) {
        *ranked = placement::rank(request, at, candidate);
    }
    ranking::group(ranked, request.is_by_load());
    let fit = |ranked: &ranking::RankedProvider| {
        let has = ranking::Capacity { free: ranked.size ^ u64::from(o), largest: u64::from(m) };
        (has.free() > 9 && has.is_live()).then_some(has)
    };
    let best = ranking::best(ranked, p & 2 == 0, fit);
    shadowed ^= best.map_or(7, |best| u64::from(best.is_beyond(request.max_class)) ^ best.index as u64 ^ u64::from(best.place.is_avoided()) ^ u64::from(best.place.class_raw()) ^ best.equal as u64);
    let picks = [n as usize, m as usize, o as usize];
    let picks = picks.get(..(p & 3) as usize).unwrap_or_default();
    if let Some(split) = split::Split::new(u64::from(n) << (m & 63), u64::from(o), u64::from(p), u64::from(m)) {
        shadowed ^= split.share() ^ split.part(n as usize).0 ^ split.part(m as usize).1;
    }
    let link = path::link_bandwidth_of_status(n as u16).wrapping_add(path::link_bandwidth(m as u8, o as u8));
    let sum = ranges::check(ranges, u64::from(n) << (o & 63), u64::from(p)).unwrap_or(1);
    let joined = ranges.iter().copied().reduce(|a, b| a.join(b).unwrap_or(b)).map_or(0, |r| r.size);
    (
        placement::explain(request, candidates, picks, m as usize, verdicts),
        path::classify(ports, n as usize, m as usize, path::Between { numa_distance: o, forwards: (p & 2 == 0).then_some(p & 1 == 0) }),
        path::host_bridge_id(p, o as u8) ^ u64::from(link) ^ sum ^ joined ^ shadowed,
        path::PathClass::from_raw(p),
        path::PortKind::from_pcie_type((n > 4).then_some(m as u8), o > 9),
    )
}
"#;

/// The files under test.
const FILES: [&str; 11] = [
    "distance",
    "path",
    "placement",
    "quota",
    "ranges",
    "ranking",
    "rule",
    "rule_effect",
    "rule_text",
    "split",
    "verdict",
];

/// Compiles the files under test with `body`. Returns whether the object refers to the panic functions.
fn panics(body: &str) -> bool {
    let rust = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../rust");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = folder.path().join("entry.rs");
    let object = folder.path().join("entry.o");
    let mut text = "#![no_std]\n#![allow(dead_code, private_interfaces)]\n".to_owned();
    text.push_str(&format!("#[path = {:?}]\nmod policy {{\n", rust.join("policy")));
    for name in FILES {
        text.extend(["pub mod ", name, ";\n"]);
    }
    text.push_str("}\n");
    text.push_str(&format!(
        "#[allow(unused_imports)]\nuse policy::{{{}}};\n",
        FILES.join(", ")
    ));
    text.push_str(body);
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
fn policy_code_contains_no_panic() {
    assert!(!panics(ENTRY_POINTS));
}

#[test]
fn panics_are_detected() {
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
