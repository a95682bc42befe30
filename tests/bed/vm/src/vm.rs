// SPDX-License-Identifier: MIT OR Apache-2.0

//! A running guest: boots a topology, runs commands in it, and ends all processes that it started.
//!
//! One thread reads the console, and one reads the port of the guest's init. Both send their input to the thread that
//! uses the [`Vm`], which waits for it with a deadline. A panic shows on the console; the end of QEMU is the end of
//! both streams. The runner can therefore distinguish a guest that ended from one that exceeds its time limit.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use p2pmem_guest::in_time;
use p2pmem_guest::patience::Overrun;
use p2pmem_guest::wire::{self, DeviceNote, Frame, KMSG_MARK, Kind, Network, Request, ToGuest, ToHost};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use crate::bridges;
pub use crate::command::{Command, Outcome, Status, Stream};
use crate::counters::{Classifier, HOST, UNKNOWN};
use crate::dmesg::{self, Record};
use crate::kernel::Kernel;
use crate::models::{self, Model, Models};
use crate::process::{Process, Stdin};
use crate::qemu::{self, Ends, Paths, Plan};
use crate::qmp::Qmp;
use crate::topology::{Device, Layout, Topology};
use crate::trace;

/// The time limit of a boot, long enough for a host with other load.
pub const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// The factor for time limits of a guest whose clocks count instructions.
const COUNTING: u32 = 4;
/// The time limit for a guest to power off.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(120);
/// The time for the rest of the console output to arrive after a panic.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// The time limit for a command that exceeded its own limit to end after it was killed.
const KILL_LIMIT: Duration = Duration::from_secs(60);
/// The time limit of an orderly unplug.
const UNPLUG_LIMIT: Duration = Duration::from_secs(60);
/// The number of console lines that are kept.
const CONSOLE_LINES: usize = 2000;
/// The number of console lines in error messages.
const CONSOLE_TAIL: usize = 40;

/// Options of a boot beside the topology.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The kernel, instead of the sandbox's stock kernel.
    pub kernel: Option<Kernel>,
}

enum Event {
    Frame(Frame),
    /// A request to end a command, with the reason.
    Stop(u64, Why),
    PortEnded(String),
    Panic(String),
    ConsoleEnded,
}

/// The reason why a command is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// The command is no longer needed.
    Needless,
    /// The command exceeded its time limit.
    Late,
}

/// The reason why the guest can run no more commands.
#[derive(Debug, Clone)]
enum End {
    TimedOut,
    Stopped(Why),
    Panicked(String),
    Died(String),
}

#[derive(Debug, Default)]
struct Console {
    lines: VecDeque<String>,
    count: usize,
}

/// Ends a command of a guest, from a thread other than the one that waits for the command.
#[derive(Clone)]
pub struct Stopper {
    id: u64,
    send: Sender<Event>,
}

impl Stopper {
    /// Ends the command, if it still runs, because it is no longer needed.
    pub fn stop(&self) {
        self.send(Why::Needless);
    }

    /// Ends the command, if it still runs, because its time limit is over.
    pub fn time_out(&self) {
        self.send(Why::Late);
    }

    fn send(&self, why: Why) {
        // An error means that the guest has ended, and with it the command.
        let _ = self.send.send(Event::Stop(self.id, why));
    }
}

/// The properties of one guest of several, beside its topology.
#[derive(Debug)]
pub struct Place {
    /// The guest's name and the names of the others.
    pub network: Network,
    /// The guest's sockets on the network.
    pub ends: Ends,
    /// The guest's devices, whose processes already run.
    pub models: Models,
}

