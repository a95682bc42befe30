// SPDX-License-Identifier: MIT OR Apache-2.0

//! The processes behind accelerators: starting them, and asking them for their counters.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

use crate::process::{Process, Stdin};
use crate::qemu::Paths;

/// How long a device process may take to listen.
const START: Duration = Duration::from_secs(10);
/// How long it may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

/// A running accelerator.
#[derive(Debug)]
pub struct Accel {
    /// Its process.
    pub process: Process,
    control: PathBuf,
}

impl Accel {
    /// Starts one and waits until it listens.
    ///
    /// # Errors
    ///
    /// It cannot be started, or does not listen in time; its own last words are in the error.
    pub fn start(program: &Path, name: &str, memory: u64, paths: &Paths) -> Result<Accel> {
        let (socket, control) = (paths.device_socket(name), paths.control_socket(name));
        for path in [&socket, &control] {
            match std::fs::remove_file(path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(e).context(path.display().to_string());
                }
                _ => {}
            }
        }
        let word = |path: &Path| path.display().to_string();
        let argv = [
            word(program),
            "--socket".into(),
            word(&socket),
            "--memory".into(),
            format!("{}M", memory >> 20),
            "--control".into(),
            word(&control),
        ];
        let mut process = Process::start(
            name,
            &argv,
            Stdin::default(),
            &paths.dir.join(format!("{name}.log")),
            false,
        )?;
        let deadline = Instant::now() + START;
        // It says so when both sockets listen; a socket's file alone may be there a moment too early.
        while !process.log().lines().any(|line| line.starts_with("ready ")) {
            if process.ended()?.is_some() {
                bail!("the device process ended at once: {}", process.describe());
            }
            if Instant::now() > deadline {
                bail!(
                    "the device process does not listen within {START:?}: {}",
                    process.describe()
                );
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(Accel { process, control })
    }

    /// Asks for its counters.
    ///
    /// # Errors
    ///
    /// It does not answer in time, or with something else than JSON.
    pub fn counters(&self) -> Result<Value> {
        let mut stream = UnixStream::connect(&self.control).with_context(|| self.control.display().to_string())?;
        stream.set_read_timeout(Some(ANSWER))?;
        stream.write_all(b"{\"get\":\"counters\"}\n")?;
        let mut line = String::new();
        BufReader::new(stream)
            .read_line(&mut line)
            .context("no answer from the device process")?;
        let mut answer: Value =
            serde_json::from_str(&line).with_context(|| format!("the device process said {line:?}"))?;
        if answer["ok"] != true {
            return Err(anyhow!("the device process refused: {}", answer["error"]));
        }
        Ok(answer["counters"].take())
    }
}
