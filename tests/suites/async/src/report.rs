// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the measurement between two guests: its rows, the aims, and what failed.

use p2pmem_async::wqe::Transport;
use p2pmem_vm::demo::{self, Verdict};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::two_nodes::{Measured, Mode, Parameters};

/// How many times fewer accesses to registers a message must take if the accelerator drives the NIC.
const FEWER_TRAPS: f64 = 5.0;

/// From this number on, instructions for a message are not 0 while the processors sleep. An interrupt of the kernel's timer
/// while the program falls asleep adds a few thousand instructions, once.
const NO_INSTRUCTIONS: f64 = 10.0;
/// From this number on, register accesses for a message are not 0 while the processors sleep. The driver of the NIC reads a few
/// registers each second, also on a slow machine.
const NO_ACCESSES: f64 = 0.5;
/// Iterations from which on register accesses are compared: with fewer, those at the begin and the end of a run count.
const ENOUGH_ITERATIONS: u32 = 50;

/// What both nodes did while their processors slept.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Between {
    /// Messages of both nodes meanwhile.
    pub messages: u64,
    /// Instructions of the programs of both nodes, and of their kernels for them.
    pub program_instructions: u64,
    /// The same while nothing was submitted.
    pub idle_program_instructions: u64,
    /// Instructions of the programs for each message, beyond those of idle nodes.
    pub cpu_instructions_per_message: f64,
    /// Instructions of all tasks of both nodes: threads of the kernel, which work at fixed times.
    pub all_instructions: u64,
    /// The same while nothing was submitted.
    pub all_idle_instructions: u64,
    /// Interrupts of the NICs.
    pub nic_interrupts: u64,
    /// Accesses of the processors to registers of NICs and accelerators.
    pub trapped: u64,
    /// Bytes of host memory that NICs and accelerators accessed.
    pub host_bytes: u64,
}

/// One measurement. Numbers for a message are the sums of both nodes, divided by the messages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What drives the nodes.
    pub mode: Mode,
    /// The transport.
    pub transport: Transport,
    /// Bytes of a message.
    pub size: u32,
    /// Iterations of a batch.
    pub batch: u32,
    /// Iterations. Each has a message in both directions and a computation on both nodes.
    pub iterations: u32,
    /// Microseconds of an iteration by the host's clock.
    pub us_per_iteration: f64,
    /// Instructions of all tasks: posting, submitting, and waiting included.
    pub cpu_instructions_per_message: f64,
    /// Instructions of the program and of the kernel for it, as microseconds at one instruction each nanosecond.
    pub cpu_us_per_message: f64,
    /// Accesses of the processors to registers of NICs and accelerators.
    pub trapped_per_message: f64,
    /// Interrupts of the NICs.
    pub interrupts_per_message: f64,
    /// Bytes of host memory that NICs and accelerators accessed, for all messages: payload, work requests, completions, records.
    pub host_bytes: u64,
    /// Bytes of them that are payload.
    pub host_payload: u64,
    /// Whether both nodes have the right payload.
    pub verified: bool,
    /// What happened while the processors slept, if the accelerators drive the NICs.
    pub between_batches: Option<Between>,
}

