// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tracepoints: trace-cmd records the operations of a program.

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
        about: "trace-cmd records allocations, mappings, registrations, revocations and decisions, with their arguments and results",
        topology: "small",
        ruins: false,
        run: recorded,
    },
    Case {
        name: "trace-off",
        about: "each event has a jump label, which is off unless the event is recorded",
        topology: "small",
        ruins: false,
        run: off,
    },
];

/// The program that is recorded.
pub(super) const PART: &str = "trace";

/// All events of the module.
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

/// An event, and those of its fields whose values are known.
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

    /// Whether the event has the name and all fields of another one.
    fn matches(&self, other: &Event) -> bool {
        let equal = |(field, value): (&String, &String)| self.fields.get(field) == Some(value);
        self.name == other.name && other.fields.iter().all(equal)
    }
}

/// The number of a buffer in debugfs, by its offset in the BAR.
fn number(function: &str, bar_offset: u64) -> Result<u64> {
    let text = fs::read_to_string("/sys/kernel/debug/p2pmem/buffers").context("debugfs: buffers")?;
    let place = format!("{bar_offset:#x}");
    let mut rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found = rows.find(|row| row.get(1) == Some(&function) && row.get(3) == Some(&place.as_str()));
    let row = found.with_context(|| format!("debugfs has no buffer of {function} at {place}:\n{text}"))?;
    Ok(row[0].parse()?)
}

