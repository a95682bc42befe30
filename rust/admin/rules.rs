// SPDX-License-Identifier: GPL-2.0

//! configfs: `/sys/kernel/config/p2pmem/rules/<NN-name>/`, the administrator's rules.
//!
//! `mkdir` makes an empty rule. The attributes say what the rule matches and what it sets, and writing 1 to `enable` puts
//! the rule into force. Changing an attribute of a rule in force takes effect at once, or is refused as a whole. `status`
//! has the result of the last write as text. `rmdir` ends the rule.
//!
//! C header: [`include/linux/configfs.h`](srctree/include/linux/configfs.h)
//!
//! Context: process context, may sleep. configfs holds `configfs_buffer::mutex` and, for reading,
//! `configfs_fragment::frag_sem` during `show` and `store`, and the parent's inode lock during `mkdir` and `rmdir`;
//! `RuleDir::settings`, a mutex, is taken inside, and the locks of `alloc::rules::Rules` inside that.

use crate::{
    admin::providers::{
        attributes,
        show,
        word, //
    },
    alloc::orchestrator::Orchestrator,
    ext::{
        compat::configfs_attrs,
        global,
        refusal::{
            refuse,
            Answer,
            Text, //
        }, //
    },
    policy::{
        path::PathClass,
        rule::{
            Action,
            Beneficiary,
            DeviceMatch,
            Rule,
            RuleName,
            Users, //
        },
        rule_text, //
    }, //
};
use kernel::{
    configfs::{AttributeOperations, Group, GroupOperations},
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    str::Formatter,
    sync::Mutex,
};

/// The directory `rules`.
#[pin_data]
pub(crate) struct Rules {}

/// The directory of one rule.
#[pin_data(PinnedDrop)]
pub(crate) struct RuleDir {
    #[pin]
    settings: Mutex<Settings>,
}

/// The rule of a directory. Protected by `RuleDir::settings`.
struct Settings {
    rule: Rule,
    /// Id of the rule while it is in force.
    enabled: Option<u64>,
    /// Why the last change was refused; empty if it was not.
    refused: Text,
}

/// Creates the directory `rules` below the subsystem.
pub(crate) fn rules() -> Result<impl PinInit<Group<Rules>, Error>> {
    let item = configfs_attrs! {
        container: Group<Rules>,
        data: Rules,
        child: RuleDir,
        attributes: [],
    };
    Ok(Group::new(c"rules".try_into()?, item, try_pin_init!(Rules {}? Error)))
}

#[vtable]
impl GroupOperations for Rules {
    type Child = RuleDir;

    /// `mkdir`. Errors: `EINVAL` if `name` is no name of a rule, `ENODEV` if the module is still being loaded.
    fn make_group(&self, name: &CStr) -> Result<impl PinInit<Group<RuleDir>, Error>> {
        global::ready()?;
        let item = configfs_attrs! {
            container: Group<RuleDir>,
            data: RuleDir,
            attributes: [
                provider: 0,
                client: 1,
                uid: 2,
                gid: 3,
                action: 4,
                max_class: 5,
                quota: 6,
                group_quota: 7,
                reserve: 8,
                reserve_for: 9,
                enable: 10,
                status: 11,
                usage: 12,
            ],
        };
        let rule = RuleName::ordered(name.to_bytes()).map(Rule::new).ok_or_else(|| {
            let refusal = refuse!(
                EINVAL,
                "a rule's name is two digits, a dash and up to {} letters, digits, dots, dashes and underscores",
                RuleName::MAX_LEN - 3
            );
            refusal.log("mkdir of a rule");
            refusal.error
        })?;
        Ok(Group::new(name.try_into()?, item, RuleDir::new(rule)))
    }
}

impl RuleDir {
    fn new(rule: Rule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            settings <- new_mutex!(Settings {
                rule,
                enabled: None,
                refused: Text::EMPTY,
            }),
        }? Error)
    }

    /// Runs `change` with the settings locked. An error goes to the log and into `status`.
    fn change(&self, change: impl FnOnce(&mut Settings) -> Answer) -> Result {
        let mut settings = self.settings.lock();
        settings.refused = Text::EMPTY;
        change(&mut settings).map_err(|refusal| {
            let name = settings.rule.name;
            settings.refused = Text::new(fmt!("refused: {}", refusal.text().as_str()));
            refuse!(refusal.error, "rule {}: {}", name.as_str(), refusal.text().as_str()).log("configfs");
            refusal.error
        })
    }

    /// Changes the rule. If the rule is in force, puts the changed rule into force before the settings change.
    fn set(&self, set: impl FnOnce(&mut Rule) -> Answer) -> Result {
        self.change(|settings| {
            let mut rule = settings.rule;
            set(&mut rule)?;
            if settings.enabled.is_some() {
                settings.enabled = Some(put(&rule, settings.enabled)?);
            }
            settings.rule = rule;
            Ok(())
        })
    }
}

