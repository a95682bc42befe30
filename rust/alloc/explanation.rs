// SPDX-License-Identifier: GPL-2.0

//! Explanations: the verdicts of a decision, its errno, and a message for `P2PMEM_IOC_EXPLAIN_LAST`.
//!
//! A [`QuickDecision`] keeps the numbers it was made from, so that the explanation is computed only if a program asks. The
//! explanation is the same that the full decision gives.
//!
//! Context: process context, may sleep (memory is allocated), no locks held.

use crate::{
    alloc::{
        request::AllocRequest,
        rules::check::Source,
        snapshot::{
            ProviderInfo,
            RuledRanking,
            SnapshotParts, //
        }, //
    },
    ext::{
        abi::{
            self,
            consts, //
        },
        free_hint::{
            FitBounds,
            FreeHint, //
        },
        refusal::{
            Refusal,
            Text, //
        },
        trace, //
    },
    mem::buffer::Provider,
    policy::{
        path::PathClass,
        placement::{
            self,
            Candidate,
            Named,
            Strategy, //
        },
        ranking::{
            self,
            Capacity,
            RankedProvider, //
        },
        rule::RuleName,
        rule_effect::{
            RuleEffect,
            RuleOrigin,
            RuleRef, //
        },
        verdict::{
            Outcome,
            Verdict,
            VerdictCode, //
        }, //
    }, //
};
use kernel::{ffi, prelude::*, sync::Arc};

/// The explanation of a decision: a verdict for each provider, and a message.
pub(crate) struct Explanation {
    pub(crate) verdicts: KVec<abi::Verdict>,
    pub(crate) chosen: u32,
    pub(crate) class: u32,
    /// The errno, positive; 0 if a provider was chosen.
    pub(crate) error: i32,
    pub(crate) text: Text,
}

impl Explanation {
    /// Creates the explanation of a request that was refused before any provider was considered. `error` is a positive
    /// errno.
    pub(crate) fn of_refusal(error: i32, text: Text) -> Self {
        Self {
            verdicts: KVec::new(),
            chosen: 0,
            class: 0,
            error,
            text,
        }
    }

    /// Returns the refusal for the caller, if no provider was chosen.
    pub(crate) fn refusal(&self) -> Refusal {
        Refusal::new(Error::from_errno(-self.error), self.text)
    }

    /// Returns a copy. Errors: `ENOMEM`.
    pub(crate) fn again(&self) -> Result<Self> {
        let mut verdicts = KVec::with_capacity(self.verdicts.len(), GFP_KERNEL_ACCOUNT)?;
        verdicts.extend_from_slice(&self.verdicts, GFP_KERNEL_ACCOUNT)?;
        Ok(Self { verdicts, ..*self })
    }
}

/// A decision made from free hints alone, with the data to explain it.
pub(crate) struct QuickDecision {
    /// Bytes that were requested.
    size: u64,
    align: u64,
    max_class: Option<PathClass>,
    parts: Arc<SnapshotParts>,
    /// The effect of the rules; `None` if there were no rules.
    ruled: Option<Arc<RuledRanking>>,
    /// Capacity of each provider as the decision read it, in the order of [`Self::ranking`].
    capacities: KVec<Capacity>,
    /// Index of the chosen provider in [`SnapshotParts::known`].
    chosen: usize,
    /// Class of the path to the chosen provider.
    class: u32,
}

impl QuickDecision {
    /// Decides a request for the nearest provider under the rules of `ruled`. Per provider the decision reads one free hint
    /// and compares it; paths are not read.
    ///
    /// `spare` is an unused decision whose memory is reused, so that nothing is allocated.
    ///
    /// Returns `None` if the free hints do not suffice: no provider may be able to serve, or only the allocator knows.
    /// Errors: `ENOMEM`.
    pub(crate) fn decide(
        alloc_request: &AllocRequest,
        ruled: Option<&Arc<RuledRanking>>,
        spare: Option<KBox<Self>>,
    ) -> Result<Option<KBox<Self>>> {
        let (snapshot, size) = (&*alloc_request.snapshot, alloc_request.size);
        let Some(need) = FitBounds::of(size, alloc_request.align) else {
            return Ok(None);
        };
        let parts = &snapshot.parts;
        let mut quick = match spare {
            Some(quick) => quick,
            None => KBox::new(
                Self {
                    size,
                    align: alloc_request.align,
                    max_class: alloc_request.max_class,
                    parts: parts.clone(),
                    ruled: None,
                    capacities: KVec::new(),
                    chosen: 0,
                    class: 0,
                },
                GFP_KERNEL_ACCOUNT,
            )?,
        };
        quick
            .capacities
            .resize(parts.ranking.len(), Capacity::EMPTY, GFP_KERNEL_ACCOUNT)?;
        let fit = |hint: &Arc<FreeHint>| hint.fit(&need);
        let ranking = Self::ranking_of(parts, ruled);
        let chosen = ranking::nearest(alloc_request.max_class, ranking, &mut quick.capacities, fit);
        let Some(ranked) = chosen else {
            return Ok(None);
        };
        (quick.size, quick.align, quick.max_class) = (size, alloc_request.align, alloc_request.max_class);
        (quick.chosen, quick.class) = (ranked.index, ranked.class_raw());
        if !Arc::ptr_eq(&quick.parts, parts) {
            quick.parts = parts.clone();
        }
        if quick.ruled.as_ref().map(Arc::as_ptr) != ruled.map(Arc::as_ptr) {
            quick.ruled = ruled.cloned();
        }
        Ok(Some(quick))
    }

