// SPDX-License-Identifier: GPL-2.0

//! The administrator's rules in force, and the bytes that users, groups and files hold under them.
//!
//! [`crate::policy::rule`] says what rules mean and [`crate::policy::quota`] how bytes are counted; both are pure. This
//! file keeps the list of rules and the byte counts. [`check`] applies them to a request of a caller, and makes a
//! [`Charge`](crate::mem::traits::Charge) for each buffer, whose drop gives the bytes back.
//!
//! When the rules change, all live buffers are charged again, under the new rules. No buffer loses its memory by that:
//! lowering a quota below current use revokes nothing, and new allocations fail with `EDQUOT`. While no rule depends on byte
//! counts, nothing is counted.
//!
//! Context: process context, may sleep. `Rules::state` is a mutex, for which every allocation waits; no lock of p2pmem is taken
//! while it is held. Only changes of rules allocate memory with it held.

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
        traits::Ledger, //
    },
    policy::{
        quota::{
            self,
            charge_unlimited,
            uncharge,
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
            Subject as _, //
        },
        rule_effect::{
            self,
            Applicable, //
        }, //
    }, //
};
use core::fmt::Write as _;
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{RBTree, RBTreeNodeReservation},
    sync::{
        atomic::{AtomicFlag, Relaxed},
        Arc, Mutex,
    },
};

pub(crate) mod check;

/// An immutable list of rules in the order of evaluation: the administrator's rules by name, a file's as given.
pub(crate) struct RuleSet {
    rules: KVec<Rule>,
    /// The rules that limit the bytes their users may hold.
    limiting: Applicable,
    /// Whether any rule reserves memory.
    reserves: bool,
    /// For a file's own rules that depend on byte counts.
    _counting: Option<Counting>,
}

impl RuleSet {
    /// Creates a file's own rule set, whose byte counts are those of `ledger`. `rules` are in the order of evaluation. Errors:
    /// `ENOMEM`.
    pub(crate) fn of_file(rules: KVec<Rule>, ledger: &Arc<Rules>) -> Result<Arc<Self>> {
        let counting = match rules.iter().any(Rule::counts) {
            true => Some(ledger.count()?),
            false => None,
        };
        Self::new(rules, counting)
    }

    fn new(rules: KVec<Rule>, counting: Option<Counting>) -> Result<Arc<Self>> {
        let limiting = Applicable::of(&rules, Rule::limits_holders);
        let reserves = rules.iter().any(|rule| rule.reserve.is_some());
        let rule_set = Self {
            rules,
            limiting,
            reserves,
            _counting: counting,
        };
        Ok(Arc::new(rule_set, GFP_KERNEL_ACCOUNT)?)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns whether decisions for a user that has the rules `applicable` depend on byte counts.
    fn counts(&self, applicable: &Applicable) -> bool {
        self.reserves || self.limiting.meets(applicable)
    }
}

/// Bytes by [`ChargeKey`]. A key without bytes has no entry.
struct ByteCounts(RBTree<ChargeKey, u64>);

impl ByteCounts {
    /// Sets the bytes of a key. A new key gets the memory that `new` returns. Errors: those of `new`.
    fn put<E>(
        &mut self,
        key: ChargeKey,
        bytes: u64,
        new: impl FnOnce() -> core::result::Result<RBTreeNodeReservation<ChargeKey, u64>, E>,
    ) -> core::result::Result<(), E> {
        if bytes == 0 {
            self.0.remove(&key);
        } else if let Some(used) = self.0.get_mut(&key) {
            *used = bytes;
        } else {
            self.0.insert(new()?.into_node(key, bytes));
        }
        Ok(())
    }
}

impl quota::Store for ByteCounts {
    type Error = Error;

    fn used(&self, key: ChargeKey) -> u64 {
        self.0.get(&key).copied().unwrap_or(0)
    }

    fn set(&mut self, key: ChargeKey, bytes: u64) -> Result {
        self.put(key, bytes, || RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT))
    }
}

/// Byte counts, and memory for new keys. A key for which there is no memory cannot be set.
struct Prepared<'a> {
    counts: &'a mut ByteCounts,
    spare: &'a mut KVec<RBTreeNodeReservation<ChargeKey, u64>>,
}

impl quota::Store for Prepared<'_> {
    type Error = ();

    fn used(&self, key: ChargeKey) -> u64 {
        self.counts.used(key)
    }

    fn set(&mut self, key: ChargeKey, bytes: u64) -> core::result::Result<(), ()> {
        let Self { counts, spare } = self;
        counts.put(key, bytes, || spare.pop().ok_or(()))
    }
}

/// Byte counts are kept as long as one of these exists.
struct Counting(Arc<Rules>);

impl Drop for Counting {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.counting -= 1;
        let old = state.stop_counting();
        drop(state);
        drop(old);
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
    /// What is charged, if bytes were counted when the buffer was charged. Meaningless after counting stopped.
    charged: Option<Charged>,
    /// The charge under the next rules, while [`State::count_all`] computes it.
    anew: Option<Charged>,
}

