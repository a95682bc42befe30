// SPDX-License-Identifier: MIT OR Apache-2.0

//! The administrator's rules in configfs: which users get memory of which provider, how far paths may be, and how much
//! memory each user may hold.
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

/// Maximum length of a rule's name in bytes.
const MAX_NAME: usize = 31;
/// Suffix of the name of a temporary rule, which is in force while another rule is replaced.
const TEMPORARY: &str = ".new";

macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "lowercase")]
        #[non_exhaustive]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl $name {
            /// Returns the word for the value in configfs.
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
    /// The effect of a rule on a pair of a provider and a client.
    Action {
        /// The provider may serve the client.
        Allow = "allow",
        /// The provider must not serve the client.
        Deny = "deny",
        /// The provider is chosen before providers that are not preferred.
        Prefer = "prefer",
        /// The provider is chosen only if no other provider can serve the request.
        Avoid = "avoid",
    }
}

words! {
    /// The beneficiary of a reserve.
    Beneficiary {
        /// Other drivers of the kernel.
        Kernel = "kernel",
        /// The members of the rule's group.
        Group = "group",
    }
}

/// A rule. A field that is `None` matches everything, or has no effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Rule {
    /// Name: two digits, a dash, and letters, digits, dots, dashes and underscores. Rules apply in the order of their
    /// names.
    pub name: String,
    /// Provider whose memory the rule applies to: a PCI address, or vendor:device as four hexadecimal digits each.
    pub provider: Option<String>,
    /// Client that the rule applies to, in the same form.
    pub client: Option<String>,
    /// Effective users that the rule applies to.
    pub uid: Option<Users>,
    /// Group whose members the rule applies to.
    pub gid: Option<u32>,
    /// Effect of the rule: whether the provider is allowed, and how preferred.
    pub action: Option<Action>,
    /// Farthest path class that is allowed.
    pub max_class: Option<PathClass>,
    /// Bytes that each user may hold.
    pub quota: Option<u64>,
    /// Bytes that the members of the group, or the users in `uid`, may hold together.
    pub group_quota: Option<u64>,
    /// Bytes of each provider that are reserved.
    pub reserve: Option<u64>,
    /// Beneficiary of the reserve.
    pub reserve_for: Option<Beneficiary>,
    /// Whether the rule is in force.
    pub enabled: bool,
}

impl Rule {
    /// A rule that matches everything and has no effect yet. [`Rules::add`] puts it into force.
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

    /// Checks that a name is valid for a rule.
    ///
    /// ```
    /// use p2pmem::rules::Rule;
    ///
    /// assert!(Rule::check_name("10-lab").is_ok());
    /// assert!(Rule::check_name("lab").is_err());
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Request`], with the form of a valid name.
    pub fn check_name(name: &str) -> Result<()> {
        let plain = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
        let ordered = matches!(name.as_bytes(), [a, b, b'-', _, ..] if a.is_ascii_digit() && b.is_ascii_digit());
        if ordered && name.len() <= MAX_NAME && name.bytes().all(plain) {
            return Ok(());
        }
        Err(Error::Request(format!(
            "{name:?} is not a valid rule name: use two digits, a dash, and up to {} letters, digits, dots, dashes and \
             underscores, such as 10-lab",
            MAX_NAME - 3
        )))
    }

    /// Returns the attributes and their values in configfs.
    pub(crate) fn attributes(&self) -> [(&'static str, String); 10] {
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

/// Memory that counts towards the limits of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "of", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Usage {
    /// Memory that a user holds.
    User {
        /// Id of the user.
        uid: u32,
        /// Bytes.
        bytes: u64,
    },
    /// Memory that the rule's group holds.
    Group {
        /// Bytes.
        bytes: u64,
    },
    /// Memory that the rule's group holds of the reserve in a provider.
    Reserve {
        /// Id of the provider.
        provider: u32,
        /// Bytes.
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

/// A rule and its state in the module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RuleState {
    /// The rule.
    #[serde(flatten)]
    pub rule: Rule,
    /// The module's message about the rule: in force, or the reason why not.
    pub status: String,
    /// Memory that counts towards the rule's limits.
    pub usage: Vec<Usage>,
}

/// The result of [`Rules::load`]: names of rules.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Loaded {
    /// Rules that did not exist.
    pub added: Vec<String>,
    /// Rules that existed with other attributes.
    pub changed: Vec<String>,
    /// Rules that existed and were not in the argument of [`Rules::load_only`].
    pub removed: Vec<String>,
    /// Rules that existed with the same attributes.
    pub unchanged: Vec<String>,
}

/// The administrator's rules of a machine.
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

/// An action that undoes a step of a load.
enum Undo {
    Remove(String),
    Restore(Rule),
}

impl Rules {
    /// The rules of this machine, with configfs at `/sys/kernel/config`.
    pub fn new() -> Self {
        Self::with_root("/sys/kernel/config")
    }

    /// The rules in a configfs that is mounted at `config`.
    pub fn with_root(config: impl Into<PathBuf>) -> Self {
        Self::with_tree(config, RealTree)
    }

    /// The rules in a configfs that is mounted at `config`, changed by `tree`.
    pub(crate) fn with_tree(config: impl Into<PathBuf>, tree: impl Tree + 'static) -> Self {
        Self {
            folder: config.into().join("p2pmem/rules"),
            tree: Box::new(tree),
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

    /// Returns all rules, in the order in which they apply.
    ///
    /// # Errors
    ///
    /// [`Error::Admin`] with ENOENT (the module is not loaded, or configfs is not mounted) or EACCES.
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

    /// Returns the rule `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if there is no such rule; [`Error::Admin`] if its attributes cannot be read.
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

