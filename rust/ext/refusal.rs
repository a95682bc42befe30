// SPDX-License-Identifier: GPL-2.0

//! Refusals: an errno with a message that gives the reason.
//!
//! Creating a refusal allocates memory and may sleep; process context. This file takes no locks.
//!
//! No C header: the messages are p2pmem's own. [`Refusal::log`] uses
//! [`include/linux/printk.h`](srctree/include/linux/printk.h).

use crate::{
    ext::log::{
        self,
        Owner, //
    },
    policy::path::PciAddr, //
};
use kernel::{
    fmt::{self, Write},
    prelude::*,
};

/// A message of bounded length, in UTF-8. Longer text is cut at a character boundary.
#[derive(Clone, Copy)]
pub(crate) struct Text {
    bytes: [u8; Self::MOST],
    len: usize,
}

impl Text {
    const MOST: usize = 232;
    /// The size in bytes of the longest message with its NUL.
    pub(crate) const LONGEST: u32 = Self::MOST as u32 + 1;

    /// The empty message.
    pub(crate) const EMPTY: Self = Self {
        bytes: [0; Self::MOST],
        len: 0,
    };

    /// Formats a message.
    pub(crate) fn new(args: fmt::Arguments<'_>) -> Self {
        let mut text = Self::EMPTY;
        // An error only means that the message was cut.
        let _ = text.write_fmt(args);
        text
    }

    /// Returns the message without a NUL.
    pub(crate) fn as_str(&self) -> &str {
        core::str::from_utf8(self.bytes.get(..self.len).unwrap_or_default()).unwrap_or_default()
    }
}

impl Write for Text {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let room = Self::MOST - self.len;
        let mut n = s.len().min(room);
        while !s.is_char_boundary(n) {
            n -= 1;
        }
        self.bytes[self.len..self.len + n].copy_from_slice(&s.as_bytes()[..n]);
        self.len += n;
        if n == s.len() {
            Ok(())
        } else {
            Err(fmt::Error)
        }
    }
}

/// An errno with the reason for it.
pub(crate) struct Refusal {
    pub(crate) error: Error,
    /// The message. Boxed, since refusals are returned through many frames of a small stack. `None` if there is no message
    /// or no memory for one.
    text: Option<KBox<Text>>,
    /// Whether [`Self::log`] logs the refusal.
    logged: bool,
}

/// The result of an operation that can be refused.
pub(crate) type Answer<T = ()> = core::result::Result<T, Refusal>;

impl Refusal {
    /// Creates a refusal that is logged. Without memory for the message, the refusal has none.
    pub(crate) fn new(error: Error, text: Text) -> Self {
        Self {
            error,
            text: KBox::new(text, GFP_KERNEL_ACCOUNT).ok(),
            logged: true,
        }
    }

    /// Returns a copy. Without memory for the message, the copy has none.
    pub(crate) fn again(&self) -> Self {
        Self {
            error: self.error,
            text: self
                .text
                .as_ref()
                .and_then(|text| KBox::new(**text, GFP_KERNEL_ACCOUNT).ok()),
            logged: self.logged,
        }
    }

    /// Excludes the refusal from the log, for errors that are a normal answer to a query.
    pub(crate) fn unlogged(self) -> Self {
        Self { logged: false, ..self }
    }

    /// Returns the message, which may be empty.
    pub(crate) fn text(&self) -> &Text {
        self.text.as_deref().unwrap_or(&Text::EMPTY)
    }

    /// Logs the refusal of the operation `what`, with the current process and the errno, at level notice.
    ///
    /// Rate-limited. Does nothing for a refusal without a message or an unlogged one.
    pub(crate) fn log(&self, what: &str) {
        if self.logged && !self.text().as_str().is_empty() && log::allowed() {
            pr_notice!(
                "{} refused for {}: {} (errno {})\n",
                what,
                Owner::current(),
                self.text().as_str(),
                -self.error.to_errno()
            );
        }
    }
}

/// Converts an errno. Only `ENOMEM` gets a message; others need none or come from the kernel, which alone knows the reason.
impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        if error == ENOMEM {
            Self::new(error, Text::new(fmt!("the kernel has no memory left for bookkeeping")))
        } else {
            Self {
                error,
                text: None,
                logged: false,
            }
        }
    }
}

impl From<kernel::alloc::AllocError> for Refusal {
    fn from(_: kernel::alloc::AllocError) -> Self {
        ENOMEM.into()
    }
}

/// Creates a [`Refusal`] of an errno and the arguments of a format string.
macro_rules! refuse {
    ($error:expr, $($text:tt)*) => {
        $crate::ext::refusal::Refusal::new($error, $crate::ext::refusal::Text::new(::kernel::prelude::fmt!($($text)*)))
    };
}
pub(crate) use refuse;

impl fmt::Display for PciAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, devfn } = self;
        f.write_fmt(fmt!("{:04x}:{:02x}:{:02x}.{}", domain, bus, devfn >> 3, devfn & 7))
    }
}

#[kunit_tests(p2pmem_refusal)]
mod tests {
    use super::*;

    #[test]
    fn message_is_truncated_at_character_boundary() {
        let mut text = Text::new(fmt!("x"));
        assert_eq!(text.as_str(), "x");
        // Two-byte characters from an odd offset on: the last one does not fit and is dropped whole.
        let mut written = 0;
        while text.write_str("\u{e9}").is_ok() {
            written += 1;
        }
        assert_eq!(written, (Text::MOST - 1) / 2);
        assert_eq!(text.as_str().chars().count(), written + 1);
        assert_eq!(text.as_str().len(), Text::MOST - 1);
        // One more byte fits, and then none.
        assert!(text.write_str("yz").is_err());
        assert!(text.as_str().ends_with('y'));
        assert_eq!(text.as_str().len(), Text::MOST);
        assert!(text.write_str("").is_ok());
        assert!(text.write_str("z").is_err());
    }

    #[test]
    fn errors_convert_to_refusals() {
        let plain = Refusal::from(EINVAL);
        assert!(plain.error == EINVAL && plain.text().as_str().is_empty());
        let memory = Refusal::from(kernel::alloc::AllocError);
        assert!(memory.error == ENOMEM && !memory.text().as_str().is_empty());
        let said = refuse!(EPERM, "{} of {}", 1, 2).unlogged();
        assert!(said.error == EPERM && !said.logged);
        assert_eq!(said.text().as_str(), "1 of 2");
    }

    #[test]
    fn addresses_are_formatted_like_lspci() {
        let addr = PciAddr {
            domain: 0x1_0000,
            bus: 0xe0,
            devfn: 0x1f << 3 | 7,
        };
        assert_eq!(Text::new(fmt!("{}", addr)).as_str(), "10000:e0:1f.7");
    }

    #[test]
    fn owner_has_pid_and_command_name() {
        let text = Text::new(fmt!("{}", Owner::current()));
        let said = text.as_str();
        assert!(said.starts_with("pid ") && said.ends_with(')') && said.contains(" (kunit"));
    }
}
