// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of UCX, and of this crate.

/// Why UCX cannot do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UcxError {
    /// libucp.so.0 cannot be loaded.
    #[error("UCX is not installed: {0} (Debian: apt-get install libucx0)")]
    NotInstalled(String),
    /// The library does not have a function, or is older than the oldest version that the crate supports.
    #[error("this UCX is too old: {0}; install UCX 1.16 or later")]
    TooOld(String),
    /// A call failed, or a transfer.
    #[error("{call}() failed: {text} (UCX status {status})")]
    Call {
        /// The function of UCX.
        call: &'static str,
        /// `ucs_status_t`.
        status: i8,
        /// UCX's description of the status.
        text: String,
    },
    /// The other node's address or key is not valid.
    #[error("the other node's {what} is not valid: {why}")]
    Packed {
        /// The address, or the key.
        what: &'static str,
        /// What is wrong, and what to do.
        why: String,
    },
    /// A name has a byte that is 0.
    #[error("the name {0:?} has a byte that is 0")]
    Name(String),
    /// The file descriptor of a worker cannot be waited for.
    #[error("waiting for UCX's events: {0}")]
    Wait(String),
    /// An error ended a connection.
    #[error("the connection failed: {text} (UCX status {status})")]
    Connection {
        /// `ucs_status_t`.
        status: i8,
        /// UCX's description of the status.
        text: String,
    },
}
