// SPDX-License-Identifier: MIT OR Apache-2.0

//! Programs that use p2pmem: perftest with the preload shim, the examples of the C library, and p2pmemctl. Also: rxe,
//! which cannot register buffers on a stock kernel.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use p2pmem::rdma::Nic;
use p2pmem::{Access, Device, Mapping, Pd, RegisterOptions, RegistrationMethod, Request};

use super::{Bed, Case};
use crate::in_time;
use crate::patience::patiently;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rdma-preload",
        about: "perftest on a mapping of /dev/p2pmem works with the shim, and fails clearly on a stock kernel without",
        topology: "nic",
        ruins: false,
        run: preload,
    },
    Case {
        name: "rdma-c",
        about: "C example alloc.c, built with pkg-config, allocates near the NIC and registers the buffer",
        topology: "nic",
        ruins: false,
        run: c_library,
    },
    Case {
        name: "share-c",
        about: "C example share.c allocates a stripe, shares it, and reads the other process's answers in the parts",
        topology: "demo",
        ruins: false,
        run: c_sharing,
    },
    Case {
        name: "rdma-tool",
        about: "p2pmemctl selftest transfers data by RDMA WRITE and READ, and doctor and topo list the NIC",
        topology: "nic",
        ruins: false,
        run: tool,
    },
    Case {
        name: "rdma-software",
        about: "rxe cannot register buffers on a stock kernel; library and shim say why, and host memory works",
        topology: "small",
        ruins: false,
        run: software,
    },
];

/// Time limit of a program, before the factor of [`patiently`].
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the path of a file in this program's folder. Fails if the file was not built.
fn sibling(name: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    ensure!(path.exists(), "{} is not built: make user", path.display());
    Ok(path)
}

/// Waits for a program and returns its output, which a thread reads meanwhile, so that the program never blocks on a
/// full pipe. Kills the program after [`LIMIT`], and fails with an overrun.
fn finish(child: Child) -> Result<Output> {
    let deadline = Instant::now() + patiently(LIMIT);
    let id = child.id().to_string();
    let waiting = thread::spawn(move || child.wait_with_output());
    let mut killed = false;
    while !waiting.is_finished() {
        if !killed && Instant::now() > deadline {
            killed = true;
            super::command("kill", &["-9", &id])?;
        }
        thread::sleep(Duration::from_millis(20));
    }
    let output = waiting
        .join()
        .map_err(|_| anyhow!("the thread that reads the output panicked"))??;
    in_time!(!killed, "a program did not end within {LIMIT:?}: {}", text(&output));
    Ok(output)
}

/// Returns exit status, standard output and standard error as text.
fn text(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn spawn(command: &mut Command) -> Result<Child> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().with_context(|| format!("{command:?}"))
}

/// Waits until a process listens on a TCP port. Fails if `server` exits before, or with an overrun after [`LIMIT`].
fn listening(port: u16, server: &mut Child) -> Result<()> {
    let wanted = format!(":{port:04X} ");
    let deadline = Instant::now() + patiently(LIMIT);
    while server.try_wait()?.is_none() {
        in_time!(
            Instant::now() < deadline,
            "no process listens on port {port} after {LIMIT:?}"
        );
        let tables = [read("/proc/net/tcp")?, read("/proc/net/tcp6")?].concat();
        let listens = |line: &str| line.split_whitespace().nth(3) == Some("0A") && line.contains(&wanted);
        if tables.lines().any(listens) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    bail!("the server ended before it listened on port {port}")
}

fn read(path: &str) -> Result<String> {
    fs::read_to_string(path).with_context(|| path.to_owned())
}

/// A run of a perftest program on one NIC, as server and client.
struct Perftest<'a> {
    tool: &'a str,
    nic: &'a str,
    port: u16,
    /// The server's IP address.
    address: &'a str,
    /// Whether source and target are memory of /dev/p2pmem instead of host memory.
    mapped: bool,
    /// The preload shim, if the programs use it.
    shim: Option<&'a Path>,
}

impl Perftest<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(self.tool);
        command.args([
            "-d",
            self.nic,
            "-F",
            "-n",
            "100",
            "-s",
            "65536",
            "-p",
            &self.port.to_string(),
        ]);
        if self.mapped {
            command.arg("--mmap=/dev/p2pmem");
        }
        if let Some(shim) = self.shim {
            command.env("LD_PRELOAD", shim).env("P2PMEM_PRELOAD_LOG", "1");
        }
        command
    }

    /// Runs server and client to their end. Returns the output of both.
    fn run(&self) -> Result<(Output, Output)> {
        let mut server = spawn(&mut self.command())?;
        if let Err(error) = listening(self.port, &mut server) {
            // The server has exited, or does not listen in time.
            let _ = server.kill();
            bail!("{}: {error}: {}", self.tool, text(&server.wait_with_output()?));
        }
        let client = finish(spawn(self.command().arg(self.address))?);
        let server = finish(server);
        Ok((server?, client?))
    }
}

