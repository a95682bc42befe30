// SPDX-License-Identifier: MIT OR Apache-2.0

//! Rules of the administrator and of files: access, quotas and reserves, and the rule that decided.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;

use super::life::{Part, ready};
use super::{Bed, Case, alloc, errno, expect, explain, explain_last, free, open, read, request, write};
use crate::limits::rounds;
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rules-first-decides",
        about: "for each attribute the first rule that matches decides, and verdict, message and log name it",
        topology: "demo",
        ruins: false,
        run: first_decides,
    },
    Case {
        name: "rules-preference",
        about: "what the administrator prefers or avoids comes before distance, and what is avoided serves in need",
        topology: "demo",
        ruins: false,
        run: preference,
    },
    Case {
        name: "rules-quick-decision",
        about: "what is remembered of rules leads to the decisions and verdicts that asking each of them leads to",
        topology: "demo",
        ruins: false,
        run: quick_decision,
    },
    Case {
        name: "rules-own",
        about: "a file's own rules narrow the administrator's and never widen them",
        topology: "demo",
        ruins: false,
        run: own,
    },
    Case {
        name: "strategies",
        about: "spread takes the least loaded provider, pack the most loaded",
        topology: "demo",
        ruins: false,
        run: strategies,
    },
    Case {
        name: "quota",
        about: "a user over the quota, and a group over its quota, get EDQUOT; freed memory can be allocated again",
        topology: "demo",
        ruins: false,
        run: quota,
    },
    Case {
        name: "quota-changes",
        about: "quotas below what is held, and rules that end while they count, take nothing from anyone",
        topology: "demo",
        ruins: false,
        run: quota_changes,
    },
    Case {
        name: "quota-uncharge",
        about: "however a buffer ends, what it counted is given back, once",
        topology: "demo",
        ruins: false,
        run: uncharge,
    },
    Case {
        name: "quota-kills",
        about: "processes that are killed while they allocate, map and free have nothing charged afterwards",
        topology: "demo",
        ruins: false,
        run: kills,
    },
    Case {
        name: "reserve",
        about: "what is set aside for a group is there for it, and for nobody else",
        topology: "demo",
        ruins: false,
        run: reserve,
    },
    Case {
        name: "reserve-kernel",
        about: "what is set aside for the kernel stays in the device's own pool",
        topology: "demo",
        ruins: false,
        run: reserve_kernel,
    },
];

pub(super) const MIB: u64 = 1 << 20;
const RULES: &str = "/sys/kernel/config/p2pmem/rules";
/// Users and a group that the guest does not use otherwise.
pub(super) const ALICE: u32 = 4001;
const BOB: u32 = 4002;
const LAB: u32 = 5001;

/// A rule of the administrator. Dropping it removes the rule.
pub(super) struct AdminRule(PathBuf);

impl AdminRule {
    /// Makes a rule that is not in force.
    pub(super) fn make(name: &str) -> Result<AdminRule> {
        let dir = Path::new(RULES).join(name);
        fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        Ok(AdminRule(dir))
    }

    /// Makes a rule and puts it into force.
    pub(super) fn new(name: &str, attributes: &[(&str, &str)]) -> Result<AdminRule> {
        let rule = Self::make(name)?;
        for (attribute, value) in attributes {
            rule.set(attribute, value)?;
        }
        rule.set("enable", "1")?;
        Ok(rule)
    }

    pub(super) fn set(&self, attribute: &str, value: &str) -> Result<()> {
        write(&self.0.join(attribute), value).with_context(|| self.get("status").unwrap_or_default())
    }

    /// Returns the errno with which a value is refused.
    pub(super) fn refused(&self, attribute: &str, value: &str) -> Result<i32> {
        match fs::write(self.0.join(attribute), value) {
            Err(e) => e.raw_os_error().context("no errno"),
            Ok(()) => bail!("{attribute} takes {value:?}"),
        }
    }

    pub(super) fn get(&self, attribute: &str) -> Result<String> {
        read(&self.0.join(attribute))
    }
}

