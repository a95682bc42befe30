// SPDX-License-Identifier: GPL-2.0

//! Own and registered providers: publishing a range of a BAR for the administrator, or for the device's driver.
//!
//! C header: [`include/linux/pci-p2pdma.h`](srctree/include/linux/pci-p2pdma.h)
//!
//! Context: process context, may sleep, called from configfs or from `p2pmem_register_provider()`. `driver::with_bound`
//! holds the device's lock in the driver, which keeps the device bound meanwhile; the registry is taken inside.

use crate::{
    alloc::orchestrator::{
        Orchestrator,
        PAGE, //
    },
    ext::{
        driver,
        p2pdma::{
            Backing,
            BarRange, //
        },
        pci::{
            driver_name,
            Function, //
        },
        pool,
        publisher::{
            Publication,
            RevokeCallback, //
        },
        refusal::{
            refuse,
            Answer, //
        }, //
    },
    mem::{
        buffer::Provider,
        provider::{
            removal::RemovalKind,
            ProviderConfig, //
        }, //
    },
    policy::path::PciAddr, //
};
use kernel::{prelude::*, sync::Arc};

/// Alignment of ranges that get struct pages, in bytes (`SUBSECTION_SIZE`). `memremap_pages()` warns about other ranges.
const SECTION: u64 = 2 << 20;

impl Orchestrator {
    /// Publishes a BAR of a device that is bound to the p2pmem driver. Returns the id of the provider.
    ///
    /// Errors: `ENODEV` (no such function, or not bound to p2pmem), `EINVAL` (the settings do not fit the BAR), `EBUSY`
    /// (the range or pool is in use, the provider is being removed, the function is being reset or has failed, or the system is about
    /// to sleep), `EEXIST` (a provider already), `ENOMEM`.
    pub(crate) fn publish(&self, wanted: &Publication) -> Answer<u32> {
        let addr = wanted.addr;
        driver::with_bound(addr, |device| self.publish_bound(wanted, device, None)).unwrap_or_else(|| {
            Err(match Function::find(addr) {
                None => refuse!(ENODEV, "{} is not a PCI function of this machine", addr),
                Some(_) => refuse!(
                    ENODEV,
                    "{} is not bound to the p2pmem driver: set its driver_override to p2pmem, unbind it, and probe it again",
                    addr
                ),
            })
        })
    }

    /// Begins to remove the own provider of `addr`, and offers its pool to other drivers no more. Returns the provider to
    /// wait for, or `None` if there is none.
    ///
    /// Errors: `ENODEV` (not bound to the p2pmem driver any more), `ENOMEM` (the provider stays).
    pub(crate) fn unpublish(self: &Arc<Self>, addr: PciAddr) -> Answer<Option<Arc<Provider>>> {
        let function = driver::with_bound(addr, |device| {
            let function = Function::of(device.device());
            pool::withdraw(device.device());
            function
        });
        let function = function.ok_or_else(|| refuse!(ENODEV, "{} is no longer bound to the p2pmem driver", addr))?;
        Ok(self.begin(&function, RemovalKind::Retire)?)
    }

