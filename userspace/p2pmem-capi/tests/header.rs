// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the C library. Fail if cbindgen creates another header than the committed one, or if the installed files do
//! not compile in C and C++, link, or run by pkg-config.

mod tools;

use tools::{check_header, here, Installed};

#[test]
fn header_matches_source() {
    check_header("p2pmem.h");
}

#[test]
fn installed_library_compiles_links_and_runs() {
    // The preload shim has its own tests.
    let Some(installed) = Installed::new("libp2pmem_capi.so", &["libp2pmem_preload.so"], "p2pmem") else {
        return;
    };
    // The header of the ABI is included too, to check that the names do not conflict.
    let uapi = format!("-I{}", here().join("../../include/uapi").display());
    installed.check_program(PROGRAM, &[&uapi]);
    installed.check_examples(&["alloc.c", "share.c", "rdma_server.c", "rdma_client.c"]);
    installed.check_needed("libp2pmem.so");
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
