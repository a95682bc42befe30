// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands for a guest, and their outcomes.

use std::collections::BTreeMap;
use std::time::Duration;

use p2pmem_guest::wire::Listen;
use serde::Serialize;

use crate::dmesg::Record;

/// A command for the guest.
#[derive(Debug, Clone)]
pub struct Command {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment added to the guest's.
    pub env: BTreeMap<String, String>,
    /// Working directory.
    pub cwd: String,
    /// The time limit.
    pub limit: Duration,
    /// The port that the command listens on, if other commands wait for it.
    pub listen: Option<Listen>,
}

impl Command {
    /// Makes a command in the working folder `/`, with a time limit of ten minutes.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Command {
        let argv = argv.into_iter().map(Into::into).collect();
        Command {
            argv,
            env: BTreeMap::new(),
            cwd: "/".into(),
            limit: Duration::from_secs(600),
            listen: None,
        }
    }

    /// Sets the time limit.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Command {
        self.limit = limit;
        self
    }

    /// Makes the command a server on a port.
    #[must_use]
    pub fn listen(mut self, listen: Listen) -> Command {
        self.listen = Some(listen);
        self
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Command {
        self.env.insert(name.to_owned(), value.into());
        self
    }
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "end", rename_all = "kebab-case")]
pub enum Status {
    /// The command ended by itself.
    Exited {
        /// The exit code.
        code: i32,
    },
    /// A signal ended the command.
    Signalled {
        /// The signal.
        signal: i32,
    },
    /// The command could not be started.
    NotStarted {
        /// The reason.
        error: String,
    },
    /// The command exceeded its time limit and was killed.
    TimedOut,
    /// The command was killed because it was no longer needed.
    Stopped,
    /// The kernel panicked.
    Panicked {
        /// The line of the kernel log that reports the panic.
        line: String,
    },
    /// The guest ended without a panic of its kernel.
    Died {
        /// The reason, as far as known.
        why: String,
    },
}

/// The outcome of a command.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// How the command ended.
    pub status: Status,
    /// Its standard output.
    #[serde(serialize_with = "as_text")]
    pub stdout: Vec<u8>,
    /// Its standard error.
    #[serde(serialize_with = "as_text")]
    pub stderr: Vec<u8>,
    /// The records of the kernel log since the previous command.
    pub dmesg: Vec<Record>,
    /// The bad lines among these records.
    pub findings: Vec<String>,
    /// The duration in seconds.
    pub seconds: f64,
}

fn as_text<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&String::from_utf8_lossy(bytes))
}

impl Outcome {
    /// Returns whether the command succeeded without bad lines in the kernel log.
    pub fn is_clean(&self) -> bool {
        self.status == Status::Exited { code: 0 } && self.findings.is_empty()
    }
}

/// The stream of a piece of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}
