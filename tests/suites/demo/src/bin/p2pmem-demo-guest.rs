// SPDX-License-Identifier: MIT OR Apache-2.0

//! The demo's program in the guest. It makes samples, and moves them from one drive through the accelerator to another
//! drive, first peer to peer and then staged through host memory. It prints its progress to standard error, and its
//! measurements as JSON to standard output.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use memmap2::{MmapMut, MmapOptions};
use num_complex::{Complex32, Complex64};
use p2pmem::{Buffer, Client, Device, DirectOptions, Mapping, PciAddr, Request, human_size, open_direct};
use p2pmem_accel_regs::driver::{Accel, Direction};
use p2pmem_demo::compare::{Comparator, Comparison};
use p2pmem_demo::job::{Job, Method, POINTS, Run, SAMPLE, Seconds};
use p2pmem_demo::rdma::{Revoked, Scanned};
use p2pmem_demo::samples::{Generator, demo_tones};
use p2pmem_demo::traffic::Traffic;
use p2pmem_guest::devices::{self, Devices};
use p2pmem_guest::host;
use p2pmem_guest::wire;
use rustfft::FftPlanner;

/// The time limit of one command of the accelerator.
const ACCEL_LIMIT: Duration = Duration::from_secs(60);

/// The time limit for a program to move its first data, and to end after its accelerator was removed.
const PROGRAM_LIMIT: Duration = Duration::from_secs(30);
/// The interval of these checks.
const LOOK: Duration = Duration::from_millis(20);
/// The number of bytes after which the accelerator counts as in use.
const IN_USE: u64 = 4 << 20;

/// Makes samples, and transforms them in an accelerator, from drive to drive.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Write a file of samples
    Make {
        /// The file
        file: PathBuf,
        /// MiB of samples
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1024))]
        mib: u64,
        /// Seed of the noise
        #[arg(long, default_value_t = 20)]
        seed: u64,
    },
    /// Transform a file of samples: peer to peer, then staged through host memory
    Transform {
        /// The file
        file: PathBuf,
        /// Drive that the file is on, by its name in the topology
        #[arg(long)]
        from: String,
        /// Drive that gets the result, on its blocks from the first one on
        #[arg(long)]
        to: String,
    },
    /// Look for words in all memory of an accelerator that has no driver
    Scan {
        /// The accelerator, by its name in the topology
        #[arg(long)]
        accel: String,
        /// The words, in hexadecimal
        #[arg(long, value_delimiter = ',', value_parser = hex)]
        words: Vec<u64>,
    },
    /// Run a program, and unbind an accelerator as soon as a NIC moves data from or to it
    Revoke {
        /// The accelerator, by its name in the topology
        #[arg(long)]
        accel: String,
        /// The NIC
        #[arg(long)]
        nic: String,
        /// The program and its arguments
        #[arg(last = true, required = true)]
        program: Vec<String>,
    },
}

/// The bytes of one read or write.
const PIECE: usize = 4 << 20;

/// Divides `size` bytes into ranges of [`PIECE`] bytes.
fn pieces(size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..size)
        .step_by(PIECE)
        .map(move |start| start..size.min(start + PIECE))
}

/// Allocates host memory, aligned to pages and populated.
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

/// The devices, files and memory of the job.
struct Bench {
    size: usize,
    from: File,
    to: File,
    buffer: Buffer,
    mapping: Mapping,
    accel: Accel,
    /// The expected spectrum.
    expected: Vec<Complex32>,
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

