// SPDX-License-Identifier: MIT OR Apache-2.0

//! In a guest: `p2pmem-collectives` with the emulated accelerator as the engine, if the payload is in its memory.

use std::process::ExitCode;

use anyhow::{Context, Result};
use p2pmem::{Client, Device, Provider};
use p2pmem_collectives::run::{OpenedEngine, processor};
use p2pmem_collectives_suite::engine::AccelEngine;
use p2pmem_verbs::Nic;

/// Entries of the ring of work.
const ENTRIES: u32 = 64;

fn open(provider: Option<&Provider>, nic: &Nic) -> Result<OpenedEngine> {
    let Some(provider) = provider else {
        return processor(None, nic);
    };
    let device = Device::open()?;
    let near = Client::resolve(nic.name())?;
    let engine = AccelEngine::open(&provider.addr.to_string(), &device, &near, provider.id, ENTRIES)?;
    Ok(Box::new(move |memory| {
        let base = memory.bar_offset();
        let base = base.context("the place of the payload in the accelerator's memory is unknown")?;
        Ok((Box::new(engine), base))
    }))
}

fn main() -> ExitCode {
    p2pmem_collectives::main(&open)
}