/// A running guest.
pub struct Vm {
    // Dropped in this order: the guest, the processes of its devices, and finally the folder.
    qemu: Process,
    models: Models,
    virtiofsd: Process,
    topology: Topology,
    plan: Plan,
    qmp: Qmp,
    port: UnixStream,
    events: Receiver<Event>,
    send: Sender<Event>,
    console: Arc<Mutex<Console>>,
    kernel_log: Vec<Record>,
    taken: usize,
    trace: trace::Reader,
    classifier: Classifier,
    next_command: u64,
    end: Option<End>,
    /// Whether the running command is already being ended.
    ending: bool,
    /// The number of console lines when the guest began to power off.
    powering_off: Option<usize>,
    kernel: Kernel,
    release: String,
    boot_time: Duration,
    _dir: tempfile::TempDir,
}

/// Returns the path of a program that was built with the runner: in the same folder, or, for a test program, in the
/// folder above.
///
/// # Errors
///
/// The program was not built.
pub fn sibling(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe().context("own path")?;
    let folder = me.parent().context("own folder")?;
    let folders = [Some(folder), folder.parent()];
    let found = folders
        .into_iter()
        .flatten()
        .map(|f| f.join(name))
        .find(|path| path.is_file());
    found.with_context(|| format!("{name} is not beside {}: build the whole test workspace", me.display()))
}

impl Vm {
    /// Boots a topology.
    ///
    /// # Errors
    ///
    /// A process cannot be started, or the guest is not ready in time: the error has the last lines of the console.
    pub fn boot(topology: &Topology, options: &Options) -> Result<Vm> {
        let dir = folder()?;
        let paths = Vm::paths(dir.path())?;
        let models = if topology.has_nic() {
            let layout = Layout::alone(topology.clone());
            let mut models = models::fabric(&sibling("p2pmem-fabric")?, &layout, &[paths], dir.path())?;
            models.pop().context("devices of the only node")?
        } else {
            models::one_each(&sibling("p2pmem-accel")?, topology, &paths)?
        };
        Vm::start(topology, options, dir, models, None)
    }

    /// Boots one guest of several. Its sockets are in `dir`: see [`Vm::paths`].
    ///
    /// # Errors
    ///
    /// Those of [`Vm::boot`].
    pub fn boot_in(topology: &Topology, options: &Options, dir: tempfile::TempDir, place: Place) -> Result<Vm> {
        let Place { network, ends, models } = place;
        Vm::start(topology, options, dir, models, Some((network, ends)))
    }

    /// Returns the files and sockets of a guest with the folder `dir`.
    ///
    /// # Errors
    ///
    /// The guest's init was not built.
    pub fn paths(dir: &Path) -> Result<Paths> {
        Ok(Paths {
            dir: dir.to_owned(),
            init: sibling("p2pmem-guest-init")?,
        })
    }

    fn start(
        topology: &Topology,
        options: &Options,
        dir: tempfile::TempDir,
        models: Models,
        network: Option<(Network, Ends)>,
    ) -> Result<Vm> {
        let start = Instant::now();
        let kernel = match &options.kernel {
            Some(kernel) => kernel.clone(),
            None => Kernel::stock()?,
        };
        let paths = Vm::paths(dir.path())?;
        let (network, ends) = network.unzip();
        let plan = qemu::plan(topology, &paths, &kernel, ends.as_ref())?;
        for device in &topology.device {
            if let Device::Nvme { name, image, .. } = device {
                File::create(paths.image(name))?.set_len(image.0)?;
            }
        }
        let virtiofsd = start_virtiofsd(&paths)?;
        let monitor = UnixListener::bind(paths.monitor_socket())?;
        let agent = UnixListener::bind(paths.agent_socket())?;
        let mut qemu = Process::start("QEMU", &plan.argv, Stdin::default(), &paths.dir.join("qemu.log"), true)?;
        let (send, events) = mpsc::channel();
        let console = Arc::new(Mutex::new(Console::default()));
        read_console(
            qemu.take_stdout().context("QEMU's output")?,
            console.clone(),
            send.clone(),
        );
        let boot_limit = boot_limit(topology, &kernel);
        let deadline = start + boot_limit;
        let qmp = Qmp::new(accept(&monitor, &mut qemu, deadline).context("QEMU's monitor")?);
        let qmp = qmp.with_context(|| qemu.describe())?;
        let port = accept(&agent, &mut qemu, deadline).context("the guest's port")?;
        read_port(port.try_clone()?, send.clone());
        let trace = trace::Reader::open(&paths.trace())?;
        let mut classifier = Classifier::new(topology.machine.memory.0, plan.drives.clone());
        if topology.machine.iommu.is_some() {
            classifier = classifier.translated();
        }
        let mut vm = Vm {
            qemu,
            models,
            virtiofsd,
            topology: topology.clone(),
            plan,
            qmp,
            port,
            events,
            send,
            console,
            kernel_log: Vec::new(),
            taken: 0,
            trace,
            classifier,
            next_command: 1,
            end: None,
            ending: false,
            powering_off: None,
            kernel,
            release: String::new(),
            boot_time: Duration::ZERO,
            _dir: dir,
        };
        vm.set_up(network, deadline, boot_limit)
            .with_context(|| format!("topology {}: the guest did not come up", topology.name))?;
        vm.boot_time = start.elapsed();
        Ok(vm)
    }