impl Drop for AdminRule {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Allocates as a user.
pub(super) fn alloc_as(
    fd: BorrowedFd<'_>,
    uid: u32,
    groups: &[u32],
    size: u64,
) -> Result<Result<abi::p2pmem_alloc, i32>> {
    sys::as_user(uid, uid, groups, || alloc(fd, size)).map_err(errno)
}

fn text(chars: &[std::ffi::c_char]) -> String {
    chars
        .iter()
        .take_while(|c| **c != 0)
        .map(|c| char::from(*c as u8))
        .collect()
}

/// Returns a provider's verdict in the file's last decision: the code, and the rule that decided.
pub(super) fn said(fd: BorrowedFd<'_>, provider: u32) -> Result<(u32, String, u32)> {
    let (_, verdicts, _) = explain_last(fd)?;
    let verdict = verdicts.iter().find(|v| v.provider == provider);
    let verdict = verdict.with_context(|| format!("no verdict about provider {provider}"))?;
    Ok((verdict.code, text(&verdict.rule), verdict.rule_set))
}

fn first_decides(bed: &mut Bed) -> Result<()> {
    let bdf = bed.device("accel0")?.bdf.clone();
    let id = bed.provider("accel0")?.id;
    let uid = ALICE.to_string();
    let allow = AdminRule::new("10-alice", &[("uid", &uid), ("provider", &bdf), ("action", "allow")])?;
    let _deny = AdminRule::new("20-nobody", &[("action", "deny")])?;
    let file = open()?;
    let fd = file.as_fd();

    let a = alloc_as(fd, ALICE, &[], MIB)?.map_err(errno)?;
    ensure!(a.provider == id, "{a:?}");
    free(fd, a.handle).map_err(errno)?;
    let mut log = super::dmabuf_end::Log::new()?;
    expect("bob", alloc_as(fd, BOB, &[], MIB)?, libc::EACCES)?;
    let (_, verdicts, sentence) = explain_last(fd)?;
    for verdict in &verdicts {
        let decided = (verdict.code, text(&verdict.rule), verdict.rule_set);
        let denied = (
            abi::P2PMEM_VERDICT_DENIED,
            "20-nobody".to_owned(),
            abi::P2PMEM_RULES_ADMIN,
        );
        ensure!(decided == denied, "{decided:?}");
    }
    ensure!(
        sentence.contains("rule 20-nobody") && sentence.contains(&format!("uid {BOB}")),
        "{sentence:?}"
    );
    log.wait(&["refused", "rule 20-nobody"])?;

    // Of two rules with one attribute the first decides; another rule may decide another attribute.
    let near = AdminRule::new("05-near", &[("uid", &uid), ("max_class", "DEV")])?;
    let mut clients = [bed.address("nvme0")?];
    let ask = |clients: &mut [abi::p2pmem_pci_addr]| {
        let mut a = request(MIB);
        a.req.nr_clients = 1;
        sys::alloc(fd, &mut a, Memory::Slice(clients)).map(|()| a)
    };
    let far = sys::as_user(ALICE, ALICE, &[], || ask(&mut clients)).map_err(errno)?;
    expect("beyond max_class", far, libc::ENODEV)?;
    ensure!(said(fd, id)? == (abi::P2PMEM_VERDICT_TOO_FAR, "05-near".into(), abi::P2PMEM_RULES_ADMIN));
    ensure!(explain_last(fd)?.2.contains("rule 05-near"));
    drop(near);
    let near = sys::as_user(ALICE, ALICE, &[], || ask(&mut clients))
        .map_err(errno)?
        .map_err(errno)?;
    free(fd, near.handle).map_err(errno)?;

    // A rule that never decides reports that; a rule that was changed decides immediately.
    let late = AdminRule::new("30-late", &[("uid", &uid), ("action", "allow")])?;
    let status = late.get("status")?;
    ensure!(
        status.contains("action never decides") && status.contains("20-nobody"),
        "{status:?}"
    );
    drop(late);
    allow.set("uid", &BOB.to_string())?;
    expect("alice", alloc_as(fd, ALICE, &[], MIB)?, libc::EACCES)?;
    allow.set("enable", "0")?;
    expect("bob", alloc_as(fd, BOB, &[], MIB)?, libc::EACCES)?;
    allow.set("uid", "any")?;
    allow.set("gid", &LAB.to_string())?;
    allow.set("enable", "1")?;
    // A group matches all its members.
    expect("no member", alloc_as(fd, ALICE, &[], MIB)?, libc::EACCES)?;
    let member = alloc_as(fd, ALICE, &[7, LAB, 9999], MIB)?.map_err(errno)?;
    free(fd, member.handle).map_err(errno)
}

fn preference(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let (near, far) = (bed.provider("accel0")?.id, bed.provider("accel1")?.id);
    let file = open()?;
    let fd = file.as_fd();
    let mut clients = [bed.address("nvme0")?];
    let mut ask = |prefer: u32| {
        let mut a = request(32 * MIB);
        a.req.nr_clients = 1;
        if prefer != 0 {
            (a.req.provider, a.req.flags) = (prefer, abi::P2PMEM_ALLOC_PREFER);
        }
        sys::alloc(fd, &mut a, Memory::Slice(&mut clients)).map(|()| a.provider)
    };
    ensure!(ask(0) == Ok(near));
    let bdf = bed.device("accel1")?.bdf.clone();
    let prefer = AdminRule::new("10-far", &[("provider", &bdf), ("action", "prefer")])?;
    ensure!(ask(0) == Ok(far));
    ensure!(said(fd, far)?.1 == "10-far" && said(fd, near)? == (abi::P2PMEM_VERDICT_PREFERENCE, "10-far".into(), 1));
    prefer.set("provider", &bed.device("accel0")?.bdf)?;
    prefer.set("action", "avoid")?;
    let next = ask(0).map_err(errno)?;
    ensure!(next != near);
    ensure!(said(fd, near)? == (abi::P2PMEM_VERDICT_PREFERENCE, "10-far".into(), 1));
    // A program's preference does not override the rule; a program's requirement does.
    ensure!(ask(near).map_err(errno)? != near);
    prefer.set("provider", "any")?;
    ensure!(ask(0) == Ok(near), "all are avoided alike");
    drop(file);
    drop(prefer);
    bed.unpublish("accel1")
}

/// The result of a decision: errno, provider, the message, and of each verdict all but the numbers that vary.
fn decision(
    fd: BorrowedFd<'_>,
    req: &abi::p2pmem_request,
    clients: &mut [abi::p2pmem_pci_addr],
) -> Result<Vec<String>> {
    let ask = abi::p2pmem_explain {
        req: *req,
        ..Default::default()
    };
    let (explain, verdicts, text) = explain(fd, ask, clients)?;
    let mut lines = vec![format!("errno {}, provider {}: {text}", explain.error, explain.chosen)];
    lines.extend(verdicts.iter().map(|verdict| {
        let still = abi::p2pmem_verdict {
            free: 0,
            largest: 0,
            ..*verdict
        };
        format!("{still:?}")
    }));
    Ok(lines)
}

/// A rule's name and its attributes.
type NamedRule<'a> = (&'a str, &'a [(&'a str, &'a str)]);

/// Makes the same request through a file without rules, whose rule checks are cached, and through a file with a rule that
/// changes nothing, which checks each rule.
fn quick_decision(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let (accel0, accel1) = (bed.device("accel0")?.bdf.clone(), bed.device("accel1")?.bdf.clone());
    let nvme0 = bed.device("nvme0")?.bdf.clone();
    let all = [bed.address("nvme0")?, bed.address("nvme1")?];
    let (short, long) = (open()?, open()?);
    let allow = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_ALLOW,
        ..own_rule("nothing")
    };
    set_own(long.as_fd(), &mut [allow]).map_err(errno)?;
    // More users with different applicable rules than the cache holds.
    let users: Vec<u32> = (ALICE..ALICE + 6).collect();
    let mut seen = std::collections::BTreeSet::new();
    let mut same = |what: &str| -> Result<()> {
        for &uid in &users {
            for clients in 0..=all.len() {
                for (size, max_class) in [(MIB, 0), (MIB, abi::P2PMEM_PATH_SWITCHES), (128 * MIB, 0), (1 << 40, 0)] {
                    let mut req = request(size).req;
                    req.max_class = max_class;
                    let mut list = all[..clients].to_vec();
                    let mut ask = |file: &fs::File| {
                        sys::as_user(uid, uid, &[], || decision(file.as_fd(), &req, &mut list)).map_err(errno)?
                    };
                    let (expected, told) = (ask(&long)?, ask(&short)?);
                    ensure!(
                        told == expected,
                        "{what}, uid {uid}, {clients} clients, {size} bytes, class {max_class}: {told:#?} instead of {expected:#?}"
                    );
                    seen.insert(told);
                }
            }
        }
        Ok(())
    };
    same("without rules")?;
    let last = (ALICE + 5).to_string();
    let uids: Vec<String> = users.iter().map(u32::to_string).collect();
    let sets: [&[NamedRule<'_>]; 7] = [
        &[("10-far", &[("provider", &accel1), ("action", "prefer")])],
        &[(
            "10-near",
            &[("provider", &accel0), ("action", "avoid"), ("uid", &uids[1])],
        )],
        &[(
            "10-deny",
            &[("provider", &accel0), ("action", "deny"), ("client", &nvme0)],
        )],
        &[("10-class", &[("max_class", "SWS"), ("uid", &uids[2])])],
        &[("10-none", &[("action", "deny"), ("uid", &last)])],
        // One rule for each of the others, and one with a quota, which makes the cached checks invalid.
        &[
            ("10-a", &[("provider", &accel0), ("action", "avoid"), ("uid", &uids[0])]),
            (
                "20-b",
                &[("provider", &accel1), ("action", "prefer"), ("uid", &uids[1])],
            ),
            ("30-c", &[("provider", &accel0), ("action", "deny"), ("uid", &uids[2])]),
            ("40-d", &[("max_class", "SWS"), ("uid", &uids[3])]),
            ("50-e", &[("client", &nvme0), ("action", "avoid"), ("uid", &uids[4])]),
            ("60-f", &[("quota", "64M"), ("uid", &last)]),
        ],
        &[(
            "10-reserve",
            &[
                ("provider", &accel0),
                ("reserve", "200M"),
                ("reserve_for", "group"),
                ("gid", "5001"),
            ],
        )],
    ];
    for set in sets {
        let mut rules = Vec::new();
        for (name, attributes) in set {
            rules.push(AdminRule::new(name, attributes)?);
            same(name)?;
        }
        // A user with a cached check gets the provider that was explained.
        for &uid in &users {
            let explained = sys::as_user(uid, uid, &[], || decision(short.as_fd(), &request(MIB).req, &mut []))
                .map_err(errno)??;
            let got = alloc_as(short.as_fd(), uid, &[], MIB)?;
            let head = match got {
                Ok(a) => format!("errno 0, provider {}:", a.provider),
                Err(code) => format!("errno {code}, provider 0:"),
            };
            ensure!(explained[0].starts_with(&head), "{head} {explained:?}");
            if let Ok(a) = got {
                free(short.as_fd(), a.handle).map_err(errno)?;
            }
        }
        drop(rules);
        same("after the rules")?;
    }
    println!("{} different decisions", seen.len());
    ensure!(
        seen.len() > 30,
        "hardly anything was decided differently: {}",
        seen.len()
    );
    drop((short, long));
    bed.unpublish("shm0")?;
    bed.unpublish("accel1")
}

fn own_rule(name: &str) -> abi::p2pmem_rule {
    let mut rule = abi::p2pmem_rule::default();
    for (to, from) in rule.name.iter_mut().zip(name.bytes()) {
        *to = from as std::ffi::c_char;
    }
    rule
}

fn set_own(fd: BorrowedFd<'_>, rules: &mut [abi::p2pmem_rule]) -> Result<(), i32> {
    let mut ask = abi::p2pmem_rules {
        count: rules.len() as u32,
        ..Default::default()
    };
    sys::rules(fd, &mut ask, Memory::Slice(rules))
}

fn own(bed: &mut Bed) -> Result<()> {
    let id = bed.provider("accel0")?.id;
    let accel = bed.address("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    let deny = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_DENY,
        flags: abi::P2PMEM_RULE_PROVIDER,
        provider: accel,
        ..own_rule("not-this")
    };
    set_own(fd, &mut [deny]).map_err(errno)?;
    let mut named = request(MIB);
    named.req.provider = id;
    let denied = sys::alloc(fd, &mut named, Memory::Slice(&mut []));
    expect("what the file denies itself", denied, libc::EACCES)?;
    ensure!(said(fd, id)? == (abi::P2PMEM_VERDICT_DENIED, "not-this".into(), abi::P2PMEM_RULES_FILE));
    ensure!(explain_last(fd)?.2.contains("own rule not-this"));
    // The rules apply to this file only.
    alloc(open()?.as_fd(), MIB).map_err(errno)?;

    // A refused set of rules keeps the rules that are in force.
    let unknown = abi::p2pmem_rule { flags: 1 << 9, ..deny };
    let bad: [(&str, Vec<abi::p2pmem_rule>, i32); 9] = [
        ("an unknown flag", vec![unknown], libc::EINVAL),
        (
            "no name",
            vec![abi::p2pmem_rule { name: [0; 32], ..deny }],
            libc::EINVAL,
        ),
        (
            "a name without end",
            vec![abi::p2pmem_rule { name: [97; 32], ..deny }],
            libc::EINVAL,
        ),
        (
            "an odd name",
            vec![abi::p2pmem_rule {
                name: own_rule("a b").name,
                ..deny
            }],
            libc::EINVAL,
        ),
        ("two of a name", vec![deny, deny], libc::EINVAL),
        ("nothing to say", vec![own_rule("empty")], libc::EINVAL),
        (
            "a contradiction",
            vec![abi::p2pmem_rule { max_class: 2, ..deny }],
            libc::EINVAL,
        ),
        (
            "an unknown action",
            vec![abi::p2pmem_rule { action: 5, ..deny }],
            libc::EINVAL,
        ),
        (
            "a quota of one provider",
            vec![abi::p2pmem_rule {
                action: 0,
                flags: abi::P2PMEM_RULE_QUOTA | abi::P2PMEM_RULE_PROVIDER,
                quota: MIB,
                ..deny
            }],
            libc::EINVAL,
        ),
    ];
    for (what, mut rules, code) in bad {
        expect(what, set_own(fd, &mut rules), code)?;
        ensure!(!explain_last(fd)?.2.is_empty(), "{what}: no message");
    }
    expect("too many", set_own(fd, &mut vec![deny; 33]), libc::E2BIG)?;
    let mut ask = abi::p2pmem_rules {
        count: 1,
        ..Default::default()
    };
    expect("a bad pointer", sys::rules(fd, &mut ask, Memory::Bad(0)), libc::EFAULT)?;
    let still = sys::alloc(fd, &mut named, Memory::Slice(&mut []));
    expect("still denied", still, libc::EACCES)?;

    // A file's `allow` does not override the administrator's `deny`.
    let admin = AdminRule::new("10-none", &[("action", "deny"), ("uid", &ALICE.to_string())])?;
    let allow = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_ALLOW,
        ..own_rule("please")
    };
    let prefer = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_PREFER,
        ..own_rule("very-much")
    };
    for rule in [allow, prefer] {
        set_own(fd, &mut [rule]).map_err(errno)?;
        expect("alice", alloc_as(fd, ALICE, &[], MIB)?, libc::EACCES)?;
        ensure!(said(fd, id)?.1 == "10-none");
    }
    drop(admin);

    // A quota of the file counts all of the file's buffers, also earlier ones.
    let before = alloc(fd, MIB).map_err(errno)?;
    let quota = abi::p2pmem_rule {
        flags: abi::P2PMEM_RULE_QUOTA,
        quota: 2 * MIB,
        ..own_rule("small")
    };
    set_own(fd, &mut [quota]).map_err(errno)?;
    let second = alloc(fd, MIB).map_err(errno)?;
    expect("a third", alloc(fd, 4096), libc::EDQUOT)?;
    ensure!(said(fd, id)? == (abi::P2PMEM_VERDICT_QUOTA, "small".into(), abi::P2PMEM_RULES_FILE));
    free(fd, before.handle).map_err(errno)?;
    alloc(fd, MIB).map_err(errno)?;
    set_own(fd, &mut []).map_err(errno)?;
    alloc(fd, MIB).map_err(errno)?;
    free(fd, second.handle).map_err(errno)
}

