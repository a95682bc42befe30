// SPDX-License-Identifier: GPL-2.0

//! Accounts: the bytes that users, groups and files hold, against the limits that rules set.
//!
//! A buffer is charged to the accounts of its [`Levy`] when it is allocated, all of them or none, and what it was
//! charged is a [`Charged`], which cannot be copied and is used up by [`uncharge`]: nothing can be given back twice.
//!
//! The file is pure: it needs nothing but `core` and the other pure files, allocates nothing, cannot panic, and holds
//! no `unsafe`. The same text is compiled into the module and into the host tests of tests/pure.

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
pub(crate) enum Account {
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
    fn used(&self, account: Account) -> u64;
    /// Sets the bytes of an account. With 0, or with an account that has bytes already, it cannot fail.
    fn set(&mut self, account: Account, bytes: u64) -> Result<(), Self::Error>;
}

/// One account that a buffer counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    account: Account,
    /// Bytes that may be in it, and the rule that says so.
    limit: Option<(u64, Ref)>,
}

/// Most accounts that one buffer counts against.
const ENTRIES: usize = 5;

/// The accounts that a buffer counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Levy([Option<Entry>; ENTRIES]);

/// Who pays, and for what.
pub(crate) struct Payer<'a> {
    /// The administrator's rules, and which of them are for the payer.
    pub(crate) rules: &'a [Rule],
    pub(crate) who: Applicable,
    pub(crate) uid: u32,
    /// The payer's file, and its own rules.
    pub(crate) file: u64,
    pub(crate) own: &'a [Rule],
}

/// A provider as far as accounts depend on it.
pub(crate) struct Fund<'a> {
    pub(crate) id: u32,
    pub(crate) party: &'a Party,
    /// Bytes it has to give.
    pub(crate) size: u64,
    /// Bytes of its device's pool that other drivers can always have; `u64::MAX` where no rule can change that.
    pub(crate) kernel_has: u64,
}

/// Bytes of a provider that are set aside for others than the payer, and the first rule that does it.
pub(crate) fn withheld(store: &impl Store, payer: &Payer<'_>, fund: &Fund<'_>) -> (u64, Option<Ref>) {
    let mut sum = (0u64, None);
    for (at, rule, bytes) in reserves(payer.rules, fund.party) {
        let left = match rule.reserve_for {
            Some(Beneficiary::Group) if payer.who.has(at) => 0,
            Some(Beneficiary::Group) => bytes.saturating_sub(store.used(Account::Reserve(rule.id, fund.id))),
            _ => bytes.saturating_sub(fund.kernel_has),
        };
        if left > 0 {
            let set = Set::Admin;
            sum = (sum.0.saturating_add(left), sum.1.or(Some(Ref { set, at })));
        }
    }
    sum
}

impl Levy {
    /// What a buffer of the payer's in the provider counts against.
    pub(crate) fn of(store: &impl Store, payer: &Payer<'_>, fund: &Fund<'_>) -> Self {
        let limit = |set, at, bytes| Some((bytes, Ref { set, at }));
        let (aside, by) = withheld(store, payer, fund);
        let provider = Entry {
            account: Account::Provider(fund.id),
            limit: by.map(|by| (fund.size.saturating_sub(aside), by)),
        };
        let rule_id = |at: usize| payer.rules.get(at).map_or(0, |rule| rule.id);
        let user = first(payer.rules, &payer.who, fund.party, |rule| rule.quota).map(|(at, bytes)| Entry {
            account: Account::User(rule_id(at), payer.uid),
            limit: limit(Set::Admin, at, bytes),
        });
        let group = first(payer.rules, &payer.who, fund.party, |rule| rule.group_quota).map(|(at, bytes)| Entry {
            account: Account::Group(rule_id(at)),
            limit: limit(Set::Admin, at, bytes),
        });
        let reserve = reserves(payer.rules, fund.party)
            .find(|(at, rule, _)| rule.reserve_for == Some(Beneficiary::Group) && payer.who.has(*at))
            .map(|(_, rule, _)| Entry {
                account: Account::Reserve(rule.id, fund.id),
                limit: None,
            });
        let file = Entry {
            account: Account::File(payer.file),
            limit: first(payer.own, &Applicable::ALL, fund.party, |rule| rule.quota)
                .and_then(|(at, bytes)| limit(Set::Own, at, bytes)),
        };
        Self([user, group, Some(file), Some(provider), reserve])
    }

    /// The same for a buffer of another file, whose own rules do not matter.
    pub(crate) fn for_file(mut self, file: u64) -> Self {
        for entry in self.0.iter_mut().flatten() {
            if let Account::File(_) = entry.account {
                entry.account = Account::File(file);
            }
        }
        self
    }

