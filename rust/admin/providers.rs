// SPDX-License-Identifier: GPL-2.0

//! configfs: `/sys/kernel/config/p2pmem/providers/<BDF>/`, the settings of own providers.
//!
//! `mkdir` makes a directory for a PCI function. The attributes say what to publish, and writing 1 to `enable` publishes
//! it. Writing 0 to `enable` and `rmdir` remove the provider. `status` has the result of the last write as text.
//!
//! C header: [`include/linux/configfs.h`](srctree/include/linux/configfs.h)
//!
//! Context: process context, may sleep. configfs holds `configfs_buffer::mutex` and, for reading,
//! `configfs_fragment::frag_sem` during `show` and `store`, and the parent's inode lock during `mkdir` and `rmdir`;
//! `ProviderDir::settings`, a mutex, is taken inside. No removal is waited for with `settings` held, and none for longer
//! than [`WAIT`].

use crate::{
    alloc::orchestrator::Orchestrator,
    ext::{
        compat::configfs_attrs,
        global,
        pci::Function,
        publisher::Publication,
        refusal::{
            refuse,
            Answer,
            Text, //
        }, //
    },
    mem::buffer::Provider,
    policy::path::PciAddr, //
};
use core::fmt::Write as _;
use kernel::{
    configfs::{AttributeOperations, Group, GroupOperations},
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    str::Formatter,
    sync::{Arc, Mutex},
};

/// The directory `providers`.
#[pin_data]
pub(crate) struct Providers {}

/// The directory of one function.
#[pin_data(PinnedDrop)]
pub(crate) struct ProviderDir {
    #[pin]
    settings: Mutex<Settings>,
}

/// The settings of a directory, and the provider that was made of them. Protected by `ProviderDir::settings`.
struct Settings {
    publication: Publication,
    /// Id of the provider that `enable` published.
    enabled: Option<u32>,
    /// The provider while it is being removed.
    removing: Option<Arc<Provider>>,
    status: Text,
}

/// Creates the directory `providers` below the subsystem.
pub(crate) fn providers() -> Result<impl PinInit<Group<Providers>, Error>> {
    let item = configfs_attrs! {
        container: Group<Providers>,
        data: Providers,
        child: ProviderDir,
        attributes: [],
    };
    Ok(Group::new(
        c"providers".try_into()?,
        item,
        try_pin_init!(Providers {}? Error),
    ))
}

#[vtable]
impl GroupOperations for Providers {
    type Child = ProviderDir;

    /// `mkdir`. Errors: `EINVAL` if `name` is no PCI address, `ENODEV` if there is no such function or the module is still
    /// being loaded.
    fn make_group(&self, name: &CStr) -> Result<impl PinInit<Group<ProviderDir>, Error>> {
        let item = configfs_attrs! {
            container: Group<ProviderDir>,
            data: ProviderDir,
            attributes: [
                bar: 0,
                offset: 1,
                size: 2,
                mode: 3,
                kernel_reserve: 4,
                enable: 5,
                status: 6,
                pinned_exports: 7,
                attach_gid: 8,
            ],
        };
        global::ready()?;
        let dir = PciAddr::parse(name.to_bytes())
            .ok_or_else(|| {
                refuse!(
                    EINVAL,
                    "a provider's directory has the name of a PCI function, such as 0000:03:00.0"
                )
            })
            .and_then(|addr| match Function::find(addr) {
                Some(_) => Ok(addr),
                None => Err(refuse!(ENODEV, "{} is not a PCI function of this machine", addr)),
            })
            .map_err(|refusal| {
                refusal.log("mkdir");
                refusal.error
            })
            .map(ProviderDir::new)?;
        Ok(Group::new(name.try_into()?, item, dir))
    }
}

/// The longest wait for the end of a removal, in ms.
const WAIT: u32 = 1_000;

impl ProviderDir {
    fn new(addr: PciAddr) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            settings <- new_mutex!(Settings {
                publication: Publication {
                    addr,
                    bar: None,
                    offset: 0,
                    size: 0,
                    kernel_reserve: None,
                    pages: true,
                    pinned_exports: false,
                    attach_gid: None,
                },
                enabled: None,
                removing: None,
                status: Text::new(fmt!("not published: write 1 to enable")),
            }),
        }? Error)
    }

    /// Runs `change` with the settings locked. An error goes to the log and into `status`.
    fn change(&self, change: impl FnOnce(&mut Settings) -> Answer) -> Result {
        let mut settings = self.settings.lock();
        change(&mut settings).map_err(|refusal| {
            refusal.log("configfs");
            settings.status = *refusal.text();
            refusal.error
        })
    }

    /// Removes the provider and waits for the end, [`WAIT`] ms at most and without `settings` held: configfs keeps the
    /// directory from being removed during a write, and a task that waits to remove the directory blocks readers of
    /// `status`.
    ///
    /// Errors: `EBUSY` (the removal goes on), `EINTR` (the task was killed; the removal goes on).
    fn disable(&self) -> Result {
        let mut waits_for = None;
        self.change(|settings| {
            waits_for = settings.disable()?;
            Ok(())
        })?;
        match waits_for {
            Some(provider) if !provider.await_end_killable(WAIT)? => self.change(|settings| settings.check_idle()),
            _ => Ok(()),
        }
    }

    /// Changes a setting that only publishing reads. Errors: `EBUSY` if the provider is published or being removed.
    fn set(&self, set: impl FnOnce(&mut Publication) -> Answer) -> Result {
        self.change(|settings| {
            settings.check_idle()?;
            if settings.enabled() {
                return Err(refuse!(
                    EBUSY,
                    "{} is published: write 0 to enable first",
                    settings.publication.addr
                ));
            }
            set(&mut settings.publication)
        })
    }
}

