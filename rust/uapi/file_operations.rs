// SPDX-License-Identifier: GPL-2.0

//! The file operations of `/dev/p2pmem`.
//!
//! Context: process context, may sleep. The core holds no lock, except the mmap lock, for writing, during `mmap`.
//!
//! C header: [`include/linux/fs.h`](srctree/include/linux/fs.h) (`struct file_operations`)

use crate::{
    ext::{
        abi,
        chrdev::{
            self,
            READABLE, //
        },
        vma::{
            AddressSpace,
            NewMapping, //
        }, //
    },
    mem::buffer::Buffer,
    uapi::file::File, //
};
use core::mem::size_of;
use kernel::{
    fs::File as KernelFile,
    prelude::*,
    sync::{poll::PollTable, Arc, ArcBorrow},
    uaccess::{UserPtr, UserSliceWriter},
};

/// The file operations, which open files refer to.
static TABLE: chrdev::Table<File> = chrdev::Table::new();

impl chrdev::Operations for File {
    type Object = Buffer;

    fn table() -> &'static chrdev::Table<Self> {
        &TABLE
    }

    fn open() -> Result<Arc<Self>> {
        File::new()
    }

    fn address_space(&self) -> &AddressSpace<Buffer> {
        self.orchestrator.space()
    }

    fn close(this: Arc<Self>) {
        this.orchestrator.remove_file(this.id);
        this.attachments.end();
    }

    fn ioctl(this: ArcBorrow<'_, Self>, cmd: u32, arg: UserPtr) -> Result {
        File::ioctl(&this, cmd, arg)
    }

    fn read(this: ArcBorrow<'_, Self>, mut out: UserSliceWriter, nonblock: bool) -> Result<usize> {
        let size = size_of::<abi::Event>();
        if out.len() < size {
            return Err(EINVAL);
        }
        let mut done = 0;
        while out.len() >= size {
            let mut events = this.events.queue.lock();
            while events.is_empty() {
                if done > 0 {
                    return Ok(done);
                }
                if nonblock {
                    return Err(EAGAIN);
                }
                if this.events.readable.wait_interruptible(&mut events) {
                    return Err(ERESTARTSYS);
                }
            }
            let event = events.pop();
            drop(events);
            if let Some(event) = event {
                if let Err(error) = out.write(&event) {
                    // The event goes back into the queue, for the next read.
                    this.events.queue.lock().push_front(event);
                    this.events.wake();
                    return if done > 0 { Ok(done) } else { Err(error) };
                }
                done += size;
            }
        }
        Ok(done)
    }

    fn poll(this: ArcBorrow<'_, Self>, file: &KernelFile, table: PollTable<'_>) -> u32 {
        let polled = &this.events.polled;
        if polled.as_ref().is_none() {
            if let Ok(new) = KBox::pin_init(kernel::new_poll_condvar!("p2pmem_poll"), GFP_KERNEL_ACCOUNT) {
                // Of two first polls, one sets it.
                polled.populate(new);
            }
        }
        let Some(waiting) = polled.as_ref() else {
            // Without memory for the wait queue, or while another first poll sets it, poll reports the file as readable, and a read
            // returns the state.
            return READABLE;
        };
        // Allocates memory, so no lock is held that an event takes.
        table.register_wait(file, waiting);
        if this.events.queue.lock().is_empty() {
            0
        } else {
            READABLE
        }
    }

    fn mmap(this: ArcBorrow<'_, Self>, area: NewMapping<'_, Buffer>) -> Result {
        this.map(area).map_err(|refusal| {
            this.refused("mmap", &refusal);
            refusal.error
        })
    }
}
