// SPDX-License-Identifier: MIT OR Apache-2.0

//! The report of the measurement between two guests: its rows, the aims, and what failed.

use p2pmem_async::wqe::Transport;
use p2pmem_vm::demo::{self, Verdict};
use serde::{Deserialize, Serialize};

use crate::two_nodes::{Measured, Mode, Parameters};

/// How many times fewer accesses to registers a message must take if the accelerator drives the NIC.
const FEWER_TRAPS: f64 = 5.0;

/// From this number on, instructions for a message are not 0 while the processors sleep. An interrupt of the kernel's timer
/// while the program falls asleep adds a few thousand instructions, once.
const NO_INSTRUCTIONS: f64 = 10.0;
/// From this number on, register accesses for a message are not 0 while the processors sleep. The driver of the NIC reads a few
/// registers each second, also on a slow machine.
const NO_ACCESSES: f64 = 0.5;
/// Bytes of the messages that the accelerators also send while the processors sleep.
pub const STEADY_SIZE: u32 = 128;

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
    /// Doorbells of the NICs that the accelerators rang, by the accelerators' counters.
    pub doorbells: u64,
    /// Accesses of the processors to registers of NICs and accelerators: all accesses that the devices counted, without
    /// `doorbells`.
    pub trapped: i64,
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
    /// Doorbells of the NICs that the accelerators rang, by the accelerators' counters.
    pub doorbells: u64,
    /// Accesses of the processors to registers of NICs and accelerators: all accesses that the devices counted, without
    /// `doorbells`.
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

/// Returns the accesses of the processors. A negative number is one of the failures that [`missed`] finds.
fn without(accesses: u64, doorbells: u64) -> i64 {
    // Not truncated: a run has far fewer than 2^63 accesses.
    accesses as i64 - doorbells as i64
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
                    doorbells: a.rung + b.rung,
                    trapped: without(a.accesses + b.accesses, a.rung + b.rung),
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
            doorbells: sum(|node| node.rung),
            trapped_per_message: without(sum(|node| node.accesses), sum(|node| node.rung)) as f64 / messages,
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

/// How byte code ends in the middle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AbortCase {
    /// The accelerator waits for a message that never comes.
    NoMessage,
    /// Byte code is longer than the accelerator's queue.
    TooLong,
    /// The ring has no space for a program.
    FullRing,
    /// More work requests than completions fit.
    Overrun,
    /// A commit on a queue pair in the error state.
    ErrorState,
    /// The other side dies in the middle of a batch.
    OtherSideDies,
    /// The doorbell page is destroyed while the accelerator waits.
    DoorbellRevoked,
    /// [`AbortCase::NoMessage`] after [`AbortCase::DoorbellRevoked`]: the accelerator rings again.
    NoMessageAgain,
}

impl AbortCase {
    /// All cases in their order.
    pub const ALL: [Self; 8] = [
        Self::NoMessage,
        Self::TooLong,
        Self::FullRing,
        Self::Overrun,
        Self::ErrorState,
        Self::OtherSideDies,
        Self::DoorbellRevoked,
        Self::NoMessageAgain,
    ];

    /// Returns what is done, in words.
    pub fn about(self) -> &'static str {
        match self {
            Self::NoMessage => "the accelerator waits for a message that never comes",
            Self::TooLong => "byte code is longer than the accelerator's queue",
            Self::FullRing => "the ring has no space for a program",
            Self::Overrun => "more work requests than completions fit",
            Self::ErrorState => "commit on a queue pair in the error state",
            Self::OtherSideDies => "the other side dies in the middle of a batch",
            Self::DoorbellRevoked => "the doorbell page is destroyed while the accelerator waits",
            Self::NoMessageAgain => {
                "the accelerator waits for a message that never comes, after it lost a doorbell page"
            }
        }
    }

    /// Returns the words that the error must have.
    fn words(self) -> &'static [&'static str] {
        match self {
            Self::NoMessage | Self::NoMessageAgain => &["operation 0 (POLL_", "completions", "time limit"],
            Self::TooLong => &["4 operations"],
            Self::FullRing => &["no space for 2 entries"],
            Self::Overrun => &["completion queue"],
            Self::ErrorState => &["the program gave up"],
            Self::OtherSideDies => &["retr", "error state"],
            Self::DoorbellRevoked => &["operation 3 (STORE_QWORD doorbell"],
        }
    }
}

/// Byte code that ended in the middle, and the error that the processor saw.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aborted {
    /// What was done.
    pub case: AbortCase,
    /// The error.
    pub error: String,
}

/// The report.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Whether all aims are met, and what failed.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The measurements.
    pub table: Vec<Row>,
    /// Runs that ended in the middle.
    pub aborted: Vec<Aborted>,
}

