// SPDX-License-Identifier: MIT OR Apache-2.0

//! Effects of an unprivileged program on others: on the administrator's rules, on the machine's memory, and on the
//! duration of calls.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use super::dmabuf::{export, exported_buffer};
use super::inflight::until;
use super::life::{Part, ready};
use super::rules::{ALICE, AdminRule};
use super::share::import;
use super::{Bed, Case, alloc, errno, expect, free, may_open, open, read, request, write};
use crate::in_time;
use crate::limits::amount;
use crate::sys::{self, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "hostile-buffers",
        about: "33,000 buffers (a fourth on the debug kernel) do not prevent changes of rules, nor long delay others",
        topology: "nic",
        ruins: false,
        run: many_buffers,
    },
    Case {
        name: "hostile-handles",
        about: "objects that a user's program creates are charged to its cgroup, and a file has at most 65536 handles",
        topology: "small",
        ruins: false,
        run: many_handles,
    },
    Case {
        name: "open-close",
        about: "closing a file that was never polled does not wait for RCU",
        topology: "small",
        ruins: false,
        run: open_close,
    },
];

/// The name of the part of these tests that runs in its own process. Arguments: a kind of [`KINDS`], and a number.
pub(super) const PART: &str = "make-many";

/// The maximum number of handles of a file.
const MAX_HANDLES: u32 = 1 << 16;
/// The memory limit of the tests' cgroups: little more than the programs and their kernel memory need.
const MEMORY_MAX: &str = "128M";
/// Number of other rules in force. With a test's own few rules, they are nearly the maximum of 256 rules.
const OTHER_RULES: u32 = 250;

/// Allocates one page; the error is the errno.
fn page(fd: BorrowedFd<'_>) -> Result<(), i32> {
    let mut ask = request(4096);
    sys::alloc(fd, &mut ask, Memory::Slice(&mut []))
}

/// Creates a rule with a quota for another user than those of these tests.
fn other_rule(number: u32) -> Result<AdminRule> {
    let uid = (60_000 + number).to_string();
    AdminRule::new(
        &format!("{:02}-other{number}", 60 + number % 40),
        &[("uid", &uid), ("quota", "1G")],
    )
}

fn many_buffers(bed: &mut Bed) -> Result<()> {
    /// One buffer more than fit into the kernel's largest allocation, when each buffer took 128 bytes of such an
    /// allocation. Fewer on slow kernels.
    const MANY: u32 = 33_000;
    /// The longest wait of an allocation for a change of the rules, as a fraction of the time in which the buffers were
    /// made.
    const MAX_WAIT_FRACTION: f64 = 0.5;
    bed.settled()?;
    let others = (0..OTHER_RULES).map(other_rule).collect::<Result<Vec<_>>>()?;
    let many = amount(MANY);
    let group = Group::new("p2pmem-test")?;
    group.set("memory.max", MEMORY_MAX)?;
    let part = Part::start(PART, &["buffers", &many.to_string()])?;
    group.set("cgroup.procs", &part.id().to_string())?;
    let began = Instant::now();
    let mut part = part.go_on()?;
    part.await_ready()?;
    let made = began.elapsed();
    let uid = ALICE.to_string();
    let denial = AdminRule::make("10-deny")?;
    denial.set("uid", &uid)?;
    denial.set("action", "deny")?;
    // Another user, whose allocations wait for each change of the rules.
    let stop = AtomicBool::new(false);
    let longest = thread::scope(|scope| -> Result<Duration> {
        let bystander = scope.spawn(|| -> Result<Duration> {
            let file = open()?;
            let mut longest = Duration::ZERO;
            while !stop.load(Ordering::Relaxed) {
                let began = Instant::now();
                let got = alloc(file.as_fd(), 4096).map_err(errno)?;
                longest = longest.max(began.elapsed());
                free(file.as_fd(), got.handle).map_err(errno)?;
            }
            Ok(longest)
        });
        let changed = (|| {
            for _ in 0..3 {
                denial.set("enable", "1")?;
                denial.set("enable", "0")?;
            }
            denial.set("enable", "1")
        })();
        stop.store(true, Ordering::Relaxed);
        let longest = bystander.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        changed?;
        longest
    })?;
    let fraction = longest.as_secs_f64() / made.as_secs_f64();
    println!(
        "{many} buffers were made in {made:?}; with {} rules another user waited at most {longest:?}, a fraction of {fraction:.3}",
        others.len() + 1
    );
    // The rule takes effect, no matter how many buffers exist, and can be disabled.
    let file = open()?;
    let page = || sys::as_user(ALICE, ALICE, &[], || alloc(file.as_fd(), 4096).map(|got| got.handle)).map_err(errno);
    expect("ALLOC with a rule that denies", page()?.map(|_| ()), libc::EACCES)?;
    denial.set("enable", "0")?;
    let one = page()?.map_err(errno).context("ALLOC after the rule was disabled")?;
    // Two buffers more: the part exports one for imports, and this process allocated one above.
    let quota = AdminRule::new("50-each", &[("uid", &uid), ("quota", "1M")])?;
    let used = quota.get("usage")?;
    ensure!(
        used.contains(&format!("uid {ALICE} {}", u64::from(many + 2) * 4096)),
        "the rule's usage does not count the buffers that existed before the rule: {used:?}"
    );
    expect("ALLOC over the quota", page()?.map(|_| ()), libc::EDQUOT)?;
    drop(quota);
    let two = page()?
        .map_err(errno)
        .context("ALLOC after the rule with the quota was removed")?;
    for handle in [one, two] {
        free(file.as_fd(), handle).map_err(errno)?;
    }
    part.finish()?;
    in_time!(
        fraction < MAX_WAIT_FRACTION,
        "an allocation waited for a change of the rules: {fraction:.2} of the time in which the buffers were made"
    );
    Ok(())
}

