// SPDX-License-Identifier: MIT OR Apache-2.0

//! The state of a training, as it is in accelerator memory, in the message that starts the ranks, and in a checkpoint: a page with a
//! header, and then the parameters.
//!
//! | bytes of the header | content (numbers are little-endian) |
//! |---|---|
//! | 0 to 8 | `P2PMTRN1` |
//! | 8 to 16 | iterations that are complete |
//! | 16 to 24 | number of parameters |
//! | 24 to 32 | number of losses |
//! | 32 to 64 | the training, by [`Settings::fingerprint`](crate::settings::Settings::fingerprint) |
//! | 64 to 96 | SHA-256 of the parameters |
//! | 96 to 128 | SHA-256 of the header, in which these 32 bytes are 0 |
//! | 128 to 4096 | the loss after each epoch, as f64 |

use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::settings::MAX_EPOCHS;

/// Bytes of the header, and alignment of everything in the memory.
pub const PAGE: u64 = 4096;
const MAGIC: &[u8; 8] = b"P2PMTRN1";
const LOSSES: usize = 128;
const _: () = assert!(LOSSES + 8 * MAX_EPOCHS as usize <= PAGE as usize);

/// Where a rank of a synchronous training has what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    parameters: u64,
}

impl Layout {
    /// Returns the layout for a network of this number of parameters.
    pub fn new(parameters: usize) -> Self {
        Self {
            parameters: 4 * parameters as u64,
        }
    }

    /// Returns the bytes of the parameters, which are as many as those of a gradient.
    pub fn bytes(&self) -> u64 {
        self.parameters
    }

    /// Returns the place of the parameters.
    pub fn parameters_at(&self) -> u64 {
        PAGE
    }

    /// Returns the bytes of the state, from byte 0: whole pages.
    pub fn state(&self) -> u64 {
        PAGE + self.parameters.next_multiple_of(PAGE)
    }

    /// Returns the place of the gradient.
    pub fn gradient_at(&self) -> u64 {
        self.state()
    }

    /// Returns the bytes of state and gradient.
    pub fn payload(&self) -> u64 {
        self.state() + self.parameters
    }
}

/// The header of a state.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// Iterations that are complete.
    pub iteration: u64,
    /// Number of parameters.
    pub parameters: u64,
    /// The training.
    pub fingerprint: [u8; 32],
    /// SHA-256 of the parameters.
    pub digest: [u8; 32],
    /// The loss after each complete epoch, at most [`MAX_EPOCHS`].
    pub losses: Vec<f64>,
}

/// Returns the SHA-256 of parameters.
pub fn digest(parameters: &[u8]) -> [u8; 32] {
    Sha256::digest(parameters).into()
}

/// Returns the SHA-256 of a header whose own checksum is left out.
fn checksum(page: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(&page[..96]);
    hash.update([0; 32]);
    hash.update(&page[LOSSES..]);
    hash.finalize().into()
}

fn array<const N: usize>(page: &[u8], range: Range<usize>) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&page[range]);
    bytes
}

impl Header {
    /// Returns the page.
    pub fn encode(&self) -> Vec<u8> {
        let mut page = vec![0; PAGE as usize];
        page[..8].copy_from_slice(MAGIC);
        page[8..16].copy_from_slice(&self.iteration.to_le_bytes());
        page[16..24].copy_from_slice(&self.parameters.to_le_bytes());
        let losses = &self.losses[..self.losses.len().min(MAX_EPOCHS as usize)];
        page[24..32].copy_from_slice(&(losses.len() as u64).to_le_bytes());
        page[32..64].copy_from_slice(&self.fingerprint);
        page[64..96].copy_from_slice(&self.digest);
        for (place, loss) in page[LOSSES..].chunks_exact_mut(8).zip(losses) {
            place.copy_from_slice(&loss.to_le_bytes());
        }
        let sum = checksum(&page);
        page[96..LOSSES].copy_from_slice(&sum);
        page
    }

    /// Reads a page; `None` if it has no complete header.
    pub fn decode(page: &[u8]) -> Option<Self> {
        if page.len() != PAGE as usize || &page[..8] != MAGIC || checksum(page) != page[96..LOSSES] {
            return None;
        }
        let number = |at: usize| u64::from_le_bytes(array(page, at..at + 8));
        let losses = page[LOSSES..].chunks_exact(8);
        let losses = losses.take(usize::try_from(number(24)).ok()?);
        Some(Self {
            iteration: number(8),
            parameters: number(16),
            fingerprint: array(page, 32..64),
            digest: array(page, 64..96),
            losses: losses.map(|loss| f64::from_le_bytes(array(loss, 0..8))).collect(),
        })
    }

    /// Reads a state: the page and the parameters after it. `None` if one of them is not complete.
    pub fn decode_state(state: &[u8]) -> Option<Self> {
        let header = Self::decode(state.get(..PAGE as usize)?)?;
        let bytes = usize::try_from(header.parameters.checked_mul(4)?).ok()?;
        let parameters = state.get(PAGE as usize..)?.get(..bytes)?;
        (digest(parameters) == header.digest).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> Vec<u8> {
        let parameters: Vec<u8> = (0..5000_u32).flat_map(|i| (i as f32 * 0.1).to_le_bytes()).collect();
        let header = Header {
            iteration: 12,
            parameters: 5000,
            fingerprint: [7; 32],
            digest: digest(&parameters),
            losses: vec![2.5, 0.1],
        };
        let mut state = header.encode();
        state.extend(&parameters);
        state.resize(Layout::new(5000).state() as usize, 0);
        assert_eq!(Header::decode_state(&state), Some(header));
        state
    }

    #[test]
    fn every_changed_byte_is_found() {
        let good = state();
        let used = PAGE as usize + 20_000;
        for at in (0..PAGE as usize).chain((PAGE as usize..used).step_by(97)) {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert_eq!(Header::decode_state(&bad), None, "byte {at}");
        }
        for len in [0, 100, PAGE as usize, used - 1] {
            assert_eq!(Header::decode_state(&good[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn a_header_has_the_losses_of_all_epochs() {
        let header = Header {
            iteration: u64::MAX,
            parameters: 0,
            fingerprint: [0; 32],
            digest: digest(&[]),
            losses: (0..MAX_EPOCHS).map(f64::from).collect(),
        };
        assert_eq!(Header::decode(&header.encode()), Some(header));
    }
}
