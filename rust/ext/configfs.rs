// SPDX-License-Identifier: GPL-2.0

//! A configfs subsystem with directories that are there without `mkdir` (default groups).
//!
//! C header: [`include/linux/configfs.h`](srctree/include/linux/configfs.h)

use core::ptr;
use kernel::{
    bindings,
    configfs::{Group, HasGroup, Subsystem},
    error::to_result,
    prelude::*,
    sync::Arc,
};

/// A registered subsystem with two directories, whose fields are dropped in this order.
#[pin_data]
pub(crate) struct Tree<P, A: 'static, B: 'static> {
    first: DefaultGroup<A>,
    second: DefaultGroup<B>,
    #[pin]
    subsystem: Subsystem<P>,
}

impl<P: Send + Sync, A: Send + Sync + 'static, B: Send + Sync + 'static> Tree<P, A, B> {
    /// All tasks of the machine get at what is in the directories, so that has to be such as can be shared.
    pub(crate) fn new(
        subsystem: impl PinInit<Subsystem<P>, Error>,
        first: impl PinInit<Group<A>, Error>,
        second: impl PinInit<Group<B>, Error>,
    ) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            subsystem <- subsystem,
            // SAFETY: The fields stand before the subsystem, and nobody moves them out.
            second: unsafe { DefaultGroup::new(&subsystem, second) }?,
            // SAFETY: As above.
            first: unsafe { DefaultGroup::new(&subsystem, first) }?,
        }? Error)
    }
}

/// A directory below a subsystem, there until this is dropped.
///
/// # Invariants
///
/// `group` is registered, and its item holds the reference that `Arc::into_raw()` gave up.
struct DefaultGroup<D: 'static> {
    group: *const Group<D>,
}

// SAFETY: A group can be unregistered from any thread.
unsafe impl<D: Send + Sync> Send for DefaultGroup<D> {}
// SAFETY: There are no methods on a shared reference.
unsafe impl<D: Send + Sync> Sync for DefaultGroup<D> {}

impl<D: Send + Sync + 'static> DefaultGroup<D> {
    /// Registers `group` below `parent`.
    ///
    /// # Safety
    ///
    /// The result must be dropped before `parent`.
    unsafe fn new<P>(parent: &Subsystem<P>, group: impl PinInit<Group<D>, Error>) -> Result<Self> {
        let group = Arc::pin_init(group, GFP_KERNEL)?;
        let group = Arc::into_raw(group);
        // SAFETY: Both are valid, and pinned where they are.
        let (parent, raw) = unsafe {
            (
                Subsystem::<P>::group(ptr::from_ref(parent)).cast_mut(),
                Group::<D>::group(group).cast_mut(),
            )
        };
        // SAFETY: The parent's subsystem is registered, the group is initialised and in no hierarchy yet.
        if let Err(e) = to_result(unsafe { bindings::configfs_register_group(parent, raw) }) {
            // SAFETY: The item's reference is ours; dropping it calls the release that takes the `Arc` back.
            unsafe { bindings::config_item_put(&raw mut (*raw).cg_item) };
            return Err(e);
        }
        // INVARIANT: Registered just now.
        Ok(Self { group })
    }
}

impl<D: 'static> Drop for DefaultGroup<D> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the group is registered and its reference is ours.
        unsafe {
            let raw = Group::<D>::group(self.group).cast_mut();
            bindings::configfs_unregister_group(raw);
            bindings::config_item_put(&raw mut (*raw).cg_item);
        }
    }
}
