// SPDX-License-Identifier: MIT OR Apache-2.0

//! The device, buffer and provider of a mapping's or a registration's memory.

use crate::device::Device;
use crate::types::human_size;

/// The source of memory, which a buffer and its mappings share.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) device: Device,
    pub(crate) handle: u32,
    pub(crate) provider: u32,
    /// Size of the buffer in bytes.
    pub(crate) size: u64,
}

impl Origin {
    /// Describes buffer and provider, for an error's text.
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
