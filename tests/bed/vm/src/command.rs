// SPDX-License-Identifier: MIT OR Apache-2.0

//! Commands for a guest, and what came of them.

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
    /// How long it may take.
    pub limit: Duration,
    /// The port it listens on, of a server that others wait for.
    pub listen: Option<Listen>,
}

impl Command {
    /// A command in `/`, with ten minutes.
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

    /// With another limit.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Command {
        self.limit = limit;
        self
    }

    /// As a server on a port.
    #[must_use]
    pub fn listen(mut self, listen: Listen) -> Command {
        self.listen = Some(listen);
        self
    }

    /// With one more environment variable.
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
    /// By itself.
    Exited {
        /// Its exit code.
        code: i32,
    },
    /// By a signal.
    Signalled {
        /// The signal.
        signal: i32,
    },
    /// It could not be started.
    NotStarted {
        /// Why.
        error: String,
    },
    /// It ran out of time and was killed.
    TimedOut,
    /// It was killed because nobody needed it any more.
    Stopped,
    /// The kernel panicked.
    Panicked {
        /// The panic's line.
        line: String,
    },
    /// The guest ended without a panic.
    Died {
        /// What is known of it.
        why: String,
    },
}

/// What came of a command.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// What it wrote to standard output.
    #[serde(serialize_with = "as_text")]
    pub stdout: Vec<u8>,
    /// What it wrote to standard error.
    #[serde(serialize_with = "as_text")]
    pub stderr: Vec<u8>,
    /// The kernel log since the command before.
    pub dmesg: Vec<Record>,
    /// Lines of it that a kernel in order does not say.
    pub findings: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

fn as_text<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&String::from_utf8_lossy(bytes))
}

impl Outcome {
    /// Tells whether the command succeeded and the kernel had nothing to say against it.
    pub fn is_clean(&self) -> bool {
        self.status == Status::Exited { code: 0 } && self.findings.is_empty()
    }
}

/// Which stream output belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}