    fn set_up(&mut self, network: Option<Network>, deadline: Instant, boot_limit: Duration) -> Result<()> {
        let mut network = network;
        loop {
            let message = match self.next(deadline) {
                Ok(Frame {
                    kind: Kind::Control,
                    payload,
                }) => serde_json::from_slice(&payload)?,
                Ok(_) => continue,
                Err(end) => {
                    let why = match end {
                        End::TimedOut => {
                            let tails = self.log_tail() + &self.console_tail();
                            bail!(Overrun(format!("booting took more than {boot_limit:?}\n{tails}")));
                        }
                        End::Panicked(line) => line,
                        End::Died(why) => why,
                        End::Stopped(_) => "it was stopped".into(),
                    };
                    bail!("{why}\n{}{}", self.log_tail(), self.console_tail());
                }
            };
            match message {
                ToHost::Hello { release } => {
                    self.release = release;
                    let setup = ToGuest::Setup {
                        devices: self.devices()?,
                        topology: self.topology.name.clone(),
                        network: network.take(),
                        rdma: self.topology.has_nic() && self.topology.machine.rdma,
                        modules: self.kernel.modules.clone(),
                        patience: self.kernel.patience,
                    };
                    wire::write_control(&mut self.port, &setup)?;
                }
                ToHost::Ready => return Ok(()),
                ToHost::Failed { error } => {
                    let why = Overrun::from_text(format!("{error}\n{}", self.log_tail()));
                    return Err(why.context("the guest's init"));
                }
                other => bail!("the guest's init said {other:?} before it was ready"),
            }
        }
    }

    /// Returns the release of the running kernel.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Returns the kernel of the boot.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Returns the time from the start until the guest was ready for commands.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Returns whether the guest can still run commands.
    pub fn is_alive(&self) -> bool {
        self.end.is_none()
    }

    /// Returns the process ids of all processes that were started for the guest.
    pub fn process_ids(&self) -> Vec<u32> {
        let models = self.models.values().map(Model::process_id);
        let ids: BTreeSet<u32> = models.chain([self.qemu.id(), self.virtiofsd.id()]).collect();
        ids.into_iter().collect()
    }

    /// Returns the last lines of the kernel log that have arrived.
    fn log_tail(&self) -> String {
        let mut tail = String::from("--- end of the kernel log ---\n");
        let skip = self.kernel_log.len().saturating_sub(CONSOLE_TAIL);
        for record in &self.kernel_log[skip..] {
            tail.push_str(&record.text);
            tail.push('\n');
        }
        tail
    }

    /// Returns the last lines of the kernel's console (all lines from a panic on, if there is one), and of QEMU's own
    /// output.
    pub fn console_tail(&self) -> String {
        let mut tail = String::from("--- end of the console ---\n");
        if let Ok(console) = self.console.lock() {
            let last = console.lines.len().saturating_sub(CONSOLE_TAIL);
            // The trace of a panic may be longer than [`CONSOLE_TAIL`], and its first line has the reason.
            let panic = console.lines.iter().position(|line| dmesg::is_panic(line));
            let skip = panic.map_or(last, |panic| panic.min(last));
            for line in console.lines.iter().skip(skip) {
                tail.push_str(line);
                tail.push('\n');
            }
        }
        tail.push_str("--- ");
        tail.push_str(&self.qemu.describe());
        tail.push_str(" ---");
        tail
    }

