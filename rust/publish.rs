// SPDX-License-Identifier: GPL-2.0

//! Publishes memory: own BARs, adopted pools, memory that drivers register, and the bus events that begin and end
//! providers.

pub(crate) mod adopted;
pub(crate) mod bar;
pub(crate) mod events;
