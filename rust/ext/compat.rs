// SPDX-License-Identifier: GPL-2.0

//! What differs between the kernel series that p2pmem builds for, in the shape that the newest one has.
//!
//! Kbuild sets `p2pmem_linux_7_3` for Linux 7.3 and later. No other Rust file depends on the kernel's version; the C files
//! compare `LINUX_VERSION_CODE` in `rust/sys/compat.h`, and nowhere else.

use kernel::prelude::*;

/// This module, as registrations want it.
#[cfg(p2pmem_linux_7_3)]
pub(crate) fn this_module() -> &'static ThisModule {
    kernel::module::this_module::<crate::LocalModule>()
}

/// This module, as registrations want it.
#[cfg(not(p2pmem_linux_7_3))]
pub(crate) fn this_module() -> &'static ThisModule {
    &crate::THIS_MODULE
}

/// The attributes of a configfs directory: `kernel::configfs::configfs_attrs!`.
///
/// Before 7.3 that macro takes `THIS_MODULE` from where it is called.
macro_rules! configfs_attrs {
    ($($what:tt)*) => {{
        #[cfg(not(p2pmem_linux_7_3))]
        use $crate::THIS_MODULE;
        ::kernel::configfs::configfs_attrs! { $($what)* }
    }};
}
pub(crate) use configfs_attrs;

/// The table of a PCI driver's devices: `kernel::pci_device_table!`.
///
/// Before 7.3 that macro wants a name for the table's alias too.
#[cfg(p2pmem_linux_7_3)]
macro_rules! pci_device_table {
    ($($what:tt)*) => {
        ::kernel::pci_device_table! { $($what)* }
    };
}
#[cfg(not(p2pmem_linux_7_3))]
macro_rules! pci_device_table {
    ($name:ident, $($what:tt)*) => {
        ::kernel::pci_device_table! { $name, MODULE_TABLE, $($what)* }
    };
}
pub(super) use pci_device_table;

/// What a PCI driver's `probe` is told about the device's entry in the driver's table. Since 7.3 there may be none.
#[cfg(p2pmem_linux_7_3)]
pub(super) type IdInfo<'a, T> = Option<&'a T>;

/// What a PCI driver's `probe` is told about the device's entry in the driver's table. Before 7.3 there is always one.
#[cfg(not(p2pmem_linux_7_3))]
pub(super) type IdInfo<'a, T> = &'a T;