    /// The limit that `bytes` more would break, if there is one.
    pub(crate) fn broken(&self, store: &impl Store, bytes: u64) -> Option<Broken> {
        self.0.iter().flatten().find_map(|entry| {
            let (limit, rule) = entry.limit?;
            let used = store.used(entry.account);
            if used.checked_add(bytes).is_some_and(|sum| sum <= limit) {
                return None;
            }
            let group = match entry.account {
                Account::Provider(_) | Account::Reserve(..) => return Some(Broken::Reserve(rule)),
                Account::Group(_) => true,
                Account::User(..) | Account::File(_) => false,
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
pub(crate) enum Uncharged<E> {
    /// It would break a limit.
    Broken(Broken),
    /// The numbers could not be kept.
    Store(E),
}

/// What a buffer was charged.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Charged {
    accounts: [Option<Account>; ENTRIES],
    bytes: u64,
}

/// Charges a buffer, within all limits or not at all.
pub(crate) fn charge<S: Store>(store: &mut S, levy: &Levy, bytes: u64) -> Result<Charged, Uncharged<S::Error>> {
    match levy.broken(store, bytes) {
        Some(broken) => Err(Uncharged::Broken(broken)),
        None => charge_unlimited(store, levy, bytes).map_err(Uncharged::Store),
    }
}

/// Charges a buffer that is there already, whatever the limits are now.
pub(crate) fn charge_unlimited<S: Store>(store: &mut S, levy: &Levy, bytes: u64) -> Result<Charged, S::Error> {
    let mut charged = Charged {
        accounts: [None; ENTRIES],
        bytes,
    };
    if bytes == 0 {
        return Ok(charged);
    }
    for (entry, slot) in levy.0.iter().zip(charged.accounts.iter_mut()) {
        let Some(entry) = entry else { continue };
        let sum = store.used(entry.account).saturating_add(bytes);
        if let Err(e) = store.set(entry.account, sum) {
            uncharge(store, charged);
            return Err(e);
        }
        *slot = Some(entry.account);
    }
    Ok(charged)
}

/// Gives back what was charged.
pub(crate) fn uncharge<S: Store>(store: &mut S, charged: Charged) {
    for account in charged.accounts.into_iter().flatten() {
        let left = store.used(account).saturating_sub(charged.bytes);
        // An account that is there cannot fail to be set.
        let _ = store.set(account, left);
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_quota))]
mod tests {
    use super::*;

    /// Few accounts, of which the last one cannot be kept.
    struct Few([(Option<Account>, u64); 4], usize);

    impl Store for Few {
        type Error = ();

        fn used(&self, account: Account) -> u64 {
            self.0
                .iter()
                .find(|(a, _)| *a == Some(account))
                .map_or(0, |(_, bytes)| *bytes)
        }

        fn set(&mut self, account: Account, bytes: u64) -> Result<(), ()> {
            let known = self.0.iter().position(|(a, _)| *a == Some(account));
            let room = self.0.iter().take(self.1).position(|(a, _)| a.is_none());
            let at = known.or(room).ok_or(())?;
            self.0[at] = ((bytes > 0).then_some(account), bytes);
            Ok(())
        }
    }

    fn levy(limit: u64) -> Levy {
        let entry = |account, limit| Some(Entry { account, limit });
        let rule = Ref { set: Set::Admin, at: 0 };
        Levy([
            entry(Account::User(1, 1000), Some((limit, rule))),
            None,
            entry(Account::File(5), None),
            entry(Account::Provider(2), None),
            None,
        ])
    }

    #[test]
    fn a_limit_is_kept_to_the_byte() {
        let mut store = Few([(None, 0); 4], 4);
        let levy = levy(100);
        let first = charge(&mut store, &levy, 60);
        assert!(first.is_ok());
        assert!(matches!(
            charge(&mut store, &levy, 41),
            Err(Uncharged::Broken(Broken::Quota(over))) if over.used == 60 && over.limit == 100
        ));
        let second = charge(&mut store, &levy, 40);
        assert_eq!(store.used(Account::User(1, 1000)), 100);
        assert_eq!(store.used(Account::Provider(2)), 100);
        // More than there are numbers.
        assert!(charge(&mut store, &levy, u64::MAX).is_err());
        for charged in [first, second].into_iter().flatten() {
            uncharge(&mut store, charged);
        }
        assert!(store.0.iter().all(|slot| *slot == (None, 0)));
    }

    #[test]
    fn what_cannot_be_kept_is_not_charged_at_all() {
        let mut store = Few([(None, 0); 4], 2);
        assert!(matches!(charge(&mut store, &levy(100), 60), Err(Uncharged::Store(()))));
        assert!(store.0.iter().all(|slot| *slot == (None, 0)));
    }
}
