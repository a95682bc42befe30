// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compares the numbers of the ABI in the files under test with those in the header.

use crate::policy::path::PathClass;
use crate::policy::verdict::VerdictCode;
use std::collections::BTreeMap;

const HEADER: &str = include_str!("../../../../include/uapi/linux/p2pmem.h");

/// Returns the enumerators of the header whose names begin with `prefix`, without the prefix.
fn enumerators(prefix: &str) -> BTreeMap<&'static str, u32> {
    HEADER
        .lines()
        .filter_map(|line| line.trim().strip_prefix(prefix))
        .filter_map(|rest| rest.split_once(" = "))
        .map(|(name, value)| {
            (
                name,
                value
                    .trim_end_matches(',')
                    .parse()
                    .expect("enumerators are plain numbers"),
            )
        })
        .collect()
}

/// Returns the header's name of a variant: CamelCase becomes SNAKE_CASE.
fn name(variant: impl std::fmt::Debug) -> String {
    let mut name = String::new();
    for letter in format!("{variant:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

#[test]
fn path_classes_match_header() {
    let header = enumerators("P2PMEM_PATH_");
    let known: BTreeMap<String, u32> = (0..=1000)
        .filter_map(PathClass::from_raw)
        .map(|class| (name(class), class.as_raw()))
        .collect();
    assert_eq!(known.len(), 7);
    let header: BTreeMap<String, u32> = header
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    assert_eq!(known, header);
}

#[test]
fn verdict_codes_match_header() {
    use VerdictCode as V;
    let all = [
        V::Chosen,
        V::Unreachable,
        V::TooFar,
        V::TooSmall,
        V::Full,
        V::Fragmented,
        V::Removing,
        V::NotNamed,
        V::Class,
        V::Hops,
        V::Bandwidth,
        V::Numa,
        V::Load,
        V::Space,
        V::Order,
        V::Upstream,
        V::Denied,
        V::Quota,
        V::Reserved,
        V::Preference,
        V::Packed,
        V::Cgroup,
        V::TooFew,
    ];
    let known: BTreeMap<String, u32> = all.into_iter().map(|code| (name(code), code.as_raw())).collect();
    let header: BTreeMap<String, u32> = enumerators("P2PMEM_VERDICT_")
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    assert_eq!(known, header);
}
