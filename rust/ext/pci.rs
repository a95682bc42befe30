// SPDX-License-Identifier: GPL-2.0

//! PCI functions of any driver: how to find them, and their place in the hierarchy.
//!
//! Looking up functions and reading configuration space may sleep or spin; all functions are for process context. This file
//! takes no locks.
//!
//! C header: [`include/linux/pci.h`](srctree/include/linux/pci.h)

use crate::{
    ext::device_name::{
        DeviceName,
        DriverName, //
    },
    policy::{
        path::PciAddr,
        rule::FunctionId, //
    },
    sys, //
};
use core::ptr::{self, NonNull};
use kernel::{bindings, device::Bound, ffi, pci, sync::aref::ARef};

/// A reference to a PCI function, bound to any driver or to none.
///
/// # Invariants
///
/// `physical` is the physical function of a virtual function, and `None` for any other function. It is also `None` for a
/// virtual function that was removed before this object was made: such a function still points to its physical function,
/// but does not keep a reference, so the hierarchy above it must not be read.
#[derive(Clone)]
pub(crate) struct Function {
    device: ARef<pci::Device>,
    physical: Option<ARef<pci::Device>>,
}

impl Function {
    /// Takes over a reference to a function. May sleep.
    fn new(device: ARef<pci::Device>) -> Self {
        let mut function = Self { device, physical: None };
        // INVARIANT: The call returns the physical function if this is a virtual function that was not removed, else `None`.
        function.physical = function.find_physical();
        function
    }

    /// Returns the physical function of a virtual function. `None` if this is no virtual function, or was removed: its pointer
    /// may be to a freed device then.
    fn find_physical(&self) -> Option<ARef<pci::Device>> {
        if !self.is_virtual() {
            return None;
        }
        // SAFETY: `device` keeps the function valid. A virtual function has `physfn`, which does not change.
        let physical = unsafe { (*self.as_raw()).__bindgen_anon_1.physfn };
        // SAFETY: `is_function()` only compares `physical`, which may be dangling.
        let found = unsafe {
            bindings::bus_find_device(
                &raw const bindings::pci_bus_type,
                ptr::null_mut(),
                physical.cast(),
                Some(is_function),
            )
        };
        NonNull::new(found)?;
        // SAFETY: The call found `physical` on the bus and took a reference for the caller. `pci::Device` is a transparent wrapper
        // of `struct pci_dev`.
        let physical = unsafe { ARef::from_raw(NonNull::new_unchecked(physical.cast::<pci::Device>())) };
        // pci_iov_remove_virtfn() drops the reference to the physical function after the virtual one is removed from sysfs. So
        // while the virtual one is registered, the physical one exists, and what was found is not another function at its address.
        // SAFETY: `device` keeps the function valid.
        let registered = unsafe { bindings::kobject::state_in_sysfs_raw(&raw const (*self.as_raw_device()).kobj) };
        (registered != 0).then_some(physical)
    }

    /// Returns whether this is a virtual function.
    fn is_virtual(&self) -> bool {
        // SAFETY: `device` keeps the function valid. The field does not change.
        unsafe { bindings::pci_dev::is_virtfn_raw(self.as_raw()) != 0 }
    }

    /// Returns whether the hierarchy above the function is valid.
    ///
    /// False for a virtual function that was removed before this object was made. Otherwise this object keeps the
    /// hierarchy: a function keeps its bus and the bridges above.
    pub(crate) fn has_hierarchy(&self) -> bool {
        self.physical.is_some() || !self.is_virtual()
    }

    /// Takes over a reference from C.
    ///
    /// # Safety
    ///
    /// `ptr` must be null, or a valid `struct pci_dev` with a reference that the caller gives up.
    unsafe fn from_owned(ptr: *mut bindings::pci_dev) -> Option<Self> {
        let ptr = NonNull::new(ptr.cast::<pci::Device>())?;
        // SAFETY: `pci::Device` is a transparent wrapper of `struct pci_dev`. The caller gives up a reference.
        Some(Self::new(unsafe { ARef::from_raw(ptr) }))
    }

    /// Returns a reference to the function of a device of the kernel crate.
    pub(crate) fn of(dev: &pci::Device) -> Self {
        Self::new(dev.into())
    }

