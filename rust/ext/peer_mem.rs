// SPDX-License-Identifier: GPL-2.0

//! The peer-memory interface: how an RDMA core that has it learns that memory which a program registers is ours.
//!
//! C header: `rust/sys/peer_mem.h`
//!
//! The core calls a client for each registration in the order acquire, get_pages, dma_map; and dma_unmap, put_pages,
//! release. Between the two the client may *invalidate*: the core then makes the adapter forget the registration before
//! that call returns, and the second half may come at any time, from another thread, in part, or twice.
//!
//! A registration is known to the core by a number, not by a pointer: a call that comes too late finds nothing. Numbers are
//! given out here and never used twice, and a slot belongs to the one number that it is first used for: so a mapping ends by
//! what the core says of its own registration, and by nothing else, as long as an adapter may use it.

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

/// Memory that a program wants to register, as it named it: not in whole pages.
#[derive(Clone, Copy)]
pub(crate) struct RegistrationRequest {
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) size: u64,
}

/// The number of registrations that there is no memory for: it finds nothing, and the core releases it as any other.
const NO_MEMORY: usize = usize::MAX;

/// The next number.
static NEXT: Atomic<u64> = Atomic::<u64>::new(1);

/// What the core knows a registration by, when it is told of it.
#[derive(Clone, Copy)]
struct CoreContext(u64);

/// A client of the interface.
pub(crate) trait Client: Sized + 'static {
    /// A registration.
    type Context: Send + Sync + 'static;

    /// Makes a registration of that number for memory that is the client's; false where it is not. The core asks in the process
    /// that registers, one at a time, holding a lock that others need for asking too.
    ///
    /// Errors: the memory is the client's, and there is none for its registration, which fails with `ENOMEM`.
    fn acquire(number: u64, asked: RegistrationRequest) -> Result<bool>;
    /// The registration of a number. None where it was released.
    fn find(number: u64) -> Option<Arc<Self::Context>>;
    /// The memory is to stay. `write`: the adapter will write to it. From here on [`Slot::invalidate`] can be called.
    fn get_pages(context: &Arc<Self::Context>, write: bool) -> Result;
    /// Maps the memory in the context's slot.
    fn dma_map(context: &Self::Context, adapter: &Adapter<'_>) -> Result;
    /// Where the context has its mapping.
    fn slot(context: &Self::Context) -> &Slot;
    /// The adapter has no use for the mapping any more, which has ended. Comes any number of times.
    fn dma_unmap(context: &Self::Context);
    /// The memory need not stay; the mapping has ended. Comes any number of times.
    fn put_pages(context: &Self::Context);
    /// The core forgets the number; the mapping has ended. Comes any number of times.
    fn release(number: u64);
}

/// The device that does an adapter's DMA.
///
/// # Invariants
///
/// The pointer, where there is one, is a device that the core keeps for `'a`.
pub(crate) struct Adapter<'a>(Option<NonNull<bindings::device>>, PhantomData<&'a ()>);

impl Adapter<'_> {
    /// Whether it is one that works with the CPU, on kernel addresses. Such an adapter has no device.
    pub(crate) fn is_virtual(&self) -> bool {
        self.0.is_none()
    }

    fn device(&self) -> *mut bindings::device {
        self.0.map_or(ptr::null_mut(), NonNull::as_ptr)
    }

    /// Its device's name; none of a virtual one.
    pub(crate) fn name(&self) -> Option<DeviceName> {
        self.0?;
        // SAFETY: By the type invariant the device is valid.
        Some(unsafe { DeviceName::of(self.device()) })
    }

    /// The PCI function that it is, if it is one.
    pub(crate) fn function(&self) -> Option<Function> {
        self.0?;
        // SAFETY: By the type invariant the device is valid, and it keeps those above it.
        let pdev = NonNull::new(unsafe { sys::p2pmem_dev_pci(self.device()) })?;
        // SAFETY: `pdev` is kept by the device until we have a reference of our own.
        Some(unsafe { Function::of_raw(pdev) })
    }

    /// Whether the kernel says that it reaches the provider. C: `pci_p2pdma_distance_many()`.
    pub(crate) fn reaches(&self, provider: &Function) -> bool {
        self.function()
            .is_some_and(|client| p2pdma::distance(provider, &client).is_some())
    }
}

/// A mapping, and what keeps the memory while it is one.
///
/// # Invariants
///
/// `raw` is a mapping that is ours, for `device`, which it keeps, of memory that `target` keeps while the mapping is live.
struct PeerMapping {
    raw: NonNull<sys::p2pmem_peer_map>,
    /// Null for an adapter that has none.
    device: *mut bindings::device,
    target: Option<Target>,
    /// Neither unmapped nor, where it is one of pages, given up.
    live: bool,
}

