// SPDX-License-Identifier: GPL-2.0

//! The text form of rule attributes, as configfs takes and shows it.
//!
//! All parsers return `None` for text they do not accept. They accept no white space.
//!
//! The file is pure: it needs nothing but `core` and other pure files, allocates nothing, cannot panic, takes no lock, and
//! has no `unsafe`. The module and the host tests of tests/suites/pure compile the same source.

use crate::policy::{
    path::{
        PathClass,
        PciAddr, //
    },
    rule::{
        Action,
        Beneficiary,
        DeviceMatch,
        Users, //
    }, //
};

impl PciAddr {
    /// Parses `[DDDD:]BB:DD.F`, all hexadecimal.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let mut parts = text.rsplitn(2, |&c| c == b'.');
        let function = hex(parts.next()?, 1)?;
        let mut parts = parts.next()?.rsplitn(3, |&c| c == b':');
        let device = hex(parts.next()?, 2)?;
        let bus = hex(parts.next()?, 2)?;
        let domain = parts.next().map_or(Some(0), |d| hex(d, 8))?;
        if function > 7 || device > 31 {
            return None;
        }
        Some(Self {
            domain,
            bus: u8::try_from(bus).ok()?,
            devfn: u8::try_from((device << 3) | function).ok()?,
        })
    }
}

/// Parses 1 to `most` hexadecimal digits.
fn hex(digits: &[u8], most: usize) -> Option<u32> {
    if digits.is_empty() || digits.len() > most {
        return None;
    }
    digits
        .iter()
        .try_fold(0u32, |n, &c| Some((n << 4) | char::from(c).to_digit(16)?))
}

/// Parses `any`, an address, or `vendor:device` with four hexadecimal digits each.
pub(crate) fn device(text: &str) -> Option<DeviceMatch> {
    if text == "any" {
        return Some(DeviceMatch::Any);
    }
    if let Some(addr) = PciAddr::parse(text.as_bytes()) {
        return Some(DeviceMatch::At(addr));
    }
    let (vendor, device) = text.split_once(':')?;
    let id = |text: &str| {
        let four = text.len() == 4;
        hex(text.as_bytes(), 4)
            .filter(|_| four)
            .and_then(|id| u16::try_from(id).ok())
    };
    Some(DeviceMatch::Ids(id(vendor)?, id(device)?))
}

/// Parses a decimal number without sign.
pub(crate) fn number(text: &str) -> Option<u64> {
    let plain = text.bytes().all(|c| c.is_ascii_digit());
    text.parse().ok().filter(|_| plain)
}

/// Parses a number of bytes: decimal, hexadecimal with 0x, or decimal with K, M, G or T for powers of 1024.
pub(crate) fn bytes(text: &str) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x") {
        let plain = digits.bytes().all(|c| c.is_ascii_hexdigit());
        return u64::from_str_radix(digits, 16).ok().filter(|_| plain);
    }
    let units = [("K", 1u64 << 10), ("M", 1 << 20), ("G", 1 << 30), ("T", 1 << 40)];
    let (digits, unit) = units
        .into_iter()
        .find_map(|(unit, size)| Some((text.strip_suffix(unit)?, size)))
        .unwrap_or((text, 1));
    number(digits)?.checked_mul(unit)
}

/// Parses a uid or gid. `u32::MAX` is no valid id.
fn one_id(text: &str) -> Option<u32> {
    number(text)
        .and_then(|n| u32::try_from(n).ok())
        .filter(|&n| n != u32::MAX)
}

/// Parses `any` (inner `None`) or a gid.
pub(crate) fn id(text: &str) -> Option<Option<u32>> {
    match text {
        "any" => Some(None),
        _ => one_id(text).map(Some),
    }
}

/// Parses `any` (inner `None`), or uids and ranges of uids, such as `1000,100000-165535`.
pub(crate) fn users(text: &str) -> Option<Option<Users>> {
    if text == "any" {
        return Some(None);
    }
    let all = text.split(',').try_fold(Users::NOBODY, |users, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        users.and(one_id(first)?, one_id(last)?)
    });
    all.map(Some)
}

