// SPDX-License-Identifier: MIT OR Apache-2.0

//! Allocations that fail while the module is loaded.

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
use crate::patience::is_long;

pub(super) const CASES: &[Case] = &[Case {
    name: "allocation-failures-load",
    about: "when an allocation of the module's start fails while programs open the device, the module is loaded, or nothing of it is there",
    topology: "demo",
    ruins: false,
    run: loading,
}];

/// More allocations than loading the module makes.
const MANY: u32 = 5000;
/// Every third of them fails, in a long run each: there are about 280, and the debug kernel takes half a second or more to load and
/// unload the module.
const STEP: usize = 3;
const RULES: &str = "/sys/kernel/config/p2pmem/rules";
/// All that there is of a module that is loaded.
const TRACES: &[&str] = &[
    NODE,
    "/sys/module/p2pmem",
    "/sys/bus/pci/drivers/p2pmem",
    "/sys/kernel/config/p2pmem",
    "/sys/kernel/debug/p2pmem",
];

/// Who uses the module as soon as it can be: what it does, and how often that succeeded.
struct Users {
    /// Held for reading by who uses the module, for writing by who wants nobody to.
    turn: RwLock<()>,
    stop: AtomicBool,
    /// The function for which directories are made.
    bdf: String,
    /// Files opened, and directories made.
    used: [AtomicU64; 2],
}

impl Users {
    fn go_on(&self) -> Result<()> {
        let provider = Path::new(PROVIDERS).join(&self.bdf);
        let rule = Path::new(RULES).join("50-load");
        while !self.stop.load(Ordering::Relaxed) {
            let turn = self.turn.read().map_err(|_| anyhow!("poisoned"))?;
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
            drop(turn);
            // The processors are needed for loading too.
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn unload() -> Result<()> {
    // NONBLOCK, as rmmod: a module in use stays.
    delete_module(c"p2pmem", libc::O_NONBLOCK).context("rmmod p2pmem")?;
    let left = left();
    ensure!(left.is_empty(), "the module is gone, and left {left:?}");
    Ok(())
}

fn left() -> Vec<&'static str> {
    TRACES.iter().copied().filter(|path| Path::new(path).exists()).collect()
}

fn loading(bed: &mut Bed) -> Result<()> {
    let path = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
    let module = File::open(&path).context(path)?;
    bed.unpublish("accel0")?;
    // Nothing of its own to bind: that is what `allocation-failures-admin` has.
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
    let users = Users {
        turn: RwLock::new(()),
        stop: AtomicBool::new(false),
        bdf: bed.device("accel1")?.bdf.clone(),
        used: Default::default(),
    };
    let (mut refused, mut loads) = (0, 0);
    let swept = thread::scope(|scope| -> Result<_> {
        let user = scope.spawn(|| users.go_on());
        let swept = sweep_checked(
            (1..MANY).step_by(if is_long() { 1 } else { STEP }),
            "loading the module",
            &[libc::EINVAL],
            || Ok(()),
            |()| finit_module(&module, c"", 0).map_err(Errno::raw_os_error),
            |answer, reached| {
                let _nobody = users.turn.write().map_err(|_| anyhow!("poisoned"))?;
                let said = log.lines(&[]);
                if let Err(code) = answer {
                    // The driver core has EINVAL where it gets no memory for the module's folder of drivers.
                    ensure!(
                        *code == libc::ENOMEM || said.iter().any(|line| line.contains("failed to create module links")),
                        "{}: {said:#?}",
                        errno(*code)
                    );
                    let left = left();
                    ensure!(left.is_empty(), "loading failed, and left {left:?}");
                    return Ok(());
                }
                loads += 1;
                let file = open()?;
                let adopted = bed.provider("nvme1").is_ok();
                ensure!(
                    adopted || reached,
                    "nothing failed, and the drive's memory was not adopted"
                );
                if !adopted {
                    let named = format!("{}: p2pmem: cannot be adopted", bed.device("nvme1")?.bdf);
                    ensure!(
                        said.iter().any(|line| line.contains(&named)),
                        "not adopted, and not named: {said:#?}"
                    );
                    refused += 1;
                }
                drop(file);
                unload()
            },
        );
        // It works, for who was there before it as well.
        let works = swept.and_then(|swept| {
            bed.load_module()?;
            until("others use the module", || {
                Ok(users.used.iter().all(|count| count.load(Ordering::Relaxed) > 0))
            })?;
            Ok(swept)
        });
        users.stop.store(true, Ordering::Relaxed);
        user.join().map_err(|_| anyhow!("a thread panicked"))??;
        works
    })?;
    let used = users.used.each_ref().map(|count| count.load(Ordering::Relaxed));
    println!(
        "{loads} times loaded all the same, {refused} times without the drive; {} files opened, {} directories made",
        used[0], used[1]
    );
    ensure!(swept.failures > 0, "no allocation failed");
    ensure!(refused > 0, "the drive was adopted each time");
    bed.publish("accel0")?;
    let file = open()?;
    let got = alloc(file.as_fd(), 1 << 20).map_err(errno)?;
    free(file.as_fd(), got.handle).map_err(errno)?;
    bed.provider("nvme1").map(drop)
}
