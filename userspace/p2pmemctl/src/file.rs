// SPDX-License-Identifier: MIT OR Apache-2.0

//! Files with a machine's providers and rules: TOML with names of devices, users, and groups, and sizes with units.
//! Unknown keys and invalid values are errors that name the position in the file.

use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{bail, ensure, Context as _};
use p2pmem::admin;
use p2pmem::rules::{Rule, Users};
use p2pmem::PathClass;
use serde::{Deserialize, Serialize};

use crate::cli::size;
use crate::Context;

/// Content of a file.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct File {
    /// Devices to publish.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) publish: Vec<PublishEntry>,
    /// Rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) rule: Vec<RuleEntry>,
}

/// A number, or a text such as a size with a unit or a name.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(untagged)]
pub(crate) enum Value {
    Number(u64),
    Text(String),
}

impl Value {
    fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text.clone(),
        }
    }

    fn bytes(&self) -> anyhow::Result<u64> {
        size(&self.text()).map_err(|why| anyhow::anyhow!("{:?}: {why}", self.text()))
    }
}

/// A device to publish.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PublishEntry {
    pub(crate) device: String,
    bar: Option<u32>,
    offset: Option<Value>,
    size: Option<Value>,
    mode: Option<String>,
    kernel_reserve: Option<Value>,
    pinned_exports: Option<bool>,
    attach_gid: Option<Value>,
    /// Whether to unbind the device from its current driver.
    #[serde(default)]
    force: bool,
}

impl PublishEntry {
    pub(crate) fn resolve(&self, context: &Context<'_>) -> anyhow::Result<admin::Publish> {
        let bytes = |value: &Option<Value>| value.as_ref().map(Value::bytes).transpose();
        Ok(admin::Publish {
            bar: match self.bar {
                Some(bar @ 6..) => bail!("BAR {bar} does not exist: specify 0 to 5"),
                bar => bar,
            },
            offset: bytes(&self.offset)?,
            size: bytes(&self.size)?,
            mode: match self.mode.as_deref() {
                None => None,
                Some("paged") => Some(admin::Mode::Paged),
                Some("pageless") => Some(admin::Mode::Pageless),
                Some(other) => bail!("mode {other:?} is invalid: specify paged or pageless"),
            },
            kernel_reserve: bytes(&self.kernel_reserve)?,
            pinned_exports: self.pinned_exports,
            attach_gid: self.attach_gid.as_ref().map(|v| group(&v.text())).transpose()?,
            rebind: self.force,
            ..admin::Publish::new(context.client(&self.device)?.addr())
        })
    }
}

fn default_true() -> bool {
    true
}

fn is_true(value: &bool) -> bool {
    *value
}

/// A rule.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RuleEntry {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    provider: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gid: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_class: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quota: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group_quota: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reserve: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reserve_for: Option<String>,
    #[serde(default = "default_true", skip_serializing_if = "is_true")]
    enabled: bool,
}

impl RuleEntry {
    pub(crate) fn resolve(&self, context: &Context<'_>) -> anyhow::Result<Rule> {
        fn word<T: std::str::FromStr<Err = String>>(what: &str, text: &Option<String>) -> anyhow::Result<Option<T>> {
            let parsed = text.as_deref().map(str::parse).transpose();
            parsed.map_err(|why| anyhow::anyhow!("{what}: {why}"))
        }
        let device = |what: &'static str, name: &Option<String>| -> anyhow::Result<Option<String>> {
            let found = name.as_deref().map(|name| device(context, name)).transpose();
            Ok(found.context(what)?.flatten())
        };
        let bytes =
            |what: &'static str, value: &Option<Value>| value.as_ref().map(Value::bytes).transpose().context(what);
        Ok(Rule {
            provider: device("provider", &self.provider)?,
            client: device("client", &self.client)?,
            uid: self.uid.as_ref().map(|v| users(&v.text())).transpose()?,
            gid: self.gid.as_ref().map(|v| group(&v.text())).transpose()?,
            action: word("action", &self.action)?,
            max_class: word::<PathClass>("max_class", &self.max_class)?,
            quota: bytes("quota", &self.quota)?,
            group_quota: bytes("group_quota", &self.group_quota)?,
            reserve: bytes("reserve", &self.reserve)?,
            reserve_for: word("reserve_for", &self.reserve_for)?,
            enabled: self.enabled,
            ..Rule::new(&self.name)
        })
    }

    fn of(rule: &Rule) -> Self {
        let text = |value: Option<&dyn ToString>| value.map(|v| v.to_string());
        let bytes = |value: Option<u64>| {
            value.map(|bytes| match bytes {
                0 => Value::Number(0),
                bytes if bytes % (1 << 30) == 0 => Value::Text(format!("{}G", bytes >> 30)),
                bytes if bytes % (1 << 20) == 0 => Value::Text(format!("{}M", bytes >> 20)),
                bytes => Value::Number(bytes),
            })
        };
        Self {
            name: rule.name.clone(),
            provider: rule.provider.clone(),
            client: rule.client.clone(),
            uid: rule.uid.as_ref().map(|users| match users.one() {
                Some(uid) => Value::Number(uid.into()),
                None => Value::Text(users.to_string()),
            }),
            gid: rule.gid.map(|id| Value::Number(id.into())),
            action: text(rule.action.as_ref().map(|v| v as &dyn ToString)),
            max_class: text(rule.max_class.as_ref().map(|v| v as &dyn ToString)),
            quota: bytes(rule.quota),
            group_quota: bytes(rule.group_quota),
            reserve: bytes(rule.reserve),
            reserve_for: text(rule.reserve_for.as_ref().map(|v| v as &dyn ToString)),
            enabled: rule.enabled,
        }
    }
}

