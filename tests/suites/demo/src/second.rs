// SPDX-License-Identifier: MIT OR Apache-2.0

//! The second act: two servers move data from accelerator to accelerator by RDMA, and one of them loses its accelerator
//! while a NIC writes to it.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use p2pmem::human_size;
use p2pmem_demo::rdma::{self, Moved, Results, Revoked, Row, Scanned, Stale};
use p2pmem_demo::stock::{self, Image, Running};
use p2pmem_guest::devices::{self, Devices};
use p2pmem_guest::wire::Listen;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::command::{Command, Outcome, Status};
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::topology::Layout;
use p2pmem_vm::vm::{Options, sibling, tool};
use serde_json::Value;

use crate::{Inspection, MODULE, device, plain, show, step};

/// The time limit of a short command.
const SHORT: Duration = Duration::from_secs(60);
/// The time limit of a transfer.
const LONG: Duration = Duration::from_secs(180);
/// The nodes of the client and of the server.
const CLIENT: &str = "a";
const SERVER: &str = "b";
/// The names of the nodes' devices in the topology.
const NIC: &str = "nic0";
const ACCEL: &str = "accel0";
/// The number of messages of a row, and their size.
const MESSAGES: &str = "2000";
const MESSAGE: &str = "2M";
/// The number of messages of the staged row, in which an emulated processor copies the data.
const STAGED_MESSAGES: &str = "200";
/// The time in seconds that each side waits for the other one. On a busy host a guest may need longer than the default.
const TIME_FACTOR: &str = "150";
/// The ports of p2pmem-perf and of perftest.
const PORT: u16 = 18520;
const PERFTEST_PORT: u16 = 18515;
/// The file with the state of the accelerator's memory on the server.
const STATE: &str = "/run/p2pmem-demo-memory.json";
/// The size of a large registration, as an argument and in bytes.
const LARGE: &str = "200M";
const LARGE_BYTES: u64 = 200 << 20;

/// The guests, and their programs and devices.
struct Bed {
    cluster: Cluster,
    findings: Vec<String>,
    devices: BTreeMap<String, Devices>,
    ctl: String,
    perf: String,
}

impl Bed {
    /// Checks the outcome of a command.
    fn taken(&mut self, node: &str, command: &Command, outcome: Outcome) -> Result<Outcome> {
        self.findings
            .extend(outcome.findings.iter().map(|line| format!("{node}: {line}")));
        if outcome.status == (Status::Exited { code: 0 }) {
            return Ok(outcome);
        }
        bail!(
            "{node}# {}: {:?}\n{}\n{}",
            command.argv.join(" "),
            outcome.status,
            String::from_utf8_lossy(&outcome.stdout).trim_end(),
            String::from_utf8_lossy(&outcome.stderr).trim_end()
        )
    }

    fn quiet(&mut self, node: &str, argv: &[&str]) -> Result<Vec<u8>> {
        let command = Command::new(argv.iter().copied()).limit(SHORT);
        let outcome = self.cluster.exec(node, &command)?;
        Ok(self.taken(node, &command, outcome)?.stdout)
    }

