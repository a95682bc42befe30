// SPDX-License-Identifier: MIT OR Apache-2.0

//! Decoding of mlx5 completion queue entries (CQEs). Formats: `struct mlx5_cqe64` and `struct mlx5_err_cqe` of
//! `include/linux/mlx5/device.h`, opcodes and syndromes of `include/linux/mlx5/cq.h`.

use std::fmt;

/// Bytes of an entry.
pub const BYTES: usize = 64;
/// Offset of the 4 bytes that contain opcode and owner bit, in the highest byte of a little-endian word.
pub const STATE_DWORD: usize = 60;
/// The owner bit in this word.
pub const OWNER: u32 = 1 << 24;
/// Opcode of an entry that the NIC has not written (`MLX5_CQE_INVALID`).
const INVALID: u8 = 15;

/// Returns whether the NIC has written an entry. `state` is the word at [`STATE_DWORD`]; `owner` is the owner bit of the
/// lap: it alternates each time that the NIC wraps around, and is false in the first lap.
pub fn is_written(state: u32, owner: bool) -> bool {
    (state & OWNER != 0) == owner && (state >> 28) as u8 != INVALID
}

/// Cause of a failure (`MLX5_CQE_SYNDROME_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Syndrome {
    /// A message was longer than its receive, or shorter than requested.
    LocalLength,
    /// The work request is invalid for this queue pair.
    LocalQpOperation,
    /// A local key or address is invalid.
    LocalProtection,
    /// The queue pair is in the error state. An earlier request failed.
    Flushed,
    /// Binding a memory window failed.
    MemoryWindowBind,
    /// The responder sent an invalid response.
    BadResponse,
    /// A local key forbids the access.
    LocalAccess,
    /// The responder rejected the request as invalid.
    RemoteInvalidRequest,
    /// A remote key or address is invalid, or revoked.
    RemoteAccess,
    /// The responder could not complete the request.
    RemoteOperation,
    /// The responder does not answer.
    RetryExceeded,
    /// The responder posts no receives.
    RnrRetryExceeded,
    /// The responder aborted the request.
    RemoteAborted,
    /// Another value.
    Other(u8),
}

impl Syndrome {
    /// Converts the NIC's number.
    pub fn new(value: u8) -> Self {
        match value {
            0x01 => Self::LocalLength,
            0x02 => Self::LocalQpOperation,
            0x04 => Self::LocalProtection,
            0x05 => Self::Flushed,
            0x06 => Self::MemoryWindowBind,
            0x10 => Self::BadResponse,
            0x11 => Self::LocalAccess,
            0x12 => Self::RemoteInvalidRequest,
            0x13 => Self::RemoteAccess,
            0x14 => Self::RemoteOperation,
            0x15 => Self::RetryExceeded,
            0x16 => Self::RnrRetryExceeded,
            0x22 => Self::RemoteAborted,
            other => Self::Other(other),
        }
    }

    /// Returns the NIC's number.
    pub fn value(self) -> u8 {
        match self {
            Self::LocalLength => 0x01,
            Self::LocalQpOperation => 0x02,
            Self::LocalProtection => 0x04,
            Self::Flushed => 0x05,
            Self::MemoryWindowBind => 0x06,
            Self::BadResponse => 0x10,
            Self::LocalAccess => 0x11,
            Self::RemoteInvalidRequest => 0x12,
            Self::RemoteAccess => 0x13,
            Self::RemoteOperation => 0x14,
            Self::RetryExceeded => 0x15,
            Self::RnrRetryExceeded => 0x16,
            Self::RemoteAborted => 0x22,
            Self::Other(value) => value,
        }
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LocalLength => "local length error",
            Self::LocalQpOperation => "local QP operation error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "flushed",
            Self::MemoryWindowBind => "memory window bind error",
            Self::BadResponse => "bad response",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retry counter exceeded",
            Self::RnrRetryExceeded => "receiver not ready, retry counter exceeded",
            Self::RemoteAborted => "remote aborted",
            Self::Other(value) => return write!(f, "syndrome {value:#04x}"),
        })
    }
}

/// Failure of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The cause.
    pub syndrome: Syndrome,
    /// Code of the vendor.
    pub vendor: u8,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (vendor code {:#04x})", self.syndrome, self.vendor)
    }
}

/// The sender of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// Number of its queue pair.
    pub qpn: u32,
    /// Local identifier of its port.
    pub lid: u16,
    /// Whether the message has a global route.
    pub grh: bool,
}

/// Which queue a completion is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The send queue.
    Send,
    /// The receive queue.
    Receive,
}

/// A decoded entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// The queue.
    pub direction: Direction,
    /// Number of the queue pair.
    pub qpn: u32,
    /// Index of the work request: basic blocks of the send queue, entries of the receive queue.
    pub counter: u16,
    /// The failure, if the work request failed.
    pub failure: Option<Failure>,
    /// Bytes that were received or read.
    pub bytes: u32,
    /// Immediate data.
    pub immediate: Option<u32>,
    /// Sender of a received message; meaningful for datagrams.
    pub source: Source,
}

