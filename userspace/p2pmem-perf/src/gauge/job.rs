// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a measurement reports to the gauge while it runs.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};

use super::state::{Gauge, Pairs};
use crate::matrix::{Entry, Matrix, MatrixObserver, Pair};
use crate::observer::Observer;
use crate::report::{Report, SizeResult};

/// The shortest time between two rates.
const SAMPLE: Duration = Duration::from_millis(250);

/// The messages that were done when the last rate was computed.
#[derive(Default)]
struct Counted {
    at: Option<Instant>,
    bytes: u64,
    done: Vec<u64>,
    /// Whether the size has a rate.
    sampled: bool,
}

/// Observes the job of a gauge. For a matrix, it observes each of its runs.
pub(super) struct JobObserver {
    gauge: Arc<Gauge>,
    counted: RefCell<Counted>,
}

impl JobObserver {
    pub(super) fn new(gauge: Arc<Gauge>) -> Self {
        Self {
            gauge,
            counted: RefCell::default(),
        }
    }
}

impl Observer for JobObserver {
    fn proceed(&self) -> Result<()> {
        match self.gauge.stopped_by() {
            Some(viewer) => bail!("stopped by the viewer at {viewer}"),
            None => Ok(()),
        }
    }

    fn ready(&self, report: &Report) -> Result<()> {
        self.gauge.job_is_ready(report);
        Ok(())
    }

    fn size_starts(&self, bytes: u64, messages: u64) -> Result<()> {
        let nics = self.gauge.size_starts(bytes, messages);
        self.counted.replace(Counted {
            at: Some(Instant::now()),
            bytes,
            done: vec![0; nics],
            sampled: false,
        });
        Ok(())
    }

    fn progress(&self, done: &[u64]) -> Result<()> {
        let mut counted = self.counted.borrow_mut();
        let time = counted.at.map_or(Duration::ZERO, |at| at.elapsed());
        let rates = (time >= SAMPLE).then(|| {
            let bytes = counted.bytes as f64 / time.as_secs_f64();
            let last = counted.done.iter().copied().chain(std::iter::repeat(0));
            let rates = done.iter().zip(last);
            rates
                .map(|(now, before)| now.saturating_sub(before) as f64 * bytes)
                .collect()
        });
        if rates.is_some() {
            counted.at = Some(Instant::now());
            counted.done = done.to_vec();
            counted.sampled = true;
        }
        self.gauge.job_advances(done, rates);
        Ok(())
    }

    fn size_ends(&self, result: &SizeResult) -> Result<()> {
        // The average of messages that took too little time for a rate of their own.
        let rates = (!self.counted.borrow().sampled).then(|| {
            let rates = result.nics.iter().map(|nic| nic.speed.average_mib_per_s);
            rates.map(|rate| rate * f64::from(1 << 20)).collect()
        });
        self.gauge.size_ends(result, rates);
        Ok(())
    }
}

impl MatrixObserver for JobObserver {
    fn runs(&self) -> &dyn Observer {
        self
    }

    fn link_measured(&self, matrix: &Matrix, pairs: usize) -> Result<()> {
        self.gauge.matrix_has(matrix, Pairs { ended: 0, of: pairs });
        Ok(())
    }

    fn pair_starts(&self, pair: Pair) -> Result<()> {
        self.gauge
            .pair_starts(pair.from.name(), pair.to.name(), pair.mode_name());
        Ok(())
    }

    fn pair_ends(&self, _: &[Entry], matrix: &Matrix) -> Result<()> {
        self.gauge.pair_ends(matrix);
        Ok(())
    }
}
