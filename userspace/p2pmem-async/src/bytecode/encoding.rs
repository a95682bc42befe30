// SPDX-License-Identifier: MIT OR Apache-2.0

//! The binary form of byte code, for executors that are devices.
//!
//! An instruction has 32 bytes, little-endian. The data of a COPY_BLOCK follows its instruction, padded with zeros to a
//! multiple of 32 bytes. An END instruction is the last one.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | opcode |
//! | 4 | 4 | bytes of data that follow the instruction, without padding; 0 except for COPY_BLOCK |
//! | 8 | 8 | address, in the address space of the executor |
//! | 16 | 8 | value |
//! | 24 | 4 | index of the operation in the program, which the executor reports if the operation fails |
//! | 28 | 4 | reserved, 0 |

use crate::bytecode::{Operation, Program};
use crate::error::{Error, ExecutionFailure, Result};
use crate::region::RegionId;

/// Bytes of an instruction.
pub const INSTRUCTION: usize = 32;
/// Opcode of the end of a program.
pub const END: u32 = 0;
/// Opcode of [`Operation::Fence`].
pub const FENCE: u32 = 1;
/// Opcode of [`Operation::StoreDword`].
pub const STORE_DWORD: u32 = 2;
/// Opcode of [`Operation::StoreQword`].
pub const STORE_QWORD: u32 = 3;
/// Opcode of [`Operation::CopyBlock`].
pub const COPY_BLOCK: u32 = 4;
/// Opcode of [`Operation::PollAnd`].
pub const POLL_AND: u32 = 5;
/// Opcode of [`Operation::PollNor`].
pub const POLL_NOR: u32 = 6;
/// Opcode of [`Operation::PollGeq`].
pub const POLL_GEQ: u32 = 7;

/// Addresses of regions in the address space of an executor.
pub trait Addresses {
    /// Returns address and length of a region; `None` if the executor has not mapped the region.
    fn region(&self, id: RegionId) -> Option<(u64, usize)>;
}

/// Encodes a program for an executor.
///
/// # Errors
///
/// [`Error::Execution`] with the index of an operation whose region is not mapped or whose target is outside of it.
pub fn encode(program: &Program, addresses: &impl Addresses) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity((program.operations().len() + 1) * INSTRUCTION);
    for (index, operation) in program.operations().iter().enumerate() {
        let address = address_of(operation, addresses).map_err(|why| Error::Execution {
            index,
            operation: operation.to_string(),
            why,
        })?;
        let (opcode, value, data): (u32, u64, &[u8]) = match operation {
            Operation::Fence => (FENCE, 0, &[]),
            Operation::StoreDword { value, .. } => (STORE_DWORD, u64::from(*value), &[]),
            Operation::StoreQword { value, .. } => (STORE_QWORD, *value, &[]),
            Operation::CopyBlock { data, .. } => (COPY_BLOCK, 0, data),
            Operation::PollAnd { value, .. } => (POLL_AND, u64::from(*value), &[]),
            Operation::PollNor { value, .. } => (POLL_NOR, u64::from(*value), &[]),
            Operation::PollGeq { value, .. } => (POLL_GEQ, u64::from(*value), &[]),
        };
        instruction(&mut bytes, opcode, data.len(), address, value, index);
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(INSTRUCTION), 0);
    }
    instruction(&mut bytes, END, 0, 0, 0, program.operations().len());
    Ok(bytes)
}

fn instruction(bytes: &mut Vec<u8>, opcode: u32, len: usize, address: u64, value: u64, index: usize) {
    // Not truncated: a block has at most 1024 bytes, and memory limits the number of operations.
    let (len, index) = (len as u32, index as u32);
    bytes.extend_from_slice(&opcode.to_le_bytes());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&address.to_le_bytes());
    bytes.extend_from_slice(&value.to_le_bytes());
    bytes.extend_from_slice(&index.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
}

/// Returns the address that an operation accesses, 0 for a fence.
fn address_of(operation: &Operation, addresses: &impl Addresses) -> std::result::Result<u64, ExecutionFailure> {
    let Some(target) = operation.target() else {
        return Ok(0);
    };
    let region = target.region;
    let (start, len) = addresses.region(region).ok_or(ExecutionFailure::Unmapped { region })?;
    let end = target.offset.checked_add(operation.size() as u64);
    if !end.is_some_and(|end| end <= len as u64) {
        return Err(ExecutionFailure::Outside { len });
    }
    start
        .checked_add(target.offset)
        .ok_or(ExecutionFailure::Outside { len })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::region::{Region, RegionKind};
    use crate::sys::HostMemory;

    struct One(RegionId);

    impl Addresses for One {
        fn region(&self, id: RegionId) -> Option<(u64, usize)> {
            (id == self.0).then_some((0x10_0000, 64))
        }
    }

    #[test]
    fn instructions_have_the_documented_layout() {
        let region = Region::new(RegionKind::Data, Arc::new(HostMemory::new(64).unwrap()));
        let mut program = Program::new();
        let (target, value) = (region.target(8), 0x1122_3344_5566_7788);
        program.push(Operation::StoreQword { target, value }).unwrap();
        let data = (1..=8).collect();
        program.push(Operation::CopyBlock { target, data }).unwrap();
        program.push(Operation::Fence).unwrap();
        let bytes = encode(&program, &One(region.id())).unwrap();
        assert_eq!(bytes.len(), 5 * INSTRUCTION);
        let expected = [
            3, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0x10, 0, 0, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0, 0, 0,
            0, 0, 0, 0, 0,
        ];
        assert_eq!(bytes[..INSTRUCTION], expected);
        assert_eq!(bytes[32..40], [4, 0, 0, 0, 8, 0, 0, 0]);
        assert_eq!(bytes[56..60], [1, 0, 0, 0]);
        assert_eq!(bytes[64..72], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(bytes[72..96].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[96], 1);
        assert_eq!((bytes[128], bytes[152]), (0, 3));
    }

    #[test]
    fn places_without_an_address_are_refused_with_index() {
        let region = Region::new(RegionKind::Data, Arc::new(HostMemory::new(128).unwrap()));
        let other = Region::new(RegionKind::Data, Arc::new(HostMemory::new(128).unwrap()));
        for (target, words) in [(region.target(64), "outside"), (other.target(0), "not mapped")] {
            let mut program = Program::new();
            program.push(Operation::Fence).unwrap();
            program.push(Operation::StoreDword { target, value: 1 }).unwrap();
            let error = encode(&program, &One(region.id())).unwrap_err();
            assert!(
                matches!(&error, Error::Execution { index: 1, .. }) && error.to_string().contains(words),
                "{error}"
            );
        }
    }
}