/// Decodes an entry that the NIC has written. Fails with the opcode if it is unknown.
pub fn decode(entry: &[u8; BYTES]) -> Result<Cqe, u8> {
    let be16 = |at: usize| u16::from_be_bytes([entry[at], entry[at + 1]]);
    let be32 = |at: usize| u32::from_be_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
    let opcode = entry[63] >> 4;
    let direction = match opcode {
        0 | 13 => Direction::Send,
        1..=4 | 14 => Direction::Receive,
        other => return Err(other),
    };
    let route = be32(24);
    Ok(Cqe {
        direction,
        qpn: be32(56) & 0xff_ffff,
        counter: be16(60),
        failure: (opcode >= 13).then(|| Failure {
            syndrome: Syndrome::new(entry[55]),
            vendor: entry[54],
        }),
        bytes: if opcode >= 13 { 0 } else { be32(44) },
        immediate: matches!(opcode, 1 | 3).then(|| be32(36)),
        source: Source {
            qpn: route & 0xff_ffff,
            lid: be16(22),
            grh: (route >> 28) & 3 != 0,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(opcode: u8) -> [u8; BYTES] {
        let mut entry = [0; BYTES];
        entry[63] = opcode << 4;
        entry[56..60].copy_from_slice(&0x0a12_3456_u32.to_be_bytes());
        entry[60..62].copy_from_slice(&0xbeef_u16.to_be_bytes());
        entry[44..48].copy_from_slice(&4096_u32.to_be_bytes());
        entry[36..40].copy_from_slice(&0x1122_3344_u32.to_be_bytes());
        entry
    }

    #[test]
    fn success_has_bytes_and_immediate_data() {
        for (opcode, direction, immediate) in [
            (0, Direction::Send, None),
            (1, Direction::Receive, Some(0x1122_3344)),
            (2, Direction::Receive, None),
            (3, Direction::Receive, Some(0x1122_3344)),
            (4, Direction::Receive, None),
        ] {
            let cqe = decode(&entry(opcode)).unwrap();
            assert_eq!(
                (cqe.direction, cqe.immediate, cqe.failure),
                (direction, immediate, None)
            );
            assert_eq!((cqe.qpn, cqe.counter, cqe.bytes), (0x12_3456, 0xbeef, 4096));
        }
    }

    #[test]
    fn failures_have_syndrome_and_request() {
        for (opcode, direction) in [(13, Direction::Send), (14, Direction::Receive)] {
            let mut entry = entry(opcode);
            entry[54..56].copy_from_slice(&[0x88, 0x13]);
            let cqe = decode(&entry).unwrap();
            assert_eq!((cqe.direction, cqe.counter, cqe.bytes), (direction, 0xbeef, 0));
            let failure = cqe.failure.unwrap();
            assert_eq!(failure.syndrome, Syndrome::RemoteAccess);
            assert_eq!(failure.to_string(), "remote access error (vendor code 0x88)");
        }
        assert_eq!(Syndrome::new(0x77), Syndrome::Other(0x77));
    }

    #[test]
    fn every_known_syndrome_has_its_own_name() {
        let known = [1, 2, 4, 5, 6, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x22];
        let names: std::collections::BTreeSet<_> =
            known.iter().map(|value| Syndrome::new(*value).to_string()).collect();
        assert_eq!(names.len(), known.len());
        assert!((0..=u8::MAX).all(|value| Syndrome::new(value).value() == value));
        assert!(names.iter().all(|name| !name.starts_with("syndrome")));
    }

    #[test]
    fn unknown_opcodes_are_an_error() {
        for opcode in [5, 6, 12, 15] {
            assert_eq!(decode(&entry(opcode)), Err(opcode));
        }
    }

    #[test]
    fn the_sender_of_a_datagram_is_decoded() {
        let mut entry = entry(2);
        entry[24..28].copy_from_slice(&0x1000_0abc_u32.to_be_bytes());
        entry[22..24].copy_from_slice(&7_u16.to_be_bytes());
        let expected = Source {
            qpn: 0xabc,
            lid: 7,
            grh: true,
        };
        assert_eq!(decode(&entry).unwrap().source, expected);
    }

    #[test]
    fn an_entry_is_written_once_its_owner_bit_is_that_of_the_lap() {
        // As initialized: opcode 15, owner 1.
        assert!(!is_written(u32::MAX, false) && !is_written(u32::MAX, true));
        let state = |entry: [u8; BYTES]| u32::from_le_bytes(entry[STATE_DWORD..].try_into().unwrap());
        let mut first = entry(2);
        assert!(is_written(state(first), false) && !is_written(state(first), true));
        first[63] |= 1;
        assert!(is_written(state(first), true) && !is_written(state(first), false));
    }
}
