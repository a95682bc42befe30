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
//! [`Slot::invalidate`] calls back into the client: its caller must not hold a lock that the client's callbacks take.
//! Locks: `PEER_CLIENT`, `Gate::passage` and `Slot::state` are mutexes for short sections, except that a mapping is made
//! and ended with `state` held. None of them is taken under another, and none is held when the core is called.
//!
//! C header: `rust/sys/peer_mem.h`

use crate::ext::{
    dma_buf::{
        DeviceName,
        PhysRange, //
    },
    global::initialised,
    p2pdma::{
        self,
        Target, //
    },
    pci::Function, //
};
use crate::sys;
use core::{
    marker::PhantomData,
    mem::{offset_of, size_of},
    ptr::{self, NonNull},
};
use kernel::{
    bindings,
    error::{from_err_ptr, from_result},
    ffi, new_condvar, new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    str::CStrExt,
    sync::{
        atomic::{Atomic, Relaxed},
        Arc, CondVar, Mutex,
    },
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

/// The core's identifier of a registration, which [`Gate::invalidate`] passes to the core.
#[derive(Clone, Copy)]
struct CoreContext(u64);

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

/// The device that does an adapter's DMA.
///
/// # Invariants
///
/// The pointer, if there is one, is a device that the core keeps valid for `'a`.
pub(crate) struct Adapter<'a>(Option<NonNull<bindings::device>>, PhantomData<&'a ()>);

impl Adapter<'_> {
    /// Returns whether the adapter accesses memory with the CPU, at kernel addresses. Such an adapter has no DMA device.
    pub(crate) fn is_virtual(&self) -> bool {
        self.0.is_none()
    }

    fn device(&self) -> *mut bindings::device {
        self.0.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// Returns the names of the device, or `None` for a virtual adapter.
    pub(crate) fn name(&self) -> Option<DeviceName> {
        self.0?;
        // SAFETY: By the type invariant the device is valid during the call.
        Some(unsafe { DeviceName::of(self.device()) })
    }

    /// Returns the device as a PCI function, or `None` if it is none.
    pub(crate) fn function(&self) -> Option<Function> {
        self.0?;
        // SAFETY: By the type invariant the device is valid, and a device holds references to the devices above it.
        let pdev = NonNull::new(unsafe { sys::p2pmem_dev_pci(self.device()) })?;
        // SAFETY: The device keeps `pdev` valid at least until `of_raw()` has taken its own reference.
        Some(unsafe { Function::of_raw(pdev) })
    }

    /// Returns whether the adapter can reach the provider. May sleep. C: `pci_p2pdma_distance_many()`.
    pub(crate) fn reaches(&self, provider: &Function) -> bool {
        self.function()
            .is_some_and(|client| p2pdma::distance(provider, &client).is_some())
    }
}

/// A DMA mapping, and the reference that keeps the mapped memory.
///
/// # Invariants
///
/// `raw` is a mapping from `p2pmem_peer_map()` that this object owns. `raw` is for `device` and holds a reference to it.
/// While `live` is set, `target` keeps the mapped memory, except for a mapping without a target, whose entries nothing
/// uses.
struct PeerMapping {
    raw: NonNull<sys::p2pmem_peer_map>,
    /// Null for a virtual adapter.
    device: *mut bindings::device,
    target: Option<Target>,
    /// Whether the mapping may be in use: false after `p2pmem_peer_unmap()`.
    live: bool,
}

// SAFETY: Nothing in the C object depends on the thread that created it. `device` is only compared.
unsafe impl Send for PeerMapping {}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        // SAFETY: By the type invariant this object owns the mapping, so it is freed here only. `target` is dropped
        // afterwards.
        unsafe { sys::p2pmem_peer_free(self.raw.as_ptr()) };
    }
}

/// The object that contains a slot, which the slot keeps alive.
trait Keep: Send + Sync {}

impl<C: Send + Sync> Keep for C {}

struct SlotState {
    mapped: Option<PeerMapping>,
    closed: bool,
    /// The registration's number, and the core's identifier of the registration.
    owner: Option<(u64, CoreContext)>,
    /// A reference to the object that contains the slot, from [`Slot::keep`] until [`Slot::release`].
    keep: Option<Arc<dyn Keep>>,
}

