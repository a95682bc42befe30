// SPDX-License-Identifier: MIT OR Apache-2.0

//! The administrator's rules: who may have memory of which provider, how near, and how much, through configfs.
//!
//! ```no_run
//! use p2pmem::rules::{Action, Rule, Rules};
//!
//! let rules = Rules::new();
//! rules.add(&Rule { gid: Some(5001), action: Some(Action::Allow), ..Rule::new("10-lab") })?;
//! rules.add(&Rule { action: Some(Action::Deny), ..Rule::new("99-nobody-else") })?;
//! for state in rules.list()? {
//!     println!("{}: {}", state.rule.name, state.status);
//! }
//! # Ok::<(), p2pmem::Error>(())
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::admin::{read_status, RealTree, Tree};
use crate::error::{Error, Result};
use crate::types::PathClass;

mod users;

pub use users::Users;

/// Most characters of a rule's name.
const NAME_MOST: usize = 31;
/// What the name of a rule ends in that stands in for another one while that is replaced.
const STAND_IN: &str = ".new";

macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "lowercase")]
        #[non_exhaustive]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// The word that configfs has for it.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(word: &str) -> std::result::Result<Self, String> {
                match word {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(format!("{word:?} is none of {}", [$($word),*].join(", "))),
                }
            }
        }
    };
}

words! {
    /// What a rule says of a pair of a provider and a client.
    Action {
        /// It may be.
        Allow = "allow",
        /// It may not be.
        Deny = "deny",
        /// It comes before those that are not preferred.
        Prefer = "prefer",
        /// It is taken where nothing else serves.
        Avoid = "avoid",
    }
}

words! {
    /// The beneficiary of reserved memory.
    Beneficiary {
        /// Other drivers of the kernel.
        Kernel = "kernel",
        /// The members of the rule's group.
        Group = "group",
    }
}

/// One rule. What is `None` matches everything, or is left to other rules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rule {
    /// Two digits, a dash, and letters, digits, dots, dashes and underscores; rules are looked at in the order of names.
    pub name: String,
    /// Whose memory: a PCI address, or vendor:device as four hexadecimal digits each.
    pub provider: Option<String>,
    /// Who does DMA, in the same words.
    pub client: Option<String>,
    /// Effective users.
    pub uid: Option<Users>,
    /// A group that the user is a member of.
    pub gid: Option<u32>,
    /// Whether the provider is allowed, and how preferred.
    pub action: Option<Action>,
    /// Farthest path.
    pub max_class: Option<PathClass>,
    /// Bytes that each user may hold.
    pub quota: Option<u64>,
    /// Bytes that the members of the group, or the users of `uid`, may hold together.
    pub group_quota: Option<u64>,
    /// Bytes of each provider that are set aside.
    pub reserve: Option<u64>,
    /// The beneficiary of the reserve.
    pub reserve_for: Option<Beneficiary>,
    /// Whether it is in force.
    pub enabled: bool,
}

impl Rule {
    /// A rule that matches everything, sets nothing yet, and is to be in force.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            provider: None,
            client: None,
            uid: None,
            gid: None,
            action: None,
            max_class: None,
            quota: None,
            group_quota: None,
            reserve: None,
            reserve_for: None,
            enabled: true,
        }
    }

    /// Whether the module would take the name.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] with what a name is.
    pub fn check_name(name: &str) -> Result<()> {
        let plain = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
        let ordered = matches!(name.as_bytes(), [a, b, b'-', _, ..] if a.is_ascii_digit() && b.is_ascii_digit());
        if ordered && name.len() <= NAME_MOST && name.bytes().all(plain) {
            return Ok(());
        }
        Err(Error::Request(format!(
            "{name:?} is no name of a rule: two digits, a dash, and up to {} letters, digits, dots, dashes and \
             underscores, such as 10-lab",
            NAME_MOST - 3
        )))
    }

    /// The attributes as configfs takes them.
    fn attributes(&self) -> [(&'static str, String); 10] {
        fn or(value: Option<impl ToString>, none: &str) -> String {
            value.map_or_else(|| none.to_owned(), |v| v.to_string())
        }
        [
            ("provider", or(self.provider.as_ref(), "any")),
            ("client", or(self.client.as_ref(), "any")),
            ("uid", or(self.uid.as_ref(), "any")),
            ("gid", or(self.gid, "any")),
            ("action", or(self.action, "none")),
            ("max_class", or(self.max_class.map(PathClass::short), "none")),
            ("quota", or(self.quota, "none")),
            ("group_quota", or(self.group_quota, "none")),
            ("reserve", or(self.reserve, "none")),
            ("reserve_for", or(self.reserve_for, "none")),
        ]
    }
}

