// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the runner with one guest.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_guest::in_time;
use p2pmem_guest::limits::Overrun;
use p2pmem_guest::wire::Request;
use p2pmem_vm::cluster::Cluster;
use p2pmem_vm::topology::Layout;
use p2pmem_vm::vm::{Command, Options, Status, Vm, sibling, topologies};

use crate::bed::{Attempt, Log};
use crate::lanes::Alone;
use crate::{Test, clean, describe, run, sh};

/// The tests.
pub const TESTS: &[Test] = &[
    Test {
        name: "runner::exit-code",
        topology: "small",
        alone: false,
        run: |cluster| exit_code(cluster.only()?),
    },
    Test {
        name: "runner::output",
        topology: "small",
        alone: false,
        run: |cluster| output(cluster.only()?),
    },
    Test {
        name: "runner::devices",
        topology: "demo",
        alone: false,
        run: |cluster| devices(cluster.only()?),
    },
    Test {
        name: "runner::adopted-cmb",
        topology: "demo",
        alone: false,
        run: |cluster| cmb(cluster.only()?),
    },
    Test {
        name: "runner::devices-unreachable",
        topology: "unreachable",
        alone: false,
        run: |cluster| devices(cluster.only()?),
    },
    Test {
        name: "runner::counters",
        topology: "small",
        alone: false,
        run: |cluster| counters(cluster.only()?),
    },
    Test {
        name: "runner::counters-iommu",
        topology: "iommu",
        alone: false,
        run: |cluster| counters_translated(cluster.only()?),
    },
    Test {
        name: "runner::requests",
        topology: "small",
        alone: false,
        run: |cluster| requests(cluster.only()?),
    },
    Test {
        name: "runner::bad-log-line",
        topology: "small",
        alone: false,
        run: |cluster| bad_log_line(cluster.only()?),
    },
    Test {
        name: "runner::leftovers",
        topology: "small",
        alone: false,
        run: |cluster| leftovers(cluster.only()?),
    },
    Test {
        name: "runner::time-out",
        topology: "small",
        alone: false,
        run: |cluster| time_out(cluster.only()?),
    },
    Test {
        name: "runner::hotplug",
        topology: "demo",
        alone: true,
        run: |cluster| hotplug(cluster.only()?),
    },
    Test {
        name: "runner::device-killed",
        topology: "small",
        alone: true,
        run: |cluster| device_killed(cluster.only()?),
    },
    Test {
        name: "runner::panic",
        topology: "small",
        alone: true,
        run: |cluster| panic(cluster.only()?),
    },
];

/// Tests that boot their guests themselves.
pub const ALONE: &[(&str, Alone)] = &[
    ("runner::no-process-remains", || no_process_remains("small", 3)),
    ("runner::pair-no-process-remains", || no_process_remains("pair", 4)),
    ("runner::exit-codes-of-the-program", program),
    ("runner::what-is-run-again", run_again),
];

/// An overrun runs once more, up to a limit in all tests, and any other failure does not run again.
fn run_again() -> Result<()> {
    let late = || Err(Overrun("late".into()).into());
    let tried_in = |log: &Log, outcome: &dyn Fn(u32) -> Result<()>| {
        let attempts = Cell::new(0);
        let ended = log.test("x", "x", |attempt| {
            attempts.set(attempts.get() + 1);
            ensure!(
                (attempt == Attempt::First) == (attempts.get() == 1),
                "{attempt:?} at {}",
                attempts.get()
            );
            outcome(attempts.get())
        });
        (attempts.get(), ended.is_ok())
    };
    let tried = |outcome: &dyn Fn(u32) -> Result<()>| tried_in(&Log::default(), outcome);
    ensure!(tried(&|_| Ok(())) == (1, true), "success");
    ensure!(tried(&|_| bail!("wrong")) == (1, false), "failure");
    ensure!(
        tried(&|attempt| if attempt == 1 { late() } else { Ok(()) }) == (2, true),
        "one overrun"
    );
    ensure!(tried(&|_| late()) == (2, false), "overruns");
    let log = Log::default();
    for _ in 0..3 {
        ensure!(tried_in(&log, &|_| late()) == (2, false), "three repetitions");
    }
    ensure!(tried_in(&log, &|_| late()) == (1, false), "a fourth repetition");
    let name = "did not start";
    ensure!(log.not_started(name).is_err(), "a test that did not start is a failure");
    Ok(())
}

