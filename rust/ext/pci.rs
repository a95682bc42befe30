// SPDX-License-Identifier: GPL-2.0

//! PCI functions of any driver: finding them, and where they sit in the hierarchy.
//!
//! C header: [`include/linux/pci.h`](srctree/include/linux/pci.h)

use crate::{
    policy::{
        path::PciAddr,
        rule::FunctionId, //
    },
    sys, //
};
use core::ptr::{self, NonNull};
use kernel::{bindings, ffi, pci, sync::aref::ARef};

/// A PCI function, bound to any driver or to none, kept by a reference.
///
/// # Invariants
///
/// `physical` is the physical function of a virtual one, and none of any other. It is none as well of a virtual function that
/// was removed before this was made: that one still points to its physical function, which the kernel no longer keeps for
/// it. So the bus of such a function has no parent that could be looked at.
#[derive(Clone)]
pub(crate) struct Function {
    device: ARef<pci::Device>,
    physical: Option<ARef<pci::Device>>,
}

impl Function {
    fn new(device: ARef<pci::Device>) -> Self {
        let raw = ptr::from_ref::<pci::Device>(&device).cast_mut().cast();
        // SAFETY: The function is valid. The call returns null or a reference that is ours.
        let physical = NonNull::new(unsafe { sys::p2pmem_pci_get_physfn(raw) });
        let owned = |ptr: NonNull<bindings::pci_dev>| {
            // SAFETY: `pci::Device` is a transparent wrapper of `struct pci_dev`; the reference is ours.
            unsafe { ARef::from_raw(ptr.cast::<pci::Device>()) }
        };
        // INVARIANT: The call returns the physical function of a virtual one that was not removed.
        Self {
            device,
            physical: physical.map(owned),
        }
    }

    /// Whether all that the hierarchy above the function consists of is there: not of a virtual function that was removed
    /// before this was made.
    pub(super) fn is_placed(&self) -> bool {
        // SAFETY: The function is valid; whether it is a virtual one does not change.
        self.physical.is_some() || !unsafe { sys::p2pmem_pci_is_virtfn(self.as_raw()) }
    }

    /// # Safety
    ///
    /// `ptr` must be null or a valid `struct pci_dev` with a reference that this function takes over.
    unsafe fn from_owned(ptr: *mut bindings::pci_dev) -> Option<Self> {
        let ptr = NonNull::new(ptr.cast::<pci::Device>())?;
        // SAFETY: `pci::Device` is a transparent wrapper of `struct pci_dev`; the caller hands over a reference.
        Some(Self::new(unsafe { ARef::from_raw(ptr) }))
    }

    /// The function behind a device that the kernel crate gave us.
    pub(crate) fn of(dev: &pci::Device) -> Self {
        Self::new(dev.into())
    }

    /// The function a `struct device` of the PCI bus is part of.
    ///
    /// # Safety
    ///
    /// `dev` must be a valid device of `pci_bus_type` for the duration of the call.
    pub(crate) unsafe fn of_device(dev: *mut bindings::device) -> Self {
        // SAFETY: Every device of the PCI bus is embedded in a `struct pci_dev`.
        let pdev = unsafe { kernel::container_of!(dev, bindings::pci_dev, dev) };
        // SAFETY: `pdev` is valid as `dev` is; `pci::Device` is a transparent wrapper.
        Self::of(unsafe { &*pdev.cast::<pci::Device>() })
    }

    /// # Safety
    ///
    /// `ptr` must be a valid `struct pci_dev` for the duration of the call.
    pub(super) unsafe fn of_raw(ptr: NonNull<bindings::pci_dev>) -> Self {
        // SAFETY: `pci::Device` is a transparent wrapper of `struct pci_dev`; the caller promises that it is valid.
        Self::of(unsafe { ptr.cast::<pci::Device>().as_ref() })
    }

    /// The function at `addr`, if there is one that is not being removed.
    pub(crate) fn find(addr: PciAddr) -> Option<Self> {
        let PciAddr { domain, bus, devfn } = addr;
        // SAFETY: A plain look-up; it returns null or a reference that is ours.
        let found = unsafe {
            Self::from_owned(bindings::pci_get_domain_bus_and_slot(
                domain as i32,
                u32::from(bus),
                u32::from(devfn),
            ))
        };
        found.filter(Self::is_placed)
    }

