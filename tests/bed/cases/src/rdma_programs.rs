// SPDX-License-Identifier: MIT OR Apache-2.0

//! Programs: perftest with the preload library, the C library's examples, p2pmemctl; and registration with a NIC that does
//! not support it.

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
use crate::limits::scaled;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "rdma-preload",
        about: "Debian's ib_write_bw on a mapping of /dev/p2pmem works with the shim; without, it fails clearly on a stock kernel",
        topology: "nic",
        ruins: false,
        run: preload,
    },
    Case {
        name: "rdma-c",
        about: "the C example, built by pkg-config, allocates near the NIC and registers with it",
        topology: "nic",
        ruins: false,
        run: c_library,
    },
    Case {
        name: "share-c",
        about: "the C example that allocates a stripe and has another process answer in its parts",
        topology: "demo",
        ruins: false,
        run: c_sharing,
    },
    Case {
        name: "rdma-tool",
        about: "p2pmemctl selftest and doctor --pair have the NIC move bytes in both directions, doctor knows its driver",
        topology: "nic",
        ruins: false,
        run: tool,
    },
    Case {
        name: "rdma-software",
        about: "a NIC that is software cannot take buffers, and library and shim say so",
        topology: "small",
        ruins: false,
        run: software,
    },
];

/// The time limit of a program.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the path of a program that was built with this one.
pub(super) fn sibling(name: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    ensure!(path.exists(), "{} is not built: make user", path.display());
    Ok(path)
}

/// Runs a program to its end, within the limit. Reads its output meanwhile, so that no pipe fills up.
pub(super) fn finish(child: Child) -> Result<Output> {
    let deadline = Instant::now() + scaled(LIMIT);
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
        .map_err(|_| anyhow!("the thread that waits panicked"))??;
    in_time!(!killed, "a program did not end within {LIMIT:?}: {}", text(&output));
    Ok(output)
}

pub(super) fn text(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

pub(super) fn spawn(command: &mut Command) -> Result<Child> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().with_context(|| format!("{command:?}"))
}

/// Waits until a socket listens on a TCP port of this machine.
fn listening(port: u16, server: &mut Child) -> Result<()> {
    let wanted = format!(":{port:04X} ");
    let deadline = Instant::now() + scaled(LIMIT);
    while server.try_wait()?.is_none() {
        in_time!(
            Instant::now() < deadline,
            "nobody listens on port {port} after {LIMIT:?}"
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

/// Runs perftest's server and client on one NIC. Returns the server's and the client's output.
struct Perftest<'a> {
    tool: &'a str,
    nic: &'a str,
    port: u16,
    /// The server's address.
    address: &'a str,
    /// Whether target and source are memory of /dev/p2pmem.
    mapped: bool,
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

    fn run(&self) -> Result<(Output, Output)> {
        let mut server = spawn(&mut self.command())?;
        if let Err(error) = listening(self.port, &mut server) {
            // The process has ended, or has to end.
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
        for (who, output) in [("server", &server), ("client", &client)] {
            ensure!(output.status.success(), "{tool}, the {who}: {}", text(output));
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(
                said.contains("registered as a dma-buf, lkey") && said.contains(&nic),
                "{tool}, the {who}, registered nothing by the shim: {}",
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
            ensure!(output.status.success(), "{}", text(output));
        }
        return Ok(());
    }
    for (who, output) in [("server", &server), ("client", &client)] {
        let said = text(output);
        ensure!(
            !output.status.success(),
            "ib_write_bw without the shim, the {who}, should fail: {said}"
        );
        println!("without the shim, the {who}: {said}");
    }
    ensure!(text(&client).contains("Couldn't allocate MR"), "{}", text(&client));
    // perftest does not print the errno.
    let memory = Device::open()?.alloc(&Request::new(65536))?.map()?;
    by_addresses(&memory, &Pd::open(&nic)?)
}

/// Fails unless a stock kernel refuses `ibv_reg_mr()` of a buffer, with a remedy.
fn by_addresses(memory: &Mapping, pd: &Pd) -> Result<()> {
    let what = RegisterOptions::new(Access::ALL).method(RegistrationMethod::PeerMemory);
    let error = memory.register_with(pd, &what).unwrap_err();
    println!("by its addresses: {error}");
    ensure!(
        error.errno() == Some(libc::EREMOTEIO) && error.remedy().is_some_and(|r| r.contains("by dma-buf")),
        "a stock kernel takes device memory by its addresses: {error}"
    );
    Ok(())
}

/// An example of the C library, built against an installed library with pkg-config.
struct CExample {
    name: &'static str,
    place: PathBuf,
}

impl CExample {
    fn build(name: &'static str, libraries: &str) -> Result<CExample> {
        let built = sibling("libp2pmem_capi.so")?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../userspace/p2pmem-capi");
        let place = Path::new("/tmp/p2pmem-c").join(name);
        let script = format!(
            "set -e; {source}/install {build} {place}/usr\n\
             export PKG_CONFIG_PATH={place}/usr/lib/pkgconfig\n\
             cc -std=gnu11 -o {place}/{name} {source}/examples/{name}.c $(pkg-config --cflags --libs p2pmem) {libraries}\n",
            source = source.display(),
            build = built.parent().context("no folder")?.display(),
            place = place.display(),
        );
        let output = finish(spawn(Command::new("sh").args(["-c", &script]))?)?;
        ensure!(output.status.success(), "building {name}.c: {}", text(&output));
        Ok(CExample { name, place })
    }

    fn run(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(self.place.join(self.name));
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", self.place.join("usr/lib"));
        finish(spawn(&mut command)?)
    }
}

impl Drop for CExample {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.place);
    }
}

fn c_sharing(bed: &mut Bed) -> Result<()> {
    bed.publish("accel1")?;
    bed.publish("shm0")?;
    let before = bed.settled()?;
    let example = CExample::build("share", "")?;
    let drive = bed.device("nvme0")?.bdf.clone();
    let output = example.run(&["12582912", "3", &drive])?;
    ensure!(output.status.success(), "the C example: {}", text(&output));
    let said = String::from_utf8_lossy(&output.stdout);
    let mut wanted = Vec::new();
    // Memory that nvme1's own driver published is as near.
    for (part, name) in ["accel0", "nvme1", "shm0"].iter().enumerate() {
        wanted.push(format!(
            "part {part}: 4194304 bytes in provider {}\n",
            bed.provider(name)?.id
        ));
    }
    wanted.push("3 parts were read and answered by another process\n".into());
    wanted.push("and its answers are in 3 parts\n".into());
    for wanted in wanted {
        ensure!(said.contains(&wanted), "{wanted:?} is not in {said:?}");
    }
    ensure!(bed.settled()? == before);
    let output = example.run(&["12582912", "5", &drive])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1) && said.contains("stripe: ") && said.contains("needs 5 parts"),
        "five parts in four providers: {}",
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
    ensure!(output.status.success(), "the C example: {}", text(&output));
    let said = String::from_utf8_lossy(&output.stdout);
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
            said.contains(wanted),
            "{wanted:?} is not in what the C example says: {said}"
        );
    }
    let output = run(&["1099511627776"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1)
            && said.contains("alloc: ")
            && said.contains("BAR 2 has")
            && said.contains("->"),
        "a TiB: {}",
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
    let said = run(&["selftest", "--device", &accel, "--size", "64K", "--nic", &nic])?;
    ensure!(
        said.contains(&format!("registered with {nic} by dma-buf in ")),
        "{said}"
    );
    ensure!(
        said.contains(&format!("{nic} moved 64 KiB by RDMA WRITE and READ: ok")),
        "{said}"
    );
    let said = run(&["doctor"])?;
    ensure!(
        said.contains(&format!("{nic} (mlx5_core) registers dma-bufs")),
        "{said}"
    );
    let said = run(&["doctor", "--pair", &nic, &accel])?;
    let measured = [
        format!("{nic} and {accel}: SW "),
        format!("1 MiB of {accel}, by the module"),
        format!("{nic} registered the memory by dma-buf in "),
        format!("{nic} moved 1 MiB by RDMA WRITE and READ, and all bytes arrived"),
        "0 failures".to_owned(),
    ];
    for words in measured {
        ensure!(said.contains(&words), "{words}: {said}");
    }
    let said = run(&["topo", &nic])?;
    ensure!(said.contains(&nic) && said.contains("SW"), "{said}");
    let output = finish(spawn(
        Command::new(&ctl).args(["selftest", "--device", &accel, "--nic", "mlx5_77"]),
    )?)?;
    let said = text(&output);
    ensure!(
        output.status.code() == Some(1) && said.contains(&format!("the RDMA devices are {nic}")),
        "{said}"
    );
    Ok(())
}