    /// Returns a reference to the function that contains a `struct device`.
    ///
    /// # Safety
    ///
    /// `dev` must be a valid device of `pci_bus_type` for the duration of the call.
    pub(crate) unsafe fn of_device(dev: *mut bindings::device) -> Self {
        // SAFETY: Every device of the PCI bus is embedded in a `struct pci_dev`.
        let pdev = unsafe { kernel::container_of!(dev, bindings::pci_dev, dev) };
        // SAFETY: `pdev` is valid because `dev` is. `pci::Device` is a transparent wrapper of `struct pci_dev`.
        Self::of(unsafe { &*pdev.cast::<pci::Device>() })
    }

    /// Returns a reference to a function.
    ///
    /// # Safety
    ///
    /// `ptr` must be a valid `struct pci_dev` for the duration of the call.
    pub(super) unsafe fn of_raw(ptr: NonNull<bindings::pci_dev>) -> Self {
        // SAFETY: `pci::Device` is a transparent wrapper of `struct pci_dev`, which the caller guarantees to be valid.
        Self::of(unsafe { ptr.cast::<pci::Device>().as_ref() })
    }

    /// Returns the function at `addr`, or `None` if there is none or it is being removed. May sleep.
    pub(crate) fn find(addr: PciAddr) -> Option<Self> {
        let PciAddr { domain, bus, devfn } = addr;
        // SAFETY: The look-up takes no pointers. It returns null or a reference for the caller.
        let found = unsafe {
            Self::from_owned(bindings::pci_get_domain_bus_and_slot(
                domain as i32,
                u32::from(bus),
                u32::from(devfn),
            ))
        };
        found.filter(Self::has_hierarchy)
    }

    /// Returns the function after `after` in the kernel's list of all functions, or the first one. `None` at the end. May
    /// sleep.
    pub(crate) fn next(after: Option<Self>) -> Option<Self> {
        const ANY: u32 = !0;
        let from = after.map_or(ptr::null_mut(), |f| ARef::into_raw(f.device).as_ptr().cast());
        // SAFETY: `pci_get_device()` drops the reference to `from`, which came from `ARef::into_raw()`, and returns null or
        // a reference for the caller.
        unsafe { Self::from_owned(bindings::pci_get_device(ANY, ANY, from)) }
    }

    /// Returns the `struct pci_dev`, which is valid as long as `self`.
    pub(crate) fn as_raw(&self) -> *mut bindings::pci_dev {
        raw(&self.device)
    }

    /// Returns the `struct device`, which is valid as long as `self`.
    pub(crate) fn as_raw_device(&self) -> *mut bindings::device {
        // SAFETY: `device` keeps the function valid; the expression only computes the address of a field.
        unsafe { &raw mut (*self.as_raw()).dev }
    }

    /// Returns whether both are the same function: the same `struct pci_dev`.
    pub(crate) fn same(&self, other: &Self) -> bool {
        ptr::eq(self.as_raw(), other.as_raw())
    }

    /// Returns the device of the kernel crate.
    pub(crate) fn device(&self) -> &pci::Device {
        &self.device
    }

    /// Returns the PCI address.
    ///
    /// The domain is `u32::MAX`, which no machine has, if [`Self::has_hierarchy`] is false: the host bridge knows the domain.
    pub(crate) fn address(&self) -> PciAddr {
        let domain = match self.has_hierarchy() {
            // SAFETY: `device` keeps the function valid, and `has_hierarchy()` says that the host bridge above it is valid too.
            true => unsafe { sys::p2pmem_pci_domain(self.as_raw()) },
            false => u32::MAX,
        };
        let [bus, devfn] = self.device.dev_id().to_be_bytes();
        PciAddr { domain, bus, devfn }
    }

    /// Returns the bridge above the function, or above its physical function. `None` on a root bus, and if
    /// [`Self::has_hierarchy`] is false.
    pub(crate) fn upstream(&self) -> Option<Self> {
        if !self.has_hierarchy() {
            return None;
        }
        // SAFETY: The reference keeps the function valid. `has_hierarchy()` says that it is no virtual function, so it keeps its bus
        // and the bridges above. A root bus has no bridge.
        let bridge = NonNull::new(unsafe { (*(*raw(self.physical())).bus).self_ })?;
        // SAFETY: `self` keeps the bridge valid during the call.
        Some(unsafe { Self::of_raw(bridge) })
    }

    /// Returns whether ACS on this port redirects peer traffic upstream, by the test of `drivers/pci/p2pdma.c`. Reads
    /// configuration space.
    pub(crate) fn acs_redirects(&self) -> bool {
        const REDIRECTS: u32 = bindings::PCI_ACS_RR | bindings::PCI_ACS_CR | bindings::PCI_ACS_EC;
        // SAFETY: `device` keeps the function valid. The offset of the capability does not change.
        let pos = i32::from(unsafe { (*self.as_raw()).acs_cap });
        if pos == 0 {
            return false;
        }
        self.config_word(pos + bindings::PCI_ACS_CTRL as i32)
            .is_some_and(|ctrl| u32::from(ctrl) & REDIRECTS != 0)
    }

