// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of `p2pmemctl run`: exit codes, refusals before the command starts, and the report, with the preload shim and a C
//! program that maps memory of a fake module.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use p2pmem::fake::Fake;
use p2pmemctl::{Environment, SCHEMA};
use serde_json::{json, Value};

mod common;

/// Returns the shim, which cargo builds in the folder of this test.
fn shim() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().join("libp2pmem_preload.so");
    assert!(path.exists(), "no {}", path.display());
    path
}

/// Runs `p2pmemctl run` with these options and command, near the drive of the example machine. Returns the exit code and
/// the output.
fn run(options: &[&OsStr], command: &[&OsStr]) -> (u8, String) {
    let shim = shim();
    let fixed = ["p2pmemctl", "run", "--near", "0000:04:00.0", "--preload"].map(OsStr::new);
    let args = fixed.into_iter().chain([shim.as_os_str()]);
    let args = args.chain(options.iter().copied()).chain([OsStr::new("--")]);
    run_args(args.chain(command.iter().copied()))
}

fn run_args<'a>(args: impl Iterator<Item = &'a OsStr>) -> (u8, String) {
    let fake = Fake::example();
    let environment = Environment {
        root: "/".into(),
        open: Box::new(move || Ok(fake.device())),
    };
    let (code, out, _) = common::run(&environment, args);
    (code, out)
}

fn shell(script: &str) -> u8 {
    run(&[], &["/bin/sh", "-c", script].map(OsStr::new)).0
}

#[test]
fn the_exit_code_is_that_of_the_command() {
    assert_eq!(shell("exit 0"), 0);
    assert_eq!(shell("exit 77"), 77);
    assert_eq!(shell("kill -KILL $$"), 137);
}

#[test]
fn the_command_has_the_environment_of_the_shim() {
    let script = format!(
        "[ \"$P2PMEM_NEAR\" = 0000:04:00.0 ] && [ -n \"$P2PMEM_REPORT\" ] && [ \"$LD_PRELOAD\" = {} ] && [ \"$1\" = -x ]",
        shim().canonicalize().unwrap().display()
    );
    let (code, _) = run(&[], &["/bin/sh", "-c", &script, "sh", "-x"].map(OsStr::new));
    assert_eq!(code, 0);
}

#[test]
fn commands_that_cannot_be_executed_have_the_codes_of_a_shell() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    fs::write(&data, "").unwrap();
    assert_eq!(run(&[], &[OsStr::new("p2pmem-no-such-program")]).0, 127);
    assert_eq!(run(&[], &[dir.path().join("missing").as_os_str()]).0, 127);
    assert_eq!(run(&[], &[data.as_os_str()]).0, 126);
    assert_eq!(run(&[], &[dir.path().as_os_str()]).0, 126);
}

/// Fails unless the options prevent the command with exit code 125, and with a message that contains `why`.
fn not_started(options: &[&str], why: &str) {
    let dir = tempfile::tempdir().unwrap();
    let started = dir.path().join("started");
    let options: Vec<_> = options.iter().copied().map(OsStr::new).collect();
    let args = ["p2pmemctl", "--json", "run"]
        .map(OsStr::new)
        .into_iter()
        .chain(options.iter().copied());
    let command = ["--", "/bin/touch"]
        .map(OsStr::new)
        .into_iter()
        .chain([started.as_os_str()]);
    let (code, out) = run_args(args.chain(command));
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 125, "{options:?}: {out}");
    assert!(out["error"].as_str().unwrap().contains(why), "{options:?}: {out}");
    assert!(!started.exists(), "{options:?}: the command was started");
}

#[test]
fn a_request_that_cannot_be_served_starts_nothing() {
    let shim = shim();
    let shim = shim.to_str().unwrap();
    not_started(&["--near", "nodevice7", "--preload", shim], "no such device");
    not_started(
        &["--near", "0000:0a:00.0", "--preload", shim],
        "no memory near 0000:0a:00.0: ",
    );
    not_started(
        &["--near", "04:00.0", "--preload", "/nonexistent.so"],
        "cannot find the preload shim",
    );
    let unwritable = [
        "--near",
        "04:00.0",
        "--preload",
        shim,
        "--report",
        "/nonexistent/report",
    ];
    not_started(&unwritable, "cannot create /nonexistent/report");
}

