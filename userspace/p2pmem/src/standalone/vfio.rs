// SPDX-License-Identifier: MIT OR Apache-2.0

//! BARs of functions that are bound to vfio-pci. vfio-pci has no allocator, and only one program can open a function,
//! so this code allocates ranges of the BARs.
//!
//! A function is open while the program holds memory of the function: buffers, mappings, dma-bufs, registrations. When
//! the function is closed, the kernel revokes all its dma-bufs.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::slots::Slots;
use super::source::{Found, Piece, Place, Refusal, Source};
use crate::addr::PciAddr;
use crate::backend::Backend;
use crate::error::{errno_text, Error, Result};
use crate::inventory::{memory_device_at, vfio_state, Bar, Inventory, MemoryDevice, VfioState};
use crate::pci::{addresses_in, driver_of, folder_of};
use crate::sys::vfio::{Failure, Function, Iommu, Nodes};
use crate::sys::{may_use, Exported, Region};
use crate::topology::no_function;

/// The calls on an open function.
pub(super) trait OpenFunction: Send + Sync {
    fn map(&self, bar: u8, offset: u64, len: usize) -> io::Result<Region>;
    fn export(&self, bar: u8, offset: u64, len: u64) -> io::Result<OwnedFd>;
    /// Returns whether a dma-buf has users other than this descriptor.
    fn is_in_use(&self, dmabuf: &OwnedFd) -> bool;
}

impl OpenFunction for Function {
    fn map(&self, bar: u8, offset: u64, len: usize) -> io::Result<Region> {
        Function::map(self, bar, offset, len)
    }

    fn export(&self, bar: u8, offset: u64, len: u64) -> io::Result<OwnedFd> {
        Function::export(self, bar, offset, len)
    }

    fn is_in_use(&self, dmabuf: &OwnedFd) -> bool {
        // If the file cannot be read, the dma-buf counts as in use.
        let text = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", dmabuf.as_raw_fd()));
        let count = text.ok().as_deref().and_then(references);
        count != Some(1)
    }
}

/// Returns the number of references to a dma-buf, from its file in `fdinfo`: descriptors of all processes,
/// and importers.
fn references(fdinfo: &str) -> Option<u64> {
    let count = fdinfo.lines().find_map(|line| line.strip_prefix("count:"))?;
    count.trim().parse().ok()
}

/// Opens the function that has a PCI address.
pub(super) type Opener =
    Box<dyn Fn(&Nodes, PciAddr) -> std::result::Result<Box<dyn OpenFunction>, Failure> + Send + Sync>;

/// The functions of a machine that are bound to vfio-pci.
pub(super) struct VfioSource {
    root: PathBuf,
    /// BARs that the program selected.
    bars: Vec<(PciAddr, u8)>,
    opener: Opener,
    open: Arc<OpenFunctions>,
}

/// The open functions of a source. Functions are opened and closed with the mutex locked: while one thread closes a
/// function, no other thread tries to open it.
type OpenFunctions = Mutex<BTreeMap<PciAddr, Weak<Held>>>;

/// An open function, and the used ranges of its BARs.
struct Held {
    function: Box<dyn OpenFunction>,
    /// The used ranges of each BAR. The value of a range has the library's own descriptors of its dma-bufs.
    bars: Mutex<BTreeMap<u8, Slots<Vec<OwnedFd>>>>,
}

/// A reference to an open function. The last reference closes the function.
struct HeldRef {
    /// None only while the reference is dropped.
    held: Option<Arc<Held>>,
    open: Arc<OpenFunctions>,
}

impl Deref for HeldRef {
    type Target = Held;

    fn deref(&self) -> &Held {
        self.held.as_ref().expect("a reference that is not dropped")
    }
}

impl Drop for HeldRef {
    fn drop(&mut self) {
        let mut open = lock(&self.open);
        self.held = None;
        open.retain(|_, held| held.strong_count() > 0);
    }
}

