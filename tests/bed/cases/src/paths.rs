// SPDX-License-Identifier: MIT OR Apache-2.0

//! Paths compared with the kernel's own: every provider with every function, in each topology.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;

use super::{Bed, Case, command, errno, open, pageless, parse_address, providers, write};
use crate::limits::rounds;
use crate::sys::{self, Memory};

macro_rules! every_pair {
    ($($topology:literal)*) => {
        [$(Case {
            name: concat!("paths-", $topology),
            about: "every path is the kernel's, with and without ACS redirection, and after a function went and came back",
            topology: $topology,
            ruins: false,
            run: every_pair,
        }),*]
    };
}

/// Compares with a kernel module that is built for the stock kernel.
pub(super) const CASES: &[Case] =
    &every_pair!("broadcast" "demo" "iommu-nic" "nic" "nic-unreachable" "removal" "small" "unplug" "unreachable");

pub(super) const RACES: &[Case] = &[Case {
    name: "paths-unbound",
    about: "programs request paths while the provider without pages is unbound and published again",
    topology: "demo",
    ruins: false,
    run: unbound,
}];

const PCI: &str = "/sys/bus/pci/devices";
/// The largest number of clients of one call.
const MOST: usize = 32;

/// Returns the addresses of all PCI functions.
fn functions() -> Result<Vec<String>> {
    let names = fs::read_dir(PCI)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    names.collect()
}

fn bdf(addr: abi::p2pmem_pci_addr) -> String {
    format!(
        "{:04x}:{:02x}:{:02x}.{}",
        addr.domain,
        addr.bus,
        addr.devfn >> 3,
        addr.devfn & 7
    )
}

/// Returns the kernel's distance from a provider to each function.
fn kernel_distances(provider: &str) -> Result<BTreeMap<String, i32>> {
    let door = "/dev/p2pmem-find-many";
    if !Path::new(door).exists() {
        let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
        let asker = Path::new(&module).with_file_name("p2pmem_find_many.ko");
        command("insmod", &[asker.to_str().context("path")?])?;
    }
    OpenOptions::new()
        .write(true)
        .open(door)?
        .write_all(format!("distances {provider}").as_bytes())?;
    let mut text = String::new();
    OpenOptions::new().read(true).open(door)?.read_to_string(&mut text)?;
    let row = |line: &str| {
        let (name, distance) = line.split_once(' ').context("no distance")?;
        Ok((name.to_owned(), distance.parse()?))
    };
    text.lines().map(row).collect()
}

/// Returns the paths from all providers to some functions.
fn paths(fd: BorrowedFd<'_>, flags: u32, functions: &[String]) -> Result<Vec<abi::p2pmem_path>> {
    let clients = functions.iter().map(|name| parse_address(name));
    let mut clients = clients.collect::<Result<Vec<_>>>()?;
    let mut rows = vec![abi::p2pmem_path::default(); 64 * functions.len()];
    let mut ask = abi::p2pmem_paths {
        nr_clients: clients.len() as u32,
        nr_paths: rows.len() as u32,
        flags,
        ..Default::default()
    };
    sys::paths(fd, &mut ask, Memory::Slice(&mut clients), Memory::Slice(&mut rows)).map_err(errno)?;
    rows.truncate(ask.nr_paths as usize);
    Ok(rows)
}

/// Compares all paths with the kernel's. Returns how many there are, and how many are unreachable or redirected.
fn compare(fd: BorrowedFd<'_>, flags: u32) -> Result<(usize, usize)> {
    let functions = functions()?;
    let mut expected = BTreeMap::new();
    for provider in providers(fd)? {
        expected.insert(provider.id, kernel_distances(&bdf(provider.addr))?);
    }
    let (mut count, mut far) = (0, 0);
    let mut flags = flags;
    for clients in functions.chunks(MOST) {
        for path in paths(fd, flags, clients)? {
            let client = &clients[path.client as usize];
            let kernel = expected.get(&path.provider).and_then(|distances| distances.get(client));
            ensure!(
                kernel == Some(&path.distance),
                "to {client}: {kernel:?} for the kernel, {path:?}"
            );
            // The links that the emulator describes have a width and a speed.
            let inside = path.class == abi::P2PMEM_PATH_SAME_DEVICE;
            ensure!(
                inside || path.bandwidth > 0 || client.starts_with("0000:00:"),
                "to {client}: {path:?}"
            );
            let unreachable = path.class == abi::P2PMEM_PATH_UNREACHABLE;
            ensure!((path.distance < 0) == unreachable, "{path:?}");
            ensure!(unreachable || path.hops == path.distance as u32, "{path:?}");
            count += 1;
            far += usize::from(unreachable || path.flags & abi::P2PMEM_PATH_ACS_REDIRECT != 0);
        }
        // The functions are collected once.
        flags = 0;
    }
    Ok((count, far))
}

