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
            choice::exclude,
            Orchestrator, //
        },
        request::AllocRequest,
        rules::check::{
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
    pub(crate) fn stripe(&self, alloc_request: &AllocRequest, capacity: usize, file: u64) -> Answer<Made> {
        self.choose_stripe(alloc_request, capacity, file, true)
    }

    /// Decides as [`Self::stripe`] would, without allocating.
    pub(crate) fn explain_stripe(&self, alloc_request: &AllocRequest, file: u64) -> Answer<Explanation> {
        Ok(self.choose_stripe(alloc_request, consts::MAX_PARTS, file, false)?.1)
    }

    /// Decides a stripe of `file`; with `take` set also allocates the buffers. Repeats the decision if the rules changed
    /// meanwhile, [`Self::RULE_CHANGES`] times at most.
    fn choose_stripe(&self, alloc_request: &AllocRequest, capacity: usize, file: u64, take: bool) -> Answer<Made> {
        for _ in 0..Self::RULE_CHANGES {
            let rule_check = RuleCheck::new(self.rules(), alloc_request.own.clone(), file);
            if let Some(made) = self.stripe_by(&rule_check, alloc_request, capacity, take.then_some(file))? {
                return Ok(made);
            }
        }
        Err(refuse!(EAGAIN, "the rules changed during every attempt: try again"))
    }

    /// Decides as [`Self::choose_stripe`] does, with the rules of `rule_check`. Returns `None` if the rules changed
    /// meanwhile.
    ///
    /// Tries the largest number of parts first, and all numbers without providers that rules avoid before any number with
    /// them.
    fn stripe_by(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        capacity: usize,
        take: Option<u64>,
    ) -> Answer<Option<Made>> {
        let snapshot = &*alloc_request.snapshot;
        let (least, most) = match alloc_request.parts {
            0 => (1, snapshot.providers.len().min(capacity).clamp(1, consts::MAX_PARTS)),
            parts => (parts, parts),
        };
        let mut last = None;
        let whole = snapshot.candidates(rule_check, alloc_request.size, alloc_request.align)?;
        let avoided = whole
            .iter()
            .any(|candidate| candidate.effect.preference == Preference::Avoid);
        // Providers that rules avoid are used only if there is no stripe without them.
        for skip_avoided in [true, false]
            .into_iter()
            .filter(|skip_avoided| avoided || !skip_avoided)
        {
            for parts in (least..=most).rev() {
                let Some(split) = Split::new(alloc_request.size, parts as u64, PAGE_SIZE as u64, alloc_request.align)
                else {
                    continue;
                };
                match self.attempt(rule_check, alloc_request, (parts, &split), skip_avoided, take)? {
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
                alloc_request.size,
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
        alloc_request: &AllocRequest,
        (parts, split): (usize, &Split),
        skip_avoided: bool,
        take: Option<u64>,
    ) -> Answer<Option<Made>> {
        let snapshot = &*alloc_request.snapshot;
        let providers = &snapshot.providers;
        let mut candidates = snapshot.candidates(rule_check, split.share(), alloc_request.align)?;
        let request = placement::Request {
            size: split.share(),
            align: alloc_request.align,
            clients: snapshot.clients.len(),
            named: alloc_request.named,
            strategy: Strategy::Nearest,
            max_class: alloc_request.max_class,
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
                        .take(
                            rule_check,
                            (size, alloc_request.align, alloc_request.clearing),
                            provider,
                            file,
                        )
                        .map(Some),
                    None => match provider.try_charge_cgroup(size) {
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
            let input = DecisionInput {
                size: split.share(),
                clients: snapshot.clients.len(),
                rules: rule_check.source(),
                providers: &snapshot.parts.providers,
                candidates: &candidates,
                verdicts: &verdicts,
                outcome,
            };
            let explanation = input.stripe_explanation(if full { picks } else { &[] }, found, parts)?;
            traced(
                alloc_request,
                rule_check.file(),
                (explanation.chosen, explanation.error),
                take.is_none(),
            );
            // `made` has either all parts or none.
            return Ok(Some((made, explanation)));
        }
    }
}
