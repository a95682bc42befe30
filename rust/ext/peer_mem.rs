// SPDX-License-Identifier: GPL-2.0

//! The peer-memory interface, by which an RDMA core that has the interface registers memory of p2pmem.
//!
//! The core calls a client for each registration in the order acquire, get_pages, dma_map, and later dma_unmap, put_pages,
//! release. In between, the client may *invalidate* the registration. `invalidate_peer_memory()` returns after the adapter
//! has stopped using the memory. The core may then call the second half at any time, from another thread, only in part, or
//! twice.
//!
//! The core knows a registration by a number instead of a pointer, so a late call finds no registration and does nothing.
//! Numbers are never used twice, and a slot belongs to the first number that uses it. So only the core's calls for that
//! one registration, and an invalidation, end a mapping.
//!
//! Context: all functions are for process context and may sleep. The core's callbacks are called without locks of p2pmem.
//! The locks are those of [`gate`] and [`slot`].
//!
//! C header: `rust/sys/peer_mem.h`

use crate::sys;
use core::{
    marker::PhantomData,
    mem::{offset_of, size_of},
    ptr::{self, NonNull},
};
use kernel::{
    bindings,
    error::from_result,
    ffi,
    page::PAGE_SIZE,
    prelude::*,
    str::CStrExt,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc,
    },
};

mod adapter;
pub(super) mod gate;
mod slot;

pub(crate) use self::{
    adapter::Adapter,
    gate::{
        registered,
        Form, //
    },
    slot::Slot, //
};
use gate::{
    CoreContext,
    Invalidator,
    Place, //
};

/// Memory that a program registers, as the program named it: address and size need not be whole pages.
#[derive(Clone, Copy)]
pub(crate) struct RegistrationRequest {
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) size: u64,
}

/// The number of a registration for which there was no memory. It names no registration, and the core releases it as
/// usual.
const NO_MEMORY: usize = usize::MAX;

/// The next number of a registration.
static NEXT: Atomic<u64> = Atomic::<u64>::new(1);

/// A client of the interface. All functions are called in process context and may sleep.
pub(crate) trait Client: Sized + 'static {
    /// A registration of the client.
    type Context: Send + Sync + 'static;

    /// Creates the registration `number` if the memory belongs to the client. Returns `false` if it does not.
    ///
    /// Called in the process that registers the memory. The core holds a lock that serialises these calls of all
    /// processes.
    ///
    /// Errors: the memory belongs to the client, but the registration cannot be created. The registration fails with
    /// `ENOMEM`.
    fn acquire(number: u64, asked: RegistrationRequest) -> Result<bool>;
    /// Returns the registration `number`, or `None` if it was released.
    fn find(number: u64) -> Option<Arc<Self::Context>>;
    /// The memory must stay from now on; `write` says that the adapter will write to it. From here on [`Slot::invalidate`]
    /// may be called.
    fn get_pages(context: &Arc<Self::Context>, write: bool) -> Result;
    /// Maps the memory in the registration's slot.
    fn dma_map(context: &Self::Context, adapter: &Adapter<'_>) -> Result;
    /// Returns the slot of the registration's mapping.
    fn slot(context: &Self::Context) -> &Slot;
    /// The adapter no longer uses the mapping, which has ended. May be called any number of times.
    fn dma_unmap(context: &Self::Context);
    /// The memory no longer needs to stay; the mapping has ended. May be called any number of times.
    fn put_pages(context: &Self::Context);
    /// The core no longer uses the number; the mapping has ended. May be called any number of times.
    fn release(number: u64);
}

/// A reference to this module, which prevents its unloading.
///
/// # Invariants
///
/// The object owns one reference to the module.
pub(crate) struct ModuleRef(());

impl ModuleRef {
    /// Takes a reference. Returns `None` while the module is being unloaded.
    pub(crate) fn get() -> Option<Self> {
        // INVARIANT: `p2pmem_module_get()` returns true if it took a reference for this object.
        // SAFETY: The function has no requirements.
        unsafe { sys::p2pmem_module_get() }.then_some(Self(()))
    }
}

impl Drop for ModuleRef {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the object owns the reference, and the drop happens once.
        unsafe { sys::p2pmem_module_put() };
    }
}

/// Returns the path of the Module.symvers in which the build found the interface.
pub(crate) fn symvers() -> &'static CStr {
    // SAFETY: The C function returns a string literal, which is NUL-terminated and valid as long as the module.
    unsafe { CStr::from_char_ptr(sys::p2pmem_peer_symvers()) }
}

