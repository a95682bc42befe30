// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of placement with a C program and a fake module: which mappings the shim places, what it counts, and which
//! messages it prints.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use p2pmem_near::{Refused, Registered, Snapshot, Total};

mod build;
use build::{cc, in_sandbox, shim};

/// The program and the fake module. `None` if there is no C compiler.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<(tempfile::TempDir, PathBuf)>> = OnceLock::new();
    let build = || {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
        let include = format!("-I{}", here.join("../../../include/uapi").display());
        let flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", &include];
        let dir = tempfile::tempdir().unwrap();
        let (library, program) = (dir.path().join("libfake.so"), dir.path().join("near"));
        if !cc(&["--version"], &[]) {
            assert!(!in_sandbox(), "in the sandbox this test must run, but there is no cc");
            eprintln!("skipped: there is no cc");
            return None;
        }
        let as_library = ["-shared", "-fPIC", "-Wl,-soname,libfake.so", "-o"];
        assert!(cc(
            &[&flags[..], &as_library].concat(),
            &[&library, &here.join("fake_module.c")]
        ));
        let as_program = ["-pthread", "-Wl,-rpath,$ORIGIN", "-o"];
        assert!(cc(
            &[&flags[..], &as_program].concat(),
            &[&program, &here.join("near.c"), &library]
        ));
        Some((dir, program))
    };
    PROGRAM
        .get_or_init(build)
        .as_ref()
        .map(|(_, program)| program.as_path())
}

/// Runs a test of the program. Returns the counters and the lines on standard error.
fn run(test: &str, near: Option<&str>) -> Option<(Snapshot, Vec<String>)> {
    let program = program()?;
    let counters = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(counters.path(), Snapshot::zero().to_bytes()).unwrap();
    let mut command = Command::new(program);
    command.arg(test).env("LD_PRELOAD", shim());
    command.env("P2PMEM_REPORT", counters.path()).env_remove("P2PMEM_NEAR");
    if let Some(near) = near {
        command.env("P2PMEM_NEAR", near);
    }
    let out = command.output().unwrap();
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success(), "{test}: {}: {said}", out.status);
    let content = std::fs::read(counters.path()).unwrap();
    let snapshot = Snapshot::from_bytes(content.as_slice().try_into().unwrap()).expect("counters");
    Some((snapshot, said.lines().map(str::to_owned).collect()))
}

/// Returns the buffers in the only table entry of the counters.
fn buffers(snapshot: &Snapshot) -> Total {
    let all: Vec<_> = snapshot.buffers().collect();
    let [one] = all.as_slice() else {
        panic!("all buffers are in one provider: {all:?}");
    };
    assert_eq!((one.provider, one.class), (3, p2pmem_sys::P2PMEM_PATH_SAME_SWITCH));
    one.total
}

#[test]
fn mappings_at_offset_0_are_placed_and_counted() {
    let Some((counters, lines)) = run("placed", Some("0000:03:00.0,04:00.1")) else {
        return;
    };
    assert_eq!(lines, [""; 0]);
    // Four pages, one page, one page; one page by each mapping of the threads and the child.
    let expected = Total {
        count: 2004,
        bytes: (4 + 1 + 1 + 2001) * 4096,
    };
    assert_eq!(buffers(&counters), expected);
    assert_eq!(counters.programs(), 1);
    assert_eq!(counters.refused(Refused::Mapping), 0);
    assert_eq!(counters.registrations(Registered::Dmabuf), Total::default());
}

#[test]
fn refused_mappings_fail_with_one_line_each() {
    let Some((counters, lines)) = run("refused", Some("0000:03:00.0")) else {
        return;
    };
    assert_eq!(
        lines,
        [
            "p2pmem_preload: mmap() of 8192 bytes near 0000:03:00.0: no free memory (ENOSPC): \
             0000:03:00.0 has 4096 of 8192 bytes free",
            "p2pmem_preload: mmap() of 8192 bytes near 0000:03:00.0: a quota is exceeded (EDQUOT)",
            "p2pmem_preload: mmap() of 4096 bytes near 0000:03:00.0: out of memory (ENOMEM): \
             the buffer cannot be mapped",
            "p2pmem_preload: mmap() of 4096 bytes near 0000:03:00.0: not permitted (EPERM)",
        ]
    );
    assert_eq!(counters.refused(Refused::Mapping), 4);
    assert_eq!(counters.buffers().count(), 0);
}

#[test]
fn an_unusable_device_fails_the_mapping() {
    let Some((counters, lines)) = run("unusable", Some("0000:03:00.0,nodevice7")) else {
        return;
    };
    assert_eq!(
        lines,
        [
            "p2pmem_preload: mmap() of 4096 bytes near 0000:03:00.0,nodevice7: P2PMEM_NEAR is not usable (ENODEV): \
             there is no device nodevice7"
        ]
    );
    assert_eq!(counters.refused(Refused::Mapping), 1);
}

#[test]
fn without_the_variable_the_module_chooses() {
    for near in [None, Some("")] {
        let Some((counters, lines)) = run("unset", near) else {
            return;
        };
        assert_eq!(lines, [""; 0]);
        assert_eq!((counters.programs(), counters.buffers().count()), (1, 0));
    }
}

#[test]
fn programs_that_the_command_executes_are_counted() {
    let Some((counters, lines)) = run("exec", Some("03:00.0")) else {
        return;
    };
    assert_eq!(lines, [""; 0]);
    assert_eq!(
        (counters.programs(), buffers(&counters)),
        (
            2,
            Total {
                count: 2,
                bytes: 4 * 4096
            }
        )
    );
}

#[test]
fn a_program_without_counters_reports_it_once() {
    let Some(program) = program() else {
        return;
    };
    let other = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(other.path(), [0; p2pmem_near::SIZE]).unwrap();
    for (path, why) in [(other.path(), "EINVAL"), (Path::new("/nonexistent"), "errno 2")] {
        let mut command = Command::new(program);
        command.arg("placed").env("LD_PRELOAD", shim());
        let out = command
            .env("P2PMEM_REPORT", path)
            .env("P2PMEM_NEAR", "03:00.0,04:00.1")
            .output()
            .unwrap();
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success(), "{said}");
        let begin = "p2pmem_preload: the summary of p2pmemctl run does not include this program: ";
        assert!(said.starts_with(begin) && said.contains(why), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    assert_eq!(std::fs::read(other.path()).unwrap(), [0; p2pmem_near::SIZE]);
}

#[test]
fn success_is_reported_on_request() {
    let Some(program) = program() else {
        return;
    };
    let mut command = Command::new(program);
    command
        .arg("one")
        .env("LD_PRELOAD", shim())
        .env("P2PMEM_PRELOAD_LOG", "1");
    let out = command.env("P2PMEM_NEAR", "0000:03:00.0").output().unwrap();
    assert!(out.status.success());
    assert_eq!(
        String::from_utf8(out.stderr).unwrap(),
        "p2pmem_preload: mmap() of 8192 bytes near 0000:03:00.0: 8192 bytes in provider 3, path class 2\n"
    );
}
