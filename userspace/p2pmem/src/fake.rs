// SPDX-License-Identifier: MIT OR Apache-2.0

//! A fake device without the kernel module, for tests of programs that use this crate, and of the crate itself.
//!
//! The test sets providers, paths and failures. Buffers are real memory that can be mapped and used for direct I/O.
//! Hardware is not simulated: an access to a mapping of a removed provider does not raise SIGBUS, a dma-buf has the
//! size but not the contents of its buffer and does not hold a buffer without handles, and a [`FakeNic`] transfers no
//! data.
//!
//! ```
//! use p2pmem::{fake::Fake, PathClass, Request};
//!
//! let near = "0000:03:00.0".parse()?;
//! let far = "0000:08:00.0".parse()?;
//! let drive: p2pmem::PciAddr = "0000:04:00.0".parse()?;
//! let fake = Fake::new()
//!     .provider(near, 64 << 20)
//!     .provider(far, 64 << 20)
//!     .path(near, drive, PathClass::SameSwitch, 4);
//! let device = fake.device();
//! assert_eq!(device.alloc(&Request::new(4096).near([drive]))?.provider(), 1);
//!
//! fake.fail_next(28);
//! assert_eq!(device.alloc(&Request::new(4096)).unwrap_err().errno(), Some(28));
//! # Ok::<(), p2pmem::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use p2pmem_sys as abi;
use rustix::event::{eventfd, EventfdFlags};

use crate::addr::PciAddr;
use crate::backend::Backend;
use crate::device::Device;
use crate::sys::memory_file;
use crate::types::PathClass;

mod configfs;
mod files;
mod kernel;
mod machine;
mod nic;
mod state;

pub use configfs::configfs_rules;
pub use files::{write_pci_function, write_rule};
use kernel::FakeDevice;
use machine::{event, lock, name, sum, Decision, Machine, OpenFile, Provider, SPACING};
pub use nic::FakeNic;

/// A fake module and machine. Clones share them.
#[derive(Clone)]
pub struct Fake {
    machine: Arc<Machine>,
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fake").finish_non_exhaustive()
    }
}

impl Default for Fake {
    fn default() -> Self {
        Self::new()
    }
}

impl Fake {
    /// A machine without providers.
    ///
    /// # Panics
    ///
    /// If the kernel does not support memory files (memfd).
    pub fn new() -> Self {
        let memory = memory_file(c"p2pmem-fake", SPACING << 8).expect("a memory file");
        Self {
            machine: Arc::new(Machine {
                state: Mutex::default(),
                memory,
            }),
        }
    }

    /// A small machine. Below one switch: an accelerator (provider 1 at 0000:03:00.0, 256 MiB), a drive at
    /// 0000:04:00.0, and a drive with a controller memory buffer (provider 3 at 0000:05:00.0, 32 MiB, adopted). Below
    /// another root port: a second accelerator (provider 2 at 0000:08:00.0, 64 MiB). A NIC at 0000:0a:00.0 cannot reach
    /// any provider.
    pub fn example() -> Self {
        let at = |bus| PciAddr {
            domain: 0,
            bus,
            devfn: 0,
        };
        Self::new()
            .provider(at(3), 256 << 20)
            .provider(at(8), 64 << 20)
            .adopted(at(5), 32 << 20, "nvme")
            .path(at(3), at(4), PathClass::SameSwitch, 4)
            .path(at(3), at(5), PathClass::SameSwitch, 4)
            .path(at(5), at(4), PathClass::SameSwitch, 4)
            .path(at(5), at(5), PathClass::SameDevice, 0)
            .path(at(3), at(10), PathClass::Unreachable, 0)
            .path(at(5), at(10), PathClass::Unreachable, 0)
            .path(at(8), at(10), PathClass::Unreachable, 0)
    }

    /// Adds a provider of `size` bytes. Ids start at 1.
    pub fn provider(self, addr: PciAddr, size: u64) -> Self {
        self.add(abi::p2pmem_provider {
            kind: abi::P2PMEM_KIND_OWN,
            addr: addr.into(),
            bar: 2,
            size,
            vendor: 0x1de5,
            device: 0x0001,
            class: 0x12_0000,
            flags: abi::P2PMEM_PROVIDER_EXPORTABLE,
            driver: name("p2pmem"),
            ..Default::default()
        })
    }

    /// Adds an adopted provider of `size` bytes, which `driver` published.
    pub fn adopted(self, addr: PciAddr, size: u64, driver: &str) -> Self {
        self.add(abi::p2pmem_provider {
            kind: abi::P2PMEM_KIND_ADOPTED,
            addr: addr.into(),
            bar: -1,
            size,
            vendor: 0x1b36,
            device: 0x0010,
            class: 0x01_0802,
            driver: name(driver),
            ..Default::default()
        })
    }

    /// Sets the PCI class of the device of provider `id`, 24 bits.
    pub fn class(self, id: u32, class: u32) -> Self {
        if let Some(provider) = lock(&self.machine.state).providers.get_mut(&id) {
            provider.raw.class = class;
        }
        self
    }

    /// Sets the NUMA node of provider `id`. Default: unknown.
    pub fn numa_node(self, id: u32, node: i32) -> Self {
        if let Some(provider) = lock(&self.machine.state).providers.get_mut(&id) {
            provider.raw.numa_node = node;
        }
        self
    }

