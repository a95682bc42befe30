// SPDX-License-Identifier: GPL-2.0

//! Credentials: who is asking, or was when a buffer was allocated.
//!
//! C header: [`include/linux/cred.h`](srctree/include/linux/cred.h)

use crate::{
    policy::rule::Subject,
    sys, //
};
use core::ptr::NonNull;
use kernel::{cred::Credential, sync::aref::ARef};

/// Credentials, kept by a reference. What they say does not change.
#[derive(Clone)]
pub(crate) struct Who(ARef<Credential>);

impl Who {
    /// The calling task's.
    pub(crate) fn current() -> Self {
        // SAFETY: Called in process context, where there is a task with credentials; the reference is ours.
        let cred = unsafe { sys::p2pmem_cred_get() };
        // SAFETY: A task's credentials are never null, and `Credential` is a transparent wrapper of `struct cred`. The
        // reference that came with the pointer goes over to the `ARef`.
        Self(unsafe { ARef::from_raw(NonNull::new_unchecked(cred.cast_mut().cast())) })
    }

    /// Whether these are the very same credentials. Others may say the same.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0.as_ptr() == other.0.as_ptr()
    }
}

impl Subject for Who {
    fn uid(&self) -> u32 {
        // SAFETY: The credentials are valid, the reference is ours.
        unsafe { sys::p2pmem_cred_uid(self.0.as_ptr()) }
    }

    fn is_member(&self, gid: u32) -> bool {
        // SAFETY: The credentials are valid, the reference is ours.
        unsafe { sys::p2pmem_cred_member(self.0.as_ptr(), gid) }
    }
}
