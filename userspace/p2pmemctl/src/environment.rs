// SPDX-License-Identifier: MIT OR Apache-2.0

//! The environment of the commands: the device, the machine's files, and the output.

use std::fs::DirEntry;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context as _};
use p2pmem::{Client, Device, Provider};
use serde::Serialize;

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

    /// Prints a value as JSON, indented.
    pub fn print_json(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
        writeln!(self.out, "{text}")?;
        Ok(())
    }

    /// Returns a progress bar for `bytes`; hidden if standard error is no terminal.
    pub fn progress_bar(&self, what: &'static str, bytes: u64) -> indicatif::ProgressBar {
        if !self.progress {
            return indicatif::ProgressBar::hidden();
        }
        // The template is a constant; the default bar is the fallback if it were invalid.
        let template = "{msg} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec}";
        let style = indicatif::ProgressStyle::with_template(template)
            .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar())
            .progress_chars("=> ");
        indicatif::ProgressBar::new(bytes).with_style(style).with_message(what)
    }
}
