// SPDX-License-Identifier: MIT OR Apache-2.0

//! Failures of allocations while the module is loaded.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::io::Errno;
use rustix::system::{delete_module, finit_module};

use super::dmabuf_end::Log;
use super::faults::{SPARED, Within, arm_within, sweep_checked};
use super::inflight::until;
use super::{Bed, Case, NODE, PROVIDERS, alloc, errno, free, open, providers, write};
use crate::limits::is_long;

pub(super) const CASES: &[Case] = &[Case {
    name: "allocation-failures-load",
    about: "if an allocation fails while the module loads and programs use it, loading succeeds or nothing remains",
    topology: "demo",
    ruins: false,
    run: loading,
}];

/// An upper limit of the number of allocations of loading the module.
const MAX_ALLOCATIONS: u32 = 5000;
/// The test lets every third allocation fail, and every allocation in a long run. There are about 280 allocations, and
/// the debug kernel takes at least half a second to load and unload the module.
///
/// About eight of them, not in sequence, belong to the adoption of nvme1. If the test meets none of these, it continues with
/// the allocations between.
const STEP: u32 = 3;
const RULES: &str = "/sys/kernel/config/p2pmem/rules";
/// Paths that exist while the module is loaded.
const MODULE_PATHS: &[&str] = &[
    NODE,
    "/sys/module/p2pmem",
    "/sys/bus/pci/drivers/p2pmem",
    "/sys/kernel/config/p2pmem",
    "/sys/kernel/debug/p2pmem",
];

/// A thread that uses the module as soon as the device or configfs exists, with counts of successful uses.
struct ModuleUser {
    /// The user holds the lock for reading while it uses the module; the test holds the lock for writing to keep the
    /// user out.
    access: RwLock<()>,
    stop: AtomicBool,
    /// The PCI function for which the user creates provider directories.
    bdf: String,
    /// Number of files opened, and number of directories created.
    used: [AtomicU64; 2],
}

impl ModuleUser {
    fn run(&self) -> Result<()> {
        let provider = Path::new(PROVIDERS).join(&self.bdf);
        let rule = Path::new(RULES).join("50-load");
        while !self.stop.load(Ordering::Relaxed) {
            let access = self.access.read().map_err(|_| anyhow!("poisoned"))?;
            if let Ok(file) = File::open(NODE) {
                providers(file.as_fd())?;
                self.used[0].fetch_add(1, Ordering::Relaxed);
            }
            for dir in [&provider, &rule] {
                if fs::create_dir(dir).is_ok() {
                    fs::remove_dir(dir).with_context(|| dir.display().to_string())?;
                    self.used[1].fetch_add(1, Ordering::Relaxed);
                }
            }
            drop(access);
            // Loading needs the processors too.
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn unload() -> Result<()> {
    // NONBLOCK, like rmmod: fails if the module is in use.
    delete_module(c"p2pmem", libc::O_NONBLOCK).context("rmmod p2pmem")?;
    let left = left();
    ensure!(left.is_empty(), "after rmmod, {left:?} still exist");
    Ok(())
}

fn left() -> Vec<&'static str> {
    MODULE_PATHS
        .iter()
        .copied()
        .filter(|path| Path::new(path).exists())
        .collect()
}

fn loading(bed: &mut Bed) -> Result<()> {
    let path = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
    let module = File::open(&path).context(path)?;
    bed.unpublish("accel0")?;
    // The module must not bind devices here; `allocation-failures-admin` tests failures of binding.
    for name in ["accel0", "accel1", "shm0"] {
        write(&bed.device(name)?.sysfs().join("driver_override"), "\n")?;
    }
    for name in ["p2pmem_importer", "p2pmem_publisher"] {
        if Path::new("/sys/module").join(name).exists() {
            super::command("rmmod", &[name])?;
        }
    }
    unload()?;
    arm_within(&Within::Function("do_one_initcall"), SPARED)?;
    let mut log = Log::new()?;
    let user = ModuleUser {
        access: RwLock::new(()),
        stop: AtomicBool::new(false),
        bdf: bed.device("accel1")?.bdf.clone(),
        used: Default::default(),
    };
    let (mut not_adopted, mut loads, mut failures) = (0, 0, 0);
    thread::scope(|scope| -> Result<()> {
        let thread = scope.spawn(|| user.run());
        let step = if is_long() { 1 } else { STEP };
        let swept = (1..=step).try_for_each(|first| -> Result<()> {
            if not_adopted > 0 {
                return Ok(());
            }
            let swept = sweep_checked(
                (first..MAX_ALLOCATIONS).step_by(step as usize),
                "loading the module",
                &[libc::EINVAL],
                || Ok(()),
                |()| finit_module(&module, c"", 0).map_err(Errno::raw_os_error),
                |answer, injected| {
                    let _exclusive = user.access.write().map_err(|_| anyhow!("poisoned"))?;
                    let logged = log.lines(&[]);
                    if let Err(code) = answer {
                        // The driver core returns EINVAL if it cannot allocate the module's folder of drivers.
                        ensure!(
                            *code == libc::ENOMEM
                                || logged.iter().any(|line| line.contains("failed to create module links")),
                            "{}: {logged:#?}",
                            errno(*code)
                        );
                        let left = left();
                        ensure!(left.is_empty(), "loading failed, but {left:?} exist");
                        return Ok(());
                    }
                    loads += 1;
                    let file = open()?;
                    let adopted = bed.provider("nvme1").is_ok();
                    ensure!(
                        adopted || injected,
                        "no allocation failed, but the memory of nvme1 was not adopted"
                    );
                    if !adopted {
                        let named = format!("{}: p2pmem: cannot be adopted", bed.device("nvme1")?.bdf);
                        ensure!(
                            logged.iter().any(|line| line.contains(&named)),
                            "the log does not name nvme1, which was not adopted: {logged:#?}"
                        );
                        not_adopted += 1;
                    }
                    drop(file);
                    unload()
                },
            )?;
            failures += swept.failures;
            Ok(())
        });
        // The module works, also for the user that ran before it was loaded.
        let loaded = swept.and_then(|()| {
            bed.load_module()?;
            until("the user opens the device and creates directories", || {
                Ok(user.used.iter().all(|count| count.load(Ordering::Relaxed) > 0))
            })
        });
        user.stop.store(true, Ordering::Relaxed);
        thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        loaded
    })?;
    let used = user.used.each_ref().map(|count| count.load(Ordering::Relaxed));
    println!(
        "loaded {loads} times despite failures, {not_adopted} without nvme1; {} files opened, {} directories created",
        used[0], used[1]
    );
    ensure!(failures > 0, "no allocation failed");
    ensure!(not_adopted > 0, "nvme1 was adopted each time");
    bed.publish("accel0")?;
    let file = open()?;
    let got = alloc(file.as_fd(), 1 << 20).map_err(errno)?;
    free(file.as_fd(), got.handle).map_err(errno)?;
    bed.provider("nvme1").map(drop)
}
