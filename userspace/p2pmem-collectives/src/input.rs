// SPDX-License-Identifier: MIT OR Apache-2.0

//! The payload of measurements: numbers that every rank can compute for every other one, and their comparison with the
//! result of a call.

use p2pmem_verbs::Span;

use crate::element::Element;
use crate::schedule::{Call, Plan};

/// Bytes that are computed at once.
const PART: u64 = 1 << 20;

/// Returns the bytes `range` of the payload of a rank. The numbers have different sizes, so a sum depends on its order.
fn input(element: Element, seed: u64, rank: usize, range: std::ops::Range<u64>) -> Vec<u8> {
    let size = element.bytes() as u64;
    let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
    for index in range.start / size..range.end / size {
        let mut mixed = seed ^ ((rank as u64) << 48) ^ index;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // 20 bits of mantissa, one sign, and an exponent of 2^-4 to 2^3.
        let mantissa = (mixed >> 44) as f32 / (1 << 20) as f32 - 0.5;
        let number = mantissa * [0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0][(mixed & 7) as usize];
        match element {
            Element::F32 => bytes.extend(number.to_le_bytes()),
            Element::Bf16 => bytes.extend(&number.to_le_bytes()[2..]),
        }
    }
    bytes
}

fn parts(range: std::ops::Range<u64>) -> impl Iterator<Item = std::ops::Range<u64>> {
    let end = range.end;
    range.step_by(PART as usize).map(move |at| at..end.min(at + PART))
}

/// Writes the payload of a rank.
///
/// # Errors
///
/// The buffer was revoked.
pub fn fill(memory: &Span, call: &Call, seed: u64, rank: usize) -> p2pmem::Result<()> {
    for part in parts(0..call.bytes) {
        let bytes = input(call.element, seed, rank, part.clone());
        memory.try_write((call.at + part.start) as usize, &bytes)?;
    }
    memory.flush();
    Ok(())
}

/// Compares the payload of a rank with the result of the call by its definition. Returns the number of wrong bytes.
///
/// # Errors
///
/// The buffer was revoked.
pub fn wrong_bytes(memory: &Span, plan: &Plan, seed: u64, rank: usize) -> p2pmem::Result<u64> {
    let call = plan.call();
    let mut wrong = 0;
    for index in (0..plan.segments()).filter(|index| plan.has_result(rank, *index)) {
        for part in parts(plan.segment(index)) {
            let expected = plan.result(index, |of| input(call.element, seed, of, part.clone()));
            let mut found = vec![0; expected.len()];
            memory.try_read((call.at + part.start) as usize, &mut found)?;
            wrong += found
                .iter()
                .zip(&expected)
                .filter(|(found, expected)| found != expected)
                .count() as u64;
        }
    }
    Ok(wrong)
}
