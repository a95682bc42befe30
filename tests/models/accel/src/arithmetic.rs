// SPDX-License-Identifier: MIT OR Apache-2.0

//! Addition and maximum of f32 and bfloat16 values, as the bytes of BAR2, little-endian.
//!
//! Results do not depend on the order of operands, bit for bit: each NaN becomes the same NaN, and the maximum of +0 and -0 is
//! +0.

use p2pmem_accel_regs::{NAN_BF16, NAN_F32};

fn bits(value: f32) -> u32 {
    if value.is_nan() { NAN_F32 } else { value.to_bits() }
}

/// A bfloat16 value is the upper half of the f32 value that is equal to it.
fn wide(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Rounds to nearest, ties to even. Values beyond the largest one become infinite.
fn narrow(value: f32) -> u16 {
    if value.is_nan() {
        return NAN_BF16;
    }
    let bits = value.to_bits();
    // Does not overflow: the bits of infinity, with a sign, are 0xff80_0000.
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        f32::NAN
    } else if a > b {
        a
    } else if b > a {
        b
    } else {
        // Equal values differ in the sign of a zero only.
        f32::from_bits(a.to_bits() & b.to_bits())
    }
}

pub(super) fn add_f32(a: [u8; 4], b: [u8; 4]) -> [u8; 4] {
    bits(f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()
}

pub(super) fn max_f32(a: [u8; 4], b: [u8; 4]) -> [u8; 4] {
    bits(max(f32::from_le_bytes(a), f32::from_le_bytes(b))).to_le_bytes()
}

pub(super) fn add_bf16(a: [u8; 2], b: [u8; 2]) -> [u8; 2] {
    narrow(wide(a) + wide(b)).to_le_bytes()
}

pub(super) fn max_bf16(a: [u8; 2], b: [u8; 2]) -> [u8; 2] {
    narrow(max(wide(a), wide(b))).to_le_bytes()
}
