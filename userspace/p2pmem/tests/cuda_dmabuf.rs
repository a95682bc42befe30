// SPDX-License-Identifier: MIT OR Apache-2.0

//! The example cuda_dmabuf without a GPU: with a library in place of libcuda.so.1 that a C program defines.
//!
//! Cargo builds the example with the feature `fake`, so a memory file of the right name stands for a dma-buf.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The functions that the example calls. The environment variable CASE selects what fails. Each call that ends something
/// is printed, so that the test sees whether the example ends all that it begins.
const CUDA: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int is(const char *name) { return !strcmp(getenv("CASE"), name); }

int cuInit(unsigned flags) { return flags ? 1 : is("no-gpu") ? 100 : is("unknown") ? 12345 : 0; }
int cuGetErrorString(int code, const char **text)
{
	*text = code == 100 ? "no CUDA-capable device is detected" : code == 1 ? "invalid argument" : code == 2 ? "out of memory" : NULL;
	return *text ? 0 : 1;
}
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal; }
int cuDeviceGetName(char *name, int len, int device) { snprintf(name, len, "Test GPU"); return device != 7; }
int cuDeviceGetPCIBusId(char *name, int len, int device) { snprintf(name, len, "FFFF:FF:1F.7"); return device != 7; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
	*value = attribute == 124 && !is("no-dma-buf");
	return device != 7;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &is; return device != 7; }
int cuDevicePrimaryCtxRelease_v2(int device) { printf("context released\n"); fflush(stdout); return device != 7; }
int cuCtxSetCurrent(void *context) { return context != (void *)&is; }
int cuMemAlloc_v2(unsigned long long *address, size_t size) { *address = 0x7f0000000000; return is("full") ? 2 : size != 4 << 20; }
int cuMemFree_v2(unsigned long long address) { printf("memory freed\n"); fflush(stdout); return address != 0x7f0000000000; }
int cuPointerSetAttribute(const void *value, int attribute, unsigned long long address)
{
	return *(const unsigned *)value != 1 || attribute != 6 || address != 0x7f0000000000;
}
#ifndef OLD
int cuMemGetHandleForAddressRange(void *handle, unsigned long long address, size_t size, int type, unsigned long long flags)
{
	if (address != 0x7f0000000000 || type != 1 || flags || is("refused"))
		return 1;
	*(int *)handle = memfd_create(is("other") ? "other" : "p2pmem-fake-dmabuf", MFD_CLOEXEC);
	return ftruncate(*(int *)handle, size);
}
#endif
"#;

/// Compiles the library in a new folder. None if there is no C compiler.
fn library(more: &[&str]) -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("cuda.c");
    std::fs::write(&source, CUDA).unwrap();
    let out = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .arg(folder.path().join("libcuda.so.1"))
        .arg(&source)
        .args(more)
        .output();
    let out = match out {
        Ok(out) => out,
        Err(error) if !Path::new("/src").exists() => {
            eprintln!("not tested: cc: {error}");
            return None;
        }
        Err(error) => panic!("cc: {error}"),
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(folder)
}

/// Runs the example with the libraries in a folder. Cargo builds examples before it runs tests.
fn run(libraries: &Path, case: &str, arguments: &[&str]) -> Output {
    let deps = std::env::current_exe().unwrap();
    let program: PathBuf = deps.parent().unwrap().with_file_name("examples").join("cuda_dmabuf");
    let mut command = Command::new(&program);
    command
        .env("LD_LIBRARY_PATH", libraries)
        .env("CASE", case)
        .args(arguments);
    command
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}: run `cargo test -p p2pmem`", program.display()))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The text of a run that failed. The exit code is 1, and standard error has nothing else.
fn failure(out: &Output) -> String {
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    text(&out.stderr)
}

#[test]
fn without_libcuda_the_example_ends_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    // The loader reports an error for this file, and does not search for a libcuda.so.1 elsewhere.
    std::fs::write(folder.path().join("libcuda.so.1"), "not a library").unwrap();
    let out = run(folder.path(), "", &[]);
    let said = failure(&out);
    assert!(
        said.starts_with("cuda_dmabuf: CUDA is not installed: ") && said.ends_with("; install NVIDIA's driver\n"),
        "{said}"
    );
    assert_eq!((said.lines().count(), text(&out.stdout)), (1, String::new()));
}

#[test]
fn with_an_old_libcuda_the_example_names_the_function() {
    let Some(folder) = library(&["-DOLD"]) else { return };
    let said = failure(&run(folder.path(), "", &[]));
    assert!(
        said.contains("cuMemGetHandleForAddressRange") && said.contains("update NVIDIA's driver"),
        "{said}"
    );
}

#[test]
fn what_cuda_refuses_is_reported_and_released() {
    let Some(folder) = library(&[]) else { return };
    let released = "context released\n";
    let all = &format!("memory freed\n{released}");
    for (case, wanted, ended) in [
        (
            "no-gpu",
            "cuInit() failed: no CUDA-capable device is detected (CUDA error 100)",
            "",
        ),
        ("unknown", "cuInit() failed: unknown error (CUDA error 12345)", ""),
        (
            "no-dma-buf",
            "the GPU's driver does not export dma-bufs: use NVIDIA's open kernel modules and Linux 5.12 or later",
            released,
        ),
        ("full", "cuMemAlloc() failed: out of memory (CUDA error 2)", released),
        (
            "refused",
            "cuMemGetHandleForAddressRange() failed: invalid argument (CUDA error 1)",
            all,
        ),
    ] {
        let out = run(folder.path(), case, &[]);
        assert_eq!(failure(&out), format!("cuda_dmabuf: {wanted}\n"), "{case}");
        let said = text(&out.stdout);
        let said = said.strip_prefix("GPU: Test GPU at ffff:ff:1f.7\n").unwrap_or(&said);
        assert_eq!(said, ended, "{case}");
    }
    let out = run(folder.path(), "other", &[]);
    let said = failure(&out);
    assert!(
        said.contains("is not a dma-buf\npass the descriptor") && text(&out.stdout).ends_with(all),
        "{said}"
    );
}

#[test]
fn with_a_gpu_the_example_prints_the_dma_buf_and_frees_everything() {
    let Some(folder) = library(&[]) else { return };
    let out = run(folder.path(), "", &["no-such-nic"]);
    let said = text(&out.stdout);
    assert_eq!(
        said,
        "GPU: Test GPU at ffff:ff:1f.7\n\
         dma-buf: 4 MiB, exporter unknown\n\
         memory freed\n\
         context released\n"
    );
    let said = failure(&out);
    assert!(
        said.starts_with("cuda_dmabuf: \"no-such-nic\" is not the name of a PCI device"),
        "{said}"
    );
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        return;
    }
    let out = run(folder.path(), "", &[]);
    assert!(out.status.success(), "{out:?}");
    let said = text(&out.stdout);
    assert!(
        said.contains("registration: none, because /sys/class/infiniband has no RDMA NIC\nmemory freed\n"),
        "{said}"
    );
}
