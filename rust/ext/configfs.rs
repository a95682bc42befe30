// SPDX-License-Identifier: GPL-2.0

//! A configfs subsystem with two directories that exist without `mkdir` (default groups).
//!
//! All functions may sleep; they take the configfs locks of the subsystem and its directories.
//!
//! C header: [`include/linux/configfs.h`](srctree/include/linux/configfs.h)

use kernel::{
    bindings,
    configfs::{Group, HasGroup},
    error::to_result,
    prelude::*,
    sync::Arc,
    types::Opaque,
};

/// A registered subsystem with two directories.
///
/// The fields are dropped in declaration order: both directories before the subsystem.
#[pin_data]
pub(crate) struct Tree<A: 'static, B: 'static> {
    first: DefaultGroup<A>,
    second: DefaultGroup<B>,
    #[pin]
    subsystem: Subsystem,
}

impl<A: Send + Sync + 'static, B: Send + Sync + 'static> Tree<A, B> {
    /// Registers the subsystem `name` with the directories `first` and `second`.
    ///
    /// Any task can call the attributes of the directories, so `A` and `B` are `Send` and `Sync`. Errors: those of the
    /// initialisers and of the configfs core.
    pub(crate) fn new(
        name: &'static CStr,
        module: &'static ThisModule,
        first: impl PinInit<Group<A>, Error>,
        second: impl PinInit<Group<B>, Error>,
    ) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            subsystem <- Subsystem::new(name, module),
            // SAFETY: The directory is dropped before the subsystem: `second` is declared before `subsystem` and both are
            // private fields of a pinned `Tree`. If a later initialiser fails, fields are dropped in the reverse order of
            // their initialisation.
            second: unsafe { DefaultGroup::new(&subsystem, second) }?,
            // SAFETY: `first` is declared before `subsystem`, so it is dropped before it. If a later initialiser fails,
            // the reverse order of initialisation has the same effect.
            first: unsafe { DefaultGroup::new(&subsystem, first) }?,
        }? Error)
    }
}

/// A registered subsystem whose own directory has no attributes and no `mkdir`.
///
/// [`kernel::configfs::Subsystem`] also unregisters a subsystem whose registration failed, and then dereferences a null
/// directory.
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

// SAFETY: `configfs_unregister_subsystem()` can be called from any thread.
unsafe impl Send for Subsystem {}
// SAFETY: A shared reference gives only the address of the group. The configfs core serialises the use of the group with
// the subsystem's locks.
unsafe impl Sync for Subsystem {}

impl Subsystem {
    /// Registers a subsystem named `name` with the owner `module`. May sleep.
    ///
    /// Errors: those of `configfs_register_subsystem()`.
    fn new(name: &'static CStr, module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            item_type: Opaque::new(bindings::config_item_type {
                ct_owner: module.as_ptr(),
                ..pin_init::zeroed()
            }),
            subsystem <- Opaque::try_ffi_init(|slot: *mut bindings::configfs_subsystem| {
                // SAFETY: `slot` is valid for writes and pinned. `item_type` is initialised before this field and pinned in
                // the same object, so it lives as long as the group that points to it.
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
                    // INVARIANT: The subsystem is registered if the call succeeds; otherwise there is no `Subsystem`.
                    bindings::configfs_register_subsystem(slot)
                })
            }),
        }? Error)
    }

    /// Returns the group of the subsystem's own directory.
    fn group(&self) -> *mut bindings::config_group {
        // SAFETY: By the type invariant the subsystem is initialised; the expression only computes the address of a field.
        unsafe { &raw mut (*self.subsystem.get()).su_group }
    }
}

#[pinned_drop]
impl PinnedDrop for Subsystem {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the subsystem is registered. The core does not use its mutex after unregistering,
        // and all directories below the subsystem are gone (see `DefaultGroup::new`).
        unsafe {
            bindings::configfs_unregister_subsystem(self.subsystem.get());
            bindings::mutex_destroy(&raw mut (*self.subsystem.get()).su_mutex);
        }
    }
}

/// A registered directory below a subsystem.
///
/// # Invariants
///
/// `group` is registered and came from `Arc::into_raw()`. Its `config_item` owns that reference: the item's release takes
/// the `Arc` back.
struct DefaultGroup<D: 'static> {
    group: *const Group<D>,
}

// SAFETY: `configfs_unregister_group()` can be called from any thread, and the last reference to `D` may be dropped there
// as `D` is `Send` and `Sync`.
unsafe impl<D: Send + Sync> Send for DefaultGroup<D> {}
// SAFETY: A shared reference has no methods.
unsafe impl<D: Send + Sync> Sync for DefaultGroup<D> {}

impl<D: Send + Sync + 'static> DefaultGroup<D> {
    /// Registers `group` below `parent`. May sleep.
    ///
    /// Errors: those of the initialiser and of `configfs_register_group()`; `ENOMEM`.
    ///
    /// # Safety
    ///
    /// The result must be dropped before `parent`.
    unsafe fn new(parent: &Subsystem, group: impl PinInit<Group<D>, Error>) -> Result<Self> {
        let group = Arc::pin_init(group, GFP_KERNEL)?;
        let group = Arc::into_raw(group);
        // SAFETY: `group` points to a `Group<D>` that the reference from `Arc::into_raw()` keeps valid.
        let raw = unsafe { Group::<D>::group(group).cast_mut() };
        // SAFETY: By the type invariant of `Subsystem` the parent is registered. The group is initialised and not part of a
        // hierarchy yet.
        if let Err(e) = to_result(unsafe { bindings::configfs_register_group(parent.group(), raw) }) {
            // SAFETY: Registration failed, so the item's initial reference is the only one. Its release takes the `Arc`
            // back.
            unsafe { bindings::config_item_put(&raw mut (*raw).cg_item) };
            return Err(e);
        }
        // INVARIANT: The registration succeeded, and the reference from `Arc::into_raw()` is the item's.
        Ok(Self { group })
    }
}

impl<D: 'static> Drop for DefaultGroup<D> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the group is registered, so it has a directory with an inode, whose flags the inode's lock
        // protects. The item's initial reference is dropped only here.
        unsafe {
            let raw = Group::<D>::group(self.group).cast_mut();
            let dir = (*(*raw).cg_item.ci_dentry).d_inode;
            // Ends `mkdir` in the directory. `configfs_unregister_group()` does not take the lock, so `configfs_mkdir()` could find
            // the directory unhashed and dereference its group, which is null then.
            bindings::down_write(&raw mut (*dir).i_rwsem);
            (*dir).i_flags |= bindings::S_DEAD;
            bindings::up_write(&raw mut (*dir).i_rwsem);
            bindings::configfs_unregister_group(raw);
            bindings::config_item_put(&raw mut (*raw).cg_item);
        }
    }
}
