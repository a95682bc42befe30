// SPDX-License-Identifier: MIT OR Apache-2.0

//! The first program of a guest: sets the guest up, then runs the commands that the VM runner sends.
//!
//! It is process 1, so it must not end before the guest does: it reports an error to the runner, then powers the guest
//! off. If the runner's port is gone, it powers the guest off as well.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use p2pmem_guest::devices::{self, Devices};
use p2pmem_guest::host::SOCKET;
use p2pmem_guest::in_time;
use p2pmem_guest::limits::{Overrun, TIME_FACTOR};
use p2pmem_guest::network::{self, is_listened_on};
use p2pmem_guest::wire::{self, Frame, KMSG_MARK, Kind, Listen, Network, PORT_NAME, Request, ToGuest, ToHost};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, setrlimit};

/// The time that a command's pipes may stay open after its end, while its remaining processes are killed.
const DRAIN: Duration = Duration::from_secs(30);
/// The interval at which a killed process is checked.
const DYING: Duration = Duration::from_millis(1);
/// The time limit for drives to have their block devices.
const BLOCK_DEVICES: Duration = Duration::from_secs(60);
/// The time limit for NICs to have their RDMA devices, with active ports.
const PORTS: Duration = Duration::from_secs(60);
/// The time limit for an IPoIB interface to join its network.
const IPOIB: Duration = Duration::from_secs(60);
/// The seconds of an uninterruptible wait after which the kernel reports a task: longer than the slow drives of the tests take
/// for a command, on a busy machine.
const HUNG_TASK: u32 = 60;
/// The interval at which a wait checks its condition.
const LOOK: Duration = Duration::from_millis(10);

/// The drivers and services that a NIC needs.
const RDMA_MODULES: [&str; 6] = ["mlx5_core", "mlx5_ib", "ib_uverbs", "rdma_ucm", "ib_umad", "ib_ipoib"];

/// The search path of programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn main() {
    if std::process::id() != 1 {
        eprintln!("p2pmem-guest-init: this is the init of a guest, started by its kernel (process 1)");
        std::process::exit(2);
    }
    if let Err(e) = run() {
        kernel_log(&format!("p2pmem-guest-init: {e:#}"));
        eprintln!("p2pmem-guest-init: {e:#}");
    }
    rustix::fs::sync();
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    // Returning would be a kernel panic, which hides why powering off failed.
    loop {
        thread::park();
    }
}

/// The running command, with its number and process group.
type Running = Arc<Mutex<Option<(u64, Pid)>>>;

/// The port to the runner. Any thread can send whole frames.
#[derive(Clone)]
struct Port(Arc<Mutex<File>>);

impl Port {
    fn frame(&self, kind: Kind, payload: &[u8]) {
        // An error means that the runner is gone. The reader gets the end of the stream and ends the guest.
        if let Ok(mut file) = self.0.lock() {
            let _ = wire::write_frame(&mut *file, kind, payload);
        }
    }

    fn control(&self, message: &ToHost) {
        if let Ok(mut file) = self.0.lock() {
            let _ = wire::write_control(&mut *file, message);
        }
    }
}

