// SPDX-License-Identifier: MIT OR Apache-2.0

//! Numbers that look random, the same ones on every machine and in every version of every library.

/// A sequence of numbers.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Begins the sequence of a seed with this number.
    pub fn new(seed: u64, number: u64) -> Self {
        Self(mix(seed) ^ mix(number.wrapping_add(1) << 32))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number from -1 to 1.
    pub fn symmetric(&mut self) -> f32 {
        // 24 bits are exact.
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Brings elements into another order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            let other = ((u128::from(self.next()) * (last as u128 + 1)) >> 64) as usize;
            list.swap(last, other);
        }
    }
}

/// The output function of SplitMix64.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fill_the_range() {
        let mut random = Random::new(1, 0);
        let numbers: Vec<f32> = (0..10_000).map(|_| random.symmetric()).collect();
        assert!(numbers.iter().all(|number| (-1.0..=1.0).contains(number)));
        let mean = numbers.iter().sum::<f32>() / 10_000.0;
        assert!(mean.abs() < 0.05, "{mean}");
    }

    #[test]
    fn each_order_has_all_elements() {
        let mut list: Vec<u32> = (0..100).collect();
        Random::new(1, 5).shuffle(&mut list);
        let mut other = (0..100).collect::<Vec<u32>>();
        Random::new(1, 6).shuffle(&mut other);
        assert_ne!(list, other);
        list.sort_unstable();
        assert_eq!(list, (0..100).collect::<Vec<_>>());
    }
}
