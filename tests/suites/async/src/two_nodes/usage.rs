// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a node uses: instructions of its processor, interrupts of its NIC, and the counters of its device models.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use p2pmem_guest::host;
use p2pmem_guest::wire::Request;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

/// What the processor did until now.
///
/// The guest's clocks count the instructions of its only processor, one nanosecond each, and go on while it is idle. The
/// scheduler adds up the time of all tasks, so this time is the number of their instructions. Interrupts that come while no
/// task runs are not in this time.
#[derive(Debug, Clone, Copy)]
pub struct Processor {
    /// Instructions of all tasks: programs, the kernel for them, threads of the kernel. `None` if the kernel does not add up
    /// their time (CONFIG_SCHEDSTATS).
    pub instructions: Option<u64>,
    /// Instructions of this program, and of the kernel for it.
    pub program: u64,
    /// Interrupts of the NIC's driver.
    pub interrupts: u64,
}

fn now(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    // Clocks that start at zero have no negative times.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the instructions of the calling thread, and of the kernel for it.
pub fn thread_instructions() -> u64 {
    now(ClockId::ThreadCPUTime)
}

/// Returns the sum of the numbers in a line of `/proc/interrupts` after its name, one for each processor.
fn interrupts_of(line: &str) -> u64 {
    let numbers = line.split_whitespace().skip(1);
    numbers.map_while(|word| word.parse::<u64>().ok()).sum()
}

/// Returns the time of all tasks in nanoseconds from the text of `/proc/schedstat`: of the first processor. `None` if the
/// format has another version.
fn task_time(text: &str) -> Option<u64> {
    text.strip_prefix("version 17\n")?;
    let line = text.lines().find_map(|line| line.strip_prefix("cpu0 "))?;
    line.split_whitespace().nth(6)?.parse().ok()
}

impl Processor {
    /// Reads the present values.
    ///
    /// # Errors
    ///
    /// A file of the kernel cannot be read.
    pub fn read() -> Result<Self> {
        let interrupts = fs::read_to_string("/proc/interrupts").context("/proc/interrupts")?;
        // The scheduler adds a task's time when another task runs.
        thread::sleep(Duration::from_nanos(1));
        let times = fs::read_to_string("/proc/schedstat").ok();
        Ok(Self {
            instructions: times.as_deref().and_then(task_time),
            program: now(ClockId::ProcessCPUTime),
            interrupts: interrupts
                .lines()
                .filter(|line| line.contains("mlx5"))
                .map(interrupts_of)
                .sum(),
        })
    }

    /// Returns what the processor did since an earlier reading.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            instructions: self
                .instructions
                .zip(earlier.instructions)
                .map(|(later, earlier)| later.saturating_sub(earlier)),
            program: self.program.saturating_sub(earlier.program),
            interrupts: self.interrupts.saturating_sub(earlier.interrupts),
        }
    }
}

/// Bytes of a doorbell.
const DOORBELL: u64 = 8;

/// Counters of the device models of this node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Devices {
    /// Bytes of host memory that NIC and accelerator accessed: payload, work requests, completions, records, commands.
    pub host: u64,
    /// Bytes of payload in host memory that the NIC accessed.
    pub payload_host: u64,
    /// Accesses to registers of NIC and accelerator, and to memory that traps: those of the processor, and the doorbells of the NIC
    /// that the accelerator rang. The model of the NIC does not see who accesses a register.
    pub accesses: u64,
    /// Doorbells of the NIC that the accelerator rang, by the model of the accelerator.
    pub rung: u64,
}

fn number(value: &Value, path: &[&str]) -> Result<u64> {
    let found = path.iter().fold(value, |value, key| &value[*key]);
    found
        .as_u64()
        .with_context(|| format!("counters without {}", path.join(".")))
}

impl Devices {
    /// Asks the test bed for the present values.
    ///
    /// # Errors
    ///
    /// The program does not run in a guest of the test bed, or the counters have an unknown form.
    pub fn read() -> Result<Self> {
        Self::of(&host::request(&Request::Snapshot)?)
    }