fn run() -> Result<()> {
    mount_all()?;
    stop_deadline_servers()?;
    let file = open_port()?;
    let mut from = BufReader::new(file.try_clone()?);
    let port = Port(Arc::new(Mutex::new(file)));
    forward_kernel_log(port.clone())?;
    port.control(&ToHost::Hello {
        release: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
    });

    let replies: Replies = Replies::default();
    let (execs, exec_queue) = mpsc::channel::<Exec>();
    let running = Running::default();
    let mut exec_queue = Some(exec_queue);
    while let Some(Frame { kind, payload }) = wire::read_frame(&mut from)? {
        if kind != Kind::Control {
            bail!("the runner sent a frame that is not control");
        }
        match serde_json::from_slice(&payload).context("message of the runner")? {
            ToGuest::Setup {
                devices,
                topology,
                network,
                rdma,
                modules,
                time_factor,
            } => {
                let Some(queue) = exec_queue.take() else {
                    bail!("set up twice")
                };
                let made = match modules {
                    Some(modules) => use_modules(&modules),
                    None => Ok(()),
                };
                match made.and_then(|()| set_up(&devices, &topology, network.as_ref(), rdma, time_factor)) {
                    Ok(vars) => {
                        serve_requests(port.clone(), replies.clone())?;
                        let (port, running) = (port.clone(), running.clone());
                        thread::spawn(move || {
                            for exec in queue {
                                execute(&port, &running, exec, &vars);
                            }
                        });
                    }
                    Err(e) => {
                        port.control(&ToHost::Failed {
                            error: Overrun::to_text(&e),
                        });
                        return Err(e);
                    }
                }
                port.control(&ToHost::Ready { uptime: uptime()? });
            }
            ToGuest::Exec {
                id,
                argv,
                env,
                cwd,
                listen,
            } => execs.send(Exec {
                id,
                argv,
                env,
                cwd,
                listen,
            })?,
            ToGuest::TimedOut { id } => {
                // Writes backtraces of blocked tasks to the kernel log, before the command is killed.
                let _ = fs::write("/proc/sysrq-trigger", "w");
                kill(&running, id);
            }
            ToGuest::Stop { id } => kill(&running, id),
            ToGuest::Reply { id, result } => {
                let waiting = replies.0.lock().ok().and_then(|mut map| map.remove(&id));
                if let Some(waiting) = waiting {
                    let _ = waiting.send(result);
                }
            }
            ToGuest::PowerOff => return Ok(()),
        }
    }
    Ok(())
}

/// Returns the seconds since the kernel started.
fn uptime() -> Result<f64> {
    let text = fs::read_to_string("/proc/uptime")?;
    let seconds = text.split(' ').next().unwrap_or_default();
    seconds.parse().with_context(|| format!("/proc/uptime: {text}"))
}

/// Kills a command, if it is the running one.
fn kill(running: &Running, id: u64) {
    if let Some((_, pid)) = running.lock().ok().and_then(|r| *r).filter(|r| r.0 == id) {
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    }
}

fn mount_all() -> Result<()> {
    const EXEC_OK: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);
    let dir = |path: &str| fs::create_dir_all(path).with_context(|| path.to_owned());
    let put = |kind: &str, at: &str, flags: MountFlags, data: &str| {
        let data = std::ffi::CString::new(data).expect("no NUL in mount options");
        mount(kind, at, kind, flags, (!data.is_empty()).then_some(data.as_c_str()))
            .with_context(|| format!("mounting {kind} on {at}"))
    };
    put("proc", "/proc", MountFlags::empty(), "")?;
    put("sysfs", "/sys", MountFlags::empty(), "")?;
    // The kernel may have mounted it on /dev already: a second mount on top does no harm.
    put("devtmpfs", "/dev", MountFlags::empty(), "mode=0755")?;
    dir("/dev/pts")?;
    put("devpts", "/dev/pts", MountFlags::empty(), "")?;
    dir("/dev/shm")?;
    put("tmpfs", "/dev/shm", EXEC_OK, "mode=1777")?;
    put("tmpfs", "/run", EXEC_OK, "mode=0755")?;
    put("tmpfs", "/tmp", EXEC_OK, "mode=1777")?;
    put("tmpfs", "/var/log", EXEC_OK, "mode=0755")?;
    put("tmpfs", "/root", EXEC_OK, "mode=0700")?;
    put("debugfs", "/sys/kernel/debug", MountFlags::empty(), "")?;
    put("tracefs", "/sys/kernel/tracing", MountFlags::empty(), "")?;
    dir("/run/p2pmem")
}

/// Switches off the scheduler's deadline servers, which keep real-time tasks from starving others: the guest has no such
/// tasks. If a busy host does not run a processor for a while, the timer of such a server can be queued twice, and the kernel
/// warns (hrtimer_forward(), 7.2).
fn stop_deadline_servers() -> Result<()> {
    for server in ["fair_server", "ext_server"] {
        let Ok(processors) = fs::read_dir(Path::new("/sys/kernel/debug/sched").join(server)) else {
            continue;
        };
        for processor in processors {
            let runtime = processor?.path().join("runtime");
            fs::write(&runtime, "0").with_context(|| runtime.display().to_string())?;
        }
    }
    Ok(())
}

/// Opens the virtio-serial port of the runner, found by its name.
fn open_port() -> Result<File> {
    for entry in fs::read_dir("/sys/class/virtio-ports").context("no virtio-serial ports")? {
        let entry = entry?;
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT_NAME {
            let path = Path::new("/dev").join(entry.file_name());
            return OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .with_context(|| path.display().to_string());
        }
    }
    bail!("no virtio-serial port is named {PORT_NAME}")
}

