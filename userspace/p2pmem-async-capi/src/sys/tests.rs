// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the C functions without a NIC: programs and the interpreter.

use std::ffi::CStr;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use p2pmem_async::bytecode::{Operation, Program};
use p2pmem_async::region::{Region, RegionKind};
use p2pmem_async::sys::HostMemory;

use super::*;

fn memory() -> Region {
    Region::new(RegionKind::Data, Arc::new(HostMemory::new(4096).unwrap()))
}

fn program(operations: impl IntoIterator<Item = Operation>) -> *mut p2pmem_async_program {
    let mut program = Program::new();
    for operation in operations {
        program.push(operation).unwrap();
    }
    handle(p2pmem_async_program(program.into()))
}

fn message() -> String {
    // SAFETY: the message is a string.
    unsafe { CStr::from_ptr(p2pmem_async_last_error()) }
        .to_str()
        .unwrap()
        .to_owned()
}

#[test]
fn an_execution_ends_at_the_operation_that_failed() {
    let memory = memory();
    let (store, poll) = (memory.target(8), memory.target(16));
    let code = program([
        Operation::StoreQword {
            target: store,
            value: 7,
        },
        Operation::PollAnd { target: poll, value: 1 },
    ]);
    let mut interpreter = null_mut();
    let mut index = usize::MAX;
    // SAFETY: the handles are valid until they are freed at the end.
    unsafe {
        assert_eq!(p2pmem_async_interpreter_create(0, &mut interpreter), 0);
        assert_eq!(
            p2pmem_async_interpreter_run(interpreter, code, &mut index),
            -libc::EFAULT
        );
        assert_eq!(index, 0);
        assert!(message().contains("has not mapped"), "{}", message());
        (*interpreter).change(|interpreter| interpreter.map(&memory));
        assert_eq!(
            p2pmem_async_interpreter_run(interpreter, code, &mut index),
            -libc::ETIMEDOUT
        );
        assert_eq!((index, memory.load_dword(8)), (1, 7));
        assert!(message().starts_with("operation 1 (POLL_AND"), "{}", message());
        assert_eq!(
            p2pmem_async_interpreter_run(interpreter, code, null_mut()),
            -libc::ETIMEDOUT
        );
        memory.store_dword(16, 1);
        assert_eq!(p2pmem_async_interpreter_run(interpreter, code, null_mut()), 0);
        p2pmem_async_interpreter_free(interpreter);
        p2pmem_async_program_free(code);
    }
}

#[test]
fn programs_are_read_and_joined() {
    let memory = memory();
    let target = memory.target(0);
    let data: Vec<u8> = (0..16).collect();
    let code = program([Operation::CopyBlock {
        target,
        data: data.clone(),
    }]);
    let fence = program([Operation::Fence]);
    let mut operation = std::mem::MaybeUninit::uninit();
    let mut text = [1; 16];
    // SAFETY: the handles are valid until they are freed at the end, and the text has its capacity.
    unsafe {
        assert_eq!(p2pmem_async_program_append(code, fence), 0);
        assert_eq!(p2pmem_async_program_append(code, code), 0);
        assert_eq!(p2pmem_async_program_length(code), 4);
        assert_eq!(p2pmem_async_program_length(fence), 1);
        assert_eq!(
            p2pmem_async_program_required(code),
            P2PMEM_ASYNC_CAN_COPY_BLOCK | P2PMEM_ASYNC_CAN_FENCE
        );
        assert_eq!(p2pmem_async_program_operation(code, 2, operation.as_mut_ptr()), 0);
        let operation = operation.assume_init();
        assert_eq!((operation.kind, operation.size), (P2PMEM_ASYNC_COPY_BLOCK, 16));
        assert_eq!(std::slice::from_raw_parts(operation.data.cast::<u8>(), 16), data);
        assert_eq!(p2pmem_async_program_operation(code, 4, null_mut()), -libc::EINVAL);
        assert_eq!(p2pmem_async_program_operation(code, 0, null_mut()), -libc::EINVAL);
        let whole = p2pmem_async_program_explain(fence, null_mut(), 0);
        assert_eq!(
            p2pmem_async_program_explain(fence, text.as_mut_ptr(), text.len()),
            whole
        );
        assert_eq!(CStr::from_ptr(text.as_ptr()), c"  0  FENCE\n");
        assert_eq!(p2pmem_async_abort_peek_cq(code), -libc::EINVAL);
        assert_eq!(p2pmem_async_program_append(code, null()), -libc::EINVAL);
        p2pmem_async_program_free(code);
        p2pmem_async_program_free(fence);
    }
}
