// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tracepoints: the events that trace-cmd records of a program are the program's operations.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_sys as abi;
use serde::{Deserialize, Serialize};

use super::dmabuf::{Importer, export};
use super::{Bed, Case, alloc, command, errno, expect, free, open, request};
use crate::sys::{self, Mapping, Memory};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "trace",
        about: "trace-cmd records allocations, mappings, registrations, revocations and decisions, with what was done",
        topology: "small",
        ruins: false,
        run: recorded,
    },
    Case {
        name: "trace-off",
        about: "where an event would be there is a jump label, which is off unless somebody records",
        topology: "small",
        ruins: false,
        run: off,
    },
];

/// The name of the program that is recorded.
pub(super) const PART: &str = "trace";

/// All events.
const EVENTS: [&str; 6] = [
    "p2pmem_alloc",
    "p2pmem_free",
    "p2pmem_map",
    "p2pmem_register",
    "p2pmem_revoke",
    "p2pmem_decision",
];
const PAGE: u64 = 4096;
const TRACING: &str = "/sys/kernel/tracing";

/// An event and those of its fields that are known.
#[derive(Debug, Serialize, Deserialize)]
struct Event {
    name: String,
    fields: BTreeMap<String, String>,
}

impl Event {
    fn new(name: &str, fields: &[(&str, &dyn ToString)]) -> Event {
        Event {
            name: name.to_owned(),
            fields: fields
                .iter()
                .map(|(field, value)| ((*field).to_owned(), value.to_string()))
                .collect(),
        }
    }

    /// Parses a line of `trace-cmd report`: task-pid, processor, time, name, fields.
    fn parse(line: &str) -> Option<Event> {
        let mut words = line.split_whitespace().skip_while(|word| !word.starts_with("p2pmem_"));
        let name = words.next()?.strip_suffix(':')?.to_owned();
        let fields = words
            .map(|word| word.split_once('=').unwrap_or((word, "")))
            .map(|(field, value)| (field.to_owned(), value.to_owned()))
            .collect();
        Some(Event { name, fields })
    }

    /// Returns whether the event has all fields of another one.
    fn says(&self, other: &Event) -> bool {
        let said = |(field, value): (&String, &String)| self.fields.get(field) == Some(value);
        self.name == other.name && other.fields.iter().all(said)
    }
}

/// Returns the number that debugfs has for a buffer, by the buffer's offset in the BAR.
fn number(function: &str, bar_offset: u64) -> Result<u64> {
    let text = fs::read_to_string("/sys/kernel/debug/p2pmem/buffers").context("buffers")?;
    let place = format!("{bar_offset:#x}");
    let mut rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found = rows.find(|row| row.get(1) == Some(&function) && row.get(3) == Some(&place.as_str()));
    let row = found.with_context(|| format!("no buffer of {function} is at {place}:\n{text}"))?;
    Ok(row[0].parse()?)
}

/// The recorded program: does each operation once, and writes down what it did.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let path = arguments.first().context("where to write down what was done")?;
    let bed = Bed {
        devices: crate::devices::load()?,
    };
    let provider = bed.provider("accel0")?;
    let function = bed.device("accel0")?.bdf.clone();
    let drive = bed.device("nvme0")?.bdf.clone();
    let file = open()?;
    let fd = file.as_fd();
    let mut done = Vec::new();

    // A buffer from its allocation to its end, near a drive.
    let size = 3 * PAGE;
    let mut asked = request(size);
    asked.req.nr_clients = 1;
    let mut clients = [bed.address("nvme0")?];
    sys::alloc(fd, &mut asked, Memory::Slice(&mut clients)).map_err(errno)?;
    let buffer = number(&function, asked.bar_offset)?;
    let about = |more: &[(&str, &dyn ToString)], buffer: u64, size: u64, name: &str| {
        let mut event = Event::new(name, more);
        let same = Event::new(
            "",
            &[
                ("buffer", &buffer),
                ("size", &size),
                ("provider", &provider.id),
                ("function", &function),
            ],
        );
        event.fields.extend(same.fields);
        event
    };
    let place = format!("{:#x}", asked.bar_offset);
    done.push(about(
        &[("bar_offset", &place), ("uid", &0)],
        buffer,
        size,
        "p2pmem_alloc",
    ));
    let decision = |size: u64, clients: u32, chosen: u32, error: i32, dry: bool| {
        let mut event = Event::new(
            "p2pmem_decision",
            &[
                ("size", &size),
                ("align", &PAGE),
                ("clients", &clients),
                ("providers", &1),
                ("strategy", &abi::P2PMEM_STRATEGY_NEAREST),
                ("chosen", &chosen),
                ("error", &error),
            ],
        );
        if dry {
            event.fields.insert("dry".to_owned(), String::new());
        }
        event
    };
    done.push(decision(size, 1, provider.id, 0, false));

    let mapping = Mapping::shared(fd, asked.mmap_offset + PAGE, 2 * PAGE as usize).map_err(errno)?;
    done.push(about(
        &[("offset", &PAGE), ("length", &(2 * PAGE))],
        buffer,
        size,
        "p2pmem_map",
    ));
    drop(mapping);

    // One page of the buffer, for the drive.
    let dma_buf = export(fd, asked.handle, 0, &[(PAGE, PAGE)]).map_err(errno)?;
    let importer = Importer::mapped(&bed, &dma_buf, "nvme0", "p2p notify")?;
    done.push(about(
        &[("method", &"dma-buf"), ("length", &PAGE), ("device", &drive)],
        buffer,
        size,
        "p2pmem_register",
    ));
    drop((importer, dma_buf));
    free(fd, asked.handle).map_err(errno)?;

    // Decisions without a buffer.
    let mut explain = abi::p2pmem_explain {
        req: request(PAGE).req,
        ..Default::default()
    };
    sys::explain(
        fd,
        &mut explain,
        Memory::Slice(&mut []),
        Memory::Slice(&mut []),
        Memory::Slice(&mut []),
    )
    .map_err(errno)?;
    let huge = provider.size + PAGE;
    expect("more than there is", alloc(fd, huge), libc::ENODEV)?;

    // A buffer that is revoked.
    let taken = alloc(fd, PAGE).map_err(errno)?;
    let last = number(&function, taken.bar_offset)?;
    let mapping = Mapping::shared(fd, taken.mmap_offset, PAGE as usize).map_err(errno)?;
    // A work item of the kernel may release the last holder of the first buffer after close().
    let gone = about(&[], buffer, size, "p2pmem_free");
    bed.unpublish("accel0")?;
    done.extend([
        gone,
        decision(PAGE, 0, provider.id, 0, true),
        decision(huge, 0, 0, libc::ENODEV, false),
        about(&[("uid", &0)], last, PAGE, "p2pmem_alloc"),
        decision(PAGE, 0, provider.id, 0, false),
        about(&[("offset", &0), ("length", &PAGE)], last, PAGE, "p2pmem_map"),
        about(&[("mappings", &1), ("exports", &0)], last, PAGE, "p2pmem_revoke"),
        about(&[], last, PAGE, "p2pmem_free"),
    ]);
    drop(mapping);
    fs::write(path, serde_json::to_vec(&done)?).with_context(|| path.clone())
}