/// The objects that an unprivileged program can create: kind, number, and a lower limit of the kernel memory of one
/// object, in bytes. The limit is more than zero and less than the size today.
const KINDS: [(&str, u32, u64); 5] = [
    ("imports", MAX_HANDLES, 128),
    ("buffers", 4_000, 512),
    ("dma-bufs", 4_000, 512),
    ("files", 1_000, 1024),
    ("rules", 500, 32 * 64),
];

/// Runs in its own cgroup: creates many objects of a kind, and keeps them until the test ends the process. Runs as an
/// unprivileged user, except for files and rules, because only root can open the device here.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let argument = |at: usize| arguments.get(at).context("an argument is missing");
    let (kind, many) = (argument(0)?.as_str(), argument(1)?.parse::<u32>()?);
    may_open(2 * MAX_HANDLES)?;
    // Opened as root: only root and the group `p2pmem` can open the device.
    let (owner, other) = (open()?, open()?);
    let privileged = matches!(kind, "files" | "rules");
    ready()?;
    if !privileged {
        let (uid, gid) = (Uid::from_raw(ALICE), Gid::from_raw(ALICE));
        set_thread_groups(&[])?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
    }
    let (first, dma_buf) = exported_buffer(owner.as_fd(), 4096, 0)?;
    let (mut files, mut dma_bufs) = (Vec::new(), Vec::new());
    for made in 0..many {
        let done = match kind {
            "imports" => import(other.as_fd(), dma_buf.as_raw_fd()).map(|_| ()),
            "buffers" => page(other.as_fd()),
            "dma-bufs" => export(owner.as_fd(), first.handle, 0, &[(0, 4096)]).map(|made| dma_bufs.push(made)),
            _ => {
                files.push(open()?);
                match files.last() {
                    Some(file) if kind == "rules" => own_rules(file.as_fd()),
                    _ => Ok(()),
                }
            }
        };
        done.map_err(errno).with_context(|| format!("after {made} {kind}"))?;
    }
    if kind == "imports" {
        if many == MAX_HANDLES {
            expect(
                "IMPORT with the maximum number of handles",
                import(other.as_fd(), dma_buf.as_raw_fd()).map(|_| ()),
                libc::EMFILE,
            )?;
            let (explain, _, text) = super::explain_last(other.as_fd())?;
            ensure!(
                explain.error == libc::EMFILE as u32 && text.contains("handles"),
                "{text:?}"
            );
        }
        // Other files of the process still work.
        alloc(owner.as_fd(), 4096).map_err(errno)?;
        free(owner.as_fd(), first.handle).map_err(errno)?;
    }
    ready()
}

