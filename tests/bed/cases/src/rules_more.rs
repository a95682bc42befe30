// SPDX-License-Identifier: MIT OR Apache-2.0

//! Rules for importers and adapters other than the clients of the allocation, the dmem controller, and paths that change.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::dmabuf::{Importer, exported_buffer};
use super::rules::{ALICE, AdminRule, MIB, alloc_as, said};
use super::{Bed, Case, command, errno, expect, explain, explain_last, free, open, read, request, write};
use crate::limits::amount;
use crate::sys::{self, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rules-importers",
        about: "an importer that a rule denies, or whose path is too far, is refused, for whichever client the buffer was allocated",
        topology: "demo",
        ruins: false,
        run: importers,
    },
    Case {
        name: "dmem",
        about: "a cgroup's limit holds where the kernel has the dmem controller; elsewhere nothing is charged",
        topology: "demo",
        ruins: false,
        run: dmem,
    },
    Case {
        name: "paths-rescan",
        about: "a path is the cached one until setpci changes ACS and a program requests a rescan",
        topology: "demo",
        ruins: false,
        run: rescan,
    },
];

fn importers(bed: &mut Bed) -> Result<()> {
    let drive = bed.device("nvme0")?.bdf.clone();
    let file = open()?;
    let (_, dma_buf) = exported_buffer(file.as_fd(), MIB, 0)?;
    let attach = |device: &str| {
        Importer::new()?
            .attach(bed, &dma_buf, device, "p2p notify")
            .map_or_else(|e| Ok(Err(e)), |()| Ok::<_, anyhow::Error>(Ok(())))
    };
    ensure!(attach("nvme0")? == Ok(()));
    let rule = AdminRule::new("10-not-this", &[("client", &drive), ("action", "deny")])?;
    expect("a denied client", attach("nvme0")?, libc::EACCES)?;
    let sentence = explain_last(file.as_fd())?.2;
    ensure!(sentence.contains("rule 10-not-this"), "{sentence:?}");
    ensure!(attach("nvme1")? == Ok(()), "another client");
    rule.set("action", "none").map_or_else(
        |_| Ok(()),
        |()| Err(anyhow::anyhow!("a rule in force that says nothing")),
    )?;
    rule.set("enable", "0")?;
    rule.set("action", "none")?;
    rule.set("max_class", "DEV")?;
    rule.set("enable", "1")?;
    expect("too far", attach("nvme0")?, libc::EACCES)?;
    ensure!(explain_last(file.as_fd())?.2.contains("too far"));
    // The buffer's owner decides: root allocated it.
    rule.set("uid", &ALICE.to_string())?;
    ensure!(attach("nvme0")? == Ok(()));
    Ok(())
}

/// A cgroup with this process in it, until the value is dropped.
struct Cgroup(PathBuf);

const CGROUPS: &str = "/sys/fs/cgroup";

impl Cgroup {
    fn new(name: &str) -> Result<Cgroup> {
        write(&Path::new(CGROUPS).join("cgroup.subtree_control"), "+dmem")?;
        let dir = Path::new(CGROUPS).join(name);
        fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        let cgroup = Cgroup(dir);
        write(&cgroup.0.join("cgroup.procs"), "0")?;
        Ok(cgroup)
    }

    /// Returns the bytes of a region that are charged to the cgroup.
    fn current(&self, region: &str) -> Result<u64> {
        let text = read(&self.0.join("dmem.current"))?;
        let line = text.lines().find_map(|line| line.strip_prefix(region));
        Ok(line.map_or(Ok(0), |number| number.trim().parse())?)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(Path::new(CGROUPS).join("cgroup.procs"), "0");
        let _ = fs::remove_dir(&self.0);
    }
}

