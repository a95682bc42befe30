// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the C library. Fail if cbindgen creates another header than the committed one, or if the installed files do
//! not compile in C and C++, link, or run by pkg-config.

#[path = "../../p2pmem-capi/tests/tools/mod.rs"]
mod tools;

use tools::{check_header, here, Installed};

#[test]
fn header_matches_source() {
    check_header("p2pmem-async.h");
}

#[test]
fn installed_library_compiles_links_and_runs() {
    let Some(installed) = Installed::new("libp2pmem_async_capi.so", &[], "p2pmem-async") else {
        return;
    };
    // Programs that use both libraries include both headers.
    let other = format!("-I{}", here().join("../p2pmem-capi/include").display());
    installed.check_program(PROGRAM, &[&other]);
    installed.check_examples(&["interpret.c"]);
    installed.check_needed("libp2pmem-async.so");
}

/// Checks without a NIC that every function refuses invalid arguments with the right errno.
const PROGRAM: &str = r#"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <p2pmem.h>
#include <p2pmem-async.h>

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "line %d: failed: %s; last error: %s\n", __LINE__, #what, p2pmem_async_last_error()); return 1; } } while (0)
#define REFUSED(what) CHECK((what) == -EINVAL)

int main(void)
{
	p2pmem_async_endpoint_options options;
	p2pmem_async_completion completion;
	p2pmem_async_interpreter *interpreter = NULL;
	p2pmem_async_endpoint *endpoint = NULL;
	p2pmem_async_address_vector vector;
	p2pmem_async_operation operation;
	p2pmem_async_memory_info info;
	p2pmem_async_memory *memory = NULL;
	p2pmem_async_program *program = NULL;
	p2pmem_async_address address;
	p2pmem_async_region region;
	p2pmem_async_port *port = NULL;
	p2pmem_async_send send;
	char text[64];
	size_t index;
	uint64_t id;
	int ret;

	memset(&options, 0, sizeof(options));
	memset(&address, 0, sizeof(address));
	memset(&send, 0, sizeof(send));
	memset(&completion, 0, sizeof(completion));
	CHECK(!strcmp(p2pmem_async_last_error(), "") && !strcmp(p2pmem_async_last_remedy(), ""));
	REFUSED(p2pmem_async_port_open(NULL, &port));
	CHECK(!strcmp(p2pmem_async_last_error(), "nic is NULL"));
	REFUSED(p2pmem_async_port_open("mlx5_99", NULL));
	/* The kernel of this machine may be without RDMA. */
	ret = p2pmem_async_port_open("mlx5_99", &port);
	CHECK((ret == -ENODEV || ret == -EIO) && !port && strstr(p2pmem_async_last_error(), "RDMA device"));
	REFUSED(p2pmem_async_memory_alloc(NULL, P2PMEM_ASYNC_MEMORY_HOST, 4096, &memory));
	REFUSED(p2pmem_async_memory_query(NULL, &info));
	REFUSED(p2pmem_async_memory_flush(NULL));
	REFUSED(p2pmem_async_endpoint_create(NULL, &options, &endpoint));
	REFUSED(p2pmem_async_endpoint_address(NULL, &address));
	REFUSED(p2pmem_async_endpoint_address_vector(NULL, &address, &vector));
	REFUSED(p2pmem_async_endpoint_regions(NULL, &region, 1));
	REFUSED(p2pmem_async_connect(NULL, &address));
	REFUSED(p2pmem_async_export_doorbell(NULL));
	REFUSED(p2pmem_async_fail(NULL, "the peer died"));
	REFUSED(p2pmem_async_refresh(NULL));
	REFUSED(p2pmem_async_post_send(NULL, &send));
	REFUSED(p2pmem_async_post_recv(NULL, 0, NULL, 0));
	REFUSED(p2pmem_async_commit_qp(NULL, &program));
	REFUSED(p2pmem_async_rollback_qp(NULL, &id, 1));
	REFUSED(p2pmem_async_peek_cq(NULL, P2PMEM_ASYNC_QUEUE_SEND, 1, &program));
	REFUSED(p2pmem_async_abort_peek_cq(NULL));
	REFUSED(p2pmem_async_poll_cq(NULL, P2PMEM_ASYNC_QUEUE_SEND, &completion, 1));
	REFUSED(p2pmem_async_wait_for(NULL, 0, 0, &program));
	REFUSED(p2pmem_async_program_append(NULL, NULL));
	REFUSED(p2pmem_async_program_operation(NULL, 0, &operation));
	REFUSED(p2pmem_async_program_explain(NULL, text, sizeof(text)));
	CHECK(!p2pmem_async_program_length(NULL) && !p2pmem_async_program_required(NULL));
	CHECK(!memory && !endpoint && !program);
	completion.flags = P2PMEM_ASYNC_COMPLETION_IS_FAILURE;
	completion.syndrome = 5;
	REFUSED(p2pmem_async_completion_text(NULL, text, sizeof(text)));
	REFUSED(p2pmem_async_completion_text(&completion, NULL, 1));
	CHECK(p2pmem_async_completion_text(&completion, text, sizeof(text)) == (int)strlen(text));
	CHECK(!strcmp(text, "flushed (vendor code 0x00)"));
	REFUSED(p2pmem_async_interpreter_create(0, NULL));
	CHECK(!p2pmem_async_interpreter_create(0, &interpreter) && interpreter);
	REFUSED(p2pmem_async_interpreter_map_endpoint(interpreter, NULL));
	REFUSED(p2pmem_async_interpreter_map_memory(interpreter, NULL));
	REFUSED(p2pmem_async_interpreter_run(interpreter, NULL, &index));
	REFUSED(p2pmem_async_interpreter_run(NULL, NULL, NULL));
	p2pmem_async_interpreter_free(interpreter);
	p2pmem_async_interpreter_free(NULL);
	p2pmem_async_program_free(NULL);
	p2pmem_async_endpoint_free(NULL);
	p2pmem_async_memory_free(NULL);
	p2pmem_async_port_close(NULL);
	printf("%s\n", p2pmem_async_version());
	return 0;
}
"#;
