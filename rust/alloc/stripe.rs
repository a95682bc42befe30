// SPDX-License-Identifier: GPL-2.0

//! Stripes: one request that several providers serve with one buffer each, all or none.
//!
//! Context: process context, may sleep, no locks held.

use crate::{
    alloc::{
        explanation::{
            traced,
            DecisionInput,
            Explanation, //
        },
        orchestrator::{
            exclude,
            Orchestrator, //
        },
        request::AllocRequest,
        rules::{
            NotCharged,
            RuleCheck, //
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
            Strategy, //
        },
        rule_effect::Preference,
        split::Split,
        verdict::Verdict, //
    }, //
};
use kernel::{page::PAGE_SIZE, prelude::*, sync::atomic::Relaxed};

/// The buffers of a stripe with the class of each one's path, and the explanation. Without a stripe there are no buffers.
type Made = (KVec<(Holder, u32)>, Explanation);

impl Orchestrator {
    /// Allocates a stripe of at most `capacity` parts for `file`. A stripe that nobody can serve is no error: the
    /// explanation says why.
    ///
    /// Errors: `EAGAIN` if the rules changed too often, `EINVAL` if the size cannot be divided, `ENOMEM`, `EINTR`.
    pub(crate) fn stripe(&self, wanted: &AllocRequest, capacity: usize, file: u64) -> Answer<Made> {
        self.choose_stripe(wanted, capacity, file, true)
    }

    /// Decides as [`Self::stripe`] would, without allocating.
    pub(crate) fn explain_stripe(&self, wanted: &AllocRequest, file: u64) -> Answer<Explanation> {
        Ok(self.choose_stripe(wanted, consts::MAX_PARTS, file, false)?.1)
    }

    /// Decides a stripe of `file`; with `take` set also allocates the buffers. Repeats the decision if the rules changed
    /// meanwhile, [`Self::RULE_CHANGES`] times at most.
    fn choose_stripe(&self, wanted: &AllocRequest, capacity: usize, file: u64, take: bool) -> Answer<Made> {
        for _ in 0..Self::RULE_CHANGES {
            let rule_check = RuleCheck::new(self.rules(), wanted.own.clone(), file);
            if let Some(made) = self.stripe_by(&rule_check, wanted, capacity, take.then_some(file))? {
                return Ok(made);
            }
        }
        Err(refuse!(EAGAIN, "the rules changed again and again"))
    }

    /// Decides as [`Self::choose_stripe`] does, with the rules of `rule_check`. Returns `None` if the rules changed
    /// meanwhile.
    ///
    /// Tries the largest number of parts first, and all numbers without providers that rules avoid before any number with
    /// them.
    fn stripe_by(
        &self,
        rule_check: &RuleCheck<'_>,
        wanted: &AllocRequest,
        capacity: usize,
        take: Option<u64>,
    ) -> Answer<Option<Made>> {
        let snapshot = &*wanted.snapshot;
        let (least, most) = match wanted.parts {
            0 => (1, snapshot.providers.len().min(capacity).clamp(1, consts::MAX_PARTS)),
            parts => (parts, parts),
        };
        let mut last = None;
        let whole = snapshot.candidates(rule_check, wanted.size, wanted.align)?;
        let avoided = whole
            .iter()
            .any(|candidate| candidate.effect.preference == Preference::Avoid);
        // Providers that rules avoid are used only if there is no stripe without them.
        for skip_avoided in [true, false]
            .into_iter()
            .filter(|skip_avoided| avoided || !skip_avoided)
        {
            for parts in (least..=most).rev() {
                let Some(split) = Split::new(wanted.size, parts as u64, PAGE_SIZE as u64, wanted.align) else {
                    continue;
                };
                match self.attempt(rule_check, wanted, (parts, &split), skip_avoided, take)? {
                    Some((made, explanation)) if explanation.error == 0 => return Ok(Some((made, explanation))),
                    // Too few providers can serve a part of that size: try fewer parts.
                    Some((_, explanation)) => last = Some(explanation),
                    None => return Ok(None),
                }
            }
        }
        if take.is_some() {
            for provider in &snapshot.providers {
                provider.counters.failed.fetch_add(1, Relaxed);
            }
        }
        let Some(explanation) = last else {
            return Err(refuse!(
                EINVAL,
                "{} bytes are not divided into {} equal parts of whole pages without one being empty",
                wanted.size,
                least
            ));
        };
        Ok(Some((KVec::new(), explanation)))
    }

    /// Tries to choose `parts` providers, and allocates the parts if `take` has a file. `skip_avoided` excludes the providers that
    /// rules avoid. Returns `None` if the rules changed meanwhile; an explanation without error means success.
    fn attempt(
        &self,
        rule_check: &RuleCheck<'_>,
        wanted: &AllocRequest,
        (parts, split): (usize, &Split),
        skip_avoided: bool,
        take: Option<u64>,
    ) -> Answer<Option<Made>> {
        let snapshot = &*wanted.snapshot;
        let providers = &snapshot.providers;
        let mut candidates = snapshot.candidates(rule_check, split.share(), wanted.align)?;
        let request = placement::Request {
            size: split.share(),
            align: wanted.align,
            clients: snapshot.clients.len(),
            named: wanted.named,
            strategy: Strategy::Nearest,
            max_class: wanted.max_class,
        };
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, providers.len(), GFP_KERNEL_ACCOUNT)?;
        let mut capacity = [0; consts::MAX_PARTS];
        // Each round that ends without memory excludes one candidate, so the loop ends.
        loop {
            let picks = &mut capacity[..parts];
            let (found, outcome) = placement::decide_several(&request, &candidates, skip_avoided, picks, &mut verdicts);
            let picks = &*picks;
            let full = found == parts;
            let mut made = KVec::with_capacity(parts, GFP_KERNEL_ACCOUNT)?;
            let mut stopped = None;
            for (n, &at) in picks.iter().enumerate().filter(|_| full) {
                let (_, size) = split.part(n);
                let provider = &providers[at];
                let answer = match take {
                    Some(file) => self
                        .take(rule_check, (size, wanted.align, wanted.clearing), provider, file)
                        .map(Some),
                    // The dmem cgroup has no call that only checks: the charge is made and dropped.
                    None => match provider.charge_cgroup(size) {
                        Err(e) if e == EAGAIN => Err(NotCharged::Cgroup),
                        _ => Ok(None),
                    },
                };
                match answer {
                    Ok(Some(holder)) => made.push((holder, verdicts[at].class_raw()), GFP_KERNEL_ACCOUNT)?,
                    Ok(None) => {}
                    Err(NotCharged::Stale) => return Ok(None),
                    Err(why) => {
                        stopped = Some((at, why));
                        break;
                    }
                }
            }
            if let Some((at, why)) = stopped {
                drop(made);
                exclude(&mut candidates[at], split.share(), why)?;
                continue;
            }
            let decided = DecisionInput {
                size: split.share(),
                clients: snapshot.clients.len(),
                rules: rule_check.source(),
                providers: &snapshot.parts.known,
                candidates: &candidates,
                verdicts: &verdicts,
                outcome,
            };
            let explanation = decided.stripe_explanation(if full { picks } else { &[] }, found, parts)?;
            traced(
                wanted,
                rule_check.file(),
                (explanation.chosen, explanation.error),
                take.is_none(),
            );
            // `made` has either all parts or none.
            return Ok(Some((made, explanation)));
        }
    }
}
