// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ranges of users.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};

/// Users: ids and ranges of ids, such as `1000,100000-165535`. A user and the user's subordinate ids (subuid(5)) are
/// different users for the kernel, so a rule can name all of them.
///
/// ```
/// use p2pmem::rules::Users;
///
/// let users: Users = "1000,100000-165535".parse()?;
/// assert_eq!(users.ranges(), [1000..=1000, 100_000..=165_535]);
/// assert_eq!(users.one(), None);
/// # Ok::<(), p2pmem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Users(Vec<RangeInclusive<u32>>);

impl Users {
    /// Maximum number of ranges in a rule.
    pub const MOST: usize = 4;

    /// Creates users from ranges of ids.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] for no range, more than [`Self::MOST`] ranges, an empty range, or a range with the id
    /// `u32::MAX`.
    pub fn new(ranges: impl IntoIterator<Item = RangeInclusive<u32>>) -> Result<Self> {
        let ranges: Vec<_> = ranges.into_iter().collect();
        let valid = |range: &RangeInclusive<u32>| !range.is_empty() && *range.end() != u32::MAX;
        if ranges.is_empty() || ranges.len() > Self::MOST || !ranges.iter().all(valid) {
            return Err(Error::Request(format!(
                "a rule has one to {} ranges of user ids, such as 1000,100000-165535, not {ranges:?}",
                Self::MOST
            )));
        }
        Ok(Self(ranges))
    }

    /// Returns the ranges.
    pub fn ranges(&self) -> &[RangeInclusive<u32>] {
        &self.0
    }

    /// Returns the id if there is exactly one user.
    pub fn one(&self) -> Option<u32> {
        match &self.0[..] {
            [one] if one.start() == one.end() => Some(*one.start()),
            _ => None,
        }
    }
}

impl From<u32> for Users {
    fn from(uid: u32) -> Self {
        Self(vec![uid..=uid])
    }
}

impl fmt::Display for Users {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, range) in self.0.iter().enumerate() {
            f.write_str(if at > 0 { "," } else { "" })?;
            range.start().fmt(f)?;
            if range.start() < range.end() {
                write!(f, "-{}", range.end())?;
            }
        }
        Ok(())
    }
}

impl FromStr for Users {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.parse().ok()?..=last.parse().ok()?)
        };
        match text.split(',').map(range).collect::<Option<Vec<_>>>() {
            Some(ranges) => Self::new(ranges),
            None => Err(Error::Request(format!(
                "{text:?} is not a list of user ids, such as 1000,100000-165535"
            ))),
        }
    }
}

/// Serializes one user as a number, else as text.
impl Serialize for Users {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self.one() {
            Some(uid) => serializer.serialize_u32(uid),
            None => serializer.collect_str(self),
        }
    }
}