    /// Returns the ranking that a decision under `ruled` uses.
    fn ranking_of<'a>(
        parts: &'a SnapshotParts,
        ruled: Option<&'a Arc<RuledRanking>>,
    ) -> &'a [RankedProvider<Arc<FreeHint>>] {
        ruled.map_or(&parts.ranking, |ruled| &ruled.ranking)
    }

    /// The providers, in the order in which the decision considered them.
    fn ranking(&self) -> &[RankedProvider<Arc<FreeHint>>] {
        Self::ranking_of(&self.parts, self.ruled.as_ref())
    }

    /// Returns the effect of the rules on the provider with that index.
    fn effect(&self, provider: usize) -> RuleEffect {
        let effect = self.ruled.as_ref().and_then(|ruled| ruled.effects.get(provider));
        effect.copied().unwrap_or(RuleEffect::NONE)
    }

    /// Returns the index of the chosen provider in the snapshot.
    pub(crate) fn index(&self) -> usize {
        self.chosen
    }

    /// Returns the id of the chosen provider.
    pub(crate) fn provider(&self) -> u32 {
        self.parts.providers.get(self.chosen).map_or(0, |known| known.id)
    }

    /// Computes the explanation from the capacities that the decision read. Errors: `ENOMEM`.
    pub(crate) fn explanation(&self) -> Result<Explanation> {
        let parts = &*self.parts;
        let mut capacities = KVec::from_elem(Capacity::REMOVED, parts.providers.len(), GFP_KERNEL_ACCOUNT)?;
        for (ranked, has) in self.ranking().iter().zip(&self.capacities) {
            if let Some(capacity) = capacities.get_mut(ranked.index) {
                *capacity = Capacity {
                    free: has.free(),
                    largest: has.largest,
                };
            }
        }
        let mut candidates = KVec::with_capacity(capacities.len(), GFP_KERNEL_ACCOUNT)?;
        for (i, capacity) in capacities.iter().enumerate() {
            let candidate = Candidate {
                // A provider that ranks behind the chosen one may have a larger piece.
                exact: false,
                ..parts.candidate(i, *capacity, self.effect(i))
            };
            candidates.push(candidate, GFP_KERNEL_ACCOUNT)?;
        }
        let request = placement::Request {
            size: self.size,
            align: self.align,
            clients: parts.clients,
            named: Named::Any,
            strategy: Strategy::Nearest,
            max_class: self.max_class,
        };
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, candidates.len(), GFP_KERNEL_ACCOUNT)?;
        let choice = placement::decide(&request, &candidates, &mut verdicts);
        DecisionInput {
            size: self.size,
            clients: parts.clients,
            rules: self
                .ruled
                .as_ref()
                .map_or(Source::NONE, |ruled| ruled.applicable_rules.source()),
            providers: &parts.providers,
            candidates: &candidates,
            verdicts: &verdicts,
            outcome: choice.outcome,
        }
        .explanation(parts.providers.get(self.chosen))
    }
}

impl AllocRequest {
    /// Decides the request if [`Self::is_quick`] and the free hints suffice, under the rules of `ruled` only. Returns the
    /// decision and the chosen provider. Errors: `ENOMEM`.
    pub(crate) fn quick(
        &self,
        ruled: Option<&Arc<RuledRanking>>,
        spare: Option<KBox<QuickDecision>>,
    ) -> Result<Option<(KBox<QuickDecision>, &Arc<Provider>)>> {
        if !self.is_quick() {
            return Ok(None);
        }
        let Some(quick) = QuickDecision::decide(self, ruled, spare)? else {
            return Ok(None);
        };
        let provider = self.snapshot.providers.get(quick.index());
        Ok(provider.map(|provider| (quick, provider)))
    }
}