/// Everything that `Rules::state` protects.
struct State {
    rule_set: Arc<RuleSet>,
    /// Empty while nothing is counted.
    counts: ByteCounts,
    /// Number of [`Counting`]s.
    counting: u64,
    /// Charges by their numbers with reversed bits. Ascending keys would make the tree twice as deep as necessary.
    charges: RBTree<u64, ChargeRecord>,
    next_charge: u64,
    next_rule: u64,
    /// Rules that have ended, but are in force until the rules change again, because memory was missing. Has space for each rule in
    /// force.
    ended: KVec<u64>,
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

impl Rules {
    /// Creates the ledger without any rule. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let rule_set = RuleSet::new(KVec::new(), None)?;
        Arc::pin_init(
            pin_init!(Self {
                state <- new_mutex!(State {
                    rule_set,
                    counts: ByteCounts(RBTree::new()),
                    counting: 0,
                    charges: RBTree::new(),
                    next_charge: 1,
                    next_rule: 1,
                    ended: KVec::new(),
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

    /// Counts the bytes of all buffers, until the result is dropped. Errors: `ENOMEM`.
    fn count(self: &Arc<Self>) -> Result<Counting> {
        let mut state = self.state.lock();
        if !state.counts() {
            let rule_set = state.rule_set.clone();
            state.count_all(&rule_set)?;
        }
        state.counting += 1;
        drop(state);
        Ok(Counting(self.clone()))
    }

    /// Puts `rule` into force, instead of rule `old` if that is in force. Returns the id of the new rule.
    ///
    /// Errors: `EINVAL` if the rule contradicts itself, `ENOSPC` if there are [`rule::MAX_RULES`] rules, `ENOMEM`. Nothing has
    /// changed then.
    pub(crate) fn put(&self, rule: &Rule, old: Option<u64>) -> Answer<u64> {
        rule.check().map_err(|flaw| refuse!(EINVAL, "{}", flaw.text()))?;
        let mut state = self.state.lock();
        let mut rules = KVec::with_capacity(state.rule_set.rules.len() + 1, GFP_KERNEL)?;
        let ended = KVec::with_capacity(state.rule_set.rules.len() + 1, GFP_KERNEL)?;
        let id = state.next_rule;
        let mut new = Some(Rule { id, ..*rule });
        let stays = |other: &&Rule| Some(other.id) != old && !state.ended.contains(&other.id);
        for other in state.rule_set.rules.iter().filter(stays) {
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
        self.enforce(&mut state, RuleSet::new(rules, None)?)?;
        state.ended = ended;
        state.next_rule += 1;
        Ok(id)
    }

    /// Ends the rule `id`. Buffers that were charged under it are charged under the remaining rules.
    ///
    /// Errors: `ENOMEM`; the rule stays in force then.
    pub(crate) fn remove(&self, id: u64) -> Answer {
        let mut state = self.state.lock();
        let mut rules = KVec::with_capacity(state.rule_set.rules.len(), GFP_KERNEL)?;
        let stays = |rule: &&Rule| rule.id != id && !state.ended.contains(&rule.id);
        for rule in state.rule_set.rules.iter().filter(stays) {
            rules.push(*rule, GFP_KERNEL)?;
        }
        self.enforce(&mut state, RuleSet::new(rules, None)?)?;
        state.ended.clear();
        Ok(())
    }

    /// Ends the rule `id` when the rules change the next time, after [`Self::remove`] has failed. Allocates nothing.
    pub(crate) fn remove_later(&self, id: u64) {
        // Has space: `put` has made it, and a rule ends once.
        let _ = self.state.lock().ended.push_within_capacity(id);
    }

    /// Returns the bytes of the kernel reserve that a rule sets for a provider, if one does.
    pub(crate) fn kernel_reserve(&self, function: &FunctionId) -> Option<u64> {
        rule_effect::kernel_reserve(&self.rule_set().rules, function)
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
    /// Returns whether bytes are counted.
    fn counts(&self) -> bool {
        self.rule_set.counts(&Applicable::ALL) || self.counting > 0
    }

    /// Forgets the byte counts if nothing depends on them any more. Returns them, to be dropped without the lock.
    fn stop_counting(&mut self) -> Option<ByteCounts> {
        (!self.counts()).then(|| core::mem::replace(&mut self.counts, ByteCounts(RBTree::new())))
    }

    /// Replaces the rules in force and charges all buffers again. Errors: `ENOMEM`; nothing has changed then.
    fn enforce(&mut self, rule_set: Arc<RuleSet>) -> Result {
        if rule_set.counts(&Applicable::ALL) || self.counting > 0 {
            self.count_all(&rule_set)?;
        }
        self.rule_set = rule_set;
        drop(self.stop_counting());
        Ok(())
    }

    /// Charges all buffers again, under `rule_set`. Errors: `ENOMEM`; nothing has changed then.
    ///
    /// The caller holds `Rules::state`, for which every allocation waits. So this evaluates the rules once for each pair of
    /// credentials and provider, not for each buffer, and allocates for each new key, not for each buffer.
    fn count_all(&mut self, rule_set: &RuleSet) -> Result {
        let mut counts = ByteCounts(RBTree::new());
        let mut charge_sets = ChargeSets::new()?;
        let charged = self.charges.values_mut().try_for_each(|record| {
            let charge_set = charge_sets.of(rule_set, record);
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
        Ok(())
    }
}
