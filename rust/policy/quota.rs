// SPDX-License-Identifier: GPL-2.0

//! Accounts: the bytes that users, groups and files hold, against the limits that rules set.
//!
//! A buffer is charged to the accounts of its [`ChargeSet`] when it is allocated, all of them or none, and what it was
//! charged is a [`Charged`], which cannot be copied and is used up by [`uncharge`]: nothing can be given back twice.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds
//! no `unsafe`. The same text is compiled into the module and into the host tests of tests/suites/pure.

use crate::policy::rule::{
    first,
    reserves,
    Applicable,
    Beneficiary,
    Over,
    Party,
    Ref,
    Rule,
    Set, //
};

/// Whose bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ChargeKey {
    /// All that is held in a provider, by its id.
    Provider(u32),
    /// What a user holds under a rule's quota: the rule's id, the uid.
    User(u64, u32),
    /// What a group holds under a rule's quota.
    Group(u64),
    /// What a group holds of what a rule sets aside for it in a provider.
    Reserve(u64, u32),
    /// What a file holds.
    File(u64),
}

/// Where the numbers are kept.
pub(crate) trait Store {
    /// Why a number cannot be kept.
    type Error;
    /// Bytes of an account, 0 where there is none.
    fn used(&self, key: ChargeKey) -> u64;
    /// Sets the bytes of an account. With 0, or with an account that has bytes already, it cannot fail.
    fn set(&mut self, key: ChargeKey, bytes: u64) -> Result<(), Self::Error>;
}

/// One account that a buffer counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    key: ChargeKey,
    /// Bytes that may be in it, and the rule that says so.
    limit: Option<(u64, Ref)>,
}

/// Most accounts that one buffer counts against.
const ENTRIES: usize = 5;

/// The accounts that a buffer counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChargeSet([Option<Entry>; ENTRIES]);

/// Who pays, and for what.
pub(crate) struct Requester<'a> {
    /// The administrator's rules, and which of them are for the requester.
    pub(crate) rules: &'a [Rule],
    pub(crate) who: Applicable,
    pub(crate) uid: u32,
    /// The requester's file, and its own rules.
    pub(crate) file: u64,
    pub(crate) own: &'a [Rule],
}

/// A provider as far as accounts depend on it.
pub(crate) struct ChargeTarget<'a> {
    pub(crate) id: u32,
    pub(crate) party: &'a Party,
    /// Bytes it has to give.
    pub(crate) size: u64,
    /// Bytes of its device's pool that other drivers can always have; `u64::MAX` where no rule can change that.
    pub(crate) kernel_has: u64,
}

/// Bytes of a provider that are set aside for others than the requester, and the first rule that does it.
pub(crate) fn withheld(
    store: &impl Store,
    requester: &Requester<'_>,
    charge_target: &ChargeTarget<'_>,
) -> (u64, Option<Ref>) {
    let mut sum = (0u64, None);
    for (at, rule, bytes) in reserves(requester.rules, charge_target.party) {
        let left = match rule.reserve_for {
            Some(Beneficiary::Group) if requester.who.has(at) => 0,
            Some(Beneficiary::Group) => bytes.saturating_sub(store.used(ChargeKey::Reserve(rule.id, charge_target.id))),
            _ => bytes.saturating_sub(charge_target.kernel_has),
        };
        if left > 0 {
            let set = Set::Admin;
            sum = (sum.0.saturating_add(left), sum.1.or(Some(Ref { set, at })));
        }
    }
    sum
}

impl ChargeSet {
    /// What a buffer of the requester's in the provider counts against.
    pub(crate) fn of(store: &impl Store, requester: &Requester<'_>, charge_target: &ChargeTarget<'_>) -> Self {
        let limit = |set, at, bytes| Some((bytes, Ref { set, at }));
        let (aside, by) = withheld(store, requester, charge_target);
        let provider = Entry {
            key: ChargeKey::Provider(charge_target.id),
            limit: by.map(|by| (charge_target.size.saturating_sub(aside), by)),
        };
        let rule_id = |at: usize| requester.rules.get(at).map_or(0, |rule| rule.id);
        let user =
            first(requester.rules, &requester.who, charge_target.party, |rule| rule.quota).map(|(at, bytes)| Entry {
                key: ChargeKey::User(rule_id(at), requester.uid),
                limit: limit(Set::Admin, at, bytes),
            });
        let group = first(requester.rules, &requester.who, charge_target.party, |rule| {
            rule.group_quota
        })
        .map(|(at, bytes)| Entry {
            key: ChargeKey::Group(rule_id(at)),
            limit: limit(Set::Admin, at, bytes),
        });
        let reserve = reserves(requester.rules, charge_target.party)
            .find(|(at, rule, _)| rule.reserve_for == Some(Beneficiary::Group) && requester.who.has(*at))
            .map(|(_, rule, _)| Entry {
                key: ChargeKey::Reserve(rule.id, charge_target.id),
                limit: None,
            });
        let file = Entry {
            key: ChargeKey::File(requester.file),
            limit: first(requester.own, &Applicable::ALL, charge_target.party, |rule| rule.quota)
                .and_then(|(at, bytes)| limit(Set::Own, at, bytes)),
        };
        Self([user, group, Some(file), Some(provider), reserve])
    }

    /// The same for a buffer of another file, whose own rules do not matter.
    pub(crate) fn for_file(mut self, file: u64) -> Self {
        for entry in self.0.iter_mut().flatten() {
            if let ChargeKey::File(_) = entry.key {
                entry.key = ChargeKey::File(file);
            }
        }
        self
    }

