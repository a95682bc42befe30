// SPDX-License-Identifier: MIT OR Apache-2.0

//! Copies from and to memory that others change at any time: devices by DMA, other processes, other mappings.
//!
//! The crate never creates a reference to such memory. Every access is volatile, is done once, and is as wide as the
//! address and the remaining bytes permit, up to 8 bytes: an aligned group of 8, 4 or 2 bytes is read or written by one
//! access.
//!
//! The functions are `unsafe` and take raw pointers. Callers guarantee that the memory is mapped.
#![no_std]
#![allow(unsafe_code)]

use core::sync::atomic::{fence, Ordering};

/// Returns the widest access, at most 8 bytes, that is aligned at `at` and has at most `left` bytes.
fn width(at: usize, left: usize) -> usize {
    [8, 4, 2].into_iter().find(|w| at % w == 0 && left >= *w).unwrap_or(1)
}

/// Returns the width of the next access at the address `at`, and how many accesses of this width follow one another, for a
/// copy of `left` bytes.
pub fn run(at: usize, left: usize) -> (usize, usize) {
    match width(at, left) {
        8 => (8, left / 8),
        width => (width, 1),
    }
}

/// Does one volatile load of `width` bytes.
///
/// # Safety
///
/// `from` must be mapped for `width` bytes and aligned to `width`, which is 8, 4, 2 or 1.
unsafe fn load(from: *const u8, width: usize) -> [u8; 8] {
    let mut bytes = [0; 8];
    // SAFETY: the caller guarantees a mapped and aligned address; any bytes are valid integers.
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

/// Does one volatile store of the first `width` bytes of `bytes`.
///
/// # Safety
///
/// `to` must be mapped for `width` bytes and aligned to `width`, which is 8, 4, 2 or 1.
unsafe fn store(to: *mut u8, width: usize, bytes: [u8; 8]) {
    let [a, b, c, d, ..] = bytes;
    // SAFETY: the caller guarantees a mapped and aligned address.
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
/// ```
/// let memory = [1u8, 2, 3, 4];
/// let mut out = [0; 3];
/// // SAFETY: the array has 4 bytes.
/// unsafe { p2pmem_access_sys::read(memory.as_ptr(), &mut out) };
/// assert_eq!(out, [1, 2, 3]);
/// ```
///
/// # Safety
///
/// `from` must be mapped for reading of `out.len()` bytes.
pub unsafe fn read(from: *const u8, out: &mut [u8]) {
    let mut done = 0;
    while done < out.len() {
        let (width, count) = run(from as usize + done, out.len() - done);
        for part in out[done..done + width * count].chunks_exact_mut(width) {
            // SAFETY: `done + width` is at most the length that the caller guarantees, and `width` divides the address.
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
/// `to` must be mapped for writing of `data.len()` bytes.
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
/// `to` must be mapped for writing of `len` bytes.
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

/// Copies `len` bytes between two such places, with accesses that are aligned in both. Copies in ascending order of
/// addresses, also if the places overlap.
///
/// # Safety
///
/// `from` must be mapped for reading and `to` for writing of `len` bytes.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let mut done = 0;
    while done < len {
        // The bitwise OR of two addresses is aligned as the less aligned one.
        let (width, count) = run((from as usize + done) | (to as usize + done), len - done);
        for _ in 0..count {
            // SAFETY: `done + width` is at most `len`, which the caller guarantees, and `width` divides both addresses.
            unsafe { store(to.add(done), width, load(from.add(done), width)) };
            done += width;
        }
    }
}

/// Waits until earlier stores of this thread are visible to devices, including stores in write-combining buffers, which
/// ordinary fences do not flush.
pub fn store_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: sfence is part of SSE, which every x86-64 processor has.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
    fence(Ordering::SeqCst);
}

/// Waits until earlier loads of this thread have their values before later loads start, including loads from memory that is
/// mapped write-combining, which ordinary fences do not order.
pub fn load_fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: lfence is part of SSE2, which every x86-64 processor has.
    unsafe {
        core::arch::x86_64::_mm_lfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier for the outer shareable domain, to which devices belong, has no other effect.
    unsafe {
        core::arch::asm!("dmb oshld", options(nostack, preserves_flags));
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
    fn write_changes_exactly_the_requested_bytes() {
        for at in 0..9 {
            for len in 0..LEN {
                let mut memory = pattern();
                let data = [0xa5; LEN];
                // SAFETY: the vector is longer than the largest offset and length together.
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
                    // SAFETY: both vectors are longer than the largest offset and length together.
                    unsafe { copy(source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
                    assert_eq!(target[to..to + len], source[from..from + len]);
                    assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0));
                }
            }
        }
    }

    #[test]
    fn widest_aligned_access_is_used() {
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
