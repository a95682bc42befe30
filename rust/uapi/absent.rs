// SPDX-License-Identifier: GPL-2.0

//! The attachments of an open file, in a build without them: every call is refused.
//!
//! This file stands in for `uapi::attachments` in a build with `P2PMEM_ATTACH=n`. Context: any.

use crate::{
    ext::{
        abi,
        refusal::{
            refuse,
            Answer, //
        }, //
    },
    uapi::{
        argument::Argument,
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

    /// `P2PMEM_IOC_ATTACH_DMABUF`.
    pub(super) fn attach_ioctl(&self, _: &Mutex<Handles>, _: &Arc<Events>, arg: Argument) -> Answer {
        self.describe_ioctl(arg)
    }

    /// `P2PMEM_IOC_DETACH_DMABUF`.
    pub(super) fn detach_ioctl(&self, _: &Mutex<Handles>, arg: Argument) -> Answer {
        self.describe_ioctl(arg)
    }

    /// `P2PMEM_IOC_ATTACHMENT`.
    pub(super) fn describe_ioctl(&self, _: Argument) -> Answer {
        Err(refuse!(
            abi::errno(abi::EOPNOTSUPP),
            "this module was built without attachments to dma-bufs (P2PMEM_ATTACH=n)"
        ))
    }

    /// The file is closed.
    pub(super) fn end(&self) {}
}