    /// Returns the next frame from the guest. Records of the kernel log are stored in `self` instead.
    fn next(&mut self, deadline: Instant) -> Result<Frame, End> {
        let mut panic = None;
        let mut deadline = deadline;
        loop {
            if let Some(end) = &self.end {
                return Err(end.clone());
            }
            let event = match self
                .events
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    return match panic.take() {
                        Some(line) => Err(self.ended(End::Panicked(line))),
                        None => Err(End::TimedOut),
                    };
                }
                Err(RecvTimeoutError::Disconnected) => Event::ConsoleEnded,
            };
            match event {
                Event::Frame(Frame {
                    kind: Kind::Kmsg,
                    payload,
                }) => self.kernel_log.push(Record::parse(&payload)),
                Event::Frame(frame) if panic.is_none() => return Ok(frame),
                Event::Frame(_) | Event::PortEnded(_) if panic.is_some() => {}
                Event::Frame(_) => {}
                Event::Panic(line) => {
                    // Waits a short time for the rest of the report.
                    panic.get_or_insert(line);
                    deadline = deadline.min(Instant::now() + LAST_WORDS);
                }
                // A request for another command came too late: that command has ended.
                Event::Stop(id, why) if id + 1 == self.next_command && !self.ending => return Err(End::Stopped(why)),
                Event::Stop(..) => {}
                Event::PortEnded(why) => return Err(self.died(&why)),
                Event::ConsoleEnded => {
                    return match panic.take() {
                        Some(line) => Err(self.ended(End::Panicked(line))),
                        None => Err(self.died("QEMU ended")),
                    };
                }
            }
        }
    }

    fn ended(&mut self, end: End) -> End {
        self.end = Some(end.clone());
        end
    }

    fn died(&mut self, why: &str) -> End {
        let _ = self.qemu.wait_until(Instant::now() + LAST_WORDS);
        // The two streams end in any order, so the panic may still be in the queue.
        let late = self.events.try_iter().find_map(|event| {
            if let Event::Panic(line) = event {
                Some(line)
            } else {
                None
            }
        });
        match late {
            Some(line) => self.ended(End::Panicked(line)),
            None => {
                let status = self.qemu.ended().ok().flatten();
                self.ended(End::Died(format!(
                    "the guest is gone: {why}; QEMU's status: {status:?}"
                )))
            }
        }
    }

    /// Runs a command, and passes its output to `live` as it arrives.
    ///
    /// # Errors
    ///
    /// The runner's own channels are broken. A guest that panics or ends is an outcome, not an error.
    pub fn exec(&mut self, command: &Command, live: &mut dyn FnMut(Stream, &[u8])) -> Result<Outcome> {
        self.exec_server(command, live, &mut || {})
    }

    /// Returns an object that can end the next command.
    pub fn stopper(&self) -> Stopper {
        Stopper {
            id: self.next_command,
            send: self.send.clone(),
        }
    }

    /// As [`Vm::exec`]; calls `listening` when the command listens on its port.
    ///
    /// # Errors
    ///
    /// Those of [`Vm::exec`].
    pub fn exec_server(
        &mut self,
        command: &Command,
        live: &mut dyn FnMut(Stream, &[u8]),
        listening: &mut dyn FnMut(),
    ) -> Result<Outcome> {
        let start = Instant::now();
        let id = self.next_command;
        self.next_command += 1;
        let mut outcome = Outcome {
            status: Status::TimedOut,
            stdout: Vec::new(),
            stderr: Vec::new(),
            dmesg: Vec::new(),
            findings: Vec::new(),
            seconds: 0.0,
        };
        let exec = ToGuest::Exec {
            id,
            argv: command.argv.clone(),
            env: command.env.clone(),
            cwd: command.cwd.clone(),
            listen: command.listen,
        };
        // If the port is broken, its stream ends below.
        let _ = wire::write_control(&mut self.port, &exec);
        let ended = self.follow(
            id,
            start + command.limit * self.kernel.patience,
            &mut outcome,
            live,
            listening,
        );
        outcome.status = match ended {
            Ok(status) => status,
            Err(end @ (End::TimedOut | End::Stopped(_))) => {
                let (kill, status) = match end {
                    End::Stopped(Why::Needless) => (ToGuest::Stop { id }, Status::Stopped),
                    _ => (ToGuest::TimedOut { id }, Status::TimedOut),
                };
                let _ = wire::write_control(&mut self.port, &kill);
                self.ending = true;
                let ended = self.follow(
                    id,
                    Instant::now() + KILL_LIMIT * self.kernel.patience,
                    &mut outcome,
                    live,
                    listening,
                );
                self.ending = false;
                match ended {
                    Err(End::Panicked(line)) => Status::Panicked { line },
                    Ok(_) => status,
                    Err(_) => {
                        self.ended(End::Died("it did not answer after a command was killed".into()));
                        status
                    }
                }
            }
            Err(End::Panicked(line)) => Status::Panicked { line },
            Err(End::Died(why)) => Status::Died { why },
        };
        outcome.dmesg = self.take_log();
        outcome.findings = dmesg::findings(&outcome.dmesg);
        outcome.seconds = start.elapsed().as_secs_f64();
        Ok(outcome)
    }

    /// Waits for the end of a command, and for the mark in the kernel log that belongs to it.
    fn follow(
        &mut self,
        id: u64,
        deadline: Instant,
        outcome: &mut Outcome,
        live: &mut dyn FnMut(Stream, &[u8]),
        listening: &mut dyn FnMut(),
    ) -> Result<Status, End> {
        let mark = format!("{KMSG_MARK}{id}");
        let mut status = None;
        let mut seen = self.taken;
        loop {
            if let Some(status) = &status {
                let marked = self.kernel_log[seen..].iter().any(|record| record.text == mark);
                seen = self.kernel_log.len();
                if marked {
                    return Ok(Status::clone(status));
                }
            }
            // After the status only the mark is missing. The mark is a record, which `next()` does not return, so this
            // loop looks for it at short intervals.
            let until = if status.is_some() {
                deadline.min(Instant::now() + Duration::from_millis(20))
            } else {
                deadline
            };
            let frame = match self.next(until) {
                Ok(frame) => frame,
                Err(End::TimedOut) if Instant::now() < deadline => continue,
                Err(end) => return Err(end),
            };
            match frame.kind {
                Kind::Stdout => {
                    live(Stream::Stdout, &frame.payload);
                    outcome.stdout.extend_from_slice(&frame.payload);
                }
                Kind::Stderr => {
                    live(Stream::Stderr, &frame.payload);
                    outcome.stderr.extend_from_slice(&frame.payload);
                }
                Kind::Kmsg => {}
                Kind::Control => match serde_json::from_slice(&frame.payload) {
                    Ok(ToHost::Exited {
                        id: which,
                        code,
                        signal,
                        error,
                    }) if which == id => {
                        status = Some(match (code, signal, error) {
                            (_, _, Some(error)) => Status::NotStarted { error },
                            (Some(code), _, _) => Status::Exited { code },
                            (_, signal, _) => Status::Signalled {
                                signal: signal.unwrap_or(0),
                            },
                        });
                    }
                    Ok(ToHost::Listening { id: which }) if which == id => listening(),
                    Ok(ToHost::Request { id, request }) => {
                        let result = self.serve(&request).map_err(|e| Overrun::to_text(&e));
                        let _ = wire::write_control(&mut self.port, &ToGuest::Reply { id, result });
                    }
                    Ok(_) => {}
                    Err(e) => return Err(self.ended(End::Died(format!("the guest's init sent nonsense: {e}")))),
                },
            }
        }
    }

    fn take_log(&mut self) -> Vec<Record> {
        // Records that have already arrived belong to this command too.
        let new = self.kernel_log[self.taken..]
            .iter()
            .filter(|r| !r.text.starts_with(KMSG_MARK))
            .cloned()
            .collect();
        self.taken = self.kernel_log.len();
        new
    }

    /// Serves a request of a program in the guest, or of a test.
    ///
    /// # Errors
    ///
    /// The device is unknown or of the wrong kind, or QEMU refuses.
    pub fn serve(&mut self, request: &Request) -> Result<Value> {
        match request {
            Request::Devices => Ok(serde_json::to_value(self.devices()?)?),
            Request::Snapshot => self.snapshot(),
            Request::Kill { name } => {
                self.known(name)?;
                let alone = self.models.get(name).is_some_and(Model::is_alone);
                ensure!(alone, "device {name} has no process of its own that still runs");
                self.models.remove(name);
                Ok(json!({}))
            }
            Request::Control { name, request } => {
                self.known(name)?;
                let model = self.models.get(name);
                let model = model.with_context(|| format!("device {name} has no process that runs"))?;
                model.ask(request).with_context(|| format!("device {name}"))
            }
            Request::DeviceDel { name } => self.unplug(name),
            Request::DeviceAdd { name } => self.plug(name),
            Request::PortError { name, error } => {
                let line = format!("pcie_aer_inject_error {name} {error}");
                let answer = self
                    .qmp
                    .execute("human-monitor-command", json!({ "command-line": line }))?;
                let text = answer.as_str().unwrap_or_default().trim();
                ensure!(text.starts_with("OK "), "{line}: {text}");
                Ok(Value::Null)
            }
        }
    }

    fn known(&self, name: &str) -> Result<&Device> {
        self.topology
            .device(name)
            .with_context(|| format!("topology {} has no device {name:?}", self.topology.name))
    }

    fn unplug(&mut self, name: &str) -> Result<Value> {
        let device = self.known(name)?.clone();
        // QEMU 11.1 aborts (an assertion about memory regions) when a vfio-user device is unplugged.
        ensure!(
            !device.is_model(),
            "device {name}: QEMU cannot unplug a vfio-user device; remove and rescan it in the guest, or kill its process"
        );
        self.qmp.execute("device_del", json!({ "id": name }))?;
        let deadline = Instant::now() + UNPLUG_LIMIT * self.kernel.patience;
        self.qmp.wait_event(deadline, &format!("the end of {name}"), |event| {
            event["event"] == "DEVICE_DELETED" && event["data"]["device"] == name
        })?;
        if let Device::Ivshmem { .. } = device {
            // The removed device's name is still assigned to the memory, and the next device needs memory without a
            // name.
            self.qmp
                .execute("object-del", json!({ "id": qemu::backend_id(name) }))?;
        }
        Ok(json!({}))
    }

    fn plug(&mut self, name: &str) -> Result<Value> {
        let options = self.plan.devices.get(name).context("planned devices")?.clone();
        let size = match self.known(name)? {
            Device::Ivshmem { size, .. } => size.0,
            Device::Accel { .. } | Device::Nic { .. } => {
                bail!("device {name}: a vfio-user device cannot be unplugged, so it is there")
            }
            // QEMU cannot plug a namespace into a running drive, but it can plug a drive that has a namespace.
            Device::Nvme { .. } => {
                ensure!(
                    self.plan.drives.get(&1).is_some_and(|first| first == name),
                    "device {name}: of several drives QEMU can plug in the first alone: that one comes with its namespace"
                );
                return self.qmp.execute("device_add", options);
            }
        };
        self.qmp
            .execute("object-add", qemu::backend(&qemu::backend_id(name), size))?;
        self.qmp.execute("device_add", options)
    }

    /// Returns the present addresses of the topology's devices.
    ///
    /// # Errors
    ///
    /// QEMU does not answer.
    pub fn devices(&mut self) -> Result<BTreeMap<String, DeviceNote>> {
        let functions = self.qmp.functions()?;
        let topology = &self.topology;
        self.classifier.learn(&functions, |id| topology.device(id).is_some());
        let notes = functions.into_iter().filter_map(|function| {
            let device = topology.device(&function.id)?;
            let note = DeviceNote {
                kind: device.kind().to_owned(),
                bdf: function.bdf,
                memory: device.memory(),
            };
            Some((function.id, note))
        });
        Ok(notes.collect())
    }

    /// Returns the present counters of all devices, by name.
    ///
    /// A drive: `{"kind": "nvme", "payload": {"host": N, "accel0": N}, "read": {..}, "write": {..}, "commands": N,
    /// "failed": N}`, see [`crate::counters::Nvme`]. An accelerator or a NIC: `{"kind": "accel", "counters": ..}` with
    /// the counters of its process, or `{"kind": "accel", "gone": true}`. The key `bridges` has the result of
    /// [`bridges::count`] for all of them. The counters include all I/O that the caller has seen complete.
    ///
    /// # Errors
    ///
    /// The trace cannot be read, or QEMU or a device process does not answer.
    pub fn snapshot(&mut self) -> Result<Value> {
        self.devices()?;
        let classifier = &mut self.classifier;
        self.trace
            .read(|event| classifier.count(event))
            .context("QEMU's trace")?;
        let mut all = serde_json::Map::new();
        for (name, counters) in self.classifier.counters() {
            let mut value = serde_json::to_value(counters)?;
            value["kind"] = json!("nvme");
            // A target without bytes has an entry of 0, so that a condition on it differs from one with a wrong name.
            for by_target in ["payload", "read", "write"] {
                let lenders = self.topology.device.iter().filter(|device| device.memory() > 0);
                for target in lenders.map(Device::name).chain([HOST, UNKNOWN]) {
                    if value[by_target].get(target).is_none() {
                        value[by_target][target] = json!(0);
                    }
                }
            }
            all.insert(name.clone(), value);
        }
        for device in &self.topology.device {
            if !device.is_model() {
                continue;
            }
            let (name, kind) = (device.name(), device.kind());
            let value = match self.models.get(name) {
                Some(model) => {
                    let counters = model.counters().with_context(|| format!("counters of {name}"))?;
                    json!({ "kind": kind, "counters": counters })
                }
                None => json!({ "kind": kind, "gone": true }),
            };
            all.insert(name.to_owned(), value);
        }
        let bridges = bridges::count(&self.topology, &all);
        all.insert(bridges::BRIDGES.to_owned(), bridges);
        Ok(Value::Object(all))
    }

    /// As [`Vm::power_off`], if the caller does not wait for the guest again.
    ///
    /// # Errors
    ///
    /// Those of [`Vm::power_off`].
    pub fn shut_down(mut self) -> Result<Vec<String>> {
        self.power_off()
    }

    /// Powers the guest off. Returns the bad lines of the kernel log that no command has returned.
    ///
    /// # Errors
    ///
    /// The guest does not power off in time ([`Overrun`]). The call can be repeated, with the same time limit.
    pub fn power_off(&mut self) -> Result<Vec<String>> {
        let console_before = match self.powering_off {
            Some(count) => count,
            None => {
                ensure!(self.is_alive(), "the guest is gone already");
                let count = self.console.lock().map_err(|_| anyhow!("poisoned"))?.count;
                wire::write_control(&mut self.port, &ToGuest::PowerOff)?;
                *self.powering_off.insert(count)
            }
        };
        let limit = POWER_OFF_LIMIT * self.kernel.patience;
        let deadline = Instant::now() + limit;
        loop {
            match self.next(deadline) {
                Ok(_) => {}
                Err(End::Stopped(_)) => {}
                Err(End::TimedOut) => {
                    let tail = self.console_tail();
                    bail!(Overrun(format!("powering off took more than {limit:?}\n{tail}")))
                }
                Err(End::Panicked(line)) => bail!("{line}\n{}", self.console_tail()),
                Err(End::Died(_)) => break,
            }
        }
        in_time!(self.qemu.wait_until(deadline)?, "QEMU did not end within {limit:?}");
        let mut findings = dmesg::findings(&self.take_log());
        // Messages that the kernel logs after the end of its init are only on the console.
        let console = self.console.lock().map_err(|_| anyhow!("poisoned"))?;
        let skip = console.lines.len().saturating_sub(console.count - console_before);
        findings.extend(
            console
                .lines
                .iter()
                .skip(skip)
                .filter(|line| dmesg::is_bad(line))
                .cloned(),
        );
        Ok(findings)
    }
}