impl Settings {
    /// Whether the provider that `enable` published still exists and is not being removed through this directory. Updates
    /// `status` if the provider ended otherwise: the device was unbound or reset, or the system slept.
    fn enabled(&mut self) -> bool {
        if self.removing.take_if(|provider| provider.await_end_for(0)).is_some() {
            self.status = Text::new(fmt!("not published: write 1 to enable"));
        }
        let Some(id) = self.enabled else {
            return false;
        };
        let there = Orchestrator::get().is_ok_and(|o| o.is_provider(id));
        if !there {
            self.enabled = None;
            self.status = Text::new(fmt!(
                "not published any more: the device was unbound or reset, or the machine slept"
            ));
        }
        there
    }

    /// Checks that no removal is in progress. Errors: `EBUSY`; the message says what the removal waits for.
    fn check_idle(&mut self) -> Answer {
        self.enabled();
        match &self.removing {
            None => Ok(()),
            Some(provider) => Err(refuse!(
                EBUSY,
                "{} is still being removed: {}",
                self.publication.addr,
                provider.progress().as_str()
            )),
        }
    }

    /// Publishes the settings. Does nothing if they are published.
    fn enable(&mut self) -> Answer {
        if self.enabled() {
            return Ok(());
        }
        self.check_idle()?;
        let id = Orchestrator::get()?.publish(&self.publication)?;
        self.enabled = Some(id);
        self.status = Text::new(fmt!("published as provider {}", id));
        Ok(())
    }

    /// Begins to remove the provider. Returns the provider to wait for, or `None` if there is none.
    fn disable(&mut self) -> Answer<Option<Arc<Provider>>> {
        if self.enabled() {
            self.removing = Orchestrator::get()?.unpublish(self.publication.addr)?;
            self.enabled = None;
            self.status = Text::new(fmt!("not published: write 1 to enable"));
        }
        Ok(self.removing.clone())
    }

    /// Returns the text of `status`.
    fn describe(&mut self) -> Text {
        self.enabled();
        let by_others = self.enabled.and_then(|id| Orchestrator::get().ok()?.provider(id));
        match self
            .removing
            .as_ref()
            .or(by_others.as_ref().filter(|p| p.is_being_removed()))
        {
            Some(provider) => Text::new(fmt!("being removed: {}", provider.progress().as_str())),
            None => self.status,
        }
    }
}

#[pinned_drop]
impl PinnedDrop for ProviderDir {
    fn drop(self: Pin<&mut Self>) {
        // `rmdir` holds the inode lock of the parent directory. After `WAIT` the removal goes on without the directory.
        let begun = self.settings.lock().disable();
        match begun {
            Ok(Some(provider)) if !provider.await_end_for(WAIT) => dev_notice!(
                provider.function().device(),
                "p2pmem: its directory is removed, and the provider is still being removed: {}\n",
                provider.progress().as_str()
            ),
            Ok(_) => {}
            Err(refusal) => refusal.log("rmdir"),
        }
    }
}

/// Returns the written text without white space around it. Errors: `EINVAL` if the text is not UTF-8.
pub(crate) fn word(page: &[u8]) -> Answer<&str> {
    core::str::from_utf8(page)
        .map(str::trim)
        .map_err(|_| refuse!(EINVAL, "the value is not UTF-8 text"))
}

/// Parses a number, decimal or hexadecimal with 0x. Errors: `EINVAL`.
fn number(page: &[u8]) -> Answer<u64> {
    let word = word(page)?;
    let parsed = match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    parsed.map_err(|_| refuse!(EINVAL, "the value is not a number of bytes"))
}

/// Writes an attribute's value and a line feed into the page. Returns the number of bytes.
pub(crate) fn show(page: &mut [u8; PAGE_SIZE], args: kernel::fmt::Arguments<'_>) -> Result<usize> {
    let mut out = Formatter::new(page);
    out.write_fmt(args)?;
    out.write_char('\n')?;
    Ok(out.bytes_written())
}

