// SPDX-License-Identifier: GPL-2.0

//! The administrator's rules in force, and the bytes that users, groups and files hold under them.
//!
//! [`crate::policy::rule`] says what rules mean and [`crate::policy::quota`] how bytes are counted; both are pure. This
//! file keeps the list of rules and the byte counts. [`check`] applies them to a request of a caller, and charges the buffer.
//!
//! The providers know all charged buffers, and rules and a buffer determine the keys that the buffer is charged to. So when the
//! rules change, all charged buffers are counted again, under the new rules. No buffer loses its memory by that: lowering a
//! quota below current use revokes nothing, and new allocations fail with `EDQUOT`. While no rule depends on byte counts,
//! nothing is counted, and buffers begin and end without `Rules::state`.
//!
//! Context: process context, may sleep. `Rules::changes` and `Rules::state` are mutexes. Allocations wait for `state` alone; only
//! the books of a provider are locked while it is held, and no memory is allocated. Changes of rules hold `changes`, under which
//! they list the providers and allocate.

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
        buffer::{
            Buffer,
            Provider, //
        },
        provider::Counted, //
    },
    policy::{
        quota::{
            self,
            charge_unlimited,
            uncharge,
            ChargeKey,
            ChargeSet,
            ChargeTarget,
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
        atomic::{Atomic, Relaxed},
        Arc, Mutex, MutexGuard,
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
    /// For a file's own rules that depend on byte counts. The last decisions of the file keep the rules, too.
    _counting: Option<Counting>,
}

impl RuleSet {
    /// Creates a file's own rule set, whose byte counts are those of `ledger`. `rules` are in the order of evaluation. Errors:
    /// `ENOMEM`.
    pub(crate) fn of_file(rules: KVec<Rule>, ledger: &Arc<Rules>, providers: impl ProviderList) -> Result<Arc<Self>> {
        let counting = match rules.iter().any(Rule::counts) {
            true => Some(ledger.count_bytes(providers)?),
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

    /// Returns the name of the rule with that index.
    fn name(&self, at: usize) -> RuleName {
        self.rules.get(at).map_or(RuleName::EMPTY, |rule| rule.name)
    }

    /// Returns whether decisions for a user that has the rules `applicable` depend on byte counts.
    fn counts(&self, applicable: &Applicable) -> bool {
        self.reserves || self.limiting.meets(applicable)
    }
}

/// Bytes by [`ChargeKey`]. A key without bytes has no entry.
struct ByteCounts {
    bytes: RBTree<ChargeKey, u64>,
    /// Memory for new keys.
    spare: KVec<RBTreeNodeReservation<ChargeKey, u64>>,
}

impl ByteCounts {
    /// Returns counts without any key, and with the memory `spare` for new ones.
    fn new(spare: KVec<RBTreeNodeReservation<ChargeKey, u64>>) -> Self {
        let bytes = RBTree::new();
        Self { bytes, spare }
    }

    /// Allocates memory for `keys` new keys. Errors: `ENOMEM`.
    fn spare(keys: usize) -> Result<KVec<RBTreeNodeReservation<ChargeKey, u64>>> {
        let mut spare = KVec::with_capacity(keys, GFP_KERNEL_ACCOUNT)?;
        while spare.len() < keys {
            spare.push(RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT)?, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(spare)
    }
}

impl quota::Store for ByteCounts {
    /// There is no memory for a new key.
    type Error = ();

    fn used(&self, key: ChargeKey) -> u64 {
        self.bytes.get(&key).copied().unwrap_or(0)
    }

    fn set(&mut self, key: ChargeKey, bytes: u64) -> core::result::Result<(), ()> {
        if bytes == 0 {
            self.bytes.remove(&key);
        } else if let Some(used) = self.bytes.get_mut(&key) {
            *used = bytes;
        } else {
            self.bytes.insert(self.spare.pop().ok_or(())?.into_node(key, bytes));
        }
        Ok(())
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

/// Returns the keys that a buffer is charged to under `rule_set`, which need not be the rules in force.
fn charge_set(rule_set: &RuleSet, buffer: &Buffer) -> ChargeSet {
    let requester = Requester {
        rules: &rule_set.rules,
        applicable: Applicable::to(&rule_set.rules, &buffer.cred),
        uid: buffer.cred.uid(),
        file: buffer.file,
        file_rules: &[],
    };
    // The keys depend on no byte count, and limits do not matter here, so an empty store is good enough.
    let provider_key = ProviderKey::of(&buffer.provider);
    ChargeSet::of(&ByteCounts::new(KVec::new()), &requester, &provider_key.charge_target())
}

/// Everything that `Rules::state` protects.
struct State {
    rule_set: Arc<RuleSet>,
    /// Empty while nothing is counted.
    counts: ByteCounts,
    /// Number of [`Counting`]s.
    counting: u64,
}

/// Everything that `Rules::changes` protects.
pub(crate) struct Changes {
    next_rule: u64,
    /// Rules that have ended, but are in force until the rules change again, because memory was missing. Has space for each rule in
    /// force.
    ended: KVec<u64>,
}

/// Returns all providers. Called with `Rules::changes` held, so no provider is added until the rules have changed.
pub(crate) trait ProviderList: FnOnce() -> Result<KVec<Arc<Provider>>> {}

impl<F: FnOnce() -> Result<KVec<Arc<Provider>>>> ProviderList for F {}

/// The administrator's rules in force, and what is charged under them.
#[pin_data]
pub(crate) struct Rules {
    /// The set without any rule.
    none: Arc<RuleSet>,
    /// The address of the rules in force. Written with `state` held, read without.
    in_force: Atomic<usize>,
    #[pin]
    changes: Mutex<Changes>,
    #[pin]
    state: Mutex<State>,
}

impl Counted for Buffer {
    type Ledger = Rules;

    fn uncharge(rules: &Rules, provider: &Provider, id: u64) {
        let mut state = rules.state.lock();
        let mut books = provider.books();
        books.counted = state.counts();
        let ended = books.end_charge(id);
        if let Some(buffer) = ended.as_ref().filter(|_| books.counted) {
            let charged = charge_set(&state.rule_set, buffer).charged(buffer.size);
            uncharge(&mut state.counts, charged);
        }
        drop(books);
        drop(state);
        drop(ended);
    }
}

/// Returns the address of a rule set, to compare it with that of another one.
fn address(rule_set: &Arc<RuleSet>) -> usize {
    Arc::as_ptr(rule_set) as usize
}

impl Rules {
    /// Creates the ledger without any rule. Errors: `ENOMEM`.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let none = RuleSet::new(KVec::new(), None)?;
        let rule_set = none.clone();
        Arc::pin_init(
            pin_init!(Self {
                in_force: Atomic::new(address(&none)),
                none,
                changes <- new_mutex!(Changes {
                    next_rule: 1,
                    ended: KVec::new(),
                }),
                state <- new_mutex!(State {
                    rule_set,
                    counts: ByteCounts::new(KVec::new()),
                    counting: 0,
                }),
            }),
            GFP_KERNEL,
        )
    }

    /// Returns the rules in force. Takes no lock if there are none.
    pub(crate) fn rule_set(&self) -> Arc<RuleSet> {
        if self.are_none() {
            return self.none.clone();
        }
        self.state.lock().rule_set.clone()
    }

    /// Whether no rule is in force. The answer may be outdated when it is used.
    pub(crate) fn are_none(&self) -> bool {
        self.is_in_force(&self.none)
    }

    /// Whether these are the rules in force. The answer may be outdated when it is used, unless the books of a provider are locked
    /// whose buffers are not counted.
    fn is_in_force(&self, rule_set: &Arc<RuleSet>) -> bool {
        self.in_force.load(Relaxed) == address(rule_set)
    }

    /// Holds up changes of rules until the result is dropped.
    pub(crate) fn hold_changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock()
    }

    /// Puts `rule` into force, instead of rule `old` if that is in force. Returns the id of the new rule.
    ///
    /// Errors: `EINVAL` if the rule contradicts itself, `ENOSPC` if there are [`rule::MAX_RULES`] rules, `ENOMEM`. Nothing has
    /// changed then.
    pub(crate) fn put(&self, rule: &Rule, old: Option<u64>, providers: impl ProviderList) -> Answer<u64> {
        rule.check().map_err(|flaw| refuse!(EINVAL, "{}", flaw.text()))?;
        let mut changes = self.hold_changes();
        let old_set = self.rule_set();
        let mut rules = KVec::with_capacity(old_set.rules.len() + 1, GFP_KERNEL)?;
        let ended = KVec::with_capacity(old_set.rules.len() + 1, GFP_KERNEL)?;
        let id = changes.next_rule;
        let mut new = Some(Rule { id, ..*rule });
        let stays = |other: &&Rule| Some(other.id) != old && !changes.ended.contains(&other.id);
        for other in old_set.rules.iter().filter(stays) {
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
        self.enforce(Some(rules), 0, providers)?;
        changes.ended = ended;
        changes.next_rule += 1;
        Ok(id)
    }

    /// Ends the rule `id`. Buffers that were charged under it are charged under the remaining rules.
    ///
    /// Errors: `ENOMEM`; the rule stays in force then.
    pub(crate) fn remove(&self, id: u64, providers: impl ProviderList) -> Answer {
        let mut changes = self.hold_changes();
        let old_set = self.rule_set();
        let mut rules = KVec::with_capacity(old_set.rules.len(), GFP_KERNEL)?;
        let stays = |rule: &&Rule| rule.id != id && !changes.ended.contains(&rule.id);
        for rule in old_set.rules.iter().filter(stays) {
            rules.push(*rule, GFP_KERNEL)?;
        }
        self.enforce(Some(rules), 0, providers)?;
        changes.ended.clear();
        Ok(())
    }

    /// Counts the bytes of all buffers, until the result is dropped. Errors: `ENOMEM`.
    fn count_bytes(self: &Arc<Self>, providers: impl ProviderList) -> Result<Counting> {
        let _changes = self.hold_changes();
        let mut state = self.state.lock();
        if state.counts() {
            state.counting += 1;
        } else {
            drop(state);
            self.enforce(None, 1, providers)?;
        }
        Ok(Counting(self.clone()))
    }

    /// Puts `rules` into force if there are any, adds `counting` to the number of [`Counting`]s, and counts the bytes of all buffers if
    /// anything depends on them. The caller holds `Rules::changes`, so no provider is added meanwhile.
    ///
    /// Allocations wait while this holds `Rules::state`. So this evaluates the rules once for each pair of credentials and
    /// provider, not for each buffer. If there are more keys than it has memory for, it begins again with twice as much.
    ///
    /// Errors: `ENOMEM`; nothing has changed then.
    fn enforce(&self, rules: Option<KVec<Rule>>, counting: u64, providers: impl ProviderList) -> Result {
        let rule_set = match rules {
            None => self.rule_set(),
            Some(rules) if rules.is_empty() => self.none.clone(),
            Some(rules) => RuleSet::new(rules, None)?,
        };
        let providers = providers()?;
        let mut charge_sets = ChargeSets::new()?;
        let mut keys = 0;
        loop {
            let mut counts = ByteCounts::new(ByteCounts::spare(keys)?);
            let mut state = self.state.lock();
            let counts_bytes = rule_set.counts(&Applicable::ALL) || state.counting + counting > 0;
            // A provider whose buffers are not counted hears of the new rules, too: see `Rules::is_in_force`.
            let counted = providers.iter().try_for_each(|provider| {
                let mut books = provider.books();
                books.counted = true;
                for buffer in books.charged().filter(|_| counts_bytes) {
                    charge_unlimited(&mut counts, &charge_sets.of(&rule_set, buffer), buffer.size)?;
                }
                Ok::<(), ()>(())
            });
            if counted.is_ok() {
                self.in_force.store(address(&rule_set), Relaxed);
                state.counting += counting;
                let old_set = core::mem::replace(&mut state.rule_set, rule_set);
                let old_counts = core::mem::replace(&mut state.counts, counts);
                drop(state);
                drop((old_set, old_counts));
                return Ok(());
            }
            drop(state);
            keys = (2 * keys).max(ChargeSets::MOST * ChargeSet::KEYS);
        }
    }

    /// Ends the rule `id` when the rules change the next time, after [`Self::remove`] has failed. Allocates nothing.
    pub(crate) fn remove_later(&self, id: u64) {
        // Has space: `put` has made it, and a rule ends once.
        let _ = self.changes.lock().ended.push_within_capacity(id);
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
        for (key, &used) in state.counts.bytes.iter() {
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
        for (key, used) in state.counts.bytes.iter() {
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

    /// Returns [`charge_set`] of a buffer under `rule_set`, the same in each call.
    fn of(&mut self, rule_set: &RuleSet, buffer: &Buffer) -> ChargeSet {
        let same = |(cred, provider, _): &&(Credentials, u32, ChargeSet)| {
            cred.is_same(&buffer.cred) && *provider == buffer.provider.id
        };
        if let Some((_, _, charge_set)) = self.charge_sets.iter().find(same) {
            return charge_set.for_file(buffer.file);
        }
        let charge_set = charge_set(rule_set, buffer);
        let new = (buffer.cred.clone(), buffer.provider.id, charge_set);
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
        (!self.counts()).then(|| core::mem::replace(&mut self.counts, ByteCounts::new(KVec::new())))
    }
}
