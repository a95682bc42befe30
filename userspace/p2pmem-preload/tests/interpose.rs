// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the preload library with a C program: which calls it translates or forwards, and which messages it prints.

use std::path::Path;
use std::process::Command;

use p2pmem_near::{Refused, Registered, Snapshot, Total};

mod build;
use build::{cc, in_sandbox, shim};

#[test]
fn a_c_program_s_registrations_are_translated() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let uapi = here.join("../../../include/uapi");
    let dir = tempfile::tempdir().unwrap();
    let probe = dir.path().join("probe.c");
    std::fs::write(&probe, "#include <infiniband/verbs.h>\n").unwrap();
    if !cc(&["-fsyntax-only"], &[&probe]) {
        assert!(
            !in_sandbox(),
            "in the sandbox this test must run, but there is no cc or no infiniband/verbs.h"
        );
        eprintln!("skipped: there is no cc or no infiniband/verbs.h");
        return;
    }
    let library = dir.path().join("libibverbs.so.1");
    let script = format!("-Wl,--version-script={}", here.join("fake_verbs.map").display());
    let flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g"];
    assert!(cc(
        &[
            &flags[..],
            &["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", &script, "-o"]
        ]
        .concat(),
        &[&library, &here.join("fake_verbs.c")]
    ));
    let program = dir.path().join("program");
    let include = format!("-I{}", uapi.display());
    // -rdynamic exports the program's open() and ioctl(), so that the shim calls them.
    assert!(cc(
        &[&flags[..], &["-pthread", "-rdynamic", &include, "-o"]].concat(),
        &[&program, &here.join("program.c"), &library]
    ));

    let counters = dir.path().join("counters");
    std::fs::write(&counters, Snapshot::zero().to_bytes()).unwrap();
    let out = Command::new(&program)
        .env("P2PMEM_REPORT", &counters)
        .env("LD_LIBRARY_PATH", dir.path())
        .env("LD_PRELOAD", shim())
        .env("P2PMEM_PRELOAD_LOG", "1")
        .output()
        .unwrap();
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success(), "{}: {said}", out.status);
    let lines: Vec<_> = said.lines().collect();
    assert!(lines.iter().all(|line| line.starts_with("p2pmem_preload: ")), "{said}");
    let wanted = [
        "4096 bytes at",
        "registered as a dma-buf, lkey",
        "8192 bytes at",
        "ibv_reg_mr_iova2() of 65536 bytes",
        "ibv_reg_mr_iova() of 8 bytes",
        "dma-buf registration failed: not supported (EOPNOTSUPP): the NIC's driver cannot register dma-bufs",
        "the NIC cannot reach the provider (EHOSTUNREACH): mlx5_0 cannot reach 0000:03:00.0",
        "access flags 0x40 are not possible",
        "cannot be exported: the provider was removed (ENODEV): buffer 1 was revoked",
    ];
    for (line, wanted) in lines.iter().zip(wanted) {
        assert!(
            line.contains(wanted) && line.contains("on mlx5_0"),
            "{wanted:?} is not in {line:?}: {said}"
        );
    }
    assert_eq!(lines.len(), wanted.len(), "{said}");

    let counters = std::fs::read(counters).unwrap();
    let counters = Snapshot::from_bytes(counters.as_slice().try_into().unwrap()).unwrap();
    let total = |count, bytes| Total { count, bytes };
    // Two pages, 16 pages, 8 bytes, and one page by each registration of the threads and the child.
    let dmabufs = total(3 + 4001, 2 * 4096 + 16 * 4096 + 8 + 4001 * 4096);
    assert_eq!(counters.registrations(Registered::Dmabuf), dmabufs);
    assert_eq!(
        counters.registrations(Registered::OtherMemory),
        total(4, 100 + 100 + 2 * 4096 + 4096)
    );
    assert_eq!(counters.refused(Refused::Registration), 4);
}

#[test]
fn a_plugin_s_own_libibverbs_gets_the_calls_of_the_plugin() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let dir = tempfile::tempdir().unwrap();
    let script = format!("-Wl,--version-script={}", here.join("fake_verbs.map").display());
    let compile = |name: &str, flags: &[&str], from: &[&Path]| {
        let out = dir.path().join(name);
        let common = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g"];
        let from: Vec<&Path> = [&[out.as_path()], from].concat();
        cc(&[&common[..], flags, &["-o"]].concat(), &from).then_some(out)
    };
    let library = |name: &str| {
        let soname = format!("-Wl,-soname,{name}");
        // Each library records calls in its own variable.
        let flags = ["-shared", "-fPIC", "-Wl,-Bsymbolic", &soname, &script];
        compile(name, &flags, &[&here.join("fake_verbs.c")])
    };
    let Some(system) = library("libibverbs.so.1") else {
        assert!(
            !in_sandbox(),
            "in the sandbox this test must run, but there is no cc or no infiniband/verbs.h"
        );
        eprintln!("skipped: there is no cc or no infiniband/verbs.h");
        return;
    };
    let copy = library("libibverbs-0123abcd.so.1.14").unwrap();
    let program = here.join("bundled.c");
    let plugin = compile("plugin.so", &["-shared", "-fPIC", "-DPLUGIN"], &[&program, &copy]).unwrap();
    let program = compile("bundled", &[], &[&program]).unwrap();
    for arguments in [&[&plugin][..], &[&plugin, &system]] {
        let out = Command::new(&program)
            .args(arguments)
            .env("LD_LIBRARY_PATH", dir.path())
            .env("LD_PRELOAD", shim())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{arguments:?}: {}: {said}", out.status);
    }
}

#[test]
fn only_the_replaced_functions_are_exported() {
    let out = match Command::new("nm").args(["-D", "--defined-only"]).arg(shim()).output() {
        Ok(out) if out.status.success() => String::from_utf8(out.stdout).unwrap(),
        _ => {
            assert!(!in_sandbox(), "in the sandbox there is nm");
            return;
        }
    };
    let mut names: Vec<_> = out.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "ibv_reg_mr",
            "ibv_reg_mr_iova",
            "ibv_reg_mr_iova2",
            "ibv_rereg_mr",
            "mmap",
            "mmap64"
        ]
    );
}