fn strategies(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let (near, far) = (bed.provider("accel0")?, bed.provider("accel1")?);
    let file = open()?;
    let fd = file.as_fd();
    let mut clients = [bed.address("nvme0")?];
    let mut ask = |strategy: u32| -> Result<u32> {
        let mut a = request(32 * MIB);
        (a.req.nr_clients, a.req.strategy) = (1, strategy);
        sys::alloc(fd, &mut a, Memory::Slice(&mut clients)).map_err(errno)?;
        Ok(a.provider)
    };
    // Existing buffers must not decide: the two providers are filled unequally.
    ensure!(ask(abi::P2PMEM_STRATEGY_NEAREST)? == near.id);
    let spread = ask(abi::P2PMEM_STRATEGY_SPREAD)?;
    ensure!(spread != near.id, "spread took the loaded one");
    ensure!(said(fd, near.id)?.0 == abi::P2PMEM_VERDICT_LOAD);
    let mut far_first = request(96 * MIB);
    far_first.req.provider = far.id;
    sys::alloc(fd, &mut far_first, Memory::Slice(&mut [])).map_err(errno)?;
    ensure!(ask(abi::P2PMEM_STRATEGY_PACK)? == far.id);
    ensure!(said(fd, near.id)?.0 == abi::P2PMEM_VERDICT_PACKED);
    ensure!(ask(abi::P2PMEM_STRATEGY_NEAREST)? == near.id);
    drop(file);
    bed.unpublish("accel1")
}

