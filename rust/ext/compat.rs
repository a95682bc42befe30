// SPDX-License-Identifier: GPL-2.0

//! Differences between the kernel series that p2pmem supports, in the form of the newest one.
//!
//! Kbuild sets `p2pmem_linux_7_3` for Linux 7.3 and later. No other Rust file depends on the kernel's version. Of the C
//! files, only `rust/sys/compat.h` compares `LINUX_VERSION_CODE`.

use kernel::{
    bindings,
    prelude::*, //
};

/// Returns this module, as the owner of a registration.
#[cfg(p2pmem_linux_7_3)]
pub(crate) fn this_module() -> &'static ThisModule {
    kernel::module::this_module::<crate::LocalModule>()
}

/// Returns this module, as the owner of a registration.
#[cfg(not(p2pmem_linux_7_3))]
pub(crate) fn this_module() -> &'static ThisModule {
    &crate::THIS_MODULE
}

/// Declares the attributes of a configfs directory, as `kernel::configfs::configfs_attrs!`.
///
/// Before 7.3 that macro uses `THIS_MODULE` of the scope that calls the macro.
macro_rules! configfs_attrs {
    ($($what:tt)*) => {{
        #[cfg(not(p2pmem_linux_7_3))]
        use $crate::THIS_MODULE;
        ::kernel::configfs::configfs_attrs! { $($what)* }
    }};
}
pub(crate) use configfs_attrs;

/// Declares the device table of a PCI driver, as `kernel::pci_device_table!`.
///
/// Before 7.3 that macro also takes a name for the table's module alias.
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

/// The argument of a PCI driver's `probe` with the data of the matching table entry. Since 7.3 it is optional.
#[cfg(p2pmem_linux_7_3)]
pub(super) type IdInfo<'a, T> = Option<&'a T>;

/// The argument of a PCI driver's `probe` with the data of the matching table entry. Before 7.3 it is always present.
#[cfg(not(p2pmem_linux_7_3))]
pub(super) type IdInfo<'a, T> = &'a T;

/// The direction of DMA in which a device may read and write. Since 7.3 the directions are a type of their own.
#[cfg(p2pmem_linux_7_3)]
pub(super) const DMA_BIDIRECTIONAL: bindings::dma_data_direction = bindings::dma_data_direction::DMA_BIDIRECTIONAL;

/// The direction of DMA in which a device may read and write. Before 7.3 the directions are integers.
#[cfg(not(p2pmem_linux_7_3))]
pub(super) const DMA_BIDIRECTIONAL: bindings::dma_data_direction = bindings::dma_data_direction_DMA_BIDIRECTIONAL;
