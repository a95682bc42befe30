// SPDX-License-Identifier: MIT OR Apache-2.0

//! The demo. It boots its topology with the stock kernel, loads the module, publishes memory, and chooses memory for a
//! job. It runs the job peer to peer and through host memory, removes everything again, and reports the measurements.
//! The second act does so with two servers.

mod second;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use p2pmem::human_size;
use p2pmem_demo::job::{Job, Run};
use p2pmem_demo::rdma;
use p2pmem_demo::report::{Report, Results, candidates};
use p2pmem_demo::stock::{self, Image, Running};
use p2pmem_demo::traffic::HOST;
use p2pmem_guest::devices::{self, Device, Devices};
use p2pmem_vm::kernel;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::topology::Topology;
use p2pmem_vm::vm::{Command, Options, Outcome, Status, Stream, Vm, sibling, tool, topologies};
use serde_json::Value;

/// Name of the module.
const MODULE: &str = "p2pmem";
/// The time limit of a short command.
const SHORT: Duration = Duration::from_secs(60);
/// The time limit of the job.
const LONG: Duration = Duration::from_secs(300);
/// The drive with the samples and the drive for the result, by their names in the topology.
const DRIVES: [&str; 2] = ["nvme0", "nvme1"];
/// The folder in the guest where the drive with the samples is mounted.
const FOLDER: &str = "/run/p2pmem-demo";
/// The devices whose memory the demo publishes. The drive's own driver publishes that of the drive.
const PUBLISHED: [&str; 3] = ["accel0", "accel1", "shm0"];

/// Puts peer-to-peer memory to work under a stock kernel, and measures what it saves.
///
/// Exit codes: 0 all is as it must be, 1 something is not, 2 bad usage.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// The module, for the stock kernel; the path is one of the sandbox
    #[arg(long, value_name = "PATH")]
    module: PathBuf,
    /// Where the report goes, as JSON
    #[arg(long, value_name = "PATH")]
    report: PathBuf,
    /// Where the report goes as an HTML page
    #[arg(long, value_name = "PATH")]
    page: Option<PathBuf>,
    /// Topology to boot
    #[arg(long, value_name = "FILE", default_value_os_t = topologies().join("demo.toml"))]
    topology: PathBuf,
    /// Topology of the second act
    #[arg(long, value_name = "FILE", default_value_os_t = topologies().join("rdma.toml"))]
    servers: PathBuf,
    /// Only this act; the report then has nothing of the other
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=2))]
    act: Option<u8>,
}

/// The inspection of the installed kernel, which runs once, while the first guest boots.
struct Inspection {
    handle: Option<thread::JoinHandle<Result<Image>>>,
    image: Option<Image>,
}

impl Inspection {
    fn start(release: &str, booted: PathBuf) -> Inspection {
        let release = release.to_owned();
        Inspection {
            handle: Some(thread::spawn(move || stock::inspect(&release, &booted))),
            image: None,
        }
    }

    fn image(&mut self) -> Result<&Image> {
        if let Some(handle) = self.handle.take() {
            let image = handle.join().ok().context("looking at the installed kernel failed")?;
            self.image = Some(image?);
        }
        self.image.as_ref().context("the installed kernel is not known")
    }
}

fn main() -> ExitCode {
    let start = Instant::now();
    let cli = Cli::parse();
    let mut results = Results {
        from: DRIVES[0].into(),
        to: DRIVES[1].into(),
        ..Results::default()
    };
    // If this run is killed, an earlier report must not pass for its report.
    let worked = [Some(&cli.report), cli.page.as_ref()]
        .into_iter()
        .flatten()
        .try_for_each(|path| remove_earlier(path))
        .and_then(|()| demo(&cli, &mut results));
    if let Err(error) = worked {
        results.errors.push(format!("{error:#}"));
    }
    results.total_seconds = start.elapsed().as_secs_f64();
    let report = Report::new(results);
    let written = report.write(&cli.report).and_then(|()| match &cli.page {
        Some(page) => report.write_page(page),
        None => Ok(()),
    });
    sum_up(&report);
    match written {
        Ok(()) => {
            println!("Report: {}", cli.report.display());
            if let Some(page) = &cli.page {
                println!("With pictures: {}", page.display());
            }
        }
        Err(error) => {
            println!("The report could not be written: {error:#}");
            return ExitCode::FAILURE;
        }
    }
    if report.passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Removes an earlier report.
fn remove_earlier(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error).with_context(|| path.display().to_string()),
        _ => Ok(()),
    }
}

