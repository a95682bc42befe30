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
    uapi::file::File, //
};
use kernel::prelude::*;

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
}

impl File {
    /// `P2PMEM_IOC_ATTACH_DMABUF`.
    pub(super) fn attach(&self, _: &mut abi::Attach) -> Answer {
        Err(absent())
    }

    /// `P2PMEM_IOC_DETACH_DMABUF`.
    pub(super) fn detach(&self, _: &mut abi::Detach) -> Answer {
        Err(absent())
    }

    /// `P2PMEM_IOC_ATTACHMENT`.
    pub(super) fn attachment(&self, _: &mut abi::Attachment) -> Answer {
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
