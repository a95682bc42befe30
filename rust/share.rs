// SPDX-License-Identifier: GPL-2.0

//! Shares memory with devices: the dma-buf exporter, the peer-memory client, and attachments of providers' functions to
//! dma-bufs.

mod access;
#[cfg(p2pmem_attach)]
pub(crate) mod attachment;
pub(crate) mod dmabuf;
pub(crate) mod export_count;
#[cfg_attr(not(p2pmem_peer), path = "share/absent.rs")]
pub(crate) mod peer_client;
#[cfg(p2pmem_peer)]
pub(crate) mod peer_registration;
pub(crate) mod range_list;
