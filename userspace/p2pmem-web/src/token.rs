// SPDX-License-Identifier: MIT OR Apache-2.0

//! The token that gives access, from a file.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The shortest token, in bytes.
pub const MIN_TOKEN: usize = 16;
/// The most bytes of a file with a token.
const MAX_LENGTH: u64 = 4096;

/// Why a token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The file cannot be read.
    #[error("cannot read the token in {}: {error}; check the path and its permissions", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// Others can read the file.
    #[error("other users can read the token in {}; run `chmod 600` on it", path.display())]
    Readable {
        /// The file.
        path: PathBuf,
    },
    /// The token is too short.
    #[error("a token has at least {MIN_TOKEN} characters; `openssl rand -hex 32` makes one")]
    TooShort,
}

/// Returns the token without blanks around it, if it is long enough.
///
/// # Errors
///
/// [`TokenError::TooShort`].
pub fn check(token: &str) -> Result<&str, TokenError> {
    let token = token.trim();
    if token.len() < MIN_TOKEN {
        return Err(TokenError::TooShort);
    }
    Ok(token)
}

/// Reads a token from a file that only its owner and its group can read.
///
/// # Errors
///
/// [`TokenError`].
pub fn read(path: &Path) -> Result<String, TokenError> {
    let failed = |error| TokenError::Read {
        path: path.to_owned(),
        error,
    };
    let metadata = fs::metadata(path).map_err(failed)?;
    if metadata.permissions().mode() & 0o007 != 0 {
        return Err(TokenError::Readable { path: path.to_owned() });
    }
    if metadata.len() > MAX_LENGTH {
        return Err(failed(io::Error::other("the file is too long")));
    }
    let text = fs::read_to_string(path).map_err(failed)?;
    check(&text).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_long_and_secret() {
        assert!(matches!(check(" short "), Err(TokenError::TooShort)));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        assert!(matches!(read(&path), Err(TokenError::Read { .. })));
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(read(&path), Err(TokenError::Readable { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(read(&path).unwrap(), "0123456789abcdef");
        fs::write(&path, "short").unwrap();
        assert!(matches!(read(&path), Err(TokenError::TooShort)));
        fs::write(&path, "x".repeat(5000)).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("too long"));
    }
}
