// SPDX-License-Identifier: MIT OR Apache-2.0

//! NICs and protection domains.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_mummy_sys as ffi;

use super::{errno, PORT};
use crate::address::Link;

/// The list of NICs.
struct DeviceList {
    devices: NonNull<*mut ffi::ibv_device>,
    count: usize,
}

impl DeviceList {
    fn new() -> io::Result<Self> {
        let mut count = 0;
        // SAFETY: the call writes only the count, a local variable.
        let devices = unsafe { ffi::ibv_get_device_list(&mut count) };
        match NonNull::new(devices) {
            Some(devices) => Ok(Self {
                devices,
                count: usize::try_from(count).unwrap_or(0),
            }),
            None => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the NICs and their names.
    fn iter(&self) -> impl Iterator<Item = (*mut ffi::ibv_device, String)> + '_ {
        (0..self.count).map(|i| {
            // SAFETY: the list has `count` entries; a device's name is a C string that lives as long as the list.
            unsafe {
                let device = *self.devices.as_ptr().add(i);
                let name = ffi::ibv_get_device_name(device);
                (device, CStr::from_ptr(name).to_string_lossy().into_owned())
            }
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: it came from ibv_get_device_list and is freed once. Open devices hold their own reference.
        unsafe { ffi::ibv_free_device_list(self.devices.as_ptr()) };
    }
}

/// Returns the names of this machine's NICs.
///
/// # Errors
///
/// EOPNOTSUPP if libibverbs is not installed, ENOSYS if the kernel has no RDMA.
pub fn nics() -> io::Result<Vec<String>> {
    Ok(DeviceList::new()?.iter().map(|(_, name)| name).collect())
}

/// Limits of a NIC.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of work requests in a queue.
    pub queue: u32,
    /// Maximum number of outstanding RDMA READs and atomics of a queue pair as a responder.
    pub reads_answered: u8,
    /// Maximum number of outstanding RDMA READs and atomics of a queue pair as an initiator.
    pub reads_asked: u8,
}

/// Attributes of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Whether the port is active.
    pub is_active: bool,
    /// Link layer.
    pub link: Link,
    /// Local identifier.
    pub lid: u16,
    /// MTU in bytes.
    pub mtu: u32,
    /// Number of entries of the GID table.
    pub gids: u32,
}

/// Returns why a table with this number of entries has no GID at an index: an error with the indexes that exist, or that the entry is
/// empty.
fn no_gid(index: u8, entries: u32) -> io::Error {
    if u32::from(index) < entries {
        return io::Error::new(io::ErrorKind::NotFound, "the entry is empty");
    }
    let what = match entries {
        0 => "the table has no entry".to_owned(),
        1 => "the only index is 0".to_owned(),
        _ => format!("the indexes are 0 to {}", entries - 1),
    };
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// An open NIC.
///
/// # Invariants
///
/// `raw` is open until this is dropped.
pub struct Nic {
    pub(super) raw: NonNull<ffi::ibv_context>,
    name: String,
}

// SAFETY: libibverbs permits concurrent calls with one context from any threads.
unsafe impl Send for Nic {}
// SAFETY: as above.
unsafe impl Sync for Nic {}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Nic {
    /// Opens the NIC of this name; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// EPERM or EACCES if the user has no access to the device file. Those of [`nics`].
    pub fn open(name: &str) -> io::Result<Option<Arc<Self>>> {
        let list = DeviceList::new()?;
        let found = list.iter().find(|(_, other)| other == name);
        let Some((device, name)) = found else {
            return Ok(None);
        };
        // SAFETY: the list lives, so the device is valid.
        let raw = unsafe { ffi::ibv_open_device(device) };
        // INVARIANT: opened above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Some(Arc::new(Self { raw, name })))
    }

    /// Returns the NIC's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queries the NIC's limits.
    ///
    /// # Errors
    ///
    /// The NIC was removed.
    pub fn limits(&self) -> io::Result<Limits> {
        let mut attr = mem::MaybeUninit::<ffi::ibv_device_attr>::zeroed();
        // SAFETY: by the invariant the context is open. The attributes consist of integers and arrays of integers, so
        // all zeros is a valid value, and the call writes them.
        let attr = unsafe {
            errno(ffi::ibv_query_device(self.raw.as_ptr(), attr.as_mut_ptr()))?;
            attr.assume_init()
        };
        let few = |n: i32| u8::try_from(n.clamp(0, 255)).unwrap_or(0);
        Ok(Limits {
            queue: u32::try_from(attr.max_qp_wr).unwrap_or(1),
            reads_answered: few(attr.max_qp_rd_atom),
            reads_asked: few(attr.max_qp_init_rd_atom),
        })
    }

    /// Queries the port.
    ///
    /// # Errors
    ///
    /// The NIC was removed.
    pub fn port(&self) -> io::Result<Port> {
        let mut attr = mem::MaybeUninit::<ffi::ibv_port_attr>::zeroed();
        // SAFETY: as in `limits`.
        let attr = unsafe {
            errno(ffi::ibv_query_port(self.raw.as_ptr(), PORT, attr.as_mut_ptr()))?;
            attr.assume_init()
        };
        Ok(Port {
            is_active: attr.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
            // 2 is IBV_LINK_LAYER_ETHERNET; 1 and 0 (unspecified) are InfiniBand.
            link: if attr.link_layer == 2 {
                Link::Ethernet
            } else {
                Link::Infiniband
            },
            lid: attr.lid,
            // Codes 1 to 5 mean 256 to 4096 bytes.
            mtu: 128 << attr.active_mtu.clamp(1, 5),
            gids: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
        })
    }

    /// Queries an entry of the port's GID table.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::InvalidInput`] if the table has no such entry, with the indexes that exist; [`io::ErrorKind::NotFound`] if the entry
    /// is empty. The NIC was removed.
    pub fn gid(&self, index: u8) -> io::Result<[u8; 16]> {
        let entries = self.port()?.gids;
        if u32::from(index) >= entries {
            return Err(no_gid(index, entries));
        }
        let mut gid = ffi::ibv_gid { raw: [0; 16] };
        // SAFETY: by the invariant the context is open; the GID is a local variable, and all its bytes are initialized.
        let gid = unsafe {
            errno(ffi::ibv_query_gid(self.raw.as_ptr(), PORT, index.into(), &mut gid))?;
            gid.raw
        };
        // libibverbs returns zeros for an empty entry, without an error.
        if gid == [0; 16] {
            return Err(no_gid(index, entries));
        }
        Ok(gid)
    }
}

impl Drop for Nic {
    fn drop(&mut self) {
        // SAFETY: open by the invariant; every object of this context holds an `Arc` of this and is already dropped.
        unsafe { ffi::ibv_close_device(self.raw.as_ptr()) };
    }
}

/// A protection domain.
///
/// # Invariants
///
/// `raw` is allocated until this is dropped.
pub struct Domain {
    pub(super) raw: NonNull<ffi::ibv_pd>,
    nic: Arc<Nic>,
}

// SAFETY: as for `Nic`.
unsafe impl Send for Domain {}
// SAFETY: as for `Nic`.
unsafe impl Sync for Domain {}

impl Domain {
    /// Allocates a protection domain of a NIC.
    ///
    /// # Errors
    ///
    /// ENOMEM.
    pub fn new(nic: Arc<Nic>) -> io::Result<Arc<Self>> {
        // SAFETY: by its invariant the context is open.
        let raw = unsafe { ffi::ibv_alloc_pd(nic.raw.as_ptr()) };
        // INVARIANT: allocated above.
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        Ok(Arc::new(Self { raw, nic }))
    }

    /// Returns the NIC.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: allocated by the invariant; every object of this domain holds an `Arc` of this and is already
        // dropped.
        unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_gids_are_errors_with_the_indexes_that_exist() {
        let error = |index, entries| {
            let error = no_gid(index, entries);
            (error.kind(), error.to_string())
        };
        let invalid = |what: &str| (io::ErrorKind::InvalidInput, what.to_owned());
        assert_eq!(error(8, 8), invalid("the indexes are 0 to 7"));
        assert_eq!(error(255, 8), invalid("the indexes are 0 to 7"));
        assert_eq!(error(1, 1), invalid("the only index is 0"));
        assert_eq!(error(0, 0), invalid("the table has no entry"));
        assert_eq!(error(7, 8), (io::ErrorKind::NotFound, "the entry is empty".to_owned()));
    }

    #[test]
    fn nics_have_names_or_the_list_is_an_error() {
        // A build machine has no NIC; existing NICs have names.
        match nics() {
            Ok(names) => assert!(names.iter().all(|name| !name.is_empty())),
            Err(error) => assert!(error.raw_os_error().is_some(), "{error}"),
        }
        if let Ok(nic) = Nic::open("no such NIC") {
            assert!(nic.is_none());
        }
    }
}