    fn text(&mut self, node: &str, argv: &[&str]) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.quiet(node, argv)?).into_owned())
    }

    fn json(&mut self, node: &str, argv: &[&str]) -> Result<Value> {
        let stdout = self.quiet(node, argv)?;
        serde_json::from_slice(&stdout).with_context(|| format!("output of {}", argv.join(" ")))
    }

    /// Runs a short command, and shows it with its output.
    fn shown(&mut self, node: &str, argv: &[&str]) -> Result<()> {
        show_command(node, argv);
        let command = Command::new(argv.iter().copied()).limit(SHORT);
        let outcome = self.cluster.exec(node, &command)?;
        let outcome = self.taken(node, &command, outcome)?;
        for stream in [&outcome.stdout, &outcome.stderr] {
            show(&String::from_utf8_lossy(stream));
        }
        Ok(())
    }

    /// Runs a short command that must fail, shows it, and returns its output.
    fn refused(&mut self, node: &str, argv: &[&str]) -> Result<String> {
        show_command(node, argv);
        let command = Command::new(argv.iter().copied()).limit(SHORT);
        let outcome = self.cluster.exec(node, &command)?;
        self.findings.extend(outcome.findings.iter().cloned());
        let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
        show(&said);
        ensure!(
            outcome.status == (Status::Exited { code: 1 }),
            "{}: {:?} where it should have been refused",
            argv.join(" "),
            outcome.status
        );
        Ok(said)
    }

    /// Returns the server's Ethernet address for the client.
    fn address(&mut self) -> Result<String> {
        let name = format!("P2PMEM_ADDR_{}", SERVER.to_uppercase());
        Ok(self.text(CLIENT, &["printenv", &name])?.trim().to_owned())
    }

    /// Runs p2pmem-perf on both nodes. Returns the client's report.
    fn served(&mut self, serve: &[&str], run: &[&str]) -> Result<Value> {
        let server = Command::new(serve.iter().copied())
            .limit(LONG)
            .listen(Listen::Tcp(PORT));
        let client = Command::new(run.iter().copied()).limit(LONG);
        let served = self.cluster.serve((SERVER, &server), (CLIENT, &client))?;
        let server_ended = self.taken(SERVER, &server, served.server);
        // The client's error names the cause, even if the server caused it.
        let client_ended = match served.client {
            Some(outcome) => self.taken(CLIENT, &client, outcome),
            None => bail!("the server did not come up: {:?}", server_ended.err()),
        };
        let report = client_ended?;
        server_ended?;
        serde_json::from_slice(&report.stdout).context("output of p2pmem-perf")
    }

    /// Returns the PCI address of a node's device.
    fn addr(&self, node: &str, name: &str) -> Result<String> {
        let devices = self.devices.get(node).context("an unknown node")?;
        Ok(device(devices, name)?.bdf.clone())
    }

    /// Returns the RDMA core's name of a node's NIC.
    fn nic(&self, node: &str) -> Result<String> {
        let devices = self.devices.get(node).context("an unknown node")?;
        let nic = device(devices, NIC)?;
        nic.rdma
            .clone()
            .with_context(|| format!("no driver has made an RDMA device of {node}'s {NIC}"))
    }
}

/// Prints a command in the form in which a user types it if the programs are installed.
fn show_command(node: &str, argv: &[&str]) {
    let mut line = argv
        .iter()
        .map(|word| {
            if word.contains(' ') {
                format!("'{word}'")
            } else {
                (*word).to_owned()
            }
        })
        .collect::<Vec<_>>()
        .join(" ");
    // The folders of the programs in this build.
    let folders = [
        tool("p2pmemctl").ok(),
        sibling("p2pmem-demo-guest").ok().map(|path| path.display().to_string()),
    ];
    for path in folders.into_iter().flatten() {
        if let Some((folder, _)) = path.rsplit_once('/') {
            line = line.replace(&format!("{folder}/"), "");
        }
    }
    show(&format!("{node}# {line}"));
}

/// The guests of the act, which boot in the background.
pub(crate) struct Servers {
    description: Option<String>,
    boot: JoinHandle<Result<Cluster>>,
}

impl Servers {
    /// Starts the boot of the guests of a topology.
    pub(crate) fn boot(topology: &Path) -> Servers {
        let layout = Layout::load(topology);
        Servers {
            description: layout.as_ref().ok().map(|layout| layout.description.clone()),
            boot: thread::spawn(move || Cluster::boot(&layout?, &Options::default())),
        }
    }
}

/// Runs the act, and removes everything that it has set up.
pub(crate) fn run(servers: Servers, module: &Path, release: &str, inspection: &mut Inspection, results: &mut Results) {
    let start = Instant::now();
    let done = wait(servers).and_then(|bed| {
        results.boot_seconds = Some(bed.cluster.boot_time().as_secs_f64());
        with_servers(bed, module, release, inspection, results)
    });
    if let Err(error) = done {
        results.errors.push(format!("{error:#}"));
    }
    results.seconds = start.elapsed().as_secs_f64();
}