/// Emits the trace event of a decision. `chosen` is a provider id, `error` a positive errno, 0 for none; `dry` says that
/// nothing was to be allocated.
pub(crate) fn traced(alloc_request: &AllocRequest, file: u64, (chosen, error): (u32, i32), dry: bool) {
    trace::decision(|| trace::DecisionEvent {
        size: alloc_request.size,
        align: alloc_request.align,
        file,
        clients: alloc_request.snapshot.clients.len(),
        providers: alloc_request.snapshot.providers.len(),
        strategy: alloc_request.strategy,
        chosen,
        error: error as u32,
        dry,
    });
}

/// A decision, explained already or explained on demand.
pub(crate) enum Decision {
    Explanation(KBox<Explanation>),
    /// Explained when a program asks.
    QuickDecision(KBox<QuickDecision>),
}

impl Decision {
    /// Returns the id of the chosen provider, 0 for none.
    pub(crate) fn chosen(&self) -> u32 {
        match self {
            Self::Explanation(explanation) => explanation.chosen,
            Self::QuickDecision(quick) => quick.provider(),
        }
    }

    /// Returns the class of the path to the chosen provider, 0 without clients.
    pub(crate) fn class(&self) -> u32 {
        match self {
            Self::Explanation(explanation) => explanation.class,
            Self::QuickDecision(quick) => quick.class,
        }
    }
}

/// A decision and its input, from which the explanation is made. `providers`, `candidates` and `verdicts` have the same
/// order.
pub(crate) struct DecisionInput<'a> {
    /// Bytes wanted in one provider: for a stripe the size of a part.
    pub(crate) size: u64,
    /// Number of clients.
    pub(crate) clients: usize,
    pub(crate) rules: Source<'a>,
    pub(crate) providers: &'a [ProviderInfo],
    pub(crate) candidates: &'a [Candidate<'a>],
    pub(crate) verdicts: &'a [Verdict],
    pub(crate) outcome: Outcome,
}