/// The place of a registration's single mapping.
///
/// The core gets a view of the list of addresses, which stays valid until the slot is dropped. The addresses themselves
/// are valid until the mapping ends.
#[pin_data]
pub(crate) struct Slot {
    /// Held while a mapping is made and ended, but never while the core is called.
    #[pin]
    state: Mutex<SlotState>,
}

impl Slot {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            state <- new_mutex!(SlotState {
                mapped: None,
                closed: false,
                owner: None,
                keep: None,
            }),
        })
    }

    /// Maps pieces of `target` for an adapter: as DMA addresses, or for a virtual adapter as pages. Returns the number of
    /// entries.
    ///
    /// May sleep. Errors: `ENODEV` if the slot is closed; `EBUSY` if the slot has or had a mapping; `EINVAL` if a piece
    /// does not lie in the target's memory, or the target cannot be mapped for such an adapter; those of the DMA mapping.
    pub(crate) fn map(&self, adapter: &Adapter<'_>, target: Target, pieces: &[PhysRange]) -> Result<u32> {
        let serves = match adapter.is_virtual() {
            true => target.has_pages(),
            false => target.is_for_dma(),
        };
        if !serves || !pieces.iter().all(|piece| piece.is_in(&target)) {
            return Err(EINVAL);
        }
        // SAFETY: The checks above are the requirements.
        unsafe { self.map_unchecked(adapter, Some(target), pieces) }
    }

    /// Maps as [`Self::map`], without checks.
    ///
    /// # Safety
    ///
    /// All pieces must lie in the memory of `target`, which must have pages for a virtual adapter, and be for DMA for
    /// other adapters. Without a target, the adapter must be virtual, and nothing may use the entries.
    unsafe fn map_unchecked(&self, adapter: &Adapter<'_>, target: Option<Target>, pieces: &[PhysRange]) -> Result<u32> {
        let provider = target
            .as_ref()
            .filter(|_| !adapter.is_virtual())
            .and_then(Target::provider);
        let provider = provider.map_or(ptr::null_mut(), NonNull::as_ptr);
        let count = u32::try_from(pieces.len())?;
        let mut state = self.state.lock();
        if state.closed {
            return Err(ENODEV);
        }
        if state.mapped.is_some() {
            return Err(EBUSY);
        }
        // SAFETY: By the invariant of `Adapter` the device is null or valid; the mapping takes a reference to it. The
        // caller guarantees that `target` keeps all pieces; `target` also keeps the provider and is stored next to the
        // mapping. `PhysRange` is a transparent wrapper of `struct phys_vec`, and `count` is the slice's length.
        let raw = unsafe { sys::p2pmem_peer_map(adapter.device(), provider, pieces.as_ptr().cast(), count) };
        let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: `p2pmem_peer_map()` returned a new mapping for this device. `target` keeps its memory.
        let mapped = state.mapped.insert(PeerMapping {
            raw,
            device: adapter.device(),
            target,
            live: true,
        });
        // SAFETY: By the type invariant the object owns the mapping, so it is valid.
        Ok(unsafe { sys::p2pmem_peer_nents(mapped.raw.as_ptr()) })
    }

    /// Assigns the slot to a registration. Errors: `EBUSY` if the slot belongs to another registration.
    fn give_to(&self, number: u64, core: CoreContext) -> Result {
        let mut state = self.state.lock();
        if state.owner.is_some_and(|(owner, _)| owner != number) {
            return Err(EBUSY);
        }
        state.owner = Some((number, core));
        Ok(())
    }

    fn is_of(&self, number: u64) -> bool {
        self.state.lock().owner.is_some_and(|(owner, _)| owner == number)
    }

    /// Keeps the object that contains the slot, until [`Self::release`].
    ///
    /// Errors: `EINVAL` if the slot does not belong to the registration, or has no mapping for this adapter; `ENODEV` if
    /// the mapping has ended.
    fn keep(&self, number: u64, adapter: &Adapter<'_>, whole: Arc<dyn Keep>) -> Result {
        if !self.is_of(number) {
            return Err(EINVAL);
        }
        let mut state = self.state.lock();
        match state.mapped.as_ref().filter(|mapped| mapped.device == adapter.device()) {
            None => return Err(EINVAL),
            Some(mapped) if !mapped.live => return Err(ENODEV),
            Some(_) => {}
        }
        let old = state.keep.replace(whole);
        drop(state);
        drop(old);
        Ok(())
    }

    /// Drops the reference from [`Self::keep`]. The core no longer reads the list of addresses.
    fn release(&self) {
        let keep = self.state.lock().keep.take();
        drop(keep);
    }

    /// Ends the mapping of a registration if the slot belongs to it. The caller knows that no adapter uses the mapping.
    fn unmap_for(&self, number: u64) {
        if self.is_of(number) {
            self.unmap();
        }
    }

    /// Closes the slot and makes the core invalidate the registration.
    ///
    /// Returns true if the core was called: the adapter no longer uses the memory. With [`Form::Ex`] the mapping has
    /// ended. With [`Form::Legacy`] the core calls `dma_unmap` meanwhile, which ends the mapping; check
    /// [`Self::is_mapped`]. Returns false if nothing is mapped or the client cannot invalidate.
    ///
    /// May sleep. The caller must not hold a lock that the client's `get_pages`, `dma_map`, `dma_unmap` or `put_pages`
    /// take.
    pub(crate) fn invalidate(&self) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        let owner = state
            .owner
            .filter(|_| state.mapped.as_ref().is_some_and(|mapped| mapped.live));
        drop(state);
        let Some((_, core)) = owner else {
            return false;
        };
        initialised();
        let gate = PEER_CLIENT.lock().clone();
        let Some(gate) = gate.filter(|gate| gate.invalidate(core)) else {
            return false;
        };
        if gate.form == Form::Ex {
            self.unmap();
        }
        true
    }

    /// Ends the mapping, which no adapter may use any more. Returns whether there was one.
    fn unmap(&self) -> bool {
        let mut state = self.state.lock();
        let Some(mapped) = state.mapped.as_mut().filter(|mapped| mapped.live) else {
            return false;
        };
        mapped.live = false;
        // SAFETY: By the type invariant the object owns the mapping. `live` was set, so this is the only call.
        unsafe { sys::p2pmem_peer_unmap(mapped.raw.as_ptr()) };
        let target = mapped.target.take();
        drop(state);
        // Dropped outside the lock: the drop may free the provider's memory.
        drop(target);
        true
    }

    /// Closes the slot: no mapping can be made any more. Returns whether one exists.
    pub(crate) fn close(&self) -> bool {
        self.state.lock().closed = true;
        self.is_mapped()
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.state.lock().mapped.as_ref().is_some_and(|mapped| mapped.live)
    }

    /// Writes a view of the entries to a table of the core. Returns the number of entries. Errors: `EINVAL` without a
    /// mapping.
    ///
    /// # Safety
    ///
    /// `sg_head` must be valid for writes. The table must not be used after the slot is dropped.
    unsafe fn show(&self, sg_head: *mut bindings::sg_table) -> Result<u32> {
        let state = self.state.lock();
        let mapped = state.mapped.as_ref().ok_or(EINVAL)?;
        // SAFETY: By the type invariant of `PeerMapping` the mapping is valid. It stays in the slot until the slot is
        // dropped, and so do the entries. The caller guarantees that `sg_head` is valid, and that the view is not used for
        // longer.
        unsafe {
            sys::p2pmem_peer_entries(mapped.raw.as_ptr(), sg_head);
            Ok(sys::p2pmem_peer_nents(mapped.raw.as_ptr()))
        }
    }
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