fn sum_up(report: &Report) {
    println!();
    for failure in &report.failures {
        println!("FAILED: {failure}");
    }
    if !report.passed {
        println!("The demo FAILED after {:.1} s.", report.total_seconds);
        return;
    }
    println!(
        "PASSED in {:.1} s on a stock kernel {}:",
        report.total_seconds,
        report.kernel_release.as_deref().unwrap_or("?")
    );
    if let Some(job) = &report.job {
        println!(
            "   {} from drive through accelerator to drive, right to {:.1e}, with {} of host memory touched by the devices; \
             staged it was {}.",
            human_size(job.payload_bytes),
            report.max_error.unwrap_or(f64::INFINITY),
            human_size(job.p2p.traffic.host_bytes()),
            human_size(job.staged.traffic.host_bytes()),
        );
    }
    let row = |rdma: &rdma::Report, name| rdma.table.iter().find(|row| row.name == name).cloned();
    if let Some((direct, staged)) = report
        .rdma
        .as_ref()
        .and_then(|rdma| Some((row(rdma, rdma::ACC_ACC)?, row(rdma, rdma::STAGED)?)))
    {
        println!(
            "   {} from accelerator to accelerator by RDMA, every byte right, with {} of host memory touched; staged it was {:.0} \
             for each byte.",
            human_size(direct.payload_bytes),
            human_size(direct.host_bytes),
            staged.host_bytes_per_payload_byte,
        );
    }
}

fn step(number: u32, what: &str) {
    println!("\n{number}. {what}");
}

/// Prints text below a step.
fn show(text: &str) {
    for line in text.lines() {
        println!("   {line}");
    }
}

/// Prints a command in the form in which a user types it.
fn show_command(argv: &[&str]) {
    let mut words = argv.to_vec();
    words[0] = words[0].rsplit('/').next().unwrap_or(words[0]);
    show(&format!("# {}", words.join(" ")));
}

fn demo(cli: &Cli, results: &mut Results) -> Result<()> {
    let module = fs::canonicalize(&cli.module)
        .with_context(|| format!("{}: build it by `make modules`", cli.module.display()))?;
    let release = kernel::release()?;
    let mut inspection = Inspection::start(&release, kernel::vmlinux(&release)?);
    let mut servers = None;
    if cli.act != Some(2) {
        results.first = true;
        // The second act runs even if the first one fails.
        let booted = || {
            if cli.act.is_none() {
                servers = Some(second::Servers::boot(&cli.servers));
            }
        };
        if let Err(error) = first(cli, results, &module, &release, &mut inspection, booted) {
            results.errors.push(format!("{error:#}"));
        }
    }
    if cli.act != Some(1) {
        let rdma = results.rdma.insert(rdma::Results::default());
        let servers = servers.unwrap_or_else(|| second::Servers::boot(&cli.servers));
        second::run(servers, &module, &release, &mut inspection, rdma);
    }
    Ok(())
}

/// The first act. Calls `booted` after its guest has booted: one processor has little to do during the rest of the act.
fn first(
    cli: &Cli,
    results: &mut Results,
    module: &Path,
    release: &str,
    inspection: &mut Inspection,
    booted: impl FnOnce(),
) -> Result<()> {
    let topology = Topology::load(&cli.topology)?;

    step(1, &format!("Boot: {}", topology.description));
    let vm = Vm::boot(&topology, &Options::default())?;
    results.boot_seconds = Some(vm.boot_time().as_secs_f64());
    results.kernel_release = Some(vm.release().to_owned());
    booted();
    ensure!(
        vm.release() == release,
        "kernel {} runs, not the installed {release}",
        vm.release()
    );
    let mut guest = Guest {
        vm,
        findings: Vec::new(),
    };
    let worked = work(&mut guest, results, module, inspection);
    let ended = end(&mut guest, results);
    let Guest { vm, mut findings } = guest;
    match vm.shut_down() {
        Ok(late) => {
            findings.extend(late);
            results.ended_in_order = true;
        }
        Err(error) => results.errors.push(format!("the guest's end: {error:#}")),
    }
    results.findings = findings;
    if results.ended_in_order && results.findings.is_empty() {
        show("the guest is off; its kernel log has no warning");
    }
    // Both are reported, the first cause first: a later error may add information.
    for (what, result) in [("", worked), ("taking down: ", ended)] {
        if let Err(error) = result {
            results.errors.push(format!("{what}{error:#}"));
        }
    }
    Ok(())
}

/// The guest, and the bad lines of its kernel log so far.
struct Guest {
    vm: Vm,
    findings: Vec<String>,
}

