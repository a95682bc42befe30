// SPDX-License-Identifier: MIT OR Apache-2.0

//! Unmodified programs under `p2pmemctl run`: which provider their memory comes from, how long they hold it, and what is
//! refused.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use p2pmem_sys as abi;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::inflight::until;
use super::rdma_programs::{finish, sibling, spawn, text};
use super::{Bed, Case, errno, free, open, request};
use crate::host;
use crate::sys::{self, Memory};
use crate::wire::Request;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "near-fio",
        about: "fio under p2pmemctl run reads into the provider near the device that run names, not the one it would get",
        topology: "demo",
        ruins: false,
        run: fio,
    },
    Case {
        name: "near-life",
        about: "memory of a program under p2pmemctl run ends with its mapping, and run returns the program's exit code",
        topology: "small",
        ruins: false,
        run: life,
    },
    Case {
        name: "near-removed",
        about: "the provider is removed while a program under p2pmemctl run writes: SIGBUS ends it, and run says so; rmmod waits for it",
        topology: "small",
        ruins: false,
        run: removed,
    },
    Case {
        name: "near-orphan",
        about: "a program whose p2pmemctl run was killed keeps its memory and the shim, and its end frees the memory",
        topology: "small",
        ruins: false,
        run: orphan,
    },
    Case {
        name: "near-refused",
        about: "p2pmemctl run and the shim refuse unknown devices and what cannot be placed, and no memory is taken elsewhere",
        topology: "small",
        ruins: false,
        run: refused,
    },
];

const REPORT: &str = "/tmp/p2pmem-run.json";

/// Returns `p2pmemctl run` for a command near a device.
fn near(device: &str, command: &[&str]) -> Result<Command> {
    let mut run = Command::new(sibling("p2pmemctl")?);
    run.args(["run", "--near", device, "--report", REPORT, "--"])
        .args(command);
    Ok(run)
}

fn report() -> Result<Value> {
    let text = fs::read_to_string(REPORT).context(REPORT)?;
    serde_json::from_str(&text).context(text)
}

/// Returns the bytes that nvme0 has read into each of these targets.
fn read_into<const N: usize>(targets: [&str; N]) -> Result<[u64; N]> {
    let snapshot = host::request(&Request::Snapshot)?;
    Ok(targets.map(|target| snapshot["nvme0"]["read"][target].as_u64().unwrap_or(0)))
}

const MIB: u64 = 1 << 20;