/// Returns the value of `key` in a cache of values that are in use. If there is none, creates the value.
fn shared<K: Ord + Clone, T, E>(
    cache: &Mutex<BTreeMap<K, Weak<T>>>,
    key: &K,
    create: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<Arc<T>, E> {
    let mut cache = lock(cache);
    if let Some(value) = cache.get(key).and_then(Weak::upgrade) {
        return Ok(value);
    }
    let value = Arc::new(create()?);
    cache.insert(key.clone(), Arc::downgrade(&value));
    Ok(value)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VfioSource {
    /// Creates the source of the machine whose file system is at `root`. `bars` are the BARs to use instead of the
    /// largest BAR for memory.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if no function is bound to vfio-pci; [`Error::Open`] if the program may not open any of
    /// them; [`Error::Client`] or [`Error::Request`] if one of `bars` does not exist.
    pub(super) fn new(root: &Path, bars: &[(PciAddr, u8)]) -> Result<Self> {
        // The functions of an IOMMU group must share an IOMMU context. The callers of the opener, and drops of
        // functions, hold the lock of the open functions.
        let iommus = Mutex::default();
        let opener: Opener = Box::new(move |nodes, addr| {
            let iommu = shared(&iommus, nodes.iommu(), || Iommu::open(nodes))?;
            let function = Function::open(nodes, iommu, &addr.to_string())?;
            Ok(Box::new(function))
        });
        Self::with(root, bars, opener)
    }

    pub(super) fn with(root: &Path, bars: &[(PciAddr, u8)], opener: Opener) -> Result<Self> {
        let source = Self {
            root: root.to_owned(),
            bars: bars.iter().copied().collect::<BTreeSet<_>>().into_iter().collect(),
            opener,
            open: Arc::default(),
        };
        for (addr, bar) in bars {
            source.check(*addr, *bar)?;
        }
        let mut denied = None;
        for found in source.survey()? {
            match source.may_open(found.place.addr) {
                Ok(()) => return Ok(source),
                Err(error) => denied = Some(error),
            }
        }
        Err(match denied {
            Some(denied) => denied,
            None => source.why_none()?,
        })
    }

    fn sys(&self) -> PathBuf {
        self.root.join("sys")
    }

    /// Fails unless a BAR that the program selected can be used.
    fn check(&self, addr: PciAddr, bar: u8) -> Result<()> {
        let memory_device = memory_device_at(&self.root, addr).ok_or_else(|| no_function(addr, &addr.to_string()))?;
        if let Some(why) = self.obstacle(&memory_device) {
            return Err(why);
        }
        if memory_device.bars.iter().all(|other| other.index != bar) {
            let indices: Vec<_> = memory_device.bars.iter().map(|bar| bar.index.to_string()).collect();
            return Err(Error::Request(format!(
                "BAR {bar} of {addr}, whose memory BARs are {}",
                indices.join(", ")
            )));
        }
        Ok(())
    }

    /// Returns what the use of a device needs; none if the device can be used.
    fn obstacle(&self, memory_device: &MemoryDevice) -> Option<Error> {
        let addr = memory_device.device.addr;
        let useless = |why: String| Error::Unavailable {
            backend: Backend::Vfio,
            why,
            remedy: "use Linux 6.19 or later, and a device with a memory BAR",
        };
        Some(match vfio_state(&self.root, memory_device) {
            VfioState::Bound { .. } => return None,
            VfioState::Unbound => unavailable(match &memory_device.device.driver {
                Some(driver) => format!("{addr} is bound to the driver {driver}, not to vfio-pci"),
                None => format!("{addr} is not bound to vfio-pci"),
            }),
            VfioState::NoIommu => no_iommu(format!("{addr} is in no IOMMU group, so vfio-pci cannot bind to it")),
            VfioState::NoBar => useless(format!("{addr} has no memory BAR")),
            VfioState::OldKernel => useless("the kernel is older than 6.19".into()),
        })
    }

    /// Fails unless the program may open the device nodes of a function.
    fn may_open(&self, addr: PciAddr) -> Result<()> {
        let nodes = nodes(&self.root, addr)?;
        let (Nodes::Device { node, iommufd: other } | Nodes::Group { node, container: other }) = nodes;
        [node, other]
            .into_iter()
            .try_for_each(|path| may_use(&path).map_err(|error| Error::Open { path, error }))
    }

    /// Returns the reason why no function can be used: the obstacle of the device that is most likely to be meant.
    fn why_none(&self) -> Result<Error> {
        let inventory = Inventory::read_in(&self.root, None)?;
        let mut memory_devices: Vec<_> = inventory
            .memory_devices
            .iter()
            .filter_map(|l| Some((l, l.memory_bar()?)))
            .collect();
        memory_devices
            .sort_by_key(|(memory_device, bar)| (memory_device.device.driver.is_some(), std::cmp::Reverse(bar.size)));
        Ok(match memory_devices.first() {
            Some((memory_device, _)) => self
                .obstacle(memory_device)
                .unwrap_or_else(|| unavailable("no device is bound to vfio-pci")),
            None if inventory.iommu => unavailable("no device has a 64-bit prefetchable BAR"),
            None => no_iommu("no device has a 64-bit prefetchable BAR, and no IOMMU is active"),
        })
    }

    /// Returns the function, and opens it if it is not open.
    fn open(&self, addr: PciAddr) -> Result<HeldRef> {
        let held = shared(&self.open, &addr, || {
            let nodes = nodes(&self.root, addr)?;
            let function = (self.opener)(&nodes, addr).map_err(|failure| self.explain(addr, failure))?;
            Ok(Held {
                function,
                bars: Mutex::default(),
            })
        })?;
        Ok(HeldRef {
            held: Some(held),
            open: self.open.clone(),
        })
    }

    /// Returns the result of [`Held::usage`]; none if the function is not open.
    fn usage(&self, addr: PciAddr, bar: u8) -> Option<(u64, u64, u64)> {
        let open = lock(&self.open);
        // The reference is dropped before the lock is released, so that it cannot close the function without the lock.
        let held = open.get(&addr)?.upgrade()?;
        held.usage(bar)
    }

    /// Returns the error for a failed step of opening a function.
    fn explain(&self, addr: PciAddr, failure: Failure) -> Error {
        let text = |error: &io::Error| error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
        let is_denied = |error: &io::Error| error.raw_os_error() == Some(libc::EPERM);
        let others = others_in_group(&self.sys(), addr);
        match failure {
            Failure::Node(path, error) => Error::Open { path, error },
            // iommufd reports a group with devices of other drivers as EPERM.
            Failure::Iommu(error) if is_denied(&error) && others.is_empty() => Error::Unavailable {
                backend: Backend::Vfio,
                why: format!("VFIO does not allow the use of the IOMMU of {addr}: {}", text(&error)),
                remedy: "enable interrupt remapping in the firmware; if all programs with access to the device are trusted, set \
                         allow_unsafe_interrupts=1 of the module iommufd or vfio_iommu_type1; if another program uses a \
                         device of the IOMMU group, end that program",
            },
            Failure::Iommu(error) if !is_denied(&error) => Error::Unavailable {
                backend: Backend::Vfio,
                why: format!("VFIO cannot use the IOMMU of {addr}: {}", text(&error)),
                remedy: "modprobe vfio_iommu_type1; see the kernel log: dmesg",
            },
            Failure::NotViable | Failure::Iommu(_) => Error::Unavailable {
                backend: Backend::Vfio,
                why: format!(
                    "the IOMMU group of {addr} has devices of other drivers: {}",
                    others.join(", ")
                ),
                remedy: "bind all devices of the group to vfio-pci, or unbind them from their drivers",
            },
            Failure::Call(name, error) => Error::Unavailable {
                backend: Backend::Vfio,
                why: format!("{name} of {addr} failed: {}", text(&error)),
                remedy: "see the kernel log: dmesg",
            },
        }
    }

    /// Returns the BARs of a function that the library uses.
    fn bars_of<'a>(&self, memory_device: &'a MemoryDevice) -> Vec<&'a Bar> {
        let named: Vec<_> = self
            .bars
            .iter()
            .filter(|(addr, _)| *addr == memory_device.device.addr)
            .filter_map(|(_, bar)| memory_device.bars.iter().find(|other| other.index == *bar))
            .collect();
        if named.is_empty() {
            memory_device
                .memory_bar()
                .filter(|_| memory_device.has_memory_bar())
                .into_iter()
                .collect()
        } else {
            named
        }
    }
}