// SAFETY: A mapping is not bound to a thread.
unsafe impl Send for PeerMapping {}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the mapping is ours.
        unsafe { sys::p2pmem_peer_free(self.raw.as_ptr()) };
    }
}

/// What a slot has to keep what it is part of.
trait Keep: Send + Sync {}

impl<C: Send + Sync> Keep for C {}

struct SlotState {
    mapped: Option<PeerMapping>,
    closed: bool,
    /// The registration's number, and what the core knows it by.
    owner: Option<(u64, CoreContext)>,
    /// What the slot is part of, from when the core was given a list of addresses until it releases the registration.
    keep: Option<Arc<dyn Keep>>,
}

/// Where a registration has its one mapping. The list of addresses that the core was given stays until this is dropped;
/// what they mean ends when it is unmapped.
#[pin_data]
pub(crate) struct Slot {
    /// Held while the mapping is made and ended, and never while the core is called.
    #[pin]
    room: Mutex<SlotState>,
}

impl Slot {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            room <- new_mutex!(SlotState {
                mapped: None,
                closed: false,
                owner: None,
                keep: None,
            }),
        })
    }

    /// Maps pieces of the target for an adapter; for a virtual one as the pages that they have to have. Returns the number of
    /// entries.
    ///
    /// Errors: `ENODEV` when it is closed, `EBUSY` when there is or was a mapping, `EINVAL` where a piece is not the target's, or
    /// the target is nothing for such an adapter, and those of the kernel.
    pub(crate) fn map(&self, adapter: &Adapter<'_>, target: Target, pieces: &[PhysRange]) -> Result<u32> {
        let serves = match adapter.is_virtual() {
            true => target.has_pages(),
            false => target.is_for_dma(),
        };
        if !serves || !pieces.iter().all(|piece| piece.is_in(&target)) {
            return Err(EINVAL);
        }
        // SAFETY: Seen just now.
        unsafe { self.map_unchecked(adapter, Some(target), pieces) }
    }

    /// As [`Self::map`].
    ///
    /// # Safety
    ///
    /// All pieces must lie in the memory of the target, which can be mapped for such an adapter; or without a target, the adapter
    /// must be a virtual one, and nothing may use the entries.
    unsafe fn map_unchecked(&self, adapter: &Adapter<'_>, target: Option<Target>, pieces: &[PhysRange]) -> Result<u32> {
        let provider = target
            .as_ref()
            .filter(|_| !adapter.is_virtual())
            .and_then(Target::provider);
        let provider = provider.map_or(ptr::null_mut(), NonNull::as_ptr);
        let count = u32::try_from(pieces.len())?;
        let mut room = self.room.lock();
        if room.closed {
            return Err(ENODEV);
        }
        if room.mapped.is_some() {
            return Err(EBUSY);
        }
        // SAFETY: The core keeps the device during the call, and the mapping keeps it afterwards; the target keeps the
        // provider and the memory, which by the requirement all pieces are in; the slice has as many pieces as the call is told.
        let raw = unsafe { sys::p2pmem_peer_map(adapter.device(), provider, pieces.as_ptr().cast(), count) };
        let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
        // INVARIANT: Made just now, of the target's memory.
        let mapped = room.mapped.insert(PeerMapping {
            raw,
            device: adapter.device(),
            target,
            live: true,
        });
        // SAFETY: By the type invariant the mapping is ours.
        Ok(unsafe { sys::p2pmem_peer_nents(mapped.raw.as_ptr()) })
    }

    /// Makes it the slot of a registration. Errors: `EBUSY` when it is another one's.
    fn give_to(&self, number: u64, core: CoreContext) -> Result {
        let mut room = self.room.lock();
        if room.owner.is_some_and(|(owner, _)| owner != number) {
            return Err(EBUSY);
        }
        room.owner = Some((number, core));
        Ok(())
    }

    fn is_of(&self, number: u64) -> bool {
        self.room.lock().owner.is_some_and(|(owner, _)| owner == number)
    }

    /// Keeps what the slot is part of until [`Self::release`]. Errors: `EINVAL` when it is not that registration's, or not mapped
    /// for that adapter, `ENODEV` when the mapping has ended.
    fn keep(&self, number: u64, adapter: &Adapter<'_>, whole: Arc<dyn Keep>) -> Result {
        if !self.is_of(number) {
            return Err(EINVAL);
        }
        let mut room = self.room.lock();
        match room.mapped.as_ref().filter(|mapped| mapped.device == adapter.device()) {
            None => return Err(EINVAL),
            Some(mapped) if !mapped.live => return Err(ENODEV),
            Some(_) => {}
        }
        let old = room.keep.replace(whole);
        drop(room);
        drop(old);
        Ok(())
    }

    /// The core does not look at the list of addresses any more.
    fn release(&self) {
        let keep = self.room.lock().keep.take();
        drop(keep);
    }

    /// Ends the mapping of a registration that no adapter uses any more.
    fn unmap_for(&self, number: u64) {
        if self.is_of(number) {
            self.unmap();
        }
    }

    /// Closes the slot, and has the core make the adapter forget what is mapped. When this returns true, the adapter uses the
    /// memory no more, and the mapping has ended; in the form [`Form::Legacy`] the core has called for that. None of the
    /// caller's locks may be one that get_pages, dma_map, dma_unmap or put_pages take. False where nothing is mapped, or the
    /// client cannot do this.
    pub(crate) fn invalidate(&self) -> bool {
        let mut room = self.room.lock();
        room.closed = true;
        let owner = room
            .owner
            .filter(|_| room.mapped.as_ref().is_some_and(|mapped| mapped.live));
        drop(room);
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

    /// Ends the mapping, which no adapter may use any more. Whether there was one.
    fn unmap(&self) -> bool {
        let mut room = self.room.lock();
        let Some(mapped) = room.mapped.as_mut().filter(|mapped| mapped.live) else {
            return false;
        };
        mapped.live = false;
        // SAFETY: By the type invariant the mapping is ours.
        unsafe { sys::p2pmem_peer_unmap(mapped.raw.as_ptr()) };
        let target = mapped.target.take();
        drop(room);
        // Outside the lock, as this may be the last reference to a provider's memory.
        drop(target);
        true
    }

    /// Nothing is mapped from here on. Whether something is.
    pub(crate) fn close(&self) -> bool {
        self.room.lock().closed = true;
        self.is_mapped()
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.room.lock().mapped.as_ref().is_some_and(|mapped| mapped.live)
    }

    /// Makes a table of the core's a view of the entries. Returns their number.
    ///
    /// # Safety
    ///
    /// `sg_head` must be valid for writing, and not be used after the slot is dropped.
    unsafe fn show(&self, sg_head: *mut bindings::sg_table) -> Result<u32> {
        let room = self.room.lock();
        let mapped = room.mapped.as_ref().ok_or(EINVAL)?;
        // SAFETY: By the type invariant the mapping is ours; the caller promises the rest.
        unsafe {
            sys::p2pmem_peer_entries(mapped.raw.as_ptr(), sg_head);
            Ok(sys::p2pmem_peer_nents(mapped.raw.as_ptr()))
        }
    }
}