fn quota(bed: &mut Bed) -> Result<()> {
    let id = bed.provider("accel0")?.id;
    let each = AdminRule::new("50-each", &[("quota", "2M")])?;
    let group = AdminRule::new("40-lab", &[("gid", &LAB.to_string()), ("group_quota", "3M")])?;
    let file = open()?;
    let fd = file.as_fd();
    let alice = alloc_as(fd, ALICE, &[LAB], 2 * MIB)?.map_err(errno)?;
    expect("alice", alloc_as(fd, ALICE, &[LAB], 4096)?, libc::EDQUOT)?;
    ensure!(said(fd, id)? == (abi::P2PMEM_VERDICT_QUOTA, "50-each".into(), abi::P2PMEM_RULES_ADMIN));
    let sentence = explain_last(fd)?.2;
    let numbers = format!("uid {ALICE} uses {} of {} bytes", 2 * MIB, 2 * MIB);
    ensure!(
        sentence.contains("rule 50-each") && sentence.contains(&numbers),
        "{sentence:?}"
    );
    // Bob has a separate quota, and shares the group's.
    alloc_as(fd, BOB, &[LAB], MIB)?.map_err(errno)?;
    expect("bob", alloc_as(fd, BOB, &[LAB], 4096)?, libc::EDQUOT)?;
    ensure!(said(fd, id)?.1 == "40-lab" && explain_last(fd)?.2.contains("group_quota of rule 40-lab"));
    // Without the group, its quota does not apply to Bob.
    let alone = alloc_as(fd, BOB, &[], MIB)?.map_err(errno)?;
    ensure!(
        each.get("usage")? == format!("uid {ALICE} {}\nuid {BOB} {}", 2 * MIB, 2 * MIB),
        "{}",
        each.get("usage")?
    );
    ensure!(
        group.get("usage")? == format!("group {}", 3 * MIB),
        "{}",
        group.get("usage")?
    );
    free(fd, alice.handle).map_err(errno)?;
    alloc_as(fd, BOB, &[LAB], 4096)?.map_or_else(
        |code| expect("bob is full", Err::<(), _>(code), libc::EDQUOT),
        |_| bail!("bob got more"),
    )?;
    free(fd, alone.handle).map_err(errno)?;
    alloc_as(fd, BOB, &[LAB], MIB)?.map_err(errno)?;
    // An mmap at offset 0 is an allocation too.
    let mapped = sys::as_user(BOB, BOB, &[], || Mapping::shared(fd, 0, 4096).map(drop)).map_err(errno)?;
    expect("mmap at 0", mapped, libc::EDQUOT)?;
    drop(file);
    ensure!(each.get("usage")?.is_empty() && group.get("usage")?.is_empty());
    Ok(())
}

