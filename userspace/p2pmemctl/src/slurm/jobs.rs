// SPDX-License-Identifier: MIT OR Apache-2.0

//! The jobs of this node that have memory: one file for each, in a folder that the next boot empties, as it removes all rules. A
//! lock orders the prologs and epilogs that run at once.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Context as _};
use rustix::fs::{flock, FlockOperation};
use serde::{Deserialize, Serialize};

/// The folder, below the root of the machine.
pub(super) const FOLDER: &str = "run/p2pmem/slurm";
/// Name of the file that is locked.
const LOCK: &str = "lock";
/// The longest wait for other prologs and epilogs, which hold the lock while they write a rule.
const PATIENCE: Duration = Duration::from_secs(30);
/// The interval at which the lock is tried.
const RETRY: Duration = Duration::from_millis(10);

/// A job that has memory on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Job {
    /// Id of the job.
    pub(super) id: u32,
    /// The job's user.
    pub(super) uid: u32,
    /// Bytes that Slurm allocated to the job on this node.
    pub(super) bytes: u64,
}

/// The jobs, which no other process changes while this value exists.
pub(super) struct Jobs {
    folder: PathBuf,
    _lock: File,
}

impl Jobs {
    /// Locks the jobs in a folder, and makes the folder if it is missing.
    pub(super) fn lock(folder: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join(LOCK);
        let lock = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(RETRY),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let why = format!(
                        "cannot lock {} within {} s: another p2pmemctl slurm holds it",
                        path.display(),
                        PATIENCE.as_secs()
                    );
                    return Err(error).context(why);
                }
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            _lock: lock,
        })
    }

    fn path(&self, id: u32) -> PathBuf {
        self.folder.join(id.to_string())
    }

    /// Returns a job, or `None` if this node does not know it.
    pub(super) fn get(&self, id: u32) -> anyhow::Result<Option<Job>> {
        let path = self.path(id);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| path.display().to_string())?,
        };
        match serde_json::from_slice::<Job>(&text) {
            Ok(job) if job.id == id => Ok(Some(job)),
            _ => bail!(
                "{} does not describe job {id}: remove the file, and set the quota of its user's rule by hand",
                path.display()
            ),
        }
    }

    /// Returns all jobs, in no order.
    pub(super) fn all(&self) -> anyhow::Result<Vec<Job>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder).with_context(|| self.folder.display().to_string())? {
            let name = entry.with_context(|| self.folder.display().to_string())?.file_name();
            if let Some(id) = name.to_str().and_then(|name| name.parse().ok()) {
                all.extend(self.get(id)?);
            }
        }
        Ok(all)
    }

    /// Adds a job, or replaces it.
    pub(super) fn put(&self, job: &Job) -> anyhow::Result<()> {
        let (new, path) = (self.folder.join("new"), self.path(job.id));
        let text = serde_json::to_vec(job)?;
        // Renamed, so that the file is complete if this process is killed.
        fs::write(&new, text).with_context(|| format!("cannot write {}", new.display()))?;
        fs::rename(&new, &path).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Removes a job. Returns whether this node knew it.
    pub(super) fn remove(&self, id: u32) -> anyhow::Result<bool> {
        let path = self.path(id);
        match fs::remove_file(&path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
        }
    }
}
