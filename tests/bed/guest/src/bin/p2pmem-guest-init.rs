// SPDX-License-Identifier: MIT OR Apache-2.0

//! The first program of a guest: sets the guest up, then runs the commands that the VM runner sends.
//!
//! The init is process 1 and must not exit, because the kernel would panic. The init reports an error to the runner and
//! powers the guest off. If the runner closes the port, the init powers the guest off too.

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
use p2pmem_guest::network::{self, is_listened_on};
use p2pmem_guest::patience::{Overrun, PATIENCE};
use p2pmem_guest::wire::{self, Frame, KMSG_MARK, Kind, Listen, Network, PORT_NAME, Request, ToGuest, ToHost};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, setrlimit};

/// The longest time that a command's pipes may stay open after it ended, while its remaining processes are killed.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// The interval at which the init waits for a killed process group. A process usually dies sooner.
const REAP_INTERVAL: Duration = Duration::from_millis(1);
/// The longest time until the block devices of all drives exist.
const BLOCK_DEVICES_LIMIT: Duration = Duration::from_secs(60);
/// The longest time until the RDMA devices of all NICs exist and their ports are active.
const PORTS_LIMIT: Duration = Duration::from_secs(60);
/// The longest time until an IPoIB interface has a carrier.
const IPOIB_LIMIT: Duration = Duration::from_secs(60);
/// The kernel's hung-task time-out, in seconds. It is longer than the slow drives of the tests delay a command on a
/// busy machine.
const HUNG_TASK_SECONDS: u32 = 60;
/// The interval at which a wait checks its condition.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The drivers of NICs, and the modules that RDMA programs need.
const RDMA_MODULES: [&str; 6] = ["mlx5_core", "mlx5_ib", "ib_uverbs", "rdma_ucm", "ib_umad", "ib_ipoib"];

/// The search path of programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn main() {
    if std::process::id() != 1 {
        eprintln!("p2pmem-guest-init: only the kernel of a guest can start this program, as process 1");
        std::process::exit(2);
    }
    if let Err(e) = run() {
        kernel_log(&format!("p2pmem-guest-init: {e:#}"));
        eprintln!("p2pmem-guest-init: {e:#}");
    }
    rustix::fs::sync();
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    // If process 1 exits, the kernel panics, which hides why powering off failed.
    loop {
        thread::park();
    }
}

/// The number and the process group of the command that runs.
type Running = Arc<Mutex<Option<(u64, Pid)>>>;

/// Sends whole frames to the runner, from any thread.
#[derive(Clone)]
struct Port(Arc<Mutex<File>>);

