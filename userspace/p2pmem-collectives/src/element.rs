// SPDX-License-Identifier: MIT OR Apache-2.0

//! Elements of a payload, and reductions of two elements to one.
//!
//! [`combine`] defines results bit for bit, and every engine has the same ones. Results do not depend on the order of the two
//! operands: a result that is NaN always has the same bits, and the maximum of +0 and -0 is +0. The sum of three or more
//! elements depends on the order of additions, as always with floating point.

use std::fmt;
use std::str::FromStr;

use anyhow::{anyhow, Error};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Type of the elements of a payload, which are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Element {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of an [`Element::F32`].
    Bf16,
}

/// How two elements become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Reduction {
    /// The sum, rounded to nearest, ties to even. The sum of bfloat16 elements is computed in f32, and then rounded.
    Sum,
    /// The larger element, or NaN if one of both is NaN.
    Max,
}

impl Element {
    /// All types of elements.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// Returns the size in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// Returns the name: `f32` or `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl Reduction {
    /// All reductions.
    pub const ALL: [Self; 2] = [Self::Sum, Self::Max];

    /// Returns the name: `sum` or `max`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Element {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|element| element.name() == name);
        found.ok_or_else(|| anyhow!("{name:?} is no type of elements: use f32 or bf16"))
    }
}

impl FromStr for Reduction {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|reduction| reduction.name() == name);
        found.ok_or_else(|| anyhow!("{name:?} is no reduction: use sum or max"))
    }
}

/// Bits of a result that is NaN.
const NAN_F32: u32 = 0x7fc0_0000;
/// As [`NAN_F32`], of [`Element::Bf16`].
const NAN_BF16: u16 = 0x7fc0;

fn to_f32(value: f32) -> [u8; 4] {
    let bits = if value.is_nan() { NAN_F32 } else { value.to_bits() };
    bits.to_le_bytes()
}

fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Rounds to nearest, ties to even.
fn to_bf16(value: f32) -> [u8; 2] {
    if value.is_nan() {
        return NAN_BF16.to_le_bytes();
    }
    let bits = value.to_bits();
    // Adds a bit less than half of the last remaining bit, or exactly half if this bit is odd. A carry into the exponent gives
    // the next value, at the end infinity. The largest bits are 0xff80_0000, so the sum does not overflow.
    let rounded = bits + 0x7fff + ((bits >> 16) & 1);
    ((rounded >> 16) as u16).to_le_bytes()
}

fn sum(a: f32, b: f32) -> f32 {
    a + b
}

fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        f32::NAN
    } else if a > b {
        a
    } else if b > a {
        b
    } else {
        // Two equal values have the same bits, or are zeros: positive unless both are negative.
        f32::from_bits(a.to_bits() & b.to_bits())
    }
}

fn each<const N: usize>(into: &mut [u8], from: &[u8], operation: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (a, b) in into.chunks_exact_mut(N).zip(from.chunks_exact(N)) {
        let (mut left, mut right) = ([0; N], [0; N]);
        left.copy_from_slice(a);
        right.copy_from_slice(b);
        a.copy_from_slice(&operation(left, right));
    }
}

