// SPDX-License-Identifier: GPL-2.0

//! Publishing: own BARs, adopted memory, memory of drivers that register it, and the events by which providers come and go.

pub(crate) mod adopted;
pub(crate) mod bar;
pub(crate) mod events;
