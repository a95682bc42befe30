// SPDX-License-Identifier: MIT OR Apache-2.0

//! Rules of the administrator and of files: access, limits, and the rule that an explanation names.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;

use super::life::{Part, ready};
use super::{Bed, Case, alloc, errno, expect, explain, explain_last, free, open, read, request, write};
use crate::patience::rounds;
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rules-first-decides",
        about: "for each attribute the first matching rule decides, and verdict, message and log name the rule",
        topology: "demo",
        ruins: false,
        run: first_decides,
    },
    Case {
        name: "rules-preference",
        about: "an administrator's `prefer` and `avoid` come before distance, and an avoided provider is used if no other can serve",
        topology: "demo",
        ruins: false,
        run: preference,
    },
    Case {
        name: "rules-short-way",
        about: "the cached effect of rules leads to the same decisions and verdicts as checking each rule",
        topology: "demo",
        ruins: false,
        run: cached_effects,
    },
    Case {
        name: "rules-own",
        about: "file rules restrict the administrator's rules, and never extend them",
        topology: "demo",
        ruins: false,
        run: file_rules,
    },
    Case {
        name: "strategies",
        about: "spread chooses the least loaded provider, pack the most loaded",
        topology: "demo",
        ruins: false,
        run: strategies,
    },
    Case {
        name: "quota",
        about: "an allocation above the quota of a user or of a group fails with EDQUOT, and succeeds after memory is freed",
        topology: "demo",
        ruins: false,
        run: quota,
    },
    Case {
        name: "quota-changes",
        about: "lowering a quota below current use, and removing a rule in use, revokes no buffer",
        topology: "demo",
        ruins: false,
        run: quota_changes,
    },
    Case {
        name: "quota-every-end",
        about: "however a buffer ends, its charge is released exactly once",
        topology: "demo",
        ruins: false,
        run: every_end,
    },
    Case {
        name: "quota-kills",
        about: "processes that are killed while they allocate, map and free have no charge afterwards",
        topology: "demo",
        ruins: false,
        run: kills,
    },
    Case {
        name: "reserve",
        about: "only the members of a group can allocate from the group's reserve",
        topology: "demo",
        ruins: false,
        run: reserve,
    },
    Case {
        name: "reserve-kernel",
        about: "a reserve for the kernel stays in the device's pool",
        topology: "demo",
        ruins: false,
        run: reserve_kernel,
    },
];

pub(super) const MIB: u64 = 1 << 20;
const RULES: &str = "/sys/kernel/config/p2pmem/rules";
/// Ids of users and of a group that nothing else uses.
pub(super) const ALICE: u32 = 4001;
const BOB: u32 = 4002;
const LAB: u32 = 5001;

/// A rule of the administrator, which is removed when it is dropped.
pub(super) struct AdminRule(PathBuf);

impl AdminRule {
    /// Creates a rule that is not in force.
    pub(super) fn make(name: &str) -> Result<AdminRule> {
        let dir = Path::new(RULES).join(name);
        fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        Ok(AdminRule(dir))
    }

    /// Creates a rule and puts it into force.
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