fn preload(bed: &mut Bed) -> Result<()> {
    let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
    let shim = sibling("libp2pmem_preload.so")?;
    super::command("ip", &["link", "set", "lo", "up"])?;
    let run = Perftest {
        tool: "ib_write_bw",
        nic: &nic,
        port: 18600,
        address: "127.0.0.1",
        mapped: true,
        shim: Some(&shim),
    };
    for (n, tool) in ["ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_write_lat"]
        .iter()
        .enumerate()
    {
        let port = run.port + n as u16;
        let (server, client) = Perftest { tool, port, ..run }.run()?;
        for (role, output) in [("server", &server), ("client", &client)] {
            ensure!(output.status.success(), "{tool}, {role}: {}", text(output));
            let stderr = String::from_utf8_lossy(&output.stderr);
            ensure!(
                stderr.contains("is a dma-buf region now") && stderr.contains(&nic),
                "{tool}, {role}: the shim logged no registration with {nic}: {}",
                text(output)
            );
        }
    }
    let (server, client) = Perftest {
        port: 18620,
        shim: None,
        ..run
    }
    .run()?;
    if Device::open()?.info()?.peer_memory() {
        for output in [&server, &client] {
            ensure!(
                output.status.success(),
                "ib_write_bw without the shim failed on a kernel with the peer-memory interface: {}",
                text(output)
            );
        }
        return Ok(());
    }
    for (role, output) in [("server", &server), ("client", &client)] {
        let printed = text(output);
        ensure!(
            !output.status.success(),
            "ib_write_bw without the shim, {role}, succeeded on a stock kernel: {printed}"
        );
        println!("ib_write_bw without the shim, {role}: {printed}");
    }
    ensure!(
        text(&client).contains("Couldn't allocate MR"),
        "\"Couldn't allocate MR\" is not in the client's output: {}",
        text(&client)
    );
    // perftest does not print the errno, so check the errno with the library.
    let memory = Device::open()?.alloc(&Request::new(65536))?.map()?;
    refuses_reg_mr(&memory, &Pd::open(&nic)?)
}

/// Checks that `ibv_reg_mr()` of a mapped buffer fails on a stock kernel with EREMOTEIO, and that the library's error
/// has a remedy.
fn refuses_reg_mr(memory: &Mapping, pd: &Pd) -> Result<()> {
    let options = RegisterOptions::new(Access::ALL).method(RegistrationMethod::PeerMemory);
    let error = memory.register_with(pd, &options).unwrap_err();
    println!("ibv_reg_mr(): {error}");
    ensure!(
        error.errno() == Some(libc::EREMOTEIO) && error.remedy().is_some_and(|r| r.contains("by dma-buf")),
        "ibv_reg_mr() on a stock kernel: expected EREMOTEIO and a remedy, got {error}"
    );
    Ok(())
}

/// An example of the C library, built with pkg-config against an installed copy of the library. Dropping removes the
/// folder.
struct CExample {
    name: &'static str,
    dir: PathBuf,
}

impl CExample {
    fn build(name: &'static str, libraries: &str) -> Result<CExample> {
        let built = sibling("libp2pmem_capi.so")?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../userspace/p2pmem-capi");
        let dir = Path::new("/tmp/p2pmem-c").join(name);
        let script = format!(
            "set -e; {source}/install {build} {dir}/usr\n\
             export PKG_CONFIG_PATH={dir}/usr/lib/pkgconfig\n\
             cc -std=gnu11 -o {dir}/{name} {source}/examples/{name}.c $(pkg-config --cflags --libs p2pmem) {libraries}\n",
            source = source.display(),
            build = built.parent().context("the library's path has no folder")?.display(),
            dir = dir.display(),
        );
        let output = finish(spawn(Command::new("sh").args(["-c", &script]))?)?;
        ensure!(output.status.success(), "building {name}.c: {}", text(&output));
        Ok(CExample { name, dir })
    }

    fn run(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(self.dir.join(self.name));
        command.args(arguments).env("LD_LIBRARY_PATH", self.dir.join("usr/lib"));
        finish(spawn(&mut command)?)
    }
}

