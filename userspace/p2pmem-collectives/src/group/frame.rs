// SPDX-License-Identifier: MIT OR Apache-2.0

//! Messages between two ranks: a length of four bytes, a kind of one byte, and the content. Numbers are little-endian.

use thiserror::Error;

/// Most bytes of a value of an exchange.
pub const MAX_VALUE: usize = 64 << 10;
/// Most bytes of a message after its length: kind, a number, and a value.
const MAX_BODY: usize = 1 + 8 + MAX_VALUE;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The value of the sender in the exchange `number`, which counts from 0.
    Value { number: u64, bytes: Vec<u8> },
    /// A rank failed: the sender itself, or another rank as the sender has noticed.
    Failed { rank: u32, what: String },
    /// Asks for the number of calls that the receiver has entered.
    Query { number: u64 },
    /// The answer to the query with this number.
    Answer { number: u64, calls: u64 },
    /// The last message: the sender ends its part in the group.
    Bye,
}

/// A message that no rank of this version sends.
#[derive(Debug, PartialEq, Eq, Error)]
pub(crate) enum Invalid {
    #[error("a message of {0} bytes, more than {MAX_BODY}")]
    TooLong(usize),
    #[error("an unknown message (kind {0})")]
    Kind(u8),
    #[error("a damaged message (kind {0})")]
    Content(u8),
}

impl Message {
    /// Appends the message to `out`.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; 4]);
        match self {
            Self::Value { number, bytes } => {
                out.push(1);
                out.extend(number.to_le_bytes());
                out.extend(bytes);
            }
            Self::Failed { rank, what } => {
                out.push(2);
                out.extend(rank.to_le_bytes());
                out.extend(what.as_bytes());
            }
            Self::Query { number } => {
                out.push(3);
                out.extend(number.to_le_bytes());
            }
            Self::Answer { number, calls } => {
                out.push(4);
                out.extend(number.to_le_bytes());
                out.extend(calls.to_le_bytes());
            }
            Self::Bye => out.push(5),
        }
        let length = (out.len() - start - 4) as u32;
        out[start..start + 4].copy_from_slice(&length.to_le_bytes());
    }

    fn decode(body: &[u8]) -> Result<Self, Invalid> {
        let Some((&kind, rest)) = body.split_first() else {
            return Err(Invalid::Content(0));
        };
        let number = |at: usize| {
            rest.get(at..)
                .and_then(<[u8]>::first_chunk)
                .map(|bytes| u64::from_le_bytes(*bytes))
        };
        let message = match kind {
            1 => number(0).map(|number| Self::Value {
                number,
                bytes: rest[8..].to_vec(),
            }),
            2 => rest.split_first_chunk().map(|(rank, what)| Self::Failed {
                rank: u32::from_le_bytes(*rank),
                what: String::from_utf8_lossy(what).into_owned(),
            }),
            3 if rest.len() == 8 => number(0).map(|number| Self::Query { number }),
            4 if rest.len() == 16 => number(0)
                .zip(number(8))
                .map(|(number, calls)| Self::Answer { number, calls }),
            5 if rest.is_empty() => Some(Self::Bye),
            3..=5 => None,
            _ => return Err(Invalid::Kind(kind)),
        };
        message.ok_or(Invalid::Content(kind))
    }
}

/// Bytes that have arrived, which become messages.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    bytes: Vec<u8>,
    /// Bytes at the start that belong to messages that were returned.
    used: usize,
}

impl Decoder {
    /// Adds bytes that have arrived.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.used);
        self.used = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next message; `None` if more bytes have to arrive. Refuses a message that is too long before its content arrives.
    pub(crate) fn next(&mut self) -> Result<Option<Message>, Invalid> {
        let rest = &self.bytes[self.used..];
        let Some((length, rest)) = rest.split_first_chunk() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_BODY {
            return Err(Invalid::TooLong(length));
        }
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let message = Message::decode(body)?;
        self.used += 4 + length;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        vec![
            Message::Value {
                number: 7,
                bytes: vec![],
            },
            Message::Value {
                number: u64::MAX,
                bytes: vec![3; MAX_VALUE],
            },
            Message::Failed {
                rank: 3,
                what: "näin".into(),
            },
            Message::Query { number: 1 },
            Message::Answer { number: 1, calls: 9 },
            Message::Bye,
        ]
    }

    #[test]
    fn messages_survive_any_division() {
        let mut bytes = Vec::new();
        all().iter().for_each(|message| message.encode(&mut bytes));
        for size in [1, 5, 4096, bytes.len()] {
            let (mut decoder, mut got) = (Decoder::default(), Vec::new());
            for part in bytes.chunks(size) {
                decoder.feed(part);
                while let Some(message) = decoder.next().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, all());
        }
    }

    #[test]
    fn invalid_messages_are_refused() {
        let next = |bytes: &[u8]| {
            let mut decoder = Decoder::default();
            decoder.feed(bytes);
            decoder.next()
        };
        assert_eq!(next(&[0xff; 4]), Err(Invalid::TooLong(u32::MAX as usize)));
        assert_eq!(
            next(&(MAX_BODY as u32 + 1).to_le_bytes()),
            Err(Invalid::TooLong(MAX_BODY + 1))
        );
        assert_eq!(next(&(MAX_BODY as u32).to_le_bytes()), Ok(None));
        assert_eq!(next(&[1, 0, 0, 0, 9]), Err(Invalid::Kind(9)));
        assert_eq!(next(&[0, 0, 0, 0]), Err(Invalid::Content(0)));
        // Too short, and too long.
        for (kind, length) in [(1, 7), (2, 3), (3, 7), (3, 9), (4, 15), (4, 17), (5, 1)] {
            let mut bytes = vec![length + 1, 0, 0, 0, kind];
            bytes.extend(vec![0; length.into()]);
            assert_eq!(next(&bytes), Err(Invalid::Content(kind)), "{kind} with {length} bytes");
        }
    }
}