fn quota_changes(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let before = bed.settled()?;
    let held = alloc_as(fd, ALICE, &[LAB], 4 * MIB)?.map_err(errno)?;
    // A rule that is added later counts existing buffers, and revokes none.
    let small = AdminRule::new("50-small", &[("quota", "1M")])?;
    let status = small.get("status")?;
    let expected = format!("uid {ALICE} holds {} bytes of {}: it keeps them", 4 * MIB, MIB);
    ensure!(status.contains(&expected), "{status:?}");
    expect("alice", alloc_as(fd, ALICE, &[], 4096)?, libc::EDQUOT)?;
    let map = Mapping::shared(fd, held.mmap_offset, 4096).map_err(errno)?;
    map.set(0, 7);
    ensure!(map.get(0) == 7);
    drop(map);
    // So does a rule whose quota is raised, and lowered again.
    small.set("quota", "5M")?;
    ensure!(small.get("status")? == "in force", "{:?}", small.get("status")?);
    let more = alloc_as(fd, ALICE, &[], MIB)?.map_err(errno)?;
    small.set("quota", "0")?;
    expect("alice", alloc_as(fd, ALICE, &[], 4096)?, libc::EDQUOT)?;
    // When a rule is removed, its charges count under the next one.
    let next = AdminRule::new("60-next", &[("quota", "6M")])?;
    ensure!(next.get("usage")?.is_empty());
    drop(small);
    ensure!(
        next.get("usage")? == format!("uid {ALICE} {}", 5 * MIB),
        "{}",
        next.get("usage")?
    );
    alloc_as(fd, ALICE, &[], MIB)?.map_err(errno)?;
    expect("alice", alloc_as(fd, ALICE, &[], 4096)?, libc::EDQUOT)?;
    free(fd, more.handle).map_err(errno)?;
    ensure!(
        next.get("usage")? == format!("uid {ALICE} {}", 5 * MIB),
        "{}",
        next.get("usage")?
    );
    drop(next);
    alloc_as(fd, ALICE, &[], 16 * MIB)?.map_err(errno)?;
    drop(file);
    ensure!(bed.settled()? == before);
    Ok(())
}