/// Creates the folder for a guest's files and sockets, which is removed when it is dropped.
///
/// # Errors
///
/// Those of creating a folder.
pub fn folder() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("p2pmem-vm-").tempdir()?)
}

/// Returns the time limit of a boot.
fn boot_limit(topology: &Topology, kernel: &Kernel) -> Duration {
    let counting = if topology.machine.count_instructions {
        COUNTING
    } else {
        1
    };
    BOOT_LIMIT * kernel.patience * counting
}

fn start_virtiofsd(paths: &Paths) -> Result<Process> {
    // virtiofsd gets the listening socket as standard input, so QEMU can connect at any time.
    let listener = UnixListener::bind(paths.root_socket())?;
    let stdin = Stdin(Some(Stdio::from(OwnedFd::from(listener))));
    let argv = [
        "/usr/libexec/virtiofsd",
        "--fd=0",
        "--shared-dir=/",
        "--sandbox=none",
        "--seccomp=none",
        // Otherwise opening a file invalidates the guest's page cache of it, and QEMU's translation of the code in
        // those pages.
        "--cache=always",
        "--readonly",
        "--log-level=warn",
    ];
    let argv = argv.map(String::from);
    Process::start("virtiofsd", &argv, stdin, &paths.dir.join("virtiofsd.log"), false)
}

