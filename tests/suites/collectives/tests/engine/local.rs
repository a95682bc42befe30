// SPDX-License-Identifier: MIT OR Apache-2.0

//! An accelerator in this process: the model behind files as those of sysfs, so that the driver and the model run without a guest.
//!
//! The driver maps a file as BAR0. Accesses to it do not trap, so a thread looks for changes of the rings' registers, forwards
//! them to the model over vfio-user, and writes the model's registers to the file. Operations are in rings only: the thread does
//! not forward the registers of commands.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use p2pmem_accel::{Accel, Settings, Shared};
use p2pmem_accel_regs::ring::{self, State, control, reg as ring_reg};
use p2pmem_accel_regs::{BAR0_SIZE, Counter, DEVICE_ID, ID, VENDOR_ID, VERSION, driver, reg};
use p2pmem_verbs::Span;
use p2pmem_vfio_user::client::Client;
use p2pmem_vfio_user::serve;
use tempfile::TempDir;

/// The address of the accelerator.
pub const BDF: &str = "0000:01:00.0";

/// Time between two looks at registers that did not change.
const PAUSE: Duration = Duration::from_micros(100);

/// What a test asks of the thread. The thread answers when it has done so.
enum Ask {
    /// Stop all rings with an error.
    Abort,
    /// End the device: its registers read as ones.
    Remove,
}

/// An accelerator with its driver's files.
pub struct LocalAccel {
    folder: TempDir,
    shared: Arc<Shared>,
    registers: Span,
    asks: Option<Sender<(Ask, Sender<()>)>>,
    bridge: Option<JoinHandle<()>>,
    server: Option<JoinHandle<()>>,
}

impl LocalAccel {
    /// Starts an accelerator with `memory` bytes of memory.
    pub fn new(memory: u64) -> Self {
        Self::with_registers(memory, memory)
    }

    /// As [`LocalAccel::new`], with another size in the register MEMORY_SIZE.
    pub fn with_registers(memory: u64, shown: u64) -> Self {
        let settings = Settings {
            memory,
            ..Settings::default()
        };
        let mut accel = Accel::new(settings).unwrap();
        let shared = accel.shared();
        let (theirs, ours) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || serve(ours, &mut accel).unwrap());
        let mut client = Client::new(theirs).unwrap();
        client.version().unwrap();

        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join(BDF);
        std::fs::create_dir(&device).unwrap();
        for (name, text) in [
            ("vendor", format!("{VENDOR_ID:#06x}\n")),
            ("device", format!("{DEVICE_ID:#06x}\n")),
            ("enable", "1\n".to_owned()),
        ] {
            std::fs::write(device.join(name), text).unwrap();
        }
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(device.join("resource0"))
            .unwrap();
        file.set_len(BAR0_SIZE).unwrap();
        let registers = Span::file(&file, BAR0_SIZE as usize).unwrap();
        for (register, value) in [
            (reg::ID, u64::from(ID) | (u64::from(VERSION) << 32)),
            (reg::MEMORY_SIZE, shown),
        ] {
            registers.write(register as usize, &value.to_le_bytes());
        }
        let (asks, asked) = channel();
        let bridge = Bridge {
            client,
            registers: registers.clone(),
            rings: Default::default(),
        };
        Self {
            folder,
            shared,
            registers,
            asks: Some(asks),
            bridge: Some(std::thread::spawn(move || bridge.run(&asked))),
            server: Some(server),
        }
    }

    /// Opens the accelerator, as a program does.
    pub fn open(&self) -> driver::Accel {
        driver::Accel::open_in(self.folder.path(), BDF).unwrap()
    }

    /// Maps the accelerator's memory.
    pub fn span(&self) -> Span {
        let memory = self.shared.memory();
        let file = File::from(memory.fd().try_clone_to_owned().unwrap());
        Span::file(&file, memory.len() as usize).unwrap()
    }

    /// Returns the value of a counter.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.shared.counters()[counter as usize]
    }

    /// Returns the producer index of a ring.
    pub fn tail(&self, number: u32) -> u32 {
        let mut word = [0; 4];
        self.registers
            .read(ring::register(number, ring_reg::TAIL) as usize, &mut word);
        u32::from_le_bytes(word)
    }

    fn ask(&self, what: Ask) {
        let (answer, answered) = channel();
        self.asks.as_ref().unwrap().send((what, answer)).unwrap();
        answered.recv().unwrap();
    }

    /// Aborts what all rings do.
    pub fn abort(&self) {
        self.ask(Ask::Abort);
    }

    /// Ends the device, whose registers read as ones then. Its files remain.
    pub fn remove(&self) {
        self.ask(Ask::Remove);
    }

    /// Removes the device's files.
    pub fn remove_files(&self) {
        std::fs::remove_dir_all(self.folder.path().join(BDF)).unwrap();
    }
}

