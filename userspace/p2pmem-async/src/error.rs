// SPDX-License-Identifier: MIT OR Apache-2.0

//! Errors of this crate: what failed, why, and what to do.

use std::io;
use std::time::Duration;

use crate::region::RegionId;

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The executor does not support an operation that a program needs.
    #[error("the peer {peer} cannot execute {missing}: {why}")]
    Unsupported {
        /// Name of the peer.
        peer: String,
        /// The missing operations.
        missing: String,
        /// What the program needs them for.
        why: String,
    },

    /// A program has more operations than the executor's queue.
    #[error("a program of {operations} operations does not fit the peer {peer}, which takes {limit}: commit or peek more often, or execute the programs one after the other")]
    TooLong {
        /// Name of the peer.
        peer: String,
        /// Number of operations.
        operations: usize,
        /// Limit of the peer.
        limit: usize,
    },

    /// An operation of a program is invalid.
    #[error("operation {index} of the program is invalid: {why}")]
    Operation {
        /// Index of the operation.
        index: usize,
        /// The reason.
        why: String,
    },

    /// An executor did not execute a whole program.
    #[error("operation {index} ({operation}) {why}")]
    Execution {
        /// Index of the operation that failed. The earlier ones have been executed.
        index: usize,
        /// The operation, as text.
        operation: String,
        /// The reason.
        why: ExecutionFailure,
    },

    /// An executor cannot execute anything.
    #[error("the executor failed: {0}")]
    Executor(String),

    /// A work request is invalid.
    #[error("work request {id:#x} is invalid: {why}")]
    Request {
        /// ID of the work request.
        id: u64,
        /// The reason.
        why: String,
    },

    /// A send or receive queue has no space.
    #[error("the {queue} of queue pair {qpn:#x} is full: {used} of {size} {unit} are in use; consume completions with poll_cq() first")]
    QueueFull {
        /// `send queue` or `receive queue`.
        queue: &'static str,
        /// Number of the queue pair.
        qpn: u32,
        /// Entries in use.
        used: u32,
        /// Entries of the queue.
        size: u32,
        /// What an entry is.
        unit: &'static str,
    },

    /// A completion queue could overrun.
    #[error("completion queue {cqn:#x} could overrun: {outstanding} of {size} entries are taken by posted work requests and by completions that were not consumed{held}; consume completions with poll_cq(), or create a larger queue")]
    CompletionQueueFull {
        /// Number of the completion queue.
        cqn: u32,
        /// Entries taken.
        outstanding: u32,
        /// Entries of the queue.
        size: u32,
        /// What else holds entries, as text.
        held: String,
    },

    /// A peek is not possible.
    #[error("cannot peek completion queue {cqn:#x}: {why}")]
    Peek {
        /// Number of the completion queue.
        cqn: u32,
        /// The reason.
        why: String,
    },

    /// A queue pair is in the error state.
    #[error("queue pair {qpn:#x} is in the error state: {why}; drop it and create another one")]
    QueuePairError {
        /// Number of the queue pair.
        qpn: u32,
        /// The failure that caused the state.
        why: String,
    },

    /// The NIC wrote a completion that belongs to no work request.
    #[error("completion queue {cqn:#x} has a completion for no posted work request: {what}")]
    Unexpected {
        /// Number of the completion queue.
        cqn: u32,
        /// The completion.
        what: String,
    },

    /// An argument is out of range.
    #[error("{0}")]
    Argument(String),

    /// A call of the kernel failed.
    #[error("{what} failed: {error}{}", hint(error))]
    Kernel {
        /// The call.
        what: String,
        /// The kernel's error.
        error: io::Error,
    },

    /// A function of libibverbs failed.
    #[error("{what} failed: {why}")]
    Verbs {
        /// The function's purpose.
        what: String,
        /// The reason.
        why: String,
    },

    /// A function of the library p2pmem failed.
    #[error(transparent)]
    Memory(#[from] p2pmem::Error),
}

