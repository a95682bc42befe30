// SPDX-License-Identifier: MIT OR Apache-2.0

//! The demo's part inside the guest: samples from one drive, through the accelerator, to the other drive; peer to peer,
//! then staged through host memory. Its story goes to standard error, and what it measured, as JSON, to standard output.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use memmap2::{MmapMut, MmapOptions};
use num_complex::Complex32;
use p2pmem::{Buffer, Client, Device, Mapping, PciAddr, Request, human_size, open_direct};
use p2pmem_accel_regs::driver::{Accel, Direction};
use p2pmem_demo::compare::{Comparator, Comparison};
use p2pmem_demo::job::{Job, POINTS, Run, SAMPLE, Seconds, Way};
use p2pmem_demo::samples::{Generator, demo_tones};
use p2pmem_demo::traffic::Traffic;
use p2pmem_guest::devices::{self, Devices};
use p2pmem_guest::host;
use p2pmem_guest::wire;
use rustfft::FftPlanner;

/// Longest time one command may take the accelerator.
const ACCEL_LIMIT: Duration = Duration::from_secs(60);

/// Transforms samples in an accelerator, from drive to drive.
#[derive(Parser)]
struct Cli {
    /// Drive that holds the samples, by its name in the topology
    #[arg(long, default_value = "nvme0")]
    from: String,
    /// Drive that gets the result
    #[arg(long, default_value = "nvme1")]
    to: String,
    /// MiB of samples
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1024))]
    mib: u64,
    /// MiB moved by one read or write
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    piece: u64,
    /// Seed of the noise in the samples
    #[arg(long, default_value_t = 20)]
    seed: u64,
}

/// All of a size in pieces of at most another.
fn pieces(size: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..size).step_by(piece).map(move |start| start..size.min(start + piece))
}

/// Page-aligned host memory, present.
fn host_memory(size: usize) -> Result<MmapMut> {
    MmapOptions::new()
        .len(size)
        .populate()
        .map_anon()
        .context("host memory")
}

fn block(devices: &Devices, name: &str) -> Result<PathBuf> {
    let device = devices
        .get(name)
        .with_context(|| format!("no device {name} in the topology"))?;
    device
        .block
        .clone()
        .with_context(|| format!("device {name} is no drive"))
}

fn name_of(devices: &Devices, addr: PciAddr) -> String {
    let addr = addr.to_string();
    let found = devices.iter().find(|(_, device)| device.bdf == addr);
    found.map_or(addr, |(name, _)| name.clone())
}

fn snapshot() -> Result<serde_json::Value> {
    host::request(&wire::Request::Snapshot)
}

/// Where the job runs.
struct Bench {
    size: usize,
    piece: usize,
    from: File,
    to: File,
    buffer: Buffer,
    mapping: Mapping,
    accel: Accel,
    /// The transform by processor.
    expected: MmapMut,
}

impl Bench {
    fn compute(&self) -> Result<Duration> {
        let start = Instant::now();
        let offset = self
            .buffer
            .bar_offset()
            .context("the module does not say where in the BAR the buffer is")?;
        self.accel
            .fft(offset, self.size as u64, POINTS as u64, Direction::Forward, ACCEL_LIMIT)?;
        Ok(start.elapsed())
    }

    /// Drive to accelerator to drive.
    fn run_p2p(&self, output: u64) -> Result<(Seconds, u64)> {
        let start = Instant::now();
        for piece in pieces(self.size, self.piece) {
            let got = self.mapping.read_from(&self.from, piece.start as u64, piece.clone())?;
            ensure!(
                got == piece.len(),
                "the drive gave {got} bytes at {} instead of {}",
                piece.start,
                piece.len()
            );
        }
        let read = start.elapsed();
        let compute = self.compute()?;
        let start = Instant::now();
        for piece in pieces(self.size, self.piece) {
            self.mapping.write_to(&self.to, output + piece.start as u64, piece)?;
        }
        let write = start.elapsed();
        Ok((seconds(read, compute, write), 0))
    }

    /// The same, with a copy in host memory on both ways.
    fn run_staged(&self, output: u64, staging: &mut [u8]) -> Result<(Seconds, u64)> {
        let mut copied = 0;
        let start = Instant::now();
        for piece in pieces(self.size, self.piece) {
            let part = &mut staging[..piece.len()];
            self.from
                .read_exact_at(part, piece.start as u64)
                .context("reading into host memory")?;
            self.mapping.copy_from_slice(piece.start, part)?;
            copied += part.len() as u64;
        }
        self.mapping.flush();
        let read = start.elapsed();
        let compute = self.compute()?;
        let start = Instant::now();
        for piece in pieces(self.size, self.piece) {
            let part = &mut staging[..piece.len()];
            self.mapping.copy_to_slice(piece.start, part)?;
            copied += part.len() as u64;
            self.to
                .write_all_at(part, output + piece.start as u64)
                .context("writing from host memory")?;
        }
        let write = start.elapsed();
        Ok((seconds(read, compute, write), copied))
    }

