// SPDX-License-Identifier: MIT OR Apache-2.0

//! Invalid rules: bad names, malformed values, contradictions, and changes that are refused as a whole.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, ensure};

use super::rules::{AdminRule, MIB};
use super::{Bed, Case, alloc, errno, expect, free, open};
use crate::limits::rounds;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rules-odd-names",
        about: "names that are none are refused, and nothing is there afterwards",
        topology: "demo",
        ruins: false,
        run: names,
    },
    Case {
        name: "rules-bad-values",
        about: "every malformed value and every contradiction is refused with a message, and changes nothing",
        topology: "demo",
        ruins: false,
        run: values,
    },
    Case {
        name: "rules-many",
        about: "as many rules as there may be, and no more",
        topology: "demo",
        ruins: false,
        run: many,
    },
    Case {
        name: "rules-race",
        about: "rules that come, change and go while others allocate",
        topology: "demo",
        ruins: false,
        run: race,
    },
];

const RULES: &str = "/sys/kernel/config/p2pmem/rules";

fn listing() -> Result<usize> {
    Ok(fs::read_dir(RULES)?.count())
}

fn names(_: &mut Bed) -> Result<()> {
    let long = format!("10-{}", "x".repeat(29));
    let names: [&[u8]; 12] = [
        b"rule",
        b"1-a",
        b"10a",
        b"10-",
        b"aa-b",
        b"10-a b",
        b"10-a%s%n",
        b"10-\xc3\xa9",
        b"10-\xff",
        b"10-a\nb",
        b"10-\x1b[2J",
        long.as_bytes(),
    ];
    for name in names {
        let path = Path::new(RULES).join(std::ffi::OsStr::from_bytes(name));
        let refused = fs::create_dir(&path).map_err(|e| e.raw_os_error().unwrap_or(0));
        expect(&format!("{name:?}"), refused, libc::EINVAL)?;
        ensure!(!path.exists());
    }
    ensure!(listing()? == 0);
    let longest = AdminRule::make(&long[..31])?;
    ensure!(AdminRule::make(&long[..31]).is_err(), "one name twice");
    drop(longest);
    ensure!(listing()? == 0);
    Ok(())
}

fn values(_: &mut Bed) -> Result<()> {
    let rule = AdminRule::make("10-values")?;
    let bad = [
        ("provider", "accel0"),
        ("provider", "0000:03:20.0"),
        ("client", "15b3:"),
        ("uid", "root"),
        ("uid", "-1"),
        ("uid", "4294967295"),
        ("uid", "2-1"),
        ("uid", "1,2,3,4,5"),
        ("uid", "1, 2"),
        ("gid", "99999999999"),
        ("action", "permit"),
        ("action", "Allow"),
        ("max_class", "near"),
        ("max_class", "--"),
        ("quota", "-5"),
        ("quota", "1.5G"),
        ("quota", "99999999T"),
        ("group_quota", "lots"),
        ("reserve", "0xzz"),
        ("reserve_for", "me"),
        ("enable", "2"),
        ("enable", "yes"),
        ("action", "\u{fffd}"),
    ];
    for (attribute, value) in bad {
        let before = rule.get(attribute)?;
        let code = rule.refused(attribute, value)?;
        ensure!(code == libc::EINVAL, "{attribute} {value:?}: {}", errno(code));
        ensure!(
            rule.get(attribute)? == before,
            "{attribute} is {} now",
            rule.get(attribute)?
        );
        ensure!(
            rule.get("status")?.starts_with("refused: "),
            "{attribute} {value:?}: {}",
            rule.get("status")?
        );
    }
    ensure!(rule.refused("action", "\u{0}\u{1}")? == libc::EINVAL);
    ensure!(rule.refused("status", "x").is_ok(), "status can be written");

    // A rule that sets nothing or contradicts itself cannot be put into force.
    let contradictions: [(&[(&str, &str)], &str); 7] = [
        (&[], "says nothing"),
        (&[("action", "deny"), ("quota", "1M")], "contradicts itself"),
        (
            &[("action", "none"), ("client", "0000:00:01.0")],
            "cannot name a client",
        ),
        (
            &[("client", "any"), ("quota", "none"), ("group_quota", "1M")],
            "name their group by gid, or them by uid",
        ),
        (&[("group_quota", "none"), ("reserve", "1M")], "reserve is for somebody"),
        (&[("reserve_for", "group")], "needs the group"),
        (&[("reserve_for", "kernel"), ("gid", "5")], "names no user"),
    ];
    for (attributes, reason) in contradictions {
        for (attribute, value) in attributes {
            rule.set(attribute, value)?;
        }
        ensure!(rule.refused("enable", "1")? == libc::EINVAL);
        let status = rule.get("status")?;
        ensure!(status.contains(reason), "{attributes:?}: {status:?}");
        ensure!(rule.get("enable")? == "0");
    }
    drop(rule);

    // A change that would make a rule contradict itself is refused; the rule stays in force unchanged.
    let rule = AdminRule::new("10-live", &[("quota", "1M")])?;
    ensure!(rule.refused("action", "deny")? == libc::EINVAL);
    ensure!(rule.get("status")?.contains("contradicts itself"));
    ensure!(rule.get("action")? == "none" && rule.get("enable")? == "1");
    let file = open()?;
    let held = alloc(file.as_fd(), MIB).map_err(errno)?;
    expect("the rule is in force", alloc(file.as_fd(), MIB), libc::EDQUOT)?;
    ensure!(
        rule.refused("quota", "none")? == libc::EINVAL,
        "a rule in force that says nothing"
    );
    rule.set("enable", "0")?;
    rule.set("quota", "none")?;
    alloc(file.as_fd(), MIB).map_err(errno)?;
    free(file.as_fd(), held.handle).map_err(errno)
}