    /// Creates a rule, and puts it into force if [`Rule::enabled`] is set. Returns its state.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for an invalid name; [`Error::Exists`] if a rule has this name; [`Error::Admin`] with the
    /// module's message and EINVAL if the module refuses the rule, or EACCES. After an error, the rule does not exist.
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
            // An error while undoing is ignored: the caller gets the first error.
            let _ = self.tree.remove_dir(&dir);
            return Err(error);
        }
        self.get(&rule.name)
    }

    /// Removes a rule. Memory that counted towards its limits counts towards those of the next matching rules. Buffers
    /// are not affected.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if there is no such rule; [`Error::Admin`] if the rule cannot be removed.
    pub fn remove(&self, name: &str) -> Result<()> {
        let dir = self.dir(name);
        if !dir.exists() {
            return Err(Error::Missing(format!("there is no rule {name}")));
        }
        self.tree.remove_dir(&dir).map_err(Self::failed("remove", &dir))
    }

    /// Changes the quota of a rule, in one step. A rule in force stays in force. Returns the state of the rule.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if there is no such rule; [`Error::Admin`] with the module's message and EINVAL if the module
    /// refuses the change, or EACCES. After an error, the rule is unchanged.
    pub fn set_quota(&self, name: &str, quota: Option<u64>) -> Result<RuleState> {
        let dir = self.dir(name);
        if !dir.exists() {
            return Err(Error::Missing(format!("there is no rule {name}")));
        }
        self.write(
            &dir.join("quota"),
            &quota.map_or_else(|| "none".to_owned(), |bytes| bytes.to_string()),
        )?;
        self.get(name)
    }

    /// Replaces a rule by another rule of the same name. One of the two is in force at any time: a temporary rule,
    /// whose name ends in `.new`, is in force in between.
    ///
    /// # Errors
    ///
    /// Those of [`Rules::add`] and [`Rules::remove`]. If the module refuses the new rule, the old one stays.
    pub fn replace(&self, rule: &Rule) -> Result<RuleState> {
        let kept = rule.name.len().min(MAX_NAME - TEMPORARY.len());
        let temporary = Rule {
            name: format!("{}{TEMPORARY}", &rule.name[..kept]),
            ..rule.clone()
        };
        self.add(&temporary)?;
        self.remove(&rule.name)?;
        let state = self.add(rule)?;
        self.remove(&temporary.name)?;
        Ok(state)
    }

    /// Adds rules, or replaces rules of the same name. Other rules, and rules that do not change, are not touched.
    /// After an error, all rules are as before.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for a name that is invalid or used twice; else those of [`Rules::add`] and [`Rules::list`].
    pub fn load(&self, rules: &[Rule]) -> Result<Loaded> {
        self.load_all(rules, false)
    }

    /// As [`Rules::load`], and removes all other rules.
    ///
    /// # Errors
    ///
    /// Those of [`Rules::load`] and [`Rules::remove`].
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
                // An error while undoing is ignored: the caller gets the first error.
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