    /// Runs the job one way, between two looks at the devices' counters, and verifies what then is on the drive.
    fn run(&self, way: Way, output: u64, memory: &mut [u8]) -> Result<Run> {
        // What another run left must not be taken for this one's result.
        memory.fill(0);
        for piece in pieces(self.size, self.piece) {
            self.to
                .write_all_at(&memory[piece.clone()], output + piece.start as u64)
                .context("clearing the output")?;
        }
        // Present before the clock runs, for both ways alike.
        self.mapping.fill(0..self.size, 0)?;
        self.mapping.flush();

        let before = snapshot()?;
        let (seconds, cpu_copied_bytes) = match way {
            Way::P2p => self.run_p2p(output)?,
            Way::Staged => self.run_staged(output, memory)?,
        };
        let traffic = Traffic::between(&before, &snapshot()?)?;

        let offset = self.buffer.bar_offset().context("no offset in the BAR")?;
        let checksum_device = self.accel.checksum(offset, self.size as u64, ACCEL_LIMIT)?;
        memory.fill(0);
        let mut checksum = 0;
        let mut comparator = Comparator::default();
        for piece in pieces(self.size, self.piece) {
            let part = &mut memory[piece.clone()];
            self.to
                .read_exact_at(part, output + piece.start as u64)
                .context("reading the result back")?;
            checksum = crc32c::crc32c_append(checksum, part);
            let expected: &[Complex32] = bytemuck::cast_slice(&self.expected[piece]);
            comparator.add(bytemuck::cast_slice(part), expected);
        }
        Ok(Run {
            seconds,
            cpu_copied_bytes,
            traffic,
            checksum,
            checksum_device,
            comparison: comparator.finish(),
        })
    }
}

fn seconds(read: Duration, compute: Duration, write: Duration) -> Seconds {
    Seconds {
        read: read.as_secs_f64(),
        compute: compute.as_secs_f64(),
        write: write.as_secs_f64(),
    }
}

fn tell(run: &Run) {
    let Comparison { values, max_error, .. } = run.comparison;
    eprintln!(
        "   {:.2} s; {} from and to host memory by the devices; {values} values, largest error {max_error:.1e} of the RMS; \
         CRC-32C {:08x}, the accelerator's own {:08x}",
        run.seconds.total(),
        human_size(run.traffic.host_bytes()),
        run.checksum,
        run.checksum_device
    );
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let devices = devices::load()?;
    let size = usize::try_from(cli.mib << 20)?;
    let piece = usize::try_from(cli.piece << 20)?;
    let (from_block, to_block) = (block(&devices, &cli.from)?, block(&devices, &cli.to)?);

    // Samples, and their transform by the guest's own processor.
    let start = Instant::now();
    let mut memory = host_memory(size)?;
    Generator::new(cli.seed, &demo_tones(POINTS)).fill(bytemuck::cast_slice_mut(&mut memory));
    let checksum_samples = crc32c::crc32c(&memory);
    let generated = start.elapsed();
    let from = open_direct(&from_block, true)?;
    for piece in pieces(size, piece) {
        from.write_all_at(&memory[piece.clone()], piece.start as u64)
            .context("writing the samples")?;
    }
    from.sync_data()?;
    eprintln!(
        "{} of samples ({} complex f32, seed {}, CRC-32C {checksum_samples:08x}) made in {:.2} s and written to {}",
        human_size(size as u64),
        size / SAMPLE,
        cli.seed,
        generated.as_secs_f64(),
        from_block.display(),
    );
    let mut expected = host_memory(size)?;
    expected.copy_from_slice(&memory);
    let start = Instant::now();
    let transform = FftPlanner::<f32>::new().plan_fft_forward(POINTS);
    transform.process(bytemuck::cast_slice_mut(&mut expected));
    let seconds_cpu = start.elapsed().as_secs_f64();
    eprintln!("the same transforms by the guest's processor: {seconds_cpu:.2} s");

    // Nobody names the accelerator: the orchestrator chooses for the two drives.
    let device = Device::open()?;
    let clients = [&from_block, &to_block].map(|path| Client::resolve(&path.display().to_string()));
    let [first, second] = clients;
    let request = Request::new(size as u64).near([first?, second?]);
    let buffer = device.alloc(&request)?;
    let decision = device.explain_last()?;
    let providers = device.providers()?;
    let provider = providers
        .iter()
        .find(|p| p.id == buffer.provider())
        .context("the chosen provider is not listed")?;
    let name = name_of(&devices, provider.addr);
    let kind = devices.get(&name).map_or("", |d| d.kind.as_str());
    if kind != "accel" {
        bail!("the orchestrator chose {name} ({kind}), which cannot compute");
    }
    let verdicts = decision
        .verdicts
        .iter()
        .map(|v| (name_of(&devices, v.addr), v.why.clone()))
        .collect();
    eprintln!(
        "a buffer of {} near {} and {}: the orchestrator chose {name} ({}), from byte {:#x} of its BAR on",
        human_size(buffer.size()),
        cli.from,
        cli.to,
        provider.addr,
        buffer.bar_offset().unwrap_or(0),
    );
    let bench = Bench {
        size,
        piece,
        from: open_direct(&from_block, false)?,
        to: open_direct(&to_block, true)?,
        mapping: buffer.map()?,
        accel: Accel::open(&provider.addr.to_string())?,
        buffer,
        expected,
    };

    eprintln!("peer to peer: {0} -> {name} -> {1} ...", cli.from, cli.to);
    let p2p = bench.run(Way::P2p, 0, &mut memory)?;
    tell(&p2p);
    eprintln!(
        "staged: {0} -> host memory -> {name} -> host memory -> {1} ...",
        cli.from, cli.to
    );
    // Elsewhere on the drive, so that it cannot be the other run's result that is verified.
    let staged = bench.run(Way::Staged, size as u64, &mut memory)?;
    tell(&staged);

    let Bench { buffer, mapping, .. } = bench;
    drop(mapping);
    buffer.free()?;
    let job = Job {
        payload_bytes: size as u64,
        provider: name,
        verdicts,
        checksum_samples,
        seconds_cpu,
        p2p,
        staged,
    };
    println!("{}", serde_json::to_string(&job)?);
    Ok(())
}