    /// Publishes a range of a bound device with or without struct pages, after checking the settings. `publisher` is that of the
    /// driver that registers the memory, if one does. `auto` for the BAR is the largest prefetchable 64-bit BAR; `auto` for the
    /// kernel reserve is a rule's reserve, else 1/16 of the range and at most 16 MiB. Errors: as for [`Self::publish`], without `ENODEV`.
    pub(crate) fn publish_bound(
        &self,
        wanted: &Publication,
        mut device: driver::Published<'_>,
        publisher: Option<Arc<RevokeCallback>>,
    ) -> Answer<u32> {
        let function = Function::of(device.device());
        let addr = wanted.addr;
        if let Some(provider) = self.find(&function) {
            return Err(if provider.is_being_removed() {
                refuse!(
                    EBUSY,
                    "{} is still being removed: {}",
                    addr,
                    provider.progress().as_str()
                )
            } else {
                refuse!(EEXIST, "{} is a provider already", addr)
            });
        }
        if let Some(why) = device.unready() {
            return Err(refuse!(EBUSY, "{} {}", addr, why));
        }
        let (bar, start, len) = match wanted.bar {
            Some(bar) => match function.bar(bar) {
                Some((start, len)) => (bar, start, len),
                None => return Err(refuse!(EINVAL, "{} has no memory BAR {}", addr, bar)),
            },
            None => (0..6)
                .filter(|&bar| function.is_64bit(bar) && function.prefetchable(bar))
                .filter_map(|bar| function.bar(bar).map(|(start, len)| (bar, start, len)))
                .max_by_key(|&(bar, _, len)| (len, core::cmp::Reverse(bar)))
                .ok_or_else(|| {
                    refuse!(
                        EINVAL,
                        "{} has no prefetchable 64-bit BAR: name the one to publish",
                        addr
                    )
                })?,
        };
        let size = if wanted.size == 0 {
            len.saturating_sub(wanted.offset)
        } else {
            wanted.size
        };
        if wanted.offset % PAGE != 0 || size % PAGE != 0 {
            return Err(refuse!(
                EINVAL,
                "offset {} and size {} are not whole pages",
                wanted.offset,
                size
            ));
        }
        if size == 0 || wanted.offset.checked_add(size).is_none_or(|end| end > len) {
            return Err(refuse!(
                EINVAL,
                "{} bytes at offset {} do not fit into BAR {} of {}, which has {}",
                size,
                wanted.offset,
                bar,
                addr,
                len
            ));
        }
        let reserve = match wanted.pages {
            true => self.reserve_of(wanted, &function, start + wanted.offset, size)?,
            false if wanted.kernel_reserve.is_some_and(|reserve| reserve > 0) => {
                return Err(refuse!(
                    EINVAL,
                    "without pages {} has no pool of the kernel's that a kernel_reserve could be in: set it to 0 or auto",
                    addr
                ));
            }
            false => 0,
        };
        device.claim(bar).map_err(|e| match e {
            e if e == EBUSY => refuse!(e, "BAR {} of {} is busy: see /proc/iomem", bar, addr),
            e => refuse!(e, "BAR {} of {} cannot be claimed", bar, addr),
        })?;
        let (id, pages) = self.identity(&function)?;
        let range = BarRange {
            bar,
            offset: wanted.offset,
            size,
        };
        let backing = match wanted.pages {
            true => take(&device, range, reserve, addr),
            false => device
                .window(range, self.space(), pages.of(bar, wanted.offset))
                .map_err(|e| match e {
                    e if e == EBUSY => refuse!(
                        e,
                        "{} was given pages since it was bound: unbind it to publish it without",
                        addr
                    ),
                    e => refuse!(e, "BAR {} of {} cannot be mapped", bar, addr),
                }),
        };
        let made = backing.and_then(|backing| {
            let parts = ProviderConfig {
                id,
                pages,
                region: self.region(&function, backing.size())?,
                ledger: self.rules().clone(),
                place: (bar, wanted.offset),
                kernel_reserve: reserve,
                function: function.clone(),
                driver: driver_name(device.device()),
                pinned_exports: wanted.pinned_exports,
                attach_gid: wanted.attach_gid,
                publisher,
            };
            let provider = Provider::own(parts, backing)?;
            self.add(&provider)?;
            dev_info!(
                provider.function().device(),
                "p2pmem: published {} bytes of BAR {} at offset {}{}\n",
                provider.size,
                bar,
                wanted.offset,
                if provider.has_pages() { "" } else { ", without pages" }
            );
            Ok(provider.id)
        });
        if reserve == 0 || made.is_err() {
            // Without a kernel reserve the pool, if there is one, has nothing for other drivers.
            pool::withdraw(device.device());
        }
        made
    }

    /// Checks the settings of a range of `size` bytes at the address `at` that is to get struct pages, and returns its kernel
    /// reserve.
    fn reserve_of(&self, wanted: &Publication, function: &Function, at: u64, size: u64) -> Answer<u64> {
        if at % SECTION != 0 || size % SECTION != 0 {
            return Err(refuse!(
                EINVAL,
                "the kernel makes struct pages for pieces of {} bytes alone: {} bytes at offset {} of the BAR of {} are none; do without pages",
                SECTION,
                size,
                wanted.offset,
                wanted.addr
            ));
        }
        let by_rule = self.rules().kernel_reserve(&function.function_id());
        let reserve = wanted
            .kernel_reserve
            .or(by_rule.map(|bytes| bytes.next_multiple_of(PAGE)))
            .unwrap_or_else(|| (size / 16).min(16 << 20) / PAGE * PAGE);
        if reserve % PAGE != 0 || reserve >= size {
            return Err(refuse!(
                EINVAL,
                "a kernel_reserve of {} is not a whole number of pages below the {} published",
                reserve,
                size
            ));
        }
        Ok(reserve)
    }
}

/// Gives a range struct pages, publishes it to other drivers, and takes all but `reserve` bytes from the pool.
///
/// Errors: `EBUSY` (another range has pages, or another driver took memory of the pool meanwhile), `ENOMEM`.
fn take(device: &driver::Published<'_>, range: BarRange, reserve: u64, addr: PciAddr) -> Answer<Backing> {
    let pool = device.add_range(range).map_err(|e| match e {
        e if e == EBUSY => refuse!(
            e,
            "another range of {} was published since it was bound: unbind it to change that, or another driver has the range",
            addr
        ),
        e => refuse!(e, "the kernel does not make pages for BAR {} of {}", range.bar, addr),
    })?;
    let chunk = pool.take(range.size - reserve).ok_or_else(|| {
        refuse!(
            EBUSY,
            "other drivers use memory of {} that p2pmem would manage: raise kernel_reserve",
            addr
        )
    })?;
    if chunk.place() != (range.bar, range.offset) {
        return Err(refuse!(EBUSY, "other drivers use the first bytes of {}'s pool", addr));
    }
    Ok(chunk)
}
