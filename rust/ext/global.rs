// SPDX-License-Identifier: GPL-2.0

//! State for kernel callbacks that carry no private data: whether the module is loaded, and the objects that callbacks
//! need.
//!
//! Each file defines its own static locks, and [`super::init`] initialises all of them.
//!
//! Functions that use a lock may sleep. `INSTANCES` is a leaf: no other lock is taken under it.
//!
//! No C header: the registry is p2pmem's own.

use core::{any::TypeId, ffi::c_void, marker::PhantomData, ptr::NonNull};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, AtomicFlag, Release},
        Arc,
    },
};

/// True once all static locks are initialised.
static INITIALISED: AtomicFlag = AtomicFlag::new(false);

/// Records that all static locks are initialised. Called once by [`super::init`].
pub(super) fn set_initialised() {
    INITIALISED.store(true, Release);
}

/// Asserts that the static locks are initialised. Every function that uses a static lock calls this first.
///
/// # Panics
///
/// Panics before [`super::init`] has returned.
pub(super) fn initialised() {
    assert!(INITIALISED.load(Acquire));
}

/// Removes the entries of a static list for which `is_it` returns true.
///
/// Frees the list's memory with the last entry, since statics are not dropped when the module is unloaded.
pub(super) fn drop_from<T>(list: &mut KVec<T>, is_it: impl Fn(&T) -> bool) {
    list.retain(|entry| !is_it(entry));
    if list.is_empty() {
        *list = KVec::new();
    }
}

/// True while the module is loaded: from the end of its initialisation to the start of its exit.
static READY: AtomicFlag = AtomicFlag::new(false);

/// Sets whether the module is loaded: true when initialisation can no longer fail, false when the module exits.
pub(crate) fn set_ready(ready: bool) {
    READY.store(ready, Release);
}

/// Checks that the module is loaded. Every entry point calls this before it keeps a reference to the module.
///
/// The kernel lets programs open files and create directories while a module is being loaded, and frees the module if its
/// initialisation fails, whatever its reference count.
///
/// Errors: `ENODEV` while the module is being loaded or unloaded.
pub(crate) fn ready() -> Result {
    if READY.load(Acquire) {
        Ok(())
    } else {
        Err(ENODEV)
    }
}

/// An object that callbacks find by its type.
///
/// # Invariants
///
/// `object` came from `Arc::into_raw()` for an object of the type that `kind` identifies, which is `Send` and `Sync`. This
/// entry owns that reference.
struct Instance {
    kind: TypeId,
    object: NonNull<c_void>,
}

// SAFETY: By the type invariant the object is `Send` and `Sync`, so references to it can be moved between threads.
unsafe impl Send for Instance {}

impl Instance {
    /// Returns whether the object is a `T`.
    fn is<T: 'static>(&self) -> bool {
        self.kind == TypeId::of::<T>()
    }
}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises the lock; every function that uses the lock calls `initialised()` first, which
    // panics before that.
    unsafe(uninit) static INSTANCES: Mutex<KVec<Instance>> = KVec::new();
}

/// Initialises `INSTANCES`.
///
/// # Safety
///
/// Must be called once, before [`set_initialised`].
pub(super) unsafe fn init_lock() {
    // SAFETY: The caller guarantees that this is the first call. No other code uses the lock before `set_initialised()`, as
    // `initialised()` panics.
    unsafe { INSTANCES.init() };
}

/// The registration of an object. Until it is dropped, [`instance`] finds the object.
pub(crate) struct Registered<T: Send + Sync + 'static>(PhantomData<fn(T)>);

impl<T: Send + Sync + 'static> Registered<T> {
    /// Registers an object under its type. May sleep.
    ///
    /// Errors: `EBUSY` if an object of the type is registered; `ENOMEM`.
    pub(crate) fn new(object: Arc<T>) -> Result<Self> {
        initialised();
        let mut all = INSTANCES.lock();
        if all.iter().any(Instance::is::<T>) {
            return Err(EBUSY);
        }
        all.reserve(1, GFP_KERNEL)?;
        // SAFETY: `Arc::into_raw()` never returns null.
        let object = unsafe { NonNull::new_unchecked(Arc::into_raw(object).cast_mut()) }.cast();
        // INVARIANT: The pointer is from `Arc::into_raw()` of a `T`, which is `Send` and `Sync`, and the reference was the
        // argument's. The list has spare capacity, so the push cannot fail.
        let _ = all.push_within_capacity(Instance {
            kind: TypeId::of::<T>(),
            object,
        });
        Ok(Self(PhantomData))
    }
}

impl<T: Send + Sync + 'static> Drop for Registered<T> {
    fn drop(&mut self) {
        let mut all = INSTANCES.lock();
        let at = all.iter().position(Instance::is::<T>);
        let removed = at.and_then(|at| all.remove(at).ok());
        if all.is_empty() {
            // Statics are not dropped when the module is unloaded: free the list's memory.
            *all = KVec::new();
        }
        drop(all);
        if let Some(instance) = removed {
            // SAFETY: By the type invariant of `Instance` the entry owns a reference to a `T`; the entry was removed, so
            // the reference is taken back once. Dropped outside the lock, since the object's own drop may use the registry.
            drop(unsafe { Arc::from_raw(instance.object.cast::<T>().as_ptr()) });
        }
    }
}

/// Returns the registered object of a type. May sleep.
///
/// Errors: `ENODEV` if none is registered, as while the module is being loaded or unloaded.
pub(crate) fn instance<T: Send + Sync + 'static>() -> Result<Arc<T>> {
    initialised();
    let all = INSTANCES.lock();
    let found = all.iter().find(|instance| instance.is::<T>()).ok_or(ENODEV)?;
    // SAFETY: By the type invariant of `Instance` the pointer is that of a `T` with a reference. `ManuallyDrop` keeps the
    // reference with the entry.
    let kept = core::mem::ManuallyDrop::new(unsafe { Arc::from_raw(found.object.cast::<T>().as_ptr()) });
    Ok(Arc::clone(&kept))
}

#[kunit_tests(p2pmem_global)]
mod tests {
    use super::*;

    #[test]
    fn instance_is_found_by_type_while_registered() -> Result {
        struct One(u32);
        struct Other;
        assert_eq!(instance::<One>().err(), Some(ENODEV));
        let registered = Registered::new(Arc::new(One(7), GFP_KERNEL)?)?;
        assert_eq!(instance::<One>()?.0, 7);
        assert_eq!(instance::<Other>().err(), Some(ENODEV));
        assert_eq!(Registered::new(Arc::new(One(8), GFP_KERNEL)?).err(), Some(EBUSY));
        let used = instance::<One>()?;
        drop(registered);
        assert_eq!(instance::<One>().err(), Some(ENODEV));
        assert_eq!(used.0, 7);
        Ok(())
    }
}