/// Sends every record of the kernel log, from the first on, to the runner.
fn forward_kernel_log(port: Port) -> Result<()> {
    // The kernel wakes readers of its log from a lazy interrupt, which an idle processor may handle seconds later: the thread
    // does not wait for that alone.
    let look = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let mut log = OpenOptions::new()
        .read(true)
        .custom_flags(nonblocking)
        .open("/dev/kmsg")
        .context("/dev/kmsg")?;
    thread::spawn(move || {
        let mut record = vec![0; 8192];
        loop {
            match log.read(&mut record) {
                Ok(0) => return,
                Ok(n) => port.frame(Kind::Kmsg, &record[..n]),
                // EPIPE: records were overwritten before they were read; the next read continues with the oldest one.
                Err(e) if e.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {
                    port.frame(Kind::Kmsg, b"4,0,0,-;p2pmem-guest-init: kernel log records were lost");
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    let _ = poll(&mut [PollFd::new(&log, PollFlags::IN)], Some(&look));
                }
                Err(_) => return,
            }
        }
    });
    Ok(())
}

fn kernel_log(line: &str) {
    if let Ok(mut log) = OpenOptions::new().write(true).open("/dev/kmsg") {
        // One write is one record; without the newline readers would see it only when the next one begins.
        let _ = log.write_all(format!("{line}\n").as_bytes());
    }
}

/// Makes the modules of another kernel available to modprobe.
fn use_modules(folder: &Path) -> Result<()> {
    mount(folder, "/usr/lib/modules", "", MountFlags::BIND, None)
        .with_context(|| format!("mounting {} on /usr/lib/modules", folder.display()))
}

fn set_up(
    notes: &BTreeMap<String, wire::DeviceNote>,
    topology: &str,
    network: Option<&Network>,
    rdma: bool,
    time_factor: u32,
) -> Result<BTreeMap<String, String>> {
    let name = network.map_or("", |network| network.node.as_str());
    let name = if name.is_empty() { "guest" } else { name };
    rustix::system::sethostname(name.as_bytes()).context("hostname")?;
    fs::write(
        "/proc/sys/kernel/hung_task_timeout_secs",
        (HUNG_TASK * time_factor).to_string(),
    )
    .context("hung task time-out")?;
    // Memory that RDMA pins counts against this limit, also for programs that give up their privileges.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    setrlimit(Resource::Memlock, unlimited).context("RLIMIT_MEMLOCK")?;
    // Neighbour discovery would add traffic to interfaces whose bytes are counted.
    fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").context("IPv6")?;
    run_quietly("ip", &["link", "set", "lo", "up"])?;
    let mut modules = vec!["configfs", "nvme"];
    if network.is_some() {
        modules.push("virtio_net");
    }
    if rdma {
        modules.extend(RDMA_MODULES);
    }
    // Unlike modprobe, insmod does not load the module's dependencies: its core, if that has the peer-memory interface.
    if offers_peer_memory() {
        modules.push("ib_core");
    }
    run_quietly("modprobe", &[&["-a"], modules.as_slice()].concat())?;
    mount("configfs", "/sys/kernel/config", "configfs", MountFlags::empty(), None).context("mounting configfs")?;
    // Drives appear when the kernel has probed their controllers, which it does in the background.
    let drives = || missing(notes, "nvme", |device| usable(&device.block));
    wait_for(BLOCK_DEVICES * time_factor, "a block device", drives)?;
    if let Some(network) = network {
        let address = format!("{}/24", network::address(network::number(network)?));
        run_quietly("ip", &["address", "add", &address, "dev", "eth0"])?;
        run_quietly("ip", &["link", "set", "eth0", "up"])?;
    }
    if rdma {
        let ports = || missing(notes, "nic", |device| device.rdma.as_deref().is_some_and(is_active));
        wait_for(PORTS * time_factor, "an active port", ports)?;
        let number = network.map_or(Ok(0), network::number)?;
        set_up_ipoib(&devices::locate(notes)?, number, IPOIB * time_factor)?;
    }
    let found = devices::locate(notes)?;
    devices::store(&found)?;
    let mut vars = devices::environment(&found);
    vars.insert("P2PMEM_TOPOLOGY".into(), topology.to_owned());
    vars.insert(TIME_FACTOR.into(), time_factor.to_string());
    if let Some(network) = network {
        vars.extend(network::environment(network, &found));
    }
    Ok(vars)
}