/// Gives a file the maximum number of file rules.
fn own_rules(fd: BorrowedFd<'_>) -> Result<(), i32> {
    let mut rules = [abi::p2pmem_rule::default(); abi::P2PMEM_MAX_RULES as usize];
    for (number, rule) in rules.iter_mut().enumerate() {
        for (to, from) in rule.name.iter_mut().zip(format!("rule{number}").bytes()) {
            *to = from as _;
        }
        rule.action = abi::P2PMEM_RULE_ALLOW;
    }
    let mut ask = abi::p2pmem_rules {
        count: abi::P2PMEM_MAX_RULES,
        ..Default::default()
    };
    sys::rules(fd, &mut ask, Memory::Slice(&mut rules))
}

fn many_handles(bed: &mut Bed) -> Result<()> {
    bed.settled()?;
    for (kind, most, least) in KINDS {
        let group = Group::new("p2pmem-test")?;
        group.set("memory.max", MEMORY_MAX)?;
        let many = amount(most);
        let part = Part::start(PART, &[kind, &many.to_string()])?;
        group.set("cgroup.procs", &part.id().to_string())?;
        let before = group.kernel()?;
        let mut part = part.go_on()?;
        part.await_ready().with_context(|| kind.to_string())?;
        let mut charged = 0;
        // The kernel updates the counter with a delay.
        let what = format!("{many} {kind} are charged");
        until(&what, || {
            charged = group.kernel()?.saturating_sub(before);
            Ok(charged >= u64::from(many) * least)
        })
        .with_context(|| format!("{many} {kind}: {charged} bytes charged"))?;
        println!("{many} {kind}: {} bytes charged for each", charged / u64::from(many));
        part.finish()?;
    }
    Ok(())
}

/// A cgroup with the memory controller. Removed on drop.
pub(super) struct Group(PathBuf);

impl Group {
    pub(super) fn new(name: &str) -> Result<Group> {
        let root = Path::new("/sys/fs/cgroup");
        if !root.join("cgroup.controllers").exists() {
            fs::create_dir_all(root)?;
            super::command("mount", &["-t", "cgroup2", "none", "/sys/fs/cgroup"])?;
        }
        write(&root.join("cgroup.subtree_control"), "+memory")?;
        let dir = root.join(name);
        fs::create_dir_all(&dir)?;
        Ok(Group(dir))
    }

    pub(super) fn set(&self, attribute: &str, value: &str) -> Result<()> {
        write(&self.0.join(attribute), value)
    }

    pub(super) fn get(&self, attribute: &str) -> Result<String> {
        read(&self.0.join(attribute))
    }

    /// Returns the kernel memory that is charged to the cgroup, in bytes.
    fn kernel(&self) -> Result<u64> {
        let stat = self.get("memory.stat")?;
        let line = stat.lines().find_map(|line| line.strip_prefix("kernel "));
        Ok(line.context("memory.stat has no line `kernel`")?.parse()?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

fn open_close(_: &mut Bed) -> Result<()> {
    const TIMES: u32 = 100;
    let time = |path: &str| -> Result<f64> {
        let began = Instant::now();
        for _ in 0..TIMES {
            drop(File::open(path)?);
        }
        Ok(began.elapsed().as_secs_f64())
    };
    // The first run loads what later runs find loaded.
    time("/dev/null")?;
    // The best of five rounds, so that other load on the machine does not decide.
    let best = |path: &str| -> Result<f64> {
        let rounds = (0..5).map(|_| time(path)).collect::<Result<Vec<_>>>()?;
        Ok(rounds.into_iter().fold(f64::INFINITY, f64::min))
    };
    let (null, ours) = (best("/dev/null")?, best(super::NODE)?);
    println!(
        "{TIMES} times: /dev/null {:.2} ms, {} {:.2} ms",
        null * 1e3,
        super::NODE,
        ours * 1e3
    );
    // An RCU grace period takes some milliseconds on every machine, so 1 ms per call means no waiting.
    in_time!(
        ours < null * 50.0 || ours < f64::from(TIMES) * 1e-3,
        "opening and closing the device takes {:.1} times as long as /dev/null",
        ours / null
    );
    // A polled file is registered for events.
    let file = open()?;
    let mut polled = [rustix::event::PollFd::new(&file, rustix::event::PollFlags::IN)];
    ensure!(rustix::event::poll(&mut polled, Some(&rustix::event::Timespec::default()))? == 0);
    let events = sys::read_events(file.as_fd(), size_of::<abi::p2pmem_event>() - 1);
    expect("read with a buffer shorter than an event", events, libc::EINVAL)
}