impl Drop for CExample {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn c_sharing(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let before = bed.settled()?;
    let example = CExample::build("share", "")?;
    let drive = bed.device("nvme0")?.bdf.clone();
    let output = example.run(&["12582912", "3", &drive])?;
    ensure!(
        output.status.success(),
        "C example {} failed: {}",
        example.name,
        text(&output)
    );
    let printed = String::from_utf8_lossy(&output.stdout);
    let mut wanted = Vec::new();
    // The adopted provider nvme1 has the same path class to nvme0 as accel0.
    for (part, name) in ["accel0", "nvme1", "shm0"].iter().enumerate() {
        wanted.push(format!(
            "part {part}: 4194304 bytes in provider {}\n",
            bed.provider(name)?.id
        ));
    }
    wanted.push("3 parts were read and answered by another process\n".into());
    wanted.push("and its answers are in 3 parts\n".into());
    for wanted in wanted {
        ensure!(
            printed.contains(&wanted),
            "{wanted:?} is not in the example's output {printed:?}"
        );
    }
    ensure!(
        bed.settled()? == before,
        "free bytes and buffers are {:?} after the example instead of {before:?}",
        bed.settled()?
    );
    let output = example.run(&["12582912", "5", &drive])?;
    let printed = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1) && printed.contains("stripe: ") && printed.contains("needs 5 parts"),
        "a stripe of 5 parts in 4 providers: expected exit status 1 and a message, got {}",
        text(&output)
    );
    bed.unpublish("accel1")?;
    bed.unpublish("shm0")
}

fn c_library(bed: &mut Bed) -> Result<()> {
    let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
    let example = CExample::build("alloc", "-libverbs")?;
    let run = |arguments: &[&str]| example.run(arguments);
    let output = run(&["1048576", &nic])?;
    ensure!(
        output.status.success(),
        "C example {} failed: {}",
        example.name,
        text(&output)
    );
    let printed = String::from_utf8_lossy(&output.stdout);
    let accel = &bed.device("accel0")?.bdf;
    for wanted in [
        &format!(": {accel} BAR 2, "),
        "1048576 bytes in provider ",
        " was chosen",
        "131072 words written and read back",
        "exported as a dma-buf",
        "registered by dma-buf: 1048576 bytes from ",
    ] {
        ensure!(
            printed.contains(wanted),
            "{wanted:?} is not in the example's output: {printed}"
        );
    }
    let output = run(&["1099511627776"])?;
    let printed = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1)
            && printed.contains("alloc: ")
            && printed.contains("BAR 2 has")
            && printed.contains("->"),
        "1 TiB: expected exit status 1 and an explanation, got {}",
        text(&output)
    );
    Ok(std::io::stdout().write_all(&output.stderr)?)
}

