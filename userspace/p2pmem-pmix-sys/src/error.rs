// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of PMIx.

use std::ffi::c_int;
use std::time::Duration;

use thiserror::Error;

/// Why something of PMIx failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The environment is not that of a rank.
    #[error("this process is no rank of a job: start it under mpirun, or under srun --mpi=pmix")]
    NoLauncher,
    /// libpmix.so.2 cannot be loaded.
    #[error("PMIx is not installed: {0}; install libpmix (Debian: apt-get install libpmix2t64)")]
    NotInstalled(#[source] libloading::Error),
    /// libpmix.so.2 does not have a function.
    #[error("libpmix.so.2 is too old: {0}; install PMIx 4 or later")]
    TooOld(#[source] libloading::Error),
    /// A function of PMIx failed.
    #[error("{call}() failed: {text} (PMIx error {code})")]
    Call {
        /// The name of the function.
        call: &'static str,
        /// `pmix_status_t`.
        code: c_int,
        /// PMIx's description of the code.
        text: String,
    },
    /// The server of PMIx, or another rank, did not answer in time.
    #[error("{call}() did not finish within {limit:?}: does a rank of the job not run, or not use PMIx?")]
    Timeout {
        /// The name of the function.
        call: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// A key that PMIx does not accept.
    #[error("the key {0:?} has no bytes, a zero byte, or more than 511 bytes")]
    Key(String),
    /// A value has another type than expected.
    #[error("the value of {key} has the type {kind}, which is not the expected one")]
    Type {
        /// The key.
        key: String,
        /// `pmix_data_type_t`.
        kind: u16,
    },
}

/// A result with an error of PMIx.
pub type Result<T> = std::result::Result<T, Error>;