    /// Moves the data from drive to accelerator to drive.
    fn run_p2p(&self, output: u64) -> Result<(Seconds, u64)> {
        let start = Instant::now();
        for piece in pieces(self.size) {
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
        for piece in pieces(self.size) {
            self.mapping.write_to(&self.to, output + piece.start as u64, piece)?;
        }
        let write = start.elapsed();
        Ok((seconds(read, compute, write), 0))
    }

    /// The same, with a copy in host memory in both directions.
    fn run_staged(&self, output: u64, staging: &mut [u8]) -> Result<(Seconds, u64)> {
        let mut copied = 0;
        let start = Instant::now();
        for piece in pieces(self.size) {
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
        for piece in pieces(self.size) {
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

    /// Runs the job by one method, reads the devices' counters before and after, and verifies the result on the drive.
    fn run(&self, method: Method, output: u64, memory: &mut [u8]) -> Result<Run> {
        // The result of an earlier run must not pass for the result of this one.
        memory.fill(0);
        for piece in pieces(self.size) {
            self.to
                .write_all_at(&memory[piece.clone()], output + piece.start as u64)
                .context("clearing the output")?;
        }
        // Both methods start with populated mappings.
        self.mapping.fill(0..self.size, 0)?;
        self.mapping.flush();

        let before = snapshot()?;
        let (seconds, cpu_copied_bytes) = match method {
            Method::P2p => self.run_p2p(output)?,
            Method::Staged => self.run_staged(output, memory)?,
        };
        let traffic = Traffic::between(&before, &snapshot()?)?;

        let offset = self.buffer.bar_offset().context("no offset in the BAR")?;
        let checksum_device = self.accel.checksum(offset, self.size as u64, ACCEL_LIMIT)?;
        memory.fill(0);
        let mut checksum = 0;
        let mut comparator = Comparator::default();
        for piece in pieces(self.size) {
            let part = &mut memory[piece.clone()];
            self.to
                .read_exact_at(part, output + piece.start as u64)
                .context("reading the result back")?;
            checksum = crc32c::crc32c_append(checksum, part);
            let values = piece.start / SAMPLE..piece.end / SAMPLE;
            comparator.add(bytemuck::cast_slice(part), &self.expected[values]);
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
        "   {:.2} s, CRC-32C of the result {:08x}",
        run.seconds.total(),
        run.checksum
    );
    eprintln!("   {values} values read back, the farthest is off by {max_error:.1e} of the spectrum's RMS");
    eprintln!(
        "   devices read and wrote {} of host memory",
        human_size(run.traffic.host_bytes())
    );
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Verb::Make { file, mib, seed } => make(&file, usize::try_from(mib << 20)?, seed),
        Verb::Transform { file, from, to } => {
            let job = transform(&file, &from, &to)?;
            println!("{}", serde_json::to_string(&job)?);
            Ok(())
        }
        Verb::Scan { accel, words } => {
            println!("{}", serde_json::to_string(&scan(&accel, &words)?)?);
            Ok(())
        }
        Verb::Revoke { accel, nic, program } => {
            println!("{}", serde_json::to_string(&revoke(&accel, &nic, &program)?)?);
            Ok(())
        }
    }
}

fn hex(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16).map_err(|_| "give a word in hexadecimal".into())
}

/// Searches all memory of an accelerator for words, and has the accelerator compute a checksum of the memory.
fn scan(accel: &str, words: &[u64]) -> Result<Scanned> {
    let devices = devices::load()?;
    let device = devices
        .get(accel)
        .with_context(|| format!("no device {accel} in the topology"))?;
    let accel = Accel::open(&device.bdf)?;
    let size = accel.memory_size();
    let checksum = accel.checksum(0, size, ACCEL_LIMIT)?;
    let memory = accel.map_memory()?;
    let wanted: BTreeSet<u64> = words.iter().copied().collect();
    let mut found = BTreeSet::new();
    let mut piece = vec![0u64; PIECE / 8];
    for offset in (0..size).step_by(PIECE) {
        memory.read(offset, bytemuck::cast_slice_mut(&mut piece))?;
        found.extend(
            piece
                .iter()
                .map(|word| u64::from_le(*word))
                .filter(|word| wanted.contains(word)),
        );
    }
    Ok(Scanned {
        bytes: size,
        checksum,
        found: found.len() as u64,
    })
}

/// Returns the bytes that a NIC has moved from and to other devices' memory since the boot.
fn moved(nic: &str) -> Result<u64> {
    let payload = snapshot()?[nic]["counters"]["payload"].take();
    let number = |key: &str| {
        payload[key]
            .as_u64()
            .with_context(|| format!("counters of {nic} without {key}"))
    };
    Ok(number("peer_read")? + number("peer_written")?)
}

/// Runs a program, unbinds the accelerator that the program uses, and waits for the program's end.
fn revoke(accel: &str, nic: &str, program: &[String]) -> Result<Revoked> {
    let devices = devices::load()?;
    let device = devices
        .get(accel)
        .with_context(|| format!("no device {accel} in the topology"))?;
    let unbind = device.sysfs().join("driver/unbind");
    ensure!(unbind.exists(), "{accel} has no driver");
    let before = moved(nic)?;
    // Standard output is for this program's JSON.
    let mut child = Command::new(&program[0])
        .args(&program[1..])
        .stdout(std::io::stderr())
        .spawn()
        .with_context(|| program[0].clone())?;
    let told = unbind_in_use(&mut child, &unbind, &device.bdf, nic, before);
    let deadline = Instant::now() + PROGRAM_LIMIT;
    while told.is_ok() && child.try_wait()?.is_none() && Instant::now() < deadline {
        thread::sleep(LOOK);
    }
    // An error means that the program has just ended.
    let _ = child.kill();
    child.wait()?;
    let (unbind_ms, at_unbind) = told?;
    Ok(Revoked {
        unbind_ms,
        moved_before: at_unbind - before,
        moved_after: moved(nic)? - at_unbind,
    })
}

/// Unbinds the accelerator after [`IN_USE`] bytes were moved. Returns the duration in milliseconds, and the bytes moved
/// by its end.
fn unbind_in_use(child: &mut Child, unbind: &Path, bdf: &str, nic: &str, before: u64) -> Result<(f64, u64)> {
    let deadline = Instant::now() + PROGRAM_LIMIT;
    while moved(nic)? < before + IN_USE {
        ensure!(
            Instant::now() < deadline,
            "{nic} moved nothing within {PROGRAM_LIMIT:?}"
        );
        if let Some(status) = child.try_wait()? {
            bail!("the program ended before anything was moved: {status}");
        }
        thread::sleep(LOOK);
    }
    let start = Instant::now();
    std::fs::write(unbind, bdf).with_context(|| unbind.display().to_string())?;
    let took = start.elapsed();
    let now = moved(nic)?;
    eprintln!("{bdf} is unbound");
    Ok((took.as_secs_f64() * 1000.0, now))
}

/// Writes a file of samples.
fn make(path: &Path, size: usize, seed: u64) -> Result<()> {
    let start = Instant::now();
    let mut memory = host_memory(size)?;
    Generator::new(seed, &demo_tones(POINTS)).fill(bytemuck::cast_slice_mut(&mut memory));
    let generated = start.elapsed().as_secs_f64();
    let file = DirectOptions::new().write(true).create(true).open(path)?;
    for piece in pieces(size) {
        file.write_all_at(&memory[piece.clone()], piece.start as u64)
            .context("writing the samples")?;
    }
    file.sync_all()?;
    eprintln!(
        "{}: {} complex f32 of tones and noise (seed {seed}), made in {generated:.2} s, CRC-32C {:08x}",
        path.display(),
        size / SAMPLE,
        crc32c::crc32c(&memory),
    );
    Ok(())
}

/// Computes the spectrum of the samples with the guest's processor, in double precision, as the expected result.
fn spectrum(samples: &[Complex32]) -> Vec<Complex32> {
    let transform = FftPlanner::<f64>::new().plan_fft_forward(POINTS);
    let mut spectrum = vec![Complex32::default(); samples.len()];
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let share = samples.len().div_ceil(POINTS).div_ceil(threads) * POINTS;
    thread::scope(|scope| {
        for (from, to) in samples.chunks(share).zip(spectrum.chunks_mut(share)) {
            let transform = &transform;
            scope.spawn(move || {
                let mut vector = vec![Complex64::default(); POINTS];
                let mut scratch = vec![Complex64::default(); transform.get_inplace_scratch_len()];
                for (from, to) in from.chunks_exact(POINTS).zip(to.chunks_exact_mut(POINTS)) {
                    for (wide, narrow) in vector.iter_mut().zip(from) {
                        *wide = Complex64::new(narrow.re.into(), narrow.im.into());
                    }
                    transform.process_with_scratch(&mut vector, &mut scratch);
                    for (narrow, wide) in to.iter_mut().zip(&vector) {
                        *narrow = Complex32::new(wide.re as f32, wide.im as f32);
                    }
                }
            });
        }
    });
    spectrum
}

/// Does the job by both methods.
fn transform(path: &Path, from_name: &str, to_name: &str) -> Result<Job> {
    let devices = devices::load()?;
    let blocks = [block(&devices, from_name)?, block(&devices, to_name)?];
    let from = open_direct(path)?;
    let size = usize::try_from(from.metadata()?.len())?;
    ensure!(
        size > 0 && size % (POINTS * SAMPLE) == 0,
        "{}: {size} bytes are no whole number of vectors",
        path.display()
    );
    let mut memory = host_memory(size)?;
    for piece in pieces(size) {
        from.read_exact_at(&mut memory[piece.clone()], piece.start as u64)
            .context("reading the samples")?;
    }
    let checksum_samples = crc32c::crc32c(&memory);
    let start = Instant::now();
    let expected = spectrum(bytemuck::cast_slice(&memory));
    let seconds_cpu = start.elapsed().as_secs_f64();
    eprintln!(
        "for comparison: {} transforms of {POINTS} points by the guest's processor in f64: {seconds_cpu:.2} s",
        expected.len() / POINTS
    );

    // The request names the two drives as clients, and the orchestrator chooses the accelerator.
    let device = Device::open()?;
    let clients = blocks.map(|block| Client::resolve(&block.display().to_string()).map(|client| (block, client)));
    let [from_drive, to_drive] = clients;
    let ((_, from_client), (to_block, to_client)) = (from_drive?, to_drive?);
    let buffer = device.alloc(&Request::new(size as u64).near([from_client, to_client]))?;
    let decision = device.explain_last()?;
    let providers = device.providers()?;
    let provider = providers
        .iter()
        .find(|p| p.id == buffer.provider())
        .context("the chosen provider is not listed")?;
    let name = name_of(&devices, provider.addr);
    let kind = devices.get(&name).map_or("", |d| d.kind.as_str());
    ensure!(
        kind == "accel",
        "the orchestrator chose {name} ({kind}), which cannot compute"
    );
    let verdicts = decision
        .verdicts
        .iter()
        .map(|v| (name_of(&devices, v.addr), v.why.clone()))
        .collect();
    eprintln!(
        "{} near {from_name} and {to_name}: the orchestrator chose {name} ({}), at offset {:#x} in its BAR",
        human_size(buffer.size()),
        provider.addr,
        buffer.bar_offset().unwrap_or(0),
    );
    let bench = Bench {
        size,
        from,
        to: DirectOptions::new().read(true).write(true).open(&to_block)?,
        mapping: buffer.map()?,
        accel: Accel::open(&provider.addr.to_string())?,
        buffer,
        expected,
    };

    eprintln!("peer to peer: {from_name} -> {name} -> {to_name} ...");
    let p2p = bench.run(Method::P2p, 0, &mut memory)?;
    tell(&p2p);
    eprintln!("staged: {from_name} -> host memory -> {name} -> host memory -> {to_name} ...");
    // At other blocks of the drive, so that the check cannot read the result of the other run.
    let staged = bench.run(Method::Staged, size as u64, &mut memory)?;
    tell(&staged);

    let Bench { buffer, mapping, .. } = bench;
    drop(mapping);
    buffer.free()?;
    Ok(Job {
        payload_bytes: size as u64,
        provider: name,
        verdicts,
        checksum_samples,
        seconds_cpu,
        p2p,
        staged,
    })
}
