// SPDX-License-Identifier: MIT OR Apache-2.0

//! What engines need from io_uring, so that tests can transfer blocks to simulated drives.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::memory::BlockMemory;
use crate::sys::Ring;

/// A place in a file.
pub struct Target<'a, F> {
    /// The file.
    pub file: &'a Arc<F>,
    /// The byte of the file.
    pub offset: u64,
}

/// Transfers between buffers of block memory and files of the type `F`. Each transfer has a token.
pub trait Queue<F, T> {
    /// Starts to write a buffer to a file.
    ///
    /// # Errors
    ///
    /// Returns the token if the transfer cannot be started.
    fn write(&mut self, memory: &BlockMemory, buffer: usize, to: Target<'_, F>, token: T)
        -> Result<(), (T, io::Error)>;

    /// Starts to read a block of a file to a buffer.
    ///
    /// # Errors
    ///
    /// Returns the token if the transfer cannot be started.
    fn read(
        &mut self,
        memory: &BlockMemory,
        buffer: usize,
        from: Target<'_, F>,
        token: T,
    ) -> Result<(), (T, io::Error)>;

    /// Returns a transfer that is complete, if there is one.
    fn completed(&mut self) -> Option<(T, io::Result<()>)>;

    /// Waits until `completed()` may return something. Returns at once if no transfer is in flight.
    ///
    /// # Errors
    ///
    /// The transfers continue after an error.
    fn wait(&mut self) -> io::Result<()>;

    /// Makes [`event`](Self::event) unreadable, until the next transfer is complete.
    fn clear_event(&self);

    /// Returns a descriptor that is readable when transfers are complete.
    fn event(&self) -> BorrowedFd<'_>;
}

impl<T> Queue<File, T> for Ring<T> {
    fn write(
        &mut self,
        memory: &BlockMemory,
        buffer: usize,
        to: Target<'_, File>,
        token: T,
    ) -> Result<(), (T, io::Error)> {
        Self::write(self, memory.memory(), memory.range(buffer), to.file, to.offset, token)
    }

    fn read(
        &mut self,
        memory: &BlockMemory,
        buffer: usize,
        from: Target<'_, File>,
        token: T,
    ) -> Result<(), (T, io::Error)> {
        Self::read(
            self,
            memory.memory(),
            memory.range(buffer),
            from.file,
            from.offset,
            token,
        )
    }

    fn completed(&mut self) -> Option<(T, io::Result<()>)> {
        Self::completed(self)
    }

    fn wait(&mut self) -> io::Result<()> {
        Self::wait(self, None)
    }

    fn clear_event(&self) {
        Self::clear_event(self);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}