/// Waits until the guests have booted.
fn wait(servers: Servers) -> Result<Bed> {
    step(
        8,
        &format!("Second act. Boot: {}", servers.description.as_deref().unwrap_or("?")),
    );
    let cluster = servers.boot.join().ok().context("booting the guests failed")??;
    let (ctl, perf) = (tool("p2pmemctl")?, tool("p2pmem-perf")?);
    Ok(Bed {
        cluster,
        findings: Vec::new(),
        devices: BTreeMap::new(),
        ctl,
        perf,
    })
}

fn with_servers(
    mut bed: Bed,
    module: &Path,
    release: &str,
    inspection: &mut Inspection,
    results: &mut Results,
) -> Result<()> {
    let worked = work(&mut bed, module, release, inspection, results);
    let ended = end(&mut bed, results);
    let Bed {
        cluster, mut findings, ..
    } = bed;
    match cluster.shut_down() {
        Ok(late) => {
            findings.extend(late);
            results.ended_in_order = true;
        }
        Err(error) => results.errors.push(format!("the guests' end: {error:#}")),
    }
    results.findings = findings;
    if results.ended_in_order && results.findings.is_empty() {
        show("the guests are off; their kernel logs have no warning");
    }
    // Both are reported, the first cause first.
    if let Err(error) = worked {
        results.errors.push(format!("{error:#}"));
    }
    ended.context("taking down")
}

fn work(bed: &mut Bed, module: &Path, release: &str, inspection: &mut Inspection, results: &mut Results) -> Result<()> {
    for node in [CLIENT, SERVER] {
        let devices = serde_json::from_slice(&bed.quiet(node, &["cat", devices::FILE])?)?;
        bed.devices.insert(node.into(), devices);
    }
    show(&devices_table(&bed.devices));
    let image = inspection.image()?;

    step(
        9,
        "Load the module, publish the accelerators, register their memory with the NICs",
    );
    for node in [CLIENT, SERVER] {
        load(bed, node, module, release, image, results)?;
        let driver = bed.text(
            node,
            &[
                "readlink",
                "-f",
                &format!("/sys/bus/pci/devices/{}/driver", bed.addr(node, NIC)?),
            ],
        )?;
        let driver = driver.trim().rsplit('/').next().unwrap_or_default().to_owned();
        results.nic_drivers.insert(node.into(), driver);
        // The kernel reserve is 0: the whole BAR is for this demo, as the kernel has no other user of it.
        let (ctl, addr) = (bed.ctl.clone(), bed.addr(node, ACCEL)?);
        bed.shown(node, &[&ctl, "publish", &addr, "--kernel-reserve", "0"])?;
    }
    let objections: Vec<_> = results.stock.values().flat_map(|stock| &stock.objections).collect();
    show(&format!(
        "{}; the NICs' driver is {}.",
        match objections.as_slice() {
            [] => "Both kernels are stock".to_owned(),
            all => format!("The kernels are NOT stock: {all:?}"),
        },
        results.nic_drivers.get(CLIENT).map_or("?", String::as_str)
    ));
    registration(bed, results)?;

    step(
        10,
        "From server to server: where the payload is, how fast it goes, and what touches host memory",
    );
    for (name, _) in rdma::ROWS {
        let row = transfer(bed, name)?;
        results.table.push(row);
    }
    let first = results.table.first().map_or(0.0, |row| row.gib_per_s);
    for row in &mut results.table {
        row.ratio = if first > 0.0 { row.gib_per_s / first } else { 0.0 };
    }
    show(&table(&results.table));

    step(11, "The accelerator goes away while a NIC writes to it");
    stale(bed, results)?;
    revoke(bed, results)
}

