// SPDX-License-Identifier: MIT OR Apache-2.0

//! The processor's counter of ticks.

#![allow(unsafe_code)]

/// Returns the ticks of the processor's time stamp counter, or `None` if the processor has another kind of counter.
pub fn ticks() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: Every x86-64 processor has the instruction, and Linux permits it unless a process asks otherwise, which this one
    // does not.
    return Some(unsafe { core::arch::x86_64::_rdtsc() });
    #[cfg(not(target_arch = "x86_64"))]
    None
}
