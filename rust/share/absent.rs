// SPDX-License-Identifier: GPL-2.0

//! The peer-memory client where no RDMA core has the interface for one: nothing is ever registered.

use kernel::{fmt, prelude::*};

/// What debugfs shows of the interface.
pub(crate) fn describe(f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str("interface none\nregistered_as off\n")
}

/// What debugfs shows of the registrations: there are none.
pub(crate) fn list(_: &mut fmt::Formatter<'_>) -> fmt::Result {
    Ok(())
}

/// Whether programs can register mapped buffers.
pub(crate) fn is_open() -> bool {
    false
}

/// No client.
pub(crate) struct ClientRegistration(());

pub(crate) fn register() -> Result<ClientRegistration> {
    Ok(ClientRegistration(()))
}
