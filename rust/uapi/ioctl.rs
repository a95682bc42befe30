// SPDX-License-Identifier: GPL-2.0

//! The ioctls of `/dev/p2pmem`, one method of [`File`] each.
//!
//! C header: `include/uapi/linux/p2pmem.h`
//!
//! Context: process context, may sleep. No lock is held while an argument is copied.

use crate::{
    alloc::{
        orchestrator::visible_bus_addr,
        request::AllocRequest, //
    },
    ext::{
        abi::{
            self,
            consts, //
        },
        log,
        refusal::{
            refuse,
            Answer,
            Text, //
        }, //
    },
    mem::buffer::Buffer,
    policy::ranges::Range,
    share::{
        dmabuf::Export,
        peer_client,
        range_list, //
    },
    uapi::{
        argument::{
            array,
            no_flags,
            no_reserved,
            structures,
            Undo, //
        },
        attachments::Attachments,
        file::File,
        file_rules,
        request::{
            self,
            ClientNames, //
        }, //
    }, //
};
use core::mem::{offset_of, size_of};
use kernel::{
    ffi,
    fs::{file::FileDescriptorReservation, File as KernelFile},
    ioctl::{_IOC_DIR, _IOC_SIZE, _IOR, _IOW, _IOWR},
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{aref::ARef, Arc},
    transmute::{AsBytes, FromBytes},
    uaccess::{UserPtr, UserSlice},
    uapi,
};

/// Declares the ioctls, one a line: name, direction, number, structure, last essential field, and method of [`File`].
///
/// A structure of the caller that ends before the end of the last essential field is refused. The method returns what undoes the
/// ioctl if the structure cannot be copied back ([`Undo`]).
macro_rules! ioctls {
    ($($name:ident = $direction:ident($number:literal, $structure:ident), $last:ident => $method:ident;)*) => {
        /// The ioctl numbers without the size: direction, type and number.
        mod calls {
            use super::*;

            $(pub(super) const $name: u32 = sizeless($direction::<abi::$structure>(abi::MAGIC, $number));)*
        }

        impl File {
            /// Runs one ioctl. `cmd` has the number of the ioctl and the size of the caller's structure, and `arg` its address.
            ///
            /// Errors: `ENOTTY` (no such ioctl), `EFAULT`, `EINVAL`, `E2BIG` (the sizes, see [`argument`](super::argument)),
            /// and those of the ioctl.
            pub(super) fn ioctl(&self, cmd: u32, arg: UserPtr) -> Result {
                let (what, answer) = match sizeless(cmd) {
                    $(calls::$name => {
                        let least = offset_of!(abi::$structure, $last) + size_of_field(|a: &abi::$structure| &a.$last);
                        (stringify!($name), exchange(cmd, arg, least, |a| self.$method(a)))
                    })*
                    _ => return Err(ENOTTY),
                };
                answer.map_err(|refusal| {
                    self.refused(what, &refusal);
                    refusal.error
                })
            }
        }

        /// The ioctl numbers with the size of this version's structures, in the order of the table.
        #[cfg(CONFIG_KUNIT)]
        const NUMBERS: &[u32] = &[$($direction::<abi::$structure>(abi::MAGIC, $number)),*];
    };
}

ioctls! {
    INFO = _IOR(0x00, Info), page_size => info;
    LIST = _IOWR(0x01, List), provider_size => list;
    PATHS = _IOWR(0x02, Paths), path_size => paths;
    ALLOC = _IOWR(0x03, Alloc), handle => alloc;
    FREE = _IOW(0x04, Free), handle => free;
    BUFFER = _IOWR(0x05, Buffer), provider => buffer;
    EXPLAIN = _IOWR(0x06, Explain), flags => explain;
    STATS = _IOWR(0x07, Stats), provider => stats;
    EXPORT_DMABUF = _IOWR(0x08, Export), range_size => export;
    RULES = _IOW(0x09, Rules), rule_size => set_rules;
    IMPORT = _IOWR(0x0a, Import), handle => import;
    STRIPE = _IOWR(0x0b, Stripe), part_size => stripe;
    ATTACH_DMABUF = _IOWR(0x0c, Attach), range_size => attach;
    DETACH_DMABUF = _IOW(0x0d, Detach), handle => detach;
    ATTACHMENT = _IOWR(0x0e, Attachment), range_size => attachment;
}