/// A reference to this module: it is not unloaded while there is one.
///
/// # Invariants
///
/// The reference is ours.
pub(crate) struct ModuleRef(());

impl ModuleRef {
    /// None where the module is being unloaded.
    pub(crate) fn get() -> Option<Self> {
        // INVARIANT: A reference was taken.
        // SAFETY: No requirements.
        unsafe { sys::p2pmem_module_get() }.then_some(Self(()))
    }
}

impl Drop for ModuleRef {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the reference is ours.
        unsafe { sys::p2pmem_module_put() };
    }
}

/// How a client is registered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// It can invalidate, and unmaps by itself afterwards.
    Ex,
    /// It can invalidate, in which the core has it unmap.
    Legacy,
    /// It cannot invalidate: a registration ends when the program ends it.
    Persistent,
}

impl Form {
    /// The one that the administrator chose; none where he wants no client.
    pub(crate) fn chosen() -> Option<Self> {
        // SAFETY: No requirements; the value does not change after the module was loaded.
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

/// The Module.symvers in which the interface was found when the module was built.
pub(crate) fn symvers() -> &'static CStr {
    // SAFETY: The string is a literal.
    unsafe { CStr::from_char_ptr(sys::p2pmem_peer_symvers()) }
}

/// What invalidating takes.
///
/// # Invariants
///
/// `handle` and `call` are what the core returned for a client that is registered.
#[derive(Clone, Copy)]
struct Invalidator {
    handle: NonNull<ffi::c_void>,
    call: sys::invalidate_peer_memory,
}

// SAFETY: The handle is not bound to a thread.
unsafe impl Send for Invalidator {}

struct Passage {
    /// There while the client is registered.
    by: Option<Invalidator>,
    /// Calls of the core that are under way.
    inside: usize,
}

kernel::sync::global_lock! {
    // SAFETY: `init_lock()` initialises it, and all that uses it calls `initialised()` first.
    unsafe(uninit) static PEER_CLIENT: Mutex<Option<Arc<Gate>>> = None;
}

/// # Safety
///
/// Called once, before the static locks are said to be initialised.
pub(super) unsafe fn init_lock() {
    // SAFETY: By the requirement, as all that uses the lock calls `initialised()` first.
    unsafe { PEER_CLIENT.init() };
}

/// The way from a client to the core: closed before the client is unregistered.
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