impl Guest {
    /// Runs a command and returns its outcome. Searches the kernel log.
    fn run(&mut self, command: &Command, live: &mut dyn FnMut(Stream, &[u8])) -> Result<Outcome> {
        let outcome = self.vm.exec(command, live)?;
        self.findings.extend(outcome.findings.iter().cloned());
        if outcome.status == (Status::Exited { code: 0 }) {
            return Ok(outcome);
        }
        let stderr = String::from_utf8_lossy(&outcome.stderr);
        let log: Vec<&str> = outcome.dmesg.iter().map(|record| record.text.as_str()).collect();
        let log = &log[log.len().saturating_sub(20)..];
        bail!(
            "{}: {:?}\n{}\nkernel log:\n  {}",
            command.argv.join(" "),
            outcome.status,
            stderr.trim_end(),
            log.join("\n  ")
        );
    }

    /// Runs a short command without showing it. Returns its standard output.
    fn quiet(&mut self, argv: &[&str]) -> Result<Vec<u8>> {
        let command = Command::new(argv.iter().copied()).limit(SHORT);
        Ok(self.run(&command, &mut |_, _| {})?.stdout)
    }

    fn text(&mut self, argv: &[&str]) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.quiet(argv)?).into_owned())
    }

    /// Runs a short command, and shows it with its output.
    fn shown(&mut self, argv: &[&str]) -> Result<()> {
        show_command(argv);
        let command = Command::new(argv.iter().copied()).limit(SHORT);
        let outcome = self.run(&command, &mut |_, _| {})?;
        for stream in [&outcome.stdout, &outcome.stderr] {
            show(&String::from_utf8_lossy(stream));
        }
        Ok(())
    }

    fn json(&mut self, argv: &[&str]) -> Result<Value> {
        let stdout = self.quiet(argv)?;
        serde_json::from_slice(&stdout).with_context(|| format!("output of {}", argv.join(" ")))
    }
}

fn device<'a>(devices: &'a Devices, name: &str) -> Result<&'a Device> {
    devices
        .get(name)
        .with_context(|| format!("the topology has no device {name}"))
}

/// Runs the act until the end of the job.
fn work(guest: &mut Guest, results: &mut Results, module: &Path, inspection: &mut Inspection) -> Result<()> {
    let ctl = tool("p2pmemctl")?;
    let ctl = ctl.as_str();
    let devices: Devices = serde_json::from_slice(&guest.quiet(&["cat", devices::FILE])?)?;
    let mut running = Running {
        version: guest.text(&["cat", "/proc/version"])?,
        notes: guest.quiet(&["cat", "/sys/kernel/notes"])?,
        taint_before: taint(guest)?,
        ..Running::default()
    };
    show(&format!(
        "ready after {:.1} s: {}",
        results.boot_seconds.unwrap_or(0.0),
        running.version.trim()
    ));
    show(&devices_table(&devices));

    step(2, "Load the module, publish memory");
    guest.shown(&["insmod", utf8(module)?])?;
    running.taint_after = taint(guest)?;
    running.modules = guest.text(&["cat", "/proc/modules"])?;
    let stock = stock::check(inspection.image()?, &running, MODULE);
    show(&match stock.objections.as_slice() {
        [] => format!(
            "The kernel is stock: {} verified by dpkg, build id {} runs, tainted by {MODULE} alone.",
            stock.packages.join(" and "),
            stock.build_id
        ),
        objections => format!("The kernel is NOT stock: {}", objections.join("; ")),
    });
    results.stock = Some(stock);
    for name in PUBLISHED {
        guest.shown(&[ctl, "publish", &device(&devices, name)?.bdf])?;
    }
    // The module finds memory that drivers published by itself: the drive's controller memory buffer.
    results.providers_expected = devices.values().filter(|device| device.memory > 0).count();

    step(3, "The providers, and their distance to each client");
    guest.shown(&[ctl, "list"])?;
    let list = guest.json(&[ctl, "list", "--json"])?;
    expect_providers(&list, &devices)?;
    let drives: Vec<String> = DRIVES
        .iter()
        .map(|name| controller(device(&devices, name)?))
        .collect::<Result<_>>()?;
    let [from, to] = [drives[0].as_str(), drives[1].as_str()];
    guest.shown(&[
        ctl,
        "topo",
        from,
        to,
        &device(&devices, "accel0")?.bdf,
        &device(&devices, "accel1")?.bdf,
    ])?;

    results.picture = Some(guest.text(&[ctl, "topo", "--svg", "-"])?);

    step(
        4,
        "A buffer near both drives: who is chosen, and why the others are not",
    );
    let near = drives.join(",");
    let request = ["16M", "--near", &near];
    guest.shown(&[&[ctl, "alloc"], &request[..]].concat())?;
    guest.shown(&[&[ctl, "explain"], &request[..]].concat())?;
    let explanation = guest.json(&[&[ctl, "explain", "--json"], &request[..]].concat())?;
    let names: BTreeMap<String, String> = devices
        .iter()
        .map(|(name, device)| (device.bdf.clone(), name.clone()))
        .collect();
    results.candidates = candidates(&explanation, &names)?;
    let by_name: Vec<String> = results
        .candidates
        .iter()
        .map(|candidate| {
            // The message of a verdict begins with the verdict.
            let verdict = candidate.reason.split(':').next().unwrap_or_default();
            format!("{}: {verdict}", candidate.device)
        })
        .collect();
    show(&format!("By name: {}.", by_name.join("; ")));

    step(
        5,
        "Real work: samples from a drive, transformed in the accelerator, to the other drive",
    );
    let program = sibling("p2pmem-demo-guest")?;
    let program = utf8(&program)?;
    let drive = device(&devices, DRIVES[0])?.block.as_ref().context("no block device")?;
    guest.quiet(&["mkdir", FOLDER])?;
    // Without a journal, and read-only after the file was written, the file system does no I/O of its own during the
    // job.
    guest.shown(&[
        "mkfs.ext4",
        "-q",
        "-O",
        "^has_journal",
        "-E",
        "lazy_itable_init=0",
        utf8(drive)?,
    ])?;
    guest.shown(&["mount", "-t", "ext4", utf8(drive)?, FOLDER])?;
    let samples = format!("{FOLDER}/samples.c32");
    guest.shown(&[program, "make", &samples])?;
    guest.shown(&["mount", "-o", "remount,ro", FOLDER])?;
    let argv = [program, "transform", &samples, "--from", DRIVES[0], "--to", DRIVES[1]];
    show_command(&argv);
    let mut story = Lines::default();
    let outcome = guest.run(&Command::new(argv).limit(LONG), &mut |stream, bytes| {
        if stream == Stream::Stderr {
            story.take(bytes, &mut |line| show(line));
        }
    })?;
    let job: Job = serde_json::from_slice(&outcome.stdout).context("output of p2pmem-demo-guest")?;

    step(6, "What the devices counted");
    show(&comparison_table(&job, &devices));
    results.job = Some(job);
    Ok(())
}