/// What counts under a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "of", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Usage {
    /// What a user holds.
    User {
        /// Who.
        uid: u32,
        /// How much.
        bytes: u64,
    },
    /// What the rule's group holds.
    Group {
        /// How much.
        bytes: u64,
    },
    /// What the rule's group holds of what is set aside in a provider.
    Reserve {
        /// The provider's id.
        provider: u32,
        /// How much.
        bytes: u64,
    },
}

impl Usage {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        Some(match words[..] {
            ["uid", uid, bytes] => Self::User {
                uid: uid.parse().ok()?,
                bytes: bytes.parse().ok()?,
            },
            ["group", bytes] => Self::Group {
                bytes: bytes.parse().ok()?,
            },
            ["provider", provider, bytes] => Self::Reserve {
                provider: provider.parse().ok()?,
                bytes: bytes.parse().ok()?,
            },
            _ => return None,
        })
    }
}

/// A rule and what the module says of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RuleState {
    /// The rule.
    #[serde(flatten)]
    pub rule: Rule,
    /// The module's message about the rule.
    pub status: String,
    /// What counts under it.
    pub usage: Vec<Usage>,
}

/// What [`Rules::load`] did, by the names of the rules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Loaded {
    /// Those that were not there.
    pub added: Vec<String>,
    /// Those that were others.
    pub changed: Vec<String>,
    /// Those that were there, and were not to be.
    pub removed: Vec<String>,
    /// Those that were there already.
    pub unchanged: Vec<String>,
}

/// The rules of a machine.
pub struct Rules {
    folder: PathBuf,
    tree: Box<dyn Tree>,
}

impl std::fmt::Debug for Rules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rules")
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self::new()
    }
}

/// A step back.
enum Undo {
    Remove(String),
    Restore(Rule),
}

impl Rules {
    /// This machine's, with configfs at `/sys/kernel/config`.
    pub fn new() -> Self {
        Self::with_root("/sys/kernel/config")
    }

    /// With configfs elsewhere.
    pub fn with_root(config: impl Into<PathBuf>) -> Self {
        Self {
            folder: config.into().join("p2pmem/rules"),
            tree: Box::new(RealTree),
        }
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn failed(action: impl Into<String>, path: &Path) -> impl FnOnce(io::Error) -> Error + '_ {
        let action = action.into();
        move |error| Error::Admin {
            action,
            path: path.to_owned(),
            error,
            status: path.parent().and_then(read_status),
        }
    }

    fn write(&self, path: &Path, text: &str) -> Result<()> {
        self.tree
            .write(path, text)
            .map_err(Self::failed(format!("write \"{text}\" to"), path))
    }

