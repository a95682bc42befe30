// SPDX-License-Identifier: MIT OR Apache-2.0

//! The first words of a connection between two ranks. Each side proves that it knows the secret of the job, without sending it.
//!
//! The side that connects sends a hello. The other side answers with its own hello and a proof. The first side sends its proof,
//! and the other side a byte of welcome. A proof is an HMAC with the secret over both hellos, which contain the version, the ranks, and
//! a random number of each side.

use anyhow::{Context, Result};
use hmac::{Hmac, Mac};
use rustix::rand::{getrandom, GetRandomFlags};
use sha2::Sha256;

/// Version of the protocol.
pub(crate) const VERSION: u32 = 1;
/// The secret of a job.
pub(crate) type Token = [u8; 16];

/// Bytes of a hello.
pub(crate) const HELLO: usize = 36;
/// Bytes of a proof.
pub(crate) const PROOF: usize = 32;
/// The byte of welcome.
pub(crate) const WELCOME: u8 = b'W';

/// Start of each hello.
const MAGIC: [u8; 8] = *b"p2pmemGr";

/// Which side proves that it knows the secret.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    /// The side that connects.
    Connects,
    /// The side that listens.
    Listens,
}

/// The first words of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The rank that speaks.
    pub(crate) from: u32,
    /// The rank that is meant.
    pub(crate) to: u32,
}

impl Hello {
    /// Returns the bytes of the hello, with a new random number.
    ///
    /// # Errors
    ///
    /// The kernel has no random numbers.
    pub(crate) fn encode(self) -> Result<[u8; HELLO]> {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.from.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.to.to_le_bytes());
        fill_random(&mut bytes[20..])?;
        Ok(bytes)
    }

    /// Returns the hello; `None` if the bytes are not a hello of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO] = bytes.try_into().ok()?;
        let word = |at: usize| bytes[at..].first_chunk().map(|word| u32::from_le_bytes(*word));
        (bytes[..8] == MAGIC && word(8)? == VERSION).then_some(())?;
        Some(Self {
            from: word(12)?,
            to: word(16)?,
        })
    }
}

/// Fills the bytes with random numbers.
///
/// # Errors
///
/// The kernel has no random numbers.
pub(crate) fn fill_random(mut bytes: &mut [u8]) -> Result<()> {
    while !bytes.is_empty() {
        let count = match getrandom(&mut *bytes, GetRandomFlags::empty()) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error).context("random numbers for the secret of the job"),
        };
        bytes = &mut bytes[count..];
    }
    Ok(())
}

fn mac(token: &Token, side: Side, hellos: [&[u8]; 2]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(token).expect("HMAC has keys of any length");
    mac.update(match side {
        Side::Connects => b"connects",
        Side::Listens => b"listens ",
    });
    // First the hello of the side that connects.
    hellos.iter().for_each(|hello| mac.update(hello));
    mac
}

/// Returns the proof of a side. `hellos` are those of the side that connects and of the side that listens.
pub(crate) fn proof(token: &Token, side: Side, hellos: [&[u8]; 2]) -> [u8; PROOF] {
    mac(token, side, hellos).finalize().into_bytes().into()
}

/// Returns whether the bytes are the proof of a side. The time does not depend on the bytes.
pub(crate) fn is_proof(bytes: &[u8], token: &Token, side: Side, hellos: [&[u8]; 2]) -> bool {
    mac(token, side, hellos).verify_slice(bytes).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_names_both_ranks_and_is_never_the_same() {
        let hello = Hello { from: 3, to: 70_000 };
        let bytes = hello.encode().unwrap();
        assert_eq!(Hello::decode(&bytes), Some(hello));
        assert_ne!(hello.encode().unwrap(), bytes);
        assert_eq!(Hello::decode(&bytes[1..]), None);
        for at in [0, 7, 8, 11] {
            let mut other = bytes;
            other[at] ^= 1;
            assert_eq!(Hello::decode(&other), None);
        }
    }

    #[test]
    fn a_proof_belongs_to_a_secret_a_side_and_both_hellos() {
        let (token, first, second) = ([1; 16], [2; HELLO], [3; HELLO]);
        let hellos = [&first[..], &second[..]];
        let good = proof(&token, Side::Connects, hellos);
        assert!(is_proof(&good, &token, Side::Connects, hellos));
        assert!(!is_proof(&good, &token, Side::Listens, hellos));
        assert!(!is_proof(&good, &[9; 16], Side::Connects, hellos));
        assert!(!is_proof(&good, &token, Side::Connects, [&second, &first]));
        assert!(!is_proof(&good[..31], &token, Side::Connects, hellos));
        assert!(!is_proof(&[0; PROOF], &token, Side::Connects, hellos));
    }
}