    /// Writes a value that must be refused. Returns the errno.
    pub(super) fn refused(&self, attribute: &str, value: &str) -> Result<i32> {
        match fs::write(self.0.join(attribute), value) {
            Err(e) => e.raw_os_error().context("the write failed without an errno"),
            Ok(()) => bail!("{attribute} accepts {value:?}"),
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

/// Allocates `size` bytes as a user.
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

/// The verdict on a provider in the file's last decision: its code, the rule that decided, and the set of that rule.
pub(super) fn verdict_on(fd: BorrowedFd<'_>, provider: u32) -> Result<(u32, String, u32)> {
    let (_, verdicts, _) = explain_last(fd)?;
    let verdict = verdicts.iter().find(|v| v.provider == provider);
    let verdict = verdict.with_context(|| format!("the explanation has no verdict on provider {provider}"))?;
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
    expect("ALLOC of a denied user", alloc_as(fd, BOB, &[], MIB)?, libc::EACCES)?;
    let (_, verdicts, message) = explain_last(fd)?;
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
        message.contains("rule 20-nobody") && message.contains(&format!("uid {BOB}")),
        "{message:?}"
    );
    log.wait(&["refused", "rule 20-nobody"])?;

    // The first rule that sets an attribute decides that attribute. Another rule can decide another attribute.
    let near = AdminRule::new("05-near", &[("uid", &uid), ("max_class", "DEV")])?;
    let mut clients = [bed.address("nvme0")?];
    let alloc_near = |clients: &mut [abi::p2pmem_pci_addr]| {
        let mut a = request(MIB);
        a.req.nr_clients = 1;
        sys::alloc(fd, &mut a, Memory::Slice(clients)).map(|()| a)
    };
    let far = sys::as_user(ALICE, ALICE, &[], || alloc_near(&mut clients)).map_err(errno)?;
    expect("ALLOC beyond max_class", far, libc::ENODEV)?;
    ensure!(verdict_on(fd, id)? == (abi::P2PMEM_VERDICT_TOO_FAR, "05-near".into(), abi::P2PMEM_RULES_ADMIN));
    ensure!(explain_last(fd)?.2.contains("rule 05-near"));
    drop(near);
    let near = sys::as_user(ALICE, ALICE, &[], || alloc_near(&mut clients))
        .map_err(errno)?
        .map_err(errno)?;
    free(fd, near.handle).map_err(errno)?;

    // The status of a rule that never decides says so. A changed rule is in force at once.
    let late = AdminRule::new("30-late", &[("uid", &uid), ("action", "allow")])?;
    let status = late.get("status")?;
    ensure!(
        status.contains("action never decides") && status.contains("20-nobody"),
        "{status:?}"
    );
    drop(late);
    allow.set("uid", &BOB.to_string())?;
    expect("ALLOC of a denied user", alloc_as(fd, ALICE, &[], MIB)?, libc::EACCES)?;
    allow.set("enable", "0")?;
    expect("ALLOC of a denied user", alloc_as(fd, BOB, &[], MIB)?, libc::EACCES)?;
    allow.set("uid", "any")?;
    allow.set("gid", &LAB.to_string())?;
    allow.set("enable", "1")?;
    // A rule for a group matches all its members.
    expect("ALLOC without the group", alloc_as(fd, ALICE, &[], MIB)?, libc::EACCES)?;
    let member = alloc_as(fd, ALICE, &[7, LAB, 9999], MIB)?.map_err(errno)?;
    free(fd, member.handle).map_err(errno)
}

fn preference(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let (near, far) = (bed.provider("accel0")?.id, bed.provider("accel1")?.id);
    let file = open()?;
    let fd = file.as_fd();
    let mut clients = [bed.address("nvme0")?];
    let mut choose = |prefer: u32| {
        let mut a = request(32 * MIB);
        a.req.nr_clients = 1;
        if prefer != 0 {
            (a.req.provider, a.req.flags) = (prefer, abi::P2PMEM_ALLOC_PREFER);
        }
        sys::alloc(fd, &mut a, Memory::Slice(&mut clients)).map(|()| a.provider)
    };
    ensure!(choose(0) == Ok(near));
    let bdf = bed.device("accel1")?.bdf.clone();
    let prefer = AdminRule::new("10-far", &[("provider", &bdf), ("action", "prefer")])?;
    ensure!(choose(0) == Ok(far));
    ensure!(
        verdict_on(fd, far)?.1 == "10-far"
            && verdict_on(fd, near)? == (abi::P2PMEM_VERDICT_PREFERENCE, "10-far".into(), 1)
    );
    prefer.set("provider", &bed.device("accel0")?.bdf)?;
    prefer.set("action", "avoid")?;
    let next = choose(0).map_err(errno)?;
    ensure!(next != near);
    ensure!(verdict_on(fd, near)? == (abi::P2PMEM_VERDICT_PREFERENCE, "10-far".into(), 1));
    // The program's preference does not override the rule. If all providers are avoided, the rule has no effect.
    ensure!(choose(near).map_err(errno)? != near);
    prefer.set("provider", "any")?;
    ensure!(
        choose(0) == Ok(near),
        "if all providers are avoided, the nearest is chosen"
    );
    drop(file);
    drop(prefer);
    bed.unpublish("accel1")
}

/// An explanation as text: errno, provider, message, and the verdicts without the free bytes, which change.
fn decision(
    fd: BorrowedFd<'_>,
    req: &abi::p2pmem_request,
    clients: &mut [abi::p2pmem_pci_addr],
) -> Result<Vec<String>> {
    let arg = abi::p2pmem_explain {
        req: *req,
        ..Default::default()
    };
    let (explain, verdicts, text) = explain(fd, arg, clients)?;
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

/// Compares decisions of a file without file rules, for which the module caches the effect of the rules, with those of
/// a file with a file rule that changes nothing, for which the module checks each rule.
fn cached_effects(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let (accel0, accel1) = (bed.device("accel0")?.bdf.clone(), bed.device("accel1")?.bdf.clone());
    let nvme0 = bed.device("nvme0")?.bdf.clone();
    let all = [bed.address("nvme0")?, bed.address("nvme1")?];
    let (cached_file, checked_file) = (open()?, open()?);
    let allow = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_ALLOW,
        ..file_rule("nothing")
    };
    set_file_rules(checked_file.as_fd(), &mut [allow]).map_err(errno)?;
    // More users with different effects than the module caches.
    let users: Vec<u32> = (ALICE..ALICE + 6).collect();
    let mut seen = std::collections::BTreeSet::new();
    let mut same = |what: &str| -> Result<()> {
        for &uid in &users {
            for clients in 0..=all.len() {
                for (size, max_class) in [(MIB, 0), (MIB, abi::P2PMEM_PATH_SWITCHES), (128 * MIB, 0), (1 << 40, 0)] {
                    let mut req = request(size).req;
                    req.max_class = max_class;
                    let mut list = all[..clients].to_vec();
                    let mut decide = |file: &fs::File| {
                        sys::as_user(uid, uid, &[], || decision(file.as_fd(), &req, &mut list)).map_err(errno)?
                    };
                    let (expected, cached) = (decide(&checked_file)?, decide(&cached_file)?);
                    ensure!(
                        cached == expected,
                        "{what}, uid {uid}, {clients} clients, {size} bytes, class {max_class}: {cached:#?} instead of {expected:#?}"
                    );
                    seen.insert(cached);
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
        // One rule for each of the other users, and one with a quota, which makes the cache unusable.
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
        // An allocation by the cached effect has the result of the explanation.
        for &uid in &users {
            let explained = sys::as_user(uid, uid, &[], || {
                decision(cached_file.as_fd(), &request(MIB).req, &mut [])
            })
            .map_err(errno)??;
            let got = alloc_as(cached_file.as_fd(), uid, &[], MIB)?;
            let head = match got {
                Ok(a) => format!("errno 0, provider {}:", a.provider),
                Err(code) => format!("errno {code}, provider 0:"),
            };
            ensure!(explained[0].starts_with(&head), "{head} {explained:?}");
            if let Ok(a) = got {
                free(cached_file.as_fd(), a.handle).map_err(errno)?;
            }
        }
        drop(rules);
        same("after the rules")?;
    }
    println!("{} different decisions", seen.len());
    ensure!(
        seen.len() > 30,
        "only {} different decisions: the test compared too little",
        seen.len()
    );
    drop((cached_file, checked_file));
    bed.unpublish("shm0")?;
    bed.unpublish("accel1")
}

fn file_rule(name: &str) -> abi::p2pmem_rule {
    let mut rule = abi::p2pmem_rule::default();
    for (to, from) in rule.name.iter_mut().zip(name.bytes()) {
        *to = from as std::ffi::c_char;
    }
    rule
}

fn set_file_rules(fd: BorrowedFd<'_>, rules: &mut [abi::p2pmem_rule]) -> Result<(), i32> {
    let mut arg = abi::p2pmem_rules {
        count: rules.len() as u32,
        ..Default::default()
    };
    sys::rules(fd, &mut arg, Memory::Slice(rules))
}

fn file_rules(bed: &mut Bed) -> Result<()> {
    let id = bed.provider("accel0")?.id;
    let accel = bed.address("accel0")?;
    let file = open()?;
    let fd = file.as_fd();
    let deny = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_DENY,
        flags: abi::P2PMEM_RULE_PROVIDER,
        provider: accel,
        ..file_rule("not-this")
    };
    set_file_rules(fd, &mut [deny]).map_err(errno)?;
    let mut named = request(MIB);
    named.req.provider = id;
    let denied = sys::alloc(fd, &mut named, Memory::Slice(&mut []));
    expect("ALLOC of a provider that the file denies", denied, libc::EACCES)?;
    ensure!(verdict_on(fd, id)? == (abi::P2PMEM_VERDICT_DENIED, "not-this".into(), abi::P2PMEM_RULES_FILE));
    ensure!(explain_last(fd)?.2.contains("own rule not-this"));
    // File rules apply to their file alone.
    alloc(open()?.as_fd(), MIB).map_err(errno)?;

    // Invalid rules do not change the file's rules.
    let unknown = abi::p2pmem_rule { flags: 1 << 9, ..deny };
    let bad: [(&str, Vec<abi::p2pmem_rule>, i32); 9] = [
        ("an unknown flag", vec![unknown], libc::EINVAL),
        (
            "an empty name",
            vec![abi::p2pmem_rule { name: [0; 32], ..deny }],
            libc::EINVAL,
        ),
        (
            "an unterminated name",
            vec![abi::p2pmem_rule { name: [97; 32], ..deny }],
            libc::EINVAL,
        ),
        (
            "an invalid name",
            vec![abi::p2pmem_rule {
                name: file_rule("a b").name,
                ..deny
            }],
            libc::EINVAL,
        ),
        ("two rules with one name", vec![deny, deny], libc::EINVAL),
        ("a rule without effect", vec![file_rule("empty")], libc::EINVAL),
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
            "a quota for one provider",
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
        expect(what, set_file_rules(fd, &mut rules), code)?;
        ensure!(!explain_last(fd)?.2.is_empty(), "{what}: no message");
    }
    expect("too many rules", set_file_rules(fd, &mut vec![deny; 33]), libc::E2BIG)?;
    let mut arg = abi::p2pmem_rules {
        count: 1,
        ..Default::default()
    };
    expect("a bad pointer", sys::rules(fd, &mut arg, Memory::Bad(0)), libc::EFAULT)?;
    let still = sys::alloc(fd, &mut named, Memory::Slice(&mut []));
    expect("ALLOC after invalid rules", still, libc::EACCES)?;

    // A file rule's `allow` cannot override an administrator's `deny`.
    let admin = AdminRule::new("10-none", &[("action", "deny"), ("uid", &ALICE.to_string())])?;
    let allow = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_ALLOW,
        ..file_rule("please")
    };
    let prefer = abi::p2pmem_rule {
        action: abi::P2PMEM_RULE_PREFER,
        ..file_rule("very-much")
    };
    for rule in [allow, prefer] {
        set_file_rules(fd, &mut [rule]).map_err(errno)?;
        expect("ALLOC of a denied user", alloc_as(fd, ALICE, &[], MIB)?, libc::EACCES)?;
        ensure!(verdict_on(fd, id)?.1 == "10-none");
    }
    drop(admin);

    // A quota of a file rule counts all buffers of the file, including those allocated before the rule.
    let before = alloc(fd, MIB).map_err(errno)?;
    let quota = abi::p2pmem_rule {
        flags: abi::P2PMEM_RULE_QUOTA,
        quota: 2 * MIB,
        ..file_rule("small")
    };
    set_file_rules(fd, &mut [quota]).map_err(errno)?;
    let second = alloc(fd, MIB).map_err(errno)?;
    expect("ALLOC over the file's quota", alloc(fd, 4096), libc::EDQUOT)?;
    ensure!(verdict_on(fd, id)? == (abi::P2PMEM_VERDICT_QUOTA, "small".into(), abi::P2PMEM_RULES_FILE));
    free(fd, before.handle).map_err(errno)?;
    alloc(fd, MIB).map_err(errno)?;
    set_file_rules(fd, &mut []).map_err(errno)?;
    alloc(fd, MIB).map_err(errno)?;
    free(fd, second.handle).map_err(errno)
}

fn strategies(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let (near, far) = (bed.provider("accel0")?, bed.provider("accel1")?);
    let file = open()?;
    let fd = file.as_fd();
    let mut clients = [bed.address("nvme0")?];
    let mut choose = |strategy: u32| -> Result<u32> {
        let mut a = request(32 * MIB);
        (a.req.nr_clients, a.req.strategy) = (1, strategy);
        sys::alloc(fd, &mut a, Memory::Slice(&mut clients)).map_err(errno)?;
        Ok(a.provider)
    };
    // One allocation loads one provider, so that the loads differ whatever they were before.
    ensure!(choose(abi::P2PMEM_STRATEGY_NEAREST)? == near.id);
    let spread = choose(abi::P2PMEM_STRATEGY_SPREAD)?;
    ensure!(spread != near.id, "spread chose the loaded provider");
    ensure!(verdict_on(fd, near.id)?.0 == abi::P2PMEM_VERDICT_LOAD);
    let mut far_first = request(96 * MIB);
    far_first.req.provider = far.id;
    sys::alloc(fd, &mut far_first, Memory::Slice(&mut [])).map_err(errno)?;
    ensure!(choose(abi::P2PMEM_STRATEGY_PACK)? == far.id);
    ensure!(verdict_on(fd, near.id)?.0 == abi::P2PMEM_VERDICT_PACKED);
    ensure!(choose(abi::P2PMEM_STRATEGY_NEAREST)? == near.id);
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
    expect(
        "ALLOC over the user's quota",
        alloc_as(fd, ALICE, &[LAB], 4096)?,
        libc::EDQUOT,
    )?;
    ensure!(verdict_on(fd, id)? == (abi::P2PMEM_VERDICT_QUOTA, "50-each".into(), abi::P2PMEM_RULES_ADMIN));
    let message = explain_last(fd)?.2;
    let numbers = format!("uid {ALICE} uses {} of {} bytes", 2 * MIB, 2 * MIB);
    ensure!(
        message.contains("rule 50-each") && message.contains(&numbers),
        "{message:?}"
    );
    // Bob has a quota as a user, and a part of the group's quota.
    alloc_as(fd, BOB, &[LAB], MIB)?.map_err(errno)?;
    expect(
        "ALLOC over the group's quota",
        alloc_as(fd, BOB, &[LAB], 4096)?,
        libc::EDQUOT,
    )?;
    ensure!(verdict_on(fd, id)?.1 == "40-lab" && explain_last(fd)?.2.contains("group_quota of rule 40-lab"));
    // The group's quota does not apply to Bob without the group.
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
        |code| expect("ALLOC over the quota", Err::<(), _>(code), libc::EDQUOT),
        |_| bail!("ALLOC over the quota: success"),
    )?;
    free(fd, alone.handle).map_err(errno)?;
    alloc_as(fd, BOB, &[LAB], MIB)?.map_err(errno)?;
    // mmap at offset 0 allocates too.
    let mapped = sys::as_user(BOB, BOB, &[], || Mapping::shared(fd, 0, 4096).map(drop)).map_err(errno)?;
    expect("mmap at offset 0 over the quota", mapped, libc::EDQUOT)?;
    drop(file);
    ensure!(each.get("usage")?.is_empty() && group.get("usage")?.is_empty());
    Ok(())
}

fn quota_changes(bed: &mut Bed) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let before = bed.settled()?;
    let held = alloc_as(fd, ALICE, &[LAB], 4 * MIB)?.map_err(errno)?;
    // A new rule counts existing buffers, and revokes none.
    let small = AdminRule::new("50-small", &[("quota", "1M")])?;
    let status = small.get("status")?;
    let expected = format!("uid {ALICE} holds {} bytes of {}: it keeps them", 4 * MIB, MIB);
    ensure!(status.contains(&expected), "{status:?}");
    expect("ALLOC over the quota", alloc_as(fd, ALICE, &[], 4096)?, libc::EDQUOT)?;
    let map = Mapping::shared(fd, held.mmap_offset, 4096).map_err(errno)?;
    map.set(0, 7);
    ensure!(map.get(0) == 7);
    drop(map);
    // The same holds if the quota is raised and lowered again.
    small.set("quota", "5M")?;
    ensure!(small.get("status")? == "in force", "{:?}", small.get("status")?);
    let more = alloc_as(fd, ALICE, &[], MIB)?.map_err(errno)?;
    small.set("quota", "0")?;
    expect("ALLOC over the quota", alloc_as(fd, ALICE, &[], 4096)?, libc::EDQUOT)?;
    // When a rule ends, the next rule counts its buffers.
    let next = AdminRule::new("60-next", &[("quota", "6M")])?;
    ensure!(next.get("usage")?.is_empty());
    drop(small);
    ensure!(
        next.get("usage")? == format!("uid {ALICE} {}", 5 * MIB),
        "{}",
        next.get("usage")?
    );
    alloc_as(fd, ALICE, &[], MIB)?.map_err(errno)?;
    expect("ALLOC over the quota", alloc_as(fd, ALICE, &[], 4096)?, libc::EDQUOT)?;
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

/// The bytes that a rule counts for its only user.
pub(super) fn counted(rule: &AdminRule) -> Result<u64> {
    let usage = rule.get("usage")?;
    match usage.lines().next() {
        None => Ok(0),
        Some(line) => Ok(line.rsplit(' ').next().context("`usage` has no number")?.parse()?),
    }
}

fn every_end(bed: &mut Bed) -> Result<()> {
    let rule = AdminRule::new("50-count", &[("quota", "64M")])?;
    let released = |what: &str| -> Result<()> {
        super::inflight::until(what, || Ok(counted(&rule)? == 0)).with_context(|| rule.get("usage").unwrap_or_default())
    };
    let take = |fd: BorrowedFd<'_>| alloc(fd, MIB).map_err(errno);
    // The handle is freed.
    let file = open()?;
    let a = take(file.as_fd())?;
    ensure!(counted(&rule)? == MIB);
    free(file.as_fd(), a.handle).map_err(errno)?;
    released("the charge of a freed buffer is released")?;
    // The mapping is unmapped, after the handle was freed.
    let a = take(file.as_fd())?;
    let map = Mapping::shared(file.as_fd(), a.mmap_offset, 4096).map_err(errno)?;
    map.set(0, 1);
    free(file.as_fd(), a.handle).map_err(errno)?;
    ensure!(
        counted(&rule)? == MIB,
        "the charge was released while a mapping held the buffer"
    );
    drop(map);
    released("the charge of an unmapped buffer is released")?;
    // The dma-buf is closed, after handle and file.
    let a = take(file.as_fd())?;
    let mut ranges = [abi::p2pmem_range { offset: 0, size: MIB }];
    let mut arg = abi::p2pmem_export {
        handle: a.handle,
        nr_ranges: 1,
        ..Default::default()
    };
    let dma_buf = sys::export(file.as_fd(), &mut arg, Memory::Slice(&mut ranges)).map_err(errno)?;
    free(file.as_fd(), a.handle).map_err(errno)?;
    drop(file);
    ensure!(
        counted(&rule)? == MIB,
        "the charge was released while a dma-buf held the buffer"
    );
    drop(dma_buf);
    released("the charge of a closed dma-buf is released")?;
    // A mapping at offset 0 is unmapped, and a process is killed.
    let file = open()?;
    drop(Mapping::shared(file.as_fd(), 0, 4096).map_err(errno)?);
    released("the charge of a mapping at offset 0 is released")?;
    let part = Part::start("hold", &["65536"])?;
    ensure!(counted(&rule)? == 65536);
    part.kill()?;
    released("the charge of a killed process is released")?;
    // The provider is removed.
    let a = take(file.as_fd())?;
    bed.unpublish("accel0")?;
    ensure!(counted(&rule)? == 0, "a revoked buffer is still charged");
    free(file.as_fd(), a.handle).map_err(errno)?;
    released("the charge of a freed handle is released")?;
    bed.publish("accel0")
}

/// The part of [`kills`] that allocates and frees until it is killed.
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
        // Wait for a line that never comes.
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
        super::inflight::until("the parts allocate", || Ok(counted(&rule)? > MIB))?;
        // Change the rules while the parts allocate.
        let other = AdminRule::new("40-other", &[("quota", if round % 2 == 0 { "16M" } else { "4M" })])?;
        ensure!(
            counted(&rule)? == 0 || counted(&other)? == 0,
            "buffers count under two rules"
        );
        drop(other);
        ensure!(counted(&rule)? <= 24 * MIB);
        for part in parts {
            part.kill()?;
        }
        super::inflight::until("all charges are released", || Ok(rule.get("usage")?.is_empty()))
            .with_context(|| rule.get("usage").unwrap_or_default())?;
    }
    ensure!(bed.settled()? == before);
    Ok(())
}