fn tool(bed: &mut Bed) -> Result<()> {
    let nic = bed.device("nic0")?.rdma.clone().context("nic0 has no RDMA device")?;
    let ctl = sibling("p2pmemctl")?;
    let run = |arguments: &[&str]| -> Result<String> {
        let output = finish(spawn(Command::new(&ctl).args(arguments))?)?;
        ensure!(output.status.success(), "p2pmemctl {arguments:?}: {}", text(&output));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let accel = bed.device("accel0")?.bdf.clone();
    let printed = run(&["selftest", "--provider", &accel, "--size", "64K", "--nic", &nic])?;
    ensure!(
        printed.contains(&format!("registered with {nic} by dma-buf in ")),
        "p2pmemctl selftest did not register with {nic}: {printed}"
    );
    ensure!(
        printed.contains(&format!("{nic} moved 64 KiB by RDMA WRITE and READ: ok")),
        "p2pmemctl selftest did not transfer data: {printed}"
    );
    let printed = run(&["doctor"])?;
    ensure!(
        printed.contains(&format!("{nic} (mlx5_core) registers dma-bufs")),
        "p2pmemctl doctor does not list {nic}: {printed}"
    );
    let printed = run(&["topo", &nic])?;
    ensure!(
        printed.contains(&nic) && printed.contains("SW"),
        "p2pmemctl topo does not list {nic} with class SW: {printed}"
    );
    let output = finish(spawn(Command::new(&ctl).args([
        "selftest",
        "--provider",
        &accel,
        "--nic",
        "mlx5_77",
    ]))?)?;
    let printed = text(&output);
    ensure!(
        output.status.code() == Some(1) && printed.contains(&format!("the RDMA devices are {nic}")),
        "p2pmemctl selftest with unknown NIC mlx5_77: expected exit status 1 and a list of NICs, got {printed}"
    );
    Ok(())
}

/// Runs a test with an rxe device on a veth pair without other hosts: the device can only connect to itself. Calls
/// `test` with the name of the RDMA device and its IP address.
pub(super) fn with_rxe(test: impl FnOnce(&str, &str) -> Result<()>) -> Result<()> {
    let steps = [
        "modprobe rdma_rxe",
        "ip link set lo up",
        "ip link add p2pmem0 type veth peer name p2pmem1",
        "ip link set p2pmem1 up",
        "ip link set p2pmem0 up",
        "ip addr add 192.0.2.1/24 dev p2pmem0",
        "rdma link add rxe0 type rxe netdev p2pmem0",
    ];
    for step in steps {
        super::command("sh", &["-c", step])?;
    }
    let result = port_up("rxe0", "c000:0201").and_then(|()| test("rxe0", "192.0.2.1"));
    super::command("sh", &["-c", "rdma link delete rxe0 && ip link delete p2pmem0"])?;
    result
}

/// Waits until port 1 of an rxe device is ACTIVE and has a GID that ends with `address`. The kernel does both
/// asynchronously after changes of the network device. Fails with an overrun after [`LIMIT`].
fn port_up(nic: &str, address: &str) -> Result<()> {
    let port = Path::new("/sys/class/infiniband").join(nic).join("ports/1");
    let deadline = Instant::now() + patiently(LIMIT);
    loop {
        let state = fs::read_to_string(port.join("state"))?;
        let gids = fs::read_dir(port.join("gids"))?
            // Reading an unused entry fails.
            .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
        if state.contains("ACTIVE") && gids.into_iter().any(|gid| gid.trim_end().ends_with(address)) {
            return Ok(());
        }
        in_time!(
            Instant::now() < deadline,
            "{nic} is not ACTIVE with a GID that ends with {address} after {LIMIT:?}; state: {}",
            state.trim()
        );
        thread::sleep(Duration::from_millis(20));
    }
}

fn software(_bed: &mut Bed) -> Result<()> {
    with_rxe(software_tests)
}

fn software_tests(nic: &str, address: &str) -> Result<()> {
    let device = Device::open()?;
    let buffer = device.alloc(&Request::new(65536))?;
    let memory = buffer.map()?;
    let pd = Pd::open(nic)?;
    let error = buffer.register(&pd, Access::ALL).unwrap_err();
    ensure!(
        error.errno() == Some(libc::EOPNOTSUPP)
            && error.to_string().contains("with rxe0 by dma-buf failed")
            && error.remedy().is_some_and(|r| r.contains("doctor")),
        "registering by dma-buf with rxe: expected EOPNOTSUPP and a remedy, got {error}"
    );
    refuses_reg_mr(&memory, &pd)?;
    let error = Nic::open(nic).unwrap_err();
    ensure!(
        error.to_string().contains("on no PCI device"),
        "Nic::open() of rxe failed with another error: {error}"
    );
    drop(pd);

    let shim = sibling("libp2pmem_preload.so")?;
    let run = Perftest {
        tool: "ib_write_bw",
        nic,
        port: 18630,
        address,
        mapped: true,
        shim: Some(&shim),
    };
    let (server, client) = run.run()?;
    for output in [&server, &client] {
        let printed = text(output);
        let reason =
            "on rxe0: as a dma-buf region: not supported (EOPNOTSUPP): the NIC's driver cannot register dma-bufs";
        ensure!(
            !output.status.success() && printed.contains(reason),
            "expected a failure with {reason:?}, got {printed}"
        );
    }
    // The shim passes host memory to libibverbs. The shim's check for buffers of p2pmem must not write to the log.
    let before = refusals()?;
    let (server, client) = Perftest {
        port: 18631,
        mapped: false,
        ..run
    }
    .run()?;
    for output in [&server, &client] {
        ensure!(
            output.status.success() && !text(output).contains("p2pmem_preload"),
            "host memory: expected success and no message of the shim, got {}",
            text(output)
        );
    }
    ensure!(
        refusals()? == before,
        "the kernel logged refused exports for host memory"
    );
    Ok(())
}

/// Counts refused exports in the kernel's log.
fn refusals() -> Result<usize> {
    let output = finish(spawn(&mut Command::new("dmesg"))?)?;
    ensure!(output.status.success(), "dmesg: {}", text(&output));
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(log
        .lines()
        .filter(|line| line.contains("EXPORT_DMABUF refused"))
        .count())
}