/// Loads the module on a node, and checks the node's kernel.
fn load(bed: &mut Bed, node: &str, module: &Path, release: &str, image: &Image, results: &mut Results) -> Result<()> {
    let running_release = bed.cluster.node(node)?.release().to_owned();
    ensure!(
        running_release == release,
        "kernel {running_release} runs on {node}, not the installed {release}"
    );
    let mut running = Running {
        version: bed.text(node, &["cat", "/proc/version"])?,
        notes: bed.quiet(node, &["cat", "/sys/kernel/notes"])?,
        taint_before: taint(bed, node)?,
        ..Running::default()
    };
    bed.shown(node, &["insmod", utf8(module)?])?;
    running.taint_after = taint(bed, node)?;
    running.modules = bed.text(node, &["cat", "/proc/modules"])?;
    results.kernel_release = Some(running_release);
    results.stock.insert(node.into(), stock::check(image, &running, MODULE));
    Ok(())
}

fn taint(bed: &mut Bed, node: &str) -> Result<u64> {
    let text = bed.text(node, &["cat", "/proc/sys/kernel/tainted"])?;
    text.trim().parse().with_context(|| format!("taint {text:?}"))
}

/// Registers 200 MiB, the whole memory, and one byte more.
fn registration(bed: &mut Bed, results: &mut Results) -> Result<()> {
    let (ctl, perf, nic) = (bed.ctl.clone(), bed.perf.clone(), bed.nic(CLIENT)?);
    bed.shown(CLIENT, &[&ctl, "list"])?;
    let list = bed.json(CLIENT, &[&ctl, "list", "--json"])?;
    let accel = bed.addr(CLIENT, ACCEL)?;
    let provider = list["providers"]
        .as_array()
        .and_then(|all| all.iter().find(|provider| provider["addr"] == *accel))
        .with_context(|| format!("{accel} is no provider"))?;
    let largest = provider["largest"]
        .as_u64()
        .context("a provider without a largest piece")?;
    let register = [
        &perf,
        "register",
        "--nic",
        &nic,
        "--memory",
        "accelerator",
        "-n",
        "1",
        "--size",
    ];
    let with = |size| [&register[..], &[size]].concat();
    bed.shown(CLIENT, &with(LARGE))?;
    let all = largest.to_string();
    bed.shown(CLIENT, &with(&all))?;
    results.max_registered = Some(largest);
    let bar = provider["bar"].as_u64().context("a provider without a BAR")?;
    let size = provider["size"].as_u64().context("a provider without a size")?;
    results.refusal_names = vec![accel, format!("BAR {bar}"), human_size(size), "p2pmemctl".into()];
    // One byte more than another program has not registered.
    let more = (largest.saturating_sub(LARGE_BYTES) + 1).to_string();
    let hold = [&ctl, "alloc", LARGE, "--near", &nic, "--exec"];
    results.refusal = Some(bed.refused(CLIENT, &[&hold[..], &with(&more)].concat())?);
    Ok(())
}

/// Measures one row: p2pmem-perf on both nodes, and the devices' counters before and after.
fn transfer(bed: &mut Bed, name: &str) -> Result<Row> {
    let mut ends = name.split('-');
    let memory = |end: Option<&str>| if end == Some("ACC") { "accelerator" } else { "cpu" };
    let (from, to) = (memory(ends.next()), memory(ends.next_back()));
    let (perf, here, there) = (bed.perf.clone(), bed.nic(CLIENT)?, bed.nic(SERVER)?);
    let serve = [
        &perf,
        "serve",
        "--nic",
        &there,
        "--memory",
        to,
        "--events",
        "--timeout",
        TIME_FACTOR,
    ];
    let address = bed.address()?;
    let mut run = vec![
        perf.as_str(),
        "--json",
        "run",
        &address,
        "--nic",
        &here,
        "--memory",
        from,
        "--size",
        MESSAGE,
        "--verify",
        "--timeout",
        TIME_FACTOR,
    ];
    run.extend(if name == rdma::STAGED {
        ["--staged", "-n", STAGED_MESSAGES]
    } else {
        ["--handshake", "-n", MESSAGES]
    });
    let before = bed.cluster.snapshot()?;
    let report = bed.served(&serve, &run).with_context(|| name.to_owned())?;
    let after = bed.cluster.snapshot()?;
    let row = Row::new(name, &report, Moved::between(&before, &after)?)?;
    show(&format!(
        "{name}: {} x {} in {:.2} s{}, CRC-32C of the target {}",
        row.iterations,
        human_size(row.message_bytes),
        row.seconds,
        if row.verified {
            ", every byte right"
        } else {
            ", WRONG BYTES"
        },
        row.checksum
    ));
    Ok(row)
}

