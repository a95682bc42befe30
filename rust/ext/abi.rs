// SPDX-License-Identifier: GPL-2.0

//! Structures and constants of the uapi header, and the copy of the user's words that the ioctls use.
//!
//! [`read_words`] may sleep. The rest is constants and runs in any context; nothing here takes a lock.
//!
//! C header: `include/uapi/linux/p2pmem.h`

use core::mem::size_of;
use kernel::{
    bindings,
    error::Error,
    prelude::*,
    transmute::{AsBytes, FromBytes},
    uaccess::UserPtr,
};

pub(crate) use crate::sys::{
    p2pmem_alloc as Alloc,
    p2pmem_attach as Attach,
    p2pmem_attachment as Attachment,
    p2pmem_buffer as Buffer,
    p2pmem_detach as Detach,
    p2pmem_dma_range as DmaRange,
    p2pmem_event as Event,
    p2pmem_explain as Explain,
    p2pmem_export as Export,
    p2pmem_free as Free,
    p2pmem_import as Import,
    p2pmem_info as Info,
    p2pmem_list as List,
    p2pmem_part as Part,
    p2pmem_path as Path,
    p2pmem_paths as Paths,
    p2pmem_pci_addr as PciAddress,
    p2pmem_provider as Provider,
    p2pmem_range as Range,
    p2pmem_request as Request,
    p2pmem_rule as Rule,
    p2pmem_rules as Rules,
    p2pmem_stats as Stats,
    p2pmem_stripe as Stripe,
    p2pmem_verdict as Verdict, //
};

pub(crate) use kernel::bindings::{EDQUOT, EHOSTUNREACH, ENODATA, EOPNOTSUPP};

/// Converts a positive errno that [`kernel::error::code`] does not define to an [`Error`].
pub(crate) fn errno(errno: u32) -> Error {
    Error::from_errno(-(errno as i32))
}

/// Fills `words` from the user address `at`.
///
/// Called from system calls, in the context of the caller's address space. May sleep, to handle a page fault.
///
/// `UserSliceReader::read_slice()` does the same, but also calls the kernel's object size check, since the length is not
/// known at compile time. The check is of no use for a slice, which carries its length.
///
/// Errors: `EFAULT` if not all of the words can be read.
pub(crate) fn read_words(at: usize, words: &mut [u64]) -> Result {
    let from = UserPtr::from_addr(at).as_const_ptr();
    // SAFETY: The destination is a mutable slice of `size_of_val(words)` bytes, for which every bit pattern is valid.
    // `_copy_from_user()` checks the source range itself.
    let left = unsafe { bindings::_copy_from_user(words.as_mut_ptr().cast(), from, size_of_val(words)) };
    if left == 0 {
        Ok(())
    } else {
        Err(EFAULT)
    }
}

/// The constants of the header, without the prefixes that bindgen gives them.
pub(crate) mod consts {
    use crate::sys;