    /// The core is called no more. Waits for the calls that are under way.
    fn close(&self) {
        let mut passage = self.passage.lock();
        passage.by = None;
        while passage.inside > 0 {
            self.empty.wait(&mut passage);
        }
    }

    /// Calls `call` with what is there while the gate is open, which is closed no sooner than that has returned.
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

    /// Has the core make the adapter forget a registration. False where the client cannot do this.
    fn invalidate(&self, core: CoreContext) -> bool {
        let told = self.pass(|by| {
            // SAFETY: By the type invariant both are the core's, and the client is registered until this has returned. A number
            // that the core does not know (any more) is not an error.
            by.call.map(|call| unsafe { call(by.handle.as_ptr(), core.0) })
        });
        told.flatten().is_some()
    }
}

/// How the client is registered; none while it is not.
pub(crate) fn registered() -> Option<Form> {
    initialised();
    let gate = PEER_CLIENT.lock().clone();
    gate.filter(|gate| gate.is_open()).map(|gate| gate.form)
}

/// The client's place, of which there is one: taken before the core knows the client, and free again after it has forgotten it.
struct Place(Arc<Gate>);

impl Place {
    /// Errors: `EBUSY` while there is another client.
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

/// A client that the core knows. Dropping it waits until all its registrations have been released.
///
/// # Invariants
///
/// `handle` is what the core returned for `client`, which stays where it is.
pub(crate) struct PeerMemoryRegistration<T: Client> {
    place: Place,
    handle: NonNull<ffi::c_void>,
    #[allow(dead_code, reason = "the core has a pointer to it")]
    client: KBox<sys::peer_memory_client_ex>,
    _client: PhantomData<fn() -> T>,
}

// SAFETY: A registered client is not bound to a thread.
unsafe impl<T: Client> Send for PeerMemoryRegistration<T> {}
// SAFETY: There is nothing to be done with a shared reference.
unsafe impl<T: Client> Sync for PeerMemoryRegistration<T> {}

impl<T: Client> PeerMemoryRegistration<T> {
    /// Registers the client. Errors: `EINVAL` when the core does not take it, `EBUSY` while there is another one.
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
        // SAFETY: The client is complete, and in a box that goes after it was unregistered. Until the gate is open nothing is
        // acquired.
        let handle = unsafe { sys::ib_register_peer_memory_client(&client.client, slot) };
        let handle = NonNull::new(handle).ok_or(EINVAL)?;
        // INVARIANT: As the core returned them; the gate is closed before the client is unregistered.
        place.0.open(Invalidator { handle, call });
        // INVARIANT: See above.
        Ok(Self {
            place,
            handle,
            client,
            _client: PhantomData,
        })
    }

    /// The number that a pointer of the core's is, and its registration.
    fn context(pointer: *mut ffi::c_void) -> Result<(u64, Arc<T::Context>)> {
        let number = pointer.addr() as u64;
        Ok((number, T::find(number).ok_or(EINVAL)?))
    }

