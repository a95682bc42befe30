// SPDX-License-Identifier: GPL-2.0

//! mmap() of `/dev/p2pmem`: maps a buffer of the file, or a new buffer at offset 0.
//!
//! Context: process context with the mmap lock held for writing.

use crate::{
    alloc::request::AllocRequest,
    ext::{
        abi::consts,
        refusal::{
            refuse,
            Answer, //
        },
        trace,
        vma::NewMapping, //
    },
    mem::{
        buffer::Buffer,
        memory::Clearing, //
    },
    policy::placement::Named,
    uapi::file::File, //
};
use kernel::{
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::Arc,
};

impl File {
    /// Maps the buffer of this file that is at the area's offset, or at offset 0 a new buffer, which ends with its last mapping.
    ///
    /// Errors: `EINVAL` (a private mapping, no buffer at the offset, beyond its end), `ENODEV` (the buffer is revoked), and at
    /// offset 0 those of an allocation.
    pub(super) fn map(&self, area: NewMapping<'_, Buffer>) -> Answer {
        if !area.is_shared() {
            return Err(refuse!(
                EINVAL,
                "device memory cannot be mapped privately: use MAP_SHARED"
            ));
        }
        let (page, len) = (area.page_offset(), area.len());
        if page == 0 {
            let request = AllocRequest {
                size: len,
                align: PAGE_SIZE as u64,
                snapshot: self.orchestrator.snapshot(&[])?,
                named: Named::Any,
                strategy: consts::STRATEGY_NEAREST,
                max_class: None,
                parts: 0,
                own: self.rules(),
                // Clearing takes long, and readers of /proc/PID/maps wait for the mmap lock.
                clearing: Clearing::AtFirstUse,
            };
            let (holder, _) = self.allocate_one("mmap", &request)?;
            // The holder is dropped, and the mapping keeps the buffer.
            return attach(area, holder.buffer(), holder.page_offset);
        }
        let found = self.handles.lock().at_page(page);
        let Some(buffer) = found else {
            return Err(refuse!(
                EINVAL,
                "no buffer of this file is at offset {:#x}",
                page << PAGE_SHIFT
            ));
        };
        let offset = (page - buffer.page_offset) << PAGE_SHIFT;
        if offset >= buffer.size || len > buffer.size - offset {
            return Err(refuse!(
                EINVAL,
                "{} bytes at offset {} reach past the end of a buffer of {} bytes",
                len,
                offset,
                buffer.size
            ));
        }
        attach(area, &buffer, page)
    }
}

/// Makes an area a mapping of a buffer.
fn attach(area: NewMapping<'_, Buffer>, buffer: &Arc<Buffer>, page: u64) -> Answer {
    buffer.map().map_err(|_| buffer.revoked())?;
    buffer.provider.mapped();
    trace::map(|| {
        let offset = (page - buffer.page_offset) << PAGE_SHIFT;
        (buffer.about(), offset, area.len())
    });
    area.attach(buffer.clone(), page, buffer.combine, buffer.provider.has_pages());
    Ok(())
}