/// The recorded program: performs each operation once, and writes the expected events to a file.
pub(super) fn part(arguments: &[String]) -> Result<()> {
    let path = arguments
        .first()
        .context("the argument with the output file is missing")?;
    let bed = Bed {
        devices: crate::devices::load()?,
    };
    let provider = bed.provider("accel0")?;
    let function = bed.device("accel0")?.bdf.clone();
    let drive = bed.device("nvme0")?.bdf.clone();
    let file = open()?;
    let fd = file.as_fd();
    let mut expected_events = Vec::new();

    // A buffer near a drive, from its allocation to its end.
    let size = 3 * PAGE;
    let mut arg = request(size);
    arg.req.nr_clients = 1;
    let mut clients = [bed.address("nvme0")?];
    sys::alloc(fd, &mut arg, Memory::Slice(&mut clients)).map_err(errno)?;
    let buffer = number(&function, arg.bar_offset)?;
    let buffer_event = |more: &[(&str, &dyn ToString)], buffer: u64, size: u64, name: &str| {
        let mut event = Event::new(name, more);
        let common = Event::new(
            "",
            &[
                ("buffer", &buffer),
                ("size", &size),
                ("provider", &provider.id),
                ("function", &function),
            ],
        );
        event.fields.extend(common.fields);
        event
    };
    let place = format!("{:#x}", arg.bar_offset);
    expected_events.push(buffer_event(
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
    expected_events.push(decision(size, 1, provider.id, 0, false));

    let mapping = Mapping::shared(fd, arg.mmap_offset + PAGE, 2 * PAGE as usize).map_err(errno)?;
    expected_events.push(buffer_event(
        &[("offset", &PAGE), ("length", &(2 * PAGE))],
        buffer,
        size,
        "p2pmem_map",
    ));
    drop(mapping);

    // The drive imports one page of it.
    let dma_buf = export(fd, arg.handle, 0, &[(PAGE, PAGE)]).map_err(errno)?;
    let importer = Importer::mapped(&bed, &dma_buf, "nvme0", "p2p notify")?;
    expected_events.push(buffer_event(
        &[("method", &"dma-buf"), ("length", &PAGE), ("device", &drive)],
        buffer,
        size,
        "p2pmem_register",
    ));
    drop((importer, dma_buf));
    free(fd, arg.handle).map_err(errno)?;

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
    expect("ALLOC of more than the provider's size", alloc(fd, huge), libc::ENODEV)?;

    // A buffer that is revoked.
    let taken = alloc(fd, PAGE).map_err(errno)?;
    let last = number(&function, taken.bar_offset)?;
    let mapping = Mapping::shared(fd, taken.mmap_offset, PAGE as usize).map_err(errno)?;
    // A work item of the kernel may release the last holder of the first buffer after close().
    let gone = buffer_event(&[], buffer, size, "p2pmem_free");
    bed.unpublish("accel0")?;
    expected_events.extend([
        gone,
        decision(PAGE, 0, provider.id, 0, true),
        decision(huge, 0, 0, libc::ENODEV, false),
        buffer_event(&[("uid", &0)], last, PAGE, "p2pmem_alloc"),
        decision(PAGE, 0, provider.id, 0, false),
        buffer_event(&[("offset", &0), ("length", &PAGE)], last, PAGE, "p2pmem_map"),
        buffer_event(&[("mappings", &1), ("exports", &0)], last, PAGE, "p2pmem_revoke"),
        buffer_event(&[], last, PAGE, "p2pmem_free"),
    ]);
    drop(mapping);
    fs::write(path, serde_json::to_vec(&expected_events)?).with_context(|| path.clone())
}

fn recorded(bed: &mut Bed) -> Result<()> {
    // Load the importer's module before the recording.
    drop(Importer::new()?);
    let me = std::env::current_exe()?;
    let me = me.to_str().context("the path of this program is not UTF-8")?;
    let (record, expected_path) = ("/tmp/p2pmem-trace.dat", "/tmp/p2pmem-trace.json");
    fs::write(expected_path, "")?;
    command(
        "trace-cmd",
        &[
            "record",
            "-q",
            "-e",
            "p2pmem",
            "-o",
            record,
            me,
            "part",
            PART,
            expected_path,
        ],
    )?;
    let report = Command::new("trace-cmd").args(["report", "-i", record]).output()?;
    ensure!(report.status.success(), "{}", String::from_utf8_lossy(&report.stderr));
    let report = String::from_utf8_lossy(&report.stdout).into_owned();
    let events: Vec<Event> = report.lines().filter_map(Event::parse).collect();
    // trace-cmd does not return the program's exit status.
    let expected_events = fs::read(expected_path)?;
    ensure!(
        !expected_events.is_empty(),
        "the recorded program failed; recorded:\n{report}"
    );
    let expected_events: Vec<Event> = serde_json::from_slice(&expected_events)?;
    // The events are in the program's order, except that p2pmem_free may come after the last close().
    let order = |events: &mut Vec<&Event>| events.sort_by_key(|event| event.name == "p2pmem_free");
    let (mut got, mut expected) = (
        events.iter().collect::<Vec<_>>(),
        expected_events.iter().collect::<Vec<_>>(),
    );
    order(&mut got);
    order(&mut expected);
    let matching =
        got.len() == expected.len() && got.iter().zip(&expected).all(|(got, expected)| got.matches(expected));
    ensure!(matching, "expected:\n{expected:#?}\nrecorded:\n{report}");
    for name in EVENTS {
        ensure!(
            got.iter().any(|event| event.name == name),
            "the program has no {name} event"
        );
    }
    // All decisions and buffers are of the program's only file.
    let mut files: Vec<_> = got.iter().filter_map(|event| event.fields.get("file")).collect();
    files.dedup();
    ensure!(
        files.len() == 1,
        "the events name {files:?}, but the program had one file"
    );
    bed.publish("accel0")
}

fn off(_: &mut Bed) -> Result<()> {
    // The events are off while nothing records.
    for event in EVENTS {
        let path = Path::new(TRACING).join("events/p2pmem").join(event).join("enable");
        let on = super::read(&path)?;
        ensure!(on == "0", "{} is {on}, expected 0", path.display());
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
        // One jump label in the C function that emits the event, and at least one at the caller.
        match labels.get(event) {
            Some(2..) => {}
            other => bail!("{event} has {other:?} jump labels, expected at least 2"),
        }
    }
    Ok(())
}