/// Puts `rule` into force, instead of rule `old`. Returns the id of the new rule.
fn put(rule: &Rule, old: Option<u64>) -> Answer<u64> {
    let orchestrator = Orchestrator::get()?;
    orchestrator.rules().put(rule, old, || orchestrator.providers())
}

impl Settings {
    /// Puts the rule into force. Does nothing if it is in force.
    fn enable(&mut self) -> Answer {
        if self.enabled.is_none() {
            self.enabled = Some(put(&self.rule, None)?);
        }
        Ok(())
    }

    /// Ends the rule. Errors: `ENOMEM`; the rule stays in force then.
    fn disable(&mut self) -> Answer {
        if let (Some(id), Ok(orchestrator)) = (self.enabled, Orchestrator::get()) {
            orchestrator
                .rules()
                .remove(id, || orchestrator.providers())
                .map_err(|refusal| refuse!(refusal.error, "out of memory: the rule stays in force"))?;
        }
        self.enabled = None;
        Ok(())
    }

    /// Returns the text of `status`.
    fn status(&self) -> Text {
        if !self.refused.as_str().is_empty() {
            return self.refused;
        }
        match (self.enabled, Orchestrator::get()) {
            (Some(id), Ok(orchestrator)) => orchestrator.rules().status_text(id),
            _ => match self.rule.check() {
                Ok(()) => Text::new(fmt!("not in force: write 1 to enable")),
                Err(flaw) => Text::new(fmt!("not in force: {}", flaw.text())),
            },
        }
    }
}

#[pinned_drop]
impl PinnedDrop for RuleDir {
    fn drop(self: Pin<&mut Self>) {
        /// Number of attempts to allocate. More attempts are unlikely to succeed.
        const TRIES: u32 = 16;
        let mut settings = self.settings.lock();
        for _ in 0..TRIES {
            if settings.disable().is_ok() {
                return;
            }
        }
        // `rmdir` cannot fail at this point.
        if let (Some(id), Ok(orchestrator)) = (settings.enabled, Orchestrator::get()) {
            orchestrator.rules().remove_later(id);
        }
        pr_warn!(
            "{}: there is no memory to end the rule with: it stays in force until rules change again\n",
            settings.rule.name.as_str()
        );
    }
}

/// Parses the written text. `what` names the accepted values in the refusal. Errors: `EINVAL`.
fn parsed<T>(text: &[u8], parse: impl FnOnce(&str) -> Option<T>, what: &str) -> Answer<T> {
    parse(word(text)?).ok_or_else(|| refuse!(EINVAL, "the value is not {}", what))
}

/// Parses a value as [`parsed`] does; `none` stands for no value.
fn optional<T>(text: &[u8], parse: impl FnOnce(&str) -> Option<T>, what: &str) -> Answer<Option<T>> {
    parsed(
        text,
        |word| match word {
            "none" => Some(None),
            _ => parse(word).map(Some),
        },
        what,
    )
}

/// Writes a device as [`rule_text::device`] parses it.
fn show_device(page: &mut [u8; PAGE_SIZE], device: DeviceMatch) -> Result<usize> {
    match device {
        DeviceMatch::Any => show(page, fmt!("any")),
        DeviceMatch::At(addr) => show(page, fmt!("{}", addr)),
        DeviceMatch::Ids(vendor, device) => show(page, fmt!("{:04x}:{:04x}", vendor, device)),
    }
}

/// Writes a number, or the text `none` if there is no number.
fn show_number<T: kernel::fmt::Display>(page: &mut [u8; PAGE_SIZE], number: Option<T>, none: &str) -> Result<usize> {
    match number {
        Some(number) => show(page, fmt!("{}", number)),
        None => show(page, fmt!("{}", none)),
    }
}

