// SPDX-License-Identifier: GPL-2.0

//! The administrator's rules in force, and the bytes that users, groups and files hold under them.
//!
//! [`crate::policy::rule`] says what rules mean and [`crate::policy::quota`] how bytes are counted; both are pure. This
//! file keeps the list of rules and the byte counts, looks up the credentials of the caller, and makes a [`Charge`] for
//! each buffer, whose drop gives the bytes back.
//!
//! When the rules change, all live buffers are charged again, under the new rules. No buffer loses its memory by that:
//! lowering a quota below current use revokes nothing, and new allocations fail with `EDQUOT`.
//!
//! Context: process context, may sleep. `Rules::state` is a mutex; no lock of p2pmem is taken while it is held, but memory
//! is allocated.

use crate::{
    ext::{
        cred::Credentials,
        refusal::{
            refuse,
            Answer,
            Text, //
        }, //
    },
    mem::{
        buffer::Provider,
        traits::{
            Charge,
            Ledger, //
        }, //
    },
    policy::{
        path::Path,
        quota::{
            self,
            charge,
            charge_unlimited,
            reserved_for_others,
            uncharge,
            Broken,
            ChargeKey,
            ChargeSet,
            ChargeTarget,
            Charged,
            Requester, //
        },
        rule::{
            self,
            shadowed,
            FunctionId,
            Rule,
            RuleName,
            Subject as _, //
        },
        rule_effect::{
            self,
            Applicable,
            RuleEffect,
            RuleOrigin,
            RuleRef, //
        }, //
    }, //
};
use core::fmt::Write as _;
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNode},
    sync::{
        atomic::{AtomicFlag, Relaxed},
        Arc, Mutex,
    },
};

/// An immutable list of rules in the order of evaluation: the administrator's rules by name, a file's as given.
pub(crate) struct RuleSet {
    rules: KVec<Rule>,
    /// The rules that limit the bytes their users may hold.
    limiting: Applicable,
    /// Whether any rule reserves memory.
    reserves: bool,
}