/// Writes after a buffer's end, and searches the accelerator's memory for the written data.
fn stale(bed: &mut Bed, results: &mut Results) -> Result<()> {
    let program = sibling("p2pmem-demo-guest")?;
    let program = utf8(&program)?;
    let (ctl, perf, addr) = (bed.ctl.clone(), bed.perf.clone(), bed.addr(SERVER, ACCEL)?);
    let (here, there) = (bed.nic(CLIENT)?, bed.nic(SERVER)?);
    let end = format!("{ctl} unpublish {addr} && {program} scan --accel {ACCEL} > {STATE}");
    let serve = [
        &perf,
        "stale-serve",
        "--nic",
        &there,
        "--memory",
        "accelerator",
        "--events",
        "--end",
        &end,
        "--timeout",
        TIME_FACTOR,
    ];
    let address = bed.address()?;
    let attempts = rdma::STALE_ATTEMPTS.to_string();
    let run = [
        &perf,
        "--json",
        "stale-run",
        &address,
        "--nic",
        &here,
        "--attempts",
        &attempts,
        "--timeout",
        TIME_FACTOR,
    ];
    show_command(SERVER, &serve);
    show_command(CLIENT, &run);
    let tried = bed.served(&serve, &run)?;
    let number = |key: &str| tried[key].as_u64().with_context(|| format!("no number of {key}"));
    let (attempts, refused) = (number("attempts")?, number("refused")?);
    let markers: Vec<&str> = tried["markers"]
        .as_array()
        .context("no markers")?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    ensure!(markers.len() as u64 == attempts, "not every write has its marker");
    let before: Scanned = serde_json::from_slice(&bed.quiet(SERVER, &["cat", STATE])?).context(STATE)?;
    let words = markers.join(",");
    let scan = [program, "scan", "--accel", ACCEL, "--words", &words];
    let after: Scanned = serde_json::from_slice(&bed.quiet(SERVER, &scan)?).context("output of p2pmem-demo-guest")?;
    let stale = Stale {
        attempts,
        writes: after.found,
        unchanged: after.bytes == before.bytes && after.checksum == before.checksum,
        refused,
    };
    show(&format!(
        "{} writes were tried after the buffer's end: {} ended with a remote access error, {} reached the memory; all {} \
         of it are {}",
        stale.attempts,
        stale.refused,
        stale.writes,
        human_size(after.bytes),
        if stale.unchanged { "unchanged" } else { "CHANGED" }
    ));
    results.stale = Some(stale);
    bed.shown(SERVER, &[&ctl, "publish", &addr, "--kernel-reserve", "0"])
}

