// SPDX-License-Identifier: GPL-2.0

//! What there is of the peer-memory client where no RDMA core has the interface for one: nothing is ever registered.

use kernel::{fmt, prelude::*};

/// There is none.
pub(crate) enum Registration {}

impl Registration {
    pub(crate) fn revoke(&self) {
        match *self {}
    }

    pub(crate) fn await_idle(&self) {
        match *self {}
    }
}

/// All registrations: none.
pub(crate) struct Peers(());

impl Peers {
    pub(crate) fn new() -> impl PinInit<Self> {
        Self(())
    }

    pub(crate) fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interface none\nregistered_as off\n")
    }

    pub(crate) fn list(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

/// Whether programs can register mapped buffers.
pub(crate) fn is_open() -> bool {
    false
}

/// No door.
pub(crate) struct Door(());

pub(crate) fn open() -> Result<Door> {
    Ok(Door(()))
}
