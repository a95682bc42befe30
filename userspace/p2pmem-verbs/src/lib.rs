// SPDX-License-Identifier: MIT OR Apache-2.0

//! Safe wrappers of libibverbs, for programs that transfer data by RDMA from and to host memory and buffers of p2pmem.
//!
//! | types | contents |
//! |---|---|
//! | [`Nic`], [`nics()`], [`Limits`], [`Port`] | NICs, their limits, and their port |
//! | [`Domain`] | protection domains |
//! | [`Span`] | memory that devices access at any time: host memory, a mapped file, or a mapped buffer of p2pmem |
//! | [`HostMemory`], [`BufferMemory`], [`Access`] | memory that is registered with a NIC, and what a NIC may do with it |
//! | [`Completions`], [`Completion`], [`Failure`] | completion queues, by polling or by events |
//! | [`QueuePair`], [`Address`], [`Link`], [`Retries`] | reliable connections |
//! | [`Request`], [`Work`], [`Segment`], [`Remote`] | work requests of a connection |
//! | [`Datagrams`], [`AddressHandle`], [`ROUTE_BYTES`] | unreliable datagrams |
//!
//! Each object keeps the objects alive that it was created from. The library libibverbs is loaded by the first call that
//! needs it, so a program also starts where it is not installed. Verbs return the error of the operating system, as
//! their manual pages list them.
//!
//! # Why posting is safe
//!
//! Work requests contain plain addresses and keys, and posting them is a safe function. The NIC checks the addresses in a
//! work request, local and remote, against its keys, and a key is valid only while its registration exists. So the worst
//! result of a wrong address is a completion with an error. Registered memory is never accessed by references
//! ([`Span`]), so the NIC may change it at any time. Registered memory can be dropped while requests are in flight: the
//! deregistration ends the NIC's access, and the requests fail.
//!
//! # Example
//!
//! One side of a connection sends 4 KiB of host memory. The other side posts a receive before this.
//!
//! ```no_run
//! use std::time::Duration;
//! use p2pmem_verbs::{
//!     Access, Address, Completions, Domain, HostMemory, Nic, QueuePair, Request, Retries, Segment, Span, Work,
//! };
//!
//! # fn exchange(own: Address) -> std::io::Result<Address> { Ok(own) }
//! let nic = Nic::open("mlx5_0")?.ok_or(std::io::ErrorKind::NotFound)?;
//! let domain = Domain::new(nic.clone())?;
//! let completions = Completions::new(&nic, 2)?;
//! let queue = QueuePair::new(&domain, &completions, 1, 1)?;
//! // The NIC only reads this memory, and the other side has no access.
//! let memory = HostMemory::register(&domain, &Span::host(4096)?, Access::LOCAL_READ)?;
//!
//! let own = queue.address(0)?;
//! let other = exchange(own)?; // by TCP, for example
//! queue.connect(&own, 0, &other, Retries { timeout: 16, retries: 7 })?;
//!
//! memory.span().write(0, b"hello");
//! memory.span().flush();
//! let local = Segment { address: memory.span().address(), bytes: 4096, lkey: memory.keys().0 };
//! completions.arm()?;
//! queue.post(&[Request { id: 1, local, work: Work::Send, signaled: true }])?;
//! completions.wait(Duration::from_secs(10))?;
//! let mut done = Vec::new();
//! completions.poll(&mut done)?;
//! assert!(done.iter().all(|completion| completion.failure.is_none()));
//! # Ok::<(), std::io::Error>(())
//! ```

mod address;
mod sys;

pub use address::{Address, Link};
pub use p2pmem::Access;
pub use sys::{
    nics, AddressHandle, BufferMemory, Completion, Completions, Datagrams, Domain, Failure, HostMemory, Limits, Nic,
    Port, QueuePair, Remote, Request, Retries, Segment, Span, Work, ROUTE_BYTES,
};
