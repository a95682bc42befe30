// SPDX-License-Identifier: MIT OR Apache-2.0

//! A synchronous training of several ranks, computed by one processor: each rank's gradient, and their sum by the definition of the
//! allreduce. The result has the same bits as that of the ranks.

use anyhow::Result;
use p2pmem_collectives::element::{combine, Element, Reduction};
use p2pmem_collectives::schedule::{Algorithm, Call, Collective, Plan, Ring};

use crate::digits::Digits;
use crate::outcome::{bytes, floats, Outcome};
use crate::settings::{share, Batches, Settings};
use crate::state::Layout;

/// Most bytes of a piece of an allreduce. The size of pieces does not change the result.
pub const CHUNK: u64 = 64 << 10;

/// Returns the allreduce of a gradient.
pub fn allreduce(algorithm: Algorithm, layout: &Layout) -> Call {
    Call {
        collective: Collective::Allreduce(algorithm),
        element: Element::F32,
        reduction: Reduction::Sum,
        at: layout.gradient_at(),
        bytes: layout.bytes(),
        root: 0,
    }
}

/// Returns the result of a synchronous training of `ranks` ranks.
///
/// # Errors
///
/// The settings or the number of ranks are not possible.
pub fn train(settings: &Settings, digits: &Digits, ranks: usize, algorithm: Algorithm) -> Result<Outcome> {
    settings.check(digits.training.len())?;
    let network = settings.network();
    let call = allreduce(algorithm, &Layout::new(network.parameters()));
    let plan = Plan::new(call, Ring::by_rank(ranks), CHUNK).map_err(anyhow::Error::msg)?;
    let mut batches = Batches::new(settings, digits.training.len());
    let mut parameters = bytes(&network.initial(settings.seed));
    let per_epoch = batches.per_epoch();
    let mut losses = Vec::new();
    for iteration in 0..per_epoch * u64::from(settings.epochs) {
        let values = floats(&parameters);
        let batch = batches.batch(iteration);
        let updates: Vec<Vec<u8>> = (0..ranks)
            .map(|rank| settings.update(&network.gradient(&values, &digits.training, share(batch, rank, ranks))))
            .collect();
        for index in 0..plan.segments() {
            let segment = plan.segment(index);
            let part = segment.start as usize..segment.end as usize;
            let sum = plan.result(index, |rank| updates[rank][part.clone()].to_vec());
            combine(Element::F32, Reduction::Sum, &mut parameters[part], &sum);
        }
        if (iteration + 1) % per_epoch == 0 {
            losses.push(network.score(&floats(&parameters), &digits.training).loss);
        }
    }
    Ok(Outcome::new(settings, digits, losses, &parameters))
}
