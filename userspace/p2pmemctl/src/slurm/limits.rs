// SPDX-License-Identifier: MIT OR Apache-2.0

//! The rules that hold jobs to what Slurm allocated to them: one for each user who has jobs on this node, with the sum of the
//! jobs as the quota.
//!
//! A user's rule has these states: no rule, while the user has no jobs; a quota of the sum, while jobs run; a quota of 0, while
//! the last job has ended and some of its memory is not free yet. After each step, the state is one that the next prolog or epilog of
//! the user corrects, so a step that was interrupted or failed can be repeated.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use p2pmem::rules::{Action, Rule, RuleState, Rules, Usage};
use p2pmem::Error;

use super::jobs::{Job, Jobs};

/// The beginning of the names of the rules. The user's number follows.
const PREFIX: &str = "50-slurm-";
/// The interval at which the memory of an ended job is checked.
const RETRY: Duration = Duration::from_millis(20);

/// Returns whether a name is that of a rule of this module.
pub(crate) fn is_rule(name: &str) -> bool {
    let digits = |uid: &str| !uid.is_empty() && uid.bytes().all(|c| c.is_ascii_digit());
    name.strip_prefix(PREFIX).is_some_and(digits)
}

/// Returns the name of a user's rule.
pub(super) fn name(uid: u32) -> String {
    format!("{PREFIX}{uid}")
}

/// The limits of this node.
pub(super) struct Limits<'a> {
    pub(super) rules: &'a Rules,
    /// Folder of the jobs.
    pub(super) folder: PathBuf,
}

/// What remains of a user when a job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Remainder {
    /// Whether this node knew the job.
    pub(super) known: bool,
    /// Bytes that the user's other jobs have.
    pub(super) quota: u64,
    /// Bytes that the user holds.
    pub(super) held: u64,
}