/// The form in which a client is registered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// The client can invalidate, and ends the mapping itself afterwards.
    Ex,
    /// The client can invalidate, and the core calls `dma_unmap` meanwhile.
    Legacy,
    /// The client cannot invalidate: a registration ends only when the program ends it.
    Persistent,
}

impl Form {
    /// Returns the form that the administrator chose with the module parameter `peer_memory`, or `None` for `off`.
    pub(crate) fn chosen() -> Option<Self> {
        // SAFETY: The function has no requirements. The parameter is read-only after the module is loaded.
        match unsafe { sys::p2pmem_peer_form() } {
            sys::P2PMEM_PEER_EX => Some(Self::Ex),
            sys::P2PMEM_PEER_LEGACY => Some(Self::Legacy),
            sys::P2PMEM_PEER_PERSISTENT => Some(Self::Persistent),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ex => "ex",
            Self::Legacy => "legacy",
            Self::Persistent => "persistent",
        }
    }
}

/// Returns the path of the Module.symvers in which the build found the interface.
pub(crate) fn symvers() -> &'static CStr {
    // SAFETY: The C function returns a string literal, which is NUL-terminated and valid as long as the module.
    unsafe { CStr::from_char_ptr(sys::p2pmem_peer_symvers()) }
}

/// The arguments of an invalidation.
///
/// # Invariants
///
/// `handle` and `call` are those that the core returned for one client. They may be used while that client is registered.
#[derive(Clone, Copy)]
struct Invalidator {
    handle: NonNull<ffi::c_void>,
    call: sys::invalidate_peer_memory,
}

