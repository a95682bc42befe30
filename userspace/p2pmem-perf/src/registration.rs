// SPDX-License-Identifier: MIT OR Apache-2.0

//! `register`: measures the time of a registration with a NIC, by kind of memory and size.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use p2pmem::short_size;
use p2pmem_payload::kind::MemoryKind;
use p2pmem_payload::memory::{Memory, MemoryOptions, UnregisteredMemory};
use p2pmem_payload::nic::open_nics;
use p2pmem_verbs::Domain;
use serde::Serialize;

use crate::cli::RegisterArgs;
use crate::print_json;
use crate::progress;
use crate::session::process_time;

/// Cost of the registration of one kind and size of memory.
#[derive(Debug, Clone, Serialize)]
pub struct Cost {
    /// Kind of memory; `mapping` for a mapped file.
    pub memory: &'static str,
    /// Registration method.
    pub method: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of registrations.
    pub times: u32,
    /// Shortest time of a registration, in nanoseconds.
    pub register_ns: u64,
    /// Median time of a registration, in nanoseconds.
    pub register_median_ns: u64,
    /// Shortest CPU time of a registration in this process, in nanoseconds.
    pub register_cpu_ns: u64,
    /// Shortest time of a deregistration, in nanoseconds.
    pub deregister_ns: u64,
}

/// All results.
#[derive(Debug, Clone, Serialize)]
pub struct Costs {
    /// The NIC.
    pub nic: String,
    /// One result for each kind and size, in the order of the request.
    pub costs: Vec<Cost>,
}

/// Measures and prints the results.
///
/// # Errors
///
/// No such memory is available, or the NIC rejects it. The message says what to do.
pub fn register(args: &RegisterArgs, json: bool, out: &mut dyn Write) -> Result<()> {
    let nics = open_nics(args.nic.as_slice())?;
    let [nic] = nics.as_slice() else {
        bail!("specify one NIC")
    };
    let domain = Domain::new(nic.clone())?;
    let mut costs = Costs {
        nic: nic.name().to_owned(),
        costs: Vec::new(),
    };
    if !json {
        writeln!(
            out,
            "Registration with {}: shortest of {} measurements, in nanoseconds",
            costs.nic, args.iters
        )?;
        writeln!(
            out,
            "{:<12} {:<10} {:>10} {:>12} {:>12} {:>12}",
            "MEMORY", "METHOD", "SIZE", "REGISTER", "CPU-TIME", "DEREGISTER"
        )?;
    }
    let (sizes, sources) = (&args.size.0, sources(args));
    let all = sources.len() as u64 * sizes.len() as u64 * u64::from(args.iters);
    let bar = progress::bar("registrations", all, json);
    for source in sources {
        for bytes in sizes {
            bar.set_message(short_size(*bytes));
            let cost = measure(source, args, *bytes, &domain, &bar)?;
            if !json {
                let size = short_size(cost.bytes);
                let (on, busy, off) = (cost.register_ns, cost.register_cpu_ns, cost.deregister_ns);
                bar.suspend(|| -> std::io::Result<()> {
                    writeln!(
                        out,
                        "{:<12} {:<10} {size:>10} {on:>12} {busy:>12} {off:>12}",
                        cost.memory, cost.method
                    )?;
                    out.flush()
                })?;
            }
            costs.costs.push(cost);
        }
    }
    bar.finish_and_clear();
    if json {
        print_json(out, &costs)?;
    }
    Ok(())
}

/// Origin of the memory to register.
#[derive(Debug, Clone, Copy)]
enum Origin<'a> {
    Kind(MemoryKind),
    Mapping(&'a Path),
}

fn sources(args: &RegisterArgs) -> Vec<Origin<'_>> {
    match &args.mmap {
        Some(path) => vec![Origin::Mapping(path)],
        None => args.memory.iter().copied().map(Origin::Kind).collect(),
    }
}

fn measure(
    from: Origin<'_>,
    args: &RegisterArgs,
    bytes: u64,
    domain: &std::sync::Arc<Domain>,
    bar: &indicatif::ProgressBar,
) -> Result<Cost> {
    let (name, mut source) = match from {
        Origin::Kind(kind) => {
            let options = MemoryOptions {
                kind,
                provider: args.device.as_deref(),
                device: &args.dev_path,
            };
            (
                kind.name(),
                UnregisteredMemory::new(options, domain.nic().name(), bytes)?,
            )
        }
        Origin::Mapping(path) => ("mapping", UnregisteredMemory::mapped(path, bytes)?),
    };
    let (mut on, mut busy, mut off, mut method) = (Vec::new(), Vec::new(), Vec::new(), String::new());
    for _ in 0..args.iters {
        let (start, work) = (Instant::now(), process_time());
        let memory: Memory = source.register(domain)?;
        on.push(start.elapsed());
        busy.push(process_time().saturating_sub(work));
        method = memory.method();
        let start = Instant::now();
        source = memory.deregister()?;
        off.push(start.elapsed());
        bar.inc(1);
    }
    on.sort_unstable();
    let ns = |time: Option<&Duration>| time.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    Ok(Cost {
        memory: name,
        method,
        bytes,
        times: args.iters,
        register_ns: ns(on.first()),
        register_median_ns: ns(on.get(on.len() / 2)),
        register_cpu_ns: ns(busy.iter().min()),
        deregister_ns: ns(off.iter().min()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use p2pmem_verbs::Span;

    #[test]
    fn processor_time_increases() {
        let before = process_time();
        let span = Span::host(1 << 20).unwrap();
        let other = Span::host(1 << 20).unwrap();
        while process_time() == before {
            span.copy_to(0, &other, 0, 1 << 20);
        }
        assert!(process_time() > before);
    }
}
