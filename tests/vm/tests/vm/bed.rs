// SPDX-License-Identifier: MIT OR Apache-2.0

//! The kernels that tests run on, each with the module built for it, and the guests that wait for the next test.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, anyhow, ensure};
use libtest_mimic::Trial;
use p2pmem_guest::cases::Kernels;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::kernel::Kernel;
use p2pmem_vm::topology::Layout;
use p2pmem_vm::vm::{Options, topologies};

use crate::failed;

/// Name of the kernel that the sandbox was made for.
const STOCK: &str = "stock";
/// Name of the kernel that checks itself.
const DEBUG: &str = "debug";

/// Running guests of a topology, with a kernel.
pub struct Guests {
    kernel: &'static str,
    topology: String,
    /// The guests.
    pub cluster: Cluster,
    /// Tables of clients whose preparation has been done.
    pub prepared: BTreeSet<String>,
    /// The tests they have run.
    ran: Vec<String>,
}

/// Guests that wait for the next test; those of one topology at a time are kept.
pub type Shelf = Arc<Mutex<Option<Guests>>>;

/// A kernel to run tests on.
#[derive(Clone)]
pub struct Bed {
    /// Its name, which its tests' names begin with.
    pub name: &'static str,
    kernel: Kernel,
    module: Option<PathBuf>,
    shelf: Shelf,
}

impl Bed {
    /// All kernels there are: the stock kernel, and the debug kernel if the environment names it. The module is the one
    /// that `P2PMEM_MODULE` names, and for the debug kernel that of its name in the folder `debug` beside it.
    ///
    /// # Errors
    ///
    /// A kernel is missing.
    pub fn all(shelf: &Shelf) -> Result<Vec<Bed>> {
        let module = std::env::var_os("P2PMEM_MODULE").map(PathBuf::from);
        let debug_module = module
            .as_ref()
            .and_then(|path| Some(path.parent()?.join(DEBUG).join(path.file_name()?)));
        let bed = |name, kernel, module| Bed {
            name,
            kernel,
            module,
            shelf: shelf.clone(),
        };
        let mut beds = vec![bed(STOCK, Kernel::stock()?, module)];
        beds.extend(Kernel::debug()?.map(|kernel| bed(DEBUG, kernel, debug_module)));
        Ok(beds)
    }

    /// A test on this kernel; one that does not run there shows as ignored, with the reason.
    pub fn trial(&self, name: &str, kernels: Kernels<'_>, run: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
        let trial = Trial::test(format!("{}::{name}", self.name), move || run().map_err(failed));
        match kernels {
            Kernels::Stock(why) | Kernels::Debug(why) if !self.is_of(kernels) => {
                trial.with_kind(format!("not here: {why}")).with_ignored_flag(true)
            }
            _ => trial.with_ignored_flag(self.module.is_none()),
        }
    }

    fn is_of(&self, kernels: Kernels<'_>) -> bool {
        match kernels {
            Kernels::Both => true,
            Kernels::Stock(_) => self.name == STOCK,
            Kernels::Debug(_) => self.name == DEBUG,
        }
    }

    /// The path of the module, as it is in guests too.
    ///
    /// # Errors
    ///
    /// It was not built for this kernel.
    pub fn module(&self) -> Result<String> {
        let module = self.module.as_ref().context("P2PMEM_MODULE is not set")?;
        let module = fs::canonicalize(module).with_context(|| format!("the module {}", module.display()))?;
        Ok(module.to_str().context("the module's path is not UTF-8")?.to_owned())
    }

    /// The guests of a topology: those on the shelf, or fresh ones.
    ///
    /// # Errors
    ///
    /// They do not boot, or those that were there before did not end in order.
    pub fn guests(&self, topology: &str, fresh: bool) -> Result<Guests> {
        let kept = self.shelf.lock().map_err(|_| anyhow!("poisoned"))?.take();
        if let Some(guests) = kept {
            let fit = guests.topology == topology && guests.kernel == self.name;
            if fit && !fresh && guests.cluster.is_alive() {
                return Ok(guests);
            }
            end(guests)?;
        }
        let file = topologies().join(format!("{topology}.toml"));
        let options = Options {
            kernel: Some(self.kernel.clone()),
        };
        Ok(Guests {
            kernel: self.name,
            topology: topology.to_owned(),
            cluster: Cluster::boot(&Layout::load(&file)?, &options)?,
            prepared: BTreeSet::new(),
            ran: Vec::new(),
        })
    }

    /// Puts guests that a test has run in on the shelf, for the next one.
    ///
    /// # Errors
    ///
    /// A thread of the tests panicked.
    pub fn keep(&self, mut guests: Guests, test: &str) -> Result<()> {
        guests.ran.push(test.to_owned());
        *self.shelf.lock().map_err(|_| anyhow!("poisoned"))? = Some(guests);
        Ok(())
    }

    /// Ends guests that are of no use to others after a test, which may have left them in a state that no end in order
    /// comes from; what their kernel found wrong is asked first.
    ///
    /// # Errors
    ///
    /// It found something.
    pub fn drop_guests(&self, mut guests: Guests) -> Result<()> {
        if guests.cluster.is_alive() {
            let findings = guests.cluster.check()?;
            ensure!(findings.is_empty(), "{}", findings.join("\n"));
        }
        Ok(())
    }
}

/// Ends guests in order, after having asked their kernel what it found wrong.
///
/// # Errors
///
/// It found something, or they do not end; with the tests they have run.
pub fn end(guests: Guests) -> Result<()> {
    let Guests {
        kernel,
        topology,
        mut cluster,
        ran,
        ..
    } = guests;
    let findings = if cluster.is_alive() {
        cluster.check()
    } else {
        Ok(Vec::new())
    };
    let findings = findings.and_then(|mut findings| {
        findings.extend(cluster.shut_down()?);
        Ok(findings)
    });
    let what = || format!("the {kernel} guests ({topology}) that have run {}", ran.join(", "));
    let findings = findings.with_context(what)?;
    ensure!(findings.is_empty(), "{}: {}", what(), findings.join("\n"));
    Ok(())
}
