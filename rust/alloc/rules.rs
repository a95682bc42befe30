// SPDX-License-Identifier: GPL-2.0

//! The rules in force, and the accounts of what users, groups and files hold under them.
//!
//! What rules mean is said by [`crate::policy::rule`] and what counts by [`crate::policy::quota`], both pure. Here is what they need
//! of the kernel: the list of rules, who is asking, the numbers, and a [`Charge`] for every buffer that gives back what
//! was counted for it when it is dropped.
//!
//! When the rules change, all buffers that live are charged anew by the new rules. They keep their memory, whatever
//! those say.

use crate::{
    ext::{
        cred::Who,
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

/// A list of rules, in the order in which they are looked at. It does not change.
pub(crate) struct RuleSet {
    rules: KVec<Rule>,
    /// Those that limit what who they are for may hold.
    limiting: Applicable,
    /// Whether one sets memory aside.
    reserves: bool,
}

impl RuleSet {
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

/// The numbers.
struct Numbers(RBTree<ChargeKey, u64>);

impl quota::Store for Numbers {
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

/// A provider as rules and accounts see it.
#[derive(Clone, Copy)]
struct Place {
    id: u32,
    function: FunctionId,
    size: u64,
    kernel_has: u64,
}

impl Place {
    fn of(provider: &Provider) -> Self {
        Self {
            id: provider.id,
            function: provider.function_id(),
            size: provider.size,
            kernel_has: provider.kernel_has(),
        }
    }

    fn charge_target(&self) -> ChargeTarget<'_> {
        ChargeTarget {
            id: self.id,
            function: &self.function,
            size: self.size,
            kernel_has: self.kernel_has,
        }
    }
}

/// What is known of a charge.
struct Record {
    who: Who,
    place: Place,
    file: u64,
    bytes: u64,
    /// There until it is given back.
    charged: Option<Charged>,
    /// What it is charged under the rules that come next, while all are being charged anew.
    anew: Option<Charged>,
}

struct State {
    rule_set: Arc<RuleSet>,
    numbers: Numbers,
    /// By numbers with their bits reversed: a tree in which each new number is the largest is twice as deep as it has to be.
    charges: RBTree<u64, Record>,
    next_charge: u64,
    next_rule: u64,
}

/// The rules in force and the accounts.
#[pin_data]
pub(crate) struct Rules {
    #[pin]
    state: Mutex<State>,
    /// Whether any is in force. Written under the lock.
    some: AtomicFlag,
}

impl Ledger for Rules {
    fn uncharge(&self, id: u64) {
        let mut state = self.state.lock();
        let mut record = state.charges.remove(&id);
        if let Some(charged) = record.as_mut().and_then(|record| record.charged.take()) {
            uncharge(&mut state.numbers, charged);
        }
        drop(state);
        drop(record);
    }
}

/// Why a buffer was not charged.
pub(crate) enum NotCharged {
    /// It would break a limit.
    Broken(Broken),
    /// It would break a limit of the caller's cgroup.
    Cgroup,
    /// The rules became others since they were asked.
    Stale,
    Error(Error),
}

impl Rules {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let rule_set = RuleSet::new(KVec::new())?;
        Arc::pin_init(
            pin_init!(Self {
                state <- new_mutex!(State {
                    rule_set,
                    numbers: Numbers(RBTree::new()),
                    charges: RBTree::new(),
                    next_charge: 1,
                    next_rule: 1,
                }),
                some: AtomicFlag::new(false),
            }),
            GFP_KERNEL,
        )
    }

    /// The administrator's rules as they are now.
    pub(crate) fn rule_set(&self) -> Arc<RuleSet> {
        self.state.lock().rule_set.clone()
    }

    /// Whether none is in force at this moment.
    pub(crate) fn are_none(&self) -> bool {
        !self.some.load(Relaxed)
    }

    /// Makes other rules those in force. With an error all is as it was.
    fn enforce(&self, state: &mut State, rule_set: Arc<RuleSet>) -> Result {
        let some = !rule_set.is_empty();
        state.enforce(rule_set)?;
        self.some.store(some, Relaxed);
        Ok(())
    }

    /// Puts a rule into force, in the place of the one with number `old` if that is in force. Returns its number.
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
                "there are {} rules in force: no more are possible",
                rule::MAX_RULES
            ));
        }
        self.enforce(&mut state, RuleSet::new(rules)?)?;
        state.next_rule += 1;
        Ok(id)
    }

    /// Ends a rule. What was charged under it counts under those that come next. Errors: `ENOMEM`: it stays in force.
    pub(crate) fn remove(&self, id: u64) -> Answer {
        let mut state = self.state.lock();
        let mut rules = KVec::with_capacity(state.rule_set.rules.len(), GFP_KERNEL)?;
        for rule in state.rule_set.rules.iter().filter(|rule| rule.id != id) {
            rules.push(*rule, GFP_KERNEL)?;
        }
        Ok(self.enforce(&mut state, RuleSet::new(rules)?)?)
    }

    /// Bytes that a rule sets aside for the kernel in a function's memory.
    pub(crate) fn kernel_reserve(&self, function: &FunctionId) -> Option<u64> {
        rule_effect::kernel_reserve(&self.rule_set().rules, function)
    }

    /// The rule that does not want a buffer of `who`'s in a provider to be reached by a client over a path, and whether
    /// that is for the path alone.
    pub(crate) fn objection(
        &self,
        who: &Who,
        provider: &Provider,
        client: &FunctionId,
        path: &Path,
    ) -> Option<(RuleName, bool)> {
        let rule_set = self.rule_set();
        if rule_set.is_empty() {
            return None;
        }
        let (client, path) = (core::slice::from_ref(client), core::slice::from_ref(path));
        let applicable = Applicable::to(&rule_set.rules, who);
        let standing = ApplicableRules { rule_set, applicable };
        let effect = standing.effect(&provider.function_id(), client, path);
        let rule = effect.denied.or(effect.too_far)?;
        Some((standing.source().name(rule), effect.denied.is_none()))
    }

    /// What there is to say of a rule in force.
    pub(crate) fn condition(&self, id: u64) -> Text {
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
        for (key, &used) in state.numbers.0.iter() {
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

    /// Writes a line for each account that counts under a rule, as many as fit.
    pub(crate) fn usage(&self, id: u64, out: &mut kernel::str::Formatter<'_>) {
        let state = self.state.lock();
        for (key, used) in state.numbers.0.iter() {
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

/// What buffers of the same credentials in the same provider count against: those looked at last.
struct ChargeSets {
    known: KVec<(Who, u32, ChargeSet)>,
    /// The one that goes next.
    oldest: usize,
}

impl ChargeSets {
    /// Pairs that are remembered: most buffers are of few programs.
    const MOST: usize = 16;

    fn new() -> Result<Self> {
        Ok(Self {
            known: KVec::with_capacity(Self::MOST, GFP_KERNEL)?,
            oldest: 0,
        })
    }

    /// What a buffer counts against under other rules than it was charged by.
    fn of(&mut self, rule_set: &RuleSet, record: &Record) -> ChargeSet {
        let same =
            |(who, provider, _): &&(Who, u32, ChargeSet)| who.is_same(&record.who) && *provider == record.place.id;
        if let Some((_, _, charge_set)) = self.known.iter().find(same) {
            return charge_set.for_file(record.file);
        }
        let requester = Requester {
            rules: &rule_set.rules,
            who: Applicable::to(&rule_set.rules, &record.who),
            uid: record.who.uid(),
            file: record.file,
            own: &[],
        };
        // Whatever others hold: limits do not count here, and no account depends on it.
        let charge_set = ChargeSet::of(&Numbers(RBTree::new()), &requester, &record.place.charge_target());
        let new = (record.who.clone(), record.place.id, charge_set);
        if self.known.len() < Self::MOST {
            // There is room for that many.
            let _ = self.known.push_within_capacity(new);
        } else if let Some(old) = self.known.get_mut(self.oldest) {
            *old = new;
            self.oldest = (self.oldest + 1) % Self::MOST;
        }
        charge_set
    }
}

impl State {
    /// Makes other rules those in force, and charges all buffers by them. With an error all is as it was. It takes memory for each
    /// account, and none for each buffer; and it looks at all rules once for each user and provider, not for each buffer, as everybody
    /// who allocates waits meanwhile.
    fn enforce(&mut self, rule_set: Arc<RuleSet>) -> Result {
        let mut numbers = Numbers(RBTree::new());
        let mut charge_sets = ChargeSets::new()?;
        let charged = self.charges.values_mut().try_for_each(|record| {
            let charge_set = charge_sets.of(&rule_set, record);
            record.anew = Some(charge_unlimited(&mut numbers, &charge_set, record.bytes)?);
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
        self.numbers = numbers;
        self.rule_set = rule_set;
        Ok(())
    }
}

/// The administrator's rules, and which of them are for who asks: what they say of a provider and its paths stays the same.
#[derive(Clone)]
pub(crate) struct ApplicableRules {
    rule_set: Arc<RuleSet>,
    applicable: Applicable,
}

impl ApplicableRules {
    /// Whether these are the same rules, for the same.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.has_rules_of(other) && self.applicable == other.applicable
    }

    /// Whether these are the same rules.
    pub(crate) fn has_rules_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rule_set, &other.rule_set)
    }

    /// Whether bytes count under them.
    fn counts(&self) -> bool {
        self.rule_set.reserves || self.rule_set.limiting.meets(&self.applicable)
    }

    /// What they say of a provider for `clients`, but for the bytes it may give.
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

    /// The rules, for whoever wants to know their names.
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            admin: &self.rule_set.rules,
            ..Source::NONE
        }
    }
}

/// The rules that a decision was made by, and the user it was made for.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a> {
    admin: &'a [Rule],
    own: &'a [Rule],
    pub(crate) uid: u32,
}

