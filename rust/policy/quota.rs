// SPDX-License-Identifier: GPL-2.0

//! Quota arithmetic: the bytes that users, groups and files hold, and the limits that rules set.
//!
//! A buffer is charged to all keys of its [`ChargeSet`] when it is allocated, or to none. [`Charged`] says to which, and
//! [`uncharge`] consumes it.
//!
//! The file is pure: it needs nothing but `core` and other pure files, allocates nothing, cannot panic, takes no lock, and
//! has no `unsafe`. The module and the host tests of tests/suites/pure compile the same source.

use crate::policy::{
    rule::{
        Beneficiary,
        FunctionId,
        Rule, //
    },
    rule_effect::{
        first,
        reserves,
        Applicable,
        OverLimit,
        RuleOrigin,
        RuleRef, //
    }, //
};

/// The key under which bytes are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ChargeKey {
    /// All bytes allocated from a provider, by the provider's id.
    Provider(u32),
    /// A user's bytes under a rule's quota: rule id, uid.
    User(u64, u32),
    /// A group's bytes under a rule's group quota: rule id.
    Group(u64),
    /// A group's bytes from the reserve that a rule keeps for it: rule id, provider id.
    Reserve(u64, u32),
    /// A file's bytes, by the file's number.
    File(u64),
}

/// A store of byte counts by key.
pub(crate) trait Store {
    /// The error if a count cannot be stored.
    type Error;
    /// Returns the bytes of a key, 0 if there is none.
    fn used(&self, key: ChargeKey) -> u64;
    /// Sets the bytes of a key. Cannot fail for 0 bytes, or for a key that has bytes.
    fn set(&mut self, key: ChargeKey, bytes: u64) -> Result<(), Self::Error>;
}

/// One key that a buffer is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    key: ChargeKey,
    /// The maximum bytes of the key, and the rule that sets it.
    limit: Option<(u64, RuleRef)>,
}

/// The keys that a buffer is charged to, with their limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChargeSet([Option<Entry>; Self::KEYS]);

/// The user and file of a request, and the rules for them.
pub(crate) struct Requester<'a> {
    /// The administrator's rules, and which of them apply to the requester.
    pub(crate) rules: &'a [Rule],
    pub(crate) applicable: Applicable,
    pub(crate) uid: u32,
    /// Number of the file, and the file's own rules.
    pub(crate) file: u64,
    pub(crate) file_rules: &'a [Rule],
}

/// The properties of a provider that charges depend on.
pub(crate) struct ChargeTarget<'a> {
    pub(crate) id: u32,
    pub(crate) function: &'a FunctionId,
    /// Bytes that can be allocated in all.
    pub(crate) size: u64,
    /// Bytes of the kernel reserve; `u64::MAX` if no rule can change it.
    pub(crate) kernel_reserve: u64,
}

/// Returns the bytes of a provider that are reserved for others than the requester, and the first rule that reserves any.
pub(crate) fn reserved_for_others(
    store: &impl Store,
    requester: &Requester<'_>,
    charge_target: &ChargeTarget<'_>,
) -> (u64, Option<RuleRef>) {
    let mut sum = (0u64, None);
    for (at, rule, bytes) in reserves(requester.rules, charge_target.function) {
        let left = match rule.reserve_for {
            Some(Beneficiary::Group) if requester.applicable.has(at) => 0,
            Some(Beneficiary::Group) => bytes.saturating_sub(store.used(ChargeKey::Reserve(rule.id, charge_target.id))),
            _ => bytes.saturating_sub(charge_target.kernel_reserve),
        };
        if left > 0 {
            let set = RuleOrigin::Admin;
            sum = (sum.0.saturating_add(left), sum.1.or(Some(RuleRef { set, at })));
        }
    }
    sum
}

impl ChargeSet {
    /// The most keys of a charge set: user, group, file, provider, reserve.
    pub(crate) const KEYS: usize = 5;