impl RuleSet {
    /// Creates a rule set. `rules` are in the order of evaluation. Errors: `ENOMEM`.
    pub(crate) fn new(rules: KVec<Rule>) -> Result<Arc<Self>> {
        let limiting = Applicable::of(&rules, Rule::limits_holders);
        let reserves = rules.iter().any(|rule| rule.reserve.is_some());
        let rule_set = Self {
            rules,
            limiting,
            reserves,
        };
        Ok(Arc::new(rule_set, GFP_KERNEL_ACCOUNT)?)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

/// Bytes by [`ChargeKey`]. A key without bytes has no entry.
struct ByteCounts(RBTree<ChargeKey, u64>);

impl quota::Store for ByteCounts {
    type Error = Error;

    fn used(&self, key: ChargeKey) -> u64 {
        self.0.get(&key).copied().unwrap_or(0)
    }

    fn set(&mut self, key: ChargeKey, bytes: u64) -> Result {
        if bytes == 0 {
            self.0.remove(&key);
        } else if let Some(used) = self.0.get_mut(&key) {
            *used = bytes;
        } else {
            self.0.try_create_and_insert(key, bytes, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(())
    }
}

/// The properties of a provider that rules and charges depend on.
#[derive(Clone, Copy)]
struct ProviderKey {
    id: u32,
    function: FunctionId,
    size: u64,
    kernel_reserve: u64,
}

impl ProviderKey {
    fn of(provider: &Provider) -> Self {
        Self {
            id: provider.id,
            function: provider.function_id(),
            size: provider.size,
            kernel_reserve: provider.kernel_reserve(),
        }
    }

    fn charge_target(&self) -> ChargeTarget<'_> {
        ChargeTarget {
            id: self.id,
            function: &self.function,
            size: self.size,
            kernel_reserve: self.kernel_reserve,
        }
    }
}

/// The ledger's record of one buffer's charge.
struct ChargeRecord {
    cred: Credentials,
    provider_key: ProviderKey,
    file: u64,
    bytes: u64,
    /// `Some` until the charge is returned.
    charged: Option<Charged>,
    /// The charge under the next rules, while [`State::enforce`] computes it.
    anew: Option<Charged>,
}

/// Everything that `Rules::state` protects.
struct State {
    rule_set: Arc<RuleSet>,
    counts: ByteCounts,
    /// Charges by their numbers with reversed bits. Ascending keys would make the tree twice as deep as necessary.
    charges: RBTree<u64, ChargeRecord>,
    next_charge: u64,
    next_rule: u64,
}

/// The administrator's rules in force, and what is charged under them.
#[pin_data]
pub(crate) struct Rules {
    #[pin]
    state: Mutex<State>,
    /// Whether any rule is in force. Written with `state` held, read without.
    some: AtomicFlag,
}

impl Ledger for Rules {
    fn uncharge(&self, id: u64) {
        let mut state = self.state.lock();
        let mut record = state.charges.remove(&id);
        if let Some(charged) = record.as_mut().and_then(|record| record.charged.take()) {
            uncharge(&mut state.counts, charged);
        }
        drop(state);
        drop(record);
    }
}

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

impl Rules {
    /// Creates the ledger without any rule. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let rule_set = RuleSet::new(KVec::new())?;
        Arc::pin_init(
            pin_init!(Self {
                state <- new_mutex!(State {
                    rule_set,
                    counts: ByteCounts(RBTree::new()),
                    charges: RBTree::new(),
                    next_charge: 1,
                    next_rule: 1,
                }),
                some: AtomicFlag::new(false),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the rules in force.
    pub(crate) fn rule_set(&self) -> Arc<RuleSet> {
        self.state.lock().rule_set.clone()
    }

    /// Whether no rule is in force. The answer may be outdated when it is used.
    pub(crate) fn are_none(&self) -> bool {
        !self.some.load(Relaxed)
    }

    /// Replaces the rules in force and charges all buffers again. Errors: `ENOMEM`; nothing has changed then.
    fn enforce(&self, state: &mut State, rule_set: Arc<RuleSet>) -> Result {
        let some = !rule_set.is_empty();
        state.enforce(rule_set)?;
        self.some.store(some, Relaxed);
        Ok(())
    }

    /// Puts `rule` into force, instead of rule `old` if that is in force. Returns the id of the new rule.
    ///
    /// Errors: `EINVAL` if the rule contradicts itself, `ENOSPC` if there are [`rule::MOST`] rules, `ENOMEM`. Nothing has
    /// changed then.
    pub(crate) fn put(&self, rule: &Rule, old: Option<u64>) -> Answer<u64> {
        rule.check().map_err(|flaw| refuse!(EINVAL, "{}", flaw.text()))?;
        let mut state = self.state.lock();
        let mut rules = KVec::with_capacity(state.rule_set.rules.len() + 1, GFP_KERNEL)?;
        let id = state.next_rule;
        let mut new = Some(Rule { id, ..*rule });
        for other in state.rule_set.rules.iter().filter(|other| Some(other.id) != old) {
            if let Some(rule) = new.take_if(|rule| rule.name < other.name) {
                rules.push(rule, GFP_KERNEL)?;
            }
            rules.push(*other, GFP_KERNEL)?;
        }
        if let Some(rule) = new {
            rules.push(rule, GFP_KERNEL)?;
        }
        if rules.len() > rule::MAX_RULES {
            return Err(refuse!(
                ENOSPC,
                "{} rules are in force, which is the maximum: remove one",
                rule::MAX_RULES
            ));
        }
        self.enforce(&mut state, RuleSet::new(rules)?)?;
        state.next_rule += 1;
        Ok(id)
    }

    /// Ends the rule `id`. Buffers that were charged under it are charged under the remaining rules.
    ///
    /// Errors: `ENOMEM`; the rule stays in force then.
    pub(crate) fn remove(&self, id: u64) -> Answer {
        let mut state = self.state.lock();
        let mut rules = KVec::with_capacity(state.rule_set.rules.len(), GFP_KERNEL)?;
        for rule in state.rule_set.rules.iter().filter(|rule| rule.id != id) {
            rules.push(*rule, GFP_KERNEL)?;
        }
        Ok(self.enforce(&mut state, RuleSet::new(rules)?)?)
    }

    /// Returns the bytes of the kernel reserve that a rule sets for a provider, if one does.
    pub(crate) fn kernel_reserve(&self, function: &FunctionId) -> Option<u64> {
        rule_effect::kernel_reserve(&self.rule_set().rules, function)
    }

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
        Some((applicable_rules.source().name(rule), effect.denied.is_none()))
    }

    /// Returns the text of `status` for rule `id`: in force, shadowed by another rule, or with more bytes held than its
    /// quota.
    pub(crate) fn status_text(&self, id: u64) -> Text {
        let state = self.state.lock();
        let Some(at) = state.rule_set.rules.iter().position(|rule| rule.id == id) else {
            return Text::new(fmt!("not in force: write 1 to enable"));
        };
        let rule = &state.rule_set.rules[at];
        if let Some((attribute, before)) = shadowed(&state.rule_set.rules, at) {
            let name = &state.rule_set.rules[before].name;
            return Text::new(fmt!(
                "in force, but its {} never decides: {} always comes first",
                attribute.as_str(),
                name.as_str()
            ));
        }
        for (key, &used) in state.counts.0.iter() {
            match (key, rule.quota, rule.group_quota) {
                (ChargeKey::User(of, uid), Some(limit), _) if *of == id && used > limit => {
                    return Text::new(fmt!(
                        "in force; uid {} holds {} bytes of {}: it keeps them, and gets no more",
                        uid,
                        used,
                        limit
                    ));
                }
                (ChargeKey::Group(of), _, Some(limit)) if *of == id && used > limit => {
                    return Text::new(fmt!(
                        "in force; those it is for hold {} bytes of {} together: they keep them, and get no more",
                        used,
                        limit
                    ));
                }
                _ => {}
            }
        }
        Text::new(fmt!("in force"))
    }

    /// Writes a line for each user, group and provider with bytes under rule `id`, as many as fit.
    pub(crate) fn usage(&self, id: u64, out: &mut kernel::str::Formatter<'_>) {
        let state = self.state.lock();
        for (key, used) in state.counts.0.iter() {
            let line = match key {
                ChargeKey::User(of, uid) if *of == id => out.write_fmt(fmt!("uid {} {}\n", uid, used)),
                ChargeKey::Group(of) if *of == id => out.write_fmt(fmt!("group {}\n", used)),
                ChargeKey::Reserve(of, provider) if *of == id => {
                    out.write_fmt(fmt!("provider {} {}\n", provider, used))
                }
                _ => Ok(()),
            };
            if line.is_err() {
                return;
            }
        }
    }
}

/// A small cache of charge sets by credentials and provider, with round-robin replacement.
struct ChargeSets {
    charge_sets: KVec<(Credentials, u32, ChargeSet)>,
    /// Index of the entry to replace next.
    oldest: usize,
}

impl ChargeSets {
    /// Number of entries. Most buffers belong to few programs.
    const MOST: usize = 16;

    fn new() -> Result<Self> {
        Ok(Self {
            charge_sets: KVec::with_capacity(Self::MOST, GFP_KERNEL)?,
            oldest: 0,
        })
    }

    /// Returns the charge set of a charged buffer under `rule_set`, which need not be the rules in force.
    fn of(&mut self, rule_set: &RuleSet, record: &ChargeRecord) -> ChargeSet {
        let same = |(cred, provider, _): &&(Credentials, u32, ChargeSet)| {
            cred.is_same(&record.cred) && *provider == record.provider_key.id
        };
        if let Some((_, _, charge_set)) = self.charge_sets.iter().find(same) {
            return charge_set.for_file(record.file);
        }
        let requester = Requester {
            rules: &rule_set.rules,
            applicable: Applicable::to(&rule_set.rules, &record.cred),
            uid: record.cred.uid(),
            file: record.file,
            file_rules: &[],
        };
        // The keys of a charge set depend on no byte count, and limits do not matter here, so an empty store is good
        // enough.
        let charge_set = ChargeSet::of(
            &ByteCounts(RBTree::new()),
            &requester,
            &record.provider_key.charge_target(),
        );
        let new = (record.cred.clone(), record.provider_key.id, charge_set);
        if self.charge_sets.len() < Self::MOST {
            // Cannot fail: the capacity was reserved in `new`.
            let _ = self.charge_sets.push_within_capacity(new);
        } else if let Some(old) = self.charge_sets.get_mut(self.oldest) {
            *old = new;
            self.oldest = (self.oldest + 1) % Self::MOST;
        }
        charge_set
    }
}

impl State {
    /// Replaces the rules in force and charges all buffers again. Errors: `ENOMEM`; nothing has changed then.
    ///
    /// The caller holds `Rules::state`, for which every allocation waits. So this evaluates the rules once for each pair of
    /// credentials and provider, not for each buffer, and allocates for each new key, not for each buffer.
    fn enforce(&mut self, rule_set: Arc<RuleSet>) -> Result {
        let mut counts = ByteCounts(RBTree::new());
        let mut charge_sets = ChargeSets::new()?;
        let charged = self.charges.values_mut().try_for_each(|record| {
            let charge_set = charge_sets.of(&rule_set, record);
            record.anew = Some(charge_unlimited(&mut counts, &charge_set, record.bytes)?);
            Ok::<(), Error>(())
        });
        if let Err(e) = charged {
            for record in self.charges.values_mut() {
                record.anew = None;
            }
            return Err(e);
        }
        for record in self.charges.values_mut() {
            record.charged = record.anew.take();
        }
        self.counts = counts;
        self.rule_set = rule_set;
        Ok(())
    }
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
        self.rule_set.reserves || self.rule_set.limiting.meets(&self.applicable)
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

    /// Returns the rules for looking up names.
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            admin: &self.rule_set.rules,
            ..Source::NONE
        }
    }
}

/// The rules and the uid of a decision, for its explanation.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    admin: &'a [Rule],
    file_rules: &'a [Rule],
    pub(crate) uid: u32,
}

impl Source<'_> {
    /// No rules.
    pub(crate) const NONE: Self = Self {
        admin: &[],
        file_rules: &[],
        uid: 0,
    };

    /// Returns the name of a rule.
    pub(crate) fn name(&self, rule: RuleRef) -> RuleName {
        let rules = match rule.set {
            RuleOrigin::Admin => self.admin,
            RuleOrigin::File => self.file_rules,
        };
        rules.get(rule.at).map_or(RuleName::EMPTY, |rule| rule.name)
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
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            file_rules: self.file_rules(),
            uid: self.cred.uid(),
            ..self.applicable_rules.source()
        }
    }

