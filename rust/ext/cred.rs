// SPDX-License-Identifier: GPL-2.0

//! Credentials of the task that makes a request, which a buffer keeps as those of its owner.
//!
//! No function sleeps or takes a lock. [`Credentials::current`] is for process context, where the current task is the caller.
//!
//! C header: [`include/linux/cred.h`](srctree/include/linux/cred.h)

use crate::{
    policy::rule::Subject,
    sys, //
};
use core::ptr::NonNull;
use kernel::{cred::Credential, sync::aref::ARef};

/// A reference to credentials. Credentials that others can refer to never change.
#[derive(Clone)]
pub(crate) struct Credentials(ARef<Credential>);

impl Credentials {
    /// Returns the credentials of the current task.
    pub(crate) fn current() -> Self {
        // SAFETY: There is always a current task, and a task always has credentials. The function takes a reference for the
        // caller.
        let cred = unsafe { sys::p2pmem_cred_get() };
        // SAFETY: A task's credentials are never null, and `Credential` is a transparent wrapper of `struct cred`. The
        // `ARef` takes over the reference.
        Self(unsafe { ARef::from_raw(NonNull::new_unchecked(cred.cast_mut().cast())) })
    }

    /// Returns whether both refer to the same `struct cred`. Two different ones may still have equal contents.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.0.as_ptr() == other.0.as_ptr()
    }
}

impl Subject for Credentials {
    fn uid(&self) -> u32 {
        // SAFETY: The `ARef` keeps the credentials valid.
        unsafe { sys::p2pmem_cred_uid(self.0.as_ptr()) }
    }

    fn is_member(&self, gid: u32) -> bool {
        // SAFETY: The `ARef` keeps the credentials valid.
        unsafe { sys::p2pmem_cred_member(self.0.as_ptr(), gid) }
    }
}