// SAFETY: The handle is an opaque pointer to an object of the core, which accepts calls from any thread.
unsafe impl Send for Invalidator {}

struct Passage {
    /// Set while the client is registered.
    by: Option<Invalidator>,
    /// Number of calls of the core in progress.
    inside: usize,
}

kernel::sync::global_lock! {
    // SAFETY: The module's init function calls `init_lock()` first. All users of the lock call `initialised()` before.
    unsafe(uninit) static PEER_CLIENT: Mutex<Option<Arc<Gate>>> = None;
}

/// Initialises the lock of the client.
///
/// # Safety
///
/// Must be called once, before [`set_initialised`](super::global::set_initialised).
pub(super) unsafe fn init_lock() {
    // SAFETY: The caller guarantees that this is the first call. No other code uses the lock before `set_initialised()`,
    // as `initialised()` panics.
    unsafe { PEER_CLIENT.init() };
}

/// Guards calls of the core by the client. Closed before the client is unregistered.
#[pin_data]
pub(super) struct Gate {
    form: Form,
    #[pin]
    passage: Mutex<Passage>,
    #[pin]
    empty: CondVar,
}

impl Gate {
    fn new(form: Form) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                form,
                passage <- new_mutex!(Passage { by: None, inside: 0 }),
                empty <- new_condvar!(),
            }),
            GFP_KERNEL,
        )
    }

    fn open(&self, by: Invalidator) {
        self.passage.lock().by = Some(by);
    }

    fn is_open(&self) -> bool {
        self.passage.lock().by.is_some()
    }

    /// Forbids further calls of the core, and waits for those in progress.
    fn close(&self) {
        let mut passage = self.passage.lock();
        passage.by = None;
        while passage.inside > 0 {
            self.empty.wait(&mut passage);
        }
    }

    /// Runs `call` if the gate is open, and keeps the gate from closing until `call` returns. Returns `None` if it is
    /// closed.
    fn pass<R>(&self, call: impl FnOnce(Invalidator) -> R) -> Option<R> {
        let mut passage = self.passage.lock();
        let by = passage.by?;
        passage.inside += 1;
        drop(passage);
        let answer = call(by);
        self.passage.lock().inside -= 1;
        self.empty.notify_all();
        Some(answer)
    }

    /// Makes the core invalidate a registration. Returns false if the client cannot invalidate or the gate is closed.
    fn invalidate(&self, core: CoreContext) -> bool {
        let told = self.pass(|by| {
            // SAFETY: By the type invariant both are from the core, for one client. The client stays registered during the
            // call: its registration's drop closes the gate first, which waits for `pass()`. The core ignores a number
            // that it no longer knows.
            by.call.map(|call| unsafe { call(by.handle.as_ptr(), core.0) })
        });
        told.flatten().is_some()
    }
}

/// Returns the form of the registered client, or `None` if no client is registered.
pub(crate) fn registered() -> Option<Form> {
    initialised();
    let gate = PEER_CLIENT.lock().clone();
    gate.filter(|gate| gate.is_open()).map(|gate| gate.form)
}

/// The claim to be the module's only client: taken before the client is registered, dropped after it is unregistered.
struct Place(Arc<Gate>);

