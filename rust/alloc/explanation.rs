// SPDX-License-Identifier: GPL-2.0

//! Decisions, and their explanations: the verdicts, an errno, and a message for `P2PMEM_IOC_EXPLAIN_LAST`.
//!
//! A [`Decision`] keeps the numbers it is made from. The explanation is computed from them when a program asks for it, or when
//! no provider can serve.
//!
//! Context: process context, may sleep (memory is allocated), no locks held.

use crate::{
    alloc::{
        request::AllocRequest,
        rules::check::{
            breaks,
            NotCharged,
            Source, //
        },
        snapshot::{
            ProviderInfo,
            Ranking,
            SnapshotParts, //
        }, //
    },
    ext::{
        abi::{
            self,
            consts, //
        },
        free_hint::FitBounds,
        refusal::{
            Refusal,
            Text, //
        }, //
    },
    mem::buffer::{
        Holder,
        Provider, //
    },
    policy::{
        placement::{
            self,
            Candidate,
            Request,
            Strategy, //
        },
        ranking::{
            self,
            Capacity,
            RankedProvider, //
        },
        rule::RuleName,
        rule_effect::{
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
            error,
            text,
        }
    }

    /// Returns the refusal for the caller, if no provider was chosen.
    pub(crate) fn refusal(&self) -> Refusal {
        Refusal::new(Error::from_errno(-self.error), self.text)
    }
}

/// A decision, with the data to explain it.
///
/// A decision is large, so nothing moves it: it is made in place.
pub(crate) struct Decision {
    /// The request in the form of the choice. For a stripe, the size is that of a part.
    request: Request,
    is_stripe: bool,
    /// Number of providers that are needed, one for each part.
    wanted: usize,
    /// The chosen providers, the best one first.
    picks: KVec<RankedProvider>,
    parts: Arc<SnapshotParts>,
    ranking: Arc<Ranking>,
    /// `None` before the first decision.
    source: Option<Source>,
    /// The known capacity of each provider, by index.
    known: KVec<Capacity>,
    /// Indexes of providers of which no piece that a request of this size and alignment can get is larger than
    /// [`Capacity::largest`].
    exact: KVec<usize>,
    /// The buffers, one in each chosen provider, until [`Self::take`].
    pub(crate) holders: KVec<Holder>,
    /// The providers that rules or the cgroup did not let the request have.
    refused: KVec<(usize, NotCharged)>,
}

impl Decision {
    /// Creates the place for a decision on a request.
    #[inline(always)]
    pub(crate) fn new(alloc_request: &AllocRequest) -> Self {
        Self {
            request: alloc_request.request(Strategy::Nearest),
            is_stripe: false,
            wanted: 1,
            picks: KVec::new(),
            parts: alloc_request.snapshot.parts.clone(),
            ranking: alloc_request.snapshot.unruled.clone(),
            source: None,
            known: KVec::new(),
            exact: KVec::new(),
            holders: KVec::new(),
            refused: KVec::new(),
        }
    }

    /// Begins a decision that needs `wanted` providers, instead of the previous one, and reads the free hint of each provider. The
    /// memory of vectors is reused. [`Self::set_source`] has to follow. Errors: `ENOMEM`.
    pub(crate) fn begin(
        &mut self,
        alloc_request: &AllocRequest,
        (request, wanted): (Request, usize),
        ranking: Arc<Ranking>,
    ) -> Result {
        let snapshot = &alloc_request.snapshot;
        self.request = request;
        (self.is_stripe, self.wanted) = (alloc_request.is_stripe(), wanted);
        if !Arc::ptr_eq(&self.parts, &snapshot.parts) {
            self.parts = snapshot.parts.clone();
        }
        self.ranking = ranking;
        self.refused.clear();
        self.exact.clear();
        self.known
            .resize(snapshot.providers.len(), Capacity::EMPTY, GFP_KERNEL_ACCOUNT)?;
        for (has, provider) in self.known.iter_mut().zip(&snapshot.providers) {
            *has = provider.capacity_hint();
        }
        Ok(())
    }

    /// Sets the rules of the decision.
    pub(crate) fn set_source(&mut self, source: Source) {
        self.source = Some(source);
    }

    /// Chooses the best providers, as many as are wanted. `skip_avoided` excludes those that rules avoid. Errors: `ENOMEM`.
    pub(crate) fn choose(&mut self, providers: &[Arc<Provider>], skip_avoided: bool) -> Result {
        self.picks.clear();
        while !self.is_complete() {
            let Some(next) = self.next(providers, skip_avoided) else {
                break;
            };
            self.picks.push(next, GFP_KERNEL_ACCOUNT)?;
        }
        Ok(())
    }

