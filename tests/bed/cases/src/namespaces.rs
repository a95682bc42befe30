// SPDX-License-Identifier: MIT OR Apache-2.0

//! User namespaces: for rules, a user with subordinate ids is several users unless a rule names all of the ids, and root in a
//! namespace is no administrator.

use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::life::{Part, ready};
use super::rules::{ALICE, AdminRule, MIB};
use super::{Bed, Case, alloc, errno, expect, open, write};
use crate::sys::{self, Memory};

pub(super) const CASES: &[Case] = &[Case {
    name: "user-namespace",
    about: "a rule that names a user's subordinate ids denies and counts these ids together with the user's own, and root in a namespace has no more rights than that user",
    topology: "small",
    ruins: false,
    run: user_namespace,
}];

pub(super) const PART: &str = "in-namespace";

/// The user's ids in the namespace besides the user's own.
const SUBORDINATE: u32 = 100_000;
const SUBORDINATES: u32 = 10;

/// Runs in its own user namespace, whose ids 0 and 1 are ALICE and her first subordinate id. Makes one allocation for each
/// triple of arguments: the id, the size, and the expected errno (or 0).
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let file = open()?;
    let fd = file.as_fd();
    let (uid, gid) = (Uid::from_raw(ALICE), Gid::from_raw(ALICE));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    sys::enter_user_namespace().map_err(errno)?;
    ready()?;
    for one in arguments {
        let numbers: Vec<u32> = one.split(':').map(str::parse).collect::<Result<_, _>>()?;
        let &[uid, size, wanted] = &numbers[..] else {
            bail!("{one:?} is no allocation");
        };
        let answer = sys::as_user(uid, uid, &[], || alloc(fd, size.into())).map_err(errno)?;
        let code = answer.err().unwrap_or(0);
        ensure!(code == wanted as i32, "{size} bytes for uid {uid}: {}", errno(code));
    }
    // Root of the namespace, with all capabilities in it.
    let mut ask = abi::p2pmem_paths {
        nr_clients: 1,
        flags: abi::P2PMEM_PATHS_RESCAN,
        ..Default::default()
    };
    let refused = sys::as_user(0, 0, &[], || {
        let mut clients = [abi::p2pmem_pci_addr::default()];
        sys::paths(fd, &mut ask, Memory::Slice(&mut clients), Memory::Slice(&mut []))
    });
    expect(
        "PATHS_RESCAN of a namespace's root",
        refused.map_err(errno)?,
        libc::EPERM,
    )?;
    // The buffers stay until the other process has checked them.
    ready()
}

/// Runs the process; calls `look` while its buffers exist.
fn in_namespace(allocations: &[(u32, u64, i32)], look: impl FnOnce() -> Result<()>) -> Result<()> {
    let arguments: Vec<String> = allocations
        .iter()
        .map(|(uid, size, errno)| format!("{uid}:{size}:{errno}"))
        .collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let part = Part::start(PART, &arguments)?;
    let map = format!("0 {ALICE} 1\n1 {SUBORDINATE} {SUBORDINATES}\n");
    for file in ["uid_map", "gid_map"] {
        let path = format!("/proc/{}/{file}", part.id());
        write(Path::new(&path), &map).context(path)?;
    }
    let mut part = part.go_on()?;
    part.await_ready()?;
    look()?;
    part.finish()
}

fn user_namespace(_: &mut Bed) -> Result<()> {
    let all = format!("{ALICE},{SUBORDINATE}-{}", SUBORDINATE + SUBORDINATES - 1);
    let denied = AdminRule::new("10-not-alice", &[("uid", &ALICE.to_string()), ("action", "deny")])?;
    let nothing = || Ok(());
    in_namespace(&[(0, 4096, libc::EACCES), (1, 4096, 0)], nothing).context("her own id denied")?;
    denied.set("uid", &all)?;
    ensure!(denied.get("uid")? == all, "uid is {}", denied.get("uid")?);
    let neither = [
        (0, 4096, libc::EACCES),
        (1, 4096, libc::EACCES),
        (2, 4096, libc::EACCES),
    ];
    in_namespace(&neither, nothing).context("all her ids denied")?;
    drop(denied);

    let together = AdminRule::new("10-alice", &[("uid", &all), ("group_quota", "2M")])?;
    let shared = [
        (0, MIB, 0),
        (1, MIB, 0),
        (1, 4096, libc::EDQUOT),
        (0, 4096, libc::EDQUOT),
        (2, 4096, libc::EDQUOT),
    ];
    in_namespace(&shared, || {
        let usage = together.get("usage")?;
        ensure!(usage == format!("group {}", 2 * MIB), "{usage}");
        Ok(())
    })
    .context("one quota for all her ids")?;
    ensure!(together.get("usage")?.is_empty(), "{}", together.get("usage")?);
    Ok(())
}