/// Runs a test with RDMA in software, on a network interface without a peer: the adapter can communicate with itself. The
/// test's arguments are the adapter's name and address.
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

/// Waits until a software NIC's port is up and has the GID with this end: the kernel does both asynchronously after changes of
/// the network device.
fn port_up(nic: &str, address: &str) -> Result<()> {
    let port = Path::new("/sys/class/infiniband").join(nic).join("ports/1");
    let deadline = Instant::now() + scaled(LIMIT);
    loop {
        let state = fs::read_to_string(port.join("state"))?;
        let gids = fs::read_dir(port.join("gids"))?
            // Unused entries cannot be read.
            .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
        if state.contains("ACTIVE") && gids.into_iter().any(|gid| gid.trim_end().ends_with(address)) {
            return Ok(());
        }
        in_time!(
            Instant::now() < deadline,
            "{nic} has not come up with {address}: {}",
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
        "{error}"
    );
    by_addresses(&memory, &pd)?;
    let error = Nic::open(nic).unwrap_err();
    ensure!(error.to_string().contains("on no PCI device"), "{error}");
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
        let said = text(output);
        let why = "on rxe0: dma-buf registration failed: not supported (EOPNOTSUPP): the NIC's driver cannot register dma-bufs";
        ensure!(!output.status.success() && said.contains(why), "{said}");
    }
    // The client does not accept host memory, and its acquire() logs nothing.
    let said = refusals()?;
    let (server, client) = Perftest {
        port: 18631,
        mapped: false,
        ..run
    }
    .run()?;
    for output in [&server, &client] {
        ensure!(
            output.status.success() && !text(output).contains("p2pmem_preload"),
            "{}",
            text(output)
        );
    }
    ensure!(refusals()? == said, "the shim's questions fill the log");
    Ok(())
}

/// Returns the lines of the kernel's log about exports that the module refused.
fn refusals() -> Result<usize> {
    let output = finish(spawn(&mut Command::new("dmesg"))?)?;
    ensure!(output.status.success(), "dmesg: {}", text(&output));
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(log
        .lines()
        .filter(|line| line.contains("EXPORT_DMABUF refused"))
        .count())
}