fn many(_: &mut Bed) -> Result<()> {
    let mut rules = Vec::new();
    for n in 0..256 {
        rules.push(AdminRule::new(
            &format!("50-{n:03}"),
            &[("uid", &(10_000 + n).to_string()), ("action", "deny")],
        )?);
    }
    let one = AdminRule::make("60-more")?;
    one.set("action", "deny")?;
    ensure!(one.refused("enable", "1")? == libc::ENOSPC);
    ensure!(one.get("status")?.contains("256"), "{}", one.get("status")?);
    let file = open()?;
    let held = alloc(file.as_fd(), MIB).map_err(errno)?;
    let last = crate::sys::as_user(10_255, 1, &[], || alloc(file.as_fd(), MIB)).map_err(errno)?;
    expect("the last rule", last, libc::EACCES)?;
    rules.pop();
    one.set("enable", "1")?;
    expect("the one in its place", alloc(file.as_fd(), MIB), libc::EACCES)?;
    free(file.as_fd(), held.handle).map_err(errno)
}

fn race(bed: &mut Bed) -> Result<()> {
    let before = bed.settled()?;
    thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| -> Result<(u32, u32)> {
                    let file = open()?;
                    let (mut got, mut refused) = (0, 0);
                    let mut held = Vec::new();
                    for _ in 0..rounds(3000) {
                        match alloc(file.as_fd(), 65536) {
                            Ok(a) => {
                                got += 1;
                                held.push(a.handle);
                            }
                            Err(libc::EDQUOT | libc::EACCES | libc::ENOSPC | libc::EAGAIN) => refused += 1,
                            Err(code) => return Err(errno(code)),
                        }
                        if held.len() > 20 {
                            for handle in held.drain(..) {
                                free(file.as_fd(), handle).map_err(errno)?;
                            }
                        }
                    }
                    Ok((got, refused))
                })
            })
            .collect();
        let mut round = 0;
        while workers.iter().any(|worker| !worker.is_finished()) {
            round += 1;
            let quota = AdminRule::new("20-quota", &[("quota", if round % 2 == 0 { "1M" } else { "3M" })])?;
            let deny = AdminRule::new("10-deny", &[("action", "deny")])?;
            quota.set("quota", "2M")?;
            drop(deny);
        }
        let mut all = (0, 0);
        for worker in workers {
            let (got, refused) = worker.join().ok().context("a worker panicked")??;
            all = (all.0 + got, all.1 + refused);
        }
        ensure!(all.0 > 0 && all.1 > 0 && round > 1, "{all:?} in {round} rounds");
        Ok(())
    })?;
    ensure!(bed.settled()? == before);
    ensure!(listing()? == 0);
    Ok(())
}
