// SPDX-License-Identifier: GPL-2.0

//! Shares buffers with devices: the dma-buf exporter and the peer-memory client.

mod access;
pub(crate) mod dmabuf;
pub(crate) mod export_count;
#[cfg_attr(not(p2pmem_peer), path = "share/absent.rs")]
pub(crate) mod peer_client;
#[cfg(p2pmem_peer)]
pub(crate) mod peer_registration;
pub(crate) mod range_list;
