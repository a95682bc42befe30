// SPDX-License-Identifier: MIT OR Apache-2.0

//! The failure of a rank, and texts about ranks.

use std::time::Duration;

use thiserror::Error;

/// Longest wait until the other ranks have read the reason of this one.
pub(crate) const ABORT: Duration = Duration::from_secs(2);
/// Most characters of a reason that another rank sends.
pub(crate) const MAX_REASON: usize = 300;
/// Most characters of the text of a failure: a reason with the names of ranks.
pub(crate) const MAX_FAILURE: usize = 600;
/// Most characters of a host's name in messages.
pub(crate) const MAX_HOST: usize = 64;

/// The first failure that a rank has noticed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{what}")]
pub struct Failure {
    /// The rank that failed.
    pub rank: usize,
    /// What happened, with the name of the rank.
    pub what: String,
}

/// Returns the characters of a text of another rank that a terminal prints as they are, at most `most`.
pub(crate) fn printable(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(most).collect()
}

/// Returns how messages name a rank.
pub(crate) fn name(rank: usize, host: &str) -> String {
    format!("rank {rank} ({host})")
}

/// Joins names as in "rank 1, rank 2 and rank 5".
pub(crate) fn list<S: AsRef<str>>(names: &[S]) -> String {
    match names {
        [] => String::new(),
        [only] => only.as_ref().to_owned(),
        [first @ .., last] => {
            let first: Vec<&str> = first.iter().map(AsRef::as_ref).collect();
            format!("{} and {}", first.join(", "), last.as_ref())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_others_are_printable_and_short() {
        assert_eq!(printable("a\x1b[2Jb\nc\u{9b}d", 100), "a[2Jbcd");
        assert_eq!(printable("äöü", 2), "äö");
    }

    #[test]
    fn lists_have_commas_and_one_and() {
        let names = ["a", "b", "c"];
        assert_eq!(
            [list(&names[..0]), list(&names[..1]), list(&names[..2]), list(&names)],
            ["", "a", "a and b", "a, b and c"]
        );
    }
}