/// Returns what is wrong with the runs that ended in the middle.
pub fn missed_aborts(aborted: &[Aborted]) -> Vec<String> {
    let mut failures = Vec::new();
    let cases: Vec<AbortCase> = aborted.iter().map(|aborted| aborted.case).collect();
    if cases != AbortCase::ALL {
        failures.push(format!(
            "byte code ended in the middle in the cases {cases:?}, and not in all"
        ));
    }
    for Aborted { case, error } in aborted {
        for word in case.words().iter().filter(|word| !error.contains(**word)) {
            failures.push(format!("{}: the error does not say {word:?}: {error}", case.about()));
        }
    }
    failures
}

/// Returns which aims of the table are missed.
pub fn missed(table: &[Row]) -> Vec<String> {
    table
        .iter()
        .flat_map(|row| {
            let mut failures = row.missed();
            if row.mode == Mode::Device {
                failures.extend(row.missed_while_asleep());
                failures.extend(row.missed_beside(table));
            }
            failures.into_iter().map(|what| format!("{}: {what}", row.name()))
        })
        .collect()
}

impl Row {
    /// Returns which aims the row misses by itself.
    fn missed(&self) -> Vec<String> {
        let mut failures = Vec::new();
        if !self.verified {
            failures.push("the payload is wrong".into());
        }
        if self.host_payload != 0 {
            failures.push(format!("{} bytes of payload in host memory", self.host_payload));
        }
        if self.mode == Mode::Device && self.host_bytes != 0 {
            failures.push(format!(
                "NICs and accelerators accessed {} bytes of host memory, and 0 are expected",
                self.host_bytes
            ));
        }
        // The accelerators ring once for each message that they send.
        let doorbells = match self.mode {
            Mode::Device => 2 * u64::from(self.iterations),
            Mode::CpuPolling | Mode::CpuEvents => 0,
        };
        if self.doorbells != doorbells {
            failures.push(format!(
                "the accelerators rang {} doorbells, and {doorbells} are expected",
                self.doorbells
            ));
        }
        if self.trapped_per_message < 0.0 {
            failures.push("the NICs counted fewer accesses to registers than the accelerators' doorbells".into());
        }
        failures
    }

    /// Returns which aims are missed while the processors sleep.
    fn missed_while_asleep(&self) -> Vec<String> {
        let Some(between) = &self.between_batches else {
            let expected = self.size == STEADY_SIZE;
            return expected
                .then(|| "no measurement while the processors slept".to_owned())
                .into_iter()
                .collect();
        };
        let mut failures = Vec::new();
        if between.doorbells != between.messages {
            failures.push(format!(
                "the accelerators rang {} doorbells for {} messages while the processors slept",
                between.doorbells, between.messages
            ));
        }
        if !(0.0..NO_ACCESSES).contains(&(between.trapped as f64 / between.messages as f64)) {
            failures.push(format!(
                "{} accesses to registers for {} messages while the processors slept",
                between.trapped, between.messages
            ));
        }
        if between.cpu_instructions_per_message >= NO_INSTRUCTIONS {
            failures.push(format!(
                "{:.1} instructions for a message while the processors slept",
                between.cpu_instructions_per_message
            ));
        }
        if between.nic_interrupts != 0 || between.host_bytes != 0 {
            failures.push(format!(
                "{} interrupts and {} bytes of host memory while the processors slept",
                between.nic_interrupts, between.host_bytes
            ));
        }
        failures
    }

    /// Returns which aims are missed in comparison with processors that drive the NICs.
    fn missed_beside(&self, table: &[Self]) -> Vec<String> {
        let mut failures = Vec::new();
        for mode in [Mode::CpuPolling, Mode::CpuEvents] {
            let Some(baseline) = table.iter().find(|other| other.mode == mode && other.is_like(self)) else {
                failures.push(format!("no row to compare with: {mode:?}"));
                continue;
            };
            let ratio = baseline.trapped_per_message / self.trapped_per_message;
            // Without an access, the ratio is infinite.
            if ratio.is_nan() || ratio < FEWER_TRAPS {
                failures.push(format!(
                    "{ratio:.1} times fewer accesses to registers than by the {}, and {FEWER_TRAPS} are expected",
                    baseline.mode_name()
                ));
            }
        }
        failures
    }
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

    /// What a node measures whose processor accesses registers as often. It sends half of the 200 messages.
    fn measured(mode: Mode, trapped: u64, host_bytes: u64) -> Measured {
        let rung = if mode == Mode::Device { 100 } else { 0 };
        Measured {
            messages: 200,
            nanoseconds: 1_000_000,
            instructions: Some(40_000),
            program_instructions: 20_000,
            interrupts: 0,
            accesses: trapped + rung,
            rung,
            host_bytes,
            host_payload: 0,
            verified: true,
            steady: None,
        }
    }

    fn steady(instructions: u64) -> Steady {
        Steady {
            messages: 1000,
            program_instructions: instructions,
            idle_program_instructions: 5000,
            instructions: Some(1_000_000),
            idle_instructions: Some(2_000_000),
            interrupts: 0,
            accesses: 501,
            rung: 500,
            host_bytes: 0,
        }
    }