impl Row {
    /// Combines the measurements of both nodes. `None` if their kernels do not count instructions.
    pub fn new(parameters: &Parameters, nodes: &[Measured; 2]) -> Option<Self> {
        let sum = |of: fn(&Measured) -> u64| nodes.iter().map(of).sum::<u64>();
        let instructions = nodes[0].instructions? + nodes[1].instructions?;
        // A message is sent by one node and received by the other one.
        let messages = nodes[0].messages as f64;
        let each = |of: fn(&Measured) -> u64| sum(of) as f64 / messages;
        let between = match (nodes[0].steady, nodes[1].steady) {
            (Some(a), Some(b)) => {
                let instructions = a.program_instructions + b.program_instructions;
                let idle = a.idle_program_instructions + b.idle_program_instructions;
                let messages = a.messages.min(b.messages);
                Some(Between {
                    messages,
                    program_instructions: instructions,
                    idle_program_instructions: idle,
                    all_instructions: a.instructions? + b.instructions?,
                    all_idle_instructions: a.idle_instructions? + b.idle_instructions?,
                    cpu_instructions_per_message: instructions.saturating_sub(idle) as f64 / messages.max(1) as f64,
                    nic_interrupts: a.interrupts + b.interrupts,
                    trapped: a.trapped + b.trapped,
                    host_bytes: a.host_bytes + b.host_bytes,
                })
            }
            _ => None,
        };
        let nanoseconds = nodes.iter().map(|node| node.nanoseconds).max().unwrap_or(0);
        Some(Self {
            mode: parameters.mode,
            transport: parameters.transport,
            size: parameters.size,
            batch: parameters.batch,
            iterations: parameters.iterations,
            us_per_iteration: nanoseconds as f64 / 1e3 / f64::from(parameters.iterations),
            cpu_instructions_per_message: instructions as f64 / messages,
            cpu_us_per_message: each(|node| node.program_instructions) / 1e3,
            trapped_per_message: each(|node| node.trapped),
            interrupts_per_message: each(|node| node.interrupts),
            host_bytes: sum(|node| node.host_bytes),
            host_payload: sum(|node| node.host_payload),
            verified: nodes.iter().all(|node| node.verified),
            between_batches: between,
        })
    }

    /// Returns the name of the row.
    pub fn name(&self) -> String {
        format!("{}, {}", self.mode_name(), self.message_name())
    }

    /// Returns transport and size of the messages, in words.
    pub fn message_name(&self) -> String {
        let transport = match self.transport {
            Transport::Rc => "RC",
            Transport::Ud => "UD",
        };
        format!("{transport}, {} bytes", self.size)
    }

    /// Returns what drives the nodes, in words.
    pub fn mode_name(&self) -> &'static str {
        match self.mode {
            Mode::CpuPolling => "processor, polling",
            Mode::CpuEvents => "processor, events",
            Mode::Device => "accelerator",
        }
    }

    /// Returns whether both rows measured the same messages.
    fn is_like(&self, other: &Self) -> bool {
        (self.transport, self.size, self.batch) == (other.transport, other.size, other.batch)
    }
}

/// Byte code that ended in the middle, and the error that the processor saw.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Aborted {
    /// What was done.
    pub case: String,
    /// The error.
    pub error: String,
}

/// The measurement on a real GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RealGpu {
    /// The GPU.
    pub device: Option<String>,
    /// What the GPU executes, by row: its program's report.
    pub table: Value,
    /// Why there is none.
    pub why: Option<String>,
}

/// The report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Whether all aims are met, and what failed.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The measurements.
    pub table: Vec<Row>,
    /// Runs that ended in the middle.
    pub aborted: Vec<Aborted>,
    /// The measurement on a real GPU.
    pub real_gpu: RealGpu,
}