/// Returns the bytes that a rule counts for its only user.
pub(super) fn counted(rule: &AdminRule) -> Result<u64> {
    let usage = rule.get("usage")?;
    match usage.lines().next() {
        None => Ok(0),
        Some(line) => Ok(line.rsplit(' ').next().context("a number")?.parse()?),
    }
}

fn uncharge(bed: &mut Bed) -> Result<()> {
    let rule = AdminRule::new("50-count", &[("quota", "64M")])?;
    let gone = |what: &str| -> Result<()> {
        super::inflight::until(what, || Ok(counted(&rule)? == 0)).with_context(|| rule.get("usage").unwrap_or_default())
    };
    let take = |fd: BorrowedFd<'_>| alloc(fd, MIB).map_err(errno);
    // Ends with the handle.
    let file = open()?;
    let a = take(file.as_fd())?;
    ensure!(counted(&rule)? == MIB);
    free(file.as_fd(), a.handle).map_err(errno)?;
    gone("freed")?;
    // Ends with the mapping, after the handle.
    let a = take(file.as_fd())?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, 4096).map_err(errno)?;
    map.set(0, 1);
    free(file.as_fd(), a.handle).map_err(errno)?;
    ensure!(counted(&rule)? == MIB, "a mapping holds it");
    drop(map);
    gone("unmapped")?;
    // Ends with a dma-buf, after both.
    let a = take(file.as_fd())?;
    let mut ranges = [abi::p2pmem_range { offset: 0, size: MIB }];
    let mut ask = abi::p2pmem_export {
        handle: a.handle,
        nr_ranges: 1,
        ..Default::default()
    };
    let dma_buf = sys::export(file.as_fd(), &mut ask, Memory::Slice(&mut ranges)).map_err(errno)?;
    free(file.as_fd(), a.handle).map_err(errno)?;
    drop(file);
    ensure!(counted(&rule)? == MIB, "a dma-buf holds it");
    drop(dma_buf);
    gone("closed")?;
    // Ends with a mapping at offset 0, with a process that exits, and with one that is killed.
    let file = open()?;
    drop(Mapping::shared(file.as_fd(), 0, 4096).map_err(errno)?);
    gone("a mapping of its own")?;
    let part = Part::start("hold", &["65536"])?;
    ensure!(counted(&rule)? == 65536);
    part.kill()?;
    gone("killed")?;
    // Ends with the provider.
    let a = take(file.as_fd())?;
    bed.unpublish("accel0")?;
    ensure!(counted(&rule)? == 0, "revoked, and still counted");
    free(file.as_fd(), a.handle).map_err(errno)?;
    gone("its handle too")?;
    bed.publish("accel0")
}