fn unavailable(why: impl Into<String>) -> Error {
    Error::Unavailable {
        backend: Backend::Vfio,
        why: why.into(),
        remedy: "bind a device with memory to vfio-pci: modprobe vfio-pci; echo vfio-pci > \
                 /sys/bus/pci/devices/ADDRESS/driver_override; echo ADDRESS > /sys/bus/pci/drivers_probe",
    }
}

fn no_iommu(why: impl Into<String>) -> Error {
    Error::Unavailable {
        backend: Backend::Vfio,
        why: why.into(),
        remedy: "enable the IOMMU: VT-d or AMD-Vi in the firmware, and intel_iommu=on on the kernel's command line",
    }
}

/// Returns the device nodes of a function: its own node if the kernel has it and iommufd, else the node of its IOMMU
/// group.
fn nodes(root: &Path, addr: PciAddr) -> Result<Nodes> {
    let folder = folder_of(&root.join("sys"), addr);
    let iommufd = root.join("dev/iommu");
    let own = folder
        .join("vfio-dev")
        .read_dir()
        .into_iter()
        .flatten()
        .flatten()
        .next();
    if let Some(own) = own.filter(|_| iommufd.exists()) {
        let node = root.join("dev/vfio/devices").join(own.file_name());
        if node.exists() {
            return Ok(Nodes::Device { node, iommufd });
        }
    }
    let group = std::fs::read_link(folder.join("iommu_group")).ok();
    let group = group.as_deref().and_then(Path::file_name);
    let group = group.ok_or_else(|| no_iommu(format!("{addr} is in no IOMMU group")))?;
    Ok(Nodes::Group {
        node: root.join("dev/vfio").join(group),
        container: root.join("dev/vfio/vfio"),
    })
}

