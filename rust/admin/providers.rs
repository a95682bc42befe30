// SPDX-License-Identifier: GPL-2.0

//! configfs: `/sys/kernel/config/p2pmem/providers/<BDF>/`, the administrator's door to own providers.
//!
//! `mkdir` makes a directory for a function, its attributes say what to publish, and writing 1 to `enable` publishes
//! it. `status` holds the outcome as a sentence. Removing the directory takes the provider back.

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

struct Settings {
    wanted: Publication,
    /// Number of the provider that was made of it.
    enabled: Option<u32>,
    /// The provider, while it is being taken back.
    leaving: Option<Arc<Provider>>,
    status: Text,
}

/// The directory `providers` below the subsystem.
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
                None => Err(refuse!(ENODEV, "{} is no PCI function of this machine", addr)),
            })
            .map_err(|refusal| {
                refusal.log("mkdir");
                refusal.error
            })
            .map(ProviderDir::new)?;
        Ok(Group::new(name.try_into()?, item, dir))
    }
}

/// How long whoever takes a provider back waits for the end of that, ms.
const WAIT: u32 = 1_000;

impl ProviderDir {
    fn new(addr: PciAddr) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            settings <- new_mutex!(Settings {
                wanted: Publication {
                    addr,
                    bar: None,
                    offset: 0,
                    size: 0,
                    kernel_reserve: None,
                    pages: true,
                    pinned_exports: false,
                },
                enabled: None,
                leaving: None,
                status: Text::new(fmt!("not published: write 1 to enable")),
            }),
        }? Error)
    }

    /// Changes the settings, or says in `status` why not.
    fn change(&self, change: impl FnOnce(&mut Settings) -> Answer) -> Result {
        let mut settings = self.settings.lock();
        change(&mut settings).map_err(|refusal| {
            refusal.log("configfs");
            settings.status = *refusal.text();
            refusal.error
        })
    }

    /// Takes the provider back, and waits for the end of that without a lock of ours, [`WAIT`] at most: configfs keeps the
    /// directory from being removed meanwhile, and whoever removes it keeps others from reading `status`.
    ///
    /// Errors: `EBUSY` (it is still being taken back), `EINTR` (the task was killed).
    fn disable(&self) -> Result {
        let mut waits_for = None;
        self.change(|settings| {
            waits_for = settings.disable()?;
            Ok(())
        })?;
        match waits_for {
            Some(provider) if !provider.await_end_killable(WAIT)? => self.change(|settings| settings.await_nothing()),
            _ => Ok(()),
        }
    }

    /// Changes what is only looked at when the provider is made.
    fn set(&self, set: impl FnOnce(&mut Publication) -> Answer) -> Result {
        self.change(|settings| {
            settings.await_nothing()?;
            if settings.enabled() {
                return Err(refuse!(
                    EBUSY,
                    "{} is published: write 0 to enable first",
                    settings.wanted.addr
                ));
            }
            set(&mut settings.wanted)
        })
    }
}