/// Writes users as [`rule_text::users`] parses them.
impl kernel::fmt::Display for Users {
    fn fmt(&self, f: &mut kernel::fmt::Formatter<'_>) -> kernel::fmt::Result {
        for (at, (first, last)) in self.ranges().enumerate() {
            f.write_str(if at > 0 { "," } else { "" })?;
            f.write_fmt(fmt!("{}", first))?;
            if last > first {
                f.write_fmt(fmt!("-{}", last))?;
            }
        }
        Ok(())
    }
}

const DEVICE: &str = "any, a function as 0000:03:00.0, or vendor:device as 15b3:101b";
const ID: &str = "any or a number";
const USERS: &str = "any, or up to four numbers and ranges of numbers, as 1000,100000-165535";
const BYTES: &str = "none or a number of bytes, with K, M, G or T for powers of 1024";

attributes! {
    RuleDir;
    // provider
    0 (dir, page): {
        show_device(page, dir.settings.lock().rule.provider)
    }, text: {
        dir.set(|rule| {
            rule.provider = parsed(text, rule_text::device, DEVICE)?;
            Ok(())
        })
    };
    // client
    1 (dir, page): {
        show_device(page, dir.settings.lock().rule.client)
    }, text: {
        dir.set(|rule| {
            rule.client = parsed(text, rule_text::device, DEVICE)?;
            Ok(())
        })
    };
    // uid
    2 (dir, page): {
        show_number(page, dir.settings.lock().rule.uid, "any")
    }, text: {
        dir.set(|rule| {
            rule.uid = parsed(text, rule_text::users, USERS)?;
            Ok(())
        })
    };
    // gid
    3 (dir, page): {
        show_number(page, dir.settings.lock().rule.gid, "any")
    }, text: {
        dir.set(|rule| {
            rule.gid = parsed(text, rule_text::id, ID)?;
            Ok(())
        })
    };
    // action
    4 (dir, page): {
        show_number(page, dir.settings.lock().rule.action.map(Action::as_str), "none")
    }, text: {
        dir.set(|rule| {
            rule.action = optional(text, Action::parse, "allow, deny, prefer, avoid or none")?;
            Ok(())
        })
    };
    // max_class
    5 (dir, page): {
        show_number(page, dir.settings.lock().rule.max_class.map(PathClass::as_str), "none")
    }, text: {
        dir.set(|rule| {
            rule.max_class = optional(text, PathClass::parse, "DEV, SW, SWS, PHB, NODE, SYS or none")?;
            Ok(())
        })
    };
    // quota
    6 (dir, page): {
        show_number(page, dir.settings.lock().rule.quota, "none")
    }, text: {
        dir.set(|rule| {
            rule.quota = optional(text, rule_text::bytes, BYTES)?;
            Ok(())
        })
    };
    // group_quota
    7 (dir, page): {
        show_number(page, dir.settings.lock().rule.group_quota, "none")
    }, text: {
        dir.set(|rule| {
            rule.group_quota = optional(text, rule_text::bytes, BYTES)?;
            Ok(())
        })
    };
    // reserve
    8 (dir, page): {
        show_number(page, dir.settings.lock().rule.reserve, "none")
    }, text: {
        dir.set(|rule| {
            rule.reserve = optional(text, rule_text::bytes, BYTES)?;
            Ok(())
        })
    };
    // reserve_for
    9 (dir, page): {
        show_number(page, dir.settings.lock().rule.reserve_for.map(Beneficiary::as_str), "none")
    }, text: {
        dir.set(|rule| {
            rule.reserve_for = optional(text, Beneficiary::parse, "kernel, group or none")?;
            Ok(())
        })
    };
    // enable
    10 (dir, page): {
        show(page, fmt!("{}", u32::from(dir.settings.lock().enabled.is_some())))
    }, text: {
        dir.change(|settings| match word(text)? {
            "1" => settings.enable(),
            "0" => settings.disable(),
            _ => Err(refuse!(EINVAL, "enable is 0 or 1")),
        })
    };
    // status
    11 (dir, page): {
        let text = dir.settings.lock().status();
        show(page, fmt!("{}", text.as_str()))
    };
    // usage
    12 (dir, page): {
        let enabled = dir.settings.lock().enabled;
        let mut out = Formatter::new(page);
        if let (Some(id), Ok(orchestrator)) = (enabled, Orchestrator::get()) {
            orchestrator.rules().usage(id, &mut out);
        }
        Ok(out.bytes_written())
    };
}
