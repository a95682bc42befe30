// SPDX-License-Identifier: GPL-2.0

//! A configfs subsystem with directories that are there without `mkdir` (default groups).
//!
//! C header: [`include/linux/configfs.h`](srctree/include/linux/configfs.h)

use crate::sys;
use kernel::{
    bindings,
    configfs::{Group, HasGroup},
    error::to_result,
    prelude::*,
    sync::Arc,
    types::Opaque,
};

/// A registered subsystem with two directories, whose fields are dropped in this order.
#[pin_data]
pub(crate) struct Tree<A: 'static, B: 'static> {
    first: DefaultGroup<A>,
    second: DefaultGroup<B>,
    #[pin]
    subsystem: Subsystem,
}

impl<A: Send + Sync + 'static, B: Send + Sync + 'static> Tree<A, B> {
    /// All tasks of the machine get at what is in the directories, so that has to be such as can be shared.
    pub(crate) fn new(
        name: &'static CStr,
        module: &'static ThisModule,
        first: impl PinInit<Group<A>, Error>,
        second: impl PinInit<Group<B>, Error>,
    ) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            subsystem <- Subsystem::new(name, module),
            // SAFETY: The fields stand before the subsystem, and nobody moves them out.
            second: unsafe { DefaultGroup::new(&subsystem, second) }?,
            // SAFETY: As above.
            first: unsafe { DefaultGroup::new(&subsystem, first) }?,
        }? Error)
    }
}

/// A registered subsystem; its own directory has no attributes and no `mkdir`.
///
/// [`kernel::configfs::Subsystem`] unregisters a subsystem even if its registration failed, and then uses a directory that does not
/// exist.
///
/// # Invariants
///
/// `subsystem` is registered, and `item_type` is the type of its own directory.
#[pin_data(PinnedDrop)]
struct Subsystem {
    #[pin]
    item_type: Opaque<bindings::config_item_type>,
    #[pin]
    subsystem: Opaque<bindings::configfs_subsystem>,
}

// SAFETY: A subsystem can be unregistered from any thread.
unsafe impl Send for Subsystem {}
// SAFETY: A shared reference gives nothing but the address of the directory, whose uses the subsystem's own locks order.
unsafe impl Sync for Subsystem {}

impl Subsystem {
    /// Registers a subsystem of the given name. Errors: those of the kernel.
    fn new(name: &'static CStr, module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            item_type: Opaque::new(bindings::config_item_type {
                ct_owner: module.as_ptr(),
                ..pin_init::zeroed()
            }),
            subsystem <- Opaque::try_ffi_init(|slot: *mut bindings::configfs_subsystem| {
                // SAFETY: `slot` is ours to initialise, and pinned. The type is initialised already, and pinned with it.
                to_result(unsafe {
                    slot.write(pin_init::zeroed());
                    bindings::config_group_init_type_name(
                        &raw mut (*slot).su_group,
                        name.as_char_ptr(),
                        item_type.get(),
                    );
                    bindings::__mutex_init(
                        &raw mut (*slot).su_mutex,
                        kernel::optional_name!().as_char_ptr(),
                        kernel::static_lock_class!().as_ptr(),
                    );
                    // INVARIANT: Registered where this succeeds.
                    bindings::configfs_register_subsystem(slot)
                })
            }),
        }? Error)
    }

    /// The subsystem's own directory.
    fn group(&self) -> *mut bindings::config_group {
        // SAFETY: The subsystem is valid; only the address of a part of it is taken.
        unsafe { &raw mut (*self.subsystem.get()).su_group }
    }
}

#[pinned_drop]
impl PinnedDrop for Subsystem {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the subsystem is registered. Nobody uses its mutex after that.
        unsafe {
            bindings::configfs_unregister_subsystem(self.subsystem.get());
            bindings::mutex_destroy(&raw mut (*self.subsystem.get()).su_mutex);
        }
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
    unsafe fn new(parent: &Subsystem, group: impl PinInit<Group<D>, Error>) -> Result<Self> {
        let group = Arc::pin_init(group, GFP_KERNEL)?;
        let group = Arc::into_raw(group);
        // SAFETY: It is valid, and pinned where it is.
        let raw = unsafe { Group::<D>::group(group).cast_mut() };
        // SAFETY: The parent's subsystem is registered, the group is initialised and in no hierarchy yet.
        if let Err(e) = to_result(unsafe { bindings::configfs_register_group(parent.group(), raw) }) {
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
        // SAFETY: By the type invariant the group is registered and its reference is ours. The directory is closed first, as
        // the kernel does not keep `mkdir` away from a group that it unregisters.
        unsafe {
            let raw = Group::<D>::group(self.group).cast_mut();
            sys::p2pmem_configfs_close(raw);
            bindings::configfs_unregister_group(raw);
            bindings::config_item_put(&raw mut (*raw).cg_item);
        }
    }
}
