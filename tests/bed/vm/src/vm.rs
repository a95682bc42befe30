// SPDX-License-Identifier: MIT OR Apache-2.0

//! A running guest: boots a topology, runs commands in it, and ends all processes that it started.
//!
//! One thread reads the console, and one reads the port of the guest's init. Both send their input to the thread that
//! uses the [`Vm`], which waits for it with a deadline. A panic shows on the console; the end of QEMU is the end of
//! both streams. The runner can therefore distinguish a guest that ended from one that exceeds its time limit.

mod devices;
mod exec;
mod input;
mod start;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use p2pmem_guest::in_time;
use p2pmem_guest::limits::Overrun;
use p2pmem_guest::wire::{self, Frame, KMSG_MARK, Kind, Network, ToGuest, ToHost};

pub use self::input::Stopper;
use self::input::{Console, Event, Why, read_console, read_port};
use self::start::{accept, start_virtiofsd};
use crate::accelerator::Accelerator;
pub use crate::command::{Command, Outcome, Status, Stream};
use crate::counters::Classifier;
use crate::dmesg::{self, Record};
use crate::kernel::Kernel;
use crate::models::{self, Model, Models};
use crate::process::{Process, Stdin};
use crate::qemu::{self, Ends, Paths, Plan};
use crate::qmp::Qmp;
use crate::topology::{Device, Layout, Topology};
use crate::trace;

/// The time limit of a boot, long enough for a host with other load.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// The factor for time limits of a guest whose clocks count instructions.
const COUNTING: u32 = 4;
/// The time limit for a guest to power off.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(120);
/// The time for the rest of the console output to arrive after a panic.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// The number of console lines in error messages.
const CONSOLE_TAIL: usize = 40;

/// Options of a boot beside the topology.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The kernel, instead of the sandbox's stock kernel.
    pub kernel: Option<Kernel>,
    /// The folder into which [`Vm::keep_images`] moved the images of an earlier guest. The guest takes over the images of its
    /// drives that are there. All other drives begin empty.
    pub images: Option<PathBuf>,
}

/// The reason why the guest can run no more commands.
#[derive(Debug, Clone)]
enum End {
    TimedOut,
    Stopped(Why),
    Panicked(String),
    Died(String),
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
    /// The drives some of whose operations fail.
    faulty: BTreeSet<String>,
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

/// Returns the path of a program of user space, which is in the folder `P2PMEM_BIN`, or beside the runner.
///
/// # Errors
///
/// The program was not built.
pub fn tool(name: &str) -> Result<String> {
    let path = match std::env::var_os("P2PMEM_BIN") {
        Some(folder) => PathBuf::from(folder).join(name),
        None => sibling(name)?,
    };
    ensure!(path.is_file(), "{} is not there: run `make user`", path.display());
    Ok(qemu::utf8(&path)?.to_owned())
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
        let models = if topology.needs_fabric() {
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
        let plan = qemu::plan(topology, &paths, &kernel, Accelerator::chosen()?, ends.as_ref())?;
        for device in &topology.device {
            if let Device::Nvme { name, image, .. } = device {
                let path = paths.image(name);
                let kept = options.images.as_ref().zip(path.file_name());
                match kept
                    .map(|(folder, file)| folder.join(file))
                    .filter(|kept| kept.exists())
                {
                    Some(kept) => fs::rename(&kept, &path).with_context(|| kept.display().to_string())?,
                    None => File::create(path)?.set_len(image.0)?,
                }
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
            faulty: BTreeSet::new(),
            next_command: 1,
            end: None,
            ending: false,
            powering_off: None,
            kernel,
            release: String::new(),
            boot_time: Duration::ZERO,
            _dir: dir,
        };
        vm.set_up(network, start, boot_limit)
            .with_context(|| format!("topology {}: the guest did not come up", topology.name))?;
        vm.boot_time = start.elapsed();
        Ok(vm)
    }

    fn set_up(&mut self, network: Option<Network>, start: Instant, boot_limit: Duration) -> Result<()> {
        let mut network = network;
        let deadline = start + boot_limit;
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
                        time_factor: self.kernel.time_factor,
                    };
                    wire::write_control(&mut self.port, &setup)?;
                }
                // Instructions are no time.
                ToHost::Ready { .. } if self.topology.machine.count_instructions => return Ok(()),
                ToHost::Ready { uptime } => return check_clock(uptime, start.elapsed()),
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

    /// Returns the process id of QEMU, to kill it while a command runs.
    pub fn qemu_id(&self) -> u32 {
        self.qemu.id()
    }

    /// Kills QEMU, and moves the images of the drives to a folder on the same file system, for
    /// [`Options::images`]. They have what QEMU had written to them.
    ///
    /// # Errors
    ///
    /// An image cannot be moved.
    pub fn keep_images(self, folder: &Path) -> Result<()> {
        let Vm {
            qemu, topology, _dir, ..
        } = self;
        drop(qemu);
        let paths = Vm::paths(_dir.path())?;
        for device in &topology.device {
            if let Device::Nvme { name, .. } = device {
                let path = paths.image(name);
                let file = path.file_name().context("an image without a name")?;
                fs::rename(&path, folder.join(file)).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
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
        let limit = POWER_OFF_LIMIT * self.kernel.time_factor;
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

/// Checks that a guest's clock is not too fast. When a guest boots, its kernel counts the ticks of the processor during some ms of another
/// clock. If the host does not run QEMU in these ms, the kernel expects too few ticks in a second, and all of its times are too long.
///
/// # Errors
///
/// An [`Overrun`], as the next boot has another clock.
fn check_clock(uptime: f64, elapsed: Duration) -> Result<()> {
    let elapsed = elapsed.as_secs_f64();
    if uptime > elapsed + 1.0 {
        bail!(Overrun(format!(
            "the guest's clock is wrong: it runs for {uptime:.1} s, and its machine for {elapsed:.1} s"
        )));
    }
    Ok(())
}

/// Returns the time limit of a boot.
fn boot_limit(topology: &Topology, kernel: &Kernel) -> Duration {
    let counting = if topology.machine.count_instructions {
        COUNTING
    } else {
        1
    };
    BOOT_LIMIT * kernel.time_factor * counting
}

/// Returns the folder of the test bed's topology files, relative to this crate's sources.
pub fn topologies() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../topologies")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_too_fast_is_an_overrun() {
        let elapsed = Duration::from_secs(4);
        for uptime in [0.5, 3.9, 4.9] {
            check_clock(uptime, elapsed).unwrap();
        }
        assert!(Overrun::is(&check_clock(22.8, elapsed).unwrap_err()));
    }
}