/// Clears the size in an ioctl number: the size of the caller's structure differs between versions of the ABI.
const fn sizeless(cmd: u32) -> u32 {
    cmd & !(uapi::_IOC_SIZEMASK << uapi::_IOC_SIZESHIFT)
}

/// Returns the size of the field that a function returns.
const fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

/// Copies the structure from user space, calls `method`, and copies the structure back. If that fails, what `method` returned
/// undoes the ioctl. The direction in `cmd` says which of the copies the ioctl has.
///
/// Errors: `EINVAL` (the caller's structure is shorter than `least` bytes), `E2BIG`, `EFAULT`, and those of `method`.
fn exchange<T: FromBytes + AsBytes + Default, U: Undo>(
    cmd: u32,
    arg: UserPtr,
    least: usize,
    method: impl FnOnce(&mut T) -> Answer<U>,
) -> Answer {
    let size = _IOC_SIZE(cmd);
    if size < least {
        return Err(refuse!(
            EINVAL,
            "the argument has {} bytes, at least {} are needed",
            size,
            least
        ));
    }
    let (mut reader, mut writer) = structures(arg, 1, size);
    let mut value = if _IOC_DIR(cmd) & uapi::_IOC_WRITE != 0 {
        reader.read()?
    } else {
        T::default()
    };
    let undo = method(&mut value)?;
    if _IOC_DIR(cmd) & uapi::_IOC_READ != 0 {
        writer.write(&value)?;
    }
    undo.keep();
    Ok(())
}

impl File {
    /// Describes the module and its totals.
    fn info(&self, info: &mut abi::Info) -> Answer {
        let providers = self.orchestrator.providers()?;
        *info = abi::Info {
            abi_version: consts::ABI_VERSION,
            abi_compatible: consts::ABI_COMPATIBLE,
            page_size: PAGE_SIZE as u32,
            features: consts::FEATURES | Attachments::FEATURE | consts::feature_peer_memory(peer_client::is_open()),
            providers: providers.len() as u32,
            generation: self.orchestrator.generation(),
            ..Default::default()
        };
        for provider in &providers {
            let (buffers, free) = provider.totals();
            info.buffers += buffers;
            info.size += provider.size;
            info.free += free;
        }
        for (to, from) in info.version.iter_mut().zip(crate::VERSION.as_bytes()) {
            *to = *from as ffi::c_char;
        }
        Ok(())
    }

    /// Lists the providers. `count` returns how many there are, which may be more than the array can hold.
    fn list(&self, list: &mut abi::List) -> Answer {
        no_flags(list.flags, 0)?;
        no_reserved(list.reserved)?;
        let providers = self.orchestrator.providers()?;
        let (_, mut out) = array(list.providers, list.count, list.provider_size)?;
        for provider in providers.iter().take(list.count as usize) {
            out.write(&provider.describe())?;
        }
        list.count = providers.len() as u32;
        Ok(())
    }