/// Returns which aims of the table are missed.
pub fn missed(table: &[Row]) -> Vec<String> {
    let mut failures = Vec::new();
    for row in table {
        let mut fail = |what: String| failures.push(format!("{}: {what}", row.name()));
        if !row.verified {
            fail("the payload is wrong".into());
        }
        if row.host_payload != 0 {
            fail(format!("{} bytes of payload in host memory", row.host_payload));
        }
        if row.mode != Mode::Device {
            continue;
        }
        if row.host_bytes != 0 {
            fail(format!(
                "NICs and accelerators accessed {} bytes of host memory, and 0 are expected",
                row.host_bytes
            ));
        }
        if let Some(between) = &row.between_batches {
            if between.trapped as f64 / between.messages.max(1) as f64 >= NO_ACCESSES {
                fail(format!(
                    "{} accesses to registers for {} messages while the processors slept",
                    between.trapped, between.messages
                ));
            }
            if between.cpu_instructions_per_message >= NO_INSTRUCTIONS {
                fail(format!(
                    "{:.1} instructions for a message while the processors slept",
                    between.cpu_instructions_per_message
                ));
            }
            if between.nic_interrupts != 0 || between.host_bytes != 0 {
                fail(format!(
                    "{} interrupts and {} bytes of host memory while the processors slept",
                    between.nic_interrupts, between.host_bytes
                ));
            }
        }
        for baseline in table
            .iter()
            .filter(|other| other.mode != Mode::Device && other.is_like(row) && row.iterations >= ENOUGH_ITERATIONS)
        {
            let ratio = baseline.trapped_per_message / row.trapped_per_message;
            if ratio < FEWER_TRAPS {
                fail(format!(
                    "{ratio:.1} times fewer accesses to registers than by the {}, and {FEWER_TRAPS} are expected",
                    baseline.mode_name()
                ));
            }
        }
    }
    if !table.iter().any(|row| row.between_batches.is_some()) {
        failures.push("no measurement while the processors slept".into());
    }
    failures
}

impl demo::Report for Report {
    fn verdict(&mut self) -> &mut Verdict {
        &mut self.verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::two_nodes::Steady;

    fn parameters(mode: Mode) -> Parameters {
        Parameters {
            mode,
            transport: Transport::Rc,
            size: 128,
            batch: 20,
            iterations: 100,
            steady: 0,
        }
    }

    fn measured(trapped: u64, host_bytes: u64) -> Measured {
        Measured {
            messages: 200,
            nanoseconds: 1_000_000,
            instructions: Some(40_000),
            program_instructions: 20_000,
            interrupts: 0,
            trapped,
            host_bytes,
            host_payload: 0,
            verified: true,
            steady: None,
        }
    }

    fn steady(instructions: u64) -> Option<Steady> {
        Some(Steady {
            messages: 1000,
            program_instructions: instructions,
            idle_program_instructions: 5000,
            instructions: Some(1_000_000),
            idle_instructions: Some(2_000_000),
            interrupts: 0,
            trapped: 1,
            host_bytes: 0,
        })
    }

    fn rows(device: Measured) -> Vec<Row> {
        let cpu = measured(400, 9000);
        let row = |mode, measured| Row::new(&parameters(mode), &[measured, measured]).unwrap();
        vec![row(Mode::CpuPolling, cpu), row(Mode::Device, device)]
    }

    #[test]
    fn numbers_of_both_nodes_are_added() {
        let row = &rows(measured(0, 0))[0];
        assert_eq!(row.trapped_per_message, 4.0);
        assert_eq!(row.cpu_instructions_per_message, 400.0);
        assert_eq!(row.us_per_iteration, 10.0);
        assert_eq!(row.host_bytes, 18_000);
    }

    #[test]
    fn aims_are_checked() {
        let good = Measured {
            steady: steady(5100),
            ..measured(10, 0)
        };
        assert_eq!(missed(&rows(good)), Vec::<String>::new());
        for (bad, what) in [
            (
                Measured {
                    verified: false,
                    ..good
                },
                "the payload is wrong",
            ),
            (
                Measured {
                    host_payload: 1,
                    ..good
                },
                "bytes of payload in host",
            ),
            (Measured { host_bytes: 64, ..good }, "accessed 128 bytes of host memory"),
            (Measured { trapped: 100, ..good }, "times fewer accesses"),
            (
                Measured {
                    steady: steady(5100).map(|steady| Steady { trapped: 300, ..steady }),
                    ..good
                },
                "600 accesses to registers for 1000 messages",
            ),
            (
                Measured {
                    steady: steady(20_000),
                    ..good
                },
                "instructions for a message while the processors slept",
            ),
            (
                Measured { steady: None, ..good },
                "no measurement while the processors slept",
            ),
        ] {
            let failures = missed(&rows(bad));
            assert!(
                failures.iter().any(|failure| failure.contains(what)),
                "{what}: {failures:?}"
            );
        }
    }
}