/// The process of [`kills`] that works until it is killed.
pub(super) const PART: &str = "churn";

pub(super) fn part(arguments: &[String]) -> Result<()> {
    let mut seed: u64 = arguments.first().map_or(Ok(1), |text| text.parse())?;
    let mut random = move |n: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % n
    };
    let file = open()?;
    let fd = file.as_fd();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        // Waits for a line that never comes.
        scope.spawn(|| {
            let _ = ready();
            stop.store(true, Ordering::SeqCst);
        });
        let mut held: Vec<(u32, Option<Mapping>)> = Vec::new();
        while !stop.load(Ordering::SeqCst) {
            match random(4) {
                0 if !held.is_empty() => {
                    let (handle, map) = held.swap_remove(random(held.len() as u64) as usize);
                    drop(map);
                    free(fd, handle).map_err(errno)?;
                }
                _ => match alloc(fd, (1 + random(256)) << 12) {
                    Ok(a) => {
                        let map = (random(2) == 0)
                            .then(|| Mapping::shared(fd, a.mmap_offset, 4096))
                            .transpose();
                        let map = map.map_err(errno)?;
                        if let Some(map) = &map {
                            map.set(0, 1);
                        }
                        held.push((a.handle, map));
                    }
                    Err(libc::EDQUOT | libc::ENOSPC) => held.truncate(held.len() / 2),
                    Err(code) => return Err(errno(code)),
                },
            }
        }
        Ok(())
    })
}

