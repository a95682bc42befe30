// SPDX-License-Identifier: MIT OR Apache-2.0

//! The share of this machine's processor time that its own host gave to others (steal time), which explains long
//! durations.

use std::fs;

use anyhow::{Context, Result};

/// The time of all processors in ticks, since the machine started.
#[derive(Clone, Copy)]
pub struct Ticks {
    all: u64,
    stolen: u64,
}

impl Ticks {
    /// Reads the present times.
    ///
    /// # Errors
    ///
    /// `/proc/stat` is missing or has another form.
    pub fn now() -> Result<Self> {
        Self::parse(&fs::read_to_string("/proc/stat").context("/proc/stat")?)
    }

    fn parse(stat: &str) -> Result<Self> {
        let line = stat.lines().next().and_then(|line| line.strip_prefix("cpu "));
        let numbers = line.context("/proc/stat does not begin with all processors")?;
        let numbers = numbers.split_whitespace().map(str::parse);
        let numbers: Vec<u64> = numbers.collect::<Result<_, _>>().context("/proc/stat")?;
        // user nice system idle iowait irq softirq steal; the later columns are included in the first two.
        let numbers = numbers.get(..8).context("/proc/stat is older than steal")?;
        Ok(Self {
            all: numbers.iter().sum(),
            stolen: numbers[7],
        })
    }

    /// Returns the share of all processor time that was stolen between `self` and `until`.
    pub fn withheld(&self, until: &Ticks) -> f64 {
        let (all, stolen) = (
            until.all.saturating_sub(self.all),
            until.stolen.saturating_sub(self.stolen),
        );
        stolen as f64 / all.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn withheld_fraction_of_interval() -> Result<()> {
        let before = Ticks::parse("cpu  100 0 50 800 0 1 2 47 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")?;
        let after = Ticks::parse("cpu  150 0 50 800 0 1 2 97 0 0\n")?;
        assert_eq!(before.withheld(&after), 0.5);
        assert_eq!((after.withheld(&after), after.withheld(&before)), (0.0, 0.0));
        Ok(())
    }

    #[test]
    fn malformed_cpu_times_are_rejected() {
        for bad in ["", "cpu0 1 2 3 4 5 6 7 8", "cpu  1 2 3", "cpu  1 2 3 4 5 6 7 x"] {
            assert!(Ticks::parse(bad).is_err(), "{bad:?}");
        }
    }
}
