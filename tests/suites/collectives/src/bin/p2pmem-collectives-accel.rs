// SPDX-License-Identifier: MIT OR Apache-2.0

//! In a guest: `p2pmem-collectives` with the emulated accelerator as the engine, if the payload is in its memory.

use std::process::ExitCode;

use anyhow::{Context, Result};
use p2pmem::{Client, Device};
use p2pmem_collectives::engine::Engine;
use p2pmem_collectives::run::processor;
use p2pmem_collectives_suite::engine::AccelEngine;
use p2pmem_payload::memory::Memory;
use p2pmem_verbs::Nic;

/// Entries of the ring of work.
const ENTRIES: u32 = 64;

fn open(memory: &Memory, nic: &Nic) -> Result<(Box<dyn Engine>, u64)> {
    let Some(provider) = memory.provider() else {
        return processor(memory, nic);
    };
    let base = memory
        .bar_offset()
        .context("the place of the payload in the accelerator's memory is unknown")?;
    let device = Device::open()?;
    let near = Client::resolve(nic.name())?;
    let engine = AccelEngine::open(&provider.addr.to_string(), &device, &near, provider.id, ENTRIES)?;
    Ok((Box::new(engine), base))
}

fn main() -> ExitCode {
    p2pmem_collectives::main(&open)
}