fn taint(guest: &mut Guest) -> Result<u64> {
    let text = guest.text(&["cat", "/proc/sys/kernel/tainted"])?;
    text.trim().parse().with_context(|| format!("taint {text:?}"))
}

/// Returns the kernel's name of a drive's controller: `nvme0` of `/dev/nvme0n1`.
fn controller(device: &Device) -> Result<String> {
    let block = device.block.as_ref().context("the device is no drive")?;
    let name = block.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (controller, _) = name
        .rsplit_once('n')
        .with_context(|| format!("{} is no NVMe drive", block.display()))?;
    Ok(controller.to_owned())
}

/// Checks that each device with memory is a live provider, and an adopted one if its own driver published the memory.
fn expect_providers(list: &Value, devices: &Devices) -> Result<()> {
    let providers = list["providers"].as_array().context("a list without providers")?;
    for (name, device) in devices.iter().filter(|(_, device)| device.memory > 0) {
        let provider = providers
            .iter()
            .find(|provider| provider["addr"] == *device.bdf)
            .with_context(|| format!("{name} is no provider"))?;
        let kind = if device.kind == "nvme" { "adopted" } else { "own" };
        ensure!(
            provider["kind"] == kind && provider["state"] == "live",
            "{name} is a provider of kind {} and state {}, not {kind} and live",
            provider["kind"],
            provider["state"]
        );
    }
    Ok(())
}