fn reserve(bed: &mut Bed) -> Result<()> {
    let row = bed.provider("accel0")?;
    let lab = LAB.to_string();
    let reserved = row.size - 8 * MIB;
    let rule = AdminRule::new(
        "10-lab",
        &[
            ("provider", &bed.device("accel0")?.bdf),
            ("gid", &lab),
            ("reserve", &reserved.to_string()),
            ("reserve_for", "group"),
        ],
    )?;
    let file = open()?;
    let fd = file.as_fd();
    let alloc_in_provider = |uid: u32, groups: &[u32], size: u64| {
        let work = || {
            let mut a = request(size);
            a.req.provider = row.id;
            sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map(|()| a)
        };
        sys::as_user(uid, uid, groups, work).map_err(errno)
    };
    expect(
        "ALLOC that needs the reserve",
        alloc_in_provider(BOB, &[], 9 * MIB)?,
        libc::ENOSPC,
    )?;
    ensure!(verdict_on(fd, row.id)? == (abi::P2PMEM_VERDICT_RESERVED, "10-lab".into(), abi::P2PMEM_RULES_ADMIN));
    ensure!(explain_last(fd)?.2.contains("rule 10-lab reserves"));
    let rest = alloc_in_provider(BOB, &[], 8 * MIB)?.map_err(errno)?;
    expect(
        "ALLOC of one more page",
        alloc_in_provider(BOB, &[], 4096)?,
        libc::ENOSPC,
    )?;
    // The group can allocate from its reserve, which shrinks by that.
    let first = alloc_in_provider(ALICE, &[LAB], 16 * MIB)?.map_err(errno)?;
    ensure!(
        rule.get("usage")? == format!("provider {} {}", row.id, 16 * MIB),
        "{}",
        rule.get("usage")?
    );
    expect(
        "ALLOC of reserved memory",
        alloc_in_provider(BOB, &[], 4096)?,
        libc::ENOSPC,
    )?;
    free(fd, rest.handle).map_err(errno)?;
    super::inflight::until("the freed buffer is cleared", || {
        Ok(alloc_in_provider(BOB, &[], 4 * MIB)?.is_ok())
    })?;
    free(fd, first.handle).map_err(errno)?;
    // Without the rule there is no reserve.
    drop(rule);
    alloc_in_provider(BOB, &[], 32 * MIB)?.map_err(errno)?;
    Ok(())
}

fn reserve_kernel(bed: &mut Bed) -> Result<()> {
    // While the rule is in force, publishing an own provider keeps the reserve in the kernel's pool.
    bed.unpublish("accel0")?;
    let rule = AdminRule::new("10-kernel", &[("reserve", "32M"), ("reserve_for", "kernel")])?;
    bed.publish("accel0")?;
    let row = bed.provider("accel0")?;
    ensure!(row.kernel_reserve == 32 * MIB, "{row:?}");
    // For memory of an adopted provider the reserve applies at once.
    let drive = bed.provider("nvme1")?;
    let file = open()?;
    let mut a = request(MIB);
    a.req.provider = drive.id;
    let taken = sys::alloc(file.as_fd(), &mut a, Memory::Slice(&mut []));
    expect("ALLOC of the kernel's reserve", taken, libc::ENOSPC)?;
    ensure!(verdict_on(file.as_fd(), drive.id)?.1 == "10-kernel");
    drop(rule);
    sys::alloc(file.as_fd(), &mut a, Memory::Slice(&mut [])).map_err(errno)?;
    drop(file);
    bed.unpublish("accel0")
}