/// Unbinds the server's accelerator while perftest's client writes to it.
fn revoke(bed: &mut Bed, results: &mut Results) -> Result<()> {
    let shim = tool("libp2pmem_preload.so")?;
    let program = sibling("p2pmem-demo-guest")?;
    let (here, there) = (bed.nic(CLIENT)?, bed.nic(SERVER)?);
    let address = bed.address()?;
    let preload = format!("LD_PRELOAD={shim}");
    let write = |nic: &str| -> Vec<String> {
        let words = [
            "env",
            &preload,
            "ib_write_bw",
            "-d",
            nic,
            "--mmap=/dev/p2pmem",
            "-s",
            "65536",
            "-D",
            "60",
        ];
        words.map(str::to_owned).into()
    };
    let mut serve: Vec<String> = [utf8(&program)?, "revoke", "--accel", ACCEL, "--nic", NIC, "--"]
        .map(str::to_owned)
        .into();
    serve.extend(write(&there));
    let mut run = write(&here);
    run.push(address);
    for (node, argv) in [(SERVER, &serve), (CLIENT, &run)] {
        let words: Vec<&str> = argv.iter().map(String::as_str).collect();
        show_command(node, &words);
    }
    let server = Command::new(serve).limit(SHORT).listen(Listen::Tcp(PERFTEST_PORT));
    let client = Command::new(run).limit(SHORT);
    let served = bed.cluster.serve((SERVER, &server), (CLIENT, &client))?;
    let outcome = bed.taken(SERVER, &server, served.server);
    if let Some(client) = served.client {
        bed.findings
            .extend(client.findings.iter().map(|line| format!("{CLIENT}: {line}")));
        let said = [client.stdout, client.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let words = said.lines().find(|line| rdma::is_remote_access_error(line));
        results.cut_off = Some(words.unwrap_or(said.trim()).trim().to_owned());
        show(&format!(
            "the writer: {}",
            results.cut_off.as_deref().unwrap_or_default()
        ));
    }
    let revoked: Revoked = serde_json::from_slice(&outcome?.stdout).context("output of p2pmem-demo-guest")?;
    show(&format!(
        "unbound within {:.1} ms; {} had been moved, and {} bytes were moved afterwards",
        revoked.unbind_ms,
        human_size(revoked.moved_before),
        revoked.moved_after
    ));
    results.revoked = Some(revoked);
    Ok(())
}

/// Removes everything that the act has set up.
fn end(bed: &mut Bed, results: &mut Results) -> Result<()> {
    ensure!(bed.cluster.is_alive(), "a guest is gone");
    step(12, "Take all down");
    let ctl = bed.ctl.clone();
    let mut leaked = 0;
    for node in [CLIENT, SERVER] {
        let modules = bed.text(node, &["cat", "/proc/modules"])?;
        ensure!(
            modules.lines().any(|line| line.split(' ').next() == Some(MODULE)),
            "the module is not loaded on {node}"
        );
        let list = bed.json(node, &[&ctl, "list", "--json"])?;
        leaked += list["info"]["buffers"].as_u64().context("no number of buffers")?;
        let addr = bed.addr(node, ACCEL)?;
        bed.shown(node, &[&ctl, "unpublish", &addr])?;
        bed.shown(node, &["rmmod", MODULE])?;
    }
    results.leaked_buffers = Some(leaked);
    Ok(())
}

fn devices_table(nodes: &BTreeMap<String, Devices>) -> String {
    let mut table = Table::new();
    table
        .load_preset(NOTHING)
        .set_header(["NODE", "NAME", "KIND", "ADDRESS", "RDMA", "MEMORY TO LEND"]);
    for (node, devices) in nodes {
        for (name, device) in devices {
            table.add_row([
                node.clone(),
                name.clone(),
                device.kind.clone(),
                device.bdf.clone(),
                device.rdma.clone().unwrap_or_else(|| "-".into()),
                match device.memory {
                    0 => "-".into(),
                    bytes => human_size(bytes),
                },
            ]);
        }
    }
    plain(&mut table)
}

/// Formats the rows as a table.
fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header([
        "FROM-TO",
        "GiB/s",
        "RATIO",
        "HOST BYTES",
        "PER BYTE",
        "COPIED PER BYTE",
        "VERIFIED",
    ]);
    for column in 1..=5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows {
        table.add_row([
            row.name.clone(),
            format!("{:.3}", row.gib_per_s),
            format!("{:.2}", row.ratio),
            row.host_bytes.to_string(),
            format!("{:.4}", row.host_bytes_per_payload_byte),
            format!("{:.0}", row.copied_bytes_per_payload_byte),
            if row.verified { "yes" } else { "NO" }.into(),
        ]);
    }
    plain(&mut table)
}
