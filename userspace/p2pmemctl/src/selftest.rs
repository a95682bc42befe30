// SPDX-License-Identifier: MIT OR Apache-2.0

//! `selftest`: writes patterns to a provider's memory through a mapping and reads them back. With a NIC, also moves
//! data from one half of the memory to the other by RDMA.

use std::ops::Range;
use std::time::Instant;

use anyhow::bail;
use p2pmem::rdma::{Nic, Queue};
use p2pmem::{
    human_size, Access, Buffer, Mapping, PciAddr, Pd, ProtectionDomain, Registration, RegistrationMethod, Request,
};
use serde::Serialize;

use crate::cli::SelftestArgs;
use crate::table::{cell, number, optional, text, Column, Row, Table, BAD, GOOD};
use crate::{Context, Outcome};

/// Maximum number of bytes without --size: reads from a BAR are slow.
const DEFAULT_MAX: u64 = 64 << 20;
/// Bytes per step.
const STEP: usize = 64 << 10;

/// A pattern: the word for index `i`.
type Pattern = fn(u64) -> u64;

/// Patterns for different faults: stuck bits, crossed data lines, address lines, and stale cache lines.
const PATTERNS: [(&str, Pattern); 5] = [
    ("zeros", |_| 0),
    ("ones", |_| u64::MAX),
    ("checkered", |i| {
        if i % 2 == 0 {
            0x5555_5555_5555_5555
        } else {
            0xaaaa_aaaa_aaaa_aaaa
        }
    }),
    ("addresses", |i| i),
    ("mixed", mixed),
];

#[derive(Serialize)]
struct Report {
    provider: u32,
    addr: PciAddr,
    bytes: u64,
    ok: bool,
    patterns: Vec<PatternReport>,
    /// `None` if no NIC was specified.
    registration: Option<RegistrationReport>,
}

/// Result of a registration with a NIC, and of transfers by the NIC.
#[derive(Debug, Serialize)]
pub(crate) struct RegistrationReport {
    pub(crate) nic: String,
    /// Registration method; `None` if the registration failed.
    pub(crate) method: Option<RegistrationMethod>,
    pub(crate) microseconds: u64,
    pub(crate) error: Option<String>,
    pub(crate) remedy: Option<&'static str>,
    /// Result of the RDMA transfers; `None` if the registration failed.
    pub(crate) transfer: Option<TransferReport>,
}

impl RegistrationReport {
    pub(crate) fn ok(&self) -> bool {
        self.transfer.as_ref().is_some_and(TransferReport::ok)
    }
}

/// Result of an RDMA WRITE and an RDMA READ between the halves of the memory.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TransferReport {
    /// Bytes moved by both operations together.
    pub(crate) bytes: u64,
    /// Number of words with a wrong value after the transfers.
    pub(crate) wrong_words: u64,
    /// Offset of the first wrong word in the buffer, in bytes.
    pub(crate) first_wrong: Option<u64>,
    pub(crate) error: Option<String>,
}

impl TransferReport {
    pub(crate) fn ok(&self) -> bool {
        self.error.is_none() && self.wrong_words == 0 && self.bytes > 0
    }
}

/// Moves bytes within registered memory. Tests replace the NIC by this trait.
trait RdmaAccess {
    /// RDMA WRITE: copies `from` to offset `to`.
    fn write(&mut self, from: Range<usize>, to: usize) -> p2pmem::Result<()>;
    /// RDMA READ: copies from offset `from` to `into`.
    fn read(&mut self, into: Range<usize>, from: usize) -> p2pmem::Result<()>;
}

/// A connection of a NIC with itself.
struct Loopback<'a> {
    near: Queue,
    /// The remote queue pair. The connection needs it until the end.
    _far: Queue,
    registration: &'a Registration,
}

impl RdmaAccess for Loopback<'_> {
    fn write(&mut self, from: Range<usize>, to: usize) -> p2pmem::Result<()> {
        let memory = self.registration;
        self.near.write(memory, from, &memory.remote(), to as u64)
    }

    fn read(&mut self, into: Range<usize>, from: usize) -> p2pmem::Result<()> {
        let memory = self.registration;
        self.near.read(memory, into, &memory.remote(), from as u64)
    }
}

#[derive(Serialize)]
struct PatternReport {
    pattern: &'static str,
    wrong_words: u64,
    /// Offset of the first wrong word in the buffer, in bytes.
    first_wrong: Option<u64>,
    write_mb_per_s: f64,
    read_mb_per_s: f64,
}

