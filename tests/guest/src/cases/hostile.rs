// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a program without privileges can do to others: to the administrator's rules, to the machine's memory, to the time that
//! calls take.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::dmabuf::exported_buffer;
use super::life::{Part, ready};
use super::share::import;
use super::{Bed, Case, alloc, errno, expect, free, open, read, request, write};
use crate::in_time;
use crate::patience::amount;
use crate::sys::{self, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "hostile-buffers",
        about: "33,000 buffers of one program do not keep rules from being put into force and ended",
        topology: "nic",
        ruins: false,
        run: many_buffers,
    },
    Case {
        name: "hostile-handles",
        about: "a program that imports one buffer again and again is stopped, and its handles are charged to its cgroup",
        topology: "small",
        ruins: false,
        run: many_handles,
    },
    Case {
        name: "open-close",
        about: "a file that nobody polls is closed without waiting for RCU",
        topology: "small",
        ruins: false,
        run: open_close,
    },
];

/// The part of these tests that is a process of its own.
pub(super) const PART: &str = "import-until-refused";

const RULES: &str = "/sys/kernel/config/p2pmem/rules";
/// Handles that one file has at most.
const MOST: u32 = 1 << 16;

/// A rule's directory, removed at the end.
struct Rule(PathBuf);

impl Rule {
    fn new(name: &str) -> Result<Rule> {
        let dir = Path::new(RULES).join(name);
        fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        Ok(Rule(dir))
    }

    fn set(&self, attribute: &str, value: &str) -> Result<()> {
        write(&self.0.join(attribute), value).with_context(|| read(&self.0.join("status")).unwrap_or_default())
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Allocates one page; the errno of a refusal.
fn page(fd: BorrowedFd<'_>) -> Result<(), i32> {
    let mut ask = request(4096);
    sys::alloc(fd, &mut ask, Memory::Slice(&mut []))
}

fn many_buffers(bed: &mut Bed) -> Result<()> {
    /// One more than fit into the largest allocation of the kernel's, when each took 128 bytes of one.
    const MANY: u32 = 33_000;
    bed.settled()?;
    let file = open()?;
    for _ in 0..MANY {
        page(file.as_fd()).map_err(errno)?;
    }
    let (denial, quota) = (Rule::new("10-deny")?, Rule::new("50-each")?);
    denial.set("action", "deny")?;
    denial.set("enable", "1")?;
    expect("an allocation that a rule denies", page(file.as_fd()), libc::EACCES)?;
    denial.set("enable", "0")?;
    page(file.as_fd()).map_err(errno).context("after the rule ended")?;
    quota.set("quota", "1M")?;
    quota.set("enable", "1")?;
    let used = read(&quota.0.join("usage"))?;
    ensure!(
        used.contains(&format!("uid 0 {}", u64::from(MANY + 1) * 4096)),
        "the rule does not know of the buffers that were there: {used:?}"
    );
    expect("an allocation above the quota", page(file.as_fd()), libc::EDQUOT)?;
    quota.set("enable", "0")?;
    page(file.as_fd()).map_err(errno).context("after the quota ended")
}

/// Imports one buffer as often as one file may, where that is not too long until one more is refused, in its own cgroup.
pub(super) fn part() -> Result<()> {
    ready()?;
    let (owner, other) = (open()?, open()?);
    let (first, dma_buf) = exported_buffer(owner.as_fd(), 4096, 0)?;
    let many = amount(MOST);
    for made in 0..many {
        import(other.as_fd(), dma_buf.as_raw_fd())
            .map_err(errno)
            .with_context(|| format!("after {made} handles"))?;
    }
    if many == MOST {
        expect(
            "one handle more",
            import(other.as_fd(), dma_buf.as_raw_fd()),
            libc::EMFILE,
        )?;
        let (explain, _, text) = super::explain_last(other.as_fd())?;
        ensure!(
            explain.error == libc::EMFILE as u32 && text.contains("handles"),
            "{text:?}"
        );
    }
    // The others of the process are not concerned.
    alloc(owner.as_fd(), 4096).map_err(errno)?;
    free(owner.as_fd(), first.handle).map_err(errno)?;
    ready()
}

fn many_handles(bed: &mut Bed) -> Result<()> {
    bed.settled()?;
    let group = Group::new("p2pmem-test")?;
    let part = Part::start(PART, &[])?;
    group.set("cgroup.procs", &part.id().to_string())?;
    let before = group.kernel()?;
    let mut part = part.go_on()?;
    part.await_ready()?;
    let (many, mut charged) = (amount(MOST), 0);
    // The kernel adds up in a while.
    super::inflight::until("the handles are charged", || {
        charged = group.kernel()?.saturating_sub(before);
        Ok(charged >= u64::from(many) * 128)
    })?;
    println!("{many} handles: {charged} bytes charged");
    part.finish()
}

/// A cgroup of the test's own, with the memory controller.
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

    /// Bytes of the kernel's memory that are charged to it.
    fn kernel(&self) -> Result<u64> {
        let stat = self.get("memory.stat")?;
        let line = stat.lines().find_map(|line| line.strip_prefix("slab "));
        Ok(line.context("memory.stat has no slab")?.parse()?)
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
    // Once for what is loaded at the first time.
    time("/dev/null")?;
    // The best of some rounds: what else the machine does must not decide.
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
    // A grace period takes some milliseconds, however fast the machine is.
    in_time!(
        ours < null * 50.0 || ours < f64::from(TIMES) * 1e-3,
        "opening and closing takes {:.1} times as long as that of /dev/null",
        ours / null
    );
    // And who polls is told.
    let file = open()?;
    let mut polled = [rustix::event::PollFd::new(&file, rustix::event::PollFlags::IN)];
    ensure!(rustix::event::poll(&mut polled, Some(&rustix::event::Timespec::default()))? == 0);
    let events = sys::read_events(file.as_fd(), size_of::<abi::p2pmem_event>() - 1);
    expect("room for no event", events, libc::EINVAL)
}