    /// All rules, in the order in which they are looked at.
    ///
    /// # Errors
    ///
    /// [`Error::Admin`] where configfs has no such folder (the module is not loaded) or may not be read.
    pub fn list(&self) -> Result<Vec<RuleState>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(Self::failed("list", &self.folder))? {
            let name = entry.map_err(Self::failed("list", &self.folder))?.file_name();
            if let Some(state) = name.to_str().map(|name| self.get(name)).transpose()? {
                all.push(state);
            }
        }
        all.sort_by(|a, b| a.rule.name.cmp(&b.rule.name));
        Ok(all)
    }

    /// One rule.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] where there is none of that name; [`Error::Admin`] where it cannot be read.
    pub fn get(&self, name: &str) -> Result<RuleState> {
        let dir = self.dir(name);
        if !dir.exists() {
            return Err(Error::Missing(format!("there is no rule {name}")));
        }
        let read = |attribute: &str| -> Result<String> {
            let path = dir.join(attribute);
            let text = fs::read_to_string(&path).map_err(Self::failed("read", &path))?;
            Ok(text.trim_end().to_owned())
        };
        fn known<T: std::str::FromStr>(text: String) -> Option<T> {
            match text.as_str() {
                "any" | "none" => None,
                word => word.parse().ok(),
            }
        }
        Ok(RuleState {
            rule: Rule {
                name: name.to_owned(),
                provider: known(read("provider")?),
                client: known(read("client")?),
                uid: known(read("uid")?),
                gid: known(read("gid")?),
                action: known(read("action")?),
                max_class: known(read("max_class")?),
                quota: known(read("quota")?),
                group_quota: known(read("group_quota")?),
                reserve: known(read("reserve")?),
                reserve_for: known(read("reserve_for")?),
                enabled: read("enable")? == "1",
            },
            status: read("status")?,
            usage: read("usage")?.lines().filter_map(Usage::parse).collect(),
        })
    }

    /// Makes a rule, and puts it into force if it is to be. Returns what the module says of it.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for a name that is none; [`Error::Exists`] where there is a rule of that name;
    /// [`Error::Admin`] where the module refuses it, with its reason. Nothing of it stays then.
    pub fn add(&self, rule: &Rule) -> Result<RuleState> {
        Rule::check_name(&rule.name)?;
        let dir = self.dir(&rule.name);
        if dir.exists() {
            return Err(Error::Exists(format!("there is a rule {} already", rule.name)));
        }
        self.tree.make_dir(&dir).map_err(Self::failed("make", &dir))?;
        let enable = ("enable", if rule.enabled { "1" } else { "0" }.to_owned());
        let written = rule
            .attributes()
            .into_iter()
            .chain([enable])
            .try_for_each(|(name, value)| self.write(&dir.join(name), &value));
        if let Err(error) = written {
            // The error that led here is the one worth telling.
            let _ = self.tree.remove_dir(&dir);
            return Err(error);
        }
        self.get(&rule.name)
    }

    /// Ends a rule. What counted under it counts under those that come next; no buffer is lost.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] where there is none of that name; [`Error::Admin`] where it cannot be removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        let dir = self.dir(name);
        if !dir.exists() {
            return Err(Error::Missing(format!("there is no rule {name}")));
        }
        self.tree.remove_dir(&dir).map_err(Self::failed("remove", &dir))
    }

    /// Replaces a rule by another one of the same name. At every moment one of the two is in force: a stand-in takes
    /// over in between, whose name ends in `.new`.
    ///
    /// # Errors
    ///
    /// As for [`Rules::add`] and [`Rules::remove`]. Where the new rule is refused the old one stays.
    pub fn replace(&self, rule: &Rule) -> Result<RuleState> {
        let kept = rule.name.len().min(NAME_MOST - STAND_IN.len());
        let stand_in = Rule {
            name: format!("{}{STAND_IN}", &rule.name[..kept]),
            ..rule.clone()
        };
        self.add(&stand_in)?;
        self.remove(&rule.name)?;
        let state = self.add(rule)?;
        self.remove(&stand_in.name)?;
        Ok(state)
    }

    /// Adds rules, or changes those of the same name; other rules stay. Rules that are in force already are left alone.
    /// On an error all rules are as before.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for a name that is none or is there twice; else as for [`Rules::add`].
    pub fn load(&self, rules: &[Rule]) -> Result<Loaded> {
        self.load_all(rules, false)
    }

    /// As [`Rules::load`], and removes all other rules.
    ///
    /// # Errors
    ///
    /// Those of [`Rules::load`].
    pub fn load_only(&self, rules: &[Rule]) -> Result<Loaded> {
        self.load_all(rules, true)
    }

    fn load_all(&self, rules: &[Rule], only: bool) -> Result<Loaded> {
        for (at, rule) in rules.iter().enumerate() {
            Rule::check_name(&rule.name)?;
            if rules[..at].iter().any(|other| other.name == rule.name) {
                return Err(Error::Request(format!("there are two rules {}", rule.name)));
            }
        }
        let mut undo = Vec::new();
        let loaded = self.load_steps(rules, only, &mut undo);
        if loaded.is_err() {
            for step in undo.into_iter().rev() {
                // The error that led here is the one worth telling.
                let _ = match step {
                    Undo::Remove(name) => self.remove(&name),
                    Undo::Restore(rule) if self.dir(&rule.name).exists() => self.replace(&rule).map(drop),
                    Undo::Restore(rule) => self.add(&rule).map(drop),
                };
            }
        }
        loaded
    }

    fn load_steps(&self, rules: &[Rule], only: bool, undo: &mut Vec<Undo>) -> Result<Loaded> {
        let mut loaded = Loaded::default();
        let before = self.list()?;
        for rule in rules {
            match before.iter().find(|state| state.rule.name == rule.name) {
                Some(state) if state.rule == *rule => loaded.unchanged.push(rule.name.clone()),
                Some(state) => {
                    self.replace(rule)?;
                    undo.push(Undo::Restore(state.rule.clone()));
                    loaded.changed.push(rule.name.clone());
                }
                None => {
                    self.add(rule)?;
                    undo.push(Undo::Remove(rule.name.clone()));
                    loaded.added.push(rule.name.clone());
                }
            }
        }
        for state in before.into_iter().filter(|_| only) {
            if !rules.iter().any(|rule| rule.name == state.rule.name) {
                self.remove(&state.rule.name)?;
                loaded.removed.push(state.rule.name.clone());
                undo.push(Undo::Restore(state.rule));
            }
        }
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests;
