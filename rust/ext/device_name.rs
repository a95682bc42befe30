// SPDX-License-Identifier: GPL-2.0

//! Names of a device and its driver, copied for messages that are written after the device may be gone.
//!
//! Any context; no locks.
//!
//! C header: [`include/linux/device.h`](srctree/include/linux/device.h)

use kernel::{
    bindings,
    device,
    fmt::{self, Write},
    prelude::*, //
};

/// The name of a driver, NUL-terminated, cut to 31 bytes.
pub(crate) type DriverName = [u8; 32];

/// Names of a device and of its driver, for messages. Names longer than 31 bytes are cut.
#[derive(Clone, Copy)]
pub(crate) struct DeviceName {
    name: [u8; 32],
    pub(super) driver: DriverName,
}

impl DeviceName {
    /// Reads the names of a device and its driver.
    ///
    /// # Safety
    ///
    /// `device` must be valid, and its driver, if it has one, must not be unloaded during the call.
    pub(super) unsafe fn of(device: *mut bindings::device) -> Self {
        let cut = |name: &CStr| {
            let mut to = [0; 32];
            let len = name.count_bytes().min(31);
            to[..len].copy_from_slice(&name.to_bytes()[..len]);
            to
        };
        // SAFETY: The caller guarantees a valid device, and that the name of its driver stays. Other names are those of a bus.
        let (name, driver) = unsafe {
            (
                device::Device::<device::Normal>::from_raw(device).name(),
                CStr::from_char_ptr(bindings::dev_driver_string(device)),
            )
        };
        Self {
            name: cut(name),
            driver: cut(driver),
        }
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