    /// Reads the Link Status register, with speed and width of the port's link; of a virtual function, whose register is
    /// reserved, that of its physical function. `None` if the function has no PCI Express capability or does not respond.
    pub(crate) fn link_status(&self) -> Option<u16> {
        let physical = self.physical();
        // SAFETY: The reference keeps the function valid. The offset of the capability does not change.
        let pos = i32::from(unsafe { (*raw(physical)).pcie_cap });
        if pos == 0 {
            return None;
        }
        self.config_word_of(physical, pos + bindings::PCI_EXP_LNKSTA as i32)
    }

    /// Returns whether the function has the configuration header of a bridge.
    pub(crate) fn is_bridge(&self) -> bool {
        // SAFETY: `device` keeps the function valid. The header type does not change.
        unsafe { u32::from((*self.as_raw()).hdr_type) == bindings::PCI_HEADER_TYPE_BRIDGE }
    }

    /// Returns the physical function of a virtual function, or the function itself if it is not a virtual one or was removed.
    fn physical(&self) -> &pci::Device {
        self.physical.as_ref().unwrap_or(&self.device)
    }

    /// Reads a 16-bit register of configuration space. `None` if the read fails or the function does not respond.
    fn config_word(&self, at: i32) -> Option<u16> {
        self.config_word_of(&self.device, at)
    }

    /// As [`Self::config_word`], of the function or of [`Self::physical`].
    fn config_word_of(&self, function: &pci::Device, at: i32) -> Option<u16> {
        if !self.has_hierarchy() {
            return None;
        }
        let mut value = 0u16;
        // SAFETY: The reference keeps the function valid, and `has_hierarchy()` says that the host bridge above both is valid too.
        // `value` is a local variable.
        let ret = unsafe { bindings::pci_read_config_word(raw(function), at, &mut value) };
        // A removed function reads as all ones.
        (ret == 0 && value != u16::MAX).then_some(value)
    }

    /// Reads the Command register (`PCI_COMMAND_*`). `None` if the function does not respond.
    pub(super) fn command(&self) -> Option<u32> {
        self.config_word(bindings::PCI_COMMAND as i32).map(u32::from)
    }

    /// Returns whether the function responds, and decodes accesses to its memory. Virtual functions have no such setting.
    pub(super) fn has_memory_space(&self) -> bool {
        self.command()
            .is_some_and(|command| self.physical.is_some() || command & bindings::PCI_COMMAND_MEMORY != 0)
    }

    /// Returns the port type of the PCI Express capability (`PCI_EXP_TYPE_*`), or `None` for a conventional function.
    pub(crate) fn pcie_type(&self) -> Option<u8> {
        // SAFETY: `device` keeps the function valid. The fields do not change.
        let (cap, flags) = unsafe { ((*self.as_raw()).pcie_cap, (*self.as_raw()).pcie_flags_reg) };
        (cap != 0).then_some(((u32::from(flags) & bindings::PCI_EXP_FLAGS_TYPE) >> 4) as u8)
    }

    /// Returns domain and root bus of the host bridge above the function. The function's own bus if [`Self::has_hierarchy`] is
    /// false.
    pub(crate) fn host_bridge(&self) -> (u32, u8) {
        let PciAddr { domain, bus, .. } = self.address();
        if !self.has_hierarchy() {
            return (domain, bus);
        }
        // SAFETY: `device` keeps the function valid, and `has_hierarchy()` says that the host bridge above it is valid too, which
        // keeps its root bus.
        let root = unsafe { (*(*bindings::pci_find_host_bridge((*self.as_raw()).bus)).bus).number };
        (domain, root)
    }

    /// Returns the NUMA node, or -1 if unknown.
    pub(crate) fn node(&self) -> i32 {
        // SAFETY: `device` keeps the function valid.
        unsafe { sys::p2pmem_pci_node(self.as_raw()) }
    }

    /// Returns physical address and size in bytes of a memory BAR (0 to 5), or `None` for an unused BAR, an I/O BAR or
    /// another index.
    pub(crate) fn bar(&self, bar: u32) -> Option<(u64, u64)> {
        if !self.bar_has(bar, bindings::IORESOURCE_MEM) {
            return None;
        }
        let size = self.device.resource_len(bar).ok().filter(|&size| size > 0)?;
        Some((self.device.resource_start(bar).ok()?, size))
    }