impl Source<'_> {
    /// Where no rule has a word.
    pub(crate) const NONE: Self = Self {
        admin: &[],
        own: &[],
        uid: 0,
    };

    /// A rule's name.
    pub(crate) fn name(&self, rule: RuleRef) -> RuleName {
        let rules = match rule.set {
            RuleOrigin::Admin => self.admin,
            RuleOrigin::File => self.own,
        };
        rules.get(rule.at).map_or(RuleName::EMPTY, |rule| rule.name)
    }
}

/// The rules as they are for one request: the same from its beginning to its end.
pub(crate) struct RuleCheck<'a> {
    rules: &'a Arc<Rules>,
    standing: ApplicableRules,
    own: Option<Arc<RuleSet>>,
    who: Who,
    file: u64,
}

impl<'a> RuleCheck<'a> {
    /// For a request of the calling task's through a file with rules `own`.
    pub(crate) fn new(rules: &'a Arc<Rules>, own: Option<Arc<RuleSet>>, file: u64) -> Self {
        let rule_set = rules.rule_set();
        let who = Who::current();
        let applicable = Applicable::to(&rule_set.rules, &who);
        Self {
            rules,
            standing: ApplicableRules { rule_set, applicable },
            own,
            who,
            file,
        }
    }

    fn own(&self) -> &[Rule] {
        self.own.as_ref().map_or(&[], |own| &own.rules)
    }