    /// Lists the paths between all providers and the given clients.
    fn paths(&self, paths: &mut abi::Paths) -> Answer {
        no_flags(paths.flags, consts::PATHS_RESCAN)?;
        no_reserved(paths.reserved)?;
        if paths.nr_clients == 0 {
            return Err(refuse!(EINVAL, "a path needs a client: nr_clients is 0"));
        }
        let names = ClientNames::read(paths.clients, paths.nr_clients, paths.client_size)?;
        if paths.flags & consts::PATHS_RESCAN != 0 {
            // The cache serves all files.
            if !log::capable_admin() {
                return Err(refuse!(EPERM, "P2PMEM_PATHS_RESCAN takes CAP_SYS_ADMIN"));
            }
            self.orchestrator.refresh_topology()?;
        }
        let clients = names.as_slice();
        let snapshot = self.orchestrator.snapshot(clients)?;
        let (providers, all) = (&snapshot.parts.providers, &snapshot.parts.paths);
        let (_, mut out) = array(paths.paths, paths.nr_paths, paths.path_size)?;
        for (i, path) in all.iter().take(paths.nr_paths as usize).enumerate() {
            out.write(&abi::Path {
                provider: providers[i / clients.len()].id,
                client: (i % clients.len()) as u32,
                class: path.class.as_raw(),
                flags: if path.acs_redirect {
                    consts::PATH_ACS_REDIRECT
                } else {
                    0
                } | if path.bus_addr { consts::PATH_BUS_ADDR } else { 0 },
                hops: path.hops,
                distance: path.kernel_distance(),
                bandwidth: path.bandwidth,
                numa_distance: path.numa_distance,
                bridge: path.bridge.map(Into::into).unwrap_or_default(),
            })?;
        }
        paths.nr_paths = all.len() as u32;
        Ok(())
    }

