// SPDX-License-Identifier: MIT OR Apache-2.0

//! Message buffers. A buffer is filled once, packets share it, and the pool reuses it.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::packet::Chunk;

/// Most bytes of a message that are read at a time; a multiple of every path MTU.
pub(super) const CHUNK: usize = 64 << 10;

/// Buffers up to this size are allocated with the exact size, which costs less than keeping a whole chunk in use.
const MAX_UNPOOLED: usize = 8 << 10;

/// Most buffers in the pool.
const MAX_POOLED: usize = 256;

/// Buffers in the order of their use. The pool reuses a buffer when no packet refers to it.
#[derive(Debug, Default)]
pub(super) struct Pool {
    chunks: VecDeque<Chunk>,
}

impl Pool {
    /// Returns a buffer whose first `len` bytes (at most [`CHUNK`]) were filled by `fill`.
    pub(super) fn fill<E>(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Chunk, E> {
        if len <= MAX_UNPOOLED {
            let mut bytes = vec![0; len];
            fill(&mut bytes)?;
            return Ok(Arc::new(bytes));
        }
        let mut chunk = self.take();
        // Copies nothing: `take` returns a buffer without other references.
        let result = fill(&mut Arc::make_mut(&mut chunk)[..len]);
        if self.chunks.len() < MAX_POOLED {
            self.chunks.push_back(chunk.clone());
        }
        result.map(|()| chunk)
    }

    /// Returns the oldest free buffer, or a new one. Checks only two buffers: the oldest are most likely to be free.
    fn take(&mut self) -> Chunk {
        for _ in 0..2 {
            let Some(mut chunk) = self.chunks.pop_front() else {
                break;
            };
            if Arc::get_mut(&mut chunk).is_some() {
                return chunk;
            }
            self.chunks.push_back(chunk);
        }
        Arc::new(vec![0; CHUNK])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(pool: &mut Pool, len: usize) -> Chunk {
        pool.fill::<()>(len, |bytes| {
            bytes.fill(7);
            Ok(())
        })
        .unwrap()
    }

    #[test]
    fn buffer_in_use_is_not_reused() {
        let mut pool = Pool::default();
        let first = get(&mut pool, CHUNK);
        let second = get(&mut pool, CHUNK);
        assert!(!Arc::ptr_eq(&first, &second));
        let address = Arc::as_ptr(&first);
        drop(first);
        assert_eq!(Arc::as_ptr(&get(&mut pool, MAX_UNPOOLED + 1)), address);
        assert!(!Arc::ptr_eq(&get(&mut pool, CHUNK), &second));
    }

    #[test]
    fn small_buffers_have_the_requested_length() {
        let mut pool = Pool::default();
        assert_eq!(get(&mut pool, 5).len(), 5);
        assert_eq!(get(&mut pool, 0).len(), 0);
        assert!(pool.chunks.is_empty());
    }

    #[test]
    fn a_failed_fill_keeps_the_buffer() {
        let mut pool = Pool::default();
        assert_eq!(pool.fill(CHUNK, |_| Err("no")).unwrap_err(), "no");
        assert_eq!(pool.chunks.len(), 1);
        assert_eq!(get(&mut pool, CHUNK)[0], 7);
        assert_eq!(pool.chunks.len(), 1);
    }
}
