// SPDX-License-Identifier: GPL-2.0

//! Refusals: an errno together with the sentence that says why.

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

/// A sentence of bounded length. What does not fit is cut off.
#[derive(Clone, Copy)]
pub(crate) struct Text {
    bytes: [u8; Self::MOST],
    len: usize,
}

impl Text {
    const MOST: usize = 232;
    /// Bytes that any text needs at most, with a NUL.
    pub(crate) const LONGEST: u32 = Self::MOST as u32 + 1;

    pub(crate) const EMPTY: Self = Self {
        bytes: [0; Self::MOST],
        len: 0,
    };

    pub(crate) fn new(args: fmt::Arguments<'_>) -> Self {
        let mut text = Self::EMPTY;
        // It only says that something was cut off.
        let _ = text.write_fmt(args);
        text
    }

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

/// Why something was refused.
pub(crate) struct Refusal {
    pub(crate) error: Error,
    /// Boxed, as answers travel on the kernel's small stack. None where there is nothing to say, or no memory for it.
    text: Option<KBox<Text>>,
    /// Whether it is worth a line in the log.
    logged: bool,
}

/// The result of what can be refused.
pub(crate) type Answer<T = ()> = core::result::Result<T, Refusal>;

impl Refusal {
    pub(crate) fn new(error: Error, text: Text) -> Self {
        Self {
            error,
            text: KBox::new(text, GFP_KERNEL_ACCOUNT).ok(),
            logged: true,
        }
    }

    /// The same once more.
    #[cfg(p2pmem_peer)]
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

    /// Keeps it out of the log: the answer to what is a question as often as a mistake.
    pub(crate) fn unlogged(self) -> Self {
        Self { logged: false, ..self }
    }

    /// The sentence; empty where there is none.
    pub(crate) fn text(&self) -> &Text {
        self.text.as_deref().unwrap_or(&Text::EMPTY)
    }

    /// Puts the refusal into the log, unless there were many of late.
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

/// An error that needs no sentence, or of which only the kernel knows more.
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

/// Makes a [`Refusal`] of an errno and a sentence.
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
    fn a_sentence_ends_at_a_whole_character() {
        let mut text = Text::new(fmt!("x"));
        assert_eq!(text.as_str(), "x");
        // Characters of two bytes from an odd place on: the last one does not fit in half.
        let mut written = 0;
        while text.write_str("\u{e9}").is_ok() {
            written += 1;
        }
        assert_eq!(written, (Text::MOST - 1) / 2);
        assert_eq!(text.as_str().chars().count(), written + 1);
        assert_eq!(text.as_str().len(), Text::MOST - 1);
        // There is still room for one byte, and then for none.
        assert!(text.write_str("yz").is_err());
        assert!(text.as_str().ends_with('y'));
        assert_eq!(text.as_str().len(), Text::MOST);
        assert!(text.write_str("").is_ok());
        assert!(text.write_str("z").is_err());
    }

    #[test]
    fn errors_become_refusals() {
        let plain = Refusal::from(EINVAL);
        assert!(plain.error == EINVAL && plain.text().as_str().is_empty());
        let memory = Refusal::from(kernel::alloc::AllocError);
        assert!(memory.error == ENOMEM && !memory.text().as_str().is_empty());
        let said = refuse!(EPERM, "{} of {}", 1, 2).unlogged();
        assert!(said.error == EPERM && !said.logged);
        assert_eq!(said.text().as_str(), "1 of 2");
    }

    #[test]
    fn addresses_are_written_as_lspci_does() {
        let addr = PciAddr {
            domain: 0x1_0000,
            bus: 0xe0,
            devfn: 0x1f << 3 | 7,
        };
        assert_eq!(Text::new(fmt!("{}", addr)).as_str(), "10000:e0:1f.7");
    }

    #[test]
    fn who_asks_has_a_pid_and_a_name() {
        let text = Text::new(fmt!("{}", Owner::current()));
        let said = text.as_str();
        assert!(said.starts_with("pid ") && said.ends_with(')') && said.contains(" (kunit"));
    }
}
