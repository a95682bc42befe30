// SPDX-License-Identifier: MIT OR Apache-2.0

//! What a node uses: instructions of its processor, interrupts of its NIC, and the counters of its device models.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
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

/// Counters of the device models of this node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Devices {
    /// Bytes of host memory that NIC and accelerator accessed: payload, work requests, completions, records, commands.
    pub host: u64,
    /// Bytes of payload in host memory that the NIC accessed.
    pub payload_host: u64,
    /// Accesses of the processor to registers of NIC and accelerator, and to memory that traps.
    pub trapped: u64,
    /// Doorbells of the NIC that the accelerator rang.
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
                    all.trapped += registers.iter().take(2).filter_map(Value::as_u64).sum::<u64>();
                }
                Some("accel") => {
                    all.host += get(&["host_read"])? + get(&["host_written"])? + get(&["poll_host_read"])?;
                    all.trapped += get(&["register_reads"])? + get(&["register_writes"])?;
                    // Programs map the memory. If the emulator trapped it, an access would have at most 8 bytes.
                    all.trapped += (get(&["trapped_read"])? + get(&["trapped_written"])?).div_ceil(8);
                    // A store of 8 bytes by a message rings a doorbell.
                    all.rung += get(&["message_written"])? / 8;
                }
                _ => {}
            }
        }
        // The NIC also counts the doorbells that the accelerator rang, which no processor executed.
        all.trapped = all.trapped.saturating_sub(all.rung);
        Ok(all)
    }

    /// Returns the difference to earlier values.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            host: self.host.saturating_sub(earlier.host),
            payload_host: self.payload_host.saturating_sub(earlier.payload_host),
            trapped: self.trapped.saturating_sub(earlier.trapped),
            rung: self.rung.saturating_sub(earlier.rung),
        }
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
    fn doorbells_of_the_accelerator_do_not_count_as_trapped() {
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
        let counted = Devices::of(&json!({"nic0": nic(20), "accel0": accel, "bridges": {"kind": "bridges"}})).unwrap();
        let expected = Devices {
            host: 126,
            payload_host: 33,
            trapped: 5 + 20 + 10 + 2 - 10,
            rung: 10,
        };
        assert_eq!(counted, expected);
        assert_eq!(counted.since(expected), Devices::default());
        assert!(Devices::of(&json!({"nic0": {"kind": "nic", "counters": {}}})).is_err());
    }
}