/// Builds the program and the fake module of the shim's tests in a folder. Returns `None` if there is no C compiler.
fn program(dir: &Path) -> Option<PathBuf> {
    let userspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let sources = userspace.join("p2pmem-preload/tests");
    let include = format!("-I{}", userspace.join("../include/uapi").display());
    let (library, program) = (dir.join("libfake.so"), dir.join("near"));
    let cc = |arguments: &[&str], files: &[&Path]| {
        Command::new("cc")
            .args(["-std=gnu11", &include])
            .args(arguments)
            .args(files)
            .status()
    };
    let library_options = ["-shared", "-fPIC", "-Wl,-soname,libfake.so", "-o"];
    match cc(&library_options, &[&library, &sources.join("fake_module.c")]) {
        Ok(status) => assert!(status.success()),
        Err(error) => {
            let in_sandbox = Path::new("/etc/p2pmem-kernel").exists();
            assert!(!in_sandbox, "in the sandbox there is a C compiler: {error}");
            eprintln!("skipped: there is no cc");
            return None;
        }
    }
    let options = ["-pthread", "-Wl,-rpath,$ORIGIN", "-o"];
    assert!(cc(&options, &[&program, &sources.join("near.c"), &library])
        .unwrap()
        .success());
    Some(program)
}

#[test]
fn the_report_has_what_the_command_took() {
    let dir = tempfile::tempdir().unwrap();
    let Some(program) = program(dir.path()) else {
        return;
    };
    let report = dir.path().join("report.json");
    let run = |command: &[&OsStr]| -> (u8, Value) {
        let (code, out) = run(&[OsStr::new("--report"), report.as_os_str()], command);
        assert_eq!(out, "", "standard output belongs to the command");
        (code, serde_json::from_slice(&fs::read(&report).unwrap()).unwrap())
    };
    let program = program.as_os_str();
    // The fake module of the program allocates in provider 3, which is a drive of the example machine.
    let buffers = |count, bytes| {
        let class = "same-switch";
        json!([{"provider": 3, "addr": "0000:05:00.0", "class": class, "count": count, "bytes": bytes}])
    };
    let none = json!({"count": 0, "bytes": 0});
    let (code, summary) = run(&[program, OsStr::new("one")]);
    assert_eq!(
        (code, &summary),
        (
            0,
            &json!({
                "schema": SCHEMA,
                "command": program.to_str(),
                "exit_code": 0,
                "signal": null,
                "near": [{"addr": "0000:04:00.0", "name": "0000:04:00.0"}],
                "programs": 1,
                "buffers": buffers(1, 8192),
                "registrations": {"dmabuf": none, "other_memory": none},
                "refused": {"mappings": 0, "registrations": 0},
                "removed_providers": [],
            })
        )
    );

    // Programs that the command executes count, and a killed command has a report.
    let script = "\"$0\" one && \"$0\" exec && \"$0\" refused; kill -KILL $$";
    let (code, summary) = run(&["/bin/sh", "-c", script]
        .map(OsStr::new)
        .into_iter()
        .chain([program])
        .collect::<Vec<_>>());
    assert_eq!(code, 137);
    assert_eq!((&summary["exit_code"], &summary["signal"]), (&Value::Null, &9.into()));
    // The shell, one, exec and then one in the same process, and refused.
    assert_eq!(summary["programs"], 5);
    assert_eq!(summary["buffers"], buffers(3, 3 * 8192));
    assert_eq!(summary["refused"], json!({"mappings": 4, "registrations": 0}));
}

#[test]
fn an_unwritable_report_is_an_error_unless_the_command_failed() {
    let report = ["--report", "/dev/full"].map(OsStr::new);
    assert_eq!(run(&report, &[OsStr::new("/bin/true")]).0, 125);
    assert_eq!(run(&report, &["/bin/sh", "-c", "exit 3"].map(OsStr::new)).0, 3);
}
