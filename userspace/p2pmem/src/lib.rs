// SPDX-License-Identifier: MIT OR Apache-2.0

//! PCI peer-to-peer memory for programs: memory of accelerators and drives, allocated near the devices that use it, so
//! that drives and NICs move data to and from it without a bounce buffer in host memory.
//!
//! - [`Device`] is an open `/dev/p2pmem`, or another [`Backend`] if the module is not loaded: it lists providers,
//!   reports paths, allocates, and explains decisions.
//! - [`Client`] is a device that does DMA, named by a PCI address, `nvme0`, or `mlx5_0`.
//! - [`Request`] describes an allocation; [`Buffer`] is the allocation, and [`Mapping`] gives the program access to it.
//! - [`Stripe`] is several buffers in several providers that serve one request.
//! - [`Buffer::share`] and [`Device::import`] pass a buffer to other processes.
//! - [`DmaBuf`] is a buffer exported for other drivers, or a dma-buf of another driver; [`Registration`] is a buffer or
//!   a dma-buf registered with an RDMA NIC.
//! - [`Attachment`] lets the PCI function of a provider do DMA to a dma-buf, such as the doorbell page of a NIC.
//! - [`admin`] publishes and unpublishes devices' memory, [`rules`] manages the administrator's rules.
//! - [`inventory`] lists devices with memory and the sources of that memory, without the module.
//! - [`WhatIf`] decides which memory a request would get if all of it were published, with or without the module.
//! - `rdma` (feature `verbs`) opens NICs by name and transfers data with them.
//! - `fake` (feature `fake`) is a device without the kernel module, for tests.
//!
//! Sizes, offsets and lengths are bytes. Errors carry the errno of the failed call: [`Error::errno`].
//!
//! This example reads a file from a drive directly into a buffer near the drive:
//!
//! ```no_run
//! use p2pmem::{open_direct, Client, Device, Request};
//!
//! let device = Device::open()?;
//! let drive = Client::resolve("nvme0")?;
//! let buffer = device.alloc(&Request::new(16 << 20).near([drive]))?;
//! println!("{}", device.explain_last()?.lines().join("\n"));
//!
//! let memory = buffer.map()?;
//! let file = open_direct("/mnt/nvme0/samples")?;
//! let bytes = memory.read_from(&file, 0, 0..memory.len())?;
//! println!("{bytes} bytes went from the drive to provider {}", buffer.provider());
//! # Ok::<(), p2pmem::Error>(())
//! ```

mod addr;
pub mod admin;
mod alloc;
mod attachment;
mod backend;
mod buffer;
mod device;
mod direct;
mod error;
mod events;
mod explain;
mod export;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod file_rules;
mod foreign;
mod full;
pub mod inventory;
mod mapping;
mod open;
mod origin;
mod pci;
#[cfg(feature = "verbs")]
pub mod rdma;
mod register;
mod request;
pub mod rules;
mod standalone;
mod stripe;
mod sys;
mod topology;
mod types;
mod what_if;

pub use addr::PciAddr;
pub use attachment::{AttachOptions, Attachment, AttachmentState, DmaRange};
pub use backend::{Backend, Capability};
pub use buffer::Buffer;
pub use device::{Device, DEFAULT_PATH};
pub use direct::{open_direct, DirectOptions};
pub use error::{Error, ErrorKind, Operation, Result};
pub use events::{Event, EventKind, Events};
pub use explain::{DecidingRule, Explanation, Verdict, VerdictCode};
pub use export::{DmaBuf, ExportOptions};
pub use file_rules::FileRule;
pub use full::{FullProvider, Holder};
pub use mapping::Mapping;
pub use open::DeviceOptions;
pub use p2pmem_sys as abi;
pub use pci::{devices_in, Client, PciDevice};
pub use register::{Access, RegisterOptions, Registration, RemoteMemory};
pub use request::{Request, Strategy};
pub use stripe::Stripe;
pub use sys::verbs::{Pd, ProtectionDomain};
pub use topology::{path_between, path_between_in, Port, PortKind, Walk};
pub use types::{
    human_size, short_size, BufferInfo, BufferState, Info, Path, PathClass, Provider, ProviderKind, ProviderState,
    RegistrationMethod, Stats,
};
pub use what_if::{CandidateDevice, WhatIf};