    /// Returns the best provider that is not chosen yet.
    ///
    /// The allocator of a provider is queried only if the hint does not prove whether the request fits, and the provider is not
    /// behind the result.
    fn next(&mut self, providers: &[Arc<Provider>], skip_avoided: bool) -> Option<RankedProvider> {
        let Self {
            request,
            ranking,
            known,
            exact,
            picks,
            refused,
            ..
        } = self;
        let need = FitBounds::of(request.size, request.align);
        let order = match skip_avoided {
            true => ranking.without_avoided(),
            false => &ranking.order,
        };
        let pack = request.strategy == Strategy::Pack;
        if request.max_class.is_none() && picks.is_empty() && refused.is_empty() && !ranking.is_of_request() {
            // The ranking excludes all that must be excluded, so the hints alone mostly suffice. Every allocation runs this loop.
            let mut suffice = true;
            let fit = |ranked: &RankedProvider| {
                let has = known.get(ranked.index).filter(|has| need.are_met(has));
                suffice &= has.is_some();
                has.copied()
            };
            let best = ranking::best(order, pack, fit).copied();
            if suffice {
                return best;
            }
        }
        let excluded = |ranked: &RankedProvider| {
            ranked.is_beyond(request.max_class)
                || picks.iter().any(|pick| pick.index == ranked.index)
                || refused.iter().any(|(at, _)| *at == ranked.index)
        };
        let fit = |ranked: &RankedProvider| {
            let at = ranked.index;
            let has = known.get_mut(at)?;
            if excluded(ranked) {
                return None;
            }
            if !need.are_met(has) && !exact.contains(&at) {
                *has = providers[at].exact_capacity(&need, request.size, request.align);
                // Without memory the provider is queried again by the next choice.
                let _ = exact.push(at, GFP_KERNEL_ACCOUNT);
            }
            let fits = has.is_live() && has.largest >= request.size && ranking.has_unreserved(at, *has, request.size);
            fits.then_some(*has)
        };
        ranking::best(order, pack, fit).copied()
    }

    /// Excludes a provider that did not give its memory. Each exclusion makes the choice smaller, so that retries end.
    ///
    /// Errors: `ENOMEM`, and any error that is not the provider's own, such as `EINTR`.
    pub(crate) fn exclude(&mut self, at: usize, why: NotCharged) -> Result {
        let has = &mut self.known[at];
        match why {
            NotCharged::Error(e) if e == ENODEV => *has = Capacity::REMOVED,
            // Another request took the memory first.
            NotCharged::Error(e) if e == ENOSPC => {
                has.largest = has.largest.min(self.request.size.saturating_sub(1));
                self.exact.push(at, GFP_KERNEL_ACCOUNT)?;
            }
            NotCharged::Error(e) => return Err(e),
            _ => {}
        }
        Ok(self.refused.push((at, why), GFP_KERNEL_ACCOUNT)?)
    }

    /// Returns the chosen providers, the best one first.
    pub(crate) fn picks(&self) -> &[RankedProvider] {
        &self.picks
    }

