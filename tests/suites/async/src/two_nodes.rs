// SPDX-License-Identifier: MIT OR Apache-2.0

//! The ping-pong of two nodes: each receives, computes in its accelerator, and sends. The processor drives NIC and
//! accelerator, by polling or by events, or the accelerator drives the NIC by byte code.

pub mod abort;
pub mod cpu;
pub mod device;
pub mod usage;

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use p2pmem_async::endpoint::Address;
use p2pmem_async::pingpong::options::Deadline;
use p2pmem_async::pingpong::wire::Wire;
use p2pmem_async::wqe::Transport;
use serde::{Deserialize, Serialize};

use crate::hardware::Hardware;
use usage::{Devices, Processor};

/// What drives a node's NIC and accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The processor, which polls completions.
    CpuPolling,
    /// The processor, which sleeps until the NIC's driver has an event, and between looks at the accelerator's progress.
    CpuEvents,
    /// The accelerator.
    Device,
}

/// What both nodes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// What drives both nodes.
    pub mode: Mode,
    /// The transport.
    pub transport: Transport,
    /// Bytes of a message: a multiple of 4.
    pub size: u32,
    /// Iterations of a batch.
    pub batch: u32,
    /// Iterations that are measured. Each has a message in both directions.
    pub iterations: u32,
    /// Iterations, after those, that the processor submits at once. It sleeps until they have ended. 0 for none.
    pub steady: u32,
}

impl Parameters {
    /// Checks the parameters.
    ///
    /// # Errors
    ///
    /// One of them is out of range.
    pub fn check(&self) -> Result<()> {
        let largest = match self.transport {
            Transport::Rc => 1 << 20,
            // The smallest MTU that an active port of the test bed has.
            Transport::Ud => 4096,
        };
        ensure!(
            self.size % 4 == 0 && (4..=largest).contains(&self.size),
            "{} bytes: a message has 4 to {largest} bytes, a multiple of 4",
            self.size
        );
        ensure!((1..=64).contains(&self.batch), "a batch has 1 to 64 iterations");
        ensure!(
            (1..=1_000_000).contains(&self.iterations),
            "1 to 1,000,000 iterations are possible: above 2^24, not every integer is an f32"
        );
        ensure!(
            self.steady == 0 || self.mode == Mode::Device,
            "only the accelerator works while the processor sleeps"
        );
        ensure!(
            self.steady <= device::MAX_STEADY,
            "at most {} iterations fit into the queues",
            device::MAX_STEADY
        );
        Ok(())
    }
}

/// What happened while the processor slept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Steady {
    /// Messages that were sent and received meanwhile.
    pub messages: u64,
    /// Instructions of the program's only thread, and of the kernel for it, from before to after it slept.
    pub program_instructions: u64,
    /// The same without work.
    pub idle_program_instructions: u64,
    /// Instructions of all tasks meanwhile, if the kernel adds them up: those of the kernel's own threads, mostly.
    pub instructions: Option<u64>,
    /// The same without work.
    pub idle_instructions: Option<u64>,
    /// Interrupts of the NIC.
    pub interrupts: u64,
    /// Accesses to registers of NIC and accelerator, those of the accelerator included.
    pub accesses: u64,
    /// Doorbells of the NIC that the accelerator rang.
    pub rung: u64,
    /// Bytes of host memory that NIC and accelerator accessed.
    pub host_bytes: u64,
}

/// What one node measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Messages that the node sent or received.
    pub messages: u64,
    /// Nanoseconds by the accelerator's clock, which is the host's.
    pub nanoseconds: u64,
    /// Instructions of all tasks, if the kernel adds them up.
    pub instructions: Option<u64>,
    /// Instructions of the program, and of the kernel for it.
    pub program_instructions: u64,
    /// Interrupts of the NIC.
    pub interrupts: u64,
    /// Accesses to registers of NIC and accelerator, those of the accelerator included.
    pub accesses: u64,
    /// Doorbells of the NIC that the accelerator rang.
    pub rung: u64,
    /// Bytes of host memory that NIC and accelerator accessed.
    pub host_bytes: u64,
    /// Bytes of them that are payload.
    pub host_payload: u64,
    /// Whether all values of the payload are right.
    pub verified: bool,
    /// What happened while the processor slept.
    pub steady: Option<Steady>,
}

/// One side of the ping-pong.
pub trait Side {
    /// Returns what the other side needs to connect.
    fn address(&self) -> Address;

    /// Connects to the other side.
    ///
    /// # Errors
    ///
    /// The NIC refuses the address.
    fn connect(&mut self, other: &Address) -> Result<()>;