/// A registered client. Dropping it waits until the core has released all its registrations.
///
/// # Invariants
///
/// `handle` is the result of registering `client`, which stays registered, and at its address, as long as `self`.
pub(crate) struct PeerMemoryRegistration<T: Client> {
    place: Place,
    handle: NonNull<ffi::c_void>,
    #[allow(dead_code, reason = "the core has a pointer to it")]
    client: KBox<sys::peer_memory_client_ex>,
    _client: PhantomData<fn() -> T>,
}

// SAFETY: `handle` is an opaque pointer to an object of the core, which accepts calls from any thread.
unsafe impl<T: Client> Send for PeerMemoryRegistration<T> {}
// SAFETY: The type has no method that takes a shared reference.
unsafe impl<T: Client> Sync for PeerMemoryRegistration<T> {}

impl<T: Client> PeerMemoryRegistration<T> {
    /// Registers the client. May sleep.
    ///
    /// Errors: `EBUSY` if there is another client; `EINVAL` if the core refuses the client; `ENOMEM`.
    pub(crate) fn new(name: &CStr, form: Form) -> Result<Self> {
        let place = Place::take(form)?;
        let mut client = sys::peer_memory_client {
            acquire: Some(Self::acquire),
            get_pages: Some(Self::get_pages),
            dma_map: Some(Self::dma_map),
            dma_unmap: Some(Self::dma_unmap),
            put_pages: Some(Self::put_pages),
            get_page_size: Some(Self::get_page_size),
            release: Some(Self::release),
            ..Default::default()
        };
        let copy = |to: &mut [ffi::c_char], from: &[u8]| {
            for (to, from) in to.iter_mut().zip(from) {
                *to = *from as ffi::c_char;
            }
        };
        copy(&mut client.name, name.to_bytes());
        copy(&mut client.version, crate::VERSION.as_bytes());
        if form == Form::Ex {
            client.version[15] = 1;
        }
        let client = KBox::new(
            sys::peer_memory_client_ex {
                client,
                ex_size: size_of::<sys::peer_memory_client_ex>(),
                flags: sys::PEER_MEM_INVALIDATE_UNMAPS,
                ..Default::default()
            },
            GFP_KERNEL,
        )?;
        let mut call: sys::invalidate_peer_memory = None;
        let slot = match form {
            Form::Ex | Form::Legacy => &raw mut call,
            Form::Persistent => ptr::null_mut(),
        };
        // SAFETY: The client has all callbacks. It is boxed, and the box is freed after the client is unregistered. The
        // core writes to `slot`, a local variable or null, only during the call. Before the gate is open, `acquire`
        // refuses all memory.
        let handle = unsafe { sys::ib_register_peer_memory_client(&client.client, slot) };
        let handle = NonNull::new(handle).ok_or(EINVAL)?;
        // INVARIANT: Both are from the core, for this client.
        place.0.open(Invalidator { handle, call });
        // INVARIANT: The call returned `handle` for `client`, which is registered until `drop()`.
        Ok(Self {
            place,
            handle,
            client,
            _client: PhantomData,
        })
    }

    /// Returns the number that the core passes as a pointer, and its registration. Errors: `EINVAL` if there is none.
    fn context(pointer: *mut ffi::c_void) -> Result<(u64, Arc<T::Context>)> {
        let number = pointer.addr() as u64;
        Ok((number, T::find(number).ok_or(EINVAL)?))
    }

    /// Takes a registration for memory of the client.
    ///
    /// # Safety
    ///
    /// To be called by the core only. `client_context` must be valid for writes.
    unsafe extern "C" fn acquire(
        addr: usize,
        size: usize,
        _private_data: *mut ffi::c_void,
        _client_name: *mut ffi::c_char,
        client_context: *mut *mut ffi::c_void,
    ) -> ffi::c_int {
        if registered().is_none() {
            return 0;
        }
        let asked = RegistrationRequest {
            address: addr as u64,
            size: size as u64,
        };
        let number = NEXT.fetch_add(1, Relaxed);
        let number = match T::acquire(number, asked) {
            // On no supported machine does the counter reach `NO_MEMORY`.
            Ok(true) => number as usize,
            Ok(false) => return 0,
            // The core takes an error as a refusal, and would go on to ask other clients for this memory.
            Err(_) => NO_MEMORY,
        };
        // SAFETY: The caller guarantees that the pointer is valid for writes.
        unsafe { *client_context = ptr::without_provenance_mut(number) };
        1
    }

