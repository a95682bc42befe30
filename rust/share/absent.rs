// SPDX-License-Identifier: GPL-2.0

//! The peer-memory client for an RDMA core without the peer-memory interface: programs register dma-bufs only.
//!
//! This file stands in for `share::peer_client` if the build found no such interface. Context: any.

use kernel::{fmt, prelude::*};

/// Writes debugfs' `peer_memory`.
pub(crate) fn describe(f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("interface none\nregistered_as off\n")
}

/// Writes debugfs' `registrations`: none.
pub(crate) fn list(_: &mut fmt::Formatter<'_>) -> fmt::Result {
    Ok(())
}

/// Whether `ibv_reg_mr()` accepts mapped buffers.
pub(crate) fn is_open() -> bool {
    false
}

/// No client is registered.
pub(crate) struct ClientRegistration(());

/// Registers nothing and cannot fail.
pub(crate) fn register() -> Result<ClientRegistration> {
    Ok(ClientRegistration(()))
}
