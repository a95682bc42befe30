// SPDX-License-Identifier: MIT OR Apache-2.0

//! Processes that end with the runner, however the runner ends.
//!
//! A [`Process`] is killed by its own id when it is dropped. If the runner is killed and drops nothing, the kernel
//! kills its children: each one is started through `setpriv --pdeathsig`. The kernel sends that signal when the
//! *thread* that started the child ends. Therefore one thread that lasts as long as the runner starts all processes.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

/// The interval at which a wait for the end of a process checks for it.
const LOOK: Duration = Duration::from_millis(5);

/// A child process. Dropping it kills and reaps the process.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

/// The standard input of a process.
#[derive(Debug, Default)]
pub struct Stdin(pub Option<Stdio>);

impl Process {
    /// Starts a program. Its standard error goes to `log`, and so does its standard output unless `piped` is set.
    ///
    /// # Errors
    ///
    /// The log cannot be created, or the program cannot be started.
    pub fn start(name: &str, argv: &[String], stdin: Stdin, log: &Path, piped: bool) -> Result<Process> {
        let to = File::create(log).with_context(|| log.display().to_string())?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(argv);
        command.stdin(stdin.0.unwrap_or_else(Stdio::null));
        command.stdout(if piped {
            Stdio::piped()
        } else {
            Stdio::from(to.try_clone()?)
        });
        command.stderr(to);
        let child = spawn(command).with_context(|| format!("cannot start {name} ({})", argv.join(" ")))?;
        Ok(Process {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// Returns the pipe of the standard output, once.
    pub fn take_stdout(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Returns the exit status if the process has ended.
    ///
    /// # Errors
    ///
    /// Those of waiting for a child.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until the process ends, or until a deadline. Returns whether it has ended.
    ///
    /// # Errors
    ///
    /// Those of waiting for a child.
    pub fn wait_until(&mut self, deadline: Instant) -> io::Result<bool> {
        loop {
            if self.ended()?.is_some() {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            thread::sleep(LOOK);
        }
    }

    /// Returns the name, the id, and the last lines of the log, for error messages.
    pub fn describe(&self) -> String {
        let log = self.log();
        // QEMU warns of every feature of the CPU model that the emulated processor does not have.
        let telling = log
            .lines()
            .rev()
            .filter(|line| !line.contains("doesn't support requested feature"));
        let mut tail: Vec<&str> = telling.take(15).collect();
        tail.reverse();
        format!(
            "{} (process {}): {}",
            self.name,
            self.child.id(),
            if tail.is_empty() {
                "no output".into()
            } else {
                tail.join("\n")
            }
        )
    }

    /// Returns the content of the log.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process is not reaped yet, so no other process has its id. An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

type Job = (Command, mpsc::Sender<io::Result<Child>>);

fn spawn(command: Command) -> Result<Child> {
    static SPAWNER: OnceLock<std::sync::Mutex<mpsc::Sender<Job>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (send, jobs) = mpsc::channel::<Job>();
        thread::spawn(move || {
            for (mut command, done) in jobs {
                // The receiver waits for this answer; it is gone only if its thread panicked.
                let _ = done.send(command.spawn());
            }
        });
        std::sync::Mutex::new(send)
    });
    let (done, child) = mpsc::channel();
    spawner
        .lock()
        .map_err(|_| anyhow!("poisoned"))?
        .send((command, done))
        .context("the spawning thread is gone")?;
    Ok(child.recv().context("the spawning thread is gone")??)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv(words: &[&str]) -> Vec<String> {
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    #[test]
    fn dropped_process_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(
            "cat",
            &argv(&["sleep", "1000"]),
            Stdin::default(),
            &dir.path().join("log"),
            false,
        )
        .unwrap();
        let proc = PathBuf::from(format!("/proc/{}", process.id()));
        assert!(proc.exists());
        drop(process);
        assert!(!proc.exists());
    }

    #[test]
    fn description_contains_log() {
        let dir = tempfile::tempdir().unwrap();
        let script = argv(&["sh", "-c", "echo out; echo err >&2; exit 3"]);
        let mut process = Process::start("sh", &script, Stdin::default(), &dir.path().join("log"), false).unwrap();
        assert!(process.wait_until(Instant::now() + Duration::from_secs(120)).unwrap());
        assert_eq!(process.ended().unwrap().unwrap().code(), Some(3));
        assert!(process.describe().contains("err"), "{}", process.describe());
    }
}
