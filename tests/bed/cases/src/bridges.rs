// SPDX-License-Identifier: MIT OR Apache-2.0

//! Bridges that payload crosses: none above the switch if drive and memory are below it, otherwise also the root
//! complex.

use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Bed, Case, errno, free, open, request};
use crate::host;
use crate::sys::{self, Mapping, Memory};
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[Case {
    name: "bridges",
    about: "payload stays below the switch that drive and memory share; for other memory the bridges above count it",
    topology: "demo",
    ruins: false,
    run: bridges,
}];

const LEN: usize = 1 << 20;
/// The switch ports that payload between nvme0 and accel0 crosses.
const BELOW: [&str; 2] = ["sw0-port0", "sw0-port1"];

fn counted() -> Result<Value> {
    Ok(host::request(&Request::Snapshot)?["bridges"].take())
}

/// Reads from `nvme0` with O_DIRECT into memory of `provider`. Returns the payload in bytes for each bridge that it
/// crossed, for `root_complex`, and for `unknown`.
fn crossed(bed: &Bed, provider: &str) -> Result<Vec<(String, u64)>> {
    let file = open()?;
    let mut buffer = request(LEN as u64);
    buffer.req.provider = bed.provider(provider)?.id;
    sys::alloc(file.as_fd(), &mut buffer, Memory::Slice(&mut [])).map_err(errno)?;
    let map = Mapping::shared(file.as_fd(), buffer.mmap_offset, LEN).map_err(errno)?;
    let block = bed.block("nvme0")?;
    let drive = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&block);
    let drive = drive.with_context(|| block.display().to_string())?;
    let before = counted()?;
    ensure!(map.fill_from(&drive, 0, 0, LEN)? == LEN, "short read");
    let after = counted()?;
    drop(map);
    free(file.as_fd(), buffer.handle).map_err(errno)?;
    let number = |value: &Value, name: &str| value.as_u64().with_context(|| format!("no number {name:?}"));
    let mut all = Vec::new();
    for (name, value) in after["crossed"].as_object().context("crossed")? {
        all.push((
            name.clone(),
            number(value, name)? - number(&before["crossed"][name], name)?,
        ));
    }
    for name in ["root_complex", "unknown"] {
        all.push((
            name.to_owned(),
            number(&after[name], name)? - number(&before[name], name)?,
        ));
    }
    all.retain(|(_, bytes)| *bytes > 0);
    println!("{provider}: {all:?}");
    Ok(all)
}

fn bridges(bed: &mut Bed) -> Result<()> {
    bed.publish("shm0")?;
    bed.publish("accel1")?;
    for (provider, wanted) in [
        ("accel0", &BELOW[..]),
        // Below another root port.
        ("shm0", &["pcie.0", "rp0", "rp1", "sw0", "sw0-port1", "root_complex"]),
        // Below another host bridge.
        (
            "accel1",
            &["hb1", "pcie.0", "rp0", "rp2", "sw0", "sw0-port1", "root_complex"],
        ),
    ] {
        let found = crossed(bed, provider)?;
        let wanted: Vec<(String, u64)> = wanted.iter().map(|name| ((*name).to_owned(), LEN as u64)).collect();
        ensure!(found == wanted, "{provider}: {found:?}, expected {wanted:?}");
    }
    Ok(())
}