pub(crate) fn selftest(context: &mut Context<'_>, args: &SelftestArgs) -> anyhow::Result<Outcome> {
    let device = context.open()?;
    let provider = context.provider(&device, args.device.name())?;
    let size = args.size.unwrap_or(provider.largest.min(DEFAULT_MAX));
    if size == 0 {
        bail!("provider {} has no free memory to test", provider.id);
    }
    let nic = args.nic.as_deref().map(LoopbackNic::open).transpose()?;
    let buffer = context.allocating(size, || device.alloc(&Request::new(size).provider(provider.id)))?;
    let mapping = buffer.map()?;
    let bar = context.progress_bar("testing", 2 * PATTERNS.len() as u64 * buffer.size());
    let mut patterns = Vec::new();
    for (name, pattern) in PATTERNS {
        patterns.push(test(&mapping, name, pattern, &bar)?);
    }
    bar.finish_and_clear();
    let registration = nic.as_ref().map(|nic| nic.measure(&buffer, &mapping));
    let moved = registration.as_ref().is_none_or(RegistrationReport::ok);
    let ok = moved && patterns.iter().all(|p| p.wrong_words == 0);
    let report = Report {
        provider: provider.id,
        addr: provider.addr,
        bytes: buffer.size(),
        ok,
        patterns,
        registration,
    };
    buffer.free()?;
    if context.json {
        context.print_json(&report)?;
    } else {
        write!(context.out, "{}", render_report(&report))?;
    }
    Ok(Outcome::of(report.ok))
}

/// Creates both queue pairs of a connection of a NIC with itself.
type Connect = Box<dyn Fn() -> p2pmem::Result<(Queue, Queue)>>;

/// A NIC for transfers within one buffer.
pub(crate) struct LoopbackNic {
    pd: Pd,
    connect: Connect,
}

impl LoopbackNic {
    /// Opens a NIC by name.
    pub(crate) fn open(name: &str) -> p2pmem::Result<Self> {
        let nic = Nic::open(name)?;
        let domain = nic.alloc_pd()?;
        let pd = domain.to_pd()?;
        let connect: Connect = Box::new(move || {
            let (mut near, mut far) = (nic.queue(&domain)?, nic.queue(&domain)?);
            near.connect(&far.endpoint())?;
            far.connect(&near.endpoint())?;
            Ok((near, far))
        });
        Ok(Self { pd, connect })
    }

    /// Registers a buffer, and moves data within the buffer by RDMA WRITE and READ. The mapping is that of the buffer.
    pub(crate) fn measure(&self, buffer: &Buffer, mapping: &Mapping) -> RegistrationReport {
        register(buffer, &self.pd, |registration| {
            let (near, far) = (self.connect)()?;
            let mut loopback = Loopback {
                near,
                _far: far,
                registration,
            };
            Ok(transfer(mapping, &mut loopback))
        })
    }
}

/// Registers a buffer with a NIC for remote access, moves data by RDMA, and deregisters the buffer.
fn register(
    buffer: &Buffer,
    pd: &Pd,
    transfer: impl FnOnce(&Registration) -> p2pmem::Result<TransferReport>,
) -> RegistrationReport {
    let start = Instant::now();
    let result = buffer.register(pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ);
    let report = RegistrationReport {
        nic: pd.nic(),
        method: None,
        microseconds: u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX),
        error: None,
        remedy: None,
        transfer: None,
    };
    match result {
        Ok(registration) => RegistrationReport {
            method: Some(registration.method()),
            transfer: Some(transfer(&registration).unwrap_or_else(|error| TransferReport {
                error: Some(error.to_string()),
                ..TransferReport::default()
            })),
            ..report
        },
        Err(error) => RegistrationReport {
            error: Some(error.to_string()),
            remedy: error.remedy(),
            ..report
        },
    }
}

/// Moves each half of the memory to the other half, once by RDMA WRITE and once by RDMA READ, and compares the result
/// as the CPU reads it. DMA to or from a wrong address gives bytes that differ from the written ones.
fn transfer(mapping: &Mapping, rdma: &mut dyn RdmaAccess) -> TransferReport {
    let mut report = TransferReport::default();
    let half = mapping.len() / 16 * 8;
    let step = half.clamp(8, STEP);
    let mut run = || -> p2pmem::Result<()> {
        for (salt, source, target) in [(1, 0, half), (2, half, 0)] {
            // All words of both halves are written before each transfer, so old content cannot pass as the result.
            let words = |at: usize, salt: u64| -> Vec<u64> {
                let first = (at / 8) as u64 + (salt << 56);
                (first..).take(step.min(half - at) / 8).map(mixed).collect()
            };
            for at in (0..half).step_by(step) {
                store(mapping, source + at, &words(at, salt))?;
                store(mapping, target + at, &words(at, salt + 2))?;
            }
            mapping.flush();
            for at in (0..half).step_by(step) {
                let len = step.min(half - at);
                match salt {
                    1 => rdma.write(source + at..source + at + len, target + at)?,
                    _ => rdma.read(target + at..target + at + len, source + at)?,
                }
            }
            for at in (0..half).step_by(step) {
                let expected = words(at, salt);
                let mut seen = vec![0; expected.len()];
                load(mapping, target + at, &mut seen)?;
                for (i, _) in expected
                    .iter()
                    .zip(&seen)
                    .enumerate()
                    .filter(|(_, (want, got))| want != got)
                {
                    report.wrong_words += 1;
                    report.first_wrong.get_or_insert((target + at + 8 * i) as u64);
                }
            }
            report.bytes += half as u64;
        }
        Ok(())
    };
    report.error = run().err().map(|error| error.to_string());
    report
}