impl Settings {
    /// Whether what was published is still there, and is not being taken back: the device may have been unbound since.
    fn enabled(&mut self) -> bool {
        if self.leaving.take_if(|provider| provider.await_end_for(0)).is_some() {
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

    /// Refuses what has to wait until the provider was taken back.
    fn await_nothing(&mut self) -> Answer {
        self.enabled();
        match &self.leaving {
            None => Ok(()),
            Some(provider) => Err(refuse!(
                EBUSY,
                "{} is still being taken back: {}",
                self.wanted.addr,
                provider.progress().as_str()
            )),
        }
    }

    fn enable(&mut self) -> Answer {
        if self.enabled() {
            return Ok(());
        }
        self.await_nothing()?;
        let id = Orchestrator::get()?.publish(&self.wanted)?;
        self.enabled = Some(id);
        self.status = Text::new(fmt!("published as provider {}", id));
        Ok(())
    }

    /// Begins to take the provider back, where there is one, and returns what to wait for.
    fn disable(&mut self) -> Answer<Option<Arc<Provider>>> {
        if self.enabled() {
            self.leaving = Orchestrator::get()?.unpublish(self.wanted.addr)?;
            self.enabled = None;
            self.status = Text::new(fmt!("not published: write 1 to enable"));
        }
        Ok(self.leaving.clone())
    }

    /// What there is to say of the provider.
    fn describe(&mut self) -> Text {
        self.enabled();
        let by_others = self.enabled.and_then(|id| Orchestrator::get().ok()?.provider(id));
        match self
            .leaving
            .as_ref()
            .or(by_others.as_ref().filter(|p| p.is_being_removed()))
        {
            Some(provider) => Text::new(fmt!("being taken back: {}", provider.progress().as_str())),
            None => self.status,
        }
    }
}

#[pinned_drop]
impl PinnedDrop for ProviderDir {
    fn drop(self: Pin<&mut Self>) {
        // `rmdir` holds the lock of the parent directory: what takes longer goes on without it.
        let begun = self.settings.lock().disable();
        match begun {
            Ok(Some(provider)) if !provider.await_end_for(WAIT) => pr_notice!(
                "{}: its directory is gone, and it is still being taken back: {}\n",
                provider.addr,
                provider.progress().as_str()
            ),
            Ok(_) => {}
            Err(refusal) => refusal.log("rmdir"),
        }
    }
}

/// What was written, without the white space around it.
pub(crate) fn word(page: &[u8]) -> Answer<&str> {
    core::str::from_utf8(page)
        .map(str::trim)
        .map_err(|_| refuse!(EINVAL, "what was written is no text"))
}

/// A number, decimal or hexadecimal with 0x.
fn number(page: &[u8]) -> Answer<u64> {
    let word = word(page)?;
    let parsed = match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    parsed.map_err(|_| refuse!(EINVAL, "what was written is no number of bytes"))
}

/// Writes an attribute's value and a line feed.
pub(crate) fn show(page: &mut [u8; PAGE_SIZE], args: kernel::fmt::Arguments<'_>) -> Result<usize> {
    let mut out = Formatter::new(page);
    out.write_fmt(args)?;
    out.write_char('\n')?;
    Ok(out.bytes_written())
}

/// Declares the attributes of a directory: their number, how they are shown, and how they are stored.
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
        match dir.settings.lock().wanted.bar {
            Some(bar) => show(page, fmt!("{}", bar)),
            None => show(page, fmt!("auto")),
        }
    }, text: {
        dir.set(|wanted| {
            wanted.bar = match word(text)? {
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
        show(page, fmt!("{}", dir.settings.lock().wanted.offset))
    }, text: {
        dir.set(|wanted| {
            wanted.offset = pages(text, "offset")?;
            Ok(())
        })
    };
    // size
    2 (dir, page): {
        show(page, fmt!("{}", dir.settings.lock().wanted.size))
    }, text: {
        dir.set(|wanted| {
            wanted.size = pages(text, "size")?;
            Ok(())
        })
    };
    // mode
    3 (dir, page): {
        let pages = dir.settings.lock().wanted.pages;
        show(page, fmt!("{}", if pages { "paged" } else { "pageless" }))
    }, text: {
        dir.set(|wanted| {
            wanted.pages = match word(text)? {
                "paged" => true,
                "pageless" => false,
                _ => return Err(refuse!(EINVAL, "the modes are paged and pageless")),
            };
            Ok(())
        })
    };
    // kernel_reserve
    4 (dir, page): {
        match dir.settings.lock().wanted.kernel_reserve {
            Some(bytes) => show(page, fmt!("{}", bytes)),
            None => show(page, fmt!("auto")),
        }
    }, text: {
        dir.set(|wanted| {
            wanted.kernel_reserve = match word(text)? {
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
        show(page, fmt!("{}", u32::from(dir.settings.lock().wanted.pinned_exports)))
    }, text: {
        dir.change(|settings| {
            let allow = match word(text)? {
                "1" => true,
                "0" => false,
                _ => return Err(refuse!(EINVAL, "pinned_exports is 0 or 1")),
            };
            settings.wanted.pinned_exports = allow;
            // It can be changed at any time, and of providers that other drivers published too.
            Orchestrator::get()?.set_pinned_exports(settings.wanted.addr, allow);
            Ok(())
        })
    };
}

/// A number of bytes that is a whole number of pages.
fn pages(text: &[u8], what: &str) -> Answer<u64> {
    let bytes = number(text)?;
    if bytes % PAGE_SIZE as u64 == 0 {
        Ok(bytes)
    } else {
        Err(refuse!(EINVAL, "{} {} is not a whole number of pages", what, bytes))
    }
}