impl File {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        toml::from_str(&text).with_context(|| path.display().to_string())
    }
}

/// Returns rules in the format of a file.
pub(crate) fn render<'a>(rules: impl Iterator<Item = &'a Rule>) -> anyhow::Result<String> {
    let file = File {
        publish: Vec::new(),
        rule: rules.map(RuleEntry::of).collect(),
    };
    Ok(toml::to_string(&file)?)
}

/// Returns a device in the form that rules use, `None` for `any`. Accepts vendor:device, an address, or any device
/// name.
pub(crate) fn device(context: &Context<'_>, name: &str) -> anyhow::Result<Option<String>> {
    let ids = |text: &str| {
        text.len() == 9
            && text
                .split_once(':')
                .is_some_and(|(v, d)| v.len() == 4 && hex(v) && hex(d))
    };
    if name == "any" {
        Ok(None)
    } else if ids(name) {
        Ok(Some(name.to_ascii_lowercase()))
    } else if let Ok(addr) = name.parse::<p2pmem::PciAddr>() {
        // The device of a rule need not exist yet.
        Ok(Some(addr.to_string()))
    } else {
        Ok(Some(context.client(name)?.addr().to_string()))
    }
}

fn hex(text: &str) -> bool {
    text.bytes().all(|c| c.is_ascii_hexdigit())
}

/// A user account.
pub(crate) struct UserAccount {
    /// `None` if no user has this number.
    name: Option<String>,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
}

/// Looks up a user by name or number, with the groups of a login. A number without a user has no groups.
pub(crate) fn account(name: &str) -> anyhow::Result<UserAccount> {
    let number = name.parse::<u32>().ok();
    let found = match number {
        Some(uid) => nix::unistd::User::from_uid(uid.into()),
        None => nix::unistd::User::from_name(name),
    };
    match (found.with_context(|| format!("user {name}"))?, number) {
        (Some(user), _) => {
            let login = std::ffi::CString::new(user.name.clone())?;
            let groups = nix::unistd::getgrouplist(&login, user.gid).with_context(|| format!("groups of {name}"))?;
            Ok(UserAccount {
                name: Some(user.name),
                uid: user.uid.as_raw(),
                gid: user.gid.as_raw(),
                groups: groups.into_iter().map(nix::unistd::Gid::as_raw).collect(),
            })
        }
        (None, Some(uid)) => Ok(UserAccount {
            name: None,
            uid,
            gid: uid,
            groups: Vec::new(),
        }),
        (None, None) => bail!("user {name} does not exist"),
    }
}

/// The file with the subordinate ids of users: subuid(5).
const SUBORDINATE: &str = "/etc/subuid";

/// Parses users, separated by commas: names, numbers, ranges of numbers, and `subordinate:USER` for the ids that the
/// user may use in a user namespace.
pub(crate) fn users(text: &str) -> anyhow::Result<Users> {
    let mut ranges = Vec::new();
    for word in text.split(',') {
        if let Some(name) = word.strip_prefix("subordinate:") {
            let subordinate = std::fs::read_to_string(SUBORDINATE).context(SUBORDINATE)?;
            let of = account(name)?;
            let found = subordinates(&subordinate, &of);
            ensure!(!found.is_empty(), "{SUBORDINATE} has no ids for {name}");
            ranges.extend(found);
        } else if let Ok(users) = word.parse::<Users>() {
            ranges.extend_from_slice(users.ranges());
        } else {
            let uid = account(word)?.uid;
            ranges.push(uid..=uid);
        }
    }
    Ok(Users::new(ranges)?)
}

/// Returns the ranges of an account in the text of subuid(5). Each line has the user's name or number, the first id,
/// and the number of ids.
fn subordinates(text: &str, of: &UserAccount) -> Vec<RangeInclusive<u32>> {
    let range = |line: &str| {
        let mut fields = line.split(':');
        let (user, first, count) = (fields.next()?, fields.next()?, fields.next()?);
        let number = user.parse::<u32>().ok();
        if number != Some(of.uid) && of.name.as_deref() != Some(user) {
            return None;
        }
        let (first, count) = (first.parse::<u32>().ok()?, count.parse::<u32>().ok()?);
        Some(first..=first.checked_add(count.checked_sub(1)?)?)
    };
    text.lines().filter_map(range).collect()
}

/// Looks up the number of a group by name or number.
pub(crate) fn group(name: &str) -> anyhow::Result<u32> {
    if let Ok(gid) = name.parse() {
        return Ok(gid);
    }
    match nix::unistd::Group::from_name(name).with_context(|| format!("group {name}"))? {
        Some(group) => Ok(group.gid.as_raw()),
        None => bail!("group {name} does not exist"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subordinate_ids_of_user_are_found() {
        let text =
            "bob:200000:10\nalice:100000:65536\n1000:300000:1\nalice:1:0\nalice:x:1\nalice:4294967295:2\nalice\n";
        let alice = UserAccount {
            name: Some("alice".to_owned()),
            uid: 1000,
            gid: 1000,
            groups: Vec::new(),
        };
        assert_eq!(subordinates(text, &alice), [100_000..=165_535, 300_000..=300_000]);
        let nameless = UserAccount { name: None, ..alice };
        assert_eq!(subordinates(text, &nameless), [300_000..=300_000]);
    }

    #[test]
    fn users_by_name_number_and_range() {
        assert_eq!(users("root,1000,5-7").unwrap().ranges(), [0..=0, 1000..=1000, 5..=7]);
        for bad in ["", "7-5", "1,2,3,4,5", "subordinate:nobody-of-that-name"] {
            assert!(users(bad).is_err(), "{bad:?}");
        }
    }
}