    /// Returns the charge set of a buffer of `requester` in `charge_target`. Only the limit on the provider depends on
    /// counts of `store`.
    pub(crate) fn of(store: &impl Store, requester: &Requester<'_>, charge_target: &ChargeTarget<'_>) -> Self {
        let limit = |set, at, bytes| Some((bytes, RuleRef { set, at }));
        let (aside, by) = reserved_for_others(store, requester, charge_target);
        let provider = Entry {
            key: ChargeKey::Provider(charge_target.id),
            limit: by.map(|by| (charge_target.size.saturating_sub(aside), by)),
        };
        let rule_id = |at: usize| requester.rules.get(at).map_or(0, |rule| rule.id);
        let user = first(requester.rules, &requester.applicable, charge_target.function, |rule| {
            rule.quota
        })
        .map(|(at, bytes)| Entry {
            key: ChargeKey::User(rule_id(at), requester.uid),
            limit: limit(RuleOrigin::Admin, at, bytes),
        });
        let group = first(requester.rules, &requester.applicable, charge_target.function, |rule| {
            rule.group_quota
        })
        .map(|(at, bytes)| Entry {
            key: ChargeKey::Group(rule_id(at)),
            limit: limit(RuleOrigin::Admin, at, bytes),
        });
        let reserve = reserves(requester.rules, charge_target.function)
            .find(|(at, rule, _)| rule.reserve_for == Some(Beneficiary::Group) && requester.applicable.has(*at))
            .map(|(_, rule, _)| Entry {
                key: ChargeKey::Reserve(rule.id, charge_target.id),
                limit: None,
            });
        let file = Entry {
            key: ChargeKey::File(requester.file),
            limit: first(requester.file_rules, &Applicable::ALL, charge_target.function, |rule| {
                rule.quota
            })
            .and_then(|(at, bytes)| limit(RuleOrigin::File, at, bytes)),
        };
        Self([user, group, Some(file), Some(provider), reserve])
    }

    /// Returns the charge set for another file without own rules.
    pub(crate) fn for_file(mut self, file: u64) -> Self {
        for entry in self.0.iter_mut().flatten() {
            if let ChargeKey::File(_) = entry.key {
                entry.key = ChargeKey::File(file);
            }
        }
        self
    }

    /// Returns the charge of a buffer of `bytes` bytes that was charged to this set.
    pub(crate) fn charged(&self, bytes: u64) -> Charged {
        let keys = self.0.map(|entry| entry.map(|entry| entry.key));
        Charged { keys, bytes }
    }

    /// Returns the first limit that `bytes` more would exceed, if there is one.
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
            Some(Broken::Quota(OverLimit {
                rule,
                group,
                used,
                limit,
            }))
        })
    }
}

/// A limit that a request would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// A quota.
    Quota(OverLimit),
    /// A reserve for others.
    Reserve(RuleRef),
}

/// Why [`charge`] failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChargeError<E> {
    /// A limit would be exceeded.
    Broken(Broken),
    /// A count could not be stored.
    Store(E),
}

/// The charge of one buffer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Charged {
    keys: [Option<ChargeKey>; ChargeSet::KEYS],
    bytes: u64,
}

/// Charges `bytes` to all keys within their limits, or to none.
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

/// Charges `bytes` to all keys regardless of limits. For buffers that exist already. Errors: those of the store; nothing is
/// charged then.
pub(crate) fn charge_unlimited<S: Store>(
    store: &mut S,
    charge_set: &ChargeSet,
    bytes: u64,
) -> Result<Charged, S::Error> {
    let mut charged = Charged {
        keys: [None; ChargeSet::KEYS],
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

/// Subtracts a charge from all keys that it was added to.
pub(crate) fn uncharge<S: Store>(store: &mut S, charged: Charged) {
    for key in charged.keys.into_iter().flatten() {
        let left = store.used(key).saturating_sub(charged.bytes);
        // Cannot fail: a charged key has bytes.
        let _ = store.set(key, left);
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_quota))]
mod tests {
    use super::*;

    /// A store of a few keys that fails when full.
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
        let rule = RuleRef {
            set: RuleOrigin::Admin,
            at: 0,
        };
        ChargeSet([
            entry(ChargeKey::User(1, 1000), Some((limit, rule))),
            None,
            entry(ChargeKey::File(5), None),
            entry(ChargeKey::Provider(2), None),
            None,
        ])
    }

    #[test]
    fn quota_is_exact_to_the_byte() {
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
        // The sum would overflow.
        assert!(charge(&mut store, &charge_set, u64::MAX).is_err());
        for charged in [first, second].into_iter().flatten() {
            uncharge(&mut store, charged);
        }
        assert!(store.0.iter().all(|slot| *slot == (None, 0)));
    }

    #[test]
    fn failed_store_charges_nothing() {
        let mut store = Few([(None, 0); 4], 2);
        assert!(matches!(
            charge(&mut store, &charge_set(100), 60),
            Err(ChargeError::Store(()))
        ));
        assert!(store.0.iter().all(|slot| *slot == (None, 0)));
    }
}
