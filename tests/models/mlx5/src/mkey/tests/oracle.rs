// SPDX-License-Identifier: MIT OR Apache-2.0

//! A simple translation, byte by byte, to compare the implementation with.

use super::*;

/// An mkey of the oracle.
#[derive(Clone, Debug)]
struct OracleKey {
    mode: u32,
    start: u64,
    len: u64,
    shift: u32,
    /// MTT entries in `pages`; KLM or KSM entries (byte count, key, address) in `klms`.
    pages: Vec<u64>,
    klms: Vec<(u32, u32, u64)>,
}

impl OracleKey {
    fn command(&self) -> Vec<u8> {
        let list = if self.mode == 1 {
            pages(&self.pages)
        } else {
            klms(&self.klms)
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

/// Translation of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Byte {
    At(u64),
    Missing,
    Fault(Fault),
}

/// Translates the byte at `address` of mkey `number`. An mkey refers only to mkeys with lower numbers.
fn byte(keys: &[OracleKey], number: usize, address: u64, write: bool) -> Byte {
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
            // The list is padded to a multiple of 64 bytes.
            let capacity = key.pages.len().next_multiple_of(8);
            let entry = match page(address) {
                index if index >= capacity => return Byte::Fault(Fault::Bounds),
                index => key.pages.get(index).copied().unwrap_or(0),
            };
            if entry & if write { 2 } else { 1 } == 0 {
                return Byte::Missing;
            }
            Byte::At((entry & !0xff).wrapping_add(address % (1 << key.shift)))
        }
        2 => {
            let mut offset = address - key.start;
            for (count, reference, address) in &key.klms {
                if offset < u64::from(*count) {
                    return inner(*reference, address.wrapping_add(offset));
                }
                offset -= u64::from(*count);
            }
            Byte::Fault(Fault::Bounds)
        }
        _ => {
            let capacity = key.klms.len().next_multiple_of(4);
            let (_, reference, start) = match page(address) {
                index if index >= capacity => return Byte::Fault(Fault::Bounds),
                index => key.klms.get(index).copied().unwrap_or((0, 0, 0)),
            };
            if reference == 0 {
                return Byte::Missing;
            }
            inner(reference, start.wrapping_add(address % (1 << key.shift)))
        }
    }
}

fn oracle_key(number: u32) -> impl Strategy<Value = OracleKey> {
    // Small pages and addresses, so that accesses cross boundaries.
    let reference = prop_oneof![
        8 => (0..number.max(1)).prop_map(|index| (FIRST + index) << 8),
        1 => Just(0_u32),
        1 => Just(0xff_0001_u32),
    ];
    let klm = (0_u32..40, reference, 0_u64..150);
    // Page addresses are multiples of 256.
    let entry = (0_u64..1 << 40, 0_u64..8).prop_map(|(page, flags)| (page << 8) | if flags > 3 { 3 } else { flags });
    (
        if number == 0 { 0..2_u32 } else { 0..4_u32 },
        0_u64..100,
        0_u64..200,
        3_u32..7,
        proptest::collection::vec(entry, 0..12),
        proptest::collection::vec(klm, 0..8),
    )
        .prop_map(|(mode, start, len, shift, pages, klms)| OracleKey {
            mode,
            start,
            len,
            shift,
            pages,
            klms,
        })
}

proptest! {
    #![proptest_config(config(3000))]

    #[test]
    fn translation_agrees_with_definition(
        oracle_keys in (oracle_key(0), oracle_key(1), oracle_key(2), oracle_key(3)),
        accesses in proptest::collection::vec((0_usize..4, 0_u64..300, 1_u64..250, any::<bool>()), 1..30),
    ) {
        let oracle_keys = [oracle_keys.0, oracle_keys.1, oracle_keys.2, oracle_keys.3];
        let mut keys = keys();
        let numbers: Vec<u32> = oracle_keys.iter().map(|oracle_key| add(&mut keys, &oracle_key.command())).collect();
        for (number, address, len, write) in accesses {
            let rights = if write { Rights::LocalWrite } else { Rights::LocalRead };
            let request = access(numbers[number], rights, address, len);
            let result = resolve(&mut keys, &request);
            let key = &oracle_keys[number];
            let expected = if address < key.start || address - key.start + len > key.len {
                Err(Byte::Fault(Fault::Bounds))
            } else {
                (address..address + len).map(|address| match byte(&oracle_keys, number, address, write) {
                    Byte::At(address) => Ok(address),
                    other => Err(other),
                }).collect::<Result<Vec<u64>, Byte>>()
            };
            match (result, expected) {
                (Ok(extents), Ok(bytes)) => {
                    let flat: Vec<u64> = extents.iter().flat_map(|(address, len)| *address..address + len).collect();
                    prop_assert_eq!(flat, bytes);
                    // Adjacent ranges are merged.
                    prop_assert!(extents.windows(2).all(|pair| pair[0].0 + pair[0].1 != pair[1].0));
                }
                (Err(Fault::Page(token)), Err(Byte::Missing)) => {
                    prop_assert_eq!(keys.resume_fault(token, false), Some(Resumed::Repaired));
                }
                // The implementation checks whole ranges, so it may find a later error before a missing page.
                (Err(Fault::Bounds | Fault::Key), Err(Byte::Fault(_) | Byte::Missing)) => {}
                (result, expected) => prop_assert!(false, "{:?} instead of {:?}", result, expected),
            }
        }
    }
}