    /// Returns the memory BAR that contains a physical address, and the offset of the address in it.
    pub(crate) fn bar_at(&self, phys: u64) -> Option<(u32, u64)> {
        (0..6).find_map(|bar| {
            let (start, size) = self.bar(bar)?;
            let offset = phys.checked_sub(start)?;
            (offset < size).then_some((bar, offset))
        })
    }

    /// Returns whether a BAR has the flag `flag` (`IORESOURCE_*`). False for an index that is no BAR.
    fn bar_has(&self, bar: u32, flag: u32) -> bool {
        // SAFETY: `device` keeps the function valid. The index is within the array.
        let flags = |bar| unsafe { (*self.as_raw()).resource[bar as usize].flags };
        bar < bindings::PCI_STD_NUM_BARS && flags(bar) & flag as usize != 0
    }

    /// Returns whether a BAR is prefetchable: reads have no side effects and writes may be combined.
    pub(crate) fn prefetchable(&self, bar: u32) -> bool {
        self.bar_has(bar, bindings::IORESOURCE_PREFETCH)
    }

    /// Returns whether a BAR is a 64-bit BAR.
    pub(crate) fn is_64bit(&self, bar: u32) -> bool {
        self.bar_has(bar, bindings::IORESOURCE_MEM_64)
    }

    /// Returns vendor id, device id and class code (24 bits).
    pub(crate) fn ids(&self) -> (u16, u16, u32) {
        let device = &self.device;
        (
            device.vendor_id().as_raw(),
            device.device_id(),
            device.pci_class().as_raw(),
        )
    }

    /// Returns the properties that rules match: address, vendor id and device id.
    pub(crate) fn function_id(&self) -> FunctionId {
        let (vendor, device, _) = self.ids();
        FunctionId {
            addr: self.address(),
            vendor,
            device,
        }
    }

    /// Calls `f` if the function is bound to a driver. The function stays bound meanwhile: its device is locked. May sleep; the
    /// caller does not have the device locked.
    pub(crate) fn while_bound(&self, f: impl FnOnce(&pci::Device<Bound>)) {
        let device = self.as_raw_device();
        // SAFETY: `device` keeps the function valid. Its mutex is the device lock.
        unsafe { bindings::mutex_lock(&raw mut (*device).mutex) };
        // SAFETY: `device` keeps the function valid, whose device is locked.
        if unsafe { bindings::device_is_bound(device) } {
            // SAFETY: The device is bound until it is unlocked. `pci::Device` is a transparent wrapper of `struct pci_dev` in
            // every context.
            f(unsafe { &*self.as_raw().cast::<pci::Device<Bound>>() });
        }
        // SAFETY: This function locked the device.
        unsafe { bindings::mutex_unlock(&raw mut (*device).mutex) };
    }
}

fn raw(device: &pci::Device) -> *mut bindings::pci_dev {
    // `pci::Device` is a transparent wrapper of `struct pci_dev`.
    ptr::from_ref(device).cast_mut().cast()
}

/// Returns 1 if `device` belongs to the function `data`, else 0. For `bus_find_device()`.
///
/// # Safety
///
/// `device` must be a valid device of the PCI bus. `data` is only compared.
unsafe extern "C" fn is_function(device: *mut bindings::device, data: *const ffi::c_void) -> ffi::c_int {
    // SAFETY: Every device of the PCI bus is embedded in a `struct pci_dev`.
    let function = unsafe { kernel::container_of!(device, bindings::pci_dev, dev) };
    ffi::c_int::from(ptr::eq(function.cast(), data))
}

/// Returns the name of the driver that the device is bound to. C: `dev_driver_string()`.
pub(crate) fn driver_name(device: &pci::Device<Bound>) -> DriverName {
    // SAFETY: The device is valid, and bound as long as `device`.
    unsafe { DeviceName::of(Function::of(device).as_raw_device()) }.driver
}

/// Returns the only online NUMA node, or -1 if several are online.
pub(crate) fn only_node() -> i32 {
    // SAFETY: The function has no arguments and reads a mask that always exists.
    unsafe { sys::p2pmem_only_node() }
}

/// Returns the kernel's NUMA distance between two nodes (10 is local), or 0 if one of them is negative.
pub(crate) fn node_distance(a: i32, b: i32) -> u32 {
    // SAFETY: `node_distance()` checks the node numbers before it reads its table; negative numbers do not get there.
    unsafe { sys::p2pmem_node_distance(a, b) }
}