    /// Allocates a buffer and gives it a handle.
    fn alloc(&self, alloc: &mut abi::Alloc) -> Answer<impl Undo + '_> {
        no_reserved(alloc.reserved)?;
        let request = self.request(&alloc.req)?;
        if request.strategy == consts::STRATEGY_STRIPE {
            return Err(refuse!(
                EINVAL,
                "a stripe is a buffer in each of several providers: allocate it by P2PMEM_IOC_STRIPE"
            ));
        }
        let (holder, class) = self.allocate_one("ALLOC", &request)?;
        alloc.provider = holder.provider.id;
        alloc.size = holder.size;
        alloc.mmap_offset = holder.page_offset << PAGE_SHIFT;
        alloc.bar_offset = holder.bar_offset;
        alloc.class = class;
        let new = self.insert(holder)?;
        alloc.handle = *new;
        Ok(new)
    }

    /// Allocates a stripe and gives its parts handles.
    fn stripe(&self, arg: &mut abi::Stripe) -> Answer<KVec<impl Undo + '_>> {
        no_flags(arg.flags, 0)?;
        no_reserved(arg.reserved)?;
        let request = self.request(&arg.req)?;
        if request.strategy != consts::STRATEGY_STRIPE {
            return Err(refuse!(
                EINVAL,
                "a stripe takes P2PMEM_STRATEGY_STRIPE, not strategy {}",
                request.strategy
            ));
        }
        let capacity = arg.nr_parts as usize;
        if capacity < request.parts.max(1) {
            return Err(refuse!(
                EINVAL,
                "nr_parts is {}, and {} parts are requested",
                capacity,
                request.parts.max(1)
            ));
        }
        let handles = self.allocate("STRIPE", &request, capacity, |decision| {
            let (_, mut out) = array(arg.parts, arg.nr_parts, arg.part_size)?;
            let mut handles = KVec::with_capacity(decision.picks().len(), GFP_KERNEL_ACCOUNT)?;
            let mut offset = 0;
            for (holder, class) in decision.take() {
                let part = abi::Part {
                    provider: holder.provider.id,
                    offset,
                    size: holder.size,
                    mmap_offset: holder.page_offset << PAGE_SHIFT,
                    bar_offset: holder.bar_offset,
                    class,
                    ..Default::default()
                };
                offset += holder.size;
                let new = self.insert(holder)?;
                out.write(&abi::Part { handle: *new, ..part })?;
                handles.push(new, GFP_KERNEL_ACCOUNT)?;
            }
            Ok(handles)
        })?;
        arg.nr_parts = handles.len() as u32;
        arg.size = request.size;
        Ok(handles)
    }

    /// Gives the buffer of a dma-buf, which has to span the whole buffer, a handle of this file.
    fn import(&self, arg: &mut abi::Import) -> Answer<impl Undo + '_> {
        no_flags(arg.flags, 0)?;
        let holder = Export::import(arg.fd, self.id)?;
        arg.provider = holder.provider.id;
        arg.size = holder.size;
        arg.mmap_offset = holder.page_offset << PAGE_SHIFT;
        arg.bar_offset = holder.bar_offset;
        let new = self.insert(holder)?;
        arg.handle = *new;
        Ok(new)
    }

    /// Frees a handle.
    fn free(&self, free: &mut abi::Free) -> Answer {
        no_flags(free.flags, 0)?;
        self.free_handle(free.handle)
    }

    /// Describes a buffer.
    fn buffer(&self, arg: &mut abi::Buffer) -> Answer {
        no_flags(arg.flags, 0)?;
        let buffer = self.find_buffer(arg.handle)?;
        let (state, mappings) = buffer.status();
        arg.provider = buffer.provider.id;
        arg.size = buffer.size;
        arg.mmap_offset = buffer.page_offset << PAGE_SHIFT;
        arg.bar_offset = buffer.bar_offset;
        arg.bus_addr = visible_bus_addr(&buffer);
        arg.state = state.as_raw();
        arg.mappings = mappings;
        (arg.exports, arg.attachments) = buffer.exports();
        arg.handles = buffer.handles();
        Ok(())
    }

    /// Exports a buffer as a dma-buf.
    fn export(&self, arg: &mut abi::Export) -> Answer<NewDescriptor> {
        no_flags(arg.flags, consts::EXPORT_PINNED | consts::EXPORT_MAPPED)?;
        no_reserved(arg.reserved)?;
        let ranges = request::ranges(arg.ranges, arg.nr_ranges, arg.range_size)?;
        let pinned = arg.flags & consts::EXPORT_PINNED != 0;
        let (buffer, list) = if arg.flags & consts::EXPORT_MAPPED != 0 {
            if arg.handle != 0 {
                return Err(refuse!(EINVAL, "P2PMEM_EXPORT_MAPPED takes addresses, not a handle"));
            }
            self.mapped(&ranges)?
        } else {
            let buffer = self.find_buffer(arg.handle)?;
            range_list::check(&ranges, buffer.size)?;
            let mut list = KVec::new();
            for &range in &ranges {
                range_list::append(&mut list, range)?;
            }
            (buffer, list)
        };
        let counted = self.exports.take()?;
        let slot = FileDescriptorReservation::get_unused_fd_flags(kernel::fs::file::flags::O_CLOEXEC)
            .map_err(|e| refuse!(e, "no file descriptor is left for the dma-buf"))?;
        let made = Export::new(buffer, list, pinned, self.id, counted)?;
        arg.fd = slot.reserved_fd() as i32;
        Ok(NewDescriptor(slot, made.into_file()))
    }

    /// Returns the one buffer that the calling process has mapped at all these address ranges, and the mapped ranges of it.
    ///
    /// Errors: `ENOENT` (no buffer at an address), `EACCES` (a read-only mapping), `EXDEV` (several buffers), `EINVAL` (no range).
    fn mapped(&self, ranges: &[Range]) -> Answer<(Arc<Buffer>, KVec<Range>)> {
        let mut found: Option<Arc<Buffer>> = None;
        let mut list = KVec::new();
        for at in 0..ranges.len() {
            let mut left = range_list::check_address(ranges, at)?;
            while left.size > 0 {
                let Some(part) = self.orchestrator.space().mapped_at(left.offset, left.size) else {
                    // Not logged: the preload shim tries this for all memory that a program registers.
                    let refusal = refuse!(ENOENT, "range {}: no p2pmem buffer is mapped at {:#x}", at, left.offset);
                    return Err(refusal.unlogged());
                };
                if !part.may_write {
                    return Err(refuse!(
                        EACCES,
                        "range {}: the mapping at {:#x} is of a file that was opened for reading only",
                        at,
                        left.offset
                    ));
                }
                let buffer = found.get_or_insert_with(|| part.object.clone());
                if buffer.id != part.object.id {
                    return Err(refuse!(
                        EXDEV,
                        "range {}: another buffer is mapped at {:#x} than at the first range",
                        at,
                        left.offset
                    ));
                }
                let offset = part.offset - (buffer.page_offset << PAGE_SHIFT);
                let size = part.size;
                range_list::append(&mut list, Range { offset, size })?;
                left.offset += size;
                left.size -= size;
            }
        }
        let none = || refuse!(EINVAL, "a dma-buf needs a range: nr_ranges is 0");
        Ok((found.ok_or_else(none)?, list))
    }

    /// Explains the decision on a request, or the last one of this file. Nothing is allocated.
    fn explain(&self, explain: &mut abi::Explain) -> Answer {
        no_flags(explain.flags, consts::EXPLAIN_LAST)?;
        let explanation = if explain.flags & consts::EXPLAIN_LAST != 0 {
            self.last_explanation()?
        } else {
            let request = self.request(&explain.req)?;
            let silent = explain.nr_verdicts == 0 && explain.text_len == 0;
            let (chosen, explanation) = self.decide(&request, silent)?;
            let Some(explanation) = explanation else {
                explain.nr_verdicts = request.snapshot.providers.len() as u32;
                explain.text_len = Text::LONGEST;
                explain.error = 0;
                explain.chosen = chosen;
                return Ok(());
            };
            explanation
        };
        let (_, mut out) = array(explain.verdicts, explain.nr_verdicts, explain.verdict_size)?;
        for verdict in explanation.verdicts.iter().take(explain.nr_verdicts as usize) {
            out.write(verdict)?;
        }
        explain.nr_verdicts = explanation.verdicts.len() as u32;
        let text = explanation.text.as_str().as_bytes();
        explain.text_len = match (explain.text_len as usize).checked_sub(1) {
            Some(capacity) => {
                let cut = text.get(..capacity).unwrap_or(text);
                let at = UserPtr::from_addr(explain.text as usize);
                let mut out = UserSlice::new(at, explain.text_len as usize).writer();
                out.write_slice(cut)?;
                out.write(&0u8)?;
                text.len() as u32 + 1
            }
            None => Text::LONGEST,
        };
        explain.error = explanation.error as u32;
        explain.chosen = explanation.chosen;
        Ok(())
    }

    /// Checks a request and converts it.
    fn request(&self, req: &abi::Request) -> Answer<AllocRequest> {
        request::check(req, self.rules(), &self.orchestrator)
    }

    /// Replaces the file's own rules. An empty array removes them.
    fn set_rules(&self, arg: &mut abi::Rules) -> Answer {
        no_flags(arg.flags, 0)?;
        no_reserved(arg.reserved)?;
        self.replace_rules(file_rules::read(arg, &self.orchestrator)?);
        Ok(())
    }

    /// Attaches the function of a provider to a dma-buf.
    fn attach(&self, arg: &mut abi::Attach) -> Answer<impl Undo + '_> {
        self.attachments.attach(&self.handles, &self.events, arg)
    }

    /// Closes the handle of an attachment.
    fn detach(&self, arg: &mut abi::Detach) -> Answer {
        no_flags(arg.flags, 0)?;
        self.attachments.detach(&self.handles, arg.handle)
    }

    /// Describes an attachment.
    fn attachment(&self, arg: &mut abi::Attachment) -> Answer {
        self.attachments.describe(arg)
    }

    /// Returns the counters of one provider, or the sums over all of them for provider 0.
    fn stats(&self, stats: &mut abi::Stats) -> Answer {
        no_flags(stats.flags, 0)?;
        let id = stats.provider;
        *stats = abi::Stats {
            provider: id,
            ..Default::default()
        };
        self.orchestrator.stats(id, stats)
    }
}

/// The file descriptor reserved for a dma-buf, and the dma-buf. Dropping them releases both.
struct NewDescriptor(FileDescriptorReservation, ARef<KernelFile>);

impl Undo for NewDescriptor {
    fn keep(self) {
        self.0.fd_install(self.1);
    }
}

#[kunit_tests(p2pmem_ioctl)]
mod tests {
    use super::*;
    use kernel::ioctl::{_IOC_NR, _IOC_TYPE};

    #[test]
    fn ioctl_numbers_are_consecutive() {
        for (at, number) in NUMBERS.iter().enumerate() {
            assert_eq!(_IOC_TYPE(*number), abi::MAGIC);
            assert_eq!(_IOC_NR(*number) as usize, at);
        }
    }
}
