// SPDX-License-Identifier: MIT OR Apache-2.0

//! The recorder between two guests: an accelerator node records by one and by two ports on the drives of a storage node, and plays
//! back. Reports rates beside those of the links and of transfers through host memory, and bytes of host memory.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use p2pmem_guest::wire::Listen;
use p2pmem_recorder_suite::measured::Session;
use p2pmem_recorder_suite::report::{Direction, MOST_LINK_RATIO, MovedBytes, ROUNDS, Report, Row, VERIFY_EVERY};
use p2pmem_vm::command::Command;
use p2pmem_vm::counters::difference;
use p2pmem_vm::demo::{self, Places};
use p2pmem_vm::kernel;
use p2pmem_vm::qemu::utf8;
use p2pmem_vm::script::Script;
use p2pmem_vm::topology::{Device, Layout};
use p2pmem_vm::vm::{sibling, tool};
use serde_json::Value;

/// The topology.
const TOPOLOGY: &str = "recorder-rate";
/// The accelerator node and the storage node.
const NODES: [&str; 2] = ["a", "b"];
/// The NICs of each node.
const NICS: [&str; 2] = ["nic0", "nic1"];
/// The first TCP port of perftest. Each NIC has its own.
const PERFTEST_PORT: u16 = 18515;
/// The TCP port of the recorder.
const RECORDER_PORT: u16 = 18700;
/// The time limit of a transfer.
const LONG_LIMIT: Duration = Duration::from_secs(180);
/// Bytes of a block, as in the paper that the recorder follows.
const BLOCK: u64 = 1 << 20;
/// Folders of the storage node's drives.
const DRIVES: &str = "/run/recorder/nvme0,/run/recorder/nvme1";
/// The stream, and its options.
const STREAM: &str = "fast/radar --block-size 1M --channels 2";
/// Both NICs.
const BOTH: [u32; 2] = [0, 1];
const TOKEN: &str = "/run/recorder.token";

/// Records from an accelerator to the drives of another node, and plays back.
///
/// Exit codes: 0 all aims are met, 1 one is not or something failed, 2 bad usage.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// The module, for the stock kernel
    #[arg(long, value_name = "PATH")]
    module: PathBuf,
    /// Where the report goes, as JSON
    #[arg(long, value_name = "PATH")]
    report: PathBuf,
    /// Blocks of 1 MiB that each session transfers
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(16..=128))]
    blocks: u64,
}

struct Bed {
    script: Script,
    blocks: u64,
}

impl Bed {
    fn shell(&mut self, node: &str, script: &str) -> Result<String> {
        self.script.run(node, &["bash", "-c", script])
    }

    /// Returns the names of NICs' RDMA devices, as options have them.
    fn nics(&self, node: &str, nics: &[u32]) -> Result<String> {
        let names: Vec<String> = nics
            .iter()
            .map(|nic| self.script.nic(node, NICS[*nic as usize]))
            .collect::<Result<_>>()?;
        Ok(names.join(","))
    }

    /// Measures what the links of these NICs do at the same time, by perftest. Returns MB/s of each. perftest measures the
    /// frequency of the processor's clock first, and now and then prints a rate of 0 in an emulator: then it measures again.
    fn link_rates(&mut self, program: &str, nics: &[u32]) -> Result<Vec<f64>> {
        for _ in 0..3 {
            let rates = self.measure_links(program, nics)?;
            if rates.iter().all(|rate| *rate > 0.0) {
                return Ok(rates);
            }
            println!("   {program} measured {rates:?}; once more");
        }
        bail!("{program} printed a rate of 0 three times")
    }