/// Returns whether the kernel's RDMA core has the peer-memory interface, from the list of modules' symbols.
fn offers_peer_memory() -> bool {
    let Ok(release) = fs::read_to_string("/proc/sys/kernel/osrelease") else {
        return false;
    };
    let list = Path::new("/lib/modules").join(release.trim()).join("modules.symbols");
    fs::read_to_string(list).is_ok_and(|list| list.contains("symbol:ib_register_peer_memory_client "))
}

/// Returns the devices of a kind that are not ready.
fn missing(
    notes: &BTreeMap<String, wire::DeviceNote>,
    kind: &str,
    ready: impl Fn(&devices::Device) -> bool,
) -> Result<Vec<String>> {
    let found = devices::locate(notes)?;
    let missing = found
        .into_iter()
        .filter(|(_, device)| device.kind == kind && !ready(device));
    Ok(missing.map(|(name, _)| name).collect())
}

/// Waits until no device is missing.
fn wait_for(limit: Duration, what: &str, missing: impl Fn() -> Result<Vec<String>>) -> Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let missing = missing()?;
        if missing.is_empty() {
            return Ok(());
        }
        in_time!(Instant::now() <= deadline, "no {what} within {limit:?} for {missing:?}");
        thread::sleep(LOOK);
    }
}

/// Returns whether the first port of an RDMA device is active.
fn is_active(rdma: &str) -> bool {
    let state = fs::read_to_string(format!("/sys/class/infiniband/{rdma}/ports/1/state"));
    state.is_ok_and(|state| state.contains("ACTIVE"))
}

/// Assigns addresses to the IPoIB interfaces. Writes a line to the kernel log for an interface that does not join its
/// network in time: programs that do not need the interface run without it.
fn set_up_ipoib(devices: &Devices, node: usize, limit: Duration) -> Result<()> {
    let nics: Vec<_> = devices.values().filter_map(|device| device.net.as_deref()).collect();
    for (number, net) in nics.iter().enumerate() {
        let address = format!("{}/24", network::rdma_address(node, number));
        run_quietly("ip", &["address", "add", &address, "dev", net])?;
        run_quietly("ip", &["link", "set", net, "up"])?;
    }
    let without_carrier = || {
        let carrier = |net: &str| fs::read_to_string(format!("/sys/class/net/{net}/carrier")).unwrap_or_default();
        let without = nics.iter().filter(|net| carrier(net).trim() != "1");
        Ok(without.map(|net| (*net).to_owned()).collect())
    };
    if let Err(e) = wait_for(limit, "carrier", without_carrier) {
        kernel_log(&format!("p2pmem-guest-init: IPoIB: {e:#}"));
    }
    Ok(())
}

fn usable(block: &Option<PathBuf>) -> bool {
    block.as_ref().is_some_and(|path| path.exists())
}

fn run_quietly(program: &str, args: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .env("PATH", PATH)
        .args(args)
        .output()
        .with_context(|| program.to_owned())?;
    if !output.status.success() {
        bail!(
            "{program} {}: {}: {}",
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

type Answer = Result<serde_json::Value, String>;

/// Programs that wait for the runner's answer, by request number.
#[derive(Clone, Default)]
struct Replies(Arc<Mutex<HashMap<u64, mpsc::Sender<Answer>>>>);

/// Passes requests of programs in the guest to the runner, with a thread for each connection.
fn serve_requests(port: Port, replies: Replies) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let listener = UnixListener::bind(SOCKET).context(SOCKET)?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (port, replies) = (port.clone(), replies.clone());
            thread::spawn(move || -> Result<()> {
                let mut to: UnixStream = stream.try_clone()?;
                for line in BufReader::new(stream).lines() {
                    let answer: Answer = match serde_json::from_str::<Request>(&line?) {
                        Err(e) => Err(format!("bad request: {e}")),
                        Ok(request) => {
                            let id = NEXT.fetch_add(1, Ordering::Relaxed);
                            let (send, receive) = mpsc::channel();
                            replies.0.lock().map_err(|_| anyhow!("poisoned"))?.insert(id, send);
                            port.control(&ToHost::Request { id, request });
                            receive.recv()?
                        }
                    };
                    let mut line = serde_json::to_vec(&answer)?;
                    line.push(b'\n');
                    to.write_all(&line)?;
                }
                Ok(())
            });
        }
    });
    Ok(())
}

