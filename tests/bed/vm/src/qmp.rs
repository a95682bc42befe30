// SPDX-License-Identifier: MIT OR Apache-2.0

//! A client of the QEMU Machine Protocol (QMP), with the commands that the runner needs.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use p2pmem_guest::in_time;
use p2pmem_guest::limits::Overrun;
use serde_json::{Value, json};

/// The time limit for a command.
const LIMIT: Duration = Duration::from_secs(120);

/// A connection.
#[derive(Debug)]
pub struct Qmp {
    from: BufReader<UnixStream>,
    to: UnixStream,
    events: VecDeque<Value>,
    next: u64,
}

/// A memory BAR of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its number.
    pub bar: u64,
    /// Its first bus address.
    pub address: u64,
    /// Its size in bytes.
    pub size: u64,
}

/// A PCI function, from QEMU's point of view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its identifier on the command line.
    pub id: String,
    /// Its address, `0000:03:00.0`.
    pub bdf: String,
    /// The memory BARs that are mapped at present.
    pub regions: Vec<Region>,
}

impl Qmp {
    /// Takes over a new connection.
    ///
    /// # Errors
    ///
    /// QEMU sends no greeting, or refuses the connection.
    pub fn new(stream: UnixStream) -> Result<Qmp> {
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let mut qmp = Qmp {
            from: BufReader::new(stream.try_clone()?),
            to: stream,
            events: VecDeque::new(),
            next: 0,
        };
        let greeting = qmp.read()?;
        if greeting.get("QMP").is_none() {
            bail!("QEMU's greeting is {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(0) => bail!("QEMU closed its monitor"),
            Ok(_) => {}
            Err(e) if is_late(&e) => bail!(Overrun(format!("QEMU did not answer in time: {e}"))),
            Err(e) => return Err(e).context("waiting for QEMU"),
        }
        serde_json::from_str(&line).with_context(|| format!("QEMU's monitor said {line:?}"))
    }

    /// Runs a command. Events that arrive meanwhile are kept for [`Qmp::wait_event`].
    ///
    /// # Errors
    ///
    /// QEMU refuses the command (the error has its message), or the connection is broken.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.next += 1;
        let id = self.next;
        let mut line = serde_json::to_vec(&json!({ "execute": command, "arguments": arguments, "id": id }))?;
        line.push(b'\n');
        self.to
            .write_all(&line)
            .with_context(|| format!("QEMU's monitor, {command}"))?;
        loop {
            let mut answer = self.read().with_context(|| command.to_owned())?;
            if answer.get("event").is_some() {
                self.events.push_back(answer);
            } else if answer.get("id") == Some(&json!(id)) {
                if let Some(error) = answer.get("error") {
                    return Err(anyhow!("{command}: {}", error["desc"].as_str().unwrap_or("refused")));
                }
                return Ok(answer["return"].take());
            }
        }
    }

    /// Waits for an event that `accept` accepts.
    ///
    /// # Errors
    ///
    /// There is no such event before the deadline, or the connection is broken.
    pub fn wait_event(&mut self, deadline: Instant, what: &str, accept: impl Fn(&Value) -> bool) -> Result<Value> {
        loop {
            while let Some(event) = self.events.pop_front() {
                if accept(&event) {
                    return Ok(event);
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            in_time!(!left.is_zero(), "{what} did not come in time");
            self.to.set_read_timeout(Some(left))?;
            let answer = self.read().with_context(|| format!("waiting for {what}"));
            self.to.set_read_timeout(Some(LIMIT))?;
            let answer = answer?;
            if answer.get("event").is_some() {
                self.events.push_back(answer);
            }
        }
    }

    /// Returns all PCI functions that have an identifier.
    ///
    /// # Errors
    ///
    /// Those of [`Qmp::execute`].
    pub fn functions(&mut self) -> Result<Vec<Function>> {
        let buses = self.execute("query-pci", json!({}))?;
        let mut found = Vec::new();
        for bus in buses.as_array().into_iter().flatten() {
            collect(&bus["devices"], &mut found);
        }
        Ok(found)
    }
}

/// Returns whether a read ended because of its time-out.
pub fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn collect(devices: &Value, found: &mut Vec<Function>) {
    for device in devices.as_array().into_iter().flatten() {
        let number = |key: &str| device[key].as_u64().unwrap_or(0);
        let regions = device["regions"].as_array().into_iter().flatten().filter_map(|region| {
            let address = region["address"]
                .as_i64()
                .filter(|&a| a > 0 && region["type"] == "memory")?;
            Some(Region {
                bar: region["bar"].as_u64()?,
                address: address as u64,
                size: region["size"].as_u64()?,
            })
        });
        if let Some(id) = device["qdev_id"].as_str().filter(|id| !id.is_empty()) {
            found.push(Function {
                id: id.to_owned(),
                bdf: format!(
                    "0000:{:02x}:{:02x}.{:x}",
                    number("bus"),
                    number("slot"),
                    number("function")
                ),
                regions: regions.collect(),
            });
        }
        collect(&device["pci_bridge"]["devices"], found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_below_bridges_are_found() {
        let devices = json!([
            { "bus": 0, "slot": 2, "function": 0, "qdev_id": "rp0", "regions": [],
              "pci_bridge": { "bus": {}, "devices": [
                { "bus": 1, "slot": 0, "function": 3, "qdev_id": "accel0", "regions": [
                    { "bar": 0, "type": "memory", "address": 4096, "size": 65536 },
                    { "bar": 1, "type": "io", "address": 4096, "size": 32 },
                    { "bar": 2, "type": "memory", "address": -1, "size": 1048576 } ] } ] } },
            { "bus": 0, "slot": 3, "function": 0, "qdev_id": "", "regions": [] }
        ]);
        let mut found = Vec::new();
        collect(&devices, &mut found);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].id, "accel0");
        assert_eq!(found[1].bdf, "0000:01:00.3");
        assert_eq!(
            found[1].regions,
            [Region {
                bar: 0,
                address: 4096,
                size: 65536
            }]
        );
    }
}