impl Action {
    const ALL: [Self; 4] = [Self::Allow, Self::Deny, Self::Prefer, Self::Avoid];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Prefer => "prefer",
            Self::Avoid => "avoid",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.as_str() == text)
    }
}

impl Beneficiary {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Group => "group",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Kernel, Self::Group].into_iter().find(|who| who.as_str() == text)
    }
}

impl PathClass {
    /// Returns the short name, which user space uses too.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::SameDevice => "DEV",
            Self::SameSwitch => "SW",
            Self::Switches => "SWS",
            Self::HostBridge => "PHB",
            Self::NumaNode => "NODE",
            Self::System => "SYS",
            Self::Unreachable => "--",
        }
    }

    /// Parses the short name of a class other than `Unreachable`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|&class| class != Self::Unreachable && class.as_str() == text)
    }
}

#[cfg(any(test, CONFIG_KUNIT))]
#[cfg_attr(not(test), kernel::prelude::kunit_tests(p2pmem_rule_text))]
mod tests {
    use super::*;

    fn addr(bus: u8) -> PciAddr {
        PciAddr {
            domain: 0,
            bus,
            devfn: 0,
        }
    }

    #[test]
    fn attributes_are_parsed() {
        assert_eq!(device("any"), Some(DeviceMatch::Any));
        assert_eq!(device("03:00.0"), Some(DeviceMatch::At(addr(3))));
        assert_eq!(device("0000:03:00.0"), Some(DeviceMatch::At(addr(3))));
        assert_eq!(device("15b3:101b"), Some(DeviceMatch::Ids(0x15b3, 0x101b)));
        for bad in [
            "",
            "ANY",
            "03:00",
            "3:0:0.0:1",
            "15b3:",
            "15b3:1",
            "15b30:101b",
            "0000:03:20.0",
            "0000:03:00.8",
            "x:y.z",
        ] {
            assert_eq!(device(bad), None);
        }
        for (text, value) in [
            ("0", 0),
            ("4096", 4096),
            ("0x1000", 4096),
            ("64K", 64 << 10),
            ("3M", 3 << 20),
            ("2G", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(bytes(text), Some(value));
        }
        for bad in [
            "",
            "K",
            "-1",
            "+1",
            "1.5G",
            "0x",
            "0x+1",
            "64k",
            "64 M",
            "99999999T",
            "18446744073709551616",
        ] {
            assert_eq!(bytes(bad), None);
        }
        assert_eq!(id("any"), Some(None));
        assert_eq!(id("1000"), Some(Some(1000)));
        for bad in ["", "-1", "4294967295", "4294967296", "root", "+5"] {
            assert_eq!(id(bad), None);
        }
        assert_eq!(users("any"), Some(None));
        assert_eq!(users("1000"), Some(Users::NOBODY.and(1000, 1000)));
        let two = Users::NOBODY
            .and(1000, 1000)
            .and_then(|users| users.and(100_000, 165_535));
        assert_eq!(users("1000,100000-165535"), Some(two));
        for bad in [
            "",
            ",",
            "1,",
            "2-1",
            "1-",
            "-1",
            "1-2-3",
            "1,2,3,4,5",
            "0-4294967295",
            "1 ,2",
        ] {
            assert_eq!(users(bad), None);
        }
        for action in [Action::Allow, Action::Deny, Action::Prefer, Action::Avoid] {
            assert_eq!(Action::parse(action.as_str()), Some(action));
        }
        assert_eq!(Action::parse("Allow"), None);
        assert_eq!(PathClass::parse("SW"), Some(PathClass::SameSwitch));
        assert!(PathClass::parse("--").is_none() && PathClass::parse("sw").is_none());
        for who in [Beneficiary::Kernel, Beneficiary::Group] {
            assert_eq!(Beneficiary::parse(who.as_str()), Some(who));
        }
    }
}