struct Exec {
    id: u64,
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    cwd: String,
    listen: Option<Listen>,
}

/// Runs one command in its own process group, sends its output and its status, and ends all its processes.
fn execute(port: &Port, running: &Running, exec: Exec, vars: &BTreeMap<String, String>) {
    let mut exited = ToHost::Exited {
        id: exec.id,
        code: None,
        signal: None,
        error: None,
    };
    match run_command(port, running, &exec, vars) {
        Ok(status) => {
            if let ToHost::Exited { code, signal, .. } = &mut exited {
                (*code, *signal) = (status.code(), status.signal());
            }
        }
        Err(e) => {
            if let ToHost::Exited { error, .. } = &mut exited {
                *error = Some(format!("{e:#}"));
            }
        }
    }
    kernel_log(&format!("{KMSG_MARK}{}", exec.id));
    port.control(&exited);
}

fn run_command(
    port: &Port,
    running: &Running,
    exec: &Exec,
    vars: &BTreeMap<String, String>,
) -> Result<std::process::ExitStatus> {
    let (program, args) = exec.argv.split_first().context("empty command")?;
    let mut child = Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .env("LC_ALL", "C.UTF-8")
        .env("TERM", "dumb")
        .envs(vars)
        .envs(&exec.env)
        .current_dir(&exec.cwd)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {program} in {}", exec.cwd))?;
    let pid = Pid::from_child(&child);
    if let Ok(mut running) = running.lock() {
        *running = Some((exec.id, pid));
    }
    if let Some(listen) = exec.listen {
        tell_when_listening(port.clone(), exec.id, listen, running.clone());
    }
    let (done, drained) = mpsc::channel();
    let out = child.stdout.take().context("no stdout")?;
    let err = child.stderr.take().context("no stderr")?;
    forward(port.clone(), Kind::Stdout, out, done.clone());
    forward(port.clone(), Kind::Stderr, err, done);
    let status = child.wait().context("waiting for the command")?;
    if let Ok(mut running) = running.lock() {
        *running = None;
    }
    // Remaining processes would keep the pipes open and disturb the next command. ESRCH: no process remains.
    let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    let deadline = Instant::now() + DRAIN;
    for _ in 0..2 {
        match drained.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => {
                kernel_log("p2pmem-guest-init: the command's output stays open, something it started still runs");
                break;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    reap(pid, deadline);
    Ok(status)
}

/// Waits until a killed process group is gone or the deadline has passed, and reaps all other processes that end.
///
/// Closed pipes do not show the end of a process: it closes its files before it can be reaped, and is visible until then.
/// The group's orphans are children of process 1, so a group without a child of this process is empty.
fn reap(group: Pid, deadline: Instant) {
    loop {
        match rustix::process::waitpgid(group, WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if Instant::now() < deadline => thread::sleep(DYING),
            Ok(None) => break kernel_log(&format!("p2pmem-guest-init: processes of group {group} do not die")),
            Err(_) => break,
        }
    }
    // Children that left the group are process 1's too. No other command runs now, so any zombie is one of them.
    while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
}

/// Notifies the runner when a process listens on the command's port, unless the command ends before.
fn tell_when_listening(port: Port, id: u64, listen: Listen, running: Running) {
    thread::spawn(move || {
        let runs = || {
            running
                .lock()
                .is_ok_and(|running| running.is_some_and(|(other, _)| other == id))
        };
        while runs() {
            match is_listened_on(listen) {
                Ok(true) => return port.control(&ToHost::Listening { id }),
                Ok(false) => thread::sleep(LOOK),
                // The reaper of remaining processes may be faster than this wait.
                Err(_) if !runs() => return,
                Err(e) => return kernel_log(&format!("p2pmem-guest-init: waiting for {listen:?}: {e:#}")),
            }
        }
    });
}

fn forward(port: Port, kind: Kind, mut from: impl Read + Send + 'static, done: mpsc::Sender<()>) {
    thread::spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        loop {
            match from.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => port.frame(kind, &bytes[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let _ = done.send(());
    });
}