    /// Adds up the counters of all devices of a node.
    fn of(snapshot: &Value) -> Result<Self> {
        let mut all = Self::default();
        for device in snapshot.as_object().context("a snapshot is a map of devices")?.values() {
            let counters = &device["counters"];
            let get = |path: &[&str]| number(counters, path);
            match device["kind"].as_str() {
                Some("nic") => {
                    let host = &counters["bus"]["host"];
                    // The models list targets that were accessed.
                    if host.is_object() {
                        all.host += number(host, &["read"])? + number(host, &["written"])?;
                    }
                    all.payload_host += get(&["payload", "host_read"])? + get(&["payload", "host_written"])?;
                    all.payload_host += get(&["datagrams", "host_read"])? + get(&["datagrams", "host_written"])?;
                    let registers = counters["registers"].as_array().context("counters without registers")?;
                    let [Some(reads), Some(writes)] = [0, 1].map(|at| registers.get(at).and_then(Value::as_u64)) else {
                        bail!("registers are {registers:?}, not numbers of reads and writes");
                    };
                    all.accesses += reads + writes;
                }
                Some("accel") => {
                    all.host += get(&["host_read"])? + get(&["host_written"])? + get(&["poll_host_read"])?;
                    all.accesses += get(&["register_reads"])? + get(&["register_writes"])?;
                    // Programs map the memory. If the emulator trapped it, an access would have at most 8 bytes.
                    all.accesses += (get(&["trapped_read"])? + get(&["trapped_written"])?).div_ceil(8);
                    // The accelerator accesses all else by a mapping.
                    let messages = get(&["message_written"])?;
                    ensure!(
                        messages % DOORBELL == 0,
                        "{messages} bytes by messages are no doorbells"
                    );
                    all.rung += messages / DOORBELL;
                }
                _ => {}
            }
        }
        Ok(all)
    }

    /// Returns the difference to earlier values.
    ///
    /// # Errors
    ///
    /// A counter went backwards.
    pub fn since(self, earlier: Self) -> Result<Self> {
        let difference = |of: fn(&Self) -> u64| {
            let (later, earlier) = (of(&self), of(&earlier));
            later
                .checked_sub(earlier)
                .with_context(|| format!("a counter went from {earlier} to {later}"))
        };
        Ok(Self {
            host: difference(|devices| devices.host)?,
            payload_host: difference(|devices| devices.payload_host)?,
            accesses: difference(|devices| devices.accesses)?,
            rung: difference(|devices| devices.rung)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn time_of_tasks_is_found() {
        let text = "version 17\ntimestamp 4294892296\ncpu0 1 0 2 3 4 5 123456789 6 7\ndomain0 SMT 1\n";
        assert_eq!(task_time(text), Some(123_456_789));
        assert_eq!(task_time("version 17\n"), None);
        assert_eq!(task_time(&text.replace("17", "18")), None);
    }

    #[test]
    fn interrupts_of_all_processors_are_added() {
        assert_eq!(
            interrupts_of(" 24:  10  5  PCI-MSIX-0000:03:00.0 0-edge mlx5_async0"),
            15
        );
        assert_eq!(interrupts_of(" 24: PCI-MSIX"), 0);
    }

    #[test]
    fn accesses_and_doorbells_are_counted() {
        let nic = |registers: u64| {
            json!({"kind": "nic", "counters": {
                "bus": {"host": {"read": 100, "written": 20}, "accel0": {"read": 7, "written": 7}},
                "payload": {"host_read": 30, "host_written": 1},
                "datagrams": {"host_read": 2, "host_written": 0},
                "registers": [5, registers, 9],
            }})
        };
        let accel = json!({"kind": "accel", "counters": {
            "host_read": 1, "host_written": 2, "poll_host_read": 3,
            "register_reads": 4, "register_writes": 6, "message_written": 80,
            "trapped_read": 9, "trapped_written": 0,
        }});
        let counted = Devices::of(&json!({"nic0": nic(20), "accel0": &accel, "bridges": {"kind": "bridges"}})).unwrap();
        let expected = Devices {
            host: 126,
            payload_host: 33,
            accesses: 5 + 20 + 10 + 2,
            rung: 10,
        };
        assert_eq!(counted, expected);
        assert_eq!(counted.since(expected).unwrap(), Devices::default());
        let more = Devices { rung: 11, ..expected };
        assert!(counted.since(more).is_err(), "a counter does not go backwards");
        let mut accel = accel;
        accel["counters"]["message_written"] = json!(81);
        assert!(
            Devices::of(&json!({"accel0": accel})).is_err(),
            "81 bytes are no doorbells"
        );
        assert!(Devices::of(&json!({"nic0": {"kind": "nic", "counters": {}}})).is_err());
        let mut nic = nic(20);
        nic["counters"]["registers"] = json!([5]);
        assert!(Devices::of(&json!({"nic0": nic})).is_err(), "writes are missing");
    }
}