    /// Runs iterations to their end, `batch` at once. The side that starts sends before it receives.
    ///
    /// # Errors
    ///
    /// A work request or a computation failed, or the deadline passed.
    fn iterate(&mut self, iterations: u32, batch: u32, deadline: Deadline) -> Result<()>;

    /// Returns the accelerator's clock in nanoseconds.
    ///
    /// # Errors
    ///
    /// The accelerator failed.
    fn clock(&mut self, deadline: Deadline) -> Result<u64>;

    /// Reads the payload.
    ///
    /// # Errors
    ///
    /// The memory is gone.
    fn payload(&self) -> Result<Vec<f32>>;

    /// Submits iterations at once, lets the processor sleep until they have ended, and then as long without work. Both nodes
    /// start at the same time. `expected` is the time that the iterations will take.
    ///
    /// # Errors
    ///
    /// Those of [`Side::iterate`]; the side is driven by the processor.
    fn steady(&mut self, count: u32, expected: Duration, wire: &mut Wire, deadline: Deadline) -> Result<Steady> {
        let _ = (count, expected, wire, deadline);
        bail!("only the accelerator works while the processor sleeps")
    }
}

/// Whether a node starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sends before it receives.
    First,
    /// Receives before it sends.
    Second,
}

/// Creates this node's side, connects it, and runs all.
///
/// # Errors
///
/// The parameters are out of range, a device refuses something, or the deadline passed.
pub fn run(
    hardware: &Hardware,
    parameters: &Parameters,
    role: Role,
    wire: &mut Wire,
    deadline: Deadline,
) -> Result<Measured> {
    parameters.check()?;
    let mut side: Box<dyn Side> = match parameters.mode {
        Mode::Device => Box::new(device::DeviceSide::new(hardware, parameters, role, deadline)?),
        Mode::CpuPolling | Mode::CpuEvents => Box::new(cpu::CpuSide::new(hardware, parameters, role)?),
    };
    wire.send(&side.address())?;
    let other: Address = wire.receive(deadline)?;
    side.connect(&other)?;
    wire.meet(deadline)?;
    // Caches are filled and the kernel's lazy work is done before the measurement.
    let warm = 2 * parameters.batch;
    side.iterate(warm, parameters.batch, deadline)?;

    wire.meet(deadline)?;
    // Each reading of the clock starts the accelerator's ring once, which counts as an access.
    let before = Devices::read()?;
    let started = side.clock(deadline)?;
    let cpu = Processor::read()?;
    side.iterate(parameters.iterations, parameters.batch, deadline)?;
    let cpu = Processor::read()?.since(cpu);
    let nanoseconds = side.clock(deadline)?.saturating_sub(started);
    let devices = Devices::read()?.since(before)?;
    wire.meet(deadline)?;

    let steady = match parameters.steady {
        0 => None,
        count => {
            let expected = Duration::from_nanos(nanoseconds / u64::from(parameters.iterations)) * count;
            let steady = side.steady(count, expected, wire, deadline)?;
            wire.meet(deadline)?;
            Some(steady)
        }
    };
    let all = warm + parameters.iterations + parameters.steady;
    // Each computation adds 1, on both nodes. The first node has the result of the last one.
    let value = match role {
        Role::First => 2 * all,
        Role::Second => 2 * all - 1,
    } as f32;
    let verified = side.payload()?.iter().all(|word| *word == value);
    Ok(Measured {
        messages: 2 * u64::from(parameters.iterations),
        nanoseconds,
        instructions: cpu.instructions,
        program_instructions: cpu.program,
        interrupts: cpu.interrupts,
        accesses: devices.accesses,
        rung: devices.rung,
        host_bytes: devices.host,
        host_payload: devices.payload_host,
        verified,
        steady,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_parameters_are_refused_with_the_reason() {
        let good = Parameters {
            mode: Mode::Device,
            transport: Transport::Ud,
            size: 128,
            batch: 20,
            iterations: 10_000,
            steady: 100,
        };
        good.check().unwrap();
        for (bad, why) in [
            (Parameters { size: 130, ..good }, "a multiple of 4"),
            (Parameters { size: 8192, ..good }, "4 to 4096"),
            (Parameters { batch: 0, ..good }, "1 to 64"),
            (Parameters { iterations: 0, ..good }, "1 to 1,000,000"),
            (
                Parameters {
                    mode: Mode::CpuPolling,
                    ..good
                },
                "only the accelerator",
            ),
            (
                Parameters {
                    steady: 100_000,
                    ..good
                },
                "fit into the queues",
            ),
        ] {
            let error = bad.check().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
