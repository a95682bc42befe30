// SPDX-License-Identifier: MIT OR Apache-2.0

//! Bytes in the memory of a rank, which may be revoked.

use p2pmem_verbs::Span;

/// Reads bytes.
///
/// # Errors
///
/// The memory was revoked.
pub fn read(span: &Span, at: u64, bytes: usize) -> p2pmem::Result<Vec<u8>> {
    let mut all = vec![0; bytes];
    span.try_read(at as usize, &mut all)?;
    Ok(all)
}

/// Writes bytes, and makes them visible to devices.
///
/// # Errors
///
/// The memory was revoked.
pub fn write(span: &Span, at: u64, bytes: &[u8]) -> p2pmem::Result<()> {
    span.try_write(at as usize, bytes)?;
    span.flush();
    Ok(())
}
