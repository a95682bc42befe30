// SPDX-License-Identifier: GPL-2.0

//! The attachments of an open file, in a build without them: every call is refused.
//!
//! This file stands in for `uapi::attachments` in a build with `P2PMEM_ATTACH=n`. Context: any.

use crate::{
    ext::{
        abi,
        refusal::{
            refuse,
            Answer,
            Refusal, //
        }, //
    },
    uapi::{
        events::Events,
        handles::Handles, //
    }, //
};
use kernel::{
    prelude::*,
    sync::{Arc, Mutex},
};

/// The attachments of a file: none.
pub(super) struct Attachments;

impl Attachments {
    /// `P2PMEM_IOC_INFO` does not report attachments.
    pub(super) const FEATURE: u64 = 0;

    pub(super) fn new() -> impl PinInit<Self> {
        Self
    }

    /// The file is closed.
    pub(super) fn end(&self) {}

    pub(super) fn attach(&self, _: &Mutex<Handles>, _: &Arc<Events>, _: &mut abi::Attach) -> Answer {
        Err(absent())
    }

    pub(super) fn detach(&self, _: &Mutex<Handles>, _: u32) -> Answer {
        Err(absent())
    }

    pub(super) fn describe(&self, _: &mut abi::Attachment) -> Answer {
        Err(absent())
    }
}

/// Returns the refusal of every call.
fn absent() -> Refusal {
    refuse!(
        abi::errno(abi::EOPNOTSUPP),
        "this module was built without attachments to dma-bufs (P2PMEM_ATTACH=n)"
    )
}
