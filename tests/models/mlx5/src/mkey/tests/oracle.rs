// SPDX-License-Identifier: MIT OR Apache-2.0

//! Translation once more, byte by byte and by the definition, to compare with.

use super::*;

/// A key as the oracle knows it.
#[derive(Clone, Debug)]
struct Simple {
    mode: u32,
    start: u64,
    len: u64,
    shift: u32,
    /// Page entries, or (count, key, address).
    pages: Vec<u64>,
    pieces: Vec<(u32, u32, u64)>,
}

impl Simple {
    fn command(&self) -> Vec<u8> {
        let list = if self.mode == 1 {
            pages(&self.pages)
        } else {
            pieces(&self.pieces)
        };
        let list = if self.mode == 0 { Vec::new() } else { list };
        create(
            self.mode,
            &[
                (mkc::START_ADDR, self.start),
                (mkc::LEN, self.len),
                (mkc::LOG_PAGE_SIZE, self.shift.into()),
            ],
            &list,
        )
    }
}

/// What one byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Byte {
    At(u64),
    Missing,
    Fault(Fault),
}

/// Where the byte at `address` of key `number` is. A key refers only to keys before it.
fn byte(keys: &[Simple], number: usize, address: u64, write: bool) -> Byte {
    let key = &keys[number];
    if address < key.start || address - key.start >= key.len {
        return Byte::Fault(Fault::Bounds);
    }
    let page = |address: u64| (address / (1 << key.shift)) as usize - (key.start / (1 << key.shift)) as usize;
    let inner = |reference: u32, address: u64| {
        let index = (reference >> 8).wrapping_sub(FIRST) as usize;
        if index >= keys.len() || reference & 0xff != 0 {
            return Byte::Fault(Fault::Key);
        }
        byte(keys, index, address, write)
    };
    match key.mode {
        0 => Byte::At(address),
        1 => {
            // The list is filled up to whole units of 64 bytes.
            let room = key.pages.len().next_multiple_of(8);
            let entry = match page(address) {
                index if index >= room => return Byte::Fault(Fault::Bounds),
                index => key.pages.get(index).copied().unwrap_or(0),
            };
            if entry & if write { 2 } else { 1 } == 0 {
                return Byte::Missing;
            }
            Byte::At((entry & !0xff).wrapping_add(address % (1 << key.shift)))
        }
        2 => {
            let mut offset = address - key.start;
            for (count, reference, address) in &key.pieces {
                if offset < u64::from(*count) {
                    return inner(*reference, address.wrapping_add(offset));
                }
                offset -= u64::from(*count);
            }
            Byte::Fault(Fault::Bounds)
        }
        _ => {
            let room = key.pieces.len().next_multiple_of(4);
            let (_, reference, start) = match page(address) {
                index if index >= room => return Byte::Fault(Fault::Bounds),
                index => key.pieces.get(index).copied().unwrap_or((0, 0, 0)),
            };
            if reference == 0 {
                return Byte::Missing;
            }
            inner(reference, start.wrapping_add(address % (1 << key.shift)))
        }
    }
}

fn simple(number: u32) -> impl Strategy<Value = Simple> {
    // Small pages and addresses, so that borders are met.
    let reference = prop_oneof![
        8 => (0..number.max(1)).prop_map(|index| (FIRST + index) << 8),
        1 => Just(0_u32),
        1 => Just(0xff_0001_u32),
    ];
    let piece = (0_u32..40, reference, 0_u64..150);
    // Page addresses are multiples of 256.
    let entry = (0_u64..1 << 40, 0_u64..8).prop_map(|(page, flags)| (page << 8) | if flags > 3 { 3 } else { flags });
    (
        if number == 0 { 0..2_u32 } else { 0..4_u32 },
        0_u64..100,
        0_u64..200,
        3_u32..7,
        proptest::collection::vec(entry, 0..12),
        proptest::collection::vec(piece, 0..8),
    )
        .prop_map(|(mode, start, len, shift, pages, pieces)| Simple {
            mode,
            start,
            len,
            shift,
            pages,
            pieces,
        })
}

proptest! {
    #![proptest_config(config(3000))]

    #[test]
    fn agrees_with_the_definition(
        simples in (simple(0), simple(1), simple(2), simple(3)),
        accesses in proptest::collection::vec((0_usize..4, 0_u64..300, 1_u64..250, any::<bool>()), 1..30),
    ) {
        let simples = [simples.0, simples.1, simples.2, simples.3];
        let mut keys = keys();
        let numbers: Vec<u32> = simples.iter().map(|simple| add(&mut keys, &simple.command())).collect();
        for (number, address, len, write) in accesses {
            let rights = if write { Rights::LocalWrite } else { Rights::LocalRead };
            let request = access(numbers[number], rights, address, len);
            let result = resolve(&mut keys, &request);
            let key = &simples[number];
            let expected = if address < key.start || address - key.start + len > key.len {
                Err(Byte::Fault(Fault::Bounds))
            } else {
                (address..address + len).map(|address| match byte(&simples, number, address, write) {
                    Byte::At(address) => Ok(address),
                    other => Err(other),
                }).collect::<Result<Vec<u64>, Byte>>()
            };
            match (result, expected) {
                (Ok(extents), Ok(bytes)) => {
                    let flat: Vec<u64> = extents.iter().flat_map(|(address, len)| *address..address + len).collect();
                    prop_assert_eq!(flat, bytes);
                    // Neighbours are joined.
                    prop_assert!(extents.windows(2).all(|pair| pair[0].0 + pair[0].1 != pair[1].0));
                }
                (Err(Fault::Page(token)), Err(Byte::Missing)) => {
                    prop_assert_eq!(keys.resume_fault(token, false), Some(Resumed::Repaired));
                }
                // Whole pieces are looked at, so a fault further on in one is met before a missing page.
                (Err(Fault::Bounds | Fault::Key), Err(Byte::Fault(_) | Byte::Missing)) => {}
                (result, expected) => prop_assert!(false, "{:?} instead of {:?}", result, expected),
            }
        }
    }
}