impl Limits<'_> {
    /// Adds a job, or changes its bytes, and sets the quota of its user. Returns the quota. After an error, the job is as
    /// before.
    pub(super) fn start(&self, job: &Job) -> anyhow::Result<u64> {
        let jobs = Jobs::lock(&self.folder)?;
        let before = jobs.get(job.id)?;
        jobs.put(job)?;
        let set = quota_of(&jobs, job.uid).and_then(|quota| Ok(self.set(job.uid, quota)?));
        match set {
            Ok(state) => {
                // A cluster whose state was lost begins again with the first id.
                if let Some(other) = before.filter(|before| before.uid != job.uid) {
                    self.settle(&jobs, other.uid)?;
                }
                Ok(state.rule.quota.unwrap_or(0))
            }
            Err(error) => {
                // An error while undoing is ignored: the caller gets the first error.
                let _ = match &before {
                    Some(before) => jobs.put(before),
                    None => jobs.remove(job.id).map(drop),
                };
                Err(error)
            }
        }
    }

    /// Removes a job. Lowers the quota of its user at once. If the user has no other job, waits until the user holds nothing,
    /// and removes the rule; after `patience`, the rule stays, with a quota of 0. A job that this node does not know has the same
    /// effect.
    pub(super) fn end(&self, id: u32, uid: u32, patience: Duration) -> anyhow::Result<Remainder> {
        let deadline = Instant::now() + patience;
        let mut known = false;
        loop {
            let jobs = Jobs::lock(&self.folder)?;
            if let Some(job) = jobs.get(id)? {
                known |= jobs.remove(id)?;
                if job.uid != uid {
                    self.settle(&jobs, job.uid)?;
                }
            }
            let (quota, held) = self.settle(&jobs, uid)?;
            drop(jobs);
            if quota > 0 || held == 0 || Instant::now() >= deadline {
                return Ok(Remainder { known, quota, held });
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Makes the rule of a user fit the user's jobs. Returns the quota, and the bytes that the user holds.
    fn settle(&self, jobs: &Jobs, uid: u32) -> anyhow::Result<(u64, u64)> {
        let quota = quota_of(jobs, uid)?;
        let held = match self.rules.get(&name(uid)) {
            Err(Error::Missing(_)) if quota == 0 => return Ok((0, 0)),
            // The bytes are read when the user can get no more.
            _ => held(&self.set(uid, quota)?, uid),
        };
        if quota == 0 && held == 0 {
            self.rules.remove(&name(uid))?;
        }
        Ok((quota, held))
    }

    /// Puts the rule of a user into force.
    fn set(&self, uid: u32, quota: u64) -> p2pmem::Result<RuleState> {
        let rule = Rule {
            uid: Some(uid.into()),
            action: Some(Action::Allow),
            quota: Some(quota),
            ..Rule::new(name(uid))
        };
        match self.rules.get(&rule.name) {
            Ok(state) if state.rule == rule => Ok(state),
            Ok(state) if is_changed_in_quota_alone(&state.rule, &rule) => self.rules.set_quota(&rule.name, rule.quota),
            // Missing, or changed by hand.
            Ok(_) | Err(Error::Missing(_)) => {
                self.rules.load(std::slice::from_ref(&rule))?;
                self.rules.get(&rule.name)
            }
            Err(error) => Err(error),
        }
    }
}

fn is_changed_in_quota_alone(from: &Rule, to: &Rule) -> bool {
    let changed = Rule {
        quota: to.quota,
        ..from.clone()
    };
    changed == *to
}

/// Returns the sum of a user's jobs.
fn quota_of(jobs: &Jobs, uid: u32) -> anyhow::Result<u64> {
    let all = jobs.all()?;
    let mut own = all.iter().filter(|job| job.uid == uid);
    own.try_fold(0_u64, |sum, job| sum.checked_add(job.bytes))
        .with_context(|| format!("the jobs of uid {uid} have more than 2^64 bytes"))
}

fn held(state: &RuleState, uid: u32) -> u64 {
    let of_user = |usage: &Usage| match usage {
        Usage::User { uid: user, bytes } if *user == uid => *bytes,
        _ => 0,
    };
    state.usage.iter().map(of_user).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem::fake::configfs_rules;
    use std::fs;

    const ALICE: u32 = 4001;
    const BOB: u32 = 4_294_967_294;

    struct Node {
        root: tempfile::TempDir,
        rules: Rules,
    }

    impl Node {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let rules = configfs_rules(&root.path().join("config")).unwrap();
            Self { root, rules }
        }

        fn limits(&self) -> Limits<'_> {
            Limits {
                rules: &self.rules,
                folder: self.root.path().join("run"),
            }
        }

        fn start(&self, id: u32, uid: u32, bytes: u64) -> u64 {
            self.limits().start(&Job { id, uid, bytes }).unwrap()
        }

        fn end(&self, id: u32, uid: u32) -> Remainder {
            self.limits().end(id, uid, Duration::ZERO).unwrap()
        }

        /// Makes a user hold bytes.
        fn hold(&self, uid: u32, bytes: u64) {
            let usage = self
                .root
                .path()
                .join("config/p2pmem/rules")
                .join(name(uid))
                .join("usage");
            fs::write(usage, format!("uid {uid} {bytes}\n")).unwrap();
        }

        fn quotas(&self) -> Vec<(String, Option<u64>)> {
            let all = self.rules.list().unwrap();
            assert!(
                all.iter().all(|state| state.rule.action == Some(Action::Allow)),
                "{all:?}"
            );
            all.into_iter()
                .map(|state| (state.rule.name, state.rule.quota))
                .collect()
        }
    }

    fn quota(uid: u32, bytes: u64) -> (String, Option<u64>) {
        (name(uid), Some(bytes))
    }

    #[test]
    fn jobs_of_users_are_apart_and_those_of_one_user_add_up() {
        let node = Node::new();
        assert_eq!(node.start(1, ALICE, 64), 64);
        assert_eq!(node.start(2, BOB, 32), 32);
        assert_eq!(node.start(3, ALICE, 100), 164);
        assert_eq!(node.quotas(), [quota(ALICE, 164), quota(BOB, 32)]);
        let rest = node.end(1, ALICE);
        assert_eq!((rest.known, rest.quota, rest.held), (true, 100, 0));
        assert_eq!(node.quotas(), [quota(ALICE, 100), quota(BOB, 32)]);
        assert_eq!(node.end(2, BOB).quota, 0);
        assert_eq!(node.end(3, ALICE).quota, 0);
        assert_eq!(node.quotas(), []);
    }

    #[test]
    fn prolog_and_epilog_can_run_twice() {
        let node = Node::new();
        assert_eq!(node.start(7, ALICE, 64), 64);
        assert_eq!(node.start(7, ALICE, 64), 64);
        // Requeued with another size.
        assert_eq!(node.start(7, ALICE, 16), 16);
        assert_eq!(node.quotas(), [quota(ALICE, 16)]);
        assert!(node.end(7, ALICE).known);
        assert!(!node.end(7, ALICE).known);
        assert_eq!(node.quotas(), []);
    }

    #[test]
    fn epilog_without_prolog_changes_no_other_job() {
        let node = Node::new();
        node.start(1, ALICE, 64);
        let rest = node.end(2, ALICE);
        assert_eq!((rest.known, rest.quota), (false, 64));
        assert!(!node.end(3, BOB).known);
        assert_eq!(node.quotas(), [quota(ALICE, 64)]);
    }

    #[test]
    fn memory_that_remains_is_reported_and_its_rule_stays() {
        let node = Node::new();
        node.start(1, ALICE, 64);
        node.hold(ALICE, 48);
        let rest = node.end(1, ALICE);
        assert_eq!((rest.known, rest.quota, rest.held), (true, 0, 48));
        assert_eq!(node.quotas(), [quota(ALICE, 0)]);
        // The memory is free later, and the epilog runs again.
        node.hold(ALICE, 0);
        assert_eq!(node.end(1, ALICE).held, 0);
        assert_eq!(node.quotas(), []);
        // The next job of the user starts before.
        node.start(2, ALICE, 64);
        node.hold(ALICE, 48);
        node.end(2, ALICE);
        assert_eq!(node.start(3, ALICE, 32), 32);
        assert_eq!(node.end(3, ALICE).held, 48);
    }

    #[test]
    fn epilog_waits_for_memory() {
        let node = Node::new();
        node.start(1, ALICE, 64);
        node.hold(ALICE, 48);
        let limits = node.limits();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The quota is lowered before the wait.
                while node.quotas() != [quota(ALICE, 0)] {
                    std::thread::yield_now();
                }
                node.hold(ALICE, 0);
            });
            let rest = limits.end(1, ALICE, Duration::from_secs(60)).unwrap();
            assert_eq!((rest.known, rest.held), (true, 0));
        });
        assert_eq!(node.quotas(), []);
    }

    #[test]
    fn rule_that_was_changed_by_hand_is_written_again() {
        let node = Node::new();
        node.start(1, ALICE, 64);
        let off = Rule {
            enabled: false,
            quota: Some(1),
            ..Rule::new(name(ALICE))
        };
        node.rules.replace(&off).unwrap();
        assert_eq!(node.start(2, ALICE, 64), 128);
        assert!(node.rules.get(&name(ALICE)).unwrap().rule.enabled);
        // Removed by hand.
        node.rules.remove(&name(ALICE)).unwrap();
        assert_eq!(node.end(1, ALICE).quota, 64);
        assert_eq!(node.quotas(), [quota(ALICE, 64)]);
    }

    #[test]
    fn id_of_another_users_job_is_used_again() {
        let node = Node::new();
        node.start(1, ALICE, 64);
        assert_eq!(node.start(1, BOB, 32), 32);
        assert_eq!(node.quotas(), [quota(BOB, 32)]);
        assert!(node.end(1, ALICE).known);
        assert_eq!(node.quotas(), []);
    }

    #[test]
    fn failures_do_not_change_the_jobs() {
        let node = Node::new();
        node.start(1, ALICE, 64);
        // As without the module.
        fs::rename(node.root.path().join("config"), node.root.path().join("away")).unwrap();
        let job = Job {
            id: 2,
            uid: BOB,
            bytes: 1,
        };
        let error = node.limits().start(&job).unwrap_err();
        assert!(format!("{error:#}").contains("p2pmem/rules"), "{error:#}");
        assert!(node
            .limits()
            .start(&Job {
                id: 1,
                uid: ALICE,
                bytes: 8
            })
            .is_err());
        let jobs = Jobs::lock(&node.limits().folder).unwrap();
        assert_eq!(
            jobs.all().unwrap(),
            [Job {
                id: 1,
                uid: ALICE,
                bytes: 64
            }]
        );
        drop(jobs);
        fs::rename(node.root.path().join("away"), node.root.path().join("config")).unwrap();
        // Too many bytes.
        let job = Job {
            id: 2,
            uid: ALICE,
            bytes: u64::MAX,
        };
        assert!(node.limits().start(&job).is_err());
        assert_eq!(node.quotas(), [quota(ALICE, 64)]);
        // A file that is no job.
        fs::write(node.limits().folder.join("9"), "{}").unwrap();
        let error = node.limits().start(&job).unwrap_err().to_string();
        assert!(error.contains("does not describe job 9: remove the file"), "{error}");
    }

    #[test]
    fn names_of_rules() {
        assert!(is_rule("50-slurm-0") && is_rule(&name(u32::MAX)));
        assert!(Rule::check_name(&name(u32::MAX)).is_ok());
        for other in ["50-slurm-", "50-slurm-x", "10-slurm-1", "50-slurm-1.new"] {
            assert!(!is_rule(other), "{other}");
        }
    }
}
