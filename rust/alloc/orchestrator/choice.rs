// SPDX-License-Identifier: GPL-2.0

//! The choice of a provider for a request, and the allocation from that provider.
//!
//! Deciding goes in three stages, from cheap to complete: [`AllocRequest::quick`] without rules, `choose_fast` with rules
//! that count no bytes, `choose_by` with everything. A stage that cannot decide passes the request to the next one; all
//! give the same answer.
//!
//! Context: process context, may sleep, with no lock held. Locks: those of the rules and of the chosen provider, for short
//! sections.

use crate::{
    alloc::{
        explanation::{
            traced,
            Decision,
            DecisionInput,
            QuickDecision, //
        },
        orchestrator::Orchestrator,
        request::AllocRequest,
        rules::check::{
            breaks,
            NotCharged,
            RuleCheck, //
        },
        snapshot::TopologySnapshot, //
    },
    ext::{
        abi::consts,
        p2pdma,
        refusal::{
            refuse,
            Answer, //
        }, //
    },
    mem::{
        buffer::{
            Buffer,
            Holder,
            Provider, //
        },
        memory::Clearing, //
    },
    policy::{
        placement::{
            self,
            Candidate,
            Strategy, //
        },
        verdict::Verdict, //
    }, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc, //
    },
};

/// Records in `candidate` why it gave no memory of `size` bytes, so that the next decision passes it over.
///
/// Errors: `EAGAIN` if the rules changed, and any error that is not the candidate's own, such as `EINTR`.
pub(crate) fn exclude(candidate: &mut Candidate<'_>, size: u64, why: NotCharged) -> Result {
    match why {
        NotCharged::Broken(broken) => breaks(&mut candidate.effect, broken),
        NotCharged::Cgroup => candidate.effect.over_cgroup = true,
        NotCharged::Error(e) if e == ENOSPC => candidate.refused(size),
        NotCharged::Error(e) if e == ENODEV => candidate.live = false,
        NotCharged::Error(e) => return Err(e),
        NotCharged::Stale => return Err(EAGAIN),
    }
    Ok(())
}

impl Orchestrator {
    /// The number of decisions for one request before `EAGAIN`, if the rules change during each of them.
    pub(crate) const RULE_CHANGES: u32 = 16;