    fn add(self, raw: abi::p2pmem_provider) -> Self {
        let mut state = lock(&self.machine.state);
        state.last_id += 1;
        let id = state.last_id;
        let raw = abi::p2pmem_provider {
            id,
            state: abi::P2PMEM_PROVIDER_LIVE,
            numa_node: -1,
            ..raw
        };
        state.providers.insert(
            id,
            Provider {
                raw,
                used: BTreeMap::new(),
                stats: Default::default(),
            },
        );
        state.notify_all(&event(abi::P2PMEM_EVENT_PROVIDER_ADDED, id, 0));
        drop(state);
        self
    }

    /// Sets the path between a provider and a client. Default: host bridge, 6 hops.
    pub fn path(self, provider: PciAddr, client: PciAddr, class: PathClass, hops: u32) -> Self {
        lock(&self.machine.state)
            .paths
            .insert((provider, client), (class, hops));
        self
    }

    /// Opens the fake device, as `Device::open()` opens the real one.
    pub fn device(&self) -> Device {
        self.device_of(Backend::Module)
    }

    /// Opens the fake device as one of another backend: operations that the backend does not support fail.
    ///
    /// ```
    /// use p2pmem::{fake::Fake, Backend, Error, Request};
    ///
    /// let device = Fake::example().device_of(Backend::Sysfs);
    /// let error = device.alloc(&Request::new(4096))?.share().unwrap_err();
    /// assert!(matches!(error, Error::NotSupported { backend: Backend::Sysfs, .. }));
    /// # Ok::<(), p2pmem::Error>(())
    /// ```
    pub fn device_of(&self, backend: Backend) -> Device {
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let wakeup = Arc::new(wakeup);
        let file = Arc::new(Mutex::new(OpenFile::new(wakeup.clone())));
        lock(&self.machine.state).files.push(Arc::downgrade(&file));
        Device::with(Box::new(FakeDevice {
            machine: self.machine.clone(),
            file,
            wakeup,
            backend,
        }))
    }

    /// Lets the next call of any kind fail with this errno (positive).
    pub fn fail_next(&self, errno: i32) {
        lock(&self.machine.state).fail_next = Some(errno);
    }

    /// Allows exports of a provider's buffers to importers that cannot be revoked.
    pub fn allow_pinned(&self, id: u32) {
        if let Some(provider) = lock(&self.machine.state).providers.get_mut(&id) {
            provider.raw.flags |= abi::P2PMEM_PROVIDER_PINNED_EXPORTS;
        }
    }

    /// Sets the module's last message as after the refusal of a dma-buf's importer, with this reason and errno
    /// (positive). The importer's driver fails only if the test lets it fail: [`FakeNic::fail_next`].
    pub fn refuse_importer(&self, errno: i32, why: &str) {
        for file in lock(&self.machine.state).files.iter().filter_map(Weak::upgrade) {
            lock(&file).last = Some(Decision {
                text: why.to_owned(),
                error: errno,
                ..Default::default()
            });
        }
    }

    /// Sets the list of buffers and owners that root can read. The first line has the names of the columns: `function`,
    /// `size` and, at the end, `owner`. Each further line is a buffer. `None`: the program is not root.
    pub fn holders(&self, table: Option<&str>) {
        lock(&self.machine.state).holders = table.map(str::to_owned);
    }

    /// Revokes the attachment `handle` of each open device, as its exporter does, on a machine without an IOMMU: the
    /// function is stopped, and the devices with attachments of the function get events.
    pub fn revoke_attachment(&self, handle: u32) {
        let mut state = lock(&self.machine.state);
        let files: Vec<_> = state.files.iter().filter_map(Weak::upgrade).collect();
        for file in &files {
            let mut file = lock(file);
            let Some(attachment) = file.attachments.get_mut(&handle) else {
                continue;
            };
            attachment.raw.state = abi::P2PMEM_ATTACHMENT_REVOKED;
            attachment.ranges.clear();
            let provider = attachment.raw.provider;
            *state.stopped.entry(provider).or_default() += 1;
            file.queue(&event(abi::P2PMEM_EVENT_ATTACHMENT_REVOKED, provider, handle));
        }
        for file in &files {
            let mut file = lock(file);
            let stopped: Vec<_> = file
                .attachments
                .values()
                .map(|attachment| attachment.raw)
                .filter(|raw| raw.state == abi::P2PMEM_ATTACHMENT_LIVE && state.stopped.contains_key(&raw.provider))
                .collect();
            for raw in stopped {
                file.queue(&event(abi::P2PMEM_EVENT_ATTACHMENT_STOPPED, raw.provider, raw.handle));
            }
        }
    }

    /// Removes a provider: revokes its buffers, and notifies all open devices.
    pub fn remove_provider(&self, id: u32) {
        let mut state = lock(&self.machine.state);
        let Some(provider) = state.providers.remove(&id) else {
            return;
        };
        sum(&mut state.gone, &provider.stats);
        let files: Vec<_> = state.files.iter().filter_map(Weak::upgrade).collect();
        for file in files {
            let mut file = lock(&file);
            let live: Vec<u32> = file
                .buffers
                .values()
                .filter(|b| b.provider == id)
                .map(|b| b.handle)
                .collect();
            for handle in live {
                if let Some(buffer) = file.buffers.get_mut(&handle) {
                    buffer.state = abi::P2PMEM_BUFFER_GONE;
                }
                file.queue(&event(abi::P2PMEM_EVENT_BUFFER_REVOKED, id, handle));
                state.gone.revoked += 1;
            }
        }
        state.notify_all(&event(abi::P2PMEM_EVENT_PROVIDER_REMOVED, id, 0));
    }
}

#[cfg(test)]
mod tests;