    /// The limit that `bytes` more would break, if there is one.
    pub(crate) fn broken(&self, store: &impl Store, bytes: u64) -> Option<Broken> {
        self.0.iter().flatten().find_map(|entry| {
            let (limit, rule) = entry.limit?;
            let used = store.used(entry.key);
            if used.checked_add(bytes).is_some_and(|sum| sum <= limit) {
                return None;
            }
            let group = match entry.key {
                ChargeKey::Provider(_) | ChargeKey::Reserve(..) => return Some(Broken::Reserve(rule)),
                ChargeKey::Group(_) => true,
                ChargeKey::User(..) | ChargeKey::File(_) => false,
            };
            Some(Broken::Quota(Over {
                rule,
                group,
                used,
                limit,
            }))
        })
    }
}

/// Which limit would be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Of what may be held.
    Quota(Over),
    /// What is left is set aside for others.
    Reserve(Ref),
}

/// Why a buffer was not charged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChargeError<E> {
    /// It would break a limit.
    Broken(Broken),
    /// The numbers could not be kept.
    Store(E),
}

/// What a buffer was charged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Charged {
    keys: [Option<ChargeKey>; ENTRIES],
    bytes: u64,
}

/// Charges a buffer, within all limits or not at all.
pub(crate) fn charge<S: Store>(
    store: &mut S,
    charge_set: &ChargeSet,
    bytes: u64,
) -> Result<Charged, ChargeError<S::Error>> {
    match charge_set.broken(store, bytes) {
        Some(broken) => Err(ChargeError::Broken(broken)),
        None => charge_unlimited(store, charge_set, bytes).map_err(ChargeError::Store),
    }
}

/// Charges a buffer that is there already, whatever the limits are now.
pub(crate) fn charge_unlimited<S: Store>(
    store: &mut S,
    charge_set: &ChargeSet,
    bytes: u64,
) -> Result<Charged, S::Error> {
    let mut charged = Charged {
        keys: [None; ENTRIES],
        bytes,
    };
    if bytes == 0 {
        return Ok(charged);
    }
    for (entry, slot) in charge_set.0.iter().zip(charged.keys.iter_mut()) {
        let Some(entry) = entry else { continue };
        let sum = store.used(entry.key).saturating_add(bytes);
        if let Err(e) = store.set(entry.key, sum) {
            uncharge(store, charged);
            return Err(e);
        }
        *slot = Some(entry.key);
    }
    Ok(charged)
}

/// Gives back what was charged.
pub(crate) fn uncharge<S: Store>(store: &mut S, charged: Charged) {
    for key in charged.keys.into_iter().flatten() {
        let left = store.used(key).saturating_sub(charged.bytes);
        // An account that is there cannot fail to be set.
        let _ = store.set(key, left);
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_quota))]
mod tests {
    use super::*;

    /// Few accounts, of which the last one cannot be kept.
    struct Few([(Option<ChargeKey>, u64); 4], usize);

    impl Store for Few {
        type Error = ();

        fn used(&self, key: ChargeKey) -> u64 {
            self.0
                .iter()
                .find(|(a, _)| *a == Some(key))
                .map_or(0, |(_, bytes)| *bytes)
        }

        fn set(&mut self, key: ChargeKey, bytes: u64) -> Result<(), ()> {
            let known = self.0.iter().position(|(a, _)| *a == Some(key));
            let room = self.0.iter().take(self.1).position(|(a, _)| a.is_none());
            let at = known.or(room).ok_or(())?;
            self.0[at] = ((bytes > 0).then_some(key), bytes);
            Ok(())
        }
    }

    fn charge_set(limit: u64) -> ChargeSet {
        let entry = |key, limit| Some(Entry { key, limit });
        let rule = Ref { set: Set::Admin, at: 0 };
        ChargeSet([
            entry(ChargeKey::User(1, 1000), Some((limit, rule))),
            None,
            entry(ChargeKey::File(5), None),
            entry(ChargeKey::Provider(2), None),
            None,
        ])
    }

    #[test]
    fn a_limit_is_kept_to_the_byte() {
        let mut store = Few([(None, 0); 4], 4);
        let charge_set = charge_set(100);
        let first = charge(&mut store, &charge_set, 60);
        assert!(first.is_ok());
        assert!(matches!(
            charge(&mut store, &charge_set, 41),
            Err(ChargeError::Broken(Broken::Quota(over))) if over.used == 60 && over.limit == 100
        ));
        let second = charge(&mut store, &charge_set, 40);
        assert_eq!(store.used(ChargeKey::User(1, 1000)), 100);
        assert_eq!(store.used(ChargeKey::Provider(2)), 100);
        // More than there are numbers.
        assert!(charge(&mut store, &charge_set, u64::MAX).is_err());
        for charged in [first, second].into_iter().flatten() {
            uncharge(&mut store, charged);
        }
        assert!(store.0.iter().all(|slot| *slot == (None, 0)));
    }

    #[test]
    fn what_cannot_be_kept_is_not_charged_at_all() {
        let mut store = Few([(None, 0); 4], 2);
        assert!(matches!(
            charge(&mut store, &charge_set(100), 60),
            Err(ChargeError::Store(()))
        ));
        assert!(store.0.iter().all(|slot| *slot == (None, 0)));
    }
}