    /// Decides a request of `file`; with `take` set also allocates the buffer. `spare` is an unused decision whose memory
    /// is reused.
    ///
    /// Returns the handle of the buffer, if one was allocated, and the decision. A decision that chooses no provider is no
    /// error of this function.
    ///
    /// Errors: `EAGAIN` if the rules changed [`Self::RULE_CHANGES`] times, `ENOMEM`, `EINTR`.
    fn choose(
        &self,
        alloc_request: &AllocRequest,
        file: u64,
        take: bool,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<(Option<Holder>, Decision)> {
        let mut spare = spare;
        // Without rules and without anything to charge, the decision does not need the caller's credentials.
        if !take && self.rules.are_none() && alloc_request.own.as_ref().is_none_or(|own| own.is_empty()) {
            if let Some((quick, provider)) = alloc_request.quick(None, spare.take())? {
                if provider.try_charge_cgroup(alloc_request.size).is_ok() {
                    traced(alloc_request, file, (provider.id, 0), true);
                    return Ok((None, Decision::QuickDecision(quick)));
                }
            }
        }
        for _ in 0..Self::RULE_CHANGES {
            let rule_check = RuleCheck::new(&self.rules, alloc_request.own.clone(), file);
            if let Some((held, quick)) =
                self.choose_fast(&rule_check, alloc_request, take.then_some(file), spare.take())?
            {
                return Ok((held, Decision::QuickDecision(quick)));
            }
            if let Some(chosen) = self.choose_by(&rule_check, alloc_request, take.then_some(file))? {
                return Ok(chosen);
            }
        }
        Err(refuse!(EAGAIN, "the rules changed during every attempt: try again"))
    }

    /// Decides as [`Self::choose`] does, if strategy `nearest` is wanted, no rule counts bytes and a provider can serve.
    /// Otherwise, and if the allocation fails, returns `None`: [`Self::choose_by`] finds the reason.
    fn choose_fast(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        take: Option<u64>,
        spare: Option<KBox<QuickDecision>>,
    ) -> Result<Option<(Option<Holder>, KBox<QuickDecision>)>> {
        if !alloc_request.is_quick() {
            return Ok(None);
        }
        let ruled = match rule_check.applicable_rules() {
            _ if rule_check.is_empty() => None,
            Some(standing) => Some(alloc_request.snapshot.ruled(standing)?),
            None => return Ok(None),
        };
        let Some((quick, provider)) = alloc_request.quick(ruled.as_ref(), spare)? else {
            return Ok(None);
        };
        let held = match take {
            Some(file) => match self.take(
                rule_check,
                (alloc_request.size, alloc_request.align, alloc_request.clearing),
                provider,
                file,
            ) {
                Ok(holder) => Some(holder),
                Err(_) => return Ok(None),
            },
            None if provider.try_charge_cgroup(alloc_request.size).is_err() => return Ok(None),
            None => None,
        };
        traced(alloc_request, rule_check.file(), (provider.id, 0), take.is_none());
        Ok(Some((held, quick)))
    }

    /// Decides as [`Self::choose`] does, with all rules and exact capacities. Returns `None` if the rules changed
    /// meanwhile.
    fn choose_by(
        &self,
        rule_check: &RuleCheck<'_>,
        alloc_request: &AllocRequest,
        take: Option<u64>,
    ) -> Answer<Option<(Option<Holder>, Decision)>> {
        let snapshot = &*alloc_request.snapshot;
        let providers = &snapshot.providers;
        let mut candidates = snapshot.candidates(rule_check, alloc_request.size, alloc_request.align)?;
        let strategy = match alloc_request.strategy {
            consts::STRATEGY_UPSTREAM => Strategy::Upstream(Self::upstream_choice(snapshot)?),
            consts::STRATEGY_SPREAD => Strategy::Spread,
            consts::STRATEGY_PACK => Strategy::Pack,
            _ => Strategy::Nearest,
        };
        let request = alloc_request.request(strategy);
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, providers.len(), GFP_KERNEL)?;
        // Each round that ends without memory excludes one candidate, so the loop ends.
        loop {
            let choice = placement::decide(&request, &candidates, &mut verdicts);
            let chosen = choice.chosen.and_then(|at| Some((at, providers.get(at)?)));
            if chosen.is_none() && take.is_some() {
                for provider in providers {
                    provider.counters.failed.fetch_add(1, Relaxed);
                }
            }
            if let (None, Some((at, provider))) = (take, chosen) {
                if provider
                    .try_charge_cgroup(alloc_request.size)
                    .is_err_and(|e| e == EAGAIN)
                {
                    candidates[at].effect.over_cgroup = true;
                    continue;
                }
            }
            let mut held = None;
            if let (Some(file), Some((at, provider))) = (take, chosen) {
                match self.take(
                    rule_check,
                    (alloc_request.size, alloc_request.align, alloc_request.clearing),
                    provider,
                    file,
                ) {
                    Ok(holder) => held = Some(holder),
                    Err(NotCharged::Stale) => return Ok(None),
                    Err(why) => {
                        exclude(&mut candidates[at], alloc_request.size, why)?;
                        continue;
                    }
                }
            }
            let input = DecisionInput {
                size: alloc_request.size,
                clients: snapshot.clients.len(),
                rules: rule_check.source(),
                providers: &snapshot.parts.providers,
                candidates: &candidates,
                verdicts: &verdicts,
                outcome: choice.outcome,
            };
            let explanation = input.explanation(chosen.and_then(|(at, _)| snapshot.parts.providers.get(at)))?;
            traced(
                alloc_request,
                rule_check.file(),
                (explanation.chosen, explanation.error),
                take.is_none(),
            );
            return Ok(Some((
                held,
                Decision::Explanation(KBox::new(explanation, GFP_KERNEL_ACCOUNT)?),
            )));
        }
    }

    /// Allocates and charges a buffer of `size` bytes in `provider` for `file`. `align` is in bytes.
    ///
    /// Errors: [`NotCharged`]. Nothing stays charged or allocated then.
    pub(crate) fn take(
        &self,
        rule_check: &RuleCheck<'_>,
        (size, align, clearing): (u64, u64, Clearing),
        provider: &Arc<Provider>,
        file: u64,
    ) -> core::result::Result<Holder, NotCharged> {
        let cgroup_charge = provider.charge_cgroup(size).map_err(|e| match e {
            e if e == EAGAIN => NotCharged::Cgroup,
            e => NotCharged::Error(e),
        })?;
        let holder = provider
            .alloc(size, align, clearing)
            .and_then(|mut memory| {
                memory.cgroup_charge = Some(cgroup_charge);
                Buffer::create(provider.clone(), memory, size, file)
            })
            .map_err(NotCharged::Error)?;
        rule_check.register(holder.buffer())?;
        Ok(holder)
    }

    /// Returns the id of the provider that `pci_p2pmem_find_many()` chooses, or `None` if the kernel finds none or a device
    /// that is no provider.
    fn upstream_choice(snapshot: &TopologySnapshot) -> Result<Option<u32>> {
        let found = p2pdma::find_many(&snapshot.clients)?;
        Ok(found.and_then(|f| snapshot.providers.iter().find(|p| p.function().same(&f)).map(|p| p.id)))
    }

    /// Allocates a buffer for `file`. Without a buffer the decision says why. With `spare` the quick decision allocates no
    /// memory of its own.
    pub(crate) fn alloc(
        &self,
        alloc_request: &AllocRequest,
        file: u64,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<(Option<Holder>, Decision)> {
        self.choose(alloc_request, file, true, spare)
    }

    /// Decides as [`Self::alloc`] would, without allocating.
    pub(crate) fn explain(
        &self,
        alloc_request: &AllocRequest,
        file: u64,
        spare: Option<KBox<QuickDecision>>,
    ) -> Answer<Decision> {
        Ok(self.choose(alloc_request, file, false, spare)?.1)
    }
}