/// Implements the attributes of a directory. For each attribute: its number, the body of `show`, and for a writable one the
/// body of `store`.
macro_rules! attributes {
    ($data:ident; $($id:literal ($dir:ident, $page:ident): $show:block $(, $text:ident: $store:block)?;)*) => {$(
        #[vtable]
        impl AttributeOperations<$id> for $data {
            type Data = $data;

            fn show($dir: &$data, $page: &mut [u8; PAGE_SIZE]) -> Result<usize> $show

            $(fn store($dir: &$data, $text: &[u8]) -> Result $store)?
        }
    )*};
}
pub(crate) use attributes;

attributes! {
    ProviderDir;
    // bar
    0 (dir, page): {
        match dir.settings.lock().publication.bar {
            Some(bar) => show(page, fmt!("{}", bar)),
            None => show(page, fmt!("auto")),
        }
    }, text: {
        dir.set(|publication| {
            publication.bar = match word(text)? {
                "auto" => None,
                _ => match number(text)? {
                    bar @ 0..=5 => Some(bar as u32),
                    other => return Err(refuse!(EINVAL, "there is no BAR {}: a number from 0 to 5, or auto", other)),
                },
            };
            Ok(())
        })
    };
    // offset
    1 (dir, page): {
        show(page, fmt!("{}", dir.settings.lock().publication.offset))
    }, text: {
        dir.set(|publication| {
            publication.offset = pages(text, "offset")?;
            Ok(())
        })
    };
    // size
    2 (dir, page): {
        show(page, fmt!("{}", dir.settings.lock().publication.size))
    }, text: {
        dir.set(|publication| {
            publication.size = pages(text, "size")?;
            Ok(())
        })
    };
    // mode
    3 (dir, page): {
        let pages = dir.settings.lock().publication.pages;
        show(page, fmt!("{}", if pages { "paged" } else { "pageless" }))
    }, text: {
        dir.set(|publication| {
            publication.pages = match word(text)? {
                "paged" => true,
                "pageless" => false,
                _ => return Err(refuse!(EINVAL, "the modes are paged and pageless")),
            };
            Ok(())
        })
    };
    // kernel_reserve
    4 (dir, page): {
        match dir.settings.lock().publication.kernel_reserve {
            Some(bytes) => show(page, fmt!("{}", bytes)),
            None => show(page, fmt!("auto")),
        }
    }, text: {
        dir.set(|publication| {
            publication.kernel_reserve = match word(text)? {
                "auto" => None,
                _ => Some(pages(text, "kernel_reserve")?),
            };
            Ok(())
        })
    };
    // enable
    5 (dir, page): {
        show(page, fmt!("{}", u32::from(dir.settings.lock().enabled())))
    }, text: {
        match word(text) {
            Ok("0") => dir.disable(),
            text => dir.change(|settings| match text? {
                "1" => settings.enable(),
                _ => Err(refuse!(EINVAL, "enable is 0 or 1")),
            }),
        }
    };
    // status
    6 (dir, page): {
        let status = dir.settings.lock().describe();
        show(page, fmt!("{}", status.as_str()))
    };
    // pinned_exports
    7 (dir, page): {
        show(page, fmt!("{}", u32::from(dir.settings.lock().publication.pinned_exports)))
    }, text: {
        dir.change(|settings| {
            let allow = match word(text)? {
                "1" => true,
                "0" => false,
                _ => return Err(refuse!(EINVAL, "pinned_exports is 0 or 1")),
            };
            settings.publication.pinned_exports = allow;
            // Takes effect at once, for providers that other drivers published too.
            Orchestrator::get()?.set_pinned_exports(settings.publication.addr, allow);
            Ok(())
        })
    };
    // attach_gid
    8 (dir, page): {
        match dir.settings.lock().publication.attach_gid {
            Some(gid) => show(page, fmt!("{}", gid)),
            None => show(page, fmt!("none")),
        }
    }, text: {
        dir.change(|settings| {
            let gid = match word(text)? {
                "none" => None,
                // The largest number is no group for the kernel.
                word => Some(word.parse().ok().filter(|&gid| gid != u32::MAX).ok_or_else(|| {
                    refuse!(EINVAL, "attach_gid is the number of a group, or none")
                })?),
            };
            settings.publication.attach_gid = gid;
            // Takes effect at once, for later attachments.
            Orchestrator::get()?.set_attach_gid(settings.publication.addr, gid);
            Ok(())
        })
    };
}

/// Parses a multiple of the page size, in bytes. `what` is the attribute's name. Errors: `EINVAL`.
fn pages(text: &[u8], what: &str) -> Answer<u64> {
    let bytes = number(text)?;
    if bytes % PAGE_SIZE as u64 == 0 {
        Ok(bytes)
    } else {
        Err(refuse!(EINVAL, "{} {} is not a whole number of pages", what, bytes))
    }
}
