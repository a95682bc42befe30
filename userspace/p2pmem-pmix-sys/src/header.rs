// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compares the declarations with `pmix.h`: compiles a C program that includes the header and asserts every size, offset, constant, and
//! function type. Fails if one differs.

use std::mem::{offset_of, size_of};
use std::process::Command;

use p2pmem_header_test::Program;

use crate::abi::{self, ByteObject, Data, Info, Proc, Value};

/// Returns the compiler's options for PMIx.
fn options() -> Vec<String> {
    // Debian has the description of the package in a folder of its own.
    let out = Command::new("pkg-config")
        .args(["--cflags", "pmix"])
        .env("PKG_CONFIG_PATH", "/usr/lib/x86_64-linux-gnu/pmix2/lib/pkgconfig")
        .output();
    match out {
        Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout)
            .split_whitespace()
            .map(String::from)
            .collect(),
        _ => Vec::new(),
    }
}

#[test]
fn declarations_match_the_header() {
    let mut program = Program::new("pmix.h").with_options(options());
    program.include("string.h");
    let mut same = |what: &str, value: i128| program.same(what, value);
    let size = |size: usize| size as i128;
    same("sizeof(pmix_proc_t)", size(size_of::<Proc>()));
    same("offsetof(pmix_proc_t, nspace)", size(offset_of!(Proc, namespace)));
    same("offsetof(pmix_proc_t, rank)", size(offset_of!(Proc, rank)));
    same("sizeof(pmix_byte_object_t)", size(size_of::<ByteObject>()));
    same(
        "offsetof(pmix_byte_object_t, bytes)",
        size(offset_of!(ByteObject, bytes)),
    );
    same("offsetof(pmix_byte_object_t, size)", size(offset_of!(ByteObject, size)));
    same("sizeof(pmix_value_t)", size(size_of::<Value>()));
    same("offsetof(pmix_value_t, type)", size(offset_of!(Value, kind)));
    same("offsetof(pmix_value_t, data)", size(offset_of!(Value, data)));
    same("sizeof(((pmix_value_t *)0)->type)", size(size_of::<u16>()));
    same("sizeof(((pmix_value_t *)0)->data)", size(size_of::<Data>()));
    same("sizeof(pmix_info_t)", size(size_of::<Info>()));
    same("offsetof(pmix_info_t, key)", size(offset_of!(Info, key)));
    same("offsetof(pmix_info_t, flags)", size(offset_of!(Info, flags)));
    same("offsetof(pmix_info_t, value)", size(offset_of!(Info, value)));
    same("PMIX_MAX_NSLEN", size(abi::MAX_NAMESPACE));
    same("PMIX_MAX_KEYLEN", size(abi::MAX_KEY));
    same("(uint32_t)(PMIX_RANK_WILDCARD)", abi::RANK_WILDCARD.into());
    same("PMIX_GLOBAL", abi::GLOBAL.into());
    same("PMIX_SUCCESS", abi::SUCCESS.into());
    same("PMIX_OPERATION_SUCCEEDED", abi::OPERATION_SUCCEEDED.into());
    same("PMIX_BOOL", abi::BOOL.into());
    same("PMIX_UINT32", abi::UINT32.into());
    same("PMIX_BYTE_OBJECT", abi::BYTE_OBJECT.into());
    for (name, text) in [
        ("PMIX_JOB_SIZE", abi::JOB_SIZE),
        ("PMIX_COLLECT_DATA", abi::COLLECT_DATA),
    ] {
        program.line(&format!(
            "_Static_assert(!__builtin_strcmp({name}, \"{text}\"), \"{name} is not {text}\");"
        ));
    }
    let functions = [
        "int (*a)(pmix_proc_t *, pmix_info_t *, size_t) = PMIx_Init",
        "int (*b)(const pmix_info_t *, size_t) = PMIx_Finalize",
        "int (*c)(uint8_t, const char *, pmix_value_t *) = PMIx_Put",
        "int (*d)(void) = PMIx_Commit",
        "int (*e)(const pmix_proc_t *, size_t, const pmix_info_t *, size_t, void (*)(int, void *), void *) = PMIx_Fence_nb",
        "int (*f)(const pmix_proc_t *, const char *, const pmix_info_t *, size_t, void (*)(int, pmix_value_t *, void *), \
         void *) = PMIx_Get_nb",
        "const char *(*g)(int) = PMIx_Error_string",
        "uint32_t *h = &((pmix_proc_t *)0)->rank, *i = &((pmix_info_t *)0)->flags, *j = &((pmix_value_t *)0)->data.uint32",
        "_Bool *k = &((pmix_value_t *)0)->data.flag",
        "pmix_byte_object_t *l = &((pmix_value_t *)0)->data.bo",
        "char *(*m) = &((pmix_byte_object_t *)0)->bytes",
    ];
    for function in functions {
        program.line(&format!("{function};"));
    }
    program.check();
}
