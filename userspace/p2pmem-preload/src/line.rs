// SPDX-License-Identifier: MIT OR Apache-2.0

//! Lines on standard error, formatted without allocation and written by one call.

use std::fmt::{self, Write};

use crate::sys::{self, Errno};
use crate::Call;

/// Maximum length of a line or message in bytes. Longer ones are truncated.
pub(crate) const MAX_LINE: usize = 512;

/// Text in a fixed array.
pub(crate) struct Line {
    bytes: [u8; MAX_LINE],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // The last byte is reserved for the newline.
        let capacity = MAX_LINE - 1 - self.len;
        let n = text.floor_char_boundary_at_most(capacity);
        self.bytes[self.len..self.len + n].copy_from_slice(&text.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}

/// `str::floor_char_boundary()`, which stable Rust does not have yet.
trait FloorCharBoundary {
    fn floor_char_boundary_at_most(&self, most: usize) -> usize;
}

impl FloorCharBoundary for str {
    fn floor_char_boundary_at_most(&self, most: usize) -> usize {
        let mut n = most.min(self.len());
        while !self.is_char_boundary(n) {
            n -= 1;
        }
        n
    }
}

/// Writes one line.
pub(crate) fn write(args: fmt::Arguments<'_>) {
    let mut line = Line {
        bytes: [0; MAX_LINE],
        len: 0,
    };
    // Never fails; text beyond the capacity is dropped.
    let _ = line.write_fmt(args);
    line.bytes[line.len] = b'\n';
    sys::write_stderr(&line.bytes[..=line.len]);
}

/// Writes a line to standard error, with the library's name.
macro_rules! say {
    ($($args:tt)*) => {
        $crate::line::write(format_args!("p2pmem_preload: {}", format_args!($($args)*)))
    };
}
pub(crate) use say;

/// Returns whether successful registrations and mappings are reported, too.
pub(crate) fn log_success() -> bool {
    sys::environment(c"P2PMEM_PRELOAD_LOG").is_some_and(|value| !value.is_empty() && value.to_bytes() != b"0")
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            addr,
            length,
            access,
            ..
        } = self;
        write!(f, "{name}() of {length} bytes at {addr:#x}, access {access:#x},")
    }
}

/// An errno that is internal to the kernel (`include/linux/errno.h`). Some RDMA drivers return it to programs.
pub(crate) const ENOTSUPP: libc::c_int = 524;

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A table, because strerror() may allocate. Other errnos are rare here.
        let (name, text) = match self.0 {
            libc::EPERM => ("EPERM", "not permitted"),
            libc::ENXIO => ("ENXIO", "no such device or address"),
            libc::E2BIG => ("E2BIG", "too many parts"),
            libc::ENOMEM => ("ENOMEM", "out of memory or memory keys"),
            libc::EACCES => ("EACCES", "read-only memory"),
            libc::EFAULT => ("EFAULT", "bad address"),
            libc::EBUSY => ("EBUSY", "busy"),
            libc::EXDEV => ("EXDEV", "two buffers"),
            libc::ENODEV => ("ENODEV", "the provider was removed"),
            libc::EINVAL => ("EINVAL", "invalid argument"),
            libc::EMFILE => ("EMFILE", "too many open files"),
            libc::ENOSYS => ("ENOSYS", "not implemented"),
            libc::EOPNOTSUPP => ("EOPNOTSUPP", "not supported"),
            ENOTSUPP => ("ENOTSUPP, 524", "not supported by the driver"),
            libc::EREMOTEIO => ("EREMOTEIO", "remote I/O error"),
            libc::EHOSTUNREACH => ("EHOSTUNREACH", "the NIC cannot reach the provider"),
            other => return write!(f, "errno {other}"),
        };
        write!(f, "{text} ({name})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_between_characters() {
        let mut line = Line {
            bytes: [0; MAX_LINE],
            len: 0,
        };
        for _ in 0..MAX_LINE {
            line.write_str("aé").unwrap();
        }
        assert!(line.len < MAX_LINE && line.len >= MAX_LINE - 3);
        assert!(std::str::from_utf8(&line.bytes[..line.len]).is_ok());
        assert_eq!(line.bytes[MAX_LINE - 1], 0, "space for the newline");
    }
}