fn kills(bed: &mut Bed) -> Result<()> {
    let before = bed.settled()?;
    let rule = AdminRule::new("50-churn", &[("quota", "24M")])?;
    for round in 0..rounds(12) {
        let parts = (0..3)
            .map(|n| Part::start(PART, &[&format!("{}", round * 10 + n + 1)]))
            .collect::<Result<Vec<_>>>()?;
        super::inflight::until("they work", || Ok(counted(&rule)? > MIB))?;
        // Rules change meanwhile.
        let other = AdminRule::new("40-other", &[("quota", if round % 2 == 0 { "16M" } else { "4M" })])?;
        ensure!(
            counted(&rule)? == 0 || counted(&other)? == 0,
            "a buffer counts under two rules"
        );
        drop(other);
        ensure!(counted(&rule)? <= 24 * MIB);
        for part in parts {
            part.kill()?;
        }
        super::inflight::until("all is given back", || Ok(rule.get("usage")?.is_empty()))
            .with_context(|| rule.get("usage").unwrap_or_default())?;
    }
    ensure!(bed.settled()? == before);
    Ok(())
}

fn reserve(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let lab = LAB.to_string();
    let aside = row.size - 8 * MIB;
    let rule = AdminRule::new(
        "10-lab",
        &[
            ("provider", &bed.device("accel0")?.bdf),
            ("gid", &lab),
            ("reserve", &aside.to_string()),
            ("reserve_for", "group"),
        ],
    )?;
    let file = open()?;
    let fd = file.as_fd();
    let ask = |uid: u32, groups: &[u32], size: u64| {
        let work = || {
            let mut a = request(size);
            a.req.provider = row.id;
            sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map(|()| a)
        };
        sys::as_user(uid, uid, groups, work).map_err(errno)
    };
    expect("into the reserve", ask(BOB, &[], 9 * MIB)?, libc::ENOSPC)?;
    ensure!(said(fd, row.id)? == (abi::P2PMEM_VERDICT_RESERVED, "10-lab".into(), abi::P2PMEM_RULES_ADMIN));
    ensure!(explain_last(fd)?.2.contains("rule 10-lab reserves"));
    let rest = ask(BOB, &[], 8 * MIB)?.map_err(errno)?;
    expect("one page more", ask(BOB, &[], 4096)?, libc::ENOSPC)?;
    // The group can allocate the reserve, and uses it up.
    let first = ask(ALICE, &[LAB], 16 * MIB)?.map_err(errno)?;
    ensure!(
        rule.get("usage")? == format!("provider {} {}", row.id, 16 * MIB),
        "{}",
        rule.get("usage")?
    );
    expect("still reserved", ask(BOB, &[], 4096)?, libc::ENOSPC)?;
    free(fd, rest.handle).map_err(errno)?;
    super::inflight::until("bob's are free", || Ok(ask(BOB, &[], 4 * MIB)?.is_ok()))?;
    free(fd, first.handle).map_err(errno)?;
    // Without the rule there is no reserve.
    drop(rule);
    ask(BOB, &[], 32 * MIB)?.map_err(errno)?;
    Ok(())
}

fn reserve_kernel(bed: &mut Bed) -> Result<()> {
    // An own provider that is published while such a rule exists keeps that much in the kernel's pool.
    bed.unpublish("accel0")?;
    let rule = AdminRule::new("10-kernel", &[("reserve", "32M"), ("reserve_for", "kernel")])?;
    bed.publish("accel0")?;
    let row = bed.provider("accel0")?;
    ensure!(row.kernel_reserve == 32 * MIB, "{row:?}");
    // In memory that another driver published, the reserve is taken immediately.
    let drive = bed.provider("nvme1")?;
    let file = open()?;
    let mut a = request(MIB);
    a.req.provider = drive.id;
    let taken = sys::alloc(file.as_fd(), &mut a, Memory::Slice(&mut []));
    expect("the drive's own", taken, libc::ENOSPC)?;
    ensure!(said(file.as_fd(), drive.id)?.1 == "10-kernel");
    drop(rule);
    sys::alloc(file.as_fd(), &mut a, Memory::Slice(&mut [])).map_err(errno)?;
    drop(file);
    bed.unpublish("accel0")
}