    /// Takes the buffers, each with the class of its path.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = (Holder, u32)> + '_ {
        let classes = self.picks.iter().map(|pick| pick.place.class_raw());
        self.holders.drain_all().zip(classes)
    }

    /// Whether enough providers can serve.
    pub(crate) fn is_complete(&self) -> bool {
        self.picks.len() == self.wanted
    }

    /// Returns the best chosen provider.
    fn first(&self) -> Option<&ProviderInfo> {
        let first = self.picks.first().filter(|_| self.is_complete())?;
        self.parts.providers.get(first.index)
    }

    /// Returns the id of the first chosen provider, 0 for none.
    pub(crate) fn chosen(&self) -> u32 {
        self.first().map_or(0, |provider| provider.id)
    }

    /// Computes the explanation. Errors: `ENOMEM`.
    pub(crate) fn explanation(&self) -> Result<Explanation> {
        let mut candidates = KVec::with_capacity(self.known.len(), GFP_KERNEL_ACCOUNT)?;
        for (at, has) in self.known.iter().enumerate() {
            let mut effect = self.ranking.effect(at);
            for (_, why) in self.refused.iter().filter(|(refused, _)| *refused == at) {
                match why {
                    NotCharged::Broken(broken) => breaks(&mut effect, *broken),
                    NotCharged::Cgroup => effect.over_cgroup = true,
                    _ => {}
                }
            }
            candidates.push(
                self.parts.candidate(at, (*has, self.exact.contains(&at)), effect),
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        let mut verdicts = KVec::from_elem(Verdict::EMPTY, candidates.len(), GFP_KERNEL_ACCOUNT)?;
        let mut picks = KVec::with_capacity(self.picks.len(), GFP_KERNEL_ACCOUNT)?;
        for pick in &self.picks {
            picks.push(pick.index, GFP_KERNEL_ACCOUNT)?;
        }
        let outcome = placement::explain(&self.request, &candidates, &picks, self.wanted, &mut verdicts);
        let mut rows = KVec::with_capacity(verdicts.len(), GFP_KERNEL_ACCOUNT)?;
        for (verdict, provider) in verdicts.iter().zip(&self.parts.providers) {
            rows.push(self.row(verdict, provider), GFP_KERNEL_ACCOUNT)?;
        }
        let error = match self.is_complete() {
            true => 0,
            false => -errno(outcome).to_errno(),
        };
        Ok(Explanation {
            verdicts: rows,
            chosen: self.chosen(),
            error,
            text: self.text(outcome, &candidates, &verdicts),
        })
    }

    /// Returns the errno, positive; 0 if providers were chosen.
    pub(crate) fn error(&self) -> i32 {
        match self.is_complete() {
            true => 0,
            false => self
                .explanation()
                .map_or_else(|e| -e.to_errno(), |explanation| explanation.error),
        }
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
        self.source.as_ref().map_or(RuleName::EMPTY, |source| source.name(rule))
    }

    /// Returns the message.
    fn text(&self, outcome: Outcome, candidates: &[Candidate<'_>], verdicts: &[Verdict]) -> Text {
        let (size, providers) = (self.request.size, self.parts.providers.len());
        if let Some(first) = self.first() {
            return match self.is_stripe {
                true => Text::new(fmt!(
                    "{} of {} providers were chosen, for {} bytes each",
                    self.picks.len(),
                    providers,
                    size
                )),
                false => Text::new(fmt!("{} was chosen of {} providers", first.addr, providers)),
            };
        }
        let refusal = self.refusal(outcome, candidates, verdicts);
        if self.wanted == 1 {
            return refusal;
        }
        Text::new(fmt!(
            "a stripe needs {} parts of {} bytes, and {} find a provider; next part: {}",
            self.wanted,
            size,
            self.picks.len(),
            match outcome {
                Outcome::NoProvider => "there is no other provider",
                _ => refusal.as_str(),
            }
        ))
    }

    /// Returns the message for a decision without a provider.
    fn refusal(&self, outcome: Outcome, candidates: &[Candidate<'_>], verdicts: &[Verdict]) -> Text {
        let (size, clients) = (self.request.size, self.parts.clients);
        let uid = self.source.as_ref().map_or(0, |source| source.uid);
        // Returns the first provider with this verdict by a rule, the rule and the candidate.
        let first = |code: VerdictCode| {
            verdicts
                .iter()
                .zip(&self.parts.providers)
                .zip(candidates)
                .filter(|((verdict, _), _)| verdict.code == code)
                .find_map(|((verdict, provider), candidate)| Some((verdict.rule?, provider, candidate)))
        };
        let whose = |rule: RuleRef| match rule.set {
            RuleOrigin::Admin => "rule",
            RuleOrigin::File => "the file's own rule",
        };
        match outcome {
            Outcome::NoProvider => Text::new(fmt!("no provider is published: see p2pmemctl publish")),
            Outcome::NoSuchProvider => Text::new(fmt!("the named provider does not exist: see p2pmemctl list")),
            Outcome::NotUpstream => Text::new(fmt!("pci_p2pmem_find_many() finds no provider for these clients: use another strategy")),
            Outcome::Removing => Text::new(fmt!("all eligible providers are being removed")),
            Outcome::Unreachable => Text::new(fmt!(
                "no provider can be reached by all {} clients: the host bridge is not on the kernel's list, or ACS redirects",
                clients
            )),
            Outcome::Denied => match first(VerdictCode::Denied) {
                Some((rule, provider, _)) => Text::new(fmt!(
                    "{} {} denies {} to uid {}, and no other provider is eligible",
                    whose(rule),
                    self.name(rule).as_str(),
                    provider.addr,
                    uid
                )),
                None => Text::EMPTY,
            },
            Outcome::TooFar => match first(VerdictCode::TooFar) {
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
            Outcome::Quota => match first(VerdictCode::Quota) {
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
                            uid,
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
            Outcome::Reserved => match first(VerdictCode::Reserved) {
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

/// Returns the errno of a decision without a provider: `EACCES`, `EDQUOT`, `ENOSPC` or `ENODEV`.
fn errno(outcome: Outcome) -> Error {
    match outcome {
        Outcome::Denied => EACCES,
        Outcome::Quota | Outcome::Cgroup => abi::errno(abi::EDQUOT),
        outcome if outcome.is_out_of_space() => ENOSPC,
        _ => ENODEV,
    }
}
