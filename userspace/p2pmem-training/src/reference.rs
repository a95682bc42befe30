// SPDX-License-Identifier: MIT OR Apache-2.0

//! A synchronous or tensor-parallel training of several ranks, computed by one processor: what each rank computes, and sums by the definition
//! of the allreduce. The result has the same bits as that of the ranks. A pipeline has the bits of one rank.

use anyhow::Result;
use p2pmem_collectives::element::{combine, Element, Reduction};
use p2pmem_collectives::schedule::{Algorithm, Call, Collective, Plan, Ring};

use crate::digits::Digits;
use crate::outcome::{bytes, floats, Outcome};
use crate::settings::{share, Batches, Settings};
use crate::slice::{check, gradients, Slice};
use crate::state::Layout;

/// Most bytes of a piece of an allreduce. The size of pieces does not change the result.
pub const CHUNK: u64 = 64 << 10;

/// Returns the allreduce of `bytes` bytes at a place.
pub fn sum(algorithm: Algorithm, at: u64, bytes: u64) -> Call {
    Call {
        collective: Collective::Allreduce(algorithm),
        element: Element::F32,
        reduction: Reduction::Sum,
        at,
        bytes,
        root: 0,
    }
}

/// Returns the allreduce of a gradient.
pub fn allreduce(algorithm: Algorithm, layout: &Layout) -> Call {
    sum(algorithm, layout.gradient_at(), layout.bytes())
}

/// Returns the result of a call for these bytes of the ranks.
fn result(call: Call, bytes: &[Vec<u8>]) -> Result<Vec<u8>> {
    let plan = Plan::new(call, Ring::by_rank(bytes.len()), CHUNK).map_err(anyhow::Error::msg)?;
    let segments = (0..plan.segments()).map(|index| {
        let segment = plan.segment(index);
        plan.result(index, |rank| {
            bytes[rank][segment.start as usize..segment.end as usize].to_vec()
        })
    });
    Ok(segments.collect::<Vec<_>>().concat())
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
        combine(Element::F32, Reduction::Sum, &mut parameters, &result(call, &updates)?);
        if (iteration + 1) % per_epoch == 0 {
            losses.push(network.score(&floats(&parameters), &digits.training).loss);
        }
    }
    Ok(Outcome::new(settings, digits, losses, &parameters))
}

/// Returns the result of a tensor-parallel training of `ranks` ranks.
///
/// # Errors
///
/// The settings or the number of ranks are not possible.
pub fn train_tensor(settings: &Settings, digits: &Digits, ranks: usize, algorithm: Algorithm) -> Result<Outcome> {
    settings.check(digits.training.len())?;
    let network = settings.network();
    check(&network, ranks)?;
    let mut batches = Batches::new(settings, digits.training.len());
    let per_epoch = batches.per_epoch();
    let mut whole = network.initial(settings.seed);
    let slices: Vec<Slice> = (0..ranks).map(|rank| Slice::new(network, rank, ranks)).collect();
    let mut parameters: Vec<Vec<f32>> = slices.iter().map(|slice| slice.cut(&whole)).collect();
    let mut add = |_, parts: Vec<Vec<f32>>| {
        let parts: Vec<Vec<u8>> = parts.iter().map(|part| bytes(part)).collect();
        Ok(floats(&result(sum(algorithm, 0, parts[0].len() as u64), &parts)?))
    };
    let mut losses = Vec::new();
    for number in 0..per_epoch * u64::from(settings.epochs) {
        let batch = batches.batch(number);
        let gradients = gradients(&slices, &parameters, &digits.training, batch, &mut add)?;
        for (own, gradient) in parameters.iter_mut().zip(&gradients) {
            let mut updated = bytes(own);
            combine(Element::F32, Reduction::Sum, &mut updated, &settings.update(gradient));
            *own = floats(&updated);
        }
        if (number + 1) % per_epoch == 0 {
            slices
                .iter()
                .zip(&parameters)
                .for_each(|(slice, own)| slice.paste(own, &mut whole));
            losses.push(network.score(&whole, &digits.training).loss);
        }
    }
    Ok(Outcome::new(settings, digits, losses, &bytes(&whole)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Digests of earlier versions, on other machines.
    #[test]
    fn the_bits_do_not_change() {
        let digits = Digits::load();
        let settings = Settings {
            epochs: 2,
            batch: 96,
            rate: 0.5,
            hidden: 32,
            layers: 2,
            seed: 1,
        };
        let alone = train(&settings, &digits, 1, Algorithm::Ring).unwrap();
        assert_eq!(
            alone.digest,
            "327ef14d09c9607a7e2c74c331350d7464891b9b98f5ab6c43357b9ab9007911"
        );
        let settings = Settings { epochs: 5, ..settings };
        let two = train(&settings, &digits, 2, Algorithm::Ring).unwrap();
        assert_eq!(
            two.digest,
            "c28d0c0cc2a533c96c96fed072eb90edb0114e5008801d58ec34ad2eb678e4fa"
        );
    }
}