    pub(crate) const ABI_VERSION: u32 = sys::P2PMEM_ABI_VERSION;
    pub(crate) const ABI_COMPATIBLE: u32 = sys::P2PMEM_ABI_COMPATIBLE;
    pub(crate) const MAX_ELEMENT: u32 = sys::P2PMEM_MAX_ELEMENT;
    pub(crate) const MAX_CLIENTS: u32 = sys::P2PMEM_MAX_CLIENTS;
    pub(crate) const MAX_RANGES: u32 = sys::P2PMEM_MAX_RANGES;
    pub(crate) const MAX_PARTS: usize = sys::P2PMEM_MAX_PARTS as usize;
    pub(crate) const MAX_DMA_RANGES: u32 = sys::P2PMEM_MAX_DMA_RANGES;
    pub(crate) const MAX_RULES: u32 = sys::P2PMEM_MAX_RULES;
    pub(crate) const RULE_NAME: usize = sys::P2PMEM_RULE_NAME as usize;
    pub(crate) const MAX_ALIGN: u64 = sys::P2PMEM_MAX_ALIGN as u64;
    /// The features of every build of the module (`P2PMEM_FEATURE_*`).
    pub(crate) const FEATURES: u64 = (sys::P2PMEM_FEATURE_MMAP_PAGED
        | sys::P2PMEM_FEATURE_EVENTS
        | sys::P2PMEM_FEATURE_ADOPT
        | sys::P2PMEM_FEATURE_DMABUF
        | sys::P2PMEM_FEATURE_PAGELESS
        | sys::P2PMEM_FEATURE_RULES
        | sys::P2PMEM_FEATURE_IMPORT
        | sys::P2PMEM_FEATURE_STRIPE) as u64;
    pub(crate) const FEATURE_ATTACH: u64 = sys::P2PMEM_FEATURE_ATTACH as u64;
    /// Returns `P2PMEM_FEATURE_PEER_MEMORY` if `open` is true: the peer-memory client is registered. Otherwise 0.
    pub(crate) fn feature_peer_memory(open: bool) -> u64 {
        if open {
            u64::from(sys::P2PMEM_FEATURE_PEER_MEMORY)
        } else {
            0
        }
    }
    pub(crate) const PATHS_RESCAN: u32 = sys::P2PMEM_PATHS_RESCAN;
    pub(crate) const PATH_ACS_REDIRECT: u32 = sys::P2PMEM_PATH_ACS_REDIRECT;
    pub(crate) const PATH_BUS_ADDR: u32 = sys::P2PMEM_PATH_BUS_ADDR;
    pub(crate) const ALLOC_PREFER: u32 = sys::P2PMEM_ALLOC_PREFER;
    pub(crate) const EXPORT_PINNED: u32 = sys::P2PMEM_EXPORT_PINNED;
    pub(crate) const EXPORT_MAPPED: u32 = sys::P2PMEM_EXPORT_MAPPED;
    pub(crate) const ATTACH_QUIESCED: u32 = sys::P2PMEM_ATTACH_QUIESCED;
    pub(crate) const ATTACHMENT_TRANSLATED: u32 = sys::P2PMEM_ATTACHMENT_TRANSLATED;
    pub(crate) const ATTACHMENT_LIVE: u32 = sys::p2pmem_attachment_state_P2PMEM_ATTACHMENT_LIVE;
    pub(crate) const ATTACHMENT_STOPPED: u32 = sys::p2pmem_attachment_state_P2PMEM_ATTACHMENT_STOPPED;
    pub(crate) const ATTACHMENT_REVOKED: u32 = sys::p2pmem_attachment_state_P2PMEM_ATTACHMENT_REVOKED;
    pub(crate) const ATTACHMENT_GONE: u32 = sys::p2pmem_attachment_state_P2PMEM_ATTACHMENT_GONE;
    pub(crate) const EXPLAIN_LAST: u32 = sys::P2PMEM_EXPLAIN_LAST;
    pub(crate) const KIND_OWN: u32 = sys::p2pmem_kind_P2PMEM_KIND_OWN;
    pub(crate) const KIND_ADOPTED: u32 = sys::p2pmem_kind_P2PMEM_KIND_ADOPTED;
    pub(crate) const KIND_REGISTERED: u32 = sys::p2pmem_kind_P2PMEM_KIND_REGISTERED;
    pub(crate) const PROVIDER_LIVE: u32 = sys::p2pmem_provider_state_P2PMEM_PROVIDER_LIVE;
    pub(crate) const PROVIDER_REVOKING: u32 = sys::p2pmem_provider_state_P2PMEM_PROVIDER_REVOKING;
    pub(crate) const PROVIDER_PAGELESS: u32 = sys::P2PMEM_PROVIDER_PAGELESS;
    pub(crate) const PROVIDER_EXPORTABLE: u32 = sys::P2PMEM_PROVIDER_EXPORTABLE;
    pub(crate) const PROVIDER_PINNED_EXPORTS: u32 = sys::P2PMEM_PROVIDER_PINNED_EXPORTS;
    pub(crate) const PROVIDER_CLEARING: u32 = sys::P2PMEM_PROVIDER_CLEARING;
    pub(crate) const BUFFER_LIVE: u32 = sys::p2pmem_buffer_state_P2PMEM_BUFFER_LIVE;
    pub(crate) const BUFFER_REVOKING: u32 = sys::p2pmem_buffer_state_P2PMEM_BUFFER_REVOKING;
    pub(crate) const BUFFER_GONE: u32 = sys::p2pmem_buffer_state_P2PMEM_BUFFER_GONE;
    pub(crate) const STRATEGY_NEAREST: u32 = sys::p2pmem_strategy_P2PMEM_STRATEGY_NEAREST;
    pub(crate) const STRATEGY_UPSTREAM: u32 = sys::p2pmem_strategy_P2PMEM_STRATEGY_UPSTREAM;
    pub(crate) const STRATEGY_SPREAD: u32 = sys::p2pmem_strategy_P2PMEM_STRATEGY_SPREAD;
    pub(crate) const STRATEGY_PACK: u32 = sys::p2pmem_strategy_P2PMEM_STRATEGY_PACK;
    pub(crate) const STRATEGY_STRIPE: u32 = sys::p2pmem_strategy_P2PMEM_STRATEGY_STRIPE;
    pub(crate) const RULES_NONE: u32 = sys::p2pmem_rule_set_P2PMEM_RULES_NONE;
    pub(crate) const RULES_ADMIN: u32 = sys::p2pmem_rule_set_P2PMEM_RULES_ADMIN;
    pub(crate) const RULES_FILE: u32 = sys::p2pmem_rule_set_P2PMEM_RULES_FILE;
    pub(crate) const RULE_PROVIDER: u32 = sys::P2PMEM_RULE_PROVIDER;
    pub(crate) const RULE_CLIENT: u32 = sys::P2PMEM_RULE_CLIENT;
    pub(crate) const RULE_QUOTA: u32 = sys::P2PMEM_RULE_QUOTA;
    pub(crate) const RULE_ALLOW: u32 = sys::p2pmem_rule_action_P2PMEM_RULE_ALLOW;
    pub(crate) const RULE_DENY: u32 = sys::p2pmem_rule_action_P2PMEM_RULE_DENY;
    pub(crate) const RULE_PREFER: u32 = sys::p2pmem_rule_action_P2PMEM_RULE_PREFER;
    pub(crate) const RULE_AVOID: u32 = sys::p2pmem_rule_action_P2PMEM_RULE_AVOID;
    pub(crate) const EVENT_PROVIDER_ADDED: u32 = sys::p2pmem_event_type_P2PMEM_EVENT_PROVIDER_ADDED;
    pub(crate) const EVENT_PROVIDER_REMOVED: u32 = sys::p2pmem_event_type_P2PMEM_EVENT_PROVIDER_REMOVED;
    pub(crate) const EVENT_BUFFER_REVOKED: u32 = sys::p2pmem_event_type_P2PMEM_EVENT_BUFFER_REVOKED;
    pub(crate) const EVENT_LOST: u32 = sys::p2pmem_event_type_P2PMEM_EVENT_LOST;
    pub(crate) const EVENT_ATTACHMENT_REVOKED: u32 = sys::p2pmem_event_type_P2PMEM_EVENT_ATTACHMENT_REVOKED;
    pub(crate) const EVENT_ATTACHMENT_STOPPED: u32 = sys::p2pmem_event_type_P2PMEM_EVENT_ATTACHMENT_STOPPED;
}

