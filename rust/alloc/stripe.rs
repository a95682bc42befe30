// SPDX-License-Identifier: GPL-2.0

//! Stripes: requests that several providers serve together, each with a buffer of its own.

use crate::{
    alloc::{
        explanation::{
            traced,
            Account,
            Decided, //
        },
        orchestrator::{
            passed_over,
            Orchestrator, //
        },
        request::Wish,
        rules::{
            Judge,
            Uncharged, //
        }, //
    },
    ext::{
        abi::consts,
        refusal::{
            refuse,
            Answer, //
        }, //
    },
    mem::buffer::Holder,
    policy::{
        placement::{
            self,
            Strategy,
            Verdict, //
        },
        rule::Stance,
        split::Split, //
    }, //
};
use kernel::{page::PAGE_SIZE, prelude::*, sync::atomic::Relaxed};

/// The buffers of a stripe, each with the class of its path, and what was decided. No buffer where there is no stripe.
type Made = (KVec<(Holder, u32)>, Account);

impl Orchestrator {
    /// Allocates a stripe of `room` parts at most for a file.
    pub(crate) fn stripe(&self, wish: &Wish, room: usize, file: u64) -> Answer<Made> {
        self.choose_stripe(wish, room, file, true)
    }

    /// Says what allocating a stripe would do.
    pub(crate) fn explain_stripe(&self, wish: &Wish, file: u64) -> Answer<Account> {
        Ok(self.choose_stripe(wish, consts::MAX_PARTS, file, false)?.1)
    }

    fn choose_stripe(&self, wish: &Wish, room: usize, file: u64, take: bool) -> Answer<Made> {
        for _ in 0..Self::RULE_CHANGES {
            let judge = Judge::new(self.rules(), wish.own.clone(), file);
            if let Some(made) = self.stripe_by(&judge, wish, room, take.then_some(file))? {
                return Ok(made);
            }
        }
        Err(refuse!(EAGAIN, "the rules changed again and again"))
    }

    /// As [`Self::choose_stripe`]; none where the rules have become others.
    fn stripe_by(&self, judge: &Judge<'_>, wish: &Wish, room: usize, take: Option<u64>) -> Answer<Option<Made>> {
        let view = &*wish.view;
        let (least, most) = match wish.parts {
            0 => (1, view.providers.len().min(room).clamp(1, consts::MAX_PARTS)),
            parts => (parts, parts),
        };
        let mut last = None;
        let whole = view.candidates(judge, wish.size, wish.align)?;
        let avoided = whole.iter().any(|candidate| candidate.ruling.stance == Stance::Avoid);
        // What rules avoid is taken where there is no stripe without it.
        for shun in [true, false].into_iter().filter(|shun| avoided || !shun) {
            for parts in (least..=most).rev() {
                let Some(split) = Split::new(wish.size, parts as u64, PAGE_SIZE as u64, wish.align) else {
                    continue;
                };
                match self.attempt(judge, wish, (parts, &split), shun, take)? {
                    Some((made, account)) if account.error == 0 => return Ok(Some((made, account))),
                    // Too few providers can hold a part.
                    Some((_, account)) => last = Some(account),
                    None => return Ok(None),
                }
            }
        }
        if take.is_some() {
            for provider in &view.providers {
                provider.counters.failed.fetch_add(1, Relaxed);
            }
        }
        let Some(account) = last else {
            return Err(refuse!(
                EINVAL,
                "{} bytes are not divided into {} equal parts of whole pages without one being empty",
                wish.size,
                least
            ));
        };
        Ok(Some((KVec::new(), account)))
    }

    /// Tries to find a provider for each of so many parts, and with a file allocates them. None where the rules have become
    /// others.
    fn attempt(
        &self,
        judge: &Judge<'_>,
        wish: &Wish,
        (parts, split): (usize, &Split),
        shun: bool,
        take: Option<u64>,
    ) -> Answer<Option<Made>> {
        let view = &*wish.view;
        let providers = &view.providers;
        let mut candidates = view.candidates(judge, split.share(), wish.align)?;
        let request = placement::Request {
            size: split.share(),
            align: wish.align,
            clients: view.clients.len(),
            named: wish.named,
            strategy: Strategy::Nearest,
            max_class: wish.max_class,
        };
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, providers.len(), GFP_KERNEL_ACCOUNT)?;
        let mut room = [0; consts::MAX_PARTS];
        // Each round that ends without memory takes one candidate out of the race.
        loop {
            let picks = &mut room[..parts];
            let (found, outcome) = placement::decide_several(&request, &candidates, shun, picks, &mut verdicts);
            let picks = &*picks;
            let full = found == parts;
            let mut made = KVec::with_capacity(parts, GFP_KERNEL_ACCOUNT)?;
            let mut stopped = None;
            for (n, &at) in picks.iter().enumerate().filter(|_| full) {
                let (_, size) = split.part(n);
                let provider = &providers[at];
                let answer = match take {
                    Some(file) => self
                        .take(judge, (size, wish.align, wish.clearing), provider, file)
                        .map(Some),
                    // Whether the cgroup may is known when it is charged.
                    None => match provider.charge_cgroup(size) {
                        Err(e) if e == EAGAIN => Err(Uncharged::Cgroup),
                        _ => Ok(None),
                    },
                };
                match answer {
                    Ok(Some(holder)) => made.push((holder, verdicts[at].class_raw()), GFP_KERNEL_ACCOUNT)?,
                    Ok(None) => {}
                    Err(Uncharged::Stale) => return Ok(None),
                    Err(why) => {
                        stopped = Some((at, why));
                        break;
                    }
                }
            }
            if let Some((at, why)) = stopped {
                drop(made);
                passed_over(&mut candidates[at], split.share(), why)?;
                continue;
            }
            let decided = Decided {
                size: split.share(),
                clients: view.clients.len(),
                rules: judge.source(),
                providers: &view.facts.known,
                candidates: &candidates,
                verdicts: &verdicts,
                outcome,
            };
            let account = decided.stripe_account(if full { picks } else { &[] }, found, parts)?;
            traced(wish, judge.file(), (account.chosen, account.error), take.is_none());
            // Nothing was allocated unless all was.
            return Ok(Some((made, account)));
        }
    }
}