    /// The function that follows `after` in the kernel's list of all, or the first.
    pub(crate) fn next(after: Option<Self>) -> Option<Self> {
        const ANY: u32 = !0;
        let from = after.map_or(ptr::null_mut(), |f| ARef::into_raw(f.device).as_ptr().cast());
        // SAFETY: `pci_get_device()` takes over the reference to `from` and returns null or a reference that is ours.
        unsafe { Self::from_owned(bindings::pci_get_device(ANY, ANY, from)) }
    }

    pub(crate) fn as_raw(&self) -> *mut bindings::pci_dev {
        ptr::from_ref::<pci::Device>(&self.device).cast_mut().cast()
    }

    pub(crate) fn as_raw_device(&self) -> *mut bindings::device {
        // SAFETY: The function is valid, its reference is ours.
        unsafe { &raw mut (*self.as_raw()).dev }
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        ptr::eq(self.as_raw(), other.as_raw())
    }

    pub(crate) fn device(&self) -> &pci::Device {
        &self.device
    }

    /// Its address. The domain of a virtual function that was removed before this was made is one that no machine has.
    pub(crate) fn address(&self) -> PciAddr {
        let domain = match self.is_placed() {
            // SAFETY: The function is valid, and so is the host bridge above it, which knows the domain.
            true => unsafe { sys::p2pmem_pci_domain(self.as_raw()) },
            false => u32::MAX,
        };
        // SAFETY: The function is valid and keeps its bus; its address does not change while it exists.
        let (bus, devfn) = unsafe { (sys::p2pmem_pci_bus(self.as_raw()), (*self.as_raw()).devfn) };
        PciAddr {
            domain,
            bus: bus as u8,
            devfn: devfn as u8,
        }
    }

    /// The bridge above this function; none above a function of a root bus.
    pub(crate) fn upstream(&self) -> Option<Self> {
        let keeps = self.physical();
        if !keeps.is_placed() {
            return None;
        }
        // SAFETY: The function is valid, no virtual one, and keeps the bridges above it.
        let bridge = unsafe { sys::p2pmem_pci_upstream_bridge(keeps.as_raw()) };
        let bridge = NonNull::new(bridge.cast::<pci::Device>())?;
        // SAFETY: `bridge` is kept by `keeps` until we have a reference of our own.
        Some(Self::of(unsafe { bridge.as_ref() }))
    }

    /// Whether ACS on this port sends peer traffic upstream, as `drivers/pci/p2pdma.c` reads it.
    pub(crate) fn acs_redirects(&self) -> bool {
        const ACS_CTRL: i32 = 6;
        const RR_CR_EC: u16 = 0x04 | 0x08 | 0x20;
        // SAFETY: The function is valid; the capability's place does not change while it exists.
        let pos = i32::from(unsafe { (*self.as_raw()).acs_cap });
        if pos == 0 {
            return false;
        }
        self.config_word(pos + ACS_CTRL)
            .is_some_and(|ctrl| ctrl & RR_CR_EC != 0)
    }

    /// The Link Status register: speed and width of the link that the port describes.
    pub(crate) fn link_status(&self) -> Option<u16> {
        const LNKSTA: i32 = 0x12;
        // SAFETY: The function is valid; the capability's place does not change while it exists.
        let pos = i32::from(unsafe { (*self.as_raw()).pcie_cap });
        if pos == 0 {
            return None;
        }
        self.config_word(pos + LNKSTA)
    }

    /// Whether the function's configuration header is one of a bridge.
    pub(crate) fn is_bridge(&self) -> bool {
        // SAFETY: The function is valid; its header type does not change.
        unsafe { (*self.as_raw()).hdr_type == 1 }
    }

    /// The physical function of a virtual one, where it is there, else the function itself.
    pub(crate) fn physical(&self) -> Self {
        match &self.physical {
            // INVARIANT: It is no virtual function.
            Some(physical) => Self {
                device: physical.clone(),
                physical: None,
            },
            None => self.clone(),
        }
    }