fn fio(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    let (accel0, accel1) = (bed.provider("accel0")?.id, bed.device("accel1")?.bdf.clone());
    let file = open()?;
    // Without clients, the module prefers the less loaded provider. The drive's own memory is too small for 20 MiB.
    let mut load = request(64 * MIB);
    load.req.provider = accel0;
    sys::alloc(file.as_fd(), &mut load, Memory::Slice(&mut [])).map_err(errno)?;

    // The kernel may number the drives differently from the topology.
    let block = bed.block("nvme0")?;
    let name = block.file_name().and_then(|name| name.to_str()).context("no name")?;
    let drive = format!("--filename={}", block.display());
    let fio = |jobs: u32| -> Vec<String> {
        let fixed =
            "fio --name=t --ioengine=psync --direct=1 --mem=mmapshared:/dev/p2pmem --rw=read --bs=20m --size=20m";
        let jobs = format!("--numjobs={jobs}");
        fixed
            .split(' ')
            .map(str::to_owned)
            .chain([drive.clone(), jobs])
            .collect()
    };
    let one = fio(1);
    let one: Vec<&str> = one.iter().map(String::as_str).collect();
    let targets = ["accel0", "accel1", "host"];
    let gained = |run: &dyn Fn() -> Result<()>| -> Result<[u64; 3]> {
        let before = read_into(targets)?;
        run()?;
        let after = read_into(targets)?;
        Ok([0, 1, 2].map(|at| after[at] - before[at]))
    };
    let alone = gained(&|| super::command(one[0], &one[1..]))?;
    ensure!(
        alone == [0, 20 * MIB, 0],
        "without run, nvme0 read {alone:?} bytes into {targets:?}"
    );

    let run = |device: &str, command: &[&str]| -> Result<()> {
        let output = finish(spawn(&mut near(device, command)?)?)?;
        ensure!(output.status.success(), "near {device}: {}", text(&output));
        println!("near {device}: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(())
    };
    let placed = gained(&|| run(name, &one))?;
    ensure!(
        placed == [20 * MIB, 0, 0],
        "near nvme0, nvme0 read {placed:?} bytes into {targets:?}"
    );
    let summary = report()?;
    let buffers = &summary["buffers"];
    ensure!(
        buffers.as_array().is_some_and(|all| all.len() == 1)
            && buffers[0]["addr"] == bed.device("accel0")?.bdf.as_str()
            && buffers[0]["class"] == "same-switch"
            && buffers[0]["bytes"].as_u64() >= Some(20 * MIB)
            && summary["near"][0]["name"] == name,
        "{summary}"
    );

    // Both jobs of fio are processes that fio forks.
    let two = fio(2);
    let two: Vec<&str> = two.iter().map(String::as_str).collect();
    let placed = gained(&|| run(&accel1, &two))?;
    ensure!(
        placed == [0, 40 * MIB, 0],
        "near accel1, nvme0 read {placed:?} bytes into {targets:?}"
    );
    let summary = report()?;
    let buffers = &summary["buffers"];
    ensure!(
        buffers.as_array().is_some_and(|all| all.len() == 1)
            && buffers[0]["addr"] == accel1.as_str()
            && buffers[0]["class"] == "same-device"
            && buffers[0]["count"] == 2,
        "{summary}"
    );
    free(file.as_fd(), load.handle).map_err(errno)?;
    bed.unpublish("accel1")
}

/// A Python program that maps a MiB twice and accesses it. Each line of its input is executed, then it prints `ok`.
const PROGRAM: &str = "
import mmap, os, signal, sys
device = os.open('/dev/p2pmem', os.O_RDWR)
one, two = mmap.mmap(device, 1 << 20), mmap.mmap(device, 1 << 20)
one[0] = two[0] = 1
print('ok', flush=True)
for line in sys.stdin:
    exec(line)
    print('ok', flush=True)
";

/// The Python program, under `p2pmemctl run`.
struct Program(Child);

impl Program {
    fn start() -> Result<Program> {
        let mut run = near("nvme0", &["python3", "-c", PROGRAM])?;
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = Program(run.spawn()?);
        program.ok()?;
        Ok(program)
    }

    /// Waits for the program's next `ok`.
    fn ok(&mut self) -> Result<()> {
        let mut line = String::new();
        // The reader takes one byte at a time, and none of a later line.
        let out = self.0.stdout.as_mut().context("no pipe")?;
        BufReader::with_capacity(1, out).read_line(&mut line)?;
        ensure!(line == "ok\n", "the program printed {line:?}");
        Ok(())
    }

    fn execute(&mut self, line: &str) -> Result<()> {
        let input = self.0.stdin.as_mut().context("no pipe")?;
        writeln!(input, "{line}")?;
        Ok(())
    }

    /// Waits for the end of `run`. Returns its exit code and what it printed on standard error.
    fn end(self) -> Result<(Option<i32>, String)> {
        let output = finish(self.0)?;
        Ok((
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ))
    }
}

fn life(bed: &mut Bed) -> Result<()> {
    let (_, before) = bed.settled()?;
    let held = |more: u32| -> Result<()> {
        let now = bed.provider("accel0")?.buffers;
        ensure!(now == before + more, "{now} buffers instead of {before} and {more}");
        Ok(())
    };
    let took = "took 2 MiB of p2pmem memory near nvme0 in 2 buffers:\n";

    // A mapping holds its buffer, without the open file too. Another mapping has another buffer.
    let mut program = Program::start()?;
    held(2)?;
    program.execute("one.close()")?;
    program.ok()?;
    held(1)?;
    program.execute("os.close(device)")?;
    program.ok()?;
    held(1)?;
    program.execute("two[0] == 1 or sys.exit(3)")?;
    program.ok()?;
    program.execute("sys.exit(7)")?;
    let (code, said) = program.end()?;
    ensure!(code == Some(7) && said.contains(took), "{code:?}: {said}");
    held(0)?;
    let summary = report()?;
    ensure!(
        summary["exit_code"] == 7 && summary["programs"] == 1 && summary["buffers"][0]["bytes"] == 2 << 20,
        "{summary}"
    );

    // A killed program.
    let mut program = Program::start()?;
    program.execute("os.kill(os.getpid(), signal.SIGKILL)")?;
    let (code, said) = program.end()?;
    ensure!(code == Some(137) && said.contains(took), "{code:?}: {said}");
    held(0)?;

    // A signal to run reaches the program.
    let program = Program::start()?;
    held(2)?;
    let id = Pid::from_child(&program.0);
    kill_process(id, Signal::TERM)?;
    let (code, said) = program.end()?;
    ensure!(code == Some(143) && said.contains(took), "{code:?}: {said}");
    let summary = report()?;
    ensure!(summary["signal"] == 15, "{summary}");
    held(0)
}

fn removed(bed: &mut Bed) -> Result<()> {
    bed.settled()?;
    let provider = bed.provider("accel0")?.id;
    let mut program = Program::start()?;
    ensure!(
        super::command("rmmod", &["p2pmem"]).is_err(),
        "rmmod succeeded while a program has the device open"
    );
    // Prints `ok`, and writes until a signal ends the program.
    program.execute("print('ok', flush=True); any(one.__setitem__(0, 1) for _ in iter(int, 1))")?;
    program.ok()?;
    bed.unpublish("accel0")?;
    let (code, said) = program.end()?;
    let removed = format!(
        "SIGBUS ended python3: provider {provider} ({}) was removed",
        bed.device("accel0")?.bdf
    );
    ensure!(
        code == Some(135)
            && said.contains("took 2 MiB of p2pmem memory near nvme0 in 2 buffers:\n")
            && said.contains(&removed),
        "{code:?}: {said}"
    );
    let summary = report()?;
    ensure!(
        summary["signal"] == libc::SIGBUS
            && summary["exit_code"].is_null()
            && summary["buffers"][0]["bytes"] == 2 << 20
            && summary["removed_providers"] == serde_json::json!([provider]),
        "{summary}"
    );
    super::command("rmmod", &["p2pmem"])?;
    bed.load_module()
}

/// A program that maps a page, as a line of [`PROGRAM`]. It is executed by the program.
const CHILD: &str = "
import subprocess; subprocess.run([sys.executable, '-c', 'import mmap, os; mmap.mmap(os.open(\"/dev/p2pmem\", os.O_RDWR), 4096)[0] = 1'], check=True)";

fn orphan(bed: &mut Bed) -> Result<()> {
    let (_, before) = bed.settled()?;
    let held = |more: u32| -> Result<bool> { Ok(bed.provider("accel0")?.buffers == before + more) };
    let mut program = Program::start()?;
    kill_process(Pid::from_child(&program.0), Signal::KILL)?;
    // wait() closes the input, which the program still reads.
    let input = program.0.stdin.take();
    let status = program.0.wait()?;
    program.0.stdin = input;
    ensure!(status.signal() == Some(libc::SIGKILL), "run ended with {status}");
    ensure!(held(2)?, "the program lost its buffers with run");
    program.execute("one[0] == 1 and two[0] == 1 or sys.exit(3)")?;
    program.ok()?;
    // What the program maps and executes is still placed, without counters.
    program.execute(CHILD.trim())?;
    program.ok()?;
    program.execute("three = mmap.mmap(device, 4096); three[0] = 1")?;
    program.ok()?;
    ensure!(held(3)?, "{:?}", bed.provider("accel0")?);
    program.execute("sys.exit(0)")?;
    until("the memory is free", || held(0))
}

/// A Python program that maps as many bytes as its argument says, and exits with the errno.
const MAP: &str = "
import mmap, os, sys
try:
    mmap.mmap(os.open('/dev/p2pmem', os.O_RDWR), int(sys.argv[1]))
except OSError as error:
    sys.exit(error.errno)
";

fn refused(_bed: &mut Bed) -> Result<()> {
    let allocs = || -> Result<u64> {
        let mut stats = abi::p2pmem_stats::default();
        sys::plain(open()?.as_fd(), abi::P2PMEM_IOC_STATS, &mut stats).map_err(errno)?;
        Ok(stats.allocs)
    };
    let before = allocs()?;
    let fails = |command: &mut Command, code: i32, words: &[&str]| -> Result<()> {
        let output = finish(spawn(command)?)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(code) && words.iter().all(|word| said.contains(word)),
            "{command:?} is to exit with {code} and print {words:?}: {}",
            text(&output)
        );
        Ok(())
    };
    let map = |size: &'static str| ["python3", "-c", MAP, size];

    // Nothing is started.
    fails(&mut near("nvme7", &map("4096"))?, 125, &["nvme7", "no such device"])?;
    fails(&mut near("0000:7f:00.0", &map("4096"))?, 125, &["0000:7f:00.0"])?;
    fails(
        &mut near("nvme0", &["no-such-program"])?,
        127,
        &["no-such-program was not found"],
    )?;
    fails(
        &mut near("nvme0", &["/etc/passwd"])?,
        126,
        &["/etc/passwd is not executable"],
    )?;
    fails(
        &mut near("nvme0", &["/sbin/ldconfig", "-p"])?,
        125,
        &["/sbin/ldconfig is statically linked"],
    )?;

    // The module refuses a mapping.
    let words = [
        "p2pmem_preload: mmap() of 1099511627776 bytes near ",
        "ENODEV",
        "got no p2pmem memory near nvme0",
    ];
    fails(&mut near("nvme0", &map("1099511627776"))?, libc::ENODEV, &words)?;

    // The shim alone, with and without devices that exist.
    let shim = sibling("libp2pmem_preload.so")?;
    let alone = |near: &str, command: &[&str]| {
        let mut program = Command::new(command[0]);
        program
            .args(&command[1..])
            .env("LD_PRELOAD", &shim)
            .env("P2PMEM_NEAR", near);
        program
    };
    let words = ["P2PMEM_NEAR is not usable (ENODEV): there is no device nvme7"];
    fails(&mut alone("nvme7", &map("4096")), libc::ENODEV, &words)?;
    let words = ["p2pmem_preload: mmap() of 4096 bytes near 0000:7f:00.0: ", "ENODEV"];
    fails(&mut alone("0000:7f:00.0", &map("4096")), libc::ENODEV, &words)?;
    ensure!(allocs()? == before, "{} instead of {before} allocations", allocs()?);
    fails(&mut alone("nvme0", &map("4096")), 0, &[])?;
    ensure!(
        allocs()? == before + 1,
        "{} instead of {before} allocations and 1",
        allocs()?
    );
    Ok(())
}
