// SPDX-License-Identifier: MIT OR Apache-2.0

//! The token that both sides have, and the proof of it.

use std::fmt;
use std::io;
use std::path::Path;

use hmac::{Hmac, Mac};
use p2pmem_web::token::{self, TokenError};
use sha2::Sha256;

/// Bytes of a challenge.
const NONCE: usize = 32;

/// The side that proves that it has the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The storage node.
    Node,
    /// The program at the accelerator.
    Program,
}

/// The secret that both sides have.
#[derive(Clone)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Checks a token.
    ///
    /// # Errors
    ///
    /// [`TokenError::TooShort`].
    pub fn new(token: &str) -> Result<Self, TokenError> {
        token::check(token).map(|token| Self(token.to_owned()))
    }

    /// Returns the token.
    #[cfg(feature = "web")]
    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// Reads a token from a file that only its owner and its group can read.
    ///
    /// # Errors
    ///
    /// [`TokenError`].
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        token::read(path).map(Self)
    }

    /// Returns a random challenge.
    pub(super) fn nonce() -> io::Result<String> {
        let mut bytes = [0; NONCE];
        let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        if count != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(hex::encode(bytes))
    }

    /// Returns the code for the proof of a side. Both sides have a part in it, so neither can use a proof of another connection.
    fn mac(&self, side: Side, node: &str, program: &str) -> Hmac<Sha256> {
        let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(self.0.as_bytes()).expect("a key of HMAC has any length");
        let side = match side {
            Side::Node => "node",
            Side::Program => "program",
        };
        for part in ["p2pmem-recorder control", side, node, program] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part.as_bytes());
        }
        mac
    }

    /// Returns the proof of a side for the random numbers of both sides.
    pub(super) fn proof(&self, side: Side, node: &str, program: &str) -> String {
        hex::encode(self.mac(side, node, program).finalize().into_bytes())
    }

    /// Checks a proof, in a time that does not depend on its content.
    pub(super) fn verify(&self, side: Side, node: &str, program: &str, proof: &str) -> bool {
        hex::decode(proof).is_ok_and(|proof| self.mac(side, node, program).verify_slice(&proof).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_for_one_token_and_one_challenge() {
        let token = Token::new("0123456789abcdef\n").unwrap();
        let other = Token::new("0123456789abcdeg").unwrap();
        let (nonce, later) = (Token::nonce().unwrap(), Token::nonce().unwrap());
        assert_ne!(nonce, later);
        let proof = token.proof(Side::Program, &nonce, "own");
        let verify = |token: &Token, side, nonce: &str, own, proof: &str| token.verify(side, nonce, own, proof);
        assert!(verify(&token, Side::Program, &nonce, "own", &proof));
        assert!(!verify(&token, Side::Node, &nonce, "own", &proof));
        assert!(!verify(&token, Side::Program, &later, "own", &proof));
        assert!(!verify(&token, Side::Program, &nonce, "ow", &proof));
        assert!(!verify(&other, Side::Program, &nonce, "own", &proof));
        for bad in ["", "00", &proof[1..], &"é".repeat(32), &"+1".repeat(32)] {
            assert!(!verify(&token, Side::Program, &nonce, "own", bad), "{bad}");
        }
    }

    #[test]
    fn a_token_is_long_and_secret() {
        assert!(matches!(Token::new("short"), Err(TokenError::TooShort)));
        let missing = Token::read(Path::new("/nonexistent/token"));
        assert!(matches!(missing, Err(TokenError::Read { .. })));
        let token = Token::new("0123456789abcdef").unwrap();
        assert_eq!(format!("{token:?}"), "Token");
    }
}
