// SPDX-License-Identifier: MIT OR Apache-2.0

//! Copies from and to memory that others change at any time: devices by DMA, other processes, other mappings.
//!
//! Nothing here makes a reference to such memory. Every access to it is volatile, happens once, and is as wide as its
//! address and the bytes left allow, up to 8 bytes: an aligned group of 8, 4 or 2 bytes is read or written as one.
//!
//! The crate is one of `unsafe` functions over raw pointers; who knows that the memory is mapped wraps them.
#![no_std]
#![allow(unsafe_code)]

use core::sync::atomic::{fence, Ordering};

/// The widest access, up to 8 bytes, that is aligned at `at` and does not pass `left` bytes.
fn width(at: usize, left: usize) -> usize {
    [8, 4, 2].into_iter().find(|w| at % w == 0 && left >= *w).unwrap_or(1)
}

/// The width of the next access at the address `at`, and the number of such accesses that follow one another, for a copy of
/// `left` bytes.
pub fn run(at: usize, left: usize) -> (usize, usize) {
    match width(at, left) {
        8 => (8, left / 8),
        width => (width, 1),
    }
}

/// One volatile load of `width` bytes.
///
/// # Safety
///
/// `from` must be mapped for `width` bytes and aligned to `width`, which is 8, 4, 2 or 1.
unsafe fn load(from: *const u8, width: usize) -> [u8; 8] {
    let mut bytes = [0; 8];
    // SAFETY: the caller's promise; any bytes are valid integers.
    unsafe {
        match width {
            8 => bytes = from.cast::<u64>().read_volatile().to_ne_bytes(),
            4 => bytes[..4].copy_from_slice(&from.cast::<u32>().read_volatile().to_ne_bytes()),
            2 => bytes[..2].copy_from_slice(&from.cast::<u16>().read_volatile().to_ne_bytes()),
            _ => bytes[0] = from.read_volatile(),
        }
    }
    bytes
}

/// One volatile store of the first `width` of `bytes`.
///
/// # Safety
///
/// `to` must be mapped for `width` bytes and aligned to `width`, which is 8, 4, 2 or 1.
unsafe fn store(to: *mut u8, width: usize, bytes: [u8; 8]) {
    let [a, b, c, d, ..] = bytes;
    // SAFETY: the caller's promise.
    unsafe {
        match width {
            8 => to.cast::<u64>().write_volatile(u64::from_ne_bytes(bytes)),
            4 => to.cast::<u32>().write_volatile(u32::from_ne_bytes([a, b, c, d])),
            2 => to.cast::<u16>().write_volatile(u16::from_ne_bytes([a, b])),
            _ => to.write_volatile(a),
        }
    }
}

/// Reads `out.len()` bytes.
///
/// # Safety
///
/// As many bytes must be mapped for reading at `from`.
pub unsafe fn read(from: *const u8, out: &mut [u8]) {
    let mut done = 0;
    while done < out.len() {
        let (width, count) = run(from as usize + done, out.len() - done);
        for part in out[done..done + width * count].chunks_exact_mut(width) {
            // SAFETY: `done + width` is at most the length that the caller promises, and `width` divides the address.
            let bytes = unsafe { load(from.add(done), width) };
            part.copy_from_slice(&bytes[..width]);
            done += width;
        }
    }
}

/// Writes `data`.
///
/// # Safety
///
/// As many bytes must be mapped for writing at `to`.
pub unsafe fn write(to: *mut u8, data: &[u8]) {
    let mut done = 0;
    while done < data.len() {
        let (width, count) = run(to as usize + done, data.len() - done);
        for part in data[done..done + width * count].chunks_exact(width) {
            let mut bytes = [0; 8];
            bytes[..width].copy_from_slice(part);
            // SAFETY: as in `read()`.
            unsafe { store(to.add(done), width, bytes) };
            done += width;
        }
    }
}

/// Sets `len` bytes to `byte`.
///
/// # Safety
///
/// `len` bytes must be mapped for writing at `to`.
pub unsafe fn fill(to: *mut u8, len: usize, byte: u8) {
    let mut done = 0;
    while done < len {
        let (width, count) = run(to as usize + done, len - done);
        for _ in 0..count {
            // SAFETY: as in `read()`.
            unsafe { store(to.add(done), width, [byte; 8]) };
            done += width;
        }
    }
}

/// Copies `len` bytes from such memory to such memory, with accesses that are aligned on both sides. The order is that of
/// addresses, also where the two overlap.
///
/// # Safety
///
/// `len` bytes must be mapped for reading at `from` and for writing at `to`.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let mut done = 0;
    while done < len {
        // What is aligned alike in both is as aligned as their addresses together.
        let (width, count) = run((from as usize + done) | (to as usize + done), len - done);
        for _ in 0..count {
            // SAFETY: `done + width` is at most `len`, which the caller promises, and `width` divides both addresses.
            unsafe { store(to.add(done), width, load(from.add(done), width)) };
            done += width;
        }
    }
}

/// Waits until earlier stores of this thread are visible to devices, also those in write-combining buffers, which
/// ordinary fences do not flush.
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: sfence is part of SSE, which every x86-64 processor has.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
    fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    const LEN: usize = 41;

    fn pattern() -> Vec<u8> {
        (1..=64).collect()
    }

    #[test]
    fn all_offsets_and_lengths_arrive_and_nothing_else_does() {
        for at in 0..9 {
            for len in 0..LEN {
                let mut memory = pattern();
                let data = [0xa5; LEN];
                // SAFETY: the vector is longer than the last offset and length together.
                unsafe { write(memory.as_mut_ptr().add(at), &data[..len]) };
                assert!(memory[at..at + len].iter().all(|&byte| byte == 0xa5));
                assert_eq!(
                    (&memory[..at], &memory[at + len..]),
                    (&pattern()[..at], &pattern()[at + len..])
                );
                // SAFETY: as above.
                unsafe { fill(memory.as_mut_ptr().add(at), len, 0x5a) };
                assert!(memory[at..at + len].iter().all(|&byte| byte == 0x5a));
                assert_eq!(
                    (&memory[..at], &memory[at + len..]),
                    (&pattern()[..at], &pattern()[at + len..])
                );
                let (memory, mut out) = (pattern(), std::vec![0; len]);
                // SAFETY: as above.
                unsafe { read(memory.as_ptr().add(at), &mut out) };
                assert_eq!(out, memory[at..at + len]);
            }
        }
    }

    #[test]
    fn copies_between_all_alignments() {
        for from in 0..9 {
            for to in 0..9 {
                for len in 0..LEN {
                    let (source, mut target) = (pattern(), std::vec![0; 64]);
                    // SAFETY: both vectors are longer than the last offset and length together.
                    unsafe { copy(source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
                    assert_eq!(target[to..to + len], source[from..from + len]);
                    assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0));
                }
            }
        }
    }

    #[test]
    fn accesses_are_as_wide_as_they_can_be() {
        let widths = [
            (0, 9, 8),
            (8, 8, 8),
            (4, 8, 4),
            (2, 8, 2),
            (1, 8, 1),
            (8, 7, 4),
            (8, 3, 2),
            (8, 1, 1),
            (6, 5, 2),
            (0, 100, 8),
            (4, 100, 4),
            (2, 100, 2),
            (6, 1, 1),
            (1, 100, 1),
        ];
        for (at, left, expected) in widths {
            assert_eq!(width(at, left), expected, "{left} bytes at {at}");
        }
    }
}
