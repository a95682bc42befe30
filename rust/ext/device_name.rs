// SPDX-License-Identifier: GPL-2.0

//! Names of a device and its driver, copied for messages that are written after the device may be gone.
//!
//! Any context; no locks.
//!
//! C header: [`include/linux/device.h`](srctree/include/linux/device.h)

use crate::sys;
use kernel::{
    bindings,
    fmt::{self, Write},
    prelude::*, //
};

/// Names of a device and of its driver, for messages. Names longer than 31 bytes are cut.
#[derive(Clone, Copy)]
pub(crate) struct DeviceName {
    name: [u8; 32],
    driver: [u8; 32],
}

impl DeviceName {
    /// Reads the names of a device and its driver.
    ///
    /// # Safety
    ///
    /// `device` must be valid during the call.
    pub(super) unsafe fn of(device: *mut bindings::device) -> Self {
        let mut name = Self {
            name: [0; 32],
            driver: [0; 32],
        };
        // SAFETY: The caller guarantees a valid device, and each length is that of the array before it.
        unsafe {
            sys::p2pmem_dev_names(
                device,
                name.name.as_mut_ptr(),
                name.name.len(),
                name.driver.as_mut_ptr(),
                name.driver.len(),
            )
        };
        name
    }

    /// Returns the device's name without the driver's.
    pub(crate) fn device(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.name).unwrap_or_default()
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_ascii(f, &self.name)?;
        f.write_str(" (")?;
        write_ascii(f, &self.driver)?;
        f.write_char(')')
    }
}

/// Writes the text up to its NUL. Bytes that are not visible ASCII become question marks.
pub(super) fn write_ascii(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    for &c in bytes.split(|&c| c == 0).next().unwrap_or_default() {
        f.write_char(if c.is_ascii_graphic() { char::from(c) } else { '?' })?;
    }
    Ok(())
}
