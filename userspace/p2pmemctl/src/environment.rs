// SPDX-License-Identifier: MIT OR Apache-2.0

//! The environment of the commands: the device, the machine's files, and the output.

use std::fs::DirEntry;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{bail, Context as _};
use p2pmem::{Client, Device, Provider};
use serde::Serialize;

/// Version of the JSON that the commands print: the member `schema`. It changes when a member is removed, or changes its
/// name or meaning. New members do not change it.
pub const SCHEMA: u32 = 1;

/// Pause between two updates of the message of a running operation.
const UPDATE: Duration = Duration::from_millis(200);

/// Opens the device file of p2pmem.
type Open = Box<dyn Fn() -> p2pmem::Result<Device>>;

/// The machine.
pub struct Environment {
    /// Root of the machine's file system: `/`, except in tests.
    pub root: PathBuf,
    /// Opens the device file of p2pmem.
    pub open: Open,
}

impl Environment {
    /// Returns this machine, with the device file at `device`.
    pub fn of_this_machine(device: PathBuf) -> Self {
        Self {
            root: "/".into(),
            open: Box::new(move || Device::open_path(&device)),
        }
    }

    /// Returns a path below the root, such as `sys/class/nvme`.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path)
    }

    /// Returns whether the module is loaded.
    pub fn has_module(&self) -> bool {
        self.path("sys/module/p2pmem").exists()
    }

    /// Returns the entries of a folder below the root, in no order; none if the folder cannot be read.
    pub fn entries(&self, path: impl AsRef<Path>) -> impl Iterator<Item = DirEntry> {
        self.path(path).read_dir().into_iter().flatten().flatten()
    }

    /// Reads a text file below the root, without surrounding white space.
    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(std::fs::read_to_string(self.path(path)).ok()?.trim().to_owned())
    }
}

/// Environment and output options of a command.
pub struct Context<'a> {
    /// The machine.
    pub environment: &'a Environment,
    /// Print JSON.
    pub json: bool,
    /// Show the progress of long operations on standard error.
    pub progress: bool,
    /// Receives the results.
    pub out: &'a mut dyn Write,
    /// Receives messages: errors, remedies, hints.
    pub err: &'a mut dyn Write,
}

/// A JSON object with the version of its members.
#[derive(Serialize)]
struct Document<'a, T> {
    schema: u32,
    #[serde(flatten)]
    value: &'a T,
}

/// Returns an object as JSON, indented, with the version of its members.
pub(crate) fn json_text(value: &impl Serialize) -> anyhow::Result<String> {
    let document = Document { schema: SCHEMA, value };
    serde_json::to_string_pretty(&document).context("cannot write JSON")
}

impl Context<'_> {
    /// Opens the device.
    pub fn open(&self) -> anyhow::Result<Device> {
        Ok((self.environment.open)()?)
    }

    /// Resolves the names of clients.
    pub fn clients(&self, names: &[String]) -> anyhow::Result<Vec<Client>> {
        names.iter().map(|n| self.client(n)).collect()
    }

    /// Resolves the name of a client.
    pub fn client(&self, name: &str) -> anyhow::Result<Client> {
        Ok(Client::resolve_in(&self.environment.path("sys"), name)?)
    }

    /// Returns all providers, or only the one with this id or device.
    pub fn providers(&self, device: &Device, name: Option<&str>) -> anyhow::Result<Vec<Provider>> {
        match name {
            Some(name) => Ok(vec![self.provider(device, name)?]),
            None => Ok(device.providers()?),
        }
    }

    /// Finds a provider by id or device.
    pub fn provider(&self, device: &Device, name: &str) -> anyhow::Result<Provider> {
        let providers = device.providers()?;
        let found = match name.parse::<u32>() {
            Ok(id) => providers.into_iter().find(|p| p.id == id),
            Err(_) => {
                let addr = self.client(name)?.addr();
                providers.into_iter().find(|p| p.addr == addr)
            }
        };
        match found {
            Some(provider) => Ok(provider),
            None => bail!("{name} is not a provider: see `p2pmemctl list`"),
        }
    }

    /// Prints an object as JSON, indented.
    pub fn print_json(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        writeln!(self.out, "{}", json_text(value)?)?;
        Ok(())
    }

    /// Prints an object as JSON in one line, so that a reader can process a stream of objects.
    pub fn print_json_line(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let document = Document { schema: SCHEMA, value };
        let text = serde_json::to_string(&document).context("cannot write JSON")?;
        writeln!(self.out, "{text}")?;
        Ok(())
    }

    /// Prints a hint on standard error.
    pub fn hint(&mut self, text: &str) {
        // If standard error is not writable, the hint has no reader.
        let _ = writeln!(self.err, "{text}");
    }

    /// Returns a progress bar for `bytes`; hidden if standard error is no terminal.
    pub fn progress_bar(&self, what: &'static str, bytes: u64) -> indicatif::ProgressBar {
        if !self.progress {
            return indicatif::ProgressBar::hidden();
        }
        let template = "{msg} [{bar:40}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}";
        indicatif::ProgressBar::new(bytes)
            .with_style(style(template).progress_chars("=> "))
            .with_message(what)
    }

    /// Runs an operation of unknown length. Until its end, standard error shows `what`, the elapsed time, and the text
    /// that `state` returns, if standard error is a terminal.
    pub fn waiting<T>(
        &self,
        what: String,
        state: impl Fn() -> Option<String> + Send,
        operation: impl FnOnce() -> T,
    ) -> T {
        if !self.progress {
            return operation();
        }
        let bar = indicatif::ProgressBar::new_spinner().with_style(style("{spinner} {msg} ({elapsed})"));
        bar.set_message(what.clone());
        bar.enable_steady_tick(UPDATE);
        let result = std::thread::scope(|scope| {
            // Dropped after the operation, also if it panics; this ends the thread.
            let (running, ended) = mpsc::channel::<()>();
            let bar = &bar;
            scope.spawn(move || {
                while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(UPDATE) {
                    if let Some(state) = state() {
                        bar.set_message(format!("{what}: {state}"));
                    }
                }
            });
            let result = operation();
            drop(running);
            result
        });
        bar.finish_and_clear();
        result
    }
}

impl Context<'_> {
    /// Runs an allocation. p2pmem clears the memory before it returns, which takes long for large buffers. Until the end,
    /// standard error shows how much freed memory waits to be cleared, if standard error is a terminal.
    pub fn allocating<T>(&self, size: u64, allocation: impl FnOnce() -> T) -> T {
        // Another open file: calls through one file wait for each other.
        let other = self.progress.then(|| self.open().ok()).flatten();
        let dirty = move || {
            let providers = other.as_ref()?.providers().ok()?;
            let dirty: u64 = providers.iter().map(|provider| provider.scrubbing).sum();
            (dirty > 0).then(|| format!("{} of freed memory to clear", p2pmem::human_size(dirty)))
        };
        let what = format!("allocating and clearing {}", p2pmem::human_size(size));
        self.waiting(what, dirty, allocation)
    }
}

/// Returns a style. Templates are constants; the default bar is the fallback if one is invalid.
fn style(template: &str) -> indicatif::ProgressStyle {
    indicatif::ProgressStyle::with_template(template).unwrap_or_else(|_| indicatif::ProgressStyle::default_bar())
}