    /// # Safety
    ///
    /// Called by the core with a place for the number.
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
            // No machine counts as far as the last one.
            Ok(true) => number as usize,
            Ok(false) => return 0,
            // Cores take an error for "not mine", and would go on to ask others for memory that is.
            Err(_) => NO_MEMORY,
        };
        // SAFETY: The core has a place for it.
        unsafe { *client_context = ptr::without_provenance_mut(number) };
        1
    }

    /// # Safety
    ///
    /// Called by the core for what was acquired.
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
    /// Called by the core for what was acquired, with a table and a place for a number. The table is not used after
    /// the registration was released.
    unsafe extern "C" fn dma_map(
        sg_head: *mut bindings::sg_table,
        client_context: *mut ffi::c_void,
        dma_device: *mut bindings::device,
        _dmasync: ffi::c_int,
        nmap: *mut ffi::c_int,
    ) -> ffi::c_int {
        from_result(|| {
            let (number, context) = Self::context(client_context)?;
            // INVARIANT: The core keeps the device, if there is one, during the call.
            let adapter = Adapter(NonNull::new(dma_device), PhantomData);
            T::dma_map(&context, &adapter)?;
            let slot = T::slot(&context);
            slot.keep(number, &adapter, context.clone())?;
            // SAFETY: The core's table is valid. The slot is kept until the core releases the registration, which it does last.
            let count = unsafe { slot.show(sg_head) }?;
            // SAFETY: The core has a place for it.
            unsafe { *nmap = count as ffi::c_int };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// Called by the core, with what `dma_map` was called with.
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
    /// Called by the core, with what `get_pages` was called with.
    unsafe extern "C" fn put_pages(_sg_head: *mut bindings::sg_table, client_context: *mut ffi::c_void) {
        if let Ok((number, context)) = Self::context(client_context) {
            T::slot(&context).unmap_for(number);
            T::put_pages(&context);
        }
    }

    /// # Safety
    ///
    /// Called by the core.
    unsafe extern "C" fn get_page_size(_client_context: *mut ffi::c_void) -> usize {
        // Entries are as long as they can be, in whole pages. A larger size would have the core cut them to it.
        PAGE_SIZE
    }

    /// # Safety
    ///
    /// Called by the core for what was acquired.
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
        // SAFETY: By the type invariant the handle is the core's, of a client that is registered, and nobody calls it with it any
        // more.
        unsafe { sys::ib_unregister_peer_memory_client(self.handle.as_ptr()) };
    }
}

/// Asserts the layout that every core with the interface was built with.
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
    /// The longest entry that whole pages allow.
    const MOST: u64 = (u32::MAX as u64) & !(PAGE - 1);
    const CPU: Adapter<'static> = Adapter(None, PhantomData);

    #[test]
    fn a_piece_is_one_entry_as_long_as_lengths_allow() -> Result {
        // No byte of this is touched, so that it need not be there.
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
        // Scatterlists are chained page by page.
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
        // SAFETY: The table is ours.
        assert!(unsafe { slot.show(&mut table) }.is_err_and(|e| e == EINVAL));
        assert!(!slot.unmap() && !slot.is_mapped());
        assert_eq!(untouched(&slot, &piece)?, 1);
        assert!(untouched(&slot, &piece).is_err_and(|e| e == EBUSY));
        // Closing does not end it, it only keeps others out; what the core has can be looked at to the end.
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
        // Nobody's yet, and then that of the first one who comes, however often it comes.
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        slot.give_to(1, CoreContext(11))?;
        slot.give_to(1, CoreContext(12))?;
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        assert!(slot.give_to(2, CoreContext(21)).is_err_and(|e| e == EBUSY));
        assert_eq!(untouched(&slot, &[PhysRange::new(1 << 38, PAGE)?])?, 1);
        assert!(slot.keep(2, &CPU, whole.clone()).is_err_and(|e| e == EINVAL));
        // Nothing looks at this device.
        let other = Adapter(Some(NonNull::dangling()), PhantomData);
        assert!(slot.keep(1, &other, whole.clone()).is_err_and(|e| e == EINVAL));
        slot.keep(1, &CPU, whole.clone())?;
        slot.unmap_for(2);
        assert!(slot.is_mapped());
        slot.unmap_for(1);
        assert!(!slot.is_mapped());
        assert!(slot.keep(1, &CPU, whole.clone()).is_err_and(|e| e == ENODEV));
        slot.release();
        // Nobody but the test has it.
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
        // It cannot be invalidated with what has no call for it.
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

    /// Maps for an adapter that works with the CPU.
    fn untouched(slot: &Slot, pieces: &[PhysRange]) -> Result<u32> {
        // SAFETY: Nothing here uses the entries, but to compare them.
        unsafe { slot.map_unchecked(&CPU, None, pieces) }
    }

    /// Sizes of the entries of the table that a core would get.
    fn entries(slot: &Slot) -> Result<KVec<(u64, u64)>> {
        let mut table = bindings::sg_table::default();
        // SAFETY: The table is ours, and the slot outlives it.
        let count = unsafe { slot.show(&mut table) }?;
        let mut list = KVec::new();
        let mut at = table.sgl;
        for _ in 0..count {
            // SAFETY: The table has as many entries as the call said.
            let entry = unsafe { &*at };
            list.push((entry.dma_address, u64::from(entry.dma_length)), GFP_KERNEL)?;
            // SAFETY: As above.
            at = unsafe { bindings::sg_next(at) };
        }
        // The last one says so.
        assert!(at.is_null() && table.nents == count);
        Ok(list)
    }

    /// What pieces at these physical addresses become for an adapter that works with the CPU.
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
