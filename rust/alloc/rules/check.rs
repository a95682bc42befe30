// SPDX-License-Identifier: GPL-2.0

//! The rules as they apply to one request: their effect on each provider, and the charge for the buffer.
//!
//! Context: process context, may sleep. `Rules::state` is held for short sections; the books of a provider are locked while it is
//! held.

use crate::{
    alloc::rules::{
        ByteCounts,
        ProviderKey,
        RuleSet,
        Rules, //
    },
    ext::cred::Credentials,
    mem::buffer::{
        Buffer,
        Provider, //
    },
    policy::{
        path::Path,
        quota::{
            self,
            charge,
            reserved_for_others,
            Broken,
            ChargeSet,
            Requester, //
        },
        rule::{
            FunctionId,
            Rule,
            RuleName,
            Subject as _, //
        },
        rule_effect::{
            Applicable,
            RuleEffect,
            RuleOrigin,
            RuleRef, //
        }, //
    }, //
};
use kernel::{
    prelude::*,
    rbtree::RBTreeNode,
    sync::Arc, //
};

/// Why a buffer was not charged.
pub(crate) enum NotCharged {
    /// A quota or a reserve of a rule does not allow it.
    Broken(Broken),
    /// The dmem limit of the caller's cgroup does not allow it.
    Cgroup,
    /// The rules changed since the [`RuleCheck`] was made.
    Stale,
    Error(Error),
}

/// A set of rules, and which of them apply to some credentials. The effect on a provider and its paths does not change,
/// except by byte counts.
#[derive(Clone)]
pub(crate) struct ApplicableRules {
    rule_set: Arc<RuleSet>,
    applicable: Applicable,
}

impl ApplicableRules {
    /// Whether both have the same rules, applied to the same credentials.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.has_rules_of(other) && self.applicable == other.applicable
    }

    /// Whether both have the same rules.
    pub(crate) fn has_rules_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rule_set, &other.rule_set)
    }

    /// Whether any of these rules depends on byte counts.
    fn counts(&self) -> bool {
        self.rule_set.counts(&self.applicable)
    }

    /// Returns the effect on `provider` for `clients`, except for what byte counts decide.
    pub(crate) fn effect(&self, provider: &FunctionId, clients: &[FunctionId], paths: &[Path]) -> RuleEffect {
        let mut effect = RuleEffect::NONE;
        effect.add(
            RuleOrigin::Admin,
            &self.rule_set.rules,
            &self.applicable,
            provider,
            clients,
            paths,
        );
        effect
    }
}

impl Rules {
    /// Returns the name of the rule that keeps `client` from reaching a buffer of `cred` in `provider` over `path`, and
    /// whether the length of the path is the reason. `None` if the rules allow it.
    pub(crate) fn denying_rule(
        &self,
        cred: &Credentials,
        provider: &Provider,
        client: &FunctionId,
        path: &Path,
    ) -> Option<(RuleName, bool)> {
        let rule_set = self.rule_set();
        if rule_set.is_empty() {
            return None;
        }
        let (client, path) = (core::slice::from_ref(client), core::slice::from_ref(path));
        let applicable = Applicable::to(&rule_set.rules, cred);
        let applicable_rules = ApplicableRules { rule_set, applicable };
        let effect = applicable_rules.effect(&provider.function_id(), client, path);
        let rule = effect.denied.or(effect.too_far)?;
        Some((applicable_rules.rule_set.name(rule.at), effect.denied.is_none()))
    }
}

/// The rules and the uid of a decision, for its explanation.
pub(crate) struct Source {
    admin: Arc<RuleSet>,
    file_rules: Option<Arc<RuleSet>>,
    pub(crate) uid: u32,
}

impl Source {
    /// Returns the name of a rule.
    pub(crate) fn name(&self, rule: RuleRef) -> RuleName {
        let rule_set = match rule.set {
            RuleOrigin::Admin => Some(&self.admin),
            RuleOrigin::File => self.file_rules.as_ref(),
        };
        rule_set.map_or(RuleName::EMPTY, |rule_set| rule_set.name(rule.at))
    }
}

/// The rules for one request: the set in force when the request began, the file's own rules, and the caller's credentials.
pub(crate) struct RuleCheck<'a> {
    rules: &'a Arc<Rules>,
    applicable_rules: ApplicableRules,
    file_rules: Option<Arc<RuleSet>>,
    cred: Credentials,
    file: u64,
}

impl<'a> RuleCheck<'a> {
    /// Takes the rules in force for a request of the current task through `file`, whose own rules are `file_rules`.
    pub(crate) fn new(rules: &'a Arc<Rules>, file_rules: Option<Arc<RuleSet>>, file: u64) -> Self {
        let rule_set = rules.rule_set();
        let cred = Credentials::current();
        let applicable = Applicable::to(&rule_set.rules, &cred);
        Self {
            rules,
            applicable_rules: ApplicableRules { rule_set, applicable },
            file_rules,
            cred,
            file,
        }
    }