fn dmem(bed: &mut Bed) -> Result<()> {
    if !Path::new(CGROUPS).join("cgroup.controllers").exists() {
        command("mount", &["-t", "cgroup2", "none", CGROUPS])?;
    }
    let row = bed.provider("accel0")?;
    let region = format!("p2pmem/{}", bed.device("accel0")?.bdf);
    let file = open()?;
    let fd = file.as_fd();
    let cgroup = Cgroup::new("p2pmem-test")?;
    let regions = read(&cgroup.0.join("dmem.current"))?;
    ensure!(regions.lines().any(|line| line == format!("{region} 0")), "{regions:?}");
    write(&cgroup.0.join("dmem.max"), &format!("{region} {}", 4 * MIB))?;
    let ask_of = |provider: u32, size: u64| {
        let mut a = request(size);
        a.req.provider = provider;
        sys::alloc(fd, &mut a, Memory::Slice(&mut [])).map(|()| a)
    };
    let ask = |size: u64| ask_of(row.id, size);
    let first = ask(3 * MIB).map_err(errno)?;
    ensure!(
        cgroup.current(&region)? == 3 * MIB,
        "{}",
        read(&cgroup.0.join("dmem.current"))?
    );
    expect("beyond dmem.max", ask(2 * MIB), libc::EDQUOT)?;
    ensure!(said(fd, row.id)?.0 == abi::P2PMEM_VERDICT_CGROUP);
    ensure!(explain_last(fd)?.2.contains("dmem.max"), "{:?}", explain_last(fd)?.2);
    let second = ask(MIB).map_err(errno)?;
    free(fd, first.handle).map_err(errno)?;
    ensure!(cgroup.current(&region)? == MIB);
    // The charge is returned however the buffer ends, also when its provider is removed.
    bed.unpublish("accel0")?;
    ensure!(cgroup.current(&region)? == 0);
    free(fd, second.handle).map_err(errno)?;
    bed.publish("accel0")?;
    // The limit stays.
    let row = bed.provider("accel0")?;
    let ask = |size: u64| ask_of(row.id, size);
    expect("beyond dmem.max of before", ask(5 * MIB), libc::EDQUOT)?;
    let again = ask(MIB).map_err(errno)?;
    free(fd, again.handle).map_err(errno)?;
    ensure!(alloc_as(fd, ALICE, &[], MIB)?.is_ok());
    // Explaining a request of all that the limit allows takes nothing from another request.
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                let mut whole = abi::p2pmem_explain {
                    req: request(4 * MIB).req,
                    ..Default::default()
                };
                whole.req.provider = row.id;
                let _ = explain(fd, whole, &mut []);
            }
        });
        let pages = (0..amount(2000)).try_for_each(|_| {
            let page = ask(4096).map_err(errno).context("beside explanations")?;
            free(fd, page.handle).map_err(errno)
        });
        done.store(true, Relaxed);
        pages
    })?;
    drop(file);
    ensure!(cgroup.current(&region)? == 0);
    Ok(())
}

fn rescan(bed: &mut Bed) -> Result<()> {
    // The path between the two crosses the root port above the client; QEMU's switches have no ACS.
    let provider = bed.provider("accel0")?.id;
    let file = open()?;
    let fd = file.as_fd();
    let mut clients = [bed.address("shm0")?];
    let mut path = |flags: u32| -> Result<(u32, bool)> {
        let mut paths = vec![abi::p2pmem_path::default(); 16];
        let mut ask = abi::p2pmem_paths {
            nr_clients: 1,
            nr_paths: 16,
            flags,
            ..Default::default()
        };
        sys::paths(fd, &mut ask, Memory::Slice(&mut clients), Memory::Slice(&mut paths)).map_err(errno)?;
        let path = paths.iter().find(|path| path.provider == provider).context("no path")?;
        Ok((path.class, path.flags & abi::P2PMEM_PATH_ACS_REDIRECT != 0))
    };
    let port = fs::canonicalize(bed.device("shm0")?.sysfs())?
        .parent()
        .and_then(Path::file_name)
        .and_then(|name| name.to_str().map(str::to_owned))
        .context("no port above")?;
    let before = output("setpci", &["-s", &port, "ECAP_ACS+6.W"])?;
    // P2P Request Redirect and Completion Redirect.
    let redirect = 0xc;
    let value = u16::from_str_radix(&before, 16)?;
    let first = path(abi::P2PMEM_PATHS_RESCAN)?;
    ensure!(
        first == (abi::P2PMEM_PATH_HOST_BRIDGE, value & redirect != 0),
        "{first:?}, ACS {before}"
    );
    command(
        "setpci",
        &["-s", &port, &format!("ECAP_ACS+6.W={:04x}", value ^ redirect)],
    )?;
    let cached = path(0)?;
    let found = path(abi::P2PMEM_PATHS_RESCAN)?;
    let kept = path(0)?;
    command("setpci", &["-s", &port, &format!("ECAP_ACS+6.W={before}")])?;
    let still = path(0)?;
    ensure!(cached == first, "the path was not cached: {cached:?}");
    ensure!(found == (first.0, !first.1) && kept == found, "{found:?}, {kept:?}");
    ensure!(still == found, "the path was not cached: {still:?}");
    // A provider that comes changes no path.
    bed.publish("accel1")?;
    ensure!(path(0)? == found && path(abi::P2PMEM_PATHS_RESCAN)? == first);
    drop(file);
    bed.unpublish("accel1")
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let output = std::process::Command::new(program)
        .args(arguments)
        .output()
        .context(program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