impl Drop for LocalAccel {
    fn drop(&mut self) {
        self.asks = None;
        for thread in [self.bridge.take(), self.server.take()] {
            let ended = thread.unwrap().join();
            assert!(
                ended.is_ok() || std::thread::panicking(),
                "a thread of the accelerator failed"
            );
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Seen {
    enabled: bool,
    /// Disabled by the driver, and the device has not said so yet.
    ending: bool,
    tail: u32,
}

struct Bridge {
    client: Client,
    registers: Span,
    rings: [Seen; ring::COUNT as usize],
}

impl Bridge {
    fn load32(&self, register: u64) -> u32 {
        let mut word = [0; 4];
        self.registers.read(register as usize, &mut word);
        fence(Ordering::SeqCst);
        u32::from_le_bytes(word)
    }

    fn store(&self, register: u64, bytes: &[u8]) {
        fence(Ordering::SeqCst);
        self.registers.write(register as usize, bytes);
    }

    fn run(mut self, asked: &Receiver<(Ask, Sender<()>)>) {
        loop {
            match asked.try_recv() {
                Ok((Ask::Abort, answer)) => {
                    let abort = p2pmem_accel_regs::control::ABORT.to_le_bytes();
                    self.client.write(0, reg::CONTROL, &abort).unwrap();
                    answer.send(()).unwrap();
                }
                Ok((Ask::Remove, answer)) => {
                    self.store(0, &vec![0xff; BAR0_SIZE as usize]);
                    answer.send(()).unwrap();
                    return;
                }
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            let mut changed = false;
            for number in 0..ring::COUNT {
                changed |= self.look(number);
            }
            if !changed {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Forwards registers of a ring in both directions. Returns whether the driver changed one.
    fn look(&mut self, number: u32) -> bool {
        let register = |register| ring::register(number, register);
        let mut seen = self.rings[number as usize];
        let mut changed = false;
        let value = self.load32(register(ring_reg::CONTROL));
        let enable = value & control::ENABLE != 0;
        if enable && !seen.enabled {
            for pair in [ring_reg::BASE, ring_reg::ENTRIES, ring_reg::REPORT] {
                let mut bytes = [0; 8];
                self.registers.read(register(pair) as usize, &mut bytes);
                self.client.write(0, register(pair), &bytes).unwrap();
            }
            // Sets both indices.
            seen.tail = self.load32(register(ring_reg::HEAD));
            let head = seen.tail.to_le_bytes();
            self.client.write(0, register(ring_reg::HEAD), &head).unwrap();
            self.store(register(ring_reg::TAIL), &head);
        }
        if enable != seen.enabled {
            self.client
                .write(0, register(ring_reg::CONTROL), &value.to_le_bytes())
                .unwrap();
            (seen.enabled, seen.ending) = (enable, !enable);
            changed = true;
        }
        let tail = self.load32(register(ring_reg::TAIL));
        if enable && tail != seen.tail {
            self.client
                .write(0, register(ring_reg::TAIL), &tail.to_le_bytes())
                .unwrap();
            seen.tail = tail;
            changed = true;
        }
        if enable || seen.ending {
            let state = self.client.read32(0, register(ring_reg::STATE)).unwrap();
            let progress = self.client.read64(0, register(ring_reg::HEAD)).unwrap();
            // When the driver finds the ring disabled, the driver writes HEAD.
            self.store(register(ring_reg::HEAD), &progress.to_le_bytes());
            self.store(register(ring_reg::STATE), &state.to_le_bytes());
            seen.ending &= state != State::Disabled as u32;
        }
        self.rings[number as usize] = seen;
        changed
    }
}