    fn file_rules(&self) -> &[Rule] {
        self.file_rules.as_ref().map_or(&[], |file_rules| &file_rules.rules)
    }

    /// Whether there is no rule at all, neither an administrator's nor the file's own.
    pub(crate) fn is_empty(&self) -> bool {
        self.applicable_rules.rule_set.is_empty() && self.file_rules().is_empty()
    }

    /// Returns the rules if their effect does not change between requests: no byte counts, no rules of the file's own.
    pub(crate) fn applicable_rules(&self) -> Option<&ApplicableRules> {
        (self.file_rules().is_empty() && !self.applicable_rules.counts()).then_some(&self.applicable_rules)
    }

    /// Returns the rules for looking up names.
    pub(crate) fn into_source(self) -> Source {
        Source {
            uid: self.cred.uid(),
            admin: self.applicable_rules.rule_set,
            file_rules: self.file_rules,
        }
    }

    fn requester(&self) -> Requester<'_> {
        let ApplicableRules { rule_set, applicable } = &self.applicable_rules;
        Requester {
            // Without rules that depend on byte counts nothing has to be searched.
            rules: if self.applicable_rules.counts() {
                &rule_set.rules
            } else {
                &[]
            },
            applicable: *applicable,
            uid: self.cred.uid(),
            file: self.file,
            file_rules: self.file_rules(),
        }
    }

    /// Returns the effect on `provider` for `clients` and a buffer of `size` bytes, with the present byte counts.
    pub(crate) fn effect(&self, provider: &Provider, clients: &[FunctionId], paths: &[Path], size: u64) -> RuleEffect {
        if self.is_empty() {
            return RuleEffect::NONE;
        }
        let provider_key = ProviderKey::of(provider);
        let everyone = Applicable::ALL;
        let mut effect = self.applicable_rules.effect(&provider_key.function, clients, paths);
        effect.add(
            RuleOrigin::File,
            self.file_rules(),
            &everyone,
            &provider_key.function,
            clients,
            paths,
        );
        let requester = self.requester();
        let state = self.rules.state.lock();
        (effect.reserved_for_others, effect.reserved_by) =
            reserved_for_others(&state.counts, &requester, &provider_key.charge_target());
        let broken =
            ChargeSet::of(&state.counts, &requester, &provider_key.charge_target()).broken(&state.counts, size);
        drop(state);
        if let Some(broken) = broken {
            breaks(&mut effect, broken);
        }
        effect
    }

    /// Registers the caller's new buffer with its provider, and charges it to the users, groups and the file of the rules.
    ///
    /// Context: process context, may sleep; takes `Rules::state` if anything is counted.
    ///
    /// Errors: [`NotCharged`]; the buffer is neither registered nor charged then.
    pub(crate) fn register(&self, buffer: &Arc<Buffer>) -> core::result::Result<(), NotCharged> {
        let rule_set = &self.applicable_rules.rule_set;
        let provider_key = ProviderKey::of(&buffer.provider);
        let (mut locked, mut keys) = (false, 0);
        // At most three rounds: without the lock, with the lock, and with memory for all keys of the charge.
        loop {
            let node = RBTreeNode::new(buffer.id, buffer.clone(), GFP_KERNEL_ACCOUNT).map_err(NotCharged::Error)?;
            let mut spare = ByteCounts::spare(keys).map_err(NotCharged::Error)?;
            let mut state = locked.then(|| self.rules.state.lock());
            let mut books = buffer.provider.books();
            if !books.is_live() {
                return Err(NotCharged::Error(ENODEV));
            }
            if !self.rules.is_in_force(rule_set) {
                return Err(NotCharged::Stale);
            }
            if let Some(state) = &state {
                books.counted = state.counts();
            }
            match &mut state {
                Some(state) if books.counted => {
                    if keys > 0 {
                        core::mem::swap(&mut state.counts.spare, &mut spare);
                    }
                    let charge_set = ChargeSet::of(&state.counts, &self.requester(), &provider_key.charge_target());
                    match charge(&mut state.counts, &charge_set, buffer.size) {
                        Ok(_) => {}
                        Err(quota::ChargeError::Broken(broken)) => return Err(NotCharged::Broken(broken)),
                        Err(quota::ChargeError::Store(())) => {
                            keys = ChargeSet::KEYS;
                            continue;
                        }
                    }
                }
                None if books.counted => {
                    locked = true;
                    continue;
                }
                _ => {}
            }
            books.add(node);
            return Ok(());
        }
    }
}

/// Records in `effect` that a request would break a limit.
pub(crate) fn breaks(effect: &mut RuleEffect, broken: Broken) {
    match broken {
        Broken::Quota(over) => effect.over = Some(over),
        Broken::Reserve(rule) => (effect.reserved_for_others, effect.reserved_by) = (u64::MAX, Some(rule)),
    }
}
