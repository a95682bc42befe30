// SPDX-License-Identifier: MIT OR Apache-2.0

//! Where memory comes from: the device, buffer and provider of a buffer and of its mappings.

use crate::device::Device;
use crate::types::human_size;

/// Where memory comes from: what a buffer and its mappings have in common.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) device: Device,
    pub(crate) handle: u32,
    pub(crate) provider: u32,
    /// Of the buffer, in bytes.
    pub(crate) size: u64,
}

impl Origin {
    /// Buffer and provider in words, for an error.
    pub(crate) fn describe(&self) -> String {
        let providers = self.device.providers().unwrap_or_default();
        let provider = providers.iter().find(|p| p.id == self.provider);
        format!(
            "buffer {} ({} in {})",
            self.handle,
            human_size(self.size),
            provider.map_or_else(
                || format!("provider {}, which was removed", self.provider),
                |p| format!("provider {}, {}", p.id, p.place())
            )
        )
    }
}