/// Returns the functions that make an IOMMU group unusable, with their drivers: VFIO does not allow these drivers.
fn others_in_group(sys: &Path, addr: PciAddr) -> Vec<String> {
    let devices = folder_of(sys, addr).join("iommu_group/devices");
    let mut names: Vec<_> = devices
        .read_dir()
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let driver = driver_of(&entry.path())
                .filter(|driver| !["vfio-pci", "pci-stub", "pcieport"].contains(&driver.as_str()))?;
            Some(format!("{} ({driver})", entry.file_name().to_string_lossy()))
        })
        .collect();
    names.sort();
    names
}

impl Source for VfioSource {
    fn backend(&self) -> Backend {
        Backend::Vfio
    }

    fn root(&self) -> &Path {
        &self.root
    }

    fn survey(&self) -> Result<Vec<Found>> {
        let sys = self.sys();
        let mut all = Vec::new();
        for addr in addresses_in(&sys)? {
            if driver_of(&folder_of(&sys, addr)).as_deref() != Some("vfio-pci") {
                continue;
            }
            let Some(memory_device) =
                memory_device_at(&self.root, addr).filter(|memory_device| self.obstacle(memory_device).is_none())
            else {
                continue;
            };
            for bar in self.bars_of(&memory_device) {
                let usage = self.usage(addr, bar.index);
                let (free, largest, pinned) = usage.unwrap_or((bar.size, bar.size, 0));
                all.push(Found {
                    place: Place {
                        addr,
                        bar: Some(bar.index),
                    },
                    size: bar.size,
                    free,
                    largest,
                    pinned,
                    device: memory_device.device.clone(),
                });
            }
        }
        Ok(all)
    }

    fn take(&self, place: Place, len: u64, align: u64) -> std::result::Result<Arc<dyn Piece>, Refusal> {
        let bar = place.bar.ok_or(Refusal::Full)?;
        let memory_device = memory_device_at(&self.root, place.addr);
        let size = memory_device
            .and_then(|memory_device| Some(memory_device.bars.iter().find(|other| other.index == bar)?.size));
        let held = self.open(place.addr).map_err(Refusal::Unusable)?;
        let start = held.take(bar, size.ok_or(Refusal::Full)?, len, align)?;
        Ok(Arc::new(Extent {
            held,
            driver: folder_of(&self.sys(), place.addr),
            bar,
            start,
            len,
            mapped: Mutex::default(),
        }))
    }
}