    fn measure_links(&mut self, program: &str, nics: &[u32]) -> Result<Vec<f64>> {
        let script = |node: &str, peer: &str| -> Result<String> {
            let mut script = "set -e\npids=()\n".to_owned();
            for nic in nics {
                let port = PERFTEST_PORT + *nic as u16;
                script += &format!(
                    "{program} -F -d {} -p {port} -s {BLOCK} -n {} --report_gbits {peer} >/run/perftest.{nic} & pids+=($!)\n",
                    self.nics(node, &[*nic])?,
                    self.blocks
                );
            }
            script += "for pid in \"${pids[@]}\"; do wait \"$pid\"; done\n";
            for nic in nics {
                script += &format!("awk '$1 == {BLOCK} && NF >= 4 {{ print $4 }}' /run/perftest.{nic}\n");
            }
            Ok(script)
        };
        let (listen, server) = (PERFTEST_PORT + nics[nics.len() - 1] as u16, script(NODES[1], "")?);
        let client = script(NODES[0], "\"$P2PMEM_ADDR_B\"")?;
        let server = Command::new(["bash", "-c", &server])
            .limit(LONG_LIMIT)
            .listen(Listen::Tcp(listen));
        let client = Command::new(["bash", "-c", &client]).limit(LONG_LIMIT);
        let [_, text] = self.script.run_pair((NODES[1], &server), (NODES[0], &client))?;
        // The average rate in Gb/s.
        let rates = text.lines().map(|line| Ok(line.trim().parse::<f64>()? * 125.0));
        let rates: Vec<f64> = rates
            .collect::<Result<_>>()
            .with_context(|| format!("perftest's output: {text:?}"))?;
        ensure!(rates.len() == nics.len(), "perftest's output: {text:?}");
        Ok(rates)
    }

    /// Returns what the devices have moved.
    fn moved_bytes(counted: &Value) -> Result<MovedBytes> {
        let number = |value: &Value, what: &str| value.as_u64().with_context(|| format!("no counter {what}"));
        let node = |node: &str| -> Result<u64> {
            let mut sum = 0;
            for nic in NICS {
                let payload = &counted[node][nic]["counters"]["payload"];
                sum += number(&payload["host_read"], "host_read")? + number(&payload["host_written"], "host_written")?;
            }
            let accel = &counted[node]["accel0"]["counters"];
            sum += number(&accel["host_read"], "host_read")? + number(&accel["host_written"], "host_written")?;
            Ok(sum)
        };
        // A target without a transfer has no counter.
        let drive = |name: &str, target: &str| {
            let drive = &counted[NODES[1]][name];
            drive.get("counters").unwrap_or(drive)["payload"][target]
                .as_u64()
                .unwrap_or(0)
        };
        Ok(MovedBytes {
            accelerator_node_host: node(NODES[0])?,
            storage_node_host: node(NODES[1])?,
            drives_host: drive("nvme0", "host") + drive("nvme1", "host"),
            drives_device: drive("nvme0", "accel0") + drive("nvme1", "accel0"),
        })
    }

