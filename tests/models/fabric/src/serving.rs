// SPDX-License-Identifier: MIT OR Apache-2.0

//! A process that serves devices: each waits at its socket for one client after another, and a signal ends them all.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use p2pmem_vfio_user::{Device, Health, Listener, serve};
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing::{error, info};

use crate::control::Control;

/// How long clients may take to be served to their end after a signal.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Where a device is found.
#[derive(Clone, Debug)]
pub struct Place {
    /// Unix socket for the emulator.
    pub socket: PathBuf,
    /// Unix socket that answers questions, if there is to be one.
    pub control: Option<PathBuf>,
    /// File to write the counters to, as JSON, whenever a client has gone and at the end.
    pub counters: Option<PathBuf>,
}

impl Place {
    /// Removes the sockets.
    fn clear(&self) {
        for socket in std::iter::once(&self.socket).chain(&self.control) {
            // Gone already is as good.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// A place at which somebody listens.
#[derive(Debug)]
pub struct Seat {
    name: String,
    place: Place,
    control: Control,
    listener: Listener,
}

/// Makes an error say which path it is about.
fn at(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    let path = path.display().to_string();
    move |error| io::Error::new(error.kind(), format!("cannot listen on {path}: {error}"))
}

impl Seat {
    /// Listens for a device called `name`.
    ///
    /// # Errors
    ///
    /// A socket cannot be made.
    pub fn take(name: &str, place: Place, control: Control) -> io::Result<Self> {
        if let Some(path) = &place.control {
            control.clone().listen(path).map_err(at(path))?;
        }
        let listener = Listener::bind(&place.socket).map_err(at(&place.socket))?;
        Ok(Self {
            name: name.to_owned(),
            place,
            control,
            listener,
        })
    }

    /// Returns the function that removes this seat when the process ends.
    pub fn at_end(&self) -> impl FnOnce() + Send + 'static {
        let (name, place, control) = (self.name.clone(), self.place.clone(), self.control.clone());
        move || {
            save_counters(&name, &place, &control);
            place.clear();
        }
    }

    /// Serves `device` to one client after another, until the process ends, or with `once` until the first has gone. A
    /// device that panics, or whose worker did, is not served again; nothing else suffers.
    ///
    /// Returns the device if the process is about to end: its worker answers the last question for counters, so the caller keeps
    /// the device until the process exits.
    ///
    /// # Errors
    ///
    /// Nobody can be waited for any more.
    pub fn serve(
        self,
        mut device: Box<dyn Device>,
        health: &Health,
        ending: &Ending,
        once: bool,
    ) -> io::Result<Option<Box<dyn Device>>> {
        let name = &*self.name;
        loop {
            let stream = self.listener.accept()?;
            info!(name, "client connected");
            let client = ending.serving(stream.try_clone()?);
            self.control.set_connected(true);
            let result = catch_unwind(AssertUnwindSafe(|| serve(stream, &mut *device)));
            self.control.set_connected(false);
            if let Ok(Err(error)) = &result {
                error!(name, %error, "connection lost");
            }
            if result.is_err() || !health.is_good() {
                error!(name, "the device is dead");
                self.control.set_dead();
            }
            save_counters(name, &self.place, &self.control);
            let ends = ending.served(client);
            if result.is_err() || !health.is_good() {
                // What it is made of may be half done, and panic again.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(device)));
                return Ok(None);
            }
            if ends || once {
                self.place.clear();
                return Ok(ends.then_some(device));
            }
        }
    }
}

/// Writes the counters beside the file and moves them into place, so that nobody reads half of them.
fn save_counters(name: &str, place: &Place, control: &Control) {
    let Some(path) = &place.counters else { return };
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let result = control.counters().and_then(|counters| {
        std::fs::write(&new, format!("{counters:#}\n"))
            .and_then(|()| std::fs::rename(&new, path))
            .map_err(|error| error.to_string())
    });
    if let Err(error) = result {
        error!(name, error, path = %path.display(), "cannot write the counters");
    }
}

#[derive(Debug, Default)]
struct State {
    ending: bool,
    next: u64,
    clients: BTreeMap<u64, UnixStream>,
}

/// Lets a signal end the clients' connections first: an emulator in the middle of an access survives that, but not a
/// socket closed with its request unread.
#[derive(Debug, Default)]
pub struct Ending {
    state: Mutex<State>,
    idle: Condvar,
}

impl Ending {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client is about to be served. Returns what [`Ending::served`] wants.
    fn serving(&self, stream: UnixStream) -> u64 {
        let mut state = self.lock();
        if state.ending {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let client = state.next;
        state.next += 1;
        state.clients.insert(client, stream);
        client
    }

    /// Records that the client has disconnected. Returns whether the process has to end.
    fn served(&self, client: u64) -> bool {
        let mut state = self.lock();
        state.clients.remove(&client);
        self.idle.notify_all();
        state.ending
    }

    /// Returns whether the process has to end.
    pub fn has_begun(&self) -> bool {
        self.lock().ending
    }

    /// The process shall end: cuts all clients off and waits until they were served to their end.
    fn begin(&self) {
        let mut state = self.lock();
        state.ending = true;
        for stream in state.clients.values() {
            // Fails only if the client was faster.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let waited = self
            .idle
            .wait_timeout_while(state, END_TIMEOUT, |state| !state.clients.is_empty());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !state.clients.is_empty() {
            error!(
                clients = state.clients.len(),
                "clients were not served to an end within {} s",
                END_TIMEOUT.as_secs()
            );
        }
    }

    /// Ends the process in good order on SIGTERM and SIGINT: clients first, then what `seats` want done.
    ///
    /// # Errors
    ///
    /// Signals cannot be watched for.
    pub fn on_signals<'a>(self: &Arc<Self>, seats: impl IntoIterator<Item = &'a Seat>) -> io::Result<()> {
        let last: Vec<_> = seats.into_iter().map(Seat::at_end).collect();
        let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT])?;
        let ending = Arc::clone(self);
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            if signals.forever().next().is_none() {
                return;
            }
            ending.begin();
            last.into_iter().for_each(|last| last());
            std::process::exit(0);
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Controlled;
    use p2pmem_vfio_user::client::Client;
    use p2pmem_vfio_user::{Bus, ConfigBuilder, ConfigSpace, Region, Worker};
    use serde_json::{Value, json};
    use std::sync::mpsc;
    use std::time::Instant;

    struct Nothing;

    impl Controlled for Nothing {
        fn counters(&self) -> Result<Value, String> {
            Ok(json!({"things": 3}))
        }
        fn reset_counters(&self) -> Result<(), String> {
            Ok(())
        }
        fn state(&self) -> Result<Value, String> {
            Ok(json!({}))
        }
    }

    /// A device whose register 0 makes it panic, on the serving thread or on its worker.
    struct Fragile {
        bus: Bus,
        config: ConfigSpace,
        region: Region,
        worker: Worker,
        tell: mpsc::Sender<()>,
    }

    impl Fragile {
        fn new() -> Self {
            let bus = Bus::new(1);
            let (tell, told) = mpsc::channel();
            let worker = Worker::spawn("fragile", bus.clone(), move || {
                if told.recv().is_ok() {
                    panic!("the worker, on purpose");
                }
            });
            Self {
                bus,
                config: ConfigBuilder::new(1, 1).build().unwrap(),
                region: Region::registers(4096),
                worker: worker.unwrap(),
                tell,
            }
        }
    }

    impl Device for Fragile {
        fn bus(&self) -> &Bus {
            &self.bus
        }
        fn config(&mut self) -> &mut ConfigSpace {
            &mut self.config
        }
        fn region(&self, index: u32) -> Option<&Region> {
            (index == 0).then_some(&self.region)
        }
        fn read(&mut self, _region: u32, _offset: u64, _data: &mut [u8]) {}
        fn write(&mut self, _region: u32, _offset: u64, data: &[u8]) {
            match data[0] {
                0 => panic!("the serving thread, on purpose"),
                _ => self.tell.send(()).unwrap(),
            }
        }
        fn reset(&mut self) {}
    }

    fn dies_of(value: u8) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let place = Place {
            socket: path("device"),
            control: Some(path("control")),
            counters: Some(path("counters")),
        };
        let control = Control::new(Arc::new(Nothing));
        let seat = Seat::take("fragile", place, control.clone()).unwrap();
        let device = Fragile::new();
        let health = device.worker.health();
        let ending = Arc::new(Ending::default());
        let server = std::thread::spawn({
            let (health, ending) = (health.clone(), Arc::clone(&ending));
            // Made into a trait object in the thread, as it is not one that can be sent.
            move || seat.serve(Box::new(device), &health, &ending, false).map(drop)
        });
        let connect = || UnixStream::connect(path("device")).map(|stream| Client::new(stream).unwrap());
        let mut client = connect().unwrap();
        client.version().unwrap();
        drop(client);
        // A client that goes is followed by the next.
        let mut client = connect().unwrap();
        client.version().unwrap();
        let state = |name: &str| control.answer(br#"{"get":"state"}"#)["state"][name].clone();
        assert_eq!((state("connected"), state("dead")), (json!(true), json!(false)));
        let _ = client.write(0, 0, &[value; 4]);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut data = [0; 4];
        while client.read(0, 0, &mut data).is_ok() {
            assert!(Instant::now() < deadline, "the connection should end");
        }
        server.join().unwrap().unwrap();
        assert_eq!((state("connected"), state("dead")), (json!(false), json!(true)));
        assert!(connect().is_err(), "nobody waits for clients of a dead device");
        assert!(
            UnixStream::connect(path("control")).is_ok(),
            "but questions are answered"
        );
        let counters: Value = serde_json::from_slice(&std::fs::read(path("counters")).unwrap()).unwrap();
        assert_eq!(counters, json!({"things": 3}));
    }

    #[test]
    fn a_panic_of_a_device_is_the_end_of_it() {
        dies_of(0);
    }

    #[test]
    fn a_panic_of_a_worker_is_the_end_of_its_device() {
        dies_of(1);
    }

    #[test]
    fn a_socket_that_cannot_be_is_named() {
        let place = Place {
            socket: "/nonexistent/device".into(),
            control: None,
            counters: None,
        };
        let error = Seat::take("x", place, Control::new(Arc::new(Nothing))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/device"));
    }
}