    /// # Safety
    ///
    /// To be called by the core only, for a context from `acquire`.
    unsafe extern "C" fn get_pages(
        _addr: usize,
        _size: usize,
        write: ffi::c_int,
        _force: ffi::c_int,
        _sg_head: *mut bindings::sg_table,
        client_context: *mut ffi::c_void,
        core_context: u64,
    ) -> ffi::c_int {
        from_result(|| {
            if client_context.addr() == NO_MEMORY {
                return Err(ENOMEM);
            }
            let (number, context) = Self::context(client_context)?;
            T::slot(&context).give_to(number, CoreContext(core_context))?;
            T::get_pages(&context, write != 0)?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core only, for a context from `acquire`. `sg_head` and `nmap` must be valid for writes, and
    /// `dma_device` null or valid during the call. The table must not be used after `release`.
    unsafe extern "C" fn dma_map(
        sg_head: *mut bindings::sg_table,
        client_context: *mut ffi::c_void,
        dma_device: *mut bindings::device,
        _dmasync: ffi::c_int,
        nmap: *mut ffi::c_int,
    ) -> ffi::c_int {
        from_result(|| {
            let (number, context) = Self::context(client_context)?;
            // SAFETY: The caller guarantees that the device is null or valid during the call.
            let adapter = unsafe { Adapter::from_raw(dma_device) };
            T::dma_map(&context, &adapter)?;
            let slot = T::slot(&context);
            slot.keep(number, &adapter, context.clone())?;
            // SAFETY: The caller guarantees that the table is valid for writes. `keep()` has stored a reference to the
            // object with the slot, which is dropped in `release`, after which the core does not use the table.
            let count = unsafe { slot.show(sg_head) }?;
            // SAFETY: The caller guarantees that `nmap` is valid for writes.
            unsafe { *nmap = count as ffi::c_int };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core only, with the arguments of `dma_map`, when the adapter no longer uses the mapping.
    unsafe extern "C" fn dma_unmap(
        _sg_head: *mut bindings::sg_table,
        client_context: *mut ffi::c_void,
        _dma_device: *mut bindings::device,
    ) -> ffi::c_int {
        if let Ok((number, context)) = Self::context(client_context) {
            T::slot(&context).unmap_for(number);
            T::dma_unmap(&context);
        }
        0
    }

    /// # Safety
    ///
    /// To be called by the core only, with the arguments of `get_pages`, when the adapter no longer uses the mapping.
    unsafe extern "C" fn put_pages(_sg_head: *mut bindings::sg_table, client_context: *mut ffi::c_void) {
        if let Ok((number, context)) = Self::context(client_context) {
            T::slot(&context).unmap_for(number);
            T::put_pages(&context);
        }
    }

    /// # Safety
    ///
    /// To be called by the core only.
    unsafe extern "C" fn get_page_size(_client_context: *mut ffi::c_void) -> usize {
        // Entries are whole pages, and as long as possible. With a larger size, the core would cut the memory to that
        // size.
        PAGE_SIZE
    }

    /// # Safety
    ///
    /// To be called by the core only, for a context from `acquire`, as the last call for that context.
    unsafe extern "C" fn release(client_context: *mut ffi::c_void) {
        let number = client_context.addr() as u64;
        let context = T::find(number);
        if let Some(context) = &context {
            T::slot(context).unmap_for(number);
        }
        T::release(number);
        if let Some(slot) = context.as_ref().map(|context| T::slot(context)) {
            if slot.is_of(number) {
                slot.release();
            }
        }
    }
}

impl<T: Client> Drop for PeerMemoryRegistration<T> {
    fn drop(&mut self) {
        self.place.0.close();
        // SAFETY: By the type invariant the handle is that of a registered client. The gate is closed, so no call with the
        // handle is in progress, and none follows.
        unsafe { sys::ib_unregister_peer_memory_client(self.handle.as_ptr()) };
    }
}

/// Asserts the layout of a structure that the core was built with.
macro_rules! layout {
    ($type:ident: $size:literal { $($field:ident @ $offset:literal),* $(,)? }) => {
        const _: () = {
            assert!(size_of::<sys::$type>() == $size);
            $(assert!(offset_of!(sys::$type, $field) == $offset);)*
        };
    };
}

layout!(peer_memory_client: 136 {
    name @ 0, version @ 64, acquire @ 80, get_pages @ 88, dma_map @ 96, dma_unmap @ 104, put_pages @ 112,
    get_page_size @ 120, release @ 128,
});
layout!(peer_memory_client_ex: 152 { client @ 0, ex_size @ 136, flags @ 144 });
