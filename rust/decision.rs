// SPDX-License-Identifier: GPL-2.0

//! Decisions in words and numbers, for whoever asks why.

use crate::{
    ext::{
        trace,
        uapi::{self, consts},
    },
    orchestrator::Wish,
    placement::{Candidate, Outcome, Verdict, VerdictCode},
    policy::{Ref, Set},
    provider::Provider,
    refusal::Text,
    rules::Judge,
};
use kernel::{ffi, prelude::*, sync::Arc};

/// What was decided: a verdict per provider and a sentence.
pub(crate) struct Account {
    pub(crate) verdicts: KVec<uapi::Verdict>,
    pub(crate) chosen: u32,
    pub(crate) class: u32,
    pub(crate) error: i32,
    pub(crate) text: Text,
}

/// A decision, and all that it was made from.
pub(crate) struct Decided<'a> {
    /// Bytes that were wanted in one provider.
    pub(crate) size: u64,
    pub(crate) wish: &'a Wish,
    pub(crate) judge: &'a Judge<'a>,
    pub(crate) providers: &'a [Arc<Provider>],
    pub(crate) candidates: &'a [Candidate<'a>],
    pub(crate) verdicts: &'a [Verdict],
    pub(crate) outcome: Outcome,
}

impl Decided<'_> {
    pub(crate) fn account(&self, chosen: Option<&Arc<Provider>>) -> Result<Account> {
        let mut rows = KVec::with_capacity(self.verdicts.len(), GFP_KERNEL)?;
        let mut class = 0;
        for (verdict, provider) in self.verdicts.iter().zip(self.providers) {
            if chosen.is_some_and(|p| p.id == verdict.provider) {
                class = verdict.class_raw();
            }
            rows.push(self.row(verdict, provider), GFP_KERNEL)?;
        }
        let text = match chosen {
            Some(p) => Text::new(fmt!("{} was chosen of {} providers", p.addr, self.providers.len())),
            None => self.refusal(),
        };
        let error = match chosen {
            Some(_) => 0,
            None => -self.error().to_errno(),
        };
        Ok(Account {
            verdicts: rows,
            chosen: chosen.map_or(0, |p| p.id),
            class,
            error,
            text,
        })
    }

    /// Tells who traces decisions of this one; `dry` where nothing was to be allocated.
    pub(crate) fn traced(&self, account: &Account, dry: bool) {
        trace::decision(|| trace::Decision {
            size: self.wish.size,
            align: self.wish.align,
            file: self.judge.file(),
            clients: self.wish.clients.len(),
            providers: self.providers.len(),
            strategy: self.wish.strategy,
            chosen: account.chosen,
            error: account.error as u32,
            dry,
        });
    }

    fn row(&self, verdict: &Verdict, provider: &Provider) -> uapi::Verdict {
        let mut row = uapi::Verdict {
            provider: verdict.provider,
            code: verdict.code.as_raw(),
            addr: provider.addr.into(),
            worst_client: verdict.worst_client,
            class: verdict.class_raw(),
            hops: verdict.hops,
            bandwidth: verdict.bandwidth,
            numa_distance: verdict.numa_distance,
            rule_set: consts::RULES_NONE,
            size: verdict.size,
            free: verdict.free,
            largest: verdict.largest,
            rule: [0; consts::RULE_NAME],
        };
        if let Some(rule) = verdict.rule {
            row.rule_set = match rule.set {
                Set::Admin => consts::RULES_ADMIN,
                Set::Own => consts::RULES_OWN,
            };
            let name = self.judge.name(rule);
            for (to, from) in row.rule.iter_mut().zip(name.as_str().bytes()) {
                *to = from as ffi::c_char;
            }
        }
        row
    }

    fn error(&self) -> Error {
        match self.outcome {
            Outcome::Denied => EACCES,
            Outcome::Quota | Outcome::Cgroup => uapi::errno(uapi::EDQUOT),
            outcome if outcome.is_out_of_space() => ENOSPC,
            _ => ENODEV,
        }
    }

    /// The first provider with a verdict that a rule decided, and how many more there are.
    fn first(&self, code: VerdictCode) -> Option<(Ref, &Provider, &Candidate<'_>)> {
        self.verdicts
            .iter()
            .zip(self.providers)
            .zip(self.candidates)
            .filter(|((verdict, _), _)| verdict.code == code)
            .find_map(|((verdict, provider), candidate)| Some((verdict.rule?, &**provider, candidate)))
    }

    /// What was decided of a stripe: a part in each of the providers at `picks`, the first one first. With none, why:
    /// `found` of `wanted` providers could have been chosen.
    pub(crate) fn stripe_account(&self, picks: &[usize], found: usize, wanted: usize) -> Result<Account> {
        let mut account = self.account(picks.first().and_then(|&at| self.providers.get(at)))?;
        let worst = picks
            .iter()
            .filter_map(|&at| self.verdicts.get(at))
            .map(|v| v.class_raw())
            .max();
        account.class = worst.unwrap_or(0);
        account.text = match picks.len() {
            0 if wanted == 1 => account.text,
            0 => Text::new(fmt!(
                "of {} parts of {} bytes {} would find a provider; for the next one: {}",
                wanted,
                self.size,
                found,
                match self.outcome {
                    Outcome::NoProvider => "there is no other provider",
                    _ => account.text.as_str(),
                }
            )),
            parts => Text::new(fmt!(
                "{} of {} providers were chosen, for {} bytes each",
                parts,
                self.providers.len(),
                self.size
            )),
        };
        Ok(account)
    }

    /// Why there is none.
    fn refusal(&self) -> Text {
        let (size, clients) = (self.size, self.wish.clients.len());
        let whose = |rule: Ref| match rule.set {
            Set::Admin => "rule",
            Set::Own => "the file's own rule",
        };
        match self.outcome {
            Outcome::NoProvider => Text::new(fmt!("no provider is published: see p2pmemctl publish")),
            Outcome::NoSuchProvider => Text::new(fmt!("the provider that was named is not there")),
            Outcome::NotUpstream => Text::new(fmt!("the kernel's own choice found no provider for these clients")),
            Outcome::Leaving => Text::new(fmt!("all providers that could serve are being revoked")),
            Outcome::Unreachable => Text::new(fmt!(
                "the kernel says that no provider can be reached by all {} clients (host bridge not on its list, or ACS)",
                clients
            )),
            Outcome::Denied => match self.first(VerdictCode::Denied) {
                Some((rule, provider, _)) => Text::new(fmt!(
                    "{} {} denies {} to uid {}, and no other provider is left",
                    whose(rule),
                    self.judge.name(rule).as_str(),
                    provider.addr,
                    self.judge.uid()
                )),
                None => Text::EMPTY,
            },
            Outcome::TooFar => match self.first(VerdictCode::TooFar) {
                Some((rule, provider, _)) => Text::new(fmt!(
                    "{} {} does not allow a path as far as that to {}, and no nearer provider is left",
                    whose(rule),
                    self.judge.name(rule).as_str(),
                    provider.addr
                )),
                None => Text::new(fmt!("all providers are farther than max_class allows")),
            },
            Outcome::TooSmall => Text::new(fmt!(
                "no provider that could serve is as large as {} bytes at that alignment",
                size
            )),
            Outcome::Quota => match self.first(VerdictCode::Quota) {
                Some((rule, _, candidate)) => {
                    let (used, limit, group) = candidate
                        .ruling
                        .over
                        .map_or((0, 0, false), |over| (over.used, over.limit, over.group));
                    let name = self.judge.name(rule);
                    match (rule.set, group) {
                        (Set::Own, _) => Text::new(fmt!(
                            "the file's own rule {}: it holds {} bytes of {}, {} more were wanted",
                            name.as_str(),
                            used,
                            limit,
                            size
                        )),
                        (Set::Admin, true) => Text::new(fmt!(
                            "rule {}: the group holds {} bytes of {}, {} more were wanted",
                            name.as_str(),
                            used,
                            limit,
                            size
                        )),
                        (Set::Admin, false) => Text::new(fmt!(
                            "rule {}: uid {} holds {} bytes of {}, {} more were wanted",
                            name.as_str(),
                            self.judge.uid(),
                            used,
                            limit,
                            size
                        )),
                    }
                }
                None => Text::EMPTY,
            },
            Outcome::Cgroup => Text::new(fmt!(
                "{} bytes more would break the limit of the cgroup (dmem.max) for memory of all providers that could serve",
                size
            )),
            Outcome::Full => Text::new(fmt!("no provider that could serve has {} bytes free", size)),
            Outcome::Reserved => match self.first(VerdictCode::Reserved) {
                Some((rule, provider, candidate)) => Text::new(fmt!(
                    "rule {} sets aside for others what is free in {}: {} bytes, {} were wanted",
                    self.judge.name(rule).as_str(),
                    provider.addr,
                    candidate.free,
                    size
                )),
                None => Text::EMPTY,
            },
            Outcome::Fragmented => Text::new(fmt!(
                "no provider that could serve has {} bytes in one piece at that alignment",
                size
            )),
            Outcome::Chosen => Text::EMPTY,
        }
    }
}