fn exit_code(vm: &mut Vm) -> Result<()> {
    for code in [0, 1, 42, 255] {
        let status = sh(vm, &format!("exit {code}"))?.status;
        ensure!(status == Status::Exited { code }, "{status:?} instead of {code}");
    }
    let status = sh(vm, "kill -TERM $$")?.status;
    ensure!(status == Status::Signalled { signal: 15 }, "{status:?}");
    let status = run(vm, &Command::new(["/no/such/program"]))?.status;
    ensure!(matches!(status, Status::NotStarted { .. }), "{status:?}");
    Ok(())
}

fn output(vm: &mut Vm) -> Result<()> {
    // More bytes than any buffer between guest and runner holds, on both streams, with all values.
    let outcome = clean(vm, "head -c 3000000 /dev/zero; printf 'a\\377\\000b'; echo err >&2")?;
    ensure!(
        outcome.stdout.len() == 3_000_004 && outcome.stdout.ends_with(b"a\xff\0b"),
        "{} bytes",
        outcome.stdout.len()
    );
    ensure!(outcome.stderr == b"err\n");
    let mut streamed = Vec::new();
    let command = Command::new(["sh", "-c", "echo $WORD; pwd"]).env("WORD", "value");
    vm.exec(
        &Command {
            cwd: "/usr".into(),
            ..command
        },
        &mut |_, bytes| streamed.extend_from_slice(bytes),
    )?;
    ensure!(streamed == b"value\n/usr\n", "{streamed:?}");
    Ok(())
}

fn devices(vm: &mut Vm) -> Result<()> {
    let outcome = clean(vm, "cat /run/p2pmem/devices.json")?;
    let seen: BTreeMap<String, p2pmem_guest::devices::Device> = serde_json::from_slice(&outcome.stdout)?;
    let known = vm.devices()?;
    ensure!(seen.len() >= 2 && seen.keys().eq(known.keys()), "{seen:?}");
    for (name, device) in &seen {
        let id = clean(vm, &format!("cat /sys/bus/pci/devices/{}/device", device.bdf))?.stdout;
        let expected: &[u8] = match device.kind.as_str() {
            "accel" => b"0xa2c1\n",
            "nvme" => b"0x0010\n",
            _ => b"0x1110\n",
        };
        ensure!(
            id == expected,
            "{name} at {}: device id {}",
            device.bdf,
            String::from_utf8_lossy(&id)
        );
        if let Some(block) = &device.block {
            // The drive's serial number is the name of the device.
            let controller = block.file_name().context("name")?.to_string_lossy().replace("n1", "");
            let serial = clean(vm, &format!("cat /sys/class/nvme/{controller}/serial"))?.stdout;
            ensure!(
                String::from_utf8_lossy(&serial).trim() == name,
                "{name} has serial {serial:?}"
            );
        }
    }
    Ok(())
}

fn cmb(vm: &mut Vm) -> Result<()> {
    let text = clean(vm, "cat /sys/bus/pci/devices/$P2PMEM_DEV_NVME1/p2pmem/size")?.stdout;
    ensure!(String::from_utf8_lossy(&text).trim() == (16 << 20).to_string());
    let node = clean(vm, "cat /sys/bus/pci/devices/$P2PMEM_DEV_ACCEL1/numa_node")?.stdout;
    ensure!(node == b"1\n", "accel1 is on node {}", String::from_utf8_lossy(&node));
    Ok(())
}

fn moved(vm: &mut Vm, direction: &str, target: &str) -> Result<u64> {
    Ok(vm.snapshot()?["nvme0"][direction][target].as_u64().unwrap_or(0))
}

/// The drive's DMA is translated, and its bytes are nevertheless assigned to the memory that they are in.
fn counters_translated(vm: &mut Vm) -> Result<()> {
    crate::iommu::translated(vm, "NVME0")?;
    counters(vm)
}

fn counters(vm: &mut Vm) -> Result<()> {
    for bytes in [4096u64, 512 << 10, 8 << 20] {
        let (read, written) = (moved(vm, "read", "host")?, moved(vm, "write", "host")?);
        let block = (bytes as usize).min(1 << 20);
        let count = bytes / block as u64;
        clean(
            vm,
            &format!("dd if=$P2PMEM_BLOCK_NVME0 of=/dev/null iflag=direct bs={block} count={count}"),
        )?;
        ensure!(moved(vm, "read", "host")? - read == bytes, "reading {bytes}");
        clean(
            vm,
            &format!("dd if=/dev/zero of=$P2PMEM_BLOCK_NVME0 oflag=direct bs={block} count={count}"),
        )?;
        ensure!(moved(vm, "write", "host")? - written == bytes, "writing {bytes}");
    }
    let snapshot = vm.snapshot()?;
    ensure!(snapshot["nvme0"]["payload"]["unknown"] == 0, "{snapshot}");
    ensure!(snapshot["nvme0"]["failed"] == 0, "{snapshot}");
    ensure!(snapshot["accel0"]["counters"].is_object(), "{snapshot}");
    Ok(())
}