    /// Starts the storage node's program, runs a transfer, and stops the program.
    fn transfer(&mut self, direction: Direction, nics: &[u32], staged: bool, link: Vec<f64>) -> Result<Row> {
        let memory = if staged { "host" } else { "device" };
        let serve = [
            tool("p2pmem-recorder")?,
            "serve".into(),
            "--drive".into(),
            DRIVES.into(),
            "--nic".into(),
            self.nics(NODES[1], &[0, 1])?,
            "--token-file".into(),
            TOKEN.into(),
            "--memory".into(),
            memory.into(),
            "--sessions".into(),
            nics.len().to_string(),
            "--timeout".into(),
            "60".into(),
        ];
        let address = self.script.run(NODES[0], &["printenv", "P2PMEM_ADDR_B"])?;
        let accel = self.script.device(NODES[0], "accel0")?.bdf.clone();
        let mut client = vec![
            utf8(&sibling("p2pmem-recorder-accel")?)?.to_owned(),
            format!("{address}:{RECORDER_PORT}"),
            "--token-file".into(),
            TOKEN.into(),
            "--lun".into(),
            "fast".into(),
            "--stream".into(),
            "radar".into(),
            "--channel".into(),
            nics[0].to_string(),
            "--nic".into(),
            self.nics(NODES[0], nics)?,
            "--node-nic".into(),
            nics[0].to_string(),
            "--accel".into(),
            accel,
            "--verify".into(),
            VERIFY_EVERY.to_string(),
        ];
        if staged {
            client.push("--staged".into());
        }
        match direction {
            Direction::Recording => client.extend(["record".into(), self.blocks.to_string()]),
            Direction::Playback => client.push("play".into()),
        }
        let server = Command::new(serve).limit(LONG_LIMIT).listen(Listen::Tcp(RECORDER_PORT));
        let client = Command::new(client).limit(LONG_LIMIT);
        let before = self.script.cluster.snapshot()?;
        let [_, text] = self.script.run_pair((NODES[1], &server), (NODES[0], &client))?;
        let counted = difference(&before, &self.script.cluster.snapshot()?);
        let sessions: Vec<Session> = serde_json::from_str(&text).with_context(|| format!("output {text:?}"))?;
        let mut moved = Self::moved_bytes(&counted)?;
        moved.accelerator_node_host += sessions.iter().map(|session| session.copied).sum::<u64>();
        let ports = nics.iter().map(|nic| nic + 1).collect();
        Ok(Row::new(direction, ports, staged, &sessions, link, moved))
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let places = Places {
        report: &cli.report,
        page: None,
    };
    demo::run(places, Report::default(), |report| {
        run_demo(&cli, report)?;
        report.judge(cli.blocks);
        for compared in &report.to_staged {
            let (name, ratios) = (compared.direction.name(), &compared.ratios);
            println!(
                "   {name}: {:.2} of the rate through host memory, the median of {ratios:.2?}",
                compared.median
            );
        }
        // run-tests counts these lines.
        for slow in &report.slow {
            println!("MISS {slow}");
        }
        Ok(())
    })
}

/// Returns the rate of the links of a layout, in MB/s.
fn link_rate(layout: &Layout) -> Result<f64> {
    let node = layout.nodes.first().context("a layout without nodes")?;
    match node.topology.device(NICS[0]) {
        Some(Device::Nic {
            bytes_per_second: Some(rate),
            ..
        }) => Ok(rate.0 as f64 / 1e6),
        _ => bail!("{}: the link of {} has no rate", layout.name, NICS[0]),
    }
}

fn run_demo(cli: &Cli, report: &mut Report) -> Result<()> {
    let module = fs::canonicalize(&cli.module)
        .with_context(|| format!("{}: build it by `make modules`", cli.module.display()))?;
    report.verdict.kernel_release = kernel::release()?;
    report.link_mb_per_s = link_rate(&Script::layout(TOPOLOGY)?)?;
    let mut bed = Bed {
        script: Script::boot(TOPOLOGY, &report.verdict.kernel_release)?,
        blocks: cli.blocks,
    };
    let done = transfer_all(utf8(&module)?, &mut bed, report);
    report.verdict.failures.extend(bed.script.shut_down());
    done
}

fn transfer_all(module: &str, bed: &mut Bed, report: &mut Report) -> Result<()> {
    println!("2. Publish the accelerators; on the storage node, make file systems on both drives and a LUN over them");
    let (ctl, recorder) = (tool("p2pmemctl")?, tool("p2pmem-recorder")?);
    for name in NODES {
        // IP over InfiniBand sends messages of its own, which are in host memory.
        bed.shell(name, "! [ -e /sys/module/ib_ipoib ] || rmmod ib_ipoib")?;
        bed.script.load(name, module, &ctl, &["accel0"], &[])?;
        bed.shell(name, &format!("umask 077; echo 'a token of the demo' >{TOKEN}"))?;
    }
    // Segments of 15 blocks for four sessions, each with half of its blocks on each drive. The stream is made again after them.
    let segments = 4 * bed.blocks.div_ceil(30) + 4;
    bed.shell(
        NODES[1],
        &format!(
            "set -e
            for drive in nvme0 nvme1; do
                variable=P2PMEM_BLOCK_${{drive^^}}
                mkfs.ext4 -q \"${{!variable}}\"
                mkdir -p /run/recorder/$drive
                mount -t ext4 \"${{!variable}}\" /run/recorder/$drive
            done
            {recorder} lun create fast --drive {DRIVES} --segment-size 16M --segments {segments}
            {recorder} stream create {STREAM} --drive {DRIVES}"
        ),
    )?;

    let links = measure_links(bed, report.link_mb_per_s)?;
    println!("4. Record and play: signal, transform, SEND; READ, transform");
    let mut transfer = |bed: &mut Bed, link: &Link, nics: &[u32], staged: bool| -> Result<()> {
        let rates = nics.iter().map(|nic| link.rates[*nic as usize]).collect();
        let row = bed.transfer(link.direction, nics, staged, rates)?;
        println!("   {}: {:.2} of the link's rate", row.name(), row.ratio_to_link);
        report.tables.push(row);
        Ok(())
    };
    for link in &links {
        for nic in BOTH {
            transfer(bed, link, &[nic], false)?;
        }
    }
    for round in 0..ROUNDS {
        let again = format!(
            "set -e
            {recorder} stream delete fast/radar --drive {DRIVES}
            {recorder} stream create {STREAM} --drive {DRIVES}"
        );
        bed.shell(NODES[1], &again)?;
        // In each round, the other kind of transfer is the first one.
        let staged_first = round % 2 == 1;
        for link in &links {
            for staged in [staged_first, !staged_first] {
                transfer(bed, link, &BOTH, staged)?;
            }
        }
    }
    print(
        &report.tables,
        Direction::Recording,
        "Table 1. Recording rate (from the accelerator), MB/s",
    );
    print(
        &report.tables,
        Direction::Playback,
        "Table 2. Playback rate (to the accelerator), MB/s",
    );

    println!("5. Take all down");
    bed.shell(NODES[1], "umount /run/recorder/nvme0 /run/recorder/nvme1")?;
    for name in NODES {
        bed.script.unload(name, &ctl, &["accel0"])?;
    }
    Ok(())
}

/// The rates of the links in a direction, by NIC, in MB/s.
struct Link {
    direction: Direction,
    rates: Vec<f64>,
}

/// Measures the links, both at the same time, in each direction. No link has more than `rate` MB/s.
fn measure_links(bed: &mut Bed, rate: f64) -> Result<Vec<Link>> {
    println!("3. What the links do at the same time, by perftest");
    let mut links = Vec::new();
    for (program, direction) in [
        ("ib_send_bw", Direction::Recording),
        ("ib_read_bw", Direction::Playback),
    ] {
        let rates = bed.link_rates(program, &BOTH)?;
        println!("   {program}: port 1 {:.1} MB/s, port 2 {:.1} MB/s", rates[0], rates[1]);
        let is_possible = rates.iter().all(|measured| *measured <= MOST_LINK_RATIO * rate);
        ensure!(
            is_possible,
            "{program} measured {rates:?} MB/s on links of {rate:.1} MB/s"
        );
        links.push(Link { direction, rates });
    }
    Ok(links)
}

/// Prints one of the two tables.
fn print(rows: &[Row], direction: Direction, title: &str) {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header([
        "",
        "PORT 1",
        "PORT 2",
        "AGGREGATE",
        "LINK",
        "RATIO",
        "HOST BYTES/BYTE, ACCELERATOR NODE",
        "STORAGE NODE",
    ]);
    for column in 1..=7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in rows.iter().filter(|row| row.direction == direction) {
        let rate = |port: u32| {
            let at = row.ports.iter().position(|other| *other == port);
            at.map_or_else(String::new, |at| format!("{:.1}", row.mb_per_s[at]))
        };
        let kind = if row.ports.len() == 1 {
            "single port"
        } else {
            "dual port"
        };
        let staged = if row.staged { ", through host memory" } else { "" };
        table.add_row([
            format!("{kind}{staged}"),
            rate(1),
            rate(2),
            format!("{:.1}", row.aggregate_mb_per_s),
            format!("{:.1}", row.link_mb_per_s.iter().sum::<f64>()),
            format!("{:.2}", row.ratio_to_link),
            format!("{:.4}", row.host_bytes_per_byte[0]),
            format!("{:.4}", row.host_bytes_per_byte[1]),
        ]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    println!("   {title}");
    for line in table.trim_fmt().lines() {
        println!("   {line}");
    }
}