    fn good() -> Measured {
        Measured {
            steady: Some(steady(5100)),
            ..measured(Mode::Device, 10, 0)
        }
    }

    fn row(mode: Mode, node: Measured) -> Row {
        Row::new(&parameters(mode), &[node, node]).unwrap()
    }

    fn rows(device: Measured) -> Vec<Row> {
        let cpu = |mode| row(mode, measured(mode, 400, 9000));
        vec![cpu(Mode::CpuPolling), cpu(Mode::CpuEvents), row(Mode::Device, device)]
    }

    #[test]
    fn numbers_of_both_nodes_are_added() {
        let rows = rows(good());
        assert_eq!(rows[0].trapped_per_message, 4.0);
        assert_eq!(rows[0].cpu_instructions_per_message, 400.0);
        assert_eq!(rows[0].us_per_iteration, 10.0);
        assert_eq!(rows[0].host_bytes, 18_000);
        // Doorbells of the accelerators are no accesses of the processors.
        assert_eq!((rows[2].doorbells, rows[2].trapped_per_message), (200, 0.1));
        let between = rows[2].between_batches.unwrap();
        assert_eq!((between.messages, between.doorbells, between.trapped), (1000, 1000, 2));
    }

    #[test]
    fn aims_are_checked() {
        assert_eq!(missed(&rows(good())), Vec::<String>::new());
        let asleep = |steady| Measured {
            steady: Some(steady),
            ..good()
        };
        for (bad, what) in [
            (
                Measured {
                    verified: false,
                    ..good()
                },
                "the payload is wrong",
            ),
            (
                Measured {
                    host_payload: 1,
                    ..good()
                },
                "bytes of payload in host",
            ),
            (
                Measured {
                    host_bytes: 64,
                    ..good()
                },
                "accessed 128 bytes of host memory",
            ),
            (
                Measured {
                    accesses: 200,
                    ..good()
                },
                "times fewer accesses",
            ),
            (Measured { rung: 99, ..good() }, "rang 198 doorbells, and 200 are"),
            (Measured { accesses: 99, ..good() }, "fewer accesses to registers than"),
            (
                asleep(Steady {
                    accesses: 800,
                    ..steady(5100)
                }),
                "600 accesses to registers for 1000 messages",
            ),
            (
                asleep(Steady {
                    accesses: 499,
                    ..steady(5100)
                }),
                "-2 accesses to registers",
            ),
            (
                asleep(Steady {
                    rung: 499,
                    ..steady(5100)
                }),
                "998 doorbells for 1000 messages",
            ),
            (
                asleep(Steady {
                    messages: 0,
                    rung: 0,
                    accesses: 0,
                    ..steady(5000)
                }),
                "0 accesses to registers for 0 messages",
            ),
            (
                asleep(steady(20_000)),
                "instructions for a message while the processors slept",
            ),
            (
                asleep(Steady {
                    interrupts: 1,
                    ..steady(5100)
                }),
                "2 interrupts and 0 bytes",
            ),
            (
                asleep(Steady {
                    host_bytes: 8,
                    ..steady(5100)
                }),
                "0 interrupts and 16 bytes",
            ),
            (
                Measured { steady: None, ..good() },
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

    #[test]
    fn rows_of_processors_are_checked() {
        let mut rang = rows(good());
        rang[0] = row(
            Mode::CpuPolling,
            Measured {
                rung: 1,
                ..measured(Mode::CpuPolling, 400, 9000)
            },
        );
        let failures = missed(&rang);
        assert!(failures[0].contains("rang 2 doorbells, and 0 are"), "{failures:?}");
        // Without baselines, there is no comparison.
        let failures = missed(&rows(good())[1..]);
        assert!(
            failures.len() == 1 && failures[0].contains("no row to compare with: CpuPolling"),
            "{failures:?}"
        );
        // Fewer iterations are checked, too.
        let few = Parameters {
            iterations: 1,
            ..parameters(Mode::Device)
        };
        let node = measured(Mode::Device, 100, 0);
        let mut short = rows(good());
        short.push(Row::new(&few, &[node, node]).unwrap());
        assert!(missed(&short).iter().any(|failure| failure.contains("times fewer")));
    }

    #[test]
    fn byte_code_that_ends_in_the_middle_is_checked() {
        let all = AbortCase::ALL.map(|case| Aborted {
            case,
            error: case.words().join(" "),
        });
        assert_eq!(missed_aborts(&all), Vec::<String>::new());
        assert!(missed_aborts(&all[1..])[0].contains("not in all"));
        assert!(missed_aborts(&[])[0].contains("not in all"));
        for number in 0..all.len() {
            let mut wrong = all.clone();
            wrong[number].error = "something else".into();
            let failures = missed_aborts(&wrong);
            assert!(failures[0].contains("the error does not say"), "{failures:?}");
        }
    }
}
