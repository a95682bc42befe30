// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the binary: usage errors, and a machine without the module.

use std::process::Command;

use assert_cmd::prelude::*;

fn run(args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("p2pmemctl").unwrap().args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn invalid_arguments_are_exit_code_2_with_a_reason() {
    let cases: [(&[&str], &str); 16] = [
        (&[], "Usage: p2pmemctl"),
        (&["frobnicate"], "unrecognized subcommand"),
        (&["alloc"], "<SIZE>"),
        (&["alloc", "16Q"], "such as 64K, 16M, or 1GiB"),
        (
            &["alloc", "4K", "--max-class", "XYZ"],
            "use one of DEV, SW, SWS, PHB, NODE, SYS",
        ),
        (
            &["alloc", "4K", "--device", "1", "--prefer", "2"],
            "cannot be used with",
        ),
        (&["alloc", "4K", "--fill", "256"], "specify a byte"),
        (&["publish", "03:00.0", "--bar", "6"], "6 is not in 0..6"),
        (&["events", "--timeout", "never"], "specify a number of seconds"),
        (&["publish"], "<DEVICE|--device <DEVICE>>"),
        (&["publish", "03:00.0", "--device", "03:00.0"], "cannot be used with"),
        (&["list", "--output", "WEIGHT"], "there is no column"),
        (&["explain", "4K", "--what-if", "--device", "1"], "cannot be used with"),
        (&["topo", "--svg", "-", "--list"], "cannot be used with"),
        (&["topo", "--svg", "-", "--rescan"], "cannot be used with"),
        (&["doctor", "--pair", "mlx5_0"], "2 values required"),
    ];
    for (args, words) in cases {
        let (code, out, err) = run(args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}");
        assert!(err.contains(words), "{args:?}: {err}");
    }
}

#[test]
fn without_the_module_the_error_has_a_remedy() {
    let (code, out, err) = run(&["list", "--dev-path", "/nonexistent/p2pmem"]);
    assert_eq!((code, out.as_str()), (1, ""));
    // If the kernel of this machine is too old for the module, the remedy says this first.
    let error = "p2pmemctl: cannot open /nonexistent/p2pmem: No such file or directory (ENOENT)\n  remedy: ";
    assert!(
        err.starts_with(error) && err.ends_with("load the module: modprobe p2pmem\n"),
        "{err}"
    );
    let (code, out, _) = run(&["list", "--dev-path", "/nonexistent/p2pmem", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["errno"]), (1, &2.into()));
}

#[test]
fn another_device_is_refused() {
    let (code, _, err) = run(&["list", "--dev-path", "/dev/null"]);
    assert_eq!(code, 1);
    assert!(err.contains("ENOTTY") && err.contains("remedy"), "{err}");
}

#[test]
fn doctor_works_on_any_machine() {
    let (code, out, _) = run(&["doctor", "--dev-path", "/nonexistent/p2pmem"]);
    assert_eq!(code, 1);
    // The module is missing on a machine for builds, and loaded on others.
    let fails = out.contains("FAIL   module") || out.contains("FAIL   device");
    assert!(fails && out.contains("iommu"), "{out}");
}

#[test]
fn the_variable_selects_the_device_file() {
    let output = Command::cargo_bin("p2pmemctl")
        .unwrap()
        .arg("list")
        .env("P2PMEM_DEV_PATH", "/nonexistent/other")
        .output()
        .unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.contains("cannot open /nonexistent/other"), "{err}");
}

#[test]
fn colors_are_for_terminals() {
    let colored = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = Command::cargo_bin("p2pmemctl").unwrap();
        command
            .args(["list", "--list-columns"])
            .args(args)
            .env_remove("NO_COLOR")
            .env_remove("CLICOLOR_FORCE");
        let output = command.envs(variables.iter().copied()).output().unwrap();
        String::from_utf8(output.stdout).unwrap().contains('\u{1b}')
    };
    // The output is a pipe.
    assert!(!colored(&[], &[]));
    assert!(colored(&[], &["--color", "always"]));
    assert!(colored(&[("CLICOLOR_FORCE", "1")], &[]));
    assert!(!colored(&[("NO_COLOR", "1")], &[]));
    assert!(!colored(&[("CLICOLOR_FORCE", "1")], &["--color", "never"]));
}

#[test]
fn the_program_answers_shells() {
    let mut command = Command::cargo_bin("p2pmemctl").unwrap();
    command
        .env("COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", "1")
        .env("_CLAP_IFS", "\n");
    let output = command.args(["--", "p2pmemctl", "unp"]).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "unpublish");
}
