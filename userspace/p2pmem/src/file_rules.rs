// SPDX-License-Identifier: MIT OR Apache-2.0

//! File rules: rules that a program sets for its own open device.

use p2pmem_sys as abi;

use crate::addr::PciAddr;
use crate::backend::Capability;
use crate::device::Device;
use crate::error::{Error, Operation, Result};
use crate::rules::Action;
use crate::types::PathClass;

/// A file rule. A field that is `None` matches everything, or has no effect.
///
/// ```
/// use p2pmem::rules::Action;
/// use p2pmem::{FileRule, Request};
///
/// # let device = p2pmem::fake::Fake::example().device();
/// let slow = device.providers()?[0].addr;
/// device.set_rules(&[
///     FileRule { provider: Some(slow), action: Some(Action::Deny), ..FileRule::new("not-the-slow-one") },
///     FileRule { quota: Some(64 << 20), ..FileRule::new("no-more-than-64M") },
/// ])?;
/// let buffer = device.alloc(&Request::new(1 << 20))?;
/// # assert_ne!(buffer.provider(), device.providers()?[0].id);
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRule {
    /// Name of the rule in verdicts and messages: at most 31 letters, digits, dots, dashes and underscores.
    pub name: String,
    /// Provider whose memory the rule applies to.
    pub provider: Option<PciAddr>,
    /// Client that the rule applies to.
    pub client: Option<PciAddr>,
    /// Effect of the rule: whether the provider is allowed, and how preferred. A file rule's `allow` cannot override an
    /// administrator's `deny`.
    pub action: Option<Action>,
    /// Farthest path class that is allowed.
    pub max_class: Option<PathClass>,
    /// Bytes that this open device may hold, in all providers.
    pub quota: Option<u64>,
}

impl FileRule {
    /// A rule that matches everything and has no effect yet.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            provider: None,
            client: None,
            action: None,
            max_class: None,
            quota: None,
        }
    }

    fn raw(&self) -> Result<abi::p2pmem_rule> {
        let mut raw = abi::p2pmem_rule {
            action: match self.action {
                None => 0,
                Some(Action::Allow) => abi::P2PMEM_RULE_ALLOW,
                Some(Action::Deny) => abi::P2PMEM_RULE_DENY,
                Some(Action::Prefer) => abi::P2PMEM_RULE_PREFER,
                Some(Action::Avoid) => abi::P2PMEM_RULE_AVOID,
            },
            max_class: self.max_class.map_or(0, PathClass::to_raw),
            ..Default::default()
        };
        if self.name.len() >= raw.name.len() {
            return Err(Error::Request(format!(
                "the rule name {:?} is too long: at most {} bytes",
                self.name,
                raw.name.len() - 1
            )));
        }
        for (to, from) in raw.name.iter_mut().zip(self.name.bytes()) {
            *to = from as std::ffi::c_char;
        }
        if let Some(provider) = self.provider {
            raw.provider = provider.into();
            raw.flags |= abi::P2PMEM_RULE_PROVIDER;
        }
        if let Some(client) = self.client {
            raw.client = client.into();
            raw.flags |= abi::P2PMEM_RULE_CLIENT;
        }
        if let Some(quota) = self.quota {
            raw.quota = quota;
            raw.flags |= abi::P2PMEM_RULE_QUOTA;
        }
        Ok(raw)
    }
}

impl Device {
    /// Replaces the file rules of this open device. The first rule that matches and sets an attribute decides the
    /// attribute. File rules restrict what the administrator's rules allow. Existing buffers are not affected.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for a name that is too long; [`Error::Refused`] with EINVAL (a name with other characters,
    /// two rules with one name, a rule without effect or with a contradiction), ENODEV (a function that does not
    /// exist), or E2BIG (more than 32 rules); [`Error::NotSupported`] if the backend is not the module. After an error,
    /// the rules are as before.
    pub fn set_rules(&self, rules: &[FileRule]) -> Result<()> {
        self.require(Capability::Rules)?;
        let raw = rules.iter().map(FileRule::raw).collect::<Result<Vec<_>>>()?;
        self.call(Operation::Rules, |kernel| kernel.set_rules(&raw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Fake;
    use crate::{Request, VerdictCode};

    #[test]
    fn denied_provider_is_not_chosen_and_rule_is_named() {
        let device = Fake::example().device();
        let request = Request::new(4096);
        let first = device.alloc(&request).unwrap().provider();
        let addr = device.providers().unwrap().iter().find(|p| p.id == first).unwrap().addr;
        let deny = FileRule {
            provider: Some(addr),
            action: Some(Action::Deny),
            ..FileRule::new("not-this")
        };
        device.set_rules(std::slice::from_ref(&deny)).unwrap();
        assert_ne!(device.alloc(&request).unwrap().provider(), first);
        let last = device.explain_last().unwrap();
        let verdict = last.verdicts.iter().find(|v| v.provider == first).unwrap();
        assert_eq!(verdict.code, VerdictCode::Denied);
        assert_eq!(verdict.why, "denied: by this file's own rule not-this");
        let everywhere = FileRule { provider: None, ..deny };
        device.set_rules(&[everywhere]).unwrap();
        assert_eq!(device.alloc(&request).unwrap_err().errno(), Some(libc::EACCES));
        device.set_rules(&[]).unwrap();
        assert_eq!(device.alloc(&request).unwrap().provider(), first);
    }

    #[test]
    fn too_long_names_fail_before_the_ioctl() {
        let device = Fake::example().device();
        let rule = FileRule {
            action: Some(Action::Deny),
            ..FileRule::new("x".repeat(32))
        };
        assert!(matches!(device.set_rules(&[rule]), Err(Error::Request(_))));
        let rule = FileRule {
            max_class: Some(PathClass::Switches),
            quota: Some(1),
            ..FileRule::new("x".repeat(31))
        };
        let raw = rule.raw().unwrap();
        assert_eq!((raw.flags, raw.max_class, raw.name[31]), (abi::P2PMEM_RULE_QUOTA, 3, 0));
    }
}
