// SPDX-License-Identifier: MIT OR Apache-2.0

//! The form in which addresses and keys of UCX go to another node: with the version of UCX, and a checksum.
//!
//! UCX parses both without a length. The checksum excludes bytes that are damaged or cut off; it does not exclude bytes that the
//! other node has forged.

use crate::functions::Functions;
use crate::{Result, UcxError};

/// Maximum number of bytes of a packed address or key.
pub const MAX_PACKED: usize = 2048;
/// Kind, and version of UCX: major, minor.
const HEADER: usize = 3;
/// Bytes of the checksum, which is the last part.
const CHECKSUM: usize = 4;

/// What the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Address = 1,
    Key = 2,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Address => "address of UCX",
            Self::Key => "key of UCX",
        }
    }
}

/// Packs bytes of UCX for another node.
///
/// # Errors
///
/// There are more bytes than another node accepts.
pub(crate) fn pack(functions: &Functions, kind: Kind, bytes: &[u8]) -> Result<Vec<u8>> {
    let mut all = header(functions, kind).to_vec();
    all.extend_from_slice(bytes);
    all.extend_from_slice(&crc32c::crc32c(&all).to_le_bytes());
    if all.len() > MAX_PACKED {
        return Err(invalid(kind, &format!("{} bytes, more than {MAX_PACKED}", all.len())));
    }
    Ok(all)
}

/// Returns the bytes of UCX that another node has packed.
///
/// # Errors
///
/// The bytes are not of this kind, of another version of UCX, damaged, or too many.
pub(crate) fn unpack(functions: &Functions, kind: Kind, all: &[u8]) -> Result<Vec<u8>> {
    if all.len() > MAX_PACKED || all.len() <= HEADER + CHECKSUM {
        return Err(invalid(kind, &format!("it has {} bytes", all.len())));
    }
    let (content, checksum) = all.split_at(all.len() - CHECKSUM);
    if crc32c::crc32c(content).to_le_bytes() != checksum {
        return Err(invalid(kind, "its checksum is wrong"));
    }
    let (start, bytes) = content.split_at(HEADER);
    let own = header(functions, kind);
    if start[0] != own[0] {
        return Err(invalid(kind, "it is of another kind"));
    }
    if start != own {
        let why = format!(
            "it is of UCX {}.{}, and this node has {}.{}: install the same version on both nodes",
            start[1], start[2], own[1], own[2]
        );
        return Err(invalid(kind, &why));
    }
    Ok(bytes.to_vec())
}

fn header(functions: &Functions, kind: Kind) -> [u8; HEADER] {
    let (major, minor, _) = functions.version;
    [kind as u8, major as u8, minor as u8]
}

fn invalid(kind: Kind, why: &str) -> UcxError {
    UcxError::Packed {
        what: kind.name(),
        why: why.to_owned(),
    }
}