    /// Returns the number of the file.
    pub(crate) fn file(&self) -> u64 {
        self.file
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

    /// Charges `size` bytes of `provider` to the caller's cgroup, and to the users, groups and the file of the rules.
    ///
    /// Context: process context, may sleep; takes `Rules::state`.
    ///
    /// Errors: [`NotCharged`]; nothing is charged then.
    pub(crate) fn charge(&self, provider: &Provider, size: u64) -> core::result::Result<Charge, NotCharged> {
        let held = provider.charge_cgroup(size).map_err(|e| match e {
            e if e == EAGAIN => NotCharged::Cgroup,
            e => NotCharged::Error(e),
        })?;
        let provider_key = ProviderKey::of(provider);
        let record = ChargeRecord {
            cred: self.cred.clone(),
            provider_key,
            file: self.file,
            bytes: size,
            charged: None,
            anew: None,
        };
        // Allocates before taking the lock.
        let reservation = kernel::rbtree::RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT).map_err(NotCharged::Error)?;
        let mut state = self.rules.state.lock();
        if !Arc::ptr_eq(&state.rule_set, &self.applicable_rules.rule_set) {
            return Err(NotCharged::Stale);
        }
        let charge_set = ChargeSet::of(&state.counts, &self.requester(), &provider_key.charge_target());
        let charged = charge(&mut state.counts, &charge_set, size).map_err(|e| match e {
            quota::ChargeError::Broken(broken) => NotCharged::Broken(broken),
            quota::ChargeError::Store(e) => NotCharged::Error(e),
        })?;
        let id = state.next_charge.reverse_bits();
        state.next_charge += 1;
        let node: RBTreeNode<u64, ChargeRecord> = reservation.into_node(
            id,
            ChargeRecord {
                charged: Some(charged),
                ..record
            },
        );
        state.charges.insert(node);
        drop(state);
        Ok(Charge::new(self.rules.clone(), id, held))
    }
}

/// Records in `effect` that a request would break a limit.
pub(crate) fn breaks(effect: &mut RuleEffect, broken: Broken) {
    match broken {
        Broken::Quota(over) => effect.over = Some(over),
        Broken::Reserve(rule) => (effect.reserved_for_others, effect.reserved_by) = (u64::MAX, Some(rule)),
    }
}
