// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the interpreter. None waits: a time limit of zero ends the first poll that is not true.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::region::RegionKind;
use crate::sys::HostMemory;

const LEN: usize = 256;

fn region() -> Region {
    let memory = Arc::new(HostMemory::new(4096).unwrap());
    Region::part(RegionKind::Data, memory, 64, LEN)
}

fn program(operations: Vec<Operation>) -> Program {
    let mut program = Program::new();
    for operation in operations {
        program.push(operation).unwrap();
    }
    program
}

#[test]
fn a_poll_that_is_not_true_ends_with_its_index_and_last_value() {
    let region = region();
    region.store_dword(8, 41);
    let program = program(vec![
        Operation::StoreDword {
            target: region.target(0),
            value: 1,
        },
        Operation::PollGeq {
            target: region.target(8),
            value: 42,
        },
        Operation::StoreDword {
            target: region.target(0),
            value: 2,
        },
    ]);
    let interpreter = Interpreter::new(Duration::ZERO).map(&region);
    let error = interpreter.run(&program).unwrap_err();
    let Error::Execution { index: 1, why, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(
        *why,
        ExecutionFailure::TimeLimit {
            limit: Duration::ZERO,
            last: 41
        }
    );
    let id = region.id().number();
    assert_eq!(
        error.to_string(),
        format!("operation 1 (POLL_GEQ data#{id}+0x8 - 0x0000002a >= 0) did not come true within 0ns: the last value was 0x00000029")
    );
    assert_eq!(region.load_dword(0), 1, "what follows the poll was not executed");
}

#[test]
fn a_poll_ends_when_another_thread_stores() {
    let region = region();
    let poll = program(vec![Operation::PollAnd {
        target: region.target(4),
        value: 2,
    }]);
    // The limit ends a broken test only.
    let interpreter = Interpreter::new(Duration::from_secs(120)).map(&region);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| interpreter.run(&poll));
        region.store_dword(4, 3);
        waits.join().unwrap().unwrap();
    });
}

#[test]
fn unmapped_and_outside_places_are_errors_with_index() {
    let (region, other) = (region(), region());
    let interpreter = Interpreter::new(Duration::ZERO).map(&region);
    let store = |target| program(vec![Operation::Fence, Operation::StoreQword { target, value: 0 }]);
    for (target, words) in [
        (other.target(0), "has not mapped"),
        (region.target(LEN as u64), "256 bytes"),
        (region.target(1 << 40), "256 bytes"),
    ] {
        let error = interpreter.run(&store(target)).unwrap_err();
        assert!(matches!(error, Error::Execution { index: 1, .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
    interpreter.run(&store(region.target(LEN as u64 - 8))).unwrap();
}

/// What a program does to memory, written down a second time, byte by byte.
fn model(memory: &mut [u8], operations: &[Operation]) -> Option<usize> {
    for (index, operation) in operations.iter().enumerate() {
        let at = operation.target().map_or(0, |target| target.offset as usize);
        let word = || {
            memory[at..at + 4]
                .iter()
                .rev()
                .fold(0_i64, |value, byte| value * 256 + i64::from(*byte))
        };
        let holds = match operation {
            Operation::PollAnd { value, .. } => (0..32).any(|bit| (word() >> bit) & 1 == 1 && (value >> bit) & 1 == 1),
            Operation::PollNor { value, .. } => (0..32).any(|bit| (word() >> bit) & 1 == 0 && (value >> bit) & 1 == 0),
            Operation::PollGeq { value, .. } => (word() - i64::from(*value)).rem_euclid(1 << 32) < 1 << 31,
            _ => true,
        };
        if !holds {
            return Some(index);
        }
        match operation {
            Operation::StoreDword { value, .. } => memory[at..at + 4].copy_from_slice(&value.to_le_bytes()),
            Operation::StoreQword { value, .. } => memory[at..at + 8].copy_from_slice(&value.to_le_bytes()),
            Operation::CopyBlock { data, .. } => memory[at..at + data.len()].copy_from_slice(data),
            _ => {}
        }
    }
    None
}

fn operations(region: &Region) -> impl Strategy<Value = Operation> {
    let region = region.clone();
    // Few values and places, so that polls come true often.
    let value = prop_oneof![0..4u32, any::<u32>(), Just(u32::MAX), Just(1 << 31)];
    let block = prop::collection::vec(any::<u8>(), 1..=32);
    (0..7u8, 0..28u64, value, any::<u32>(), block).prop_map(move |(kind, place, value, high, data)| {
        let (target, wide) = (region.target(place / 4 * 4), region.target(place / 4 * 8));
        match kind {
            0 => Operation::Fence,
            1 => Operation::StoreDword { target, value },
            2 => Operation::StoreQword {
                target: wide,
                value: u64::from(value) | (u64::from(high) << 32),
            },
            3 => Operation::CopyBlock {
                target: wide,
                data: data.iter().flat_map(|byte| [*byte; 8]).take(128).collect(),
            },
            4 => Operation::PollAnd {
                target,
                value: value.max(1),
            },
            5 => Operation::PollNor {
                target,
                value: value.min(u32::MAX - 1),
            },
            _ => Operation::PollGeq { target, value },
        }
    })
}

/// A region, and operations on it.
fn lists() -> impl Strategy<Value = (Region, Vec<Operation>)> {
    let region = region();
    let list = prop::collection::vec(operations(&region), 0..24);
    (Just(region), list)
}

proptest! {
    #[test]
    fn memory_changes_as_the_specification_says(seed in any::<[u8; LEN]>(), (region, list) in lists()) {
        region.write(0, &seed);
        let mut expected = seed;
        let stopped = model(&mut expected, &list);
        let result = Interpreter::new(Duration::ZERO).map(&region).run(&program(list));
        match (stopped, result) {
            (None, Ok(())) => {}
            (Some(at), Err(Error::Execution { index, .. })) => prop_assert_eq!(at, index),
            (stopped, result) => prop_assert!(false, "{:?} {:?}", stopped, result),
        }
        let mut memory = [0; LEN];
        region.read(0, &mut memory);
        prop_assert_eq!(memory, expected);
    }
}
