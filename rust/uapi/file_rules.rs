// SPDX-License-Identifier: GPL-2.0

//! Checks the rules of an open file, which `P2PMEM_IOC_RULES` passes, and converts them.
//!
//! Context: may sleep, no locks held.

use crate::{
    alloc::{
        orchestrator::Orchestrator,
        rules::RuleSet, //
    },
    ext::{
        abi::{
            self,
            consts, //
        },
        pci::Function,
        refusal::{
            refuse,
            Answer, //
        }, //
    },
    policy::{
        path::{
            PathClass,
            PciAddr, //
        },
        rule::{
            Action,
            DeviceMatch,
            Rule,
            RuleName, //
        }, //
    },
    uapi::argument::{
        array,
        no_flags,
        no_reserved, //
    }, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Reads and checks the rules of a file. An empty array returns `None`.
///
/// Errors: `E2BIG` (more than `MAX_RULES`), `EINVAL` (a rule is wrong, or a name is not unique), `ENODEV` (no such function),
/// `EFAULT`, `ENOMEM`.
pub(crate) fn read(arg: &abi::Rules, orchestrator: &Orchestrator) -> Answer<Option<Arc<RuleSet>>> {
    if arg.count > consts::MAX_RULES {
        return Err(refuse!(
            E2BIG,
            "{} rules, a file has at most {}",
            arg.count,
            consts::MAX_RULES
        ));
    }
    let (mut reader, _) = array(arg.rules, arg.count, arg.rule_size)?;
    let mut rules: KVec<Rule> = KVec::with_capacity(arg.count as usize, GFP_KERNEL_ACCOUNT)?;
    for index in 0..arg.count {
        let rule = one(&reader.read()?, index)?;
        if rules.iter().any(|other| other.name == rule.name) {
            return Err(refuse!(
                EINVAL,
                "rule {}: there are two of the name {}",
                index,
                rule.name.as_str()
            ));
        }
        rules.push(rule, GFP_KERNEL_ACCOUNT)?;
    }
    if rules.is_empty() {
        return Ok(None);
    }
    Ok(Some(RuleSet::of_file(rules, orchestrator.rules(), || {
        orchestrator.providers()
    })?))
}

/// Checks one rule. `index` is its place in the array, for messages.
fn one(raw: &abi::Rule, index: u32) -> Answer<Rule> {
    const KNOWN: u32 = consts::RULE_PROVIDER | consts::RULE_CLIENT | consts::RULE_QUOTA;
    no_flags(raw.flags, KNOWN)?;
    no_reserved(raw.reserved)?;
    let mut bytes = [0u8; consts::RULE_NAME];
    for (to, from) in bytes.iter_mut().zip(raw.name) {
        *to = from;
    }
    let name = bytes
        .split(|&c| c == 0)
        .next()
        .filter(|name| name.len() < consts::RULE_NAME)
        .and_then(RuleName::new)
        .ok_or_else(|| {
            refuse!(
                EINVAL,
                "rule {}: its name is not 1 to {} letters, digits, dots, dashes and underscores",
                index,
                RuleName::MAX_LEN
            )
        })?;
    let set = |flag| raw.flags & flag != 0;
    let unset = || refuse!(EINVAL, "rule {}: a field is given whose flag is not set", name.as_str());
    let quota = match (set(consts::RULE_QUOTA), raw.quota) {
        (true, bytes) => Some(bytes),
        (false, 0) => None,
        (false, _) => return Err(unset()),
    };
    let action = match raw.action {
        0 => None,
        consts::RULE_ALLOW => Some(Action::Allow),
        consts::RULE_DENY => Some(Action::Deny),
        consts::RULE_PREFER => Some(Action::Prefer),
        consts::RULE_AVOID => Some(Action::Avoid),
        other => return Err(refuse!(EINVAL, "rule {}: {} is no action", name.as_str(), other)),
    };
    let max_class = match raw.max_class {
        0 => None,
        number => match PathClass::from_raw(number) {
            Some(PathClass::Unreachable) | None => {
                return Err(refuse!(EINVAL, "rule {}: {} is no max_class", name.as_str(), number));
            }
            class => class,
        },
    };
    let device = |given: bool, raw: &abi::PciAddress| -> Answer<DeviceMatch> {
        no_reserved(raw.reserved.into())?;
        let addr = PciAddr {
            domain: raw.domain,
            bus: raw.bus,
            devfn: raw.devfn,
        };
        match (given, addr) {
            (true, addr) => match Function::find(addr) {
                Some(_) => Ok(DeviceMatch::At(addr)),
                None => Err(refuse!(
                    ENODEV,
                    "rule {}: {} is no PCI function of this machine",
                    name.as_str(),
                    addr
                )),
            },
            (
                false,
                PciAddr {
                    domain: 0,
                    bus: 0,
                    devfn: 0,
                },
            ) => Ok(DeviceMatch::Any),
            (false, _) => Err(unset()),
        }
    };
    let rule = Rule {
        provider: device(set(consts::RULE_PROVIDER), &raw.provider)?,
        client: device(set(consts::RULE_CLIENT), &raw.client)?,
        action,
        max_class,
        quota,
        ..Rule::new(name)
    };
    rule.check_file_rule()
        .map_err(|flaw| refuse!(EINVAL, "rule {}: {}", name.as_str(), flaw.text()))?;
    Ok(rule)
}