    /// Whether no rule can have a word.
    pub(crate) fn is_silent(&self) -> bool {
        self.standing.rule_set.is_empty() && self.own().is_empty()
    }

    /// What stays the same of what the rules say; none where they count bytes, or the file has rules of its own.
    pub(crate) fn standing(&self) -> Option<&ApplicableRules> {
        (self.own().is_empty() && !self.standing.counts()).then_some(&self.standing)
    }

    /// The rules, for whoever wants to know their names.
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            own: self.own(),
            uid: self.who.uid(),
            ..self.standing.source()
        }
    }

    /// The number of the file the request came through.
    pub(crate) fn file(&self) -> u64 {
        self.file
    }

    fn requester(&self) -> Requester<'_> {
        let ApplicableRules { rule_set, applicable } = &self.standing;
        Requester {
            // Rules that count nothing need not be looked through.
            rules: if self.standing.counts() { &rule_set.rules } else { &[] },
            who: *applicable,
            uid: self.who.uid(),
            file: self.file,
            own: self.own(),
        }
    }

    /// What the rules say of a provider for `clients`, and a buffer of `size` bytes.
    pub(crate) fn effect(&self, provider: &Provider, clients: &[FunctionId], paths: &[Path], size: u64) -> RuleEffect {
        if self.is_silent() {
            return RuleEffect::NONE;
        }
        let place = Place::of(provider);
        let everyone = Applicable::ALL;
        let mut effect = self.standing.effect(&place.function, clients, paths);
        effect.add(RuleOrigin::File, self.own(), &everyone, &place.function, clients, paths);
        let requester = self.requester();
        let state = self.rules.state.lock();
        (effect.reserved_for_others, effect.reserved_by) =
            reserved_for_others(&state.numbers, &requester, &place.charge_target());
        let broken = ChargeSet::of(&state.numbers, &requester, &place.charge_target()).broken(&state.numbers, size);
        drop(state);
        if let Some(broken) = broken {
            breaks(&mut effect, broken);
        }
        effect
    }

    /// Charges a buffer of `size` bytes in a provider.
    pub(crate) fn charge(&self, provider: &Provider, size: u64) -> core::result::Result<Charge, NotCharged> {
        let held = provider.charge_cgroup(size).map_err(|e| match e {
            e if e == EAGAIN => NotCharged::Cgroup,
            e => NotCharged::Error(e),
        })?;
        let place = Place::of(provider);
        let record = Record {
            who: self.who.clone(),
            place,
            file: self.file,
            bytes: size,
            charged: None,
            anew: None,
        };
        // What may fail is done first, and outside the lock.
        let reservation = kernel::rbtree::RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT).map_err(NotCharged::Error)?;
        let mut state = self.rules.state.lock();
        if !Arc::ptr_eq(&state.rule_set, &self.standing.rule_set) {
            return Err(NotCharged::Stale);
        }
        let charge_set = ChargeSet::of(&state.numbers, &self.requester(), &place.charge_target());
        let charged = charge(&mut state.numbers, &charge_set, size).map_err(|e| match e {
            quota::ChargeError::Broken(broken) => NotCharged::Broken(broken),
            quota::ChargeError::Store(e) => NotCharged::Error(e),
        })?;
        let id = state.next_charge.reverse_bits();
        state.next_charge += 1;
        let node: RBTreeNode<u64, Record> = reservation.into_node(
            id,
            Record {
                charged: Some(charged),
                ..record
            },
        );
        state.charges.insert(node);
        drop(state);
        Ok(Charge::new(self.rules.clone(), id, held))
    }
}

/// Notes that a request would break a limit.
pub(crate) fn breaks(effect: &mut RuleEffect, broken: Broken) {
    match broken {
        Broken::Quota(over) => effect.over = Some(over),
        Broken::Reserve(rule) => (effect.reserved_for_others, effect.reserved_by) = (u64::MAX, Some(rule)),
    }
}
