// SPDX-License-Identifier: MIT OR Apache-2.0

//! The man page p2pmem.toml(5) against the program: it lists all keys and no others, and its example is a valid file.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use assert_cmd::prelude::*;

fn page() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Documentation/man/p2pmem.toml.5");
    std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

/// Runs `p2pmemctl rules test --file` on a text.
fn test_file(text: &str) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file.toml");
    std::fs::write(&file, text).unwrap();
    let mut command = Command::cargo_bin("p2pmemctl").unwrap();
    let output = command.args(["rules", "test", "--file"]).arg(&file).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// Returns the keys of a table that the parser names when it finds an unknown one.
fn keys_of_the_parser(table: &str) -> BTreeSet<String> {
    let (fine, said) = test_file(&format!("[[{table}]]\nno_such_key = 1\n"));
    let (_, expected) = said.split_once("expected one of ").unwrap_or_else(|| panic!("{said}"));
    assert!(!fine);
    let line = expected.lines().next().unwrap();
    line.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Returns the keys that the page describes in the section of a table.
fn keys_of_the_page(table: &str) -> BTreeSet<String> {
    let page = page();
    let (_, section) = page.split_once(&format!(".SH [[{table}]]\n")).unwrap();
    let section = section.split("\n.SH ").next().unwrap();
    let tags = section.split("\n.TP\n").skip(1);
    let key = |tag: &str| {
        let (_, line) = tag.split_once(' ').unwrap();
        line.trim_start_matches('"').split(' ').next().unwrap().to_owned()
    };
    tags.map(key).collect()
}

#[test]
fn the_page_has_the_keys_of_the_parser() {
    for table in ["publish", "rule"] {
        let keys = keys_of_the_parser(table);
        assert!(keys.len() > 5, "{keys:?}");
        assert_eq!(keys_of_the_page(table), keys, "{table}");
    }
}

#[test]
fn the_example_is_a_valid_file() {
    let page = page();
    let (_, example) = page.split_once(".EX\n").unwrap();
    let (example, _) = example.split_once("\n.EE").unwrap();
    let (fine, said) = test_file(&example.replace("\\-", "-"));
    assert!(fine && said.contains("2 rules are well-formed"), "{said}");
}