fn recorded(bed: &mut Bed) -> Result<()> {
    // The module is loaded before: its own events at loading do not matter here.
    drop(Importer::new()?);
    let me = std::env::current_exe()?;
    let me = me.to_str().context("path")?;
    let (record, done) = ("/tmp/p2pmem-trace.dat", "/tmp/p2pmem-trace.json");
    fs::write(done, "")?;
    command(
        "trace-cmd",
        &["record", "-q", "-e", "p2pmem", "-o", record, me, "part", PART, done],
    )?;
    let report = Command::new("trace-cmd").args(["report", "-i", record]).output()?;
    ensure!(report.status.success(), "{}", String::from_utf8_lossy(&report.stderr));
    let report = String::from_utf8_lossy(&report.stdout).into_owned();
    let events: Vec<Event> = report.lines().filter_map(Event::parse).collect();
    // trace-cmd does not report the program's exit status.
    let done = fs::read(done)?;
    ensure!(!done.is_empty(), "the program failed, after:\n{report}");
    let done: Vec<Event> = serde_json::from_slice(&done)?;
    // The events are in the program's order, except that the end of a buffer may come later than its last close().
    let order = |events: &mut Vec<&Event>| events.sort_by_key(|event| event.name == "p2pmem_free");
    let (mut got, mut expected) = (events.iter().collect::<Vec<_>>(), done.iter().collect::<Vec<_>>());
    order(&mut got);
    order(&mut expected);
    let same = got.len() == expected.len() && got.iter().zip(&expected).all(|(got, expected)| got.says(expected));
    ensure!(same, "was done:\n{expected:#?}\nwas recorded:\n{report}");
    for name in EVENTS {
        ensure!(got.iter().any(|event| event.name == name), "{name} was not tried");
    }
    // Every decision, and every buffer, belongs to the program's one file.
    let mut files: Vec<_> = got.iter().filter_map(|event| event.fields.get("file")).collect();
    files.dedup();
    ensure!(
        files.len() == 1,
        "the program had one file, and it was recorded as {files:?}"
    );
    bed.publish("accel0")
}

fn off(_: &mut Bed) -> Result<()> {
    // Off while nothing is recorded.
    for event in EVENTS {
        let path = Path::new(TRACING).join("events/p2pmem").join(event).join("enable");
        let on = super::read(&path)?;
        ensure!(on == "0", "{}: {on}", path.display());
    }
    let module = std::env::var("P2PMEM_MODULE").context("P2PMEM_MODULE")?;
    let output = Command::new("readelf").args(["-rW", &module]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut section = "";
    let mut labels: BTreeMap<&str, u32> = BTreeMap::new();
    for line in text.lines() {
        if line.starts_with("Relocation section") {
            section = line;
        } else if section.contains("'.rela__jump_table'") {
            let symbol = line.split_whitespace().nth(4).unwrap_or_default();
            if let Some(event) = symbol.strip_prefix("__tracepoint_") {
                *labels.entry(event).or_default() += 1;
            }
        }
    }
    for event in EVENTS {
        // One in the C function that emits the event, and at least one where the event occurs.
        match labels.get(event) {
            Some(2..) => {}
            other => bail!("{event} has {other:?} jump labels"),
        }
    }
    Ok(())
}