impl Port {
    fn frame(&self, kind: Kind, payload: &[u8]) {
        // An error means that the runner is gone. The reader sees the end of the stream and powers the guest off.
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
            bail!("the runner sent a frame whose kind is not control");
        }
        match serde_json::from_slice(&payload).context("invalid message from the runner")? {
            ToGuest::Setup {
                devices,
                topology,
                network,
                rdma,
                modules,
                patience,
            } => {
                let Some(queue) = exec_queue.take() else {
                    bail!("the runner sent a second setup message")
                };
                let made = match modules {
                    Some(modules) => use_modules(&modules),
                    None => Ok(()),
                };
                match made.and_then(|()| set_up(&devices, &topology, network.as_ref(), rdma, patience)) {
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
                port.control(&ToHost::Ready);
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
                // Write the backtraces of blocked tasks to the kernel log before the command is killed.
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

/// Kills the command `id`, if it runs.
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
    // The kernel may have mounted devtmpfs on /dev already; a second mount is harmless.
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

/// Disables the scheduler's deadline servers, which keep real-time tasks from starving other tasks; guests have no
/// real-time tasks. If a busy host does not run a virtual processor for a while, a server's timer can already be queued
/// when the kernel forwards it, and the kernel warns (hrtimer_forward(), 7.2).
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

/// Opens the runner's virtio-serial port, found by its name.
fn open_port() -> Result<File> {
    for entry in fs::read_dir("/sys/class/virtio-ports").context("the guest has no virtio-serial ports")? {
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

/// Sends all records of the kernel log to the runner, from the first one.
fn forward_kernel_log(port: Port) -> Result<()> {
    // The kernel wakes readers of its log from a lazy interrupt, which an idle processor may delay by seconds.
    // Therefore the reader polls with a time-out.
    let interval = Timespec {
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
                // EPIPE: records were overwritten before the read. The next read returns the oldest record left.
                Err(e) if e.raw_os_error() == Some(Errno::PIPE.raw_os_error()) => {
                    port.frame(Kind::Kmsg, b"4,0,0,-;p2pmem-guest-init: kernel log records were lost");
                }
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    let _ = poll(&mut [PollFd::new(&log, PollFlags::IN)], Some(&interval));
                }
                Err(_) => return,
            }
        }
    });
    Ok(())
}

fn kernel_log(line: &str) {
    if let Ok(mut log) = OpenOptions::new().write(true).open("/dev/kmsg") {
        // One write is one record. Without the newline, readers would see the record only when the next one begins.
        let _ = log.write_all(format!("{line}\n").as_bytes());
    }
}

/// Mounts the modules of another kernel where modprobe searches.
fn use_modules(folder: &Path) -> Result<()> {
    mount(folder, "/usr/lib/modules", "", MountFlags::BIND, None)
        .with_context(|| format!("mounting {} on /usr/lib/modules", folder.display()))
}

fn set_up(
    notes: &BTreeMap<String, wire::DeviceNote>,
    topology: &str,
    network: Option<&Network>,
    rdma: bool,
    patience: u32,
) -> Result<BTreeMap<String, String>> {
    let name = network.map_or("", |network| network.node.as_str());
    let name = if name.is_empty() { "guest" } else { name };
    rustix::system::sethostname(name.as_bytes()).context("setting the host name")?;
    fs::write(
        "/proc/sys/kernel/hung_task_timeout_secs",
        (HUNG_TASK_SECONDS * patience).to_string(),
    )
    .context("setting the hung-task time-out")?;
    // RDMA pins memory, which counts against RLIMIT_MEMLOCK of programs without CAP_IPC_LOCK.
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    setrlimit(Resource::Memlock, unlimited).context("RLIMIT_MEMLOCK")?;
    // Without IPv6 no neighbour discovery adds to the byte counts of the interfaces.
    fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").context("disabling IPv6")?;
    run_quietly("ip", &["link", "set", "lo", "up"])?;
    let mut modules = vec!["configfs", "nvme"];
    if network.is_some() {
        modules.push("virtio_net");
    }
    if rdma {
        modules.extend(RDMA_MODULES);
    }
    // The tests load the module with insmod, which does not load dependencies: ib_core, if it has the peer-memory
    // interface.
    if offers_peer_memory() {
        modules.push("ib_core");
    }
    run_quietly("modprobe", &[&["-a"], modules.as_slice()].concat())?;
    mount("configfs", "/sys/kernel/config", "configfs", MountFlags::empty(), None).context("mounting configfs")?;
    // The kernel probes the drives' controllers in the background.
    let drives = || missing(notes, "nvme", |device| usable(&device.block));
    wait_for(BLOCK_DEVICES_LIMIT * patience, "a block device", drives)?;
    if let Some(network) = network {
        let address = format!("{}/24", network::address(network::number(network)?));
        run_quietly("ip", &["address", "add", &address, "dev", "eth0"])?;
        run_quietly("ip", &["link", "set", "eth0", "up"])?;
    }
    if rdma {
        let ports = || missing(notes, "nic", |device| device.rdma.as_deref().is_some_and(is_active));
        wait_for(PORTS_LIMIT * patience, "an active port", ports)?;
        let number = network.map_or(Ok(0), network::number)?;
        set_up_ipoib(&devices::locate(notes)?, number, IPOIB_LIMIT * patience)?;
    }
    let found = devices::locate(notes)?;
    devices::store(&found)?;
    let mut vars = devices::environment(&found);
    vars.insert("P2PMEM_TOPOLOGY".into(), topology.to_owned());
    vars.insert(PATIENCE.into(), patience.to_string());
    if let Some(network) = network {
        vars.extend(network::environment(network, &found));
    }
    Ok(vars)
}

/// Whether the kernel's RDMA core has the peer-memory interface, by the symbol list of its modules.
fn offers_peer_memory() -> bool {
    let Ok(release) = fs::read_to_string("/proc/sys/kernel/osrelease") else {
        return false;
    };
    let list = Path::new("/lib/modules").join(release.trim()).join("modules.symbols");
    fs::read_to_string(list).is_ok_and(|list| list.contains("symbol:ib_register_peer_memory_client "))
}

/// The names of devices of a kind that are not ready.
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

/// Waits until `missing` returns an empty list.
fn wait_for(limit: Duration, what: &str, missing: impl Fn() -> Result<Vec<String>>) -> Result<()> {
    let deadline = Instant::now() + limit;
    loop {
        let missing = missing()?;
        if missing.is_empty() {
            return Ok(());
        }
        in_time!(Instant::now() <= deadline, "no {what} within {limit:?} for {missing:?}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Whether the first port of an RDMA device is active.
fn is_active(rdma: &str) -> bool {
    let state = fs::read_to_string(format!("/sys/class/infiniband/{rdma}/ports/1/state"));
    state.is_ok_and(|state| state.contains("ACTIVE"))
}

/// Sets up the addresses of the IPoIB interfaces. If an interface has no carrier in time, only the kernel log reports
/// it, because most programs do not need the interface.
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

/// Connections that wait for the runner's answer, by request number.
#[derive(Clone, Default)]
struct Replies(Arc<Mutex<HashMap<u64, mpsc::Sender<Answer>>>>);

/// Forwards requests of programs in the guest to the runner, with one thread per connection.
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

/// Runs one command in a process group of its own, sends its output and its exit status, and kills its remaining
/// processes.
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
        notify_when_listening(port.clone(), exec.id, listen, running.clone());
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
    // Remaining processes would keep the pipes open and disturb the next command. ESRCH means that none remain.
    let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    let deadline = Instant::now() + DRAIN_LIMIT;
    for _ in 0..2 {
        match drained.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => {
                kernel_log("p2pmem-guest-init: a process that the command started keeps its output open");
                break;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    reap(pid, deadline);
    Ok(status)
}

/// Waits until a killed process group is empty or the deadline passes, and reaps other dead children.
///
/// Closed pipes do not mean that a process is gone: a process closes its files before it becomes a zombie, and it is
/// visible until it is reaped. Process 1 is the parent of the group's orphans, so a group without a child of process 1
/// is empty.
fn reap(group: Pid, deadline: Instant) {
    loop {
        match rustix::process::waitpgid(group, WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) if Instant::now() < deadline => thread::sleep(REAP_INTERVAL),
            Ok(None) => {
                break kernel_log(&format!(
                    "p2pmem-guest-init: killed processes of group {group} did not end in time"
                ));
            }
            Err(_) => break,
        }
    }
    // Children that changed their process group are children of process 1 too. No other command runs now, so any zombie
    // is one of them.
    while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
}

/// Notifies the runner when a socket listens on a command's port, unless the command ends first.
fn notify_when_listening(port: Port, id: u64, listen: Listen, running: Running) {
    thread::spawn(move || {
        let runs = || {
            running
                .lock()
                .is_ok_and(|running| running.is_some_and(|(other, _)| other == id))
        };
        while runs() {
            match is_listened_on(listen) {
                Ok(true) => return port.control(&ToHost::Listening { id }),
                Ok(false) => thread::sleep(POLL_INTERVAL),
                // reap() may have reaped the `rdma` process of is_listened_on() when the command ended.
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
