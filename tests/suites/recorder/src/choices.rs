// SPDX-License-Identifier: MIT OR Apache-2.0

//! Random numbers from a seed, and the payload of blocks.

/// A generator of numbers (xorshift). The same seed gives the same numbers.
#[derive(Debug, Clone)]
pub struct Choices(u64);

impl Choices {
    /// Returns the generator of a seed.
    pub fn new(seed: u64) -> Self {
        // Similar seeds must not give similar numbers.
        let mixed = seed
            .wrapping_add(0x9e37_79b9_7f4a_7c15)
            .wrapping_mul(0xbf58_476d_1ce4_e5b9);
        Self((mixed ^ (mixed >> 31)) | 1)
    }

    fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number less than `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        (self.word() >> 11) % limit
    }

    /// Returns true or false.
    pub fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

/// Returns the payload of a block. `salt` differs between recordings, so that content of an earlier use of a slot is
/// recognized.
pub fn payload(salt: u64, sequence: u64, length: usize) -> Vec<u8> {
    let mut choices = Choices::new(salt.wrapping_mul(0x1_0000_01b3) ^ sequence);
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        bytes.extend_from_slice(&choices.word().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_depends_on_salt_and_sequence_alone() {
        assert_eq!(payload(1, 2, 4096), payload(1, 2, 4096));
        for (salt, sequence) in [(1, 3), (2, 2), (2, 1)] {
            assert_ne!(payload(1, 2, 4096), payload(salt, sequence, 4096));
        }
        assert_eq!(payload(1, 2, 4095), payload(1, 2, 4096)[..4095]);
    }

    #[test]
    fn numbers_are_below_their_limit_and_reach_it() {
        let mut choices = Choices::new(7);
        let mut seen = [false; 5];
        for _ in 0..200 {
            seen[choices.below(5) as usize] = true;
        }
        assert_eq!(seen, [true; 5]);
    }
}