    fn config_word(&self, at: i32) -> Option<u16> {
        if !self.is_placed() {
            return None;
        }
        let mut value = 0u16;
        // SAFETY: The function and the host bridge above it are valid, and `value` outlives the call.
        let ret = unsafe { bindings::pci_read_config_word(self.as_raw(), at, &mut value) };
        // All ones is what a function reads as that is gone.
        (ret == 0 && value != u16::MAX).then_some(value)
    }

    /// The port type of the PCI Express capability (`PCI_EXP_TYPE_*`), none for conventional functions.
    pub(crate) fn pcie_type(&self) -> Option<u8> {
        // SAFETY: The function is valid.
        u8::try_from(unsafe { sys::p2pmem_pci_pcie_type(self.as_raw()) }).ok()
    }

    /// Domain and root bus of the host bridge above this function; its own bus where the host bridge is not known.
    pub(crate) fn host_bridge(&self) -> (u32, u8) {
        let PciAddr { domain, bus, .. } = self.address();
        if !self.is_placed() {
            return (domain, bus);
        }
        // SAFETY: The function is valid and keeps its host bridge, by its physical function where it is a virtual one.
        let bus = unsafe { sys::p2pmem_pci_root_bus(self.as_raw()) };
        (domain, bus as u8)
    }

    /// NUMA node, or -1.
    pub(crate) fn node(&self) -> i32 {
        // SAFETY: The function is valid.
        unsafe { sys::p2pmem_pci_node(self.as_raw()) }
    }

    /// Physical address and size of a memory BAR; none where the BAR is unused or an I/O BAR.
    pub(crate) fn bar(&self, bar: u32) -> Option<(u64, u64)> {
        let index = i32::try_from(bar).ok().filter(|&n| n < 6)?;
        // SAFETY: The function is valid and `index` is a standard BAR.
        if !unsafe { sys::p2pmem_pci_mem_bar(self.as_raw(), index) } {
            return None;
        }
        let dev = self.device();
        Some((dev.resource_start(bar).ok()?, dev.resource_len(bar).ok()?))
    }

    /// Whether a BAR (0 to 5) is prefetchable: reads have no side effects and writes may be combined.
    pub(crate) fn prefetchable(&self, bar: u32) -> bool {
        // SAFETY: The function is valid and the index is a standard BAR.
        bar < 6 && unsafe { sys::p2pmem_pci_prefetchable(self.as_raw(), bar as i32) }
    }

    /// Whether a BAR (0 to 5) is a 64-bit one.
    pub(crate) fn is_64bit(&self, bar: u32) -> bool {
        // SAFETY: The function is valid and the index is a standard BAR.
        bar < 6 && unsafe { sys::p2pmem_pci_is_64bit(self.as_raw(), bar as i32) }
    }

    /// Vendor, device and class as the configuration space has them.
    pub(crate) fn ids(&self) -> (u16, u16, u32) {
        // SAFETY: The function is valid; the fields do not change while it exists.
        unsafe {
            let dev = self.as_raw();
            ((*dev).vendor, (*dev).device, (*dev).class)
        }
    }

    /// What rules can tell the function from others by.
    pub(crate) fn function_id(&self) -> FunctionId {
        let (vendor, device, _) = self.ids();
        FunctionId {
            addr: self.address(),
            vendor,
            device,
        }
    }

    /// Writes the bound driver's name, NUL-terminated; empty where there is none, and while the device is locked, as it is while
    /// a driver is being bound or unbound.
    pub(crate) fn driver_name(&self, name: &mut [ffi::c_char; 32]) {
        // SAFETY: The function is valid, and `name` is as long as the call is told.
        unsafe { sys::p2pmem_pci_driver_name(self.as_raw(), name.as_mut_ptr(), name.len()) };
    }
}

/// The node that everything belongs to on a machine with one node online, else -1.
pub(crate) fn only_node() -> i32 {
    // SAFETY: The function takes no arguments and reads a mask that is always there.
    unsafe { sys::p2pmem_only_node() }
}

/// The kernel's NUMA distance between two nodes, 0 where one of them is unknown.
pub(crate) fn node_distance(a: i32, b: i32) -> u32 {
    // SAFETY: A look-up in a table that checks the nodes' numbers.
    unsafe { sys::p2pmem_node_distance(a, b) }
}