/// Accepts one connection, unless QEMU ends or the deadline passes.
fn accept(listener: &UnixListener, qemu: &mut Process, deadline: Instant) -> Result<UnixStream> {
    let slice = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    loop {
        let ready = poll(
            &mut [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)],
            Some(&slice),
        )?;
        if ready > 0 {
            return Ok(listener.accept()?.0);
        }
        if let Some(status) = qemu.ended()? {
            bail!("QEMU ended ({status}): {}", qemu.describe());
        }
        in_time!(
            Instant::now() <= deadline,
            "QEMU did not connect in time: {}",
            qemu.describe()
        );
    }
}

fn read_console(from: impl std::io::Read + Send + 'static, console: Arc<Mutex<Console>>, send: Sender<Event>) {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while from.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            let panic = dmesg::is_panic(&text).then(|| text.clone());
            if let Ok(mut console) = console.lock() {
                console.lines.push_back(text);
                console.count += 1;
                if console.lines.len() > CONSOLE_LINES {
                    console.lines.pop_front();
                }
            }
            if let Some(line) = panic {
                let _ = send.send(Event::Panic(line));
            }
        }
        let _ = send.send(Event::ConsoleEnded);
    });
}

fn read_port(port: UnixStream, send: Sender<Event>) {
    thread::spawn(move || {
        let mut from = BufReader::new(port);
        let why = loop {
            match wire::read_frame(&mut from) {
                Ok(Some(frame)) => {
                    if send.send(Event::Frame(frame)).is_err() {
                        return;
                    }
                }
                Ok(None) => break "its port was closed".to_owned(),
                Err(e) => break format!("its port: {e}"),
            }
        };
        let _ = send.send(Event::PortEnded(why));
    });
}

/// Returns the folder of the test bed's topology files, relative to this crate's sources.
pub fn topologies() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../topologies")
}
