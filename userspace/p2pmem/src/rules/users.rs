// SPDX-License-Identifier: MIT OR Apache-2.0

//! Ranges of users.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};

/// Users: numbers and ranges of numbers, as `1000,100000-165535`. To the kernel, a user's subordinate ids (subuid(5)) are
/// separate users; a rule can name all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Users(Vec<RangeInclusive<u32>>);

impl Users {
    /// Most ranges that the module keeps.
    pub const MOST: usize = 4;

    /// Users by ranges of their numbers.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] where there are none, more than [`Self::MOST`], or an empty one, or where all ones is in one.
    pub fn new(ranges: impl IntoIterator<Item = RangeInclusive<u32>>) -> Result<Self> {
        let ranges: Vec<_> = ranges.into_iter().collect();
        let sound = |range: &RangeInclusive<u32>| !range.is_empty() && *range.end() != u32::MAX;
        if ranges.is_empty() || ranges.len() > Self::MOST || !ranges.iter().all(sound) {
            return Err(Error::Request(format!(
                "a rule names one to {} ranges of users, such as 1000,100000-165535, and not {ranges:?}",
                Self::MOST
            )));
        }
        Ok(Self(ranges))
    }

    /// The ranges.
    pub fn ranges(&self) -> &[RangeInclusive<u32>] {
        &self.0
    }

    /// The number, where it is one user alone.
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
                "{text:?} are no numbers of users, such as 1000,100000-165535"
            ))),
        }
    }
}

/// As a number where it is one user, else as text.
impl Serialize for Users {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self.one() {
            Some(uid) => serializer.serialize_u32(uid),
            None => serializer.collect_str(self),
        }
    }
}