impl DecisionInput<'_> {
    /// Returns the explanation. `chosen` is the chosen provider. Errors: `ENOMEM`.
    pub(crate) fn explanation(&self, chosen: Option<&ProviderInfo>) -> Result<Explanation> {
        let mut rows = KVec::with_capacity(self.verdicts.len(), GFP_KERNEL_ACCOUNT)?;
        let mut class = 0;
        for (verdict, provider) in self.verdicts.iter().zip(self.providers) {
            if chosen.is_some_and(|p| p.id == verdict.provider) {
                class = verdict.class_raw();
            }
            rows.push(self.row(verdict, provider), GFP_KERNEL_ACCOUNT)?;
        }
        let text = match chosen {
            Some(p) => Text::new(fmt!("{} was chosen of {} providers", p.addr, self.providers.len())),
            None => self.refusal(),
        };
        let error = match chosen {
            Some(_) => 0,
            None => -self.error().to_errno(),
        };
        Ok(Explanation {
            verdicts: rows,
            chosen: chosen.map_or(0, |p| p.id),
            class,
            error,
            text,
        })
    }

    /// Returns the verdict of one provider in the ABI's form.
    fn row(&self, verdict: &Verdict, provider: &ProviderInfo) -> abi::Verdict {
        let mut row = abi::Verdict {
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
                RuleOrigin::Admin => consts::RULES_ADMIN,
                RuleOrigin::File => consts::RULES_FILE,
            };
            let name = self.name(rule);
            for (to, from) in row.rule.iter_mut().zip(name.as_str().bytes()) {
                *to = from as ffi::c_char;
            }
        }
        row
    }

    fn name(&self, rule: RuleRef) -> RuleName {
        self.rules.name(rule)
    }

    /// Returns the uid of the requester.
    fn uid(&self) -> u32 {
        self.rules.uid
    }

    /// Returns the errno of a decision without a provider: `EACCES`, `EDQUOT`, `ENOSPC` or `ENODEV`.
    fn error(&self) -> Error {
        match self.outcome {
            Outcome::Denied => EACCES,
            Outcome::Quota | Outcome::Cgroup => abi::errno(abi::EDQUOT),
            outcome if outcome.is_out_of_space() => ENOSPC,
            _ => ENODEV,
        }
    }

    /// Returns the first provider with this verdict by a rule, the rule and the candidate.
    fn first(&self, code: VerdictCode) -> Option<(RuleRef, &ProviderInfo, &Candidate<'_>)> {
        self.verdicts
            .iter()
            .zip(self.providers)
            .zip(self.candidates)
            .filter(|((verdict, _), _)| verdict.code == code)
            .find_map(|((verdict, provider), candidate)| Some((verdict.rule?, provider, candidate)))
    }

    /// Returns the explanation of a stripe. `picks` are the indexes of the parts' providers, or empty if there is no
    /// stripe: then providers were found for `found` of `nr_parts` parts. Errors: `ENOMEM`.
    pub(crate) fn stripe_explanation(&self, picks: &[usize], found: usize, nr_parts: usize) -> Result<Explanation> {
        let mut explanation = self.explanation(picks.first().and_then(|&at| self.providers.get(at)))?;
        let worst = picks
            .iter()
            .filter_map(|&at| self.verdicts.get(at))
            .map(|v| v.class_raw())
            .max();
        explanation.class = worst.unwrap_or(0);
        explanation.text = match picks.len() {
            0 if nr_parts == 1 => explanation.text,
            0 => Text::new(fmt!(
                "a stripe needs {} parts of {} bytes, and {} find a provider; next part: {}",
                nr_parts,
                self.size,
                found,
                match self.outcome {
                    Outcome::NoProvider => "there is no other provider",
                    _ => explanation.text.as_str(),
                }
            )),
            parts => Text::new(fmt!(
                "{} of {} providers were chosen, for {} bytes each",
                parts,
                self.providers.len(),
                self.size
            )),
        };
        Ok(explanation)
    }

    /// Returns the message for a decision without a provider.
    fn refusal(&self) -> Text {
        let (size, clients) = (self.size, self.clients);
        let whose = |rule: RuleRef| match rule.set {
            RuleOrigin::Admin => "rule",
            RuleOrigin::File => "the file's own rule",
        };
        match self.outcome {
            Outcome::NoProvider => Text::new(fmt!("no provider is published: see p2pmemctl publish")),
            Outcome::NoSuchProvider => Text::new(fmt!("the named provider does not exist: see p2pmemctl list")),
            Outcome::NotUpstream => Text::new(fmt!("pci_p2pmem_find_many() finds no provider for these clients: use another strategy")),
            Outcome::Removing => Text::new(fmt!("all eligible providers are being removed")),
            Outcome::Unreachable => Text::new(fmt!(
                "no provider can be reached by all {} clients: the host bridge is not on the kernel's list, or ACS redirects",
                clients
            )),
            Outcome::Denied => match self.first(VerdictCode::Denied) {
                Some((rule, provider, _)) => Text::new(fmt!(
                    "{} {} denies {} to uid {}, and no other provider is eligible",
                    whose(rule),
                    self.name(rule).as_str(),
                    provider.addr,
                    self.uid()
                )),
                None => Text::EMPTY,
            },
            Outcome::TooFar => match self.first(VerdictCode::TooFar) {
                Some((rule, provider, _)) => Text::new(fmt!(
                    "{} {}: the path to {} exceeds its max_class, and no nearer provider is eligible",
                    whose(rule),
                    self.name(rule).as_str(),
                    provider.addr
                )),
                None => Text::new(fmt!("the paths to all providers exceed max_class")),
            },
            Outcome::TooSmall => Text::new(fmt!(
                "no eligible provider is large enough for {} bytes at this alignment",
                size
            )),
            Outcome::Quota => match self.first(VerdictCode::Quota) {
                Some((rule, _, candidate)) => {
                    let (used, limit, group) = candidate
                        .effect
                        .over
                        .map_or((0, 0, false), |over| (over.used, over.limit, over.group));
                    let name = self.name(rule);
                    match (rule.set, group) {
                        (RuleOrigin::File, _) => Text::new(fmt!(
                            "quota of the file's own rule {}: {} of {} bytes used, {} requested",
                            name.as_str(),
                            used,
                            limit,
                            size
                        )),
                        (RuleOrigin::Admin, true) => Text::new(fmt!(
                            "group_quota of rule {}: {} of {} bytes used, {} requested",
                            name.as_str(),
                            used,
                            limit,
                            size
                        )),
                        (RuleOrigin::Admin, false) => Text::new(fmt!(
                            "quota of rule {}: uid {} uses {} of {} bytes, {} requested",
                            name.as_str(),
                            self.uid(),
                            used,
                            limit,
                            size
                        )),
                    }
                }
                None => Text::EMPTY,
            },
            Outcome::Cgroup => Text::new(fmt!(
                "{} bytes exceed the cgroup's dmem.max on every eligible provider",
                size
            )),
            Outcome::Full => Text::new(fmt!("no eligible provider has {} bytes free", size)),
            Outcome::Reserved => match self.first(VerdictCode::Reserved) {
                Some((rule, provider, candidate)) => Text::new(fmt!(
                    "rule {} reserves the free memory of {} for others: {} bytes free, {} requested",
                    self.name(rule).as_str(),
                    provider.addr,
                    candidate.free,
                    size
                )),
                None => Text::EMPTY,
            },
            Outcome::Fragmented => Text::new(fmt!(
                "no eligible provider has {} contiguous bytes at this alignment",
                size
            )),
            Outcome::Chosen => Text::EMPTY,
        }
    }
}