/// Reason why an executor did not execute a whole program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutionFailure {
    /// A poll did not come true.
    #[error("did not come true within {limit:?}: the last value was {last:#010x}")]
    TimeLimit {
        /// The time limit of the program.
        limit: Duration,
        /// The value that the poll read last.
        last: u32,
    },
    /// A poll did not come true in time, and the executor does not report the value.
    #[error("did not come true within {limit:?}")]
    Late {
        /// The time limit.
        limit: Duration,
    },
    /// The executor was stopped.
    #[error("was stopped")]
    Stopped,
    /// The executor has no address for a region.
    #[error("names region {}, which this executor has not mapped", region.number())]
    Unmapped {
        /// The region.
        region: RegionId,
    },
    /// A place is outside of its region.
    #[error("is outside of its region, which has {len} bytes")]
    Outside {
        /// Length of the region.
        len: usize,
    },
}

impl Error {
    /// Returns the errno of the kernel's refusal, or the errno that is nearest to the error.
    ///
    /// ```
    /// use p2pmem_async::Error;
    ///
    /// assert_eq!(Error::Argument("0 entries".into()).errno_or_nearest(), 22); // EINVAL
    /// ```
    pub fn errno_or_nearest(&self) -> i32 {
        match self {
            Self::Unsupported { .. } => libc::EOPNOTSUPP,
            Self::TooLong { .. } => libc::E2BIG,
            Self::Operation { .. } | Self::Request { .. } | Self::Argument(_) => libc::EINVAL,
            Self::Execution { why, .. } => match why {
                ExecutionFailure::TimeLimit { .. } | ExecutionFailure::Late { .. } => libc::ETIMEDOUT,
                ExecutionFailure::Stopped => libc::ECANCELED,
                ExecutionFailure::Unmapped { .. } | ExecutionFailure::Outside { .. } => libc::EFAULT,
            },
            Self::QueueFull { .. } | Self::CompletionQueueFull { .. } => libc::ENOBUFS,
            Self::Peek { .. } => libc::EAGAIN,
            Self::QueuePairError { .. } => libc::ESHUTDOWN,
            Self::Unexpected { .. } => libc::EBADMSG,
            Self::Kernel { error, .. } => error.raw_os_error().unwrap_or(libc::EIO),
            Self::Executor(_) | Self::Verbs { .. } => libc::EIO,
            Self::Memory(error) => error.errno_or_nearest(),
        }
    }
}

/// Returns what to do about an errno of the RDMA core, if that is known.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPROTONOSUPPORT) => {
            " (the kernel does not know an attribute: queues in accelerator memory and UAR dma-bufs need Linux 7.2)"
        }
        Some(libc::EOPNOTSUPP) => {
            " (queues need a dma-buf that is exported pinned, and a UAR dma-buf a dynamic importer)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_has_its_errno() {
        let execution = |why| Error::Execution {
            index: 3,
            operation: "FENCE".into(),
            why,
        };
        let limit = Duration::ZERO;
        let kernel = |errno| Error::Kernel {
            what: "creating a queue".into(),
            error: io::Error::from_raw_os_error(errno),
        };
        for (error, errno) in [
            (
                execution(ExecutionFailure::TimeLimit { limit, last: 0 }),
                libc::ETIMEDOUT,
            ),
            (execution(ExecutionFailure::Late { limit }), libc::ETIMEDOUT),
            (execution(ExecutionFailure::Stopped), libc::ECANCELED),
            (execution(ExecutionFailure::Outside { len: 8 }), libc::EFAULT),
            (kernel(libc::EPERM), libc::EPERM),
            (Error::Argument(String::new()), libc::EINVAL),
            (Error::Executor(String::new()), libc::EIO),
        ] {
            assert_eq!(error.errno_or_nearest(), errno, "{error}");
        }
        let error = Error::Kernel {
            what: String::new(),
            error: io::Error::other("not of the kernel"),
        };
        assert_eq!(error.errno_or_nearest(), libc::EIO);
        let memory = p2pmem::Error::Missing("mlx5_9".into());
        assert_eq!(Error::Memory(memory).errno_or_nearest(), libc::ENOENT);
    }
}