/// Replaces each element of `into` by the reduction of this element and of that of `from`.
///
/// # Panics
///
/// The lengths differ, or are no multiple of the size of an element.
pub fn combine(element: Element, reduction: Reduction, into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "both operands have the same length");
    assert_eq!(into.len() % element.bytes(), 0, "an operand has whole elements");
    // The function is a constant in each loop, so that the compiler can use vectors.
    match (element, reduction) {
        (Element::F32, Reduction::Sum) => each(into, from, |a, b| {
            to_f32(sum(f32::from_le_bytes(a), f32::from_le_bytes(b)))
        }),
        (Element::F32, Reduction::Max) => each(into, from, |a, b| {
            to_f32(max(f32::from_le_bytes(a), f32::from_le_bytes(b)))
        }),
        (Element::Bf16, Reduction::Sum) => each(into, from, |a, b| to_bf16(sum(from_bf16(a), from_bf16(b)))),
        (Element::Bf16, Reduction::Max) => each(into, from, |a, b| to_bf16(max(from_bf16(a), from_bf16(b)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn f32(reduction: Reduction, a: u32, b: u32) -> u32 {
        let mut into = a.to_le_bytes();
        combine(Element::F32, reduction, &mut into, &b.to_le_bytes());
        u32::from_le_bytes(into)
    }

    fn bf16(reduction: Reduction, a: u16, b: u16) -> u16 {
        let mut into = a.to_le_bytes();
        combine(Element::Bf16, reduction, &mut into, &b.to_le_bytes());
        u16::from_le_bytes(into)
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

    /// Returns whether no bfloat16 is closer to a finite value than `bits`, and `bits` is even if another one is as close.
    fn is_nearest(bits: u16, value: f64) -> bool {
        // For rounding, infinity is the value that would follow the largest one.
        let at = |magnitude: u16| {
            if magnitude == 0x7f80 {
                2_f64.powi(128)
            } else {
                value_of(magnitude)
            }
        };
        let magnitude = bits & 0x7fff;
        let distance = (at(magnitude) - value.abs()).abs();
        let neighbours = [
            magnitude.checked_sub(1),
            Some(magnitude + 1).filter(|next| *next <= 0x7f80),
        ];
        (bits >> 15 == 1) == value.is_sign_negative()
            && neighbours.into_iter().flatten().all(|other| {
                let of_other = (at(other) - value.abs()).abs();
                distance < of_other || distance == of_other && magnitude & 1 == 0
            })
    }

    const INF: u32 = 0x7f80_0000;

    #[test]
    fn special_values() {
        let (one, minus) = (1_f32.to_bits(), 1 << 31);
        for (a, b, sum, max) in [
            (0, minus, 0, 0),
            (minus, minus, minus, minus),
            (minus | one, minus, minus | one, minus),
            (INF, one, INF, INF),
            (INF, minus | INF, NAN_F32, INF),
            (minus | INF, minus | INF, minus | INF, minus | INF),
            (0x7f80_0001, one, NAN_F32, NAN_F32),
            (0xffff_ffff, INF, NAN_F32, NAN_F32),
            (0xffc1_2345, 0x7fc5_4321, NAN_F32, NAN_F32),
            (0x7f7f_ffff, 0x7f7f_ffff, INF, 0x7f7f_ffff),
            (1, 1, 2, 1),
        ] {
            for (a, b) in [(a, b), (b, a)] {
                assert_eq!(f32(Reduction::Sum, a, b), sum, "{a:#x} + {b:#x}");
                assert_eq!(f32(Reduction::Max, a, b), max, "{a:#x} {b:#x}");
            }
        }
    }

    #[test]
    fn sums_of_bf16_are_rounded_to_even() {
        for (a, b, sum) in [
            // 256 + 1, 258 + 1: ties.
            (0x4380, 0x3f80, 0x4380),
            (0x4381, 0x3f80, 0x4382),
            (0xc380, 0xbf80, 0xc380),
            (0xc381, 0xbf80, 0xc382),
            // A bit more, and a bit less.
            (0x4380, 0x3f81, 0x4381),
            (0x4381, 0x3f7f, 0x4381),
            // To the next exponent, and to infinity.
            (0x43ff, 0x3f80, 0x4400),
            (0x7f7f, 0x7b00, 0x7f80),
            (0x7f7f, 0x7aff, 0x7f7f),
            (0x7f80, 0xff80, NAN_BF16),
            (0xffff, 0x3f80, NAN_BF16),
        ] {
            assert_eq!(bf16(Reduction::Sum, a, b), sum, "{a:#x} + {b:#x}");
            assert_eq!(bf16(Reduction::Sum, b, a), sum, "{b:#x} + {a:#x}");
        }
    }

    #[test]
    fn every_bf16_survives_its_conversion() {
        for bits in 0..=u16::MAX {
            let expected = if value_of(bits).is_nan() { NAN_BF16 } else { bits };
            // -0 is the neutral element.
            assert_eq!(bf16(Reduction::Sum, bits, 0x8000), expected);
            assert_eq!(bf16(Reduction::Max, bits, bits), expected);
        }
    }

    #[test]
    fn names_are_those_of_programs_and_json() {
        for element in Element::ALL {
            assert_eq!(element.to_string().parse::<Element>().unwrap(), element);
            assert_eq!(serde_json::to_value(element).unwrap(), element.name());
            assert_eq!(element.to_possible_value().unwrap().get_name(), element.name());
        }
        for reduction in Reduction::ALL {
            assert_eq!(reduction.to_string().parse::<Reduction>().unwrap(), reduction);
            assert_eq!(serde_json::to_value(reduction).unwrap(), reduction.name());
            assert_eq!(reduction.to_possible_value().unwrap().get_name(), reduction.name());
        }
        assert_eq!((Element::F32.bytes(), Element::Bf16.bytes()), (4, 2));
        let error = "F32".parse::<Element>().unwrap_err();
        assert_eq!(error.to_string(), "\"F32\" is no type of elements: use f32 or bf16");
        assert!("min".parse::<Reduction>().is_err());
    }

    #[test]
    #[should_panic(expected = "whole elements")]
    fn a_part_of_an_element_panics() {
        combine(Element::Bf16, Reduction::Sum, &mut [0; 3], &[0; 3]);
    }

    #[test]
    #[should_panic(expected = "same length")]
    fn operands_of_different_lengths_panic() {
        combine(Element::Bf16, Reduction::Sum, &mut [0; 4], &[0; 2]);
    }

    /// Bits of all kinds of values, many of them close to each other.
    fn any_bits() -> impl Strategy<Value = u32> {
        prop_oneof![
            any::<u32>(),
            (0_u32..20, any::<u32>()).prop_map(|(exponent, rest)| ((118 + exponent) << 23) | (rest & 0x807f_ffff)),
            (0_u32..8, any::<u16>()).prop_map(|(low, rest)| INF - (4 << 16) + (low << 16) + u32::from(rest)),
            (any::<bool>(), 0_u32..4, any::<u16>())
                .prop_map(|(sign, low, rest)| (u32::from(sign) << 31) | (low << 16) | u32::from(rest)),
        ]
    }

    /// The maximum by the order of the bits.
    fn maximum(a: u32, b: u32) -> u32 {
        let order = |bits: u32| match bits >> 31 {
            1 => -i64::from(bits & 0x7fff_ffff) - 1,
            _ => i64::from(bits),
        };
        if f32::from_bits(a).is_nan() || f32::from_bits(b).is_nan() {
            NAN_F32
        } else if order(a) > order(b) {
            a
        } else {
            b
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn f32_agrees_with_f64((a, b) in (any_bits(), any_bits())) {
            // The sum in f64, rounded once more, is the sum rounded once: f64 has more than twice the bits.
            let sum = (f64::from(f32::from_bits(a)) + f64::from(f32::from_bits(b))) as f32;
            let expected = if sum.is_nan() { NAN_F32 } else { sum.to_bits() };
            prop_assert_eq!(f32(Reduction::Sum, a, b), expected);
            prop_assert_eq!(f32(Reduction::Sum, b, a), expected);
            prop_assert_eq!(f32(Reduction::Max, a, b), maximum(a, b));
            prop_assert_eq!(f32(Reduction::Max, b, a), maximum(a, b));
        }

        #[test]
        fn bf16_agrees_with_f64((a, b) in (any_bits(), any_bits())) {
            let (a, b) = ((a >> 16) as u16, (b >> 16) as u16);
            let exact = value_of(a) + value_of(b);
            let sum = bf16(Reduction::Sum, a, b);
            prop_assert_eq!(bf16(Reduction::Sum, b, a), sum);
            if exact.is_nan() {
                prop_assert_eq!(sum, NAN_BF16);
            } else if exact.is_infinite() {
                prop_assert_eq!(value_of(sum), exact);
            } else {
                prop_assert!(is_nearest(sum, exact), "{:#x} + {:#x} = {:#x}", a, b, sum);
            }
            let expected = (maximum(u32::from(a) << 16, u32::from(b) << 16) >> 16) as u16;
            prop_assert_eq!(bf16(Reduction::Max, a, b), expected);
            prop_assert_eq!(bf16(Reduction::Max, b, a), expected);
        }

        #[test]
        fn elements_are_combined_one_by_one(pairs in proptest::collection::vec((any_bits(), any_bits()), 0..40)) {
            let bytes = |which: fn(&(u32, u32)) -> u32| -> Vec<u8> {
                pairs.iter().flat_map(|pair| which(pair).to_le_bytes()).collect()
            };
            for reduction in Reduction::ALL {
                let mut into = bytes(|pair| pair.0);
                combine(Element::F32, reduction, &mut into, &bytes(|pair| pair.1));
                let expected: Vec<u8> =
                    pairs.iter().flat_map(|(a, b)| f32(reduction, *a, *b).to_le_bytes()).collect();
                prop_assert_eq!(into, expected);
            }
        }
    }
}