/// Removes everything that the act has set up.
fn end(guest: &mut Guest, results: &mut Results) -> Result<()> {
    ensure!(guest.vm.is_alive(), "the guest is gone\n{}", guest.vm.console_tail());
    step(7, "Take all down");
    if !guest
        .text(&["cat", "/proc/modules"])?
        .lines()
        .any(|line| line.split(' ').next() == Some(MODULE))
    {
        bail!("the module is not loaded");
    }
    if guest.text(&["cat", "/proc/mounts"])?.contains(FOLDER) {
        guest.shown(&["umount", FOLDER])?;
    }
    let ctl = tool("p2pmemctl")?;
    let list = guest.json(&[&ctl, "list", "--json"])?;
    let leaked = list["info"]["buffers"].as_u64().context("no number of buffers")?;
    let stats = guest.json(&[&ctl, "stats", "--json"])?;
    let all = stats["stats"]
        .as_array()
        .and_then(|all| all.iter().find(|one| one["provider"].is_null()))
        .context("no sum in the statistics")?;
    let number = |key: &str| all[key].as_u64().with_context(|| format!("statistics without {key}"));
    let (allocs, frees) = (number("allocs")?, number("frees")?);
    show(&format!(
        "{allocs} buffers were allocated, {frees} freed, {leaked} are live"
    ));
    // Live buffers, and buffers that the counters miss. Nothing was revoked so far.
    results.leaked_buffers = Some(leaked.max(allocs.saturating_sub(frees)));
    let providers = list["providers"].as_array().context("a list without providers")?;
    for provider in providers.iter().filter(|provider| provider["kind"] == "own") {
        let addr = provider["addr"].as_str().context("a provider without an address")?;
        guest.shown(&[&ctl, "unpublish", addr])?;
    }
    guest.shown(&["rmmod", MODULE])?;
    let modules = guest.text(&["cat", "/proc/modules"])?;
    results.unloaded = !modules.lines().any(|line| line.split(' ').next() == Some(MODULE));
    Ok(())
}

/// Divides output into lines.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    fn take(&mut self, bytes: &[u8], each: &mut dyn FnMut(&str)) {
        self.0.extend_from_slice(bytes);
        while let Some(at) = self.0.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.0.drain(..=at).collect();
            each(String::from_utf8_lossy(&line).trim_end());
        }
    }
}

fn devices_table(devices: &Devices) -> String {
    let mut table = Table::new();
    table
        .load_preset(NOTHING)
        .set_header(["NAME", "KIND", "ADDRESS", "DRIVE", "MEMORY TO LEND"]);
    for (name, device) in devices {
        table.add_row([
            name.clone(),
            device.kind.clone(),
            device.bdf.clone(),
            device
                .block
                .as_ref()
                .map_or_else(|| "-".into(), |block| block.display().to_string()),
            match device.memory {
                0 => "-".into(),
                bytes => human_size(bytes),
            },
        ]);
    }
    plain(&mut table)
}

/// Formats a table without the blanks before its first column.
fn plain(table: &mut Table) -> String {
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// Formats both runs side by side.
fn comparison_table(job: &Job, devices: &Devices) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(["", "PEER TO PEER", "STAGED"]);
    for column in 1..=2 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut row = |what: &str, cell: &dyn Fn(&Run) -> String| {
        table.add_row([what.to_owned(), cell(&job.p2p), cell(&job.staged)]);
    };
    let seconds = |seconds: f64| format!("{seconds:.3} s");
    let bytes = |bytes: u64| bytes.to_string();
    row("time, by the guest's clock", &|run| seconds(run.seconds.total()));
    row("  drive to accelerator", &|run| seconds(run.seconds.read));
    row("  transform", &|run| seconds(run.seconds.compute));
    row("  accelerator to drive", &|run| seconds(run.seconds.write));
    row("payload, bytes", &|_| bytes(job.payload_bytes));
    row("drives' reads and writes, bytes", &|run| {
        bytes(run.traffic.by_memory().values().sum())
    });
    for (name, _) in devices.iter().filter(|(_, device)| device.memory > 0) {
        row(&format!("  from and to the memory of {name}"), &|run| {
            bytes(run.traffic.by_memory().get(name).copied().unwrap_or(0))
        });
    }
    row("  from and to host memory", &|run| {
        bytes(run.traffic.by_memory().get(HOST).copied().unwrap_or(0))
    });
    row("accelerators from and to host memory, bytes", &|run| {
        bytes(run.traffic.accelerators.values().map(|accel| accel.host).sum())
    });
    row("host memory touched by devices, bytes", &|run| {
        bytes(run.traffic.host_bytes())
    });
    let bridges: BTreeSet<&String> = [&job.p2p, &job.staged]
        .into_iter()
        .flat_map(|run| run.traffic.bridges.crossed.keys())
        .collect();
    for bridge in bridges {
        row(&format!("payload across {bridge}, bytes"), &|run| {
            bytes(run.traffic.bridges.crossed.get(bridge).copied().unwrap_or(0))
        });
    }
    row("payload across the root complex, bytes", &|run| {
        bytes(run.traffic.bridges.root_complex)
    });
    row("copied by the processor, bytes", &|run| bytes(run.cpu_copied_bytes));
    row("CRC-32C of the result", &|run| format!("{:08x}", run.checksum));
    row("largest error, relative to the RMS", &|run| {
        format!("{:.2e}", run.comparison.max_error)
    });
    row("verified", &|run| if run.is_verified() { "yes" } else { "NO" }.into());
    plain(&mut table)
}