/// Writes words to the memory. If the provider is removed meanwhile, returns an error instead of SIGBUS.
fn store(mapping: &Mapping, at: usize, words: &[u64]) -> p2pmem::Result<()> {
    mapping.try_copy_from_slice(at, bytemuck::cast_slice(words))
}

/// Reads words from the memory. If the provider is removed meanwhile, returns an error instead of SIGBUS.
fn load(mapping: &Mapping, at: usize, words: &mut [u64]) -> p2pmem::Result<()> {
    mapping.try_copy_to_slice(at, bytemuck::cast_slice_mut(words))
}

/// The finaliser of SplitMix64: each bit of the index changes about half of the bits of the word.
fn mixed(i: u64) -> u64 {
    let mut x = i.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn test(
    mapping: &Mapping,
    name: &'static str,
    pattern: Pattern,
    bar: &indicatif::ProgressBar,
) -> anyhow::Result<PatternReport> {
    let mut words = vec![0u64; STEP / 8];
    let expected = |at: usize, words: &mut [u64]| {
        for (i, word) in words.iter_mut().enumerate() {
            *word = pattern((at / 8 + i) as u64);
        }
    };
    // Buffers consist of whole pages, so the last step also consists of whole words.
    let steps = || {
        (0..mapping.len())
            .step_by(STEP)
            .map(|at| (at, (mapping.len() - at).min(STEP) / 8))
    };

    let start = Instant::now();
    for (at, n) in steps() {
        expected(at, &mut words[..n]);
        store(mapping, at, &words[..n])?;
        bar.inc(8 * n as u64);
    }
    mapping.flush();
    let write = start.elapsed();

    let start = Instant::now();
    let mut back = vec![0u64; STEP / 8];
    let (mut wrong_words, mut first_wrong) = (0, None);
    for (at, n) in steps() {
        expected(at, &mut words[..n]);
        load(mapping, at, &mut back[..n])?;
        for (i, _) in words[..n]
            .iter()
            .zip(&back[..n])
            .enumerate()
            .filter(|(_, (want, got))| want != got)
        {
            wrong_words += 1;
            first_wrong.get_or_insert((at + 8 * i) as u64);
        }
        bar.inc(8 * n as u64);
    }
    let speed = |time: std::time::Duration| mapping.len() as f64 / 1e6 / time.as_secs_f64().max(1e-9);
    Ok(PatternReport {
        pattern: name,
        wrong_words,
        first_wrong,
        write_mb_per_s: speed(write),
        read_mb_per_s: speed(start.elapsed()),
    })
}

impl Row for PatternReport {
    const COLUMNS: &'static [Column<Self>] = &[
        text("PATTERN", "name of the pattern", |p, _| cell(p.pattern)),
        number("WRITE-MB/s", "bandwidth of writes", |p, _| {
            cell(format!("{:.1}", p.write_mb_per_s))
        }),
        number("READ-MB/s", "bandwidth of reads", |p, _| {
            cell(format!("{:.1}", p.read_mb_per_s))
        }),
        text("RESULT", "ok or WRONG", |p, _| match p.first_wrong {
            None => cell("ok").style(GOOD),
            Some(_) => cell("WRONG").style(BAD),
        }),
        number("WRONG-WORDS", "number of words with another value", |p, _| {
            cell(p.wrong_words)
        }),
        text("FIRST-WRONG", "offset of the first of them in bytes", |p, _| {
            optional(p.first_wrong.map(|at| format!("{at:#x}")))
        }),
    ];
}

fn render_report(report: &Report) -> String {
    let table = Table::default().render(&report.patterns);
    let verdict = if report.ok {
        format!("{GOOD}passed{GOOD:#}")
    } else {
        format!("{BAD}FAILED{BAD:#}")
    };
    let registration = match &report.registration {
        None => String::new(),
        Some(RegistrationReport {
            nic,
            method: Some(method),
            microseconds,
            transfer,
            ..
        }) => format!(
            "registered with {nic} by {method} in {microseconds} us\n{}",
            transfer.as_ref().map(|t| render_transfer(nic, t)).unwrap_or_default()
        ),
        Some(r) => {
            let remedy = r.remedy.map(|remedy| format!("  -> {remedy}\n")).unwrap_or_default();
            format!("{}\n{remedy}", r.error.as_deref().unwrap_or_default())
        }
    };
    format!(
        "{table}\n{registration}provider {} ({}): {} {verdict}\n",
        report.provider,
        report.addr,
        human_size(report.bytes)
    )
}

fn render_transfer(nic: &str, transfer: &TransferReport) -> String {
    const REMEDY: &str = "  -> see the results of `p2pmemctl doctor` for host bridge, IOMMU, and ACS\n";
    match (&transfer.error, transfer.first_wrong) {
        (Some(error), _) => format!("{error}\n{REMEDY}"),
        (None, Some(at)) => format!(
            "WRONG: {nic} does not reach this memory: {} words moved by RDMA did not arrive, the first at byte \
             {at:#x}\n{REMEDY}",
            transfer.wrong_words
        ),
        (None, None) => format!(
            "{nic} moved {} by RDMA WRITE and READ: ok\n",
            human_size(transfer.bytes)
        ),
    }
}

#[cfg(test)]
mod tests;