impl Place {
    /// Takes the claim. Errors: `EBUSY` if there is another client; `ENOMEM`.
    fn take(form: Form) -> Result<Self> {
        initialised();
        let gate = Gate::new(form)?;
        let mut place = PEER_CLIENT.lock();
        if place.is_some() {
            return Err(EBUSY);
        }
        *place = Some(gate.clone());
        Ok(Self(gate))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let gate = PEER_CLIENT.lock().take();
        drop(gate);
    }
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
            // INVARIANT: The caller guarantees that the device is null or valid during the call.
            let adapter = Adapter(NonNull::new(dma_device), PhantomData);
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

#[kunit_tests(p2pmem_peer_mem)]
mod tests {
    use super::*;

    use crate::ext::{
        completion::Completion,
        workqueue::OwnQueue, //
    };

    const PAGE: u64 = kernel::page::PAGE_SIZE as u64;
    /// The largest length of an entry in whole pages.
    const MOST: u64 = (u32::MAX as u64) & !(PAGE - 1);
    const CPU: Adapter<'static> = Adapter(None, PhantomData);

    #[test]
    fn a_piece_is_one_entry_as_long_as_lengths_allow() -> Result {
        // Nothing accesses these addresses, so no memory is needed there.
        let at = 1 << 38;
        for (size, lengths) in [
            (PAGE, &[PAGE] as &[u64]),
            (MOST, &[MOST]),
            (MOST + PAGE, &[MOST, PAGE]),
            (2 * MOST, &[MOST, MOST]),
            (2 * MOST + 3 * PAGE, &[MOST, MOST, 3 * PAGE]),
        ] {
            let entries = mapped(&[(at, size)])?;
            assert_eq!(entries.len(), lengths.len());
            let mut next = None;
            for (&(address, length), &expected) in entries.iter().zip(lengths) {
                assert_eq!(length, expected);
                assert!(next.is_none_or(|next| next == address));
                next = Some(address + length);
            }
        }
        Ok(())
    }

    #[test]
    fn pieces_keep_their_order_and_distance() -> Result {
        let at = 1 << 38;
        let entries = mapped(&[(at + 9 * PAGE, PAGE), (at, 2 * PAGE), (at + 2 * PAGE, PAGE)])?;
        assert_eq!(entries.len(), 3);
        let first = entries.first().map_or(0, |entry| entry.0);
        for (&(address, length), (from, size)) in entries.iter().zip([(0, 1), (-9, 2), (-7, 1)]) {
            assert_eq!(address, first.wrapping_add_signed(from * PAGE as i64));
            assert_eq!(length, size * PAGE);
        }
        Ok(())
    }

    #[test]
    fn more_entries_than_one_page_of_them_holds() -> Result {
        // The kernel chains scatterlists page by page.
        let mut pieces = KVec::new();
        for at in 0..1_000 {
            pieces.push(((1 << 38) + 2 * at * PAGE, PAGE), GFP_KERNEL)?;
        }
        let entries = mapped(&pieces)?;
        assert_eq!(entries.len(), 1_000);
        let first = entries.first().map_or(0, |entry| entry.0);
        assert!(entries
            .last()
            .is_some_and(|&(address, length)| address == first + 2 * 999 * PAGE && length == PAGE));
        Ok(())
    }

    #[test]
    fn a_slot_takes_one_mapping_and_none_when_closed() -> Result {
        let slot = KBox::pin_init(Slot::new(), GFP_KERNEL)?;
        let piece = [PhysRange::new(1 << 38, PAGE)?];
        let mut table = bindings::sg_table::default();
        // SAFETY: The table is a local variable, and the slot outlives it.
        assert!(unsafe { slot.show(&mut table) }.is_err_and(|e| e == EINVAL));
        assert!(!slot.unmap() && !slot.is_mapped());
        assert_eq!(untouched(&slot, &piece)?, 1);
        assert!(untouched(&slot, &piece).is_err_and(|e| e == EBUSY));
        // Closing does not end the mapping, but prevents new ones. The entries stay readable after the mapping has ended.
        assert!(slot.close() && slot.is_mapped());
        assert!(slot.unmap() && !slot.close());
        assert!(untouched(&slot, &piece).is_err_and(|e| e == ENODEV));
        assert_eq!(entries(&slot)?.len(), 1);
        Ok(())
    }