/// The type of the ioctl numbers.
pub(crate) const MAGIC: u32 = crate::sys::P2PMEM_IOC_MAGIC;

/// Asserts the sizes of structures of the header and implements [`FromBytes`] and [`AsBytes`] for them.
macro_rules! travel {
    ($($name:ident: $size:literal),* $(,)?) => {$(
        // The size in this version of the ABI. A structure grows at its end, or, if it is a member of another one, by its
        // spare fields.
        const _: () = assert!(size_of::<$name>() == $size);
        // SAFETY: The structure consists of integers, arrays of integers and structures of this list, so every bit pattern
        // is a valid value.
        unsafe impl FromBytes for $name {}
        // SAFETY: The structure has no padding, so all its bytes are initialised: the test `no_structure_has_padding` of
        // p2pmem-sys checks the header, and the assertion above pins the size.
        unsafe impl AsBytes for $name {}
    )*};
}

travel! {
    PciAddress: 8, Info: 88, Provider: 136, List: 24, Path: 40, Paths: 40, Request: 88, Alloc: 128, Free: 8,
    Buffer: 64, Verdict: 96, Explain: 128, Stats: 104, Event: 32,
    Range: 16, Export: 32, Rule: 72, Rules: 24, Import: 40, Part: 48, Stripe: 120,
    DmaRange: 16, Attach: 48, Detach: 8, Attachment: 48,
}

#[kernel::prelude::kunit_tests(p2pmem_uapi)]
mod tests {
    use super::*;

    #[test]
    fn structure_round_trips_through_bytes() {
        let sent = Range {
            offset: 0x0102_0304_0506_0708,
            size: u64::MAX,
        };
        let bytes = sent.as_bytes();
        assert_eq!(bytes.len(), 16);
        assert_eq!(bytes.first(), Some(&0x08));
        let got = Range::from_bytes_copy(bytes);
        assert!(got.is_some_and(|got| got.offset == sent.offset && got.size == sent.size));
        // A slice that is too short or too long is refused.
        assert!(bytes.get(1..).and_then(Range::from_bytes_copy).is_none());
        assert!(Range::from_bytes_copy(&[0; 17]).is_none());
    }

    #[test]
    fn errno_without_constant_keeps_its_number() {
        for number in [EHOSTUNREACH, ENODATA, EOPNOTSUPP] {
            assert_eq!(errno(number).to_errno(), -(number as i32));
        }
    }
}
