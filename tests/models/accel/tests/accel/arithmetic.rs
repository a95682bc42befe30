// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of additions and maxima: results bit for bit, against tables and against arithmetic in f64.

use p2pmem_accel_regs::{Counter, NAN_BF16, NAN_F32, Op};
use p2pmem_proptest::config;
use proptest::prelude::*;

use super::{Bench, SIZE};

/// Where the operands are.
const INTO: u64 = 4096;
const FROM: u64 = SIZE / 2;

impl Bench {
    /// Returns the result of an operation on two equally long ranges.
    fn combined(&mut self, op: Op, into: &[u8], from: &[u8]) -> Vec<u8> {
        self.shared.memory().write(INTO, into).unwrap();
        self.shared.memory().write(FROM, from).unwrap();
        self.ok(op, INTO, into.len() as u64, FROM);
        assert!(self.memory(FROM, from.len()) == from, "{op:?} changed the source");
        self.memory(INTO, into.len())
    }

    fn f32s(&mut self, op: Op, into: &[u32], from: &[u32]) -> Vec<u32> {
        let bytes = |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
        let result = self.combined(op, &bytes(into), &bytes(from));
        let words = result.chunks_exact(4);
        words.map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn bf16s(&mut self, op: Op, into: &[u16], from: &[u16]) -> Vec<u16> {
        let bytes = |words: &[u16]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
        let result = self.combined(op, &bytes(into), &bytes(from));
        let words = result.chunks_exact(2);
        words.map(|word| u16::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

/// The value of a bfloat16: sign, exponent and 7 bits of the significand.
fn value_of(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, significand) = (i32::from((bits >> 7) & 0xff), f64::from(bits & 0x7f));
    sign * match exponent {
        0xff if significand == 0.0 => f64::INFINITY,
        0xff => f64::NAN,
        0 => significand * 2_f64.powi(-133),
        _ => (128.0 + significand) * 2_f64.powi(exponent - 134),
    }
}

/// The bfloat16 nearest to a value: the one of two neighbours with the smaller distance, or the even one.
fn nearest(value: f64) -> u16 {
    if value.is_nan() {
        return NAN_BF16;
    }
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    // The bits of positive values have the order of the values.
    let (mut below, mut above) = (0_u16, 0x7f80_u16);
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if value_of(middle) <= magnitude {
            below = middle
        } else {
            above = middle
        }
    }
    // For rounding, infinity is the value that would follow the largest one.
    let upper = if above == 0x7f80 {
        2_f64.powi(128)
    } else {
        value_of(above)
    };
    let (down, up) = (magnitude - value_of(below), upper - magnitude);
    let even = if below & 1 == 0 { below } else { above };
    sign | if magnitude.is_infinite() || up < down {
        above
    } else if down < up {
        below
    } else {
        even
    }
}

/// The maximum by the order of the bits: from negative infinity over -0 and +0 to infinity.
fn maximum(a: u32, b: u32) -> u32 {
    let order = |bits: u32| {
        if bits >> 31 == 1 {
            -i64::from(bits & 0x7fff_ffff) - 1
        } else {
            i64::from(bits)
        }
    };
    if f32::from_bits(a).is_nan() || f32::from_bits(b).is_nan() {
        NAN_F32
    } else if order(a) > order(b) {
        a
    } else {
        b
    }
}

fn sum(a: u32, b: u32) -> u32 {
    // The sum in f64, rounded once more, is the sum rounded once: f64 has more than twice the bits.
    let sum = (f64::from(f32::from_bits(a)) + f64::from(f32::from_bits(b))) as f32;
    if sum.is_nan() { NAN_F32 } else { sum.to_bits() }
}

const INF: u32 = 0x7f80_0000;
const NEG: u32 = 1 << 31;

#[test]
fn special_values_of_f32() {
    let mut bench = Bench::new();
    let one = 1_f32.to_bits();
    // Operands, sum, maximum.
    let cases = [
        (one, 2_f32.to_bits(), 3_f32.to_bits(), 2_f32.to_bits()),
        (0, NEG, 0, 0),
        (NEG, NEG, NEG, NEG),
        (NEG | one, one, 0, one),
        (NEG | one, NEG, NEG | one, NEG),
        (INF, one, INF, INF),
        (INF, INF, INF, INF),
        (NEG | INF, one, NEG | INF, one),
        (INF, NEG | INF, NAN_F32, INF),
        // Quiet, signaling, negative, with payload.
        (0x7fc0_0000, one, NAN_F32, NAN_F32),
        (0x7f80_0001, one, NAN_F32, NAN_F32),
        (0xffff_ffff, INF, NAN_F32, NAN_F32),
        (0xffc1_2345, 0x7fc5_4321, NAN_F32, NAN_F32),
        // The largest value, and the smallest ones.
        (0x7f7f_ffff, 0x7f7f_ffff, INF, 0x7f7f_ffff),
        (0x7f7f_ffff, one, 0x7f7f_ffff, 0x7f7f_ffff),
        (1, 1, 2, 1),
        (NEG | 1, 1, 0, 1),
        (0x0080_0000, NEG | 1, 0x007f_ffff, 0x0080_0000),
        // Ties to even: 2^24 + 1, 2^24 + 2 + 1.
        (0x4b80_0000, one, 0x4b80_0000, 0x4b80_0000),
        (0x4b80_0001, one, 0x4b80_0002, 0x4b80_0001),
    ];
    let [a, b] = [cases.map(|case| case.0), cases.map(|case| case.1)];
    for (into, from) in [(a, b), (b, a)] {
        assert_eq!(bench.f32s(Op::AddF32, &into, &from), cases.map(|case| case.2));
        assert_eq!(bench.f32s(Op::MaxF32, &into, &from), cases.map(|case| case.3));
    }
}

#[test]
fn special_values_and_ties_of_bf16() {
    let mut bench = Bench::new();
    // Operands, sum, maximum.
    let cases = [
        // 1 + 2, 1 - 1, zeros.
        (0x3f80, 0x4000, 0x4040, 0x4000),
        (0x3f80, 0xbf80, 0x0000, 0x3f80),
        (0x0000, 0x8000, 0x0000, 0x0000),
        (0x8000, 0x8000, 0x8000, 0x8000),
        // 256 + 1 is between 256 and 258: to the even one. 258 + 1: up. Negative ones are the same.
        (0x4380, 0x3f80, 0x4380, 0x4380),
        (0x4381, 0x3f80, 0x4382, 0x4381),
        (0xc380, 0xbf80, 0xc380, 0xbf80),
        (0xc381, 0xbf80, 0xc382, 0xbf80),
        // A bit more than the tie, 256 + 1.0078125, and a bit less, 258 + 0.99609375.
        (0x4380, 0x3f81, 0x4381, 0x4380),
        (0x4381, 0x3f7f, 0x4381, 0x4381),
        // The significand overflows to the next exponent: 510 + 1.
        (0x43ff, 0x3f80, 0x4400, 0x43ff),
        // The largest value: plus half of its last bit becomes infinite, plus less does not.
        (0x7f7f, 0x7b00, 0x7f80, 0x7f7f),
        (0x7f7f, 0x7aff, 0x7f7f, 0x7f7f),
        (0xff7f, 0xff7f, 0xff80, 0xff7f),
        // Subnormal values.
        (0x0001, 0x0001, 0x0002, 0x0001),
        (0x0080, 0x8001, 0x007f, 0x0080),
        (0x8001, 0x0001, 0x0000, 0x0001),
        // Infinities and NaN: quiet, signaling, negative.
        (0x7f80, 0x3f80, 0x7f80, 0x7f80),
        (0xff80, 0x3f80, 0xff80, 0x3f80),
        (0x7f80, 0xff80, NAN_BF16, 0x7f80),
        (0x7fc0, 0x3f80, NAN_BF16, NAN_BF16),
        (0x7f81, 0x3f80, NAN_BF16, NAN_BF16),
        (0xffff, 0x7f80, NAN_BF16, NAN_BF16),
    ];
    let [a, b] = [cases.map(|case| case.0), cases.map(|case| case.1)];
    for (into, from) in [(a, b), (b, a)] {
        assert_eq!(bench.bf16s(Op::AddBf16, &into, &from), cases.map(|case| case.2));
        assert_eq!(bench.bf16s(Op::MaxBf16, &into, &from), cases.map(|case| case.3));
    }
}

#[test]
fn every_bf16_is_its_own_sum_with_zero() {
    let mut bench = Bench::new();
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let expected: Vec<u16> = all
        .iter()
        .map(|bits| if value_of(*bits).is_nan() { NAN_BF16 } else { *bits })
        .collect();
    // -0 is the neutral element.
    assert!(bench.bf16s(Op::AddBf16, &all, &vec![0x8000; all.len()]) == expected);
    assert!(bench.bf16s(Op::MaxBf16, &all, &all) == expected);
}

#[test]
fn ranges_of_any_number_of_elements() {
    let mut bench = Bench::new();
    // A chunk of the device has 1 MiB.
    for (op, element, one, two) in [
        (Op::AddF32, 4, 0x3f80_0000_u32, 0x4000_0000_u32),
        (Op::AddBf16, 2, 0x3f80, 0x4000),
        (Op::MaxF32, 4, 0x3f80_0000, 0x3f80_0000),
        (Op::MaxBf16, 2, 0x3f80, 0x3f80),
    ] {
        for elements in [1, 3, 17, (1 << 20) / element + 1] {
            let bytes = element * elements;
            bench.shared.reset_counters();
            let ones = one.to_le_bytes()[..element].repeat(elements);
            // One more element, which the operation does not change.
            let last = INTO + bytes as u64;
            bench.shared.memory().write(last, &[0x55; 4]).unwrap();
            let expected = two.to_le_bytes()[..element].repeat(elements);
            assert!(bench.combined(op, &ones, &ones) == expected, "{op:?} of {elements}");
            assert_eq!(bench.memory(last, 4), [0x55; 4]);
            assert_eq!(bench.counter(Counter::ComputeRead), 2 * bytes as u64);
            assert_eq!(bench.counter(Counter::ComputeWritten), bytes as u64);
        }
    }
}

#[test]
fn adjacent_ranges_do_not_overlap() {
    let mut bench = Bench::new();
    bench
        .shared
        .memory()
        .write(100, &[0, 0, 0x80, 0x3f, 0x80, 0x3f])
        .unwrap();
    bench.ok(Op::AddBf16, 102, 2, 104);
    bench.ok(Op::AddBf16, 104, 2, 102);
    assert_eq!(bench.memory(100, 6), [0, 0, 0, 0x40, 0x40, 0x40]);
}

/// Values of f32 of all kinds, with many of the same exponent.
fn any_f32() -> impl Strategy<Value = u32> {
    prop_oneof![
        any::<u32>(),
        (0_u32..4, any::<u32>()).prop_map(|(exponent, rest)| ((126 + exponent) << 23) | (rest & 0x807f_ffff)),
        (0_u32..8).prop_map(|low| INF - 4 + low),
        (any::<bool>(), 0_u32..4).prop_map(|(sign, low)| (u32::from(sign) << 31) | low),
    ]
}

fn any_bf16() -> impl Strategy<Value = u16> {
    prop_oneof![
        any::<u16>(),
        (0_u16..20, any::<u16>()).prop_map(|(exponent, rest)| ((118 + exponent) << 7) | (rest & 0x807f)),
        (0_u16..8).prop_map(|low| 0x7f80 - 4 + low),
        (any::<bool>(), 0_u16..4).prop_map(|(sign, low)| (u16::from(sign) << 15) | low),
    ]
}

proptest! {
    #![proptest_config(config(20))]

    #[test]
    fn f32_agrees_with_f64(pairs in proptest::collection::vec((any_f32(), any_f32()), 1..3000)) {
        let mut bench = Bench::new();
        let (a, b): (Vec<u32>, Vec<u32>) = pairs.into_iter().unzip();
        let by = |operation: fn(u32, u32) -> u32| -> Vec<u32> {
            a.iter().zip(&b).map(|(a, b)| operation(*a, *b)).collect()
        };
        let sums = bench.f32s(Op::AddF32, &a, &b);
        prop_assert_eq!(&bench.f32s(Op::AddF32, &b, &a), &sums);
        prop_assert_eq!(sums, by(sum));
        prop_assert_eq!(bench.f32s(Op::MaxF32, &a, &b), by(maximum));
    }

    #[test]
    fn bf16_agrees_with_f64(pairs in proptest::collection::vec((any_bf16(), any_bf16()), 1..3000)) {
        let mut bench = Bench::new();
        let (a, b): (Vec<u16>, Vec<u16>) = pairs.into_iter().unzip();
        let by = |operation: fn(u16, u16) -> u16| -> Vec<u16> {
            a.iter().zip(&b).map(|(a, b)| operation(*a, *b)).collect()
        };
        let sums = bench.bf16s(Op::AddBf16, &a, &b);
        prop_assert_eq!(&bench.bf16s(Op::AddBf16, &b, &a), &sums);
        prop_assert_eq!(sums, by(|a, b| nearest(value_of(a) + value_of(b))));
        let expected = by(|a, b| (maximum(u32::from(a) << 16, u32::from(b) << 16) >> 16) as u16);
        prop_assert_eq!(bench.bf16s(Op::MaxBf16, &a, &b), expected);
    }
}
