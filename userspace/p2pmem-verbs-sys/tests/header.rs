// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compares the crate with infiniband/verbs.h: compiles a C program that includes the header and asserts every offset,
//! flag and function type. Fails if one differs.

use std::mem::offset_of;

use p2pmem_header_test::Program;
use p2pmem_verbs_sys::{access, ibv_context, ibv_mr, ibv_pd, IBV_REREG_MR_ERR_INPUT};

#[test]
fn offsets_flags_and_functions_match_header() {
    let mut program = Program::new("infiniband/verbs.h");
    program.line("#undef ibv_reg_mr\n#undef ibv_reg_mr_iova");
    let mut same = |what: &str, value: i128| program.same(what, value);
    same(
        "offsetof(struct ibv_context, device)",
        offset_of!(ibv_context, device) as i128,
    );
    same(
        "offsetof(struct ibv_context, ops.poll_cq)",
        offset_of!(ibv_context, poll_cq) as i128,
    );
    same("offsetof(struct ibv_pd, context)", offset_of!(ibv_pd, context) as i128);
    same("offsetof(struct ibv_pd, handle)", offset_of!(ibv_pd, handle) as i128);
    same("offsetof(struct ibv_mr, context)", offset_of!(ibv_mr, context) as i128);
    same("offsetof(struct ibv_mr, pd)", offset_of!(ibv_mr, pd) as i128);
    same("offsetof(struct ibv_mr, addr)", offset_of!(ibv_mr, addr) as i128);
    same("offsetof(struct ibv_mr, length)", offset_of!(ibv_mr, length) as i128);
    same("offsetof(struct ibv_mr, handle)", offset_of!(ibv_mr, handle) as i128);
    same("offsetof(struct ibv_mr, lkey)", offset_of!(ibv_mr, lkey) as i128);
    same("offsetof(struct ibv_mr, rkey)", offset_of!(ibv_mr, rkey) as i128);
    same("IBV_ACCESS_LOCAL_WRITE", access::LOCAL_WRITE.into());
    same("IBV_ACCESS_REMOTE_WRITE", access::REMOTE_WRITE.into());
    same("IBV_ACCESS_REMOTE_READ", access::REMOTE_READ.into());
    same("IBV_ACCESS_REMOTE_ATOMIC", access::REMOTE_ATOMIC.into());
    same("IBV_ACCESS_MW_BIND", access::MW_BIND.into());
    same("IBV_ACCESS_RELAXED_ORDERING", access::RELAXED_ORDERING.into());
    same("IBV_ACCESS_OPTIONAL_RANGE", access::OPTIONAL_RANGE.into());
    same("IBV_REREG_MR_ERR_INPUT", IBV_REREG_MR_ERR_INPUT.into());
    let functions = [
        "const char *(*a)(struct ibv_device *) = ibv_get_device_name",
        "struct ibv_mr *(*b)(struct ibv_pd *, void *, size_t, int) = ibv_reg_mr",
        "struct ibv_mr *(*c)(struct ibv_pd *, void *, size_t, uint64_t, int) = ibv_reg_mr_iova",
        "struct ibv_mr *(*d)(struct ibv_pd *, void *, size_t, uint64_t, unsigned int) = ibv_reg_mr_iova2",
        "struct ibv_mr *(*e)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int) = ibv_reg_dmabuf_mr",
        "int (*f)(struct ibv_mr *, int, struct ibv_pd *, void *, size_t, int) = ibv_rereg_mr",
        "int (*g)(struct ibv_mr *) = ibv_dereg_mr",
        "struct ibv_device **(*h)(int *) = ibv_get_device_list",
        "void (*i)(struct ibv_device **) = ibv_free_device_list",
        "struct ibv_context *(*j)(struct ibv_device *) = ibv_open_device",
        "int (*k)(struct ibv_context *) = ibv_close_device",
        "struct ibv_pd *(*l)(struct ibv_context *) = ibv_alloc_pd",
        "int (*m)(struct ibv_pd *) = ibv_dealloc_pd",
    ];
    for function in functions {
        program.line(&format!("{function};"));
    }
    program.check();
}
