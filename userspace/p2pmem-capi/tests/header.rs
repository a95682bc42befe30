// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the C library. Fail if cbindgen creates another header than the committed one, or if the installed files do
//! not compile in C and C++, link, or run by pkg-config.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns whether the test runs in the project's sandbox, which has all tools, so that no test may be skipped.
fn in_sandbox() -> bool {
    Path::new("/etc/p2pmem-kernel").exists()
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a tool. Returns `None` if the tool is not installed, which fails the test in the sandbox.
fn tool(command: &mut Command) -> Option<Output> {
    match command.output() {
        Ok(out) => Some(out),
        Err(error) => {
            assert!(!in_sandbox(), "in the sandbox {command:?} must run, but {error}");
            eprintln!("skipped: {command:?}: {error}");
            None
        }
    }
}

fn text(out: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    )
}

#[test]
fn header_matches_source() {
    let Some(version) = tool(Command::new("cbindgen").arg("--version")) else {
        return;
    };
    let out = Command::new(here().join("generate"))
        .arg("--stdout")
        .output()
        .expect("run the script `generate`");
    assert!(out.status.success(), "{}", text(&out));
    let committed = std::fs::read_to_string(here().join("include/p2pmem.h")).expect("include/p2pmem.h");
    let fresh = String::from_utf8(out.stdout).expect("cbindgen writes UTF-8");
    if fresh != committed {
        let first = fresh.lines().zip(committed.lines()).position(|(a, b)| a != b);
        assert!(
            !in_sandbox(),
            "include/p2pmem.h is out of date from line {:?} on: run p2pmem-capi/generate",
            first.map(|n| n + 1)
        );
        eprintln!("skipped: another cbindgen: {}", text(&version));
    }
}

/// Returns the directory of the library, which cargo builds beside this test.
fn build_folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    let found = [folder, folder.parent().unwrap()]
        .into_iter()
        .find(|dir| dir.join("libp2pmem_capi.so").exists());
    found.expect("libp2pmem_capi.so beside the test").to_owned()
}

#[test]
fn installed_library_compiles_links_and_runs() {
    let dir = tempfile::tempdir().unwrap();
    let build = dir.path().join("build");
    std::fs::create_dir(&build).unwrap();
    std::fs::copy(
        build_folder().join("libp2pmem_capi.so"),
        build.join("libp2pmem_capi.so"),
    )
    .unwrap();
    // The preload shim has its own tests; here the file only needs to exist.
    std::fs::write(build.join("libp2pmem_preload.so"), "").unwrap();
    let prefix = dir.path().join("usr");
    let out = Command::new(here().join("install"))
        .args([&build, &prefix])
        .env_remove("DESTDIR")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out));

    let pkg_config = |what: &str| {
        let mut command = Command::new("pkg-config");
        command
            .args([what, "p2pmem"])
            .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
        let out = tool(&mut command)?;
        assert!(out.status.success(), "{}", text(&out));
        Some(
            String::from_utf8(out.stdout)
                .unwrap()
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>(),
        )
    };
    let (Some(cflags), Some(libs), Some(version)) =
        (pkg_config("--cflags"), pkg_config("--libs"), pkg_config("--modversion"))
    else {
        return;
    };
    assert_eq!(version, [env!("CARGO_PKG_VERSION")]);

    // The header of the ABI is included too, to check that the names do not conflict.
    let uapi = format!("-I{}", here().join("../../include/uapi").display());
    let compile = |compiler: &str, standard: &str, file: &str, more: &[String]| {
        let program = dir.path().join(file);
        std::fs::write(&program, PROGRAM).unwrap();
        let mut compile = Command::new(compiler);
        compile.args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", &uapi]);
        let out = tool(compile.arg(&program).args(&cflags).args(more))?;
        assert!(out.status.success(), "{compiler}: {}", text(&out));
        Some(())
    };
    compile("c++", "-std=c++17", "program.cc", &["-fsyntax-only".into()]);
    let binary = dir.path().join("program");
    let link = [&["-o".into(), binary.display().to_string()], &libs[..]].concat();
    if compile("cc", "-std=c99", "program.c", &link).is_some() {
        let out = Command::new(&binary)
            .env("LD_LIBRARY_PATH", prefix.join("lib"))
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", text(&out));
        assert_eq!(
            String::from_utf8_lossy(&out.stdout),
            format!("{}\n", env!("CARGO_PKG_VERSION"))
        );
    }
    // The examples need the module to run, which the tests in VMs do. Here they are compiled only.
    let mut compile = Command::new("cc");
    compile
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"])
        .args(&cflags)
        .args(["alloc.c", "share.c"].map(|name| here().join("examples").join(name)));
    if in_sandbox() {
        let out = compile.output().unwrap();
        assert!(out.status.success(), "{}", text(&out));
    }
    let needed = tool(Command::new("readelf").arg("-d").arg(prefix.join("lib/libp2pmem.so")));
    if let Some(needed) = needed {
        let needed = text(&needed);
        assert!(needed.contains("soname: [libp2pmem.so.0]"), "{needed}");
        assert!(
            !needed.contains("libibverbs"),
            "a program that does not use RDMA must run without libibverbs: {needed}"
        );
    }
}