impl Held {
    /// Returns free bytes, the size of the largest free range, and freed bytes that are still in use; none before the
    /// first allocation in the BAR.
    fn usage(&self, bar: u8) -> Option<(u64, u64, u64)> {
        let mut bars = lock(&self.bars);
        let slots = bars.get_mut(&bar)?;
        self.sweep(slots);
        let (free, largest) = slots.free();
        Some((free, largest, slots.pinned()))
    }

    /// Closes the library's own descriptors of dma-bufs that are not in use any more.
    fn forget_unused(&self, dmabufs: &mut Vec<OwnedFd>) {
        dmabufs.retain(|dmabuf| self.function.is_in_use(dmabuf));
    }

    /// Makes the freed ranges available whose dma-bufs are not in use any more.
    fn sweep(&self, slots: &mut Slots<Vec<OwnedFd>>) {
        slots.sweep(|dmabufs| {
            self.forget_unused(dmabufs);
            !dmabufs.is_empty()
        });
    }

    fn take(&self, bar: u8, size: u64, len: u64, align: u64) -> std::result::Result<u64, Refusal> {
        let mut bars = lock(&self.bars);
        let slots = bars.entry(bar).or_insert_with(|| Slots::new(size));
        self.sweep(slots);
        slots.take(len, align).ok_or(Refusal::Full)
    }
}

/// An allocated range of a BAR. The range is freed after its last buffer, mapping and dma-buf is dropped.
struct Extent {
    held: HeldRef,
    /// The function's folder in sysfs.
    driver: PathBuf,
    bar: u8,
    start: u64,
    len: u64,
    mapped: Mutex<Vec<Weak<Region>>>,
}

impl Drop for Extent {
    fn drop(&mut self) {
        let mut bars = lock(&self.held.bars);
        if let Some(slots) = bars.get_mut(&self.bar) {
            slots.free_slot(self.start);
            self.held.sweep(slots);
        }
    }
}

impl Piece for Extent {
    fn bar_offset(&self) -> Option<u64> {
        Some(self.start)
    }

    fn is_live(&self) -> bool {
        driver_of(&self.driver).as_deref() == Some("vfio-pci")
    }

    fn mappings(&self) -> u32 {
        let mut mapped = lock(&self.mapped);
        mapped.retain(|region| region.strong_count() > 0);
        u32::try_from(mapped.len()).unwrap_or(u32::MAX)
    }

    fn exports(&self) -> u32 {
        let mut bars = lock(&self.held.bars);
        let dmabufs = bars.get_mut(&self.bar).and_then(|slots| slots.value(self.start));
        let in_use = dmabufs.map_or(0, |dmabufs| {
            self.held.forget_unused(dmabufs);
            dmabufs.len()
        });
        u32::try_from(in_use).unwrap_or(u32::MAX)
    }

    fn map(self: Arc<Self>) -> io::Result<Arc<Region>> {
        let len = usize::try_from(self.len).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let region = self.held.function.map(self.bar, self.start, len)?;
        let region = Arc::new(region.holding(self.clone()));
        lock(&self.mapped).push(Arc::downgrade(&region));
        Ok(region)
    }

    fn export(self: Arc<Self>, offset: u64, len: u64) -> io::Result<Exported> {
        let fd = match self.held.function.export(self.bar, self.start + offset, len) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
                return Err(io::Error::other(Error::Unavailable {
                    backend: Backend::Vfio,
                    why: "vfio-pci of this kernel does not export dma-bufs".into(),
                    remedy: "use Linux 6.19 or later with CONFIG_VFIO_PCI_DMABUF",
                }));
            }
            result => result?,
        };
        let own = fd.try_clone()?;
        let function = self.driver.file_name().and_then(|name| PciAddr::parse(name.to_str()?));
        if let Some(dmabufs) = lock(&self.held.bars)
            .get_mut(&self.bar)
            .and_then(|slots| slots.value(self.start))
        {
            self.held.forget_unused(dmabufs);
            dmabufs.push(own);
        }
        Ok(Exported {
            fd,
            function,
            hold: Some(self),
        })
    }
}

#[cfg(test)]
mod tests;