fn requests(vm: &mut Vm) -> Result<()> {
    let ask = |vm: &mut Vm, request: &str| -> Result<serde_json::Value> {
        let script = format!(
            "python3 -c 'import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(\"/run/p2pmem/host.sock\"); \
             s.sendall(sys.argv[1].encode()+b\"\\n\"); print(s.makefile().readline())' '{request}'"
        );
        Ok(serde_json::from_slice(&clean(vm, &script)?.stdout)?)
    };
    let snapshot = ask(vm, r#"{"op":"snapshot"}"#)?;
    ensure!(snapshot["Ok"]["nvme0"]["kind"] == "nvme", "{snapshot}");
    let devices = ask(vm, r#"{"op":"devices"}"#)?;
    ensure!(devices["Ok"]["accel0"]["memory"] == 64 << 20, "{devices}");
    let unknown = ask(vm, r#"{"op":"kill","name":"nobody"}"#)?;
    ensure!(
        unknown["Err"]
            .as_str()
            .is_some_and(|e| e.contains("no device \"nobody\"")),
        "{unknown}"
    );
    let drive = ask(vm, r#"{"op":"kill","name":"nvme0"}"#)?;
    ensure!(
        drive["Err"]
            .as_str()
            .is_some_and(|e| e.contains("no process of its own")),
        "{drive}"
    );
    let bad = ask(vm, r#"{"op":"fly"}"#)?;
    ensure!(bad["Err"].as_str().is_some_and(|e| e.contains("bad request")), "{bad}");
    Ok(())
}

fn bad_log_line(vm: &mut Vm) -> Result<()> {
    let outcome = sh(
        vm,
        "echo 'WARNING: CPU: 0 PID: 1 at test.c:1' >/dev/kmsg; echo '<6>all is well' >/dev/kmsg",
    )?;
    ensure!(outcome.status == Status::Exited { code: 0 } && !outcome.is_clean());
    ensure!(
        outcome.findings.len() == 1 && outcome.findings[0].contains("WARNING: CPU: 0"),
        "{:?}",
        outcome.findings
    );
    ensure!(outcome.dmesg.iter().any(|r| r.text == "all is well"));
    // The next command does not get these findings.
    clean(vm, "true")?;
    Ok(())
}

fn leftovers(vm: &mut Vm) -> Result<()> {
    clean(vm, "sleep 1000 & sleep 1001 & exit 0")?;
    let outcome = sh(vm, "pgrep -x sleep")?;
    ensure!(
        outcome.status == Status::Exited { code: 1 },
        "processes were left: {}",
        describe(&outcome, vm)
    );
    Ok(())
}

fn time_out(vm: &mut Vm) -> Result<()> {
    let start = Instant::now();
    let outcome = run(
        vm,
        &Command::new(["sh", "-c", "echo before; sleep 1000"]).limit(Duration::from_secs(3)),
    )?;
    ensure!(
        outcome.status == Status::TimedOut && outcome.stdout == b"before\n",
        "{outcome:?}"
    );
    in_time!(
        start.elapsed() < Duration::from_secs(60),
        "it was ended after {:?}",
        start.elapsed()
    );
    ensure!(
        outcome.dmesg.iter().any(|r| r.text.contains("Show Blocked State")),
        "the report has no backtraces"
    );
    // The guest still runs commands.
    clean(vm, "true")?;
    Ok(())
}

fn hotplug(vm: &mut Vm) -> Result<()> {
    let name = || "shm0".to_owned();
    let bdf = vm.devices()?.remove("shm0").context("shm0")?.bdf;
    let wait_for = |vm: &mut Vm, test: &str| -> Result<()> {
        // The time limit of all scripts ends it.
        clean(
            vm,
            &format!("until [ {test} /sys/bus/pci/devices/{bdf} ]; do sleep 0.05; done"),
        )
        .map(drop)
    };
    for _ in 0..2 {
        vm.serve(&Request::DeviceDel { name: name() })?;
        wait_for(vm, "! -e")?;
        ensure!(!vm.devices()?.contains_key("shm0"));
        vm.serve(&Request::DeviceAdd { name: name() })?;
        wait_for(vm, "-e")?;
        ensure!(vm.devices()?.get("shm0").is_some_and(|note| note.bdf == bdf));
    }
    // Requests that QEMU cannot serve are refused, and the guest continues.
    for request in [
        Request::DeviceDel { name: "accel0".into() },
        Request::DeviceAdd { name: "nvme0".into() },
    ] {
        ensure!(vm.serve(&request).is_err(), "{request:?}");
    }
    clean(vm, "true").map(drop)
}

fn device_killed(vm: &mut Vm) -> Result<()> {
    vm.serve(&Request::Kill { name: "accel0".into() })?;
    ensure!(vm.snapshot()?["accel0"]["gone"] == true);
    let again = vm.serve(&Request::Kill { name: "accel0".into() });
    ensure!(again.is_err(), "killed twice");
    // The guest continues, and its drive works.
    clean(
        vm,
        "dd if=$P2PMEM_BLOCK_NVME0 of=/dev/null iflag=direct bs=4096 count=1",
    )?;
    Ok(())
}

fn panic(vm: &mut Vm) -> Result<()> {
    let outcome = sh(vm, "echo c >/proc/sysrq-trigger; sleep 100")?;
    let Status::Panicked { line } = &outcome.status else {
        bail!("{}", describe(&outcome, vm))
    };
    ensure!(line.contains("sysrq triggered crash"), "{line}");
    ensure!(
        !vm.is_alive() && vm.console_tail().contains("Kernel panic"),
        "{}",
        vm.console_tail()
    );
    let after = sh(vm, "true")?;
    ensure!(matches!(after.status, Status::Panicked { .. }), "{:?}", after.status);
    Ok(())
}

/// Checks that all processes of a topology's guests end with the guests.
fn no_process_remains(topology: &str, processes: usize) -> Result<()> {
    let layout = Layout::load(&topologies().join(format!("{topology}.toml")))?;
    let cluster = Cluster::boot(&layout, &Options::default())?;
    let ids = cluster.process_ids();
    ensure!(ids.len() == processes, "{ids:?}");
    let alive = |id: &u32| Path::new(&format!("/proc/{id}")).exists();
    ensure!(ids.iter().all(alive), "{ids:?}");
    drop(cluster);
    ensure!(!ids.iter().any(alive), "of {ids:?} some are left");
    Ok(())
}

/// The runner's exit code for an exceeded time limit.
const LATE: i32 = 124;

/// The command line of the runner: exit codes and the report.
fn program() -> Result<()> {
    let program = sibling("p2pmem-vm")?;
    let topology = topologies().join("small.toml");
    let run = |words: &[&str]| -> Result<std::process::Output> {
        Ok(std::process::Command::new(&program)
            .arg("run")
            .arg("--topology")
            .arg(&topology)
            .args(words)
            .output()?)
    };
    let ended = |output: &std::process::Output, code: i32| -> Result<()> {
        let got = output.status.code();
        in_time!(got == Some(code) || got != Some(LATE), "{output:?}");
        ensure!(got == Some(code), "{output:?}");
        Ok(())
    };
    let cases: &[(&[&str], i32)] = &[
        (&["--env", "X=7", "--", "sh", "-c", "echo out; exit $X"], 7),
        (&["--", "sh", "-c", "echo BUG: x >/dev/kmsg"], 121),
        (&["--timeout", "1", "--", "sleep", "100"], LATE),
        (&["--"], 125),
        (&["--env", "X", "--", "true"], 125),
        (&["--module", "/no/such.ko", "--", "true"], 125),
    ];
    for (words, code) in cases {
        ended(&run(words)?, *code).with_context(|| format!("{words:?}"))?;
    }
    let output = run(&["--json", "--", "sh", "-c", "echo out; echo err >&2"])?;
    ended(&output, 0)?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).context("report")?;
    ensure!(
        report["outcome"]["stdout"] == "out\n" && report["outcome"]["stderr"] == "err\n",
        "{report}"
    );
    ensure!(
        report["exit_code"] == 0 && report["kernel_release"].is_string(),
        "{report}"
    );
    ensure!(report["boot_seconds"].as_f64().is_some_and(|s| s > 0.1), "{report}");
    Ok(())
}