/// Checks without the module that every function refuses invalid arguments with the right errno.
const PROGRAM: &str = r#"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#ifndef __cplusplus /* it has a field named class */
#include <linux/p2pmem.h>
#endif
#include <p2pmem.h>

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "line %d: failed: %s; last error: %s\n", __LINE__, #what, p2pmem_last_error()); return 1; } } while (0)

int main(void)
{
	p2pmem_dev *dev = NULL;
	p2pmem_buf *buf = NULL;
	p2pmem_mapping *map = NULL;
	p2pmem_reg *reg = NULL;
	p2pmem_dmabuf *dmabuf = NULL;
	p2pmem_want want;

	memset(&want, 0, sizeof(want));
	CHECK(!strcmp(p2pmem_last_error(), "") && !strcmp(p2pmem_last_remedy(), ""));
	CHECK(p2pmem_open("/nonexistent/p2pmem", &dev) == -ENOENT && !dev);
	CHECK(strstr(p2pmem_last_error(), "/nonexistent/p2pmem") && strstr(p2pmem_last_remedy(), "modprobe"));
	CHECK(p2pmem_open("/dev/null", &dev) == -ENOTTY && !dev);
	CHECK(p2pmem_open(NULL, NULL) == -EINVAL && !strcmp(p2pmem_last_error(), "out is NULL"));
	CHECK(p2pmem_open_backend(9, &dev) == -EINVAL && !dev && strstr(p2pmem_last_error(), "9 is not a backend"));
	CHECK(p2pmem_open_backend(P2PMEM_BACKEND_SYSFS, NULL) == -EINVAL && p2pmem_backend(NULL) == -EINVAL);
	CHECK(p2pmem_capabilities(P2PMEM_BACKEND_VFIO) == (P2PMEM_CAN_MAP | P2PMEM_CAN_DMABUF) && p2pmem_capabilities(0) == -EINVAL);
	CHECK(p2pmem_dmabuf_open(-1, NULL, &dmabuf) == -EBADF && p2pmem_dmabuf_open(0, "mlx5_0", &dmabuf) == -EINVAL && !dmabuf);
	CHECK(p2pmem_dmabuf_open(0, NULL, &dmabuf) == -EINVAL && strstr(p2pmem_last_error(), "not a dma-buf"));
	CHECK(strstr(p2pmem_last_remedy(), "cuMemGetHandleForAddressRange()"));
	CHECK(!p2pmem_dmabuf_size(NULL) && p2pmem_dmabuf_exporter(NULL, NULL, 0) == -EINVAL && p2pmem_dmabuf_path(NULL, "nvme0") == -EINVAL);
	CHECK(p2pmem_dmabuf_register(NULL, NULL, 0, 0, 0, &reg) == -EINVAL);
	p2pmem_dmabuf_close(NULL);
	CHECK(p2pmem_fd(NULL) == -EINVAL && p2pmem_list(NULL, NULL, 0) == -EINVAL);
	CHECK(p2pmem_alloc(NULL, &want, &buf) == -EINVAL && !strcmp(p2pmem_last_error(), "dev is NULL"));
	CHECK(p2pmem_map(NULL, &map) == -EINVAL && p2pmem_flush(NULL) == -EINVAL);
	CHECK(p2pmem_export(NULL, 0, 0, 0) == -EINVAL && p2pmem_register(NULL, NULL, 0, 0, 0, &reg) == -EINVAL);
	CHECK(p2pmem_explain(NULL, &want, NULL, 0) == -EINVAL && p2pmem_explain_last(NULL, NULL, 0) == -EINVAL);
	CHECK(!p2pmem_buf_size(NULL) && !p2pmem_buf_provider(NULL) && p2pmem_buf_bar_offset(NULL) == UINT64_MAX);
	CHECK(!p2pmem_map_addr(NULL) && !p2pmem_map_len(NULL));
	CHECK(!p2pmem_reg_lkey(NULL) && !p2pmem_reg_rkey(NULL) && !p2pmem_reg_addr(NULL) && !p2pmem_reg_len(NULL));
	CHECK(!p2pmem_reg_method(NULL) && !p2pmem_reg_mr(NULL) && !p2pmem_deregister(NULL));
	p2pmem_unmap(NULL);
	p2pmem_free(NULL);
	p2pmem_close(NULL);
	printf("%s\n", p2pmem_version());
	return 0;
}
"#;