/// Reads the ACS control of each port that has one.
fn acs() -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for name in functions()? {
        let read = std::process::Command::new("setpci")
            .args(["-s", &name, "ECAP_ACS+6.W"])
            .output()?;
        if read.status.success() {
            found.push((name, String::from_utf8_lossy(&read.stdout).trim().to_owned()));
        }
    }
    Ok(found)
}

fn set_acs(port: &str, value: &str) -> Result<()> {
    command("setpci", &["-s", port, &format!("ECAP_ACS+6.W={value}")])
}

fn every_pair(bed: &mut Bed) -> Result<()> {
    let second = bed.device("accel1").is_ok();
    if second {
        bed.publish("accel1")?;
    }
    let file = open()?;
    let fd = file.as_fd();
    let (count, far) = compare(fd, abi::P2PMEM_PATHS_RESCAN)?;
    ensure!(count >= functions()?.len(), "{count} paths");

    // Each port alone redirects, or stops redirecting.
    let ports = acs()?;
    let mut changed = 0;
    for (port, before) in &ports {
        let redirected = u16::from_str_radix(before, 16)? ^ 0xc;
        set_acs(port, &format!("{redirected:04x}"))?;
        let result = compare(fd, abi::P2PMEM_PATHS_RESCAN);
        set_acs(port, before)?;
        changed += usize::from(result? != (count, far));
    }
    ensure!(ports.is_empty() || changed > 0, "no port of {ports:?} changes a path");
    ensure!(compare(fd, abi::P2PMEM_PATHS_RESCAN)? == (count, far));

    // A function that goes and comes back changes the table without a rescan.
    let mut gone = None;
    for name in functions()? {
        let class = fs::read_to_string(format!("{PCI}/{name}/class"))?;
        let driver = Path::new(PCI).join(&name).join("driver");
        if !driver.exists() && !class.starts_with("0x06") {
            gone = Some(name);
        }
    }
    let gone = gone.context("every function has a driver")?;
    write(&Path::new(PCI).join(&gone).join("remove"), "1")?;
    let without = compare(fd, 0);
    let missing = paths(fd, 0, std::slice::from_ref(&gone));
    write(Path::new("/sys/bus/pci/rescan"), "1")?;
    ensure!(without?.0 < count, "the paths to {gone} are still there");
    ensure!(missing.is_err(), "{gone} is still a client");
    ensure!(compare(fd, 0)? == (count, far));
    if second {
        bed.unpublish("accel1")?;
    }
    command("rmmod", &["p2pmem_find_many"])
}

/// Four threads ask for the paths to ever new lists of clients, while the provider without pages comes and goes: the kernel frees
/// what it knows of such a provider without waiting for anybody who reads it.
fn unbound(bed: &mut Bed) -> Result<()> {
    let names = ["accel1", "nvme0", "nvme1", "shm0"];
    let functions = names.map(|name| Ok(bed.device(name)?.bdf.clone()));
    let functions = functions.into_iter().collect::<Result<Vec<_>>>()?;
    bed.unpublish("accel0")?;
    let done = AtomicBool::new(false);
    let ended = thread::scope(|scope| -> Result<u64> {
        let readers: Vec<_> = (0..4)
            .map(|offset| {
                let (functions, done) = (&functions, &done);
                scope.spawn(move || -> Result<u64> {
                    let file = open()?;
                    let mut lists = 0;
                    // The digits of the number are the clients of a list, so no list comes again soon.
                    for number in offset.. {
                        if done.load(Relaxed) {
                            break;
                        }
                        let list = (0..8).map(|digit| functions[(number >> (2 * digit)) % 4].clone());
                        let list = list.collect::<Vec<_>>();
                        // The provider may go in the middle of the call.
                        let _ = paths(file.as_fd(), 0, &list);
                        lists += 1;
                    }
                    Ok(lists)
                })
            })
            .collect();
        let rounds = (0..rounds(20)).try_for_each(|_| -> Result<()> {
            pageless::publish(bed)?;
            bed.unpublish("accel0")
        });
        done.store(true, Relaxed);
        let mut lists = 0;
        for reader in readers {
            lists += reader.join().expect("a reader does not panic")?;
        }
        rounds?;
        Ok(lists)
    })?;
    ensure!(ended > 100, "only {ended} lists of clients");
    Ok(())
}