    #[test]
    fn a_slot_is_of_one_registration() -> Result {
        let slot = Arc::pin_init(Slot::new(), GFP_KERNEL)?;
        let whole = Arc::new((), GFP_KERNEL)?;
        // The slot belongs to the first registration that uses it, even if that comes several times.
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        slot.give_to(1, CoreContext(11))?;
        slot.give_to(1, CoreContext(12))?;
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        assert!(slot.give_to(2, CoreContext(21)).is_err_and(|e| e == EBUSY));
        assert_eq!(untouched(&slot, &[PhysRange::new(1 << 38, PAGE)?])?, 1);
        assert!(slot.keep(2, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        // Nothing dereferences this device.
        let other = Adapter(Some(NonNull::dangling()), PhantomData);
        assert!(slot.keep(1, &other, whole.clone()).is_err_and(|e| e == EINVAL));
        slot.keep(1, &CPU, whole.clone())?;
        slot.unmap_for(2);
        assert!(slot.is_mapped());
        slot.unmap_for(1);
        assert!(!slot.is_mapped());
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == ENODEV));
        slot.release();
        // The test holds the only reference.
        assert!(Arc::into_unique_or_drop(whole).is_some());
        Ok(())
    }

    #[test]
    fn a_gate_closes_behind_the_last_call() -> Result {
        let gate = Gate::new(Form::Ex)?;
        assert!(!gate.is_open() && gate.pass(|_| ()).is_none());
        gate.open(Invalidator {
            handle: NonNull::dangling(),
            call: None,
        });
        // A client without the core's function cannot invalidate.
        assert!(gate.is_open() && !gate.invalidate(CoreContext(1)));
        let (begun, end, closed) = (
            Arc::pin_init(Completion::new(), GFP_KERNEL)?,
            Arc::pin_init(Completion::new(), GFP_KERNEL)?,
            Arc::pin_init(Completion::new(), GFP_KERNEL)?,
        );
        let queue = OwnQueue::new(c"p2pmem-kunit", || {})?;
        let (within, at, until) = (gate.clone(), begun.clone(), end.clone());
        queue.try_spawn(move || {
            within.pass(|_| {
                at.complete();
                until.wait(60_000)
            });
        })?;
        assert!(begun.wait(60_000));
        let (other, done) = (gate.clone(), closed.clone());
        queue.try_spawn(move || {
            other.close();
            done.complete();
        })?;
        assert!(!closed.wait(20));
        end.complete();
        assert!(closed.wait(60_000));
        assert!(!gate.is_open() && gate.pass(|_| ()).is_none());
        Ok(())
    }

    /// Maps pieces for a virtual adapter, without a target.
    fn untouched(slot: &Slot, pieces: &[PhysRange]) -> Result<u32> {
        // SAFETY: The adapter is virtual, and the tests only compare the entries' numbers.
        unsafe { slot.map_unchecked(&CPU, None, pieces) }
    }

    /// Returns address and length of each entry that a core would get.
    fn entries(slot: &Slot) -> Result<KVec<(u64, u64)>> {
        let mut table = bindings::sg_table::default();
        // SAFETY: The table is a local variable, and the slot outlives it.
        let count = unsafe { slot.show(&mut table) }?;
        let mut list = KVec::new();
        let mut at = table.sgl;
        for _ in 0..count {
            // SAFETY: The table has `count` entries, and `at` is one of them.
            let entry = unsafe { &*at };
            list.push((entry.dma_address, u64::from(entry.dma_length)), GFP_KERNEL)?;
            // SAFETY: `at` is an entry of a valid table, as above.
            at = unsafe { bindings::sg_next(at) };
        }
        // The last entry is marked as the end.
        assert!(at.is_null() && table.nents == count);
        Ok(list)
    }

    /// Returns the entries of pieces at these physical addresses for a virtual adapter.
    fn mapped(pieces: &[(u64, u64)]) -> Result<KVec<(u64, u64)>> {
        let slot = KBox::pin_init(Slot::new(), GFP_KERNEL)?;
        let mut list = KVec::new();
        for &(phys, size) in pieces {
            list.push(PhysRange::new(phys, size)?, GFP_KERNEL)?;
        }
        let count = untouched(&slot, &list)?;
        assert!(slot.is_mapped());
        let entries = entries(&slot)?;
        assert_eq!(entries.len() as u32, count);
        assert!(slot.unmap() && !slot.unmap());
        Ok(entries)
    }
}
