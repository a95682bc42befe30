// SPDX-License-Identifier: GPL-2.0

//! State for kernel callbacks that carry no private data: whether the module is loaded, and the objects they work on.
//!
//! Each static lock stands in the file that uses it, and [`super::init`] initialises all of them.

use core::{any::TypeId, ffi::c_void, marker::PhantomData, ptr::NonNull};
use kernel::{
    prelude::*,
    sync::{
        atomic::{Acquire, AtomicFlag, Release},
        Arc,
    },
};

/// Whether the static locks are initialised.
static INITIALISED: AtomicFlag = AtomicFlag::new(false);

/// States that all static locks are initialised.
pub(super) fn set_initialised() {
    INITIALISED.store(true, Release);
}

/// Comes before each use of a static lock. Panics before [`super::init`] is done.
pub(super) fn initialised() {
    assert!(INITIALISED.load(Acquire));
}

/// Takes out of a list what `is_it` says. After the last one nothing of the list stays allocated: a static is not dropped
/// when the module goes.
pub(super) fn drop_from<T>(list: &mut KVec<T>, is_it: impl Fn(&T) -> bool) {
    list.retain(|entry| !is_it(entry));
    if list.is_empty() {
        *list = KVec::new();
    }
}

/// Whether the module is loaded and stays so, as long as somebody uses it.
static READY: AtomicFlag = AtomicFlag::new(false);

/// States that the module is loaded: nothing can fail any more. Or, with false, that it is going.
pub(crate) fn set_ready(ready: bool) {
    READY.store(ready, Release);
}

/// What everybody asks first who would keep the module in use: the kernel lets files be opened and directories be made while a
/// module is being loaded, and frees it all the same when loading fails. Errors: `ENODEV` while the module is being loaded.
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
/// `object` is what `Arc::into_raw()` returned of an object of the type `kind`, which is `Send` and `Sync`, and its reference is
/// this one's.
struct Instance {
    kind: TypeId,
    object: NonNull<c_void>,
}

// SAFETY: By the type invariant the object is `Send` and `Sync`.
unsafe impl Send for Instance {}

impl Instance {
    /// Whether the object is of this type.
    fn is<T: 'static>(&self) -> bool {
        self.kind == TypeId::of::<T>()
    }
}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static INSTANCES: Mutex<KVec<Instance>> = KVec::new();
}

/// # Safety
///
/// Called once, before [`set_initialised`].
pub(super) unsafe fn init_lock() {
    // SAFETY: By the requirement, as all that uses the lock calls `initialised()` first.
    unsafe { INSTANCES.init() };
}

/// Keeps an object where callbacks find it ([`instance`]), until it is dropped.
pub(crate) struct Registered<T: Send + Sync + 'static>(PhantomData<fn(T)>);

impl<T: Send + Sync + 'static> Registered<T> {
    /// Errors: `EBUSY` while there is another one of its type, `ENOMEM`.
    pub(crate) fn new(object: Arc<T>) -> Result<Self> {
        initialised();
        let mut all = INSTANCES.lock();
        if all.iter().any(Instance::is::<T>) {
            return Err(EBUSY);
        }
        all.reserve(1, GFP_KERNEL)?;
        // SAFETY: The pointer of an `Arc` is not null.
        let object = unsafe { NonNull::new_unchecked(Arc::into_raw(object).cast_mut()) }.cast();
        // INVARIANT: The reference was the argument's, and `T` is `Send` and `Sync`. There is room for it.
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
            // A static is not dropped when the module goes.
            *all = KVec::new();
        }
        drop(all);
        if let Some(instance) = removed {
            // SAFETY: By the type invariant of `Instance`, which is gone with this. Outside the lock, as this may be the last
            // reference.
            drop(unsafe { Arc::from_raw(instance.object.cast::<T>().as_ptr()) });
        }
    }
}

/// The object of a type. Errors: `ENODEV` while there is none: the module is being set up or taken down.
pub(crate) fn instance<T: Send + Sync + 'static>() -> Result<Arc<T>> {
    initialised();
    let all = INSTANCES.lock();
    let found = all.iter().find(|instance| instance.is::<T>()).ok_or(ENODEV)?;
    // SAFETY: By the type invariant. The reference stays the instance's.
    let kept = core::mem::ManuallyDrop::new(unsafe { Arc::from_raw(found.object.cast::<T>().as_ptr()) });
    Ok(Arc::clone(&kept))
}

#[kunit_tests(p2pmem_global)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_found_by_its_type_while_it_is_registered() -> Result {
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
